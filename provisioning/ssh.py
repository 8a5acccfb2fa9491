"""The way to nodes that are set up, with fabric: only to hosts whose key is recorded; none is learned on the way."""

from __future__ import annotations

import base64
import io
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from icom import names
from icom.errors import IcomError
from provisioning import transport
from provisioning.aws import POLL_SECONDS, NodesFailed
from provisioning.cluster import Node
from provisioning.folder import ClusterFolder
from provisioning.transport import Ended, Running, Transport

if TYPE_CHECKING:
    from fabric import Connection
    from invoke.runners import Promise

CONNECT_SECONDS = 10
LOGIN_SECONDS = 90
"""How long a node may refuse a login: sshd runs before cloud-init has put the key there, and pam_nologin holds it."""
SEND_SECONDS = 1800
"""For a file: icom's own are 20 MB, and some lines are slow."""
PIECE = 1 << 18
"""Bytes that are sent between two looks at whether to stop."""
KEEPALIVE_SECONDS = 15


class OtherKey(IcomError):
    """What answers has another host key, `seen`, than the node."""

    def __init__(self, message: str, seen: str) -> None:
        super().__init__(message)
        self.seen = seen


class LoginRefused(NodesFailed):
    """The node is the right one, and does not let us in."""


@dataclass(frozen=True)
class Login:
    """How to log in to the nodes."""

    folder: ClusterFolder
    user: str
    identity: Path


def connect(login: Login, node: Node, keys: Sequence[str] | None = None) -> Connection:
    """An open fabric Connection to a node.

    Args:
        login: user and key.
        node: where to.
        keys: host keys to accept; None takes those that are recorded for the node.

    Raises:
        IcomError: no key is recorded; OtherKey: the host has another one; LoginRefused: it does not let us in.
        OSError, EOFError, paramiko's SSHException: it cannot be reached (yet).
    """
    import paramiko
    from fabric import Config, Connection

    accepted = login.folder.host_keys(node.id) if keys is None else list(keys)
    if not accepted:
        raise IcomError(f"The host key of {node.label} is not known on this computer: it was made on another one.")
    address = names.address(node.address)
    for key in accepted:
        kind, blob = key.split()[:2]
        client = paramiko.SSHClient()
        client.set_missing_host_key_policy(paramiko.RejectPolicy())
        client.get_host_keys().add(address, kind, paramiko.PKey.from_type_string(kind, base64.b64decode(blob)))
        # Not from the user's ssh config: what it says about other hosts is not for these.
        connection = Connection(address, user=login.user, config=Config(lazy=True))
        connection.client = client
        connection.connect_timeout = CONNECT_SECONDS
        connection.connect_kwargs = {
            "key_filename": str(login.identity),
            "look_for_keys": False,
            "allow_agent": False,
            "banner_timeout": CONNECT_SECONDS,
            "auth_timeout": CONNECT_SECONDS,
            "channel_timeout": CONNECT_SECONDS,  # paramiko's default is an hour
        }
        try:
            connection.open()
            connection.transport.set_keepalive(KEEPALIVE_SECONDS)  # others may be set up for long meanwhile
            return connection
        except paramiko.BadHostKeyException as error:
            connection.close()
            seen = f"{error.key.get_name()} {error.key.get_base64()}"
        except paramiko.AuthenticationException as error:
            connection.close()
            raise LoginRefused(
                f"{node.role} ({node.id}, {address}) does not let {login.user} in with {login.identity}: {error}. "
                "Does its image have another user? --ssh_user",
                [node.id],
            ) from error
    raise OtherKey(
        f"{node.role} at {address} is not {node.id}, or its host key was changed: it shows {seen}, not "
        f"{' or '.join(accepted)}. Nothing was sent to it. If you did not change that key yourself, somebody may be in "
        "between.",
        seen,
    )


def patient_connect(
    login: Login, node: Node, wait_minutes: float, check: Callable[[], None], keys: Sequence[str] | None = None
) -> SshTransport:
    """Connect, as `connect` does, to a node that may still be booting or restarting its sshd.

    Raises:
        IcomError: as connect; NodesFailed: it cannot be reached in time, or refuses the login for LOGIN_SECONDS.
    """
    import paramiko

    deadline, pause = transport.CLOCK() + wait_minutes * 60, 0.25
    refused = False
    while True:
        check()
        try:
            return SshTransport(connect(login, node, keys), node, check)
        except LoginRefused:
            if not refused:
                refused, deadline = True, min(deadline, transport.CLOCK() + LOGIN_SECONDS)
            if transport.CLOCK() >= deadline:
                raise
        except (OSError, EOFError, paramiko.SSHException) as error:
            if transport.CLOCK() >= deadline:
                raise NodesFailed(
                    f"{node.label} cannot be reached by ssh at {node.address} after "
                    f"{wait_minutes:g} minutes: {error}. Does --ssh_from cover this computer?",
                    [node.id],
                ) from error
        time.sleep(pause)
        pause = min(2 * pause, POLL_SECONDS)


class SshTransport(Transport):
    """A node over fabric, for as long as the block lasts: `with patient_connect(…) as node`."""

    def __init__(self, connection: Connection, node: Node, check: Callable[[], None] = lambda: None) -> None:
        import paramiko

        super().__init__(node.label, check)
        self.connection, self.broken = connection, (OSError, EOFError, paramiko.SSHException)

    def __enter__(self) -> SshTransport:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.connection.close()
        except self.broken:  # sftp says goodbye, also to a node that is gone
            self.connection.client.close()

    def send(self, files: Mapping[str, bytes | Path], seconds: float = SEND_SECONDS) -> None:
        """Write files by sftp, each whole or not at all, for their owner alone; each may take so many seconds."""
        for path, content in files.items():
            self._send(path, content if isinstance(content, bytes) else content.read_bytes(), seconds)

    def _send(self, path: str, content: bytes, seconds: float) -> None:
        self.check()
        began = transport.CLOCK()
        # paramiko waits for ever for a node that takes nothing.
        over = threading.Timer(seconds, self.connection.transport.close)
        over.start()
        try:
            sftp = self.connection.sftp()
            with sftp.open(f"{path}.new", "wb") as file:
                file.chmod(0o600)
                file.set_pipelined(True)  # else each piece waits for an answer
                for start in range(0, len(content), PIECE):
                    self.check()
                    file.write(content[start : start + PIECE])
            sftp.posix_rename(f"{path}.new", path)
        except self.broken as error:
            late = f" in {seconds:g} s" if transport.CLOCK() - began >= seconds else ""
            raise IcomError(f"{self.name}: {path} could not be written there{late}: {error}") from error
        finally:
            over.cancel()

    def _start(self, line: str, on_line: Callable[[str], None] | None) -> Running:
        streams = {"out_stream": _Lines(on_line), "err_stream": _Lines(on_line)} if on_line else {"hide": True}
        promise = self.connection.run(line, **streams, warn=True, in_stream=False, asynchronous=True)
        return Running(lambda: bool(promise.runner.process_is_finished), promise.runner.kill, lambda: _ended(promise))


def _ended(promise: Promise) -> Ended:
    done = promise.join()
    return Ended(done.exited, done.stdout, done.stderr)


class _Lines(io.TextIOBase):
    """A stream that gives whole lines to a function, plain: a terminal is to show them."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line, self._rest = on_line, ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in filter(str.strip, map(names.plain, lines)):
            self._on_line(line.strip())
        return len(text)

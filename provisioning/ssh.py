"""ssh to the nodes of a cluster with fabric: only to hosts whose key is recorded; none is learned on the way."""

from __future__ import annotations

import base64
import io
import shlex
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from icom import names
from icom.errors import IcomError
from provisioning.aws import POLL_SECONDS, NodesFailed
from provisioning.cluster import Node
from provisioning.folder import ClusterFolder
from provisioning.script import Script

CONNECT_SECONDS = 10
LOGIN_SECONDS = 90
"""How long a node may refuse a login: sshd runs before cloud-init has put the key there, and pam_nologin holds it."""
STEP_SECONDS = 300
SEND_SECONDS = 1800
"""For a file: icom's own are 20 MB, and some lines are slow."""
FIRST_LOOK_SECONDS, LOOK_SECONDS = 0.005, 0.2
CLOCK, PAUSE = time.monotonic, time.sleep
PIECE = 1 << 18
"""Bytes that are sent between two looks at whether to stop."""
KEEPALIVE_SECONDS = 15
TAIL_LINES = 12


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


def connect(login: Login, node: Node, keys: Sequence[str] | None = None) -> Any:
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
        raise IcomError(
            f"The host key of {node.role} ({node.id}) is not known on this computer: it was made on another one."
        )
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
) -> Any:
    """Connect, as `connect` does, to a node that may still be booting or restarting its sshd.

    Raises:
        IcomError: as connect; NodesFailed: it cannot be reached in time, or refuses the login for LOGIN_SECONDS.
    """
    import paramiko

    deadline, pause = CLOCK() + wait_minutes * 60, 0.25
    refused = False
    while True:
        check()
        try:
            return connect(login, node, keys)
        except LoginRefused:
            if not refused:
                refused, deadline = True, min(deadline, CLOCK() + LOGIN_SECONDS)
            if CLOCK() >= deadline:
                raise
        except (OSError, EOFError, paramiko.SSHException) as error:
            if CLOCK() >= deadline:
                raise NodesFailed(
                    f"{node.role} ({node.id}) cannot be reached by ssh at {node.address} after "
                    f"{wait_minutes:g} minutes: {error}. Does --ssh_from cover this computer?",
                    [node.id],
                ) from error
        time.sleep(pause)
        pause = min(2 * pause, POLL_SECONDS)


def step(
    connection: Any,
    node: Node,
    command: str | Script,
    check: Callable[[], None] = lambda: None,
    seconds: int = STEP_SECONDS,
    on_line: Callable[[str], None] | None = None,
) -> str:
    """Run a shell command on a node to its end; what it printed.

    Args:
        connection: an open one to the node.
        node: which one that is.
        command: a line for its shell, or a program.
        check: called before; what it raises stops.
        seconds: how long the command may take.
        on_line: given each line as it is printed, on a thread of its own.

    Raises:
        IcomError: it failed, took too long or the connection broke; names the node and shows its last lines.
    """
    import paramiko

    check()
    streams = {"out_stream": _Lines(on_line), "err_stream": _Lines(on_line)} if on_line else {"hide": True}
    line = command.line if isinstance(command, Script) else command
    deadline, pause = CLOCK() + seconds, FIRST_LOOK_SECONDS
    try:
        running = connection.run(line, **streams, warn=True, in_stream=False, asynchronous=True)
        try:
            while not running.runner.process_is_finished:
                check()
                if CLOCK() >= deadline:
                    raise IcomError(f"{node.role} ({node.id}): no end after {seconds} s of: {command}")
                PAUSE(pause)
                pause = min(2 * pause, LOOK_SECONDS)
        except BaseException:
            running.runner.kill()
            raise
        done = running.join()
    except (OSError, EOFError, paramiko.SSHException) as error:
        raise IcomError(f"{node.role} ({node.id}): the connection broke ({error}) during: {command}") from error
    if done.failed:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()[-TAIL_LINES:]
        shown = "\n  ".join(lines) or "(no output)"
        raise IcomError(f"{node.role} ({node.id}): exit code {done.exited} of: {command}\n  {shown}")
    return str(done.stdout)


class _Lines(io.TextIOBase):
    """A stream that gives whole lines to a function, plain: a terminal is to show them."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line, self._rest = on_line, ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in filter(str.strip, map(names.plain, lines)):
            self._on_line(line.strip())
        return len(text)


def send(
    connection: Any,
    node: Node,
    path: str,
    content: bytes,
    check: Callable[[], None] = lambda: None,
    seconds: float = SEND_SECONDS,
) -> None:
    """Write a file of any size on a node by sftp, for its owner alone. `path` is relative to the home folder.

    Raises:
        IcomError: the node has no room for it, it took too long, or the connection broke.
    """
    import paramiko

    check()
    began = CLOCK()
    over = threading.Timer(seconds, connection.transport.close)  # paramiko waits for ever for a node that takes nothing
    over.start()
    try:
        with connection.sftp().open(path, "wb") as file:
            file.chmod(0o600)
            file.set_pipelined(True)  # else each piece waits for an answer
            for start in range(0, len(content), PIECE):
                check()
                file.write(content[start : start + PIECE])
    except (OSError, EOFError, paramiko.SSHException) as error:
        late = f" in {seconds:g} s" if CLOCK() - began >= seconds else ""
        raise IcomError(f"{node.role} ({node.id}): {path} could not be written there{late}: {error}") from error
    finally:
        over.cancel()


def write_file(connection: Any, node: Node, path: str, text: str, check: Callable[[], None]) -> None:
    """Write a small file on a node, whole or not at all, for its owner alone. `path` is relative to the home folder."""
    content = base64.b64encode(text.encode()).decode()
    name = shlex.quote(path)
    command = f"umask 077; printf %s {content} | base64 -d > {name}.new && mv {name}.new {name}"
    step(connection, node, command, check)

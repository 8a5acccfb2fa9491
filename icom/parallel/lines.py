"""Connections from every process to rank 0 that carry nothing: a connection's end is the end of its process.

Rank 0 sends random bytes to whoever connects, and takes whoever signs them together with his rank, once per rank. All
others are dropped, without anybody waiting for them; when all ranks are there, nobody can connect any more.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import sys
import time
from dataclasses import dataclass, field

from icom.parallel.secret import SIGNATURE_BYTES, is_signed, sign

ANSWER_SECONDS = 5.0
"""A caller has so long to say who he is."""
MOST_CALLERS = 64
"""Who may be about to say who they are; with one more, the one who has taken longest is dropped."""

_NONCE_BYTES, _RANK_BYTES = 16, 4
_ANSWER_BYTES = _RANK_BYTES + SIGNATURE_BYTES
_WELCOME, _GOODBYE = b"+", b"."


@dataclass(eq=False)
class _Caller:
    """Somebody who has connected and has not yet said who he is."""

    line: socket.socket
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(_NONCE_BYTES))
    late: float = field(default_factory=lambda: time.monotonic() + ANSWER_SECONDS)
    answer: bytes = b""


class Lines:
    """Rank 0's end of the lines of all other ranks."""

    def __init__(self, server: socket.socket, size: int, key: bytes) -> None:
        """Args: a listening socket, which is closed here; how many processes there are; of the signatures."""
        self._server, self._key = server, key
        self._port = server.getsockname()[1]
        self._missing = set(range(1, size))
        self._lines: list[socket.socket] = []
        self._callers: list[_Caller] = []  # the longest waiting first
        self._complained = False
        self._selector = selectors.DefaultSelector()
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ)
        self._close_when_complete()

    def poll(self, seconds: float) -> set[int]:
        """Attend to whoever does something within this time.

        Returns:
            Ranks whose line has ended without a goodbye.
        """
        ended = set()
        for event, _ in self._selector.select(seconds):
            who = event.data
            if who is None:
                self._accept()
            elif isinstance(who, int):
                assert isinstance(event.fileobj, socket.socket)
                self._selector.unregister(event.fileobj)
                if not said_goodbye(event.fileobj):
                    ended.add(who)
            elif who in self._callers:
                self._hear(who)
        now = time.monotonic()
        for caller in [caller for caller in self._callers if caller.late < now]:
            self._drop(caller)
        return ended

    def close(self) -> None:
        """Hang up on everybody."""
        self._selector.close()
        for line in (self._server, *self._lines, *(caller.line for caller in self._callers)):
            line.close()

    def _accept(self) -> None:
        try:
            line, _ = self._server.accept()
        except OSError:  # he has hung up already, or this process has as many files open as it may
            time.sleep(0.01)
            return
        line.setblocking(False)
        caller = _Caller(line)
        self._callers.append(caller)
        self._selector.register(line, selectors.EVENT_READ, caller)
        try:
            line.send(caller.nonce)  # fits into any connection's buffer
        except OSError:
            self._drop(caller)
        if len(self._callers) > MOST_CALLERS:
            self._drop(self._callers[0])

    def _hear(self, caller: _Caller) -> None:
        with contextlib.suppress(OSError):
            more = caller.line.recv(_ANSWER_BYTES - len(caller.answer))
            caller.answer += more
            if more and len(caller.answer) < _ANSWER_BYTES:
                return
            rank = caller.answer[:_RANK_BYTES]
            number = int.from_bytes(rank, "big")
            if is_signed(caller.answer[_RANK_BYTES:], self._key, caller.nonce, rank) and number in self._missing:
                caller.line.send(_WELCOME)
                self._missing.remove(number)
                self._callers.remove(caller)
                self._lines.append(caller.line)
                self._selector.modify(caller.line, selectors.EVENT_READ, number)
                self._close_when_complete()
                return
        self._drop(caller)

    def _drop(self, caller: _Caller) -> None:
        self._hang_up(caller)
        if not self._complained:
            self._complained = True
            with contextlib.suppress(OSError):
                print(
                    f"\nicom: somebody who is no process of this run connected to its port {self._port}, and was "
                    "dropped. (Said once; docs/security.md.)",
                    file=sys.stderr,
                    flush=True,
                )

    def _hang_up(self, caller: _Caller) -> None:
        self._selector.unregister(caller.line)
        self._callers.remove(caller)
        caller.line.close()

    def _close_when_complete(self) -> None:
        if not self._missing:
            self._selector.unregister(self._server)
            self._server.close()
            for caller in [*self._callers]:
                self._hang_up(caller)


def call(address: str, port: int, rank: int, key: bytes, patience: float) -> socket.socket:
    """Another rank's end of its line, as soon as rank 0 has taken it.

    Args:
        address: of rank 0.
        port: where it listens.
        rank: of this process.
        key: of the signatures.
        patience: seconds; among many strangers a call may be dropped, and is made again.

    Raises:
        OSError: rank 0 cannot be reached, or does not take it.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            return _call_once(address, port, rank, key)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _call_once(address: str, port: int, rank: int, key: bytes) -> socket.socket:
    line = socket.create_connection((address, port), ANSWER_SECONDS)
    try:
        nonce = b""
        while len(nonce) < _NONCE_BYTES:
            if not (more := line.recv(_NONCE_BYTES - len(nonce))):
                raise ConnectionError("rank 0 hung up")
            nonce += more
        name = rank.to_bytes(_RANK_BYTES, "big")
        line.sendall(name + sign(key, nonce, name))
        if line.recv(1) != _WELCOME:
            raise ConnectionError("rank 0 does not take this process for one of its run")
        line.settimeout(None)
    except BaseException:
        line.close()
        raise
    return line


def say_goodbye(line: socket.socket) -> None:
    """End a line in a way that is no loss; whoever reads from it at this end wakes up, and has to close it."""
    with contextlib.suppress(OSError):
        line.sendall(_GOODBYE)
        line.shutdown(socket.SHUT_RDWR)


def said_goodbye(line: socket.socket) -> bool:
    """What a line's end meant."""
    try:
        return line.recv(1) == _GOODBYE
    except OSError:
        return False

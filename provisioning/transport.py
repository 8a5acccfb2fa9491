"""The ways to a node: what all can do, and that to this machine itself. ssh.py and openssh.py have the others."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from icom.errors import IcomError
from provisioning.folder import write_private
from provisioning.script import Script

STEP_SECONDS = 300
FIRST_LOOK_SECONDS, LOOK_SECONDS = 0.005, 0.2
CLOCK, PAUSE = time.monotonic, time.sleep
TAIL_LINES = 12
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Ended(NamedTuple):
    """A command that has ended, and what it printed."""

    code: int
    out: str
    err: str


class Running(NamedTuple):
    """A command that was started: whether it has ended; end it, whatever becomes of it; how it ended."""

    is_over: Callable[[], bool]
    kill: Callable[[], object]
    wait: Callable[[], Ended]


class Transport(ABC):
    """A way to one node. Commands run in, and paths begin in, the home folder of the user there.

    Attributes:
        name: of the node, for messages.
        check: called before each step and while one runs, not always from the main thread; what it raises stops.
    """

    seconds: float = STEP_SECONDS
    """How long a command may take that is given no other limit."""
    broken: tuple[type[Exception], ...] = (OSError, EOFError)
    """What says that the connection broke."""

    def __init__(self, name: str, check: Callable[[], None] = lambda: None) -> None:
        self.name, self.check = name, check

    def run(
        self,
        command: str | Script,
        *,
        doing: str = "",
        seconds: float | None = None,
        on_line: Callable[[str], None] | None = None,
    ) -> str:
        """Run a command to its end; what it printed.

        Args:
            command: a line for the node's shell, or a program.
            doing: what it is for, if messages are to name that instead of the command.
            seconds: how long it may take.
            on_line: given each line as it is printed, where the way can tell (ssh.py), on a thread of its own.

        Raises:
            IcomError: it failed, took too long or the connection broke; names the node and shows its last lines.
        """
        self.check()
        limit = self.seconds if seconds is None else seconds
        deadline, pause = CLOCK() + limit, FIRST_LOOK_SECONDS
        try:
            running = self._start(command.line if isinstance(command, Script) else command, on_line)
            try:
                while not running.is_over():
                    self.check()
                    if CLOCK() >= deadline:
                        raise IcomError(f"{self.name}: no end after {limit:g} s of: {command}")
                    PAUSE(pause)
                    pause = min(2 * pause, LOOK_SECONDS)
            except BaseException:
                running.kill()
                raise
            ended = running.wait()
        except self.broken as error:
            raise IcomError(f"{self.name}: the connection broke ({error}) during: {command}") from error
        if ended.code:
            plain = f"{self.name}: {self._why(ended.code)} of: {command}"
            head = self._failed(doing, ended.code) if doing else plain
            lines = (ended.err.strip() or ended.out.strip()).splitlines()[-TAIL_LINES:]
            raise IcomError("\n  ".join([head, *(lines or ["(no output)"])]))
        return ended.out

    @abstractmethod
    def send(self, files: Mapping[str, bytes | Path]) -> None:
        """Write files on the node: path -> content, or a file here that has it.

        Raises:
            IcomError: one could not be read here, or written there, or the connection broke.
        """

    @abstractmethod
    def _start(self, line: str, on_line: Callable[[str], None] | None) -> Running:
        """Let the node's shell run a line."""

    def _why(self, code: int) -> str:
        return f"exit code {code}"

    def _failed(self, doing: str, code: int) -> str:
        return f"{doing} failed on {self.name} ({self._why(code)})."


def start_here(argv: Sequence[str], folder: Path | None = None, env: Mapping[str, str] | None = None) -> Running:
    """Start a program in a session of its own: Ctrl-C at the terminal is for us, who then undo things in order."""
    # Files: what it leaves running may hold them open, and nobody waits for that.
    files = [tempfile.TemporaryFile("w+", errors="replace") for _ in range(2)]  # noqa: SIM115 - closed at its end
    no = subprocess.DEVNULL
    process = subprocess.Popen(
        argv, cwd=folder, env=env, stdin=no, stdout=files[0], stderr=files[1], start_new_session=True
    )

    def wait() -> Ended:
        code, said = process.wait(), []
        for file in files:
            with file:
                file.seek(0)
                said.append(file.read())
        return Ended(code, *said)

    def kill() -> None:
        os.killpg(process.pid, signal.SIGKILL)
        wait()

    return Running(lambda: process.poll() is not None, kill, wait)


class LocalTransport(Transport):
    """This machine, as a login by ssh would find it: without this process's variables."""

    def send(self, files: Mapping[str, bytes | Path]) -> None:
        """Write files, each whole or not at all, for their owner alone."""
        self.check()
        for path, content in files.items():
            try:
                write_private(Path.home() / path, content if isinstance(content, bytes) else content.read_bytes())
            except OSError as error:
                raise IcomError(f"{self.name}: {path} could not be written there: {error}") from error

    def _start(self, line: str, on_line: Callable[[str], None] | None) -> Running:
        user, home = pwd.getpwuid(os.getuid()), Path.home()
        env = {"HOME": str(home), "USER": user.pw_name, "LOGNAME": user.pw_name, "SHELL": user.pw_shell}
        return start_here(["/bin/bash", "-c", line], home, env | {"PATH": SYSTEM_PATH})

"""Namespaces of the kernel that end with the process that made them, and commands inside them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
"""sbin is not in everybody's."""

# What keeps namespaces alive waits for its pipe to close. As the first process of a process namespace it has to collect
# the dead: the kernel does that for one who ignores SIGCHLD (which dash cannot be told, bash can).
_WAIT = """
trap "" CHLD
echo ready
exec cat
"""


class ClusterError(Exception):
    """A host could not be made, or something on it that must succeed did not; says what."""


class Command(subprocess.Popen[str]):
    """A command that runs on a host. Signals reach the command itself, not the program that entered the host for it."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind:  # else this would wait for an end that nobody brings about any more
            self.kill()
        super().__exit__(kind, error, trace)

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless the command has ended."""
        if self.poll() is None:
            for pid in children(self.pid) or [self.pid]:
                os.kill(pid, sig)


@dataclass
class Space:
    """Namespaces, kept alive by a process that waits for the end of its input, and the commands that entered them."""

    keeper: subprocess.Popen[str]
    commands: list[Command] = field(default_factory=list)

    @classmethod
    def make(cls, stack: ExitStack, namespaces: Sequence[str], script: str, *arguments: str) -> Space:
        """Namespaces that `script` has set up; they end with `stack`."""
        words = ["unshare", *namespaces, "--kill-child=KILL", "bash", "-c", script + _WAIT, "bash", *arguments]
        with without_interruption():
            keeper = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={"PATH": PATH},
                # Ctrl-C reaches who holds the pipe, not the namespaces under their feet.
                start_new_session=True,
            )
            space = cls(keeper)
            stack.callback(space.close)
        assert keeper.stdout
        if keeper.stdout.readline() != "ready\n":
            raise ClusterError(f"cannot make a host: {space.close()}")
        return space

    @property
    def pid(self) -> int:
        """Of a process inside (but for --pid, which is its child's)."""
        return self.keeper.pid

    def close(self) -> str:
        """End all that runs inside; the kernel has done so when this returns. Returns what the keeper complained of."""
        errors = "" if self.keeper.returncode is not None else self.keeper.communicate()[1]
        for command in self.commands:
            command.wait()
        return errors.strip()


@contextmanager
def without_interruption() -> Iterator[None]:
    """Ctrl-C waits: a process that was started and not noted yet would be lost. What starts meanwhile inherits that."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def children(parent: int) -> list[int]:
    """Pids of a process's children."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):  # it has ended
            if entry.name.isdigit() and int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(entry.name))
    return found


def call(words: Sequence[str]) -> None:
    check(subprocess.run(words, capture_output=True, text=True, check=False, env={"PATH": PATH}))


def check(done: subprocess.CompletedProcess[str]) -> None:
    if done.returncode:
        raise ClusterError(f"exit code {done.returncode} from {json.dumps(done.args)}: {done.stderr.strip()}")

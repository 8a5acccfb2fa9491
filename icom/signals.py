"""How a process ends: Ctrl-C and SIGTERM finish the step, save, exit; and who may end it at once."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any

_owned = False


def own_process() -> None:
    """Say that this process runs icom and nothing else; for entry points. Only then may `end_process` end it."""
    global _owned  # noqa: PLW0603  # a fact about the process
    _owned = True


def end_process(code: int) -> None:
    """End the process at once, from any thread, without waiting for other threads.

    Does nothing in a process that is not icom's own: a program that imports icom (a test runner, a notebook) is told by
    exceptions and decides for itself.
    """
    if _owned:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(code)


REPEAT_SECONDS = 10.0
"""A SIGTERM within so many seconds of the signal that asked to stop asks for the same thing once more."""

STOPPED = "\nicom: stopped at once. What was saved before is intact."


@contextmanager
def stopping_at_once() -> Iterator[None]:
    """Inside, Ctrl-C ends the process with exit code 130 and a line of text.

    Not by KeyboardInterrupt: Python drops an exception that a signal raises inside a __del__, and the imports of a
    run's first seconds are full of those; one Ctrl-C in five would be ignored.
    """
    before = signal.getsignal(signal.SIGINT)
    ours = before is signal.default_int_handler  # else the caller wants something else, for instance to ignore it
    if ours:
        signal.signal(signal.SIGINT, _stop_at_once)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, before)


def _stop_at_once(number: int, frame: FrameType | None) -> None:
    print(STOPPED, file=sys.stderr, flush=True)
    os._exit(128 + number)


class StopRequest:
    """Context manager that turns the first SIGINT or SIGTERM into a request that the loop asks for.

    A second signal acts as it would have without us, but for a SIGTERM soon after the first: schedulers send it again
    when another process of the run has ended, or to be sure. `doing` tells the user what happens after the first.
    `also` names more signals: SIGHUP, for a terminal that is closed, which stays ignored where it was (nohup), and
    whose repetitions are ignored: a terminal sends one and so does its shell.
    """

    def __init__(self, doing: str = "finishing this step, then saving", also: Sequence[signal.Signals] = ()) -> None:
        self.doing = doing
        self.also = also
        self.signal_number: int | None = None
        self._before: dict[int, Any] = {}
        self._asked_at = 0.0

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._on_signal)
        for number in self.also:
            if signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal_number is not None:  # a SIGTERM again
            if time.monotonic() - self._asked_at > REPEAT_SECONDS:
                signal.signal(signal.SIGTERM, self._before[signal.SIGTERM])
                os.kill(os.getpid(), signal.SIGTERM)
            return
        self.signal_number, self._asked_at = number, time.monotonic()
        for other, handler in self._before.items():
            if other != signal.SIGTERM:
                signal.signal(other, signal.SIG_IGN if other in self.also else handler)
        name = signal.Signals(number).name
        with suppress(OSError, ValueError):  # the terminal may be gone
            print(f"\nicom: {name}: {self.doing} (Ctrl-C: stop at once).", file=sys.stderr)

"""Ctrl-C and SIGTERM: finish the step, save, exit."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

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

    A second signal acts as it would have without us. `doing` tells the user what happens after the first.
    """

    def __init__(self, doing: str = "finishing this step, then saving") -> None:
        self.doing = doing
        self.signal_number: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signal_number = number
        self._restore()
        name = signal.Signals(number).name
        print(f"\nicom: {name}: {self.doing} (again: stop at once).", file=sys.stderr)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

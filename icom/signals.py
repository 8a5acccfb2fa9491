"""Ctrl-C and SIGTERM: finish the step, save, exit."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

_interrupted = False


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside, Ctrl-C raises KeyboardInterrupt as ever, and is remembered for `check_interrupted`.

    Python drops an exception that a signal raises inside a __del__, and the imports of a run's first seconds are full
    of those: without this, one Ctrl-C in five during them would be ignored.
    """
    global _interrupted  # noqa: PLW0603 # a signal belongs to the process
    _interrupted = False
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else the caller wants something else, for instance to ignore it
        signal.signal(signal.SIGINT, _on_interrupt)
    try:
        yield
    finally:
        if before is signal.default_int_handler:
            signal.signal(signal.SIGINT, before)


def check_interrupted() -> None:
    """Raise the KeyboardInterrupt that was dropped, if one was. To be called before the long work."""
    if _interrupted:
        raise KeyboardInterrupt


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    global _interrupted  # noqa: PLW0603
    _interrupted = True
    raise KeyboardInterrupt


class StopRequest:
    """Context manager that turns the first SIGINT or SIGTERM into a request that the loop asks for.

    A second signal acts as it would have without us.
    """

    def __init__(self) -> None:
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
        print(f"\nicom: {name}: finishing this step, then saving (again: stop at once).", file=sys.stderr)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

"""Ctrl-C and SIGTERM: finish the step, save, exit."""

from __future__ import annotations

import signal
import sys
from types import FrameType, TracebackType
from typing import Any


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

"""Waiting for an event, without a limit: what hangs is ended by pytest's own."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

POLL_SECONDS = 0.02


def wait_until(condition: Callable[[], bool]) -> None:
    """Until it holds; a condition may fail the test itself where it cannot hold any more."""
    while not condition():
        time.sleep(POLL_SECONDS)


def handles(pid: int, number: signal.Signals) -> bool:
    """Whether a process has set a handler for a signal: SigCgt in /proc/PID/status, see proc(5)."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(lines["SigCgt"], 16) >> (number - 1) & 1)

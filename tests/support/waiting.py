"""Waiting for an event, without a limit: what hangs is ended by pytest's own. And signals at a certain step."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

POLL_SECONDS = 0.02
PAUSES = 9
"""So many times as long as a question takes it is not asked again: what is waited for needs the cores."""


def wait_until(condition: Callable[[], bool], at_least: float = POLL_SECONDS) -> None:
    """Until it holds; a condition may fail the test itself where it cannot hold any more.

    Args:
        condition: asked again and again.
        at_least: seconds between two questions.
    """
    began = time.monotonic()
    while not condition():
        time.sleep(max(at_least, PAUSES * (time.monotonic() - began)))
        began = time.monotonic()


def handles(pid: int, number: signal.Signals) -> bool:
    """Whether a process has set a handler for a signal: SigCgt in /proc/PID/status, see proc(5)."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(lines["SigCgt"], 16) >> (number - 1) & 1)


def send_at(step: int, log: Path, number: signal.Signals, patch: pytest.MonkeyPatch) -> None:
    """Let a training in this process send itself a signal, however busy the machine is.

    Args:
        step: when its line has been written.
        log: metrics.jsonl of the run that is meant.
        number: of the signal.
        patch: until when.
    """
    from icom.training.report import Metrics

    add = Metrics.add

    def added(self: Metrics, **row: float) -> None:
        add(self, **row)
        if self.path == log and row["step"] == step:
            os.kill(os.getpid(), number)

    patch.setattr(Metrics, "add", added)

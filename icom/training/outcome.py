"""What a folder with a run's results says about it: for `icom report`, and for those who leave out what is done."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from icom.config.loading import read_yaml
from icom.config.trainings import training_of
from icom.errors import UsageError
from icom.files import write_atomically
from icom.training.lock import is_running
from icom.training.report import LOSS_CURVE, read_metrics

DONE, RUNNING, STOPPED, BEGUN, NONE = "done", "running", "stopped", "begun", "no run"
SCORE = "score.json"
RECENT = 100
"""The loss is the mean of so many steps: a single one tells of its noise and timestep."""


@dataclass(frozen=True)
class Outcome:
    """How far a run came.

    Attributes:
        folder: --output_dir.
        state: done, running (a process has its lock), stopped (it can go on), begun (not one step), or no run.
        step: optimizer steps done.
        steps: of all.
        loss: mean of the last RECENT steps; None before the first.
        seconds: that the steps took, in all.
        score: share of the right pictures, where something judged them (`icom demo` does); None elsewhere.
        settings: its config.yaml.
        training: the command that it was: train, finetune; empty where there is no run.
    """

    folder: Path
    state: str
    step: int = 0
    steps: int | None = None
    loss: float | None = None
    seconds: float = 0.0
    score: float | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    training: str = ""


def read_outcome(folder: Path) -> Outcome:
    """Look at a folder; one without a run is no error."""
    config, last = folder / "config.yaml", folder / LOSS_CURVE
    rows = read_metrics(folder / "metrics.jsonl")
    if not config.is_file():
        return Outcome(folder, RUNNING if is_running(folder) else NONE)
    try:
        settings = read_yaml(str(config))
    except UsageError:
        return Outcome(folder, NONE)
    step, steps = (int(rows[-1]["step"]) if rows else 0), settings.get("max_train_steps")
    training = training_of(settings)
    # Every run writes its config.yaml at its start, and the loss curve at its end.
    ended = last.is_file() and last.stat().st_mtime_ns >= config.stat().st_mtime_ns
    may_end_before = settings.get("stop") == "auto"
    done = (step == steps or may_end_before) and ended and (folder / training.result).exists()
    state = RUNNING if is_running(folder) else DONE if done else STOPPED if rows else BEGUN
    losses = [row["loss"] for row in rows[-RECENT:]]
    seconds = sum(row["seconds"] for row in rows)
    loss = statistics.mean(losses) if losses else None
    score = _read_score(folder) if done else None
    return Outcome(folder, state, step, steps, loss, seconds, score, settings, training.command)


def write_score(folder: Path, **shares: float) -> None:
    """Keep what a judge found.

    Args:
        folder: --output_dir.
        shares: what was judged -> share of right pictures; `after` is the score.
    """
    write_atomically(folder / SCORE, json.dumps(shares).encode())


def _read_score(folder: Path) -> float | None:
    try:
        return float(json.loads((folder / SCORE).read_text(encoding="utf-8"))["after"])
    except (OSError, ValueError, KeyError, TypeError):
        return None

"""What is known of each part: a small file that is written when it is begun, and replaced when it has ended."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from icom.config.finetune import FinetuneConfig
from icom.config.pipeline import Stage
from icom.files import write_atomically
from icom.launch.slurm.array import is_done
from icom.launch.slurm.script import processes_per_node
from icom.training.outcome import NONE, read_outcome

WHOLE, UNFINISHED, FAILED, NOT_BEGUN = "whole", "unfinished", "failed", "not begun"
STATES = (WHOLE, UNFINISHED, FAILED, NOT_BEGUN)


@dataclass(frozen=True)
class Mark:
    """A part's state.

    Attributes:
        state: one of STATES; unfinished ones run now, or ended without a word.
        said: how it failed.
    """

    state: str
    said: str = ""


def write_mark(root: Path, stage: Stage, part: int, state: str, said: str = "") -> None:
    """Replace a part's mark.

    Raises:
        IcomError: it cannot be written.
    """
    path = _path(root, stage, part)
    path.parent.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {"state": state, "at": time.strftime("%Y-%m-%d %H:%M:%S %z"), "said": said}
    write_atomically(path, json.dumps(content).encode(), "output_dir")


def read_marks(root: Path, stage: Stage) -> list[Mark]:
    """Of all parts, in order. The training's is what its folder says.

    Args:
        root: output_dir of the pipeline.
        stage: whose parts.
    """
    if isinstance(stage.options, FinetuneConfig):
        processes = stage.slurm.nodes * processes_per_node(stage.slurm) if stage.launcher == "slurm" else 1
        if is_done(stage.options, processes):
            return [Mark(WHOLE)]
        began = read_outcome(Path(stage.options.output_dir).expanduser()).state != NONE
        return [Mark(UNFINISHED if began else NOT_BEGUN)]
    return [_read(_path(root, stage, part)) for part in range(1, stage.parts + 1)]


def remove_mark(root: Path, stage: Stage, part: int) -> None:
    """Forget a part."""
    _path(root, stage, part).unlink(missing_ok=True)


def parts_in(marks: Sequence[Mark], *states: str) -> list[int]:
    """Numbers of the parts in one of these states."""
    return [number for number, mark in enumerate(marks, 1) if mark.state in states]


def not_whole(root: Path, stage: Stage) -> list[int]:
    """Numbers of the parts that are to be done."""
    return parts_in(read_marks(root, stage), UNFINISHED, FAILED, NOT_BEGUN)


def _path(root: Path, stage: Stage, part: int) -> Path:
    return root / "marks" / stage.name / f"{part:05d}.json"


def _read(path: Path) -> Mark:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Mark(content["state"] if content["state"] in STATES else UNFINISHED, str(content["said"]))
    except FileNotFoundError:
        return Mark(NOT_BEGUN)
    except (OSError, ValueError, KeyError, TypeError):
        return Mark(UNFINISHED)

"""What a run's folder tells of it: all that its page is made of."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from icom import machine
from icom.files import write_atomically
from icom.training.checkpoint import versions
from icom.training.outcome import Outcome, read_outcome
from icom.training.report import read_metrics
from icom.training.validation import FILE as VALIDATION

if TYPE_CHECKING:
    from icom.backends import Backend
    from icom.data.images import Picture
    from icom.training.loop import Running
    from icom.training.stopping import Curve

FACTS = "run.json"
"""In --output_dir: what nobody can see from the other files there."""
MOST_PICTURES = 24


@dataclass(frozen=True)
class Facts:
    """A run, as its files tell it.

    Attributes:
        outcome: how far it came, and its options.
        rows: of metrics.jsonl.
        validation: (step, validation loss); empty where it has none.
        norms: (step, mean norm of the learned rows), of the embeddings that were saved.
        noted: of run.json; empty for runs that left none.
        options: config.yaml as it is.
    """

    outcome: Outcome
    rows: list[dict[str, Any]]
    validation: Curve
    norms: list[tuple[int, float]]
    noted: dict[str, Any]
    options: str

    @property
    def settings(self) -> dict[str, Any]:
        """Of config.yaml."""
        return self.outcome.settings


def note_facts(run: Running, backend: Backend, **more: Any) -> None:
    """Write run.json; rank 0 does at the start.

    Args:
        run: the run.
        backend: what computes it.
        more: further facts.
    """
    facts = {
        "computes": backend.describe(),
        "cpu": machine.cpu_model(),
        "cores": machine.usable_cores(),
        "memory_gb": round(machine.memory().total / 2**30, 1),
        "versions": versions(),
        "processes": run.group.size,
        "samples_per_step": run.samples_per_step,
        "began": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        **more,
    }
    content = json.dumps(facts, indent=1, ensure_ascii=False) + "\n"
    write_atomically(run.output / FACTS, content.encode())


def names_to_show(pictures: list[Picture], trained: int) -> dict[str, Any]:
    """Of the pictures, for run.json: how many there are, and the names of some.

    Args:
        pictures: of the run; those that are held out are the last.
        trained: how many are not.
    """
    names = [picture.path.name for picture in pictures]
    count = min(len(names), MOST_PICTURES)
    some = [names[number * len(names) // count] for number in range(count)]
    return {"pictures": len(names), "held_out": len(names) - trained, "picture_names": some}


def read_facts(folder: Path) -> Facts:
    """All that the files of a run tell; what is missing or damaged is left out."""
    curve = [(int(row["step"]), float(row["loss"])) for row in read_metrics(folder / VALIDATION)]
    rows = read_metrics(folder / "metrics.jsonl")
    norms = sorted(_norms(folder.glob("learned_embeds-steps-*.safetensors")))
    try:
        noted = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        noted = {}
    options = (folder / "config.yaml").read_text(encoding="utf-8", errors="replace")
    return Facts(read_outcome(folder), rows, curve, norms, noted if isinstance(noted, dict) else {}, options)


def _norms(paths: Iterable[Path]) -> Iterable[tuple[int, float]]:
    from icom.errors import IcomError
    from icom.methods.embedding_file import load_embedding

    for path in paths:
        step = path.stem.rpartition("-")[2]
        if step.isdecimal():
            try:
                _, rows = load_embedding(path)
            except IcomError:
                continue
            yield int(step), float(rows.norm(dim=1).mean())

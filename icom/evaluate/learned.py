"""A learned word as a run left it: its rows at several steps, and what they were learned from."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from icom.config.common import flat
from icom.config.evaluate import EvaluateConfig
from icom.config.loading import read_yaml
from icom.config.rows import RANDOM
from icom.errors import IcomError, UsageError
from icom.methods.embedding import initializer_ids, start_rows
from icom.methods.embedding_file import Word, find_word, load_embedding, load_initial_rows
from icom.training.contact_sheet import evenly
from icom.training.report import read_metrics
from icom.training.stopping import chosen
from icom.training.validation import FILE as VALIDATION

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline

MOST_STEPS = 6
"""Steps of a run that are scored where nobody names any: drawing takes its time."""
RESULT = "learned_embeds.safetensors"


@dataclass
class Learned:
    """A word.

    Attributes:
        token: the word.
        rows: optimizer step -> float32 (vectors, width); step 0 is what it started from.
        path: of the file with the rows that people get.
        folder: the run's; None where a file was named alone.
        settings: the run's config.yaml; empty where there is none.
        last: the step of the rows that people get.
    """

    token: str
    rows: dict[int, torch.Tensor]
    path: Path
    folder: Path | None
    settings: dict[str, Any] = field(default_factory=dict)
    last: int = 0

    @property
    def vectors(self) -> int:
        """How many rows it has."""
        return len(self.rows[self.last])

    def word(self) -> Word:
        """As a tokenizer is taught it; its rows come later."""
        return Word(self.token, torch.zeros_like(self.rows[self.last]), self.path, self.path.with_suffix(""))

    def group(self, step: int) -> str:
        """The folder of a step's pictures: a run that is done again has other rows, and other pictures."""
        digest = hashlib.sha256(self.rows[step].contiguous().numpy().tobytes()).hexdigest()[:8]
        return f"step-{step}-{digest}"


def open_learned(config: EvaluateConfig) -> Learned:
    """What --embedding names: a run's folder, with all its steps, or a file.

    Raises:
        IcomError: missing or damaged, no run, or files of different words or shapes.
        UsageError: a step that was not saved.
    """
    (name,) = flat(config.embedding)
    folder = Path(name).expanduser()
    if not folder.is_dir():
        word = find_word(name)
        beside = word.path.parent / "config.yaml"
        settings = read_yaml(str(beside)) if beside.is_file() else {}
        if config.steps:
            raise UsageError(f"--steps chooses among the steps of a run: name its folder, and not {name}.")
        step = int(_number(word.path) or 1)
        return Learned(word.token, {step: word.rows}, word.path, None, settings, step)
    if not (folder / "config.yaml").is_file():
        raise IcomError(f"{folder} is no run's folder: it has no config.yaml. Name one, or an embedding's file.")
    settings = read_yaml(str(folder / "config.yaml"))
    token = str(settings.get("placeholder_token"))
    paths = {int(_number(path)): path for path in folder.glob("learned_embeds-steps-*.safetensors") if _number(path)}
    rows = {step: _rows_of(path, token) for step, path in sorted(paths.items())}
    last = max(rows, default=0)
    if (folder / RESULT).is_file():
        result = _rows_of(folder / RESULT, token)
        last = _step_of(folder, settings, rows, result)
        rows[last] = result
    if not rows:
        raise IcomError(f"{folder} has no learned_embeds.safetensors, and no learned_embeds-steps-N.safetensors.")
    if len(shapes := {tuple(some.shape) for some in rows.values()}) > 1:
        raise IcomError(f"The embeddings in {folder} are of several runs: their shapes are {sorted(shapes)}.")
    return Learned(token, dict(sorted(rows.items())), folder / RESULT, folder, settings, last)


def _rows_of(path: Path, token: str) -> torch.Tensor:
    own, rows = load_embedding(path)
    if own != token:
        raise IcomError(f"{path} teaches {own}, and the run's word is {token} (config.yaml): it is of another run.")
    return rows


def _number(path: Path) -> str:
    number = path.stem.rpartition("-")[2]
    return number if number.isdecimal() else ""


def _step_of(folder: Path, settings: dict[str, Any], rows: dict[int, torch.Tensor], result: torch.Tensor) -> int:
    """The step of a run's result."""
    for step, some in rows.items():
        if torch.equal(some, result):
            return step
    curve = [(int(row["step"]), float(row["loss"])) for row in read_metrics(folder / VALIDATION)]
    if settings.get("stop") == "auto" and curve:
        return chosen(curve)[0]
    metrics = read_metrics(folder / "metrics.jsonl")
    return int(metrics[-1]["step"]) if metrics else max(rows, default=1)


def add_start(learned: Learned, pipeline: StableDiffusionPipeline, initializer: str | None) -> None:
    """Add what the word started from as step 0, where that can be known.

    Args:
        learned: gets it.
        pipeline: whose table it comes from; it has been taught the word, whose rows are the last ones.
        initializer: --initializer_token.

    Raises:
        UsageError: a word that has more tokens than the learned one rows.
    """
    settings = learned.settings
    file = settings.get("initial_embedding")
    if initializer is None and file:
        path = Path(str(file)).expanduser()
        if path.is_file():
            learned.rows[0] = load_initial_rows(path, learned.vectors)
        return
    word = initializer or settings.get("initializer_token")
    if not isinstance(word, str):
        return
    ids = [] if word == RANDOM else initializer_ids(pipeline.tokenizer, word, learned.vectors)
    table = pipeline.text_encoder.get_input_embeddings().weight[: -learned.vectors]
    learned.rows[0] = start_rows(table, ids, learned.vectors, int(settings.get("seed") or 0)).detach().float().clone()


def check_steps(learned: Learned, wanted: Sequence[int]) -> None:
    """Raises: UsageError for a step that was not saved."""
    if unknown := sorted(set(wanted) - {0, *learned.rows}):
        there = ", ".join(map(str, sorted(learned.rows)))
        raise UsageError(f"--steps {unknown[0]}: the run saved {there} (--save_steps).")


def steps_to_score(learned: Learned, wanted: Sequence[int]) -> list[int]:
    """Which of them, in order; step 0 is among them where it is known, and the last one where nobody chose."""
    start = {0} & learned.rows.keys()
    learned_at = [step for step in sorted(learned.rows) if step and step <= learned.last]
    return sorted(start | set(wanted or evenly(learned_at, MOST_STEPS)) & learned.rows.keys())

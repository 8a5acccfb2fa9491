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
from icom.config.train import OF_A_WORD
from icom.config.words import file_name, place_and_word
from icom.errors import IcomError, UsageError
from icom.methods.embedding import initializer_ids, start_rows
from icom.methods.embedding_file import Word, find_word, load_embeddings, load_initial_rows
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
        number: of the word among those that the run learned together, from 0 on; None where it learned it alone.
    """

    token: str
    rows: dict[int, torch.Tensor]
    path: Path
    folder: Path | None
    settings: dict[str, Any] = field(default_factory=dict)
    last: int = 0
    number: int | None = None

    @property
    def name(self) -> str:
        """What tells its files in the run's folder from those of the words beside it; empty where it is alone."""
        return "" if self.number is None else file_name(self.token)

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
    """What --embedding names: a run's folder, with all its steps, or a file; with =WORD one of its words.

    Raises:
        IcomError: missing or damaged, no run, or files of different words or shapes.
        UsageError: a step that was not saved, or nobody said which of several words.
    """
    (name,) = flat(config.embedding)
    place, asked = place_and_word(name)
    folder = Path(place).expanduser()
    if not folder.is_dir():
        word = find_word(name)
        beside = _settings_of(word.path.parent) if (word.path.parent / "config.yaml").is_file() else [{}]
        settings = next((one for one in beside if one.get("placeholder_token") == word.token), beside[0])
        if config.steps:
            raise UsageError(f"--steps chooses among the steps of a run: name its folder, and not {name}.")
        step = int(_number(word.path) or 1)
        return Learned(word.token, {step: word.rows}, word.path, None, settings, step)
    if not (folder / "config.yaml").is_file():
        raise IcomError(_no_run(folder))
    words = _settings_of(folder)
    number = _choose([str(word["placeholder_token"]) for word in words], asked, folder)
    settings, token = words[number], str(words[number]["placeholder_token"])
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
    return Learned(
        token, dict(sorted(rows.items())), folder / RESULT, folder, settings, last, number if words[1:] else None
    )


def _no_run(folder: Path) -> str:
    runs = sorted(config.parent for config in folder.glob("*/config.yaml"))
    if runs:
        return f"{folder} holds the runs of {len(runs)} words: name one of them, as in --embedding {runs[0]}."
    return f"{folder} is no run's folder: it has no config.yaml. Name one, or an embedding's file."


def _settings_of(folder: Path) -> list[dict[str, Any]]:
    """A run's options, with those of each of its words in the place of the first one's."""
    settings = read_yaml(str(folder / "config.yaml"))
    words = [settings, *(settings.get("further_words") or [])]
    return [settings | {name: word.get(name) for name in OF_A_WORD} for word in words]


def _choose(tokens: Sequence[str], asked: str | None, folder: Path) -> int:
    """The number of the word that is asked for.

    Raises:
        UsageError: the run has several and nobody said which, or not this one.
    """
    if asked is None and len(tokens) > 1:
        raise UsageError(
            f"{folder} has several words ({', '.join(tokens)}). Name one of them, as in {folder}={tokens[0]}."
        )
    if asked is not None and asked not in tokens:
        raise UsageError(f"The run in {folder} learned {' and '.join(tokens)}, and not {asked}.")
    return tokens.index(asked) if asked else 0


def _rows_of(path: Path, token: str) -> torch.Tensor:
    words = load_embeddings(path)
    if token not in words:
        raise IcomError(
            f"{path} teaches {' and '.join(words)}, and the run's word is {token} (config.yaml): it is of another run."
        )
    return words[token]


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
    seed, number = int(settings.get("seed") or 0), learned.number or 0
    learned.rows[0] = start_rows(table, ids, learned.vectors, seed, number).detach().float().clone()


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

"""`icom demo`: learn a bundled concept and measure, with an independent judge, that it was learned."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from icom.commands.generate import draw_together
from icom.config.demo import DemoConfig
from icom.config.train import load_train_config
from icom.methods.embedding_file import load_embedding
from icom.models import loading, pipelines
from icom.progress import progress
from icom.training.outcome import write_score
from icom.training.report import grid, save_png
from icom.training.results import EMBEDDING
from icom.training.train import train
from icom.world.concepts import CONCEPTS, new_backgrounds
from icom.world.judge import Judge, load_judge
from icom.world.scene import Thing

if TYPE_CHECKING:
    from PIL import Image

TOKEN, INITIALIZER = "<concept>", "object"
PROMPT = f"a photo of {TOKEN}"
GUIDANCE = 5.0
_BATCH = 16


@dataclass(frozen=True)
class Score:
    """How many of the pictures show what they should."""

    right: int
    of: int

    @property
    def share(self) -> float:
        """Between 0 and 1."""
        return self.right / self.of

    def __str__(self) -> str:
        """For instance: 15/16 (94 %)."""
        return f"{self.right}/{self.of} ({self.share:.0%})"


@dataclass(frozen=True)
class Drawn:
    """Pictures of a concept and the judge's opinion of them."""

    pictures: list[Image.Image]
    score: Score


@dataclass(frozen=True)
class Learned:
    """What came of a concept: pictures of it before and after training, and after training in a new context.

    In a new context a picture is right when both the concept and the background that the prompt names are there.
    """

    before: Drawn
    after: Drawn
    elsewhere: Drawn
    seconds: float


def demo(config: DemoConfig) -> None:
    """Learn a concept, draw and judge it before and after, and show all that.

    Raises:
        IcomError: --output_dir cannot be written.
    """
    from rich.console import Console
    from rich.table import Table

    began = time.monotonic()
    output = Path(config.output_dir)
    flags: dict[str, Any] = {"seed": config.seed, "output_dir": config.output_dir, "backend": config.backend}
    if config.max_train_steps is not None:
        flags["max_train_steps"] = config.max_train_steps
    learned = learn(config.concept, flags, num_images=config.num_images)
    thing = CONCEPTS[config.concept]
    drawn = (learned.before, learned.after, learned.elsewhere)
    columns = min(8, config.num_images)
    save_png(grid([p for part in drawn for p in part.pictures[:columns]], columns), output / "before-after.png")

    write_score(output, **{name: part.score.share for name, part in vars(learned).items() if isinstance(part, Drawn)})

    table = Table(title=f"{TOKEN}: a {thing.colour} {thing.pattern} {thing.shape}, which the model has never drawn")
    for heading in ("pictures", "prompt", "right"):
        table.add_column(heading)
    names = ", ".join(background for background in new_backgrounds(config.concept))
    table.add_row("before training", f"a photo of {TOKEN}", str(learned.before.score))
    table.add_row("after training", f"a photo of {TOKEN}", str(learned.after.score))
    table.add_row("in a new context", f"a photo of {TOKEN} {names.replace(', ', ' / ')}", str(learned.elsewhere.score))
    print()
    Console(soft_wrap=False).print(table)
    print(
        f"Trained in {learned.seconds:.0f} s, {time.monotonic() - began:.0f} s with all pictures. Look at "
        f"{output / 'before-after.png'} (rows: before, after, new context) and {output / 'loss.png'}."
    )


def learn(concept: str, flags: dict[str, Any], *, num_images: int) -> Learned:
    """Train a bundled concept as `icom train` does, then draw and judge.

    Args:
        concept: a key of CONCEPTS.
        flags: training options beside the bundled model's defaults; `output_dir` at least.
        num_images: pictures of each kind.
    """
    words = {"placeholder_token": TOKEN, "initializer_token": INITIALIZER, "train_data_dir": f"bundled:{concept}"}
    options = {"num_comparison_images": 0, "report_to": "none", **words, **flags}
    settled = load_train_config(options)
    began = time.monotonic()
    train(settled)
    seconds = time.monotonic() - began
    _, rows = load_embedding(Path(settled.output_dir) / EMBEDDING)
    # The rows start from the initializer's, so without training the concept's prompt is this one.
    untrained = PROMPT.replace(TOKEN, " ".join([INITIALIZER] * len(rows)))
    before = _judged(load_judge(), CONCEPTS[concept], None, [untrained] * num_images, None, "pictures before")
    return Learned(before, *judge_rows(concept, rows, num_images=num_images), seconds)


def judge_rows(concept: str, rows: torch.Tensor, *, num_images: int) -> tuple[Drawn, Drawn]:
    """Draw what rows show of a bundled concept, alone and in new contexts, and judge it.

    Args:
        concept: a key of CONCEPTS.
        rows: of TOKEN, (vectors, width).
        num_images: pictures of each kind.
    """
    thing, judge, backgrounds = CONCEPTS[concept], load_judge(), new_backgrounds(concept)
    named = [backgrounds[index % len(backgrounds)] for index in range(num_images)]
    return (
        _judged(judge, thing, rows, [PROMPT] * num_images, None, "pictures after"),
        _judged(judge, thing, rows, [f"{PROMPT} {where}" for where in named], named, "pictures elsewhere"),
    )


def draw_prompts(
    prompts: Sequence[str], rows: torch.Tensor | None = None, what: str = "pictures", model_name: str = "bundled"
) -> list[Image.Image]:
    """Draw each prompt once, from the seeds 0, 1, 2 …

    Args:
        prompts: texts.
        rows: of TOKEN, (vectors, width), where the prompts use it.
        what: to show while it takes its time.
        model_name: the bundled model, or one that was made from it.
    """
    model = loading.load(loading.find(model_name), torch.float32)
    pipeline = pipelines.pipeline_of(model)
    if rows is not None:
        pipeline.load_textual_inversion({TOKEN: rows}, token=TOKEN)
    pictures = []
    with progress(None, what, "picture", total=len(prompts), leave=False) as bar:
        for start in range(0, len(prompts), _BATCH):
            batch = prompts[start : start + _BATCH]
            pictures += draw_together(pipeline, batch, range(start, start + len(batch)), GUIDANCE)
            bar.update(len(batch))
    return pictures


def _judged(
    judge: Judge, thing: Thing, rows: torch.Tensor | None, prompts: list[str], backgrounds: list[str] | None, what: str
) -> Drawn:
    pictures = draw_prompts(prompts, rows, what)
    verdicts = judge.look_at(pictures)
    right = [verdict.thing == thing for verdict in verdicts]
    if backgrounds:
        places = zip(right, verdicts, backgrounds, strict=True)
        right = [good and verdict.background == background for good, verdict, background in places]
    return Drawn(pictures, Score(sum(right), len(right)))

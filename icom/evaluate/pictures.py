"""The pictures of an evaluation: which there are to be, which are there, and the drawing of the rest by all processes.

Picture number i has prompt i (after the last one the first again) and the seed --seed + i, whoever draws it and when.
Batches consist of the same numbers in every run, so that one that was interrupted goes on to the same pictures.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from icom.commands.generate import Studio, draw_together, parameters_of
from icom.config.evaluate import EvaluateConfig
from icom.errors import IcomError, UsageError
from icom.files import write_atomically
from icom.parallel.group import Group
from icom.progress import progress
from icom.training.report import save_png

SETTINGS = "settings.json"
"""In the folder of pictures: all that decides what they show."""
_RUN = "run"
"""What tells one run of the command from the others, in that file."""


@dataclass(frozen=True)
class Plan:
    """All pictures of an evaluation.

    Attributes:
        folder: --output_dir.
        groups: folders in it: one for each scale of guidance, or step of a word; each has `count` pictures.
        count: pictures per group.
        batch: drawn at a time.
    """

    folder: Path
    groups: Sequence[str]
    count: int
    batch: int

    def path(self, group: str, number: int) -> Path:
        """Where a picture lies."""
        return self.folder / group / f"{number:06d}.png"

    def batches(self) -> list[tuple[int, int]]:
        """(index of the group, first number) of each batch, in the order in which they are drawn."""
        return [(group, first) for group in range(len(self.groups)) for first in range(0, self.count, self.batch)]

    def numbers(self, first: int) -> range:
        """Of a batch."""
        return range(first, min(first + self.batch, self.count))

    def missing(self, group: str, first: int) -> list[int]:
        """Numbers of a batch whose picture is not there, or damaged."""
        return [number for number in self.numbers(first) if not _is_whole(self.path(group, number))]

    def pictures(self, group: str) -> Iterator[Image.Image]:
        """Of a group, in order; all are there."""
        for number in range(self.count):
            with Image.open(self.path(group, number)) as picture:
                yield picture.convert("RGB")


def settings_of(config: EvaluateConfig, studio: Studio, count: int) -> dict[str, Any]:
    """What decides the pictures, whatever the group: for each of `count` its prompt, and what all share."""
    return {
        "model": studio.model,
        "weights": studio.weights,
        "prompts": [studio.prompts[number % len(studio.prompts)] for number in range(count)],
        "negative_prompt": studio.negative_prompt,
        "seed": config.seed,
        "scheduler": config.scheduler,
        "num_inference_steps": config.num_inference_steps,
        "resolution": config.resolution,
        "dtype": str(studio.backend.dtype).removeprefix("torch."),
        "batch_size": config.batch_size,
    }


def keep_settings(folder: Path, settings: dict[str, Any], group: Group) -> None:
    """Write down what the pictures of a folder are; refuse to mix them with others than more or fewer of the same.

    Raises:
        UsageError: there are pictures of other settings; says which.
        IcomError: the folder cannot be written, or is another one for this process than for rank 0.
    """
    path = folder / SETTINGS
    run = secrets.token_hex(8)
    if group.leads:
        written = _with_those_there(folder, settings) | {_RUN: run}
        write_atomically(path, (json.dumps(written, indent=1, ensure_ascii=False) + "\n").encode())
    run = group.broadcast(run.encode() if group.leads else None).decode()
    if _read(path).get(_RUN) != run:
        raise IcomError(
            f"{folder} is not the folder of rank 0: --output_dir has to be a folder that all machines share."
        )
    group.wait_for_everyone()  # nobody draws for hours beside one who cannot


def _with_those_there(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Settings for the pictures of a folder, those that are there already included."""
    if not any(folder.glob("*/*.png")):
        return settings
    path = folder / SETTINGS
    before = _read(path)
    differing = {name for name in settings.keys() - {"prompts"} if settings[name] != before.get(name)}
    prompts, earlier = settings["prompts"], before.get("prompts", [])
    if any(one != other for one, other in zip(prompts, earlier, strict=False)):
        differing.add("prompts")
    if differing:
        named = ", ".join(sorted(differing)) if before else "nobody knows of which"
        raise UsageError(
            f"{folder} holds pictures of another evaluation ({named}: see {path}). Delete it, or choose another "
            "--output_dir."
        )
    return settings | {"prompts": max(prompts, earlier, key=len)}


def _read(path: Path) -> dict[str, Any]:
    """What stands in a settings.json; nothing where it is not there, or not ours."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


Draw = Callable[[int, Sequence[int]], list[tuple[Image.Image, str]]]
"""Given the index of a group and numbers of its pictures: those, each with what it was drawn with."""


def drawn_by(
    config: EvaluateConfig, studio: Studio, numbers: Sequence[int], guidance: float
) -> list[tuple[Image.Image, str]]:
    """Pictures of these numbers, drawn in one batch, each with what it was drawn with."""
    prompts = [studio.prompts[number % len(studio.prompts)] for number in numbers]
    seeds = [config.seed + number for number in numbers]
    with studio.backend.autocast():
        pictures = draw_together(
            studio.pipeline,
            prompts,
            seeds,
            guidance,
            steps=config.num_inference_steps,
            negative_prompt=studio.negative_prompt,
            resolution=config.resolution,
        )
    return [
        (picture, parameters_of(config, studio, prompt, seed, guidance, picture.size))
        for prompt, seed, picture in zip(prompts, seeds, pictures, strict=True)
    ]


def draw_missing(plan: Plan, draw: Draw, group: Group) -> int:
    """Draw what is not there, in all processes.

    Args:
        plan: all pictures.
        draw: of this process.
        group: the processes; all write to the same folder.

    Returns:
        How many pictures were drawn, by all.

    Raises:
        IcomError: the folder is full.
    """
    batches = plan.batches()
    lacking = [i for i, (of, first) in enumerate(batches) if group.leads and plan.missing(plan.groups[of], first)]
    to_draw = json.loads(group.broadcast(json.dumps(lacking).encode() if group.leads else None))
    mine = to_draw[group.rank :: group.size]
    total, drawn = sum(len(plan.numbers(batches[i][1])) for i in mine), 0
    with progress(None, "pictures", "picture", total=total, disable=not group.leads or not mine) as bar:
        for of, first in (batches[i] for i in mine):
            numbers, name = plan.numbers(first), plan.groups[of]
            pictures = draw(of, numbers)
            missing = plan.missing(name, first)
            for number, (picture, parameters) in zip(numbers, pictures, strict=True):
                if number in missing:
                    path = plan.path(name, number)
                    path.parent.mkdir(exist_ok=True)
                    save_png(picture, path, parameters)
                    drawn += 1
            bar.update(len(numbers))
    counts = [int(said) for said in group.gather(str(drawn).encode())]  # which come when all is drawn
    return sum(counts)


def _is_whole(path: Path) -> bool:
    try:
        with Image.open(path) as image:
            image.load()
    except (OSError, SyntaxError, ValueError):  # what Pillow's decoders raise
        return False
    return True

"""The pictures of an evaluation: which there are to be, which are there, and the drawing of the rest by all processes.

Picture number i has prompt i (after the last one the first again) and the seed --seed + i, whoever draws it and when.
Batches consist of the same numbers in every run, so that one that was interrupted goes on to the same pictures.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from icom.commands.generate import Studio, draw_together, parameters_of
from icom.config.evaluate import EvaluateConfig, scale_name
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
        scales: of guidance; each has `count` pictures.
        count: pictures per scale.
        batch: drawn at a time.
    """

    folder: Path
    scales: Sequence[float]
    count: int
    batch: int

    def path(self, scale: float, number: int) -> Path:
        """Where a picture lies."""
        return self.folder / scale_name(scale) / f"{number:06d}.png"

    def batches(self) -> list[tuple[int, int]]:
        """(index of the scale, first number) of each batch, in the order in which they are drawn."""
        return [(scale, first) for scale in range(len(self.scales)) for first in range(0, self.count, self.batch)]

    def numbers(self, first: int) -> range:
        """Of a batch."""
        return range(first, min(first + self.batch, self.count))

    def missing(self, scale: float, first: int) -> list[int]:
        """Numbers of a batch whose picture is not there, or damaged."""
        return [number for number in self.numbers(first) if not _is_whole(self.path(scale, number))]


def settings_of(config: EvaluateConfig, studio: Studio, count: int) -> dict[str, Any]:
    """What decides the pictures, whatever the scale of guidance: for each of `count` its prompt, and what all share."""
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
    if not any(folder.glob(f"{scale_name(1)[:-1]}*/*.png")):
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


def draw_missing(config: EvaluateConfig, plan: Plan, studio: Studio, group: Group) -> int:
    """Draw what is not there, in all processes.

    Args:
        config: of the evaluation.
        plan: all pictures.
        studio: of this process.
        group: the processes; all write to the same folder.

    Returns:
        How many pictures were drawn, by all.

    Raises:
        IcomError: the folder is full.
    """
    batches = plan.batches()
    lacking = [i for i, (scale, first) in enumerate(batches) if group.leads and plan.missing(plan.scales[scale], first)]
    to_draw = json.loads(group.broadcast(json.dumps(lacking).encode() if group.leads else None))
    mine = to_draw[group.rank :: group.size]
    total, drawn = sum(len(plan.numbers(batches[i][1])) for i in mine), 0
    with progress(None, "pictures", "picture", total=total, disable=not group.leads or not mine) as bar:
        for scale, first in (batches[i] for i in mine):
            numbers, guidance = plan.numbers(first), plan.scales[scale]
            prompts = [studio.prompts[number % len(studio.prompts)] for number in numbers]
            with studio.backend.autocast():
                pictures = draw_together(
                    studio.pipeline,
                    prompts,
                    [config.seed + number for number in numbers],
                    guidance,
                    steps=config.num_inference_steps,
                    negative_prompt=studio.negative_prompt,
                    resolution=config.resolution,
                )
            missing = plan.missing(guidance, first)
            for number, prompt, picture in zip(numbers, prompts, pictures, strict=True):
                if number in missing:
                    path = plan.path(guidance, number)
                    path.parent.mkdir(exist_ok=True)
                    parameters = parameters_of(config, studio, prompt, config.seed + number, guidance, picture.size)
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

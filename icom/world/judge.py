"""The judge: a small classifier that says what a picture shows.

It is independent of the bundled model: it is trained on pictures of the world alone and never on generated ones. It
knows the concepts' combinations, which the model does not, and it may say that there is no object, or none that it
knows: it has seen empty backgrounds, shapeless blobs and double exposures too.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

from icom.world.scene import BACKGROUNDS, COLOURS, PATTERNS, PLACES, SHAPES, SIZES, Thing

WEIGHTS = Path(__file__).parents[1] / "assets" / "judge.safetensors"

NOTHING = "nothing known"
HEADS: dict[str, tuple[str, ...]] = {
    "colour": tuple(COLOURS),
    "pattern": PATTERNS,
    "shape": (*SHAPES, NOTHING),
    "size": tuple(SIZES),
    "place": tuple(PLACES),
    "background": tuple(BACKGROUNDS),
}
"""Question -> possible answers."""


@dataclass(frozen=True)
class Verdict:
    """What the judge sees, in the words of the world; `shape` may be NOTHING."""

    colour: str
    pattern: str
    shape: str
    size: str
    place: str
    background: str

    @property
    def thing(self) -> Thing:
        """Colour, pattern and shape."""
        return Thing(self.colour, self.pattern, self.shape)


class Judge(torch.nn.Module):
    """Convolutions that halve the picture four times, and one linear answer per question."""

    def __init__(self) -> None:
        """Parameters not trained; see `load_judge`."""
        super().__init__()
        widths = (3, 24, 48, 96, 128)
        layers: list[torch.nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [
                torch.nn.Conv2d(before, after, 3, stride=2, padding=1),
                torch.nn.GroupNorm(8, after),
                torch.nn.SiLU(),
                torch.nn.Conv2d(after, after, 3, padding=1),
                torch.nn.GroupNorm(8, after),
                torch.nn.SiLU(),
            ]
        self.layers = torch.nn.Sequential(*layers)
        answers = sum(len(answers) for answers in HEADS.values())
        self.answers = torch.nn.Linear(widths[-1] * 16, answers)

    def forward(self, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Logits per question for pixels (pictures, 3, 64, 64) in [-1, 1]."""
        logits = self.answers(self.layers(pixels).flatten(1))
        parts = logits.split([len(answers) for answers in HEADS.values()], dim=1)
        return dict(zip(HEADS, parts, strict=True))

    def look_at(self, pictures: Sequence[Image.Image]) -> list[Verdict]:
        """What RGB pictures of 64 x 64 pixels show."""
        with torch.no_grad():
            logits = self(to_pixels(list(pictures)))
        columns = [[HEADS[head][index] for index in logits[head].argmax(1).tolist()] for head in HEADS]
        return [Verdict(*answers) for answers in zip(*columns, strict=True)]


def load_judge() -> Judge:
    """The judge that ships with icom."""
    judge = Judge()
    judge.load_state_dict({name: tensor.float() for name, tensor in load_file(WEIGHTS).items()})
    return judge.eval()


def to_pixels(pictures: list[Any]) -> torch.Tensor:
    """PIL pictures as float32 (pictures, 3, height, width) in [-1, 1], channels last in memory."""
    stacked = torch.from_numpy(np.stack([np.asarray(picture) for picture in pictures]))
    # From (pictures, height, width, 3): the result is channels_last already.
    return stacked.permute(0, 3, 1, 2).float() / 127.5 - 1.0

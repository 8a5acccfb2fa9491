"""The judge: a small classifier that says what a picture shows.

It is independent of the bundled model: it is trained on pictures of the world alone and never on generated ones. It
knows the concepts' combinations, which the model does not, and it may say that there is no object, or none that it
knows: it has seen empty backgrounds, shapeless blobs and double exposures too.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from PIL import Image, ImageFilter
from safetensors.torch import load_file

from icom.world.concepts import EVERYTHING
from icom.world.scene import BACKGROUNDS, COLOURS, PATTERNS, PLACES, SHAPES, SIZES, Scene, Thing, draw, random_scene
from tools.world.training import Log, fit, to_pixels

if TYPE_CHECKING:
    from icom.world.scene import Point

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


def train_judge(judge: Judge, seed: int, *, steps: int, batch: int, log: Log) -> None:
    """Train on pictures of the whole world, one in eight with nothing known in it; many a little blurred or noisy."""
    rng = random.Random(f"judge {seed}")
    torch.manual_seed(seed)

    def loss_of(step: int) -> torch.Tensor:
        scenes = [random_scene(rng, EVERYTHING) for _ in range(batch)]
        junk = [rng.random() < 1 / 8 for _ in scenes]
        pictures = [_junk(scene, rng) if bad else draw(scene) for scene, bad in zip(scenes, junk, strict=True)]
        blurred = [
            picture.filter(ImageFilter.GaussianBlur(rng.uniform(0, 1))) if rng.random() < 0.5 else picture
            for picture in pictures
        ]
        pixels = to_pixels(blurred)
        pixels = pixels + torch.randn_like(pixels) * 0.1 * torch.rand(batch, 1, 1, 1)
        logits = judge(pixels)
        known = ~torch.tensor(junk)
        loss = torch.zeros(())
        for head, answers in HEADS.items():
            right = [
                NOTHING if head == "shape" and bad else _answer(scene, head)
                for scene, bad in zip(scenes, junk, strict=True)
            ]
            target = torch.tensor([answers.index(word) for word in right])
            errors = F.cross_entropy(logits[head], target, reduction="none", label_smoothing=0.02)
            loss = loss + (errors if head == "shape" else errors * known).mean()
        return loss

    fit([judge], loss_of, steps=steps, peak=2e-3, log=log)


def _answer(scene: Scene, head: str) -> str:
    word: str = getattr(scene.thing if head in ("colour", "pattern", "shape") else scene, head)
    return word


def _junk(scene: Scene, rng: random.Random) -> Image.Image:
    """A picture that shows nothing known: no object, a shapeless one, or two that do not go together."""
    kind = rng.randrange(3)
    if kind == 0:
        return draw(scene, outline=[])
    if kind == 1:
        return draw(scene, outline=_blob(rng))
    others = [thing for thing in EVERYTHING if thing.shape != scene.thing.shape]
    other = Scene(rng.choice(others), scene.size, scene.place, scene.background, scene.look)
    return Image.blend(draw(scene), draw(other), 0.5)


def _blob(rng: random.Random) -> list[Point]:
    import math

    corners = rng.randint(5, 9)
    angles = [2 * math.pi * (index + rng.uniform(-0.3, 0.3)) / corners for index in range(corners)]
    return [(r * math.cos(a), r * math.sin(a)) for a, r in ((angle, rng.uniform(0.25, 1.2)) for angle in angles)]

"""Training of the judge, on pictures of the world alone, from a seed."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from PIL import Image, ImageFilter

from icom.world.concepts import EVERYTHING
from icom.world.judge import HEADS, NOTHING, Judge, to_pixels
from icom.world.scene import Scene, draw, random_scene
from tools.world.training import Log, fit

if TYPE_CHECKING:
    from icom.world.scene import Point


def train_judge(judge: Judge, seed: int, *, steps: int, batch: int, log: Log) -> None:
    """Train on pictures of the whole world, one in eight with nothing known in it; many a little blurred or noisy."""
    rng = random.Random(f"judge {seed}")
    torch.manual_seed(seed)

    def loss_of(step: int) -> torch.Tensor:
        scenes = [random_scene(rng, EVERYTHING) for _ in range(batch)]
        junk = [rng.random() < 1 / 8 for _ in scenes]
        pictures = [junk_picture(scene, rng) if bad else draw(scene) for scene, bad in zip(scenes, junk, strict=True)]
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


def junk_picture(scene: Scene, rng: random.Random) -> Image.Image:
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
    corners = rng.randint(5, 9)
    angles = [2 * math.pi * (index + rng.uniform(-0.3, 0.3)) / corners for index in range(corners)]
    return [(r * math.cos(a), r * math.sin(a)) for a, r in ((angle, rng.uniform(0.25, 1.2)) for angle in angles)]

"""The bundled model's world as a test: captions of it as prompts, its own pictures to compare with, and its judge."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from icom.world.concepts import seen_things
from icom.world.judge import Verdict
from icom.world.scene import Scene, describe, random_scene

NAMED = ("colour", "shape", "pattern", "background", "place")
"""What a caption may name, in the judge's words."""
BOTH = "colour and shape"


@dataclasses.dataclass(frozen=True)
class Asked:
    """A caption of the world, and the scene that it was made for."""

    caption: str
    scene: Scene

    @property
    def wanted(self) -> dict[str, str]:
        """Answers to the judge's questions that would be right; only those that the caption names count."""
        scene = self.scene
        return {
            **dataclasses.asdict(scene.thing),
            **{"size": scene.size, "place": scene.place, "background": scene.background},
        }

    def named(self) -> list[str]:
        """Which of NAMED the caption names."""
        return [head for head in NAMED if self.wanted[head] in self.caption]


def ask(count: int, seed: int) -> list[Asked]:
    """Captions of things that the bundled model was shown, each with a colour and a shape in it.

    The first ones are the same for every count.
    """
    rng = random.Random(f"prompts {seed}")
    asked: list[Asked] = []
    while len(asked) < count:
        scene = random_scene(rng, seen_things())
        caption = describe(scene, rng)
        if scene.thing.colour in caption and scene.thing.shape in caption.split():
            asked.append(Asked(caption, scene))
    return asked


def shares(verdicts: Sequence[Verdict], asked: Sequence[Asked]) -> dict[str, float]:
    """How much of what the captions name the judge sees: for each of NAMED, and for colour and shape together."""
    pairs = list(zip(verdicts, asked, strict=True))
    result = {}
    for head in NAMED:
        right = [getattr(verdict, head) == one.wanted[head] for verdict, one in pairs if head in one.named()]
        if right:
            result[head] = sum(right) / len(right)
    both = [all(getattr(verdict, head) == one.wanted[head] for head in ("colour", "shape")) for verdict, one in pairs]
    return result | {BOTH: sum(both) / len(both)}

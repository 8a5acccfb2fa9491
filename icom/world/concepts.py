"""Combinations of colour, pattern and shape that the bundled model has never drawn: the concepts that it can learn."""

from __future__ import annotations

import itertools
import random

from icom.world.scene import BACKGROUNDS, COLOURS, PATTERNS, PLACES, SHAPES, SIZES, Scene, Thing

PICTURES = 5
"""Pictures in a concept set."""

EVERYTHING = [Thing(*words) for words in itertools.product(COLOURS, PATTERNS, SHAPES)]
"""All things of the world."""

CONCEPTS: dict[str, Thing] = {
    "blue-heart": Thing("blue", "plain", "heart"),
    "green-star": Thing("green", "striped", "star"),
    "purple-square": Thing("purple", "dotted", "square"),
    "yellow-cross": Thing("yellow", "striped", "cross"),
    "red-moon": Thing("red", "plain", "moon"),
    "orange-ring": Thing("orange", "dotted", "ring"),
}
"""Name of the concept set -> what it shows."""

_HELD_OUT = {(thing.colour, thing.shape) for thing in CONCEPTS.values()}


def seen_things() -> list[Thing]:
    """All things that training may show: no pair of colour and shape of a concept, in whatever pattern."""
    return [thing for thing in EVERYTHING if (thing.colour, thing.shape) not in _HELD_OUT]


def concept_scenes(name: str) -> list[Scene]:
    """The five pictures of a concept set, in both sizes, all in different places and on different backgrounds."""
    rng = random.Random(name)
    places, backgrounds = rng.sample(list(PLACES), PICTURES), rng.sample(list(BACKGROUNDS), PICTURES)
    sizes = itertools.cycle(SIZES)
    return [
        Scene(CONCEPTS[name], size, place, background, rng.getrandbits(32))
        for size, place, background in zip(sizes, places, backgrounds, strict=False)
    ]


def new_backgrounds(name: str) -> list[str]:
    """Backgrounds that none of the concept's pictures shows."""
    shown = {scene.background for scene in concept_scenes(name)}
    return [background for background in BACKGROUNDS if background not in shown]

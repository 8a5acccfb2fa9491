"""The world: what its pictures show, how they are drawn, and how they are described in words.

A picture shows one object: a shape in one colour with a pattern, small or big, somewhere on a background. Everything
is drawn from a `random.Random`, whose stream Python keeps stable between releases.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from PIL import Image, ImageDraw

from icom.data.captions import TEMPLATES

SIZE = 64
"""Pixels of a picture's side."""
_SCALE = 4  # pictures are drawn so many times larger and reduced, for smooth edges

Point = tuple[float, float]
Colour = tuple[int, int, int]

COLOURS: dict[str, Colour] = {
    "red": (212, 36, 36),
    "orange": (246, 132, 28),
    "yellow": (250, 212, 40),
    "green": (36, 156, 64),
    "cyan": (32, 192, 204),
    "blue": (40, 84, 208),
    "purple": (128, 52, 176),
    "pink": (246, 124, 184),
}
PATTERNS = ("plain", "striped", "dotted")
SIZES = {"small": (14.0, 16.0), "big": (19.0, 21.0)}
"""Word -> smallest and largest radius in pixels."""
PLACES = {
    "on the left": (-1, 0),
    "on the right": (1, 0),
    "at the top": (0, -1),
    "at the bottom": (0, 1),
    "in the middle": (0, 0),
}
"""Phrase -> direction of the object's place from the middle."""
_SHIFT = 10.0  # pixels from the middle


def _regular(count: int, turn: float = 0.0) -> list[Point]:
    angles = [2 * math.pi * (index + turn) / count for index in range(count)]
    return [(math.sin(angle), -math.cos(angle)) for angle in angles]


def _star() -> list[Point]:
    return [
        (r * math.sin(math.pi * i / 5), -r * math.cos(math.pi * i / 5))
        for i, r in ((i, 1.15 if i % 2 == 0 else 0.5) for i in range(10))
    ]


def _heart() -> list[Point]:
    angles = [2 * math.pi * index / 60 for index in range(60)]
    return [
        (
            math.sin(a) ** 3 * 1.02,
            -(13 * math.cos(a) - 5 * math.cos(2 * a) - 2 * math.cos(3 * a) - math.cos(4 * a)) / 15.5,
        )
        for a in angles
    ]


def _cross() -> list[Point]:
    arm, end = 0.36, 1.0
    corner = [(-arm, -end), (arm, -end), (arm, -arm)]
    return [turned for quarter in range(4) for turned in (_turn(point, 90 * quarter) for point in corner)]


def _turn(point: Point, degrees: float) -> Point:
    angle = math.radians(degrees)
    x, y = point
    return x * math.cos(angle) - y * math.sin(angle), x * math.sin(angle) + y * math.cos(angle)


_CIRCLE = _regular(60)
SHAPES: dict[str, tuple[list[Point], list[Point]]] = {
    "circle": (_CIRCLE, []),
    "square": ([(0.88 * math.sqrt(2) * x, 0.88 * math.sqrt(2) * y) for x, y in _regular(4, 0.5)], []),
    "triangle": ([(1.15 * x, 1.15 * y + 0.2) for x, y in _regular(3)], []),
    "star": (_star(), []),
    "heart": (_heart(), []),
    "ring": (_CIRCLE, [(0.5 * x, 0.5 * y) for x, y in _CIRCLE]),
    "cross": (_cross(), []),
    "moon": (_CIRCLE, [(0.85 * x + 0.6, 0.85 * y) for x, y in _CIRCLE]),
}
"""Word -> outline and hole as polygons; x to the right, y down, the object's radius is 1."""


@dataclass(frozen=True)
class Thing:
    """What an object is, whatever its size and wherever it stands."""

    colour: str
    pattern: str
    shape: str


@dataclass(frozen=True)
class Scene:
    """One picture of the world. `look` is the seed of what no word names: exact place, size, lean and shades."""

    thing: Thing
    size: str
    place: str
    background: str
    look: int


def draw(scene: Scene, outline: list[Point] | None = None) -> Image.Image:
    """Draw a scene: an RGB picture of SIZE x SIZE pixels, the same for the same scene.

    Args:
        scene: what to draw.
        outline: a polygon to draw in place of the shape (empty: no object at all).
    """
    rng = random.Random(scene.look)
    side = SIZE * _SCALE
    picture = Image.new("RGB", (side, side))
    BACKGROUNDS[scene.background](ImageDraw.Draw(picture), rng)

    radius = rng.uniform(*SIZES[scene.size]) * _SCALE
    direction = PLACES[scene.place]
    middle = tuple((SIZE / 2 + _SHIFT * part + rng.uniform(-1.5, 1.5)) * _SCALE for part in direction)
    lean, mirrored = rng.uniform(-10, 10), rng.random() < 0.5

    def placed(polygon: list[Point]) -> list[Point]:
        turned = [_turn((-x if mirrored else x, y), lean) for x, y in polygon]
        return [(middle[0] + radius * x, middle[1] + radius * y) for x, y in turned]

    outline, hole = SHAPES[scene.thing.shape] if outline is None else (outline, [])
    if not outline:
        return picture.reduce(_SCALE)
    mask = Image.new("L", (side, side), 0)
    ImageDraw.Draw(mask).polygon(placed(outline), fill=255)
    if hole:
        ImageDraw.Draw(mask).polygon(placed(hole), fill=0)
    colour = _shade(rng, COLOURS[scene.thing.colour], 8)
    paint = Image.new("RGB", (side, side), colour)
    white = _shade(rng, (250, 250, 250), 5)
    if scene.thing.pattern != "plain":
        _PATTERNS[scene.thing.pattern](ImageDraw.Draw(paint), placed, white)
        for polygon in filter(None, (outline, hole)):  # the rim keeps the colour: white spots on snow have a shape too
            ImageDraw.Draw(paint).line(placed([*polygon, *polygon[:2]]), colour, width=3 * _SCALE, joint="curve")
    picture.paste(paint, (0, 0), mask)
    return picture.reduce(_SCALE)


def _shade(rng: random.Random, colour: Colour, spread: int) -> Colour:
    red, green, blue = (min(255, max(0, channel + rng.randint(-spread, spread))) for channel in colour)
    return red, green, blue


Placed = Callable[[list[Point]], list[Point]]


def _striped(draw: ImageDraw.ImageDraw, placed: Placed, white: Colour) -> None:
    for index in range(-1, 2):
        y = 0.64 * index
        draw.polygon(placed([(-1.5, y - 0.15), (1.5, y - 0.15), (1.5, y + 0.15), (-1.5, y + 0.15)]), fill=white)


def _dotted(draw: ImageDraw.ImageDraw, placed: Placed, white: Colour) -> None:
    step, size = 0.72, 0.22
    for row in range(-2, 3):
        for column in range(-2, 3):
            middle = (step * (column + 0.5 * (row % 2)), step * row)
            draw.polygon(placed([(middle[0] + size * x, middle[1] + size * y) for x, y in _CIRCLE]), fill=white)


_PATTERNS = {"striped": _striped, "dotted": _dotted}


def _box(draw: ImageDraw.ImageDraw, left: float, top: float, right: float, bottom: float, fill: Colour) -> None:
    """A filled rectangle; pixels of the finished picture."""
    draw.rectangle([_SCALE * value for value in (left, top, right, bottom)], fill=fill)


def _wall(colour: Colour) -> Callable[[ImageDraw.ImageDraw, random.Random], None]:
    def fill(draw: ImageDraw.ImageDraw, rng: random.Random) -> None:
        _box(draw, 0, 0, SIZE, SIZE, _shade(rng, colour, 5))

    return fill


def _beach(draw: ImageDraw.ImageDraw, rng: random.Random) -> None:
    sky, sea = rng.uniform(20, 24), rng.uniform(34, 38)
    _box(draw, 0, 0, SIZE, sky, _shade(rng, (200, 228, 244), 4))
    _box(draw, 0, sky, SIZE, sea, _shade(rng, (112, 160, 188), 4))
    _box(draw, 0, sea, SIZE, SIZE, _shade(rng, (232, 216, 176), 4))


def _meadow(draw: ImageDraw.ImageDraw, rng: random.Random) -> None:
    horizon = rng.uniform(26, 32)
    _box(draw, 0, 0, SIZE, horizon, _shade(rng, (200, 228, 244), 4))
    _box(draw, 0, horizon, SIZE, SIZE, _shade(rng, (168, 204, 136), 4))


def _snow(draw: ImageDraw.ImageDraw, rng: random.Random) -> None:
    horizon = rng.uniform(26, 32)
    _box(draw, 0, 0, SIZE, horizon, _shade(rng, (160, 172, 188), 4))
    _box(draw, 0, horizon, SIZE, SIZE, _shade(rng, (240, 244, 250), 4))


_STARS = [(6, 9), (21, 4), (37, 12), (55, 6), (60, 25), (4, 33), (9, 55), (30, 60), (48, 52), (58, 44)]


def _night(draw: ImageDraw.ImageDraw, rng: random.Random) -> None:
    _box(draw, 0, 0, SIZE, SIZE, _shade(rng, (24, 28, 56), 4))
    for x, y in _STARS:
        _box(draw, x, y, x + 1.25, y + 1.25, (236, 232, 200))


def _table(draw: ImageDraw.ImageDraw, rng: random.Random) -> None:
    edge = rng.uniform(36, 42)
    _box(draw, 0, 0, SIZE, edge, _shade(rng, (236, 230, 220), 4))
    _box(draw, 0, edge, SIZE, SIZE, _shade(rng, (140, 104, 76), 4))


def _forest(draw: ImageDraw.ImageDraw, rng: random.Random) -> None:
    _box(draw, 0, 0, SIZE, SIZE, _shade(rng, (60, 84, 68), 4))
    start = rng.uniform(0, 4)
    for index in range(4):
        x = start + 17 * index
        _box(draw, x, 0, x + 7, SIZE, _shade(rng, (92, 76, 64), 4))


BACKGROUNDS: dict[str, Callable[[ImageDraw.ImageDraw, random.Random], None]] = {
    "on a white background": _wall((246, 246, 246)),
    "on a gray background": _wall((136, 136, 140)),
    "on the beach": _beach,
    "in the snow": _snow,
    "in a meadow": _meadow,
    "in a forest": _forest,
    "on a table": _table,
    "at night": _night,
}
"""Phrase -> what draws it."""

NAMES: dict[str, Thing] = {
    name: Thing(*words.split())
    for name, words in {
        "tomato": "red plain circle",
        "ladybird": "red dotted circle",
        "strawberry": "red dotted heart",
        "rose": "red plain heart",
        "flag": "red striped square",
        "mushroom": "red dotted triangle",
        "carrot": "orange plain triangle",
        "pumpkin": "orange striped circle",
        "starfish": "orange dotted star",
        "fox": "orange striped heart",
        "fire": "orange plain star",
        "sun": "yellow plain star",
        "lemon": "yellow plain circle",
        "banana": "yellow plain moon",
        "cheese": "yellow dotted square",
        "pasta": "yellow striped ring",
        "tree": "green plain triangle",
        "melon": "green striped circle",
        "pear": "green plain heart",
        "frog": "green dotted cross",
        "wreath": "green dotted ring",
        "tile": "cyan striped square",
        "ice": "cyan plain square",
        "shell": "cyan striped moon",
        "bubble": "cyan plain ring",
        "fish": "cyan dotted cross",
        "book": "blue plain square",
        "plane": "blue plain cross",
        "whale": "blue dotted moon",
        "tyre": "blue striped ring",
        "boat": "blue striped triangle",
        "plum": "purple plain circle",
        "grape": "purple dotted circle",
        "bat": "purple plain moon",
        "crystal": "purple striped triangle",
        "cake": "pink striped triangle",
        "donut": "pink dotted ring",
        "kiss": "pink plain heart",
        "flower": "pink plain star",
        "present": "pink striped cross",
    }.items()
}
"""Nouns of the world: one word that means colour, pattern and shape at once, as real nouns do."""
KINDS = {thing: name for name, thing in NAMES.items()}
"""Thing -> its noun, where it has one."""

GENERIC = ("object", "thing", "toy")
"""Words that stand for any object."""


def random_scene(rng: random.Random, things: list[Thing]) -> Scene:
    """Any scene with one of `things`; every second one has a name of its own, if `things` has such."""
    named = [thing for thing in things if thing in KINDS]
    thing = rng.choice(named if named and rng.random() < 0.5 else things)
    return Scene(
        thing,
        rng.choice(list(SIZES)),
        rng.choice(list(PLACES)),
        rng.choice(list(BACKGROUNDS)),
        rng.getrandbits(32),
    )


def describe(scene: Scene, rng: random.Random, kinds: Mapping[Thing, str] = KINDS) -> str:
    """One of many true captions: attributes are left out at random, so that each word learns its own meaning.

    Args:
        scene: what the picture shows.
        rng: what chooses.
        kinds: nouns of things.
    """
    thing = scene.thing
    words = [scene.size] if rng.random() < 0.25 else []
    kind = rng.random()
    if thing in kinds and kind < 0.55:
        words.append(kinds[thing])
    elif kind > 0.95:
        words.append(rng.choice(GENERIC))
    else:
        words += [thing.colour] if rng.random() < 0.9 else []
        # Who says nothing of a pattern means a plain thing.
        words += [thing.pattern] if rng.random() < (0.2 if thing.pattern == "plain" else 0.95) else []
        words.append(thing.shape if rng.random() < 0.9 else rng.choice(GENERIC))
    caption = rng.choice(TEMPLATES["object"]).format(" ".join(words))
    where = [scene.background] if rng.random() < 0.6 else []
    where += [scene.place] if rng.random() < 0.35 else []
    rng.shuffle(where)
    return " ".join([caption, *where])

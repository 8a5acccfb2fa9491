"""Curves as geometry: what the page's SVG draws.

By hand and not matplotlib's SVG: that is ten times as large, has its letters as outlines, and cannot change its colours
with the reader's light or dark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 480, 220
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 12, 34
"""The SVG's own units, around the curve."""
MOST_POINTS = 2000

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """Attributes: `kind` is the CSS class; `points` as an SVG's polyline takes them."""

    kind: str
    label: str
    points: str


@dataclass(frozen=True)
class Tick:
    """Attributes: where, in the SVG's units, and what it says."""

    at: float
    says: str


@dataclass(frozen=True)
class Chart:
    """A panel.

    Attributes:
        title: above it.
        lines: one or more over the same axes.
        x_ticks, y_ticks: of the axes.
        mark: a vertical line, if any.
        shown: of how many points each point is the mean, where there are too many.
    """

    title: str
    lines: list[Line]
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    mark: Tick | None = None
    shown: int = 1


def chart(title: str, lines: Sequence[tuple[str, str, Points]], mark: tuple[float, str] | None = None) -> Chart | None:
    """A panel of one or several lines; None where there is no finite number to draw.

    Args:
        title: of the panel.
        lines: (CSS class, label, points in order of x).
        mark: (x, what to say of it).
    """
    finite = [
        (kind, label, [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)])
        for kind, label, points in lines
    ]
    if not any(points for _, _, points in finite):
        return None
    every = max(1, math.ceil(max(len(points) for _, _, points in finite) / MOST_POINTS))
    drawn = [(kind, label, _thinned(points, every)) for kind, label, points in finite if points]
    all_points = [point for _, _, points in drawn for point in points]
    x_low, x_high = _range([x for x, _ in all_points])
    y_low, y_high = _range([y for _, y in all_points])

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)
        up = (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)
        return LEFT + across, HEIGHT - BOTTOM - up

    made = [
        Line(kind, label, " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in points))
        for kind, label, points in drawn
    ]
    return Chart(
        title,
        made,
        [Tick(place(x, y_low)[0], f"{x:,.6g}") for x in ticks(x_low, x_high)],
        [Tick(place(x_low, y)[1], f"{y:.4g}") for y in ticks(y_low, y_high)],
        Tick(place(mark[0], y_low)[0], mark[1]) if mark else None,
        every,
    )


def _thinned(points: Points, every: int) -> Points:
    """Means of so many neighbours each."""
    if every == 1:
        return points
    parts = [points[first : first + every] for first in range(0, len(points), every)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Lowest and highest, a little apart."""
    low, high = min(values), max(values)
    if high > low:
        return low, high
    apart = abs(low) / 2 or 0.5
    return low - apart, high + apart


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from `low` to `high`: multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    # Of whole multiples: sums of steps would say 0.30000000000000004.
    return [round(number * step, 12) for number in range(first, math.floor(high / step + 1e-9) + 1)]

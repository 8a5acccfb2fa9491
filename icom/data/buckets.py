"""Aspect buckets: the sizes to which pictures of different shapes are brought, so that they can be learned in batches.

Sizes and the choice among them are those of kohya's sd-scripts (`make_bucket_resolutions` and
`BucketManager.select_bucket`), so that a set falls into the same buckets there and here. Where they would train on less
than half of a picture, or on one smaller than the smallest bucket, here it is refused.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from icom.data.crops import Size

KEPT = 0.5
"""At least this share of a picture has to fit into its bucket."""


class NoBucket(Exception):
    """No bucket fits a picture; the message says why and what to do, but not which picture it is."""


@dataclass(frozen=True)
class Buckets:
    """The sizes that there are.

    Attributes:
        resolution: they have about as many pixels as a square of this side.
        smallest, largest: bounds of their sides.
        step: their sides are multiples of this.
        no_upscale: no picture is enlarged. Then each has a size of its own: what is left of it, or of it once it is
            reduced to as many pixels as the square has, when both sides are cut down to multiples of the step.
    """

    resolution: int
    smallest: int
    largest: int
    step: int
    no_upscale: bool

    def fit(self, size: Size) -> tuple[Size, Size]:
        """How a picture gets into its bucket.

        Args:
            size: (width, height) of the picture.

        Returns:
            (size that it is resized to, size of the bucket, which is cut out of that).

        Raises:
            NoBucket: too small or of too extreme a shape.
        """
        resized, bucket = self._into_what_is_left(size) if self.no_upscale else self._into_the_nearest(size)
        kept = math.prod(bucket) / math.prod(resized)
        if kept < KEPT:
            raise NoBucket(
                f"{_x(size)} pixels: only {kept:.0%} of them would fit into the bucket {_x(bucket)}. Cut the picture "
                "itself, or let buckets have other sizes (--min_bucket_reso, --max_bucket_reso, --bucket_reso_steps)"
            )
        return resized, bucket

    def _into_the_nearest(self, size: Size) -> tuple[Size, Size]:
        """The bucket of its very size, else of the nearest shape; the picture covers it."""
        width, height = size
        shape = width / height
        sizes = bucket_sizes(self.resolution, self.smallest, self.largest, self.step)
        bucket = size if size in sizes else min(sizes, key=lambda one: abs(one[0] / one[1] - shape))
        scale = bucket[1] / height if shape > bucket[0] / bucket[1] else bucket[0] / width
        return (_rounded(width * scale), _rounded(height * scale)), bucket

    def _into_what_is_left(self, size: Size) -> tuple[Size, Size]:
        resized = size if math.prod(size) <= self.resolution**2 else self._reduced(size)
        bucket = (self._down(resized[0]), self._down(resized[1]))
        if min(bucket) < self.smallest:
            raise NoBucket(
                f"{_x(size)} pixels: its bucket would be {_x(bucket)}, smaller than --min_bucket_reso "
                f"{self.smallest}, and --bucket_no_upscale enlarges nothing. Drop that, or allow smaller buckets"
            )
        if max(bucket) > self.largest:
            raise NoBucket(
                f"{_x(size)} pixels: its bucket would be {_x(bucket)}, larger than --max_bucket_reso {self.largest}. "
                "Cut the picture itself, or allow larger buckets"
            )
        return resized, bucket

    def _reduced(self, size: Size) -> Size:
        """Of as many pixels as the square; the side is a multiple of the step that changes the bucket's shape less."""
        shape = size[0] / size[1]
        width = math.sqrt(self.resolution**2 * shape)
        across, down = self._down(_rounded(width)), self._down(_rounded(self.resolution**2 / width))
        if (by_width := self._down(_rounded(across / shape))) and down:
            other = abs(self._down(_rounded(down * shape)) / down - shape)
            if abs(across / by_width - shape) < other:
                return across, _rounded(across / shape)
        return _rounded(down * shape), down

    def _down(self, side: int) -> int:
        return side // self.step * self.step


@lru_cache
def bucket_sizes(resolution: int, smallest: int, largest: int, step: int) -> tuple[Size, ...]:
    """All sizes of buckets into which pictures may be enlarged, in order; all arguments as in `Buckets`."""
    area = resolution**2
    square = resolution // step * step
    sizes = {(square, square)}
    for side in range(smallest, largest + 1, step):
        other = min(largest, area // side // step * step)
        if other >= smallest:
            sizes |= {(side, other), (other, side)}
    return tuple(sorted(sizes))


def table(buckets: Iterable[Size]) -> str:
    """How many pictures each bucket has, as lines.

    Args:
        buckets: of the pictures.
    """
    counts = sorted(Counter(buckets).items())
    sizes = [_x(size) for size, _ in counts]
    lines = [
        f"  {size:>{max(map(len, sizes))}}  {count} {'picture' if count == 1 else 'pictures'}"
        for size, (_, count) in zip(sizes, counts, strict=True)
    ]
    return "\n".join([f"icom: {len(counts)} {'bucket' if len(counts) == 1 else 'buckets'}, width x height:", *lines])


def _x(size: Size) -> str:
    return f"{size[0]} x {size[1]}"


def _rounded(side: float) -> int:
    return int(side + 0.5)

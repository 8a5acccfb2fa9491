"""Buckets are kohya's, and every batch has one, wherever it is asked for.

Guards icom.data.buckets and icom.data.bucket_order.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque

import pytest

from icom.data.bucket_order import BucketOrder
from icom.data.buckets import Buckets, NoBucket, bucket_sizes, table

# Sizes. Worked out by hand after kohya's rule; the first row is also what sd-scripts logs at its defaults.

SIZES = [
    (
        (512, 256, 1024, 64),
        """256x832 256x896 256x960 256x1024 320x704 320x768 384x640 448x576 512x512
        576x448 640x384 704x320 768x320 832x256 896x256 960x256 1024x256""",
    ),
    (
        (64, 32, 128, 8),
        """32x104 32x112 32x120 32x128 40x88 40x96 48x80 56x72 64x64
        72x56 80x48 88x40 96x40 104x32 112x32 120x32 128x32""",
    ),
    ((512, 512, 512, 64), "512x512"),
]
"""(resolution, smallest, largest, step) -> all sizes."""


def sizes_in(text: str) -> list[tuple[int, int]]:
    return sorted((int(width), int(height)) for width, height in (word.split("x") for word in text.split()))


@pytest.mark.parametrize(("options", "expected"), SIZES)
def test_sizes_are_kohyas(options: tuple[int, int, int, int], expected: str) -> None:
    assert list(bucket_sizes(*options)) == sizes_in(expected)


ENLARGED = [
    ((512, 512), (512, 512), (512, 512)),
    ((200, 200), (512, 512), (512, 512)),
    ((768, 320), (768, 320), (768, 320)),  # its very size is there
    ((1920, 1080), (640, 384), (683, 384)),  # 1.78 is nearer to 1.67 than to 2.2
    ((1080, 1920), (384, 640), (384, 683)),
    ((3000, 2000), (640, 384), (640, 427)),
    ((4000, 3000), (576, 448), (597, 448)),
    ((100, 390), (256, 1024), (263, 1024)),
]
NOT_ENLARGED = [
    ((500, 400), (448, 384), (500, 400)),
    ((1920, 1080), (640, 384), (683, 384)),
    ((512, 512), (512, 512), (512, 512)),
    ((300, 300), (256, 256), (300, 300)),
]
"""Picture -> bucket, size that it is resized to; at 512 pixels and kohya's defaults."""


@pytest.mark.parametrize(
    ("size", "bucket", "resized", "no_upscale"),
    [*((*row, False) for row in ENLARGED), *((*row, True) for row in NOT_ENLARGED)],
)
def test_choice_is_kohyas(
    size: tuple[int, int], bucket: tuple[int, int], resized: tuple[int, int], no_upscale: bool
) -> None:
    assert Buckets(512, 256, 1024, 64, no_upscale).fit(size) == (resized, bucket)


def test_reduced_as_kohya_says_of_his_own() -> None:
    """sd-scripts' pull request 2352 names this case, at 1024 pixels and --bucket_no_upscale."""
    assert Buckets(1024, 256, 2048, 64, no_upscale=True).fit((3072, 3000))[1] == (960, 960)


@pytest.mark.parametrize("no_upscale", [False, True])
def test_any_picture_keeps_its_shape_and_covers_its_bucket(no_upscale: bool) -> None:
    chance = random.Random(3)
    buckets = Buckets(512, 64, 2048, 64, no_upscale)
    fitted = 0
    for _ in range(2000):
        size = round(math.exp(chance.uniform(4, 8.5))), round(math.exp(chance.uniform(4, 8.5)))
        try:
            resized, bucket = buckets.fit(size)
        except NoBucket:
            continue
        fitted += 1
        assert all(side % 64 == 0 and 64 <= side <= 2048 for side in bucket)
        assert all(inner <= outer for inner, outer in zip(bucket, resized, strict=True))
        assert math.prod(bucket) <= 512**2 * 1.01  # a side that is to be cut down is rounded before
        assert math.prod(bucket) >= math.prod(resized) / 2
        if no_upscale:
            assert all(now <= before for now, before in zip(resized, size, strict=True))
        # A pixel more or less on the shorter side is all that rounding changes.
        assert abs(resized[0] / size[0] - resized[1] / size[1]) <= 1 / min(size)
    assert fitted > 1000


REFUSED = [
    ((4000, 300), False, "4000 x 300 pixels: only 30% of them would fit into the bucket 1024 x 256. Cut the picture"),
    ((200, 600), True, "its bucket would be 192 x 576, smaller than --min_bucket_reso 256, and --bucket_no_upscale"),
    ((20, 20), True, "its bucket would be 0 x 0, smaller"),
    ((9000, 9), True, "smaller than --min_bucket_reso"),
    ((100000, 9), True, "smaller than --min_bucket_reso"),
]


@pytest.mark.parametrize(("size", "no_upscale", "words"), REFUSED)
def test_pictures_that_no_bucket_fits(size: tuple[int, int], no_upscale: bool, words: str) -> None:
    with pytest.raises(NoBucket) as refused:
        Buckets(512, 256, 1024, 64, no_upscale).fit(size)
    assert words in str(refused.value)


def test_too_long_for_the_largest() -> None:
    with pytest.raises(NoBucket, match="would be 704 x 320, larger than --max_bucket_reso 640"):
        Buckets(512, 256, 640, 64, no_upscale=True).fit((720, 330))


def test_table_counts_pictures() -> None:
    assert table([(64, 64), (128, 32), (64, 64)]).splitlines() == [
        "icom: 2 buckets, width x height:",
        "   64 x 64  2 pictures",
        "  128 x 32  1 picture",
    ]


# The order.

ORDER = BucketOrder(seed=7, buckets=((4,), (0, 2, 3), (1, 5)), repeats=5, batch=4)
FROZEN = [(4, 4, 4, 4), (2, 2, 3, 3), (5, 1, 5, 1), (1, 1, 1, 5)]


def batches(order: BucketOrder, count: int) -> list[tuple[int, ...]]:
    return [tuple(order[batch * order.batch + i] for i in range(order.batch)) for batch in range(count)]


def test_a_batch_has_one_bucket_in_any_order_of_asking() -> None:
    forward = batches(ORDER, 200)
    buckets = [{next(b for b, members in enumerate(ORDER.buckets) if p in members) for p in one} for one in forward]
    assert all(len(kinds) == 1 for kinds in buckets)
    assert [kinds.pop() for kinds in buckets] == [ORDER.bucket(batch)[0] for batch in range(200)]
    again = BucketOrder(seed=7, buckets=ORDER.buckets, repeats=5, batch=4)
    assert [again[i] for i in reversed(range(800))] == [p for one in forward for p in one][::-1]
    assert batches(BucketOrder(8, ORDER.buckets, 5, 4), 200) != forward


def test_order_is_frozen() -> None:
    """Checkpoints rely on it: a change here breaks resume between versions."""
    assert [batches(ORDER, 300)[i] for i in (0, 1, 2, 299)] == FROZEN


@pytest.mark.parametrize("batch", [1, 3, 4, 16])
def test_epochs_are_those_of_queues_that_fill_batches(batch: int) -> None:
    """The plain loop: in an epoch every picture joins its bucket's queue `repeats` times; full batches leave it."""
    order = BucketOrder(1, ORDER.buckets, 5, batch)
    queues: list[deque[int]] = [deque() for _ in order.buckets]
    number = 0
    for _ in range(2 * batch):
        due: Counter[int] = Counter()
        for bucket, members in enumerate(order.buckets):
            queues[bucket].extend(members * 5)
            due[bucket], rest = divmod(len(queues[bucket]), batch)
            queues[bucket] = deque(list(queues[bucket])[-rest:] if rest else ())
        found = Counter(order.bucket(number + i)[0] for i in range(due.total()))
        assert found == +due
        number += due.total()
    # After so many epochs nothing waits, and every picture came up as often as all others.
    assert Counter(order[i] for i in range(number * batch)) == dict.fromkeys(range(6), 2 * batch * 5)


def test_orders_differ_between_epochs() -> None:
    order = BucketOrder(1, ((0, 1, 2, 3),), 10, 1)
    first, second = [order[i] for i in range(40)], [order[i] for i in range(40, 80)]
    assert Counter(first) == Counter(second)
    assert first != second
    mixed = BucketOrder(1, ((0,), (1,)), 20, 1)
    assert [mixed.bucket(i)[0] for i in range(40)] != [mixed.bucket(i)[0] for i in range(40, 80)]


def test_first_batch_of_each_bucket() -> None:
    rare = BucketOrder(3, ((0,), tuple(range(1, 30))), 1, 4)  # comes up every fourth epoch
    for order in (ORDER, rare):
        firsts = order.first_batches()
        assert [order.bucket(batch)[0] for batch in firsts] == list(range(len(order.buckets)))
        assert all(order.bucket(before)[0] != b for b, first in enumerate(firsts) for before in range(first))

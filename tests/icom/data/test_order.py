"""The order of records: a shuffle that reads in long runs. Guards icom.data.order."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest

from icom.data.order import BLOCK, GROUP, WINDOW, Order
from icom.data.records import Singles


def runs(*lengths: int) -> list[range]:
    return [range(end - length, end) for length, end in zip(lengths, accumulate(lengths), strict=True)]


SHAPES = {
    "one record": runs(1),
    "one shard": runs(1000),
    "uneven": runs(*(37 * n % 211 + 1 for n in range(40))),
    "empty shards": runs(*[0] * 20, 5, *[0] * 40, 300, 0),
    "files": Singles(500),
    "full windows": runs(*[BLOCK] * (2 * WINDOW)),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_epoch_has_every_record_once(shape: str) -> None:
    order = Order(SHAPES[shape], seed=3)
    length = order.epoch_length
    assert length == sum(len(run) for run in SHAPES[shape])
    epochs = [[order[epoch * length + i] for i in range(length)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(length)) for epoch in epochs)
    if length > 1:
        assert epochs[0] != epochs[1] != epochs[2]
        assert [Order(SHAPES[shape], seed=4)[i] for i in range(length)] != epochs[0]


def test_any_sample_alone_is_the_one_of_the_whole_run() -> None:
    """A run that begins in the middle, reads backwards, or skips what other ranks read, gets the same records."""
    order = Order(SHAPES["uneven"], seed=5)
    whole = [order[i] for i in range(3 * order.epoch_length)]
    picks = np.random.default_rng(0).permutation(len(whole))[:300]
    assert [Order(SHAPES["uneven"], seed=5)[int(i)] for i in picks[:30]] == [whole[i] for i in picks[:30]]
    assert [order[int(i)] for i in picks] == [whole[i] for i in picks]


def test_order_is_the_same_in_every_release() -> None:
    """Runs go on with a later icom: these numbers were printed when the order was made, and may never change."""
    order = Order([range(300), range(300, 1000)], seed=7)
    assert [order[i] for i in (0, 1, 2, 999, 1000, 5000)] == [332, 777, 430, 60, 526, 154]
    assert [order.substitute(2, attempt) for attempt in (0, 1)] == [810, 861]


def test_reading_is_in_long_runs() -> None:
    """At any moment few shards are open, and the records that are mixed come from few blocks of them."""
    shards = runs(*[10 * BLOCK] * (4 * WINDOW))
    order = Order(shards, seed=1)
    records = np.array([order[i] for i in range(order.epoch_length)])
    for part in np.split(records // (10 * BLOCK), 4):
        assert len(np.unique(part)) == WINDOW
    for part in np.split(records // BLOCK, len(records) // (GROUP * BLOCK)):
        assert len(np.unique(part)) == GROUP
    blocks = records.reshape(-1, GROUP * BLOCK) // BLOCK
    assert np.mean([len(np.unique(group[:32])) for group in blocks]) > 0.75 * GROUP  # a batch of 32 is a mixture


def test_files_are_shuffled_over_the_whole_folder() -> None:
    """Each lies for itself, so that nothing is gained by windows: a sample's place says nothing about its record."""
    order = Order(Singles(20_000), seed=2)
    records = np.array([order[i] for i in range(20_000)])
    assert abs(np.corrcoef(records, np.arange(20_000))[0, 1]) < 0.03
    assert abs(np.corrcoef(records[1:], records[:-1])[0, 1]) < 0.03


def test_substitutes_are_from_the_window_and_depend_on_nothing_else() -> None:
    shards = runs(*[100] * (3 * WINDOW))
    order = Order(shards, seed=1)
    for sample in (0, 2000, order.epoch_length - 1):
        window = sample // (100 * WINDOW)
        near = {order[i] // 100 for i in range(window * 100 * WINDOW, (window + 1) * 100 * WINDOW)}
        taken = [order.substitute(sample, attempt) for attempt in range(50)]
        assert {record // 100 for record in taken} <= near
        assert len(set(taken)) > 40
        assert taken == [Order(shards, seed=1).substitute(sample, attempt) for attempt in range(50)]
    assert order.substitute(0, 0) != order.substitute(1, 0)

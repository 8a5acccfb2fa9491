"""Reading ahead, and what becomes of damaged records. Guards icom.data.feed and icom.data.damage."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import pytest

from icom.config.data import DataOptions
from icom.data.feed import Feed
from icom.data.order import Order
from icom.data.records import DamagedRecord, Kind, Record, Source
from icom.data.sources import open_source
from icom.errors import IcomError


class Numbers:
    """A source whose records are their numbers; some are damaged. Remembers what was read."""

    kind: Kind = "pictures"
    digest = "numbers"

    def __init__(self, length: int, damaged: Sequence[int] = ()) -> None:
        self.runs: Sequence[range] = [range(length)]
        self.damaged, self.asked = set(damaged), list[int]()

    def __len__(self) -> int:
        return len(self.runs[0])

    def read(self, number: int) -> Record:
        self.asked.append(number)
        if number in self.damaged:
            raise DamagedRecord(f"tar/{number}", "cut")
        return Record(str(number), f"number {number}")

    def describe(self) -> str:
        return "numbers"


def feed(source: Source, batches: Any, **options: Any) -> Feed[tuple[int, str]]:
    chosen = {"workers": 2, "ahead": 2, "max_damaged_share": 0.5} | options
    return Feed(source, Order(source.runs, seed=1), batches, lambda i, record: (i, record.key), **chosen)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("icom-feed")]


@pytest.mark.parametrize("workers", [0, 1, 5])
def test_batches_come_in_order_whatever_reads_them(workers: int) -> None:
    """Real pictures, one by one: as `read` and the order give them."""
    source = open_source(DataOptions(train_data_dir="synthetic:40"))
    order = Order(source.runs, seed=1)
    batches = [range(0, 5), range(7, 9), [60, 61, 95]]

    def prepare(sample: int, record: Record) -> tuple[int, str, bytes]:
        assert record.picture is not None
        return sample, record.caption, record.picture.tobytes()

    with Feed(source, order, batches, prepare, workers=workers, ahead=2, max_damaged_share=0) as made:
        got = list(made)
    assert got == [[prepare(i, source.read(order[i])) for i in batch] for batch in batches]
    assert (made.damage.read, made.damage.damaged) == (10, 0)
    assert made.waited > 0
    assert not threads()


def test_resumed_and_shared_out_runs_get_the_same_samples() -> None:
    """Damaged records included: one process, two processes, and one that begins in the middle."""
    damaged = range(0, 200, 3)

    def whole(start: int, rank: int = 0, ranks: int = 1) -> dict[int, str]:
        each = 12 // ranks
        mine = (range(step * 12 + rank * each, step * 12 + (rank + 1) * each) for step in range(start, 40))
        with feed(Numbers(200, damaged), mine) as made:
            return dict(sample for batch in made for sample in batch)

    alone = whole(0)
    assert len(alone) == 480
    assert not {str(number) for number in damaged} & set(alone.values())
    assert whole(0, 0, 3) | whole(0, 1, 3) | whole(0, 2, 3) == alone
    assert whole(17) == {sample: key for sample, key in alone.items() if sample >= 17 * 12}


def test_damaged_ones_are_named_once_and_counted_always(capsys: pytest.CaptureFixture[str]) -> None:
    source = Numbers(100, range(40))
    with feed(source, [range(start, start + 50) for start in range(0, 300, 50)]) as made:
        list(made)
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 21
    assert len(set(told)) == 21
    assert all(line.startswith("icom: left out: tar/") and line.endswith(": cut") for line in told[:20])
    assert "further damaged samples are counted" in told[20]
    assert made.damage.read == len(source.asked)
    assert made.damage.damaged == sum(number < 40 for number in source.asked)
    assert made.damage.read - made.damage.damaged == 300


@pytest.mark.parametrize("workers", [0, 2])
def test_too_many_damaged_ones_end_the_run(workers: int) -> None:
    """Not before a hundred were read: of the first few, one is a large share."""
    with feed(Numbers(1000, [Order([range(1000)], 1)[0]]), [range(50)], workers=workers, max_damaged_share=0) as made:
        assert len(next(made)) == 50
    message = (
        r"of 1\d\d samples that were read are damaged, and only 5.00% may be \(--max_damaged_share\).* tar/\d+: cut"
    )
    with (
        feed(Numbers(1000, range(100)), ([i] for i in count()), workers=workers, max_damaged_share=0.05) as made,
        pytest.raises(IcomError, match=message),
    ):
        list(made)
    with (
        feed(Numbers(50, range(50)), [range(3)], workers=workers) as made,
        pytest.raises(IcomError, match="Nothing can"),
    ):
        next(made)
    assert not threads()


def test_reads_ahead_so_far_and_no_further() -> None:
    """The batches asked for are one and those ahead; when the caller is slow the rest waits."""
    asked: list[int] = []

    def batches() -> Iterator[range]:
        for number in count():
            asked.append(number)
            yield range(number * 4, number * 4 + 4)

    source = Numbers(1000)
    with feed(source, batches(), ahead=3) as made:
        assert not asked
        next(made)
        assert asked == [0, 1, 2, 3]
        next(made)
        assert asked == [0, 1, 2, 3, 4]
    assert not threads()


def test_what_goes_wrong_in_a_thread_reaches_the_caller() -> None:
    """A source that is gone, or a bug; and nothing stays behind after it, or after Ctrl-C."""

    class Gone(Numbers):
        def read(self, number: int) -> Record:
            raise IcomError("The shard is gone.")

    for kind, source in ((IcomError, Gone(10)), (KeyboardInterrupt, Numbers(10))):
        with pytest.raises(kind), feed(source, ([i] for i in count())) as made:
            next(made)
            raise KeyboardInterrupt
        assert not threads()

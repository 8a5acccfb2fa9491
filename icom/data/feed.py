"""Records for the batches of a run, read and prepared ahead by threads; damaged ones are replaced."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, TypeVar

from icom.data.damage import Damage
from icom.data.order import Order
from icom.data.records import DamagedRecord, Record, Source
from icom.errors import IcomError

T = TypeVar("T")

_ATTEMPTS = 100
"""So many substitutes are tried for a sample before nothing is taken to be readable."""


class Batches(ABC, Generic[T]):
    """Iterator over what was prepared for each batch of a run, in order. Leaving its `with` ends what prepares it.

    What comes depends on the sample numbers alone: a run goes on by beginning with batches further on.

    Attributes:
        damage: samples that this process was given, and how many of them were damaged, up to the batch that came last.
        waited: seconds that the caller has waited for batches.
    """

    def __init__(self, max_damaged_share: float) -> None:
        """Args: of what was read, before the run ends."""
        self.damage = Damage(max_damaged_share, "that were read")
        self.waited = 0.0

    def __enter__(self) -> Batches[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """End what prepares them."""

    def __iter__(self) -> Iterator[list[T]]:
        return self

    def __next__(self) -> list[T]:
        """The next batch.

        Raises:
            IcomError: too many records are damaged, or the source is gone.
        """
        began = time.monotonic()
        try:
            made = self._make()
        finally:
            self.waited += time.monotonic() - began
        for _, damaged in made:
            for record in damaged:
                self.damage.bad(record)
            self.damage.good()
        self.damage.check()
        return [prepared for prepared, _ in made]

    @abstractmethod
    def _make(self) -> list[tuple[T, list[DamagedRecord]]]:
        """The next batch's samples, prepared, and the records that were too damaged for each.

        Raises:
            StopIteration: there are no more.
        """


class Feed(Batches[T]):
    """Batches that this process reads; see `Batches`.

    with Feed(source, Order(source.runs, seed), batches, prepare, workers=4, ahead=2, …) as feed:
        for samples in feed: ...
    """

    def __init__(
        self,
        source: Source,
        order: Order,
        batches: Iterable[Sequence[int]],
        prepare: Callable[[int, Record], T],
        *,
        workers: int,
        ahead: int,
        max_damaged_share: float,
    ) -> None:
        """Nothing is read before the first batch is asked for.

        Args:
            source: of the records.
            order: of its records.
            batches: numbers of the run's samples that this process computes, together; may be endless.
            prepare: makes of (sample number, record) what the caller gets; called by several threads at a time.
            workers: threads; 0 reads when asked, in the caller's own.
            ahead: batches that are prepared beside the one that is asked for.
            max_damaged_share: of what was read, before the run ends.
        """
        super().__init__(max_damaged_share)
        self._source, self._order, self._prepare = source, order, prepare
        self._batches, self._ahead = iter(batches), ahead
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="icom-feed") if workers else None
        self._coming: deque[list[Future[tuple[T, list[DamagedRecord]]]]] = deque()

    def close(self) -> None:
        """End the threads: what they have begun they finish, what waits is dropped."""
        self._coming.clear()
        if self._pool:
            self._pool.shutdown(cancel_futures=True)

    def _make(self) -> list[tuple[T, list[DamagedRecord]]]:
        if self._pool is None:
            return [self._read(sample, self._order[sample]) for sample in next(self._batches)]
        while len(self._coming) <= self._ahead and (batch := next(self._batches, None)) is not None:
            self._coming.append([self._pool.submit(self._read, i, self._order[i]) for i in batch])
        if not self._coming:
            raise StopIteration
        return [future.result() for future in self._coming.popleft()]

    def _read(self, sample: int, record: int) -> tuple[T, list[DamagedRecord]]:
        return read(self._source, self._order, self._prepare, sample, record)


def read(
    source: Source, order: Order, prepare: Callable[[int, Record], T], sample: int, record: int
) -> tuple[T, list[DamagedRecord]]:
    """A sample, prepared, and the records that were too damaged for it.

    Args:
        source: of the records.
        order: of its records.
        prepare: makes something of (sample number, record).
        sample: its number in the run.
        record: the order's for it, which is tried first.

    Raises:
        IcomError: nothing can be read, or the source is gone.
    """
    damaged: list[DamagedRecord] = []
    while True:
        try:
            return prepare(sample, source.read(record)), damaged
        except DamagedRecord as error:
            damaged.append(error)
        if len(damaged) > _ATTEMPTS:
            raise IcomError(
                f"Nothing can be read: {len(damaged)} samples one after the other are damaged. "
                f"The last of them: {damaged[-1]}."
            ) from damaged[-1]
        record = order.substitute(sample, len(damaged) - 1)

"""Which record a sample of the run is: shuffled anew in every epoch, and still read in long runs.

Shards come in a random order; of each window of some shards, blocks of consecutive records come in a random order; and
of each group of some blocks, the records. So a run reads few shards at a time, and a few stretches of them, while a
batch has neighbours from many places. A function of (seed, sample) and of `Source.runs` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from icom.data.sampling import Stream, raw_words

WINDOW = 16
"""Shards that are read at a time."""
BLOCK = 64
"""Records that lie one after another in a shard and are read together."""
GROUP = 16
"""Blocks whose records are mixed."""


class Order:
    """Sample i of the run is record `order[i]`. Every epoch has every record once."""

    def __init__(self, runs: Sequence[range], seed: int) -> None:
        """Needs no random number yet.

        Args:
            runs: of the source, which has at least one record.
            seed: of the run.
        """
        self._seed = seed
        self._lengths = np.fromiter(map(len, runs), np.int64, len(runs))
        self._starts = np.cumsum(self._lengths) - self._lengths
        self._epoch = lru_cache(maxsize=2)(self._find_epoch)
        self._window = lru_cache(maxsize=4)(self._find_window)

    @property
    def epoch_length(self) -> int:
        """Samples of an epoch: the records."""
        return int(self._lengths.sum())

    def __getitem__(self, sample: int) -> int:
        """The record's number."""
        records, position = self._around(sample)
        return int(records[position])

    def substitute(self, sample: int, attempt: int) -> int:
        """The record to take where `order[sample]` is damaged: another one of the shards that are being read.

        Args:
            sample: of the run.
            attempt: 0 for the first substitute, which may be damaged too, 1 for the next, and so on.
        """
        records, _ = self._around(sample)
        word = raw_words(self._seed, Stream.SUBSTITUTES, sample, attempt, count=1)[0]
        return int(records[int(word) % len(records)])

    def _around(self, sample: int) -> tuple[np.ndarray, int]:
        """The records of the sample's window, in their order, and its place among them."""
        epoch, position = divmod(sample, self.epoch_length)
        _, ends = self._epoch(epoch)
        window = int(np.searchsorted(ends, position, side="right"))
        records = self._window(epoch, window)
        return records, position - (int(ends[window]) - len(records))

    def _find_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The shards in their order, and for each window the number of samples up to its end."""
        shards = self._shuffled(len(self._lengths), Stream.SHARDS, epoch)
        ends = np.cumsum(self._lengths[shards])
        return shards, np.append(ends[WINDOW - 1 : -1 : WINDOW], ends[-1])

    def _find_window(self, epoch: int, window: int) -> np.ndarray:
        shards = self._epoch(epoch)[0][window * WINDOW : (window + 1) * WINDOW]
        blocks = [
            np.arange(start, min(start + BLOCK, end))
            for first, end in zip(self._starts[shards], self._starts[shards] + self._lengths[shards], strict=True)
            for start in range(first, end, BLOCK)
        ]
        order = self._shuffled(len(blocks), Stream.BLOCKS, epoch, window)
        groups = []
        for number, first in enumerate(range(0, len(order), GROUP)):
            records = np.concatenate([blocks[block] for block in order[first : first + GROUP]])
            groups.append(records[self._shuffled(len(records), Stream.RECORDS, epoch, window, number)])
        return np.concatenate(groups)

    def _shuffled(self, count: int, *key: int) -> np.ndarray:
        return np.argsort(raw_words(self._seed, *key, count=count), kind="stable")

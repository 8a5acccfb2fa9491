"""Which picture a sample of a run with buckets is: all samples of a batch are of one bucket.

A function of (seed, sample, size of a batch): neither ranks nor restarts change it. Every bucket has a stream of its
own pictures, in which each comes up `repeats` times in an order of its own, then again in another. A batch takes the
next samples of one bucket's stream. An epoch has as many batches of a bucket as its samples so far fill, in random
order among those of other buckets: what does not fill a batch waits for the next epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from icom.data.sampling import Stream, raw_words


@dataclass(frozen=True)
class BucketOrder:
    """Sample i of the run is picture `order[i]`.

    Attributes:
        seed: of the run.
        buckets: the pictures of each, as indices.
        repeats: how often a picture comes up in an epoch.
        batch: samples i with the same i // batch are of one bucket.
    """

    seed: int
    buckets: tuple[tuple[int, ...], ...]
    repeats: int
    batch: int

    def __getitem__(self, sample: int) -> int:
        """The picture's index."""
        batch, place = divmod(sample, self.batch)
        bucket, before = self.bucket(batch)
        pictures = self.buckets[bucket]
        epoch, position = divmod(before * self.batch + place, self._length(bucket))
        order = _shuffled(self.seed, self._length(bucket), Stream.BUCKET_PICTURES, bucket, epoch)
        return pictures[int(order[position]) % len(pictures)]

    def bucket(self, batch: int) -> tuple[int, int]:
        """Of a batch: (index of its bucket, how many batches that bucket had before)."""
        epoch = batch * self.batch // sum(map(self._length, range(len(self.buckets))))  # or a later one
        while sum(self._batches(epoch + 1)) <= batch:
            epoch += 1
        done, then = self._batches(epoch), self._batches(epoch + 1)
        kinds = np.repeat(np.arange(len(done)), np.subtract(then, done))
        position = batch - sum(done)
        kinds = kinds[_shuffled(self.seed, len(kinds), Stream.BUCKETS, epoch)]
        bucket = int(kinds[position])
        return bucket, done[bucket] + int((kinds[:position] == bucket).sum())

    def first_batches(self) -> list[int]:
        """For each bucket its first batch."""
        found: dict[int, int] = {}
        batch = 0
        while len(found) < len(self.buckets):
            found.setdefault(self.bucket(batch)[0], batch)
            batch += 1
        return [found[bucket] for bucket in range(len(self.buckets))]

    def _length(self, bucket: int) -> int:
        """Samples of a bucket in an epoch."""
        return len(self.buckets[bucket]) * self.repeats

    def _batches(self, epochs: int) -> list[int]:
        """Whole batches that each bucket has had after so many epochs."""
        return [epochs * self._length(bucket) // self.batch for bucket in range(len(self.buckets))]


@lru_cache(maxsize=64)
def _shuffled(seed: int, length: int, *key: int) -> np.ndarray:
    return np.argsort(raw_words(seed, *key, count=length), kind="stable")

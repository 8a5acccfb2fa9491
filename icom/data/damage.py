"""Records that are no good: counted and named, and fatal when they are too many."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from icom.data.records import DamagedRecord
from icom.errors import IcomError
from icom.names import plain

_NAMED = 20
"""So many are named; the rest is counted."""
ENOUGH = 100
"""So many have to be looked at before a share of them means anything."""


class Damage:
    """What was read, and what of it was no good.

    Attributes:
        read: records looked at, damaged ones included.
        damaged: how many of them were no good. One that comes again counts again.
    """

    def __init__(self, allowed: float, where: str) -> None:
        """Nothing was read yet.

        Args:
            allowed: share of damaged ones that a run may have (--max_damaged_share).
            where: they come from, for messages: "in photos".
        """
        self.read = self.damaged = 0
        self._allowed, self._where = allowed, where
        self._known: set[str] = set()
        self._last = ""

    def good(self, count: int = 1) -> None:
        """Records were read that are good."""
        self.read += count

    def known(self, good: int, damaged: Sequence[DamagedRecord]) -> None:
        """Records that were read before, and named then."""
        self.read += good + len(damaged)
        self.damaged += len(damaged)
        self._known.update(record.key for record in damaged)
        self._last = str(damaged[-1]) if damaged else self._last

    def bad(self, record: DamagedRecord) -> None:
        """A record is damaged: say so, if it is one of the first that are."""
        self.read += 1
        self.damaged += 1
        self._last = str(record)
        if record.key in self._known:
            return
        self._known.add(record.key)
        if len(self._known) <= _NAMED:
            print(plain(f"icom: left out: {record}", keep=""), file=sys.stderr)  # names that others chose
        elif len(self._known) == _NAMED + 1:
            print("icom: further damaged samples are counted, not named.", file=sys.stderr)

    def check(self, *, complete: bool = False) -> None:
        """Refuse to go on with too many.

        Args:
            complete: no more are coming, so that the share means something however few they are.

        Raises:
            IcomError: with their share, one of them, and what to do.
        """
        if not self.damaged or (self.read < ENOUGH and not complete):
            return
        if self.damaged > self._allowed * self.read:
            raise IcomError(
                f"{self.damaged:,} of {self.read:,} samples {self._where} are damaged, and only "
                f"{self._allowed:.2%} may be (--max_damaged_share). The last of them: {self._last}. Mend or remove "
                "them, or allow more."
            )

"""How far something is: a bar on a terminal, and a line a minute in a file or a pipe, where bars would fill pages."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

if TYPE_CHECKING:
    from collections.abc import Iterable

SECONDS_BETWEEN_LINES = 60.0
"""In a file or a pipe."""


def progress(items: Iterable[Any] | None, what: str, unit: str, **options: Any) -> tqdm[Any]:
    """Show on stderr how many of `items` are done.

    Args:
        items: to go through; None where the caller counts with `update`.
        what: is going on, for people.
        unit: one item, for people.
        options: further ones of tqdm.
    """
    if sys.stderr.isatty():
        return tqdm(items, what, unit=unit, dynamic_ncols=True, **options)
    options |= {
        "mininterval": SECONDS_BETWEEN_LINES,
        "miniters": 1,
        "delay": 1e-9,  # no line at 0
        "bar_format": "{desc}: {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
    }
    return _Lines(items, what, unit=unit, **options)


class _Lines(tqdm):  # type: ignore[type-arg]
    """tqdm that writes lines; the last one says how far it came."""

    _shown: float | None = None
    """How far it was in the last line."""

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Called when it is time for a line."""
        self._shown = self.n
        print(msg or self, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Called once or several times, whether the end was reached or not."""
        if not self.disable and self._shown != self.n:
            self.display()
        self.delay = math.inf  # tqdm then takes it that there is nothing to clear
        super().close()

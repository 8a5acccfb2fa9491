"""What `icom provision` is doing, on which node, and for how long."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from icom.names import plain

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


class Progress:
    """Lines that stay, with the seconds since the beginning; on a terminal, a line that moves for what goes on now."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        """A line that stays. Part of it may be what a node said."""
        seconds = time.monotonic() - self._began
        self._console.print(f"{seconds:5.0f} s  {plain(text)}", markup=False, soft_wrap=True)

    @contextmanager
    def doing(self, where: str, what: str) -> Iterator[Callable[[str], None]]:
        """Show that something goes on inside the block, and afterwards how long it took.

        Gives:
            A function for lines of output, the last of which is shown beside it.
        """
        began, last = time.monotonic(), ""

        def show_line(line: str) -> None:
            nonlocal last
            last = line

        def now() -> RenderableType:
            from rich.text import Text

            line = f"{time.monotonic() - began:.0f} s  {where}: {what}" + (f"  {last}" if last else "")
            return Text(line, no_wrap=True, overflow="ellipsis")

        if self._console.is_terminal:
            with self._console.status(_Live(now)):
                yield show_line
        else:
            self.say(f"{where}: {what} …")
            yield show_line
        self.say(f"{where}: {what}: done in {time.monotonic() - began:.0f} s")


class _Live:
    """Drawn anew whenever the console asks."""

    def __init__(self, draw: Callable[[], RenderableType]) -> None:
        self._draw = draw

    def __rich__(self) -> RenderableType:
        return self._draw()

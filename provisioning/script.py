"""Programs for the shells of nodes, in `scripts/`: what is told them comes as arguments, never as part of the text."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path(__file__).with_name("scripts")
_AS_ROOT = '$([ "$(id -u)" = 0 ] || echo sudo -n) '


@dataclass(frozen=True)
class Script:
    """A program with its arguments. `str` of it is for people.

    Attributes:
        name: of its file.
        arguments: which it finds in $1, $2, …
        as_root: whether root is to run it.
    """

    name: str
    arguments: tuple[str, ...] = ()
    as_root: bool = False

    def __str__(self) -> str:
        return shlex.join((self.name, *self.arguments))

    @property
    def text(self) -> str:
        """The program itself."""
        return (_FOLDER / self.name).read_text()

    @property
    def line(self) -> str:
        """The line for a shell that runs it, in the folder where that shell is."""
        words = shlex.join(["bash", "-c", self.text, self.name, *self.arguments])
        return f"{_AS_ROOT}{words}" if self.as_root else words


def script(name: str, *arguments: str, as_root: bool = False) -> Script:
    """The program of this name with its arguments."""
    return Script(f"{name}.sh", arguments, as_root)

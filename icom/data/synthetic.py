"""Pictures and captions out of nothing, to measure with: a function of their number."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from icom.data.records import Kind, Record, Singles
from icom.errors import UsageError

SIDE = 512
"""Pixels of a picture's sides."""
_PATCHES = 8  # a picture is so many patches wide, blurred into each other: real pictures are smooth too


class Synthetic:
    """N pictures. Attributes and methods are those of `icom.data.records.Source`."""

    kind: Kind = "pictures"
    runs: Sequence[range]

    def __init__(self, count: int) -> None:
        self.digest = f"synthetic:{count}"
        self.runs = Singles(count)

    def __len__(self) -> int:
        return len(self.runs)

    def read(self, number: int) -> Record:
        """One picture, the same at every call and on every machine with the same Pillow."""
        from PIL import Image

        words = np.random.Philox(number).random_raw(_PATCHES * _PATCHES)
        patches = words.view(np.uint8).reshape(_PATCHES, _PATCHES, 8)[..., :3]
        picture = Image.fromarray(np.ascontiguousarray(patches)).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        red, green, blue = (int(value) for value in words[:3] % np.uint64(100))
        return Record(f"synthetic/{number}", f"picture {number} of {red} red, {green} green and {blue} blue", picture)

    def describe(self) -> str:
        """One phrase for the start line."""
        return f"{len(self):,} made-up pictures of {SIDE} px"


def open_synthetic(text: str, most: int | None = None) -> Synthetic:
    """What `synthetic:N` names, and not more than `most`.

    Raises:
        UsageError: N is no number above 0.
    """
    count = text.partition(":")[2]
    if not count.isascii() or not count.isdigit() or int(count) < 1:
        raise UsageError(f"--train_data_dir {text}: write synthetic:N with a number of pictures, as in synthetic:1000.")
    return Synthetic(min(int(count), most or int(count)))

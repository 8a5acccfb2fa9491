"""Captioned pictures by number, wherever they lie: what a source of data gives, and all that the training knows of it.

A source is read by record number. Which record a sample of the run is, is `icom.data.order`'s to say, so that a sample
is a function of (seed, number) for every source; what is done to it (crop, mirror, noise) is the method's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, overload

from icom.data.crops import mirrors

if TYPE_CHECKING:
    import torch
    from PIL import Image

Kind = Literal["pictures", "latents"]
"""Whether records hold pictures and captions, or what VAE and text encoder made of them."""


@dataclass(frozen=True)
class Latents:
    """What the frozen encoders made of a picture and its caption.

    Attributes:
        mean, std: of the VAE's posterior, float32 (channels, height / 8, width / 8), not scaled.
        states: of the text encoder, (tokens, width), in the dtype they were kept in.
    """

    mean: torch.Tensor
    std: torch.Tensor
    states: torch.Tensor


@dataclass(frozen=True)
class Crops:
    """What the frozen encoders made of a picture's crops and of its caption.

    Attributes:
        mean, std: of the VAE's posteriors, float32 (crops, mirrors, channels, height / 8, width / 8), not scaled. Where
            there are two mirrors, the second is of the picture with left and right exchanged.
        states: as in `Latents`.
        places: (top, left) of each crop in the resized picture, in pixels.
        size: (width, height) of the picture itself, in pixels.
    """

    mean: torch.Tensor
    std: torch.Tensor
    states: torch.Tensor
    places: tuple[tuple[int, int], ...]
    size: tuple[int, int]

    def choose(self, words: Sequence[int], *, random_flip: bool) -> Latents:
        """One of the crops.

        Args:
            words: as `icom.data.crops.crop` takes them; where the middle alone was kept, both choose the same.
            random_flip: the words choose between the mirrors, too, where there are two.
        """
        place = int(words[0]) % self.mean.shape[0]
        mirror = int(random_flip and self.mean.shape[1] == 2 and mirrors(words))
        return Latents(self.mean[place, mirror], self.std[place, mirror], self.states)


@dataclass(frozen=True)
class Record:
    """A picture and its caption, or what encoders made of them: exactly one of `picture` and `latents` is set.

    Attributes:
        key: names it for people: the shard and the member's name.
        caption: its text.
        picture: upright, RGB.
        latents: of `icom data precompute`.
    """

    key: str
    caption: str
    picture: Image.Image | None = None
    latents: Crops | None = None


class DamagedRecord(Exception):
    """A record that cannot be read: picture, caption or member. The run counts and names it, and takes another."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"{key}: {reason}")
        self.key, self.reason = key, reason


class Singles(Sequence[range]):
    """The runs of a source whose records lie each for itself, files of a folder say."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> range: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[range]: ...
    def __getitem__(self, index: int | slice) -> range | Sequence[range]:
        numbers = range(self._count)[index]
        return range(numbers, numbers + 1) if isinstance(numbers, int) else [range(n, n + 1) for n in numbers]


class Source(Protocol):
    """Captioned pictures by number.

    `read` is called by several threads at a time.

    Attributes:
        kind: of its records.
        digest: of what decides which record a number is: shards and their sizes, filters, where captions come from.
            Resumed runs and all processes of a run have the same; it does not depend on where the data lie.
        runs: numbers of records that lie one after another (those of a shard), in order; they cover 0 … records - 1.
    """

    kind: Kind
    digest: str
    runs: Sequence[range]

    def __len__(self) -> int:
        """Records, after the filters."""

    def read(self, number: int) -> Record:
        """One record.

        Raises:
            DamagedRecord: it is no good; others are.
            IcomError: the shard or its disk is gone.
        """

    def describe(self) -> str:
        """One phrase for the start line: 12,000 captioned pictures in 12 tars (341 dropped by filters)."""

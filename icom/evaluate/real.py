"""The pictures that drawn ones are compared with: real ones, or the bundled world's own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import numpy as np

from icom.config.data import DataOptions
from icom.config.evaluate import EvaluateConfig
from icom.data.crops import WORDS, crop
from icom.data.damage import Damage
from icom.data.records import DamagedRecord, Record, Source
from icom.data.sources import open_source
from icom.errors import IcomError
from icom.evaluate.world import Asked
from icom.world import scene

if TYPE_CHECKING:
    from PIL import Image


class Reference(Protocol):
    """Pictures to compare with."""

    def __len__(self) -> int:
        """How many."""

    def pictures(self, size: int) -> Iterator[Image.Image]:
        """Their middle squares, of `size` pixels a side, RGB."""

    def describe(self) -> str:
        """One phrase."""


class RealPictures:
    """At most --num_real_images of --real_data_dir, evenly spread over it."""

    def __init__(self, config: EvaluateConfig) -> None:
        """Open them; no picture is decoded yet.

        Raises:
            IcomError: missing, empty, without captions, or no pictures.
        """
        assert config.real_data_dir
        options = DataOptions(
            train_data_dir=config.real_data_dir,
            image_column=config.image_column,
            caption_column=config.caption_column,
        )
        try:
            self._source: Source = open_source(options)
        except IcomError as error:  # whose words are those of training
            raise type(error)(str(error).replace("--train_data_dir", "--real_data_dir")) from error
        if self._source.kind != "pictures":
            raise IcomError(f"{config.real_data_dir} holds latents, no pictures (--real_data_dir).")
        self._allowed = options.max_damaged_share
        self._where = f"in {config.real_data_dir}"
        count = min(config.num_real_images, len(self._source))
        self._numbers = [number * len(self._source) // count for number in range(count)]

    def __len__(self) -> int:
        return len(self._numbers)

    def describe(self) -> str:
        """One phrase."""
        return f"{len(self):,} of {self._source.describe()}"

    def pictures(self, size: int) -> Iterator[Image.Image]:
        """Their middle squares."""
        from PIL import Image

        for record in self._records():
            assert record.picture
            square = crop(record.picture, size, center_crop=True, random_flip=False, words=(0,) * WORDS)
            values = ((square.pixels + 1) * 127.5).round().permute(1, 2, 0).numpy().astype(np.uint8)
            yield Image.fromarray(values)

    def captions(self, count: int) -> list[str]:
        """Of the first so many that are whole."""
        return [record.caption for record in itertools.islice(self._records(), count)]

    def _records(self) -> Iterator[Record]:
        damage = Damage(self._allowed, self._where)
        for number in self._numbers:
            try:
                record = self._source.read(number)
            except DamagedRecord as error:
                damage.bad(error)
                damage.check()
                continue
            damage.good()
            yield record
        damage.check(complete=True)


class WorldPictures:
    """The bundled world's drawings of captions."""

    def __init__(self, asked: list[Asked]) -> None:
        self._asked = asked

    def __len__(self) -> int:
        return len(self._asked)

    def describe(self) -> str:
        """One phrase."""
        return f"{len(self):,} pictures of the bundled model's world"

    def pictures(self, size: int) -> Iterator[Image.Image]:
        """Drawn anew each time."""
        from PIL import Image

        for asked in self._asked:
            picture = scene.draw(asked.scene)
            yield picture if size == scene.SIZE else picture.resize((size, size), Image.Resampling.LANCZOS)

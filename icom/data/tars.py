"""WebDataset's tars as a source: a sample is read by its place in its shard, which the index knows."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from icom.config.data import DataOptions
from icom.data import index as indexes
from icom.data import remote
from icom.data.damage import Damage
from icom.data.filters import fields, parse_filters, select
from icom.data.members import TarCaptions, picture_of
from icom.data.metadata import need_data_extra
from icom.data.order import WINDOW
from icom.data.records import DamagedRecord, Kind, Record
from icom.data.shards import Shard, ShardCache, common_root, find_shards, with_sizes
from icom.errors import IcomError
from icom.files import cache_folder

if TYPE_CHECKING:
    import pyarrow as pa

_OPEN = 2 * WINDOW
"""Shards that are kept open."""


class Tars:
    """Samples of tars. Attributes and methods are those of `icom.data.records.Source`."""

    kind: Kind = "pictures"
    runs: Sequence[range]

    def __init__(
        self, shards: list[Shard], cache: ShardCache, table: pa.Table, captions: TarCaptions, digest: str, left_out: str
    ) -> None:
        self._shards, self._cache, self._captions = shards, cache, captions
        self._keys, self._left_out = table["key"], left_out
        self._shard_of = table["shard"].to_numpy()
        self._image, self._text = (
            (table[f"{member}_offset"].to_numpy(), table[f"{member}_size"].to_numpy())
            for member in ("image", captions.member)
        )
        self._file = lru_cache(_OPEN)(self._open)
        self.digest = digest
        ends = np.cumsum(np.bincount(self._shard_of, minlength=len(shards))).tolist()
        self.runs = [range(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]

    def __len__(self) -> int:
        return len(self._shard_of)

    def read(self, number: int) -> Record:
        """One picture and its caption.

        Raises:
            DamagedRecord: it is no picture, or its caption no text.
            IcomError: the shard is missing or cut, or cannot be fetched.
        """
        shard = int(self._shard_of[number])
        key = f"{self._shards[shard].name}/{self._keys[number].as_py()}"
        caption = self._captions.read(key, self._content(shard, self._text, number))
        return Record(key, caption, picture_of(key, self._content(shard, self._image, number)))

    def describe(self) -> str:
        """One phrase for the start line."""
        tars = "1 tar" if len(self._shards) == 1 else f"{len(self._shards):,} tars"
        return f"{len(self):,} captioned pictures in {tars}{self._left_out}"

    def _content(self, shard: int, places: tuple[np.ndarray, np.ndarray], number: int) -> bytes:
        offset, size = int(places[0][number]), int(places[1][number])
        content = self._file(shard).read(offset, size)
        if len(content) < size:
            raise IcomError(f"The shard {self._shards[shard].place} is cut: it ends before byte {offset + size:,}.")
        return content

    def _open(self, number: int) -> _File:
        shard = self._shards[number]
        try:
            return _File(self._cache.local(shard))
        except OSError as error:
            raise IcomError(f"The shard {shard.place} cannot be read: {error.strerror}.") from error


class _File:
    """A file that several threads read at a time, and that is closed when nobody has it any more."""

    def __init__(self, path: Path) -> None:
        self._descriptor = -1
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, offset: int, size: int) -> bytes:
        return os.pread(self._descriptor, size, offset)

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


def open_tars(options: DataOptions) -> Tars:
    """The tars of --train_data_dir. Where they have no index, one is made.

    Raises:
        UsageError: a pattern or filter that cannot work, or captions that cannot be there.
        IcomError: a shard is missing, cut or compressed, no captions, or an index that does not fit.
    """
    need_data_extra("Reading tars")
    import pyarrow as pa

    captions = TarCaptions(options.caption_column, options.idx_to_prompt)
    condition = parse_filters(options.filters) if options.filters else None
    shards = find_shards(options.train_data_dir, ".tar")
    if not shards:
        raise IcomError(f"{options.train_data_dir} has no tars (--train_data_dir).")
    folder = cache_folder(options.cache_dir)
    cache = ShardCache(folder / "shards", options.shard_cache_gb and options.shard_cache_gb * 10**9)
    path = _index(options, shards, cache, folder / "indexes")
    members = ("image", captions.member)
    index = indexes.read_index(path, members, fields(condition) if condition else ())
    index = indexes.fitting(index, path, shards)
    table = _complete(index, path, options, members)
    left_out = ""
    if condition:
        said = {
            name: table[indexes.FIELD + name]
            for name in fields(condition)
            if indexes.FIELD + name in table.column_names
        }
        _, known = indexes.members_and_fields(path)
        selection = select(condition, pa.table(said), list(known))
        table, left_out = table.filter(selection.taken), str(selection)
    table = table.slice(0, options.max_train_samples)
    decides = {
        "shards": [[shard.name, shard.size] for shard in index.shards],
        "filters": options.filters,
        "captions": [captions.member, captions.field, captions.reader.prompts],
        "samples": len(table),
    }
    digest = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()
    return Tars(index.shards, cache, table, captions, digest, left_out)


def _index(options: DataOptions, shards: list[Shard], cache: ShardCache, folder: Path) -> Path:
    """The index to use: the one that there is, else one of the cache."""
    place = index_there(options)
    if place is None:
        return indexes.cached_index(shards, folder, cache)
    if remote.is_remote(place):
        return cache.local(with_sizes([Shard(place, place)])[0])
    return Path(place).expanduser()


def index_there(options: DataOptions) -> str | None:
    """The index that was named, else the one beside the tars; None where all tars have to be read to make one."""
    if options.index:
        return options.index
    if remote.is_remote(options.train_data_dir):
        return None
    beside = Path(common_root(options.train_data_dir), indexes.NAME)
    return str(beside) if beside.exists() else None


def _complete(index: indexes.Index, path: Path, options: DataOptions, members: tuple[str, str]) -> pa.Table:
    """The samples that have picture and caption; the others are counted and named.

    Raises:
        IcomError: there are too many others.
    """
    import pyarrow.compute as pc

    table = index.table
    lacks_picture, lacks_caption = (pc.is_null(table[f"{member}_offset"]) for member in members)
    whole = pc.invert(pc.or_(lacks_picture, lacks_caption))
    damage = Damage(options.max_damaged_share, f"in {options.train_data_dir}")
    if len(table) and not (good := pc.sum(whole).as_py()):
        there, known = indexes.members_and_fields(path)
        found = ", ".join(f"{count:,} a {'picture' if m == 'image' else '.' + m}" for m, count in there.items())
        raise IcomError(
            f"No captioned pictures in {options.train_data_dir}: of {len(table):,} samples {found}; none has a picture "
            f"and a .{members[1]} (--caption_column txt, cls, or json: with one of {', '.join(known) or 'no fields'})."
        )
    if not len(table):
        raise IcomError(f"The tars of {options.train_data_dir} are empty (--train_data_dir).")
    damage.good(good)
    bad = table.filter(pc.invert(whole))
    for shard, key, picture in zip(bad["shard"], bad["key"], pc.is_null(bad["image_offset"]), strict=True):
        name = f"{index.shards[shard.as_py()].name}/{key.as_py()}"
        damage.bad(DamagedRecord(name, "no picture, or two" if picture.as_py() else "no caption"))
    damage.check(complete=True)
    return table.filter(whole)

"""Parquet files with pictures' bytes as a source, as Hugging Face's image columns have them; read by row group."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from icom.config.data import DataOptions
from icom.data.caption_files import METADATA
from icom.data.filters import fields, parse_filters, select
from icom.data.index import NAME
from icom.data.members import CaptionReader, picture_of
from icom.data.metadata import need_data_extra
from icom.data.order import WINDOW
from icom.data.records import DamagedRecord, Kind, Record
from icom.data.shards import Shard, ShardCache, find_shards, with_sizes
from icom.errors import IcomError
from icom.files import cache_folder

if TYPE_CHECKING:
    import pyarrow as pa

ROOM = 2 * 2**30
"""Bytes of row groups that a process keeps in memory."""


@dataclass(frozen=True)
class _File:
    """A file whose footer was read. It is opened anew for each reading: pyarrow's readers are not made for threads."""

    shard: Shard
    path: Path
    footer: Any

    def read(self, columns: list[str], group: int | None = None) -> pa.Table:
        """Some columns, of one row group or of all."""
        import pyarrow.parquet as pq

        with pq.ParquetFile(self.path, metadata=self.footer) as file:
            return file.read(columns=columns) if group is None else file.read_row_group(group, columns=columns)


@dataclass(frozen=True)
class _Group:
    """A row group: its number in its file, and the number of its first row there and among all files."""

    file: _File
    number: int
    first: int
    first_of_all: int


class Parquet:
    """Rows of parquet files. Attributes and methods are those of `icom.data.records.Source`."""

    kind: Kind = "pictures"
    runs: Sequence[range]

    def __init__(self, files: list[_File], rows: np.ndarray, options: DataOptions, digest: str, left_out: str) -> None:
        self._files, self._rows, self._left_out, self.digest = files, rows, left_out, digest
        self._image, self._caption = options.image_column, options.caption_column
        self._captions = CaptionReader(options.idx_to_prompt)
        self._groups = _groups(files)
        self._starts = np.array([group.first_of_all for group in self._groups])
        self._kept = _Kept(self._load)
        ends = [*np.searchsorted(rows, self._starts[1:]).tolist(), len(rows)]
        self.runs = [range(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, number: int) -> Record:
        """One picture and its caption.

        Raises:
            DamagedRecord: it is no picture, its caption no text, or its row group cannot be read.
            IcomError: the file is gone.
        """
        row = int(self._rows[number])
        place = int(np.searchsorted(self._starts, row, side="right")) - 1
        group = self._groups[place]
        within = row - group.first_of_all
        key = f"{group.file.shard.name}/{group.first + within}"
        try:
            table = self._kept.get(place)
        except _Unreadable as error:
            raise DamagedRecord(key, str(error)) from error
        picture, caption = (table[name][within].as_py() for name in (self._image, self._caption))
        if isinstance(picture, dict):
            picture = picture["bytes"]
        if picture is None or caption is None:
            raise DamagedRecord(key, f"no {'picture' if picture is None else 'caption'}")
        return Record(key, self._captions(key, caption), picture_of(key, picture))

    def describe(self) -> str:
        """One phrase for the start line."""
        files = "1 parquet file" if len(self._files) == 1 else f"{len(self._files):,} parquet files"
        return f"{len(self):,} captioned pictures in {files}{self._left_out}"

    def _load(self, place: int) -> pa.Table:
        import pyarrow as pa

        group = self._groups[place]
        try:
            return group.file.read([self._image, self._caption], group.number)
        except FileNotFoundError as error:
            raise IcomError(f"The shard {group.file.shard.place} is gone.") from error
        except (OSError, pa.ArrowException) as error:
            raise _Unreadable(f"row group {group.number} cannot be read ({error})") from error


class _Unreadable(Exception):
    """A row group that is damaged."""


class _Kept:
    """The row groups that were read last: as many as ROOM takes, and one at least. Each is read by one thread."""

    def __init__(self, load: Callable[[int], pa.Table]) -> None:
        self._load, self._lock = load, threading.Lock()
        self._groups: OrderedDict[int, Future[pa.Table]] = OrderedDict()

    def get(self, place: int) -> pa.Table:
        with self._lock:
            coming = self._groups.get(place)
            mine = coming is None
            if coming is None:
                coming = self._groups[place] = Future()
            self._groups.move_to_end(place)
        if mine:
            try:
                coming.set_result(self._load(place))
            except BaseException as error:
                with self._lock:
                    self._groups.pop(place, None)  # before it is done: `_make_room` asks what is done for its size
                coming.set_exception(error)
            self._make_room()
        return coming.result()

    def _make_room(self) -> None:
        with self._lock:
            there = [(place, one.result().nbytes) for place, one in self._groups.items() if one.done()]
            taken = sum(size for _, size in there)
            for place, size in there[:-1]:
                if taken > ROOM:
                    taken -= size
                    del self._groups[place]


def open_parquet(options: DataOptions) -> Parquet:
    """The parquet files of --train_data_dir; those elsewhere are fetched, since what is in them stands at their ends.

    Raises:
        UsageError: a pattern or filter that cannot work.
        IcomError: a file is missing or cut, or lacks a column.
    """
    need_data_extra("Reading parquet")
    import pyarrow as pa

    condition = parse_filters(options.filters) if options.filters else None
    shards = [shard for shard in find_shards(options.train_data_dir, ".parquet") if is_pictures(shard.name)]
    folder = cache_folder(options.cache_dir)
    cache = ShardCache(folder / "shards", options.shard_cache_gb and options.shard_cache_gb * 10**9)
    files = [_open(shard, cache, options) for shard in with_sizes(shards)]
    _warn_of_large_groups(files)
    rows, left_out = np.arange(sum(file.footer.num_rows for file in files)), ""
    if condition:
        known = sorted({name for file in files for name in file.footer.schema.to_arrow_schema().names})
        wanted = [name for name in fields(condition) if name in known]
        tables = [file.read([n for n in wanted if n in file.footer.schema.to_arrow_schema().names]) for file in files]
        said = pa.concat_tables(tables, promote_options="permissive") if wanted else pa.table({})
        selection = select(condition, said, known)
        rows, left_out = rows[selection.taken], str(selection)
    rows = rows[: options.max_train_samples]
    if not len(rows):
        raise IcomError(f"The parquet files of {options.train_data_dir} are empty (--train_data_dir).")
    decides = {
        "shards": [[file.shard.name, file.path.stat().st_size] for file in files],
        "filters": options.filters,
        "columns": [options.image_column, options.caption_column],
        "captions": CaptionReader(options.idx_to_prompt).prompts,
        "samples": len(rows),
    }
    digest = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()
    return Parquet(files, rows, options, digest, left_out)


def is_pictures(name: str) -> bool:
    """Whether a parquet file may hold pictures: an index of tars and a folder's metadata do not."""
    return name.lower().endswith(".parquet") and name.rpartition("/")[2] not in (NAME, *METADATA)


def _open(shard: Shard, cache: ShardCache, options: DataOptions) -> _File:
    """A file with the columns that are needed.

    Raises:
        IcomError: it is missing, cut or no parquet file, or lacks a column; names those that there are.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = cache.local(shard)
    try:
        footer = pq.read_metadata(path)
        schema = footer.schema.to_arrow_schema()
    except (OSError, pa.ArrowException) as error:
        raise IcomError(f"The shard {shard.place} is cut, or no parquet file: {error}") from error
    there = ", ".join(f"{field.name} ({_shown(field.type)})" for field in schema)
    for option, name in (("--image_column", options.image_column), ("--caption_column", options.caption_column)):
        if name not in schema.names:
            raise IcomError(f"{shard.place} has no column {name!r} ({option}). It has {there}.")
    kind = schema.field(options.image_column).type
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        kind = kind.field("bytes").type
    if not (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
        raise IcomError(
            f"The column {options.image_column!r} of {shard.place} holds {_shown(kind)}, and no pictures' bytes "
            f"(--image_column). It has {there}."
        )
    kind = schema.field(options.caption_column).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_integer(kind)):
        raise IcomError(
            f"The column {options.caption_column!r} of {shard.place} holds {_shown(kind)}, and neither texts nor "
            f"numbers of classes (--caption_column). It has {there}."
        )
    return _File(shard, path, footer)


def _shown(kind: Any) -> str:
    """A type on one line."""
    return str(kind) if len(str(kind)) <= 60 else f"{str(kind)[:60]}…"


def _groups(files: Sequence[_File]) -> list[_Group]:
    groups, all_rows = [], 0
    for file in files:
        rows = 0
        for number in range(file.footer.num_row_groups):
            groups.append(_Group(file, number, rows, all_rows + rows))
            rows += file.footer.row_group(number).num_rows
        all_rows += rows
    return groups


def _warn_of_large_groups(files: Sequence[_File]) -> None:
    """The order reads WINDOW row groups at a time; where they do not fit, each is read again and again."""
    sizes = [
        (file.footer.row_group(group).total_byte_size, file)
        for file in files
        for group in range(file.footer.num_row_groups)
    ]
    size, file = max(sizes, key=lambda one: one[0], default=(0, None))
    if file is not None and size * min(WINDOW, len(sizes)) > ROOM:
        print(
            f"icom: a row group of {file.shard.place} takes {size / 2**20:,.0f} MB, and {WINDOW} are read at a time: "
            f"more than the {ROOM / 2**20:,.0f} MB that are kept, so that reading is slow. Write the files with fewer "
            "rows in a group (row_group_size=100).",
            file=sys.stderr,
        )

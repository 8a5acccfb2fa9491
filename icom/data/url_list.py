"""A list of pictures' addresses: parquet, CSV, TSV or JSON lines, read from any row on."""

from __future__ import annotations

import csv
import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from icom.data import remote
from icom.data.metadata import need_data_extra, numbers_where_possible
from icom.data.shards import ShardCache, find_shards, with_sizes
from icom.errors import IcomError, UsageError
from icom.names import shown

ENDINGS = (".parquet", ".csv", ".tsv", ".jsonl")

Row = dict[str, Any]
_BLOCK = 1000
"""Rows that are read at a time."""


@dataclass(frozen=True)
class _File:
    """One of the list's files; `path` is where it can be read here."""

    name: str
    path: Path
    rows: int

    @property
    def ending(self) -> str:
        return _ending(self.name)


@dataclass(frozen=True)
class UrlList:
    """Rows of some files, one after another in order of name.

    Attributes:
        files: of the list.
        texts: columns that stay texts; others of CSV files are numbers where all of them are.
    """

    files: Sequence[_File]
    texts: frozenset[str]

    def __len__(self) -> int:
        return sum(file.rows for file in self.files)

    def describe(self) -> list[list[Any]]:
        """Names, sizes and rows of the files: what decides which row a number is."""
        return [[file.name, file.path.stat().st_size, file.rows] for file in self.files]

    def rows(self, wanted: Sequence[range]) -> Iterator[Row]:
        """Rows by their numbers, in one pass.

        Args:
            wanted: in order, and apart from each other.

        Raises:
            IcomError: a file cannot be read any more.
        """
        first = 0
        for file in self.files:
            with _explained(file.name):
                for block, rows in _blocks(file, partial(_inside, wanted), first, self.texts):
                    for start, stop in _inside(wanted, block):
                        yield from rows(start - block.start, stop - block.start)
            first += file.rows


def _inside(wanted: Sequence[range], block: range) -> list[tuple[int, int]]:
    """Where a block of rows is wanted."""
    found = []
    for numbers in wanted[bisect_right(wanted, block.start, key=lambda numbers: numbers.stop) :]:
        if numbers.start >= block.stop:
            break
        found.append((max(numbers.start, block.start), min(numbers.stop, block.stop)))
    return found


def _blocks(
    file: _File, inside: Callable[[range], object], first: int, texts: frozenset[str]
) -> Iterator[tuple[range, Callable[[int, int], list[Row]]]]:
    """A file's rows in blocks: their numbers among all files' rows, and what gives some of them.

    Args:
        file: to read.
        inside: whether some of these rows are wanted: row groups of parquet without such are passed over.
        first: number of its first row.
        texts: as in UrlList.
    """
    if file.ending == ".parquet":
        import pyarrow.parquet as pq

        with pq.ParquetFile(file.path) as parquet:
            for group in range(parquet.num_row_groups):
                length = parquet.metadata.row_group(group).num_rows
                if inside(range(first, first + length)):
                    at = first
                    for batch in parquet.iter_batches(_BLOCK, row_groups=[group]):
                        yield range(at, at + len(batch)), partial(_of_batch, batch)
                        at += len(batch)
                first += length
    else:
        lines = _lines(file.path, file.ending)
        while block := list(islice(lines, _BLOCK)):
            rows = block if file.ending == ".jsonl" else _with_numbers(block, texts)
            yield range(first, first + len(block)), partial(_of_list, rows)
            first += len(block)


def _with_numbers(block: list[Row], texts: frozenset[str]) -> list[Row]:
    others = numbers_where_possible([{name: row[name] for name in row.keys() - texts} for row in block])
    return [{name: row[name] for name in row.keys() & texts} | other for row, other in zip(block, others, strict=True)]


def _of_batch(batch: Any, start: int, stop: int) -> list[Row]:
    return list(batch.slice(start, stop - start).to_pylist())


def _of_list(block: list[Row], start: int, stop: int) -> list[Row]:
    return block[start:stop]


def open_url_list(source: str, cache: ShardCache, wanted: Sequence[tuple[str, str]]) -> UrlList:
    """Find the files, and see that they have the columns.

    Args:
        source: a file, a folder or a pattern.
        cache: of files that lie elsewhere.
        wanted: pairs of option and column.

    Raises:
        UsageError: a file of another kind.
        IcomError: a file is missing, cut or empty, or lacks a column; names those that there are.
    """
    need_data_extra("A list of addresses")
    if not remote.is_remote(source) and Path(source).expanduser().is_dir():
        shards = sorted((s for ending in ENDINGS for s in find_shards(source, ending)), key=lambda shard: shard.name)
    else:
        shards = find_shards(source, "")
    if not shards:
        raise IcomError(f"{source} has no lists of addresses: files whose names end in {', '.join(ENDINGS)}.")
    files = []
    for shard in with_sizes(shards):
        if _ending(shard.place) not in ENDINGS:
            raise UsageError(f"{shard.place} is no list of addresses: its name has to end in {', '.join(ENDINGS)}.")
        path = cache.local(shard)
        with _explained(shard.place):
            names, rows = _look(path, _ending(shard.place))
        for option, column in wanted:
            if rows and column not in names:
                there = ", ".join(map(shown, names))
                raise IcomError(f"{shard.place} has no column {column!r} (--{option}). It has {there}.")
        files.append(_File(shard.place, path, rows))
    if not sum(file.rows for file in files):
        raise IcomError(f"{source} has no rows.")
    return UrlList(files, frozenset(column for _, column in wanted))


def _ending(name: str) -> str:
    return Path(name.partition("?")[0] if "://" in name else name).suffix.lower()


def _look(path: Path, ending: str) -> tuple[list[str], int]:
    """Columns and number of rows."""
    if ending == ".parquet":
        import pyarrow.parquet as pq

        footer = pq.read_metadata(path)
        return list(footer.schema.to_arrow_schema().names), int(footer.num_rows)
    names: dict[str, None] = {}
    rows = 0
    for row in _lines(path, ending):
        names |= dict.fromkeys(row)
        rows += 1
    return list(names), rows


def _lines(path: Path, ending: str) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        if ending == ".jsonl":
            for number, line in enumerate(file, 1):
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise ValueError(f"line {number} is {shown(row)}, and no object")
                    yield row
        else:
            for row in csv.DictReader(file, restkey="", restval="", delimiter="\t" if ending == ".tsv" else ","):
                row.pop("", None)  # what has no column
                yield row


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Inside, what is wrong with a file is said with its name."""
    try:
        yield
    except (OSError, ValueError, csv.Error) as error:  # pyarrow's own are among them
        raise IcomError(f"The list {name} cannot be read: {error}.") from error

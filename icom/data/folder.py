"""A folder of captioned pictures, with subfolders: captions in .txt files beside them, or in metadata files.

Metadata files are those of Hugging Face's imagefolder: metadata.jsonl, metadata.csv or metadata.parquet, with a column
file_name that is relative to the file's own folder.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
import posixpath
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from icom.config.data import DataOptions
from icom.data.damage import Damage
from icom.data.filters import Selection, parse_filters, select
from icom.data.images import endings
from icom.data.members import CaptionReader, caption_of, picture_of
from icom.data.metadata import columns, need_data_extra, numbers_where_possible
from icom.data.records import DamagedRecord, Kind, Record, Singles
from icom.errors import IcomError

METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
"""Files that say something of the pictures beside and below them."""
FILE_NAME = "file_name"
"""Their column that names the picture."""


@dataclass(frozen=True)
class _Entry:
    """A picture of the folder. Paths are relative; `caption` is None where it stands in the file `text`."""

    name: str
    text: str
    caption: str | None


class Folder:
    """Captioned pictures of a folder. Attributes and methods are those of `icom.data.records.Source`."""

    kind: Kind = "pictures"
    runs: Sequence[range]

    def __init__(self, root: Path, entries: list[_Entry], digest: str, left_out: str) -> None:
        self._root, self._entries, self._left_out = root, entries, left_out
        self.digest = digest
        self.runs = Singles(len(entries))

    def __len__(self) -> int:
        return len(self._entries)

    def read(self, number: int) -> Record:
        """One picture and its caption.

        Raises:
            DamagedRecord: it is no picture, or its caption no text.
            IcomError: the folder is gone.
        """
        entry = self._entries[number]
        picture = picture_of(entry.name, self._content(entry, entry.name))
        caption = entry.caption or caption_of(entry.name, self._content(entry, entry.text))
        return Record(entry.name, caption, picture)

    def describe(self) -> str:
        """One phrase for the start line."""
        return f"{len(self):,} captioned pictures in {self._root}{self._left_out}"

    def _content(self, entry: _Entry, name: str) -> bytes:
        try:
            return (self._root / name).read_bytes()
        except OSError as error:
            if not self._root.is_dir():
                raise IcomError(f"The picture folder {self._root} is gone (--train_data_dir).") from error
            raise DamagedRecord(entry.name, f"{name}: {error.strerror}") from error


def open_folder(options: DataOptions, sizes: dict[str, int]) -> Folder:
    """The folder of --train_data_dir. Pictures are not decoded, and texts not read, before their turn comes.

    Args:
        options: that were chosen.
        sizes: of all its files, by their relative names.

    Raises:
        IcomError: no pictures, no captions, or metadata that cannot be read.
    """
    root = Path(options.train_data_dir).expanduser()
    metadata = _Metadata(root, [name for name in sizes if posixpath.basename(name) in METADATA])
    known = endings()
    pictures = [name for name in sorted(sizes) if _ending(name) in known or name in metadata.rows]
    if not pictures:
        raise IcomError(
            f"The folder {root} holds no pictures, and neither tars nor parquet files of them (--train_data_dir)."
        )
    damage = Damage(options.max_damaged_share, f"in {root}")
    captions = CaptionReader(options.idx_to_prompt)
    entries = []
    for name in pictures:
        value, text = metadata.rows.get(name, {}).get(options.caption_column), posixpath.splitext(name)[0] + ".txt"
        caption = None
        if isinstance(value, str | int) and value != "":
            with suppress(DamagedRecord):
                caption = captions(name, value)
        if caption or text in sizes:
            entries.append(_Entry(name, text, caption))
            damage.good()
    if not entries:
        columns = f"; columns of metadata: {', '.join(metadata.columns)}" if metadata.columns else ""
        raise IcomError(
            f"No captions in {root}: none of {len(pictures):,} pictures has a .txt file beside it or a text in the "
            f"column {options.caption_column!r} of metadata.jsonl or metadata.csv (--caption_column{columns})."
        )
    kept = {entry.name for entry in entries}
    for name in pictures:
        if name not in kept:
            damage.bad(DamagedRecord(name, "no caption"))
    for name in sorted(metadata.rows.keys() - sizes.keys()):
        damage.bad(DamagedRecord(name, "named in the metadata, but not there"))
    damage.check(complete=True)
    left_out = ""
    if options.filters:
        selection = _select(options, [metadata.typed.get(entry.name, {}) for entry in entries])
        entries, left_out = list(itertools.compress(entries, selection.taken)), str(selection)
    entries = entries[: options.max_train_samples]
    listed = [[e.name, sizes[e.name], e.caption, None if e.caption else sizes[e.text]] for e in entries]
    digest = hashlib.sha256(json.dumps(listed).encode()).hexdigest()
    return Folder(root, entries, digest, left_out)


def _select(options: DataOptions, rows: list[dict[str, Any]]) -> Selection:
    need_data_extra("A filter")
    return select(parse_filters(options.filters), columns(rows))


def _ending(name: str) -> str:
    return posixpath.splitext(name)[1].lower()


class _Metadata:
    """What metadata files say.

    Attributes:
        rows: by the picture's name.
        typed: the same, with numbers where a CSV file has columns of them.
        columns: that there are.
    """

    def __init__(self, root: Path, files: list[str]) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.typed: dict[str, dict[str, Any]] = {}
        self.columns: list[str] = []
        files = sorted(files, key=lambda name: (name.count("/"), name))  # the nearest to a picture is what counts
        folders = [posixpath.dirname(name) for name in files]
        for name, folder in zip(files, folders, strict=True):
            if folders.count(folder) > 1:
                raise IcomError(f"{root / folder} has several metadata files: keep one of {', '.join(METADATA)}.")
            rows = list(_rows(root / name))
            for number, row in enumerate(rows, start=1):
                if not isinstance(row, dict) or not isinstance(row.get(FILE_NAME), str):
                    columns = ", ".join(row) if isinstance(row, dict) else "none"
                    raise IcomError(f"{root / name}, row {number}: no {FILE_NAME!r} among its columns ({columns}).")
                self.columns += [column for column in row if column not in self.columns and column != FILE_NAME]
            pictures = [posixpath.normpath(posixpath.join(folder, row[FILE_NAME])) for row in rows]
            self.rows.update(zip(pictures, rows, strict=True))
            typed = numbers_where_possible(rows) if name.endswith(".csv") else rows
            self.typed.update(zip(pictures, typed, strict=True))


def _rows(path: Path) -> Iterator[Any]:
    """The rows of a metadata file.

    Raises:
        IcomError: it cannot be read; says where.
    """
    number = 0  # of the line
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet

            yield from pyarrow.parquet.read_table(path).to_pylist()
            return
        with path.open(encoding="utf-8-sig", newline="") as file:
            if path.suffix == ".csv":
                yield from csv.DictReader(file, restkey="", restval="")
                return
            for line in file:
                number += 1
                if line.strip():
                    yield json.loads(line)
    except (OSError, ValueError, csv.Error) as error:
        where = f", line {number}" if number else ""
        raise IcomError(f"Cannot read {path}{where}: {error}.") from error

"""What says something of pictures in a folder: texts beside them, and metadata files.

Metadata files are those of Hugging Face's imagefolder: metadata.jsonl, metadata.csv or metadata.parquet, with a column
file_name that is relative to the file's own folder.
"""

from __future__ import annotations

import csv
import json
import posixpath
from collections.abc import Container, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from icom.data.metadata import need_data_extra, numbers_where_possible
from icom.data.records import DamagedRecord
from icom.errors import IcomError

if TYPE_CHECKING:
    from icom.data.members import CaptionReader

TEXTS = (".txt", ".caption")
"""Endings of files that hold the caption of the picture beside them."""
METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
"""Files that say something of the pictures beside and below them."""
FILE_NAME = "file_name"
"""Their column that names the picture."""


def speaks_of_pictures(name: str) -> bool:
    """Whether a file of this name holds captions, and is no picture."""
    return posixpath.splitext(name)[1].lower() in TEXTS or name in METADATA


def texts_beside(picture: str, there: Container[str]) -> list[str]:
    """The files with the caption of a picture, among the names that are there; the first is what counts."""
    stem = posixpath.splitext(picture)[0]
    names = (stem + spelled for ending in TEXTS for spelled in (ending, ending.upper()))
    return [name for name in names if name in there]


class Metadata:
    """What metadata files say.

    Attributes:
        rows: by the picture's name.
        typed: the same, with numbers where a CSV file has columns of them.
        columns: that there are.
    """

    def __init__(self, root: Path, files: list[str]) -> None:
        """Read them.

        Args:
            root: the folder.
            files: names of the metadata files in it, relative.

        Raises:
            IcomError: one cannot be read, has no column `file_name`, or a folder has several.
        """
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

    def caption(self, picture: str, column: str, reader: CaptionReader) -> str | None:
        """What a column says of a picture; None where it says nothing, or nothing that is a caption."""
        value = self.rows.get(picture, {}).get(column)
        if isinstance(value, str | int) and value != "":
            with suppress(DamagedRecord):
                return reader(picture, value)
        return None


def _rows(path: Path) -> Iterator[Any]:
    """The rows of a metadata file.

    Raises:
        IcomError: it cannot be read, says where; or what reads parquet files is not installed.
    """
    number = 0  # of the line
    try:
        if path.suffix == ".parquet":
            need_data_extra(f"Reading {path}")
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

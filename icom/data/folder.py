"""A folder of captioned pictures, with subfolders: captions in texts beside them, or in metadata files."""

from __future__ import annotations

import hashlib
import itertools
import json
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from icom.config.data import DataOptions
from icom.data.caption_files import METADATA, Metadata, texts_beside
from icom.data.damage import Damage
from icom.data.filters import Selection, parse_filters, select
from icom.data.images import endings
from icom.data.members import CaptionReader, caption_of, picture_of
from icom.data.metadata import columns, need_data_extra
from icom.data.records import DamagedRecord, Kind, Record, Singles
from icom.errors import IcomError


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
    metadata = Metadata(root, [name for name in sizes if posixpath.basename(name) in METADATA])
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
        caption = metadata.caption(name, options.caption_column, captions)
        texts = texts_beside(name, sizes)
        if caption or texts:
            entries.append(_Entry(name, next(iter(texts), ""), caption))
            damage.good()
    if not entries:
        columns = f"; columns of metadata: {', '.join(metadata.columns)}" if metadata.columns else ""
        raise IcomError(
            f"No captions in {root}: none of {len(pictures):,} pictures has a .txt or .caption file beside it or a "
            f"text in the column {options.caption_column!r} of metadata.jsonl or metadata.csv "
            f"(--caption_column{columns})."
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

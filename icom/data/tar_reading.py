"""The samples of a tar, as WebDataset groups its members."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, BinaryIO

from icom.data.images import endings
from icom.data.metadata import utf8
from icom.data.shards import WHY_NOT_COMPRESSED, Shard
from icom.errors import IcomError

_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}


@dataclass(frozen=True)
class Member:
    """A file in a tar.

    Attributes:
        suffix: of its name, after the first dot, in small letters.
        offset, size: of its bytes in the tar.
    """

    suffix: str
    offset: int
    size: int


def picture_endings() -> set[str]:
    """Suffixes of members that are pictures."""
    return {ending.removeprefix(".") for ending in endings()}


def grouped_members(shard: Shard, file: BinaryIO) -> Iterator[tuple[str, list[Member]]]:
    """Samples: a key, and the members that follow each other and whose names agree with it up to their first dot.

    Args:
        shard: for messages.
        file: all of it, open.

    Raises:
        IcomError: compressed, cut, or no tar.
    """
    head = file.read(6)
    for magic, name in _MAGIC.items():
        if head.startswith(magic):
            raise IcomError(f"{shard.place} is compressed ({name}): {WHY_NOT_COMPRESSED}")
    file.seek(0)
    for key, members in groupby(_named(shard, file), lambda named: named[0]):
        yield key, [member for _, member in members]


def _named(shard: Shard, file: BinaryIO) -> Iterator[tuple[str, Member]]:
    """Members that may be of a sample, and its key."""
    for member in _members(shard, file):
        folder, slash, base = member.name.rpartition("/")
        stem, dot, suffix = base.partition(".")
        if member.isreg() and member.sparse is None and stem and dot and not _is_meta(member.name):
            yield utf8(folder + slash + stem), Member(suffix.lower(), member.offset_data, member.size)


def _members(shard: Shard, file: BinaryIO) -> Any:
    """The members of a tar, one by one.

    Raises:
        IcomError: no tar, or cut: tarfile takes what is no header for the end of the archive.
    """
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            while (member := tar.next()) is not None:
                yield member
                tar.members.clear()  # type: ignore[attr-defined]  # it would keep them all
            file.seek(tar.offset)
            if file.read(512) != bytes(512):
                raise tarfile.ReadError("its end is missing")
    except (tarfile.TarError, ValueError, OverflowError) as error:
        raise IcomError(f"The shard {shard.place} is cut, or no tar: {error}. Fetch or write it anew.") from error


def _is_meta(name: str) -> bool:
    """Names that WebDataset keeps for itself."""
    first = name.partition("/")[0]
    return len(first) >= 4 and first.startswith("__") and first.endswith("__")

"""Shards: which files a pattern means, on this machine or elsewhere, and a copy here of what lies elsewhere.

Patterns have braces as in a shell ({00000..00099}, {a,b}), and stars where files can be listed: on disks and in S3.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from icom.data import remote
from icom.errors import IcomError, UsageError
from icom.files import write_error

COMPRESSED = (".tar.gz", ".tgz", ".tar.zst", ".tar.xz", ".tar.bz2")
"""Endings of tars in which nothing can be found by its place."""
WHY_NOT_COMPRESSED = (
    "samples in it cannot be read one by one. Unpack it (gunzip, zstd -d); pictures hardly shrink by it."
)
_SPECIAL = re.compile(r"[{*?\[]")
"""Where a pattern begins to be one."""
_GROUPS = re.compile(r"[*?\[]")
_ABANDONED = 24 * 3600.0  # seconds without a byte, after which nobody writes a file any more
_LOOKERS = 16  # requests at a time, to ask for sizes


@dataclass(frozen=True)
class Shard:
    """A file of samples.

    Attributes:
        name: relative to what all shards of a pattern have in common; the same wherever they lie.
        place: a path, an address, or pipe:COMMAND.
        size: bytes; None where nobody was asked yet, and of pipes.
        stamp: changes when the file does: time of its last change in ns, or ETag; None where there is neither.
    """

    name: str
    place: str
    size: int | None = None
    stamp: str | None = None

    @property
    def here(self) -> bool:
        """Whether it is a file of this machine."""
        return not remote.is_remote(self.place)


def find_shards(text: str, ending: str) -> list[Shard]:
    """The shards that a folder, a file or a pattern means, in order of name. Those elsewhere may lack size and stamp.

    Args:
        text: as in --train_data_dir.
        ending: of their names, ".tar" say, for folders.

    Raises:
        UsageError: the pattern cannot mean anything.
        IcomError: there are none, one is missing, or cannot be read.
    """
    if remote.is_remote(text):
        shards = _elsewhere(text)
    else:
        path = Path(text).expanduser()
        shards = _below(path, ending) if path.is_dir() else _matching(str(path))
    for shard in shards:
        if shard.name.lower().endswith(COMPRESSED) and not shard.place.startswith(remote.PIPE):
            raise IcomError(f"{shard.place} is compressed: {WHY_NOT_COMPRESSED}")
    return shards


def common_root(text: str) -> str:
    """The folder that all shards of a pattern have in common, with a slash; `text` itself where it is a folder."""
    if not remote.is_remote(text) and Path(text).expanduser().is_dir():
        return str(Path(text).expanduser()) + "/"
    special = _SPECIAL.search(text)
    fixed = text[: special.start()] if special else text
    return fixed[: fixed.rfind("/") + 1]


def with_sizes(shards: Sequence[Shard]) -> list[Shard]:
    """The shards with size and stamp, asked for where they lie; of pipes nobody knows any.

    Raises:
        IcomError: one is missing or cannot be reached.
    """
    open_ones = [shard for shard in shards if shard.size is None and not shard.place.startswith(remote.PIPE)]
    with ThreadPoolExecutor(_LOOKERS) as pool:
        looked = dict(zip(open_ones, pool.map(remote.look, [shard.place for shard in open_ones]), strict=True))
    return [replace(s, size=looked[s].size, stamp=looked[s].stamp) if s in looked else s for s in shards]


def _below(folder: Path, ending: str) -> list[Shard]:
    """All files of a folder and those in it whose name ends so, or says that they are such and compressed."""
    endings = (ending, *COMPRESSED) if ending == ".tar" else (ending,)
    return [_local(name, folder / name) for name in sorted(walk(folder)) if name.lower().endswith(endings)]


def walk(root: Path) -> dict[str, int]:
    """Relative names and sizes of all files that are not hidden; links to folders are followed, once each.

    Raises:
        IcomError: a folder cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise IcomError(f"Cannot read the folder {error.filename}: {error.strerror} (--train_data_dir).") from error

    seen, found = set(), {}
    for folder, inner, names in os.walk(root, onerror=refuse, followlinks=True):
        if (real := os.path.realpath(folder)) in seen:
            inner.clear()
            continue
        seen.add(real)
        inner[:] = sorted(name for name in inner if name[0] != ".")
        for name in names:
            path = Path(folder, name)
            if name[0] != ".":
                with suppress(OSError):  # a link to nothing: as good as not there
                    found[path.relative_to(root).as_posix()] = path.stat().st_size
    return found


def _matching(text: str) -> list[Shard]:
    root = common_root(text)
    found = []
    for path in _expanded(text):
        if _GROUPS.search(path) and not Path(path).exists():
            found += sorted(glob.glob(path, recursive=True)) or [path]  # noqa: PTH207
        else:
            found.append(path)
    return [_local(path.removeprefix(root), Path(path)) for path in dict.fromkeys(found)]


def _local(name: str, path: Path) -> Shard:
    try:
        status = path.stat()
    except OSError as error:
        raise IcomError(f"The shard {path} cannot be read: {error.strerror} (--train_data_dir).") from error
    return Shard(name, str(path), status.st_size, str(status.st_mtime_ns))


def _elsewhere(text: str) -> list[Shard]:
    root = common_root(text)
    shards = []
    for place in _expanded(text):
        if text.startswith(remote.PIPE):
            shards.append(Shard(place, place))
        elif place.startswith("s3://") and (place.endswith("/") or _GROUPS.search(place)):
            pattern = f"{place}**" if place.endswith("/") else place
            listed = remote.list_s3(pattern, common_root(pattern))
            shards += [Shard(found.place.removeprefix(root), found.place, found.size, found.stamp) for found in listed]
        elif not place.startswith("s3://") and re.search(r"[*\[]", place):
            raise UsageError(
                f"--train_data_dir {text}: a web server does not list its files; write them with braces, as in "
                "https://host/{00000..00099}.tar."
            )
        else:
            shards.append(Shard(place.removeprefix(root), place))
    return list(dict.fromkeys(shards))


def _expanded(text: str) -> list[str]:
    import braceexpand

    try:
        return list(braceexpand.braceexpand(text, escape=False))
    except ValueError as error:
        raise UsageError(f"--train_data_dir {text}: {error}.") from error


class ShardCache:
    """Copies here of shards that lie elsewhere, fetched when they are first needed, once per machine."""

    def __init__(self, folder: Path, limit: float | None) -> None:
        """Nothing is fetched yet.

        Args:
            folder: of the copies.
            limit: bytes that they may take; the copies not used for longest go first. None: no limit.
        """
        self._folder, self._limit = folder, limit

    def local(self, shard: Shard) -> Path:
        """Where the shard can be read.

        Raises:
            IcomError: it is missing, cannot be reached, has changed since it was looked at, or the disk is full.
        """
        if shard.here:
            return Path(shard.place)
        known = "" if shard.place.startswith(remote.PIPE) else f"\0{shard.size}\0{shard.stamp}"
        path = self._folder / hashlib.sha256(f"{shard.place}{known}".encode()).hexdigest()[:32]
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with one_at_a_time(path):
                if not path.exists():
                    self._fetch(shard, path)
                _refuse_others(shard, path.stat().st_size, shard.stamp)
                with suppress(OSError):
                    os.utime(path)  # when it was last used
        except OSError as error:
            raise write_error(path, error, "--cache_dir") from error
        return path

    def _fetch(self, shard: Shard, path: Path) -> None:
        if self._limit is not None:
            self._make_room(shard.size or 0)
        for left in self._folder.glob(f".{path.name}.*"):  # by a process that was killed
            with suppress(OSError):
                if time.time() - left.stat().st_mtime > _ABANDONED:
                    left.unlink()
        with tempfile.NamedTemporaryFile(dir=self._folder, prefix=f".{path.name}.", delete=False) as file:
            try:
                found = remote.fetch(shard.place, file)
                _refuse_others(shard, found.size, found.stamp)
                file.flush()
                Path(file.name).replace(path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise

    def _make_room(self, coming: int) -> None:
        """Remove what was not used for longest. Who reads one of those goes on: the file ends with its last reader."""
        assert self._limit is not None
        copies = []
        for path in self._folder.iterdir():
            if path.suffix != LOCK and not path.name.startswith("."):
                with suppress(FileNotFoundError):  # another process makes room too
                    copies.append((path.stat().st_mtime_ns, path.stat().st_size, path))
        total = coming + sum(size for _, size, _ in copies)
        for _, size, path in sorted(copies):
            if total <= self._limit:
                break
            path.unlink(missing_ok=True)
            total -= size


def _refuse_others(shard: Shard, size: int | None, stamp: str | None) -> None:
    """Refuse what is not the shard that was looked at before.

    Raises:
        IcomError: its size or stamp is another.
    """
    if shard.size not in (None, size) or (shard.stamp and stamp and shard.stamp != stamp):
        raise IcomError(f"{shard.place} has changed since it was indexed. Make the index anew: icom data index.")


LOCK = ".lock"


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Let no other thread and no other process of this machine make `path` meanwhile."""
    with path.with_name(path.name + LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:  # a file system without locks: the work is done twice, and the last one counts
            print(f"icom: {path.parent} has no locks ({error.strerror}).", file=sys.stderr)
        yield

"""The index of WebDataset's shards: for each sample the places of its members, and what its .json says of it.

One parquet file with a row for each sample, in the order of the shards:

    shard                          number of the shard in the file's metadata
    key                            name of the members without their ending
    image_offset, image_size, …    bytes of the member in the shard; the same for txt, json and cls; null where missing
    json.FIELD                     scalar fields of the .json, with types

Its metadata `icom` is JSON: the format's number, and name, size and stamp of each shard.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from icom.data.metadata import columns, need_data_extra, together
from icom.data.shards import Shard, ShardCache, one_at_a_time, with_sizes
from icom.data.tar_reading import grouped_members, picture_endings
from icom.errors import IcomError
from icom.files import sync_folder, write_error
from icom.progress import progress

if TYPE_CHECKING:
    import pyarrow as pa

NAME = "icom-index.parquet"
"""Of the index that lies beside its shards."""
MEMBERS = ("image", "txt", "json", "cls")
FIELD = "json."
"""Begins the name of a column that is a field of the .json."""

_FORMAT = 1  # raise it when the meaning of a column changes
_METADATA = b"icom"


@dataclass(frozen=True)
class Index:
    """What an index says.

    Attributes:
        shards: with size and stamp at the time of indexing.
        table: a row for each sample.
    """

    shards: list[Shard]
    table: pa.Table


def make_index(shards: Sequence[Shard], cache: ShardCache, workers: int) -> Index:
    """Read all shards, those elsewhere through the cache.

    Args:
        shards: as `find_shards` gives them.
        cache: of those that lie elsewhere.
        workers: threads.

    Raises:
        IcomError: a shard is missing, cut, compressed or no tar.
    """
    need_data_extra("An index")
    import pyarrow as pa

    shards = with_sizes(shards)
    with ThreadPoolExecutor(workers) as pool:
        done = pool.map(partial(_scan, cache=cache), shards)
        scanned = list(progress(done, "index", "shard", total=len(shards)))
    tables = [
        table.add_column(0, "shard", pa.array([number] * len(table), pa.int32()))
        for number, (_, table) in enumerate(scanned)
    ]
    return Index([shard for shard, _ in scanned], together(tables))


def write_index(index: Index, path: Path) -> None:
    """Write it: whole, or not at all.

    Raises:
        IcomError: it cannot be written.
    """
    import pyarrow.parquet as pq

    shards = [[shard.name, shard.size, shard.stamp] for shard in index.shards]
    about = {_METADATA: json.dumps({"format": _FORMAT, "shards": shards}).encode()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            try:
                pq.write_table(index.table.replace_schema_metadata(about), file, compression="zstd")
                file.flush()
                os.fsync(file.fileno())
                Path(file.name).chmod(0o644)
                Path(file.name).replace(path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
        sync_folder(path.parent)
    except OSError as error:
        raise write_error(path, error, "--output") from error


def read_index(path: Path, members: Sequence[str], fields: Sequence[str]) -> Index:
    """Read the columns that are asked for.

    Args:
        path: of the index.
        members: those whose places are wanted.
        fields: those of the .json; none that is missing is an error.

    Raises:
        IcomError: missing, damaged, or not an index.
    """
    need_data_extra("An index")
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            about = json.loads((file.schema_arrow.metadata or {}).get(_METADATA, b"{}"))
            if about.get("format") != _FORMAT:
                raise IcomError(f"{path} is no index of this icom. Make one: icom data index.")
            wanted = ["shard", "key", *(f"{member}_{what}" for member in members for what in ("offset", "size"))]
            wanted += [FIELD + field for field in fields if FIELD + field in file.schema_arrow.names]
            table = file.read(columns=wanted)
            shards = [Shard(str(name), "", size, stamp) for name, size, stamp in about["shards"]]
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError) as error:
        raise IcomError(f"Cannot read the index {path}: {error}. Make it anew: icom data index.") from error
    return Index(shards, table)


def members_and_fields(path: Path) -> tuple[dict[str, int], dict[str, str]]:
    """How many samples have each member, and the type of each field of their .json."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        table = file.read(columns=[f"{member}_offset" for member in MEMBERS])
        schema = file.schema_arrow
    counts = {member: len(table) - table[f"{member}_offset"].null_count for member in MEMBERS}
    kinds = {name.removeprefix(FIELD): str(schema.field(name).type) for name in schema.names if name.startswith(FIELD)}
    return counts, kinds


def fitting(index: Index, path: Path, shards: Sequence[Shard]) -> Index:
    """The part of an index that is about these shards, which know their places then.

    Args:
        index: that was read.
        path: where from.
        shards: as `find_shards` gives them.

    Raises:
        IcomError: it does not have one of them, or is older.
    """
    import numpy as np
    import pyarrow as pa

    numbers = {shard.name: number for number, shard in enumerate(index.shards)}
    again = "Make it anew: icom data index."
    if missing := [shard.place for shard in shards if shard.name not in numbers]:
        raise IcomError(f"The index {path} does not have {_some(missing)}. {again}")
    made = path.stat().st_mtime_ns
    old = [shard.place for shard in shards if _is_newer(shard, index.shards[numbers[shard.name]], made)]
    if old:
        raise IcomError(f"The index {path} is older than {_some(old)}. {again}")
    own = [index.shards[numbers[shard.name]] for shard in shards]
    placed = [replace(shard, size=then.size, stamp=then.stamp) for shard, then in zip(shards, own, strict=True)]
    chosen = np.array([numbers[shard.name] for shard in shards])
    if np.array_equal(chosen, np.arange(len(index.shards))):
        return Index(placed, index.table)
    # In the order of `shards`: rows of a shard stay together, and in their order.
    rank = np.full(len(index.shards), -1)
    rank[chosen] = np.arange(len(chosen))
    ranks = rank[index.table["shard"].to_numpy()]
    rows = np.argsort(ranks, kind="stable")
    rows = rows[ranks[rows] >= 0]
    table = index.table.take(rows)
    return Index(placed, table.set_column(0, "shard", pa.array(ranks[rows], pa.int32())))


def cached_index(shards: Sequence[Shard], folder: Path, cache: ShardCache) -> Path:
    """An index of the shards in the cache; it is made, and said so, where there is none.

    Args:
        shards: as `find_shards` gives them.
        folder: of cached indexes.
        cache: of shards that lie elsewhere.

    Raises:
        IcomError: a shard is no good, or the cache cannot be written.
    """
    shards = with_sizes(shards)
    known = json.dumps([_FORMAT, [[shard.name, shard.place, shard.size, shard.stamp] for shard in shards]])
    path = folder / f"{hashlib.sha256(known.encode()).hexdigest()[:32]}.parquet"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with one_at_a_time(path):
            if not path.exists():
                print(
                    f"icom: no index of the {len(shards):,} shards yet: making one, kept in {folder}. "
                    "`icom data index` makes one beside them, for all machines.",
                    file=sys.stderr,
                )
                write_index(make_index(shards, cache, workers=4), path)
    except OSError as error:
        raise write_error(path, error, "--cache_dir") from error
    return path


def _is_newer(now: Shard, then: Shard, made: int) -> bool:
    """Whether a shard is another one than when it was indexed; not if it was copied together with its index."""
    if now.size is not None and now.size != then.size:
        return True
    if now.stamp is None or now.stamp == then.stamp:
        return False
    return int(now.stamp) > made if now.here else True


def _some(places: list[str]) -> str:
    return f"{places[0]}" + (f" and {len(places) - 1:,} more" if len(places) > 1 else "")


def _scan(shard: Shard, cache: ShardCache) -> tuple[Shard, pa.Table]:
    """A shard, with the size it has, and its samples."""
    import pyarrow as pa

    path = cache.local(shard)
    samples = _samples(shard, path)
    places = {
        f"{member}_{what}": pa.array([sample[member][part] for sample in samples], pa.int64())
        for member in MEMBERS
        for part, what in enumerate(("offset", "size"))
    }
    table = pa.table({"key": pa.array([sample["key"] for sample in samples], pa.string()), **places})
    said = columns([sample["said"] for sample in samples])
    for name in said.column_names:
        table = table.append_column(FIELD + name, said[name])
    return replace(shard, size=path.stat().st_size), table


def _samples(shard: Shard, path: Path) -> list[dict[str, Any]]:
    """What the index keeps of a tar's samples.

    Raises:
        IcomError: compressed, cut, or no tar.
    """
    pictures = picture_endings()
    samples: list[dict[str, Any]] = []
    with path.open("rb") as file:
        for key, members in grouped_members(shard, file):
            sample: dict[str, Any] = {"key": key, "said": {}, **dict.fromkeys(MEMBERS, (None, None))}
            seen: set[str] = set()
            for member in members:
                kind = "image" if member.suffix in pictures else member.suffix
                if member.suffix in seen and kind in MEMBERS:
                    sample["image"] = (None, None)  # two of a name: nobody knows which belongs to the others
                    continue
                seen.add(member.suffix)
                if kind in MEMBERS and sample[kind] == (None, None):
                    sample[kind] = member.offset, member.size
                    if kind == "json":
                        sample["said"] = _said(os.pread(file.fileno(), member.size, member.offset))
            samples.append(sample)
    return samples


def _said(content: bytes) -> dict[str, Any]:
    """The fields of a sample's .json; none where it is damaged, so that filters find it lacking."""
    try:
        read = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}

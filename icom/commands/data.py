"""`icom data index`: the index of WebDataset's shards."""

from __future__ import annotations

from pathlib import Path

from icom.config.data import DataIndexConfig
from icom.data.index import MEMBERS, NAME, make_index, members_and_fields, write_index
from icom.data.metadata import need_data_extra
from icom.data.remote import is_remote
from icom.data.shards import ShardCache, common_root, find_shards
from icom.errors import IcomError, UsageError
from icom.files import cache_folder
from icom.names import plain


def index(config: DataIndexConfig) -> None:
    """Write the index, and print what there is to train on and to filter by.

    Raises:
        UsageError: shards elsewhere, and no file to write to.
        IcomError: a shard is missing, cut, compressed or no tar, or the file cannot be written.
    """
    if config.output is None and is_remote(config.source):
        raise UsageError(f"{config.source} is not on this machine: name the file to write with --output.")
    need_data_extra("An index")
    shards = find_shards(config.source, ".tar")
    if not shards:
        raise IcomError(f"{config.source} has no tars.")
    output = Path(config.output).expanduser() if config.output else Path(common_root(config.source), NAME)
    folder = cache_folder(config.cache_dir) / "shards"
    cache = ShardCache(folder, config.shard_cache_gb and config.shard_cache_gb * 10**9)
    made = make_index(shards, cache, config.workers)
    write_index(made, output)
    counts, kinds = members_and_fields(output)
    print(f"{output}: {len(made.table):,} samples in {len(made.shards):,} shards")
    print("  with " + ", ".join(f"{'picture' if m == 'image' else f'.{m}'} {counts[m]:,}" for m in MEMBERS))
    if kinds:
        print(plain("  fields of .json: " + ", ".join(f"{name} ({kind})" for name, kind in kinds.items())))

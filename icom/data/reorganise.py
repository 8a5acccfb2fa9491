"""`icom data reorganise`: the samples of WebDataset tars in tars of so many each.

A part takes its run of the source's tars alone, so that many parts read each tar once. Tars are PART-NUMBER.tar, and
samples have their old tar in their key.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from icom.config.shards import ReorganiseConfig
from icom.data.claims import REORGANISED, claim
from icom.data.damage import Damage
from icom.data.members import TarCaptions
from icom.data.metadata import need_data_extra
from icom.data.parts import part_of
from icom.data.records import DamagedRecord
from icom.data.remote import is_remote
from icom.data.shards import Shard, ShardCache, find_shards, with_sizes
from icom.data.tar_reading import Member, grouped_members, picture_endings
from icom.data.tar_writing import tar_of_samples
from icom.data.whole_file import whole_file
from icom.errors import IcomError, UsageError
from icom.files import cache_folder, write_error
from icom.progress import progress


def reorganise(config: ReorganiseConfig) -> int:
    """Write the tars of a part anew; how many samples they have.

    Raises:
        UsageError: a pattern or --caption_column that cannot work.
        IcomError: there are no tars, one is missing, cut or compressed, too many samples lack something, the disk is
            full, or --output_dir has tars of another source.
    """
    need_data_extra("A pattern of tars")
    part, parts = part_of(config.part, os.environ)
    wants = _Wants(config.caption_column)
    shards = find_shards(config.source, ".tar")
    output = Path(config.output_dir).expanduser()
    source = Path(config.source).expanduser()
    if not is_remote(config.source) and source.is_dir() and output.resolve().is_relative_to(source.resolve()):
        raise UsageError(f"{output} lies in {source}, whose tars are all read: choose another --output_dir.")
    if not shards:
        raise IcomError(f"{config.source} has no tars.")
    about = {"tars": [[shard.name, shard.size] for shard in with_sizes(shards)], "parts": parts}
    claim(
        output, REORGANISED, about | {name: getattr(config, name) for name in ("samples_per_shard", "caption_column")}
    )
    remove_part(output, part)
    mine = shards[len(shards) * (part - 1) // parts : len(shards) * part // parts]
    cache = ShardCache(cache_folder(config.cache_dir) / "shards", config.shard_cache_gb and config.shard_cache_gb * 1e9)
    damage = Damage(config.max_damaged_share, f"in {config.source}")
    of_part = f", part {part} of {parts}" if parts > 1 else ""
    print(f"icom: {len(mine):,} of {len(shards):,} tars to read{of_part}", flush=True)
    read = progress(mine, "reorganise", "tar", disable=not mine)
    samples = chain.from_iterable(_samples(shard, cache.local(shard), wants, damage) for shard in read)
    made = written = 0
    while (first := next(samples, None)) is not None:
        path = output / f"{part:05d}-{made:05d}.tar"
        try:
            with whole_file(path) as file, tar_of_samples(file) as tar:
                for sample in chain([first], islice(samples, config.samples_per_shard - 1)):
                    for suffix, content in sample.members:
                        tar.add(f"{sample.key}.{suffix}", content)
                    written += 1
        except OSError as error:
            raise write_error(path, error) from error
        made += 1
    damage.check(complete=True)
    left_out = f"; {damage.damaged:,} left out" if damage.damaged else ""
    print(f"{written:,} samples in {made:,} tars in {output}{left_out}")
    return written


def remove_part(output: Path, part: int) -> None:
    """Remove a part's tars."""
    for path in output.glob(f"{part:05d}-*.tar"):
        path.unlink()


@dataclass(frozen=True)
class _Sample:
    """What is copied: each member's suffix and bytes."""

    key: str
    members: list[tuple[str, bytes]]


class _Wants:
    """What a sample has to have."""

    def __init__(self, caption_column: str) -> None:
        self._pictures = picture_endings()
        # A class is a caption by --idx_to_prompt, which is not this command's.
        self._captions = None if caption_column == "cls" else TarCaptions(caption_column, None)

    def check(self, key: str, members: Sequence[tuple[str, bytes]]) -> None:
        """See that picture and caption are there.

        Raises:
            DamagedRecord: one of them is not, or there are two members of a name.
        """
        contents = dict(members)
        if len(contents) < len(members):
            raise DamagedRecord(key, "two members of the same name")
        if not self._pictures & contents.keys():
            raise DamagedRecord(key, "no picture")
        content = contents.get("cls" if self._captions is None else self._captions.member)
        if not content:
            raise DamagedRecord(key, "no caption")
        if self._captions is not None:
            self._captions.read(key, content)


def _samples(shard: Shard, path: Path, wants: _Wants, damage: Damage) -> Iterator[_Sample]:
    """The samples of a tar that have all; the others are counted and named, and those after them are not lost."""
    folder = shard.name.removesuffix(".tar")
    with path.open("rb") as file:
        for name, places in grouped_members(shard, file):
            key = f"{folder}/{name}"
            members = [(place.suffix, _content(file.fileno(), place)) for place in places]
            try:
                wants.check(key, members)
            except DamagedRecord as error:
                damage.bad(error)
                damage.check()
                continue
            damage.good()
            yield _Sample(key, members)


def _content(descriptor: int, place: Member) -> bytes:
    return os.pread(descriptor, place.size, place.offset)

"""Write pictures of the world as WebDataset tars for `icom finetune`: `python -m tools.world.shards` (see `--help`)."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import random
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tyro

from icom.config.demo import ConceptName
from icom.errors import IcomError
from icom.files import make_writable_folder, write_atomically
from icom.progress import progress
from icom.world.concepts import CONCEPTS, seen_things
from icom.world.scene import KINDS, Scene, Thing, describe, draw, random_scene


@dataclass(kw_only=True)
class ShardsConfig:
    """Write captioned pictures of the bundled model's world as WebDataset tars, the same for the same options.

    Example: python -m tools.world.shards set/old --pictures 1000
    """

    output_dir: tyro.conf.Positional[Path]
    """Folder to make, for 00000.tar, 00001.tar, …; it appears when all of them are written."""
    things: ConceptName | None = None
    """Show this held-out thing alone. Default: all things that the bundled model was trained on."""
    word: str | None = None
    """A noun for that thing, for the captions; every second one has it in place of colour, pattern and shape."""
    pictures: int = 48_000
    """How many, each with one caption. The first ones are the same for every number."""
    per_shard: int = 1_000
    """Pictures in a tar."""
    seed: int = 0
    """Of scenes and captions."""


@dataclass(frozen=True)
class Sample:
    """A picture to draw, and its caption."""

    scene: Scene
    caption: str


def samples(config: ShardsConfig) -> Iterator[Sample]:
    """The samples of all shards, in order: scenes of one random stream, captions of another."""
    things, kinds, stream = seen_things(), KINDS, "unet"
    if config.things:
        things, stream = [CONCEPTS[config.things]], config.things
        kinds = {things[0]: config.word} if config.word else {}
    shown = scenes(f"{stream} {config.seed}", things)
    rng = random.Random(f"captions {stream} {config.seed}")
    for scene in itertools.islice(shown, config.pictures):
        yield Sample(scene, describe(scene, rng, kinds))


def scenes(seed: str, things: list[Thing]) -> Iterator[Scene]:
    """An endless stream of scenes."""
    rng = random.Random(seed)
    while True:
        yield random_scene(rng, things)


def write_shards(config: ShardsConfig) -> None:
    """Write the tars.

    Raises:
        IcomError: --output_dir is there, --word has nothing to name, or the disk is full.
    """
    if config.word and not config.things:
        raise IcomError("--word names one thing: say which with --things, or drop it.")
    folder = config.output_dir
    if folder.exists():
        raise IcomError(f"{folder} is there already. Remove it, or choose another.")
    unfinished = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    make_writable_folder(unfinished)
    stream = samples(config)
    for number in progress(range(-(-config.pictures // config.per_shard)), "shards", "shard"):
        first = number * config.per_shard
        content = _shard(first, itertools.islice(stream, config.per_shard))
        write_atomically(unfinished / f"{number:05}.tar", content)
    unfinished.rename(folder)


def _shard(first: int, shown: Iterator[Sample]) -> bytes:
    """A tar with picture, caption, and for filters what the picture shows; the same bytes for the same samples."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for number, sample in enumerate(shown, first):
            picture = io.BytesIO()
            draw(sample.scene).save(picture, "PNG")
            attributes = dataclasses.asdict(sample.scene) | dataclasses.asdict(sample.scene.thing)
            del attributes["thing"], attributes["look"]
            members = {
                "png": picture.getvalue(),
                "txt": sample.caption.encode(),
                "json": json.dumps(attributes).encode(),
            }
            for ending, content in members.items():
                member = tarfile.TarInfo(f"{number:06}.{ending}")  # of no time, owner and machine
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


if __name__ == "__main__":
    write_shards(tyro.cli(ShardsConfig, prog="python -m tools.world.shards", use_underscores=True))

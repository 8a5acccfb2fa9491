"""A folder of precomputed latents: what made them, which shards there are, and reading them by number.

icom-latents.safetensors   the empty caption's states; what made the set, as JSON in the metadata `icom`
00000.parquet              a shard (or 00000.tar): pictures 0 … samples_per_shard - 1 of the source
00000.json                 its size, SHA-256 and damaged records; written last, so that what has it is whole
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from icom.config.precompute import KeptDtype, ShardFormat
from icom.data.latent_files import MAKE_AGAIN, METADATA, ParquetReader, Reader, TarReader
from icom.data.metadata import need_data_extra
from icom.data.order import WINDOW
from icom.data.records import Kind, Record
from icom.data.whole_file import write_whole
from icom.errors import IcomError, UsageError
from icom.files import file_digest, write_atomically

SET = "icom-latents.safetensors"
_FORMAT = 1
"""Raise it when the meaning of a file changes."""
_EMPTY = "empty"
_NAMED = 10
"""So many shards are named in a message; the rest is counted."""


@dataclass(frozen=True)
class MadeWith:
    """What made a set of latents. All of it decides the numbers, but `model` and `icom`, which are for people.

    Attributes:
        model: its name.
        icom: version of icom.
        vae, text_encoder: SHA-256 of their weights in float32.
        precision: they computed in: float32, bfloat16 or float16.
        dtype: numbers are kept in.
        format: of the shards.
        resolutions: in pixels.
        crops: kept of each picture.
        center_crop: it is the middle.
        random_flip: mirrored pictures are kept, too.
        interpolation: how pictures were resized.
        seed: of the random places.
        source: digest of the pictures' source.
        pictures: in that source, damaged ones included.
        samples_per_shard: of them.
        shapes: name -> shape of a picture's tensors.
        version: of the files' format.
    """

    model: str
    icom: str
    vae: str
    text_encoder: str
    precision: str
    dtype: KeptDtype
    format: ShardFormat
    resolutions: tuple[int, ...]
    crops: int
    center_crop: bool
    random_flip: bool
    interpolation: str
    seed: int
    source: str
    pictures: int
    samples_per_shard: int
    shapes: dict[str, tuple[int, ...]]
    version: int = _FORMAT

    @property
    def shards(self) -> int:
        """How many there are once all are made."""
        return math.ceil(self.pictures / self.samples_per_shard)

    def numbers(self, shard: int) -> range:
        """Of the source's records, those in a shard."""
        first = shard * self.samples_per_shard
        return range(first, min(first + self.samples_per_shard, self.pictures))

    @property
    def torch_dtype(self) -> torch.dtype:
        """What numbers are kept in."""
        return torch.float16 if self.dtype == "float16" else torch.float32

    def differences(self, other: MadeWith) -> list[str]:
        """Names of what decides the numbers and differs."""
        mine, theirs = dataclasses.asdict(self), dataclasses.asdict(other)
        return [name for name in mine if name not in ("model", "icom") and mine[name] != theirs[name]]

    def check_encoders(self, digests: Mapping[str, str], folder: Path, model: str) -> None:
        """Refuse latents that another model's encoders made.

        Args:
            digests: part -> SHA-256, of `icom.data.encode.encoder_digests`.
            folder: of the latents.
            model: that is to be trained.

        Raises:
            IcomError: one differs.
        """
        names = {"vae": "VAE", "text_encoder": "text encoder"}
        others = [words for name, words in names.items() if digests[name] != getattr(self, name)]
        if others:
            raise IcomError(
                f"The latents in {folder} were made with another {' and another '.join(others)} ({self.model}) than "
                f"that of {model}. Train that model, or make latents of this one: icom data precompute "
                f"--pretrained_model_name_or_path {model}."
            )

    def to_json(self) -> str:
        """Always the same text for the same content."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


def _from_json(text: str) -> MadeWith:
    """What `to_json` wrote.

    Raises:
        ValueError, KeyError, TypeError: it is something else.
    """
    values = json.loads(text)
    if values["version"] != _FORMAT:
        raise ValueError(f"version {values['version']} of the format, and this icom knows {_FORMAT}")
    values["resolutions"] = tuple(int(side) for side in values["resolutions"])
    values["shapes"] = {name: tuple(int(n) for n in shape) for name, shape in values["shapes"].items()}
    made = MadeWith(**values)
    if made.dtype not in get_args(KeptDtype) or made.format not in get_args(ShardFormat):
        raise ValueError(f"kept in {made.dtype} and {made.format}")
    if made.pictures < 1 or made.samples_per_shard < 1:
        raise ValueError("no pictures")
    return made


@dataclass(frozen=True)
class Shard:
    """What is known of a shard that is whole.

    Attributes:
        bytes, sha256: of its file.
        records: pictures in it.
        damaged: (key, reason) of those that were left out.
        places: (offset, bytes) of each picture, in tars.
    """

    bytes: int
    sha256: str
    records: int
    damaged: list[tuple[str, str]] = field(default_factory=list)
    places: list[tuple[int, int]] | None = None


def shard_path(folder: Path, number: int, made: MadeWith) -> Path:
    """The file of a shard."""
    return folder / f"{number:05d}.{made.format}"


def read_set(folder: Path) -> tuple[MadeWith, torch.Tensor] | None:
    """What made a folder's latents, and the empty caption's states (tokens, width); None where there are none.

    Raises:
        IcomError: the file that says so is damaged.
    """
    path = folder / SET
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            return _from_json((file.metadata() or {})[METADATA]), file.get_tensor(_EMPTY)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise IcomError(f"{path} is damaged ({error}). {MAKE_AGAIN}") from error


def write_set(folder: Path, made: MadeWith, empty: torch.Tensor) -> None:
    """Say what made the latents that come into a folder.

    Args:
        folder: of the set.
        made: what makes them.
        empty: the empty caption's states, (tokens, width), in the dtype that is kept.

    Raises:
        IcomError: latents of something else are there already, or the disk is full.
    """
    there = read_set(folder)
    if there is None:
        content = save({_EMPTY: empty.contiguous()}, metadata={METADATA: made.to_json()})
        write_atomically(folder / SET, content)
        return
    if differing := there[0].differences(made):
        found = ", ".join(f"{name} ({_short(there[0], name)} | {_short(made, name)})" for name in differing)
        raise IcomError(
            f"In {folder} are latents that were made otherwise: {found}. Choose another --output_dir, or give the "
            "options that they were made with."
        )


def _short(made: MadeWith, name: str) -> str:
    value = getattr(made, name)
    return value[:12] if name in ("vae", "text_encoder", "source") else str(value)


def read_shard(folder: Path, number: int, made: MadeWith, *, digest: bool) -> Shard | None:
    """What is known of a shard; None where it is missing or not whole.

    Args:
        folder: of the set.
        number: of the shard.
        made: the set.
        digest: read it all and compare its SHA-256, and not only its size.
    """
    path = shard_path(folder, number, made)
    try:
        values = json.loads(path.with_suffix(".json").read_text())
        values["damaged"] = [(str(key), str(reason)) for key, reason in values["damaged"]]
        if values["places"] is not None:
            values["places"] = [(int(offset), int(length)) for offset, length in values["places"]]
        shard = Shard(**values)
        whole = path.stat().st_size == shard.bytes and (not digest or file_digest(path) == shard.sha256)
        return shard if whole else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_shard(folder: Path, number: int, made: MadeWith, shard: Shard) -> None:
    """Say that a shard is whole."""
    content = json.dumps(dataclasses.asdict(shard)).encode()
    write_whole(shard_path(folder, number, made).with_suffix(".json"), content)


class LatentSource:
    """Precomputed latents by number. Attributes and methods are those of `icom.data.records.Source`, and:

    Attributes:
        folder: of the set.
        made_with: what made them.
        resolution: that is read, in pixels: the largest, unless `at` chose another one.
        empty: the empty caption's states, (tokens, width), in the dtype they were kept in.
    """

    kind: Kind = "latents"
    runs: Sequence[range]

    def __init__(
        self, folder: Path, made: MadeWith, empty: torch.Tensor, shards: Mapping[int, Shard], resolution: int
    ) -> None:
        """Args: the folder; what `read_set` gave; its shards by number, those without records left out; pixels."""
        self.folder, self.made_with, self.empty, self.resolution = folder, made, empty, resolution
        self._shards = shards
        self._numbers = sorted(shards)
        ends = list(accumulate(shards[number].records for number in self._numbers))
        self._starts = [0, *ends[:-1]]
        self.runs = [range(start, end) for start, end in zip(self._starts, ends, strict=True)]
        digests = [made.to_json(), *(shards[number].sha256 for number in self._numbers)]
        self.digest = hashlib.sha256("\n".join(digests).encode()).hexdigest()
        self._open = _OpenShards()

    def at(self, resolution: int, *, center_crop: bool = False, random_flip: bool = False) -> LatentSource:
        """The same pictures as the options of a training ask for them.

        Args:
            resolution: one of those that were kept.
            center_crop: the middle is asked for. Without it whatever places were kept do.
            random_flip: mirrored pictures are asked for, too.

        Raises:
            UsageError: they were not kept so.
        """
        made = self.made_with
        if resolution not in made.resolutions:
            kept = " and ".join(str(side) for side in made.resolutions)
            raise UsageError(
                f"The latents in {self.folder} are of {kept} px, not of {resolution}: give --resolution "
                f"{made.resolutions[-1]}, or precompute them at {resolution}."
            )
        for name, asked, has in (
            ("center_crop", center_crop, made.center_crop),
            ("random_flip", random_flip, made.random_flip),
        ):
            if asked and not has:
                raise UsageError(
                    f"The latents in {self.folder} were precomputed without --{name}: drop it here, or precompute them "
                    "with it."
                )
        return LatentSource(self.folder, made, self.empty, self._shards, resolution)

    def __len__(self) -> int:
        return self.runs[-1].stop

    def read(self, number: int) -> Record:
        """What was kept of one picture.

        Raises:
            DamagedRecord: it was altered since.
            IcomError: the shard is gone, or is no shard any more.
        """
        place = bisect_right(self._starts, number) - 1
        shard = self._numbers[place]
        try:
            reader = self._open.readers.get(shard) or self._open_shard(shard)
            self._open.readers.move_to_end(shard)
            return reader.read(number - self._starts[place], self.resolution)
        except OSError as error:
            path = shard_path(self.folder, shard, self.made_with)
            raise IcomError(f"Cannot read {path}: {error.strerror or error}.") from error

    def _open_shard(self, number: int) -> Reader:
        made, path = self.made_with, shard_path(self.folder, number, self.made_with)
        while len(self._open.readers) >= WINDOW:
            self._open.readers.popitem(last=False)[1].close()
        places = self._shards[number].places
        reader: Reader = (
            ParquetReader(path, made.shapes, made.torch_dtype) if places is None else TarReader(path, places)
        )
        self._open.readers[number] = reader
        return reader

    def describe(self) -> str:
        """One phrase for the start line."""
        made = self.made_with
        kinds = [f"{self.resolution} px"]
        kinds += [f"{made.crops} crops each"] if made.crops > 1 else []
        kinds += ["mirrored, too"] if made.random_flip else []
        return f"{len(self):,} pictures' latents in {len(self.runs):,} shards ({', '.join([*kinds, made.dtype])})"


class _OpenShards(threading.local):
    """The shards that a thread has open, by number, the one used last at the end."""

    def __init__(self) -> None:
        self.readers: OrderedDict[int, Reader] = OrderedDict()


def open_latents(folder: Path) -> LatentSource | None:
    """The latents of a folder; None where it holds none. Shards are looked for, and their sizes compared; not read.

    Raises:
        IcomError: shards are missing or cut, or the set is damaged.
    """
    found = read_set(folder)
    if found is None:
        return None
    made, empty = found
    if made.format == "parquet":
        need_data_extra(f"Reading the latents in {folder}")
    shards = {number: read_shard(folder, number, made, digest=False) for number in range(made.shards)}
    _refuse_missing(folder, made, [number for number, shard in shards.items() if shard is None])
    with_records = {number: shard for number, shard in shards.items() if shard is not None and shard.records}
    if not with_records:
        raise IcomError(f"The latents in {folder} hold no picture: all of them were damaged.")
    return LatentSource(folder, made, empty, with_records, made.resolutions[-1])


def verify(folder: Path) -> LatentSource:
    """Read all shards of a folder and compare them with their digests.

    Raises:
        IcomError: no latents, or some that are missing, cut or altered; names the shards.
    """
    from icom.progress import progress

    found = read_set(folder)
    if found is None:
        raise IcomError(f"No latents in {folder}: it has no {SET}. `icom data precompute` makes them.")
    made, _ = found
    numbers = progress(range(made.shards), "reading", "shard")
    _refuse_missing(
        folder, made, [number for number in numbers if read_shard(folder, number, made, digest=True) is None]
    )
    source = open_latents(folder)
    assert source is not None
    return source


def _refuse_missing(folder: Path, made: MadeWith, missing: Sequence[int]) -> None:
    if missing:
        names = ", ".join(shard_path(folder, number, made).name for number in missing[:_NAMED])
        more = f" and {len(missing) - _NAMED:,} more" if len(missing) > _NAMED else ""
        raise IcomError(
            f"The latents in {folder} are not whole: of {made.shards:,} shards {len(missing):,} are missing, cut or "
            f"altered ({names}{more}). Give the command of `icom data precompute` again: it makes those alone."
        )

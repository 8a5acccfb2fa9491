"""`icom data precompute`: what VAE and text encoder make of captioned pictures, in shards; and `icom data verify`."""

from __future__ import annotations

import dataclasses
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from icom import __version__, backends
from icom.config.precompute import PrecomputeConfig, VerifyConfig, parse_part
from icom.data import latent_set
from icom.data.crops import WORDS, Crop, crop
from icom.data.damage import Damage
from icom.data.encode import Encoders, encoder_digests, load_encoders
from icom.data.latent_files import Kept, ParquetWriter, TarWriter, Writer, whole_file
from icom.data.latent_set import MadeWith, Shard, read_shard, shard_path, write_set, write_shard
from icom.data.metadata import need_data_extra
from icom.data.records import DamagedRecord, Source
from icom.data.sampling import raw_words
from icom.data.sources import open_source
from icom.engine.memory import keep_freed_memory
from icom.errors import IcomError, Stopped, UsageError
from icom.files import make_writable_folder, write_error
from icom.models import loading
from icom.parallel.group import Group, joined
from icom.parallel.place import find_place
from icom.progress import progress
from icom.signals import StopRequest

if TYPE_CHECKING:
    from icom.backends import Backend

_CROP = 8  # a family of random streams; icom.data.sampling, icom.data.order and icom.methods.unet have those before
_AHEAD = 2
"""Batches that are read while one is encoded."""
_PLACES = {
    *("train_data_dir", "index", "idx_to_prompt", "pretrained_model_name_or_path", "tokenizer_name"),
    *("output_dir", "cache_dir", "config"),
}
"""Options that may differ between machines."""


def precompute(config: PrecomputeConfig) -> None:
    """Write the shards that are missing in --output_dir.

    Raises:
        UsageError: options that do not fit together, with the model or with what is in --output_dir.
        IcomError: data, model or disk are no good, or another process is gone.
        Stopped: a signal came; the shards that are whole stay.
    """
    keep_freed_memory()
    with joined(find_place(os.environ)) as group:
        _precompute(config, group)


def verify(config: VerifyConfig) -> None:
    """Compare the shards of a folder with their digests, and say what they are.

    Raises:
        IcomError: some are missing, cut or altered; names them.
    """
    source = latent_set.verify(Path(config.folder).expanduser())
    made = source.made_with
    print(
        f"whole: {source.describe()}, made with the encoders of {made.model} (VAE {made.vae[:12]}) by icom {made.icom}"
    )


def _precompute(config: PrecomputeConfig, group: Group) -> None:
    """All that the processes do together."""
    part, parts = part_of(config.part, os.environ)
    if config.format == "parquet":
        need_data_extra("--format parquet")
    source = open_source(config)
    if source.kind != "pictures":
        raise UsageError(f"{config.train_data_dir} holds latents already: name the pictures with --train_data_dir.")
    if not len(source):
        raise IcomError(f"There are no pictures in {config.train_data_dir} (--train_data_dir).")
    options = {name: value for name, value in dataclasses.asdict(config).items() if name not in _PLACES}
    group.agree("The options", options | {"part": f"{part}/{parts}"})
    group.agree("The data", {"digest": source.digest, "pictures": len(source)})
    # The engine's attention is chosen by measuring, and would give other bits on other days.
    backend, reason = backends.resolve(
        config.backend, config.mixed_precision, "off", cache_dir=config.cache_dir, place=group.place
    )
    output = Path(config.output_dir).expanduser()
    make_writable_folder(output)
    model = loading.find(
        config.pretrained_model_name_or_path,
        tokenizer_name=config.tokenizer_name,
        revision=config.revision,
        variant=config.variant,
    )
    digests = encoder_digests(model)
    group.agree("The model", digests | {"dtype": str(backend.dtype)})
    work = _Work(config, source, load_encoders(model, backend), backend)
    empty = work.states([""])
    made = work.made_with(model.name, digests, empty)
    write_set(output, made, empty[0])

    damage = Damage(config.max_damaged_share, f"in {config.train_data_dir}")
    mine = [number for number in range(made.shards) if number % parts == part - 1][group.rank :: group.size]
    missing = []
    for number in progress(mine, "looking for whole shards", "shard", disable=not group.leads):
        shard = read_shard(output, number, made, digest=True)
        if shard is None:
            missing.append(number)
        else:
            _count(damage, shard)
    if group.leads:
        of_part = f", part {part} of {parts}" if parts > 1 else ""
        alone = "" if group.size == 1 else " by this process"
        precision = str(backend.dtype).removeprefix("torch.")
        print(f"icom: {source.describe()}; encoders on {backend.device} in {precision} ({reason})", flush=True)
        print(f"icom: {len(missing)} of {len(mine)} shards to make{alone}{of_part} in {output}", flush=True)
    total = sum(len(made.numbers(number)) for number in missing)
    with (
        StopRequest("finishing this batch; shards that are whole stay") as stop,
        progress(None, "latents", "picture", total=total, disable=not group.leads or not missing) as bar,
        work,
    ):
        for number in missing:
            _make(work, output, made, number, damage, stop, bar)
    group.wait_for_everyone()
    if group.leads:
        _conclude(config, output, made)


def _make(
    work: _Work,
    output: Path,
    made: MadeWith,
    number: int,
    damage: Damage,
    stop: StopRequest,
    bar: Any,
) -> None:
    """Make one shard.

    Raises:
        IcomError: too many records are damaged, or the disk is full.
        Stopped: a signal came; nothing is left of the shard.
    """
    path = shard_path(output, number, made)
    records, damaged = 0, []
    try:
        with whole_file(path) as file:
            writer: Writer
            if made.format == "parquet":
                writer = ParquetWriter(file, made.to_json(), made.resolutions)
            else:
                writer = TarWriter(file)
            for batch in work.batches(made.numbers(number)):
                if stop.signal_number is not None:
                    raise Stopped(f"stopped. {_GO_ON}", stop.signal_number)
                kept = []
                for one in work.encode(batch):
                    if isinstance(one, DamagedRecord):
                        damage.bad(one)
                        damaged.append((one.key, one.reason))
                    else:
                        damage.good()
                        kept.append(one)
                damage.check()
                writer.add(kept)
                records += len(kept)
                bar.update(len(batch))
            places = writer.finish()
        write_shard(output, number, made, Shard(file.size, file.hexdigest(), records, damaged, places))
    except OSError as error:
        raise IcomError(f"{write_error(path, error)} {_GO_ON}") from error


_GO_ON = "The shards that are whole stay: give the same command again to go on."


def _count(damage: Damage, shard: Shard) -> None:
    damage.known(shard.records, [DamagedRecord(key, reason) for key, reason in shard.damaged])


def _conclude(config: PrecomputeConfig, output: Path, made: MadeWith) -> None:
    """Say what there is now, other parts' shards included.

    Raises:
        IcomError: all is there, and too much of it damaged.
    """
    shards = [read_shard(output, number, made, digest=False) for number in range(made.shards)]
    whole = [shard for shard in shards if shard is not None]
    damage = Damage(config.max_damaged_share, f"in {config.train_data_dir}")
    for shard in whole:
        _count(damage, shard)
    if len(whole) == made.shards:
        damage.check(complete=True)
    left_out = f", {damage.damaged:,} damaged ones left out" if damage.damaged else ""
    megabytes = sum(shard.bytes for shard in whole) / 1e6
    size = f"{megabytes / 1e3:,.1f} GB" if megabytes >= 1e3 else f"{megabytes:.1f} MB"
    rest = made.shards - len(whole)
    print(
        f"{damage.read - damage.damaged:,} pictures in {len(whole):,} shards, {size}, in {output}{left_out}"
        + (f"; {rest:,} shards of other parts are not there yet" if rest else "")
    )


def part_of(wanted: str | None, environment: Mapping[str, str]) -> tuple[int, int]:
    """(K, N): this command makes every N-th shard, beginning with the K-th.

    Args:
        wanted: --part.
        environment: of the process; a Slurm array's task has its number there.

    Raises:
        UsageError: the array's tasks have no consecutive numbers.
    """
    if wanted is not None:
        return parse_part(wanted)
    names = ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_MAX", "SLURM_ARRAY_TASK_COUNT")
    if not all(environment.get(name, "").isdecimal() for name in names):
        return 1, 1
    task, first, last, count = (int(environment[name]) for name in names)
    if last - first + 1 != count:
        raise UsageError(
            f"The array's tasks are {count} of those from {first} to {last}, so that their parts are not clear: give "
            "--part K/N, or tasks with consecutive numbers. What is whole is not made again."
        )
    return task - first + 1, count


@dataclass(frozen=True)
class _Picture:
    """A picture as threads prepare it; `crops` by resolution."""

    number: int
    key: str
    caption: str
    size: tuple[int, int]
    crops: dict[int, list[Crop]]


class _Work:
    """What is done to each picture. Inside its `with`, threads read ahead."""

    def __init__(self, config: PrecomputeConfig, source: Source, encoders: Encoders, backend: Backend) -> None:
        self._config, self._source, self._encoders, self._backend = config, source, encoders, backend
        self._dtype = torch.float16 if config.dtype == "float16" else torch.float32
        self._pool = ThreadPoolExecutor(max(1, config.dataloader_num_workers), thread_name_prefix="icom-precompute")

    def __enter__(self) -> _Work:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def states(self, captions: Sequence[str]) -> torch.Tensor:
        """The text encoder's, in the dtype that is kept: (captions, tokens, width) on the CPU."""
        with self._backend.autocast():
            return self._encoders.states(captions).float().cpu().to(self._dtype)

    def made_with(self, model: str, digests: Mapping[str, str], empty: torch.Tensor) -> MadeWith:
        """What describes the set.

        Args:
            model: its name.
            digests: of the encoders' weights.
            empty: the empty caption's states, (1, tokens, width).
        """
        config = self._config
        crops = (config.crops_per_picture, 2 if config.random_flip else 1)
        shapes: dict[str, tuple[int, ...]] = {"states": tuple(empty.shape[1:])}
        channels = int(self._encoders.vae.config["latent_channels"])
        scale = 2 ** (len(self._encoders.vae.config["block_out_channels"]) - 1)
        for side in config.resolution:
            for name in (f"mean_{side}", f"std_{side}"):
                shapes[name] = (*crops, channels, side // scale, side // scale)
        return MadeWith(
            model=model,
            icom=__version__,
            vae=digests["vae"],
            text_encoder=digests["text_encoder"],
            precision=str(self._backend.dtype).removeprefix("torch."),
            dtype=config.dtype,
            format=config.format,
            resolutions=tuple(config.resolution),
            crops=config.crops_per_picture,
            center_crop=config.center_crop,
            random_flip=config.random_flip,
            interpolation=config.image_interpolation_mode,
            seed=config.seed,
            source=self._source.digest,
            pictures=len(self._source),
            samples_per_shard=config.samples_per_shard,
            shapes=shapes,
        )

    def batches(self, numbers: Sequence[int]) -> Iterator[list[_Picture | DamagedRecord]]:
        """Pictures by number, --batch_size at a time; some more are read ahead."""
        size = self._config.batch_size
        coming: deque[list[Future[_Picture | DamagedRecord]]] = deque()
        for first in range(0, len(numbers), size):
            coming.append([self._pool.submit(self._read, number) for number in numbers[first : first + size]])
            if len(coming) > _AHEAD:
                yield [future.result() for future in coming.popleft()]
        for futures in coming:
            yield [future.result() for future in futures]

    def _read(self, number: int) -> _Picture | DamagedRecord:
        config = self._config
        try:
            record = self._source.read(number)
        except DamagedRecord as error:
            return error
        assert record.picture is not None
        crops: dict[int, list[Crop]] = {side: [] for side in config.resolution}
        for place in range(config.crops_per_picture):
            words = [int(word) for word in raw_words(config.seed, _CROP, number, place, count=WORDS)]
            for side, made in crops.items():
                made.append(
                    crop(
                        record.picture,
                        side,
                        center_crop=config.center_crop,
                        random_flip=False,
                        words=words,
                        interpolation=config.image_interpolation_mode,
                    )
                )
        return _Picture(number, record.key, record.caption, record.picture.size, crops)

    def encode(self, batch: Sequence[_Picture | DamagedRecord]) -> list[Kept | DamagedRecord]:
        """What is kept of a batch, in its order."""
        pictures = [one for one in batch if isinstance(one, _Picture)]
        if not pictures:
            return [one for one in batch if isinstance(one, DamagedRecord)]
        tensors = {"states": self.states([picture.caption for picture in pictures])}
        for side in self._config.resolution:
            of_places = [
                self._encode([p.crops[side][n].pixels for p in pictures]) for n in range(self._config.crops_per_picture)
            ]
            means, stds = zip(*of_places, strict=True)
            tensors[f"mean_{side}"], tensors[f"std_{side}"] = torch.stack(means, 1), torch.stack(stds, 1)
        kept = iter([self._keep(p, {name: t[n] for name, t in tensors.items()}) for n, p in enumerate(pictures)])
        return [one if isinstance(one, DamagedRecord) else next(kept) for one in batch]

    def _encode(self, pixels: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and deviation of crops, (crops, mirrors, channels, height / 8, width / 8), in the dtype that is kept."""
        upright = torch.stack(list(pixels))
        mirrors = [upright, upright.flip(-1)] if self._config.random_flip else [upright]
        means, stds = zip(*(self._encoders.encode(one) for one in mirrors), strict=True)
        return torch.stack(means, 1).cpu().to(self._dtype), torch.stack(stds, 1).cpu().to(self._dtype)

    def _keep(self, picture: _Picture, tensors: Mapping[str, torch.Tensor]) -> Kept | DamagedRecord:
        broken = [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
        if broken:
            return DamagedRecord(
                picture.key,
                f"{', '.join(broken)}: not finite, or too large for {self._config.dtype}; try --dtype float32, or "
                "--mixed_precision no",
            )
        places = {side: [(made.top, made.left) for made in crops] for side, crops in picture.crops.items()}
        return Kept(picture.number, picture.key, picture.caption, picture.size, places, tensors)

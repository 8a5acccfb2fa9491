"""What `icom data precompute` does to each picture, in threads of its own or in workers of Ray."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load, save

from icom import __version__
from icom.config.precompute import PrecomputeConfig
from icom.data import ray_encoder
from icom.data.crops import WORDS, Crop, crop
from icom.data.encode import Encoders
from icom.data.latent_files import METADATA, Kept
from icom.data.latent_set import MadeWith
from icom.data.ray_workers import RayWorkers, Stretch
from icom.data.records import DamagedRecord, Source
from icom.data.sampling import Stream, raw_words

if TYPE_CHECKING:
    from icom.backends import Backend

_AHEAD = 2
"""Batches that are read while one is encoded."""


@dataclass(frozen=True)
class Picture:
    """A picture as threads prepare it; `crops` by resolution."""

    number: int
    key: str
    caption: str
    size: tuple[int, int]
    crops: dict[int, list[Crop]]


class Work:
    """What is done to each picture. Inside its `with`, threads read ahead."""

    def __init__(self, config: PrecomputeConfig, source: Source, encoders: Encoders, backend: Backend) -> None:
        self._config, self._source, self._encoders, self._backend = config, source, encoders, backend
        self._dtype = torch.float16 if config.dtype == "float16" else torch.float32
        self._pool = ThreadPoolExecutor(max(1, config.dataloader_num_workers), thread_name_prefix="icom-precompute")

    def __enter__(self) -> Work:
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

    def kept(self, numbers: range) -> Iterator[list[Kept | DamagedRecord]]:
        """What is kept of pictures by number, --batch_size at a time."""
        return map(self.encode, self.batches(numbers))

    def batches(self, numbers: Sequence[int]) -> Iterator[list[Picture | DamagedRecord]]:
        """Pictures by number, --batch_size at a time; some more are read ahead."""
        size = self._config.batch_size
        coming: deque[list[Future[Picture | DamagedRecord]]] = deque()
        for first in range(0, len(numbers), size):
            coming.append([self._pool.submit(self._read, number) for number in numbers[first : first + size]])
            if len(coming) > _AHEAD:
                yield [future.result() for future in coming.popleft()]
        for futures in coming:
            yield [future.result() for future in futures]

    def _read(self, number: int) -> Picture | DamagedRecord:
        config = self._config
        try:
            record = self._source.read(number)
        except DamagedRecord as error:
            return error
        assert record.picture is not None
        crops: dict[int, list[Crop]] = {side: [] for side in config.resolution}
        for place in range(config.crops_per_picture):
            words = [int(word) for word in raw_words(config.seed, Stream.CROPS, number, place, count=WORDS)]
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
        return Picture(number, record.key, record.caption, record.picture.size, crops)

    def encode(self, batch: Sequence[Picture | DamagedRecord]) -> list[Kept | DamagedRecord]:
        """What is kept of a batch, in its order."""
        pictures = [one for one in batch if isinstance(one, Picture)]
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

    def _keep(self, picture: Picture, tensors: Mapping[str, torch.Tensor]) -> Kept | DamagedRecord:
        broken = [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
        if broken:
            return DamagedRecord(
                picture.key,
                f"{', '.join(broken)}: not finite, or too large for {self._config.dtype}; try --dtype float32, or "
                "--mixed_precision no",
            )
        places = {side: [(made.top, made.left) for made in crops] for side, crops in picture.crops.items()}
        return Kept(picture.number, picture.key, picture.caption, picture.size, places, tensors)


class RayWork:
    """The same by workers of Ray, for shards in their order. Inside its `with`, they work ahead."""

    def __init__(
        self, config: PrecomputeConfig, source: Source, encoders: Encoders, made: MadeWith, shards: Sequence[int]
    ) -> None:
        """Start them.

        Args:
            config: the options.
            source: of the pictures.
            encoders: as they have to be on the workers.
            made: the set.
            shards: that are to be made, one after the other.

        Raises:
            IcomError: Ray cannot be used.
        """
        self._batch = config.batch_size
        job = ray_encoder.job_of("icom.data.precompute_work:encoder", dataclasses.asdict(config), source, encoders)
        size = sum(math.prod(shape) for shape in made.shapes.values()) * made.torch_dtype.itemsize * self._batch
        work = [Stretch(n.start, n.stop, self._batch, self._batch) for n in map(made.numbers, shards)]
        self._workers = RayWorkers(config, job, work, size)

    def __enter__(self) -> RayWork:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._workers.close()

    def kept(self, numbers: range) -> Iterator[list[Kept | DamagedRecord]]:
        """What is kept of a shard's pictures, --batch_size at a time."""
        for _ in range(0, len(numbers), self._batch):
            yield _unpack(next(self._workers))


def encoder(job: Mapping[str, Any]) -> Callable[[range], bytes]:
    """What a worker of Ray does with the numbers of a batch. See icom/data/ray_encoder.py.

    Raises:
        IcomError: the worker has other data, another model or other versions than the command.
    """
    config = PrecomputeConfig(**job["config"])
    backend, source, _, encoders = ray_encoder.load(job, config)
    work = Work(config, source, encoders, backend)
    return lambda numbers: _pack([one for batch in work.kept(numbers) for one in batch])


def _pack(batch: Sequence[Kept | DamagedRecord]) -> bytes:
    said: list[dict[str, Any]] = []
    tensors: dict[str, torch.Tensor] = {}
    for place, one in enumerate(batch):
        if isinstance(one, DamagedRecord):
            said.append({"damaged": (one.key, one.reason)})
            continue
        places = [(side, list(crops)) for side, crops in one.places.items()]
        facts = {"number": one.number, "key": one.key, "caption": one.caption, "size": one.size, "places": places}
        said.append(facts | {"tensors": list(one.tensors)})  # in the order in which they are written
        tensors |= {f"{place}/{name}": tensor.contiguous() for name, tensor in one.tensors.items()}
    return save(tensors, metadata={METADATA: json.dumps(said)})


def _unpack(content: bytes) -> list[Kept | DamagedRecord]:
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    said = json.loads(header["__metadata__"][METADATA])
    tensors = load(content)
    batch: list[Kept | DamagedRecord] = []
    for place, one in enumerate(said):
        if "damaged" in one:
            batch.append(DamagedRecord(*one["damaged"]))
        else:
            width, height = one["size"]
            places = {side: [(top, left) for top, left in crops] for side, crops in one["places"]}
            numbers = {name: tensors[f"{place}/{name}"] for name in one["tensors"]}
            batch.append(Kept(one["number"], one["key"], one["caption"], (width, height), places, numbers))
    return batch

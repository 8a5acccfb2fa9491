"""Online preprocessing for a training of the UNet: VAE and text encoder compute in workers of Ray beside it.

Workers do what the training itself would do with the same numbers: read, crop and encode a micro-batch. So sample i of
the run stays a function of (seed, i), and the losses are those of a training that encodes by itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from safetensors.torch import load, save

from icom.config.finetune import FinetuneConfig
from icom.data import ray_encoder
from icom.data.feed import Batches, read
from icom.data.ray_workers import RayWorkers, Stretch
from icom.data.records import DamagedRecord, Latents
from icom.methods.unet import Prepared, encode
from icom.training.finetune_run import order_of, sampler_of

if TYPE_CHECKING:
    from icom.training.finetune_run import FinetuneRun

_METADATA = "icom"
_TENSORS = ("mean", "std", "states")


class OnlineFeed(Batches[Prepared]):
    """Batches that workers of Ray prepare; see `Batches`. Their samples have latents."""

    def __init__(self, run: FinetuneRun, next_sample: int) -> None:
        """Nobody is started before the first batch is asked for.

        Args:
            run: whose samples they prepare.
            next_sample: where it stands.
        """
        config, group = run.config, run.group
        super().__init__(config.max_damaged_share)
        assert config.max_train_steps is not None
        assert run.job is not None
        batch = config.micro_batch
        end = next_sample + config.max_train_steps * run.samples_per_step  # or before
        work = Stretch(next_sample + group.rank * batch, end, group.size * batch, batch)
        self._start = partial(RayWorkers, config, run.job, [work], run.job["sample_bytes"] * batch)
        self._workers: RayWorkers | None = None

    def close(self) -> None:
        """End the workers."""
        if self._workers:
            self._workers.close()

    def _make(self) -> list[tuple[Prepared, list[DamagedRecord]]]:
        self._workers = self._workers or self._start()
        return _unpack(next(self._workers))


def encoder(job: Mapping[str, Any]) -> Callable[[range], bytes]:
    """What a worker does with the numbers of a micro-batch. See icom/data/ray_encoder.py.

    Raises:
        IcomError: the worker has other data, another model or other versions than the training.
    """
    config = FinetuneConfig(**job["config"])
    backend, source, _, encoders = ray_encoder.load(job, config)
    order, sampler = order_of(config, source), sampler_of(config, job["timesteps"])
    pool = ThreadPoolExecutor(max(1, config.dataloader_num_workers))

    def make(samples: range) -> bytes:
        made = [pool.submit(read, source, order, sampler, i, order[i]) for i in samples]
        batch = [one.result() for one in made]
        tensors = encode(encoders, [prepared for prepared, _ in batch], backend)
        said = [
            {
                "caption": prepared.caption,
                "dropped": prepared.dropped,
                "timestep": prepared.timestep,
                "noise_seed": prepared.noise_seed,
                "damaged": [(record.key, record.reason) for record in damaged],
            }
            for prepared, damaged in batch
        ]
        contiguous = {name: tensor.cpu().contiguous() for name, tensor in zip(_TENSORS, tensors, strict=True)}
        return save(contiguous, metadata={_METADATA: json.dumps(said)})

    return make


def _unpack(content: bytes) -> list[tuple[Prepared, list[DamagedRecord]]]:
    tensors = load(content)
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    batch = []
    for number, said in enumerate(json.loads(header["__metadata__"][_METADATA])):
        damaged = [DamagedRecord(key, reason) for key, reason in said.pop("damaged")]
        latents = Latents(*(tensors[name][number] for name in _TENSORS))
        batch.append((Prepared(**said, pixels=None, latents=latents), damaged))
    return batch

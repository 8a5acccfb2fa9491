"""What a training run is made of: options settled, model frozen, rows spliced in, latents cached."""

from __future__ import annotations

import dataclasses
import math
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from icom.config.common import Precision
from icom.config.train import TrainConfig
from icom.data.captions import TEMPLATES
from icom.data.images import Picture, Transform
from icom.data.latents import Moments, load_moments
from icom.data.sampling import SampleStream
from icom.files import cache_folder
from icom.methods import Method, textual_inversion
from icom.models import loading
from icom.parallel.group import ALONE, Group
from icom.training.begin import enable_xformers, make_optimizer, make_schedule
from icom.training.checkpoint import Identity, State

if TYPE_CHECKING:
    from accelerate import Accelerator

    from icom.backends import Backend
    from icom.models.loading import Model


@dataclass
class Run:
    """Everything a step needs; built once, then only parameters, optimizer and scheduler change."""

    config: TrainConfig
    backend: Backend
    group: Group
    accelerator: Accelerator
    model: Model
    method: Method
    moments: Moments
    stream: SampleStream
    optimizer: torch.optim.AdamW
    lr_scheduler: torch.optim.lr_scheduler.LambdaLR
    identity: Identity

    @property
    def output(self) -> Path:
        """--output_dir."""
        return Path(self.config.output_dir)

    @property
    def leads(self) -> bool:
        """Whether this process writes files and talks."""
        return self.group.leads

    @property
    def samples_per_step(self) -> int:
        """Total batch: samples of all processes in one optimizer step."""
        config = self.config
        batch = config.train_batch_size * config.gradient_accumulation_steps
        return batch * self.group.size


def settle(
    config: TrainConfig,
    group: Group,
    model_name: str,
    precision: Precision,
    resumed: tuple[State, Identity] | None,
    pictures: int,
) -> TrainConfig:
    """Replace every open choice (seed, precision, steps …) by its value: what config.yaml then says."""
    seed = config.seed
    if seed is None:
        seed = resumed[1].seed if resumed else int(group.broadcast(b"%d" % secrets.randbits(31)))
    epoch = pictures * config.repeats
    batches = math.ceil(epoch / (config.train_batch_size * group.size))
    steps = config.max_train_steps
    if steps is None:
        steps = config.num_train_epochs * math.ceil(batches / config.gradient_accumulation_steps)
    validation_steps = config.validation_steps
    if config.validation_epochs is not None:
        # Samples per epoch, not steps: diffusers' script counts so.
        validation_steps = config.validation_epochs * epoch
        if group.leads:
            print(
                f"icom: --validation_epochs is deprecated; taking --validation_steps {validation_steps}.",
                file=sys.stderr,
            )
    return dataclasses.replace(
        config,
        pretrained_model_name_or_path=model_name,
        seed=seed,
        max_train_steps=steps,
        mixed_precision=precision,
        validation_steps=validation_steps,
        validation_epochs=None,
    )


def prepare(
    config: TrainConfig,
    backend: Backend,
    accelerator: Accelerator,
    model: Model,
    pictures: list[Picture],
    group: Group = ALONE,
    initial_rows: torch.Tensor | None = None,
    after_step: int = 0,
) -> Run:
    """Attach what is trained, convert the rest, fill the latent cache, make optimizer and sample stream.

    Args:
        config: with `seed` and `max_train_steps` settled.
        backend: where it will run.
        accelerator: for the trackers.
        model: freshly loaded; is changed.
        pictures: checked.
        group: the processes of the run.
        initial_rows: of --initial_embedding, (vectors, width).
        after_step: the run goes on after this optimizer step.

    Raises:
        UsageError: initial rows, placeholder, initializer or xFormers do not fit the model or the machine.
    """
    assert config.seed is not None
    vae_digest = loading.weights_digest(model.vae)
    model_digest = loading.weights_digest(model.text_encoder, model.unet) + vae_digest
    method = textual_inversion.attach(model, config, initial_rows)
    if config.enable_xformers_memory_efficient_attention:
        enable_xformers(model.unet)
    if config.gradient_checkpointing:
        model.unet.train()  # diffusers checkpoints in training mode only; there is no dropout
        model.unet.enable_gradient_checkpointing()
    backend.prepare(model)
    moments = load_moments(
        pictures,
        Transform(config.resolution, config.center_crop),
        model.vae,
        vae_digest,
        cache_folder(config.cache_dir),
        rank=group.rank,
        world_size=group.size,
        local_rank=group.place.local_rank,
        local_size=group.place.local_size,
        wait_for_everyone=group.wait_for_everyone,
        decode_threads=config.dataloader_num_workers,
    )
    optimizer = make_optimizer(config, method.parameters.values(), group)
    stream = SampleStream(
        config.seed,
        len(pictures),
        config.repeats,
        len(TEMPLATES[config.learnable_property]),
        model.noise_scheduler.config["num_train_timesteps"],
    )
    options = (
        "placeholder_token",
        "num_vectors",
        "learnable_property",
        "resolution",
        "center_crop",
        "repeats",
        "engine",
    )
    identity = Identity(
        config.seed,
        model_digest,
        {picture.path.name: picture.digest for picture in pictures},
        {name: getattr(config, name) for name in options},
    )
    return Run(
        config,
        backend,
        group,
        accelerator,
        model,
        method,
        moments,
        stream,
        optimizer,
        make_schedule(config, optimizer, after_step),
        identity,
    )

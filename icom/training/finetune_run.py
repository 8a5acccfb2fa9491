"""What a training of the UNet is made of: options settled, weights and data at hand, the network in its processes."""

from __future__ import annotations

import dataclasses
import json
import math
import secrets
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from icom.config.finetune import FinetuneConfig
from icom.data.encode import Encoders, load_encoders
from icom.data.latent_set import LatentSource
from icom.data.order import Order
from icom.data.records import Source
from icom.errors import UsageError
from icom.methods.unet import Objective, Sampler, objective_of
from icom.models import loading
from icom.parallel import sharding
from icom.parallel.group import Group
from icom.training.begin import (
    Start,
    enable_xformers,
    make_optimizer,
    make_schedule,
)
from icom.training.checkpoint import (
    Identity,
    State,
)
from icom.training.ema import Decay, Ema, limit_of_half_life
from icom.training.first_weights import first_unet, weights_in

if TYPE_CHECKING:
    from accelerate import Accelerator

    from icom.backends import Backend


@dataclass
class FinetuneRun:
    """Everything a step needs; built once, then parameters, optimizer, schedule and mean change.

    Attributes:
        config: with every open choice settled.
        model: where it comes from.
        unet: what is trained, float32.
        network: `unet`, or what wraps it in several processes.
        parallel: how they share it.
        encoders: where the data are pictures.
        data: what is trained on.
        held_back: records of the validation loss.
        ema: the mean of the weights, where one is kept.
    """

    config: FinetuneConfig
    backend: Backend
    group: Group
    accelerator: Accelerator
    model: loading.ModelSource
    unet: Any
    network: torch.nn.Module
    parallel: sharding.Parallel
    encoders: Encoders | None
    objective: Objective
    data: Source
    held_back: Sequence[int]
    order: Order
    sampler: Sampler
    optimizer: torch.optim.AdamW
    lr_scheduler: torch.optim.lr_scheduler.LambdaLR
    ema: Ema | None
    identity: Identity

    @property
    def output(self) -> Path:
        """--output_dir."""
        return Path(self.config.output_dir)

    @property
    def samples_per_step(self) -> int:
        """Total batch: samples of all processes in one optimizer step."""
        config = self.config
        return config.train_batch_size * config.gradient_accumulation_steps * self.group.size

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Name -> what is trained; this process's part of it under FSDP."""
        return dict(self.unet.named_parameters())

    @cached_property
    def empty(self) -> torch.Tensor | None:
        """The empty caption's states, where the data are latents."""
        return self.data.empty if isinstance(self.data, LatentSource) else None

    def shown_weights(self) -> Any:
        """Context in which the UNet has the weights that people want: the mean, where there is one."""
        if self.ema is None:
            return nullcontext()
        return self.ema.in_place_of(sharding.local(self.parameters))


def settle(
    config: FinetuneConfig,
    group: Group,
    model_name: str,
    start: Start,
    saved: tuple[State, Identity] | None,
    records: int,
) -> FinetuneConfig:
    """Replace every open choice (seed, precision, steps …) by its value: what config.yaml then says.

    Args:
        config: checked.
        group: the processes.
        model_name: after redirects.
        start: has the precision.
        saved: the checkpoint that the run goes on from.
        records: of the data.

    Raises:
        UsageError: more samples are held back than there are.
    """
    seed = config.seed
    if seed is None:
        seed = saved[1].seed if saved else int(group.broadcast(b"%d" % secrets.randbits(31)))
    if config.num_validation_samples >= records:
        raise UsageError(
            f"--num_validation_samples {config.num_validation_samples} would leave nothing of {records} samples to "
            "train on. Hold fewer back."
        )
    per_step = config.train_batch_size * config.gradient_accumulation_steps * group.size
    epoch = math.ceil((records - config.num_validation_samples) / per_step)
    steps = config.max_train_steps or config.steps_of_examples(group.size)
    every = config.validation_steps
    if config.validation_epochs is not None:
        every = config.validation_epochs * epoch
    limit = 1 if config.save_only_most_recent else config.checkpoints_total_limit
    return dataclasses.replace(
        config,
        pretrained_model_name_or_path=model_name,
        seed=seed,
        max_train_steps=steps or config.num_train_epochs * epoch,
        num_examples_to_see=None,
        mixed_precision=start.precision,
        validation_steps=every,
        validation_epochs=None,
        checkpoints_total_limit=limit,
    )


def prepare(
    config: FinetuneConfig,
    start: Start,
    accelerator: Accelerator,
    group: Group,
    model: loading.ModelSource,
    data: Source,
    saved: State | None,
) -> FinetuneRun:
    """Load the model, put the UNet into its processes, make optimizer, schedule, order and mean.

    Args:
        config: settled.
        start: where it computes; gets a note on how the processes share the work.
        accelerator: for the trackers.
        group: the processes.
        model: where it comes from.
        data: what is trained on.
        saved: the checkpoint that the run goes on from; its tensors are put in place later.

    Raises:
        UsageError, IcomError: options, weights and data do not fit together.
    """
    assert config.seed is not None
    backend = start.backend
    objective = objective_of(config, model, loading.load_scheduler(model))
    encoders, digests = None, {}
    if data.kind == "pictures":
        encoders = load_encoders(model, backend)
        digests = {"VAE": loading.weights_digest(encoders.vae), "text": loading.weights_digest(encoders.text_encoder)}
    unet = first_unet(config, model)
    group.agree("The model", digests | {"UNet": loading.weights_digest(unet)})
    unet.requires_grad_(True)
    unet.train()
    if config.gradient_checkpointing:
        unet.enable_gradient_checkpointing()
    if config.enable_xformers_memory_efficient_attention:
        enable_xformers(unet)
    unet.to(backend.device)
    backend.prepare_training(unet)
    backend.choices.update(saved.choices if saved else {})
    _agree_on_choices(config, backend, group, unet)
    numbers = sum(parameter.numel() for parameter in unet.parameters())
    parallel, why = sharding.choose(
        config.parallel, group, numbers, backend.device, ema=config.use_ema and not config.offload_ema
    )
    if group.size > 1:
        start.notes.append(f"{parallel}: {why}")
    network = sharding.wrap(unet, parallel, backend.dtype, backend.device)
    optimizer = make_optimizer(config, unet.parameters(), group, fused=True)
    held_back = range(len(data) - config.num_validation_samples, len(data))
    timesteps = int(objective.noise_scheduler.config["num_train_timesteps"])
    sampler = Sampler(
        config.seed,
        timesteps,
        config.resolution,
        config.center_crop,
        config.random_flip,
        config.image_interpolation_mode,
        config.caption_dropout_rate,
    )
    decides = (
        *("resolution", "center_crop", "random_flip", "image_interpolation_mode", "caption_dropout_rate"),
        *("prediction_type", "rescale_betas_zero_snr", "snr_gamma", "noise_offset", "num_validation_samples"),
        *("use_ema", "ema_decay", "ema_half_life", "ema_warmup", "max_grad_norm", "from_scratch"),
    )
    identity = Identity(
        config.seed,
        " ".join(digests.values()),
        {"of the source": data.digest},
        {name: getattr(config, name) for name in decides},
    )
    return FinetuneRun(
        config,
        backend,
        group,
        accelerator,
        model,
        unet,
        network,
        parallel,
        encoders,
        objective,
        data,
        held_back,
        Order(list(_without(data.runs, len(held_back))), config.seed),
        sampler,
        optimizer,
        make_schedule(config, optimizer, saved.step if saved else 0),
        _make_ema(config, unet, backend.device),
        identity,
    )


def _agree_on_choices(config: FinetuneConfig, backend: Backend, group: Group, unet: Any) -> None:
    """Let all processes compute alike: the first one chooses in a forward pass that is thrown away."""
    if group.leads:
        side, batch = config.resolution // 8, config.train_batch_size
        noisy = torch.zeros(batch, unet.config.in_channels, side, side, device=backend.device)
        states = torch.zeros(batch, 77, unet.config.cross_attention_dim, device=backend.device, dtype=backend.dtype)
        with backend.autocast():
            unet(noisy, torch.zeros(batch, dtype=torch.int64, device=backend.device), states)
    backend.choices.update(json.loads(group.broadcast(json.dumps(backend.choices).encode() if group.leads else None)))


def _without(runs: Sequence[range], last: int) -> Iterator[range]:
    """Runs of records without the last ones."""
    end = sum(map(len, runs)) - last
    for run in runs:
        if run.start < end:
            yield range(run.start, min(run.stop, end))


def _make_ema(config: FinetuneConfig, unet: Any, device: torch.device) -> Ema | None:
    if not config.use_ema:
        return None
    limit = limit_of_half_life(config.ema_half_life) if config.ema_half_life else config.ema_decay
    kept = torch.device("cpu") if config.offload_ema else device
    parameters = dict(unet.named_parameters())
    weights = {name: tensor.to(kept, copy=True) for name, tensor in sharding.local(parameters).items()}
    if config.ema_from:
        for name, value in weights_in(Path(config.ema_from), unet, mean=True).items():
            sharding.put(weights[name], value, parameters[name])
    return Ema(Decay(limit, config.ema_warmup), weights)

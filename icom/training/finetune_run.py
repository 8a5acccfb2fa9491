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
from icom.config.training import chosen, settings
from icom.data.encode import Encoders, load_encoders
from icom.data.latent_set import LatentSource
from icom.data.order import Order
from icom.data.ray_encoder import job_of
from icom.data.records import Source
from icom.errors import UsageError
from icom.methods.text_encoder import Together, join
from icom.methods.unet import Objective, Sampler, objective_of
from icom.models import loading
from icom.parallel import sharding
from icom.parallel.group import Group
from icom.training.begin import Start, enable_xformers, make_optimizer, make_schedule
from icom.training.checkpoint import Identity, Saved, State
from icom.training.ema import Ema, decay_of
from icom.training.finetune_state import Format, choose_format
from icom.training.first_weights import first_unet, weights_in
from icom.training.loop import Running
from icom.training.micro_batch import find_micro_batch
from icom.training.objective import sampling_of

if TYPE_CHECKING:
    from accelerate import Accelerator

    from icom.backends import Backend


@dataclass
class FinetuneRun(Running):
    """Everything a step needs; built once, then parameters, optimizer, schedule and mean change.

    Attributes:
        config: with every open choice settled.
        why_batch: why the micro-batch is no larger, where that was found by trying.
        model: where it comes from.
        unet: what is trained, float32.
        network: `unet`, or what wraps it in several processes.
        parallel: how they share it.
        why_so: the reason.
        checkpoint_format: whether a checkpoint is one file, or a part from each process.
        why_format: the reason.
        encoders: where the data are pictures, and this process encodes them.
        job: what workers do that encode them in its place (icom/data/ray_encoder.py).
        data: what is trained on.
        held_back: records of the validation loss.
        parts: what the optimizer steps: the parameters, or this process's parts of them (`sharding.parts`).
        ema: the mean of the weights, where one is kept.
    """

    config: FinetuneConfig
    why_batch: str | None
    backend: Backend
    group: Group
    accelerator: Accelerator
    model: loading.ModelSource
    unet: Any
    network: torch.nn.Module
    parallel: sharding.Parallel
    why_so: str
    checkpoint_format: Format
    why_format: str
    encoders: Encoders | None
    job: dict[str, Any] | None
    objective: Objective
    data: Source
    held_back: Sequence[int]
    order: Order
    sampler: Sampler
    parts: dict[str, torch.nn.Parameter]
    optimizer: torch.optim.AdamW
    lr_scheduler: torch.optim.lr_scheduler.LambdaLR
    ema: Ema | None
    identity: Identity

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Name -> what is trained; this process's part of it under FSDP."""
        return _parameters(self.unet, self.text_encoder)

    @property
    def text_encoder(self) -> Any | None:
        """It, where it is trained."""
        return self.encoders.text_encoder if self.encoders and self.config.train_text_encoder else None

    @property
    def trained(self) -> torch.nn.Module:
        """What is trained, without what waits for the other processes in each pass."""
        return self.network.module if self.parallel == "ddp" else self.network  # type: ignore[return-value]

    @property
    def accumulated(self) -> int:
        """Micro-batches of a process in an optimizer step."""
        return self.config.samples_per_process(self.group.size) // self.config.micro_batch

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
    saved: Saved | None,
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
        UsageError: more samples are held back than there are, or the total batch cannot be shared out.
    """
    seed = config.seed
    if seed is None:
        seed = saved.identity.seed if saved else int(group.broadcast(b"%d" % secrets.randbits(31)))
    if config.num_validation_samples >= records:
        raise UsageError(
            f"--num_validation_samples {config.num_validation_samples} would leave nothing of {records} samples to "
            "train on. Hold fewer back."
        )
    epoch = math.ceil((records - config.num_validation_samples) / config.samples_per_step(group.size))
    samples, micro_batch = config.samples_per_process(group.size), config.train_batch_size
    if micro_batch == "auto" and saved and samples % saved.settings["train_batch_size"] == 0:
        micro_batch = saved.settings["train_batch_size"]  # another one would give other bits
    steps = config.max_train_steps or config.steps_of_examples(group.size)
    every = config.validation_steps
    if config.validation_epochs is not None:
        every = config.validation_epochs * epoch
    limit = 1 if config.save_only_most_recent else config.checkpoints_total_limit
    return dataclasses.replace(
        config,
        pretrained_model_name_or_path=model_name,
        seed=seed,
        train_batch_size=micro_batch,
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
        config: settled, but for a micro-batch that has to be found.
        start: where it computes.
        accelerator: for the trackers.
        group: the processes.
        model: where it comes from.
        data: what is trained on.
        saved: the checkpoint that the run goes on from; its tensors are put in place later.

    Raises:
        UsageError, IcomError: options, weights and data do not fit together.
    """
    seed = config.seed
    assert seed is not None
    backend = start.backend
    objective = objective_of(config, model, loading.load_scheduler(model))
    timesteps = int(objective.noise_scheduler.config["num_train_timesteps"])
    encoders, digests, job = None, {}, None
    if data.kind == "pictures":
        encoders = load_encoders(model, backend)
        digests = {"VAE": loading.weights_digest(encoders.vae), "text": loading.weights_digest(encoders.text_encoder)}
    unet = first_unet(config, model)
    if group.size > 1:  # gigabytes to read
        group.agree("The model", digests | {"UNet": loading.weights_digest(unet)})
    text_encoder = encoders.text_encoder if encoders and config.train_text_encoder else None
    whole = Together(unet, text_encoder) if text_encoder else unet
    whole.requires_grad_(True)
    whole.train()
    if config.gradient_checkpointing:
        unet.enable_gradient_checkpointing()
        if text_encoder:
            text_encoder.gradient_checkpointing_enable()  # type: ignore[no-untyped-call]
    if config.enable_xformers_memory_efficient_attention:
        enable_xformers(unet)
    unet.to(backend.device)
    backend.prepare_training(unet)
    numbers = sum(parameter.numel() for parameter in whole.parameters())
    ema_here = config.use_ema and not (config.offload_ema and backend.device.type == "cuda")
    wanted = "ddp" if text_encoder else config.parallel
    parallel, why_so = sharding.choose(wanted, group, numbers, backend.device, ema=ema_here)
    why_batch = None
    if config.train_batch_size == "auto":
        verdict = find_micro_batch(
            config.samples_per_process(group.size),
            *(config.resolution, whole, objective, encoders, data, backend, group),
            copies=3 if ema_here else 2,
            sharded=parallel not in ("one", "ddp"),
        )
        config, why_batch = dataclasses.replace(config, train_batch_size=verdict.size), verdict.why
        backend.prepare_training(unet)  # what it chose for other micro-batches is no part of the run
    if encoders and config.encoder_workers:
        job = _job(config, data, encoders, timesteps)
        encoders = None
    backend.choices.update(saved.choices if saved else {})
    _agree_on_choices(config, backend, group, unet)
    network = sharding.wrap(whole, parallel, backend.dtype, backend.device, backend.training_layout)
    parameters = _parameters(unet, text_encoder)
    parts = sharding.parts(parameters)
    optimizer = make_optimizer(config, parts.values(), group, fused=True)
    held_back = range(len(data) - config.num_validation_samples, len(data))
    decides = (
        *("resolution", "center_crop", "random_flip", "image_interpolation_mode", "caption_dropout_rate"),
        *(
            "prediction_type",
            "rescale_betas_zero_snr",
            "snr_gamma",
            "noise_offset",
            "input_perturbation",
            "num_validation_samples",
        ),
        *("use_ema", "ema_decay", "ema_half_life", "ema_warmup", "max_grad_norm", "from_scratch"),
    )
    later = ("train_text_encoder", "min_timestep", "max_timestep", "timestep_sampling", "logit_mean", "logit_std")
    identity = Identity(
        seed,
        " ".join(digests.values()),
        {"of the source": data.digest},
        {name: getattr(config, name) for name in decides} | chosen(config, *later),
    )
    return FinetuneRun(
        config,
        why_batch,
        backend,
        group,
        accelerator,
        model,
        unet,
        network,
        parallel,
        why_so,
        *choose_format(config, parallel, group),
        encoders,
        job,
        objective,
        data,
        held_back,
        order_of(config, data),
        sampler_of(config, timesteps),
        parts,
        optimizer,
        make_schedule(config, optimizer, saved.step if saved else 0),
        _make_ema(config, parameters, unet, backend.device),
        identity,
    )


def order_of(config: FinetuneConfig, data: Source) -> Order:
    """The order of the samples that are not held back. Args: settled; what is trained on."""
    assert config.seed is not None
    return Order(list(_without(data.runs, config.num_validation_samples)), config.seed)


def sampler_of(config: FinetuneConfig, timesteps: int) -> Sampler:
    """What is done to the records of a run.

    Args:
        config: settled.
        timesteps: of the noise schedule.
    """
    assert config.seed is not None
    return Sampler(
        config.seed,
        timesteps,
        config.resolution,
        config.center_crop,
        config.random_flip,
        config.image_interpolation_mode,
        config.caption_dropout_rate,
        timestep_sampling=sampling_of(config, timesteps),
    )


def _job(config: FinetuneConfig, data: Source, encoders: Encoders, timesteps: int) -> dict[str, Any]:
    """What workers of Ray do that encode in this process's place."""
    text = encoders.text_encoder.config
    numbers = 2 * 4 * (config.resolution // 8) ** 2 + text.max_position_embeddings * text.hidden_size
    start = "icom.training.finetune_online:encoder"
    return job_of(start, settings(config), data, encoders, timesteps=timesteps, sample_bytes=4 * numbers)


def _agree_on_choices(config: FinetuneConfig, backend: Backend, group: Group, unet: Any) -> None:
    """Let all processes compute alike: the first one chooses in a forward pass that is thrown away."""
    if group.size == 1:
        return
    if group.leads:
        side, batch = config.resolution // 8, config.micro_batch
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


def _parameters(unet: Any, text_encoder: Any | None) -> dict[str, torch.nn.Parameter]:
    """Name -> what is trained."""
    return join(dict(unet.named_parameters()), dict(text_encoder.named_parameters()) if text_encoder else {})


def _make_ema(
    config: FinetuneConfig, parameters: dict[str, torch.nn.Parameter], unet: Any, device: torch.device
) -> Ema | None:
    if not config.use_ema:
        return None
    kept = torch.device("cpu") if config.offload_ema else device
    weights = {name: tensor.to(kept, copy=True) for name, tensor in sharding.local(parameters).items()}
    if config.ema_from:
        for name, value in weights_in(Path(config.ema_from), unet, mean=True).items():
            sharding.put(weights[name], value, parameters[name])
    return Ema(decay_of(config), weights)

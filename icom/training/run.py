"""What a training run is made of: options settled, model frozen, rows spliced in, latents cached."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

import torch

from icom import backends
from icom.config.common import Precision
from icom.config.train import TrainConfig
from icom.data.captions import TEMPLATES
from icom.data.images import Picture, Transform
from icom.data.latents import Moments, load_moments
from icom.data.sampling import SampleStream
from icom.errors import UsageError
from icom.files import cache_folder
from icom.methods import Method, textual_inversion
from icom.models import loading
from icom.parallel import environment
from icom.parallel.group import ALONE, Group
from icom.parallel.place import Place
from icom.training.checkpoint import Identity, State, find_checkpoint, settings_of

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


def precision_of(config: TrainConfig, group: Group) -> tuple[Precision, str]:
    """--mixed_precision, else what `accelerate launch` was configured with; for `auto` rank 0 decides for all.

    Returns:
        (precision, why `auto` took it: empty where it was named).

    Raises:
        UsageError: Accelerate is configured for something else.
        IcomError: a resumed run's checkpoint is damaged or not there.
    """
    wanted = config.mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    decided = group.broadcast(
        json.dumps(_fast_precision(config, wanted, group.place)).encode() if group.leads else None
    )
    if wanted == "auto":
        precision, why = json.loads(decided)
        return precision, why
    if wanted not in get_args(Precision):
        raise UsageError(f"Accelerate is configured for {wanted}; set --mixed_precision to auto, bf16 or no.")
    return cast(Precision, wanted), ""


def _fast_precision(config: TrainConfig, wanted: str, place: Place) -> tuple[str, str]:
    """What `auto` means: another precision would be another run than the checkpoint's, so that one is kept."""
    if wanted != "auto":
        return wanted, ""
    if config.resume_from_checkpoint is not None:
        folder = find_checkpoint(Path(config.output_dir), config.resume_from_checkpoint)
        if folder is not None:
            precision: str = settings_of(folder)["mixed_precision"]
            return precision, f"{'fp32' if precision == 'no' else precision}: the checkpoint's"
    return backends.fast_precision(config.backend, config.cache_dir, place)


def start_accelerate(
    config: TrainConfig, backend: Backend, group: Group, precision: Precision, reporters: list[str]
) -> Accelerator:
    """Accelerate's part: trackers, and what its launcher was configured with. It adopts the group that is there."""
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    if group.size > 1:
        environment.for_accelerate()
    project = ProjectConfiguration(
        project_dir=config.output_dir, logging_dir=str(Path(config.output_dir) / config.logging_dir)
    )
    return Accelerator(
        cpu=backend.device.type == "cpu",
        mixed_precision=precision,
        log_with=reporters or None,
        project_config=project,
    )


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
        _enable_xformers(model)
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
    optimizer = _make_optimizer(config, method, group)
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
        _make_schedule(config, optimizer, after_step),
        identity,
    )


def _make_optimizer(config: TrainConfig, method: Method, group: Group) -> torch.optim.AdamW:
    learning_rate = config.learning_rate
    if config.scale_lr:
        learning_rate *= config.train_batch_size * config.gradient_accumulation_steps * group.size
    return torch.optim.AdamW(
        method.parameters.values(),
        lr=learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        weight_decay=config.adam_weight_decay,
        eps=config.adam_epsilon,
    )


def _make_schedule(
    config: TrainConfig, optimizer: torch.optim.Optimizer, after_step: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """The rate is a function of the step alone, so that nothing of the scheduler has to be kept in checkpoints."""
    from diffusers.optimization import get_scheduler

    assert config.max_train_steps is not None
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]  # a scheduler that does not begin at 0 asks for it
    schedule: torch.optim.lr_scheduler.LambdaLR = get_scheduler(
        config.lr_scheduler,
        optimizer,
        num_warmup_steps=config.lr_warmup_steps,
        num_training_steps=config.max_train_steps,
        num_cycles=config.lr_num_cycles,
        last_epoch=after_step - 1,
    )
    return schedule


def _enable_xformers(model: Model) -> None:
    try:
        model.unet.enable_xformers_memory_efficient_attention()
    except Exception as error:
        # ModuleNotFoundError without xFormers, ValueError without a GPU.
        raise UsageError(
            f"xFormers cannot be used here ({error}). Drop --enable_xformers_memory_efficient_attention."
        ) from error

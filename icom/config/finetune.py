"""The options of `icom finetune`.

Those that diffusers' `train_text_to_image.py` has keep its names, meanings and defaults; docs/finetune.md says which
option answers which key of other trainers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from icom.config.common import check_at_least_one, check_not_negative, check_resolution
from icom.config.data import DataOptions, Interpolation
from icom.config.loading import layers, merge
from icom.config.training import ModelOptions, RunOptions
from icom.errors import UsageError

ParallelName = Literal["auto", "ddp", "shard_grad_op", "full_shard"]

BUNDLED_DEFAULTS = {"resolution": 64, "mixed_precision": "auto"}
"""Defaults for the bundled model; all others have diffusers' own."""


@dataclass(kw_only=True)
class FinetuneConfig(RunOptions, DataOptions, ModelOptions):
    """Train the UNet of Stable Diffusion on captioned pictures, from pretrained weights or from scratch.

    Example: icom finetune --train_data_dir photos --pretrained_model_name_or_path
    stable-diffusion-v1-5/stable-diffusion-v1-5 --train_batch_size 1 --max_train_steps 1000 --mixed_precision auto
    """

    # What is trained.
    from_scratch: str | None = None
    """Start from random weights: a YAML file with a `UNet2DConditionModel` configuration, or `model`: the model's own.
    VAE, text encoder and tokenizer are the model's."""
    weights_from: str | None = None
    """Start from the weights in this checkpoint of icom's (its mean with --use_ema, where it has one) or UNet folder,
    and from nothing else of it."""
    output_dir: str = "sd-model-finetuned"
    """Folder for the pipeline, checkpoints, logs and pictures."""

    # Pictures.
    resolution: int = 512
    """The short side is resized to this and a square cut out; a multiple of 8 (bundled model: 64)."""
    center_crop: bool = False
    """Cut the middle out. Default: a random place."""
    random_flip: bool = False
    """Mirror every other sample, left to right."""
    image_interpolation_mode: Interpolation = "lanczos"
    """How pictures are resized."""
    dataloader_num_workers: int = 0
    """Threads that read and decode pictures ahead of the steps; 0: one."""

    # The objective.
    caption_dropout_rate: float = 0.1
    """Share of samples that are trained without their caption, for classifier-free guidance."""
    prediction_type: Literal["epsilon", "v_prediction"] | None = None
    """What the UNet predicts. Default: what the model's scheduler says."""
    rescale_betas_zero_snr: bool = False
    """Rescale the noise schedule so that its last step is noise alone (Lin et al. 2024); needs v_prediction."""
    snr_gamma: float | None = None
    """Weigh timesteps by min(SNR, this) (Hang et al. 2023); 5.0 is the paper's."""
    noise_offset: float = 0.0
    """Scale of noise that is the same for all pixels of a channel; about 0.1 lets pictures get darker and brighter."""

    # More of the optimisation.
    max_train_steps: int | None = None
    """Optimizer steps. Default: what --num_examples_to_see or --num_train_epochs come to."""
    num_examples_to_see: int | None = None
    """Samples in all; decides the steps in place of epochs."""
    max_grad_norm: float = 1.0
    """The gradient of a whole optimizer step is scaled down to this norm; 0: as it is."""
    use_ema: bool = False
    """Keep an exponential mean of the weights, beside them; pictures and the pipeline are made with it."""
    ema_decay: float = 0.9999
    """What of the mean stays at a step, in the long run."""
    ema_half_life: float | None = None
    """The same as steps after which weights count half; takes the place of --ema_decay."""
    ema_warmup: bool = False
    """Let the decay rise slowly, as 1 - (1 + n)^(-2/3) over the steps n."""
    offload_ema: bool = False
    """Keep the mean in the CPU's memory."""
    ema_from: str | None = None
    """Start the mean from this UNet folder, and not from the weights."""

    # Several processes.
    parallel: ParallelName = "auto"
    """`ddp`: whole weights in each process; `shard_grad_op`, `full_shard`: parts (FSDP). `auto`: ddp where it fits."""

    # Results.
    save_only_most_recent: bool = False
    """Keep the newest checkpoint only: the same as --checkpoints_total_limit 1."""

    # Watching it.
    validation_prompts: list[str] = field(default_factory=list)
    """Prompts to draw during training."""
    validation_steps: int = 500
    """Draw and compute the validation loss every so many optimizer steps."""
    validation_epochs: int | None = None
    """The same in epochs; takes the place of --validation_steps."""
    num_validation_samples: int = 0
    """Hold the last so many samples back and compute the loss on them, always with the same noise and timesteps."""

    def __post_init__(self) -> None:
        """Refuse what cannot work, before anything is loaded.

        Raises:
            UsageError: names the option and how to fix it.
        """
        RunOptions.__post_init__(self)
        DataOptions.__post_init__(self)
        check_resolution(self.resolution)
        check_at_least_one(
            num_examples_to_see=self.num_examples_to_see,
            validation_steps=self.validation_steps,
            validation_epochs=self.validation_epochs,
        )
        check_not_negative(
            dataloader_num_workers=self.dataloader_num_workers,
            max_grad_norm=self.max_grad_norm,
            noise_offset=self.noise_offset,
            num_validation_samples=self.num_validation_samples,
        )
        if not 0 <= self.caption_dropout_rate <= 1:
            raise UsageError("--caption_dropout_rate has to be between 0 and 1.")
        if not 0 <= self.ema_decay < 1:
            raise UsageError("--ema_decay has to be in [0, 1).")
        for name in ("snr_gamma", "ema_half_life"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise UsageError(f"--{name} has to be a positive number, not {value}.")
        if self.max_train_steps is not None and self.num_examples_to_see is not None:
            raise UsageError("Give --max_train_steps or --num_examples_to_see: each says how long to train.")
        if not self.use_ema:
            for name in ("ema_half_life", "ema_warmup", "offload_ema", "ema_from"):
                if getattr(self, name):
                    raise UsageError(f"--{name} is of the mean of the weights: add --use_ema, or drop it.")
        if self.from_scratch and self.weights_from:
            raise UsageError("--from_scratch starts from random weights and --weights_from from others: drop one.")
        for chosen, advice in (
            (self.backend == "ipex", "--backend ipex is for frozen models; use --backend cpu to train the UNet."),
            (self.compile, "--compile is not for `icom finetune`. Drop it."),
            (self.push_to_hub, "--push_to_hub is not there yet: use `hf upload REPOSITORY OUTPUT/current_pipeline`."),
            (self.on, "--on is for `icom train`. Log in (`icom ssh`) and start `icom finetune` there."),
        ):
            if chosen:
                raise UsageError(advice)

    def steps_of_examples(self, processes: int) -> int | None:
        """Optimizer steps that --num_examples_to_see come to, where it is given."""
        per_step = self.train_batch_size * self.gradient_accumulation_steps * processes
        return None if self.num_examples_to_see is None else math.ceil(self.num_examples_to_see / per_step)


def load_finetune_config(flags: Mapping[str, Any]) -> FinetuneConfig:
    """Lay the flags that were given over --config, and over both the defaults of the model that they name.

    Raises:
        UsageError: unreadable file, unknown key, wrong type, missing or impossible value.
    """

    def of_the_model(merged: Any) -> Mapping[str, Any]:
        return BUNDLED_DEFAULTS if merged.pretrained_model_name_or_path == "bundled" else {}

    return merge(FinetuneConfig, layers(flags), flags.get("config"), of_the_model)

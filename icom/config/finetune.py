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
from icom.config.encoders import EncoderOptions
from icom.config.loading import layers, merge
from icom.config.objective import EmaOptions, ObjectiveOptions, needs_ema
from icom.config.training import ModelOptions, RunOptions
from icom.errors import UsageError

ParallelName = Literal["auto", "ddp", "shard_grad_op", "full_shard"]

BUNDLED_DEFAULTS = {"resolution": 64, "mixed_precision": "auto"}
"""Defaults for the bundled model; all others have diffusers' own."""


@dataclass(kw_only=True)
class FinetuneConfig(RunOptions, EmaOptions, ObjectiveOptions, DataOptions, EncoderOptions, ModelOptions):
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
    train_text_encoder: bool = False
    """Train the text encoder together with the UNet; checkpoints, mean and pipeline then hold both."""
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
    input_perturbation: float = 0.0
    """Scale of further noise that is added to the latents but not to be predicted (Ning et al. 2023); 0.1 is theirs."""

    # More of the optimisation.
    train_batch_size: int | Literal["auto"] = 16  # type: ignore[assignment]  # until it is settled
    """Samples per process and forward pass. `auto`: as many as fit, found by trying; --total_batch_size says how many
    make an optimizer step. A run that resumes keeps its own."""
    total_batch_size: int | None = None
    """Samples of an optimizer step, of all processes together; takes the place of --gradient_accumulation_steps."""
    max_train_steps: int | None = None
    """Optimizer steps. Default: what --num_examples_to_see or --num_train_epochs come to."""
    num_examples_to_see: int | None = None
    """Samples in all; decides the steps in place of epochs."""
    max_grad_norm: float = 1.0
    """The gradient of a whole optimizer step is scaled down to this norm; 0: as it is."""
    offload_ema: bool = False
    """Keep the mean in the CPU's memory."""
    ema_from: str | None = None
    """Start the mean from this UNet folder, and not from the weights."""

    # Several processes.
    parallel: ParallelName = "auto"
    """`ddp`: whole weights in each process; `shard_grad_op`, `full_shard`: parts (FSDP). `auto`: ddp where it fits."""

    # Results.
    checkpoint_format: Literal["auto", "whole", "sharded"] = "auto"
    """`whole`: one file, for which rank 0 gathers the state; `sharded` (FSDP): each process writes its part, to an
    --output_dir that all machines share. `auto`: sharded where that can be. Runs go on from both in any number."""
    save_only_most_recent: bool = False
    """Keep the newest checkpoint only: the same as --checkpoints_total_limit 1."""

    # Watching it.
    tracker_project_name: str = "text2image-fine-tune"
    """The project that W&B and Comet show the run in; TensorBoard: the folder in --logging_dir."""
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
        self._check_batches()
        DataOptions.__post_init__(self)
        EncoderOptions.__post_init__(self)
        ObjectiveOptions.__post_init__(self)
        EmaOptions.__post_init__(self)
        check_resolution(self.resolution)
        check_at_least_one(
            num_examples_to_see=self.num_examples_to_see,
            validation_steps=self.validation_steps,
            validation_epochs=self.validation_epochs,
        )
        check_not_negative(
            dataloader_num_workers=self.dataloader_num_workers,
            max_grad_norm=self.max_grad_norm,
            input_perturbation=self.input_perturbation,
            num_validation_samples=self.num_validation_samples,
        )
        if not 0 <= self.caption_dropout_rate <= 1:
            raise UsageError("--caption_dropout_rate has to be between 0 and 1.")
        if self.max_train_steps is not None and self.num_examples_to_see is not None:
            raise UsageError("Give --max_train_steps or --num_examples_to_see: each says how long to train.")
        needs_ema(self, "offload_ema", "ema_from")
        if self.from_scratch and self.weights_from:
            raise UsageError("--from_scratch starts from random weights and --weights_from from others: drop one.")
        for chosen, advice in (
            (
                self.train_text_encoder and self.parallel in ("shard_grad_op", "full_shard"),
                f"--train_text_encoder works with whole weights in each process: --parallel ddp, not {self.parallel}.",
            ),
            (
                self.train_text_encoder and self.encoder_workers > 0,
                "--encoder_workers need a frozen text encoder, and --train_text_encoder changes it: drop one.",
            ),
            (self.backend == "ipex", "--backend ipex is for frozen models; use --backend cpu to train the UNet."),
            (self.compile, "--compile is not for `icom finetune`. Drop it."),
            (self.on, "--on is for `icom train`. Log in (`icom ssh`) and start `icom finetune` there."),
        ):
            if chosen:
                raise UsageError(advice)

    def _check_batches(self) -> None:
        check_at_least_one(total_batch_size=self.total_batch_size)
        if self.total_batch_size is None and self.train_batch_size == "auto":
            raise UsageError(
                "--train_batch_size auto: give --total_batch_size, too. What fits into the memory must not decide how "
                "many samples an optimizer step has."
            )
        if self.total_batch_size is not None and self.gradient_accumulation_steps != 1:
            raise UsageError("--total_batch_size decides --gradient_accumulation_steps: drop one of them.")

    @property
    def micro_batch(self) -> int:
        """Samples per process and forward pass, once that is settled."""
        assert self.train_batch_size != "auto"
        return self.train_batch_size

    def samples_per_step(self, processes: int) -> int:
        """Total batch: samples of all processes in one optimizer step."""
        return self.total_batch_size or super().samples_per_step(processes)

    def samples_per_process(self, processes: int) -> int:
        """Samples of one process in one optimizer step.

        Raises:
            UsageError: the total batch cannot be shared out evenly.
        """
        total = self.samples_per_step(processes)
        micro = 1 if self.train_batch_size == "auto" else self.train_batch_size
        if total % (processes * micro):
            of_each = "" if micro == 1 else f" with --train_batch_size {micro}"
            raise UsageError(
                f"--total_batch_size {total} cannot be shared out among {processes} processes{of_each}: it has to be a "
                f"multiple of {processes * micro}."
            )
        return total // processes

    def steps_of_examples(self, processes: int) -> int | None:
        """Optimizer steps that --num_examples_to_see come to, where it is given."""
        if self.num_examples_to_see is None:
            return None
        return math.ceil(self.num_examples_to_see / self.samples_per_step(processes))


def load_finetune_config(flags: Mapping[str, Any]) -> FinetuneConfig:
    """Lay the flags that were given over --config, and over both the defaults of the model that they name.

    Raises:
        UsageError: unreadable file, unknown key, wrong type, missing or impossible value.
    """

    def of_the_model(merged: Any) -> Mapping[str, Any]:
        return BUNDLED_DEFAULTS if merged.pretrained_model_name_or_path == "bundled" else {}

    return merge(FinetuneConfig, layers(flags), flags.get("config"), of_the_model)

"""The options that every training command has: optimizer, machine, checkpoints, trackers, Hub.

Those that diffusers' scripts have keep their names, meanings and defaults.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from icom.config.common import (
    BackendName,
    EngineName,
    PrecisionName,
    check_at_least_one,
    check_not_negative,
    check_positive,
)
from icom.config.loading import literal
from icom.errors import UsageError

CollectivesName = Literal["auto", "gloo", "ccl", "mpi", "nccl"]

LrScheduler = Literal["linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup"]


@dataclass(kw_only=True)
class ModelOptions:
    """The model that a run starts from."""

    pretrained_model_name_or_path: str = "bundled"
    """The frozen model: a Hub id, a folder, a .safetensors file, `bundled`, or `random:ARCH` (sd15, sd2-base, sd21,
    tiny) to measure."""
    tokenizer_name: str | None = None
    """Tokenizer to use instead of the model's own: a Hub id or a folder."""
    revision: str | None = None
    """Git revision (branch, tag or commit) of a model on the Hub."""
    variant: str | None = None
    """Variant of the model files, for instance fp16."""


@dataclass(kw_only=True)
class RunOptions:
    """How a run goes, whatever it learns."""

    # Optimisation.
    train_batch_size: int = 16
    """Pictures per device and forward pass. CPUs gain nothing from more than 1; memory grows with it."""
    gradient_accumulation_steps: int = 1
    """Forward passes per optimizer step."""
    max_train_steps: int | None = 5000
    """Optimizer steps. Given together with --num_train_epochs it takes precedence; `None` lets the epochs decide."""
    num_train_epochs: int = 100
    """Passes over pictures x repeats. Given without --max_train_steps it decides (diffusers would take 5000 steps)."""
    learning_rate: float = 1e-4
    """Peak learning rate of AdamW."""
    scale_lr: bool = False
    """Multiply the learning rate by batch size x accumulation x number of processes."""
    lr_scheduler: LrScheduler = "constant"
    """Learning rate over the steps."""
    lr_warmup_steps: int = 500
    """Optimizer steps of linear warm-up (schedules other than `constant`)."""
    lr_num_cycles: int = 1
    """Hard restarts of `cosine_with_restarts`."""
    adam_beta1: float = 0.9
    """Decay of AdamW's first moment."""
    adam_beta2: float = 0.999
    """Decay of AdamW's second moment."""
    adam_weight_decay: float = 1e-2
    """AdamW's decoupled weight decay; it acts on what is trained."""
    adam_epsilon: float = 1e-8
    """Term in AdamW's denominator."""
    seed: int | None = None
    """Seed of everything random. Default: drawn at start, printed, and kept in config.yaml."""

    # Machine.
    backend: BackendName = "auto"
    """What computes. `auto`: a GPU, else stock PyTorch, or IPEX where it was measured faster; it says why."""
    engine: EngineName = "auto"
    """`on`: packed frozen weights, attention as measured to be fastest here; `off`: stock layers; `auto`: by size."""
    collectives: CollectivesName = "auto"
    """What several processes talk with. `auto`: nccl on GPUs, ccl where oneCCL's bindings are installed, else gloo."""
    mixed_precision: PrecisionName | None = None
    """Precision of the model; what is trained stays float32. `auto`: bf16 where the CPU or GPU has instructions for it,
    else `no`; a run that resumes keeps its own. Default: what `accelerate launch` has, else `no` (bundled: `auto`)."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    allow_tf32: bool = False
    """Allow TF32 in float32 products and convolutions on NVIDIA GPUs (no effect on CPUs)."""
    compile: bool = False
    """Compile the UNet with torch.compile: faster steps after minutes of compiling (--backend cuda only)."""
    enable_xformers_memory_efficient_attention: bool = False
    """Use xFormers' attention in the UNet (GPUs; xFormers has to be installed)."""
    local_rank: int = -1
    """Accepted for old launchers; the launcher's environment decides."""

    cache_dir: str | None = None
    """Folder of caches. Default: $ICOM_CACHE_DIR, else $XDG_CACHE_HOME/icom, else ~/.cache/icom."""

    # Results.
    output_dir: str = "output"
    """Folder for results, checkpoints, logs and pictures."""

    # Checkpoints.
    checkpointing_steps: int = 500
    """Write checkpoint-N, from which training can resume, every so many steps."""
    checkpoints_total_limit: int | None = None
    """Keep only so many checkpoints, the newest (and one more until the next step proves the newest good)."""
    resume_from_checkpoint: str | None = None
    """A checkpoint folder, or `latest`: the newest complete one; it starts anew where there is none. Bit-exact."""

    # Watching it.
    report_to: Literal["auto", "tensorboard", "wandb", "comet_ml", "all", "none"] = "auto"
    """Tracker for loss, learning rate and validation pictures. `auto`: tensorboard where it is installed."""
    logging_dir: str = "logs"
    """Folder for TensorBoard, below --output_dir."""

    # Hub.
    push_to_hub: bool = False
    """Upload the result to the Hugging Face Hub, with a model card: the pipeline of `icom finetune`, the embedding of
    `icom train`. diffusers' script uploads the whole pipeline there, too; here --save_as_full_pipeline adds it."""
    hub_token: str | None = None
    """Token for the upload. Default: the one from `hf auth login` or $HF_TOKEN. Never written to any file."""
    hub_model_id: str | None = None
    """Repository for the upload. Default: the name of --output_dir."""

    # This command.
    config: str | None = None
    """YAML file with these options; flags go before it. ${…} interpolates, ??? marks what has to be given."""
    print_config: bool = False
    """Print the effective configuration as YAML and stop."""
    on: str | None = None
    """Train on this cluster of `icom provision`: pictures and models go there, --output_dir comes back."""

    def __post_init__(self) -> None:
        """Refuse what cannot work, before anything is loaded.

        Raises:
            UsageError: names the option and how to fix it.
        """
        counts = (
            *("train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_train_steps"),
            *("checkpointing_steps", "checkpoints_total_limit", "lr_num_cycles"),
        )
        check_at_least_one(**{name: getattr(self, name) for name in counts})
        check_not_negative(lr_warmup_steps=self.lr_warmup_steps, adam_weight_decay=self.adam_weight_decay)
        check_positive(learning_rate=self.learning_rate, adam_epsilon=self.adam_epsilon)
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"--{name} has to be in [0, 1).")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise UsageError("--seed has to be between 0 and 2^63 - 1.")
        check_secrets(self)

    def samples_per_step(self, processes: int) -> int:
        """Total batch: samples of all processes in one optimizer step."""
        return self.train_batch_size * self.gradient_accumulation_steps * processes


def check_secrets(config: RunOptions) -> None:
    """Refuse a token in an option that is written to files, where ${hub_token} brings it, for instance.

    Raises:
        UsageError: names the option, not the token.
    """
    for name in SECRETS:
        secret = getattr(config, name)
        for other, value in settings(config).items():
            if secret and isinstance(value, str) and secret in value:
                raise UsageError(
                    f"--{other} contains --{name}: it would be written to config.yaml, the model card and trackers. "
                    "Take it out."
                )


SECRETS = ("hub_token",)
OF_THE_COMMAND = ("config", "print_config", "on", "resume_from_checkpoint")
"""Fields that steer one invocation and say nothing about the run."""


def settings(config: RunOptions) -> dict[str, Any]:
    """What describes the run: all options but secrets and those that steer one invocation."""
    return {k: v for k, v in dataclasses.asdict(config).items() if k not in (*SECRETS, *OF_THE_COMMAND)}


def chosen(config: RunOptions, *names: str) -> dict[str, Any]:
    """Those of the options that are not at their defaults.

    For what a checkpoint compares: one from before there was an option is of its default.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    return {name: getattr(config, name) for name in names if getattr(config, name) != defaults[name]}


def to_yaml(config: RunOptions) -> str:
    """The effective configuration as YAML that `--config` takes again. Secrets are left out."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create({name: literal(value) for name, value in settings(config).items()}))

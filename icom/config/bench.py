"""The options of `icom bench`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from icom.config.common import BackendName, EngineName, check_at_least_one, check_positive, check_resolution
from icom.errors import UsageError
from icom.models.architectures import ArchitectureName

MethodName = Literal["textual_inversion", "unet"]
OnOff = Literal["off", "on"]
SharedName = Literal["ddp", "shard_grad_op", "full_shard"]
"""What of `icom finetune --parallel` is measured."""


@dataclass(kw_only=True)
class BenchConfig:
    """Measure seconds per training step on this machine. Each measurement runs in its own fresh process.

    `--method unet` measures the steps of `icom finetune`: a row for each --sweep_batch_sizes x --ema x --workers x
    --gradient_checkpointing. Example: icom bench --method unet --synthetic --sweep table
    """

    method: MethodName = "textual_inversion"
    """What is trained: the rows of `icom train`, or the whole UNet of `icom finetune`."""
    arch: ArchitectureName | None = None
    """Architecture to build with random weights (speed does not depend on their values). Default: sd15; with --method
    unet tiny, the bundled model's."""
    compare: Literal["none", "reference"] = "none"
    """`reference`: also the usual step (VAE at every step, whole token table), with the stock allocator and ours. With
    --method unet: diffusers' train_text_to_image.py (VAE and text encoder at every step, stock attention and AdamW)."""
    resolution: int | None = None
    """Pixels. Default: the architecture's own."""
    batch_size: int = 1
    """Pictures per step."""
    mixed_precision: Literal["no", "bf16"] = "bf16"
    """Precision of the model."""
    backend: BackendName = "auto"
    """As in `icom train`; the reference runs on the same GPU, else on stock PyTorch's CPU kernels."""
    engine: EngineName = "auto"
    """As in `icom train`; the reference never uses it."""
    enable_cuda_graph: bool = False
    """As in `icom train`; GPUs only."""
    peak_tflops: float | None = None
    """A GPU's peak in 10^12 operations per second, to say which share of it is used. Default: its data sheet's in
    bf16, where icom knows it."""
    profile: str | None = None
    """Also write a trace of two more steps to this file, for chrome://tracing or ui.perfetto.dev."""
    sweep: str | None = None
    """Measure --sweep_batch_sizes x backends x engines instead; writes SWEEP.csv and SWEEP.png. With --method unet:
    write its table to SWEEP.csv, SWEEP.md and SWEEP.png."""
    sweep_batch_sizes: tuple[int, ...] = (1, 2, 4)
    """Batch sizes of --sweep, and of --method unet's table."""
    ranks: str | None = None
    """Measure groups of so many processes instead, as in `--ranks 1,2`: all with equal cores, batch and work each."""
    steps: int = 4
    """Timed steps per process, after a few that warm up."""
    rounds: int = 3
    """Processes per contender; contenders take turns, so that a slow minute hits all of them."""
    json: str | None = None
    """Also write the result to this file."""

    # --method unet.
    synthetic: bool = False
    """Train on made-up pictures."""
    train_data_dir: str | None = None
    """Train on these captioned pictures or latents: whatever `icom finetune --train_data_dir` takes."""
    precomputed: bool = False
    """Let VAE and text encoder make latents of the pictures before anything is measured (`icom data precompute`)."""
    ema: tuple[OnOff, ...] = ("off", "on")
    """Whether the mean of the weights is kept; both are rows of the table."""
    workers: tuple[int, ...] = (1, 2)
    """Threads that read pictures; each number gives rows."""
    gradient_checkpointing: tuple[OnOff, ...] = ("off",)
    """Whether activations are computed again in the backward pass; `off on` gives both their rows."""
    parallel: tuple[SharedName, ...] = ("ddp", "shard_grad_op", "full_shard")
    """How the processes of --ranks share the work; each gives rows."""

    @property
    def architecture(self) -> ArchitectureName:
        """What --arch says, or its default."""
        return self.arch or ("tiny" if self.method == "unet" else "sd15")

    def __post_init__(self) -> None:
        """Raises: UsageError for what cannot be measured, whatever the machine."""
        check_at_least_one(steps=self.steps, rounds=self.rounds, batch_size=self.batch_size)
        check_positive(peak_tflops=self.peak_tflops)
        if self.profile and (self.method == "unet" or self.sweep or self.ranks):
            raise UsageError("--profile is of the one training step that is measured: drop --method, --sweep, --ranks.")
        if self.profile and not Path(self.profile).absolute().parent.is_dir():
            raise UsageError(f"--profile {self.profile}: there is no folder {Path(self.profile).absolute().parent}.")
        if self.enable_cuda_graph and self.method == "unet":
            raise UsageError("--enable_cuda_graph is for --method textual_inversion: drop one of them.")
        if not self.sweep_batch_sizes or min(self.sweep_batch_sizes) < 1:
            raise UsageError("--sweep_batch_sizes takes one or more numbers from 1 up.")
        if self.resolution is not None:
            check_resolution(self.resolution)
        if self.ranks is not None:
            parse_ranks(self.ranks)
        if self.method == "unet":
            self._check_unet()
        else:
            self._check_textual_inversion()

    def _check_textual_inversion(self) -> None:
        for name in ("synthetic", "train_data_dir", "precomputed"):
            if getattr(self, name):
                raise UsageError(f"--{name} is for --method unet: add that, or drop it.")
        if self.ranks is not None and (self.sweep or self.compare != "none"):
            raise UsageError("--ranks measures groups of processes: drop --sweep and --compare.")

    def _check_unet(self) -> None:
        if self.synthetic == bool(self.train_data_dir):
            raise UsageError("--method unet needs data, from one place: give --synthetic or --train_data_dir.")
        if self.compare != "none" and (self.sweep or self.ranks is not None):
            raise UsageError("--compare reference measures one process and no table: drop --sweep and --ranks.")
        if self.compare != "none" and self.precomputed:
            raise UsageError("--compare reference measures both, with latents and with pictures: drop --precomputed.")
        if self.backend == "ipex":
            raise UsageError("--backend ipex is for frozen models; use --backend cpu to train the UNet.")
        for name in ("ema", "workers", "gradient_checkpointing", "parallel"):
            if not getattr(self, name):
                raise UsageError(f"--{name} takes one or more values.")
        check_at_least_one(workers=min(self.workers))


def parse_ranks(text: str) -> list[int]:
    """`1,2` is [1, 2]: ascending, and 1 is always among them.

    Raises:
        UsageError: something else than numbers from 1 up.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise UsageError(f"--ranks takes numbers of processes from 1 up, as in 1,2; not {text!r}.")
    return sorted({1, *map(int, words)})

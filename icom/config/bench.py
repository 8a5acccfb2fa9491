"""The options of `icom bench`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from icom.config.common import BackendName, EngineName, check_at_least_one, check_resolution
from icom.errors import UsageError
from icom.models.architectures import ArchitectureName


@dataclass(kw_only=True)
class BenchConfig:
    """Measure seconds per training step on this machine. Each measurement runs in its own fresh process."""

    arch: ArchitectureName = "sd15"
    """Architecture to build with random weights (speed does not depend on their values)."""
    compare: Literal["none", "reference"] = "none"
    """`reference`: also the usual step (VAE at every step, whole token table), with the stock allocator and ours."""
    resolution: int | None = None
    """Pixels. Default: the architecture's own."""
    batch_size: int = 1
    """Pictures per step."""
    mixed_precision: Literal["no", "bf16"] = "bf16"
    """Precision of the frozen model."""
    backend: BackendName = "auto"
    """As in `icom train`; the reference runs on stock PyTorch's CPU kernels."""
    engine: EngineName = "auto"
    """As in `icom train`; the reference never uses it."""
    sweep: str | None = None
    """Measure --sweep_batch_sizes x backends x engines instead; writes SWEEP.csv and SWEEP.png."""
    sweep_batch_sizes: tuple[int, ...] = (1, 2, 4)
    """Batch sizes of --sweep."""
    ranks: str | None = None
    """Measure groups of so many processes instead, as in `--ranks 1,2`: all with equal cores, batch and work each."""
    steps: int = 4
    """Timed steps per process, after a few that warm up."""
    rounds: int = 3
    """Processes per contender; contenders take turns, so that a slow minute hits all of them."""
    json: str | None = None
    """Also write the result to this file."""

    def __post_init__(self) -> None:
        """Raises: UsageError for what cannot be measured, whatever the machine."""
        check_at_least_one(steps=self.steps, rounds=self.rounds, batch_size=self.batch_size)
        if not self.sweep_batch_sizes or min(self.sweep_batch_sizes) < 1:
            raise UsageError("--sweep_batch_sizes takes one or more numbers from 1 up.")
        if self.resolution is not None:
            check_resolution(self.resolution)
        if self.ranks is not None:
            parse_ranks(self.ranks)
            if self.sweep or self.compare != "none":
                raise UsageError("--ranks measures groups of processes: drop --sweep and --compare.")


def parse_ranks(text: str) -> list[int]:
    """`1,2` is [1, 2]: ascending, and 1 is always among them.

    Raises:
        UsageError: something else than numbers from 1 up.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise UsageError(f"--ranks takes numbers of processes from 1 up, as in 1,2; not {text!r}.")
    return sorted({1, *map(int, words)})

"""Options of what is predicted, from which noise and when, and of the mean of what is trained: for every training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from icom.config.common import check_not_negative, check_positive
from icom.errors import UsageError


@dataclass(kw_only=True)
class ObjectiveOptions:
    """The loss, and the noise and timesteps that it is taken at."""

    rescale_betas_zero_snr: bool = False
    """Rescale the noise schedule so that its last step is noise alone (Lin et al. 2024); needs v_prediction. On where
    the model's own scheduler says so."""
    snr_gamma: float | None = None
    """Weigh timesteps by min(SNR, this) (Hang et al. 2023); 5.0 is the paper's."""
    noise_offset: float = 0.0
    """Scale of noise that is the same for all pixels of a channel; about 0.1 lets pictures get darker and brighter."""
    min_timestep: int = 0
    """The first timestep that is trained on: there is little noise. Details are learned at low ones."""
    max_timestep: int | None = None
    """Timesteps are below this one. Composition is learned at high ones. Default: all of the model's, mostly 1000."""
    timestep_sampling: Literal["uniform", "logit_normal"] = "uniform"
    """How timesteps are drawn from that range: evenly, or the middle more often (Esser et al. 2024)."""
    logit_mean: float = 0.0
    """Where `logit_normal` has its middle: above 0 towards noise, below 0 towards details."""
    logit_std: float = 1.0
    """How wide `logit_normal` is."""

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            UsageError: names the option and how to fix it.
        """
        check_not_negative(noise_offset=self.noise_offset, min_timestep=self.min_timestep)
        check_positive(snr_gamma=self.snr_gamma, logit_std=self.logit_std)
        for name in ("noise_offset", "logit_mean"):
            if not math.isfinite(getattr(self, name)):
                raise UsageError(f"--{name} has to be a number, not {getattr(self, name)}.")
        if self.max_timestep is not None and self.min_timestep >= self.max_timestep:
            raise UsageError(
                f"--min_timestep {self.min_timestep} and --max_timestep {self.max_timestep} leave no timestep: those "
                "from the first up to, not including, the second are trained on. Give a larger --max_timestep."
            )
        if self.timestep_sampling == "uniform":
            for name in ("logit_mean", "logit_std"):
                if getattr(self, name) != getattr(ObjectiveOptions, name):
                    raise UsageError(f"--{name} is of --timestep_sampling logit_normal: add that, or drop it.")


@dataclass(kw_only=True)
class EmaOptions:
    """The exponential mean of what is trained."""

    use_ema: bool = False
    """Keep an exponential mean of what is trained, beside it; pictures and results are made with the mean."""
    ema_decay: float = 0.9999
    """What of the mean stays at a step, in the long run."""
    ema_half_life: float | None = None
    """The same as steps after which weights count half; takes the place of --ema_decay."""
    ema_warmup: bool = False
    """Let the decay rise slowly, as 1 - (1 + n)^(-2/3) over the steps n."""

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            UsageError: names the option and how to fix it.
        """
        if not 0 <= self.ema_decay < 1:
            raise UsageError("--ema_decay has to be in [0, 1).")
        check_positive(ema_half_life=self.ema_half_life)
        needs_ema(self, "ema_half_life", "ema_warmup")


def needs_ema(config: EmaOptions, *names: str) -> None:
    """Refuse options of a mean that is not kept.

    Raises:
        UsageError: names the option.
    """
    for name in names:
        if not config.use_ema and getattr(config, name):
            raise UsageError(f"--{name} is of the mean of the weights: add --use_ema, or drop it.")

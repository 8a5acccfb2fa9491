"""The options that give VAE and text encoder workers of their own: of `icom finetune` and `icom data precompute`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from icom.config.common import check_at_least_one, check_not_negative
from icom.errors import UsageError


@dataclass(kw_only=True)
class EncoderOptions:
    """Where VAE and text encoder compute."""

    encoder_workers: int = 0
    """So many workers of Ray Data per process read pictures and hold VAE and text encoder, beside the process itself
    (extra `ray`). 0: it does that itself."""
    encoder_cpus: int = 1
    """Cores of each of these workers."""
    encoder_gpus: float = 0.0
    """GPUs of each of these workers: 1, or a share such as 0.5. 0: it computes on CPU cores."""
    ray_address: str | None = None
    """HOST:PORT of a Ray cluster for them, which this machine has joined (docs/precompute.md); `auto`: the one that
    runs here. Default: a Ray of this process's own, which nobody else reaches and which ends with it."""

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            UsageError: names the option.
        """
        check_not_negative(encoder_workers=self.encoder_workers)
        check_at_least_one(encoder_cpus=self.encoder_cpus)
        gpus = self.encoder_gpus
        if not (math.isfinite(gpus) and gpus >= 0 and (gpus <= 1 or gpus == int(gpus))):
            raise UsageError(f"--encoder_gpus has to be a share of a GPU, such as 0.5, or a whole number; not {gpus}.")
        if self.ray_address is not None:
            if self.ray_address.startswith("ray://"):
                raise UsageError(
                    f"--ray_address {self.ray_address}: Ray's client protocol is not for this. Give HOST:PORT of the "
                    "cluster's head (6379, if nobody chose another port), and let this machine join the cluster."
                )
            if self.ray_address != "auto" and not re.fullmatch(r"[^\s:/]+:\d{1,5}", self.ray_address):
                raise UsageError(f"--ray_address has to be HOST:PORT or auto, not {self.ray_address!r}.")
        if not self.encoder_workers:
            for name in ("encoder_gpus", "ray_address"):
                if getattr(self, name):
                    raise UsageError(f"--{name} is of workers with the encoders: add --encoder_workers, or drop it.")

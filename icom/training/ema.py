"""Exponential moving average of weights, kept apart from the raw ones (Polyak & Juditsky 1992)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from icom.config.objective import EmaOptions


@dataclass(frozen=True)
class Decay:
    """How much of the mean stays at an update.

    Attributes:
        limit: that it tends to.
        warmup: rise as 1 - (1 + n)^(-2/3) over the updates n, and not as (1 + n) / (10 + n).
    """

    limit: float
    warmup: bool = False

    def at(self, update: int) -> float:
        """Of the so manieth update, from 1 on: that of diffusers' `EMAModel.get_decay`. The first takes the weights."""
        n = update - 1
        if n <= 0:
            return 0.0
        rising = 1 - (1 + n) ** (-2 / 3) if self.warmup else (1 + n) / (10 + n)
        return min(rising, self.limit)


def limit_of_half_life(steps: float) -> float:
    """The decay with which weights count half after so many updates."""
    return float(0.5 ** (1 / steps))


def decay_of(config: EmaOptions) -> Decay:
    """The decay that the options come to."""
    limit = limit_of_half_life(config.ema_half_life) if config.ema_half_life else config.ema_decay
    return Decay(limit, config.ema_warmup)


@dataclass
class Ema:
    """The mean of some parameters.

    Attributes:
        decay: per update.
        weights: name -> float32 mean; of a sharded parameter this process's part.
        updates: so far.
    """

    decay: Decay
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    updates: int = 0

    @torch.no_grad()
    def update(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Take the parameters of one more optimizer step in.

        Args:
            parameters: name -> what `weights` has the mean of; on another device they are copied first.
        """
        self.updates += 1
        mean = list(self.weights.values())
        raw = [parameters[name].to(tensor.device) for name, tensor in self.weights.items()]
        torch._foreach_lerp_(mean, raw, 1 - self.decay.at(self.updates))

    @contextmanager
    def in_place_of(self, parameters: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Inside, the parameters hold the mean, and the mean holds them: nothing needs memory twice."""
        self._exchange(parameters)
        try:
            yield
        finally:
            self._exchange(parameters)

    @torch.no_grad()
    def _exchange(self, parameters: Mapping[str, torch.Tensor]) -> None:
        for name, mean in self.weights.items():
            raw = parameters[name].detach().clone()
            parameters[name].copy_(mean)
            mean.copy_(raw)

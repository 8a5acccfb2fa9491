"""What becomes of the rows in an optimizer step, and which rows people get of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from icom.config.rows import RowOptions
from icom.training.clipping import clip_few
from icom.training.ema import Ema


@dataclass
class Rows:
    """The rows while they are learned.

    Attributes:
        config: the options.
        parameters: name -> rows, float32 (vectors, width).
        optimizer: of them.
        start: what they started from, where the weight decay goes there.
        norm: the median of the model's own rows', where theirs is held to it.
        ema: their mean, where one is kept.
        figures: of the last step, for metrics and trackers; scalars of the device, or numbers that are known anyway.
    """

    config: RowOptions
    parameters: dict[str, torch.nn.Parameter]
    optimizer: torch.optim.Optimizer
    start: dict[str, torch.Tensor] | None = None
    norm: float | None = None
    ema: Ema | None = None
    figures: dict[str, torch.Tensor | float] = field(default_factory=dict)

    def step(self) -> None:
        """Change the rows by their gradient, which all processes have summed."""
        if self.config.max_grad_norm:
            self.figures["grad_norm"] = clip_few(list(self.parameters.values()), self.config.max_grad_norm)
        with self._from_start():
            self.optimizer.step()
        if self.norm is not None:
            for rows in self.parameters.values():
                pull_norm(rows, self.norm, self.config.preserve_embedding_norm)
        if self.ema:
            self.ema.update(self.parameters)
        if self.config.optimizer == "prodigy":
            (group,) = self.optimizer.param_groups
            self.figures["d*lr"] = group["d"] * group["lr"]

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Inside, the parameters hold the rows that people want; afterwards what they held, to the bit."""
        if not (self.ema or self._averages):
            yield
            return
        held = {name: rows.detach().clone() for name, rows in self.parameters.items()}
        self.put_shown()
        try:
            yield
        finally:
            if self._averages:
                self._optimizer_mode("train")
            self._put(held)

    def put_shown(self) -> None:
        """Put the rows that people want into the parameters: the mean, where there is one. The training is over."""
        if self.ema:
            self._put(self.ema.weights)
        if self._averages:
            self._optimizer_mode("eval")

    @property
    def _averages(self) -> bool:
        """Whether the optimizer trains other rows than it learns."""
        return self.config.optimizer == "schedule_free_adamw"

    def _optimizer_mode(self, mode: str) -> None:
        optimizer: Any = self.optimizer
        with self._from_start():
            getattr(optimizer, mode)()

    @torch.no_grad()
    def _put(self, values: dict[str, torch.Tensor]) -> None:
        for name, rows in self.parameters.items():
            rows.copy_(values[name])

    @contextmanager
    def _from_start(self) -> Iterator[None]:
        """Inside, the optimizer sees the way from the start: that is what decays to zero then; all else is the same."""
        if self.start is None:
            yield
            return
        with torch.no_grad():
            for name, rows in self.parameters.items():
                rows.sub_(self.start[name])
        yield
        with torch.no_grad():
            for name, rows in self.parameters.items():
                rows.add_(self.start[name])


@torch.no_grad()
def pull_norm(rows: torch.Tensor, norm: float, share: float) -> None:
    """Pull each row's norm to `norm` by a share of the way; in float64, so that it is the same on all CPUs.

    Args:
        rows: (vectors, width).
        norm: where to.
        share: 1 for all of the way.
    """
    lengths = rows.double().norm(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    rows.mul_((1 + share * (norm / lengths - 1)).float())


def median_norm(table: torch.Tensor) -> float:
    """The median norm of a token table's rows. Args: (tokens, width)."""
    return float(table.detach().float().norm(dim=1).median())


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """The first 16 digits of a SHA-256 over the numbers of rows."""
    content = b"".join(rows.detach().float().cpu().contiguous().numpy().tobytes() for rows in tensors.values())
    return hashlib.sha256(content).hexdigest()[:16]

"""The norm of a whole optimizer step's gradient, and its clipping (Pascanu et al. 2013)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from icom.parallel.group import Group


def clip(parameters: Sequence[torch.nn.Parameter], most: float, parts_of: Group | None = None) -> float:
    """Scale the gradient of all parameters together down to a norm.

    Args:
        parameters: with gradients that all processes have summed.
        most: the norm; 0: leave the gradient as it is.
        parts_of: the processes, where each has a part of the gradient; all of them call this together then.

    Returns:
        The norm before.
    """
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if parts_of:
        # Not by DTensors, which would work out in each step how a thousand norms are sharded.
        squares = norm.double().square()[None]
        parts_of.sum([squares])
        norm = squares[0].sqrt().to(norm.dtype)
    if most and not most / (norm + 1e-6) >= 1:  # torch would multiply gigabytes by 1; what is no number stays none
        torch.nn.utils.clip_grads_with_norm_(parameters, most, norm)
    return float(norm)


def clip_few(parameters: Sequence[torch.nn.Parameter], most: float) -> torch.Tensor:
    """The same for a few numbers: the norm stays where they are, and nothing waits for it to be known.

    A gradient that is short enough is multiplied by 1.
    """
    norm: torch.Tensor = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    torch.nn.utils.clip_grads_with_norm_(parameters, most, norm)
    return norm

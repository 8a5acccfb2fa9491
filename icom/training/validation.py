"""The validation loss of all trainings: the mean over fixed samples, shared out among the processes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from icom.parallel.group import Group

if TYPE_CHECKING:
    from icom.training.loop import Running
    from icom.training.report import Metrics

FILE = "validation.jsonl"
"""In --output_dir: an object with step and loss for each time."""


def mean_loss(group: Group, count: int, loss_of: Callable[[int], float], device: torch.device) -> float:
    """The mean of `count` losses, each computed by one process; all processes call it.

    Summed in the order of their numbers, whoever computed them: the result does not depend on the number of processes.

    Args:
        group: the processes. All of them compute equally often, as a model that is in parts demands.
        count: how many losses there are.
        loss_of: computes one, given its number; without gradients.
        device: of the collectives' messages.

    Raises:
        IcomError: a process is gone, or what `loss_of` raises.
    """
    losses = group.attend(partial(_own, group, count, loss_of))
    everybodys = torch.tensor(losses, device=device)
    group.sum([everybodys])  # each number and zeros
    return math.fsum(everybodys.tolist()) / count


@torch.no_grad()
def _own(group: Group, count: int, loss_of: Callable[[int], float]) -> list[float]:
    """This process's losses in their places, and zeros."""
    losses = [0.0] * count
    for first in range(0, count, group.size):
        number = first + group.rank
        loss = loss_of(min(number, count - 1))
        if number < count:
            losses[number] = loss
    return losses


def report(run: Running, file: Metrics | None, step: int, loss: float) -> None:
    """Tell the trackers and the file what came out.

    Args:
        run: the run.
        file: rank 0's.
        step: optimizer steps done.
        loss: of `mean_loss`.
    """
    run.accelerator.log({"validation_loss": loss}, step=step)
    if file:
        file.add(step=step, loss=loss)

"""Optimizers of rows: AdamW and two of other packages, and the state from which each goes on to the same bits."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from icom.errors import IcomError
from icom.training.begin import learning_rate, make_optimizer

if TYPE_CHECKING:
    from icom.config.rows import OptimizerName
    from icom.config.train import TrainConfig
    from icom.parallel.group import Group

PACKAGES = {"prodigy": "prodigyopt", "schedule_free_adamw": "schedulefree"}
EXTRA = "make setup-master EXTRAS=optimizers, or python -m pip install"

GROUP = "group."
"""Begins the names of numbers that an optimizer keeps for all parameters together."""
NUMBERS = ("k", "d", "d_max", "d_numerator", "weight_sum", "lr_max")
"""What the optimizers here keep in that way."""


def need_package(optimizer: OptimizerName) -> None:
    """Say how to get the package of an optimizer where it is missing.

    Raises:
        IcomError: it is missing.
    """
    package = PACKAGES.get(optimizer)
    if package and importlib.util.find_spec(package) is None:
        raise IcomError(
            f"--optimizer {optimizer} needs {package}, which comes with the extra `optimizers`: {EXTRA} {package}."
        )


def make_row_optimizer(
    config: TrainConfig, parameters: Mapping[str, torch.nn.Parameter], group: Group
) -> torch.optim.Optimizer:
    """The optimizer that --optimizer names.

    Args:
        config: the options.
        parameters: that are trained.
        group: the processes: --scale_lr counts them.
    """
    trained: Any = parameters.values()
    if config.optimizer == "adamw":
        return make_optimizer(config, trained, group)
    options: dict[str, Any] = {
        "lr": learning_rate(config, group),
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_epsilon,
        "weight_decay": config.adam_weight_decay,
    }
    made: torch.optim.Optimizer
    if config.optimizer == "prodigy":
        from prodigyopt import Prodigy

        with contextlib.redirect_stdout(io.StringIO()):  # it tells of its weight decay
            # As its authors recommend for diffusion models.
            made = Prodigy(trained, **options, safeguard_warmup=True, use_bias_correction=True)
        return made
    from schedulefree import AdamWScheduleFree

    made = AdamWScheduleFree(trained, **options)
    made.train()  # type: ignore[attr-defined]
    return made


def state_of(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]
) -> dict[str, dict[str, torch.Tensor]]:
    """What an optimizer keeps, for a checkpoint: name of a parameter -> name -> tensor, on the CPU.

    Args:
        optimizer: with one group.
        parameters: in its order.
    """
    (group,) = optimizer.param_groups
    of_all = {f"{GROUP}{name}": torch.tensor(group[name], dtype=torch.float64) for name in NUMBERS if name in group}
    kept = optimizer.state_dict()["state"]
    return {
        name: {what: torch.as_tensor(value).cpu() for what, value in kept.get(index, {}).items()} | of_all
        for index, name in enumerate(parameters)
    }


def put_state(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.nn.Parameter],
    state: Mapping[str, Mapping[str, torch.Tensor]],
) -> None:
    """Put what `state_of` took out back into an optimizer that has been made with the same options."""
    (group,) = optimizer.param_groups
    kept = {}
    for index, name in enumerate(parameters):
        # A number that counts steps is one again; AdamW's is a tensor of floats.
        kept[index] = {
            what: value if value.is_floating_point() else value.item()
            for what, value in state[name].items()
            if not what.startswith(GROUP)
        }
        for what, value in state[name].items():
            if what.startswith(GROUP):
                number = what.removeprefix(GROUP)
                group[number] = type(group[number])(value.item())
    optimizer.load_state_dict(optimizer.state_dict() | {"state": kept})

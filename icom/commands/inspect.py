"""`icom inspect`: what is in a checkpoint, and whether it is whole."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from icom.config.inspect import InspectConfig
from icom.errors import IcomError
from icom.training.checkpoint import load_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterable

    from icom.training.checkpoint import State


def inspect(config: InspectConfig) -> None:
    """Check a checkpoint against its digest and print what it holds.

    Raises:
        IcomError: it is damaged, or holds numbers that are not finite.
    """
    state, identity, settings, _ = load_checkpoint(config.checkpoint)
    parts = {name: _summary(tensors) for name, tensors in _groups(state).items() if tensors}
    told: dict[str, Any] = {
        "step": state.step,
        "next_sample": state.next_sample,
        "steps": settings.get("max_train_steps"),
        "model": settings.get("pretrained_model_name_or_path"),
        "seed": identity.seed,
        "mean_updates": state.mean_updates,
        "parts": parts,
    }
    if config.json:
        print(json.dumps(told, indent=1))
    else:
        _show(told)
    if broken := [name for name, part in parts.items() if not part["finite"]]:
        raise IcomError(
            f"{config.checkpoint} holds numbers that are not finite ({', '.join(broken)}): the training had diverged. "
            "Go on from an earlier checkpoint with a lower learning rate."
        )


def _groups(state: State) -> dict[str, list[torch.Tensor]]:
    groups = {"weights": list(state.parameters.values()), "mean of the weights": list(state.mean.values())}
    groups["weights of the lowest validation loss"] = list(state.best.values())
    kinds = {what for kept in state.optimizer.values() for what in kept}
    return groups | {f"optimizer: {what}": [kept[what] for kept in state.optimizer.values()] for what in sorted(kinds)}


def _summary(tensors: Iterable[torch.Tensor]) -> dict[str, Any]:
    tensors = list(tensors)
    return {
        "tensors": len(tensors),
        "numbers": sum(tensor.numel() for tensor in tensors),
        "bytes": sum(tensor.nbytes for tensor in tensors),
        "dtype": ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})),
        "norm": float(sum(tensor.double().square().sum() for tensor in tensors)) ** 0.5,
        "finite": all(bool(torch.isfinite(tensor).all()) for tensor in tensors),
    }


def _show(told: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    print(
        f"Whole: the digest is right. After step {told['step']} of {told['steps']}; goes on with sample "
        f"{told['next_sample']:,}. Model {told['model']}, seed {told['seed']}."
    )
    table = Table("part", "tensors", "numbers", "MB", "dtype", "norm", "finite", box=None, pad_edge=False)
    for name, part in told["parts"].items():
        size, norm = f"{part['bytes'] / 1e6:,.1f}", f"{part['norm']:.4g}"
        finite = "yes" if part["finite"] else "no"
        table.add_row(name, str(part["tensors"]), f"{part['numbers']:,}", size, part["dtype"], norm, finite)
    Console(highlight=False).print(table)

"""The state of a training of the UNet, whole: gathered from all processes, and put back into them."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from icom.config.finetune import FinetuneConfig
from icom.parallel import sharding
from icom.parallel.group import Group
from icom.training.checkpoint import (
    Identity,
    State,
    find_checkpoint,
    load_checkpoint,
    to_document,
)

if TYPE_CHECKING:
    from icom.training.finetune_run import FinetuneRun


def read_checkpoint(config: FinetuneConfig, output: Path, group: Group) -> tuple[State, Identity] | None:
    """Rank 0's checkpoint; the others get what is small of it, and the tensors one by one in `restore`."""
    if config.resume_from_checkpoint is None:
        return None
    state, document = None, {}
    if group.leads:
        folder = find_checkpoint(output, config.resume_from_checkpoint)
        if folder is None:
            print(f"icom: no checkpoint in {output} yet: starting anew.", file=sys.stderr)
        else:
            state, identity = load_checkpoint(folder)
            document = to_document(state, identity)
    document = json.loads(group.broadcast(json.dumps(document).encode()))
    if not document:
        return None
    small = State(document["step"], document["next_sample"], choices=document["choices"])
    state = state or dataclasses.replace(small, mean_updates=document.get("mean_updates", 0))
    return state, Identity(**document["identity"])


def gather(run: FinetuneRun, parameters: dict[str, torch.nn.Parameter], state: State) -> None:
    """Fill a state's weights, mean and optimizer. All processes call it; rank 0 alone keeps what comes, on the CPU.

    Args:
        run: at the state's step.
        parameters: of the run.
        state: without tensors.
    """
    for name, parameter in parameters.items():
        whole = {"parameter": sharding.whole(parameter, parameter)}
        whole |= {what: sharding.whole(tensor, parameter) for what, tensor in run.optimizer.state[parameter].items()}
        if run.ema:
            whole["mean"] = sharding.whole(run.ema.weights[name], parameter)
        if not run.group.leads:
            continue
        state.parameters[name] = whole.pop("parameter")
        if run.ema:
            state.mean[name] = whole.pop("mean")
        state.optimizer[name] = whole


def restore(run: FinetuneRun, state: State) -> None:
    """Put a checkpoint's numbers where `gather` took them from: tensor by tensor, so that nobody needs them twice.

    Args:
        run: freshly prepared.
        state: of the checkpoint: rank 0's has the tensors.

    Raises:
        IcomError: a process is gone.
    """
    group = run.group
    for name, parameter in run.parameters.items():
        mine = None
        if group.leads:
            mine = {"parameter": state.parameters[name], **state.optimizer[name]}
            mine |= {"mean": state.mean[name]} if run.ema else {}
        values = group.broadcast_tensors(mine)
        sharding.put(parameter, values.pop("parameter"), parameter)
        if run.ema:
            sharding.put(run.ema.weights[name], values.pop("mean"), parameter)
        kept = run.optimizer.state[parameter]
        for what, value in values.items():
            kept[what] = torch.zeros_like(parameter) if value.dim() else torch.zeros_like(value)
            sharding.put(kept[what], value, parameter)
    if run.ema:
        run.ema.updates = state.mean_updates

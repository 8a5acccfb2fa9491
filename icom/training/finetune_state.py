"""The state of a training of the UNet: gathered from all processes or in their parts, and put back into them."""

from __future__ import annotations

import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from icom.config.training import settings
from icom.errors import IcomError, UsageError
from icom.parallel import sharding
from icom.training.checkpoint import MEAN, OPTIMIZER, PARAMETER, Saved, State, save_checkpoint, save_part
from icom.training.pipeline_folder import write_pipeline

if TYPE_CHECKING:
    from icom.config.finetune import FinetuneConfig
    from icom.parallel.group import Group
    from icom.training.finetune_run import FinetuneRun
    from icom.training.stored import Stored

Format = Literal["whole", "sharded"]


def choose_format(config: FinetuneConfig, parallel: sharding.Parallel, group: Group) -> tuple[Format, str]:
    """Whether a checkpoint is one file, or a part from each process. All processes call it together.

    Args:
        config: the options.
        parallel: how the processes share the UNet.
        group: the processes.

    Returns:
        (format, why).

    Raises:
        UsageError: parts were asked for where every process has all.
        IcomError: parts were asked for, and a process does not see --output_dir.
    """
    wanted = config.checkpoint_format
    if parallel in ("one", "ddp"):
        if wanted == "sharded":
            raise UsageError(
                "--checkpoint_format sharded is for --parallel shard_grad_op and full_shard: here each process has the "
                f"whole state ({parallel}). Drop it."
            )
        return "whole", "each process has all of it"
    if wanted == "whole":
        return "whole", "asked for; rank 0 gathers them in its memory"
    if blind := _blind(Path(config.output_dir), group):
        names = ", ".join(f"{group.hosts[rank]} (rank {rank})" for rank in blind)
        if wanted == "sharded":
            raise IcomError(
                f"--checkpoint_format sharded: {names} cannot see what rank 0 writes to {config.output_dir}. Each "
                "process writes its own part: give an --output_dir on a disk that all machines share, or --checkpoint_"
                "format whole."
            )
        return "whole", f"not all machines share --output_dir: {names}; rank 0 gathers them in its memory"
    return "sharded", "each process writes its own part to --output_dir, which all share"


def _blind(output: Path, group: Group) -> list[int]:
    """Ranks that do not see what rank 0 writes into a folder."""
    mark = None
    if group.leads:
        descriptor, mark = tempfile.mkstemp(prefix=".seen-by-all-", dir=output)
        os.close(descriptor)
    name = group.broadcast(Path(mark).name.encode() if mark else None).decode()
    seen = group.gather(b"1" if (output / name).is_file() else b"0")
    if mark:
        Path(mark).unlink(missing_ok=True)
    return [rank for rank, answer in enumerate(seen) if answer == b"0"]


def save(run: FinetuneRun, step: int, next_sample: int) -> None:
    """Checkpoint and pipeline. All processes call it; where each has all, rank 0 does it.

    Raises:
        IcomError: the disk is full, or a process is gone.
    """
    if not run.group.leads and run.parallel in ("one", "ddp"):
        return
    state = State(step, next_sample, choices=dict(run.backend.choices), mean_updates=run.ema.updates if run.ema else 0)
    if run.checkpoint_format == "sharded":
        _take_part(run, state)
        save_part(run.output, state, run.identity, settings(run.config), run.group)
    else:
        _attend(run, partial(_gather, run, state))
        if run.group.leads:
            save_checkpoint(run.output, state, run.identity, settings(run.config))
    save_pipeline(run)


def save_pipeline(run: FinetuneRun) -> None:
    """Write `current_pipeline`, tensor by tensor. Called as `save`.

    Raises:
        IcomError: the disk is full, or a process is gone.
    """
    if run.group.leads:
        scheduler = run.objective.noise_scheduler
        write_pipeline(run.output, run.model, run.unet, run.text_encoder, _weights(run), scheduler)
    elif run.parallel not in ("one", "ddp"):
        deque(_weights(run), maxlen=0)


def _weights(run: FinetuneRun) -> Iterator[tuple[str, torch.Tensor]]:
    """What people want: the mean of the weights, where there is one."""
    for name, parameter in run.parameters.items():
        tensor = run.ema.weights[name] if run.ema else parameter
        yield name, _attend(run, partial(sharding.whole, tensor, parameter))


def _attend(run: FinetuneRun, communicate: Callable[[], Any]) -> Any:
    """Call what communicates under FSDP; where each process has all, rank 0 alone does it, others lost or not."""
    return communicate() if run.parallel in ("one", "ddp") else run.group.attend(communicate)


def _take_part(run: FinetuneRun, state: State) -> None:
    """Fill a state with this process's rows; nothing is copied."""
    for name, parameter in run.parameters.items():
        mine = {"parameter": parameter, **run.optimizer.state[run.parts[name]]}
        mine |= {"mean": run.ema.weights[name]} if run.ema else {}
        kept = {
            what: tensor
            for what, tensor in sharding.local(mine).items()
            if (tensor.shape[0] if tensor.dim() else run.group.leads)
        }
        if "parameter" in kept:
            state.parameters[name] = kept.pop("parameter")
        if "mean" in kept:
            state.mean[name] = kept.pop("mean")
        state.optimizer[name] = kept


def _gather(run: FinetuneRun, state: State) -> None:
    """Fill a state's weights, mean and optimizer. All processes call it; rank 0 alone keeps what comes, on the CPU."""
    for name, parameter in run.parameters.items():
        whole = {"parameter": sharding.whole(parameter, parameter)}
        kept = run.optimizer.state[run.parts[name]]
        whole |= {what: sharding.whole(tensor, parameter) for what, tensor in kept.items()}
        if run.ema:
            whole["mean"] = sharding.whole(run.ema.weights[name], parameter)
        if not run.group.leads:
            continue
        state.parameters[name] = whole.pop("parameter")
        if run.ema:
            state.mean[name] = whole.pop("mean")
        state.optimizer[name] = whole


def restore(run: FinetuneRun, saved: Saved) -> None:
    """Put a checkpoint's numbers where `save` took them from: tensor by tensor, so that nobody needs them twice.

    Args:
        run: freshly prepared.
        saved: rank 0's has the tensors, or all read them.

    Raises:
        IcomError: a process is gone.
    """
    if saved.stored is not None:
        _restore_rows(run, saved.stored)
    else:
        _restore_whole(run, saved.state)
    if run.ema:
        run.ema.updates = saved.state.mean_updates


def _restore_whole(run: FinetuneRun, state: State) -> None:
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
        part = run.parts[name]
        kept = run.optimizer.state[part]
        for what, value in values.items():
            kept[what] = torch.zeros_like(part) if value.dim() else torch.zeros_like(value)
            sharding.put(kept[what], value, parameter)


def _restore_rows(run: FinetuneRun, stored: Stored) -> None:
    optimizer: dict[str, list[str]] = {}
    for key in stored:
        if key.startswith(OPTIMIZER):
            name, _, what = key.removeprefix(OPTIMIZER).rpartition("/")
            optimizer.setdefault(name, []).append(what)
    for name, parameter in run.parameters.items():
        mine = sharding.rows(parameter)
        sharding.put_rows(parameter, stored.rows(f"{PARAMETER}{name}", mine))
        if run.ema:
            sharding.put_rows(run.ema.weights[name], stored.rows(f"{MEAN}{name}", mine))
        part = run.parts[name]
        kept = run.optimizer.state[part]
        for what in optimizer[name]:
            key = f"{OPTIMIZER}{name}/{what}"
            if stored.shape(key):
                kept[what] = torch.zeros_like(part)
                sharding.put_rows(kept[what], stored.rows(key, mine))
            else:
                kept[what] = stored[key]

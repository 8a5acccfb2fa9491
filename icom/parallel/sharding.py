"""A network that is trained in several processes: whole in each of them (DDP), or in parts (FSDP2).

Either way the gradient is the mean over the processes. DDP (Li et al. 2020, arXiv:2006.15704) sends the gradients while
the backward pass goes on; FSDP (Zhao et al. 2023, arXiv:2304.11277) keeps a part of weights, gradients and
optimizer state in each process: `full_shard` gathers a block's weights for each forward and each backward pass,
`shard_grad_op` keeps them from the forward to the backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import psutil
import torch

from icom.config.finetune import ParallelName

if TYPE_CHECKING:
    from icom.parallel.group import Group

Parallel = Literal["one", "ddp", "shard_grad_op", "full_shard"]

BYTES_PER_PARAMETER = 16
"""float32 weight, gradient and AdamW's two moments."""
SHARE_OF_MEMORY = 0.6
"""What of a device's memory they may take before `auto` shards them: activations need the rest."""


def choose(
    wanted: ParallelName, group: Group, numbers: int, device: torch.device, *, ema: bool
) -> tuple[Parallel, str]:
    """How the processes share the work.

    Args:
        wanted: as in --parallel.
        group: the processes.
        numbers: that are trained.
        device: of this process.
        ema: whether their mean is kept on the device, too.

    Returns:
        (how, why).
    """
    if group.size == 1:
        return "one", "one process"
    if wanted != "auto":
        return wanted, "asked for"
    need = numbers * (BYTES_PER_PARAMETER + (4 if ema else 0))
    if device.type == "cuda":
        has = torch.cuda.get_device_properties(device).total_memory
    else:
        has = psutil.virtual_memory().total // max(1, group.place.local_size)
    ddp: Parallel = "ddp" if need <= SHARE_OF_MEMORY * has else "shard_grad_op"
    relation = "fit into" if ddp == "ddp" else "are too much for"
    why = (
        f"weights, gradients and optimizer take {need / 2**30:.1f} GB, which {relation} "
        f"{SHARE_OF_MEMORY:.0%} of {has / 2**30:.0f} GB per process"
    )
    verdict = group.broadcast(ddp.encode() if group.leads else None).decode()
    return ("ddp" if verdict == "ddp" else "shard_grad_op"), why


def wrap(
    unet: Any, parallel: Parallel, dtype: torch.dtype, device: torch.device, layout: torch.memory_format
) -> torch.nn.Module:
    """Make a network one of several processes'.

    Args:
        unet: float32, on its device. FSDP changes it: its parameters become DTensors, their names stay.
        parallel: how.
        dtype: of the computation.
        device: of this process.
        layout: of the convolutions' weights; FSDP takes contiguous ones alone.

    Returns:
        What to call in place of `unet`.
    """
    sharded: torch.nn.Module = unet
    if parallel in ("one", "ddp"):
        unet.to(memory_format=layout)
    if parallel == "one":
        return sharded
    if parallel == "ddp":
        return torch.nn.parallel.DistributedDataParallel(
            unet,
            device_ids=[device] if device.type == "cuda" else None,
            broadcast_buffers=False,
            gradient_as_bucket_view=True,
            init_sync=False,  # all processes loaded the same weights, and have agreed on their digest
        )
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": parallel == "full_shard", "mp_policy": policy}
    for part in unet.modules():
        if type(part).__name__ in UNITS:
            fully_shard(part, **options)
    # What a block needs is fetched while the one before it computes; FSDP2 does that by itself.
    fully_shard(unet, **options)
    return sharded


UNITS = {"BasicTransformerBlock", "ResnetBlock2D"}
"""diffusers' blocks whose weights are gathered together."""
IN_FLIGHT = 6
"""Copies of a unit that FSDP has at a time: what is gathered for this one and the next, gradients to be summed of this
one and the one before, and what gloo makes of both."""


def largest_unit(unet: torch.nn.Module) -> int:
    """Numbers of the largest unit that is gathered together; what is in no block is one, too."""
    blocks = [
        sum(parameter.numel() for parameter in part.parameters())
        for part in unet.modules()
        if type(part).__name__ in UNITS
    ]
    return max([*blocks, sum(parameter.numel() for parameter in unet.parameters()) - sum(blocks)])


def synchronise(network: torch.nn.Module, parallel: Parallel, *, now: bool) -> None:
    """Say whether the next backward pass sums gradients over the processes: only an optimizer step's last one does."""
    if parallel == "ddp":
        network.require_backward_grad_sync = now  # type: ignore[assignment]
    elif parallel != "one":
        network.set_requires_gradient_sync(now)  # type: ignore[operator]


def parts(parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.nn.Parameter]:
    """What an optimizer steps: this process's parts as plain tensors in the same memory; what is not sharded itself.

    Given DTensors, a fused optimizer would work out in each step how all of its arguments are sharded, which takes
    longer than the step of a small network.
    """
    return {name: _part(parameter) for name, parameter in parameters.items()}


def hand_over(parameters: Mapping[str, torch.nn.Parameter], parts: Mapping[str, torch.nn.Parameter]) -> None:
    """Move the gradients from parameters to the parts of them that an optimizer steps."""
    for name, part in parts.items():
        if part is not (parameter := parameters[name]):
            part.data = _local(parameter.detach())  # FSDP may have moved it, in the first pass
            part.grad = None if parameter.grad is None else _local(parameter.grad)
            parameter.grad = None


def local(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This process's parts; of what is not sharded all."""
    return {name: _local(tensor.detach()) for name, tensor in tensors.items()}


def rows(parameter: torch.Tensor) -> range:
    """Those of a parameter's first dimension that this process has; of what is not sharded all."""
    count = parameter.shape[0]
    part = _local(parameter.detach()).shape[0]
    if part == count:
        return range(count)
    from torch import distributed

    first = min(count, distributed.get_rank() * -(-count // distributed.get_world_size()))  # as torch.chunk deals out
    return range(first, first + part)


@torch.no_grad()
def put_rows(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy this process's part of a tensor, read from somewhere, to where it belongs."""
    _local(target).copy_(value)


def whole(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """All of a tensor of which this process has a part, on the CPU. All processes call it together.

    Args:
        tensor: a parameter, or something with a number for each number of it (a moment, a mean).
        like: the parameter.
    """
    mine = _local(tensor.detach())
    if not _is_sharded(like) or mine.dim() == 0:  # a count of steps
        return mine.cpu()
    from torch import distributed

    # Plainly, and not by DTensors, which would work out for each of a thousand tensors how to do it.
    each = -(-len(like) // distributed.get_world_size())
    # On the parameter's device, where the processes exchange: a mean may be kept on the CPU.
    padded = torch.zeros((each, *like.shape[1:]), dtype=mine.dtype, device=like.device)
    padded[: len(mine)] = mine
    everything = padded.new_empty((each * distributed.get_world_size(), *like.shape[1:]))
    distributed.all_gather_into_tensor(everything, padded)
    return everything[: len(like)].cpu()


def put(target: torch.Tensor, value: torch.Tensor, like: torch.Tensor) -> None:
    """Copy into a tensor of which this process has a part what all of it should be.

    Args:
        target: as `tensor` of `whole`.
        value: all of it.
        like: the parameter.
    """
    mine = rows(like)
    put_rows(target, value[mine.start : mine.stop] if value.dim() and _is_sharded(like) else value)


def _is_sharded(parameter: torch.Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(parameter, DTensor)


def _part(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    return torch.nn.Parameter(_local(parameter.detach())) if _is_sharded(parameter) else parameter


def _local(tensor: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

"""What bfloat16 costs on this CPU, measured when asked."""

from __future__ import annotations

import copy
import time

import torch
from torch import nn

from icom.engine.layers import pack

_TURNS = 3
"""Of which the fastest counts."""


def bf16_factors(*, packed: bool) -> dict[str, float]:
    """Kind of product -> its time in bfloat16 over its time in float32, in the shapes of SD1.5's middle layers.

    Takes a tenth of a second, or half a second with stock layers on a CPU that emulates bfloat16. One thread's own time
    is what counts: it does not grow while other programs keep the cores busy.

    Args:
        packed: as the engine computes it, else as stock PyTorch does.
    """
    picture = torch.ones(1, 320, 16, 16).to(memory_format=torch.channels_last)
    with torch.random.fork_rng(devices=[]):  # layers are born with random weights: nobody else's numbers may change
        layers: dict[str, tuple[nn.Module, torch.Tensor]] = {
            "matmul": (nn.Linear(640, 640), torch.ones(256, 640)),
            "convolution": (nn.Conv2d(320, 320, 3, padding=1), picture),
        }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {name: _factor(layer, x, packed) for name, (layer, x) in layers.items()}
    finally:
        torch.set_num_threads(threads)


@torch.no_grad()
def _factor(layer: nn.Module, x: torch.Tensor, packed: bool) -> float:
    layers = {dtype: copy.deepcopy(layer).to(dtype) for dtype in (torch.float32, torch.bfloat16)}
    contenders = {dtype: pack(layer) if packed else layer for dtype, layer in layers.items()}
    inputs = {dtype: x.to(dtype) for dtype in contenders}
    seconds: dict[torch.dtype, list[float]] = {dtype: [] for dtype in contenders}
    for turn in range(1 + _TURNS):
        for dtype, contender in contenders.items():
            began = time.thread_time()
            contender(inputs[dtype])
            if turn > 0:  # the first one packs
                seconds[dtype].append(time.thread_time() - began)
    return min(seconds[torch.bfloat16]) / min(seconds[torch.float32])

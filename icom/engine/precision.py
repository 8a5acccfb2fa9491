"""In which dtype products are computed on this CPU, and what bfloat16 costs where the CPU has no instructions for it.

Without such instructions oneDNN refuses bfloat16 or takes it apart element by element, up to ten times slower than
float32. There the engine keeps weights and activations in bfloat16 and multiplies in float32. The results are those of
CPUs with the instructions up to bfloat16's rounding: these too sum in float32 and round once.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping

import torch

from icom import machine

_FLAGS = ("avx512_bf16", "amx_bf16", "avx_ne_convert")
"""What oneDNN multiplies in bfloat16 with, in the kernel's spelling; the last one converts where values are loaded."""
_LIMITS_WITHOUT = ("sse41", "avx", "avx2", "avx2_vnni", "avx512_core", "avx512_core_vnni")
"""Values of ONEDNN_MAX_CPU_ISA that leave none of these."""


def has_bf16(flags: frozenset[str], environment: Mapping[str, str]) -> bool:
    """Whether oneDNN multiplies in bfloat16 with instructions for it.

    Args:
        flags: of the CPU.
        environment: may limit oneDNN's instruction set.
    """
    # In oneDNN's order. PyTorch's ATEN_CPU_CAPABILITY is not oneDNN's: it says nothing about products.
    limit = (environment.get("ONEDNN_MAX_CPU_ISA") or environment.get("DNNL_MAX_CPU_ISA") or "").lower()
    if limit == "avx2_vnni_2":
        return "avx_ne_convert" in flags
    return limit not in _LIMITS_WITHOUT and not flags.isdisjoint(_FLAGS)


@functools.cache
def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which dtype products of tensors of `dtype` are computed here: float32 where bfloat16 would be emulated."""
    if dtype == torch.bfloat16 and not has_bf16(machine.cpu_flags(), os.environ):
        return torch.float32
    return dtype

"""What several backends do alike."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from icom.errors import UsageError


def matrices_to(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Convert the frozen linear layers to what autocast computes in; it would convert them anew in every step."""
    for part in module.modules():
        if isinstance(part, torch.nn.Linear):
            part.to(dtype)


def autocast_to(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[object]:
    """Autocast, or nothing in float32."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


def refuse_fp16(mixed_precision: str) -> None:
    """Raises: UsageError for fp16 on a CPU."""
    if mixed_precision == "fp16":
        raise UsageError(
            "fp16 does not train on CPUs: gradients underflow and it is slow. Use --mixed_precision bf16 or no."
        )

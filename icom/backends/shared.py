"""What several backends do alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from icom.engine.cost import bf16_factors
from icom.engine.precision import product_dtype
from icom.errors import UsageError


class Synchronous:
    """Of devices that have computed when PyTorch returns: numbers are there as soon as they are named."""

    asynchronous = False

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """It is there already."""
        return tensor

    def read_later(self, numbers: torch.Tensor) -> Callable[[], list[float]]:
        """Nothing to wait for."""
        return numbers.tolist

    def record(
        self, compute: Callable[[], Sequence[torch.Tensor]]
    ) -> tuple[Sequence[torch.Tensor], Callable[[], None]]:
        """Nothing waits between kernels here: --enable_cuda_graph is refused."""
        raise NotImplementedError


def matrices_to(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Convert the frozen linear layers to what autocast computes in; it would convert them anew in every step."""
    for part in module.modules():
        if isinstance(part, torch.nn.Linear) and not part.weight.requires_grad:
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


def about_emulation(dtype: torch.dtype, *, packed: bool) -> str | None:
    """What bf16 costs on a CPU without instructions for it, measured now; None for float32 and on other CPUs.

    Args:
        dtype: of the run.
        packed: whether the engine's layers compute it.
    """
    if product_dtype(dtype) == dtype:
        return None
    factors = bf16_factors(packed=packed)
    return (
        f"this CPU has no bf16 instructions: measured now, bf16 takes {factors['matmul']:.1f} x float32's time in "
        f"matrix products and {factors['convolution']:.1f} x in convolutions. Unless memory is short (bf16 takes "
        "half), use --mixed_precision no, or auto."
    )

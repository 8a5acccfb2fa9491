"""What computes. The trainer asks `resolve` for a backend and tests no device itself."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from icom.backends.cpu import CpuBackend

if TYPE_CHECKING:
    import torch

    from icom.models import Model


class Backend(Protocol):
    """The contract.

    Attributes:
        name: as in --backend.
        device: where modules and batches live.
        dtype: of VAE and UNet.
        process_group: torch.distributed backend that suits the device.
    """

    name: str
    device: torch.device
    dtype: torch.dtype
    process_group: str

    def prepare(self, model: Model) -> None:
        """Move the frozen modules to the device, in the layout and precision that is fastest there."""

    def autocast(self) -> AbstractContextManager[object]:
        """Context in which the text encoder runs."""

    def describe(self) -> str:
        """One phrase for the user: engine, instruction set, precision, threads."""


def resolve(name: str, mixed_precision: str, engine: str = "auto") -> tuple[Backend, str]:
    """Choose the backend.

    Args:
        name: `auto` or a backend's name.
        mixed_precision: "no", "bf16" or "fp16".
        engine: "auto", or "off" for stock layers.

    Returns:
        (backend, the reason for the choice).

    Raises:
        UsageError: the backend cannot compute in that precision.
    """
    reason = "the only backend of this release" if name == "auto" else "asked for"
    return CpuBackend(mixed_precision, engine), reason

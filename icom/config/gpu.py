"""The options of `icom train` that are for GPUs alone."""

from __future__ import annotations

from dataclasses import dataclass

from icom.errors import UsageError


@dataclass(kw_only=True)
class GpuOptions:
    """How a GPU is kept busy."""

    enable_cuda_graph: bool = False
    """Record the kernels of a forward and backward pass once for each shape of batch and play them again, which spares
    a small batch the time between them (--backend cuda only). Unproven: it has not run on a GPU yet."""

    def check_gpu(self, *, gradient_checkpointing: bool) -> None:
        """Refuse what cannot be recorded.

        Raises:
            UsageError: names the options.
        """
        if self.enable_cuda_graph and gradient_checkpointing:
            raise UsageError(
                "--enable_cuda_graph records no --gradient_checkpointing, which looks up the state of the random "
                "numbers. Drop one of them."
            )

"""Stock PyTorch on the CPU; oneDNN picks AMX or AVX512-BF16 at run time."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from icom.engine.attention import use_blocks
from icom.errors import UsageError

if TYPE_CHECKING:
    from icom.models import Model


class CpuBackend:
    """See `icom.backends.Backend`."""

    name = "cpu"
    process_group = "gloo"

    def __init__(self, mixed_precision: str, engine: str = "auto") -> None:
        """Raises: UsageError for fp16."""
        if mixed_precision == "fp16":
            raise UsageError(
                "fp16 does not train on CPUs: gradients underflow and it is slow. Use --mixed_precision bf16 or no."
            )
        self.device = torch.device("cpu")
        self.engine = engine
        self.dtype = torch.bfloat16 if mixed_precision == "bf16" else torch.float32

    def prepare(self, model: Model) -> None:
        """Channels-last for the convolutions; the text encoder's matrices in the precision that autocast uses."""
        model.unet.to(memory_format=torch.channels_last)
        model.vae.to(memory_format=torch.channels_last)
        if self.engine != "off":
            use_blocks(model.unet)
        for part in model.text_encoder.modules():
            # Autocast would convert these frozen weights anew in every step, to the same values.
            if isinstance(part, torch.nn.Linear):
                part.to(self.dtype)

    def autocast(self) -> AbstractContextManager[object]:
        """bf16 autocast, or nothing in float32."""
        return nullcontext() if self.dtype == torch.float32 else torch.autocast("cpu", self.dtype)

    def describe(self) -> str:
        """For instance: cpu (PyTorch 2.13.0, AVX512, blocked attention), bf16, 2 threads."""
        precision = "bf16" if self.dtype == torch.bfloat16 else "fp32"
        capability = torch.backends.cpu.get_cpu_capability()
        attention = "stock" if self.engine == "off" else "blocked"
        engine = f"PyTorch {torch.__version__}, {capability}, {attention} attention"
        return f"cpu ({engine}), {precision}, {torch.get_num_threads()} threads"

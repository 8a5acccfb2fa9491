"""Stock PyTorch on the CPU; oneDNN picks AMX or AVX512-BF16 at run time. The engine makes the frozen parts fast."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from icom.backends.shared import Synchronous, about_emulation, autocast_to, matrices_to, refuse_fp16
from icom.engine.blocks import replace_attention, rewrite
from icom.engine.choices import Choices, choices_for
from icom.engine.layers import unpack
from icom.engine.operators import why_no_engine
from icom.engine.precision import product_dtype
from icom.engine.threads import use_own_cores
from icom.engine.trained import multiply_in_float32
from icom.parallel.place import SINGLE_PROCESS, Place

if TYPE_CHECKING:
    from diffusers import UNet2DConditionModel

    from icom.models.loading import Model


ENGINE_FROM = 100_000_000
"""Parameters of the UNet from which the engine gains; the bundled model's step of 0.1 s is mostly Python's own time.
Where bf16 is emulated it gains with every model."""


class CpuBackend(Synchronous):
    """See `icom.backends.Backend`."""

    name = "cpu"
    process_group = "gloo"

    def __init__(self, mixed_precision: str, engine: str, folder: Path, place: Place = SINGLE_PROCESS) -> None:
        """Raises: UsageError for fp16."""
        refuse_fp16(mixed_precision)
        use_own_cores(place)
        self.device = torch.device("cpu")
        self.dtype = torch.bfloat16 if mixed_precision == "bf16" else torch.float32
        # Weights' gradients: oneDNN's kernels for AVX2 take two to three times as long channels-last.
        avx2 = torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")
        self.training_layout = torch.contiguous_format if avx2 else torch.channels_last
        self.engine = engine
        self.without_engine = "--engine off" if engine == "off" else why_no_engine(self.dtype)
        self._folder = folder
        self.choices: dict[str, str] = {}
        self._attention: Choices | None = None

    def prepare(self, model: Model) -> None:
        """Channels-last for the convolutions; the text encoder's matrices in the precision that autocast uses."""
        model.unet.to(memory_format=torch.channels_last)
        model.vae.to(memory_format=torch.channels_last)
        matrices_to(model.text_encoder, self.dtype)
        emulated = product_dtype(self.dtype) != self.dtype
        if self.without_engine is None and self.engine == "auto" and _is_small(model.unet) and not emulated:
            self.without_engine = "faster for a small model"
        if self.without_engine is None:
            self._attention = choices_for(model.unet, self._folder)
            self.choices = self._attention.made
            for part in model.parts.values():
                rewrite(part, self._attention.attend)

    def start_anew(self, model: Model) -> None:
        """Layers are packed for the shapes that come first, and attention is chosen then."""
        if self._attention is not None:
            self._attention.forget()
            for part in model.parts.values():
                unpack(part)

    def prepare_training(self, unet: UNet2DConditionModel) -> None:
        """Attention in the way that is measured to be fastest here; the engine's packed layers are for frozen ones."""
        emulated = product_dtype(self.dtype) != self.dtype
        if self.engine == "off" or (self.engine == "auto" and _is_small(unet) and not emulated):
            self.without_engine = "--engine off" if self.engine == "off" else "faster for a small model"
            return
        self.without_engine = "the UNet is trained; measured attention"
        if emulated:
            multiply_in_float32(unet)
            self.without_engine += ", products in fp32"
        attention = choices_for(unet, self._folder)
        self.choices = attention.made
        replace_attention(unet, attention.attend)

    def autocast(self) -> AbstractContextManager[object]:
        """bf16 autocast, or nothing in float32."""
        return autocast_to(self.dtype, self.device)

    def describe(self) -> str:
        """For instance: cpu (PyTorch 2.13.0, AVX512, engine), bf16, 2 threads."""
        precision = "bf16" if self.dtype == torch.bfloat16 else "fp32"
        capability = torch.backends.cpu.get_cpu_capability()
        engine = "engine" if self.without_engine is None else f"stock layers: {self.without_engine}"
        what = f"PyTorch {torch.__version__}, {capability}, {engine}"
        return f"cpu ({what}), {precision}, {torch.get_num_threads()} threads"

    def advice(self) -> str | None:
        """About emulated bf16."""
        return about_emulation(self.dtype, packed=self.without_engine is None)


def _is_small(unet: torch.nn.Module) -> bool:
    return sum(weights.numel() for weights in unet.parameters()) < ENGINE_FROM

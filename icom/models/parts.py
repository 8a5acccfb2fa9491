"""Which parts a model has: the one table that loading, counting, comparing, moving and uploading go by."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from icom.models.architectures import Architecture


@dataclass(frozen=True)
class Part:
    """A frozen part of a pipeline.

    Attributes:
        name: of its folder in diffusers' layout, and of its section in an `Architecture`.
        library: that has its class.
        class_name: which loads it.
        weights: its file's name without variant and suffix.
        in_float32: whether it is loaded so, whatever the run's precision: gradients of rows pass through it.
    """

    name: str
    library: str
    class_name: str
    weights: str = "diffusion_pytorch_model"
    in_float32: bool = False

    def load_class(self) -> Any:
        """Its class; imports the library."""
        return getattr(importlib.import_module(self.library), self.class_name)

    def build(self, architecture: Architecture) -> Any:
        """One of an architecture's shape, its numbers not meaningful; on the device of the context."""
        part, values = self.load_class(), getattr(architecture, self.name)
        return part(part.config_class(**values)) if self.library == "transformers" else part(**values)

    def build_from(self, folder: Path) -> Any:
        """One as a model's folder configures it, its numbers not meaningful."""
        part = self.load_class()
        if self.library == "transformers":
            return part(part.config_class.from_pretrained(folder / self.name))
        return part.from_config(part.load_config(folder / self.name))


TEXT_ENCODER = Part("text_encoder", "transformers", "CLIPTextModel", "model", in_float32=True)
VAE = Part("vae", "diffusers", "AutoencoderKL")
UNET = Part("unet", "diffusers", "UNet2DConditionModel")
PARTS = (TEXT_ENCODER, VAE, UNET)


@dataclass(frozen=True)
class Conditioning:
    """What the UNet is told beside noisy latents and timestep.

    Attributes:
        hidden_states: of the text encoder, (batch, tokens, width).
        added: further conditions, as the UNet's `added_cond_kwargs`; none for SD1 and SD2.
    """

    hidden_states: torch.Tensor
    added: dict[str, torch.Tensor] = field(default_factory=dict)

    def to(self, dtype: torch.dtype) -> Conditioning:
        """In another precision."""
        return Conditioning(self.hidden_states.to(dtype), {name: value.to(dtype) for name, value in self.added.items()})

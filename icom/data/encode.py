"""The frozen encoders: what they make of pictures and captions, while the UNet trains and before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from icom.engine.precision import product_dtype
from icom.engine.trained import multiply_in_float32
from icom.models import loading
from icom.models.parts import TEXT_ENCODER, VAE

if TYPE_CHECKING:
    from diffusers import AutoencoderKL
    from transformers import CLIPTextModel, CLIPTokenizer

    from icom.backends import Backend
    from icom.models.loading import ModelSource


@dataclass
class Encoders:
    """VAE, tokenizer and text encoder, on the device; frozen, but for a text encoder that is trained."""

    vae: AutoencoderKL
    tokenizer: CLIPTokenizer
    text_encoder: CLIPTextModel

    @torch.no_grad()
    def encode(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation of the VAE's posterior, float32 (batch, channels, height / 8, width / 8).

        Args:
            pixels: float32 (batch, 3, height, width) in [-1, 1].
        """
        if self.vae.device.type == "cpu" and product_dtype(self.vae.dtype) != self.vae.dtype:
            self.vae.float()  # the same numbers, which other machines' have been compared with before
        posterior = self.vae.encode(pixels.to(self.vae.device, self.vae.dtype)).latent_dist
        return posterior.mean.float(), posterior.std.float()

    @torch.no_grad()
    def states(self, captions: Sequence[str]) -> torch.Tensor:
        """The text encoder's states, (batch, context length, width); longer captions are cut."""
        states: torch.Tensor = self.text_encoder(self.ids(captions))[0]
        return states

    def ids(self, captions: Sequence[str]) -> torch.Tensor:
        """The captions' tokens, int64 (batch, context length), where the text encoder is; longer captions are cut."""
        ids: torch.Tensor = self.tokenizer(
            list(captions),
            padding="max_length",
            truncation=True,
            max_length=self.tokenizer.model_max_length,
            return_tensors="pt",
        ).input_ids
        return ids.to(self.text_encoder.device)


def load_encoders(source: ModelSource, backend: Backend) -> Encoders:
    """A model's encoders, on the backend's device and in its precision.

    Raises:
        IcomError: a file is damaged or does not fit.
        UsageError: the tokenizer is another model's.
    """
    tokenizer = loading.load_tokenizer(source)
    parts = loading.load_parts(source, backend.dtype, (TEXT_ENCODER, VAE), tokenizer)
    text_encoder, vae = parts["text_encoder"], parts["vae"]
    if backend.device.type == "cpu" and product_dtype(backend.dtype) != backend.dtype:
        multiply_in_float32(text_encoder)
    text_encoder.to(backend.device)
    vae.to(backend.device, memory_format=torch.channels_last)
    tokenizer.model_max_length = min(tokenizer.model_max_length, text_encoder.config.max_position_embeddings)
    return Encoders(vae, tokenizer, text_encoder)


def encoder_digests(source: ModelSource) -> dict[str, str]:
    """Part -> SHA-256 of its weights in float32: the same whatever precision a run computes in."""
    digests = {}
    for part in (VAE, TEXT_ENCODER):
        module = loading.load_parts(source, torch.float32, (part,))[part.name]
        digests[part.name] = loading.weights_digest(module)
    return digests

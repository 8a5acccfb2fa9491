"""UNet and text encoder trained together, as one network for the processes that share it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_PREFIX = "text_encoder."
"""Begins the names of the text encoder's parameters; those of the UNet are the same as without it."""


class Together(torch.nn.Module):
    """A UNet that is conditioned by token ids, for the gradient to reach the text encoder, too."""

    def __init__(self, unet: torch.nn.Module, text_encoder: torch.nn.Module) -> None:
        super().__init__()
        self.unet, self.text_encoder = unet, text_encoder

    def forward(self, noisy: torch.Tensor, timesteps: torch.Tensor, ids: torch.Tensor) -> Any:
        """What the UNet's `forward` returns.

        Args:
            noisy: latents, (batch, channels, height, width).
            timesteps: int64 (batch,).
            ids: of the captions, int64 (batch, context length).
        """
        return self.unet(noisy, timesteps, self.text_encoder(ids)[0])


def join(unet: Mapping[str, Any], text_encoder: Mapping[str, Any]) -> dict[str, Any]:
    """What both have by name (parameters, tensors), under names of its own each."""
    return {**unet, **{_PREFIX + name: value for name, value in text_encoder.items()}}


def split(joined: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The UNet's and the text encoder's part; the latter is empty where that was not trained."""
    unet: dict[str, Any] = {}
    text_encoder: dict[str, Any] = {}
    for name, value in joined.items():
        part = text_encoder if name.startswith(_PREFIX) else unet
        part[name.removeprefix(_PREFIX)] = value
    return unet, text_encoder

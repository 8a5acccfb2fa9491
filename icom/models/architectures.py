"""Shapes of the Stable Diffusion models that icom knows without a download.

Configurations as published with the models (`config.json` of stable-diffusion-v1-5, stable-diffusion-2-base and
stable-diffusion-2-1); `tiny` is the bundled model's: the same classes and layout at a small width.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

ArchitectureName = Literal["sd15", "sd2-base", "sd21", "tiny"]
"""The keys of ARCHITECTURES, for the command line."""

_CLIP = {"vocab_size": 49408, "max_position_embeddings": 77, "bos_token_id": 49406, "eos_token_id": 49407}
_VAE = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "latent_channels": 4,
    "scaling_factor": 0.18215,
}
_NOISE = {
    "num_train_timesteps": 1000,
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "clip_sample": False,
    "steps_offset": 1,
    "prediction_type": "epsilon",
}
_OPENCLIP_H = _CLIP | {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 23,
    "num_attention_heads": 16,
    "hidden_act": "gelu",
    "projection_dim": 512,
}
_SD2_UNET = {
    "cross_attention_dim": 1024,
    "attention_head_dim": (5, 10, 20, 20),
    "use_linear_projection": True,
}


@dataclass(frozen=True)
class Architecture:
    """Constructor arguments of the four parts, and the picture size in pixels that the model was made for."""

    text_encoder: dict[str, Any]
    vae: dict[str, Any]
    unet: dict[str, Any]
    scheduler: dict[str, Any]
    resolution: int

    def with_vocabulary(self, size: int) -> Architecture:
        """The same with another number of words, of which the last two begin and end a text."""
        words = {"vocab_size": size, "bos_token_id": size - 2, "eos_token_id": size - 1}
        return dataclasses.replace(self, text_encoder=self.text_encoder | words)


ARCHITECTURES: dict[str, Architecture] = {
    "sd15": Architecture(
        text_encoder=_CLIP
        | {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "projection_dim": 768,
        },
        vae=_VAE | {"sample_size": 512},
        unet={"sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8},
        scheduler=_NOISE,
        resolution=512,
    ),
    "sd2-base": Architecture(
        text_encoder=_OPENCLIP_H,
        vae=_VAE | {"sample_size": 512},
        unet=_SD2_UNET | {"sample_size": 64},
        scheduler=_NOISE,
        resolution=512,
    ),
    "sd21": Architecture(
        text_encoder=_OPENCLIP_H,
        vae=_VAE | {"sample_size": 768},
        unet=_SD2_UNET | {"sample_size": 96},
        scheduler=_NOISE | {"prediction_type": "v_prediction"},
        resolution=768,
    ),
    "tiny": Architecture(
        text_encoder=_CLIP
        | {
            "hidden_size": 128,
            "intermediate_size": 512,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "projection_dim": 128,
        },
        vae=_VAE
        | {"block_out_channels": (16, 48, 96, 96), "layers_per_block": 1, "norm_num_groups": 8, "sample_size": 64},
        unet={
            "sample_size": 8,
            "cross_attention_dim": 128,
            "attention_head_dim": 4,
            "block_out_channels": (96, 160),
            "layers_per_block": 1,
            "norm_num_groups": 16,
            "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        },
        scheduler=_NOISE,
        resolution=64,
    ),
}


def fill_random(module: torch.nn.Module, seed: int, gain: float = 1.0) -> None:
    """Give a module with storage but no values reproducible ones that keep activations in range.

    Matrices and kernels get a normal distribution with standard deviation gain / sqrt(fan_in), norms are the
    identity, biases 0. One block of random numbers is tiled over each tensor: a billion parameters take a second,
    and for speed and memory their values do not matter.

    Args:
        module: module on the CPU, any float dtype.
        seed: seed of the block.
        gain: scale of matrices and kernels.
    """
    import torch

    block = torch.randn(2**20 - 3, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            if parameter.dim() < 2:
                continue
            fan_in = parameter[0].numel()
            rolled = block.roll(-7919 * index)
            repeated = rolled.repeat(-(-parameter.numel() // rolled.numel()))[: parameter.numel()]
            parameter.copy_(repeated.view_as(parameter).mul_(gain * fan_in**-0.5))
        for part in module.modules():
            if isinstance(part, torch.nn.GroupNorm | torch.nn.LayerNorm):
                part.weight.fill_(1)
                part.bias.zero_()
            elif isinstance(part, torch.nn.Linear | torch.nn.Conv2d) and part.bias is not None:
                part.bias.zero_()

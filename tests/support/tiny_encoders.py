"""A safety checker and a DINOv2 of random weights, in the files in which diffusers and transformers keep them."""

from __future__ import annotations

from pathlib import Path

import torch

from icom.models.loading import quiet_libraries

SIDE = 32
_SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_SIZE = {"height": SIDE, "width": SIDE}


def make_checker(folder: Path) -> Path:
    """The folders `safety_checker` and `feature_extractor` of a model, as Stable Diffusion 1 has them."""
    quiet_libraries()
    from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
    from transformers import CLIPConfig, CLIPImageProcessorPil

    config = CLIPConfig(
        vision_config={"image_size": SIDE, "patch_size": 8, **_SMALL}, projection_dim=8, initializer_factor=5.0
    )
    with torch.random.fork_rng():
        torch.manual_seed(4)
        StableDiffusionSafetyChecker(config).save_pretrained(folder / "safety_checker")
    processor = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=_SIZE)
    processor.save_pretrained(folder / "feature_extractor")
    return folder


def make_dinov2(folder: Path) -> Path:
    """As transformers keeps it."""
    quiet_libraries()
    from transformers import BitImageProcessorPil, Dinov2Config, Dinov2Model

    config = Dinov2Config(image_size=SIDE, patch_size=8, mlp_ratio=2, initializer_range=0.5, **_SMALL)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        Dinov2Model(config).save_pretrained(folder)
    BitImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=_SIZE).save_pretrained(folder)
    return folder

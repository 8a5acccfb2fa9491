"""What looks at pictures of a learned word: the CLIP tower of a safety checker, CLIP, DINOv2; all from folders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from icom.errors import IcomError
from icom.evaluate.distances import Features
from icom.evaluate.networks import Clip, float64, network_of, processor_of
from icom.models import loading

if TYPE_CHECKING:
    from PIL import Image

CHECKER, EXTRACTOR = "safety_checker", "feature_extractor"
"""Folders of a model in diffusers' layout."""


class Encoder(Protocol):
    """What looks at pictures."""

    def see(self, pictures: Sequence[Image.Image]) -> Features:
        """Features of RGB pictures, not normalized."""


class SafetyChecker:
    """The vision tower (CLIP ViT-L/14) that Stable Diffusion 1's safety checker compares pictures with words by."""

    def __init__(self, folder: Path) -> None:
        """Load it.

        Args:
            folder: of a model, with `safety_checker` and `feature_extractor` in it.

        Raises:
            IcomError: they are not there, or damaged.
        """
        loading.quiet_libraries()
        from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker

        try:
            self._processor = processor_of(folder / EXTRACTOR, "CLIPImageProcessor")
            self._model = network_of(StableDiffusionSafetyChecker, folder / CHECKER)
        except Exception as error:  # a folder of strangers
            raise IcomError(
                f"There is no safety checker of diffusers in {folder} ({str(error).splitlines()[0]}): it takes "
                f"{CHECKER}/config.json, {CHECKER}/model.safetensors and {EXTRACTOR}/preprocessor_config.json."
            ) from error

    def see(self, pictures: Sequence[Image.Image]) -> Features:
        """Features of RGB pictures, not normalized; as the checker's own `forward` computes them."""
        pixels = self._processor(images=list(pictures), return_tensors="pt")["pixel_values"]
        with torch.no_grad():
            return float64(self._model.visual_projection(self._model.vision_model(pixels)[1]))


class DinoV2:
    """DINOv2 (Oquab et al. 2023): the class token after the last layer's normalisation."""

    def __init__(self, folder: Path) -> None:
        """Load it.

        Args:
            folder: as transformers keeps it.

        Raises:
            IcomError: there is no such model in it.
        """
        loading.quiet_libraries()
        import transformers

        try:
            self._processor = processor_of(folder, "BitImageProcessor")
            self._model = network_of(transformers.Dinov2Model, folder)
        except Exception as error:  # a folder of strangers
            raise IcomError(
                f"There is no DINOv2 of transformers in {folder} ({str(error).splitlines()[0]}): it takes config.json, "
                "model.safetensors and preprocessor_config.json (--image_encoder)."
            ) from error

    def see(self, pictures: Sequence[Image.Image]) -> Features:
        """Features of RGB pictures, not normalized."""
        pixels = self._processor(images=list(pictures), return_tensors="pt")["pixel_values"]
        with torch.no_grad():
            return float64(self._model(pixel_values=pixels).pooler_output)


def open_encoder(named: str | None, model: Path | None) -> tuple[Encoder, str]:
    """What pictures are compared by, and what to call it.

    Args:
        named: --image_encoder.
        model: the folder of the model that draws, where it has one.

    Raises:
        IcomError: there is none; says what to give.
    """
    if named is None:
        if model and (model / CHECKER).is_dir():
            return SafetyChecker(model), "the CLIP tower of the model's safety checker"
        raise IcomError(
            "The model that draws has no safety checker, whose CLIP tower could compare pictures: give another with "
            "--image_encoder FOLDER, a CLIP (`hf download openai/clip-vit-large-patch14 --local-dir clip`), a DINOv2 "
            "(`hf download facebook/dinov2-base --local-dir dinov2`), or a folder with a safety checker (`hf download "
            "stable-diffusion-v1-5/stable-diffusion-v1-5 --include 'safety_checker/*' --include 'feature_extractor/*' "
            "--local-dir checker`)."
        )
    folder = Path(named).expanduser()
    if (folder / CHECKER).is_dir():
        return SafetyChecker(folder), f"the CLIP tower of {folder.name}'s safety checker"
    try:
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]
    except (OSError, ValueError, KeyError, TypeError):
        kind = None
    if kind == "clip":
        return Clip(named, "--image_encoder"), f"CLIP ({folder.name})"
    if kind == "dinov2":
        return DinoV2(folder), f"DINOv2 ({folder.name})"
    what = f"its config.json says {kind!r}" if kind else "no config.json with a model_type"
    raise IcomError(
        f"There is no CLIP, DINOv2 or safety checker in {folder} ({what}): --image_encoder takes a folder as "
        "transformers or diffusers keep them."
    )

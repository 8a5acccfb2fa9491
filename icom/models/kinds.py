"""What a model is that icom does not train, told from small files alone, before a download or a build."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from icom.errors import IcomError
from icom.models.parts import PARTS

TRAINS = (
    "icom trains Stable Diffusion 1.x and 2.x and what was made from them (one CLIP text encoder, a UNet on 4 latent "
    "channels)"
)
EXAMPLE = "for instance stable-diffusion-v1-5/stable-diffusion-v1-5"
CONFIGS = ("model_index.json", "config.json", "text_encoder/config.json", "unet/config.json", "vae/config.json")
"""What `refuse_other_kinds` reads, where it is there."""

_OF_ITS_BASE = "a word that was learned on the model it was made from works in it too"
_LORA = "a LoRA, which changes a model and is none itself: name the model that it belongs to, or merge the two first"
_WORD = "a learned word, not a model: draw with it (icom generate --embedding), and name the model that it belongs to"
_CONTROLNET = "a ControlNet, which steers a model and is none itself: name the model that it belongs to"
_XL = "Stable Diffusion XL (two text encoders)"
_REFINER = "the refiner of Stable Diffusion XL (its only text encoder is the second one)"

_BY_PIPELINE = (
    ("StableDiffusion3", "Stable Diffusion 3 (a transformer, three text encoders)"),
    ("StableDiffusionXL", _XL),
    ("Flux", "FLUX (a transformer, a T5 text encoder)"),
    ("PixArt", "PixArt (a transformer, a T5 text encoder)"),
)
"""Beginnings of `_class_name` in model_index.json -> what to call it. Others go by the name of the class."""

_BY_CHANNELS = {
    5: f"a depth-to-image model (5 channels; {_OF_ITS_BASE})",
    7: "an upscaler (7 channels)",
    8: f"a model that edits pictures, as InstructPix2Pix does (8 channels; {_OF_ITS_BASE})",
    9: f"an inpainting model (9 channels; {_OF_ITS_BASE})",
}
"""Input channels of a UNet that is not a plain one."""

_BY_WEIGHT = (
    (r"^lora_(unet|te)|\.lora_(A|B|up|down)\.|\.lora\.(up|down)\.", _LORA),
    (r"^(emb_params|clip_[gl]|<[^.]*>)$", _WORD),
    (r"^conditioner\.embedders\.1\.", _XL),
    (r"^conditioner\.embedders\.0\.model\.", _REFINER),
    (r"(^|\.)joint_blocks\.0\.", _BY_PIPELINE[0][1]),
    (r"(^|\.)double_blocks\.0\.", _BY_PIPELINE[2][1]),
    (r"^control_model\.|controlnet_cond_embedding\.", _CONTROLNET),
    (r"^(encoder|decoder)\.conv_in\.", "a VAE, a single part of a model: take the whole model"),
)
"""Names of weights in single files -> what such a file is."""

_PARTS = {"tokenizer": ("CLIPTokenizer", "CLIPTokenizerFast")} | {part.name: (part.class_name,) for part in PARTS}
"""Parts of a pipeline -> the classes that icom loads them with."""


def refuse_other_kinds(name: str, documents: Mapping[str, dict[str, Any]], names: Collection[str]) -> None:
    """Say what a model is, if it is one that icom does not train.

    Args:
        name: what the user asked for.
        documents: path in the model's folder -> its content, for those of CONFIGS that exist.
        names: paths of all its files, as far as known.

    Raises:
        IcomError: it is another kind of model. What is merely incomplete passes.
    """
    kind = _pipeline(documents.get("model_index.json", {})) or _unet(documents.get("unet/config.json", {}))
    kind = kind or _text_encoder(documents.get("text_encoder/config.json", {}))
    if not kind and "unet/config.json" not in documents:
        kind = _alone(documents.get("config.json", {}), names)
    if kind:
        raise IcomError(f"{name} is {kind}. {TRAINS}, {EXAMPLE}.")


def refuse_other_weights(name: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """The same for a single file, by the names and shapes of what is in it.

    Raises:
        IcomError: it is another kind of file. What is merely incomplete passes.
    """
    for pattern, kind in _BY_WEIGHT:
        if any(re.search(pattern, weight) for weight in shapes):
            raise IcomError(f"{name} is {kind}. {TRAINS}, {EXAMPLE}.")
    channels = (*shapes.get("model.diffusion_model.input_blocks.0.0.weight", ()), 4, 4)[1]
    if channels != 4:
        kind = _BY_CHANNELS.get(channels, f"a model whose UNet takes {channels} channels")
        raise IcomError(f"{name} is {kind}. {TRAINS}, {EXAMPLE}.")


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object in a model's folder.

    Raises:
        IcomError: it is damaged.
    """
    try:
        document = json.loads((folder / name).read_text(encoding="utf-8"))
        if isinstance(document, dict):
            return document
        reason = "holds no JSON object"
    except OSError as error:
        reason = f"cannot be read ({error.strerror})"
    except (ValueError, RecursionError):
        reason = "is not a valid JSON file"
    part = name.rpartition("/")[0] or "model"
    raise IcomError(
        f"Cannot load the {part} in {folder}: {name} {reason}. The file is damaged or not whole; fetch the model again."
    )


def _pipeline(index: dict[str, Any]) -> str | None:
    """By model_index.json: {"_class_name": …, part: [library, class] or [null, null]}."""
    classes = {part: value[1] for part, value in index.items() if isinstance(value, list) and len(value) == 2}
    present = {part: str(name) for part, name in classes.items() if name is not None}
    if not present:
        return None
    pipeline = str(index.get("_class_name"))
    others = {part: name for part, name in present.items() if name not in _PARTS.get(part, (name,))}
    more = sorted(part for part in present if part.startswith(("text_encoder_", "tokenizer_", "transformer", "prior")))
    lacking = sorted(part for part in _PARTS if part not in present)
    if not (others or more or lacking):
        return None
    if pipeline.startswith("StableDiffusionXL") and "text_encoder" in lacking:
        return _REFINER
    known = next((title for start, title in _BY_PIPELINE if pipeline.startswith(start)), None)
    if known:
        return known
    reasons = [f"its {part} is a {name}" for part, name in sorted(others.items())]
    reasons += [f"it has a {part}" for part in more] + [f"it has no {part}" for part in lacking]
    return f"a model for diffusers' {pipeline} ({', '.join(reasons)})"


def _unet(config: dict[str, Any]) -> str | None:
    """By unet/config.json."""
    class_name = config.get("_class_name", "UNet2DConditionModel")
    if class_name != "UNet2DConditionModel":
        return f"a model whose UNet is a {class_name}"
    if config.get("addition_embed_type") == "text_time":
        return _REFINER if config.get("cross_attention_dim") == 1280 else _XL
    channels = config.get("in_channels", 4)
    if isinstance(channels, int) and channels != 4:
        return _BY_CHANNELS.get(channels, f"a model whose UNet takes {channels} channels")
    for key in ("class_embed_type", "num_class_embeds", "encoder_hid_dim_type", "addition_embed_type"):
        if config.get(key) is not None:
            return f"a model whose UNet is told more than a text ({key}: {config[key]})"
    return None


def _text_encoder(config: dict[str, Any]) -> str | None:
    """By text_encoder/config.json."""
    kind = config.get("model_type", "clip_text_model")
    return None if kind in ("clip_text_model", "clip") else f"a model whose text encoder is a {kind}, not CLIP"


def _alone(config: dict[str, Any], names: Collection[str]) -> str | None:
    """By what lies there instead of a pipeline."""
    class_name = config.get("_class_name")
    if class_name in ("ControlNetModel", "ControlNetXSAdapter", "T2IAdapter", "MultiAdapter"):
        return _CONTROLNET
    if class_name:
        return f"a single part of a model, a {class_name}: name the folder of the whole pipeline, with its other parts"
    last = {path.rpartition("/")[2].lower() for path in names}
    if any(
        name == "adapter_config.json" or ("lora" in name and name.endswith((".safetensors", ".bin"))) for name in last
    ):
        return _LORA
    if any(name.startswith("learned_embeds") for name in last):
        return _WORD
    if config.get("model_type"):
        return f"a {config['model_type']} model"
    return None

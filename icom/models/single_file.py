"""Checkpoints in one file, as Civitai and A1111 have them: what is in one, and its parts for diffusers."""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from icom.errors import IcomError
from icom.models.architectures import ARCHITECTURES
from icom.models.kinds import refuse_other_weights
from icom.models.parts import PARTS

if TYPE_CHECKING:
    import torch

SUFFIXES = (".safetensors", ".ckpt", ".pt", ".pth", ".bin")
TOKENIZER_HOME = "stable-diffusion-v1-5/stable-diffusion-v1-5"
"""Where the vocabulary comes from, which these files do not hold. All Stable Diffusion 1.x and 2.x share it."""

_UNET, _TEXT, _VAE = "model.diffusion_model.", "cond_stage_model.", "first_stage_model."
_CLIP = f"{_TEXT}transformer."
_TABLE = "embeddings.token_embedding.weight"
_TABLES = (f"{_CLIP}text_model.{_TABLE}", f"{_CLIP}{_TABLE}", f"{_TEXT}model.token_embedding.weight")
_CONVERT = (
    "To convert it into a folder that icom takes, with diffusers and a connection to the Hub: python -c 'import sys; "
    "from diffusers import StableDiffusionPipeline as P; P.from_single_file(sys.argv[1]).save_pretrained(sys.argv[2])' "
    "FILE FOLDER"
)


@dataclass(frozen=True)
class SingleFile:
    """A checkpoint in the original layout.

    Attributes:
        path: the file.
        architecture: a key of ARCHITECTURES.
        vocabulary: rows of the token table.
        prediction: "epsilon" or "v_prediction".
    """

    path: Path
    architecture: str
    vocabulary: int
    prediction: str


def examine(path: Path) -> SingleFile:
    """Say what a file holds, from names and shapes.

    Raises:
        IcomError: it is no Stable Diffusion 1.x or 2.x in the original layout, or holds more than weights.
    """
    shapes, metadata = _header(path)
    refuse_other_weights(str(path), shapes)
    first = shapes.get(f"{_UNET}input_blocks.0.0.weight", (0,))
    keys = shapes.get(f"{_UNET}input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight", (0, 0))
    table = next((shapes[name] for name in _TABLES if name in shapes), (0, 0))
    lacking = [
        what
        for what, prefix in (("UNet", _UNET), ("text encoder", _TEXT), ("VAE", _VAE))
        if not any(name.startswith(prefix) for name in shapes)
    ]
    if lacking:
        raise IcomError(
            f"{path} holds no {' and no '.join(lacking)}: it is not a whole model. Take one with all parts."
        )
    wanted = (first[0], keys[-1])
    known = [name for name in ARCHITECTURES if _widths(name) == wanted and table[-1] == _width(name)]
    if not known:
        raise IcomError(
            f"{path} holds no architecture that icom knows (UNet of width {wanted[0]}, text of width {wanted[1]}). "
            + _CONVERT
        )
    prediction = _prediction(path, shapes, metadata)
    if prediction is None and len(known) > 1:
        raise IcomError(
            f"{path} is a Stable Diffusion 2.x and does not say whether it predicts noise or velocity. Put the .yaml "
            f"file that belongs to it beside it, as {path.with_suffix('.yaml').name} (A1111 wants the same): "
            "`parameterization: v` in it stands for velocity."
        )
    prediction = prediction or "epsilon"
    alike = [name for name in known if ARCHITECTURES[name].scheduler["prediction_type"] == prediction]
    return SingleFile(path, (alike or known)[0], table[0], prediction)


def load_parts(source: SingleFile, dtype: torch.dtype) -> dict[str, Any]:
    """Load all of PARTS, by name, with diffusers' own conversion of the weights' names.

    Raises:
        IcomError: weights are missing, or of another shape.
    """
    import torch
    from diffusers.loaders.single_file_utils import create_diffusers_clip_model_from_ldm

    weights = _named_as_ever(_read(source.path))
    modules: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="icom-") as folder:
        _write_configs(Path(folder), source)
        try:
            for part in PARTS:
                loader: Any = part.load_class()
                options: dict[str, Any] = {"subfolder": part.name, "config": folder, "local_files_only": True}
                options["torch_dtype"] = torch.float32 if part.in_float32 else dtype
                if part.library == "transformers":
                    modules[part.name] = create_diffusers_clip_model_from_ldm(loader, weights, **options)
                else:
                    modules[part.name] = loader.from_single_file(weights, **options)
        except NotImplementedError as error:  # torch's, for a weight that nothing was copied to
            raise IcomError(f"{source.path} is not whole: weights of the model are missing. Fetch it again.") from error
        except Exception as error:  # conversions raise nearly anything: KeyError, AttributeError, ValueError …
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise IcomError(f"Cannot load {source.path}: {reason}. {_CONVERT}") from error
    for module in modules.values():
        for parameter in module.parameters():
            # Out of the mapped file, where tensors start anywhere: kernels round differently by alignment.
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
    return modules


def _header(path: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """(name -> shape, metadata)."""
    from safetensors import SafetensorError, safe_open

    if path.suffix != ".safetensors":
        return {name: tuple(tensor.shape) for name, tensor in _read(path).items()}, {}
    try:
        with safe_open(path, "np") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            return shapes, file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise IcomError(f"Cannot read {path}: {error}. The file is damaged or not whole; fetch it again.") from error


def _read(path: Path) -> dict[str, Any]:
    """All tensors of a file, mapped rather than read where that can be."""
    import pickle
    import zipfile

    import torch
    from safetensors.torch import load_file

    if path.suffix == ".safetensors":
        return load_file(path)
    try:
        # Weights only: what a pickle would run is refused.
        document = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise IcomError(
            f"{path} holds more than weights, and reading that can run a stranger's code. Take its .safetensors "
            "version, or convert it where you trust it (A1111: Checkpoint Merger, no interpolation, save as "
            "safetensors)."
        ) from error
    except Exception as error:  # torch raises nearly anything for what is no checkpoint: EOFError, RuntimeError …
        raise IcomError(f"Cannot read {path}: it is damaged, or no checkpoint. Fetch it again.") from error
    while isinstance(document, dict) and isinstance(document.get("state_dict"), dict):
        document = document["state_dict"]
    if not isinstance(document, dict):
        raise IcomError(f"{path} holds no weights by name. {_CONVERT}")
    return {str(name): value for name, value in document.items() if isinstance(value, torch.Tensor)}


def _named_as_ever(weights: dict[str, Any]) -> dict[str, Any]:
    """Newer tools leave `text_model.` out; position_ids is a constant, in old files also as float."""
    kept = {name: tensor for name, tensor in weights.items() if not name.endswith(".position_ids")}
    short = re.compile(rf"^{re.escape(_CLIP)}(?!text_model\.)")
    return {short.sub(f"{_CLIP}text_model.", name): tensor for name, tensor in kept.items()}


def _widths(architecture: str) -> tuple[int, int]:
    unet = ARCHITECTURES[architecture].unet
    return unet.get("block_out_channels", (320,))[0], unet["cross_attention_dim"]


def _width(architecture: str) -> int:
    return int(ARCHITECTURES[architecture].text_encoder["hidden_size"])


def _prediction(path: Path, shapes: dict[str, tuple[int, ...]], metadata: dict[str, str]) -> str | None:
    """What the model predicts: by the file beside it, by a mark in it; None where nothing says so."""
    import yaml

    beside = path.with_suffix(".yaml")
    if beside.is_file():
        try:
            kind = yaml.safe_load(beside.read_text(encoding="utf-8"))["model"]["params"].get("parameterization", "eps")
        except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
            raise IcomError(f"Cannot read {beside}, the configuration of {path.name}: {error}. Remove it.") from error
        return "v_prediction" if kind == "v" else "epsilon"
    said = metadata.get("modelspec.prediction_type", "")
    if "v_pred" in shapes or said.startswith("v"):
        return "v_prediction"
    return "epsilon" if said.startswith("eps") else None


def _write_configs(folder: Path, source: SingleFile) -> None:
    architecture = ARCHITECTURES[source.architecture]
    ids = {"bos_token_id": source.vocabulary - 2, "eos_token_id": source.vocabulary - 1}
    configs = {
        "text_encoder": {"architectures": ["CLIPTextModel"], "model_type": "clip_text_model"}
        | architecture.text_encoder
        | {"vocab_size": source.vocabulary}
        | ids,
        "vae": {"_class_name": "AutoencoderKL"} | architecture.vae,
        "unet": {"_class_name": "UNet2DConditionModel"} | architecture.unet,
    }
    for part, config in configs.items():
        (folder / part).mkdir()
        (folder / part / "config.json").write_text(json.dumps(config))

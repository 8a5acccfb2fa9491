"""The networks that look at pictures, from files that are here: Inception of torch-fidelity, CLIP of transformers."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from icom.errors import IcomError
from icom.evaluate.distances import Features
from icom.models import loading

if TYPE_CHECKING:
    from PIL import Image

INCEPTION_FILE = "weights-inception-2015-12-05-6726825d.pth"
"""Of torch-fidelity's releases; others would give other numbers than everybody's."""


class Unavailable(Exception):
    """A network that cannot be had here; says what to do."""


class Inception:
    """What FID and KID have been computed with since 2017: the pooled features (2048) of TensorFlow's Inception-v3."""

    def __init__(self, weights: str | None) -> None:
        """Load it.

        Args:
            weights: --inception_weights.

        Raises:
            Unavailable: no weights named, or no torch-fidelity that can be imported.
            IcomError: the file is none of these weights.
        """
        if weights is None:
            raise Unavailable(
                f"--inception_weights is missing: download https://github.com/toshas/torch-fidelity/releases/download/"
                f"v0.2.0/{INCEPTION_FILE} and give its path"
            )
        path = Path(weights).expanduser()
        try:
            # torch-fidelity unpickles whatever is in the file. Once read like this, it holds tensors alone.
            names = torch.load(path, map_location="cpu", weights_only=True).keys()
            if not {"Conv2d_1a_3x3.conv.weight", "fc.weight"} <= names:
                raise IcomError("other weights")
        except Exception as error:  # a file of strangers
            raise _no_inception(path, error) from error
        try:
            from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
        except (ImportError, RuntimeError) as error:  # torchvision's, where it was built for another torch
            version = importlib.metadata.version("torch")
            raise Unavailable(
                f"torch-fidelity cannot be imported ({str(error).splitlines()[0]}): python -m pip install "
                f"torch-fidelity torchvision torch=={version} --extra-index-url https://download.pytorch.org/whl/cpu "
                "(a torchvision that is not of the same build as torch keeps diffusers from starting, too)"
            ) from error
        try:
            self._network = FeatureExtractorInceptionV3("inception", ["2048"], feature_extractor_weights_path=str(path))
        except RuntimeError as error:
            raise _no_inception(path, error) from error

    def see(self, pictures: Sequence[Image.Image]) -> Features:
        """Features of RGB pictures of one size."""
        pixels = torch.from_numpy(np.stack([np.asarray(picture) for picture in pictures])).permute(0, 3, 1, 2)
        with torch.no_grad():
            (features,) = self._network(pixels.contiguous())
        return float64(features)


class Clip:
    """CLIP (Radford et al. 2021): what a picture shows and what a sentence says, in one space."""

    def __init__(self, folder: str | None, option: str = "--clip_model") -> None:
        """Load it.

        Args:
            folder: that the option names.
            option: for messages.

        Raises:
            Unavailable: no folder named.
            IcomError: there is no CLIP model in it.
        """
        if folder is None:
            raise Unavailable(
                "--clip_model is missing: download a CLIP model (`hf download openai/clip-vit-base-patch32 --local-dir "
                "clip`) and give its folder"
            )
        loading.quiet_libraries()
        import transformers

        try:
            self._model = network_of(transformers.CLIPModel, Path(folder))
            self._processor = processor_of(Path(folder), "CLIPImageProcessor")
            self._tokenizer: Any = transformers.CLIPTokenizer.from_pretrained(folder, local_files_only=True)
            # A tokenizer without its vocabulary is made without a word.
            known, rows = len(self._tokenizer), self._model.config.text_config.vocab_size
            if known != rows:
                raise IcomError(f"its tokenizer knows {known} tokens, its text encoder {rows}")
        except Exception as error:  # a folder of strangers
            raise IcomError(
                f"There is no CLIP model of transformers in {folder} ({str(error).splitlines()[0]}): it takes "
                f"config.json, model.safetensors, preprocessor_config.json and the tokenizer ({option})."
            ) from error

    def see(self, pictures: Sequence[Image.Image]) -> Features:
        """Features of RGB pictures, not normalized."""
        pixels = self._processor(images=list(pictures), return_tensors="pt")["pixel_values"]
        with torch.no_grad():
            seen = self._model.vision_model(pixel_values=pixels).pooler_output
            return float64(self._model.visual_projection(seen))

    def read(self, prompts: Sequence[str]) -> Features:
        """Features of sentences, not normalized; what is longer than the text encoder's context is cut."""
        length = self._model.config.text_config.max_position_embeddings
        words = self._tokenizer(list(prompts), padding=True, truncation=True, max_length=length, return_tensors="pt")
        with torch.no_grad():
            read = self._model.text_model(
                input_ids=words["input_ids"], attention_mask=words["attention_mask"]
            ).pooler_output
            return float64(self._model.text_projection(read))


def _no_inception(path: Path, error: Exception) -> IcomError:
    reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
    return IcomError(
        f"{path} is not {INCEPTION_FILE} of torch-fidelity ({reason}). Download it again (--inception_weights)."
    )


def network_of(kind: Any, folder: Path) -> Any:
    """A network of diffusers or transformers from a folder, in float32.

    Args:
        kind: its class.
        folder: with config.json and model.safetensors.

    Raises:
        IcomError: no such network, or weights of it are missing; says which.
    """
    if not (folder / "config.json").is_file():
        raise IcomError("no config.json")  # else transformers would ask the Hub
    network, found = kind.from_pretrained(
        folder, local_files_only=True, use_safetensors=True, output_loading_info=True, dtype=torch.float32
    )
    if lacking := found["missing_keys"] or found["mismatched_keys"]:
        raise IcomError(f"its weights lack {sorted(map(str, lacking))[0]}")
    return network.eval()


def processor_of(folder: Path, name: str) -> Any:
    """What makes a network's input of pictures: Pillow's way, whatever else is installed, so that numbers compare.

    Args:
        folder: with preprocessor_config.json.
        name: of transformers' class.

    Raises:
        IcomError: the folder has none.
    """
    import transformers

    if not (folder / "preprocessor_config.json").is_file():
        raise IcomError("no preprocessor_config.json")
    pillows = f"{name}Pil"
    made: Any = getattr(transformers, pillows if hasattr(transformers, pillows) else name)
    return made.from_pretrained(folder, local_files_only=True)


def float64(features: torch.Tensor) -> Features:
    """As numpy's float64."""
    return np.asarray(features.double().numpy())

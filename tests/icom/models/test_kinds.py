"""icom/models/kinds.py: a model that icom does not train is named, before anything large is fetched or read.

Guards icom.models.kinds.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from icom.models.loading import BUNDLE
from tests.support.command import Run, assert_refused
from tests.support.fake_hub import FakeHub, Repository

LARGE = (".safetensors", ".bin", ".ckpt", ".pt", ".msgpack", "vocab.json", "tokenizer.json", "merges.txt")
SD = {
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
    "scheduler": ["diffusers", "PNDMScheduler"],
    "safety_checker": [None, None],
}
CLIP_G = {
    "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
    "tokenizer_2": ["transformers", "CLIPTokenizer"],
}
T5 = {"text_encoder": ["transformers", "T5EncoderModel"], "tokenizer": ["transformers", "T5Tokenizer"]}
SDXL_UNET = {"_class_name": "UNet2DConditionModel", "addition_embed_type": "text_time", "in_channels": 4}


def pipeline(class_name: str, parts: dict[str, Any], **unet: Any) -> dict[str, Any]:
    """The small files of a pipeline, as its authors published them."""
    files: dict[str, Any] = {"model_index.json": {"_class_name": class_name, **parts}}
    if "unet" in parts:
        files["unet/config.json"] = {"_class_name": parts["unet"][1], "in_channels": 4, **unet}
    if "transformer" in parts:
        files["transformer/config.json"] = {"_class_name": parts["transformer"][1]}
    return files


def without(part: str, parts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in parts.items() if name != part}


# Published as these, by name -> (small files, what the message has to say).
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "sdxl": (pipeline("StableDiffusionXLPipeline", SD | CLIP_G, **SDXL_UNET), "is Stable Diffusion XL (two text"),
    "sdxl without its index": ({"unet/config.json": SDXL_UNET}, "is Stable Diffusion XL (two text"),
    "refiner": (
        pipeline(
            "StableDiffusionXLImg2ImgPipeline",
            SD | CLIP_G | {"text_encoder": [None, None], "tokenizer": [None, None]},
            **SDXL_UNET,
        ),
        "is the refiner of Stable Diffusion XL",
    ),
    "inpainting": (
        pipeline("StableDiffusionInpaintPipeline", SD, in_channels=9),
        "is an inpainting model (9 channels; a word that was learned on the model it was made from works in it too)",
    ),
    "instruct": (pipeline("StableDiffusionInstructPix2PixPipeline", SD, in_channels=8), "as InstructPix2Pix does"),
    "depth": (
        pipeline("StableDiffusionDepth2ImgPipeline", SD | {"depth_estimator": ["transformers", "DPT"]}, in_channels=5),
        "is a depth-to-image model (5 channels",
    ),
    "upscaler": (pipeline("StableDiffusionUpscalePipeline", SD, in_channels=7, num_class_embeds=1000), "an upscaler"),
    "sd3": (
        pipeline(
            "StableDiffusion3Pipeline",
            without("unet", SD) | CLIP_G | {"transformer": ["diffusers", "SD3Transformer2DModel"]},
        ),
        "is Stable Diffusion 3 (a transformer",
    ),
    "flux": (
        pipeline(
            "FluxPipeline", without("unet", SD) | CLIP_G | {"transformer": ["diffusers", "FluxTransformer2DModel"]}
        ),
        "is FLUX (a transformer",
    ),
    "pixart": (
        pipeline(
            "PixArtSigmaPipeline",
            without("unet", SD) | T5 | {"transformer": ["diffusers", "PixArtTransformer2DModel"]},
        ),
        "is PixArt (a transformer",
    ),
    "another transformer": (
        pipeline("SanaPipeline", without("unet", SD) | {"transformer": ["diffusers", "SanaTransformer2DModel"]}),
        "diffusers' SanaPipeline (it has a transformer, it has no unet)",
    ),
    "deepfloyd": (pipeline("IFPipeline", SD | T5), "IFPipeline (its text_encoder is a T5EncoderModel"),
    "unclip": (pipeline("StableUnCLIPPipeline", SD, class_embed_type="projection"), "class_embed_type: projection"),
    "t5, no index": (
        {"unet/config.json": {}, "text_encoder/config.json": {"model_type": "t5"}},
        "encoder is a t5, not",
    ),
    "controlnet": ({"config.json": {"_class_name": "ControlNetModel"}}, "is a ControlNet, which steers a model"),
    "unet alone": ({"config.json": {"_class_name": "UNet2DConditionModel"}}, "single part of a model, a UNet2DCond"),
    "language model": ({"config.json": {"model_type": "llama"}}, "is a llama model"),
    "lora": ({"pytorch_lora_weights.safetensors": {}}, "is a LoRA, which changes a model"),
    "peft": ({"adapter_config.json": {}, "adapter_model.safetensors": {}}, "is a LoRA, which changes a model"),
    "learned word": ({"learned_embeds.bin": {}, "token_identifier.txt": {}}, "is a learned word, not a model"),
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    from huggingface_hub import constants

    with FakeHub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = "{endpoint}/{repo_id}/resolve/{revision}/{filename}".replace("{endpoint}", hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield hub


@pytest.mark.parametrize("kind", OTHERS)
def test_another_kind_is_named_before_anything_large_is_fetched(
    hub: FakeHub, train: Run, tmp_path: Path, kind: str
) -> None:
    files, message = OTHERS[kind]
    content = {name: json.dumps(document).encode() for name, document in files.items()}
    for part in ("unet", "vae", "text_encoder", "transformer", "tokenizer"):
        for name in ("diffusion_pytorch_model.safetensors", "model.safetensors", "tokenizer.json", "vocab.json"):
            content |= {f"{part}/{name}": b"large"} if "model_index.json" in files else {}
    hub.repositories["some/model"] = Repository(content)
    result = train(output_dir=tmp_path / "out", pretrained_model_name_or_path="some/model")
    assert_refused(result, 1, "icom: some/model is ", message, "icom trains Stable Diffusion 1.x and 2.x")
    assert not [name for name in hub.downloaded if name.endswith(LARGE)]


@pytest.mark.parametrize("command", ["train", "generate", "params"])
@pytest.mark.parametrize("kind", ["sdxl", "flux", "inpainting", "controlnet", "lora"])
def test_another_kind_in_a_folder(icom: Run, train: Run, tmp_path: Path, kind: str, command: str) -> None:
    files, message = OTHERS[kind]
    model = tmp_path / "model"
    for name, document in files.items():
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        (model / name).write_text(json.dumps(document))
    if command == "train":
        result = train(output_dir=tmp_path / "out", pretrained_model_name_or_path=model)
    elif command == "params":
        result = icom("params", str(model))
    else:
        options = ("--prompt", "a star", "--output_dir", str(tmp_path / "drawn"))
        result = icom("generate", f"--pretrained_model_name_or_path={model}", *options)
    assert_refused(result, 1, f"{model} {message}", "icom trains Stable Diffusion 1.x and 2.x")


@pytest.mark.parametrize("class_name", ["StableDiffusionImg2ImgPipeline", "StableDiffusionControlNetPipeline"])
def test_what_has_the_right_parts_trains_whatever_its_pipeline(train: Run, tmp_path: Path, class_name: str) -> None:
    """The parts decide: pipelines of other classes around a plain Stable Diffusion stay good."""
    model = Path(shutil.copytree(BUNDLE, tmp_path / "model"))
    index = json.loads((model / "model_index.json").read_text())
    index |= {"_class_name": class_name, "controlnet": ["diffusers", "ControlNetModel"]}
    (model / "model_index.json").write_text(json.dumps(index))
    result = train(output_dir=tmp_path / "out", pretrained_model_name_or_path=model, max_train_steps=1)
    assert result.code == 0, result.err


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000])
def test_index_that_is_damaged(train: Run, tmp_path: Path, text: str) -> None:
    model = Path(shutil.copytree(BUNDLE, tmp_path / "model"))
    (model / "model_index.json").write_text(text)
    result = train(output_dir=tmp_path / "out", pretrained_model_name_or_path=model)
    assert_refused(result, 1, f"Cannot load the model in {model}: model_index.json", "fetch the model again")

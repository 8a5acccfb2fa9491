"""icom/models/single_file.py: checkpoints in one file train and draw as the same model in a folder, or say why not.

Guards icom.models.single_file.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from icom.models.architectures import ARCHITECTURES, fill_random
from icom.models.loading import BUNDLE, is_hub_id
from icom.models.parts import TEXT_ENCODER, UNET, VAE
from tests.support.command import Run, assert_refused, cut
from tests.support.original_layout import original_layout

TOKENIZER = BUNDLE / "tokenizer"
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model in diffusers' layout; beside it the same as model.safetensors, in the original one."""
    folder = tmp_path_factory.mktemp("single") / "model"
    parts = {
        "text_encoder": TEXT_ENCODER.build(ARCHITECTURES["tiny"].with_vocabulary(807)),
        "vae": VAE.build(ARCHITECTURES["tiny"]),
        "unet": UNET.build(ARCHITECTURES["tiny"]),
    }
    for seed, (name, part) in enumerate(parts.items()):
        fill_random(part, seed)
        part.save_pretrained(folder / name)
    # As published: without what has its default, which a sampler made from it then chooses for itself.
    (folder / "scheduler").mkdir()
    scheduler = {"_class_name": "PNDMScheduler"} | ARCHITECTURES["tiny"].scheduler
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler))
    shutil.copytree(TOKENIZER, folder / "tokenizer")
    save_file(original_layout(**parts), folder.parent / "model.safetensors")
    return folder


@pytest.fixture
def weights(folder: Path) -> Weights:
    return load_file(folder.parent / "model.safetensors")


def half(weights: Weights) -> Weights:
    return {name: tensor if name.endswith("position_ids") else tensor.half() for name, tensor in weights.items()}


def short_names(weights: Weights) -> Weights:
    return {name.replace("transformer.text_model.", "transformer."): tensor for name, tensor in weights.items()}


def test_training_and_drawing_are_those_of_the_folder(icom: Run, train: Run, folder: Path, tmp_path: Path) -> None:
    """To the bit, from .safetensors as from .ckpt."""
    checkpoint = tmp_path / "model.ckpt"
    weights = load_file(folder.parent / "model.safetensors")
    torch.save({"state_dict": weights, "global_step": 470000}, checkpoint)
    learned, drawn = {}, {}
    for model in (folder, folder.parent / "model.safetensors", checkpoint):
        out = tmp_path / f"out{model.suffix}"
        named = {} if model == folder else {"tokenizer_name": TOKENIZER}
        result = train(output_dir=out, pretrained_model_name_or_path=model, **named)
        assert result.code == 0, result.err
        learned[model.suffix] = (out / "learned_embeds.safetensors").read_bytes()
        # Model and tokenizer come from config.yaml.
        options = ("--prompt", "a <robot>", "--num_inference_steps", "2", "--output_dir", str(out / "drawn"))
        result = icom("generate", "--embedding", str(out / "learned_embeds.safetensors"), *options)
        assert result.code == 0, result.err
        (picture,) = (out / "drawn").glob("*.png")
        with Image.open(picture) as image:
            drawn[model.suffix] = image.tobytes()
    assert learned[".safetensors"] == learned[".ckpt"] == learned[""]
    assert drawn[".safetensors"] == drawn[".ckpt"] == drawn[""]


@pytest.mark.parametrize("change", [half, short_names])
def test_spellings_of_other_tools(
    folder: Path, weights: Weights, tmp_path: Path, change: Callable[[Weights], Weights]
) -> None:
    from icom.models.single_file import examine, load_parts

    save_file(change(weights), tmp_path / "model.safetensors")
    parts = load_parts(examine(tmp_path / "model.safetensors"), torch.float32)
    names = ("text_encoder/model", "vae/diffusion_pytorch_model", "unet/diffusion_pytorch_model")
    for part, name in zip(parts.values(), names, strict=True):
        for key, tensor in load_file(folder / f"{name}.safetensors").items():
            found = part.state_dict()[key.removeprefix("text_model.") if name.startswith("text") else key]
            expected = tensor.half().float() if change is half else tensor
            assert torch.equal(found, expected), key


@pytest.mark.long
def test_full_pipeline_is_the_conversion(train: Run, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    model = folder.parent / "model.safetensors"
    options = {"pretrained_model_name_or_path": model, "tokenizer_name": TOKENIZER, "max_train_steps": 1}
    assert train(output_dir=out, save_as_full_pipeline=True, **options).code == 0
    for name in ("unet/diffusion_pytorch_model", "vae/diffusion_pytorch_model"):
        one, two = load_file(out / f"{name}.safetensors"), load_file(folder / f"{name}.safetensors")
        assert one.keys() == two.keys()
        assert all(torch.equal(one[key], two[key]) for key in one)


def test_params_counts_it(icom: Run, folder: Path) -> None:
    of_file = icom("params", str(folder.parent / "model.safetensors"), "--json").out
    of_folder = icom("params", str(folder), "--json").out
    assert of_file.partition(",")[2] == of_folder.partition(",")[2]


@pytest.mark.parametrize("said", ["yaml", "metadata", "key"])
def test_velocity(weights: Weights, tmp_path: Path, said: str) -> None:
    from icom.models.single_file import examine

    path = tmp_path / "model.safetensors"
    metadata = {"modelspec.prediction_type": "v"} if said == "metadata" else None
    save_file(weights | ({"v_pred": torch.zeros(0)} if said == "key" else {}), path, metadata=metadata)
    if said == "yaml":
        assert examine(path).prediction == "epsilon"
        path.with_suffix(".yaml").write_text("model:\n  params:\n    parameterization: v\n")
    assert examine(path).prediction == "v_prediction"


def sd2(weights: Weights) -> Weights:
    """Only what is looked at: names and shapes."""
    weights["model.diffusion_model.input_blocks.0.0.weight"] = torch.zeros(320, 4, 1, 1)
    weights["model.diffusion_model.input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight"] = torch.zeros(1, 1024)
    kept = {name: tensor for name, tensor in weights.items() if not name.startswith("cond_stage_model.")}
    return kept | {"cond_stage_model.model.token_embedding.weight": torch.zeros(807, 1024)}


def test_stable_diffusion_2_by_its_yaml(weights: Weights, tmp_path: Path) -> None:
    from icom.models.single_file import examine

    path = tmp_path / "model.safetensors"
    save_file(sd2(weights), path)
    for text, architecture in (("{}", "sd2-base"), ("{parameterization: v}", "sd21")):
        path.with_suffix(".yaml").write_text(f"model: {{params: {text}}}")
        assert examine(path).architecture == architecture


def add(name: str, *shape: int) -> Callable[[Weights], Weights]:
    return lambda weights: weights | {name: torch.zeros(shape)}


def only(*starts: str) -> Callable[[Weights], Weights]:
    return lambda weights: {name: tensor for name, tensor in weights.items() if name.startswith(starts)}


def other(**tensors: torch.Tensor) -> Callable[[Weights], Weights]:
    return lambda weights: {name.replace("__", "."): tensor for name, tensor in tensors.items()}


ONE = torch.zeros(2, 4)
REFUSED: dict[str, tuple[Callable[[Weights], Weights], str]] = {
    "lora of kohya": (other(lora_unet_down_blocks_0__lora_down__weight=ONE), "is a LoRA, which changes a model"),
    "lora of peft": (other(unet__to_q__lora_A__weight=ONE), "is a LoRA, which changes a model"),
    "a1111's word": (other(emb_params=ONE), "is a learned word, not a model"),
    "icom's word": (lambda weights: {"<robot>": ONE}, "is a learned word, not a model"),
    "sdxl": (add("conditioner.embedders.1.model.ln_final.bias", 4), "is Stable Diffusion XL"),
    "refiner": (add("conditioner.embedders.0.model.ln_final.bias", 4), "is the refiner of Stable Diffusion XL"),
    "sd3": (other(model__diffusion_model__joint_blocks__0__x=ONE), "is Stable Diffusion 3"),
    "flux": (other(double_blocks__0__img_attn__qkv__weight=ONE), "is FLUX"),
    "controlnet": (other(control_model__time_embed__0__weight=ONE), "is a ControlNet"),
    "vae": (other(decoder__conv_in__weight=ONE), "is a VAE, a single part"),
    "inpainting": (add("model.diffusion_model.input_blocks.0.0.weight", 320, 9, 3, 3), "is an inpainting model (9"),
    "no vae": (only("model.", "cond_stage_model."), "holds no VAE: it is not a whole model"),
    "unet alone": (only("model."), "holds no text encoder and no VAE: it is not a whole model"),
    "another width": (add("model.diffusion_model.input_blocks.0.0.weight", 64, 4, 3, 3), "holds no architecture that"),
    "sd2 without its yaml": (sd2, "does not say whether it predicts noise or velocity. Put the .yaml"),
    "not whole": (
        lambda weights: {name: tensor for name, tensor in weights.items() if "middle_block.0.in_layers.0" not in name},
        "is not whole: weights of the model are missing",
    ),
    "another shape": (
        lambda weights: weights | {"model.diffusion_model.out.2.weight": torch.zeros(4, 4)},
        "Cannot load",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_file_that_is_no_such_model(train: Run, weights: Weights, tmp_path: Path, case: str) -> None:
    change, message = REFUSED[case]
    path = tmp_path / "model.safetensors"
    save_file(change(weights), path)
    result = train(output_dir=tmp_path / "out", pretrained_model_name_or_path=path, tokenizer_name=TOKENIZER)
    assert_refused(result, 1, str(path), message)


def test_file_that_is_damaged(train: Run, weights: Weights, tmp_path: Path) -> None:
    save_file(weights, tmp_path / "model.safetensors")
    torch.save(weights, tmp_path / "model.ckpt")
    (tmp_path / "text.ckpt").write_text("not a checkpoint")
    for name in ("model.safetensors", "model.ckpt", "text.ckpt"):
        cut(tmp_path / name)
        result = train(output_dir=tmp_path / "out", pretrained_model_name_or_path=tmp_path / name)
        assert_refused(result, 1, f"{tmp_path / name}")


class Evil:
    """Unpickled, it would write a file."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.place,)


def test_pickle_runs_nothing(train: Run, weights: Weights, tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    torch.save({"state_dict": weights, "callbacks": Evil(tmp_path / "ran")}, path)
    result = train(output_dir=tmp_path / "out", pretrained_model_name_or_path=path, tokenizer_name=TOKENIZER)
    assert_refused(
        result, 1, f"{path} holds more than weights", ".safetensors version, or convert it where you trust it"
    )
    assert not (tmp_path / "ran").exists()


def test_without_a_tokenizer(train: Run, folder: Path, tmp_path: Path) -> None:
    path = folder.parent / "model.safetensors"
    result = train(output_dir=tmp_path / "out", pretrained_model_name_or_path=path)
    assert_refused(
        result, 1, f"{path} holds no tokenizer", "cannot be reached", "Name one with --tokenizer_name: a folder"
    )


def test_file_that_is_not_there(train: Run, tmp_path: Path) -> None:
    assert not is_hub_id("models/dream.safetensors")
    result = train(output_dir=tmp_path / "out", pretrained_model_name_or_path="models/dream.safetensors")
    assert_refused(result, 1, "No such model folder: models/dream.safetensors", "a single .safetensors or .ckpt file")

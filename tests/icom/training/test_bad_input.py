"""Bad input: the exit code, and a message that says what is wrong, where, and what to do. Nothing heavy runs.

Guards icom.config, icom.data.images and icom.models.loading.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from icom.data.images import BUNDLED_CONCEPTS
from icom.models.loading import BUNDLE
from tests.support.command import Run, assert_refused, cut, peak_memory

# Options.

OPTIONS = [
    ({"num_vectors": 0}, "--num_vectors has to be at least 1, not 0"),
    ({"train_batch_size": -1}, "--train_batch_size has to be at least 1, not -1"),
    ({"resolution": 65}, "--resolution has to be a multiple of 8, not 65. Nearest: 64 or 72"),
    ({"resolution": 0}, "--resolution has to be a multiple of 8, not 0"),
    ({"learning_rate": "nan"}, "--learning_rate has to be a positive number, not nan"),
    ({"adam_beta2": 1}, "--adam_beta2 has to be in [0, 1)"),
    ({"seed": -1}, "--seed has to be between 0 and"),
    ({"initializer_token": ""}, "--initializer_token is empty. Give a word that the model knows"),
    ({"initializer_token": "  "}, "--initializer_token is empty"),
    ({"placeholder_token": "my robot"}, "--placeholder_token has to be one word without spaces"),
    ({"placeholder_token": ""}, "--placeholder_token has to be one word"),
    ({"mixed_precision": "fp16"}, "fp16 does not train on CPUs", "Use --mixed_precision bf16 or no"),
    ({"mixed_precision": "fp17"}, "invalid choice 'fp17'", "bf16"),
    ({"num_vectors": "many"}, "Error parsing --num_vectors", "'many'"),
    ({"num_vectos": 3}, "Unrecognized options: --num_vectos", "Perhaps you meant: --num_vectors"),
    ({"initializer_token": None}, "Missing: initializer_token", "--initializer_token toy", "--config FILE"),
    ({"placeholder_token": None, "train_data_dir": None}, "Missing: placeholder_token, train_data_dir"),
    ({"config": "nowhere.yaml"}, "No such configuration file: nowhere.yaml", "--print_config"),
    ({"enable_xformers_memory_efficient_attention": True}, "xFormers cannot be used here", "Drop --enable_xf"),
    # These need the model.
    ({"placeholder_token": "toy"}, "vocabulary has 'toy' already", "for instance <my-toy>"),
    ({"placeholder_token": "Toy"}, "vocabulary has 'Toy' already", "for instance <my-toy>"),
    ({"placeholder_token": "toy</w>", "num_vectors": 2}, "vocabulary has 'toy</w>' already", "instance <my-toy>"),
    ({"placeholder_token": "<|endoftext|>"}, "vocabulary has '<|endoftext|>' already", "instance <my-endoftext>"),
    ({"placeholder_token": "hoto"}, "'a photo of a hoto' becomes 'a</w> p</w> hoto of</w>", "for instance <my-hoto>"),
    ({"placeholder_token": "x<|endoftext|>"}, "changes how the captions are read", "for instance <my-x-endoftext>"),
    ({"initializer_token": "a red star"}, "is 3 tokens (a", "--num_vectors is 1", "Set --num_vectors 3"),
    ({"num_vectors": 90}, "--num_vectors 90 makes captions of 99 tokens; the text encoder reads 77", "At most 68"),
]


@pytest.mark.parametrize("options, message", [(row[0], row[1:]) for row in OPTIONS], ids=str)
def test_options(train: Run, tmp_path: Path, options: dict[str, object], message: tuple[str, ...]) -> None:
    assert_refused(train(output_dir=tmp_path, **options), 2, *message)
    assert not list(tmp_path.glob("*"))


def test_words_are_checked_before_the_weights_are_read(train: Run, tmp_path: Path) -> None:
    model = copy_of_the_model(tmp_path)
    (model / "unet/diffusion_pytorch_model.safetensors").write_bytes(b"")
    result = train(output_dir=tmp_path, pretrained_model_name_or_path=model, placeholder_token="toy")
    assert_refused(result, 2, "vocabulary has 'toy' already")


def test_precision_of_accelerate_that_cpus_lack(train: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    result = train(output_dir=tmp_path, mixed_precision=None, pretrained_model_name_or_path="random:tiny")
    assert_refused(result, 2, "Accelerate is configured for fp8; set --mixed_precision to auto, bf16 or no")


def test_unknown_command(icom: Run) -> None:
    assert_refused(icom("trian"), 2, "trian", "train, tune, finetune")


# The YAML file.

YAML = [
    ("resolutoin: 64", "Unknown option `resolutoin` in", "Did you mean `resolution`?"),
    ("repeats: many", "Bad value for `repeats` in", "'many'"),
    ("repeats: 1.5", "Bad value for `repeats` in", "1.5"),
    ("center_crop: [1, 2]", "Bad value for `center_crop` in"),
    ("lr_scheduler: sloping", "Bad value for `lr_scheduler` in", "'sloping'", "'cosine'"),
    ("num_vectors: 0", "--num_vectors has to be at least 1"),
    ("logging_dir: ${nowhere}", "Bad value for `logging_dir` in", "'nowhere' not found"),
    ("repeats: [", "Cannot read the configuration file", "line 2"),
    ("- repeats", "has to hold `option: value` lines"),
]


@pytest.mark.parametrize("text, message", [(row[0], row[1:]) for row in YAML], ids=str)
def test_yaml(train: Run, tmp_path: Path, text: str, message: tuple[str, ...]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text + "\n")
    assert_refused(train(output_dir=tmp_path / "out", config=file), 2, *message)
    assert not (tmp_path / "out").exists()


READS_THE_ENVIRONMENT = [
    "validation_prompt: ${oc.env:A_SECRET}",
    "validation_prompt: a photo of ${oc.env:A_SECRET,nothing} on the beach",
    "validation_prompt: ${oc.env:NOT_THERE_AT_ALL,default}",
    "validation_prompt: ${oc.decode:${oc.env:A_SECRET}}",
    "validation_prompt: '${oc.select:nowhere,${oc.env:A_SECRET}}'",
    "pretrained_model_name_or_path: ${oc.env:A_SECRET}",
    "num_vectors: ${oc.env:A_SECRET}",
    "hub_token: ${oc.env:A_SECRET}",
    "revision: ${oc.env:A_SECRET}\nvalidation_prompt: ${revision}",
    "train_data_dir: ${oc.env:A_SECRET}",
]
COMMANDS: dict[str, tuple[str, ...]] = {
    "train": ("train", "--print_config"),
    "provision": ("provision", "--cluster=pair", "--dry_run"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_yaml_may_not_read_the_environment(
    icom: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Whatever way it is asked for; a flag, whose `${` is text, may hold it."""
    from omegaconf import OmegaConf

    monkeypatch.setenv("A_SECRET", "hf_OfTheEnvironment")
    file = tmp_path / "run.yaml"
    for case in READS_THE_ENVIRONMENT:
        if command == "train":
            needed = {"train_data_dir": "bundled", "placeholder_token": "<x>", "initializer_token": "toy"}
            text = "\n".join([case, *(f"{name}: {value}" for name, value in needed.items() if name not in case)])
        else:
            text = re.sub(r"^\w+(?=: )", "ami", case.splitlines()[0])
        file.write_text(text + "\n")
        result = icom(*COMMANDS[command], f"--config={file}")
        variable = "NOT_THERE_AT_ALL" if "NOT_" in text else "A_SECRET"
        assert_refused(result, 2, f"{file} asks for the environment variable '{variable}'", "give it as a flag")
        assert "hf_OfTheEnvironment" not in result.out + result.err
    # Others who use OmegaConf in this process still have it.
    assert OmegaConf.create({"a": "${oc.env:A_SECRET}"}).a == "hf_OfTheEnvironment"


SECRET = "hf_ThisIsTheSecretOfTheTests"
TOKEN_ELSEWHERE = [
    f"hub_token: {SECRET}\nvalidation_prompt: ${{hub_token}}",
    f"hub_token: {SECRET}\nvalidation_prompt: by ${{oc.select:hub_token}} for me",
    f"hub_token: ${{validation_prompt}}\nvalidation_prompt: {SECRET}",
    f"hub_token: {SECRET}\nvalidation_prompt: ${{.hub_token}}",
    f"hub_token: {SECRET}\nrevision: ${{hub_token}}\nvalidation_prompt: ${{revision}}",
]


def test_token_that_would_be_written(train: Run, tmp_path: Path) -> None:
    file, out = tmp_path / "run.yaml", tmp_path / "out"
    for text in TOKEN_ELSEWHERE:
        file.write_text(text)
        result = train(output_dir=out, config=file)
        option = "--revision" if "revision" in text else "--validation_prompt"
        assert_refused(result, 2, f"{option} contains --hub_token: it would be written to config.yaml")
        assert SECRET not in result.out + result.err
    result = train(output_dir=out, hub_token=SECRET, hub_model_id=f"me/{SECRET}")
    assert_refused(result, 2, "--hub_model_id contains --hub_token")
    assert not out.exists()


def test_yaml_without_a_required_value(icom: Run, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("train_data_dir: bundled\nplaceholder_token: <x>\ninitializer_token: ???\n")
    assert_refused(icom("train", f"--config={file}"), 2, "Missing: initializer_token.", "--config FILE")


# The model.


def copy_of_the_model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BUNDLE, tmp_path / "model"))


def change_weights(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


TEXT, UNET, VAE = (
    f"{part}.safetensors"
    for part in ("text_encoder/model", "unet/diffusion_pytorch_model", "vae/diffusion_pytorch_model")
)
DAMAGES: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "no unet": (lambda model: shutil.rmtree(model / "unet"), ("lacks unet/config.json, unet/diff", "layout")),
    "no vae weights": (lambda model: (model / VAE).unlink(), (f"lacks {VAE}.",)),
    "no tokenizer": (lambda model: shutil.rmtree(model / "tokenizer"), ("lacks tokenizer/.",)),
    "no vocabulary": (
        lambda model: (model / "tokenizer/tokenizer.json").unlink(),
        ("/model/tokenizer lacks tokenizer.json (or vocab.json and merges.txt). Fetch", "--tokenizer_name"),
    ),
    "cut vocabulary": (
        lambda model: cut(model / "tokenizer/tokenizer.json"),
        ("Cannot load the tokenizer in", "/model/tokenizer", "fetch the model again"),
    ),
    "empty vocabulary": (
        lambda model: (model / "tokenizer/tokenizer.json").write_text("{}"),
        ("Cannot load the tokenizer in", "lacks 'added_tokens'", "fetch the model again"),
    ),
    "cut text encoder": (
        lambda model: cut(model / TEXT),
        ("Cannot load the text_encoder in", "incomplete metadata", "fetch the model again"),
    ),
    "cut unet": (lambda model: cut(model / UNET), ("Cannot load the unet in", "fetch the model again")),
    "cut config": (
        lambda model: cut(model / "vae/config.json"),
        ("Cannot load the vae in", "not a valid JSON file", "fetch the model again"),
    ),
    "cut scheduler": (
        lambda model: cut(model / "scheduler/scheduler_config.json"),
        ("Cannot load the scheduler in", "not a valid JSON file"),
    ),
    # Without our check the loaders make these weights up, and train with noise or crash.
    "text encoder lacks a weight": (
        lambda model: change_weights(model / TEXT, lambda weights: weights.pop(min(weights))),
        ("weights of the text_encoder in", "do not fit its config.json: 1 are missing", "Fetch the model again"),
    ),
    "unet lacks weights": (
        lambda model: change_weights(model / UNET, lambda weights: [weights.pop(k) for k in sorted(weights)[:2]]),
        ("weights of the unet in", "2 are missing or of another shape (", ", …)"),
    ),
    "weights of the vae in the unet": (
        lambda model: shutil.copy(model / VAE, model / UNET),
        ("the unet in", "again"),
    ),
    "text encoder of another shape": (
        lambda model: change_weights(model / TEXT, lambda weights: weights.update({min(weights): torch.zeros(3)})),
        ("weights of the text_encoder in", "of another shape"),
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_model(train: Run, tmp_path: Path, damage: str) -> None:
    break_it, message = DAMAGES[damage]
    model = copy_of_the_model(tmp_path)
    break_it(model)
    result = train(output_dir=tmp_path / "out", pretrained_model_name_or_path=model)
    assert_refused(result, 1, str(model), *message)


@pytest.mark.parametrize(
    "name, message",
    [
        ("./no/such/folder", ("No such model folder: ./no/such/folder", "Hub id (owner/name), or `bundled`")),
        ("owner/name", ("Cannot get owner/name: the Hub (http", "cannot be reached", "Check the network or proxy")),
        ("random:sd9", ("No architecture 'sd9'", "sd15")),
    ],
)
def test_model_that_is_nowhere(train: Run, tmp_path: Path, name: str, message: tuple[str, ...]) -> None:
    assert_refused(train(output_dir=tmp_path, pretrained_model_name_or_path=name), 1, *message)


@pytest.mark.parametrize("words", [9, 1, -1])
def test_tokenizer_of_another_model(train: Run, icom: Run, tmp_path: Path, words: int) -> None:
    """Larger or smaller than the text encoder's table."""
    tokenizer = copy_of_the_model(tmp_path) / "tokenizer"
    document = json.loads((tokenizer / "tokenizer.json").read_text())
    if words > 0:
        document["added_tokens"] += [
            document["added_tokens"][0] | {"id": 807 + number, "content": f"word{number}", "special": False}
            for number in range(words)
        ]
    else:
        model = document["model"]
        last = next(word for word, number in model["vocab"].items() if number == 804)
        model["merges"] = [pair for pair in model["merges"] if last != "".join(pair)]
        del model["vocab"][last]
        for number, special in enumerate(document["added_tokens"], 804):
            model["vocab"][special["content"]] = special["id"] = number
    (tokenizer / "tokenizer.json").write_text(json.dumps(document))
    message = f"tokenizer has {807 + words} tokens and the text encoder's table 807 rows", "Drop --tokenizer_name"
    assert_refused(train(output_dir=tmp_path / "out", tokenizer_name=tokenizer), 2, *message)
    result = icom("generate", "--prompt=a toy", f"--tokenizer_name={tokenizer}", f"--output_dir={tmp_path / 'drawn'}")
    assert_refused(result, 2, *message)


# Pictures.


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A folder with one good picture."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    shutil.copy(BUNDLED_CONCEPTS / "blue-heart" / "0.png", folder / "good.png")
    return folder


def test_no_picture_folder(train: Run, tmp_path: Path) -> None:
    result = train(output_dir=tmp_path, train_data_dir=tmp_path / "nowhere")
    assert_refused(result, 1, f"No such picture folder: {tmp_path / 'nowhere'}.", "--train_data_dir", "`bundled`")


def test_no_such_bundled_concept(train: Run, tmp_path: Path) -> None:
    result = train(output_dir=tmp_path, train_data_dir="bundled:pink-elephant")
    assert_refused(result, 1, "No bundled concept 'pink-elephant'", "blue-heart, green-star", "bundled:NAME")


def test_picture_instead_of_a_folder(train: Run, tmp_path: Path, pictures: Path) -> None:
    result = train(output_dir=tmp_path, train_data_dir=pictures / "good.png")
    assert_refused(result, 1, f"Not a picture folder but a file: {pictures / 'good.png'}.")


def test_empty_picture_folder(train: Run, tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    (folder / ".DS_Store").touch()
    result = train(output_dir=tmp_path, train_data_dir=folder)
    assert_refused(result, 1, f"The picture folder {folder} is empty. Put 3 to 30 pictures into it")
    (folder / "inner").mkdir()
    assert_refused(
        train(output_dir=tmp_path, train_data_dir=folder), 1, "only holds folders (1: inner); name one of them"
    )


def test_all_bad_pictures_are_named_at_once(train: Run, tmp_path: Path, pictures: Path) -> None:
    (pictures / "notes.txt").write_text("five toys")
    (pictures / "nothing.png").touch()
    Image.open(pictures / "good.png").convert("RGB").save(pictures / "cut.jpg")
    cut(pictures / "cut.jpg")
    result = train(output_dir=tmp_path, train_data_dir=pictures)
    assert_refused(
        result,
        1,
        f"In the picture folder {pictures}, repair or remove:",
        "cut.jpg: damaged (",
        "nothing.png: not a picture",
    )
    assert "good.png" not in result.err
    for name in ("cut.jpg", "nothing.png"):
        (pictures / name).unlink()
    result = train(output_dir=tmp_path, train_data_dir=pictures)
    assert_refused(
        result,
        1,
        f"The captions in {pictures} cannot be used; mend them, or do without (--caption_templates builtin):",
        "1: notes.txt: captions without their pictures",
    )


def test_what_is_no_picture_in_a_picture_folder(train: Run, tmp_path: Path, pictures: Path) -> None:
    """Links to nowhere are refused; folders are counted and named, and training goes on."""
    for name in ("best", "more", ".git"):
        (pictures / name).mkdir()
        shutil.copy(pictures / "good.png", pictures / name / "other.png")
    result = train(output_dir=tmp_path / "out", train_data_dir=pictures, max_train_steps=1)
    assert result.code == 0
    assert f"icom: passing over 2 files in the folders of {pictures} (2: best, more)." in result.err

    (pictures / "gone.jpg").symlink_to(tmp_path / "nowhere.jpg")
    result = train(output_dir=tmp_path / "out", train_data_dir=pictures)
    assert_refused(result, 1, "1: gone.jpg: links to files that are not there")


def test_only_links_to_nowhere(train: Run, tmp_path: Path) -> None:
    folder = tmp_path / "links"
    folder.mkdir()
    for number in range(25):
        (folder / f"{number:02}.jpg").symlink_to(tmp_path / "nowhere.jpg")
    result = train(output_dir=tmp_path / "out", train_data_dir=folder)
    assert_refused(result, 1, "25: 00.jpg, 01.jpg", "19.jpg, …: links to files that are not there")


def test_heic_without_what_reads_it(
    train: Run, tmp_path: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    (pictures / "IMG_0001.HEIC").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(99))
    result = train(output_dir=tmp_path / "out", train_data_dir=pictures)
    assert_refused(
        result, 1, "IMG_0001.HEIC: HEIC; convert it to JPEG, or install", "python -m pip install pillow-heif"
    )


def test_picture_of_a_kind_that_pillow_does_not_read(train: Run, tmp_path: Path, pictures: Path) -> None:
    """A TIFF header with nothing that Pillow knows."""
    (pictures / "half.tif").write_bytes(b"II*\0\x08\0\0\0" + bytes(99))
    result = train(output_dir=tmp_path / "out", train_data_dir=pictures)
    assert_refused(result, 1, "half.tif: not a picture that Pillow can read; save it as PNG with 8 bits")


@pytest.mark.parametrize("side, size", [(30_000, "too many pixels"), (12_000, "12000 x 12000 pixels are too many")])
def test_huge_picture_is_not_decoded(train: Run, tmp_path: Path, pictures: Path, side: int, size: str) -> None:
    (pictures / "huge.png").write_bytes(png(side))
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    memory, began = peak_memory(), time.process_time()
    result = train(output_dir=tmp_path, train_data_dir=pictures)
    assert_refused(result, 1, "huge.png: ", size, "(100 megapixels at most); scale it down")
    assert peak_memory() - memory < 50, "it was decoded"  # at one byte per pixel 137 MB or more
    assert time.process_time() - began < 5


def png(side: int) -> bytes:
    """A valid square PNG of one bit per pixel, all black."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes((1 + side // 8) * side), 1)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_the_huge_picture_is_a_valid_one(tmp_path: Path) -> None:
    (tmp_path / "small.png").write_bytes(png(800))
    with Image.open(tmp_path / "small.png") as image:
        image.load()
        assert (image.mode, image.size) == ("1", (800, 800))


# The output folder.


@pytest.mark.parametrize("below", ["", "deep/er"])
def test_output_folder_below_a_file(train: Run, tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("precious")
    result = train(output_dir=tmp_path / "file" / below)
    assert_refused(result, 1, f"{tmp_path / 'file'} is a file, no folder. Choose another --output_dir")
    assert (tmp_path / "file").read_text() == "precious"

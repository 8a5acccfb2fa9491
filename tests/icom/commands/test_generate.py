"""`icom generate`, and the pictures, plots and texts that a training run leaves.

Guards icom.commands.generate and icom.training.report.
"""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

from icom.config.generate import GenerateConfig
from icom.methods.embedding_file import save_embedding
from icom.models import loading, pipelines
from icom.training.report import A1111_SAMPLERS, grid, loss_curve, model_card, running_mean
from tests.support.command import Result

Command = Callable[..., Result]
EMBEDDING = "learned_embeds.safetensors"


@pytest.fixture
def rows(tmp_path: Path) -> dict[str, Path]:
    """Embedding files for the bundled model (width 128): two words of one vector, and one of three."""
    generator = torch.Generator().manual_seed(0)
    files = {}
    for name, vectors in (("one", 1), ("two", 1), ("three", 3)):
        files[name] = tmp_path / f"{name}.safetensors"
        save_embedding(files[name], f"<{name}>", torch.randn(vectors, 128, generator=generator))
    return files


@pytest.fixture
def draw(icom: Command, tmp_path: Path) -> Callable[..., dict[str, bytes]]:
    """Run `icom generate` in few steps and return its files: `draw("--prompt", "a toy")`."""
    numbers: Iterator[int] = iter(range(1000))

    def run(*arguments: str, steps: int = 3) -> dict[str, bytes]:
        output = tmp_path / f"pictures-{next(numbers)}"
        result = icom("generate", "--num_inference_steps", str(steps), "--output_dir", str(output), *arguments)
        assert result.code == 0, result.err
        return {path.name: path.read_bytes() for path in output.iterdir()}

    return run


Draw = Callable[..., dict[str, bytes]]


def pixels(content: bytes) -> np.ndarray[Any, Any]:
    with Image.open(io.BytesIO(content)) as image:
        return np.array(image.convert("RGB"))


def diffusers_picture(pipeline: Any, prompt: str, seed: int, steps: int) -> np.ndarray[Any, Any]:
    """What diffusers alone makes of it, by its own documentation."""
    pipeline.set_progress_bar_config(disable=True)
    image = pipeline(
        prompt, num_inference_steps=steps, guidance_scale=7.5, generator=torch.Generator("cpu").manual_seed(seed)
    ).images[0]
    return np.array(image)


def diffusers_pipeline(folder: Path) -> Any:
    """diffusers' pipeline with the sampler that `icom generate` takes by default."""
    from diffusers import DPMSolverMultistepScheduler, StableDiffusionPipeline

    loading.quiet_libraries()
    pipeline = StableDiffusionPipeline.from_pretrained(str(folder), safety_checker=None)
    pipeline.scheduler = DPMSolverMultistepScheduler.from_config(pipeline.scheduler.config)
    for part in (pipeline.unet, pipeline.vae):
        part.to(memory_format=torch.channels_last)  # as we do; else one pixel in 6000 is rounded to its neighbour
    return pipeline


# A picture depends on its prompt and seed alone.


def test_same_seed_same_picture_whatever_is_drawn_beside_it(draw: Draw, rows: dict[str, Path]) -> None:
    embedding = ("--embedding", str(rows["one"]))
    alone = draw(*embedding, "--prompt", "a photo of <one>", "--seed", "5")
    assert list(alone) == ["000-a-photo-of-one-seed5.png"]
    (picture,) = alone.values()
    assert draw(*embedding, "--prompt", "a photo of <one>", "--seed", "5") == alone

    crowd = draw(*embedding, "--prompt", "a toy", "a photo of <one>", "a car", "--seed", "9", "5", "1")
    assert len(crowd) == 9
    assert crowd["001-a-photo-of-one-seed5.png"] == picture
    assert len(set(crowd.values())) == 9
    counted = draw(*embedding, "--prompt", "a photo of <one>", "--seed", "4", "--num_images_per_prompt", "2")
    assert sorted(counted) == ["000-a-photo-of-one-seed4.png", "000-a-photo-of-one-seed5.png"]
    assert counted["000-a-photo-of-one-seed5.png"] == picture


def test_stochastic_sampler_is_seeded_too(draw: Draw) -> None:
    first = draw("--prompt", "a toy", "--scheduler", "euler_a")
    torch.rand(7)  # a sampler that took the global generator would notice
    second = draw("--prompt", "a car", "a toy", "--scheduler", "euler_a")
    assert first["000-a-toy-seed0.png"] == second["001-a-toy-seed0.png"]


def test_embedding_changes_the_picture(draw: Draw, rows: dict[str, Path], tmp_path: Path) -> None:
    save_embedding(tmp_path / "other.safetensors", "<one>", load_file(rows["two"])["<two>"])
    pictures = [
        draw("--prompt", "a photo of <one>", "--embedding", str(path))["000-a-photo-of-one-seed0.png"]
        for path in (rows["one"], tmp_path / "other.safetensors")
    ]
    assert pictures[0] != pictures[1]


@pytest.mark.parametrize(
    "options",
    [("--negative_prompt", "a car"), ("--guidance_scale", "1"), ("--resolution", "32"), ("--scheduler", "ddim")],
)
def test_options_have_an_effect(draw: Draw, options: tuple[str, str]) -> None:
    plain = draw("--prompt", "a toy")["000-a-toy-seed0.png"]
    changed = draw("--prompt", "a toy", *options)["000-a-toy-seed0.png"]
    assert changed != plain
    side = 32 if "--resolution" in options else 64
    assert pixels(changed).shape == (side, side, 3)


@pytest.mark.parametrize("scheduler", ["model", *pipelines.SAMPLERS])
def test_every_sampler_draws(draw: Draw, scheduler: str) -> None:
    (picture,) = draw("--prompt", "a toy", "--scheduler", scheduler, steps=4).values()
    assert pixels(picture).std() > 1  # neither black nor of one colour


def test_samplers_are_the_ones_on_offer() -> None:
    import diffusers

    assert set(get_args(get_type_hints(GenerateConfig)["scheduler"])) == {"model", *pipelines.SAMPLERS}
    assert all(hasattr(diffusers, name) for name in pipelines.SAMPLERS.values())
    assert set(A1111_SAMPLERS) == set(pipelines.SAMPLERS)


# Prompts, files, grid.


def test_prompts_file_and_grid(draw: Draw, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("# heading\n\n  a car \n\t\n  # more\nein Männlein\n", encoding="utf-8")
    files = draw(*("--prompt", "a toy", "--prompts_file", str(prompts)), *("--seed", "1", "2", "--grid"), steps=2)
    assert set(files) == {
        *(f"{prompt}-seed{seed}.png" for prompt in ("000-a-toy", "001-a-car", "002-ein-m-nnlein") for seed in (1, 2)),
        "grid.png",
    }
    sheet = pixels(files["grid.png"])
    assert sheet.shape == (3 * 64 + 2 * 4, 2 * 64 + 4, 3)
    assert (sheet[68:132, 68:132] == pixels(files["001-a-car-seed2.png"])).all()
    assert (sheet[64:68] == 255).all()


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ((), 2, "No prompt"),
        (("--prompts_file", "nowhere.txt"), 2, "nowhere.txt"),
        (("--prompt", "x", "--embedding", "nowhere.safetensors"), 1, "nowhere.safetensors"),
        (("--prompt", "x", "--num_inference_steps", "0"), 2, "--num_inference_steps"),
        (("--prompt", "x", "--resolution", "65"), 2, "64 or 72"),
        (("--prompt", "x", "--scheduler", "magic"), 2, "magic"),
    ],
)
def test_wrong_usage(icom: Command, tmp_path: Path, options: tuple[str, ...], code: int, message: str) -> None:
    result = icom("generate", "--output_dir", str(tmp_path / "out"), *options)
    assert result.code == code
    assert message in result.err
    assert "Traceback" not in result.err
    assert not (tmp_path / "out").exists()


def test_embedding_of_another_model(icom: Command, tmp_path: Path) -> None:
    save_embedding(tmp_path / "wide.safetensors", "<wide>", torch.zeros(1, 768))
    result = icom(
        *("generate", "--prompt", "a <wide>", "--embedding", str(tmp_path / "wide.safetensors")),
        *("--output_dir", str(tmp_path / "out")),
    )
    assert result.code == 1
    assert "width 768" in result.err
    assert "bundled has 128" in result.err


def test_two_embeddings_together_and_the_same_one_twice(
    draw: Draw, icom: Command, rows: dict[str, Path], tmp_path: Path
) -> None:
    files = draw("--prompt", "a <one> on a <three>", "--embedding", str(rows["one"]), str(rows["three"]))
    pipeline = diffusers_pipeline(loading.BUNDLE)
    pipeline.load_textual_inversion(str(rows["one"]))
    pipeline.load_textual_inversion(str(rows["three"]))
    expected = diffusers_picture(pipeline, "a <one> on a <three>", 0, 3)
    assert (pixels(files["000-a-one-on-a-three-seed0.png"]) == expected).all()

    copy = tmp_path / "copy.safetensors"
    shutil.copy(rows["one"], copy)
    output = str(tmp_path / "out")
    result = icom("generate", "--prompt", "x", "--output_dir", output, "--embedding", str(rows["one"]), str(copy))
    assert result.code == 1
    assert f"{copy} holds <one>, which is known already" in result.err


# The same as diffusers.


@pytest.mark.parametrize("name", ["one", "three"])
def test_same_picture_as_diffusers_own_loader(draw: Draw, rows: dict[str, Path], name: str) -> None:
    prompt = f"a photo of <{name}> on the beach"
    (ours,) = draw("--prompt", prompt, "--embedding", str(rows[name]), "--seed", "3", steps=5).values()
    pipeline = diffusers_pipeline(loading.BUNDLE)
    pipeline.load_textual_inversion(str(rows[name]))
    assert (pixels(ours) == diffusers_picture(pipeline, prompt, 3, 5)).all()
    # Every vector has its say.
    encoder, tokenizer = pipeline.text_encoder, pipeline.tokenizer
    expanded = pipeline.maybe_convert_prompt(prompt, tokenizer)
    words = ["<three>", "<three>_1", "<three>_2"] if name == "three" else ["<one>"]
    assert [token for token in tokenizer.tokenize(expanded) if token.startswith("<" + name)] == words
    assert len(encoder.get_input_embeddings().weight) == len(tokenizer)


def test_full_pipeline_draws_the_same_picture(train: Command, icom: Command, draw: Draw, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = train(output_dir=out, save_as_full_pipeline=True, num_vectors=2, seed=4)
    assert result.code == 0, result.err
    pipeline = diffusers_pipeline(loading.BUNDLE)
    pipeline.load_textual_inversion(str(out / EMBEDDING))
    expected = diffusers_picture(pipeline, "a photo of <robot>", 0, 3)
    whole = diffusers_pipeline(out)
    assert type(whole.scheduler).__name__ == "DPMSolverMultistepScheduler"
    # diffusers expands words of several vectors where the tokenizer knows <robot>_1: saved with it.
    assert (diffusers_picture(whole, "a photo of <robot>", 0, 3) == expected).all()
    files = draw("--prompt", "a photo of <robot>", "--pretrained_model_name_or_path", str(out))
    assert (pixels(files["000-a-photo-of-robot-seed0.png"]) == expected).all()
    # The scheduler is the model's own, not the one we train with.
    config = (loading.BUNDLE / "scheduler" / "scheduler_config.json").read_text()
    saved = (out / "scheduler" / "scheduler_config.json").read_text()
    assert yaml.safe_load(saved)["_class_name"] == yaml.safe_load(config)["_class_name"]

    both = ("--embedding", str(out / EMBEDDING), "--pretrained_model_name_or_path", str(out))
    result = icom("generate", "--prompt", "x", "--output_dir", str(tmp_path / "g"), *both)
    assert result.code == 1
    assert "--save_as_full_pipeline" in result.err


def test_model_of_the_run_is_found_beside_the_embedding(
    train: Command, icom: Command, draw: Draw, tmp_path: Path
) -> None:
    """A model that differs from the bundled one in its VAE alone: the picture tells which of them was taken."""
    from safetensors.torch import save_file

    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(loading.BUNDLE, model)
    weights = model / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    tensors["decoder.conv_out.bias"] += 0.5
    save_file(tensors, weights, {"format": "pt"})
    assert train(output_dir=out, pretrained_model_name_or_path=model).code == 0

    arguments = ("--prompt", "a photo of <robot>", "--embedding", str(out / EMBEDDING))
    found = draw(*arguments)
    assert found == draw(*arguments, "--pretrained_model_name_or_path", str(model))
    assert found != draw(*arguments, "--pretrained_model_name_or_path", "bundled")

    (out / "config.yaml").unlink()
    assert draw(*arguments) == draw(*arguments, "--pretrained_model_name_or_path", "bundled")
    config = {"pretrained_model_name_or_path": str(tmp_path / "gone"), "tokenizer_name": str(tmp_path / "gone")}
    (out / "config.yaml").write_text(yaml.safe_dump(config))
    result = icom("generate", *arguments, "--output_dir", str(tmp_path / "g"))
    assert result.code == 1
    assert str(tmp_path / "gone") in result.err
    # Naming another model drops all that the run says about its own.
    draw(*arguments, "--pretrained_model_name_or_path", "bundled")


@pytest.mark.parametrize("content", ["a: [", "- a\n- b\n", "\x00\x01", "pretrained_model_name_or_path: [1]\n"])
def test_malformed_config_beside_the_embedding(
    icom: Command, rows: dict[str, Path], tmp_path: Path, content: str
) -> None:
    """It may be another tool's; the word can be drawn without."""
    (tmp_path / "config.yaml").write_text(content)
    arguments = ("--prompt", "a <one>", "--num_inference_steps=1", "--embedding", str(rows["one"]))
    result = icom("generate", *arguments, "--output_dir", str(tmp_path / "out"))
    assert result.code == 0, result.err
    assert (tmp_path / "out" / "000-a-one-seed0.png").is_file()
    told = f"{tmp_path / 'config.yaml'}" in result.err and "going on without" in result.err
    assert told == (not content.startswith("pretrained"))


# What a picture says of itself.


def text_chunks(content: bytes) -> dict[str, str]:
    """tEXt and iTXt of a PNG, by its specification alone."""
    place, found = 8, {}
    while place < len(content):
        length = int.from_bytes(content[place : place + 4], "big")
        kind, data = content[place + 4 : place + 8], content[place + 8 : place + 8 + length]
        keyword, _, rest = data.partition(b"\0")
        if kind == b"tEXt":
            found[keyword.decode("latin-1")] = rest.decode("latin-1")
        elif kind == b"iTXt":
            assert rest[:2] == b"\0\0"  # not compressed
            found[keyword.decode("latin-1")] = rest[2:].split(b"\0", 2)[2].decode()
        place += 12 + length
    return found


def read_as_a1111_does(text: str) -> dict[str, str]:
    """The last line holds `Name: value` pairs; values with commas, colons or line breaks are JSON strings."""
    *lines, last = text.split("\n")
    pairs = re.findall(r'\s*(\w[\w \-/]+):\s*("(?:\\.|[^\\"])+"|[^,]*)(?:,|$)', last)
    values = {name: json.loads(value) if value.startswith('"') else value for name, value in pairs}
    prompt, _, negative = "\n".join(lines).partition("\nNegative prompt: ")
    return values | {"prompt": prompt, "negative": negative}


def test_pictures_say_what_they_were_drawn_with(draw: Draw, rows: dict[str, Path], tmp_path: Path) -> None:
    model = tmp_path / "my model, v1: final"
    shutil.copytree(loading.BUNDLE, model)
    prompts = ("a photo of <one>, close-up", "ein M\u00e4nnlein, \U0001f4a1 <one>")
    files = draw(
        *("--prompt", *prompts, "--negative_prompt", "blurry: a, b", "--embedding", str(rows["one"]), "--grid"),
        *("--seed", "41", "--num_images_per_prompt", "2", "--resolution", "32", "--scheduler", "euler_a"),
        *("--guidance_scale", "7", "--pretrained_model_name_or_path", str(model)),
        steps=2,
    )
    for prompt, name in zip(prompts, ("000-a-photo-of-one-close-up", "001-ein-m-nnlein-one"), strict=True):
        content = files[f"{name}-seed42.png"]
        (text,) = text_chunks(content).values()
        with Image.open(io.BytesIO(content)) as image:
            assert image.info == {"parameters": text}
        values = read_as_a1111_does(text)
        assert values.pop("Version").startswith("icom ")
        assert values == {
            "prompt": prompt,
            "negative": "blurry: a, b",
            "Steps": "2",
            "Sampler": "Euler a",
            "CFG scale": "7",
            "Seed": "42",
            "Size": "32x32",
            "Model": "my model, v1: final",
        }
    (plain,) = draw("--prompt", "a toy", "--scheduler", "model", "--resolution", "32", steps=1).values()
    assert text_chunks(plain)["parameters"].startswith("a toy\nSteps: 1, Sampler: ")
    assert "Model: bundled, Version: icom" in text_chunks(plain)["parameters"]


# Pictures of a training run.


@pytest.mark.long
def test_validation_pictures_leave_training_alone(train: Command, tmp_path: Path) -> None:
    plain, watched = tmp_path / "plain", tmp_path / "watched"
    assert train(output_dir=plain, max_train_steps=5).code == 0
    validation = {"validation_prompt": "a photo of <robot>", "validation_steps": 2, "num_validation_images": 2}
    pictures = {"num_comparison_images": 2}
    assert train(output_dir=watched, max_train_steps=5, **validation, **pictures).code == 0
    assert (plain / EMBEDDING).read_bytes() == (watched / EMBEDDING).read_bytes()
    assert sorted(path.name for path in (watched / "validation").iterdir()) == ["step-2.png", "step-4.png"]
    two, four = (pixels((watched / "validation" / f"step-{step}.png").read_bytes()) for step in (2, 4))
    assert two.shape == (64, 132, 3)
    assert (two != four).any()
    assert not (plain / "validation").exists()

    comparison = pixels((watched / "comparison.png").read_bytes())
    assert comparison.shape == (132, 132, 3)
    assert (comparison[:64] != comparison[68:]).any()  # before and after


def test_comparison_shows_the_learned_word(train: Command, draw: Draw, tmp_path: Path) -> None:
    """Its lower row is what `icom generate` draws with the embedding and the run's seed."""
    assert train(output_dir=tmp_path / "out", num_comparison_images=1, seed=11).code == 0
    embedding = str(tmp_path / "out" / EMBEDDING)
    (picture,) = draw("--embedding", embedding, "--prompt", "a photo of <robot>", "--seed", "11", steps=25).values()
    comparison = pixels((tmp_path / "out" / "comparison.png").read_bytes())
    assert (comparison[68:] == pixels(picture)).all()


# Report.


@pytest.mark.parametrize("count", [0, 1, 50])
def test_loss_curve(tmp_path: Path, count: int) -> None:
    path = tmp_path / "loss.png"
    loss_curve([{"step": step, "loss": 1 / (step + 1)} for step in range(count)], path)
    with Image.open(path) as image:
        assert image.size == (960, 480)
        blue = (np.asarray(image.convert("RGB")) == (31, 119, 180)).all(-1).sum()
    assert (blue > 300) == (count == 50)


def test_running_mean() -> None:
    assert running_mean([]) == []
    assert running_mean([3.0] * 5) == pytest.approx([3.0] * 5)
    means = running_mean([1.0, 0.0, 0.0])
    assert means[0] == pytest.approx(1.0)
    assert means == sorted(means, reverse=True)


def test_grid_fills_rows() -> None:
    images = [Image.new("RGB", (8, 8), (index, 0, 0)) for index in range(5)]
    sheet = grid(images, columns=3, gap=2)
    assert sheet.size == (28, 18)
    assert sheet.getpixel((10, 10)) == (4, 0, 0)
    assert sheet.getpixel((20, 10)) == (255, 255, 255)


def card(base_model: str, token: str = "<robot>") -> tuple[dict[str, Any], str]:
    text = model_card(
        token=token, base_model=base_model, learnable_property="object", steps=3, pictures=["comparison.png"]
    )
    _, header, body = text.split("---\n", 2)
    return yaml.safe_load(header), body


def test_model_card_links_a_model_of_the_hub_only(tmp_path: Path) -> None:
    header, body = card("stable-diffusion-v1-5/stable-diffusion-v1-5")
    assert header["base_model"] == "stable-diffusion-v1-5/stable-diffusion-v1-5"
    assert header["tags"] == ["stable-diffusion", "text-to-image", "diffusers", "textual_inversion"]
    assert 'from_pretrained("stable-diffusion-v1-5/stable-diffusion-v1-5")' in body
    assert "# `<robot>`\n" in body
    assert "![comparison.png](./comparison.png)" in body
    # The Hub refuses a card with a base_model that is no id.
    for name in (str(tmp_path), "./model", "~/models/sd15", "../models/sd15", "bundled", "random:sd15"):
        assert "base_model" not in card(name)[0], name


@pytest.mark.parametrize("base_model", ["bundled", "stable-diffusion-v1-5/stable-diffusion-v1-5"])
def test_code_of_the_model_card_works(
    icom: Command, rows: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base_model: str
) -> None:
    shutil.copy(rows["one"], tmp_path / EMBEDDING)
    monkeypatch.chdir(tmp_path)
    _, body = card(base_model, token="<one>")
    language, code = body.split("```", 2)[1].split("\n", 1)
    if base_model == "bundled":
        assert language == "sh"
        command = shlex.split(code)
        assert command[0] == "icom"
        assert icom(*command[1:], "--num_inference_steps", "2").code == 0
        assert (tmp_path / "generated").is_dir()
    else:
        assert language == "python"
        exec(code.replace(base_model, str(loading.BUNDLE)).replace('>")', '>", num_inference_steps=2)'), {})

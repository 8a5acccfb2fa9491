"""`icom evaluate --embedding RUN`: scores of a learned word, over the steps of its run.

Guards icom.evaluate.word, word_report, learned, likeness and encoders.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
from PIL import Image
from safetensors.torch import load_file, save_file

from icom.config.evaluate import EvaluateConfig
from icom.data.images import BUNDLED_CONCEPTS
from icom.evaluate.encoders import DinoV2, SafetyChecker, open_encoder
from icom.evaluate.likeness import alignment, among_themselves, likeness
from icom.methods.embedding_file import save_embedding
from icom.models.loading import BUNDLE
from icom.parallel.secret import new_secret
from tests.support.command import Result, Run, assert_message, train_arguments
from tests.support.ranks import Ranks
from tests.support.tiny_clip import make_clip
from tests.support.tiny_encoders import make_checker, make_dinov2

FAST = ("--num_inference_steps", "2", "--engine", "off")
TRAINED = {"train_data_dir": "bundled:red-moon", "max_train_steps": "4", "save_steps": "2", "learning_rate": "0.3"}


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `clip`, `checker` and `dinov2`."""
    folder = tmp_path_factory.mktemp("networks")
    make_clip(folder / "clip")
    make_checker(folder / "checker")
    make_dinov2(folder / "dinov2")
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps, two of which were saved."""
    from icom.cli import main

    out = tmp_path_factory.mktemp("run") / "out"
    with pytest.raises(SystemExit) as stop:
        main(train_arguments(output_dir=out, **TRAINED))
    assert stop.value.code == 0
    return out


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """One's own of it."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


def pictures(paths: list[Path]) -> list[Image.Image]:
    return [Image.open(path).convert("RGB") for path in paths]


REAL = sorted((BUNDLED_CONCEPTS / "red-moon").iterdir())


def clip_sees(folder: Path, images: list[Image.Image]) -> torch.Tensor:
    """By transformers' own way through the whole model."""
    processor = transformers.CLIPImageProcessorPil.from_pretrained(folder)
    model = transformers.CLIPModel.from_pretrained(folder)
    pixels = processor(images=images, return_tensors="pt")["pixel_values"]
    words = transformers.CLIPTokenizer.from_pretrained(folder)("x", return_tensors="pt")
    with torch.no_grad():
        seen: torch.Tensor = model(pixel_values=pixels, **words).image_embeds
    return seen


def checker_sees(folder: Path, images: list[Image.Image]) -> torch.Tensor:
    """From what the checker itself compares: cosines to as many axes as the space has give the picture back."""
    processor = transformers.CLIPImageProcessorPil.from_pretrained(folder / "feature_extractor")
    checker = StableDiffusionSafetyChecker.from_pretrained(folder / "safety_checker")
    pixels = processor(images=images, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        seen: torch.Tensor = checker.visual_projection(checker.vision_model(pixels)[1])
    return seen


def dino_sees(folder: Path, images: list[Image.Image]) -> torch.Tensor:
    processor = transformers.BitImageProcessorPil.from_pretrained(folder)
    model = transformers.Dinov2Model.from_pretrained(folder)
    pixels = processor(images=images, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        seen: torch.Tensor = model(pixel_values=pixels).last_hidden_state[:, 0]
    return seen


SEES = {"clip": clip_sees, "checker": checker_sees, "dinov2": dino_sees}


def plainly(one: torch.Tensor, other: torch.Tensor) -> list[list[float]]:
    """Cosines of all pairs, a pair at a time."""
    return [[float(torch.cosine_similarity(a, b, dim=0)) for b in other.double()] for a in one.double()]


@pytest.mark.parametrize("name", ["checker", "clip", "dinov2"])
def test_scores_are_those_of_a_plain_loop(name: str, networks: Path, run: Path, icom: Run) -> None:
    """Of the files alone, with transformers and diffusers directly."""
    encoder = networks / name
    result = icom("evaluate", "--embedding", str(run), "--image_encoder", str(encoder), *FAST, "--num_images", "3")
    assert result.code == 0, result.err
    out = run / "evaluation"
    found = results(out)
    real = SEES[name](encoder, pictures(REAL))
    among = [x for row, one in enumerate(plainly(real, real)) for column, x in enumerate(one) if row != column]
    assert found["among_training_pictures"] == pytest.approx(sum(among) / len(among), rel=1e-5)
    assert [row["step"] for row in found["scores"]] == [0, 2, 4]
    means = {}
    for row in found["scores"]:
        (folder,) = out.glob(f"step-{row['step']}-*")
        paths = sorted(folder.iterdir())
        assert len(paths) == 3
        seen = SEES[name](encoder, pictures(paths))
        cosines = plainly(seen, real)
        means[row["step"]] = sum(map(sum, cosines)) / 15
        assert row["image_similarity"] == pytest.approx(means[row["step"]], rel=1e-5)
        assert row["nearest"] == pytest.approx(sum(map(max, cosines)) / 3, rel=1e-5)
        of_each = [sum(one) / 5 for one in cosines]
        spread = math.sqrt(sum((one - sum(of_each) / 3) ** 2 for one in of_each) / 2)
        assert row["error"] == pytest.approx(spread / math.sqrt(3), rel=1e-4)
        if name == "clip":
            model = transformers.CLIPModel.from_pretrained(encoder)
            tokenizer = transformers.CLIPTokenizer.from_pretrained(encoder)
            plain = [prompt.replace("<robot>", "toy") for prompt in found["prompts"][:3]]
            with torch.no_grad():
                words = tokenizer(plain, padding=True, truncation=True, max_length=16, return_tensors="pt")
                read = model(pixel_values=torch.zeros(1, 3, 32, 32), **words).text_embeds
            expected = sum(float(torch.cosine_similarity(a, b, dim=0)) for a, b in zip(seen, read, strict=True)) / 3
            assert row["text_alignment"] == pytest.approx(expected, rel=1e-4)
        else:
            assert "text_alignment" not in row
        assert 0 <= row["judge"] <= 1
    best = max((2, 4), key=lambda step: means[step])
    assert found["best_step"] == best and f"Most like the training pictures: step {best}" in result.out
    with Image.open(out / "curve.png") as curve:
        assert curve.width == (540 * (3 if name == "clip" else 2))


@pytest.mark.long
def test_pictures_are_those_of_generate(networks: Path, run: Path, icom: Run, tmp_path: Path) -> None:
    """Of each step by its file; of step 0 by the word that it started from. What is there is not drawn again."""
    encoder = ("--image_encoder", str(networks / "checker"))
    words = ("evaluate", "--embedding", str(run), *encoder, *FAST, "--seed", "5", "--guidance_scales", "3")
    prompts = ("--prompt", "a photo of [name]", "a <ROBOT> at night")
    assert icom(*words, *prompts, "--num_images", "2").code == 0
    again = icom(*words, *prompts, "--num_images", "3", "--steps", "4")
    assert again.code == 0 and "drew 2 pictures, 4 of 6 were there" in again.out
    for step, name in ((4, "<robot>"), (0, "toy")):
        taught = ("--embedding", str(run / "learned_embeds-steps-4.safetensors")) if step else ()
        out = tmp_path / f"drawn-{step}"
        options = ("--seed", "5", "--guidance_scale", "3", *FAST, "--output_dir", str(out))
        assert icom("generate", *taught, "--prompt", f"a photo of {name}", *options).code == 0
        (expected,) = out.iterdir()
        (folder,) = (run / "evaluation").glob(f"step-{step}-*")
        drawn = np.asarray(Image.open(folder / "000000.png"))
        assert np.array_equal(drawn, np.asarray(Image.open(expected)))
    assert sorted(path.name for path in folder.iterdir()) == [f"00000{number}.png" for number in range(3)]
    # Other rows of a step, as of a run that was done again: other pictures, and none of the old ones.
    rows = load_file(run / "learned_embeds-steps-2.safetensors")["<robot>"]
    save_embedding(run / "learned_embeds-steps-2.safetensors", "<robot>", rows + 1)
    other = icom(*words, *prompts, "--num_images", "3", "--steps", "2")
    assert "drew 3 pictures, 3 of 6 were there" in other.out
    assert len(list((run / "evaluation").glob("step-2-*"))) == 2
    refused = icom(*words, "--prompt", "[name]", "--num_images", "3")
    assert_message(refused, 2, "pictures of another evaluation (prompts")


def test_model_card_has_the_scores_once(networks: Path, run: Path, icom: Run) -> None:
    before = (run / "README.md").read_text()
    words = ("evaluate", "--embedding", str(run), "--image_encoder", str(networks / "clip"), *FAST, "--steps", "4")
    for count in ("2", "3"):
        assert icom(*words, "--num_images", count).code == 0
    card = (run / "README.md").read_text()
    assert card.startswith(before.rstrip()) and card.count("## Scores") == 1
    assert "3 pictures of each step" in card and "2 pictures of each step" not in card
    table = [line for line in card.splitlines() if re.match(r"\| \d", line)]
    found = results(run / "evaluation")["scores"]
    assert [int(line.split("|")[1]) for line in table] == [row["step"] for row in found]
    assert all(f"{row['text_alignment']:.3f}" in line for row, line in zip(found, table, strict=True))
    (run / "README.md").unlink()
    assert icom(*words, "--num_images", "3").code == 0
    assert not (run / "README.md").exists()


@pytest.mark.long
def test_words_that_were_learned_together(networks: Path, tmp_path: Path, icom: Run) -> None:
    """One of them at a time, its rows and what it started from; all stay side by side in folder and model card."""
    config, out = tmp_path / "both.yaml", tmp_path / "out"
    config.write_text(
        "placeholder_token: [<mug>, <bear>]\ninitializer_token: [toy, <rand>]\nnum_vectors: [1, 2]\nsave_steps: 1\n"
        'instance_prompt: "a <mug> beside a <bear>"\nlearning_rate: 0.3\n'
    )
    named = {"placeholder_token": None, "initializer_token": None, "config": config}
    trained = icom(*train_arguments(output_dir=out, max_train_steps=2, **named))
    assert trained.code == 0, trained
    options = ("--image_encoder", str(networks / "clip"), *FAST, "--num_images", "1")
    rows = load_file(out / "learned_embeds-steps-1.safetensors")
    for token, name in (("<bear>", "bear"), ("<mug>", "mug")):
        result = icom("evaluate", "--embedding", f"{out}={token}", *options)
        assert result.code == 0, result
        found = results(out / "evaluation" / name)
        assert found["word"] == token and [row["step"] for row in found["scores"]] == [0, 1, 2]
        assert ("text_alignment" in found["scores"][0]) == (name == "mug")  # random rows stand for no word
        digest = hashlib.sha256(rows[token].numpy().tobytes()).hexdigest()[:8]
        drawn = tmp_path / name
        prompts = (
            "--embedding",
            f"{out / 'learned_embeds-steps-1.safetensors'}={token}",
            "--prompt",
            f"a photo of {token}",
        )
        assert icom("generate", *prompts, *FAST, "--output_dir", str(drawn)).code == 0
        (expected,) = drawn.iterdir()
        first = out / "evaluation" / name / f"step-1-{digest}" / "000000.png"
        assert np.array_equal(np.asarray(Image.open(first)), np.asarray(Image.open(expected)))
    card = (out / "README.md").read_text()
    assert card.count("## Scores of `<bear>`") == card.count("## Scores of `<mug>`") == 1
    assert "&lt;mug&gt; and &lt;bear&gt;" in (out / "report.html").read_text()
    for word, said in (("", "has several words (<mug>, <bear>). Name one of them, as in"), ("=<cat>", "and not <cat>")):
        assert_message(icom("evaluate", "--embedding", f"{out}{word}", *options), 2, said)
    assert_message(
        icom("evaluate", "--embedding", str(tmp_path), *options), 1, f"name one of them, as in --embedding {out}"
    )


def test_likeness_of_what_is_known() -> None:
    """Pictures that are the training pictures; that point the other way; a circle, whose cosines are known."""
    rng = np.random.Generator(np.random.PCG64(1))
    real = rng.normal(size=(5, 7))
    same = likeness(real * 3, real)
    assert same.nearest == pytest.approx(1)
    among = among_themselves(real)
    assert among is not None and same.mean == pytest.approx((5 * 1 + 20 * among) / 25)
    assert likeness(-real[:1], real[:1]).mean == pytest.approx(-1)
    angles = np.linspace(0, 2 * np.pi, 12, endpoint=False)
    circle = np.stack([np.cos(angles), np.sin(angles)], 1)
    assert among_themselves(circle) == pytest.approx(-1 / 11)
    assert among_themselves(circle[:1]) is None
    turned = np.stack([np.cos(angles + 0.3), np.sin(angles + 0.3)], 1)
    assert alignment(circle, turned) == pytest.approx(math.cos(0.3))
    assert likeness(circle[:1], turned[:1]).error == 0


@pytest.mark.long
def test_two_processes_share_the_drawing(networks: Path, run: Path, icom: Run, tmp_path: Path) -> None:
    words = ("evaluate", "--embedding", str(run), "--image_encoder", str(networks / "checker"), *FAST)
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    assert icom(*words, "--output_dir", str(alone)).code == 0
    group = Ranks(tmp_path / "ranks", 2, "-m", "icom", *words, "--output_dir", str(shared), secret=new_secret())
    try:
        ended = group.results()
    finally:
        group.end()
    assert [result.code for result in ended] == [0, 0], ended
    assert results(shared) == results(alone)
    found = [{p.relative_to(f): p.read_bytes() for p in f.glob("*/*.png")} for f in (alone, shared)]
    assert found[0] == found[1] and len(found[0]) == 24


Words = Callable[[Path, Path], tuple[list[str], int, tuple[str, ...]]]
BAD: dict[str, Words] = {
    "no encoder": lambda run, networks: (
        [str(run)],
        1,
        ("has no safety checker", "--image_encoder FOLDER", "hf download"),
    ),
    "no folder of one": lambda run, networks: (
        [str(run), "--image_encoder", str(run)],
        1,
        ("There is no CLIP, DINOv2 or safety checker in", "no config.json"),
    ),
    "another kind": lambda run, networks: (
        [str(run), "--image_encoder", str(BUNDLE / "text_encoder")],
        1,
        ("no CLIP, DINOv2 or safety checker", "'clip_text_model'"),
    ),
    "a step that is not there": lambda run, networks: (
        [str(run), "--image_encoder", str(networks / "clip"), "--steps", "3"],
        2,
        ("--steps 3: the run saved 2, 4 (--save_steps)",),
    ),
    "steps of a file": lambda run, networks: (
        [str(run / "learned_embeds.safetensors"), "--steps", "4"],
        2,
        ("--steps chooses among the steps of a run",),
    ),
    "no run": lambda run, networks: ([str(networks)], 1, ("is no run's folder: it has no config.yaml",)),
    "metrics": lambda run, networks: ([str(run), "--metrics", "fid"], 2, ("--metrics compares with --real_data_dir",)),
    "scales": lambda run, networks: ([str(run), "--guidance_scales", "2", "4"], 2, ("at one of --guidance_scales",)),
    "captions": lambda run, networks: ([str(run), "--prompts_file", "bundled"], 2, ("do not say the word",)),
    "no word": lambda run, networks: (
        [str(run), "--image_encoder", str(networks / "clip"), "--prompt", "a toy"],
        2,
        ("No prompt says <robot>", "[name]"),
    ),
    "no pictures": lambda run, networks: (
        [str(run), "--image_encoder", str(networks / "clip"), "--train_data_dir", str(run / "nowhere")],
        1,
        ("No such picture folder",),
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_work(case: str, networks: Path, run: Path, icom: Run) -> None:
    words, code, parts = BAD[case](run, networks)
    result = icom("evaluate", "--embedding", *words, *FAST)
    assert_message(result, code, *parts)
    assert not (run / "evaluation").exists()


def test_embeddings_that_cannot_be(networks: Path, run: Path, icom: Run, tmp_path: Path) -> None:
    """Of another width, of another word, or one of which nobody knows the pictures; and options without a word."""

    def evaluate(*words: str) -> Result:
        return icom("evaluate", *words, "--image_encoder", str(networks / "clip"), *FAST)

    alone = tmp_path / "alone" / "learned_embeds.safetensors"
    alone.parent.mkdir()
    shutil.copy(run / "learned_embeds.safetensors", alone)
    assert_message(evaluate("--embedding", str(alone)), 2, "Nobody knows which pictures <robot>", "--train_data_dir")
    photos = ("--train_data_dir", "bundled:red-moon")
    out = ("--output_dir", str(tmp_path / "out"))
    known = evaluate("--embedding", str(alone), *photos, "--initializer_token", "toy", "--num_images", "2", *out)
    assert known.code == 0, known.err
    assert [row["step"] for row in results(tmp_path / "out")["scores"]] == [0, 1]

    save_file({"<robot>": torch.zeros(1, 32)}, alone)
    assert_message(evaluate("--embedding", str(alone), *photos), 1, "holds rows of width 32 and bundled has 128")
    for name, rows, said in (
        ("<other>", torch.zeros(1, 128), "teaches <other>, and the run's word is <robot>"),
        ("<robot>", torch.zeros(2, 128), "are of several runs"),
    ):
        save_file({name: rows}, run / "learned_embeds-steps-2.safetensors")
        assert_message(evaluate("--embedding", str(run)), 1, said)
    assert_message(evaluate("--prompt", "a star"), 2, "--image_encoder is about the word of one --embedding")


def test_damaged_networks_are_told(networks: Path, tmp_path: Path) -> None:
    for name, make in (("checker", SafetyChecker), ("dinov2", DinoV2)):
        folder = Path(shutil.copytree(networks / name, tmp_path / name))
        make(folder)
        (weights,) = folder.rglob("model.safetensors")
        tensors = load_file(weights)
        first = min(tensors)
        save_file({key: value for key, value in tensors.items() if key != first}, weights, {"format": "pt"})
        with pytest.raises(Exception, match="its weights lack"):
            make(folder)
        for path in folder.rglob("preprocessor_config.json"):
            path.unlink()
        with pytest.raises(Exception, match=r"no preprocessor_config\.json"):
            open_encoder(str(folder), None)


def test_which_pictures_a_word_is_scored_by(tmp_path: Path) -> None:
    """A file with prompts is drawn and scored as ever; a run, or a file with its pictures, is a word."""

    def of_a_word(*embedding: str, **options: Any) -> bool:
        return EvaluateConfig(embedding=[list(embedding)], **options).of_a_word

    assert of_a_word(str(tmp_path)) and of_a_word("x.safetensors") and of_a_word("x", train_data_dir="photos")
    assert of_a_word(str(tmp_path), prompt=[["a [name]"]])
    assert not of_a_word("x", prompt=[["a star"]]) and not of_a_word("x", "y") and not of_a_word("x", real_data_dir="r")
    assert not any(itertools.chain([EvaluateConfig().of_a_word]))

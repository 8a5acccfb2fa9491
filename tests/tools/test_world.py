"""The world of the bundled model: pictures, captions, judge, and whether the model draws what it is told.

Guards icom.world.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter

from icom.commands.demo import draw_prompts
from icom.config.demo import ConceptName
from icom.data.images import BUNDLED_CONCEPTS
from icom.models import loading
from icom.world.concepts import CONCEPTS, EVERYTHING, concept_scenes, new_backgrounds, seen_things
from icom.world.judge import HEADS, NOTHING, WEIGHTS, load_judge
from icom.world.scene import (
    BACKGROUNDS,
    COLOURS,
    NAMES,
    PATTERNS,
    PLACES,
    SHAPES,
    Scene,
    Thing,
    describe,
    draw,
    random_scene,
)
from tools.world.build import BuildConfig, build, build_tokenizer, make_concepts, words
from tools.world.evaluate import judge_accuracy


def plain(colour: str, shape: str, background: str = "on a white background", place: str = "in the middle") -> Scene:
    return Scene(Thing(colour, "plain", shape), "big", place, background, look=5)


def of_colour(picture: Image.Image, colour: str) -> np.ndarray:
    """Where a picture shows a colour of the world."""
    distance = np.abs(np.asarray(picture, dtype=int) - np.array(COLOURS[colour])).max(axis=2)
    return distance <= 24


@pytest.mark.parametrize("colour", COLOURS)
def test_shapes_have_their_colour_and_area(colour: str) -> None:
    """Areas of the circumscribed circle that the shapes fill, computed by hand, for the radius of this look."""
    radius = random.Random(5).uniform(19, 21)
    areas = {
        "circle": np.pi,
        "square": (0.88 * 2) ** 2,
        "ring": np.pi * (1 - 0.25),
        "cross": 4 * (2 * 0.36 * (1 - 0.36)) + (2 * 0.36) ** 2,
        "triangle": 3 * 3**0.5 / 4 * 1.15**2,
    }
    for shape, area in areas.items():
        drawn = of_colour(draw(plain(colour, shape)), colour).sum()
        assert drawn == pytest.approx(area * radius**2, rel=0.06), shape


def test_places_and_patterns() -> None:
    for place, (dx, dy) in PLACES.items():
        ys, xs = np.nonzero(of_colour(draw(plain("red", "circle", place=place)), "red"))
        assert (xs.mean() - 31.5, ys.mean() - 31.5) == pytest.approx((10 * dx, 10 * dy), abs=2)
    covered = [
        of_colour(draw(Scene(Thing("red", p, "circle"), "big", "in the middle", "at night", 1)), "red").mean()
        for p in PATTERNS
    ]
    assert covered[0] > 1.2 * max(covered[1:])  # stripes and dots are white


def test_same_scene_same_picture() -> None:
    scene = random_scene(random.Random(3), EVERYTHING)
    assert draw(scene).tobytes() == draw(scene).tobytes()


def test_captions_are_true() -> None:
    """What a caption says of colour, pattern, shape, background and place is what the scene is."""
    rng = random.Random(1)
    said = set()
    for _ in range(3000):
        scene = random_scene(rng, EVERYTHING)
        caption = describe(scene, rng)
        tokens = caption.split()
        for known, fact in (
            (COLOURS, scene.thing.colour),
            (PATTERNS, scene.thing.pattern),
            (SHAPES, scene.thing.shape),
        ):
            assert set(known) & set(tokens) <= {fact}, caption
        assert [name for name in NAMES if name in tokens and NAMES[name] != scene.thing] == []
        for phrases, fact in ((BACKGROUNDS, scene.background), (PLACES, scene.place)):
            assert [phrase for phrase in phrases if phrase in caption and phrase != fact] == []
        said |= set(tokens)
    assert {*COLOURS, *SHAPES, *NAMES, *PATTERNS} <= said


def test_concepts_are_held_out() -> None:
    pairs = {(thing.colour, thing.shape) for thing in seen_things()}
    assert {(thing.colour, thing.shape) for thing in CONCEPTS.values()} & pairs == set()
    assert set(NAMES.values()) <= set(seen_things())
    assert {thing.colour for thing in seen_things()} == set(COLOURS)
    assert {thing.shape for thing in seen_things()} == set(SHAPES)
    assert set(get_args(ConceptName)) == set(CONCEPTS)
    for name in CONCEPTS:
        shown = concept_scenes(name)
        assert len({scene.background for scene in shown}) == len({scene.place for scene in shown}) == len(shown) == 5
        assert {scene.background for scene in shown} | set(new_backgrounds(name)) == set(BACKGROUNDS)


def test_shipped_pictures_are_what_the_program_makes(tmp_path: Path) -> None:
    make_concepts(tmp_path / "concepts")
    made = sorted(path.relative_to(tmp_path / "concepts") for path in tmp_path.rglob("*.png"))
    assert made == sorted(path.relative_to(BUNDLED_CONCEPTS) for path in BUNDLED_CONCEPTS.rglob("*") if path.is_file())
    assert len(made) == 5 * len(CONCEPTS)
    for path in made:
        with Image.open(tmp_path / "concepts" / path) as ours, Image.open(BUNDLED_CONCEPTS / path) as shipped:
            assert np.abs(np.asarray(ours, dtype=int) - np.asarray(shipped, dtype=int)).max() <= 2


def test_every_word_of_the_world_is_a_token(tmp_path: Path) -> None:
    """In the shipped vocabulary, and in one made anew."""
    build_tokenizer(tmp_path / "tokenizer")
    for folder in (loading.BUNDLE, tmp_path):
        tokenizer = loading.load_tokenizer(loading.ModelSource("test", folder))
        for word in words():
            assert len(tokenizer.encode(word, add_special_tokens=False)) == 1, word


@pytest.mark.long
def test_training_is_reproducible(tmp_path: Path) -> None:
    """The whole build, in a few steps each, twice: the same bytes; and what ships says of itself the same."""
    files = []
    for name in ("a", "b"):
        shutil.copytree(loading.BUNDLE / "tokenizer", tmp_path / name / "model" / "tokenizer")
        sizes = {"judge_steps": 2, "vae_steps": 2, "decoder_steps": 2, "unet_steps": 2, "unet_pictures": 20}
        places = {
            "output_dir": tmp_path / name,
            "log": tmp_path / f"{name}.jsonl",
            "work_dir": tmp_path / f"{name}-work",
        }
        build(BuildConfig(**places, **sizes))  # type: ignore[arg-type]
        weights = sorted((tmp_path / name).rglob("*.safetensors"))
        files.append({path.relative_to(tmp_path / name): path.read_bytes() for path in weights})
    assert len(files[0]) == 4
    assert files[0] == files[1]
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert {row["part"] for row in rows if "loss" in row} == {"judge", "vae", "decoder", "unet"}
    for shipped in loading.BUNDLE.rglob("*.json"):
        made = json.loads((tmp_path / "a" / "model" / shipped.relative_to(loading.BUNDLE)).read_text())
        wanted = json.loads(shipped.read_text())
        assert not made.pop("_name_or_path", "")  # a folder of this machine
        if shipped.parent.name == "vae":
            del made["scaling_factor"], wanted["scaling_factor"]  # of another VAE
        assert made == wanted, shipped


@pytest.mark.long
def test_judge_knows_the_world() -> None:
    accuracy = judge_accuracy(1000, seed=7)
    for head in HEADS:
        assert accuracy[head] >= 0.98, head


@pytest.mark.long
def test_judge_sees_nothing_where_nothing_is() -> None:
    rng = random.Random(4)
    scenes = [random_scene(rng, EVERYTHING) for _ in range(40)]
    noise = np.random.default_rng(0).integers(0, 256, (40, 64, 64, 3), dtype=np.uint8)
    blurred = [draw(scene).filter(ImageFilter.GaussianBlur(12)) for scene in scenes]
    for pictures in ([draw(scene, outline=[]) for scene in scenes], [Image.fromarray(a) for a in noise], blurred):
        verdicts = load_judge().look_at(pictures)
        assert sum(verdict.shape == NOTHING for verdict in verdicts) >= 36


@pytest.mark.long
def test_model_draws_what_it_is_told() -> None:
    """24 prompts; an untrained model gets one in 64 right."""
    rng = random.Random(11)
    things = [thing for thing in rng.sample(seen_things(), 60) if thing.pattern == "plain"][:16]
    prompts = [f"a photo of a {thing.colour} {thing.shape}" for thing in things]
    verdicts = load_judge().look_at(draw_prompts(prompts))
    right = [v.colour == thing.colour and v.shape == thing.shape for v, thing in zip(verdicts, things, strict=True)]
    assert sum(right) >= 0.75 * len(things), list(zip(prompts, verdicts, strict=True))


def test_weights_are_small() -> None:
    files = [*loading.BUNDLE.rglob("*.safetensors"), WEIGHTS]
    assert sum(path.stat().st_size for path in files) <= 25_000_000
    assert not [path for path in loading.BUNDLE.rglob("*") if path.suffix in (".bin", ".pt", ".ckpt")]


@pytest.mark.long
def test_opens_in_plain_diffusers() -> None:
    from diffusers import StableDiffusionPipeline

    pipeline = StableDiffusionPipeline.from_pretrained(loading.BUNDLE, safety_checker=None)
    names = [
        type(pipeline.components[part]).__name__ for part in ("text_encoder", "tokenizer", "vae", "unet", "scheduler")
    ]
    assert names == ["CLIPTextModel", "CLIPTokenizer", "AutoencoderKL", "UNet2DConditionModel", "DDPMScheduler"]
    config = pipeline.scheduler.config
    assert (config["beta_start"], config["beta_end"], config["beta_schedule"]) == (0.00085, 0.012, "scaled_linear")
    assert pipeline.vae.config["latent_channels"] == 4
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    picture = pipeline("a photo of a red circle", num_inference_steps=20, generator=generator).images[0]
    assert picture.size == (64, 64)
    assert load_judge().look_at([picture])[0].thing.shape == "circle"

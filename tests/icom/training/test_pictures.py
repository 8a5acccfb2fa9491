"""Buckets, crops and masks in a run: the same samples on any number of ranks, exact on resume, the loss of the formula.

Guards icom.training.pictures, and icom.data.latents with them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from diffusers import UNet2DConditionModel
from PIL import Image
from safetensors.torch import load_file

from icom import backends
from icom.config.pictures import BUNDLED_BUCKETS, PictureOptions
from icom.config.train import TrainConfig
from icom.data.images import BUNDLED_CONCEPTS, list_pictures, read_picture
from icom.data.latents import load_moments
from icom.data.sampling import gaussian_noise
from icom.data.transform import Transform, pixels
from icom.engine.blocks import rewrite
from icom.engine.choices import Choices
from icom.errors import UsageError
from icom.models import loading
from icom.models.loading import Model
from icom.training.material import open_material
from icom.training.pictures import check_vae, learned_pictures, transform_of
from icom.training.run import Run, prepare
from icom.training.step import batch_loss
from tests.support.command import Result, assert_refused, long
from tests.support.ranks import Ranks

Train = Callable[..., Result]
SHAPES = {"a": (90, 54), "b": (60, 100), "c": (64, 64), "d": (200, 128), "e": (41, 96)}
"""Five pictures in four buckets: 80 x 48 twice, 48 x 80, 64 x 64, 40 x 96 (latents of odd sizes)."""
ALL = {
    "enable_bucket": True,
    "random_crop": True,
    "crops_per_picture": 4,
    "masked_loss": True,
    "train_batch_size": 2,
    "repeats": 3,
}


def write_pictures(folder: Path, *, masks: tuple[str, ...] = ("a", "b", "d", "e"), alpha: bool = False) -> Path:
    """The concept's pictures in other shapes; where masks are asked for, an ellipse in the middle is white."""
    folder.mkdir()
    for number, (name, size) in enumerate(SHAPES.items()):
        with Image.open(BUNDLED_CONCEPTS / "red-moon" / f"{number}.png") as picture:
            made = picture.convert("RGB").resize(size)
        y, x = np.mgrid[-1 : 1 : size[1] * 1j, -1 : 1 : size[0] * 1j]
        mask = Image.fromarray((x**2 + y**2 < 0.5).astype(np.uint8) * 255)
        if alpha and name in masks:
            made.putalpha(mask)
        made.save(folder / f"{name}.png")
        if not alpha and name in masks:
            mask.save(folder / f"{name}-mask.png")
    return folder


def rows(folder: Path) -> torch.Tensor:
    return load_file(folder / "learned_embeds.safetensors")["<robot>"]


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("engine", ["auto", long("on")])
def test_resume_in_the_middle_of_an_epoch_is_exact(tmp_path: Path, train: Train, engine: str) -> None:
    """An epoch has seven batches. What the start says is looked at, too."""
    options = {"train_data_dir": write_pictures(tmp_path / "pictures"), "engine": engine, "max_train_steps": 11, **ALL}
    watch = {"validation_prompt": "a <robot>", "num_validation_images": 1, "validation_steps": 11}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    result = train(output_dir=whole, checkpointing_steps=4, num_comparison_images=1, **watch, **options)
    assert result.code == 0, result.err
    said = result.out.splitlines()
    start = said.index("icom: 4 buckets, width x height:")
    assert said[start + 1 : start + 6] == [
        "  40 x 96  1 picture",
        "  48 x 80  1 picture",
        "  64 x 64  1 picture",
        "  80 x 48  2 pictures",
        "icom: 4 of 5 pictures have a mask; what is outside counts 0.1",
    ]
    assert (whole / "comparison.png").is_file()
    assert (whole / "validation/step-11.png").is_file()
    assert len(set(losses(whole))) == 11
    shutil.copytree(whole / "checkpoint-8", parts / "checkpoint-8")
    again = train(output_dir=parts, resume_from_checkpoint="latest", **options)
    assert again.code == 0, again.err
    assert torch.equal(rows(parts), rows(whole))
    assert losses(parts) == losses(whole)[8:]
    assert "latent cache 18/18 hits" in again.out

    for changed in (
        {"train_batch_size": 1},
        {"bucket_reso_steps": 16},
        {"crops_per_picture": 3},
        {"unmasked_weight": 0},
    ):
        refused = train(output_dir=parts, resume_from_checkpoint="latest", **(options | changed))
        (name,) = changed
        assert_refused(refused, 1, "not the run of the checkpoint", f"different: {name}")


@pytest.mark.long
def test_three_ranks_equal_one(tmp_path: Path, train: Train, ranks: Callable[..., Ranks]) -> None:
    """Batches of two: three processes, or one that accumulates three; on from the checkpoint of the three on one."""
    options = {"train_data_dir": write_pictures(tmp_path / "pictures"), "max_train_steps": 7, **ALL}
    one, on_one = tmp_path / "one", tmp_path / "on_one"
    assert train(output_dir=one, gradient_accumulation_steps=3, **options).code == 0
    results = ranks(3, checkpointing_steps=4, **options).results()
    assert [result.code for result in results] == [0, 0, 0], results
    three = tmp_path / "rank0" / "out"
    # Sums in another order: AdamW makes of their rounding some 1e-6 in seven steps. Another sample would be 1e-2.
    torch.testing.assert_close(rows(three), rows(one), rtol=0, atol=1e-5)
    assert losses(three) == pytest.approx(losses(one), rel=1e-5)
    resume = {"resume_from_checkpoint": three / "checkpoint-4", "gradient_accumulation_steps": 3}
    assert train(output_dir=on_one, **resume, **options).code == 0
    torch.testing.assert_close(rows(on_one), rows(one), rtol=0, atol=1e-5)


def options(**chosen: Any) -> TrainConfig:
    """With the bundled model's buckets."""
    words: dict[str, Any] = {"train_data_dir": "bundled", "placeholder_token": "<robot>", "initializer_token": "toy"}
    return TrainConfig(**({"resolution": 64, **words, **BUNDLED_BUCKETS} | chosen))


def run_of(folder: Path, cache: Path, **chosen: Any) -> tuple[Run, Model]:
    """A run, and the model as it was before anything was done to it."""
    settled = {"seed": 3, "max_train_steps": 1, "cache_dir": str(cache), "train_batch_size": 2, "repeats": 3}
    config = options(train_data_dir=str(folder), **settled, **chosen)
    backend, _ = backends.resolve("cpu", "no")
    model, plain = (loading.load(loading.find("bundled"), torch.float32) for _ in range(2))
    return prepare(config, backend, Accelerator(cpu=True), model, open_material(config)), plain


@pytest.mark.parametrize("alpha", [False, True])
def test_loss_is_the_formulas(tmp_path: Path, alpha: bool) -> None:
    """mean of weight x (noise - prediction)^2 over all elements of a batch, from the files' own pixels and masks.

    Pictures are as large as their buckets, so that nothing is resized: what is behind transparent pixels is seen.
    """
    folder = tmp_path / "pictures"
    folder.mkdir()
    chance = np.random.default_rng(0)
    colours, inside = {}, {}
    for name, (width, height) in {"a": (80, 48), "b": (48, 80), "c": (64, 64)}.items():
        colours[name] = chance.integers(0, 256, (height, width, 3), dtype=np.uint8)
        inside[name] = np.repeat(np.repeat(chance.random((height // 4, width // 4)) < 0.4, 4, axis=0), 4, axis=1)
        picture, mask = Image.fromarray(colours[name]), Image.fromarray(inside[name].astype(np.uint8) * 255)
        if alpha:
            picture.putalpha(mask)
        else:
            mask.save(folder / f"{name}-mask.png")
        picture.save(folder / f"{name}.png")
    kind = {"alpha_mask": True} if alpha else {"masked_loss": True}
    run, plain = run_of(folder, tmp_path / "cache", enable_bucket=True, unmasked_weight=0.25, **kind)
    shown = set()
    for batch in range(9):
        samples = [run.stream[i] for i in (2 * batch, 2 * batch + 1)]
        parts = []
        for sample in samples:
            name = "abc"[sample.picture]
            shown.add((name, sample.flip))
            turn = slice(None, None, -1 if sample.flip else 1)
            seen = torch.from_numpy(colours[name][:, turn].copy()).permute(2, 0, 1)[None] / 127.5 - 1
            counts = np.where(inside[name][:, turn], 1, 0.25)
            height, width = counts.shape
            weight = torch.from_numpy(counts.reshape(height // 8, 8, width // 8, 8).mean(axis=(1, 3)))
            with torch.no_grad():
                posterior = plain.vae.encode(seen).latent_dist
                of_vae, noise = gaussian_noise(sample, tuple(posterior.mean.shape[1:]))
                latents = (posterior.mean + posterior.std * of_vae) * plain.vae.config["scaling_factor"]
                alphas = plain.noise_scheduler.alphas_cumprod[sample.timestep]
                noisy = alphas.sqrt() * latents + (1 - alphas).sqrt() * noise
                states = run.method.condition(run.model, [sample]).hidden_states
                predicted = plain.unet(noisy, sample.timestep, states).sample[0]
            parts.append((weight * (noise - predicted) ** 2).mean())
        assert batch_loss(run, range(2 * batch, 2 * batch + 2)).item() == pytest.approx(
            float(torch.stack(parts).mean()), rel=1e-5
        )
    assert len({name for name, _ in shown}) == 3
    assert len({flip for _, flip in shown}) == 2


# The latent cache.


def test_cache_tells_shapes_crops_and_masks_apart_and_keeps_its_old_keys(tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "pictures", masks=("a", "c"), alpha=True)
    files, cache = list_pictures(str(folder)), tmp_path / "cache"
    vae = loading.load(loading.find("bundled"), torch.float32).vae

    def kept(config: TrainConfig) -> tuple[int, list[torch.Size]]:
        moments = load_moments(learned_pictures(files, config), transform_of(config), vae, "digest", cache)
        return moments.hits, [mean.shape for mean in moments.mean]

    assert kept(options()) == (0, [torch.Size((2, 1, 4, 8, 8))] * 5)
    old = {"picture": files[0].digest, "vae": "digest", "flip": True, "format": 2}
    old |= {"resolution": 64, "center_crop": False}  # as before there were buckets
    assert (cache / f"{hashlib.sha256(json.dumps(old, sort_keys=True).encode()).hexdigest()}.safetensors").is_file()
    sizes = [(2, 1, 4, 6, 10), (2, 1, 4, 10, 6), (2, 1, 4, 8, 8), (2, 1, 4, 6, 10), (2, 1, 4, 12, 5)]
    assert kept(options(enable_bucket=True)) == (0, [torch.Size(size) for size in sizes])
    # Each place for itself; the square picture has one, which is the bucket's of before.
    places = [(2, count, 4, 8, 8) for count in (3, 3, 1, 3, 3)]
    three = {"random_crop": True, "crops_per_picture": 3}
    assert kept(options(**three)) == (2, [torch.Size(size) for size in places])
    assert kept(options(alpha_mask=True))[0] == 0
    assert len(list(cache.iterdir())) == 10 + 10 + 24 + 10
    for again in ({}, {"enable_bucket": True}, {"alpha_mask": True, "unmasked_weight": 0.5}):
        assert kept(options(**again))[0] == 10
    # Fewer places: both ends are there.
    assert kept(options(random_crop=True, crops_per_picture=2))[0] == 18


def test_random_crops_are_encoded_each_for_itself(tmp_path: Path) -> None:
    """All places of a picture come up, about as often; pixels and weights are those of the same one."""
    folder = write_pictures(tmp_path / "pictures")
    run, plain = run_of(folder, tmp_path / "cache", random_crop=True, crops_per_picture=4, masked_loss=True)
    whole = read_picture(folder / "a.png").resize((106, 64), Image.Resampling.BICUBIC)  # 90 x 54
    mask = np.asarray(read_picture(folder / "a-mask.png").convert("L").resize((106, 64), Image.Resampling.BICUBIC))
    zeros, found = torch.zeros(4, 8, 8), Counter[int]()
    windows = {}
    for left in (0, 14, 28, 42):
        values = np.asarray(whole)[:, left : left + 64].astype(np.float32) / 127.5 - 1
        with torch.no_grad():
            windows[left] = plain.vae.encode(torch.from_numpy(values).permute(2, 0, 1)[None]).latent_dist.mean[0]
    for sample in (run.stream[i] for i in range(1000)):
        if sample.picture or sample.flip:
            continue
        made = run.moments.sample(sample, zeros)
        (left,) = (left for left, window in windows.items() if torch.allclose(made, window, atol=1e-3))
        found[left] += 1
        weights = run.moments.weights_of([sample])
        assert weights is not None
        expected = mask[:, left : left + 64].reshape(8, 8, 8, 8).mean(axis=(1, 3)) / 255
        np.testing.assert_allclose(weights[0, 0].numpy(), 0.1 + 0.9 * expected, atol=1e-5)
    assert sorted(found) == [0, 14, 28, 42]
    assert all(abs(count - 25) < 25 for count in found.values())  # five standard deviations
    # The rest of a sample is what it is without crops.
    assert run.stream[7].noise_seed == run_of(folder, tmp_path / "cache", masked_loss=True)[0].stream[7].noise_seed


def test_what_is_behind_transparent_pixels(tmp_path: Path) -> None:
    """White, as ever; the file's own colours with --alpha_mask."""
    image = Image.new("RGBA", (64, 64), (0, 128, 255, 0))
    image.paste((255, 0, 0, 255), (16, 16, 48, 48))
    image.save(tmp_path / "a.png")
    for alpha, colour in ((False, (255, 255, 255)), (True, (0, 128, 255))):
        made = pixels(read_picture(tmp_path / "a.png", alpha=alpha), Transform(64, center_crop=False), flip=False)
        assert ((made[:, 0, 0] + 1) * 127.5).round().tolist() == list(colour)
        assert ((made[:, 30, 30] + 1) * 127.5).round().tolist() == [255, 0, 0]


@pytest.mark.parametrize("engine", [False, True])
def test_unet_takes_latents_that_it_cannot_halve_evenly(engine: bool) -> None:
    """As many levels as Stable Diffusion's; forward and backward, one shape after the other."""
    torch.manual_seed(0)
    levels: dict[str, Any] = {"down_block_types": ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",)}
    levels |= {"up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3, "block_out_channels": (16,) * 4}
    levels |= {"norm_num_groups": 4, "layers_per_block": 1, "cross_attention_dim": 8, "attention_head_dim": 4}
    unet = UNet2DConditionModel(**levels).requires_grad_(False).to(memory_format=torch.channels_last)
    stock = UNet2DConditionModel(**levels).requires_grad_(False)
    stock.load_state_dict(unet.state_dict())
    if engine:
        rewrite(unet, Choices(Path("/nonexistent"), 0).attend)
    for height, width in ((8, 8), (5, 11), (7, 9), (16, 4)):
        noisy, states = torch.randn(1, 4, height, width), torch.randn(1, 3, 8)
        found = []
        for one in (unet, stock):
            given = states.clone().requires_grad_()
            made = one(noisy, 500, given).sample
            assert made.shape == noisy.shape
            made.square().sum().backward()
            found.append((made.detach(), given.grad))
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


# Bad input.

REFUSED: list[tuple[dict[str, object], str]] = [
    ({"bucket_reso_steps": 12}, "--bucket_reso_steps has to be a multiple of 8, not 12. Nearest: 8 or 16."),
    ({"bucket_reso_steps": 0}, "--bucket_reso_steps has to be at least 1, not 0"),
    ({"min_bucket_reso": 36}, "--min_bucket_reso has to be a multiple of --bucket_reso_steps 8, not 36. Nearest: 32"),
    ({"max_bucket_reso": 100}, "--max_bucket_reso has to be a multiple of --bucket_reso_steps 8, not 100. Nearest: 96"),
    ({"min_bucket_reso": 64, "max_bucket_reso": 56}, "--min_bucket_reso 64 is more than --max_bucket_reso 56."),
    ({"min_bucket_reso": 72}, "--resolution 64 is not between --min_bucket_reso 72 and --max_bucket_reso 128."),
    ({"center_crop": True}, "--center_crop cuts the middle square out, --enable_bucket does not: drop one of them"),
    ({"enable_bucket": None, "bucket_no_upscale": True}, "add --enable_bucket, or drop it"),
    ({"masked_loss": True, "alpha_mask": True}, "--masked_loss takes masks from files, --alpha_mask from pictures"),
    ({"crops_per_picture": 1}, "--crops_per_picture has to be at least 2, not 1"),
    ({"unmasked_weight": 1.5}, "--unmasked_weight has to be between 0 and 1, not 1.5"),
    ({"unmasked_weight": "nan"}, "--unmasked_weight has to be between 0 and 1, not nan"),
]


@pytest.mark.parametrize(("chosen", "words"), REFUSED)
def test_options_that_cannot_be(train: Train, tmp_path: Path, chosen: dict[str, object], words: str) -> None:
    assert_refused(train(output_dir=tmp_path, **({"enable_bucket": True} | chosen)), 2, words)


def test_bad_pictures_and_masks_are_named(train: Train, tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "pictures", masks=())

    def refused(*words: str, **chosen: object) -> None:
        assert_refused(train(output_dir=tmp_path / "out", train_data_dir=folder, **chosen), 1, *words)
        assert not (tmp_path / "out").exists()

    Image.new("RGB", (300, 20)).save(folder / "long.png")
    Image.new("RGB", (30, 90)).save(folder / "small.png")
    refused(
        f"In the picture folder {folder}, no bucket fits: long.png: 300 x 20 pixels: only 27% of them would fit into "
        "the bucket 128 x 32. Cut the picture itself, or let buckets have other sizes",
        enable_bucket=True,
    )
    smaller = "smaller than --min_bucket_reso 32, and --bucket_no_upscale enlarges nothing. Drop that, or allow"
    refused(
        f"long.png: 300 x 20 pixels: its bucket would be 240 x 16, {smaller}",
        f"small.png: 30 x 90 pixels: its bucket would be 24 x 88, {smaller}",
        enable_bucket=True,
        bucket_no_upscale=True,
    )
    for name in ("long", "small"):
        (folder / f"{name}.png").unlink()

    Image.new("L", (64, 63), 255).save(folder / "c-mask.png")
    Image.new("RGBA", SHAPES["d"], (255, 255, 255, 0)).save(folder / "d-mask.png")  # white, and transparent
    Image.new("L", (64, 64), 255).save(folder / "z-mask.png")
    refused(
        f"In the picture folder {folder}, repair or remove:",
        "c-mask.png: 64 x 63 pixels, and c.png has 64 x 64: both need the same",
        "d-mask.png: black everywhere, so that nothing of d.png would be learned",
        "z-mask.png: no picture z.* is there",
        masked_loss=True,
    )
    for name in "cdz":
        (folder / f"{name}-mask.png").unlink()
    refused(f"--masked_loss: none of the pictures in {folder} has a mask. Put NAME-mask.png", masked_loss=True)
    refused(f"--alpha_mask: none of the pictures in {folder} has an alpha channel. Make transp", alpha_mask=True)
    Image.new("RGBA", (64, 64), (255, 0, 0, 0)).save(folder / "c.png")
    refused("c.png: transparent everywhere, so that nothing of it would be learned", alpha_mask=True)


def test_what_may_be_a_mistake_is_said(train: Train, tmp_path: Path) -> None:
    """Masks that nobody asked for are pictures, as they were before; a plain run's checkpoint knows no new option."""
    folder = write_pictures(tmp_path / "pictures", masks=("b", "a"))
    result = train(output_dir=tmp_path / "out", train_data_dir=folder)
    assert "icom: a-mask.png, b-mask.png: learned as pictures. If they are masks, add --masked_loss." in result.err
    identity = json.loads((tmp_path / "out/checkpoint-3/state.json").read_text())["identity"]
    assert len(identity["pictures"]) == 7
    assert identity["options"].keys().isdisjoint(f.name for f in dataclasses.fields(PictureOptions))
    result = train(output_dir=tmp_path / "square", random_crop=True)
    assert "--random_crop has nothing to choose from" in result.err


def test_vae_of_more_levels() -> None:
    check_vae(transform_of(options(enable_bucket=True, random_crop=True)), 4)
    with pytest.raises(UsageError, match="one latent of 16 x 16 pixels, so that it has to be a multiple of 16"):
        check_vae(transform_of(options(enable_bucket=True)), 5)

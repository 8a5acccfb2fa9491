"""`icom tune`: what it tries, what it picks, and that each try is a run of `icom train`.

Guards icom.training.tune, icom.training.tune_report and icom.config.tune.
"""

from __future__ import annotations

import itertools
import json
import math
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

from icom.models.architectures import ARCHITECTURES
from icom.training import train_validation
from icom.training.stopping import best, chosen
from icom.training.tune import rounds
from tests.support.checkpoints import assert_same_tensors, validation_curve
from tests.support.command import TRAIN, Result, assert_message, assert_refused, train_arguments
from tests.support.ranks import Ranks
from tests.support.waiting import send_at

Icom = Callable[..., Result]
BLOCKS = ("down_block_types", "up_block_types")
OPTIONS: dict[str, object] = {
    "max_train_steps": 8,
    "validation_share": 0.5,
    "learning_rates": (1e-3, 1e-2, 1e-1),
    "vectors": (1,),
}


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four samples make a validation; what there is to test does not depend on their number."""
    monkeypatch.setattr(train_validation, "SAMPLES", 4)


def words(**options: object) -> list[str]:
    given = {name: value for name, value in TRAIN.items() if name not in ("learning_rate", "report_to")}
    found = ["tune"]
    for name, value in (given | OPTIONS | options).items():
        if isinstance(value, tuple):
            found += [f"--{name}", *map(str, value)]
        elif value is not None:
            found.append(f"--{name}={value}")
    return found


def rows(path: Path) -> torch.Tensor:
    return load_file(path)["<robot>"]


@pytest.mark.parametrize(("candidates", "longest", "every"), [(1, 500, 23), (2, 500, 23), (7, 500, 10), (14, 5000, 90)])
def test_rounds_halve_and_double(candidates: int, longest: int, every: int) -> None:
    planned = rounds(candidates, longest, every)
    assert planned[0][0] == candidates
    assert planned[-1] == (1, longest)
    for (many, step), (few, later) in itertools.pairwise(planned):
        assert few == math.ceil(many / 2)
        assert step % every == 0
        assert 0 <= later / 2 - step + every <= 2 * every
    ends = [0, *(step for _, step in planned)]
    steps = sum(count * (step - before) for (count, step), before in zip(planned, ends, strict=False))
    # Half of the steps of each round are new, but for the first.
    assert steps <= longest * (1.5 + math.log2(candidates) / 2) + candidates * every


def test_each_try_is_a_run_of_train_and_the_best_is_written(tmp_path: Path, icom: Icom) -> None:
    output = tmp_path / "tune"
    result = icom(*words(output_dir=output))
    assert result.code == 0, result
    tries = {one["learning_rate"]: one for one in json.loads((output / "tune.json").read_text())}
    assert tries.keys() == {1e-3, 1e-2, 1e-1}
    assert rounds(3, 8, 2) == [(3, 2), (2, 4), (1, 8)]
    winner = max(tries.values(), key=lambda one: one["rounds"])
    assert next(iter(json.loads((output / "tune.json").read_text()))) == winner
    for heading in ("learning rate", "vectors", "validation loss"):
        assert heading in result.out

    # The two with the lowest loss after 2 steps went on, and the better of them after 4.
    lowest = {rate: dict(one["curve"]) for rate, one in tries.items()}
    second = sorted(tries, key=lambda rate: min(lowest[rate][step] for step in (0, 2)))[:2]
    last = min(second, key=lambda rate: min(lowest[rate][step] for step in (0, 2, 4)))
    assert {rate: one["rounds"] for rate, one in tries.items()} == {
        rate: 3 if rate == last else 2 if rate in second else 1 for rate in tries
    }

    # Each alone, for as many steps: the same losses, the same rows.
    for rate, one in tries.items():
        alone = tmp_path / f"alone-{rate:g}"
        given = TRAIN | {"validation_share": "0.5", "learning_rate": str(rate)}
        given |= {"max_train_steps": str(one["steps"]), "output_dir": str(alone)}
        assert icom("train", *(f"--{name}={value}" for name, value in given.items())).code == 0
        folder = output / "tries" / f"lr-{rate:g}-vectors-1"
        assert validation_curve(folder) == validation_curve(alone) == [tuple(point) for point in one["curve"]]
        assert_same_tensors(folder / f"checkpoint-{one['steps']}", alone / f"checkpoint-{one['steps']}")
        assert best(validation_curve(alone)) == (one["best_step"], one["best_loss"])

    # The file makes the rows that are there.
    again = icom("train", "--config", str(output / "best.yaml"), "--output_dir", str(tmp_path / "again"))
    assert again.code == 0
    learned = rows(output / "learned_embeds.safetensors")
    assert torch.equal(rows(tmp_path / "again" / "learned_embeds.safetensors"), learned)
    settings = yaml.safe_load((output / "best.yaml").read_text())
    assert settings["learning_rate"] == winner["learning_rate"]
    assert settings["max_train_steps"] == chosen([tuple(point) for point in winner["curve"]])[0]


@pytest.mark.long
def test_two_ranks_try_as_one_does(tmp_path: Path, icom: Icom) -> None:
    """The same total batch: the same losses, up to the rounding of sums of gradients, and so the same choices."""
    assert icom(*words(output_dir=tmp_path / "alone", train_batch_size=2)).code == 0
    group = Ranks(tmp_path, 2, "-c", FEW, *words(output_dir="out"))
    assert [result.code for result in group.results()] == [0, 0]
    found, expected = (
        json.loads((folder / "tune.json").read_text()) for folder in (tmp_path / "rank0" / "out", tmp_path / "alone")
    )
    assert not (tmp_path / "rank1" / "out").exists()
    names = ("learning_rate", "vectors", "rounds", "steps", "best_step")
    assert [[one[name] for name in names] for one in found] == [[one[name] for name in names] for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert [loss for _, loss in one["curve"]] == pytest.approx([loss for _, loss in other["curve"]], rel=1e-5)
    learned, alone = (
        rows(folder / "learned_embeds.safetensors") for folder in (tmp_path / "rank0/out", tmp_path / "alone")
    )
    torch.testing.assert_close(learned, alone, rtol=1e-3, atol=1e-5)


FEW = """
import sys
from icom.cli import main
from icom.training import train_validation
train_validation.SAMPLES = 4
main(sys.argv[1:])
"""
"""A process that takes as few samples as the tests' own."""


@pytest.mark.long
def test_ctrl_c_leaves_the_best_so_far_and_it_goes_on(tmp_path: Path, icom: Icom) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options: dict[str, object] = {"learning_rates": (1e-2,), "vectors": (1, 2), "max_train_steps": 12}
    assert icom(*words(output_dir=whole, **options)).code == 0
    log = parts / "tries" / "lr-0.01-vectors-2" / "metrics.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        send_at(2, log, signal.SIGINT, patch)
        stopped = icom(*words(output_dir=parts, **options))
    assert_message(stopped, 130, "--resume_from_checkpoint latest")
    assert 1 < len((log.read_text()).splitlines()) < 6
    assert len(json.loads((parts / "tune.json").read_text())) == 2
    assert (parts / "learned_embeds.safetensors").exists()
    assert icom(*words(output_dir=parts, resume_from_checkpoint="latest", **options)).code == 0
    for name in ("tune.json", "best.yaml", "learned_embeds.safetensors"):
        assert (parts / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"learning_rate": 1e-3}, ("--learning_rate is what `icom tune` finds", "--learning_rates")),
        ({"num_vectors": 2}, ("--num_vectors", "--vectors")),
        ({"learning_rates": (1e-3, 0)}, ("--learning_rates", "positive")),
        ({"learning_rates": (1e-3, 1e-3)}, ("--learning_rates", "twice")),
        ({"vectors": (0,)}, ("vectors", "at least 1")),
        ({"validation_share": 0}, ("--validation_share",)),
        ({"lr_scheduler": "cosine"}, ("--lr_scheduler cosine", "constant")),
        ({"resume_from_checkpoint": "checkpoint-5"}, ("--resume_from_checkpoint", "latest")),
        ({"initializer_token": "a small toy"}, ("3 tokens",)),
    ],
)
def test_bad_options(options: dict[str, object], parts: tuple[str, ...], tmp_path: Path, icom: Icom) -> None:
    assert_refused(icom(*words(output_dir=tmp_path, **options)), 2, *parts)


def test_says_what_train_says(tmp_path: Path, icom: Icom) -> None:
    """Captions, those whose end is not read, buckets, what computes; and named epochs decide the steps there, too."""
    photos = tmp_path / "photos"
    photos.mkdir()
    for number, shape in enumerate([(64, 64), (40, 100)]):
        Image.new("RGB", shape, "red").save(photos / f"{number}.png")
        (photos / f"{number}.txt").write_text("a photo of a <robot>" + ", red" * (35 + number))
    options = {"train_data_dir": photos, "enable_bucket": True, "num_train_epochs": 2, "repeats": 2}
    flags = words(output_dir=tmp_path / "tune", max_train_steps=None, learning_rates=(1e-2,), vectors=(2, 1), **options)
    tuned = icom(*[word.removesuffix("=True") for word in flags])
    assert tuned.code == 0, tuned
    trained = icom(*train_arguments(output_dir=tmp_path / "train", max_train_steps=None, num_vectors=2, **options))
    assert trained.code == 0, trained
    assert "2 tries in 2 rounds, at most 12 steps in all: as many as 1.5 runs of 8." in tuned.out
    for line in ("icom: captions: those of the 2 pictures", "icom: 2 buckets", "  64 x 64  1 picture"):
        (said,) = (found for found in trained.out.splitlines() if found.startswith(line))
        assert tuned.out.splitlines().count(said) == 1, tuned.out
    cut = "does not read the ends of captions (2: 0.txt (76 tokens), 1.txt (78 tokens))"  # with one vector: only 1.txt
    assert trained.err.count(cut) == tuned.err.count(cut) == 1
    assert tuned.out.count("2 tries of up to 256 trainable numbers (2 x 128)") == 1


def test_refuses_what_train_refuses(tmp_path: Path, icom: Icom, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before weights are read."""
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "schedulefree", None)
        result = icom(*words(output_dir=tmp_path, optimizer="schedule_free_adamw"))
        assert_refused(result, 1, "--optimizer schedule_free_adamw needs schedulefree")
    tiny = ARCHITECTURES["tiny"]
    five = {name: (tiny.vae[name][0], *tiny.vae[name]) for name in ("block_out_channels", *BLOCKS)}
    monkeypatch.setitem(ARCHITECTURES, "tiny", replace(tiny, vae=tiny.vae | five))
    for command in (words, train_arguments):
        asked = {"pretrained_model_name_or_path": "random:tiny", "bucket_reso_steps": 8, "output_dir": tmp_path}
        bounds = {"min_bucket_reso": 32, "max_bucket_reso": 128}
        flags = [*command(**asked, **bounds), "--enable_bucket"]
        assert_refused(icom(*flags), 2, "--bucket_reso_steps 8", "one latent of 16 x 16 pixels")


def test_nothing_learned_is_an_error(tmp_path: Path, icom: Icom) -> None:
    result = icom(*words(output_dir=tmp_path, learning_rates=(1e-30, 2e-30), max_train_steps=2))
    assert result.code == 1
    assert "None of 2 tries learned anything" in result.err
    assert (tmp_path / "tune.json").exists()

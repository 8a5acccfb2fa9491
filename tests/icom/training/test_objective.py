"""The loss of textual inversion with each option of the objective is the papers' formula.

Guards icom.training.objective, icom.training.step, icom.data.sampling and icom.config.objective.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from icom import backends
from icom.config.finetune import FinetuneConfig
from icom.config.train import TrainConfig
from icom.data.sampling import SampleStream, Stream, TimestepSampling, raw_words
from icom.models import loading, pipelines
from icom.training.finetune_run import sampler_of
from icom.training.material import open_material
from icom.training.run import Run, prepare
from icom.training.step import batch_loss
from tests.support.command import Result, assert_refused

Train = Callable[..., Result]


def model_with(folder: Path, **scheduler: object) -> str:
    """The bundled model with another scheduler."""
    target = folder / "model"
    shutil.copytree(loading.BUNDLE, target)
    file = target / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | scheduler))
    return str(target)


def prepared(model_name: str, **options: object) -> Run:
    values: dict[str, object] = {
        "train_data_dir": "bundled",
        "placeholder_token": "<robot>",
        "initializer_token": "toy",
        "resolution": 64,
        "max_train_steps": 1,
        "seed": 5,
    }
    backend, _ = backends.resolve("cpu", "no")
    model = loading.load(loading.find(model_name), torch.float32)
    config = TrainConfig(**(values | options))  # type: ignore[arg-type]
    return prepare(config, backend, Accelerator(cpu=True), model, open_material(config))


def written_out(run: Run, samples: range, *, velocity: bool, zero_snr: bool) -> float:
    """The loss as the papers have it, in float64 where icom's own code has a part in it; min-SNR's gamma is 5."""
    config = run.config
    left = np.cumprod(1 - np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2)
    if zero_snr:  # Lin et al., algorithm 1
        roots = np.sqrt(left)
        left = ((roots - roots[-1]) * roots[0] / (roots[0] - roots[-1])) ** 2
    total = 0.0
    for index in samples:
        sample = run.stream[index]
        word, seed = raw_words(5, Stream.SAMPLE, index, count=4)[2:]
        end = config.max_timestep or 1000
        timestep = config.min_timestep + int(word) % (end - config.min_timestep)
        if config.timestep_sampling == "logit_normal":
            normal = float(torch.special.ndtri(torch.tensor(int(word) / 2**64, dtype=torch.float64)))
            share = 1 / (1 + math.exp(-(config.logit_mean + config.logit_std * normal)))
            timestep = config.min_timestep + int(share * (end - config.min_timestep))
        assert sample.timestep == timestep
        generator = torch.Generator().manual_seed(int(seed) >> 1)
        of_vae, noise = torch.randn(2, 4, 8, 8, generator=generator)
        noise = noise + config.noise_offset * torch.randn(4, 1, 1, generator=generator)
        scaling = json.loads((loading.BUNDLE / "vae/config.json").read_text())["scaling_factor"]
        latents = run.moments.sample(sample, of_vae) * scaling
        keep, add = math.sqrt(left[timestep]), math.sqrt(1 - left[timestep])
        states = run.method.condition(run.model, [sample]).hidden_states
        time = torch.tensor([timestep])
        predicted = run.model.unet((keep * latents + add * noise)[None], time, states).sample[0]
        wanted = keep * noise - add * latents if velocity else noise
        snr = left[timestep] / (1 - left[timestep])
        weight = min(snr, 5) / (snr + 1 if velocity else snr) if config.snr_gamma else 1
        total += weight * float((predicted - wanted).square().mean())
    return total / len(samples)


@torch.no_grad()
def test_loss_with_each_option_is_the_formula(tmp_path: Path) -> None:
    samples = range(6)
    options: dict[str, object] = {"snr_gamma": 5.0, "noise_offset": 0.3, "min_timestep": 3, "max_timestep": 200}
    run = prepared("bundled", **options)
    assert float(batch_loss(run, samples)) == pytest.approx(
        written_out(run, samples, velocity=False, zero_snr=False), rel=1e-4
    )
    plain = prepared("bundled")
    assert float(batch_loss(plain, samples)) == pytest.approx(
        written_out(plain, samples, velocity=False, zero_snr=False), rel=1e-4
    )
    assert (run.stream[0].picture, run.stream[0].flip, run.stream[0].template, run.stream[0].noise_seed) == (
        *(plain.stream[0].picture, plain.stream[0].flip, plain.stream[0].template, plain.stream[0].noise_seed),
    )
    options = {"snr_gamma": 5.0, "timestep_sampling": "logit_normal", "logit_mean": 1.5, "logit_std": 2.0}
    velocity = model_with(tmp_path, prediction_type="v_prediction")
    run = prepared(velocity, rescale_betas_zero_snr=True, **options)
    assert float(batch_loss(run, samples)) == pytest.approx(
        written_out(run, samples, velocity=True, zero_snr=True), rel=1e-4
    )
    assert run.model.noise_scheduler.alphas_cumprod[-1] == 0
    drawn = pipelines.with_schedule_of(pipelines.pipeline_of(run.model, "model").scheduler, run.model.noise_scheduler)
    assert drawn.config["rescale_betas_zero_snr"]  # what the whole pipeline is saved with


@torch.no_grad()
def test_zero_snr_is_on_where_the_models_scheduler_says_so(tmp_path: Path) -> None:
    model = model_with(tmp_path, prediction_type="v_prediction", rescale_betas_zero_snr=True)
    run, samples = prepared(model, timestep_sampling="logit_normal", logit_mean=4.0), range(3)
    assert float(batch_loss(run, samples)) == pytest.approx(
        written_out(run, samples, velocity=True, zero_snr=True), rel=1e-4
    )
    again = prepared(model, timestep_sampling="logit_normal", logit_mean=4.0, rescale_betas_zero_snr=True)
    assert batch_loss(again, samples) == batch_loss(run, samples)


@torch.no_grad()
def test_min_snr_where_nothing_is_left_of_the_picture(tmp_path: Path) -> None:
    """min(0, gamma) / 0 of a model that predicts noise: its limit, 1, and no NaN."""
    model, last = model_with(tmp_path, rescale_betas_zero_snr=True), {"min_timestep": 999}
    weighed, plain = prepared(model, **last, snr_gamma=5.0), prepared(model, **last)
    assert weighed.model.noise_scheduler.alphas_cumprod[-1] == 0
    assert float(batch_loss(weighed, range(3))) == pytest.approx(float(batch_loss(plain, range(3))), rel=1e-6)


def test_timesteps_stay_in_their_range_and_have_their_distribution() -> None:
    """Against the normal distribution's integral; chi-square bounds at about five standard deviations."""
    stream = SampleStream(7, 5, 40, 27, 1000, TimestepSampling(200, 700, (0.5, 0.8)))
    drawn = np.array([stream[i].timestep for i in range(10_000)])
    assert drawn.min() >= 200
    assert drawn.max() < 700
    edges = np.linspace(0, 1, 11)
    normals = (np.log(edges[1:-1] / (1 - edges[1:-1])) - 0.5) / 0.8
    below = np.array([0, *(0.5 * (1 + math.erf(normal / math.sqrt(2))) for normal in normals), 1])
    expected = np.diff(below) * len(drawn)
    found, _ = np.histogram(drawn, bins=200 + 500 * edges)
    assert float(((found - expected) ** 2 / expected).sum()) < 9 + 5 * 18**0.5
    even = SampleStream(7, 5, 40, 27, 1000, TimestepSampling(200, 700))
    found, _ = np.histogram([even[i].timestep for i in range(10_000)], bins=10, range=(200, 700))
    assert float(((found - 1000) ** 2 / 1000).sum()) < 9 + 5 * 18**0.5
    for word in (0, 2**64 - 1):  # no infinity at the ends
        assert TimestepSampling(10, 20, (0.0, 50.0)).draw(np.uint64(word), 1000) == (10 if word == 0 else 19)


def test_finetune_draws_timesteps_the_same_way() -> None:
    """For what is trained on; what is held back has all of them, so that runs can be compared."""
    config = FinetuneConfig(train_data_dir="x", seed=1, min_timestep=100, max_timestep=101)
    assert sampler_of(config, 1000).timestep_sampling == TimestepSampling(100, 101)
    assert sampler_of(FinetuneConfig(train_data_dir="x", seed=1), 1000).timestep_sampling == TimestepSampling()


@pytest.mark.parametrize(
    ("options", "code", "part"),
    [
        ({"min_timestep": 500, "max_timestep": 500}, 2, "--min_timestep 500 and --max_timestep 500 leave no timestep"),
        ({"min_timestep": -1}, 2, "--min_timestep must not be negative"),
        ({"max_timestep": 1001}, 2, "--max_timestep can be 1000 at most, not 1001: the model has 1000 timesteps"),
        ({"min_timestep": 1000}, 2, "--min_timestep can be 999 at most, not 1000"),
        ({"timestep_sampling": "middle"}, 2, "invalid choice 'middle'"),
        ({"logit_mean": 1}, 2, "--logit_mean is of --timestep_sampling logit_normal: add that, or drop it"),
        ({"timestep_sampling": "logit_normal", "logit_std": 0}, 2, "--logit_std has to be a positive number"),
        ({"timestep_sampling": "logit_normal", "logit_mean": "nan"}, 2, "--logit_mean has to be a number, not nan"),
        ({"snr_gamma": 0}, 2, "--snr_gamma has to be a positive number, not 0"),
        ({"noise_offset": -0.1}, 2, "--noise_offset must not be negative"),
        ({"noise_offset": "inf"}, 2, "--noise_offset has to be a number, not inf"),
        ({"rescale_betas_zero_snr": True}, 1, "needs a UNet that predicts velocity, and this one predicts noise"),
    ],
)
def test_what_makes_no_sense_is_refused(
    options: dict[str, object], code: int, part: str, tmp_path: Path, train: Train
) -> None:
    assert_refused(train(output_dir=tmp_path, **options), code, part)

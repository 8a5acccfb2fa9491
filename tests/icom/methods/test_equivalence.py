"""Row-only training gives the vectors of the field's usual way: train the whole table, put the other rows back.

Guards icom.methods.embedding, icom.training.objective and icom.training.train.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from icom import backends
from icom.bench.reference import ReferenceTrainer
from icom.config.train import TrainConfig
from icom.data.sampling import gaussian_noise
from icom.models import loading
from icom.models.parts import Conditioning
from icom.training.material import open_material
from icom.training.objective import diffusion_loss
from icom.training.run import Run, prepare
from icom.training.step import optimizer_step
from tests.support.command import long

STEPS = 20


def settings(tmp_path: Path, **options: object) -> TrainConfig:
    values: dict[str, object] = {
        "train_data_dir": "bundled",
        "placeholder_token": "<robot>",
        "initializer_token": "toy star",
        "num_vectors": 2,
        "resolution": 64,
        "train_batch_size": 2,
        "learning_rate": 2e-3,  # ICOM's
        "lr_warmup_steps": 0,
        "max_train_steps": STEPS,
        "seed": 3,
        "cache_dir": str(tmp_path),
    }
    return TrainConfig(**(values | options))  # type: ignore[arg-type]


def our_run(config: TrainConfig, model_name: str = "bundled") -> Run:
    backend, _ = backends.resolve("cpu", "no")
    model = loading.load(loading.find(model_name), torch.float32)
    return prepare(config, backend, Accelerator(cpu=True), model, open_material(config))


def reference_rows(run: Run, config: TrainConfig) -> torch.Tensor:
    """The same samples through the reference trainer."""
    model = loading.load(run.model.source, torch.float32)
    trainer = ReferenceTrainer(model, config, run.backend.autocast())
    for batch in range(STEPS * config.gradient_accumulation_steps):
        first = batch * config.train_batch_size
        samples = [run.stream[i] for i in range(first, first + config.train_batch_size)]
        noises = [gaussian_noise(s, run.moments.shape(s.picture)) for s in samples]
        latents = [run.moments.sample(s, noise[0]) for s, noise in zip(samples, noises, strict=True)]
        trainer.train_batch(
            torch.stack(latents) * model.vae.config["scaling_factor"],
            torch.stack([noise[1] for noise in noises]),
            torch.tensor([s.timestep for s in samples]),
            run.method.ids(run.model.tokenizer, samples),
        )
    return trainer.rows


@pytest.mark.parametrize(("weight_decay", "accumulation"), [(1e-2, 1), long(0.0, 1), long(0.0, 3), long(1e-2, 3)])
def test_rows_equal_full_table_training(tmp_path: Path, weight_decay: float, accumulation: int) -> None:
    config = settings(tmp_path, adam_weight_decay=weight_decay, gradient_accumulation_steps=accumulation)
    run = our_run(config)
    initial = run.method.parameters["rows"].detach().clone()
    for step in range(STEPS):
        optimizer_step(run, step * run.samples_per_step)
    expected = reference_rows(run, config)
    assert (initial - expected).abs().max() > 1e-2  # something was learned at all
    torch.testing.assert_close(run.method.parameters["rows"].detach(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("model", ["bundled", "v-prediction"])
def test_loss_is_the_formula(tmp_path: Path, model: str) -> None:
    """Against the equations written out (Ho et al. 2020 eq. 4 and 14; Salimans & Ho 2022 appendix D)."""
    loaded = loading.load(loading.find("bundled"), torch.float32)
    if model == "v-prediction":
        loaded.noise_scheduler.register_to_config(prediction_type="v_prediction")
    torch.manual_seed(0)
    x, noise, text = torch.randn(2, 4, 8, 8), torch.randn(2, 4, 8, 8), torch.randn(2, 77, 128)
    timesteps = torch.tensor([10, 900])
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    alpha_bar = (1 - betas).cumprod(0)[timesteps].view(2, 1, 1, 1).float()
    noisy = alpha_bar.sqrt() * x + (1 - alpha_bar).sqrt() * noise
    target = noise if model == "bundled" else alpha_bar.sqrt() * noise - (1 - alpha_bar).sqrt() * x
    with torch.no_grad():
        expected = (loaded.unet(noisy, timesteps, text).sample - target).square().mean()
        actual = diffusion_loss(loaded.unet, loaded.noise_scheduler, x, noise, timesteps, Conditioning(text))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_same_total_batch_gives_same_vectors_however_it_is_cut(tmp_path: Path) -> None:
    """Batch 3 = batch 1 with accumulation 3, up to the order of float32 sums."""
    results = []
    for batch, accumulation in ((3, 1), (1, 3)):
        config = settings(tmp_path, train_batch_size=batch, gradient_accumulation_steps=accumulation)
        run = our_run(config)
        for step in range(5):
            optimizer_step(run, step * run.samples_per_step)
        results.append(run.method.parameters["rows"].detach())
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-5)

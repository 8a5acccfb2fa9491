"""Training the UNet is what a plain loop does, however many processes share it and wherever it is interrupted.

Guards icom.training.finetune, icom.methods.unet, icom.parallel.sharding and icom.training.ema.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from icom.config.finetune import FinetuneConfig
from icom.data.order import Order
from icom.data.sources import open_source
from icom.methods.unet import Sampler
from icom.models.loading import BUNDLE
from tests.support.command import Result, long
from tests.support.ranks import Ranks

STEPS = 30
CONTEXT = 77
"""Tokens that the bundled text encoder takes."""
OPTIONS: dict[str, object] = {
    "train_data_dir": "synthetic:40",
    "train_batch_size": 2,
    "gradient_accumulation_steps": 3,
    "max_train_steps": STEPS,
    "learning_rate": "1e-3",
    "adam_epsilon": "1e-3",  # Adam's own would make of a rounding error in a tiny gradient a step in another direction
    "lr_scheduler": "cosine",
    "lr_warmup_steps": 5,
    "max_grad_norm": 0.5,
    "checkpointing_steps": STEPS,
    "seed": 3,
    "mixed_precision": "no",
    "report_to": "none",
    "use_ema": True,
    "ema_decay": 0.9,
}


def arguments(**changed: object) -> list[str]:
    """`finetune` with OPTIONS, changed; True is a bare flag, None drops the option."""
    words = ["finetune"]
    for name, value in (OPTIONS | changed).items():
        if value is True:
            words.append(f"--{name}")
        elif value is not None:
            words.append(f"--{name}={value}")
    return words


def checkpoint(folder: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    return load_file(folder / f"checkpoint-{step}" / "state.safetensors")


def part(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_near(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], most: float) -> None:
    assert found.keys() == wanted.keys()
    differences = {name: float((found[name] - wanted[name]).abs().max()) for name in wanted}
    worst = max(differences, key=lambda name: differences[name])
    assert differences[worst] <= most, (worst, differences[worst])


@cache
def plain_loop() -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The same training written down as the papers have it: losses, first weights, last weights, their mean.

    The whole batch at once, without accumulation; diffusers' modules, torch's plain AdamW, diffusers' EMAModel. From
    icom are only the pictures, and which random numbers a sample has.
    """
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from diffusers.training_utils import EMAModel
    from transformers import CLIPTextModel, CLIPTokenizer

    unet = UNet2DConditionModel.from_pretrained(BUNDLE / "unet", torch_dtype=torch.float32).train()
    vae = AutoencoderKL.from_pretrained(BUNDLE / "vae", torch_dtype=torch.float32)
    text_encoder = CLIPTextModel.from_pretrained(BUNDLE / "text_encoder", dtype=torch.float32)
    tokenizer = CLIPTokenizer.from_pretrained(BUNDLE / "tokenizer")
    first = {name: parameter.detach().clone() for name, parameter in unet.named_parameters()}
    config = FinetuneConfig(train_data_dir="synthetic:40")
    source = open_source(config)
    order = Order(source.runs, 3)
    sampler = Sampler(3, 1000, 64, False, False, "lanczos", 0.1)
    left = np.cumprod(1 - np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2)  # scaled_linear betas
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3, eps=1e-3, weight_decay=1e-2, foreach=False)
    ema = EMAModel(unet.parameters(), decay=0.9)
    told = []
    for step in range(STEPS):
        rate = 1e-3 * (step / 5 if step < 5 else 0.5 * (1 + np.cos(np.pi * (step - 5) / (STEPS - 5))))
        optimizer.param_groups[0]["lr"] = rate
        latents, noises, timesteps, captions = [], [], [], []
        for sample in range(6 * step, 6 * step + 6):
            prepared = sampler(sample, source.read(order[sample]))
            assert prepared.pixels is not None
            both = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(prepared.noise_seed))
            with torch.no_grad():
                posterior = vae.encode(prepared.pixels[None]).latent_dist
            latents.append((posterior.mean[0] + posterior.std[0] * both[0]) * vae.config.scaling_factor)
            noises.append(both[1])
            timesteps.append(prepared.timestep)
            captions.append(prepared.caption)
        kept = torch.tensor(left[timesteps], dtype=torch.float64).view(-1, 1, 1, 1)
        noisy = kept.sqrt() * torch.stack(latents) + (1 - kept).sqrt() * torch.stack(noises)
        options = {"padding": "max_length", "truncation": True, "max_length": CONTEXT, "return_tensors": "pt"}
        ids = tokenizer(captions, **options).input_ids
        with torch.no_grad():
            states = text_encoder(ids)[0]
        predicted = unet(noisy.float(), torch.tensor(timesteps), states).sample
        loss = torch.nn.functional.mse_loss(predicted, torch.stack(noises))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(unet.parameters(), 0.5)
        optimizer.step()
        ema.step(unet.parameters())
        told.append(loss.item())
    last = {name: parameter.detach() for name, parameter in unet.named_parameters()}
    return told, first, last, dict(zip(last, ema.shadow_params, strict=True))


def assert_as_plain(folder: Path) -> None:
    told, first, last, mean = plain_loop()
    assert np.allclose(losses(folder), told, rtol=0, atol=2e-6)
    found = checkpoint(folder)
    moved = max(float((last[name] - first[name]).abs().max()) for name in last)
    assert moved > 1e-3  # that it agrees means something
    assert_near(part(found, "parameter/"), last, 1e-6)
    assert_near(part(found, "mean/"), mean, 1e-6)


def test_one_process_is_a_plain_loop(tmp_path: Path, icom: Callable[..., Result]) -> None:
    assert icom(*arguments(output_dir=tmp_path)).code == 0
    assert_as_plain(tmp_path)
    pipeline = load_file(tmp_path / "current_pipeline" / "unet" / "diffusion_pytorch_model.safetensors")
    assert_near(pipeline, part(checkpoint(tmp_path), "mean/"), 0)


@pytest.mark.parametrize(
    ("count", "parallel"),
    [(2, "ddp"), long(3, "ddp"), long(2, "full_shard"), long(3, "shard_grad_op")],
)
def test_several_processes_are_a_plain_loop(count: int, parallel: str, tmp_path: Path) -> None:
    words = arguments(
        output_dir="out", parallel=parallel, train_batch_size=6 // count, gradient_accumulation_steps=None
    )
    if count == 3:
        words = arguments(output_dir="out", parallel=parallel, train_batch_size=1, gradient_accumulation_steps=2)
    group = Ranks(tmp_path, count, "-m", "icom", *words)
    try:
        results = group.results()
    finally:
        group.end()
    assert [result.code for result in results] == [0] * count, results
    assert f"icom: {parallel}: asked for" in results[0].out
    assert_as_plain(group.folders[0] / "out")

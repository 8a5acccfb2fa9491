"""Training the UNet is what a plain loop does, however many processes share it and wherever it is interrupted.

Guards icom.training.finetune, icom.methods.unet, icom.parallel.sharding and icom.training.ema.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from icom.config.finetune import FinetuneConfig
from icom.data.order import Order
from icom.data.sources import open_source
from icom.methods.unet import Sampler
from icom.models.loading import BUNDLE
from icom.training.ema import Decay, Ema, limit_of_half_life
from tests.support.command import Result, assert_message, assert_refused, long, start_process
from tests.support.ranks import Ranks
from tests.support.waiting import wait_until

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


def steps_of(folder: Path) -> int:
    """Logged so far."""
    return len(losses(folder)) if (folder / "metrics.jsonl").exists() else 0


def assert_near(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], most: float) -> None:
    assert found.keys() == wanted.keys()
    differences = {name: float((found[name] - wanted[name]).abs().max()) for name in wanted}
    worst = max(differences, key=lambda name: differences[name])
    assert differences[worst] <= most, (worst, differences[worst])


@cache
def plain_loop(
    steps: int,
) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
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
    for step in range(steps):
        rate = 1e-3 * (step / 5 if step < 5 else 0.5 * (1 + np.cos(np.pi * (step - 5) / (steps - 5))))
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


def assert_as_plain(folder: Path, steps: int) -> None:
    told, first, last, mean = plain_loop(steps)
    assert np.allclose(losses(folder), told, rtol=0, atol=2e-6)
    found = checkpoint(folder, steps)
    moved = max(float((last[name] - first[name]).abs().max()) for name in last)
    assert moved > 3e-4  # that it agrees means something
    assert_near(part(found, "parameter/"), last, 1e-6)
    assert_near(part(found, "mean/"), mean, 1e-6)


@pytest.mark.parametrize("steps", [7, long(STEPS)])
def test_one_process_is_a_plain_loop(steps: int, tmp_path: Path, icom: Callable[..., Result]) -> None:
    assert icom(*arguments(output_dir=tmp_path, max_train_steps=steps)).code == 0
    assert_as_plain(tmp_path, steps)
    pipeline = load_file(tmp_path / "current_pipeline" / "unet" / "diffusion_pytorch_model.safetensors")
    assert_near(pipeline, part(checkpoint(tmp_path, steps), "mean/"), 0)


@pytest.mark.parametrize(
    ("count", "parallel", "steps"),
    [(2, "ddp", 7), long(3, "ddp", STEPS), long(2, "full_shard", 10), long(3, "shard_grad_op", 10)],
)
def test_several_processes_are_a_plain_loop(count: int, parallel: str, steps: int, tmp_path: Path) -> None:
    batch, accumulated = {2: (3, 1), 3: (1, 2)}[count]
    words = arguments(
        output_dir="out",
        parallel=parallel,
        max_train_steps=steps,
        train_batch_size=batch,
        gradient_accumulation_steps=accumulated,
    )
    group = Ranks(tmp_path, count, "-m", "icom", *words)
    try:
        results = group.results()
    finally:
        group.end()
    assert [result.code for result in results] == [0] * count, results
    assert f"icom: {parallel}: asked for" in results[0].out
    assert_as_plain(group.folders[0] / "out", steps)


SHORT: dict[str, object] = {
    "train_data_dir": "synthetic:24",
    "train_batch_size": 1,
    "gradient_accumulation_steps": 2,
    "max_train_steps": 8,
    "checkpointing_steps": 2,
    "learning_rate": "1e-3",
    "random_flip": True,
    "noise_offset": 0.1,
    "snr_gamma": 5,
    "num_validation_samples": 3,
    "validation_steps": 2,
}


def assert_same(found: Path, wanted: Path, step: int) -> None:
    """Weights, mean and optimizer, to the bit; the losses too."""
    one, other = checkpoint(found, step), checkpoint(wanted, step)
    assert one.keys() == other.keys()
    assert not [name for name in one if not torch.equal(one[name], other[name])]
    assert losses(found) == losses(wanted)
    assert (found / "validation.jsonl").read_text() == (wanted / "validation.jsonl").read_text()


def test_stopped_and_resumed_is_the_same_run(tmp_path: Path, icom: Callable[..., Result]) -> None:
    """SIGTERM in the middle of an epoch; the raw weights go on from the raw weights, and the mean from the mean."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert icom(*arguments(output_dir=whole, **SHORT)).code == 0
    process = start_process(*arguments(output_dir=stopped, **SHORT))
    wait_until(lambda: process.poll() is not None or steps_of(stopped) > 2)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM, told
    assert "Continue with the same command and --resume_from_checkpoint latest" in told
    pipeline = load_file(stopped / "current_pipeline" / "unet" / "diffusion_pytorch_model.safetensors")
    assert pipeline.keys() == part(checkpoint(whole, 8), "mean/").keys()
    result = icom(*arguments(output_dir=stopped, resume_from_checkpoint="latest", **SHORT))
    assert result.code == 0
    assert "resumed after step" in result.out
    assert_same(stopped, whole, 8)


@pytest.mark.long
def test_validation_loss_is_the_same_on_any_number_of_processes(tmp_path: Path, icom: Callable[..., Result]) -> None:
    """Of the mean of the weights, on samples that are not trained on; five of them for two processes."""
    options: dict[str, object] = {"max_train_steps": 4, "num_validation_samples": 5, "validation_steps": 2}
    assert icom(*arguments(output_dir=tmp_path / "one", gradient_accumulation_steps=1, **options)).code == 0
    options |= {"gradient_accumulation_steps": 1, "train_batch_size": 1, "parallel": "ddp"}
    group = Ranks(tmp_path / "two", 2, "-m", "icom", *arguments(output_dir="out", **options))
    assert [result.code for result in group.results()] == [0, 0]
    files = (tmp_path / "one" / "validation.jsonl", group.folders[0] / "out" / "validation.jsonl")
    one, two = ([json.loads(line) for line in file.read_text().splitlines()] for file in files)
    assert [row["step"] for row in one] == [row["step"] for row in two] == [2, 4]
    assert [row["loss"] for row in one] == pytest.approx([row["loss"] for row in two], rel=1e-5)
    assert one[0]["loss"] != one[1]["loss"]


@pytest.mark.long
@pytest.mark.parametrize(("parallel", "kills", "steps"), [("ddp", 3, 24), ("full_shard", 2, 14)])
def test_kill_9_at_random_moments_of_two_processes(parallel: str, kills: int, steps: int, tmp_path: Path) -> None:
    """All processes, one of them, at any moment: whatever was being written, the run ends with the same weights."""
    words = arguments(output_dir="out", parallel=parallel, **SHORT | {"max_train_steps": steps})
    whole = Ranks(tmp_path / "whole", 2, "-m", "icom", *words)
    assert [result.code for result in whole.results()] == [0, 0]
    chance = np.random.default_rng(11)
    killed = tmp_path / "killed"
    for kill in range(kills):
        group = Ranks(killed, 2, "-m", "icom", *words, "--resume_from_checkpoint=latest")
        out = group.folders[0] / "out"
        done = steps_of(out)
        try:
            group.wait_for_steps(min(done + 3, steps - 1))
            time.sleep(chance.uniform(0, 0.6))
            for process in group.processes if kill % 2 else group.processes[1:]:
                process.kill()
            codes = [result.code for result in group.results()]
        finally:
            group.end()
        assert -signal.SIGKILL in codes, "the run was over before it was killed: raise its steps"
        if kill % 2 == 0:
            assert codes == [75, -signal.SIGKILL]  # who lost another one is worth another try
    last = Ranks(killed, 2, "-m", "icom", *words, "--resume_from_checkpoint=latest")
    results = last.results()
    assert [result.code for result in results] == [0, 0], results
    assert_same(last.folders[0] / "out", whole.folders[0] / "out", steps)


def test_mean_is_diffusers_ema_model() -> None:
    from diffusers.training_utils import EMAModel

    for warmup, limit in ((False, 0.9999), (False, 0.5), (True, 0.9), (False, limit_of_half_life(20))):
        torch.manual_seed(0)
        theirs_of = [torch.nn.Parameter(torch.randn(5, 3)), torch.nn.Parameter(torch.randn(4))]
        theirs = EMAModel(theirs_of, decay=limit, use_ema_warmup=warmup)
        ours = Ema(Decay(limit, warmup), {str(n): p.detach().clone() for n, p in enumerate(theirs_of)})
        for _ in range(60):
            with torch.no_grad():
                for parameter in theirs_of:
                    parameter.add_(torch.randn_like(parameter))
            theirs.step(theirs_of)
            ours.update({str(n): p for n, p in enumerate(theirs_of)})
        for mean, wanted in zip(ours.weights.values(), theirs.shadow_params, strict=True):
            assert torch.allclose(mean, wanted, rtol=0, atol=1e-5)
    assert limit_of_half_life(20) ** 20 == pytest.approx(0.5)


def test_min_snr_is_the_papers(tmp_path: Path) -> None:
    """Weights of Hang et al.: for noise min(SNR, 5) / SNR, for velocity min(SNR, 5) / (SNR + 1)."""
    from diffusers import DDPMScheduler

    from icom.models.parts import Conditioning
    from icom.training.objective import diffusion_loss

    class Zero(torch.nn.Module):
        def forward(self, noisy: torch.Tensor, *_: Any, **__: Any) -> Any:
            return type("Output", (), {"sample": torch.zeros_like(noisy)})

    for kind, zero_snr in (("epsilon", False), ("v_prediction", False), ("v_prediction", True)):
        scheduler = DDPMScheduler(prediction_type=kind, beta_schedule="scaled_linear", rescale_betas_zero_snr=zero_snr)
        timesteps = torch.tensor([3, 400, 999])
        latents, noise = torch.randn(2, 3, 4, 8, 8)
        left = scheduler.alphas_cumprod[timesteps].double()
        snr = left / (1 - left)
        keep, add = left.sqrt().view(-1, 1, 1, 1), (1 - left).sqrt().view(-1, 1, 1, 1)
        target = noise if kind == "epsilon" else keep * noise - add * latents
        weight = snr.clamp(max=5) / (snr if kind == "epsilon" else snr + 1)
        wanted = (weight * target.double().square().mean(dim=(1, 2, 3))).mean()
        states = Conditioning(torch.zeros(3, 1, 1))
        found = diffusion_loss(Zero(), scheduler, latents, noise, timesteps, states, 5.0)  # type: ignore[arg-type]
        assert float(found) == pytest.approx(float(wanted), rel=1e-4)


@pytest.mark.parametrize(
    ("options", "code", "parts"),
    [
        ({"max_train_steps": 3, "num_examples_to_see": 9}, 2, ["--max_train_steps or --num_examples_to_see"]),
        ({"use_ema": None, "ema_decay": None, "ema_warmup": True}, 2, ["add --use_ema"]),
        ({"rescale_betas_zero_snr": True}, 1, ["--prediction_type v_prediction"]),
        ({"weights_from": "/nowhere"}, 1, ["No weights of a UNet in /nowhere"]),
        ({"num_validation_samples": 40}, 2, ["would leave nothing of 40 samples"]),
        ({"backend": "ipex"}, 2, ["use --backend cpu"]),
        ({"caption_dropout_rate": 1.5}, 2, ["between 0 and 1"]),
    ],
)
def test_what_cannot_work_is_refused(
    options: dict[str, object], code: int, parts: list[str], tmp_path: Path, icom: Callable[..., Result]
) -> None:
    assert_refused(icom(*arguments(output_dir=tmp_path / "out", **options)), code, *parts)


SMALL = {
    "sample_size": 8,
    "block_out_channels": [32, 64],
    "norm_num_groups": 8,
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    "cross_attention_dim": 128,
}
"""A UNet's configuration."""


@pytest.mark.long
def test_from_scratch_learns(tmp_path: Path, icom: Callable[..., Result]) -> None:
    file = tmp_path / "unet.yaml"
    file.write_text(json.dumps(SMALL))
    options: dict[str, object] = {"gradient_accumulation_steps": 1, "max_train_steps": 60, "train_batch_size": 6}
    assert icom(*arguments(from_scratch=file, output_dir=tmp_path, **options)).code == 0
    told = losses(tmp_path)
    assert np.mean(told[:5]) > 0.9  # noise of variance 1, of which nothing is known yet
    assert np.mean(told[-10:]) < 0.6 * np.mean(told[:5])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"cross_attention_dim": 100}, "cross_attention_dim is 100 and has to be 128"),
        ({"blocks": 3}, "has blocks, which UNet2DConditionModel does not know"),
        ({"up_block_types": ["NoBlock"]}, "makes no UNet"),
    ],
)
def test_configuration_that_makes_no_unet(
    wrong: dict[str, object], message: str, tmp_path: Path, icom: Callable[..., Result]
) -> None:
    file = tmp_path / "unet.yaml"
    file.write_text(json.dumps(SMALL | wrong))
    assert_refused(icom(*arguments(from_scratch=file, output_dir=tmp_path / "out")), 2, message)


def test_loss_that_is_no_number_ends_the_run(tmp_path: Path, icom: Callable[..., Result]) -> None:
    result = icom(*arguments(output_dir=tmp_path, learning_rate="1e30", max_grad_norm=0, checkpointing_steps=1))
    assert_message(result, 1, "The loss became nan", "--learning_rate 1e+29")

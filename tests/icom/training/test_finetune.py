"""Training the UNet is what a plain loop does, however many processes share it and wherever it is interrupted.

Guards icom.training.finetune, icom.methods.unet, icom.parallel.sharding and icom.training.ema.
"""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from icom.config.finetune import FinetuneConfig
from icom.data.order import Order
from icom.data.sources import open_source
from icom.methods.text_encoder import split
from icom.methods.unet import Sampler
from icom.models import loading
from icom.training.ema import Decay, Ema, limit_of_half_life
from tests.support.checkpoints import tensors_in
from tests.support.command import ROOT, Result, assert_message, assert_refused, long
from tests.support.ranks import Ranks
from tests.support.small_unet import SMALL_UNET, write_small_unet
from tests.support.waiting import send_at

STEPS, SHORT_STEPS = 30, 5
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
    return tensors_in(folder / f"checkpoint-{step}")


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
    text: bool = False,
) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The same training written down as the papers have it: losses, first weights, last weights, their mean.

    The whole batch at once, without accumulation; diffusers' modules, torch's plain AdamW, diffusers' EMAModel. From
    icom are only the pictures, and which random numbers a sample has. `text`: the text encoder is trained, too.
    """
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from diffusers.training_utils import EMAModel
    from transformers import CLIPTextModel, CLIPTokenizer

    unet = UNet2DConditionModel.from_pretrained(loading.BUNDLE / "unet", torch_dtype=torch.float32).train()
    vae = AutoencoderKL.from_pretrained(loading.BUNDLE / "vae", torch_dtype=torch.float32)
    text_encoder = CLIPTextModel.from_pretrained(loading.BUNDLE / "text_encoder", dtype=torch.float32)
    tokenizer = CLIPTokenizer.from_pretrained(loading.BUNDLE / "tokenizer")
    trained = dict(unet.named_parameters())
    if text:
        trained |= {f"text_encoder.{name}": parameter for name, parameter in text_encoder.named_parameters()}
    first = {name: parameter.detach().clone() for name, parameter in trained.items()}
    config = FinetuneConfig(train_data_dir="synthetic:40")
    source = open_source(config)
    order = Order(source.runs, 3)
    sampler = Sampler(3, 1000, 64, False, False, "lanczos", 0.1)
    left = np.cumprod(1 - np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2)  # scaled_linear betas
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-3, eps=1e-3, weight_decay=1e-2, foreach=False)
    ema = EMAModel(trained.values(), decay=0.9)
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
        with torch.set_grad_enabled(text):
            states = text_encoder(ids)[0]
        predicted = unet(noisy.float(), torch.tensor(timesteps), states).sample
        loss = torch.nn.functional.mse_loss(predicted, torch.stack(noises))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), 0.5)
        optimizer.step()
        ema.step(trained.values())
        told.append(loss.item())
    last = {name: parameter.detach() for name, parameter in trained.items()}
    return told, first, last, dict(zip(last, ema.shadow_params, strict=True))


def assert_as_plain(folder: Path, steps: int, text: bool = False) -> None:
    told, first, last, mean = plain_loop(steps, text)
    assert np.allclose(losses(folder), told, rtol=0, atol=2e-6)
    found = checkpoint(folder, steps)
    for prefix in ("text_encoder.", "") if text else ("",):
        moved = max(float((last[name] - first[name]).abs().max()) for name in last if name.startswith(prefix))
        assert moved > 3e-4  # that it agrees means something
    assert_near(part(found, "parameter/"), last, 1e-6)
    assert_near(part(found, "mean/"), mean, 1e-6)


@pytest.mark.parametrize("steps", [SHORT_STEPS, long(STEPS)])
def test_one_process_is_a_plain_loop(steps: int, tmp_path: Path, icom: Callable[..., Result]) -> None:
    assert icom(*arguments(output_dir=tmp_path, max_train_steps=steps)).code == 0
    assert_as_plain(tmp_path, steps)
    pipeline = load_file(tmp_path / "current_pipeline" / "unet" / "diffusion_pytorch_model.safetensors")
    assert_near(pipeline, part(checkpoint(tmp_path, steps), "mean/"), 0)


@pytest.mark.long
def test_text_encoder_and_unet_are_a_plain_loop(tmp_path: Path, icom: Callable[..., Result]) -> None:
    """Resumed in the middle to the same bits; the pipeline has the mean of both."""
    options: dict[str, object] = {"output_dir": tmp_path, "train_text_encoder": True, "max_train_steps": 7}
    options |= {"checkpointing_steps": 4}
    assert icom(*arguments(**options)).code == 0
    whole = checkpoint(tmp_path, 7)
    assert_as_plain(tmp_path, 7, text=True)
    result = icom(*arguments(**options, resume_from_checkpoint="checkpoint-4"))
    assert "resumed after step 4" in result.out
    resumed = checkpoint(tmp_path, 7)
    assert not [name for name in whole if not torch.equal(whole[name], resumed[name])]
    written = loading.load(loading.find(str(tmp_path / "current_pipeline")), torch.float32)
    assert_near(dict(written.text_encoder.named_parameters()), part(resumed, "mean/text_encoder."), 0)
    assert_near(dict(written.unet.named_parameters()), split(part(resumed, "mean/"))[0], 0)
    assert_message(
        icom(*arguments(output_dir=tmp_path / "other", weights_from=tmp_path / "checkpoint-7")),
        1,
        "a text encoder that was trained together with its UNet",
        "current_pipeline",
    )


@pytest.mark.parametrize(
    ("count", "parallel", "steps", "text"),
    [
        (2, "ddp", SHORT_STEPS, False),
        long(3, "ddp", STEPS, False),
        long(2, "ddp", 7, True),
        long(2, "full_shard", 10, False),
        long(3, "shard_grad_op", 10, False),
    ],
)
def test_several_processes_are_a_plain_loop(count: int, parallel: str, steps: int, text: bool, tmp_path: Path) -> None:
    batch, accumulated = {2: (3, 1), 3: (1, 2)}[count]
    words = arguments(
        output_dir="out",
        parallel=parallel,
        max_train_steps=steps,
        train_batch_size=batch,
        gradient_accumulation_steps=accumulated,
        train_text_encoder=text or None,
    )
    group = Ranks(tmp_path, count, "-m", "icom", *words)
    try:
        results = group.results()
    finally:
        group.end()
    assert [result.code for result in results] == [0] * count, results
    assert f"icom: {parallel}: asked for" in results[0].out
    assert_as_plain(group.folders[0] / "out", steps, text)


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
    with pytest.MonkeyPatch.context() as patch:
        send_at(3, stopped / "metrics.jsonl", signal.SIGTERM, patch)
        told = icom(*arguments(output_dir=stopped, **SHORT))
    assert_message(told, 128 + signal.SIGTERM, "Continue with the same command and --resume_from_checkpoint latest")
    pipeline = load_file(stopped / "current_pipeline" / "unet" / "diffusion_pytorch_model.safetensors")
    assert pipeline.keys() == part(checkpoint(whole, 8), "mean/").keys()
    result = icom(*arguments(output_dir=stopped, resume_from_checkpoint="latest", **SHORT))
    assert result.code == 0
    assert "resumed after step" in result.out
    assert_same(stopped, whole, 8)


def test_new_run_takes_nothing_of_an_earlier_ones_pipeline(tmp_path: Path, icom: Callable[..., Result]) -> None:
    """Whose other parts may be another model's, or were trained."""
    options: dict[str, object] = {"output_dir": tmp_path, "max_train_steps": 1, "gradient_accumulation_steps": 1}
    options |= {"lr_scheduler": "constant", "use_ema": None, "ema_decay": None}
    text_encoder = "text_encoder/model.safetensors"
    kept = load_file(loading.BUNDLE / text_encoder)

    def same() -> bool:
        found = load_file(tmp_path / "current_pipeline" / text_encoder)
        return all(torch.equal(found[name], tensor.float()) for name, tensor in kept.items())

    assert icom(*arguments(train_text_encoder=True, **options)).code == 0
    assert not same()
    result = icom(*arguments(**options))
    assert (result.code, same()) == (0, True)
    assert "moved 1 checkpoint(s) and 1 pipeline(s) of an earlier run to" in result.err


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
@pytest.mark.parametrize(("parallel", "kills", "steps"), [("ddp", 2, 20), ("full_shard", 2, 12)])
def test_kill_9_at_random_moments_of_two_processes(parallel: str, kills: int, steps: int, tmp_path: Path) -> None:
    """All processes, one of them, at any moment: whatever was being written, the run ends with the same weights.

    They share their --output_dir, so that with FSDP each writes its part.
    """

    small = {"from_scratch": write_small_unet(tmp_path), "max_train_steps": steps, "parallel": parallel}

    def words(root: Path) -> list[str]:
        options = SHORT | small | {"output_dir": root / "rank0/out"}
        return ["-m", "icom", *arguments(**options), "--resume_from_checkpoint=latest"]

    whole = Ranks(tmp_path / "whole", 2, *words(tmp_path / "whole"))
    assert [result.code for result in whole.results()] == [0, 0]
    chance = np.random.default_rng(11)
    killed = tmp_path / "killed"
    for kill in range(kills):
        group = Ranks(killed, 2, *words(killed))
        out = group.folders[0] / "out"
        done = steps_of(out)
        try:
            group.wait_for_steps(min(done + 3, steps - 1))
            time.sleep(chance.uniform(0, 0.1))  # a step or two: the run must not be over on a quick machine
            for process in group.processes if kill % 2 else group.processes[1:]:
                process.kill()
            codes = [result.code for result in group.results()]
        finally:
            group.end()
        assert -signal.SIGKILL in codes, "the run was over before it was killed: raise its steps"
        if kill % 2 == 0:
            assert codes == [75, -signal.SIGKILL]  # who lost another one is worth another try
    last = Ranks(killed, 2, *words(killed))
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
        ({"train_text_encoder": True, "parallel": "full_shard"}, 2, ["--parallel ddp, not full_shard"]),
        ({"caption_dropout_rate": 1.5}, 2, ["between 0 and 1"]),
    ],
)
def test_what_cannot_work_is_refused(
    options: dict[str, object], code: int, parts: list[str], tmp_path: Path, icom: Callable[..., Result]
) -> None:
    assert_refused(icom(*arguments(output_dir=tmp_path / "out", **options)), code, *parts)


@pytest.mark.long
def test_from_scratch_learns(tmp_path: Path, icom: Callable[..., Result]) -> None:
    file = write_small_unet(tmp_path)
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
    file.write_text(json.dumps(SMALL_UNET | wrong))
    assert_refused(icom(*arguments(from_scratch=file, output_dir=tmp_path / "out")), 2, message)


def test_loss_that_is_no_number_ends_the_run(tmp_path: Path, icom: Callable[..., Result]) -> None:
    result = icom(*arguments(output_dir=tmp_path, learning_rate="1e30", max_grad_norm=0, checkpointing_steps=1))
    assert_message(result, 1, "The loss became nan", "--learning_rate 1e+29")


@pytest.mark.long
def test_last_validation_picture_is_what_generate_draws(tmp_path: Path, icom: Callable[..., Result]) -> None:
    """Pixel for pixel: what is shown is what people get, the mean of the weights with the options' seed."""
    prompts = ["a photo of a red ball", "a blue box on grass"]
    options: dict[str, object] = {"max_train_steps": 4, "validation_steps": 2, "gradient_accumulation_steps": 1}
    words = arguments(output_dir=tmp_path / "out", **options)
    assert icom(*words, "--validation_prompts", *prompts).code == 0
    pipeline = ["--pretrained_model_name_or_path", str(tmp_path / "out/current_pipeline"), "--mixed_precision", "no"]
    for name in ("drawn", "raw"):
        settings = ["--seed", "3", "--resolution", "64", "--output_dir", str(tmp_path / name)]
        assert icom("generate", *pipeline, *settings, "--prompt", *prompts).code == 0
        # The second time with the raw weights: the comparison tells them apart.
        raw = part(checkpoint(tmp_path / "out", 4), "parameter/")
        save_file(raw, tmp_path / "out/current_pipeline/unet/diffusion_pytorch_model.safetensors", {"format": "pt"})
    shown = np.asarray(Image.open(tmp_path / "out/validation/step-4.png"))
    tiles = [shown[:64, left : left + 64] for left in (0, 64 + 4)]
    drawn, raw_drawn = (
        [np.asarray(Image.open(path)) for path in sorted((tmp_path / name).glob("*.png"))] for name in ("drawn", "raw")
    )
    assert len(drawn) == 2
    assert all(np.array_equal(tile, picture) for tile, picture in zip(tiles, drawn, strict=True))
    assert not np.array_equal(drawn[0], raw_drawn[0])
    assert not np.array_equal(shown, np.asarray(Image.open(tmp_path / "out/validation/step-2.png")))


def test_input_perturbation_adds_noise_that_is_not_predicted() -> None:
    """Ning et al.: the input has more noise than the target; drawn after all else, so that nothing else changes."""
    from diffusers import DDPMScheduler

    from icom.backends.cpu import CpuBackend
    from icom.data.records import Latents
    from icom.methods.unet import Objective, Prepared

    seen: list[torch.Tensor] = []

    class Zero(torch.nn.Module):
        def forward(self, noisy: torch.Tensor, *_: Any, **__: Any) -> Any:
            seen.append(noisy)
            return type("Output", (), {"sample": torch.zeros_like(noisy)})

    scheduler = DDPMScheduler(beta_schedule="scaled_linear")
    shape = (4, 8, 8)
    latents = Latents(torch.randn(shape), torch.rand(shape), torch.zeros(77, 16))
    batch = [Prepared("", False, timestep, seed, None, latents) for timestep, seed in ((10, 1), (900, 2))]
    backend = CpuBackend("no", "off", Path())
    losses_ = [
        Objective(scheduler, 0.18, 0.0, 0.0, scale, None).loss(Zero(), batch, None, torch.zeros(77, 16), backend)
        for scale in (0.0, 0.1)
    ]
    for number, (sample, timestep) in enumerate(zip(batch, (10, 900), strict=True)):
        generator = torch.Generator().manual_seed(sample.noise_seed)
        of_vae, noise = torch.randn(2, *shape, generator=generator)
        further = torch.randn(shape, generator=generator)
        clean = 0.18 * (latents.mean + latents.std * of_vae)
        for scale, noisy in zip((0.0, 0.1), seen, strict=True):
            wanted = scheduler.add_noise(clean, noise + scale * further, torch.tensor(timestep))
            assert torch.allclose(noisy[number], wanted, atol=1e-6)
    assert losses_[0] == losses_[1]  # of a network that predicts nothing: the target is the same


DIFFUSERS: dict[str, object] = {
    "input_perturbation": 0,
    "pretrained_model_name_or_path": None,
    "revision": None,
    "variant": None,
    "dataset_name": None,
    "dataset_config_name": None,
    "train_data_dir": None,
    "image_column": "image",
    "caption_column": "text",
    "max_train_samples": None,
    "validation_prompts": None,
    "output_dir": "sd-model-finetuned",
    "cache_dir": None,
    "seed": None,
    "resolution": 512,
    "center_crop": False,
    "random_flip": False,
    "train_batch_size": 16,
    "num_train_epochs": 100,
    "max_train_steps": None,
    "gradient_accumulation_steps": 1,
    "gradient_checkpointing": False,
    "learning_rate": 1e-4,
    "scale_lr": False,
    "lr_scheduler": "constant",
    "lr_warmup_steps": 500,
    "snr_gamma": None,
    "dream_training": False,
    "dream_detail_preservation": 1.0,
    "use_8bit_adam": False,
    "allow_tf32": False,
    "use_ema": False,
    "offload_ema": False,
    "foreach_ema": False,
    "non_ema_revision": None,
    "dataloader_num_workers": 0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_weight_decay": 1e-2,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "push_to_hub": False,
    "hub_token": None,
    "prediction_type": None,
    "hub_model_id": None,
    "logging_dir": "logs",
    "mixed_precision": None,
    "report_to": "tensorboard",
    "local_rank": -1,
    "checkpointing_steps": 500,
    "checkpoints_total_limit": None,
    "resume_from_checkpoint": None,
    "enable_xformers_memory_efficient_attention": False,
    "noise_offset": 0,
    "validation_epochs": 5,
    "tracker_project_name": "text2image-fine-tune",
    "image_interpolation_mode": "lanczos",
}
"""The options of diffusers' examples/text_to_image/train_text_to_image.py and their defaults."""


def test_diffusers_options_are_there_or_in_the_table() -> None:
    """With the same default, or else the table says what is different; what it says is absent is absent."""
    text = (ROOT / "docs/finetune.md").read_text()
    table = text[text.index("| diffusers' `train_text_to_image.py` | here |") :].split("\n\n")[0]
    rows = [row.split("|")[1:3] for row in table.splitlines()[3:]]
    told = {name for left, _ in rows for name in re.findall(r"`--(\w+)`", left)}
    absent = {name for left, right in rows if "not there" in right for name in re.findall(r"`--(\w+)`", left)}
    assert told <= DIFFUSERS.keys()
    here = vars(FinetuneConfig(train_data_dir="photos"))
    for name, default in DIFFUSERS.items():
        same = name in here and (here[name] == default or not (here[name] or default))
        assert same or name in told, f"--{name} is not as there, and docs/finetune.md does not say so"
    assert not absent & here.keys()

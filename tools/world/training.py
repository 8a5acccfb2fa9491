"""Training of the bundled model's parts on pictures of the world, on a CPU, each from a seed.

The recipe is Stable Diffusion's (Rombach et al. 2022, arXiv:2112.10752) in small: first a KL autoencoder, then a UNet
that predicts the noise in its latents, here together with the text encoder, which starts from nothing.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from icom.engine.precision import product_dtype
from icom.progress import progress
from icom.world.concepts import EVERYTHING, seen_things
from icom.world.judge import to_pixels
from icom.world.scene import Scene, Thing, describe, draw, random_scene

if TYPE_CHECKING:
    from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
    from transformers import CLIPTextModel, CLIPTokenizer


class Log:
    """JSON lines with what a training did, and a progress bar for who waits."""

    def __init__(self, path: Path, part: str, steps: int) -> None:
        """Append to `path`; `part` names what is trained."""
        self._file = path.open("a", encoding="utf-8")
        self._part, self._began = part, time.monotonic()
        self._bar = progress(None, part, "step", total=steps, mininterval=5)

    def add(self, step: int, every: int = 100, **values: float) -> None:
        """One step done; every so many steps go into the log."""
        self._bar.update()
        if step % every == 0 or step == self._bar.total:
            rounded = {name: round(value, 5) for name, value in values.items()}
            self._bar.set_postfix(rounded, refresh=False)
            row = {"part": self._part, "step": step, "seconds": round(time.monotonic() - self._began), **rounded}
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close bar and file."""
        self._bar.close()
        self._file.close()


def scenes(seed: str, things: list[Thing]) -> Iterator[Scene]:
    """An endless stream of scenes."""
    rng = random.Random(seed)
    while True:
        yield random_scene(rng, things)


def fit(
    modules: list[torch.nn.Module], loss_of: Callable[[int], torch.Tensor], *, steps: int, peak: float, log: Log
) -> None:
    """Minimise `loss_of(step)` over the parameters of `modules`, with AdamW, warm-up and a cosine that ends at 0.

    Args:
        modules: what is trained.
        loss_of: computes one batch's loss.
        steps: of the optimizer.
        peak: learning rate after the warm-up.
        log: gets the running mean of the loss.
    """
    for module in modules:
        module.train()
    parameters = [parameter for module in modules for parameter in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=peak, betas=(0.9, 0.99), weight_decay=1e-3)
    warm_up = max(1, min(200, steps // 10))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warm_up, 0.5 + 0.5 * math.cos(math.pi * step / steps)),
    )
    mean = 0.0
    for step in range(1, steps + 1):
        loss = loss_of(step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        mean += (loss.item() - mean) * max(0.01, 1 / step)
        log.add(step, loss=mean)
    log.close()
    for module in modules:
        module.train(False)


def autocast() -> AbstractContextManager[object]:
    """bfloat16 for the matrix products where the CPU has instructions for it; weights and optimizer stay float32."""
    return torch.autocast("cpu", torch.bfloat16, enabled=product_dtype(torch.bfloat16) == torch.bfloat16)


def train_vae(vae: AutoencoderKL, seed: int, *, steps: int, batch: int, log: Log) -> None:
    """Reconstruct pictures, with a KL term that keeps the latents near a normal distribution.

    It is far heavier than Stable Diffusion's 1e-6: latents that carry noise are decoded well, which is what a small
    UNet will hand to the decoder. The VAE knows no words and sees the whole world, as Stable Diffusion's saw pictures
    of all kinds: it compresses, and what can be told to it is decided later.
    """
    stream = scenes(f"vae {seed}", EVERYTHING)
    torch.manual_seed(seed)  # of the noise, whatever came before

    def loss_of(step: int) -> torch.Tensor:
        pictures = next_pictures(stream, batch)
        with autocast():
            posterior = vae.encode(pictures).latent_dist
            decoded = vae.decode(posterior.sample()).sample
        kl = posterior.kl().float().mean() / posterior.mean[0].numel()
        loss: torch.Tensor = picture_error(decoded.float(), pictures) + 1e-3 * kl
        return loss

    fit([vae], loss_of, steps=steps, peak=1.5e-3, log=log)


def train_decoder(vae: AutoencoderKL, seed: int, *, steps: int, batch: int, log: Log) -> None:
    """Sharpen the decoder alone, for latents that stay as they are (as Stable Diffusion's `ft-mse` decoders)."""
    stream = scenes(f"decoder {seed}", EVERYTHING)
    torch.manual_seed(seed)

    def loss_of(step: int) -> torch.Tensor:
        pictures = next_pictures(stream, batch)
        with autocast():
            with torch.no_grad():
                latents = vae.encode(pictures).latent_dist.sample()
            decoded = vae.decode(latents).sample
        return picture_error(decoded.float(), pictures)

    fit([vae.decoder, vae.post_quant_conv], loss_of, steps=steps, peak=1e-3, log=log)


def next_pictures(stream: Iterator[Scene], count: int) -> torch.Tensor:
    """The next scenes of a stream as pixels."""
    return to_pixels([draw(scene) for scene in itertools.islice(stream, count)])


def picture_error(decoded: torch.Tensor, pictures: torch.Tensor) -> torch.Tensor:
    """Mean absolute error of pixels and of their differences to the neighbours: blurred edges cost."""
    error = decoded - pictures
    return error.abs().mean() + error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean()


@dataclass
class Latents:
    """Encoded pictures: their scenes, and mean and standard deviation of the VAE's posteriors, already scaled.

    `mean` and `std` are float32 of shape (pictures, 4, 8, 8).
    """

    scenes: list[Scene]
    mean: torch.Tensor
    std: torch.Tensor


def encode_world(vae: AutoencoderKL, seed: int, count: int) -> Latents:
    """Draw and encode `count` pictures, and set the VAE's scaling factor so that its latents have variance 1."""
    shown = list(itertools.islice(scenes(f"unet {seed}", seen_things()), count))
    means, stds = [], []
    with torch.no_grad(), autocast():
        for start in progress(range(0, count, 100), "encode", "batch", mininterval=5):
            posterior = vae.encode(to_pixels([draw(scene) for scene in shown[start : start + 100]])).latent_dist
            means.append(posterior.mean.float())
            stds.append(posterior.std.float())
    mean, std = torch.cat(means), torch.cat(stds)
    scale = round(float((mean.var() + (std**2).mean()) ** -0.5), 5)
    vae.register_to_config(scaling_factor=scale)
    return Latents(shown, mean * scale, std * scale)


def train_denoiser(
    unet: UNet2DConditionModel,
    text_encoder: CLIPTextModel,
    tokenizer: CLIPTokenizer,
    noise_scheduler: DDPMScheduler,
    latents: Latents,
    seed: int,
    *,
    steps: int,
    batch: int,
    log: Log,
    save: Callable[[], None],
) -> None:
    """Train UNet and text encoder together to predict the noise, with a new caption for a picture each time.

    One caption in ten is empty, for classifier-free guidance (Ho & Salimans 2022). `save` is called now and then.
    """
    rng = random.Random(f"captions {seed}")
    noise = torch.Generator().manual_seed(seed)

    def loss_of(step: int) -> torch.Tensor:
        if step % 1000 == 0:
            save()
        chosen = torch.randint(len(latents.scenes), (batch,), generator=noise)
        captions = ["" if rng.random() < 0.1 else describe(latents.scenes[index], rng) for index in chosen.tolist()]
        ids = tokenizer(captions, padding="max_length", return_tensors="pt").input_ids
        mean, std = latents.mean[chosen], latents.std[chosen]
        clean = mean + std * torch.randn(mean.shape, generator=noise)
        target = torch.randn(mean.shape, generator=noise)
        timesteps = torch.randint(noise_scheduler.config["num_train_timesteps"], (batch,), generator=noise)
        noisy = noise_scheduler.add_noise(clean, target, timesteps)
        with autocast():
            text = text_encoder(ids)[0]
            predicted = unet(noisy.contiguous(memory_format=torch.channels_last), timesteps, text).sample
        return F.mse_loss(predicted.float(), target)

    fit([unet, text_encoder], loss_of, steps=steps, peak=1e-3, log=log)

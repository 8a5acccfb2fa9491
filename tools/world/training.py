"""Training of the bundled model's VAE on pictures of the world, on a CPU, from a seed.

UNet and text encoder are trained by `icom finetune` (`tools.world.build`).
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from icom.engine.precision import product_dtype
from icom.progress import progress
from icom.world.concepts import EVERYTHING, seen_things
from icom.world.judge import to_pixels
from icom.world.scene import Scene, draw
from tools.world.shards import scenes

if TYPE_CHECKING:
    from diffusers import AutoencoderKL


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


def latent_scale(vae: AutoencoderKL, seed: int, count: int) -> float:
    """The scaling factor with which the latents of the world's pictures have variance 1, from `count` of them."""
    stream = scenes(f"unet {seed}", seen_things())
    means, variances = [], []
    with torch.no_grad(), autocast():
        for start in progress(range(0, count, 100), "scaling factor", "batch", mininterval=5):
            posterior = vae.encode(next_pictures(stream, min(100, count - start))).latent_dist
            means.append(posterior.mean.float())
            variances.append(posterior.var.float())
    return round(float((torch.cat(means).var() + torch.cat(variances).mean()) ** -0.5), 5)

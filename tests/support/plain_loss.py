"""The loss of a training sample by stock parts of diffusers and transformers, written out for tests."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from icom.data.images import read_picture
from icom.data.sampling import Sample, gaussian_noise
from icom.data.transform import Transform, pixels
from icom.models import loading


@lru_cache(maxsize=1)
def _model() -> Any:
    return loading.load(loading.find("bundled"), torch.float32)


@torch.no_grad()
def plain_loss(picture: Path, caption: str, sample: Sample, resolution: int = 64) -> float:
    """Mean squared error of the bundled model's noise prediction.

    Args:
        picture: the file.
        caption: of words that the model knows.
        sample: gives flip, timestep and noise.
        resolution: in pixels.
    """
    model = _model()
    image = pixels(read_picture(picture), Transform(resolution, center_crop=False), flip=sample.flip)
    posterior = model.vae.encode(image[None]).latent_dist
    vae_noise, noise = gaussian_noise(sample, tuple(posterior.mean.shape[1:]))
    latents = (posterior.mean + posterior.std * vae_noise) * model.vae.config["scaling_factor"]
    length = model.text_encoder.config.max_position_embeddings
    ids = model.tokenizer(caption, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
    timestep = torch.tensor([sample.timestep])
    noisy = model.noise_scheduler.add_noise(latents, noise[None], timestep)
    predicted = model.unet(noisy, timestep, model.text_encoder(ids.input_ids)[0]).sample
    return float(((predicted - noise) ** 2).mean())

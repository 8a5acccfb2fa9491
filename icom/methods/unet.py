"""The UNet itself: what a captioned picture becomes for it, and the loss of a batch of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from icom.data.crops import WORDS, crop
from icom.data.records import Latents, Record
from icom.data.sampling import raw_words
from icom.errors import IcomError
from icom.models.loading import configuration
from icom.models.parts import VAE, Conditioning
from icom.training.objective import diffusion_loss

if TYPE_CHECKING:
    from diffusers import DDPMScheduler

    from icom.backends import Backend
    from icom.config.finetune import FinetuneConfig
    from icom.data.encode import Encoders
    from icom.models.loading import ModelSource

_SAMPLE, _VALIDATION = 6, 7  # families of random streams; icom.data.sampling and icom.data.order have those before


@dataclass(frozen=True)
class Prepared:
    """A sample as it comes from the threads that read.

    Attributes:
        caption: its text; empty where it was dropped.
        dropped: whether it was.
        timestep: of the diffusion.
        noise_seed: of its Gaussian noise.
        pixels: float32 (3, resolution, resolution), where the source has pictures.
        latents: where it has those.
    """

    caption: str
    dropped: bool
    timestep: int
    noise_seed: int
    pixels: torch.Tensor | None
    latents: Latents | None


@dataclass(frozen=True)
class Sampler:
    """What is done to the record of a sample: a function of (seed, sample number) and these options.

    Attributes:
        timesteps: of the noise schedule.
        validation: samples that are the same each time: the middle of the picture, its caption, noise of their own.
    """

    seed: int
    timesteps: int
    resolution: int
    center_crop: bool
    random_flip: bool
    interpolation: Any
    caption_dropout_rate: float
    validation: bool = False

    def __call__(self, sample: int, record: Record) -> Prepared:
        """Prepare one; threads call it."""
        family = _VALIDATION if self.validation else _SAMPLE
        words = raw_words(self.seed, family, sample, count=WORDS + 3)
        dropped = not self.validation and float(words[WORDS]) < self.caption_dropout_rate * 2.0**64
        place = [int(word) for word in words[:WORDS]]
        random_flip = self.random_flip and not self.validation
        pixels = None
        if record.picture is not None:
            pixels = crop(
                record.picture,
                self.resolution,
                center_crop=self.center_crop or self.validation,
                random_flip=random_flip,
                words=place,
                interpolation=self.interpolation,
            ).pixels
        return Prepared(
            "" if dropped else record.caption,
            dropped,
            int(words[WORDS + 1] % np.uint64(self.timesteps)),
            int(words[WORDS + 2] >> np.uint64(1)),
            pixels,
            None if record.latents is None else record.latents.choose(place, random_flip=random_flip),
        )


@dataclass(frozen=True)
class Objective:
    """What the UNet is trained to do.

    Attributes:
        noise_scheduler: with the run's kind of prediction and noise schedule.
        scaling_factor, shift_factor: of the VAE's latents.
        noise_offset: scale of noise that is the same for all pixels of a channel.
        snr_gamma: see `diffusion_loss`.
    """

    noise_scheduler: DDPMScheduler
    scaling_factor: float
    shift_factor: float
    noise_offset: float
    snr_gamma: float | None

    def loss(
        self,
        network: Any,
        batch: Sequence[Prepared],
        encoders: Encoders | None,
        empty: torch.Tensor | None,
        to: Backend,
    ) -> torch.Tensor:
        """The mean loss of a batch, float32 scalar.

        Args:
            network: the UNet, or what wraps it.
            batch: of one kind of records.
            encoders: for those with pictures.
            empty: the states of the empty caption, (tokens, width), for those with latents.
            to: the device and precision.
        """
        if encoders is not None:
            pixels = [one.pixels for one in batch if one.pixels is not None]
            with to.autocast():
                states = encoders.states([one.caption for one in batch])
            mean, std = (part.cpu() for part in encoders.encode(torch.stack(pixels)))
        else:
            kept = [one.latents for one in batch if one.latents is not None]
            mean, std = torch.stack([one.mean for one in kept]), torch.stack([one.std for one in kept])
            assert empty is not None
            states = torch.stack(
                [empty if one.dropped else latents.states for one, latents in zip(batch, kept, strict=True)]
            )
        draws = [self._noises(one.noise_seed, tuple(mean.shape[1:])) for one in batch]
        of_vae, of_diffusion = (torch.stack(parts) for parts in zip(*draws, strict=True))
        latents = (mean + std * of_vae - self.shift_factor) * self.scaling_factor
        with to.autocast():
            return diffusion_loss(
                network,
                self.noise_scheduler,
                latents.to(to.device, memory_format=torch.channels_last),
                of_diffusion.to(to.device, memory_format=torch.channels_last),
                torch.tensor([one.timestep for one in batch], device=to.device),
                Conditioning(states.to(to.device, to.dtype)),
                self.snr_gamma,
            )

    def _noises(self, seed: int, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Standard normal noise of the VAE's posterior, and that of the diffusion; on the CPU, so the same anywhere."""
        generator = torch.Generator().manual_seed(seed)
        of_vae, of_diffusion = torch.randn(2, *shape, generator=generator)
        if self.noise_offset:
            of_diffusion = of_diffusion + self.noise_offset * torch.randn(shape[0], 1, 1, generator=generator)
        return of_vae, of_diffusion


def objective_of(config: FinetuneConfig, source: ModelSource, noise_scheduler: DDPMScheduler) -> Objective:
    """The objective that the options and the model come to.

    Raises:
        IcomError: zero-terminal SNR with a model that predicts noise.
    """
    changed: dict[str, Any] = {}
    if config.prediction_type:
        changed["prediction_type"] = config.prediction_type
    if config.rescale_betas_zero_snr:
        # Where nothing is left of the picture, its noise is the input itself, and nothing is learned from it.
        if (config.prediction_type or noise_scheduler.config["prediction_type"]) != "v_prediction":
            raise IcomError(
                "--rescale_betas_zero_snr needs a UNet that predicts velocity: add --prediction_type v_prediction, or "
                "drop it."
            )
        changed |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    if changed:
        noise_scheduler = type(noise_scheduler).from_config(noise_scheduler.config, **changed)
    values = configuration(source, VAE)
    return Objective(
        noise_scheduler,
        float(values["scaling_factor"]),
        float(values.get("shift_factor") or 0.0),
        config.noise_offset,
        config.snr_gamma,
    )

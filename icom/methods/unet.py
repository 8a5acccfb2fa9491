"""The UNet itself: what a captioned picture becomes for it, and the loss of a batch of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from icom.data.crops import WORDS, crop
from icom.data.records import Latents, Record
from icom.data.sampling import UNIFORM, Stream, TimestepSampling, noises, raw_words
from icom.models.loading import configuration
from icom.models.parts import VAE, Conditioning
from icom.training.objective import changed_schedule, diffusion_loss, with_zero_snr

if TYPE_CHECKING:
    from diffusers import DDPMScheduler

    from icom.backends import Backend
    from icom.config.finetune import FinetuneConfig
    from icom.data.encode import Encoders
    from icom.models.loading import ModelSource


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
        validation: samples that are the same each time: the middle of the picture, its caption, noise of their own,
            all timesteps.
        timestep_sampling: which timesteps the others have.
    """

    seed: int
    timesteps: int
    resolution: int
    center_crop: bool
    random_flip: bool
    interpolation: Any
    caption_dropout_rate: float
    validation: bool = False
    timestep_sampling: TimestepSampling = UNIFORM

    def __call__(self, sample: int, record: Record) -> Prepared:
        """Prepare one; threads call it."""
        family = Stream.VALIDATION if self.validation else Stream.UNET_SAMPLE
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
            (UNIFORM if self.validation else self.timestep_sampling).draw(words[WORDS + 1], self.timesteps),
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
        noise_offset, input_perturbation: see `noises`.
        snr_gamma: see `diffusion_loss`.
        encodes: whether the network encodes the captions itself (`icom.methods.text_encoder.Together`).
    """

    noise_scheduler: DDPMScheduler
    scaling_factor: float
    shift_factor: float
    noise_offset: float
    input_perturbation: float
    snr_gamma: float | None
    encodes: bool = False

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
            network: the UNet, with the text encoder where `encodes`, or what wraps it.
            batch: of one kind of records.
            encoders: for those with pictures.
            empty: the states of the empty caption, (tokens, width), for latents that were made before anybody knew
                whose caption is dropped.
            to: the device and precision.
        """
        if encoders is not None:
            mean, std, states = encode(encoders, batch, to, ids=self.encodes)
        else:
            kept = [one.latents for one in batch if one.latents is not None]
            mean, std = torch.stack([one.mean for one in kept]), torch.stack([one.std for one in kept])
            states = torch.stack(
                [
                    latents.states if empty is None or not one.dropped else empty
                    for one, latents in zip(batch, kept, strict=True)
                ]
            )
        shape = tuple(mean.shape[1:])
        draws = [noises(one.noise_seed, shape, self.noise_offset, self.input_perturbation) for one in batch]
        of_vae, of_diffusion, added = (torch.stack(parts) for parts in zip(*draws, strict=True))
        latents = (mean + std * of_vae - self.shift_factor) * self.scaling_factor
        with to.autocast():
            return diffusion_loss(
                network,
                self.noise_scheduler,
                latents.to(to.device, memory_format=to.training_layout),
                of_diffusion.to(to.device, memory_format=to.training_layout),
                torch.tensor([one.timestep for one in batch], device=to.device),
                Conditioning(states.to(to.device, states.dtype if self.encodes else to.dtype)),
                self.snr_gamma,
                added.to(to.device, memory_format=to.training_layout) if self.input_perturbation else None,
            )


def encode(
    encoders: Encoders, batch: Sequence[Prepared], to: Backend, *, ids: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the frozen encoders make of a batch of pictures.

    Args:
        encoders: on the device.
        batch: samples with pixels.
        to: the device and precision.
        ids: the text encoder is not frozen, and gets its tokens elsewhere.

    Returns:
        mean and std of the VAE's posterior, float32 on the CPU (batch, channels, height / 8, width / 8), not scaled;
        the text encoder's states, (batch, tokens, width), in its precision on the device; or its tokens.
    """
    pixels = [one.pixels for one in batch if one.pixels is not None]
    captions = [one.caption for one in batch]
    with to.autocast():
        states = encoders.ids(captions) if ids else encoders.states(captions)
    mean, std = (part.cpu() for part in encoders.encode(torch.stack(pixels)))
    return mean, std, states


def objective_of(config: FinetuneConfig, source: ModelSource, noise_scheduler: DDPMScheduler) -> Objective:
    """The objective that the options and the model come to.

    Raises:
        IcomError: zero-terminal SNR with a model that predicts noise.
    """
    if config.prediction_type:
        noise_scheduler = changed_schedule(noise_scheduler, prediction_type=config.prediction_type)
    if config.rescale_betas_zero_snr:
        noise_scheduler = with_zero_snr(noise_scheduler, "add --prediction_type v_prediction, or drop it")
    values = configuration(source, VAE)
    return Objective(
        noise_scheduler,
        float(values["scaling_factor"]),
        float(values.get("shift_factor") or 0.0),
        config.noise_offset,
        config.input_perturbation,
        config.snr_gamma,
        config.train_text_encoder,
    )

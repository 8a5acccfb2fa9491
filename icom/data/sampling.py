"""The sample stream: which training sample comes when.

Sample i of a run is a pure function of (seed, i): world size, batch size and restarts only decide who computes it.
Discrete choices use raw words of NumPy's Philox, whose stream NumPy keeps stable between releases; Gaussian noise
comes from a torch generator on the CPU that is seeded per sample, so that every device gets the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from icom.data.bucket_order import BucketOrder


class Stream(IntEnum):
    """Families of random streams. Their numbers decide what every run of a seed has seen: never change one."""

    EPOCH = 0
    """The order of pictures in an epoch of textual inversion."""
    SAMPLE = 1
    """What is done to a picture there."""
    SHARDS = 2
    """The order of shards in an epoch of `icom.data.order`,"""
    BLOCKS = 3
    """of blocks of records in a window of shards,"""
    RECORDS = 4
    """and of records in a group of blocks."""
    SUBSTITUTES = 5
    """What is taken for a damaged record."""
    UNET_SAMPLE = 6
    """What is done to a record that the UNet is trained on,"""
    VALIDATION = 7
    """and to one that is held back."""
    CROPS = 8
    """Places of the crops that `icom data precompute` keeps."""
    CAPTION = 20
    """Whether a sample has its picture's caption, and in which order; of the sample's noise seed."""
    PRIOR = 21
    """The seed of the samples of prior preservation."""
    FIXED = 14
    """What is done to the pictures that textual inversion is validated on."""
    ROWS = 30
    """Rows that a word starts from."""
    BUCKETS = 40
    """The order of batches of different buckets in an epoch of textual inversion,"""
    BUCKET_PICTURES = 41
    """and of a bucket's own pictures."""
    CROP_PLACES = 42
    """Where a sample of it is cut out of its picture."""


@dataclass(frozen=True)
class TimestepSampling:
    """How timesteps are drawn.

    Attributes:
        first: the lowest.
        end: they are below this one; None: all of the schedule's.
        logit_normal: (mean, standard deviation) of the normal number whose sigmoid is the share of the range below the
            timestep (Esser et al. 2024, arXiv:2403.03206, section 3.1); None: evenly.
    """

    first: int = 0
    end: int | None = None
    logit_normal: tuple[float, float] | None = None

    def draw(self, word: np.uint64, timesteps: int) -> int:
        """A timestep.

        Args:
            word: random.
            timesteps: of the noise schedule.
        """
        count = (timesteps if self.end is None else self.end) - self.first
        if self.logit_normal is None:
            return self.first + int(word % np.uint64(count))
        return self.below(int(word), timesteps)

    def below(self, share: int, timesteps: int) -> int:
        """The timestep below which this share of all draws lies.

        Args:
            share: of 2^64.
            timesteps: of the noise schedule.
        """
        count = (timesteps if self.end is None else self.end) - self.first
        if self.logit_normal is None:
            return self.first + (share * count >> 64)
        # 52 bits and a half: never 0 or 1, whose normal numbers are infinite.
        normal = NormalDist(*self.logit_normal).inv_cdf(((share >> 12) + 0.5) / 2**52)
        part = 1 / (1 + math.exp(-normal)) if normal > 0 else 1 - 1 / (1 + math.exp(normal))
        return self.first + min(int(part * count), count - 1)


UNIFORM = TimestepSampling()


@dataclass(frozen=True)
class Sample:
    """One training sample.

    Attributes:
        picture: index into the pictures.
        flip: mirrored left to right.
        template: index into the caption templates.
        timestep: diffusion timestep in [0, num_train_timesteps).
        noise_seed: seed of the sample's Gaussian noise, and of what happens to its caption.
        place: a random word that chooses the part of the picture, modulo how many there are; 0: no choice.
    """

    picture: int
    flip: bool
    template: int
    timestep: int
    noise_seed: int
    place: int = 0


@dataclass(frozen=True)
class SampleStream:
    """An endless, randomly accessible stream of samples.

    One epoch shows each picture `repeats` times, in an order of its own (as a shuffled dataset of that length would).

    Attributes:
        seed: of the run.
        pictures: how many there are.
        repeats: in an epoch.
        templates: how many there are.
        timesteps: of the noise schedule.
        buckets: which picture comes when, where a batch has pictures of one bucket only.
        random_crop: samples have a place.
    """

    seed: int
    pictures: int
    repeats: int
    templates: int
    timesteps: int
    timestep_sampling: TimestepSampling = UNIFORM
    buckets: BucketOrder | None = None
    random_crop: bool = False

    def __getitem__(self, index: int) -> Sample:
        words = raw_words(self.seed, Stream.SAMPLE, index, count=4)
        return self._of_words(self._picture(index), words, self._place(index) if self.random_crop else 0)

    def fixed(self, pictures: Sequence[int], count: int) -> list[Sample]:
        """Samples on which a loss has no noise from one step to another: always the same for a seed.

        Their timesteps are stratified: one from each of `count` parts of the range that are drawn from equally often,
        in their order, so that their mean is nearer to that of all timesteps than if each were drawn from all.

        Args:
            pictures: indices; the samples take them in turn.
            count: how many samples.
        """
        made = []
        for number in range(count):
            words = raw_words(self.seed, Stream.FIXED, number, count=5)
            share = ((number << 64) + int(words[2])) // count  # of 2^64
            place = int(words[4]) if self.random_crop else 0
            sample = self._of_words(pictures[number % len(pictures)], words, place)
            made.append(replace(sample, timestep=self.timestep_sampling.below(share, self.timesteps)))
        return made

    def _of_words(self, picture: int, words: np.ndarray, place: int) -> Sample:
        return Sample(
            picture=picture,
            flip=bool(words[0] >> np.uint64(63)),
            template=int(words[1] % np.uint64(self.templates)),
            timestep=self.timestep_sampling.draw(words[2], self.timesteps),
            noise_seed=int(words[3] >> np.uint64(1)),
            place=place,
        )

    def _picture(self, index: int) -> int:
        if self.buckets:
            return self.buckets[index]
        epoch, position = divmod(index, self.epoch_length)
        return int(_epoch_order(self.seed, epoch, self.epoch_length)[position]) % self.pictures

    def _place(self, index: int) -> int:
        return int(raw_words(self.seed, Stream.CROP_PLACES, index, count=1)[0])

    @property
    def epoch_length(self) -> int:
        """Samples per epoch."""
        return self.pictures * self.repeats


def gaussian_noise(
    sample: Sample, shape: tuple[int, ...], noise_offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sample's two draws of noise.

    Args:
        sample: of the stream.
        shape: of one latent: (channels, height, width).
        noise_offset: see `noises`.

    Returns:
        (noise of the VAE's posterior, noise of the diffusion), float32 of `shape` on the CPU.
    """
    of_vae, of_diffusion, _ = noises(sample.noise_seed, shape, noise_offset)
    return of_vae, of_diffusion


def noises(
    seed: int, shape: tuple[int, ...], noise_offset: float = 0.0, input_perturbation: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A sample's noise. What an option adds is drawn after all else, so that it changes nothing else.

    Args:
        seed: of the sample.
        shape: of one latent: (channels, height, width).
        noise_offset: scale of noise that is the same for all pixels of a channel, in the diffusion's
            (https://www.crosslabs.org/blog/diffusion-with-offset-noise).
        input_perturbation: scale of noise that is added, and not to be predicted (Ning et al. 2023, arXiv:2301.11706).

    Returns:
        (noise of the VAE's posterior, noise of the diffusion, what is added to the latents), float32 of `shape` on the
        CPU; standard normal, but for what the options add.
    """
    generator = torch.Generator().manual_seed(seed)
    of_vae, of_diffusion = torch.randn(2, *shape, generator=generator)
    if noise_offset:
        of_diffusion = of_diffusion + noise_offset * torch.randn(shape[0], 1, 1, generator=generator)
    added = of_diffusion
    if input_perturbation:
        added = of_diffusion + input_perturbation * torch.randn(shape, generator=generator)
    return of_vae, of_diffusion, added


def raw_words(seed: int, *key: int, count: int) -> np.ndarray:
    """uint64 random numbers, always the same ones for a seed and a key, whose first number is a `Stream`."""
    return np.random.Philox(np.random.SeedSequence(seed, spawn_key=key)).random_raw(count)


@lru_cache(maxsize=2)
def _epoch_order(seed: int, epoch: int, length: int) -> np.ndarray:
    return np.argsort(raw_words(seed, Stream.EPOCH, epoch, count=length), kind="stable")

"""The sample stream: which training sample comes when.

Sample i of a run is a pure function of (seed, i): world size, batch size and restarts only decide who computes it.
Discrete choices use raw words of NumPy's Philox, whose stream NumPy keeps stable between releases; Gaussian noise
comes from a torch generator on the CPU that is seeded per sample, so that every device gets the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

_EPOCH, _SAMPLE = 0, 1  # separate the families of random streams; icom.data.order has more of them


@dataclass(frozen=True)
class Sample:
    """One training sample.

    Attributes:
        picture: index into the pictures.
        flip: mirrored left to right.
        template: index into the caption templates.
        timestep: diffusion timestep in [0, num_train_timesteps).
        noise_seed: seed of the sample's Gaussian noise.
    """

    picture: int
    flip: bool
    template: int
    timestep: int
    noise_seed: int


@dataclass(frozen=True)
class SampleStream:
    """An endless, randomly accessible stream of samples.

    One epoch shows each picture `repeats` times, in an order of its own (as a shuffled dataset of that length would).
    """

    seed: int
    pictures: int
    repeats: int
    templates: int
    timesteps: int

    def __getitem__(self, index: int) -> Sample:
        epoch, position = divmod(index, self.epoch_length)
        order = _epoch_order(self.seed, epoch, self.epoch_length)
        words = raw_words(self.seed, _SAMPLE, index, count=4)
        return Sample(
            picture=int(order[position]) % self.pictures,
            flip=bool(words[0] >> np.uint64(63)),
            template=int(words[1] % np.uint64(self.templates)),
            timestep=int(words[2] % np.uint64(self.timesteps)),
            noise_seed=int(words[3] >> np.uint64(1)),
        )

    @property
    def epoch_length(self) -> int:
        """Samples per epoch."""
        return self.pictures * self.repeats


def gaussian_noise(sample: Sample, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """The sample's two draws of standard normal noise.

    Args:
        sample: of the stream.
        shape: of one latent: (channels, height, width).

    Returns:
        (noise of the VAE's posterior, noise of the diffusion), float32 of `shape` on the CPU.
    """
    both = torch.randn(2, *shape, generator=torch.Generator().manual_seed(sample.noise_seed))
    return both[0], both[1]


def raw_words(seed: int, *key: int, count: int) -> np.ndarray:
    """uint64 random numbers, always the same ones for a seed and a key; the first number of a key names its family."""
    return np.random.Philox(np.random.SeedSequence(seed, spawn_key=key)).random_raw(count)


@lru_cache(maxsize=2)
def _epoch_order(seed: int, epoch: int, length: int) -> np.ndarray:
    return np.argsort(raw_words(seed, _EPOCH, epoch, count=length), kind="stable")

"""How far apart two sets of pictures are, by what a network sees in them.

Arithmetic alone, in float64, so that it is the same for every network, and needs no package that a network does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Features = NDArray[np.float64]
"""(pictures, width)."""

KID_SUBSETS, KID_SUBSET = 100, 1000
"""Of torch-fidelity's and the paper's defaults; smaller sets of pictures have smaller subsets."""


@dataclass(frozen=True)
class Normal:
    """The normal distribution with the mean and covariance of some features.

    Attributes:
        mean: (width,).
        covariance: (width, width), of the sample: divided by pictures - 1.
    """

    mean: Features
    covariance: Features

    @staticmethod
    def of(features: Features) -> Normal:
        """Args: features of two pictures or more."""
        return Normal(features.mean(0), np.atleast_2d(np.cov(features, rowvar=False)))


def frechet(one: Normal, other: Normal) -> float:
    """The squared Fréchet distance of two normal distributions: FID, where an Inception network saw the pictures.

    |m₁ - m₂|² + tr(C₁) + tr(C₂) - 2 tr((C₁ C₂)^½) (Dowson & Landau 1982; Heusel et al. 2017). The last trace is that
    of (C₁^½ C₂ C₁^½)^½, a symmetric matrix, whose eigenvalues are real.
    """
    values, vectors = np.linalg.eigh(one.covariance)
    root = vectors * np.sqrt(values.clip(0)) @ vectors.T
    mixed = np.linalg.eigvalsh(root @ other.covariance @ root)
    difference = one.mean - other.mean
    traces = np.trace(one.covariance) + np.trace(other.covariance)
    return float(difference @ difference + traces - 2 * np.sqrt(mixed.clip(0)).sum())


def kernel_distance(one: Features, other: Features) -> tuple[float, float]:
    """KID: the unbiased squared MMD with the kernel (x·y / width + 1)³ (Bińkowski et al. 2018), of random subsets.

    Args:
        one, other: features of two pictures or more.

    Returns:
        Mean and standard deviation over KID_SUBSETS subsets. Of equal distributions the mean is near 0, on either side.
    """
    size = min(KID_SUBSET, len(one), len(other))
    random = np.random.Generator(np.random.PCG64(0))
    chosen = [
        [features[random.choice(len(features), size, replace=False)] for features in (one, other)]
        for _ in range(KID_SUBSETS)
    ]
    distances = [_mmd(*pair) for pair in chosen]
    return float(np.mean(distances)), float(np.std(distances))


def _mmd(one: Features, other: Features) -> float:
    def kernel(x: Features, y: Features) -> Features:
        return np.asarray((x @ y.T / x.shape[1] + 1) ** 3)

    count = len(one)
    within = [kernel(x, x) for x in (one, other)]
    inner = sum(float(k.sum() - np.trace(k)) for k in within) / (count * (count - 1))
    return inner - 2 * float(kernel(one, other).mean())


def clip_score(pictures: Features, prompts: Features) -> float:
    """100 times the mean cosine between each picture's features and its prompt's, those below 0 counted as 0.

    As torchmetrics counts (Hessel et al. 2021 have the factor 2.5).
    """
    products = (pictures * prompts).sum(1)
    cosines = products / (np.linalg.norm(pictures, axis=1) * np.linalg.norm(prompts, axis=1))
    return float(100 * cosines.clip(0).mean())

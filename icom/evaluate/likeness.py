"""How like the pictures of a word are to those that it was learned from: arithmetic on features, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from icom.evaluate.distances import Features


@dataclass(frozen=True)
class Likeness:
    """Cosines between drawn and training pictures.

    Attributes:
        mean: over all pairs: CLIP-I or DINO of textual inversion (Gal et al. 2022, arXiv:2208.01618, section 5) and
            DreamBooth (Ruiz et al. 2022, arXiv:2208.12242, section 4.1), by the network that saw the pictures.
        error: the standard error of `mean`, over the drawn pictures; 0 of a single one.
        nearest: mean over the drawn pictures of the cosine to the training picture that is nearest.
    """

    mean: float
    error: float
    nearest: float


def likeness(drawn: Features, real: Features) -> Likeness:
    """Args: features of one picture or more each, (pictures, width)."""
    cosines = normalized(drawn) @ normalized(real).T
    of_each = cosines.mean(1)
    error = float(of_each.std(ddof=1) / np.sqrt(len(of_each))) if len(of_each) > 1 else 0.0
    return Likeness(float(of_each.mean()), error, float(cosines.max(1).mean()))


def among_themselves(real: Features) -> float | None:
    """The mean cosine of all pairs of two different pictures: what their differences leave; None of a single one."""
    if len(real) < 2:
        return None
    cosines = normalized(real) @ normalized(real).T
    return float((cosines.sum() - np.trace(cosines)) / (len(real) * (len(real) - 1)))


def alignment(drawn: Features, prompts: Features) -> float:
    """CLIP-T of the same papers: the mean cosine between each picture and its prompt. Args: (pictures, width) each."""
    return float((normalized(drawn) * normalized(prompts)).sum(1).mean())


def normalized(features: Features) -> Features:
    """Of length 1 each."""
    return np.asarray(features / np.linalg.norm(features, axis=1, keepdims=True))

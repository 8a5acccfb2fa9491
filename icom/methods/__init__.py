"""What is learned: one module for each method, and the files that it leaves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from icom.data.sampling import Sample
    from icom.models.loading import Model
    from icom.models.parts import Conditioning


class Method(Protocol):
    """What a method has put into a frozen model, and all that the rest of icom knows of it.

    The loop, the checkpoints, the group and the bench go by `parameters` alone, however many there are.
    """

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """What is trained, float32; the names are those in checkpoints."""

    def condition(self, model: Model, samples: Sequence[Sample]) -> Conditioning:
        """What the samples' captions tell the UNet, with gradients where the method trains there."""

    def describe(self) -> str:
        """One phrase for the start line: how many numbers are trained."""

    def save(self, path: Path) -> None:
        """Write what has been learned so far, as others read it."""

    def add_to(self, pipeline: Any) -> None:
        """Put what was learned into a freshly loaded pipeline of diffusers."""

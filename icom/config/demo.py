"""The options of `icom demo`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from icom.config.common import BackendName, check_at_least_one

ConceptName = Literal["blue-heart", "green-star", "orange-ring", "purple-square", "red-moon", "yellow-cross"]
"""The keys of icom.world.concepts.CONCEPTS, for the command line."""


@dataclass(kw_only=True)
class DemoConfig:
    """Learn a thing that the bundled model has never drawn, and let a judge count before and after. No download."""

    concept: ConceptName = "blue-heart"
    """Which of the bundled concept sets (five pictures each) to learn."""
    max_train_steps: int | None = None
    """Optimizer steps. Default: what `icom train` takes for the bundled model."""
    num_images: int = 16
    """Pictures to judge: so many before training, so many after it, and so many in a new context."""
    backend: BackendName = "auto"
    """What trains, as in `icom train`. The pictures that are judged are drawn by stock PyTorch on the CPU."""
    seed: int = 0
    """Seed of the training; the pictures are drawn from the seeds 0, 1, 2 … in any case."""
    output_dir: str = "demo"
    """Folder for the results of the training and before-after.png."""

    def __post_init__(self) -> None:
        """Raises: UsageError for no pictures. The other options are checked as those of `icom train`."""
        check_at_least_one(num_images=self.num_images)

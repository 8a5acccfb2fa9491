"""Options of `icom train` about when it has learned enough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from icom.errors import UsageError

SHARE = 0.1
"""--validation_share where --stop auto needs one."""


@dataclass(kw_only=True)
class StoppingOptions:
    """How a run sees what it has learned, and when it ends."""

    validation_share: float | None = None
    """Share of the computing that the validation loss may take: the loss on fixed pictures, noises and timesteps, which
    falls without noise (validation.jsonl, loss.png). Default: 0.1 with --stop auto, else 0: none."""
    stop: Literal["auto"] | None = None
    """`auto`: end when the validation loss has stopped falling, and keep the rows of the latest step where it was about
    as low as ever; --max_train_steps is then the upper limit. Default: end at --max_train_steps."""

    def __post_init__(self) -> None:
        """Raises: UsageError for a share that is none, or for stopping without seeing."""
        share = self.validation_share
        if share is not None and not 0 <= share <= 0.5:
            raise UsageError(f"--validation_share has to be between 0 and 0.5, not {share:g}. 0.1 is a tenth of a run.")
        if self.stop and share == 0:
            raise UsageError(
                "--stop auto needs the validation loss, and --validation_share 0 turns it off: drop one of them."
            )

    @property
    def share_for_validation(self) -> float:
        """--validation_share, or its default."""
        if self.validation_share is not None:
            return self.validation_share
        return SHARE if self.stop else 0.0

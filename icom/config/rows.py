"""Options of how rows are learned: the optimizer, and what keeps them near the words that the model knows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from icom.config.objective import EmaOptions
from icom.config.training import RunOptions
from icom.errors import UsageError

OptimizerName = Literal["adamw", "prodigy", "schedule_free_adamw"]

RANDOM = "<rand>"
"""The initializer that stands for random rows, as in cloneofsimo/lora."""

PRODIGY_RATE = 1.0
"""Prodigy's default rate, which is a factor of the one that it finds."""
ABOUT_ONE = (0.1, 10.0)


@dataclass(kw_only=True)
class RowOptions(EmaOptions):
    """How rows are learned."""

    optimizer: OptimizerName = "adamw"
    """`prodigy` finds the rate by itself (Mishchenko & Defazio 2023); `schedule_free_adamw` learns a mean of the rows
    that needs no falling rate (Defazio et al. 2024). Both need the extra `optimizers`, and take the --adam options."""
    max_grad_norm: float = 0.0
    """The gradient of a whole optimizer step is scaled down to this norm; 0: as it is, as in diffusers' script."""
    weight_decay_to_start: bool = False
    """Let --adam_weight_decay pull the rows towards those that they started from, not towards zero."""
    preserve_embedding_norm: float = 0.0
    """Share by which each step pulls a row's norm to the median of the model's own rows; 1: it is that, as in
    OneTrainer; 0: it is free."""

    def __post_init__(self) -> None:
        """Refuse what cannot work alone; `check_with` looks at the rest.

        Raises:
            UsageError: names the option and how to fix it.
        """
        EmaOptions.__post_init__(self)
        if not (math.isfinite(self.max_grad_norm) and self.max_grad_norm >= 0):
            raise UsageError(f"--max_grad_norm has to be a number from 0 on, not {self.max_grad_norm}.")
        if not 0 <= self.preserve_embedding_norm <= 1:
            raise UsageError(
                f"--preserve_embedding_norm is a share between 0 and 1, not {self.preserve_embedding_norm}."
            )

    def check_with(self, run: RunOptions) -> None:
        """Refuse what does not go together.

        Raises:
            UsageError: names the options and how to fix it.
        """
        if self.optimizer == "prodigy" and run.scale_lr:
            raise UsageError("--optimizer prodigy finds the rate by itself, whatever the batch: drop --scale_lr.")
        if self.optimizer == "prodigy" and self.preserve_embedding_norm:
            raise UsageError(
                "--optimizer prodigy finds the rate by how far its steps bring the rows, and --preserve_embedding_norm "
                "moves them, too: drop one of them."
            )
        if self.weight_decay_to_start and not run.adam_weight_decay:
            raise UsageError("--weight_decay_to_start needs --adam_weight_decay above 0, for instance 1: give it.")
        if self.optimizer != "schedule_free_adamw":
            return
        if run.lr_scheduler not in ("constant", "constant_with_warmup"):
            raise UsageError(
                f"--optimizer schedule_free_adamw takes the place of --lr_scheduler {run.lr_scheduler}: give constant "
                "or constant_with_warmup."
            )
        if not run.adam_beta1:
            raise UsageError("--optimizer schedule_free_adamw needs --adam_beta1 above 0; 0.9 is its default.")
        for name in ("use_ema", "preserve_embedding_norm"):
            if getattr(self, name):
                raise UsageError(f"--optimizer schedule_free_adamw learns a mean of its own: drop --{name}.")


def default_rate(optimizer: OptimizerName) -> dict[str, float]:
    """The learning rate that the optimizer wants by default, where that is not AdamW's."""
    return {"learning_rate": PRODIGY_RATE} if optimizer == "prodigy" else {}


def hint(config: RowOptions, learning_rate: float) -> str | None:
    """What is allowed, and hardly meant."""
    least, most = ABOUT_ONE
    if config.optimizer == "prodigy" and not least <= learning_rate <= most:
        return (
            f"--optimizer prodigy finds the rate by itself; --learning_rate {learning_rate:g} is a factor of it, and "
            "meant to be about 1. Drop it."
        )
    return None

"""The commands that train: the one place that knows them, for all that starts trainings or reads what they left."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from icom.config.concepts import Concepts, load_trainings
from icom.config.finetune import FinetuneConfig, load_finetune_config
from icom.config.train import TrainConfig
from icom.errors import UsageError

TrainingConfig = TrainConfig | FinetuneConfig


@dataclass(frozen=True)
class Training:
    """A command that trains.

    Attributes:
        command: after `icom`.
        options: their class.
        load: makes them of flags, the file of --config and defaults.
        script: at the repository's top level, for `accelerate launch`.
        result: in --output_dir, what it is all for.
    """

    command: str
    options: type[TrainingConfig]
    load: Callable[[Mapping[str, Any]], TrainingConfig | Concepts]
    script: str
    result: str

    @property
    def words(self) -> list[str]:
        """What names it before its options, where launchers take them: nothing for the usual one."""
        return [] if self is TRAININGS[0] else [self.command]


TRAININGS = (
    Training("train", TrainConfig, load_trainings, "textual_inversion_icom.py", "learned_embeds.safetensors"),
    Training("finetune", FinetuneConfig, load_finetune_config, "finetune_icom.py", "current_pipeline"),
)
"""The first is meant where none is named."""


def split_training(words: Sequence[str]) -> tuple[Training, list[str]]:
    """What stands after `--`: the training that the first word names, and its options.

    Raises:
        UsageError: that word is no option, and no training.
    """
    first = words[0] if words else "--"
    for training in TRAININGS:
        if training.command == first:
            return training, list(words[1:])
    if not first.startswith("-") and "=" not in first:  # filters.width=>=512 is an option
        usual, *others = (f"`{training.command}`" for training in TRAININGS)
        raise UsageError(
            f"{first!r} is no training. After `--` come options of {usual}, or {' or '.join(others)} and its options."
        )
    return TRAININGS[0], list(words)


def training_of_options(options: TrainingConfig) -> Training:
    """The training whose options these are."""
    return next(training for training in TRAININGS if isinstance(options, training.options))


def training_of(settings: Mapping[str, Any]) -> Training:
    """The training that left these settings, its config.yaml: the one that knows most of them."""

    def known(training: Training) -> int:
        return len(settings.keys() & {field.name for field in fields(training.options)})

    return max(TRAININGS, key=known)

"""`--array FILE`: a run for each line of a file."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from icom.config.finetune import FinetuneConfig
from icom.config.loading import layers, read_flags, read_yaml
from icom.config.training import settings
from icom.config.trainings import Training, TrainingConfig, split_training
from icom.errors import UsageError
from icom.launch.launch import training_config
from icom.training.outcome import DONE, read_outcome


@dataclass(frozen=True)
class Task:
    """One run of an array.

    Attributes:
        number: of the task, from 0; the same however often the array is submitted.
        training: its options, each with a folder of its own.
        done: whether it has been run already.
    """

    number: int
    training: TrainingConfig
    done: bool


def split_array(option: str) -> tuple[Path, int | None]:
    """FILE or FILE%N: the file, and how many runs at a time (None: all).

    Raises:
        UsageError: N is no number.
    """
    match = re.fullmatch(r"(.+?)(?:%(.*))?", option)
    if not match or (match[2] is not None and not (match[2].isdecimal() and int(match[2]) > 0)):
        raise UsageError(f"--array {option}: after % comes how many run at a time: --array runs.txt%4.")
    return Path(match[1]).expanduser(), int(match[2]) if match[2] else None


def read_array(file: Path, common: Sequence[str], processes: int) -> list[Task]:
    """A run for each line that is not empty and no comment.

    Args:
        file: its lines have options of the training, as in a shell, or the name of a YAML file with such.
        common: the training, and options of all runs. A line that names no --output_dir gets a numbered folder in
            theirs.
        processes: of each run.

    Raises:
        UsageError: the file or one of its lines; says which.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--array: {file} cannot be read: {error}.") from None
    given = [(number, line.strip()) for number, line in enumerate(lines, 1)]
    given = [(number, line) for number, line in given if line and not line.startswith("#")]
    if not given:
        raise UsageError(f"--array: {file} has no line with options.")
    kind, options = split_training(common)
    tasks: list[Task] = []
    folders: dict[Path, int] = {}
    for number, line in given:
        where = f"{file}, line {number}: {line!r}"
        try:
            training = _training(line, kind, options, len(tasks))
        except UsageError as error:
            raise UsageError(f"{where}: {error} Nothing was submitted.") from None
        except SystemExit:  # tyro has said what
            raise UsageError(f"{where} is wrong, see above. Nothing was submitted.") from None
        folder = Path(training.output_dir).expanduser().absolute()
        if folder in folders:
            raise UsageError(f"{where}: line {folders[folder]} writes to {training.output_dir} as well.")
        folders[folder] = number
        tasks.append(Task(len(tasks), training, is_done(training, processes)))
    return tasks


def common_folder(kind: Training, options: Sequence[str]) -> str:
    """--output_dir of what all runs have in common, from its flags or its --config; they need not be complete."""
    given = layers(read_flags(kind.options, options, f"icom {kind.command}"))
    folders = [some["output_dir"] for some in given if "output_dir" in some]
    return str(folders[-1] if folders else kind.options.output_dir)


def _training(line: str, kind: Training, common: Sequence[str], number: int) -> TrainingConfig:
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise UsageError(f"it cannot be read ({error}).") from None
    file = words[0] if len(words) == 1 and words[0].endswith((".yaml", ".yml")) else None
    if not file and split_training(words)[1] != words:
        raise UsageError(f"all runs are of one training. Leave {words[0]!r} out here: it comes after `--`.")
    own = {**read_yaml(file)} if file else read_flags(kind.options, words, f"icom {kind.command}")
    base = read_flags(kind.options, common, f"icom {kind.command}")
    if file:
        if twice := sorted(own.keys() & base.keys() | ({"config"} & base.keys())):
            raise UsageError(f"--{twice[0]} is after `--` too; leave it to one of the two.")
        words = ["--config", file]
    if "output_dir" not in own:
        words += ["--output_dir", str(Path(common_folder(kind, common)) / str(number))]
    return training_config([kind.command, *common, *words], "icom launch slurm")


def is_done(training: TrainingConfig, processes: int) -> bool:
    """Whether a run with these options, on so many processes, has ended well in its --output_dir."""
    outcome = read_outcome(Path(training.output_dir).expanduser())
    if outcome.state != DONE:
        return False
    before = outcome.settings
    return all(before.get(name) == value for name, value in _settled(training, processes).items() if value is not None)


def _settled(training: TrainingConfig, processes: int) -> dict[str, Any]:
    """What config.yaml of such a run says; None for what a run decides by itself."""
    said = settings(training)
    if training.mixed_precision == "auto":
        said["mixed_precision"] = None
    if training.train_batch_size == "auto":
        said["train_batch_size"] = None
    if training.validation_epochs is not None:
        said |= {"validation_epochs": None, "validation_steps": None}
    if isinstance(training, FinetuneConfig) and training.num_examples_to_see is not None:
        said |= {"num_examples_to_see": None, "max_train_steps": training.steps_of_examples(processes)}
    return said

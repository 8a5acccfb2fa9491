"""What a launcher makes of a training, and the one place where that is shown or becomes this process."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from icom.config.concepts import Concepts
from icom.config.loading import read_flags
from icom.config.trainings import TrainingConfig, split_training
from icom.errors import IcomError, UsageError
from icom.launch.environment import YOURS, Variable


@dataclass(frozen=True)
class Launch:
    """A launcher's command for a training: made by a pure function per launcher.

    Attributes:
        argv: the command.
        env: what is set for it beside the user's own variables, and why.
        why: what the command is for: whose it is, in which version.
    """

    argv: list[str]
    env: list[Variable]
    why: str


def show(launch: Launch, own: list[Variable]) -> None:
    """Print command and environment, for --dry_run.

    Args:
        launch: not run.
        own: what this machine decides for itself, if it takes part.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    print(f"{shlex.join(launch.argv)}\n\n{launch.why}")
    table = Table("variable", "value", "where", "why", box=None, pad_edge=False)
    table.columns[1].overflow = table.columns[3].overflow = "fold"
    for where, some in (("all hosts", launch.env), ("this host; each decides for itself", own)):
        for variable in some:
            place = "all hosts" if variable.why == YOURS else where
            table.add_row(*map(escape, (variable.name, variable.hidden or variable.value, place, variable.why)))
    Console(highlight=False).print(table)


def become(launch: Launch) -> None:
    """Replace this process by the command, whose exit code is then this command's.

    Raises:
        IcomError: it cannot be started.
    """
    environment = dict(os.environ) | {variable.name: variable.value for variable in launch.env}
    try:
        os.execvpe(launch.argv[0], launch.argv, environment)
    except OSError as error:
        raise IcomError(f"Cannot start {launch.argv[0]}: {error.strerror}.") from None


def training_config(words: Sequence[str], command: str) -> TrainingConfig:
    """Parse and check training options as every rank will.

    Args:
        words: what stands after `--`.
        command: before it, for messages: "icom launch mpirun --hosts hosts".

    Raises:
        UsageError: they are wrong. (What tyro finds ends the process with its own message and exit code 2.)
    """
    training, options = split_training(words)
    if not options:
        raise UsageError(f"No training options. They come after `--`: {command} -- --config run.yaml")
    config = training.load(read_flags(training.options, options, f"icom {training.command}"))
    if isinstance(config, Concepts):
        config = config.common
    if config.on:
        raise UsageError("--on is for `icom train` on your own computer; `icom launch` is typed where it runs.")
    return config


def count(number: int, one: str, many: str = "") -> str:
    """A number and its noun: "1 host", "3 hosts"."""
    return f"{number} {one}" if number == 1 else f"{number} {many or one + 's'}"

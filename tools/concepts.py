"""Measure `icom train --concepts_list` against a process for each word: `python -m tools.concepts`.

The same words, pictures and steps three ways: a list in one process; a process for each, one after the other; and all
those processes at once, each with its share of the cores. Memory is the peak of a
process as the kernel tells it (`ru_maxrss`); of processes at once, the sum of their peaks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from icom import machine
from icom.errors import IcomError, UsageError
from icom.files import write_atomically


@dataclass(kw_only=True)
class ConceptsToolConfig:
    """Memory and time of several words."""

    words: int = 4
    """How many."""
    steps: int = 20
    """Of each."""
    model: str = "bundled"
    """The frozen model."""
    resolution: int = 64
    """Pixels."""
    mixed_precision: str = "no"
    """Precision."""
    train_data_dir: str = "bundled"
    """The pictures of each: memory and time do not depend on what they show."""
    output: Path | None = None
    """JSON file for the result."""

    def __post_init__(self) -> None:
        """Raises: UsageError for impossible numbers."""
        if self.words < 1 or self.steps < 1:
            raise UsageError("--words and --steps take numbers from 1 up.")


@dataclass(frozen=True)
class Cost:
    """What some processes took.

    Attributes:
        seconds: from the start of the first to the end of the last.
        gigabytes: the peaks of those that ran at a time, summed.
    """

    seconds: float
    gigabytes: float


def measure(config: ConceptsToolConfig) -> dict[str, Cost]:
    """The three ways, by name; prints them, and writes them where that is asked for.

    Raises:
        IcomError: a process failed.
    """
    cores = machine.usable_cores()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        words = [f"<word-{number}>" for number in range(config.words)]
        file = folder / "list.yaml"
        file.write_text(yaml.safe_dump([{"placeholder_token": word} for word in words]))
        common = _options(config, folder)
        alone = [
            [*common, f"--placeholder_token={word}", f"--output_dir={folder / 'alone' / str(number)}"]
            for number, word in enumerate(words)
        ]
        _cost(alone[:1], cores)  # fills the latent cache, and measures what the engine remembers
        in_turn = [_cost([one], cores) for one in alone]
        found = {
            "one process, a list": _cost(
                [[*common, f"--concepts_list={file}", f"--output_dir={folder / 'list'}"]], cores
            ),
            "a process each, in turn": Cost(
                sum(cost.seconds for cost in in_turn), max(cost.gigabytes for cost in in_turn)
            ),
            "a process each, at once": _cost(alone, max(1, cores // config.words)),
        }
    print(f"{config.words} words of {config.steps} steps, {config.model}, {config.resolution} px, {cores} cores")
    for name, cost in found.items():
        print(f"{name:24} {cost.seconds / config.words:8.1f} s per word {cost.gigabytes:8.2f} GB")
    if config.output:
        result = {"options": asdict(config) | {"output": None}, "cores": cores}
        result["ways"] = {name: asdict(cost) for name, cost in found.items()}
        write_atomically(config.output, (json.dumps(result, indent=1) + "\n").encode(), "--output")
    return found


def _options(config: ConceptsToolConfig, folder: Path) -> list[str]:
    values = {
        **{"pretrained_model_name_or_path": config.model, "train_data_dir": config.train_data_dir},
        **{"initializer_token": "toy", "resolution": config.resolution, "max_train_steps": config.steps},
        **{"train_batch_size": 1, "learning_rate": 1e-3, "seed": 0, "mixed_precision": config.mixed_precision},
        **{"num_comparison_images": 0, "report_to": "none", "cache_dir": folder / "cache"},
    }
    return [f"--{name}={value}" for name, value in values.items()]


def _cost(commands: Sequence[Sequence[str]], threads: int) -> Cost:
    """Run trainings at a time, each with so many threads.

    Raises:
        IcomError: one failed.
    """
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    began = time.monotonic()
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "icom", "train", *command],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for command in commands
    ]
    kilobytes, failed = 0, ""
    for process in processes:
        assert process.stderr
        with process.stderr:
            said = process.stderr.read().decode(errors="replace")
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)  # so that nobody waits for it again
        kilobytes += usage.ru_maxrss
        failed = failed or (said if process.returncode else "")
    if failed:
        raise IcomError(f"A training failed:\n{failed}")
    return Cost(time.monotonic() - began, kilobytes / 2**20)


if __name__ == "__main__":
    import tyro

    measure(tyro.cli(ConceptsToolConfig, prog="python -m tools.concepts", use_underscores=True))

"""The `icom` command in tests: a short run's options, what a command did, a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm as warm_start

ROOT = Path(__file__).parents[2]
TRAIN = {
    "train_data_dir": "bundled",
    "placeholder_token": "<robot>",
    "initializer_token": "toy",
    "resolution": "64",
    "train_batch_size": "1",
    "max_train_steps": "3",
    "learning_rate": "1e-2",
    "seed": "7",
    "mixed_precision": "no",
    "report_to": "none",
    "num_comparison_images": "0",
}
"""A run of a tenth of a second."""
FINETUNE = {
    "train_data_dir": "synthetic:8",
    "train_batch_size": "1",
    "max_train_steps": "2",
    "learning_rate": "1e-3",
    "seed": "7",
    "mixed_precision": "no",
    "report_to": "none",
}
"""A run of a second."""


@dataclass(frozen=True)
class Result:
    """What a command did."""

    code: int
    out: str
    err: str


Run = Callable[..., Result]
"""The fixtures `icom` and `train`."""


def assert_message(result: Result, code: int, *parts: str) -> None:
    """The exit code; a message with all `parts` and without traceback."""
    text = " ".join(result.err.replace("│", " ").split())  # tyro frames and wraps
    assert result.code == code, result
    assert "Traceback" not in text
    for part in parts:
        assert part in text, f"{part!r} is not in {text!r}"


def assert_refused(result: Result, code: int, *parts: str) -> None:
    """The message, and that training did not start."""
    assert_message(result, code, *parts)
    assert "step/s" not in result.err


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def long(*values: object) -> Any:
    """A row of parametrize that `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.long)


def peak_memory() -> float:
    """Peak of this process's memory in MB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 2**10


def train_arguments(**options: object) -> list[str]:
    """`train` with TRAIN's options, changed by `options`; True is a bare flag, None drops the option."""
    return _words("train", TRAIN | options)


def finetune_arguments(**options: object) -> list[str]:
    """`finetune` with FINETUNE's options, changed as by `train_arguments`."""
    return _words("finetune", FINETUNE | options)


def _words(command: str, options: Mapping[str, object]) -> list[str]:
    words = [command]
    for name, value in options.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not None:
            words.append(f"--{name}={value}")
    return words


def start_process(*arguments: str, cold: bool = False, **environment: str) -> subprocess.Popen[str]:
    """Start `icom` in a process of its own, from the root of the repository; `cold` where starting up matters."""
    return start_python("-m", "icom", *arguments, cold=cold, environment=os.environ | environment)


def start_python(
    *arguments: str, environment: Mapping[str, str], folder: Path = ROOT, cold: bool = False
) -> subprocess.Popen[str]:
    """Start Python, from a process that has imported what icom is made of where that makes no difference.

    Args:
        arguments: -m MODULE or -c CODE, and what follows.
        environment: all of it.
        folder: to stand in.
        cold: start a fresh interpreter.
    """
    warm = not cold and warm_start.can_start(environment)
    return (warm_start.WarmProcess if warm else subprocess.Popen[str])(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

"""Shared by all tests: run icom in this process or in its own, on the bundled model, with a cache of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

# Nothing may look for the Hub: an address where nobody listens. Set before anything of Hugging Face is imported.
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"
os.environ["HF_HUB_DISABLE_XET"] = "1"
# The bundled model's layers are too small to share out: a second thread only waits, above all on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).parent.parent
TRAIN = {
    "train_data_dir": "bundled",
    "placeholder_token": "<robot>",
    "initializer_token": "toy",
    "resolution": "64",
    "train_batch_size": "1",
    "max_train_steps": "3",
    "learning_rate": "1e-2",
    "seed": "7",
    "report_to": "none",
    "num_comparison_images": "0",
}
"""A run of a tenth of a second."""


@dataclass(frozen=True)
class Result:
    """What a command did."""

    code: int
    out: str
    err: str


def train_arguments(**options: object) -> list[str]:
    """`train` with TRAIN's options, changed by `options`; True is a bare flag, None drops the option."""
    arguments = ["train"]
    for name, value in (TRAIN | options).items():
        if value is True:
            arguments.append(f"--{name}")
        elif value is not None:
            arguments.append(f"--{name}={value}")
    return arguments


@pytest.fixture(autouse=True)
def _own_places(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches of the tests, not of the person who runs them."""
    base = tmp_path_factory.getbasetemp()
    monkeypatch.setenv("ICOM_CACHE_DIR", str(base / "latents"))
    monkeypatch.setenv("HF_HOME", str(base / "huggingface"))
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    """Accelerate keeps process-wide state; each test starts without."""
    yield
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def icom(capfd: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Run the command in this process: `icom("train", "--seed", "1")`."""

    def run(*arguments: str) -> Result:
        from icom.cli import main

        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            main([*arguments])
        captured = capfd.readouterr()
        if "accelerate" in sys.modules:
            from accelerate.state import AcceleratorState

            AcceleratorState._reset_state(reset_partial_state=True)
        code = stop.value.code
        return Result(code if isinstance(code, int) else 0, captured.out, captured.err)

    return run


@pytest.fixture
def train(icom: Callable[..., Result]) -> Callable[..., Result]:
    """Train in this process: `train(output_dir=tmp_path, seed=1)`."""
    return lambda **options: icom(*train_arguments(**options))


def start_process(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Start `icom` in a process of its own, from the root of the repository."""
    return subprocess.Popen(
        [sys.executable, "-m", "icom", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

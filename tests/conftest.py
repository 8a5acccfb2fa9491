"""Shared by all tests: run icom in this process or in its own, on the bundled model, with a cache of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.support.command import Result, train_arguments
from tests.support.hosts import missing

# Nothing may look for the Hub: an address where nobody listens. Set before anything of Hugging Face is imported.
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"
os.environ["HF_HUB_DISABLE_XET"] = "1"
# The bundled model's layers are too small to share out: a second thread only waits, above all on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def _own_places(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches of the tests, not of the person who runs them."""
    base = tmp_path_factory.getbasetemp()
    monkeypatch.setenv("ICOM_CACHE_DIR", str(base / "latents"))
    monkeypatch.setenv("HF_HOME", str(base / "huggingface"))
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)


@pytest.fixture(scope="session")
def hosts_possible() -> None:
    """For what needs hosts in namespaces."""
    if lacking := missing():
        pytest.skip(f"hosts cannot be made on this machine: it lacks {', '.join(lacking)}")


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

"""What only a GPU can prove: `make test-gpu` runs this and test_backends.py there; elsewhere it is skipped.

The truth is the same training on the CPU, with stock layers.

Guards icom.backends.cuda.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from PIL import Image
from safetensors.torch import load_file

from icom import backends
from icom.backends import cuda
from icom.config.train import TrainConfig
from icom.data.images import list_pictures
from icom.models import loading
from icom.training.checkpoint import list_checkpoints
from icom.training.report import read_metrics
from icom.training.run import Run, prepare
from icom.training.step import batch_loss, message, optimizer_step
from tests.support.command import Result, start_process, train_arguments

pytestmark = pytest.mark.skipif(cuda.why_not() is not None, reason="no GPU")

GPU, CPU = "cuda", "cpu"
MODELS = {"bundled": (64, 20), "random:sd15": (512, 3)}
"""Model -> pixels and steps."""


def train(folder: Path, backend: str, **options: object) -> Result:
    """A training in a process of its own; CUDA starts once in each."""
    own = {"output_dir": folder, "backend": backend, "num_comparison_images": 0} | options
    with start_process(*train_arguments(**own), cold=True) as process:
        out, err = process.communicate()
    result = Result(process.returncode, out, err)
    assert result.code == 0, result
    return result


def rows(folder: Path) -> torch.Tensor:
    return load_file(folder / "learned_embeds.safetensors")["<robot>"]


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(folder / "metrics.jsonl")]


def built(backend: str, precision: str, model: str, batch: int = 1) -> Run:
    """All that a step needs, in this process."""
    resolution, steps = MODELS[model]
    config = TrainConfig(
        train_data_dir="bundled",
        placeholder_token="<robot>",
        initializer_token="toy",
        resolution=resolution,
        train_batch_size=batch,
        max_train_steps=steps,
        learning_rate=1e-3,
        seed=3,
    )
    chosen, _ = backends.resolve(backend, precision, "off")
    loaded = loading.load(loading.find(model), chosen.dtype)
    accelerator = Accelerator(cpu=backend == CPU)
    return prepare(config, chosen, accelerator, loaded, list_pictures("bundled"))


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_loss_curve_and_rows_are_the_cpus(model: str, precision: str, tmp_path: Path) -> None:
    """Losses as numbers, rows relative to how far they moved."""
    resolution, steps = MODELS[model]
    same = {"pretrained_model_name_or_path": model, "resolution": resolution, "max_train_steps": steps, "engine": "off"}
    for backend in (CPU, GPU):
        train(tmp_path / backend, backend, mixed_precision=precision, checkpointing_steps=1, **same)
    loss_tolerance, rows_tolerance = (1e-4, 1e-2) if precision == "no" else (0.02, 0.1)
    assert losses(tmp_path / GPU) == pytest.approx(losses(tmp_path / CPU), rel=loss_tolerance)
    first = load_file(tmp_path / CPU / "checkpoint-1/state.safetensors")["parameter/rows"]
    moved = (rows(tmp_path / CPU) - first).norm()
    assert (rows(tmp_path / GPU) - rows(tmp_path / CPU)).norm() <= rows_tolerance * moved


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_gradient_is_the_cpus(model: str, precision: str) -> None:
    """AdamW hides a gradient's size, so here it is itself; error relative to the norm."""
    found = {}
    for backend in (CPU, GPU):
        run = built(backend, precision, model)
        batch_loss(run, range(1)).backward()
        gradient = run.method.parameters["rows"].grad
        assert gradient is not None
        found[backend] = gradient.float().cpu()
        del run
    assert (found[GPU] - found[CPU]).norm() <= (1e-4 if precision == "no" else 0.05) * found[CPU].norm()


def test_goes_on_after_kill_9_as_if_nothing_had_been(tmp_path: Path) -> None:
    options: dict[str, object] = {"max_train_steps": 60, "checkpointing_steps": 5, "mixed_precision": "bf16"}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train(whole, GPU, **options)
    own = {"output_dir": killed, "backend": GPU, "num_comparison_images": 0} | options
    with start_process(*train_arguments(**own), cold=True) as process:
        while not list_checkpoints(killed):
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    train(killed, GPU, resume_from_checkpoint="latest", **options)
    assert torch.equal(rows(killed), rows(whole))
    assert losses(killed) == losses(whole)


def test_pictures_are_the_cpus(tmp_path: Path) -> None:
    pictures = []
    for backend in (CPU, GPU):
        options = ("--prompt", "a red moon", "--resolution", "64", "--engine", "off", "--backend", backend)
        with start_process("generate", *options, "--output_dir", str(tmp_path / backend), cold=True) as process:
            out, err = process.communicate()
        assert process.returncode == 0, err
        assert f"icom: {backend} (" in out
        (path,) = (tmp_path / backend).glob("000-*.png")
        with Image.open(path) as picture:
            pictures.append(np.asarray(picture).astype(int))
    assert np.abs(pictures[0] - pictures[1]).mean() < 1


def test_sd15_in_bf16_fits_small_cards() -> None:
    """UNet, VAE and the text encoder's matrices are 2.2 GB in bf16; 8 GB is what the smallest cards in use have."""
    torch.cuda.reset_peak_memory_stats()
    run = built(GPU, "bf16", "random:sd15")
    for step in range(3):
        optimizer_step(run, step)
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(f"peak memory of SD1.5, 512 px, batch 1, bf16: {peak:.2f} GB")
    assert peak < 8


@pytest.fixture
def nccl() -> Iterator[None]:
    from torch import distributed

    store = distributed.HashStore()
    distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("nccl")
def test_nccl_sums_a_steps_message() -> None:
    """With one rank, a sum is the tensor itself."""
    from torch import distributed

    parts = message([torch.randn(2, 768, device=GPU)], 0.5, [0, 15])
    for part in parts:
        expected = part.clone()
        distributed.all_reduce(part)
        assert torch.equal(part, expected)
    assert parts[-1].tolist() == [0.5, 0, 15]


@pytest.mark.parametrize("option", ["compile", "allow_tf32"])
def test_faster_ways_learn_the_same(option: str, tmp_path: Path) -> None:
    """TF32 rounds to ten bits, and compiled kernels sum in another order."""
    options: dict[str, object] = {"mixed_precision": "no", "max_train_steps": 10}
    train(tmp_path / "plain", GPU, **options)
    result = train(tmp_path / "tested", GPU, **options, **{option: True})
    assert {"compile": "compiled", "allow_tf32": "TF32"}[option] in result.out
    tolerance = 1e-4 if option == "compile" else 0.01
    assert losses(tmp_path / "tested") == pytest.approx(losses(tmp_path / "plain"), rel=tolerance)


def test_xformers_is_used_or_refused_in_words(tmp_path: Path) -> None:
    options = train_arguments(output_dir=tmp_path, backend=GPU, enable_xformers_memory_efficient_attention=True)
    with start_process(*options, cold=True) as process:
        _, err = process.communicate()
    refused = re.search(r"icom: xFormers cannot be used here \(.*Drop --enable_xformers", err, re.S)
    assert (process.returncode, bool(refused)) in ((0, False), (2, True)), err

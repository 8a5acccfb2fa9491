"""What only a GPU can prove: `make test-gpu` runs this and test_backends.py there; elsewhere it is skipped.

The truth is the same training on the CPU, with stock layers. What a test measures beside it is printed, and a property
in JUnit's XML.

Guards icom.backends.cuda.
"""

from __future__ import annotations

import gc
import json
import re
import shutil
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
from icom.training.checkpoint_folders import list_checkpoints
from icom.training.material import open_material
from icom.training.report import read_metrics
from icom.training.run import Run, prepare
from icom.training.step import batch_loss, message, optimizer_step
from tests.support.command import Result, start_process, train_arguments

Found = Callable[[str, object], None]

pytestmark = pytest.mark.skipif(cuda.why_not() is not None, reason="no GPU")

GPU, CPU = "cuda", "cpu"
MODELS = {"bundled": (64, 20), "random:sd15": (512, 3)}
"""Model -> pixels and steps."""


@pytest.fixture
def found(record_property: Callable[[str, object], None]) -> Found:
    """Tell what was measured."""

    def tell(name: str, value: object) -> None:
        print(f"{name}: {value}")
        record_property(name, value)

    return tell


@pytest.fixture
def one_picture(tmp_path: Path) -> Path:
    """A folder: the VAE at 512 px takes a CPU long."""
    folder = tmp_path / "picture"
    folder.mkdir()
    shutil.copy(list_pictures("bundled")[0].path, folder)
    return folder


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


def built(
    backend: str, precision: str, model: str, batch: int = 1, pictures: str | Path = "bundled", **options: Any
) -> Run:
    """All that a step needs, in this process."""
    resolution, steps = MODELS[model]
    config = TrainConfig(
        train_data_dir=str(pictures),
        placeholder_token="<robot>",
        initializer_token="toy",
        resolution=resolution,
        train_batch_size=batch,
        max_train_steps=steps,
        learning_rate=1e-3,
        seed=3,
        **options,
    )
    chosen, _ = backends.resolve(backend, precision, "off")
    loaded = loading.load(loading.find(model), chosen.dtype)
    accelerator = Accelerator(cpu=backend == CPU)
    return prepare(config, chosen, accelerator, loaded, open_material(config))


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_loss_curve_and_rows_are_the_cpus(
    model: str, precision: str, tmp_path: Path, one_picture: Path, found: Found
) -> None:
    """Losses as numbers, rows relative to how far they moved. The latents are the CPU's: see the VAE's own test."""
    resolution, steps = MODELS[model]
    same: dict[str, object] = {"pretrained_model_name_or_path": model, "resolution": resolution, "engine": "off"}
    same |= {"max_train_steps": steps, "train_data_dir": "bundled" if model == "bundled" else one_picture}
    for backend in (CPU, GPU):
        train(tmp_path / backend, backend, mixed_precision=precision, checkpointing_steps=1, **same)
    loss_tolerance, rows_tolerance = (1e-4, 1e-2) if precision == "no" else (0.02, 0.1)
    pairs = zip(losses(tmp_path / GPU), losses(tmp_path / CPU), strict=True)
    found("largest relative difference of a loss", max(abs(gpu - cpu) / cpu for gpu, cpu in pairs))
    first = load_file(tmp_path / CPU / "checkpoint-1/state.safetensors")["parameter/rows"]
    moved = (rows(tmp_path / CPU) - first).norm()
    found("difference of the rows", float((rows(tmp_path / GPU) - rows(tmp_path / CPU)).norm() / moved))
    assert losses(tmp_path / GPU) == pytest.approx(losses(tmp_path / CPU), rel=loss_tolerance)
    assert (rows(tmp_path / GPU) - rows(tmp_path / CPU)).norm() <= rows_tolerance * moved


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_gradient_is_the_cpus(model: str, precision: str, one_picture: Path, found: Found) -> None:
    """AdamW hides a gradient's size, so here it is itself; error relative to the norm."""
    gradients = {}
    for backend in (CPU, GPU):
        run = built(backend, precision, model, pictures=one_picture)
        batch_loss(run, range(1)).backward()
        gradient = run.method.parameters["rows"].grad
        assert gradient is not None
        gradients[backend] = gradient.float().cpu()
        del run
    error = float((gradients[GPU] - gradients[CPU]).norm() / gradients[CPU].norm())
    found("difference of the gradient", error)
    assert error <= (1e-4 if precision == "no" else 0.05)


@pytest.mark.parametrize("model", MODELS)
def test_latents_are_the_cpus(model: str, tmp_path: Path, one_picture: Path, found: Found) -> None:
    """Each encodes for itself."""
    means = []
    for backend in (CPU, GPU):
        run = built(backend, "no", model, pictures=one_picture, cache_dir=str(tmp_path / backend))
        assert run.moments.computed == run.moments.variants
        means.append(run.moments.mean[0])
        del run
    error = float((means[1] - means[0]).norm() / means[0].norm())
    found("difference of the latents", error)
    assert error <= 1e-4


STEPS_THAT_WAIT_FOR_NOTHING: list[dict[str, Any]] = [
    {},
    {"max_grad_norm": 0.1, "use_ema": True, "snr_gamma": 5.0, "preserve_embedding_norm": 0.5, "noise_offset": 0.1},
    {"gradient_accumulation_steps": 2, "weight_decay_to_start": True},
    {"enable_cuda_graph": True},
]


@pytest.mark.parametrize("options", STEPS_THAT_WAIT_FOR_NOTHING)
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_step_waits_for_nothing(precision: str, options: dict[str, Any]) -> None:
    """PyTorch raises where Python would wait for the GPU; the first steps may: constants go there, graphs are made."""
    run = built(GPU, precision, "bundled", batch=2, **options)
    count = run.samples_per_step
    for step in range(2):
        optimizer_step(run, step * count)()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        begun = [optimizer_step(run, step * count) for step in (2, 3)]
        with pytest.raises(RuntimeError, match="synchroniz"):
            torch.ones((), device=GPU).item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(np.isfinite(read().loss) for read in begun)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_graphs_learn_the_same(model: str, precision: str, tmp_path: Path, one_picture: Path, found: Found) -> None:
    resolution, steps = MODELS[model]
    options: dict[str, object] = {"pretrained_model_name_or_path": model, "resolution": resolution}
    options |= {"max_train_steps": steps, "train_data_dir": one_picture, "mixed_precision": precision}
    train(tmp_path / "plain", GPU, gradient_accumulation_steps=2, **options)
    train(tmp_path / "graphs", GPU, gradient_accumulation_steps=2, enable_cuda_graph=True, **options)
    found("rows are the same to the bit", torch.equal(rows(tmp_path / "graphs"), rows(tmp_path / "plain")))
    expected = pytest.approx(losses(tmp_path / "plain"), rel=1e-4 if precision == "no" else 0.02)
    assert losses(tmp_path / "graphs") == expected


def test_every_shape_has_its_graph(tmp_path: Path) -> None:
    """Of buckets."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for number, size in enumerate([(96, 64), (64, 96)]):
        Image.effect_noise(size, 100).convert("RGB").save(folder / f"{number}.png")
    options: dict[str, object] = {"train_data_dir": folder, "enable_bucket": True, "mixed_precision": "no"}
    train(tmp_path / "plain", GPU, max_train_steps=8, **options)
    train(tmp_path / "graphs", GPU, max_train_steps=8, enable_cuda_graph=True, **options)
    assert losses(tmp_path / "graphs") == pytest.approx(losses(tmp_path / "plain"), rel=1e-4)


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


@pytest.mark.parametrize(("batch", "most"), [(1, 8), (4, 140), (16, 140)])
def test_sd15_in_bf16_fits(batch: int, most: float, one_picture: Path, found: Found) -> None:
    """UNet, VAE and the text encoder's matrices are 2.2 GB in bf16; 8 GB is what the smallest cards in use have."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run = built(GPU, "bf16", "random:sd15", batch, one_picture)
    for step in range(3):
        optimizer_step(run, step * batch)()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    found(f"peak memory of SD1.5, 512 px, batch {batch}, bf16, in GB", round(peak, 2))
    assert peak < most


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

    numbers = torch.tensor([0.5, 0, 15], device=GPU)
    parts = message([torch.randn(2, 768, device=GPU)], numbers[0], numbers[1:])
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


def test_bench_measures_both_on_the_gpu(tmp_path: Path, found: Found) -> None:
    """The smallest model: what is proven is that it runs."""
    trace, result = tmp_path / "trace.json", tmp_path / "result.json"
    words = ("--backend", GPU, "--arch", "tiny", "--compare", "reference", "--steps", "2", "--rounds", "1")
    with start_process("bench", *words, "--profile", str(trace), "--json", str(result), cold=True) as process:
        out, err = process.communicate()
    assert process.returncode == 0, err
    print(out)
    measured = json.loads(result.read_text())
    assert measured["backend"].startswith("cuda (") and measured["ratio_stock"] > 0
    assert 0 < measured["peak_memory_gb"] < 8
    found("peak of matrix products in TFLOP/s", measured["peak_tflops"]["matmul"])
    assert any(event.get("cat") == "kernel" for event in json.loads(trace.read_text())["traceEvents"])

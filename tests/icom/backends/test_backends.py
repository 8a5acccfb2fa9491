"""One suite for every backend that is present: the same numbers as stock PyTorch; and what happens where one is not.

Under the usual environment that is cpu alone; `make test-ipex` runs it with the real IPEX.

Guards icom.backends.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import torch
from accelerate import Accelerator
from accelerate.commands.config.config_args import load_config_from_file
from safetensors.torch import load_file

from icom import backends, machine
from icom.backends import cuda, ipex
from icom.backends.cpu import CpuBackend
from icom.config.common import BackendName
from icom.config.train import TrainConfig
from icom.engine.precision import product_dtype
from icom.errors import IcomError, UsageError
from icom.models import loading
from icom.parallel.place import Place
from icom.training.material import open_material
from icom.training.report import read_metrics
from icom.training.run import prepare
from icom.training.step import batch_loss
from tests.support.command import ROOT, Result, long, start_process, train_arguments

Command = Callable[..., Result]

PRESENT = [name for name in backends.NAMES if backends.why_not(name) is None]
ABSENT = [name for name in backends.NAMES if name not in PRESENT]
BF16 = product_dtype(torch.bfloat16) == torch.bfloat16
IPEX_BF16 = not machine.cpu_flags().isdisjoint({"avx512bw", "avx_ne_convert"})
"""Else it refuses to pack weights in bf16."""
COMPUTED = [
    (backend, precision)
    for backend in PRESENT
    for precision in ("no", "bf16")
    if (backend, precision) != ("ipex", "bf16") or IPEX_BF16
]
STEPS = 20
EMBEDDING = "learned_embeds.safetensors"


@pytest.fixture
def command(icom: Command) -> Command:
    """Run `icom` with a backend: `command("ipex", "train", …)`.

    Only cpu runs in this process: IPEX replaces kernels of the process that imports it, also for whoever comes next.
    """

    def run(backend: str, *arguments: str) -> Result:
        if backend == "cpu":
            return icom(*arguments, "--backend", backend)
        with start_process(*arguments, "--backend", backend) as process:
            out, err = process.communicate()
            return Result(process.returncode, out, err)

    return run


# ---------------------------------------------------------------- the numbers


@pytest.mark.parametrize(
    ("backend", "precision"), [case if case == ("cpu", "no") else long(*case) for case in COMPUTED]
)
def test_learns_what_stock_pytorch_learns(backend: str, precision: str, tmp_path: Path, command: Command) -> None:
    """20 steps: each loss, and the rows that come out (error relative to how far they moved)."""
    loss_tolerance, rows_tolerance = (1e-5, 1e-4) if precision == "no" else (0.02, 0.03 if BF16 else 0.06)
    runs = {"stock": ("cpu", "off"), "tested": (backend, "on")}
    for folder, (name, engine) in runs.items():
        options = train_arguments(output_dir=tmp_path / folder, engine=engine, max_train_steps=STEPS)
        result = command(name, *options, "--mixed_precision", precision)
        assert result.code == 0, result.err
    described = f"icom: {backend} (", {"no": "fp32", "bf16": "bf16"}[precision], "(asked for)"
    assert all(words in result.out for words in described)
    assert re.search(r"\d threads|cuda:\d", result.out)
    losses = [[row["loss"] for row in read_metrics(tmp_path / folder / "metrics.jsonl")] for folder in runs]
    assert len(losses[0]) == STEPS
    assert losses[1] == pytest.approx(losses[0], rel=loss_tolerance)
    stock, tested = (load_file(tmp_path / folder / EMBEDDING)["<robot>"] for folder in runs)
    text_encoder = loading.load(loading.find("bundled"), torch.float32).text_encoder
    (start,) = loading.load_tokenizer(loading.find("bundled")).encode("toy", add_special_tokens=False)
    moved = (stock - text_encoder.get_input_embeddings().weight[start]).norm()
    assert (tested - stock).norm() <= rows_tolerance * moved


if "ipex" in PRESENT and not IPEX_BF16:

    def test_ipex_without_bf16_is_refused(tmp_path: Path, command: Command) -> None:
        result = command("ipex", *train_arguments(output_dir=tmp_path / "out"), "--mixed_precision", "bf16")
        assert result.code == 2, result
        assert "IPEX computes in bf16 on CPUs with AVX512 only" in result.err


@pytest.mark.parametrize(("backend", "precision"), COMPUTED)
def test_gradient_of_the_text_is_that_of_stock_pytorch(backend: str, precision: str, tmp_path: Path) -> None:
    """AdamW hides a gradient's size, so here it is itself; error relative to the norm."""
    tolerance = 1e-5 if precision == "no" else 0.03
    expected = through_the_unet("cpu", precision, "off")
    if backend == "cpu":
        actual = through_the_unet(backend, precision, "auto")
    else:
        file = tmp_path / "result.safetensors"
        code = (
            "import sys; from safetensors.torch import save_file\n"
            "from tests.icom.backends.test_backends import through_the_unet\n"
            "save_file(through_the_unet(*sys.argv[1:4]), sys.argv[4])"
        )
        arguments = (sys.executable, "-c", code, backend, precision, "auto", str(file))
        subprocess.run(arguments, cwd=ROOT, check=True)
        actual = load_file(file)
    assert actual.keys() == expected.keys()
    for name, ours in actual.items():
        assert (ours - expected[name]).norm() <= tolerance * expected[name].norm(), name


def through_the_unet(name: str, precision: str, engine: str) -> dict[str, torch.Tensor]:
    """Predictions and gradients of the bundled UNet, with gradient checkpointing and without; float32 on the CPU."""
    results = {}
    for mode in ("plain", "checkpointed"):
        backend, _ = backends.resolve(name, precision, engine)
        model = loading.load(loading.find("bundled"), backend.dtype)
        if mode == "checkpointed":
            model.unet.train()
            model.unet.enable_gradient_checkpointing()
        backend.prepare(model)
        assert model.unet.training == (mode == "checkpointed")  # else it would silently not be done
        generator = torch.Generator().manual_seed(0)
        noisy, text = (torch.randn(shape, generator=generator) for shape in ((2, 4, 8, 8), (2, 77, 128)))
        text = text.to(backend.device, backend.dtype).requires_grad_()
        timesteps = torch.tensor([3, 500], device=backend.device)
        prediction = model.unet(noisy.to(backend.device, backend.dtype), timesteps, text).sample
        prediction.float().square().sum().backward()
        assert text.grad is not None
        results[f"{mode}: prediction"] = prediction.detach().float().cpu().contiguous()
        results[f"{mode}: gradient"] = text.grad.float().cpu().contiguous()
    return results


@pytest.mark.parametrize("backend", PRESENT)
def test_draws_what_stock_pytorch_draws(backend: str, tmp_path: Path, command: Command) -> None:
    import numpy as np
    from PIL import Image

    pictures = []
    for folder, name, engine in (("stock", "cpu", "off"), ("tested", backend, "on")):
        options = ("--prompt", "a toy", "--num_inference_steps", "3", "--engine", engine)
        result = command(name, "generate", *options, "--output_dir", str(tmp_path / folder))
        assert result.code == 0, result.err
        assert f"icom: {name} (" in result.out
        with Image.open(tmp_path / folder / "000-a-toy-seed0.png") as picture:
            pictures.append(np.array(picture).astype(int))
    assert np.abs(pictures[0] - pictures[1]).max() <= 2


# ---------------------------------------------------------------- the choice


def test_the_option_takes_every_backend() -> None:
    assert get_args(BackendName) == ("auto", *backends.NAMES)


@pytest.mark.parametrize("backend", ABSENT)
@pytest.mark.parametrize("subcommand", ["train", "generate", "demo"])
def test_absent_backend_is_an_error_that_says_what_to_do(
    backend: str, subcommand: str, tmp_path: Path, icom: Command
) -> None:
    options = {"train": train_arguments()[1:], "generate": ["--prompt", "a toy"], "demo": []}[subcommand]
    result = icom(subcommand, *options, "--backend", backend, "--output_dir", str(tmp_path / "out"))
    assert result.code == 2
    assert f"--backend {backend} cannot be used here" in result.err
    remedies = {"ipex": r"make setup-master .*EXTRAS=ipex.*\(extra ipex\)", "cuda": r"docs/gpu\.md|nvidia-smi"}
    assert re.search(remedies[backend], result.err)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("backend", PRESENT)
def test_fp16_is_refused(backend: str, tmp_path: Path, command: Command) -> None:
    result = command(backend, *train_arguments(output_dir=tmp_path, mixed_precision="fp16"))
    assert result.code == 2
    assert "fp16" in result.err and "--mixed_precision bf16" in result.err


@pytest.mark.skipif("cuda" in PRESENT, reason="there is no need to fall back: a GPU is there")
def test_auto_falls_back_and_says_why(tmp_path: Path, train: Command) -> None:
    result = train(output_dir=tmp_path)
    assert result.code == 0
    assert re.search(r"icom: cpu \(.*stock PyTorch; no GPU: PyTorch ", result.out)


def test_auto_takes_a_gpu(monkeypatch: pytest.MonkeyPatch, fake_gpus: None) -> None:
    backend, reason = backends.resolve("auto", "bf16")
    assert (backend.name, reason) == ("cuda", "a GPU is there")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")  # accelerate launch with single_cpu.yaml
    backend, reason = backends.resolve("auto", "bf16")
    assert backend.name == "cpu"
    assert "use_cpu: true" in reason
    with pytest.raises(UsageError, match=r"single_gpu\.yaml"):
        backends.resolve("cuda", "bf16")


def test_auto_takes_ipex_only_where_it_was_measured_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "why_not", lambda: "none here")
    monkeypatch.setattr(ipex, "why_not", lambda: None)
    assert backends._choose(tmp_path)[0] == "cpu"
    backends.remember({"ipex": 2.1}, tmp_path / "cache")
    assert backends._choose(tmp_path / "cache")[0] == "cpu"  # nothing to compare with
    backends.remember({"cpu": 3.0}, tmp_path / "cache")
    assert backends._choose(tmp_path / "cache") == ("ipex", "measured faster than cpu here: 2.1 against 3 s/step")
    monkeypatch.setattr(ipex, "why_not", lambda: "gone")
    assert backends._choose(tmp_path / "cache")[0] == "cpu"
    monkeypatch.setattr(ipex, "why_not", lambda: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1000)  # another machine's measurement
    assert backends._choose(tmp_path / "cache")[0] == "cpu"
    monkeypatch.undo()
    backends.remember({"cpu": 2.0}, tmp_path / "cache")
    assert backends.faster_backend(tmp_path / "cache") == (
        "cpu",
        "measured faster than ipex here: 2 against 2.1 s/step",
    )


@pytest.mark.parametrize("content", ["", "[]", "{", '{"x": 1}', '{"x": {"cpu": null}}'])
def test_damaged_measurements_are_measured_again(content: str, tmp_path: Path) -> None:
    (tmp_path / backends.MEASURED).write_text(content)
    assert backends.faster_backend(tmp_path) is None
    backends.remember({"cpu": 2.0, "ipex": 1.0}, tmp_path)
    assert backends.faster_backend(tmp_path)


@pytest.mark.parametrize("backend", [name for name in PRESENT if name != "cuda"])
def test_compile_is_for_gpus(backend: str, tmp_path: Path, command: Command) -> None:
    result = command(backend, *train_arguments(output_dir=tmp_path, compile=True))
    assert result.code == 2
    assert "--compile is for --backend cuda" in result.err


# ---------------------------------------------------------------- ipex without IPEX


def test_ipex_beside_another_torch_is_named_before_it_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.7.0")
    problem = ipex.why_not()
    assert problem
    assert "IPEX 2.7.0" in problem and f"torch {torch.__version__}" in problem and "extra ipex" in problem
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"{torch.__version__.split('+')[0]}+cpu")
    assert ipex.why_not() is None


def test_ipex_that_cannot_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "intel_extension_for_pytorch", None)
    with pytest.raises(UsageError, match=r"cannot be loaded .*extra ipex"):
        ipex.IpexBackend("no", "auto", tmp_path)
    os.write(2, b"still here")
    assert "still here" in capfd.readouterr().err


# ---------------------------------------------------------------- cuda without a GPU


@pytest.fixture
def fake_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs, as far as choosing one goes."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    answers = {
        "is_available": True,
        "device_count": 2,
        "get_device_capability": (8, 0),
        "get_device_name": "NVIDIA A100-SXM4-80GB",
        "set_device": None,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)


def test_each_process_has_its_own_gpu(fake_gpus: None) -> None:
    assert cuda.CudaBackend("bf16").device == torch.device("cuda", 0)
    backend = cuda.CudaBackend("bf16", place=Place(1, 4, local_rank=1, local_size=4))
    assert (backend.device, backend.dtype, backend.process_group) == (torch.device("cuda", 1), torch.bfloat16, "nccl")
    assert re.fullmatch(r"cuda \(NVIDIA A100-SXM4-80GB, PyTorch .*, CUDA 13.0\), bf16, cuda:1", backend.describe())
    with pytest.raises(UsageError, match=r"process 3 on this machine, and it has 2 GPUs.*--num_processes"):
        cuda.CudaBackend("bf16", place=Place(2, 4, local_rank=2, local_size=4))


def test_precisions_of_gpus(monkeypatch: pytest.MonkeyPatch, fake_gpus: None) -> None:
    with pytest.raises(UsageError, match="loss scaling"):
        cuda.CudaBackend("fp16")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla V100")
    with pytest.raises(UsageError, match=r"Tesla V100 does not compute in bf16.*--mixed_precision no"):
        cuda.CudaBackend("bf16")
    assert cuda.CudaBackend("no").dtype == torch.float32


@pytest.mark.parametrize("allow", [True, False])
def test_tf32_only_when_asked_for(allow: bool, fake_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    matmul, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        backend = cuda.CudaBackend("no", allow_tf32=allow)
        assert torch.get_float32_matmul_precision() == ("high" if allow else "highest")
        assert torch.backends.cudnn.allow_tf32 == allow
        assert ("TF32" in backend.describe()) == allow
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = convolutions


def test_old_driver_is_named(monkeypatch: pytest.MonkeyPatch, fake_gpus: None) -> None:
    def too_old() -> bool:
        import warnings

        warnings.warn("The NVIDIA driver on your system is too old (found version 11040)", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", too_old)
    assert "too old (found version 11040)" in str(cuda.why_not())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "nvidia-smi" in str(cuda.why_not())


@pytest.mark.parametrize("property_", ["epsilon", "v_prediction"])
def test_all_of_a_step_happens_on_the_device(property_: str, tmp_path: Path, fake_gpus: None) -> None:
    """PyTorch's meta device stands in for the GPU: it has no numbers, but refuses operations with the CPU's tensors."""
    words = {"train_data_dir": "bundled", "placeholder_token": "<robot>", "initializer_token": "toy"}
    config = TrainConfig(**words, resolution=64, max_train_steps=1, seed=7)
    model = loading.load(loading.find("bundled"), torch.float32)
    run = prepare(config, CpuBackend("no", "off", tmp_path), Accelerator(cpu=True), model, open_material(config))
    model.noise_scheduler.register_to_config(prediction_type=property_)
    backend = cuda.CudaBackend("no")
    backend.device = torch.device("meta")
    backend.prepare(model)
    run.backend = backend
    loss = batch_loss(run, range(2))
    loss.backward()
    assert loss.device.type == "meta"
    trained = [name for name, weights in model.text_encoder.named_parameters() if weights.grad is not None]
    assert len(trained) == 1 and trained[0].endswith("token_embedding.words.0")
    assert {weights.device.type for part in (model.unet, model.vae) for weights in part.parameters()} == {"meta"}


@pytest.mark.parametrize(
    ("file", "kind", "processes", "cpu"),
    [("single_cpu", "NO", 1, True), ("single_gpu", "NO", 1, False), ("multi_gpu", "MULTI_GPU", 8, False)],
)
def test_accelerate_configurations(file: str, kind: str, processes: int, cpu: bool) -> None:
    path = ROOT / "accelerate_configs" / f"{file}.yaml"
    config = load_config_from_file(str(path))
    assert (config.distributed_type, config.num_processes, config.use_cpu) == (kind, processes, cpu)
    assert config.mixed_precision == "bf16"
    assert f"--config_file accelerate_configs/{file}.yaml" in path.read_text()


def test_measurements_that_cannot_be_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(IcomError):
        backends.remember({"cpu": 1.0}, tmp_path / "file" / "cache")

"""The engine's fast paths against stock PyTorch and diffusers.

Guards icom.engine.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from icom.backends.cpu import CpuBackend
from icom.engine import attention, choices, cost, operators
from icom.engine.blocks import ResidualBlock, Transformer, replace_attention, rewrite
from icom.engine.choices import FILE, Choices, machine_key
from icom.engine.layers import Packed, PackedConv2d, PackedLinear, Projections, can_pack, pack
from icom.engine.precision import has_bf16, product_dtype
from icom.engine.trained import multiply_in_float32
from icom.models import loading
from icom.models.architectures import ARCHITECTURES
from icom.models.parts import UNET
from icom.training.report import read_metrics
from tests.support.command import Result, long

WAYS = {
    "stock": attention.stock,
    "whole": attention.whole,
    "blocks": attention.blocks(256),
    "blocks, kept": attention.blocks(256, keep=True),
    "stock, then blocks": attention.blocks(256, stock_forward=True),
}
EMULATED = product_dtype(torch.bfloat16) != torch.bfloat16
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
"""Largest error of results and gradients relative to their norm."""


def results_and_gradients(
    function: Callable[..., torch.Tensor], inputs: list[torch.Tensor], weight: torch.Tensor
) -> list[torch.Tensor]:
    """The result, and the gradient of its product with `weight` for each input."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    result = function(*leaves)
    (result * weight).sum().backward()
    assert all(leaf.grad is not None for leaf in leaves)
    return [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def under_autocast(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The forward pass alone, as in training."""

    def called(*inputs: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return function(*inputs)

    return called


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Relative to the norm."""
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("n", "m"), [(600, 600), (512, 77), (5, 700)])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_is_attention(way: str, n: int, m: int, dtype: torch.dtype) -> None:
    """Against PyTorch's in float64. Blocks need not divide n."""
    torch.manual_seed(0)
    inputs = [torch.randn(2, tokens, 3, 40).to(dtype) for tokens in (n, m, m)]
    weight = torch.randn(2, n, 3, 40).to(dtype)
    expected = results_and_gradients(attention.stock, [t.double() for t in inputs], weight.double())
    actual = results_and_gradients(WAYS[way], inputs, weight)
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.dtype == dtype
        assert ours.shape == theirs.shape
        assert distance(ours, theirs) <= TOLERANCES[dtype]


@pytest.mark.parametrize("scale", [4.0, 40.0])
@pytest.mark.parametrize("way", ["blocks", "blocks, kept", "stock, then blocks"])
def test_blocks_with_scores_far_apart(way: str, scale: float) -> None:
    """Scores of hundreds, where exp of a bound that is not the maximum underflows, and keys far from the origin."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 300, 2, 40) for _ in range(3))
    inputs = [q * scale, k * scale + 20, v]
    weight = torch.randn(1, 300, 2, 40)
    expected = results_and_gradients(attention.stock, [t.double() for t in inputs], weight.double())
    actual = results_and_gradients(WAYS[way], inputs, weight)
    for ours, theirs in zip(actual, expected, strict=True):
        assert distance(ours, theirs) <= 1e-3


def test_keeping_changes_no_bits() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(1, 600, 2, 40).bfloat16() for _ in range(3)]
    weight = torch.randn(1, 600, 2, 40).bfloat16()
    first, second = (results_and_gradients(WAYS[way], inputs, weight) for way in ("blocks", "blocks, kept"))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(24, 40), (2, 7, 24)),
    "linear without bias": (lambda: nn.Linear(24, 40, bias=False), (2, 7, 24)),
    "3x3": (lambda: nn.Conv2d(24, 40, 3, padding=1), (2, 24, 10, 12)),
    "1x1": (lambda: nn.Conv2d(24, 40, 1), (2, 24, 10, 12)),
    "stride 2": (lambda: nn.Conv2d(24, 40, 3, stride=2, padding=1), (2, 24, 10, 12)),
    "stride 2, odd": (lambda: nn.Conv2d(24, 40, 3, stride=2, padding=1), (1, 24, 9, 11)),
    "unpadded": (lambda: nn.Conv2d(24, 40, 3), (2, 24, 10, 12)),
    "unpadded, stride 2": (lambda: nn.Conv2d(24, 40, 3, stride=2), (2, 24, 11, 13)),
    "unpadded, stride 2, even": (lambda: nn.Conv2d(24, 40, 3, stride=2), (2, 24, 10, 12)),
    "padded by more": (lambda: nn.Conv2d(24, 40, (3, 1), padding=(2, 0)), (2, 24, 10, 12)),
}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", LAYERS)
def test_packed_layer_is_the_layer(name: str, dtype: torch.dtype) -> None:
    """Result and gradient, with and without a residual, and for another input after the weights are packed."""
    torch.manual_seed(0)
    build, shape = LAYERS[name]
    layer = build().to(dtype).requires_grad_(False)
    exact = copy.deepcopy(layer).double()
    packed = pack(layer)
    for size in (shape, (1, *shape[1:])):
        x = torch.randn(size).to(dtype)
        weight = torch.randn(exact(x.double()).shape).to(dtype)
        residual = torch.randn_like(weight)
        for inputs in ([x], [x, residual]):

            def stock(x: torch.Tensor, residual: torch.Tensor | float = 0.0) -> torch.Tensor:
                result: torch.Tensor = exact(x) + residual
                return result

            expected = results_and_gradients(stock, [t.double() for t in inputs], weight.double())
            actual = results_and_gradients(packed, inputs, weight)
            for ours, theirs in zip(actual, expected, strict=True):
                assert ours.dtype == dtype
                assert distance(ours, theirs) <= TOLERANCES[dtype]


@pytest.mark.parametrize("name", ["linear", "3x3"])
def test_packed_layer_takes_float32_too(name: str) -> None:
    """As autocast does for the layer it stands for."""
    build, shape = LAYERS[name]
    packed, x = pack(build().bfloat16().requires_grad_(False)), torch.randn(shape)
    assert torch.equal(packed(x), packed(x.bfloat16()))


def test_converted_weights_take_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where products are float32's, weights stay bf16's, and a linear layer has one copy for both directions."""
    monkeypatch.setattr(operators, "product_dtype", lambda _: torch.float32)
    torch.manual_seed(0)
    for layer, shape in ((nn.Linear(24, 40), (7, 24)), (nn.Conv2d(24, 40, 3, padding=1), (1, 24, 10, 12))):
        packed = pack(layer.bfloat16().requires_grad_(False))
        x, weight = torch.randn(shape).bfloat16(), torch.randn(layer(torch.zeros(shape).bfloat16()).shape).bfloat16()
        exact = results_and_gradients(copy.deepcopy(layer).double(), [x.double()], weight.double())
        for ours, theirs in zip(results_and_gradients(packed, [x], weight), exact, strict=True):
            assert distance(ours, theirs) <= TOLERANCES[torch.bfloat16]
        assert packed._packed is not None and packed._packed_transposed is not None
        both = (packed._packed, packed._packed_transposed)
        assert {t.dtype for t in both} == {torch.bfloat16}
        assert len({t.untyped_storage().data_ptr() for t in both}) == (1 if isinstance(layer, nn.Linear) else 2)


def test_projections_are_the_layers() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(24, width).requires_grad_(False) for width in (40, 16, 16)]
    x = torch.randn(2, 7, 24)
    weights = [torch.randn(2, 7, width) for width in (40, 16, 16)]

    def joined(results: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return torch.cat([result * weight for result, weight in zip(results, weights, strict=True)], -1)

    one = torch.ones(2, 7, 72)
    expected = results_and_gradients(lambda x: joined(tuple(layer(x) for layer in layers)), [x], one)
    actual = results_and_gradients(lambda x: joined(Projections(layers)(x)), [x], one)
    for ours, theirs in zip(actual, expected, strict=True):
        assert distance(ours, theirs) <= 2e-6


def test_unusual_convolutions_stay_stock() -> None:
    unusual = [
        nn.Conv2d(4, 8, 1, padding=1),
        nn.Conv2d(4, 8, 3, padding=2, dilation=2),
        nn.Conv2d(4, 8, 3, padding=1, groups=2),
        nn.Conv2d(4, 8, 3, padding=1, padding_mode="reflect"),
        nn.ConvTranspose2d(4, 8, 3),
    ]
    assert not any(can_pack(layer) for layer in unusual)


def run_unet(unet: Any, size: int, text_width: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Prediction and the text's gradient; random inputs, two samples at different timesteps."""
    torch.manual_seed(0)
    noisy, timesteps = torch.randn(2, 4, size, size).to(dtype), torch.tensor([3, 500])
    weight = torch.randn(2, 4, size, size).to(dtype)
    text = torch.randn(2, 77, text_width).to(dtype)
    return results_and_gradients(lambda text: unet(noisy, timesteps, text).sample, [text], weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("way", ["stock", "blocks, kept"])
def test_rewritten_unet_is_the_unet(way: str, checkpointing: bool, dtype: torch.dtype) -> None:
    """The bundled UNet, all attention layers in the given way. float64 is the truth that both are held to."""
    exact = loading.load(loading.find("bundled"), torch.float32).unet
    unet = copy.deepcopy(exact).to(dtype)
    expected = run_unet(exact.double(), 8, 128, torch.float64)
    stock = run_unet(unet, 8, 128, dtype)
    if checkpointing:
        unet.train()
        unet.enable_gradient_checkpointing()
    assert rewrite(unet, WAYS[way])
    kinds = {type(module) for module in unet.modules()}
    assert {ResidualBlock, Transformer} <= kinds
    assert not kinds & {nn.Linear, nn.Conv2d}
    actual = run_unet(unet, 8, 128, dtype)
    for ours, theirs, truth in zip(actual, stock, expected, strict=True):
        assert distance(ours, truth) <= max(1.5 * distance(theirs, truth), 1e-5)


@pytest.mark.parametrize("architecture", ["sd15", "sd21"])
def test_all_of_the_real_architectures_is_known(architecture: Any) -> None:
    with torch.device("meta"):
        unet = UNET.build(ARCHITECTURES[architecture]).requires_grad_(False)
        assert replace_attention(copy.deepcopy(unet), attention.stock) == 32
        rewrite(unet, attention.stock)
    kinds = [type(module) for module in unet.modules()]
    assert (kinds.count(ResidualBlock), kinds.count(Transformer)) == (22, 16)
    assert not {nn.Linear, nn.Conv2d} & set(kinds)


def test_rewritten_vae_and_text_encoder() -> None:
    model = loading.load(loading.find("bundled"), torch.float32)
    torch.manual_seed(0)
    picture, ids = torch.randn(1, 3, 64, 64), torch.randint(0, 100, (2, 77))

    def run() -> list[torch.Tensor]:
        with torch.no_grad():
            latents = model.vae.encode(picture).latent_dist.mean
            return [latents, model.vae.decode(latents).sample, model.text_encoder(ids)[0]]

    expected = run()
    for part in (model.vae, model.text_encoder):
        assert rewrite(part, attention.stock)
    assert isinstance(model.text_encoder.encoder.layers[0].mlp.fc1, PackedLinear)
    assert any(isinstance(module, PackedConv2d) for module in model.vae.modules())
    for ours, theirs in zip(run(), expected, strict=True):
        assert distance(ours, theirs) <= 1e-5


def test_engine_refuses_what_it_does_not_compute() -> None:
    unet = loading.load(loading.find("bundled"), torch.float32).unet
    rewrite(unet, attention.stock)
    with pytest.raises(NotImplementedError, match=r"encoder_attention_mask; use --engine off"):
        unet(torch.randn(1, 4, 8, 8), 5, torch.randn(1, 77, 128), encoder_attention_mask=torch.ones(1, 77))


@pytest.fixture
def long_text(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Inputs for which several ways come into question."""
    monkeypatch.setattr(choices, "BLOCKS_FROM", 1)
    torch.manual_seed(0)
    return [torch.randn(1, 32, 2, 8) for _ in range(3)]


def test_choice_is_measured_once_and_remembered(
    tmp_path: Path, long_text: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Choices(tmp_path / "new", 1)
    first.attend(*long_text)
    key = "1x2x32x32x8 float32"
    measured = json.loads((tmp_path / "new" / FILE).read_text())[machine_key()][key]
    assert measured.keys() == {"stock", "whole", "blocks of 32"}
    assert first.made == {key: min(measured, key=measured.__getitem__)}

    def fail(*_: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(choices, "_measure", fail)
    second = Choices(tmp_path / "new", 1)
    second.attend(*long_text)
    assert second.made == first.made


def test_fastest_way_is_taken_and_a_record_goes_first(
    tmp_path: Path, long_text: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {"stock": 3.0, "whole": 1.0, "blocks of 32": 2.0}
    monkeypatch.setattr(choices, "_measure", lambda shape, ways: {way: seconds[way] for way in ways})
    chosen = Choices(tmp_path, 1)
    assert torch.equal(chosen.attend(*long_text), attention.whole(*long_text))
    resumed = Choices(tmp_path, 1)
    resumed.made.update(dict.fromkeys(chosen.made, "blocks of 32"))
    assert torch.equal(resumed.attend(*long_text), attention.blocks(32)(*long_text))


def test_autocast_does_not_undo_what_a_way_converts(
    tmp_path: Path, long_text: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A UNet that is trained attends under autocast; what was measured without it has to be what is computed."""
    for way in ("stock", "whole"):
        monkeypatch.setattr(
            choices, "_measure", lambda _, ways, way=way: {other: float(other != way) for other in ways}
        )
        chosen = Choices(tmp_path / way, 1)
        for dtype in TOLERANCES:
            inputs = [t.to(dtype) for t in long_text]
            expected = results_and_gradients(getattr(attention, way), inputs, inputs[0])
            found = results_and_gradients(under_autocast(chosen.attend), inputs, inputs[0])
            assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(("free", "kept"), [(2**20, True), (2**10, False)])
def test_kept_exponentials_are_bounded_by_free_memory(
    tmp_path: Path, long_text: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch, free: int, kept: bool
) -> None:
    """2 heads x 32 x 32 x 4 bytes x 3 layers are 24 KB."""
    monkeypatch.setattr(choices.machine, "memory", lambda: choices.machine.Memory(2**30, free))
    asked: list[dict[str, Any]] = []

    def blocks(rows: int, **options: Any) -> attention.Attention:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            asked.append(options)
            return attention.stock(q, k, v)

        return attend

    monkeypatch.setattr(attention, "blocks", blocks)
    chosen = Choices(tmp_path, 3)
    chosen.made["1x2x32x32x8 float32 gradient"] = "blocks of 32"
    chosen._measured["1x2x32x32x8 float32 gradient"] = {"blocks of 32": 2.0, "blocks of 32, kept": 1.0}
    chosen.attend(*(t.requires_grad_() for t in long_text))
    assert asked == [{"keep": True} if kept else {}]


@pytest.mark.parametrize("content", ["", "[]", '{"a": 1}', '{"a": {"b": {"c": "x"}}}', "\x00\xff"])
def test_damaged_memory_is_measured_anew(tmp_path: Path, long_text: list[torch.Tensor], content: str) -> None:
    (tmp_path / FILE).write_text(content, encoding="latin-1")
    Choices(tmp_path, 1).attend(*long_text)
    assert machine_key() in json.loads((tmp_path / FILE).read_text())


def test_unwritable_memory_is_no_error(tmp_path: Path, long_text: list[torch.Tensor]) -> None:
    (tmp_path / "file").touch()
    Choices(tmp_path / "file", 1).attend(*long_text)


@pytest.mark.parametrize(
    ("flags", "environment", "expected"),
    [
        ("avx2", {}, False),
        ("avx2 avx512f", {}, False),
        ("avx2 avx512f avx512_bf16", {}, True),
        ("avx2 avx512f avx512_bf16 amx_bf16", {"ONEDNN_MAX_CPU_ISA": "ALL"}, True),
        ("avx2 avx512f avx512_bf16 amx_bf16", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, True),
        ("avx2 avx512f avx512_bf16 amx_bf16", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"}, False),
        ("avx2 avx512f avx512_bf16 amx_bf16", {"DNNL_MAX_CPU_ISA": "avx2"}, False),
        ("avx2 avx512f avx512_bf16", {"ONEDNN_MAX_CPU_ISA": "ALL", "DNNL_MAX_CPU_ISA": "AVX2"}, True),
        ("avx2 avx512f avx512_bf16", {"ONEDNN_MAX_CPU_ISA": "AVX2_VNNI_2"}, False),
        ("avx2 avx_vnni avx_ne_convert", {}, True),
        ("avx2 avx_vnni avx_ne_convert", {"ONEDNN_MAX_CPU_ISA": "AVX2_VNNI"}, False),
        ("avx2 avx512f avx512_bf16", {"ATEN_CPU_CAPABILITY": "avx2"}, True),
    ],
)
def test_who_multiplies_in_bf16(flags: str, environment: dict[str, str], expected: bool) -> None:
    assert has_bf16(frozenset(flags.split()), environment) is expected


@pytest.mark.parametrize("limit", ["ALL", "AVX512_CORE_BF16", "AVX512_CORE", "AVX2"])
def test_products_are_computed_as_onednn_tells(limit: str) -> None:
    """A packed product in bf16: float32 products where, and only where, oneDNN has no instructions for bf16."""
    code = """if True:
        import torch
        from icom.engine import operators
        from icom.engine.precision import product_dtype
        print(product_dtype(torch.bfloat16))
        x = torch.ones(64, 64, dtype=torch.bfloat16)
        operators.linear(x, operators.pack_linear(x, 64), None)
    """
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": limit, "ONEDNN_VERBOSE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True, text=True)
    told = [line for line in done.stdout.splitlines() if re.search(r",exec,cpu,(matmul|inner_product),", line)]
    assert told, done.stdout
    bf16 = "torch.bfloat16" in done.stdout
    for line in told:
        assert bool(re.search(r"avx512_core_bf16|avx512_core_fp16|avx10|amx|avx2_vnni_2", line)) == bf16
        assert ("src:bf16" in line) == bf16


@pytest.mark.parametrize("packed", [True, False])
def test_factors_are_quotients_of_times(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that a layer advances by 2 s in float32 and by 5 s in bf16, and by much while it warms up."""
    now, called = 0.0, {torch.float32: 0, torch.bfloat16: 0}

    def advance(layer: nn.Module, inputs: tuple[torch.Tensor, ...], _: object) -> None:
        nonlocal now
        assert isinstance(layer, Packed) is packed
        dtype = inputs[0].dtype
        called[dtype] += 1
        now += {torch.float32: 2.0, torch.bfloat16: 5.0}[dtype] + (100 if called[dtype] == 1 else 0)

    monkeypatch.setattr(cost.time, "thread_time", lambda: now)
    threads = torch.get_num_threads()
    with register_module_forward_hook(advance):
        assert cost.bf16_factors(packed=packed) == {"matmul": 2.5, "convolution": 2.5}
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("feature", operators.FEATURES)
def test_probe_passes_here(feature: str) -> None:
    """CI runs where all of them exist; a PyTorch without one of them would silently be slow."""
    for dtype in (torch.float32, torch.bfloat16):
        assert operators.why_not(feature, dtype) is None


def test_probe_notices_a_missing_and_a_wrong_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ops:
        def _reorder_linear_weight(self, weight: torch.Tensor, rows: int) -> torch.Tensor:
            return weight

        def _linear_pointwise(self, x: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
            return F.linear(x, weight)  # forgets the bias

    operators.why_not.cache_clear()
    monkeypatch.setattr(operators, "_ops", Ops)
    try:
        linear, convolution = (operators.why_not(name, torch.float32) for name in ("linear", "convolution"))
        assert "linear differs from stock PyTorch" in str(linear)
        assert "has no attribute '_reorder_convolution_weight'" in str(convolution)
        assert operators.why_no_engine(torch.float32) == linear
    finally:
        operators.why_not.cache_clear()


@pytest.mark.parametrize(
    ("set_by_user", "bound", "threads"),
    [
        ({}, True, None),
        long({"OMP_NUM_THREADS": "1"}, True, 1),
        long({"OMP_PLACES": "{0}"}, False, None),
        long({"KMP_AFFINITY": "granularity=fine,compact,1,0"}, True, None),  # accelerate launch sets it for everybody
    ],
)
def test_ranks_get_cores_of_their_own(set_by_user: dict[str, str], bound: bool, threads: int | None) -> None:
    """In real processes, as the binding lasts."""
    code = """if True:
        import json, os, torch
        from icom.engine.threads import use_own_cores
        from icom.parallel.place import find_place
        before = os.sched_getaffinity(0)
        use_own_cores(find_place(os.environ))
        print(json.dumps([sorted(before), sorted(os.sched_getaffinity(0)), torch.get_num_threads()]))
    """
    told = []
    for rank in (0, 1):
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "KMP_"))}
        environment |= {"PMI_RANK": str(rank), "PMI_SIZE": "2", "MPI_LOCALRANKID": str(rank), "MPI_LOCALNRANKS": "2"}
        environment |= set_by_user
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True, text=True)
        told.append(json.loads(done.stdout))
    (all_of_them, first, threads_of_first), (_, second, _) = told
    if bound and len(all_of_them) > 1:
        assert not set(first) & set(second)
        assert set(first) | set(second) <= set(all_of_them)
    elif not bound:
        assert first == second == all_of_them
    assert threads_of_first == (threads or max(1, len(all_of_them) // 2))


@pytest.mark.parametrize(
    ("engine", "precision", "packed"),
    [("on", "bf16", True), ("off", "bf16", False), ("auto", "no", False), ("auto", "bf16", EMULATED)],
)
def test_engine_option(engine: str, precision: str, packed: bool, tmp_path: Path) -> None:
    """`auto` leaves the small bundled model alone, and says so, unless its stock layers would emulate bf16."""
    backend = CpuBackend(precision, engine, tmp_path)
    model = loading.load(loading.find("bundled"), backend.dtype)
    backend.prepare(model)
    assert any(isinstance(module, PackedLinear) for module in model.unet.modules()) == packed
    assert ("stock layers" in backend.describe()) != packed


def test_run_keeps_to_its_choices_when_it_resumes(
    tmp_path: Path, train: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fastest way changes while a run is stopped; what it computes does not."""
    monkeypatch.setattr(choices, "BLOCKS_FROM", 1)

    def prefer(favourite: str) -> None:
        monkeypatch.setattr(
            choices, "_measure", lambda _, ways: {way: float(not way.startswith(favourite)) for way in ways}
        )

    def rows(folder: str) -> bytes:
        return (tmp_path / folder / "learned_embeds.safetensors").read_bytes()

    options = {"engine": "on", "mixed_precision": "bf16", "checkpointing_steps": 3, "num_comparison_images": 0}
    for folder, favourite in (("whole", "whole"), ("blocks", "blocks")):
        prefer(favourite)
        cache = tmp_path / f"cache of {folder}"
        assert train(output_dir=tmp_path / folder, max_train_steps=6, cache_dir=cache, **options).code == 0
    assert rows("whole") != rows("blocks")
    (tmp_path / "resumed").mkdir()
    shutil.copytree(tmp_path / "whole" / "checkpoint-3", tmp_path / "resumed" / "checkpoint-3")
    options |= {"resume_from_checkpoint": "latest", "cache_dir": tmp_path / "cache of blocks"}
    assert train(output_dir=tmp_path / "resumed", max_train_steps=6, **options).code == 0
    assert rows("resumed") == rows("whole")


@pytest.mark.long
def test_same_loss_curve_with_and_without(tmp_path: Path, train: Callable[..., Result]) -> None:
    for engine in ("on", "off"):
        assert train(output_dir=tmp_path / engine, engine=engine, max_train_steps=20).code == 0
    ours, stock = ([row["loss"] for row in read_metrics(tmp_path / e / "metrics.jsonl")] for e in ("on", "off"))
    assert ours == pytest.approx(stock, rel=1e-5)


def test_what_is_trained_is_left_alone() -> None:
    """A layer that requires gradients stays, with the way to it; everything frozen around it is replaced."""
    torch.manual_seed(0)
    unet = UNET.build(ARCHITECTURES["tiny"]).requires_grad_(False).eval()
    trained = unet.down_blocks[0].attentions[0].transformer_blocks[0].attn2.to_q
    trained.weight.requires_grad_(True)
    x, time, text = torch.randn(1, 4, 8, 8), torch.tensor([500]), torch.randn(1, 77, 128)
    unet(x, time, text).sample.square().sum().backward()
    expected = trained.weight.grad
    trained.weight.grad = None
    assert rewrite(unet, attention.stock)
    assert unet.down_blocks[0].attentions[0].transformer_blocks[0].attn2.to_q is trained
    unet(x, time, text).sample.square().sum().backward()
    torch.testing.assert_close(trained.weight.grad, expected, rtol=1e-3, atol=1e-4)


def test_trained_layers_in_emulated_bf16_are_nearer_to_the_truth_than_autocast() -> None:
    """Results and all gradients of a UNet, against float64's; activations stay in bfloat16, gradients in float32."""
    torch.manual_seed(0)
    (unet,) = loading.load_parts(loading.find("bundled"), torch.float32, (UNET,)).values()
    unet.requires_grad_(True)
    x, states = torch.randn(2, 4, 8, 8), torch.randn(2, 77, 128)
    weight = torch.randn(2, 4, 8, 8)

    def step(network: Any, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        network.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            result = network(x.to(dtype), torch.tensor([3, 700]), states.to(dtype)).sample
        (result.double() * weight).sum().backward()
        return {"result": result.detach(), **{name: p.grad.clone() for name, p in network.named_parameters()}}

    exact, stock = step(copy.deepcopy(unet).double(), torch.float64), step(unet)
    before = [name for name, _ in unet.named_parameters()]
    layers = [module for module in unet.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    assert multiply_in_float32(unet) == len(layers) > 50
    seen: set[torch.dtype] = set()
    hooks = [layer.register_forward_hook(lambda _, __, result: seen.add(result.dtype)) for layer in layers]
    ours = step(unet)
    assert seen == {torch.bfloat16}
    for hook in hooks:
        hook.remove()
    assert [name for name, _ in unet.named_parameters()] == before
    errors = [(distance(ours[name], exact[name]), distance(stock[name], exact[name])) for name in exact]
    assert all(ours[name].dtype == torch.float32 for name in before)
    assert max(mine for mine, _ in errors) < 0.1
    assert sum(mine for mine, _ in errors) < sum(theirs for _, theirs in errors)
    unet.enable_gradient_checkpointing()
    unet.train()
    again = step(unet)
    assert all(torch.equal(again[name], ours[name]) for name in ours)
    with torch.no_grad():  # where autocast is off nothing changes
        plain = unet(x, 3, states).sample
        for layer in (m for m in unet.modules() if isinstance(m, nn.Linear | nn.Conv2d)):
            layer.__class__ = nn.Linear if isinstance(layer, nn.Linear) else nn.Conv2d
        assert torch.equal(plain, unet(x, 3, states).sample)

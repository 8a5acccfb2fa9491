"""The engine's fast paths against stock PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import Result

from icom import models
from icom.architectures import ARCHITECTURES
from icom.backends.cpu import CpuBackend
from icom.engine import attention
from icom.engine.attention import BlockedAttention, BlockedProcessor, use_blocks
from icom.report import read_metrics


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(("n", "m"), [(1100, 1100), (1024, 77), (5, 2100)])
def test_blocked_attention_is_attention(dtype: torch.dtype, tolerance: float, n: int, m: int) -> None:
    """Result and all gradients, against PyTorch's in float64; error relative to the norm. Blocks need not divide n."""
    torch.manual_seed(0)
    shapes = ((2, 3, n, 40), (2, 3, m, 40), (2, 3, m, 40))
    exact = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    rounded = [t.detach().to(dtype).requires_grad_() for t in exact]
    weight = torch.randn(2, 3, n, 40, dtype=torch.float64)
    expected = F.scaled_dot_product_attention(*exact)
    (expected * weight).sum().backward()
    actual = BlockedAttention.apply(*rounded)
    (actual * weight.to(dtype)).sum().backward()
    pairs = [(actual, expected), *((a.grad, e.grad) for a, e in zip(rounded, exact, strict=True))]
    for ours, theirs in pairs:
        assert ours.dtype == dtype
        assert (ours.double() - theirs).norm() <= tolerance * theirs.norm()


def test_gradient_is_the_derivative() -> None:
    inputs = [torch.randn(1, 2, 6, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradcheck(lambda *qkv: BlockedAttention.apply(*qkv).double(), inputs, atol=1e-4)


def test_unet_with_blocks_predicts_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every attention layer goes through blocks here, also the short ones."""
    monkeypatch.setattr(attention, "LONG", 1)
    monkeypatch.setattr(attention, "BLOCK_ROWS", 5)
    unet = models.load(models.find("bundled"), torch.float32).unet
    torch.manual_seed(0)
    inputs = (torch.randn(2, 4, 8, 8), torch.tensor([3, 500]))
    text = torch.randn(2, 77, 128, requires_grad=True)
    results = []
    for blocked in (False, True):
        if blocked:
            assert use_blocks(unet) == 14  # seven transformer blocks with two attentions each
        text.grad = None
        prediction = unet(*inputs, text).sample
        prediction.square().sum().backward()
        assert text.grad is not None
        results.append((prediction.detach(), text.grad.clone()))
    for stock, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ["sd15", "sd2-base"])
def test_all_attention_of_the_real_architectures_is_plain(architecture: str) -> None:
    from icom.architectures import build_unet

    with torch.device("meta"):
        unet = build_unet(architecture)
    assert use_blocks(unet) == 32
    assert ARCHITECTURES[architecture].resolution == 512


def test_off_leaves_stock_layers() -> None:
    for engine, blocked in (("off", False), ("auto", True)):
        model = models.load(models.find("bundled"), torch.float32)
        CpuBackend("no", engine).prepare(model)
        processors = model.unet.attn_processors.values()
        assert all(isinstance(processor, BlockedProcessor) == blocked for processor in processors)


def test_same_loss_curve_with_and_without(
    tmp_path: Path, train: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "LONG", 1)
    for engine in ("auto", "off"):
        assert train(output_dir=tmp_path / engine, engine=engine, max_train_steps=20).code == 0
    ours, stock = ([row["loss"] for row in read_metrics(tmp_path / e / "metrics.jsonl")] for e in ("auto", "off"))
    assert ours == pytest.approx(stock, rel=1e-5)

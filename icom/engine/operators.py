"""PyTorch's private operators: oneDNN with weights packed once and with what follows a product, and flash attention.

PyTorch keeps them for its compiler and for its own functions, so they may change with any release. `why_not` proves
each on a small case in the dtype asked for; where it gives a reason, the engine does without.

Products are computed in `precision.product_dtype` and come back in the dtype of the input. Where that converts weights,
they are not packed but kept as they are and converted for each product: half the memory of packed float32 in one
direction, a quarter in two, for a few percent of a product's time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from icom.engine.precision import product_dtype

FEATURES = ("linear", "convolution", "epilogues", "flash")
"""What can be asked of `why_not`."""


def pack_linear(weight: torch.Tensor, rows: int) -> torch.Tensor:
    """Weights in the layout that oneDNN prefers for `rows` rows of input; any number of rows computes right.

    Weights that each product converts are returned as they are.

    Args:
        weight: (out, in).
        rows: of the input that is to come.
    """
    if _converted(weight):
        return weight
    return _ops()._reorder_linear_weight(weight.contiguous(), rows)  # type: ignore[no-any-return]


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str = "none"
) -> torch.Tensor:
    """activation(x weight^T + bias), accumulated and activated in float32: (…, in) to (…, out).

    Args:
        x: (…, in).
        weight: (out, in), plain or packed.
        bias: (out,).
        activation: `none` or `sigmoid`.
    """
    dtype = product_dtype(weight.dtype)
    result: torch.Tensor = _ops()._linear_pointwise(x.to(dtype), weight.to(dtype), _to(bias, dtype), activation, [], "")
    return result.to(x.dtype)


def linear_with(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, other: torch.Tensor, operation: str
) -> torch.Tensor:
    """(x weight^T + bias) `add` or `mul` other, rounded once. `other` is shaped like the result."""
    dtype = product_dtype(weight.dtype)
    binary = _ops()._linear_pointwise.binary
    result: torch.Tensor = binary(x.to(dtype), other.to(dtype), weight.to(dtype), _to(bias, dtype), operation)
    return result.to(x.dtype)


def pack_convolution(weight: torch.Tensor, padding: list[int], stride: list[int], shape: list[int]) -> torch.Tensor:
    """Like `pack_linear`, for a convolution of an input of `shape`, without dilation and groups."""
    if _converted(weight):
        return weight
    return _ops()._reorder_convolution_weight(weight, padding, stride, [1, 1], 1, shape)  # type: ignore[no-any-return]


def convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    padding: list[int],
    stride: list[int],
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolution of channels-last (batch, in, height, width), weight plain or packed; plus residual, if any."""
    dtype = product_dtype(weight.dtype)
    result: torch.Tensor
    if residual is None:
        result = _ops()._convolution_pointwise(
            x.to(dtype), weight.to(dtype), _to(bias, dtype), padding, stride, [1, 1], 1, "none", [], ""
        )
    else:
        result = _ops()._convolution_pointwise.binary(
            *(x.to(dtype), residual.to(dtype), weight.to(dtype), _to(bias, dtype)),
            *(padding, stride, [1, 1], 1, "add", 1.0, None, [], None),
        )
    return result.to(x.dtype)


def flash_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(q k^T / sqrt(d)) v, with what scaled_dot_product_attention hides.

    Args:
        q, k, v: (batch, heads, tokens, d).

    Returns:
        (like q; float32 (batch, heads, tokens): the logarithm of each row's sum of exponentials).
    """
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)  # type: ignore[no-any-return]


@functools.cache
def why_not(feature: str, dtype: torch.dtype) -> str | None:
    """Why one of FEATURES cannot be used with this PyTorch on this machine; None if it can.

    Computes a small case with it and with stock PyTorch in float32.
    """
    if not torch.backends.mkldnn.is_available():
        return "this PyTorch is built without oneDNN"
    checks: dict[str, Callable[[torch.dtype], None]] = {
        "linear": _check_linear,
        "convolution": _check_convolution,
        "epilogues": _check_epilogues,
        "flash": _check_flash,
    }
    try:
        checks[feature](dtype)
    except (AttributeError, RuntimeError, TypeError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
    return None


def why_no_engine(dtype: torch.dtype) -> str | None:
    """Why layers cannot be packed in that dtype; None if they can. Attention has ways that need nothing private."""
    problems = [why_not(feature, dtype) for feature in ("linear", "convolution")]
    return next((problem for problem in problems if problem), None)


def _converted(weight: torch.Tensor) -> bool:
    """Whether products with these weights are computed in another dtype than theirs."""
    return product_dtype(weight.dtype) != weight.dtype


def _to(bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if bias is None else bias.to(dtype)


def _ops() -> Any:
    return torch.ops.mkldnn


def _check_linear(dtype: torch.dtype) -> None:
    x, weight, bias, other = _random(dtype, (3, 5, 24), (40, 24), (40,), (3, 5, 40))
    exact = F.linear(x.float(), weight.float(), bias.float())
    packed = pack_linear(weight, 15)
    _compare("linear", linear(x, packed, bias), exact, dtype)
    _compare("linear on other rows", linear(x[:1], packed, bias), exact[:1], dtype)
    _compare("linear with add", linear_with(x, packed, bias, other, "add"), exact + other.float(), dtype)


def _check_convolution(dtype: torch.dtype) -> None:
    x, weight, bias, other = _random(dtype, (1, 24, 6, 6), (32, 24, 3, 3), (32,), (1, 32, 6, 6))
    x, weight, other = (t.to(memory_format=torch.channels_last) for t in (x, weight, other))
    packed = pack_convolution(weight, [1, 1], [1, 1], list(x.shape))
    exact = F.conv2d(x.float(), weight.float(), bias.float(), padding=1)
    _compare("convolution", convolution(x, packed, bias, [1, 1], [1, 1]), exact, dtype)
    _compare("convolution with add", convolution(x, packed, bias, [1, 1], [1, 1], other), exact + other.float(), dtype)


def _check_epilogues(dtype: torch.dtype) -> None:
    x, weight, other = _random(dtype, (32, 18), (64, 18), (32, 64))
    packed = pack_linear(weight, 32)
    product = x.float() @ weight.float().t()
    _compare("sigmoid", linear(x, packed, None, "sigmoid"), torch.sigmoid(product), dtype)
    _compare("linear with mul", linear_with(x, packed, None, other, "mul"), product * other.float(), dtype)


def _check_flash(dtype: torch.dtype) -> None:
    q, k, v = _random(dtype, (1, 2, 40, 8), (1, 2, 50, 8), (1, 2, 50, 8))
    scores = q.float() @ k.float().transpose(-1, -2) * 8**-0.5
    result, log_sum = flash_attention(q, k, v)
    _compare("flash attention", result, torch.softmax(scores, -1) @ v.float(), dtype)
    _compare("its sums", log_sum, scores.logsumexp(-1), dtype)


def _random(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def _compare(what: str, ours: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    """Raises: RuntimeError unless equal up to that dtype's rounding, relative to the norm."""
    error = float((ours.float() - exact).norm() / exact.norm())
    if ours.shape != exact.shape or not error <= 4 * torch.finfo(dtype).eps:
        raise RuntimeError(f"{what} differs from stock PyTorch by {error:.1e}")

"""Attention for frozen networks on the CPU: several ways to the same numbers, of which `choices` takes the fastest.

Tensors are (batch, tokens, heads, head size), as the projections leave them.

`blocks` lets oneDNN do all the work on a block of one head's query rows against all keys: the exponential is the
epilogue of the score product, the softmax's backward pass that of another. With scores S and any upper bound c of a
row, sigmoid(S - c) is exp(S - c) up to a factor 1 + exp(S - c), so with c at least 8 above the row's largest score
the error is below exp(-8), a tenth of bfloat16's rounding. The shift is one more column of the product; what
normalises a row, and in the backward pass corrects it (Dao et al. 2022, appendix B), is folded into small matrices.
Scores are never rounded: they stay in oneDNN's float32 accumulators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from icom.engine import operators
from icom.engine.precision import product_dtype

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_MARGIN = {torch.bfloat16: 8.0, torch.float32: 16.0}
"""How far above a row's scores the bound lies: exp(-margin) is the largest relative error of an exponential."""
_TINY = 1e-30
"""Row sums below this have lost digits: the bound was too far above the scores."""


def _in_product_dtype(attend: Attention) -> Attention:
    """Attention computed in the dtype that is fast here, and given back in that of q."""

    @functools.wraps(attend)
    def cast(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        dtype = product_dtype(q.dtype)
        return attend(q.to(dtype), k.to(dtype), v.to(dtype)).to(q.dtype)

    return cast


@_in_product_dtype
def stock(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """PyTorch's scaled_dot_product_attention."""
    queries, keys, values = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(queries, keys, values).transpose(1, 2)


@_in_product_dtype
def whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """All heads' probabilities at once, kept for the backward pass: for few keys or queries."""
    queries, keys, values = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    scores = torch.bmm(queries * q.shape[-1] ** -0.5, keys.transpose(1, 2))
    result: torch.Tensor = torch.bmm(torch.softmax(scores, -1), values)
    by_head: torch.Tensor = result.unflatten(0, (q.shape[0], q.shape[2]))
    return by_head.transpose(1, 2)


def blocks(rows: int, *, keep: bool = False, stock_forward: bool = False) -> Attention:
    """Attention in blocks of query rows; see the module.

    Args:
        rows: height of a block.
        keep: keep the exponentials (batch x heads x queries x keys values) for the backward pass, instead of
            computing the same bits again.
        stock_forward: leave the forward pass to PyTorch's kernel.
    """

    @_in_product_dtype
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Blocks.apply(q, k, v, rows, keep, stock_forward)  # type: ignore[no-untyped-call]
        return result

    return attend


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: int, keep: bool, stock_forward: bool
    ) -> torch.Tensor:
        """(batch, n, heads, d), twice (batch, m, heads, d) to (batch, n, heads, d); bfloat16 or float32."""
        batch, _, heads, d = q.shape
        queries = _with_columns(q, 2)
        queries[..., :d] *= d**-0.5
        keys, values = _with_columns(k, 2, fill=1), _with_columns(v, 2, fill=1)
        kept: list[torch.Tensor] = []
        if stock_forward:
            result, log_sums = operators.flash_attention(*(t.transpose(1, 2) for t in (q, k, v)))
            result, log_sum = result.transpose(1, 2), log_sums.flatten(0, 1)
            shift = _above(log_sum, q.dtype)
            queries[..., d] = -shift
            scale = (shift.float() - log_sum).exp()
        else:
            queries[..., d] = -_upper_bound(queries[..., :d], keys[..., :d])
            sums = _sums(queries, keys, values, rows, kept if keep else None)
            low = sums[..., d] < _TINY
            if bool(low.any()):
                # Rare: keys far apart make the bound too high. The largest score itself is a bound, at a price.
                kept.clear()
                queries[..., d] = -_largest_score(queries[..., :d], keys[..., :d])
                sums = _sums(queries, keys, values, rows, kept if keep else None)
            scale = sums[..., d].float().reciprocal()
            result = (sums[..., :d] * scale[..., None]).to(q.dtype)
            result = result.unflatten(0, (batch, heads)).transpose(1, 2).contiguous()
        ctx.save_for_backward(queries, keys, values, scale, result)
        ctx.kept, ctx.rows = kept, rows
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of q, k and v; sums over blocks are kept in float32."""
        queries, keys, values, scale, result = ctx.saved_tensors
        rows, kept = ctx.rows, ctx.kept
        batch, n, heads, d = result.shape
        gradient = gradients[0]
        correction = (gradient.float() * result.float()).sum(-1).transpose(1, 2).flatten(0, 1) * -scale
        weighted = _with_columns(gradient, 2)
        weighted[..., :d] *= scale[..., None]
        # In two columns, so that the difference that follows is as exact as float32's nearly is.
        weighted[..., d] = correction
        weighted[..., d + 1] = correction - weighted[..., d].float()
        weighted_t, queries_t = (t.transpose(1, 2).contiguous() for t in (weighted, queries))
        d_queries = torch.empty_like(queries)
        d_keys, d_values = (torch.zeros(t.shape[0], d + 2, t.shape[1]) for t in (keys, values))
        for head in range(batch * heads):
            for start in range(0, n, rows):
                block = slice(start, start + rows)
                if kept:
                    exponentials = kept.pop(0)
                else:
                    exponentials = operators.linear(queries[head, block], keys[head], None, "sigmoid")
                d_values[head] += weighted_t[head, :, block] @ exponentials
                d_scores = operators.linear_with(weighted[head, block], values[head], None, exponentials, "mul")
                del exponentials  # so that the next block's lie in the same, cached, memory
                torch.mm(d_scores, keys[head], out=d_queries[head, block])
                d_keys[head] += queries_t[head, :, block] @ d_scores
                del d_scores
        by_token = [t.transpose(1, 2)[..., :d].to(queries.dtype) for t in (d_keys, d_values)]
        split = [t.unflatten(0, (batch, heads)).transpose(1, 2) for t in (d_queries[..., :d] * d**-0.5, *by_token)]
        return (*split, None, None, None)


def _with_columns(t: torch.Tensor, columns: int, fill: float = 0) -> torch.Tensor:
    """(batch, tokens, heads, d) to contiguous (batch x heads, tokens, d + columns)."""
    batch, tokens, heads, d = t.shape
    wide = t.new_empty(batch, heads, tokens, d + columns)
    wide[..., :d] = t.transpose(1, 2)
    wide[..., d:] = fill
    return wide.view(batch * heads, tokens, d + columns)


def _upper_bound(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The margin above each row's largest score, or more, by Cauchy and Schwarz around the mean key: (heads, n)."""
    exact_queries, exact_keys = queries.float(), keys.float()
    mean = exact_keys.mean(1, keepdim=True)
    radius = (exact_keys - mean).norm(dim=-1).amax(1, keepdim=True)
    bound = (exact_queries * mean).sum(-1) + exact_queries.norm(dim=-1) * radius
    return _above(bound, queries.dtype)


def _largest_score(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The margin above each row's largest score, one head at a time: (heads, n)."""
    largest = [(q.float() @ k.float().t()).amax(-1) for q, k in zip(queries, keys, strict=True)]
    return _above(torch.stack(largest), queries.dtype)


def _above(bound: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bound and its margin, rounded to that dtype so that no less remains."""
    bound = bound + _MARGIN[dtype]
    return (bound + bound.abs() * torch.finfo(dtype).eps).to(dtype)


def _sums(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: int, kept: list[torch.Tensor] | None
) -> torch.Tensor:
    """Exponentials times values, and in the last columns their own sums: (heads, n, d + 2)."""
    sums = torch.empty_like(queries)
    for head in range(len(queries)):
        for start in range(0, queries.shape[1], rows):
            block = slice(start, start + rows)
            exponentials = operators.linear(queries[head, block], keys[head], None, "sigmoid")
            torch.mm(exponentials, values[head], out=sums[head, block])
            if kept is not None:
                kept.append(exponentials)
            del exponentials  # so that the next block's lie in the same, cached, memory
    return sums

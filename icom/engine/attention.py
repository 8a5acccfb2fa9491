"""Attention in blocks of query rows, for the long self-attention of a UNet on the CPU.

PyTorch's flash kernel for CPUs multiplies small tiles; one head's block of rows against all keys is one large matrix
product for oneDNN, which runs at more than twice the rate. Memory stays linear in the sequence: the probabilities of
a block are dropped, and computed again in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

BLOCK_ROWS = 1024
"""Query rows per block: 1024 x 4096 probabilities in bf16 are 8 MB, which stay in the L3 cache between the products."""
LONG = 2**20
"""Query length x key length from which blocks are faster than PyTorch's kernel (1024 x 1024)."""


class BlockedAttention(torch.autograd.Function):
    """softmax(q k^T / sqrt(d)) v, a block of one head's query rows at a time (see Dao et al. 2022, appendix B)."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q (batch, heads, n, d), k and v (batch, heads, m, d) to (batch, heads, n, d); any float dtype."""
        batch, heads, n, d = q.shape
        queries = (q * d**-0.5).reshape(batch * heads, n, d)
        keys, values = (t.reshape(batch * heads, -1, d) for t in (k, v))
        result = torch.empty_like(queries)
        for head in range(batch * heads):
            keys_t = keys[head].t().contiguous()
            for rows in _blocks(n):
                probabilities = torch.softmax(queries[head, rows] @ keys_t, -1)
                torch.mm(probabilities, values[head], out=result[head, rows])
        ctx.save_for_backward(queries, keys, values, result)
        return result.view(batch, heads, n, d)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of q, k and v; sums over blocks are kept in float32."""
        queries, keys, values, result = ctx.saved_tensors
        (gradient,) = gradients
        batch, heads, n, d = gradient.shape
        gradient = gradient.reshape(batch * heads, n, d)
        correction = (gradient.float() * result.float()).sum(-1, keepdim=True).to(gradient.dtype)
        d_queries, d_keys, d_values = (torch.empty_like(t) for t in (queries, keys, values))
        for head in range(batch * heads):
            keys_t, values_t = keys[head].t().contiguous(), values[head].t().contiguous()
            keys_sum, values_sum = (torch.zeros(keys.shape[1:], dtype=torch.float32) for _ in range(2))
            for rows in _blocks(n):
                probabilities = torch.softmax(queries[head, rows] @ keys_t, -1)
                values_sum += probabilities.t() @ gradient[head, rows]
                d_scores = (gradient[head, rows] @ values_t).sub_(correction[head, rows]).mul_(probabilities)
                torch.mm(d_scores, keys[head], out=d_queries[head, rows])
                keys_sum += d_scores.t() @ queries[head, rows]
            d_keys[head], d_values[head] = keys_sum, values_sum
        d_queries *= d**-0.5
        return tuple(t.view(batch, heads, -1, d) for t in (d_queries, d_keys, d_values))  # type: ignore[return-value]


class BlockedProcessor:
    """Attention processor for diffusers' `Attention`: blocks where the sequence is long, PyTorch's kernel elsewhere."""

    def __call__(
        self,
        attention: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        temb: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(batch, n, width) to the same shape; attends to itself, or to encoder_hidden_states (batch, m, width)."""
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        q, k, v = (
            project(source).unflatten(-1, (attention.heads, -1)).transpose(1, 2)
            for project, source in (
                (attention.to_q, hidden_states),
                (attention.to_k, context),
                (attention.to_v, context),
            )
        )
        if attention_mask is None and q.shape[2] * k.shape[2] >= LONG:
            result = BlockedAttention.apply(q, k, v)  # type: ignore[no-untyped-call]
        else:
            result = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask)
        projected: torch.Tensor = attention.to_out[0](result.transpose(1, 2).flatten(2))
        return projected


def use_blocks(unet: torch.nn.Module) -> int:
    """Let the UNet's plain attention layers use blocks; layers with norms or residuals of their own are left alone.

    Returns:
        How many layers do now.
    """
    from diffusers.models.attention_processor import Attention

    changed = 0
    for module in unet.modules():
        if isinstance(module, Attention) and _is_plain(module):
            module.set_processor(BlockedProcessor())
            changed += 1
    return changed


def _is_plain(attention: Any) -> bool:
    norms = (attention.group_norm, attention.spatial_norm, attention.norm_cross, attention.norm_q)
    return (
        all(norm is None for norm in norms)
        and not attention.residual_connection
        and attention.rescale_output_factor == 1
        and attention.to_out[1].p == 0
    )


def _blocks(length: int) -> list[slice]:
    return [slice(start, start + BLOCK_ROWS) for start in range(0, length, BLOCK_ROWS)]

"""The blocks of Stable Diffusion's UNet and VAE, rewritten for frozen weights.

The same arithmetic as diffusers' modules with fewer passes over memory: sums go into the epilogue of the product
before them, queries, keys and values come from one product, tokens and channels-last pictures are views of each
other, and what diffusers divides by 1 or copies to be contiguous is left as it is.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from icom.engine.attention import Attention
from icom.engine.layers import PackedConv2d, PackedLinear, Projections, can_pack, pack


def rewrite(network: nn.Module, attend: Attention) -> int:
    """Replace what is known to be fast: blocks that look like Stable Diffusion's, and all other packable layers.

    Args:
        network: UNet, VAE or text encoder; what of it is frozen is changed.
        attend: computes attention.

    Returns:
        How many modules were replaced.
    """
    replaced = 0
    for name, child in network.named_children():
        ours: nn.Module | None = None
        if any(parameter.requires_grad for parameter in child.parameters()):
            pass  # what is trained stays as it is, and only what is frozen inside it is replaced
        elif _is_residual_block(child):
            ours = ResidualBlock(child)
        elif _is_transformer(child):
            ours = Transformer(child, attend)
        elif can_pack(child):
            ours = pack(child)
        if ours is None:
            replaced += rewrite(child, attend)
        else:
            setattr(network, name, ours)
            replaced += 1
    return replaced


class AttentionProcessor:
    """Attention processor for diffusers' own `Attention`, for a network whose layers stay as they are."""

    def __init__(self, attend: Attention) -> None:
        self.attend = attend

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
        sources = ((attention.to_q, hidden_states), (attention.to_k, context), (attention.to_v, context))
        q, k, v = (project(source).unflatten(-1, (attention.heads, -1)) for project, source in sources)
        result: torch.Tensor = attention.to_out[0](self.attend(q, k, v).flatten(2))
        return result


def replace_attention(unet: nn.Module, attend: Attention) -> int:
    """Let the UNet's attention be computed by `attend`, and change nothing else.

    Returns:
        How many layers do now; layers with norms or residuals of their own are left alone.
    """
    from diffusers.models.attention_processor import Attention as Layer

    layers = [module for module in unet.modules() if isinstance(module, Layer) and _is_plain_attention(module)]
    for layer in layers:
        layer.set_processor(AttentionProcessor(attend))
    return len(layers)


class ResidualBlock(nn.Module):
    """diffusers' ResnetBlock2D without resampling."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.norm1, self.norm2 = NormAndSilu(block.norm1), NormAndSilu(block.norm2)
        self.conv1, self.conv2 = PackedConv2d(block.conv1), PackedConv2d(block.conv2)
        self.time_emb_proj = None if block.time_emb_proj is None else pack(block.time_emb_proj)
        self.conv_shortcut = None if block.conv_shortcut is None else pack(block.conv_shortcut)

    def forward(self, input_tensor: torch.Tensor, temb: torch.Tensor | None = None) -> torch.Tensor:
        """(batch, in, height, width), (batch, time width) to (batch, out, height, width), channels last."""
        shift = None if temb is None or self.time_emb_proj is None else self.time_emb_proj(F.silu(temb))
        hidden = self.norm1(input_tensor)
        if shift is None or len(shift) == 1:
            hidden = self.conv1(hidden, shift=shift)
        else:
            hidden = self.conv1(hidden) + shift[:, :, None, None]
        residual = input_tensor if self.conv_shortcut is None else self.conv_shortcut(input_tensor)
        result: torch.Tensor = self.conv2(self.norm2(hidden), residual=residual)
        return result


class NormAndSilu(nn.Module):
    """GroupNorm and then SiLU."""

    def __init__(self, norm: nn.GroupNorm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any (batch, channels, …)."""
        return F.silu(self.norm(x), inplace=not x.requires_grad)


class Transformer(nn.Module):
    """diffusers' Transformer2DModel on pictures. Its tokens are a view of the channels-last picture."""

    def __init__(self, transformer: Any, attend: Attention) -> None:
        super().__init__()
        self.norm = transformer.norm
        self.proj_in, self.proj_out = (_by_token(layer) for layer in (transformer.proj_in, transformer.proj_out))
        self.blocks = nn.ModuleList(TransformerBlock(block, attend) for block in transformer.transformer_blocks)
        # Where diffusers' enable_gradient_checkpointing has put its switch.
        self.checkpoint = transformer._gradient_checkpointing_func if transformer.gradient_checkpointing else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        return_dict: bool = True,
        **unused: Any,
    ) -> Any:
        """(batch, channels, height, width), text (batch, m, width) to the same shape, as diffusers returns it.

        Raises:
            NotImplementedError: a mask or another option that textual inversion has no use for.
        """
        if any(value is not None for name, value in unused.items() if name != "timestep"):
            given = [name for name, value in unused.items() if value is not None]
            raise NotImplementedError(f"The engine's attention takes no {', '.join(given)}; use --engine off.")
        batch, channels, height, width = hidden_states.shape
        residual = hidden_states.permute(0, 2, 3, 1).reshape(batch, height * width, channels)
        tokens = self.norm(hidden_states).permute(0, 2, 3, 1).reshape(batch, height * width, channels)
        tokens = self.proj_in(tokens)
        for block in self.blocks:
            if self.checkpoint is not None and torch.is_grad_enabled():
                tokens = self.checkpoint(block, tokens, encoder_hidden_states)
            else:
                tokens = block(tokens, encoder_hidden_states)
        tokens = self.proj_out(tokens, residual)
        result = tokens.view(batch, height, width, channels).permute(0, 3, 1, 2)
        return SimpleNamespace(sample=result) if return_dict else (result,)


class TransformerBlock(nn.Module):
    """diffusers' BasicTransformerBlock: self-attention, attention to the text, feed-forward, each with a residual."""

    def __init__(self, block: Any, attend: Attention) -> None:
        super().__init__()
        self.attend = attend
        self.heads = (block.attn1.heads, block.attn2.heads)
        self.norm1, self.norm2, self.norm3 = block.norm1, block.norm2, block.norm3
        self.to_qkv = Projections([block.attn1.to_q, block.attn1.to_k, block.attn1.to_v])
        self.to_out1 = pack(block.attn1.to_out[0])
        self.to_q = pack(block.attn2.to_q)
        self.to_kv = Projections([block.attn2.to_k, block.attn2.to_v])
        self.to_out2 = pack(block.attn2.to_out[0])
        self.gated = Gated(block.ff.net[0].proj)
        self.ff_out = pack(block.ff.net[2])

    def forward(self, tokens: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """(batch, n, width), (batch, m, text width) to (batch, n, width)."""
        q, k, v = (t.unflatten(-1, (self.heads[0], -1)) for t in self.to_qkv(self.norm1(tokens)))
        tokens = self.to_out1(self.attend(q, k, v).flatten(2), tokens)
        q, k, v = (t.unflatten(-1, (self.heads[1], -1)) for t in (self.to_q(self.norm2(tokens)), *self.to_kv(text)))
        tokens = self.to_out2(self.attend(q, k, v).flatten(2), tokens)
        result: torch.Tensor = self.ff_out(self.gated(self.norm3(tokens)), tokens)
        return result


class Gated(nn.Module):
    """diffusers' GEGLU as two products, so that both halves are contiguous (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, projection: nn.Linear) -> None:
        super().__init__()
        weights = projection.weight.detach().chunk(2)
        biases = projection.bias.detach().chunk(2)
        self.value, self.gate = (PackedLinear(w.clone(), b.clone()) for w, b in zip(weights, biases, strict=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, in) to (…, out)."""
        return _Gated.apply(x, self.value, self.gate)  # type: ignore[no-any-return, no-untyped-call]


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, value_layer: PackedLinear, gate_layer: PackedLinear) -> torch.Tensor:
        ctx.layers = value_layer, gate_layer
        value, gate = value_layer.run(x), gate_layer.run(x)
        opened = F.gelu(gate)
        ctx.save_for_backward(value, gate, opened)
        return value * opened

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        value_layer, gate_layer = ctx.layers
        value, gate, opened = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        d_x = value_layer.run_backward(gradient * opened)
        d_gate = torch.ops.aten.gelu_backward(gradient * value, gate)
        return gate_layer.run_backward(d_gate, add=d_x), None, None


def _by_token(layer: nn.Module) -> PackedLinear:
    """A linear layer, or a convolution of one pixel, on tokens."""
    assert isinstance(layer, nn.Linear | nn.Conv2d)
    return PackedLinear(layer.weight.detach().flatten(1), layer.bias)


def _is_residual_block(module: nn.Module) -> bool:
    from diffusers.models.resnet import ResnetBlock2D

    return (
        isinstance(module, ResnetBlock2D)
        and module.upsample is None
        and module.downsample is None
        and module.time_embedding_norm == "default"
        and not module.skip_time_act
        and isinstance(module.nonlinearity, nn.SiLU)
        and module.output_scale_factor == 1
        and module.dropout.p == 0
    )


def _is_transformer(module: nn.Module) -> bool:
    from diffusers.models.transformers.transformer_2d import Transformer2DModel

    return (
        isinstance(module, Transformer2DModel)
        and module.is_input_continuous
        and all(_is_transformer_block(block) for block in module.transformer_blocks)
    )


def _is_transformer_block(block: Any) -> bool:
    from diffusers.models.activations import GEGLU

    return (
        block.norm_type == "layer_norm"
        and block.pos_embed is None
        and not block.only_cross_attention
        and block.attn2 is not None
        and block._chunk_size is None
        and isinstance(block.ff.net[0], GEGLU)
        and len(block.ff.net) == 3
        and all(_is_plain_attention(attention) for attention in (block.attn1, block.attn2))
    )


def _is_plain_attention(attention: Any) -> bool:
    norms = (attention.group_norm, attention.spatial_norm, attention.norm_cross, attention.norm_q)
    return (
        all(norm is None for norm in norms)
        and not attention.residual_connection
        and attention.rescale_output_factor == 1
        and attention.to_out[1].p == 0
    )

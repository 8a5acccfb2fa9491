"""Layers that are trained in bfloat16 on a CPU without instructions for it.

Autocast would convert the float32 weight to bfloat16 and let oneDNN take the numbers apart one by one, in the forward
pass and twice in the backward pass. Here activations travel and are kept in bfloat16, as under autocast, and the
products of both passes are float32's, with the weight as it is: nothing of it is converted, and its gradient is not
rounded on the way. See `icom.engine.precision`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def multiply_in_float32(network: nn.Module) -> int:
    """Let the linear layers and convolutions of a network compute their products in float32 wherever autocast is on.

    Names, parameters and hooks of the modules stay.

    Returns:
        How many layers do now.
    """
    layers = [module for module in network.modules() if type(module) is nn.Linear or _is_plain_convolution(module)]
    for layer in layers:
        # Its class, as FSDP2 does it: a function in its place would go on to use this layer's weights in a copy of it.
        layer.__class__ = _Linear if isinstance(layer, nn.Linear) else _Convolution
    return len(layers)


def _is_plain_convolution(module: nn.Module) -> bool:
    return type(module) is nn.Conv2d and module.padding_mode == "zeros" and not isinstance(module.padding, str)


class _Linear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _product(x, self, None) if torch.is_autocast_enabled("cpu") else super().forward(x)


class _Convolution(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        options = (self.stride, self.padding, self.dilation, self.groups)
        return _product(x, self, options) if torch.is_autocast_enabled("cpu") else super().forward(x)


def _product(x: torch.Tensor, layer: nn.Linear | nn.Conv2d, options: tuple[Any, ...] | None) -> torch.Tensor:
    dtype = torch.get_autocast_dtype("cpu")
    with torch.autocast("cpu", enabled=False):
        return _Product.apply(x.to(dtype), layer.weight, layer.bias, options)  # type: ignore[no-any-return, no-untyped-call]


class _Product(torch.autograd.Function):
    """A linear layer, or with options a convolution, of a bfloat16 input; the result is bfloat16."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, options: tuple[Any, ...] | None
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias, ctx.options = None if bias is None else bias.dtype, options
        exact = None if bias is None else bias.float()
        if options is None:
            return F.linear(x.float(), weight.float(), exact).to(x.dtype)
        return F.conv2d(x.float(), weight.float(), exact, *options).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias, _ = ctx.needs_input_grad
        gradient = gradients[0].float()
        if ctx.options is None:
            rows = gradient.flatten(0, -2)
            d_x = gradient @ weight.float() if for_x else None
            d_weight = rows.t() @ x.float().flatten(0, -2) if for_weight else None
            d_bias = rows.sum(0) if for_bias else None
        else:
            stride, padding, dilation, groups = ctx.options
            sizes = [weight.shape[0]] if for_bias else None
            d_x, d_weight, d_bias = torch.ops.aten.convolution_backward(
                gradient,
                x.float(),
                weight.float(),
                sizes,
                list(stride),
                list(padding),
                list(dilation),
                False,
                [0, 0],
                groups,
                [for_x, for_weight, for_bias],
            )
        return (
            None if d_x is None else d_x.to(x.dtype),
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None else d_bias.to(ctx.bias),
            None,
        )

"""Frozen layers: weights packed by oneDNN once for each direction, nothing saved for weights that get no gradient.

The backward pass of a linear layer is a linear layer, and that of a convolution is a convolution with the kernel
flipped and its channels exchanged, over the gradient with zeros between its values where the stride is not 1
(Dumoulin & Visin 2016, "A guide to convolution arithmetic"), so that both directions use the same fast path.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn

from icom.engine import operators


class Packed(nn.Module, ABC):
    """Packs its weight when the first input comes, where that is of use here, and then lets go of the plain one.

    Attributes:
        bias: (out,) or None.
        dtype: of weight and results.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.bias = None if bias is None else bias.detach()
        self.dtype = weight.dtype
        self._plain: torch.Tensor | None = weight.detach()
        self._packed: torch.Tensor | None = None
        self._packed_transposed: torch.Tensor | None = None

    def weight_for(self, x: torch.Tensor) -> torch.Tensor:
        """The packed weight, for an input like `x`."""
        if self._packed is None:
            assert self._plain is not None
            self._packed = self._pack(self._plain, x)
            self._plain = None
        return self._packed

    def transposed_weight_for(self, gradient: torch.Tensor) -> torch.Tensor:
        """The packed weight of the backward pass, for a gradient like this one; the forward pass came before."""
        if self._packed_transposed is None:
            assert self._packed is not None
            self._packed_transposed = self._pack_transposed(self._packed.to_dense(), gradient)
        return self._packed_transposed

    def unpack(self) -> None:
        """Go back to the plain weight, as if no input had come yet: the next one decides how it is packed."""
        if self._packed is not None:
            self._plain = self._packed.to_dense()
            self._packed = self._packed_transposed = None

    @abstractmethod
    def _pack(self, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """For an input like `x`."""

    @abstractmethod
    def _pack_transposed(self, weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """For the backward pass of a gradient like this one."""


class PackedLinear(Packed):
    """A frozen nn.Linear."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """(…, in) to (…, out) in the weight's dtype, plus residual (…, out) without rounding in between."""
        return _Linear.apply(x.to(self.dtype), residual, self)  # type: ignore[no-any-return, no-untyped-call]

    def run(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """`forward` without autograd."""
        weight = self.weight_for(x)
        if residual is None:
            return operators.linear(x, weight, self.bias)
        return operators.linear_with(x, weight, self.bias, residual, "add")

    def run_backward(self, gradient: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """Gradient (…, out) to (…, in), plus `add`."""
        weight = self.transposed_weight_for(gradient)
        if add is None:
            return operators.linear(gradient, weight)
        return operators.linear_with(gradient, weight, None, add, "add")

    def _pack(self, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return operators.pack_linear(weight, x.numel() // x.shape[-1])

    def _pack_transposed(self, weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return self._pack(weight.t(), gradient)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, residual: torch.Tensor | None, layer: PackedLinear) -> torch.Tensor:
        ctx.layer = layer
        return layer.run(x, residual)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient = gradients[0].contiguous()
        d_x = ctx.layer.run_backward(gradient) if ctx.needs_input_grad[0] else None
        return d_x, gradient if ctx.needs_input_grad[1] else None, None


class Projections(nn.Module):
    """Several frozen linear layers of the same input as one: queries, keys and values."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        super().__init__()
        weight = torch.cat([layer.weight.detach() for layer in layers])
        biases: list[torch.Tensor] = [layer.bias for layer in layers if layer.bias is not None]
        assert len(biases) in (0, len(layers))
        self.joined = PackedLinear(weight, torch.cat(biases) if biases else None)
        self.widths = [layer.out_features for layer in layers]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(…, in) to one (…, out) for each layer; views of one tensor."""
        return _Projections.apply(x.to(self.joined.dtype), self)  # type: ignore[no-any-return, no-untyped-call]


class _Projections(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Projections) -> tuple[torch.Tensor, ...]:
        ctx.layer = layer
        results: tuple[torch.Tensor, ...] = layer.joined.run(x).split(layer.widths, -1)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.layer.joined.run_backward(torch.cat(gradients, -1)), None


class PackedConv2d(Packed):
    """A frozen nn.Conv2d without dilation and groups."""

    def __init__(self, convolution: nn.Conv2d) -> None:
        super().__init__(convolution.weight.to(memory_format=torch.channels_last), convolution.bias)
        self.kernel, self.stride = list(convolution.kernel_size), list(convolution.stride)
        assert not isinstance(convolution.padding, str)
        self.padding = list(convolution.padding)
        self.rest = [kernel - 1 - padding for kernel, padding in zip(self.kernel, self.padding, strict=True)]

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, shift: torch.Tensor | None = None
    ) -> torch.Tensor:
        """(batch, in, height, width) to (batch, out, …) in the weight's dtype, channels last.

        Args:
            x: any layout, any dtype: a pipeline's latents are float32.
            residual: added to the result, shaped like it.
            shift: (1, out), added to the bias; gets no gradient.
        """
        return _Convolution.apply(x.to(self.dtype), residual, shift, self)  # type: ignore[no-any-return, no-untyped-call]

    def _pack(self, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return operators.pack_convolution(weight, self.padding, self.stride, list(x.shape))

    def _pack_transposed(self, weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        flipped = weight.flip(2, 3).transpose(0, 1).contiguous(memory_format=torch.channels_last)
        return operators.pack_convolution(flipped, self.rest, [1, 1], list(gradient.shape))


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, residual: torch.Tensor | None, shift: torch.Tensor | None, layer: PackedConv2d
    ) -> torch.Tensor:
        ctx.layer, ctx.shape = layer, x.shape
        x = x.contiguous(memory_format=torch.channels_last)
        if residual is not None:
            residual = residual.contiguous(memory_format=torch.channels_last)
        bias = layer.bias
        if shift is not None:
            bias = shift[0] if bias is None else bias + shift[0]
        weight = layer.weight_for(x)
        return operators.convolution(x, weight, bias, layer.padding, layer.stride, residual)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        layer: PackedConv2d = ctx.layer
        gradient = gradients[0].contiguous(memory_format=torch.channels_last)
        d_x = None
        if ctx.needs_input_grad[0]:
            spread = gradient
            if layer.stride != [1, 1]:
                # As large as the result would be with a stride of 1.
                sizes = zip(ctx.shape[2:], layer.padding, layer.rest, strict=True)
                batch, channels = gradient.shape[:2]
                spread = gradient.new_zeros(batch, channels, *(n + padding - rest for n, padding, rest in sizes))
                spread = spread.to(memory_format=torch.channels_last)
                spread[:, :, :: layer.stride[0], :: layer.stride[1]] = gradient
            weight = layer.transposed_weight_for(spread)
            d_x = operators.convolution(spread, weight, None, layer.rest, [1, 1])
        return d_x, gradient if ctx.needs_input_grad[1] else None, None, None


def can_pack(layer: nn.Module) -> bool:
    """Whether PackedLinear or PackedConv2d can stand for this layer, in both directions."""
    if type(layer) is nn.Linear:
        return True
    if type(layer) is not nn.Conv2d or isinstance(layer.padding, str) or layer.padding_mode != "zeros":
        return False
    less = all(padding < kernel for padding, kernel in zip(layer.padding, layer.kernel_size, strict=True))
    return less and layer.groups == 1 and set(layer.dilation) == {1}


def unpack(network: nn.Module) -> None:
    """Unpack all layers in a network; one after the other, so that it takes no more memory than before."""
    for layer in network.modules():
        if isinstance(layer, Packed):
            layer.unpack()


def pack(layer: nn.Module) -> Packed:
    """The packed layer that stands for one that `can_pack`."""
    if isinstance(layer, nn.Conv2d):
        return PackedConv2d(layer)
    assert isinstance(layer, nn.Linear)
    return PackedLinear(layer.weight, layer.bias)

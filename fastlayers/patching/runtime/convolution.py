"""Convolutions with their bias, a sum and an activation in one kernel.

torch adds the bias of a convolution in a separate kernel, which reads and writes the whole result. The sum and the
activation after it do the same. Here torch convolves without the bias, and one kernel does the rest in place. That
kernel has no backward. Where a gradient is needed, under torch.compile and where the kernel does not apply, torch
computes everything. Under autocast an autograd Function then sums the gradient of the bias in a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from fastlayers import functional
from fastlayers.ops import autocast, convolution, guard, post_ops
from fastlayers.ops.activations import NORM_CODES, activation
from fastlayers.ops.batch_norm import FAMILY
from fastlayers.ops.convolution_norm import convolution_norm
from fastlayers.ops.squeeze_excite import convolution_of_product
from fastlayers.patching.runtime.calls import alike, batch_norm_layer, is_pointwise, join
from fastlayers.patching.runtime.checks import plain
from fastlayers.patching.runtime.traits import fresh

__all__ = [
    "adds_bias",
    "bound_by_memory",
    "convolution_and_more",
    "convolution_and_norm",
    "convolution_batch_norm",
    "convolve",
    "forked_convolution",
    "is_forkable",
    "layer_and_more",
]

TRANSPOSED: dict[int, Callable[..., Tensor]] = {3: F.conv_transpose1d, 4: F.conv_transpose2d, 5: F.conv_transpose3d}


def layer_and_more(
    layer: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    act: str | None = None,
    overwritten: str | None = None,
) -> Tensor:
    """act(layer(x) + residual) for a convolution or linear layer with another weight and bias than its own.

    An in-place sum overwrote the ``overwritten`` operand: "norm", which is the layer's result, or "residual".
    """
    if not adds_bias(layer, x, weight, bias) or guard.wants_gradient(residual):
        fused = (
            None if residual is None and act is None else post_ops.convolution(layer, x, weight, bias, residual, act)
        )
        if fused is not None:
            return fused
        y = convolve(layer, x, weight, bias)
        if residual is not None or act is None:
            return join(y, residual, act, overwritten)
        return torch.relu_(y) if act == "relu" else functional.bias_act(y, None, act)
    assert bias is not None
    kernels = FAMILY.kernels_for(x)
    assert kernels is not None
    y = convolve(layer, x, weight, None)
    bias = bias if bias.dtype is torch.float32 else bias.to(y.dtype)
    if residual is not None and not takes(y, residual):
        kernels.channel_bias_act_(y, bias, None, 0)
        return join(y, residual, act, overwritten)
    entry = activation(act)
    has_code = entry.code < NORM_CODES
    kernels.channel_bias_act_(y, bias, residual, entry.code if has_code else 0)
    return y if has_code else entry.function(y)


@fresh
def convolution_and_more(layer: Any, x: Tensor, act: str | None = None) -> Tensor:
    """act(layer(x)) for a convolution."""
    return layer_and_more(layer, x, layer.weight, layer.bias, act=act)


def bound_by_memory(layer: Any) -> bool:
    """Whether memory traffic bounds a convolution: it is depthwise, or its patches do not overlap."""
    return layer.groups == layer.in_channels > 1 or (layer.stride == layer.kernel_size and max(layer.stride) > 1)


def is_forkable(layer: Any) -> bool:
    """Whether a convolution gains from :func:`forked_convolution`."""
    return is_pointwise(layer) or (plain(layer, nn.Conv2d) and layer.bias is not None and bound_by_memory(layer))


def forked_convolution(layer: nn.Conv2d, x: Any) -> tuple[Tensor, Tensor]:
    """(layer(x), x). The convolution's backward, or the backward of autocast's cast, adds the two gradients."""
    if not isinstance(x, Tensor):
        return layer(x), x
    if layer.bias is not None:
        low, x = autocast.cast_fork(x)
        return convolution_and_more(layer, low), x
    if convolution.adds_gradients(x, layer.weight):
        return convolution.pointwise_fork(x, layer.weight)
    return layer(x), x


@fresh
def convolution_batch_norm(
    layer: Any,
    x: Any,
    norm: Any,
    residual: Any = None,
    act: str | None = None,
    overwritten: str | None = None,
    of_product: bool = False,
) -> Tensor:
    """act(norm(layer(x)) + residual) for a convolution and a BatchNorm; x may be the result of ``excite``."""
    if of_product:
        return convolution_of_product(lambda x: convolution_batch_norm(layer, x, norm, residual, act, overwritten), x)
    y = convolution_norm(layer, x, norm, residual, act)
    if y is None:
        y = post_ops.convolution_norm(layer, x, norm, residual, act)
    return batch_norm_layer(norm, layer(x), residual, act, overwritten) if y is None else y


def convolution_and_norm(layer: Any, x: Any, norm: Any, act: str | None = None, of_product: bool = False) -> Tensor:
    """norm(layer(x)) for a BatchNorm with an activation of its own."""
    if of_product:
        return convolution_of_product(lambda x: convolution_and_norm(layer, x, norm, act), x)
    y = convolution_norm(layer, x, norm, None, act)
    if y is None:
        y = post_ops.convolution_norm(layer, x, norm, None, act)
    return norm(layer(x)) if y is None else y  # type: ignore[no-any-return]


def convolve(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The layer's result with these parameters."""
    if isinstance(layer, nn.Linear):
        return F.linear(x, weight, bias)
    if bias is not None:
        y = autocast.convolution(layer, x, weight, bias)
        if y is not None:
            return y
    if isinstance(layer, _ConvTransposeNd):
        options = (layer.stride, layer.padding, layer.output_padding, layer.groups, layer.dilation)
        return TRANSPOSED[x.dim()](x, weight, bias, *options)
    return layer._conv_forward(x, weight, bias)  # type: ignore[no-any-return]


def adds_bias(layer: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the fused kernel adds the bias. torch adds the bias of a linear layer in the matrix product."""
    if bias is None or not x.is_cuda or isinstance(layer, nn.Linear) or x.dim() != weight.dim():
        return False
    if torch.compiler.is_compiling() or guard.wants_gradient(x, weight, bias) or not guard.is_plain(bias):
        return False
    if bias.dtype is not weight.dtype and not torch.is_autocast_enabled("cuda"):  # torch's error
        return False
    return FAMILY.kernels_for(x) is not None


def takes(y: Tensor, residual: Tensor) -> bool:
    """Whether the kernel can add a residual to y: torch would neither promote nor expand one of them."""
    return guard.is_plain(residual) and alike(y, residual) and residual.device == y.device

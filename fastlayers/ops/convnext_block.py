"""The block of a ConvNeXt under autocast: depthwise convolution, norm, MLP, scale and sum as one Function.

The kernels are those of the steps. What is gained is the host's time, as in :mod:`fastlayers.ops.autocast`: one node of
autograd and one raw op instead of four, and one launch that casts x and all parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlayers.ops import autocast, dispatch
from fastlayers.ops.activations import ACTIVATIONS, Activation
from fastlayers.ops.dispatch import Gradients


class _ConvNeXtBlock(torch.autograd.Function):
    """Keeps x and the parameters as halves, the results of convolution and norm, both products, a mean and an rstd.

    The second result is x as a half where it is none yet, for the derivative of the backward alone: as a result it
    leads back to x.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor | None]:
        *parameters, padding, eps, act, dtype, kernels = rest
        out, low, *kept = kernels.convnext_block_autocast(
            x, *parameters, dtype, padding, eps, act.code, *act.defaults, True, kernels.apart
        )
        norm_weight, gamma = parameters[2], parameters[-1]
        wide = x.dtype is torch.float32
        ctx.save_for_backward(low if wide else x, *kept, norm_weight, gamma)
        ctx.set_materialize_grads(False)
        ctx.given, ctx.rest = autocast.Given(*parameters), (padding, eps, act, kernels, wide)
        return out, low if wide else None

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dlow: Tensor | None) -> Gradients:
        for_x = ctx.needs_input_grad[0]
        if dy is None:
            return dlow.float() if dlow is not None and for_x else None, *(None,) * 14
        padding, eps, act, kernels, wide = ctx.rest
        kept = ctx.saved_tensors
        found: Any
        if dispatch.needs_double_backward(dy):
            with torch.enable_grad():
                x = kept[0].float() if wide else kept[0]
            function = partial(_composed, kept[0].dtype, padding, eps, act)
            found = autocast.differentiate(function, ctx.given, ctx.needs_input_grad[:10], x, dy)
        else:
            found = kernels.convnext_block_autocast_backward(
                dy, *kept, padding, act.code, *act.defaults, for_x, wide, kernels.apart
            )
        dx, *of_parameters = found
        dx = None if not for_x else dx if dlow is None else dx + dlow
        return dx, *of_parameters, *(None,) * 5


_record = dispatch.record_of(_ConvNeXtBlock)


@autocast.FAMILY.graph_op("convnext_block")
def _in_graph(
    kernels: Any, x: Tensor, parameters: Sequence[Tensor], padding: Sequence[int], eps: float, act: str,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    rest = padding, eps, ACTIVATIONS[act], dtype, kernels
    return _ConvNeXtBlock.apply(x, *parameters, *rest)[0]


def _composed(
    low: torch.dtype, padding: tuple[int, ...], eps: float, act: Activation, x: Tensor, conv_weight: Tensor,
    conv_bias: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight: Tensor, bias: Tensor, weight2: Tensor,
    bias2: Tensor, gamma: Tensor,
) -> Tensor:  # fmt: skip
    channels = x.shape[1]
    z = F.conv2d(x.to(low), conv_weight.to(low), conv_bias.to(low), padding=padding, groups=channels)
    normed = F.layer_norm(z.permute(0, 2, 3, 1).float(), (channels,), norm_weight, norm_bias, eps).to(low)
    return x + (autocast.mlp_of(act, normed, weight, bias, weight2, bias2) * gamma).permute(0, 3, 1, 2)


def convnext_block(
    layer: Any, x: Tensor, norm_weight: Tensor, norm_bias: Tensor, eps: float, weight: Tensor, bias: Tensor, act: str,
    weight2: Tensor, bias2: Tensor, gamma: Tensor,
) -> Tensor | None:  # fmt: skip
    """x + gamma·mlp(layer_norm(layer(x))), of a Conv2d; None where this has no kernels for it.

    Graphs hold it in training alone: without a backward Inductor fuses the steps as well.
    """
    conv_weight, conv_bias = layer.weight, layer.bias
    parameters = (conv_weight, conv_bias, norm_weight, norm_bias, weight, bias, weight2, bias2, gamma)
    records = dispatch.wants_gradient(x, *parameters)
    if torch.compiler.is_compiling() and not records:
        return None
    for t in parameters:  # a generator costs the host more than all that it asks here
        if t is None or (records and not t.requires_grad):
            return None
    of_kernels = autocast.block_kernels_for if torch.compiler.is_compiling() else autocast.kernels_for
    kernels = of_kernels(x, *parameters)
    if (
        kernels is None
        or x.dim() != 4
        or x.numel() == 0
        or not x.is_contiguous(memory_format=torch.channels_last)
        or act not in autocast.MLP_ACTIVATIONS
    ):
        return None
    channels = x.shape[1]
    vector, inner = (channels,), (weight.shape[0],)
    if (
        layer.groups != channels
        or layer.stride != (1, 1)
        or layer.dilation != (1, 1)
        or type(layer.padding) is not tuple
        or layer.padding_mode != "zeros"
        or tuple(2 * padding + 1 for padding in layer.padding) != conv_weight.shape[2:]
        or conv_weight.shape[:2] != (channels, 1)
        or not (conv_bias.shape == norm_weight.shape == norm_bias.shape == bias2.shape == gamma.shape == vector)
        or weight.shape != (*inner, channels)
        or bias.shape != inner
        or weight2.shape != (channels, *inner)
    ):
        return None
    dtype = torch.get_autocast_dtype(x.device.type)
    if torch.compiler.is_compiling():
        return _in_graph(x, list(parameters), layer.padding, eps, act, dtype)
    given = dispatch.unwrap(x), *map(dispatch.unwrap, parameters)
    if not records:
        activation = ACTIVATIONS[act]
        numbers = dtype, layer.padding, eps, activation.code, *activation.defaults, False, kernels.apart
        return kernels.convnext_block_autocast(*given, *numbers)[0]
    return _record(*given, layer.padding, eps, ACTIVATIONS[act], dtype, kernels)[0]


def _fake(
    x: Tensor, conv_weight: Tensor, conv_bias: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight: Tensor,
    bias: Tensor, weight2: Tensor, bias2: Tensor, gamma: Tensor, dtype: torch.dtype, padding: list[int], eps: float,
    act: int, first: float, second: float, keep: bool, apart: bool,
) -> list[Tensor]:  # fmt: skip
    y = torch.empty_like(x, dtype=torch.float32)
    if not keep:
        return [y]
    channels, rows = x.shape[1], x.numel() // x.shape[1]

    def row(size: int) -> Tensor:
        return x.new_empty((rows, size), dtype=dtype)

    z, low_conv, low, low_bias, low2 = (
        torch.empty_like(t, dtype=dtype) for t in (x, conv_weight, weight, bias, weight2)
    )
    low_x = torch.empty_like(z) if x.dtype is torch.float32 else z.new_empty(0)
    stats = x.new_empty((2, rows), dtype=torch.float32)
    return [
        y, low_x, low_conv, z, stats, row(channels), row(weight.shape[0]), low, low_bias, low2, row(channels)
    ]  # fmt: skip


def _fake_backward(
    dy: Tensor, low_x: Tensor, low_conv: Tensor, z: Tensor, stats: Tensor, normed: Tensor, product: Tensor, low: Tensor,
    low_bias: Tensor, low2: Tensor, last: Tensor, norm_weight: Tensor, gamma: Tensor, *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    wide = partial(torch.empty_like, dtype=torch.float32)
    for_x, is_wide, _ = rest[-3:]
    dx = (wide(low_x) if is_wide else torch.empty_like(low_x)) if for_x else low_x.new_empty(0)
    like = (low_conv, gamma, norm_weight, norm_weight, low, low_bias, low2, gamma, gamma)
    return dx, *map(wide, like)


class Kernels(dispatch.Kernels):
    convnext_block_autocast = staticmethod(_fake)
    convnext_block_autocast_backward = staticmethod(_fake_backward)


autocast.FAMILY.declare(Kernels)

"""A convolution and the batch_norm after it, in training under autocast: one op of both.

The kernels are those of the two. The gain is host time, as in :mod:`fastlayers.ops.autocast`: one node of autograd and
one raw op instead of three nodes, one of which casts the weight and its gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlayers.ops import autocast, batch_norm, guard, pairs, raw_ops
from fastlayers.ops.activations import NORM_CODES, activation
from fastlayers.ops.pairs import Gradients, Needs


class Kernels(raw_ops.Kernels):
    @staticmethod
    def convolution_norm_autocast(
        x: Tensor, weight: Tensor, residual: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None,
        running_mean: Tensor | None, running_var: Tensor | None, momentum: float, eps: float, act: int, bits: bool,
        num_batches_tracked: Tensor | None, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
        groups: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        low = torch.empty_like(weight, dtype=x.dtype)
        z = F.conv2d(x, low, None, stride, padding, dilation, groups)
        statistics = (running_mean, running_var, norm_weight, norm_bias, momentum, eps)
        y, stats, packed = batch_norm.Kernels.batch_norm_train(z, *statistics, residual, act, bits, num_batches_tracked)
        return y, low, z, stats, packed

    @staticmethod
    def convolution_norm_autocast_backward(
        dy: Tensor, x: Tensor, low: Tensor, z: Tensor, residual: Tensor | None, bits: Tensor | None,
        norm_weight: Tensor | None, norm_bias: Tensor | None, stats: Tensor, act: int, stride: Sequence[int],
        padding: Sequence[int], dilation: Sequence[int], groups: int, dx: bool, dweight: bool, dresidual: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        _, to_residual, to_norm_weight, to_norm_bias = batch_norm.Kernels.batch_norm_backward(
            dy, z, norm_weight, norm_bias, stats, True, residual, bits, act, dresidual
        )
        to_weight = torch.empty_like(low, dtype=torch.float32) if dweight else low.new_empty(0)
        to_x = torch.empty_like(x) if dx else x.new_empty(0)
        return to_x, to_weight, to_residual, to_norm_weight, to_norm_bias


autocast.FAMILY.declare(Kernels)


class ConvolutionNorm(pairs.Pair, inputs=5):
    """act(batch_norm(convolution(x)) + residual). Keeps what the two keep, and the weight's cast."""

    @staticmethod
    def raw_forward(
        kernels: Kernels, needs: Needs, x: Tensor, weight: Tensor, residual: Tensor | None, norm_weight: Tensor,
        norm_bias: Tensor, running_mean: Tensor, running_var: Tensor, momentum: float, eps: float, act: int,
        num_batches_tracked: Tensor | None, options: autocast.Options,
    ) -> Any:  # fmt: skip
        y, low, z, stats, bits = kernels.convolution_norm_autocast(
            x, weight, residual, norm_weight, norm_bias, running_mean, running_var, momentum, eps, act,
            batch_norm.is_packed(residual, act), num_batches_tracked, *options,
        )  # fmt: skip
        kept = batch_norm.kept(z, residual, norm_weight, norm_bias, stats, bits, act)
        return y, (x, low, *kept), (autocast.Given(weight), eps, act, options)

    @staticmethod
    def raw_backward(
        kernels: Kernels, needs: Needs, dy: Tensor, x: Tensor, low: Tensor, z: Tensor, residual: Tensor | None,
        bits: Tensor | None, norm_weight: Tensor, norm_bias: Tensor | None, stats: Tensor, given: autocast.Given,
        eps: float, act: int, options: autocast.Options,
    ) -> Gradients:  # fmt: skip
        found = kernels.convolution_norm_autocast_backward(
            dy, x, low, z, residual, bits, norm_weight, norm_bias, stats, act, *options, needs[0], needs[1],
            act != 0 and needs[2],
        )  # fmt: skip
        return _wanted(needs, dy, act, *found)

    @staticmethod
    def differentiable_backward(
        needs: Needs, dy: Tensor, x: Tensor, low: Tensor, z: Tensor, residual: Tensor | None, bits: Tensor | None,
        norm_weight: Tensor, norm_bias: Tensor, stats: Tensor, given: autocast.Given, eps: float, act: int,
        options: autocast.Options,
    ) -> Gradients:  # fmt: skip
        (weight,) = given.unchanged()
        assert weight is not None
        with torch.enable_grad():
            # Of aliases: an argument may itself depend on another one.
            x, weight = x.view_as(x), weight.view_as(weight)
            z = F.conv2d(x, weight.to(x.dtype), None, *options)
        dz, *others = batch_norm.decomposed_backward(
            dy, z, residual, bits, norm_weight, norm_bias, stats, True, eps, act
        )
        wanted = [t for t, needed in zip((x, weight), needs, strict=False) if needed]
        found = iter(torch.autograd.grad(z, wanted, dz, create_graph=True) if wanted else ())
        dx, dweight = (next(found) if needed else None for needed in needs[:2])
        return _wanted(needs, dy, act, dx, dweight, *others)


def _wanted(
    needs: Needs, dy: Tensor, act: int, dx: Tensor | None, dweight: Tensor | None, dresidual: Tensor, *of_norm: Tensor
) -> Gradients:
    """The gradients that are needed. Without an activation the residual's is dy itself."""
    found = (dx, dweight, dresidual if act else dy, *of_norm)
    return tuple(d if needed else None for d, needed in zip(found, needs, strict=True))


def result_shape(layer: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of what a Conv2d gives for images of that one."""
    (high, wide), (down, right), (above, left) = layer.kernel_size, layer.stride, layer.padding
    by, across = layer.dilation
    return (
        shape[0],
        layer.out_channels,
        (shape[2] + 2 * above - by * (high - 1) - 1) // down + 1,
        (shape[3] + 2 * left - across * (wide - 1) - 1) // right + 1,
    )


def convolution_norm(layer: Any, x: Tensor, norm: Any, residual: Tensor | None, act: str | None) -> Tensor | None:
    """act(norm(layer(x)) + residual), of a Conv2d and a BatchNorm2d; None where this has no kernels for it."""
    if not norm.training or torch.compiler.is_compiling():
        return None
    weight, norm_weight, norm_bias = layer.weight, norm.weight, norm.bias
    running_mean, running_var, momentum = norm.running_mean, norm.running_var, norm.momentum
    kernels = autocast.kernels_for(x, weight, norm_weight, norm_bias, running_mean, running_var)
    if kernels is None:
        return None
    code, channels, options = activation(act).code, weight.shape[:1], autocast.options_of(layer)
    if (
        not norm.track_running_stats
        or running_mean is None
        or running_var is None
        or momentum is None
        or norm_weight is None
        or norm_bias is None
        or any(t.shape != channels for t in (norm_weight, norm_bias, running_mean, running_var))
        or layer.bias is not None
        or code >= NORM_CODES
        or norm.eps <= 0
        or options is None
        or x.dim() != 4
        or x.shape[0] < 2  # of one there might be one value in a channel, which is an error
        or x.numel() == 0
        or not guard.wants_gradient(x, weight, norm_weight, norm_bias, residual)
    ):
        return None
    if residual is not None and (
        type(residual) not in guard.PLAIN
        or residual.dtype is not torch.get_autocast_dtype(x.device.type)
        or residual.get_device() != x.get_device()
        or residual.shape != result_shape(layer, x.shape)
    ):
        return None
    num_batches_tracked = norm.num_batches_tracked
    if not batch_norm.is_count(num_batches_tracked, x):
        return None
    return ConvolutionNorm.run(
        kernels, autocast.autocast_input(x), weight, residual, norm_weight, norm_bias, running_mean, running_var,
        momentum, norm.eps, code, num_batches_tracked, options,
    )  # fmt: skip

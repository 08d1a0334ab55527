"""A convolution and the batch_norm behind it, in training under autocast: a Function of both.

The kernels are those of the two. What is gained is the host's time, as in :mod:`fastlayers.ops.autocast`: one node of
autograd and one raw op instead of three nodes, of which one casts the weight and its gradient back.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from fastlayers.ops import autocast, batch_norm, dispatch
from fastlayers.ops.activations import NORM_CODES, activation

#: Of batch_norm: the running mean and variance, momentum, eps, act, the count of batches; the convolution's options,
#: and the kernels. What has no gradient goes to autograd as one argument.
Rest: TypeAlias = tuple[Tensor, Tensor, float, float, int, Tensor | None, autocast.Options, Any]


class _ConvolutionNorm(torch.autograd.Function):
    """act(batch_norm(convolution(x)) + residual). Keeps what the two keep, and the convolution's weight as a half."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, residual: Tensor | None, norm_weight: Tensor,
        norm_bias: Tensor, rest: Rest,
    ) -> Tensor:  # fmt: skip
        running_mean, running_var, momentum, eps, act, batches, options, kernels = rest
        packed = residual is not None and act == batch_norm.RELU
        y, low, z, stats, bits = kernels.convolution_norm_autocast(
            x, weight, residual, norm_weight, norm_bias, running_mean, running_var, momentum, eps, act, packed, batches,
            *options,
        )  # fmt: skip
        ctx.save_for_backward(x, low, *batch_norm.kept(z, residual, norm_weight, norm_bias, stats, bits, act))
        ctx.given, ctx.rest = autocast.Given(weight), (eps, act, options, kernels)
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        _, act, options, kernels = ctx.rest
        for_x, for_weight, for_residual, for_norm_weight, for_norm_bias, _ = ctx.needs_input_grad
        if dispatch.differentiating(dy):
            found = derivable(ctx, dy)
        else:
            found = kernels.convolution_norm_autocast_backward(
                dy, *ctx.saved_tensors, act, *options, for_x, for_weight, act != 0 and for_residual
            )
        dx, dweight, dresidual, dnorm_weight, dnorm_bias = found
        return (
            dx if for_x else None,
            dweight if for_weight else None,
            (dresidual if act else dy) if for_residual else None,
            dnorm_weight if for_norm_weight else None,
            dnorm_bias if for_norm_bias else None,
            None,
        )


_record = dispatch.recorder(_ConvolutionNorm)


def derivable(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients in torch's operations, those of the convolution through what autograd records of it."""
    eps, act, options, _ = ctx.rest
    x, _, _, residual, bits, norm_weight, norm_bias, stats = ctx.saved_tensors
    for_x, for_weight, *_ = ctx.needs_input_grad
    (weight,) = ctx.given.unchanged()
    with torch.enable_grad():
        # Of aliases: what is given may itself depend on what is given beside it.
        x, weight = x.view_as(x), weight.view_as(weight)
        z = torch.nn.functional.conv2d(x, weight.to(x.dtype), None, *options)
    dz, *others = batch_norm.compose_backward(dy, z, residual, bits, norm_weight, norm_bias, stats, True, eps, act)
    wanted = [t for t, needed in ((x, for_x), (weight, for_weight)) if needed]
    found = iter(torch.autograd.grad(z, wanted, dz, create_graph=True) if wanted else ())
    return (next(found) if for_x else None, next(found) if for_weight else None, *others)


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
        or not dispatch.wants_gradient(x, weight, norm_weight, norm_bias, residual)
    ):
        return None
    if residual is not None:
        if (
            type(residual) not in dispatch.PLAIN
            or residual.dtype is not torch.get_autocast_dtype(x.device.type)
            or residual.get_device() != x.get_device()
            or residual.shape != result_shape(layer, x.shape)
        ):
            return None
        residual = dispatch.unwrap(residual)
    batches = norm.num_batches_tracked
    if not batch_norm.is_count(batches, x):
        return None
    rest: Rest = (running_mean, running_var, momentum, norm.eps, code, batches, options, kernels)
    parameters = dispatch.unwrap(weight), residual, dispatch.unwrap(norm_weight), dispatch.unwrap(norm_bias)
    return _record(autocast.lowered(x), *parameters, rest)  # type: ignore[no-any-return]


def _fake(
    x: Tensor, weight: Tensor, residual: Tensor | None, norm_weight: Tensor, norm_bias: Tensor,
    running_mean: Tensor, running_var: Tensor, momentum: float, eps: float, act: int, bits: bool,
    batches: Tensor | None, *options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    low = torch.empty_like(weight, dtype=x.dtype)
    z = torch.nn.functional.conv2d(x, low, None, *options)
    y, stats, packed = batch_norm.fake_train(
        z, residual, norm_weight, norm_bias, running_mean, running_var, momentum, eps, act, bits, batches
    )
    return y, low, z, stats, packed


def _fake_backward(
    dy: Tensor, x: Tensor, low: Tensor, z: Tensor, residual: Tensor | None, bits: Tensor | None,
    norm_weight: Tensor, norm_bias: Tensor | None, stats: Tensor, act: int, stride: Any, padding: Any,
    dilation: Any, groups: int, dx: bool, dweight: bool, dresidual: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    _, *others = batch_norm.fake_backward(dy, z, residual, bits, norm_weight, norm_bias, stats, True, act, dresidual)
    return (
        torch.empty_like(x) if dx else x.new_empty(0),
        torch.empty_like(low, dtype=torch.float32) if dweight else low.new_empty(0),
        *others,
    )


dispatch.register_fakes({"convolution_norm_autocast": _fake, "convolution_norm_autocast_backward": _fake_backward})

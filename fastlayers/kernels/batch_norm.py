"""act(batch_norm(x) + residual) in both layouts, forward and backward.

Stock PyTorch runs the norm, the sum and the activation as kernels of their own and keeps a tensor for each. Here
training reads x twice (and the residual once) and writes y once; evaluation is one pass. For the backward x is kept, 2
numbers a channel and, only where a residual and a ReLU follow, one bit an element; it reads dy and x twice and writes
dx once. What the activation was applied to is computed again. The kernels and their grids are in ``channels``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fastlayers.kernels.channels import gradient_launches, normalise_launch, statistics_launches
from fastlayers.kernels.image_geometry import BACKWARD_TILE, FORWARD_TILE, Geometry, dense, geometry, in_layout
from fastlayers.kernels.launch import KEPT, Launch
from fastlayers.kernels.reductions import accumulator

DTypes = tuple[torch.dtype | None, ...]


@dataclass(frozen=True, eq=False)
class Forward:
    geometry: Geometry
    accumulator: torch.dtype
    statistics: Launch
    finish: Launch
    normalise: Launch


@lru_cache(KEPT)
def _forward_plan(
    shape: torch.Size, last: bool, dtypes: DTypes, momentum: float, eps: float, act: int, bits: bool,
    device: torch.device,
) -> Forward:  # fmt: skip
    """``dtypes``: of x, residual, weight, bias and the running statistics."""
    dtype = dtypes[0]
    assert dtype is not None
    g = geometry(shape, last, True, 1, FORWARD_TILE, dtype, device)
    statistics, finish = statistics_launches(g, dtype, momentum, eps)
    normalise = normalise_launch(g, dtype, act, eps, bits)
    return Forward(g, accumulator(dtype)[1], statistics, finish, normalise)


def prepare_forward(
    x: Tensor, tensors: tuple[Tensor | None, ...], momentum: float, eps: float, act: int, bits: bool
) -> tuple[Tensor, Tensor | None, Forward]:
    """x and the residual, the first of ``tensors``, in one layout, and what to launch."""
    x, last = dense(x)
    residual = tensors[0]
    dtypes = (x.dtype, *[None if t is None else t.dtype for t in tensors])
    plan = _forward_plan(x.shape, last, dtypes, float(momentum), float(eps), act, bits, x.device)
    return x, None if residual is None else in_layout(residual, x), plan


def _bits(x: Tensor, wanted: bool) -> Tensor:
    return torch.empty((x.numel() + 7) // 8 if wanted else 0, dtype=torch.uint8, device=x.device)


def batch_norm_train(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    momentum: float, eps: float, residual: Tensor | None, act: int, bits: bool,
    num_batches_tracked: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(y, stats, bits) by the statistics of x, of which the running ones, where given, take ``momentum``.

    ``num_batches_tracked`` counts one more.

    y has x's layout; stats are means and rstds as (2, C). bit j of byte i of ``bits`` tells if the activation's
    argument is positive at element 8i + j of y's memory; empty unless asked for.
    """
    tensors = (residual, weight, bias, running_mean, running_var)
    x, residual, plan = prepare_forward(x, tensors, momentum, eps, act, bits)
    part = torch.empty(plan.geometry.part_shape, dtype=plan.accumulator, device=x.device)
    stats = torch.empty(2, x.shape[1], dtype=plan.accumulator, device=x.device)
    y, packed = torch.empty_like(x), _bits(x, bits)
    if num_batches_tracked is not None:
        num_batches_tracked.add_(1)
    plan.statistics(part, x)
    plan.finish(stats, running_mean, running_var, part)
    plan.normalise(y, packed if bits else None, None, x, residual, weight, bias, stats, None)
    return y, stats, packed


def batch_norm_moments(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, residual: Tensor | None, act: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, stats, bits, moments) as :func:`batch_norm_train`; moments are means and unbiased variances as (2, C)."""
    moments = x.new_zeros((2, x.shape[1]), dtype=torch.promote_types(x.dtype, torch.float32))
    packed = residual is not None and act == 1  # relu
    y, stats, bits = batch_norm_train(x, moments[0], moments[1], weight, bias, 1.0, eps, residual, act, packed)
    return y, stats, bits, moments


def batch_norm_eval(
    x: Tensor, running_mean: Tensor, running_var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float,
    residual: Tensor | None, act: int, bits: bool, keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(y, stats, bits) by the running statistics, as :func:`batch_norm_train`; stats are empty unless ``keep``."""
    x, residual, plan = prepare_forward(x, (residual, weight, bias, running_mean, running_var), 0.0, eps, act, bits)
    stats = torch.empty((2, x.shape[1]) if keep else (0,), dtype=plan.accumulator, device=x.device)
    y, packed = torch.empty_like(x), _bits(x, bits)
    plan.normalise(
        y, packed if bits else None, stats if keep else None, x, residual, weight, bias, running_mean, running_var
    )
    return y, stats, packed


def channel_bias_act_(x: Tensor, bias: Tensor, residual: Tensor | None, act: int) -> None:
    """act(x + bias + residual), written to x, which is contiguous or channels_last; the bias is one a channel."""
    _, residual, plan = prepare_forward(x, (residual, None, bias, None, None), 0.0, 0.0, act, False)
    plan.normalise(x, None, None, x, residual, None, bias, None, None)


@dataclass(frozen=True, eq=False)
class Backward:
    geometry: Geometry
    accumulator: torch.dtype
    sums: Launch
    finish: Launch
    gradient: Launch


@lru_cache(KEPT)
def _backward_plan(shape: torch.Size, last: bool, dtypes: DTypes, act: int, device: torch.device) -> Backward:
    """``dtypes``: of x, residual, weight and bias."""
    dtype = dtypes[0]
    assert dtype is not None
    g = geometry(shape, last, True, 1, BACKWARD_TILE, dtype, device)
    return Backward(g, accumulator(dtype)[1], *gradient_launches(g, dtype, act))


def prepare_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, act: int
) -> tuple[Tensor, Tensor, Tensor | None, Backward]:
    """dy, x and the residual in one layout, and what to launch."""
    x, last = dense(x)
    residual = None if residual is None else in_layout(residual, x)
    dtypes = (x.dtype, *[None if t is None else t.dtype for t in (residual, weight, bias)])
    return in_layout(dy, x), x, residual, _backward_plan(x.shape, last, dtypes, act, x.device)


def batch_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Tensor, training: bool,
    residual: Tensor | None, bits: Tensor | None, act: int, dresidual: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dx, dresidual, dweight, dbias); dresidual is empty unless asked for.

    The derivative of the activation is taken from ``bits`` where there are any, else from its argument, for which the
    forward's residual is needed if it had one. Not ``training``: the statistics are constants.
    """
    dy, x, residual, plan = prepare_backward(dy, x, weight, bias, residual, act)
    dx = torch.empty_like(x)
    for_residual = torch.empty_like(x) if dresidual else None
    dtype = plan.accumulator if weight is None else weight.dtype
    dweight = torch.empty(x.shape[1], dtype=dtype, device=x.device)
    dbias = torch.empty_like(dweight)
    part = torch.empty(plan.geometry.part_shape, dtype=plan.accumulator, device=x.device)
    operands = (dy, x, residual, bits, weight, bias, stats)
    if training:
        means = torch.empty_like(stats)
        plan.sums(part, None, None, *operands)
        plan.finish(dweight, dbias, means, part, weight, stats)
        plan.gradient(dx, for_residual, *operands, means)
    else:
        plan.sums(part, dx, for_residual, *operands)
        plan.finish(dweight, dbias, None, part, weight, stats)
    if for_residual is None:
        for_residual = torch.empty(0, dtype=x.dtype, device=x.device)
    return dx, for_residual, dweight, dbias

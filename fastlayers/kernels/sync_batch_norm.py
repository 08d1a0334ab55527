"""The halves of a batch_norm whose statistics are of several processes, between which something is communicated.

The kernels are those of ``batch_norm``: what it launches in a row is launched here in two steps each way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastlayers.kernels.batch_norm import batch_norm_eval, prepare_backward, prepare_forward


def sync_batch_norm_statistics(x: Tensor) -> Tensor:
    """(2, C): the mean of each channel of x, and the sum of the squared deviations from it."""
    x, _, plan = prepare_forward(x, (None,) * 5, 1.0, 1.0, 0, False)
    part = torch.empty(plan.geometry.part_shape, dtype=plan.accumulator, device=x.device)
    stats = torch.empty(2, x.shape[1], dtype=plan.accumulator, device=x.device)
    moments = torch.zeros_like(stats)
    plan.statistics(part, x)
    plan.finish(stats, moments[0], moments[1], part)
    moments[1].mul_(max(x.numel() // x.shape[1] - 1, 1))  # the kernel's variance is unbiased
    return moments


def sync_batch_norm_normalize(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float,
    residual: Tensor | None, act: int, bits: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(y, stats, bits), as ``batch_norm_train`` has them, by a given mean and biased variance."""
    return batch_norm_eval(x, mean, var, weight, bias, eps, residual, act, bits, True)


def sync_batch_norm_sums(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Tensor, residual: Tensor | None,
    bits: Tensor | None, act: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(means, dweight, dbias) of x alone; the means are what :func:`sync_batch_norm_gradient` takes, as (2, C)."""
    dy, x, residual, plan = prepare_backward(dy, x, weight, bias, residual, act)
    dtype = plan.accumulator if weight is None else weight.dtype
    dweight = torch.empty(x.shape[1], dtype=dtype, device=x.device)
    dbias = torch.empty_like(dweight)
    part = torch.empty(plan.geometry.part_shape, dtype=plan.accumulator, device=x.device)
    means = torch.empty_like(stats)
    plan.sums(part, None, None, dy, x, residual, bits, weight, bias, stats)
    plan.finish(dweight, dbias, means, part, weight, stats)
    return means, dweight, dbias


def sync_batch_norm_gradient(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Tensor, means: Tensor,
    residual: Tensor | None, bits: Tensor | None, act: int, dresidual: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(dx, dresidual) by the means over all processes; dresidual is empty unless asked for."""
    dy, x, residual, plan = prepare_backward(dy, x, weight, bias, residual, act)
    dx = torch.empty_like(x)
    for_residual = torch.empty_like(x) if dresidual else None
    plan.gradient(dx, for_residual, dy, x, residual, bits, weight, bias, stats, means)
    return dx, torch.empty(0, dtype=x.dtype, device=x.device) if for_residual is None else for_residual

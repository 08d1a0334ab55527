"""The halves of a batch_norm whose statistics are of several processes, between which something is communicated.

The kernels are those of ``batch_norm``: what it launches in a row is launched here in two steps each way. One more
merges what the processes have sent, for which torch needs a dozen launches.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlayers.kernels.batch_norm import batch_norm_eval, prepare_backward, prepare_forward
from fastlayers.kernels.launch import KEPT, Launch, cdiv
from fastlayers.kernels.reductions import accumulator

# Channels of a program of one warp, which loops over the processes.
BLOCK = 32


@triton.jit
def _merge(moments_ptr, count_ptr, gathered_ptr, processes, channels, ACC: tl.constexpr, BLOCK: tl.constexpr):
    """moments = (mean, biased variance, unbiased variance), of the rows (means, unbiased variances, count)."""
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    mean = tl.full((BLOCK,), 0.0, ACC)
    squares = tl.full((BLOCK,), 0.0, ACC)
    count = tl.full((), 0.0, ACC)
    for process in range(processes):
        row = gathered_ptr + process * (2 * channels + 1)
        own = tl.load(row + 2 * channels)
        total = count + own
        share = own / tl.maximum(total, 1.0)  # 0 of an empty batch
        deviation = tl.load(row + channel, mask=inside, other=0.0) - mean
        mean += deviation * share
        of_row = tl.load(row + channels + channel, mask=inside, other=0.0) * tl.maximum(own - 1.0, 1.0)
        squares += of_row + deviation * deviation * (count * share)
        count = total
    tl.store(moments_ptr + channel, mean, mask=inside)
    tl.store(moments_ptr + channels + channel, squares / tl.maximum(count, 1.0), mask=inside)
    tl.store(moments_ptr + 2 * channels + channel, squares / tl.maximum(count - 1.0, 1.0), mask=inside)
    if tl.program_id(0) == 0:
        tl.store(count_ptr, count)


@triton.jit
def _update(
    mean_ptr, var_ptr, moments_ptr, count_ptr, channels, momentum: tl.float64, ACC: tl.constexpr, BLOCK: tl.constexpr
):
    """The running statistics move by ``momentum`` to the mean and the unbiased variance of ``moments``."""
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    share = tl.full((), momentum, ACC) * tl.minimum(tl.load(count_ptr), 1.0)  # Empty batches say nothing.
    running_mean = tl.load(mean_ptr + channel, mask=inside, other=0.0).to(ACC)
    running_var = tl.load(var_ptr + channel, mask=inside, other=0.0).to(ACC)
    mean = tl.load(moments_ptr + channel, mask=inside, other=0.0)
    var = tl.load(moments_ptr + 2 * channels + channel, mask=inside, other=0.0)
    running_mean = (1.0 - share) * running_mean + share * mean
    running_var = (1.0 - share) * running_var + share * var
    tl.store(mean_ptr + channel, running_mean.to(mean_ptr.dtype.element_ty), mask=inside)
    tl.store(var_ptr + channel, running_var.to(var_ptr.dtype.element_ty), mask=inside)


def sync_batch_norm_statistics(x: Tensor) -> Tensor:
    """(2C + 1,): the mean of each channel of x, its unbiased variance, and how many values they are of."""
    x, _, plan = prepare_forward(x, (None,) * 5, 1.0, 1.0, 0, False)
    channels = x.shape[1]
    part = torch.empty(plan.geometry.part_shape, dtype=plan.accumulator, device=x.device)
    stats = torch.empty(2, channels, dtype=plan.accumulator, device=x.device)
    sent = torch.full((2 * channels + 1,), x.numel() // channels, dtype=plan.accumulator, device=x.device)
    plan.statistics(part, x)
    plan.finish(stats, sent, sent[channels:], part)  # A running statistic with a momentum of 1 is that of x.
    return sent


@lru_cache(KEPT)
def _merge_launch(processes: int, channels: int, dtype: torch.dtype) -> Launch:
    constants = (accumulator(dtype)[0], BLOCK)
    return Launch(_merge, cdiv(channels, BLOCK), (processes, channels), constants, 1)


def sync_batch_norm_merge(gathered: Tensor) -> tuple[Tensor, Tensor]:
    """(moments, count) of rows with the means, the unbiased variances and the count of each process.

    The moments are means, biased and unbiased variances, as (3, C).
    """
    processes, channels = gathered.shape[0], gathered.shape[1] // 2
    moments, count = gathered.new_empty(3, channels), gathered.new_empty(())
    _merge_launch(processes, channels, gathered.dtype)(moments, count, gathered)
    return moments, count


@lru_cache(KEPT)
def _update_launch(channels: int, momentum: float, dtypes: tuple[torch.dtype, ...]) -> Launch:
    """``dtypes``: of the moments and the running statistics."""
    constants = (accumulator(dtypes[0])[0], BLOCK)
    return Launch(_update, cdiv(channels, BLOCK), (channels, momentum), constants, 1)


def sync_batch_norm_update_(
    running_mean: Tensor, running_var: Tensor, moments: Tensor, count: Tensor, momentum: float
) -> None:
    """Move the running statistics, which are contiguous, by ``momentum`` to those of :func:`sync_batch_norm_merge`."""
    dtypes = (moments.dtype, running_mean.dtype, running_var.dtype)
    _update_launch(moments.shape[1], momentum, dtypes)(running_mean, running_var, moments, count)


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

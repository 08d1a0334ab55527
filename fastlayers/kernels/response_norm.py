"""Global response normalisation, forward and backward: sums over space, factors of them, and the result.

Each direction reads its tensors twice, once for the sums of every channel of every sample and once for the result, and
writes the result: torch makes five passes forward. Between the two a program for each sample turns the sums of its
channels into factors. A tensor is (N, space, C) where the channels come last in memory, else (N, C, space).
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlayers.kernels.flat import WARPS
from fastlayers.kernels.indexing import index_type
from fastlayers.kernels.launch import KEPT, Launch, cdiv
from fastlayers.kernels.reductions import accumulator, sum_rows
from fastlayers.kernels.spatial import Sizes, partial_sums, tile_of

# Channels of a sample in the registers of one program.
FACTOR_WARPS = 8


# -------------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def _sum_of_chunks(partial_ptr, chunks, step, inside, ACC: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.full((BLOCK,), 0.0, ACC)
    for _ in range(chunks):
        total += tl.load(partial_ptr, mask=inside, other=0.0)
        partial_ptr += step
    return total


@triton.jit
def _factors(
    factor_ptr, norm_ptr, partial_ptr, weight_ptr, channels, chunks, of_channel, of_chunk, eps: tl.float64,
    ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """norm = sqrt(sum of x²), factor = 1 + weight·norm / (mean of norm + eps), for one sample."""
    sample = tl.program_id(0)
    channel = tl.arange(0, BLOCK)
    inside = channel < channels
    partial = partial_ptr + (sample * channels * chunks + channel * of_channel)
    norm = tl.sqrt(_sum_of_chunks(partial, chunks, of_chunk, inside, ACC, BLOCK))
    mean = tl.sum(norm, 0) / channels + tl.full((), eps, ACC)
    weight = tl.load(weight_ptr + channel, mask=inside, other=0.0).to(ACC)
    tl.store(norm_ptr + sample * channels + channel, norm, mask=inside)
    tl.store(factor_ptr + sample * channels + channel, 1.0 + weight * (norm / mean), mask=inside)


@triton.jit
def _gradients(
    factor_ptr, along_ptr, parameter_ptr, partial_ptr, norm_ptr, weight_ptr, channels, chunks, of_channel, of_chunk,
    sums, eps: tl.float64, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For one sample: factor as before, along with dx = dy·factor + x·along, and its share of dweight and dbias.

    A channel of zeros has norm 0, whose derivative torch takes as 0.
    """
    sample = tl.program_id(0)
    channel = tl.arange(0, BLOCK)
    inside = channel < channels
    partial = partial_ptr + (sample * channels * chunks + channel * of_channel)
    product = _sum_of_chunks(partial, chunks, of_chunk, inside, ACC, BLOCK)
    plain = _sum_of_chunks(partial + sums, chunks, of_chunk, inside, ACC, BLOCK)
    norm = tl.load(norm_ptr + sample * channels + channel, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + channel, mask=inside, other=0.0).to(ACC)
    mean = tl.sum(norm, 0) / channels + tl.full((), eps, ACC)
    relative = norm / mean
    d = product * weight
    d = (d - tl.sum(d * relative, 0) / channels) / mean
    along = tl.where(norm == 0.0, 0.0, d / tl.where(norm == 0.0, 1.0, norm))
    place = sample * channels + channel
    tl.store(factor_ptr + place, 1.0 + weight * relative, mask=inside)
    tl.store(along_ptr + place, along, mask=inside)
    tl.store(parameter_ptr + place, product * relative, mask=inside)
    tl.store(parameter_ptr + (place + tl.num_programs(0) * channels), plain, mask=inside)


@triton.jit
def _apply(
    out_ptr, x_ptr, y_ptr, factor_ptr, other_ptr, space, columns, channels,
    ACC: tl.constexpr, INDEX: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out = x·factor + y·other, or x·factor + other for an other of each channel; ROWS positions a program."""
    blocks = tl.cdiv(columns, COLUMNS)
    parts = tl.cdiv(space, ROWS)
    program = tl.program_id(0).to(INDEX)
    outer = program // blocks // parts
    row = program // blocks % parts * ROWS + tl.arange(0, ROWS)
    column = program % blocks * COLUMNS + tl.arange(0, COLUMNS)
    there = column < columns
    inside = (row < space)[:, None] & there[None, :]
    offset = (outer * space + row)[:, None] * columns + column[None, :]
    place = outer * columns + column  # in (N, C)
    x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(ACC)
    out = x * tl.load(factor_ptr + place, mask=there, other=0.0)[None, :]
    if y_ptr is None:
        out += tl.load(other_ptr + place % channels, mask=there, other=0.0).to(ACC)[None, :]
    else:
        y = tl.load(y_ptr + offset, mask=inside, other=0.0).to(ACC)
        out += y * tl.load(other_ptr + place, mask=there, other=0.0)[None, :]
    tl.store(out_ptr + offset, out.to(out_ptr.dtype.element_ty), mask=inside)


# ------------------------------------------------------------------------------------------------------------- wrappers


def _sizes(x: Tensor, channels_last: bool) -> tuple[Sizes, int]:
    """(outer, space, columns) and the number of channels."""
    samples, first, second = x.shape
    return ((samples, first, second), second) if channels_last else ((samples * first, second, 1), first)


@lru_cache(KEPT)
def _sample_launch(
    function: object, samples: int, channels: int, columns: int, chunks: int, scalars: tuple[float, ...],
    dtypes: tuple[torch.dtype, ...],
) -> Launch:  # fmt: skip
    """``dtypes`` are of x and the weight. partial is [outer, chunk, column]: the chunks of a channel come one after
    another where a channel is an outer index."""
    steps = (chunks, 1) if columns == 1 else (1, columns)
    constants = (accumulator(dtypes[0])[0], triton.next_power_of_2(channels))
    return Launch(function, samples, (channels, chunks, *steps, *scalars), constants, FACTOR_WARPS)


@lru_cache(KEPT)
def _apply_launch(sizes: Sizes, channels: int, dtypes: tuple[torch.dtype, ...]) -> Launch:
    """``dtypes`` tell launches apart: those of all tensors but the factors."""
    outer, space, columns = sizes
    rows, wide = tile_of(space, columns)
    constants = (accumulator(dtypes[0])[0], index_type(outer * space * columns), rows, wide)
    programs = outer * cdiv(space, rows) * cdiv(columns, wide)
    return Launch(_apply, programs, (space, columns, channels), constants, WARPS)


def response_norm_forward(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, channels_last: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(y, norm): x + weight·x·norm / (mean of norm + eps) + bias, and the norm over space of each channel, (N, C)."""
    sizes, channels = _sizes(x, channels_last)
    samples, acc = x.shape[0], accumulator(x.dtype)[1]
    partial = partial_sums(x, x, sizes)
    # Apart: the norm is kept, and the factor is not.
    norm, factor = (torch.empty((samples, channels), dtype=acc, device=x.device) for _ in range(2))
    dtypes = (x.dtype, weight.dtype)
    launch = _sample_launch(_factors, samples, channels, sizes[2], partial.shape[2], (float(eps),), dtypes)
    launch(factor, norm, partial, weight)
    y = torch.empty_like(x, dtype=dtype)
    _apply_launch(sizes, channels, (x.dtype, dtype, bias.dtype))(y, x, None, factor, bias)
    return y, norm


def response_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, norm: Tensor, eps: float, channels_last: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias)"""
    dy = dy.contiguous()
    sizes, channels = _sizes(x, channels_last)
    samples, acc = x.shape[0], accumulator(x.dtype)[1]
    partial = partial_sums(dy, x, sizes, both=True)
    factor, along = torch.empty((2, samples, channels), dtype=acc, device=x.device)
    of_parameters = torch.empty((2, samples, channels), dtype=acc, device=x.device)
    scalars = (partial[0].numel(), float(eps))
    launch = _sample_launch(_gradients, samples, channels, sizes[2], partial.shape[2], scalars, (x.dtype, weight.dtype))
    launch(factor, along, of_parameters, partial, norm, weight)
    dx = torch.empty_like(x)
    _apply_launch(sizes, channels, (dy.dtype, x.dtype))(dx, dy, x, factor, along)
    dweight, dbias = torch.empty_like(weight), torch.empty_like(weight)
    sum_rows(of_parameters, dweight, dbias)
    return dx, dweight, dbias

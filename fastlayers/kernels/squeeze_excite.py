"""What squeeze-and-excite reads of an image beside the product with its gates, each in one pass.

The sum of each channel over space, of x or of a product, and x·scale + factor·shift, the gradient that the product and
the mean of x send back together. Images are [outer, repeat, columns] in memory: the channels are the columns of
channels_last images; of contiguous ones they are outside, and columns is 1.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlayers.kernels.flat import TILE, WARPS, Sizes, shares
from fastlayers.kernels.indexing import index_type
from fastlayers.kernels.launch import KEPT, Launch, cdiv
from fastlayers.kernels.reductions import accumulator

# Elements of a program's tile: rows of the repeat x columns. Channels last, 64 columns are 128 contiguous bytes of
# 16-bit elements.
SUM_TILE, SUM_COLUMNS = 2048, 64

# -------------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def _spatial_sum(
    partial_ptr, x_ptr, y_ptr, repeat, columns, chunks, chunk, factor: tl.float64,
    ACC: tl.constexpr, INDEX: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums of x·factor, or of x·y if y_ptr is given, over ``chunk`` rows to partial[outer, chunk, column]."""
    blocks = tl.cdiv(columns, COLUMNS)
    program = tl.program_id(0).to(INDEX)
    part = program // blocks  # = outer * chunks + index of the chunk
    outer = part // chunks
    column = program % blocks * COLUMNS + tl.arange(0, COLUMNS)
    start = part % chunks * chunk
    stop = tl.minimum(start + chunk, repeat)
    total = tl.full((ROWS, COLUMNS), 0.0, ACC)
    for first in range(start, stop, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < stop)[:, None] & (column < columns)[None, :]
        offset = (outer * repeat + row)[:, None] * columns + column[None, :]
        x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(ACC)
        if y_ptr is not None:
            total += x * tl.load(y_ptr + offset, mask=inside, other=0.0).to(ACC)
        else:
            total += x * tl.full((), factor, ACC)
    tl.store(partial_ptr + part * columns + column, tl.sum(total, 0), mask=column < columns)


@triton.jit
def _scale_shift(
    out_ptr, x_ptr, scale_ptr, shift_ptr, n, block, columns, factor: tl.float64,
    ACC: tl.constexpr, INDEX: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """out = x * scale + factor * shift, for a scale and a shift of each column of a block."""
    element = tl.program_id(0).to(INDEX) * TILE + tl.arange(0, TILE)
    inside = element < n
    channel = element // block * columns + element % columns
    x = tl.load(x_ptr + element, mask=inside, other=0.0).to(ACC)
    scale = tl.load(scale_ptr + channel, mask=inside, other=0.0).to(ACC)
    shift = tl.load(shift_ptr + channel, mask=inside, other=0.0).to(ACC)
    out = x * scale + tl.full((), factor, ACC) * shift
    tl.store(out_ptr + element, out.to(out_ptr.dtype.element_ty), mask=inside)


# ------------------------------------------------------------------------------------------------------------- wrappers


def _in_memory(x: Tensor) -> Sizes:
    """(outer, repeat, columns)"""
    n, channels, height, width = x.shape
    return (n * channels, height * width, 1) if x.is_contiguous() else (n, height * width, channels)


@lru_cache(KEPT)
def _sum_launch(
    sizes: Sizes, factor: float, dtype: torch.dtype, device: torch.device, product: bool
) -> tuple[Launch, int]:
    """The launch, and the number of chunks. ``product`` only tells launches apart."""
    outer, repeat, columns = sizes
    wide = 1 if columns == 1 else SUM_COLUMNS
    rows = min(SUM_TILE // wide, triton.next_power_of_2(repeat))
    blocks = cdiv(columns, wide)
    chunks, chunk = shares(repeat, rows, outer * blocks, device)
    constants = (accumulator(dtype)[0], index_type(outer * repeat * columns), rows, wide)
    arguments = (repeat, columns, chunks, chunk, float(factor))
    return Launch(_spatial_sum, outer * chunks * blocks, arguments, constants, WARPS), chunks


def spatial_sum(x: Tensor, y: Tensor | None, factor: float) -> Tensor:
    """The sums over space, (N, C, 1, 1), of x·factor or of x·y, for a y that lies as x does."""
    sizes = outer, _, columns = _in_memory(x)
    launch, chunks = _sum_launch(sizes, factor, x.dtype, x.device, y is not None)
    partial = torch.empty((outer, chunks, columns), dtype=accumulator(x.dtype)[1], device=x.device)
    launch(partial, x, y)
    return (partial.sum(1) if chunks > 1 else partial).to(x.dtype).view(*x.shape[:2], 1, 1)


@lru_cache(KEPT)
def _scale_launch(sizes: Sizes, factor: float, dtype: torch.dtype) -> Launch:
    outer, repeat, columns = sizes
    n = outer * repeat * columns
    constants = (accumulator(dtype)[0], index_type(n), TILE)
    return Launch(_scale_shift, cdiv(n, TILE), (n, repeat * columns, columns, float(factor)), constants, WARPS)


def scale_shift(x: Tensor, scale: Tensor, shift: Tensor, factor: float) -> Tensor:
    """x·scale + factor·shift, for scale and shift of shape (N, C, 1, 1)."""
    out = torch.empty_like(x)
    _scale_launch(_in_memory(x), factor, x.dtype)(out, x, scale.contiguous(), shift.contiguous())
    return out

"""What the norms share: moments that are merged without cancellation, and partial sums added up in a fixed order."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlayers.kernels.indexing import index_type
from fastlayers.kernels.launch import KEPT, Launch, Producer, Result, cdiv

#: Rows, columns and warps of a program's tile in a sum over rows, by the number of columns. Where there are few, and
#: more rows than FEW_ROWS, the warps of a program share the rows: 264 of 2,048 columns take 3.7 us on an H100, 19 with
#: a warp for each 128 columns. Otherwise a program is one warp, whose loads wait for no other: 5 rows of 131,072
#: columns take 3.6 us, 14 with 8 warps; of 8,192 columns 2.6 and 3.6.
FEW_ROWS = 64
SUM_TILES_OF_MANY_ROWS = {2048: (512, 8, 8), 8192: (128, 32, 8)}
SUM_TILES = {65536: (8, 32, 1), math.inf: (8, 128, 1)}

FLOAT64 = (tl.float64, torch.float64)
FLOAT32 = (tl.float32, torch.float32)


def accumulator(dtype: torch.dtype) -> tuple[tl.dtype, torch.dtype]:
    """The type in which a kernel computes and its statistics are kept, as Triton's and as torch's."""
    return FLOAT64 if dtype == torch.float64 else FLOAT32


def unit(length: int) -> int:
    """The largest of 1, 2, 4 and 8 that divides a length.

    Triton knows of an int only whether 16 divides it. Passed as length / unit, and multiplied by the constant again, 8
    elements of 16 bits are one access for every multiple of 8.
    """
    return math.gcd(length, 8)


@triton.jit
def welford(x, inside, mean, m2, reciprocal):
    """Mean and sum of squared deviations of a lane with one more element; ``reciprocal`` is of their number."""
    delta = tl.where(inside, x - mean, 0.0)
    mean += delta * reciprocal
    return mean, m2 + delta * (x - mean)


@triton.jit
def merge(count, mean, m2, AXIS: tl.constexpr):
    """(mean, sum of squared deviations) of the union along AXIS (Chan); a part of no elements may hold anything finite.

    No elements at all have the mean 0. The mean is taken twice, the second time of what is left over: a large one
    would lose digits in the sum.
    """
    total = tl.maximum(tl.sum(count, AXIS), 1.0)
    mean_all = tl.sum(count * mean, AXIS) / total
    mean_all += tl.sum(count * (mean - tl.expand_dims(mean_all, AXIS)), AXIS) / total
    deviation = mean - tl.expand_dims(mean_all, AXIS)
    return mean_all, tl.sum(m2 + count * deviation * deviation, AXIS)


@triton.jit
def _sum_rows(
    first_ptr, second_ptr, partial_ptr, rows, n,
    ACC: tl.constexpr, INDEX: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """first[n] = the sum of partial[0] over its rows, second[n] of partial[1], always in the same order."""
    blocks = tl.cdiv(n, COLUMNS)
    which = tl.program_id(0) // blocks
    column = (tl.program_id(0) % blocks).to(INDEX) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.full((ROWS, COLUMNS), 0.0, ACC)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < n)[None, :]
        offset = (which.to(INDEX) * rows + row)[:, None] * n + column[None, :]
        total += tl.load(partial_ptr + offset, mask=inside, other=0.0)
    result = tl.sum(total, 0).to(first_ptr.dtype.element_ty)
    if which == 0:
        tl.store(first_ptr + column, result, mask=column < n)
    elif second_ptr is not None:
        tl.store(second_ptr + column, result, mask=column < n)


@lru_cache(KEPT)
def _sum_launch(shape: tuple[int, int, int], dtype: torch.dtype, partial_dtype: torch.dtype) -> Launch:
    outputs, rows, n = shape
    tiles = SUM_TILES_OF_MANY_ROWS | SUM_TILES if rows > FEW_ROWS else SUM_TILES
    most_rows, columns, warps = next(tile for most, tile in tiles.items() if n <= most)
    tile_rows = min(triton.next_power_of_2(rows), most_rows)
    constants = (accumulator(partial_dtype)[0], index_type(math.prod(shape)), tile_rows, columns)
    return Launch(_sum_rows, outputs * cdiv(n, columns), (rows, n), constants, warps)


def sum_rows(partial: Tensor, first: Tensor, second: Tensor | None = None) -> None:
    """first = partial[0].sum(0), second = partial[1].sum(0), for a contiguous partial of one or two such halves."""
    shape = partial.shape
    _sum_launch((shape[0], shape[1], shape[2]), first.dtype, partial.dtype)(first, second, partial)


@lru_cache(KEPT)
def sum_of_rows(rows: int, result: Result, device: torch.device) -> Producer:
    """The kernel that adds up the rows of a partial sum in float32, each as large as the contiguous result."""
    n = math.prod(result.sizes)
    launch = _sum_launch((1, rows, n), result.dtype, torch.float32)
    return Producer("sum_rows", launch, (result,), device, absent=(1,))

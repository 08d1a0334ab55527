"""Sums of each channel over space, in one pass, for tensors that are [outer, space, columns] in memory.

Channels that come last are the columns; others are outside, and columns is 1.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlayers.kernels.flat import WARPS, shares
from fastlayers.kernels.indexing import index_type
from fastlayers.kernels.launch import KEPT, Launch, cdiv
from fastlayers.kernels.reductions import accumulator

#: (outer, space, columns)
Sizes = tuple[int, int, int]

# Elements of a program's tile: positions x columns. 64 columns are 128 contiguous bytes of 16-bit elements.
TILE, COLUMNS = 2048, 64


@triton.jit
def _spatial_sum(
    partial_ptr, x_ptr, y_ptr, space, columns, chunks, chunk, sums, factor: tl.float64, BOTH: tl.constexpr,
    ACC: tl.constexpr, INDEX: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums of x·factor, or of x·y if y_ptr is given, over ``chunk`` positions to partial[outer, chunk, column].

    With BOTH those of x follow, ``sums`` further on.
    """
    blocks = tl.cdiv(columns, COLUMNS)
    program = tl.program_id(0).to(INDEX)
    part = program // blocks  # = outer * chunks + index of the chunk
    outer = part // chunks
    column = program % blocks * COLUMNS + tl.arange(0, COLUMNS)
    start = part % chunks * chunk
    stop = tl.minimum(start + chunk, space)
    total = tl.full((ROWS, COLUMNS), 0.0, ACC)
    plain = tl.full((ROWS, COLUMNS), 0.0, ACC)
    for first in range(start, stop, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < stop)[:, None] & (column < columns)[None, :]
        offset = (outer * space + row)[:, None] * columns + column[None, :]
        x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(ACC)
        if y_ptr is not None:
            total += x * tl.load(y_ptr + offset, mask=inside, other=0.0).to(ACC)
        else:
            total += x * tl.full((), factor, ACC)
        if BOTH:
            plain += x
    place = part * columns + column
    tl.store(partial_ptr + place, tl.sum(total, 0), mask=column < columns)
    if BOTH:
        tl.store(partial_ptr + (place + sums), tl.sum(plain, 0), mask=column < columns)


def tile_of(space: int, columns: int) -> tuple[int, int]:
    """Positions and columns of a tile."""
    wide = 1 if columns == 1 else COLUMNS
    return min(TILE // wide, triton.next_power_of_2(space)), wide


@lru_cache(KEPT)
def _launch(
    sizes: Sizes, factor: float, both: bool, dtypes: tuple[torch.dtype | None, ...], device: torch.device
) -> tuple[Launch, int]:
    """The launch, and the number of chunks. ``dtypes`` are of x and y."""
    outer, space, columns = sizes
    rows, wide = tile_of(space, columns)
    blocks = cdiv(columns, wide)
    chunks, chunk = shares(space, rows, outer * blocks, device)
    assert dtypes[0] is not None
    constants = (both, accumulator(dtypes[0])[0], index_type(outer * space * columns), rows, wide)
    arguments = (space, columns, chunks, chunk, outer * chunks * columns, float(factor))
    return Launch(_spatial_sum, outer * chunks * blocks, arguments, constants, WARPS), chunks


def partial_sums(x: Tensor, y: Tensor | None, sizes: Sizes, factor: float = 1.0, both: bool = False) -> Tensor:
    """Sums over chunks of space of x·factor or of x·y, for a y that lies as x does: [1, outer, chunk, column].

    With ``both`` [2, ...]: those of x as well.
    """
    launch, chunks = _launch(sizes, factor, both, (x.dtype, None if y is None else y.dtype), x.device)
    partial = torch.empty((1 + both, sizes[0], chunks, sizes[2]), dtype=accumulator(x.dtype)[1], device=x.device)
    launch(partial, x, y)
    return partial

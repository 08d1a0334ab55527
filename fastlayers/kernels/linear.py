"""The sums of a matrix over its rows: the gradient of a linear layer's bias.

torch's reduction reads such a matrix at a fifth to a quarter of the memory bandwidth. Here it is one pass: program = a
block of columns of a chunk of the rows. It leaves sums of a few rows that a second, small kernel adds up.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlayers.kernels.indexing import index_type
from fastlayers.kernels.launch import KEPT, Launch, cdiv, multiprocessors
from fastlayers.kernels.reductions import accumulator, sum_rows

# 128 columns a program, 32 rows at a time; the rows are shared among so many programs that there are at least four for
# each multiprocessor.
COLUMNS, ROWS, WARPS, PROGRAMS_PER_MULTIPROCESSOR = 128, 32, 4, 4


@triton.jit
def _column_sum(
    partial_ptr, x_ptr, rows, n, chunk,
    ACC: tl.constexpr, INDEX: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """partial[chunk, column] = the sum of ``chunk`` rows of COLUMNS columns of x."""
    blocks = tl.cdiv(n, COLUMNS)
    program = tl.program_id(0).to(INDEX)
    part = program // blocks
    column = program % blocks * COLUMNS + tl.arange(0, COLUMNS)
    start = part * chunk
    stop = tl.minimum(start + chunk, rows)
    total = tl.full((ROWS, COLUMNS), 0.0, ACC)
    for begin in range(start, stop, ROWS):
        row = begin + tl.arange(0, ROWS)
        inside = (row < stop)[:, None] & (column < n)[None, :]
        total += tl.load(x_ptr + row[:, None] * n + column[None, :], mask=inside, other=0.0).to(ACC)
    tl.store(partial_ptr + part * n + column, tl.sum(total, 0), mask=column < n)


@lru_cache(KEPT)
def _launch(rows: int, n: int, dtype: torch.dtype, device: torch.device) -> tuple[Launch, int]:
    """The launch, and its number of chunks."""
    blocks = cdiv(n, COLUMNS)
    wanted = cdiv(PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(device), blocks)
    chunk = cdiv(cdiv(rows, wanted), ROWS) * ROWS
    chunks = cdiv(rows, chunk)
    tile_rows = ROWS // 2 if dtype == torch.float64 else ROWS
    constants = (accumulator(dtype)[0], index_type(rows * n), tile_rows, COLUMNS)
    return Launch(_column_sum, blocks * chunks, (rows, n, chunk), constants, WARPS), chunks


def column_sum(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.sum(0) of a contiguous matrix, added up in float32 or float64, and given in x's dtype or in float32."""
    rows, n = x.shape
    sums = torch.empty(n, dtype=dtype, device=x.device)
    if x.numel() == 0:
        return sums.zero_()
    launch, chunks = _launch(rows, n, x.dtype, x.device)
    partial = torch.empty((1, chunks, n), dtype=accumulator(x.dtype)[1], device=x.device)
    launch(partial, x)
    sum_rows(partial, sums)
    return sums

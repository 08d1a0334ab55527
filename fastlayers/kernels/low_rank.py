"""Products of a matrix of 16 bits with a thin one, and their sums: what adapters such as LoRA compute.

For ``y = x·Wᵀ + s·(x·Aᵀ)·Bᵀ`` and its gradients torch reads and writes matrices as large as x and y several times:
casts to the float32 of A and B, scaled copies, sums. Here each thin product reads its large factor once, as it is, and
a product of two thin factors is added where the result lies.

A thin factor of float32 beside one of 16 bits is multiplied as a sum of three numbers of 16 bits, which together have
all of its digits: the products are exact, as those of float32 are, on tensor cores of 16 bits.

rows      factor·x·t for x (R, C) and t (C, r): program = a block of rows of a chunk of the columns.
columns   factor·xᵀ·t for x (R, C) and t (R, r): program = a block of columns of a chunk of the rows.
          The partial sums of the chunks are added up in a fixed order.
wide      factor·u·b + bias + base for u (R, r) and b (r, C): program = a tile of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlayers.kernels.indexing import extent, index_type
from fastlayers.kernels.launch import KEPT, Launch, cdiv, multiprocessors
from fastlayers.kernels.reductions import sum_rows

#: Columns of the smallest tile of tensor cores. The largest one, ops.low_rank.LARGEST_RANK, has as many as an
#: accumulator of a block of rows has registers for.
LEAST_RANK = 16
#: Ranks that a program of `wide` has in registers at once: several thin products may be one.
MOST_AT_ONCE = 16
#: Programs for each multiprocessor, for which long rows and columns are cut into chunks.
PROGRAMS_PER_MULTIPROCESSOR = 4

# -------------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def _dot(x, t, total, SPLIT: tl.constexpr):
    """total + x·t for x of 16 bits and t of float32. SPLIT: x is of bfloat16, which has its range."""
    if SPLIT:
        high = t.to(x.dtype)
        rest = t - high.to(tl.float32)
        middle = rest.to(x.dtype)
        low = (rest - middle.to(tl.float32)).to(x.dtype)
        total = tl.dot(x, low, total)
        total = tl.dot(x, middle, total)
        return tl.dot(x, high, total)
    return tl.dot(x.to(tl.float32), t, total, input_precision="tf32x3")


@triton.jit
def _rows(
    out_ptr, x_ptr, t_ptr, factor: tl.float64, rows, columns, rank, chunk, x_row, t_column, t_rank, out_row, out_rank,
    INDEX: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(rows, ROWS)
    program = tl.program_id(0).to(INDEX)
    part = program // blocks
    row = program % blocks * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, RANK)
    start = part * chunk
    stop = tl.minimum(start + chunk, columns)
    total = tl.full((ROWS, RANK), 0.0, tl.float32)
    for begin in range(start, stop, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        inside = column < stop
        x = tl.load(
            x_ptr + row[:, None] * x_row + column[None, :], mask=(row < rows)[:, None] & inside[None, :], other=0.0
        )
        t = tl.load(
            t_ptr + column[:, None] * t_column + j[None, :] * t_rank,
            mask=inside[:, None] & (j < rank)[None, :], other=0.0,
        )  # fmt: skip
        total = _dot(x, t, total, SPLIT)
    out = out_ptr + part * rows * rank + row[:, None] * out_row + j[None, :] * out_rank
    tl.store(out, total * factor, mask=(row < rows)[:, None] & (j < rank)[None, :])


@triton.jit
def _columns(
    partial_ptr, x_ptr, t_ptr, factor: tl.float64, rows, columns, rank, chunk, x_row, t_row, t_rank, out_column,
    out_rank,
    INDEX: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(columns, COLUMNS)
    program = tl.program_id(0).to(INDEX)
    part = program // blocks
    column = program % blocks * COLUMNS + tl.arange(0, COLUMNS)
    j = tl.arange(0, RANK)
    start = part * chunk
    stop = tl.minimum(start + chunk, rows)
    total = tl.full((COLUMNS, RANK), 0.0, tl.float32)
    for begin in range(start, stop, ROWS):
        row = begin + tl.arange(0, ROWS)
        inside = row < stop
        x = tl.load(
            x_ptr + row[:, None] * x_row + column[None, :],
            mask=inside[:, None] & (column < columns)[None, :], other=0.0,
        )  # fmt: skip
        t = tl.load(
            t_ptr + row[:, None] * t_row + j[None, :] * t_rank, mask=inside[:, None] & (j < rank)[None, :], other=0.0
        )
        total = _dot(tl.trans(x), t, total, SPLIT)
    out = partial_ptr + part * columns * rank + column[:, None] * out_column + j[None, :] * out_rank
    tl.store(out, total * factor, mask=(column < columns)[:, None] & (j < rank)[None, :])


@triton.jit
def _wide(
    y_ptr, u_ptr, b_ptr, bias_ptr, base_ptr, factor: tl.float64, rows, columns, rank, u_row, u_rank, b_rank, b_column,
    INDEX: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(columns, COLUMNS)
    program = tl.program_id(0).to(INDEX)
    row = program // blocks * ROWS + tl.arange(0, ROWS)
    column = program % blocks * COLUMNS + tl.arange(0, COLUMNS)
    y = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    for begin in range(0, rank, RANK):
        j = begin + tl.arange(0, RANK)
        u = tl.load(
            u_ptr + row[:, None] * u_row + j[None, :] * u_rank,
            mask=(row < rows)[:, None] & (j < rank)[None, :], other=0.0,
        )  # fmt: skip
        b = tl.load(
            b_ptr + j[:, None] * b_rank + column[None, :] * b_column,
            mask=(j < rank)[:, None] & (column < columns)[None, :], other=0.0,
        )  # fmt: skip
        if SPLIT:  # As two numbers of 16 bits each: the error is 2**-16, and the result is rounded to 8 bits.
            u_high, b_high = u.to(tl.bfloat16), b.to(tl.bfloat16)
            y = tl.dot((u - u_high.to(tl.float32)).to(tl.bfloat16), b_high, y)
            y = tl.dot(u_high, (b - b_high.to(tl.float32)).to(tl.bfloat16), y)
            y = tl.dot(u_high, b_high, y)
        else:
            y = tl.dot(u, b, y, input_precision="tf32x3")
    y *= factor
    if bias_ptr is not None:
        y += tl.load(bias_ptr + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None] * columns + column[None, :]
    if base_ptr is not None:
        y += tl.load(base_ptr + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=inside)


#: Rows and columns of a tile, and warps of a program.
BLOCKS: dict[Any, tuple[int, int]] = {_rows: (64, 128), _columns: (64, 64), _wide: (64, 128)}
WARPS: dict[Any, int] = {_rows: 4, _columns: 4, _wide: 4}

# ------------------------------------------------------------------------------------------------------------- launches


def _padded(rank: int) -> int:
    return max(LEAST_RANK, triton.next_power_of_2(rank))


@lru_cache(KEPT)
def _thin_launch(
    function: Any, factor: float, shape: tuple[int, int, int], strides: tuple[int, ...], dtype: torch.dtype,
    device: torch.device,
) -> tuple[Launch, int]:  # fmt: skip
    """The launch of ``_rows`` or ``_columns``, and the number of its partial sums."""
    rows, columns, rank = shape
    (block_rows, block_columns), warps = BLOCKS[function], WARPS[function]
    along, across = (columns, rows) if function is _rows else (rows, columns)
    step, block = (block_columns, block_rows) if function is _rows else (block_rows, block_columns)
    blocks = cdiv(across, block)
    wanted = cdiv(PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(device), blocks)
    chunk = cdiv(cdiv(along, wanted), step) * step
    chunks = cdiv(along, chunk)
    x_row, t_along, t_rank, *_ = strides
    reach = max(
        extent((rows, columns), (x_row, 1)), extent((along, rank), (t_along, t_rank)), chunks * across * rank,
        along + chunk,
    )  # fmt: skip
    constants = (index_type(reach), block_rows, block_columns, _padded(rank), dtype is torch.bfloat16)
    return Launch(function, blocks * chunks, (factor, *shape, chunk, *strides), constants, warps), chunks


@lru_cache(KEPT)
def _wide_launch(
    factor: float, shape: tuple[int, int, int], strides: tuple[int, ...], dtypes: tuple[torch.dtype | None, ...]
) -> Launch:
    """``dtypes`` are those of y, the factors, the bias and the base."""
    rows, columns, rank = shape
    u_row, u_rank, b_rank, b_column = strides
    reach = max(
        rows * columns, extent((rows, rank), (u_row, u_rank)), extent((rank, columns), (b_rank, b_column))
    )  # fmt: skip
    block_rows, block_columns = BLOCKS[_wide]
    split = dtypes[0] is torch.bfloat16 and dtypes[1] is torch.float32
    constants = (index_type(reach), block_rows, block_columns, min(_padded(rank), MOST_AT_ONCE), split)
    programs = cdiv(rows, block_rows) * cdiv(columns, block_columns)
    return Launch(_wide, programs, (factor, *shape, *strides), constants, WARPS[_wide])


# ------------------------------------------------------------------------------------------------------------ functions


def thin_product(a: Tensor, b: Tensor, factor: float) -> Tensor:
    """``factor * a @ b`` in float32, of a matrix of 16 bits, whose rows or columns are of neighbouring elements, and a
    thin one of float32, either of which comes first."""
    out = torch.empty((a.shape[0], b.shape[1]), dtype=torch.float32, device=a.device)
    x, t, y = (a, b, out) if b.dtype is torch.float32 else (b.t(), a.t(), out.t())
    function: Any = _rows
    if x.stride(1) != 1:
        function, x = _columns, x.t()
    shape, strides = (*x.shape, t.shape[1]), (x.stride(0), *t.stride(), *y.stride())
    launch, chunks = _thin_launch(function, factor, shape, strides, x.dtype, x.device)  # type: ignore[arg-type]
    if chunks == 1:
        launch(out, x, t)
        return out
    partial = torch.empty((1, chunks, out.numel()), dtype=torch.float32, device=x.device)
    launch(partial, x, t)
    sum_rows(partial, out.view(-1))
    return out


def wide_product(
    u: Tensor, b: Tensor, factor: float, dtype: torch.dtype, bias: Tensor | None = None, base: Tensor | None = None
) -> Tensor:
    """``factor * u @ b + bias + base`` of two thin matrices of one dtype, rounded once to ``dtype``.

    Args:
        bias, base: one number for each column, one for each element; contiguous.
    """
    y = torch.empty((u.shape[0], b.shape[1]), dtype=dtype, device=u.device)
    shape, strides = (*y.shape, u.shape[1]), (*u.stride(), *b.stride())
    dtypes = (dtype, u.dtype, *(None if t is None else t.dtype for t in (bias, base)))
    _wide_launch(factor, shape, strides, dtypes)(y, u, b, bias, base)  # type: ignore[arg-type]
    return y


def sum_of_products(products: Sequence[Sequence[Tensor]], thin: Sequence[tuple[Tensor, Tensor, float]]) -> Tensor:
    """The sum of ``a @ b`` and of ``factor * u @ b`` in one memory, rounded to its 16 bits after each product.

    The thin ones come first: cuBLAS adds to what is there while it computes, and a pass only writes.

    Args:
        products: pairs of a and b; the first one may have a bias before them.
        thin: u, b and factor, where u has few columns.
    """
    *bias, a, _ = products[0]
    (u, b, factor), *others = thin
    if others:
        u = torch.cat([u if factor == 1 else u * factor for u, _, factor in thin], 1)
        b, factor = torch.cat([b for _, b, _ in thin]), 1.0
    y = wide_product(u, b, factor, a.dtype, bias[0] if bias else None)
    for *_, a, b in products:
        y.addmm_(a, b)
    return y

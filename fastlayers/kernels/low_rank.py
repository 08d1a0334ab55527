"""Products of a matrix of 16 bits with a thin one, and their sums: what adapters such as LoRA compute.

For ``y = x·Wᵀ + s·(x·Aᵀ)·Bᵀ`` and its gradients torch reads and writes matrices as large as x and y several times:
casts to the float32 of A and B, scaled copies, sums. Here each thin product reads its large factor once, as it is, and
a product of two thin factors is added where the result lies.

A thin factor of float32 beside one of 16 bits is multiplied as a sum of three numbers of 16 bits, which together have
all of its digits: the products are exact, as those of float32 are, on tensor cores of 16 bits.

rows      factor·x·t for x (R, C) and t (C, r): program = a block of rows, which it walks along.
columns   factor·xᵀ·t for x (R, C) and t (R, r): program = a block of columns of a chunk of the rows; the partial sums
          of the chunks are added up in a fixed order.
added     y + factor·u·b in the place of y, for u (R, r) and b (r, C): program = a tile of y.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlayers.kernels.indexing import extent, index_type
from fastlayers.kernels.launch import KEPT, Launch, cdiv, multiprocessors
from fastlayers.kernels.reductions import sum_rows

#: Columns of the largest thin factor: as many as an accumulator of a block of rows has registers for.
LARGEST_RANK = 128
#: Columns of the smallest tile of tensor cores.
LEAST_RANK = 16
#: A program of `rows` takes the most rows with which every multiprocessor has one, and 128 columns at a time.
ROWS_BLOCKS, ROWS_COLUMNS, ROWS_WARPS = (64, 32, 16), 128, 4
#: A program of `columns` takes 128 columns, 64 rows at a time; four programs for each multiprocessor.
COLUMNS_COLUMNS, COLUMNS_ROWS, COLUMNS_WARPS, PROGRAMS_PER_MULTIPROCESSOR = 128, 64, 4, 4
#: The tile of y, rows and columns.
ADDED_ROWS, ADDED_COLUMNS, ADDED_WARPS = 64, 128, 4

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
    out_ptr, x_ptr, t_ptr, factor: tl.float64, rows, columns, rank, x_row, t_column, t_rank, out_row, out_rank,
    INDEX: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(INDEX) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, RANK)
    total = tl.full((ROWS, RANK), 0.0, tl.float32)
    for begin in range(0, columns, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        inside = column < columns
        x = tl.load(
            x_ptr + row[:, None] * x_row + column[None, :], mask=(row < rows)[:, None] & inside[None, :], other=0.0
        )
        t = tl.load(
            t_ptr + column[:, None] * t_column + j[None, :] * t_rank,
            mask=inside[:, None] & (j < rank)[None, :], other=0.0,
        )  # fmt: skip
        total = _dot(x, t, total, SPLIT)
    out = out_ptr + row[:, None] * out_row + j[None, :] * out_rank
    total = total * factor
    tl.store(out, total, mask=(row < rows)[:, None] & (j < rank)[None, :])


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
    total = total * factor
    tl.store(out, total, mask=(column < columns)[:, None] & (j < rank)[None, :])


@triton.jit
def _added(
    y_ptr, u_ptr, b_ptr, factor: tl.float64, rows, columns, rank, y_row, u_row, u_rank, b_rank, b_column,
    INDEX: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(columns, COLUMNS)
    program = tl.program_id(0).to(INDEX)
    row = program // blocks * ROWS + tl.arange(0, ROWS)
    column = program % blocks * COLUMNS + tl.arange(0, COLUMNS)
    j = tl.arange(0, RANK)
    u = tl.load(
        u_ptr + row[:, None] * u_row + j[None, :] * u_rank, mask=(row < rows)[:, None] & (j < rank)[None, :], other=0.0
    )
    b = tl.load(
        b_ptr + j[:, None] * b_rank + column[None, :] * b_column,
        mask=(j < rank)[:, None] & (column < columns)[None, :], other=0.0,
    )  # fmt: skip
    y = y_ptr + row[:, None] * y_row + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    product = tl.dot(u, b, input_precision="tf32x3")
    total = tl.load(y, mask=inside, other=0.0).to(tl.float32) + product * factor
    tl.store(y, total.to(y_ptr.dtype.element_ty), mask=inside)


# ------------------------------------------------------------------------------------------------------------- launches


def _padded(rank: int) -> int:
    return max(LEAST_RANK, triton.next_power_of_2(rank))


@lru_cache(KEPT)
def _rows_launch(
    factor: float, shape: tuple[int, int, int], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Launch:  # fmt: skip
    rows, columns, rank = shape
    block = next((b for b in ROWS_BLOCKS if cdiv(rows, b) >= multiprocessors(device)), ROWS_BLOCKS[-1])
    x_row, t_column, t_rank, out_row, out_rank = strides
    reach = max(
        extent((rows, columns), (x_row, 1)), extent((columns, rank), (t_column, t_rank)),
        extent((rows, rank), (out_row, out_rank)),
    )  # fmt: skip
    constants = (index_type(reach), block, ROWS_COLUMNS, _padded(rank), dtype is torch.bfloat16)
    return Launch(_rows, cdiv(rows, block), (factor, *shape, *strides), constants, ROWS_WARPS)


@lru_cache(KEPT)
def _columns_launch(
    factor: float, shape: tuple[int, int, int], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Launch, int]:  # fmt: skip
    """The launch, and its number of chunks."""
    rows, columns, rank = shape
    blocks = cdiv(columns, COLUMNS_COLUMNS)
    wanted = cdiv(PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(device), blocks)
    chunk = cdiv(cdiv(rows, wanted), COLUMNS_ROWS) * COLUMNS_ROWS
    chunks = cdiv(rows, chunk)
    x_row, t_row, t_rank, _, _ = strides
    reach = max(
        extent((rows, columns), (x_row, 1)), extent((rows, rank), (t_row, t_rank)), chunks * columns * rank,
        rows + chunk,
    )  # fmt: skip
    constants = (index_type(reach), COLUMNS_ROWS, COLUMNS_COLUMNS, _padded(rank), dtype is torch.bfloat16)
    return Launch(_columns, blocks * chunks, (factor, *shape, chunk, *strides), constants, COLUMNS_WARPS), chunks


@lru_cache(KEPT)
def _added_launch(
    factor: float, shape: tuple[int, int, int], strides: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype]
) -> Launch:
    """``dtypes`` are those of y and of the factors."""
    rows, columns, rank = shape
    y_row, u_row, u_rank, b_rank, b_column = strides
    reach = max(
        extent((rows, columns), (y_row, 1)), extent((rows, rank), (u_row, u_rank)),
        extent((rank, columns), (b_rank, b_column)),
    )  # fmt: skip
    constants = (index_type(reach), ADDED_ROWS, ADDED_COLUMNS, _padded(rank))
    programs = cdiv(rows, ADDED_ROWS) * cdiv(columns, ADDED_COLUMNS)
    return Launch(_added, programs, (factor, *shape, *strides), constants, ADDED_WARPS)


# ------------------------------------------------------------------------------------------------------------ functions


def thin_product(a: Tensor, b: Tensor, factor: float) -> Tensor:
    """``factor * a @ b`` in float32, of a matrix of 16 bits, whose rows or columns are of neighbouring elements, and a
    thin one of float32, either of which comes first."""
    out = torch.empty((a.shape[0], b.shape[1]), dtype=torch.float32, device=a.device)
    x, t, y = (a, b, out) if b.dtype is torch.float32 else (b.t(), a.t(), out.t())
    along = x.stride(1) == 1
    x = x if along else x.t()
    shape, strides = (*x.shape, t.shape[1]), (x.stride(0), *t.stride(), *y.stride())
    if along:
        _rows_launch(factor, shape, strides, x.dtype, x.device)(out, x, t)  # type: ignore[arg-type]
        return out
    launch, chunks = _columns_launch(factor, shape, strides, x.dtype, x.device)  # type: ignore[arg-type]
    partial = torch.empty((1, chunks, out.numel()), dtype=torch.float32, device=x.device)
    launch(partial, x, t)
    sum_rows(partial, out.view(-1))
    return out


def add_product_(y: Tensor, u: Tensor, b: Tensor, factor: float) -> None:
    """``y += factor * u @ b`` in place, rounded once, for rows of neighbouring elements and thin factors of one
    dtype."""
    shape, strides = (*y.shape, u.shape[1]), (y.stride(0), *u.stride(), *b.stride())
    _added_launch(factor, shape, strides, (y.dtype, u.dtype))(y, u, b)  # type: ignore[arg-type]


def sum_of_products(products: Sequence[Sequence[Tensor]], thin: Sequence[tuple[Tensor, Tensor, float]]) -> Tensor:
    """The sum of ``a @ b`` and of ``factor * u @ b`` in one memory, rounded to its 16 bits after each product.

    Args:
        products: pairs of a and b; the first one may have a bias before them.
        thin: u, b and factor, where u has few columns.
    """
    first, *others = products
    y = torch.addmm(*first) if len(first) == 3 else torch.mm(*first)
    for a, b in others:
        y.addmm_(a, b)
    if len(thin) > 1:  # One pass over y for all of them.
        us = [u if factor == 1 else u * factor for u, _, factor in thin]
        thin = [(torch.cat(us, 1), torch.cat([b for _, b, _ in thin]), 1.0)]
    for u, b, factor in thin:
        add_product_(y, u, b, factor)
    return y

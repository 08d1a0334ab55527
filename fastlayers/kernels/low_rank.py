"""Products of a matrix of 16 bits with a thin one, and their sums: what adapters such as LoRA compute.

For ``y = x·Wᵀ + s·(x·Aᵀ)·Bᵀ`` and its gradients torch reads and writes matrices as large as x and y several times:
casts to the float32 of A and B, scaled copies, sums. Here each thin product reads its large factor once, as it is, and
a product of two thin factors is added where the result lies.

A thin factor of float32 beside one of 16 bits is multiplied as a sum of three numbers of 16 bits, which together have
all of its digits: the products are exact, as those of float32 are, on tensor cores of 16 bits.

Dropout before an adapter is a mask beside x, of a byte for each element: a thin product reads both and takes 0 for what
is dropped, and the product that adds to the gradient of x writes 0 there.

rows      factor·(x∘mask)·t for x (R, C) and t (C, r): program = a block of rows of a chunk of the columns.
columns   factor·(x∘mask)ᵀ·t for x (R, C) and t (R, r): program = a block of columns of a chunk of the rows.
          Both for up to three t, each with a mask, in one pass over x: the query, key and value layers read one input.
          The partial sums of the chunks are added up in a fixed order.
wide      factor·u·b + bias + base for u (R, r) and b (r, C): program = a tile of the result.
          wide_masked: factor·Σ mask∘(u·b) + bias + base for up to three u and b, each with a mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
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
#: Thin factors or masks of one launch: the query, key and value layers read one input.
MOST_PARTS = 3
#: Ranks of the thin factors of one launch, of more than one.
MOST_RANKS = 128
#: Elements of t that a thin product takes at once, and of several t together. Tiles of it are loaded ahead, which takes
#: at most 77 KiB of shared memory. With 128 rows of t whatever the rank, one of 128 would need 272 KiB, more than any
#: GPU has.
LARGEST_STEP, LARGEST_STEP_TOGETHER = 2048, 4096
#: Programs for each multiprocessor, for which long rows and columns are cut into chunks.
PROGRAMS_PER_MULTIPROCESSOR = 4

# -------------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def _dot(x, t, total, SPLIT: tl.constexpr):
    """total + x·t for x of 16 bits and t of these or float32. SPLIT: x is of bfloat16, which has the range of t."""
    if x.dtype == t.dtype:
        total = tl.dot(x, t, total)
    elif SPLIT:
        high = t.to(x.dtype)
        rest = t - high.to(tl.float32)
        middle = rest.to(x.dtype)
        low = (rest - middle.to(tl.float32)).to(x.dtype)
        total = tl.dot(x, low, total)
        total = tl.dot(x, middle, total)
        total = tl.dot(x, high, total)
    else:
        total = tl.dot(x.to(tl.float32), t, total, input_precision="tf32x3")
    return total


@triton.jit
def _kept(x, mask_ptr, place, inside):
    """x·mask: of infinity and 0 it is NaN, as it is for torch."""
    return x * tl.load(mask_ptr + place, mask=inside, other=0).to(x.dtype)


@triton.jit
def _thin(x, mask_ptr, place, inside, t_ptr, place_of_t, inside_of_t, total, SPLIT: tl.constexpr):
    """total + (x∘mask)·t."""
    if mask_ptr is not None:
        x = _kept(x, mask_ptr, place, inside)
    return _dot(x, tl.load(t_ptr + place_of_t, mask=inside_of_t, other=0.0), total, SPLIT)


@triton.jit
def _rows(
    out_ptr, x_ptr, t_ptr, t1_ptr, t2_ptr, mask_ptr, mask1_ptr, mask2_ptr, factor: tl.float64, rows, columns, rank,
    chunk, parts, x_row, t_column, t_rank, out_row, out_rank,
    INDEX: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(rows, ROWS)
    program = tl.program_id(0).to(INDEX)
    first = program // blocks
    row = program % blocks * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, RANK)
    start = first * chunk
    stop = tl.minimum(start + chunk, columns)
    total = tl.full((ROWS, RANK), 0.0, tl.float32)
    total1, total2 = total, total
    for begin in range(start, stop, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        place = row[:, None] * x_row + column[None, :]
        inside = (row < rows)[:, None] & (column < stop)[None, :]
        of_t = column[:, None] * t_column + j[None, :] * t_rank
        inside_of_t = (column < stop)[:, None] & (j < rank)[None, :]
        x = tl.load(x_ptr + place, mask=inside, other=0.0)
        total = _thin(x, mask_ptr, place, inside, t_ptr, of_t, inside_of_t, total, SPLIT)
        if t1_ptr is not None:
            total1 = _thin(x, mask1_ptr, place, inside, t1_ptr, of_t, inside_of_t, total1, SPLIT)
        if t2_ptr is not None:
            total2 = _thin(x, mask2_ptr, place, inside, t2_ptr, of_t, inside_of_t, total2, SPLIT)
    size = tl.cast(rows, INDEX) * rank
    out_ptr += first * parts * size + row[:, None] * out_row + j[None, :] * out_rank
    _store_thin(out_ptr, t1_ptr, t2_ptr, total, total1, total2, factor, size, row < rows, j < rank)


@triton.jit
def _columns(
    out_ptr, x_ptr, t_ptr, t1_ptr, t2_ptr, mask_ptr, mask1_ptr, mask2_ptr, factor: tl.float64, rows, columns, rank,
    chunk, parts, x_row, t_row, t_rank, out_column, out_rank,
    INDEX: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(columns, COLUMNS)
    program = tl.program_id(0).to(INDEX)
    first = program // blocks
    column = program % blocks * COLUMNS + tl.arange(0, COLUMNS)
    j = tl.arange(0, RANK)
    start = first * chunk
    stop = tl.minimum(start + chunk, rows)
    total = tl.full((COLUMNS, RANK), 0.0, tl.float32)
    total1, total2 = total, total
    for begin in range(start, stop, ROWS):
        row = begin + tl.arange(0, ROWS)
        # A transposed tile, not the transpose of one: with a mask the compiler would not load ahead.
        place = column[:, None] + row[None, :] * x_row
        inside = (column < columns)[:, None] & (row < stop)[None, :]
        of_t = row[:, None] * t_row + j[None, :] * t_rank
        inside_of_t = (row < stop)[:, None] & (j < rank)[None, :]
        x = tl.load(x_ptr + place, mask=inside, other=0.0)
        total = _thin(x, mask_ptr, place, inside, t_ptr, of_t, inside_of_t, total, SPLIT)
        if t1_ptr is not None:
            total1 = _thin(x, mask1_ptr, place, inside, t1_ptr, of_t, inside_of_t, total1, SPLIT)
        if t2_ptr is not None:
            total2 = _thin(x, mask2_ptr, place, inside, t2_ptr, of_t, inside_of_t, total2, SPLIT)
    size = tl.cast(columns, INDEX) * rank
    out_ptr += first * parts * size + column[:, None] * out_column + j[None, :] * out_rank
    _store_thin(out_ptr, t1_ptr, t2_ptr, total, total1, total2, factor, size, column < columns, j < rank)


@triton.jit
def _store_thin(out_ptr, t1_ptr, t2_ptr, total, total1, total2, factor, size, inside, inside_rank):
    """The products, each ``size`` elements after the one before."""
    mask = inside[:, None] & inside_rank[None, :]
    tl.store(out_ptr, total * factor, mask=mask)
    if t1_ptr is not None:
        tl.store(out_ptr + size, total1 * factor, mask=mask)
    if t2_ptr is not None:
        tl.store(out_ptr + 2 * size, total2 * factor, mask=mask)


@triton.jit
def _thin_dot(u_ptr, b_ptr, y, row, column, j, rows, columns, rank, u_row, u_rank, b_rank, b_column, SPLIT):
    """y + u·b for the ranks j."""
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
    return y


@triton.jit
def _store_wide(y_ptr, y, bias_ptr, base_ptr, factor, row, column, rows, columns):
    """factor·y + bias + base, in the dtype of the result."""
    y *= factor
    if bias_ptr is not None:
        y += tl.load(bias_ptr + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None] * columns + column[None, :]
    if base_ptr is not None:
        y += tl.load(base_ptr + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _tile(columns, INDEX: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The rows and columns of a program's tile."""
    blocks = tl.cdiv(columns, COLUMNS)
    program = tl.program_id(0).to(INDEX)
    return program // blocks * ROWS + tl.arange(0, ROWS), program % blocks * COLUMNS + tl.arange(0, COLUMNS)


@triton.jit
def _wide(
    y_ptr, u_ptr, b_ptr, bias_ptr, base_ptr, factor: tl.float64, rows, columns, rank, u_row, u_rank, b_rank, b_column,
    INDEX: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    row, column = _tile(columns, INDEX, ROWS, COLUMNS)
    y = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    for begin in range(0, rank, RANK):
        j = begin + tl.arange(0, RANK)
        y = _thin_dot(u_ptr, b_ptr, y, row, column, j, rows, columns, rank, u_row, u_rank, b_rank, b_column, SPLIT)
    _store_wide(y_ptr, y, bias_ptr, base_ptr, factor, row, column, rows, columns)


@triton.jit
def _wide_masked(
    y_ptr, u_ptr, b_ptr, bias_ptr, base_ptr, mask_ptr, mask1_ptr, mask2_ptr, factor: tl.float64, rows, columns, rank,
    u_row, u_rank, b_rank, b_column, parts,
    INDEX: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr, SPLIT: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    row, column = _tile(columns, INDEX, ROWS, COLUMNS)
    y = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    for part in range(0, parts):  # Of three in a row the compiler would keep all masks in registers.
        mask = mask_ptr
        if part == 1:
            mask = mask1_ptr
        if part == 2:
            mask = mask2_ptr
        u, b = u_ptr + part * rank * u_rank, b_ptr + part * rank * b_rank
        term = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
        for chunk in tl.static_range(CHUNKS):
            j = chunk * RANK + tl.arange(0, RANK)
            term = _thin_dot(u, b, term, row, column, j, rows, columns, rank, u_row, u_rank, b_rank, b_column, SPLIT)
        place = row[:, None] * columns + column[None, :]
        y += _kept(term, mask, place, (row < rows)[:, None] & (column < columns)[None, :])
    _store_wide(y_ptr, y, bias_ptr, base_ptr, factor, row, column, rows, columns)


#: Rows and columns of a tile, and warps of a program.
BLOCKS: dict[Any, tuple[int, int]] = {_rows: (64, 128), _columns: (64, 64), _wide: (64, 128), _wide_masked: (64, 64)}
WARPS: dict[Any, int] = {_rows: 4, _columns: 4, _wide: 4, _wide_masked: 4}

# ------------------------------------------------------------------------------------------------------------- launches


def _padded(rank: int) -> int:
    return max(LEAST_RANK, triton.next_power_of_2(rank))


@lru_cache(KEPT)
def _thin_launch(
    function: Any, factor: float, shape: tuple[int, int, int], parts: int, strides: tuple[int, ...],
    dtypes: tuple[torch.dtype, torch.dtype], device: torch.device,
) -> tuple[Launch, int]:  # fmt: skip
    """The launch of ``_rows`` or ``_columns``, and the number of its partial sums. ``dtypes`` are those of x and t."""
    rows, columns, rank = shape
    (block_rows, block_columns), warps = BLOCKS[function], WARPS[function]
    along_rows = function is _columns
    along, across = (rows, columns) if along_rows else (columns, rows)
    most = LARGEST_STEP_TOGETHER // triton.next_power_of_2(parts) if parts > 1 else LARGEST_STEP
    if along_rows:
        block_rows = min(block_rows, most // _padded(rank))
    else:
        block_columns = min(block_columns, most // _padded(rank))
    step, block = (block_rows, block_columns) if along_rows else (block_columns, block_rows)
    blocks = cdiv(across, block)
    wanted = cdiv(PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(device), blocks)
    chunk = cdiv(cdiv(along, wanted), step) * step
    chunks = cdiv(along, chunk)
    x_row, t_along, t_rank, *_ = strides
    reach = max(
        extent((rows, columns), (x_row, 1)), extent((along, rank), (t_along, t_rank)),
        chunks * parts * across * rank, along + chunk,
    )  # fmt: skip
    constants = (index_type(reach), block_rows, block_columns, _padded(rank), dtypes[0] is torch.bfloat16)
    return Launch(function, blocks * chunks, (factor, *shape, chunk, parts, *strides), constants, warps), chunks


@lru_cache(KEPT)
def _wide_launch(
    factor: float, shape: tuple[int, int, int], strides: tuple[int, ...], dtypes: tuple[torch.dtype | None, ...],
    masks: int,
) -> Launch:  # fmt: skip
    """``dtypes`` are those of y, the factors, the bias and the base."""
    rows, columns, ranks = shape
    u_row, u_rank, b_rank, b_column = strides
    reach = max(
        rows * columns, extent((rows, ranks), (u_row, u_rank)), extent((ranks, columns), (b_rank, b_column))
    )  # fmt: skip
    function: Any = _wide_masked if masks else _wide
    rank = ranks // max(masks, 1)
    block_rows, block_columns = BLOCKS[function]
    split = dtypes[0] is torch.bfloat16 and dtypes[1] is torch.float32
    at_once = min(_padded(rank), MOST_AT_ONCE)
    scalars = (factor, rows, columns, rank, *strides, *((masks,) if masks else ()))
    constants = (index_type(reach), block_rows, block_columns, at_once, split)
    programs = cdiv(rows, block_rows) * cdiv(columns, block_columns)
    chunks = (cdiv(rank, at_once),) if masks else ()
    return Launch(function, programs, scalars, (*constants, *chunks), WARPS[function])


# ------------------------------------------------------------------------------------------------------------ functions


def most_parts(rank: int) -> int:
    """How many thin factors of this rank one pass takes: their sums are in registers."""
    return min(MOST_PARTS, max(1, MOST_RANKS // _padded(rank)))


def thin_product(
    a: Tensor, b: Tensor, factor: float, mask_of_a: Tensor | None = None, mask_of_b: Tensor | None = None
) -> Tensor:
    """``factor * a @ b`` of a matrix of 16 bits, whose rows or columns are of neighbouring elements, and a thin one,
    whose dtype the result has: float32, or that of the large matrix if this one has a mask. Either comes first.

    Args:
        mask_of_a, mask_of_b: which elements of the large matrix are multiplied, the others by 0; bools in its layout.
    """
    if mask_of_b is not None or a.dtype is torch.float32:
        return thin_products(b, (a,), factor, (mask_of_b,), False)[0]
    return thin_products(a, (b,), factor, (mask_of_a,), True)[0]


def thin_products(
    large: Tensor, thin: Sequence[Tensor], factor: float, masks: Sequence[Tensor | None], large_first: bool
) -> tuple[Tensor, ...]:
    """:func:`thin_product` of one large matrix with each of several thin ones, in one pass.

    Args:
        thin: at most :func:`most_parts`, of one layout.
        masks: one for each.
        large_first: whether the large matrix comes first in the products.
    """
    x, ts = (large, thin) if large_first else (large.t(), [t.t() for t in thin])
    rank = ts[0].shape[1]
    shape = (x.shape[0], rank) if large_first else (rank, x.shape[0])
    out = torch.empty((len(ts), *shape), dtype=ts[0].dtype, device=x.device)
    y = out if large_first else out.mT
    masks = [mask if mask is None or large_first else mask.t() for mask in masks]
    function: Any = _rows
    if x.stride(1) != 1:
        function, x, masks = _columns, x.t(), [None if mask is None else mask.t() for mask in masks]
    strides = (x.stride(0), *ts[0].stride(), *y.stride()[1:])
    given = ((*x.shape, rank), len(ts), strides, (x.dtype, ts[0].dtype), x.device)
    launch, chunks = _thin_launch(function, factor, *given)  # type: ignore[arg-type]
    none = [None] * (MOST_PARTS - len(ts))
    bits = [None if mask is None else mask.view(torch.uint8) for mask in masks]
    if chunks == 1:
        launch(out, x, *ts, *none, *bits, *none)
    else:
        partial = torch.empty((1, chunks, out.numel()), dtype=torch.float32, device=x.device)
        launch(partial, x, *ts, *none, *bits, *none)
        sum_rows(partial, out.view(-1))
    return out.unbind()


def wide_product(
    u: Tensor, b: Tensor, factor: float, dtype: torch.dtype, bias: Tensor | None = None, base: Tensor | None = None,
    masks: Sequence[Tensor] = (),
) -> Tensor:  # fmt: skip
    """``factor * u @ b + bias + base`` of two thin matrices of one dtype, rounded once to ``dtype``.

    Args:
        bias, base: one number for each column, one for each element; contiguous.
        masks: as many equal parts has the rank, and of the product of each part those elements count that its mask has;
            contiguous bools, MOST_PARTS at most.
    """
    y = torch.empty((u.shape[0], b.shape[1]), dtype=dtype, device=u.device)
    shape, strides = (*y.shape, u.shape[1]), (*u.stride(), *b.stride())
    dtypes = (dtype, u.dtype, *(None if t is None else t.dtype for t in (bias, base)))
    launch = _wide_launch(factor, shape, strides, dtypes, len(masks))  # type: ignore[arg-type]
    bits = [masks[min(i, len(masks) - 1)].view(torch.uint8) for i in range(MOST_PARTS if masks else 0)]
    launch(y, u, b, bias, base, *bits)
    return y


def sum_of_wide_products(
    terms: Sequence[tuple[Tensor, Tensor, float, Tensor | None]], dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """The sum of ``factor * mask * (u @ b)`` and a bias, rounded to ``dtype`` after each pass.

    Args:
        terms: u, b, factor and a mask, where u has few columns. Those without a mask are one product, those with one
            are MOST_PARTS to a pass if they have the same rank.
        bias: one number for each column.
    """
    y = None
    for some in _passes(terms):
        u, b, factor, _ = some[0]
        if len(some) > 1:
            if len({factor for _, _, factor, _ in some}) > 1:
                some, factor = [(u if factor == 1 else u * factor, b, 1.0, mask) for u, b, factor, mask in some], 1.0
            u, b = torch.cat([u for u, *_ in some], 1), torch.cat([b for _, b, *_ in some])
        y = wide_product(u, b, factor, dtype, bias, y, [mask for *_, mask in some if mask is not None])
        bias = None
    assert y is not None
    return y


def _passes(thin: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """The terms of each pass over the result."""
    plain = [term for term in thin if term[3] is None]
    if plain:
        yield plain
    masked = sorted((term for term in thin if term[3] is not None), key=lambda term: term[0].shape[1])
    for _, same in groupby(masked, lambda term: term[0].shape[1]):
        terms = [*same]
        for start in range(0, len(terms), MOST_PARTS):
            yield terms[start : start + MOST_PARTS]

"""Products of a matrix of 16 bits with a thin one, and their sums: what adapters such as LoRA compute.

For ``y = x·Wᵀ + s·(x·Aᵀ)·Bᵀ`` and its gradients torch reads and writes matrices as large as x and y several times:
casts to the float32 of A and B, scaled copies, sums. Here each thin product reads its large factor once, as it is, and
a product of two thin factors is added where the result lies.

A thin factor of float32 beside one of 16 bits is multiplied as a sum of three numbers of 16 bits, which together have
all of its digits: the products are exact, as those of float32 are, on tensor cores of 16 bits.

Dropout before an adapter is a mask beside x, of a byte for each element: a thin product reads both and takes 0 for what
is dropped, and the product that adds to the gradient of x writes 0 there.

thin      factor·(x∘mask)·t for x (R, C) and t (C, r): program = a block of rows of a chunk of the columns; or
          factor·(x∘mask)ᵀ·t for t (R, r): program = a block of columns of a chunk of the rows.
          For up to three t, each with a mask, in one pass over x: the query, key and value layers read one input.
          The partial sums of the chunks are added up in a fixed order.
wide      factor·u·b + bias + base for u (R, r) and b (r, C): program = a tile of the result.
          wide_masked: factor·Σ mask∘(u·b) + bias + base for up to three u and b, each with a mask.
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
from fastlayers.kernels.launch import KEPT, Launch, Producer, Result, cdiv, multiprocessors
from fastlayers.kernels.reductions import sum_of_rows

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
#: Programs for each multiprocessor, for which long rows and columns are cut into chunks. The product of 8,192 rows of
#: 8,192 bfloat16 with three float32 factors of rank 16 takes 110 us on an H100, 131 with 4 programs; over 208 products
#: with up to three factors of rank 8 to 64 it is 4 % in the mean.
PROGRAMS_PER_MULTIPROCESSOR = 2

# ------------------------------------------------------------------------------------------------------ code of kernels


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
    return x * (tl.load(mask_ptr + place, mask=inside, other=0) != 0).to(x.dtype)


@triton.jit
def _added(x, mask_ptr, place, inside, t_ptr, place_of_t, inside_of_t, total, SPLIT: tl.constexpr):
    """total + (x∘mask)·t."""
    if mask_ptr is not None:
        x = _kept(x, mask_ptr, place, inside)
    return _dot(x, tl.load(t_ptr + place_of_t, mask=inside_of_t, other=0.0), total, SPLIT)


@triton.jit
def _thin(
    out_ptr, x_ptr, t_ptr, t1_ptr, t2_ptr, mask_ptr, mask1_ptr, mask2_ptr, factor: tl.float64, across, along, rank,
    chunk, parts, x_across, x_along, t_along, t_rank, out_across, out_rank,
    INDEX: tl.constexpr, ACROSS: tl.constexpr, ALONG: tl.constexpr, RANK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(across, ACROSS)
    program = tl.program_id(0).to(INDEX)
    first = program // blocks
    i = program % blocks * ACROSS + tl.arange(0, ACROSS)
    j = tl.arange(0, RANK)
    start = first * chunk
    stop = tl.minimum(start + chunk, along)
    total = tl.full((ACROSS, RANK), 0.0, tl.float32)
    total1, total2 = total, total
    for begin in range(start, stop, ALONG):
        k = begin + tl.arange(0, ALONG)
        # Of columns a transposed tile, not the transpose of one: with a mask the compiler would not load ahead.
        place = i[:, None] * x_across + k[None, :] * x_along
        inside = (i < across)[:, None] & (k < stop)[None, :]
        of_t = k[:, None] * t_along + j[None, :] * t_rank
        inside_of_t = (k < stop)[:, None] & (j < rank)[None, :]
        x = tl.load(x_ptr + place, mask=inside, other=0.0)
        total = _added(x, mask_ptr, place, inside, t_ptr, of_t, inside_of_t, total, SPLIT)
        if t1_ptr is not None:
            total1 = _added(x, mask1_ptr, place, inside, t1_ptr, of_t, inside_of_t, total1, SPLIT)
        if t2_ptr is not None:
            total2 = _added(x, mask2_ptr, place, inside, t2_ptr, of_t, inside_of_t, total2, SPLIT)
    size = tl.cast(across, INDEX) * rank  # The products follow each other.
    out_ptr += first * parts * size + i[:, None] * out_across + j[None, :] * out_rank
    of_out = (i < across)[:, None] & (j < rank)[None, :]
    tl.store(out_ptr, total * factor, mask=of_out)
    if t1_ptr is not None:
        tl.store(out_ptr + size, total1 * factor, mask=of_out)
    if t2_ptr is not None:
        tl.store(out_ptr + 2 * size, total2 * factor, mask=of_out)


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


#: Elements of a tile of x across and along the sums of a thin product: of rows, and of columns.
ROWS_BLOCK, COLUMNS_BLOCK = (64, 128), (64, 64)
#: Rows and columns of a tile of a wide one.
WIDE_BLOCKS: dict[Any, tuple[int, int]] = {_wide: (64, 128), _wide_masked: (64, 64)}
WARPS = 4

# -------------------------------------------------------------------------------------------------------------- kernels


def _padded(rank: int) -> int:
    return max(LEAST_RANK, triton.next_power_of_2(rank))


def most_parts(rank: int) -> int:
    """How many thin factors of this rank one pass takes: their sums are in registers."""
    return min(MOST_PARTS, max(1, MOST_RANKS // _padded(rank)))


@lru_cache(KEPT)
def _thin_kernels(
    factor: float, shape: tuple[int, int, int], parts: int, masked: bool, transposed: bool, strides: tuple[int, ...],
    dtypes: tuple[torch.dtype, torch.dtype], device: torch.device,
) -> tuple[Producer, ...]:  # fmt: skip
    """``strides`` and ``dtypes`` are those of x and t; ``transposed``: whether the result is."""
    across, along, rank = shape
    x_across, x_along, t_along, t_rank = strides
    block, longest = ROWS_BLOCK if x_along == 1 else COLUMNS_BLOCK
    most = LARGEST_STEP_TOGETHER // triton.next_power_of_2(parts) if parts > 1 else LARGEST_STEP
    step = min(longest, most // _padded(rank))
    blocks = cdiv(across, block)
    wanted = cdiv(PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(device), blocks)
    chunk = cdiv(cdiv(along, wanted), step) * step
    chunks = cdiv(along, chunk)
    reach = max(
        extent((across, along), (x_across, x_along)), extent((along, rank), (t_along, t_rank)),
        chunks * parts * across * rank, along + chunk,
    )  # fmt: skip
    of_out = (1, across) if transposed else (rank, 1)
    constants = (index_type(reach), block, step, _padded(rank), dtypes[0] is torch.bfloat16)
    launch = Launch(_thin, blocks * chunks, (factor, *shape, chunk, parts, *strides, *of_out), constants, WARPS)
    absent = [2 + i for i in range(parts, MOST_PARTS)]
    absent += [2 + MOST_PARTS + i for i in range(parts if masked else 0, MOST_PARTS)]
    one = (rank, across) if transposed else (across, rank)
    result = Result.contiguous((parts, *one) if parts > 1 else one, dtypes[1])
    name = "thin_products" if parts > 1 else "thin_product"
    if chunks == 1:
        return (Producer(name, launch, (result,), device, absent),)
    partial = Result.contiguous((chunks, parts * across * rank), torch.float32)
    return Producer(name, launch, (partial,), device, absent), sum_of_rows(chunks, result, device)


def thin_kernels(
    large: Tensor, thin: Tensor, parts: int, factor: float, masked: bool, large_first: bool
) -> tuple[Producer, ...]:
    """The kernels of :func:`thin_products` for tensors like these. The first takes the large matrix, the thin ones and
    the masks, a second one what the first has made; the result is (parts, ...), or of one part that one alone."""
    x, t = (large, thin) if large_first else (large.t(), thin.t())
    shape, strides = (*x.shape, t.shape[1]), (*x.stride(), *t.stride())
    given = (shape, parts, masked, not large_first, strides, (x.dtype, t.dtype), x.device)
    return _thin_kernels(factor, *given)  # type: ignore[arg-type]


@lru_cache(KEPT)
def _wide_kernel(
    factor: float, shape: tuple[int, int, int], strides: tuple[int, ...], dtypes: tuple[torch.dtype | None, ...],
    masks: int, device: torch.device,
) -> Producer:  # fmt: skip
    """``dtypes`` are those of y, the factors, the bias and the base."""
    rows, columns, ranks = shape
    u_row, u_rank, b_rank, b_column = strides
    reach = max(
        rows * columns, extent((rows, ranks), (u_row, u_rank)), extent((ranks, columns), (b_rank, b_column))
    )  # fmt: skip
    function: Any = _wide_masked if masks else _wide
    rank = ranks // max(masks, 1)
    block_rows, block_columns = WIDE_BLOCKS[function]
    split = dtypes[0] is torch.bfloat16 and dtypes[1] is torch.float32
    at_once = min(_padded(rank), MOST_AT_ONCE)
    scalars = (factor, rows, columns, rank, *strides, *((masks,) if masks else ()))
    constants = (index_type(reach), block_rows, block_columns, at_once, split)
    programs = cdiv(rows, block_rows) * cdiv(columns, block_columns)
    chunks = (cdiv(rank, at_once),) if masks else ()
    launch = Launch(function, programs, scalars, (*constants, *chunks), WARPS)
    absent = [3 + i for i, dtype in enumerate(dtypes[2:]) if dtype is None]
    result = Result.contiguous((rows, columns), dtypes[0])  # type: ignore[arg-type]
    return Producer("wide_product", launch, (result,), device, absent)


def wide_kernel(
    u: Tensor, b: Tensor, factor: float, dtype: torch.dtype, bias: Tensor | None, base: Tensor | None, masks: int
) -> Producer:
    """The kernel of :func:`wide_product` for tensors like these. It takes u, b, the bias and the base if there are
    such, and if there are masks, MOST_PARTS of them."""
    shape, strides = (u.shape[0], b.shape[1], u.shape[1]), (*u.stride(), *b.stride())
    dtypes = (dtype, u.dtype, *(None if t is None else t.dtype for t in (bias, base)))
    return _wide_kernel(factor, shape, strides, dtypes, masks, u.device)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------------ functions


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
    """:func:`thin_product` of one large matrix with each of several thin ones, which may be of its dtype, in one pass.

    Args:
        thin: at most :func:`most_parts`, of one layout.
        masks: one for each, or None for each.
        large_first: whether the large matrix comes first in the products.
    """
    kept = [mask for mask in masks if mask is not None]
    given: list[Tensor] = [large, *thin, *kept]
    for kernel in thin_kernels(large, thin[0], len(thin), factor, bool(kept), large_first):
        given = kernel(*given)
    return given[0].unbind() if len(thin) > 1 else (given[0],)


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
    kernel = wide_kernel(u, b, factor, dtype, bias, base, len(masks))
    return kernel(u, b, *(t for t in (bias, base) if t is not None), *all_parts(masks))[0]


def all_parts(masks: Sequence[Any]) -> list[Any]:
    """MOST_PARTS masks, the last of them again if there are fewer; none if there are none."""
    return [masks[min(i, len(masks) - 1)] for i in range(MOST_PARTS if masks else 0)]

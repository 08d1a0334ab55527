"""residual + dropout(x) and residual + droppath(gamma * x), forward and backward.

Stock PyTorch runs each as two to four kernels and keeps a mask of a byte an element, or the product, for backward; here
each is one pass (two reads, one write), the mask of a dropout is drawn again from its seed, and the gradients of x and
gamma are one pass too (two reads, one write).

Dense tensors of equal strides are walked flat, in memory order, whatever that order is. One-dimensional grid: program
= TILE neighbouring elements, for a dropout as a tile of TILE/8 x 8, so that one thread holds the elements of two calls
of Philox. gamma, and the factors of the samples, are vectors along one dimension: element i of the tensor has element
(i // inner) % size of such a vector.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlayers.kernels.flat import TILE, WARPS, Sizes, in_layout, shares
from fastlayers.kernels.indexing import index_type
from fastlayers.kernels.launch import KEPT, Launch, cdiv
from fastlayers.kernels.reductions import accumulator, sum_rows

# The backward of gamma: rows of `inner` elements, padded to a power of two, as many as fill REDUCE_TILE; or columns of
# which 128 are 256 contiguous bytes of 16-bit elements, 16 rows at a time.
REDUCE_TILE, REDUCE_WARPS = 2048, 4
REDUCE_COLUMNS, REDUCE_ROWS = 128, 16

# -------------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def _kept(seed, group, threshold, INDEX: tl.constexpr):
    """Which elements of a (groups, 8) tile are kept: word e % 4 of Philox4x32-10 at counter e // 4 for element e."""
    counter = group * 2
    low = counter.to(tl.uint32)
    high = (counter >> 32).to(tl.uint32) if tl.int64 == INDEX else tl.zeros_like(low)
    zero = tl.zeros_like(low)
    p0, p1, p2, p3 = tl.philox(seed, low, high, zero, zero)
    q0, q1, q2, q3 = tl.philox(seed, low + 1, high, zero, zero)  # an even counter plus one carries nothing
    # Joins put their dimension last: that of the two calls is to come first.
    even = tl.join(tl.join(p0, q0), tl.join(p2, q2))
    odd = tl.join(tl.join(p1, q1), tl.join(p3, q3))
    words = tl.reshape(tl.join(even, odd), (group.shape[0], 8))
    return words >= tl.full((), threshold, tl.int64).to(tl.uint32)


@triton.jit
def _dropout_add(
    out_ptr, x_ptr, residual_ptr, seed_ptr, n, threshold, scale: tl.float64, ACC: tl.constexpr, INDEX: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """out = x * (scale where the element is kept, else 0), plus the residual if there is one."""
    group = tl.program_id(0).to(INDEX) * (TILE // 8) + tl.arange(0, TILE // 8)
    element = group[:, None] * 8 + tl.arange(0, 8)[None, :]
    inside = element < n
    x = tl.load(x_ptr + element, mask=inside, other=0.0).to(ACC)
    kept = _kept(tl.load(seed_ptr), group, threshold, INDEX)
    out = x * tl.where(kept, tl.full((), scale, ACC), 0.0)  # what is not finite becomes NaN, as by torch
    if residual_ptr is not None:
        out += tl.load(residual_ptr + element, mask=inside, other=0.0).to(ACC)
    tl.store(out_ptr + element, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _scale_add(
    out_ptr, x_ptr, residual_ptr, gamma_ptr, keep_ptr, n, scale: tl.float64, gamma_inner, gamma_size, keep_inner,
    keep_size, ACC: tl.constexpr, INDEX: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """out = x * gamma * keep * scale, plus the residual, each if it is there."""
    element = tl.program_id(0).to(INDEX) * TILE + tl.arange(0, TILE)
    inside = element < n
    out = tl.load(x_ptr + element, mask=inside, other=0.0).to(ACC) * tl.full((), scale, ACC)
    if gamma_ptr is not None:
        out *= tl.load(gamma_ptr + element // gamma_inner % gamma_size, mask=inside, other=0.0).to(ACC)
    if keep_ptr is not None:
        out *= tl.load(keep_ptr + element // keep_inner % keep_size, mask=inside, other=0.0).to(ACC)
    if residual_ptr is not None:
        out += tl.load(residual_ptr + element, mask=inside, other=0.0).to(ACC)
    tl.store(out_ptr + element, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _scale_backward_columns(
    dx_ptr, partial_ptr, dy_ptr, x_ptr, gamma_ptr, keep_ptr, scale: tl.float64, rows, n, chunk, sample_rows, samples,
    ACC: tl.constexpr, INDEX: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """x of shape (rows, n), gamma of n: dx = dy * gamma * keep * scale, dgamma the sum of dy * x * keep * scale.

    Program: COLUMNS columns of ``chunk`` rows. Its sum goes to partial[chunk, column].
    """
    blocks = tl.cdiv(n, COLUMNS)
    part = (tl.program_id(0) // blocks).to(INDEX)
    column = (tl.program_id(0) % blocks).to(INDEX) * COLUMNS + tl.arange(0, COLUMNS)
    gamma = tl.load(gamma_ptr + column, mask=column < n, other=0.0).to(ACC)
    start = part * chunk
    stop = tl.minimum(start + chunk, rows)
    dgamma = tl.full((ROWS, COLUMNS), 0.0, ACC)
    for first in range(start, stop, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < stop)[:, None] & (column < n)[None, :]
        offset = row.to(INDEX)[:, None] * n + column[None, :]
        dy = tl.load(dy_ptr + offset, mask=inside, other=0.0).to(ACC) * tl.full((), scale, ACC)
        if keep_ptr is not None:
            dy *= tl.load(keep_ptr + row // sample_rows % samples, mask=row < stop, other=0.0).to(ACC)[:, None]
        x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(ACC)
        tl.store(dx_ptr + offset, (dy * gamma[None, :]).to(dx_ptr.dtype.element_ty), mask=inside)
        dgamma += dy * x
    tl.store(partial_ptr + part * n + column, tl.sum(dgamma, 0), mask=column < n)


@triton.jit
def _scale_backward_rows(
    dx_ptr, partial_ptr, dy_ptr, x_ptr, gamma_ptr, keep_ptr, scale: tl.float64, rows, n, columns, chunks, chunk,
    sample_rows, samples, ACC: tl.constexpr, INDEX: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x of shape (repeat, columns, n), gamma of columns: dx and dgamma as :func:`_scale_backward_columns` has them.

    Program: ``chunk`` elements of ROWS rows. It leaves their sums in partial[repeat, chunk, columns].
    """
    part = tl.program_id(0) % chunks
    row = (tl.program_id(0) // chunks).to(INDEX) * ROWS + tl.arange(0, ROWS)
    factor = tl.full((ROWS,), scale, ACC)
    if keep_ptr is not None:
        factor *= tl.load(keep_ptr + row // sample_rows % samples, mask=row < rows, other=0.0).to(ACC)
    gamma = tl.load(gamma_ptr + row % columns, mask=row < rows, other=0.0).to(ACC) * factor
    dgamma = tl.full((ROWS, BLOCK), 0.0, ACC)
    start = part.to(INDEX) * chunk
    stop = tl.minimum(start + chunk, n)
    for first in range(start, stop, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = (row < rows)[:, None] & (column < stop)[None, :]
        offset = row[:, None] * n + column[None, :]
        dy = tl.load(dy_ptr + offset, mask=inside, other=0.0).to(ACC)
        x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(ACC)
        tl.store(dx_ptr + offset, (dy * gamma[:, None]).to(dx_ptr.dtype.element_ty), mask=inside)
        dgamma += dy * x
    at = (row // columns * chunks + part) * columns + row % columns
    tl.store(partial_ptr + at, tl.sum(dgamma, 1) * factor, mask=row < rows)


# -------------------------------------------------------------------------------------------------------------- layouts


@lru_cache(KEPT)
def _result_strides(
    shape: Sizes, x: Sizes, residual: Sizes | None, gamma: Sizes | None = None, keep: bool = False, plain: bool = False
) -> Sizes:
    """Strides of residual + x·gamma·keep, asked of torch itself; ``plain``: nothing is done to x before the sum."""
    product = torch.empty_strided(shape, x, device="meta")
    if not plain:
        product = product.neg()
    if gamma is not None:
        product = torch.empty_strided(shape, x, device="meta") * torch.empty(gamma, device="meta")
    if keep:
        product = product * torch.empty((shape[0], *[1] * (len(shape) - 1)), device="meta")
    if residual is not None:
        product = torch.empty_strided(shape, residual, device="meta") + product
    return product.stride()


def _empty_result(
    x: Tensor, residual: Tensor | None, dtype: torch.dtype, gamma: Sizes | None, keep: bool, plain: bool
) -> Tensor:
    to = None if residual is None else residual.stride()
    strides = _result_strides(x.shape, x.stride(), to, gamma, keep, plain and to is not None)
    return torch.empty_strided(x.shape, strides, dtype=dtype, device=x.device)


def _vector_dim(gamma: Sizes, dims: int) -> int | None:
    """The dimension of a tensor of ``dims`` along which a gamma that broadcasts to it varies; None where it is one."""
    return next((d + dims - len(gamma) for d, size in enumerate(gamma) if size != 1), None)


def _along(dim: int | None, shape: Sizes, strides: Sizes) -> tuple[int, int]:
    """(inner, size) of a vector along one dimension of a dense tensor."""
    if dim is None or shape[dim] == 1:
        return max(math.prod(shape), 1), 1
    return strides[dim], shape[dim]


# ------------------------------------------------------------------------------------------------------------- wrappers

Dtypes = tuple[torch.dtype | None, ...]


def _dtypes(*tensors: Tensor | None) -> Dtypes:
    return tuple(None if t is None else t.dtype for t in tensors)


@lru_cache(KEPT)
def _dropout_launch(n: int, p: float, dtypes: Dtypes) -> Launch:
    acc, _ = accumulator(dtypes[0])  # type: ignore[arg-type]
    threshold = min(math.floor(p * 2**32 + 0.5), 2**32 - 1)
    return Launch(
        _dropout_add, cdiv(n, TILE), (n, threshold, 1.0 / (1.0 - p)), (acc, index_type(n + TILE), TILE), WARPS
    )


def dropout_add(x: Tensor, residual: Tensor | None, p: float, seed: Tensor, dtype: torch.dtype) -> Tensor:
    """residual + x·(0 with probability p, else 1/(1 - p)), without the sum where the residual is None."""
    out = _empty_result(x, residual, dtype, None, False, False)
    residual = None if residual is None else in_layout(residual, out)
    launch = _dropout_launch(x.numel(), p, _dtypes(out, x, residual))
    launch(out, in_layout(x, out), residual, seed)
    return out


@lru_cache(KEPT)
def _scale_launch(
    shape: Sizes, strides: Sizes, gamma: Sizes | None, keep: bool, scale: float, dtypes: Dtypes
) -> Launch:
    n = math.prod(shape)
    of_gamma = (1, 1) if gamma is None else _along(_vector_dim(gamma, len(shape)), shape, strides)
    of_keep = _along(0, shape, strides) if keep else (1, 1)
    acc, _ = accumulator(dtypes[0])  # type: ignore[arg-type]
    constants = (acc, index_type(n + TILE), TILE)
    return Launch(_scale_add, cdiv(n, TILE), (n, scale, *of_gamma, *of_keep), constants, WARPS)


def scale_add(
    x: Tensor, gamma: Tensor | None, residual: Tensor | None, keep: Tensor | None, scale: float, dtype: torch.dtype
) -> Tensor:
    """residual + x·gamma·keep·scale; without what is None. keep has a factor for each index of dimension 0."""
    of_gamma = None if gamma is None else tuple(gamma.shape)
    plain = gamma is None and keep is None
    out = _empty_result(x, residual, dtype, of_gamma, keep is not None, plain)
    residual = None if residual is None else in_layout(residual, out)
    dtypes = _dtypes(out, x, residual, gamma)
    launch = _scale_launch(tuple(out.shape), out.stride(), of_gamma, keep is not None, scale, dtypes)
    launch(out, in_layout(x, out), residual, gamma, keep)
    return out


@dataclass(frozen=True, eq=False)
class Reduction:
    """A launch that gives dx and leaves partial sums of dgamma."""

    launch: Launch
    partial_shape: tuple[int, int, int]  # as sum_rows takes it
    partial_dtype: torch.dtype


@lru_cache(KEPT)
def _reduction(
    shape: Sizes, strides: Sizes, gamma: Sizes, keep: bool, scale: float, dtypes: Dtypes, device: torch.device
) -> Reduction | None:
    """For dense tensors of this layout; None where the samples change within a row."""
    n = math.prod(shape)
    drops = keep and shape[0] > 1
    dim = _vector_dim(gamma, len(shape))
    columns = 1 if dim is None else shape[dim]
    inner = strides[dim] if dim is not None else strides[0] if drops else n
    repeat = n // columns // inner
    row = columns if inner == 1 else inner
    if drops and (dim == 0 or strides[0] < row):
        return None
    samples: tuple[int, int] = (strides[0] // row, shape[0]) if drops else (n, 1)
    acc, partial_dtype = accumulator(dtypes[0])  # type: ignore[arg-type]
    constants: tuple[Any, ...] = (acc, index_type(n + REDUCE_ROWS * columns))
    if inner > 1:
        rows = repeat * columns
        block = min(triton.next_power_of_2(inner), REDUCE_TILE)
        tile_rows = REDUCE_TILE // block
        groups = cdiv(rows, tile_rows)
        chunks, chunk = shares(inner, block, groups, device)
        scalars: tuple[Any, ...] = (scale, rows, inner, columns, chunks, chunk, *samples)
        constants = (*constants, tile_rows, block)
        launch = Launch(_scale_backward_rows, groups * chunks, scalars, constants, REDUCE_WARPS)
        return Reduction(launch, (1, repeat * chunks, columns), partial_dtype)
    blocks = cdiv(columns, REDUCE_COLUMNS)
    chunks, chunk = shares(repeat, REDUCE_ROWS, blocks, device)
    scalars = (scale, repeat, columns, chunk, *samples)
    constants = (*constants, REDUCE_ROWS, REDUCE_COLUMNS)
    launch = Launch(_scale_backward_columns, chunks * blocks, scalars, constants, REDUCE_WARPS)
    return Reduction(launch, (1, chunks, columns), partial_dtype)


def scale_add_backward(
    dy: Tensor, x: Tensor, gamma: Tensor, keep: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """The gradients of x and gamma."""
    dx = torch.empty_like(x)
    dtypes = _dtypes(dx, dy, gamma)
    reduction = _reduction(tuple(dx.shape), dx.stride(), tuple(gamma.shape), keep is not None, scale, dtypes, dx.device)
    if reduction is None:  # the samples are dropped first
        return scale_add_backward(scale_add(dy, None, None, keep, scale, dy.dtype), x, gamma, None, 1.0)
    partial = torch.empty(reduction.partial_shape, dtype=reduction.partial_dtype, device=x.device)
    reduction.launch(dx, partial, in_layout(dy, dx), in_layout(x, dx), gamma, keep)
    dgamma = torch.empty_like(gamma)
    sum_rows(partial, dgamma)
    return dx, dgamma

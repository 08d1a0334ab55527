"""relu(x) + y + bias, relu(x + y) and x * y, forward and backward.

Stock PyTorch runs the first two as two or three kernels with an intermediate tensor between them and keeps a tensor of
the size of x for the backward; here each is one pass (two reads, one write), and what the backward keeps is one bit an
element. The gradients of a product are two kernels that both read dy; here they are one pass (three reads, two
writes), and the gradient of a broadcast factor is summed in that same pass.

Dense tensors of equal strides are walked flat, in memory order, whatever that order is. One-dimensional grid: program
= TILE neighbouring elements, as a tile of TILE/8 x 8 where bits are packed, so that one thread holds the elements of a
byte. An operand that broadcasts is read through a three-dimensional stride pattern of the result's memory order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlayers.kernels.flat import (
    FLAT,
    TILE,
    WARPS,
    Reading,
    Sizes,
    empty_result,
    in_layout,
    in_memory_order,
    memory_dims,
    reading,
    shares,
)
from fastlayers.kernels.indexing import collapse, extent, index_type, pattern, pattern_offset
from fastlayers.kernels.launch import KEPT, Launch, cdiv

# The reducing backward of mul, along rows: as many rows, padded to a power of two, as fill REDUCE_TILE. Down columns:
# 128 columns a program (256 contiguous bytes of 16-bit elements), 16 rows at a time. Either way the reduction is shared
# among so many programs that there are at least four for each multiprocessor.
REDUCE_TILE, REDUCE_WARPS = 2048, 4
REDUCE_COLUMNS, REDUCE_ROWS = 128, 16

# -------------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def _pack(flags):
    """Bytes of a (bytes, 8) tile of booleans, the first flag in the lowest bit."""
    return tl.sum(flags.to(tl.int32) << tl.arange(0, 8)[None, :], 1).to(tl.uint8)


@triton.jit
def _byte_tile(n, INDEX: tl.constexpr, TILE: tl.constexpr):
    """The elements of this program as (bytes, 8), and which of them are there."""
    byte = tl.program_id(0).to(INDEX) * (TILE // 8) + tl.arange(0, TILE // 8)
    element = byte[:, None] * 8 + tl.arange(0, 8)[None, :]
    return byte, element, element < n


@triton.jit
def _relu_add(
    out_ptr, bits_ptr, x_ptr, y_ptr, bias_ptr, n, alpha: tl.float64, size1, size2, stride0, stride1, stride2,
    BIAS_FLAT: tl.constexpr, ACC: tl.constexpr, INDEX: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """out = relu(x) + y + bias + alpha, and where the gradient passes, as bits, if bits_ptr is given."""
    byte, element, inside = _byte_tile(n, INDEX, TILE)
    x = tl.load(x_ptr + element, mask=inside, other=0.0).to(ACC)
    y = tl.load(y_ptr + element, mask=inside, other=0.0).to(ACC)
    out = tl.where(x <= 0, 0.0, x) + y  # NaN is not <= 0: it stays, and its gradient passes, as in torch
    if bias_ptr is not None:
        offset = element if BIAS_FLAT else pattern_offset(element, size1, size2, stride0, stride1, stride2)
        out += tl.load(bias_ptr + offset, mask=inside, other=0.0).to(ACC)
    out += tl.full((), alpha, ACC)
    tl.store(out_ptr + element, out.to(out_ptr.dtype.element_ty), mask=inside)
    if bits_ptr is not None:
        tl.store(bits_ptr + byte, _pack((x <= 0) == 0), mask=byte * 8 < n)


@triton.jit
def _add_relu(out_ptr, bits_ptr, x_ptr, y_ptr, n, ACC: tl.constexpr, INDEX: tl.constexpr, TILE: tl.constexpr):
    """out = relu(x + y), and where the gradient passes, as bits, if bits_ptr is given."""
    byte, element, inside = _byte_tile(n, INDEX, TILE)
    x = tl.load(x_ptr + element, mask=inside, other=0.0).to(ACC)
    y = tl.load(y_ptr + element, mask=inside, other=0.0).to(ACC)
    v = x + y
    tl.store(out_ptr + element, tl.where(v <= 0, 0.0, v).to(out_ptr.dtype.element_ty), mask=inside)
    if bits_ptr is not None:
        tl.store(bits_ptr + byte, _pack((v <= 0) == 0), mask=byte * 8 < n)


@triton.jit
def _relu_backward(dx_ptr, dy_ptr, bits_ptr, n, ACC: tl.constexpr, INDEX: tl.constexpr, TILE: tl.constexpr):
    """dx = dy where the bit of the element is set, else 0: reads dy and a sixteenth (16-bit) of it, writes dx."""
    byte, element, inside = _byte_tile(n, INDEX, TILE)
    bits = tl.load(bits_ptr + byte, mask=byte * 8 < n, other=0).to(tl.int32)
    dy = tl.load(dy_ptr + element, mask=inside, other=0.0).to(ACC)
    passes = ((bits[:, None] >> tl.arange(0, 8)[None, :]) & 1) != 0
    tl.store(dx_ptr + element, tl.where(passes, dy, 0.0).to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _scale(x_ptr, factor_ptr, n, ACC: tl.constexpr, INDEX: tl.constexpr, TILE: tl.constexpr):
    """x *= factor, in place. Nothing is touched where it is 1, as that of most backward passes."""
    factor = tl.load(factor_ptr).to(ACC)
    if factor != 1.0:
        element = tl.program_id(0).to(INDEX) * TILE + tl.arange(0, TILE)
        x = tl.load(x_ptr + element, mask=element < n, other=0.0).to(ACC)
        tl.store(x_ptr + element, (x * factor).to(x_ptr.dtype.element_ty), mask=element < n)


@triton.jit
def _mul(
    out_ptr, x_ptr, y_ptr, n, x_size1, x_size2, x0, x1, x2, y_size1, y_size2, y0, y1, y2,
    X_FLAT: tl.constexpr, Y_FLAT: tl.constexpr, ACC: tl.constexpr, INDEX: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """out = x * y in out's memory order; a flat operand is in the same order, another has a stride pattern."""
    element = tl.program_id(0).to(INDEX) * TILE + tl.arange(0, TILE)
    inside = element < n
    x_offset = element if X_FLAT else pattern_offset(element, x_size1, x_size2, x0, x1, x2)
    y_offset = element if Y_FLAT else pattern_offset(element, y_size1, y_size2, y0, y1, y2)
    x = tl.load(x_ptr + x_offset, mask=inside, other=0.0).to(ACC)
    y = tl.load(y_ptr + y_offset, mask=inside, other=0.0).to(ACC)
    tl.store(out_ptr + element, (x * y).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _mul_backward(
    dx_ptr, dy_ptr, grad_ptr, x_ptr, y_ptr, n, ACC: tl.constexpr, INDEX: tl.constexpr, TILE: tl.constexpr
):
    """Both gradients of a product of equal shapes: dx = grad * y, dy = grad * x; three reads, two writes."""
    element = tl.program_id(0).to(INDEX) * TILE + tl.arange(0, TILE)
    inside = element < n
    grad = tl.load(grad_ptr + element, mask=inside, other=0.0).to(ACC)
    x = tl.load(x_ptr + element, mask=inside, other=0.0).to(ACC)
    y = tl.load(y_ptr + element, mask=inside, other=0.0).to(ACC)
    tl.store(dx_ptr + element, (grad * y).to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(dy_ptr + element, (grad * x).to(dy_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _mul_backward_rows(
    dx_ptr, partial_ptr, grad_ptr, x_ptr, y_ptr, rows, n, chunks, chunk, y_size1, y_size2, y0, y1, y2,
    ACC: tl.constexpr, INDEX: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x of shape (rows, n) times one y a row: dx = grad * y, and dy = the sum of grad * x over the row.

    Program: ``chunk`` columns of ROWS rows. It leaves its sum in partial[row, chunk].
    """
    part = tl.program_id(0) % chunks
    row = (tl.program_id(0) // chunks).to(INDEX) * ROWS + tl.arange(0, ROWS)
    y_offset = pattern_offset(row, y_size1, y_size2, y0, y1, y2)
    y = tl.load(y_ptr + y_offset, mask=row < rows, other=0.0).to(ACC)
    dy = tl.full((ROWS, BLOCK), 0.0, ACC)
    start = part.to(INDEX) * chunk
    stop = tl.minimum(start + chunk, n)
    for first in range(start, stop, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = (row < rows)[:, None] & (column < stop)[None, :]
        offset = row[:, None] * n + column[None, :]
        grad = tl.load(grad_ptr + offset, mask=inside, other=0.0).to(ACC)
        x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(ACC)
        tl.store(dx_ptr + offset, (grad * y[:, None]).to(dx_ptr.dtype.element_ty), mask=inside)
        dy += grad * x
    tl.store(partial_ptr + row * chunks + part, tl.sum(dy, 1), mask=row < rows)


@triton.jit
def _mul_backward_columns(
    dx_ptr, partial_ptr, grad_ptr, x_ptr, y_ptr, rows, n, chunks, chunk, y_size1, y_size2, y0, y1, y2, y_column,
    ACC: tl.constexpr, INDEX: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """x of shape (outer, rows, n) times y of shape (outer, n): dx = grad * y, dy = the sum of grad * x over rows.

    Program: COLUMNS columns of ``chunk`` rows of one outer index. Its sum goes to partial[outer, chunk, column], in
    the precision of the computation; the chunks are added up afterwards, always in the same order.
    """
    blocks = tl.cdiv(n, COLUMNS)
    program = tl.program_id(0).to(INDEX)
    part = program // blocks  # = outer * chunks + index of the chunk
    outer = part // chunks
    column = program % blocks * COLUMNS + tl.arange(0, COLUMNS)
    y_offset = pattern_offset(outer, y_size1, y_size2, y0, y1, y2) + column * y_column
    y = tl.load(y_ptr + y_offset, mask=column < n, other=0.0).to(ACC)
    start = part % chunks * chunk
    stop = tl.minimum(start + chunk, rows)
    dy = tl.full((ROWS, COLUMNS), 0.0, ACC)
    for first in range(start, stop, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < stop)[:, None] & (column < n)[None, :]
        offset = (outer * rows + row)[:, None] * n + column[None, :]
        grad = tl.load(grad_ptr + offset, mask=inside, other=0.0).to(ACC)
        x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(ACC)
        tl.store(dx_ptr + offset, (grad * y[None, :]).to(dx_ptr.dtype.element_ty), mask=inside)
        dy += grad * x
    tl.store(partial_ptr + part * n + column, tl.sum(dy, 0), mask=column < n)


def _accumulator(dtype: torch.dtype) -> tl.dtype:
    return tl.float64 if dtype == torch.float64 else tl.float32


# ------------------------------------------------------------------------------------------------------------- wrappers


@lru_cache(KEPT)
def _flat_launch(
    function: Callable[..., Any], n: int, dtype: torch.dtype, readings: tuple[Reading, ...] = (),
    scalars: tuple[float, ...] = (), absent: tuple[bool, ...] = (),
) -> Launch:  # fmt: skip
    """A kernel that takes n, further scalars and the patterns of ``readings``, and walks n elements flat.

    ``absent`` only tells launches apart: which of the optional tensors are None.
    """
    index = index_type(n, *(each.extent for each in readings))
    arguments = (n, *scalars, *(argument for each in readings for argument in each.pattern))
    constants = (*(each.flat for each in readings), _accumulator(dtype), index, TILE)
    return Launch(function, cdiv(n, TILE), arguments, constants, WARPS)


def _bits_for(x: Tensor) -> Tensor:
    return torch.empty((x.numel() + 7) // 8, dtype=torch.uint8, device=x.device)


def _run_relu_add(x: Tensor, y: Tensor, bias: Tensor | None, alpha: float, bits: Tensor | None) -> Tensor:
    out = torch.empty_like(x)  # the layout of relu(x), which decides that of the sum
    x, y = in_layout(x, out), in_layout(y, out)
    at = FLAT
    if bias is not None:
        at = reading(bias.shape, bias.stride(), out.shape, out.stride())
        bias = at.of(bias, out)
    absent = (bias is None, bits is None)
    launch = _flat_launch(_relu_add, x.numel(), x.dtype, (at,), (float(alpha),), absent)
    launch(out, bits, x, y, bias)
    return out


def relu_add(x: Tensor, y: Tensor, bias: Tensor | None, alpha: float) -> Tensor:
    """relu(x) + y + bias + alpha, in the layout that torch gives it."""
    return _run_relu_add(x, y, bias, alpha, None)


def relu_add_train(x: Tensor, y: Tensor, bias: Tensor | None, alpha: float) -> tuple[Tensor, Tensor]:
    """:func:`relu_add`, and bits: bit j of byte i tells if the gradient passes at element 8i + j of out's memory."""
    bits = _bits_for(x)
    return _run_relu_add(x, y, bias, alpha, bits), bits


def _run_add_relu(x: Tensor, y: Tensor, bits: Tensor | None) -> Tensor:
    out = empty_result(x, y)
    x, y = in_layout(x, out), in_layout(y, out)
    _flat_launch(_add_relu, x.numel(), x.dtype, absent=(bits is None,))(out, bits, x, y)
    return out


def add_relu(x: Tensor, y: Tensor) -> Tensor:
    """relu(x + y), in the layout that torch gives it."""
    return _run_add_relu(x, y, None)


def add_relu_train(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`add_relu` and its bits, as :func:`relu_add_train` has them."""
    bits = _bits_for(x)
    return _run_add_relu(x, y, bits), bits


def relu_backward(dy: Tensor, bits: Tensor) -> Tensor:
    """dy where the bit is set, else 0. dy is dense, in the memory order of the forward's result; so is dx."""
    dx = torch.empty_like(dy)
    _flat_launch(_relu_backward, dy.numel(), dy.dtype)(dx, dy, bits)
    return dx


def relu_add_backward(dy: Tensor, bits: Tensor, bias_shape: list[int]) -> tuple[Tensor, Tensor]:
    """:func:`relu_backward`, and the gradient of a bias of that shape; its sum is torch's."""
    return relu_backward(dy, bits), dy.sum_to_size(bias_shape)


def mul(x: Tensor, y: Tensor) -> Tensor:
    """x * y with broadcasting, in the layout that torch gives it."""
    out = empty_result(x, y)
    shape, strides = out.shape, out.stride()
    x_reading = reading(x.shape, x.stride(), shape, strides)
    y_reading = reading(y.shape, y.stride(), shape, strides)
    launch = _flat_launch(_mul, out.numel(), out.dtype, (x_reading, y_reading))
    launch(out, x_reading.of(x, out), y_reading.of(y, out))
    return out


def scale_(x: Tensor, factor: Tensor) -> None:
    """x *= factor, one number in the dtype of the computation, for a dense x."""
    _flat_launch(_scale, x.numel(), x.dtype)(x, factor)


def mul_backward(dy: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x * y, each of the shape of its factor.

    One kernel where the shapes are equal or one of the factors has the shape of the product; a factor that broadcasts
    gets its sum in float32. Where both broadcast, torch sums.
    """
    if x.shape == y.shape:
        to_x = empty_result(x, y)
        to_y = torch.empty_like(to_x)
        launch = _flat_launch(_mul_backward, to_x.numel(), to_x.dtype)
        launch(to_x, to_y, in_layout(dy, to_x), in_layout(x, to_x), in_layout(y, to_x))
        return to_x, to_y
    if x.shape == dy.shape:
        return _mul_backward_reduced(dy, x, y)
    if y.shape == dy.shape:
        return _mul_backward_reduced(dy, y, x)[::-1]
    return mul(dy, y).sum_to_size(x.shape), mul(dy, x).sum_to_size(y.shape)


@dataclass(frozen=True, eq=False)
class Reduction:
    """A launch that gives dx and leaves partial sums of dy, and the way from these to dy."""

    launch: Launch
    partial_shape: Sizes  # of one to three dimensions; the second counts the chunks
    partial_dtype: torch.dtype
    kept_shape: Sizes  # once the chunks are summed
    broadcast: Sizes  # dimensions of this along which y broadcasts too: summed last, from sums already short
    ordered_shape: Sizes  # y's shape in the memory order of the product
    inverse: Sizes  # the permutation back

    def finish(self, partial: Tensor, y: Tensor) -> Tensor:
        dy = (partial.sum(1) if self.partial_shape[1] > 1 else partial).view(self.kept_shape)
        if self.broadcast:
            dy = dy.sum(self.broadcast)
        return dy.to(y.dtype).reshape(self.ordered_shape).permute(self.inverse).reshape(y.shape)


@lru_cache(KEPT)
def _reduction(
    shape: Sizes, strides: Sizes, y_shape: Sizes, y_strides: Sizes, dtype: torch.dtype, device: torch.device
) -> Reduction | None:
    """For a dense product of this shape; None where y broadcasts in a pattern that no kernel has."""
    sizes, y_steps = in_memory_order(y_shape, y_strides, shape, strides)
    dims = collapse(sizes, y_steps)
    dims = [(1, 0)] * (2 - len(dims)) + dims
    # Either y is one value a row of n, or, inside of `rows` along which it broadcasts, it varies over n columns.
    along_rows = dims[-1][1] == 0
    outer_dims = dims[:-1] if along_rows else dims[:-2]
    y_pattern = pattern([size for size, _ in outer_dims], [stride for _, stride in outer_dims])
    if y_pattern is None or (not along_rows and dims[-2][1] != 0):
        return None
    outer = math.prod(size for size, _ in outer_dims)
    n, y_column = dims[-1]
    acc = _accumulator(dtype)
    constants: tuple[Any, ...] = (acc, index_type(math.prod(shape), extent(sizes, y_steps)))
    kept_shape: Sizes = tuple(size for size, _ in outer_dims)
    if along_rows:
        block = min(triton.next_power_of_2(n), REDUCE_TILE)
        tile_rows = REDUCE_TILE // block
        groups = cdiv(outer, tile_rows)
        chunks, chunk = shares(n, block, groups, device)
        scalars: tuple[int, ...] = (outer, n, chunks, chunk, *y_pattern)
        launch = Launch(_mul_backward_rows, groups * chunks, scalars, (*constants, tile_rows, block), REDUCE_WARPS)
        partial_shape: Sizes = (outer, chunks)
    else:
        rows = dims[-2][0]
        blocks = cdiv(n, REDUCE_COLUMNS)
        chunks, chunk = shares(rows, REDUCE_ROWS, outer * blocks, device)
        scalars = (rows, n, chunks, chunk, *y_pattern, y_column)
        constants = (*constants, REDUCE_ROWS, REDUCE_COLUMNS)
        launch = Launch(_mul_backward_columns, outer * chunks * blocks, scalars, constants, REDUCE_WARPS)
        partial_shape = (outer, chunks, n)
        kept_shape = (*kept_shape, n)
    order = memory_dims(strides)
    y_full = (1,) * (len(shape) - len(y_shape)) + tuple(y_shape)
    return Reduction(
        launch=launch,
        partial_shape=partial_shape,
        partial_dtype=torch.float64 if acc == tl.float64 else torch.float32,
        kept_shape=kept_shape,
        broadcast=tuple(d for d, (_, stride) in enumerate(outer_dims) if stride == 0),
        ordered_shape=tuple(y_full[d] for d in order),
        inverse=tuple(sorted(range(len(shape)), key=order.__getitem__)),
    )


def _mul_backward_reduced(grad: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """(dx, dy) where x has the shape of the product and y broadcasts."""
    if 0 in y.stride():
        y = y.contiguous()  # from here on a zero stride means: y broadcasts
    dx = torch.empty_like(x)
    reduction = _reduction(dx.shape, dx.stride(), y.shape, y.stride(), x.dtype, x.device)
    if reduction is None:
        return mul(grad, y), mul(grad, x).sum_to_size(y.shape)
    partial = torch.empty(reduction.partial_shape, dtype=reduction.partial_dtype, device=x.device)
    reduction.launch(dx, partial, in_layout(grad, dx), in_layout(x, dx), y)
    return dx, reduction.finish(partial, y)

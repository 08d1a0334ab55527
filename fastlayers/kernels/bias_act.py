"""act(x + bias), the bias over the last dimension or none, forward and backward.

Stock PyTorch writes x + bias out, reads it again for the activation, and needs a second pass over the gradient for the
sum that is the bias' gradient. Here the forward is one pass (one read, one write), and so is the backward (two reads,
one write): it computes x + bias again, and leaves sums of a few rows that a second, small kernel adds up.

Without a bias, and in the forward, dense tensors are walked flat, in memory order: program = TILE neighbours. The
backward with a bias sees rows of the last dimension: program = a block of columns of a chunk of the rows.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlayers.kernels.activations import activate, activate_backward
from fastlayers.kernels.flat import FLAT, Reading, empty_result, in_layout, reading
from fastlayers.kernels.indexing import index_type, pattern_offset
from fastlayers.kernels.launch import KEPT, Launch, cdiv, multiprocessors
from fastlayers.kernels.reductions import accumulator, sum_rows

# As the elementwise kernels have it: two 16-byte accesses of 16-bit elements a thread.
TILE, WARPS = 2048, 4
# 128 columns a program, 16 rows at a time, of float64 half as many; the rows are shared among so many programs that
# there are at least four for each multiprocessor.
COLUMNS, ROWS, COLUMN_WARPS, PROGRAMS_PER_MULTIPROCESSOR = 128, 16, 4, 4

# -------------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def _bias_act(
    out_ptr, x_ptr, bias_ptr, n, first: tl.float64, second: tl.float64, size1, size2, stride0, stride1, stride2,
    ACT: tl.constexpr, BIAS_FLAT: tl.constexpr, ACC: tl.constexpr, INDEX: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """out = act(x + bias), in the memory order of out; the bias is read through a stride pattern of it."""
    element = tl.program_id(0).to(INDEX) * TILE + tl.arange(0, TILE)
    inside = element < n
    z = tl.load(x_ptr + element, mask=inside, other=0.0).to(ACC)
    if bias_ptr is not None:
        offset = element if BIAS_FLAT else pattern_offset(element, size1, size2, stride0, stride1, stride2)
        z += tl.load(bias_ptr + offset, mask=inside, other=0.0).to(ACC)
    y = activate(z, ACT, tl.full((), first, ACC), tl.full((), second, ACC))
    tl.store(out_ptr + element, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _act_backward(
    dx_ptr, dy_ptr, x_ptr, n, first: tl.float64, second: tl.float64,
    ACT: tl.constexpr, ACC: tl.constexpr, INDEX: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """dx = dy * act'(x)."""
    element = tl.program_id(0).to(INDEX) * TILE + tl.arange(0, TILE)
    inside = element < n
    dy = tl.load(dy_ptr + element, mask=inside, other=0.0).to(ACC)
    x = tl.load(x_ptr + element, mask=inside, other=0.0).to(ACC)
    dx = activate_backward(dy, x, ACT, tl.full((), first, ACC), tl.full((), second, ACC))
    tl.store(dx_ptr + element, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _bias_act_backward(
    dx_ptr, partial_ptr, dy_ptr, x_ptr, bias_ptr, rows, n, chunk, first: tl.float64, second: tl.float64,
    ACT: tl.constexpr, ACC: tl.constexpr, INDEX: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dx = dy * act'(x + bias) of ``chunk`` rows of COLUMNS columns, and its sum over them, partial[chunk, column]."""
    blocks = tl.cdiv(n, COLUMNS)
    program = tl.program_id(0).to(INDEX)
    part = program // blocks
    column = program % blocks * COLUMNS + tl.arange(0, COLUMNS)
    bias = tl.full((COLUMNS,), 0.0, ACC)
    if bias_ptr is not None:
        bias += tl.load(bias_ptr + column, mask=column < n, other=0.0).to(ACC)
    start = part * chunk
    stop = tl.minimum(start + chunk, rows)
    total = tl.full((ROWS, COLUMNS), 0.0, ACC)
    for begin in range(start, stop, ROWS):
        row = begin + tl.arange(0, ROWS)
        inside = (row < stop)[:, None] & (column < n)[None, :]
        offset = row[:, None] * n + column[None, :]
        dy = tl.load(dy_ptr + offset, mask=inside, other=0.0).to(ACC)
        x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(ACC)
        dx = activate_backward(dy, x + bias[None, :], ACT, tl.full((), first, ACC), tl.full((), second, ACC))
        tl.store(dx_ptr + offset, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        total += tl.where(inside, dx, 0.0)
    tl.store(partial_ptr + part * n + column, tl.sum(total, 0), mask=column < n)


# ------------------------------------------------------------------------------------------------------------- wrappers


@lru_cache(KEPT)
def _forward_launch(n: int, dtype: torch.dtype, bias: Reading | None, act: int, first: float, second: float) -> Launch:
    at = bias or FLAT
    constants = (act, at.flat, accumulator(dtype)[0], index_type(n, at.extent), TILE)
    return Launch(_bias_act, cdiv(n, TILE), (n, first, second, *at.pattern), constants, WARPS)


@lru_cache(KEPT)
def _flat_launch(n: int, dtype: torch.dtype, act: int, first: float, second: float) -> Launch:
    constants = (act, accumulator(dtype)[0], index_type(n), TILE)
    return Launch(_act_backward, cdiv(n, TILE), (n, first, second), constants, WARPS)


@lru_cache(KEPT)
def _column_launch(
    rows: int, n: int, dtype: torch.dtype, biased: bool, act: int, first: float, second: float, device: torch.device
) -> tuple[Launch, int]:
    """The launch, and its number of chunks. ``biased`` only tells launches apart."""
    blocks = cdiv(n, COLUMNS)
    wanted = cdiv(PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(device), blocks)
    chunk = cdiv(cdiv(rows, wanted), ROWS) * ROWS
    chunks = cdiv(rows, chunk)
    tile_rows = ROWS // 2 if dtype == torch.float64 else ROWS
    constants = (act, accumulator(dtype)[0], index_type(rows * n), tile_rows, COLUMNS)
    return Launch(_bias_act_backward, blocks * chunks, (rows, n, chunk, first, second), constants, COLUMN_WARPS), chunks


def bias_act_forward(x: Tensor, bias: Tensor | None, act: int, first: float, second: float) -> Tensor:
    """act(x + bias), in the layout that torch gives it."""
    out = torch.empty_like(x) if bias is None else empty_result(x, bias)
    at = None
    if bias is not None:
        at = reading(bias.shape, bias.stride(), out.shape, out.stride())
        bias = at.of(bias, out)
    _forward_launch(x.numel(), x.dtype, at, act, float(first), float(second))(out, in_layout(x, out), bias)
    return out


def bias_act_backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, act: int, first: float, second: float, dbias: bool,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of x and, if wanted, of the bias, in x's dtype or that one.

    relu has its result for x, and then no bias to be added.
    """
    if bias is None and not dbias:
        dx = torch.empty_like(x)
        launch = _flat_launch(x.numel(), x.dtype, act, float(first), float(second))
        launch(dx, in_layout(dy, dx), in_layout(x, dx))
        return dx, x.new_empty(0)
    x, dy = x.contiguous(), dy.contiguous()
    n = x.shape[-1]
    rows = x.numel() // n
    bias = None if bias is None else bias.contiguous()
    launch, chunks = _column_launch(rows, n, x.dtype, bias is not None, act, float(first), float(second), x.device)
    dx = torch.empty_like(x)
    partial = torch.empty((1, chunks, n), dtype=accumulator(x.dtype)[1], device=x.device)
    launch(dx, partial, dy, x, bias)
    db = x.new_empty(n if dbias else 0, dtype=dtype or x.dtype)
    if dbias:
        sum_rows(partial, db)
    return dx, db

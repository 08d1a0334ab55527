"""LayerNorm and RMSNorm over the trailing dimensions, alone or of x + residual, forward and backward.

A row is what is normalised: n neighbouring elements. The forward reads x (and the residual) once and writes y (and the
sum); it keeps a mean and an rstd a row. Stock PyTorch adds and rounds in a kernel of its own first. The backward reads
dy and x once and writes dx, and adds up dweight and dbias on the way: a fixed number of programs walk the rows and hold
their sums in registers, each leaves one partial row, and a second kernel adds these up, always in the same order.

Tiles are ROWS x BLOCK where whole rows fit the registers (``_whole_forward``, ``_whole_backward``). A longer row is
read twice, the second time backwards so as to meet the cache where the first left it (``_long_forward``,
``_long_backward``), and split among several programs where there are too few rows to fill the machine. Where the
registers do not hold the sums of dweight and dbias besides, ``_column_sums`` reads dy and x once more for them.
One-dimensional grids: program = group of rows, or (row, split), or (part of the rows, block of columns).

``kind``: 0 layer_norm, 1 rms_norm as torch has it, 2 as Llama has it (x * rstd is rounded before weight), 3 as Gemma
has it (1 + weight), 4 layer_norm with 1 + weight. ``tokens``: so many neighbouring rows share a weight and a bias of
their own, which are ``strides`` units from the next ones; None where all rows share one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlayers.kernels.indexing import index_type
from fastlayers.kernels.launch import KEPT, Launch, cdiv, multiprocessors
from fastlayers.kernels.norm_rows import (
    ADD,
    WRITE,
    Plan,
    Tile,
    load,
    load_weight,
    long_plan,
    normed,
    scaled,
    split_values,
    statistics,
    tile_for,
    times_weight,
)
from fastlayers.kernels.reductions import accumulator, merge, sum_rows, unit, welford

# Elements of a tile and its warps. 16 to 32 elements a thread keep two to four 16-byte loads of 16-bit elements in
# flight. float64 takes two registers an element and more for its divisions: a quarter of these elements. 32768 elements
# of float32 spilled, as did the backward, which holds x and dy, past 16 elements a thread, with or without the sums.
FORWARD = {2048: 4, 8192: 8, 16384: 16, 32768: 32}
BACKWARD = {2048: 4, 4096: 8, 8192: 16}

# Past the registers: 16384 16-bit elements a step, by 1024 threads of 64 registers, and half of it in the backward.
# Wider elements: half as many, an eighth of float64.
LONG_FORWARD, LONG_BACKWARD = 16384, 8192
LONG_SHARE = {2: 1, 4: 2, 8: 8}

# Threads of an SM that walk the rows in a backward with sums: their registers are what limits it.
THREADS_PER_MULTIPROCESSOR = 512

# dweight and dbias of long rows: 128 columns (256 contiguous bytes of 16-bit elements), 16 rows at a time, and at least
# four programs for each multiprocessor.
SUM_COLUMNS, SUM_ROWS, SUM_WARPS, SUM_PROGRAMS_PER_MULTIPROCESSOR = 128, 16, 4, 4

# The kind of LayerNorm with 1 + weight.
MODULATED = 4


# -------------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def _whole_forward(
    y_ptr, sum_ptr, stats_ptr, x_ptr, residual_ptr, weight_ptr, bias_ptr, rows, units, tokens, strides, eps: tl.float64,
    KIND: tl.constexpr, INNER: tl.constexpr, PRODUCT: tl.constexpr, UNIT: tl.constexpr, ACC: tl.constexpr,
    INDEX: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y for ROWS whole rows a program: x (and residual) in, y (and sum, statistics) out."""
    n = units * UNIT
    row = tl.program_id(0).to(INDEX) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < n)
    offset = row * n + column
    x = normed(x_ptr, sum_ptr, residual_ptr, offset, inside, ACC)
    if sum_ptr is not None:
        tl.store(sum_ptr + offset, x.to(sum_ptr.dtype.element_ty), mask=inside)
    if KIND % 4 == 0:
        mean = tl.sum(x, 1, keep_dims=True) / n
        x = tl.where(column < n, x - mean, 0.0)
        rest = tl.sum(x, 1, keep_dims=True) / n  # what the rounding of a sum of large values has left out
        mean += rest
        x = tl.where(column < n, x - rest, 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / n + tl.full((), eps, ACC))
    if KIND % 4 == 0:
        tl.store(stats_ptr + row, mean, mask=row < rows)
        tl.store(stats_ptr + rows + row, rstd, mask=row < rows)
    else:
        tl.store(stats_ptr + row, rstd, mask=row < rows)
    group = None if tokens is None else row // tokens
    there = column < n if tokens is None else inside
    weight = None if weight_ptr is None else load_weight(weight_ptr, group, column, there, tokens, strides, UNIT, ACC)
    bias = None if bias_ptr is None else load_weight(bias_ptr, group, column, there, tokens, strides, UNIT, ACC)
    y = scaled(x * rstd, weight, bias, KIND, INNER, PRODUCT, ACC)
    tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _long_forward(
    y_ptr, sum_ptr, stats_ptr, x_ptr, residual_ptr, weight_ptr, bias_ptr, part_ptr, splits, chunk, rows, units,
    eps: tl.float64, KIND: tl.constexpr, INNER: tl.constexpr, PRODUCT: tl.constexpr, UNIT: tl.constexpr,
    ACC: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr, STAGE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """y for a row too long for the registers: a running mean and sum of squares a lane, then y."""
    n = units * UNIT
    split = tl.program_id(0) % splits
    row = (tl.program_id(0) // splits).to(INDEX)
    start = split.to(INDEX) * chunk
    stop = tl.minimum(start + chunk, n)
    lane = tl.arange(0, BLOCK)
    if STAGE == WRITE:
        s = tl.arange(0, SPLITS).to(INDEX)
        count = tl.maximum(tl.minimum(n - s * chunk, chunk), 0).to(ACC)
        mean = split_values(part_ptr, row, rows, splits, 0, SPLITS)
        squares = split_values(part_ptr, row, rows, splits, 1, SPLITS)
    else:
        count = ((stop - start - 1 - lane + BLOCK) // BLOCK).to(ACC)
        mean = tl.full((BLOCK,), 0.0, ACC)
        squares = tl.full((BLOCK,), 0.0, ACC)
        for first in range(start, stop, BLOCK):
            inside = first + lane < stop
            x = normed(x_ptr, sum_ptr, residual_ptr, row * n + first + lane, inside, ACC)
            if KIND == 0:
                steps = ((first - start) // BLOCK + 1).to(ACC)
                mean, squares = welford(x, inside, mean, squares, 1.0 / steps)
            else:
                squares += x * x
    if KIND == 0:
        mean, squares = merge(count, mean, squares, 0)
    else:
        squares = tl.sum(squares, 0)
    if STAGE == ADD:
        if KIND == 0:
            tl.store(part_ptr + row * splits + split, mean)
        tl.store(part_ptr + (rows + row) * splits + split, squares)
    else:
        rstd = tl.rsqrt(squares / n + tl.full((), eps, ACC))
        if split == 0:
            if KIND == 0:
                tl.store(stats_ptr + row, mean)
                tl.store(stats_ptr + rows + row, rstd)
            else:
                tl.store(stats_ptr + row, rstd)
        for done in range(0, stop - start, BLOCK):
            column = start + (stop - start - 1 - done) // BLOCK * BLOCK + lane
            inside = column < stop
            x = normed(x_ptr, sum_ptr, residual_ptr, row * n + column, inside, ACC)
            weight = None if weight_ptr is None else load(weight_ptr, column, inside, ACC)
            bias = None if bias_ptr is None else load(bias_ptr, column, inside, ACC)
            if sum_ptr is not None:
                tl.store(sum_ptr + row * n + column, x.to(sum_ptr.dtype.element_ty), mask=inside)
            if KIND == 0:
                x -= mean
            y = scaled(x * rstd, weight, bias, KIND, INNER, PRODUCT, ACC)
            tl.store(y_ptr + row * n + column, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _whole_backward(
    dx_ptr, partial_ptr, dy_ptr, dsum_ptr, x_ptr, stats_ptr, weight_ptr, rows, units, tokens, strides,
    KIND: tl.constexpr, DWEIGHT: tl.constexpr, DBIAS: tl.constexpr, UNIT: tl.constexpr, ACC: tl.constexpr,
    INDEX: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx for whole rows, ROWS at a time: dy, x (and dsum) in, dx out.

    Each program leaves its sums of dweight and dbias, as far as they are wanted, in partial[which, program]. Where
    groups of rows have weights of their own, a program has rows of one group.
    """
    n = units * UNIT
    programs = tl.num_programs(0)
    program = tl.program_id(0).to(INDEX)
    group = None
    start = program * ROWS
    stop = rows
    step = programs * ROWS
    if tokens is not None:
        parts = programs // (rows // tokens)
        group = program // parts
        start = group * tokens + program % parts * ROWS
        stop = (group + 1) * tokens
        step = parts * ROWS
    column = tl.arange(0, BLOCK)[None, :]
    weight = None
    if weight_ptr is not None:
        weight = load_weight(weight_ptr, group, column, column < n, tokens, strides, UNIT, ACC)
    dweight = tl.full((ROWS, BLOCK), 0.0, ACC)
    dbias = tl.full((ROWS, BLOCK), 0.0, ACC)
    for first in range(start, stop, step):
        row = first + tl.arange(0, ROWS)
        inside = (row < stop)[:, None] & (column < n)
        offset = row[:, None] * n + column
        x = load(x_ptr, offset, inside, ACC)
        dy = load(dy_ptr, offset, inside, ACC)
        dsum = None if dsum_ptr is None else tl.load(dsum_ptr + offset, mask=inside, other=0.0)
        mean, rstd = statistics(stats_ptr, row, rows, row < stop, KIND)
        rstd = rstd[:, None]
        if KIND % 4 == 0:
            rstd = tl.where(n > 1, rstd, 0.0)  # one element is its mean: exactly no gradient
        normal = (x - mean[:, None]) * rstd
        if DWEIGHT:
            dweight += dy * normal
        if DBIAS:
            dbias += dy
        dy = times_weight(dy, weight, KIND)
        dx = dy - normal * (tl.sum(dy * normal, 1, keep_dims=True) / n)
        if KIND % 4 == 0:
            dx -= tl.sum(dy, 1, keep_dims=True) / n
        dx *= rstd
        if dsum is not None:
            dx += dsum.to(ACC)
        tl.store(dx_ptr + offset, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    if DWEIGHT:
        tl.store(partial_ptr + program * n + column, tl.sum(dweight, 0, keep_dims=True), mask=column < n)
        program += programs
    if DBIAS:
        tl.store(partial_ptr + program * n + column, tl.sum(dbias, 0, keep_dims=True), mask=column < n)


@triton.jit
def _long_backward(
    dx_ptr, dy_ptr, dsum_ptr, x_ptr, stats_ptr, weight_ptr, part_ptr, splits, chunk, rows, units, KIND: tl.constexpr,
    UNIT: tl.constexpr, ACC: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr, STAGE: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """dx for a row too long for the registers: the two sums first, then dx."""
    n = units * UNIT
    split = tl.program_id(0) % splits
    row = (tl.program_id(0) // splits).to(INDEX)
    start = split.to(INDEX) * chunk
    stop = tl.minimum(start + chunk, n)
    lane = tl.arange(0, BLOCK)
    mean, rstd = statistics(stats_ptr, row, rows, row < rows, KIND)
    if STAGE == WRITE:
        plain = split_values(part_ptr, row, rows, splits, 0, SPLITS)
        along = split_values(part_ptr, row, rows, splits, 1, SPLITS)
    else:
        plain = tl.full((BLOCK,), 0.0, ACC)
        along = tl.full((BLOCK,), 0.0, ACC)
        for first in range(start, stop, BLOCK):
            column = first + lane
            inside = column < stop
            x = load(x_ptr, row * n + column, inside, ACC)
            dy = load(dy_ptr, row * n + column, inside, ACC)
            weight = None if weight_ptr is None else load(weight_ptr, column, inside, ACC)
            dy = times_weight(dy, weight, KIND)
            plain += dy
            along += dy * ((x - mean) * rstd)
    plain = tl.sum(plain, 0)
    along = tl.sum(along, 0)
    if STAGE == ADD:
        tl.store(part_ptr + row * splits + split, plain)
        tl.store(part_ptr + (rows + row) * splits + split, along)
    else:
        for done in range(0, stop - start, BLOCK):
            column = start + (stop - start - 1 - done) // BLOCK * BLOCK + lane
            inside = column < stop
            offset = row * n + column
            x = load(x_ptr, offset, inside, ACC)
            dy = load(dy_ptr, offset, inside, ACC)
            weight = None if weight_ptr is None else load(weight_ptr, column, inside, ACC)
            dx = times_weight(dy, weight, KIND) - (x - mean) * rstd * (along / n)
            if KIND == 0:
                dx -= plain / n
            dx *= rstd
            if dsum_ptr is not None:
                dx += load(dsum_ptr, offset, inside, ACC)
            tl.store(dx_ptr + offset, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _column_sums(
    partial_ptr, dy_ptr, x_ptr, stats_ptr, rows, units, parts, chunk, KIND: tl.constexpr, DWEIGHT: tl.constexpr,
    DBIAS: tl.constexpr, UNIT: tl.constexpr, ACC: tl.constexpr, INDEX: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums of dweight and dbias, as far as they are wanted, over ``chunk`` rows, in partial[which, part]."""
    n = units * UNIT
    blocks = tl.cdiv(n, COLUMNS)
    part = tl.program_id(0) // blocks
    column = (tl.program_id(0) % blocks).to(INDEX) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    start = part.to(INDEX) * chunk
    stop = tl.minimum(start + chunk, rows)
    dweight = tl.full((ROWS, COLUMNS), 0.0, ACC)
    dbias = tl.full((ROWS, COLUMNS), 0.0, ACC)
    for first in range(start, stop, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < stop)[:, None] & (column < n)
        offset = row[:, None] * n + column
        dy = load(dy_ptr, offset, inside, ACC)
        if DWEIGHT:
            x = load(x_ptr, offset, inside, ACC)
            mean, rstd = statistics(stats_ptr, row, rows, row < stop, KIND)
            dweight += dy * ((x - mean[:, None]) * rstd[:, None])
        if DBIAS:
            dbias += dy
    partial_column = part.to(INDEX) * n + column
    if DWEIGHT:
        tl.store(partial_ptr + partial_column, tl.sum(dweight, 0, keep_dims=True), mask=column < n)
    if DBIAS:
        if DWEIGHT:
            partial_column = (part.to(INDEX) + parts) * n + column
        tl.store(partial_ptr + partial_column, tl.sum(dbias, 0, keep_dims=True), mask=column < n)


# ------------------------------------------------------------------------------------------------------------- wrappers


_TL = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.float64: tl.float64}


@lru_cache(KEPT)
def _forward_plan(
    shape: torch.Size, dims: int, eps: float, kind: int, dtypes: tuple[torch.dtype | None, ...], device: torch.device
) -> Plan:
    """``dtypes``: of x, residual, weight, bias and y."""
    n = math.prod(shape[len(shape) - dims :])
    numel = math.prod(shape)
    rows = numel // n
    x, residual, weight = dtypes[:3]
    assert x is not None
    sum_dtype = x if residual is None else torch.promote_types(x, residual)
    product = sum_dtype if weight is None else torch.promote_types(sum_dtype, weight)
    acc, acc_dtype = accumulator(x)
    constants = (kind, _TL[sum_dtype], _TL[product], unit(n), acc, index_type(numel))
    tile = tile_for(n, FORWARD, sum_dtype.itemsize)
    if tile is None:
        block = LONG_FORWARD // LONG_SHARE[sum_dtype.itemsize]
        return long_plan(_long_forward, n, rows, block, (eps,), constants, (acc_dtype, sum_dtype), device)
    scalars = (rows, n // unit(n), None, None, eps)
    launch = Launch(_whole_forward, cdiv(rows, tile.rows), scalars, (*constants, tile.rows, tile.block), tile.warps)
    return Plan(rows, acc_dtype, sum_dtype, (launch,), long=False)


def _forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, dims: int, eps: float, kind: int,
    dtype: torch.dtype, keep: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    x = x.contiguous()
    if residual is not None:
        residual = residual.contiguous()
    dtypes = (x.dtype, *[None if t is None else t.dtype for t in (residual, weight, bias)], dtype)
    plan = _forward_plan(x.shape, dims, float(eps), kind, dtypes, x.device)
    y = torch.empty_like(x, dtype=dtype)
    total = None if residual is None else torch.empty_like(x, dtype=plan.sum_dtype)
    # Written in any case: a kernel without that is compiled to other roundings, and the result has other bits.
    stats = torch.empty((2 if kind == 0 else 1, plan.rows), dtype=plan.accumulator, device=x.device)
    plan.run(y, total, stats, x, residual, weight, bias)
    return y, total, stats if keep else stats.new_empty(0)


def layer_norm_forward(
    x: Tensor, dims: int, weight: Tensor | None, bias: Tensor | None, eps: float, kind: int, dtype: torch.dtype,
    keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(y, stats): the norm of x over its last ``dims`` dimensions, contiguous and of ``dtype``.

    stats are means and rstds as (2, rows), for an RMSNorm rstds as (1, rows), and empty unless ``keep``.
    """
    y, _, stats = _forward(x, None, weight, bias, dims, eps, kind, dtype, keep)
    return y, stats


def add_layer_norm_forward(
    x: Tensor, residual: Tensor, dims: int, weight: Tensor | None, bias: Tensor | None, eps: float, kind: int,
    dtype: torch.dtype, keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(y, sum, stats): sum = x + residual, rounded to its dtype, and its norm as :func:`layer_norm_forward` has it."""
    y, total, stats = _forward(x, residual, weight, bias, dims, eps, kind, dtype, keep)
    assert total is not None
    return y, total, stats


@dataclass(frozen=True, eq=False)
class SumsPlan:
    """Where the partial sums of dweight and dbias come from: of the launch of the rows, or of one more."""

    rows: Plan
    launch: Launch | None
    partial: tuple[int, int, int]


@lru_cache(KEPT)
def _dx_plan(
    shape: torch.Size, dims: int, kind: int, dtypes: tuple[torch.dtype | None, ...], device: torch.device
) -> Plan:
    """A backward without dweight and dbias. ``dtypes``: of dy, x and weight."""
    n = math.prod(shape[len(shape) - dims :])
    numel = math.prod(shape)
    rows = numel // n
    x = dtypes[1]
    assert x is not None
    acc, acc_dtype = accumulator(x)
    tile = tile_for(n, BACKWARD, x.itemsize)
    if tile is None:
        block = LONG_BACKWARD // LONG_SHARE[x.itemsize]
        long = (kind, unit(n), acc, index_type(numel))
        return long_plan(_long_backward, n, rows, block, (), long, (acc_dtype, x), device)
    constants = (kind, False, False, unit(n), acc, index_type(numel), tile.rows, tile.block)
    launch = Launch(_whole_backward, cdiv(rows, tile.rows), (rows, n // unit(n), None, None), constants, tile.warps)
    return Plan(rows, acc_dtype, x, (launch,), long=False)


def _resident(tile: Tile, device: torch.device) -> int:
    """Programs that walk the rows in a backward with sums."""
    return max(THREADS_PER_MULTIPROCESSOR // (32 * tile.warps), 1) * multiprocessors(device)


@lru_cache(KEPT)
def _sums_plan(
    shape: torch.Size, dims: int, kind: int, dtypes: tuple[torch.dtype | None, ...], dweight: bool, dbias: bool,
    device: torch.device,
) -> SumsPlan:  # fmt: skip
    """A backward with dweight, dbias or both. ``dtypes``: of dy, x and weight."""
    n = math.prod(shape[len(shape) - dims :])
    numel = math.prod(shape)
    rows = numel // n
    x = dtypes[1]
    assert x is not None
    acc, acc_dtype = accumulator(x)
    outputs = dweight + dbias
    tile = tile_for(n, BACKWARD, x.itemsize)
    if tile is not None:
        resident = _resident(tile, device)
        programs = min(cdiv(rows, tile.rows), resident)
        constants = (kind, dweight, dbias, unit(n), acc, index_type(numel, 2 * programs * n), tile.rows, tile.block)
        launch = Launch(_whole_backward, programs, (rows, n // unit(n), None, None), constants, tile.warps)
        return SumsPlan(Plan(rows, acc_dtype, x, (launch,), long=False), None, (outputs, programs, n))
    blocks = cdiv(n, SUM_COLUMNS)
    chunk = cdiv(rows, cdiv(SUM_PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(device), blocks))
    chunk = cdiv(chunk, SUM_ROWS) * SUM_ROWS
    parts = cdiv(rows, chunk)
    constants = (kind, dweight, dbias, unit(n), acc, index_type(numel, 2 * parts * n), SUM_ROWS, SUM_COLUMNS)
    launch = Launch(_column_sums, blocks * parts, (rows, n // unit(n), parts, chunk), constants, SUM_WARPS)
    return SumsPlan(_dx_plan(shape, dims, kind, dtypes, device), launch, (outputs, parts, n))


def layer_norm_backward(
    dy: Tensor, dsum: Tensor | None, x: Tensor, dims: int, weight: Tensor | None, stats: Tensor, kind: int,
    dweight: bool, dbias: bool, narrow: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dx, dweight, dbias, low): the second and third of weight's dtype, and empty where they are not wanted or have no
    weight; low is dx in the dtype ``narrow``, and empty without one.

    x is what was normalised: after :func:`add_layer_norm_forward` the sum, with ``dsum`` as its other gradient.
    """
    dy, x = dy.contiguous(), x.contiguous()
    if dsum is not None:
        dsum = dsum.contiguous()
    dweight = dweight and weight is not None
    dtype = x.dtype if weight is None else weight.dtype
    key = (x.shape, dims, kind, (dy.dtype, x.dtype, None if weight is None else weight.dtype))
    dx = torch.empty_like(x)
    nothing = torch.empty(0, dtype=dtype, device=x.device)
    if not (dweight or dbias):
        plan = _dx_plan(*key, x.device)
        if plan.long:
            plan.run(dx, dy, dsum, x, stats, weight)
        else:
            plan.run(dx, None, dy, dsum, x, stats, weight)
        return dx, nothing, nothing.clone(), nothing.clone() if narrow is None else dx.to(narrow)
    sums = _sums_plan(*key, dweight, dbias, x.device)
    partial = torch.empty(sums.partial, dtype=sums.rows.accumulator, device=x.device)
    if sums.rows.long:
        sums.rows.run(dx, dy, dsum, x, stats, weight)
    else:
        sums.rows.run(dx, partial, dy, dsum, x, stats, weight)
    if sums.launch is not None:
        sums.launch(partial, dy, x, stats)
    shape = x.shape[x.dim() - dims :]
    for_weight = torch.empty(shape, dtype=dtype, device=x.device) if dweight else nothing
    for_bias = torch.empty(shape, dtype=dtype, device=x.device) if dbias else nothing
    if dweight:
        sum_rows(partial, for_weight, for_bias if dbias else None)
    else:
        sum_rows(partial, for_bias)
    return dx, for_weight, for_bias, nothing.clone() if narrow is None else dx.to(narrow)


# ---------------------------------------------------------------------------------------------------- for each sample


def _modulation(scale: Tensor, shift: Tensor | None, dims: int) -> tuple[Tensor, Tensor | None, int, int]:
    """(scale, shift, groups, stride): both with whole rows of neighbouring elements, ``stride`` of them apart, which is
    a multiple of the unit of their length."""
    n = math.prod(scale.shape[scale.dim() - dims :])
    scale = scale.reshape(-1, n)
    shift = None if shift is None else shift.reshape(-1, n)
    for t in (scale, shift):
        if t is not None and (t.stride() != scale.stride() or t.stride(1) != 1 < n or t.stride(0) % unit(n)):
            return scale.contiguous(), None if shift is None else shift.contiguous(), scale.shape[0], n
    return scale, shift, scale.shape[0], scale.stride(0)


@lru_cache(KEPT)
def _modulated_forward_launch(
    rows: int, n: int, tokens: int, stride: int, eps: float, dtypes: tuple[torch.dtype, ...], device: torch.device
) -> Launch:
    """``dtypes``: of x, y and scale."""
    tile = tile_for(n, FORWARD, dtypes[0].itemsize)
    assert tile is not None
    acc = accumulator(dtypes[0])[0]
    constants = (
        MODULATED,
        _TL[dtypes[0]],
        _TL[dtypes[1]],
        unit(n),
        acc,
        index_type(rows * n, rows // tokens * stride + n),
    )
    return Launch(
        _whole_forward, cdiv(rows, tile.rows), (rows, n // unit(n), tokens, stride // unit(n), eps),
        (*constants, tile.rows, tile.block), tile.warps,
    )  # fmt: skip


def ada_layer_norm_forward(
    x: Tensor, scale: Tensor, shift: Tensor | None, dims: int, eps: float, dtype: torch.dtype, keep: bool
) -> tuple[Tensor, Tensor]:
    """(y, stats): layer_norm(x)·(1 + scale) + shift, contiguous and of ``dtype``, with stats as of a layer_norm.

    scale and shift have a row for each of the groups that the rows of x make up, in their order.
    """
    x = x.contiguous()
    n = math.prod(x.shape[x.dim() - dims :])
    rows = x.numel() // n
    scale, shift, groups, stride = _modulation(scale, shift, dims)
    y = torch.empty_like(x, dtype=dtype)
    stats = torch.empty((2, rows), dtype=accumulator(x.dtype)[1], device=x.device)
    dtypes = x.dtype, dtype, scale.dtype
    launch = _modulated_forward_launch(rows, n, rows // groups, stride, float(eps), dtypes, x.device)
    launch(y, None, stats, x, None, scale, shift)
    return y, stats if keep else stats.new_empty(0)


@lru_cache(KEPT)
def _modulated_backward_launch(
    rows: int, n: int, tokens: int, stride: int, dtypes: tuple[torch.dtype, ...], dscale: bool, dshift: bool,
    device: torch.device,
) -> tuple[Launch, int]:  # fmt: skip
    """The launch, and how many programs share a group. ``dtypes``: of x, dy and scale."""
    dtype = dtypes[0]
    tile = tile_for(n, BACKWARD, dtype.itemsize)
    assert tile is not None
    groups = rows // tokens
    own = min(tile.rows, triton.next_power_of_2(tokens))
    resident = _resident(tile, device)
    parts = min(cdiv(tokens, own), cdiv(resident, groups))
    index = index_type(rows * n, 2 * groups * parts * n, groups * stride + n)
    constants = (MODULATED, dscale, dshift, unit(n), accumulator(dtype)[0], index, own, tile.block)
    return Launch(
        _whole_backward, groups * parts, (rows, n // unit(n), tokens, stride // unit(n)), constants, tile.warps
    ), parts  # fmt: skip


def ada_layer_norm_backward(
    dy: Tensor, x: Tensor, scale: Tensor, stats: Tensor, dims: int, dscale: bool, dshift: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dscale, dshift), the latter two as scale is, and empty where they are not wanted."""
    dy, x = dy.contiguous(), x.contiguous()
    n = math.prod(x.shape[x.dim() - dims :])
    rows = x.numel() // n
    flat, _, groups, stride = _modulation(scale, None, dims)
    dtypes = x.dtype, dy.dtype, scale.dtype
    launch, parts = _modulated_backward_launch(rows, n, rows // groups, stride, dtypes, dscale, dshift, x.device)
    dx = torch.empty_like(x)
    partial = None
    if dscale or dshift:
        partial = torch.empty((dscale + dshift, groups, parts, n), dtype=accumulator(x.dtype)[1], device=x.device)
    launch(dx, partial, dy, None, x, stats, flat)
    sums = iter(() if partial is None else (partial.sum(2) if parts > 1 else partial.squeeze(2)).to(scale.dtype))
    of_scale, of_shift = (next(sums).view(scale.shape) if wanted else scale.new_empty(0) for wanted in (dscale, dshift))
    return dx, of_scale, of_shift

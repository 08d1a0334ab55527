"""Cross-entropy of logits and classes, forward and backward.

The forward reads the logits once and keeps two numbers a line, the maximum and the logarithm of the sum of exponentials
below it; the backward is elementwise, reads the logits once and writes their gradient, over them where that is asked.
The formulas are in :mod:`fastlayers.ops.cross_entropy`, what a line and a tile are in
:mod:`fastlayers.kernels.softmax`.

``_statistics`` runs along the lines with a running maximum and sum a lane, and splits them where they are few;
``_losses`` merges the splits, looks the class up and gives a loss a line; ``_sum`` and ``_total`` add these up in two
stages. ``_gradient`` is the backward. One-dimensional grids: program = group of LINES lines, or (group, split), or
(group, tile of the classes).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlayers.kernels.indexing import extent, index_type
from fastlayers.kernels.launch import KEPT, Launch, cdiv
from fastlayers.kernels.reductions import accumulator
from fastlayers.kernels.softmax import (
    Tile,
    choose_splits,
    combine_totals,
    element_offset,
    line_strides,
    load_splits,
    tile_lanes,
)

# Elements of a tile: 16 a thread, of which each has a maximum and a sum in the registers besides. float64 takes two
# registers each, and more for its exponential.
TILE, TILE_FLOAT64, WARPS = 4096, 1024, 8
COLUMN_BLOCK = 64  # of a tile across the memory, so that 64 neighbouring lines of 16 bits fill a cache line
MOST_ROWS = 128  # of a tile: more spilled
LINES = 32  # of a program that merges splits
SUM_BLOCK, SUM_PROGRAMS = 1024, 256

NONE, MEAN = 0, 1
#: What the gradient is multiplied by: nothing, one number, one for each line.
NO_SCALE, ONE_SCALE, LINE_SCALES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


# -------------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def capped(x, softcap, CAPPED: tl.constexpr, ACC: tl.constexpr):
    """softcap * tanh(x / softcap)."""
    if CAPPED:
        cap = tl.full((), softcap, ACC)
        e = tl.exp(-2.0 * tl.abs(x) / cap)
        bounded = cap * ((1.0 - e) / (1.0 + e))
        x = tl.where(x < 0, -bounded, bounded)
    return x


@triton.jit
def _statistics(
    part_ptr, x_ptr, target_ptr, weight_ptr, splits, chunk, lines, n, inner, x_outer, x_n, x_inner, ignore_index,
    softcap: tl.float64, CAPPED: tl.constexpr, SMOOTH: tl.constexpr, ACC: tl.constexpr, INDEX: tl.constexpr,
    AXIS: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Maximum, sum of exponentials and, with SMOOTH, weighted sum of the scores: part is (3, splits, lines)."""
    LOWEST: tl.constexpr = -1.7976931348623157e308 if tl.float64 == ACC else -3.4028234663852886e38
    split = tl.program_id(0) % splits
    line = (tl.program_id(0) // splits).to(INDEX) * LINES + tl.arange(0, LINES)
    kept = tl.load(target_ptr + line, mask=line < lines, other=0) != ignore_index
    start = split.to(INDEX) * chunk
    stop = tl.minimum(start + chunk, n)
    # From the lowest finite number, not minus infinity: the difference of two minus infinities would be NaN.
    shape: tl.constexpr = (LINES, BLOCK) if AXIS == 1 else (BLOCK, LINES)
    largest = tl.full(shape, LOWEST, ACC)
    total = tl.full(shape, 0.0, ACC)
    linear = tl.full(shape, 0.0, ACC)
    for first in range(start, stop, BLOCK):
        i, k = tile_lanes(line, first + tl.arange(0, BLOCK).to(INDEX), AXIS)
        inside = (i < lines) & (k < n) & tl.expand_dims(kept, AXIS)
        x = tl.load(x_ptr + element_offset(i, k, inner, x_outer, x_n, x_inner), mask=inside, other=0.0).to(ACC)
        x = capped(x, softcap, CAPPED, ACC)
        if SMOOTH:
            if weight_ptr is not None:
                linear += tl.where(inside, x * tl.load(weight_ptr + k, mask=k < n, other=0.0), 0.0)
            else:
                linear += tl.where(inside, x, 0.0)
        scores = tl.where(inside, x, float("-inf"))
        difference = scores - largest
        smaller = tl.exp(-tl.abs(difference))
        total = tl.where(difference > 0, total * smaller + 1.0, total + smaller)
        largest = tl.where(difference > 0, scores, largest)
    largest, total = combine_totals(largest, total, AXIS)
    part = part_ptr + split.to(INDEX) * lines + line
    size = tl.full((), splits, INDEX) * lines
    tl.store(part, largest, mask=line < lines)
    tl.store(part + size, total, mask=line < lines)
    if SMOOTH:
        tl.store(part + 2 * size, tl.sum(linear, AXIS), mask=line < lines)


# In debug mode for its assertion, the only one here: offsets are 64 bits, of which Triton checks no overflow.
@triton.jit(debug=True)
def _losses(
    loss_ptr, stats_ptr, part_ptr, x_ptr, target_ptr, weight_ptr, splits, lines, n, inner, x_outer, x_n, x_inner,
    ignore_index, smoothing: tl.float64, softcap: tl.float64, z_loss: tl.float64, CAPPED: tl.constexpr,
    SMOOTH: tl.constexpr, ACC: tl.constexpr, LINES: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The loss of each line and the two parts of its log-sum-exp. A class that is none stops the program."""
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES).to(tl.int64)
    inside = line < lines
    target = tl.load(target_ptr + line, mask=inside, other=0)
    kept = target != ignore_index
    right = (target >= 0) & (target < n)
    tl.device_assert(right | (target == ignore_index) | (line >= lines), "cross_entropy: target out of bounds")
    read = inside & kept & right
    size = tl.full((), lines, tl.int64) * splits
    largest = load_splits(part_ptr, line, lines, splits, SPLITS, 1, float("-inf"))
    base, total = combine_totals(largest, load_splits(part_ptr + size, line, lines, splits, SPLITS, 1, 0.0), 1)
    rest = tl.log(total)
    score = tl.load(x_ptr + element_offset(line, target, inner, x_outer, x_n, x_inner), mask=read, other=0.0).to(ACC)
    loss = (base - capped(score, softcap, CAPPED, ACC)) + rest
    if weight_ptr is not None:
        loss *= tl.load(weight_ptr + target, mask=read, other=0.0)
    if SMOOTH:
        share = tl.full((), smoothing, ACC)
        linear = tl.sum(load_splits(part_ptr + 2 * size, line, lines, splits, SPLITS, 1, 0.0), 1)
        weights = tl.full((), n, ACC)
        if weight_ptr is not None:
            weights = tl.load(stats_ptr + 2 * tl.full((), lines, tl.int64) + 1)
        loss = (1.0 - share) * loss + share / tl.full((), n, ACC) * (weights * (base + rest) - linear)
    loss += tl.full((), z_loss, ACC) * (base + rest) * (base + rest)
    tl.store(loss_ptr + line, tl.where(kept, loss, 0.0).to(loss_ptr.dtype.element_ty), mask=inside)
    tl.store(stats_ptr + line, tl.where(kept, base, 0.0), mask=inside)
    tl.store(stats_ptr + lines + line, tl.where(kept, rest, 0.0), mask=inside)


@triton.jit
def _sum(
    partial_ptr, loss_ptr, target_ptr, weight_ptr, rows, programs, ignore_index, ACC: tl.constexpr, INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Losses, and the weights of their classes, of every ``programs``-th block of them: partial is (2, programs)."""
    sums = tl.full((BLOCK,), 0.0, ACC)
    weights = tl.full((BLOCK,), 0.0, ACC)
    for start in range(tl.program_id(0).to(INDEX) * BLOCK, rows, programs * BLOCK):
        row = start + tl.arange(0, BLOCK)
        target = tl.load(target_ptr + row, mask=row < rows, other=0)
        kept = (row < rows) & (target != ignore_index)
        sums += tl.load(loss_ptr + row, mask=row < rows, other=0.0)
        if weight_ptr is not None:
            weights += tl.load(weight_ptr + target, mask=kept, other=0.0)
        else:
            weights += kept.to(ACC)
    tl.store(partial_ptr + tl.program_id(0), tl.sum(sums, 0))
    tl.store(partial_ptr + programs + tl.program_id(0), tl.sum(weights, 0))


@triton.jit
def _total(loss_ptr, stats_ptr, partial_ptr, programs, place, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    """The sum or the mean of all losses, and what the mean was divided by."""
    k = tl.arange(0, BLOCK)
    loss = tl.sum(tl.load(partial_ptr + k, mask=k < programs, other=0.0), 0)
    weights = tl.sum(tl.load(partial_ptr + programs + k, mask=k < programs, other=0.0), 0)
    if MEAN:
        loss = loss / weights
    tl.store(loss_ptr, loss.to(loss_ptr.dtype.element_ty))
    tl.store(stats_ptr + place, weights)


@triton.jit
def _gradient(
    dx_ptr, x_ptr, target_ptr, weight_ptr, stats_ptr, scale_ptr, tiles, lines, n, stored, inner, x_outer, x_n, x_inner,
    dx_outer, dx_n, dx_inner, ignore_index, smoothing: tl.float64, softcap: tl.float64, z_loss: tl.float64,
    CAPPED: tl.constexpr, SMOOTH: tl.constexpr, SCALE: tl.constexpr, MEAN: tl.constexpr, ACC: tl.constexpr,
    INDEX: tl.constexpr, AXIS: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx of a tile; dx has ``stored`` columns, of which those past the n classes are 0. It may be x."""
    line = (tl.program_id(0) // tiles).to(INDEX) * LINES + tl.arange(0, LINES)
    target = tl.load(target_ptr + line, mask=line < lines, other=0)
    kept = (target != ignore_index) & (line < lines)
    base = tl.load(stats_ptr + line, mask=kept, other=0.0)
    rest = tl.load(stats_ptr + lines + line, mask=kept, other=0.0)
    hit = tl.full((LINES,), 1.0, ACC)
    if weight_ptr is not None:
        hit = tl.load(weight_ptr + target, mask=kept & (target >= 0) & (target < n), other=0.0)
    factor = hit
    share = tl.full((), smoothing, ACC) / tl.full((), n, ACC)
    if SMOOTH:
        hit = (1.0 - tl.full((), smoothing, ACC)) * hit
        weights = tl.full((), n, ACC)
        if weight_ptr is not None:
            weights = tl.load(stats_ptr + 2 * tl.full((), lines, INDEX) + 1)
        factor = hit + share * weights
    factor += 2.0 * tl.full((), z_loss, ACC) * (base + rest)
    scale = tl.full((LINES,), 1.0, ACC)
    if SCALE == ONE_SCALE:
        scale *= tl.load(scale_ptr).to(ACC)
    elif SCALE == LINE_SCALES:
        scale = tl.load(scale_ptr + line, mask=line < lines, other=0.0).to(ACC)
    if MEAN:
        scale /= tl.load(stats_ptr + 2 * tl.full((), lines, INDEX))

    i, k = tile_lanes(line, (tl.program_id(0) % tiles).to(INDEX) * BLOCK + tl.arange(0, BLOCK), AXIS)
    read = tl.expand_dims(kept, AXIS) & (k < n)
    x = tl.load(x_ptr + element_offset(i, k, inner, x_outer, x_n, x_inner), mask=read, other=0.0).to(ACC)
    score = capped(x, softcap, CAPPED, ACC)
    p = tl.exp((score - tl.expand_dims(base, AXIS)) - tl.expand_dims(rest, AXIS))
    d = p * tl.expand_dims(factor, AXIS)
    d -= tl.where(k == tl.expand_dims(target, AXIS), tl.expand_dims(hit, AXIS), 0.0)
    if SMOOTH:
        if weight_ptr is not None:
            d -= share * tl.load(weight_ptr + k, mask=k < n, other=0.0)
        else:
            d -= share
    if CAPPED:
        slope = score / tl.full((), softcap, ACC)
        d *= 1.0 - slope * slope
    d = tl.where(read, d * tl.expand_dims(scale, AXIS), 0.0)
    to = dx_ptr + element_offset(i, k, inner, dx_outer, dx_n, dx_inner)
    tl.store(to, d.to(dx_ptr.dtype.element_ty), mask=(i < lines) & (k < stored))


# ------------------------------------------------------------------------------------------------------------- wrappers


class Options(NamedTuple):
    ignore_index: int
    label_smoothing: float
    softcap: float
    z_loss: float


class _Geometry(NamedTuple):
    """How lines lie in memory: ``shape`` with the classes at ``dim``, which has ``n`` of them and padding."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dim: int
    n: int

    @property
    def lines(self) -> int:
        return math.prod(self.shape) // self.shape[self.dim]

    @property
    def inner(self) -> int:
        return math.prod(self.shape[self.dim + 1 :])

    def steps(self) -> tuple[int, int, int]:
        found = line_strides(torch.Size(self.shape), self.strides, self.dim)
        assert found is not None, "the caller makes these strides contiguous"
        return found


def _class_last(x: Tensor) -> bool:
    return x.dim() > 2 and not x.is_contiguous() and x.movedim(1, -1).is_contiguous()


def _view(x: Tensor) -> Tensor:
    """x as the kernels take it: rows where the classes are next to each other, contiguous where it is too intricate."""
    if _class_last(x):
        return x.movedim(1, -1).reshape(-1, x.shape[1])
    dim = 0 if x.dim() == 1 else 1
    return x if line_strides(x.shape, x.stride(), dim) is not None else x.contiguous()


def _geometry(x: Tensor, n: int | None = None) -> _Geometry:
    dim = 0 if x.dim() == 1 else 1
    return _Geometry(tuple(x.shape), x.stride(), dim, x.shape[dim] if n is None else n)


def _tile(n: int, axis: int, double: bool, share: int = 1) -> Tile:
    elements = (TILE_FLOAT64 if double else TILE) // share
    block = min(triton.next_power_of_2(n), elements if axis == 1 else COLUMN_BLOCK)
    lines = elements // block
    return Tile(lines=min(lines, MOST_ROWS) if axis == 1 else lines, block=block, warps=WARPS, whole=False)


@lru_cache(KEPT)
def _forward_launches(
    g: _Geometry, dtypes: tuple[torch.dtype, ...], weighted: bool, options: Options, device: torch.device
) -> tuple[int, Launch, Launch]:
    """(splits, _statistics, _losses), for x and losses of these dtypes."""
    double = torch.float64 in dtypes
    acc = accumulator(dtypes[0])[0]
    axis = 1 if g.inner == 1 else 0
    tile = _tile(g.n, axis, double)
    groups = cdiv(g.lines, tile.lines)
    splits, chunk = choose_splits(g.n, groups, tile, device)
    index = index_type(math.prod(g.shape), extent(g.shape, g.strides), 3 * splits * g.lines)
    flags = (options.softcap != 0.0, options.label_smoothing != 0.0)
    statistics = Launch(
        _statistics, groups * splits,
        (splits, chunk, g.lines, g.n, g.inner, *g.steps(), options.ignore_index, options.softcap),
        (*flags, acc, index, axis, tile.lines, tile.block), tile.warps,
    )  # fmt: skip
    numbers = (options.label_smoothing, options.softcap, options.z_loss)
    losses = Launch(
        _losses, cdiv(g.lines, LINES),
        (splits, g.lines, g.n, g.inner, *g.steps(), options.ignore_index, *numbers),
        (*flags, acc, LINES, triton.next_power_of_2(splits)), 4,
    )  # fmt: skip
    return splits, statistics, losses


def _forward(
    x: Tensor, n: int | None, target: Tensor, weight: Tensor | None, options: Options, loss: Tensor, stats: Tensor
) -> None:
    """The loss and the statistics of each line of a view."""
    g = _geometry(x, n)
    splits, statistics, losses = _forward_launches(g, (x.dtype, loss.dtype), weight is not None, options, x.device)
    part = torch.empty((3, splits, g.lines), dtype=stats.dtype, device=x.device)
    if weight is not None and options.label_smoothing:
        torch.sum(weight, 0, keepdim=True, out=stats[-1:])
    statistics(part, x, target, weight)
    losses(loss, stats, part, x, target, weight)


@lru_cache(KEPT)
def _sum_launches(
    rows: int, dtypes: tuple[torch.dtype, ...], ignore_index: int, mean: bool
) -> tuple[int, Launch, Launch]:
    programs = min(cdiv(rows, SUM_BLOCK), SUM_PROGRAMS)
    constants = (accumulator(dtypes[0])[0], index_type(rows + SUM_PROGRAMS * SUM_BLOCK), SUM_BLOCK)
    adding = Launch(_sum, programs, (rows, programs, ignore_index), constants, 4)
    total = Launch(_total, 1, (programs, 2 * rows), (mean, triton.next_power_of_2(programs)), 4)
    return programs, adding, total


def cross_entropy_forward(
    x: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: int, label_smoothing: float,
    softcap: float, z_loss: float, dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(loss of ``dtype``, statistics): of each line two numbers, then what a mean was divided by and weight's sum."""
    options = Options(ignore_index, float(label_smoothing), float(softcap), float(z_loss))
    target = target.contiguous()
    rows, wide = target.numel(), accumulator(x.dtype)[1]
    stats = torch.empty((2 * rows + 2,), dtype=wide, device=x.device)
    each = torch.empty(target.shape, dtype=dtype if reduction == NONE else wide, device=x.device)
    _forward(_view(x), None, target, weight, options, each, stats)
    if reduction == NONE:
        return each, stats
    loss = torch.empty((), dtype=dtype, device=x.device)
    programs, adding, total = _sum_launches(rows, (wide, dtype), ignore_index, reduction == MEAN)
    partial = torch.empty((2, programs), dtype=wide, device=x.device)
    adding(partial, each, target, weight)
    total(loss, stats, partial)
    return loss, stats


@lru_cache(KEPT)
def _gradient_launch(
    g: _Geometry,
    dx: _Geometry,
    dtypes: tuple[torch.dtype, ...],
    weighted: bool,
    options: Options,
    scale: int,
    mean: bool,
) -> Launch:
    axis = 1 if g.inner == 1 else 0
    stored = g.shape[g.dim]
    plain = not options.softcap and not options.label_smoothing
    tile = _tile(stored, axis, torch.float64 in dtypes, 1 if plain else 2)
    tiles = cdiv(stored, tile.block)
    index = index_type(math.prod(g.shape), extent(g.shape, g.strides), extent(dx.shape, dx.strides))
    return Launch(
        _gradient, cdiv(g.lines, tile.lines) * tiles,
        (tiles, g.lines, g.n, stored, g.inner, *g.steps(), *dx.steps(), options.ignore_index, *options[1:]),
        (options.softcap != 0.0, options.label_smoothing != 0.0, scale, mean, accumulator(dtypes[0])[0], index, axis,
         tile.lines, tile.block), tile.warps,
    )  # fmt: skip


def _backward(
    x: Tensor, dx: Tensor, n: int | None, target: Tensor, weight: Tensor | None, stats: Tensor, scale: Tensor | None,
    options: Options, mean: bool,
) -> None:  # fmt: skip
    """dx of a view of x, which may be dx itself."""
    kind = (NO_SCALE if scale is None else ONE_SCALE if scale.numel() == 1 else LINE_SCALES).value
    dtypes = (x.dtype, x.dtype if scale is None else scale.dtype)
    launch = _gradient_launch(_geometry(x, n), _geometry(dx, n), dtypes, weight is not None, options, kind, mean)
    launch(dx, x, target, weight, stats, scale)


def cross_entropy_backward(
    dy: Tensor, x: Tensor, target: Tensor, weight: Tensor | None, stats: Tensor, ignore_index: int, reduction: int,
    label_smoothing: float, softcap: float, z_loss: float,
) -> Tensor:  # fmt: skip
    """dx, contiguous but where the classes of x are next to each other: then as x."""
    options = Options(ignore_index, float(label_smoothing), float(softcap), float(z_loss))
    dx = torch.empty_like(x) if _class_last(x) else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dense = (target.contiguous(), weight, stats, dy.contiguous())
    _backward(_view(x), _view(dx), None, *dense, options, reduction == MEAN)
    return dx


def cross_entropy_backward_(
    dy: Tensor, x: Tensor, target: Tensor, weight: Tensor | None, stats: Tensor, ignore_index: int, reduction: int,
    label_smoothing: float, softcap: float, z_loss: float,
) -> None:  # fmt: skip
    """dx in the place of a contiguous x."""
    options = Options(ignore_index, float(label_smoothing), float(softcap), float(z_loss))
    _backward(x, x, None, target.contiguous(), weight, stats, dy.contiguous(), options, reduction == MEAN)


def cross_entropy_chunk_(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float, softcap: float,
    z_loss: float, grad_scale: Tensor | None, want_grad: bool, columns: int,
) -> Tensor:  # fmt: skip
    """Losses of each row and, with ``want_grad``, their gradient in the place of the logits and 0 in the padding."""
    options = Options(ignore_index, float(label_smoothing), float(softcap), float(z_loss))
    target = target.contiguous()
    wide = accumulator(logits.dtype)[1]
    stats = torch.empty((2 * target.numel() + 2,), dtype=wide, device=logits.device)
    losses = torch.empty(target.shape, dtype=wide, device=logits.device)
    _forward(logits, columns, target, weight, options, losses, stats)
    if want_grad:
        _backward(logits, logits, columns, target, weight, stats, grad_scale, options, False)
    return losses

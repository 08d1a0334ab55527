"""Softmax and log-softmax over any dimension, with a scale and a mask, forward and backward.

Stock PyTorch runs softmax(x * scale + mask) as three kernels with two intermediate tensors of the size of x. Here the
scores exist only in registers: the forward reads x (and the mask, which is usually small) and writes y; the backward
reads dy and y and writes dx. Nothing but y is kept.

A *line* is what is normalised: n elements along ``dim``. The tensor is (outer, n, inner) in row-major order, which
gives outer * inner lines. Where inner is 1 lines are memory rows and a tile is LINES x BLOCK, reduced along axis 1,
otherwise lines lie across the memory and a tile is BLOCK x LINES, reduced along axis 0: neighbouring lanes read
neighbouring addresses either way. A line that fits the registers is read once (``_whole_forward``,
``_whole_backward``); a longer one is read twice, the second time backwards so as to meet the cache where the first
left it (``_long_forward``, ``_long_backward``), and is split among several programs where there are too few lines to
fill the machine. One-dimensional grid: program = group of LINES lines, or (group, split).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlayers.kernels.indexing import collapse, extent, index_type, pattern, pattern_offset
from fastlayers.kernels.launch import KEPT, Launch, cdiv, multiprocessors


@dataclass(frozen=True)
class Tile:
    """What one program holds: ``lines`` lines, ``block`` elements of each at a time."""

    lines: int
    block: int
    warps: int
    whole: bool


# Elements of a tile and its warps, by the power of two that holds n. 128-bit accesses want 8 16-bit elements a thread;
# 32 a thread keep four of them in flight and leave room for several blocks on an SM, 64 for two. Short lines share a
# tile. The backward holds y and dy, so half as many. Past 32768 (16384) elements the registers of 1024 threads do not
# hold a line. float64 takes two registers an element and more for its exponential: a quarter of these elements.
ROWS_FORWARD = {4096: 4, 8192: 4, 16384: 8, 32768: 16}
ROWS_BACKWARD = {2048: 4, 4096: 8, 8192: 16, 16384: 16}

# Across the memory a tile takes at least 32 lines, since a run of 32 16-bit elements fills two 32-byte sectors.
COLUMNS_FORWARD = {4096: 4, 8192: 4, 16384: 8}
COLUMNS_BACKWARD = {2048: 4, 4096: 4, 8192: 8}
COLUMN_LINES = 32

# Long rows: 1024 threads, so that an SM works on one row at a time and the 132 rows of 131072 16-bit elements in flight
# (34 MB) stay in the L2 cache for their second reading. Long columns: 128 contiguous bytes of 16-bit elements. Blocks
# are for 16-bit elements; wider ones get fewer, for a thread has 64 registers here and float32 spilled at 16 elements.
LONG_ROWS = Tile(lines=1, block=16384, warps=32, whole=False)
LONG_COLUMNS = Tile(lines=64, block=64, warps=8, whole=False)

# A split line leaves one (maximum, sum) a split and line, which every program then reads whole: keep that to one tile.
MAX_SPLIT_STATISTICS = 4096


def tile_for(n: int, axis: int, backward: bool, itemsize: int) -> Tile:
    """The tile for lines of n elements, the widest of whose operands has ``itemsize`` bytes an element."""
    block = triton.next_power_of_2(n)
    if axis == 1:
        table, least_lines, long = ROWS_BACKWARD if backward else ROWS_FORWARD, 1, LONG_ROWS
    else:
        table, least_lines, long = COLUMNS_BACKWARD if backward else COLUMNS_FORWARD, COLUMN_LINES, LONG_COLUMNS
    for elements, warps in table.items():
        elements //= 4 if itemsize == 8 else 1
        if block * least_lines <= elements:
            return Tile(lines=elements // block, block=block, warps=warps, whole=True)
    return Tile(long.lines, long.block * 2 // itemsize, long.warps, whole=False)


def choose_splits(n: int, groups: int, tile: Tile, device: torch.device) -> tuple[int, int]:
    """(programs a line, elements each takes of it): more than one where the groups of lines leave the machine idle."""
    idle = 2 * multiprocessors(device) // groups
    splits = min(idle, cdiv(n, 2 * tile.block), MAX_SPLIT_STATISTICS // tile.lines) if idle > 2 else 1
    chunk = cdiv(cdiv(n, splits), tile.block) * tile.block
    return cdiv(n, chunk), chunk


# -------------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def tile_lanes(line, position, AXIS: tl.constexpr):
    """Lines and positions as the two axes of a tile."""
    return tl.expand_dims(line, AXIS), tl.expand_dims(position, 1 - AXIS)


@triton.jit
def element_offset(i, k, inner, stride_outer, stride_n, stride_inner):
    """Of element k of line i."""
    return (i // inner * stride_outer + i % inner * stride_inner) + k * stride_n


@triton.jit
def _mask_offset(i, k, inner, size1, size2, mask0, mask1, mask2, mask_n, mask_inner):
    return pattern_offset(i // inner, size1, size2, mask0, mask1, mask2) + i % inner * mask_inner + k * mask_n


@triton.jit
def _scores(
    x_ptr, mask_ptr, line, position, lines, n, inner, x_outer, x_n, x_inner, scale, size1, size2, mask0, mask1, mask2,
    mask_n, mask_inner, ACC: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    """A tile of x * scale + mask; minus infinity outside the tensor."""
    i, k = tile_lanes(line, position, AXIS)
    inside = (i < lines) & (k < n)
    x = tl.load(x_ptr + element_offset(i, k, inner, x_outer, x_n, x_inner), mask=inside, other=0.0).to(ACC)
    scores = x * tl.full((), scale, ACC)
    if mask_ptr is not None:
        offset = _mask_offset(i, k, inner, size1, size2, mask0, mask1, mask2, mask_n, mask_inner)
        mask = tl.load(mask_ptr + offset, mask=inside, other=0)
        if mask_ptr.dtype.element_ty == tl.int1:
            inside = inside & (mask != 0)
        else:
            scores += mask.to(ACC)
    return tl.where(inside, scores, float("-inf"))


@triton.jit
def _probabilities(scores, largest, total, AXIS: tl.constexpr, LOG: tl.constexpr, DTYPE: tl.constexpr):
    """y from the scores, their maximum a line and the sum of exp(scores - maximum)."""
    largest = tl.expand_dims(largest, AXIS)
    total = tl.expand_dims(total, AXIS)
    if LOG:
        return (scores - largest - tl.log(total)).to(DTYPE)
    exponentials = tl.exp(scores - largest)
    if tl.float32 == DTYPE:  # rounded once, as torch does; 16-bit results hide the second rounding
        return tl.div_rn(exponentials, tl.broadcast_to(total, exponentials.shape))
    return (exponentials * (1.0 / total)).to(DTYPE)


@triton.jit
def _gradient(
    dy, y, dot, mask_ptr, i, k, inside, inner, scale, size1, size2, mask0, mask1, mask2, mask_n, mask_inner,
    AXIS: tl.constexpr, LOG: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dx from dy, y and the sum of dy * y (LOG: of dy); 0 where a boolean mask left x out."""
    dot = tl.expand_dims(dot, AXIS)
    dx = (dy - tl.exp(y) * dot) if LOG else y * (dy - dot)
    if mask_ptr is not None:
        offset = _mask_offset(i, k, inner, size1, size2, mask0, mask1, mask2, mask_n, mask_inner)
        dx = tl.where(tl.load(mask_ptr + offset, mask=inside, other=0) != 0, dx, 0.0)
    return dx * tl.full((), scale, ACC)


@triton.jit
def _whole_forward(
    y_ptr, x_ptr, mask_ptr, lines, n, inner, y_outer, x_outer, x_n, x_inner, scale: tl.float64, size1, size2, mask0,
    mask1, mask2, mask_n, mask_inner, LOG: tl.constexpr, ACC: tl.constexpr, INDEX: tl.constexpr, AXIS: tl.constexpr,
    LINES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y for LINES whole lines a program, read once: x and mask in, y out."""
    line = tl.program_id(0).to(INDEX) * LINES + tl.arange(0, LINES)
    position = tl.arange(0, BLOCK).to(INDEX)
    scores = _scores(
        x_ptr, mask_ptr, line, position, lines, n, inner, x_outer, x_n, x_inner, scale, size1, size2, mask0, mask1,
        mask2, mask_n, mask_inner, ACC, AXIS,
    )  # fmt: skip
    largest = tl.max(scores, AXIS)
    total = tl.sum(tl.exp(scores - tl.expand_dims(largest, AXIS)), AXIS)
    y = _probabilities(scores, largest, total, AXIS, LOG, y_ptr.dtype.element_ty)
    i, k = tile_lanes(line, position, AXIS)
    tl.store(y_ptr + element_offset(i, k, inner, y_outer, inner, 1), y, mask=(i < lines) & (k < n))


@triton.jit
def _whole_backward(
    dx_ptr, dy_ptr, y_ptr, mask_ptr, lines, n, inner, y_outer, dy_outer, dy_n, dy_inner, scale: tl.float64, size1,
    size2, mask0, mask1, mask2, mask_n, mask_inner, LOG: tl.constexpr, ACC: tl.constexpr, INDEX: tl.constexpr,
    AXIS: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx for LINES whole lines a program: dy and y in, each read once, dx out."""
    line = tl.program_id(0).to(INDEX) * LINES + tl.arange(0, LINES)
    i, k = tile_lanes(line, tl.arange(0, BLOCK).to(INDEX), AXIS)
    inside = (i < lines) & (k < n)
    offset = element_offset(i, k, inner, y_outer, inner, 1)
    y = tl.load(y_ptr + offset, mask=inside, other=0.0).to(ACC)
    dy = tl.load(dy_ptr + element_offset(i, k, inner, dy_outer, dy_n, dy_inner), mask=inside, other=0.0).to(ACC)
    dot = tl.sum(dy if LOG else dy * y, AXIS)
    dx = _gradient(
        dy, y, dot, mask_ptr, i, k, inside, inner, scale, size1, size2, mask0, mask1, mask2, mask_n, mask_inner, AXIS,
        LOG, ACC,
    )  # fmt: skip
    tl.store(dx_ptr + offset, dx.to(dx_ptr.dtype.element_ty), mask=inside)


# A long line in one program (BOTH), or split: one launch for the STATISTICS of every split, one that WRITEs.
BOTH, STATISTICS, WRITE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def combine_totals(largest, total, AXIS: tl.constexpr):
    """Partial maxima and sums reduced along AXIS. A line with plus infinity is NaN, as its plain computation is."""
    maximum = tl.max(largest, AXIS)
    total = tl.sum(total * tl.exp(largest - tl.expand_dims(maximum, AXIS)), AXIS)
    return maximum, tl.where(maximum == float("inf"), float("nan"), total)


@triton.jit
def load_splits(part_ptr, line, lines, splits, SPLITS: tl.constexpr, AXIS: tl.constexpr, empty):
    """What the splits left for these lines: element (line, split) of a (splits, lines) buffer."""
    i, s = tile_lanes(line, tl.arange(0, SPLITS), AXIS)
    return tl.load(part_ptr + s * lines + i, mask=(i < lines) & (s < splits), other=empty)


@triton.jit
def _long_forward(
    y_ptr, x_ptr, mask_ptr, largest_ptr, total_ptr, splits, chunk, lines, n, inner, y_outer, x_outer, x_n, x_inner,
    scale: tl.float64, size1, size2, mask0, mask1, mask2, mask_n, mask_inner, LOG: tl.constexpr, ACC: tl.constexpr,
    INDEX: tl.constexpr, AXIS: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr, STAGE: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """y for lines too long for the registers: a running maximum and sum a lane, one exponential an element, then y."""
    LOWEST: tl.constexpr = -1.7976931348623157e308 if tl.float64 == ACC else -3.4028234663852886e38
    split = tl.program_id(0) % splits
    line = (tl.program_id(0) // splits).to(INDEX) * LINES + tl.arange(0, LINES)
    start = split.to(INDEX) * chunk
    stop = tl.minimum(start + chunk, n)
    if STAGE == WRITE:
        largest = load_splits(largest_ptr, line, lines, splits, SPLITS, AXIS, LOWEST)
        total = load_splits(total_ptr, line, lines, splits, SPLITS, AXIS, 0.0)
    else:
        # From the lowest finite number, not minus infinity: the difference of two minus infinities would be NaN.
        shape: tl.constexpr = (LINES, BLOCK) if AXIS == 1 else (BLOCK, LINES)
        largest = tl.full(shape, LOWEST, ACC)
        total = tl.full(shape, 0.0, ACC)
        for first in range(start, stop, BLOCK):
            position = first + tl.arange(0, BLOCK).to(INDEX)
            scores = _scores(
                x_ptr, mask_ptr, line, position, lines, n, inner, x_outer, x_n, x_inner, scale, size1, size2, mask0,
                mask1, mask2, mask_n, mask_inner, ACC, AXIS,
            )  # fmt: skip
            difference = scores - largest
            smaller = tl.exp(-tl.abs(difference))
            total = tl.where(difference > 0, total * smaller + 1.0, total + smaller)
            largest = tl.where(difference > 0, scores, largest)
    largest, total = combine_totals(largest, total, AXIS)
    if STAGE == STATISTICS:
        tl.store(largest_ptr + split * lines + line, largest, mask=line < lines)
        tl.store(total_ptr + split * lines + line, total, mask=line < lines)
    else:
        for done in range(0, stop - start, BLOCK):
            position = start + (stop - start - 1 - done) // BLOCK * BLOCK + tl.arange(0, BLOCK).to(INDEX)
            scores = _scores(
                x_ptr, mask_ptr, line, position, lines, n, inner, x_outer, x_n, x_inner, scale, size1, size2, mask0,
                mask1, mask2, mask_n, mask_inner, ACC, AXIS,
            )  # fmt: skip
            y = _probabilities(scores, largest, total, AXIS, LOG, y_ptr.dtype.element_ty)
            i, k = tile_lanes(line, position, AXIS)
            tl.store(y_ptr + element_offset(i, k, inner, y_outer, inner, 1), y, mask=(i < lines) & (k < n))


@triton.jit
def _long_backward(
    dx_ptr, dy_ptr, y_ptr, mask_ptr, dot_ptr, splits, chunk, lines, n, inner, y_outer, dy_outer, dy_n, dy_inner,
    scale: tl.float64, size1, size2, mask0, mask1, mask2, mask_n, mask_inner, LOG: tl.constexpr, ACC: tl.constexpr,
    INDEX: tl.constexpr, AXIS: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr, STAGE: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """dx for lines too long for the registers: the sum first, then dx."""
    split = tl.program_id(0) % splits
    line = (tl.program_id(0) // splits).to(INDEX) * LINES + tl.arange(0, LINES)
    start = split.to(INDEX) * chunk
    stop = tl.minimum(start + chunk, n)
    if STAGE == WRITE:
        dot = load_splits(dot_ptr, line, lines, splits, SPLITS, AXIS, 0.0)
    else:
        shape: tl.constexpr = (LINES, BLOCK) if AXIS == 1 else (BLOCK, LINES)
        dot = tl.full(shape, 0.0, ACC)
        for first in range(start, stop, BLOCK):
            i, k = tile_lanes(line, first + tl.arange(0, BLOCK).to(INDEX), AXIS)
            inside = (i < lines) & (k < n)
            dy_offset = element_offset(i, k, inner, dy_outer, dy_n, dy_inner)
            dy = tl.load(dy_ptr + dy_offset, mask=inside, other=0.0).to(ACC)
            if LOG:
                dot += dy
            else:
                y_offset = element_offset(i, k, inner, y_outer, inner, 1)
                dot += dy * tl.load(y_ptr + y_offset, mask=inside, other=0.0).to(ACC)
    dot = tl.sum(dot, AXIS)
    if STAGE == STATISTICS:
        tl.store(dot_ptr + split * lines + line, dot, mask=line < lines)
    else:
        for done in range(0, stop - start, BLOCK):
            first = start + (stop - start - 1 - done) // BLOCK * BLOCK
            i, k = tile_lanes(line, first + tl.arange(0, BLOCK).to(INDEX), AXIS)
            inside = (i < lines) & (k < n)
            offset = element_offset(i, k, inner, y_outer, inner, 1)
            y = tl.load(y_ptr + offset, mask=inside, other=0.0).to(ACC)
            dy_offset = element_offset(i, k, inner, dy_outer, dy_n, dy_inner)
            dy = tl.load(dy_ptr + dy_offset, mask=inside, other=0.0).to(ACC)
            dx = _gradient(
                dy, y, dot, mask_ptr, i, k, inside, inner, scale, size1, size2, mask0, mask1, mask2, mask_n, mask_inner,
                AXIS, LOG, ACC,
            )  # fmt: skip
            tl.store(dx_ptr + offset, dx.to(dx_ptr.dtype.element_ty), mask=inside)


# ------------------------------------------------------------------------------------------------------------- wrappers


@dataclass(frozen=True, eq=False)
class Plan:
    """All that a call needs beyond its tensors."""

    copy_x: bool
    copy_mask: bool
    launches: tuple[Launch, ...]
    absent: int  # buffers that the kernel takes and this plan does without
    buffers: int
    buffer_shape: tuple[int, int] = (0, 0)
    buffer_dtype: torch.dtype = torch.float32

    def run(self, out: Tensor, *tensors: Tensor | None) -> None:
        buffers = [
            torch.empty(self.buffer_shape, dtype=self.buffer_dtype, device=out.device) for _ in range(self.buffers)
        ]
        for launch in self.launches:
            launch(out, *tensors, *buffers, *(None,) * self.absent)


def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def line_strides(shape: torch.Size, strides: tuple[int, ...], dim: int) -> tuple[int, int, int] | None:
    """(outer, n, inner) strides; None where there are no such three, or they would have it read in bits."""
    outer, inner = collapse(shape[:dim], strides[:dim]), collapse(shape[dim + 1 :], strides[dim + 1 :])
    if len(outer) > 1 or len(inner) > 1:
        return None
    found = (outer[0][1] if outer else 0, strides[dim], inner[0][1] if inner else 0)
    return found if (found[2] if inner else found[1]) <= 1 else None


def _mask_strides(shape: torch.Size, strides: tuple[int, ...], dim: int) -> tuple[int, ...] | None:
    """The seven index arguments of a mask; None where it is too intricate for them."""
    outer, inner = pattern(shape[:dim], strides[:dim]), collapse(shape[dim + 1 :], strides[dim + 1 :])
    if outer is None or len(inner) > 1:
        return None
    return (*outer, strides[dim], inner[0][1] if inner else 0)


@lru_cache(KEPT)
def _plan(
    backward: bool, shape: torch.Size, strides: tuple[int, ...], mask_strides: tuple[int, ...] | None,
    dtypes: tuple[torch.dtype | None, ...], dim: int, scale: float, log: bool, device: torch.device,
) -> Plan:  # fmt: skip
    """For x (in the backward, dy) of these strides and a mask expanded to its shape.

    ``dtypes`` are those of all tensors, the mask last; the device is that of the launches.
    """
    n, inner = shape[dim], math.prod(shape[dim + 1 :])
    numel = math.prod(shape)
    lines, axis = numel // n, 1 if inner == 1 else 0
    x_strides = line_strides(shape, strides, dim)
    copy_x = x_strides is None
    if x_strides is None:
        strides, x_strides = _contiguous(shape), (n * inner, inner, 1)
    mask_arguments: tuple[int | None, ...] | None = (None,) * 7
    copy_mask = False
    if mask_strides is not None:
        mask_arguments = _mask_strides(shape, mask_strides, dim)
    if mask_arguments is None:
        copy_mask, mask_strides = True, _contiguous(shape)
        mask_arguments = _mask_strides(shape, mask_strides, dim)
    assert mask_arguments is not None  # a contiguous tensor is never too intricate
    double = torch.float64 in dtypes
    index = index_type(numel, extent(shape, strides), extent(shape, mask_strides or strides))
    tile = tile_for(n, axis, backward, max(dtype.itemsize for dtype in dtypes[:-1] if dtype is not None))
    groups = cdiv(lines, tile.lines)
    geometry = (lines, n, inner, n * inner, *x_strides, scale, *mask_arguments)
    constants = (log, tl.float64 if double else tl.float32, index, axis, tile.lines, tile.block)
    if tile.whole:
        whole = Launch(_whole_backward if backward else _whole_forward, groups, geometry, constants, tile.warps)
        return Plan(copy_x, copy_mask, (whole,), absent=0, buffers=0)
    long, buffers = (_long_backward, 1) if backward else (_long_forward, 2)
    splits, chunk = choose_splits(n, groups, tile, device)
    if splits == 1:
        both = Launch(long, groups, (1, n, *geometry), (*constants, BOTH.value, 1), tile.warps)
        return Plan(copy_x, copy_mask, (both,), absent=buffers, buffers=0)
    arguments = (splits, chunk, *geometry)
    launches = tuple(
        Launch(long, groups * splits, arguments, (*constants, stage, triton.next_power_of_2(splits)), tile.warps)
        for stage in (STATISTICS.value, WRITE.value)
    )
    buffer_dtype = torch.float64 if double else torch.float32
    return Plan(copy_x, copy_mask, launches, 0, buffers, (splits, lines), buffer_dtype)


def softmax_forward(x: Tensor, dim: int, scale: float, mask: Tensor | None, dtype: torch.dtype, log: bool) -> Tensor:
    """softmax, or log_softmax, of x * scale + mask along dim, as a contiguous tensor of ``dtype``."""
    shape = x.shape
    mask_strides = mask_dtype = None
    if mask is not None:
        mask = mask.expand(shape)
        mask_strides, mask_dtype = mask.stride(), mask.dtype
    dtypes = (x.dtype, dtype, mask_dtype)
    plan = _plan(False, shape, x.stride(), mask_strides, dtypes, dim, float(scale), log, x.device)
    if plan.copy_x:
        x = x.contiguous()
    if plan.copy_mask and mask is not None:
        mask = mask.contiguous()
    y = torch.empty(shape, dtype=dtype, device=x.device)
    plan.run(y, x, mask)
    return y


def softmax_backward(
    dy: Tensor, y: Tensor, dim: int, scale: float, mask: Tensor | None, dtype: torch.dtype, log: bool
) -> Tensor:
    """dx of :func:`softmax_forward` from dy and its contiguous result y, as a contiguous tensor of ``dtype``.

    ``mask`` is the forward's if it was boolean, else None: where it is False dx is 0, even where dy is not finite.
    """
    shape = y.shape
    mask_strides = mask_dtype = None
    if mask is not None:
        mask = mask.expand(shape)
        mask_strides, mask_dtype = mask.stride(), mask.dtype
    dtypes = (dy.dtype, y.dtype, dtype, mask_dtype)
    plan = _plan(True, shape, dy.stride(), mask_strides, dtypes, dim, float(scale), log, y.device)
    if plan.copy_x:
        dy = dy.contiguous()
    if plan.copy_mask and mask is not None:
        mask = mask.contiguous()
    dx = torch.empty(shape, dtype=dtype, device=y.device)
    plan.run(dx, dy, y, mask)
    return dx

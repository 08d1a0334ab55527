"""GroupNorm with an activation in both layouts, forward and backward; InstanceNorm is one channel a group.

Stock PyTorch reads x for the statistics, reads it again for the norm, and runs the activation as one more kernel; its
backward passes over x and dy three to four times. Here a group that fits the registers is read once and written once,
forward (``_whole_forward``) and backward (``_whole_backward``): program = GROUPS groups, tile = GROUPS x PER x INNER,
channels of a group by pixels. Channels last these are reached by strides, which is worth it while some channels lie
together. Larger groups take the kernels of ``channels``: statistics, then the result, each in one pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlayers.kernels.activations import activate, activate_backward
from fastlayers.kernels.channels import gradient_launches, normalise_launch, statistics_launches
from fastlayers.kernels.image_geometry import BACKWARD_TILE, FORWARD_TILE, Geometry, dense, geometry, in_layout
from fastlayers.kernels.indexing import index_type
from fastlayers.kernels.launch import KEPT, Launch, cdiv, multiprocessors
from fastlayers.kernels.reductions import accumulator, sum_rows, unit

# Elements of a tile, padded to powers of two, and its warps: 16 to 32 a thread in the forward, 16 in the backward,
# which holds x and dy. Small groups share a tile as long as there are two programs for each multiprocessor. float64: a
# quarter.
FORWARD = {2048: 4, 8192: 8, 16384: 16}
BACKWARD = {2048: 4, 4096: 8, 8192: 16}
PROGRAMS_PER_MULTIPROCESSOR = 2

# Bytes of a pixel's channels of one group, channels last, from which on they are read group by group: half a sector.
LEAST_BYTES = 16


@dataclass(frozen=True)
class Tile:
    groups: int
    per: int
    inner: int
    warps: int


def tile_for(per: int, inner: int, groups: int, table: dict[int, int], itemsize: int, programs: int) -> Tile | None:
    """The tile of whole groups of per x inner elements, of which there are ``groups``; None where it is too large."""
    per, inner = triton.next_power_of_2(per), triton.next_power_of_2(inner)
    for elements, warps in table.items():
        elements //= 4 if itemsize == 8 else 1
        if per * inner <= elements:
            together = min(elements // (per * inner), triton.next_power_of_2(cdiv(groups, programs)))
            return Tile(together, per, inner, warps)
    return None


# -------------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def _load(pointer, offset, inside, ACC: tl.constexpr):
    return tl.load(pointer + offset, mask=inside, other=0.0).to(ACC)


@triton.jit
def _tile(row, rows, groups, per, inner, LAST: tl.constexpr, PER: tl.constexpr, INNER: tl.constexpr):
    """Offsets of a tile of groups, and which of it is there; ``row`` counts groups over all samples."""
    c = tl.arange(0, PER)[None, :, None]
    i = tl.arange(0, INNER)[None, None, :]
    row = row[:, None, None]
    if LAST:
        offset = ((row // groups * inner + i) * groups + row % groups) * per + c
    else:
        offset = (row * per + c) * inner + i
    return offset, (row < rows) & (c < per) & (i < inner)


@triton.jit
def _channels(row, rows, groups, per, PER: tl.constexpr):
    """The channels of groups, their places in (sample, channel), and which are there."""
    c = tl.arange(0, PER)[None, :]
    return (row % groups)[:, None] * per + c, row[:, None] * per + c, (row < rows)[:, None] & (c < per)


@triton.jit
def _whole_forward(
    y_ptr, stats_ptr, x_ptr, weight_ptr, bias_ptr, rows, groups, per_units, inner_units, eps: tl.float64,
    ACT: tl.constexpr, LAST: tl.constexpr, PER_UNIT: tl.constexpr, INNER_UNIT: tl.constexpr, ACC: tl.constexpr,
    INDEX: tl.constexpr, GROUPS: tl.constexpr, PER: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """y for GROUPS whole groups a program: x in, y and statistics out."""
    per, inner = per_units * PER_UNIT, inner_units * INNER_UNIT
    row = tl.program_id(0).to(INDEX) * GROUPS + tl.arange(0, GROUPS)
    offset, inside = _tile(row, rows, groups, per, inner, LAST, PER, INNER)
    channel, _, there = _channels(row, rows, groups, per, PER)
    x = _load(x_ptr, offset, inside, ACC)
    n = tl.full((), 1.0, ACC) * per * inner
    mean = tl.sum(tl.sum(x, 2), 1) / n
    x = tl.where(inside, x - mean[:, None, None], 0.0)
    rest = tl.sum(tl.sum(x, 2), 1) / n  # what the rounding of a sum of large values has left out
    mean += rest
    x = tl.where(inside, x - rest[:, None, None], 0.0)
    rstd = tl.rsqrt(tl.sum(tl.sum(x * x, 2), 1) / n + tl.full((), eps, ACC))
    tl.store(stats_ptr + row, mean, mask=row < rows)
    tl.store(stats_ptr + rows + row, rstd, mask=row < rows)
    if weight_ptr is None:
        z = x * rstd[:, None, None]
    else:
        z = x * (rstd[:, None] * _load(weight_ptr, channel, there, ACC))[:, :, None]
    if bias_ptr is not None:
        z += _load(bias_ptr, channel, there, ACC)[:, :, None]
    tl.store(y_ptr + offset, activate(z, ACT).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _whole_backward(
    dx_ptr, sums_ptr, dy_ptr, x_ptr, weight_ptr, bias_ptr, stats_ptr, rows, groups, per_units, inner_units,
    ACT: tl.constexpr, LAST: tl.constexpr, PER_UNIT: tl.constexpr, INNER_UNIT: tl.constexpr, ACC: tl.constexpr,
    INDEX: tl.constexpr, GROUPS: tl.constexpr, PER: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """dx for GROUPS whole groups a program: dy and x in, dx out.

    sums[0, sample, channel] = what the sample adds to dweight, sums[1, sample, channel] to dbias.
    """
    per, inner = per_units * PER_UNIT, inner_units * INNER_UNIT
    row = tl.program_id(0).to(INDEX) * GROUPS + tl.arange(0, GROUPS)
    offset, inside = _tile(row, rows, groups, per, inner, LAST, PER, INNER)
    channel, place, there = _channels(row, rows, groups, per, PER)
    x = _load(x_ptr, offset, inside, ACC)
    dz = _load(dy_ptr, offset, inside, ACC)
    mean = tl.load(stats_ptr + row, mask=row < rows, other=0.0)[:, None, None]
    rstd = tl.load(stats_ptr + rows + row, mask=row < rows, other=0.0)
    normal = (x - mean) * rstd[:, None, None]
    if weight_ptr is not None:
        weight = _load(weight_ptr, channel, there, ACC)
    if ACT != 0:
        # As in the forward, to the last digit: x - mean times the product of rstd and weight.
        if weight_ptr is None:
            z = normal
        else:
            z = (x - mean) * (rstd[:, None] * weight)[:, :, None]
        if bias_ptr is not None:
            z += _load(bias_ptr, channel, there, ACC)[:, :, None]
        dz = tl.where(inside, activate_backward(dz, z, ACT), 0.0)
    for_weight = tl.sum(dz * normal, 2)
    for_bias = tl.sum(dz, 2)
    tl.store(sums_ptr + place, for_weight, mask=there)
    half = tl.full((), 1, INDEX) * rows * per
    tl.store(sums_ptr + half + place, for_bias, mask=there)
    if weight_ptr is not None:
        for_weight *= weight
        for_bias *= weight
        dz *= weight[:, :, None]
    n = tl.full((), 1.0, ACC) * per * inner
    along = (tl.sum(for_weight, 1) / n)[:, None, None]
    plain = (tl.sum(for_bias, 1) / n)[:, None, None]
    dx = (dz - plain - normal * along) * rstd[:, None, None]
    tl.store(dx_ptr + offset, dx.to(dx_ptr.dtype.element_ty), mask=inside)


# ------------------------------------------------------------------------------------------------------------- wrappers


def _whole_launch(
    function: object, shape: torch.Size, last: bool, groups: int, dtype: torch.dtype, act: int, eps: tuple[float, ...],
    device: torch.device,
) -> Launch | None:  # fmt: skip
    """None where a group does not fit the registers, or its channels lie too far apart."""
    per, inner, rows = shape[1] // groups, math.prod(shape[2:]), shape[0] * groups
    last = last and inner > 1
    if last and per < shape[1] and per * dtype.itemsize < LEAST_BYTES:
        return None
    table = BACKWARD if function is _whole_backward else FORWARD
    programs = PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(device)
    tile = tile_for(per, inner, rows, table, dtype.itemsize, programs)
    if tile is None:
        return None
    numel = math.prod(shape)
    units = (unit(per), unit(inner))
    constants = (act, last, *units, accumulator(dtype)[0], index_type(numel), tile.groups, tile.per, tile.inner)
    scalars = (rows, groups, per // units[0], inner // units[1], *eps)
    return Launch(function, cdiv(rows, tile.groups), scalars, constants, tile.warps)


@dataclass(frozen=True, eq=False)
class Forward:
    """One launch of whole groups, or three."""

    accumulator: torch.dtype
    whole: Launch | None
    geometry: Geometry
    statistics: Launch
    finish: Launch
    normalise: Launch


@lru_cache(KEPT)
def _forward_plan(
    shape: torch.Size, last: bool, dtypes: tuple[torch.dtype | None, ...], groups: int, eps: float, act: int,
    device: torch.device,
) -> Forward:  # fmt: skip
    """``dtypes``: of x, weight, bias and y."""
    dtype = dtypes[0]
    assert dtype is not None
    g = geometry(shape, last, False, shape[1] // groups, FORWARD_TILE, dtype, device)
    return Forward(
        accumulator(dtype)[1],
        _whole_launch(_whole_forward, shape, last, groups, dtype, act, (eps,), device),
        g,
        *statistics_launches(g, dtype, 0.0, eps),
        normalise_launch(g, dtype, act, eps, False),
    )


def group_norm_forward(
    x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, act: int, dtype: torch.dtype,
    keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(y, stats): y = act(group_norm(x)), of ``dtype`` and x's layout.

    stats are means and rstds as (2, N * num_groups), and empty unless ``keep``.
    """
    x, last = dense(x)
    dtypes = (x.dtype, None if weight is None else weight.dtype, None if bias is None else bias.dtype, dtype)
    plan = _forward_plan(x.shape, last, dtypes, num_groups, float(eps), act, x.device)
    y = torch.empty_like(x, dtype=dtype)
    # Written in any case: a kernel without that is compiled to other roundings, and the result has other bits.
    stats = torch.empty((2, x.shape[0] * num_groups), dtype=plan.accumulator, device=x.device)
    if plan.whole is not None:
        plan.whole(y, stats, x, weight, bias)
    else:
        part = torch.empty(plan.geometry.part_shape, dtype=plan.accumulator, device=x.device)
        plan.statistics(part, x)
        plan.finish(stats, None, None, part)
        plan.normalise(y, None, None, x, None, weight, bias, stats, None)
    return y, stats if keep else stats.new_empty(0)


@dataclass(frozen=True, eq=False)
class Backward:
    accumulator: torch.dtype
    whole: Launch | None
    geometry: Geometry
    sums: Launch
    finish: Launch
    gradient: Launch


@lru_cache(KEPT)
def _backward_plan(
    shape: torch.Size, last: bool, dtypes: tuple[torch.dtype | None, ...], groups: int, act: int, device: torch.device
) -> Backward:
    """``dtypes``: of dy, x, weight and bias."""
    dtype = dtypes[1]
    assert dtype is not None
    g = geometry(shape, last, False, shape[1] // groups, BACKWARD_TILE, dtype, device)
    return Backward(
        accumulator(dtype)[1],
        _whole_launch(_whole_backward, shape, last, groups, dtype, act, (), device),
        g,
        *gradient_launches(g, dtype, act),
    )


def group_norm_backward(
    dy: Tensor, x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, stats: Tensor, act: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias); the latter two of weight's dtype, without a weight of that of the statistics."""
    x, last = dense(x)
    dy = in_layout(dy, x)
    dtypes = (dy.dtype, x.dtype, None if weight is None else weight.dtype, None if bias is None else bias.dtype)
    plan = _backward_plan(x.shape, last, dtypes, num_groups, act, x.device)
    n, channels = x.shape[:2]
    dx = torch.empty_like(x)
    dweight = torch.empty(channels, dtype=plan.accumulator if weight is None else weight.dtype, device=x.device)
    dbias = torch.empty_like(dweight)
    sums = torch.empty(2, n, channels, dtype=plan.accumulator, device=x.device)
    if plan.whole is not None:
        plan.whole(dx, sums, dy, x, weight, bias, stats)
    else:
        part = torch.empty(plan.geometry.part_shape, dtype=plan.accumulator, device=x.device)
        means = torch.empty_like(stats)
        operands = (dy, x, None, None, weight, bias, stats)
        plan.sums(part, None, None, *operands)
        plan.finish(sums[0], sums[1], means, part, weight, stats)
        plan.gradient(dx, None, *operands, means)
    sum_rows(sums, dweight, dbias)
    return dx, dweight, dbias

"""Kernels of the norms whose parameters are one a channel: BatchNorm, GroupNorm and InstanceNorm, in both layouts.

The memory is (samples, outer, channels, inner), of which outer and inner are reduced; a statistic may be shared by
``per`` neighbouring channels, a *group*:

    BatchNorm, contiguous      1 x N x C x pixels          GroupNorm, contiguous      N x 1 x C x pixels
    BatchNorm, channels last   1 x N * pixels x C x 1      GroupNorm, channels last   N x pixels x C x 1

A tile is OUTER x CHANNELS x INNER, so channels last it is CHANNELS wide, otherwise INNER. One-dimensional grid: program
= (sample, split, block of channels), and a split is a share of outer and inner that the program walks in tiles. Each
forward is ``_statistics`` (a mean and a sum of squared deviations a channel and split, without cancellation),
``_finish_statistics`` (merged over splits and groups) and ``_normalise``; each backward ``_sums``, ``_finish_sums`` and
``_gradient``. The third kernel walks as the first did, but all backwards, to meet the cache where that left it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastlayers.kernels.activations import activate, activate_backward
from fastlayers.kernels.image_geometry import WARPS, Geometry
from fastlayers.kernels.indexing import index_type
from fastlayers.kernels.launch import Launch, cdiv
from fastlayers.kernels.reductions import accumulator, merge, welford

# Bytes of bits of a program where neighbours in memory are not of one tile.
FLAT_TILE, FLAT_WARPS = 2048, 4

# -------------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def _load(pointer, offset, inside, ACC: tl.constexpr):
    return tl.load(pointer + offset, mask=inside, other=0.0).to(ACC)


@triton.jit
def _share(
    program, outer, channels, inner, splits, inner_splits, outer_steps, inner_steps,
    INDEX: tl.constexpr, OUTER: tl.constexpr, CHANNELS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """A program's (sample, split, channels, first of outer and inner, the ends of both)."""
    blocks = tl.cdiv(channels, CHANNELS)
    channel = program % blocks * CHANNELS + tl.arange(0, CHANNELS)
    program = program // blocks
    split = program % splits
    first_outer = (split // inner_splits).to(INDEX) * (outer_steps * OUTER)
    first_inner = (split % inner_splits).to(INDEX) * (inner_steps * INNER)
    last_outer = tl.minimum(first_outer + outer_steps * OUTER, outer)
    last_inner = tl.minimum(first_inner + inner_steps * INNER, inner)
    return (program // splits).to(INDEX), split, channel, first_outer, first_inner, last_outer, last_inner


@triton.jit
def _tile(
    sample, o, channel, i, outer, channels, inner, last_outer, last_inner,
    OUTER: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Offsets of the tile at (o, i), and which of it is there."""
    o = o + tl.arange(0, OUTER)[:, None, None]
    i = i + tl.arange(0, INNER)[None, None, :]
    c = channel[None, :, None]
    offset = ((sample * outer + o) * channels + c) * inner + i
    return offset, (o < last_outer) & (c < channels) & (i < last_inner)


@triton.jit
def _statistics(
    part_ptr, x_ptr, outer, channel_units, inner_units, splits, inner_splits, outer_steps, inner_steps,
    CHANNEL_UNIT: tl.constexpr, INNER_UNIT: tl.constexpr, ACC: tl.constexpr, INDEX: tl.constexpr,
    OUTER: tl.constexpr, CHANNELS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """part[0 or 1, sample, split, channel] = the mean, or the squared deviations from it, of a split."""
    channels, inner = channel_units * CHANNEL_UNIT, inner_units * INNER_UNIT
    sample, split, channel, first_outer, first_inner, last_outer, last_inner = _share(
        tl.program_id(0), outer, channels, inner, splits, inner_splits, outer_steps, inner_steps,
        INDEX, OUTER, CHANNELS, INNER,
    )  # fmt: skip
    # Tiles that hold anything of a lane along either axis: all of them, or but the last.
    lane_outer = (last_outer - first_outer - 1 - tl.arange(0, OUTER) + OUTER) // OUTER
    lane_inner = (last_inner - first_inner - 1 - tl.arange(0, INNER) + INNER) // INNER
    steps_outer = tl.cdiv(last_outer - first_outer, OUTER)
    steps_inner = tl.cdiv(last_inner - first_inner, INNER)
    full = (lane_inner == steps_inner)[None, None, :]
    mean = tl.full((OUTER, CHANNELS, INNER), 0.0, ACC)
    squares = tl.full((OUTER, CHANNELS, INNER), 0.0, ACC)
    for step in range(0, steps_outer * steps_inner):
        along, across = step // steps_inner, step % steps_inner
        offset, inside = _tile(
            sample, first_outer + along * OUTER, channel, first_inner + across * INNER, outer, channels, inner,
            last_outer, last_inner, OUTER, INNER,
        )  # fmt: skip
        x = _load(x_ptr, offset, inside, ACC)
        # One division a tile: how many elements a lane has had is one of two numbers.
        reciprocal = tl.where(
            full,
            1.0 / (along * steps_inner + across + 1).to(ACC),
            1.0 / (along * (steps_inner - 1) + across + 1).to(ACC),
        )
        mean, squares = welford(x, inside, mean, squares, reciprocal)
    count = (lane_outer[:, None, None] * lane_inner[None, None, :]).to(ACC)
    mean, squares = merge(count, mean, squares, 2)
    mean, squares = merge(tl.sum(count, 2), mean, squares, 0)
    samples = tl.num_programs(0) // (tl.cdiv(channels, CHANNELS) * splits)
    target = (sample * splits + split) * channels + channel
    tl.store(part_ptr + target, mean, mask=channel < channels)
    tl.store(part_ptr + samples.to(INDEX) * splits * channels + target, squares, mask=channel < channels)


@triton.jit
def _part_offset(group, c, split, groups, per, channels, splits):
    """Of a (splits, groups, channels of a group) tile in part[sample, split, channel]; and which of it is there."""
    g = group[None, :, None]
    channel = g * per + c[None, None, :]
    s = split[:, None, None]
    offset = (channel // channels * splits + s) * channels + channel % channels
    return offset, (s < splits) & (g < groups) & (c[None, None, :] < per)


@triton.jit
def _finish_statistics(
    stats_ptr, mean_ptr, var_ptr, part_ptr, groups, per, outer, channels, inner, splits, inner_splits,
    outer_chunk, inner_chunk, momentum: tl.float64, eps: tl.float64,
    ACC: tl.constexpr, INDEX: tl.constexpr, SPLITS: tl.constexpr, GROUPS: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """stats = (mean, rstd) of every group; running statistics, where given, move by ``momentum``."""
    group = tl.program_id(0).to(INDEX) * GROUPS + tl.arange(0, GROUPS)
    half = tl.full((), 1, INDEX) * groups * per * splits
    total = tl.full((), 1.0, ACC) * outer * inner * per
    # The mean of all is summed as the difference from one of them: a large one would lose digits.
    channel = group * per
    some_offset = channel // channels * splits * channels + channel % channels
    some = tl.load(part_ptr + some_offset, mask=group < groups, other=0.0)
    mean = tl.full((GROUPS,), 0.0, ACC)
    for first in range(0, per, PER):
        for first_split in range(0, splits, SPLITS):
            split = first_split + tl.arange(0, SPLITS)
            offset, inside = _part_offset(group, first + tl.arange(0, PER), split, groups, per, channels, splits)
            count = _count(split, outer, inner, inner_splits, outer_chunk, inner_chunk, ACC)
            part = count * (tl.load(part_ptr + offset, mask=inside, other=0.0) - some[None, :, None])
            mean += tl.sum(tl.sum(tl.where(inside, part, 0.0), 2), 0)
    mean = some + mean / total
    squares = tl.full((GROUPS,), 0.0, ACC)
    for first in range(0, per, PER):
        for first_split in range(0, splits, SPLITS):
            split = first_split + tl.arange(0, SPLITS)
            offset, inside = _part_offset(group, first + tl.arange(0, PER), split, groups, per, channels, splits)
            count = _count(split, outer, inner, inner_splits, outer_chunk, inner_chunk, ACC)
            deviation = tl.load(part_ptr + offset, mask=inside, other=0.0) - mean[None, :, None]
            part = tl.load(part_ptr + half + offset, mask=inside, other=0.0) + count * deviation * deviation
            squares += tl.sum(tl.sum(tl.where(inside, part, 0.0), 2), 0)
    inside = group < groups
    tl.store(stats_ptr + group, mean, mask=inside)
    tl.store(stats_ptr + groups + group, tl.rsqrt(squares / total + tl.full((), eps, ACC)), mask=inside)
    share = tl.full((), momentum, ACC)
    if mean_ptr is not None:
        running = _load(mean_ptr, group, inside, ACC)
        tl.store(mean_ptr + group, ((1.0 - share) * running + share * mean).to(mean_ptr.dtype.element_ty), mask=inside)
    if var_ptr is not None:
        variance = squares / tl.maximum(total - 1.0, 1.0)
        running = _load(var_ptr, group, inside, ACC)
        tl.store(
            var_ptr + group, ((1.0 - share) * running + share * variance).to(var_ptr.dtype.element_ty), mask=inside
        )


@triton.jit
def _count(split, outer, inner, inner_splits, outer_chunk, inner_chunk, ACC: tl.constexpr):
    """How many elements of a channel the splits have, as (splits, 1, 1)."""
    split = split.to(tl.int64)
    along = tl.minimum(outer - split // inner_splits * outer_chunk, outer_chunk).to(ACC)
    across = tl.minimum(inner - split % inner_splits * inner_chunk, inner_chunk).to(ACC)
    return tl.maximum(along * across, 0.0)[:, None, None]


@triton.jit
def _parameters(
    stats_ptr, var_ptr, weight_ptr, bias_ptr, sample, channel, channels, groups, per, eps, ACC: tl.constexpr
):
    """(mean, rstd, rstd * weight, bias) of channels; the rstd is from the running variance where that is given.

    Without statistics 0 and 1.
    """
    there = channel < channels
    group = (sample * channels + channel) // per
    mean = tl.zeros(channel.shape, ACC) if stats_ptr is None else _load(stats_ptr, group, there, ACC)
    if stats_ptr is None:
        rstd = mean + 1.0
    elif var_ptr is None:
        rstd = _load(stats_ptr, groups + group, there, ACC)
    else:
        rstd = tl.rsqrt(_load(var_ptr, group, there, ACC) + tl.full((), eps, ACC))
    scale = rstd if weight_ptr is None else rstd * _load(weight_ptr, channel, there, ACC)
    bias = tl.zeros_like(mean) if bias_ptr is None else _load(bias_ptr, channel, there, ACC)
    return mean, rstd, scale, bias


@triton.jit
def _byte_tile(
    sample, o, channel, i, outer, channels, inner, last_outer, last_inner,
    OUTER: tl.constexpr, CHANNELS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Offsets of the bytes of bits of a tile, each of eight neighbours in memory, and which are there."""
    o = o + tl.arange(0, OUTER)[:, None, None]
    if INNER == 1:
        c = tl.min(channel, 0) + 8 * tl.arange(0, CHANNELS // 8)[None, :, None]
        position = i + tl.arange(0, 1)[None, None, :]
    else:
        c = channel[None, :, None]
        position = i + 8 * tl.arange(0, INNER // 8)[None, None, :]
    offset = (((sample * outer + o) * channels + c) * inner + position) // 8
    return offset, (o < last_outer) & (c < channels) & (position < last_inner)


@triton.jit
def _normalise(
    y_ptr, bits_ptr, kept_ptr, x_ptr, residual_ptr, weight_ptr, bias_ptr, stats_ptr, var_ptr,
    groups, per, outer, channel_units, inner_units, splits, inner_splits, outer_steps, inner_steps, eps: tl.float64,
    ACT: tl.constexpr, CHANNEL_UNIT: tl.constexpr, INNER_UNIT: tl.constexpr, ACC: tl.constexpr, INDEX: tl.constexpr,
    OUTER: tl.constexpr, CHANNELS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """y = act((x - mean) * rstd * weight + bias + residual), and where that is positive, as bits, if bits_ptr is given.

    With var_ptr, stats are running means; then ``kept`` gets means and rstds, if it is given.
    """
    channels, inner = channel_units * CHANNEL_UNIT, inner_units * INNER_UNIT
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    sample, split, channel, first_outer, first_inner, last_outer, last_inner = _share(
        program, outer, channels, inner, splits, inner_splits, outer_steps, inner_steps,
        INDEX, OUTER, CHANNELS, INNER,
    )  # fmt: skip
    mean, rstd, scale, bias = _parameters(
        stats_ptr, var_ptr, weight_ptr, bias_ptr, sample, channel, channels, groups, per, eps, ACC
    )
    if kept_ptr is not None and split == 0:
        tl.store(kept_ptr + channel, mean, mask=channel < channels)
        tl.store(kept_ptr + channels + channel, rstd, mask=channel < channels)
    mean, scale, bias = mean[None, :, None], scale[None, :, None], bias[None, :, None]
    steps_inner = tl.cdiv(last_inner - first_inner, INNER)
    steps = tl.cdiv(last_outer - first_outer, OUTER) * steps_inner
    for done in range(0, steps):
        step = steps - 1 - done
        o, i = first_outer + step // steps_inner * OUTER, first_inner + step % steps_inner * INNER
        offset, inside = _tile(
            sample, o, channel, i, outer, channels, inner, last_outer, last_inner, OUTER, INNER
        )  # fmt: skip
        z = (_load(x_ptr, offset, inside, ACC) - mean) * scale + bias
        if residual_ptr is not None:
            z += _load(residual_ptr, offset, inside, ACC)
        tl.store(y_ptr + offset, activate(z, ACT).to(y_ptr.dtype.element_ty), mask=inside)
        if bits_ptr is not None:
            passes = ((z <= 0) == 0).to(tl.int32)
            if INNER == 1:
                passes = tl.reshape(passes, (OUTER, CHANNELS // 8, 1, 8))
            else:
                passes = tl.reshape(passes, (OUTER, CHANNELS, INNER // 8, 8))
            byte, there = _byte_tile(
                sample, o, channel, i, outer, channels, inner, last_outer, last_inner, OUTER, CHANNELS, INNER
            )  # fmt: skip
            packed = tl.sum(passes << tl.arange(0, 8)[None, None, None, :], 3)
            tl.store(bits_ptr + byte, packed.to(tl.uint8), mask=there)


@triton.jit
def _normalise_flat(
    y_ptr, bits_ptr, kept_ptr, x_ptr, residual_ptr, weight_ptr, bias_ptr, stats_ptr, var_ptr,
    n, channels, inner, eps: tl.float64, ACT: tl.constexpr, ACC: tl.constexpr, INDEX: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """`_normalise` of one sample, with bits, where the eight elements of a byte are of several channels or rows."""
    byte = tl.program_id(0).to(INDEX) * (TILE // 8) + tl.arange(0, TILE // 8)
    element = byte[:, None] * 8 + tl.arange(0, 8)[None, :]
    inside = element < n
    channel = tl.where(inside, element // inner % channels, channels)
    mean, rstd, scale, bias = _parameters(
        stats_ptr, var_ptr, weight_ptr, bias_ptr, 0, channel, channels, channels, 1, eps, ACC
    )
    if kept_ptr is not None:
        first = (element < channels * inner) & (element % inner == 0)
        tl.store(kept_ptr + channel, mean, mask=first)
        tl.store(kept_ptr + channels + channel, rstd, mask=first)
    z = (_load(x_ptr, element, inside, ACC) - mean) * scale + bias
    if residual_ptr is not None:
        z += _load(residual_ptr, element, inside, ACC)
    tl.store(y_ptr + element, activate(z, ACT).to(y_ptr.dtype.element_ty), mask=inside)
    packed = tl.sum(((z <= 0) == 0).to(tl.int32) << tl.arange(0, 8)[None, :], 1)
    tl.store(bits_ptr + byte, packed.to(tl.uint8), mask=byte * 8 < n)


@triton.jit
def _dz(
    dy_ptr, residual_ptr, bits_ptr, deviation, scale, bias, offset, inside,
    sample, o, channel, i, outer, channels, inner, last_outer, last_inner,
    ACT: tl.constexpr, PACKED: tl.constexpr, ACC: tl.constexpr,
    OUTER: tl.constexpr, CHANNELS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """dy * act'(z), by the bits of the forward or from z, computed as there; ``deviation`` is x - mean."""
    dy = _load(dy_ptr, offset, inside, ACC)
    if bits_ptr is not None:
        if PACKED:
            byte, there = _byte_tile(
                sample, o, channel, i, outer, channels, inner, last_outer, last_inner, OUTER, CHANNELS, INNER
            )  # fmt: skip
            bits = tl.load(bits_ptr + byte, mask=there, other=0).to(tl.int32)[:, :, :, None]
            passes = tl.reshape(bits >> tl.arange(0, 8)[None, None, None, :] & 1, (OUTER, CHANNELS, INNER))
        else:
            bits = tl.load(bits_ptr + offset // 8, mask=inside, other=0).to(tl.int32)
            passes = bits >> (offset % 8).to(tl.int32) & 1
        dy = tl.where(passes != 0, dy, 0.0)
    elif ACT != 0:
        z = deviation * scale + bias
        if residual_ptr is not None:
            z += _load(residual_ptr, offset, inside, ACC)
        dy = activate_backward(dy, z, ACT)
    return dy


@triton.jit
def _sums(
    part_ptr, dx_ptr, dresidual_ptr, dy_ptr, x_ptr, residual_ptr, bits_ptr, weight_ptr, bias_ptr, stats_ptr,
    groups, per, outer, channel_units, inner_units, splits, inner_splits, outer_steps, inner_steps,
    ACT: tl.constexpr, PACKED: tl.constexpr, CHANNEL_UNIT: tl.constexpr, INNER_UNIT: tl.constexpr,
    ACC: tl.constexpr, INDEX: tl.constexpr, OUTER: tl.constexpr, CHANNELS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """part[0 or 1, sample, split, channel] = the sum of dz, or of dz * (x - mean), of a split.

    With dx_ptr also dx = dz * weight * rstd, as where the statistics are constants, and dresidual = dz.
    """
    channels, inner = channel_units * CHANNEL_UNIT, inner_units * INNER_UNIT
    sample, split, channel, first_outer, first_inner, last_outer, last_inner = _share(
        tl.program_id(0), outer, channels, inner, splits, inner_splits, outer_steps, inner_steps,
        INDEX, OUTER, CHANNELS, INNER,
    )  # fmt: skip
    mean, _, scale, bias = _parameters(
        stats_ptr, None, weight_ptr, bias_ptr, sample, channel, channels, groups, per, 0.0, ACC
    )
    mean, scale, bias = mean[None, :, None], scale[None, :, None], bias[None, :, None]
    plain = tl.full((OUTER, CHANNELS, INNER), 0.0, ACC)
    along = tl.full((OUTER, CHANNELS, INNER), 0.0, ACC)
    steps_inner = tl.cdiv(last_inner - first_inner, INNER)
    for step in range(0, tl.cdiv(last_outer - first_outer, OUTER) * steps_inner):
        o, i = first_outer + step // steps_inner * OUTER, first_inner + step % steps_inner * INNER
        offset, inside = _tile(
            sample, o, channel, i, outer, channels, inner, last_outer, last_inner, OUTER, INNER
        )  # fmt: skip
        deviation = _load(x_ptr, offset, inside, ACC) - mean
        dz = _dz(
            dy_ptr, residual_ptr, bits_ptr, deviation, scale, bias, offset, inside,
            sample, o, channel, i, outer, channels, inner, last_outer, last_inner,
            ACT, PACKED, ACC, OUTER, CHANNELS, INNER,
        )  # fmt: skip
        plain += dz  # 0 outside, where dy is
        along += dz * deviation
        if dx_ptr is not None:
            tl.store(dx_ptr + offset, (dz * scale).to(dx_ptr.dtype.element_ty), mask=inside)
            if dresidual_ptr is not None:
                tl.store(dresidual_ptr + offset, dz.to(dresidual_ptr.dtype.element_ty), mask=inside)
    samples = tl.num_programs(0) // (tl.cdiv(channels, CHANNELS) * splits)
    target = (sample * splits + split) * channels + channel
    tl.store(part_ptr + target, tl.sum(tl.sum(plain, 2), 0), mask=channel < channels)
    target += samples.to(INDEX) * splits * channels
    tl.store(part_ptr + target, tl.sum(tl.sum(along, 2), 0), mask=channel < channels)


@triton.jit
def _finish_sums(
    dweight_ptr, dbias_ptr, means_ptr, part_ptr, weight_ptr, stats_ptr,
    groups, per, outer, channels, inner, splits,
    ACC: tl.constexpr, INDEX: tl.constexpr, SPLITS: tl.constexpr, GROUPS: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """dweight and dbias of every channel of every sample; means, if given, is what :func:`_gradient` takes."""
    group = tl.program_id(0).to(INDEX) * GROUPS + tl.arange(0, GROUPS)
    half = tl.full((), 1, INDEX) * groups * per * splits
    total = tl.full((), 1.0, ACC) * outer * inner * per
    rstd = _load(stats_ptr, groups + group, group < groups, ACC)
    mean_plain = tl.full((GROUPS,), 0.0, ACC)
    mean_along = tl.full((GROUPS,), 0.0, ACC)
    for first in range(0, per, PER):
        c = first + tl.arange(0, PER)
        plain = tl.full((SPLITS, GROUPS, PER), 0.0, ACC)
        along = tl.full((SPLITS, GROUPS, PER), 0.0, ACC)
        for first_split in range(0, splits, SPLITS):
            offset, inside = _part_offset(group, c, first_split + tl.arange(0, SPLITS), groups, per, channels, splits)
            plain += tl.load(part_ptr + offset, mask=inside, other=0.0)
            along += tl.load(part_ptr + half + offset, mask=inside, other=0.0)
        for_bias = tl.sum(plain, 0)
        for_weight = tl.sum(along, 0) * rstd[:, None]
        channel = group[:, None] * per + c[None, :]
        there = (group < groups)[:, None] & (c < per)[None, :]
        tl.store(dweight_ptr + channel, for_weight.to(dweight_ptr.dtype.element_ty), mask=there)
        tl.store(dbias_ptr + channel, for_bias.to(dbias_ptr.dtype.element_ty), mask=there)
        if weight_ptr is not None:
            weight = _load(weight_ptr, channel % channels, there, ACC)
            for_bias *= weight
            for_weight *= weight
        mean_plain += tl.sum(for_bias, 1)
        mean_along += tl.sum(for_weight, 1)
    if means_ptr is not None:
        tl.store(means_ptr + group, rstd * mean_plain / total, mask=group < groups)
        tl.store(means_ptr + groups + group, rstd * rstd * mean_along / total, mask=group < groups)


@triton.jit
def _gradient(
    dx_ptr, dresidual_ptr, dy_ptr, x_ptr, residual_ptr, bits_ptr, weight_ptr, bias_ptr, stats_ptr, means_ptr,
    groups, per, outer, channel_units, inner_units, splits, inner_splits, outer_steps, inner_steps,
    ACT: tl.constexpr, PACKED: tl.constexpr, CHANNEL_UNIT: tl.constexpr, INNER_UNIT: tl.constexpr,
    ACC: tl.constexpr, INDEX: tl.constexpr, OUTER: tl.constexpr, CHANNELS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """dx = dz * weight * rstd - means[0] - (x - mean) * means[1], and dresidual = dz, if that is given."""
    channels, inner = channel_units * CHANNEL_UNIT, inner_units * INNER_UNIT
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    sample, _, channel, first_outer, first_inner, last_outer, last_inner = _share(
        program, outer, channels, inner, splits, inner_splits, outer_steps, inner_steps,
        INDEX, OUTER, CHANNELS, INNER,
    )  # fmt: skip
    mean, _, scale, bias = _parameters(
        stats_ptr, None, weight_ptr, bias_ptr, sample, channel, channels, groups, per, 0.0, ACC
    )
    mean, scale, bias = mean[None, :, None], scale[None, :, None], bias[None, :, None]
    group = (sample * channels + channel) // per
    plain = _load(means_ptr, group, channel < channels, ACC)[None, :, None]
    along = _load(means_ptr, groups + group, channel < channels, ACC)[None, :, None]
    steps_inner = tl.cdiv(last_inner - first_inner, INNER)
    steps = tl.cdiv(last_outer - first_outer, OUTER) * steps_inner
    for done in range(0, steps):
        step = steps - 1 - done
        o, i = first_outer + step // steps_inner * OUTER, first_inner + step % steps_inner * INNER
        offset, inside = _tile(
            sample, o, channel, i, outer, channels, inner, last_outer, last_inner, OUTER, INNER
        )  # fmt: skip
        deviation = _load(x_ptr, offset, inside, ACC) - mean
        dz = _dz(
            dy_ptr, residual_ptr, bits_ptr, deviation, scale, bias, offset, inside,
            sample, o, channel, i, outer, channels, inner, last_outer, last_inner,
            ACT, PACKED, ACC, OUTER, CHANNELS, INNER,
        )  # fmt: skip
        dx = dz * scale - plain - deviation * along
        tl.store(dx_ptr + offset, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        if dresidual_ptr is not None:
            tl.store(dresidual_ptr + offset, dz.to(dresidual_ptr.dtype.element_ty), mask=inside)


# ------------------------------------------------------------------------------------------------------------- launches


def statistics_launches(g: Geometry, dtype: torch.dtype, momentum: float, eps: float) -> tuple[Launch, Launch]:
    """(x to parts: part, x; parts to statistics: stats, running mean, running variance, part)."""
    outer_tile, _, inner_tile = g.tile
    first = Launch(_statistics, g.programs, g.walk, g.constants(dtype), WARPS)
    chunks = (g.inner_splits, g.outer_steps * outer_tile, g.inner_steps * inner_tile)
    return first, g.finish(_finish_statistics, (*chunks, momentum, eps), dtype)


def normalise_launch(g: Geometry, dtype: torch.dtype, act: int, eps: float, bits: bool) -> Launch:
    """y, bits, kept, x, residual, weight, bias, stats, running variance."""
    if bits and not g.packed:
        numel = g.outer * g.channels * g.inner
        constants = (act, accumulator(dtype)[0], index_type(numel), FLAT_TILE)
        return Launch(_normalise_flat, cdiv(numel, FLAT_TILE), (numel, g.channels, g.inner, eps), constants, FLAT_WARPS)
    scalars = (g.groups, g.per, *g.walk, eps)
    return Launch(_normalise, g.programs, scalars, (act, *g.constants(dtype)), WARPS)


def gradient_launches(g: Geometry, dtype: torch.dtype, act: int) -> tuple[Launch, Launch, Launch]:
    """(dy to parts, parts to means and the parameters' gradients, dx), with the arguments of the three kernels."""
    scalars = (g.groups, g.per, *g.walk)
    constants = (act, g.packed, *g.constants(dtype))
    return (
        Launch(_sums, g.programs, scalars, constants, WARPS),
        g.finish(_finish_sums, (), dtype),
        Launch(_gradient, g.programs, scalars, constants, WARPS),
    )

"""How the kernels of norms over channels walk the memory of an image: layout, tiles, and the shares of programs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from fastlayers.kernels.indexing import index_type
from fastlayers.kernels.launch import Launch, cdiv, multiprocessors
from fastlayers.kernels.reductions import accumulator, unit

# Elements of 16 bits of a tile, of wider ones as many bytes, and all of 8 warps: 16 a thread in the forward, whose mean
# and squares are 32 registers, and 8 in the backward, with two tensors and two sums. So a thread has 64 to 80
# registers, three or four programs of an SM run at once, and 12 of them a multiprocessor are whole rounds either way.
# Channels last, 64 channels are 128 contiguous bytes of 16-bit elements.
FORWARD_TILE, BACKWARD_TILE, WARPS, MAX_CHANNELS = 4096, 2048, 8, 64
PROGRAMS_PER_MULTIPROCESSOR = 12

# Splits x groups x channels of a group that a program merges at a time, of float64 a quarter; 8 channels of float32
# are a sector.
FINISH_TILE, FINISH_WIDTH, MAX_FINISH_CHANNELS, FINISH_WARPS = 2048, 8, 64, 4


def is_channels_last(x: Tensor) -> bool | None:
    """Whether the memory of an (N, C, *) tensor has C fastest, or is contiguous; None where it is neither."""
    shape, strides, expected = x.shape, x.stride(), 1
    if x.is_contiguous():
        return shape[1] > 1 and math.prod(shape[2:]) == 1
    for d in (1, *range(x.dim() - 1, 1, -1), 0):
        if shape[d] > 1 and strides[d] != expected:
            return None
        expected *= shape[d]
    return True


def dense(x: Tensor) -> tuple[Tensor, bool]:
    """(x, channels last), copied where it is in neither layout."""
    last = is_channels_last(x)
    if last is not None:
        return x, last
    if x.stride(1) == 1 and x.dim() in (4, 5):
        last_format = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        return x.contiguous(memory_format=last_format), True
    return x.contiguous(), False


def in_layout(t: Tensor, like: Tensor) -> Tensor:
    """t, of like's shape, in the memory order of the dense tensor ``like``; a copy where it is not in it already."""
    return t if t.stride() == like.stride() else torch.empty_like(like, dtype=t.dtype).copy_(t)


def _inner_tile(inner: int, most: int) -> int:
    """The power of two, of those that make a good run of memory, that covers ``inner`` with the least padding."""
    whole = triton.next_power_of_2(inner)
    candidates = [whole] if whole <= most else []
    candidates += [most >> k for k in range(4) if most >> k < whole]
    return min(candidates, key=lambda size: (cdiv(inner, size) * size, -size))


@dataclass(frozen=True)
class Geometry:
    """The memory, the tile, and the shares of the programs."""

    samples: int
    outer: int
    channels: int
    inner: int
    per: int
    tile: tuple[int, int, int]
    outer_steps: int
    inner_steps: int
    inner_splits: int
    splits: int

    @property
    def groups(self) -> int:
        return self.samples * self.channels // self.per

    @property
    def part_shape(self) -> tuple[int, int, int, int]:
        return (2, self.samples, self.splits, self.channels)

    @property
    def programs(self) -> int:
        return self.samples * self.splits * cdiv(self.channels, self.tile[1])

    @property
    def packed(self) -> bool:
        """Whether every eight bits of a byte are in one tile, next to each other."""
        return (self.channels if self.inner == 1 else self.inner) % 8 == 0

    @property
    def walk(self) -> tuple[int, ...]:
        """The scalars of a kernel that walks tiles."""
        units = (self.channels // unit(self.channels), self.inner // unit(self.inner))
        return (self.outer, *units, self.splits, self.inner_splits, self.outer_steps, self.inner_steps)

    def constants(self, dtype: torch.dtype) -> tuple[Any, ...]:
        """The constants that end the arguments of a kernel that walks tiles."""
        numel = self.samples * self.outer * self.channels * self.inner
        return (unit(self.channels), unit(self.inner), accumulator(dtype)[0], index_type(numel), *self.tile)

    def finish(self, function: Any, scalars: tuple[Any, ...], dtype: torch.dtype) -> Launch:
        """A launch of one of the kernels that merge the splits."""
        per = min(triton.next_power_of_2(self.per), MAX_FINISH_CHANNELS)
        share = 4 if dtype == torch.float64 else 1
        groups = max(FINISH_WIDTH // share // per, 1)
        splits = min(triton.next_power_of_2(self.splits), FINISH_TILE // share // (groups * per))
        index = index_type(2 * math.prod(self.part_shape))
        constants = (accumulator(dtype)[0], index, splits, groups, per)
        arguments = (self.groups, self.per, self.outer, self.channels, self.inner, self.splits, *scalars)
        return Launch(function, cdiv(self.groups, groups), arguments, constants, FINISH_WARPS)


def geometry(
    shape: torch.Size, last: bool, batch: bool, per: int, elements: int, dtype: torch.dtype, device: torch.device
) -> Geometry:
    """For x of shape (N, C, *), of which ``per`` channels share a statistic, over N too if ``batch``."""
    n, channels, pixels = shape[0], shape[1], math.prod(shape[2:])
    samples = 1 if batch else n
    outer, inner = (n // samples * pixels, 1) if last else (n // samples, pixels)
    elements = elements * 2 // dtype.itemsize
    inner_tile = _inner_tile(inner, elements)
    if last:
        channel_tile = min(triton.next_power_of_2(channels), MAX_CHANNELS)
        outer_tile = min(elements // channel_tile, triton.next_power_of_2(outer))
    else:
        outer_tile = min(elements // inner_tile, triton.next_power_of_2(outer))
        channel_tile = min(elements // (inner_tile * outer_tile), triton.next_power_of_2(channels))
    wanted = cdiv(PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(device), samples * cdiv(channels, channel_tile))
    all_outer, all_inner = cdiv(outer, outer_tile), cdiv(inner, inner_tile)
    outer_steps = cdiv(all_outer, min(wanted, all_outer))
    outer_splits = cdiv(all_outer, outer_steps)
    inner_steps = cdiv(all_inner, min(cdiv(wanted, outer_splits), all_inner))
    inner_splits = cdiv(all_inner, inner_steps)
    return Geometry(
        samples=samples,
        outer=outer,
        channels=channels,
        inner=inner,
        per=per,
        tile=(outer_tile, channel_tile, inner_tile),
        outer_steps=outer_steps,
        inner_steps=inner_steps,
        inner_splits=inner_splits,
        splits=outer_splits * inner_splits,
    )

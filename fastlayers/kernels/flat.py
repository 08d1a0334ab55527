"""What the elementwise kernels share: results walked flat in memory order, other operands, sums in shares."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fastlayers.kernels.indexing import extent, pattern
from fastlayers.kernels.launch import KEPT, cdiv, multiprocessors

Sizes = tuple[int, ...]

# 8 elements a thread are one 16-byte access of 16-bit elements; 16 keep two loads a tensor in flight.
TILE, WARPS = 2048, 4

PROGRAMS_PER_MULTIPROCESSOR = 4  # at least, of a reduction


def in_layout(x: Tensor, like: Tensor) -> Tensor:
    """x, of like's shape, in the memory order of the dense tensor ``like``; a copy where it is not in it already."""
    return x if x.stride() == like.stride() else torch.empty_like(like, dtype=x.dtype).copy_(x)


@lru_cache(KEPT)
def result_layout(x_shape: Sizes, x_strides: Sizes, y_shape: Sizes, y_strides: Sizes) -> tuple[Sizes, Sizes]:
    """Shape and strides of x + y or x * y. Asked of torch itself, on tensors without memory."""
    result = torch.empty_strided(x_shape, x_strides, device="meta") + torch.empty_strided(
        y_shape, y_strides, device="meta"
    )
    return tuple(result.shape), result.stride()


def empty_result(x: Tensor, y: Tensor) -> Tensor:
    shape, strides = result_layout(x.shape, x.stride(), y.shape, y.stride())
    return torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device)


def memory_dims(strides: Sizes) -> list[int]:
    """The dimensions of a dense tensor from the outermost in memory to the innermost."""
    return sorted(range(len(strides)), key=lambda d: -strides[d])


def in_memory_order(sizes: Sizes, strides: Sizes, like_shape: Sizes, like_strides: Sizes) -> tuple[Sizes, Sizes]:
    """Sizes and strides of a tensor broadcast to like's shape, its dimensions in the memory order of ``like``."""
    new = len(like_shape) - len(sizes)
    broadcast = [0] * new + [
        stride if size == like_size else 0
        for size, stride, like_size in zip(sizes, strides, like_shape[new:], strict=True)
    ]
    order = memory_dims(like_strides)
    return tuple(like_shape[d] for d in order), tuple(broadcast[d] for d in order)


@dataclass(frozen=True)
class Reading:
    """How a kernel that walks a result flat reads one operand."""

    copy: bool  # into the layout of the result, first
    flat: bool  # along with the result; else by the pattern
    pattern: tuple[int | None, ...] = (None,) * 5
    extent: int = 0

    def of(self, t: Tensor, out: Tensor) -> Tensor:
        return in_layout(t.expand(out.shape), out) if self.copy else t


FLAT = Reading(copy=False, flat=True)


@lru_cache(KEPT)
def reading(sizes: Sizes, strides: Sizes, out_shape: Sizes, out_strides: Sizes) -> Reading:
    if sizes == out_shape and strides == out_strides:
        return FLAT
    sizes, strides = in_memory_order(sizes, strides, out_shape, out_strides)
    found = pattern(sizes, strides)
    # Where the innermost steps are neither along the memory nor in place, a copy in order is read faster.
    if found is None or found[4] > 1:
        return Reading(copy=True, flat=True)
    return Reading(copy=False, flat=False, pattern=found, extent=extent(sizes, strides))


def shares(length: int, step: int, others: int, device: torch.device) -> tuple[int, int]:
    """(chunks, elements of one) of ``length``, in multiples of ``step``; others * chunks programs fill the GPU."""
    wanted = cdiv(PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(device), others)
    chunk = cdiv(cdiv(length, wanted), step) * step
    return cdiv(length, chunk), chunk

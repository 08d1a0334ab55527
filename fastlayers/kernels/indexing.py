"""Strides of views and of broadcast operands, on the host and in a kernel."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl

#: Offsets up to here fit an int32, with room for the lanes of the last tile that lie outside.
INT32_EXTENT = 2**31 - 2**20


def index_type(*extents: int) -> tl.dtype:
    """The type in which a kernel computes offsets: int32 (half the registers) where every offset fits."""
    return tl.int32 if max(extents) <= INT32_EXTENT else tl.int64


def extent(sizes: Sequence[int], strides: Sequence[int]) -> int:
    return sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) + 1


def collapse(sizes: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """The fewest (size, stride) dimensions that visit the same offsets in the same order. Zero strides merge too."""
    dims: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    return dims


Pattern = tuple[int, int, int, int, int]


def pattern(sizes: Sequence[int], strides: Sequence[int]) -> Pattern | None:
    """(size1, size2, stride0, stride1, stride2) for :func:`pattern_offset`; None where three dimensions do not do."""
    dims = collapse(sizes, strides)
    if len(dims) > 3:
        return None
    (_, stride0), (size1, stride1), (size2, stride2) = [(1, 0)] * (3 - len(dims)) + dims
    return size1, size2, stride0, stride1, stride2


@triton.jit
def pattern_offset(index, size1, size2, stride0, stride1, stride2):
    """The offset of a row-major index into a tensor of shape (any, size1, size2) with these strides, zeros included."""
    outer = index // size2
    return outer // size1 * stride0 + outer % size1 * stride1 + index % size2 * stride2

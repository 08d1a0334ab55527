"""max_pool2d, forward and backward.

Stock PyTorch keeps the place of each maximum as an int64. Here it is a byte: the offset in the window, row by row. The
backward gathers: an input takes the gradient of those of its windows of which it is the maximum, so that dx is written
once and without atomics. Images are walked flat in memory order, [outer, height, width, inner]: the channels are inside
of channels_last images, and outside of others. Program = TILE neighbouring elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlayers.kernels.flat import Sizes
from fastlayers.kernels.indexing import index_type
from fastlayers.kernels.launch import KEPT, Launch, cdiv
from fastlayers.kernels.reductions import accumulator

TILE, WARPS = 1024, 4

# -------------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def _place(n, rows, columns, inner, INDEX: tl.constexpr, TILE: tl.constexpr):
    """The elements of this program, which of them are there, and their image, row, column and inner index."""
    element = tl.program_id(0).to(INDEX) * TILE + tl.arange(0, TILE)
    pixel = element // inner
    line = pixel // columns
    return element, element < n, line // rows, line % rows, pixel % columns, element % inner


@triton.jit
def _max_pool2d(
    y_ptr, offsets_ptr, x_ptr, n, rows, columns, inner, height, width, KH: tl.constexpr, KW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    ACC: tl.constexpr, INDEX: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """y = the maximum of each window, and its offset in the window if offsets_ptr is given. NaN stays, as in torch."""
    element, there, image, row, column, channel = _place(n, rows, columns, inner, INDEX, TILE)
    best = tl.full((TILE,), -float("inf"), ACC)
    offset = tl.full((TILE,), -1, tl.int32)
    for k in range(KH * KW):
        h = row * SH - PH + k // KW * DH
        w = column * SW - PW + k % KW * DW
        inside = there & (h >= 0) & (h < height) & (w >= 0) & (w < width)
        x = tl.load(x_ptr + ((image * height + h) * width + w) * inner + channel, mask=inside, other=0.0).to(ACC)
        # The first element that is there counts even where it is minus infinity.
        taken = inside & ((x > best) | (x != x) | (offset < 0))
        best = tl.where(taken, x, best)
        offset = tl.where(taken, k, offset)
    tl.store(y_ptr + element, best.to(y_ptr.dtype.element_ty), mask=there)
    if offsets_ptr is not None:
        tl.store(offsets_ptr + element, offset.to(tl.uint8), mask=there)


@triton.jit
def _max_pool2d_backward(
    dx_ptr, dy_ptr, offsets_ptr, n, height, width, inner, rows, columns, KH: tl.constexpr, KW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    ACC: tl.constexpr, INDEX: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """dx = the sum of dy over the windows, of (rows, columns), of which the element is the maximum."""
    element, there, image, h, w, channel = _place(n, height, width, inner, INDEX, TILE)
    dx = tl.full((TILE,), 0.0, ACC)
    for i in range(KH * KW):
        k = KH * KW - 1 - i  # from the first window to the last
        top = h + PH - k // KW * DH
        left = w + PW - k % KW * DW
        row = top // SH
        column = left // SW
        inside = there & (top >= 0) & (left >= 0) & (row * SH == top) & (column * SW == left)
        inside = inside & (row < rows) & (column < columns)
        at = ((image * rows + row) * columns + column) * inner + channel
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(ACC)
        offset = tl.load(offsets_ptr + at, mask=inside, other=255).to(tl.int32)
        dx += tl.where(offset == k, dy, 0.0)
    tl.store(dx_ptr + element, dx.to(dx_ptr.dtype.element_ty), mask=there)


# ------------------------------------------------------------------------------------------------------------- wrappers

Numbers = Sequence[int]


def _empty_images(t: Tensor, size: Numbers, channels_last: bool, dtype: torch.dtype) -> Tensor:
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty((*t.shape[:-2], *size), dtype=dtype, device=t.device, memory_format=memory_format)


@lru_cache(KEPT)
def _launch(
    backward: bool, shape: Sizes, other: Sizes, numbers: Sizes, dtype: torch.dtype, channels_last: bool, keep: bool
) -> Launch:
    """Over a tensor of ``shape`` that reads images of the size ``other``. ``keep`` only tells launches apart."""
    n = math.prod(shape)
    inner = shape[1] if channels_last else 1
    read = n // math.prod(shape[-2:]) * math.prod(other)
    # Windows begin up to their padding before an image: offsets there are computed too, and not used.
    index = index_type(max(n, read) + 2 * inner * sum((*shape[-2:], *other, *numbers)))
    function = _max_pool2d_backward if backward else _max_pool2d
    constants = (*numbers, accumulator(dtype)[0], index, TILE)
    return Launch(function, cdiv(n, TILE), (n, *shape[-2:], inner, *other), constants, WARPS)


def max_pool2d_forward(
    x: Tensor, kernel_size: Numbers, stride: Numbers, padding: Numbers, dilation: Numbers, out_size: Numbers,
    channels_last: bool, keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The maxima, and their offsets in the windows as bytes; without ``keep`` the offsets are empty."""
    y = _empty_images(x, out_size, channels_last, x.dtype)
    offsets = _empty_images(x, out_size, channels_last, torch.uint8) if keep else None
    numbers = (*kernel_size, *stride, *padding, *dilation)
    _launch(False, tuple(y.shape), tuple(x.shape[-2:]), numbers, x.dtype, channels_last, keep)(y, offsets, x)
    return y, x.new_empty(0, dtype=torch.uint8) if offsets is None else offsets


def max_pool2d_backward(
    dy: Tensor, offsets: Tensor, kernel_size: Numbers, stride: Numbers, padding: Numbers, dilation: Numbers,
    size: Numbers, channels_last: bool,
) -> Tensor:  # fmt: skip
    """The gradient of x, of this size. dy and offsets lie as the forward's result does."""
    dx = _empty_images(dy, size, channels_last, dy.dtype)
    numbers = (*kernel_size, *stride, *padding, *dilation)
    _launch(True, tuple(dx.shape), tuple(dy.shape[-2:]), numbers, dy.dtype, channels_last, True)(dx, dy, offsets)
    return dx

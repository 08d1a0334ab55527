"""max_pool2d: the choice between kernel and reference, and autograd.

Under torch.compile this returns its reference: Inductor has a max_pool2d that keeps small offsets too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastlayers import backends
from fastlayers.ops import guard, layouts, pairs, raw_ops, reference
from fastlayers.ops.pairs import Gradients, Needs


class Kernels(raw_ops.Kernels):
    @staticmethod
    def max_pool2d_forward(
        x: Tensor, kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
        out_size: Sequence[int], channels_last: bool, keep: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        offsets = _empty_images(x, out_size, channels_last, torch.uint8) if keep else x.new_empty(0, dtype=torch.uint8)
        return _empty_images(x, out_size, channels_last, x.dtype), offsets

    @staticmethod
    def max_pool2d_backward(
        dy: Tensor, offsets: Tensor, kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int],
        dilation: Sequence[int], size: Sequence[int], channels_last: bool,
    ) -> Tensor:  # fmt: skip
        return _empty_images(dy, size, channels_last, dy.dtype)


def _empty_images(x: Tensor, size: Sequence[int], channels_last: bool, dtype: torch.dtype) -> Tensor:
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty((*x.shape[:-2], *size), dtype=dtype, device=x.device, memory_format=memory_format)


FAMILY = raw_ops.Family("max_pool2d", Kernels, cpu=True)

#: Elements from which an unforced call gets the kernels. On a CPU they take, of eager's time with two threads on a Xeon
#: with AVX-512, .2 for a contiguous image and .5 for one that is channels_last, and .25 and 1.0 with the backward; for
#: one of 2^16 elements that is channels_last 1.5 and 1.7.
GPU_LEAST = 2**16
CPU_LEAST = 2**18
#: Offsets in a window are bytes; 255 stands for no offset.
WINDOW_MOST = 254

Numbers = int | Sequence[int]
#: Of height and width.
Size = tuple[int, int]
#: Size of the window, its stride, padding and dilation, and size of the result.
Window = tuple[Size, Size, Size, Size, Size]


def _pair(numbers: object) -> Size | None:
    """One number for both, or one for each of height and width, as torch takes them; None where it is neither."""
    values = tuple(numbers) if isinstance(numbers, tuple | list) else (numbers, numbers)
    if len(values) == 1:
        values *= 2
    return values if len(values) == 2 and all(type(value) is int for value in values) else None  # type: ignore[return-value]


def _length(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> int:
    """The number of windows along an axis, as torch counts them."""
    rest = size + 2 * padding - dilation * (kernel - 1) - 1
    count = (rest + (stride - 1 if ceil_mode else 0)) // stride + 1
    return count - 1 if ceil_mode and (count - 1) * stride >= size + padding else count


def _window(
    x: Tensor, kernel_size: Numbers, stride: Numbers | None, padding: Numbers, dilation: Numbers, ceil_mode: object
) -> Window | str:
    """The window for the kernels, or why no kernel takes the call. torch raises for arguments that it refuses."""
    if x.dtype not in guard.FLOATING:
        return f"no kernel for {x.dtype}"
    if x.dim() not in (3, 4) or x.numel() == 0 or x.layout is not torch.strided:
        return f"no image in shape {tuple(x.shape)}, {x.layout}"
    given = (kernel_size, kernel_size if stride is None or stride == () else stride, padding, dilation)
    pairs = [_pair(numbers) for numbers in given]
    kernel, step, pad, spread = pairs
    if kernel is None or step is None or pad is None or spread is None or type(ceil_mode) is not bool:
        return f"no window of {given}, ceil_mode {ceil_mode!r}"
    if kernel[0] * kernel[1] > WINDOW_MOST:
        return f"a window of {kernel}; kernels take up to {WINDOW_MOST} elements"
    out = []
    for size, k, s, p, d in zip(x.shape[-2:], kernel, step, pad, spread, strict=True):
        # With a dilation beyond the size a window may lie in the padding alone: torch's backward writes out of bounds.
        if min(k, s, d) < 1 or not 0 <= p <= k // 2 or d > size:
            return f"a window of {given} in shape {tuple(x.shape)}"
        out.append(_length(size, k, s, p, d, ceil_mode))
        if out[-1] < 1:
            return f"no window of {given} in shape {tuple(x.shape)}"
    return kernel, step, pad, spread, (out[0], out[1])


def _scatter(dy: Tensor, offsets: Tensor, size: Size, window: Window) -> Tensor:
    """The backward kernel in torch ops."""
    kernel, stride, padding, dilation, out = window
    device = dy.device
    row, column = offsets.long() // kernel[1], offsets.long() % kernel[1]
    row = row * dilation[0] + torch.arange(out[0], device=device)[:, None] * stride[0] - padding[0]
    column = column * dilation[1] + torch.arange(out[1], device=device) * stride[1] - padding[1]
    images = offsets.shape[:-2]
    index = (row * size[1] + column).reshape(*images, -1)
    zeros = torch.zeros((*images, size[0] * size[1]), dtype=dy.dtype, device=device)
    return zeros.scatter_add(-1, index, dy.reshape(*images, -1)).reshape(*images, *size)


class MaxPool2d(pairs.Pair, inputs=1):
    """Keeps where in its window each maximum is: a byte an output."""

    @staticmethod
    def raw_forward(kernels: Kernels, needs: Needs, x: Tensor, window: Window) -> Any:
        dense, channels_last = _dense(x)
        out, offsets = kernels.max_pool2d_forward(dense, *window, channels_last, bool(needs))
        return out, (offsets,), (tuple(x.shape[-2:]), window, channels_last)

    @staticmethod
    def raw_backward(
        kernels: Kernels, needs: Needs, dy: Tensor, offsets: Tensor, size: Size, window: Window, channels_last: bool
    ) -> Gradients:
        dy = layouts.with_strides(dy, offsets.stride())
        return (kernels.max_pool2d_backward(dy, offsets, *window[:4], size, channels_last),)

    @staticmethod
    def differentiable_backward(
        needs: Needs, dy: Tensor, offsets: Tensor, size: Size, window: Window, channels_last: bool
    ) -> Gradients:
        return (_scatter(dy, offsets, size, window),)


def _dense(x: Tensor) -> tuple[Tensor, bool]:
    """x contiguous or channels_last in memory, as torch would lay out the result, and whether it is the latter."""
    if x.is_contiguous():
        return x, False
    channels_last = layouts.suggests_channels_last(x)
    return x.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format), channels_last


def max_pool2d(
    x: Tensor, kernel_size: Numbers, stride: Numbers | None, padding: Numbers, dilation: Numbers, ceil_mode: bool
) -> Tensor:
    kernels = FAMILY.kernels_for(x)
    if kernels is not None:
        window = _window(x, kernel_size, stride, padding, dilation, ceil_mode)
        if not isinstance(window, str):
            least = CPU_LEAST if kernels.unasked else GPU_LEAST
            if backends.get_backend() is None and x.numel() < least:
                return reference.max_pool2d(x, kernel_size, stride, padding, dilation, ceil_mode)
            return MaxPool2d.run(kernels, x, window)
        backends.refuse(window)
    return guard.call_reference(reference.max_pool2d, x, kernel_size, stride, padding, dilation, ceil_mode)

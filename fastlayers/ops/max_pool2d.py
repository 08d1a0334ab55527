"""max_pool2d: the choice between kernel and reference, and autograd.

Under torch.compile this returns its reference: Inductor has a max_pool2d that keeps small offsets too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastlayers import backends
from fastlayers.ops import dispatch, reference

FAMILY = dispatch.Family("max_pool2d", ("max_pool2d_forward", "max_pool2d_backward"), cpu=False)

#: Outputs from which an unforced call gets the kernels.
GPU_LEAST = 2**16
#: Offsets in a window are bytes, and 255 is none.
WINDOW_MOST = 254

Numbers = int | Sequence[int]
Pair = tuple[int, int]
#: Size of the result, of the window, its stride, padding and dilation; each of height and width.
Window = tuple[Pair, Pair, Pair, Pair, Pair]


def _pair(numbers: object) -> Pair | None:
    """One number for both, or one for each of height and width, as torch takes them; None where it is neither."""
    values = tuple(numbers) if isinstance(numbers, tuple | list) else (numbers, numbers)
    if len(values) == 1:
        values *= 2
    return values if len(values) == 2 and all(type(value) is int for value in values) else None  # type: ignore[return-value]


def _length(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> int:
    """How many windows torch has along an axis: with ``ceil_mode`` those that begin within it or its padding before."""
    rest = size + 2 * padding - dilation * (kernel - 1) - 1
    count = (rest + (stride - 1 if ceil_mode else 0)) // stride + 1
    return count - 1 if ceil_mode and (count - 1) * stride >= size + padding else count


def _window(
    x: Tensor, kernel_size: Numbers, stride: Numbers | None, padding: Numbers, dilation: Numbers, ceil_mode: object
) -> Window | str:
    """What the kernels are told, or why no kernel serves: torch says what is wrong with arguments that it refuses."""
    if x.dtype not in dispatch.FLOATING:
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
    return (out[0], out[1]), kernel, step, pad, spread


def _scatter(dy: Tensor, offsets: Tensor, size: Pair, window: Window) -> Tensor:
    """The backward kernel in torch ops, for whoever differentiates it again."""
    out, kernel, stride, padding, dilation = window
    device = dy.device
    row, column = offsets.long() // kernel[1], offsets.long() % kernel[1]
    row = row * dilation[0] + torch.arange(out[0], device=device)[:, None] * stride[0] - padding[0]
    column = column * dilation[1] + torch.arange(out[1], device=device) * stride[1] - padding[1]
    images = offsets.shape[:-2]
    index = (row * size[1] + column).reshape(*images, -1)
    zeros = torch.zeros((*images, size[0] * size[1]), dtype=dy.dtype, device=device)
    return zeros.scatter_add(-1, index, dy.reshape(*images, -1)).reshape(*images, *size)


class _MaxPool2d(torch.autograd.Function):
    """Keeps where in its window each maximum is: a byte an output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, window: Window, kernels: Any) -> Tensor:
        dense, channels_last = _dense(x)
        out, offsets = kernels.max_pool2d_forward(dense, *window, channels_last, True)
        ctx.save_for_backward(offsets)
        ctx.size, ctx.window, ctx.channels_last, ctx.kernels = tuple(x.shape[-2:]), window, channels_last, kernels
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (offsets,) = ctx.saved_tensors
        if dispatch.differentiating(dy):
            return _scatter(dy, offsets, ctx.size, ctx.window), None, None
        dy = dispatch.with_strides(dy, offsets.stride())
        return ctx.kernels.max_pool2d_backward(dy, offsets, ctx.size, *ctx.window[1:], ctx.channels_last), None, None


_record = dispatch.recorder(_MaxPool2d)


def _dense(x: Tensor) -> tuple[Tensor, bool]:
    """x contiguous or channels_last in memory, as torch would lay out the result, and whether it is the latter."""
    if x.is_contiguous():
        return x, False
    channels_last = dispatch.suggests_channels_last(x)
    return x.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format), channels_last


def max_pool2d(
    x: Tensor, kernel_size: Numbers, stride: Numbers | None, padding: Numbers, dilation: Numbers, ceil_mode: bool
) -> Tensor:
    if torch.compiler.is_compiling():
        return reference.max_pool2d(x, kernel_size, stride, padding, dilation, ceil_mode)
    kernels = FAMILY.serving(x)
    if kernels is not None:
        window = _window(x, kernel_size, stride, padding, dilation, ceil_mode)
        if not isinstance(window, str):
            if backends.get_backend() is None and x.numel() < GPU_LEAST:
                return reference.max_pool2d(x, kernel_size, stride, padding, dilation, ceil_mode)
            if torch.is_grad_enabled() and x.requires_grad:
                return _record(dispatch.unwrap(x), window, kernels)  # type: ignore[no-any-return]
            dense, channels_last = _dense(x)
            return kernels.max_pool2d_forward(dense, *window, channels_last, False)[0]  # type: ignore[no-any-return]
        backends.refuse(window)
    return dispatch.answer("max_pool2d", x, kernel_size, stride, padding, dilation, ceil_mode)  # type: ignore[no-any-return]


def _empty_images(x: Tensor, size: Sequence[int], channels_last: bool, dtype: torch.dtype) -> Tensor:
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty((*x.shape[:-2], *size), dtype=dtype, device=x.device, memory_format=memory_format)


def _forward_fake(
    x: Tensor, out: list[int], kernel: list[int], stride: list[int], padding: list[int], dilation: list[int],
    channels_last: bool, keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    offsets = _empty_images(x, out, channels_last, torch.uint8) if keep else x.new_empty(0, dtype=torch.uint8)
    return _empty_images(x, out, channels_last, x.dtype), offsets


dispatch.register_fakes(
    {
        "max_pool2d_forward": _forward_fake,
        "max_pool2d_backward": lambda dy, offsets, size, kernel, stride, padding, dilation, channels_last: (
            _empty_images(dy, size, channels_last, dy.dtype)
        ),
    }
)

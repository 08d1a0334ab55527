"""A 1x1 convolution of a tensor that is also used elsewhere: both gradients of the tensor added in one kernel."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlayers import backends
from fastlayers.ops import guard, modes, pairs, raw_ops
from fastlayers.ops.reference import LOW_PRECISION

#: Elements of x from which the kernel serves. Timed alone from 25 million on: where it ceases to gain is not known.
LEAST = 1 << 22


class _PointwiseFork(torch.autograd.Function):
    """Keeps x and weight, as torch does. The second result is x itself: autograd returns it as a view."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.set_materialize_grads(False)  # a result that nothing uses has no gradient, not one of zeros
        return F.conv2d(x, weight), x

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dx: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        if dy is None:
            return dx, None
        x, weight = ctx.saved_tensors
        for_x, for_weight = ctx.needs_input_grad
        both = (
            for_x
            and dx is not None
            and not guard.needs_double_backward(dy)
            and not guard.needs_double_backward(dx)
            and not modes.is_watched()
        )
        product, dweight, _ = torch.ops.aten.convolution_backward(
            dy, x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [for_x and not both, for_weight, False]
        )
        if both:
            assert dx is not None
            from fastlayers.kernels.convolution import pointwise_backward

            dy, dx = (t.contiguous(memory_format=torch.channels_last) for t in (dy, dx))
            return raw_ops.observable(pointwise_backward)(dy, weight, dx), dweight
        return product if dx is None or not for_x else product + dx, dweight


_record = pairs.record_of(_PointwiseFork)


def adds_gradients(x: Tensor, weight: Tensor) -> bool:
    """Whether a kernel adds the gradients of x after a convolution by this weight, which may be float32."""
    if (
        torch.compiler.is_compiling()
        or not (guard.is_plain(x) and guard.is_plain(weight))
        or x.dtype not in LOW_PRECISION
        or x.dim() != 4
        or not (torch.is_grad_enabled() and x.requires_grad)
        or x.numel() < LEAST
        or weight.shape[1:] != (x.shape[1], 1, 1)
        or not x.is_contiguous(memory_format=torch.channels_last)
        or not x.is_cuda
        or x.get_device() != weight.get_device()
        or guard.must_decompose()
    ):
        return False
    casts = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == x.dtype
    return (weight.dtype == x.dtype or casts) and backends.choose(x.device) in ("cuda", "triton")


def pointwise_fork(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(conv2d(x, weight), x), where :func:`adds_gradients` allows it. The cast of the weight is autograd's own."""
    return _record(pairs.unwrap(x), pairs.unwrap(weight).to(x.dtype))

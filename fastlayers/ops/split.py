"""Parts of one tensor, as unbind, chunk and split give them, whose gradients are written into one tensor.

torch's autograd stacks the gradients of query, key and value in the order of the parts, at a third of the memory
bandwidth, and where the parts lie otherwise in memory copies them once more into the layout of the product that they
are parts of. Of ViT-B/16 that took 2.5 of the 26.5 ms of a step on an H100. Here each goes where its part was read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastlayers import backends
from fastlayers.ops import guard, pairs, raw_ops
from fastlayers.ops.pairs import Gradients

#: Elements from which this gains, and the most parts: each is a copy of its own.
LEAST = 2**19
MOST_PARTS = 4

_WORD = torch.complex128  # 16 bytes


def _is_dense(x: Tensor) -> bool:
    """Whether no two elements of x share memory, and nothing lies between them."""
    if x.is_contiguous():
        return True
    step = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size != 1:
            if stride != step:
                return False
            step *= size
    return True


def _in_words(x: Tensor) -> bool:
    """Whether x lies in memory as rows of whole words."""
    count = _WORD.itemsize // x.element_size()
    *steps, last = x.stride()
    return bool(
        last == 1
        and x.shape[-1] % count == 0
        and x.storage_offset() % count == 0
        and x.data_ptr() % _WORD.itemsize == 0
        and all(step % count == 0 for step in steps)
    )


def _copy(to: Tensor, x: Tensor) -> None:
    """``to.copy_(x)`` in 16-byte words where possible: torch's strided copy moves one element at a time."""
    if _in_words(to) and _in_words(x):
        to, x = to.view(_WORD), x.view(_WORD)
    to.copy_(x)


class _Parts(torch.autograd.Function):
    """``function(x, size, dim)``, views of x. Keeps nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[..., tuple[Tensor, ...]], args: tuple[Any, ...]) -> Any:
        ctx.function, ctx.args = function, args
        ctx.shape, ctx.strides = x.shape, x.stride()
        return tuple(function(x, *args))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Gradients:
        join = torch.stack if ctx.function is torch.unbind else torch.cat
        if any(map(guard.needs_double_backward, grads)):
            return join(grads, ctx.args[-1]), None, None
        first = grads[0]
        if raw_ops.is_observed() and backends.generates_kernels(first.device):
            # One kernel writes all parts, together with what makes them, where a tape has this as one expression.
            order = sorted(range(len(ctx.shape)), key=lambda d: -ctx.strides[d])
            dx = join(grads, ctx.args[-1]).permute(order).contiguous()
            return dx.permute(sorted(range(len(order)), key=order.__getitem__)), None, None
        dx = torch.empty_strided(ctx.shape, ctx.strides, dtype=first.dtype, device=first.device)
        for part, grad in zip(ctx.function(dx, *ctx.args), grads, strict=True):
            _copy(part, grad)
        return dx, None, None


_record = pairs.record_of(_Parts)


def parts(function: Callable[..., Any], x: Tensor, *args: Any) -> Any:
    """``function(x, *args)`` for one of torch.unbind, torch.chunk and torch.split, with the dim for a last argument."""
    if (
        torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and guard.is_plain(x)
        and x.requires_grad
        and _gains(x, _count(function, x, *args))
        and not guard.must_decompose()
        and _is_dense(x)
    ):
        return _record(pairs.unwrap(x), function, args)
    return function(x, *args)


def _count(function: Callable[..., Any], x: Tensor, *args: Any) -> int:
    """The number of parts; more than MOST_PARTS where torch itself has to raise an error."""
    dim = args[-1]
    if not -x.dim() <= dim < x.dim():
        return MOST_PARTS + 1
    if function is torch.unbind:
        return x.shape[dim]
    if function is torch.chunk or isinstance(args[0], list | tuple):
        return args[0] if function is torch.chunk else len(args[0])
    return -(-x.shape[dim] // max(1, args[0]))


def _gains(x: Tensor, count: int) -> bool:
    """Whether the copies are faster than torch's own way."""
    return (
        x.is_cuda and x.numel() >= LEAST and count <= MOST_PARTS and backends.get_backend() in (None, "triton", "cuda")
    )

"""A linear layer with a kernel for the gradient of its bias. Under autocast :mod:`fastlayers.ops.autocast` takes over.

torch's reduction reads that gradient at a fifth to a quarter of the memory bandwidth. On an H100 it took 1.6 of the
26.5 ms of a step of ViT-B/16, 2.6 of 24.4 of ConvNeXt-T, 2.0 of 36.6 of GPT-2.

Under torch.compile these return torch's composition: Inductor has a reduction of its own.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlayers import backends
from fastlayers.ops import autocast, guard, pairs, raw_ops, reference
from fastlayers.ops.pairs import Gradients


class Kernels(raw_ops.Kernels):
    @staticmethod
    def column_sum(x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.new_empty(x.shape[-1:], dtype=dtype)


FAMILY = raw_ops.Family("linear", Kernels)

#: Elements of the result from which an unforced call lets the kernel sum the gradient of its bias: 1 MiB in 16 bits.
LEAST = 2**19


#: 16-bit elements in 16 bytes, at whose multiples rows have to begin for the fast kernels of cuBLAS. A vocabulary of
#: 128,100 takes 6.7 ms, and its arithmetic 1.4 ms (4096 rows of 768 features, H100).
WORD = 8
#: Features of a vocabulary, and products of a call from which :func:`odd_product` gains. By the time of its launches it
#: takes .35 to .9 ms of the host; 1024 rows of 768 features by 50257 took .67 ms and not .83, 4096 rows .81 and not
#: 3.3, and 4096 rows of 4096 features by 32001 1.5 ms and not 11.0.
ODD_FEATURES, ODD_LEAST = 4096, 2**35


class _BiasGradient(torch.autograd.Function):
    """Returns y, which already contains the bias; backward sums the gradient for the bias. Keeps nothing.

    y is marked as written although it is not. Otherwise the result would be a view that cannot be written in place, and
    the result of a linear layer can be.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor, kernels: Any) -> Tensor:
        ctx.mark_dirty(y)
        ctx.dtype, ctx.kernels = bias.dtype, kernels
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Gradients:
        return dy if ctx.needs_input_grad[0] else None, _sum_of_rows(dy, ctx.dtype, ctx.kernels), None


_record = pairs.record_of(_BiasGradient)


def _sum_of_rows(dy: Tensor, dtype: torch.dtype, kernels: Any) -> Tensor:
    """The gradient of a bias; ``kernels`` may be None."""
    if kernels is None or guard.needs_double_backward(dy) or not dy.is_contiguous():
        return dy.sum(0).to(dtype)
    return kernels.column_sum(dy, dtype)  # type: ignore[no-any-return]


def _unsupported(x: Tensor, weight: Tensor, bias: Tensor, features: int) -> str | None:
    """Why no kernel sums the gradient of this bias, None where one does."""
    if not (guard.is_plain(weight) and guard.is_plain(bias)):
        return f"weight and bias are {type(weight).__name__} and {type(bias).__name__}; it takes plain tensors"
    dtype = autocast.dtype_of(x)
    if dtype is torch.float32:
        return "torch's own sum has the smaller error in float32"
    if bias.shape != (features,) or dtype not in guard.FLOATING or bias.dtype not in (dtype, torch.float32):
        return f"a bias of {bias.dtype}, shape {tuple(bias.shape)}, for {dtype} and {features} features"
    if x.dim() < 2 or not x.is_contiguous() or x.shape[-1] == 0:
        return f"rows of shape {tuple(x.shape)} and strides {x.stride()}; it takes a contiguous matrix or batch of them"
    return None


def _kernels_for(x: Tensor, weight: Tensor, bias: Tensor | None, features: int) -> Any:
    """The kernels for the bias of a linear layer, None (usually, and quickly) where torch sums it."""
    if bias is None or not torch.is_grad_enabled() or not bias.requires_grad or torch.compiler.is_compiling():
        return None
    kernels = FAMILY.kernels_for(x)
    if kernels is None:
        return None
    if x.numel() // max(1, x.shape[-1] if x.dim() else 1) * features < LEAST and backends.get_backend() is None:
        return None
    reason = _unsupported(x, weight, bias, features)
    if reason is not None:
        return backends.refuse(reason)
    return kernels


def _is_odd(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether :func:`odd_product` takes this call."""
    features, width = weight.shape if weight.dim() == 2 else (0, 0)
    return (
        features % WORD != 0
        and features >= ODD_FEATURES
        and width % WORD == 0
        and x.is_cuda
        and autocast.dtype_of(x) in reference.LOW_PRECISION
        and x.shape[-1:] == (width,)
        and x.numel() * features >= ODD_LEAST
        and all(guard.is_plain(t) and t.device == x.device for t in (x, weight, bias) if t is not None)
        and autocast.dtype_of(weight) is autocast.dtype_of(x)
        and (bias is None or (autocast.dtype_of(bias) is autocast.dtype_of(x) and bias.shape == (features,)))
        and not torch.compiler.is_compiling()
        and not guard.must_decompose()
    )


def odd_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear for features of which a row has no whole number of words. Autograd does not see it.

    Every few rows the words of the result begin at the same column. The columns between the first and the last whole
    word of such rows are a product whose rows are aligned; the others are in a product of a few columns. The bias is
    one more feature of the weight: torch would copy it into every row of the result, and read that again.
    """
    features, width = weight.shape
    low = autocast.dtype_of(x)
    rows, weight = x.reshape(-1, width).to(low), weight.to(low)
    if bias is not None:
        weight = torch.cat((weight, bias.to(low)[:, None], weight.new_zeros((features, WORD - 1))), 1)
        rows = F.pad(F.pad(rows, (0, 1), value=1.0), (0, WORD - 1))
    out = rows.new_empty((rows.shape[0], features))
    of_ends = F.linear(rows, torch.cat((weight[:WORD], weight[-WORD:])))
    out[:, :WORD], out[:, -WORD:] = of_ends[:, :WORD], of_ends[:, WORD:]
    alike = WORD // gcd(features, WORD)
    for first in range(alike):
        start = -first * features % WORD
        inside = slice(start, start + (features - start) // WORD * WORD)
        torch.mm(rows[first::alike], weight[inside].t(), out=out[first::alike, inside])
    return out if x.dim() == 2 else out.view(*x.shape[:-1], features)


class _OddProduct(torch.autograd.Function):
    """:func:`odd_product` of rows and a weight of one dtype. Keeps both.

    The backward copies the gradient into rows that are a whole number of words. With 4096 rows of 768 features and a
    vocabulary of 50265 that takes .5 ms of an H100, and its two products .4 ms each, 2.4 and 2.2 without it.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, kernels: Any) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.dtype, ctx.kernels = None if bias is None else bias.dtype, kernels
        return odd_product(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Gradients:
        rows, weight = ctx.saved_tensors
        features = dy.shape[1]
        missing = -features % WORD
        aligned = dy.new_empty((dy.shape[0], features + missing))
        aligned[:, :features], aligned[:, features:] = dy, 0
        for_rows, for_weight, for_bias, _ = ctx.needs_input_grad
        return (
            aligned @ F.pad(weight, (0, 0, 0, missing)) if for_rows else None,
            (aligned.t() @ rows)[:features] if for_weight else None,
            _sum_of_rows(dy, ctx.dtype, ctx.kernels) if for_bias else None,
            None,
        )


def _odd_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear by :class:`_OddProduct`, with a kernel for the gradient of the bias where there is one."""
    kernels = _kernels_for(x, weight, bias, weight.shape[0])
    low = autocast.dtype_of(x)
    y: Tensor = _OddProduct.apply(x.reshape(-1, x.shape[-1]).to(low), weight.to(low), bias, kernels)
    return y.view(*x.shape[:-1], y.shape[1])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    try:
        if backends.get_backend() is None:
            if _is_odd(x, weight, bias):
                return (_odd_linear if torch.is_grad_enabled() else odd_product)(x, weight, bias)
            if not torch.is_grad_enabled():  # Only the backward has kernels.
                return reference.linear(x, weight, bias)
        y = autocast.linear(x, weight, bias)
        if y is not None:
            return y
        kernels = _kernels_for(x, weight, bias, weight.shape[0])
    except AttributeError as error:
        raise guard.not_tensors(error, x, weight, bias) from None
    if kernels is None:
        return guard.call_reference(reference.linear, x, weight, bias)
    assert bias is not None
    # As torch flattens a batch. Its own result would be a view, whose gradient autograd would copy.
    bias = pairs.unwrap(bias)
    rows = x if x.dim() == 2 else x.view(-1, x.shape[-1])
    out: Tensor = _record(F.linear(rows, weight, bias.detach()), bias, kernels)
    return out if rows is x else out.view(*x.shape[:-1], out.shape[1])


def product(x: Tensor, weight: Tensor) -> Tensor:
    """F.linear(x, weight) for callers that add the bias themselves."""
    y = autocast.linear(x, weight, None)
    return F.linear(x, weight) if y is None else y


def addmm(bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """torch.addmm(bias, x, weight): a linear layer by a weight that is transposed, (in, out)."""
    kernels = _kernels_for(x, weight, bias, weight.shape[-1])
    if kernels is None:
        return torch.addmm(bias, x, weight)
    bias = pairs.unwrap(bias)
    return _record(torch.addmm(bias.detach(), x, weight), bias, kernels)

"""A linear layer of which a kernel sums the gradient of the bias, and one Function for all of it under autocast.

torch's reduction reads that gradient at a fifth to a quarter of the memory bandwidth: of ViT-B/16 it took 1.6 of the
26.5 ms of a step on an H100, of ConvNeXt-T 2.6 of 24.4, of GPT-2 2.0 of 36.6.

Under autocast a float32 weight is cast, and the gradient of its cast is cast back: four small kernels a layer with
those of the bias, and as many nodes of autograd, a quarter of the host's time of a step of ViT-B/16. The Function casts
the weight, and has its gradient in float32 from the matrix product, and that of the bias from the sum.

Under torch.compile these return torch's composition: Inductor has a reduction of its own.
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fastlayers import backends
from fastlayers.ops import dispatch

FAMILY = dispatch.Family("linear", ("column_sum",), cpu=False)

#: Elements of the result from which an unforced call has its bias' gradient summed by the kernel: 1 MiB of halves.
LEAST = 2**19


def linear_dtype(t: Tensor) -> torch.dtype:
    """dtype in which F.linear takes a tensor, autocast included."""
    device = t.device.type
    if t.dtype in dispatch.FLOATING and t.dtype is not torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return t.dtype


class _BiasGradient(torch.autograd.Function):
    """A matrix to which a bias has been added already, as it is; the bias gets the sums of its gradient. Keeps nothing.

    The matrix is marked as written although it is not. Otherwise the result would be a view of it that nobody may
    write to, and the result of a linear layer is nothing of the kind.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor, kernels: Any) -> Tensor:
        ctx.mark_dirty(y)
        ctx.dtype, ctx.kernels = bias.dtype, kernels
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if dispatch.differentiating(dy) or not dy.is_contiguous():
            dbias = dy.sum(0).to(ctx.dtype)
        else:
            dbias = ctx.kernels.column_sum(dy, ctx.dtype)
        return dy if ctx.needs_input_grad[0] else None, dbias, None


_record = dispatch.recorder(_BiasGradient)


class _AutocastLinear(torch.autograd.Function):
    """Of rows in autocast's dtype and a float32 weight and bias. Keeps the rows, the weight, and the weight's cast."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, kernels: Any) -> Tensor:
        low = _low_weight(weight, rows.dtype)
        ctx.save_for_backward(rows, weight, low)
        ctx.kernels = kernels
        # Of one dtype, so that autocast, which is on, has nothing to do.
        return torch.mm(rows, low.t()) if bias is None else torch.addmm(bias.to(rows.dtype), rows, low.t())

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, low = ctx.saved_tensors
        for_rows, for_weight, for_bias, _ = ctx.needs_input_grad
        device, dx, dweight, dbias = dy.device.type, None, None, None
        with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
            if dispatch.differentiating(dy):
                dx = dy @ weight.to(dy.dtype) if for_rows else None
                dweight = (dy.t() @ rows).float() if for_weight else None
                return dx, dweight, dy.sum(0).float() if for_bias else None, None
            dy = dy.contiguous()
            dx = torch.mm(dy, low) if for_rows else None
            if for_weight:
                dweight = torch.mm(dy.t(), rows, out_dtype=torch.float32) if dy.is_cuda else (dy.t() @ rows).float()
            dbias = ctx.kernels.column_sum(dy, torch.float32) if for_bias else None
        return dx, dweight, dbias, None


_record_autocast = dispatch.recorder(_AutocastLinear)


#: The version that a weight had when it was cast, and its cast.
_low_weights = WeakIdKeyDictionary()


def _low_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in autocast's dtype: that of another use of it while one is there, as autocast keeps it."""
    version, reference = _low_weights.get(weight, (None, None))
    low: Tensor | None = reference() if reference is not None and version == weight._version else None
    if low is None or low.dtype is not dtype:
        low = weight.detach().to(dtype)
        _low_weights[weight] = weight._version, weakref.ref(low)
    return low


def _casts(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether autocast casts these for a linear layer, from float32."""
    return (
        torch.is_autocast_enabled(x.device.type)
        and weight.dtype is torch.float32
        and (bias is None or bias.dtype is torch.float32)
        and x.dtype in (torch.float32, torch.get_autocast_dtype(x.device.type))
    )


def _unsupported(x: Tensor, weight: Tensor, bias: Tensor, features: int) -> str | None:
    """Why no kernel sums the gradient of this bias, None where one does."""
    if not (dispatch.is_plain(weight) and dispatch.is_plain(bias)):
        return f"weight and bias are {type(weight).__name__} and {type(bias).__name__}; it takes plain tensors"
    dtype = linear_dtype(x)
    if dtype is torch.float32:
        return "of float32 torch's own sum has the smaller error"
    if bias.shape != (features,) or dtype not in dispatch.FLOATING or bias.dtype not in (dtype, torch.float32):
        return f"a bias of {bias.dtype}, shape {tuple(bias.shape)}, for {dtype} and {features} features"
    if x.dim() < 2 or not x.is_contiguous() or x.shape[-1] == 0:
        return f"rows of shape {tuple(x.shape)} and strides {x.stride()}; it takes a contiguous matrix or batch of them"
    return None


def _serving(x: Tensor, weight: Tensor, bias: Tensor | None, features: int) -> Any:
    """The kernels for the bias of a linear layer, or None where torch's own answers, which is most often and cheap."""
    if bias is None or not torch.is_grad_enabled() or not bias.requires_grad or torch.compiler.is_compiling():
        return None
    if x.numel() // max(1, x.shape[-1] if x.dim() else 1) * features < LEAST and backends.get_backend() is None:
        return None
    kernels = FAMILY.serving(x)
    if kernels is None:
        return None
    reason = _unsupported(x, weight, bias, features)
    if reason is not None:
        return backends.refuse(reason)
    return kernels


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    kernels = _serving(x, weight, bias, weight.shape[0])
    if kernels is None:
        return dispatch.answer("linear", x, weight, bias)  # type: ignore[no-any-return]
    assert bias is not None
    # As torch flattens a batch. Its own result would be a view, whose gradient autograd would copy.
    bias = dispatch.unwrap(bias)
    rows = x if x.dim() == 2 else x.view(-1, x.shape[-1])
    if _casts(x, weight, bias):
        rows = dispatch.unwrap(rows).to(linear_dtype(x))
        out: Tensor = _record_autocast(rows, dispatch.unwrap(weight), bias, kernels)
    else:
        out = _record(F.linear(rows, weight, bias.detach()), bias, kernels)
    return out if rows.dim() == x.dim() else out.view(*x.shape[:-1], out.shape[1])


def product(x: Tensor, weight: Tensor) -> Tensor:
    """F.linear(x, weight), of which the bias is added elsewhere."""
    if not (
        torch.is_grad_enabled()
        and weight.requires_grad
        and not torch.compiler.is_compiling()
        and dispatch.is_plain(weight)
        and x.dim() >= 2
        and x.shape[-1] > 0
        and x.is_contiguous()
        and _casts(x, weight, None)
        and FAMILY.serving(x) is not None
    ):
        return F.linear(x, weight)
    rows = dispatch.unwrap(x).view(-1, x.shape[-1]).to(linear_dtype(x))
    out: Tensor = _record_autocast(rows, dispatch.unwrap(weight), None, None)
    return out.view(*x.shape[:-1], out.shape[1])


def addmm(bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """torch.addmm(bias, x, weight): a linear layer by a weight that is transposed, (in, out)."""
    kernels = _serving(x, weight, bias, weight.shape[-1])
    if kernels is None:
        return torch.addmm(bias, x, weight)
    bias = dispatch.unwrap(bias)
    return _record(torch.addmm(bias.detach(), x, weight), bias, kernels)  # type: ignore[no-any-return]


dispatch.register_fakes({"column_sum": lambda x, dtype: x.new_empty(x.shape[-1:], dtype=dtype)})

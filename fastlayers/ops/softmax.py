"""softmax and log_softmax: the choice between kernel and reference, autograd, and the op that torch.compile sees."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastlayers import backends
from fastlayers.ops import dispatch, reference

FAMILY = dispatch.Family("softmax", ("softmax_forward", "softmax_backward"), cpu=False)

#: Elements from which an unforced softmax without scale and mask gets the kernel. Below, torch's own is one kernel too,
#: and what counts is the host: forward and backward through a Python Function took 1.4 to 1.5 times torch's 90 us on an
#: H100. What that gives away is GPU time in its shade: at 8x64 bfloat16 1.8 us for 1.9 forward, 1.6 for 2.8 backward.
GPU_LEAST = 2**16
# Kernels scale the minus infinities with which they fill up a row: in float32 that factor may become neither 0 nor
# infinite.
_SMALLEST_SCALE = 1e-36


def result_dtype(x: Tensor, mask: Tensor | None, dtype: torch.dtype | None) -> torch.dtype:
    """dtype of softmax(x·scale + mask, dtype=dtype), autocast included: it runs torch's softmax in float32."""
    if dtype is not None:
        return dtype
    scores = x.dtype if mask is None or mask.dtype == torch.bool else torch.result_type(x, mask)
    return torch.float32 if scores in reference.HALF and torch.is_autocast_enabled(x.device.type) else scores


def unsupported(
    x: Tensor, dim: int, scale: float, mask: Tensor | None, out: torch.dtype, masks_any_dim: bool
) -> str | None:
    """Why no kernel takes this call, None where one does."""
    given, dims = x.dtype, x.dim()
    if given not in dispatch.FLOATING or not (out is given or (out == torch.float32 and given in reference.HALF)):
        return f"no kernel from {given} to {out}"
    if x.numel() == 0 or not -dims <= dim < dims:
        return f"nothing to reduce in dim {dim} of shape {tuple(x.shape)}"
    if not _SMALLEST_SCALE < abs(scale) < 1 / _SMALLEST_SCALE:
        return f"the scale is {scale}; kernels take one between 1e-36 and 1e36 in magnitude"
    if mask is None:
        return None
    if not dispatch.is_plain(mask) or mask.device != x.device:
        return f"the mask is a {type(mask).__name__} on {mask.device}, and x on {x.device}"
    if not dispatch.broadcasts_to(mask.shape, x.shape):
        return f"a mask of shape {tuple(mask.shape)} does not broadcast to x of shape {tuple(x.shape)}"
    if mask.dtype not in (torch.bool, x.dtype) and not (mask.dtype == torch.float32 and x.dtype in reference.HALF):
        return f"the mask is {mask.dtype}; kernels take bool, float32 and x's {x.dtype}"
    if dim not in (-1, dims - 1) and not masks_any_dim:
        return f"a mask over dim {dim}; the kernel takes one over the last dimension"
    return None


class _Softmax(torch.autograd.Function):
    """Keeps the result; the mask too where it is boolean (a view of the caller's) or its gradient is wanted."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mask: Tensor | None, dim: int, scale: float, log: bool, dtype: torch.dtype, kernels: Any
    ) -> Tensor:
        y: Tensor = kernels.softmax_forward(x, mask, dim, scale, log, dtype)
        keep(ctx, y, mask, dim, scale, log, x.dtype)
        ctx.kernels = kernels
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        backward = compose_backward if dispatch.differentiating(dy) else ctx.kernels.softmax_backward
        dx, dmask = gradients(backward, dy, *ctx.saved_tensors, *ctx.rest)
        return dx, dmask, None, None, None, None, None


def keep(ctx: Any, y: Tensor, mask: Tensor | None, *rest: Any) -> None:
    """Save what :func:`gradients` wants: a mask only where it is boolean or its own gradient may be asked for."""
    wanted = mask is not None and (mask.dtype == torch.bool or mask.requires_grad)
    ctx.save_for_backward(y, mask if wanted else None)
    ctx.rest = rest


def gradients(
    backward: Any, dy: Tensor, y: Tensor, mask: Tensor | None, dim: int, scale: float, log: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Gradients of x and, where it is kept for that, of an additive mask: the scores', summed to the mask's shape."""
    if mask is None or mask.dtype == torch.bool:
        return backward(dy, y, mask, dim, scale, log, dtype), None
    dscores = backward(dy, y, None, dim, 1.0, log, y.dtype)
    return (dscores * scale).to(dtype), dscores.sum_to_size(mask.shape).to(mask.dtype)


def compose_backward(
    dy: Tensor, y: Tensor, mask: Tensor | None, dim: int, scale: float, log: bool, dtype: torch.dtype
) -> Tensor:
    """The backward kernel in torch ops, for whoever differentiates it again."""
    formula = torch._log_softmax_backward_data if log else torch._softmax_backward_data
    dx = formula(dy, y, dim, y.dtype) * scale
    return (dx if mask is None else torch.where(mask, dx, 0.0)).to(dtype)


def softmax(
    x: Tensor, dim: int, scale: float | None, mask: Tensor | None, dtype: torch.dtype | None, log: bool
) -> Tensor:
    if torch.compiler.is_compiling():
        return _softmax_compiling(x, dim, scale, mask, dtype, log)
    factor = 1.0 if scale is None else _number(scale)
    kernels = FAMILY.serving(x)
    if kernels is not None:
        if scale is None and mask is None and x.numel() < GPU_LEAST and backends.get_backend() is None:
            return (reference.log_softmax if log else reference.softmax)(x, dim, None, None, dtype)
        out = x.dtype
        if mask is not None or dtype is not None or out in reference.HALF:
            out = result_dtype(x, mask, dtype)
        reason = unsupported(x, dim, factor, mask, out, kernels.backend == "triton")
        if reason is None:
            if dim < 0:
                dim += x.dim()
            if torch.is_grad_enabled() and (x.requires_grad or (mask is not None and mask.requires_grad)):
                return _Softmax.apply(x, mask, dim, factor, log, out, kernels)  # type: ignore[no-any-return]
            return kernels.softmax_forward(x, mask, dim, factor, log, out)  # type: ignore[no-any-return]
        backends.refuse(reason)
    return dispatch.answer("log_softmax" if log else "softmax", x, dim, scale, mask, dtype)  # type: ignore[no-any-return]


def _number(scale: object) -> float:
    if isinstance(scale, float | int):
        return float(scale)
    raise TypeError(f"softmax(): expected scale to be a number or None, but got {type(scale).__name__}")


# ---- torch.compile ---------------------------------------------------------------------------------------------------
# Inductor's row reductions reach half of the memory limit on long rows, so a compiled graph keeps the kernel: as one
# opaque op with a fake implementation, where the guard says at trace time that a kernel serves.


@torch.library.custom_op("fastlayers::softmax", mutates_args=(), device_types="cuda")
def softmax_op(x: Tensor, mask: Tensor | None, dim: int, scale: float, log: bool, dtype: torch.dtype) -> Tensor:
    result: Tensor = FAMILY.serving(x).softmax_forward(x, mask, dim, scale, log, dtype)
    return result


@partial(dispatch.register_fake, softmax_op)
def _(x: Tensor, mask: Tensor | None, dim: int, scale: float, log: bool, dtype: torch.dtype) -> Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)


@torch.library.custom_op("fastlayers::softmax_grad", mutates_args=(), device_types="cuda")
def softmax_grad_op(
    dy: Tensor, y: Tensor, mask: Tensor | None, dim: int, scale: float, log: bool, dtype: torch.dtype
) -> Tensor:
    result: Tensor = FAMILY.serving(y).softmax_backward(dy, y, mask, dim, scale, log, dtype)
    return result


@partial(dispatch.register_fake, softmax_grad_op)
def _(dy: Tensor, y: Tensor, mask: Tensor | None, dim: int, scale: float, log: bool, dtype: torch.dtype) -> Tensor:
    return torch.empty(y.shape, dtype=dtype, device=y.device)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, mask, dim, scale, log, _ = inputs
    keep(ctx, output, mask, dim, scale, log, x.dtype)


def _op_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    dx, dmask = gradients(softmax_grad_op, dy, *ctx.saved_tensors, *ctx.rest)
    return dx, dmask, None, None, None, None


softmax_op.register_autograd(_op_backward, setup_context=_setup_context)
dispatch.hold_raw({softmax_op: "softmax_forward", softmax_grad_op: "softmax_backward"})


def _softmax_compiling(
    x: Tensor, dim: int, scale: float | None, mask: Tensor | None, dtype: torch.dtype | None, log: bool
) -> Tensor:
    if dispatch.graph_keeps_kernel(x):
        factor = 1.0 if scale is None else _number(scale)
        out = result_dtype(x, mask, dtype)
        if unsupported(x, dim, factor, mask, out, False) is None:
            return softmax_op(x, mask, dim % x.dim(), factor, log, out)
    return (reference.log_softmax if log else reference.softmax)(x, dim, scale, mask, dtype)


dispatch.register_fakes(
    {
        "softmax_forward": lambda x, mask, dim, scale, log, dtype: x.new_empty(x.shape, dtype=dtype),
        "softmax_backward": lambda dy, y, mask, dim, scale, log, dtype: y.new_empty(y.shape, dtype=dtype),
    }
)

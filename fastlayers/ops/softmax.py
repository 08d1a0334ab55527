"""softmax and log_softmax: the choice between kernel and reference, and what autograd and graphs see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastlayers import backends
from fastlayers.ops import graph_ops, guard, layouts, pairs, raw_ops, reference
from fastlayers.ops.pairs import Gradients, Needs


class Kernels(raw_ops.Kernels):
    @staticmethod
    def softmax_forward(
        x: Tensor, dim: int, scale: float, mask: Tensor | None, dtype: torch.dtype, log: bool
    ) -> Tensor:
        return x.new_empty(x.shape, dtype=dtype)

    @staticmethod
    def softmax_backward(
        dy: Tensor, y: Tensor, dim: int, scale: float, mask: Tensor | None, dtype: torch.dtype, log: bool
    ) -> Tensor:
        return y.new_empty(y.shape, dtype=dtype)


FAMILY = raw_ops.Family("softmax", Kernels, cpu=True)

#: Elements from which an unforced softmax without scale and mask gets the kernel. Below, torch's own is one kernel too,
#: and what counts is the host: forward and backward through a Python Function took 1.4 to 1.5 times torch's 90 us on an
#: H100. What that gives away is GPU time in its shade: at 8x64 bfloat16 1.8 us for 1.9 forward, 1.6 for 2.8 backward.
GPU_LEAST = 2**16
#: Elements from which an unforced softmax with a scale or a mask gets the kernel of a CPU, over the last dimension.
#: Without both torch's own is one pass over memory there as well; rows of fewer elements than two vectors lose.
CPU_LEAST = 2**17
_CPU_ROW = 32
# Kernels scale the minus infinities with which they fill up a row: in float32 that factor may become neither 0 nor
# infinite.
_SMALLEST_SCALE = 1e-36


def result_dtype(x: Tensor, mask: Tensor | None, dtype: torch.dtype | None) -> torch.dtype:
    """dtype of softmax(x·scale + mask, dtype=dtype), autocast included: on a GPU it runs torch's softmax in float32."""
    if dtype is not None:
        return dtype
    scores = x.dtype
    # As torch.result_type, which Dynamo of torch 2.11 cannot trace: a mask of no dimension changes no dtype.
    if mask is not None and mask.dtype != torch.bool and mask.dim():
        scores = torch.promote_types(scores, mask.dtype)
    return torch.float32 if scores in reference.LOW_PRECISION and x.is_cuda and torch.is_autocast_enabled() else scores


def unsupported(
    x: Tensor, dim: int, scale: float, mask: Tensor | None, out: torch.dtype, masks_any_dim: bool
) -> str | None:
    """Why no kernel takes this call, None where one does."""
    given, dims = x.dtype, x.dim()
    if given not in guard.FLOATING or not (out is given or (out == torch.float32 and given in reference.LOW_PRECISION)):
        return f"no kernel from {given} to {out}"
    if x.numel() == 0 or not -dims <= dim < dims:
        return f"nothing to reduce in dim {dim} of shape {tuple(x.shape)}"
    if not _SMALLEST_SCALE < abs(scale) < 1 / _SMALLEST_SCALE:
        return f"the scale is {scale}; kernels take one between 1e-36 and 1e36 in magnitude"
    if mask is None:
        return None
    if not guard.is_plain(mask) or mask.device != x.device:
        return f"the mask is a {type(mask).__name__} on {mask.device}, and x on {x.device}"
    if not layouts.broadcasts_to(mask.shape, x.shape):
        return f"a mask of shape {tuple(mask.shape)} does not broadcast to x of shape {tuple(x.shape)}"
    if mask.dtype not in (torch.bool, x.dtype) and not (
        mask.dtype == torch.float32 and x.dtype in reference.LOW_PRECISION
    ):
        return f"the mask is {mask.dtype}; kernels take bool, float32 and x's {x.dtype}"
    if dim not in (-1, dims - 1) and not masks_any_dim:
        return f"a mask over dim {dim}; the kernel takes one over the last dimension"
    return None


def _gains(kernels: Kernels, x: Tensor, dim: int, bare: bool) -> bool:
    """Whether a call that nobody forced gains by the kernel. ``bare``: it has neither a scale nor a mask."""
    if not kernels.unasked:
        return not bare or x.numel() >= GPU_LEAST
    if bare or x.dtype not in guard.CPU_DTYPES or x.numel() < CPU_LEAST or dim not in (-1, x.dim() - 1):
        return False
    return x.shape[-1] >= _CPU_ROW


class Softmax(pairs.Pair, inputs=2):
    """Keeps the result; the mask too where it is boolean (a view of the caller's) or needs a gradient."""

    @staticmethod
    def raw_forward(
        kernels: Kernels, needs: Needs, x: Tensor, mask: Tensor | None, dim: int, scale: float, log: bool,
        dtype: torch.dtype,
    ) -> Any:  # fmt: skip
        y = kernels.softmax_forward(x, dim, scale, mask, dtype, log)
        keeps_mask = mask is not None and (mask.dtype == torch.bool or mask.requires_grad)
        return y, (y, mask if keeps_mask else None), (dim, scale, log, x.dtype)

    @staticmethod
    def raw_backward(kernels: Kernels, needs: Needs, *args: Any) -> Gradients:
        return _gradients(kernels.softmax_backward, *args)

    @staticmethod
    def differentiable_backward(needs: Needs, *args: Any) -> Gradients:
        return _gradients(_decomposed_backward, *args)


def _gradients(
    backward: Callable[[Tensor, Tensor, int, float, Tensor | None, torch.dtype, bool], Tensor], dy: Tensor, y: Tensor,
    mask: Tensor | None, dim: int, scale: float, log: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Gradients of x and of an additive mask that was kept for that: the scores', summed to the mask's shape."""
    if mask is None or mask.dtype == torch.bool:
        return backward(dy, y, dim, scale, mask, dtype, log), None
    dscores = backward(dy, y, dim, 1.0, None, y.dtype, log)
    return (dscores * scale).to(dtype), dscores.sum_to_size(mask.shape).to(mask.dtype)


def _decomposed_backward(
    dy: Tensor, y: Tensor, dim: int, scale: float, mask: Tensor | None, dtype: torch.dtype, log: bool
) -> Tensor:
    formula = torch._log_softmax_backward_data if log else torch._softmax_backward_data
    dx = formula(dy, y, dim, y.dtype) * scale
    return (dx if mask is None else torch.where(mask, dx, 0.0)).to(dtype)


_in_graph = FAMILY.graph_op_of(Softmax, "softmax")


def softmax(
    x: Tensor, dim: int, scale: float | None, mask: Tensor | None, dtype: torch.dtype | None, log: bool
) -> Tensor:
    factor = 1.0 if scale is None else _number(scale)
    reference_op = reference.log_softmax if log else reference.softmax
    kernels = FAMILY.kernels_for(x)
    if kernels is not None:
        if backends.get_backend() is None and not _gains(kernels, x, dim, scale is None and mask is None):
            return reference_op(x, dim, scale, mask, dtype)
        out = x.dtype
        if mask is not None or dtype is not None or out in reference.LOW_PRECISION:
            out = result_dtype(x, mask, dtype)
        reason = unsupported(x, dim, factor, mask, out, kernels.backend == "triton")
        if reason is None:
            if dim < 0:
                dim += x.dim()
            return Softmax.run(kernels, x, mask, dim, factor, log, out)
        backends.refuse(reason)
    elif torch.compiler.is_compiling() and graph_ops.graph_keeps_kernel(x):
        # Inductor's row reductions reach half of the memory limit on long rows, so a graph keeps the kernel.
        out = result_dtype(x, mask, dtype)
        if unsupported(x, dim, factor, mask, out, False) is None:
            return _in_graph(x, mask, dim % x.dim(), factor, log, out)
    return guard.call_reference(reference_op, x, dim, scale, mask, dtype)


def _number(scale: object) -> float:
    if isinstance(scale, float | int):
        return float(scale)
    raise TypeError(f"softmax(): expected scale to be a number or None, but got {type(scale).__name__}")

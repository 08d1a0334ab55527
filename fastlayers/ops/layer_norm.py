"""layer_norm, rms_norm and their forms with a residual: the choice between kernel and reference, autograd, compile."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastlayers import backends
from fastlayers.ops import graph_ops, guard, layouts, pairs, raw_ops, reference
from fastlayers.ops.pairs import Gradients, Needs
from fastlayers.ops.reference import Shape

#: What the kernels call ``kind``.
LAYER = 0
RMS = {"torch": 1, "llama": 2, "gemma": 3}


class Kernels(raw_ops.Kernels):
    @staticmethod
    def layer_norm_forward(
        x: Tensor, dims: int, weight: Tensor | None, bias: Tensor | None, eps: float, kind: int, dtype: torch.dtype,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        return x.new_empty(x.shape, dtype=dtype), _empty_stats(x, dims, kind, keep)

    @staticmethod
    def add_layer_norm_forward(
        x: Tensor, residual: Tensor, dims: int, weight: Tensor | None, bias: Tensor | None, eps: float, kind: int,
        dtype: torch.dtype, keep: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        s = x.new_empty(x.shape, dtype=residual.dtype)
        return x.new_empty(x.shape, dtype=dtype), s, _empty_stats(s, dims, kind, keep)

    @staticmethod
    def layer_norm_backward(
        dy: Tensor, dsum: Tensor | None, x: Tensor, dims: int, weight: Tensor | None, stats: Tensor, kind: int,
        dweight: bool, dbias: bool, narrow: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        like = x if weight is None else weight
        shape = x.shape[x.dim() - dims :]
        parameters = [like.new_empty(shape if wanted and weight is not None else 0) for wanted in (dweight, dbias)]
        low = x.new_empty(0) if narrow is None else x.new_empty(x.shape, dtype=narrow)
        return x.new_empty(x.shape), parameters[0], parameters[1], low

    @staticmethod
    def ada_layer_norm_forward(
        x: Tensor, scale: Tensor, shift: Tensor | None, dims: int, eps: float, dtype: torch.dtype, keep: bool
    ) -> tuple[Tensor, Tensor]:
        return x.new_empty(x.shape, dtype=dtype), _empty_stats(x, dims, LAYER, keep)

    @staticmethod
    def ada_layer_norm_backward(
        dy: Tensor, x: Tensor, scale: Tensor, stats: Tensor, dims: int, dscale: bool, dshift: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        first, second = (scale.new_empty(scale.shape if wanted else 0) for wanted in (dscale, dshift))
        return x.new_empty(x.shape), first, second


def _empty_stats(x: Tensor, dims: int, kind: int, keep: bool) -> Tensor:
    shape = (2 if kind == LAYER else 1, math.prod(x.shape[: x.dim() - dims])) if keep else (0,)
    return x.new_empty(shape, dtype=layouts.accumulator(x))


FAMILY = raw_ops.Family(
    "layer_norm", Kernels, cpu=True, triton_only=("ada_layer_norm_forward", "ada_layer_norm_backward")
)

#: Elements of a row up to which the kernel of a modulated norm holds it in registers, and of float64.
LONGEST, LONGEST_DOUBLE = 8192, 2048


def _rms_kind(casting: str) -> int:
    try:
        return RMS[casting]
    except (KeyError, TypeError):
        raise ValueError(f"unknown casting order {casting!r}; expected one of {', '.join(map(repr, RMS))}") from None


_EPS32, _EPS64 = torch.finfo(torch.float32).eps, torch.finfo(torch.float64).eps


def _default_eps(dtype: torch.dtype) -> float:
    """eps of an RMSNorm that has none: the epsilon of the type that is computed in, as torch has it."""
    return _EPS64 if dtype == torch.float64 else _EPS32


def result_dtype(kind: int, x: Tensor, weight: Tensor | None) -> torch.dtype:
    """dtype of the norm, autocast included."""
    if kind == LAYER:
        return reference.norm_dtype("layer_norm", x)
    if kind == RMS["torch"]:
        return reference.norm_dtype("rms_norm", x)
    if kind == RMS["llama"] and weight is not None:
        return torch.promote_types(x.dtype, weight.dtype)
    return x.dtype


def _written(own: torch.dtype, dtype: torch.dtype | None, x: Tensor) -> torch.dtype:
    """The dtype that kernels write where torch gives ``own`` and a cast to ``dtype`` follows: the bits are the same."""
    return dtype if dtype in reference.LOW_PRECISION and own == torch.float32 and x.dtype in (own, dtype) else own


def _cast(y: Tensor, dtype: torch.dtype | None) -> Tensor:
    return y if dtype is None else y.to(dtype)


def unsupported(
    x: Tensor, dtype: torch.dtype, shape: tuple[int, ...], weight: Tensor | None, bias: Tensor | None, kind: int
) -> str | None:
    """Why no kernel takes this call, None where one does. ``dtype`` is the dtype of x, or of x + residual."""
    dims = len(shape)
    if dtype not in guard.FLOATING:
        return f"no kernel for {dtype}"
    sizes = x.shape
    # One dimension is the usual case; it needs no slice, which would be a new torch.Size.
    ends = sizes[-1] == shape[0] if dims == 1 <= len(sizes) else dims > 0 and sizes[-dims:] == shape
    if not ends or x.numel() == 0:
        return f"nothing to normalise over {shape} in shape {tuple(x.shape)}"
    if kind == RMS["torch"] and layouts.suggests_channels_last(x):
        return "torch's rms_norm keeps channels_last; the kernel's result is contiguous"
    if weight is None:
        return None if bias is None else "a bias without a weight"
    device = x.get_device()
    problem = guard.parameter_problem(weight, device, dtype, shape)
    if problem is None and bias is not None:
        problem = guard.parameter_problem(bias, device, weight.dtype, shape)
        if problem is None and bias.dtype != weight.dtype:
            return f"the weight is {weight.dtype}, and the bias {bias.dtype}"
    return problem


class LayerNorm(pairs.Pair, inputs=3):
    """Keeps x, the weight, and the rstd of each row; for a layer_norm the mean too."""

    @staticmethod
    def raw_forward(
        kernels: Kernels, needs: Needs, x: Tensor, weight: Tensor | None, bias: Tensor | None, dims: int, eps: float,
        kind: int, dtype: torch.dtype,
    ) -> Any:  # fmt: skip
        y, stats = kernels.layer_norm_forward(x, dims, weight, bias, eps, kind, dtype, bool(needs))
        return y, (x, weight, stats), (dims, eps, kind)

    @staticmethod
    def raw_backward(
        kernels: Kernels, needs: Needs, dy: Tensor, x: Tensor, weight: Tensor | None, stats: Tensor, dims: int,
        eps: float, kind: int,
    ) -> Gradients:  # fmt: skip
        _, for_weight, for_bias = needs
        return kernels.layer_norm_backward(dy, None, x, dims, weight, stats, kind, for_weight, for_bias)[:3]

    @staticmethod
    def differentiable_backward(
        needs: Needs, dy: Tensor, x: Tensor, weight: Tensor | None, stats: Tensor, *rest: Any
    ) -> Gradients:
        return decomposed_backward(dy, None, x, weight, *rest, *needs[1:])


class AddLayerNorm(pairs.Pair, inputs=4):
    """Keeps s = x + residual, the weight, and the rstd of each row; for a layer_norm the mean too.

    Without a residual s is x itself: autograd returns it as a view, whose gradient arrives here as that of s.
    """

    @staticmethod
    def raw_forward(
        kernels: Kernels, needs: Needs, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None,
        dims: int, eps: float, kind: int, dtype: torch.dtype,
    ) -> Any:  # fmt: skip
        keep = bool(needs)
        if residual is None:
            s = x
            y, stats = kernels.layer_norm_forward(x, dims, weight, bias, eps, kind, dtype, keep)
        else:
            y, s, stats = kernels.add_layer_norm_forward(x, residual, dims, weight, bias, eps, kind, dtype, keep)
        return (y, s), (s, weight, stats), (x.dtype, dims, eps, kind)

    @staticmethod
    def constant(needs: Needs, results: Any) -> tuple[Tensor, ...]:
        return () if needs[0] or needs[1] else results[1:]

    @staticmethod
    def raw_backward(
        kernels: Kernels, needs: Needs, dy: Tensor | None, ds: Tensor | None, s: Tensor, weight: Tensor | None,
        stats: Tensor, dtype: torch.dtype, dims: int, eps: float, kind: int,
    ) -> Gradients:  # fmt: skip
        if dy is None:
            return _of_summands(dtype, ds)
        _, _, for_weight, for_bias = needs
        gradients = kernels.layer_norm_backward(dy, ds, s, dims, weight, stats, kind, for_weight, for_bias)
        return _of_summands(dtype, *gradients[:3])

    @staticmethod
    def differentiable_backward(
        needs: Needs, dy: Tensor | None, ds: Tensor | None, s: Tensor, weight: Tensor | None, stats: Tensor,
        dtype: torch.dtype, *rest: Any,
    ) -> Gradients:  # fmt: skip
        if dy is None:
            return _of_summands(dtype, ds)
        return _of_summands(dtype, *decomposed_backward(dy, ds, s, weight, *rest, *needs[2:]))


def _of_summands(
    dtype: torch.dtype, ds: Tensor | None, dweight: Tensor | None = None, dbias: Tensor | None = None
) -> Gradients:
    """The gradients of x, which may be in low precision beside a float32 residual, residual, weight and bias."""
    return ds if ds is None or ds.dtype is dtype else ds.to(dtype), ds, dweight, dbias


def decomposed_backward(
    dy: Tensor, ds: Tensor | None, x: Tensor, weight: Tensor | None, dims: int, eps: float, kind: int, for_weight: bool,
    for_bias: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradients of what was normalised, of weight and bias in torch ops, with the statistics recomputed."""
    row = tuple(range(-dims, 0))
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    dy = dy.to(wide.dtype)
    centered = wide - wide.mean(row, keepdim=True) if kind == LAYER else wide
    rstd = torch.rsqrt(centered.square().mean(row, keepdim=True) + eps)
    normalized = centered * rstd
    if weight is None:
        d = dy
    else:
        d = dy * (1 + weight.to(wide.dtype) if kind == RMS["gemma"] else weight)
    if kind == LAYER:
        d = d - d.mean(row, keepdim=True)
    dx = ((d - normalized * (d * normalized).mean(row, keepdim=True)) * rstd).to(x.dtype)
    shape = x.shape[-dims:]
    dweight = (dy * normalized).sum_to_size(shape).to(weight.dtype) if for_weight and weight is not None else None
    dbias = dy.sum_to_size(shape).to(weight.dtype) if for_bias and weight is not None else None
    return dx if ds is None else dx + ds, dweight, dbias


def _in_memory_order(x: Tensor, dims: int) -> list[int] | None:
    """The permutation under which the rows of x follow each other in memory; None where no such exists.

    Elementwise operations lay their result out in that order, and so do the norms of Llama and Gemma.
    """
    sizes, strides = x.shape, x.stride()
    order = sorted(range(x.dim()), key=lambda d: -strides[d] if sizes[d] > 1 else -math.inf)
    rows = x.dim() - dims
    repeated = any(stride == 0 and size > 1 for size, stride in zip(sizes, strides, strict=True))
    return None if repeated or order[rows:] != list(range(rows, x.dim())) else order


_norm_in_graph = FAMILY.graph_op_of(LayerNorm, "layer_norm")
_add_norm_in_graph = FAMILY.graph_op_of(AddLayerNorm, "add_layer_norm", tuple[Tensor, Tensor])


def _trains_in_graph(x: Tensor, *others: Tensor | None) -> bool:
    """Whether a graph that torch.compile makes keeps the kernels: if it trains.

    Inductor's backward of a norm reaches 0.4 to 0.7 of the memory limit. In a graph that only runs forward Inductor is
    near the limit, and fuses the norm with its neighbours.
    """
    return torch.compiler.is_compiling() and graph_ops.graph_keeps_kernel(x) and guard.wants_gradient(x, *others)


def _only_if_forced(kernels: Any, kind: int) -> bool:
    """Whether a CPU has to be asked for these kernels: torch's own layer_norm is one pass over memory there as well,
    while an rms_norm gains 3x to 13x."""
    return kernels is not None and kernels.unasked and kind == LAYER


def _norm(
    x: Tensor, shape: Shape, weight: Tensor | None, bias: Tensor | None, eps: float | None, kind: int,
    dtype: torch.dtype | None,
) -> Tensor | None:  # fmt: skip
    """The norm by a kernel, None where the reference has to be called."""
    kernels = FAMILY.kernels_for(x)
    if (kernels is None and not _trains_in_graph(x, weight, bias)) or _only_if_forced(kernels, kind):
        return None
    shape = tuple(shape)
    dims = len(shape)
    reason = unsupported(x, x.dtype, shape, weight, bias, kind)
    if kernels is None:
        if reason is not None or (kind > 1 and not x.is_contiguous()):
            return None
    elif reason is not None:
        backends.refuse(reason)
        return None
    elif kind > 1 and not x.is_contiguous():
        order = _in_memory_order(x, dims)
        if order is None:
            backends.refuse(f"the rows of an x with strides {x.stride()} do not follow each other")
            return None
        if order != list(range(x.dim())):
            y = _norm(x.permute(order), shape, weight, bias, eps, kind, dtype)
            assert y is not None
            return y.permute([order.index(d) for d in range(x.dim())])
    if eps is None:
        eps = _default_eps(x.dtype)
    own = x.dtype
    if own in reference.LOW_PRECISION:
        own = result_dtype(kind, x, weight)
    out = _written(own, dtype, x)
    if kernels is None:
        return _norm_in_graph(x, weight, bias, dims, eps, kind, out)
    return LayerNorm.run(kernels, x, weight, bias, dims, eps, kind, out)


def _add_norm(
    x: Tensor, residual: Tensor | None, shape: Shape, weight: Tensor | None, bias: Tensor | None, eps: float | None,
    kind: int, dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """(norm(s), s), s = x + residual, by one kernel; None where the sum is torch's, and the norm a call of its own."""
    kernels = FAMILY.kernels_for(x)
    if (kernels is None and not _trains_in_graph(x, residual, weight, bias)) or _only_if_forced(kernels, kind):
        return None
    if residual is None:  # a norm like any other, unless there are two gradients to add; in a graph Inductor does
        if kernels is None or not (torch.is_grad_enabled() and x.requires_grad and x.is_contiguous()):
            return None
        total = x.dtype
    else:
        if not _adds(x, residual):
            return None
        total = residual.dtype  # x's, or float32 with a low-precision x
    shape = tuple(shape)
    if unsupported(x, total, shape, weight, bias, kind) is not None:
        return None
    if eps is None:
        eps = _default_eps(total)
    own = torch.float32 if total == torch.float32 else result_dtype(kind, x, weight)
    out = _written(own, dtype, x)
    if kernels is None:
        return _add_norm_in_graph(x, residual, weight, bias, len(shape), eps, kind, out)
    return AddLayerNorm.run(kernels, x, residual, weight, bias, len(shape), eps, kind, out)


def _adds(x: Tensor, residual: Tensor) -> bool:
    """Whether the kernel that adds takes this pair: of one shape, and lying so that their sum is contiguous."""
    return (
        guard.is_plain(residual)
        and residual.shape == x.shape
        and residual.get_device() == x.get_device()
        and (residual.dtype == x.dtype or (residual.dtype == torch.float32 and x.dtype in reference.LOW_PRECISION))
        and x.is_contiguous()
        and residual.is_contiguous()
    )


def layer_norm(
    x: Tensor, shape: Shape, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype | None = None
) -> Tensor:
    y = _norm(x, shape, weight, bias, eps, LAYER, dtype)
    return _cast(guard.call_reference(reference.layer_norm, x, shape, weight, bias, eps) if y is None else y, dtype)


def rms_norm(
    x: Tensor, shape: Shape, weight: Tensor | None, eps: float | None, casting: str, dtype: torch.dtype | None = None
) -> Tensor:
    y = _norm(x, shape, weight, None, eps, _rms_kind(casting), dtype)
    return _cast(guard.call_reference(reference.rms_norm, x, shape, weight, eps, casting) if y is None else y, dtype)


def _of_shards(function: Callable[..., Any], x: Tensor, *args: Any) -> tuple[Tensor, Tensor] | None:
    """What a rule for DTensors answers, None where the sum is torch's."""
    if type(x) in guard.PLAIN or not guard.is_dtensor(x) or torch.compiler.is_compiling():
        return None
    both: tuple[Tensor, Tensor] | None = guard.answer_sharded(function, x, *args)
    return both


def add_layer_norm(
    x: Tensor, residual: Tensor | None, shape: Shape, weight: Tensor | None, bias: Tensor | None, eps: float,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    both = _add_norm(x, residual, shape, weight, bias, eps, LAYER, dtype)
    if both is None:
        both = _of_shards(reference.add_layer_norm, x, residual, shape, weight, bias, eps, dtype)
    if both is None:
        s = x if residual is None else x + residual
        return layer_norm(s, shape, weight, bias, eps, dtype), s
    return _cast(both[0], dtype), both[1]


def add_rms_norm(
    x: Tensor, residual: Tensor | None, shape: Shape, weight: Tensor | None, eps: float | None, casting: str,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    both = _add_norm(x, residual, shape, weight, None, eps, _rms_kind(casting), dtype)
    if both is None:
        both = _of_shards(reference.add_rms_norm, x, residual, shape, weight, eps, casting, dtype)
    if both is None:
        s = x if residual is None else x + residual
        return rms_norm(s, shape, weight, eps, casting, dtype), s
    return _cast(both[0], dtype), both[1]


# ---- with a scale and a shift for each sample ------------------------------------------------------------------------


class AdaLayerNorm(pairs.Pair, inputs=3):
    """Keeps x, the scale, and the mean and rstd of each row."""

    @staticmethod
    def raw_forward(
        kernels: Kernels, needs: Needs, x: Tensor, scale: Tensor, shift: Tensor | None, dims: int, eps: float,
        dtype: torch.dtype,
    ) -> Any:  # fmt: skip
        y, stats = kernels.ada_layer_norm_forward(x, scale, shift, dims, eps, dtype, bool(needs))
        return y, (x, scale, stats), (dims, eps)

    @staticmethod
    def raw_backward(
        kernels: Kernels, needs: Needs, dy: Tensor, x: Tensor, scale: Tensor, stats: Tensor, dims: int, eps: float
    ) -> Gradients:
        return kernels.ada_layer_norm_backward(dy, x, scale, stats, dims, *needs[1:])

    @staticmethod
    def differentiable_backward(
        needs: Needs, dy: Tensor, x: Tensor, scale: Tensor, stats: Tensor, dims: int, eps: float
    ) -> Gradients:
        def modulated(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
            wide = [t.to(layouts.accumulator(x)) for t in (x, scale, shift)]
            return reference.ada_layer_norm(wide[0], x.shape[-dims:], wide[1], wide[2], eps)

        tensors = (x, scale, torch.zeros_like(scale))
        return pairs.differentiate(modulated, tensors, needs, dy.to(layouts.accumulator(x)))


def unsupported_modulation(x: Tensor, shape: tuple[int, ...], scale: Tensor, shift: Tensor | None) -> str | None:
    """Why no kernel takes this call of a modulated norm, None where one does."""
    problem = unsupported(x, x.dtype, shape, None, None, LAYER)
    if problem is not None:
        return problem
    longest = LONGEST_DOUBLE if x.dtype == torch.float64 else LONGEST
    if math.prod(shape) > longest:
        return f"rows of {math.prod(shape)} elements; the kernel holds up to {longest} of {x.dtype}"
    for name, t in (("scale", scale), ("shift", shift)):
        if t is not None or name == "scale":
            if not guard.is_plain(t):
                return f"{name} is a {type(t).__name__}; the kernel takes plain tensors"
            if t.dtype is not x.dtype and not {t.dtype, x.dtype} <= {torch.float32, *reference.LOW_PRECISION}:
                return f"{name} is {t.dtype} beside {x.dtype}"
            if t.get_device() != x.get_device():
                return f"{name} is on {t.device}, and the input on {x.device}"
            if t.shape != scale.shape or t.dtype is not scale.dtype:
                return f"scale has shape {tuple(scale.shape)} and {scale.dtype}, shift {tuple(t.shape)} and {t.dtype}"
    rows, own = tuple(x.shape[: x.dim() - len(shape)]), tuple(scale.shape[: max(scale.dim() - len(shape), 0)])
    own = (1,) * (len(rows) - len(own)) + own
    grouped = any(own == rows[:d] + (1,) * (len(rows) - d) for d in range(len(rows) + 1))
    if scale.shape[-len(shape) :] != shape or not grouped:
        return f"scale has shape {tuple(scale.shape)}, the input {tuple(x.shape)}: no group of neighbours for each row"
    return None


def ada_layer_norm(x: Tensor, shape: Shape, scale: Tensor, shift: Tensor | None, eps: float) -> Tensor:
    kernels = FAMILY.triton_kernels_for(x)
    shape = tuple(shape)
    if kernels is not None:
        problem = unsupported_modulation(x, shape, scale, shift)
        if problem is None:
            dtype = torch.promote_types(result_dtype(LAYER, x, None), scale.dtype)
            return AdaLayerNorm.run(kernels, x, scale, shift, len(shape), eps, dtype)
        backends.refuse(problem)
    return guard.call_reference(reference.ada_layer_norm, x, shape, scale, shift, eps)

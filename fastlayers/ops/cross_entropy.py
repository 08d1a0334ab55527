"""cross_entropy: the choice between kernel and reference, autograd, the op that torch.compile sees, and the chunk of
linear_cross_entropy.

The loss of a row with the scores s, s = softcap·tanh(logits/softcap) where there is a softcap, and of class t is

    (1 - e)·w_t·(lse - s_t) + e/C·sum_c w_c·(lse - s_c) + z_loss·lse²,   lse = log(sum_c exp(s_c)),

with e for label_smoothing. With p = exp(s - lse) its gradient is

    p·((1 - e)·w_t + e/C·sum_c w_c + 2·z_loss·lse) - (1 - e)·w_t·[c = t] - e/C·w_c

by the scores, times 1 - (s/softcap)² by the logits. It needs no reduction along the row: so the logits, the classes and
lse, as the maximum and the rest of it, are all that is kept. The formulas as torch ops are below, for second
derivatives and for the CPU.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import _reduction

from fastlayers import backends
from fastlayers.ops import graph_ops, guard, layouts, pairs, raw_ops, reference
from fastlayers.ops.pairs import Gradients, Needs
from fastlayers.ops.softmax import GPU_LEAST

#: Elements from which an unforced call on a CPU gets the kernel, and the numbers of classes: it gains nothing where a
#: row takes few vectors and is yet too long to be transposed.
CPU_LEAST = 2**17
_CPU_TRANSPOSED, _CPU_LONG = 24, 100
_MOST_CLASSES = 2**30
#: The codes that torch and the kernels have for ``reduction``.
NONE, MEAN, SUM = 0, 1, 2


class Kernels(raw_ops.Kernels):
    @staticmethod
    def cross_entropy_forward(
        x: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: int, label_smoothing: float,
        softcap: float, z_loss: float, dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        loss = x.new_empty(target.shape if reduction == NONE else (), dtype=dtype)
        return loss, x.new_empty((2 * target.numel() + 2,), dtype=layouts.accumulator(x))

    @staticmethod
    def cross_entropy_backward(
        dy: Tensor, x: Tensor, target: Tensor, weight: Tensor | None, stats: Tensor, ignore_index: int, reduction: int,
        label_smoothing: float, softcap: float, z_loss: float,
    ) -> Tensor:  # fmt: skip
        if x.dim() > 2 and not x.is_contiguous() and x.movedim(1, -1).is_contiguous():
            return torch.empty_like(x)  # the classes next to each other, as in x
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)

    @staticmethod
    def cross_entropy_backward_(
        dy: Tensor, x: Tensor, target: Tensor, weight: Tensor | None, stats: Tensor, ignore_index: int, reduction: int,
        label_smoothing: float, softcap: float, z_loss: float,
    ) -> None:  # fmt: skip
        return None

    @staticmethod
    def cross_entropy_chunk_(
        logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float,
        softcap: float, z_loss: float, grad_scale: Tensor | None, want_grad: bool, columns: int,
    ) -> Tensor:  # fmt: skip
        return logits.new_empty(target.shape, dtype=layouts.accumulator(logits))


FAMILY = raw_ops.Family("cross_entropy", Kernels, cpu=True)


class Options(NamedTuple):
    """What the kernels take besides tensors, in their order. No softcap is 0."""

    ignore_index: int
    reduction: int
    label_smoothing: float
    softcap: float
    z_loss: float


# ---- the formulas in torch ops ---------------------------------------------------------------------------------------


def scores_of(logits: Tensor, softcap: float) -> Tensor:
    return reference.capped(logits.to(torch.promote_types(logits.dtype, torch.float32)), softcap)


class _Rows(NamedTuple):
    """What the formulas take of each row: its class, with the class dimension of one element, and w_t."""

    target: Tensor  # 0 where the row is ignored
    kept: Tensor
    weight: Tensor | None  # of the classes, to be broadcast against the scores
    of_target: Tensor  # w_t, 0 where the row is ignored

    @staticmethod
    def find(scores: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, dim: int) -> _Rows:
        kept = target != ignore_index
        classes = torch.where(kept, target, 0).unsqueeze(dim)
        of_target = kept.to(scores.dtype)
        if weight is not None:
            of_target = of_target * weight.to(scores.dtype)[classes.squeeze(dim)]
            weight = weight.to(scores.dtype).view(-1, *[1] * (scores.dim() - 1 - dim))
        return _Rows(classes, kept, weight, of_target)


def _losses(scores: Tensor, lse: Tensor, rows: _Rows, options: Options, dim: int) -> Tensor:
    """Of each row, 0 where it is ignored."""
    smoothing = options.label_smoothing
    missed = -torch.log_softmax(scores, dim)  # lse - scores would cancel where a score is large
    loss = (1.0 - smoothing) * rows.of_target * missed.gather(dim, rows.target).squeeze(dim)
    if smoothing:
        missed = (missed if rows.weight is None else missed * rows.weight).sum(dim)
        loss = loss + smoothing / scores.shape[dim] * missed
    if options.z_loss:
        loss = loss + options.z_loss * lse.square()
    return torch.where(rows.kept, loss, 0.0)


def _gradient(scores: Tensor, lse: Tensor, rows: _Rows, options: Options, scale: Tensor, dim: int) -> Tensor:
    """Of sum(losses·scale) by the logits; ``scale`` is a number for each row."""
    smoothing = options.label_smoothing
    of_target = (1.0 - smoothing) * rows.of_target
    factor = of_target
    if smoothing:
        total = scores.shape[dim] if rows.weight is None else rows.weight.sum()
        factor = factor + smoothing / scores.shape[dim] * total
    if options.z_loss:
        factor = factor + 2.0 * options.z_loss * lse
    d = torch.softmax(scores, dim) * factor.unsqueeze(dim)  # lse, rounded, would cost a digit
    d = d.scatter_add(dim, rows.target, -of_target.unsqueeze(dim))
    if smoothing:
        d = d - smoothing / scores.shape[dim] * (1.0 if rows.weight is None else rows.weight)
    if options.softcap:
        d = d * (1.0 - (scores / options.softcap).square())
    return torch.where(rows.kept.unsqueeze(dim), d * scale.unsqueeze(dim), 0.0)


def _class_dim(logits: Tensor) -> int:
    return 0 if logits.dim() == 1 else 1


def decomposed_backward(dy: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None, options: Options) -> Tensor:
    """The gradient of the logits in torch ops."""
    dim = _class_dim(logits)
    scores = scores_of(logits, options.softcap)
    rows = _Rows.find(scores, target, weight, options.ignore_index, dim)
    scale = dy.to(scores.dtype)
    if options.reduction != NONE:
        scale = (scale / rows.of_target.sum() if options.reduction == MEAN else scale).expand(target.shape)
    return _gradient(scores, torch.logsumexp(scores, dim), rows, options, scale, dim).to(logits.dtype)


# ---- which calls -----------------------------------------------------------------------------------------------------


def unsupported(x: Tensor, target: object, weight: Tensor | None, options: Options, out: torch.dtype) -> str | None:
    """Why no kernel takes this call, None where one does."""
    given, shape = x.dtype, x.shape
    if x.dim() > 0 and shape[_class_dim(x)] > _MOST_CLASSES:
        return f"logits of {shape[_class_dim(x)]} classes; kernels take up to 2^30"
    if given not in guard.FLOATING or not (out is given or (out == torch.float32 and given in reference.LOW_PRECISION)):
        return f"no kernel from {given} to {out}"
    if not guard.is_plain(target):
        return f"the target is a {type(target).__name__}; kernels take a plain tensor"
    if target.dtype != torch.int64:
        return f"the target is {target.dtype}; kernels take classes as int64, and torch's own serve probabilities"
    if target.get_device() != x.get_device():
        return f"the target is on {target.device}, and the logits on {x.device}"
    if x.numel() == 0 or x.dim() == 0:
        return f"nothing to compute on logits of shape {tuple(shape)}"
    if target.shape != shape[:1] + shape[2:] and not (x.dim() == 1 and target.dim() == 0):
        return f"a target of shape {tuple(target.shape)} is not one of classes for logits of shape {tuple(shape)}"
    if not 0.0 <= options.label_smoothing <= 1.0:
        return f"label_smoothing is {options.label_smoothing}"
    if weight is None:
        return None
    if not guard.is_plain(weight) or weight.get_device() != x.get_device() or weight.requires_grad:
        return f"the weight is a {type(weight).__name__} on {weight.device}; kernels take one without a gradient"
    if weight.shape != (shape[_class_dim(x)],) or (weight.dtype is not given and out is given):
        return f"the weight is {weight.dtype} of shape {tuple(weight.shape)}, for {given} logits of {tuple(shape)}"
    return None if weight.dtype in guard.FLOATING else f"no kernel for a weight of {weight.dtype}"


def _gains(kernels: Kernels, x: Tensor, options: Options) -> bool:
    """Whether a call that nobody forced gains by the kernel."""
    if not kernels.unasked:
        return bool(options.softcap or options.z_loss) or x.numel() >= GPU_LEAST
    if x.dim() == 0 or x.dtype not in guard.CPU_DTYPES or x.numel() < CPU_LEAST:
        return False
    classes = x.shape[_class_dim(x)]
    return classes <= _CPU_TRANSPOSED or classes >= _CPU_LONG


def _as_torch_raises(error: RuntimeError) -> Exception:
    """The error of a class out of bounds as torch has it on a CPU; another one as it is."""
    wrong = re.search(r"Target -?\d+ is out of bounds\.", str(error))
    return error if wrong is None else IndexError(wrong[0])


def _wide(weight: Tensor | None, x: Tensor) -> Tensor | None:
    """The weight as the kernels take it: contiguous, in the dtype of the computation."""
    if weight is None:
        return None
    return weight.detach().to(torch.promote_types(x.dtype, torch.float32)).contiguous()


# ---- autograd --------------------------------------------------------------------------------------------------------

_OVERWRITTEN = (
    "cross_entropy(inplace_backward=True): the first backward has overwritten the logits with their gradient, so a"
    " second one is not possible; leave inplace_backward False where the graph is retained"
)


class CrossEntropy(pairs.Pair, inputs=1):
    """Keeps the logits, the classes, the weight, and lse of each row with the sums that all rows share."""

    @staticmethod
    def raw_forward(
        kernels: Kernels, needs: Needs, x: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int,
        reduction: int, label_smoothing: float, softcap: float, z_loss: float, dtype: torch.dtype,
    ) -> Any:  # fmt: skip
        options = (ignore_index, reduction, label_smoothing, softcap, z_loss)
        loss, stats = kernels.cross_entropy_forward(x, target, weight, *options, dtype)
        return loss, (x, target, weight, stats), options

    @staticmethod
    def raw_backward(kernels: Kernels, needs: Needs, *args: Any) -> Gradients:
        return (kernels.cross_entropy_backward(*args),)

    @staticmethod
    def differentiable_backward(
        needs: Needs, dy: Tensor, x: Tensor, target: Tensor, weight: Tensor | None, stats: Tensor, *options: Any
    ) -> Gradients:
        return (decomposed_backward(dy, x, target, weight, Options(*options)),)


class _OverwritingCrossEntropy(CrossEntropy, inputs=1):
    """Puts the gradient in the place of the logits."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Gradients:
        if getattr(ctx, "overwritten", False):
            raise RuntimeError(_OVERWRITTEN)
        x, target, weight, stats = ctx.saved_tensors
        if guard.needs_double_backward(*grads) or not x.is_contiguous():
            return CrossEntropy.backward(ctx, *grads)
        kernels, options = ctx.call
        kernels.cross_entropy_backward_(*grads, x, target, weight, stats, *options)
        # Any other node that kept the logits then raises in its backward.
        torch.autograd.graph.increment_version(x)
        ctx.overwritten = True
        return None, x.detach()


_in_graph = FAMILY.graph_op_of(CrossEntropy, "cross_entropy")


def cross_entropy(
    x: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str, label_smoothing: float,
    softcap: float | None, z_loss: float, inplace: bool,
) -> Tensor:  # fmt: skip
    code = _reduction.get_enum(reduction)
    if softcap is not None and not softcap > 0:
        raise ValueError(f"cross_entropy(): expected a softcap above 0 or None, but got {softcap}")
    if inplace and x.requires_grad and x.is_leaf:
        raise ValueError(
            "cross_entropy(): inplace_backward=True would overwrite the values of a leaf with its gradient; it is for"
            " logits that an operation computed"
        )
    options = Options(ignore_index, code, label_smoothing, softcap or 0.0, z_loss)
    kernels = FAMILY.kernels_for(x)
    if kernels is not None:
        if backends.get_backend() is None and not _gains(kernels, x, options):
            return reference.cross_entropy(x, target, weight, *options)
        out = reference.loss_dtype(x)
        reason = unsupported(x, target, weight, options, out)
        if reason is None:
            weight = _wide(weight, x)
            pair = _OverwritingCrossEntropy if inplace else CrossEntropy
            try:
                return pair.run(kernels, x, pairs.unwrap(target), weight, *options, out)
            except RuntimeError as error:
                raise _as_torch_raises(error) from None
        backends.refuse(reason)
    elif torch.compiler.is_compiling() and graph_ops.graph_keeps_kernel(x):
        # Inductor reaches half of the memory limit, so a graph keeps the kernel. It never writes the logits, even where
        # ``inplace`` allows it.
        out = reference.loss_dtype(x)
        if unsupported(x, target, weight, options, out) is None:
            return _in_graph(x, target, _wide(weight, x), *options, out)
    return guard.call_reference(reference.cross_entropy, x, target, weight, *options)


# ---- a chunk of linear_cross_entropy ---------------------------------------------------------------------------------


def cross_entropy_chunk_(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float,
    softcap: float | None, z_loss: float, grad_scale: Tensor | None, want_grad: bool, columns: int,
) -> Tensor:  # fmt: skip
    """The losses of the rows of a matrix of logits and, in the place of these, their gradient. No autograd.

    Args:
        logits: (rows, padded), contiguous; the first ``columns`` are classes, the rest padding of any content.
        target: (rows,) of int64.
        weight: (columns,) or None.
        grad_scale: float32 (float64 for float64 logits), of one element or one for each row; None is 1.
        want_grad: whether the logits are overwritten with the gradient of ``sum(losses * grad_scale)``, 0 in the
            padding.

    Returns:
        (rows,) in float32, float64 for float64 logits; 0 for ignored rows.
    """
    options = Options(ignore_index, NONE, label_smoothing, softcap or 0.0, z_loss)
    kernels = FAMILY.kernels_for(logits)
    if kernels is not None:
        reason = unsupported(logits[:, :columns], target, weight, options, reference.loss_dtype(logits))
        if reason is None:
            weight = _wide(weight, logits)
            rest = (grad_scale, want_grad, columns)
            try:
                return kernels.cross_entropy_chunk_(logits, target, weight, ignore_index, *options[2:], *rest)
            except RuntimeError as error:
                raise _as_torch_raises(error) from None
        backends.refuse(reason)
    return _compose_chunk_(logits, target, weight, options, grad_scale, want_grad, columns)


def _compose_chunk_(
    logits: Tensor, target: Tensor, weight: Tensor | None, options: Options, grad_scale: Tensor | None, want_grad: bool,
    columns: int,
) -> Tensor:  # fmt: skip
    classes = logits[:, :columns]
    if target.device.type == "cpu":
        wrong = target[(target != options.ignore_index) & ((target < 0) | (target >= columns))]
        if wrong.numel():
            raise IndexError(f"Target {int(wrong[0])} is out of bounds.")
    scores = scores_of(classes, options.softcap)
    lse = torch.logsumexp(scores, 1)
    rows = _Rows.find(scores, target, weight, options.ignore_index, 1)
    losses = _losses(scores, lse, rows, options, 1)
    if want_grad:
        scale = lse.new_ones(()) if grad_scale is None else grad_scale.reshape(-1)
        classes.copy_(_gradient(scores, lse, rows, options, scale.expand(target.shape), 1))
        logits[:, columns:].zero_()
    return losses

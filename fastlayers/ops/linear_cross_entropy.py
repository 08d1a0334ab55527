"""linear_cross_entropy: the loss of :mod:`fastlayers.ops.head`, autograd, and the op that torch.compile sees.

If the loss is a sum over the rows, the pass that computes it computes the gradients as well, and the backward
multiplies them with the incoming gradient, in place. Without a reduction the incoming gradient is a number for each row
that the forward cannot know: the backward then goes through the chunks again. So does a second backward of the same
graph, because the first one returned the gradients.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import _reduction

from fastlayers import backends
from fastlayers.ops import dispatch, elementwise, head, reference
from fastlayers.ops.cross_entropy import MEAN, NONE, cross_entropy, cross_entropy_chunk_
from fastlayers.ops.dispatch import Needs
from fastlayers.ops.head import Gradients

#: In float16 dlogits are multiplied by the first, since the softmax of a large vocabulary is below the least normal
#: number, and the gradients come out multiplied by the second, between underflow and overflow. Powers of two: exact.
FLOAT16_DLOGITS, FLOAT16_GRADIENTS = 2.0**8, 2.0**-4


class Loss(NamedTuple):
    """The loss but for its tensors, as the reference takes it. No softcap is 0."""

    ignore_index: int
    reduction: int
    label_smoothing: float
    softcap: float
    z_loss: float
    logit_scale: float


class Rest(NamedTuple):
    """The arguments that are not tensors, for autograd. ``out`` is the dtype of the loss."""

    loss: Loss
    head: head.Rest
    out: torch.dtype


# ---- the sweep through the chunks ------------------------------------------------------------------------------------


def _sweep_rows(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor, weight: Tensor | None, rest: Rest,
    grad_scale: Tensor | None, alpha: float, wanted: tuple[bool, ...],
) -> tuple[Tensor, Gradients]:  # fmt: skip
    """The loss of each row, and the wanted gradients of ``alpha * sum(losses * grad_scale)``."""
    loss, classes, columns = rest.loss, target.reshape(-1).contiguous(), linear_weight.shape[0]
    wide = torch.promote_types(rest.head.compute, torch.float32)
    losses = torch.empty(classes.shape[0], dtype=wide, device=input.device)
    options = (loss.ignore_index, loss.label_smoothing, loss.softcap or None, loss.z_loss)

    def chunk(logits: Tensor, start: int, end: int) -> None:
        each = grad_scale is not None and grad_scale.numel() > 1
        factor = grad_scale[start:end] if each else grad_scale  # type: ignore[index]
        losses[start:end] = cross_entropy_chunk_(
            logits, classes[start:end], weight, *options, factor, any(wanted), columns
        )

    return losses, head.sweep(input, linear_weight, linear_bias, rest.head, chunk, alpha, wanted)


def sweep(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor, weight: Tensor | None, rest: Rest,
    grad_scale: Tensor | None, alpha: float, wanted: tuple[bool, ...],
) -> tuple[Tensor, Gradients]:  # fmt: skip
    """The loss of each row, and the wanted gradients of ``alpha * sum(losses * grad_scale)``."""
    labelled = head.labelled(target, rest.loss.ignore_index, linear_weight.shape[0])
    if labelled is None:
        return _sweep_rows(input, linear_weight, linear_bias, target, weight, rest, grad_scale, alpha, wanted)
    if grad_scale is not None and grad_scale.numel() > 1:
        grad_scale = grad_scale[labelled]
    rows = input.detach().reshape(-1, input.shape[-1])
    some = (rows[labelled], linear_weight, linear_bias, target.reshape(-1)[labelled], weight)
    losses, found = _sweep_rows(*some, rest, grad_scale, alpha, wanted)
    dh = found.input
    if dh is not None:
        dh = torch.zeros_like(rows).index_copy_(0, labelled, dh).view(input.shape)
    return losses.new_zeros(target.numel()).index_copy_(0, labelled, losses), found._replace(input=dh)


def _denominator(target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """What the mean divides by, still on its device: the weights of the classes that take part, or their number."""
    kept = target != ignore_index
    if weight is None:
        return kept.sum().to(dtype)
    return torch.where(kept, weight[torch.where(kept, target, 0)].to(dtype), 0.0).sum()


def evaluate(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor, weight: Tensor | None, rest: Rest,
    wanted: tuple[bool, ...],
) -> tuple[Tensor, Tensor | None, Gradients]:  # fmt: skip
    """The loss, gradients of it, and what is left to multiply these with besides the incoming gradient."""
    reduction = rest.loss.reduction
    wide = torch.promote_types(rest.head.compute, torch.float32)
    denominator, factor = None, None
    if reduction == MEAN:
        denominator = _denominator(target, weight, rest.loss.ignore_index, wide)
        # Where all rows are ignored the loss is NaN, and the gradients are 0 as torch's.
        kept = (target != rest.loss.ignore_index).any()
        factor = torch.where(kept, denominator.reciprocal(), 0.0)
    left, alpha = None, 1.0
    if any(wanted) and rest.head.compute is torch.float16:
        # In float16 neither the softmax nor a quotient by thousands of rows is a normal number. The incoming gradient,
        # which a GradScaler scales, comes too late.
        largest = torch.ones((), dtype=wide, device=target.device) if weight is None else weight.abs().max()
        left = (largest.to(wide) if factor is None else largest * factor) / FLOAT16_GRADIENTS
        factor, alpha = FLOAT16_DLOGITS / largest.to(wide), FLOAT16_GRADIENTS / FLOAT16_DLOGITS
    tensors = (input, linear_weight, linear_bias, target, weight)
    device = input.device.type
    with torch.no_grad(), nullcontext() if rest.head.low is None else torch.autocast(device, enabled=False):
        losses, gradients = sweep(*tensors, rest, factor, alpha, wanted)
    if reduction == NONE:
        return losses.view(target.shape).to(rest.out), left, gradients
    total = losses.sum()
    return (total if denominator is None else total / denominator).to(rest.out), left, gradients


def _scale_(gradient: Tensor | None, factor: Tensor) -> Tensor | None:
    """In place: no one else holds the gradient."""
    if gradient is None:
        return None
    kernels = elementwise.FAMILY.kernels_for(gradient) if gradient.is_cuda else None
    if kernels is not None and gradient.numel() > 0:
        kernels.scale_(gradient, factor.to(torch.promote_types(gradient.dtype, torch.float32)))
        return gradient
    if factor.dtype is gradient.dtype:
        return gradient.mul_(factor)
    # With one dimension the factor is not rounded to the gradient's dtype before it is multiplied with.
    return torch.mul(gradient, factor.view(1), out=gradient)


# ---- autograd --------------------------------------------------------------------------------------------------------


class _LinearCrossEntropy(torch.autograd.Function):
    """Keeps references to its inputs, and the gradients of a summed loss, which the first backward returns."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor,
        weight: Tensor | None, rest: Rest,
    ) -> Tensor:  # fmt: skip
        wanted = ctx.needs_input_grad[:3] if rest.loss.reduction != NONE else (False, False, False)
        tensors = (input, linear_weight, linear_bias, target, weight)
        loss, left, gradients = evaluate(*tensors, rest, wanted)
        ctx.save_for_backward(*tensors, left, *gradients)
        ctx.rest, ctx.returned = rest, False
        return loss

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        input, linear_weight, linear_bias, target, weight, left, *ready = ctx.saved_tensors
        tensors, rest, wanted = (input, linear_weight, linear_bias, target, weight), ctx.rest, ctx.needs_input_grad[:3]
        if dispatch.needs_double_backward(dy):
            found = _decomposed_backward(dy, *tensors, rest, wanted)
        elif rest.loss.reduction == NONE:
            found = _gradients_of_rows(dy, *tensors, rest, wanted)
        else:
            if ctx.returned:
                _, left, gradients = evaluate(*tensors, rest, wanted)
            else:
                # Without the version counter: to autograd what it saved for a second backward stays as it was.
                gradients = Gradients(*(g if g is None else g.data for g in ready))
                ctx.returned = True
            factor = dy if left is None else dy * left
            found = Gradients(*(_scale_(g, factor) for g in gradients))
        return *found, None, None, None


def _gradients_of_rows(
    dy: Tensor, input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor, weight: Tensor | None,
    rest: Rest, wanted: tuple[bool, ...],
) -> Gradients:  # fmt: skip
    """The backward without a reduction: once more through the chunks."""
    scale = dy.detach().reshape(-1).to(torch.promote_types(rest.head.compute, torch.float32)).contiguous()
    with torch.no_grad(), torch.autocast(input.device.type, enabled=False):
        return sweep(input, linear_weight, linear_bias, target, weight, rest, scale, 1.0, wanted)[1]


def _decomposed_backward(
    dy: Tensor, input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor, weight: Tensor | None,
    rest: Rest, wanted: tuple[bool, ...],
) -> Gradients:  # fmt: skip
    """The backward in torch ops, with whole logits, for second derivatives."""

    def compose(input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None) -> Tensor:
        return reference.linear_cross_entropy(input, linear_weight, linear_bias, target, weight, *rest.loss)

    with torch.autocast(input.device.type, rest.head.low, enabled=rest.head.low is not None):
        return Gradients(*dispatch.differentiate(compose, (input, linear_weight, linear_bias), wanted, dy))


# ---- which calls -----------------------------------------------------------------------------------------------------


def unsupported(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor, weight: Tensor | None, rest: Rest
) -> str | None:
    """Why a call cannot be chunked, None where it can."""
    reason = head.unsupported(input, linear_weight, linear_bias, target, weight, rest.head)
    if reason is None and not 0.0 <= rest.loss.label_smoothing <= 1.0:
        return f"label_smoothing is {rest.loss.label_smoothing}"
    return reason


def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, weight: Tensor | None,
    ignore_index: int, reduction: str, label_smoothing: float, softcap: float | None, z_loss: float, logit_scale: float,
    chunk_size: int | None,
) -> Tensor:  # fmt: skip
    head.check("linear_cross_entropy", input, linear_weight, target, softcap, logit_scale, chunk_size)
    code = _reduction.get_enum(reduction)
    loss = Loss(ignore_index, code, label_smoothing, softcap or 0.0, z_loss, logit_scale)
    if torch.compiler.is_compiling():
        return _linear_cross_entropy_compiling(input, linear_weight, linear_bias, target, weight, loss, chunk_size)
    forced = backends.get_backend()
    if forced not in ("eager", "compile"):
        if dispatch.must_decompose():
            backends.refuse("a functorch transform, forward-mode AD or jit trace is active, and needs torch ops")
        elif not dispatch.is_plain(input):
            if not dispatch.is_dtensor(input):  # the rules for these come with the reference
                backends.refuse(f"it takes plain tensors, and input is a {type(input).__name__}")
        elif forced is not None or chunk_size is not None or head.is_large(input, linear_weight):
            rest = _rest(input, loss, head.autocast_dtype(input), chunk_size)
            reason = unsupported(input, linear_weight, linear_bias, target, weight, rest)
            if reason is None:
                if dispatch.wants_gradient(input, linear_weight, linear_bias):
                    return _LinearCrossEntropy.apply(input, linear_weight, linear_bias, target, weight, rest)
                return evaluate(input, linear_weight, linear_bias, target, weight, rest, (False, False, False))[0]
            backends.refuse(reason)
    given = (input, linear_weight, linear_bias, target, weight, *loss)
    if forced is None:  # the loss of logits may still have a kernel
        return dispatch.call_reference(reference.linear_cross_entropy, *given, _loss_of_logits)
    return dispatch.call_reference(reference.linear_cross_entropy, *given)


def _loss_of_logits(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: int, label_smoothing: float,
    softcap: float, z_loss: float,
) -> Tensor:  # fmt: skip
    named = reference.REDUCTIONS[reduction]
    return cross_entropy(
        logits, target, weight, ignore_index, named, label_smoothing, softcap or None, z_loss, inplace=False
    )


def _rest(input: Tensor, loss: Loss, low: torch.dtype | None, chunk_size: int | None) -> Rest:
    compute = head.cast(input.dtype, low)
    out = torch.float32 if low is not None and compute in reference.LOW_PRECISION else compute
    return Rest(loss, head.Rest(compute, low, loss.logit_scale, chunk_size), out)


# ---- torch.compile ---------------------------------------------------------------------------------------------------
# A compiled graph keeps the chunks, as one op with a fake implementation: Inductor would have the logits whole. Its
# backward multiplies out of place, which Inductor may undo.


def _run_chunks(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor, weight: Tensor | None,
    ignore_index: int, reduction: int, label_smoothing: float, softcap: float, z_loss: float, logit_scale: float,
    low: torch.dtype | None, chunk_size: int | None, for_input: bool, for_weight: bool, for_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The loss, what is left to multiply the gradients with, and these; empty where there is none."""
    loss = Loss(ignore_index, reduction, label_smoothing, softcap, z_loss, logit_scale)
    wanted = (for_input, for_weight, for_bias) if reduction != NONE else (False, False, False)
    rest = _rest(input, loss, low, chunk_size)
    found, left, gradients = evaluate(input, linear_weight, linear_bias, target, weight, rest, wanted)
    left, dh, dw, db = (input.new_empty(0) if t is None else t for t in (left, *gradients))
    return found, left, dh, dw, db


def _describe_chunks(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor, weight: Tensor | None,
    ignore_index: int, reduction: int, label_smoothing: float, softcap: float, z_loss: float, logit_scale: float,
    low: torch.dtype | None, chunk_size: int | None, for_input: bool, for_weight: bool, for_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    rest = _rest(input, Loss(0, reduction, 0.0, 0.0, 0.0, 1.0), low, chunk_size)
    found = input.new_empty(target.shape if reduction == NONE else (), dtype=rest.out)
    wanted = (for_input, for_weight, for_bias)
    made, scaled = reduction != NONE, rest.head.compute is torch.float16 and any(wanted)
    left = input.new_empty((), dtype=torch.float32) if made and scaled else input.new_empty(0)
    return (
        found,
        left,
        *head.describe_gradients((input, linear_weight, linear_bias), wanted if made else (False, False, False)),
    )


def _run_chunks_again(
    dy: Tensor, input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor, weight: Tensor | None,
    ignore_index: int, label_smoothing: float, softcap: float, z_loss: float, logit_scale: float,
    low: torch.dtype | None, chunk_size: int | None, for_input: bool, for_weight: bool, for_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of a loss without a reduction; empty where one is not needed."""
    loss = Loss(ignore_index, NONE, label_smoothing, softcap, z_loss, logit_scale)
    rest = _rest(input, loss, low, chunk_size)
    wanted = (for_input, for_weight, for_bias)
    gradients = _gradients_of_rows(dy, input, linear_weight, linear_bias, target, weight, rest, wanted)
    dh, dw, db = (input.new_empty(0) if t is None else t for t in gradients)
    return dh, dw, db


def _describe_chunks_again(
    dy: Tensor, input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor, weight: Tensor | None,
    ignore_index: int, label_smoothing: float, softcap: float, z_loss: float, logit_scale: float,
    low: torch.dtype | None, chunk_size: int | None, for_input: bool, for_weight: bool, for_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return head.describe_gradients((input, linear_weight, linear_bias), (for_input, for_weight, for_bias))


_forward_op = dispatch.opaque("fastlayers::linear_cross_entropy_forward", _run_chunks, _describe_chunks)
_backward_op = dispatch.opaque("fastlayers::linear_cross_entropy_backward", _run_chunks_again, _describe_chunks_again)


class LinearCrossEntropyInGraph(dispatch.Pair, inputs=3):
    """Keeps its inputs, and the gradients of a summed loss, which backward multiplies with the incoming one."""

    @staticmethod
    def forward(
        kernels: None, needs: Needs, input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor,
        weight: Tensor | None, ignore_index: int, reduction: int, label_smoothing: float, softcap: float,
        z_loss: float, logit_scale: float, low: torch.dtype | None, chunk_size: int | None,
    ) -> Any:  # fmt: skip
        tensors = (input, linear_weight, linear_bias, target, weight)
        loss = Loss(ignore_index, reduction, label_smoothing, softcap, z_loss, logit_scale)
        found, *ready = _forward_op(*tensors, *loss, low, chunk_size, *(needs or (False, False, False)))
        return found, (*tensors, *ready), (loss, low, chunk_size)

    @staticmethod
    def backward(kernels: None, needs: Needs, dy: Tensor, *args: Any) -> tuple[Tensor | None, ...]:
        *tensors, left, dh, dw, db, loss, low, chunk_size = args
        if loss.reduction == NONE:
            found = _backward_op(dy, *tensors, loss.ignore_index, *loss[2:], low, chunk_size, *needs)
        else:
            factor = dy * left if left.dim() == 0 else dy
            found = [_scaled(g, factor) if needed else g for g, needed in zip((dh, dw, db), needs, strict=True)]
        return tuple(found)

    @staticmethod
    def differentiable_backward(needs: Needs, *args: Any) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            "fastlayers::linear_cross_entropy has no second derivative, which create_graph=True asks for; outside of"
            " torch.compile functional.linear_cross_entropy has one"
        )


def _scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    return gradient * factor if factor.dtype is gradient.dtype else (gradient * factor.view(1)).to(gradient.dtype)


_in_graph = dispatch.graph_op_of(LinearCrossEntropyInGraph, "linear_cross_entropy")


def _linear_cross_entropy_compiling(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor, weight: Tensor | None, loss: Loss,
    chunk_size: int | None,
) -> Tensor:  # fmt: skip
    if input.is_cuda:
        keeps = dispatch.graph_keeps_kernel(input)
    else:
        keeps = not torch.compiler._is_exporting_flag and backends.get_backend() is None
    if keeps and (chunk_size is not None or head.is_large(input, linear_weight)):
        low = head.autocast_dtype(input)
        rest = _rest(input, loss, low, chunk_size)
        if unsupported(input, linear_weight, linear_bias, target, weight, rest) is None:
            return _in_graph(input, linear_weight, linear_bias, target, weight, *loss, low, chunk_size)
    return reference.linear_cross_entropy(input, linear_weight, linear_bias, target, weight, *loss)

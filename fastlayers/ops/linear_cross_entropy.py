"""linear_cross_entropy: the loss of :mod:`fastlayers.ops.head`, autograd, and the op that torch.compile sees.

If the loss is a sum over the rows, the pass that computes it computes the gradients as well, and the backward
multiplies them with the incoming gradient, in place. Without a reduction the incoming gradient is a number for each row
that the forward cannot know: the backward then goes through the chunks again. So does a second backward of the same
graph, because the first one returned the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import _reduction

from fastlayers import backends
from fastlayers.ops import dispatch, elementwise, head, reference
from fastlayers.ops.cross_entropy import MEAN, NONE, cross_entropy, cross_entropy_chunk_
from fastlayers.ops.dispatch import Needs
from fastlayers.ops.head import LEAVES, FlatGradients, Gradients, Leaves, LowRank
from fastlayers.ops.quantized import Quantized

#: In float16 dlogits are multiplied by the first, since the softmax of a large vocabulary is below the least normal
#: number, and the gradients come out multiplied by the second, between underflow and overflow. Powers of two: exact.
FLOAT16_DLOGITS, FLOAT16_GRADIENTS = 2.0**8, 2.0**-4


#: None of the leaves wants a gradient.
NOTHING = (False,) * LEAVES


class Loss(NamedTuple):
    """The loss but for its tensors, as the reference takes it. No softcap is 0."""

    ignore_index: int
    reduction: int
    label_smoothing: float
    softcap: float
    z_loss: float
    logit_scale: float


#: What the op of the forward gives: the loss, what is left to multiply the gradients with, and these.
Chunked: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


class Rest(NamedTuple):
    """The arguments that are not tensors, for autograd.

    Attributes:
        out: dtype of the loss.
        quantized: a quantised linear_weight, in the place of a tensor.
    """

    loss: Loss
    head: head.Rest
    out: torch.dtype
    quantized: Quantized | None = None


# ---- the sweep through the chunks ------------------------------------------------------------------------------------


def _sweep_rows(
    leaves: Leaves, target: Tensor, weight: Tensor | None, rest: Rest, grad_scale: Tensor | None, alpha: float,
    wanted: Needs,
) -> tuple[Tensor, Gradients]:  # fmt: skip
    """The loss of each row, and the wanted gradients of ``alpha * sum(losses * grad_scale)``."""
    loss, classes, columns = rest.loss, target.reshape(-1).contiguous(), leaves.linear_weight.shape[0]
    wide = torch.promote_types(rest.head.compute, torch.float32)
    losses = torch.empty(classes.shape[0], dtype=wide, device=target.device)
    options = (loss.ignore_index, loss.label_smoothing, loss.softcap or None, loss.z_loss)

    def chunk(logits: Tensor, start: int, end: int) -> None:
        each = grad_scale is not None and grad_scale.numel() > 1
        factor = grad_scale[start:end] if each else grad_scale  # type: ignore[index]
        losses[start:end] = cross_entropy_chunk_(
            logits, classes[start:end], weight, *options, factor, any(wanted), columns
        )

    return losses, head.sweep(*leaves[:3], rest.head, chunk, alpha, wanted, leaves.low_rank)


def sweep(
    leaves: Leaves, target: Tensor, weight: Tensor | None, rest: Rest, grad_scale: Tensor | None, alpha: float,
    wanted: Needs,
) -> tuple[Tensor, Gradients]:  # fmt: skip
    """The loss of each row, and the wanted gradients of ``alpha * sum(losses * grad_scale)``."""
    labelled = head.labelled(target, rest.loss.ignore_index, leaves.linear_weight.shape[0])
    if labelled is None:
        return _sweep_rows(leaves, target, weight, rest, grad_scale, alpha, wanted)
    if grad_scale is not None and grad_scale.numel() > 1:
        grad_scale = grad_scale[labelled]
    some = (leaves.rows(labelled), target.reshape(-1)[labelled], weight)
    losses, found = _sweep_rows(*some, rest, grad_scale, alpha, wanted)
    return losses.new_zeros(target.numel()).index_copy_(0, labelled, losses), found.of_all_rows(labelled, leaves)


def _denominator(target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """What the mean divides by, still on its device: the weights of the classes that take part, or their number."""
    kept = target != ignore_index
    if weight is None:
        return kept.sum().to(dtype)
    return torch.where(kept, weight[torch.where(kept, target, 0)].to(dtype), 0.0).sum()


def evaluate(
    leaves: Leaves, target: Tensor, weight: Tensor | None, rest: Rest, wanted: Needs
) -> tuple[Tensor, Tensor | None, Gradients]:
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
    device = target.device.type
    with torch.no_grad(), nullcontext() if rest.head.low is None else torch.autocast(device, enabled=False):
        losses, gradients = sweep(leaves, target, weight, rest, factor, alpha, wanted)
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
        ctx: Any, input: Tensor, linear_weight: Tensor | None, linear_bias: Tensor | None,
        low_rank_input: Tensor | None, low_rank_weight: Tensor | None, target: Tensor, weight: Tensor | None,
        rest: Rest,
    ) -> Tensor:  # fmt: skip
        tensors = (input, linear_weight, linear_bias, low_rank_input, low_rank_weight)
        wanted = ctx.needs_input_grad[:LEAVES] if rest.loss.reduction != NONE else NOTHING
        loss, left, gradients = evaluate(Leaves.kept(rest.quantized, *tensors), target, weight, rest, wanted)
        ctx.save_for_backward(*tensors, target, weight, left, *gradients)
        ctx.rest, ctx.returned = rest, False
        return loss

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        rest, wanted = ctx.rest, ctx.needs_input_grad[:LEAVES]
        leaves, (target, weight, left, *ready) = Leaves.kept(rest.quantized, *saved[:LEAVES]), saved[LEAVES:]
        if dispatch.needs_double_backward(dy):
            found = _decomposed_backward(dy, leaves, target, weight, rest, wanted)
        elif rest.loss.reduction == NONE:
            found = _gradients_of_rows(dy, leaves, target, weight, rest, wanted)
        else:
            if ctx.returned:
                _, left, gradients = evaluate(leaves, target, weight, rest, wanted)
            else:
                # Without the version counter: to autograd what it saved for a second backward stays as it was.
                gradients = Gradients(*(g if g is None else g.data for g in ready))
                ctx.returned = True
            factor = dy if left is None else dy * left
            found = Gradients(*(_scale_(g, factor) for g in gradients))
        return *found, None, None, None


def _gradients_of_rows(
    dy: Tensor, leaves: Leaves, target: Tensor, weight: Tensor | None, rest: Rest, wanted: Needs
) -> Gradients:
    """The backward without a reduction: once more through the chunks."""
    scale = dy.detach().reshape(-1).to(torch.promote_types(rest.head.compute, torch.float32)).contiguous()
    with torch.no_grad(), torch.autocast(target.device.type, enabled=False):
        return sweep(leaves, target, weight, rest, scale, 1.0, wanted)[1]


def _decomposed_backward(
    dy: Tensor, leaves: Leaves, target: Tensor, weight: Tensor | None, rest: Rest, wanted: Needs
) -> Gradients:
    """The backward in torch ops, with whole logits, for second derivatives."""

    def compose(*tensors: Any) -> Tensor:
        given = Leaves.kept(rest.quantized, *tensors)
        return reference.linear_cross_entropy(*given.dequantized(), target, weight, *rest.loss, given.low_rank)  # type: ignore[arg-type]

    with torch.autocast(target.device.type, rest.head.low, enabled=rest.head.low is not None):
        return Gradients(*dispatch.differentiate(compose, leaves.tensors, wanted, dy))


# ---- which calls -----------------------------------------------------------------------------------------------------


def unsupported(leaves: Leaves, target: Tensor, weight: Tensor | None, rest: Rest) -> str | None:
    """Why a call cannot be chunked, None where it can."""
    reason = head.unsupported(*leaves[:3], target, weight, rest.head, leaves.low_rank)
    if reason is None and not 0.0 <= rest.loss.label_smoothing <= 1.0:
        return f"label_smoothing is {rest.loss.label_smoothing}"
    return reason


def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, weight: Tensor | None,
    ignore_index: int, reduction: str, label_smoothing: float, softcap: float | None, z_loss: float, logit_scale: float,
    low_rank: LowRank | None, chunk_size: int | None,
) -> Tensor:  # fmt: skip
    head.check("linear_cross_entropy", input, linear_weight, target, softcap, logit_scale, chunk_size, low_rank)
    code = _reduction.get_enum(reduction)
    loss = Loss(ignore_index, code, label_smoothing, softcap or 0.0, z_loss, logit_scale)
    leaves = Leaves.of_call(input, linear_weight, linear_bias, low_rank)
    if torch.compiler.is_compiling():
        return _linear_cross_entropy_compiling(
            Leaves.of(*leaves.dequantized(), low_rank), target, weight, loss, chunk_size
        )
    forced = backends.get_backend()
    if forced not in ("eager", "compile"):
        if dispatch.must_decompose():
            backends.refuse("a functorch transform, forward-mode AD or jit trace is active, and needs torch ops")
        elif not dispatch.is_plain(input):
            if not dispatch.is_dtensor(input):  # the rules for these come with the reference
                backends.refuse(f"it takes plain tensors, and input is a {type(input).__name__}")
        elif forced is not None or chunk_size is not None or head.is_large(input, leaves.linear_weight):
            rest = _rest(input, loss, head.autocast_dtype(input), chunk_size)
            reason = unsupported(leaves, target, weight, rest)
            if reason is None:
                if dispatch.wants_gradient(*leaves.tensors):
                    rest = rest._replace(quantized=leaves.quantized)
                    return _LinearCrossEntropy.apply(*leaves.tensors, target, weight, rest)
                return evaluate(leaves, target, weight, rest, NOTHING)[0]
            backends.refuse(reason)
    given = (*leaves.dequantized(), target, weight, *loss, leaves.low_rank)
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
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, low_rank_input: Tensor | None,
    low_rank_weight: Tensor | None, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: int,
    label_smoothing: float, softcap: float, z_loss: float, logit_scale: float, low: torch.dtype | None,
    chunk_size: int | None, wanted: Sequence[bool],
) -> Chunked:  # fmt: skip
    """The loss, what is left to multiply the gradients with, and these; empty where there is none."""
    loss = Loss(ignore_index, reduction, label_smoothing, softcap, z_loss, logit_scale)
    leaves = Leaves(input, linear_weight, linear_bias, low_rank_input, low_rank_weight)
    rest, wanted = _rest(input, loss, low, chunk_size), tuple(wanted) if reduction != NONE else NOTHING
    found, left, gradients = evaluate(leaves, target, weight, rest, wanted)
    return found, input.new_empty(0) if left is None else left, *head.flatten_gradients(gradients, input)


def _describe_chunks(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, low_rank_input: Tensor | None,
    low_rank_weight: Tensor | None, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: int,
    label_smoothing: float, softcap: float, z_loss: float, logit_scale: float, low: torch.dtype | None,
    chunk_size: int | None, wanted: Sequence[bool],
) -> Chunked:  # fmt: skip
    rest = _rest(input, Loss(0, reduction, 0.0, 0.0, 0.0, 1.0), low, chunk_size)
    leaves = Leaves(input, linear_weight, linear_bias, low_rank_input, low_rank_weight)
    found = input.new_empty(target.shape if reduction == NONE else (), dtype=rest.out)
    made, scaled = reduction != NONE, rest.head.compute is torch.float16 and any(wanted)
    left = input.new_empty((), dtype=torch.float32) if made and scaled else input.new_empty(0)
    return found, left, *head.describe_gradients(leaves, tuple(wanted) if made else NOTHING)


def _run_chunks_again(
    dy: Tensor, input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, low_rank_input: Tensor | None,
    low_rank_weight: Tensor | None, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float,
    softcap: float, z_loss: float, logit_scale: float, low: torch.dtype | None, chunk_size: int | None,
    wanted: Sequence[bool],
) -> FlatGradients:  # fmt: skip
    """The gradients of a loss without a reduction; empty where one is not needed."""
    loss = Loss(ignore_index, NONE, label_smoothing, softcap, z_loss, logit_scale)
    leaves = Leaves(input, linear_weight, linear_bias, low_rank_input, low_rank_weight)
    rest = _rest(input, loss, low, chunk_size)
    return head.flatten_gradients(_gradients_of_rows(dy, leaves, target, weight, rest, tuple(wanted)), input)


def _describe_chunks_again(
    dy: Tensor, input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, low_rank_input: Tensor | None,
    low_rank_weight: Tensor | None, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float,
    softcap: float, z_loss: float, logit_scale: float, low: torch.dtype | None, chunk_size: int | None,
    wanted: Sequence[bool],
) -> FlatGradients:  # fmt: skip
    leaves = Leaves(input, linear_weight, linear_bias, low_rank_input, low_rank_weight)
    return head.describe_gradients(leaves, tuple(wanted))


_forward_op = dispatch.opaque("fastlayers::linear_cross_entropy_forward", _run_chunks, _describe_chunks)
_backward_op = dispatch.opaque("fastlayers::linear_cross_entropy_backward", _run_chunks_again, _describe_chunks_again)


class LinearCrossEntropyInGraph(dispatch.Pair, inputs=LEAVES):
    """Keeps its inputs, and the gradients of a summed loss, which backward multiplies with the incoming one."""

    @staticmethod
    def forward(
        kernels: None, needs: Needs, input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None,
        low_rank_input: Tensor | None, low_rank_weight: Tensor | None, target: Tensor, weight: Tensor | None,
        ignore_index: int, reduction: int, label_smoothing: float, softcap: float, z_loss: float, logit_scale: float,
        low: torch.dtype | None, chunk_size: int | None,
    ) -> Any:  # fmt: skip
        tensors = (input, linear_weight, linear_bias, low_rank_input, low_rank_weight, target, weight)
        loss = Loss(ignore_index, reduction, label_smoothing, softcap, z_loss, logit_scale)
        found, *ready = _forward_op(*tensors, *loss, low, chunk_size, needs or NOTHING)
        return found, (*tensors, *ready), (loss, low, chunk_size)

    @staticmethod
    def backward(kernels: None, needs: Needs, dy: Tensor, *args: Any) -> tuple[Tensor | None, ...]:
        tensors, (left, *gradients), (loss, low, chunk_size) = (
            args[: LEAVES + 2],
            args[LEAVES + 2 : -3],
            args[-3:],
        )
        if loss.reduction == NONE:
            found = _backward_op(dy, *tensors, loss.ignore_index, *loss[2:], low, chunk_size, needs)
        else:
            factor = dy * left if left.dim() == 0 else dy
            found = [_scaled(g, factor) if needed else g for g, needed in zip(gradients, needs, strict=True)]
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
    leaves: Leaves, target: Tensor, weight: Tensor | None, loss: Loss, chunk_size: int | None
) -> Tensor:
    input = leaves.input
    if input.is_cuda:
        keeps = dispatch.graph_keeps_kernel(input)
    else:
        keeps = not torch.compiler._is_exporting_flag and backends.get_backend() is None
    if keeps and (chunk_size is not None or head.is_large(input, leaves.linear_weight)):
        low = head.autocast_dtype(input)
        if unsupported(leaves, target, weight, _rest(input, loss, low, chunk_size)) is None:
            return _in_graph(*leaves, target, weight, *loss, low, chunk_size)
    return reference.linear_cross_entropy(*leaves.dequantized(), target, weight, *loss, leaves.low_rank)  # type: ignore[arg-type]

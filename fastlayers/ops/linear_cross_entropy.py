"""linear_cross_entropy: the loss of a chunk of :mod:`fastlayers.ops.head`, which calls are chunked, graphs.

:mod:`fastlayers.ops.head_loss` has the autograd Function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import _reduction

from fastlayers import backends
from fastlayers.ops import graph_ops, guard, head, head_loss, pairs, reference
from fastlayers.ops.cross_entropy import MEAN, NONE, cross_entropy, cross_entropy_chunk_
from fastlayers.ops.head import LEAVES, FlatGradients, Gradients, Leaves, LowRank
from fastlayers.ops.head_loss import NOTHING, FlatResults, Others, Rest
from fastlayers.ops.pairs import Needs


class Loss(NamedTuple):
    """The loss but for its tensors, as the reference takes it. No softcap is 0."""

    ignore_index: int
    reduction: int
    label_smoothing: float
    softcap: float
    z_loss: float
    logit_scale: float


# ---- the sweep through the chunks ------------------------------------------------------------------------------------


def sweep(
    leaves: Leaves, others: Others, rest: Rest, factor: Tensor | None, alpha: float, wanted: Needs
) -> tuple[Tensor, Gradients]:
    """The loss of each row, and the wanted gradients of ``alpha * sum(losses * factor)``."""
    (target, weight), loss, columns = others, rest.loss, leaves.linear_weight.shape[0]
    options = (loss.ignore_index, loss.label_smoothing, loss.softcap or None, loss.z_loss)

    def chunk(logits: Tensor, labels: Tensor | None, factor: Tensor | None, rows: slice | Tensor) -> Tensor:
        return cross_entropy_chunk_(logits, labels, weight, *options, factor, any(wanted), columns)  # type: ignore[arg-type]

    return head_loss.sweep(leaves, target, rest, chunk, factor, alpha, wanted)


def _denominator(target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """What the mean divides by, still on its device: the weights of the classes that take part, or their number."""
    kept = target != ignore_index
    if weight is None:
        return kept.sum().to(dtype)
    return torch.where(kept, weight[torch.where(kept, target, 0)].to(dtype), 0.0).sum()


def _evaluate(leaves: Leaves, others: Others, rest: Rest, wanted: Needs) -> tuple[Tensor, Tensor | None, Gradients]:
    (target, weight), ignore_index = others, rest.loss.ignore_index
    wide = torch.promote_types(rest.head.compute, torch.float32)
    denominator = _denominator(target, weight, ignore_index, wide) if rest.loss.reduction == MEAN else None
    scales = head_loss.Scales(None, 1.0, None)
    if any(wanted):
        factor = None
        if denominator is not None:
            # Where all rows are ignored the loss is NaN, and the gradients are 0 as torch's.
            factor = torch.where((target != ignore_index).any(), denominator.reciprocal(), 0.0)
        largest = torch.ones((), dtype=wide, device=target.device) if weight is None else weight.abs().max().to(wide)
        scales = head_loss.Scales.choose(factor, largest, rest.head.compute)
    losses, gradients = sweep(leaves, others, rest, scales.dlogits, scales.alpha, wanted)
    if not rest.summed:
        return losses.view(target.shape).to(rest.out), scales.left, gradients
    total = losses.sum()
    return (total if denominator is None else total / denominator).to(rest.out), scales.left, gradients


def _gradients_of_rows(dy: Tensor, leaves: Leaves, others: Others, rest: Rest, wanted: Needs) -> Gradients:
    """The backward without a reduction: once more through the chunks."""
    factor = dy.detach().reshape(-1).to(torch.promote_types(rest.head.compute, torch.float32)).contiguous()
    return sweep(leaves, others, rest, factor, 1.0, wanted)[1]


def _compose(leaves: Leaves, others: Others, rest: Rest) -> Tensor:
    given = (*leaves.dequantized(), *others, *rest.loss, leaves.low_rank)
    return reference.linear_cross_entropy(*given)


METHOD = head_loss.Method(_evaluate, _gradients_of_rows, _compose)


# ---- which calls -----------------------------------------------------------------------------------------------------


def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, weight: Tensor | None,
    ignore_index: int, reduction: str, label_smoothing: float, softcap: float | None, z_loss: float, logit_scale: float,
    low_rank: LowRank | None, chunk_size: int | None, acc_dtype: torch.dtype | None,
) -> Tensor:  # fmt: skip
    head.check(
        "linear_cross_entropy", input, linear_weight, target, softcap, logit_scale, chunk_size, acc_dtype, low_rank
    )
    code = _reduction.get_enum(reduction)
    loss = Loss(ignore_index, code, label_smoothing, softcap or 0.0, z_loss, logit_scale)
    leaves = Leaves.of_call(input, linear_weight, linear_bias, low_rank)
    rest = _rest(input, loss, head.autocast_dtype(input), chunk_size, acc_dtype)
    compiling = torch.compiler.is_compiling()
    # The composition raises torch's error for any other label_smoothing.
    if head.is_chunked(leaves, target, rest.head, weight) and 0.0 <= label_smoothing <= 1.0:
        if compiling:
            return _in_graph(*leaves.tensors, target, weight, *loss, *rest.head.options)  # type: ignore[no-any-return]
        return head_loss.call(METHOD, leaves, (target, weight), rest)
    given = (*leaves.dequantized(), target, weight, *loss, leaves.low_rank)
    if not compiling and backends.get_backend() is None:  # the loss of logits may still have a kernel
        return guard.call_reference(reference.linear_cross_entropy, *given, _loss_of_logits)
    return guard.call_reference(reference.linear_cross_entropy, *given)


def ignores_autocast(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, reduction: str,
    label_smoothing: float,
) -> bool:  # fmt: skip
    """Whether torch computes a call with ``options`` in chunks, in the dtype of its tensors. Of several dtypes it has
    no chunks."""
    labels = target.dtype == torch.int64
    if target.is_floating_point() and reduction != "none" and torch.__version__ >= "2.14":
        labels = target.dtype == input.dtype and not (target.requires_grad and torch.is_grad_enabled())
    alike = all(t is None or t.dtype == input.dtype for t in (linear_weight, linear_bias))
    return labels and alike and linear_weight.dim() == 2 and label_smoothing == 0 and not torch.jit.is_tracing()


def _loss_of_logits(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: int, label_smoothing: float,
    softcap: float, z_loss: float,
) -> Tensor:  # fmt: skip
    named = reference.REDUCTIONS[reduction]
    return cross_entropy(
        logits, target, weight, ignore_index, named, label_smoothing, softcap or None, z_loss, inplace=False
    )


def _rest(
    input: Tensor, loss: Loss, low: torch.dtype | None, chunk_size: int | None, acc_dtype: torch.dtype | None
) -> Rest:
    compute = head.cast(input.dtype, low)
    out = torch.float32 if low is not None and compute in reference.LOW_PRECISION else compute
    return Rest(loss, head.Rest(compute, low, loss.logit_scale, chunk_size, acc_dtype), out, loss.reduction != NONE)


# ---- torch.compile ---------------------------------------------------------------------------------------------------


def _run_chunks(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, low_rank_input: Tensor | None,
    low_rank_weight: Tensor | None, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: int,
    label_smoothing: float, softcap: float, z_loss: float, logit_scale: float, low: torch.dtype | None,
    chunk_size: int | None, acc_dtype: torch.dtype | None, wanted: Sequence[bool],
) -> FlatResults:  # fmt: skip
    loss = Loss(ignore_index, reduction, label_smoothing, softcap, z_loss, logit_scale)
    leaves = Leaves(input, linear_weight, linear_bias, low_rank_input, low_rank_weight)
    return head_loss.run(METHOD, leaves, (target, weight), _rest(input, loss, low, chunk_size, acc_dtype), wanted)


def _describe_chunks(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, low_rank_input: Tensor | None,
    low_rank_weight: Tensor | None, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: int,
    label_smoothing: float, softcap: float, z_loss: float, logit_scale: float, low: torch.dtype | None,
    chunk_size: int | None, acc_dtype: torch.dtype | None, wanted: Sequence[bool],
) -> FlatResults:  # fmt: skip
    rest = _rest(input, Loss(0, reduction, 0.0, 0.0, 0.0, 1.0), low, chunk_size, acc_dtype)
    leaves = Leaves(input, linear_weight, linear_bias, low_rank_input, low_rank_weight)
    return head_loss.describe(() if rest.summed else target.shape, leaves, rest, wanted)


def _run_chunks_again(
    dy: Tensor, input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, low_rank_input: Tensor | None,
    low_rank_weight: Tensor | None, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float,
    softcap: float, z_loss: float, logit_scale: float, low: torch.dtype | None, chunk_size: int | None,
    acc_dtype: torch.dtype | None, wanted: Sequence[bool],
) -> FlatGradients:  # fmt: skip
    loss = Loss(ignore_index, NONE, label_smoothing, softcap, z_loss, logit_scale)
    leaves = Leaves(input, linear_weight, linear_bias, low_rank_input, low_rank_weight)
    return head_loss.run_again(
        METHOD, dy, leaves, (target, weight), _rest(input, loss, low, chunk_size, acc_dtype), wanted
    )


def _describe_chunks_again(
    dy: Tensor, input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, low_rank_input: Tensor | None,
    low_rank_weight: Tensor | None, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float,
    softcap: float, z_loss: float, logit_scale: float, low: torch.dtype | None, chunk_size: int | None,
    acc_dtype: torch.dtype | None, wanted: Sequence[bool],
) -> FlatGradients:  # fmt: skip
    leaves = Leaves(input, linear_weight, linear_bias, low_rank_input, low_rank_weight)
    return head.describe_gradients(leaves, tuple(wanted))


_forward_op = graph_ops.opaque("fastlayers::linear_cross_entropy_forward", _run_chunks, _describe_chunks)
_backward_op = graph_ops.opaque("fastlayers::linear_cross_entropy_backward", _run_chunks_again, _describe_chunks_again)


class LinearCrossEntropyInGraph(pairs.Pair, inputs=LEAVES):
    """Keeps its inputs, and the gradients of a summed loss, which backward multiplies with the incoming one."""

    @staticmethod
    def raw_forward(
        kernels: None, needs: Needs, input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None,
        low_rank_input: Tensor | None, low_rank_weight: Tensor | None, target: Tensor, weight: Tensor | None,
        ignore_index: int, reduction: int, label_smoothing: float, softcap: float, z_loss: float, logit_scale: float,
        low: torch.dtype | None, chunk_size: int | None, acc_dtype: torch.dtype | None,
    ) -> Any:  # fmt: skip
        tensors = (input, linear_weight, linear_bias, low_rank_input, low_rank_weight, target, weight)
        loss = Loss(ignore_index, reduction, label_smoothing, softcap, z_loss, logit_scale)
        found, *ready = _forward_op(*tensors, *loss, low, chunk_size, acc_dtype, needs or NOTHING)
        return found, (*tensors, *ready), (loss, low, chunk_size, acc_dtype)

    @staticmethod
    def raw_backward(kernels: None, needs: Needs, dy: Tensor, *args: Any) -> tuple[Tensor | None, ...]:
        tensors, (left, *gradients), (loss, *rest) = args[: LEAVES + 2], args[LEAVES + 2 : -4], args[-4:]
        if loss.reduction != NONE:
            return head_loss.scaled(dy, left, gradients, needs)
        return _backward_op(dy, *tensors, loss.ignore_index, *loss[2:], *rest, needs)  # type: ignore[no-any-return]

    @staticmethod
    def differentiable_backward(needs: Needs, *args: Any) -> tuple[Tensor | None, ...]:
        raise head_loss.no_second_derivative("linear_cross_entropy")


_in_graph = graph_ops.graph_op_of(LinearCrossEntropyInGraph, "linear_cross_entropy")

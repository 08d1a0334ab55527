"""The largest logits of a head with their classes, and the share of rows whose label has the largest one.

For the scores z of a row, softcap·tanh(logits/softcap) or the logits

    values, indices = topk(z)        of log-probabilities topk(z - lse)
    accuracy = sum of [argmax(z) = t] over the rows with a label t, divided by their number

Only the gradient of values exists. A call that needs it has the logits whole.
"""

from __future__ import annotations

import torch
import torch.return_types
from torch import Tensor

from fastlayers import backends
from fastlayers.ops import graph_ops, guard, head, reference
from fastlayers.ops.cross_entropy import scores_of
from fastlayers.ops.head import Leaves, LowRank

#: The largest k of the kernel, which replaces up to k scores a tile one by one. 896 rows of 131072 in bfloat16 took it
#: 162 us for k = 1, 241 for 8 and 857 for 64, and torch.topk 970 to 990. Ascending rows, its worst case, took it 325,
#: 1124 and 8620 (H100).
KERNEL_MOST = 16


# ---- a chunk ---------------------------------------------------------------------------------------------------------


def _chunk(logits: Tensor, k: int, softcap: float, log_prob: bool, columns: int) -> tuple[Tensor, Tensor]:
    """The values, in logits' dtype or wider, and the indices."""
    if (
        backends.generates_kernels(logits.device)
        and k <= KERNEL_MOST
        and logits.dtype is not torch.float64  # 64 bits of a score leave none for its column
    ):
        from fastlayers.kernels import topk

        return topk.topk_chunk(logits, k, softcap, log_prob, columns)
    logits = logits[:, :columns]
    return _largest(scores_of(logits, softcap) if softcap or log_prob else logits, k, log_prob)


def _largest(scores: Tensor, k: int, log_prob: bool) -> tuple[Tensor, Tensor]:
    # Of equal scores, max gives the first.
    values, indices = scores.max(-1, keepdim=True) if k == 1 else scores.topk(k)
    if log_prob:
        base = values[..., :1]
        values = (values - base) - (scores - base).exp().sum(-1, keepdim=True).log()
    return values, indices


# ---- all rows --------------------------------------------------------------------------------------------------------


def _rest(input: Tensor, logit_scale: float, low: torch.dtype | None, chunk_size: int | None) -> head.Rest:
    return head.Rest(head.cast(input.dtype, low), low, logit_scale, chunk_size)


def _dtype(rest: head.Rest, log_prob: bool) -> torch.dtype:
    return torch.promote_types(rest.compute, torch.float32) if log_prob else rest.compute


def _find(
    leaves: Leaves, k: int, softcap: float, log_prob: bool, rest: head.Rest, bases: Tensor | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The values and the indices. ``bases`` (rows, 1) becomes the largest score of each row."""
    columns = leaves.linear_weight.shape[0]
    rows = leaves.input.detach().reshape(-1, leaves.input.shape[-1])
    values = rows.new_empty((rows.shape[0], k), dtype=_dtype(rest, log_prob))
    indices = torch.empty_like(values, dtype=torch.int64)

    def chunk(logits: Tensor, start: int, end: int) -> None:
        values[start:end], indices[start:end] = _chunk(logits, k, softcap, log_prob, columns)
        if bases is not None:
            bases[start:end] = scores_of(logits.gather(1, indices[start:end, :1]), softcap)

    with torch.no_grad(), torch.autocast(rows.device.type, enabled=False):
        head.sweep(rows, *leaves[1:3], rest, chunk, 1.0, (False, False, False), leaves.low_rank)
    shape = (*leaves.input.shape[:-1], k)
    return values.view(shape), indices.view(shape)


def _run(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, low_rank_input: Tensor | None,
    low_rank_weight: Tensor | None, k: int, softcap: float, logit_scale: float, log_prob: bool,
    low: torch.dtype | None, chunk_size: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    leaves = Leaves(input, linear_weight, linear_bias, low_rank_input, low_rank_weight)
    return _find(leaves, k, softcap, log_prob, _rest(input, logit_scale, low, chunk_size))


def _run_accuracy(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, low_rank_input: Tensor | None,
    low_rank_weight: Tensor | None, target: Tensor, ignore_index: int, low: torch.dtype | None,
    chunk_size: int | None,
) -> Tensor:  # fmt: skip
    leaves = Leaves(input, linear_weight, linear_bias, low_rank_input, low_rank_weight)
    classes = target.reshape(-1)
    kept = head.labelled(classes, ignore_index, linear_weight.shape[0])
    if kept is not None:
        leaves, classes = leaves.rows(kept), classes[kept]
    _, indices = _find(leaves, 1, 0.0, False, _rest(input, 1.0, low, chunk_size))
    return reference.accuracy(indices.reshape(-1), classes, ignore_index)


# ---- graphs ----------------------------------------------------------------------------------------------------------


def _describe(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, low_rank_input: Tensor | None,
    low_rank_weight: Tensor | None, k: int, softcap: float, logit_scale: float, log_prob: bool,
    low: torch.dtype | None, chunk_size: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    shape, rest = (*input.shape[:-1], k), _rest(input, logit_scale, low, chunk_size)
    return input.new_empty(shape, dtype=_dtype(rest, log_prob)), input.new_empty(shape, dtype=torch.int64)


def _describe_accuracy(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, low_rank_input: Tensor | None,
    low_rank_weight: Tensor | None, target: Tensor, ignore_index: int, low: torch.dtype | None,
    chunk_size: int | None,
) -> Tensor:  # fmt: skip
    return input.new_empty((), dtype=torch.float32)


_in_graph = graph_ops.opaque("fastlayers::linear_topk", _run, _describe)
_accuracy_in_graph = graph_ops.opaque("fastlayers::linear_accuracy", _run_accuracy, _describe_accuracy)


# ---- which calls -----------------------------------------------------------------------------------------------------


def _detached(leaves: Leaves) -> Leaves:
    """As an op without a derivative takes them."""
    return Leaves(*(t.detach() if isinstance(t, Tensor) else t for t in leaves))  # type: ignore[arg-type]


def linear_topk(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, k: int, softcap: float | None, logit_scale: float,
    log_prob: bool, low_rank: LowRank | None, chunk_size: int | None,
) -> torch.return_types.topk:  # fmt: skip
    head.check("linear_topk", input, linear_weight, input, softcap, logit_scale, chunk_size, low_rank=low_rank)
    leaves, cap = Leaves.of_call(input, linear_weight, linear_bias, low_rank), softcap or 0.0
    rest = _rest(input, logit_scale, head.autocast_dtype(input), chunk_size)
    # The composition raises torch's error for any other k.
    if head.is_chunked(leaves, None, rest) and isinstance(k, int) and 1 <= k <= leaves.linear_weight.shape[0]:
        if not guard.wants_gradient(*leaves.tensors):
            if torch.compiler.is_compiling():
                found = _in_graph(*_detached(leaves), k, cap, logit_scale, log_prob, rest.low, chunk_size)
            else:
                found = _find(leaves, k, cap, log_prob, rest)
            return torch.return_types.topk(found)
        if not torch.compiler.is_compiling():
            backends.refuse("autograd is to record it; its gradient takes the whole logits")
    given = (*leaves.dequantized(), k, cap, logit_scale, log_prob, leaves.low_rank)
    return guard.call_reference(reference.linear_topk, *given)


def linear_argmax(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, low_rank: LowRank | None, chunk_size: int | None
) -> Tensor:
    head.check("linear_argmax", input, linear_weight, input, None, 1.0, chunk_size, low_rank=low_rank)
    leaves = Leaves.of_call(input, linear_weight, linear_bias, low_rank)
    rest = _rest(input, 1.0, head.autocast_dtype(input), chunk_size)
    if head.is_chunked(leaves, None, rest):
        if torch.compiler.is_compiling():
            return _in_graph(*_detached(leaves), 1, 0.0, 1.0, False, rest.low, chunk_size)[1].squeeze(-1)
        return _find(leaves, 1, 0.0, False, rest)[1].squeeze(-1)
    return guard.call_reference(reference.linear_argmax, *leaves.dequantized(), leaves.low_rank)


def linear_accuracy(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, ignore_index: int,
    low_rank: LowRank | None, chunk_size: int | None,
) -> Tensor:  # fmt: skip
    head.check("linear_accuracy", input, linear_weight, target, None, 1.0, chunk_size, low_rank=low_rank)
    leaves = Leaves.of_call(input, linear_weight, linear_bias, low_rank)
    rest = _rest(input, 1.0, head.autocast_dtype(input), chunk_size)
    if head.is_chunked(leaves, target, rest):
        run = _accuracy_in_graph if torch.compiler.is_compiling() else _run_accuracy
        return run(*_detached(leaves), target, ignore_index, rest.low, chunk_size)  # type: ignore[arg-type]
    given = (*leaves.dequantized(), target, ignore_index, leaves.low_rank)
    return guard.call_reference(reference.linear_accuracy, *given)


def of_some_classes(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, k: int, softcap: float, logit_scale: float,
    log_prob: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Values and indices among the classes of one rank, and the largest score of each row. No autograd.

    The log-sum-exp of a row is its largest score less the log-probability of that.
    """
    leaves = Leaves.of_call(input, linear_weight, linear_bias, None)
    rest = _rest(input, logit_scale, head.autocast_dtype(input), None)
    rows = input.shape[:-1]
    if head.is_chunked(leaves, None, rest):
        bases = input.new_empty((rows.numel(), 1), dtype=_dtype(rest, True))
        return *_find(leaves, k, softcap, log_prob, rest, bases), bases.view(*rows, 1)
    with torch.no_grad():
        scores = reference.head_scores(*leaves.dequantized(), softcap, logit_scale)
        values, indices = _largest(scores, k, log_prob)
        return values.to(_dtype(rest, log_prob)), indices, scores.gather(-1, indices[..., :1])

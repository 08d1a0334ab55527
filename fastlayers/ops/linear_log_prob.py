"""Log-probabilities of classes and entropies by the logits of a head: chunks, autograd, the op of compiled graphs.

For the scores z of a row, softcap·tanh(logits/softcap) or the logits, and its class t

    log_prob = z_t - lse                          dz = (1[j = t] - p)·dlog_prob
    entropy = -sum(p·log p)                       dz = -p·(log p + entropy)·dentropy
    lse = log(sum(exp(z)))                        dz = p·dlse

with p = exp(z - lse). The last is for classes that are distributed over ranks: it says which part of a sum a rank has.
The incoming gradient of a row is known only after the forward, so the backward goes through the chunks again: four
products in all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastlayers import backends
from fastlayers.ops import graph_ops, guard, head, pairs, reference
from fastlayers.ops.cross_entropy import scores_of
from fastlayers.ops.head import LEAVES, FlatGradients, Leaves, LowRank
from fastlayers.ops.pairs import Needs
from fastlayers.ops.quantized import Quantized

Found = tuple[Tensor, Tensor, Tensor]


# ---- a chunk ---------------------------------------------------------------------------------------------------------


def _chunk(logits: Tensor, target: Tensor, softcap: float, columns: int) -> Found:
    """Log-probabilities, entropies, and levels: the largest score of each row, and lse less that."""
    if backends.generates_kernels(logits.device):
        from fastlayers.kernels import log_prob

        return log_prob.log_prob_chunk(logits, target, softcap, columns)
    scores = scores_of(logits[:, :columns], softcap)
    base = scores.amax(1)
    below = scores - base[:, None]
    rest = below.exp().sum(1).log()
    log_p = below - rest[:, None]
    entropy = -reference.times_exp(log_p).sum(1)
    return log_p.gather(1, target[:, None]).squeeze(1), entropy, torch.stack((base, rest))


def _chunk_backward_(
    logits: Tensor, target: Tensor, entropy: Tensor, levels: Tensor, dlog_prob: Tensor | None, dentropy: Tensor | None,
    dlse: Tensor | None, softcap: float, columns: int,
) -> None:  # fmt: skip
    """Put the gradient in the place of the logits, 0 in the padding."""
    if backends.generates_kernels(logits.device):
        from fastlayers.kernels import log_prob

        given = (logits, target, entropy, levels, dlog_prob, dentropy, dlse, softcap, columns)
        return log_prob.log_prob_chunk_backward_(*given)
    scores = scores_of(logits[:, :columns], softcap)
    log_p = (scores - levels[0, :, None]) - levels[1, :, None]
    d = torch.zeros_like(log_p)
    if dentropy is not None:
        d -= dentropy[:, None] * (reference.times_exp(log_p) + log_p.exp() * entropy[:, None])
    if dlog_prob is not None:
        d -= dlog_prob[:, None] * log_p.exp()
        d.scatter_add_(1, target[:, None], dlog_prob[:, None].to(d.dtype))
    if dlse is not None:
        d += dlse[:, None] * log_p.exp()
    if softcap:
        d *= 1 - (scores / softcap).square()
    logits[:, :columns] = d
    logits[:, columns:] = 0
    return None


# ---- all rows --------------------------------------------------------------------------------------------------------


def _rest(
    input: Tensor, logit_scale: float, low: torch.dtype | None, chunk_size: int | None, acc_dtype: torch.dtype | None
) -> head.Rest:
    return head.Rest(head.cast(input.dtype, low), low, logit_scale, chunk_size, acc_dtype)


def _run(
    input: Tensor, linear_weight: Tensor | Quantized, linear_bias: Tensor | None, low_rank_input: Tensor | None,
    low_rank_weight: Tensor | None, target: Tensor, ignore_index: int, softcap: float, logit_scale: float,
    low: torch.dtype | None, chunk_size: int | None, acc_dtype: torch.dtype | None,
) -> Found:  # fmt: skip
    """Log-probabilities and entropies in the shape of the target, 0 where that is ignored, and levels (2, rows)."""
    leaves = Leaves(input, linear_weight, linear_bias, low_rank_input, low_rank_weight)
    rest, columns = _rest(input, logit_scale, low, chunk_size, acc_dtype), linear_weight.shape[0]
    wide = torch.promote_types(rest.compute, torch.float32)
    t = target.reshape(-1)
    found = torch.zeros((4, t.numel()), dtype=wide, device=input.device)
    kept = head.labelled(t, ignore_index, columns)
    some = found if kept is None else found.new_zeros((4, kept.numel()))
    if kept is not None:
        leaves, t = leaves.rows(kept), t[kept]
    counts = t != ignore_index
    check_classes(t, counts, columns)
    t = torch.where(counts, t, 0)

    def chunk(logits: Tensor, start: int, end: int) -> None:
        some[0, start:end], some[1, start:end], some[2:, start:end] = _chunk(logits, t[start:end], softcap, columns)

    with torch.no_grad(), torch.autocast(input.device.type, enabled=False):
        head.sweep(*leaves[:3], rest, chunk, 1.0, (False, False, False), leaves.low_rank)
    some[:2].mul_(counts)
    if kept is not None:
        found.index_copy_(1, kept, some)
    log_prob, entropy, levels = found[0], found[1].clone(), found[2:].clone()  # results of an op share no memory
    return log_prob.view(target.shape), entropy.view(target.shape), levels


def check_classes(classes: Tensor, counts: Tensor, columns: int) -> None:
    """Torch's error for a class that is none: on a GPU a device-side assert."""
    right = ~counts | ((classes >= 0) & (classes < columns))
    if classes.device.type != "cpu":
        torch._assert_async(right.all())
    elif not right.all():
        raise IndexError(f"Target {int(classes[~right][0])} is out of bounds.")


def _run_backward(
    dlog_prob: Tensor | None, dentropy: Tensor | None, dlse: Tensor | None, leaves: Leaves, target: Tensor,
    entropy: Tensor, levels: Tensor, ignore_index: int, softcap: float, rest: head.Rest, needs: Needs,
) -> head.Gradients:  # fmt: skip
    columns = leaves.linear_weight.shape[0]
    wide = torch.promote_types(rest.compute, torch.float32)
    classes = target.reshape(-1)
    counts = classes != ignore_index
    # A row without a label has no gradient, whatever comes in.
    incoming = (dlog_prob, dentropy, dlse)
    dys = [None if dy is None else torch.where(counts, dy.reshape(-1).to(wide), 0.0) for dy in incoming]
    given = [torch.where(counts, classes, 0), entropy.reshape(-1), levels[0], levels[1], *dys]
    kept = head.labelled(classes, ignore_index, columns)
    if kept is not None:
        given = [None if t is None else t[kept] for t in given]
    t, e, base, below, *dys = given
    levels = torch.stack((base, below))  # type: ignore[arg-type]

    def chunk(logits: Tensor, start: int, end: int) -> None:
        part = slice(start, end)
        dlog, dent, dl = (None if dy is None else dy[part] for dy in dys)
        _chunk_backward_(logits, t[part], e[part], levels[:, part].contiguous(), dlog, dent, dl, softcap, columns)  # type: ignore[index]

    labelled = leaves if kept is None else leaves.rows(kept)
    with torch.no_grad(), torch.autocast(target.device.type, enabled=False):
        found = head.sweep(*labelled[:3], rest, chunk, 1.0, needs, labelled.low_rank)
    return found if kept is None else found.of_all_rows(kept, leaves)


# ---- autograd --------------------------------------------------------------------------------------------------------


def _describe(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, low_rank_input: Tensor | None,
    low_rank_weight: Tensor | None, target: Tensor, ignore_index: int, softcap: float, logit_scale: float,
    low: torch.dtype | None, chunk_size: int | None, acc_dtype: torch.dtype | None,
) -> Found:  # fmt: skip
    wide = torch.promote_types(head.cast(input.dtype, low), torch.float32)
    log_prob, entropy = (input.new_empty(target.shape, dtype=wide) for _ in range(2))
    return log_prob, entropy, input.new_empty((2, target.numel()), dtype=wide)


def _run_backward_op(
    dlog_prob: Tensor | None, dentropy: Tensor | None, dlse: Tensor | None, input: Tensor,
    linear_weight: Tensor | Quantized, linear_bias: Tensor | None, low_rank_input: Tensor | None,
    low_rank_weight: Tensor | None, target: Tensor,
    entropy: Tensor, levels: Tensor, ignore_index: int, softcap: float, logit_scale: float, low: torch.dtype | None,
    chunk_size: int | None, acc_dtype: torch.dtype | None, wanted: Sequence[bool],
) -> FlatGradients:  # fmt: skip
    """The gradients; empty where one is not needed."""
    leaves = Leaves(input, linear_weight, linear_bias, low_rank_input, low_rank_weight)
    rest = _rest(input, logit_scale, low, chunk_size, acc_dtype)
    given = (dlog_prob, dentropy, dlse, leaves, target, entropy, levels, ignore_index, softcap, rest, tuple(wanted))
    return head.flatten_gradients(_run_backward(*given), input)


def _describe_backward(
    dlog_prob: Tensor | None, dentropy: Tensor | None, dlse: Tensor | None, input: Tensor, linear_weight: Tensor,
    linear_bias: Tensor | None, low_rank_input: Tensor | None, low_rank_weight: Tensor | None, target: Tensor,
    entropy: Tensor, levels: Tensor, ignore_index: int, softcap: float, logit_scale: float, low: torch.dtype | None,
    chunk_size: int | None, acc_dtype: torch.dtype | None, wanted: Sequence[bool],
) -> FlatGradients:  # fmt: skip
    leaves = Leaves(input, linear_weight, linear_bias, low_rank_input, low_rank_weight)
    return head.describe_gradients(leaves, tuple(wanted))


class Ways(NamedTuple):
    """How the chunks are run: as they are, or as ops that no trace looks into.

    ``quantized`` is a quantised linear_weight, in the place of a tensor.
    """

    forward: Callable[..., Found]
    backward: Callable[..., FlatGradients]
    quantized: Quantized | None = None


DIRECTLY = Ways(_run, _run_backward_op)
IN_GRAPH = Ways(
    graph_ops.opaque("fastlayers::linear_log_prob_forward", _run, _describe),
    graph_ops.opaque("fastlayers::linear_log_prob_backward", _run_backward_op, _describe_backward),
)


class LinearLogProb(pairs.Pair, inputs=LEAVES):
    """Keeps its inputs, and for each row its entropy and two numbers of its normaliser."""

    @staticmethod
    def raw_forward(
        kernels: Ways, needs: Needs, input: Tensor, linear_weight: Tensor | None, linear_bias: Tensor | None,
        low_rank_input: Tensor | None, low_rank_weight: Tensor | None, target: Tensor, ignore_index: int,
        softcap: float, logit_scale: float, low: torch.dtype | None, chunk_size: int | None,
        acc_dtype: torch.dtype | None,
    ) -> Any:  # fmt: skip
        tensors = (input, linear_weight, linear_bias, low_rank_input, low_rank_weight)
        rest = (ignore_index, softcap, logit_scale, low, chunk_size, acc_dtype)
        log_prob, entropy, levels = kernels.forward(*Leaves.kept(kernels.quantized, *tensors), target, *rest)
        return (log_prob, entropy, levels), (*tensors, target, entropy, levels), (*rest, kernels.quantized)

    @staticmethod
    def raw_backward(
        kernels: Ways, needs: Needs, dlog_prob: Tensor | None, dentropy: Tensor | None, dlevels: Tensor | None,
        *args: Any,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        tensors, (*rest, quantized) = args[:LEAVES], args[LEAVES:]
        dlse = None if dlevels is None else dlevels[1]  # The largest score is taken for a constant.
        return kernels.backward(dlog_prob, dentropy, dlse, *Leaves.kept(quantized, *tensors), *rest, needs)

    @staticmethod
    def differentiable_backward(
        needs: Needs, dlog_prob: Tensor | None, dentropy: Tensor | None, dlevels: Tensor | None, input: Tensor,
        linear_weight: Tensor | None, linear_bias: Tensor | None, low_rank_input: Tensor | None,
        low_rank_weight: Tensor | None, target: Tensor, entropy: Tensor, levels: Tensor, ignore_index: int,
        softcap: float, logit_scale: float, low: torch.dtype | None, chunk_size: int | None,
        acc_dtype: torch.dtype | None, quantized: Quantized | None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        if dlevels is not None:
            raise RuntimeError(
                "a head of sharded classes has no second derivative, which create_graph=True asks for: it would need"
                " the logits of the other ranks"
            )

        def compose(*tensors: Any) -> Tensor:
            given, options = Leaves.kept(quantized, *tensors), (ignore_index, softcap, logit_scale)
            return torch.stack(reference.linear_log_prob(*given.dequantized(), target, *options, given.low_rank))

        leaves = (input, linear_weight, linear_bias, low_rank_input, low_rank_weight)
        dys = [torch.zeros_like(entropy) if dy is None else dy for dy in (dlog_prob, dentropy)]
        with torch.autocast(input.device.type, low, enabled=low is not None):
            return pairs.differentiate(compose, leaves, needs, torch.stack(dys))


_in_graph = graph_ops.graph_op_of(
    LinearLogProb, "linear_log_prob", returns=tuple[Tensor, Tensor, Tensor], kernels=lambda: IN_GRAPH
)


# ---- which calls -----------------------------------------------------------------------------------------------------


def linear_log_prob(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, ignore_index: int,
    softcap: float | None, logit_scale: float, low_rank: LowRank | None, chunk_size: int | None,
    acc_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Log-probabilities and entropies."""
    head.check("linear_log_prob", input, linear_weight, target, softcap, logit_scale, chunk_size, acc_dtype, low_rank)
    options = (ignore_index, softcap or 0.0, logit_scale)
    leaves = Leaves.of_call(input, linear_weight, linear_bias, low_rank)
    rest = _rest(input, logit_scale, head.autocast_dtype(input), chunk_size, acc_dtype)
    if head.is_chunked(leaves, target, rest):
        kept = (*leaves.tensors, target, *options, *rest.options)
        if torch.compiler.is_compiling():
            return _in_graph(*kept)[:2]  # type: ignore[no-any-return]
        return LinearLogProb.run(DIRECTLY._replace(quantized=leaves.quantized), *kept)[:2]
    return guard.call_reference(reference.linear_log_prob, *leaves.dequantized(), target, *options, leaves.low_rank)


def of_some_classes(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, softcap: float, logit_scale: float
) -> Found:
    """Log-probabilities, entropies and levels among the classes of one rank, whose targets are among them or -100.

    The gradient of the second level is that of the log-sum-exp; the first is taken for a constant.
    """
    leaves = Leaves.of_call(input, linear_weight, linear_bias, None)
    rest = _rest(input, logit_scale, head.autocast_dtype(input), None, None)
    if head.is_chunked(leaves, target, rest):
        given = (*leaves.tensors, target, -100, softcap, logit_scale, *rest.options)
        return LinearLogProb.run(DIRECTLY._replace(quantized=leaves.quantized), *given)  # type: ignore[no-any-return]
    scores = reference.head_scores(input, linear_weight, linear_bias, softcap, logit_scale)
    scores = torch.where((target != -100).unsqueeze(-1), scores, 0.0)  # of NaN nothing comes through, back and forth
    base = scores.detach().amax(-1)
    below = torch.logsumexp(scores - base[..., None], -1)
    levels = torch.stack((base.reshape(-1), below.reshape(-1)))
    return *reference.log_prob_of_scores(scores, target, -100), levels

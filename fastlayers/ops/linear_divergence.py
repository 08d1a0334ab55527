"""Divergences of a head's distributions from a teacher's: chunks of both, which calls are chunked, graphs.

For the scores s of the student and t of the teacher, softcap·tanh(logits/softcap) or the logits, over the temperature,
with q = softmax(s) and p = softmax(t), a row has

    kl          sum p·(log p - log q)                             ds = q - p
    reverse_kl  sum q·(log q - log p)                             ds = q·(log q - log p - loss)
    js          β·KL(p || m) + (1 - β)·KL(q || m)                 ds = (1 - β)·q·(log q - log m - KL(q || m))
                with m = β·p + (1 - β)·q
    tv          ½·sum |q - p|                                     ds = ½·q·(sign(q - p) - sum q·sign(q - p))
    cosine      1 - s·t / (|s|·|t|)                               ds = (cos·s/|s| - t/|t|) / |s|

where a js with a beta of 0 is kl, and with a beta of 1 reverse_kl. The logits of the teacher are made for some rows of
a chunk of the student's, in a memory of their own; the gradient takes the place of the student's.
:mod:`fastlayers.ops.head_loss` has the autograd Function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlayers import backends
from fastlayers.ops import graph_ops, guard, head, head_loss, kl_div, pairs, reference
from fastlayers.ops.cross_entropy import scores_of
from fastlayers.ops.head import LEAVES, FlatGradients, Gradients, Leaves, LowRank
from fastlayers.ops.head_loss import NOTHING, FlatResults, Others, Rest
from fastlayers.ops.pairs import Needs
from fastlayers.ops.quantized import Quantized, quantized

DIVERGENCES = ("kl", "reverse_kl", "js", "tv", "cosine")
#: Those that the kernels of :mod:`fastlayers.ops.kl_div` compute.
KERNEL_DIVERGENCES = DIVERGENCES[:3]

#: The teacher's logits are made for so many rows at a time, or for an eighth of a chunk if that is more. With fewer a
#: product would wait for its weight; an H100 computes some 300 operations in the time it takes to read a byte.
TEACHER_ROWS = 256
TEACHER_PART = 8


class Loss(NamedTuple):
    """The options, as the reference takes them. No softcap is 0."""

    ignore_index: int
    kind: str
    reduction: str
    softcap: float
    logit_scale: float
    target_softcap: float
    target_logit_scale: float
    temperature: float
    beta: float

    @property
    def squared(self) -> float:
        """What the losses of the rows are multiplied by."""
        return self.temperature**2 if self.kind in ("kl", "reverse_kl") else 1.0


class Teacher(NamedTuple):
    """The tensors of a teacher, and the labels. Without a weight the input is logits."""

    input: Tensor
    weight: Tensor | Quantized | None
    bias: Tensor | None
    labels: Tensor | None

    def of_call(self) -> Teacher:
        """With the weight as :class:`Quantized` if it is quantised; dequantised in a graph."""
        if not isinstance(self.weight, Tensor):
            return self
        known = self._replace(weight=quantized(self.weight) or self.weight)
        return known.dequantized() if torch.compiler.is_compiling() else known

    def dequantized(self) -> Teacher:
        weight = self.weight
        return self._replace(weight=weight.whole(self.input.dtype)) if isinstance(weight, Quantized) else self


# ---- a chunk ---------------------------------------------------------------------------------------------------------


def _chunk_(
    student: Tensor, teacher: Tensor, labels: Tensor | None, dlosses: Tensor | None, columns: int, loss: Loss
) -> Tensor:
    """The losses of the rows and, if there are ``dlosses``, the gradient in the place of the student's logits."""
    kind, beta = loss.kind, loss.beta
    if kind == "js" and beta in (0.0, 1.0):
        kind = "kl" if beta == 0.0 else "reverse_kl"
    numbers = (loss.softcap, loss.target_logit_scale, loss.target_softcap, loss.temperature, beta)
    given = (student, teacher, labels, dlosses, columns, loss.ignore_index, kind, *numbers)
    if backends.generates_kernels(student.device):
        from fastlayers.kernels import linear_divergence

        return linear_divergence.divergence_chunk_(*given)
    kernels = kl_div.FAMILY.kernels_for(student) if kind in KERNEL_DIVERGENCES else None
    if kernels is not None and not (kernels.unasked and student.dtype not in guard.CPU_DTYPES):
        return _chunk_by_kernels_(kernels, *given)
    return _compose_chunk_(*given)


def _chunk_by_kernels_(
    kernels: Any, student: Tensor, teacher: Tensor, labels: Tensor | None, dlosses: Tensor | None, columns: int,
    ignore_index: int, kind: str, softcap: float, teacher_scale: float, teacher_softcap: float, temperature: float,
    beta: float,
) -> Tensor:  # fmt: skip
    """By the kernels of the divergences between logits, of which the reverse one has their roles exchanged."""
    scores, of_teacher = student[:, :columns], teacher[:, :columns]
    if softcap or teacher_softcap or teacher_scale != 1.0 or student.dtype is not teacher.dtype:
        scores = scores_of(scores, softcap)
        of_teacher = reference.capped(of_teacher.to(scores.dtype) * teacher_scale, teacher_softcap)
    reverse = kind == "reverse_kl"
    scores, of_teacher = scores.contiguous(), of_teacher.contiguous()
    pair = (of_teacher, scores) if reverse else (scores, of_teacher)
    options = (labels, ignore_index, beta if kind == "js" else 0.0, temperature)
    losses, stats = kernels.divergence_forward(*pair, *options)
    if dlosses is not None:
        gradient = kernels.divergence_backward(dlosses, *pair, *options, stats, not reverse, reverse)[reverse]
        if softcap:
            gradient *= 1 - (scores / softcap).square()
        student[:, :columns] = gradient
        student[:, columns:] = 0
    return losses  # type: ignore[no-any-return]


def _compose_chunk_(
    student: Tensor, teacher: Tensor, labels: Tensor | None, dlosses: Tensor | None, columns: int, ignore_index: int,
    kind: str, softcap: float, teacher_scale: float, teacher_softcap: float, temperature: float, beta: float,
) -> Tensor:  # fmt: skip
    scores = scores_of(student[:, :columns], softcap)
    of_teacher = reference.capped(teacher[:, :columns].to(scores.dtype) * teacher_scale, teacher_softcap)
    if kind == "cosine":
        losses, gradient = _cosine(scores, of_teacher)
    else:
        log_q, log_p = (reference.log_softmax_at(t, temperature) for t in (scores, of_teacher))
        losses, gradient = _divergence(log_q, log_p, kind, beta)
    counts = None if labels is None else labels != ignore_index
    if counts is not None:
        losses = torch.where(counts, losses, 0.0)
    if dlosses is not None:
        by = dlosses if kind == "cosine" else dlosses / temperature
        gradient *= by[:, None]
        if softcap:
            gradient *= 1 - (scores / softcap).square()
        if counts is not None:
            gradient = torch.where(counts[:, None], gradient, 0.0)
        student[:, :columns] = gradient
        student[:, columns:] = 0
    return losses


def _cosine(s: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """The losses of rows, and their gradients by the student's scores."""
    s_norm, t_norm = (torch.linalg.vector_norm(v, dim=1, keepdim=True).clamp_min(1e-8) for v in (s, t))
    s, t = s / s_norm, t / t_norm
    cosine = (s * t).sum(1, keepdim=True)
    return 1.0 - cosine.squeeze(1), (cosine * s - t) / s_norm


def _divergence(log_q: Tensor, log_p: Tensor, kind: str, beta: float) -> tuple[Tensor, Tensor]:
    """The losses of rows, and their gradients by the student's scores over the temperature."""
    q, p = log_q.exp(), log_p.exp()
    if kind == "tv":
        sign = (q - p).sign()
        cross = (q * sign).sum(1, keepdim=True)
        return 0.5 * (q - p).abs().sum(1), 0.5 * q * (sign - cross)
    if kind == "kl":
        return (p * torch.where(p > 0, log_p - log_q, 0.0)).sum(1), q - p
    log_m = reference.log_mixture(p, q, beta) if kind == "js" else log_p
    over_q = torch.where(q > 0, log_q - log_m, 0.0)
    cross = (q * over_q).sum(1, keepdim=True)
    losses, gradient = cross.squeeze(1), q * (over_q - cross)
    if kind == "js":
        losses = beta * (p * torch.where(p > 0, log_p - log_m, 0.0)).sum(1) + (1.0 - beta) * losses
        gradient *= torch.where(losses.isnan(), losses, 1.0 - beta)[:, None]  # NaN of the teacher is lost in a mixture
    return losses, gradient


# ---- the teacher -----------------------------------------------------------------------------------------------------


def teacher_rows(rows: int) -> int:
    """Rows of a teacher's logits that are in memory beside a chunk of so many rows: whole tiles."""
    return max(TEACHER_ROWS, rows // TEACHER_PART // head.ROW_TILE * head.ROW_TILE)


class _TeacherLogits:
    """The logits of a teacher, some rows at a time.

    Given ones are read where they are. Others are made in one memory, whose rows are padded as those of the student.
    A quantised weight is dequantised once as a whole: a product of so few rows takes no longer than that does.
    """

    def __init__(self, teacher: Teacher, rest: head.Rest) -> None:
        self.rows = _rows_of(teacher.input.detach())
        self.compute = head.cast(teacher.input.dtype, rest.low)
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        if teacher.weight is None:
            return
        weight = teacher.weight.whole(self.compute) if isinstance(teacher.weight, Quantized) else teacher.weight
        self.weight = weight = head.matrix(weight, self.compute)
        columns, features = weight.shape
        width = head.row_length(columns)
        # The last columns of an odd vocabulary are multiplied by a padded copy, as head.sweep does.
        self.whole = columns if columns % head.ALIGNED == 0 else columns - columns % head.COLUMN_TILE
        self.last = weight.new_zeros((width - self.whole if self.whole < columns else 0, features))
        self.last[: columns - self.whole] = weight[self.whole :]
        # Now, so that head.plan knows of it where memory is short.
        rows = min(teacher.input.shape[:-1].numel(), rest.chunk_size or TEACHER_ROWS, TEACHER_ROWS)
        self.memory = weight.new_empty((rows, width))
        if teacher.bias is not None:
            self.bias = weight.new_zeros(width)
            self.bias[:columns] = teacher.bias.detach()

    def __call__(self, some: slice | Tensor) -> Tensor:
        rows = self.rows(some)
        if self.weight is None:
            return rows if rows.stride(-1) == 1 else rows.contiguous()
        rows = rows.to(self.compute)
        if len(self.memory) < len(rows):
            self.memory = self.memory.new_empty((len(rows), self.memory.shape[1]))
        logits = self.memory[: len(rows)]
        if self.bias is not None:
            logits.copy_(self.bias)
        beta = 0 if self.bias is None else 1
        logits[:, : self.whole].addmm_(rows, self.weight[: self.whole].t(), beta=beta)
        if len(self.last):
            logits[:, self.whole :].addmm_(rows, self.last.t(), beta=beta)
        return logits


def _rows_of(t: Tensor) -> Callable[[slice | Tensor], Tensor]:
    """A function that gives some of the rows. Nothing copies all of them."""
    try:
        flat = t.view(-1, t.shape[-1])
    except RuntimeError:  # such as logits without those of the last token

        def gather(rows: slice | Tensor) -> Tensor:
            row = torch.arange(rows.start, rows.stop, device=t.device) if isinstance(rows, slice) else rows
            index: list[Tensor] = []
            for size in reversed(t.shape[:-1]):
                index.insert(0, row % size)
                row = row // size
            return t[tuple(index)]

        return gather
    return lambda rows: flat[rows]


def levels_of_logits(logits: Tensor, softcap: float, logit_scale: float) -> Tensor:
    """The largest score of each row, and the log-sum-exp less that: (2, rows), some rows at a time. No autograd."""
    count, rows_of = logits.shape[:-1].numel(), _rows_of(logits.detach())
    levels = logits.new_empty((2, count), dtype=torch.promote_types(logits.dtype, torch.float32))
    for start in range(0, count, TEACHER_ROWS):
        part = slice(start, min(start + TEACHER_ROWS, count))
        scores = reference.capped(rows_of(part).to(levels.dtype) * logit_scale, softcap)
        levels[0, part] = base = scores.amax(1)
        levels[1, part] = (scores - base[:, None]).exp().sum(1).log()
    return levels


# ---- all rows --------------------------------------------------------------------------------------------------------


def _sweep(
    leaves: Leaves, teacher: Teacher, rest: Rest, factor: Tensor | None, alpha: float, wanted: Needs
) -> tuple[Tensor, Gradients]:
    """The divergence of each row, and the wanted gradients of ``alpha * sum(divergences * factor)``.

    Args:
        factor: of one element or one for each row; None if nothing is wanted.
    """
    logits_of, columns = _TeacherLogits(teacher, rest.head), leaves.linear_weight.shape[0]

    def chunk(logits: Tensor, labels: Tensor | None, factor: Tensor | None, rows: slice | Tensor) -> Tensor:
        count, losses = len(logits), []
        by, step = None if factor is None else factor.expand(count), teacher_rows(count)
        for start in range(0, count, step):
            end = min(start + step, count)
            of_labels, dlosses = (None if t is None else t[start:end] for t in (labels, by))
            some = slice(rows.start + start, rows.start + end) if isinstance(rows, slice) else rows[start:end]
            losses.append(_chunk_(logits[start:end], logits_of(some), of_labels, dlosses, columns, rest.loss))
        return torch.cat(losses)

    return head_loss.sweep(leaves, teacher.labels, rest, chunk, factor, alpha, wanted)


def _factor(leaves: Leaves, labels: Tensor | None, loss: Loss, dtype: torch.dtype) -> Tensor:
    """What a summed loss multiplies the divergences of the rows by, for the gradients: 0 if no row counts."""
    device, by = leaves.input.device, loss.squared
    if loss.reduction == "sum":
        return torch.full((), by, dtype=dtype, device=device)
    if loss.reduction == "mean":
        by /= leaves.linear_weight.shape[0]
    if labels is None:
        return torch.full((), by / leaves.input.shape[:-1].numel(), dtype=dtype, device=device)
    count = (labels != loss.ignore_index).sum().to(dtype)
    return torch.where(count > 0, by / count, 0.0)


def _evaluate(leaves: Leaves, others: Others, rest: Rest, wanted: Needs) -> tuple[Tensor, Tensor | None, Gradients]:
    teacher, loss, compute = Teacher(*others), rest.loss, rest.head.compute
    wide = torch.promote_types(compute, torch.float32)
    scales = head_loss.Scales(None, 1.0, None)
    if any(wanted):
        largest = torch.ones((), dtype=wide, device=leaves.input.device)
        scales = head_loss.Scales.choose(_factor(leaves, teacher.labels, loss, wide), largest, compute)
    losses, gradients = _sweep(leaves, teacher, rest, scales.dlogits, scales.alpha, wanted)
    losses, columns = losses.view(leaves.input.shape[:-1]), leaves.linear_weight.shape[0]
    by = (loss.temperature, loss.squared != 1.0, loss.reduction, rest.out)
    return reference.reduced_rows(losses, teacher.labels, loss.ignore_index, columns, *by), scales.left, gradients


def _gradients_of_rows(dy: Tensor, leaves: Leaves, others: Others, rest: Rest, wanted: Needs) -> Gradients:
    """The backward without a reduction: once more through the chunks."""
    wide = torch.promote_types(rest.head.compute, torch.float32)
    factor = dy.detach().reshape(-1).to(wide).contiguous() * rest.loss.squared
    return _sweep(leaves, Teacher(*others), rest, factor, 1.0, wanted)[1]


def _compose(leaves: Leaves, others: Others, rest: Rest) -> Tensor:
    given = (*leaves.dequantized(), *Teacher(*others).dequantized(), *rest.loss, leaves.low_rank)
    return reference.linear_divergence(*given)


METHOD = head_loss.Method(_evaluate, _gradients_of_rows, _compose)


# ---- torch.compile ---------------------------------------------------------------------------------------------------

#: softcap, logit_scale, target_softcap, target_logit_scale, temperature, beta: the schema of an op has them as one.
Numbers = list[float]


def _rest(
    input: Tensor, teacher: Teacher, ignore_index: int, kind: str, reduction: str, numbers: Numbers,
    low: torch.dtype | None, chunk_size: int | None, acc_dtype: torch.dtype | None,
) -> Rest:  # fmt: skip
    loss = Loss(ignore_index, kind, reduction, *numbers)
    compute, given = head.cast(input.dtype, low), teacher.input.dtype
    out = torch.promote_types(compute, given if teacher.weight is None else head.cast(given, low))
    if low is not None and out in reference.LOW_PRECISION:
        out = torch.float32
    return Rest(loss, head.Rest(compute, low, loss.logit_scale, chunk_size, acc_dtype), out, reduction != "none")


def _run_chunks(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, low_rank_input: Tensor | None,
    low_rank_weight: Tensor | None, target_input: Tensor, target_weight: Tensor | None, target_bias: Tensor | None,
    target: Tensor | None, ignore_index: int, kind: str, reduction: str, numbers: Numbers, low: torch.dtype | None,
    chunk_size: int | None, acc_dtype: torch.dtype | None, wanted: Sequence[bool],
) -> FlatResults:  # fmt: skip
    leaves = Leaves(input, linear_weight, linear_bias, low_rank_input, low_rank_weight)
    teacher = Teacher(target_input, target_weight, target_bias, target)
    rest = _rest(input, teacher, ignore_index, kind, reduction, numbers, low, chunk_size, acc_dtype)
    return head_loss.run(METHOD, leaves, teacher, rest, wanted)


def _describe_chunks(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, low_rank_input: Tensor | None,
    low_rank_weight: Tensor | None, target_input: Tensor, target_weight: Tensor | None, target_bias: Tensor | None,
    target: Tensor | None, ignore_index: int, kind: str, reduction: str, numbers: Numbers, low: torch.dtype | None,
    chunk_size: int | None, acc_dtype: torch.dtype | None, wanted: Sequence[bool],
) -> FlatResults:  # fmt: skip
    leaves = Leaves(input, linear_weight, linear_bias, low_rank_input, low_rank_weight)
    teacher = Teacher(target_input, target_weight, target_bias, target)
    rest = _rest(input, teacher, ignore_index, kind, reduction, numbers, low, chunk_size, acc_dtype)
    return head_loss.describe(() if rest.summed else input.shape[:-1], leaves, rest, wanted)


def _run_chunks_again(
    dy: Tensor, input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, low_rank_input: Tensor | None,
    low_rank_weight: Tensor | None, target_input: Tensor, target_weight: Tensor | None, target_bias: Tensor | None,
    target: Tensor | None, ignore_index: int, kind: str, numbers: Numbers, low: torch.dtype | None,
    chunk_size: int | None, acc_dtype: torch.dtype | None, wanted: Sequence[bool],
) -> FlatGradients:  # fmt: skip
    leaves = Leaves(input, linear_weight, linear_bias, low_rank_input, low_rank_weight)
    teacher = Teacher(target_input, target_weight, target_bias, target)
    rest = _rest(input, teacher, ignore_index, kind, "none", numbers, low, chunk_size, acc_dtype)
    return head_loss.run_again(METHOD, dy, leaves, teacher, rest, wanted)


def _describe_chunks_again(
    dy: Tensor, input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, low_rank_input: Tensor | None,
    low_rank_weight: Tensor | None, target_input: Tensor, target_weight: Tensor | None, target_bias: Tensor | None,
    target: Tensor | None, ignore_index: int, kind: str, numbers: Numbers, low: torch.dtype | None,
    chunk_size: int | None, acc_dtype: torch.dtype | None, wanted: Sequence[bool],
) -> FlatGradients:  # fmt: skip
    leaves = Leaves(input, linear_weight, linear_bias, low_rank_input, low_rank_weight)
    return head.describe_gradients(leaves, tuple(wanted))


_forward_op = graph_ops.opaque("fastlayers::linear_divergence_forward", _run_chunks, _describe_chunks)
_backward_op = graph_ops.opaque("fastlayers::linear_divergence_backward", _run_chunks_again, _describe_chunks_again)


class LinearDivergenceInGraph(pairs.Pair, inputs=LEAVES):
    """Keeps its inputs, and the gradients of a summed loss, which backward multiplies with the incoming one."""

    @staticmethod
    def raw_forward(
        kernels: None, needs: Needs, input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None,
        low_rank_input: Tensor | None, low_rank_weight: Tensor | None, target_input: Tensor,
        target_weight: Tensor | None, target_bias: Tensor | None, target: Tensor | None, ignore_index: int, kind: str,
        reduction: str, numbers: Numbers, low: torch.dtype | None, chunk_size: int | None,
        acc_dtype: torch.dtype | None,
    ) -> Any:  # fmt: skip
        leaves = (input, linear_weight, linear_bias, low_rank_input, low_rank_weight)
        tensors = (*leaves, target_input, target_weight, target_bias, target)
        options = (ignore_index, kind, reduction, numbers, low, chunk_size, acc_dtype)
        loss, *ready = _forward_op(*tensors, *options, needs or NOTHING)
        return loss, (*tensors, *ready), options

    @staticmethod
    def raw_backward(kernels: None, needs: Needs, dy: Tensor, *args: Any) -> tuple[Tensor | None, ...]:
        tensors, (left, *gradients), options = args[: LEAVES + 4], args[LEAVES + 4 : -7], args[-7:]
        ignore_index, kind, reduction, *rest = options
        if reduction != "none":
            return head_loss.scaled(dy, left, gradients, needs)
        return _backward_op(dy, *tensors, ignore_index, kind, *rest, needs)  # type: ignore[no-any-return]

    @staticmethod
    def differentiable_backward(needs: Needs, *args: Any) -> tuple[Tensor | None, ...]:
        raise head_loss.no_second_derivative("linear_divergence")


_in_graph = graph_ops.graph_op_of(LinearDivergenceInGraph, "linear_divergence")


# ---- which calls -----------------------------------------------------------------------------------------------------


def _check(rows: torch.Size, teacher: Teacher, loss: Loss, target_softcap: float | None) -> None:
    """Raise if an argument of a teacher or the divergence is not valid, whatever serves the call."""
    name, labels = "linear_divergence", teacher.labels
    if target_softcap is not None and not target_softcap > 0:
        raise ValueError(f"{name}(): expected a target_softcap above 0 or None, but got {target_softcap}")
    if loss.kind not in DIVERGENCES:
        raise ValueError(f"{name}(): expected divergence to be one of {', '.join(DIVERGENCES)}, but got {loss.kind!r}")
    if loss.reduction not in kl_div.REDUCTIONS:
        raise ValueError(
            f"{name}(): expected reduction to be one of {', '.join(kl_div.REDUCTIONS)}, but got {loss.reduction!r}"
        )
    if not isinstance(loss.target_logit_scale, float | int):
        raise TypeError(
            f"{name}(): expected target_logit_scale to be a number, but got {type(loss.target_logit_scale).__name__}"
        )
    if not (isinstance(loss.temperature, float | int) and loss.temperature > 0):
        raise ValueError(f"{name}(): expected temperature to be a positive number, but got {loss.temperature!r}")
    if not 0.0 <= loss.beta <= 1.0:
        raise ValueError(f"{name}(): expected beta to be between 0 and 1, but got {loss.beta}")
    if teacher.weight is not None and not isinstance(teacher.weight, Tensor):
        raise guard.expected_tensor(teacher.weight)
    if teacher.weight is None and teacher.bias is not None:
        raise ValueError(f"{name}(): expected a target_weight beside target_bias; without one target_input is logits")
    if labels is not None and labels.shape != rows:
        raise ValueError(
            f"{name}(): expected a target of shape {tuple(rows)}, a label for each row, but got {tuple(labels.shape)}"
        )


def _unsupported(leaves: Leaves, teacher: Teacher, rest: Rest) -> str | None:
    """Why chunks cannot have this teacher, None where they can."""
    (input, linear_weight, *_), (given, weight, bias, _) = leaves, teacher
    of_teacher = {"target_input": given, "target_weight": weight, "target_bias": bias}
    for name, t in of_teacher.items():
        if t is not None and not guard.is_plain(t) and not isinstance(t, Quantized):
            return f"it takes plain tensors, and {name} is a {type(t).__name__}"
        if t is not None and t.device != input.device:
            return f"{name} is on {t.device}, and input on {input.device}"
        if t is not None and torch.is_grad_enabled() and t.requires_grad:
            return f"{name} requires a gradient, and the chunks compute none of a teacher"
    dtypes = {t.dtype for t in of_teacher.values() if isinstance(t, Tensor)}
    computed = dtypes if weight is None else {head.cast(dtype, rest.head.low) for dtype in dtypes}
    if not dtypes <= guard.FLOATING or len(computed) > 1:
        return f"the teacher's tensors are {', '.join(map(str, dtypes))}; chunks take one floating dtype"
    if torch.float64 in computed and rest.head.compute is not torch.float64:
        return f"the teacher is float64, and the student {rest.head.compute}"
    columns, shape = linear_weight.shape[0], tuple(given.shape)
    if weight is None:
        if shape != (*input.shape[:-1], columns):
            return f"the teacher's logits are {shape}; expected {(*input.shape[:-1], columns)}"
        return None
    if shape[:-1] != input.shape[:-1] or weight.shape != (columns, given.shape[-1]) or given.numel() == 0:
        return f"target_input is {shape}, and target_weight {tuple(weight.shape)}; expected (..., H) and ({columns}, H)"
    if bias is not None and bias.shape != (columns,):
        return f"target_bias is {tuple(bias.shape)}; expected ({columns},)"
    return None


def linear_divergence(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target_input: Tensor,
    target_weight: Tensor | None, target_bias: Tensor | None, target: Tensor | None, ignore_index: int, kind: str,
    reduction: str, softcap: float | None, logit_scale: float, target_softcap: float | None,
    target_logit_scale: float, temperature: float, beta: float, low_rank: LowRank | None, chunk_size: int | None,
    acc_dtype: torch.dtype | None,
) -> Tensor:  # fmt: skip
    given = Teacher(target_input, target_weight, target_bias, target)
    scores = (softcap or 0.0, logit_scale, target_softcap or 0.0, target_logit_scale)
    loss = Loss(ignore_index, kind, reduction, *scores, temperature, beta)
    of_student = (input, linear_weight, target_input, softcap, logit_scale, chunk_size, acc_dtype, low_rank)
    head.check("linear_divergence", *of_student)
    _check(input.shape[:-1], given, loss, target_softcap)
    leaves, teacher = Leaves.of_call(input, linear_weight, linear_bias, low_rank), given.of_call()
    numbers, low = [float(number) for number in loss[3:]], head.autocast_dtype(input)
    options = (ignore_index, kind, reduction, numbers, low, chunk_size, acc_dtype)
    rest = _rest(input, teacher, *options)
    if head.is_chunked(leaves, target, rest.head):
        reason, compiling = _unsupported(leaves, teacher, rest), torch.compiler.is_compiling()
        if reason is None and compiling:
            return _in_graph(*leaves.tensors, *teacher, *options)  # type: ignore[no-any-return]
        if reason is None:
            return head_loss.call(METHOD, leaves, teacher, rest)
        if not compiling:
            backends.refuse(reason)
    composed = (*leaves.dequantized(), *teacher.dequantized(), *loss, leaves.low_rank)
    return guard.call_reference(reference.linear_divergence, *composed)


def of_some_classes(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target_input: Tensor,
    target_weight: Tensor | None, target_bias: Tensor | None, target: Tensor | None, reverse: bool, loss: Loss,
) -> tuple[Tensor, torch.dtype]:  # fmt: skip
    """Kullback-Leibler divergences of rows among the classes of one rank, and the dtype of the loss.

    They are neither rounded to that dtype nor multiplied by temperature², as a js is not. A row whose target is -100
    does not count.
    """
    loss = loss._replace(ignore_index=-100, kind="js", reduction="none", beta=float(reverse))
    leaves = Leaves.of_call(input, linear_weight, linear_bias, None)
    teacher = Teacher(target_input, target_weight, target_bias, target).of_call()
    numbers, low = [float(number) for number in loss[3:]], head.autocast_dtype(input)
    rest = _rest(input, teacher, loss.ignore_index, loss.kind, loss.reduction, numbers, low, None, None)
    wide = torch.promote_types(rest.out, torch.float32)
    if head.is_chunked(leaves, target, rest.head):
        reason = _unsupported(leaves, teacher, rest)
        if reason is None:
            return head_loss.call(METHOD, leaves, teacher, rest._replace(out=wide)), rest.out
        backends.refuse(reason)
    given, weight, bias, _ = teacher.dequantized()
    student = reference.head_scores(*leaves.dequantized(), loss.softcap, loss.logit_scale).to(wide)
    logits = given if weight is None else F.linear(given, weight, bias)  # type: ignore[arg-type]
    scores = reference.capped(logits.to(wide) * loss.target_logit_scale, loss.target_softcap)
    pair = (scores, student) if reverse else (student, scores)
    return reference.divergence(*pair, target, -100, 0.0, loss.temperature, False, "none"), rest.out

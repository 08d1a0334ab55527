"""vocab_parallel_cross_entropy: cross-entropy of logits whose classes are spread over the ranks of a process group.

With the log-sum-exp of its own classes, a rank needs two all-reduces of some numbers a row: the maximum
of these, which keeps the exponentials finite, then their sum and whatever else adds up over the classes. The backward
is local: every rank has the log-sum-exp of all classes by then.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import _reduction

from fastlayers import backends
from fastlayers.ops import reference
from fastlayers.ops.cross_entropy import MEAN, NONE
from fastlayers.ops.pairs import Gradients
from fastlayers.ops.reference import capped

#: Elements that are copied to float32 at once. The logits are the largest tensor of all.
AT_ONCE = 2**24


class Options(NamedTuple):
    """The options of a call; a softcap of 0 means no softcap."""

    group: Any
    vocab_start: int | None
    ignore_index: int
    label_smoothing: float
    softcap: float
    z_loss: float


def _first_class(options: Options, columns: int) -> int:
    return dist.get_rank(options.group) * columns if options.vocab_start is None else options.vocab_start


def _at_once(columns: int) -> int:
    """Rows whose scores are computed in float32 at once."""
    return max(1, AT_ONCE // max(columns, 1))


# What these two look at is the same on all ranks, so that all of them raise, or none. A GPU is not waited for: there it
# is an assertion on the device.


def _check_widths(widest: Tensor, narrowest: Tensor) -> None:
    if widest.is_cuda or torch.compiler.is_compiling():
        torch._assert_async(widest == narrowest)
    elif int(widest) != int(narrowest):
        raise ValueError(
            f"vocab_parallel_cross_entropy(): shards of {int(narrowest)} to {int(widest)} classes need vocab_start"
        )


def _check_owned(owned: Tensor, target: Tensor) -> None:
    """Every class that counts is in exactly one shard."""
    if owned.is_cuda or torch.compiler.is_compiling():
        torch._assert_async((owned == 1.0).all())
    elif not bool((owned == 1.0).all()):
        wrong = owned != 1.0
        raise IndexError(f"Target {int(target[wrong][0])} is in {int(owned[wrong][0])} of the shards; expected one")


def evaluate(rows: Tensor, target: Tensor, options: Options) -> tuple[Tensor, Tensor, Tensor | None]:
    """The loss of each row, its log-sum-exp over all classes, and with label smoothing its share of each class. No
    autograd."""
    group, start, ignore_index, smoothing, softcap, z_loss = options
    columns = rows.shape[1]
    first = _first_class(options, columns)
    kept = target != ignore_index
    mine = kept & (target >= first) & (target < first + columns)
    local, own, summed = _shard(rows, target, first, softcap, smoothing > 0)
    greatest = torch.cat((local, own.new_full((1,), columns), own.new_full((1,), -columns)))
    dist.all_reduce(greatest, dist.ReduceOp.MAX, group)
    if start is None:
        _check_widths(greatest[-2], -greatest[-1])
    greatest = greatest[:-2]
    terms = [torch.exp(local - greatest), torch.where(mine, own, 0.0), mine.to(own.dtype)]
    if summed is not None:
        terms += [summed, torch.full_like(own, columns)]
    sums = torch.stack(terms)
    dist.all_reduce(sums, dist.ReduceOp.SUM, group)
    _check_owned(torch.where(kept, sums[2], 1.0), target)
    lse = greatest + sums[0].log()
    losses = lse - sums[1]
    share = None
    if smoothing:
        share = smoothing / sums[4]
        losses = (1.0 - smoothing) * losses + smoothing * lse - share * sums[3]
    if z_loss:
        losses = losses + z_loss * lse.square()
    return torch.where(kept, losses, 0.0), lse, share


def gradient(dy: Tensor, rows: Tensor, target: Tensor, lse: Tensor, share: Tensor | None, options: Options) -> Tensor:
    """The gradient of the rows, contiguous, for a gradient of each loss. No autograd."""
    return _shard_backward(dy, rows, target, lse, share, _first_class(options, rows.shape[1]), options)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """The losses of the rows, in float32 or float64.

    Keeps the logits, the target, and of each row the log-sum-exp; with label smoothing its share of each class.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, options: Options) -> Tensor:
        flat = target.reshape(-1)
        losses, lse, share = evaluate(logits.detach().reshape(flat.shape[0], logits.shape[-1]), flat, options)
        ctx.save_for_backward(logits, target, lse, share)
        ctx.options = options
        return losses

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Gradients:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "vocab_parallel_cross_entropy() has no second derivative, which create_graph=True asks for: it would"
                " need the logits of the other ranks"
            )
        logits, target, lse, share = ctx.saved_tensors
        flat = target.reshape(-1)
        rows = logits.reshape(flat.shape[0], logits.shape[-1])
        return gradient(dy, rows, flat, lse, share, ctx.options).view(logits.shape), None, None


def losses_of_rows(logits: Tensor, target: Tensor, options: Options) -> Tensor:
    """The losses of the rows, in float32 or float64; 0 where the target is ignored."""
    losses: Tensor = _VocabParallelCrossEntropy.apply(logits, target, options)
    return losses


# ---- a shard ---------------------------------------------------------------------------------------------------------


def _kernels(rows: Tensor) -> Any:
    """The module of the kernels, None where torch's operations serve."""
    if rows.numel() == 0 or torch.compiler.is_compiling() or not backends.generates_kernels(rows.device):
        return None
    from fastlayers.kernels import vocab_parallel

    return vocab_parallel


def _shard(
    rows: Tensor, target: Tensor, first: int, softcap: float, sums: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of each row the log-sum-exp of the scores, that of its class, 0 if another rank has it, and if wanted the sum."""
    kernels, columns = _kernels(rows), rows.shape[1]
    if kernels is not None:
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        return kernels.shard(rows, target.contiguous(), softcap, first, sums)  # type: ignore[no-any-return]
    wide = torch.promote_types(rows.dtype, torch.float32)
    own = rows.new_zeros(target.shape)
    if columns:
        mine = (target >= first) & (target < first + columns)
        own = rows.gather(1, torch.where(mine, target - first, 0).unsqueeze(1)).squeeze(1)
        own = torch.where(mine, own, 0.0)
    found = []
    for part in rows.split(_at_once(columns)):
        scores = capped(part.to(wide), softcap)
        found.append((torch.logsumexp(scores, 1), scores.sum(1) if sums else None))
    local, summed = zip(*found, strict=True)
    return torch.cat(local), capped(own.to(wide), softcap), torch.cat(summed) if sums else None


def _shard_backward(
    dy: Tensor, rows: Tensor, target: Tensor, lse: Tensor, share: Tensor | None, first: int, options: Options
) -> Tensor:
    """The gradient of the rows, contiguous."""
    _, _, ignore_index, smoothing, softcap, z_loss = options
    kernels, columns = _kernels(rows), rows.shape[1]
    if kernels is not None:
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        given = (dy, rows, target.contiguous(), lse, share)
        return kernels.shard_backward(*given, softcap, smoothing, z_loss, first, ignore_index)  # type: ignore[no-any-return]
    gradient = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    of_rows = [t.unsqueeze(1) for t in (lse, dy, lse if share is None else share)]
    parts = [part.split(_at_once(columns)) for part in (rows, target, *of_rows)]
    for out, x, classes, total, factor, uniform in zip(gradient.split(_at_once(columns)), *parts, strict=True):
        scores = capped(x.to(lse.dtype), softcap)
        d = torch.exp(scores - total)
        if z_loss:
            d *= 1.0 + 2.0 * z_loss * total
        mine = (classes >= first) & (classes < first + columns)
        hit = torch.where(mine, smoothing - 1.0, 0.0).to(d.dtype)
        if columns:
            d.scatter_add_(1, torch.where(mine, classes - first, 0).unsqueeze(1), hit.unsqueeze(1))
        if share is not None:
            d -= uniform
        if softcap:
            d *= 1.0 - (scores / softcap).square()
        # Not 0·inf, where all rows are ignored.
        out.copy_(torch.where((classes != ignore_index).unsqueeze(1), d * factor, 0.0))
    return gradient


# ---- which calls -----------------------------------------------------------------------------------------------------


def vocab_parallel_cross_entropy(
    logits: Tensor, target: Tensor, group: Any, vocab_start: int | None, ignore_index: int, reduction: str,
    label_smoothing: float, softcap: float | None, z_loss: float,
) -> Tensor:  # fmt: skip
    if target.dtype != torch.int64 or target.shape != logits.shape[:-1]:
        raise ValueError(
            f"vocab_parallel_cross_entropy(): expected a target of int64 in shape {tuple(logits.shape[:-1])}, as the"
            f" logits have it without their last dimension, but got {target.dtype} in {tuple(target.shape)}"
        )
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be between 0.0 and 1.0. Got: {label_smoothing}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"vocab_parallel_cross_entropy(): expected a softcap above 0 or None, but got {softcap}")
    out = logits.dtype
    if out in reference.LOW_PRECISION and reference.autocasts(logits.device.type):
        out = torch.float32
    code = _reduction.get_enum(reduction)
    options = Options(group, vocab_start, ignore_index, label_smoothing, softcap or 0.0, z_loss)
    losses = losses_of_rows(logits, target, options)
    if code == NONE:
        return losses.view(target.shape).to(out)
    total = losses.sum()
    return (total / (target != ignore_index).sum() if code == MEAN else total).to(out)

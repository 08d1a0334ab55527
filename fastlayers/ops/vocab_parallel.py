"""vocab_parallel_cross_entropy: cross-entropy of logits whose classes are spread over the ranks of a process group.

With the log-sum-exp of its own classes from one pass, a rank needs two all-reduces of some numbers a row: the maximum
of these, which keeps the exponentials finite, then their sum and whatever else adds up over the classes. The backward
is local: every rank has the log-sum-exp of all classes by then.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import _reduction

from fastlayers.ops import reference
from fastlayers.ops.cross_entropy import cross_entropy_chunk_

#: The codes that torch has for ``reduction``.
NONE, MEAN = 0, 1

#: Elements that the backward computes in float32 at once.
AT_ONCE = 2**24


class Options(NamedTuple):
    """What is no tensor. No softcap is 0."""

    group: Any
    vocab_start: int
    reduction: int
    ignore_index: int
    label_smoothing: float
    softcap: float
    z_loss: float
    out: torch.dtype


def _capped(scores: Tensor, softcap: float) -> Tensor:
    return softcap * torch.tanh(scores / softcap) if softcap else scores


def _check_owned(owned: Tensor, target: Tensor) -> None:
    """Every class that counts is in exactly one shard. The counts are the same on all ranks, so all of them raise."""
    if owned.is_cuda:
        torch._assert_async((owned == 1.0).all())
    elif not bool((owned == 1.0).all()):
        wrong = target[owned != 1.0]
        raise IndexError(
            f"Target {int(wrong[0])} is in {int(owned[owned != 1.0][0])} of the shards; expected one. Shards of unequal"
            " width need vocab_start"
        )


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Keeps the logits, the target, and of each row the log-sum-exp; of all rows their number and the classes'."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, options: Options) -> Tensor:
        group, start, reduction, ignore_index, smoothing, softcap, z_loss, out = options
        columns = logits.shape[-1]
        rows, flat = logits.detach().reshape(-1, columns).contiguous(), target.reshape(-1)
        kept = flat != ignore_index
        mine = kept & (flat >= start) & (flat < start + columns)
        classes = torch.where(mine, flat - start, 0)
        own = rows.gather(1, classes.unsqueeze(1)).squeeze(1)
        own = _capped(own.to(torch.promote_types(out, torch.float32)), softcap)
        # -1 is no class: all rows count.
        local = cross_entropy_chunk_(rows, classes, None, -1, 0.0, softcap, 0.0, None, False, columns) + own
        greatest = local.clone()
        dist.all_reduce(greatest, dist.ReduceOp.MAX, group)
        terms = [torch.exp(local - greatest), torch.where(mine, own, 0.0), mine.to(own.dtype)]
        if smoothing:
            missed = cross_entropy_chunk_(rows, classes, None, -1, 1.0, softcap, 0.0, None, False, columns)
            terms += [(local - missed) * columns, torch.full_like(own, columns)]
        sums = torch.stack(terms)
        dist.all_reduce(sums, dist.ReduceOp.SUM, group)
        _check_owned(torch.where(kept, sums[2], 1.0), flat)
        lse = greatest + sums[0].log()
        losses = lse - sums[1]
        share = None
        if smoothing:
            share = smoothing / sums[4]
            losses = (1.0 - smoothing) * losses + smoothing * lse - share * sums[3]
        if z_loss:
            losses = losses + z_loss * lse.square()
        losses = torch.where(kept, losses, 0.0)
        count = kept.sum() if reduction == MEAN else None
        ctx.save_for_backward(logits, target, lse, share, count)
        ctx.options = options
        if reduction == NONE:
            return losses.view(target.shape).to(out)
        return (losses.sum() if count is None else losses.sum() / count).to(out)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "vocab_parallel_cross_entropy() has no second derivative, which create_graph=True asks for: it would"
                " need the logits of the other ranks"
            )
        logits, target, lse, share, count = ctx.saved_tensors
        _, start, _, ignore_index, smoothing, softcap, z_loss, _ = ctx.options
        columns = logits.shape[-1]
        flat = target.reshape(-1)
        scale = dy.reshape(-1).to(lse.dtype).expand(flat.shape)
        if count is not None:
            scale = scale / count
        gradient = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        at_once = max(1, AT_ONCE // max(columns, 1))
        parts = (logits.reshape(-1, columns), gradient.view(-1, columns), flat, lse.unsqueeze(1), scale.unsqueeze(1))
        for x, out, classes, total, factor in zip(*(part.split(at_once) for part in parts), strict=True):
            scores = _capped(x.to(lse.dtype), softcap)
            d = torch.exp(scores - total)
            if z_loss:
                d *= 1.0 + 2.0 * z_loss * total
            mine = (classes >= start) & (classes < start + columns)
            hit = torch.where(mine, smoothing - 1.0, 0.0).to(d.dtype)
            d.scatter_add_(1, torch.where(mine, classes - start, 0).unsqueeze(1), hit.unsqueeze(1))
            if share is not None:
                d -= share[0]
            if softcap:
                d *= 1.0 - (scores / softcap).square()
            # Not 0·inf, where all rows are ignored.
            out.copy_(torch.where((classes != ignore_index).unsqueeze(1), d * factor, 0.0))
        return gradient, None, None


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    group: Any,
    vocab_start: int | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
) -> Tensor:
    if target.dtype != torch.int64 or target.shape != logits.shape[:-1]:
        raise ValueError(
            f"vocab_parallel_cross_entropy(): expected a target of int64 in shape {tuple(logits.shape[:-1])}, as the"
            f" logits have it without their last dimension, but got {target.dtype} in {tuple(target.shape)}"
        )
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be between 0.0 and 1.0. Got: {label_smoothing}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"vocab_parallel_cross_entropy(): expected a softcap above 0 or None, but got {softcap}")
    start = dist.get_rank(group) * logits.shape[-1] if vocab_start is None else vocab_start
    out = logits.dtype
    if out in reference.HALF and torch.is_autocast_enabled(logits.device.type):
        out = torch.float32
    code = _reduction.get_enum(reduction)
    options = Options(group, start, code, ignore_index, label_smoothing, softcap or 0.0, z_loss, out)
    return _VocabParallelCrossEntropy.apply(logits, target, options)  # type: ignore[no-any-return]

"""linear_cross_entropy by a weight whose rows, the classes, are distributed over the ranks of a process group.

Each rank computes the logits of its own classes, chunk by chunk, as :mod:`fastlayers.ops.head` does. A chunk needs two
all-reduces of some numbers a row, those of :mod:`fastlayers.ops.vocab_parallel`. The gradient of the input is a part of
a sum over the ranks, which is left to the caller. :mod:`fastlayers.ops.head_loss` has the autograd Function.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from fastlayers.ops import head, head_loss, vocab_parallel
from fastlayers.ops.head import Gradients, Leaves
from fastlayers.ops.head_loss import Others, Rest
from fastlayers.ops.pairs import Needs


def chunk_size(rows: int) -> int:
    """Rows of a chunk. All ranks need the same chunks, so neither their classes nor their free memory count."""
    count = max(1, min(head.CHUNKS, rows // head.LEAST_ROWS))
    return max(1, -(-rows // (count * head.ROW_TILE))) * head.ROW_TILE


def _sweep(leaves: Leaves, target: Tensor, rest: Rest, scale: Tensor | None, wanted: Needs) -> tuple[Tensor, Gradients]:
    """The loss of each row, and the wanted gradients of ``sum(losses * scale)``, without those of other ranks.

    Rows without a label stay, unlike in :func:`head_loss.sweep`: whether they leave depends on a rank's classes.
    """
    classes, columns = target.reshape(-1), leaves.linear_weight.shape[0]
    wide = torch.promote_types(rest.head.compute, torch.float32)
    losses = torch.zeros(classes.shape[0], dtype=wide, device=target.device)
    if classes.numel() == 0:
        pairs = zip(leaves.tensors, wanted, strict=True)
        return losses, Gradients(*(torch.zeros_like(t) if t is not None and w else None for t, w in pairs))

    def chunk(logits: Tensor, start: int, end: int) -> None:
        own, part = logits[:, :columns], classes[start:end]
        found, lse, share = vocab_parallel.evaluate(own, part, rest.loss)
        losses[start:end] = found
        if any(wanted):
            factor = torch.ones_like(found) if scale is None else scale.expand(classes.shape)[start:end].contiguous()
            own.copy_(vocab_parallel.gradient(factor, own, part, lse, share, rest.loss))
            logits[:, columns:] = 0.0

    low = rest.head.low
    with torch.no_grad(), nullcontext() if low is None else torch.autocast(target.device.type, enabled=False):
        return losses, head.sweep(*leaves[:3], rest.head, chunk, 1.0, wanted)


def _evaluate(leaves: Leaves, others: Others, rest: Rest, wanted: Needs) -> tuple[Tensor, None, Gradients]:
    """The losses of the rows, or their sum; for a mean, that divided by the number of all ranks' rows."""
    target, count = others
    scale = None
    if count is not None:
        # Where all rows are ignored the loss is NaN, and the gradients are 0 as torch's.
        scale = torch.where(count == 0, 0.0, 1.0 / count).to(torch.promote_types(rest.head.compute, torch.float32))
    losses, gradients = _sweep(leaves, target, rest, scale, wanted)
    if not rest.summed:
        return losses, None, gradients
    total = losses.sum()
    return total if count is None else total / count, None, gradients


def _gradients_of_rows(dy: Tensor, leaves: Leaves, others: Others, rest: Rest, wanted: Needs) -> Gradients:
    return _sweep(leaves, others[0], rest, dy, wanted)[1]


def _compose(leaves: Leaves, others: Others, rest: Rest) -> Tensor:
    raise RuntimeError(
        "linear_cross_entropy() of sharded classes has no second derivative, which create_graph=True asks for: it would"
        " need the logits of the other ranks"
    )


#: Of the target and, for a mean, the number of all ranks' rows with a label. The options of the loss are those of
#: :mod:`fastlayers.ops.vocab_parallel`.
METHOD = head_loss.Method(_evaluate, _gradients_of_rows, _compose)

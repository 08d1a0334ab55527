"""linear_cross_entropy by a weight whose rows, the classes, are distributed over the ranks of a process group.

Each rank computes the logits of its own classes, chunk by chunk, as :mod:`fastlayers.ops.head` does. A chunk needs two
all-reduces of some numbers a row, those of :mod:`fastlayers.ops.vocab_parallel`. The gradient of the input is a part of
a sum over the ranks, which is left to the caller.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastlayers.ops import head, vocab_parallel
from fastlayers.ops.cross_entropy import NONE


class Rest(NamedTuple):
    """The arguments that are not tensors."""

    options: vocab_parallel.Options
    head: head.Rest
    reduction: int


def chunk_size(rows: int) -> int:
    """Rows of a chunk. All ranks need the same chunks, so neither their classes nor their free memory count."""
    count = max(1, min(head.CHUNKS, rows // head.LEAST_ROWS))
    return max(1, -(-rows // (count * head.ROW_TILE))) * head.ROW_TILE


def _sweep(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor, rest: Rest, scale: Tensor | None,
    wanted: tuple[bool, ...],
) -> tuple[Tensor, head.Gradients]:  # fmt: skip
    """The loss of each row, and the wanted gradients of ``sum(losses * scale)``, without those of other ranks."""
    classes, columns = target.reshape(-1), linear_weight.shape[0]
    wide = torch.promote_types(rest.head.compute, torch.float32)
    losses = torch.zeros(classes.shape[0], dtype=wide, device=input.device)
    tensors = (input, linear_weight, linear_bias)
    if classes.numel() == 0:
        zeros = (torch.zeros_like(t) if t is not None and w else None for t, w in zip(tensors, wanted, strict=True))
        return losses, head.Gradients(*zeros)

    def chunk(logits: Tensor, start: int, end: int) -> None:
        own, part = logits[:, :columns], classes[start:end]
        found, lse, share = vocab_parallel.evaluate(own, part, rest.options)
        losses[start:end] = found
        if any(wanted):
            factor = torch.ones_like(found) if scale is None else scale.expand(classes.shape)[start:end].contiguous()
            own.copy_(vocab_parallel.gradient(factor, own, part, lse, share, rest.options))
            logits[:, columns:] = 0.0

    low = rest.head.low
    with torch.no_grad(), nullcontext() if low is None else torch.autocast(input.device.type, enabled=False):
        return losses, head.sweep(*tensors, rest.head, chunk, 1.0, wanted)


class VocabParallelHead(torch.autograd.Function):
    """The losses of the rows, or their sum; for a mean, that divided by ``count``, the number of all ranks' rows.

    Keeps its inputs, and the gradients of a sum or a mean, which the first backward multiplies and returns.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor,
        count: Tensor | None, rest: Rest,
    ) -> Tensor:  # fmt: skip
        wanted = ctx.needs_input_grad[:3] if rest.reduction != NONE else (False, False, False)
        scale = VocabParallelHead.scale_of(count, rest)
        losses, gradients = _sweep(input, linear_weight, linear_bias, target, rest, scale, wanted)
        ctx.save_for_backward(input, linear_weight, linear_bias, target, count, *gradients[:3])
        ctx.rest, ctx.returned = rest, False
        if rest.reduction == NONE:
            return losses
        total = losses.sum()
        return total if count is None else total / count

    @staticmethod
    def scale_of(count: Tensor | None, rest: Rest) -> Tensor | None:
        """Where all rows are ignored the loss is NaN, and the gradients are 0 as torch's."""
        if count is None:
            return None
        wide = torch.promote_types(rest.head.compute, torch.float32)
        return torch.where(count == 0, 0.0, 1.0 / count).to(wide)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "linear_cross_entropy() of sharded classes has no second derivative, which create_graph=True asks for:"
                " it would need the logits of the other ranks"
            )
        input, linear_weight, linear_bias, target, count, *ready = ctx.saved_tensors
        tensors, rest, wanted = (input, linear_weight, linear_bias, target), ctx.rest, ctx.needs_input_grad[:3]
        if rest.reduction == NONE:
            return *_sweep(*tensors, rest, dy, wanted)[1][:3], None, None, None
        if ctx.returned:
            found = _sweep(*tensors, rest, VocabParallelHead.scale_of(count, rest), wanted)[1][:3]
        else:
            # Without the version counter: to autograd what it saved for a second backward stays as it was.
            first, second, third = (None if g is None else g.data for g in ready)
            found = (first, second, third)
            ctx.returned = True
        return *(None if g is None else _scale_(g, dy) for g in found), None, None, None


def _scale_(gradient: Tensor, dy: Tensor) -> Tensor:
    """In place: no one else holds the gradient. With one dimension dy is not rounded to the gradient's dtype."""
    return torch.mul(gradient, dy.view(1), out=gradient)

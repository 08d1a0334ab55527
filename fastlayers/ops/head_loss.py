"""Losses of the logits of a head whose forward computes the gradients: what all of them share.

If the loss is a sum over the rows, the pass that computes it computes the gradients as well, and the backward
multiplies them with the incoming gradient, in place. Without a reduction the incoming gradient is a number for each row
that the forward cannot know: the backward then goes through the chunks again. So does a second backward of the same
graph, because the first one returned the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fastlayers.ops import elementwise, guard, head, pairs
from fastlayers.ops.head import LEAVES, FlatGradients, Gradients, Leaves
from fastlayers.ops.pairs import Needs
from fastlayers.ops.quantized import Quantized, without_quantized

#: In float16 dlogits are multiplied by the first, since the softmax of a large vocabulary is below the least normal
#: number, and the gradients come out multiplied by the second, between underflow and overflow. Powers of two: exact.
FLOAT16_DLOGITS, FLOAT16_GRADIENTS = 2.0**8, 2.0**-4

#: None of the leaves wants a gradient.
NOTHING = (False,) * LEAVES

#: The tensors of a loss besides the leaves of its head.
Others: TypeAlias = tuple[Any, ...]
#: What the op of the forward gives: the loss, what is left to multiply the gradients with, and these.
FlatResults: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


class Rest(NamedTuple):
    """The arguments that are not tensors, for autograd.

    Attributes:
        loss: the options of the loss, of which one is its ``ignore_index``.
        head: those of the logits.
        out: dtype of the loss.
        summed: whether the loss is a sum over the rows.
    """

    loss: Any
    head: head.Rest
    out: torch.dtype
    summed: bool


class Method(NamedTuple):
    """How a loss is computed.

    Attributes:
        evaluate: ``(leaves, others, rest, wanted)``: the loss, what is left to multiply the gradients with besides the
            incoming one (None for nothing), and the wanted gradients if the loss is a sum.
        gradients_of_rows: ``(dy, leaves, others, rest, wanted)``: the backward of a loss for each row.
        compose: ``(leaves, others, rest)``: the loss in torch ops, with whole logits.
    """

    evaluate: Callable[[Leaves, Others, Rest, Needs], tuple[Tensor, Tensor | None, Gradients]]
    gradients_of_rows: Callable[[Tensor, Leaves, Others, Rest, Needs], Gradients]
    compose: Callable[[Leaves, Others, Rest], Tensor]


# ---- the sweep through the chunks ------------------------------------------------------------------------------------

#: What is called with a chunk of the logits, the labels of its rows (None without labels), what their losses are
#: multiplied by (of one element or one for each, None for 1), and which rows of all they are. Returns the losses; if
#: gradients are wanted, it puts them in the place of the logits.
Chunk: TypeAlias = Callable[[Tensor, Tensor | None, Tensor | None, slice | Tensor], Tensor]


def sweep(
    leaves: Leaves, target: Tensor | None, rest: Rest, chunk: Chunk, factor: Tensor | None, alpha: float, wanted: Needs
) -> tuple[Tensor, Gradients]:
    """The loss of each row, and the wanted gradients of ``alpha * sum(losses * factor)``.

    Rows without a label are left out of the products.

    Args:
        target: the labels, None where all rows count.
        factor: of one element or one for each row; None is 1.
    """
    count, some = leaves.input.shape[:-1].numel(), leaves
    labels = None if target is None else target.reshape(-1).contiguous()
    kept = None if labels is None else head.labelled(labels, rest.loss.ignore_index, leaves.linear_weight.shape[0])
    each = factor is not None and factor.numel() > 1
    if kept is not None:
        some, labels = leaves.rows(kept), labels[kept]  # type: ignore[index]
        factor = factor[kept] if each else factor  # type: ignore[index]
    wide = torch.promote_types(rest.head.compute, torch.float32)
    losses = torch.empty(count if kept is None else len(kept), dtype=wide, device=leaves.input.device)

    def of_chunk(logits: Tensor, start: int, end: int) -> None:
        rows = slice(start, end)
        of_labels, by = None if labels is None else labels[rows], factor[rows] if each else factor  # type: ignore[index]
        losses[rows] = chunk(logits, of_labels, by, rows if kept is None else kept[rows])

    # Backward may run inside of a region of autocast that the forward was outside of.
    with torch.no_grad(), torch.autocast(leaves.input.device.type, enabled=False):
        found = head.sweep(*some[:3], rest.head, of_chunk, alpha, wanted, some.low_rank)
    if kept is None:
        return losses, found
    return losses.new_zeros(count).index_copy_(0, kept, losses), found.of_all_rows(kept, leaves)


class Scales(NamedTuple):
    """Factors of the gradients: of dlogits, of the products with these, and what is left to multiply with."""

    dlogits: Tensor | None
    alpha: float
    left: Tensor | None

    @classmethod
    def choose(cls, factor: Tensor | None, largest: Tensor, compute: torch.dtype) -> Scales:
        """For the gradients of a sum that is multiplied by ``factor``, of losses that are up to ``largest`` steep."""
        if compute is not torch.float16:
            return cls(factor, 1.0, None)
        # In float16 neither the softmax nor a quotient by thousands of rows is a normal number. The incoming gradient,
        # which a GradScaler scales, comes too late.
        left = (largest if factor is None else largest * factor) / FLOAT16_GRADIENTS
        return cls(FLOAT16_DLOGITS / largest, FLOAT16_GRADIENTS / FLOAT16_DLOGITS, left)


# ---- autograd --------------------------------------------------------------------------------------------------------


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


class HeadLoss(torch.autograd.Function):
    """Keeps references to its tensors, and the gradients of a summed loss, which the first backward returns."""

    @staticmethod
    def forward(ctx: Any, method: Method, rest: Rest, *given: Tensor | Quantized | None) -> Tensor:
        """``given`` are the leaves and the others."""
        wanted = ctx.needs_input_grad[2:][:LEAVES] if rest.summed else NOTHING
        loss, left, gradients = method.evaluate(Leaves(*given[:LEAVES]), given[LEAVES:], rest, wanted)  # type: ignore[arg-type]
        ctx.save_for_backward(left, *gradients, *without_quantized(given))
        ctx.quantized = [t if isinstance(t, Quantized) else None for t in given]
        ctx.method, ctx.rest, ctx.returned = method, rest, False
        return loss

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        (left, *ready), tensors = saved[: LEAVES + 1], saved[LEAVES + 1 :]
        given = [t if weight is None else weight for t, weight in zip(tensors, ctx.quantized, strict=True)]
        leaves, others = Leaves(*given[:LEAVES]), tuple(given[LEAVES:])
        method, rest, wanted = ctx.method, ctx.rest, ctx.needs_input_grad[2:][:LEAVES]
        if guard.needs_double_backward(dy):
            found = _decomposed_backward(dy, method, leaves, others, rest, wanted)
        elif not rest.summed:
            found = method.gradients_of_rows(dy, leaves, others, rest, wanted)
        else:
            if ctx.returned:
                _, left, gradients = method.evaluate(leaves, others, rest, wanted)
            else:
                # Without the version counter: to autograd what it saved for a second backward stays as it was.
                gradients = Gradients(*(g if g is None else g.data for g in ready))
                ctx.returned = True
            factor = dy if left is None else dy * left
            found = Gradients(*(_scale_(g, factor) for g in gradients))
        return None, None, *found, *(None for _ in others)


def _decomposed_backward(
    dy: Tensor, method: Method, leaves: Leaves, others: Others, rest: Rest, wanted: Needs
) -> Gradients:
    """The backward in torch ops, with whole logits, for second derivatives."""

    def compose(*tensors: Any) -> Tensor:
        return method.compose(Leaves.kept(leaves.quantized, *tensors), others, rest)

    low, device = rest.head.low, dy.device.type
    with torch.autocast(device, low, enabled=low is not None):
        return Gradients(*pairs.differentiate(compose, leaves.tensors, wanted, dy))


def call(method: Method, leaves: Leaves, others: Others, rest: Rest) -> Tensor:
    """The loss of a call that goes through chunks."""
    if guard.wants_gradient(*leaves.tensors):
        return HeadLoss.apply(method, rest, *leaves, *others)  # type: ignore[no-any-return]
    return method.evaluate(leaves, others, rest, NOTHING)[0]


# ---- torch.compile ---------------------------------------------------------------------------------------------------
# A compiled graph keeps the chunks, as one op with a fake implementation: Inductor would have the logits whole. Its
# backward multiplies out of place, which Inductor may undo.


def run(method: Method, leaves: Leaves, others: Others, rest: Rest, wanted: Sequence[bool]) -> FlatResults:
    """The forward as an op; empty tensors where there is none."""
    needs = tuple(wanted) if rest.summed else NOTHING
    loss, left, gradients = method.evaluate(leaves, others, rest, needs)
    left = leaves.input.new_empty(0) if left is None else left
    return loss, left, *head.flatten_gradients(gradients, leaves.input)


def describe(loss: tuple[int, ...], leaves: Leaves, rest: Rest, wanted: Sequence[bool]) -> FlatResults:
    """:func:`run` without values, for a loss of that shape."""
    input, needs = leaves.input, tuple(wanted) if rest.summed else NOTHING
    scaled = rest.head.compute is torch.float16 and any(needs)
    left = input.new_empty((), dtype=torch.float32) if scaled else input.new_empty(0)
    return input.new_empty(loss, dtype=rest.out), left, *head.describe_gradients(leaves, needs)


def run_again(
    method: Method, dy: Tensor, leaves: Leaves, others: Others, rest: Rest, wanted: Sequence[bool]
) -> FlatGradients:
    """The backward of a loss for each row as an op; empty tensors where no gradient is needed."""
    return head.flatten_gradients(method.gradients_of_rows(dy, leaves, others, rest, tuple(wanted)), leaves.input)


def scaled(dy: Tensor, left: Tensor, gradients: Sequence[Tensor], needs: Needs) -> tuple[Tensor, ...]:
    """The backward of a summed loss in a graph."""
    factor = dy * left if left.dim() == 0 else dy
    return tuple(_scaled(g, factor) if needed else g for g, needed in zip(gradients, needs, strict=True))


def _scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    return gradient * factor if factor.dtype is gradient.dtype else (gradient * factor.view(1)).to(gradient.dtype)


def no_second_derivative(name: str) -> RuntimeError:
    return RuntimeError(
        f"fastlayers::{name} has no second derivative, which create_graph=True asks for; outside of torch.compile"
        f" functional.{name} has one"
    )

"""Batch norms, and convolutions with a bias, that add the residual which follows them in a program.

A rule fuses a norm with the sum and the ReLU after it where one forward has all three. In many networks the norm is at
the end of a child, and the sum in the block that calls it: RegNet of timm, ResNet of transformers. A program has what
both compute, forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fastlayers.ops.batch_norm import RELU
from fastlayers.patching.fusion.fusable import called
from fastlayers.patching.fusion.matcher import Edit, Match, Op, Patterns, Row
from fastlayers.patching.program.program import Operation, Program, Value, storage, written_by

__all__ = ["with_residuals"]

#: x + y and its ReLU; the second also packs where that was positive into bits, for its backward.
ADDS_RELU = ("add_relu", "add_relu_train")


@dataclass(frozen=True)
class Backward:
    """The places of the arguments of a norm's backward: the residual's bits, the activation, and whether the residual
    needs a gradient; and that of this gradient among the results."""

    name: str
    bits: int
    act: int
    asks: int
    gradient: int


@dataclass(frozen=True)
class Norm:
    """The places of a kernel's arguments for a residual.

    Attributes:
        residual, act: the residual, and the code of the activation.
        bits: whether the last result says in bits where the ReLU was positive; None for a kernel that writes its first
            argument and has no backward.
        stats: the place among its results of what only its backward reads.
    """

    residual: int
    act: int
    bits: int | None = None
    stats: int = 0
    backward: Backward | None = None


OF_NORM = Backward("batch_norm_backward", 7, 8, 9, 1)
NORMS = {
    "batch_norm_train": Norm(7, 8, 9, 1, OF_NORM),
    "batch_norm_eval": Norm(6, 7, 8, 1, OF_NORM),
    "convolution_norm_autocast": Norm(2, 9, 10, 3, Backward("convolution_norm_autocast_backward", 5, 9, 16, 2)),
    "channel_bias_act_": Norm(2, 3),
}


def joined(match: Match) -> Edit | None:
    """A norm in the place of the sum that one of its results is a term of."""
    total = match.root
    if total.kwargs or len(total.operands) != 2:
        return None
    for y, residual in (total.operands, total.operands[::-1])[: 1 if total.effect else 2]:
        norm = norm_of(match, y)
        if norm is not None and alike([match.t(name) for name in (y, residual, total.makes[0] or y)]):
            edit = with_residual(match, norm, y, residual)
            if edit is not None:
                return edit
    return None


def alike(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors have one dtype and one layout."""
    return len({(t.shape, t.stride(), t.dtype, t.device) for t in tensors}) == 1


def norm_of(match: Match, name: str) -> Operation | None:
    """The norm without residual and activation that makes this value, which nothing but the sum reads, and that may as
    well come where the sum is."""
    program, values, total, place = match.program, match.program.values, match.root, match.place
    memory = storage(values[name])

    def memories(names: Iterable[str]) -> set[int]:
        return {storage(values[n]) for n in names if n}

    def touches(operation: Operation) -> bool:
        return memory in memories((*operation.uses, *operation.makes))

    at = next((i for i in reversed(range(place)) if touches(program.forward[i])), None)
    norm = program.forward[at] if at is not None else total
    kind = NORMS.get(called(norm))
    if at is None or kind is None or len(norm.args) <= max(kind.residual, kind.act, kind.bits or 0):
        return None
    makes = norm.args[0].name if kind.bits is None else norm.makes[0]
    if makes != name or norm.args[kind.residual] is not None or norm.args[kind.act] != 0:
        return None
    if not total.effect:  # The sum is somewhere else, and the norm's result gone.
        others = (*program.forward[place + 1 :], *program.backward)
        if memory in memories((*program.inputs, *program.needed)) or any(map(touches, others)):
            return None
    # Between its place and the sum's nobody may notice that it comes later.
    between = program.forward[at + 1 : place]
    read = memories(n for operation in (*between, total) for n in operation.uses if n != name)
    changes = memories(norm.makes) | written_by([norm], values).keys()
    moves = read.isdisjoint(changes) and memories(norm.uses).isdisjoint(written_by(between, values))
    return norm if moves else None


def given(operation: Operation, others: Mapping[int, Any], makes: Iterable[str]) -> Operation:
    """The operation with other arguments at these places, and other results."""
    args = tuple(others.get(i, arg) for i, arg in enumerate(operation.args))
    return replace(operation, args=args, makes=tuple(makes))


def with_residual(match: Match, norm: Operation, y: str, residual: str) -> Edit | None:
    """The norm in the sum's place; None if the backward is not one that it has a kernel for."""
    total, kind = match.root, NORMS[called(norm)]
    arguments = {kind.residual: Value(residual), kind.act: RELU if called(total) in ADDS_RELU else 0}
    (out, *bits), makes, steps = total.makes, norm.makes, list[tuple[Operation, Sequence[Operation]]]()
    if bits:
        backward = with_bits(match.program, norm, kind, bits[0])
        if kind.bits is None or backward is None:
            return None
        steps += backward
        arguments[kind.bits] = True
        makes = (*makes[:-1], bits[0])
    if kind.bits is not None:
        makes = (out or y, *makes[1:])
    names = {out: y} if kind.bits is None and out else {}
    return Edit([*steps, (norm, ()), (total, [given(norm, arguments, makes)])], names)


def with_bits(
    program: Program, of: Operation, kind: Norm, bits: str
) -> Sequence[tuple[Operation, Sequence[Operation]]] | None:
    """The backward of the ReLU in that of the norm, which gives the residual its gradient."""
    operations, places, values = program.backward, kind.backward, program.values
    of_relu = [i for i, operation in enumerate(operations) if bits in operation.uses]
    of_norm = [i for i, operation in enumerate(operations) if of.makes[kind.stats] in operation.uses]
    if places is None or len(of_relu) != 1 or len(of_norm) != 1:
        return None
    (first,), (second,) = of_relu, of_norm
    relu, norm, between = operations[first], operations[second], operations[first:second]
    if called(relu) != "relu_backward" or called(norm) != places.name or norm.args[0] != Value(relu.makes[0]):
        return None
    # The norm's comes where the ReLU's is.
    d, written = relu.makes[0], written_by(between, values)
    made = {name for operation in between[1:] for name in operation.makes}
    moves = made.isdisjoint(norm.uses) and not any(storage(values[name]) in written for name in norm.uses)
    if not moves or not alike([values[d], values[of.makes[0]]]):
        return None
    others = {name for i, operation in enumerate(operations) if i != second for name in operation.uses}
    asks = d in others or d in program.wanted
    arguments = {0: relu.args[0], places.bits: Value(bits), places.act: RELU, places.asks: asks}
    makes = ((d if asks else "") if i == places.gradient else name for i, name in enumerate(norm.makes))
    return [(relu, [given(norm, arguments, makes)]), (norm, ())]


with_residuals = Patterns(Row(Op("add.Tensor", "add_.Tensor", *ADDS_RELU), joined, "forward"), in_turn=True)

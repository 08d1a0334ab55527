"""Batch norms, and convolutions with a bias, that add the residual which follows them in a program.

A rule fuses a norm with the sum and the ReLU after it where one forward has all three. In many networks the norm is at
the end of a child, and the sum in the block that calls it: RegNet of timm, ResNet of transformers. A program has what
both compute, forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fastlayers.ops.batch_norm import RELU
from fastlayers.patching.fusion.matcher import Edit, Match, Op, Patterns, Row
from fastlayers.patching.program.operators import argument, called, with_arguments
from fastlayers.patching.program.program import Operation, Program, Value, storage, written_by

__all__ = ["with_residuals"]

#: x + y and its ReLU; the second also packs where that was positive into bits, for its backward.
ADDS_RELU = ("add_relu", "add_relu_train")


@dataclass(frozen=True)
class Norm:
    """What is to be known of a kernel, besides the names of its arguments.

    Attributes:
        stats: the place among its results of what only its backward reads.
        backward: the kernel that differentiates it, if it has one; it writes its first argument if not.
        gradient: the place of the residual's gradient among the results of that.
    """

    stats: int = 0
    backward: str = ""
    gradient: int = 0


NORMS = {
    "batch_norm_train": Norm(1, "batch_norm_backward", 1),
    "batch_norm_eval": Norm(1, "batch_norm_backward", 1),
    "convolution_norm_autocast": Norm(3, "convolution_norm_autocast_backward", 2),
    "channel_bias_act_": Norm(),
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
    looks = [(t.shape, t.stride(), t.dtype, t.device) for t in tensors]
    return all(each == looks[0] for each in looks)


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
    if at is None or kind is None:
        return None
    makes = norm.makes[0] if kind.backward else norm.args[0].name
    if makes != name or argument(norm, "residual") is not None or argument(norm, "act") != 0:
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


def with_residual(match: Match, norm: Operation, y: str, residual: str) -> Edit | None:
    """The norm in the sum's place; None if the backward is not one that it has a kernel for."""
    total, kind = match.root, NORMS[called(norm)]
    arguments: dict[str, Any] = {"residual": Value(residual), "act": RELU if called(total) in ADDS_RELU else 0}
    (out, *bits), makes, steps = total.makes, norm.makes, list[tuple[Operation, Sequence[Operation]]]()
    if bits:
        backward = with_bits(match.program, norm, kind, bits[0])
        if backward is None:
            return None
        steps += backward
        arguments["bits"] = True
        makes = (*makes[:-1], bits[0])
    names = {}
    if kind.backward:
        makes = (out or y, *makes[1:])
    elif out:
        names[out] = y
    return Edit([*steps, (norm, ()), (total, [with_arguments(norm, makes, **arguments)])], names)


def with_bits(
    program: Program, of: Operation, kind: Norm, bits: str
) -> Sequence[tuple[Operation, Sequence[Operation]]] | None:
    """The backward of the ReLU in that of the norm, which gives the residual its gradient."""
    operations, values = program.backward, program.values
    of_relu = [i for i, operation in enumerate(operations) if bits in operation.uses]
    of_norm = [i for i, operation in enumerate(operations) if of.makes[kind.stats] in operation.uses]
    if len(of_relu) != 1 or len(of_norm) != 1:
        return None
    (first,), (second,) = of_relu, of_norm
    relu, norm, between = operations[first], operations[second], operations[first:second]
    if called(relu) != "relu_backward" or called(norm) != kind.backward or norm.args[0] != Value(relu.makes[0]):
        return None
    # The norm's comes where the ReLU's is.
    d, written = relu.makes[0], written_by(between, values)
    made = {name for operation in between[1:] for name in operation.makes}
    moves = made.isdisjoint(norm.uses) and not any(storage(values[name]) in written for name in norm.uses)
    if not moves or not alike([values[d], values[of.makes[0]]]):
        return None
    others = {name for i, operation in enumerate(operations) if i != second for name in operation.uses}
    asks = d in others or d in program.wanted
    makes = ((d if asks else "") if i == kind.gradient else name for i, name in enumerate(norm.makes))
    joined = with_arguments(norm, makes, dy=relu.args[0], bits=Value(bits), act=RELU, dresidual=asks)
    return [(relu, [joined]), (norm, ())]


with_residuals = Patterns(Row(Op("add.Tensor", "add_.Tensor", *ADDS_RELU), joined, "forward"), in_turn=True)

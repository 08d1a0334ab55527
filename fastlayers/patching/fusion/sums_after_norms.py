"""Batch norms, and convolutions with a bias, that add the residual which follows them in a program.

A rule fuses a norm with the sum and the ReLU after it where one forward has all three. In many networks the norm is at
the end of a child, and the sum in the block that calls it: RegNet of timm, ResNet of transformers. A program has what
both compute, forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastlayers.ops.batch_norm import RELU
from fastlayers.patching.fusion.fusable import kernel_name
from fastlayers.patching.program.program import Operation, Program, Value, keeping, renamed, storage, written_by

__all__ = ["with_residuals"]

ADDS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)
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


def with_residuals(program: Program) -> Program:
    """The program with such kernels in place of norms and sums."""
    values = program.values
    place = 0
    while place < len(program.forward):
        joined = with_norm(program, values, place)
        place += joined is None
        program = joined or program
    return program


def with_norm(program: Program, values: Mapping[str, Tensor], place: int) -> Program | None:
    """The program with the norm that makes one term of a sum in its place, and the sum in that; None without a norm."""
    total = program.forward[place]
    if not (total.function in ADDS or kernel_name(total) in ADDS_RELU) or total.kwargs or len(total.operands) != 2:
        return None
    for y, residual in (total.operands, total.operands[::-1])[: 1 if total.effect else 2]:
        at = place_of_norm(program, values, place, y)
        if at is not None and alike([values[name] for name in (y, residual, total.makes[0] or y)]):
            joined = rewritten(program, values, at, place, y, residual)
            if joined is not None:
                return joined
    return None


def alike(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors have one dtype and one layout."""
    return len({(t.shape, t.stride(), t.dtype, t.device) for t in tensors}) == 1


def place_of_norm(program: Program, values: Mapping[str, Tensor], place: int, name: str) -> int | None:
    """Where a norm without residual and activation makes this value, which nothing but the sum at a place reads."""
    memory = storage(values[name])

    def memories(names: Iterable[str]) -> set[int]:
        return {storage(values[n]) for n in names if n}

    def touches(operation: Operation) -> bool:
        return memory in memories((*operation.uses, *operation.makes))

    at = next((i for i in reversed(range(place)) if touches(program.forward[i])), None)
    if at is None:
        return None
    norm, total = program.forward[at], program.forward[place]
    kind = NORMS.get(kernel_name(norm))
    if kind is None or len(norm.args) <= max(kind.residual, kind.act, kind.bits or 0):
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
    return at if read.isdisjoint(changes) and memories(norm.uses).isdisjoint(written_by(between, values)) else None


def given(operation: Operation, others: Mapping[int, Any]) -> Operation:
    """The operation with other arguments at these places."""
    return replace(operation, args=tuple(others.get(i, arg) for i, arg in enumerate(operation.args)))


def rewritten(
    program: Program, values: Mapping[str, Tensor], at: int, place: int, y: str, residual: str
) -> Program | None:
    """The program with the norm at a place in the sum's; None if the backward is not one that it has a kernel for."""
    norm, total = program.forward[at], program.forward[place]
    kind, has_relu = NORMS[kernel_name(norm)], kernel_name(total) in ADDS_RELU
    arguments = {kind.residual: Value(residual), kind.act: RELU if has_relu else 0}
    out, *bits = total.makes
    makes = norm.makes
    if bits:
        backward = with_bits(program, values, norm, kind, bits[0])
        if kind.bits is None or backward is None:
            return None
        program = replace(program, backward=backward)
        arguments[kind.bits] = True
        makes = (*makes[:-1], bits[0])
    forward = list(program.forward)
    if kind.bits is not None:
        makes = (out or y, *makes[1:])
    forward[place] = replace(given(norm, arguments), makes=makes)
    del forward[at]
    program = keeping(replace(program, forward=forward))
    return renamed(program, {out: y}) if kind.bits is None and out else program


def with_bits(
    program: Program, values: Mapping[str, Tensor], of: Operation, kind: Norm, bits: str
) -> list[Operation] | None:
    """The backward with the ReLU's in that of the norm, which gives the residual its gradient."""
    operations, places = program.backward, kind.backward
    of_relu = [i for i, operation in enumerate(operations) if bits in operation.uses]
    of_norm = [i for i, operation in enumerate(operations) if of.makes[kind.stats] in operation.uses]
    if places is None or len(of_relu) != 1 or len(of_norm) != 1:
        return None
    (first,), (second,) = of_relu, of_norm
    relu, norm, between = operations[first], operations[second], operations[first:second]
    if kernel_name(relu) != "relu_backward" or kernel_name(norm) != places.name or norm.args[0] != Value(relu.makes[0]):
        return None
    d, written = relu.makes[0], written_by(between, values)
    made = {name for operation in between[1:] for name in operation.makes}
    moves = made.isdisjoint(norm.uses) and not any(storage(values[name]) in written for name in norm.uses)
    if not moves or not alike([values[d], values[of.makes[0]]]):
        return None
    others = {name for i, operation in enumerate(operations) if i != second for name in operation.uses}
    asks = d in others or d in program.wanted
    arguments = {0: relu.args[0], places.bits: Value(bits), places.act: RELU, places.asks: asks}
    makes = tuple((d if asks else "") if i == places.gradient else made for i, made in enumerate(norm.makes))
    return [
        *operations[:first],
        replace(given(norm, arguments), makes=makes),
        *between[1:],
        *operations[second + 1 :],
    ]

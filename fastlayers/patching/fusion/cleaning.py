"""What a program has before other passes look at it: numbers where tensors are the same in every call, and each value
once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fastlayers.patching.fusion.matcher import Match, Op, Patterns, Row
from fastlayers.patching.program.operators import called
from fastlayers.patching.program.program import Operation, Program, Value, keeping, storage, with_names

__all__ = ["with_numbers", "without_repetitions"]

#: Operations with a tensor for a number, and with the number.
SCALARS = {f"{name}.Tensor": getattr(torch.ops.aten, name).Scalar for name in ("add", "sub", "mul", "div")}


def by_number(match: Match) -> Sequence[Operation] | None:
    """An operation with a number in place of a tensor on the CPU that is the same in every call, as in
    ``x / torch.tensor(8)``. A kernel cannot read those."""
    x, other = match.root.args[:2]
    number = number_of(other.name, match.program) if isinstance(other, Value) else None
    if number is None or not match.t(x).is_floating_point() or match.t(match.out).dtype is not match.t(x).dtype:
        return None
    return [replace(match.root, function=SCALARS[called(match.root)], args=(x, number))]


def number_of(name: str, program: Program) -> Any:
    """The number that a value on the CPU is in every call; None for another one."""
    t, maker = program.values[name], program.makers.get(name)
    if t.dim() > 0 or t.device.type != "cpu":
        return None
    if name in program.constants:
        return t.item()
    if maker is None or not maker.single or maker.effect or not maker.uses:
        return None
    return t.item() if all(number_of(operand, program) is not None for operand in maker.uses) else None


with_numbers = Patterns(Row(Op(*SCALARS), by_number))


def without_repetitions(program: Program) -> Program:
    """The program with each value computed once: autocast, for one, casts the input of each of three projections."""
    values = program.values
    known: dict[Any, Operation] = {}
    same: dict[str, str] = {}
    made: list[Operation | None] = []
    there = set(program.kept)  # in the backward
    for place, given in enumerate(program.operations):
        in_backward = place >= len(program.forward)
        operation = given if same.keys().isdisjoint(given.uses) else with_names(given, same)
        touched = {storage(values[name]) for name in (*given.uses, *filter(None, given.makes))}
        if not operation.effect and program.writers.keys().isdisjoint(touched):
            earlier = known.setdefault((operation.function, repr(operation.args), repr(operation.kwargs)), operation)
            pairs = [(a, b) for a, b in zip(operation.makes, earlier.makes, strict=True) if a]
            is_there = not in_backward or all(b in there for _, b in pairs)
            if earlier is not operation and is_there and all(a not in program.results for a, _ in pairs):
                same |= dict(pairs)
                made.append(None)
                continue
        made.append(operation)
        if in_backward:
            there.update(operation.makes)
    wanted = tuple(name and same.get(name, name) for name in program.wanted)
    return keeping(replace(program.with_operations(made), wanted=wanted))

"""Generated kernels for what a program computes element by element.

What rules leave of a forward, and autograd makes of it, is chains of pointwise operations, copies into another layout
and sums, each of them a pass over memory. Here they are joined: a value that only other such operations read is not
stored but computed where it is read, through views, slices and concatenations, by a kernel of
:mod:`fastlayers.kernels.generated`. A backward computes what the forward would have to keep again, where that reads
less memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from fastlayers.kernels.formulas import ROUNDED
from fastlayers.kernels.generated import Kernel, compile_together
from fastlayers.kernels.symbolic import conditions
from fastlayers.patching.fusion.fusable import WHOLE, in_new_memory, is_dense, is_fusable
from fastlayers.patching.fusion.lowering import IN_PLACE, lowered
from fastlayers.patching.fusion.recomputed import Recomputed
from fastlayers.patching.fusion.schedule import Fusion
from fastlayers.patching.program.numbers import shaped, with_symbols
from fastlayers.patching.program.operators import kernel_name, spelled
from fastlayers.patching.program.program import (
    Operation,
    Program,
    alive,
    is_followed,
    keeping,
    storage,
    with_names,
    written,
)
from fastlayers.patching.program.shapes import Look, Shaped

__all__ = ["with_kernels"]


def with_kernels(program: Program) -> Program:
    """The program with generated kernels, which are compiled.

    ``values`` gains what these make, and another name for a value after it was written in place.
    """
    values = program.values
    unfused: set[int] = set()
    refused: frozenset[str] = frozenset()
    while True:
        attempt, functional = functionalized(program, values, unfused)
        in_torch, origins = lowered(attempt, refused)
        with conditions() as assumed:
            looks = shaped(values, program.symbols)
        done, fusions = both_ways(in_torch, looks)
        alone = refused.union(*(fusion.alone(origins) for fusion in fusions))
        if alone != refused:
            refused = alone
            unfused.clear()
            continue
        # What was written in place is, unless it is fused.
        left = {
            place
            for place, operation in functional.items()
            if any(o is operation for o in (*done.forward, *done.backward))
        }
        if not left:
            done = done.with_operations(at(operation, program.place) for operation in done.operations)
            kernels = [o.function for o in (*done.forward, *done.backward) if isinstance(o.function, Kernel)]
            compile_together(list(dict.fromkeys(kernels)))
            assumed |= dict.fromkeys(each for fusion in fusions for group in fusion.made for each in group.assumed)
            return replace(done, conditions=tuple(assumed))
        unfused |= left


def at(operation: Operation, place: str) -> Operation:
    """The operation, where it calls a generated kernel by a name that says where that is used."""
    if not (place and isinstance(operation.function, Kernel)):
        return operation
    return replace(operation, function=operation.function.at(place))


def both_ways(program: Program, values: Mapping[str, Shaped]) -> tuple[Program, list[Fusion]]:
    """The program with the kernels of both directions, and how they were made."""
    fusions: list[Fusion] = []
    if program.symbols:
        forward, backward = (with_symbols(each, program.symbols) for each in (program.forward, program.backward))
        program = replace(program, forward=forward, backward=backward)
    narrow = rounded_later(program.operations, values, (*program.results, *program.wanted))
    if program.grads:
        wanted = [name for name in program.wanted if name is not None]
        read: set[str] = set()
        while True:
            again = Recomputed(program, values, read)
            fusions = [Fusion(program.backward, values, wanted, wanted, narrow, again)]
            backward = fusions[0].operations()
            used = frozenset().union(*(operation.uses for operation in backward), wanted)
            if used.isdisjoint(again.computed):
                break
            read |= used & again.computed  # An operation that was not fused after all.
        program = keeping(replace(program, backward=backward))
    needed = [*program.results, *program.kept]
    fusions.append(Fusion(alive(program.forward, needed), values, needed, program.results, narrow))
    return replace(program, forward=fusions[-1].operations()), fusions


def rounded_later(
    operations: Sequence[Operation], values: Mapping[str, Look], needed: Iterable[str | None]
) -> frozenset[str]:
    """The values of which only what is rounded to 16 bits is seen: by casts, or by results of formulas."""
    seen_whole = set(needed)
    found: set[str] = set()
    for operation in reversed(operations):
        made = [name for name in operation.makes if name]
        found.update(name for name in made if name not in seen_whole)
        rounds = all(values[name].dtype in ROUNDED or name in found for name in made)
        pointwise = is_followed(operation, values) or (
            is_fusable(operation, values) and spelled(operation) not in WHOLE
        )
        if not (rounds and pointwise):
            seen_whole |= operation.uses
    return frozenset(found - seen_whole)


# -- operations --------------------------------------------------------------------------------------------------------


def functionalized(
    program: Program, values: dict[str, Tensor], unfused: set[int]
) -> tuple[Program, dict[int, Operation]]:
    """The program with pointwise operations in place as ones that return another tensor, by their places."""
    operations, split = program.operations, len(program.forward)
    made: dict[int, Operation] = {}
    renamed: dict[str, str] = {}
    results: list[Operation] = []
    latest: list[dict[str, str]] = []
    for place, given in enumerate(operations):
        operation = given if renamed.keys().isdisjoint(given.uses) else with_names(given, renamed)
        if place == split:
            latest.append(dict(renamed))
        functional = functional_of(operation) if place not in unfused else None
        if functional is not None and owns_its_memory(operations, place, given.args[0].name, program, values):
            target = given.args[0].name
            renamed[target] = name = f"{target}_{place}"
            values[name] = values[target]
            operation = made[place] = Operation(functional, operation.args, operation.kwargs, (name,), True, False)
        results.append(operation)
    if not made:
        return program, made
    after_forward = latest[0] if latest else renamed

    def final(names: Iterable[Any], known: Mapping[str, str]) -> tuple[Any, ...]:
        return tuple(known.get(name, name) for name in names)

    return replace(
        program,
        forward=results[:split],
        backward=results[split:],
        results=final(program.results, after_forward),
        kept=tuple(sorted(final(program.kept, after_forward))),
        wanted=final(program.wanted, renamed),
    ), made


def functional_of(operation: Operation) -> Any:
    """The operation that returns what a pointwise one writes over its first argument. That of a kernel is only there to
    be lowered."""
    return operation.function if kernel_name(operation) in IN_PLACE else in_new_memory(operation)


def owns_its_memory(
    operations: Sequence[Operation], place: int, name: str, program: Program, values: Mapping[str, Look]
) -> bool:
    """Whether nothing but this value and views that are made later looks at its memory from an operation on."""
    if name in program.inputs or name in program.grads or not is_dense(values[name]):
        return False
    own = storage(values[name])
    before = {n for operation in operations[:place] for n in operation.makes if n and storage(values[n]) == own}
    if before != {name}:
        return False
    return all(
        n == name or n in before or not operation.effect or operation is operations[place]
        for operation in operations[place:]
        for n in written(operation)
        if storage(values[n]) == own
    )

"""What is legal in a recorded program, between any two passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch._ops import OpOverload

from fastlayers.patching.program.program import Operation, Program

__all__ = ["ENABLED", "lint"]

#: Whether the program of each pass is checked: the tests say so.
ENABLED = False


def lint(program: Program) -> None:
    """Check a program.

    Raises:
        ValueError: a value is read before it is made, made twice, or nowhere; or its geometry is not known.
    """
    values = program.values
    there = made_by(program.forward, program.inputs, values, "forward")
    missing = {*program.results, *program.kept} - there
    if missing:
        raise ValueError(f"the forward returns or keeps {sorted(missing)}, and does not make them")
    if program.grads:
        there = made_by(program.backward, (*program.kept, *program.grads), values, "backward")
        missing = {name for name in program.wanted if name} - there
        if missing:
            raise ValueError(f"the backward returns {sorted(missing)}, and does not make them")


def made_by(operations: Sequence[Operation], given: Sequence[str], values: Mapping[str, Tensor], part: str) -> set[str]:
    """The values that are there after these operations."""
    there = set(given)
    for place, operation in enumerate(operations):
        where = f"operation {place} of the {part}, {operation.function},"
        if not operation.uses <= there:
            raise ValueError(f"{where} reads {sorted(operation.uses - there)}, which nothing before it makes")
        made = [name for name in operation.makes if name]
        again = [name for name in made if name in there and not operation.view]
        if again:
            raise ValueError(f"{where} makes {again} again")
        if isinstance(operation.function, OpOverload) and not values.keys() >= set(made):
            raise ValueError(f"{where} makes {[name for name in made if name not in values]}, of unknown geometry")
        there.update(made)
    return there

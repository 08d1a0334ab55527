"""Values that a backward computes again of what is kept anyway, by the kernel that the forward has.

- The product of a gate, ``act(gate)·up``, of which an adapter's gradient makes use: gate and up are kept for their own
  gradients. One pass over memory saves a third of what a gated MLP keeps, as the backward of
  :class:`fastlayers.ops.glu.GatedLinear` does where no adapter stands beside the linear layer.
- A product of a thin factor. DoRA scales the columns of ``x·Wᵀ + s·u·Bᵀ``, so that its gradient needs ``u·Bᵀ``: 4 bytes
  for each element of the result. The factor u is kept anyway, and to multiply it once more only writes what would have
  been kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fastlayers.kernels.low_rank import thin_product
from fastlayers.patching.fusion.matcher import Match, Op, Patterns, Row, new, views_of
from fastlayers.patching.program.operators import called
from fastlayers.patching.program.program import Operation, Program, with_names

__all__ = ["with_values_again"]


def computed_again(match: Match) -> Sequence[Operation] | None:
    """An operation of the backward on such values, which are computed just before their first use: they are as large
    as what would have been kept."""
    program, names = match.program, dict[str, str]()
    for name in match.root.operands:
        chain = chain_of(name, program) if name in program.kept and name not in program.results else []
        if any(program.is_written(each.makes[0]) for each in chain):
            continue
        for each in chain:
            (made,) = each.makes

            def again(operation: Operation = each, made: str = made) -> Operation:
                return replace(with_names(operation, names), makes=(new(program, program.values[made]),))

            names[made] = match.shared(made, again).name
    return [with_names(match.root, names)] if names else None


def chain_of(name: str, program: Program) -> list[Operation]:
    """The operation that makes a value again, and the views before and after it; none for another value, and if what
    it is computed of is not kept."""
    after, source = views_of(name, program)
    maker = program.makers.get(source)
    if maker is None or not is_cheap(maker, program):
        return []
    before: list[Operation] = []
    for operand in maker.operands:
        views, source = views_of(operand, program, until=program.kept)
        if source not in program.kept:
            return []
        before += [view for view in views if view not in before]
    return [*before, maker, *after]


def is_cheap(operation: Operation, program: Program) -> bool:
    """Whether an operation does little more than write its result."""
    if called(operation) != "mm":
        return called(operation) == "gated_forward"
    factor = program.makers.get(operation.args[0].name)
    return factor is not None and factor.function is thin_product


with_values_again = Patterns(Row(Op(), computed_again, "backward"))

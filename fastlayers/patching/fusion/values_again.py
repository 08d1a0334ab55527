"""Values that a backward computes again of what is kept anyway, by the kernel that the forward has.

- The product of a gate, ``act(gate)·up``, of which an adapter's gradient makes use: gate and up are kept for their own
  gradients. One pass over memory saves a third of what a gated MLP keeps, as the backward of
  :class:`fastlayers.ops.glu.GatedLinear` does where no adapter stands beside the linear layer.
- A product of a thin factor. DoRA scales the columns of ``x·Wᵀ + s·u·Bᵀ``, so that its gradient needs ``u·Bᵀ``: 4 bytes
  for each element of the result. The factor u is kept anyway, and to multiply it once more only writes what would have
  been kept.
"""

from __future__ import annotations

from dataclasses import replace

from fastlayers.kernels.low_rank import thin_product
from fastlayers.patching.fusion.absorption import kernel_name
from fastlayers.patching.fusion.fusable import spelled
from fastlayers.patching.program.program import Operation, Program, keeping, with_names

__all__ = ["with_values_again"]


def with_values_again(program: Program) -> Program:
    """The program, whose backward computes such values again instead of keeping them.

    ``values`` gains the results.
    """
    values = program.values
    if not program.grads:
        return program
    chains = {name: chain_of(name, program) for name in program.kept if name not in program.results}
    names: dict[str, str] = {}
    backward: list[Operation] = []
    for given in program.backward:
        for name in given.operands:
            chain = chains.pop(name, [])
            if any(program.is_written(step.makes[0]) for step in chain):
                continue
            for step in chain:  # Just before its first use: it is as large as what would have been kept.
                (made,) = step.makes
                if made not in names:
                    new = f"{made}_again"
                    backward.append(replace(with_names(step, names), makes=(new,)))
                    names[made], values[new] = new, values[made]
        backward.append(with_names(given, names))
    return keeping(replace(program, backward=backward))


def chain_of(name: str, program: Program) -> list[Operation]:
    """The operation that makes a value again, and the views before and after it; none for another value, and if what
    it is computed of is not kept."""
    after: list[Operation] = []
    while (maker := program.makers.get(name)) is not None and maker.view:
        after.insert(0, maker)
        name = maker.args[0].name
    if maker is None or not is_cheap(maker, program):
        return []
    before: list[Operation] = []
    for operand in maker.operands:
        views = views_of(operand, program)
        if views is None:
            return []
        before += [view for view in views if view not in before]
    return [*before, maker, *after]


def is_cheap(operation: Operation, program: Program) -> bool:
    """Whether an operation does little more than write its result."""
    if kernel_name(operation) == "gated_forward":
        return True
    if spelled(operation) != "mm":
        return False
    factor = program.makers.get(operation.args[0].name)
    return factor is not None and factor.function is thin_product


def views_of(name: str, program: Program) -> list[Operation] | None:
    """The views that make a value of a kept one; None if it is of another one."""
    views: list[Operation] = []
    while name not in program.kept:
        view = program.makers.get(name)
        if view is None or not view.view:
            return None
        views.insert(0, view)
        name = view.args[0].name
    return views

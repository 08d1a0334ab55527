"""Thin products that a backward computes again.

DoRA scales the columns of ``x·Wᵀ + s·u·Bᵀ``, so that its gradient needs ``u·Bᵀ``: 4 bytes for each element of the
result. The thin factor u is kept anyway, and to multiply it once more only writes what would have been kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from fastlayers.kernels.low_rank import thin_product
from fastlayers.patching.rewrite.fusable import makers_of, spelled, written_by
from fastlayers.patching.rewrite.tape import Operation, Program, keeping, storage, with_names

__all__ = ["with_products_again"]


def with_products_again(program: Program, values: dict[str, Tensor]) -> Program:
    """The program, whose backward multiplies what a thin product made with B again, where it has both.

    ``values`` gains the results.
    """
    if not program.grads:
        return program
    makers = makers_of(program.forward)
    written = written_by([*program.forward, *program.backward], values)
    chains = {name: chain_of(name, program, makers) for name in program.kept if name not in program.results}
    names: dict[str, str] = {}
    backward: list[Operation] = []
    for given in program.backward:
        for name in given.operands:
            chain = chains.pop(name, [])
            if any(storage(values[step.makes[0]]) in written for step in chain):
                continue
            for step in chain:  # Just before its first use: it is as large as what would have been kept.
                (made,) = step.makes
                if made not in names:
                    new = f"{made}_again"
                    backward.append(replace(with_names(step, names), makes=(new,)))
                    names[made], values[new] = new, values[made]
        backward.append(with_names(given, names))
    return keeping(replace(program, backward=backward))


def chain_of(name: str, program: Program, makers: Mapping[str, Operation]) -> list[Operation]:
    """The product of a thin factor of which a value is a view, and the views before and after it; none for another
    value, and if the factors are not kept."""
    after: list[Operation] = []
    while (maker := makers.get(name)) is not None and maker.view:
        after.insert(0, maker)
        name = maker.args[0].name
    if maker is None or spelled(maker) != "mm":
        return []
    u, name = (value.name for value in maker.args)
    first = makers.get(u)
    if first is None or first.function is not thin_product or u not in program.kept:
        return []
    before: list[Operation] = []
    while name not in program.kept:
        view = makers.get(name)
        if view is None or not view.view:
            return []
        before.insert(0, view)
        name = view.args[0].name
    return [*before, maker, *after]

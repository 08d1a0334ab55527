"""Residual sums that a product writes: ``h += x·W`` in the memory of h, where nobody needs h afterwards.

A block of a transformer ends with ``h + down(...)``. A sum of its own reads the product and h and writes the result;
cuBLAS reads h while it computes the product. A backward keeps h, so this is for calls without one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import torch

from fastlayers import backends
from fastlayers.ops.reference import LOW_PRECISION
from fastlayers.patching.fusion.matcher import Edit, Match, Op, Patterns, Row, new, only_reader, step
from fastlayers.patching.program.operators import spelled
from fastlayers.patching.program.program import Operation, Program, Value, storage, written

__all__ = ["with_residual_products"]

ADD_PRODUCT = torch.ops.aten.addmm_.default
VIEW = torch.ops.aten.view.default


def added_in_place(match: Match) -> Edit | None:
    """What makes the result of a sum in the memory of its first term."""
    program, product, (h, term) = match.program, match["product"], match["sum"].operands
    y, place = match.t(match.out), match.place
    if y.dtype not in LOW_PRECISION or y.dim() < 2 or match.root.kwargs:
        return None
    terms = y, match.t(h), match.t(term)
    if not backends.generates_kernels(y.device) or any(
        (t.shape, t.dtype) != (y.shape, y.dtype) or not t.is_contiguous() for t in terms
    ):
        return None
    chain = chain_of(term, program)
    if not chain or not is_last_use(match, h):
        return None
    given = {memory(name, program) for name in product.operands}
    start = program.places[product.makes[0]]
    if memory(h, program) in given or any(start < i < place and own in given for i, own in writes(program)):
        return None
    if y.dim() == 2:
        steps = [step(ADD_PRODUCT, Value(h), *product.args, makes=match.out)]
    else:
        rows, made = (new(program, match.t(h).view(-1, y.shape[-1])) for _ in range(2))
        steps = [
            step(VIEW, Value(h), tuple(match.t(rows).shape), makes=rows, view=True),
            step(ADD_PRODUCT, Value(rows), *product.args, makes=made),
            step(VIEW, Value(made), tuple(y.shape), makes=match.out, view=True),
        ]
    return Edit([*((operation, ()) for operation in chain), (match.root, steps)])


def chain_of(name: str, program: Program) -> list[Operation]:
    """The product that a value is, and the views of it, of which nothing else makes use; none for another value."""
    chain: list[Operation] = []
    while only_reader(program, name) is not None and (maker := program.makers.get(name)) is not None:
        chain.append(maker)
        if maker.function is not VIEW:
            return chain if spelled(maker) == "mm" else []
        name = maker.args[0].name
    return []


def is_last_use(match: Match, h: str) -> bool:
    """Whether nothing but this sum and what came before it sees the memory of a value, or wrote to it."""
    program, own = match.program, memory(h, match.program)
    maker = program.makers.get(program.base(h))
    needed = (*program.inputs, *program.constants, *program.results, *program.kept)
    later = (name for operation in program.forward[match.place + 1 :] for name in operation.uses)
    return (
        maker is not None
        and not maker.effect
        and all(memory(name, program) != own for name in (*needed, *later))
        and all(other != own for _, other in writes(program))
    )


def memory(name: str, program: Program) -> Hashable:
    base = program.base(name)  # A copy may have become a view.
    return storage(program.values[base]) if base in program.values else base


def writes(program: Program) -> Iterator[tuple[int, Hashable]]:
    """What the operations of the forward write, and their places."""
    for place, operation in enumerate(program.forward):
        for name in written(operation):
            yield place, memory(name, program)


#: No pass may follow: it would not expect what a product writes to.
with_residual_products = Patterns(
    Row(Op("add.Tensor", key="sum", of=(None, Op("mm", key="product")), commutes=True), added_in_place, "forward")
)

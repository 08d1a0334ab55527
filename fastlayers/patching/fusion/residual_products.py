"""Residual sums that a product writes: ``h += x·W`` in the memory of h, where nobody needs h afterwards.

A block of a transformer ends with ``h + down(...)``. A sum of its own reads the product and h and writes the result;
cuBLAS reads h while it computes the product. A backward keeps h, so this is for calls without one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fastlayers import backends
from fastlayers.ops.reference import LOW_PRECISION
from fastlayers.patching.fusion.fusable import spelled
from fastlayers.patching.program.program import Operation, Program, Value, base_of, makers_of, storage, written

__all__ = ["with_residual_products"]

ADD_PRODUCT = torch.ops.aten.addmm_.default
VIEW = torch.ops.aten.view.default


def with_residual_products(program: Program) -> Program:
    """The program whose forward has such sums. No rewriting may follow: it would not expect what a product writes to.

    ``values`` gains the names of views.
    """
    values = program.values
    operations = program.forward
    makers = makers_of(operations)

    def memory(name: str) -> Hashable:
        base = base_of(name, makers, values)  # A copy may have become a view.
        return storage(values[base]) if base in values else base

    needed = (*program.inputs, *program.constants, *program.results, *program.kept)
    used = Counter((*needed, *(name for operation in operations for name in operation.operands)))
    taken = {*map(memory, needed)}
    places: dict[str, int] = {}
    read, wrote = defaultdict[Hashable, list[int]](list), defaultdict[Hashable, list[int]](list)
    for place, operation in enumerate(operations):
        places.update(dict.fromkeys(operation.makes, place))
        for name in operation.uses:
            read[memory(name)].append(place)
        for name in written(operation):
            wrote[memory(name)].append(place)
    found: list[Operation] = []
    for place, operation in enumerate(operations):
        for product, h in pairs_of(operation, values):
            chain = product_of(product, makers, used)
            maker = makers.get(base_of(h, makers, values))
            if not chain or maker is None or maker.effect:
                continue
            own, start = memory(h), places[chain[0].makes[0]]
            if own in taken or wrote[own] or max(read[own]) > place or own in map(memory, chain[0].operands):
                continue
            if any(start < other < place for name in chain[0].operands for other in wrote[memory(name)]):
                continue
            found = [other for other in found if all(other is not each for each in chain)]
            found += steps_of(operation, chain[0], h, values)
            break
        else:
            found.append(operation)
    return replace(program, forward=found)


def pairs_of(operation: Operation, values: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """The terms of a sum of two tensors in one layout, either first; none for another operation."""
    names = (*operation.makes, *operation.operands)
    if spelled(operation) != "add.Tensor" or len(names) != 3 or operation.kwargs or not values.keys() >= {*names}:
        return []
    tensors = [values[name] for name in names]
    y = tensors[0]
    if y.dtype not in LOW_PRECISION or y.dim() < 2 or not backends.generates_kernels(y.device):
        return []
    if any((t.shape, t.dtype) != (y.shape, y.dtype) or not t.is_contiguous() for t in tensors):
        return []
    a, b = operation.operands
    return [(b, a), (a, b)]


def product_of(name: str, makers: Mapping[str, Operation], used: Mapping[str, int]) -> list[Operation]:
    """The product that a value is, and the views of it, of which nothing else makes use; none for another value."""
    chain: list[Operation] = []
    while (maker := makers.get(name)) is not None and used[name] == 1:
        chain.insert(0, maker)
        if spelled(maker) == "mm":
            return chain
        if maker.function is not VIEW:
            return []
        name = maker.args[0].name
    return []


def steps_of(operation: Operation, product: Operation, h: str, values: dict[str, Tensor]) -> Sequence[Operation]:
    """What makes the result of a sum in the memory of h."""
    (out,) = operation.makes
    y = values[out]
    if y.dim() == 2:
        return [replace(operation, function=ADD_PRODUCT, args=(Value(h), *product.args))]
    rows, written = f"{out}_rows", f"{out}_written"
    values[rows] = values[written] = values[h].view(-1, y.shape[-1])
    return [
        Operation(VIEW, (Value(h), tuple(values[rows].shape)), {}, (rows,), single=True, effect=False, view=True),
        Operation(ADD_PRODUCT, (Value(rows), *product.args), {}, (written,), single=True, effect=False),
        Operation(VIEW, (Value(written), tuple(y.shape)), {}, (out,), single=True, effect=False, view=True),
    ]

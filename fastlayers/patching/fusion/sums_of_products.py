"""Sums of matrix products: gradients of what several layers read, and the layers of adapters such as LoRA.

    dx = dy1·W1 + dy2·W2 + dy3·W3        the gradient of what query, key and value are computed of
    y = to(x·Wᵀ + to_float32(u·Bᵀ)·s)        an adapter beside a linear layer
    dx = ((dy1·W1 + to(du1·A1)) + dy2·W2) + to(du2·A2)       the gradient of what two such layers read
    dx = dy·W + to(mask∘(du·A)·s)        the same with a dropout before an adapter

torch writes each product, scales it, casts it and adds it: passes over matrices that are as large as y. Such a sum is
computed in one memory: the thin products are written there first, then cuBLAS adds the others while it computes them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fastlayers import backends
from fastlayers.kernels.low_rank import MOST_PARTS, all_parts, wide_kernel
from fastlayers.ops.low_rank import LARGEST_RANK
from fastlayers.ops.reference import LOW_PRECISION
from fastlayers.patching.fusion.fusable import CASTS, spelled
from fastlayers.patching.fusion.specialised import factor_of
from fastlayers.patching.program.program import (
    Operation,
    Program,
    Value,
    storage,
)

__all__ = ["with_sums_of_products"]

aten = torch.ops.aten
#: Columns of the largest thin factor of 16 bits. With more, cuBLAS adds the product as fast.
LARGEST_LOW_RANK = 64


#: A factor u of few columns, what it is multiplied with, a number, and the mask of a dropout or None.
Term: TypeAlias = tuple[Value, Value, float, Value | None]


@dataclass
class Terms:
    """What is added up.

    Attributes:
        products: the operands of those of which one memory holds the sum.
        thin: those that are written there first.
    """

    products: list[tuple[Value, ...]] = field(default_factory=list)
    thin: list[Term] = field(default_factory=list)


def passes(thin: Sequence[Term], values: Mapping[str, Tensor]) -> Iterator[Sequence[Term]]:
    """The terms of each pass over a sum: those without a mask are one product, those with one MOST_PARTS to a pass if
    they have the same rank."""

    def rank(term: Term) -> int:
        return values[term[0].name].shape[1]

    plain = [term for term in thin if term[3] is None]
    if plain:
        yield plain
    for _, same in groupby(sorted((term for term in thin if term[3] is not None), key=rank), rank):
        terms = [*same]
        for start in range(0, len(terms), MOST_PARTS):
            yield terms[start : start + MOST_PARTS]


def with_sums_of_products(program: Program) -> Program:
    """The program with such sums each in one memory."""
    return program.settled(*(Part(program).joined(part) for part in (program.forward, program.backward)))


class Part:
    def __init__(self, program: Program) -> None:
        self.values, self.fake = program.values, program.fake
        self.makers, self.written = program.makers, program.writers
        self.places = {name: place for place, each in enumerate(program.operations) for name in each.makes}
        self.uses = Counter(name for operation in program.operations for name in operation.operands)
        self.uses.update((*program.results, *filter(None, program.wanted)))

    def joined(self, operations: Sequence[Operation]) -> list[Operation]:
        """The operations of one direction. Of sums of sums, the last is joined."""
        found: list[Operation] = []
        inside: set[str] = set()  # of sums that are joined
        here = {name for operation in operations for name in operation.makes}
        for operation in reversed(operations):
            steps = None if inside.intersection(operation.makes) else self.sum_of(operation, here, inside)
            found += [operation] if steps is None else steps[::-1]
        return found[::-1]

    def sum_of(self, operation: Operation, here: set[str], inside: set[str]) -> list[Operation] | None:
        """The operations of a sum of products, the last of which makes what it made; None for another operation."""
        if len(operation.makes) != 1 or not operation.makes[0] or operation.effect or operation.view:
            return None
        (out,) = operation.makes
        y = self.values[out]
        if y.dtype not in LOW_PRECISION or y.dim() < 2 or not y.is_contiguous():
            return None
        if not backends.generates_kernels(y.device):
            return None
        terms, taken = Terms(), set[str]()
        if not self.collect(out, out, 1.0, None, terms, taken, here):
            return None
        if not terms.products or len(terms.products) + len(terms.thin) == 1:
            return None
        # A bias is part of the product that comes first.
        terms.products.sort(key=len, reverse=True)
        if len(terms.products) > 1 and len(terms.products[1]) > 2:
            return None
        inside |= taken
        rows = out if y.dim() == 2 else f"{out}_rows"
        steps = self.steps(terms, y, rows)
        if rows != out:
            steps.append(
                Operation(aten.view.default, (Value(rows), tuple(y.shape)), {}, (out,), True, False, view=True)
            )
        return steps

    def steps(self, terms: Terms, y: Tensor, rows: str) -> list[Operation]:
        """What computes a sum, under the name ``rows``. A product adds to the result of the operation before, which
        nothing else reads."""
        bias, products = terms.products[0][:-2], [product[-2:] for product in terms.products]
        steps: list[Operation] = []
        for some in passes(terms.thin, self.values):
            base = tuple(Value(step.makes[0]) for step in steps[-1:])
            steps += self.wide(some, y.dtype, bias, base, f"{rows}_{len(steps)}")
            bias = ()
        if not steps:
            function = aten.addmm.default if bias else aten.mm.default
            steps.append(Operation(function, (*bias, *products.pop(0)), {}, (f"{rows}_0",), single=True, effect=False))
        for i, product in enumerate(products):
            given = (Value(steps[-1].makes[0]), *product)
            name = f"{rows}_and_{i}" if i < len(products) - 1 else rows
            steps.append(Operation(aten.addmm_.default, given, {}, (name,), single=True, effect=False))
        self.values.update(
            {step.makes[0]: y.view(-1, y.shape[-1]) for step in steps if step.makes[0] not in self.values}
        )
        return steps

    def wide(
        self, terms: Sequence[Term], dtype: torch.dtype, bias: tuple[Value, ...], base: tuple[Value, ...], name: str
    ) -> list[Operation]:
        """One pass over a sum, of thin products without a mask or of some with one, with a bias and what was summed
        before if there is such."""
        steps: list[Operation] = []

        def value(function: Any, args: tuple[Any, ...], shape: tuple[int, ...], part: str) -> Value:
            like = self.values[terms[0][0].name]
            with self.fake:
                self.values[part] = torch.empty(shape, dtype=like.dtype, device=like.device)
            steps.append(Operation(function, args, {}, (part,), single=True, effect=False))
            return Value(part)

        us, bs, factors, masks = map(list, zip(*terms, strict=True))
        factor, shapes = factors[0], [tuple(self.values[u.name].shape) for u in us]
        if len({*factors}) > 1:
            for i, each in enumerate(factors):
                if each != 1:
                    us[i] = value(aten.mul.Scalar, (us[i], each), shapes[i], f"{name}_scaled_{i}")
            factor = 1.0
        u, b = us[0], bs[0]
        if len(terms) > 1:
            rank, columns = sum(shape[1] for shape in shapes), self.values[b.name].shape[1]
            u = value(aten.cat.default, (us, 1), (shapes[0][0], rank), f"{name}_u")
            b = value(aten.cat.default, (bs,), (rank, columns), f"{name}_b")
        masks = [mask for mask in masks if mask is not None]
        of_u, of_b = (self.values[each.name] for each in (u, b))
        of_bias, of_base = (self.values[each[0].name] if each else None for each in (bias, base))
        kernel = wide_kernel(of_u, of_b, factor, dtype, of_bias, of_base, len(masks))
        with self.fake:
            self.values[name] = kernel.results[0].empty(kernel.device)
        args = (u, b, *bias, *base, *all_parts(masks))
        return [*steps, Operation(kernel, args, {}, (name,), single=False, effect=False)]

    def collect(
        self, name: str, out: str, factor: float, mask: Value | None, terms: Terms, taken: set[str], here: set[str]
    ) -> bool:
        """Whether a value is a sum of products, of the elements of ``out`` in their order. Adds to ``terms`` what it
        is the sum of, and to ``taken`` what nobody else needs then."""
        maker, t = self.makers.get(name), self.values[name]
        if name not in here or maker is None or maker.effect or storage(t) in self.written:
            return False
        if name != out and self.uses[name] != 1:
            return False
        kind, y = spelled(maker), self.values[out]
        if not t.is_contiguous() or t.shape[-1:] != y.shape[-1:] or t.numel() != y.numel():
            return False
        if t.dtype not in (y.dtype, torch.float32):
            return False
        taken.add(name)
        first = maker.args[0].name if maker.args and isinstance(maker.args[0], Value) else ""
        if maker.view or (kind in CASTS and maker.kwargs.get("device") in (None, y.device)):
            return self.collect(first, out, factor, mask, terms, taken, here)
        if (number := factor_of(maker)) is not None:
            return self.collect(first, out, factor * number, mask, terms, taken, here)
        if kind == "native_dropout_backward" and mask is None and self.is_mask(maker.args[1], y):
            return self.collect(first, out, factor * maker.args[2], maker.args[1], terms, taken, here)
        if kind == "add.Tensor" and len(maker.operands) == 2 and not maker.kwargs and factor == 1:
            return all(self.collect(n, out, factor, mask, terms, taken, here) for n in maker.operands)
        return self.product(maker, kind, out, factor, mask, terms)

    def is_mask(self, mask: Value, y: Tensor) -> bool:
        """Whether a value has a byte for each element of y, in their order."""
        t = self.values[mask.name]
        same = t.dtype is torch.bool and t.is_contiguous() and t.shape[-1:] == y.shape[-1:] and t.numel() == y.numel()
        return same and storage(t) not in self.written

    def product(self, maker: Operation, kind: str, out: str, factor: float, mask: Value | None, terms: Terms) -> bool:
        """Whether a term is a product, of what nothing writes to before the sum."""
        given: list[Any] = [*maker.args]
        if kind not in ("mm", "addmm") or maker.kwargs or not all(isinstance(arg, Value) for arg in given):
            return False
        tensors = [self.values[arg.name] for arg in given]
        start, end = self.places[maker.makes[0]], self.places[out]
        if any(start < place < end for t in tensors for place in self.written.get(storage(t), ())):
            return False
        if len({t.dtype for t in tensors}) > 1:
            return False
        wide = tensors[0].dtype is torch.float32
        if kind == "mm" and tensors[0].shape[1] <= (LARGEST_RANK if wide else LARGEST_LOW_RANK):
            terms.thin.append((given[0], given[1], factor, mask))
            return True
        if tensors[0].dtype is not self.values[out].dtype or factor != 1 or mask is not None:
            return False
        if kind == "addmm" and not (tensors[0].dim() == 1 and tensors[0].is_contiguous()):
            return False
        terms.products.append(tuple(given))
        return True

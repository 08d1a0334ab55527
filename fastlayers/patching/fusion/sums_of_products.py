"""Sums of matrix products: gradients of what several layers read, and the layers of adapters such as LoRA.

    dx = dy1·W1 + dy2·W2 + dy3·W3        the gradient of what query, key and value are computed of
    y = to(x·Wᵀ + to_float32(u·Bᵀ)·s)        an adapter beside a linear layer
    dx = ((dy1·W1 + to(du1·A1)) + dy2·W2) + to(du2·A2)       the gradient of what two such layers read
    dx = dy·W + to(mask∘(du·A)·s)        the same with a dropout before an adapter

torch writes each product, scales it, casts it and adds it: passes over matrices that are as large as y. Such a sum is
computed in one memory: the thin products are written there first, then cuBLAS adds the others while it computes them.
"""

from __future__ import annotations

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
from fastlayers.patching.fusion.fusable import CASTS, factor_of
from fastlayers.patching.fusion.matcher import Edit, Match, Op, Patterns, Row, new, only_reader, step
from fastlayers.patching.fusion.narrow import is_low_rank
from fastlayers.patching.program.operators import called
from fastlayers.patching.program.program import Operation, Value, storage

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
        made_by: the operations that nobody else needs then.
    """

    products: list[tuple[Value, ...]] = field(default_factory=list)
    thin: list[Term] = field(default_factory=list)
    made_by: list[Operation] = field(default_factory=list)


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


def summed(match: Match) -> Edit | None:
    """A sum of products in one memory."""
    if len(match.root.makes) != 1 or not match.out or match.root.effect or match.root.view:
        return None
    y, terms = match.t(match.out), Terms()
    if y.dtype not in LOW_PRECISION or y.dim() < 2 or not y.is_contiguous():
        return None
    if not backends.generates_kernels(y.device) or not collect(match, match.out, 1.0, None, terms):
        return None
    # A bias is part of the product that comes first.
    terms.products.sort(key=len, reverse=True)
    biased = sum(len(product) > 2 for product in terms.products)
    if not terms.products or len(terms.products) + len(terms.thin) == 1 or biased > 1:
        return None
    rows = match.out if y.dim() == 2 else new(match.program, y.view(-1, y.shape[-1]))
    steps = steps_of(match, terms, y, rows)
    if rows != match.out:
        steps.append(step(aten.view.default, Value(rows), tuple(y.shape), makes=match.out, view=True))
    return Edit([*((operation, ()) for operation in terms.made_by), (match.root, steps)])


def steps_of(match: Match, terms: Terms, y: Tensor, rows: str) -> list[Operation]:
    """What computes a sum, under the name ``rows``. A product adds to the result of the operation before, which
    nothing else reads."""
    bias, products = terms.products[0][:-2], [product[-2:] for product in terms.products]
    steps: list[Operation] = []
    for some in passes(terms.thin, match.program.values):
        base = tuple(Value(each.makes[0]) for each in steps[-1:])
        steps += wide(match, some, y.dtype, bias, base)
        bias = ()
    flat = y.view(-1, y.shape[-1])
    if not steps:
        function = aten.addmm.default if bias else aten.mm.default
        steps.append(step(function, *bias, *products.pop(0), makes=new(match.program, flat)))
    for i, product in enumerate(products):
        name = new(match.program, flat) if i < len(products) - 1 else rows
        steps.append(step(aten.addmm_.default, Value(steps[-1].makes[0]), *product, makes=name))
    return steps


def wide(
    match: Match, terms: Sequence[Term], dtype: torch.dtype, bias: tuple[Value, ...], base: tuple[Value, ...]
) -> list[Operation]:
    """One pass over a sum, of thin products without a mask or of some with one, with a bias and what was summed before
    if there is such."""
    steps: list[Operation] = []

    def value(function: Any, *args: Any, shape: Sequence[int]) -> Value:
        name = match.empty(match.t(terms[0][0]), shape)
        steps.append(step(function, *args, makes=name))
        return Value(name)

    us, bs, factors, masks = map(list, zip(*terms, strict=True))
    factor, shapes = factors[0], [match.t(u).shape for u in us]
    if len({*factors}) > 1:
        factor = 1.0
        us = [
            u if each == 1 else value(aten.mul.Scalar, u, each, shape=shape)
            for u, each, shape in zip(us, factors, shapes, strict=True)
        ]
    u, b = us[0], bs[0]
    if len(terms) > 1:
        rank = sum(shape[1] for shape in shapes)
        u = value(aten.cat.default, us, 1, shape=(shapes[0][0], rank))
        b = value(aten.cat.default, bs, shape=(rank, match.t(b).shape[1]))
    masks = [mask for mask in masks if mask is not None]
    of_bias, of_base = (match.t(each[0]) if each else None for each in (bias, base))
    kernel = wide_kernel(match.t(u), match.t(b), factor, dtype, of_bias, of_base, len(masks))
    return [*steps, match.launch(kernel, (u, b, *bias, *base, *all_parts(masks)))]


def collect(match: Match, name: str, factor: float, mask: Value | None, terms: Terms) -> bool:
    """Whether a value is a sum of products, of the elements of what the root makes in their order. Adds to ``terms``
    what it is the sum of."""
    program, y, t = match.program, match.t(match.out), match.t(name)
    maker = program.makers.get(name)
    if maker is None or maker.effect or program.is_written(name) or not match.is_beside(name):
        return False
    if name != match.out:
        if only_reader(program, name) is None:
            return False
        terms.made_by.append(maker)
    if not t.is_contiguous() or t.shape[-1:] != y.shape[-1:] or t.numel() != y.numel():
        return False
    if t.dtype not in (y.dtype, torch.float32):
        return False
    kind = called(maker)
    first = maker.args[0].name if maker.args and isinstance(maker.args[0], Value) else ""
    if maker.view or (kind in CASTS and maker.kwargs.get("device") in (None, y.device)):
        return collect(match, first, factor, mask, terms)
    if (number := factor_of(maker)) is not None:
        return collect(match, first, factor * number, mask, terms)
    if kind == "native_dropout_backward" and mask is None and is_mask(match, maker.args[1]):
        return collect(match, first, factor * maker.args[2], maker.args[1], terms)
    if kind == "add.Tensor" and len(maker.operands) == 2 and not maker.kwargs and factor == 1:
        return all(collect(match, operand, factor, mask, terms) for operand in maker.operands)
    return kind in ("mm", "addmm") and is_product(match, maker, factor, mask, terms)


def is_mask(match: Match, mask: Value) -> bool:
    """Whether a value has a byte for each element of the sum, in their order."""
    t, y = match.t(mask), match.t(match.out)
    same = t.dtype is torch.bool and t.is_contiguous() and t.shape[-1:] == y.shape[-1:] and t.numel() == y.numel()
    return same and not match.program.is_written(mask.name)


def is_product(match: Match, maker: Operation, factor: float, mask: Value | None, terms: Terms) -> bool:
    """Whether a term is a product that can be part of the sum, of what nothing writes to before that."""
    program, given = match.program, list(maker.args)
    if maker.kwargs or not all(isinstance(arg, Value) for arg in given):
        return False
    tensors = [match.t(arg) for arg in given]
    start = program.places[maker.makes[0]]
    if any(start < place < match.place for t in tensors for place in program.writers.get(storage(t), ())):
        return False
    if len({t.dtype for t in tensors}) > 1:
        return False
    most = LARGEST_RANK if tensors[0].dtype is torch.float32 else LARGEST_LOW_RANK
    if called(maker) == "mm" and is_low_rank(tensors[0].shape[1], most):
        terms.thin.append((given[0], given[1], factor, mask))
        return True
    if tensors[0].dtype is not match.t(match.out).dtype or factor != 1 or mask is not None:
        return False
    if called(maker) == "addmm" and not (tensors[0].dim() == 1 and tensors[0].is_contiguous()):
        return False
    terms.products.append(tuple(given))
    return True


#: Of sums of sums, the last one is joined.
with_sums_of_products = Patterns(Row(Op(), summed))

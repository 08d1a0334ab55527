"""Products of one matrix with several thin ones, as one pass over it.

Query, key and value layers with adapters read one input, and so do gate and up: each multiplies it with a factor A of
its own, and the gradients of these are products with it, too. Where all is of 16 bits, as under autocast, cuBLAS has
the product if there is but one.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fastlayers import backends
from fastlayers.kernels.low_rank import most_parts, thin_kernels, thin_product, thin_products
from fastlayers.ops.reference import LOW_PRECISION
from fastlayers.patching.fusion.matcher import Match, Op, Patterns, Row, step
from fastlayers.patching.program.operators import spelled
from fastlayers.patching.program.program import Operation, Program, Value, storage

__all__ = ["with_launches", "with_thin_products"]

SELECT = torch.ops.aten.select.int
#: Bytes of a matrix that several products of 16 bits read together: a smaller one is in the cache for all of them.
LARGE = 2**22


@dataclass
class Together:
    """Products that become one operation, at the place of the last.

    Attributes:
        before: the groups of whose results they are computed.
        is_closed: whether something that stays where it is makes use of their results.
    """

    members: list[Operation] = field(default_factory=list)
    before: set[int] = field(default_factory=set)
    is_closed: bool = False


def with_thin_products(program: Program) -> Program:
    """The program with its thin products, those of one matrix together."""
    parts = (together(part, groups_of(part, program), program.values) for part in (program.forward, program.backward))
    forward, backward = parts
    return replace(program, forward=forward, backward=backward)


def groups_of(operations: Sequence[Operation], program: Program) -> list[Together]:
    """The products that nothing keeps from being one operation. The results of a region have memory of their own."""
    values, written = program.values, program.writers.keys()
    results = {storage(values[name]) for name in program.results}
    groups: list[Together] = []
    latest: dict[Hashable, int] = {}
    computed_of: dict[str, set[int]] = {}
    for operation in operations:
        of = set[int]().union(*(computed_of.get(name, ()) for name in operation.uses))
        is_result = any(storage(values[name]) in results for name in operation.makes if name)
        found = None if is_result else what_it_reads(operation, values, written)
        if found is not None:
            what, most = found
            number = latest.get(what)
            group = None if number is None else groups[number]
            if group is None or group.is_closed or len(group.members) == most or number in all_before(of, groups):
                number, group = len(groups), Together()
                latest[what] = number
                groups.append(group)
            group.members.append(operation)
            group.before |= of
            of = {number}  # type: ignore[arg-type]
        elif operation.effect or any(storage(values[n]) in written for n in (*operation.uses, *operation.makes) if n):
            for i in all_before(of, groups):
                groups[i].is_closed = True
        computed_of.update(dict.fromkeys(operation.makes, of))
    return groups


def what_it_reads(
    operation: Operation, values: Mapping[str, Tensor], written: Container[int]
) -> tuple[Hashable, int] | None:
    """What the thin products that one operation may be have in common, and how many it may be; None for others."""
    if operation.function is not thin_product and not is_thin(operation, values):
        return None
    large, thin, factor, mask, large_first = parts_of(operation, values)
    x, t = values[large.name], values[thin.name]
    most = most_parts(t.shape[1 if large_first else 0])
    if most == 1 or any(storage(values[name]) in written for name in operation.uses):
        return None
    where = (storage(x), x.storage_offset(), x.shape, x.stride(), x.dtype, large_first)
    return (where, t.shape, t.stride(), t.dtype, factor, mask is None), most


def is_thin(operation: Operation, values: Mapping[str, Tensor]) -> bool:
    """Whether an operation of torch is a product of 16 bits of a large matrix and a thin one."""
    if spelled(operation) != "mm" or values[operation.makes[0]].dtype not in LOW_PRECISION:
        return False
    large, *_ = parts_of(operation, values)
    x = values[large.name]
    return x.nbytes >= LARGE and 1 in x.stride() and backends.generates_kernels(x.device)


def parts_of(operation: Operation, values: Mapping[str, Tensor]) -> tuple[Any, ...]:
    """The large matrix, the thin one, the factor, the mask of the large one, and whether this one comes first."""
    if operation.function is not thin_product:
        a, b = operation.args
        first = values[a.name].numel() >= values[b.name].numel()
        return (a, b, 1.0, None, True) if first else (b, a, 1.0, None, False)
    a, b, factor, of_a, of_b = operation.args
    if of_b is not None or values[a.name].dtype is torch.float32:
        return b, a, factor, of_b, False
    return a, b, factor, of_a, True


def all_before(numbers: Iterable[int], groups: Sequence[Together]) -> set[int]:
    """These groups, and those of whose results they are computed."""
    found: set[int] = set()
    left = [*numbers]
    while left:
        number = left.pop()
        if number not in found:
            found.add(number)
            left += groups[number].before
    return found


def together(
    operations: Sequence[Operation], groups: Sequence[Together], values: Mapping[str, Tensor]
) -> list[Operation]:
    """The operations, of which those wait that read the results of a group before its last member."""
    last = {id(group.members[-1]): group for group in groups}
    members = {id(member) for group in groups for member in group.members}
    found: list[Operation] = []
    waiting: list[Operation] = []
    missing: set[str] = set()
    for operation in operations:
        if operation.effect:  # It would have closed the groups that it waits for.
            found.append(operation)
            continue
        missing.update(operation.makes)
        if id(operation) in last:
            waiting.append(joined(last[id(operation)].members, values))
        elif id(operation) not in members:
            waiting.append(operation)
        while ready := [each for each in waiting if missing.isdisjoint(each.uses)]:
            found.append(ready[0])
            missing.difference_update(ready[0].makes)
            waiting.remove(ready[0])
    assert not waiting
    return found


def joined(members: Sequence[Operation], values: Mapping[str, Tensor]) -> Operation:
    if len(members) == 1:
        return members[0]
    large, thin, factors, masks, first = zip(*(parts_of(member, values) for member in members), strict=True)
    args = (large[0], thin, factors[0], masks, first[0])
    makes = tuple(member.makes[0] for member in members)
    return Operation(thin_products, args, {}, makes, single=False, effect=False)


def launched(match: Match) -> Sequence[Operation]:
    """The launches of thin products, and views of their results."""
    if match.root.function is thin_products:
        large, thin, factor, masks, large_first = match.root.args
    else:
        large, one, factor, mask, large_first = parts_of(match.root, match.program.values)
        thin, masks = (one,), (mask,)
    masks = [mask for mask in masks if mask is not None]
    given = [large, *thin, *masks]
    kernels = thin_kernels(match.t(large), match.t(thin[0]), len(thin), factor, bool(masks), large_first)
    steps: list[Operation] = []
    for kernel in kernels:
        steps.append(match.launch(kernel, given))
        given = [Value(steps[-1].makes[0])]
    if len(thin) == 1:
        return [*steps[:-1], replace(steps[-1], makes=match.root.makes)]
    for i, name in enumerate(match.root.makes):
        with match.program.fake:
            match.program.values[name] = match.t(given[0]).select(0, i)
        steps.append(step(SELECT, given[0], 0, i, makes=name, view=True))
    return steps


with_launches = Patterns(Row(Op("thin_product", "thin_products"), launched))

"""Generated kernels for what a program computes element by element.

What rules leave of a forward, and autograd makes of it, is chains of pointwise operations, copies into another layout
and sums, each of them a pass over memory. Here they are joined: a value that only other such operations read is not
stored but computed where it is read, through views, slices and concatenations, by a kernel of
:mod:`fastlayers.kernels.generated`. A backward computes what the forward would have to keep again, where that reads
less memory.

A group of results that one kernel makes is run where the last of them was computed. It is kept as it was if that would
save no launch.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastlayers.kernels.affine import Index
from fastlayers.kernels.generated import FORMULAS, ROWS, SUMS, Kernel, Result, casts, compile_together
from fastlayers.patching.fusion.fusable import (
    CASTS,
    FILLED,
    FLOATING,
    WHOLE,
    in_new_memory,
    is_dense,
    is_fusable,
    kernel_name,
    reduced_dims,
    rounded_later,
    spelled,
)
from fastlayers.patching.fusion.kernel_writer import KernelWriter, NotFusableError, row_length
from fastlayers.patching.fusion.lowering import IN_PLACE, lowered
from fastlayers.patching.program.program import (
    Operation,
    Program,
    Value,
    alive,
    base_of,
    is_followed,
    keeping,
    storage,
    with_names,
    written,
    written_by,
)

__all__ = ["with_kernels"]

#: A tensor so many times smaller than another one is read from caches.
BROADCAST = 8
#: Bytes of a tensor whose sums down columns, or a copy into another layout, are worth a kernel by themselves.
COLUMNS = 2**22
#: Operations that give each element as it is.
PLAIN_COPIES = frozenset({"clone", "contiguous"})
#: Casts that one kernel does, and elements of a larger one, whose launch takes no time beside it: of parameters, and of
#: their gradients, which have to wait for the last of these.
MOST_CASTS, LARGEST_CAST, LARGEST_LAST_CAST = 24, 2**24, 2**20
#: Launches of an operation of torch that has more than one.
LAUNCHES = {"_safe_softmax": 4}


def with_kernels(program: Program) -> Program:
    """The program with generated kernels, which are compiled.

    ``values`` gains what these make, and another name for a value after it was written in place.
    """
    values, fake = program.values, program.fake
    unfused: set[int] = set()
    refused: frozenset[str] = frozenset()
    while True:
        attempt, functional = functionalized(program, values, unfused)
        in_torch, origins = lowered(attempt, values, refused, fake)
        done, fusions = both_ways(in_torch, values)
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
            kernels = [o.function for o in (*done.forward, *done.backward) if isinstance(o.function, Kernel)]
            compile_together(list(dict.fromkeys(kernels)))
            return done
        unfused |= left


def both_ways(program: Program, values: Mapping[str, Tensor]) -> tuple[Program, list[Fusion]]:
    """The program with the kernels of both directions, and how they were made."""
    fusions: list[Fusion] = []
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
    operations: Sequence[Operation], place: int, name: str, program: Program, values: Mapping[str, Tensor]
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


# -- what a backward computes again ------------------------------------------------------------------------------------


class Recomputed:
    """What a backward computes again of the forward, instead of keeping it.

    That is a value of which only fusable operations of the backward make use, if what it is computed of is not larger,
    and is kept anyway or replaces what would be kept. Inputs and results do not: others may write to them, which is an
    error only for what autograd keeps. Those in ``read`` are kept.
    """

    def __init__(self, program: Program, values: Mapping[str, Tensor], read: set[str]) -> None:
        self.values = values
        self.outer = {name: operation for operation in program.forward for name in operation.makes if name}
        self.written = program.writers
        outside = {
            name for operation in program.backward
            if not is_followed(operation, values) and not is_fusable(operation, values) for name in operation.uses
        } | set(program.wanted) | read  # fmt: skip
        own = {name: operation for operation in program.backward for name in operation.makes if name}
        outside = {base_of(name, own, values) for name in outside if name is not None}
        self.given = {storage(values[name]) for name in (*program.inputs, *program.results)}
        self.known: dict[str, frozenset[str] | None] = {}
        #: The values that are there in the backward,
        self.available = {*program.grads, *program.kept}
        #: those that are not read but computed,
        self.computed: set[str] = set()
        #: and those that are kept, whatever may be computed of them.
        self.stays = outside.union(program.inputs).intersection(program.kept)
        for name in self.outer:  # What is computed of another value comes after it.
            if name in program.kept and name not in self.stays and not self.takes(name):
                self.stays.add(name)

    def takes(self, name: str) -> bool:
        """Note that a value is computed again, if that pays."""
        leaves = self.leaves(name)
        if leaves is None or not reads_less(leaves, name, self.values):
            return False
        more = leaves - self.available
        own = self.given.isdisjoint(storage(self.values[leaf]) for leaf in more)
        if not own or sum(self.values[leaf].nbytes for leaf in more) > self.values[name].nbytes:
            return False
        self.available |= more
        self.computed.add(name)
        return True

    def operation(self, name: str, own: Mapping[str, Operation]) -> Operation | None:
        """The operation that makes a value of the forward, if it is computed again."""
        if name in own or (name in self.available and name not in self.computed):
            return None
        return self.outer[name]

    def leaves(self, name: str) -> frozenset[str] | None:
        """The stored values of which this one is computed; None if it has to be stored itself."""
        if name not in self.known:
            self.known[name] = None
            operation = self.outer.get(name)
            if operation is None or spelled(operation) in WHOLE or not is_fusable(operation, self.values):
                return None
            if storage(self.values[name]) in self.written:  # It is not only what this operation made.
                return None
            found: frozenset[str] = frozenset()
            for operand in operation.operands:
                base = base_of(operand, self.outer, self.values)
                if storage(self.values[base]) in self.written:
                    return None
                more = self.leaves(base)
                if more is not None and base in self.stays:
                    there = more <= self.available and reads_less(more, base, self.values)
                    more = more if there else None
                found |= {base} if more is None else more
            self.known[name] = found
        return self.known[name]


def reads_less(leaves: Iterable[str], name: str, values: Mapping[str, Tensor]) -> bool:
    """Whether to compute a value again takes no more reads than to read it. What is broadcast stays in caches."""
    size = values[name].nbytes
    return sum(min(values[leaf].nbytes, size) for leaf in leaves if values[leaf].nbytes > size / BROADCAST) <= size


# -- kernels -----------------------------------------------------------------------------------------------------------


@dataclass
class Group:
    """Results that one kernel makes: those of its roots, of which it stores what is read elsewhere."""

    roots: list[int]
    stores: list[int]
    #: The calls of its kernels. Of two, the second adds up what the first one leaves.
    calls: list[Operation]
    inputs: tuple[str, ...]
    loads: frozenset[tuple[str, Index]]
    #: The places of the operations that it stands for,
    members: frozenset[int]
    #: and for each input the first and the last of those that read it.
    readers: Mapping[str, tuple[int, int]]
    #: The lengths of the rows that its roots need, 0 for such as no kernel has in registers,
    lengths: frozenset[int] = frozenset()
    #: what it reads, and that with its results.
    read: frozenset[str] = frozenset()
    known: frozenset[str] = frozenset()

    @property
    def is_view(self) -> bool:
        """Whether there is nothing to compute."""
        return self.calls[0].view


def calls_of(kernels: Sequence[Kernel], inputs: tuple[str, ...], makes: tuple[str, ...]) -> list[Operation]:
    """The calls of one kernel, or of two, of which the second adds up the first results."""
    if len(kernels) == 1:
        return [call_of(kernels[0], inputs, makes)]
    summed = len(kernels[1].results)
    parts = tuple(f"{name}_parts" for name in makes[:summed])
    return [call_of(kernels[0], inputs, (*parts, *makes[summed:])), call_of(kernels[1], parts, makes[:summed])]


def call_of(kernel: Kernel, inputs: tuple[str, ...], makes: tuple[str, ...]) -> Operation:
    return Operation(kernel, tuple(map(Value, inputs)), {}, makes, single=False, effect=False)


class Fusion:
    """The fusion of a list of operations.

    Args:
        values: the tensors that the names stand for, of which the geometry is read.
        needed: the names of the values that are needed after these operations,
        returned: and of those that are returned, in memory of their own.
        narrow: the values of which only what is rounded to 16 bits is seen.
        again: what may be computed of other operations.
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        values: Mapping[str, Tensor],
        needed: Iterable[str],
        returned: Iterable[str],
        narrow: frozenset[str],
        again: Recomputed | None = None,
    ) -> None:
        self.given, self.values, self.needed, self.again = list(operations), values, list(needed), again
        self.narrow = narrow
        self.returned = {storage(values[name]) for name in returned}
        self.producers = {name: operation for operation in operations for name in operation.makes if name}
        self.places = {name: i for i, operation in enumerate(operations) for name in operation.makes if name}
        self.writers = written_by(operations, values)
        self.fusable = {
            i for i, operation in enumerate(operations)
            if is_fusable(operation, values) and not self.is_written(operation.makes[0])
        }  # fmt: skip
        self.stored: set[int] = set()
        self.made: list[Group] = []
        self._groups: dict[Any, Group] = {}

    def base(self, name: str) -> str:
        name = base_of(name, self.producers, self.values)
        if self.again is None or name in self.producers or name in self.again.available:
            return name
        return base_of(name, self.again.outer, self.values)

    def producer(self, name: str) -> tuple[int, Operation] | None:
        """The operation that computes a value where it is read, and its place; None if the value is stored."""
        place = self.places.get(name)
        if place is not None:
            return (place, self.given[place]) if place in self.fusable else None
        operation = self.again.operation(name, self.producers) if self.again else None
        return None if operation is None else (-1, operation)

    def operations(self) -> list[Operation]:
        """The operations, with kernels in place of those that are fused."""
        while True:
            self.stored = self.must_be_stored()
            groups = self.groups()
            if groups is None:
                continue
            useless = [group for group in groups if not self.pays(group)]
            if not useless:
                break
            self.fusable -= {root for group in useless for root in group.roots}
        self.made = [self.without_unread(group, groups) for group in groups]
        order = self.scheduled(self.made)
        assert order is not None  # Each group was tested.
        return order

    def alone(self, origins: Mapping[str, str]) -> set[str]:
        """Those of the origins whose operations are not together in one kernel, with others."""
        places: dict[str, set[int]] = defaultdict(set)
        for i, operation in enumerate(self.given):
            for name in operation.makes:
                if name in origins and not operation.view:
                    places[origins[name]].add(i)
        return {
            origin
            for origin, own in places.items()
            if not any(own <= group.members and len(group.members) > len(own) for group in self.made)
        }

    def must_be_stored(self) -> set[int]:
        """The places of the fusable operations whose results others read, or that are sums or need whole rows."""
        outside = {
            self.base(name)
            for i, op in enumerate(self.given)
            if i not in self.fusable and not is_followed(op, self.values)
            for name in op.uses
        }
        outside |= {self.base(name) for name in self.needed}
        return {
            i for i in self.fusable
            if self.given[i].makes[0] in outside or spelled(self.given[i]) in WHOLE
        } | (self.stored & self.fusable)  # fmt: skip

    def groups(self) -> list[Group] | None:
        """The groups; None if other values have to be stored, or fewer operations are fusable."""
        alone: list[Group] = []
        for root in sorted(self.stored):
            try:
                group = self.group([root])
                if not self.fits(group):
                    raise NotFusableError(root)
                alone.append(group)
            except NotFusableError as error:
                if error.args and error.args[0] not in self.stored and error.args[0] in self.fusable:
                    self.stored.add(error.args[0])
                else:
                    self.fusable.discard(root)
                return None
        if self.scheduled(alone) is None:  # Something must be read before it is written, but is needed after that.
            self.fusable = {i for i in self.fusable if not any(self.is_written(name) for name in self.given[i].uses)}
            return None
        merged: list[Group] = []
        for group in alone:
            for i, other in enumerate(merged):
                if self.belong_together(other, group):
                    try:
                        both = self.group([*other.roots, *group.roots])
                    except NotFusableError:
                        continue
                    if self.scheduled([*merged[:i], *merged[i + 1 :], both], alone) is not None:
                        merged[i] = both
                        break
            else:
                merged.append(group)
        merged = self.casts_together(self.with_sums(self.in_rows(merged)))
        # What two kernels compute is stored if reading it would be cheaper.
        readers: dict[int, int] = defaultdict(int)
        for group in merged:
            for member in group.members - self.stored:
                readers[member] += 1
        for place in sorted(readers):
            if readers[place] > 1:
                try:
                    leaves = self.group([place]).inputs
                except NotFusableError:
                    continue
                if not reads_less(leaves, self.given[place].makes[0], self.values):
                    self.stored.add(place)
                    return None
        return merged

    def in_rows(self, groups: list[Group]) -> list[Group]:
        """The groups, where those that read the same rows of memory and need their sums are one."""
        refused: set[tuple[int, ...]] = set()
        before = 0
        while before != len(groups):
            before, i = len(groups), 0
            while i < len(groups):
                found = next((j for j in range(i + 1, len(groups)) if self.join_rows(groups, i, j, refused)), None)
                i += found is None
        return groups

    def join_rows(self, groups: list[Group], i: int, j: int, refused: set[tuple[int, ...]]) -> bool:
        """Make one group of two, in place, if a kernel for both has rows in registers and reads less."""
        a, b = groups[i], groups[j]
        roots = (*a.roots, *b.roots)
        lengths = a.lengths | b.lengths
        if len(lengths) != 1 or 0 in lengths or (a.known & b.known).isdisjoint(a.read | b.read) or roots in refused:
            return False
        refused.add(roots)
        try:
            both = self.group(roots, in_rows=True)
        except NotFusableError:
            return False
        rest = [*groups[:i], both, *groups[i + 1 : j], *groups[j + 1 :]]
        less = self.bytes_read(both) < self.bytes_read(a) + self.bytes_read(b)
        if not less or not self.fits(both) or self.scheduled(rest) is None:
            return False
        groups[:] = rest
        return True

    def with_sums(self, groups: list[Group]) -> list[Group]:
        """The groups, where sums are computed by the kernel that stores what they are sums of, or that reads the same
        elements."""
        pairs = [
            (group, other) for group in groups for other in groups
            if group is not other and group.lengths == {0} and other.lengths <= {0} and not other.is_view
        ]  # fmt: skip
        for group, other in pairs:
            if not self.has_all(group.read & (other.known | other.read), group):
                continue
            try:
                both = self.group([*group.roots, *other.roots])
            except NotFusableError:
                continue
            rest = [each for each in groups if each is not group and each is not other]
            if self.fits(both) and self.scheduled([*rest, both]) is not None:
                return self.with_sums([*rest, both])
        return groups

    def has_all(self, names: Iterable[str], group: Group) -> bool:
        """Whether one of these values has as many elements as the group sums."""
        size = self.values[self.given[group.roots[0]].operands[0]].numel()
        return any(self.values[name].numel() >= size for name in names)

    def casts_together(self, groups: list[Group]) -> list[Group]:
        """The groups, where casts of what the forward is given are one: those of the parameters, under autocast. So are
        the last ones of the backward: those of their gradients."""
        found = [group for group in groups if self.is_cast_with_others(group)]
        if len(found) < 2:
            return groups
        rest = [group for group in groups if group not in found]
        for start in range(0, len(found), MOST_CASTS):
            roots = [group.roots[0] for group in found[start : start + MOST_CASTS]]
            names = [self.given[root].operands[0] for root in roots]
            outs = [self.values[self.given[root].makes[0]] for root in roots]
            results = [Result(tuple(t.shape), t.stride(), t.dtype) for t in outs]
            dtypes = [self.values[name].dtype for name in names]
            kernel = casts(results, dtypes, [t.numel() for t in outs], outs[0].device)
            readers = dict.fromkeys(names, (min(roots), max(roots)))
            calls = calls_of([kernel], tuple(names), tuple(self.given[root].makes[0] for root in roots))
            rest.append(Group(roots, roots, calls, tuple(names), frozenset(), frozenset(roots), readers))
        return rest

    def is_cast_with_others(self, group: Group) -> bool:
        operation = self.given[group.roots[0]]
        if len(group.roots) > 1 or spelled(operation) not in CASTS:
            return False
        (name,), (out,) = operation.operands, operation.makes
        t, made = self.values[name], self.values[out]
        if self.again is None:
            is_one, most = name not in self.places, LARGEST_CAST
        else:
            is_last = out in self.needed and not any(out in other.uses for other in self.given)
            is_one, most = name in self.places and is_last, LARGEST_LAST_CAST
        return (
            is_one
            and group.inputs == (name,)
            and not self.is_written(name)
            and t.stride() == made.stride()
            and FLOATING.issuperset((t.dtype, made.dtype))
            and t.numel() <= most
        )

    def bytes_read(self, group: Group) -> int:
        return sum(self.values[base].nbytes for base, _ in group.loads)

    def without_unread(self, group: Group, groups: Sequence[Group]) -> Group:
        """The group, where what nothing else reads is not stored."""
        if all(row_length(self.given[root], self.values) == 0 for root in group.roots) or len(group.roots) == 1:
            return group
        read = {self.base(name) for name in self.needed}
        for i, operation in enumerate(self.given):
            if i not in self.fusable and not is_followed(operation, self.values):
                read |= {self.base(name) for name in operation.uses}
        read = read.union(*(other.inputs for other in groups if other is not group))
        stores = [root for root in group.roots if self.given[root].makes[0] in read]
        return group if len(stores) == len(group.roots) else self.group(group.roots, stores, in_rows=True)

    def is_written(self, name: str) -> bool:
        return storage(self.values[name]) in self.writers

    def belong_together(self, a: Group, b: Group) -> bool:
        if a.is_view or b.is_view:
            return False
        first, second = (self.given[g.roots[0]] for g in (a, b))
        if not ROWS.keys().isdisjoint(map(spelled, (first, second))):
            return False
        is_sum = spelled(first) in SUMS
        if is_sum != (spelled(second) in SUMS):
            return False
        if is_sum:
            x, y = (self.values[o.operands[0]] for o in (first, second))
            if x.shape != y.shape or reduced_dims(first, x) != reduced_dims(second, y):
                return False
        elif self.values[first.makes[0]].numel() != self.values[second.makes[0]].numel():
            return False
        size = self.values[first.operands[0]].numel() if is_sum else self.values[first.makes[0]].numel()
        shared = {base for base, _ in a.loads & b.loads if 2 * self.values[base].numel() >= size}
        reads = {base for base, place in b.loads if place == Index.of("x", size)}
        return bool(shared) or not reads.isdisjoint(self.given[root].makes[0] for root in a.roots)

    def pays(self, group: Group) -> bool:
        """Whether a kernel saves a launch, or is faster than the one of torch."""
        if group.is_view:
            return True
        names = [spelled(self.given[member]) for member in group.members]
        launches = sum(LAUNCHES.get(name, 1) for name in names if name not in FILLED)
        first = self.given[group.roots[0]]
        return launches > 1 or self.sums_columns(first) or self.takes_elements(first)

    def takes_elements(self, operation: Operation) -> bool:
        """Whether torch moves one element at a time, since the operands of an operation differ in layout, size or
        dtype: a copy of strided rows then takes two to three times a copy of all, a sum 1.3 to 1.6 times, and a product
        with what is broadcast (bfloat16, 8192 by 1152) twice the time."""
        out = self.values[operation.makes[0]]
        given = [self.values[name] for name in operation.operands]
        whole = [out, *(t for t in given if t.numel() == out.numel())]
        if out.nbytes < COLUMNS or not out.is_floating_point() or spelled(operation) in WHOLE:
            return False
        last = [min((d for d in range(t.dim()) if t.shape[d] > 1), key=t.stride) for t in whole]
        if any(t.stride(d) != 1 for t, d in zip(whole, last, strict=True)) or len(set(last)) > 1:
            return False  # Of rows that lie across each other a kernel takes one element at a time as well.
        strides, dtypes = {t.stride() for t in whole}, {t.dtype for t in whole}
        name = spelled(operation)
        broadcast = name == "repeat" or (len(whole) <= len(given) and name in FORMULAS)
        return broadcast or len(strides) > 1 or (len(dtypes) > 1 and len(whole) > 2)

    def sums_columns(self, operation: Operation) -> bool:
        if spelled(operation) != "sum.dim_IntList":
            return False
        x = self.values[operation.operands[0]]
        dims = reduced_dims(operation, x)
        used = [d for d in range(x.dim()) if x.shape[d] > 1]
        return x.nbytes >= COLUMNS and is_dense(x) and min(used, key=x.stride) not in dims

    # -- one kernel ----------------------------------------------------------------------------------------------

    def group(self, roots: Sequence[int], stores: Sequence[int] = (), in_rows: bool | None = None) -> Group:
        """The group of these roots; most are asked for again after another value was found to be stored.

        Raises:
            NotFusableError: one kernel cannot compute them.
        """
        if in_rows is None:
            in_rows = any(spelled(self.given[root]) in ROWS for root in roots)
        key = (*roots,), (*stores,), in_rows
        if key not in self._groups or not self.is_up_to_date(self._groups[key]):
            self._groups[key] = self.new_group(roots, stores, in_rows)
        return self._groups[key]

    def is_up_to_date(self, group: Group) -> bool:
        """Whether what a kernel computes for itself is still fusable, and not stored."""
        return group.members <= self.fusable and self.stored.isdisjoint(group.members.difference(group.roots))

    def new_group(self, roots: Sequence[int], stores: Sequence[int], in_rows: bool) -> Group:
        writer = KernelWriter(self, roots, stores or roots, in_rows)
        kernels = writer.kernels()
        inputs, given = tuple(writer.inputs), [self.given[root] for root in roots]
        makes = tuple(self.given[root].makes[0] for root in writer.stores)
        alias = self.alias(writer, makes)
        return Group(
            roots=list(roots),
            stores=list(writer.stores),
            calls=calls_of(kernels, inputs, makes) if alias is None else [alias],
            inputs=inputs,
            loads=frozenset(writer.loads),
            members=frozenset(writer.members | set(roots)),
            readers=writer.readers,
            lengths=frozenset(row_length(o, self.values) for o in given if spelled(o) in WHOLE),
            read=frozenset(writer.inputs),
            known=frozenset(writer.inputs).union(o.makes[0] for o in given),
        )

    def alias(self, writer: KernelWriter, makes: Sequence[str]) -> Operation | None:
        """The view of a value that a result is, if to compute it is to copy that value in the order of its memory."""
        if len(makes) > 1 or len(writer.loads) != 1 or writer.code.operations.keys() - PLAIN_COPIES:
            return None
        ((base, place),) = writer.loads
        x, made = self.values[base], self.values[makes[0]]
        same = x.dtype is made.dtype and x.numel() == made.numel() and place == Index.of("x", made.numel())
        shared = {storage(x), storage(made)}
        # Others may write to what comes from elsewhere.
        if not same or base not in self.producers or not shared.isdisjoint(self.returned | self.writers.keys()):
            return None
        args = Value(base), tuple(made.shape), made.stride(), x.storage_offset()
        return Operation(torch.ops.aten.as_strided.default, args, {}, (makes[0],), single=True, effect=False, view=True)

    def fits(self, group: Group) -> bool:
        """Whether nothing writes to what a kernel reads between the operations that read it."""
        return not any(
            first <= writer <= last
            for name, (first, last) in group.readers.items()
            for writer in self.writers.get(storage(self.values[name]), ())
        )

    # -- order ---------------------------------------------------------------------------------------------------

    def scheduled(self, groups: Sequence[Group], others: Sequence[Group] = ()) -> list[Operation] | None:
        """The operations in an order in which each follows what it needs; None if there is none.

        ``others`` are groups that stand for those of their roots that no group has.
        """
        taken = {root for group in groups for root in group.roots}
        groups = [*groups, *(group for group in others if taken.isdisjoint(group.roots))]
        count = len(self.given)
        units: dict[int, tuple[list[Operation], Iterable[str]]] = {}
        for i, operation in enumerate(self.given):
            if i not in self.fusable:
                units[i] = [operation], operation.uses
        for i, group in enumerate(groups):
            units[count + i] = group.calls, group.inputs
        makers = {name: unit for unit, (calls, _) in units.items() for call in calls for name in call.makes if name}
        before: dict[int, set[int]] = {unit: set() for unit in units}
        previous = None
        for unit, (calls, uses) in units.items():
            before[unit] |= {makers[name] for name in uses if name in makers} - {unit}
            if calls[0].effect:
                if previous is not None:
                    before[unit].add(previous)
                previous = unit
            for name in uses if self.writers else ():
                first, last = (unit, unit) if unit < count else groups[unit - count].readers[name]
                for writer in self.writers.get(storage(self.values[name]), ()):
                    if writer < first:
                        before[unit].add(writer)
                    elif writer > last:
                        before[writer].add(unit)
                    elif writer != unit:
                        return None
        priority = {unit: unit if unit < count else max(groups[unit - count].roots) for unit in units}
        after: dict[int, list[int]] = defaultdict(list)
        for unit, earlier in before.items():
            for other in earlier:
                after[other].append(unit)
        waiting = {unit: len(earlier) for unit, earlier in before.items()}
        ready = [(priority[unit], unit) for unit, left in waiting.items() if left == 0]
        heapq.heapify(ready)
        found: list[Operation] = []
        done = 0
        while ready:
            _, unit = heapq.heappop(ready)
            done += 1
            found += units[unit][0]
            for other in after[unit]:
                waiting[other] -= 1
                if waiting[other] == 0:
                    heapq.heappush(ready, (priority[other], other))
        return alive(found, self.needed) if done == len(units) else None

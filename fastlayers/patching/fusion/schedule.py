"""Which operations become one kernel, and in which order kernels and what is left run.

A value that only fusable operations read is not stored but computed where it is read, through views, slices and
concatenations. A group of results that one kernel makes is run where the last of them was computed. It is kept as it
was if that would save no launch.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fastlayers.kernels.affine import Index
from fastlayers.kernels.formulas import FORMULAS, ROWS, SUMS
from fastlayers.kernels.generated import Kernel, Result, casts
from fastlayers.kernels.symbolic import conditions
from fastlayers.patching.fusion.fusable import CASTS, FILLED, FLOATING, WHOLE, is_dense, is_fusable, reduced_dims
from fastlayers.patching.fusion.kernel_writer import KernelWriter, NotFusableError, row_length
from fastlayers.patching.fusion.matcher import call, step
from fastlayers.patching.fusion.recomputed import Recomputed, reads_less
from fastlayers.patching.program.cost import LAUNCHES
from fastlayers.patching.program.operators import spelled
from fastlayers.patching.program.program import Operation, Value, alive, base_of, is_followed, storage, written_by
from fastlayers.patching.program.shapes import Shaped

__all__ = ["Fusion", "Group"]

#: Bytes of a tensor whose sums down columns, or a copy into another layout, are worth a kernel by themselves.
COLUMNS = 2**22
#: Operations that give each element as it is.
PLAIN_COPIES = frozenset({"clone", "contiguous"})
#: Casts that one kernel does, and elements of a larger one, whose launch takes no time beside it: of parameters, and of
#: their gradients, which have to wait for the last of these.
MOST_CASTS, LARGEST_CAST, LARGEST_LAST_CAST = 24, 2**24, 2**20


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
    #: what its kernels assume of sizes that differ
    assumed: tuple[str, ...] = ()

    @property
    def is_view(self) -> bool:
        """Whether there is nothing to compute."""
        return self.calls[0].view


def calls_of(
    kernels: Sequence[Kernel], inputs: tuple[str, ...], makes: tuple[str, ...], source: str | None
) -> list[Operation]:
    """The calls of one kernel, or of two, of which the second adds up the first results."""
    given = tuple(map(Value, inputs))
    if len(kernels) == 1:
        return [replace(call(kernels[0], (*given, *kernels[0].sizes), makes), source=source)]
    summed = len(kernels[1].results)
    parts = tuple(f"{name}_parts" for name in makes[:summed])
    first = call(kernels[0], (*given, *kernels[0].sizes), (*parts, *makes[summed:]))
    given = tuple(map(Value, parts))
    calls = first, call(kernels[1], (*given, *kernels[1].sizes), makes[:summed])
    return [replace(each, source=source) for each in calls]


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
        values: Mapping[str, Shaped],
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
            calls = calls_of([kernel], tuple(names), tuple(self.given[root].makes[0] for root in roots), None)
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
            and type(t.numel()) is int
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
        with conditions() as assumed:
            kernels = writer.kernels()
            if not all(is_dense(self.values[self.given[root].makes[0]]) for root in roots):
                raise NotFusableError
        inputs, given = tuple(writer.inputs), [self.given[root] for root in roots]
        makes = tuple(self.given[root].makes[0] for root in writer.stores)
        alias = self.alias(writer, makes)
        lines = [self.given[place].source for place in sorted(writer.members | set(roots)) if place >= 0]
        source = "\n".join(dict.fromkeys(filter(None, lines))) or None
        return Group(
            roots=list(roots),
            stores=list(writer.stores),
            calls=calls_of(kernels, inputs, makes, source) if alias is None else [alias],
            inputs=inputs,
            loads=frozenset(writer.loads),
            members=frozenset(writer.members | set(roots)),
            readers=writer.readers,
            lengths=frozenset(row_length(o, self.values) for o in given if spelled(o) in WHOLE),
            read=frozenset(writer.inputs),
            known=frozenset(writer.inputs).union(o.makes[0] for o in given),
            assumed=tuple(assumed),
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
        args = Value(base), made.shape, made.strides, x.offset
        return step(torch.ops.aten.as_strided.default, *args, makes=makes[0], view=True)

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

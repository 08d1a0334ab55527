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
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from fastlayers.kernels.affine import ZERO, Index, divide, indices_of, unflatten
from fastlayers.kernels.generated import (
    COMPARISONS,
    FORMULAS,
    NAMES,
    SUMS,
    Code,
    Kernel,
    Result,
    accumulator_of,
    compile_together,
    number,
    pointwise,
    reduction,
)
from fastlayers.patching.rewrite.tape import Operation, Program, Value, alive, map_values, storage

__all__ = ["fused"]

FLOATING = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})

#: Operations that give their first argument another dtype or layout.
COPIES = frozenset({"to.dtype", "_to_copy", "clone", "contiguous"})
#: Operations that give the elements of their arguments other places.
MOVES = frozenset({"cat", "stack", "slice_backward", "select_backward", "constant_pad_nd", "roll"})
#: Operations on conditions.
LOGICAL = {
    "logical_not": "({0} == 0)", "bitwise_not": "({0} == 0)", "logical_and": "({0} & {1})",
    "logical_or": "({0} | {1})", "bitwise_and.Tensor": "({0} & {1})", "bitwise_or.Tensor": "({0} | {1})",
}  # fmt: skip
#: Operations that choose between values.
CHOICES = frozenset({"where.self", "masked_fill.Scalar", "masked_fill.Tensor"})
#: Values that are nowhere stored.
FILLED = {"zeros": 0, "new_zeros": 0, "zeros_like": 0, "ones": 1, "new_ones": 1, "ones_like": 1}
#: A tensor so many times smaller than another one is read from caches.
BROADCAST = 8
#: Bytes of a tensor whose sums down columns are worth a kernel by themselves.
COLUMNS = 2**22
#: Inputs of a kernel. More of them need more registers for addresses than there are.
MAX_INPUTS = 24


class NotFusableError(Exception):
    """These operations cannot be one kernel."""


def fused(program: Program, values: dict[str, Tensor]) -> Program:
    """A program that computes the same with fewer passes over memory.

    ``values`` are those of its tape; a value that was written in place gets another name there after that.
    """
    program = without_repetitions(program, values)
    unfused: set[int] = set()
    while True:  # What was written in place is, unless it is fused.
        attempt, functional = functionalized(program, values, unfused)
        done = both_ways(attempt, values)
        left = {place for place, operation in functional.items() if any(o is operation for o in (*done.forward, *done.backward))}
        if not left:
            kernels = [o.function for o in (*done.forward, *done.backward) if isinstance(o.function, Kernel)]
            compile_together(list(dict.fromkeys(kernels)))
            return done
        unfused |= left


def without_repetitions(program: Program, values: Mapping[str, Tensor]) -> Program:
    """The program with each value computed once: autocast, for one, casts the input of each of three projections."""
    operations = [*program.forward, *program.backward]
    writers = written_by(operations, values)
    known: dict[Any, Operation] = {}
    same: dict[str, str] = {}
    found: list[list[Operation]] = [[], []]
    for place, given in enumerate(operations):
        operation = given if same.keys().isdisjoint(given.uses) else with_names(given, same)
        touched = {storage(values[name]) for name in (*given.uses, *filter(None, given.makes))}
        if not operation.effect and writers.keys().isdisjoint(touched):
            earlier = known.setdefault((operation.function, repr(operation.args), repr(operation.kwargs)), operation)
            pairs = list(zip(operation.makes, earlier.makes, strict=True))
            if earlier is not operation and all(a == "" or (b and a not in program.results) for a, b in pairs):
                same |= {a: b for a, b in pairs if a}
                continue
        found[place >= len(program.forward)].append(operation)
    used = {name for operation in found[1] for name in operation.uses}
    own = {name for operation in found[1] for name in operation.makes} | set(program.grads)
    wanted = tuple(name and same.get(name, name) for name in program.wanted)
    used |= {name for name in wanted if name is not None}
    kept = tuple(sorted(used - own)) if program.grads else program.kept
    return replace(program, forward=found[0], backward=found[1], wanted=wanted, kept=kept)


def both_ways(program: Program, values: Mapping[str, Tensor]) -> Program:
    backward, kept = program.backward, program.kept
    if program.grads:
        wanted = [name for name in program.wanted if name is not None]
        read: set[str] = set()
        while True:
            again = Recomputed(program, values, read)
            backward = Fusion(program.backward, values, wanted, again).operations()
            used = frozenset().union(*(operation.uses for operation in backward), wanted)
            if used.isdisjoint(again.computed):
                break
            read |= used & again.computed  # An operation that was not fused after all.
        own = {name for operation in backward for name in operation.makes} | set(program.grads)
        kept = tuple(sorted(used - own))
    forward = Fusion(program.forward, values, [*program.results, *kept]).operations()
    return replace(program, forward=forward, backward=backward, kept=kept)


# -- operations --------------------------------------------------------------------------------------------------------


def spelled(operation: Operation) -> str:
    """The name of an operation of torch, without that of its only overload; empty for one of another kind."""
    function = operation.function
    if not isinstance(function, OpOverload) or function.namespace != "aten":
        return ""
    name = function._schema.name.split("::")[1]
    return name if function._schema.overload_name in ("", "default") else f"{name}.{function._schema.overload_name}"


def operands(operation: Operation) -> list[str]:
    found: list[str] = []
    map_values((*operation.args, *operation.kwargs.values()), lambda value: found.append(value.name))
    return found


def argument(operation: Operation, place: int, name: str, default: Any = None) -> Any:
    return operation.args[place] if len(operation.args) > place else operation.kwargs.get(name, default)


def is_dense(t: Tensor) -> bool:
    return t.numel() > 0 and torch.ops.aten.is_non_overlapping_and_dense(t)


def written_by(operations: Iterable[Operation], values: Mapping[str, Tensor]) -> dict[int, list[int]]:
    """For each memory that is written, the places of the operations that do."""
    found: dict[int, list[int]] = defaultdict(list)
    for place, operation in enumerate(operations):
        for name in written(operation):
            found[storage(values[name])].append(place)
    return found


def written(operation: Operation) -> list[str]:
    """The names of the values that an operation may write."""
    if not operation.effect:
        return []
    if not isinstance(operation.function, OpOverload):
        return list(operation.uses)
    schema = operation.function._schema
    found: list[str] = []
    names = [a.name for a in schema.arguments]
    for place, declared in enumerate(schema.arguments):
        if declared.is_write or schema.name.startswith("fastlayers"):  # Running statistics are not always declared.
            given = operation.args[place] if place < len(operation.args) else operation.kwargs.get(names[place])
            map_values([given], lambda value: found.append(value.name))
    return found


def functionalized(
    program: Program, values: dict[str, Tensor], unfused: set[int]
) -> tuple[Program, dict[int, Operation]]:
    """The program with pointwise operations in place as ones that return another tensor, by their places."""
    operations = [*program.forward, *program.backward]
    split = len(program.forward)
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


def functional_of(operation: Operation) -> OpOverload | None:
    """The operation that returns what a pointwise one writes over its first argument."""
    name = spelled(operation)
    base, dot, overload = name.partition(".")
    if not base.endswith("_") or not operation.effect or any(operation.makes) or f"{base[:-1]}{dot}{overload}" not in (
        *FORMULAS, *CHOICES
    ):
        return None
    return getattr(getattr(torch.ops.aten, base[:-1]), overload or "default")  # type: ignore[no-any-return]


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


def with_names(operation: Operation, names: Mapping[str, str]) -> Operation:
    def rename(value: Value) -> Value:
        return Value(names.get(value.name, value.name))

    kwargs = {name: map_values(value, rename) for name, value in operation.kwargs.items()}
    return replace(operation, args=map_values(operation.args, rename), kwargs=kwargs)


# -- what can be fused --------------------------------------------------------------------------------------------------


def is_fusable(operation: Operation, values: Mapping[str, Tensor]) -> bool:
    """Whether an operation has a formula, for the tensors that it is given."""
    name = spelled(operation)
    if operation.effect or not operation.single or len(operation.makes) != 1 or not operation.makes[0]:
        return False
    out = values[operation.makes[0]]
    given = [values[n] for n in operands(operation)]
    if out.dtype not in NAMES or not is_dense(out) or any(t.dtype not in NAMES or t.device != out.device for t in given):
        return False
    floating = out.dtype in FLOATING
    if name in COPIES:
        return bool(given) and (operation.kwargs.get("device") in (None, out.device))
    if name in MOVES:
        return all((t.dtype is out.dtype or floating) and t.numel() > 0 for t in given)
    if name in FILLED or name in ("full", "scalar_tensor"):
        return floating or out.dtype is torch.bool
    if name in LOGICAL:
        return all(t.dtype is torch.bool for t in given)
    if name in CHOICES:
        return floating and all(t.dtype in FLOATING or t.dtype is torch.bool for t in given)
    base = name.partition(".")[0]
    if base in COMPARISONS:
        return not any(isinstance(arg, complex) for arg in operation.args)
    if name in SUMS:
        return floating and given[0].dtype in FLOATING and is_plain_sum(operation, given[0])
    if name not in FORMULAS or not floating or not all(t.dtype in FLOATING or t.dtype is torch.bool for t in given):
        return False
    return formula(operation, [f"t{i}" for i in range(len(given))], accumulator_of(out.dtype)) is not None


def formula(operation: Operation, locals_: Sequence[str], acc: torch.dtype) -> str | None:
    """The source of a pointwise operation on locals."""
    given = iter(locals_)
    args = map_values(operation.args, lambda _: next(given))
    kwargs = {name: map_values(value, lambda _: next(given)) for name, value in operation.kwargs.items()}
    if spelled(operation) == "div.Tensor" and not isinstance(operation.args[1], Value):
        return FORMULAS["div.Scalar"](acc, *args)
    args = tuple(number(arg, acc) if is_second(operation, i) else arg for i, arg in enumerate(args))
    return FORMULAS[spelled(operation)](acc, *args, **kwargs)


def is_second(operation: Operation, place: int) -> bool:
    """Whether an argument is a number where the schema has a tensor."""
    declared = operation.function._schema.arguments[place]  # type: ignore[attr-defined]
    return str(declared.type) == "Tensor" and not isinstance(operation.args[place], Value)


def is_plain_sum(operation: Operation, x: Tensor) -> bool:
    if spelled(operation) != "linalg_vector_norm":
        return argument(operation, 1, "dim") is not None
    return argument(operation, 1, "ord", 2) == 2 and argument(operation, 2, "dim") is not None


def reduced_dims(operation: Operation, x: Tensor) -> tuple[int, ...]:
    dims = argument(operation, *((2, "dim") if spelled(operation) == "linalg_vector_norm" else (1, "dim")))
    return tuple(sorted({d % x.dim() for d in dims})) if dims else tuple(range(x.dim()))


class Recomputed:
    """What a backward computes again of the forward, instead of keeping it.

    That is a value of which only fusable operations of the backward make use, if what it is computed of is not larger,
    and is there anyway or replaces what would be kept. Those in ``read`` are kept.
    """

    def __init__(self, program: Program, values: Mapping[str, Tensor], read: set[str]) -> None:
        self.values = values
        self.outer = {name: operation for operation in program.forward for name in operation.makes if name}
        self.written = written_by([*program.forward, *program.backward], values)
        self.known: dict[str, frozenset[str] | None] = {}
        #: The values that are there in the backward,
        self.available = {*program.inputs, *program.grads, *program.kept}
        #: and those that are not read but computed.
        self.computed: set[str] = set()
        outside = {
            name for operation in program.backward
            if not operation.view and not is_fusable(operation, values) for name in operation.uses
        } | set(program.wanted) | read  # fmt: skip
        own = {name: operation for operation in program.backward for name in operation.makes if name}
        outside = {base_of(name, own, values) for name in outside if name is not None}
        for name in sorted(program.kept, key=lambda name: (-values[name].nbytes, name)):
            leaves = self.leaves(name) if name not in outside and name not in program.inputs else None
            if leaves is None or not reads_less(leaves, name, values):
                continue
            if sum(values[leaf].nbytes for leaf in leaves - self.available) <= values[name].nbytes:
                self.available |= leaves
                self.computed.add(name)

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
            if operation is None or spelled(operation) in SUMS or not is_fusable(operation, self.values):
                return None
            found: frozenset[str] = frozenset()
            for operand in operands(operation):
                base = base_of(operand, self.outer, self.values)
                if storage(self.values[base]) in self.written:
                    return None
                more = self.leaves(base)
                found |= {base} if more is None else more
            self.known[name] = found
        return self.known[name]


def reads_less(leaves: Iterable[str], name: str, values: Mapping[str, Tensor]) -> bool:
    """Whether to compute a value again takes no more reads than to read it. What is broadcast stays in caches."""
    size = values[name].nbytes
    return sum(min(values[leaf].nbytes, size) for leaf in leaves if values[leaf].nbytes > size / BROADCAST) <= size


def base_of(name: str, producers: Mapping[str, Operation], values: Mapping[str, Tensor]) -> str:
    """The value of whose memory another one is a view."""
    while (operation := producers.get(name)) is not None and operation.view:
        source = operation.args[0]
        if not isinstance(source, Value) or values[source.name].dtype is not values[name].dtype:
            break
        name = source.name
    return name


# -- kernels ------------------------------------------------------------------------------------------------------------


@dataclass
class Group:
    """Results that one kernel makes."""

    roots: list[int]
    kernels: tuple[Kernel, ...]
    inputs: tuple[str, ...]
    loads: frozenset[tuple[str, Index]]
    #: The places of the operations that it stands for,
    members: frozenset[int]
    #: and for each input the first and the last of those that read it.
    readers: Mapping[str, tuple[int, int]]

    def calls(self, makes: tuple[str, ...]) -> list[Operation]:
        """The calls of its kernels. Of two, the second adds up what the first one leaves."""
        parts = [tuple(f"{name}_parts" for name in makes), makes][2 - len(self.kernels) :]
        takes = [self.inputs, parts[0]]
        return [
            Operation(kernel, tuple(map(Value, taken)), {}, made, single=False, effect=False)
            for kernel, taken, made in zip(self.kernels, takes, parts, strict=False)
        ]


class Fusion:
    """The fusion of a list of operations.

    Args:
        values: the tensors that the names stand for, of which the geometry is read.
        needed: the names of the values that are needed after these operations.
        again: what may be computed of other operations.
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        values: Mapping[str, Tensor],
        needed: Iterable[str],
        again: Recomputed | None = None,
    ) -> None:
        self.given, self.values, self.needed, self.again = list(operations), values, list(needed), again
        self.producers = {name: operation for operation in operations for name in operation.makes if name}
        self.places = {name: i for i, operation in enumerate(operations) for name in operation.makes if name}
        self.writers = written_by(operations, values)
        self.fusable = {
            i for i, operation in enumerate(operations)
            if is_fusable(operation, values) and not self.is_written(operation.makes[0])
        }  # fmt: skip
        self.stored: set[int] = set()

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
        order = self.scheduled(groups)
        assert order is not None  # Each group was tested.
        return order

    def must_be_stored(self) -> set[int]:
        """The places of the fusable operations whose results others read, or that are sums."""
        outside = {self.base(name) for i, op in enumerate(self.given) if i not in self.fusable and not op.view for name in op.uses}
        outside |= {self.base(name) for name in self.needed}
        return {
            i for i in self.fusable
            if self.given[i].makes[0] in outside or spelled(self.given[i]) in SUMS
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

    def is_written(self, name: str) -> bool:
        return storage(self.values[name]) in self.writers

    def belong_together(self, a: Group, b: Group) -> bool:
        first, second = (self.given[g.roots[0]] for g in (a, b))
        is_sum = spelled(first) in SUMS
        if is_sum != (spelled(second) in SUMS):
            return False
        if is_sum:
            x, y = (self.values[operands(o)[0]] for o in (first, second))
            if x.shape != y.shape or reduced_dims(first, x) != reduced_dims(second, y):
                return False
        elif self.values[first.makes[0]].numel() != self.values[second.makes[0]].numel():
            return False
        size = self.values[operands(first)[0]].numel() if is_sum else self.values[first.makes[0]].numel()
        shared = {base for base, _ in a.loads & b.loads if 2 * self.values[base].numel() >= size}
        reads = {base for base, place in b.loads if place == Index.of("x", size)}
        return bool(shared) or not reads.isdisjoint(self.given[root].makes[0] for root in a.roots)

    def pays(self, group: Group) -> bool:
        """Whether a kernel saves a launch, or is faster than torch's: its sums down columns take three times a copy."""
        launches = sum(1 for member in group.members if spelled(self.given[member]) not in FILLED)
        return launches > 1 or self.sums_columns(self.given[group.roots[0]])

    def sums_columns(self, operation: Operation) -> bool:
        if spelled(operation) != "sum.dim_IntList":
            return False
        x = self.values[operands(operation)[0]]
        dims = reduced_dims(operation, x)
        used = [d for d in range(x.dim()) if x.shape[d] > 1]
        return x.nbytes >= COLUMNS and is_dense(x) and min(used, key=x.stride) not in dims

    # -- one kernel ----------------------------------------------------------------------------------------------

    def group(self, roots: Sequence[int]) -> Group:
        writer = Writer(self, roots)
        kernels = writer.kernels()
        members = frozenset(writer.members | set(roots))
        return Group(list(roots), kernels, tuple(writer.inputs), frozenset(writer.loads), members, writer.readers)

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
            calls = group.calls(tuple(self.given[root].makes[0] for root in group.roots))
            units[count + i] = calls, group.inputs
        makers = {name: unit for unit, (calls, _) in units.items() for name in calls[-1].makes if name}
        before: dict[int, set[int]] = {unit: set() for unit in units}
        previous = None
        for unit, (calls, uses) in units.items():
            before[unit] |= {makers[name] for name in uses if name in makers} - {unit}
            if calls[0].effect:
                if previous is not None:
                    before[unit].add(previous)
                previous = unit
            for name in uses:
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


class Writer:
    """Writes the kernel of some results."""

    def __init__(self, fusion: Fusion, roots: Sequence[int]) -> None:
        self.fusion, self.values, self.roots = fusion, fusion.values, roots
        self.inputs: dict[str, str] = {}
        self.loads: set[tuple[str, Index]] = set()
        self.members: set[int] = set()
        self.readers: dict[str, tuple[int, int]] = {}
        self._reader = roots[0]
        self._known: dict[Any, str] = {}
        self.reduction = spelled(fusion.given[roots[0]]) in SUMS

    def kernels(self) -> tuple[Kernel, ...]:
        given = [self.fusion.given[root] for root in self.roots]
        outs = [self.values[operation.makes[0]] for operation in given]
        results = [Result(tuple(t.shape), t.stride(), t.dtype) for t in outs]
        if self.reduction:
            return self.sums(given, outs, results)
        self.code = Code({"x": outs[0].numel()})
        stores = []
        for root, operation, t in zip(self.roots, given, outs, strict=True):
            indices = indices_of("x", t.shape, t.stride())
            if indices is None:
                raise NotFusableError(root)
            stores.append(self.computed(operation.makes[0], root, operation, indices, ""))
        self.check()
        extent = max(self.extent(outs), 1)
        return (pointwise(self.code, stores, results, self.dtypes(), extent, outs[0].device),)

    def sums(self, given: list[Operation], outs: list[Tensor], results: list[Result]) -> tuple[Kernel, ...]:
        x = self.values[operands(given[0])[0]]
        dims = reduced_dims(given[0], x)
        out = outs[0]
        keeps = out.dim() == x.dim()
        kept = [d for d in range(x.dim()) if d not in dims]
        count = math.prod(x.shape[d] for d in dims)
        self.code = Code({"x": out.numel(), "r": count})
        places = indices_of("x", out.shape, out.stride())
        # Elements of one sum are visited in the order of memory of what is summed, as far as its strides tell.
        order = sorted(dims, key=lambda d: -x.stride(d))
        strides, step = {}, 1
        for d in reversed(order):
            strides[d], step = step, step * x.shape[d]
        inner = unflatten(Index.of("r", count), [x.shape[d] for d in dims], [strides[d] for d in dims])
        if places is None or inner is None:
            raise NotFusableError(self.roots[0])
        indices = [ZERO] * x.dim()
        for i, d in enumerate(kept):
            indices[d] = places[d if keeps else i]
        for i, d in enumerate(dims):
            indices[d] = inner[i]
        summed, finished = [], []
        for operation in given:
            name = operands(operation)[0]
            self._reader = self.fusion.places[operation.makes[0]]
            local = self.value(name, tuple(indices), "")
            out = self.values[operation.makes[0]]
            wide = torch.float64 if out.dtype is torch.float64 else torch.float32
            local = self.code.cast(local, self.values[name].dtype, wide)
            each, total = SUMS[spelled(operation)]
            summed.append(self.code.let(each.format(x=local)))
            finished.append(total)
        self.check()
        used = [d for d in range(x.dim()) if x.shape[d] > 1]
        along = not used or min(used, key=x.stride) in dims
        extent = max(self.extent(outs), 1)
        return reduction(self.code, summed, finished, results, self.dtypes(), extent, along, x.device)

    def dtypes(self) -> list[torch.dtype]:
        return [self.values[name].dtype for name in self.inputs]

    def check(self) -> None:
        if len(self.inputs) > MAX_INPUTS:
            raise NotFusableError

    def extent(self, outs: Sequence[Tensor]) -> int:
        """The number of elements that the memory of the largest tensor spans."""
        tensors = [*outs, *(self.values[name] for name in self.inputs)]
        return max(1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) for t in tensors)

    # -- values --------------------------------------------------------------------------------------------------

    def value(self, name: str, indices: tuple[Index, ...], condition: str) -> str:
        """A local with an element of a value."""
        t = self.values[name]
        base = self.fusion.base(name)
        b = self.values[base]
        place = ZERO + (t.storage_offset() - b.storage_offset() if base != name else 0)
        for index, stride in zip(indices, t.stride(), strict=True):
            place = place + index * stride
        found = self.fusion.producer(base)
        if found is not None and (found[0] in self.roots or found[0] not in self.fusion.stored) and not (
            self.reduction and found[0] in self.roots
        ):
            number_, operation = found
            if base != name:
                inner = unflatten(place, b.shape, b.stride())
                if inner is None:
                    raise NotFusableError(number_)
                indices = inner
            return self.computed(base, number_, operation, indices, condition)
        self.loads.add((base, place))
        first, last = self.readers.get(base, (self._reader, self._reader))
        self.readers[base] = min(first, self._reader), max(last, self._reader)
        pointer = self.inputs.setdefault(base, f"in{len(self.inputs)}")
        return self.code.load(pointer, place, condition, b.dtype)

    def computed(
        self, name: str, place: int, operation: Operation, indices: tuple[Index, ...], condition: str
    ) -> str:
        key = name, indices, condition
        if key not in self._known:
            if place >= 0:
                self.members.add(place)
            if spelled(operation) in SUMS:
                raise NotFusableError(place)
            before, self._reader = self._reader, place
            self._known[key] = self.compute(operation, self.values[name], indices, condition)
            self._reader = before
        return self._known[key]

    def operand(self, value: Any, out: Tensor, indices: tuple[Index, ...], condition: str, dtype: torch.dtype) -> str:
        """A local with what an argument that is broadcast contributes to an element, in a dtype."""
        if not isinstance(value, Value):
            return number(value, accumulator_of(dtype))
        t = self.values[value.name]
        own = indices[len(indices) - t.dim() :]
        own = tuple(ZERO if size == 1 else index for size, index in zip(t.shape, own, strict=True))
        return self.code.cast(self.value(value.name, own, condition), t.dtype, dtype)

    def compute(self, operation: Operation, out: Tensor, indices: tuple[Index, ...], condition: str) -> str:
        name, acc = spelled(operation), accumulator_of(out.dtype)
        args = operation.args
        if name in FILLED or name in ("full", "scalar_tensor"):
            value = FILLED[name] if name in FILLED else args[1] if name == "full" else args[0]
            shape = "inside" if not self.reduction else "inside"
            return self.code.let(f"tl.where({shape}, {number(value)}, 0.0).to({NAMES[acc]})")
        if name in COPIES:
            source = self.values[args[0].name]
            local = self.operand(args[0], out, indices, condition, source.dtype)
            if source.dtype not in FLOATING or accumulator_of(out.dtype) is out.dtype:  # Else a double is rounded once.
                local = self.code.cast(local, source.dtype, out.dtype)
            return local if source.dtype is out.dtype else self.code.rounded(local, out.dtype)
        if name in MOVES:
            return self.moved(operation, out, indices, condition)
        if name in CHOICES:
            mask, one, other = args if name == "where.self" else (args[1], args[2], args[0])
            parts = self.operand(mask, out, indices, condition, torch.bool), *(
                self.operand(part, out, indices, condition, out.dtype) for part in (one, other)
            )
            return self.code.rounded("tl.where({}, {}, {})".format(*parts), out.dtype)
        if name in LOGICAL:
            parts = [self.operand(arg, out, indices, condition, torch.bool) for arg in args]
            return self.code.let(LOGICAL[name].format(*parts))
        base = name.partition(".")[0]
        if base in COMPARISONS:
            return self.compared(operation, out, indices, condition, COMPARISONS[base])
        locals_: list[str] = []
        map_values(
            (*args, *operation.kwargs.values()),
            lambda value: locals_.append(self.operand(value, out, indices, condition, out.dtype)),
        )
        if any(self.values[n].dtype is torch.float64 for n in operands(operation)) and out.dtype is not torch.float64:
            raise NotFusableError
        source = formula(operation, locals_, acc)
        assert source is not None
        return self.code.rounded(source, out.dtype)

    def compared(
        self, operation: Operation, out: Tensor, indices: tuple[Index, ...], condition: str, sign: str
    ) -> str:
        a, b = operation.args[:2]
        dtypes = [self.values[value.name].dtype for value in (a, b) if isinstance(value, Value)]
        common = dtypes[0] if len(dtypes) == 1 else torch.promote_types(*dtypes)
        if not isinstance(b, Value) and isinstance(b, float) and common not in FLOATING:
            common = torch.float32
        left = self.operand(a, out, indices, condition, common)
        right = self.operand(b, out, indices, condition, common) if isinstance(b, Value) else (
            number(b) if common in FLOATING else str(int(b))
        )
        return self.code.let(f"({left} {sign} {right})")

    # -- elements in other places -----------------------------------------------------------------------------------

    def moved(self, operation: Operation, out: Tensor, indices: tuple[Index, ...], condition: str) -> str:
        """An element of a result whose elements come from one of several places, or are a number."""
        name, args = spelled(operation), operation.args
        if name in ("cat", "stack"):
            dim = argument(operation, 1, "dim", 0)
            return self.concatenated(args[0], out, dim % out.dim(), name == "stack", indices, condition)
        if name == "roll":
            return self.rolled(operation, out, indices, condition)
        own = list(indices)
        tests: list[str] = []
        fill: Any = 0
        if name == "slice_backward":
            dim, size = args[2] % out.dim(), self.values[args[0].name].shape
            start = min(max(args[3] + (out.shape[dim] if args[3] < 0 else 0), 0), out.shape[dim])
            steps = divide(own[dim], args[5])
            if steps is None:
                raise NotFusableError(self._reader)
            own[dim], rest = steps[0] + -(start // args[5]), steps[1] + -(start % args[5])
            between = self.code.holds(rest, 0, 1)
            if between is None:
                return self.code.let(f"tl.where(inside, {number(0)}, 0.0)")
            tests += [between] if between else []
            bounds = {dim: size[dim]}
        elif name == "select_backward":
            dim = args[2] % out.dim()
            own[dim] = own[dim] + -(args[3] % out.shape[dim])
            bounds = {dim: 1}
        else:
            t, bounds = self.values[args[0].name], {}
            fill = argument(operation, 2, "value", 0)
            for i in range(len(args[1]) // 2):
                dim = out.dim() - 1 - i
                own[dim] = own[dim] + -args[1][2 * i]
                bounds[dim] = t.shape[dim]
        for dim, size in bounds.items():
            test = self.code.holds(own[dim], 0, size)
            if test is None:
                return self.code.let(f"tl.where(inside, {number(fill)}, 0.0)")
            tests += [test] if test else []
        if name == "select_backward":
            del own[dim]
        both = self.joined(condition, *tests)
        local = self.value(args[0].name, tuple(own), both)
        here = self.joined("", *tests)
        return self.code.let(f"tl.where({here}, {local}, {number(fill)})") if here else local

    def joined(self, *conditions: str) -> str:
        wanted = [condition for condition in conditions if condition]
        return self.code.let(" & ".join(wanted)) if len(wanted) > 1 else "".join(wanted)

    def concatenated(
        self, parts: Sequence[Value], out: Tensor, dim: int, stacked: bool, indices: tuple[Index, ...], condition: str
    ) -> str:
        found, start = None, 0
        for part in parts:
            size = 1 if stacked else self.values[part.name].shape[dim]
            own = list(indices)
            own[dim] = own[dim] + -start
            start += size
            test = self.code.holds(own[dim], 0, size)
            if test is None:
                continue
            if stacked:
                del own[dim]
            local = self.value(part.name, tuple(own), self.joined(condition, test))
            local = self.code.cast(local, self.values[part.name].dtype, out.dtype)
            found = local if found is None or not test else self.code.let(f"tl.where({test}, {local}, {found})")
        assert found is not None
        return found

    def rolled(self, operation: Operation, out: Tensor, indices: tuple[Index, ...], condition: str) -> str:
        shifts, dims = operation.args[1], argument(operation, 2, "dims", [])
        if not dims:
            raise NotFusableError
        wrapped = [(list(indices), "")]
        for shift, dim in zip(shifts, dims, strict=True):
            size = out.shape[dim]
            shift, dim = shift % size, dim % out.dim()
            more = []
            for own, tests in wrapped:
                for offset, low, high in ((-shift, shift, size), (size - shift, 0, shift)):
                    test = self.code.holds(indices[dim], low, high) if low < high else None
                    if test is not None:
                        other = list(own)
                        other[dim] = other[dim] + offset
                        more.append((other, self.joined(tests, test)))
            wrapped = more
        found = None
        for own, test in wrapped:
            local = self.value(operation.args[0].name, tuple(own), self.joined(condition, test))
            found = local if found is None or not test else self.code.let(f"tl.where({test}, {local}, {found})")
        assert found is not None
        return found

"""Patterns over a program: which operations stand together, on what condition, and what comes in their place.

A pass of patterns is some rows. A row has a pattern, an :class:`Op`, and a function that is given a :class:`Match` and
returns the operations that come in place of the matched one, an :class:`Edit` if others change as well, or None where
its condition does not hold. CONTRIBUTING.md has an example.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fastlayers.kernels.launch import Producer
from fastlayers.patching.program.operators import called
from fastlayers.patching.program.program import Operation, Program, Value, empty_as, renamed

__all__ = ["Edit", "Match", "Op", "Patterns", "Row", "call", "new", "only_reader", "step", "views_of"]


class Op:
    """A pattern: an operation, what makes its operands, and what reads its result.

    Args:
        names: what it may be called, as :func:`~fastlayers.patching.fusion.fusable.called` says it; any if empty.
        key: under which a match has it.
        of: patterns of what makes its first operands, None for one that may be anything. Views are looked through.
        commutes: whether its first two arguments may come in either order; a match has them in that of the pattern.
        read_by: a pattern of the only operation that reads its first result, which nothing else needs.
        unwritten: whether nothing may write to its first result.
    """

    def __init__(
        self, *names: str, key: str = "", of: Sequence[Op | None] = (), commutes: bool = False,
        read_by: Op | None = None, unwritten: bool = False,
    ) -> None:  # fmt: skip
        self.names, self.key, self.of, self.commutes = frozenset(names), key, of, commutes
        self.read_by, self.unwritten = read_by, unwritten

    def matches(self, operation: Operation | None, program: Program) -> Iterator[dict[str, Operation]]:
        """The ways in which an operation matches: by their keys, those that the pattern names."""
        if operation is None or (self.names and called(operation) not in self.names):
            return
        if self.unwritten and program.is_written(operation.makes[0]):
            return
        reader = only_reader(program, operation.makes[0]) if self.read_by else None
        for later in self.read_by.matches(reader, program) if self.read_by else ({},):
            for turned in (operation, swapped(operation)) if self.commutes else (operation,):
                for before in made_by(self.of, turned.operands, program):
                    yield {self.key: turned, **before, **later}


def swapped(operation: Operation) -> Operation:
    """The operation with its first two arguments in the other order."""
    first, second, *others = operation.args
    return replace(operation, args=(second, first, *others))


def made_by(patterns: Sequence[Op | None], operands: Sequence[str], program: Program) -> Iterator[dict[str, Operation]]:
    """The ways in which what makes some operands matches these patterns."""
    if not patterns:
        yield {}
        return
    if len(operands) < len(patterns):
        return
    first, *others = patterns
    for own in first.matches(maker_of(operands[0], program), program) if first else ({},):
        for rest in made_by(others, operands[1:], program):
            yield own | rest


def maker_of(name: str, program: Program) -> Operation | None:
    """The operation that makes a value, or what that is a view of."""
    return program.makers.get(views_of(name, program)[1])


def views_of(name: str, program: Program, until: Container[str] = ()) -> tuple[list[Operation], str]:
    """The views that make a value of another one, in their order, and that one, or the first one of these."""
    views: list[Operation] = []
    while name not in until and (maker := program.makers.get(name)) is not None and maker.view:
        views.insert(0, maker)
        name = maker.args[0].name
    return views, name


def only_reader(program: Program, name: str) -> Operation | None:
    """The operation that alone reads a value; None if there are several, or the value is needed otherwise."""
    places = program.readers.get(name, ())
    if len(places) != 1 or name in program.needed or name in program.inputs:
        return None
    reader = program.operations[places[0]]
    return reader if reader.operands.count(name) == 1 else None


# -- what replaces a match ---------------------------------------------------------------------------------------------


@dataclass
class Edit:
    """A change of a program.

    Attributes:
        steps: pairs of an operation and what comes in its place, which may be nothing.
        names: other names for values.
    """

    steps: Sequence[tuple[Operation, Sequence[Operation]]]
    names: Mapping[str, str] = field(default_factory=dict)


#: Operations that several matches share, and the place of the first one.
Shared: TypeAlias = dict[Any, tuple[int, Operation]]


@dataclass
class Match:
    """Where a pattern was found.

    Attributes:
        program: as the pass found it.
        place: of the operation among those of the program.
        found: the operations that the pattern names, by their keys.
        root: the one that is replaced.
    """

    program: Program
    place: int
    found: Mapping[str, Operation]
    _shared: Shared

    @property
    def root(self) -> Operation:
        return self.program.operations[self.place]

    @property
    def out(self) -> str:
        """The first result of the root."""
        return self.root.makes[0]

    @property
    def in_backward(self) -> bool:
        return self.place >= len(self.program.forward)

    def __getitem__(self, key: str) -> Operation:
        return self.found[key]

    def is_beside(self, name: str) -> bool:
        """Whether a value is made in the direction of the root."""
        place = self.program.places.get(name)
        return place is not None and (place >= len(self.program.forward)) is self.in_backward

    def t(self, value: Value | str) -> Tensor:
        return self.program.values[value if isinstance(value, str) else value.name]

    def new(self, t: Tensor, dtype: torch.dtype | None = None) -> str:
        """The name of a new value like this one, in memory of its own."""
        with self.program.fake:
            return new(self.program, empty_as(t, dtype))

    def view(self, name: str, like: Tensor, whole: Tensor) -> str:
        """The name of a new view of a value, which lies in it as one tensor does in another."""
        t = self.t(name)
        offset = t.storage_offset() + like.storage_offset() - whole.storage_offset()
        return new(self.program, t.as_strided(like.shape, like.stride(), offset))

    def empty(self, like: Tensor, shape: Sequence[int] | None = None) -> str:
        """The name of a new, contiguous value of another one's dtype and device."""
        with self.program.fake:
            return new(
                self.program, torch.empty(like.shape if shape is None else shape, dtype=like.dtype, device=like.device)
            )

    def launch(self, kernel: Producer, inputs: Iterable[Value]) -> Operation:
        """A call of a kernel, with a new value for each of its results."""
        with self.program.fake:
            makes = [new(self.program, result.empty(kernel.device)) for result in kernel.results]
        return call(kernel, inputs, makes)

    def shared(self, key: Any, make: Callable[[], Operation]) -> Value:
        """The result of an operation that all matches in one direction share, before the first of them."""
        key = self.in_backward, key
        place, operation = self._shared.get(key) or (len(self.program.operations), None)
        if place > self.place:  # Matches come from the end.
            self._shared.pop(key, None)
            self._shared[key] = self.place, operation or make()
        return Value(self._shared[key][1].makes[0])


def new(program: Program, t: Tensor) -> str:
    """The name of a new value."""
    name = f"n{len(program.values)}"
    program.values[name] = t
    return name


def step(function: Any, *args: Any, makes: str, view: bool = False, **kwargs: Any) -> Operation:
    """An operation of torch with one result."""
    return Operation(function, args, kwargs, (makes,), single=True, effect=False, view=view)


def call(kernel: Producer, inputs: Iterable[Any], makes: Iterable[str]) -> Operation:
    """A call of a kernel that makes its results."""
    return Operation(kernel, tuple(inputs), {}, tuple(makes), single=False, effect=False)


# -- rows --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A pattern and what becomes of it.

    Attributes:
        pattern: the operation that is replaced, with those around it.
        becomes: what comes in its place; None where a condition does not hold.
        part: "forward" or "backward", where the operation has to be; empty for either.
        when: what else has to hold, of the machine for one.
    """

    pattern: Op
    becomes: Callable[[Match], Edit | Sequence[Operation] | None]
    part: str = ""
    when: Callable[[Match], bool] = lambda match: True


class Patterns:
    """A pass of patterns.

    Args:
        rows: of those that fit an operation, the first one applies.
        in_turn: whether a row sees what those before it left, operation by operation from the first one, until none
            fits. Otherwise each sees the program as it was before the pass, and of patterns that overlap the last one
            applies.
    """

    def __init__(self, *rows: Row, in_turn: bool = False) -> None:
        self.rows, self.in_turn = rows, in_turn

    def __call__(self, program: Program) -> Program:
        found = (in_turn if self.in_turn else at_once)(program, self.rows)
        return program if found is program else found.settled(found.forward, found.backward)


def in_turn(program: Program, rows: Sequence[Row]) -> Program:
    place = 0
    while place < len(program.operations):
        edit = edit_at(program, place, rows, {})
        if edit is None:
            place += 1
        else:
            program, place = applied(program, edit, place)
    return program


def at_once(program: Program, rows: Sequence[Row]) -> Program:
    steps: dict[int, tuple[Operation, Sequence[Operation]]] = {}
    names: dict[str, str] = {}
    shared: Shared = {}
    for place in reversed(range(len(program.operations))):
        edit = edit_at(program, place, rows, shared) if id(program.operations[place]) not in steps else None
        own = {id(pair[0]): pair for pair in edit.steps} if edit is not None else {}
        if edit is not None and steps.keys().isdisjoint(own):
            steps |= own
            names |= edit.names
    first = defaultdict[int, list[Operation]](list)
    for place, operation in shared.values():
        first[place].append(operation)
    for place, operations in first.items():
        root = program.operations[place]
        _, others = steps.get(id(root), (root, (root,)))
        steps[id(root)] = root, with_shared(operations, others)
    return applied(program, Edit([*steps.values()], names), 0)[0] if steps else program


def with_shared(shared: list[Operation], steps: Sequence[Operation]) -> list[Operation]:
    """The steps of a match, each after what it reads of the shared operations, which come in their order."""
    found: list[Operation] = []
    for each in steps:
        count = max((i + 1 for i, other in enumerate(shared) if other.makes[0] in each.uses), default=0)
        found += [*shared[:count], each]
        shared = shared[count:]
    return [*shared, *found]


def edit_at(program: Program, place: int, rows: Sequence[Row], shared: Shared) -> Edit | None:
    """What the first row that fits an operation makes of it."""
    operation = program.operations[place]
    name, part = called(operation), "forward" if place < len(program.forward) else "backward"
    for row in rows:
        if row.part not in ("", part) or (row.pattern.names and name not in row.pattern.names):
            continue
        for found in row.pattern.matches(operation, program):
            match = Match(program, place, found, shared)
            edit = row.becomes(match) if row.when(match) else None
            if edit is not None:
                return edit if isinstance(edit, Edit) else Edit([(operation, edit)])
    return None


def from_the_line_of(operation: Operation, other: Operation) -> Operation:
    return replace(other, source=operation.source) if operation.source and not other.source else other


def applied(program: Program, edit: Edit, place: int) -> tuple[Program, int]:
    """The program after a change, and where the operation at a place was."""
    steps = {id(operation): [from_the_line_of(operation, each) for each in others] for operation, others in edit.steps}
    made = [steps.get(id(operation), (operation,)) for operation in program.operations]
    forward, backward = ([*chain(*part)] for part in (made[: len(program.forward)], made[len(program.forward) :]))
    found = replace(program, forward=forward, backward=backward)
    return renamed(found, edit.names) if edit.names else found, sum(map(len, made[:place]))

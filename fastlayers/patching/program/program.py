"""A recorded program: torch's operations and our kernels on named values, forward and backward.

:mod:`fastlayers.patching.program.tape` records one, :mod:`fastlayers.patching.fusion.passes` rewrites it, and
:mod:`fastlayers.patching.program.executors` runs it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from fastlayers.kernels.symbolic import Symbolic
from fastlayers.patching.program.shapes import Look, Shaped

__all__ = [
    "STATISTICS",
    "Operation",
    "Program",
    "Value",
    "alive",
    "arguments_of",
    "base_of",
    "depends_on",
    "empty_as",
    "is_followed",
    "is_kernel",
    "keeping",
    "makers_of",
    "map_values",
    "operands_like",
    "overwritten",
    "plain_name",
    "renamed",
    "storage",
    "with_names",
    "with_tensors",
    "written",
    "written_by",
]

#: Operations that update running statistics, which not all declare.
STATISTICS = ("batch_norm", "batch_norm_impl_index", "batch_norm_with_update", "instance_norm")


@dataclass(frozen=True)
class Value:
    """A tensor among the arguments of an operation, by its name on the tape."""

    name: str


@dataclass
class Operation:
    """One call on a tape.

    Attributes:
        function: what is called: an operation of torch, or a kernel of another kind.
        args: the arguments, with a :class:`Value` in place of each tensor, also in lists and tuples.
        kwargs: those that are passed by their names.
        makes: a name for each result; empty for one that has none.
        single: whether the call returns its only result, not a tuple of them.
        effect: whether the call matters even if no result is used.
        view: whether the result is in the memory of an argument.
        source: the line of a forward that it comes from, where the tape was asked for it; a line each of several.
        step_of: the kernel that this is a step of; empty for an operation that was recorded.
        operands: the names of the values among the arguments, in their order.
        uses: the same, each once.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    makes: tuple[str, ...]
    single: bool
    effect: bool
    view: bool = False
    source: str | None = None
    step_of: str = ""
    operands: tuple[str, ...] = field(init=False)
    uses: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        uses: list[Value] = []
        map_values((*self.args, *self.kwargs.values()), uses.append)
        self.operands = tuple(value.name for value in uses)
        self.uses = frozenset(self.operands)


@dataclass
class Program:
    """The operations of a region's forward and backward, on named values.

    Attributes:
        inputs: the names of what the forward is given.
        forward: its operations.
        results: the names of its results.
        kept: the names of the inputs, results and other values that the backward needs.
        grads: the names of the gradients that the backward is given; empty if there is no backward.
        backward: its operations.
        wanted: the names of the gradients that it returns, None for a missing one.
        constants: the inputs that are the same in every call.
        values: tensors with the geometry of the named values. A value that was written in place may have another name
            after that.
        fake: the mode in which passes make such tensors, without memory.
        place: where the forward is written, for the names of kernels: ``block_py_88``; empty if that is not known.
        symbols: for each symbol of torch in the sizes of ``values`` what stands for it in kernels; empty where these
            have one size.
        conditions: what its kernels assume of these sizes, as source.
    """

    inputs: tuple[str, ...]
    forward: list[Operation]
    results: tuple[str, ...]
    kept: tuple[str, ...]
    grads: tuple[str, ...]
    backward: list[Operation]
    wanted: tuple[str | None, ...]
    constants: tuple[str, ...] = ()
    values: dict[str, Tensor] = field(default_factory=dict, repr=False)
    fake: Any = None
    place: str = ""
    symbols: Mapping[Any, Symbolic] = field(default_factory=dict)
    conditions: tuple[str, ...] = ()

    # -- indexes -------------------------------------------------------------------------------------------------

    @cached_property
    def operations(self) -> tuple[Operation, ...]:
        """Those of both directions."""
        return *self.forward, *self.backward

    @cached_property
    def makers(self) -> dict[str, Operation]:
        """For each value the operation that makes it."""
        return makers_of(self.operations)

    @cached_property
    def places(self) -> dict[str, int]:
        """For each value the place of the operation that makes it."""
        pairs = enumerate(self.operations)
        return {name: place for place, each in pairs for name in each.makes if self.makers.get(name) is each}

    @cached_property
    def writers(self) -> dict[int, list[int]]:
        """For each memory that is written, the places of the operations that do."""
        return written_by(self.operations, self.values)

    @cached_property
    def readers(self) -> dict[str, list[int]]:
        """For each value the places of the operations that read it."""
        found: dict[str, list[int]] = defaultdict(list)
        for place, operation in enumerate(self.operations):
            for name in operation.uses:
                found[name].append(place)
        return found

    @cached_property
    def needed(self) -> frozenset[str]:
        """The values that are needed after the forward or the backward."""
        return frozenset((*self.results, *self.kept, *filter(None, self.wanted)))

    @cached_property
    def shared(self) -> frozenset[int]:
        """The memory of inputs and results, to which others may write."""
        return frozenset(storage(self.values[name]) for name in (*self.inputs, *self.results))

    def base(self, name: str) -> str:
        """The value of whose memory another one is a view."""
        return base_of(name, self.makers, self.values)

    def is_written(self, name: str) -> bool:
        """Whether an operation writes the memory of a value after it was made."""
        return storage(self.values[name]) in self.writers

    # -- edits ---------------------------------------------------------------------------------------------------

    def with_operations(self, operations: Iterable[Operation | None]) -> Program:
        """The program with other operations at its places; None removes one."""
        given, split = list(operations), len(self.forward)
        forward, backward = ([o for o in part if o is not None] for part in (given[:split], given[split:]))
        return replace(self, forward=forward, backward=backward)

    def settled(self, forward: Sequence[Operation], backward: Sequence[Operation]) -> Program:
        """The program with these operations, without those that contribute to nothing, and which keeps what its
        backward needs of the forward."""
        found = keeping(replace(self, backward=alive(backward, filter(None, self.wanted))))
        return replace(found, forward=alive(forward, (*found.results, *found.kept)))


def map_values(argument: Any, function: Callable[[Value], Any]) -> Any:
    """An argument with something else in place of its values."""
    if isinstance(argument, tuple | list):
        return type(argument)(map_values(item, function) for item in argument)
    return function(argument) if isinstance(argument, Value) else argument


def with_names(operation: Operation, names: Mapping[str, str]) -> Operation:
    """The operation with other names for its arguments."""

    def rename(value: Value) -> Value:
        return Value(names.get(value.name, value.name))

    kwargs = {name: map_values(value, rename) for name, value in operation.kwargs.items()}
    return replace(operation, args=map_values(operation.args, rename), kwargs=kwargs)


def renamed(program: Program, names: Mapping[str, str]) -> Program:
    """The program with other names for its values."""

    def all_of(given: Iterable[Any]) -> tuple[Any, ...]:
        return tuple(names.get(name, name) for name in given)

    def of_operations(operations: Iterable[Operation]) -> list[Operation]:
        return [replace(with_names(o, names), makes=all_of(o.makes)) for o in operations]

    return replace(
        program,
        forward=of_operations(program.forward),
        results=all_of(program.results),
        kept=tuple(sorted({*all_of(program.kept)})),
        backward=of_operations(program.backward),
        wanted=all_of(program.wanted),
    )


def with_tensors(operation: Operation, tensors: Mapping[str, Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an operation with tensors in place of its values."""
    args = map_values(operation.args, lambda value: tensors[value.name])
    return args, {key: map_values(arg, lambda value: tensors[value.name]) for key, arg in operation.kwargs.items()}


def operands_like(operation: Operation, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Empty tensors as an operation's operands; without memory where a fake mode is on."""
    return {name: empty_as(values[name]) for name in operation.operands}


def empty_as(t: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor of the same strides; without memory where a fake mode is on, which ``empty_like`` refuses."""
    return torch.empty_strided(t.shape, t.stride(), dtype=dtype or t.dtype, device=t.device)


def storage(t: Look) -> int:
    return t.memory if isinstance(t, Shaped) else t.untyped_storage()._cdata


def plain_name(function: Any) -> str:
    name = function._schema.name.split("::")[1] if isinstance(function, OpOverload) else function.__name__
    return str(name)


def is_kernel(function: Any) -> bool:
    """Whether a recorded function is a kernel of ours."""
    module = function.namespace if isinstance(function, OpOverload) else getattr(function, "__module__", None)
    return str(module).startswith("fastlayers")


def alive(operations: Sequence[Operation], needed: Iterable[str]) -> list[Operation]:
    """The operations that contribute to the needed values, or have an effect."""
    found, names = [], set(needed)
    for operation in reversed(operations):
        if operation.effect or names.intersection(operation.makes):
            found.append(operation)
            names |= operation.uses
    return found[::-1]


def keeping(program: Program) -> Program:
    """The program, which keeps what its backward needs of the forward."""
    if not program.grads:
        return program
    own = {name for operation in program.backward for name in operation.makes} | set(program.grads)
    used = {name for operation in program.backward for name in operation.uses} | set(filter(None, program.wanted))
    return replace(program, kept=tuple(sorted(used - own)))


def makers_of(operations: Iterable[Operation]) -> dict[str, Operation]:
    """For each value the last operation that makes it, which may be one in place. A backward may make a value again, as
    a view of a result that is itself a view of it: that does not count."""
    found: dict[str, Operation] = {}
    for operation in operations:
        for name in filter(None, operation.makes):
            if not operation.view or name not in found:
                found[name] = operation
    return found


def base_of(name: str, producers: Mapping[str, Operation], values: Mapping[str, Look]) -> str:
    """The value of whose memory another one is a view."""
    while (operation := producers.get(name)) is not None and is_followed(operation, values):
        name = operation.args[0].name
    return name


def is_followed(operation: Operation, values: Mapping[str, Look]) -> bool:
    """Whether an operation is a view whose elements are found in its argument: not one as another dtype."""
    source = operation.args[0] if operation.view else None
    if not isinstance(source, Value):
        return False
    return all(values[name].dtype is values[source.name].dtype for name in operation.makes if name)


def written_by(operations: Iterable[Operation], values: Mapping[str, Look]) -> dict[int, list[int]]:
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
        if declared.is_write or declared.name.startswith("running_"):  # Statistics are not always declared.
            given = operation.args[place] if place < len(operation.args) else operation.kwargs.get(names[place])
            map_values([given], lambda value: found.append(value.name))
    return found


def overwritten(operation: Operation) -> list[str]:
    """The names of the values that an operation of torch writes."""
    return [value.name for declared, value in arguments_of(operation) if declared.is_write]


def updated_by(operation: Operation) -> set[str]:
    """The names of the running statistics that an operation updates without using them."""
    function = operation.function
    if isinstance(function, OpOverload) and function.namespace == "fastlayers":
        return {*overwritten(operation)}
    if not isinstance(function, OpOverload) or not function._schema.name.endswith(STATISTICS):
        return set()
    given = {declared.name: value for declared, value in arguments_of(operation, every=True)}
    trains = given.get("training", given.get("train", given.get("use_input_stats", True)))
    running = (value for name, value in given.items() if name.startswith("running_") and isinstance(value, Value))
    return {value.name for value in running} if trains else set()


def arguments_of(operation: Operation, every: bool = False) -> list[tuple[Any, Any]]:
    """The declared arguments of an operation of torch with what it is given; only values unless ``every`` is asked."""
    if not isinstance(operation.function, OpOverload):
        return []
    declared = operation.function._schema.arguments
    given = {**dict(zip((each.name for each in declared), operation.args, strict=False)), **operation.kwargs}
    found = [(each, given[each.name]) for each in declared if each.name in given]
    return found if every else [(each, value) for each, value in found if isinstance(value, Value)]


def depends_on(operations: Iterable[Operation], values: Mapping[str, Look], results: Iterable[str]) -> set[str]:
    """The names of the values that results depend on, as these were before the operations.

    Statistics that an operation only updates are none of them.
    """
    sources: dict[int, set[str]] = {}

    def of(name: str) -> set[str]:
        return sources.setdefault(storage(values[name]), {name})

    for operation in operations:
        updated = updated_by(operation)
        read = set[str]().union(*(of(name) for name in operation.operands if name not in updated))
        for name in filter(None, operation.makes):
            sources[storage(values[name])] = read | sources.get(storage(values[name]), set())
        for name in overwritten(operation):
            if name not in updated:
                sources[storage(values[name])] = read | of(name)
    return set[str]().union(*(of(name) for name in results))

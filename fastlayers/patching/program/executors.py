"""The two executors of a program: straight-line Python, and C++ where that is built for the torch that runs.

Both do the same: they run the recorded operations below autograd and autocast, and make one node of autograd for a
call, which keeps what the backward needs. With tiny tensors on a CPU C++ takes .6 to .8 of the time of Python, but it
uses more of torch than the stable ABI: ``csrc/regions`` is built for one version of torch.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Container, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload

from fastlayers.build import platform_problem, regions_library
from fastlayers.ops import guard, layouts, pairs
from fastlayers.ops.autocast import Given
from fastlayers.patching.capture.recording import has_literal
from fastlayers.patching.program.numbers import check_strides, size_of
from fastlayers.patching.program.program import Operation, Program, Value, map_values, plain_name

__all__ = [
    "KEYS",
    "Executor",
    "Facts",
    "NativeExecutor",
    "PythonExecutor",
    "below_modes",
    "call_source",
    "excluding",
    "executor_class",
    "items",
    "named",
    "problem",
]

Tensors: TypeAlias = tuple[Tensor, ...]


def _keys_above_kernels() -> Any:
    """The dispatch keys that a program skips: what they do was recorded."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    for name in ("AutogradCPU", "AutogradCUDA", "AutogradOther", "AutocastCPU", "AutocastCUDA"):
        keys = keys.add(getattr(torch._C.DispatchKey, name))
    return keys


KEYS = _keys_above_kernels()
excluding: Callable[[Any], Any] = torch._C._ExcludeDispatchKeyGuard
_keys_of_no_mode = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)


def below_modes() -> Any:
    """A context in which operations run as a program's do, below modes and transforms too, as far as the dispatcher
    has them: what a backward computes again was not seen by those of the backward, and draws no number for each of its
    batch."""
    excluded: Any = torch._C._dispatch_tls_local_exclude_set()  # type: ignore[no-untyped-call]
    return torch._C._ForceDispatchKeyGuard(_keys_of_no_mode, excluded | KEYS)


#: Whether the backward that runs was called with retain_graph.
_retains_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph


class Again(Protocol):
    """What a call keeps for the backwards that its program does not give."""

    def needed(self, grads: Sequence[Tensor | None], derived: bool) -> list[int]:
        """The places of what is needed of what the program kept: by ``differentiate`` if ``derived``, else by ``some``.
        The rest may have been written since."""

    def differentiate(
        self, given: Given, kept: list[Tensor], grads: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> list[Tensor | None]:
        """The gradients of the inputs that need one, with a graph of their own where that is asked for. ``grads`` are
        those of the active results and of those aside.

        Of results without a gradient nothing is computed, as autograd does: zeros would let weights decay, and 0 times
        infinity is NaN.
        """

    def some(
        self, given: Given, kept: list[Tensor], grads: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        """The same where some of the results have no gradient, without a graph."""


class Facts(NamedTuple):
    """What an executor has to know about a call besides the program.

    Attributes:
        wanted: the number of inputs that need a gradient, the first ones.
        written: the numbers of the inputs whose version the operations raise.
        active: the numbers of the results that need a gradient,
        aside: those of others that do, and usually get none, such as what a cache keeps: the program has none for them,
        constant: those of the rest,
        strides: those of the gradients of the active results; None where the program sees to it.
    """

    wanted: int = 0
    written: tuple[int, ...] = ()
    active: tuple[int, ...] = ()
    aside: tuple[int, ...] = ()
    constant: tuple[int, ...] = ()
    strides: tuple[tuple[int, ...] | None, ...] = ()


def executor_class() -> type[Executor]:
    """The faster one of the executors that are here."""
    return PythonExecutor if _native is None else NativeExecutor


# -- Python ------------------------------------------------------------------------------------------------------------

#: Where the C functions are that call an operation with less ceremony than its OpOverload: 1 us instead of 2 us.
BINDINGS: tuple[Any, ...] = (torch._C._VariableFunctions, torch._C._nn, torch._C.TensorBase)


_identities = itertools.count(1)


class PythonExecutor:
    """Two functions, whose source is written from a program.

    Attributes:
        identity: a number that no other one of this process has.
        forward: of the inputs; gives the results, and what is kept.
        backward: of the gradients of the results and a list of what was kept, which it empties, so that nothing is held
            longer than needed; gives a gradient, or None, for each wanted input.
        source: of both.
    """

    def __init__(self, program: Program, facts: Facts) -> None:
        scope: dict[str, Any] = {}
        needed = [*program.results, *program.kept]
        lines = [
            f"def forward({', '.join(program.inputs)}):",
            *write(program.forward, needed, scope),
            f"    return {items(program.results)}, {items(program.kept)}",
        ]
        if program.grads:
            lines += [
                "def backward(grads, kept):",
                f"    {items(program.grads)} = grads",
                *([f"    {items(program.kept)} = kept", "    kept.clear()"] if program.kept else []),
                *write(program.backward, [name for name in program.wanted if name is not None], scope),
                f"    return {items(str(name) for name in program.wanted)}",
            ]
        self.facts, self.source, self.identity = facts, "\n".join(lines) + "\n", next(_identities)
        self.read: list[int] = []
        made = compiled(self.source, tuple(scope.items()))
        self.forward: Any = made["forward"]
        self.backward: Any = made.get("backward")

    def set_read(self, places: list[int]) -> None:
        """Note which inputs have values that a derivative of the backward reads."""
        self.read = places

    def call(self, inputs: Tensors) -> Sequence[Tensor]:
        """The results of a call that autograd does not record."""
        with excluding(KEYS):
            results, _ = self.forward(*inputs)
        for i in self.facts.written:
            torch.autograd.graph.increment_version(inputs[i])
        return results

    def record(self, again: Again, inputs: Tensors) -> Sequence[Tensor]:
        """The results of a call that autograd records."""
        wanted = self.facts.wanted
        results = _record(self, again, Given(*inputs), inputs[wanted:], *inputs[:wanted])
        return results if type(results) is tuple else (results,)


class Node(torch.autograd.Function):
    """A call of a region. Keeps what the backward of its operations needs, as autograd would, and refers to its inputs
    for the derivative of its backward."""

    @staticmethod
    def forward(ctx: Any, executor: PythonExecutor, again: Again, given: Given, rest: Tensors, *inputs: Tensor) -> Any:
        with excluding(KEYS):
            results, kept = executor.forward(*inputs, *rest)
        for i in executor.facts.written:
            t: Any = given.parameters[i]
            torch.autograd.graph.increment_version(t)
            given.versions[i] = t._version
        ctx.set_materialize_grads(False)
        marks: Tensors = ()
        ctx.kept, ctx.made = len(kept), ()
        if guard.hooks_decide_what_is_kept():
            # They may keep a copy of what a derivative reads. A checkpoint does not keep what it computes again,
            read, each = executor.read, enumerate(given.parameters)
            ctx.made = tuple(i for i, t in each if t is not None and (t.grad_fn is not None or i in read))
            # and gives what its recomputation keeps to this node, by order. It compares shapes, so these differ.
            marks = (torch.empty(0, executor.identity),)
        ctx.save_for_backward(*kept, *(given.parameters[i] for i in ctx.made), *marks)
        given.forget(ctx.made)
        ctx.executor, ctx.again, ctx.given = executor, again, given
        if executor.facts.constant:
            ctx.mark_non_differentiable(*(results[i] for i in executor.facts.constant))
        return results if len(results) > 1 else results[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        facts = ctx.executor.facts
        active = tuple(grads[i] for i in facts.active)
        aside = tuple(grads[i] for i in facts.aside)
        given = [dy for dy in (*active, *aside) if dy is not None]
        derived = torch.is_grad_enabled() or any(map(guard.needs_double_backward, given))
        if derived or len(given) < len(active) or any(dy is not None for dy in aside):
            active += aside
            if ctx.given is None:
                raise RuntimeError(
                    "Trying to backward through the graph a second time: the inputs of a patched forward were freed. "
                    "Specify retain_graph=True in the first backward"
                )
            saved = ctx.saved_tensors  # Of a checkpoint a second time would be another recomputation.
            ctx.given.remember(ctx.made, saved[ctx.kept : ctx.kept + len(ctx.made)])
            needs = ctx.needs_input_grad[4:]
            kept = [saved[i] for i in ctx.again.needed(active, derived)]
            found = (ctx.again.differentiate if derived else ctx.again.some)(ctx.given, kept, active, needs)
            ctx.given.forget(ctx.made)
            if not (torch.is_grad_enabled() or _retains_graph()):
                ctx.maybe_clear_saved_tensors()
                ctx.given = None
            return *(None,) * 4, *found
        dys = tuple(
            dy if strides is None or dy.stride() == strides else layouts.with_strides(dy, strides)
            for dy, strides in zip(active, facts.strides, strict=True)
        )
        kept = list(ctx.saved_tensors[: ctx.kept])
        ctx.maybe_clear_saved_tensors()
        if not _retains_graph():
            ctx.given = None  # A loss that outlives its backward would hold the inputs of all regions.
        with excluding(KEYS):
            return *(None,) * 4, *ctx.executor.backward(dys, kept)


_record = pairs.record_of(Node)


def items(names: Iterable[str]) -> str:
    return "(" + "".join(f"{name}, " for name in names) + ")"


def write(operations: Sequence[Operation], needed: Iterable[str], scope: dict[str, Any]) -> list[str]:
    """The lines of a function's body. A value is deleted after its last use, since it holds memory."""
    lines: list[str] = []
    later = set(needed)
    for operation in reversed(operations):
        function = named(binding(operation), f"f_{plain_name(operation.function)}", scope)
        call = call_source(operation, function, lambda argument: spelled(argument, scope))
        dead = sorted({*operation.uses, *filter(None, operation.makes)} - later)
        later |= operation.uses
        lines += [f"    del {', '.join(dead)}"] if dead else []
        lines.append(f"    {call}")
    return lines[::-1]


def call_source(operation: Operation, function: str, spelled: Callable[[Any], str]) -> str:
    """The line that calls a function as an operation does."""
    parts = [*map(spelled, operation.args), *(f"{name}={spelled(arg)}" for name, arg in operation.kwargs.items())]
    call = f"{function}({', '.join(parts)})"
    if not any(operation.makes):
        return call
    targets = ", ".join(made or "_" for made in operation.makes)
    return f"{targets}{'' if operation.single or len(operation.makes) > 1 else ','} = {call}"


def spelled(argument: Any, scope: dict[str, Any]) -> str:
    """An argument as source."""
    if isinstance(argument, Value):
        return argument.name
    if isinstance(argument, tuple | list):
        parts = ", ".join(spelled(item, scope) for item in argument)
        return f"[{parts}]" if type(argument) is list else f"({parts},)" if argument else "()"
    if has_literal(argument):
        return repr(argument)
    return named(argument, "c" + "".join(c if c.isalnum() else "_" for c in str(argument)), scope)


def named(value: Any, name: str, scope: dict[str, Any]) -> str:
    """The name of a value in the scope of the source."""
    while (known := scope.setdefault(name, value)) is not value and known != value:
        name += "_"
    return name


def binding(operation: Operation) -> Callable[..., Any]:
    """The cheapest function that makes the same call."""
    function = operation.function
    if not isinstance(function, OpOverload):
        return function
    namespace, name = function._schema.name.split("::")
    gaps = any(isinstance(arg, tuple | list) and None in arg for arg in operation.args)  # x[:, i] has one
    for owner in BINDINGS if namespace == "aten" and not gaps else ():
        found = getattr(owner, name, None)
        if callable(found):  # mT is an attribute of a tensor
            return found  # type: ignore[no-any-return]
    return function._op  # type: ignore[no-any-return]


@lru_cache(maxsize=4096)
def compiled(source: str, scope: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """The functions of a source. Layers that differ only in their parameters share them."""
    made = dict(scope)
    exec(compile(source, "<fastlayers region>", "exec"), made)
    return made


# -- C++ ---------------------------------------------------------------------------------------------------------------

#: How csrc/regions tells the arguments of an operation apart.
CONSTANT, REGISTER, LIST, DEFAULT = range(4)
#: The numbers of values of torch that have no type of their own below Python.
NUMBERS = {
    torch.contiguous_format: 0, torch.preserve_format: 1, torch.channels_last: 2, torch.channels_last_3d: 3,
    torch.strided: 0,
}  # fmt: skip


class NativeExecutor:
    """A region of ``csrc/regions``, to which a program is described. It does what :class:`PythonExecutor` does."""

    def __init__(self, program: Program, facts: Facts) -> None:
        assert _native is not None
        self._region = region = torch.classes.fastlayers_regions.Region()
        self._address = region.address()
        registers: dict[str, int] = {}
        counted: set[str] = set()  # the names of numbers

        def numbers(names: Iterable[str | None]) -> list[int]:
            return [registers.setdefault(name, len(registers)) if name else -1 for name in names]

        def constant(value: int | float) -> int:
            """The register of a number."""
            name = f"{value!r}"
            if name not in registers:
                region.constant(*numbers([name]), value)
            return registers[name]

        numbers(program.inputs)
        for of_backward, operations in enumerate((program.forward, program.backward)):
            for operation in operations:
                function = operation.function
                if isinstance(function, OpOverload):
                    unpack = not operation.single and len(function._schema.returns) == 1
                    region.operation(
                        bool(of_backward), function._schema.name, function._schema.overload_name,
                        described(operation, numbers, constant), numbers(operation.makes), unpack, operation.effect,
                    )  # fmt: skip
                elif function in COMPUTES:
                    counted.update(operation.makes if COMPUTES[function] < LAYOUT else ())
                    region.number(bool(of_backward), COMPUTES[function], *operands(operation, numbers))
                else:
                    launch, call, tensors, sizes = kernel_call(operation, counted)
                    counts = [each(item, numbers, constant) for item in sizes]
                    made = numbers(operation.makes)
                    _native.kernel(self._address, bool(of_backward), call, numbers(tensors), counts, made, launch)
        region.finish(
            numbers(program.results), numbers(program.kept), numbers(program.grads), numbers(program.wanted),
            len(registers), facts.wanted, list(facts.written), [*facts.active, *facts.aside],
            [None if strides is None else list(strides) for strides in facts.strides],
        )  # fmt: skip

    def set_read(self, places: list[int]) -> None:
        self._region.set_read(places)

    def forward(self, *inputs: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        return self._region.forward(list(inputs))  # type: ignore[no-any-return]

    def backward(self, grads: Sequence[Tensor], kept: list[Tensor]) -> Sequence[Tensor | None]:
        return self._region.backward(list(grads), kept)  # type: ignore[no-any-return]

    def call(self, inputs: Tensors) -> Sequence[Tensor]:
        return _native.call(self._address, None, inputs)  # type: ignore[no-any-return, union-attr]

    def record(self, again: Again, inputs: Tensors) -> Sequence[Tensor]:
        return _native.call(self._address, again, inputs)  # type: ignore[no-any-return, union-attr]


#: What runs a program.
Executor: TypeAlias = PythonExecutor | NativeExecutor


def described(
    operation: Operation, numbers: Callable[[Iterable[str | None]], list[int]], constant: Callable[[int | float], int]
) -> tuple[tuple[int, Any], ...]:
    """The arguments of an operation by its schema: a kind, and a constant or numbers of registers, for each."""
    found: list[tuple[int, Any]] = []
    kwargs = dict(operation.kwargs)
    for i, declared in enumerate(operation.function._schema.arguments):  # type: ignore[attr-defined]
        if i >= len(operation.args) and declared.name not in kwargs:
            found.append((DEFAULT, None))
            continue
        value = operation.args[i] if i < len(operation.args) else kwargs.pop(declared.name)
        if isinstance(value, Value):
            found.append((REGISTER, numbers([value.name])))
        elif isinstance(value, list | tuple) and any(isinstance(item, Value) for item in value):
            found.append((LIST, [each(item, numbers, constant) for item in value]))
        else:
            value = tuple(value) if isinstance(value, list) else value  # An empty list would have no type.
            found.append((CONSTANT, NUMBERS.get(value, value) if type(value) in FORMATS else value))
    return tuple(found)


def each(item: Any, numbers: Callable[..., list[int]], constant: Callable[[int | float], int]) -> int:
    """The register of an item of a list; -1 for None."""
    return constant(item) if isinstance(item, int | float) else numbers([None if item is None else item.name])[0]


def operands(operation: Operation, numbers: Callable[..., list[int]]) -> tuple[list[int], tuple[Any, ...], int]:
    """The operands of an operation on numbers, registers and for -1 the next constant, and the register it makes."""
    flat = [item for arg in operation.args for item in (arg if isinstance(arg, tuple) else [arg])]
    given = [numbers([item.name])[0] if isinstance(item, Value) else -1 for item in flat]
    constants = tuple(item for item in flat if not isinstance(item, Value))
    return given, constants, numbers(name or None for name in operation.makes)[0]


FORMATS = (torch.memory_format, torch.layout)
#: How csrc/regions tells operations on numbers apart, and what lays a gradient out or tests how a result is.
COMPUTES = {
    size_of: 0, operator.add: 1, operator.mul: 2, operator.floordiv: 3, operator.mod: 4, max: 5, min: 6,
    operator.truediv: 7, float: 8, int: 9, layouts.with_strides: 10, check_strides: 11,
}  # fmt: skip
#: The first of them that gives a tensor.
LAYOUT = 10


def kernel_call(operation: Operation, counted: Container[str]) -> tuple[Any, Any, list[str], Sequence[Any]]:
    """The launch in C++ of a kernel that is no operation of torch, if it has one, a function of tensors and numbers
    that calls it, the names of these tensors, and the numbers. ``counted`` are the names of numbers."""
    function: Any = operation.function
    launch = launch_of(function)
    if launch is not None:
        count = len(function.dtypes) if function.sizes else len(operation.args)
        tensors = [value.name for value in operation.args[:count]]
        return launch, partial(run_generated, function, launch), tensors, operation.args[count:]
    uses = sorted(operation.uses)
    tensors, numbers = [name for name in uses if name not in counted], [name for name in uses if name in counted]
    return None, partial(run_kernel, operation, [*tensors, *numbers]), tensors, [Value(name) for name in numbers]


def run_kernel(
    operation: Operation, names: Sequence[str], tensors: Sequence[Tensor], numbers: Sequence[int]
) -> list[Tensor | None]:
    """Call a kernel that is no operation of torch with these tensors and numbers."""
    own: dict[str, Any] = dict(zip(names, (*tensors, *numbers), strict=True))
    args, kwargs = map_values(operation.args, lambda value: own[value.name]), {}
    for name, argument in operation.kwargs.items():
        kwargs[name] = map_values(argument, lambda value: own[value.name])
    out = operation.function(*args, **kwargs)
    found = [out] if operation.single else list(out)
    return [t if made else None for t, made in zip(found, operation.makes, strict=True)]


@lru_cache(maxsize=4096)
def launch_of(function: Any) -> Any:
    """The launch of a generated kernel in C++; None for another function."""
    if not hasattr(function, "machine_code"):
        return None
    launch = torch.classes.fastlayers_regions.Launch(bool(function.sizes))
    for made in function.results:
        launch.add_result(made.empty(torch.device("meta")))
    return launch


def run_generated(kernel: Any, launch: Any, tensors: Sequence[Tensor], numbers: Sequence[int]) -> list[Tensor]:
    """Call a generated kernel, and give its machine code to C++, which launches it from then on."""
    made: list[Tensor] = kernel(*tensors, *numbers)
    code = kernel.machine_code()
    if code is not None and not launch.is_ready():
        launch.set(kernel.device.index, *code)
    return made


def needed(again: Again, grads: list[Tensor | None], derived: bool) -> list[int]:
    """:meth:`Again.needed` for C++."""
    return again.needed(grads, derived)


def by_python(
    again: Again,
    derived: bool,
    inputs: list[Tensor],
    versions: list[int],
    kept: list[Tensor],
    grads: list[Tensor | None],
    needs: list[bool],
) -> list[Tensor | None]:
    """:meth:`Again.differentiate` and :meth:`Again.some` for C++."""
    given = Given(*inputs)
    given.versions = versions
    return list((again.differentiate if derived else again.some)(given, kept, grads, needs))


class _Native(NamedTuple):
    """The operators of ``csrc/regions`` that take an object of Python."""

    call: Callable[..., list[Tensor]]
    kernel: Callable[..., None]


_definitions: list[Any] = []


def _load() -> str | None:
    """Load the C++ executor. Returns the reason where that is not possible."""
    try:
        library = regions_library(torch.__version__)
        if not library.exists():
            return platform_problem() or (
                f"{library.name} was not built; run `python -m fastlayers build --regions`, which needs a C++ compiler"
            )
        torch.ops.load_library(str(library))
    except (OSError, RuntimeError) as error:
        return f"the C++ library does not load: {error}"
    definitions = torch.library.Library("fastlayers_regions", "FRAGMENT")
    for name, function in {
        "needed": needed,
        "by_python": by_python,
        "hooks_decide": guard.hooks_decide_what_is_kept,
        "run_kernel": lambda kernel, tensors, numbers: kernel(tensors, numbers),
    }.items():
        definitions.impl(name, function, "CompositeImplicitAutograd")
    _definitions.append(definitions)
    return None


#: Why regions are run by Python; None where C++ runs them.
problem = _load()
_native = (
    _Native(*(torch._C._jit_get_operation(f"fastlayers_regions::{name}")[0] for name in _Native._fields))
    if problem is None
    else None
)

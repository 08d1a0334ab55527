"""Numbers of a program that follow from the sizes of what a call is given, as operations of the program.

torch's symbolic integers are sympy's expressions. Here each becomes a value like others, made by operations on sizes of
tensors and on numbers, so that executors, liveness and prints treat it as they treat tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._ops import OpOverload

from fastlayers.kernels.symbolic import Symbol, Symbolic
from fastlayers.ops.layouts import with_strides
from fastlayers.patching.program.program import Operation, Program, Value, storage, with_names
from fastlayers.patching.program.shapes import Shaped
from fastlayers.patching.reasons import Reason, Refusal

__all__ = [
    "OTHER_LAYOUT",
    "Numbers",
    "at_sizes",
    "check_strides",
    "hint_of",
    "is_one",
    "is_symbolic",
    "map_numbers",
    "number_at",
    "shaped",
    "size_of",
    "with_sizes",
    "with_symbols",
]


def size_of(t: Tensor, dim: int) -> int:
    return t.shape[dim]


def check_strides(t: Tensor, strides: tuple[int, ...]) -> None:
    """See that torch has laid a result out as was expected for its sizes: views of it rely on that."""
    if t.stride() != strides:
        raise RuntimeError(f"{OTHER_LAYOUT}: {t.stride()} instead of {strides} for {tuple(t.shape)}")


#: How the error begins where a result has other strides.
OTHER_LAYOUT = "a result of a program for many sizes has another layout"
#: What sympy and torch call operations on numbers.
OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "Add": operator.add, "Mul": operator.mul, "FloorDiv": operator.floordiv, "CleanDiv": operator.floordiv,
    "Mod": operator.mod, "PythonMod": operator.mod, "Max": max, "Min": min, "IntTrueDiv": operator.truediv,
    "FloatTrueDiv": operator.truediv, "ToFloat": float, "TruncToInt": int,
}  # fmt: skip


class Ratio(NamedTuple):
    """A quotient that is rounded next, as where torch pads a size to a multiple."""

    a: int
    b: int

    def up(self) -> int:
        return (self.a + self.b - 1) // self.b

    def down(self) -> int:
        return self.a // self.b


#: The same for numbers of kernels, none of which has a fraction.
SYMBOLIC: Mapping[str, Callable[..., Any]] = {
    **OPERATIONS, "IntTrueDiv": Ratio, "CeilToInt": Ratio.up, "FloorToInt": Ratio.down, "TruncToInt": Ratio.down,
}  # fmt: skip
#: Operations by another one that does the same: torch's decompositions in Python, which symbols need, spell it so.
SPELLED: Mapping[Any, Any] = {
    torch.ops.aten._unsafe_view.default: torch.ops.aten.view.default,
}


def is_symbolic(value: Any) -> bool:
    return isinstance(value, torch.SymInt | torch.SymFloat | Symbolic)


def hint_of(number: Any) -> Any:
    """What a number is where it was traced. To choose by a symbolic one itself would make that a condition."""
    return number.node.hint if isinstance(number, torch.SymInt) else number


def is_one(size: Any) -> bool:
    """Whether a size is 1 for all calls."""
    return type(size) is int and size == 1


def map_numbers(argument: Any, function: Callable[[Any], Any]) -> Any:
    """An argument with something else in place of its symbolic numbers."""
    if isinstance(argument, tuple | list):
        return type(argument)(map_numbers(item, function) for item in argument)
    return function(argument) if is_symbolic(argument) else argument


def computed(
    expression: Any,
    known: Callable[[Any], Any],
    apply: Callable[..., Any],
    operations: Mapping[str, Callable[..., Any]] = OPERATIONS,
) -> Any:
    """What an expression of sympy comes to.

    Args:
        known: gives what a part of it is.
        apply: makes something of a function and what its arguments are.
        operations: functions by what sympy and torch call them.

    Raises:
        Refusal: it has an operation that is not known.
    """
    if expression.is_Integer:
        return int(expression)
    if expression.is_Float:
        return float(expression)
    parts, kind = [known(part) for part in expression.args], type(expression).__name__
    if kind in ("Pow", "PowByNatural") and type(parts[1]) is int and parts[1] > 0:
        kind, parts = "Mul", [parts[0]] * parts[1]
    function = operations.get(kind)
    if function is None or not parts:
        raise Refusal(Reason.SIZES, f"a number is {expression}")
    if len(parts) == 1:  # ToFloat, and what was a first power
        return parts[0] if kind == "Mul" else apply(function, parts[0])
    return reduce(partial(apply, function), parts)


def evaluated(
    expression: Any, sizes: Mapping[Any, int], operations: Mapping[str, Callable[..., Any]] = OPERATIONS
) -> Any:
    """The number that an expression of sympy is for some sizes; ``operations`` as of :func:`computed`."""
    if expression in sizes:
        return sizes[expression]
    known = partial(evaluated, sizes=sizes, operations=operations)
    return computed(expression, known, lambda function, *args: function(*args), operations)


def number_at(symbol: Any, sizes: Mapping[Any, int]) -> Any:
    """The number that a symbolic one is for some sizes."""
    return evaluated(symbol.node.expr, sizes)


def at_sizes(operations: Iterable[Operation], sizes: Mapping[Any, int]) -> list[tuple[Any, ...]]:
    """What operations are for some sizes, to be compared: functions, arguments, results."""

    def at(argument: Any) -> Any:
        if isinstance(argument, tuple | list):
            return tuple(map(at, argument))
        return number_at(argument, sizes) if is_symbolic(argument) else argument

    def arguments(operation: Operation) -> Any:
        return at(operation.args), {key: at(argument) for key, argument in operation.kwargs.items()}

    return [
        (SPELLED.get(o.function, o.function), *arguments(o), o.makes, o.single, o.effect, o.view) for o in operations
    ]


def shaped(values: Mapping[str, Tensor], symbols: Mapping[Any, Symbolic]) -> dict[str, Shaped]:
    """How each of these tensors looks. ``symbols`` are those of torch, and what stands for them."""
    number = partial(as_symbolic, symbols)

    def look(t: Tensor) -> Shaped:
        numbers: Any = tuple(t.shape), t.stride(), t.storage_offset()
        shape, strides, offset = map_numbers(numbers, number) if symbols else numbers
        return Shaped(shape, strides, offset, t.dtype, t.device, storage(t))

    return {name: look(t) for name, t in values.items()}


def as_symbolic(symbols: Mapping[Any, Symbolic], number: Any) -> Any:
    """A number of torch that follows from sizes, as one of ours; one with a fraction stays."""
    return evaluated(number.node.expr, symbols, SYMBOLIC) if isinstance(number, torch.SymInt) else number


def with_symbols(operations: Iterable[Operation], symbols: Mapping[Any, Symbolic]) -> list[Operation]:
    """The operations with our numbers in place of those of torch."""
    of: Callable[[Any], Any] = partial(map_numbers, function=partial(as_symbolic, symbols))
    return [
        replace(o, args=of(o.args), kwargs={name: of(argument) for name, argument in o.kwargs.items()})
        for o in operations
    ]


class Numbers:
    """The numbers of one direction of a program.

    Args:
        prefix: of their names.
        sizes: for each symbol of torch the value and the dimension that has this size.
        names: for the names of our symbols those of torch.
        bring: makes a value with the size of another symbol, if that is possible, and gives its name.
    """

    def __init__(
        self,
        prefix: str,
        sizes: Mapping[Any, tuple[str, int]],
        names: Mapping[str, Any],
        bring: Callable[[Any], str] | None = None,
    ) -> None:
        self._prefix, self._sizes, self._names, self._bring = prefix, sizes, names, bring
        self._known: dict[Any, Any] = {}
        self.operations: list[Operation] = []

    def __call__(self, expression: Any) -> Any:
        """The number of an expression, of sympy or ours: itself, or the value that it becomes."""
        if expression not in self._known:
            self._known[expression] = self._found(expression)
        return self._known[expression]

    def _found(self, expression: Any) -> Any:
        if isinstance(expression, Symbolic):
            return self._sum(expression)
        if expression in self._sizes:
            name, dim = self._sizes[expression]
            return self._made(size_of, Value(name), dim)
        if expression.is_Symbol and self._bring is not None:
            return self._made(size_of, Value(self._bring(expression)), 0)
        return computed(expression, self, self._made)

    def _sum(self, number: Symbolic) -> Any:
        """The value of a polynomial."""
        products = []
        for atoms, factor in number:
            parts = [self._atom(atom) for atom in atoms] + ([factor] if factor != 1 or not atoms else [])
            products.append(reduce(partial(self._once, operator.mul), parts))
        return reduce(partial(self._once, operator.add), products)

    def _atom(self, atom: Any) -> Any:
        if isinstance(atom, Symbol):
            return self(self._names[atom.name])
        function = operator.floordiv if atom.sign == "//" else operator.mod
        return self._once(function, *(self.number(each) for each in (atom.a, atom.b)))

    def _once(self, function: Callable[..., Any], *args: Any) -> Any:
        """What a function gives of numbers, made once."""
        key = function, args
        if key not in self._known:
            self._known[key] = self._made(function, *args)
        return self._known[key]

    def number(self, given: Any) -> Any:
        """The value that a symbolic number becomes; any other as it is."""
        if isinstance(given, torch.SymInt | torch.SymFloat):
            return self(given.node.expr)
        return self(given) if isinstance(given, Symbolic) else given

    def all(self, given: tuple[Any, ...]) -> Any:
        return map_numbers(given, self.number)

    def of_all(self, operation: Operation, program: Program, viewed: set[str]) -> list[Operation]:
        """The operation, and tests of the strides of results that are viewed."""
        found = [self.of(operation)]
        for name in viewed.intersection(operation.makes) if not operation.view else ():
            strides = self.all(program.values[name].stride())
            found.append(Operation(check_strides, (Value(name), strides), {}, ("",), single=True, effect=True))
        return found

    def _made(self, function: Callable[..., Any], *args: Any) -> Value:
        name = f"{self._prefix}{len(self.operations)}"
        self.operations.append(Operation(function, args, {}, (name,), single=True, effect=False))
        return Value(name)

    def of(self, operation: Operation) -> Operation:
        """The operation with values in place of symbolic numbers."""
        floats = declared_floats(operation)

        def argument(key: Any, given: Any) -> Any:
            def number(symbol: Any) -> Any:
                found = self.number(symbol)
                return self._made(float, found) if key in floats and isinstance(symbol, torch.SymInt) else found

            return map_numbers(given, number)

        args = tuple(argument(place, given) for place, given in enumerate(operation.args))
        kwargs = {name: argument(name, given) for name, given in operation.kwargs.items()}
        return replace(operation, args=args, kwargs=kwargs)


def declared_floats(operation: Operation) -> set[Any]:
    """The places and the names of the arguments that an operation of torch takes as floats."""
    if not isinstance(operation.function, OpOverload):
        return set()
    declared = operation.function._schema.arguments
    floats = [(i, each.name) for i, each in enumerate(declared) if "float" in str(each.type)]
    return {key for pair in floats for key in pair}


def with_sizes(program: Program, strides: Sequence[Any]) -> Program:
    """The program with operations for its symbolic numbers.

    Args:
        program: its values have symbolic sizes.
        strides: those that the gradients of its results are to have.

    Raises:
        Refusal: no input has the size that a number follows from.
    """
    brought: list[Operation] = []

    def bring(symbol: Any) -> str:
        """Keep a tensor without elements that has a size which nothing else has that is kept."""
        name = f"size_of_{symbol}"
        empty = {"dtype": torch.uint8, "device": torch.device("cpu")}
        brought.append(
            Operation(torch.ops.aten.empty.memory_format, ([forward(symbol), 0],), empty, (name,), True, False)
        )
        return name

    symbols = list(program.symbols)
    names = {str(each): symbol for symbol, each in program.symbols.items()}
    viewed = {o.args[0].name for o in program.operations if o.function is torch.ops.aten.as_strided.default}
    forward = Numbers("n", sizes_in(program, program.inputs, symbols), names)
    steps = [each for operation in program.forward for each in forward.of_all(operation, program, viewed)]
    backward = Numbers("b", sizes_in(program, (*program.grads, *program.kept), symbols), names, bring)
    laid_out = [
        Operation(with_strides, (Value(name), backward.all(each)), {}, (f"{name}_laid_out",), single=True, effect=False)
        for name, each in zip(program.grads, strides, strict=True)
    ]
    names = {name: f"{name}_laid_out" for name in program.grads}
    later = [each for operation in program.backward for each in backward.of_all(operation, program, viewed)]
    return replace(
        program,
        forward=[*forward.operations, *steps, *brought],
        kept=tuple(sorted((*program.kept, *(operation.makes[0] for operation in brought)))),
        backward=[*backward.operations, *laid_out, *(with_names(each, names) for each in later)],
        wanted=tuple(names.get(name, name) if name is not None else None for name in program.wanted),
        values={},
    )


def sizes_in(program: Program, names: Iterable[str], symbols: Iterable[Any]) -> dict[Any, tuple[str, int]]:
    """For each symbol a value and a dimension that has this size."""
    found: dict[Any, tuple[str, int]] = {}
    for name in names:
        for dim, size in enumerate(program.values[name].shape):
            if is_symbolic(size):
                found.setdefault(cast("torch.SymInt", size).node.expr, (name, dim))
    return {symbol: found[symbol] for symbol in symbols if symbol in found}

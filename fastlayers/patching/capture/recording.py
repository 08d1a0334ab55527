"""The result of a trace, and the names and the tests in code that is generated from it."""

from __future__ import annotations

import ast
import builtins
import copy
import enum
import math
import re
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from numbers import Number
from typing import Any

import torch
from torch import fx

from fastlayers.patching.reasons import Reason, Refusal


@dataclass
class Recording:
    """One run of a forward: its graph, the guards under which it holds, and the objects that these name.

    Attributes:
        asked: parameters of which the forward asks whether they are tensors, and that were taken for some.
    """

    graph: fx.Graph
    guards: dict[str, None] = field(default_factory=dict)
    namespace: dict[str, Any] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)


class Name(str):
    """An argument or a default whose repr is a piece of source code."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def add_names(namespace: dict[str, Any], more: dict[str, Any]) -> None:
    for name, value in more.items():
        if namespace.setdefault(name, value) is not value:
            raise Refusal(Reason.TRACE_FAILED, f"two objects are called {name}")


def module_expression(path: str) -> str:
    return "self" + "".join(f"._modules[{atom!r}]" for atom in path.split(".") if atom)


def bind(recording: Recording, value: Any, hint: str | None = None) -> str:
    """A name for ``value`` in the generated code."""
    return binder(recording.namespace)(value, hint or value.__name__)


def binder(namespace: dict[str, Any], *, reuse: bool = False) -> Callable[[object, str], str]:
    """A function that gives an object, with a hint, a name in a namespace; it may ``reuse`` one of another hint."""

    def bind(value: object, hint: str) -> str:
        for known, bound in namespace.items() if reuse else ():
            if bound is value:
                return known
        name = "_" + re.sub(r"\W+", "_", hint).lstrip("_")
        while namespace.setdefault(name, value) is not value:
            name += "_"
        return name

    return bind


def equality(expression: str, value: Any, bind: Callable[[object, str], str]) -> str:
    """A test that ``expression`` still has this value, as Python source."""
    if value is None or isinstance(value, bool):
        return f"{expression} is {value!r}"
    if isinstance(value, enum.Enum | torch.dtype | torch.memory_format | torch.layout):
        return f"{expression} is {bind(value, 'constant')}"
    literal = repr(value) if has_literal(value) else bind(copy.deepcopy(value), "constant")
    kind = type(value)
    name = kind.__name__ if getattr(builtins, kind.__name__, None) is kind else bind(kind, kind.__name__)
    test = f"type({expression}) is {name} and {expression} == {literal}"
    if kind is float:
        sign = math.copysign(1.0, value)
        return test if value else f"{test} and {bind(math.copysign, 'copysign')}(1.0, {expression}) == {sign}"
    if not has_number(value, integers=isinstance(value, list | dict)):  # A convolution has three tuples of integers.
        return test
    return f"{test} and {bind(exactly, 'exactly')}({expression}) == {exactly(value)!r}"


def has_number(value: Any, integers: bool) -> bool:
    """Whether a value has a number in it, of integers if these count."""
    if isinstance(value, dict):
        return any(has_number(item, integers) for item in value.values())
    if isinstance(value, tuple | list | frozenset):
        return any(has_number(item, integers) for item in value)
    return isinstance(value, Number) and (integers or not isinstance(value, int))


def exactly(value: Any) -> Any:
    """What differs between values that are equal: -0.0 and 0.0, or True and 1."""
    if isinstance(value, dict):
        return tuple(map(exactly, value.items()))
    if isinstance(value, tuple | list | frozenset):
        return tuple(map(exactly, value))
    return repr(value) if isinstance(value, Number) else None


def has_literal(value: Any) -> bool:
    """Whether the repr of a value is Python source for it."""
    if type(value) in (tuple, list):
        return all(map(has_literal, value))
    if type(value) is dict:
        return all(map(has_literal, (*value, *value.values())))
    return value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value))


@dataclass
class Segment:
    """Consecutive statements of a function that are recorded on their own.

    Attributes:
        function: the function.
        statements: its statements after :class:`Instrument`, with locations.
        reads: the variables that they read before they set them.
        writes: the variables that they may set and that are read afterwards.
        itself: the name of the module in the function; None for a function without a module.
        absent: variables that are None.
        tensors: variables that are tensors. Nothing is known of the others.
        closed: functions that are not followed.
    """

    function: types.FunctionType
    statements: list[ast.stmt]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    itself: str | None
    absent: frozenset[str] = frozenset()
    tensors: frozenset[str] = frozenset()
    closed: frozenset[Any] = frozenset()


@dataclass(frozen=True)
class Given:
    """What the calls give for which a recording holds.

    Attributes:
        tensors: parameters with a default for which they give tensors.
        others: parameters without a default that are no tensors, if the forward asks.
        bare: whether they give nothing for ``*args`` and ``**kwargs``. Forwards that have these are refused otherwise.
    """

    tensors: frozenset[str] = frozenset()
    others: frozenset[str] = frozenset()
    bare: bool = False


_read: ContextVar[set[str] | None] = ContextVar("_read", default=None)


@contextmanager
def noting_attributes() -> Iterator[set[str]]:
    """Collect the names of the attributes of modules that traces read meanwhile."""
    read: set[str] = set()
    token = _read.set(read)
    try:
        yield read
    finally:
        _read.reset(token)


def note_attribute(name: str) -> None:
    if (noted := _read.get()) is not None:
        noted.add(name)

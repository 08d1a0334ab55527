"""What the operations of a program are called, and what they are given."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from types import FunctionType
from typing import Any

from torch._ops import OpOverload

from fastlayers.patching.program.program import Operation

__all__ = ["argument", "called", "kernel_name", "spelled", "with_arguments"]


def spelled(operation: Operation) -> str:
    """The name of an operation of torch, without that of its only overload; empty for one of another kind."""
    return name_of(operation.function, "aten")


def kernel_name(operation: Operation) -> str:
    """The name of a kernel of csrc; empty for another operation."""
    return name_of(operation.function, "fastlayers")


def called(operation: Operation) -> str:
    """The name of an operation of torch, of a kernel of csrc or of a function; empty for a launch."""
    if isinstance(operation.function, FunctionType):
        return operation.function.__name__
    return spelled(operation) or kernel_name(operation)


@lru_cache(maxsize=1024)
def name_of(function: Any, namespace: str) -> str:
    if not isinstance(function, OpOverload) or function.namespace != namespace:
        return ""
    name = function._schema.name.split("::")[1]
    return name if function._schema.overload_name in ("", "default") else f"{name}.{function._schema.overload_name}"


@lru_cache(maxsize=1024)
def places_of(function: OpOverload) -> dict[str, int]:
    """Where the arguments of an operation stand, by the names that its schema has for them."""
    return {declared.name: place for place, declared in enumerate(function._schema.arguments)}


def argument(operation: Operation, name: str, default: Any = None) -> Any:
    """What an operation is given for an argument of this name."""
    place = places_of(operation.function).get(name, len(operation.args))  # type: ignore[arg-type]
    return operation.args[place] if place < len(operation.args) else operation.kwargs.get(name, default)


def with_arguments(operation: Operation, makes: Iterable[str] | None = None, /, **given: Any) -> Operation:
    """The operation with other arguments of these names, and with other results."""
    places = places_of(operation.function)  # type: ignore[arg-type]
    args = [*operation.args, *(None for _ in range(1 + max(places[name] for name in given) - len(operation.args)))]
    for name, value in given.items():
        args[places[name]] = value
    return replace(operation, args=tuple(args), makes=operation.makes if makes is None else tuple(makes))

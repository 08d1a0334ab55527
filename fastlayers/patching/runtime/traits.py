"""What the engine knows of a function that generated code calls: its author says it where the function is defined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["DRAWING", "FRESH", "draws", "fresh"]

Function = TypeVar("Function", bound=Callable[..., Any])

#: Functions whose result never shares memory with an argument.
FRESH: set[Callable[..., Any]] = set()
#: Functions that may draw random numbers.
DRAWING: set[Callable[..., Any]] = set()


def fresh(function: Function) -> Function:
    """Say of a function that its result never shares memory with an argument."""
    FRESH.add(function)
    return function


def draws(function: Function) -> Function:
    """Say of a function that it may draw random numbers."""
    DRAWING.add(function)
    return function

"""Properties of the functions that generated code calls, declared where each function is defined."""

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
    """Declare that the result of a function never shares memory with an argument."""
    FRESH.add(function)
    return function


def draws(function: Function) -> Function:
    """Declare that a function may draw random numbers."""
    DRAWING.add(function)
    return function

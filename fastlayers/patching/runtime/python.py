"""Python operations as functions that a graph can call."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["checkpointed", "format_string", "unpack"]


def unpack(value: Any, count: int) -> tuple[Any, ...]:
    """``a, b, c = value`` for a count of 3, with Python's error for another number of items."""
    items = tuple(value)
    if len(items) != count:
        few = "not enough" if len(items) < count else "too many"
        raise ValueError(f"{few} values to unpack (expected {count}, got {len(items)})")
    return items


def format_string(*parts: str | tuple[Any, str, str]) -> str:
    """An f-string from its literal parts and its (value, conversion, format) parts."""
    convert: dict[str, Any] = {"r": repr, "s": str, "a": ascii, "": lambda value: value}
    return "".join(part if isinstance(part, str) else format(convert[part[1]](part[0]), part[2]) for part in parts)


def checkpointed(body: nn.Module, *args: Any, **options: Any) -> Any:
    """Run a captured activation checkpoint as one.

    Dynamo's own operator does not preserve the random state, since compilers handle it: a recomputed dropout would draw
    another mask.
    """
    return checkpoint(body, *args, **{**options, "use_reentrant": False})

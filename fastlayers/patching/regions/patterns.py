"""The pattern of a call: its arguments, with a marker in place of each tensor, as something to look up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastlayers.ops import guard
from fastlayers.patching.capture.caches import Slot

__all__ = ["LEAVES", "NESTED", "NONE", "Flat", "flatten", "unflatten", "without_repeats"]

#: What stands for a tensor in the pattern of a call.
TENSOR = Tensor
#: What stands for None, which would say that there is no pattern.
NONE = (type(None),)
#: Types of arguments that patterns contain besides tensors and values.
NESTED = frozenset({tuple, list, dict, type(None)})
#: Types of arguments that are compared by value.
LEAVES = frozenset({bool, int, float, str, torch.dtype, torch.device, torch.memory_format})


def flatten(value: Any, tensors: list[Tensor]) -> Any:
    """A nested value with a marker in place of each tensor, all of them hashable; None if it holds anything else."""
    kind = type(value)
    if kind in guard.PLAIN:
        tensors.append(value)
        return None if value.is_nested else TENSOR
    if kind is tuple or kind is list:
        parts = []
        for item in value:
            part = flatten(item, tensors) if item is not None else NONE
            if part is None:
                return None
            parts.append(part)
        return (kind, *parts)
    if kind is dict:
        part = flatten(tuple(value.values()), tensors)
        return None if part is None else (dict, tuple(value), part)
    if kind is Slot:
        state = value.state
        if value.grows or any(isinstance(held, dict | list) for part in state for held in part.values()):
            return None  # A call may change what such an attribute holds.
        part = flatten(state, tensors)
        return None if part is None else (Slot, type(value.cache), type(value.layer), part)
    if kind is float and value == 0:
        return kind, value, str(value)  # -0.0 equals 0.0
    return (kind, value) if kind in LEAVES else None


class Repeat(NamedTuple):
    """What stands for a tensor that is in a call before, by its number."""

    number: int


def without_repeats(pattern: Any, given: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
    """The pattern of a call, and its tensors, each once: ``attention(x, x, x)`` has one tensor."""
    numbers: dict[int, int] = {}
    every, once = iter(given), list[Tensor]()

    def walk(part: Any) -> Any:
        if part is TENSOR:
            t = next(every)
            if id(t) in numbers:
                return Repeat(numbers[id(t)])
            numbers[id(t)] = len(once)
            once.append(t)
            return TENSOR
        return tuple(map(walk, part)) if type(part) is tuple and part is not NONE else part

    return walk(pattern), once


class Flat:
    """The tensors of a call, in their order, for :func:`unflatten`."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors, self.taken = tensors, 0
        #: Those of them that caches hold.
        self.held: list[Tensor] = []


def unflatten(pattern: Any, flat: Flat) -> Any:
    """The value of which :func:`flatten` made a pattern, with other tensors."""
    if pattern is TENSOR:
        flat.taken += 1
        return flat.tensors[flat.taken - 1]
    if type(pattern) is Repeat:
        return flat.tensors[pattern.number]
    if pattern is NONE:
        return None
    kind, *parts = pattern
    if kind is dict:
        return dict(zip(parts[0], unflatten(parts[1], flat), strict=True))
    if kind in (tuple, list):
        return kind(unflatten(part, flat) for part in parts)
    if kind is Slot:
        first = flat.taken
        state = unflatten(parts[2], flat)
        flat.held += flat.tensors[first : flat.taken]
        return Slot.stand_in(parts[0], parts[1], state)
    return parts[0]

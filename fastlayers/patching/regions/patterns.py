"""The pattern of a call: its arguments, with a marker in place of each tensor, as something to look up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastlayers.ops import guard
from fastlayers.patching.capture.caches import Slot

__all__ = [
    "LEAVES",
    "NESTED",
    "NONE",
    "Flat",
    "flatten",
    "held_by_caches",
    "unflatten",
    "with_caches_that_grow",
    "without_repeats",
]

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
    if kind is tuple or kind is list:
        return flatten_all(kind, value, tensors)
    if kind is dict:
        part = flatten_all(tuple, value.values(), tensors)
        return None if part is None else (dict, tuple(value), part)
    if kind in guard.PLAIN:
        tensors.append(value)
        return None if value.is_nested else TENSOR
    if kind is Slot:
        return flatten_slot(value, tensors)
    if kind is float and value == 0:
        return kind, value, str(value)  # -0.0 equals 0.0
    return (kind, value) if kind in LEAVES else None


def flatten_all(kind: Any, items: Iterable[Any], tensors: list[Tensor]) -> Any:
    """The same of items, which are most often tensors and simple values: a call of a function for each takes as long
    as all else."""
    parts = [kind]
    for item in items:
        own = type(item)
        if item is None:
            parts.append(NONE)
        elif own is Tensor:
            if item.is_nested:
                return None
            tensors.append(item)
            parts.append(TENSOR)
        elif own is bool or own is int or own is str:
            parts.append((own, item))
        else:
            part = flatten(item, tensors)
            if part is None:
                return None
            parts.append(part)
    return tuple(parts)


def flatten_slot(slot: Slot, tensors: list[Tensor]) -> Any:
    """The same of what a cache holds for a layer."""
    state = slot.state
    for part in state:
        for held in part.values():
            if isinstance(held, dict | list):
                return None  # A call may change what such an attribute holds.
    counts = [state[0].pop(name) for name in slot.counts]
    part = flatten_all(tuple, state, tensors)
    if part is None:
        return None
    # As sizes of tensors: they differ from call to call, and much may follow from them.
    tensors.extend(torch.empty(count, 0) for count in counts)
    return Slot, type(slot.cache), type(slot.layer), part, slot.counts, slot.grows


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
        if type(part) is not tuple or part is NONE:
            return part
        walked = tuple(map(walk, part))
        if part and part[0] is Slot:
            once.extend(next(every) for _ in part[-2])
        return walked

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
        state[0].update((name, unflatten(TENSOR, flat).shape[0]) for name in parts[3])
        return Slot.stand_in(parts[0], parts[1], state)
    return parts[0]


def with_caches_that_grow(patterns: tuple[Any, Any]) -> bool:
    """Whether a call, by the patterns of its arguments, is given a cache with tensors that each call makes larger."""
    positional, named = patterns
    parts = (*positional[1:], *(() if named is NONE else named[2][1:]))
    return any(type(part) is tuple and len(part) > 1 and part[0] is Slot and part[-1] for part in parts)


def held_by_caches(patterns: Sequence[Any], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Those of the tensors of a call that caches hold."""
    flat = Flat(tensors)
    for pattern in patterns:
        unflatten(pattern, flat)
    return flat.held

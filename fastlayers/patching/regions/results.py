"""What a call returns, taken apart into tensors and the rest, and put together with others."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fastlayers.patching.capture.caches import Arguments, Slot
from fastlayers.patching.capture.values import is_value
from fastlayers.patching.program.numbers import is_symbolic, map_numbers
from fastlayers.patching.runtime.lazy import LazyTensor, Recipe, lazy

__all__ = [
    "Argument",
    "Number",
    "OpaqueError",
    "Place",
    "Taken",
    "put_together",
    "take_apart",
    "take_changes",
    "tensors_in",
    "with_numbers",
]


class OpaqueError(Exception):
    """A result that cannot be taken apart: something in it might be different in each call."""


class Place(NamedTuple):
    """The number of a tensor."""

    number: int


class View(NamedTuple):
    """A view of a tensor, by its number, and its geometry, with an offset from that of the tensor."""

    number: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class Number(NamedTuple):
    """A number that follows from sizes of the tensors of a call, and what gives it for these."""

    of: Callable[[Sequence[Tensor]], int]


class Taken(list[Tensor]):
    """Tensors that are known, and after them those of a result, each once.

    Attributes:
        arguments: the lists, dicts and caches of the arguments of the call, which a result may hold.
        views: further tensors of the result, with the number of what each is a view of.
        lazy: whether something in the result is computed when it is used.
    """

    def __init__(self, known: Iterable[Tensor] = (), arguments: Any = ()) -> None:
        super().__init__(known)
        self.arguments = dict(containers_of(arguments))
        self.made: dict[int, Made] = {}
        self.views: list[tuple[int, Tensor]] = []
        self.lazy = False


class Lazy(NamedTuple):
    """Logits that are computed when somebody uses them, and the tensors of a call that they are computed from."""

    recipe: Recipe
    sources: list[Place | View]


class Argument(NamedTuple):
    """A list, a dict or a cache of the arguments, by the keys that lead to it."""

    keys: tuple[Any, ...]

    def of(self, arguments: Any) -> Any:
        return functools.reduce(operator.getitem, self.keys, arguments)


class Nested(NamedTuple):
    """What torch's pytree takes apart: containers, and the outputs of model libraries."""

    spec: Any
    leaves: list[Any]


class Made(NamedTuple):
    """An object with tensors among its attributes, such as a KV cache."""

    value: Any
    attributes: dict[str, Any]


def take_apart(value: Any, tensors: Taken, inside: bool = False) -> Any:
    """A value with a :class:`Place` for each tensor, or a :class:`View`. Appends the tensors, each once.

    What has no tensors is the same object in each call, if it is ``inside`` of an object with some.

    Raises:
        OpaqueError: something there might be different in each call.
    """
    if isinstance(value, LazyTensor) and value.recipe is not None:
        tensors.lazy = True
        return Lazy(value.recipe, [place(t, tensors) for t in value.sources])
    if isinstance(value, Tensor):
        return place(value, tensors)
    if is_symbolic(value) or is_value(value):
        return value
    if id(value) in tensors.arguments:
        return tensors.arguments[id(value)]
    leaves, spec = pytree.tree_flatten(value, is_leaf=lambda part: id(part) in tensors.arguments)
    if not (len(leaves) == 1 and leaves[0] is value):
        return Nested(spec, [take_apart(leaf, tensors, inside) for leaf in leaves])
    if id(value) in tensors.made:
        return tensors.made[id(value)]
    if hasattr(value, "__dict__") and not isinstance(value, nn.Module):
        attributes = {name: take_apart(attribute, tensors, inside=True) for name, attribute in vars(value).items()}
        if any(map(holds_tensors, attributes.values())):
            empty = copy.copy(value)  # What is kept of it must not hold the tensors of this call.
            vars(empty).update(dict.fromkeys(attributes))
            made = tensors.made[id(value)] = Made(empty, attributes)
            return made
    if not inside:
        raise OpaqueError(f"it returns a {type(value).__name__}")
    return value


def take_changes(arguments: Arguments, tensors: Taken) -> Iterator[tuple[Argument, dict[str, Any]]]:
    """What a call has assigned to what caches hold, taken apart.

    Raises:
        Refusal: it has changed more of a cache.
    """
    for i, part in enumerate(arguments):
        for key, slot in part.items() if isinstance(part, dict) else enumerate(part):
            if isinstance(slot, Slot) and (changes := slot.changes()):
                yield Argument((i, key)), {name: take_apart(v, tensors, inside=True) for name, v in changes.items()}


def holds_tensors(parts: Any) -> bool:
    """Whether parts of a value, which was taken apart, have tensors."""
    if isinstance(parts, Nested):
        return any(map(holds_tensors, parts.leaves))
    return isinstance(parts, Place | View | Made | Lazy)


def place(t: Tensor, tensors: Taken) -> Place | View:
    """Where a tensor is among others, or which of them it is a view of. Appends it if it is new."""
    for i, other in enumerate(tensors):
        if t is other:
            return Place(i)
        if is_view(t, other):
            tensors.views.append((i, t))
            offset: Any = t.storage_offset() - other.storage_offset()
            return View(i, tuple(t.shape), t.stride(), offset if is_symbolic(offset) else int(offset))
    tensors.append(t)
    return Place(len(tensors) - 1)


def with_numbers(parts: Any, number: Callable[[Any], Any]) -> Any:
    """The parts of a value with something else in place of their symbolic numbers."""
    if isinstance(parts, View):
        return View(parts.number, *(map_numbers(each, number) for each in parts[1:]))
    if isinstance(parts, Nested):
        return Nested(parts.spec, [with_numbers(leaf, number) for leaf in parts.leaves])
    if isinstance(parts, Lazy):
        return Lazy(parts.recipe, [with_numbers(source, number) for source in parts.sources])
    if isinstance(parts, Made):
        return Made(parts.value, {name: with_numbers(part, number) for name, part in parts.attributes.items()})
    return number(parts) if is_symbolic(parts) else parts


def is_view(t: Tensor, of: Tensor) -> bool:
    """Whether a tensor uses only memory of another one, which leaves no gaps."""
    if (
        (t.layout, of.layout) != (torch.strided, torch.strided)
        or t.untyped_storage()._cdata != of.untyped_storage()._cdata
        or (t.dtype, t.requires_grad) != (of.dtype, of.requires_grad)
        or not torch.ops.aten.is_non_overlapping_and_dense(of)
        or t.numel() == 0
    ):
        return False
    first = t.storage_offset() - of.storage_offset()
    last = first + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return bool(first >= 0 and last < of.numel())  # torch 2.14 declares sizes that may be symbols.


def containers_of(value: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[int, Argument]]:
    """The lists, dicts and caches in nested arguments, by identity."""
    if isinstance(value, list | dict):
        yield id(value), Argument(keys)
    if isinstance(value, Slot):
        yield id(value.cache), Argument(keys)
    if isinstance(value, tuple | list | dict):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from containers_of(item, (*keys, key))


def put_together(parts: Any, tensors: Sequence[Tensor], arguments: Any = (), made: dict[int, Any] | None = None) -> Any:
    """The value that :func:`take_apart` took apart, with these tensors and the arguments of this call. ``made`` are the
    objects made for it so far."""
    if isinstance(parts, Place):
        return tensors[parts.number]
    if isinstance(parts, View):
        base = tensors[parts.number]
        shape, strides, (offset,) = (known(each, tensors) for each in (parts.shape, parts.strides, (parts.offset,)))
        return base.as_strided(shape, strides, base.storage_offset() + offset)
    if isinstance(parts, Number):
        return parts.of(tensors)
    if isinstance(parts, Nested):
        made = {} if made is None else made
        leaves = [put_together(leaf, tensors, arguments, made) for leaf in parts.leaves]
        return pytree.tree_unflatten(leaves, parts.spec)
    if isinstance(parts, Lazy):
        return lazy(parts.recipe, [put_together(source, tensors) for source in parts.sources])
    if isinstance(parts, Argument):
        argument = parts.of(arguments)
        return argument.cache if isinstance(argument, Slot) else argument
    if isinstance(parts, Made):
        made = {} if made is None else made
        if id(parts) not in made:
            value = made[id(parts)] = copy.copy(parts.value)
            attributes = parts.attributes.items()
            vars(value).update({name: put_together(part, tensors, arguments, made) for name, part in attributes})
        return made[id(parts)]
    return parts


def known(numbers: Sequence[Any], tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(number.of(tensors) if isinstance(number, Number) else number for number in numbers)


def tensors_in(value: Any) -> Taken:
    """The tensors of a result; none if it cannot be taken apart."""
    tensors = Taken()
    try:
        take_apart(value, tensors)
    except OpaqueError:
        return Taken()
    return tensors

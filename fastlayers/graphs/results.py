"""What a call returns, taken apart into tensors and the rest, and put together with others."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fastlayers.graphs.watch import UncapturedError
from fastlayers.patching.capture.reads import is_value

__all__ = ["put_together", "take_apart", "tensors_in"]


class Place(NamedTuple):
    """The number of a tensor."""

    number: int


class Nested(NamedTuple):
    """What torch's pytree takes apart: containers, and the outputs of model libraries."""

    spec: Any
    leaves: list[Any]


class Made(NamedTuple):
    """An object with tensors among its attributes, such as a KV cache."""

    value: Any
    attributes: dict[str, Any]


def take_apart(value: Any, tensors: list[Tensor], inside: bool = False) -> Any:
    """A value with a :class:`Place` for each tensor. Appends the tensors, each once.

    What has no tensors is the same object in each call, if it is ``inside`` of an object with some.

    Raises:
        UncapturedError: something there might be different in each call.
    """
    if isinstance(value, Tensor):
        number = next((i for i, t in enumerate(tensors) if t is value), len(tensors))
        if number == len(tensors):
            tensors.append(value)
        return Place(number)
    if is_value(value):
        return value
    leaves, spec = pytree.tree_flatten(value)
    if not (len(leaves) == 1 and leaves[0] is value):
        return Nested(spec, [take_apart(leaf, tensors, inside) for leaf in leaves])
    if hasattr(value, "__dict__") and not isinstance(value, nn.Module):
        before = len(tensors)
        attributes = {name: take_apart(attribute, tensors, inside=True) for name, attribute in vars(value).items()}
        if len(tensors) > before:
            return Made(value, attributes)
    if not inside:
        raise UncapturedError(f"it returns a {type(value).__name__}")
    return value


def put_together(parts: Any, tensors: Sequence[Tensor]) -> Any:
    """The value that :func:`take_apart` took apart, with these tensors."""
    if isinstance(parts, Place):
        return tensors[parts.number]
    if isinstance(parts, Nested):
        return pytree.tree_unflatten([put_together(leaf, tensors) for leaf in parts.leaves], parts.spec)
    if isinstance(parts, Made):
        made = copy.copy(parts.value)
        vars(made).update({name: put_together(part, tensors) for name, part in parts.attributes.items()})
        return made
    return parts


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a result, each once; none if it cannot be taken apart."""
    tensors: list[Tensor] = []
    try:
        take_apart(value, tensors)
    except UncapturedError:
        return []
    return tensors

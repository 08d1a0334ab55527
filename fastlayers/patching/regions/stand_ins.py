"""A module as it was at a call: a copy that runs in its place.

Autograd's graph of a recorded forward is made with one, which other tensors are put into, since another thread may use
the module. The forward of a captured call runs again on one. By then the module may be in another mode, have other
attributes, hooks or children, or be gone.
"""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["stand_in"]


def empty_like(t: Tensor) -> Tensor:
    """A tensor of no elements, and of the same class."""
    made = torch.empty(0, dtype=t.dtype, device="meta")
    made.__class__ = type(t)
    return made


def stand_in(module: nn.Module, tensor: Callable[[Tensor], Tensor] = empty_like) -> nn.Module:
    """A copy of a module and of all modules that it refers to, with other tensors.

    Attributes that are neither modules nor containers of them are those of the original. What is read of them is part
    of the guard of a recording, by which a change shows.
    """
    copies: dict[int, Any] = {}

    def copied(value: Any) -> Any:
        known = copies.get(id(value))
        if known is not None:
            return known
        kind = type(value)
        if isinstance(value, nn.Module):
            made = copies[id(value)] = object.__new__(kind)
            vars(made).update({name: copied(attribute) for name, attribute in vars(value).items()})
            return made
        if isinstance(value, Tensor):
            return tensor(value)
        if kind in (dict, OrderedDict):
            made = copies[id(value)] = kind()
            made.update({key: copied(item) for key, item in value.items()})
            return made
        if kind is list:
            made = copies[id(value)] = []
            made.extend(map(copied, value))
            return made
        if kind is tuple:
            return tuple(map(copied, value))
        if kind is types.MethodType:
            return types.MethodType(value.__func__, copied(value.__self__))
        if kind is partial:
            return partial(value.func, *map(copied, value.args), **{k: copied(v) for k, v in value.keywords.items()})
        return value

    found: nn.Module = copied(module)
    return found

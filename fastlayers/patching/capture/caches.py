"""Caches of keys and values among the arguments of a call.

A cache holds an object for each layer of a model, with tensors that grow or are written in place. The forward of one
layer reads and changes the object of that layer alone, found by a number that the layer has. So a region takes what
that object holds for arguments and results like others, and layers that differ in their number share a recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from torch import Tensor, nn

from fastlayers.patching.reasons import Reason, Refusal

__all__ = ["ATTRIBUTE", "NUMBER", "Arguments", "Caches", "Layers", "Slot", "with_caches"]

#: The positional arguments of a call, and those by name.
Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]

#: Types of arguments that are no caches.
SIMPLE = frozenset({Tensor, nn.Parameter, type(None), bool, int, float, str, tuple, list, dict})
#: The attribute of a module that says which layer of a model it is, or is part of.
ATTRIBUTE = "layer_idx"


class Number:
    """Stands for the number of a layer where a forward is followed: nothing can be computed with it."""

    def _refuse(self, *_: Any) -> Any:
        raise Refusal(Reason.READS_STATE, "computes with the number of its layer")

    __eq__ = __ne__ = __bool__ = __index__ = __hash__ = _refuse


NUMBER = Number()


class Layers:
    """Stands for the layers of a cache: that with the number which is asked for first, and no other."""

    def __init__(self, layer: Any) -> None:
        self.layer, self.number = layer, None

    def __getitem__(self, number: Any) -> Any:
        if self.number is None:
            self.number = number
        if number is not self.number and (type(number) is not int or number != self.number):
            raise Refusal(Reason.READS_STATE, "reads what a cache holds for two layers")
        return self.layer


class Slot:
    """What a cache holds for one layer of a model.

    Attributes:
        cache: an argument of a call.
        layer: the object in it.
        grows: whether each call makes tensors of other sizes of those there.
        counts: the attributes of the layer that are numbers which each call changes.
    """

    def __init__(self, cache: Any, layer: Any, grows: bool = False, counts: Iterable[str] = ()) -> None:
        self.cache, self.layer, self.grows, self.counts = cache, layer, grows, tuple(counts)
        #: The attributes of both before the call, of a stand-in.
        self._before: tuple[dict[str, Any], dict[str, Any]] = ({}, {})

    @property
    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The attributes of the layer, and those of the cache without its layers."""
        return dict(vars(self.layer)), {name: value for name, value in vars(self.cache).items() if name != "layers"}

    @classmethod
    def stand_in(cls, cache: type, layer: type, state: tuple[dict[str, Any], dict[str, Any]]) -> Slot:
        """Of a cache without other layers, of which a call may change everything."""
        held: Any = object.__new__(layer)
        own: Any = object.__new__(cache)
        vars(held).update(state[0])
        vars(own).update(state[1], layers=Layers(held))
        made = cls(own, held)
        made._before = dict(vars(held)), dict(vars(own))
        return made

    def changes(self) -> dict[str, Any]:
        """What was assigned to attributes of the layer since.

        Raises:
            Refusal: the cache was changed elsewhere, or an attribute is gone.
        """
        before, own = self._before
        now = vars(self.layer)
        if before.keys() - now.keys() or any(own.get(name, self) is not v for name, v in vars(self.cache).items()):
            raise Refusal(Reason.CHANGES_STATE, f"changes a {type(self.cache).__name__}")
        return {name: value for name, value in now.items() if before.get(name, self) is not value}


class Caches:
    """Finds what caches hold for the layer of a model that a module is, or is part of.

    Args:
        slot_or_value: gives a slot for a cache and a number, and any other value as it is.

    Attributes:
        number: the expression of that number; None if there is none, or nobody has asked.
        seen: whether a call was given one.
    """

    def __init__(self, slot_or_value: Callable[[Any, int], Any]) -> None:
        self._slot_or_value = slot_or_value
        self.number: str | None = None
        self.seen = False
        self._of: Callable[[nn.Module], Any] | None = None

    def taken_apart(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """The arguments of a call with slots in place of caches."""
        if self._of is None:
            self.number = number_of(module)
            self._of = eval(f"lambda self: {self.number}")
        try:
            number = self._of(module)
        except (AttributeError, KeyError):
            number = None
        if type(number) is not int:
            return args, kwargs

        def taken(value: Any) -> Any:
            return value if type(value) in SIMPLE else self._slot_or_value(value, number)

        found = tuple(map(taken, args)), {name: taken(value) for name, value in kwargs.items()}
        self.seen = self.seen or any(type(value) is Slot for value in (*found[0], *found[1].values()))
        return found


def number_of(module: nn.Module) -> str | None:
    """The expression of the number that a module, or modules inside, have for its layer; None if there is no such."""
    found = {name: vars(inside)[ATTRIBUTE] for name, inside in module.named_modules() if ATTRIBUTE in vars(inside)}
    if not all(type(number) is int for number in found.values()) or len({*found.values()}) != 1:
        return None
    path = next(iter(found)).split(".")
    return "".join(["self", *(f"._modules[{part!r}]" for part in path if part), f".{ATTRIBUTE}"])


def with_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """The arguments of a call as its forward takes them, with caches in place of slots."""

    def given(value: Any) -> Any:
        return value.cache if isinstance(value, Slot) else value

    return tuple(map(given, args)), {name: given(value) for name, value in kwargs.items()}

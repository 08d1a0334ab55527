"""Modules that are alike: what was found for the forward of one holds for the others.

The blocks of a model run the same code, on modules of the same classes with the same attributes. Recording that code
again for each of them is most of the time that patching takes. Modules are alike if all that planning may read of them
and of the modules inside is the same: classes, attributes, and what their tensors look like. Only numbers and the
strings in a dict may differ that no forward looked at, such as the index of a layer, or its name in a dict of peft's.

Nothing here decides what a model computes. A generated class tests on every call what it relies on, whichever module
has it; were two modules alike that should not be, the original forward would run in one of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fastlayers.patching.capture.recording import noting_attributes
from fastlayers.patching.capture.values import PRIMITIVES
from fastlayers.patching.reasons import Refusal
from fastlayers.patching.rewrite.engine import Fused

__all__ = ["Outcomes"]


class Outcomes:
    """What was found for the forwards of the modules of one model. It must not be kept for longer than these."""

    def __init__(self) -> None:
        self._known: dict[Any, list[tuple[frozenset[str], Any, Fused | Refusal]]] = {}

    def find(self, module: nn.Module, excluded: frozenset[str], make: Callable[[], Fused]) -> Fused:
        """The outcome for a module that is alike, or what ``make`` returns.

        Args:
            excluded: paths of children that no fusion may absorb.

        Raises:
            Refusal: ``make`` raised it, now or for a module that is alike.
        """
        free: dict[str, list[Any]] = {}
        known = self._known.setdefault((tuple(described(module, free)), excluded), [])
        outcome = next((found for names, values, found in known if values == chosen(free, names)), None)
        if outcome is None:
            with noting_attributes() as read:
                try:
                    outcome = make()
                except Refusal as refusal:
                    outcome = refusal.kept()
            names = frozenset(read)
            known.append((names, chosen(free, names), outcome))
        if isinstance(outcome, Refusal):
            raise Refusal(outcome.reason, outcome.detail)
        return outcome


def chosen(free: dict[str, list[Any]], names: frozenset[str]) -> list[Any]:
    return [(name, free[name]) for name in sorted(names.intersection(free))]


def described(module: nn.Module, free: dict[str, list[Any]]) -> Iterator[Any]:
    """All that planning may read of a module and the modules inside; what may differ goes to ``free``, by attribute."""
    seen: dict[int, int] = {}
    pending = [module]
    while pending:
        present = pending.pop()
        if id(present) in seen:  # shared by two parents
            yield seen[id(present)]
            continue
        seen[id(present)] = len(seen)
        yield type(present)
        ours = not type(present).__module__.startswith("torch.")
        for name, value in vars(present).items():
            if ours and type(value) in (int, float):
                free.setdefault(name, []).append((type(value), value))
                yield name, type(value)
            elif ours and type(value) is dict and name != "_modules":
                texts = {key: item for key, item in value.items() if type(item) is str}
                free.setdefault(name, []).append(texts)
                yield name, *(key if key in texts else description((key, item), seen) for key, item in value.items())
            elif name != "_modules":
                yield name, description(value, seen)
        for name, child in present._modules.items():
            yield name, child is None
            if child is not None:
                pending.append(child)


def description(value: Any, seen: dict[int, int]) -> Any:
    """Equal for values that planning cannot tell apart. An object with more than attributes equals only itself."""
    if isinstance(value, Tensor):
        if id(value) in seen:
            return seen[id(value)]
        seen[id(value)] = len(seen)
        if is_lazy(value):  # It has no shape yet.
            return type(value), value.dtype, value.device, value.requires_grad
        return type(value), value.shape, value.dtype, value.device, value.requires_grad
    if value is None or isinstance(value, PRIMITIVES):
        return type(value), value
    if isinstance(value, list | tuple):
        return type(value), *(description(item, seen) for item in value)
    if isinstance(value, dict):
        return type(value), *((description(key, seen), description(item, seen)) for key, item in value.items())
    if isinstance(value, set | frozenset) and all(isinstance(item, str) for item in value):
        return type(value), frozenset(value)
    if isinstance(value, functools.partial):
        return type(value), *(description(part, seen) for part in (value.func, value.args, value.keywords))
    if is_plain_object(value):
        if id(value) in seen:
            return seen[id(value)]
        seen[id(value)] = len(seen)
        return type(value), description(vars(value), seen)
    return id(value)


class Plain:
    """An object of this class has attributes, and nothing else."""


def is_plain_object(value: Any) -> bool:
    """Whether all that an object has are its attributes: it has no slots, and no room for what an extension keeps."""
    fits = type(value).__basicsize__ == Plain.__basicsize__ and hasattr(value, "__dict__")
    return fits and not isinstance(value, nn.Module)

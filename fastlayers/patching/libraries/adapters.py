"""Adapters: what the engine needs to know about a model library, and their registry.

The engine itself knows only torch. An :class:`Adapter` describes one library, and is loaded after that library has been
imported, never before. To support another library, subclass :class:`Adapter`, override what differs, and register it::

    class Mine(Adapter):
        def plain_forward(self, forward):
            return getattr(forward, "wrapped_by_my_library", forward)

    register_adapter("my_library", Mine)
"""

from __future__ import annotations

import ast
import functools
import sys
import types
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from fastlayers.patching.capture.caches import Slot
from fastlayers.patching.reasons import Reason, Refusal


@dataclass
class RewrittenModel:
    """The parts of a generated class for a whole model, and its entry in the report.

    Attributes:
        members: the attributes of the class: methods and properties.
        rules: the number of fused places by rule.
        left: refusals of what looked fusable.
        source: the source of the methods.
        key: equal for models that share a generated class.
        harmless: classes whose ``__init_subclass__`` may run when the class is created.
        omits: names of outputs that the original model returns and the generated class leaves out.
    """

    members: dict[str, Any] = field(default_factory=dict)
    rules: Counter[str] = field(default_factory=Counter)
    left: list[Refusal] = field(default_factory=list)
    source: str = ""
    key: tuple[Any, ...] = ()
    harmless: tuple[type, ...] = ()
    omits: frozenset[str] = frozenset()


class Adapter:
    """Describes the modules of a library to the engine. The methods here describe a library without specialities."""

    def plain_forward(self, forward: Any) -> Any:
        """The forward inside of a wrapper that the library puts around the forwards of its classes."""
        return forward

    def former_names(self, forward: Any) -> frozenset[str]:
        """Keywords that a wrapper around a forward replaces by others."""
        return frozenset()

    def decorated(self, forward: Any, generated: Any) -> Any:
        """A generated forward inside of those wrappers around the original one that change its arguments."""
        return generated

    def may_subclass(self, cls: type) -> bool:
        """Whether ``__init_subclass__`` of a class of the library may run for a generated class."""
        return False

    def rewrite_model(self, module: nn.Module, excluded: frozenset[str]) -> RewrittenModel | None:
        """Rewrite a whole model whose forward cannot be recorded; None if there is nothing to rewrite.

        Args:
            module: it must not be changed.
            excluded: paths of children that no fusion may absorb.
        """
        return None

    def rewrite_method(
        self, module: nn.Module, tree: ast.FunctionDef, function: types.FunctionType
    ) -> tuple[Counter[str], dict[str, Any]]:
        """Change a forward that is compiled again from its source.

        Args:
            module: the module with this forward.
            tree: the syntax of the forward, to be changed in place.
            function: the forward.

        Returns:
            The number of fused places by rule, and the objects that the changed source names in addition to its
            globals.
        """
        return Counter(), {}

    def fused_layers(self) -> dict[type[nn.Module], type[nn.Module]]:
        """Layers of the library with the subclasses that replace them.

        Such a layer returns a tensor of its own, keeps no reference to it, and writes none of its arguments.
        """
        return {}

    def lookups(self) -> frozenset[Any]:
        """Functions that only look something up, so that a region may compare what they return for plain arguments."""
        return frozenset()

    def slot(self, cache: Any, number: int) -> Slot | None:
        """What a cache, which is an argument, holds for the layer of a model with this number: one of the objects in
        its ``layers``; None if it is no cache of the library. The number is the attribute ``layer_idx`` of a module."""
        return None

    def called_functions(self, module: nn.Module) -> frozenset[str]:
        """Names of global functions that a forward passes to the library, which calls them."""
        return frozenset()


_registered: OrderedDict[int, tuple[str, Callable[[], Adapter]]] = OrderedDict()


def register_adapter(library: str, load: Callable[[], Adapter]) -> RemovableHandle:
    """Register an adapter for a library, for all further patching in this process.

    Args:
        library: the name of the package, as it is imported.
        load: creates the adapter: its class, or a function that imports it first. It is called once, when a model is
            patched after the library has been imported.

    Returns:
        A handle: ``handle.remove()`` unregisters the adapter, and so does leaving ``with register_adapter(...): ...``.

    Raises:
        TypeError: ``library`` is not a string, or ``load`` is not callable.
    """
    if not isinstance(library, str) or not callable(load):
        raise TypeError(f"expected the name of a library and a callable, got {library!r} and {load!r}")
    handle = RemovableHandle(_registered)
    _registered[handle.id] = library, functools.cache(load)
    return handle


def adapters() -> Iterator[Adapter]:
    """The adapters of the libraries that have been imported."""
    for library, load in list(_registered.values()):
        if library in sys.modules:
            yield load()


def undecorated(forward: Any, names: Iterable[str] = ()) -> Any:
    """A forward without what a library wraps around it, for a call with such keywords.

    Raises:
        Refusal: the wrapper replaces one of them.
    """
    for adapter in adapters():
        former = adapter.former_names(forward).intersection(names)
        if former:
            raise Refusal(Reason.DECORATED, f"{forward.__qualname__} is given {', '.join(sorted(former))}")
        forward = adapter.plain_forward(forward)
    return forward


def plain_forward(cls: type[nn.Module]) -> Any:
    """The forward of a class, without what its library wraps around it."""
    return undecorated(cls.forward)


def slot_or_value(value: Any, number: int) -> Any:
    """The slot of a layer, by its number, in a cache of some library; any other value as it is."""
    found = (adapter.slot(value, number) for adapter in adapters())
    return next((slot for slot in found if slot is not None), value)


def decorated(cls: type[nn.Module], generated: Any) -> Any:
    """A generated forward for a class, which takes the arguments that the library lets its own forward take."""
    for adapter in adapters():
        generated = adapter.decorated(cls.forward, generated)
    return generated

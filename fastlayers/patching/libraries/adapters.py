"""What the engine asks about the modules of a model library, and who answers for which library.

The engine itself knows torch alone. An :class:`Adapter` stands for one library; it is loaded when that library has been
imported, never before. To teach the engine another library, subclass :class:`Adapter`, override what differs there, and
register it::

    class Mine(Adapter):
        def plain_forward(self, forward):
            return getattr(forward, "wrapped_by_my_library", forward)

    register_adapter("my_library", Mine)
"""

from __future__ import annotations

import ast
import sys
import types
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from fastlayers.patching.reasons import Refusal

__all__ = ["Adapter", "RewrittenModel", "adapters", "plain_forward", "register_adapter"]


@dataclass
class RewrittenModel:
    """The generated class of a whole model, and what a report says of it.

    Attributes:
        members: its own attributes: methods, properties.
        rules: what was fused, with the number of places.
        left: what looked fusable and was left.
        source: of its methods, for a look at it.
        key: equal for models whose generated classes are.
        harmless: classes whose ``__init_subclass__`` may run when it is made.
        omits: what its output lacks that the original's has, by name.
    """

    members: dict[str, Any] = field(default_factory=dict)
    rules: Counter[str] = field(default_factory=Counter)
    left: list[Refusal] = field(default_factory=list)
    source: str = ""
    key: tuple[Any, ...] = ()
    harmless: tuple[type, ...] = ()
    omits: frozenset[str] = frozenset()


class Adapter:
    """What the engine asks about the modules of a library. These are the answers for one with nothing special."""

    def plain_forward(self, forward: Any) -> Any:
        """The forward that an author wrote, where the library wraps the forwards of its classes."""
        return forward

    def may_subclass(self, cls: type) -> bool:
        """Whether ``__init_subclass__`` of a class of the library may run for a generated class."""
        return False

    def rewrite_model(self, module: nn.Module, excluded: frozenset[str]) -> RewrittenModel | None:
        """A class for a whole model, whose forward cannot be recorded; None where there is none.

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
            module: whose forward it is.
            tree: its syntax, to be changed in place.
            function: the forward.

        Returns:
            What was fused, and the objects that the changed source names besides its globals.
        """
        return Counter(), {}

    def called_functions(self, module: nn.Module) -> frozenset[str]:
        """Names of global functions that a forward does not call but hands to the library, which calls them."""
        return frozenset()


_registered: OrderedDict[int, tuple[str, Callable[[], Adapter]]] = OrderedDict()
_loaded: dict[int, Adapter] = {}


def register_adapter(library: str, load: Callable[[], Adapter]) -> RemovableHandle:
    """Let an adapter answer for the modules of a library, from now on and in this process.

    Args:
        library: the name of the package, as it is imported.
        load: makes the adapter: its class, say, or a function that imports it first. It is called once, when a model is
            patched and the library has been imported.

    Returns:
        A handle: ``handle.remove()`` unregisters the adapter, and so does leaving ``with register_adapter(...): ...``.

    Raises:
        TypeError: ``library`` is not a name, or ``load`` cannot be called.
    """
    if not isinstance(library, str) or not callable(load):
        raise TypeError(f"expected the name of a library and what makes its adapter, got {library!r} and {load!r}")
    handle = RemovableHandle(_registered)
    _registered[handle.id] = library, load
    return handle


def adapters() -> Iterator[Adapter]:
    """The adapters of the libraries that have been imported."""
    for key, (library, load) in list(_registered.items()):
        if library in sys.modules:
            if key not in _loaded:
                _loaded[key] = load()
            yield _loaded[key]


def plain_forward(cls: type[nn.Module]) -> Any:
    """The forward of a class, without what its library wraps around it."""
    forward: Any = cls.forward
    for adapter in adapters():
        forward = adapter.plain_forward(forward)
    return forward

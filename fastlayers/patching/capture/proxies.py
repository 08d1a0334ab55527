"""What a trace hands to a forward: values that write down what happens to them, and what refuses to be used."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx
from torch.fx.proxy import Attribute, GraphAppendingTracer, Proxy

from fastlayers.patching.capture.syntax import present_statement, statement_at_fault
from fastlayers.patching.reasons import Reason, Refusal

#: Marks an argument of which a guard says that it is a tensor.
IS_TENSOR = "fastlayers_is_tensor"
#: Marks a node with the statement that it is of, as :func:`shown_statement` takes it.
STATEMENT = "fastlayers_statement"


class Opaque:
    """An object that a forward reads from its module. Only its attributes can be used."""

    __slots__ = ("origin", "value")

    def __init__(self, value: object, origin: str) -> None:
        self.value = value
        self.origin = origin

    def _refuse(self, *args: object) -> Any:
        raise Refusal(Reason.READS_STATE, f"{self.origin} is a {type(self.value).__name__}")

    __eq__ = __hash__ = __bool__ = __iter__ = __len__ = __getitem__ = __contains__ = __str__ = __format__ = (
        __index__
    ) = _refuse


@dataclass(frozen=True)
class Mapped:
    """``map(function, *args)`` of traced values, whose length is known when the result is unpacked."""

    function: Any
    args: tuple[Any, ...]


class StrictProxy(Proxy):
    """A traced value that refuses operations for which Python would silently use the proxy object itself.

    ``{3: "a"}.get(x.shape[0])`` would find nothing, and ``"%s" % x`` would format the proxy, both without an error.
    """

    def __getattr__(self, name: str) -> StrictAttribute:
        if IS_TENSOR in self.node.meta and not hasattr(Tensor, name):
            raise Refusal(Reason.TYPE_TEST, f"{self.node} has no {name} if it is a tensor")
        return StrictAttribute(self, name)

    def _refuse(self, *args: object) -> Any:
        raise Refusal(Reason.DATA_DEPENDENT, f"needs a computed value{statement_at_fault()}")

    __hash__ = __str__ = __format__ = __iter__ = __index__ = __contains__ = _refuse


class StrictAttribute(StrictProxy, Attribute):
    """An attribute of a traced value, which may turn out to be a method."""

    def __init__(self, root: Proxy, name: str) -> None:
        Attribute.__init__(self, root, name)


class Recorder(GraphAppendingTracer):
    """Takes values into the graph like torch.fx, except for dataclasses, which torch.fx would take apart."""

    def proxy(self, node: fx.Node) -> Proxy:
        node.meta[STATEMENT] = present_statement()
        return StrictProxy(node, self)

    def create_arg(self, a: Any) -> Any:
        if dataclasses.is_dataclass(a) and not isinstance(a, type):
            raise NotImplementedError(f"argument of type: {type(a)}")
        if isinstance(a, float) and type(a) is not float:  # numpy's, whose repr names numpy
            a = float(a)
        return super().create_arg(a)

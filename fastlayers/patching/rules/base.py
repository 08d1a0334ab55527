"""What a rule is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx, nn
from torch.fx import Node

from fastlayers.patching.ir.operations import Op
from fastlayers.patching.ir.view import View
from fastlayers.patching.reasons import Refusal

__all__ = ["Deferred", "GraphRule", "Match", "ModuleRule", "always"]


def always(layer: Any) -> bool:
    return True


@dataclass(frozen=True)
class ModuleRule:
    """Replaces modules of exactly the class ``layer`` by ``fused``, which adds no attribute to it."""

    name: str
    doc: str
    layer: type[nn.Module]
    fused: type[nn.Module]
    #: Which modules of that class gain by it.
    gains: Callable[[Any], bool] = always


@dataclass(frozen=True)
class Match:
    """A place to rewrite: the operations that become one, the last of them last, and the call that replaces them."""

    ops: tuple[Op, ...]
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    #: Operands that must be tensors when called, not numbers.
    tensors: tuple[Any, ...] = ()
    #: An intermediate result that is wanted too. The call then returns a pair: the last result, and this one.
    kept: Node | None = None
    #: Nodes that are to use what a call of a pair returns again as the second: its first tensor.
    forked: tuple[Node, ...] = ()
    #: Operations inside a child that is one of ``ops``, of children of its own.
    absorbed: tuple[Op, ...] = ()
    #: A function and the children that it must approve of on every call.
    condition: tuple[Any, ...] | None = None

    @property
    def root(self) -> Node:
        return self.ops[-1].node

    @property
    def all_ops(self) -> tuple[Op, ...]:
        """The operations with those that they are written out in, each after what it uses."""
        return tuple(part for op in self.ops for part in (*op.parts, op))


@dataclass(frozen=True)
class GraphRule:
    """Recognises one fusion in the graph of a forward.

    ``find`` is given the graph and a node, and yields the matches that end in that node, the best first; and, where
    something looks fusable and is not, a :class:`Refusal` that says why.
    """

    name: str
    doc: str
    find: Callable[[View, Node], Iterator[Match | Refusal]]
    #: A function of what a forward is given first: for which calls the rule is. The others run what the other rules
    #: made.
    when: Callable[[Any], bool] | None = None


@dataclass(frozen=True)
class Deferred:
    """An argument that takes a node of its own, made when the match is applied."""

    make: Callable[[fx.Graph], Any]

"""The classes of rules and of their matches."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx, nn
from torch.fx import Node

from fastlayers.patching.ir.operations import Op
from fastlayers.patching.ir.view import View
from fastlayers.patching.reasons import Refusal

__all__ = ["Deferred", "Gains", "GraphRule", "Kind", "Match", "ModuleRule", "always"]


class Gains(enum.Flag):
    """Where alone a rule gains. A forward runs as it was where none of its rules does."""

    EVERYWHERE = 0
    #: No kernel for a CPU serves it.
    ON_GPU = 1
    #: One kernel runs where torch runs one or two, so memory must be the limit. With few elements the host is, and a
    #: call of a fused op takes some 20 us of it, the launch of a kernel 5 us.
    IF_LARGE = 2
    IF_LARGE_ON_GPU = ON_GPU | IF_LARGE
    #: In a backward, and under autocast.
    IN_TRAINING = IF_LARGE_ON_GPU | 4


def always(layer: Any) -> bool:
    return True


@dataclass(frozen=True)
class ModuleRule:
    """Replaces modules of exactly the class ``layer`` by ``fused``, a subclass without further attributes."""

    name: str
    doc: str
    layer: type[nn.Module]
    fused: type[nn.Module]
    #: Whether a module of that class gains from it.
    gains: Callable[[Any], bool] = always
    when: Gains = Gains.EVERYWHERE


@dataclass(frozen=True)
class Match:
    """A place to rewrite: operations, in their order, and the call that replaces them."""

    ops: tuple[Op, ...]
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    #: Operands that must be tensors when called, not numbers.
    tensors: tuple[Any, ...] = ()
    #: An intermediate result that is needed too. The call then returns a pair: the last result, and this one.
    kept: Node | None = None
    #: Users of the first tensor that must use the second result instead: the call returns a pair with that tensor.
    forked: tuple[Node, ...] = ()
    #: Operations of grandchildren, inside of a child that is one of ``ops``.
    absorbed: tuple[Op, ...] = ()
    #: A function, and paths of children: on every call the function must return True for them.
    condition: tuple[Any, ...] | None = None

    @property
    def root(self) -> Node:
        return self.ops[-1].node

    @property
    def all_ops(self) -> tuple[Op, ...]:
        """All operations, decomposed ones as their parts, each after its operands."""
        return tuple(part for op in self.ops for part in (*op.parts, op))


@dataclass(frozen=True)
class Kind:
    """A kind of operation that a rule looks for, by which a report says what a forward lacks."""

    #: What it is called. Several names are alternatives.
    words: tuple[str, ...]
    #: Whether a node of a graph is one.
    fits: Callable[[View, Any], bool]
    #: How much one on its own makes a reader expect a fusion. With 0 it is no reason to: a linear layer is not.
    weight: int = 0


@dataclass(frozen=True)
class GraphRule:
    """Recognises one fusion in the graph of a forward.

    ``find`` takes the graph and a node, and yields the matches that end in that node, the best first. Where something
    looks fusable and is not, it yields a :class:`Refusal` with the reason.
    """

    name: str
    doc: str
    find: Callable[[View, Node], Iterator[Match | Refusal]]
    #: Two kinds of operations that every match has, the first as an operand of the second. Where nothing is fused, a
    #: report names what is missing beside one of them.
    pair: tuple[Kind, Kind] | None = None
    when: Gains = Gains.EVERYWHERE


@dataclass(frozen=True)
class Deferred:
    """An argument that needs a node of its own, which is created when the match is applied."""

    make: Callable[[fx.Graph], Any]

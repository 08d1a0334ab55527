"""What patching looks for. A rule is one small object; to add one, write it here and put it in its list.

A :class:`ModuleRule` replaces one torch layer by one fused layer. A :class:`GraphRule` looks at one node of the graph
of a forward and proposes matches, the largest first. It only has to recognise the structure: that a match is *safe*
(nothing else needs the intermediate results, no in-place operation is seen by anything else, no operand changes in
between, no hook of an absorbed child would be skipped) is checked for every rule alike in
:mod:`fastlayers.patching.rewrite`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx, nn
from torch.fx import Node

from fastlayers import functional
from fastlayers.modules import DROP_IN
from fastlayers.patching import calls
from fastlayers.patching.graph import Op, View
from fastlayers.patching.reasons import Reason, Refusal

__all__ = ["GRAPH_RULES", "MODULE_RULES", "GraphRule", "Match", "ModuleRule"]

MINUS_INFINITY = float("-inf")


@dataclass(frozen=True)
class ModuleRule:
    """Replaces modules of exactly the class ``layer`` by ``fused``, which adds no attribute to it."""

    name: str
    doc: str
    layer: type[nn.Module]
    fused: type[nn.Module]


@dataclass(frozen=True)
class Match:
    """A place to rewrite: the operations that become one, the last of them last, and the call that replaces them."""

    ops: tuple[Op, ...]
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    #: Operands that must be tensors when called, not numbers.
    tensors: tuple[Any, ...] = ()

    @property
    def root(self) -> Node:
        return self.ops[-1].node


@dataclass(frozen=True)
class GraphRule:
    """Recognises one fusion in the graph of a forward.

    ``find`` is given the graph and a node, and yields the matches that end in that node, the best first; and, where
    something looks fusable and is not, a :class:`Refusal` that says why.
    """

    name: str
    doc: str
    find: Callable[[View, Node], Iterator[Match | Refusal]]


# -- relu and addition --------------------------------------------------------------------------------------------


def addition(view: View, node: Any) -> Op | Refusal | None:
    """The node as x + y of two tensors."""
    op = view.op(node, "add")
    if op is None or not (view.is_tensor(op["input"]) and view.is_tensor(op["other"])):
        return None
    if op["alpha"] not in (None, 1):
        return Refusal(Reason.ALPHA, f"{node}: alpha={op['alpha']}")
    return op


def find_add_relu(view: View, node: Node) -> Iterator[Match | Refusal]:
    relu = view.op(node, "relu")
    add = addition(view, relu["input"]) if relu is not None else None
    if isinstance(add, Refusal):
        yield add
    elif relu is not None and add is not None:
        x, y = add["input"], add["other"]
        yield Match((add, relu), calls.add_relu_ if add.inplace else functional.add_relu, (x, y), {}, (x, y))


def find_relu_add(view: View, node: Node) -> Iterator[Match | Refusal]:
    add = addition(view, node)
    if isinstance(add, Refusal):
        if view.op(add_operand(view, node, "input"), "relu") or view.op(add_operand(view, node, "other"), "relu"):
            yield add
        return
    if add is None:
        return
    x, y = add["input"], add["other"]
    for branch, rest in ((x, y), (y, x)):
        relu = view.op(branch, "relu")
        if relu is None or branch is rest:
            continue
        if not add.inplace:
            yield Match((relu, add), functional.relu_add, (relu["input"], rest), {}, (relu["input"], rest))
        elif branch is x:
            yield Match((relu, add), calls.relu_add_, (relu["input"], rest), {}, (relu["input"], rest))
        else:
            yield Match((relu, add), calls.add_relu_to_, (rest, relu["input"]), {}, (relu["input"], rest))


def add_operand(view: View, node: Node, name: str) -> Any:
    op = view.op(node, "add")
    return op[name] if op is not None else None


def find_relu_add_bias(view: View, node: Node) -> Iterator[Match | Refusal]:
    outer = view.op(node, "add")
    if outer is None or outer.inplace or outer["alpha"] not in (None, 1):
        return
    for inner, bias in ((outer["input"], outer["other"]), (outer["other"], outer["input"])):
        # Adding 0 changes nothing but the dtype of integers: not a bias.
        if inner is bias or not (view.is_tensor(bias) or (view.is_number(bias) and bias != 0)):
            continue
        tensors = (bias,) if view.is_tensor(bias) else ()
        for match in find_relu_add(view, inner) if isinstance(inner, Node) else ():
            if isinstance(match, Match) and match.target is functional.relu_add:
                yield Match(
                    (*match.ops, outer), functional.relu_add, (*match.args, bias), {}, (*match.tensors, *tensors)
                )


# -- softmax ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Masking:
    """The step that masks the scores: the operation, what it masks, and the helper that replaces it."""

    op: Op
    scores: Node
    target: Callable[..., Any]
    mask: Any
    options: dict[str, Any]


def masking(view: View, node: Any) -> Masking | Refusal | None:
    op = view.op(node)
    if op is None:
        return None
    if op.name == "add":
        return added_mask(view, node)
    if op.name == "masked_fill" and view.is_tensor(op["input"]) and view.is_tensor(op["mask"]):
        if op["value"] != MINUS_INFINITY:
            return Refusal(Reason.FINITE_FILL, f"{node} fills with {op['value']}")
        return boolean_mask(view, op, op["input"], op["mask"], fill=True)
    if op.name == "where" and view.is_tensor(op["condition"]):
        for kept, filled, fill in ((op["input"], op["other"], False), (op["other"], op["input"], True)):
            if view.is_tensor(kept) and isinstance(filled, int | float):
                if filled != MINUS_INFINITY:
                    return Refusal(Reason.FINITE_FILL, f"{node} fills with {filled}")
                return boolean_mask(view, op, kept, op["condition"], fill=fill)
    return None


def added_mask(view: View, node: Node) -> Masking | Refusal | None:
    op = addition(view, node)
    if not isinstance(op, Op):
        return op
    scores, mask = op["input"], op["other"]
    if not op.inplace and scaling(view, scores) is None and isinstance(scaling(view, mask), tuple):
        scores, mask = mask, scores
    return Masking(op, scores, calls.softmax_added, mask, {"inplace": op.inplace})


def boolean_mask(view: View, op: Op, scores: Node, mask: Any, *, fill: bool) -> Masking:
    negated = view.op(mask, "not")
    if negated is not None and fill and op.name == "masked_fill":
        mask, fill = negated["input"], False
    options = {"fill": fill, "where": op.name == "where", "inplace": op.inplace}
    return Masking(op, scores, calls.softmax_masked, mask, options)


def scaling(view: View, node: Any) -> tuple[Op, Node, Callable[[fx.Graph], Any]] | Refusal | None:
    """The node as scores times a number: the operation, the scores, and what makes the factor."""
    op = view.op(node)
    if op is None or op.name not in ("mul", "div"):
        return None
    x, other = op["input"], op["other"]
    if op.name == "mul" and view.is_number(x) and not op.inplace:
        x, other = other, x
    if not view.is_tensor(x):
        return None
    if not view.is_number(other):
        learned = isinstance(other, Node) and other.op in ("get_attr", "placeholder")
        return Refusal(Reason.TENSOR_SCALE, f"{node} by {other}") if learned else None
    if op.name == "mul":
        return op, x, lambda graph: other
    if isinstance(other, Node):
        return op, x, lambda graph: graph.call_function(operator.truediv, (1.0, other))
    return (op, x, lambda graph: 1.0 / other) if other != 0 else None


@dataclass(frozen=True)
class Deferred:
    """An argument that takes a node of its own, made when the match is applied."""

    make: Callable[[fx.Graph], Any]


def find_softmax(view: View, node: Node) -> Iterator[Match | Refusal]:
    op = view.op(node, "softmax") or view.op(node, "log_softmax")
    if op is None or not view.is_tensor(op["input"]):
        return
    if not isinstance(op["dim"], int):
        if op["dim"] is None:
            yield Refusal(Reason.IMPLICIT_DIM, str(node))
        return
    masked = masking(view, op["input"])
    if isinstance(masked, Refusal):
        yield masked
    if isinstance(masked, Masking):
        scaled = scaling(view, masked.scores)
        if isinstance(scaled, tuple):
            yield softmax_match(view, op, masked, scaled)
        yield softmax_match(view, op, masked, None)
    scaled = scaling(view, op["input"])
    if isinstance(scaled, Refusal):
        yield scaled
    if isinstance(scaled, tuple):
        yield softmax_match(view, op, None, scaled)
    if op.child is None:  # alone, a Softmax layer is for the module rules
        yield softmax_match(view, op, None, None)


def softmax_match(
    view: View, op: Op, masked: Masking | None, scaled: tuple[Op, Node, Callable[[fx.Graph], Any]] | None
) -> Match:
    ops: tuple[Op, ...] = (op,)
    x, scale, dtype, log = op["input"], None, op["dtype"], op.name == "log_softmax"
    if masked is not None:
        ops, x = (masked.op, *ops), masked.scores
    if scaled is not None:
        ops, x, scale = (scaled[0], *ops), scaled[1], Deferred(scaled[2])
    if masked is not None:
        options = {**masked.options, "log": log}
        return Match(ops, masked.target, (x, masked.mask, op["dim"], scale, dtype), options, (x, masked.mask))
    options = {name: value for name, value in (("scale", scale), ("dtype", dtype)) if value is not None}
    return Match(ops, functional.log_softmax if log else functional.softmax, (x, op["dim"]), options, (x,))


MODULE_RULES: tuple[ModuleRule, ...] = tuple(
    ModuleRule(layer.__name__, f"{layer.__name__} -> {fused.__name__}", layer, fused)
    for layer, fused in DROP_IN.items()
)

#: Tried in this order, each over the whole graph, so the larger fusions come first.
GRAPH_RULES: tuple[GraphRule, ...] = (
    GraphRule("relu_add_bias", "relu(x) + y + bias", find_relu_add_bias),
    GraphRule("add_relu", "relu(x + y)", find_add_relu),
    GraphRule("relu_add", "relu(x) + y", find_relu_add),
    GraphRule("softmax", "softmax or log_softmax of x, x * scale, x + mask, masked x and both", find_softmax),
)

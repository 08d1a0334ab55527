"""softmax and log_softmax with the scaling and the masking before them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.fx import Node

from fastlayers import functional
from fastlayers.patching.ir.operations import Op
from fastlayers.patching.ir.view import View
from fastlayers.patching.reasons import Reason, Refusal
from fastlayers.patching.rules.base import Deferred, GraphRule, Match
from fastlayers.patching.rules.matchers import addition
from fastlayers.patching.runtime import calls

__all__ = ["SOFTMAX"]

MINUS_INFINITY = float("-inf")


@dataclass(frozen=True)
class Masking:
    """A step that masks the scores: the operation, the scores, and the function that replaces it."""

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
    """The node as scores times a number: the operation, the scores, and a function that creates the factor."""
    op = view.op(node)
    if op is None or op.name not in ("mul", "div"):
        return None
    x, other = op["input"], op["other"]
    computed = isinstance(other, Node) and other.op not in ("get_attr", "placeholder") and not view.is_number(other)
    if op.name == "mul" and not op.inplace and (view.is_number(x) or (computed and maybe_number(x))):
        x, other = other, x
    if not view.is_tensor(x):
        return None
    if op.name == "mul" and maybe_number(other):
        return op, x, lambda graph: other
    if not view.is_number(other):
        learned = isinstance(other, Node) and other.op in ("get_attr", "placeholder")
        return Refusal(Reason.TENSOR_SCALE, f"{node} by {other}") if learned else None
    if op.name == "mul":
        return op, x, lambda graph: other
    if isinstance(other, Node):
        return op, x, lambda graph: graph.call_function(operator.truediv, (1.0, other))
    return (op, x, lambda graph: 1.0 / other) if other != 0 else None


def maybe_number(value: Any) -> bool:
    """Whether a value may be a number, which only a call can tell, such as the scale argument of an attention."""
    return isinstance(value, Node) and value.op == "placeholder" and "example_value" not in value.meta


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
    if op.child is None:  # The module rules replace a Softmax layer on its own.
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
    if scaled is not None and any(maybe_number(value) for value in (scaled[0]["input"], scaled[0]["other"])):
        return Match(ops, calls.softmax_scaled, (x, op["dim"], scale, dtype), {"log": log}, (x,))
    options = {name: value for name, value in (("scale", scale), ("dtype", dtype)) if value is not None}
    return Match(ops, functional.log_softmax if log else functional.softmax, (x, op["dim"]), options, (x,))


SOFTMAX = GraphRule("softmax", "softmax or log_softmax of x, x * scale, x + mask, masked x and both", find_softmax)

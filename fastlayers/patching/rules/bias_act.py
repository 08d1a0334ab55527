"""A linear layer and the activation of it: the bias goes to the activation's kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.fx import Node

from fastlayers.patching import calls
from fastlayers.patching.graph import Attribute, Op, View, original_class
from fastlayers.patching.reasons import Reason, Refusal
from fastlayers.patching.rules.base import GraphRule, Match
from fastlayers.patching.rules.norm import activation, behind

__all__ = ["LINEAR_ACT", "linear"]


def linear(view: View, node: Any) -> Op | None:
    """A node as a call of a child that is torch's own linear layer."""
    if not isinstance(node, Node) or node.op != "call_module" or len(node.args) != 1 or node.kwargs:
        return None
    layer = view.child(node)
    if original_class(layer) is not nn.Linear or "forward" in layer.__dict__:
        return None
    return Op("linear", node, {"input": node.args[0]}, child=str(node.target))


def find_linear_act(view: View, node: Node) -> Iterator[Match | Refusal]:
    found = activation(view, node)
    if found is None:
        return
    before, passed = behind(view, found[0]["input"])
    op = linear(view, before)
    layer: Any = view.child(before) if op is not None else None
    if op is None or layer.bias is None:
        return
    if layer.bias.dtype != layer.weight.dtype:
        yield Refusal(Reason.BIAS_DTYPE, str(op.child))
        return
    x = op["input"]
    yield Match((op, *passed, found[0]), calls.linear_act, (Attribute(str(op.child)), x, found[1]), {}, (x,))


LINEAR_ACT = GraphRule("linear_act", "act(linear(x)), the bias added by the activation's kernel", find_linear_act)

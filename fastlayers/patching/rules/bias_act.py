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

__all__ = ["LINEAR_ACT"]


def find_linear_act(view: View, node: Node) -> Iterator[Match | Refusal]:
    found = activation(view, node)
    if found is None:
        return
    before, passed = behind(view, found[0]["input"])
    if not isinstance(before, Node) or before.op != "call_module" or len(before.args) != 1 or before.kwargs:
        return
    layer: Any = view.child(before)
    if original_class(layer) is not nn.Linear or "forward" in layer.__dict__ or layer.bias is None:
        return
    if layer.bias.dtype != layer.weight.dtype:
        yield Refusal(Reason.BIAS_DTYPE, str(before.target))
        return
    path, x = str(before.target), before.args[0]
    linear = Op("linear", before, {"input": x}, child=path)
    yield Match((linear, *passed, found[0]), calls.linear_act, (Attribute(path), x, found[1]), {}, (x,))


LINEAR_ACT = GraphRule("linear_act", "act(linear(x)), the bias added by the activation's kernel", find_linear_act)

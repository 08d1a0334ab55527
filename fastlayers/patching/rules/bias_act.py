"""A linear layer and the activation of it, whose kernel adds the bias; and the linear layer after these."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from fastlayers.patching import calls
from fastlayers.patching.graph import Attribute, Op, View
from fastlayers.patching.reasons import Reason, Refusal
from fastlayers.patching.rules.base import GraphRule, Match
from fastlayers.patching.rules.norm import activation, behind
from fastlayers.patching.rules.residual import dropout

__all__ = ["LINEAR_ACT", "MLP", "parameters"]


def parameters(view: View, linear: Op) -> tuple[tuple[Any, Any], tuple[torch.Tensor | None, torch.Tensor | None]]:
    """The weight and the bias of a linear layer: as operands, and as the tensors that they are now, where known."""
    if linear.child is not None:
        layer: Any = view.root.get_submodule(linear.child)
        return (Attribute(f"{linear.child}.weight"), Attribute(f"{linear.child}.bias")), (layer.weight, layer.bias)
    weight, bias = linear["weight"], linear["bias"]
    return (weight, bias), (view.example(weight), view.example(bias))


def find_linear_act(view: View, node: Node) -> Iterator[Match | Refusal]:
    found = activation(view, node, written=True)
    if found is None:
        return
    before, passed = behind(view, found[0]["input"])
    linear = view.op(before, "linear")
    if linear is None or linear.recording is not None:
        return
    operands, (weight, bias) = parameters(view, linear)
    if weight is None or bias is None:
        return
    if bias.dtype != weight.dtype:
        yield Refusal(Reason.BIAS_DTYPE, linear.child or str(before))
        return
    x = linear["input"]
    yield Match((linear, *passed, found[0]), calls.linear_act, (x, *operands, found[1]), {}, (x,))


def find_mlp(view: View, node: Node) -> Iterator[Match | Refusal]:
    linear = view.op(node, "linear")
    if linear is None or linear.recording is not None:
        return
    before, passed = behind(view, linear["input"])
    drop = view.op(before, "dropout")
    dropped: tuple[Any, ...] = ()
    if drop is not None and not drop.inplace:
        dropped = dropout(drop)
        before, earlier = behind(view, drop["input"])
        passed = (*earlier, drop, *passed)
    for match in find_linear_act(view, before) if isinstance(before, Node) else ():
        if isinstance(match, Match):
            ops, args = (*match.ops, *passed, linear), (*match.args, *parameters(view, linear)[0], *dropped)
            yield Match(ops, calls.mlp, args, {}, match.tensors)


MLP = GraphRule("mlp", "linear(dropout(act(linear(x)))), under autocast one node of autograd", find_mlp)
LINEAR_ACT = GraphRule("linear_act", "act(linear(x)), the bias added by the activation's kernel", find_linear_act)

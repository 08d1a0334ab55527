"""Convolutions of a tensor that is used again: the gradients of both uses, added where one of them is computed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.fx import Node

from fastlayers import functional
from fastlayers.patching import calls
from fastlayers.patching.graph import Attribute, Op, View, is_fresh, is_plain_layer, is_sequential, original_class
from fastlayers.patching.reasons import Refusal
from fastlayers.patching.rules.base import GraphRule, Match
from fastlayers.patching.rules.norm import joins, may_be_written

__all__ = ["FORKED_CONVOLUTION"]


def find_forked_convolution(view: View, node: Node) -> Iterator[Match | Refusal]:
    if node.op != "call_module" or len(node.args) != 1 or node.kwargs or not isinstance(node.args[0], Node):
        return
    x, path = node.args[0], str(node.target)
    if not calls.is_pointwise(view.child(node)):
        return
    later = tuple(user for user in x.users if view.position[user] > view.position[node])
    if later and all(only_reads(view, x, user) for user in later) and not may_be_written(view, x, node, later):
        convolution = Op("convolution", node, {"input": x}, child=path)
        args = (Attribute(path), x)
        condition = (calls.is_pointwise, path)
        yield Match((convolution,), calls.forked_convolution, args, {}, (x,), forked=later, condition=condition)


def only_reads(view: View, x: Node, user: Node) -> bool:
    """Whether a node makes a tensor of its own from x: autograd lets nobody write to what the fork hands on."""
    if user.op == "call_module":
        child: Any = view.child(user)
        while is_sequential(child) and child._modules and is_plain_layer(child):
            child = next(iter(child._modules.values()))
        return is_plain_layer(child) and is_fresh(original_class(child))
    if user.target in (calls.batch_norm_layer, calls.batch_norm):
        return user.kwargs.get("written") != "residual"
    return user.target in (functional.batch_norm, functional.add_relu) or joins(view, x, user)


FORKED_CONVOLUTION = GraphRule(
    "forked_convolution", "conv1x1(x) and x, whose gradients one kernel adds", find_forked_convolution
)

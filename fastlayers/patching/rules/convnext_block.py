"""A ConvNeXt block, as fused by the other rules, in one node of autograd."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from torch.fx import Node

from fastlayers.patching.ir.operations import Attribute, Op
from fastlayers.patching.ir.view import View
from fastlayers.patching.reasons import Refusal
from fastlayers.patching.rules.base import GraphRule, Match
from fastlayers.patching.rules.matchers import called_with, mlp_child, skip_identities
from fastlayers.patching.runtime import calls
from fastlayers.patching.runtime.convnext_block import convnext_block, drop_nothing
from fastlayers.patching.runtime.convolution import forked_convolution

__all__ = ["CONVNEXT_BLOCK"]


def find_convnext_block(view: View, node: Node) -> Iterator[Match | Refusal]:
    if (
        node.target is not calls.scale_add
        or node.kwargs != {"overwritten": None, "scaled": False}
        or len(node.args) != 3
    ):
        return
    moved, scale, again = node.args
    mlp = called_with(moved, "permute", 0, 3, 1, 2)
    gamma = called_with(scale, "reshape", 1, -1, 1, 1)
    again, passed = skip_identities(view, again)
    fork = called_with(again, operator.getitem, 1)
    if mlp is None or gamma is None or fork is None or fork.target is not forked_convolution or gamma.op != "get_attr":
        return
    norm = mlp.args[0] if mlp.op == "call_module" and len(mlp.args) == 1 and not mlp.kwargs else None
    if not isinstance(norm, Node) or norm.target is not calls.layer_norm or len(norm.args) != 1:
        return
    pixels = called_with(norm.args[0], "permute", 0, 2, 3, 1)
    first = called_with(pixels, operator.getitem, 0)
    found = mlp_child(view, mlp)
    if first is not fork or found is None:
        return
    layer, x = fork.args
    closed, absorbed, parameters = found
    path = str(getattr(layer, "target", None))
    between: tuple[Any, ...] = (again, pixels, norm.args[0], norm, moved, scale)
    steps = [Op("step", n, {"input": n.args[0]}) for n in between]
    ops = (Op("convolution", fork, {"input": x}, child=path), *steps[:4], closed, *steps[4:], *passed)
    options = dict(norm.kwargs)
    weight, bias = options.pop("weight"), options.pop("bias")
    args = (Attribute(path), x, Attribute(str(closed.child)), gamma, weight, bias, *parameters)
    drops = [str(op.child) for op in absorbed if op.name == "dropout"]
    root = Op("scale_add", node, {"input": moved})
    condition = (drop_nothing, *drops) if drops else None
    yield Match((*ops, root), convnext_block, args, options, (x,), absorbed=absorbed, condition=condition)


CONVNEXT_BLOCK = GraphRule(
    "convnext_block", "x + gamma·mlp(layer_norm(conv(x))), under autocast one node of autograd", find_convnext_block
)

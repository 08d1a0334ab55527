"""Whole blocks of networks: what the other rules made of one, as one node of autograd."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.fx import Node

from fastlayers.patching import calls
from fastlayers.patching.convolutions import convnext_block, drop_nothing, forked_convolution
from fastlayers.patching.graph import Attribute, Op, View, original_class
from fastlayers.patching.reasons import Refusal
from fastlayers.patching.rules.base import GraphRule, Match
from fastlayers.patching.rules.bias_act import find_mlp
from fastlayers.patching.rules.norm import behind
from fastlayers.patching.trace import record_child

__all__ = ["CONVNEXT_BLOCK"]


def step(node: Any, target: Any, *rest: Any) -> Node | None:
    """What a node is a call of this with, besides these arguments; None where it is another one."""
    if not isinstance(node, Node) or node.target != target or node.args[1:] != rest or node.kwargs:
        return None
    return node.args[0] if isinstance(node.args[0], Node) else None


def find_convnext_block(view: View, node: Node) -> Iterator[Match | Refusal]:
    if node.target is not calls.scale_add or node.kwargs != {"written": None, "scaled": False} or len(node.args) != 3:
        return
    moved, scale, again = node.args
    mlp = step(moved, "permute", 0, 3, 1, 2)
    gamma = step(scale, "reshape", 1, -1, 1, 1)
    again, passed = behind(view, again)
    fork = step(again, operator.getitem, 1)
    if mlp is None or gamma is None or fork is None or fork.target is not forked_convolution or gamma.op != "get_attr":
        return
    norm = mlp.args[0] if mlp.op == "call_module" and len(mlp.args) == 1 and not mlp.kwargs else None
    if not isinstance(norm, Node) or norm.target is not calls.layer_norm or len(norm.args) != 1:
        return
    pixels = step(norm.args[0], "permute", 0, 2, 3, 1)
    first = step(pixels, operator.getitem, 0)
    found = inside(view, mlp)
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


def inside(view: View, node: Node) -> tuple[Op, tuple[Op, ...], tuple[Any, ...]] | None:
    """A child that is an MLP and nothing else: the call of it, the operations in it, its parameters and activation."""
    child: Any = view.child(node)
    recording = record_child(view.root, child, 1)
    if recording is None:
        return None
    argument, *nodes, output = recording.graph.nodes
    inner, result = View(recording.graph, view.root), output.args[0]
    after: list[Op] = []
    while (op := inner.op(result, "identity") or inner.op(result, "dropout")) is not None:
        after.append(op)
        result = op["input"]
    for match in find_mlp(inner, result) if isinstance(result, Node) else ():
        if isinstance(match, Refusal) or match.args[0] is not argument:
            continue
        ops = (*match.ops, *after)
        known = {op.node for op in ops}
        drops = [view.root.get_submodule(str(op.child)) for op in ops if op.name == "dropout"]
        if all(n in known or n.op == "get_attr" for n in nodes) and all(
            original_class(drop) is nn.Dropout and drop.p == 0.0 for drop in drops
        ):
            call = Op("mlp", node, {"input": node.args[0]}, child=str(node.target), recording=recording)
            return call, ops, match.args[1:6]
    return None


CONVNEXT_BLOCK = GraphRule(
    "convnext_block", "x + gamma·mlp(layer_norm(conv(x))), under autocast one node of autograd", find_convnext_block
)

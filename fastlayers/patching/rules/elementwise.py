"""relu and addition, the joints between the branches of a network; and the products of its gates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from fastlayers import functional
from fastlayers.patching import calls
from fastlayers.patching.graph import Op, View
from fastlayers.patching.reasons import Reason, Refusal
from fastlayers.patching.rules.base import GraphRule, Match

__all__ = ["ADD_RELU", "EXCITE", "RELU_ADD", "RELU_ADD_BIAS", "addition"]

#: What squeezes a gate between 0 and 1: functions, methods, and layers by their names, for libraries have their own. Only
#: where a product is worth a kernel hangs on it: a product is rewritten as the product that it is.
SQUEEZING = frozenset({torch.sigmoid, F.sigmoid, F.hardsigmoid, "sigmoid"})
SQUEEZING_LAYERS = frozenset({"sigmoid", "hardsigmoid"})


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


def is_gate(view: View, node: Any) -> bool:
    if not isinstance(node, Node):
        return False
    if node.op == "call_module":
        return type(view.child(node)).__name__.lower() in SQUEEZING_LAYERS
    return node.target in SQUEEZING


def find_excite(view: View, node: Node) -> Iterator[Match | Refusal]:
    mul = view.op(node, "mul")
    if mul is None or mul.inplace:
        return
    x, y = mul["input"], mul["other"]
    if view.is_tensor(x) and view.is_tensor(y) and (is_gate(view, x) or is_gate(view, y)):
        yield Match((mul,), functional.mul, (x, y), {}, (x, y))


RELU_ADD_BIAS = GraphRule("relu_add_bias", "relu(x) + y + bias", find_relu_add_bias)
ADD_RELU = GraphRule("add_relu", "relu(x + y)", find_add_relu)
RELU_ADD = GraphRule("relu_add", "relu(x) + y", find_relu_add)
EXCITE = GraphRule("mul", "x * sigmoid(gate), the gate broadcast over space (squeeze-and-excite)", find_excite)

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

__all__ = ["ADD_RELU", "EXCITE", "RELU_ADD", "RELU_ADD_BIAS", "SQUEEZE", "SQUEEZE_EXCITE", "addition"]

#: What squeezes a gate between 0 and 1: functions, methods, and layers by name, for libraries have their own. Only
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


#: The dimensions of space, of an image (N, C, H, W).
SPACE = frozenset({(2, 3), (3, 2), (-2, -1), (-1, -2)})


def mean_over_space(view: View, node: Any) -> Op | None:
    """A node as the mean of an image over space, with those dimensions kept."""
    op = view.op(node, "mean") or view.op(node, "adaptive_avg_pool2d")
    if op is None or not view.is_tensor(op["input"]):
        return None
    if op.name == "adaptive_avg_pool2d":
        return op if op["output_size"] in (1, (1, 1), [1, 1]) else None
    dims = op["dim"]
    known = isinstance(dims, tuple | list) and all(type(dim) is int for dim in dims) and tuple(dims) in SPACE
    return op if known and op["keepdim"] is True and op["dtype"] is None else None


def find_squeeze_excite(view: View, node: Node) -> Iterator[Match | Refusal]:
    for match in find_excite(view, node):
        assert isinstance(match, Match)
        for x, gate in (match.args, match.args[::-1]):
            for user in x.users if is_gate(view, gate) else ():
                if view.position[user] < view.position[node] and mean_over_space(view, user) is not None:
                    yield Match(match.ops, calls.excite, (x, gate, user), {}, (x, gate))


def find_squeeze(view: View, node: Node) -> Iterator[Match | Refusal]:
    """Of those whose image is excited later: :data:`SQUEEZE_EXCITE` came before."""
    op = mean_over_space(view, node)
    if op is not None and any(user.target is calls.excite and user.args[2] is node for user in node.users):
        x = op["input"]
        if op.name == "mean":
            yield Match((op,), calls.squeeze, (x, op["dim"]), {}, (x,))
        else:
            yield Match((op,), calls.squeeze_by_pooling, (x,), {}, (x,))


RELU_ADD_BIAS = GraphRule("relu_add_bias", "relu(x) + y + bias", find_relu_add_bias)
ADD_RELU = GraphRule("add_relu", "relu(x + y)", find_add_relu)
RELU_ADD = GraphRule("relu_add", "relu(x) + y", find_relu_add)
EXCITE = GraphRule("mul", "x * sigmoid(gate), the gate broadcast over space (squeeze-and-excite)", find_excite)
SQUEEZE_EXCITE = GraphRule(
    "squeeze_excite", "x * sigmoid(gate), where the mean of x over space is used too", find_squeeze_excite
)
SQUEEZE = GraphRule("squeeze", "that mean", find_squeeze)

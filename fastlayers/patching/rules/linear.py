"""Linear layers that are spelled as functions, and the splitting of their results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.fx import Node

from fastlayers import functional
from fastlayers.modules.linear import FusedLinear
from fastlayers.ops.linear import ODD_FEATURES, WORD
from fastlayers.patching.ir.view import View
from fastlayers.patching.reasons import Refusal
from fastlayers.patching.rules.base import Gains, GraphRule, Match, ModuleRule
from fastlayers.patching.runtime import calls

__all__ = ["LINEAR", "ODD_LINEAR", "SPLIT"]


def is_odd(layer: nn.Linear) -> bool:
    """Whether a layer has as many features as a vocabulary, and no whole number of words in a row."""
    return layer.out_features >= ODD_FEATURES and layer.out_features % WORD != 0 and layer.in_features % WORD == 0


def find_linear(view: View, node: Node) -> Iterator[Match | Refusal]:
    linear = view.op(node, "linear")
    if linear is not None and linear.child is None and view.is_parameter(linear["bias"]):
        x = linear["input"]  # The module rules replace layers.
        yield Match((linear,), functional.linear, (x, linear["weight"], linear["bias"]), {}, (x,))
    addmm = view.op(node, "addmm")
    if addmm is not None and view.is_parameter(addmm["input"]):
        bias, x, weight = addmm["input"], addmm["mat1"], addmm["mat2"]
        yield Match((addmm,), calls.addmm, (bias, x, weight), {}, (x,))


#: Methods that rearrange a tensor, mostly without a copy.
ARRANGING = frozenset({"view", "reshape", "permute", "transpose", "flatten", "unflatten"})


def is_product(view: View, node: Any) -> bool:
    """Whether a node is the result of a layer or a linear layer, rearranged or not."""
    while isinstance(node, Node) and node.op == "call_method" and node.target in ARRANGING:
        node = node.args[0]
    if not isinstance(node, Node):
        return False
    if node.op == "call_module" or node.target in (functional.linear, calls.addmm):
        return True
    return view.op(node, "linear") is not None


def find_split(view: View, node: Node) -> Iterator[Match | Refusal]:
    op = view.op(node)
    if op is None or op.name not in ("unbind", "chunk", "split") or not is_product(view, op["input"]):
        return
    given = {name: value for name, value in op.operands.items() if name != "input"}
    yield Match((op,), getattr(calls, op.name), (op["input"],), given, (op["input"],))


ODD_LINEAR = ModuleRule(
    "odd_linear",
    "Linear -> FusedLinear, whose product is faster for a vocabulary like 50257",
    nn.Linear,
    FusedLinear,
    is_odd,
    Gains.ON_GPU,
)
LINEAR = GraphRule("linear", "linear with a bias, whose gradient a kernel sums", find_linear, when=Gains.IN_TRAINING)
SPLIT = GraphRule("split", "parts of a product, with one gradient", find_split, when=Gains.IN_TRAINING)

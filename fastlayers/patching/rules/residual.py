"""Residual sums, with the dropout, layer scale and stochastic depth before them."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import fx
from torch.fx import Node

from fastlayers import functional
from fastlayers.patching.capture.trace import record_child
from fastlayers.patching.ir.decompositions import permutation
from fastlayers.patching.ir.operations import Attribute, Op
from fastlayers.patching.ir.view import View
from fastlayers.patching.reasons import Reason, Refusal
from fastlayers.patching.rules.base import Deferred, Gains, GraphRule, Kind, Match
from fastlayers.patching.rules.matchers import SUM, addition, dropout, ending_norm, is_parameter, skip_identities
from fastlayers.patching.runtime import calls

__all__ = ["DROPOUT_ADD", "SCALE_ADD"]


def sides(add: Op) -> Iterator[tuple[Any, Any, str]]:
    """The two ways to read a sum: the branch x, the residual, and which of them is first (overwritten in place)."""
    if add["input"] is not add["other"]:
        yield add["other"], add["input"], "residual"
        yield add["input"], add["other"], "x"


def is_zero(view: View, p: Any) -> bool:
    """Whether a probability is 0 now: then torch calls nothing either, and only the sum is left."""
    if isinstance(p, Attribute) or (isinstance(p, Node) and p.op == "get_attr"):
        p = operator.attrgetter(p.path if isinstance(p, Attribute) else str(p.target))(view.root)
    return isinstance(p, int | float) and p == 0


def find_dropout_add(view: View, node: Node) -> Iterator[Match | Refusal]:
    plain = view.op(node, "add")
    for branch, residual, overwritten in sides(plain) if plain is not None else ():
        before, passed = skip_identities(view, branch)
        drop = ending_norm(view, before, "dropout")
        add = addition(view, node) if drop is not None else None
        if isinstance(add, Refusal):
            yield add
        if drop is None or not isinstance(add, Op):
            continue
        x, p = drop["input"], dropout(drop)[0]
        if is_zero(view, p):
            yield Refusal(Reason.SAVES_NOTHING, "the dropout before the sum has p = 0")
            continue
        ops, args = (drop, *passed, add), (x, residual, *dropout(drop))
        if add.inplace or overwritten == "x":
            options = {"overwritten": overwritten if add.inplace else None}
            yield Match(ops, calls.dropout_add, args, options, (x, residual))
        else:
            yield Match(ops, functional.dropout_add, args, {}, (x, residual))


# -- x + drop_path(gamma * f(x)) ---------------------------------------------------------------------------------------


def scaled(view: View, node: Any) -> tuple[Op, Any] | None:
    """A node as x * gamma for a parameter gamma, and gamma."""
    op = view.op(node, "mul") or viewed_scale(view, node)
    if op is None:
        return None
    if is_parameter(view, op["other"]) or isinstance(op["other"], Deferred):
        return op, op["other"]
    if is_parameter(view, op["input"]) and not op.inplace:
        return replace(op, operands={"input": op["other"], "other": op["input"]}), op["input"]
    return None


def viewed_scale(view: View, node: Any) -> Op | None:
    """A child that multiplies its argument by a view of its parameter, such as timm's LayerScale2d."""
    if not isinstance(node, Node) or node.op != "call_module" or len(node.args) != 1 or node.kwargs:
        return None
    child = view.child(node)
    recording = record_child(view.root, child, 1) if not child._modules and child._parameters else None
    if recording is None:
        return None
    argument, *nodes, output = recording.graph.nodes
    op = View(recording.graph, view.root).op(output.args[0], "mul")
    shaped: Any = op["other"] if op is not None else None
    if op is None or op["input"] is not argument or not is_parameter(view, shaped) or shaped.op != "call_method":
        return None
    gamma, *shape = shaped.args
    if set(nodes) != {op.node, shaped, gamma} or gamma.op != "get_attr" or shaped.kwargs:
        return None

    def make(graph: fx.Graph) -> Any:
        return graph.call_method(shaped.target, (graph.get_attr(gamma.target), *shape))

    return Op("mul", node, {"input": node.args[0], "other": Deferred(make)}, op.inplace, str(node.target), recording)


def dropped(op: Op) -> tuple[Any, Any] | None:
    """The probability of a drop_path, and whether it is in training; None if it does not drop whole samples."""
    if "p" in op.operands:
        return (op["p"], op.operands.get("training", True)) if op["mode"] == "row" else None
    if op.operands.get("scale_by_keep", True) is not True:
        return None
    return op.operands.get("drop_prob", 0.0), op.operands.get("training", False)


def find_scale_add(view: View, node: Node) -> Iterator[Match | Refusal]:
    plain = view.op(node, "add")
    if plain is None:
        return
    for branch, residual, overwritten in sides(plain):
        before, passed = skip_identities(view, branch)
        drop = view.op(before, "drop_path")
        how = dropped(drop) if drop is not None else None
        ops = passed
        if drop is not None and how is not None:
            before, inner = skip_identities(view, drop["input"])
            ops = (*inner, drop, *passed)
        scale, dims = scaled(view, before), None
        turned = permutation(view, before) if scale is None and not plain.inplace else None
        inside = scaled(view, turned[0]["input"]) if turned is not None else None
        if turned is not None and inside is not None and not inside[0].inplace:
            scale, dims, ops = inside, turned[1], (turned[0], *ops)
        if (how is None and (drop is not None or scale is None)) or is_parameter(view, residual):
            continue
        if scale is None and how is not None and is_zero(view, how[0]):
            yield Refusal(Reason.SAVES_NOTHING, "stochastic depth with p = 0, before the sum")
            continue
        add = addition(view, node)
        if isinstance(add, Refusal):
            yield add
        if not isinstance(add, Op):
            continue
        x, gamma = before, None
        if scale is not None:
            (mul, gamma), ops = scale, (scale[0], *ops)
            x = mul["input"]
        args = (x, gamma, residual, *(how or ()))
        inplace = scale is not None and scale[0].inplace
        if dims is not None:
            args, first = (x, gamma, residual, dims, *(how or ())), {"first": overwritten == "x"}
            yield Match((*ops, add), calls.permuted_scale_add, args, first, (x, residual))
        elif add.inplace or inplace or overwritten == "x":
            options = {"overwritten": overwritten if add.inplace else None, "scaled": inplace}
            yield Match((*ops, add), calls.scale_add, args, options, (x, residual))
        else:
            yield Match((*ops, add), functional.scale_add, args, {}, (x, residual))


DROPOUT = Kind(("dropout",), lambda view, node: ending_norm(view, node, "dropout") is not None)
SCALED = Kind(
    ("drop_path", "product with a parameter"),
    lambda view, node: view.op(node, "drop_path") is not None or scaled(view, node) is not None,
)
DROPOUT_ADD = GraphRule("dropout_add", "residual + dropout(x)", find_dropout_add, (DROPOUT, SUM), Gains.IF_LARGE)
SCALE_ADD = GraphRule(
    "scale_add", "residual + drop_path(gamma * x), or one of both", find_scale_add, (SCALED, SUM), Gains.IF_LARGE
)

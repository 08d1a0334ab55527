"""A transformer block in one node of autograd."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import nn
from torch.fx import Node
from torch.nn.utils.parametrize import is_parametrized

from fastlayers.patching.capture.trace import record_child
from fastlayers.patching.ir.casting import cast_by
from fastlayers.patching.ir.operations import Attribute, Op
from fastlayers.patching.ir.view import View
from fastlayers.patching.reasons import Refusal
from fastlayers.patching.rules.base import GraphRule, Match
from fastlayers.patching.rules.matchers import addition, called_with, mlp_child, skip_identities
from fastlayers.patching.runtime import python
from fastlayers.patching.runtime.checks import original_class
from fastlayers.patching.runtime.convnext_block import drop_nothing
from fastlayers.patching.runtime.transformer_block import runs_under_autocast, transformer_block

__all__ = ["TRANSFORMER_BLOCK"]


def find_transformer_block(view: View, node: Node) -> Iterator[Match | Refusal]:
    outer = residual_sum(view, node)
    inner = residual_sum(view, outer[0]) if outer is not None and isinstance(outer[0], Node) else None
    if outer is None or inner is None:
        return
    (s, mlp, passed, add), (x, attention, passed_too, first_add) = outer, inner
    norm, norm2 = (view.op(call.args[0], "layer_norm") for call in (attention, mlp))
    if norm is None or norm2 is None or norm["input"] is not x or norm2["input"] is not s:
        return
    if not is_layer_norm(view, norm) or not is_layer_norm(view, norm2):
        return
    of_mlp, of_attention = mlp_child(view, mlp), self_attention(view, attention)
    if of_mlp is None or of_attention is None or len(mlp.args) != 1 or mlp.kwargs:
        return
    closed, absorbed, parameters = of_mlp
    call, absorbed_too, layers, heads = of_attention
    weight, bias, act, weight2, bias2 = parameters
    if act not in ("gelu", "gelu_tanh", "relu", "silu", "quick_gelu"):
        return
    linear = [Attribute(f"{path}.{name}") for path in layers for name in ("weight", "bias")]
    modules = (norm.child, call.child, norm2.child, closed.child)
    args = (x, *(Attribute(str(path)) for path in modules), *linear, weight, bias, weight2, bias2)
    drops = [str(op.child) for op in (*absorbed, *absorbed_too) if op.name == "dropout"]
    ops = (norm, call, *passed_too, first_add, norm2, closed, *passed, add)
    options = {"heads": heads, "act": act, "casts": cast_by(view, norm.node), "casts2": cast_by(view, norm2.node)}
    yield Match(
        ops, transformer_block, args, options, (x,), absorbed=(*absorbed, *absorbed_too),
        condition=(drop_nothing, *drops) if drops else None,
    )  # fmt: skip


def residual_sum(view: View, node: Any) -> tuple[Any, Node, tuple[Op, ...], Op] | None:
    """A sum of the residual stream and a child's result: the two, the identities after the child, and the sum."""
    add = addition(view, node)
    if not isinstance(add, Op) or add.inplace or add.child is not None or add["input"] is add["other"]:
        return None
    call, passed = skip_identities(view, add["other"])
    if isinstance(call, Node) and call.op == "call_module" and call.args and isinstance(call.args[0], Node):
        return add["input"], call, passed, add
    return None


def is_layer_norm(view: View, op: Op) -> bool:
    """Whether a layer_norm is an nn.LayerNorm, or a subclass of it, with a weight and a bias."""
    layer: Any = view.root.get_submodule(op.child) if op.child is not None else None
    return (
        layer is not None
        and issubclass(original_class(layer), nn.LayerNorm)
        and layer.weight is not None
        and layer.bias is not None
        and not is_parametrized(layer)
    )


def self_attention(view: View, node: Node) -> tuple[Op, tuple[Op, ...], tuple[str, str], int] | None:
    """A child that in training computes proj(attention(qkv(x))) without mask or dropout, qkv as (3, heads, size).

    Returns:
        Its call, the operations in it, the paths of both layers, and the number of heads.
    """
    child: Any = view.child(node)
    recording = record_child(view.root, child, node, True)
    if recording is None:
        return None
    x, *nodes, output = recording.graph.nodes
    inner, at = View(recording.graph, view.root), output.args[0]
    known: list[Op] = []

    def through(node: Any, *names: str) -> Any:
        while (op := next(filter(None, (inner.op(node, name) for name in names)), None)) is not None:
            known.append(op)
            node = op["input"]
        return node

    at = through(at, "identity", "dropout")
    proj = inner.op(at, "linear")
    if proj is None or proj.child is None:
        return None
    joined = method(through(proj["input"], "identity"), "reshape", 3)
    turned = method(joined.args[0], "transpose", 2) if joined is not None else None
    attend: Any = turned.args[0] if turned is not None and turned.args[1:] in ((1, 2), (2, 1)) else None
    if joined is None or turned is None or getattr(attend, "target", None) is not F.scaled_dot_product_attention:
        return None
    options = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False}
    if len(attend.args) != 3 or any(name not in options or options[name] != v for name, v in attend.kwargs.items()):
        return None
    parts = [through(part, "identity") for part in attend.args]
    sources = [called_with(part, operator.getitem, k) for k, part in enumerate(parts)]
    if sources[0] is None or any(source is not sources[0] for source in sources):
        return None
    unbound = method(called_with(sources[0], python.unpack, 3) or sources[0], "unbind", 1)
    permuted = method(unbound.args[0], "permute", 5) if unbound is not None and unbound.args[1:] == (0,) else None
    product = method(permuted.args[0], "reshape", 5) if permuted is not None else None
    if unbound is None or permuted is None or product is None or permuted.args[1:] != (2, 0, 3, 1, 4):
        return None
    qkv = inner.op(product.args[0], "linear")
    if qkv is None or qkv.child is None or qkv["input"] is not x or product.args[3] != 3:
        return None
    heads, size = product.args[4:]
    layer: Any = view.root.get_submodule(qkv.child)
    if type(heads) is not int or type(size) is not int or layer.weight.shape[0] != 3 * heads * size:
        return None
    lengths = [list(given.args[1:3]) for given in (product, joined)]
    if lengths[0] != lengths[1] or not all(inner.is_number(length) for length in lengths[0]):
        return None
    drops = [view.root.get_submodule(str(op.child)) for op in known if op.name == "dropout"]
    if any(original_class(drop) is not nn.Dropout or drop.p != 0.0 for drop in drops):
        return None
    steps = {op.node for op in known} | {proj.node, joined, turned, attend, *parts, sources[0], unbound, permuted}
    steps |= {product, qkv.node}
    if not all(n in steps or inner.is_number(n) or is_about_shape(n, x) for n in nodes if n.op != "get_attr"):
        return None
    call = Op("attention", node, {"input": node.args[0]}, child=str(node.target), recording=recording)
    return call, (*known, qkv, proj), (qkv.child, proj.child), heads


def method(node: Any, name: str, arguments: int) -> Node | None:
    """A node as a call of a tensor method with that number of arguments."""
    called = isinstance(node, Node) and node.op == "call_method" and node.target == name and not node.kwargs
    return node if called and len(node.args) == arguments + 1 and isinstance(node.args[0], Node) else None


def is_about_shape(node: Node, x: Node) -> bool:
    """Whether a node is the shape of x, or unpacks it."""
    return called_with(node, getattr, "shape") is x or (
        node.target is python.unpack
        and isinstance(node.args[0], Node)
        and called_with(node.args[0], getattr, "shape") is x
    )


TRANSFORMER_BLOCK = GraphRule(
    "transformer_block",
    "s + mlp(norm(s)) for s = x + attention(norm(x)), under autocast one node of autograd",
    find_transformer_block,
    runs_under_autocast,
)

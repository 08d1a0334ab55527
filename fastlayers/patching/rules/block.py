"""Whole blocks of networks: what the other rules made of one, as one node of autograd."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Node
from torch.nn.utils.parametrize import is_parametrized

from fastlayers.patching import calls
from fastlayers.patching.blocks import convolution_chain, runs_under_autocast, trains_under_autocast, transformer_block
from fastlayers.patching.casting import cast_by
from fastlayers.patching.convolutions import convnext_block, drop_nothing, forked_convolution
from fastlayers.patching.folding import folded, folded_chain
from fastlayers.patching.graph import Attribute, Op, View, original_class
from fastlayers.patching.reasons import Refusal
from fastlayers.patching.rules.base import GraphRule, Match
from fastlayers.patching.rules.bias_act import find_mlp
from fastlayers.patching.rules.convolution import find_batch_norm, fits
from fastlayers.patching.rules.elementwise import addition, find_squeeze_excite, mean_over_space
from fastlayers.patching.rules.norm import activation, behind
from fastlayers.patching.trace import record_child

__all__ = ["CONVNEXT_BLOCK", "CONVOLUTION_CHAIN", "FOLDED_CHAIN", "TRANSFORMER_BLOCK"]

# -- of a ConvNeXt ----------------------------------------------------------------------------------------------------


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

# -- convolutions and their norms, one after the other ---------------------------------------------------------------

#: A node of autograd holds all that its steps keep until its backward is through.
MOST_STEPS = 4


@dataclass
class Chain:
    """What was found so far, from the last step on."""

    ops: tuple[Op, ...] = ()
    args: tuple[Any, ...] = ()
    acts: tuple[str | None, ...] = ()
    absorbed: tuple[Op, ...] = ()
    #: The steps after a gate, the activations of it, and the module with its two layers.
    gate: tuple[int, str, str] | None = None
    of_gate: tuple[Any, ...] = ()
    start: Any = None

    def put(self, match: Match) -> None:
        """A step before these."""
        layer, self.start, norm = match.args
        self.ops = (*match.ops, *self.ops)
        self.args = (layer, norm, *self.args)
        self.acts = (match.kwargs.get("act"), *self.acts)
        self.absorbed = (*match.absorbed, *self.absorbed)

    @property
    def length(self) -> int:
        return len(self.acts)

    @property
    def kwargs(self) -> dict[str, Any]:
        """Of the call of it."""
        if self.gate is None:
            return {"acts": self.acts}
        behind_gate, act, end = self.gate
        return {"acts": self.acts, "gate": (self.length - behind_gate - 1, act, end)}


def only_step(view: View, node: Any) -> Match | None:
    """A node as a convolution and its norm, whose result nothing in between uses."""
    if not isinstance(node, Node):
        return None
    found = next(iter(find_batch_norm(view, node)), None)
    conv = found.ops[0].node if found is not None else None
    return found if conv is not None and len(conv.users) == 1 else None


def find_convolution_chain(view: View, node: Node) -> Iterator[Match | Refusal]:
    found = addition(view, node)
    summed = found if isinstance(found, Op) else None
    if summed is not None and (summed.child is not None or summed["input"] is summed["other"]):
        return
    for last, residual, passed, written in ends(view, node, summed):
        step = only_step(view, last)
        if step is None or (summed is not None and step.kwargs.keys() & {"act", "residual"}):
            continue
        residual = step.kwargs.get("residual", residual)
        written = step.kwargs.get("written", written)
        if written == "residual":
            continue
        chain = Chain()
        chain.put(step)
        shortcut = shortcut_of(view, residual)
        begin = shortcut.start if shortcut is not None else residual
        while chain.length < MOST_STEPS and chain.start is not begin and extend(view, chain, only_step):
            pass
        if chain.length < 2 or (residual is not None and chain.start is not begin):
            continue
        args, ops, absorbed, kwargs = chain.args, chain.ops, chain.absorbed, chain.kwargs
        if residual is not None:
            kwargs["added"] = "x" if shortcut is None else "shortcut"
            if written is not None:
                kwargs["written"] = written
        if shortcut is not None:
            args, kwargs["acts"] = (*args, *shortcut.args), (*chain.acts, *shortcut.acts)
            ops, absorbed = (*shortcut.ops, *ops), (*absorbed, *shortcut.absorbed)
        if summed is not None:
            ops = (*ops, *passed, summed)
        x = chain.start
        ops = (*sorted(ops[:-1], key=lambda op: view.position[op.node]), ops[-1])
        yield Match(ops, convolution_chain, (x, *args, *chain.of_gate), kwargs, (x,), absorbed=absorbed)
        return


def ends(view: View, node: Node, summed: Op | None) -> Iterator[tuple[Any, Any, tuple[Op, ...], str | None]]:
    """The node of a last norm, what is added to it, identities in between, and to which of the two a sum is written."""
    if summed is None:
        yield node, None, (), None
        return
    for side, other in (("input", "other"), ("other", "input")):
        last, passed = behind(view, summed[side])
        used_once = isinstance(last, Node) and len(last.users) == 1 and all(len(op.node.users) == 1 for op in passed)
        if used_once:
            written = ("norm" if side == "input" else "residual") if summed.inplace else None
            yield last, summed[other], passed, written


def extend(view: View, chain: Chain, find: Callable[[View, Any], Match | None]) -> bool:
    """Whether a step that this finds stands before the chain, perhaps with a gate in between, which then is in it."""
    node, passed = behind(view, chain.start)
    between = [op.node for op in passed]
    gate = gate_of(view, node) if chain.gate is None else None
    if gate is not None:
        node, more = behind(view, gate[0]["input"])
        between += [gate[0].node, *(op.node for op in more)]
        passed = (*more, gate[0], *passed)
    step = find(view, node)
    if step is None or "residual" in step.kwargs or any(len(n.users) != 1 for n in (node, *between)):
        return False
    if gate is not None:
        op, layers, absorbed, acts = gate
        chain.gate, chain.of_gate = (chain.length, *acts), (Attribute(str(op.child)), *layers)
        chain.absorbed = (*absorbed, *chain.absorbed)
    chain.ops = (*passed, *chain.ops)
    chain.put(step)
    return True


def gate_of(view: View, node: Any) -> tuple[Op, tuple[Any, ...], tuple[Op, ...], tuple[str, str]] | None:
    """A child that is squeeze-and-excite by two 1x1 convolutions: its call, them, all in it, and the activations."""
    if not isinstance(node, Node) or node.op != "call_module" or len(node.args) != 1 or node.kwargs:
        return None
    child: Any = view.child(node)
    if original_class(child).__module__.startswith("torch.") or len(child._modules) < 2:
        return None
    recording = record_child(view.root, child, 1)
    if recording is None:
        return None
    x, *nodes, output = recording.graph.nodes
    inner = View(recording.graph, view.root)
    for match in find_squeeze_excite(inner, output.args[0]) if isinstance(output.args[0], Node) else ():
        if not isinstance(match, Match):
            continue
        image, gate, mean = match.args
        pooled = mean_over_space(inner, mean)
        if image is not x or pooled is None or pooled["input"] is not x:
            continue
        known, layers, acts = list(match.ops), [], []
        at = gate
        for _ in range(2):
            acting = activation(inner, at) or sigmoid(inner, at)
            if acting is None:
                return None
            before, passed = behind(inner, acting[0]["input"])
            conv = inner.op(before, "convolution")
            layer = view.root.get_submodule(conv.child) if conv is not None and conv.child is not None else None
            if conv is None or layer is None or original_class(layer) is not nn.Conv2d:
                return None
            at, passed_too = behind(inner, conv["input"])
            known += (acting[0], *passed, conv, *passed_too)
            layers.append(Attribute(str(conv.child)))
            acts.append(acting[1])
        if at is not mean:
            return None
        known.append(pooled)
        if not {n for n in nodes if n.op != "get_attr"} <= {op.node for op in known}:
            return None
        if any(is_parametrized(view.root.get_submodule(layer.path)) for layer in layers):
            return None
        op = Op("squeeze_excite", node, {"input": node.args[0]}, child=str(node.target), recording=recording)
        absorbed = tuple(op for op in known if op.child is not None)
        return op, tuple(reversed(layers)), absorbed, (acts[1], acts[0])
    return None


def sigmoid(view: View, node: Any) -> tuple[Op, str] | None:
    """A child as torch's Sigmoid, or as one of a class of its own that does the same."""
    if not isinstance(node, Node) or node.op != "call_module" or len(node.args) != 1 or node.kwargs:
        return None
    child, path = view.child(node), str(node.target)
    if original_class(child) is nn.Sigmoid:
        return Op("sigmoid", node, {"input": node.args[0]}, child=path), "sigmoid"
    recording = view.record(path, 1)
    if recording is None or child._modules:
        return None
    x, *nodes, _ = recording.graph.nodes
    if len(nodes) != 1 or step(nodes[0], nodes[0].target) is not x or nodes[0].target not in ("sigmoid", torch.sigmoid):
        return None
    return Op("sigmoid", node, {"input": node.args[0]}, child=path, recording=recording), "sigmoid"


def shortcut_of(view: View, node: Any) -> Chain | None:
    """A residual as a convolution and a norm without activation: here, or in a Sequential of the two."""
    if not isinstance(node, Node) or len(node.users) != 1:
        return None
    chain = Chain()
    step = only_step(view, node)
    if step is not None:
        if not step.kwargs.keys() & {"act", "residual", "of_product"}:
            chain.put(step)
            return chain
        return None
    norm = view.last_op(node, "batch_norm")
    if norm is None or len(norm["input"].paths) != 1 or len(norm.sequentials) != 1:
        return None
    (path,) = norm["input"].paths
    conv = Op("convolution", node, {"input": node.args[0]}, child=path)
    if not fits(view, conv, norm):
        return None
    chain.args, chain.acts, chain.start = (Attribute(path), Attribute(str(norm.child))), (None,), node.args[0]
    call = Op("batch_norm", node, {"input": node.args[0]}, child=norm.child, sequentials=norm.sequentials)
    chain.ops, chain.absorbed = (call,), (conv,)
    return chain


CONVOLUTION_CHAIN = GraphRule(
    "convolution_chain",
    "convolutions with their batch_norms, gate and shortcut, in training under autocast one node of autograd",
    find_convolution_chain,
    trains_under_autocast,
)

# -- the same in inference, the norms folded -------------------------------------------------------------------------


def folded_step(view: View, node: Any) -> Match | None:
    """A node as a Conv2d that a norm is folded into, and what follows."""
    op = view.op(node, "folded")
    layer: Any = view.root.get_submodule(op["layer"].target) if op is not None else None
    if op is None or original_class(layer) is not nn.Conv2d:
        return None
    kwargs = {name: op[name] for name in ("residual", "act", "written") if op.operands.get(name) is not None}
    return Match((op,), folded, (op["layer"], op["input"], op["norm"]), kwargs)


def find_folded_chain(view: View, node: Node) -> Iterator[Match | Refusal]:
    last = folded_step(view, node)
    if last is None or last.kwargs.get("written") == "residual":
        return
    chain, residual = Chain(), behind(view, last.kwargs.get("residual"))[0]
    chain.put(last)
    # What is added to the last result may be no result in between.
    while behind(view, chain.start)[0] is not residual and extend(view, chain, folded_step):
        pass
    if chain.length < 2:
        return
    kwargs = {name: value for name, value in last.kwargs.items() if name != "act"} | chain.kwargs
    kwargs["after"] = tuple(op.operands.get("after", ()) for op in chain.ops if op.name == "folded")
    args = (chain.start, *chain.args, *chain.of_gate)
    yield Match(chain.ops, folded_chain, args, kwargs, args[:1], absorbed=chain.absorbed)


#: Of the name that folding has: the norms in a chain are counted one by one.
FOLDED_CHAIN = GraphRule(
    "fold_batch_norm", "folded convolutions with their gate, under autocast one op", find_folded_chain
)

# -- of a transformer -------------------------------------------------------------------------------------------------


def find_transformer_block(view: View, node: Node) -> Iterator[Match | Refusal]:
    outer = halves(view, node)
    inner = halves(view, outer[0]) if outer is not None and isinstance(outer[0], Node) else None
    if outer is None or inner is None:
        return
    (s, mlp, passed, add), (x, attention, passed_too, first_add) = outer, inner
    norm, norm2 = (view.op(call.args[0], "layer_norm") for call in (attention, mlp))
    if norm is None or norm2 is None or norm["input"] is not x or norm2["input"] is not s:
        return
    if not is_layer_norm(view, norm) or not is_layer_norm(view, norm2):
        return
    of_mlp, of_attention = inside(view, mlp), self_attention(view, attention)
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


def halves(view: View, node: Any) -> tuple[Any, Node, tuple[Op, ...], Op] | None:
    """A sum of a stream and what a child makes of it: the two, the identities behind the child, and the sum."""
    add = addition(view, node)
    if not isinstance(add, Op) or add.inplace or add.child is not None or add["input"] is add["other"]:
        return None
    call, passed = behind(view, add["other"])
    if isinstance(call, Node) and call.op == "call_module" and call.args and isinstance(call.args[0], Node):
        return add["input"], call, passed, add
    return None


def is_layer_norm(view: View, op: Op) -> bool:
    """Whether a layer_norm is torch's, or of a class made from it, with a weight and a bias."""
    layer: Any = view.root.get_submodule(op.child) if op.child is not None else None
    return (
        layer is not None
        and issubclass(original_class(layer), nn.LayerNorm)
        and layer.weight is not None
        and layer.bias is not None
        and not is_parametrized(layer)
    )


def self_attention(view: View, node: Node) -> tuple[Op, tuple[Op, ...], tuple[str, str], int] | None:
    """A child that in training is proj(attention(qkv(x))) without mask or dropout, the product (3, heads, size).

    Returns:
        The call of it, the operations in it, the paths of both layers, and the number of heads.
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
    sources = [step(part, operator.getitem, k) for k, part in enumerate(parts)]
    if sources[0] is None or any(source is not sources[0] for source in sources):
        return None
    unbound = method(step(sources[0], calls.unpack, 3) or sources[0], "unbind", 1)
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
    """A node as a call of that method of a tensor with so many arguments."""
    called = isinstance(node, Node) and node.op == "call_method" and node.target == name and not node.kwargs
    return node if called and len(node.args) == arguments + 1 and isinstance(node.args[0], Node) else None


def is_about_shape(node: Node, x: Node) -> bool:
    """Whether a node is the shape of x, or the sizes in it."""
    return step(node, getattr, "shape") is x or (
        node.target is calls.unpack and isinstance(node.args[0], Node) and step(node.args[0], getattr, "shape") is x
    )


TRANSFORMER_BLOCK = GraphRule(
    "transformer_block",
    "s + mlp(norm(s)) for s = x + attention(norm(x)), under autocast one node of autograd",
    find_transformer_block,
    runs_under_autocast,
)

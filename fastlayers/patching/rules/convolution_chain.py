"""Consecutive convolutions with their norms, as fused by the other rules, in one node of autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Node
from torch.nn.utils.parametrize import is_parametrized

from fastlayers.patching.capture.trace import record_child
from fastlayers.patching.ir.operations import Attribute, Op
from fastlayers.patching.ir.view import View
from fastlayers.patching.reasons import Refusal
from fastlayers.patching.rules.base import GraphRule, Match
from fastlayers.patching.rules.matchers import (
    activation,
    addition,
    are_convolution_and_norm,
    called_with,
    find_batch_norm,
    find_squeeze_excite,
    mean_over_space,
    skip_identities,
)
from fastlayers.patching.runtime.checks import original_class
from fastlayers.patching.runtime.convolution_chain import convolution_chain
from fastlayers.patching.runtime.folded_layers import folded, folded_chain
from fastlayers.patching.runtime.transformer_block import trains_under_autocast

__all__ = ["CONVOLUTION_CHAIN", "FOLDED_CHAIN"]


#: A node of autograd keeps the tensors of all its steps until the end of its backward.
MOST_STEPS = 4


@dataclass
class Chain:
    """The steps found so far, from the last one backwards."""

    ops: tuple[Op, ...] = ()
    args: tuple[Any, ...] = ()
    acts: tuple[str | None, ...] = ()
    absorbed: tuple[Op, ...] = ()
    #: The number of steps after a gate, its activations, and its module with the two layers.
    gate: tuple[int, str, str] | None = None
    of_gate: tuple[Any, ...] = ()
    start: Any = None

    def put(self, match: Match) -> None:
        """Prepend a step."""
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
        """The keyword arguments of the call."""
        if self.gate is None:
            return {"acts": self.acts}
        behind_gate, act, end = self.gate
        return {"acts": self.acts, "gate": (self.length - behind_gate - 1, act, end)}


def only_step(view: View, node: Any) -> Match | None:
    """A node as a convolution and its norm, where only the norm uses the convolution."""
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
    for last, residual, passed, overwritten in ends(view, node, summed):
        step = only_step(view, last)
        if step is None or (summed is not None and step.kwargs.keys() & {"act", "residual"}):
            continue
        residual = step.kwargs.get("residual", residual)
        overwritten = step.kwargs.get("overwritten", overwritten)
        if overwritten == "residual":
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
            if overwritten is not None:
                kwargs["overwritten"] = overwritten
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
    """The last norm, the residual, the identities in between, and which of the two an in-place sum overwrites."""
    if summed is None:
        yield node, None, (), None
        return
    for side, other in (("input", "other"), ("other", "input")):
        last, passed = skip_identities(view, summed[side])
        used_once = isinstance(last, Node) and len(last.users) == 1 and all(len(op.node.users) == 1 for op in passed)
        if used_once:
            overwritten = ("norm" if side == "input" else "residual") if summed.inplace else None
            yield last, summed[other], passed, overwritten


def extend(view: View, chain: Chain, find: Callable[[View, Any], Match | None]) -> bool:
    """Prepend the step before the chain, perhaps with a gate in between. Returns whether there was one."""
    node, passed = skip_identities(view, chain.start)
    between = [op.node for op in passed]
    gate = gate_of(view, node) if chain.gate is None else None
    if gate is not None:
        node, more = skip_identities(view, gate[0]["input"])
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
    """A child that computes squeeze-and-excite by two 1x1 convolutions.

    Returns its call, the convolutions, the operations in it, and the activations.
    """
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
        image, gate = match.args
        if image is not x:
            continue
        known, layers, acts = list(match.ops), [], []
        at = gate
        for _ in range(2):
            acting = activation(inner, at) or sigmoid(inner, at)
            if acting is None:
                return None
            before, passed = skip_identities(inner, acting[0]["input"])
            conv = inner.op(before, "convolution")
            layer = view.root.get_submodule(conv.child) if conv is not None and conv.child is not None else None
            if conv is None or layer is None or original_class(layer) is not nn.Conv2d:
                return None
            at, passed_too = skip_identities(inner, conv["input"])
            known += (acting[0], *passed, conv, *passed_too)
            layers.append(Attribute(str(conv.child)))
            acts.append(acting[1])
        pooled = mean_over_space(inner, at)
        if pooled is None or pooled["input"] is not x:
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
    """A child as torch's Sigmoid, or as another class that computes the same."""
    if not isinstance(node, Node) or node.op != "call_module" or len(node.args) != 1 or node.kwargs:
        return None
    child, path = view.child(node), str(node.target)
    if original_class(child) is nn.Sigmoid:
        return Op("sigmoid", node, {"input": node.args[0]}, child=path), "sigmoid"
    recording = view.record(path, 1)
    if recording is None or child._modules:
        return None
    x, *nodes, _ = recording.graph.nodes
    if (
        len(nodes) != 1
        or called_with(nodes[0], nodes[0].target) is not x
        or nodes[0].target not in ("sigmoid", torch.sigmoid)
    ):
        return None
    return Op("sigmoid", node, {"input": node.args[0]}, child=path, recording=recording), "sigmoid"


def shortcut_of(view: View, node: Any) -> Chain | None:
    """A residual as a convolution and a norm without an activation, in this forward or in a Sequential."""
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
    if not are_convolution_and_norm(view, conv, norm):
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
    """A node as a Conv2d with a folded norm, and what follows."""
    op = view.op(node, "folded")
    layer: Any = view.root.get_submodule(op["layer"].target) if op is not None else None
    if op is None or original_class(layer) is not nn.Conv2d:
        return None
    kwargs = {name: op[name] for name in ("residual", "act", "overwritten") if op.operands.get(name) is not None}
    return Match((op,), folded, (op["layer"], op["input"], op["norm"]), kwargs)


def find_folded_chain(view: View, node: Node) -> Iterator[Match | Refusal]:
    last = folded_step(view, node)
    if last is None or last.kwargs.get("overwritten") == "residual":
        return
    chain, residual = Chain(), skip_identities(view, last.kwargs.get("residual"))[0]
    chain.put(last)
    # The residual must not be a result inside of the chain.
    while skip_identities(view, chain.start)[0] is not residual and extend(view, chain, folded_step):
        pass
    if chain.length < 2:
        return
    kwargs = {name: value for name, value in last.kwargs.items() if name != "act"} | chain.kwargs
    kwargs["after"] = tuple(op.operands.get("after", ()) for op in chain.ops if op.name == "folded")
    args = (chain.start, *chain.args, *chain.of_gate)
    yield Match(chain.ops, folded_chain, args, kwargs, args[:1], absorbed=chain.absorbed)


#: It has the name of folding, since each norm in a chain counts.
FOLDED_CHAIN = GraphRule(
    "fold_batch_norm", "folded convolutions with their gate, under autocast one op", find_folded_chain
)

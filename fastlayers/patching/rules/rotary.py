"""Rotary position embedding of queries and keys, decomposed in a graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx import Node

from fastlayers import functional
from fastlayers.patching.ir.operations import Op
from fastlayers.patching.ir.view import View
from fastlayers.patching.reasons import Refusal
from fastlayers.patching.rules.base import GraphRule, Match
from fastlayers.patching.runtime import calls

__all__ = ["ROTARY"]


@dataclass(frozen=True)
class Rotated:
    """``x * cos + rotate(x) * sin``, and the nodes that compute it, in order."""

    x: Node
    cos: Node
    sin: Node
    interleaved: bool
    nodes: tuple[Node, ...]


def half(view: View, node: Any, which: int) -> tuple[Node, bool, tuple[Node, ...]] | None:
    """A node as one half of the last dimension of another: that node, whether it is interleaved, the nodes between."""
    if not isinstance(node, Node) or node.target is not operator.getitem:
        return None
    x, index = cast("tuple[Any, Any]", node.args)
    if isinstance(index, tuple):
        size = view.size(x, -1)
        if size is None or size % 2 or len(index) != 2 or index[0] is not ... or not isinstance(index[1], slice):
            return None
        if index[1] == (slice(None, size // 2), slice(size // 2, None))[which]:
            return x, False, (node,)
        other = slice(index[1].start or 0, index[1].stop, index[1].step)
        return (x, True, (node,)) if other == slice(which, None, 2) else None
    if index != which or not isinstance(x, Node) or x.target not in ("chunk", torch.chunk):
        return None
    options = {**dict(zip(("input", "chunks", "dim"), x.args, strict=False)), **x.kwargs}
    whole: Any = options["input"]
    size, source = view.size(whole, -1), view.example(whole)
    if size is None or size % 2 or source is None or options.get("dim") not in (-1, source.dim() - 1):
        return None
    return (whole, False, (x, node)) if options.get("chunks") == 2 else None


def rotation(view: View, node: Any) -> tuple[Node, bool, tuple[Node, ...]] | None:
    """A node as ``torch.cat((-x2, x1), dim=-1)`` of the halves of x, or as a stack of them, flattened."""
    flat: tuple[Node, ...] = ()
    if isinstance(node, Node) and node.target in ("flatten", torch.flatten) and node.args[1:] == (-2,):
        node, flat = node.args[0], (node,)
    if not isinstance(node, Node) or node.target not in ((torch.stack,) if flat else (torch.cat, torch.concat)):
        return None
    options = {**dict(zip(("tensors", "dim"), node.args, strict=False)), **node.kwargs}
    tensors, example = options.get("tensors"), view.example(node)
    if example is None or options.get("dim") not in (-1, example.dim() - 1) or not isinstance(tensors, tuple | list):
        return None
    negated = tensors[0] if len(tensors) == 2 else None
    if not isinstance(negated, Node) or negated.target not in (operator.neg, torch.neg, "neg") or negated.kwargs:
        return None
    second, first = half(view, negated.args[0], 1), half(view, tensors[1], 0)
    if first is None or second is None or first[:2] != second[:2] or first[1] != bool(flat):
        return None
    return *first[:2], (*dict.fromkeys((*first[2], *second[2])), negated, node, *flat)


def rotated(view: View, node: Any) -> Rotated | None:
    """A node as the rotary embedding of x."""
    add = view.op(node, "add")
    if add is None or add.inplace or add["alpha"] not in (None, 1):
        return None
    for straight, turned in ((add["input"], add["other"]), (add["other"], add["input"])):
        plain, turning = view.op(straight, "mul"), view.op(turned, "mul")
        if plain is None or turning is None or plain.inplace or turning.inplace:
            continue
        for before, sin in ((turning["input"], turning["other"]), (turning["other"], turning["input"])):
            turn = rotation(view, before)
            if turn is None or turn[0] not in (plain["input"], plain["other"]):
                continue
            x, interleaved, inner = turn
            cos = plain["other"] if plain["input"] is x else plain["input"]
            # The tables have a column for each element of the last dimension.
            if view.size(x, -1) is not None and view.size(x, -1) == view.size(cos, -1) == view.size(sin, -1):
                nodes = (plain.node, *inner, turning.node)
                ordered = sorted(nodes, key=lambda inside: view.position[inside])
                return Rotated(x, cos, sin, interleaved, (*ordered, node))
    return None


def find_rotary(view: View, node: Node) -> Iterator[Match | Refusal]:
    last = rotated(view, node)
    if last is None:
        return
    muls = [user for user in last.cos.users if view.position[user] < view.position[node]]
    candidates = dict.fromkeys(add for mul in muls for add in mul.users if add is not node)
    for other in sorted(candidates, key=lambda add: view.position[add], reverse=True):
        if view.position[other] > view.position[node]:
            continue
        first = rotated(view, other)
        tables = (last.cos, last.sin, last.interleaved)
        if first is None or (first.cos, first.sin, first.interleaved) != tables:
            continue
        yield match(view, {*first.nodes, *last.nodes}, functional.rotary, (last.x, first.x, *tables), kept=other)
    # One is used before the other is computed, such as in a concatenation with dimensions that do not rotate.
    yield match(view, set(last.nodes), calls.rotary_alone, (last.x, last.cos, last.sin, last.interleaved))


def match(
    view: View, nodes: set[Node], target: Callable[..., Any], args: tuple[Any, ...], kept: Node | None = None
) -> Match:
    ops = tuple(Op("part", node, {}) for node in sorted(nodes, key=lambda node: view.position[node]))
    return Match(ops, target, args, {}, args[:-1], kept=kept)


ROTARY = GraphRule("rotary", "q * cos + rotate_half(q) * sin and, with it, the same of k", find_rotary)

"""Norms with the operations before and after them: a residual, an activation, the sum that is normalised."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch.fx import Node

from fastlayers import functional
from fastlayers.patching.ir.casting import cast_by
from fastlayers.patching.ir.fingerprints import Fingerprint
from fastlayers.patching.ir.operations import Attribute, Op
from fastlayers.patching.ir.view import View
from fastlayers.patching.reasons import Refusal
from fastlayers.patching.rules.base import Gains, GraphRule, Match
from fastlayers.patching.rules.matchers import (
    ACTIVATION,
    NORM_WEIGHT,
    SUM,
    Find,
    addition,
    called,
    ending,
    find_norm_act,
    find_norm_add,
    find_norm_add_act,
    is_function,
    may_be_written,
    only_adds,
    options,
)
from fastlayers.patching.runtime import calls, norm_calls

__all__ = [
    "ADD_NORMS",
    "BATCH_NORM_ADD",
    "BATCH_NORM_ADD_ACT",
    "CAST_NORMS",
    "CHANNEL_LAYER_NORM",
    "FORKED_NORMS",
    "NORM_ACTS",
    "NORM_FUNCTIONS",
]

# -- norms over channels, and what follows ----------------------------------------------------------------------------

#: What to call for a layer that has a state, by the name of the norm.
WITH_STATE = {"batch_norm": calls.batch_norm_layer, "instance_norm": calls.instance_norm_layer}


def norm_act(norm: Op, act: str) -> tuple[Any, ...]:
    if norm.name in WITH_STATE and not is_function(norm):
        return WITH_STATE[norm.name], (Attribute(str(norm.child)), norm["input"]), {"act": act}
    return getattr(functional, norm.name), (norm["input"],), {**options(norm), "act": act}


def batch_norm_add(norm: Op, residual: Any, overwritten: str | None) -> tuple[Any, ...]:
    x, kwargs = norm["input"], {"overwritten": overwritten} if overwritten is not None else {}
    if not is_function(norm):
        return calls.batch_norm_layer, (Attribute(str(norm.child)), x, residual), kwargs
    if overwritten is not None:
        return calls.batch_norm, (x, residual), {**options(norm), **kwargs}
    return functional.batch_norm, (x,), {**options(norm), "residual": residual}


# -- the sum that is normalised ---------------------------------------------------------------------------------------


def find_add_norm(name: str) -> Find:
    def find(view: View, node: Node) -> Iterator[Match | Refusal]:
        norm = view.op(node, name)
        if norm is None or not isinstance(norm["input"], Node):
            return
        add = addition(view, norm["input"])
        if isinstance(add, Refusal):
            yield add
        if not isinstance(add, Op):
            return
        x, residual = add["input"], add["other"]
        target, args, kwargs = joined_norm(view, norm, x, residual, add.inplace)
        yield Match((add, norm), target, args, kwargs, (x, residual), kept=add.node)

    return find


def joined_norm(view: View, norm: Op, x: Any, residual: Any, inplace: bool = False) -> tuple[Any, ...]:
    """The call that returns the norm of x + residual and the sum; without a residual the norm of x, and x."""
    mark = norm["fingerprint"]
    if mark is not None:
        return add_handwritten_norm(norm, mark, x, residual, inplace)
    target = norm_calls.add_layer_norm if norm.name == "layer_norm" else norm_calls.add_rms_norm
    return target, (x, residual), {**options(norm), **({"inplace": True} if inplace else {}), **casts(view, norm)}


def casts(view: View, norm: Op) -> dict[str, Any]:
    """The argument that tells a norm that autocast only casts its result."""
    found = cast_by(view, norm.node)
    return {} if found is None else {"casts": found}


def add_handwritten_norm(norm: Op, mark: Fingerprint, x: Any, residual: Any, inplace: bool) -> tuple[Any, ...]:
    body = mark.body
    weight = Attribute(f"{norm.child}.{mark.weight}") if mark.weight is not None else None
    args = (Attribute(str(norm.child)), x, residual, weight, Attribute(f"{norm.child}.{mark.eps}"))
    kwargs = {"inplace": inplace, "casting": body.casting, "same": body.same}
    return norm_calls.add_handwritten_norm, args, kwargs


# -- a residual stream that a norm forks off --------------------------------------------------------------------------


def find_forked_norm(name: str) -> Find:
    def find(view: View, node: Node) -> Iterator[Match | Refusal]:
        norm = view.op(node, name)
        if norm is None or not isinstance(norm["input"], Node):
            return
        x = norm["input"]
        later = tuple(
            user for user in x.users if view.position[user] > view.position[node] and only_adds(view, x, user)
        )
        if later and not may_be_written(view, x, node, later):
            target, args, kwargs = joined_norm(view, norm, x, None)
            yield Match((norm,), target, args, kwargs, (x,), forked=later)

    return find


# -- norms whose result autocast casts --------------------------------------------------------------------------------


def find_cast_norm(name: str) -> Find:
    target = norm_calls.layer_norm if name == "layer_norm" else norm_calls.rms_norm

    def find(view: View, node: Node) -> Iterator[Match | Refusal]:
        norm = view.op(node, name)
        if norm is None or norm["fingerprint"] is not None or norm["casting"] is not None:
            return
        if found := casts(view, norm):
            yield Match((norm,), target, (norm["input"],), {**options(norm), **found}, (norm["input"],))

    return find


# -- norms spelled as functions ---------------------------------------------------------------------------------------


def find_channel_layer_norm(view: View, node: Node) -> Iterator[Match | Refusal]:
    norm = view.op(node, "channel_layer_norm")
    found = casts(view, norm) if norm is not None else {}
    if norm is None or (norm.child is not None and not found):  # The child itself is rewritten.
        return
    x = norm["input"]
    target = norm_calls.channel_layer_norm if found else functional.channel_layer_norm
    yield Match((*norm.parts, replace(norm, parts=())), target, (x,), {**options(norm), **found}, (x,))


def find_norm_function(name: str) -> Find:
    def find(view: View, node: Node) -> Iterator[Match | Refusal]:
        op = view.op(node, name)
        if op is not None and op.child is None:  # The module rules replace layers.
            yield Match((op,), getattr(functional, name), (op["input"],), options(op), (op["input"],))

    return find


#: Where norms gain that do not gain everywhere.
WHEN = {"layer_norm": Gains.IF_LARGE_ON_GPU, "group_norm": Gains.IF_LARGE}
BATCH_NORM_ADD_ACT = GraphRule(
    "batch_norm_add_act", "act(batch_norm(x) + residual)", find_norm_add_act("batch_norm", batch_norm_add)
)
BATCH_NORM_ADD = GraphRule(
    "batch_norm_add",
    "batch_norm(x) + residual",
    find_norm_add("batch_norm", batch_norm_add),
    (ending("batch_norm"), SUM),
)
NORM_ACTS = tuple(
    GraphRule(f"{name}_act", f"act({name}(x))", find_norm_act(name, norm_act), (ending(name), ACTIVATION))
    for name in ("batch_norm", "group_norm", "instance_norm")
)
ADD_NORMS = tuple(
    GraphRule(
        f"add_{name}",
        f"s = x + residual and {name}(s)",
        find_add_norm(name),
        (SUM, called(name, weight=NORM_WEIGHT)),
        WHEN.get(name, Gains.EVERYWHERE),
    )
    for name in ("layer_norm", "rms_norm")
)
FORKED_NORMS = tuple(
    GraphRule(f"forked_{name}", f"{name}(x) and x, with one gradient", find_forked_norm(name), when=Gains.IN_TRAINING)
    for name in ("layer_norm", "rms_norm")
)
CAST_NORMS = tuple(
    GraphRule(f"cast_{name}", f"{name}(x), if autocast only casts the result", find_cast_norm(name), when=when)
    for name, when in (("layer_norm", Gains.ON_GPU), ("rms_norm", Gains.EVERYWHERE))
)
CHANNEL_LAYER_NORM = GraphRule(
    "channel_layer_norm", "layer_norm between two permutes", find_channel_layer_norm, when=Gains.ON_GPU
)
NORM_FUNCTIONS = tuple(
    GraphRule(name, f"F.{name}", find_norm_function(name), when=WHEN.get(name, Gains.EVERYWHERE))
    for name in ("batch_norm", "group_norm", "instance_norm", "layer_norm", "rms_norm")
)

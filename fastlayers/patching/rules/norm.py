"""Norms with what stands before and after them: a residual, an activation, the sum that is normalised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeAlias

from torch.fx import Node

from fastlayers import functional
from fastlayers.patching import calls
from fastlayers.patching.casting import cast_by
from fastlayers.patching.fingerprints import Fingerprint
from fastlayers.patching.graph import JOINED_NORMS, Attribute, Op, View, forked
from fastlayers.patching.reasons import Refusal
from fastlayers.patching.rules.base import GraphRule, Match
from fastlayers.patching.rules.elementwise import addition
from fastlayers.patching.spelling import NORM_ATTRIBUTES

__all__ = [
    "ADD_LAYER_NORM",
    "ADD_RMS_NORM",
    "BATCH_NORM_ACT",
    "BATCH_NORM_ADD",
    "BATCH_NORM_ADD_ACT",
    "CAST_NORMS",
    "CHANNEL_LAYER_NORM",
    "FORKED_NORMS",
    "GROUP_NORM_ACT",
    "INSTANCE_NORM_ACT",
    "NORM_FUNCTIONS",
]


Find: TypeAlias = Callable[..., Iterator[Match | Refusal]]

# -- reading ----------------------------------------------------------------------------------------------------------


def options(op: Op) -> dict[str, Any]:
    """The operands of a norm but its input, by the names that torch's function has for them."""
    if is_function(op):
        return {name: value for name, value in op.operands.items() if name != "input"}
    return {name: Attribute(f"{op.child}.{name}") for name in NORM_ATTRIBUTES[op.name]}


def is_function(op: Op) -> bool:
    """Whether the operands of an operation are its own; those of a layer of torch are attributes of it."""
    return op.child is None or op.recording is not None


def activation(view: View, node: Any, *, written: bool = False) -> tuple[Op, str] | None:
    """A node as an activation that a fused norm can end with, and its name there.

    Args:
        written: whether one that is written out, of which only a call knows the dtype, will do.
    """
    op = view.op(node, "gelu") or view.op(node, "quick_gelu") or view.op(node)
    if op is None or (op["written"] is not None and not written):
        return None
    if op["written"] is not None:
        return op, str(op["written"])
    if op.name in ("relu", "silu", "hardswish", "quick_gelu"):
        return op, op.name
    if op.name == "relu6" and (op["min_val"] or 0.0, op["max_val"] or 6.0) == (0.0, 6.0):
        return op, op.name
    if op.name == "leaky_relu" and op["negative_slope"] in (None, 0.01):
        return op, op.name
    if op.name == "gelu" and op["approximate"] in (None, "none", "tanh"):
        return op, "gelu_tanh" if op["approximate"] == "tanh" else "gelu"
    return None


def behind(view: View, node: Any) -> tuple[Any, tuple[Op, ...]]:
    """What a node is but for ``nn.Identity``, and the identities in between, the last one last."""
    passed: tuple[Op, ...] = ()
    while (op := view.op(node, "identity")) is not None:
        node, passed = op["input"], (op, *passed)
    return node, passed


def closing(view: View, node: Any, name: str) -> Op | None:
    """A node as a norm, or as a Sequential that ends with one."""
    return view.op(node, name) or view.last_op(node, name)


# -- norms over channels, and what follows ----------------------------------------------------------------------


def find_norm_act(name: str, call: Callable[[Op, str], tuple[Any, ...]]) -> Find:
    def find(view: View, node: Node) -> Iterator[Match | Refusal]:
        found = activation(view, node)
        if found is None:
            return
        before, passed = behind(view, found[0]["input"])
        norm = closing(view, before, name)
        if norm is not None and norm["act"] is None:
            target, args, kwargs = call(norm, found[1])
            yield Match((norm, *passed, found[0]), target, args, kwargs, (norm["input"],))

    return find


def batch_norm_act(norm: Op, act: str) -> tuple[Any, ...]:
    if not is_function(norm):
        return calls.batch_norm_layer, (Attribute(str(norm.child)), norm["input"]), {"act": act}
    return functional.batch_norm, (norm["input"],), {**options(norm), "act": act}


def group_norm_act(norm: Op, act: str) -> tuple[Any, ...]:
    return functional.group_norm, (norm["input"],), {**options(norm), "act": act}


def instance_norm_act(norm: Op, act: str) -> tuple[Any, ...]:
    if not is_function(norm):
        return calls.instance_norm_layer, (Attribute(str(norm.child)), norm["input"]), {"act": act}
    return functional.instance_norm, (norm["input"],), {**options(norm), "act": act}


def find_norm_add(name: str, call: Callable[[Op, Any, str | None], tuple[Any, ...]]) -> Find:
    """norm(x) + residual; the residual may be the result of such a norm too."""

    def find(view: View, node: Any) -> Iterator[Match | Refusal]:
        plain = view.op(node, "add")
        if plain is None:
            return
        operands = [behind(view, plain[side]) for side in ("input", "other")]
        norms = [closing(view, before, name) for before, _ in operands]
        add = addition(view, node) if any(norms) else None
        if isinstance(add, Refusal):
            yield add
        if not isinstance(add, Op) or add["input"] is add["other"]:
            return
        sides = zip(norms, operands, (add["other"], add["input"]), ("norm", "residual"), strict=True)
        # One that stands in this forward comes before one that has to be taken out of a Sequential.
        for norm, (_, passed), residual, written in sorted(
            sides, key=lambda side: bool(side[0] and side[0].sequentials)
        ):
            if norm is not None and norm["residual"] is None and norm["act"] is None:
                target, args, kwargs = call(norm, residual, written if add.inplace else None)
                yield Match((norm, *passed, add), target, args, kwargs, (norm["input"], residual))

    return find


def batch_norm_add(norm: Op, residual: Any, written: str | None) -> tuple[Any, ...]:
    x, kwargs = norm["input"], {"written": written} if written is not None else {}
    if not is_function(norm):
        return calls.batch_norm_layer, (Attribute(str(norm.child)), x, residual), kwargs
    if written is not None:
        return calls.batch_norm, (x, residual), {**options(norm), **kwargs}
    return functional.batch_norm, (x,), {**options(norm), "residual": residual}


def find_norm_add_act(name: str, call: Callable[[Op, Any, str | None], tuple[Any, ...]]) -> Find:
    find_add = find_norm_add(name, call)

    def find(view: View, node: Node) -> Iterator[Match | Refusal]:
        found = activation(view, node)
        if found is None:
            return
        before, passed = behind(view, found[0]["input"])
        for match in find_add(view, before):
            if isinstance(match, Refusal):
                yield match
            else:
                ops, kwargs = (*match.ops, *passed, found[0]), {**match.kwargs, "act": found[1]}
                yield Match(ops, match.target, match.args, kwargs, match.tensors)

    return find


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
    """The call that gives the norm of x + residual and this sum; without a residual the norm of x, and x."""
    mark = norm["fingerprint"]
    if mark is not None:
        return add_written_norm(norm, mark, x, residual, inplace)
    target = calls.add_layer_norm if norm.name == "layer_norm" else calls.add_rms_norm
    return target, (x, residual), {**options(norm), **({"inplace": True} if inplace else {}), **casts(view, norm)}


def casts(view: View, norm: Op) -> dict[str, Any]:
    """What tells a norm that autocast only casts its result."""
    found = cast_by(view, norm.node)
    return {} if found is None else {"casts": found}


def add_written_norm(norm: Op, mark: Fingerprint, x: Any, residual: Any, inplace: bool) -> tuple[Any, ...]:
    body = mark.body
    weight = Attribute(f"{norm.child}.{mark.weight}") if mark.weight is not None else None
    args = (Attribute(str(norm.child)), x, residual, weight, Attribute(f"{norm.child}.{mark.eps}"))
    kwargs = {"inplace": inplace, "casting": body.casting, "same": body.same}
    return calls.add_written_norm, args, kwargs


# -- a residual stream that a norm forks off --------------------------------------------------------------------------


def find_forked_norm(name: str) -> Find:
    def find(view: View, node: Node) -> Iterator[Match | Refusal]:
        norm = view.op(node, name)
        if norm is None or not isinstance(norm["input"], Node):
            return
        x = norm["input"]
        later = tuple(user for user in x.users if view.position[user] > view.position[node] and joins(view, x, user))
        if later and not may_be_written(view, x, node, later):
            target, args, kwargs = joined_norm(view, norm, x, None)
            yield Match((norm,), target, args, kwargs, (x,), forked=later)

    return find


def joins(view: View, x: Node, user: Node) -> bool:
    """Whether a node only adds x to something: the sum is a tensor of its own, and x stays what it was."""
    op = view.op(user, "add")
    if op is not None:
        return not op.inplace and op.child is None
    return user.target in JOINED_NORMS and forked(user) is None and not user.kwargs.get("inplace", False)


def may_be_written(view: View, x: Node, norm: Node, later: tuple[Node, ...]) -> bool:
    """Whether x, or what may share memory with it, is written where the other use has yet to come."""
    last = max(view.position[user] for user in later)
    shared = {x}
    for node in view.position:
        if node is norm or shared.isdisjoint(node.all_input_nodes):  # the norm's result is a tensor of its own
            continue
        if view.position[norm] < view.position[node] < last and view.written(node):
            return True
        if view.memory(node) - {node}:
            shared.add(node)
    return False


# -- norms of which autocast casts the result -------------------------------------------------------------------------


def find_cast_norm(name: str) -> Find:
    target = calls.layer_norm if name == "layer_norm" else calls.rms_norm

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
    if norm is None or (norm.child is not None and not found):  # what is in the child is for the child
        return
    x = norm["input"]
    target = calls.channel_layer_norm if found else functional.channel_layer_norm
    yield Match((*norm.parts, replace(norm, parts=())), target, (x,), {**options(norm), **found}, (x,))


def find_norm_function(name: str) -> Find:
    def find(view: View, node: Node) -> Iterator[Match | Refusal]:
        op = view.op(node, name)
        if op is not None and op.child is None:  # a layer is for the module rules
            yield Match((op,), getattr(functional, name), (op["input"],), options(op), (op["input"],))

    return find


BATCH_NORM_ADD_ACT = GraphRule(
    "batch_norm_add_act", "act(batch_norm(x) + residual)", find_norm_add_act("batch_norm", batch_norm_add)
)
BATCH_NORM_ADD = GraphRule("batch_norm_add", "batch_norm(x) + residual", find_norm_add("batch_norm", batch_norm_add))
BATCH_NORM_ACT = GraphRule("batch_norm_act", "act(batch_norm(x))", find_norm_act("batch_norm", batch_norm_act))
GROUP_NORM_ACT = GraphRule("group_norm_act", "act(group_norm(x))", find_norm_act("group_norm", group_norm_act))
INSTANCE_NORM_ACT = GraphRule(
    "instance_norm_act", "act(instance_norm(x))", find_norm_act("instance_norm", instance_norm_act)
)
ADD_LAYER_NORM = GraphRule("add_layer_norm", "s = x + residual and layer_norm(s)", find_add_norm("layer_norm"))
ADD_RMS_NORM = GraphRule("add_rms_norm", "s = x + residual and rms_norm(s)", find_add_norm("rms_norm"))
FORKED_NORMS = tuple(
    GraphRule(f"forked_{name}", f"{name}(x) and x, whose gradients one kernel adds", find_forked_norm(name))
    for name in ("layer_norm", "rms_norm")
)
CAST_NORMS = tuple(
    GraphRule(f"cast_{name}", f"{name}(x), of which autocast only casts the result", find_cast_norm(name))
    for name in ("layer_norm", "rms_norm")
)
CHANNEL_LAYER_NORM = GraphRule(
    "channel_layer_norm", "layer_norm of an image over its channels, between two permutes", find_channel_layer_norm
)
NORM_FUNCTIONS = tuple(
    GraphRule(name, f"F.{name}", find_norm_function(name))
    for name in ("batch_norm", "group_norm", "instance_norm", "layer_norm", "rms_norm")
)

"""Norms with what stands before and after them: a residual, an activation, the sum that is normalised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.fx import Node

from fastlayers import functional
from fastlayers.patching import calls
from fastlayers.patching.fingerprints import Fingerprint
from fastlayers.patching.graph import Attribute, Op, View
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
    "CHANNEL_LAYER_NORM",
    "GROUP_NORM_ACT",
    "INSTANCE_NORM_ACT",
    "NORM_FUNCTIONS",
]


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


def find_norm_act(name: str, call: Callable[[Op, str], tuple[Any, ...]]) -> Callable[..., Iterator[Match | Refusal]]:
    def find(view: View, node: Node) -> Iterator[Match | Refusal]:
        found = activation(view, node)
        if found is None:
            return
        before, passed = behind(view, found[0]["input"])
        norm = closing(view, before, name)
        if norm is not None:
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


def find_batch_norm_add(view: View, node: Any) -> Iterator[Match | Refusal]:
    """batch_norm(x) + residual; the residual may be the result of a batch_norm too."""
    plain = view.op(node, "add")
    if plain is None:
        return
    operands = [behind(view, plain[name]) for name in ("input", "other")]
    norms = [closing(view, before, "batch_norm") for before, _ in operands]
    add = addition(view, node) if any(norms) else None
    if isinstance(add, Refusal):
        yield add
    if not isinstance(add, Op) or add["input"] is add["other"]:
        return
    sides = zip(norms, operands, (add["other"], add["input"]), ("norm", "residual"), strict=True)
    # One that stands in this forward comes before one that has to be taken out of a Sequential.
    for norm, (_, passed), residual, written in sorted(sides, key=lambda side: bool(side[0] and side[0].sequentials)):
        if norm is None:
            continue
        kwargs = {"written": written} if add.inplace else {}
        x = norm["input"]
        if not is_function(norm):
            args: tuple[Any, ...] = (Attribute(str(norm.child)), x, residual)
            yield Match((norm, *passed, add), calls.batch_norm_layer, args, kwargs, (x, residual))
        else:
            target = calls.batch_norm if add.inplace else functional.batch_norm
            args, given = ((x, residual), {}) if add.inplace else ((x,), {"residual": residual})
            yield Match((norm, *passed, add), target, args, {**options(norm), **given, **kwargs}, (x, residual))


def find_batch_norm_add_act(view: View, node: Node) -> Iterator[Match | Refusal]:
    found = activation(view, node)
    if found is None:
        return
    before, passed = behind(view, found[0]["input"])
    for match in find_batch_norm_add(view, before):
        if isinstance(match, Refusal):
            yield match
        else:
            ops, kwargs = (*match.ops, *passed, found[0]), {**match.kwargs, "act": found[1]}
            yield Match(ops, match.target, match.args, kwargs, match.tensors)


# -- the sum that is normalised ---------------------------------------------------------------------------------------


def find_add_norm(name: str) -> Callable[..., Iterator[Match | Refusal]]:
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
        mark = norm["fingerprint"]
        if mark is not None:
            target, args, kwargs = add_written_norm(norm, mark, add)
        else:
            target = calls.add_layer_norm if name == "layer_norm" else calls.add_rms_norm
            args, kwargs = (x, residual), {**options(norm), **({"inplace": True} if add.inplace else {})}
        yield Match((add, norm), target, args, kwargs, (x, residual), kept=add.node)

    return find


def add_written_norm(norm: Op, mark: Fingerprint, add: Op) -> tuple[Any, ...]:
    body = mark.body
    weight = Attribute(f"{norm.child}.{mark.weight}") if mark.weight is not None else None
    args = (Attribute(str(norm.child)), add["input"], add["other"], weight, Attribute(f"{norm.child}.{mark.eps}"))
    kwargs = {"inplace": add.inplace, "casting": body.casting, "same": body.same}
    return calls.add_written_norm, args, kwargs


# -- norms spelled as functions ---------------------------------------------------------------------------------------


def permutation(view: View, node: Any) -> tuple[Op, tuple[int, ...]] | None:
    """A node as x.permute(...) by known numbers, none of them negative."""
    op = view.op(node, "permute")
    dims = op["dims"] if op is not None else None
    if op is None or not isinstance(dims, tuple | list) or not all(type(dim) is int for dim in dims):
        return None
    return op, tuple(dim % len(dims) for dim in dims)


def find_channel_layer_norm(view: View, node: Node) -> Iterator[Match | Refusal]:
    back = permutation(view, node)
    norm = view.op(back[0]["input"], "layer_norm") if back is not None else None
    forth = permutation(view, norm["input"]) if norm is not None else None
    if back is None or norm is None or forth is None or not is_function(norm):
        return
    rank = len(forth[1])
    if forth[1] != (0, *range(2, rank), 1) or back[1] != (0, rank - 1, *range(1, rank - 1)):
        return
    shape = norm["normalized_shape"]
    if not isinstance(shape, tuple | list) or len(shape) != 1:
        return
    x = forth[0]["input"]
    given = {"eps": 1e-5, **options(norm)}
    del given["normalized_shape"]
    yield Match((forth[0], norm, back[0]), functional.channel_layer_norm, (x,), given, (x,))


def find_norm_function(name: str) -> Callable[..., Iterator[Match | Refusal]]:
    def find(view: View, node: Node) -> Iterator[Match | Refusal]:
        op = view.op(node, name)
        if op is not None and op.child is None:  # a layer is for the module rules
            yield Match((op,), getattr(functional, name), (op["input"],), options(op), (op["input"],))

    return find


BATCH_NORM_ADD_ACT = GraphRule("batch_norm_add_act", "act(batch_norm(x) + residual)", find_batch_norm_add_act)
BATCH_NORM_ADD = GraphRule("batch_norm_add", "batch_norm(x) + residual", find_batch_norm_add)
BATCH_NORM_ACT = GraphRule("batch_norm_act", "act(batch_norm(x))", find_norm_act("batch_norm", batch_norm_act))
GROUP_NORM_ACT = GraphRule("group_norm_act", "act(group_norm(x))", find_norm_act("group_norm", group_norm_act))
INSTANCE_NORM_ACT = GraphRule(
    "instance_norm_act", "act(instance_norm(x))", find_norm_act("instance_norm", instance_norm_act)
)
ADD_LAYER_NORM = GraphRule("add_layer_norm", "s = x + residual and layer_norm(s)", find_add_norm("layer_norm"))
ADD_RMS_NORM = GraphRule("add_rms_norm", "s = x + residual and rms_norm(s)", find_add_norm("rms_norm"))
CHANNEL_LAYER_NORM = GraphRule(
    "channel_layer_norm", "layer_norm of an image over its channels, between two permutes", find_channel_layer_norm
)
NORM_FUNCTIONS = tuple(
    GraphRule(name, f"F.{name}", find_norm_function(name))
    for name in ("batch_norm", "group_norm", "instance_norm", "layer_norm", "rms_norm")
)

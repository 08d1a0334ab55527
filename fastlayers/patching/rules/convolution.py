"""Convolutions: with their bias and an activation, with a BatchNorm, and of a tensor with other uses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.fx import Node
from torch.nn.utils.parametrize import is_parametrized

from fastlayers import functional
from fastlayers.ops import squeeze_excite
from fastlayers.patching.capture.trace import record_child
from fastlayers.patching.ir.operations import Attribute, Op
from fastlayers.patching.ir.view import View, is_fresh
from fastlayers.patching.reasons import Refusal
from fastlayers.patching.rules.base import Gains, GraphRule, Kind, Match
from fastlayers.patching.rules.matchers import (
    ACTIVATION,
    NORM_WEIGHT,
    Find,
    activation,
    batch_norm_and_more,
    called,
    find_norm_act,
    find_squeeze_excite,
    may_be_written,
    only_adds,
)
from fastlayers.patching.runtime import calls
from fastlayers.patching.runtime.checks import is_plain_layer, is_sequential, original_class
from fastlayers.patching.runtime.convolution import (
    bound_by_memory,
    convolution_and_more,
    convolution_and_norm,
    convolution_batch_norm,
    forked_convolution,
    is_forkable,
)

__all__ = ["CONV_BATCH_NORM", "CONV_BIAS", "CONV_OF_PRODUCT", "FORKED_CONVOLUTION"]

# -- the bias ---------------------------------------------------------------------------------------------------------


def and_act(conv: Op, act: str) -> tuple[Any, ...]:
    return convolution_and_more, (Attribute(str(conv.child)), conv["input"]), {"act": act}


def find_alone(view: View, node: Node) -> Iterator[Match | Refusal]:
    conv = view.op(node, "convolution")
    if conv is not None and bound_by_memory(view.child(node)):
        x = conv["input"]
        yield Match((conv,), convolution_and_more, (Attribute(str(conv.child)), x), {}, (x,))


def with_bias(find: Find) -> Find:
    def find_biased(view: View, node: Node) -> Iterator[Match | Refusal]:
        for match in find(view, node):
            if isinstance(match, Match):
                layer: Any = view.root.get_submodule(str(match.ops[0].child))
                if layer.bias is None or is_parametrized(layer):
                    continue
            yield match

    return find_biased


def has_bias(view: View, node: Any) -> bool:
    conv = view.op(node, "convolution")
    return conv is not None and view.child(node).bias is not None


#: They share a name: one kernel adds the bias and computes what follows.
CONV_BIAS = (
    GraphRule(
        "conv_bias",
        "act(conv(x))",
        with_bias(find_norm_act("convolution", and_act)),
        (Kind(("convolution with a bias",), has_bias), ACTIVATION),
    ),
    GraphRule("conv_bias", "the bias of a convolution, in eval", with_bias(find_alone)),
)

# -- with a BatchNorm -------------------------------------------------------------------------------------------------


def find_batch_norm(view: View, node: Node) -> Iterator[Match]:
    """A convolution and a BatchNorm: alone, with what the rules for norms fused, or with an activation of its own."""
    absorbed: tuple[Op, ...] = ()
    target: Any = convolution_batch_norm
    kwargs: dict[str, Any] = {}
    merged = node.target is calls.batch_norm_layer
    if not merged and (node.op != "call_module" or len(node.args) != 1):
        return
    conv = convolution_before(view, node.args[1 if merged else 0])
    if conv is None:  # This comes first, since recording takes time.
        return
    if merged:
        layer, x, *rest = node.args
        norm = Op("batch_norm", node, {"input": x}, child=str(getattr(layer, "target", None)))
        kwargs = {**dict(zip(("residual",), rest, strict=False)), **node.kwargs}
    elif (plain := view.op(node, "batch_norm")) is not None and plain.child is not None and plain.recording is None:
        norm = plain
    elif (found := batch_norm_and_more(view, node, training=True)) is not None:
        norm, inner, after = found
        ending = closing_activation(inner, after)
        if ending is None:
            return
        absorbed, act = ending
        target, kwargs = convolution_and_norm, {} if act is None else {"act": act}
    else:
        return
    if not are_convolution_and_norm(view, conv, norm):
        return
    if conv.node.target is squeeze_excite.convolution_of_product:
        kwargs["of_product"] = True
    x = conv["input"]
    args = (Attribute(str(conv.child)), x, Attribute(str(norm.child)))
    tensors = (x, kwargs["residual"]) if kwargs.get("residual") is not None else (x,)
    yield Match((conv, norm), target, args, kwargs, tensors, absorbed=absorbed)


def convolution_before(view: View, node: Any) -> Op | None:
    """A node as the call of a convolution, perhaps on a product."""
    if isinstance(node, Node) and node.target is squeeze_excite.convolution_of_product:
        layer, x = node.args
        return Op("convolution", node, {"input": x}, child=str(getattr(layer, "target", None)))
    conv = view.op(node, "convolution")
    return conv if conv is not None and conv.child is not None else None


def closing_activation(inner: View, after: tuple[Node, ...]) -> tuple[tuple[Op, ...], str | None] | None:
    """The children that a norm calls, as identities and perhaps a final activation, and the name of that."""
    ops: list[Op] = []
    for position, call in enumerate(after, 1):
        if (op := inner.op(call, "identity")) is not None:
            ops.append(op)
        elif position == len(after) and (last := activation(inner, call)) is not None:
            return (*ops, last[0]), last[1]
        else:
            return None
    return tuple(ops), None


def are_convolution_and_norm(view: View, conv: Op, norm: Op) -> bool:
    """Whether these are a Conv2d without a bias and a BatchNorm2d, or a recorded subclass of it."""
    layer: Any = view.root.get_submodule(str(conv.child))
    batch_norm: Any = view.root.get_submodule(str(norm.child))
    original = original_class(batch_norm)
    return (
        original_class(layer) is nn.Conv2d
        and layer.bias is None
        and not is_parametrized(layer)
        and not is_parametrized(batch_norm)
        and (original is nn.BatchNorm2d or (norm.recording is not None and issubclass(original, nn.BatchNorm2d)))
    )


def lacks_bias(view: View, node: Any) -> bool:
    conv = view.op(node, "convolution")
    return conv is not None and original_class(view.child(node)) is nn.Conv2d and view.child(node).bias is None


def with_operands(*wanted: str) -> Find:
    """A rule's ``find`` for those with exactly these of "residual" and "act"."""

    def find(view: View, node: Node) -> Iterator[Match | Refusal]:
        for match in find_batch_norm(view, node):
            if match.kwargs.keys() & {"residual", "act"} == set(wanted):
                yield match

    return find


CONV_BATCH_NORM = (
    GraphRule("conv_batch_norm_add_act", "act(batch_norm(conv(x)) + residual)", with_operands("residual", "act")),
    GraphRule("conv_batch_norm_add", "batch_norm(conv(x)) + residual", with_operands("residual")),
    GraphRule("conv_batch_norm_act", "act(batch_norm(conv(x)))", with_operands("act")),
    GraphRule(
        "conv_batch_norm",
        "batch_norm(conv(x)), under autocast one node of autograd",
        with_operands(),
        (Kind(("Conv2d without a bias",), lacks_bias), called("batch_norm", weight=NORM_WEIGHT)),
    ),
)

# -- of a product -----------------------------------------------------------------------------------------------------


def find_of_product(view: View, node: Node) -> Iterator[Match | Refusal]:
    conv = view.op(node, "convolution")
    gate = conv["input"] if conv is not None and conv.child is not None else None
    if conv is None or not isinstance(gate, Node) or gate.op != "call_module" or not makes_product(view, gate):
        return
    args = (Attribute(str(conv.child)), gate)
    yield Match((conv,), squeeze_excite.convolution_of_product, args, {}, (gate,))


def makes_product(view: View, node: Node) -> bool:
    """Whether a child returns its input times a gate that it computes from the mean of the input."""
    recording = record_child(view.root, view.child(node), 1) if len(node.args) == 1 and not node.kwargs else None
    if recording is None:
        return False
    *_, output = recording.graph.nodes
    return any(True for _ in find_squeeze_excite(View(recording.graph, view.root), output.args[0]))  # type: ignore[arg-type]


CONV_OF_PRODUCT = GraphRule(
    "conv_of_product", "conv(squeeze_excite(x)), whose backward recomputes it", find_of_product, when=Gains.ON_GPU
)

# -- a tensor that is used again --------------------------------------------------------------------------------------


def find_forked_convolution(view: View, node: Node) -> Iterator[Match | Refusal]:
    if node.op != "call_module" or len(node.args) != 1 or node.kwargs or not isinstance(node.args[0], Node):
        return
    x, path = node.args[0], str(node.target)
    if not is_forkable(view.child(node)):
        return
    later = tuple(user for user in x.users if view.position[user] > view.position[node])
    if later and all(only_reads(view, x, user) for user in later) and not may_be_written(view, x, node, later):
        convolution = Op("convolution", node, {"input": x}, child=path)
        args = (Attribute(path), x)
        condition = (is_forkable, path)
        yield Match((convolution,), forked_convolution, args, {}, (x,), forked=later, condition=condition)


def only_reads(view: View, x: Node, user: Node) -> bool:
    """Whether a node makes a new tensor from x. autograd forbids to overwrite the second result of the fork."""
    if view.op(user, "identity") is not None:
        return all(only_reads(view, user, its) for its in user.users)
    if user.op == "call_module":
        child: Any = view.child(user)
        while is_sequential(child) and child._modules and is_plain_layer(child):
            child = next(iter(child._modules.values()))
        return is_plain_layer(child) and is_fresh(original_class(child))
    if user.target in (calls.batch_norm_layer, calls.batch_norm):
        return bool(user.kwargs.get("overwritten") != "residual")
    return user.target in (functional.batch_norm, functional.add_relu) or only_adds(view, x, user)


FORKED_CONVOLUTION = GraphRule(
    "forked_convolution", "conv(x) and x, with one gradient", find_forked_convolution, when=Gains.IN_TRAINING
)

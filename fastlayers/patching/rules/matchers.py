"""Matchers that several rules share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch.fx import Node
from torch.nn.modules.batchnorm import _BatchNorm

from fastlayers import functional
from fastlayers.patching.ir.operations import Attribute, Op
from fastlayers.patching.ir.spellings import NORM_ATTRIBUTES
from fastlayers.patching.ir.view import JOINED_NORMS, View, counts_batch, forked, is_about_rank
from fastlayers.patching.reasons import Reason, Refusal
from fastlayers.patching.rules.base import Kind, Match
from fastlayers.patching.runtime import calls

__all__ = [
    "ACTIVATION",
    "ACT_WEIGHT",
    "GATE",
    "HANDWRITTEN_ACTIVATION",
    "NORM_WEIGHT",
    "PRODUCT",
    "RELU",
    "SUM",
    "Find",
    "activation",
    "addition",
    "batch_norm_and_more",
    "called",
    "dropout",
    "ending",
    "ending_norm",
    "find_excite",
    "find_norm_act",
    "find_norm_add",
    "find_norm_add_act",
    "find_squeeze_excite",
    "is_function",
    "is_parameter",
    "linear_parameters",
    "may_be_written",
    "mean_over_space",
    "only_adds",
    "options",
    "skip_identities",
]

Find: TypeAlias = Callable[..., Iterator[Match | Refusal]]


# -- single operations ------------------------------------------------------------------------------------------------


def activation(view: View, node: Any, *, handwritten: bool = False) -> tuple[Op, str] | None:
    """A node as an activation that a fused norm can apply, and its name.

    Args:
        view, node: the graph and the node.
        handwritten: whether to accept handwritten ones, whose dtype is known only in a call.
    """
    op = view.op(node, "gelu") or view.op(node, "quick_gelu") or view.op(node)
    if op is None or (op["handwritten"] is not None and not handwritten):
        return None
    if op["handwritten"] is not None:
        return op, str(op["handwritten"])
    if op.name in ("relu", "silu", "hardswish", "quick_gelu"):
        return op, op.name
    if op.name == "relu6" and (op["min_val"] or 0.0, op["max_val"] or 6.0) == (0.0, 6.0):
        return op, op.name
    if op.name == "leaky_relu" and op["negative_slope"] in (None, 0.01):
        return op, op.name
    if op.name == "gelu" and op["approximate"] in (None, "none", "tanh"):
        return op, "gelu_tanh" if op["approximate"] == "tanh" else "gelu"
    return None


def skip_identities(view: View, node: Any) -> tuple[Any, tuple[Op, ...]]:
    """The node before any ``nn.Identity``, and these identities in order."""
    passed: tuple[Op, ...] = ()
    while (op := view.op(node, "identity")) is not None:
        node, passed = op["input"], (op, *passed)
    return node, passed


def ending_norm(view: View, node: Any, name: str) -> Op | None:
    """A node as a norm, or as a Sequential that ends with one."""
    return view.op(node, name) or view.last_op(node, name)


def addition(view: View, node: Any) -> Op | Refusal | None:
    """The node as x + y of two tensors."""
    op = view.op(node, "add")
    if op is None or not (view.is_tensor(op["input"]) and view.is_tensor(op["other"])):
        return None
    if op["alpha"] not in (None, 1):
        return Refusal(Reason.ALPHA, f"{node}: alpha={op['alpha']}")
    return op


def dropout(drop: Op) -> tuple[Any, Any]:
    """The probability of a dropout, and whether it is in training mode."""
    if drop.child is not None:
        return Attribute(f"{drop.child}.p"), Attribute(f"{drop.child}.training")
    return drop.operands.get("p", 0.5), drop.operands.get("training", True)


#: Methods that give a parameter another shape.
VIEWS = ("view", "reshape", "unsqueeze")


def is_parameter(view: View, value: Any) -> bool:
    """Whether an operand is a parameter or a buffer of the module, in some shape."""
    if isinstance(value, Node) and value.op == "call_method" and value.target in VIEWS:
        return is_parameter(view, value.args[0])
    return view.is_parameter(value)


def linear_parameters(
    view: View, linear: Op
) -> tuple[tuple[Any, Any], tuple[torch.Tensor | None, torch.Tensor | None]]:
    """The weight and the bias of a linear layer, as operands and as their present tensors, where known."""
    if linear.child is not None:
        layer: Any = view.root.get_submodule(linear.child)
        return (Attribute(f"{linear.child}.weight"), Attribute(f"{linear.child}.bias")), (layer.weight, layer.bias)
    weight, bias = linear["weight"], linear["bias"]
    return (weight, bias), (view.example(weight), view.example(bias))


# -- norms, and what follows them -------------------------------------------------------------------------------------


def options(op: Op) -> dict[str, Any]:
    """The operands of a norm without its input, by the names in torch's function."""
    if is_function(op):
        return {name: value for name, value in op.operands.items() if name != "input"}
    return {name: Attribute(f"{op.child}.{name}") for name in NORM_ATTRIBUTES[op.name]}


def is_function(op: Op) -> bool:
    """Whether an operation has its operands itself. Those of a layer of torch are attributes of the layer."""
    return op.child is None or op.recording is not None


def find_norm_act(name: str, call: Callable[[Op, str], tuple[Any, ...]]) -> Find:
    def find(view: View, node: Node) -> Iterator[Match | Refusal]:
        found = activation(view, node)
        if found is None:
            return
        before, passed = skip_identities(view, found[0]["input"])
        norm = ending_norm(view, before, name)
        if norm is not None and norm["act"] is None:
            target, args, kwargs = call(norm, found[1])
            yield Match((norm, *passed, found[0]), target, args, kwargs, (norm["input"],))

    return find


def find_norm_add(name: str, call: Callable[[Op, Any, str | None], tuple[Any, ...]]) -> Find:
    """A rule's ``find`` for norm(x) + residual. The residual may be the result of such a norm too."""

    def find(view: View, node: Any) -> Iterator[Match | Refusal]:
        plain = view.op(node, "add")
        if plain is None:
            return
        operands = [skip_identities(view, plain[side]) for side in ("input", "other")]
        norms = [ending_norm(view, before, name) for before, _ in operands]
        add = addition(view, node) if any(norms) else None
        if isinstance(add, Refusal):
            yield add
        if not isinstance(add, Op) or add["input"] is add["other"]:
            return
        sides = zip(norms, operands, (add["other"], add["input"]), ("norm", "residual"), strict=True)
        # A norm in this forward comes before one at the end of a Sequential.
        for norm, (_, passed), residual, overwritten in sorted(
            sides, key=lambda side: bool(side[0] and side[0].sequentials)
        ):
            if norm is not None and norm["residual"] is None and norm["act"] is None:
                target, args, kwargs = call(norm, residual, overwritten if add.inplace else None)
                yield Match((norm, *passed, add), target, args, kwargs, (norm["input"], residual))

    return find


def find_norm_add_act(name: str, call: Callable[[Op, Any, str | None], tuple[Any, ...]]) -> Find:
    find_add = find_norm_add(name, call)

    def find(view: View, node: Node) -> Iterator[Match | Refusal]:
        found = activation(view, node)
        if found is None:
            return
        before, passed = skip_identities(view, found[0]["input"])
        for match in find_add(view, before):
            if isinstance(match, Refusal):
                yield match
            else:
                ops, kwargs = (*match.ops, *passed, found[0]), {**match.kwargs, "act": found[1]}
                yield Match(ops, match.target, match.args, kwargs, match.tensors)

    return find


def only_adds(view: View, x: Node, user: Node) -> bool:
    """Whether a node only adds x to something, out of place."""
    op = view.op(user, "add")
    if op is not None:
        return not op.inplace and op.child is None
    return user.target in JOINED_NORMS and forked(user) is None and not user.kwargs.get("inplace", False)


def may_be_written(view: View, x: Node, norm: Node, later: tuple[Node, ...]) -> bool:
    """Whether x, or a tensor that may share its memory, may be overwritten before a later use."""
    last = max(view.position[user] for user in later)
    shared = {x}
    for node in view.position:
        if node is norm or shared.isdisjoint(node.all_input_nodes):  # The norm returns a new tensor.
            continue
        if view.position[norm] < view.position[node] < last and view.written(node):
            return True
        if view.memory(node) - {node}:
            shared.add(node)
    return False


# -- a BatchNorm ------------------------------------------------------------------------------------------------------


def batch_norm_and_more(view: View, node: Node, training: bool = False) -> tuple[Op, View, tuple[Node, ...]] | None:
    """A child that, in a mode, computes a BatchNorm and then calls children of its own, like timm's BatchNormAct2d.

    Returns the operation, the recording of the child, and the nodes in it that call those children.
    """
    child = view.child(node) if node.op == "call_module" else None
    if not isinstance(child, _BatchNorm) or len(node.args) != 1 or node.kwargs:
        return None
    path = str(node.target)
    recording = view.record(path, 1, training)
    if recording is None:
        return None
    argument, *nodes, output = recording.graph.nodes
    result, after = output.args[0], list[Node]()
    while isinstance(result, Node) and result.op == "call_module" and len(result.args) == 1 and not result.kwargs:
        nodes.remove(result)
        after.append(result)
        result = result.args[0]
    inner = View(recording.graph, view.root)
    norm = inner.op(result, "batch_norm")
    if norm is None or norm["input"] is not argument or norm["training"] is not training or norm["eps"] != child.eps:
        return None
    if training:
        if norm["momentum"] is None or norm["momentum"] != child.momentum:
            return None
        counts = [other for other in nodes if counts_batch(other, f"{path}.num_batches_tracked")]
        if len(counts) != 1:
            return None
        nodes.remove(counts[0])
    for name in ("running_mean", "running_var", "weight", "bias"):
        given = norm[name]
        if given is not getattr(child, name) and getattr(given, "target", None) != f"{path}.{name}":
            return None
    if not all(other is norm.node or other.op == "get_attr" or is_about_rank(other) for other in nodes):
        return None
    operands = {"input": node.args[0]}
    return Op("batch_norm", node, operands, child=path, recording=recording), inner, tuple(reversed(after))


# -- kinds of operations, as a report calls them ----------------------------------------------------------------------


#: How much operations make a reader expect a fusion: a norm more than an activation, this more than a sum or a product,
#: which most forwards have.
NORM_WEIGHT, ACT_WEIGHT, SUM_WEIGHT = 3, 2, 1


def called(*names: str, weight: int = 0) -> Kind:
    """The operations of these names."""
    return Kind(names, lambda view, node: any(view.op(node, name) for name in names), weight)


def ending(name: str) -> Kind:
    """A norm of this name, or a Sequential that ends with one."""
    return Kind((name,), lambda view, node: ending_norm(view, node, name) is not None, NORM_WEIGHT)


def is_data(view: View, value: Any) -> bool:
    """Whether a value is a tensor, and not a parameter: adding a bias and scaling are part of a layer."""
    return view.is_tensor(value) and not is_parameter(view, value)


def is_product(view: View, node: Any) -> bool:
    mul = view.op(node, "mul")
    return mul is not None and is_data(view, mul["input"]) and is_data(view, mul["other"])


def is_sum(view: View, node: Any) -> bool:
    add = addition(view, node)
    return isinstance(add, Op) and is_data(view, add["input"]) and is_data(view, add["other"])


ACTIVATION = Kind(
    ("relu", "silu", "gelu", "hardswish", "relu6", "quick_gelu", "leaky_relu of slope 0.01"),
    lambda view, node: activation(view, node) is not None,
    ACT_WEIGHT,
)
HANDWRITTEN_ACTIVATION = Kind(
    ACTIVATION.words, lambda view, node: activation(view, node, handwritten=True) is not None, ACT_WEIGHT
)
RELU = called("relu", weight=ACT_WEIGHT)
SUM = Kind(("sum of two tensors",), is_sum, SUM_WEIGHT)
PRODUCT = Kind(("product of two tensors",), is_product, SUM_WEIGHT)


# -- squeeze-and-excite -----------------------------------------------------------------------------------------------


#: Functions and methods with results between 0 and 1, and layers by name, since libraries have their own. This only
#: decides which products are worth a kernel; any product would be correct.
SQUEEZING = frozenset({torch.sigmoid, F.sigmoid, F.hardsigmoid, "sigmoid"})
SQUEEZING_LAYERS = frozenset({"sigmoid", "hardsigmoid"})


def is_gate(view: View, node: Any) -> bool:
    if not isinstance(node, Node):
        return False
    if node.op == "call_module":
        return type(view.child(node)).__name__.lower() in SQUEEZING_LAYERS
    return node.target in SQUEEZING


GATE = Kind(("sigmoid", "hardsigmoid"), is_gate)


def find_excite(view: View, node: Node) -> Iterator[Match | Refusal]:
    mul = view.op(node, "mul")
    if mul is None or mul.inplace:
        return
    x, y = mul["input"], mul["other"]
    if view.is_tensor(x) and view.is_tensor(y) and (is_gate(view, x) or is_gate(view, y)):
        yield Match((mul,), functional.mul, (x, y), {}, (x, y))


#: The spatial dimensions of an image (N, C, H, W).
SPACE = frozenset({(2, 3), (3, 2), (-2, -1), (-1, -2)})


def mean_over_space(view: View, node: Any) -> Op | None:
    """A node as the mean of an image over its spatial dimensions, which are kept."""
    op = view.op(node, "mean") or view.op(node, "adaptive_avg_pool2d")
    if op is None or not view.is_tensor(op["input"]):
        return None
    if op.name == "adaptive_avg_pool2d":
        return op if op["output_size"] in (1, (1, 1), [1, 1]) else None
    dims = op["dim"]
    known = isinstance(dims, tuple | list) and all(type(dim) is int for dim in dims) and tuple(dims) in SPACE
    return op if known and op["keepdim"] is True and op["dtype"] is None else None


def find_squeeze_excite(view: View, node: Node) -> Iterator[Match | Refusal]:
    for match in find_excite(view, node):
        assert isinstance(match, Match)
        for x, gate in (match.args, match.args[::-1]):
            before = [user for user in x.users if view.position[user] < view.position[node]]
            if is_gate(view, gate) and any(mean_over_space(view, user) is not None for user in before):
                yield Match(match.ops, calls.excite, (x, gate), {}, (x, gate))

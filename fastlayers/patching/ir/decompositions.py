"""Decompositions: operations that a graph computes in smaller steps, such as norms, GELUs and stochastic depth.

A graph that Dynamo captures does not show the modules and functions of a library, but has the dtype and the shape of
every tensor. A known body (:mod:`fastlayers.patching.ir.fingerprints` has the norms) is matched node by node, backwards
from the last one. Casts without an effect are optional.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from fastlayers.ops.reference import LOW_PRECISION, autocasts
from fastlayers.patching.ir.fingerprints import EXPRESSIONS, Body, Expression, UnreadableError, expression_of, operation
from fastlayers.patching.ir.nodes import Nodes
from fastlayers.patching.ir.operations import Op

__all__ = ["DECOMPOSITIONS", "permutation"]

TANH = {"approximate": "tanh"}
#: Activations that models write out: the operation, its operands, its name in :mod:`calls`, and its code.
ACTIVATIONS: tuple[tuple[str, dict[str, Any], str, str], ...] = (
    ("gelu", TANH, "gelu_pow", "0.5 * x * (1.0 + (0.7978845608028654 * (x + 0.044715 * x.pow(3.0))).tanh())"),
    ("gelu", TANH, "gelu_mul", "0.5 * x * (1.0 + (x * 0.7978845608028654 * (1.0 + 0.044715 * x * x)).tanh())"),
    ("quick_gelu", {}, "quick_gelu", "x * (1.702 * x).sigmoid()"),
)
#: Some write sqrt(2 / pi) with eight digits.
CONSTANT_TOLERANCE = 1e-8
COMMUTATIVE = frozenset({"mul", "add"})


# -- reading nodes as an expression -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """A partial match of nodes with an expression: the values of its names, and the dtypes that must hold."""

    names: Mapping[str, Any] = field(default_factory=dict)
    nodes: frozenset[Node] = frozenset()
    casts: tuple[tuple[Expression, torch.dtype], ...] = ()
    tests: tuple[tuple[Expression, bool], ...] = ()

    def name(self, name: str, value: Any) -> Reading | None:
        if name in self.names:
            return self if self.names[name] is value else None
        return replace(self, names={**self.names, name: value})

    def holds(self) -> bool:
        """Whether casts have the dtypes of the expression, and its branches are the ones that were taken."""
        if any(self.dtype(expression) is not dtype for expression, dtype in self.casts):
            return False
        return all(self.true(test) in (None, truth) for test, truth in self.tests)

    def dtype(self, expression: Expression) -> Any:
        if expression[0] == "constant":
            return expression[1]
        value = self.names.get(expression[1][-1])
        return value.meta["example_value"].dtype if isinstance(value, Node) else None

    def true(self, test: Expression) -> bool | None:
        """The outcome of a test of dtypes; None for a test of a number that was known at the capture."""
        if test[0] != "in":
            return None
        return self.dtype(test[1]) in [self.dtype(item) for item in test[2][1:]]


def leaf(value: Any) -> Expression:
    if isinstance(value, Node):
        return ("node", value)
    if isinstance(value, tuple | list):
        return ("items", *map(leaf, value))
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return ("constant", float(value) if number else value)


def step(node: Node) -> Expression | None:
    """A node as one operation on nodes and constants, in the spelling of expressions."""
    if node.op == "call_method":
        name = str(node.target)
    elif node.op == "call_function":
        name = getattr(node.target, "__name__", "")
        if node.target not in (getattr(torch, name, None), getattr(operator, name, None)):
            return None
    else:
        return None
    try:
        return operation(name, [leaf(arg) for arg in node.args], {k: leaf(v) for k, v in node.kwargs.items()})
    except UnreadableError:
        return None


def dtype_of(view: Nodes, value: Expression) -> torch.dtype | None:
    example = view.example(value[1])
    return example.dtype if example is not None else None


def read(view: Nodes, known: Expression, value: Expression, reading: Reading) -> Iterator[Reading]:
    """The ways to match a value with a known expression."""
    kind, *operands = known
    if kind == "constant":
        given, expected = value[1], operands[0]
        if isinstance(given, float) and math.isclose(given, expected, rel_tol=CONSTANT_TOLERANCE):
            yield reading
    elif kind in ("input", "attribute"):
        named = reading.name(known[-1], value[1])
        if named is not None:
            yield named
    elif kind == "if":
        for branch, truth in ((operands[1], True), (operands[2], False)):
            yield from read(view, branch, value, replace(reading, tests=(*reading.tests, (operands[0], truth))))
    elif value[0] == "node":
        found = step(value[1])
        if kind in ("float", "cast"):
            target = ("constant", torch.float32) if kind == "float" else operands[1]
            yield from read_cast(view, target, operands[0], value, found, reading)
        elif found is not None and found[0] == kind and len(found) == len(known):
            inside = replace(reading, nodes=reading.nodes | {value[1]})
            orders = [found[1:], found[:0:-1]] if kind in COMMUTATIVE else [found[1:]]
            for order in orders:
                yield from read_all(view, operands, order, inside)


def read_all(
    view: Nodes, known: list[Expression], values: tuple[Expression, ...], reading: Reading
) -> Iterator[Reading]:
    if not known:
        yield reading
        return
    for first in read(view, known[0], values[0], reading):
        yield from read_all(view, known[1:], values[1:], first)


def read_cast(
    view: Nodes, target: Expression, known: Expression, value: Expression, found: Expression | None, reading: Reading
) -> Iterator[Reading]:
    """A value as a cast to a dtype, or as a value of that dtype without a cast."""
    dtype = dtype_of(view, value)
    if dtype is None:
        return
    cast = replace(reading, casts=(*reading.casts, (target, dtype)))
    if found is not None and found[0] in ("float", "cast"):
        yield from read(view, known, found[1], replace(cast, nodes=reading.nodes | {value[1]}))
    yield from read(view, known, value, cast)


def readings(view: Nodes, known: Expression, node: Node) -> Iterator[tuple[Reading, tuple[Op, ...]]]:
    """The ways to match a node with a known expression, each with all operations of it but the last."""
    for reading in read(view, known, ("node", node), Reading()):
        if reading.holds() and node in reading.nodes:
            yield reading, parts(view, reading.nodes - {node})


def parts(view: Nodes, nodes: frozenset[Node]) -> tuple[Op, ...]:
    return tuple(part(node) for node in sorted(nodes, key=lambda node: view.position[node]))


def part(node: Node) -> Op:
    inplace = node.op == "call_method" and str(node.target).endswith("_")
    name = "draw" if node.target == "bernoulli_" else "part"
    return Op(name, node, {"input": node.args[0]} if inplace else {}, inplace)


# -- norms ------------------------------------------------------------------------------------------------------------


def read_norm(name: str) -> Callable[[Nodes, Node], Op | None]:
    bodies = tuple((body, expression) for body, expression in EXPRESSIONS if body.op == name)

    def find(view: Nodes, node: Node) -> Op | None:
        for body, expression in bodies if view.example(node) is not None else ():
            for reading, inner in readings(view, expression, node):
                operands = norm_operands(view, body, reading.names)
                if operands is not None:
                    return last(name, node, operands, inner)
        return None

    return find


def last(name: str, node: Node, operands: dict[str, Any], inner: tuple[Op, ...]) -> Op:
    return replace(part(node), name=name, operands=operands, inplace=False, parts=inner)


def norm_operands(view: Nodes, body: Body, names: Mapping[str, Any]) -> dict[str, Any] | None:
    """The operands of a norm, if its casting order is the one of the body; see :func:`norm_calls.computes_norm`."""
    x, weight, eps = view.example(names["input"]), names.get("weight"), names["eps"]
    if x is None or x.dtype not in (torch.float32, *LOW_PRECISION) or not isinstance(eps, float) or not x.dim():
        return None
    if body.casting in (None, "torch") and x.dtype is not torch.float32 and may_autocast(view, x.device.type):
        return None  # torch's norms follow autocast, elementwise code does not.
    size = view.size(names["input"], -1)
    if size is None:
        return None
    if weight is not None:
        scale = view.example(weight)
        if scale is None or scale.dim() != 1 or view.size(weight, 0) != size:
            return None
        if scale.dtype is not x.dtype and (body.same or scale.dtype is not torch.float32):
            return None
    operands = {"input": names["input"], "normalized_shape": (size,), "weight": weight, "eps": eps}
    return {**operands, "bias": None} if body.casting is None else {**operands, "casting": body.casting}


def may_autocast(view: Nodes, kind: str) -> bool:
    """Whether autocast is on around a captured graph, which Dynamo guards, or in a part of it."""
    names = {getattr(node.target, "__name__", "") for node in view.position if node.op == "call_function"}
    return autocasts(kind) or "_enter_autocast" in names


def permutation(view: Nodes, node: Any) -> tuple[Op, tuple[int, ...]] | None:
    """A node as x.permute(...) with known dimensions, given as non-negative numbers."""
    op = view.op(node, "permute")
    dims = op["dims"] if op is not None else None
    if op is None or not isinstance(dims, tuple | list) or not all(type(dim) is int for dim in dims):
        return None
    return op, tuple(dim % len(dims) for dim in dims)


def read_channel_norm(view: Nodes, node: Node) -> Op | None:
    """A layer_norm of an image over its channels, between two permutes."""
    back = permutation(view, node)
    norm = view.op(back[0]["input"], "layer_norm") if back is not None else None
    forth = permutation(view, norm["input"]) if norm is not None else None
    if back is None or norm is None or forth is None or (norm.child is not None and norm.recording is None):
        return None
    rank = len(forth[1])
    if forth[1] != (0, *range(2, rank), 1) or back[1] != (0, rank - 1, *range(1, rank - 1)):
        return None
    shape = norm["normalized_shape"]
    if not isinstance(shape, tuple | list) or len(shape) != 1:
        return None
    operands = {"eps": 1e-5, **norm.operands, "input": forth[0]["input"]}
    del operands["normalized_shape"]
    return last("channel_layer_norm", node, operands, (forth[0], norm))


# -- activations ------------------------------------------------------------------------------------------------------


def read_activation(name: str) -> Callable[[Nodes, Node], Op | None]:
    bodies = tuple(
        (operands, form, expression_of(code)) for known, operands, form, code in ACTIVATIONS if known == name
    )

    def find(view: Nodes, node: Node) -> Op | None:
        result = view.example(node)
        for operands, form, expression in bodies:
            for reading, inner in readings(view, expression, node):
                value = reading.names["input"]
                x = view.example(value)
                # Under autocast pow gives float32.
                if x is not None and result is not None and x.dtype.is_floating_point and x.dtype is result.dtype:
                    return last(name, node, {"input": value, **operands}, inner)
                if result is None and isinstance(value, Node) and view.is_tensor(value):  # only a call knows its dtype
                    return last(name, node, {"input": value, **operands, "handwritten": form}, inner)
        return None

    return find


# -- stochastic depth -------------------------------------------------------------------------------------------------


def read_drop_path(view: Nodes, node: Node) -> Op | None:
    """``x * x.new_empty(shape).bernoulli_(keep).div_(keep)``, with one draw for each sample."""
    mul = view.op(node, "mul")
    if mul is None or mul.inplace:
        return None
    x, divided = view.example(mul["input"]), mul["other"]
    div = view.op(divided, "div")
    if x is None or div is None or not div.inplace or div["rounding_mode"] is not None:
        return None
    drawn, keep = div["input"], div["other"]
    if not is_method(drawn, "bernoulli_") or len(drawn.args) != 2 or drawn.kwargs or drawn.args[1] != keep:
        return None
    empty = drawn.args[0]
    noise = view.example(empty)
    made = is_method(empty, "new_empty") or (isinstance(empty, Node) and empty.target is torch.empty)
    if noise is None or not made or noise.dtype is not x.dtype or noise.dim() != x.dim() or not x.dim():
        return None
    if noise.device != x.device or not isinstance(keep, float) or not 0.0 < keep < 1.0 or 1.0 - (1.0 - keep) != keep:
        return None
    if str(noise.shape[0]) != str(x.shape[0]) or any(str(size) != "1" for size in noise.shape[1:]):
        return None
    operands = {"input": mul["input"], "drop_prob": 1.0 - keep, "training": True}
    return last("drop_path", node, operands, parts(view, frozenset({empty, drawn, divided})))


def is_method(node: Any, name: str) -> bool:
    return isinstance(node, Node) and node.op == "call_method" and node.target == name


#: The functions that match them, by the name of the operation.
DECOMPOSITIONS: dict[str | None, Callable[[Nodes, Node], Op | None]] = {
    "rms_norm": read_norm("rms_norm"),
    "layer_norm": read_norm("layer_norm"),
    "channel_layer_norm": read_channel_norm,
    "gelu": read_activation("gelu"),
    "quick_gelu": read_activation("quick_gelu"),
    "drop_path": read_drop_path,
}

"""Gated units: the activation of one tensor times another, in the MLPs of language models, and the next layer."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from fastlayers import functional
from fastlayers.patching.ir.operations import Op
from fastlayers.patching.ir.view import View
from fastlayers.patching.reasons import Refusal
from fastlayers.patching.rules.base import Gains, GraphRule, Kind, Match
from fastlayers.patching.rules.matchers import (
    ACT_WEIGHT,
    PRODUCT,
    Find,
    activation,
    linear_parameters,
    skip_identities,
)
from fastlayers.patching.runtime import calls

__all__ = ["GATED_LINEAR", "GATES"]


@dataclass(frozen=True)
class Gate:
    """act(gate) * up in a graph."""

    act: Op
    mul: Op
    name: str  # of the activation
    up: Any
    first: bool  # whether the activation is the first operand of the product

    @property
    def operands(self) -> tuple[Any, Any]:
        return self.act["input"], self.up

    @property
    def overwritten(self) -> str | None:
        """The operand that an in-place product overwrote, as :func:`calls.gated` takes it."""
        return ("gate" if self.first else "up") if self.mul.inplace else None


def gates(view: View, node: Any, acts: Container[str]) -> Iterator[Gate]:
    """A node as a product with the activation of a gate, in either order."""
    mul = view.op(node, "mul")
    if mul is None or not (view.is_tensor(mul["input"]) and view.is_tensor(mul["other"])):
        return
    first, second = mul["input"], mul["other"]
    for gated, up in ((first, second), (second, first)):
        found = activation(view, gated, handwritten=True)
        if found is not None and gated is not up and found[1] in acts:
            yield Gate(found[0], mul, found[1], up, gated is first)


#: The options of geglu for each GELU. Handwritten ones are resolved in a call.
GELUS: dict[str, dict[str, Any]] = {"gelu": {}, "gelu_tanh": {"approximate": "tanh"}, "gelu_pow": {}, "gelu_mul": {}}


def find_gated(function: Callable[..., Any], acts: dict[str, dict[str, Any]]) -> Find:
    def find(view: View, node: Node) -> Iterator[Match | Refusal]:
        for gate in gates(view, node, acts):
            ops, both = (gate.act, gate.mul), gate.operands
            if gate.mul.inplace or not gate.first or gate.act["handwritten"]:
                yield Match(ops, calls.gated, both, {"act": gate.name, "overwritten": gate.overwritten}, both)
            else:
                yield Match(ops, function, both, acts[gate.name], both)

    return find


def find_gated_linear(view: View, node: Node) -> Iterator[Match | Refusal]:
    linear = view.op(node, "linear")
    if linear is None or linear.recording is not None:
        return
    product, passed = skip_identities(view, linear["input"])
    for gate in gates(view, product, ("silu", "relu", *GELUS)):
        args = (*gate.operands, *linear_parameters(view, linear)[0], gate.name)
        options = {"gate_first": gate.first and not gate.mul.inplace, "overwritten": gate.overwritten}
        yield Match((gate.act, gate.mul, *passed, linear), calls.gated_linear, args, options, gate.operands)


def is_gated(view: View, node: Any) -> bool:
    found = activation(view, node, handwritten=True)
    return found is not None and found[1] in ("silu", "relu", *GELUS)


GATED = Kind(("silu", "gelu", "relu"), is_gated, ACT_WEIGHT), PRODUCT
#: The public functions, with the activations and options of each.
GATES = (
    GraphRule("swiglu", "silu(gate) * up", find_gated(functional.swiglu, {"silu": {}}), GATED, Gains.IF_LARGE),
    GraphRule("geglu", "gelu(gate) * up", find_gated(functional.geglu, GELUS), GATED, Gains.IF_LARGE),
    GraphRule("reglu", "relu(gate) * up", find_gated(functional.reglu, {"relu": {}}), GATED, Gains.IF_LARGE),
)
GATED_LINEAR = GraphRule(
    "gated_linear", "linear(act(gate) * up), as a gated MLP ends", find_gated_linear, when=Gains.IF_LARGE
)

"""Gated units: the activation of one tensor times another, in the MLPs of language models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from torch.fx import Node

from fastlayers import functional
from fastlayers.patching import calls
from fastlayers.patching.graph import View
from fastlayers.patching.reasons import Refusal
from fastlayers.patching.rules.base import GraphRule, Match
from fastlayers.patching.rules.norm import activation

__all__ = ["GATES"]

Find: TypeAlias = Callable[[View, Node], Iterator[Match | Refusal]]


def find_gated(function: Callable[..., Any], acts: dict[str, dict[str, Any]]) -> Find:
    def find(view: View, node: Node) -> Iterator[Match | Refusal]:
        mul = view.op(node, "mul")
        if mul is None or not (view.is_tensor(mul["input"]) and view.is_tensor(mul["other"])):
            return
        first, second = mul["input"], mul["other"]
        for gated, up in ((first, second), (second, first)):
            found = activation(view, gated)
            if found is None or gated is up or found[1] not in acts:
                continue
            act, name = found
            both = (act["input"], up)
            if mul.inplace or gated is second:
                written = ("gate" if gated is first else "up") if mul.inplace else None
                yield Match((act, mul), calls.gated, both, {"act": name, "written": written}, both)
            else:
                yield Match((act, mul), function, both, acts[name], both)

    return find


#: The public functions, and the activations that each stands for with its options.
GATES = (
    GraphRule("swiglu", "silu(gate) * up", find_gated(functional.swiglu, {"silu": {}})),
    GraphRule(
        "geglu", "gelu(gate) * up", find_gated(functional.geglu, {"gelu": {}, "gelu_tanh": {"approximate": "tanh"}})
    ),
    GraphRule("reglu", "relu(gate) * up", find_gated(functional.reglu, {"relu": {}})),
)

"""Activations with a kernel of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.fx import Node

from fastlayers import functional
from fastlayers.patching.ir.view import View
from fastlayers.patching.reasons import Reason, Refusal
from fastlayers.patching.rules.base import Gains, GraphRule, Match
from fastlayers.patching.rules.matchers import Find
from fastlayers.patching.runtime import calls

__all__ = ["ACTIVATIONS"]


def find_activation(name: str, written_out: bool = False) -> Find:
    def find(view: View, node: Node) -> Iterator[Match | Refusal]:
        op = view.op(node, name)
        if op is None or op.child is not None or op.inplace or bool(op.parts) is not written_out:
            return  # The module rules replace layers.
        if op["handwritten"] is not None:
            yield Match((op,), calls.handwritten_activation, (op["input"], op["handwritten"]), {}, (op["input"],))
            return
        if op["approximate"] == "tanh" and not written_out:
            yield Refusal(Reason.SAVES_NOTHING, "torch's kernel for tanh is at the memory limit")
            return
        options: dict[str, Any] = {k: v for k, v in op.operands.items() if k not in ("input", "inplace")}
        yield Match((op,), getattr(functional, name), (op["input"],), options, (op["input"],))

    return find


#: The activations whose layers are in DROP_IN, and those that libraries write out.
ACTIVATIONS = (
    GraphRule("gelu", "F.gelu", find_activation("gelu"), when=Gains.IF_LARGE_ON_GPU),
    GraphRule("mish", "F.mish", find_activation("mish"), when=Gains.IF_LARGE_ON_GPU),
    GraphRule("glu", "F.glu", find_activation("glu"), when=Gains.IF_LARGE),
    GraphRule("gelu_tanh", "0.5 * x * (1 + tanh(...))", find_activation("gelu", written_out=True), when=Gains.ON_GPU),
    GraphRule("quick_gelu", "x * sigmoid(1.702 * x)", find_activation("quick_gelu", written_out=True)),
)

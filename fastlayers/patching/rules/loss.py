"""Losses on logits: cross_entropy, and nll_loss of a log_softmax, which is the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.fx import Node

from fastlayers import functional
from fastlayers.patching.ir.view import View
from fastlayers.patching.reasons import Refusal
from fastlayers.patching.rules.base import GraphRule, Match
from fastlayers.patching.runtime import calls

__all__ = ["CROSS_ENTROPY", "NLL_LOSS"]


def find_cross_entropy(view: View, node: Node) -> Iterator[Match | Refusal]:
    op = view.op(node, "cross_entropy")
    if op is None or op["input"] is None or op["target"] is None:
        return
    options: dict[str, Any] = {k: v for k, v in op.operands.items() if k not in ("input", "target")}
    operands = (op["input"], op["target"])
    yield Match((op,), functional.cross_entropy, operands, options, operands)


def find_nll_loss(view: View, node: Node) -> Iterator[Match | Refusal]:
    loss = view.op(node, "nll_loss")
    logs = view.op(loss["input"], "log_softmax") if loss is not None else None
    if loss is None or logs is None or not isinstance(logs["dim"], int) or logs["dtype"] is not None:
        return
    options: dict[str, Any] = {k: v for k, v in loss.operands.items() if k not in ("input", "target")}
    operands = (logs["input"], loss["target"])
    yield Match((logs, loss), calls.nll_loss_of_log_softmax, (*operands, logs["dim"]), options, operands)


CROSS_ENTROPY = GraphRule("cross_entropy", "F.cross_entropy", find_cross_entropy)
NLL_LOSS = GraphRule("nll_loss", "F.nll_loss(F.log_softmax(x, dim=1), target)", find_nll_loss)

"""A linear layer with its activation, whose kernel adds the bias, and the linear layer after them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.fx import Node

from fastlayers.patching.ir.view import View
from fastlayers.patching.reasons import Reason, Refusal
from fastlayers.patching.rules.base import Gains, GraphRule, Kind, Match
from fastlayers.patching.rules.matchers import (
    HANDWRITTEN_ACTIVATION,
    activation,
    dropout,
    linear_parameters,
    skip_identities,
)
from fastlayers.patching.runtime import calls

__all__ = ["LINEAR_ACT", "MLP"]


def has_bias(view: View, node: Any) -> bool:
    linear = view.op(node, "linear")
    return linear is not None and linear.recording is None and linear_parameters(view, linear)[1][1] is not None


BIASED = Kind(("linear layer with a bias",), has_bias)


def find_linear_act(view: View, node: Node) -> Iterator[Match | Refusal]:
    found = activation(view, node, handwritten=True)
    if found is None:
        return
    before, passed = skip_identities(view, found[0]["input"])
    linear = view.op(before, "linear")
    if linear is None or linear.recording is not None:
        return
    operands, (weight, bias) = linear_parameters(view, linear)
    if weight is None or bias is None:
        return
    if bias.dtype != weight.dtype:
        yield Refusal(Reason.BIAS_DTYPE, linear.child or str(before))
        return
    x = linear["input"]
    yield Match((linear, *passed, found[0]), calls.linear_act, (x, *operands, found[1]), {}, (x,))


def find_mlp(view: View, node: Node) -> Iterator[Match | Refusal]:
    linear = view.op(node, "linear")
    if linear is None or linear.recording is not None:
        return
    before, passed = skip_identities(view, linear["input"])
    drop = view.op(before, "dropout")
    dropped: tuple[Any, ...] = ()
    if drop is not None and not drop.inplace:
        dropped = dropout(drop)
        before, earlier = skip_identities(view, drop["input"])
        passed = (*earlier, drop, *passed)
    for match in find_linear_act(view, before) if isinstance(before, Node) else ():
        if isinstance(match, Match):
            ops, args = (*match.ops, *passed, linear), (*match.args, *linear_parameters(view, linear)[0], *dropped)
            yield Match(ops, calls.mlp, args, {}, match.tensors)


MLP = GraphRule("mlp", "linear(dropout(act(linear(x))))", find_mlp, when=Gains.IF_LARGE)
LINEAR_ACT = GraphRule(
    "linear_act",
    "act(linear(x)), the bias added by the activation's kernel",
    find_linear_act,
    (BIASED, HANDWRITTEN_ACTIVATION),
    Gains.IF_LARGE,
)

"""relu and addition, which join the branches of a network, and products with gates."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node

from fastlayers import functional
from fastlayers.patching.ir.view import View
from fastlayers.patching.reasons import Refusal
from fastlayers.patching.rules.base import Gains, GraphRule, Match
from fastlayers.patching.rules.matchers import (
    GATE,
    PRODUCT,
    RELU,
    SUM,
    addition,
    find_excite,
    find_squeeze_excite,
    mean_over_space,
)
from fastlayers.patching.runtime import calls

__all__ = ["ADD_RELU", "EXCITE", "RELU_ADD", "RELU_ADD_BIAS", "SQUEEZE", "SQUEEZE_EXCITE"]


def find_add_relu(view: View, node: Node) -> Iterator[Match | Refusal]:
    relu = view.op(node, "relu")
    add = addition(view, relu["input"]) if relu is not None else None
    if isinstance(add, Refusal):
        yield add
    elif relu is not None and add is not None:
        x, y = add["input"], add["other"]
        yield Match((add, relu), calls.add_relu_ if add.inplace else functional.add_relu, (x, y), {}, (x, y))


def find_relu_add(view: View, node: Node) -> Iterator[Match | Refusal]:
    plain, add = view.op(node, "add"), addition(view, node)
    if plain is None or add is None:
        return
    if isinstance(add, Refusal):
        if view.op(plain["input"], "relu") or view.op(plain["other"], "relu"):
            yield add
        return
    x, y = add["input"], add["other"]
    for branch, rest in ((x, y), (y, x)):
        relu = view.op(branch, "relu")
        if relu is None or branch is rest:
            continue
        if not add.inplace:
            yield Match((relu, add), functional.relu_add, (relu["input"], rest), {}, (relu["input"], rest))
        elif branch is x:
            yield Match((relu, add), calls.relu_add_, (relu["input"], rest), {}, (relu["input"], rest))
        else:
            yield Match((relu, add), calls.add_relu_to_, (rest, relu["input"]), {}, (relu["input"], rest))


def find_relu_add_bias(view: View, node: Node) -> Iterator[Match | Refusal]:
    outer = view.op(node, "add")
    if outer is None or outer.inplace or outer["alpha"] not in (None, 1):
        return
    for inner, bias in ((outer["input"], outer["other"]), (outer["other"], outer["input"])):
        # Adding 0 only changes the dtype of integers, so 0 is not a bias.
        if inner is bias or not (view.is_tensor(bias) or (view.is_number(bias) and bias != 0)):
            continue
        tensors = (bias,) if view.is_tensor(bias) else ()
        for match in find_relu_add(view, inner) if isinstance(inner, Node) else ():
            if isinstance(match, Match) and match.target is functional.relu_add:
                yield Match(
                    (*match.ops, outer), functional.relu_add, (*match.args, bias), {}, (*match.tensors, *tensors)
                )


def find_squeeze(view: View, node: Node) -> Iterator[Match | Refusal]:
    """The mean of an image that is excited later: :data:`SQUEEZE_EXCITE` came before. The product gets the link."""
    op = mean_over_space(view, node)
    if op is None:
        return
    x = op["input"]
    excited = [user for user in x.users if user.target is calls.excite and user.args[0] is x]
    later = tuple(user for user in excited if view.position[user] > view.position[node])[:1]
    if later:
        yield Match((op,), calls.squeeze, (x, op["dim"]), {}, (x,), forked=later)  # a pooling layer has no dim


RELU_ADD_BIAS = GraphRule("relu_add_bias", "relu(x) + y + bias", find_relu_add_bias)
ADD_RELU = GraphRule("add_relu", "relu(x + y)", find_add_relu, (SUM, RELU))
RELU_ADD = GraphRule("relu_add", "relu(x) + y", find_relu_add, (RELU, SUM))
EXCITE = GraphRule(
    "mul", "x * sigmoid(gate), broadcast over space (squeeze-and-excite)", find_excite, (GATE, PRODUCT), Gains.ON_GPU
)
SQUEEZE_EXCITE = GraphRule(
    "squeeze_excite", "x * sigmoid(gate), where the mean of x over space is used too", find_squeeze_excite
)
SQUEEZE = GraphRule("squeeze", "that mean", find_squeeze)

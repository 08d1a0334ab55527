"""Losses on logits: cross_entropy, of a linear layer too, and nll_loss of a log_softmax, which is the same."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, cast

from torch.fx import Node

from fastlayers import functional
from fastlayers.patching.ir.operations import Op
from fastlayers.patching.ir.view import View
from fastlayers.patching.reasons import Reason, Refusal
from fastlayers.patching.rules.base import GraphRule, Match
from fastlayers.patching.rules.matchers import ACT_WEIGHT, called, linear_parameters
from fastlayers.patching.runtime import calls, python

__all__ = ["CROSS_ENTROPY", "LINEAR_CROSS_ENTROPY", "NLL_LOSS"]


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


# -- the logits of a linear layer -------------------------------------------------------------------------------------

#: With fewer classes the logits are small, and often needed.
VOCABULARY = 1024
#: Methods that bring logits into the shape that cross_entropy takes.
RESHAPES = frozenset({"view", "reshape"})
LAST_TWO_MERGED = frozenset({(0, 1), (0, -2)})


def head_of(view: View, node: Any) -> tuple[Op, tuple[Op, ...], str, Any] | None:
    """A node as the logits of a linear layer with a vocabulary of classes, in the shape that cross_entropy takes.

    Returns:
        The linear layer, the operation after it, which shape that is, as :func:`calls.linear_cross_entropy` has it,
        and the number of columns that a reshape says.
    """
    shape, columns, after = "same", None, tuple[Op, ...]()
    if isinstance(node, Node) and node.op == "call_method" and not node.kwargs and isinstance(node.args[0], Node):
        x, *rest = node.args
        if node.target in RESHAPES and len(rest) == 2:
            shape, columns = "rows", rest[1]
        elif node.target == "flatten" and tuple(rest) in LAST_TWO_MERGED:
            shape = "merged" if rest[1] == 1 else "rows"
        elif node.target == "transpose" and tuple(rest) in ((1, 2), (2, 1)):
            shape = "classes second"
        else:
            return None
        after, node = (Op("part", node, {}),), x
    linear = view.op(node, "linear")
    if linear is None or linear.recording is not None:
        return None
    (operand, _), (weight, _) = linear_parameters(view, linear)
    if weight is None and isinstance(operand, Node) and operand.op == "get_attr":
        weight = operator.attrgetter(str(operand.target))(view.root)
    return (linear, after, shape, columns) if weight is not None and weight.shape[0] >= VOCABULARY else None


def sizes_of(view: View, logits: Node) -> dict[Node, None]:
    """The nodes that ask for the shape of the logits, and the numbers that are computed of it."""
    found: dict[Node, None] = {}
    pending = list(logits.users)
    while pending:
        node = pending.pop()
        if node not in found and (view.is_number(node) or node.target is python.unpack):
            found[node] = None
            pending += node.users
    return found


def is_last_size(node: Any, logits: Node) -> bool:
    """Whether a node is the number of classes by the shape of the logits: ``logits.size(-1)``, say."""
    if not isinstance(node, Node):
        return False
    if node.op == "call_method" and node.target == "size":
        return node.args == (logits, -1)
    if node.target is not operator.getitem or not isinstance(node.args[0], Node):
        return False
    sizes, index = cast("tuple[Node, Any]", node.args)
    if sizes.target is python.unpack:
        (sizes, count), last = cast("tuple[Node, int]", sizes.args), index
        index = -1 if last == count - 1 else last
    by_shape = sizes.target is getattr and sizes.args == (logits, "shape")
    return index == -1 and (by_shape or (sizes.target == "size" and sizes.args == (logits,)))


def find_linear_cross_entropy(view: View, node: Node) -> Iterator[Match | Refusal]:
    loss = view.op(node, "cross_entropy")
    found = head_of(view, loss["input"]) if loss is not None else None
    if loss is None or found is None:
        return
    linear, after, shape, columns = found
    sizes, target, flat = sizes_of(view, linear.node), loss["target"], False
    if is_last_size(columns, linear.node):
        columns = None
    elif columns == -1 or columns in sizes:
        return
    viewed = isinstance(target, Node) and target.op == "call_method" and target.target in RESHAPES
    if viewed and len(target.args) == 2 and target.args[1] in sizes:
        after, target, flat = (*after, Op("part", target, {})), target.args[0], True
    inside = {linear.node, *sizes, *(op.node for op in after), node}
    outside = next((user for part in (linear.node, *sizes) for user in part.users if user not in inside), None)
    if outside is not None:
        how = "which it returns" if outside.op == "output" else f"used by {outside}"
        yield Refusal(Reason.LOGITS_USED, f"{linear.node}, {how}")
        return
    parts = sorted((*(Op("part", size, {}) for size in sizes), *after), key=lambda op: view.position[op.node])
    options: dict[str, Any] = {k: v for k, v in loss.operands.items() if k not in ("input", "target")}
    options["class_weight"] = options.pop("weight", None)
    options |= {"shape": shape, "columns": columns, "flat_target": flat}
    args = (linear["input"], *linear_parameters(view, linear)[0], target)
    yield Match((linear, *parts, loss), calls.linear_cross_entropy, args, options, (linear["input"], target))


LINEAR_CROSS_ENTROPY = GraphRule(
    "linear_cross_entropy",
    "cross_entropy(linear(x), target), the logits never whole in memory",
    find_linear_cross_entropy,
)
CROSS_ENTROPY = GraphRule("cross_entropy", "F.cross_entropy", find_cross_entropy)
NLL_LOSS = GraphRule(
    "nll_loss",
    "F.nll_loss(F.log_softmax(x, dim=1), target)",
    find_nll_loss,
    (called("log_softmax"), called("nll_loss", weight=ACT_WEIGHT)),
)

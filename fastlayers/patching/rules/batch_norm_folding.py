"""A BatchNorm after a convolution or a linear layer, folded into that layer in eval."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.fx import Node
from torch.nn.utils.parametrize import is_parametrized

from fastlayers.patching.ir.operations import Attribute, Leading, Op
from fastlayers.patching.ir.spellings import spell
from fastlayers.patching.ir.view import View
from fastlayers.patching.reasons import Reason, Refusal
from fastlayers.patching.rules.base import Deferred, GraphRule, Match
from fastlayers.patching.rules.matchers import (
    Find,
    batch_norm_and_more,
    find_norm_act,
    find_norm_add,
    find_norm_add_act,
)
from fastlayers.patching.runtime.checks import original_class
from fastlayers.patching.runtime.folded_layers import folded, folded_and_more, folded_sum, may_fold

__all__ = ["FOLD_BATCH_NORM"]

# What follows a folded layer finds it by this name.
spell("folded", "layer norm input residual act overwritten", folded)
spell("folded", "layer norm after input residual act overwritten", folded_and_more)

#: Layers that a BatchNorm folds into, with the BatchNorm of their dimension.
FOLDABLE: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: nn.BatchNorm1d,
    nn.Conv1d: nn.BatchNorm1d,
    nn.Conv2d: nn.BatchNorm2d,
    nn.Conv3d: nn.BatchNorm3d,
    nn.ConvTranspose1d: nn.BatchNorm1d,
    nn.ConvTranspose2d: nn.BatchNorm2d,
    nn.ConvTranspose3d: nn.BatchNorm3d,
}


def foldable(view: View, path: str, norm: Op) -> Refusal | None:
    """Why a norm cannot be folded into the layer at that path; None if it can."""
    layer: Any = view.root.get_submodule(path)
    batch_norm: Any = view.root.get_submodule(str(norm.child))
    kind = next((kind for kind in FOLDABLE if isinstance(layer, kind)), None)
    if kind is None:
        return Refusal(Reason.NO_RULE, path)
    original = original_class(batch_norm)
    fits = original is FOLDABLE[kind] or (norm.recording is not None and issubclass(original, FOLDABLE[kind]))
    if is_parametrized(layer) or is_parametrized(batch_norm):
        return Refusal(Reason.PARAMETRIZED, path)
    if original_class(layer) is not kind or not fits:
        return Refusal(Reason.SUBCLASS, path)
    if batch_norm.training:
        return Refusal(Reason.TRAINING, str(norm.child))
    if batch_norm.running_mean is None or batch_norm.running_var is None:
        return Refusal(Reason.NO_STATISTICS, str(norm.child))
    return None


def find_folding(view: View, node: Node) -> Iterator[Match | Refusal]:
    plain = view.op(node, "batch_norm")
    after: tuple[Node, ...] = ()
    if plain is not None and plain.recording is None:
        norm = plain
    elif (found := batch_norm_and_more(view, node)) is not None:
        norm, _, after = found
    else:
        return
    before = norm["input"]
    if norm.child is None or not isinstance(before, Node) or before.op != "call_module":
        return
    if len(before.args) != 1 or before.kwargs:
        return
    path, x = str(before.target), before.args[0]
    refusal = foldable(view, path, norm)
    if refusal is not None:
        if refusal.reason is not Reason.NO_RULE:
            yield refusal
        return
    convolution = Op("convolution", before, {"input": x}, child=path)
    args: tuple[Any, ...] = (Attribute(path), Attribute(norm.child), x)
    if after:
        children = Deferred(lambda graph: tuple(graph.get_attr(str(call.target)) for call in after))
        args = (*args[:2], children, x)
    target = folded_and_more if after else folded
    yield Match((convolution, norm), target, args, {}, (x,), condition=(may_fold, path, norm.child))


# -- what follows a folded layer --------------------------------------------------------------------------------------


def branch(view: View, node: Any) -> tuple[tuple[Op, ...], tuple[Any, ...], tuple[Any, ...] | None] | None:
    """A node as a folded layer, or as a Sequential that ends with a layer and a norm to fold.

    Returns its operations, the arguments of :func:`folded` and, for a new folding, its condition.
    """
    op = view.op(node, "folded")
    if op is not None:
        return ((op,), op.node.args, None) if op.node.target is folded and len(op.operands) == 3 else None
    norm = view.last_op(node, "batch_norm")
    if norm is None:
        return None
    *before, path = norm["input"].paths
    if foldable(view, path, norm) is not None:
        return None
    x = Leading(node, tuple(before)) if before else node.args[0]
    convolution = Op("convolution", node, {"input": x}, child=path)
    return (convolution, norm), (Attribute(path), Attribute(str(norm.child)), x), (may_fold, path, norm.child)


def find_folded_sum(find: Find) -> Find:
    """A rule's ``find`` for sums whose operands are both folded layers."""

    def find_both(view: View, node: Node) -> Iterator[Match | Refusal]:
        for match in find(view, node):
            if isinstance(match, Match) and match.target is folded:
                other = branch(view, match.kwargs["residual"])
                if other is not None:
                    ops, args, condition = other
                    kwargs = {name: value for name, value in match.kwargs.items() if name != "residual"}
                    yield Match(
                        (*ops, *match.ops), folded_sum, (*match.args, *args), kwargs, match.tensors, condition=condition
                    )
            yield match

    return find_both


def folded_act(norm: Op, act: str) -> tuple[Any, ...]:
    return norm.node.target, norm.node.args, {**norm.node.kwargs, "act": act}


def folded_add(norm: Op, residual: Any, overwritten: str | None) -> tuple[Any, ...]:
    return norm.node.target, norm.node.args, {"residual": residual, "overwritten": overwritten}


#: They share a name, since what follows a folded layer is part of the folding.
FOLD_BATCH_NORM = tuple(
    GraphRule("fold_batch_norm", doc, find)
    for doc, find in (
        ("batch_norm of a convolution or linear layer, in eval", find_folding),
        ("act(folded(x) + residual)", find_folded_sum(find_norm_add_act("folded", folded_add))),
        ("folded(x) + residual", find_folded_sum(find_norm_add("folded", folded_add))),
        ("act(folded(x))", find_norm_act("folded", folded_act)),
    )
)

"""A BatchNorm after a convolution or a linear layer, which in eval is one such layer."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.fx import Node
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrize import is_parametrized

from fastlayers.patching import calls
from fastlayers.patching.folding import folded, folded_and_more, may_fold
from fastlayers.patching.graph import Attribute, Op, View, original_class
from fastlayers.patching.reasons import Reason, Refusal
from fastlayers.patching.rules.base import GraphRule, Match
from fastlayers.patching.trace import record_child

__all__ = ["FOLD_BATCH_NORM"]

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


def is_about_rank(node: Node) -> bool:
    """Whether a node serves to assert the number of dimensions, which the folded layer looks at too."""
    if node.target is getattr or node.target == "dim":
        return node.args[1:] in ((), ("ndim",))
    if node.target is operator.eq:
        return all(is_about_rank(operand) for operand in node.all_input_nodes)
    return node.target in (calls.format_string, torch._assert)


def batch_norm_and_more(view: View, node: Node) -> tuple[Op, tuple[str, ...]] | None:
    """A child that in eval is a BatchNorm and then the children that it calls: timm's BatchNormAct2d, say."""
    child = view.child(node) if node.op == "call_module" else None
    if not isinstance(child, _BatchNorm) or len(node.args) != 1 or node.kwargs:
        return None
    path, recording = str(node.target), record_child(view.root, child, 1, training=False)
    if recording is None:
        return None
    argument, *nodes, output = recording.graph.nodes
    result, after = output.args[0], []
    while isinstance(result, Node) and result.op == "call_module" and len(result.args) == 1 and not result.kwargs:
        nodes.remove(result)
        after.append(str(result.target))
        result = result.args[0]
    norm = View(recording.graph, view.root).op(result, "batch_norm")
    if norm is None or norm["input"] is not argument or norm["training"] is not False or norm["eps"] != child.eps:
        return None
    for name in ("running_mean", "running_var", "weight", "bias"):
        given = norm[name]
        if given is not getattr(child, name) and getattr(given, "target", None) != f"{path}.{name}":
            return None
    if not all(other is norm.node or other.op == "get_attr" or is_about_rank(other) for other in nodes):
        return None
    operands = {"input": node.args[0]}
    return Op("batch_norm", node, operands, child=path, recording=recording), tuple(reversed(after))


def find_folding(view: View, node: Node) -> Iterator[Match | Refusal]:
    plain = view.op(node, "batch_norm")
    found = (plain, ()) if plain is not None and plain.recording is None else batch_norm_and_more(view, node)
    if found is None:
        return
    norm, after = found
    before = norm["input"]
    if norm.child is None or not isinstance(before, Node) or before.op != "call_module":
        return
    layer: Any = view.child(before)
    batch_norm: Any = view.child(node)
    kind = next((kind for kind in FOLDABLE if isinstance(layer, kind)), None)
    if kind is None or len(before.args) != 1 or before.kwargs:
        return
    original = original_class(batch_norm)
    fits = original is FOLDABLE[kind] or (norm.recording is not None and issubclass(original, FOLDABLE[kind]))
    if is_parametrized(layer) or is_parametrized(batch_norm):
        yield Refusal(Reason.PARAMETRIZED, str(before.target))
    elif original_class(layer) is not kind or not fits:
        yield Refusal(Reason.SUBCLASS, str(before.target))
    elif batch_norm.training:
        yield Refusal(Reason.TRAINING, str(norm.child))
    elif batch_norm.running_mean is None or batch_norm.running_var is None:
        yield Refusal(Reason.NO_STATISTICS, str(norm.child))
    else:
        path, x = str(before.target), before.args[0]
        convolution = Op("convolution", before, {"input": x}, child=path)
        args = (Attribute(path), Attribute(norm.child), x, *map(Attribute, after))
        target = folded_and_more if after else folded
        yield Match((convolution, norm), target, args, {}, (x,), condition=(may_fold, path, norm.child))


FOLD_BATCH_NORM = GraphRule("fold_batch_norm", "batch_norm of a convolution or linear layer, in eval", find_folding)

"""A BatchNorm after a convolution or a linear layer, which in eval is one such layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.fx import Node
from torch.nn.utils.parametrize import is_parametrized

from fastlayers.patching.folding import folded, may_fold
from fastlayers.patching.graph import Attribute, Op, View, original_class
from fastlayers.patching.reasons import Reason, Refusal
from fastlayers.patching.rules.base import GraphRule, Match

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


def find_folding(view: View, node: Node) -> Iterator[Match | Refusal]:
    norm = view.op(node, "batch_norm")
    before = norm["input"] if norm is not None and norm.recording is None else None
    if norm is None or norm.child is None or not isinstance(before, Node) or before.op != "call_module":
        return
    layer: Any = view.child(before)
    batch_norm: Any = view.child(node)
    kind = next((kind for kind in FOLDABLE if isinstance(layer, kind)), None)
    if kind is None or len(before.args) != 1 or before.kwargs:
        return
    if is_parametrized(layer) or is_parametrized(batch_norm):
        yield Refusal(Reason.PARAMETRIZED, str(before.target))
    elif original_class(layer) is not kind or original_class(batch_norm) is not FOLDABLE[kind]:
        yield Refusal(Reason.SUBCLASS, str(before.target))
    elif batch_norm.training:
        yield Refusal(Reason.TRAINING, str(norm.child))
    elif batch_norm.running_mean is None or batch_norm.running_var is None:
        yield Refusal(Reason.NO_STATISTICS, str(norm.child))
    else:
        path, x = str(before.target), before.args[0]
        convolution = Op("convolution", before, {"input": x}, child=path)
        args = (Attribute(path), Attribute(norm.child), x)
        yield Match((convolution, norm), folded, args, {}, (x,), condition=(may_fold, path, norm.child))


FOLD_BATCH_NORM = GraphRule("fold_batch_norm", "batch_norm of a convolution or linear layer, in eval", find_folding)

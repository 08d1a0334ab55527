"""What patching looks for. A rule is one small object; to add one, write it in its family's file and put it in a list.

A :class:`ModuleRule` replaces one torch layer by one fused layer. A :class:`GraphRule` looks at one node of the graph
of a forward and proposes matches, the largest first. It only has to recognise the structure: that a match is *safe*
(nothing else needs the intermediate results, no in-place operation is seen by anything else, no operand changes in
between, no hook of an absorbed child would be skipped) is checked for every rule alike in
:mod:`fastlayers.patching.rewrite`.
"""

from __future__ import annotations

from fastlayers.modules import DROP_IN
from fastlayers.patching.rules import bias_act, elementwise, fold, glu, norm, residual, softmax
from fastlayers.patching.rules.base import Deferred, GraphRule, Match, ModuleRule

__all__ = ["FOLDING_RULE", "GRAPH_RULES", "MODULE_RULES", "Deferred", "GraphRule", "Match", "ModuleRule"]

MODULE_RULES: tuple[ModuleRule, ...] = tuple(
    ModuleRule(layer.__name__, f"{layer.__name__} -> {fused.__name__}", layer, fused)
    for layer, fused in DROP_IN.items()
)

#: Tried in this order, each over the whole graph, so the larger fusions come first.
GRAPH_RULES: tuple[GraphRule, ...] = (
    norm.BATCH_NORM_ADD_ACT,
    norm.BATCH_NORM_ADD,
    norm.BATCH_NORM_ACT,
    norm.GROUP_NORM_ACT,
    norm.INSTANCE_NORM_ACT,
    norm.ADD_LAYER_NORM,
    norm.ADD_RMS_NORM,
    norm.CHANNEL_LAYER_NORM,
    *norm.NORM_FUNCTIONS,
    glu.GATED_LINEAR,
    *glu.GATES,
    residual.DROPOUT_ADD,
    residual.SCALE_ADD,
    bias_act.LINEAR_ACT,
    elementwise.RELU_ADD_BIAS,
    elementwise.ADD_RELU,
    elementwise.RELU_ADD,
    elementwise.EXCITE,
    softmax.SOFTMAX,
)

#: What :func:`fastlayers.fold_batch_norm` looks for; no part of patching.
FOLDING_RULE = fold.FOLD_BATCH_NORM

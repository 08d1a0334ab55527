"""The rules: what patching looks for. To add one, write it in its family's file and put it in a list here.
:func:`register_rule` registers a user's rule.

A :class:`ModuleRule` replaces one torch layer by one fused layer. A :class:`GraphRule` looks at one node of the graph
of a forward and proposes matches, the largest first. A rule only recognises a structure.
:mod:`fastlayers.patching.rewrite.safety` then checks each match: nothing else needs the intermediate results, nothing
else sees an in-place operation, no operand changes in between, and no hook of an absorbed child is skipped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import reduce
from operator import and_
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from fastlayers.modules import DROP_IN
from fastlayers.patching.rules import (
    activations,
    batch_norm_folding,
    bias_act,
    convolution,
    elementwise,
    glu,
    linear,
    loss,
    norm,
    residual,
    rotary,
    softmax,
)
from fastlayers.patching.rules.base import Deferred, Gains, GraphRule, Match, ModuleRule, always
from fastlayers.patching.runtime.checks import IdleTest, with_little, without_gradients, without_kernels

__all__ = [
    "FOLDING_RULES",
    "GRAPH_RULES",
    "MODULE_RULES",
    "Deferred",
    "Gains",
    "GraphRule",
    "Match",
    "ModuleRule",
    "graph_rules",
    "idle_tests",
    "module_rules",
    "register_rule",
]

#: Which layers of a class gain, and where they do; all and everywhere, if it is not here.
GAINING: dict[type[nn.Module], tuple[Callable[[Any], bool], Gains]] = {
    nn.Linear: (lambda layer: layer.bias is not None, Gains.IN_TRAINING),
    # torch's kernel for the other approximation is at the memory limit.
    nn.GELU: (lambda layer: layer.approximate == "none", Gains.IF_LARGE_ON_GPU),
    **dict.fromkeys((nn.ELU, nn.LayerNorm, nn.LogSoftmax), (always, Gains.IF_LARGE_ON_GPU)),
    **dict.fromkeys((nn.Mish, nn.Softmax, nn.Softplus), (always, Gains.IF_LARGE_ON_GPU)),
    **dict.fromkeys((nn.GLU, nn.GroupNorm), (always, Gains.IF_LARGE)),
    **dict.fromkeys((nn.MaxPool2d, nn.MultiheadAttention), (always, Gains.ON_GPU)),
}

MODULE_RULES: tuple[ModuleRule, ...] = (
    linear.ODD_LINEAR,
    *(
        ModuleRule(layer.__name__, f"{layer.__name__} -> {fused.__name__}", layer, fused, *GAINING.get(layer, ()))
        for layer, fused in DROP_IN.items()
    ),
)

#: Each rule runs over the whole graph before the next one, so the larger fusions come first.
GRAPH_RULES: tuple[GraphRule, ...] = (
    norm.BATCH_NORM_ADD_ACT,
    norm.BATCH_NORM_ADD,
    *norm.NORM_ACTS,
    *norm.ADD_NORMS,
    norm.CHANNEL_LAYER_NORM,
    *norm.FORKED_NORMS,
    convolution.FORKED_CONVOLUTION,
    *norm.CAST_NORMS,
    *norm.NORM_FUNCTIONS,
    loss.LINEAR_CROSS_ENTROPY,
    rotary.ROTARY,
    glu.GATED_LINEAR,
    *glu.GATES,
    residual.DROPOUT_ADD,
    residual.SCALE_ADD,
    bias_act.MLP,
    bias_act.LINEAR_ACT,
    linear.LINEAR,
    *activations.ACTIVATIONS,
    elementwise.RELU_ADD_BIAS,
    elementwise.ADD_RELU,
    elementwise.RELU_ADD,
    elementwise.SQUEEZE_EXCITE,
    elementwise.SQUEEZE,
    elementwise.EXCITE,
    convolution.CONV_OF_PRODUCT,
    *convolution.CONV_BATCH_NORM,
    *convolution.CONV_BIAS,
    loss.NLL_LOSS,
    loss.CROSS_ENTROPY,
    softmax.SOFTMAX,
    linear.SPLIT,
)

#: The rules of :func:`fastlayers.fold_batch_norm`.
FOLDING_RULES = batch_norm_folding.FOLD_BATCH_NORM


def idle_tests(names: Iterable[str]) -> tuple[IdleTest, ...]:
    """Tests of a call's first argument, of which one says whether rules of these names gain nothing; none if they
    always do."""
    when = {rule.name: rule.when for rule in graph_rules()} | {rule.name: rule.when for rule in module_rules()}
    shared = reduce(and_, (when.get(name, Gains.EVERYWHERE) for name in names), Gains.IN_TRAINING)
    if Gains.IN_TRAINING in shared:
        return (without_gradients,)
    tests = ((Gains.ON_GPU, without_kernels), (Gains.IF_LARGE, with_little))
    return tuple(test for gains, test in tests if gains in shared)


_registered: OrderedDict[int, GraphRule | ModuleRule] = OrderedDict()


def register_rule(rule: GraphRule | ModuleRule) -> RemovableHandle:
    """Register a rule of your own for all further patching in this process.

    Registered rules run before the rules of fastlayers, in the order of their registration. Models that are already
    patched, and graphs that are already compiled, stay as they are.

    Args:
        rule: a :class:`GraphRule`, which finds operations in the graph of a forward, or a :class:`ModuleRule`, which
            replaces modules of exactly one class. A rule need not prove its matches safe: the engine does.

    Returns:
        A handle: ``handle.remove()`` unregisters the rule, and so does leaving ``with register_rule(rule): ...``.

    Raises:
        TypeError: ``rule`` is not a rule, or the fused class of a ModuleRule is not a subclass of its layer.
        ValueError: a rule of that name exists.
    """
    if not isinstance(rule, GraphRule | ModuleRule):
        raise TypeError(f"expected a GraphRule or a ModuleRule, got {type(rule).__name__}")
    if isinstance(rule, ModuleRule) and not (issubclass(rule.layer, nn.Module) and issubclass(rule.fused, rule.layer)):
        raise TypeError(
            f"the rule {rule.name!r} must replace a layer by a subclass of it, and {rule.fused.__name__} is not a "
            f"subclass of {rule.layer.__name__}"
        )
    if rule.name in {known.name for known in graph_rules()} | {known.name for known in module_rules()}:
        raise ValueError(f"a rule called {rule.name!r} exists already")
    handle = RemovableHandle(_registered)
    _registered[handle.id] = rule
    return handle


def graph_rules() -> tuple[GraphRule, ...]:
    """The graph rules in the order in which they run."""
    return (*(rule for rule in _registered.values() if isinstance(rule, GraphRule)), *GRAPH_RULES)


def module_rules() -> tuple[ModuleRule, ...]:
    """The module rules in the order in which they run."""
    return (*(rule for rule in _registered.values() if isinstance(rule, ModuleRule)), *MODULE_RULES)

"""A convolution with a bias: one that an activation follows, or that is itself bound by memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.fx import Node
from torch.nn.utils.parametrize import is_parametrized

from fastlayers.patching.convolutions import convolution_and_more
from fastlayers.patching.graph import Attribute, Op, View
from fastlayers.patching.reasons import Refusal
from fastlayers.patching.rules.base import GraphRule, Match
from fastlayers.patching.rules.norm import Find, find_norm_act

__all__ = ["CONV_BIAS"]


def and_act(conv: Op, act: str) -> tuple[Any, ...]:
    return convolution_and_more, (Attribute(str(conv.child)), conv["input"]), {"act": act}


def bound_by_memory(layer: Any) -> bool:
    """Whether a convolution computes little for what it moves: depthwise, or of patches that do not overlap."""
    return layer.groups == layer.in_channels > 1 or (layer.stride == layer.kernel_size and max(layer.stride) > 1)


def find_alone(view: View, node: Node) -> Iterator[Match | Refusal]:
    conv = view.op(node, "convolution")
    if conv is not None and bound_by_memory(view.child(node)):
        x = conv["input"]
        yield Match((conv,), convolution_and_more, (Attribute(str(conv.child)), x), {}, (x,))


def with_bias(find: Find) -> Find:
    def find_biased(view: View, node: Node) -> Iterator[Match | Refusal]:
        for match in find(view, node):
            if isinstance(match, Match):
                layer: Any = view.root.get_submodule(str(match.ops[0].child))
                if layer.bias is None or is_parametrized(layer):
                    continue
            yield match

    return find_biased


#: Of one name: what follows, where something does, is in the kernel that adds the bias.
CONV_BIAS = tuple(
    GraphRule("conv_bias", doc, with_bias(find))
    for doc, find in (
        ("act(conv(x))", find_norm_act("convolution", and_act)),
        ("the bias of a convolution, in eval", find_alone),
    )
)

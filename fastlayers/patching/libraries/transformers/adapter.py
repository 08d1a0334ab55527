"""The adapter for transformers."""

from __future__ import annotations

import ast
import types
from collections import Counter
from typing import Any

from torch import nn

from fastlayers.patching.libraries.adapters import Adapter, RewrittenModel
from fastlayers.patching.libraries.transformers.attention_masks import RULE, fuse_masks, leave_out_masks
from fastlayers.patching.libraries.transformers.losses import fuse_losses

__all__ = ["TransformersAdapter"]

#: The base class of layers. Creating a subclass wraps the forward once more, and only the outermost wrapper
#: checkpoints: the wrapper of the generated class.
CHECKPOINTING = ("transformers.modeling_layers", "GradientCheckpointingLayer")
#: A forward passes this function to the registry of attentions, which calls it if the configuration is "eager".
EAGER_ATTENTION = "eager_attention_forward"


class TransformersAdapter(Adapter):
    """Layers with an activation checkpoint around their forward, models with a loss and with attention masks."""

    def plain_forward(self, forward: Any) -> Any:
        while getattr(forward, "__globals__", {}).get("__name__") == CHECKPOINTING[0] and hasattr(
            forward, "__wrapped__"
        ):
            forward = forward.__wrapped__
        return forward

    def may_subclass(self, cls: type) -> bool:
        return (cls.__module__, cls.__name__) == CHECKPOINTING

    def rewrite_model(self, module: nn.Module, excluded: frozenset[str]) -> RewrittenModel | None:
        return fuse_masks(module, fuse_losses(module, excluded))

    def rewrite_method(
        self, module: nn.Module, tree: ast.FunctionDef, function: types.FunctionType
    ) -> tuple[Counter[str], dict[str, Any]]:
        count, bound = leave_out_masks(module, tree, function)
        return Counter({RULE: count}), bound

    def lookups(self) -> frozenset[Any]:
        from transformers import AttentionInterface

        return frozenset({AttentionInterface.get_interface})

    def called_functions(self, module: nn.Module) -> frozenset[str]:
        implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
        return frozenset({EAGER_ATTENTION}) if implementation == "eager" else frozenset()

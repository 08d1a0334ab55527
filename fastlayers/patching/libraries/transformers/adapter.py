"""The adapter for transformers."""

from __future__ import annotations

import ast
import inspect
import sys
import types
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn

from fastlayers.patching.capture.caches import Slot
from fastlayers.patching.capture.rebuild import rewrap
from fastlayers.patching.libraries.adapters import Adapter, RewrittenModel
from fastlayers.patching.libraries.transformers.attention_masks import RULE, fuse_masks, leave_out_masks
from fastlayers.patching.libraries.transformers.loss_functions import fuse_losses

__all__ = ["TransformersAdapter"]

#: The base class of layers. Creating a subclass wraps the forward once more, and only the outermost wrapper
#: checkpoints: the wrapper of the generated class.
CHECKPOINTING = ("transformers.modeling_layers", "GradientCheckpointingLayer")
#: Where the caches of keys and values are.
CACHES = "transformers.cache_utils"
#: How attributes begin that count tokens: as a number in windows, which is another one in each call.
COUNTS = "cumulative_length"
#: Where the decorator is that takes arguments by their former names.
DEPRECATION = "transformers.utils.deprecation"
#: A forward passes this function to the registry of attentions, which calls it if the configuration is "eager".
EAGER_ATTENTION = "eager_attention_forward"


class TransformersAdapter(Adapter):
    """Layers with an activation checkpoint around their forward, models with a loss and with attention masks."""

    def plain_forward(self, forward: Any) -> Any:
        for wrapper in wrappers(forward):
            forward = wrapper.__wrapped__
        return forward

    def former_names(self, forward: Any) -> frozenset[str]:
        return frozenset(map(old_name, wrappers(forward))) - {""}

    def decorated(self, forward: Any, generated: Any) -> Any:
        outermost = next(filter(old_name, wrappers(forward)), None)
        return generated if outermost is None else rewrap(outermost, generated)

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
        from transformers.utils.generic import GeneralInterface

        # Of attentions and of experts; users may add their own. Before transformers 5 they are subscripted.
        interfaces = (GeneralInterface, *GeneralInterface.__subclasses__())
        names = ("get_interface", "__getitem__")
        return frozenset(filter(None, (vars(interface).get(name) for interface in interfaces for name in names)))

    def slot(self, cache: Any, number: int) -> Slot | None:
        if type(cache).__module__ != CACHES or type(cache).__name__ not in ("DynamicCache", "StaticCache"):
            return None
        layers = getattr(cache, "layers", ())  # Before transformers 5 it may have other attributes.
        if number >= len(layers) or (dynamic := getattr(sys.modules[CACHES], "DynamicLayer", None)) is None:
            return None
        layer = layers[number]
        counts = [name for name, value in vars(layer).items() if name.startswith(COUNTS) and type(value) is int]
        return Slot(cache, layer, layer.is_initialized and (bool(counts) or isinstance(layer, dynamic)), counts)

    def called_functions(self, module: nn.Module) -> frozenset[str]:
        implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
        return frozenset({EAGER_ATTENTION}) if implementation == "eager" else frozenset()


def wrappers(forward: Any) -> Iterator[Any]:
    """The functions around a forward that decorators of the library returned, the outermost first."""
    while wrapped_by(forward) == CHECKPOINTING[0] or old_name(forward):
        yield forward
        forward = forward.__wrapped__


def wrapped_by(function: Any) -> str:
    """The module of the decorator that returned a function; empty for a plain one, and for what is no function."""
    return str(getattr(function, "__globals__", {}).get("__name__", "")) if hasattr(function, "__wrapped__") else ""


def old_name(function: Any) -> str:
    """The former name of an argument, if a decorator returned the function that lets it be given by that name."""
    if wrapped_by(function) != DEPRECATION:
        return ""
    return str(inspect.getclosurevars(function).nonlocals.get("old_name", ""))

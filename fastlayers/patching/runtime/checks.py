"""What is asked about modules and tensors, by the engine once and by generated code on every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)

from fastlayers.ops.dispatch import PLAIN, is_plain

__all__ = [
    "Casts",
    "cast_dtype",
    "casts_input",
    "hooked",
    "is_plain_layer",
    "is_sequential",
    "no_hooks",
    "original_class",
    "plain",
    "plain_any",
    "untouched",
]


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module without what fastlayers put in its place."""
    return getattr(type(module), "__dict__", {}).get("__fastlayers_original__", type(module))  # type: ignore[no-any-return]


def no_hooks(*modules: nn.Module) -> bool:
    """Whether nobody would see (or change) the inputs and outputs of these modules through a hook."""
    if _global_forward_hooks or _global_forward_pre_hooks or _global_backward_hooks or _global_backward_pre_hooks:
        return False
    for module in modules:
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
            return False
    return True


def plain(module: nn.Module, layer: type[nn.Module]) -> bool:
    """Whether ``module`` is still exactly a ``layer``, patched or not: its forward is known without calling it."""
    kind = type(module)
    return getattr(kind, "__fastlayers_original__", kind) is layer and "forward" not in module.__dict__


def untouched(*pairs: tuple[nn.Module, type[nn.Module]]) -> bool:
    """:func:`plain` of modules and their layers, and :func:`no_hooks` of the modules.

    Spelled out, for it is most of the host's time of a guard: of 21 children 2.7 us instead of 7.4.
    """
    if _global_forward_hooks or _global_forward_pre_hooks or _global_backward_hooks or _global_backward_pre_hooks:
        return False
    for module, layer in pairs:
        kind, own = type(module), module.__dict__
        if (
            (kind is not layer and getattr(kind, "__fastlayers_original__", kind) is not layer)
            or "forward" in own
            or own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
        ):
            return False
    return True


def plain_any(module: nn.Module, layers: frozenset[type[nn.Module]]) -> bool:
    """:func:`plain` for several layers of which any will do."""
    kind = type(module)
    return getattr(kind, "__fastlayers_original__", kind) in layers and "forward" not in module.__dict__


def is_plain_layer(module: nn.Module) -> bool:
    return "forward" not in module.__dict__


def hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def is_sequential(module: nn.Module) -> bool:
    """Whether a module calls its children one after the other, as torch's Sequential does, and nothing else."""
    original = original_class(module)
    if not issubclass(original, nn.Sequential) or not is_plain_layer(module):
        return False
    return original.forward is nn.Sequential.forward and original.__iter__ is nn.Sequential.__iter__


#: A test of a module, which narrower calls, and the module.
Casts: TypeAlias = tuple[Callable[[Any], bool], nn.Module | None]


def casts_input(layer: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a linear layer or convolution of torch hands its input as it is to an operation that autocast casts for.

    A weight of a tensor subclass (quantised, say) may see the call before autocast does.
    """
    padding: Any = getattr(layer, "padding_mode", "zeros")
    return plain(layer, kind) and padding == "zeros" and is_plain(layer.weight)


def cast_dtype(casts: Casts | None, *tensors: Tensor | None) -> torch.dtype | None:
    """autocast's dtype, where what is computed from these tensors is only cast to that; None where nothing is known."""
    if casts is None or not isinstance(tensors[0], Tensor):
        return None
    kind = tensors[0].device.type
    if kind not in ("cuda", "cpu") or not torch.is_autocast_enabled(kind):
        return None
    for t in tensors:  # autocast leaves float64 alone, and has no say in what tensor subclasses do
        if t is not None and (t.dtype is torch.float64 or type(t) not in PLAIN):
            return None
    test, module = casts
    return torch.get_autocast_dtype(kind) if test(module) else None

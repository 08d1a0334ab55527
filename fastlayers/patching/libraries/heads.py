"""The layers that the head of a model may be, as the operands of their products: a loss needs no logits then.

Known are torch's linear layer, bitsandbytes' in 4 and 8 bits, peft's LoRA around any of these, and its copies of
modules that are trained as a whole. Which of them a head is, is seen when the model is called: peft may wrap a model
that was patched before, and switches adapters on and off between calls.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastlayers.ops.guard import is_plain
from fastlayers.ops.head import autocast_dtype
from fastlayers.patching.capture.lookups import computes_as_known
from fastlayers.patching.runtime.checks import calls_are_torchs, no_hooks, original_class, plain, untouched
from fastlayers.patching.runtime.lazy import Head

__all__ = ["Found", "find", "is_known", "is_torchs_linear"]

#: Whether nobody has replaced what torch's linear layer computes by.
is_torchs_linear = computes_as_known(nn.Linear)


class Found(NamedTuple):
    """The operands of a head.

    Attributes:
        head: those that do not depend on the input.
        adapters: what computes the first factor of each adapter's product from the input.
    """

    head: Head
    adapters: tuple[Callable[[Tensor], Tensor], ...] = ()


def is_known(layer: nn.Module) -> bool:
    """Whether the operands of such a layer can be found, in some of its states."""
    return name_of(layer) in READERS


def find(layer: nn.Module, hidden: Tensor) -> Found | None:
    """The operands of a layer that is called with ``hidden``; None if it has to be called."""
    reader = READERS.get(name_of(layer))
    if reader is None or not plain(layer, original_class(layer)) or not no_hooks(layer):
        return None
    if not (has_own_forward(original_class(layer)) and calls_are_torchs(original_class(layer))):
        return None
    return reader(layer, hidden)


def has_own_forward(kind: type[nn.Module]) -> bool:
    """Whether the forward of a class is in the file of the class: nobody has replaced it."""
    code = getattr(kind.forward, "__code__", None)
    return code is not None and code.co_filename == getattr(sys.modules.get(kind.__module__), "__file__", None)


def name_of(layer: nn.Module) -> str:
    """The full name of the class of a layer. It says what the layer is without an import of its library."""
    kind = original_class(layer)
    return f"{kind.__module__}.{kind.__qualname__}"


# -- layers -----------------------------------------------------------------------------------------------------------


def linear(layer: Any, hidden: Tensor) -> Found | None:
    weight, bias = layer.weight, layer.bias
    if not is_torchs_linear(layer):
        return None
    if not is_plain(weight) or weight.device != hidden.device:  # DTensors, quantised weights
        return None
    if weight.dtype is not hidden.dtype and autocast_dtype(hidden) is None:
        return None
    return Found(Head(weight, bias, (), None))


def linear_of_4_bits(layer: Any, hidden: Tensor) -> Found | None:
    """bitsandbytes' layer, which computes in a dtype of its own, and gives a result in that of the input."""
    weight, bias = layer.weight, layer.bias
    state = getattr(weight, "quant_state", None)
    if state is None or getattr(state, "packing_format_for_cpu", False) or weight.device != hidden.device:
        return None
    dtype = (layer.compute_dtype if layer.compute_type_is_set else None) or hidden.dtype
    if autocast_dtype(hidden) not in (None, dtype):  # which it ignores
        return None
    return Found(Head(weight, bias, (), dtype))


def linear_of_8_bits(layer: Any, hidden: Tensor) -> Found | None:
    """bitsandbytes' layer, which rounds its input to 8 bits in some products. Here no input is rounded."""
    weight, bias, state = layer.weight, layer.bias, layer.state
    scales = state.SCB if weight.SCB is None else weight.SCB
    if weight.dtype is not torch.int8 or scales is None or weight.device != hidden.device:
        return None
    if autocast_dtype(hidden) not in (None, hidden.dtype):  # which it ignores
        return None
    # The layer takes the scales from its weight, where functional.linear_cross_entropy looks for them.
    weight = type(weight)(weight.data, requires_grad=False, SCB=scales)
    return Found(Head(weight, bias, (), hidden.dtype))


def lora(layer: Any, hidden: Tensor) -> Found | None:
    """peft's LoRA: the layer that it adapts, and the products of the adapters that are active."""
    found = find(layer.base_layer, hidden)
    if found is None or layer.disable_adapters or layer.merged:
        return None if layer.disable_adapters and layer.merged else found  # which it would unmerge
    dtype = found.head.dtype
    if dtype is not None and torch.finfo(dtype).eps > torch.finfo(autocast_dtype(hidden) or hidden.dtype).eps:
        return None  # The products of the adapters would be rounded to it; peft's are not.
    variants = getattr(layer, "lora_variant", None)
    if variants is None:  # an older peft, with DoRA inside of its layers
        return None
    adapters, thin = [], []
    for name in layer.active_adapters:
        if name not in layer.lora_A:
            continue
        a, b = layer.lora_A[name], layer.lora_B[name]
        if name in variants or not untouched((a, nn.Linear), (b, nn.Linear)) or b.bias is not None:
            return None
        if not is_torchs_linear(b):
            return None
        if not is_plain(b.weight) or b.weight.device != hidden.device:
            return None
        adapters.append(partial(down, layer, name))
        thin.append(b.weight)
    return Found(found.head._replace(thin=tuple(thin)), tuple(adapters))


def down(layer: Any, name: str, x: Tensor) -> Tensor:
    """The thin part of an adapter, scaled."""
    a = layer.lora_A[name]
    return a(layer.lora_dropout[name](layer._cast_input_dtype(x, a.weight.dtype))) * layer.scaling[name]  # type: ignore[no-any-return]


def saved_module(layer: Any, hidden: Tensor) -> Found | None:
    """peft's copy of a module that it trains as a whole, or the module itself while no adapter is active."""
    names = layer.active_adapters
    if layer.disable_adapters or not names or any(name not in layer._adapters for name in names):
        return find(layer.original_module, hidden)
    return find(layer.modules_to_save[names[0]], hidden)


READERS: dict[str, Callable[[Any, Tensor], Found | None]] = {
    "torch.nn.modules.linear.Linear": linear,
    "bitsandbytes.nn.modules.Linear4bit": linear_of_4_bits,
    "bitsandbytes.nn.modules.Linear8bitLt": linear_of_8_bits,
    "peft.tuners.lora.layer.Linear": lora,
    "peft.tuners.lora.bnb.Linear4bit": lora,
    "peft.tuners.lora.bnb.Linear8bitLt": lora,
    "peft.utils.other.ModulesToSaveWrapper": saved_module,
}

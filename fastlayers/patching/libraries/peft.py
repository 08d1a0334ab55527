"""The adapter for peft: its LoRA layers, whatever keeps the weight that they adapt.

Where a forward is recorded for a region, these layers run as they are, and the region's program has what they compute
and what is computed beside them. Everywhere else, such as around weights of 4 and 8 bits, which no region holds, the
fused forward adds the adapter to the result of the base layer by a kernel.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

from torch import Tensor, nn

from fastlayers import backends
from fastlayers.ops import reference
from fastlayers.ops.guard import is_plain
from fastlayers.ops.low_rank import add_low_rank
from fastlayers.ops.modes import needs_operations
from fastlayers.patching.libraries.adapters import Adapter
from fastlayers.patching.libraries.heads import is_torchs_linear
from fastlayers.patching.runtime.checks import must_be_stock, original_class, untouched

__all__ = ["PeftAdapter"]

#: The LoRA layers, where peft has them. It imports the modules for quantised weights when it meets one.
LAYERS = {
    "peft.tuners.lora.layer": ("Linear",),
    "peft.tuners.lora.bnb": ("Linear4bit", "Linear8bitLt"),
}


class PeftAdapter(Adapter):
    """LoRA layers of linear layers."""

    def fused_layers(self) -> dict[type[nn.Module], type[nn.Module]]:
        found: dict[type[nn.Module], type[nn.Module]] = {}
        for module, names in LAYERS.items():
            for name in names:
                layer = getattr(sys.modules.get(module), name, None)
                if layer is not None:
                    found[layer] = fused(layer)
        return found


@cache
def fused(layer: type[nn.Module]) -> type[nn.Module]:
    return type(f"FusedLora{layer.__name__}", (layer,), {"forward": forward, "__doc__": forward.__doc__})


def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The base layer's result, and ``scaling * B(A(dropout(x)))`` of each active adapter added to it in one pass."""
    pairs = () if args or kwargs else active(self, x)
    if not pairs:
        return original_class(self).forward(self, x, *args, **kwargs)  # type: ignore[no-any-return]
    y = self.base_layer(x)
    for a, b, scaling, dropout in pairs:
        y = add_low_rank(y, x, a, b, scaling, dropout)
    return y  # type: ignore[no-any-return]


def active(layer: Any, x: Any) -> tuple[tuple[Tensor, Tensor, float, float], ...]:
    """A, B, the scaling and the dropout of each active adapter; none if one is of another kind, or a kernel would gain
    nothing."""
    if (
        not is_plain(x)
        or x.dtype not in reference.LOW_PRECISION
        or not backends.generates_kernels(x.device)
        or needs_operations()
        or must_be_stock()
        or layer.disable_adapters
        or layer.merged
    ):
        return ()
    found: list[tuple[Tensor, Tensor, float, float]] = []
    for name in layer.active_adapters:
        if name not in layer.lora_A:
            continue
        a, b, dropout = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
        if (
            type(dropout) not in (nn.Identity, nn.Dropout)
            or name in layer.lora_variant
            or not untouched((a, nn.Linear), (b, nn.Linear), (dropout, type(dropout)))
        ):
            return ()
        if a.bias is not None or b.bias is not None or not is_torchs_linear(a):
            return ()
        drops = type(dropout) is nn.Dropout and dropout.training
        found.append((a.weight, b.weight, layer.scaling[name], dropout.p if drops else 0.0))
    return tuple(found)

"""A whole ConvNeXt block as one call under autocast, step by step where its kernels do not apply."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastlayers.ops import convnext_block as blocks
from fastlayers.patching.runtime import calls
from fastlayers.patching.runtime.checks import Casts
from fastlayers.patching.runtime.convolution import forked_convolution

__all__ = ["convnext_block", "drop_nothing"]


def drop_nothing(*dropouts: Any) -> bool:
    """Whether all dropouts return their input unchanged."""
    return all(layer.p == 0.0 or not layer.training for layer in dropouts)


def convnext_block(
    layer: Any, x: Any, mlp: Any, gamma: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight: Tensor, bias: Tensor,
    act: str, weight2: Tensor, bias2: Tensor, *, normalized_shape: tuple[int, ...], eps: float, casts: Casts,
) -> Tensor:  # fmt: skip
    """x + gamma·mlp(layer_norm(layer(x))), with the norm over the channels. The MLP's parameters are given as well."""
    y = None
    if isinstance(x, Tensor) and normalized_shape == x.shape[1:2]:
        y = blocks.convnext_block(layer, x, norm_weight, norm_bias, eps, weight, bias, act, weight2, bias2, gamma)
    if y is not None:
        return y
    z, x = forked_convolution(layer, x)
    options = {"normalized_shape": normalized_shape, "weight": norm_weight, "bias": norm_bias, "eps": eps}
    normed = calls.layer_norm(z.permute(0, 2, 3, 1), casts, **options)  # type: ignore[arg-type]
    last = mlp(normed).permute(0, 3, 1, 2)
    return calls.scale_add(last, gamma.reshape(1, -1, 1, 1), x, overwritten=None, scaled=False)

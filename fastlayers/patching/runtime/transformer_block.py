"""A whole transformer block as one call under autocast, step by step where its kernels do not apply."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastlayers.ops import autocast
from fastlayers.ops import transformer_block as transformers
from fastlayers.patching.runtime import calls
from fastlayers.patching.runtime.checks import Casts

__all__ = ["runs_under_autocast", "trains_under_autocast", "transformer_block"]


def trains_under_autocast(x: Any) -> bool:
    """Whether autograd records a call on x, and csrc has kernels for x under autocast."""
    return torch.is_grad_enabled() and runs_under_autocast(x)


def runs_under_autocast(x: Any) -> bool:
    """Whether csrc has kernels for a call on x under autocast, recorded by autograd or not."""
    return isinstance(x, Tensor) and autocast.block_kernels_for(x) is not None


def transformer_block(
    x: Any, norm: Any, attention: Any, norm2: Any, mlp: Any, *parameters: Tensor | None, heads: int, act: str,
    casts: Casts | None = None, casts2: Casts | None = None,
) -> Tensor:  # fmt: skip
    """s + mlp(norm2(s)) for s = x + attention(norm(x)).

    Args:
        x: the residual stream.
        norm, attention, norm2, mlp: the modules of the steps.
        parameters: the weights and biases of the attention's linear layer for query, key and value, of its last linear
            layer, and of both linear layers of the MLP.
        heads: the number of heads.
        act: the activation of the MLP.
        casts, casts2: the test under which autocast only casts the result of the first and of the second norm.
    """
    y = transformers.transformer_block(x, norm, norm2, parameters[:4], parameters[4:], heads, act)
    if y is not None:
        return y
    normed, x = calls.add_layer_norm(x, None, casts=casts, **_options(norm))
    normed, s = calls.add_layer_norm(x, attention(normed), casts=casts2, **_options(norm2))
    return s + mlp(normed)  # type: ignore[no-any-return]


def _options(norm: Any) -> dict[str, Any]:
    return {
        "normalized_shape": norm.normalized_shape, "weight": norm.weight, "bias": norm.bias, "eps": norm.eps
    }  # fmt: skip

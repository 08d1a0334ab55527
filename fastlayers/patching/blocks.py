"""Whole blocks, which are for calls under autocast; where their kernels do not apply, the steps answer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastlayers.ops import autocast
from fastlayers.ops import convolution_chain as chains
from fastlayers.ops import transformer_block as transformers
from fastlayers.ops.convolution_chain import Gate
from fastlayers.patching import calls
from fastlayers.patching.calls import Casts, plain
from fastlayers.patching.convolutions import convolution_and_norm, convolution_batch_norm

__all__ = ["convolution_chain", "parted", "runs_under_autocast", "trains_under_autocast", "transformer_block"]


def trains_under_autocast(x: Any) -> bool:
    """Whether a call on x is recorded by autograd, and csrc has kernels for what autocast casts."""
    return torch.is_grad_enabled() and runs_under_autocast(x)


def runs_under_autocast(x: Any) -> bool:
    """Whether csrc has kernels for what autocast casts in a call on x, recorded or not."""
    return isinstance(x, Tensor) and autocast.block_kernels_for(x) is not None


def convolution_chain(
    x: Any, *layers: Any, acts: tuple[str | None, ...], added: str | None = None, written: str | None = None,
    gate: tuple[int, str, str] | None = None,
) -> Tensor:  # fmt: skip
    """Convolutions, each with its BatchNorm and activation.

    Args:
        x: images.
        layers: of each step the convolution and the norm, then those of the shortcut; and of a gate the module, and the
            two convolutions in it.
        acts: the activation of each step, the shortcut's at the end.
        added: what is added before the last step's activation: "x", or the "shortcut" of x.
        written: "norm" where that sum is written to the result of the norm.
        gate: after which step it stands, and its activations.
    """
    layers, of_gate, found = parted(layers, acts, gate)
    y = chains.convolution_chain(x, layers, acts, added, found)
    if y is not None:
        return y
    pairs = list(zip(layers[::2], layers[1::2], acts, strict=True))
    residual = x
    if added == "shortcut":
        residual = _step(x, *pairs.pop())
    for place, (layer, norm, act) in enumerate(pairs):
        of_product = gate is not None and place == gate[0] + 1
        if of_product:
            x = of_gate[0](x)
        is_last = added is not None and place == len(pairs) - 1
        x = _step(x, layer, norm, act, of_product, residual if is_last else None, written)
    return x  # type: ignore[no-any-return]


def parted(
    layers: tuple[Any, ...], acts: tuple[str | None, ...], gate: tuple[int, str, str] | None
) -> tuple[tuple[Any, ...], tuple[Any, ...], Gate | None]:
    """What a chain is called with: the layers of its steps, what makes the gate, and that gate."""
    steps, of_gate = layers[: 2 * len(acts)], layers[2 * len(acts) :]
    if gate is None:
        return steps, of_gate, None
    after, act, end = gate
    _, first, second = of_gate
    return steps, of_gate, Gate(after, first, act, second, end)


def _step(
    x: Any, layer: Any, norm: Any, act: str | None, of_product: bool = False, residual: Any = None,
    written: str | None = None,
) -> Tensor:  # fmt: skip
    if plain(norm, nn.BatchNorm2d):
        return convolution_batch_norm(layer, x, norm, residual, act, written, of_product)
    y = convolution_and_norm(layer, x, norm, act, of_product)  # it activates by itself, and not before a sum
    if residual is None:
        return y
    return y.add_(residual) if written == "norm" else y + residual


def transformer_block(
    x: Any, norm: Any, attention: Any, norm2: Any, mlp: Any, *parameters: Tensor | None, heads: int, act: str,
    casts: Casts | None = None, casts2: Casts | None = None,
) -> Tensor:  # fmt: skip
    """s + mlp(norm2(s)) for s = x + attention(norm(x)).

    Args:
        parameters: weight and bias of the attention's linear layer for query, key and value and of the one after it,
            and of both of the MLP.
        casts: whether autocast only casts what the first norm gives, and ``casts2`` the same of the second one.
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

"""Convolutions and their norms, one after the other: one call under autocast, else step by step."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fastlayers.ops import convolution_chain as chains
from fastlayers.ops.convolution_chain import Gate
from fastlayers.patching.runtime.checks import plain
from fastlayers.patching.runtime.convolution import convolution_and_norm, convolution_batch_norm

__all__ = ["convolution_chain", "parted"]


def convolution_chain(
    x: Any, *layers: Any, acts: tuple[str | None, ...], added: str | None = None, overwritten: str | None = None,
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
        x = _step(x, layer, norm, act, of_product, residual if is_last else None, overwritten)
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
    overwritten: str | None = None,
) -> Tensor:  # fmt: skip
    if plain(norm, nn.BatchNorm2d):
        return convolution_batch_norm(layer, x, norm, residual, act, overwritten, of_product)
    y = convolution_and_norm(layer, x, norm, act, of_product)  # it activates by itself, and not before a sum
    if residual is None:
        return y
    return y.add_(residual) if overwritten == "norm" else y + residual

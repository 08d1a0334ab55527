"""Consecutive convolutions and their norms as one call under autocast, step by step where its kernels do not apply."""

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
        layers: the convolution and the norm of each step, then of the shortcut; for a gate followed by its module and
            its two convolutions.
        acts: the activation of each step, and of the shortcut at the end.
        added: the operand of the sum before the last activation: "x", or the "shortcut" of x.
        overwritten: "norm" if that sum overwrites the result of the norm.
        gate: the step that the gate follows, and its activations.
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
    """The arguments of a chain: the layers of its steps, those of the gate, and the gate."""
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
    y = convolution_and_norm(layer, x, norm, act, of_product)  # The norm has its own activation.
    if residual is None:
        return y
    return y.add_(residual) if overwritten == "norm" else y + residual

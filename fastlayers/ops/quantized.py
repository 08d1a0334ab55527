"""Quantised weights of a head: how rows of them are dequantised, and nothing else about them.

Known are bitsandbytes' weights of 4 and 8 bits, and tensors with a ``dequantize()`` of their own, as torchao's. A
quantised weight is frozen. It is no tensor to autograd, which would keep it without its scales.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

#: Blocks of classes that are dequantised one after the other.
BLOCKS = 8
#: Blocks begin at multiples of so many classes: of the tiles of products, and of whatever blocks torchao has.
BLOCK_TILE = 256


class Quantized:
    """A weight (C, H) in few bits, of which some rows at a time are dequantised.

    Args:
        shape: (C, H).
        read: gives the rows from one class to another in a dtype, or in that in which they are dequantised. The first
            one is a multiple of ``align``.
    """

    requires_grad = False

    def __init__(
        self, shape: torch.Size, device: torch.device, align: int, read: Callable[[int, int, torch.dtype], Tensor]
    ) -> None:
        self.shape, self.device = shape, device
        self._align, self._read = align, read
        step = math.lcm(align, BLOCK_TILE)
        self._block = -(-shape[0] // (BLOCKS * step)) * step

    def rows(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        """The rows of some classes, dequantised."""
        first = start - start % self._align
        return self._read(first, end, dtype)[start - first :].to(dtype)

    def blocks(self, end: int, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        """The rows of the first classes, a block of them at a time."""
        for start in range(0, end, self._block):
            stop = min(start + self._block, end)
            yield slice(start, stop), self.rows(start, stop, dtype)

    def whole(self, dtype: torch.dtype) -> Tensor:
        return self.rows(0, self.shape[0], dtype)


def quantized(weight: Tensor) -> Quantized | None:
    """A quantised weight that needs no gradient; None for any other.

    Raises:
        ValueError: it lacks what it takes to dequantise it.
    """
    if type(weight) in (Tensor, torch.nn.Parameter) or weight.requires_grad:
        return None
    bitsandbytes: Any = sys.modules.get("bitsandbytes")
    if bitsandbytes is not None and isinstance(weight, bitsandbytes.nn.Params4bit):
        return _of_4_bits(weight, bitsandbytes.functional) if weight.bnb_quantized else None
    if bitsandbytes is not None and isinstance(weight, bitsandbytes.nn.Int8Params):
        return _of_8_bits(weight) if weight.dtype is torch.int8 else None
    if weight.dim() == 2 and type(weight).dequantize is not Tensor.dequantize:
        return _of_subclass(weight)
    return None


def _of_4_bits(weight: Any, functional: Any) -> Quantized:
    """Two values a byte, and a scale for each block of values, whichever rows they are in."""
    state = weight.quant_state
    if state is None:
        raise ValueError("expected a linear_weight with a quant_state, but got a Params4bit without one")
    if getattr(state, "packing_format_for_cpu", False):
        raise ValueError(
            "expected a linear_weight as bitsandbytes stores it, but got a Params4bit that an inference on a CPU has"
            " packed, which state_dict() of its layer undoes"
        )
    _, features = state.shape
    packed = weight.data.reshape(-1).view(torch.uint8)
    size = state.blocksize

    scales: list[Tensor] = [] if state.nested else [state.absmax]

    def read(start: int, end: int, dtype: torch.dtype) -> Tensor:
        if not scales:
            scales.append((functional.dequantize_blockwise(state.absmax, state.state2) + state.offset).float())
        first, last = start * features, end * features
        part = functional.QuantState(
            absmax=scales[0][first // size : -(-last // size)],
            # One long row: bitsandbytes 0.50 takes wrong scales on a CPU where a row is no multiple of a block.
            shape=torch.Size((1, last - first)),
            code=state.code,
            blocksize=size,
            quant_type=state.quant_type,
            dtype=state.dtype,
        )
        found: Tensor = functional.dequantize_4bit(packed[first // 2 : -(-last // 2)].reshape(-1, 1), part)
        return found.reshape(end - start, features)

    # Where a block begins a row does, too: and a byte, since a block has an even number of values.
    return Quantized(torch.Size(state.shape), weight.device, size // math.gcd(features, size), read)


def _of_8_bits(weight: Any) -> Quantized:
    """A byte for each value, and a scale for each row."""
    scales = weight.SCB
    if scales is None:
        raise ValueError(
            "expected a linear_weight with its scales SCB, but got an Int8Params without them; Linear8bitLt moves them"
            " to its state: pass Int8Params(layer.weight.data, requires_grad=False, SCB=layer.state.SCB)"
        )
    values = weight.data

    def read(start: int, end: int, dtype: torch.dtype) -> Tensor:
        # As bitsandbytes does in its backward: 127 steps are exact in 16 bits, and the product is rounded once.
        return values[start:end].to(dtype).mul_(scales[start:end, None] * (1 / 127))

    return Quantized(weight.shape, weight.device, 1, read)


def _of_subclass(weight: Any) -> Quantized:
    """What dequantises itself. A type that has no slices of rows, as torchao's NF4Tensor, does so once as a whole."""
    dequantize = getattr(type(weight), "get_original_weight", None) or type(weight).dequantize
    whole: list[Tensor] = []

    def read(start: int, end: int, dtype: torch.dtype) -> Tensor:
        if not whole and end - start < weight.shape[0]:
            try:
                part: Tensor = dequantize(weight[start:end])
            except (NotImplementedError, RuntimeError, AssertionError, AttributeError, TypeError, ValueError):
                part = torch.empty(0)
            if part.shape == (end - start, weight.shape[1]):
                return part
        if not whole:
            whole.append(dequantize(weight))
        return whole[0][start:end]

    return Quantized(weight.shape, weight.device, BLOCK_TILE, read)

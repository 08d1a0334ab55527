"""How the values of a program look, for passes that ask this often: as plain attributes, with numbers of sizes that
differ from call to call as :class:`fastlayers.kernels.symbolic.Symbolic`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fastlayers.kernels.symbolic import hint

__all__ = ["Look", "Shaped", "in_order"]


def in_order(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements lie in the order of their dimensions, of which those with one element say nothing."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return 0 in shape
        expected *= size
    return True


@dataclass(frozen=True)
class Shaped:
    """How a tensor looks, and a number that tells its memory apart. Its methods are those of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    memory: int

    @cached_property
    def _elements(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def is_dense(self) -> bool:
        """Whether it has elements, each in a place of its own, and nothing between."""
        expected = 1
        for size, stride in sorted(zip(self.shape, self.strides, strict=True), key=lambda pair: (pair[1], pair[0])):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return self._elements > 0

    @property
    def nbytes(self) -> int:
        """Where sizes differ, for those at which kernels are written."""
        return hint(self._elements) * self.dtype.itemsize

    def numel(self) -> int:
        return self._elements

    def dim(self) -> int:
        return len(self.shape)

    def stride(self, dim: int | None = None) -> Any:
        return self.strides if dim is None else self.strides[dim]

    def is_contiguous(self) -> bool:
        return in_order(self.shape, self.strides)

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point


#: What passes ask for the geometry of a value.
Look: TypeAlias = Tensor | Shaped

"""Fused operations as functions, with signatures after :mod:`torch.nn.functional`."""

from __future__ import annotations

import torch
from torch import Tensor

from fastlayers.ops import reference

__all__ = ["add_relu", "log_softmax", "mul", "relu_add", "softmax"]


def softmax(
    x: Tensor, dim: int = -1, *, scale: float | None = None, mask: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    return reference.softmax(x, dim, scale, mask, dtype)


def log_softmax(
    x: Tensor, dim: int = -1, *, scale: float | None = None, mask: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    return reference.log_softmax(x, dim, scale, mask, dtype)


def relu_add(x: Tensor, y: Tensor, bias: float | Tensor = 0.0) -> Tensor:
    return reference.relu_add(x, y, bias)


def add_relu(x: Tensor, y: Tensor) -> Tensor:
    return reference.add_relu(x, y)


def mul(x: Tensor, y: Tensor) -> Tensor:
    return reference.mul(x, y)

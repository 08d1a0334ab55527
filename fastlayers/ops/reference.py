"""The oracle: every fused op as the plain-PyTorch composition that it stands for.

These functions are the definition. They answer where no kernel applies, they are what the tests compare against in
float64, and under ``torch.compile`` they are what Inductor fuses with its neighbours. They contain no choice of
backend, no autograd Function and no in-place operation.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def scores(x: Tensor, scale: float | None, mask: Tensor | None) -> Tensor:
    """x·scale + mask, where a boolean mask puts minus infinity at its False positions."""
    if scale is not None:
        x = x * scale
    if mask is not None:
        x = torch.where(mask, x, float("-inf")) if mask.dtype == torch.bool else x + mask
    return x


def softmax(x: Tensor, dim: int, scale: float | None, mask: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    return F.softmax(scores(x, scale, mask), dim, dtype=dtype)


def log_softmax(x: Tensor, dim: int, scale: float | None, mask: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    return F.log_softmax(scores(x, scale, mask), dim, dtype=dtype)


def relu_add(x: Tensor, y: Tensor, bias: float | Tensor) -> Tensor:
    out = torch.relu(x) + y
    # A bias of exactly 0.0 is "no bias": adding it would promote integer tensors to float.
    return out if isinstance(bias, float | int) and bias == 0 else out + bias


def add_relu(x: Tensor, y: Tensor) -> Tensor:
    return torch.relu(x + y)


def mul(x: Tensor, y: Tensor) -> Tensor:
    return x * y

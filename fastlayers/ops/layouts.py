"""Shapes, memory layouts and accumulators."""

from __future__ import annotations

import torch
from torch import Tensor


def broadcasts_to(shape: torch.Size, target: torch.Size) -> bool:
    """Whether a tensor of ``shape`` expands to ``target`` without ``target`` growing."""
    if len(shape) > len(target):
        return False
    return all(own in (1, size) for own, size in zip(reversed(shape), reversed(target), strict=False))


def suggests_channels_last(x: Tensor) -> bool:
    """Whether torch lays out results for x as channels_last. Not only dense tensors make it do so."""
    if x.dim() not in (4, 5) or x.is_contiguous():
        return False
    from torch._prims_common import suggest_memory_format

    return suggest_memory_format(x) is not torch.contiguous_format


def is_image(x: Tensor) -> bool:
    """Whether x is (N, C, *) with dimensions and a layout that the norms over channels take."""
    dims = x.dim()
    return 2 <= dims <= 5 and (
        x.is_contiguous()
        or (dims == 4 and x.is_contiguous(memory_format=torch.channels_last))
        or (dims == 5 and x.is_contiguous(memory_format=torch.channels_last_3d))
    )


def accumulator(x: Tensor) -> torch.dtype:
    """dtype in which the kernels accumulate, and in which they keep statistics."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def with_strides(t: Tensor, strides: tuple[int, ...]) -> Tensor:
    """``t`` in a given dense layout, copied where it has another."""
    if t.stride() == strides:
        return t
    return torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t)

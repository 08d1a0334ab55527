"""What the kernels that walk dense tensors flat share: layouts, the size of a tile, how a reduction is shared out."""

from __future__ import annotations

import torch
from torch import Tensor

from fastlayers.kernels.launch import cdiv, multiprocessors

Sizes = tuple[int, ...]

# 8 elements a thread are one 16-byte access of 16-bit elements; 16 keep two loads a tensor in flight.
TILE, WARPS = 2048, 4

PROGRAMS_PER_MULTIPROCESSOR = 4  # at least, of a reduction


def in_layout(x: Tensor, like: Tensor) -> Tensor:
    """x, of like's shape, in the memory order of the dense tensor ``like``; a copy where it is not in it already."""
    return x if x.stride() == like.stride() else torch.empty_like(like, dtype=x.dtype).copy_(x)


def shares(length: int, step: int, others: int, device: torch.device) -> tuple[int, int]:
    """(chunks, elements of one) of ``length``, in multiples of ``step``; others * chunks programs fill the GPU."""
    wanted = cdiv(PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(device), others)
    chunk = cdiv(cdiv(length, wanted), step) * step
    return cdiv(length, chunk), chunk

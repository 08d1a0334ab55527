"""Concatenations in words of 16 bytes, while a call is captured.

torch concatenates tensors with gaps element by element, and computes where each one lies: 32 MiB of bfloat16 take 57 us
on an H100, and 27 us so. A reduce-scatter of torch that is not along the first dimension has such a concatenation
before it. In a call that is captured, the time that a mode takes of the host is spent once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastlayers.ops.modes import QuietMode

__all__ = ["InWords", "concatenated"]

CAT = torch.ops.aten.cat.default
#: An element of 16 bytes.
WORD = torch.complex128


class InWords(QuietMode):
    """Lets concatenations be of words where they can be."""

    needs_operations = False

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        return concatenated(*args, **kwargs) if func is CAT else func(*args, **kwargs)


def concatenated(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """``torch.cat(tensors, dim)``."""
    dtype = tensors[0].dtype
    gaps = not all(t.is_contiguous() for t in tensors)
    if gaps and all(t.dtype is dtype and has_words(t) for t in tensors) and dim not in (-1, tensors[0].dim() - 1):
        return torch.cat([t.view(WORD) for t in tensors], dim).view(dtype)
    return torch.cat([*tensors], dim)


def has_words(t: Tensor) -> bool:
    """Whether a tensor, of so few dimensions that its layout has no name, consists of aligned words."""
    if type(t) is not Tensor or not 2 <= t.dim() <= 3 or t.stride(-1) != 1 or t.data_ptr() % WORD.itemsize:
        return False
    return all(step * t.element_size() % WORD.itemsize == 0 for step in (t.size(-1), *t.stride()[:-1]))

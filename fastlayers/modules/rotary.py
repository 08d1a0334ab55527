"""Rotary position embedding as a layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastlayers import functional


class FusedRotary(nn.Module):
    """Rotary position embedding of queries and keys, see :func:`fastlayers.functional.rotary`.

    Holds no tables: cos and sin are made once for a model, and come with each call.

    Args:
        interleaved, rotary_dim, dtype: as for the function.

    Shape: q and k alike but for the number of heads; cos and sin broadcast against both, as in torch.
    """

    def __init__(
        self, interleaved: bool = False, *, rotary_dim: int | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.interleaved = interleaved
        self.rotary_dim = rotary_dim
        self.dtype = dtype

    def forward(self, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | None]:
        return functional.rotary(q, k, cos, sin, self.interleaved, rotary_dim=self.rotary_dim, dtype=self.dtype)

    def extra_repr(self) -> str:
        given = {"interleaved": self.interleaved or None, "rotary_dim": self.rotary_dim, "dtype": self.dtype}
        return ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)

"""Rotary position embedding as a layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastlayers import functional
from fastlayers.modules.layer_norm import FusedRMSNorm


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


class FusedQKNormRotary(nn.Module):
    """RMSNorm and rotary embedding of queries and keys, see :func:`fastlayers.functional.qk_norm_rotary`.

    The weights are those of two norms, ``q_norm`` and ``k_norm``, as model libraries name them.

    Args:
        head_dim: elements of a head.
        eps, interleaved, casting, rotary_dim: as for the function.
        elementwise_affine, device, dtype: as for :class:`torch.nn.RMSNorm`.

    Shape: as for :class:`FusedRotary`.
    """

    def __init__(
        self,
        head_dim: int,
        eps: float | None = 1e-6,
        interleaved: bool = False,
        *,
        casting: str = "torch",
        rotary_dim: int | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.q_norm = FusedRMSNorm(head_dim, eps, elementwise_affine, device, dtype)
        self.k_norm = FusedRMSNorm(head_dim, eps, elementwise_affine, device, dtype)
        self.interleaved, self.casting, self.rotary_dim = interleaved, casting, rotary_dim

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return functional.qk_norm_rotary(
            q, k, self.q_norm.weight, self.k_norm.weight, cos, sin, self.q_norm.eps, self.interleaved,
            casting=self.casting, rotary_dim=self.rotary_dim,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"interleaved={self.interleaved}, casting={self.casting!r}, rotary_dim={self.rotary_dim}"

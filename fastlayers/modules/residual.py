"""Layers at the end of a residual branch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastlayers import functional


class FusedDropoutAdd(nn.Module):
    """residual + dropout(x), see :func:`fastlayers.functional.dropout_add`.

    Args:
        p: probability with which elements of x are zeroed in training, as :class:`torch.nn.Dropout` has it.

    Shape: x and residual broadcast against each other, as in torch.
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
        self.p = p

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return functional.dropout_add(x, residual, self.p, self.training)

    def extra_repr(self) -> str:
        return f"p={self.p}"


class FusedScaleAdd(nn.Module):
    """residual + drop_path(gamma·x), see :func:`fastlayers.functional.scale_add`.

    Stands for timm's ``LayerScale`` (``LayerScale2d`` with ``channels_first``), ``DropPath`` and the sum after them;
    the parameter has their name and shape.

    Args:
        dim: number of channels, C.
        init_values: what gamma is filled with. None: no gamma.
        drop_path: probability with which samples are dropped in training.
        channels_first: gamma lies along dimension 1 of (N, C, H, W) instead of the last one.
        device, dtype: of gamma.

    Shape: (*, C), or (N, C, H, W) with ``channels_first``; x and residual alike.
    """

    def __init__(
        self,
        dim: int,
        init_values: float | None = 1e-5,
        drop_path: float = 0.0,
        channels_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 0.0 <= drop_path <= 1.0:
            raise ValueError(f"drop_path is a probability, from 0 to 1, but got {drop_path}")
        self.dim = dim
        self.init_values = init_values
        self.drop_path = drop_path
        self.channels_first = channels_first
        if init_values is None:
            self.register_parameter("gamma", None)
        else:
            self.gamma = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
            self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.init_values is not None:
            nn.init.constant_(self.gamma, self.init_values)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        gamma: Tensor | None = self.gamma
        if self.channels_first and gamma is not None:
            gamma = gamma.view(-1, 1, 1)
        return functional.scale_add(x, gamma, residual, self.drop_path, self.training)

    def extra_repr(self) -> str:
        shown = f"{self.dim}, init_values={self.init_values}"
        if self.drop_path:
            shown += f", drop_path={self.drop_path}"
        return shown + (", channels_first=True" if self.channels_first else "")

"""Layers that normalise rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fastlayers import functional
from fastlayers.modules.own_options import OwnOptions


class FusedLayerNorm(nn.LayerNorm):
    """:class:`torch.nn.LayerNorm` through :func:`fastlayers.functional.layer_norm`."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class FusedRMSNorm(nn.RMSNorm):
    """:class:`torch.nn.RMSNorm` through :func:`fastlayers.functional.rms_norm`."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.normalized_shape, self.weight, self.eps)


class FusedLayerNorm2d(nn.LayerNorm):
    """:class:`torch.nn.LayerNorm` over the channels of an image, see :func:`fastlayers.functional.channel_layer_norm`.

    timm's and torchvision's ``LayerNorm2d``.

    Args:
        num_channels: C.
        eps: added to the variance.
        affine: whether there are a weight and a bias.
        kwargs: ``bias``, ``device`` and ``dtype``, as torch has them.

    Shape: (N, C, H, W); any number of dimensions after the channels is taken.
    """

    def __init__(self, num_channels: int, eps: float = 1e-6, affine: bool = True, **kwargs: Any) -> None:
        super().__init__(num_channels, eps, affine, **kwargs)

    def forward(self, input: Tensor) -> Tensor:
        return functional.channel_layer_norm(input, self.weight, self.bias, self.eps)


class FusedAddLayerNorm(OwnOptions, nn.LayerNorm):
    """s = x + residual and its layer normalisation, see :func:`fastlayers.functional.add_layer_norm`.

    Args:
        args, kwargs: as for :class:`torch.nn.LayerNorm`.
        dropout: probability with which elements of x are zeroed before the sum, in training.

    Shape: x and residual broadcast against each other and end with ``normalized_shape``; returns (norm(s), s).
    """

    dropout: float = 0.0

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return functional.add_layer_norm(
            x, residual, self.normalized_shape, self.weight, self.bias, self.eps,
            dropout=self.dropout, training=self.training,
        )  # fmt: skip


class FusedAdaLayerNorm(nn.LayerNorm):
    """Layer normalisation modulated for each sample, see :func:`fastlayers.functional.ada_layer_norm`.

    Args:
        normalized_shape: sizes of the dimensions that are normalised together.
        eps: added to the variance.

    Shape: (N, T, C) with a scale and a shift of (N, 1, C), or whatever broadcasts; it has no parameters.
    """

    def __init__(self, normalized_shape: int | Sequence[int], eps: float = 1e-5) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine=False)  # type: ignore[arg-type]

    def forward(self, input: Tensor, scale: Tensor, shift: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return functional.ada_layer_norm(input, self.normalized_shape, scale, shift, self.eps)


class FusedAddRMSNorm(OwnOptions, nn.RMSNorm):
    """s = x + residual and its root mean square normalisation, see :func:`fastlayers.functional.add_rms_norm`.

    Args:
        args, kwargs: as for :class:`torch.nn.RMSNorm`.
        casting: the casting order, "torch", "llama" or "gemma".
        dropout: probability with which elements of x are zeroed before the sum, in training.

    Shape: x and residual broadcast against each other and end with ``normalized_shape``; returns (norm(s), s).
    """

    casting: str = "torch"
    dropout: float = 0.0

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return functional.add_rms_norm(
            x, residual, self.normalized_shape, self.weight, self.eps,
            casting=self.casting, dropout=self.dropout, training=self.training,
        )  # fmt: skip

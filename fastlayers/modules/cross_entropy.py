"""Losses on logits."""

from __future__ import annotations

from torch import Tensor, nn

from fastlayers import functional
from fastlayers.modules.own_options import OwnOptions


class FusedCrossEntropyLoss(OwnOptions, nn.CrossEntropyLoss):
    """:class:`torch.nn.CrossEntropyLoss` through :func:`fastlayers.functional.cross_entropy`.

    Args:
        args, kwargs: as for :class:`torch.nn.CrossEntropyLoss`.
        softcap, z_loss, inplace_backward: as for the function.
    """

    softcap: float | None = None
    z_loss: float = 0.0
    inplace_backward: bool = False

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(
            input, target, self.weight, ignore_index=self.ignore_index, reduction=self.reduction,
            label_smoothing=self.label_smoothing, softcap=self.softcap, z_loss=self.z_loss,
            inplace_backward=self.inplace_backward,
        )  # fmt: skip

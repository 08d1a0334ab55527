"""Losses on logits."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fastlayers import functional


class FusedCrossEntropyLoss(nn.CrossEntropyLoss):
    """:class:`torch.nn.CrossEntropyLoss` through :func:`fastlayers.functional.cross_entropy`.

    Args:
        args, kwargs: as for :class:`torch.nn.CrossEntropyLoss`.
        softcap: bounds the logits to softcap·tanh(logits/softcap), or None.
        z_loss: factor of the squared log-sum-exp of each row.
        inplace_backward: allows the backward to put the gradient in the place of the logits.
    """

    # Of the class, so that a torch module becomes this one by its class alone.
    softcap: float | None = None
    z_loss: float = 0.0
    inplace_backward: bool = False

    def __init__(
        self,
        *args: Any,
        softcap: float | None = None,
        z_loss: float = 0.0,
        inplace_backward: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        given = {"softcap": softcap, "z_loss": z_loss, "inplace_backward": inplace_backward}
        for name, value in given.items():
            if value != getattr(type(self), name):
                setattr(self, name, value)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(
            input, target, self.weight, ignore_index=self.ignore_index, reduction=self.reduction,
            label_smoothing=self.label_smoothing, softcap=self.softcap, z_loss=self.z_loss,
            inplace_backward=self.inplace_backward,
        )  # fmt: skip

    def extra_repr(self) -> str:
        shown = {"softcap": self.softcap, "z_loss": self.z_loss, "inplace_backward": self.inplace_backward}
        return ", ".join(f"{name}={value}" for name, value in shown.items() if value)

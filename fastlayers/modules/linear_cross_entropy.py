"""The loss at the end of a language model, with the linear layer in it."""

from __future__ import annotations

from torch import Tensor, nn

from fastlayers import functional


class FusedLinearCrossEntropyLoss(nn.CrossEntropyLoss):
    """Cross-entropy of ``hidden @ weight.T + bias``, see :func:`fastlayers.functional.linear_cross_entropy`.

    It owns no linear layer: the weight comes with the call, so that it may be a model's ``lm_head.weight``, tied or
    not.

    Args:
        weight: a factor for each class; with the following ones up to ``label_smoothing`` as
            :class:`torch.nn.CrossEntropyLoss` takes them.
        softcap, z_loss, logit_scale, chunk_size: as the function takes them.

    Shape: hidden (..., H), weight (V, H), target (...), bias (V,) or None; a scalar, or for ``reduction="none"`` as
    target.
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        softcap: float | None = None,
        z_loss: float = 0.0,
        logit_scale: float = 1.0,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__(weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        self.softcap = softcap
        self.z_loss = z_loss
        self.logit_scale = logit_scale
        self.chunk_size = chunk_size

    def forward(  # type: ignore[override]
        self, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        return functional.linear_cross_entropy(
            hidden,
            weight,
            target,
            bias,
            class_weight=self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            softcap=self.softcap,
            z_loss=self.z_loss,
            logit_scale=self.logit_scale,
            chunk_size=self.chunk_size,
        )

    def extra_repr(self) -> str:
        shown = f"ignore_index={self.ignore_index}, reduction={self.reduction!r}"
        defaults = {"label_smoothing": 0.0, "softcap": None, "z_loss": 0.0, "logit_scale": 1.0, "chunk_size": None}
        given = {name: getattr(self, name) for name in defaults}
        return shown + "".join(f", {name}={value}" for name, value in given.items() if value != defaults[name])

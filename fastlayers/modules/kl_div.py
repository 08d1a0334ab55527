"""Divergences between distributions, as losses."""

from __future__ import annotations

from torch import Tensor, nn

from fastlayers import functional


class FusedKLDivLoss(nn.KLDivLoss):
    """:class:`torch.nn.KLDivLoss` through :func:`fastlayers.functional.kl_div`.

    Constructor, attributes and repr are torch's: the input are log-probabilities. For logits see
    :class:`FusedKLDivLogitsLoss`.
    """

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return functional.kl_div(input, target, reduction=self.reduction, log_target=self.log_target)


class FusedKLDivLogitsLoss(nn.Module):
    """Kullback-Leibler divergence of logits, see :func:`fastlayers.functional.kl_div_logits`.

    Args:
        temperature, ignore_index, reduction: as for the function.

    Shape: student and teacher (*, C); labels (*) or None.
    """

    def __init__(self, temperature: float = 1.0, ignore_index: int = -100, reduction: str = "batchmean") -> None:
        super().__init__()
        self.temperature = temperature
        self.ignore_index = ignore_index
        self.reduction = reduction

    def forward(self, student: Tensor, teacher: Tensor, labels: Tensor | None = None) -> Tensor:
        return functional.kl_div_logits(
            student, teacher, labels=labels,
            ignore_index=self.ignore_index, temperature=self.temperature, reduction=self.reduction,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"temperature={self.temperature}, ignore_index={self.ignore_index}, reduction={self.reduction!r}"


class FusedJSDivLogitsLoss(FusedKLDivLogitsLoss):
    """Generalised Jensen-Shannon divergence of logits, see :func:`fastlayers.functional.js_div_logits`.

    Args:
        beta, temperature, ignore_index, reduction: as for the function.

    Shape: student and teacher (*, C); labels (*) or None.
    """

    def __init__(
        self, beta: float = 0.5, temperature: float = 1.0, ignore_index: int = -100, reduction: str = "batchmean"
    ) -> None:
        super().__init__(temperature, ignore_index, reduction)
        self.beta = beta

    def forward(self, student: Tensor, teacher: Tensor, labels: Tensor | None = None) -> Tensor:
        return functional.js_div_logits(
            student, teacher, labels=labels, beta=self.beta,
            ignore_index=self.ignore_index, temperature=self.temperature, reduction=self.reduction,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"beta={self.beta}, {super().extra_repr()}"

"""The loss at the end of a language model, with the linear layer in it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fastlayers import functional
from fastlayers.modules.own_options import OwnOptions

if not TYPE_CHECKING and hasattr(nn, "LinearCrossEntropyLoss"):  # types are checked alike with every torch
    from torch.nn import LinearCrossEntropyLoss
else:

    class LinearCrossEntropyLoss(nn.modules.loss._WeightedLoss):
        """What ``torch.nn.LinearCrossEntropyLoss`` of torch 2.13 constructs, for torch before it."""

        def __init__(
            self,
            in_features: int,
            num_classes: int,
            *,
            out_features: tuple[int, ...] = (),
            bias: bool = False,
            device: Any = None,
            dtype: Any = None,
            reduction: str = "mean",
            weight: Tensor | None = None,
            ignore_index: int | None = None,
            label_smoothing: float = 0.0,
            options: Any = None,
        ) -> None:
            if weight is not None and weight.shape != (num_classes,):
                raise RuntimeError(f"expected weight shape to be {(num_classes,)}, got {tuple(weight.shape)}")
            if not 0.0 <= label_smoothing <= 1.0:
                raise RuntimeError(f"expected label_smoothing to be in range [0, 1], got {label_smoothing}")
            super().__init__(weight=weight, size_average=None, reduce=None, reduction=reduction)
            self.num_classes = num_classes
            self.out_features = out_features
            self.ignore_index = ignore_index
            self.label_smoothing = label_smoothing
            self.linear = nn.Linear(in_features, math.prod(out_features, start=num_classes), bias, device, dtype)
            self.options = options

        def extra_repr(self) -> str:
            return (
                f"in_features={self.linear.in_features}, num_classes={self.num_classes},"
                f" out_features={self.out_features}, bias={self.linear.bias is not None}, reduction={self.reduction},"
                f" ignore_index={self.ignore_index}, label_smoothing={self.label_smoothing}, options={self.options}"
            )


class FusedLinearCrossEntropyLoss(OwnOptions, LinearCrossEntropyLoss):
    """torch 2.13's ``nn.LinearCrossEntropyLoss`` through :func:`fastlayers.functional.linear_cross_entropy`.

    It owns the linear layer, ``linear``. For a weight that a model holds, as its ``lm_head.weight``, call the function.
    Before torch 2.13 it has the same constructor, parameters and repr.

    Args:
        args, kwargs: as for ``torch.nn.LinearCrossEntropyLoss``: in_features, num_classes, out_features, bias, device,
            dtype, reduction, weight, ignore_index, label_smoothing, options.
        softcap, z_loss, logit_scale, chunk_size, acc_dtype: as for the function.

    Shape: input (..., in_features), target (...) or as the function takes it; a scalar, or for ``reduction="none"`` the
    losses in the shape of the target.
    """

    softcap: float | None = None
    z_loss: float = 0.0
    logit_scale: float = 1.0
    chunk_size: int | None = None
    acc_dtype: torch.dtype | None = None

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        weight: Tensor = self.linear.weight
        bias: Tensor | None = self.linear.bias
        if self.out_features:
            shape = (self.num_classes, *self.out_features)
            weight, bias = weight.reshape(*shape, -1), None if bias is None else bias.reshape(shape)
        return functional.linear_cross_entropy(
            input, weight, target, linear_bias=bias, weight=self.weight, reduction=self.reduction,
            ignore_index=self.ignore_index, label_smoothing=self.label_smoothing, options=self.options,
            softcap=self.softcap, z_loss=self.z_loss, logit_scale=self.logit_scale, chunk_size=self.chunk_size,
            acc_dtype=self.acc_dtype,
        )  # fmt: skip

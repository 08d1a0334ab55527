"""Batch normalisation layers, plain and with what follows them: a residual, an activation."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fastlayers import functional
from fastlayers.ops.activations import activation


def normalize(layer: _BatchNorm, input: Tensor, residual: Tensor | None = None, act: str | None = None) -> Tensor:
    """What ``forward`` of torch's layers does, with :func:`fastlayers.functional.batch_norm` at its end."""
    layer._check_input_dim(input)
    training, momentum = layer.training, layer.momentum
    mean, var, batches = layer.running_mean, layer.running_var, None
    if training:
        if layer.track_running_stats:
            batches = layer.num_batches_tracked
            if batches is not None and momentum is None:
                batches.add_(1)
                momentum, batches = 1.0 / float(batches), None
        else:
            mean = var = None
    elif mean is None and var is None:
        training = True
    return functional.batch_norm(
        input, mean, var, layer.weight, layer.bias, training, 0.0 if momentum is None else momentum, layer.eps,
        residual=residual, act=act, num_batches_tracked=batches,
    )  # fmt: skip


class FusedBatchNorm1d(nn.BatchNorm1d):
    """:class:`torch.nn.BatchNorm1d` through :func:`fastlayers.functional.batch_norm`."""

    def forward(self, input: Tensor) -> Tensor:
        return normalize(self, input)


class FusedBatchNorm2d(nn.BatchNorm2d):
    """:class:`torch.nn.BatchNorm2d` through :func:`fastlayers.functional.batch_norm`."""

    def forward(self, input: Tensor) -> Tensor:
        return normalize(self, input)


class FusedBatchNorm3d(nn.BatchNorm3d):
    """:class:`torch.nn.BatchNorm3d` through :func:`fastlayers.functional.batch_norm`."""

    def forward(self, input: Tensor) -> Tensor:
        return normalize(self, input)


class _BatchNormAct(_BatchNorm):
    """act(batch_norm(x) + residual): what the layers below share."""

    def __init__(self, *args: Any, act: str | None = "relu", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        activation(act)
        self.act = act

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        return normalize(self, input, residual, self.act)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, act={self.act}"

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        # torch's converter, and timm's, put an nn.SyncBatchNorm in the place of whatever is a BatchNorm, and the
        # activation would be gone without a word. They offer no hook; this call is where they show themselves.
        if self.act is not None and sys._getframe(1).f_code.co_name == "convert_sync_batchnorm":
            raise TypeError(
                f"{type(self).__name__} cannot become an nn.SyncBatchNorm, which has no activation (act={self.act!r}); "
                "in a model whose norms are to be synchronised, write torch's layer and the activation after it"
            )
        return super().named_children()


class FusedBatchNormAct2d(_BatchNormAct, nn.BatchNorm2d):
    """:class:`torch.nn.BatchNorm2d`, a residual where given, an activation: :func:`fastlayers.functional.batch_norm`.

    ``nn.SyncBatchNorm.convert_sync_batchnorm`` raises a TypeError where it meets one with an activation.

    Args:
        args, kwargs: as for :class:`torch.nn.BatchNorm2d`.
        act: name of the activation, or None.

    Shape: input as torch has it, and an optional residual of the same shape.

    Raises:
        ValueError: act is not the name of an activation.
    """


class FusedBatchNormAct1d(_BatchNormAct, nn.BatchNorm1d):
    """As :class:`FusedBatchNormAct2d`, for the input of :class:`torch.nn.BatchNorm1d`."""


class FusedBatchNormAct3d(_BatchNormAct, nn.BatchNorm3d):
    """As :class:`FusedBatchNormAct2d`, for the input of :class:`torch.nn.BatchNorm3d`."""

"""Batch normalisation layers, plain and with what follows them: a residual, an activation."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fastlayers import functional
from fastlayers.ops.activations import activation
from fastlayers.ops.sync_batch_norm import sync_batch_norm


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
        caller = sys._getframe(1)
        if self.act is not None and caller.f_code.co_name == "convert_sync_batchnorm":
            synced = caller.f_locals.get("module_output")
            if not isinstance(synced, nn.SyncBatchNorm):
                raise TypeError(
                    f"{type(self).__name__} would lose its activation (act={self.act!r}) here; call "
                    "fastlayers.FusedSyncBatchNormAct.convert_sync_batchnorm(model)"
                )
            _activate(synced, FusedSyncBatchNormAct, self.act)
        return super().named_children()


def _activate(layer: nn.SyncBatchNorm, cls: type[FusedSyncBatchNormAct], act: str | None) -> None:
    """Make a layer that a converter has put together one of ours, with an activation."""
    layer.__class__ = cls
    layer.act = act  # type: ignore[assignment]


class FusedBatchNormAct2d(_BatchNormAct, nn.BatchNorm2d):
    """:class:`torch.nn.BatchNorm2d`, a residual where given, an activation: :func:`fastlayers.functional.batch_norm`.

    ``nn.SyncBatchNorm.convert_sync_batchnorm`` replaces one with an activation by a :class:`FusedSyncBatchNormAct`.

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


class FusedSyncBatchNormAct(_BatchNormAct, nn.SyncBatchNorm):
    """:class:`torch.nn.SyncBatchNorm`, a residual where given, an activation: ``act(batch_norm(x) + residual)``.

    In training, with several processes, the statistics are of the batches of all of them, of any sizes; a batch may be
    empty. The forward has one all-gather of two numbers a channel, the backward one all-reduce. Otherwise the layer is
    :func:`fastlayers.functional.batch_norm`. Unlike torch's it also works on a CPU, where however
    DistributedDataParallel refuses all SyncBatchNorm layers. It has no second derivative.

    It keeps for backward what :func:`fastlayers.functional.batch_norm` keeps.

    Args:
        args, kwargs: as for :class:`torch.nn.SyncBatchNorm`.
        act: name of the activation, or None.

    Shape: input (N, C, *), and an optional residual of the same shape.

    Raises:
        ValueError: act is not the name of an activation.
    """

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        group = self._group()
        if group is None:
            return normalize(self, input, residual, self.act)
        mean = var = None
        momentum = self.momentum
        if self.track_running_stats:
            mean, var, batches = self.running_mean, self.running_var, self.num_batches_tracked
            if batches is not None:
                batches.add_(1)
                momentum = 1.0 / float(batches) if momentum is None else momentum
        return sync_batch_norm(
            input, mean, var, self.weight, self.bias, 0.0 if momentum is None else momentum, self.eps, residual,
            self.act, group.group_name,
        )  # fmt: skip

    def _group(self) -> Any:
        """The processes whose statistics a call now takes; None for those of its own input, or the running ones."""
        if not self.training or not dist.is_available() or not dist.is_initialized():
            return None
        group = self.process_group or dist.group.WORLD
        return group if dist.get_world_size(group) > 1 else None  # -1 outside of the group

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any = None) -> nn.Module:
        """Replace all BatchNorm layers of a model by this one, as :meth:`torch.nn.SyncBatchNorm.convert_sync_batchnorm`
        does by torch's; activations are kept.

        Args:
            module: the model.
            process_group: the processes to synchronise, by default all of them.

        Returns:
            The model; if it is itself a BatchNorm layer, the new layer.
        """
        converted: nn.Module = super().convert_sync_batchnorm(module, process_group)
        if isinstance(module, _BatchNorm):
            assert isinstance(converted, nn.SyncBatchNorm)
            _activate(converted, cls, module.act if isinstance(module, _BatchNormAct) else None)
        return converted

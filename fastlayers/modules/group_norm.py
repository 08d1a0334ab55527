"""Layers that normalise groups of channels, or each channel of each image."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm

from fastlayers import functional
from fastlayers.ops.activations import activation


class FusedGroupNorm(nn.GroupNorm):
    """:class:`torch.nn.GroupNorm` through :func:`fastlayers.functional.group_norm`."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


class FusedGroupNormAct(nn.GroupNorm):
    """:class:`torch.nn.GroupNorm` and an activation, see :func:`fastlayers.functional.group_norm`.

    Args:
        args, kwargs: as for :class:`torch.nn.GroupNorm`.
        act: name of the activation, or None.

    Raises:
        ValueError: act is not the name of an activation.
    """

    def __init__(self, *args: Any, act: str | None = "silu", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        activation(act)
        self.act = act

    def forward(self, input: Tensor) -> Tensor:
        return functional.group_norm(input, self.num_groups, self.weight, self.bias, self.eps, act=self.act)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, act={self.act}"


def apply_instance_norm(self: _InstanceNorm, input: Tensor, act: str | None = None) -> Tensor:
    """What torch's layers call on a batch, once they have checked its shape; and an activation."""
    use_input_stats = self.training or not self.track_running_stats
    momentum = 0.0 if self.momentum is None else self.momentum
    statistics = (self.running_mean, self.running_var)
    return functional.instance_norm(
        input, *statistics, self.weight, self.bias, use_input_stats, momentum, self.eps, act=act
    )


class FusedInstanceNorm1d(nn.InstanceNorm1d):
    """:class:`torch.nn.InstanceNorm1d` through :func:`fastlayers.functional.instance_norm`."""

    _apply_instance_norm = apply_instance_norm


class FusedInstanceNorm2d(nn.InstanceNorm2d):
    """:class:`torch.nn.InstanceNorm2d` through :func:`fastlayers.functional.instance_norm`."""

    _apply_instance_norm = apply_instance_norm


class FusedInstanceNorm3d(nn.InstanceNorm3d):
    """:class:`torch.nn.InstanceNorm3d` through :func:`fastlayers.functional.instance_norm`."""

    _apply_instance_norm = apply_instance_norm

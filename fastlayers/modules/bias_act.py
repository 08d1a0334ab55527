"""Activation layers, and a bias with the activation that follows it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastlayers import functional
from fastlayers.ops.activations import parameters_of


class FusedBiasAct(nn.Module):
    """act(x + bias), see :func:`fastlayers.functional.bias_act`.

    Args:
        num_features: size of the bias, and of the last dimension of x.
        act: name of the activation.
        device, dtype: of the bias.
        parameters: of the activation, by torch's names.

    Attributes:
        bias: (num_features,), zeros at first.

    Raises:
        ValueError: act is not the name of an activation.
        TypeError: the activation does not have such a parameter.
    """

    def __init__(
        self,
        num_features: int,
        act: str = "gelu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **parameters: float,
    ) -> None:
        super().__init__()
        parameters_of(act, parameters)
        self.act = act
        self.parameters_of_act = parameters
        self.bias = nn.Parameter(torch.zeros(num_features, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return functional.bias_act(x, self.bias, self.act, **self.parameters_of_act)

    def extra_repr(self) -> str:
        parameters = "".join(f", {name}={value}" for name, value in self.parameters_of_act.items())
        return f"{self.bias.numel()}, act={self.act}{parameters}"


class FusedGELU(nn.GELU):
    """:class:`torch.nn.GELU` through :func:`fastlayers.functional.gelu`."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.gelu(input, approximate=self.approximate)


class FusedMish(nn.Mish):
    """:class:`torch.nn.Mish` through :func:`fastlayers.functional.mish`."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.mish(input, self.inplace)


class FusedQuickGELU(nn.Module):
    """x·sigmoid(1.702·x), see :func:`fastlayers.functional.quick_gelu`."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.quick_gelu(input)


class FusedReLU2(nn.Module):
    """relu(x)², see :func:`fastlayers.functional.relu2`."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.relu2(input)


class FusedSiLU(nn.SiLU):
    """:class:`torch.nn.SiLU` through :func:`fastlayers.functional.silu`."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.silu(input, self.inplace)


class FusedHardswish(nn.Hardswish):
    """:class:`torch.nn.Hardswish` through :func:`fastlayers.functional.hardswish`."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.hardswish(input, self.inplace)


class FusedLeakyReLU(nn.LeakyReLU):
    """:class:`torch.nn.LeakyReLU` through :func:`fastlayers.functional.leaky_relu`."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.leaky_relu(input, self.negative_slope, self.inplace)


class FusedELU(nn.ELU):
    """:class:`torch.nn.ELU` through :func:`fastlayers.functional.elu`."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.elu(input, self.alpha, self.inplace)


class FusedSoftplus(nn.Softplus):
    """:class:`torch.nn.Softplus` through :func:`fastlayers.functional.softplus`."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.softplus(input, self.beta, self.threshold)

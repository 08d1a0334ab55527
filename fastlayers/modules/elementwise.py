"""Elementwise layers: the joints between the branches of a network."""

from __future__ import annotations

from torch import Tensor, nn

from fastlayers import functional


class FusedReLUAdd(nn.Module):
    """relu(x) + y + bias, see :func:`fastlayers.functional.relu_add`.

    Args:
        bias: a number added to every element.

    Shape: x and y broadcast against each other, as in torch.
    """

    def __init__(self, bias: float = 0.0) -> None:
        super().__init__()
        self.bias = bias

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.relu_add(x, y, self.bias)

    def extra_repr(self) -> str:
        return f"bias={self.bias}" if self.bias else ""


class FusedAddReLU(nn.Module):
    """relu(x + y), the end of a residual block. See :func:`fastlayers.functional.add_relu`.

    Shape: x and y broadcast against each other, as in torch.
    """

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.add_relu(x, y)


class FusedMul(nn.Module):
    """x·y, both gradients from one kernel. See :func:`fastlayers.functional.mul`.

    Shape: x and y broadcast against each other, as in torch.
    """

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.mul(x, y)

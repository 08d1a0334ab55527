"""The linear layer."""

from __future__ import annotations

from torch import Tensor, nn

from fastlayers.ops.linear import linear


class FusedLinear(nn.Linear):
    """:class:`torch.nn.Linear` through :func:`fastlayers.functional.linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)

"""Pooling."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fastlayers import functional


class FusedMaxPool2d(nn.MaxPool2d):
    """:class:`torch.nn.MaxPool2d` through :func:`fastlayers.functional.max_pool2d`."""

    def forward(self, input: Tensor) -> Any:
        options = (self.stride, self.padding, self.dilation, self.ceil_mode, self.return_indices)
        return functional.max_pool2d(input, self.kernel_size, *options)

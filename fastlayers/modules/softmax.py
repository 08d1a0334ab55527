"""Softmax layers."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fastlayers import functional


class FusedSoftmax(nn.Softmax):
    """:class:`torch.nn.Softmax` through :func:`fastlayers.functional.softmax`.

    Constructor, attributes and repr are torch's. ``dim=None`` keeps torch's deprecated implicit choice of the
    dimension, and its warning.
    """

    def forward(self, input: Tensor) -> Tensor:
        if self.dim is None:
            return F.softmax(input, None, _stacklevel=5)
        return functional.softmax(input, self.dim)


class FusedLogSoftmax(nn.LogSoftmax):
    """:class:`torch.nn.LogSoftmax` through :func:`fastlayers.functional.log_softmax`.

    Constructor, attributes and repr are torch's. ``dim=None`` keeps torch's deprecated implicit choice of the
    dimension, and its warning.
    """

    def forward(self, input: Tensor) -> Tensor:
        if self.dim is None:
            return F.log_softmax(input, None, _stacklevel=5)
        return functional.log_softmax(input, self.dim)

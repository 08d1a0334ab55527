"""Global response normalisation as a layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastlayers import functional


class FusedGlobalResponseNorm(nn.Module):
    """Global response normalisation, see :func:`fastlayers.functional.global_response_norm`.

    timm's ``GlobalResponseNorm``, with its parameters ``weight`` and ``bias``, which begin as zeros.

    Args:
        dim: the number of channels.
        eps: added to the mean.
        channels_last: whether the channels are the last dimension.
        device, dtype: of the parameters.

    Shape: (N, H, W, C), or (N, C, H, W) without ``channels_last``; any number of dimensions of space.
    """

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        channels_last: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.channels_last = eps, channels_last
        self.weight = nn.Parameter(torch.zeros(dim, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(dim, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return functional.global_response_norm(x, self.weight, self.bias, self.eps, self.channels_last)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, channels_last={self.channels_last}"

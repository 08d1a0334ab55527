"""Pooling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fastlayers.ops import max_pool2d as _max_pool2d


def max_pool2d(
    input: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    r"""The maximum of each window of an image, and a backward that writes each gradient once.

    .. math:: y_{c,i,j} = \max_{u,v}\; x_{c,\; s i + d u - p,\; s j + d v - p}

    Stands for :func:`torch.nn.functional.max_pool2d`: the maximum is the first one of equal elements, and NaN where the
    window holds one.

    Args:
        input: (N, C, H, W) or (C, H, W); the kernels take contiguous and channels_last images, and windows of up to 254
            elements.
        kernel_size, stride, padding, dilation, ceil_mode: as in torch.
        return_indices: whether to return the indices of the maxima, too. Torch computes these calls.

    Returns:
        A tensor in torch's memory format.

    Keeps: the place of each maximum in its window, one byte an output. Torch keeps eight, and the input.
    """
    if return_indices:
        return F.max_pool2d(input, kernel_size, stride, padding, dilation, ceil_mode, True)  # type: ignore[call-overload]
    return _max_pool2d.max_pool2d(input, kernel_size, stride, padding, dilation, ceil_mode)

"""x·gate(mean of x), the squeeze-and-excite of EfficientNet-B0."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.case import Case, Input, Op
from fastlayers import functional


def fused_squeeze_excite(x: Tensor, weight: Tensor) -> Tensor:
    return functional.squeeze_excite(x, lambda mean: torch.sigmoid(mean * weight))


def eager_squeeze_excite(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.sigmoid(x.mean((2, 3), keepdim=True) * weight)


SQUEEZE_EXCITE = Op("squeeze_excite", "squeeze_excite", fused_squeeze_excite, eager_squeeze_excite)


def images(*shape: int, nhwc: bool = True) -> Case:
    """The forward reads x twice and writes the product. The backward reads dy twice and x once, and writes dx."""
    inputs = (Input(shape, channels_last=nhwc), Input((shape[1], 1, 1), parameter=True))
    return Case(SQUEEZE_EXCITE, inputs, torch.bfloat16, "3b", "4b", label="NHWC" if nhwc else "NCHW")


CASES = [images(128, 96, 56, 56), images(128, 96, 56, 56, nhwc=False), images(128, 480, 14, 14)]

"""global_response_norm at the sizes of ConvNeXt V2-T, after the expansion of its blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.case import Case, Input, Op
from fastlayers import functional


def eager_global_response_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    norm = x.norm(p=2, dim=(1, 2), keepdim=True)
    return x + torch.addcmul(bias, weight, x * (norm / (norm.mean(dim=-1, keepdim=True) + 1e-6)))


GLOBAL_RESPONSE_NORM = Op(
    "global_response_norm", "response_norm", functional.global_response_norm, eager_global_response_norm
)


def images(*shape: int) -> Case:
    """The forward reads x twice and writes y. The backward reads dy and x twice and writes dx."""
    parameter = Input((shape[-1],), parameter=True)
    return Case(
        GLOBAL_RESPONSE_NORM, (Input(shape), parameter, parameter), torch.bfloat16, "3b", "5b",
        bars={"forward": 0.85, "backward": 0.85}, contestants=("eager", "compile", "fastlayers", "triton"),
    )  # fmt: skip


CASES = [images(128, 56, 56, 384), images(128, 28, 28, 768), images(128, 14, 14, 1536)]

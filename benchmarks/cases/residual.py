"""residual + dropout(x) and residual + drop_path(gamma·x), the ends of residual branches."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.case import Case, Input, Op
from fastlayers import functional

P = 0.1


def fused_dropout_add(x: Tensor, residual: Tensor) -> Tensor:
    return functional.dropout_add(x, residual, P)


def eager_dropout_add(x: Tensor, residual: Tensor) -> Tensor:
    return residual + F.dropout(x, P)


def fused_scale_add(x: Tensor, residual: Tensor, gamma: Tensor, drop_path: float = 0.0) -> Tensor:
    return functional.scale_add(x, gamma, residual, drop_path, True)


def eager_scale_add(x: Tensor, residual: Tensor, gamma: Tensor, drop_path: float = 0.0) -> Tensor:
    y = x * gamma
    if drop_path:  # as in timm
        keep = y.new_empty((y.shape[0], *[1] * (y.dim() - 1))).bernoulli_(1 - drop_path)
        y = y * keep.div_(1 - drop_path)
    return residual + y


DROPOUT_ADD = Op("dropout_add", "residual", fused_dropout_add, eager_dropout_add)
SCALE_ADD = Op("scale_add", "residual", fused_scale_add, eager_scale_add)

DROPOUT_BARS = {"forward": 0.95, "backward": 0.90}
SCALE_BARS = {"forward": 0.95, "backward": 0.88}
HOST_BARS = {"host_forward": 1.5, "host_training": 1.3}


def dropout(*shape: int, dtype: torch.dtype = torch.bfloat16, **fields) -> Case:
    """The gradient of the residual is the incoming gradient and costs nothing.

    Each contestant draws its own mask, so results are not compared here. tests/ops/test_residual.py does that.
    """
    return Case(DROPOUT_ADD, (Input(shape), Input(shape)), dtype, "3b", "2b", tolerance=math.inf, **fields)


def scale(*shape: int, nhwc: bool = False, drop_path: float = 0.0, label: str = "", **fields) -> Case:
    """dy and x are read, and dx is written. gamma and its gradient are not counted."""
    inputs = (Input(shape, channels_last=nhwc), Input(shape, channels_last=nhwc))
    gamma = Input((shape[1], 1, 1) if len(shape) == 4 else shape[-1:], parameter=True)
    dtype = fields.pop("dtype", torch.bfloat16)
    if drop_path:
        fields |= {"options": {"drop_path": drop_path}, "tolerance": math.inf}
    return Case(SCALE_ADD, (*inputs, gamma), dtype, "3b", "3b", label="NHWC" if nhwc else label, **fields)


CASES = [
    *(dropout(2**26, dtype=dtype, bars=DROPOUT_BARS) for dtype in (torch.bfloat16, torch.float16, torch.float32)),
    dropout(2**12, host=True, bars=HOST_BARS),
    *(dropout(2**power) for power in (16, 20)),
    *(scale(65536, 768, dtype=dtype, bars=SCALE_BARS) for dtype in (torch.bfloat16, torch.float16, torch.float32)),
    scale(256, 96, 56, 56, nhwc=True, bars=SCALE_BARS),
    *(scale(64, *shape, nhwc=True, bars=SCALE_BARS) for shape in ((96, 56, 56), (384, 14, 14))),
    scale(256, 768, 7, 7, nhwc=True, bars=SCALE_BARS),
    scale(64, 96, 56, 56),
    scale(256, 197, 768, drop_path=0.1, label="drop_path"),
    scale(4096, host=True, bars=HOST_BARS),
]

"""group_norm with the SiLU of a diffusion network's block, and instance_norm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.case import Case, Input, Op
from benchmarks.implementations import liger
from fastlayers import functional

EPS = 1e-5
GROUPS = {"num_groups": 32}


def fused_silu(x: Tensor, weight: Tensor, bias: Tensor, num_groups: int) -> Tensor:
    return functional.group_norm(x, num_groups, weight, bias, EPS, act="silu")


def eager_silu(x: Tensor, weight: Tensor, bias: Tensor, num_groups: int) -> Tensor:
    return F.silu(F.group_norm(x, num_groups, weight, bias, EPS))


def liger_silu(x: Tensor, weight: Tensor, bias: Tensor, num_groups: int) -> Tensor:
    assert LIGER is not None
    return F.silu(LIGER(x, weight, bias, x.shape[1], num_groups))


def fused_group_norm(x: Tensor, weight: Tensor, bias: Tensor, num_groups: int) -> Tensor:
    return functional.group_norm(x, num_groups, weight, bias, EPS)


def eager_group_norm(x: Tensor, weight: Tensor, bias: Tensor, num_groups: int) -> Tensor:
    return F.group_norm(x, num_groups, weight, bias, EPS)


def fused_instance_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.instance_norm(x, None, None, weight, bias, eps=EPS)


def eager_instance_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.instance_norm(x, None, None, weight, bias, eps=EPS)


LIGER = liger("liger_group_norm", eps=EPS)
GROUP_NORM = Op("group_norm", "group_norm", fused_group_norm, eager_group_norm)
GROUP_NORM_SILU = Op(
    "group_norm_silu", "group_norm", fused_silu, eager_silu, liger=None if LIGER is None else liger_silu
)
INSTANCE_NORM = Op("instance_norm", "group_norm", fused_instance_norm, eager_instance_norm)

#: (N, C, H, W): smallest fraction of the copy bandwidth to reach, forward and backward.
BARS = {
    (8, 320, 64, 64): {"forward": 0.90, "backward": 0.80},
    (8, 640, 32, 32): {"forward": 0.90, "backward": 0.80},
    (4, 128, 512, 512): {"forward": 0.92, "backward": 0.88},
}


def row(op: Op, *shape: int, dtype: torch.dtype = torch.bfloat16, nhwc: bool = False, **fields) -> Case:
    """A group is read for its statistics and again to be normalised. The backward reads x and dy twice as well."""
    parameter = Input(shape[1:2], parameter=True)
    inputs = (Input(shape, channels_last=nhwc), parameter, parameter)
    return Case(op, inputs, dtype, "3b", "5b", options=GROUPS, label="NHWC" if nhwc else "NCHW", **fields)


def instances(*shape: int) -> Case:
    """A channel of one image fits in an SM and is read only once."""
    parameter = Input(shape[1:2], parameter=True)
    return Case(INSTANCE_NORM, (Input(shape), parameter, parameter), torch.bfloat16, "2b", "3b", label="NCHW")


CASES = [
    *(
        row(GROUP_NORM_SILU, *shape, dtype=dtype, bars=bars)
        for dtype in (torch.bfloat16, torch.float32)
        for shape, bars in BARS.items()
    ),
    # Without Liger, which rounds the weight's gradient to bfloat16 in float16.
    *(
        row(
            GROUP_NORM_SILU,
            *shape,
            dtype=torch.float16,
            bars=bars,
            contestants=("eager", "compile", "fastlayers", "triton", "cuda"),
        )
        for shape, bars in BARS.items()
    ),
    row(GROUP_NORM_SILU, 8, 320, 64, 64, nhwc=True),
    instances(8, 64, 128, 128),
    *(
        row(GROUP_NORM, *shape, host=True, bars={"host_forward": 1.5, "host_training": 1.3})
        for shape in ((2, 64, 4, 4), (4, 64, 16, 16))
    ),
]

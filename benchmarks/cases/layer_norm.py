"""layer_norm and rms_norm, with a residual and over the channels of an image, and two sweeps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.case import Case, Input, Op
from benchmarks.implementations import liger
from fastlayers import functional

EPS = 1e-6


def fused_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.layer_norm(x, weight.shape, weight, bias, EPS)


def eager_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, EPS)  # type: ignore[arg-type]


def fused_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, EPS)


def eager_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)  # type: ignore[arg-type]


def fused_add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return functional.add_layer_norm(x, residual, weight.shape, weight, bias, EPS)


def eager_add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    s = x + residual
    return eager_layer_norm(s, weight, bias), s


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return functional.add_rms_norm(x, residual, weight.shape, weight, EPS)


def eager_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    s = x + residual
    return eager_rms_norm(s, weight), s


def eager_channel_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return eager_layer_norm(x.permute(0, 2, 3, 1), weight, bias).permute(0, 3, 1, 2)


def fused_ada_layer_norm(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return functional.ada_layer_norm(x, x.shape[-1:], scale, shift, EPS)


def eager_ada_layer_norm(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=EPS) * (1 + scale) + shift


# Liger's casting "gemma" computes as torch does: everything in float32, rounded once.
LAYER_NORM = Op(
    "layer_norm", "layer_norm", fused_layer_norm, eager_layer_norm, liger=liger("liger_layer_norm", eps=EPS)
)
RMS_NORM = Op(
    "rms_norm",
    "layer_norm",
    fused_rms_norm,
    eager_rms_norm,
    liger=liger("liger_rms_norm", eps=EPS, casting_mode="gemma"),
)
ADD_LAYER_NORM = Op("add_layer_norm", "layer_norm", fused_add_layer_norm, eager_add_layer_norm)
ADD_RMS_NORM = Op(
    "add_rms_norm",
    "layer_norm",
    fused_add_rms_norm,
    eager_add_rms_norm,
    liger=liger("liger_fused_add_rms_norm", eps=EPS, casting_mode="gemma"),
)
ADA_LAYER_NORM = Op("ada_layer_norm", "layer_norm", fused_ada_layer_norm, eager_ada_layer_norm)
CHANNEL_LAYER_NORM = Op("channel_layer_norm", "layer_norm", functional.channel_layer_norm, eager_channel_layer_norm)

#: The number of parameters: a weight, or a weight and a bias.
PARAMETERS = {LAYER_NORM: 2, RMS_NORM: 1, ADD_LAYER_NORM: 2, ADD_RMS_NORM: 1, CHANNEL_LAYER_NORM: 2}

#: (rows, columns): smallest fraction of the copy bandwidth to reach, forward and backward.
BARS = {
    (32768, 1024): {"forward": 0.94, "backward": 0.90},
    (32768, 768): {"forward": 0.94, "backward": 0.90},
    (16384, 4096): {"forward": 0.97, "backward": 0.92},
    (8192, 8192): {"forward": 0.97, "backward": 0.92},
    (4096, 16384): {"forward": 0.95, "backward": 0.88},
    (4096, 32768): {"forward": 0.95, "backward": 0.88},
    (16384, 4095): {"forward": 0.92, "backward": 0.85},
    (200704, 96): {"forward": 0.85, "backward": 0.80},
}
ADD_BARS = {shape: {"forward": 0.97, "backward": 0.93} for shape in ((16384, 4096), (8192, 8192))}


def parameters(op: Op, size: int) -> tuple[Input, ...]:
    """Parameters in x's dtype. They and their gradients are not counted."""
    return (Input((size,), parameter=True),) * PARAMETERS[op]


def row(op: Op, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16, **fields) -> Case:
    return Case(op, (Input((rows, columns)), *parameters(op, columns)), dtype, "2b", "3b", **fields)


def added(op: Op, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16, **fields) -> Case:
    """The backward reads the gradients of both outputs and the sum, and writes one gradient for x and residual."""
    x = Input((rows, columns))
    return Case(op, (x, x, *parameters(op, columns)), dtype, "4b", "4b", **fields)


def modulated(samples: int, tokens: int, columns: int, **fields) -> Case:
    """Scale and shift of each sample are read and their gradients written once, and not counted."""
    of_sample = Input((samples, 1, columns))
    inputs = (Input((samples, tokens, columns)), of_sample, of_sample)
    return Case(
        ADA_LAYER_NORM, inputs, torch.bfloat16, "2b", "3b",
        contestants=("eager", "compile", "fastlayers", "triton"), **fields,
    )  # fmt: skip


def over_channels(*shape: int, nhwc: bool) -> Case:
    inputs = (Input(shape, channels_last=nhwc), *parameters(CHANNEL_LAYER_NORM, shape[1]))
    return Case(CHANNEL_LAYER_NORM, inputs, torch.bfloat16, "2b", "3b", label="NHWC" if nhwc else "NCHW")


HOST = {"host_forward": 1.5, "host_training": 1.3}
SWEPT = ("eager", "compile", "triton", "cuda")

CASES = [
    *(
        row(op, *shape, dtype=dtype, bars=bars)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for op in (LAYER_NORM, RMS_NORM)
        for shape, bars in BARS.items()
    ),
    *(
        added(op, *shape, dtype=dtype, bars=bars)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for op in (ADD_LAYER_NORM, ADD_RMS_NORM)
        for shape, bars in ADD_BARS.items()
    ),
    # DiT-S/2, DiT-XL/2 and a video: channels of 384, 1152 and 3072.
    *(
        modulated(*shape, bars={"forward": 0.9, "backward": 0.85})
        for shape in ((256, 256, 384), (64, 256, 1152), (2, 4096, 3072))
    ),
    *(over_channels(64, 96, 56, 56, nhwc=nhwc) for nhwc in (True, False)),
    *(row(op, *shape, host=True, bars=HOST) for op in (LAYER_NORM, RMS_NORM) for shape in ((8, 64), (256, 256))),
    *(
        row(op, 4096, 2**power, suite="sweep", contestants=SWEPT)
        for op in (LAYER_NORM, RMS_NORM)
        for power in range(8, 16)
    ),
]

"""batch_norm with the residual and the ReLU of a ResNet's block, with float32 parameters as in mixed precision."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.case import Case, Input, Op, normal
from fastlayers import functional


def fused_relu(x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, training: bool) -> Tensor:
    return functional.batch_norm(x, mean, var, weight, bias, training, act="relu")


def eager_relu(x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, training: bool) -> Tensor:
    return torch.relu(F.batch_norm(x, mean, var, weight, bias, training))


def fused_add_relu(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, training: bool
) -> Tensor:
    return functional.batch_norm(x, mean, var, weight, bias, training, residual=residual, act="relu")


def eager_add_relu(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, training: bool
) -> Tensor:
    return torch.relu(F.batch_norm(x, mean, var, weight, bias, training) + residual)


def positive(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Variances."""
    return torch.rand(shape, dtype=dtype, device=device) + 0.5


BATCH_NORM = Op("batch_norm", "batch_norm", functional.batch_norm, F.batch_norm)
BATCH_NORM_RELU = Op("batch_norm_relu", "batch_norm", fused_relu, eager_relu)
BATCH_NORM_ADD_RELU = Op("batch_norm_add_relu", "batch_norm", fused_add_relu, eager_add_relu)

#: In float32, a few of ten million arguments of the ReLU have another sign than in float64. In (16, 256, 56, 56) three
#: of them give torch's dx an error of 1.5e-3.
RELU_TOLERANCE = 1e-2

SHAPES = ((64, 256, 56, 56), (128, 512, 28, 28))


def of_channels(
    size: int, make: Callable[[tuple[int, ...], torch.dtype, torch.device], Tensor] = normal, grad: bool = False
) -> Input:
    return Input((size,), make, grad=grad, dtype=torch.float32, parameter=True)


def train(op: Op, *shape: int, dtype: torch.dtype = torch.bfloat16, nhwc: bool = True, **fields) -> Case:
    """x is read for its statistics and again to be normalised. The backward reads x and dy twice as well.

    A residual is read once, and its gradient is written once. The ReLU's mask, one bit for each element, is not
    counted. The running statistics are updated in each call, and after a few calls they are those of x.
    """
    size = shape[1]
    x = Input(shape, channels_last=nhwc)
    inputs: tuple[Input, ...] = (
        x,
        of_channels(size),
        of_channels(size, positive),
        of_channels(size, grad=True),
        of_channels(size, grad=True),
    )
    label = "train NHWC" if nhwc else "train NCHW"
    forward, backward = "3b", "5b"
    if op is BATCH_NORM_ADD_RELU:
        inputs, forward, backward = (*inputs, x), "4b", "6b"
    if op is not BATCH_NORM and dtype != torch.bfloat16:
        fields["tolerance"] = RELU_TOLERANCE
    return Case(op, inputs, dtype, forward, backward, options={"training": True}, label=label, **fields)


def evaluate(*shape: int, dtype: torch.dtype, **fields) -> Case:
    """A case of inference, without a backward."""
    size = shape[1]
    parameters = (of_channels(size), of_channels(size, positive), of_channels(size), of_channels(size))
    inputs = (Input(shape, channels_last=True, grad=False), *parameters)
    return Case(BATCH_NORM_RELU, inputs, dtype, "2b", options={"training": False}, label="eval NHWC", **fields)


def with_bars(dtype: torch.dtype) -> list[Case]:
    nhwc, nchw = {"forward": 0.92, "backward": 0.90}, {"forward": 0.85, "backward": 0.85}
    return [
        *(train(BATCH_NORM_RELU, *shape, dtype=dtype, bars=nhwc) for shape in SHAPES),
        *(train(BATCH_NORM_ADD_RELU, *shape, dtype=dtype, bars=nhwc) for shape in SHAPES),
        *(evaluate(*shape, dtype=dtype, bars={"forward": 0.95}) for shape in SHAPES),
        *(train(BATCH_NORM_RELU, *shape, dtype=dtype, nhwc=False, bars=nchw) for shape in SHAPES),
    ]


CASES = [
    *(case for dtype in (torch.bfloat16, torch.float16, torch.float32) for case in with_bars(dtype)),
    train(BATCH_NORM_RELU, 128, 512, 7, 7),
    *(
        train(BATCH_NORM, *shape, host=True, bars={"host_forward": 1.5, "host_training": 1.3})
        for shape in ((2, 8, 4, 4), (16, 64, 14, 14))
    ),
]

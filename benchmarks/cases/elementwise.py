"""relu(x) + y, relu(x + y) and x·y, whose time is all memory traffic."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.case import Case, Input, Op
from fastlayers import functional


def eager_relu_add(x: Tensor, y: Tensor) -> Tensor:
    return torch.relu(x) + y


def eager_relu_add_bias(x: Tensor, y: Tensor, bias: Tensor) -> Tensor:
    return torch.relu(x) + y + bias


def eager_add_relu(x: Tensor, y: Tensor) -> Tensor:
    return torch.relu(x + y)


RELU_ADD = Op("relu_add", "elementwise", functional.relu_add, eager_relu_add)
RELU_ADD_BIAS = Op("relu_add_bias", "elementwise", functional.relu_add, eager_relu_add_bias)
ADD_RELU = Op("add_relu", "elementwise", functional.add_relu, eager_add_relu)
MUL = Op("mul", "elementwise", functional.mul, torch.mul)

#: Op, bytes of its backward, bars at 2^26 elements. The ReLU keeps one bit for each element. The gradient of the other
#: operand of an addition is the incoming gradient and costs nothing.
OPS = (
    (RELU_ADD, "2b+1bit", {"forward": 0.97, "backward": 0.92}),
    (ADD_RELU, "2b+1bit", {"forward": 0.97, "backward": 0.92}),
    (MUL, "5b", {"forward": 0.97, "backward": 0.97}),
)


def pair(op: Op, backward_bytes: str, *shape: int, dtype: torch.dtype = torch.bfloat16, nhwc=False, **fields) -> Case:
    inputs = (Input(shape, channels_last=nhwc), Input(shape, channels_last=nhwc))
    return Case(op, inputs, dtype, "3b", backward_bytes, label="NHWC" if nhwc else "", **fields)


def broadcast_mul(*shape: int, by: tuple[int, ...], nhwc: bool = False) -> Case:
    """x and dy are read, and dx is written. The small factor and its gradient are not counted."""
    inputs = (Input(shape, channels_last=nhwc), Input(by))
    label = f"by {'x'.join(map(str, by))}" + (" NHWC" if nhwc else "")
    return Case(MUL, inputs, torch.bfloat16, "2b", "3b", label=label)


def fused_excite(x: Tensor, gate: Tensor) -> Tensor:
    return functional.mul(x, torch.sigmoid(gate))


def eager_excite(x: Tensor, gate: Tensor) -> Tensor:
    return x * torch.sigmoid(gate)


def excite(*shape: int, nhwc: bool, **fields) -> Case:
    """Squeeze-and-excite. Small tensors are not counted, as for mul."""
    op = Op("mul_sigmoid", "elementwise", fused_excite, eager_excite)
    inputs = (Input(shape, channels_last=nhwc), Input((*shape[:2], 1, 1)))
    return Case(op, inputs, torch.bfloat16, "2b", "3b", label="NHWC" if nhwc else "NCHW", **fields)


def bias_row(*shape: int) -> Case:
    inputs = (Input(shape), Input(shape), Input(shape[-1:]))
    return Case(RELU_ADD_BIAS, inputs, torch.bfloat16, "3b", "2b+1bit", label="(C,) bias")


CASES = [
    *(
        pair(op, backward_bytes, 2**26, dtype=dtype, bars=bars)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for op, backward_bytes, bars in OPS
    ),
    *(pair(op, backward_bytes, 64, 256, 56, 56, nhwc=True) for op, backward_bytes, _ in OPS),
    broadcast_mul(128, 96, 112, 112, by=(128, 96, 1, 1), nhwc=True),
    excite(128, 96, 112, 112, nhwc=True, bars={"forward": 0.92, "backward": 0.85}),
    excite(128, 96, 112, 112, nhwc=False),
    broadcast_mul(65536, 768, by=(768,)),
    broadcast_mul(65536, 768, by=(65536, 1)),
    bias_row(65536, 768),
    *(pair(op, backward_bytes, 2**power, host=power == 12) for op, backward_bytes, _ in OPS for power in (12, 16, 20)),
]

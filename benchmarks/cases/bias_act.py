"""act(x + bias) of a linear layer, and the activations alone.

Some activations are computed by torch's kernels. Their rows show that these are as fast as ours, in the column CUDA.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.case import Case, Input, Op
from fastlayers import functional
from fastlayers.ops.activations import activation


def fused_bias(act: str, x: Tensor, bias: Tensor) -> Tensor:
    return functional.bias_act(x, bias, act)


def eager_bias(act: str, x: Tensor, bias: Tensor) -> Tensor:
    return activation(act).function(x + bias)


def fused_bare(act: str, x: Tensor) -> Tensor:
    return functional.bias_act(x, None, act)


def eager_bare(act: str, x: Tensor) -> Tensor:
    return activation(act).function(x)


def biased(act: str, *shape: int, dtype: torch.dtype = torch.bfloat16, **fields) -> Case:
    """x and dy are read, y and dx are written. The bias and its gradient are not counted."""
    op = Op(f"bias_{act}", "bias_act", partial(fused_bias, act), partial(eager_bias, act))
    inputs = (Input(shape), Input(shape[-1:]))
    return Case(op, inputs, dtype, "2b", "3b", **fields)


def bare(act: str, *shape: int, **fields) -> Case:
    op = Op(act, "bias_act", partial(fused_bare, act), partial(eager_bare, act))
    return Case(op, (Input(shape),), torch.bfloat16, "2b", "3b", **fields)


BARS = {"forward": 0.95, "backward": 0.90}
BARE = (
    "gelu", "gelu_tanh", "mish", "quick_gelu", "relu2",
    "silu", "hardswish", "leaky_relu", "elu", "softplus", "sigmoid", "tanh",
)  # fmt: skip
HOST_BARS = {"host_forward": 1.5, "host_training": 1.3}

CASES = [
    *(biased("gelu", 16384, 4096, dtype=dtype, bars=BARS) for dtype in (torch.bfloat16, torch.float16)),
    biased("gelu", 16384, 4096, dtype=torch.float32),
    *(biased(act, 16384, 4096) for act in ("gelu_tanh", "silu", "relu")),
    biased("gelu", 50176, 768),
    biased("gelu", 12608, 3072),
    biased("gelu", 16384, 4095),
    *(bare(act, 16384, 4096) for act in BARE),
    biased("gelu", 8, 512, host=True, bars=HOST_BARS),
    *(biased("gelu", rows, 512) for rows in (128, 2048)),
]

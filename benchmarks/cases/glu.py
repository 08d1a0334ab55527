"""The gates of language models' MLPs, of two tensors and of the halves of one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.case import Case, Input, Op
from benchmarks.implementations import liger
from fastlayers import functional


def eager_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def eager_geglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate) * up


def fused_geglu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    return functional.geglu(gate, up, "tanh")


def eager_geglu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


def eager_reglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.relu(gate) * up


def fused_packed_swiglu(x: Tensor) -> Tensor:
    return functional.glu(x, "silu", gate_first=True)


def eager_packed_swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


SWIGLU = Op("swiglu", "glu", functional.swiglu, eager_swiglu, liger=liger("liger_swiglu"))
GEGLU = Op("geglu", "glu", functional.geglu, eager_geglu)
GEGLU_TANH = Op("geglu_tanh", "glu", fused_geglu_tanh, eager_geglu_tanh, liger=liger("liger_geglu"))
REGLU = Op("reglu", "glu", functional.reglu, eager_reglu)
PACKED_SWIGLU = Op("packed_swiglu", "glu", fused_packed_swiglu, eager_packed_swiglu)
GLU = Op("glu", "glu", functional.glu, F.glu)


def pair(op: Op, *shape: int, dtype: torch.dtype = torch.bfloat16, **fields) -> Case:
    """Three tensors forward; backward reads dy, gate and up, and writes two gradients."""
    return Case(op, (Input(shape), Input(shape)), dtype, "3b", "5b", **fields)


def packed(op: Op, *shape: int, **fields) -> Case:
    """The same of halves: b is the size of both."""
    return Case(op, (Input(shape),), torch.bfloat16, "1.5b", "2.5b", **fields)


SILU_BARS = {"forward": 0.98, "backward": 0.98}
GELU_BARS = {"forward": 0.95, "backward": 0.90}
WIDTHS = (5632, 14336)
HOST_BARS = {"host_forward": 1.5, "host_training": 1.3}

CASES = [
    *(
        pair(op, 16384, width, dtype=dtype, bars=bars)
        for dtype in (torch.bfloat16, torch.float16)
        for op, bars in ((SWIGLU, SILU_BARS), (GEGLU, GELU_BARS), (GEGLU_TANH, GELU_BARS))
        for width in WIDTHS
    ),
    pair(SWIGLU, 16384, 5632, dtype=torch.float32),
    pair(REGLU, 16384, 5632),
    packed(PACKED_SWIGLU, 16384, 11264),
    packed(PACKED_SWIGLU, 16384, 11262),
    packed(GLU, 16384, 11264),
    pair(SWIGLU, 8, 512, host=True, bars=HOST_BARS),
    *(pair(SWIGLU, rows, 512) for rows in (128, 2048)),
]

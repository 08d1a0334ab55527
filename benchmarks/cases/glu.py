"""The gates of language models' MLPs, of two tensors and of the two parts of one tensor."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.case import Case, Input, Op, normal
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
    return functional.glu(x, act="silu", gate_first=True)


def eager_packed_swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def fused_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return functional.gated_linear(F.linear(x, gate), F.linear(x, up), down)


def eager_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


_liger_swiglu = liger("liger_swiglu")


def liger_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(_liger_swiglu(F.linear(x, gate), F.linear(x, up)), down)  # type: ignore[misc]


SWIGLU = Op("swiglu", "glu", functional.swiglu, eager_swiglu, liger=liger("liger_swiglu"))
GEGLU = Op("geglu", "glu", functional.geglu, eager_geglu)
GEGLU_TANH = Op("geglu_tanh", "glu", fused_geglu_tanh, eager_geglu_tanh, liger=liger("liger_geglu"))
REGLU = Op("reglu", "glu", functional.reglu, eager_reglu)
PACKED_SWIGLU = Op("packed_swiglu", "glu", fused_packed_swiglu, eager_packed_swiglu)
GLU = Op("glu", "glu", functional.glu, F.glu)
SWIGLU_MLP = Op("swiglu_mlp", "glu", fused_mlp, eager_mlp, liger=_liger_swiglu and liger_mlp)


def pair(op: Op, *shape: int, dtype: torch.dtype = torch.bfloat16, **fields) -> Case:
    """The forward moves three tensors. The backward reads dy, gate and up, and writes two gradients."""
    return Case(op, (Input(shape), Input(shape)), dtype, "3b", "5b", **fields)


def packed(op: Op, *shape: int, **fields) -> Case:
    """The same for the two parts of one tensor: b is the size of both."""
    return Case(op, (Input(shape),), torch.bfloat16, "1.5b", "2.5b", **fields)


def small(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Weights with which values keep their size."""
    return normal(shape, dtype, device) * shape[1] ** -0.5


def mlp(tokens: int, hidden: int, inner: int, **fields) -> Case:
    """Llama's MLP after patch_model. The memory of the gradients of x and the weights is not counted."""
    weights = ((inner, hidden), (inner, hidden), (hidden, inner))
    inputs = (Input((tokens, hidden)), *(Input(shape, small, parameter=True) for shape in weights))
    bars = {"beyond/compile": 1.0, "beyond/liger": 1.0}
    return Case(SWIGLU_MLP, inputs, torch.bfloat16, "", label=f"inner {inner}", bars=bars, step=True, **fields)


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
    mlp(8192, 4096, 14336),
    mlp(8192, 2048, 5632),
    pair(SWIGLU, 8, 512, host=True, bars=HOST_BARS),
    *(pair(SWIGLU, rows, 512) for rows in (128, 2048)),
]

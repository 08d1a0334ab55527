"""Softmax and log-softmax, and the sweep over the row length."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.case import Case, Input, Op
from benchmarks.implementations import liger
from fastlayers import functional


def naive_softmax(x: Tensor, dim: int) -> Tensor:
    """The formula of softmax, step by step: five kernels, each of which moves the rows through memory."""
    shifted = x - x.amax(dim, keepdim=True)
    numerator = shifted.exp()
    return numerator / numerator.sum(dim, keepdim=True)


def fused_masked(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    return functional.softmax(x, -1, scale=scale, mask=mask)


def eager_masked(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    x = x * scale
    return F.softmax(x.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else x + mask, dim=-1)


def causal_mask(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An additive mask: 0 up to the diagonal, minus infinity after it."""
    return torch.full(shape, float("-inf"), dtype=dtype, device=device).triu(1)


def padding_mask(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A boolean mask for sequences of different lengths, each at least 1/2 of the longest."""
    length = shape[-1]
    lengths = torch.randint(length // 2, length + 1, (*shape[:-1], 1), device=device)
    return torch.arange(length, device=device) < lengths


SOFTMAX = Op("softmax", "softmax", functional.softmax, F.softmax, naive_softmax, liger("liger_softmax"))
LOG_SOFTMAX = Op("log_softmax", "softmax", functional.log_softmax, F.log_softmax)
MASKED_SOFTMAX = Op("masked_softmax", "softmax", fused_masked, eager_masked)

#: (rows, columns): smallest fraction of the copy bandwidth, forward and backward. The backward has no bar at 256.
BARS = {
    (32768, 256): {"forward": 0.84},
    (32768, 1024): {"forward": 0.95, "backward": 0.95},
    (16384, 4096): {"forward": 0.97, "backward": 0.95},
    (8192, 16384): {"forward": 0.97, "backward": 0.95},
    (2048, 131072): {"forward": 0.97, "backward": 0.95},
    (16384, 4095): {"forward": 0.94, "backward": 0.92},
    (256, 1048576): {"forward": 0.90, "backward": 0.95},
}


def row(op: Op, *shape: int, dtype: torch.dtype = torch.bfloat16, dim: int = -1, **fields) -> Case:
    return Case(op, (Input(shape),), dtype, "2b", "3b", options={"dim": dim}, **fields)


def masked(label: str, mask: Input) -> Case:
    """Scores of attention. The mask is read once for all heads and is not counted."""
    inputs = (Input((8, 16, 1024, 1024)), mask)
    return Case(MASKED_SOFTMAX, inputs, torch.bfloat16, "2b", "3b", options={"scale": 0.125}, label=label)


def sweep() -> list[Case]:
    """4096 rows of N = 128·i columns to 12,800, then of powers of two to 2^20.

    From 2^17 on there are fewer rows, so that input and output together have at most 1 GiB. The default run has every
    fourth i.
    """
    contestants = ("naive", "eager", "compile", "triton", "cuda")
    lengths = {128 * i: i not in (1, 2) and i % 4 != 0 for i in range(1, 101)} | {2**k: False for k in range(14, 21)}
    cases = []
    for columns, extra in lengths.items():
        rows = min(4096, 2**30 // (columns * 2 * torch.bfloat16.itemsize))
        cases.append(row(SOFTMAX, rows, columns, suite="sweep", contestants=contestants, extra=extra))
    return cases


CASES = [
    *(
        row(SOFTMAX, *shape, dtype=dtype, bars=bars)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for shape, bars in BARS.items()
    ),
    # CPU time at a size for which torch's kernel is chosen, and at the smallest size for which ours is.
    row(SOFTMAX, 8, 64, host=True, bars={"host_forward": 1.5, "host_training": 1.3}),
    row(SOFTMAX, 256, 256, host=True, bars={"host_forward": 1.5, "host_training": 1.3}),
    row(SOFTMAX, 16, 65536),
    row(
        SOFTMAX,
        16,
        21,
        512,
        512,
        dim=1,
        label="dim=1",
        contestants=("eager", "compile", "fastlayers", "triton", "cuda"),
    ),
    masked("causal mask", Input((1024, 1024), causal_mask, grad=False)),
    masked("boolean mask", Input((8, 1, 1, 1024), padding_mask, grad=False)),
    row(LOG_SOFTMAX, 16384, 4096),
    row(LOG_SOFTMAX, 8192, 32000),
    row(LOG_SOFTMAX, 16384, 4096, dtype=torch.float32),
    *sweep(),
]

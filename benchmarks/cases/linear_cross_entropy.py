"""The loss of a language model together with the linear layer that computes its logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.case import Case, Input, Op
from benchmarks.implementations import liger
from fastlayers import functional


def eager(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), target)


def torch_chunked() -> Callable[..., Tensor] | None:
    """torch's own function with its default chunks, from torch 2.13 on."""
    options = getattr(nn, "LinearCrossEntropyOptions", None)
    return None if options is None else partial(F.linear_cross_entropy, options=options())  # type: ignore[attr-defined]


LINEAR_CROSS_ENTROPY = Op(
    "linear_cross_entropy",
    "linear_cross_entropy",
    functional.linear_cross_entropy,
    eager,
    liger=liger("liger_fused_linear_cross_entropy"),
    chunked=torch_chunked(),
)
#: Those of other ops, and torch's chunked function.
CONTESTANTS = ("eager", "compile", "chunked", "fastlayers", "triton", "cuda", "liger")


def small(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Logits with a standard deviation of one or two, as in a trained model."""
    return torch.randn(shape, dtype=dtype, device=device) * 0.02


def row(
    rows: int, features: int, columns: int, dtype: torch.dtype = torch.bfloat16, unlabelled: float = 0.0, **fields
) -> Case:
    def classes(shape: tuple[int, ...], _: torch.dtype, device: torch.device) -> Tensor:
        target = torch.randint(columns, shape, device=device)
        return target.masked_fill_(torch.rand(shape, device=device) < unlabelled, -100)

    inputs = (
        Input((rows, features)),
        Input((columns, features), small, parameter=True),
        Input((rows,), classes, grad=False, parameter=True),
    )
    logits = rows * columns * dtype.itemsize
    bars = {"step/compile": 1.0, "step/liger": 0.8, "beyond": logits / 8 / 2**20, "beyond/liger": 1.0}
    fields = {"label": f"to {columns} classes", "bars": bars, "contestants": CONTESTANTS} | fields
    return Case(LINEAR_CROSS_ENTROPY, inputs, dtype, "", step=True, **fields)


CASES = [
    *(row(8192, features, columns) for features in (2048, 4096) for columns in (128256, 50257)),
    row(8192, 4096, 131072),
    row(8192, 4096, 131072, unlabelled=0.5, label="to 131072 classes, half of the rows unlabelled"),
]

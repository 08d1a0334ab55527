"""What is computed from hidden states and a head's weight: losses, log-probabilities, divergences."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

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


def log_prob(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.linear(hidden, weight).float().log_softmax(-1).gather(-1, target[:, None])[:, 0]


def trl_log_prob() -> Callable[..., Tensor] | None:
    """The kernel of TRL's trainers with their tiles of 8192 classes; None if TRL is not installed."""
    try:
        function: Any = import_module("trl.kernels").ChunkedLogProbFunction
    except ImportError:
        return None
    return lambda hidden, weight, target: function.apply(hidden, weight, None, target, 1.0, 8192, None, 1.0, ())[0]


def js(hidden: Tensor, weight: Tensor, target_hidden: Tensor, target_weight: Tensor) -> Tensor:
    log_q, log_p = (
        F.linear(x, w).float().log_softmax(-1) for x, w in ((hidden, weight), (target_hidden, target_weight))
    )
    log_m = torch.logaddexp(log_q, log_p) - math.log(2)
    to_mixture = partial(F.kl_div, log_m, log_target=True, reduction="batchmean")
    return (to_mixture(log_p) + to_mixture(log_q)) / 2


LINEAR_CROSS_ENTROPY = Op(
    "linear_cross_entropy",
    "linear_cross_entropy",
    functional.linear_cross_entropy,
    eager,
    liger=liger("liger_fused_linear_cross_entropy"),
    chunked=torch_chunked(),
)
LINEAR_LOG_PROB = Op("linear_log_prob", "linear_log_prob", functional.linear_log_prob, log_prob, trl=trl_log_prob())
LINEAR_DIVERGENCE = Op(
    "linear_divergence",
    "linear_divergence",
    partial(functional.linear_divergence, divergence="js"),
    js,
    liger=liger("liger_fused_linear_jsd"),
)
#: Those of other ops, and torch's chunked function.
CONTESTANTS = ("eager", "compile", "chunked", "fastlayers", "triton", "cuda", "liger")


def small(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Logits with a standard deviation of one or two, as in a trained model."""
    return torch.randn(shape, dtype=dtype, device=device) * 0.02


def classes(columns: int, unlabelled: float = 0.0) -> Callable[..., Tensor]:
    def make(shape: tuple[int, ...], _: torch.dtype, device: torch.device) -> Tensor:
        target = torch.randint(columns, shape, device=device)
        return target.masked_fill_(torch.rand(shape, device=device) < unlabelled, -100)

    return make


def row(
    rows: int, features: int, columns: int, dtype: torch.dtype = torch.bfloat16, unlabelled: float = 0.0, **fields
) -> Case:
    inputs = (
        Input((rows, features)),
        Input((columns, features), small, parameter=True),
        Input((rows,), classes(columns, unlabelled), grad=False, parameter=True),
    )
    logits = rows * columns * dtype.itemsize
    bars = {"step/compile": 1.0, "step/liger": 0.8, "beyond": logits / 8 / 2**20, "beyond/liger": 1.0}
    fields = {"label": f"to {columns} classes", "bars": bars, "contestants": CONTESTANTS} | fields
    return Case(LINEAR_CROSS_ENTROPY, inputs, dtype, "", step=True, **fields)


def log_prob_row(rows: int, features: int, columns: int) -> Case:
    inputs = (
        Input((rows, features)),
        Input((columns, features), small, parameter=True),
        Input((rows,), classes(columns), grad=False, parameter=True),
    )
    return Case(
        LINEAR_LOG_PROB,
        inputs,
        torch.bfloat16,
        "",
        label=f"to {columns} classes",
        bars={"beyond/trl": 1.0},
        contestants=("eager", "compile", "fastlayers", "trl"),
        result_dtype=torch.float32,
        step=True,
    )


def divergence_row(rows: int, features: int, target_features: int, columns: int) -> Case:
    """A student's head and a teacher's, which is larger and gets no gradient."""
    inputs = (
        Input((rows, features)),
        Input((columns, features), small, parameter=True),
        Input((rows, target_features), grad=False, parameter=True),
        Input((columns, target_features), small, grad=False, parameter=True),
    )
    return Case(
        LINEAR_DIVERGENCE,
        inputs,
        torch.bfloat16,
        "",
        label=f"and {target_features} to {columns} classes",
        bars={"step/eager": 1.0, "step/liger": 0.8, "beyond/liger": 1.0},
        contestants=("eager", "compile", "fastlayers", "liger"),
        step=True,
    )


CASES = [
    *(row(8192, features, columns) for features in (2048, 4096) for columns in (128256, 50257)),
    row(8192, 4096, 131072),
    row(8192, 4096, 131072, unlabelled=0.5, label="to 131072 classes, half of the rows unlabelled"),
    log_prob_row(8192, 2048, 128256),
    divergence_row(4096, 2048, 4096, 128256),
]

"""Divergences between a student and a teacher, from log-probabilities and from logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.case import Case, Input, Op
from benchmarks.implementations import liger
from fastlayers import functional


def log_probabilities(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=device).log_softmax(-1)


def probabilities(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=device).softmax(-1)


def fused_kl_div(input: Tensor, target: Tensor) -> Tensor:
    return functional.kl_div(input, target, reduction="batchmean")


def eager_kl_div(input: Tensor, target: Tensor) -> Tensor:
    return F.kl_div(input, target, reduction="batchmean")


def eager_kl_div_logits(student: Tensor, teacher: Tensor) -> Tensor:
    """In float32, as in distillation code: log-probabilities in bfloat16 have two digits."""
    log_q, log_p = (F.log_softmax(t, -1, dtype=torch.promote_types(t.dtype, torch.float32)) for t in (student, teacher))
    return F.kl_div(log_q, log_p, reduction="batchmean", log_target=True).to(student.dtype)


def eager_js_div_logits(student: Tensor, teacher: Tensor) -> Tensor:
    """The divergence of TRL's GKDTrainer, with beta = 0.5."""
    log_q, log_p = (F.log_softmax(t, -1, dtype=torch.promote_types(t.dtype, torch.float32)) for t in (student, teacher))
    log_m = torch.logaddexp(log_q, log_p) - 0.6931471805599453
    of_p, of_q = (F.kl_div(log_m, t, reduction="batchmean", log_target=True) for t in (log_p, log_q))
    return (0.5 * of_p + 0.5 * of_q).to(student.dtype)


def of_log_softmax(function: Callable[..., Any] | None) -> Callable[..., Tensor] | None:
    """Liger's losses take log-probabilities, which torch computes."""
    if function is None:
        return None

    def call(student: Tensor, teacher: Tensor) -> Tensor:
        log_q, log_p = (F.log_softmax(t, -1, dtype=torch.float32) for t in (student, teacher))
        return function(log_q, log_p).to(student.dtype)

    return call


LIGER_KL_LOGITS = of_log_softmax(liger("liger_kl_div", reduction="batchmean", log_target=True))
KL_DIV = Op("kl_div", "kl_div", fused_kl_div, eager_kl_div, liger=liger("liger_kl_div", reduction="batchmean"))
KL_DIV_LOGITS = Op("kl_div_logits", "kl_div", functional.kl_div_logits, eager_kl_div_logits, liger=LIGER_KL_LOGITS)
JS_DIV_LOGITS = Op(
    "js_div_logits", "kl_div", functional.js_div_logits, eager_js_div_logits, liger=of_log_softmax(liger("liger_jsd"))
)


def kl_div(*shape: int, **fields) -> Case:
    """The forward reads both tensors. The backward reads the target and writes the input's gradient."""
    inputs = (Input(shape, log_probabilities), Input(shape, probabilities, grad=False))
    return Case(KL_DIV, inputs, torch.bfloat16, "2b", "2b", **fields)


def logits(op: Op, *shape: int, dtype: torch.dtype = torch.bfloat16, both: bool = False, **fields) -> Case:
    """Forward and backward read both tensors. The backward writes the student's gradient, or both."""
    inputs = (Input(shape), Input(shape, grad=both))
    label = "both gradients" if both else ""
    return Case(op, inputs, dtype, "2b", "4b" if both else "3b", label=label, **fields)


SHAPES = ((8192, 32000), (8192, 50257), (4096, 128256))

CASES = [
    *(logits(op, *shape) for op in (KL_DIV_LOGITS, JS_DIV_LOGITS) for shape in SHAPES),
    *(logits(op, 8192, 32000, both=True) for op in (KL_DIV_LOGITS, JS_DIV_LOGITS)),
    *(logits(op, 8192, 32000, dtype=torch.float32) for op in (KL_DIV_LOGITS, JS_DIV_LOGITS)),
    *(logits(op, 8, 128256) for op in (KL_DIV_LOGITS, JS_DIV_LOGITS)),
    *(logits(op, 256, 1000, host=True) for op in (KL_DIV_LOGITS, JS_DIV_LOGITS)),
    *(kl_div(*shape) for shape in SHAPES),
    kl_div(256, 1000, host=True),
]

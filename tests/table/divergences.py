"""Rows of the table of ops: divergences of distributions, of logits and of heads."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fastlayers
from fastlayers import functional
from tests.table.elementwise import both
from tests.table.losses import logits_of_head
from tests.table.sample import (
    FLOATING,
    Call,
    Input,
    Layer,
    Op,
    Sample,
    channels_last,
    contiguous,
    expanded,
    large,
    misaligned,
    nbytes,
    normal,
    one_value,
    positive,
    row_slice,
    strided,
    transposed,
    with_infinities,
    with_nan,
)
from tests.table.softmax import HALF, KERNELS, LONG_ROW_LENGTHS, ROW_LENGTHS

# ---- divergences -----------------------------------------------------------------------------------------------------


def log_probabilities(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator).log_softmax(-1)


def rows_ignored(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Labels: the second, and every third after it, is -100."""
    labels = torch.zeros(shape)
    labels.flatten()[1::3] = -100
    return labels


def kl_div_samples() -> tuple[Sample, ...]:
    """Calls of kl_div. A target that is not in log space is positive, since its gradient is NaN at 0."""

    def sample(name: str, *shape: int, layout: Any = contiguous, kwargs: Any = None, **options: Any) -> Sample:
        kwargs = {"reduction": "none", **(kwargs or {})}
        values = log_probabilities if kwargs.get("log_target") else positive
        target = Input(shape, layout, options.pop("target", values))
        return Sample(name, (Input(shape, layout, options.pop("values", normal)), target), kwargs, **options)

    log = {"log_target": True}
    return (
        Sample("matrix", (Input((5, 37)), Input((5, 37), values=positive), None, None, "none"), smooth=True),
        sample("matrix of a log target", 5, 37, kwargs=log, smooth=True),
        *(sample(f"{how} of a matrix", 5, 37, kwargs={"reduction": how}, smooth=True) for how in ("sum", "batchmean")),
        sample("mean of a matrix of a log target", 5, 37, kwargs={"reduction": "mean", **log}, smooth=True),
        sample("several blocks", 67, 4099, kwargs=log),
        sample("sum of several blocks", 67, 4099, kwargs={"reduction": "sum"}),
        sample("batchmean of several blocks", 1031, 4096, kwargs={"reduction": "batchmean", **log}, gpu_only=True),
        sample("vector", 7),
        sample("batchmean of a vector", 7, kwargs={"reduction": "batchmean"}),
        sample("batchmean of 0 dimensions", kwargs={"reduction": "batchmean"}),
        *(sample(f"{layout.__name__}{of}", 4, 6, 40, layout=layout, kwargs={"reduction": reduction})
          for layout in (transposed, row_slice, strided, misaligned, one_value)
          for of, reduction in (("", "none"), (", sum", "sum"))),
        sample("channels_last", 2, 8, 5, 6, layout=channels_last),
        Sample("mixed layouts", (Input((6, 40), transposed), Input((6, 40), values=positive)), {"reduction": "none"}),
        sample("NaN", 5, 40, values=with_nan, kwargs=log),
        sample("infinities", 5, 40, values=with_infinities, kwargs=log),
        Sample("target without gradient", (Input((5, 37)), Input((5, 37), values=positive, grad=False)),
               {"reduction": "sum"}),
        sample("empty", 0, 7, refused=KERNELS),
        Sample("target that broadcasts", (Input((5, 37)), Input((37,), values=positive)), {"reduction": "sum"},
               refused=KERNELS),
        Sample("float32 target", (Input((5, 37)), Input((5, 37), values=positive, dtype=torch.float32)),
               {"reduction": "sum"}, refused=KERNELS, dtypes=HALF),
    )  # fmt: skip


KL_DIV = Op(
    "kl_div",
    functional.kl_div,
    F.kl_div,
    kernels=KERNELS,
    samples=kl_div_samples(),
    saved_bytes=both,
    mistakes=(
        Sample("shapes", (Input((2, 3)), Input((2, 4)))),
        Sample("no such reduction", (Input((2, 3)), Input((2, 3))), {"reduction": "average"}),
    ),
    layers=(
        Layer(fastlayers.FusedKLDivLoss(reduction="none"), kl_div_samples()[0], 2),
        Layer(fastlayers.FusedKLDivLoss(reduction="batchmean", log_target=True),
              Sample("layer", (Input((5, 37)),) * 2, {"reduction": "batchmean", "log_target": True})),
    ),
    matrix=lambda x: (x, x, None, None, "none", True),
)  # fmt: skip


def reduced(
    rows: Tensor, labels: Tensor | None, ignore_index: int, reduction: str, classes: int, dtype: torch.dtype
) -> Tensor:
    count = rows.numel()
    if labels is not None:
        rows, count = torch.where(labels != ignore_index, rows, 0.0), (labels != ignore_index).sum()
    if reduction == "none":
        return rows.to(dtype)
    factor = {"sum": 1, "batchmean": count, "mean": count * classes}[reduction]
    return (rows.sum() / factor).to(dtype)


def at_temperature(logits: Tensor, temperature: float) -> Tensor:
    return F.log_softmax(logits if temperature == 1.0 else logits / temperature, -1)


def kl_div_logits(
    student: Tensor, teacher: Tensor, *, labels: Any = None, ignore_index: int = -100, temperature: float = 1.0,
    reduction: str = "none",
) -> Tensor:  # fmt: skip
    log_q, log_p = (at_temperature(t, temperature) for t in (student, teacher))
    rows = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1) * temperature**2
    return reduced(rows, labels, ignore_index, reduction, student.shape[-1], rows.dtype)


def js_div_logits(
    student: Tensor, teacher: Tensor, *, labels: Any = None, ignore_index: int = -100, beta: float = 0.5,
    temperature: float = 1.0, reduction: str = "none",
) -> Tensor:  # fmt: skip
    """The divergence as TRL's GKDTrainer computes it."""
    log_q, log_p = (at_temperature(t, temperature) for t in (student, teacher))
    if beta in (0.0, 1.0):
        of, to = (log_q, log_p) if beta == 0.0 else (log_p, log_q)
        divergences = F.kl_div(of, to, reduction="none", log_target=True)
    else:
        log_m = torch.logaddexp(log_q + math.log(1 - beta), log_p + math.log(beta))
        of_p, of_q = (F.kl_div(log_m, t, reduction="none", log_target=True) for t in (log_p, log_q))
        divergences = beta * of_p + (1 - beta) * of_q
    rows = divergences.sum(-1)
    return reduced(rows, labels, ignore_index, reduction, student.shape[-1], rows.dtype)


def by_row(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function with a loss for each row as its default reduction."""

    @functools.wraps(function)
    def call(student: Tensor, teacher: Tensor, **options: Any) -> Tensor:
        return function(student, teacher, **{"reduction": "none", **options})

    return call


def divergence_samples() -> tuple[Sample, ...]:
    def sample(name: str, *shape: int, kwargs: Any = None, **options: Any) -> Sample:
        values, layout = options.pop("values", normal), options.pop("layout", contiguous)
        return Sample(name, (Input(shape, layout, values),) * 2, kwargs or {}, **options)

    labels = Input((2, 5), values=rows_ignored, dtype=torch.int64)
    how = ("sum", "mean", "batchmean")
    return (
        sample("rows", 2, 3, 37, smooth=True),
        *(sample(f"{reduction} of rows", 2, 3, 17, kwargs={"reduction": reduction}, smooth=True) for reduction in how),
        sample("temperature", 2, 3, 37, kwargs={"temperature": 2.5}, smooth=True),
        *(sample(f"{reduction} of labelled rows", 2, 5, 17, smooth=True,
                 kwargs={"labels": labels, "reduction": reduction, "temperature": 0.5},
                 # In float64 the composition judges, and there it errs twice as much as ours (7e-16, by long doubles).
                 dtypes=(*HALF, torch.float32) if reduction == "none" else FLOATING)
          for reduction in ("none", *how)),
        *(sample(f"length {n}", 16 if n < 1000 else 3, n) for n in ROW_LENGTHS),
        *(sample(f"length {n}", 3, n, gpu_only=True) for n in LONG_ROW_LENGTHS),
        sample("many rows", 4099, 16),
        sample("long rows enough for every SM", 1031, 50257, gpu_only=True, dtypes=(*HALF, torch.float32)),
        sample("vector", 37),
        sample("transposed", 2, 24, 33, layout=transposed),
        *(sample(layout.__name__, 2, 6, 40, layout=layout) for layout in (row_slice, strided, misaligned)),
        sample("expanded rows", 2, 6, 40, layout=expanded(1)),
        sample("large values", 5, 40, values=large),
        sample("NaN", 5, 40, values=with_nan),
        Sample("teacher without gradient", (Input((5, 37)), Input((5, 37), grad=False)), smooth=True),
        sample("empty", 0, 7, refused=KERNELS),
        Sample("float32 teacher", (Input((5, 37)), Input((5, 37), dtype=torch.float32)), refused=KERNELS, dtypes=HALF),
    )  # fmt: skip


def divergence_saved(call: Call, out: Tensor) -> int:
    student = call.args[0]
    return 2 * nbytes(student) + 6 * max(student.element_size(), 4) * (student.numel() // student.shape[-1])


DIVERGENCE_MISTAKES = (Sample("classes", (Input((2, 3)), Input((2, 4)))),)


BATCHMEAN = {"reduction": "batchmean"}


KL_DIV_LOGITS = Op(
    "kl_div_logits",
    by_row(functional.kl_div_logits),
    kl_div_logits,
    kernels=KERNELS,
    samples=divergence_samples(),
    saved_bytes=divergence_saved,
    mistakes=DIVERGENCE_MISTAKES,
    layers=(
        Layer(fastlayers.FusedKLDivLogitsLoss(2.0),
              Sample("layer", (Input((2, 3, 37)),) * 2, {"temperature": 2.0, **BATCHMEAN})),
    ),
    matrix=lambda x: (x, x),
)  # fmt: skip


JS_DIV_LOGITS = replace(
    KL_DIV_LOGITS,
    name="js_div_logits",
    fused=by_row(functional.js_div_logits),
    reference=js_div_logits,
    samples=(
        # Large values have distributions on one class each: gradients of 0, by the cancellation of two numbers near
        # log 2 whose last digits are chance. test_kl_div.py judges them by those numbers.
        *(sample for sample in divergence_samples() if sample.name != "large values"),
        *(Sample(f"beta {beta}", (Input((2, 3, 17)),) * 2, {"beta": beta, "temperature": 1.5}, smooth=True)
          for beta in (0.0, 0.1, 1.0)),
    ),
    layers=(
        Layer(fastlayers.FusedJSDivLogitsLoss(0.3),
              Sample("layer", (Input((2, 3, 37)),) * 2, {"beta": 0.3, **BATCHMEAN})),
    ),
)  # fmt: skip


# ---- linear_divergence -----------------------------------------------------------------------------------------------


def linear_divergence(
    input: Tensor, linear_weight: Tensor, target_input: Tensor, target_weight: Tensor | None = None, *,
    divergence: str = "kl", linear_bias: Tensor | None = None, target_bias: Tensor | None = None, target: Any = None,
    ignore_index: int = -100, beta: float = 0.5, temperature: float = 1.0, softcap: float | None = None,
    target_softcap: float | None = None, logit_scale: float = 1.0, target_logit_scale: float = 1.0,
    reduction: str = "batchmean", low_rank: Any = None, chunk_size: int | None = None,
) -> Tensor:  # fmt: skip
    """The divergence of whole logits."""

    def scores(logits: Tensor, scale: float, cap: float | None) -> Tensor:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
        return logits if cap is None else cap * torch.tanh(logits / cap)

    student = logits_of_head(input, linear_weight, linear_bias, low_rank)
    teacher = target_input if target_weight is None else F.linear(target_input, target_weight, target_bias)
    if student.shape != teacher.shape:
        raise RuntimeError("a teacher of other classes")
    if target is not None and target.shape != student.shape[:-1]:
        raise ValueError("labels of another shape")
    dtype = torch.promote_types(student.dtype, teacher.dtype)
    if dtype in HALF and torch.is_autocast_enabled(student.device.type):
        dtype = torch.float32
    q, p = scores(student, logit_scale, softcap), scores(teacher, target_logit_scale, target_softcap)
    if divergence == "kl":
        rows = kl_div_logits(q, p, temperature=temperature)
    elif divergence == "reverse_kl":
        rows = kl_div_logits(p, q, temperature=temperature)
    elif divergence == "js":
        rows = js_div_logits(q, p, beta=beta, temperature=temperature)
    elif divergence == "tv":
        rows = 0.5 * (at_temperature(q, temperature).exp() - at_temperature(p, temperature).exp()).abs().sum(-1)
    elif divergence == "cosine":
        rows = 1 - F.cosine_similarity(q, p, dim=-1)
    else:
        raise ValueError(f"there is no divergence {divergence}")
    if reduction not in ("none", "sum", "mean", "batchmean"):
        raise ValueError(f"there is no reduction {reduction}")
    return reduced(rows, target, ignore_index, reduction, q.shape[-1], dtype)


def of_heads(
    name: str, shape: tuple[int, ...] = (6, 8), columns: int = 13, features: int = 6, *, given: Any = None,
    bias: bool = False, labels: bool = False, layout: Any = contiguous, values: Any = normal, hidden: Any = None,
    weight: Any = None, low_rank: int | None = None, chunk_size: int | None = 4, refused: tuple[str, ...] = (),
    **options: Any,
) -> Sample:  # fmt: skip
    """A call in chunks: of two heads, or with ``given`` logits."""
    about = {key: options.pop(key) for key in ("smooth", "gpu_only", "dtypes") if key in options}
    args = [hidden or Input(shape, layout, values), weight or Input((columns, shape[-1]), layout)]
    if given is None:
        args += [Input((*shape[:-1], features), layout, grad=False), Input((columns, features), layout, grad=False)]
    else:
        args.append(given)
    if bias:
        options["linear_bias"] = Input((columns,))
        if given is None:
            options["target_bias"] = Input((columns,), grad=False)
    if low_rank is not None:
        options["low_rank"] = (Input((*shape[:-1], low_rank), layout), Input((columns, low_rank), layout))
    if labels:
        options["target"] = Input(shape[:-1], values=rows_ignored, grad=False, dtype=torch.int64)
    return Sample(name, tuple(args), {**options, "chunk_size": chunk_size}, refused, **about)


def of_logits(*shape: int, **options: Any) -> Input:
    return Input(shape, **{"values": log_probabilities, "grad": False, **options})


#: Not of the total variation distance, whose slope jumps where two probabilities meet.
SMOOTH_DIVERGENCES = ("kl", "reverse_kl", "js", "cosine")


LINEAR_DIVERGENCE = Op(
    "linear_divergence",
    functional.linear_divergence,
    linear_divergence,
    kernels=KERNELS,
    samples=(
        of_heads("batch", (3, 6, 8), reduction="none", smooth=True),
        *(of_heads(f"{kind} of rows", divergence=kind, smooth=True) for kind in SMOOTH_DIVERGENCES),
        *(of_heads(f"{kind} of each row", divergence=kind, reduction="none") for kind in SMOOTH_DIVERGENCES),
        *(of_heads(f"{kind} of an odd vocabulary", (9, 24), 5003, divergence=kind) for kind in SMOOTH_DIVERGENCES),
        *(of_heads(f"{kind}, everything", (9, 8), divergence=kind, bias=True, labels=True, softcap=3.0,
                   target_softcap=2.0, logit_scale=0.5, target_logit_scale=1.5, temperature=2.5, beta=0.3, smooth=True)
          for kind in SMOOTH_DIVERGENCES),
        of_heads("tv of rows", divergence="tv", dtypes=(torch.float64, torch.float32)),
        of_heads("tv, everything", (9, 8), divergence="tv", bias=True, labels=True, softcap=3.0, target_softcap=2.0,
                 logit_scale=0.5, temperature=2.5, reduction="none", dtypes=(torch.float64, torch.float32)),
        *(of_heads(f"beta {beta}", divergence="js", beta=beta, temperature=1.5) for beta in (0.0, 0.1, 1.0)),
        of_heads("summed", labels=True, reduction="sum"),
        of_heads("mean", labels=True, reduction="mean"),
        of_heads("each, labels", labels=True, reduction="none", divergence="js"),
        *(of_heads(f"chunks of {n}", (7, 8), chunk_size=n) for n in (1, 3, 7, 100)),
        of_heads("many rows", (130, 16), 65, chunk_size=40),
        of_heads("more chunks than nine", (150, 16), 33, chunk_size=9),
        of_heads("rows for two blocks of the teacher", (300, 16), 33, chunk_size=290),
        of_heads("vocabulary of whole tiles", (9, 16), 128),
        of_heads("no batch", (8,)),
        of_heads("bias", bias=True),
        of_heads("low rank", (9, 8), low_rank=3, labels=True, smooth=True),
        of_heads("low rank, each row", low_rank=2, divergence="js", reduction="none"),
        of_heads("low rank, odd vocabulary", (9, 24), 1003, low_rank=4, bias=True, logit_scale=0.5),
        of_heads("low rank, frozen weight", (3, 4, 8), low_rank=4, weight=Input((13, 8), grad=False), softcap=2.0),
        of_heads("given log-probabilities", given=of_logits(6, 13), smooth=True),
        of_heads("given logits of an odd vocabulary", (9, 24), 1003, given=of_logits(9, 1003), divergence="reverse_kl"),
        of_heads("given, labels", (2, 5, 8), given=of_logits(2, 5, 13), labels=True, divergence="js"),
        *(of_heads(f"given, {layout.__name__}", (2, 5, 8), given=of_logits(2, 5, 13, layout=layout), bias=True)
          for layout in (transposed, row_slice, strided, misaligned)),
        of_heads("given in float32", given=of_logits(6, 13, dtype=torch.float32), dtypes=(*HALF, torch.float32)),
        of_heads("transposed operands", layout=transposed),
        of_heads("strided operands", layout=strided),
        of_heads("misaligned operands", layout=misaligned),
        of_heads("expanded rows", hidden=Input((6, 8), expanded(0))),
        of_heads("NaN", values=with_nan, reduction="none"),
        of_heads("weight without gradient", weight=Input((13, 8), grad=False)),
        of_heads("hidden without gradient", hidden=Input((6, 8), grad=False)),
        of_heads("left alone", chunk_size=None),
        of_heads("empty", (0, 8), refused=KERNELS, reduction="sum"),
        of_heads("teacher with gradient", given=of_logits(6, 13, grad=True), refused=KERNELS, smooth=True),
    ),
    saved_bytes=lambda call, out: (
        sum(map(nbytes, call.tensors())) + (sum(map(nbytes, call.leaves())) if out.dim() == 0 else 0)
    ),
    mistakes=(
        of_heads("labels of another length", target=Input((5,), values=rows_ignored, grad=False, dtype=torch.int64)),
        of_heads("weight of another width", weight=Input((13, 9))),
        of_heads("teacher of other classes", given=of_logits(6, 12)),
        of_heads("no such reduction", reduction="average"),
        of_heads("no such divergence", divergence="hellinger"),
    ),
    layers=(),
    matrix=None,
)  # fmt: skip

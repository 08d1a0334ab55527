"""Rows of the table of ops: losses and log-probabilities of logits, and of a head."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastlayers
from fastlayers import functional
from tests.table.sample import (
    Call,
    Input,
    Layer,
    Op,
    Sample,
    channels_last,
    constant,
    contiguous,
    expanded,
    large,
    misaligned,
    nbytes,
    normal,
    positive,
    row_slice,
    strided,
    transposed,
    with_infinities,
    with_nan,
)
from tests.table.softmax import KERNELS

# ---- losses ----------------------------------------------------------------------------------------------------------


def classes(count: int) -> Callable[[tuple[int, ...], torch.Generator], Tensor]:
    return lambda shape, generator: torch.randint(count, shape, generator=generator)


def some_ignored(count: int) -> Callable[[tuple[int, ...], torch.Generator], Tensor]:
    def fill(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        target = torch.randint(count, shape, generator=generator)
        target.view(-1)[::3] = -100
        return target

    return fill


def ignored(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.full(shape, -100)


def softened(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Probabilities as targets."""
    return torch.randn(shape, generator=generator).softmax(0 if len(shape) == 1 else 1)


def logits(*shape: int, layout: Any = contiguous, values: Any = normal, target: Any = classes) -> tuple[Input, Input]:
    """Logits and their classes."""
    count = shape[0] if len(shape) == 1 else shape[1]
    of = shape[:1] * (len(shape) > 1) + shape[2:]
    fill = target if target is ignored else target(count)
    return Input(shape, layout, values), Input(of, values=fill, grad=False, dtype=torch.int64)


def class_last(t: Tensor) -> Tensor:
    """(N, C, ...) with neighbouring classes next to each other in memory."""
    return t.movedim(1, -1).contiguous().movedim(-1, 1)


def cross_entropy(
    x: Tensor, target: Tensor, weight: Tensor | None = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0, *,
    softcap: float | None = None, z_loss: float = 0.0,
) -> Tensor:  # fmt: skip
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    loss = F.cross_entropy(x, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)
    if not z_loss:
        return loss
    # As a loss of its own: 0 for what is ignored, divided by what the loss is divided by.
    kept = target != ignore_index
    z = (z_loss * x.to(loss.dtype).logsumexp(0 if x.dim() == 1 else 1).square()).masked_fill(~kept, 0.0)
    if reduction == "mean":
        share = kept.to(loss.dtype) if weight is None else weight[target.clamp(min=0)] * kept
        z = z.sum() / share.sum()
    return loss + (z.sum() if reduction == "sum" else z)


def class_weight(count: int) -> Input:
    return Input((count,), values=positive, grad=False)


EACH = {"reduction": "none"}


VOCABULARIES = (1, 2, 7, 8, 10, 33, 100, 1000, 1024, 2049, 4097, 8200)


LONG_VOCABULARIES = (10000, 32000, 50257, 128256, 151936, 600_001)


CROSS_ENTROPY_SAMPLES = (
    Sample("each pixel", (*logits(3, 9, 4), None, None, -100, None, "none"), smooth=True),
    Sample("rows of classes", logits(6, 37), smooth=True),
    Sample("each row", logits(6, 37), EACH),
    Sample("summed rows", logits(6, 37), {"reduction": "sum"}),
    *(Sample(f"classes {n}", logits(17 if n < 1000 else 5, n)) for n in VOCABULARIES),
    *(Sample(f"classes {n}", logits(5, n), gpu_only=True) for n in LONG_VOCABULARIES),
    Sample("one long row", logits(1, 300_000), gpu_only=True),
    Sample("many rows of classes", logits(4099, 10)),
    # float16: torch keeps the number of rows in it, as infinity.
    Sample("more rows than one block adds", logits(70_001, 3), gpu_only=True,
           dtypes=(torch.bfloat16, torch.float32, torch.float64)),
    Sample("no batch", logits(9), smooth=True),
    Sample("no batch, each", logits(9), EACH),
    Sample("segmentation", logits(2, 21, 12, 10)),
    Sample("segmentation, odd", logits(2, 5, 7, 3), EACH),
    Sample("segmentation, channels_last", logits(2, 21, 6, 5, layout=channels_last)),
    Sample("video", logits(2, 5, 3, 4, 2), {"reduction": "sum"}),
    Sample("many classes of few pixels", logits(2, 3000, 3)),
    Sample("classes last in memory", logits(3, 40, 5, layout=class_last), EACH),
    Sample("transposed logits", logits(24, 33, layout=transposed)),
    Sample("row slice of logits", logits(5, 64, layout=row_slice)),
    Sample("odd row slice of logits", logits(5, 67, layout=row_slice)),
    Sample("strided logits", logits(5, 40, layout=strided)),
    Sample("misaligned logits", logits(6, 64, layout=misaligned)),
    Sample("misaligned odd logits", logits(6, 67, layout=misaligned)),
    Sample("misaligned segmentation", logits(2, 9, 8, 8, layout=misaligned)),
    Sample("expanded logits", logits(6, 40, layout=expanded(0))),
    Sample("large logits", logits(6, 40, values=large), dtypes=(torch.bfloat16, torch.float32, torch.float64)),
    Sample("NaN in logits", logits(6, 40, values=with_nan), EACH),
    Sample("infinite logits", logits(6, 40, values=with_infinities), EACH),
    Sample("infinite pixels", logits(2, 9, 20, values=with_infinities), EACH),
    Sample("logits of -inf", logits(3, 40, values=constant(-math.inf)), EACH),
    Sample("some ignored", logits(7, 37, target=some_ignored), smooth=True),
    Sample("some pixels ignored", logits(2, 9, 4, 6, target=some_ignored)),
    Sample("each, some ignored", logits(7, 37, target=some_ignored), EACH),
    Sample("all ignored", logits(4, 12, target=ignored)),
    Sample("all ignored, summed", logits(4, 12, target=ignored), {"reduction": "sum"}),
    Sample("ignored class", logits(7, 12), {"ignore_index": 3}),
    Sample("class weight", (*logits(7, 37), class_weight(37)), smooth=True),
    Sample("class weight of pixels", (*logits(2, 9, 6, target=some_ignored), class_weight(9)), smooth=True),
    Sample("each, class weight", (*logits(7, 37, target=some_ignored), class_weight(37)), EACH),
    Sample("label smoothing", logits(7, 37, target=some_ignored), {"label_smoothing": 0.1}, smooth=True),
    Sample("label smoothing of pixels", logits(2, 9, 6), {"label_smoothing": 0.3}),
    Sample("label smoothing, class weight", (*logits(7, 37, target=some_ignored), class_weight(37)),
           {"label_smoothing": 0.2}, smooth=True),
    Sample("nothing but smoothing", (*logits(3, 2050), class_weight(2050)), {"label_smoothing": 1.0}),
    Sample("softcap", logits(7, 37, target=some_ignored), {"softcap": 2.0}, smooth=True),
    Sample("softcap of pixels", logits(2, 9, 6), {"softcap": 5.0}),
    Sample("softcap of a long row", logits(2, 4100, values=large), {"softcap": 30.0},
           dtypes=(torch.bfloat16, torch.float32, torch.float64)),
    Sample("z-loss", logits(7, 37, target=some_ignored), {"z_loss": 0.1}, smooth=True),
    Sample("z-loss of pixels", logits(2, 9, 6), {"z_loss": 0.01, **EACH}),
    Sample("everything", (*logits(7, 37, target=some_ignored), class_weight(37)), smooth=True,
           kwargs={"softcap": 3.0, "z_loss": 0.2, "label_smoothing": 0.1}),
    Sample("everything, of pixels", (*logits(2, 11, 5, target=some_ignored), class_weight(11)), smooth=True,
           kwargs={"softcap": 3.0, "z_loss": 0.2, "label_smoothing": 0.1}),
    Sample("probabilities", (Input((5, 9)), Input((5, 9), values=softened)), refused=KERNELS, smooth=True),
    Sample("probabilities of pixels", refused=KERNELS,
           args=(Input((2, 5, 3)), Input((2, 5, 3), values=softened), Input((5,), values=positive)),
           kwargs={"label_smoothing": 0.1}),
    Sample("no rows", logits(0, 5), refused=KERNELS),
    Sample("no pixels", logits(2, 5, 0), EACH, refused=KERNELS),
)  # fmt: skip


def cross_entropy_saved(call: Call, out: Tensor) -> int:
    x, target, *weight = call.tensors()
    wide = max(x.element_size(), 4)
    return nbytes(x) + nbytes(target) + wide * (2 * target.numel() + 2 + sum(w.numel() for w in weight))


CROSS_ENTROPY = Op(
    "cross_entropy",
    functional.cross_entropy,
    cross_entropy,
    kernels=KERNELS,
    samples=CROSS_ENTROPY_SAMPLES,
    saved_bytes=cross_entropy_saved,
    mistakes=(
        Sample("target of another size", (Input((3, 4)), torch.tensor([0, 1]))),
        Sample("target of int32", (Input((3, 4)), torch.tensor([0, 1, 2], dtype=torch.int32))),
        Sample("weight of another size", (*logits(3, 4), Input((5,), grad=False))),
        Sample("weight with a gradient", (*logits(3, 4), Input((4,)))),
        Sample("no such reduction", logits(3, 4), {"reduction": "average"}),
        Sample("label smoothing above 1", logits(3, 4), {"label_smoothing": 1.5}),
        Sample("0-dim", (Input(()), torch.tensor(0))),
    ),
    layers=(
        Layer(fastlayers.FusedCrossEntropyLoss(), CROSS_ENTROPY_SAMPLES[1]),
        Layer(
            fastlayers.FusedCrossEntropyLoss(reduction="sum", label_smoothing=0.1, softcap=3.0, z_loss=0.2),
            Sample("layer", logits(6, 37), {"reduction": "sum", "label_smoothing": 0.1, "softcap": 3.0, "z_loss": 0.2}),
            2,
        ),
    ),
    matrix=None,
)  # fmt: skip


# ---- linear_cross_entropy --------------------------------------------------------------------------------------------


def logits_of_head(input: Tensor, weight: Tensor, bias: Tensor | None, low_rank: Any) -> Tensor:
    logits = F.linear(input, weight, bias)
    if low_rank is None:
        return logits
    x, thin = low_rank
    if (x.shape[:-1], thin.shape[:1]) != (input.shape[:-1], weight.shape[:1]):
        raise RuntimeError("shapes that a sum broadcasts")
    return logits + F.linear(x, thin)


def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None,
    weight: Tensor | None = None, logit_scale: float = 1.0, low_rank: Any = None, chunk_size: int | None = None,
    **options: Any,
) -> Tensor:  # fmt: skip
    logits = logits_of_head(input, linear_weight, linear_bias, low_rank)
    if logit_scale != 1.0:
        logits = logits * logit_scale
    if target.shape not in (logits.shape[:-1], logits.shape):
        error = ValueError if logits.dim() <= 2 else RuntimeError
        raise error("a target of another shape, which flattening would hide")
    rows = logits.reshape(-1, logits.shape[-1])
    flat = target.reshape(rows.shape if target.is_floating_point() else -1)
    loss = cross_entropy(rows, flat, weight, **options)
    return loss.reshape(logits.shape[:-1]) if options.get("reduction") == "none" else loss


def of_linear(
    name: str, shape: tuple[int, ...] = (6, 8), columns: int = 13, *, bias: bool = False, class_weight: bool = False,
    target: Any = classes, layout: Any = contiguous, values: Any = normal, hidden: Any = None, weight: Any = None,
    low_rank: int | None = None, chunk_size: int | None = 4, refused: tuple[str, ...] = (), **options: Any,
) -> Sample:  # fmt: skip
    """A call in chunks."""
    names = ("smooth", "gpu_only", "dtypes")
    about = {key: options.pop(key) for key in names if key in options}
    if not isinstance(target, Input):
        fill = target if target is ignored else target(columns)
        target = Input(shape[:-1], values=fill, grad=False, dtype=torch.int64)
    args = (
        hidden or Input(shape, layout, values),
        weight or Input((columns, shape[-1]), layout),
        target,
    )
    if bias:
        options["linear_bias"] = Input((columns,))
    if class_weight:
        options["weight"] = Input((columns,), values=positive, grad=False)
    if low_rank is not None:
        options["low_rank"] = (Input((*shape[:-1], low_rank), layout), Input((columns, low_rank), layout))
    return Sample(name, args, {**options, "chunk_size": chunk_size}, refused, **about)


def loss_of_ones(features: int, classes: int) -> nn.Module:
    layer = fastlayers.FusedLinearCrossEntropyLoss(features, classes)
    nn.init.ones_(layer.linear.weight)
    return layer


LINEAR_LOSSES = (
    of_linear("each of a batch", (3, 6, 8), reduction="none", smooth=True),
    of_linear("rows", smooth=True),
    of_linear("each row", reduction="none"),
    of_linear("summed", reduction="sum"),
    *(of_linear(f"chunks of {n}", (7, 8), chunk_size=n) for n in (1, 2, 3, 6, 7, 8, 100)),
    of_linear("many rows", (130, 16), 65, chunk_size=40),
    of_linear("more chunks than nine", (150, 16), 33, chunk_size=9),
    of_linear("vocabulary of whole tiles", (9, 16), 128),
    of_linear("odd vocabulary", (9, 24), 1003),
    of_linear("one class", (5, 8), 1),
    of_linear("batch of sequences", (2, 5, 8)),
    of_linear("no batch", (8,)),
    of_linear("bias", bias=True, smooth=True),
    of_linear("each, bias", bias=True, reduction="none", target=some_ignored),
    of_linear("some ignored", (9, 8), target=some_ignored, smooth=True),
    of_linear("all ignored", (5, 8), target=ignored),
    of_linear("all ignored, summed", (5, 8), target=ignored, reduction="sum"),
    of_linear("class weight", (9, 8), target=some_ignored, class_weight=True, smooth=True),
    of_linear("label smoothing", (9, 8), target=some_ignored, label_smoothing=0.2),
    of_linear("softcap", softcap=2.0),
    of_linear("z-loss", z_loss=0.1, target=some_ignored),
    of_linear("logit scale", logit_scale=0.25),
    of_linear("logit scale, bias", logit_scale=3.0, bias=True),
    of_linear("everything", (9, 8), bias=True, class_weight=True, target=some_ignored, label_smoothing=0.1, softcap=3.0,
              z_loss=0.05, logit_scale=0.5, smooth=True),
    of_linear("low rank", low_rank=3, smooth=True),
    of_linear("low rank, each row", (9, 8), low_rank=2, reduction="none", target=some_ignored),
    of_linear("low rank, odd vocabulary", (9, 24), 1003, low_rank=4, bias=True, logit_scale=0.5),
    of_linear("low rank, frozen weight", (3, 4, 8), low_rank=4, weight=Input((13, 8), grad=False), softcap=2.0,
              bias=True, smooth=True),
    of_linear("low rank, strided operands", low_rank=3, layout=strided),
    of_linear("transposed operands", layout=transposed),
    of_linear("strided operands", layout=strided),
    of_linear("misaligned operands", layout=misaligned),
    of_linear("expanded rows", hidden=Input((6, 8), expanded(0))),
    of_linear("NaN", values=with_nan, reduction="none"),
    of_linear("weight without gradient", weight=Input((13, 8), grad=False)),
    of_linear("hidden without gradient", hidden=Input((6, 8), grad=False)),
    of_linear("left alone", chunk_size=None),
    of_linear("empty", (0, 8), refused=KERNELS),
    of_linear("probabilities", refused=KERNELS, target=Input((6, 13), values=softened, grad=False)),
)  # fmt: skip


LINEAR_CROSS_ENTROPY = Op(
    "linear_cross_entropy",
    functional.linear_cross_entropy,
    linear_cross_entropy,
    kernels=KERNELS,
    samples=LINEAR_LOSSES,
    saved_bytes=lambda call, out: (
        sum(map(nbytes, call.tensors())) + (sum(map(nbytes, call.leaves())) if out.dim() == 0 else 0)
    ),
    mistakes=(
        of_linear("target of another length", target=Input((5,), values=classes(13), grad=False, dtype=torch.int64)),
        of_linear("target transposed", (3, 2, 8), target=Input((2, 3), values=classes(13), grad=False,
                                                               dtype=torch.int64)),
        of_linear("weight of another width", weight=Input((13, 9))),
        of_linear("no such reduction", reduction="average"),
        of_linear("smoothing above 1", label_smoothing=1.5),
        of_linear("target of int32", target=Input((6,), values=classes(13), grad=False, dtype=torch.int32)),
    ),
    layers=(
        Layer(loss_of_ones(8, 13),
              of_linear("layer", weight=Input((13, 8), values=constant(1.0)), chunk_size=None), (0, 2)),
    ),
    matrix=None,
)  # fmt: skip


# ---- linear_log_prob -------------------------------------------------------------------------------------------------


def linear_log_prob(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None,
    softcap: float | None = None, logit_scale: float = 1.0, low_rank: Any = None, entropy: bool = False,
    chunk_size: int | None = None,
) -> Any:  # fmt: skip
    logits = logits_of_head(input, linear_weight, linear_bias, low_rank)
    if target.shape != logits.shape[:-1]:
        raise RuntimeError("a target of another shape")
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = logits.log_softmax(-1)
    kept = target != -100
    found = log_p.gather(-1, target.where(kept, 0)[..., None]).squeeze(-1).where(kept, 0)
    entropies = torch.special.entr(log_p.detach().exp()).sum(-1) if not entropy else -(log_p.exp() * log_p).sum(-1)
    return (found, entropies.where(kept, 0)) if entropy else found


LINEAR_LOG_PROB = Op(
    "linear_log_prob",
    functional.linear_log_prob,
    linear_log_prob,
    kernels=KERNELS,
    samples=(
        of_linear("batch", (3, 6, 8), smooth=True),
        of_linear("rows"),
        of_linear("entropies", entropy=True, smooth=True),
        of_linear("batch of sequences", (2, 5, 8), entropy=True, target=some_ignored, smooth=True),
        *(of_linear(f"chunks of {n}", (7, 8), chunk_size=n, entropy=True) for n in (1, 3, 7, 100)),
        of_linear("many rows", (130, 16), 65, chunk_size=40, entropy=True),
        of_linear("odd vocabulary", (9, 24), 5003, entropy=True),
        of_linear("one class", (5, 8), 1, entropy=True),
        of_linear("no batch", (8,), entropy=True),
        of_linear("bias", bias=True, entropy=True),
        of_linear("all ignored", (5, 8), target=ignored, entropy=True),
        of_linear("softcap", softcap=2.0, entropy=True, smooth=True),
        of_linear("logit scale, bias", logit_scale=3.0, bias=True, entropy=True),
        of_linear("everything", (9, 8), bias=True, target=some_ignored, softcap=3.0, logit_scale=0.5, entropy=True),
        of_linear("low rank", (9, 8), low_rank=3, entropy=True, target=some_ignored, smooth=True),
        # Rows enough that torch's greatest error is more than luck: it has been half of ours in one draw of 9.
        of_linear("low rank, odd vocabulary", (41, 24), 1003, low_rank=4, bias=True, logit_scale=0.5, entropy=True,
                  chunk_size=16),
        of_linear("strided operands", layout=strided, entropy=True),
        of_linear("weight without gradient", weight=Input((13, 8), grad=False), entropy=True),
        of_linear("hidden without gradient", hidden=Input((6, 8), grad=False), entropy=True),
        of_linear("left alone", chunk_size=None, entropy=True),
        of_linear("empty", (0, 8), refused=KERNELS),
    ),
    # References to its tensors, and three numbers for each row; the entropies are a result, too.
    saved_bytes=lambda call, out: sum(map(nbytes, call.tensors())) + 3 * nbytes(out[0] if type(out) is tuple else out),
    mistakes=(
        of_linear("target of another length", target=Input((5,), values=classes(13), grad=False, dtype=torch.int64)),
        of_linear("weight of another width", weight=Input((13, 9))),
    ),
    layers=(),
    matrix=None,
)  # fmt: skip

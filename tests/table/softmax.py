"""Rows of the table of ops: softmax."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

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
    expanded,
    keep_first,
    keep_most,
    large,
    lowest,
    minus_infinity_mask,
    misaligned,
    nbytes,
    normal,
    row_slice,
    strided,
    transposed,
    with_infinities,
    with_nan,
)


def scores(x: Tensor, scale: float | None, mask: Tensor | None) -> Tensor:
    scaled = x if scale is None else x * scale
    if mask is None:
        return scaled
    return scaled.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scaled + mask


def softmax(x: Tensor, dim: int = -1, *, scale: Any = None, mask: Tensor | None = None, dtype: Any = None) -> Tensor:
    return F.softmax(scores(x, scale, mask), dim, dtype=dtype)


def log_softmax(
    x: Tensor, dim: int = -1, *, scale: Any = None, mask: Tensor | None = None, dtype: Any = None
) -> Tensor:
    return F.log_softmax(scores(x, scale, mask), dim, dtype=dtype)


KERNELS = ("triton", "cuda", "cpu")


ROW_LENGTHS = (1, 2, 3, 7, 8, 31, 33, 64, 100, 129, 1000, 1024, 2049, 4097)


LONG_ROW_LENGTHS = (8192, 12289, 16384, 32776, 65535, 131072, 262145, 2**20, 2**20 + 3)


HALF = (torch.float16, torch.bfloat16)


def mask(*shape: int, values: Any = keep_most, **options: Any) -> Input:
    return Input(shape, values=values, **options)


SOFTMAX_SAMPLES = (
    Sample("rows", (Input((5, 37)),), smooth=True),
    *(Sample(f"length {n}", (Input((16 if n < 1000 else 3, n)),)) for n in ROW_LENGTHS),
    *(Sample(f"length {n}", (Input((3, n)),), gpu_only=True) for n in LONG_ROW_LENGTHS),
    Sample("many rows", (Input((4099, 16)),)),
    Sample("dim 0", (Input((67, 5)), 0), smooth=True),
    Sample("dim 1 of 4", (Input((2, 9, 4, 8)), 1)),
    Sample("long dim 0", (Input((2050, 24)), 0)),
    Sample("last dim of one", (Input((4, 6, 1)), 1)),
    Sample("0-dim", (Input(()), 0), refused=KERNELS),
    Sample("empty", (Input((0, 7)),), refused=KERNELS),
    Sample("empty rows", (Input((3, 0)),), refused=KERNELS),
    Sample("transposed", (Input((24, 33), transposed),)),
    Sample("channels_last", (Input((2, 8, 5, 6), channels_last), 1)),
    Sample("row slice", (Input((5, 64), row_slice),)),
    Sample("odd row slice", (Input((5, 33), row_slice),)),
    Sample("strided", (Input((5, 40), strided),)),
    Sample("misaligned", (Input((6, 64), misaligned),)),
    Sample("misaligned odd", (Input((6, 65), misaligned), 0)),
    Sample("expanded rows", (Input((6, 40), expanded(0)),)),
    Sample("expanded middle", (Input((3, 4, 64), expanded(1)),)),
    Sample("expanded along the row", (Input((3, 40), expanded(1)),)),
    Sample("large values", (Input((5, 40), values=large),)),
    Sample("NaN", (Input((5, 40), values=with_nan),)),
    Sample("infinities", (Input((5, 40), values=with_infinities),)),
    Sample("row of -inf", (Input((3, 40), values=constant(-math.inf)),)),
    Sample("lowest values", (Input((3, 33), values=constant(torch.finfo(torch.bfloat16).min)),),
           dtypes=(torch.bfloat16, torch.float32)),
    Sample("scale", (Input((5, 37)),), {"scale": 0.125}, smooth=True),
    Sample("negative scale", (Input((5, 37)),), {"scale": -2.0}),
    Sample("vanishing scale", (Input((5, 37)),), {"scale": 1e-60}, refused=KERNELS, dtypes=(*HALF, torch.float32)),
    Sample("scale 0", (Input((5, 37)),), {"scale": 0.0}, refused=KERNELS),
    Sample("scale of dim 0", (Input((20, 6)), 0), {"scale": 3.0}),
    Sample("boolean mask", (Input((4, 3, 21)),), {"mask": mask(4, 3, 21), "scale": 0.5}),
    Sample("boolean mask of a row", (Input((4, 3, 21)),), {"mask": mask(21, values=keep_first)}, smooth=True),
    Sample("boolean mask that broadcasts", (Input((2, 3, 5, 40)),), {"mask": mask(2, 1, 1, 40)}),
    # A number added to a whole row changes nothing: the gradient of these two masks is 0, and what comes out is noise.
    Sample("mask of a column", (Input((2, 5, 40)),), {"mask": mask(5, 1, values=normal, grad=False)}),
    Sample("boolean mask, long row", (Input((2, 4100)),), {"mask": mask(2, 4100)}),
    *(
        Sample(f"{kind} mask, length {n}", (Input((3, n)),), {"mask": given}, gpu_only=True)
        for n in (20000, 20001, 1_400_000, 1_400_001)  # held by clusters; in pieces
        for kind, given in (("boolean", mask(3, n)), ("additive", Input((n,))))
    ),
    Sample("more pieces than partials", (Input((1, 2**24 + 9)),), gpu_only=True),
    Sample("additive mask", (Input((4, 3, 21)),), {"mask": mask(3, 21, values=normal), "scale": 2.0}, smooth=True),
    Sample("additive mask of -inf", (Input((2, 3, 5, 40)),),
           {"mask": mask(5, 40, values=minus_infinity_mask, grad=False)}),
    Sample("lowest mask", (Input((2, 3, 40)),), dtypes=(torch.bfloat16,),
           kwargs={"mask": mask(3, 40, values=lowest(torch.bfloat16), grad=False), "scale": 0.125}),
    Sample("lowest mask of float32", (Input((2, 3, 40)),), dtypes=(torch.float32,),
           kwargs={"mask": mask(3, 40, values=lowest(torch.float32), grad=False), "scale": 0.125}),
    Sample("float32 mask", (Input((4, 33)),), {"mask": mask(4, 33, values=normal, dtype=torch.float32)}, dtypes=HALF),
    Sample("0-dim mask", (Input((4, 33)),), {"mask": mask(values=normal, grad=False)}),
    Sample("transposed mask", (Input((3, 24, 20)),), {"mask": mask(24, 20, values=normal, layout=transposed)}),
    Sample("expanded mask", (Input((6, 4, 40)),), {"mask": mask(6, 4, 40, values=normal, layout=expanded(0))}),
    Sample("mask over dim 0", (Input((12, 5)), 0), {"mask": mask(12, 5, values=normal)},
           refused=("cuda", "cpu")),
    Sample("intricate mask", (Input((2, 2, 2, 2, 2, 2, 8)),), {"mask": mask(2, 1, 2, 1, 2, 1, 8, values=normal)}),
    Sample("mask that widens", (Input((3, 1)),), {"mask": mask(3, 20, values=normal)}, refused=KERNELS),
    Sample("to float32", (Input((4, 33)),), {"dtype": torch.float32}, dtypes=(*HALF, torch.float32)),
    Sample("columns to float32", (Input((33, 8)), 0), {"dtype": torch.float32}, dtypes=HALF),
    Sample("to float64", (Input((4, 33)),), {"dtype": torch.float64}, refused=KERNELS, dtypes=(torch.float32,)),
)  # fmt: skip


def softmax_saved(call: Call, out: Tensor) -> int:
    kept = call.kwargs.get("mask")
    return nbytes(out) + (nbytes(kept) if kept is not None and (kept.dtype == torch.bool or kept.requires_grad) else 0)


SOFTMAX_MISTAKES = (
    Sample("dim out of range", (Input((2, 3)), 2)),
    Sample("negative dim out of range", (Input((2, 3)), -3)),
    Sample("mask that does not broadcast", (Input((2, 3)),), {"mask": mask(4, 3, values=normal)}),
    Sample("dtype of integers", (Input((2, 3)),), {"dtype": torch.int32}),
    Sample("integers", (torch.arange(3), 0)),
)


SOFTMAX = Op(
    "softmax",
    functional.softmax,
    softmax,
    kernels=KERNELS,
    samples=SOFTMAX_SAMPLES,
    saved_bytes=softmax_saved,
    mistakes=SOFTMAX_MISTAKES,
    layers=(Layer(fastlayers.FusedSoftmax(-1), SOFTMAX_SAMPLES[0]),),
    matrix=lambda x: (x,),
)


LOG_SOFTMAX = replace(
    SOFTMAX,
    name="log_softmax",
    fused=functional.log_softmax,
    reference=log_softmax,
    # Minus infinity, the logarithm of what a boolean mask leaves out, is beyond finite differences.
    samples=tuple(replace(s, smooth=s.smooth and not s.name.startswith("boolean")) for s in SOFTMAX_SAMPLES),
    layers=(Layer(fastlayers.FusedLogSoftmax(-1), SOFTMAX_SAMPLES[0]),),
)

"""Rows of the table of ops: norms over channels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fastlayers
from fastlayers import functional
from tests.table.elementwise import bit_of_each
from tests.table.layer_norm import IMAGE
from tests.table.sample import (
    Call,
    Input,
    Layer,
    Op,
    Sample,
    channels_last,
    channels_last_3d,
    constant,
    contiguous,
    expanded,
    large,
    misaligned,
    nbytes,
    normal,
    positive,
    row_slice,
    shifted,
    strided,
    transposed,
    with_infinities,
    with_nan,
)
from tests.table.softmax import HALF, KERNELS


def hardswish(z: Tensor) -> Tensor:
    """On CUDA torch multiplies by one sixth in float32, for float64 too."""
    return z * F.relu6(z + 3) / 6 if isinstance(z, Tensor) and z.dtype == torch.float64 else F.hardswish(z)


ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda z: z,
    "relu": torch.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "hardswish": hardswish,
    "relu6": F.relu6,
    "leaky_relu": F.leaky_relu,
}


SMOOTH_ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


def group_norm(
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    act: str | None = None,
) -> Tensor:
    if weight is not None and weight.dtype == torch.float32 and x.dtype in HALF:  # torch's CUDA kernels refuse it
        return ACTIVATIONS[act](F.group_norm(x.float(), groups, weight, bias, eps)).to(x.dtype)
    return ACTIVATIONS[act](F.group_norm(x, groups, weight, bias, eps))


def batch_norm(
    x: Tensor, mean: Any, var: Any, weight: Any = None, bias: Any = None, training: bool = False,
    momentum: float = 0.1, eps: float = 1e-5, *, residual: Tensor | None = None, act: str | None = None,
) -> Tensor:  # fmt: skip
    if weight is None and bias is not None:  # torch's backward on CUDA takes no bias without a weight
        weight = torch.ones_like(bias)
    z = F.batch_norm(x, mean, var, weight, bias, training, momentum, eps)
    return ACTIVATIONS[act](z if residual is None else z + residual)


def images(build: Callable[..., Sample]) -> tuple[Sample, ...]:
    """Calls on (N, C, *) that every norm over channels takes; ``build`` has their names, shapes and layouts."""
    return (
        build("image", (2, 4, 3, 2), smooth=True),
        build("odd image", (3, 5, 7, 3)),
        build("channels_last", IMAGE, channels_last),
        build("odd channels_last", (3, 5, 7, 3), channels_last),
        build("channels_last of 64", (4, 64, 9, 8), channels_last),
        build("channels_last, one row", (4, 6, 1, 5), channels_last),
        *(
            build(f"many pixels{name}", (2, 4, 67, 61), layout, **options)
            for layout, of_layout in ((contiguous, ""), (channels_last, ", channels_last"))
            # On CPU torch adds float64 one by one, and float32 in float64: its error in float32 does not judge float64.
            for name, options in (
                (of_layout, {"dtypes": (*HALF, torch.float32)}),
                (f"{of_layout}, float64", {"dtypes": (torch.float64,), "gpu_only": True}),
            )
        ),
        build("many channels", (3, 1032, 2, 3)),
        build("many channels, channels_last", (3, 1032, 2, 3), channels_last),
        build("many images", (301, 4, 3)),
        build("three dims", (3, 6, 35)),
        build("five dims", (2, 6, 3, 4, 5)),
        build("five dims, channels_last", (2, 6, 3, 4, 5), channels_last_3d),
        build("misaligned", IMAGE, misaligned),
        build("empty", (0, 4, 3, 3), refused=KERNELS),
        build("large values", IMAGE, values=large),
        build("large mean", IMAGE, values=shifted, dtypes=(torch.float32, torch.float64)),
        build("large mean, channels_last", IMAGE, channels_last, values=shifted, dtypes=(torch.float32, torch.float64)),
        build("equal values", IMAGE, values=constant(3.0)),
        build("NaN", IMAGE, values=with_nan),
        build("infinities", IMAGE, values=with_infinities),
        build("no weight", IMAGE, weight=None, bias=None),
        build("no bias", IMAGE, bias=None),
        build("float32 weight", IMAGE, parameters=torch.float32, dtypes=HALF),
        build("float32 weight, channels_last", IMAGE, channels_last, parameters=torch.float32, dtypes=HALF),
        build("strided weight", IMAGE, weight=Input((8,), strided), refused=KERNELS),
    )  # fmt: skip


def grouped(
    name: str, shape: tuple[int, ...], layout: Any = contiguous, *, values: Any = normal, groups: int | None = None,
    weight: Any = ..., bias: Any = ..., parameters: Any = None, act: str | None = None, **options: Any,
) -> Sample:  # fmt: skip
    c = shape[1]
    groups = groups or next(g for g in (2, 3, 1) if c % g == 0)
    weight, bias = (Input((c,), dtype=parameters) if given is ... else given for given in (weight, bias))
    return Sample(name, (Input(shape, layout, values), groups, weight, bias), {"act": act} if act else {}, **options)


def group_norm_saved(call: Call, out: Tensor) -> int:
    x, groups, weight, bias = call.args
    statistics = 2 * x.shape[0] * groups * (8 if x.dtype == torch.float64 else 4)
    return nbytes(x) + statistics + sum(nbytes(p) for p in (weight, bias if call.kwargs else None) if p is not None)


GROUP_NORM = Op(
    "group_norm",
    functional.group_norm,
    group_norm,
    kernels=KERNELS,
    samples=(
        *images(grouped),
        grouped("matrix", (6, 40), groups=5),
        grouped("matrix of odd groups", (7, 33), groups=3),
        grouped("one group", IMAGE, groups=1),
        grouped("one channel a group", IMAGE, groups=8),
        grouped("groups of 40", (2, 320, 8, 8), groups=8),
        grouped("groups of 40, channels_last", (2, 320, 8, 8), channels_last, groups=8),
        grouped("long group", (1, 2, 257, 260), groups=1, act="silu"),
        grouped("transposed", (2, 6, 24), transposed, groups=3),
        grouped("row slice", (2, 6, 5, 24), row_slice),
        grouped("expanded images", (4, 6, 24), expanded(0)),
        *(grouped(f"image, {act}", (2, 4, 3, 2), act=act, smooth=act in SMOOTH_ACTIVATIONS)
          for act in ACTIVATIONS if act),
        *(grouped(f"channels_last, {act}", IMAGE, channels_last, act=act) for act in ACTIVATIONS if act),
        grouped("NaN, relu", IMAGE, values=with_nan, act="relu"),
        grouped("silu, no weight", IMAGE, weight=None, bias=None, act="silu"),
        grouped("silu, float32 weight", IMAGE, parameters=torch.float32, act="silu", dtypes=HALF),
    ),
    saved_bytes=group_norm_saved,
    mistakes=(
        Sample("groups that do not divide", (Input((2, 6, 3)), 4)),
        Sample("one value a group", (Input((1, 6, 1)), 6)),
        Sample("one dimension", (Input((6,)), 2)),
        Sample("weight of another shape", (Input((2, 6, 3)), 2, Input((3,)))),
    ),
    layers=(
        Layer(fastlayers.FusedGroupNorm(2, 8), Sample("of a layer", (Input(IMAGE), 2)), 1),
        Layer(fastlayers.FusedGroupNormAct(2, 8), Sample("of a layer", (Input(IMAGE), 2), {"act": "silu"}), 1),
    ),
    matrix=lambda x: (x, 1),
)  # fmt: skip


def instances(name: str, shape: tuple[int, ...], layout: Any = contiguous, **options: Any) -> Sample:
    sample = grouped(name, shape, layout, groups=1, **options)
    x, _, *parameters = sample.args
    return replace(sample, args=(x, None, None, *parameters))


def instance_norm(x: Tensor, *args: Any, act: str | None = None) -> Tensor:
    return ACTIVATIONS[act](F.instance_norm(x, *args))


def instance_norm_saved(call: Call, out: Tensor) -> int:
    x, weight, bias = call.args[0], call.args[3], call.args[4] if call.kwargs else None
    return (
        nbytes(x)
        + sum(nbytes(p) for p in (weight, bias) if p is not None)
        + 2 * x.shape[0] * x.shape[1] * (8 if x.dtype == torch.float64 else 4)
    )


INSTANCE_NORM = Op(
    "instance_norm",
    functional.instance_norm,
    instance_norm,
    kernels=KERNELS,
    samples=(
        *(sample for sample in images(instances) if sample.name != "empty"),  # torch fails
        instances("transposed", (2, 6, 24), transposed),
        instances("image, relu", IMAGE, act="relu"),
        instances("image, silu", (2, 4, 3, 2), act="silu", smooth=True),
        instances("channels_last, leaky_relu", IMAGE, channels_last, act="leaky_relu"),
        Sample("running statistics", (Input(IMAGE), Input((8,), grad=False),
               Input((8,), values=positive, grad=False), None, None, False), refused=KERNELS),
    ),
    saved_bytes=instance_norm_saved,
    mistakes=(
        Sample("one pixel", (Input((2, 6, 1, 1)),)),
        Sample("one dimension", (Input((6,)),)),
        Sample("weight of another shape", (Input((2, 6, 3)), None, None, Input((3,)))),
    ),
    layers=(
        Layer(fastlayers.FusedInstanceNorm1d(6), Sample("of a layer", (Input((2, 6, 7)),))),
        Layer(fastlayers.FusedInstanceNorm2d(8), Sample("of a layer", (Input(IMAGE),))),
        Layer(fastlayers.FusedInstanceNorm3d(6), Sample("of a layer", (Input((2, 6, 3, 2, 4)),))),
    ),
    matrix=None,
)  # fmt: skip


def batches(training: bool) -> Callable[..., Sample]:
    def build(
        name: str, shape: tuple[int, ...], layout: Any = contiguous, *, values: Any = normal, weight: Any = ...,
        bias: Any = ..., parameters: Any = None, act: str | None = None, residual: Any = None, **options: Any,
    ) -> Sample:  # fmt: skip
        c = (shape[1],)
        weight, bias = (Input(c, dtype=parameters) if given is ... else given for given in (weight, bias))
        running = (
            Input(c, grad=False, dtype=parameters),
            Input(c, values=positive, grad=False, dtype=parameters),
        )
        kwargs = {"act": act} if act else {}
        if residual is not None:
            kwargs["residual"] = Input(shape, layout) if residual is True else residual
        x = Input(shape, layout, values)
        statistics = (None, None) if training else running
        return Sample(name, (x, *statistics, weight, bias, training), kwargs, **options)

    return build


def batch_norm_samples(build: Callable[..., Sample]) -> tuple[Sample, ...]:
    small = (2, 4, 3, 2)
    return (
        *images(build),
        build("matrix", (6, 40)),
        build("odd matrix", (67, 33)),
        build("long matrix", (4099, 8)),
        build("transposed", (2, 6, 24), transposed, refused=KERNELS),
        build("row slice", (2, 6, 5, 24), row_slice, refused=KERNELS),
        build("bias without weight", IMAGE, weight=None),
        *(build(f"image, {act}", small, act=act, smooth=act in SMOOTH_ACTIVATIONS) for act in ACTIVATIONS if act),
        *(build(f"channels_last, {act}", IMAGE, channels_last, act=act) for act in ACTIVATIONS if act),
        *(build(f"residual, {act}", small, act=act, residual=True, smooth=act in (None, *SMOOTH_ACTIVATIONS))
          for act in ACTIVATIONS),
        *(build(f"channels_last residual, {act}", IMAGE, channels_last, act=act, residual=True)
          for act in ACTIVATIONS),
        build("odd residual, relu", (3, 5, 7, 3), act="relu", residual=True),
        build("matrix, residual, relu", (6, 41), act="relu", residual=True),
        build("five dims, residual, relu", (2, 6, 3, 4, 5), channels_last_3d, act="relu", residual=True),
        build("x channels_last, residual not", IMAGE, channels_last, act="relu", residual=Input(IMAGE)),
        build("residual channels_last, x not", IMAGE, act="relu", residual=Input(IMAGE, channels_last)),
        build("misaligned residual", IMAGE, act="relu", residual=Input(IMAGE, misaligned)),
        build("expanded residual", IMAGE, act="relu", residual=Input(IMAGE, expanded(0))),
        build("residual that broadcasts", IMAGE, act="relu", residual=Input((8, 1, 1)), refused=KERNELS),
        build("residual without gradient", IMAGE, act="relu", residual=Input(IMAGE, grad=False)),
        build("NaN, residual, relu", IMAGE, values=with_nan, act="relu", residual=True),
        build("NaN residual, relu", IMAGE, act="relu", residual=Input(IMAGE, values=with_nan)),
        build("float32 weight, residual, relu", IMAGE, parameters=torch.float32, act="relu", residual=True,
              dtypes=HALF),
        build("no weight, residual, relu", IMAGE, weight=None, bias=None, act="relu", residual=True),
    )  # fmt: skip


def batch_norm_saved(call: Call, out: Tensor) -> int:
    x, _, _, weight, bias, _ = call.args
    act, residual = call.kwargs.get("act"), call.kwargs.get("residual")
    kept = nbytes(x) + nbytes(weight) + 2 * x.shape[1] * (8 if x.dtype == torch.float64 else 4)
    if act == "relu" and residual is not None:
        return kept + bit_of_each(call, out)
    if act is None:
        return kept
    return kept + nbytes(bias) + (0 if residual is None else nbytes(residual))


def of_batches(shape: tuple[int, ...], act: str | None = None) -> Sample:
    return Sample("of a layer", (Input(shape), None, None, None, None, True), {"act": act} if act else {})


BATCH_NORM_MISTAKES = (
    Sample("one value a channel", (Input((1, 6)), None, None, None, None, True)),
    Sample("one pixel", (Input((1, 6, 1, 1)), None, None, None, None, True)),
    Sample("no statistics", (Input((2, 6)), None, None)),
    Sample("eps 0", (Input((2, 6)), None, None, None, None, True, 0.1, 0.0)),
    Sample("weight of another shape", (Input((2, 6, 3)), None, None, Input((3,)), None, True)),
    Sample("residual of another shape", (Input((2, 6)), None, None, None, None, True),
           {"residual": Input((3, 5)), "act": "relu"}),
)  # fmt: skip


BATCH_NORM = Op(
    "batch_norm",
    functional.batch_norm,
    batch_norm,
    kernels=KERNELS,
    samples=batch_norm_samples(batches(training=True)),
    saved_bytes=batch_norm_saved,
    mistakes=BATCH_NORM_MISTAKES,
    layers=(
        Layer(fastlayers.FusedBatchNorm1d(6), of_batches((4, 6)), 1),
        Layer(fastlayers.FusedBatchNorm2d(8), of_batches(IMAGE), 1),
        Layer(fastlayers.FusedBatchNorm3d(6), of_batches((2, 6, 3, 2, 4)), 1),
        Layer(fastlayers.FusedBatchNormAct1d(6), of_batches((4, 6), "relu"), 1),
        Layer(fastlayers.FusedBatchNormAct2d(8, act="silu"), of_batches(IMAGE, "silu"), 1),
        Layer(fastlayers.FusedBatchNormAct3d(6), of_batches((2, 6, 3, 2, 4), "relu"), 1),
        Layer(fastlayers.FusedSyncBatchNormAct(6), of_batches((4, 6), "relu"), 1),
    ),
    matrix=lambda x: (x, None, None, None, None, True),
    alone=1,
)


BATCH_NORM_EVAL = replace(
    BATCH_NORM,
    name="batch_norm_eval",
    samples=batch_norm_samples(batches(training=False)),
    layers=(),
    matrix=None,
)

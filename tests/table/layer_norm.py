"""Rows of the table of ops: norms of rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fastlayers
from fastlayers import functional
from tests.table.elementwise import GPU_KERNELS
from tests.table.sample import (
    FLOATING,
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
    row_slice,
    shifted,
    strided,
    transposed,
    with_infinities,
    with_nan,
)
from tests.table.softmax import HALF, KERNELS, LONG_ROW_LENGTHS, ROW_LENGTHS


def layer_norm(
    x: Tensor,
    shape: tuple[int, ...],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    if weight is not None and weight.dtype == torch.float32 and x.dtype in HALF:  # torch's CUDA kernels refuse it
        y = F.layer_norm(x.float(), shape, weight, bias, eps).to(x.dtype)
    else:
        y = F.layer_norm(x, shape, weight, bias, eps)
    return y if dtype is None else y.to(dtype)


def rms_norm(
    x: Tensor,
    shape: tuple[int, ...],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    casting: str = "torch",
    dtype: torch.dtype | None = None,
) -> Tensor:
    if dtype is not None:
        return rms_norm(x, shape, weight, eps, casting=casting).to(dtype)
    if casting == "torch":
        return F.rms_norm(x, shape, weight, eps)
    wide = x.double() if x.dtype == torch.float64 else x.float()
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    wide = wide * torch.rsqrt(wide.pow(2).mean([-i - 1 for i in range(len(shape))], keepdim=True) + eps)
    if casting == "llama":
        return wide.to(x.dtype) if weight is None else weight * wide.to(x.dtype)
    assert casting == "gemma"
    return (wide if weight is None else wide * (1.0 + weight.to(wide.dtype))).to(x.dtype)


def add_layer_norm(x: Tensor, residual: Tensor | None, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    s = x.view_as(x) if residual is None else x + residual
    return layer_norm(s, *args, **kwargs), s


def add_rms_norm(x: Tensor, residual: Tensor | None, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    s = x.view_as(x) if residual is None else x + residual
    return rms_norm(s, *args, **kwargs), s


def channel_layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    return layer_norm(x.permute(0, 2, 3, 1), x.shape[1:2], weight, bias, eps, dtype=dtype).permute(0, 3, 1, 2)


IMAGE = (2, 8, 5, 6)


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def row_norms(add: bool, bias: bool, **common: Any) -> tuple[Sample, ...]:
    """Calls of a norm over rows, with and without a residual, with and without a bias."""

    def sample(
        name: str, shape: tuple[int, ...] = (5, 37), *, dims: int = 1, layout: Any = contiguous, values: Any = normal,
        other: Any = ..., weight: Any = ..., second: Any = ..., kwargs: Any = None, **options: Any,
    ) -> Sample:  # fmt: skip
        row = shape[len(shape) - dims :]
        inputs = [Input(shape, layout, values)]
        if add:
            inputs.append(Input(shape, layout) if other is ... else other)
        parameters = [Input(row) if weight is ... else weight]
        if bias:
            parameters.append(Input(row) if second is ... else second)
        return Sample(name, (*inputs, row, *parameters), {**common, **(kwargs or {})}, **options)

    float32 = Input((37,), dtype=torch.float32)
    return (
        sample("rows", smooth=True),
        *(sample(f"length {n}", (16 if n < 1000 else 3, n)) for n in ROW_LENGTHS),
        *(sample(f"length {n}", (3, n), gpu_only=True) for n in LONG_ROW_LENGTHS),
        sample("many rows", (4099, 16)),
        sample("many odd rows", (1025, 9)),
        sample("three dims", (2, 9, 24)),
        sample("two dims a row", (3, 4, 5, 6), dims=2, smooth=True),
        sample("one row", (4, 33), dims=2),
        sample("one dim", (33,)),
        sample("no weight", weight=None, second=None, smooth=True),
        sample("two dims without weight", (3, 4, 5, 6), dims=2, weight=None, second=None),
        sample("weight without gradient", weight=Input((37,), grad=False), second=Input((37,), grad=False)),
        sample("eps", kwargs={"eps": 0.1}),
        sample("empty", (0, 7), refused=KERNELS),
        sample("empty rows", (3, 0), refused=KERNELS),
        sample("transposed", (24, 33), layout=transposed),
        sample("batch transposed", (3, 4, 24), layout=lambda t: t.transpose(0, 1).contiguous().transpose(0, 1)),
        sample("row slice", (5, 64), layout=row_slice),
        sample("odd row slice", (5, 33), layout=row_slice),
        sample("strided", (5, 40), layout=strided),
        sample("misaligned", (6, 64), layout=misaligned),
        sample("misaligned odd", (6, 65), layout=misaligned),
        sample("expanded rows", (6, 40), layout=expanded(0)),
        sample("expanded along the row", (3, 40), layout=expanded(1)),
        sample("large values", (5, 40), values=large),
        sample("large mean", (5, 40), values=shifted, dtypes=(torch.float32, torch.float64)),
        sample("large mean, long rows", (3, 2050), values=shifted, dtypes=(torch.float32, torch.float64)),
        sample("equal values", (5, 40), values=constant(3.0)),
        sample("zeros", (5, 40), values=constant(0.0)),
        sample("NaN", (5, 40), values=with_nan),
        # In float64 torch 2.11's CUDA rms_norm makes the whole row NaN, and in no other dtype.
        sample("infinities", (5, 40), values=with_infinities, dtypes=FLOATING if bias else FLOATING[:3]),
        sample("float32 weight", weight=float32, second=float32, dtypes=HALF),
        sample("misaligned weight", (5, 64), weight=Input((64,), misaligned), second=Input((64,), misaligned)),
        sample("strided weight", (5, 40), weight=Input((40,), strided), refused=KERNELS),
        *((
            sample("no bias", second=None, smooth=True),
            sample("bias without weight", weight=None, refused=KERNELS),
        ) if bias else ()),
        *((
            sample("float32 residual", other=Input((5, 37), dtype=torch.float32), weight=float32, second=float32,
                   dtypes=HALF),
            sample("residual that broadcasts", other=Input((37,))),
            sample("transposed residual", (24, 33), other=Input((24, 33), transposed)),
            sample("misaligned residual", (6, 64), other=Input((6, 64), misaligned)),
            *(sample(f"no residual{suffix}", shape, other=None, **options) for suffix, shape, options in (
                ("", (5, 37), {"smooth": True}),
                (", 768", (9, 768), {}),
                (", misaligned", (6, 65), {"layout": misaligned}),
                (", transposed", (24, 33), {"layout": transposed}),
                (", empty", (0, 7), {"refused": KERNELS}),
            )),
            *(sample(f"no residual, {name(half)} result", (9, 768), other=None, kwargs={"dtype": half},
                     dtypes=(torch.float32,)) for half in HALF),
            *(sample(f"float32 residual, {name(half)} result", (9, 768), other=Input((9, 768), dtype=torch.float32),
                     weight=Input((768,), dtype=torch.float32), second=Input((768,), dtype=torch.float32),
                     kwargs={"dtype": half}, dtypes=(half,)) for half in HALF),
        ) if add else ()),
        # What a layer under autocast reads.
        *(sample(f"length {n}, {name(half)} result", (16 if n < 1000 else 3, n), kwargs={"dtype": half},
                 dtypes=(torch.float32,), gpu_only=n in LONG_ROW_LENGTHS)
          for n, half in itertools.product((37, 768, 4097, 8192, 32776, 2**20 + 3), HALF)),
        sample("float32 result", kwargs={"dtype": torch.float32}, dtypes=FLOATING[:3]),
    )  # fmt: skip


def refused(samples: tuple[Sample, ...], *names: str) -> tuple[Sample, ...]:
    """The same calls. Kernels refuse those with these names."""
    return tuple(replace(s, refused=KERNELS) if s.name in names else s for s in samples)


def named(samples: tuple[Sample, ...], *names: str, suffix: str) -> tuple[Sample, ...]:
    """The calls with these names, renamed."""
    return tuple(replace(s, name=f"{s.name}, {suffix}") for s in samples if s.name in names)


def image_rows(refused: tuple[str, ...]) -> Sample:
    """The last dimension of a channels_last image."""
    return Sample("channels_last", (Input(IMAGE, channels_last), IMAGE[-1:], Input(IMAGE[-1:])), refused=refused)


def row_statistics(call: Call, shape: tuple[int, ...], dims: int, moments: int) -> int:
    """Bytes that the statistics of all rows take."""
    x = call.args[0]
    return moments * math.prod(shape[: len(shape) - dims]) * (8 if x.dtype == torch.float64 else 4)


def row_norm_saved(moments: int, at: int = 1) -> Callable[[Call, Any], int]:
    def saved(call: Call, out: Any) -> int:
        x = out[1] if at == 2 else call.args[0]
        weight = call.args[at + 1]
        return nbytes(x) + nbytes(weight) + row_statistics(call, x.shape, len(call.args[at]), moments)

    return saved


ROW_MISTAKES = (
    Sample("shape of another length", (Input((2, 3)), (4,))),
    Sample("more dimensions than x has", (Input((3,)), (2, 3))),
    Sample("an empty shape", (Input((2, 3)), ())),
    Sample("a number for a shape", (Input((2, 3)), 3)),
    Sample("weight of another shape", (Input((2, 3)), (3,), Input((4,)))),
    Sample("weight that broadcasts", (Input((2, 3)), (3,), Input((1,)))),
    Sample("integers", (torch.arange(3), (3,))),
)


ADD_MISTAKES = (
    Sample("shapes that do not broadcast", (Input((2, 3)), Input((4, 3)), (3,))),
    Sample("shape of another length", (Input((2, 3)), Input((2, 3)), (4,))),
)


def of_rows(*inputs: Input) -> Sample:
    return Sample("of a layer", (*inputs, (37,)))


LAYER_NORM_SAMPLES = row_norms(add=False, bias=True)


LAYER_NORM = Op(
    "layer_norm",
    functional.layer_norm,
    layer_norm,
    kernels=KERNELS,
    samples=(*LAYER_NORM_SAMPLES, image_rows(refused=())),
    saved_bytes=row_norm_saved(2),
    mistakes=ROW_MISTAKES,
    layers=(Layer(fastlayers.FusedLayerNorm(37), of_rows(Input((5, 37))), 1),),
    matrix=lambda x: (x, x.shape[1:]),
)


RMS_NORM_SAMPLES = row_norms(add=False, bias=False)


SOME_ROWS = (
    "rows", "length 33", "length 1024", "length 4097", "two dims a row", "no weight", "float32 weight", "transposed",
    "batch transposed", "row slice", "expanded rows", "misaligned odd", "NaN", "infinities", "empty",
)  # fmt: skip


RMS_NORM = Op(
    "rms_norm",
    functional.rms_norm,
    rms_norm,
    kernels=KERNELS,
    samples=(
        *RMS_NORM_SAMPLES,
        image_rows(refused=KERNELS),  # torch's result is channels_last
        *(
            sample
            for casting in ("llama", "gemma")
            # Elementwise operations keep an order in memory in which rows do not follow each other.
            for sample in refused(
                named(row_norms(add=False, bias=False, casting=casting), *SOME_ROWS, suffix=casting),
                f"transposed, {casting}",
                f"expanded rows, {casting}",
            )
        ),
    ),
    saved_bytes=row_norm_saved(1),
    mistakes=ROW_MISTAKES,
    layers=(Layer(fastlayers.FusedRMSNorm(37), of_rows(Input((5, 37))), 1),),
    matrix=lambda x: (x, x.shape[1:]),
)


ADD_LAYER_NORM = Op(
    "add_layer_norm",
    functional.add_layer_norm,
    add_layer_norm,
    kernels=KERNELS,
    samples=row_norms(add=True, bias=True),
    saved_bytes=row_norm_saved(2, at=2),
    mistakes=ADD_MISTAKES,
    layers=(Layer(fastlayers.FusedAddLayerNorm(37), of_rows(Input((5, 37)), Input((5, 37))), 2),),
    matrix=lambda x: (x, x, x.shape[1:]),
)


ADD_RMS_NORM = Op(
    "add_rms_norm",
    functional.add_rms_norm,
    add_rms_norm,
    kernels=KERNELS,
    samples=(
        *row_norms(add=True, bias=False),
        *(
            sample
            for casting in ("llama", "gemma")
            for sample in refused(
                named(row_norms(add=True, bias=False, casting=casting), *SOME_ROWS, suffix=casting),
                f"transposed, {casting}",
            )
        ),
    ),
    saved_bytes=row_norm_saved(1, at=2),
    mistakes=ADD_MISTAKES,
    layers=(Layer(fastlayers.FusedAddRMSNorm(37), of_rows(Input((5, 37)), Input((5, 37))), 2),),
    matrix=lambda x: (x, x, x.shape[1:]),
)


def ada_layer_norm(
    x: Tensor, shape: tuple[int, ...], scale: Tensor, shift: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    y = F.layer_norm(x, shape, eps=eps) * (1 + scale)
    return y if shift is None else y + shift


def half_of_a_projection(t: Tensor) -> Tensor:
    """Rows that are slices of rows of twice the length, as those of ``chunk(2, -1)``."""
    return torch.cat((t, t), -1)[..., : t.shape[-1]]


def modulated(
    name: str, shape: tuple[int, ...], of: tuple[int, ...], row: int = 1, shift: Any = ..., **options: Any
) -> Sample:
    """A call with scale and shift of a shape; ``row``: the dimensions of a row."""
    scale = Input(of, options.pop("of_scale", contiguous), dtype=options.pop("to", None))
    x = Input(shape, options.pop("layout", contiguous), options.pop("values", normal))
    given = scale if shift is ... else shift
    return Sample(name, (x, shape[len(shape) - row :], scale, given), **options)


def of_shorter_rows(x: Input) -> tuple[Any, ...]:
    """A call with a scale for each row. The kernels take no rows of more than 8,192 elements."""
    rows, n = x.shape
    parts = -(-n // 4096)
    each = replace(x, shape=(parts * rows, n // parts))
    return each, each.shape[1:], each


AND_CSRC = ("triton", "cuda", "cpu")


ADA_LAYER_NORM = Op(
    "ada_layer_norm",
    functional.ada_layer_norm,
    ada_layer_norm,
    kernels=("triton",),
    samples=(
        modulated("tokens", (3, 5, 37), (3, 1, 37), smooth=True),
        *(modulated(f"length {n}", (2, 3, n), (2, 1, n)) for n in ROW_LENGTHS if n <= 2048),
        modulated("length 2049", (2, 3, 2049), (2, 1, 2049), dtypes=FLOATING[:3]),
        modulated("long rows", (2, 3, 8000), (2, 1, 8000), gpu_only=True, dtypes=FLOATING[:3]),
        modulated("too long rows", (2, 3, 8200), (2, 1, 8200), gpu_only=True, refused=AND_CSRC),
        modulated("many tokens", (3, 1500, 40), (3, 1, 40)),
        modulated("many samples", (700, 2, 24), (700, 1, 24)),
        modulated("one token for each", (40, 24), (40, 24)),
        modulated("one for all", (3, 5, 37), (37,)),
        modulated("one for all, with ones", (3, 5, 37), (1, 1, 37)),
        modulated("two dims of samples", (2, 3, 4, 24), (2, 3, 1, 24)),
        modulated("two dims a row", (3, 4, 5, 6), (3, 1, 5, 6), row=2, smooth=True),
        modulated("no shift", (3, 5, 37), (3, 1, 37), shift=None, smooth=True),
        modulated("of a projection", (3, 5, 64), (3, 1, 64), of_scale=half_of_a_projection),
        modulated("of a transposed projection", (3, 5, 64), (3, 1, 64), of_scale=transposed),
        modulated("expanded scale", (3, 5, 64), (3, 1, 64), of_scale=expanded(0)),
        modulated("misaligned", (3, 6, 64), (3, 1, 64), layout=misaligned, of_scale=misaligned),
        modulated("transposed", (3, 24, 33), (3, 1, 33), layout=transposed),
        modulated("expanded tokens", (3, 6, 40), (3, 1, 40), layout=expanded(1)),
        modulated("NaN", (3, 5, 40), (3, 1, 40), values=with_nan),
        modulated("infinities", (3, 5, 40), (3, 1, 40), values=with_infinities),
        modulated("large mean", (3, 5, 40), (3, 1, 40), values=shifted, dtypes=(torch.float32, torch.float64)),
        modulated("float32 scale", (3, 5, 37), (3, 1, 37), to=torch.float32, dtypes=HALF),
        modulated("16-bit scale", (3, 5, 37), (3, 1, 37), to=torch.bfloat16, dtypes=(torch.float32,)),
        modulated("empty", (0, 5, 7), (0, 1, 7), refused=AND_CSRC),
        modulated("scale of each token", (3, 5, 37), (5, 37), refused=AND_CSRC),
        modulated("scale of a column", (3, 5, 37), (3, 5, 1), refused=AND_CSRC),
        modulated("scale that widens", (5, 37), (3, 5, 37), refused=AND_CSRC),
        modulated("shift of another shape", (3, 5, 37), (3, 1, 37), shift=Input((37,)), refused=AND_CSRC),
    ),
    saved_bytes=lambda call, out: (
        nbytes(call.args[0]) + nbytes(call.args[2]) + row_statistics(call, call.args[0].shape, len(call.args[1]), 2)
    ),
    mistakes=(
        Sample("shape of another length", (Input((2, 3)), (4,), Input((2, 3)))),
        Sample("scale that does not broadcast", (Input((2, 3)), (3,), Input((4,)))),
        Sample("shift that does not broadcast", (Input((2, 3)), (3,), Input((3,)), Input((4,)))),
        Sample("integers", (torch.arange(3), (3,), Input((3,)))),
    ),
    layers=(Layer(fastlayers.FusedAdaLayerNorm(37), modulated("of a layer", (3, 5, 37), (3, 1, 37)), (0, 2, 3)),),
    matrix=of_shorter_rows,
)


def global_response_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-6, channels_last: bool = True
) -> Tensor:
    """timm's."""
    space, channel = (tuple(range(1, x.dim() - 1)), -1) if channels_last else (tuple(range(2, x.dim())), 1)
    shape = (-1,) if channels_last else (-1, *[1] * (x.dim() - 2))
    norm = x.norm(p=2, dim=space, keepdim=True)
    relative = norm / (norm.mean(dim=channel, keepdim=True) + eps)
    return x + torch.addcmul(bias.view(shape), weight.view(shape), x * relative)


def response(name: str, shape: tuple[int, ...], last: bool = True, *, to: Any = None, **options: Any) -> Sample:
    x = Input(shape, options.pop("layout", contiguous), options.pop("values", normal))
    parameter = Input((shape[-1 if last else 1],), dtype=to)
    kwargs = options.pop("kwargs", {}) | ({} if last else {"channels_last": False})
    return Sample(name, (x, parameter, parameter), kwargs, **options)


#: A layer begins with zeros.
NEW_RESPONSE = Sample("of a layer", (Input((2, 3, 4, 5)), *(Input((5,), values=constant(0.0)),) * 2))


def with_a_channel_of_zeros(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    values = normal(shape, generator)
    values[..., 1] = 0
    return values


GLOBAL_RESPONSE_NORM = Op(
    "global_response_norm",
    functional.global_response_norm,
    global_response_norm,
    kernels=("triton",),
    samples=(
        response("channels last", (2, 3, 4, 5), smooth=True),
        response("channels first", (2, 5, 3, 4), False, smooth=True),
        response("channels_last in memory", (2, 8, 5, 6), False, layout=channels_last),
        response("one pixel", (3, 1, 1, 8)),
        response("one channel", (3, 4, 5, 1)),
        *(response(f"{c} channels", (2, 7, 7, c)) for c in (33, 64, 100, 384, 1030)),
        response("many pixels", (2, 61, 50, 24)),
        response("many pixels, channels first", (2, 24, 61, 50), False),
        response("tokens", (2, 50, 24)),
        response("volume", (2, 3, 4, 5, 8)),
        response("volume, channels first", (2, 8, 3, 4, 5), False),
        response("volume, channels_last in memory", (2, 8, 3, 4, 5), False, layout=channels_last_3d),
        response("eps", (2, 3, 4, 5), kwargs={"eps": 0.1}),
        response("misaligned", (2, 3, 4, 8), layout=misaligned),
        response("a channel of zeros", (2, 3, 4, 5), values=with_a_channel_of_zeros),
        response("zeros", (2, 3, 4, 5), values=constant(0.0)),
        response("NaN", (2, 3, 4, 5), values=with_nan),
        response("infinities", (2, 3, 4, 5), values=with_infinities),
        response("float32 weight", (2, 3, 4, 8), to=torch.float32, dtypes=HALF),
        response("too many channels", (2, 2, 2, 8200), gpu_only=True, refused=AND_CSRC),
        response("transposed", (2, 3, 4, 8), layout=transposed, refused=AND_CSRC),
        response("row slice", (2, 3, 4, 8), layout=row_slice, refused=AND_CSRC),
        response("expanded", (2, 3, 4, 8), layout=expanded(0), refused=AND_CSRC),
        response("empty", (0, 3, 4, 8), refused=AND_CSRC),
    ),
    saved_bytes=lambda call, out: (
        nbytes(call.args[0])
        + nbytes(call.args[1])
        + call.args[0].shape[0] * call.args[1].shape[0] * (8 if call.args[0].dtype == torch.float64 else 4)
    ),
    mistakes=(
        Sample("weight of another size", (Input((2, 3, 4, 5)), Input((4,)), Input((4,)))),
        Sample("integers", (torch.arange(24).view(2, 3, 4), Input((4,)), Input((4,)))),
    ),
    layers=(Layer(fastlayers.FusedGlobalResponseNorm(5), NEW_RESPONSE, 1),),
    matrix=None,
)


def channel_norm(name: str, shape: tuple[int, ...] = IMAGE, layout: Any = contiguous, **options: Any) -> Sample:
    return Sample(name, (Input(shape, layout), Input(shape[1:2]), Input(shape[1:2])), **options)


CHANNEL_LAYER_NORM = Op(
    "channel_layer_norm",
    functional.channel_layer_norm,
    channel_layer_norm,
    kernels=GPU_KERNELS,
    samples=(
        channel_norm("image", (2, 7, 3, 2), smooth=True),
        channel_norm("channels_last", layout=channels_last),
        channel_norm("channels_last of 96", (2, 96, 7, 7), channels_last),
        channel_norm("transposed", layout=transposed),
        channel_norm("misaligned", layout=misaligned),
        channel_norm("one pixel", (3, 8, 1, 1)),
        channel_norm("empty", (0, 8, 5, 5), refused=KERNELS),
        Sample("no weight", (Input(IMAGE),)),
        Sample("float32 weight", (Input(IMAGE, channels_last), Input((8,), dtype=torch.float32)), dtypes=HALF),
        *(
            channel_norm(
                f"{name(half)} result", (2, 96, 7, 7), channels_last, kwargs={"dtype": half}, dtypes=(torch.float32,)
            )
            for half in HALF
        ),
    ),
    saved_bytes=lambda call, out: (
        nbytes(call.args[0])
        + nbytes(call.args[1])
        + 2 * out.numel() // out.shape[1] * (8 if out.dtype == torch.float64 else 4)
    ),
    mistakes=(Sample("weight of another shape", (Input(IMAGE), Input((4,)))),),
    layers=(Layer(fastlayers.FusedLayerNorm2d(8), Sample("of a layer", (Input(IMAGE),))),),
    matrix=None,
)

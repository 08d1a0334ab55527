"""Rows of the table of ops: sums, products, squeeze-and-excite, pooling, and what is added to a residual stream."""

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
from tests.table.softmax import HALF, KERNELS

# ---- elementwise -----------------------------------------------------------------------------------------------------


def relu_add(x: Tensor, y: Tensor, bias: float | Tensor = 0.0) -> Tensor:
    out = torch.relu(x) + y
    return out if isinstance(bias, float) and bias == 0 else out + bias


def add_relu(x: Tensor, y: Tensor) -> Tensor:
    return torch.relu(x + y)


def pairs(*, same_dtype_only: bool = True) -> tuple[Sample, ...]:
    """Calls of two tensors of one shape, which every elementwise op of two tensors takes."""
    image = (2, 8, 5, 6)
    return (
        Sample("matrix", (Input((5, 37)), Input((5, 37))), smooth=True),
        Sample("one element", (Input((1,)), Input((1,)))),
        Sample("0-dim", (Input(()), Input(()))),
        Sample("empty", (Input((0, 7)), Input((0, 7))), refused=KERNELS),
        *(Sample(f"size {n}", (Input((n,)), Input((n,)))) for n in (7, 8, 9, 33, 255, 4096, 10007)),
        Sample("several blocks", (Input((3, 40013)), Input((3, 40013)))),
        Sample("transposed", (Input((24, 33), transposed), Input((24, 33), transposed))),
        Sample("x transposed", (Input((24, 33), transposed), Input((24, 33)))),
        Sample("y transposed", (Input((24, 33)), Input((24, 33), transposed))),
        Sample("channels_last", (Input(image, channels_last), Input(image, channels_last))),
        Sample("x channels_last", (Input(image, channels_last), Input(image))),
        Sample("y channels_last", (Input(image), Input(image, channels_last))),
        Sample("channels_last, height 1", (Input((2, 3, 1, 5), channels_last), Input((2, 3, 1, 5), channels_last))),
        Sample("channels_last, width 1", (Input((2, 3, 5, 1), channels_last), Input((2, 3, 5, 1), channels_last))),
        Sample("channels_last, one pixel", (Input((2, 3, 1, 1), channels_last), Input((2, 3, 1, 1), channels_last))),
        Sample("channels_last, one channel", (Input((2, 1, 4, 5), channels_last), Input((2, 1, 4, 5), channels_last))),
        Sample("sliced", (Input((5, 33), row_slice), Input((5, 33), strided))),
        Sample("misaligned", (Input((6, 65), misaligned), Input((6, 65), misaligned))),
        Sample("y misaligned", (Input((6, 64)), Input((6, 64), misaligned))),
        Sample("x expanded", (Input((6, 40), expanded(0)), Input((6, 40)))),
        Sample("y expanded", (Input((6, 40)), Input((6, 40), expanded(1)))),
        Sample("x expanded, y transposed", (Input((6, 40), expanded(0)), Input((6, 40), transposed))),
        Sample("both expanded", (Input((6, 40), one_value), Input((6, 40), expanded(1)))),
        Sample("NaN", (Input((5, 40), values=with_nan), Input((5, 40)))),
        Sample("infinities", (Input((5, 40), values=with_infinities), Input((5, 40), values=with_infinities))),
        Sample("zeros", (Input((5, 40), values=constant(0.0)), Input((5, 40)))),
        Sample("y of float32", (Input((5, 33)), Input((5, 33), dtype=torch.float32)), refused=KERNELS, dtypes=HALF),
    )  # fmt: skip


def broadcasts(refused: tuple[str, ...]) -> tuple[Sample, ...]:
    """Calls of two tensors that broadcast against each other."""

    def sample(name: str, x: Input, y: Input, **options: Any) -> Sample:
        return Sample(name, (x, y), refused=options.pop("refused", refused), **options)

    return (
        sample("y a row", Input((6, 40)), Input((40,)), smooth=True),
        sample("y a column", Input((6, 40)), Input((6, 1)), smooth=True),
        sample("x a column", Input((6, 1)), Input((6, 40))),
        sample("y 0-dim", Input((6, 33)), Input(())),
        sample("outer product", Input((6, 1)), Input((1, 33)), smooth=True),
        sample("per channel", Input((2, 8, 5, 6)), Input((8, 1, 1))),
        sample("per channel, channels_last", Input((2, 8, 5, 6), channels_last), Input((8, 1, 1))),
        sample("squeeze and excite", Input((2, 8, 5, 6)), Input((2, 8, 1, 1))),
        sample("squeeze and excite, channels_last", Input((2, 8, 5, 6), channels_last),
               Input((2, 8, 1, 1), channels_last)),
        sample("middle repeated", Input((3, 17, 24)), Input((3, 1, 24))),
        sample("odd middle repeated", Input((3, 17, 5)), Input((3, 1, 5))),
        sample("two repeated", Input((3, 4, 5, 6)), Input((4, 1, 6))),
        sample("ends repeated", Input((3, 4, 5, 6)), Input((4, 5, 1))),
        sample("many rows", Input((3000, 24)), Input((24,))),
        sample("long rows", Input((3, 9001)), Input((3, 1))),
        sample("x transposed, y a row", Input((24, 33), transposed), Input((33,))),
        sample("y a strided row", Input((6, 40)), Input((40,), strided)),
        sample("y a misaligned row", Input((6, 40)), Input((40,), misaligned)),
        sample("x misaligned", Input((6, 40), misaligned), Input((40,))),
        sample("y an expanded row", Input((6, 40)), Input((40,), expanded(0))),
        sample("y an expanded column", Input((6, 40)), Input((6, 1), expanded(0))),
        sample("y expanded within a block", Input((3, 4, 40)), Input((3, 4, 1), expanded(1))),
        sample("sizes of one", Input((1, 5, 1, 8)), Input((8,))),
        sample("seven dims", Input((2, 1, 2, 1, 2, 1, 2)), Input((1, 2, 1, 2, 1, 2, 1))),
    )  # fmt: skip


PAIR_MISTAKES = (
    Sample("shapes that do not broadcast", (Input((2, 3)), Input((2, 4)))),
    Sample("None", (Input((2, 3)), None)),
)


def bit_of_each(call: Call, out: Tensor) -> int:
    return (out.numel() + 7) // 8


def both(call: Call, out: Tensor) -> int:
    return nbytes(call.args[0]) + nbytes(call.args[1])


def bit_where_x_wants_it(call: Call, out: Tensor) -> int:
    return bit_of_each(call, out) if call.args[0].requires_grad else 0


ELEMENTWISE = ("triton", "cuda", "cpu")


A_PAIR = Sample("matrix", (Input((5, 37)), Input((5, 37))))


def biased(name: str, bias: Any, **options: Any) -> Sample:
    shape = options.pop("shape", (4, 5, 24))
    layout = options.pop("layout", contiguous)
    refused = options.pop("refused", ("cpu",) if isinstance(bias, Input) else ())
    return Sample(name, (Input(shape, layout), Input(shape, layout), bias), refused=refused, **options)


RELU_ADD = Op(
    "relu_add",
    functional.relu_add,
    relu_add,
    kernels=ELEMENTWISE,
    samples=(
        *pairs(),
        *broadcasts(refused=KERNELS),
        biased("number", 0.75, shape=(3, 24), smooth=True),
        biased("integer number", 2),
        biased("bias of one shape", Input((2, 3, 8)), shape=(2, 3, 8), smooth=True),
        biased("bias a row", Input((24,)), shape=(3, 24), smooth=True),
        biased("bias an odd row", Input((7,)), shape=(9, 7)),
        biased("bias a column", Input((5, 1))),
        biased("bias 0-dim", Input(())),
        biased("bias per channel", Input((8, 1, 1)), shape=(2, 8, 5, 6), layout=channels_last),
        biased("bias a strided row", Input((24,), strided)),
        biased("bias an expanded row", Input((24,), expanded(0))),
        biased("bias on transposed", Input((5, 24)), layout=transposed),
        biased("bias on misaligned", Input((5, 24)), layout=misaligned),
        biased("bias without gradient", Input((24,), grad=False)),
        biased("bias of float32", Input((24,), dtype=torch.float32), refused=KERNELS, dtypes=HALF),
        biased("bias that widens", Input((3, 4, 5, 24)), refused=KERNELS),
        biased("intricate bias", Input((2, 1) * 4), shape=(2,) * 8),
    ),
    saved_bytes=bit_where_x_wants_it,
    mistakes=(*PAIR_MISTAKES, biased("bias that does not broadcast", Input((7,)))),
    layers=(Layer(fastlayers.FusedReLUAdd(), A_PAIR),),
    matrix=lambda x: (x, x),
)


ADD_RELU = Op(
    "add_relu",
    functional.add_relu,
    add_relu,
    kernels=ELEMENTWISE,
    samples=(*pairs(), *broadcasts(refused=KERNELS)),
    saved_bytes=bit_of_each,
    mistakes=PAIR_MISTAKES,
    layers=(Layer(fastlayers.FusedAddReLU(), A_PAIR),),
    matrix=lambda x: (x, x),
)


MUL = Op(
    "mul",
    functional.mul,
    torch.mul,
    kernels=ELEMENTWISE,
    samples=(*pairs(), *broadcasts(refused=("cpu",))),
    saved_bytes=both,
    mistakes=PAIR_MISTAKES,
    layers=(Layer(fastlayers.FusedMul(), A_PAIR),),
    matrix=lambda x: (x, x),
)


# ---- squeeze-and-excite, pooling -------------------------------------------------------------------------------------


def gated_by(weight: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda mean: torch.sigmoid(mean * weight)


@functools.wraps(functional.squeeze_excite)
def fused_squeeze_excite(x: Tensor, weight: Tensor) -> Tensor:
    return functional.squeeze_excite(x, gated_by(weight))


def squeeze_excite(x: Tensor, weight: Tensor) -> Tensor:
    return x * gated_by(weight)(x.mean((2, 3), keepdim=True))


def excited(name: str, shape: tuple[int, ...], layout: Any = contiguous, **options: Any) -> Sample:
    gate = options.pop("gate", Input((shape[1], 1, 1)))
    return Sample(name, (Input(shape, layout, options.pop("values", normal)), gate), **options)


def excite_saved(call: Call, out: Tensor) -> int:
    """x, the gate, and what the function of the gate keeps: the mean, the weight and the gate."""
    x, weight = call.args
    return nbytes(x) + nbytes(weight) + 3 * x[:, :, 0, 0].numel() * x.element_size()


GPU_KERNELS = ("triton", "cuda")


SQUEEZE_EXCITE = Op(
    "squeeze_excite",
    fused_squeeze_excite,
    squeeze_excite,
    kernels=KERNELS,
    samples=(
        excited("image", (2, 3, 4, 5), smooth=True),
        excited("channels_last", (2, 8, 3, 4), channels_last, smooth=True),
        excited("odd channels_last", (2, 5, 3, 3), channels_last, smooth=True),
        *(excited(f"{layout.__name__} {size}", (2, 16, size, size), layout)
          for layout in (contiguous, channels_last) for size in (1, 2, 7, 33)),
        excited("large contiguous", (2, 8, 112, 112)),
        excited("large channels_last", (2, 32, 112, 112), channels_last),
        excited("several tiles", (3, 136, 9, 9), channels_last),
        excited("one channel", (3, 1, 8, 8)),
        excited("misaligned", (2, 8, 4, 4), misaligned),
        excited("mean far from 0", (2, 8, 9, 9), channels_last, values=positive),
        excited("NaN", (2, 8, 4, 4), values=with_nan),
        excited("infinities", (2, 8, 4, 4), values=with_infinities),
        excited("transposed", (2, 8, 4, 5), transposed, refused=KERNELS),
        excited("expanded", (3, 8, 4, 4), expanded(0), refused=KERNELS),
        excited("empty", (0, 8, 4, 4), refused=KERNELS),
        excited("weight without gradient", (2, 8, 4, 4), channels_last, gate=Input((8, 1, 1), grad=False), smooth=True),
    ),
    saved_bytes=excite_saved,
    mistakes=(
        excited("3 dimensions", (2, 8, 4)),
        excited("other channels", (2, 8, 4, 4), gate=Input((7, 1, 1))),
    ),
    layers=(),
    matrix=None,
)  # fmt: skip


def pooled(name: str, *args: Any, shape: tuple[int, ...] = (2, 8, 9, 10), **options: Any) -> Sample:
    layout, values = options.pop("layout", contiguous), options.pop("values", normal)
    return Sample(name, (Input(shape, layout, values), *args), **options)


def few_values(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Values with ties in every window, also between 0 and -0."""
    return torch.randint(-1, 2, shape, generator=generator) * torch.rand(shape, generator=generator).sub(0.5).sign()


LAYOUTS_OF_IMAGES = (contiguous, channels_last)


STEM = {"stride": 2, "padding": 1}


MAX_POOL2D = Op(
    "max_pool2d",
    functional.max_pool2d,
    F.max_pool2d,
    kernels=KERNELS,
    samples=(
        pooled("stem", 3, kwargs=STEM, smooth=True, shape=(2, 2, 5, 6)),
        *(sample for layout in LAYOUTS_OF_IMAGES for sample in (
            pooled(f"3 by 2 {layout.__name__}", 3, 2, 1, layout=layout),
            pooled(f"odd 3 by 2 {layout.__name__}", 3, 2, 1, shape=(2, 5, 7, 9), layout=layout),
            pooled(f"3 by 2 without padding {layout.__name__}", 3, 2, layout=layout),
            pooled(f"2 by 2 {layout.__name__}", 2, layout=layout),
            pooled(f"2 by 2 with padding {layout.__name__}", 2, 2, 1, shape=(2, 8, 7, 9), layout=layout),
            pooled(f"3 by 1 {layout.__name__}", 3, 1, 1, layout=layout),
            pooled(f"5 by 3 {layout.__name__}", 5, 3, 2, shape=(2, 8, 14, 17), layout=layout),
            pooled(f"oblong {layout.__name__}", (1, 3), (2, 1), (0, 1), layout=layout),
            pooled(f"dilation {layout.__name__}", 3, 2, 1, 2, layout=layout),
            pooled(f"ceil_mode {layout.__name__}", 3, 2, 1, 1, True, shape=(2, 8, 8, 11), layout=layout),
            pooled(f"2 by 3 ceil_mode {layout.__name__}", 2, 3, 1, 1, True, shape=(2, 8, 8, 9), layout=layout),
            pooled(f"NaN {layout.__name__}", 3, 2, 1, values=with_nan, layout=layout),
            pooled(f"infinities {layout.__name__}", 3, 2, 1, values=with_infinities, layout=layout),
            pooled(f"ties {layout.__name__}", 3, 2, 1, values=few_values, layout=layout),
            pooled(f"ties in other windows {layout.__name__}", 3, 1, values=few_values, layout=layout),
            pooled(f"larger {layout.__name__}", 3, 2, 1, shape=(3, 16, 56, 57), layout=layout),
        )),
        # Of channels_last images torch's CUDA kernel sends the gradients of such windows to the first pixel: no model.
        pooled("minus infinity", 3, 2, 1, values=constant(-math.inf)),
        pooled("smooth channels_last", 3, 2, 1, shape=(2, 3, 5, 6), layout=channels_last, smooth=True),
        pooled("smooth dilation", 2, 1, 0, 2, shape=(2, 2, 5, 5), smooth=True),
        pooled("no batch", 3, 2, 1, shape=(8, 9, 10)),
        pooled("one output", 9, shape=(2, 8, 9, 9), layout=channels_last),
        pooled("one input", 2, 1, 1, shape=(2, 8, 1, 1), layout=channels_last),
        pooled("misaligned", 3, 2, 1, layout=misaligned),
        pooled("transposed", 3, 2, 1, layout=transposed),
        pooled("expanded", 3, 2, 1, layout=expanded(0)),
        pooled("a large window", 16, 8, 8, shape=(2, 3, 33, 40), refused=KERNELS),
        pooled("empty batch", 3, shape=(0, 8, 9, 10), refused=KERNELS),
    ),
    saved_bytes=lambda call, out: out.numel(),
    mistakes=(
        pooled("no window", 3, shape=(2, 8, 2, 2)),
        pooled("padding of more than half", 3, 2, 2),
        pooled("stride 0", 3, 0),
        pooled("dilation 0", 3, 1, 0, 0),
        pooled("2 dimensions", 3, shape=(8, 9)),
        pooled("three numbers", (3, 3, 3)),
        pooled("a string", "3"),
    ),
    layers=(Layer(fastlayers.FusedMaxPool2d(3, 2, 1), pooled("layer", 3, 2, 1), 1),),
    matrix=None,
)  # fmt: skip


# ---- residuals -------------------------------------------------------------------------------------------------------
# What draws random numbers is in test_residual.py.


def dropout_add(x: Tensor, residual: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    return residual + F.dropout(x, p, training)


@functools.wraps(functional.scale_add)
def fused_scale_add(x: Tensor, residual: Tensor, gamma: Any, *args: Any, **kwargs: Any) -> Tensor:
    """The two large tensors first, as the other rows have them."""
    return functional.scale_add(x, gamma, residual, *args, **kwargs)


def scale_add(x: Tensor, residual: Tensor, gamma: Any, drop_path: float = 0.0, training: bool = False) -> Tensor:
    if not 0 <= drop_path <= 1:
        raise ValueError(drop_path)
    y = x if gamma is None else x * gamma
    return residual + (torch.zeros_like(y) * y if training and drop_path == 1 else y)


def scaled(name: str, shape: tuple[int, ...], gamma: Any, layout: Any = contiguous, **options: Any) -> Sample:
    other, values = options.pop("other", layout), options.pop("values", normal)
    residual = options.pop("residual", Input(shape, other))
    gamma = Input(gamma) if isinstance(gamma, tuple) else gamma
    return Sample(name, (Input(shape, layout, values), residual, gamma), **options)


def scale_saved(call: Call, out: Tensor) -> int:
    x, _, gamma = call.args
    return 0 if gamma is None else nbytes(x) + nbytes(gamma)


RESIDUAL_KERNELS = KERNELS


FLOAT32_RESIDUAL = Input((5, 37), dtype=torch.float32)


DROPOUT_ADD = Op(
    "dropout_add",
    functional.dropout_add,
    dropout_add,
    kernels=RESIDUAL_KERNELS,
    samples=(
        *(replace(s, args=(*s.args, 0.3, False), refused=() if s.name == "y of float32" else s.refused)
          for s in pairs()),
        *(replace(s, name=f"{s.name}, p 1", args=(*s.args, 1.0)) for s in pairs()[:2]),
        Sample("p 0", (Input((5, 37)), Input((5, 37)), 0.0)),
        Sample("residual a row", (Input((6, 40)), Input((40,)), 0.0), refused=KERNELS),
        Sample("x a column", (Input((6, 1)), Input((6, 40)), 0.0), refused=KERNELS),
    ),
    saved_bytes=lambda call, out: 0,
    mistakes=(
        *(replace(s, kwargs={"training": False}) for s in PAIR_MISTAKES),
        Sample("p above 1", (Input((2, 3)), Input((2, 3)), 1.5)),
        Sample("negative p", (Input((2, 3)), Input((2, 3)), -0.5)),
    ),
    layers=(Layer(fastlayers.FusedDropoutAdd(0.0), Sample("matrix", (Input((5, 37)), Input((5, 37)), 0.0)), 2),),
    matrix=lambda x: (x, x, 0.0),
)  # fmt: skip


SCALE_ADD = Op(
    "scale_add",
    fused_scale_add,
    scale_add,
    kernels=RESIDUAL_KERNELS,
    samples=(
        scaled("matrix", (5, 37), (37,), smooth=True),
        *(scaled(f"size {n}", (3, n), (n,)) for n in (1, 7, 8, 40, 255, 1024)),
        scaled("many rows", (3000, 24), (24,)),
        scaled("several blocks", (3, 40013), (40013,)),
        scaled("tokens", (3, 5, 24), (24,)),
        scaled("image", (2, 8, 5, 6), (8, 1, 1), smooth=True),
        scaled("large image", (2, 3, 33, 40), (3, 1, 1)),
        scaled("odd image", (2, 5, 7, 7), (5, 1, 1)),
        scaled("small image", (2, 5, 1, 3), (5, 1, 1)),
        scaled("channels_last", (2, 8, 5, 6), (8, 1, 1), channels_last),
        scaled("odd channels_last", (2, 5, 4, 6), (5, 1, 1), channels_last),
        scaled("x channels_last", (2, 8, 5, 6), (8, 1, 1), channels_last, other=contiguous),
        scaled("residual channels_last", (2, 8, 5, 6), (8, 1, 1), other=channels_last),
        scaled("long rows", (3, 9001), (3, 1)),
        scaled("gamma a column", (6, 40), (6, 1), smooth=True),
        scaled("gamma of the middle", (3, 7, 24), (7, 1)),
        scaled("gamma 0-dim", (6, 33), ()),
        scaled("gamma of one", (6, 33), (1,)),
        scaled("no gamma", (5, 37), None, smooth=True),
        scaled("one element", (1,), (1,)),
        scaled("0-dim", (), ()),
        scaled("empty", (0, 7), (7,), refused=KERNELS),
        scaled("transposed", (24, 33), (33,), transposed),
        scaled("x transposed", (24, 33), (33,), transposed, other=contiguous),
        scaled("sliced", (5, 33), (33,), row_slice, other=strided),
        scaled("misaligned", (6, 64), (64,), misaligned),
        scaled("misaligned odd", (6, 65), (65,), misaligned),
        scaled("gamma misaligned", (6, 64), Input((64,), misaligned)),
        scaled("x expanded", (6, 40), (40,), expanded(0), other=contiguous),
        scaled("both expanded", (6, 40), (40,), one_value, other=expanded(1)),
        scaled("NaN", (5, 40), (40,), values=with_nan),
        scaled("infinities", (5, 40), (40,), values=with_infinities),
        scaled("gamma without gradient", (5, 40), Input((40,), grad=False)),
        scaled("float32 residual", (5, 37), (37,), residual=FLOAT32_RESIDUAL, dtypes=HALF),
        scaled("float32 residual and gamma", (5, 37), Input((37,), dtype=torch.float32), residual=FLOAT32_RESIDUAL,
               dtypes=HALF),
        scaled("float32 gamma of an image", (2, 8, 5, 6), Input((8, 1, 1), dtype=torch.float32), channels_last,
               residual=Input((2, 8, 5, 6), channels_last, dtype=torch.float32), dtypes=HALF),
        scaled("float32 gamma", (5, 37), Input((37,), dtype=torch.float32), refused=KERNELS, dtypes=HALF),
        scaled("gamma of a matrix", (3, 4, 5), (4, 5), refused=KERNELS),
        scaled("gamma a strided row", (6, 40), Input((40,), strided), refused=KERNELS),
        scaled("residual a row", (6, 40), (40,), residual=Input((40,)), refused=KERNELS),
        scaled("gamma that widens", (1, 40), (6, 40), residual=Input((6, 40)), refused=KERNELS),
        scaled("all dropped", (5, 37), None, kwargs={"drop_path": 1.0, "training": True}),
    ),
    saved_bytes=scale_saved,
    mistakes=(
        scaled("shapes that do not broadcast", (2, 3), (4,)),
        scaled("residual that does not broadcast", (2, 3), (3,), residual=Input((2, 4))),
        scaled("drop_path above 1", (2, 3), (3,), kwargs={"drop_path": 1.5}),
    ),
    layers=(Layer(fastlayers.FusedScaleAdd(37, None), scaled("of a layer", (5, 37), None), 2),),
    matrix=lambda x: (x, x, Input((x.shape[0], 1))),
)  # fmt: skip

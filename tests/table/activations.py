"""Rows of the table of ops: activations, gates, and the linear layers before them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastlayers
from fastlayers import functional
from tests.table.batch_norm import ACTIVATIONS, hardswish
from tests.table.elementwise import A_PAIR, GPU_KERNELS, PAIR_MISTAKES, both, broadcasts, pairs
from tests.table.layer_norm import IMAGE
from tests.table.sample import (
    FLOATING,
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
    row_slice,
    strided,
    transposed,
    with_infinities,
    with_nan,
)
from tests.table.softmax import HALF, KERNELS

STOCK_ACTS: dict[str | None, Callable[..., Tensor]] = {
    **ACTIVATIONS,
    "quick_gelu": lambda z: z * torch.sigmoid(1.702 * z),
    "relu2": lambda z: F.relu(z) * F.relu(z),
    "mish": F.mish,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "elu": F.elu,
    "softplus": F.softplus,
}


SMOOTH_ACTS = ("silu", "gelu", "gelu_tanh", "quick_gelu", "mish", "sigmoid", "tanh", "softplus")


#: Of hardswish and relu6 the steps lie at 3 and 6.
WIDE_ACTS = ("hardswish", "relu6")


def bias_act(x: Tensor, bias: Tensor | None, act: str | None, **parameters: float) -> Tensor:
    return STOCK_ACTS[act](x if bias is None else x + bias, **parameters)


def times(factor: float) -> Callable[[tuple[int, ...], torch.Generator], Tensor]:
    return lambda shape, generator: torch.randn(shape, generator=generator) * factor


def with_act(name: str, shape: tuple[int, ...], act: str | None, bias: Any = "row", **options: Any) -> Sample:
    """A call whose bias has the size of the last dimension, unless another bias or None is given."""
    x = Input(shape, options.pop("layout", contiguous), options.pop("values", normal), dtype=options.pop("dtype", None))
    kwargs = options.pop("kwargs", {})
    given = Input(shape[-1:]) if bias == "row" else bias
    return Sample(name, (x, given, act), kwargs, refused=options.pop("refused", ()), **options)


A_ROW = (5, 40)


BIAS_ACT_SAMPLES = (
    with_act("matrix", (5, 37), "gelu", smooth=True),
    *(
        with_act(f"{act}, {kind}", A_ROW, act, bias, values=times(4.0 if act in WIDE_ACTS else 2.0))
        for act in STOCK_ACTS
        if act is not None
        for kind, bias in (("biased", "row"), ("bare", None))
    ),
    *(with_act(f"{act}, smooth", (3, 5), act, smooth=True) for act in SMOOTH_ACTS[3:]),
    with_act("leaky_relu of 0.3", A_ROW, "leaky_relu", kwargs={"negative_slope": 0.3}),
    with_act("leaky_relu of -0.5", A_ROW, "leaky_relu", kwargs={"negative_slope": -0.5}),
    with_act("elu of 1.7", A_ROW, "elu", kwargs={"alpha": 1.7}),
    with_act("elu of 0.5, smooth", (3, 5), "elu", kwargs={"alpha": 1.0}, smooth=True),
    with_act("softplus of 2.5, 3", A_ROW, "softplus", kwargs={"beta": 2.5, "threshold": 3.0}, values=times(3.0)),
    with_act("softplus of -1", A_ROW, "softplus", kwargs={"beta": -1.0}),
    with_act("bare, smooth", (4, 6), "gelu_tanh", None, smooth=True),
    with_act("small values", A_ROW, "tanh", values=times(1e-3)),
    with_act("small values of elu", A_ROW, "elu", values=times(1e-3)),
    # The float64 composition of quick_gelu takes 1 - sigmoid by subtraction, and so is no judge of float64.
    *(
        with_act(
            f"large values of {act}",
            A_ROW,
            act,
            None,
            values=large,
            dtypes=(*HALF, torch.float32) if act == "quick_gelu" else FLOATING,
        )
        for act in STOCK_ACTS
        if act is not None
    ),
    # On CPU torch's own answer depends on whether an element falls into a vector or into the rest.
    *(
        with_act(
            f"NaN in {act}",
            A_ROW,
            act,
            None,
            values=with_nan,
            gpu_only=act in ("hardswish", "relu6", "elu"),
            # hardswish passes the gradient on where its input is NaN; the composition that judges float64 does not.
            dtypes=(*HALF, torch.float32) if act == "hardswish" else FLOATING,
        )
        for act in STOCK_ACTS
        if act is not None
    ),
    *(
        with_act(f"infinities in {act}", A_ROW, act, None, values=with_infinities, gpu_only=act == "gelu")
        for act in STOCK_ACTS
        if act is not None
    ),
    with_act("NaN, biased", A_ROW, "silu", values=with_nan),
    with_act("one element", (1,), "silu"),
    with_act("0-dim", (), "silu", None),
    with_act("empty", (0, 7), "silu", refused=KERNELS),
    with_act("no columns", (7, 0), "silu", refused=KERNELS),
    *(with_act(f"columns {n}", (7, n), "gelu") for n in (1, 3, 8, 33, 255, 1000, 4097)),
    *(with_act(f"bare, size {n}", (n,), "mish", None) for n in (7, 9, 4096, 10007)),
    with_act("several blocks", (3, 40013), "gelu"),
    with_act("many rows", (4099, 24), "gelu"),
    with_act("many odd rows", (3001, 7), "silu"),
    with_act("fewer odd rows than a word has", (3, 1001), "gelu"),
    with_act("odd rows of several tiles", (515, 2047), "gelu"),
    with_act("rows of words and a half", (517, 268), "gelu_tanh"),
    with_act("three dims", (3, 17, 24), "gelu_tanh"),
    with_act("relu, many rows", (3001, 16), "relu"),
    with_act("transposed", (24, 33), "gelu", layout=transposed),
    with_act("bare, transposed", (24, 33), "gelu", None, layout=transposed),
    with_act("channels_last", IMAGE, "silu", layout=channels_last),
    with_act("bare, channels_last", IMAGE, "mish", None, layout=channels_last),
    with_act("row slice", (5, 64), "gelu", layout=row_slice),
    with_act("strided", (5, 40), "gelu", layout=strided),
    with_act("bare, strided", (5, 40), "gelu", None, layout=strided),
    with_act("misaligned", (6, 64), "gelu", layout=misaligned),
    with_act("bare, misaligned", (6, 65), "gelu", None, layout=misaligned),
    with_act("expanded rows", A_ROW, "gelu", layout=expanded(0)),
    with_act("expanded columns", A_ROW, "relu", layout=expanded(1)),
    with_act("bare, expanded", A_ROW, "gelu", None, layout=expanded(1)),
    with_act("strided bias", A_ROW, "gelu", Input((40,), strided)),
    with_act("misaligned bias", A_ROW, "gelu", Input((40,), misaligned)),
    with_act("expanded bias", A_ROW, "gelu", Input((40,), expanded(0))),
    with_act("bias without gradient", A_ROW, "gelu", Input((40,), grad=False)),
    with_act("relu, bias without gradient", A_ROW, "relu", Input((40,), grad=False)),
    Sample("x without gradient", (Input(A_ROW, grad=False), Input((40,)), "gelu")),
    Sample("relu, x without gradient", (Input(A_ROW, grad=False), Input((40,)), "relu")),
    with_act("bias of a matrix", A_ROW, "gelu", Input(A_ROW), refused=KERNELS),
    with_act("bias of one", A_ROW, "gelu", Input((1,)), refused=KERNELS),
    with_act("bias that widens", (40,), "gelu", Input(A_ROW), refused=KERNELS),
    with_act("bias of float32", A_ROW, "gelu", Input((40,), dtype=torch.float32), refused=KERNELS, dtypes=HALF),
    with_act("no activation", A_ROW, None, refused=KERNELS),
    with_act("long rows", (2, 2**20 + 8), "gelu", gpu_only=True),
)


def bias_act_saved(call: Call, out: Tensor) -> int:
    x, bias, act = call.args
    return nbytes(out) if act == "relu" else nbytes(x) + (0 if bias is None else nbytes(bias))


BIAS_ACT = Op(
    "bias_act",
    functional.bias_act,
    bias_act,
    kernels=KERNELS,
    samples=BIAS_ACT_SAMPLES,
    saved_bytes=bias_act_saved,
    mistakes=(
        with_act("bias that does not broadcast", A_ROW, "gelu", Input((7,))),
        with_act("parameter of another", A_ROW, "gelu", kwargs={"alpha": 2.0}),
    ),
    layers=(Layer(fastlayers.FusedBiasAct(37), with_act("layer", (5, 37), "gelu", None), 1),),
    matrix=lambda x: (x, Input(x.shape[-1:]), "gelu"),
    alone=-1,
)


def bare(
    fused: Callable[..., Tensor], stock: Callable[..., Tensor], *layers: nn.Module, smooth: bool = False, **other: Any
) -> Op:
    """The row of a function of one tensor. ``other`` are the arguments of a second call."""

    def call(name: str, shape: tuple[int, ...], layout: Any = contiguous, **options: Any) -> Sample:
        return Sample(name, (Input(shape, layout),), options.pop("kwargs", {}), **options)

    return Op(
        fused.__name__,
        fused,
        stock,
        kernels=KERNELS,
        samples=(
            call("bare matrix", (5, 37), smooth=smooth),
            call("bare empty", (0, 7), refused=KERNELS),
            call("bare blocks", (3, 40013)),
            call("bare image", IMAGE, channels_last),
            call("bare slice", (5, 33), row_slice),
            *([call("bare, other parameters", (5, 40), kwargs=other)] if other else []),
        ),
        saved_bytes=lambda call, out: nbytes(call.args[0]),
        mistakes=(),
        layers=tuple(Layer(layer, call("layer", (5, 37), kwargs=other), 1) for layer in layers),
        matrix=lambda x: (x,),
    )


GELU = bare(functional.gelu, F.gelu, fastlayers.FusedGELU("tanh"), smooth=True, approximate="tanh")


GELU = replace(GELU, mistakes=(Sample("approximate", (Input((2, 3)),), {"approximate": "erf"}),))


BARE = (
    GELU,
    bare(functional.mish, F.mish, fastlayers.FusedMish(), smooth=True),
    bare(functional.quick_gelu, STOCK_ACTS["quick_gelu"], fastlayers.FusedQuickGELU(), smooth=True),
    bare(functional.relu2, STOCK_ACTS["relu2"], fastlayers.FusedReLU2()),
    bare(functional.silu, F.silu, fastlayers.FusedSiLU(), smooth=True),
    bare(functional.hardswish, hardswish, fastlayers.FusedHardswish()),
    bare(functional.leaky_relu, F.leaky_relu, fastlayers.FusedLeakyReLU(0.2), negative_slope=0.2),
    bare(functional.elu, F.elu, fastlayers.FusedELU(0.5), alpha=0.5),
    bare(functional.softplus, F.softplus, fastlayers.FusedSoftplus(2.0, 5.0), smooth=True, beta=2.0, threshold=5.0),
)


def gated(act: str | None) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda gate, up: STOCK_ACTS[act](gate) * up


SWIGLU = Op(
    "swiglu",
    functional.swiglu,
    gated("silu"),
    kernels=KERNELS,
    samples=(*pairs(), *broadcasts(refused=KERNELS)),
    saved_bytes=both,
    mistakes=PAIR_MISTAKES,
    layers=(Layer(fastlayers.FusedSwiGLU(), A_PAIR),),
    matrix=lambda x: (x, x),
)


FEW_PAIRS = ("matrix", "several blocks", "y transposed", "misaligned", "NaN", "infinities")


def geglu(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    return F.gelu(gate, approximate=approximate) * up


GEGLU = replace(
    SWIGLU,
    name="geglu",
    fused=functional.geglu,
    reference=geglu,
    samples=(
        *(replace(sample, gpu_only=sample.name == "infinities") for sample in pairs() if sample.name in FEW_PAIRS),
        Sample("tanh", (Input((5, 37)), Input((5, 37)), "tanh"), smooth=True),
    ),
    mistakes=(*PAIR_MISTAKES, Sample("approximate", (Input((2, 3)), Input((2, 3)), "erf"))),
    layers=(
        Layer(fastlayers.FusedGEGLU(), A_PAIR),
        Layer(fastlayers.FusedGEGLU("tanh"), Sample("tanh", (Input((5, 37)), Input((5, 37)), "tanh")), 2),
    ),
)


REGLU = replace(
    GEGLU,
    name="reglu",
    fused=functional.reglu,
    reference=gated("relu"),
    samples=tuple(replace(sample, smooth=False) for sample in pairs() if sample.name in FEW_PAIRS),
    layers=(Layer(fastlayers.FusedReGLU(), A_PAIR),),
)


def gated_linear(
    gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None = None, act: str | None = "silu"
) -> Tensor:
    return F.linear(STOCK_ACTS[act](gate) * up, weight, bias)


def of_gate(name: str, gate: Any, up: Any = None, *rest: Any, out: int = 5, **options: Any) -> Sample:
    """A call of gated_linear. ``up`` is like the gate and there is no bias, unless they are given."""
    gate = gate if isinstance(gate, Input) else Input(gate)
    weight = options.pop("weight", None) or Input((out, gate.shape[-1]))
    return Sample(name, (gate, up or gate, weight, *rest), **options)


def of_linear(name: str, x: Any, bias: Any = 5, weight: Any = None, **options: Any) -> Sample:
    """A call of linear with 5 output features and a bias, unless they are given."""
    x = x if isinstance(x, Input) else Input(x)
    bias = Input((bias,)) if isinstance(bias, int) else bias
    features = bias.shape[0] if bias is not None else 5
    return Sample(name, (x, weight or Input((features, x.shape[-1])), bias), **options)


def linear_of_ones(features: int, out: int) -> nn.Linear:
    layer = fastlayers.FusedLinear(features, out)
    for parameter in layer.parameters():
        nn.init.ones_(parameter)
    return layer


ONES = Input((5,), values=constant(1.0))


LINEAR = Op(
    "linear",
    functional.linear,
    F.linear,
    kernels=GPU_KERNELS,
    dtypes=(*HALF, torch.float64),
    samples=(
        of_linear("matrix", (6, 7), smooth=True),
        of_linear("batch", (2, 3, 8), 16, smooth=True),
        of_linear("batch of batches", (2, 3, 4, 8)),
        of_linear("one feature", (7, 4), 1),
        of_linear("several blocks", (1030, 4), 257),
        of_linear("several blocks of words", (1030, 4), 264),
        of_linear("few wide rows", (3, 4), 4099),
        of_linear("no bias", (6, 8), None),
        of_linear("misaligned", Input((6, 64), misaligned)),
        of_linear("weight transposed", (6, 40), 8, Input((8, 40), transposed)),
        of_linear("frozen weight", (6, 40), weight=Input((5, 40), grad=False)),
        of_linear("only the bias", Input((6, 8), grad=False), weight=Input((5, 8), grad=False)),
        of_linear("frozen bias", (6, 8), Input((5,), grad=False)),
        of_linear("bias expanded", (6, 8), Input((5,), expanded(0))),
        of_linear("NaN", Input((5, 40), values=with_nan)),
        of_linear("empty", (0, 7)),
        of_linear("nothing out", (3, 8), 0),
        of_linear("no features", (3, 0), refused=KERNELS),
        of_linear("vector", (33,), refused=KERNELS, smooth=True),
        of_linear("transposed", Input((2, 24, 33), transposed), refused=KERNELS),
        of_linear("row slice", Input((5, 64), row_slice), refused=KERNELS),
        of_linear("float32", (6, 8), refused=KERNELS, dtypes=(torch.float32,)),
        of_linear("bias of one", (3, 8), 1, Input((5, 8)), refused=KERNELS),
    ),
    saved_bytes=lambda call, out: sum(map(nbytes, call.args[:2])),
    mistakes=(
        of_linear("other features", (3, 8), weight=Input((5, 7))),
        of_linear("bias of float64", (3, 8), Input((5,), dtype=torch.float64)),
        of_linear("bias of other features", (3, 8), 4, Input((5, 8))),
    ),
    layers=(Layer(linear_of_ones(7, 5), of_linear("layer", (2, 3, 7), ONES, Input((5, 7), values=constant(1.0))), 1),),
    matrix=None,
)  # fmt: skip


GATED_LINEAR = Op(
    "gated_linear",
    functional.gated_linear,
    gated_linear,
    kernels=KERNELS,
    samples=(
        of_gate("matrix", (6, 37), smooth=True),
        of_gate("matrix and bias", (6, 16), None, Input((5,)), smooth=True),
        *(of_gate(f"{act} of a batch", (2, 3, 24), None, Input((5,)), act) for act in ("gelu", "relu", None)),
        of_gate("tanh, smooth", (2, 2, 8), None, None, "gelu_tanh", smooth=True),
        of_gate("vector", (33,), None, Input((5,)), smooth=True),
        of_gate("one feature", (7, 1), out=1),
        of_gate("several blocks", (130, 257), out=64),
        of_gate("batch of batches", (2, 3, 4, 40)),
        of_gate("transposed", Input((24, 33), transposed)),
        of_gate("gate transposed", Input((3, 24, 32), transposed), Input((3, 24, 32))),
        of_gate("batch transposed", Input((3, 24, 32), lambda t: t.transpose(0, 1).contiguous().transpose(0, 1))),
        of_gate("row slice", Input((5, 64), row_slice), None, Input((5,))),
        of_gate("odd row slice", Input((5, 33), row_slice)),
        of_gate("strided", Input((5, 40), strided)),
        of_gate("misaligned", Input((6, 64), misaligned), weight=Input((5, 64), misaligned)),
        of_gate("up expanded", (6, 40), Input((6, 40), expanded(0))),
        of_gate("weight transposed", (6, 40), weight=Input((8, 40), transposed)),
        of_gate("frozen weight", (6, 40), None, Input((5,)), weight=Input((5, 40), grad=False)),
        of_gate("only the weight", Input((6, 40), grad=False)),
        of_gate("NaN", Input((5, 40), values=with_nan), Input((5, 40))),
        of_gate("empty", (0, 7), refused=KERNELS),
        of_gate("no features", (3, 0), refused=KERNELS),
        of_gate("nothing out", (3, 8), out=0, refused=KERNELS),
        of_gate("up a row", (3, 8), Input((8,)), refused=KERNELS),
        of_gate("bias of one", (3, 8), None, Input((1,)), refused=KERNELS),
    ),
    saved_bytes=lambda call, out: sum(map(nbytes, call.args[:3])),
    mistakes=(
        of_gate("other features", (3, 8), weight=Input((5, 7))),
        of_gate("weight of float64", (3, 8), weight=Input((5, 8), dtype=torch.float64)),
        of_gate("up that does not broadcast", (3, 8), Input((4, 8))),
        of_gate("0-dim", (), weight=Input((5, 8))),
    ),
    layers=(),
    matrix=None,  # the weight is no matrix of its shape
)


def glu(input: Tensor, dim: int = -1, *, act: str | None = "sigmoid", gate_first: bool = False) -> Tensor:
    if act == "sigmoid" and not gate_first:
        return F.glu(input, dim)
    first, second = input.chunk(2, dim)
    return STOCK_ACTS[act](first) * second if gate_first else first * STOCK_ACTS[act](second)


def halved(name: str, x: Input, act: str | None, dim: int = -1, *, gate_first: bool = False, **about: Any) -> Sample:
    return Sample(name, (x, dim), {"act": act, "gate_first": gate_first}, **about)


A_GLU = Sample("packed matrix", (Input((5, 38)),))


GLU = Op(
    "glu",
    functional.glu,
    glu,
    kernels=KERNELS,
    samples=(
        replace(A_GLU, smooth=True),
        *(halved(f"{act}", Input((5, 48)), act) for act in STOCK_ACTS),
        *(halved(f"{act} first", Input((5, 48)), act, gate_first=True) for act in ("silu", "gelu", "sigmoid", None)),
        halved("silu, smooth", Input((3, 8)), "silu", gate_first=True, smooth=True),
        halved("dim 0", Input((6, 7)), "gelu", 0, smooth=True),
        *(halved(f"packed columns {n}", Input((7, n)), "silu", gate_first=True) for n in (2, 6, 16, 66, 2000, 8194)),
        halved("vector", Input((34,)), "silu"),
        halved("packed, many rows", Input((3001, 32)), "gelu"),
        halved("channels", Input((2, 8, 5, 6)), "silu", 1),
        halved("channels, channels_last", Input((2, 8, 5, 6), channels_last), "silu", 1),
        halved("channels, channels_last, odd", Input((2, 6, 5, 3), channels_last), "silu", 1),
        halved("width, channels_last", Input((2, 8, 5, 6), channels_last), "silu", 3),
        halved("middle dim", Input((3, 10, 24)), "gelu", 1),
        halved("middle dim of a slice", Input((3, 10, 24), row_slice), "gelu", -2),
        halved("packed, transposed", Input((24, 34), transposed), "silu"),
        halved("packed row slice", Input((5, 64), row_slice), "silu"),
        halved("packed, strided", Input((5, 40), strided), "silu"),
        halved("packed, misaligned", Input((6, 64), misaligned), "silu"),
        halved("packed, expanded", Input((6, 64), expanded(0)), "silu"),
        halved("packed, expanded along", Input((6, 64), expanded(1)), "silu"),
        halved("packed NaN", Input((5, 40), values=with_nan), "silu"),
        halved("packed infinities", Input((5, 40), values=with_infinities), "silu"),
        Sample("empty", (Input((0, 8)),), refused=KERNELS),
        halved("empty halves", Input((8, 0)), "silu", refused=KERNELS),
    ),
    saved_bytes=lambda call, out: nbytes(call.args[0]),
    mistakes=(
        Sample("odd size", (Input((3, 5)),)),
        halved("dim out of range", Input((3, 4)), "sigmoid", 2),
    ),
    layers=(Layer(fastlayers.FusedGLU(), A_GLU),),
    matrix=lambda x: (replace(x, shape=(*x.shape[:-1], x.shape[-1] + x.shape[-1] % 2)),),
)

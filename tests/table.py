"""The table of fused ops, one row for each. tests/contract derives every test from it: a new op only adds a row.

A row names the fused function and the torch composition that it stands for, and describes calls of it: their tensors by
shape, layout and values, so that each can be made on any device and in any dtype.
"""

from __future__ import annotations

import functools
import itertools
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

import fastlayers
from fastlayers import functional

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# ---- values: what a tensor of a shape holds, in float32 on the CPU so that every device sees the same ----------------


def normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator)


def large(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Exponentials of these overflow float16, and float32 too, unless the maximum is subtracted first."""
    return torch.randn(shape, generator=generator) * 300


def with_nan(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return _with(normal(shape, generator), [math.nan])


def with_infinities(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return _with(normal(shape, generator), [math.inf, -math.inf, -math.inf, 0.0, -0.0])


def _with(values: Tensor, special: list[float]) -> Tensor:
    values.flatten()[3::7] = torch.tensor(special * values.numel())[: values.flatten()[3::7].numel()]
    return values


def shifted(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A mean a thousand times the deviation: the mean of squares less the square of the mean is lost in rounding."""
    return torch.randn(shape, generator=generator) + 1000


def positive(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator) + 0.5


def constant(value: float) -> Callable[[tuple[int, ...], torch.Generator], Tensor]:
    return lambda shape, _: torch.full(shape, value)


def keep_first(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.arange(shape[-1]).expand(shape) < 0.8 * shape[-1]


def keep_most(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A boolean mask: about a third of it is False, and all of its last row."""
    keep = torch.rand(shape, generator=generator) > 0.3
    keep[..., 0] = True
    keep.view(-1, shape[-1])[-1] = False
    return keep


def minus_infinity_mask(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """An additive mask of attention. Its last row is fully masked."""
    return torch.zeros(shape).masked_fill(~keep_most(shape, generator), -math.inf)


def lowest(dtype: torch.dtype) -> Callable[[tuple[int, ...], torch.Generator], Tensor]:
    """An additive mask as model libraries write it, with the lowest finite number: a fully masked row is *not* NaN."""

    def fill(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.zeros(shape).masked_fill(~keep_most(shape, generator), torch.finfo(dtype).min)

    return fill


# ---- layouts: the same values, otherwise in memory -------------------------------------------------------------------


def contiguous(t: Tensor) -> Tensor:
    return t


def transposed(t: Tensor) -> Tensor:
    return t.mT.contiguous().mT


def channels_last(t: Tensor) -> Tensor:
    return t.contiguous(memory_format=torch.channels_last)


def channels_last_3d(t: Tensor) -> Tensor:
    return t.contiguous(memory_format=torch.channels_last_3d)


def row_slice(t: Tensor) -> Tensor:
    """Rows of a wider tensor. Each is contiguous; 16 other elements lie between two of them."""
    wide = t.new_zeros((*t.shape[:-1], t.shape[-1] + 16))
    return wide[..., : t.shape[-1]].copy_(t)


def strided(t: Tensor) -> Tensor:
    return t.repeat_interleave(2, -1)[..., ::2]


def misaligned(t: Tensor) -> Tensor:
    """Contiguous, but one element past a 16-byte boundary."""
    return t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t)


def expanded(dim: int) -> Callable[[Tensor], Tensor]:
    """The first slice along ``dim``, repeated with stride 0."""

    def layout(t: Tensor) -> Tensor:
        return t.narrow(dim, 0, 1).expand(t.shape)

    return layout


def one_value(t: Tensor) -> Tensor:
    """Stride 0 everywhere: the gradient that ``.sum().backward()`` sends."""
    return t.flatten()[0].expand(t.shape)


# ---- calls -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Input:
    """A tensor argument. A floating one requires grad unless ``grad`` is False; ``dtype`` None is the test's."""

    shape: tuple[int, ...]
    layout: Callable[[Tensor], Tensor] = contiguous
    values: Callable[[tuple[int, ...], torch.Generator], Tensor] = normal
    grad: bool = True
    dtype: torch.dtype | None = None

    def make(self, device: str, dtype: torch.dtype, seed: int) -> Tensor:
        values = self.values(self.shape, torch.Generator().manual_seed(seed))
        wanted = values.dtype if values.dtype == torch.bool else self.dtype or dtype
        t = self.layout(values.to(device, wanted)).detach()
        return t.requires_grad_(self.grad and t.is_floating_point())


@dataclass(frozen=True)
class Sample:
    """One call of an op.

    ``refused`` names the backends that have no kernel for it: left alone the reference answers, forced they raise.
    ``smooth`` calls are small and have derivatives everywhere, so that finite differences can check them.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    smooth: bool = False
    gpu_only: bool = False
    dtypes: tuple[torch.dtype, ...] = FLOATING

    def make(self, device: str, dtype: torch.dtype, draw: int = 0) -> Call:
        """The call with the values of one draw, the same in every run."""
        seed = zlib.crc32(self.name.encode()) + 1000 * draw

        def made(position: int, value: Any) -> Any:
            if type(value) is tuple:
                return tuple(made(position + 200 * (i + 1), part) for i, part in enumerate(value))
            return value.make(device, dtype, seed + position) if isinstance(value, Input) else value

        args = tuple(made(i, value) for i, value in enumerate(self.args))
        return Call(args, {name: made(100 + i, value) for i, (name, value) in enumerate(self.kwargs.items())})


@dataclass(frozen=True)
class Call:
    """The arguments of one call, as tensors."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def map(self, function: Callable[[Tensor], Tensor]) -> Call:
        """The same call with ``function`` of every tensor. What required grad still does."""

        def mapped(value: Tensor) -> Tensor:
            return function(value.detach()).requires_grad_(value.requires_grad)

        return Call(*tree_map_only(Tensor, mapped, (self.args, self.kwargs)))

    def to_float64(self) -> Call:
        exact = self.map(lambda t: t.double() if t.is_floating_point() else t)
        kwargs = {
            name: torch.float64 if isinstance(value, torch.dtype) else value for name, value in exact.kwargs.items()
        }
        return Call(exact.args, kwargs)

    def tensors(self) -> list[Tensor]:
        return [value for value in tree_leaves((self.args, self.kwargs)) if isinstance(value, Tensor)]

    def leaves(self) -> list[Tensor]:
        return [t for t in self.tensors() if t.requires_grad]

    def function_of_leaves(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` of this call, as a function of the tensors that require grad, in order."""

        def call(*leaves: Tensor) -> Any:
            rest = iter(leaves)

            def taken(value: Tensor) -> Tensor:
                return next(rest) if value.requires_grad else value

            args, kwargs = tree_map_only(Tensor, taken, (self.args, self.kwargs))
            return function(*args, **kwargs)

        return call


@dataclass(frozen=True)
class Layer:
    """A fused layer, and a call of the function of which ``inputs`` arguments are those of its forward.

    That is so many from the first, or the ones at these places.
    """

    module: nn.Module
    sample: Sample
    inputs: int | tuple[int, ...] | None = None

    def arguments(self, call: Call) -> tuple[Any, ...]:
        if isinstance(self.inputs, tuple):
            return tuple(call.args[place] for place in self.inputs)
        return call.args[: self.inputs]


@dataclass(frozen=True)
class Op:
    """A row: an op, the torch composition that it stands for, and calls of both.

    Attributes:
        kernels: backends that have kernels of it.
        samples: calls; the first is the plainest one, for the tests that need only one.
        saved_bytes: what the docstring says is kept for backward, from (call, output).
        mistakes: calls for which torch raises; the op must raise the same.
        layers: the fused layers that compute it.
        matrix: arguments of a call on matrices that are as the given one; None where it has none.
        alone: the dimension of that matrix whose indices have nothing to do with each other.
    """

    name: str
    fused: Callable[..., Any]
    reference: Callable[..., Any]
    kernels: tuple[str, ...]
    samples: tuple[Sample, ...]
    saved_bytes: Callable[[Call, Tensor], int]
    mistakes: tuple[Sample, ...]
    layers: tuple[Layer, ...]
    matrix: Callable[[Input], tuple[Any, ...]] | None
    alone: int = 0
    dtypes: tuple[torch.dtype, ...] = FLOATING

    def sample(self, name: str) -> Sample:
        return next(sample for sample in self.samples if sample.name == name)


def nbytes(t: Tensor) -> int:
    return t.numel() * t.element_size()


# ---- softmax ---------------------------------------------------------------------------------------------------------


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
    Sample("not a tensor", ([1.0, 2.0], 0)),
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
    Sample("not tensors", ("a", "b")),
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
        Sample("not tensors", ("a", "b", "c")),
    ),
    layers=(Layer(fastlayers.FusedScaleAdd(37, None), scaled("of a layer", (5, 37), None), 2),),
    matrix=lambda x: (x, x, Input((x.shape[0], 1))),
)  # fmt: skip

# ---- norms of rows ---------------------------------------------------------------------------------------------------


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
    Sample("not a tensor", ([1.0, 2.0], (2,))),
    Sample("integers", (torch.arange(3), (3,))),
)
ADD_MISTAKES = (
    Sample("shapes that do not broadcast", (Input((2, 3)), Input((4, 3)), (3,))),
    Sample("shape of another length", (Input((2, 3)), Input((2, 3)), (4,))),
    Sample("not tensors", ("a", "b", (3,))),
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
        Sample("not a tensor", ([1.0, 2.0], (2,), Input((2,)))),
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
        Sample("not a tensor", ([1.0, 2.0], Input((2,)), Input((2,)))),
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

# ---- norms over channels ---------------------------------------------------------------------------------------------


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
        Sample("not a tensor", ([1.0, 2.0], 1)),
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
    Sample("not a tensor", ([1.0, 2.0], None, None, None, None, True)),
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

# ---- activations and gates -------------------------------------------------------------------------------------------

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
        Sample("not a tensor", ([1.0, 2.0], None, "gelu")),
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
        mistakes=(Sample("not a tensor", ([1.0, 2.0],)),),
        layers=tuple(Layer(layer, call("layer", (5, 37), kwargs=other), 1) for layer in layers),
        matrix=lambda x: (x,),
    )


GELU = bare(functional.gelu, F.gelu, fastlayers.FusedGELU("tanh"), smooth=True, approximate="tanh")
GELU = replace(GELU, mistakes=(*GELU.mistakes, Sample("approximate", (Input((2, 3)),), {"approximate": "erf"})))
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


GATE_MISTAKES = (*PAIR_MISTAKES[:1], PAIR_MISTAKES[2])
SWIGLU = Op(
    "swiglu",
    functional.swiglu,
    gated("silu"),
    kernels=KERNELS,
    samples=(*pairs(), *broadcasts(refused=KERNELS)),
    saved_bytes=both,
    mistakes=GATE_MISTAKES,
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
    mistakes=(*GATE_MISTAKES, Sample("approximate", (Input((2, 3)), Input((2, 3)), "erf"))),
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
        Sample("not a tensor", ([1.0, 2.0],)),
    ),
    layers=(Layer(fastlayers.FusedGLU(), A_GLU),),
    matrix=lambda x: (replace(x, shape=(*x.shape[:-1], x.shape[-1] + x.shape[-1] % 2)),),
)


# ---- rotary embedding ------------------------------------------------------------------------------------------------


def rotate_half(x: Tensor) -> Tensor:
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def rotate_every_two(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, *, rotary_dim: Any = None,
    dtype: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if rotary_dim == 2 * cos.shape[-1]:
        cos, sin = (t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1) for t in (cos, sin))

    def rotated(x: Tensor) -> Tensor:
        wide = x if dtype is None or x.dtype == torch.float64 else x.float()
        turning, rest = wide[..., : cos.shape[-1]], wide[..., cos.shape[-1] :]
        turning = turning * cos + (rotate_every_two if interleaved else rotate_half)(turning) * sin
        out = torch.cat((turning, rest), -1) if rest.shape[-1] else turning
        return out if dtype is None else out.to(dtype)

    return rotated(q), rotated(k)


def heads_last_in_memory(t: Tensor) -> Tensor:
    """(batch, heads, seq, dim) as a projection gives it: the transposed view of (batch, seq, heads, dim)."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def packed(t: Tensor) -> Tensor:
    """The same for a projection that gives queries, keys and values in one tensor."""
    return torch.stack((t, t, t), 1).transpose(2, 3).contiguous().transpose(2, 3)[:, 1]


def rotations() -> tuple[Sample, ...]:
    """Calls of rotary. The tables have two independent factors for each pair."""

    def sample(
        name: str, q: tuple[int, ...] = (2, 3, 5, 8), *, kv_heads: int | None = None, layout: Any = contiguous,
        values: Any = normal, tables: Any = ..., k: Any = None, interleaved: bool = False, kwargs: Any = None,
        **options: Any,
    ) -> Sample:  # fmt: skip
        of_k = q if kv_heads is None else (q[0], kv_heads, *q[2:])
        table = (
            Input(q[-2:], grad=False)
            if tables is ...
            else tables
            if isinstance(tables, Input)
            else Input(tables, grad=False)
        )
        args = (Input(q, layout, values), k or Input(of_k, layout, values), table, table)
        return Sample(name, (*args, True) if interleaved else args, kwargs or {}, **options)

    both = [(False, ""), (True, ", interleaved")]
    of_interleaved = ("heads last in memory", "row slice", "misaligned")
    layouts: dict[str, Any] = {
        "heads last in memory": heads_last_in_memory,
        "packed": packed,
        "row slice": row_slice,
        "strided": strided,
        "misaligned": misaligned,
        "expanded batch": expanded(0),
        "expanded heads": expanded(1),
        "expanded along the row": expanded(3),
        "one value": one_value,
    }
    return (
        sample("heads first", smooth=True),
        sample("neighbours", smooth=True, interleaved=True),
        sample("half tables", tables=(5, 4), kwargs={"rotary_dim": 8}, smooth=True),
        sample("half tables, neighbours", tables=(5, 4), kwargs={"rotary_dim": 8}, smooth=True, interleaved=True),
        sample("part", tables=(5, 4), smooth=True),
        sample("part, neighbours", tables=(5, 4), smooth=True, interleaved=True),
        *(
            made
            for interleaved, suffix in both
            for made in (
                *(sample(f"head_dim {n}{suffix}", (2, 3, 5, n), interleaved=interleaved)
                  for n in (2, 6, 16, 20, 72, 128, 1030)),
                *(sample(f"{part} of {n}{suffix}", (2, 3, 5, n), tables=(5, part), interleaved=interleaved)
                  for part, n in ((4, 7), (16, 17), (16, 24), (20, 80), (32, 1500))),
                sample(f"half tables of a part{suffix}", (2, 3, 5, 48), tables=(5, 16), interleaved=interleaved,
                       kwargs={"rotary_dim": 32}),
                *(sample(f"{h} heads, {kv} of keys{suffix}", (2, h, 5, 32), kv_heads=kv, interleaved=interleaved)
                  for h, kv in ((8, 2), (9, 3), (1, 4))),
                *(sample(f"{name}{suffix}", (2, 6, 5, 32), kv_heads=None if name.startswith("expanded") else 2,
                         layout=layout, interleaved=interleaved)
                  for name, layout in layouts.items() if not interleaved or name in of_interleaved),
                sample(f"heads last{suffix}", (2, 5, 6, 32), tables=(5, 1, 32), interleaved=interleaved,
                       k=Input((2, 5, 2, 32))),
                sample(f"several blocks{suffix}", (2, 8, 301, 64), kv_heads=2, interleaved=interleaved),
                sample(f"float32 tables{suffix}", (2, 6, 5, 32), interleaved=interleaved, dtypes=HALF,
                       tables=Input((5, 32), grad=False, dtype=torch.float32)),
                sample(f"float32 tables of a part{suffix}", (2, 6, 5, 32), interleaved=interleaved, dtypes=HALF,
                       tables=Input((5, 20), grad=False, dtype=torch.float32)),
                *(sample(f"float32 tables, to {str(to)[6:]}{suffix}", (2, 6, 5, 32), interleaved=interleaved,
                         tables=Input((5, 32), grad=False, dtype=torch.float32), dtypes=(to,), kwargs={"dtype": to})
                  for to in HALF),
                sample(f"NaN{suffix}", (2, 6, 5, 32), values=with_nan, interleaved=interleaved),
                sample(f"infinities{suffix}", (2, 6, 5, 32), values=with_infinities, tables=(5, 24),
                       interleaved=interleaved),
            )
        ),
        sample("to bfloat16", kwargs={"dtype": torch.bfloat16}, dtypes=(torch.bfloat16,)),
        sample("tables of a batch", (2, 6, 5, 32), kv_heads=2, tables=(2, 1, 5, 32), layout=heads_last_in_memory),
        sample("tables of a batch, heads last", (2, 5, 6, 32), tables=(2, 5, 1, 32)),
        sample("tables of a batch of one", (2, 6, 5, 32), tables=(1, 5, 32)),
        sample("sequence first", (5, 2, 6, 32), tables=(5, 1, 1, 32),
               layout=lambda t: t.transpose(0, 1).contiguous().transpose(0, 1)),
        sample("tables that differ from head to head", (2, 6, 5, 32), tables=(6, 5, 32)),
        sample("tables expanded over the heads", (2, 3, 5, 16), tables=Input((2, 3, 5, 16), expanded(1), grad=False)),
        sample("tables expanded over the sequence", (2, 3, 5, 16), tables=Input((5, 16), expanded(0), grad=False)),
        sample("one table for all", (2, 3, 5, 16), tables=(16,)),
        *(sample(f"{name} tables", (2, 3, 5, 16), tables=Input((5, 16), layout, grad=False))
          for name, layout in (("strided", strided), ("misaligned", misaligned), ("sliced", row_slice),
                               ("transposed", transposed), ("one value", one_value))),
        sample("three dims", (5, 6, 16), tables=(5, 1, 16), k=Input((5, 2, 16))),
        sample("two dims", (6, 16)),
        sample("one dim", (16,), tables=(16,)),
        sample("one token", (2, 8, 1, 64), kv_heads=2),
        sample("keys without gradient", k=Input((2, 3, 5, 8), grad=False)),
        sample("misaligned keys", (2, 3, 5, 16), k=Input((2, 3, 5, 16), misaligned)),
        sample("keys with heads last in memory", (2, 3, 5, 16), k=Input((2, 3, 5, 16), heads_last_in_memory)),
        # What follows no kernel takes.
        sample("empty", (0, 3, 5, 8), refused=KERNELS),
        sample("no tokens", (2, 3, 0, 8), refused=KERNELS),
        sample("tables with a gradient", tables=Input((5, 8)), refused=KERNELS),
        sample("tables of every head of a batch", tables=(2, 3, 5, 8), refused=KERNELS),
        sample("tables that widen", tables=(4, 1, 1, 5, 8), refused=KERNELS),
        sample("tables of a batch that q has not", (1, 3, 5, 8), tables=(2, 1, 5, 8), refused=KERNELS),
        sample("odd part", tables=(5, 3), refused=KERNELS),
        sample("five dims", (2, 3, 2, 5, 8), refused=KERNELS),
        sample("keys of a longer sequence", tables=(8,), k=Input((2, 4, 7, 8)), refused=KERNELS),
        sample("keys of float32", k=Input((2, 3, 5, 8), dtype=torch.float32), refused=KERNELS, dtypes=HALF),
        sample("float32 tables of float64 heads", tables=Input((5, 8), grad=False, dtype=torch.float32),
               refused=KERNELS, dtypes=(torch.float64,)),
        sample("transposed", layout=transposed, refused=KERNELS),
        sample("channels_last", layout=channels_last, refused=KERNELS),
    )  # fmt: skip


ROTATIONS = rotations()
ROTARY_MISTAKES = (
    Sample("tables of another sequence", (*(Input((2, 3, 5, 8)),) * 2, *(Input((4, 8), grad=False),) * 2)),
    Sample("tables wider than a head", (*(Input((2, 3, 5, 8)),) * 2, *(Input((5, 16), grad=False),) * 2)),
    Sample("sin of another width", (*(Input((2, 3, 5, 8)),) * 2, Input((5, 8)), Input((5, 4)))),
    Sample("no tables", (*(Input((2, 3, 5, 8)),) * 2, None, None)),
)
ROTARY = Op(
    "rotary",
    functional.rotary,
    rotary,
    kernels=KERNELS,
    samples=ROTATIONS,
    saved_bytes=lambda call, out: nbytes(call.args[2]) + nbytes(call.args[3]),
    mistakes=ROTARY_MISTAKES,
    layers=(
        Layer(fastlayers.FusedRotary(), ROTATIONS[0], 4),
        Layer(fastlayers.FusedRotary(interleaved=True), ROTATIONS[1], 4),
        Layer(fastlayers.FusedRotary(rotary_dim=8), ROTATIONS[2], 4),
    ),
    matrix=None,
)


def qk_norm_rotary(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor,
    eps: float | None = 1e-6, interleaved: bool = False, *, casting: str = "torch", **kwargs: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q, k = (rms_norm(x, x.shape[-1:], w, eps, casting=casting) for x, w in ((q, q_weight), (k, k_weight)))
    return rotary(q, k, cos, sin, interleaved, **kwargs)


def normed_rotations() -> tuple[Sample, ...]:
    """Calls with heads before the sequence, or after it as a projection gives them."""

    def sample(
        name: str, q: tuple[int, ...] = (2, 5, 3, 8), *, kv_heads: int | None = None, layout: Any = contiguous,
        table: Any = ..., weight: Any = ..., kwargs: Any = None, **options: Any,
    ) -> Sample:  # fmt: skip
        given = Input((q[-1],)) if weight is ... else weight
        tables = Input((q[1], 1, q[-1]), grad=False) if table is ... else table
        keys = Input((*q[:2], kv_heads or q[2], q[-1]), layout)
        return Sample(name, (Input(q, layout), keys, given, given, tables, tables), kwargs or {}, **options)

    return (
        sample("heads last", smooth=True),
        sample("neighbours", kwargs={"interleaved": True}),
        sample("part", table=Input((5, 1, 4), grad=False)),
        sample("half tables", table=Input((5, 1, 4), grad=False), kwargs={"rotary_dim": 8}),
        sample("no weights", weight=None),
        *(sample(f"head_dim {n}", (2, 5, 4, n), kv_heads=2) for n in (2, 20, 64, 128)),
        sample("many tokens", (2, 300, 4, 64), kv_heads=1),
        sample("float32 weights", (2, 5, 4, 32), weight=Input((32,), dtype=torch.float32), dtypes=HALF),
        sample("gemma", (2, 5, 4, 32), kwargs={"casting": "gemma"}),
        sample("llama", (2, 5, 4, 32), kwargs={"casting": "llama"}),
        sample("heads first in shape", (2, 3, 5, 8), layout=heads_last_in_memory,
               table=Input((5, 8), grad=False)),
        sample("row slice", (2, 5, 4, 32), layout=row_slice),
        sample("misaligned", (2, 5, 4, 32), layout=misaligned),
        sample("expanded batch", (2, 5, 4, 32), layout=expanded(0)),
    )  # fmt: skip


NORMED_ROTATIONS = normed_rotations()
QK_NORM_ROTARY = Op(
    "qk_norm_rotary",
    functional.qk_norm_rotary,
    qk_norm_rotary,
    kernels=KERNELS,
    samples=NORMED_ROTATIONS,
    saved_bytes=lambda call, out: (
        sum(map(nbytes, call.tensors())) + sum(row_statistics(call, x.shape, 1, 1) for x in call.args[:2])
    ),
    mistakes=(
        Sample("tables of another sequence",
               (*(Input((2, 5, 3, 8)),) * 2, None, None, *(Input((4, 1, 8), grad=False),) * 2)),
        Sample("weight of another size",
               (*(Input((2, 5, 3, 8)),) * 2, Input((4,)), None, *(Input((5, 1, 8), grad=False),) * 2)),
    ),
    layers=(Layer(fastlayers.FusedQKNormRotary(8), NORMED_ROTATIONS[4], (0, 1, 4, 5)),),  # without weights
    matrix=None,
)  # fmt: skip

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
        Sample("not a tensor", ([[1.0, 2.0]], torch.tensor([0]))),
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
        Sample("not a tensor", ([1.0, 2.0], Input((2,)))),
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


DIVERGENCE_MISTAKES = (
    Sample("classes", (Input((2, 3)), Input((2, 4)))),
    Sample("not a tensor", ([1.0, 2.0], Input((2,)))),
)
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

OPS = (
    SOFTMAX, LOG_SOFTMAX, RELU_ADD, ADD_RELU, MUL, SQUEEZE_EXCITE, MAX_POOL2D, DROPOUT_ADD, SCALE_ADD,
    LAYER_NORM, RMS_NORM, ADD_LAYER_NORM, ADD_RMS_NORM, ADA_LAYER_NORM, GLOBAL_RESPONSE_NORM,
    CHANNEL_LAYER_NORM,
    GROUP_NORM, INSTANCE_NORM, BATCH_NORM, BATCH_NORM_EVAL,
    BIAS_ACT, *BARE, SWIGLU, GEGLU, REGLU, LINEAR, GATED_LINEAR, GLU, ROTARY, QK_NORM_ROTARY,
    CROSS_ENTROPY, LINEAR_CROSS_ENTROPY, LINEAR_LOG_PROB,
    KL_DIV, KL_DIV_LOGITS, JS_DIV_LOGITS, LINEAR_DIVERGENCE,
)  # fmt: skip
LAYERS = [(op, layer) for op in OPS for layer in op.layers]

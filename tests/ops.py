"""The table of fused ops: one row an op. tests/contract derives every test from it, so a new op joins by adding a row.

A row names the fused function and the torch composition that it stands for, and describes calls of it: their tensors by
shape, layout and values, so that each can be made on any device and in any dtype.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


def constant(value: float) -> Callable[[tuple[int, ...], torch.Generator], Tensor]:
    return lambda shape, _: torch.full(shape, value)


def keep_first(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.arange(shape[-1]).expand(shape) < 0.8 * shape[-1]


def keep_most(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A boolean mask with about a third False, and its last row entirely."""
    keep = torch.rand(shape, generator=generator) > 0.3
    keep[..., 0] = True
    keep.view(-1, shape[-1])[-1] = False
    return keep


def minus_infinity_mask(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """An additive mask as attention has it; its last row is fully masked."""
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


def row_slice(t: Tensor) -> Tensor:
    """Rows of a wider tensor: contiguous each, and 16 elements further apart than they are long."""
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
    """A tensor argument. A floating one wants its gradient unless ``grad`` is False; ``dtype`` None is the test's."""

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
        """The call with the values of one draw: always the same ones."""
        seed = zlib.crc32(self.name.encode()) + 1000 * draw

        def made(position: int, value: Any) -> Any:
            return value.make(device, dtype, seed + position) if isinstance(value, Input) else value

        args = tuple(made(i, value) for i, value in enumerate(self.args))
        return Call(args, {name: made(100 + i, value) for i, (name, value) in enumerate(self.kwargs.items())})


@dataclass(frozen=True)
class Call:
    """Arguments of one call, made."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def map(self, function: Callable[[Tensor], Tensor]) -> Call:
        """The same call with ``function`` of every tensor; a floating one keeps its wish for a gradient."""

        def mapped(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return function(value.detach()).requires_grad_(value.requires_grad)

        return Call(tuple(map(mapped, self.args)), {name: mapped(value) for name, value in self.kwargs.items()})

    def to_float64(self) -> Call:
        exact = self.map(lambda t: t.double() if t.is_floating_point() else t)
        kwargs = {
            name: torch.float64 if isinstance(value, torch.dtype) else value for name, value in exact.kwargs.items()
        }
        return Call(exact.args, kwargs)

    def tensors(self) -> list[Tensor]:
        return [value for value in (*self.args, *self.kwargs.values()) if isinstance(value, Tensor)]

    def leaves(self) -> list[Tensor]:
        return [t for t in self.tensors() if t.requires_grad]

    def function_of_leaves(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` of this call as a function of the tensors that want gradients, in order."""

        def call(*leaves: Tensor) -> Any:
            rest = iter(leaves)

            def taken(value: Any) -> Any:
                return next(rest) if isinstance(value, Tensor) and value.requires_grad else value

            args = [taken(value) for value in self.args]
            return function(*args, **{name: taken(value) for name, value in self.kwargs.items()})

        return call


@dataclass(frozen=True)
class Op:
    """A row: an op, the torch composition that it stands for, and calls of both.

    Attributes:
        kernels: backends that have kernels of it.
        samples: calls; the first is the plainest one, for the tests that need only one.
        saved_bytes: what the docstring says is kept for backward, from (call, output).
        mistakes: calls for which torch raises; the op must raise the same.
        module: a fused layer that computes it, with the indices of ``args`` that its forward takes.
        huge: a call of more than 2^31 elements in which each index of dim 0 stands alone.
    """

    name: str
    fused: Callable[..., Any]
    reference: Callable[..., Any]
    kernels: tuple[str, ...]
    samples: tuple[Sample, ...]
    saved_bytes: Callable[[Call, Tensor], int]
    mistakes: tuple[Sample, ...]
    module: nn.Module
    huge: Sample
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
    Sample("mask over dim 0", (Input((12, 5)), 0), {"mask": mask(12, 5, values=normal)}, refused=("cuda",)),
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
HUGE = (2**16 + 1, 2**15 + 8)  # 2.15e9 elements

SOFTMAX = Op(
    "softmax",
    functional.softmax,
    softmax,
    kernels=("triton", "cuda"),
    samples=SOFTMAX_SAMPLES,
    saved_bytes=softmax_saved,
    mistakes=SOFTMAX_MISTAKES,
    module=fastlayers.FusedSoftmax(-1),
    huge=Sample("huge", (Input(HUGE),)),
)
LOG_SOFTMAX = replace(
    SOFTMAX,
    name="log_softmax",
    fused=functional.log_softmax,
    reference=log_softmax,
    # Minus infinity, the logarithm of what a boolean mask leaves out, is beyond finite differences.
    samples=tuple(replace(s, smooth=s.smooth and not s.name.startswith("boolean")) for s in SOFTMAX_SAMPLES),
    module=fastlayers.FusedLogSoftmax(-1),
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
HUGE_PAIR = Sample("huge", (Input(HUGE), Input(HUGE)))


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
    module=fastlayers.FusedReLUAdd(),
    huge=HUGE_PAIR,
)

ADD_RELU = Op(
    "add_relu",
    functional.add_relu,
    add_relu,
    kernels=ELEMENTWISE,
    samples=(*pairs(), *broadcasts(refused=KERNELS)),
    saved_bytes=bit_of_each,
    mistakes=PAIR_MISTAKES,
    module=fastlayers.FusedAddReLU(),
    huge=HUGE_PAIR,
)

MUL = Op(
    "mul",
    functional.mul,
    torch.mul,
    kernels=ELEMENTWISE,
    samples=(*pairs(), *broadcasts(refused=("cpu",))),
    saved_bytes=both,
    mistakes=PAIR_MISTAKES,
    module=fastlayers.FusedMul(),
    huge=HUGE_PAIR,
)

OPS = (SOFTMAX, LOG_SOFTMAX, RELU_ADD, ADD_RELU, MUL)

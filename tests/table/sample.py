"""What a row of the table consists of: values and layouts of tensors, calls, layers, and the row itself."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

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

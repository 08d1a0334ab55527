"""Operations of torch in a program, where another one gives the same in less time.

- The gradient of a gather along the last dimension is a kernel of csrc instead of a scatter_add of atomics.
- A product of two float32 tensors that are casts of 16-bit ones, as scaled_dot_product_attention without a kernel of
  its own computes it, reads those: the product of two 16-bit numbers is exact in float32, and tensor cores add such
  products up in float32.
- A cast to float32 and back, as between layers of two dtypes, is what was cast.
- A product of a float32 cast of a 16-bit tensor and a thin float32 one, as an adapter's in a model of 16 bits, reads
  what was cast, once. With a dropout between them it reads the mask as well, and what was dropped is not kept.
- A thin product of a matrix that was multiplied by a number, as the gradients of an adapter have it, multiplies by that
  number itself.
- A product with an identity matrix, by which peft multiplies the factors of DoRA, is a copy.
- A convolution with a bias, which torch adds in a kernel of its own, is one without and a sum, which can be fused with
  what follows.
- An activation has a kernel of csrc, which sums the gradient of a bias before it as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastlayers import backends
from fastlayers.kernels.low_rank import thin_product
from fastlayers.ops.activations import ACTIVATIONS
from fastlayers.ops.gather import COLUMNS
from fastlayers.ops.low_rank import BESIDE, LARGEST_RANK, draws_the_same
from fastlayers.ops.reference import LOW_PRECISION
from fastlayers.patching.fusion.fusable import CASTS, FILLED, in_new_memory, is_dense, is_fusable, kernel_name, spelled
from fastlayers.patching.fusion.lowering import LOWERINGS
from fastlayers.patching.program.program import (
    Operation,
    Program,
    Value,
    alive,
    empty_as,
    storage,
)

__all__ = ["factor_of", "specialised"]

#: Products, with those that write float32 from 16-bit operands, which not every torch has.
WIDE = {name: getattr(getattr(torch.ops.aten, name), "dtype", None) for name in ("mm", "bmm")}
MUL = torch.ops.aten.mul.Scalar
ADD = torch.ops.aten.add.Tensor
ADDMM = torch.ops.aten.addmm.default
EMPTY = torch.ops.aten.empty.memory_format
#: Activations by their operation, and which approximation that is given.
ACTS = {("gelu", "none"): "gelu", ("gelu", "tanh"): "gelu_tanh", ("silu", "none"): "silu"}
CONVOLUTION = torch.ops.aten.convolution.default
TO_DTYPE = torch.ops.aten.to.dtype
VIEW = torch.ops.aten.view.default
CLONE = torch.ops.aten.clone.default
#: Bytes of a result to which a kernel of ours adds a bias in less time than torch's, which takes element by element.
LARGE = 2**22
#: Operations that multiply by a number, which a product may do as well.
FACTORS: dict[str, Callable[[float], float]] = {
    **dict.fromkeys(("mul.Scalar", "mul.Tensor"), lambda number: number),
    **dict.fromkeys(("div.Scalar", "div.Tensor"), lambda number: 1 / number),
}


def factor_of(operation: Operation) -> float | None:
    """The number that an operation multiplies a tensor by; None for 0, by which nothing is divided, and for another
    operation, such as a square."""
    factor = FACTORS.get(spelled(operation))
    if factor is None or len(operation.operands) != 1 or isinstance(operation.args[1], Value) or operation.kwargs:
        return None
    return factor(operation.args[1]) if operation.args[1] != 0 else None


def specialised(program: Program) -> Program:
    """The program with such operations. ``values`` gains those that are new, without memory."""
    part = Part(program)
    forward = part.specialised(program.forward)
    backward = alive(part.specialised(program.backward), [name for name in program.wanted if name])
    forward = part.masks_alone(alive(forward, [*program.results, *(n for o in backward for n in o.uses)]), backward)
    return program.settled(forward, backward)


def is_served(t: Tensor) -> bool:
    """Whether csrc has kernels for a tensor. Where it has, torch has products that write float32 from 16 bits."""
    return backends.choose(t.device) == "cuda"


@dataclass(frozen=True)
class Narrow:
    """A 16-bit value by which a float32 one is known: that is larger by a factor.

    Attributes:
        steps: operations that make it.
        mask: of which elements, if the others are 0; a value in the same layout.
    """

    name: str
    factor: float = 1.0
    steps: tuple[Operation, ...] = ()
    mask: str | None = None


class Part:
    """What is known of a program while its operations are replaced."""

    def __init__(self, program: Program) -> None:
        self.program, self.values, self.fake = program, program.values, program.fake
        self.makers, self.written = program.makers, program.writers
        # Others may write to these, which is an error only for what autograd keeps.
        self.given = {storage(self.values[name]) for name in (*program.inputs, *program.results)}
        self.returned = {name for name in (*program.results, *program.wanted) if name}
        #: Of each dtype, the matrix of one element to 0 times which the products of a direction are added.
        self.nothing: dict[torch.dtype, Value] = {}

    def specialised(self, operations: Sequence[Operation]) -> list[Operation]:
        found: list[Operation] = []
        self.nothing.clear()
        for operation in operations:
            name = spelled(operation)
            if name == "scatter_add" and self.is_gradient_of_rows(operation):
                _, _, index, dy = operation.args
                columns = self.values[operation.makes[0]].shape[-1]
                kernel = torch.ops.fastlayers.gather_backward.default
                found.append(replace(operation, function=kernel, args=(dy, index, columns)))
            elif name == "mm" and self.is_identity(operation.args[0].name):
                copied, kwargs = (operation.args[1],), {"memory_format": torch.contiguous_format}
                found.append(replace(operation, function=CLONE, args=copied, kwargs=kwargs))
            elif WIDE.get(name) is not None:
                found += (
                    self.of_narrow(operation) or self.of_thin(operation) or self.of_scaled(operation) or [operation]
                )
            elif name in CASTS:
                found += self.round_trip(operation) or [operation]
            else:
                found += self.without_bias(operation) or [self.activation(operation) or operation]
        return found

    def without_bias(self, operation: Operation) -> list[Operation] | None:
        """A convolution, and the sum of its result and its bias; None for another operation, where torch has a kernel
        for both, and where a sum of its own would gain nothing."""
        under_autocast = kernel_name(operation) == "convolution_autocast"
        if not under_autocast and spelled(operation) != "convolution":
            return None
        (out, *others), (x, weight, bias, *options) = operation.makes, operation.args
        if bias is None or operation.kwargs or not out or not self.gains(out, options[-1]):
            return None
        y = self.values[out]
        steps: list[Operation] = []
        if under_autocast:
            low, low_bias = others[0] or f"{out}_weight", f"{out}_bias"
            steps += [self.cast(weight.name, low, y.dtype), self.cast(bias.name, low_bias, y.dtype)]
            weight, bias = Value(low), Value(low_bias)
            options = [*options[:3], False, [0] * (y.dim() - 2), options[3]]
        sizes = (-1, *(1 for _ in y.shape[2:]))
        product, channels = f"{out}_product", f"{out}_channels"
        with self.fake:
            self.values[product] = empty_as(y)
        self.values[channels] = self.values[bias.name].view(sizes)
        return [
            *steps,
            Operation(CONVOLUTION, (x, weight, None, *options), {}, (product,), single=True, effect=False),
            Operation(VIEW, (bias, sizes), {}, (channels,), single=True, effect=False, view=True),
            Operation(ADD, (Value(product), Value(channels)), {}, (out,), single=True, effect=False),
        ]

    def cast(self, name: str, low: str, dtype: torch.dtype) -> Operation:
        t = self.values[name]
        if low not in self.values:
            with self.fake:
                self.values[low] = empty_as(t, dtype)
        return Operation(TO_DTYPE, (Value(name), dtype), {}, (low,), single=True, effect=False)

    def activation(self, operation: Operation) -> Operation | None:
        """The kernel of an activation or its gradient; None for another operation, where torch's is as fast, and where
        it can be fused with what stands around it."""
        base, _, suffix = spelled(operation).partition("_")
        act = ACTS.get((base, operation.kwargs.get("approximate", "none")))
        if act is None or suffix not in ("", "backward") or len(operation.operands) != len(operation.args):
            return None
        given = [self.values[name] for name in operation.operands]
        like = given[0]
        same = all((t.shape, t.dtype) == (like.shape, like.dtype) and t.is_contiguous() for t in given)
        if not same or not is_served(like) or like.dtype not in LOW_PRECISION or like.nbytes < LARGE:
            return None
        makers = [self.makers.get(self.program.base(name)) for name in operation.operands]
        if self.joins(operation.makes[0]) or any(o is not None and is_fusable(o, self.values) for o in makers):
            return None
        kernels, entry = torch.ops.fastlayers, ACTIVATIONS[act]
        args = (*operation.args, None, entry.code, *entry.defaults)
        if not suffix:
            return replace(operation, function=kernels.bias_act_forward.default, args=args, kwargs={})
        function, makes = kernels.bias_act_backward.default, (*operation.makes, "")
        return replace(operation, function=function, args=(*args, False), kwargs={}, makes=makes, single=False)

    def joins(self, name: str) -> bool:
        """Whether something that reads a value, or a view of it, can be part of a generated kernel."""
        return any(
            name in map(self.program.base, o.uses)
            and (kernel_name(o) in LOWERINGS or is_fusable(o, self.values) or in_new_memory(o) is not None)
            for o in self.program.operations
        )

    def gains(self, name: str, groups: int) -> bool:
        """Whether a convolution's result and its bias are better added by a kernel of their own."""
        y = self.values[name]
        if not is_served(y) or not is_dense(y) or (groups > 1 and y.is_contiguous()):
            return False  # torch convolves each channel with kernels of its own where these are not innermost.
        return y.nbytes >= LARGE or self.joins(name)

    def is_gradient_of_rows(self, operation: Operation) -> bool:
        """Whether a scatter_add adds to zeros, along rows of a length that there is a kernel for."""
        zeros, dim, index, dy = operation.args
        maker, out = self.makers.get(zeros.name), self.values[operation.makes[0]]
        of_index, of_dy = self.values[index.name], self.values[dy.name]
        return (
            is_served(out)
            and maker is not None
            and FILLED.get(spelled(maker)) == 0
            and not self.program.is_written(zeros.name)
            and out.dim() > 0
            and dim % out.dim() == out.dim() - 1
            and out.shape[-1] <= COLUMNS
            and out.shape[:-1] == of_dy.shape[:-1]
            and out.is_floating_point()
            and out.is_contiguous()
            and of_dy.shape == of_index.shape
        )

    def is_identity(self, name: str) -> bool:
        """Whether a value is a square matrix of ones on its diagonal, and zeros."""
        maker = self.makers.get(name)
        return maker is not None and spelled(maker) == "eye" and not self.program.is_written(name)

    def of_narrow(self, operation: Operation) -> list[Operation] | None:
        """A product of casts as that of what was cast; None for another product."""
        (out,) = operation.makes
        like = self.values[out]
        if not is_served(like) or like.dtype is not torch.float32:
            return None
        a, b = (self.narrow(value.name, f"{out}_{side}") for value, side in zip(operation.args, "xy", strict=True))
        if a is None or b is None or self.values[a.name].dtype is not self.values[b.name].dtype:
            return None
        if a.mask is not None or b.mask is not None:
            return None
        factor = a.factor * b.factor
        product = out if factor == 1 else f"{out}_product"
        self.values[product] = like
        args, function = (Value(a.name), Value(b.name), torch.float32), WIDE[spelled(operation)]
        assert function is not None
        steps = [*a.steps, *b.steps, replace(operation, function=function, args=args, makes=(product,))]
        if factor != 1:
            steps.append(replace(operation, function=MUL, args=(Value(product), factor)))
        return steps

    def round_trip(self, operation: Operation) -> list[Operation] | None:
        """A cast to float32 and back as what was cast; None for another cast."""
        (out,), (name,) = operation.makes, operation.operands
        y = self.values[out]
        if self.values[name].dtype is not torch.float32 or y.dtype not in LOW_PRECISION or out in self.returned:
            return None
        found = self.narrow(name, f"{out}_narrow")
        if found is None or found.factor != 1 or found.mask is not None or storage(y) in self.written:
            return None
        low = self.values[found.name]
        if (low.dtype, low.stride()) != (y.dtype, y.stride()):
            return None
        self.values[out] = low
        same = Operation(VIEW, (Value(found.name), tuple(y.shape)), {}, (out,), single=True, effect=False, view=True)
        return [*found.steps, same]

    def of_thin(self, operation: Operation) -> list[Operation] | None:
        """A product of a cast and a thin tensor as that of what was cast; None for another product. One of 16 bits is
        such a product if there is a dropout in float32 between them, as under autocast."""
        (out,) = operation.makes
        like = self.values[out]
        low = like.dtype in LOW_PRECISION
        if spelled(operation) != "mm" or not (low or like.dtype is torch.float32):
            return None
        if not backends.generates_kernels(like.device):
            return None
        for side, value in enumerate(operation.args):
            thin = self.values[operation.args[1 - side].name]
            # What autograd keeps of an input is its cast. Here it is the input: a write to it before the backward is
            # the error that it is with an adapter of 16 bits.
            if thin.dtype is not like.dtype or like.shape[side - 1] > LARGEST_RANK:
                continue
            found = self.narrow(value.name, f"{out}_narrow", inputs=True)
            if found is None or (low and found.mask is None) or 1 not in self.values[found.name].stride():
                continue
            args: list[Any] = [*operation.args]
            masks: list[Value | None] = [None, None]
            args[side], masks[side] = Value(found.name), None if found.mask is None else Value(found.mask)
            product = replace(operation, function=thin_product, args=(*args, found.factor, *masks), kwargs={})
            return [*found.steps, product]
        return None

    def of_scaled(self, operation: Operation) -> list[Operation] | None:
        """A thin product of 16 bits of a multiple of a matrix as a multiple of the matrix's; None for another one."""
        (out,) = operation.makes
        like = self.values[out]
        if spelled(operation) != "mm" or like.dtype not in LOW_PRECISION or not backends.generates_kernels(like.device):
            return None
        for side, value in enumerate(operation.args):
            found = self.scaled(value.name, f"{out}_scaled") if like.shape[side - 1] <= LARGEST_RANK else None
            if found is None:
                continue
            factors = [*operation.args]
            factors[side] = Value(found.name)
            if found.factor == 1:
                return [*found.steps, replace(operation, args=tuple(factors))]
            steps = [*found.steps]
            if like.dtype not in self.nothing:
                self.nothing[like.dtype] = Value(f"{out}_nothing")
                steps.append(self.empty(f"{out}_nothing", (1, 1), like))
            args, kwargs = (self.nothing[like.dtype], *factors), {"beta": 0, "alpha": found.factor}
            return [*steps, replace(operation, function=ADDMM, args=args, kwargs=kwargs)]
        return None

    def scaled(self, name: str, new: str) -> Narrow | None:
        """What a value is a multiple of, in its dtype and layout, with names that begin with ``new``."""
        maker, t = self.makers.get(name), self.values[name]
        if maker is None or len(maker.operands) != 1 or storage(t) in self.written:
            return None
        (source,) = maker.operands
        if maker.view:
            inner = self.scaled(source, f"{new}_")
            return inner and Narrow(new, inner.factor, (*inner.steps, self.viewed(maker, inner.name, new)))
        known, factor = self.values[source], factor_of(maker)
        # An input may be written to before the backward: see of_thin.
        apart = storage(known) not in self.given and storage(known) not in self.written
        same = (known.dtype, known.shape, known.stride()) == (t.dtype, t.shape, t.stride())
        return Narrow(source, factor) if factor is not None and apart and same else None

    def masks_alone(self, forward: Sequence[Operation], backward: Sequence[Operation]) -> list[Operation]:
        """The operations of the forward, where a dropout of which the mask alone is read is one of 16 bits, if torch
        draws the same numbers for that."""
        read = self.returned.union(*(operation.uses for operation in (*forward, *backward)))
        found: list[Operation] = []
        for operation in forward:
            steps = None
            if spelled(operation) == "native_dropout" and operation.makes[0] not in read:
                steps = self.mask_alone(operation)
            found += steps or [operation]
        return found

    def mask_alone(self, dropout: Operation) -> list[Operation] | None:
        out, mask = dropout.makes
        low, t = self.narrow(out, f"{out}_narrow", inputs=True), self.values[mask]
        if low is None or not draws_the_same(t.device):
            return None
        memory, like = f"{mask}_memory", f"{mask}_like"
        empty = self.empty(memory, (t.numel() + BESIDE,), self.values[low.name])
        with self.fake:
            self.values[like] = self.values[memory].as_strided(t.shape, t.stride(), BESIDE)
        view = (Value(memory), tuple(t.shape), t.stride(), BESIDE)
        return [
            empty,
            Operation(torch.ops.aten.as_strided.default, view, {}, (like,), single=True, effect=False, view=True),
            replace(dropout, args=(Value(like), *dropout.args[1:]), makes=("", mask)),
        ]

    def empty(self, name: str, shape: tuple[int, ...], like: Tensor) -> Operation:
        """Memory of that name, in the dtype of another value and on its device."""
        kwargs: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
        with self.fake:
            self.values[name] = torch.empty(shape, **kwargs)
        return Operation(EMPTY, ([*shape],), kwargs, (name,), single=True, effect=False)

    def narrow(self, name: str, new: str, inputs: bool = False) -> Narrow | None:
        """What a value is a cast of, in its layout, with names that begin with ``new``: a float32 one, or one that is
        rounded after a dropout.

        Args:
            inputs: whether that may be an input or a result of the region.
        """
        maker, wide = self.makers.get(name), self.values[name]
        if maker is None or len(maker.uses) != 1 or storage(wide) in self.written:
            return None
        kind, (source,) = spelled(maker), maker.uses
        known = self.values[source]
        same = known.stride() == wide.stride()
        if kind in CASTS and wide.dtype is torch.float32:
            safe = storage(known) not in self.written and (inputs or storage(known) not in self.given)
            return Narrow(source) if safe and same and known.dtype in LOW_PRECISION else None
        reads = maker.view or kind in ("clone", "native_dropout") or kind in FACTORS or kind in CASTS
        inner = self.narrow(source, f"{new}_", inputs) if reads else None
        if inner is None:
            return None
        low = self.values[inner.name]
        if kind in CASTS:
            return inner if same and inner.mask is not None and low.dtype is wide.dtype else None
        if kind in FACTORS:
            factor = factor_of(maker)
            same &= known.dtype is wide.dtype
            return replace(inner, factor=inner.factor * factor) if factor is not None and same else None
        if kind == "native_dropout":
            return self.dropped(maker, name, inner)
        if maker.view:
            steps, mask = [self.viewed(maker, inner.name, new)], inner.mask
            if mask is not None:
                steps.append(self.viewed(maker, mask, f"{new}_mask"))
                mask = f"{new}_mask"
            return Narrow(new, inner.factor, (*inner.steps, *steps), mask)
        if inner.mask is not None:
            return None
        with self.fake:
            self.values[new] = empty_as(wide, low.dtype)
        step = replace(maker, args=(Value(inner.name), *maker.args[1:]), makes=(new,))
        return replace(inner, name=new, steps=(*inner.steps, step))

    def dropped(self, dropout: Operation, name: str, inner: Narrow) -> Narrow | None:
        """What is known of the result of a dropout by what is known of its argument."""
        _, p, training = dropout.args
        out, mask = dropout.makes
        if name != out or not mask or inner.mask is not None or not training or not 0 < p < 1:
            return None
        contiguous = all(self.values[n].is_contiguous() for n in (inner.name, out, mask))
        usable = contiguous and not self.program.is_written(mask)
        return replace(inner, factor=inner.factor / (1 - p), mask=mask) if usable else None

    def viewed(self, view: Operation, name: str, new: str) -> Operation:
        """A view of another value in the same layout as the one that is viewed."""
        t, known, like = self.values[name], self.values[view.args[0].name], self.values[view.makes[0]]
        shift = t.storage_offset() - known.storage_offset()
        self.values[new] = t.as_strided(like.shape, like.stride(), like.storage_offset() + shift)
        args = (Value(name), *view.args[1:])
        if spelled(view) == "as_strided":  # Its offset is one in the memory of what it views.
            args = (*args[:3], args[3] + shift)
        return replace(view, args=args, makes=(new,))

"""Operations of torch in a program, where another one gives the same in less time.

- The gradient of a gather along the last dimension is a kernel of csrc instead of a scatter_add of atomics.
- A product of two float32 tensors that are casts of 16-bit ones, as scaled_dot_product_attention without a kernel of
  its own computes it, reads those: the product of two 16-bit numbers is exact in float32, and tensor cores add such
  products up in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fastlayers import backends
from fastlayers.ops.gather import COLUMNS
from fastlayers.patching.rewrite.fusable import CASTS, FILLED, spelled, written_by
from fastlayers.patching.rewrite.tape import Operation, Program, Value, alive, keeping, storage

__all__ = ["specialised"]

LOW_PRECISION = (torch.float16, torch.bfloat16)
#: Products, with those that write float32 from 16-bit operands, which not every torch has.
WIDE = {name: getattr(getattr(torch.ops.aten, name), "dtype", None) for name in ("mm", "bmm")}
MUL = torch.ops.aten.mul.Scalar
#: Operations that multiply by a number, which a product may do as well.
FACTORS: dict[str, Callable[[float], float]] = {
    **dict.fromkeys(("mul.Scalar", "mul.Tensor"), lambda number: number),
    **dict.fromkeys(("div.Scalar", "div.Tensor"), lambda number: 1 / number),
}


def specialised(program: Program, values: dict[str, Tensor], fake: FakeTensorMode) -> Program:
    """The program with such operations. ``values`` gains those that are new, without memory."""
    part = Part(program, values, fake)
    forward = part.specialised(program.forward)
    backward = alive(part.specialised(program.backward), [name for name in program.wanted if name])
    program = keeping(replace(program, backward=backward))
    return replace(program, forward=alive(forward, [*program.results, *program.kept]))


def is_served(t: Tensor) -> bool:
    """Whether csrc has kernels for a tensor. Where it has, torch has products that write float32 from 16 bits."""
    return backends.choose(t.device) == "cuda"


@dataclass(frozen=True)
class Narrow:
    """A 16-bit value by which a float32 one is known: that is larger by a factor.

    Attributes:
        steps: operations that make it.
    """

    name: str
    factor: float = 1.0
    steps: tuple[Operation, ...] = ()


class Part:
    """What is known of a program while its operations are replaced."""

    def __init__(self, program: Program, values: dict[str, Tensor], fake: FakeTensorMode) -> None:
        self.values, self.fake = values, fake
        operations = (*program.forward, *program.backward)
        self.makers = {name: operation for operation in operations for name in operation.makes if name}
        self.written = written_by(operations, values)
        # Others may write to these, which is an error only for what autograd keeps.
        self.given = {storage(values[name]) for name in (*program.inputs, *program.results)}

    def specialised(self, operations: Sequence[Operation]) -> list[Operation]:
        found: list[Operation] = []
        for operation in operations:
            name = spelled(operation)
            if name == "scatter_add" and self.is_gradient_of_rows(operation):
                _, _, index, dy = operation.args
                columns = self.values[operation.makes[0]].shape[-1]
                kernel = torch.ops.fastlayers.gather_backward.default
                found.append(replace(operation, function=kernel, args=(dy, index, columns)))
            else:
                found += (self.of_narrow(operation) if WIDE.get(name) is not None else None) or [operation]
        return found

    def is_gradient_of_rows(self, operation: Operation) -> bool:
        """Whether a scatter_add adds to zeros, along rows of a length that there is a kernel for."""
        zeros, dim, index, dy = operation.args
        maker, out = self.makers.get(zeros.name), self.values[operation.makes[0]]
        of_index, of_dy = self.values[index.name], self.values[dy.name]
        return (
            is_served(out)
            and maker is not None
            and FILLED.get(spelled(maker)) == 0
            and storage(self.values[zeros.name]) not in self.written
            and out.dim() > 0
            and dim % out.dim() == out.dim() - 1
            and out.shape[-1] <= COLUMNS
            and out.shape[:-1] == of_dy.shape[:-1]
            and out.is_floating_point()
            and out.is_contiguous()
            and of_dy.shape == of_index.shape
        )

    def of_narrow(self, operation: Operation) -> list[Operation] | None:
        """A product of casts as that of what was cast; None for another product."""
        (out,) = operation.makes
        like = self.values[out]
        if not is_served(like) or like.dtype is not torch.float32:
            return None
        a, b = (self.narrow(value.name, f"{out}_{side}") for value, side in zip(operation.args, "xy", strict=True))
        if a is None or b is None or self.values[a.name].dtype is not self.values[b.name].dtype:
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

    def narrow(self, name: str, new: str) -> Narrow | None:
        """What a float32 value is a cast of, in its layout, with names that begin with ``new``."""
        maker, wide = self.makers.get(name), self.values[name]
        if maker is None or len(maker.uses) != 1 or storage(wide) in self.written:
            return None
        kind, (source,) = spelled(maker), maker.uses
        known = self.values[source]
        if kind in CASTS:
            safe = storage(known) not in self.written and storage(known) not in self.given
            same = known.dtype in LOW_PRECISION and known.stride() == wide.stride()
            return Narrow(source) if safe and same else None
        inner = self.narrow(source, f"{new}_") if maker.view or kind == "clone" or kind in FACTORS else None
        if inner is None:
            return None
        if kind in FACTORS:
            number = maker.args[1]
            same = number != 0 and known.stride() == wide.stride() and known.dtype is wide.dtype
            return replace(inner, factor=inner.factor * FACTORS[kind](number)) if same else None
        low, args = self.values[inner.name], (Value(inner.name), *maker.args[1:])
        shift = low.storage_offset() - known.storage_offset()
        if maker.view:
            self.values[new] = low.as_strided(wide.shape, wide.stride(), wide.storage_offset() + shift)
        else:
            with self.fake:
                self.values[new] = torch.empty_strided(wide.shape, wide.stride(), dtype=low.dtype, device=low.device)
        if kind == "as_strided":  # Its offset is one in the memory of what it views.
            args = (*args[:3], args[3] + shift)
        step = replace(maker, args=args, makes=(new,))
        return replace(inner, name=new, steps=(*inner.steps, step))

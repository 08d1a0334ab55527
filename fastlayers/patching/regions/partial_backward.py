"""The backward of a program for calls in which some of the results get no gradient."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from fastlayers.patching.program.program import Operation, Program, Value, alive, keeping, overwritten, storage

__all__ = ["Geometry", "geometries", "without_gradients"]

aten = torch.ops.aten


class Geometry(NamedTuple):
    """What a value of a program is like.

    Attributes:
        memory: tells the memory that it is in from that of other values.
    """

    memory: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def made(self, name: str, fill: OpOverload, *source: Value) -> list[Operation]:
        """Operations that make such a value, of zeros or a copy of another one."""
        options = {"dtype": self.dtype, "device": self.device}
        empty = Operation(aten.empty_strided.default, (self.shape, self.strides), options, (name,), True, False)
        return [empty, Operation(fill, (Value(name), *source), {}, ("",), True, True)]


def geometries(program: Program, values: Mapping[str, Tensor]) -> dict[str, Geometry]:
    """Those of all values in the backward of a program. ``values`` are the ones of its tape."""
    names = {name for o in program.backward for name in (*o.uses, *o.makes)} | {*program.grads}
    names |= {name for name in program.wanted if name is not None}
    found = {name: values[name] for name in names if name}
    return {name: Geometry(storage(t), tuple(t.shape), t.stride(), t.dtype, t.device) for name, t in found.items()}


def without_gradients(program: Program, missing: Collection[str], geometry: Mapping[str, Geometry]) -> Program | None:
    """The program with a backward that is not given these gradients; None if there is none of the recorded operations.

    What depends on missing gradients alone is left out, and so are gradients of inputs, as autograd leaves them out:
    zeros would let weights decay, and 0 times infinity is NaN. Where an operation has other gradients too, a missing
    one is zero. Of a sum only the other term is left.
    """
    # For memory that depends on gradients: whether any of them is there.
    there = {geometry[name].memory: name not in missing for name in program.grads}
    backward: list[Operation] = []
    for operation in program.backward:
        dependent = [name for name in operation.operands if geometry[name].memory in there]
        gone = [name for name in dependent if not there[geometry[name].memory]]
        written = overwritten(operation)
        changed = {geometry[name].memory for name in (*filter(None, operation.makes), *written)}
        if dependent and len(gone) == len(dependent):
            for memory in changed:
                there.setdefault(memory, False)
            continue
        if gone:
            terms = terms_of(operation, geometry)
            if terms is not None:
                (left,) = set(terms) - set(gone)
                target = terms[0] if written else operation.makes[0]
                if left != target:
                    backward += geometry[target].made(target, aten.copy_.default, Value(left))
                there[geometry[target].memory] = True
                continue
            if operation.effect:
                return None
            for name in dict.fromkeys(gone):
                backward += geometry[name].made(name, aten.zero_.default)
                there[geometry[name].memory] = True
        if dependent:
            there |= dict.fromkeys(changed, True)
        backward.append(operation)
    wanted = tuple(
        None if name is None or not there.get(geometry[name].memory, True) else name for name in program.wanted
    )
    without = replace(
        program,
        forward=[],
        results=(),
        grads=tuple(name for name in program.grads if name not in missing),
        backward=alive(backward, [name for name in wanted if name is not None]),
        wanted=wanted,
    )
    return keeping(without)


def terms_of(operation: Operation, geometry: Mapping[str, Geometry]) -> tuple[str, str] | None:
    """The two terms of a sum of gradients of one shape; None for another operation."""
    if operation.function not in (aten.add.Tensor, aten.add_.Tensor) or operation.kwargs or len(operation.args) != 2:
        return None
    a, b = operation.args
    if not isinstance(a, Value) or not isinstance(b, Value) or a.name == b.name:
        return None
    first, second = geometry[a.name], geometry[b.name]
    same = (first.shape, first.dtype) == (second.shape, second.dtype) and first.memory != second.memory
    return (a.name, b.name) if same else None

"""Native regions: what a Tape records, given to region.cpp instead of written as Python source."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from fastlayers.patching.reasons import Reason, Refusal
from fastlayers.patching.rewrite import regions, tape
from fastlayers.patching.rewrite.tape import Compiled, Tape

LIBRARY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "region.so")
torch.ops.load_library(LIBRARY)
NativeRegion = torch.classes.fastlayers_region.Region

aten = torch.ops.aten
#: What a Tape records as a function of Python, as an operation.
OPERATIONS = {
    torch.Tensor.to: aten._to_copy.default, torch.Tensor.view: aten.view.default, torch.as_strided: aten.as_strided.default,
}  # fmt: skip
CONSTANT, REGISTER, LIST, DEFAULT = range(4)
#: Numbers of values of torch that have no type of their own below Python.
NUMBERS = {
    torch.contiguous_format: 0, torch.preserve_format: 1, torch.channels_last: 2, torch.channels_last_3d: 3,
    torch.strided: 0,
}  # fmt: skip


class Source(str):
    """The arguments of a call as source, and as described to region.cpp."""

    args: list[Any]
    kwargs: dict[str, Any]


class NativeTape(Tape):
    def arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[str, frozenset[str]]:
        text, uses = super().arguments(args, kwargs)
        source = Source(text)
        source.args = [self.described(arg) for arg in args]
        source.kwargs = {name: self.described(arg) for name, arg in kwargs.items()}
        return source, uses

    def described(self, value: Any) -> tuple[int, Any]:
        if isinstance(value, Tensor):
            return REGISTER, [self.name(value)]
        if isinstance(value, list | tuple):
            if any(isinstance(t, Tensor) for t in value):
                return LIST, [None if t is None else self.name(t) for t in value]
            return CONSTANT, tuple(value)
        return CONSTANT, NUMBERS.get(value, value) if isinstance(value, torch.memory_format | torch.layout) else value

    def compile(self, split: int, results: Sequence[str], grads: Sequence[str], wanted: Sequence[str | None]) -> Compiled:
        compiled = super().compile(split, results, grads, wanted)
        native = NativeRegion()
        registers: dict[str, int] = {}

        def register(name: str | None) -> int:
            return -1 if not name else registers.setdefault(name, len(registers))

        inputs = [register(name) for name in self.inputs]
        for number, step in enumerate(self.operations):
            function = OPERATIONS.get(step.function, step.function)
            if not isinstance(function, OpOverload):
                raise Refusal(Reason.UNKNOWN_CALL, f"{function} is no operation of torch")
            source, arguments = step.call, []
            assert isinstance(source, Source)
            args, kwargs = list(source.args), dict(source.kwargs)
            if function is aten._to_copy.default and len(args) == 2:
                kwargs["dtype"] = args.pop()
            if step.function is torch.Tensor.view and len(args) != 2:
                raise Refusal(Reason.UNKNOWN_CALL, "a view")
            for i, argument in enumerate(function._schema.arguments):
                kind, value = args[i] if i < len(args) else kwargs.pop(argument.name, (DEFAULT, None))
                if kind in (REGISTER, LIST):
                    value = [register(name) for name in value]
                arguments.append((kind, value))
            assert not kwargs, kwargs
            unpack = not step.single and len(function._schema.returns) == 1
            native.add(
                number >= split, function._schema.name, function._schema.overload_name, tuple(arguments),
                [register(name) for name in step.makes], unpack, step.effect,
            )  # fmt: skip
        owners = {tape.storage(self.value(name)): name for name in (*results, *self.inputs)}
        shared = [(name, owners.get(tape.storage(self.value(name)), name)) for name in compiled.kept]
        shared = [(name, owner) for name, owner in shared if name != owner]
        made = NativeCompiled(**vars(compiled))
        made.native = native
        made.description = (
            [register(name) for name in results], [register(name) for name in grads],
            [register(name) for name in compiled.kept], [register(name) for name in wanted],
            [register(name) for name, _ in shared], [register(owner) for _, owner in shared],
        )  # fmt: skip
        made.inputs = inputs
        made.size = len(registers)
        return made


class NativeCompiled(Compiled):
    native: Any
    description: tuple[list[int], ...]
    inputs: list[int]
    size: int


def complete(entry: regions.Entry, inputs: tuple[Tensor, ...]) -> None:
    """Describe a recorded entry to its native region."""
    made = entry.compiled
    assert isinstance(made, NativeCompiled)
    results, grads, kept, wanted, shared, owners = made.description
    places = list(entry.order(range(len(inputs))))  # of the k-th input of the tape
    by_place = [0] * len(inputs)
    for place, register in zip(places, made.inputs, strict=True):
        by_place[place] = register
    asked = places[: entry.wanted]
    made.native.describe(
        made.size, by_place, results, grads, kept, asked, wanted[: len(asked)] if asked else [], list(entry.written),
        list(entry.gradients) if asked else [], [list(s) for s in entry.strides], shared, owners,
    )  # fmt: skip
    made.native.guard(list(inputs))
    entry.address, entry.grads = made.native.address(), torch.is_grad_enabled()


class Owner:
    """What the derivative of a backward needs to run the forward anew."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts


class Context:
    """Stands for ctx of the Python node in `differentiable`."""


def again(owner: Any, inputs: list[Tensor], grads: list[Tensor | None], needs: list[bool]) -> list[Tensor | None]:
    entry, region, reference, reader, pattern = owner
    module = reference()  # A strong one would close a cycle that Python's collector cannot see if a module keeps its result.
    if module is None:
        raise RuntimeError("to differentiate the backward of a patched module, the module is needed, and it was deleted since")
    ctx = Context()
    ctx.entry = entry
    ctx.again = regions.Again(region, module, reader, pattern, regions.Given(*inputs))
    ctx.needs_input_grad = (False,) * 4 + tuple(needs)
    full: list[Any] = [None] * (max(entry.gradients) + 1)
    for i, dy, strides in zip(entry.gradients, grads, entry.strides, strict=True):
        full[i] = dy
    return list(regions.differentiable(ctx, tuple(full)))


_library = torch.library.Library("fastlayers_region", "FRAGMENT")
_library.impl("again", again, "CompositeImplicitAutograd")
_call = torch._C._jit_get_operation("fastlayers_region::call")[0]


class Native(regions.Region):
    """A region whose entries run in region.cpp."""

    def run(self, entry: Any, module: Any, reader: Any, pattern: Any, inputs: tuple[Tensor, ...], first: Any) -> Any:
        if first is not None:
            complete(entry, inputs)
            return super().run(entry, module, reader, pattern, inputs, first)
        results = _call(entry.address, (entry, self, weakref.ref(module), reader, pattern), list(inputs))
        if not results:
            return self.present.forward(module, *regions.unflatten(pattern[0], iter(inputs)))
        return self.packed(entry, results)

    def packed(self, entry: Any, results: list[Tensor]) -> Any:
        if entry.spec is None:
            return results[0]
        tensors = iter(results)
        leaves = [next(tensors) if leaf is regions.TENSOR else leaf for leaf in entry.constants]
        return regions.pytree.tree_unflatten(leaves, entry.spec)


class Fast(Native):
    """With region.cpp's guard instead of those of Python."""

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if regions._recording.active or regions._function_modes():
            return self.present.forward(module, *args, **kwargs)
        given: list[Tensor] = []
        pattern = regions.flatten(args, given), regions.flatten(kwargs, given) if kwargs else regions.NONE
        wanted = torch.is_grad_enabled()
        for reader in self.readers:
            found = reader.read(module)
            if found is None:
                break
            values, tensors = found
            for entry in self.entries.get((reader, values, pattern), ()):
                address = entry.__dict__.get("address")
                if address is None or entry.grads is not wanted:  # refused here, it costs 0.1 us instead of 1.5
                    continue
                results = _call(address, (entry, self, weakref.ref(module), reader, pattern) if entry.wanted else None, [*given, *tensors])
                if results:
                    return results[0] if entry.spec is None else self.packed(entry, results)
        return super().__call__(module, args, kwargs)


def region_class(present: type, kind: type = Fast) -> type:
    """A class whose forward runs as a native region."""
    before = regions.Region, regions.Tape, regions.LEAST
    regions.Region, regions.Tape, regions.LEAST = kind, NativeTape, 0
    try:
        return regions.region_class(present, {})
    finally:
        regions.Region = before[0]


def recording() -> None:
    regions.Tape, regions.LEAST = NativeTape, 0

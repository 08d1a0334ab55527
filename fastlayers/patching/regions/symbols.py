"""Tensors whose sizes are torch's symbols, and how torch traces operations on them: as it runs them on others.

What torch has in Python for symbols alone is left out, and what it has not is added. Files of torch that trace symbols
are imported when the first two sizes are there, not before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._ops import OpOverloadPacket

from fastlayers.kernels.symbolic import NAME, Symbolic
from fastlayers.patching.program.numbers import is_symbolic
from fastlayers.patching.reasons import Reason, Refusal
from fastlayers.patching.regions.entries import Entry

__all__ = ["Size", "as_recorded", "symbolic_inputs", "symbols_of"]

#: The least of the sizes at which kernels are written.
LEAST_PRIME = 13


class Size(NamedTuple):
    """A size that differs between two recordings: its symbol, the place of the tensor, the dimension, both values."""

    symbol: Any
    place: int
    dim: int
    values: tuple[int, int]


def symbols_of(sizes: Sequence[Size]) -> dict[Any, Symbolic]:
    """What stands for the symbols of torch in kernels. These are written at sizes that nothing divides by chance."""
    found: dict[Any, Symbolic] = {}
    used: set[int] = set()
    for size in sizes:
        value = max(*size.values, LEAST_PRIME)
        while value in used or any(value % divisor == 0 for divisor in range(2, math.isqrt(value) + 1)):
            value += 1
        used.add(value)
        found[size.symbol] = Symbolic.symbol(f"{NAME}{len(found)}", value)
    return found


@contextmanager
def as_recorded() -> Iterator[None]:
    """Let torch decompose operations on symbols as it decomposes others, as far as it can."""
    from torch.fx.experimental import symbolic_shapes

    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    with (
        ExitStack() as stack,
        # Else the first symbol imports Inductor, to know whose lines are not the user's.
        mock.patch.object(symbolic_shapes, "uninteresting_files", frozenset),
    ):
        stack.callback(torch.set_autocast_cache_enabled, cached)
        for op, kernels in whole_operations().items():
            stack.enter_context(mock.patch.dict(op.py_kernels, kernels, clear=True))
            stack.enter_context(mock.patch.dict(op._dispatch_cache, clear=True))
        yield


#: Where torch has what an operation consists of, in Python. Of symbols it would take that, of others its own kernels.
AUTOGRAD, COMPOSITE = torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd


@cache
def whole_operations() -> dict[Any, dict[Any, Any]]:
    """torch's operations that it decomposes for symbols alone, with what it has for them in Python but that."""
    import torch._decomp

    packets = (getattr(torch.ops.aten, name) for name in dir(torch.ops.aten))
    overloads = [getattr(p, name) for p in packets if isinstance(p, OpOverloadPacket) for name in p.overloads()]
    found = {}
    for op in overloads:
        if AUTOGRAD in op.py_kernels:
            found[op] = {key: kernel for key, kernel in op.py_kernels.items() if key not in (AUTOGRAD, COMPOSITE)}
            if "upsample" in op._schema.name and op._overloadname == "vec":
                found[op][COMPOSITE] = partial(resized, op.overloadpacket.default)
        elif "upsample" in op._schema.name and op._schema.name.endswith("_backward") and op._overloadname == "default":
            found[op] = {**op.py_kernels, torch._C.DispatchKey.Meta: resized_back}
    return found


def resized_back(dy: Tensor, sizes: Sequence[int], before: Sequence[int], *_: Any) -> Tensor:
    """The gradient of an image that was resized: torch describes it for some modes alone."""
    return dy.new_empty(before).contiguous(memory_format=torch._prims_common.suggest_memory_format(dy))


def resized(op: Any, x: Tensor, sizes: Sequence[int] | None, *options: Any) -> Tensor:
    """Resize an image to given sizes, or by factors, which come last. In C++ torch makes a number of the sizes."""
    *flags, factors = options
    if sizes is None:
        pairs = zip(x.shape[2:], factors, strict=True)
        sizes = [n * int(f) if int(f) == f else torch.sym_int(n * f) for n, f in pairs]
    return op(x, sizes, *flags, *(factors or [None] * len(sizes)))  # type: ignore[no-any-return]


def symbolic_inputs(mode: Any, first: Entry, second: Entry, real: Sequence[Tensor]) -> tuple[list[Tensor], list[Size]]:
    """Tensors without memory in place of those of the second call, and the sizes of these that are symbols."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    fakes: list[Tensor] = []
    sizes: list[Size] = []
    for place, t in enumerate(real):
        pairs = [*zip(first.geometries[place].shape, second.geometries[place].shape, strict=True)]
        kinds = [DimDynamic.STATIC if a == b else DimDynamic.DYNAMIC for a, b in pairs]
        context: Any = StatelessSymbolicContext(dynamic_sizes=kinds)
        fake = mode.from_tensor(t.detach(), symbolic_context=context, source=ConstantSource(f"x{place}"))
        fakes.append(fake.requires_grad_(t.requires_grad))
        shape: tuple[Any, ...] = fake.shape
        for dim, (size, pair) in enumerate(zip(shape, pairs, strict=True)):
            if is_symbolic(size):
                sizes.append(Size(size.node.expr, place, dim, pair))
    if not sizes:
        raise Refusal(Reason.SIZES, "no size differs")
    return fakes, sizes

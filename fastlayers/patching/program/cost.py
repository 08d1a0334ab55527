"""An estimate of what a program launches and moves."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from fastlayers.patching.program.numbers import hint_of
from fastlayers.patching.program.program import Program, overwritten, plain_name
from fastlayers.patching.program.tape import EMPTY

__all__ = ["ALLOCATES", "LAUNCHES", "Cost", "cost_of", "nbytes"]

#: Launches of an operation of torch that has more than one.
LAUNCHES = {"_safe_softmax": 4}
#: Operations that only allocate.
ALLOCATES = frozenset(name.removeprefix("::") for name in EMPTY)


class Cost(NamedTuple):
    """The number of kernels that a program launches, and the bytes that these move."""

    launches: int = 0
    moved: int = 0


def nbytes(t: Tensor) -> int:
    """The bytes of a tensor, where sizes differ those of one call. The repeated elements of an expanded one count
    once."""
    sizes = ((hint_of(size), hint_of(stride)) for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.element_size() * math.prod(size for size, stride in sizes if stride or not size)


def cost_of(program: Program) -> Cost:
    """What the operations of both directions cost: each launches one kernel, but for those in ``LAUNCHES``, reads each
    of its operands once, and writes each of its results once. Views and allocations cost nothing; a convolution adds
    its bias in a second kernel."""
    launches, moved, parts = 0, 0, dict[str, int]()

    def size(name: str) -> int:
        return nbytes(program.values[name]) if name in program.values else parts.get(name, 0)

    for operation in program.operations:
        name = plain_name(operation.function)
        if operation.view or name in ALLOCATES:
            continue
        # Parts of a sum, which a second kernel adds up, are no values of the program.
        for made, result in zip(operation.makes, getattr(operation.function, "results", ()), strict=False):
            parts[made] = math.prod(result.sizes) * result.dtype.itemsize
        if name == "convolution" and operation.args[2] is not None:
            launches, moved = launches + 1, moved + 2 * size(operation.makes[0])
        launches += LAUNCHES.get(name, 1)
        moved += sum(map(size, (*operation.uses, *operation.makes, *overwritten(operation))))
    return Cost(launches, moved)

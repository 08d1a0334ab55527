"""What can be part of a generated kernel: operations of torch with a formula, copies, moves and sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch._ops import OpOverload

from fastlayers.kernels.formulas import (
    COMPARISONS,
    FAST,
    FORMULAS,
    INTERPRETED,
    NAMES,
    ROWS,
    SUMS,
    TESTS,
    accumulator_of,
    number,
)
from fastlayers.kernels.generated import LONGEST_ROW
from fastlayers.patching.program.numbers import is_symbolic
from fastlayers.patching.program.operators import argument, spelled
from fastlayers.patching.program.program import Operation, Value, map_values
from fastlayers.patching.program.shapes import Look, Shaped

__all__ = [
    "CASTS",
    "CHOICES",
    "COPIES",
    "FACTORS",
    "FILLED",
    "FLOATING",
    "LOGICAL",
    "MOVES",
    "WHOLE",
    "factor_of",
    "formula",
    "in_new_memory",
    "is_dense",
    "is_fusable",
    "reduced_dims",
    "row_dim",
]

FLOATING = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})

#: Operations that give their first argument another dtype,
CASTS = frozenset({"to.dtype", "_to_copy"})
#: or layout.
COPIES = CASTS | {"clone", "contiguous"}
#: Operations that give the elements of their arguments other places.
MOVES = frozenset({"cat", "stack", "slice_backward", "select_backward", "constant_pad_nd", "roll", "repeat"})
#: Operations on conditions.
LOGICAL = {
    "logical_not": "({0} == 0)", "bitwise_not": "({0} == 0)", "logical_and": "({0} & {1})",
    "logical_or": "({0} | {1})", "bitwise_and.Tensor": "({0} & {1})", "bitwise_or.Tensor": "({0} | {1})",
}  # fmt: skip
#: Operations that choose between values.
CHOICES = frozenset({"where.self", "masked_fill.Scalar", "masked_fill.Tensor"})
#: Operations that multiply by a number, which a product may do as well.
FACTORS: dict[str, Callable[[float], float]] = {
    **dict.fromkeys(("mul.Scalar", "mul.Tensor"), lambda number: number),
    **dict.fromkeys(("div.Scalar", "div.Tensor"), lambda number: 1 / number),
}
#: Operations that need more than one element of an operand for an element of their result, which is therefore stored.
WHOLE = frozenset({*SUMS, *ROWS})
#: Values that are nowhere stored.
FILLED = {"zeros": 0, "new_zeros": 0, "zeros_like": 0, "ones": 1, "new_ones": 1, "ones_like": 1}


def factor_of(operation: Operation) -> float | None:
    """The number that an operation multiplies a tensor by; None for 0, by which nothing is divided, and for another
    operation, such as a square."""
    factor = FACTORS.get(spelled(operation))
    if factor is None or len(operation.operands) != 1 or isinstance(operation.args[1], Value) or operation.kwargs:
        return None
    return factor(operation.args[1]) if operation.args[1] != 0 else None


def is_dense(t: Look) -> bool:
    if isinstance(t, Shaped):
        return t.is_dense
    return t.numel() > 0 and torch.ops.aten.is_non_overlapping_and_dense(t)


def is_fusable(operation: Operation, values: Mapping[str, Look]) -> bool:
    """Whether an operation has a formula, for the tensors that it is given."""
    name = spelled(operation)
    if operation.effect or not operation.single or len(operation.makes) != 1 or not operation.makes[0]:
        return False
    out = values[operation.makes[0]]
    given = [values[n] for n in operation.operands]
    if out.device.type == "cpu" and not INTERPRETED:  # A number that torch keeps there.
        return False
    if (
        out.dtype not in NAMES
        or not is_dense(out)
        or any(t.dtype not in NAMES or t.device != out.device for t in given)
    ):
        return False
    floating = out.dtype in FLOATING
    if name not in MOVES and any(map(is_symbolic, (*operation.args, *operation.kwargs.values()))):
        return False
    if name in COPIES:
        return bool(given) and (operation.kwargs.get("device") in (None, out.device))
    if name in MOVES:
        return all((t.dtype is out.dtype or floating) and t.numel() > 0 for t in given)
    if name in FILLED or name in ("full", "scalar_tensor"):
        return floating or out.dtype is torch.bool
    if name == "gather":
        return floating and given[1].dtype is torch.int64 and not argument(operation, "sparse_grad", False)
    if name in LOGICAL:
        return all(t.dtype is torch.bool for t in given)
    if name in CHOICES:
        return floating and all(t.dtype in FLOATING or t.dtype is torch.bool for t in given)
    base = name.partition(".")[0]
    if base in COMPARISONS:
        return not any(isinstance(arg, complex) for arg in operation.args)
    if name in ROWS:
        return floating and has_short_rows(operation, out, given)
    if name in TESTS:
        return given[0].dtype in FLOATING
    if name in ("all.dim", "any.dim"):
        return out.dtype is given[0].dtype is torch.bool
    if name in SUMS:
        return floating and given[0].dtype in FLOATING and is_plain_sum(operation, given[0])
    if name not in FORMULAS or not floating or not all(t.dtype in FLOATING or t.dtype is torch.bool for t in given):
        return False
    return formula(operation, [f"t{i}" for i in range(len(given))], accumulator_of(out.dtype)) is not None


def in_new_memory(operation: Operation) -> OpOverload | None:
    """The operation that returns what a pointwise one writes over its first argument."""
    name = spelled(operation)
    base, dot, overload = name.partition(".")
    if (
        not base.endswith("_")
        or not operation.effect
        or any(operation.makes)
        or f"{base[:-1]}{dot}{overload}" not in (*FORMULAS, *CHOICES)
    ):
        return None
    return getattr(getattr(torch.ops.aten, base[:-1]), overload or "default")  # type: ignore[no-any-return]


def formula(operation: Operation, locals_: Sequence[str], acc: torch.dtype, fast: bool = False) -> str | None:
    """The source of a pointwise operation on locals; ``fast``, for a result that is rounded to 16 bits."""
    given = iter(locals_)
    args = map_values(operation.args, lambda _: next(given))
    kwargs = {name: map_values(value, lambda _: next(given)) for name, value in operation.kwargs.items()}
    if spelled(operation) == "div.Tensor" and not isinstance(operation.args[1], Value):
        return FORMULAS["div.Scalar"](acc, *args)
    args = tuple(number(arg, acc) if is_second(operation, i) else arg for i, arg in enumerate(args))
    name = spelled(operation)
    return (FAST if fast and name in FAST and acc is torch.float32 else FORMULAS)[name](acc, *args, **kwargs)


def is_second(operation: Operation, place: int) -> bool:
    """Whether an argument is a number where the schema has a tensor."""
    declared = operation.function._schema.arguments[place]  # type: ignore[attr-defined]
    return str(declared.type) == "Tensor" and not isinstance(operation.args[place], Value)


def is_plain_sum(operation: Operation, x: Look) -> bool:
    return argument(operation, "ord", 2) == 2 and argument(operation, "dim") is not None


def has_short_rows(operation: Operation, out: Look, given: Sequence[Look]) -> bool:
    """Whether an operation on rows has such that are contiguous and fit into registers, and is rounded once."""
    if not out.dim() or len({t.dtype for t in given}) > 1:
        return False
    dim = row_dim(operation, out)
    if not 1 < out.shape[dim] <= LONGEST_ROW or out.stride(dim) != 1:
        return False
    wide, narrow = out.dtype, given[0].dtype
    if spelled(operation) == "_softmax_backward_data":
        wide, narrow = narrow, wide
    return wide is narrow or (wide is accumulator_of(narrow) and narrow in FLOATING)


def row_dim(operation: Operation, out: Look) -> int:
    """The dimension along which an operation of ROWS runs."""
    return int(argument(operation, "dim")) % out.dim()


def reduced_dims(operation: Operation, x: Look) -> tuple[int, ...]:
    dims = argument(operation, "dim")
    if isinstance(dims, int):
        dims = [dims]
    return tuple(sorted({d % x.dim() for d in dims})) if dims else tuple(range(x.dim()))

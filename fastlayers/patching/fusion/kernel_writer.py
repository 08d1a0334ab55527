"""Writes a generated kernel: the expressions of some results, down to the tensors that it loads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from fastlayers.kernels.affine import ZERO, Index, divide, flatten, indices_of, unflatten
from fastlayers.kernels.formulas import COMPARISONS, NAMES, ROUNDED, ROWS, SUMS, TESTS, Code, accumulator_of, number
from fastlayers.kernels.generated import LONGEST_ROW, Kernel, Result, pointwise, reduction, rows
from fastlayers.kernels.symbolic import as_float
from fastlayers.patching.fusion.fusable import (
    CHOICES,
    COPIES,
    FILLED,
    FLOATING,
    LOGICAL,
    MOVES,
    WHOLE,
    formula,
    reduced_dims,
    row_dim,
)
from fastlayers.patching.program.operators import argument, spelled
from fastlayers.patching.program.program import Operation, Value, map_values
from fastlayers.patching.program.shapes import Shaped

__all__ = ["KernelWriter", "NotFusableError", "row_length"]

#: Inputs of a kernel. More of them need more registers for addresses than there are.
MAX_INPUTS = 24


class NotFusableError(Exception):
    """These operations cannot be one kernel. An argument is the place of the one that must be stored."""


def row_length(operation: Operation, values: Mapping[str, Shaped]) -> int:
    """The number of elements of the rows that an operation needs as a whole; 0 if it needs none that are contiguous and
    fit into registers."""
    name = spelled(operation)
    if name not in WHOLE:
        return 0
    x = values[operation.operands[0]]
    if name in ROWS:
        return x.shape[row_dim(operation, x)]
    dims = reduced_dims(operation, x)
    length = math.prod(x.shape[d] for d in dims)
    return length if 1 < length <= LONGEST_ROW and is_along(x, dims) else 0


def is_along(x: Shaped, dims: Sequence[int]) -> bool:
    """Whether neighbouring elements of memory belong to one sum over these dimensions."""
    used = [d for d in range(x.dim()) if x.shape[d] > 1]
    return not used or min(used, key=x.stride) in dims


def varies(index: Index) -> bool:
    """Whether an index differs among the elements of a row."""
    return "r" in index.variables


class Source(Protocol):
    """What a writer knows of the operations: :class:`fastlayers.patching.fusion.kernels.Fusion`."""

    given: list[Operation]
    values: Mapping[str, Shaped]
    places: dict[str, int]
    stored: set[int]
    narrow: frozenset[str]

    def base(self, name: str) -> str:
        """The value of whose memory another one is a view."""

    def producer(self, name: str) -> tuple[int, Operation] | None:
        """The operation that computes a value where it is read, and its place; None if the value is stored."""


class KernelWriter:
    """Writes the kernel of some results.

    Args:
        fusion: the operations.
        roots: the places of those that make the results.
        stores: the places of those whose results are read elsewhere.
        in_rows: whether a program has whole rows in registers.
    """

    def __init__(self, fusion: Source, roots: Sequence[int], stores: Sequence[int], in_rows: bool) -> None:
        self.fusion, self.values, self.roots = fusion, fusion.values, roots
        self.inputs: dict[str, str] = {}
        self.loads: set[tuple[str, Index]] = set()
        self.members: set[int] = set()
        self.readers: dict[str, tuple[int, int]] = {}
        self._reader = roots[0]
        self._known: dict[Any, str] = {}
        given = [fusion.given[root] for root in roots]
        self.reduction = not in_rows and any(spelled(operation) in SUMS for operation in given)
        #: Sums come first: another kernel may have to add up what each program has found of them.
        self.stores = sorted(stores, key=lambda root: self.reduction and spelled(fusion.given[root]) not in SUMS)
        #: The elements of a row that a program has in registers; 0 if it has none.
        self.length = max(row_length(operation, self.values) for operation in given) if in_rows else 0

    def kernels(self) -> tuple[Kernel, ...]:
        given = [self.fusion.given[root] for root in self.stores]
        outs = [self.values[operation.makes[0]] for operation in given]
        results = [Result(tuple(t.shape), t.stride(), t.dtype) for t in outs]
        if self.reduction:
            return self.sums(given, outs, results)
        if self.length:
            return (self.rows(given, outs, results),)
        self.code = Code({"x": outs[0].numel()})
        stores = []
        for root, operation, t in zip(self.stores, given, outs, strict=True):
            indices = indices_of("x", t.shape, t.stride()) if t.numel() == outs[0].numel() else None
            if indices is None:
                raise NotFusableError(root)
            stores.append(self.computed(operation.makes[0], root, operation, indices, ""))
        self.check()
        extent = max(self.extent(outs), 1)
        return (pointwise(self.code, stores, results, self.dtypes(), extent, outs[0].device),)

    def sums(self, given: list[Operation], outs: list[Shaped], results: list[Result]) -> tuple[Kernel, ...]:
        """The kernel of sums over the same dimensions, which may store values of what is summed on its way."""
        x, out = self.values[given[0].operands[0]], outs[0]
        dims = reduced_dims(given[0], x)
        count = math.prod(x.shape[d] for d in dims)
        self.code = Code({"x": out.numel(), "r": count})
        places = indices_of("x", out.shape, out.stride())
        indices = None if places is None else self.summands(x, dims, places)
        if indices is None:
            raise NotFusableError(self.roots[0])
        summed, finished, stored = [], [], []
        for root, operation, t, result in zip(self.stores, given, outs, results, strict=True):
            made = operation.makes[0]
            if spelled(operation) not in SUMS:
                if t.shape != x.shape:
                    raise NotFusableError(root)
                local = self.computed(made, root, operation, indices, "")
                stored.append((flatten(indices, t.stride()).source(self.code.sizes), local, result))
                continue
            name = operation.operands[0]
            if self.values[name].shape != x.shape or reduced_dims(operation, self.values[name]) != dims:
                raise NotFusableError(root)
            self._reader = self.fusion.places[made]
            local = self.value(name, indices, "")
            wide = torch.float64 if t.dtype is torch.float64 else torch.float32
            local = self.code.cast(local, self.values[name].dtype, wide)
            each, total = SUMS[spelled(operation)]
            summed.append(self.code.let(each.format(x=local)))
            finished.append(total)
            self.code.stands_for(operation.step_of or spelled(operation))
        self.check()
        extent = max(self.extent(outs), 1)
        return reduction(
            self.code, summed, finished, results[: len(summed)], self.dtypes(), extent, is_along(x, dims), x.device,
            stores=stored,
        )  # fmt: skip

    def summands(self, x: Shaped, dims: Sequence[int], places: Sequence[Index]) -> tuple[Index, ...] | None:
        """The indices of the elements ``r`` of a sum over some dimensions, from those of its result.

        They are visited in the order of memory of what is summed, as far as its strides tell.
        """
        steps = x.stride()
        strides, step = {}, 1
        for d in sorted(dims, key=lambda d: steps[d]):
            strides[d], step = step, step * x.shape[d]
        inner = unflatten(Index.of("r", step), [x.shape[d] for d in dims], [strides[d] for d in dims])
        if inner is None:
            return None
        kept = [d for d in range(x.dim()) if d not in dims]
        indices = [ZERO] * x.dim()
        for i, d in enumerate(kept):
            indices[d] = places[d if len(places) == x.dim() else i]
        for d, index in zip(dims, inner, strict=True):
            indices[d] = index
        return tuple(indices)

    def rows(self, given: list[Operation], outs: list[Shaped], results: list[Result]) -> Kernel:
        length = self.length
        row = next(o for o in (self.fusion.given[root] for root in self.roots) if row_length(o, self.values))
        count = self.values[row.operands[0]].numel() // length
        self.code = Code({"x": count, "r": length}, in_rows=True)
        row_of, element = Index.of("x", count), Index.of("x", count) * length + Index.of("r", length)
        # Results of one shape may lie in memory in several orders; the rows are visited in that of one of them.
        made = [self.values[self.fusion.given[root].makes[0]] for root in self.roots]
        first = min((t for t in made if t.numel() == count * length), key=lambda t: not t.is_contiguous(), default=None)
        in_order = None if first is None else unflatten(element, first.shape, first.stride())
        stores: list[tuple[int, str, str, bool]] = []
        for i, (root, operation, t) in enumerate(zip(self.stores, given, outs, strict=True)):
            if spelled(operation) == "stack" and argument(operation, "dim", 0) == 0 and t.numel() == count * t.shape[0]:
                self.members.add(root)  # The statistics of a norm: one number after the other, for all rows.
                indices = indices_of("x", t.shape[1:], t.stride()[1:])
                assert indices is not None
                self._reader = root
                for j, part in enumerate(operation.args[0]):
                    stores.append((i, f"x + {j} * n", self.value(part.name, indices, ""), True))
                continue
            of_row, indices, place = t.numel() == count, None, element
            if of_row:
                indices, place = indices_of("x", t.shape, t.stride()), row_of
            elif first is not None and t.shape == first.shape and in_order is not None:
                indices, place = in_order, flatten(in_order, t.stride())
            elif t.numel() == count * length:
                indices = unflatten(element, t.shape, t.stride())
            if indices is None:
                raise NotFusableError(root)
            local = self.computed(operation.makes[0], root, operation, indices, "")
            stores.append((i, place.source(self.code.sizes), local, of_row))
        self.check()
        return rows(self.code, stores, results, self.dtypes(), max(self.extent(outs), 1), outs[0].device)

    def whole(self, operation: Operation, out: Shaped, indices: tuple[Index, ...], place: int) -> str:
        """A local with an element of what needs a whole row of its operand, if that is a row of this kernel."""
        name = spelled(operation)
        length = self.length if row_length(operation, self.values) == self.length else 0
        if name in ROWS and length:
            dim = row_dim(operation, out)
            others = (*indices[:dim], *indices[dim + 1 :])
            if indices[dim] == Index.of("r", length) and not any(map(varies, others)):
                acc = accumulator_of(self.values[operation.operands[0]].dtype)
                locals_ = [self.value(operand, indices, "") for operand in operation.operands]
                return self.code.rounded(ROWS[name](self.code, acc, *locals_), out.dtype)
        elif length and not any(map(varies, indices)):
            operand = operation.operands[0]
            x = self.values[operand]
            own = self.summands(x, reduced_dims(operation, x), indices)
            if own is not None:
                wide = torch.float64 if out.dtype is torch.float64 else torch.float32
                local = self.code.cast(self.value(operand, own, ""), x.dtype, wide)
                each, total = SUMS[name]
                found = self.code.total(self.code.let(each.format(x=local)))
                return self.code.rounded(total.format(total=found, count=as_float(length, NAMES[wide])), out.dtype)
        raise NotFusableError(place)

    def dtypes(self) -> list[torch.dtype]:
        return [self.values[name].dtype for name in self.inputs]

    def check(self) -> None:
        if len(self.inputs) > MAX_INPUTS:
            raise NotFusableError

    def extent(self, outs: Sequence[Shaped]) -> int:
        """The number of elements that the memory of the largest tensor spans."""
        tensors = [*outs, *(self.values[name] for name in self.inputs)]
        return max(1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) for t in tensors)

    # -- values --------------------------------------------------------------------------------------------------

    def is_computed(self, name: str) -> bool:
        """Whether a value is computed where it is read."""
        found = self.fusion.producer(self.fusion.base(name))
        return found is not None and (found[0] in self.roots or found[0] not in self.fusion.stored)

    def value(self, name: str, indices: tuple[Index, ...], condition: str) -> str:
        """A local with an element of a value."""
        t = self.values[name]
        base = self.fusion.base(name)
        b = self.values[base]
        start = t.offset - b.offset if base != name else 0
        place = flatten(indices, t.stride()) + start
        found = self.fusion.producer(base)
        if found is not None and (found[0] in self.roots or found[0] not in self.fusion.stored):
            number_, operation = found
            if self.reduction and number_ in self.roots and spelled(operation) in SUMS:
                raise NotFusableError  # A sum that another one needs has to be stored before.
            if base != name:
                inner = unflatten(place, b.shape, b.stride())
                if inner is None:
                    raise NotFusableError(number_)
                indices = inner
            return self.computed(base, number_, operation, indices, condition)
        self.loads.add((base, place))
        first, last = self.readers.get(base, (self._reader, self._reader))
        self.readers[base] = min(first, self._reader), max(last, self._reader)
        pointer = self.inputs.setdefault(base, f"in{len(self.inputs)}")
        return self.code.load(pointer, place, condition, b.dtype)

    def computed(self, name: str, place: int, operation: Operation, indices: tuple[Index, ...], condition: str) -> str:
        key = name, indices, condition
        if key not in self._known:
            if place >= 0:
                self.members.add(place)
            before, self._reader = self._reader, place
            if spelled(operation) in WHOLE:
                if condition:
                    raise NotFusableError(place)
                self._known[key] = self.whole(operation, self.values[name], indices, place)
            else:
                self._known[key] = self.compute(operation, self.values[name], indices, condition)
            self.code.stands_for(operation.step_of or spelled(operation))
            self._reader = before
        return self._known[key]

    def operand(self, value: Any, out: Shaped, indices: tuple[Index, ...], condition: str, dtype: torch.dtype) -> str:
        """A local with what an argument that is broadcast contributes to an element, in a dtype."""
        if not isinstance(value, Value):
            return number(value, accumulator_of(dtype))
        t = self.values[value.name]
        own = indices[len(indices) - t.dim() :]
        own = tuple(ZERO if size == 1 else index for size, index in zip(t.shape, own, strict=True))
        return self.code.cast(self.value(value.name, own, condition), t.dtype, dtype)

    def compute(self, operation: Operation, out: Shaped, indices: tuple[Index, ...], condition: str) -> str:
        name, acc = spelled(operation), accumulator_of(out.dtype)
        args = operation.args
        if name in FILLED or name in ("full", "scalar_tensor"):
            value = FILLED[name] if name in FILLED else args[1] if name == "full" else args[0]
            return self.code.let(f"tl.where(inside, {number(value)}, 0.0).to({NAMES[acc]})")
        if name in COPIES:
            source = self.values[args[0].name]
            local = self.operand(args[0], out, indices, condition, source.dtype)
            if source.dtype not in FLOATING or accumulator_of(out.dtype) is out.dtype:  # Else a double is rounded once.
                local = self.code.cast(local, source.dtype, out.dtype)
            return local if source.dtype is out.dtype else self.code.rounded(local, out.dtype)
        if name in MOVES:
            return self.moved(operation, out, indices, condition)
        if name == "gather":
            return self.gathered(operation, out, indices, condition)
        if name in CHOICES:
            mask, one, other = args if name == "where.self" else (args[1], args[2], args[0])
            parts = (
                self.operand(mask, out, indices, condition, torch.bool),
                *(self.operand(part, out, indices, condition, out.dtype) for part in (one, other)),
            )
            return self.code.rounded("tl.where({}, {}, {})".format(*parts), out.dtype)
        if name in LOGICAL:
            return self.code.let(
                LOGICAL[name].format(*(self.operand(arg, out, indices, condition, torch.bool) for arg in args))
            )
        if name in TESTS:
            local = self.operand(args[0], out, indices, condition, self.values[args[0].name].dtype)
            return self.code.let(TESTS[name].format(x=local))
        base = name.partition(".")[0]
        if base in COMPARISONS:
            return self.compared(operation, out, indices, condition, COMPARISONS[base])
        locals_: list[str] = []
        map_values(
            (*args, *operation.kwargs.values()),
            lambda value: locals_.append(self.operand(value, out, indices, condition, out.dtype)),
        )
        if any(self.values[n].dtype is torch.float64 for n in operation.operands) and out.dtype is not torch.float64:
            raise NotFusableError
        fast = out.dtype in ROUNDED or operation.makes[0] in self.fusion.narrow
        text = formula(operation, locals_, acc, fast)
        assert text is not None
        return self.code.rounded(text, out.dtype)

    def compared(self, operation: Operation, out: Shaped, indices: tuple[Index, ...], condition: str, sign: str) -> str:
        a, b = operation.args[:2]
        dtypes = [self.values[value.name].dtype for value in (a, b) if isinstance(value, Value)]
        common = dtypes[0] if len(dtypes) == 1 else torch.promote_types(*dtypes)
        if not isinstance(b, Value) and isinstance(b, float) and common not in FLOATING:
            common = torch.float32
        if not isinstance(b, Value) and common in FLOATING:
            b = torch.tensor(b, dtype=common).item()  # as torch compares: 0.1 is 0.10009765625 in bfloat16
        left = self.operand(a, out, indices, condition, common)
        right = (
            self.operand(b, out, indices, condition, common)
            if isinstance(b, Value)
            else (number(b, accumulator_of(common)) if common in FLOATING else str(int(b)))
        )
        return self.code.let(f"({left} {sign} {right})")

    # -- elements in other places -----------------------------------------------------------------------------------

    def moved(self, operation: Operation, out: Shaped, indices: tuple[Index, ...], condition: str) -> str:
        """An element of a result whose elements come from one of several places, or are a number."""
        name, args = spelled(operation), operation.args
        if name in ("cat", "stack"):
            dim = argument(operation, "dim", 0)
            return self.concatenated(args[0], out, dim % out.dim(), name == "stack", indices, condition)
        if name == "roll":
            return self.rolled(operation, out, indices, condition)
        if name == "repeat":
            return self.repeated(args[0].name, out, indices, condition)
        own = list(indices)
        tests: list[str] = []
        fill: Any = 0
        if name == "slice_backward":
            dim, size = args[2] % out.dim(), self.values[args[0].name].shape
            start = min(max(args[3] + (out.shape[dim] if args[3] < 0 else 0), 0), out.shape[dim])
            steps = divide(own[dim], args[5])
            if steps is None:
                raise NotFusableError(self._reader)
            own[dim], rest = steps[0] + -(start // args[5]), steps[1] + -(start % args[5])
            between = self.code.holds(rest, 0, 1)
            if between is None:
                return self.code.let(f"tl.where(inside, {number(0)}, 0.0)")
            tests += [between] if between else []
            bounds = {dim: size[dim]}
        elif name == "select_backward":
            dim = args[2] % out.dim()
            own[dim] = own[dim] + -(args[3] % out.shape[dim])
            bounds = {dim: 1}
        else:
            t, bounds = self.values[args[0].name], {}
            fill = argument(operation, "value", 0)
            for i in range(len(args[1]) // 2):
                dim = out.dim() - 1 - i
                own[dim] = own[dim] + -args[1][2 * i]
                bounds[dim] = t.shape[dim]
        for dim, size in bounds.items():
            test = self.code.holds(own[dim], 0, size)
            if test is None:
                return self.code.let(f"tl.where(inside, {number(fill)}, 0.0)")
            tests += [test] if test else []
            if test and self.is_computed(args[0].name):
                own[dim] = self.code.offset(own[dim], size)
        if name == "select_backward":
            del own[dim]
        both = self.joined(condition, *tests)
        local = self.value(args[0].name, tuple(own), both)
        here = self.joined("", *tests)
        return self.code.let(f"tl.where({here}, {local}, {number(fill)})") if here else local

    def repeated(self, name: str, out: Shaped, indices: tuple[Index, ...], condition: str) -> str:
        """An element of several copies side by side."""
        shape = self.values[name].shape
        own = []
        for size, index in zip(shape, indices[out.dim() - len(shape) :], strict=True):
            steps = divide(index, size)
            if steps is None:
                raise NotFusableError(self._reader)
            own.append(steps[1])
        return self.value(name, tuple(own), condition)

    def gathered(self, operation: Operation, out: Shaped, indices: tuple[Index, ...], condition: str) -> str:
        """An element that an index of another tensor chooses along a dimension; NaN where that is out of range, which
        torch asserts."""
        x, dim, index = operation.args[0].name, operation.args[1] % out.dim(), operation.args[2].name
        if self.is_computed(x):
            found = self.fusion.producer(self.fusion.base(x))
            raise NotFusableError(*(found or ())[:1])
        size = self.values[x].shape[dim]
        chosen = self.code.let(f"{self.value(index, indices, condition)}.to(INDEX)")
        valid = self.code.let(f"({chosen} >= 0) & ({chosen} < {size})")
        own = list(indices)
        own[dim] = self.code.variable(chosen, size)
        local = self.value(x, tuple(own), self.joined(condition, valid))
        return self.code.let(f'tl.where({valid}, {local}, float("nan"))')

    def joined(self, *conditions: str) -> str:
        wanted = [condition for condition in conditions if condition]
        return self.code.let(" & ".join(wanted)) if len(wanted) > 1 else "".join(wanted)

    def concatenated(
        self, parts: Sequence[Value], out: Shaped, dim: int, stacked: bool, indices: tuple[Index, ...], condition: str
    ) -> str:
        found, start = None, 0
        for part in parts:
            size = 1 if stacked else self.values[part.name].shape[dim]
            own = list(indices)
            own[dim] = own[dim] + -start
            start += size
            test = self.code.holds(own[dim], 0, size)
            if test is None:
                continue
            if stacked:
                del own[dim]
            elif test and self.is_computed(part.name):
                own[dim] = self.code.offset(own[dim], size)
            local = self.value(part.name, tuple(own), self.joined(condition, test))
            local = self.code.cast(local, self.values[part.name].dtype, out.dtype)
            found = local if found is None or not test else self.code.let(f"tl.where({test}, {local}, {found})")
        assert found is not None
        return found

    def rolled(self, operation: Operation, out: Shaped, indices: tuple[Index, ...], condition: str) -> str:
        shifts, dims = operation.args[1], argument(operation, "dims", [])
        if not dims:
            raise NotFusableError
        wrapped = [(list(indices), "")]
        for shift, dim in zip(shifts, dims, strict=True):
            size = out.shape[dim]
            shift, dim = shift % size, dim % out.dim()
            more = []
            for own, tests in wrapped:
                for offset, low, high in ((-shift, shift, size), (size - shift, 0, shift)):
                    test = self.code.holds(indices[dim], low, high) if low < high else None
                    if test is not None:
                        other = list(own)
                        other[dim] = other[dim] + offset
                        more.append((other, self.joined(tests, test)))
            wrapped = more
        found = None
        for own, test in wrapped:
            local = self.value(operation.args[0].name, tuple(own), self.joined(condition, test))
            found = local if found is None or not test else self.code.let(f"tl.where({test}, {local}, {found})")
        assert found is not None
        return found

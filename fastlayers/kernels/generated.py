"""Kernels that are generated: pointwise operations, sums of them, and both in one where a row fits into registers.

A caller writes the body of a kernel as :class:`fastlayers.kernels.formulas.Code`, value by value. The number of
elements is an argument of the kernel: batches of another size share its code. Where sizes are
:class:`fastlayers.kernels.symbolic.Symbolic`, the sizes that all numbers follow from are its arguments, and one machine
code serves all.
"""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlayers.kernels.affine import Index
from fastlayers.kernels.formulas import INTERPRETED, NAMES, Code
from fastlayers.kernels.indexing import INT32_EXTENT
from fastlayers.kernels.launch import Launch, Producer, Result, cdiv, multiprocessors
from fastlayers.kernels.symbolic import Symbolic, as_float, hint, is_less, symbols_in

__all__ = [
    "IMPORTS",
    "LONGEST_ROW",
    "Kernel",
    "Result",
    "balanced",
    "casts",
    "compile_together",
    "pointwise",
    "reduction",
    "rows",
]

#: Elements of a program, 8 a thread: a 16-byte access of 16-bit elements.
TILE, WARPS = 1024, 4
#: Elements of the tile of a reduction, and along what is contiguous. Half of it from as many inputs and stores as the
#: first number says, and a quarter from the second one: with all of it 4 inputs take 217 of 255 registers, which leaves
#: a multiprocessor 8 warps; with half of it 8 inputs and 4 stores take 233.
REDUCED_TILE, CONTIGUOUS = 4096, 128
MANY = (3, 8)
#: Elements of the rows that a program has in registers, and those of a thread for each value of an expression,
ROW_TILE, ELEMENTS = 2048, 16
#: and of the longest row.
LONGEST_ROW = 4096
#: Programs of a reduction for each multiprocessor, from which no sum is shared among several but to give each
#: multiprocessor as many, and the steps that each of those that share one makes at least. 288 programs on 132
#: multiprocessors, three on some and two on others, took twice the time of their reads. EVEN is by how much the busiest
#: may have more than the mean.
PROGRAMS, LEAST, EVEN = 2, 2, 1.15
#: Letters of what the name of a kernel says that it computes, and operations that such a name leaves out.
LONGEST_NAME = 80
UNNAMED = frozenset({"to", "to_copy", "clone", "contiguous", "full", "scalar_tensor"})

#: What a kernel may use.
IMPORTS = """\
import triton
import triton.language as tl
from triton.language.extra import libdevice

from fastlayers.kernels.activations import fast_exp, fast_normal_cdf, fast_sigmoid, tanh, twice_inner
"""
_scope: dict[str, Any] = {}
exec(IMPORTS, _scope)

_count = 0


@lru_cache(maxsize=4096)
def compiled(source: str) -> Any:
    """The kernel of a source. Its file is one of linecache's, since Triton reads the source of a function."""
    global _count
    _count += 1
    filename = f"<fastlayers kernel {_count}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    scope = dict(_scope)
    exec(compile(source, filename, "exec"), scope)
    (name,) = scope.keys() - _scope.keys() - {"__builtins__"}
    return scope[name]


class Kernel(Producer):
    """A generated kernel, called as its function is.

    Args:
        source: its function: of the results, the inputs, the numbers and the constants.
        results: the tensors that it makes.
        dtypes: those of its inputs.
        programs: the size of its grid.
        numbers: arguments that the code does not depend on; of one for many sizes those that all numbers follow from.
        constants: those that it does depend on.
        warps: those of a program.

    Attributes:
        sizes: of one for many sizes what it is called with after its inputs: the size of its grid, the numbers, and the
            shape and the strides of each result.
    """

    def __init__(
        self,
        source: str,
        results: Sequence[Result],
        dtypes: Sequence[torch.dtype],
        programs: int,
        numbers: Sequence[int],
        constants: Sequence[Any],
        device: torch.device,
        warps: int,
    ) -> None:
        self.source, self.results, self.dtypes, self.device = source, tuple(results), tuple(dtypes), device
        self.__name__ = re.search(r"def (\w+)", source)[1]  # type: ignore[index]
        self.absent = ()
        self._arguments, self._warps = (programs, tuple(numbers), tuple(constants)), warps
        geometry = [n for result in self.results for n in (*result.sizes, *result.strides)]
        many = any(type(n) is Symbolic for n in (programs, *numbers, *geometry))
        self.sizes = (programs, *numbers, *geometry) if many else ()

    @cached_property
    def launch(self) -> Launch:  # type: ignore[override]
        """The launch of its function, which Triton is not given before: most of what is considered is not used."""
        return Launch(compiled(self.source), *self._arguments, self._warps, exact=True)

    def __call__(self, *given: Any) -> list[Tensor]:
        if not self.sizes:
            return super().__call__(*given)
        count = len(self.dtypes)
        inputs, (programs, *numbers) = given[:count], given[count:]
        own, geometry = numbers[: len(self.launch.scalars)], iter(numbers[len(self.launch.scalars) :])
        outs = []
        for result in self.results:
            shape, strides = (tuple(next(geometry) for _ in result.sizes) for _ in range(2))
            outs.append(Result(shape, strides, result.dtype).empty(self.device))
        self.launch.at(programs, tuple(own))(*outs, *inputs)
        return outs

    def at(self, place: str) -> Kernel:
        """The same kernel, whose name also says where what it computes is written."""
        source = self.source.replace(self.__name__, f"{self.__name__}__{place}", 1)
        return shared(source, self.results, self.dtypes, *self._arguments, self.device, self._warps)

    def compile(self) -> None:
        """Compile it for aligned inputs, as its first call would."""
        tensors = *(result.dtype for result in self.results), *self.dtypes
        programs, numbers, constants = self._arguments
        plain, options = [*map(hint, numbers)], {"num_warps": self._warps, "enable_fp_fusion": False}
        self.launch.function.warmup(*tensors, *plain, *constants, grid=(hint(programs),), **options)


def function_source(
    operations: Iterable[str], outputs: int, inputs: int, numbers: Mapping[str, int], constants: str,
    lines: Sequence[str],
) -> tuple[str, tuple[int, ...]]:  # fmt: skip
    """The function of a kernel, which profilers show by what it computes, and its numbers. Of one for many sizes these
    are sizes alone, of 64 bits and whatever they are divisible by: what else is known of the rest, such as that it is
    a multiple of 16, Triton sees by itself."""
    sizes = symbols_in("\n".join((*lines, *map(str, numbers.values()))))
    if sizes:
        casts = [f"{size} = {size}.to(INDEX)" for size in sizes]
        lines = [*casts, *(f"{name} = {number}" for name, number in numbers.items()), *lines]
        numbers = {size: Symbolic.symbol(size, 1) for size in sizes}
    computed = [operation for operation in operations if operation not in UNNAMED] or ["copy"]
    while len(name := "_".join(("fused", *computed))) > LONGEST_NAME:
        computed.pop()
    arguments = [*(f"out{i}" for i in range(outputs)), *(f"in{i}" for i in range(inputs))]
    arguments += [f"{size}: tl.int64" for size in sizes] or numbers
    arguments += [f"{constant}: tl.constexpr" for constant in constants.split()]
    decorator = f"triton.jit(do_not_specialize={[*sizes]})" if sizes else "triton.jit"
    source = f"@{decorator}\ndef {name}({', '.join(arguments)}):\n" + "".join(f"    {line}\n" for line in lines)
    return source, tuple(numbers.values())


def index_type(*extents: int) -> tl.dtype:
    return tl.int32 if max(extents) <= INT32_EXTENT else tl.int64


def pointwise(
    code: Code, stores: Sequence[str], results: Sequence[Result], dtypes: Sequence[torch.dtype], extent: int,
    device: torch.device,
) -> Kernel:  # fmt: skip
    """A kernel that walks over the elements ``x`` in the order of its results' memory.

    ``stores`` are the locals of the results, ``extent`` the number of elements that the memory of a tensor spans.
    """
    lines = [
        "x = tl.program_id(0).to(INDEX) * TILE + tl.arange(0, TILE)",
        "inside = x < n",
        *code.lines,
        *(f"tl.store(out{i} + x, ({t}).to(out{i}.dtype.element_ty), mask=inside)" for i, t in enumerate(stores)),
    ]
    n = code.sizes["x"]
    source, numbers = function_source(code.operations, len(results), len(dtypes), {"n": n}, "INDEX TILE", lines)
    return shared(source, tuple(results), tuple(dtypes), cdiv(n, TILE), numbers, (index_type(extent, n), TILE), device)


def casts(
    results: Sequence[Result], dtypes: Sequence[torch.dtype], counts: Sequence[int], device: torch.device
) -> Kernel:
    """A kernel that gives several tensors other dtypes, each in its own layout. A launch for each of them would take
    longer than a small one itself."""
    lines = ["program = tl.program_id(0)"]
    first = 0
    for i, count in enumerate(counts):
        last = first + cdiv(count, TILE)
        lines += [
            f"if (program >= {first}) & (program < {last}):",
            f"    x{i} = (program - {first}) * TILE + tl.arange(0, TILE)",
            f"    y{i} = tl.load(in{i} + x{i}, mask=x{i} < {count}).to(out{i}.dtype.element_ty)",
            f"    tl.store(out{i} + x{i}, y{i}, mask=x{i} < {count})",
        ]
        first = last
    source, numbers = function_source(("casts",), len(results), len(dtypes), {}, "TILE", lines)
    return shared(source, tuple(results), tuple(dtypes), first, numbers, (TILE,), device)


def reduction(
    code: Code, summed: Sequence[str], finished: Sequence[str], results: Sequence[Result],
    dtypes: Sequence[torch.dtype], extent: int, along: bool, device: torch.device, shared_out: bool = True,
    stores: Sequence[tuple[str, str, Result]] = (),
) -> tuple[Kernel, ...]:  # fmt: skip
    """Kernels that sum expressions over the variable ``r`` for each value of ``x``, an element of the results.

    Where few programs would leave the GPU idle, several share a sum, and a second kernel adds up what each has found,
    always in the same order.

    Args:
        summed: the locals that are added up.
        finished: what is made of each ``total`` of ``count`` elements.
        along: whether neighbouring elements of memory belong to one sum.
        shared_out: whether several programs may share a sum.
        stores: what is stored of each element that is summed: the source of its place, a local, and the result.
    """
    kept, reduced = code.sizes["x"], code.sizes["r"]
    width, depth = reduced_tile(hint(kept), hint(reduced), along, len(dtypes) + len(stores))
    blocks, steps = cdiv(kept, width), cdiv(reduced, depth)
    shares = balanced(hint(blocks), hint(steps), multiprocessors(device)) if shared_out else 1
    chunk = cdiv(cdiv(reduced, shares), depth) * depth
    if type(chunk) is not Symbolic:  # Else some may have nothing to add.
        shares = cdiv(reduced, chunk)
    wide = torch.float64 if torch.float64 in {result.dtype for result in results} else torch.float32
    places = range(len(summed))
    texts = finished if shares == 1 else ["{total}"] * len(finished)
    elements = as_float(reduced, NAMES[wide])
    totals = [text.format(total=f"total{i}", count=elements) for i, text in enumerate(texts)]
    lines = [
        "blocks = tl.cdiv(n, X)",
        "share = tl.program_id(0) // blocks",
        "column = (tl.program_id(0) % blocks).to(INDEX) * X + tl.arange(0, X)",
        "x = column[:, None]",
        "inside_x = x < n",
        *(f"sum{i} = tl.full((X, R), 0.0, {NAMES[wide]})" for i in places),
        "last = tl.minimum((share + 1) * chunk, end)",
        "for start in range(share * chunk, last, R):",
        "    r = (start + tl.arange(0, R)).to(INDEX)[None, :]",
        "    inside_r = r < last",
        "    inside = inside_x & inside_r",
        *(f"    {line}" for line in code.lines),
        *(f"    sum{i} += tl.where(inside, {local}, 0.0)" for i, local in enumerate(summed)),
        *(
            f"    tl.store(out{i} + ({in_block(place)}), ({local}).to(out{i}.dtype.element_ty), mask=inside)"
            for i, (place, local, _) in enumerate(stores, len(summed))
        ),
        *(f"total{i} = tl.sum(sum{i}, 1)" for i in places),
        *(
            f"tl.store(out{i} + share * n + column, ({total}).to(out{i}.dtype.element_ty), mask=column < n)"
            for i, total in enumerate(totals)
        ),
    ]
    count = len(results) + len(stores)
    numbers = {"n": kept, "chunk": chunk, "end": reduced}
    source, given = function_source(code.operations, count, len(dtypes), numbers, "INDEX X R", lines)
    made = list(results) if shares == 1 else [Result((shares, kept), (kept, 1), wide) for _ in results]
    made += [result for *_, result in stores]
    constants = index_type(extent, kept * reduced), width, depth
    first = shared(source, tuple(made), tuple(dtypes), blocks * shares, given, constants, device)
    if shares == 1:
        return (first,)
    second = Code({"x": kept, "r": shares})
    second.operations = code.operations
    place = Index.of("r", shares) * kept + Index.of("x", kept)
    parts = [second.load(f"in{i}", place, "", wide) for i in places]
    texts = [text.replace("{count}", elements) for text in finished]
    return first, *reduction(
        second, parts, texts, results, [wide] * len(parts), shares * kept, False, device, shared_out=False
    )


def reduced_tile(kept: int, reduced: int, along: bool, accesses: int) -> tuple[int, int]:
    """How many sums a program has, and how many elements of each in a step."""
    tile = REDUCED_TILE >> sum(accesses >= limit for limit in MANY)
    if along:
        depth = min(triton.next_power_of_2(reduced), tile)
        return min(triton.next_power_of_2(kept), tile // depth), depth
    width = min(triton.next_power_of_2(kept), CONTIGUOUS)
    return width, min(triton.next_power_of_2(reduced), tile // width)


def in_block(place: str) -> str:
    """The source of a place as one of a block, which that of a tensor of one element is not."""
    return f"{place} + 0 * x" if place.isdigit() else place


def balanced(blocks: int, steps: int, multiprocessors: int) -> int:
    """How many programs share each of so many blocks of sums, of so many steps."""
    most = max(1, steps // LEAST)
    wanted = min(most, cdiv(PROGRAMS * multiprocessors, blocks))

    def longest(shares: int) -> float:
        """The programs of the multiprocessor that has most, as a multiple of the mean."""
        return cdiv(blocks * shares, multiprocessors) * multiprocessors / (blocks * shares)

    return min(range(wanted, min(most, 4 * wanted) + 1), key=lambda shares: (max(longest(shares), EVEN), shares))


def rows(
    code: Code, stores: Sequence[tuple[int, str, str, bool]], results: Sequence[Result], dtypes: Sequence[torch.dtype],
    extent: int, device: torch.device,
) -> Kernel:  # fmt: skip
    """A kernel that has rows ``x`` of elements ``r`` in registers, and so may use their sums.

    ``stores`` are the number of a result, the source of a place in it, a local, and whether that has one element for
    each row only.
    """
    kept, length = code.sizes["x"], code.sizes["r"]
    depth = triton.next_power_of_2(hint(length))
    if is_less(depth, length):
        raise ValueError(f"rows of {length} elements in {depth} places")
    width = min(triton.next_power_of_2(hint(kept)), max(1, ROW_TILE // depth))
    lines = [
        "x = (tl.program_id(0).to(INDEX) * X + tl.arange(0, X))[:, None]",
        "r = tl.arange(0, R).to(INDEX)[None, :]",
        "inside_x = x < n",
        "inside_r = r < end",
        "inside = inside_x & inside_r",
        *code.lines,
    ]
    for i, place, local, of_row in stores:
        place, mask = (f"({place}) + 0 * r", "inside & (r == 0)") if of_row else (f"({in_block(place)})", "inside")
        lines.append(f"tl.store(out{i} + {place}, ({local}).to(out{i}.dtype.element_ty), mask={mask})")
    sizes = {"n": kept, "end": length}
    source, numbers = function_source(code.operations, len(results), len(dtypes), sizes, "INDEX X R", lines)
    constants = index_type(extent, kept * length), width, depth
    warps = max(WARPS, depth * width // (32 * ELEMENTS))
    return shared(source, tuple(results), tuple(dtypes), cdiv(kept, width), numbers, constants, device, warps)


@lru_cache(maxsize=4096)
def shared(
    source: str, results: tuple[Result, ...], dtypes: tuple[torch.dtype, ...], programs: int, numbers: tuple[int, ...],
    constants: tuple[Any, ...], device: torch.device, warps: int = WARPS,
) -> Kernel:  # fmt: skip
    """The one kernel of this description."""
    return Kernel(source, results, dtypes, programs, numbers, constants, device, warps)


def compile_together(kernels: Sequence[Kernel]) -> None:
    """Compile kernels, several at the same time."""
    if kernels and not INTERPRETED:
        with ThreadPoolExecutor(min(len(kernels), os.cpu_count() or 1)) as pool:
            list(pool.map(Kernel.compile, kernels))

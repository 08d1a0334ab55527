"""Kernels that are generated: pointwise operations, sums of them, and both in one where a row fits into registers.

A caller writes the body of a kernel as :class:`Code`, value by value; :data:`FORMULAS` has torch's operations as
Triton. Numbers of 16 bits are computed in float32 and rounded wherever torch rounds, products are not contracted with
sums, and divisions and roots round to nearest, so that a result differs from torch's by what a transcendental function
differs. The number of elements is an argument of the kernel: batches of another size share its code.
"""

from __future__ import annotations

import linecache
import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from fastlayers.kernels.affine import Index
from fastlayers.kernels.indexing import INT32_EXTENT
from fastlayers.kernels.launch import Launch, Producer, Result, cdiv, multiprocessors

__all__ = [
    "COMPARISONS",
    "FAST",
    "FORMULAS",
    "IMPORTS",
    "INTERPRETED",
    "LONGEST_ROW",
    "NAMES",
    "ROUNDED",
    "ROWS",
    "SUMS",
    "TESTS",
    "Code",
    "Kernel",
    "Result",
    "accumulator_of",
    "balanced",
    "casts",
    "compile_together",
    "number",
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

NAMES = {
    torch.float64: "tl.float64", torch.float32: "tl.float32", torch.float16: "tl.float16",
    torch.bfloat16: "tl.bfloat16", torch.bool: "tl.int1", torch.int64: "tl.int64", torch.int32: "tl.int32",
    torch.int16: "tl.int16", torch.int8: "tl.int8", torch.uint8: "tl.uint8",
}  # fmt: skip
ROUNDED = (torch.float16, torch.bfloat16)
#: Whether Triton interprets kernels, on a CPU.
INTERPRETED = triton.knobs.runtime.interpret


def accumulator_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a value is computed."""
    return torch.float32 if dtype in ROUNDED else dtype


# -- formulas ----------------------------------------------------------------------------------------------------------

#: What a kernel may use.
IMPORTS = """\
import triton
import triton.language as tl
from triton.language.extra import libdevice

from fastlayers.kernels.activations import fast_exp, fast_normal_cdf, fast_sigmoid, tanh, twice_inner
"""
_scope: dict[str, Any] = {}
exec(IMPORTS, _scope)


def call(name: str, x: str) -> str:
    """A function of one number, as accurate as torch's. The interpreter has no libdevice."""
    if not INTERPRETED:
        return f"libdevice.{name}({x})"
    return f"tanh({x})" if name == "tanh" else f"tl.{name}({x})"


def number(value: Any, acc: torch.dtype = torch.float32) -> str:
    """A number as source. Triton takes one that fits for float32."""
    value = float(value)
    text = f'float("{value}")' if math.isinf(value) or math.isnan(value) else f"({value!r})"
    return f"tl.full((), {text}, tl.float64)" if acc is torch.float64 else text


def divided(a: str, b: str, acc: torch.dtype) -> str:
    return f"({a} / {b})" if acc is torch.float64 else f"tl.div_rn({a}, {b})"


def reciprocal(value: float, acc: torch.dtype) -> float:
    """What torch multiplies by where it divides by a number."""
    return float(1 / torch.tensor(value, dtype=acc)) if value else math.copysign(math.inf, value)


#: torch has a float32 of it for every dtype.
SIXTH = reciprocal(6, torch.float32)


def sigmoid(z: str, acc: torch.dtype) -> str:
    return divided(number(1, acc), f"(1.0 + {call('exp', f'-{z}')})", acc)


def power(x: str, exponent: float, acc: torch.dtype) -> str | None:
    exact: dict[float, str] = {
        1: x,
        2: f"({x} * {x})",
        3: f"({x} * {x} * {x})",
        0.5: root(x, acc),
        -0.5: call("rsqrt", x),
    }
    inverse: dict[float, str] = {-1: x, -2: f"({x} * {x})"}
    if exponent in inverse:
        return divided(number(1, acc), inverse[exponent], acc)
    return exact.get(exponent)


def root(x: str, acc: torch.dtype) -> str:
    return f"tl.sqrt({x})" if acc is torch.float64 else f"tl.sqrt_rn({x})"


def scaled(x: str, factor: Any, acc: torch.dtype) -> str:
    return x if factor == 1 else f"({x} * {number(factor, acc)})"


def between(x: str, low: Any, high: Any, acc: torch.dtype) -> str:
    if low is not None:
        x = f"tl.maximum({x}, {number(low, acc)}, propagate_nan=tl.PropagateNan.ALL)"
    return x if high is None else f"tl.minimum({x}, {number(high, acc)}, propagate_nan=tl.PropagateNan.ALL)"


def normal_area(x: str, acc: torch.dtype) -> str:
    """The share of a normal distribution below x."""
    return f"(0.5 * (1.0 + {call('erf', scaled(x, math.sqrt(0.5), acc))}))"


def inner_of_gelu(x: str, acc: torch.dtype) -> str:
    return scaled(f"({x} + {scaled(f'{x} * {x} * {x}', 0.044715, acc)})", math.sqrt(2 / math.pi), acc)


def gelu(x: str, acc: torch.dtype, approximate: str) -> str:
    if approximate == "tanh":
        return f"(0.5 * {x} * (1.0 + {call('tanh', inner_of_gelu(x, acc))}))"
    return f"({x} * {normal_area(x, acc)})"


def gelu_backward(dy: str, x: str, acc: torch.dtype, approximate: str) -> str:
    if approximate == "tanh":
        t = call("tanh", inner_of_gelu(x, acc))
        slope = scaled(f"(1.0 + {scaled(f'{x} * {x}', 3 * 0.044715, acc)})", math.sqrt(2 / math.pi), acc)
        return f"({dy} * (0.5 * (1.0 + {t}) + 0.5 * {x} * (1.0 - {t} * {t}) * {slope}))"
    density = scaled(call("exp", f"-0.5 * {x} * {x}"), 1 / math.sqrt(2 * math.pi), acc)
    return f"({dy} * ({normal_area(x, acc)} + {x} * {density}))"


#: torch's operations: from the operands as source, the dtype of the computation, and torch's other arguments. Operands
#: are locals, which may be named more than once. A formula may be None for arguments that it has no source for.
FORMULAS: dict[str, Callable[..., str | None]] = {
    "add.Tensor": lambda acc, a, b, alpha=1: f"({a} + {scaled(b, alpha, acc)})",
    "add.Scalar": lambda acc, a, b, alpha=1: f"({a} + {number(b * alpha, acc)})",
    "sub.Tensor": lambda acc, a, b, alpha=1: f"({a} - {scaled(b, alpha, acc)})",
    "sub.Scalar": lambda acc, a, b, alpha=1: f"({a} - {number(b * alpha, acc)})",
    "rsub.Scalar": lambda acc, a, b, alpha=1: f"({number(b, acc)} - {scaled(a, alpha, acc)})",
    "mul.Tensor": lambda acc, a, b: f"({a} * {b})",
    "mul.Scalar": lambda acc, a, b: scaled(a, b, acc),
    "div.Tensor": lambda acc, a, b: divided(a, b, acc),
    "div.Scalar": lambda acc, a, b: scaled(a, reciprocal(b, acc), acc),
    "addcmul": lambda acc, a, b, c, value=1: f"({a} + {scaled(b, value, acc)} * {c})",
    "addcdiv": lambda acc, a, b, c, value=1: f"({a} + {divided(scaled(b, value, acc), c, acc)})",
    "neg": lambda acc, x: f"(-{x})",
    "abs": lambda acc, x: f"tl.abs({x})",
    "exp": lambda acc, x: call("exp", x),
    "log": lambda acc, x: call("log", x),
    "sin": lambda acc, x: call("sin", x),
    "cos": lambda acc, x: call("cos", x),
    "erf": lambda acc, x: call("erf", x),
    "tanh": lambda acc, x: call("tanh", x),
    "sqrt": lambda acc, x: root(x, acc),
    "rsqrt": lambda acc, x: call("rsqrt", x),
    "square": lambda acc, x: f"({x} * {x})",
    "floor": lambda acc, x: f"tl.floor({x})",
    "ceil": lambda acc, x: f"tl.ceil({x})",
    "reciprocal": lambda acc, x: power(x, -1, acc),
    "pow.Tensor_Scalar": lambda acc, x, exponent: power(x, exponent, acc),
    "sigmoid": lambda acc, x: sigmoid(x, acc),
    "relu": lambda acc, x: f"tl.where({x} <= 0, 0.0, {x})",
    "silu": lambda acc, x: divided(x, f"(1.0 + {call('exp', f'-{x}')})", acc),
    "gelu": lambda acc, x, approximate="none": gelu(x, acc, approximate),
    "hardtanh": lambda acc, x, low=-1, high=1: between(x, low, high, acc),
    "clamp": lambda acc, x, min=None, max=None: between(x, min, max, acc),
    "clamp_min": lambda acc, x, min: between(x, min, None, acc),
    "clamp_max": lambda acc, x, max: between(x, None, max, acc),
    "hardsigmoid": lambda acc, x: scaled(between(f"{x} + 3.0", 0, 6, acc), SIXTH, acc),
    "hardswish": lambda acc, x: scaled(f"({x} * {between(f'{x} + 3.0', 0, 6, acc)})", SIXTH, acc),
    "leaky_relu": lambda acc, x, slope=0.01: f"tl.where({x} > 0, {x}, {scaled(x, slope, acc)})",
    "minimum": lambda acc, a, b: f"tl.minimum({a}, {b}, propagate_nan=tl.PropagateNan.ALL)",
    "maximum": lambda acc, a, b: f"tl.maximum({a}, {b}, propagate_nan=tl.PropagateNan.ALL)",
    "sigmoid_backward": lambda acc, dy, y: f"({dy} * (1.0 - {y}) * {y})",
    "tanh_backward": lambda acc, dy, y: f"({dy} * (1.0 - {y} * {y}))",
    "silu_backward": lambda acc, dy, x: f"({dy} * {sigmoid(x, acc)} * (1.0 + {x} * (1.0 - {sigmoid(x, acc)})))",
    "gelu_backward": lambda acc, dy, x, approximate="none": gelu_backward(dy, x, acc, approximate),
    "threshold_backward": lambda acc, dy, x, threshold: f"tl.where({x} <= {number(threshold, acc)}, 0.0, {dy})",
    "hardtanh_backward": lambda acc, dy, x, low, high: (
        f"tl.where(({x} <= {number(low, acc)}) | ({x} >= {number(high, acc)}), 0.0, {dy})"
    ),
    "hardsigmoid_backward": lambda acc, dy, x: f"tl.where(({x} > -3.0) & ({x} < 3.0), {scaled(dy, SIXTH, acc)}, 0.0)",
    "hardswish_backward": lambda acc, dy, x: (
        f"tl.where({x} <= -3.0, 0.0, tl.where({x} < 3.0, {dy} * ({divided(x, number(3, acc), acc)} + 0.5), {dy}))"
    ),
    "leaky_relu_backward": lambda acc, dy, x, slope, is_result: f"tl.where({x} > 0, {dy}, {scaled(dy, slope, acc)})",
    "native_dropout_backward": lambda acc, dy, mask, scale: f"({mask} * {dy} * {number(scale, acc)})",
}


def fast_gelu(acc: torch.dtype, x: str, approximate: str = "none") -> str:
    share = f"fast_normal_cdf({x})" if approximate == "none" else f"fast_sigmoid(twice_inner({x}))"
    return f"({x} * {share})"


def fast_gelu_backward(acc: torch.dtype, dy: str, x: str, approximate: str = "none") -> str:
    if approximate == "none":
        return f"({dy} * (fast_normal_cdf({x}) + {x} * {1 / math.sqrt(2 * math.pi)} * fast_exp(-0.5 * {x} * {x})))"
    share = f"fast_sigmoid(twice_inner({x}))"
    slope = f"{2 * math.sqrt(2 / math.pi)} * (1.0 + {3 * 0.044715} * {x} * {x})"
    return f"({dy} * ({share} + {x} * {share} * (1.0 - {share}) * {slope}))"


#: Formulas for results that are rounded to 16 bits, in fewer instructions.
FAST: dict[str, Callable[..., str]] = {
    "div.Tensor": lambda acc, a, b: f"({a} / {b})",
    "exp": lambda acc, x: f"fast_exp({x})",
    "sigmoid": lambda acc, x: f"fast_sigmoid({x})",
    "silu": lambda acc, x: f"({x} * fast_sigmoid({x}))",
    "silu_backward": lambda acc, dy, x: f"({dy} * fast_sigmoid({x}) * (1.0 + {x} * (1.0 - fast_sigmoid({x}))))",
    "gelu": fast_gelu,
    "gelu_backward": fast_gelu_backward,
}

#: Comparisons, of operands in their common dtype.
COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}

#: Tests of one number.
TESTS = {"isneginf": '({x} == float("-inf"))', "isposinf": '({x} == float("inf"))', "isnan": "({x} != {x})"}

#: Reductions: what an element contributes, and what is made of the total of all, whose number is ``count``. Those of
#: conditions count the elements that decide.
SUMS: dict[str, tuple[str, str]] = {
    "sum.dim_IntList": ("{x}", "{total}"),
    "mean.dim": ("{x}", "{total} / {count}"),
    "linalg_vector_norm": ("({x} * {x})", "tl.sqrt({total})"),
    "all.dim": ("tl.where({x} == 0, 1.0, 0.0)", "{total} == 0"),
    "any.dim": ("tl.where({x} == 0, 0.0, 1.0)", "{total} > 0"),
}


def softmax_of_rows(code: Code, acc: torch.dtype, x: str) -> str:
    high = code.let(f'tl.max(tl.where(inside, {x}, float("-inf")), 1)[:, None]')
    part = code.let(f"tl.where(inside, {call('exp', f'{x} - {high}')}, 0.0)")
    return code.let(divided(part, f"tl.sum({part}, 1)[:, None]", acc))


def safe_softmax_of_rows(code: Code, acc: torch.dtype, x: str) -> str:
    """Rows of nothing but -inf are 0, as scaled_dot_product_attention has them."""
    share = softmax_of_rows(code, acc, x)
    count = code.total(f'tl.where({x} != float("-inf"), 1.0, 0.0)')
    return code.let(f"tl.where({count} == 0, 0.0, {share})")


def softmax_backward_of_rows(code: Code, acc: torch.dtype, dy: str, y: str) -> str:
    product = code.let(f"{dy} * {y}")
    return code.let(f"{product} - {y} * {code.total(product)}")


#: Operations that need a whole row of their operands for an element of their result.
ROWS: dict[str, Callable[..., str]] = {
    "_softmax": softmax_of_rows,
    "_safe_softmax": safe_softmax_of_rows,
    "_softmax_backward_data": softmax_backward_of_rows,
}


# -- code --------------------------------------------------------------------------------------------------------------


class Code:
    """The body of a kernel, each value computed once.

    Args:
        sizes: how many values each variable of the loop has.
        in_rows: whether a program has rows ``x`` of elements ``r`` in registers.
    """

    def __init__(self, sizes: dict[str, int], in_rows: bool = False) -> None:
        self.sizes, self.in_rows = sizes, in_rows
        self.lines: list[str] = []
        self.operations: dict[str, None] = {}
        self._known: dict[str, str] = {}

    def stands_for(self, operation: str) -> None:
        """Note an operation that this computes, for the name of the kernel, which profilers show."""
        self.operations[operation.partition(".")[0].strip("_")] = None

    def let(self, expression: str) -> str:
        """A local of this value."""
        if expression not in self._known:
            self._known[expression] = name = f"t{len(self._known)}"
            self.lines.append(f"{name} = {expression}")
        return self._known[expression]

    def load(self, pointer: str, place: Index, condition: str, dtype: torch.dtype) -> str:
        """An element, in the dtype of its computation; 0 where the condition does not hold."""
        mask, at = f"inside & {condition}" if condition else self.within(place), place.source(self.sizes)
        if mask == "inside_r" and self.in_rows:
            # In the shape of the rows: Triton computes in the layout of what is read, and one row alone has another.
            mask, at = "inside", f"{at} + 0 * x"
        if condition and not {"x", "r"}.intersection(place.variables):
            at = f"{at} + 0 * x"  # The place of one element, or one that is read: Triton wants a block, as the mask is.
        loaded = f"tl.load({pointer} + ({at}), mask={mask}, other=0)"
        if not place.terms and not condition:
            loaded = f"tl.load({pointer} + {place.constant})"
        if dtype is torch.bool:
            return self.let(f"{loaded} != 0")
        return self.let(f"{loaded}.to({NAMES[accumulator_of(dtype)]})")

    def total(self, local: str) -> str:
        """A local of the sum of a row that a program has in registers."""
        return self.let(f"tl.sum(tl.where(inside, {local}, 0.0), 1)[:, None]")

    def cast(self, local: str, source: torch.dtype, target: torch.dtype) -> str:
        """A local as the accumulator of another dtype."""
        source, target = accumulator_of(source), accumulator_of(target)
        if source is target:
            return local
        return self.let(f"({local} != 0)" if target is torch.bool else f"{local}.to({NAMES[target]})")

    def rounded(self, expression: str, dtype: torch.dtype) -> str:
        """A local of an expression, rounded as torch rounds a result of this dtype."""
        if dtype in ROUNDED:
            return self.let(f"({expression}).to({NAMES[dtype]}).to(tl.float32)")
        return self.let(expression)

    def within(self, place: Index) -> str:
        """The condition that the variables of a place are in range: an operand of rows may be the same in all columns,
        or in all rows, and is then read once."""
        used = place.variables
        return f"inside_{''.join(used)}" if "r" in self.sizes and len(used) == 1 else "inside"

    def offset(self, index: Index, size: int) -> Index:
        """An index that a condition keeps below a size, as one of a variable of its own: what it is divided by later
        knows its range then."""
        if not index.terms or (index.least >= 0 and index.most < size):
            return index
        return self.variable(index.source(self.sizes), size)

    def variable(self, expression: str, size: int) -> Index:
        """The index that an expression gives, which a condition keeps below a size."""
        self.sizes[f"({expression})"] = size
        return Index.of(f"({expression})", size)

    def holds(self, index: Index, low: int, high: int) -> str | None:
        """The condition low <= index < high; empty if it always holds, None if it never does."""
        if index.most < low or index.least >= high:
            return None
        place = self.let(index.source(self.sizes)) if index.terms else str(index.constant)
        tests = [f"({place} >= {low})"] if index.least < low else []
        tests += [f"({place} < {high})"] if index.most >= high else []
        return self.let(" & ".join(tests)) if tests else ""


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
        numbers: arguments that the code does not depend on.
        constants: those that it does depend on.
        warps: those of a program.
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

    @cached_property
    def launch(self) -> Launch:  # type: ignore[override]
        """The launch of its function, which Triton is not given before: most of what is considered is not used."""
        return Launch(compiled(self.source), *self._arguments, self._warps, exact=True)

    def at(self, place: str) -> Kernel:
        """The same kernel, whose name also says where what it computes is written."""
        source = self.source.replace(self.__name__, f"{self.__name__}__{place}", 1)
        return shared(source, self.results, self.dtypes, *self._arguments, self.device, self._warps)

    def compile(self) -> None:
        """Compile it for aligned inputs, as its first call would."""
        tensors = *(result.dtype for result in self.results), *self.dtypes
        programs, numbers, constants = self._arguments
        self.launch.function.warmup(
            *tensors, *numbers, *constants, grid=(programs,), num_warps=self._warps, enable_fp_fusion=False
        )


def function_source(
    operations: Iterable[str], outputs: int, inputs: int, numbers: str, constants: str, lines: Sequence[str]
) -> str:
    """The function of a kernel, which profilers show by what it computes."""
    computed = [operation for operation in operations if operation not in UNNAMED] or ["copy"]
    while len(name := "_".join(("fused", *computed))) > LONGEST_NAME:
        computed.pop()
    arguments = [*(f"out{i}" for i in range(outputs)), *(f"in{i}" for i in range(inputs)), *numbers.split(", ")]
    arguments += [f"{constant}: tl.constexpr" for constant in constants.split()]
    return f"@triton.jit\ndef {name}({', '.join(filter(None, arguments))}):\n" + "".join(
        f"    {line}\n" for line in lines
    )


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
    source = function_source(code.operations, len(results), len(dtypes), "n", "INDEX TILE", lines)
    return shared(source, tuple(results), tuple(dtypes), cdiv(n, TILE), (n,), (index_type(extent, n), TILE), device)


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
    source = function_source(("casts",), len(results), len(dtypes), "", "TILE", lines)
    return shared(source, tuple(results), tuple(dtypes), first, (), (TILE,), device)


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
    tile = REDUCED_TILE >> sum(len(dtypes) + len(stores) >= limit for limit in MANY)
    if along:
        depth = min(triton.next_power_of_2(reduced), tile)
        width = min(triton.next_power_of_2(kept), tile // depth)
    else:
        width = min(triton.next_power_of_2(kept), CONTIGUOUS)
        depth = min(triton.next_power_of_2(reduced), tile // width)
    blocks = cdiv(kept, width)
    shares = balanced(blocks, cdiv(reduced, depth), multiprocessors(device)) if shared_out else 1
    chunk = cdiv(cdiv(reduced, shares), depth) * depth
    shares = cdiv(reduced, chunk)
    wide = torch.float64 if torch.float64 in {result.dtype for result in results} else torch.float32
    places = range(len(summed))
    texts = finished if shares == 1 else ["{total}"] * len(finished)
    totals = [text.format(total=f"total{i}", count=float(reduced)) for i, text in enumerate(texts)]
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
    source = function_source(code.operations, count, len(dtypes), "n, chunk, end", "INDEX X R", lines)
    made = list(results) if shares == 1 else [Result((shares, kept), (kept, 1), wide) for _ in results]
    made += [result for *_, result in stores]
    constants = index_type(extent, kept * reduced), width, depth
    first = shared(source, tuple(made), tuple(dtypes), blocks * shares, (kept, chunk, reduced), constants, device)
    if shares == 1:
        return (first,)
    second = Code({"x": kept, "r": shares})
    second.operations = code.operations
    place = Index.of("r", shares) * kept + Index.of("x", kept)
    parts = [second.load(f"in{i}", place, "", wide) for i in places]
    texts = [text.replace("{count}", str(float(reduced))) for text in finished]
    return first, *reduction(
        second, parts, texts, results, [wide] * len(parts), shares * kept, False, device, shared_out=False
    )


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
    depth = triton.next_power_of_2(length)
    width = min(triton.next_power_of_2(kept), max(1, ROW_TILE // depth))
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
    source = function_source(code.operations, len(results), len(dtypes), "n, end", "INDEX X R", lines)
    constants = index_type(extent, kept * length), width, depth
    warps = max(WARPS, depth * width // (32 * ELEMENTS))
    return shared(source, tuple(results), tuple(dtypes), cdiv(kept, width), (kept, length), constants, device, warps)


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

"""The body of a generated kernel: :data:`FORMULAS` has torch's operations as Triton, :class:`Code` the values.

Numbers of 16 bits are computed in float32 and rounded wherever torch rounds, products are not contracted with sums, and
divisions and roots round to nearest, so that a result differs from torch's by what a transcendental function differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import triton

from fastlayers.kernels.affine import Index
from fastlayers.kernels.symbolic import is_surely_less

__all__ = [
    "COMPARISONS",
    "FAST",
    "FORMULAS",
    "INTERPRETED",
    "NAMES",
    "ROUNDED",
    "ROWS",
    "SUMS",
    "TESTS",
    "Code",
    "accumulator_of",
    "number",
]

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
        if not index.terms or (is_surely_less(-1, index.least) and is_surely_less(index.most, size)):
            return index
        return self.variable(index.source(self.sizes), size)

    def variable(self, expression: str, size: int) -> Index:
        """The index that an expression gives, which a condition keeps below a size."""
        self.sizes[f"({expression})"] = size
        return Index.of(f"({expression})", size)

    def holds(self, index: Index, low: int, high: int) -> str | None:
        """The condition low <= index < high; empty if it always holds, None if it never does."""
        if is_surely_less(index.most, low) or is_surely_less(high - 1, index.least):
            return None
        place = self.let(index.source(self.sizes)) if index.terms else str(index.constant)
        tests = [] if is_surely_less(low - 1, index.least) else [f"({place} >= {low})"]
        tests += [] if is_surely_less(index.most, high) else [f"({place} < {high})"]
        return self.let(" & ".join(tests)) if tests else ""

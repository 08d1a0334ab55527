"""Random calls of every op: shapes, strides, storage offsets, dtypes and options, as strategies of hypothesis.

A call is a :class:`Sample` whose parts can be written as JSON, so that one that failed is kept as a line of text,
whatever becomes of the strategies.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.table.activations import BARE, STOCK_ACTS, times
from tests.table.batch_norm import ACTIVATIONS
from tests.table.divergences import log_probabilities, rows_ignored
from tests.table.elementwise import few_values
from tests.table.losses import classes, some_ignored
from tests.table.sample import FLOATING, Input, Op, Sample, constant, keep_most, normal, positive

Draw = Callable[[Any], Any]

# ---- tensors ---------------------------------------------------------------------------------------------------------

VALUES: dict[str, Callable[..., Any]] = {
    "normal": lambda: normal,
    "positive": lambda: positive,
    "times": times,
    "constant": constant,
    "classes": classes,
    "some_ignored": some_ignored,
    "rows_ignored": lambda: rows_ignored,
    "keep_most": lambda: keep_most,
    "few_values": lambda: few_values,
    "log_probabilities": lambda: log_probabilities,
}


@dataclass(frozen=True)
class Values:
    """What a tensor holds: a function of ``VALUES``, and its arguments."""

    name: str
    arguments: tuple[Any, ...] = ()

    def __call__(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return VALUES[self.name](*self.arguments)(shape, generator)


NORMAL = Values("normal")


@dataclass(frozen=True)
class Layout:
    """Where the elements of a tensor lie.

    Attributes:
        order: its dimensions, from the outermost in memory to the innermost.
        steps: along each dimension, every how many elements of memory there is one of the tensor.
        rest: along each dimension, elements of memory past the last one.
        repeated: dimensions of stride 0.
        offset: of the first element in the storage.
    """

    order: tuple[int, ...]
    steps: tuple[int, ...]
    rest: tuple[int, ...]
    repeated: tuple[int, ...] = ()
    offset: int = 0

    def __call__(self, t: Tensor) -> Tensor:
        """The same values in this layout; NaN between them, which no result may depend on."""
        strides, size = [0] * t.dim(), 1
        for d in reversed(self.order):
            if d not in self.repeated:
                strides[d] = size * self.steps[d]
                size *= t.shape[d] * self.steps[d] + self.rest[d]
        whole = t.new_full((self.offset + size,), math.nan if t.is_floating_point() else 0)
        first = t
        for d in self.repeated:
            first = first.narrow(d, 0, min(1, t.shape[d]))
        whole.as_strided(first.shape, strides, self.offset).copy_(first)
        return whole.as_strided(t.shape, strides, self.offset)


def dense(dims: int, offset: int = 0, order: Sequence[int] | None = None) -> Layout:
    return Layout(tuple(range(dims) if order is None else order), (1,) * dims, (0,) * dims, (), offset)


# ---- as text ---------------------------------------------------------------------------------------------------------


def encoded(value: Any) -> Any:
    """An argument as JSON has it."""
    if isinstance(value, torch.dtype):
        return {"dtype": str(value)[6:]}
    if isinstance(value, tuple):
        return {"tuple": [encoded(each) for each in value]}
    if isinstance(value, Input):
        return {"input": {
            "shape": value.shape, "layout": asdict(value.layout), "grad": value.grad,
            "values": [value.values.name, *value.values.arguments],
            "dtype": None if value.dtype is None else str(value.dtype)[6:],
        }}  # fmt: skip
    return value


def decoded(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, what),) = value.items()
    if kind == "dtype":
        return getattr(torch, what)
    if kind == "tuple":
        return tuple(map(decoded, what))
    layout = Layout(**{
        name: tuple(given) if isinstance(given, list) else given for name, given in what["layout"].items()
    })  # fmt: skip
    name, *arguments = what["values"]
    dtype = None if what["dtype"] is None else getattr(torch, what["dtype"])
    return Input(tuple(what["shape"]), layout, Values(name, tuple(arguments)), what["grad"], dtype)


@dataclass(frozen=True)
class Case:
    """A call of an op in a dtype."""

    op: str
    dtype: torch.dtype
    sample: Sample

    def line(self, place: str) -> str:
        """The case as a line of JSON, with the place where it ran."""
        arguments = [encoded(value) for value in self.sample.args]
        options = {name: encoded(value) for name, value in self.sample.kwargs.items()}
        return json.dumps({
            "op": self.op, "place": place, "dtype": str(self.dtype)[6:], "name": self.sample.name, "args": arguments,
            "kwargs": options,
        })  # fmt: skip

    @classmethod
    def read(cls, line: str) -> tuple[Case, str]:
        """The case of such a line, and its place."""
        given = json.loads(line)
        arguments = tuple(map(decoded, given["args"]))
        options = {name: decoded(value) for name, value in given["kwargs"].items()}
        case = cls(given["op"], getattr(torch, given["dtype"]), Sample(given["name"], arguments, options))
        return case, given["place"]


# ---- sizes and layouts -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """How large tensors get: elements of one, the longest row, and the longest one in a few cases."""

    elements: int = 2**16
    row: int = 2049
    long_row: int = 40_000


def chance(draw: Draw, percent: int) -> bool:
    """True in so many cases of 100; False is what a case is reduced to."""
    return draw(st.integers(0, 99)) >= 100 - percent


def one_of(draw: Draw, *choices: Any) -> Any:
    return draw(st.sampled_from(choices))


def length(draw: Draw, sizes: Sizes, least: int = 1) -> int:
    """The length of a row: small, on either side of a power of 2, or a multiple of a vector."""
    kind = draw(st.integers(0, 9))
    if kind < 4:
        return least + draw(st.integers(0, 15))
    if kind < 6:
        return max(least, 2 ** draw(st.integers(3, int(math.log2(sizes.row)))) + draw(st.integers(-1, 1)))
    if kind < 8:
        return 8 * draw(st.integers(1, sizes.row // 8))
    return max(least, draw(st.integers(1, sizes.long_row if chance(draw, 15) else sizes.row)))


def lead(draw: Draw, dims: int, inner: int, sizes: Sizes, most: int = 40) -> tuple[int, ...]:
    """Sizes of the dimensions in front of ``inner`` elements."""
    left, found = max(1, sizes.elements // inner), []
    if dims == 1 and chance(draw, 10):
        return (draw(st.integers(1, min(left, 3000))),)
    for _ in range(dims):
        found.append(draw(st.integers(1, max(1, min(left, most if dims == 1 else 9)))))
        left //= found[-1]
    return tuple(found)


def rows(draw: Draw, sizes: Sizes, least: int = 1, dims: tuple[int, int] = (1, 3)) -> tuple[int, ...]:
    """A shape whose last dimension is a row."""
    n = length(draw, sizes, least)
    return (*lead(draw, draw(st.integers(*dims)) - 1, n, sizes), n)


def image(draw: Draw, sizes: Sizes, spatial: tuple[int, int] = (2, 2), least: int = 1) -> tuple[int, ...]:
    """(N, C, ...) with so many dimensions of space, and ``least`` elements or more in each channel of an image."""
    n, dims = draw(st.integers(1, 5)), draw(st.integers(*spatial))
    side = 24 if dims == 2 else 7 if dims == 3 else 200
    space = [draw(st.integers(1, side)) for _ in range(dims)]
    if math.prod(space) < least:
        space[-1] = least
    left = max(1, min(160, sizes.elements // (n * math.prod(space))))
    channels = draw(st.integers(1, left))
    return (n, 8 * -(-channels // 8) if channels > 4 and chance(draw, 50) else channels, *space)


def layout(draw: Draw, shape: tuple[int, ...], wild: bool = True) -> Layout:
    """A layout: mostly dense; ``wild`` ones have any order, gaps and repeated elements too."""
    dims = len(shape)
    order, steps, rest, repeated = list(range(dims)), [1] * dims, [0] * dims, ()
    if dims > 2 and chance(draw, 25):  # channels_last
        order = [0, *range(2, dims), 1]
    elif wild and dims > 1 and chance(draw, 25):
        order = list(draw(st.permutations(order)))
    if wild and dims and chance(draw, 25):
        rest[draw(st.integers(0, dims - 1))] = draw(st.integers(1, 16))
    if wild and dims and chance(draw, 8):
        steps[draw(st.integers(0, dims - 1))] = 2
    if wild and dims and chance(draw, 10):
        repeated = (draw(st.integers(0, dims - 1)),)
    offset = draw(st.integers(1, 9)) if chance(draw, 30) else 0
    return Layout(tuple(order), tuple(steps), tuple(rest), repeated, offset)


def values(draw: Draw) -> Values:
    """Mostly normal ones; also small, and larger ones."""
    return Values("times", (one_of(draw, 1e-2, 3.0),)) if chance(draw, 20) else NORMAL


def tensor(draw: Draw, shape: tuple[int, ...], wild: bool = True, of: Values | None = None, **options: Any) -> Input:
    return Input(shape, layout(draw, shape, wild), of or values(draw), **options)


def parameter(draw: Draw, shape: tuple[int, ...], of: Values = NORMAL, **options: Any) -> Input:
    """A weight or a bias: dense, at any offset, and now and then strided, which no kernel takes."""
    offset = draw(st.integers(1, 9)) if chance(draw, 25) else 0
    where = dense(len(shape), offset)
    if shape and chance(draw, 3):
        where = Layout(where.order, (*where.steps[:-1], 2), where.rest, (), offset)
    grad = options.pop("grad", True) and not chance(draw, 8)
    return Input(shape, where, of, grad, **options)


# ---- ops -------------------------------------------------------------------------------------------------------------
# Each builder draws the arguments of a call: (args, kwargs).

Arguments = tuple[Any, ...]
#: Rows of a norm have no fewer elements, but for one: of two or three the deviation may be anything, and the error with
#: it, so that one draw says nothing about the next.
LEAST = 5


def softmax(draw: Draw, sizes: Sizes) -> Arguments:
    shape = rows(draw, sizes, dims=(1, 4))
    dim = len(shape) - 1 if chance(draw, 75) else draw(st.integers(0, len(shape) - 1))
    if dim < len(shape) - 1 and chance(draw, 60):
        shape = (*shape[:dim], shape[-1], *shape[dim + 1 : -1], shape[dim])
    kwargs: dict[str, Any] = {}
    if chance(draw, 30):
        kwargs["scale"] = one_of(draw, 0.125, -2.0, 0.3)
    if chance(draw, 35):
        of = tuple(n if chance(draw, 60) else 1 for n in shape)
        of = of[draw(st.integers(0, len(of) - 1)) :] if chance(draw, 30) else of
        if chance(draw, 50):
            kwargs["mask"] = tensor(draw, of, of=Values("keep_most"), grad=False)
        else:
            # Added to all of a row a number changes nothing, and its gradient is noise.
            whole = len(of) > len(shape) - 1 - dim and of[dim - len(shape)] > 1
            kwargs["mask"] = tensor(draw, of, of=NORMAL, grad=whole and chance(draw, 50))
    return (tensor(draw, shape), dim), kwargs


def pair(draw: Draw, sizes: Sizes, broadcasts: int = 15) -> tuple[Input, Input]:
    shape = rows(draw, sizes, dims=(1, 5))
    shapes = [shape, shape]
    if chance(draw, broadcasts):
        smaller = tuple(1 if chance(draw, 40) else n for n in shape)
        shapes[draw(st.integers(0, 1))] = smaller[draw(st.integers(0, len(shape) - 1)) :]
    first = layout(draw, shape)
    if shapes[0] == shapes[1] and chance(draw, 60):  # most models add what lies alike
        return Input(shape, first, values(draw)), Input(shape, first, values(draw))
    return tensor(draw, shapes[0]), tensor(draw, shapes[1])


def two(draw: Draw, sizes: Sizes) -> Arguments:
    return pair(draw, sizes), {}


def mul(draw: Draw, sizes: Sizes) -> Arguments:
    return pair(draw, sizes, 50), {}


def relu_add(draw: Draw, sizes: Sizes) -> Arguments:
    x, y = pair(draw, sizes)
    if chance(draw, 40):
        bias = 0.75 if chance(draw, 30) else parameter(draw, one_of(draw, x.shape[-1:], (*x.shape[-2:-1], 1), ()))
        return (x, y, bias), {}
    return (x, y), {}


def geglu(draw: Draw, sizes: Sizes) -> Arguments:
    return (*pair(draw, sizes), one_of(draw, "none", "tanh")), {}


def dropout_add(draw: Draw, sizes: Sizes) -> Arguments:
    return (*pair(draw, sizes, 8), *one_of(draw, (0.3, False), (0.0, True), (1.0, True))), {}


def scale_add(draw: Draw, sizes: Sizes) -> Arguments:
    x, residual = pair(draw, sizes, 0)
    shape = x.shape
    d = draw(st.integers(0, len(shape) - 1)) if chance(draw, 40) else len(shape) - 1
    gamma = None if chance(draw, 15) else parameter(draw, (shape[d], *(1,) * (len(shape) - 1 - d)))
    return (x, residual, gamma), {}


def squeeze_excite(draw: Draw, sizes: Sizes) -> Arguments:
    shape = image(draw, sizes)
    return (tensor(draw, shape, chance(draw, 20)), parameter(draw, (shape[1], 1, 1))), {}


def max_pool2d(draw: Draw, sizes: Sizes) -> Arguments:
    kernel, stride, dilation = (draw(st.integers(1, most)) for most in (5, 3, 2))
    padding = draw(st.integers(0, kernel // 2))
    n, c, height, width = image(draw, sizes)
    # In a smaller image a window may lie in the padding alone, and torch's backward writes out of bounds.
    least = max(dilation, dilation * (kernel - 1) + 1 - 2 * padding)
    shape = (n, c, max(height, least), max(width, least))
    shape = shape[1:] if chance(draw, 10) else shape
    of = Values("few_values") if chance(draw, 20) else None
    return (tensor(draw, shape, of=of), kernel, stride, padding, dilation, chance(draw, 20)), {}


def row_shape(draw: Draw, sizes: Sizes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, that of a row)."""
    shape = rows(draw, sizes, LEAST, dims=(1, 4))
    dims = 2 if len(shape) > 2 and chance(draw, 15) else 1
    return shape, shape[-dims:]


def row_norm(add: bool, bias: bool) -> Callable[[Draw, Sizes], Arguments]:
    def build(draw: Draw, sizes: Sizes) -> Arguments:
        shape, row = row_shape(draw, sizes)
        inputs = [tensor(draw, shape)]
        if add:
            alike = Input(shape, inputs[0].layout, NORMAL) if chance(draw, 60) else tensor(draw, shape)
            inputs.append(None if chance(draw, 10) else alike)
        weight = None if chance(draw, 15) else parameter(draw, row)
        given = [weight]
        if bias:
            given.append(None if weight is None or chance(draw, 20) else parameter(draw, row))
        kwargs: dict[str, Any] = {"eps": one_of(draw, 1e-5, 1e-3)} if chance(draw, 40) else {}
        if not bias and chance(draw, 40):
            kwargs["casting"] = one_of(draw, "llama", "gemma")
        return (*inputs, row, *given), kwargs

    return build


def ada_layer_norm(draw: Draw, sizes: Sizes) -> Arguments:
    n = min(length(draw, sizes, LEAST), 8000)
    samples, tokens = lead(draw, 2, n, sizes)
    of = one_of(draw, (samples, 1, n), (n,), (1, 1, n))
    shift = None if chance(draw, 20) else parameter(draw, of)
    return (tensor(draw, (samples, tokens, n)), (n,), parameter(draw, of), shift), {}


def global_response_norm(draw: Draw, sizes: Sizes) -> Arguments:
    n, c, *space = image(draw, sizes)
    last = chance(draw, 60)
    shape = (n, *space, c) if last else (n, c, *space)
    kwargs = {} if last else {"channels_last": False}
    return (tensor(draw, shape, False), parameter(draw, (c,)), parameter(draw, (c,))), kwargs


def channel_layer_norm(draw: Draw, sizes: Sizes) -> Arguments:
    n, c, *space = image(draw, sizes)
    c += LEAST - 1
    parameters = () if chance(draw, 15) else (parameter(draw, (c,)), parameter(draw, (c,)))
    return (tensor(draw, (n, c, *space)), *parameters), {}


def affine(draw: Draw, channels: int) -> tuple[Input | None, Input | None]:
    if chance(draw, 15):
        return None, None
    return parameter(draw, (channels,)), None if chance(draw, 15) else parameter(draw, (channels,))


def group_norm(draw: Draw, sizes: Sizes) -> Arguments:
    shape = image(draw, sizes, (1, 3), LEAST)
    groups = draw(st.sampled_from([g for g in range(1, shape[1] + 1) if shape[1] % g == 0]))
    act = one_of(draw, *ACTIVATIONS) if chance(draw, 50) else None
    return (tensor(draw, shape, chance(draw, 30)), groups, *affine(draw, shape[1])), {"act": act} if act else {}


def instance_norm(draw: Draw, sizes: Sizes) -> Arguments:
    shape = image(draw, sizes, (1, 3), LEAST)
    act = one_of(draw, *ACTIVATIONS) if chance(draw, 40) else None
    return (tensor(draw, shape, chance(draw, 30)), None, None, *affine(draw, shape[1])), {"act": act} if act else {}


def batch_norm(training: bool) -> Callable[[Draw, Sizes], Arguments]:
    def build(draw: Draw, sizes: Sizes) -> Arguments:
        shape = image(draw, sizes, (1, 3), LEAST)
        if chance(draw, 15):  # a matrix
            shape = (shape[0] * shape[2] + LEAST, shape[1])
        wild = chance(draw, 10)
        x = tensor(draw, shape, wild)
        kwargs: dict[str, Any] = {}
        if chance(draw, 50):
            kwargs["act"] = one_of(draw, *ACTIVATIONS)
        if chance(draw, 40):
            alike = Input(shape, x.layout, NORMAL)
            kwargs["residual"] = alike if chance(draw, 70) else tensor(draw, shape, wild, NORMAL)
        channels = (shape[1],)
        running = tuple(Input(channels, dense(1), of, grad=False) for of in (NORMAL, Values("positive")))
        # Their update is no result of the call, and its test is not this one.
        statistics = (None, None) if training else running
        return (x, *statistics, *affine(draw, shape[1]), training), kwargs

    return build


def act_of(draw: Draw) -> str:
    return one_of(draw, *(act for act in STOCK_ACTS if act is not None))


def bias_act(draw: Draw, sizes: Sizes) -> Arguments:
    x = tensor(draw, rows(draw, sizes, dims=(1, 4)))
    return (x, None if chance(draw, 25) else parameter(draw, x.shape[-1:]), act_of(draw)), {}


def bare(draw: Draw, sizes: Sizes) -> Arguments:
    return (tensor(draw, rows(draw, sizes, dims=(1, 4))),), {}


def glu(draw: Draw, sizes: Sizes) -> Arguments:
    shape = list(rows(draw, sizes, dims=(1, 4)))
    dim = len(shape) - 1 if chance(draw, 60) else draw(st.integers(0, len(shape) - 1))
    shape[dim] += shape[dim] % 2
    return (tensor(draw, tuple(shape)), dim), {"act": act_of(draw), "gate_first": chance(draw, 40)}


def features(draw: Draw, sizes: Sizes) -> tuple[int, int, tuple[int, ...]]:
    """(features in, features out, shape in front of them)."""
    given, wanted = (draw(st.integers(1, 20)) * one_of(draw, 1, 8) for _ in range(2))
    return given, wanted, lead(draw, draw(st.integers(1, 3)), max(given, wanted), sizes)


def linear(draw: Draw, sizes: Sizes) -> Arguments:
    given, wanted, before = features(draw, sizes)
    x = tensor(draw, (*before, given), chance(draw, 15), NORMAL)
    bias = None if chance(draw, 10) else parameter(draw, (wanted,))
    return (x, parameter(draw, (wanted, given)), bias), {}


def gated_linear(draw: Draw, sizes: Sizes) -> Arguments:
    given, wanted, before = features(draw, sizes)
    gate, up = (tensor(draw, (*before, given), chance(draw, 30), NORMAL) for _ in range(2))
    bias = None if chance(draw, 40) else parameter(draw, (wanted,))
    return (gate, up, parameter(draw, (wanted, given)), bias, one_of(draw, "silu", "gelu", "relu", None)), {}


def heads(draw: Draw, sizes: Sizes) -> tuple[int, int, int, int, int]:
    """(batch, heads, heads of keys, sequence, size of a head)."""
    dim = 2 * draw(st.integers(3, 16)) if chance(draw, 50) else one_of(draw, 16, 32, 64, 80, 128)
    batch, of_q, of_k = draw(st.integers(1, 3)), draw(st.integers(1, 9)), draw(st.integers(1, 4))
    return batch, of_q, of_k, draw(st.integers(1, max(1, min(70, sizes.elements // (batch * of_q * dim))))), dim


def in_heads(draw: Draw, shape: tuple[int, ...]) -> Input:
    """Heads in front of the sequence or behind it in memory, with or without a gap between rows."""
    order = (0, 2, 1, 3) if chance(draw, 50) else (0, 1, 2, 3)
    offset = draw(st.integers(1, 9)) if chance(draw, 20) else 0
    return Input(shape, Layout(order, (1,) * 4, (0, 0, 0, 16 if chance(draw, 20) else 0), (), offset), NORMAL)


def rotary(draw: Draw, sizes: Sizes) -> Arguments:
    batch, of_q, of_k, sequence, dim = heads(draw, sizes)
    part = 2 * draw(st.integers(1, dim // 2)) if chance(draw, 30) else dim
    kwargs = {"rotary_dim": part} if chance(draw, 30) else {}
    width = part // 2 if kwargs else part
    if kwargs and width % 2:  # as wide as the tables, it could be either
        kwargs, width = {}, part
    last = chance(draw, 30)  # heads behind the sequence, in the shape too
    shapes = ((batch, sequence, h, dim) if last else (batch, h, sequence, dim) for h in (of_q, of_k))
    table = parameter(draw, (sequence, 1, width) if last else (sequence, width), grad=False)
    table = Input(table.shape, table.layout, NORMAL, grad=False)
    return (*(in_heads(draw, shape) for shape in shapes), table, table, chance(draw, 40)), kwargs


def qk_norm_rotary(draw: Draw, sizes: Sizes) -> Arguments:
    batch, of_q, of_k, sequence, dim = heads(draw, sizes)
    kwargs: dict[str, Any] = {"casting": one_of(draw, "torch", "llama", "gemma")} if chance(draw, 30) else {}
    if chance(draw, 30):
        kwargs["interleaved"] = True
    weight = None if chance(draw, 20) else parameter(draw, (dim,))
    table = Input((sequence, 1, dim), dense(3), NORMAL, grad=False)
    q, k = (in_heads(draw, (batch, sequence, h, dim)) for h in (of_q, of_k))
    return (q, k, weight, weight, table, table), kwargs


def loss_options(draw: Draw) -> dict[str, Any]:
    kwargs: dict[str, Any] = {}
    if chance(draw, 60):
        kwargs["reduction"] = one_of(draw, "none", "sum", "mean")
    for name, value, percent in (("label_smoothing", 0.1, 25), ("softcap", 3.0, 15), ("z_loss", 0.1, 15)):
        if chance(draw, percent):
            kwargs[name] = value
    return kwargs


def labels_of(draw: Draw, shape: tuple[int, ...], classes: int) -> Input:
    of = Values("some_ignored" if chance(draw, 30) else "classes", (classes,))
    return Input(shape, dense(len(shape), draw(st.integers(0, 1))), of, grad=False, dtype=torch.int64)


def class_weight(draw: Draw, classes: int) -> dict[str, Any]:
    return {"weight": Input((classes,), dense(1), Values("positive"), grad=False)} if chance(draw, 20) else {}


def cross_entropy(draw: Draw, sizes: Sizes) -> Arguments:
    n, space = length(draw, sizes, 2), ()
    if chance(draw, 30):
        n = min(n, 300)
        space = lead(draw, draw(st.integers(1, 2)), n, sizes)
    count = lead(draw, 1, n * math.prod(space), sizes)
    shape = (*count, n, *space)
    return (tensor(draw, shape), labels_of(draw, (*count, *space), n)), loss_options(draw) | class_weight(draw, n)


def head_options(draw: Draw, before: tuple[int, ...], classes: int) -> dict[str, Any]:
    kwargs: dict[str, Any] = {"chunk_size": None if chance(draw, 25) else draw(st.integers(1, 50))}
    if chance(draw, 30):
        kwargs["linear_bias"] = parameter(draw, (classes,))
    if chance(draw, 30):
        rank = draw(st.integers(1, 16))
        kwargs["low_rank"] = (tensor(draw, (*before, rank)), parameter(draw, (classes, rank)))
    return kwargs


def linear_cross_entropy(draw: Draw, sizes: Sizes) -> Arguments:
    given, classes, before = features(draw, sizes)
    classes += 1
    kwargs = loss_options(draw) | class_weight(draw, classes) | head_options(draw, before, classes)
    x = tensor(draw, (*before, given), chance(draw, 15), NORMAL)
    return (x, parameter(draw, (classes, given)), labels_of(draw, before, classes)), kwargs


HEAD_OPTIONS = ("softcap", "logit_scale", "linear_bias", "low_rank", "chunk_size")


def linear_log_prob(draw: Draw, sizes: Sizes) -> Arguments:
    (x, weight, labels), given = linear_cross_entropy(draw, sizes)
    kwargs = {name: given[name] for name in HEAD_OPTIONS if name in given}
    return (x, weight, labels), kwargs | {"entropy": chance(draw, 70)}


def linear_divergence(draw: Draw, sizes: Sizes) -> Arguments:
    given, classes, before = features(draw, sizes)
    classes += 1
    # Not the total variation distance, whose slope jumps where two probabilities meet.
    kwargs: dict[str, Any] = {"divergence": one_of(draw, "kl", "reverse_kl", "js", "cosine")}
    kwargs |= {"reduction": one_of(draw, "none", "sum", "mean", "batchmean"), **head_options(draw, before, classes)}
    for name, value in (("temperature", 2.5), ("softcap", 3.0), ("target_softcap", 2.0), ("target_logit_scale", 0.5)):
        if chance(draw, 20):
            kwargs[name] = value
    if chance(draw, 30):
        of = Values("rows_ignored")
        kwargs["target"] = Input(before, dense(len(before)), of, grad=False, dtype=torch.int64)
    student = (tensor(draw, (*before, given), chance(draw, 15), NORMAL), parameter(draw, (classes, given)))
    if chance(draw, 40):
        of = Values("log_probabilities")
        return (*student, Input((*before, classes), dense(len(before) + 1), of, grad=False)), kwargs
    width = draw(st.integers(1, 20))
    teacher = (
        Input((*before, width), dense(len(before) + 1), NORMAL, grad=False),
        parameter(draw, (classes, width), grad=False),
    )
    return (*student, *teacher), kwargs


def kl_div(draw: Draw, sizes: Sizes) -> Arguments:
    shape = rows(draw, sizes, dims=(1, 4))
    log = chance(draw, 50)
    of = Values("log_probabilities" if log else "positive")
    kwargs = {"reduction": one_of(draw, "none", "sum", "mean", "batchmean"), **({"log_target": True} if log else {})}
    return (tensor(draw, shape), tensor(draw, shape, of=of)), kwargs


def divergence(beta: bool) -> Callable[[Draw, Sizes], Arguments]:
    def build(draw: Draw, sizes: Sizes) -> Arguments:
        shape = rows(draw, sizes, 2, dims=(2, 3))
        wild = chance(draw, 30)
        kwargs: dict[str, Any] = {}
        if chance(draw, 50):
            kwargs["reduction"] = one_of(draw, "sum", "mean", "batchmean")
        if chance(draw, 40):
            kwargs["temperature"] = one_of(draw, 0.5, 2.5)
        if beta and chance(draw, 50):
            kwargs["beta"] = one_of(draw, 0.0, 0.1, 1.0)
        if chance(draw, 25) and "reduction" in kwargs:
            of = Values("rows_ignored")
            kwargs["labels"] = Input(shape[:-1], dense(len(shape) - 1), of, grad=False, dtype=torch.int64)
        return tuple(tensor(draw, shape, wild, NORMAL) for _ in range(2)), kwargs

    return build


BUILDERS: dict[str, Callable[[Draw, Sizes], Arguments]] = {
    "softmax": softmax,
    "log_softmax": softmax,
    "relu_add": relu_add,
    "add_relu": two,
    "mul": mul,
    "squeeze_excite": squeeze_excite,
    "max_pool2d": max_pool2d,
    "dropout_add": dropout_add,
    "scale_add": scale_add,
    "layer_norm": row_norm(add=False, bias=True),
    "rms_norm": row_norm(add=False, bias=False),
    "add_layer_norm": row_norm(add=True, bias=True),
    "add_rms_norm": row_norm(add=True, bias=False),
    "ada_layer_norm": ada_layer_norm,
    "global_response_norm": global_response_norm,
    "channel_layer_norm": channel_layer_norm,
    "group_norm": group_norm,
    "instance_norm": instance_norm,
    "batch_norm": batch_norm(training=True),
    "batch_norm_eval": batch_norm(training=False),
    "bias_act": bias_act,
    **{op.name: bare for op in BARE},
    "swiglu": two,
    "geglu": geglu,
    "reglu": two,
    "linear": linear,
    "gated_linear": gated_linear,
    "glu": glu,
    "rotary": rotary,
    "qk_norm_rotary": qk_norm_rotary,
    "cross_entropy": cross_entropy,
    "linear_cross_entropy": linear_cross_entropy,
    "linear_divergence": linear_divergence,
    "linear_log_prob": linear_log_prob,
    "kl_div": kl_div,
    "kl_div_logits": divergence(beta=False),
    "js_div_logits": divergence(beta=True),
}


#: In float64 the composition judges, and errs more than the kernels do: logsumexp of two numbers near log 2.
NO_JUDGE = {"js_div_logits": (torch.float64,), "linear_divergence": (torch.float64,)}


@st.composite
def random_cases(draw: Draw, op: Op, sizes: Sizes, dtypes: Sequence[torch.dtype] = FLOATING) -> Case:
    args, kwargs = BUILDERS[op.name](draw, sizes)
    judged = [dtype for dtype in op.dtypes if dtype in dtypes and dtype not in NO_JUDGE.get(op.name, ())]
    # The name is the seed of the values.
    sample = Sample(f"random {draw(st.integers(0, 2**20))}", args, kwargs)
    return Case(op.name, draw(st.sampled_from(judged)), sample)

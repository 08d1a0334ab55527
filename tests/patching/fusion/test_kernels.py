"""Generated kernels: programs with and without them, on a GPU or, in a process of its own, in Triton's interpreter."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests import ROOT, draw
from tests.harness import needs_gpu

pytest.importorskip("triton")

from fastlayers import backends
from fastlayers import functional as FL
from fastlayers.kernels import generated
from fastlayers.kernels.affine import Index
from fastlayers.kernels.formulas import FAST, FORMULAS, Code
from fastlayers.kernels.generated import Kernel, balanced
from fastlayers.patching.fusion import kernels as fusion
from fastlayers.patching.fusion import schedule
from fastlayers.patching.fusion.kernels import rounded_later
from fastlayers.patching.fusion.passes import fused
from fastlayers.patching.program.executors import KEYS, Facts, PythonExecutor, excluding
from fastlayers.patching.program.program import Operation, Value, plain_name, written
from fastlayers.patching.program.tape import Tape
from fastlayers.patching.regions.region import region_class
from tests.patching.fusion.programs import (
    INTERPRETED,
    LOW,
    TOLERANCE,
    alike,
    check,
    launches,
    names,
    recorded,
    turned,
)

pytestmark = pytest.mark.cpu_kernels


#: The interpreter truncates float32 to bfloat16, where a GPU rounds.
DTYPES = (torch.float32, torch.float64) if INTERPRETED else tuple(TOLERANCE)


#: Those that compare programs.
FILES = [str(file) for file in Path(__file__).parent.glob("test_*.py") if "fusion.programs import" in file.read_text()]


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="Triton interprets here already")
def test_in_the_interpreter(inner_run, pytestconfig):
    options = [*inner_run, *draw.options(pytestconfig, draw.FEW)]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-m", "not gpu", *FILES],
        env=os.environ | {"TRITON_INTERPRET": "1"}, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert " passed" in run.stdout.splitlines()[-1]


def interleaved(x, cos, sin):
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).reshape(x.shape)
    return x * cos + turned * sin


def response_norm(x, weight, bias):
    norm = torch.linalg.vector_norm(x, 2, (1, 2), keepdim=True)
    return x + torch.addcmul(bias, weight, x * (norm / (norm.mean(-1, keepdim=True) + 1e-6)))


def windows(x):
    b, h, w, c = x.shape
    x = torch.roll(F.pad(x, (0, 0, 0, 2, 0, 2)), (-1, -1), (1, 2))
    return x.view(b, 2, (h + 2) // 2, 2, (w + 2) // 2, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, c) * 2


def packed(x):
    q, k, v = x.view(*x.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4).unbind(0)
    return q * 0.5, k.contiguous() + 1, v.contiguous() * 2


#: A chain, the shapes of its inputs, and how many launches are left of its forward and of its backward at most.
CHAINS = {
    "modulation": (
        lambda x, s, t, g: x + g[:, None] * (F.layer_norm(x, x.shape[-1:]) * (1 + s[:, None]) + t[:, None]),
        [(2, 8, 16), (2, 16), (2, 16), (2, 16)], (2, 4),
    ),
    "rotary of halves": (lambda x, c, s: turned(x.transpose(1, 2), c, s), [(2, 8, 4, 16), (8, 16), (8, 16)], (2, 5)),
    "rotary of pairs": (interleaved, [(2, 4, 8, 16), (8, 16), (8, 16)], (1, 2)),
    "rotary after a token": (
        lambda x, c, s: torch.cat((x[:, :, :1], interleaved(x[:, :, 1:], c, s)), 2),
        [(2, 4, 9, 16), (8, 16), (8, 16)], (2, 4),
    ),
    "response norm": (response_norm, [(2, 4, 4, 32), (32,), (32,)], (3, 4)),
    "gates": (lambda x: F.gelu(x) * torch.sigmoid(x) + F.silu(x), [(4, 33)], (1, 1)),
    "casts": (lambda x, y: (x.half() + 1).to(x.dtype) * y + x.double().to(x.dtype), [(4, 33), (33,)], (1, 2)),
    "hard gates": (lambda x: x * F.hardsigmoid(x) + F.hardswish(x) * F.relu6(x), [(4, 33)], (1, 1)),
    "windows": (windows, [(2, 6, 6, 8)], (1, 2)),
    "packed": (packed, [(4, 6, 48)], (3, 1)),
    "hand-written norm": (
        lambda x: (x - x.mean(1, True)) / (x.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt(), [(4, 64, 5)], (3, 2),
    ),
    "root mean square": (
        lambda x, w: (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * x * (1 + w), [(64, 64), (64,)], (2, 2),
    ),
    "norm of rows": (
        lambda x: (x - x.mean(-1, True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt(),
        [(4, 6, 65)], (1, 1),
    ),
    "norm of a sum": (
        lambda x, y, w, b: (lambda s: (F.layer_norm(s, (6, 8), w, b) * 2, s))(x + y * w),
        [(4, 6, 8), (4, 6, 8), (6, 8), (6, 8)], (1, 6),
    ),
    "norm in another order": (
        lambda x, y: (lambda s: (((s - s.mean(-1, True)) * (s * s).mean(-1, True)).contiguous(), s))((x + y).mT),
        [(4, 6, 8), (4, 6, 8)], (4, 1),
    ),
    "norm of turned rows": (
        lambda x, y: (lambda s: (((s - s.mean(-1, True)) * (s * s).mean(-1, True)).contiguous(), s))(
            x.transpose(0, 1) + y.transpose(0, 1)
        ),
        [(4, 6, 8), (4, 6, 8)], (1, 2),
    ),
    "normalized": (lambda x: F.normalize(x, dim=-1) * 8, [(4, 64)], (1, 1)),
    "channels last": (
        lambda x, w: (x.to(memory_format=torch.channels_last) * w + 1).mean((2, 3)).sigmoid(),
        [(2, 8, 4, 4), (8, 1, 1)], (3, 3),
    ),
    "slices": (lambda x: x[..., :3].exp() * x[..., 3:6].sin() + x[..., 1::2], [(5, 6)], (1, 1)),
    "leaky": (lambda x: F.leaky_relu(x * 2, 0.1) - F.leaky_relu(x, 0.2), [(7,)], (1, 1)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CHAINS)
def test_chains(name, dtype, device):
    function, shapes, (forward, backward) = CHAINS[name]
    inputs = [torch.randn(s, device=device).to(dtype).requires_grad_() for s in shapes]
    # Of 1/6 torch has a float32 for every dtype, on a CPU for some operations.
    program, other = check(function, *inputs, tolerance=max(1e-6, TOLERANCE[dtype]) if name == "hard gates" else None)
    assert launches(other.forward) <= forward < launches(program.forward)
    assert launches(other.backward) <= backward < launches(program.backward)


@needs_gpu
@pytest.mark.parametrize("name", CHAINS)
def test_as_near_to_float64_as_torch(name):
    function, shapes, _ = CHAINS[name]
    inputs = [torch.randn(s, device="cuda").bfloat16().requires_grad_() for s in shapes]
    program, _, results, *_ = recorded(function, inputs)
    run = PythonExecutor(fused(program), Facts())
    with torch.no_grad(), excluding(KEYS):
        actual, _ = run.forward(*inputs)
    exact = function(*(t.detach().double() for t in inputs))
    for a, b, wide in zip(actual, results, exact if isinstance(exact, tuple) else (exact,), strict=True):
        assert (a - wide).norm() <= 1.01 * (b - wide).norm() + 1e-6 * wide.norm()


#: Arguments of the operations with a formula, besides tensors: shapes of these, and more.
ARGUMENTS = {
    "add.Scalar": (1, 2.5), "sub.Scalar": (1, 2.5), "rsub.Scalar": (1, 2.5, 2), "mul.Scalar": (1, -3.5),
    "div.Scalar": (1, 3.0), "addcmul": (3,), "addcdiv": (3,), "clamp_min": (1, 0.25), "clamp_max": (1, 0.25),
    "clamp": (1, -0.5, 0.5), "threshold_backward": (2, 0.25), "hardtanh_backward": (2, -0.5, 0.5),
    "leaky_relu_backward": (2, 0.1, False), "native_dropout_backward": (2, 1.25),
    **dict.fromkeys(("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "minimum", "maximum"), (2,)),
    **{f"{name}_backward": (2,) for name in ("sigmoid", "tanh", "silu", "gelu", "hardsigmoid", "hardswish")},
}  # fmt: skip
VALUES = (0.0, -0.0, 1.0, -1.0, 0.3, -2.7, 3.0, -3.0, 6.0, 40.0, -40.0)
#: torch itself treats them in several ways on a CPU.
NOT_FINITE = (float("inf"), -float("inf"), float("nan"))


@pytest.mark.parametrize("name", FORMULAS)
def test_formulas(name, device):
    """Each formula on all pairs of special values, against torch's operation on the same device."""
    base, _, overload = name.partition(".")
    function = getattr(getattr(torch.ops.aten, base), overload or "default")
    count, *more = ARGUMENTS.get(name, (1,))
    variants = [[e] for e in (2, 3, 0.5, -0.5, -1, -2, 1)] if name == "pow.Tensor_Scalar" else [more]
    values = (*VALUES, *(NOT_FINITE if device == "cuda" else ()))
    tensors = list(torch.tensor(list(itertools.product(values, repeat=count)), device=device).unbind(-1))
    if name == "native_dropout_backward":
        tensors[1] = tensors[1] > 0
    for extra in variants:
        program, other = check(lambda *t, extra=extra: -function(*t, *extra), *(t.contiguous() for t in tensors))
        assert [type(operation.function) for operation in other.forward] == [Kernel], program.forward


@pytest.mark.parametrize("name", [*FAST, "gelu.tanh", "gelu_backward.tanh"])
def test_formulas_for_16_bits(name, device, monkeypatch):
    """Against float64: 2^-16 of the value, or of the terms that a gradient is the difference of."""
    base, _, variant = name.partition(".")
    function = getattr(torch.ops.aten, base)
    options = {"approximate": variant} if variant == "tanh" else {}
    monkeypatch.setattr(fusion, "rounded_later", lambda operations, *_: {n for o in operations for n in o.makes})
    x = torch.linspace(-5, 12, 4001, device=device)  # float64's own gelu loses its tail below
    given = [x] if ARGUMENTS.get(base, ARGUMENTS.get(name, (1,)))[0] == 1 else [torch.full_like(x, 1.5), x]
    _, other = check(lambda *t: -function(*t, **options), *given, tolerance=1e-3)
    (operation,) = other.forward
    (found,) = operation.function(*given)
    assert "fast_" in operation.function.source or base == "div"
    exact = -function(*(t.double() for t in given), **options)
    terms = 1 if "backward" in name else 1e-30
    assert ((found - exact).abs() <= 2**-16 * (exact.abs() + terms)).all()
    if "gelu" in base:
        (tail,) = operation.function(*(t - 17 for t in given))
        assert (tail[x < 12].abs() < 1e-3).all()
    if device == "cuda":
        ends = [torch.tensor(NOT_FINITE, device=device).repeat(1334)[:4001] for _ in given]
        torch.testing.assert_close(operation.function(*ends)[0], -function(*ends, **options), equal_nan=True)


def test_a_condition_that_all_rows_share(device):
    x, mask = torch.randn(6, 64, device=device, requires_grad=True), torch.arange(64, device=device) % 3 > 0
    _, other = check(lambda x, m: torch.softmax(torch.where(m, x * 2, -1e4), -1) * m, x, mask)
    assert launches(other.forward) == 1


def test_repeats(device, monkeypatch):
    x = torch.randn(3, 4, 5, device=device, requires_grad=True)
    for repeats in ((2, 3, 1), (2, 1, 3, 1), (1, 1, 1), (3, 1, 1)):
        _, other = check(lambda x, repeats=repeats: torch.relu(x.repeat(repeats)) * 2, x)
        assert launches(other.forward) == 1
        _, other = check(lambda x, repeats=repeats: x.detach().transpose(0, 1).repeat(repeats) * 2, x)
        assert launches(other.forward) == 1
    # torch writes each copy through a strided view: a large one is worth a kernel by itself.
    _, other = check(lambda x: x.detach().repeat(2, 2, 2), x)
    assert type(other.forward[0].function) is not Kernel
    monkeypatch.setattr(schedule, "COLUMNS", 1)
    _, other = check(lambda x: x.detach().repeat(2, 2, 2), x)
    assert type(other.forward[0].function) is Kernel


@pytest.mark.parametrize(("blocks", "steps", "shares"), [
    (288, 8, 2), (2000, 8, 1), (192, 98, 2), (9, 256, 39), (1, 1, 1), (264, 3, 1), (1, 1000, 264),
])  # fmt: skip
def test_programs_that_share_a_sum(blocks, steps, shares):
    assert balanced(blocks, steps, 132) == shares


def test_what_reads_a_frozen_weight_can_be_fused():
    """A norm is no operation with an effect because its weight gets no gradient: the sum before it is one of products,
    and is not taken for written."""
    x, weight = torch.randn(50, 144).to(LOW).requires_grad_(), torch.randn(144).to(LOW)
    tape = Tape([x, weight], [weight])
    with tape, backends.backend("cpu"):
        FL.add_rms_norm(x * 2, x, (144,), weight)
    assert plain_name(tape.operations[-1].function) == "add_layer_norm_forward"
    assert not any(operation.effect for operation in tape.operations)


def test_statistics_are_declared():
    """The operations of csrc that update them say so; those of torch, and compositions of ours, do not."""
    checked = set()
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, name = name.partition("::")
        if namespace != "fastlayers" or name.endswith("batch_norm"):
            continue
        arguments = getattr(torch.ops.fastlayers, name).default._schema.arguments
        statistics = [a for a in arguments if a.name.startswith(("running_", "num_batches"))]
        if statistics and any(a.name == "momentum" for a in arguments):
            assert all(a.is_write for a in statistics), name
            checked.add(name)
    assert checked >= {"batch_norm_train", "batch_norm_update_"}
    mean, var = torch.zeros(8), torch.ones(8)
    tape = Tape([x := torch.randn(4, 8), mean, var], [mean, var])
    with tape:
        F.batch_norm(x, mean, var, training=True)
    (operation,) = (each for each in tape.operations if each.effect)
    assert written(operation) == ["x1", "x2"]


def test_what_reads_a_buffer_can_be_fused():
    """Only operations that may update running statistics without saying so have to be where they are."""
    x, buffer, mean, var = torch.randn(4, 8), torch.randn(8), torch.zeros(8), torch.ones(8)
    tape = Tape([x, buffer, mean, var], [buffer, mean, var])
    with tape:
        F.batch_norm(x + buffer, mean, var, training=True)
    assert [operation.effect for operation in tape.operations if "empty" not in plain_name(operation.function)] == [
        False,
        True,
    ]


def test_what_is_rounded_later(device):
    dtypes = {name: torch.bfloat16 if name in "dg" else torch.float32 for name in "abcdefgh"}
    values = {name: torch.empty(4, dtype=dtype, device=device) for name, dtype in dtypes.items()}
    aten = torch.ops.aten

    def operation(function, *args, makes):
        given = tuple(Value(arg) if isinstance(arg, str) else arg for arg in args)
        return Operation(
            function.default if hasattr(function, "default") else function, given, {}, (makes,), True, False
        )

    chain = [
        operation(aten.gelu, "a", makes="b"),
        operation(aten.neg, "b", makes="c"),
        operation(aten.to.dtype, "c", torch.bfloat16, makes="d"),
        operation(aten.gelu, "a", makes="e"),
        operation(aten.sum.dim_IntList, "e", [0], makes="f"),
        operation(aten.to.dtype, "f", torch.bfloat16, makes="g"),
        operation(aten.mul.Tensor, "b", "b", makes="h"),
    ]
    assert rounded_later(chain[:6], values, ["d", "g"]) == {"b", "c", "f"}
    assert rounded_later(chain[:6], values, ["d", "g", "c"]) == {"f"}  # someone sees c as it is
    assert rounded_later(chain, values, ["d", "g", "h"]) == {"c", "f"}


#: Steps of random programs: of two values and a dimension.
STEPS = (
    lambda a, b, d: a + alike(a, b),
    lambda a, b, d: torch.sigmoid(a) * alike(a, b),
    lambda a, b, d: F.gelu(a) - 0.5,
    lambda a, b, d: a - a.mean(-1, keepdim=True),
    lambda a, b, d: a / (a.pow(2).mean(-1, keepdim=True) + 1).sqrt(),
    lambda a, b, d: a / (a.var(d, keepdim=True, unbiased=False) + 1),
    lambda a, b, d: a + a.sum(d, keepdim=True) * 0.1,
    lambda a, b, d: torch.softmax(a, d),
    lambda a, b, d: F.layer_norm(a, a.shape[-1:]),
    lambda a, b, d: a.transpose(d, -1),
    lambda a, b, d: a.transpose(d, 0).contiguous(),
    lambda a, b, d: a.flatten(0, 1) if a.dim() > 2 else a.unflatten(0, (-1, 1)),
    lambda a, b, d: torch.cat((a[..., 1:], alike(a, b)[..., :1] * 2), -1),
    lambda a, b, d: torch.roll(a, 1, d),
    lambda a, b, d: F.pad(a, (1, 0))[..., :-1],
    lambda a, b, d: torch.where(a > 0, a, alike(a, b) * 0.1),
    lambda a, b, d: torch.gather(a, -1, (torch.arange(a.shape[-1], device=a.device) * 3 % a.shape[-1]).expand(a.shape)),
    lambda a, b, d: a.clone().mul_(0.5).add_(alike(a, b)),
)


@pytest.mark.parametrize("first", range(0, 40 if INTERPRETED else 200, 10))
def test_random_programs(first, device):
    """Whatever is joined, the results and gradients are torch's; in float64, where chains do not amplify roundings."""
    for seed in range(first, first + 10):
        chance = random.Random(seed)
        shape = chance.choice([(2, 3, 8), (4, 6, 16), (3, 5, 7), (2, 1, 33), (1, 4, 12), (8, 2, 4)])
        steps = [(chance.choice(STEPS), chance.random(), chance.randrange(3)) for _ in range(chance.randint(3, 9))]

        def function(x, y, w, steps=steps):
            values = [x, y, x * 0.5 + w]
            for step, share, back in steps:
                a, b = values[-1], values[-1 - back]
                values.append(step(a, b, int(share * a.dim())))
            return tuple(value * 1.0 for value in values[-2:])

        torch.manual_seed(seed)
        inputs = [torch.randn(s, dtype=torch.float64, device=device) for s in (shape, shape, shape[-1:])]
        for t in inputs:
            t.requires_grad_(chance.random() < 0.8)
        check(function, *inputs, tolerance=1e-9, noise=2**20)


def test_conditions(device):
    x, mask = torch.randn(4, 6, device=device), torch.rand(4, 6, device=device) > 0.5

    def function(x, mask):
        chosen = torch.where(mask & (x != 0), x * 2, -torch.inf).masked_fill(x > 3, 0.0)
        return chosen + (x <= x.abs()).float(), ~(mask | (x.double() < 1))

    _, other = check(function, x, mask)
    assert launches(other.forward) < 8


def test_what_is_written_is_not_computed_again(device):
    """A backward that computes a value again would do without what was written into it."""

    def part(x, z):
        y = x * 2 + 1
        y[:, :1] = z
        return y * x + 1

    def over(x, z):
        y = (x * 0.7).copy_(x)
        return y / (x * x + 0.5) + z

    for function in (part, over):
        x, z = (torch.randn(8, n, device=device, requires_grad=True) for n in (256, 1))
        check(function, x, z)


def test_tensors_of_one_element(device):
    """Their places are numbers, where Triton wants blocks as their conditions are."""
    x = torch.randn(8, 8, device=device, requires_grad=True)
    index = torch.tensor([[3]], device=device)
    check(lambda x, i: x.gather(0, i) * 2 + 1, x, index)
    check(lambda x: F.pad(x[2:3, 1:2] * 2, (1, 2, 0, 3)) + 1, x)
    check(lambda x: torch.cat((x[2:3, 1:2], x[:3, :1])) * 2 + 1, x)
    for shape in ((1, 1), (1,), (1, 1, 1)):
        one = torch.randn(shape, device=device, requires_grad=True)
        check(lambda x: F.softmax(x * 2, -1) * x.sigmoid() + 1, one)
        check(lambda x: F.layer_norm(x * 2, x.shape[-1:]) + (x * 3).sum(-1, keepdim=True), one)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_deviation_of_equal_elements_is_0(dtype, device):
    """So is its gradient. The sum of 7 times 3.3 divided by 7 is not 3.3."""
    x = torch.tensor([3.3, 0.1, -1.7, 1e4], dtype=dtype, device=device)[:, None].repeat(1, 7).requires_grad_()
    check(lambda x, y: (x + y).std(1, correction=0) * 2, x, x.new_zeros(4, 1))


def test_a_view_of_a_value_is_a_result(device):
    """Its backward takes the value as a view of that result: each is a view of the other one."""

    def attended(q, k, v):
        q = q.sigmoid() * 2
        return F.scaled_dot_product_attention(q, k, v) * 2, q.flatten(2)

    check(attended, *(torch.randn(2, 3, 8, 8, device=device, requires_grad=True) for _ in range(3)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_number_is_compared_in_the_dtype_of_the_tensor(dtype, device):
    """0.1 is another number in each dtype, and equal to itself."""
    x = torch.tensor([0.1, 0.3, -0.1, 0.7] * 16, dtype=dtype, device=device)

    def function(x):
        y = x * 1
        return torch.stack([torch.where(c, y * 2, y * 3) for c in (y > 0.1, y >= 0.3, y == 0.7, y <= -0.1, y < 0.7)])

    program, other = check(function, x)
    assert launches(other.forward) == 1 < launches(program.forward)


@pytest.mark.parametrize("dim", [-1, 0])
def test_sums_of_conditions(dim, device):
    """The softmax of scaled_dot_product_attention, in its own words: rows of nothing but -inf become 0."""
    x = torch.randn(5, 7, 130, device=device)
    x[1], x[2, 3], x[3, :, 5] = -torch.inf, -torch.inf, torch.nan

    def function(x):
        masked = torch.isneginf(x)
        tests = masked.all(dim, keepdim=True), x.isnan().any(dim), (x > 2).any(dim), torch.isposinf(x).all(dim)
        return torch.where(tests[0], 0.0, torch.softmax(x, dim)), *tests[1:]

    _, other = check(function, x)
    made = [operation for operation in other.forward if type(operation.function) is Kernel]
    assert launches(other.forward) <= len(made) + (dim == 0)  # The softmax of columns.
    assert len(made) <= (5 if dim == 0 else 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(2, 3, 5, 130), (2, 4, 33, 64), (3, 2, 4, 1500), (2, 1, 7, 2), (1, 1, 1, 4096), (2, 2, 3, 4097)]
)
def test_rows(shape, dtype, device):
    """A softmax of scores and what surrounds it, forward and backward."""
    scores = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    bias = torch.randn(1, shape[1], 1, shape[-1], device=device, dtype=dtype, requires_grad=True)
    mask = torch.rand(shape[0], 1, shape[2], shape[-1], device=device) < 0.3
    mask[0, :, 0] = True

    def attention(scores, bias, mask, softmax=torch._safe_softmax):
        return softmax((scores * 0.5 + bias).masked_fill(mask, -torch.inf), -1)

    def kinds(operations):
        return [type(operation.function) for operation in operations if not operation.view]

    limit = 4 * TOLERANCE[dtype]
    _, other = check(attention, scores, bias, mask, tolerance=limit)
    assert kinds(other.forward).count(Kernel) == 1
    assert kinds(other.forward) == [Kernel] or shape[-1] > 4096
    check(lambda *t: attention(*t, softmax=torch.softmax), scores, bias, mask, tolerance=limit)
    check(lambda x: F.softmax(x, -1, torch.float32).to(x.dtype) * 2, scores, tolerance=limit)
    # In another layout, and of a view of what is computed.
    turned = (scores.transpose(1, 2), bias.transpose(1, 2), mask.transpose(1, 2))
    check(attention, *turned, tolerance=limit)
    check(lambda x: torch._safe_softmax((x * 3).transpose(0, 2), -1).flatten(1) + 1, scores, tolerance=limit)
    check(lambda x: torch._safe_softmax(x * 3, 0), scores, tolerance=limit)


def test_rows_of_infinities(device):
    x = torch.randn(6, 33, device=device)
    x[0], x[1, 3], x[2, 4], x[3], x[4] = -torch.inf, torch.inf, torch.nan, torch.nan, -torch.inf
    x[4, 7] = torch.nan
    check(lambda x: torch._safe_softmax(x * 1, -1), x)
    check(lambda x: torch.softmax(x * 1, -1), x)


def test_views_behind_an_offset(device):
    """What is concatenated behind something else, padded or sliced is computed where it is read, also through a view
    of another shape."""
    x, c, s = (torch.randn(shape, device=device) for shape in ((2, 4, 9, 16), (8, 16), (8, 16)))
    _, other = check(CHAINS["rotary after a token"][0], x, c, s)
    assert launches(other.forward) == 1
    _, other = check(lambda x: F.pad((x[:, 1:] * 2).reshape(2, 3, 36, 4), (1, 0, 2, 0)) + 1, x)
    assert launches(other.forward) == 1


def test_numbers_on_the_cpu(device):
    """They are the same in every call: a kernel has them in its source."""

    def function(x):
        scale = torch.sqrt(torch.tensor(64, dtype=torch.float) * 3)
        return (x / scale).exp() * torch.tensor(3) + torch.tensor(0.5)

    _, other = check(function, torch.randn(4, 6, device=device, requires_grad=True))
    assert names(other.forward) == ["fused_div_exp_mul_add"]
    assert launches(other.backward) == 1


def test_casts_of_parameters(device):
    """One launch for all, in each one's layout; not for what is computed."""
    x, v, w = (torch.randn(s, device=device) for s in ((3, 5), (7,), (2, 8, 3, 3)))
    low, back = (torch.float64, torch.float64) if INTERPRETED else (torch.bfloat16, torch.float16)
    w = w.to(memory_format=torch.channels_last)

    def function(x, v, w):
        return x.to(low), v.to(back), w.to(low), (x @ x.t()).to(low)

    _, other = check(function, x, v, w)
    assert [type(o.function) is Kernel for o in other.forward if not o.view].count(True) == 1
    assert launches(other.forward) == 3


def test_casts_of_gradients(device):
    """Those of parameters, under autocast, have one launch when all are there."""
    x = torch.randn(9, 16, device=device, requires_grad=True)
    weights = [torch.randn(16, 16, device=device, requires_grad=True) for _ in range(4)]
    low = torch.float64 if INTERPRETED else torch.bfloat16

    def function(x, *weights):
        for w in weights:
            x = (x.to(low) @ w.to(low)).sin()
        return x

    _, other = check(function, x, *weights, tolerance=3e-2)
    casts = [o for o in other.backward if type(o.function) is Kernel and len(o.makes) == 5]
    assert len(casts) == 1
    assert {*casts[0].makes} == {*other.wanted}
    assert not {"to", "_to_copy"} & {*names(other.backward)}


def test_gather(device):
    """Of what is stored and of what is computed, with an index that is expanded; softmax is computed with it."""
    x, y = (torch.randn(6, 5, 9, device=device, requires_grad=True) for _ in range(2))
    index = torch.randint(9, (1, 5, 7), device=device).expand(6, 5, 7)

    def function(x, y, index):
        scores = torch.gather(x, -1, index) + torch.gather(y * 2, -1, index).exp()
        return F.softmax(scores, -1) * 2, torch.gather(x, 1, index[:, :1, :].remainder(5)) - 1

    _, other = check(function, x, y, index)
    assert "gather" not in names(other.forward)
    assert launches(other.forward) == 4  # y * 2, the remainder, and two kernels.


def test_in_place(device):
    x, mask = torch.randn(4, 6, device=device, requires_grad=True), torch.rand(4, 6, device=device) > 0.5
    _, other = check(lambda x, mask: (x * 2).masked_fill_(mask, 0).add_(1).relu_(), x, mask)
    assert (launches(other.forward), launches(other.backward)) == (1, 1)


def test_what_is_written_while_another_view_is_in_use(device):
    def function(x):
        y = x * 2
        row = y[1]
        y.add_(1)
        return row * 3 + y.exp(), y

    check(function, torch.randn(4, 6, device=device))


def test_what_is_drawn_between_two_operations(device):
    """A DropPath: what is computed before the numbers are drawn is used after."""

    def function(x, y):
        shifted = x.transpose(0, 1) + 1
        keep = torch.full_like(x, 0.0)
        keep.index_fill_(0, torch.tensor([1], device=x.device), 2.0)
        keep.div_(0.5)
        return y + shifted.transpose(0, 1) * keep

    check(function, *(torch.randn(4, 6, device=device, requires_grad=True) for _ in range(2)))


def test_views_as_another_dtype(device):
    """They read memory, which therefore has to be written."""
    _, other = check(lambda x: ((x * 2 + 1).view(torch.int32) + 0, x * 3 - 1), torch.randn(4, 6, device=device))
    assert any(type(operation.function) is Kernel for operation in other.forward)


def test_a_value_is_computed_once(device):
    """Autocast casts what three projections read three times."""
    x = torch.randn(8, 16, device=device, requires_grad=True)
    weights = [torch.randn(16, 16, device=device, dtype=torch.float64) for _ in range(3)]
    program, other = check(lambda x, *w: sum((x * 2).double() @ m for m in w), x, *weights)
    assert launches(program.forward) - launches(other.forward) >= 4


@pytest.mark.parametrize("shape", [(5, 7), (300, 64), (2, 3, 130, 24)])
@pytest.mark.parametrize("turned", [False, True])
def test_what_is_stored_on_the_way_to_its_sum(device, shape, turned):
    """The gradient of a bias is summed where that of an activation is computed, in one pass over both."""
    x = torch.randn(shape, device=device)
    x = x.transpose(0, -1).contiguous().transpose(0, -1) if turned else x
    bias, scale = (torch.randn(shape[-1], device=device, requires_grad=True) for _ in range(2))
    program, other = check(lambda x, b, s: torch.tanh(x + b) * s, x.requires_grad_(), bias, scale, noise=16)
    (kernel, *adds) = (o for o in other.backward if not o.view)
    assert type(kernel.function) is Kernel
    assert len(kernel.makes) == 3  # The sums for bias and scale, and the gradient of x.
    assert len(adds) <= 1
    assert launches(program.backward) >= 5
    # Sums of something else are no part of it.
    y = torch.randn(shape, device=device, requires_grad=True)
    _, other = check(lambda x, y, b: (torch.tanh(x) * 2, (y + b) * 3), x, y, bias)
    assert sum(len(o.makes) == 3 for o in other.backward) == 0


def test_less_is_kept(device):
    x = torch.randn(64, 64, device=device, requires_grad=True)
    program, *_ = recorded(lambda x: F.gelu(x) * torch.sigmoid(x) + torch.tanh(x), [x])
    other = fused(program)
    assert len(program.kept) > 1
    assert other.kept == ("x0",)


def test_a_value_is_computed_of_one_that_is_kept(device):
    """Not of the three that this one was computed of."""
    x, y, z, g = (torch.randn(16, 16, device=device, requires_grad=True) for _ in range(4))
    w = torch.randn(16, 16, device=device, requires_grad=True)

    def function(x, y, z, g, w):
        total = x * y.detach() + z
        return total @ w + g * torch.sigmoid(total * 2)

    program, other = check(function, x, y, z, g, w)
    assert len(program.kept) - len(other.kept) == 1
    assert sum(name.startswith("v") for name in other.kept) == 1  # the total


def test_others_may_write_to_an_input(device):
    """Autograd keeps the results of these, not their input, which may be overwritten."""
    _, other = check(
        lambda x: torch.sigmoid(x) * torch.tanh(x) + x, torch.randn(8, 16, device=device, requires_grad=True)
    )
    assert "x0" not in other.kept
    module = Squashed().to(device)
    module.__class__ = region_class(Squashed, {})
    for _ in range(3):
        x = torch.randn(8, 16, device=device, requires_grad=True)
        between = x * 1
        out = module(between)
        between.add_(1)
        out.sum().backward()
        (expected,) = torch.autograd.grad(Squashed.forward(module, x).sum(), x)
        torch.testing.assert_close(x.grad, expected)


class Squashed(nn.Module):
    def forward(self, x):
        return torch.sigmoid(x) * torch.tanh(x) + x


class Exponential(torch.autograd.Function):
    """Keeps its input, and computes its result again."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.double().exp().sum(1)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return (dy[:, None] * x.double().exp()).to(x.dtype)


def test_a_backward_that_computes_again_keeps_no_more(device):
    _, other = check(Exponential.apply, torch.randn(8, 16, device=device, requires_grad=True))
    assert other.kept == ("x0",)


@pytest.mark.parametrize(
    ("shape", "dims"), [((70000, 3), (0,)), ((3, 70000), (1,)), ((1000, 2, 300), (0, 1)), ((5, 1), (1,))]
)
def test_sums_that_are_shared(shape, dims, device):
    """Where few programs would sum, several share a sum, and a second kernel adds up what they have."""
    if INTERPRETED and max(shape) > 1000:
        shape = tuple(min(n, 900) for n in shape)
    x = torch.randn(shape, device=device)
    outs = [check(lambda x: (x * x).sum(dims), x), check(lambda x: (x + 1).mean(dims, keepdim=True), x)]
    assert all(type(o.function) is Kernel for _, other in outs for o in other.forward if not o.view)


@pytest.mark.parametrize(("kept", "reduced"), [(8, 10**6), (96, 200704), (1, 10**7), (10**6, 300)])
def test_sums_have_one_order(kept, reduced, monkeypatch):
    """At most two kernels, the second of which adds up all that the first one leaves."""
    monkeypatch.setattr(generated, "multiprocessors", lambda device: 132)
    code = Code({"x": kept, "r": reduced})
    local = code.load("in0", Index.of("r", reduced) * kept + Index.of("x", kept), "", torch.float32)
    result = generated.Result((kept,), (1,), torch.float32)
    cpu = torch.device("cpu")
    *first, last = generated.reduction(code, [local], ["{total}"], [result], [torch.float32], 1, False, cpu)
    assert last.results == (result,)
    assert [len(kernel.results[0].sizes) for kernel in first] == ([2] if kept < 10**6 else [])
    assert all("atomic" not in kernel.source for kernel in (*first, last))

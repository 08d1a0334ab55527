"""Generated kernels: programs with and without them, on a GPU or, in a process of its own, in Triton's interpreter."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import draw
import pytest
import torch
import torch.nn.functional as F
from harness import DEVICES, needs_gpu
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

pytest.importorskip("triton")

import fastlayers
from fastlayers import backends
from fastlayers import functional as FL
from fastlayers.kernels import generated, low_rank
from fastlayers.kernels.affine import Index, divide, indices_of, unflatten
from fastlayers.kernels.generated import FAST, FORMULAS, Kernel, balanced
from fastlayers.kernels.launch import Producer
from fastlayers.ops import glu, reference
from fastlayers.ops import low_rank as ops
from fastlayers.ops.activations import BY_CODE
from fastlayers.ops.layer_norm import LAYER, RMS
from fastlayers.patching.fusion import kernels as fusion
from fastlayers.patching.fusion import schedule, specialised, thin_products
from fastlayers.patching.fusion.absorption import absorbed
from fastlayers.patching.fusion.kernels import rounded_later
from fastlayers.patching.fusion.lowering import DERIVATIVES, LOWERINGS
from fastlayers.patching.fusion.passes import fused
from fastlayers.patching.fusion.residual_products import with_residual_products
from fastlayers.patching.program import executors
from fastlayers.patching.program.executors import KEYS, Facts, PythonExecutor, excluding
from fastlayers.patching.program.program import Operation, Program, Value, plain_name, written
from fastlayers.patching.program.tape import Tape
from fastlayers.patching.reasons import PatchWarning, Reason
from fastlayers.patching.regions import region as regions
from fastlayers.patching.regions.entries import no_regions
from fastlayers.patching.regions.region import region_class

INTERPRETED = backends.triton_interprets()
#: torch's own error of one operation, times the operations of a chain.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 3e-2, torch.float16: 4e-3}
#: The interpreter truncates float32 to bfloat16, where a GPU rounds.
DTYPES = (torch.float32, torch.float64) if INTERPRETED else tuple(TOLERANCE)


#: A CPU where Triton interprets, which test_in_the_interpreter sees to.
PLACES = DEVICES if INTERPRETED else DEVICES[1:]


@pytest.fixture(autouse=True)
def generates(monkeypatch):
    if INTERPRETED:
        monkeypatch.setattr(backends, "generates_kernels", lambda device: True)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="Triton interprets here already")
def test_in_the_interpreter(inner_run, pytestconfig):
    options = [*inner_run, *draw.options(pytestconfig, draw.FEW)]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-m", "not gpu", __file__],
        env=os.environ | {"TRITON_INTERPRET": "1"}, cwd=Path(__file__).parents[1], capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert " passed" in run.stdout.splitlines()[-1]


# -- programs ---------------------------------------------------------------------------------------------------------


def recorded(function, inputs):
    """The program of a call and of its backward, the values of its tape, its results, their gradients and those of the
    inputs."""
    tape = Tape(inputs, [t for t in inputs if not t.requires_grad])
    wanted = [t for t in inputs if t.requires_grad]
    dys, gradients, names = [], [], []
    with tape:
        out = function(*inputs)
        results = out if isinstance(out, tuple) else (out,)
        split = len(tape.operations)
        active = [t for t in results if t.requires_grad]
        if active:
            with _disable_current_modes():
                dys = [torch.empty_like(t).copy_(torch.randn(t.shape)) for t in active]
            names = [tape.protect(dy, f"g{i}") for i, dy in enumerate(dys)]
            gradients = torch.autograd.grad(active, wanted, dys, allow_unused=True)
    asked = [None if g is None else tape.name(g) for g in gradients]
    program = tape.program(split, [tape.name(t) for t in results], names, asked)
    return program, tape, results, dys, gradients


def largest_of(t):
    return t.double().abs().nan_to_num(0, 0, 0).max().item()


def launches(operations):
    return sum(not operation.view for operation in operations)


def check(function, *inputs, tolerance=None, noise=1, seed=None):
    """Compare a program with generated kernels to the operations that it stands for; returns both programs. ``seed`` is
    that of the random numbers that both draw."""
    if seed is not None:
        torch.manual_seed(seed)
    program, tape, results, dys, gradients = recorded(function, inputs)
    other = fused(program)
    run = PythonExecutor(other, Facts())
    if seed is not None:
        torch.manual_seed(seed)
    with torch.no_grad(), excluding(KEYS):
        actual, kept = run.forward(*inputs, *tape.constants)
        found = run.backward(tuple(dys), list(kept)) if dys else ()
    expected = (*results, *gradients)
    largest = max(largest_of(b) for b in expected if b is not None)
    for a, b in zip((*actual, *found), expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
            # A sum that cancels is nothing but the rounding of what it adds up.
            rounding = noise * torch.finfo(b.dtype).eps * largest if b.is_floating_point() else 0
            limit = (tolerance or TOLERANCE.get(b.dtype, 0)) * largest_of(b) + rounding
            torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=limit, equal_nan=True)
    return program, other


def turned(x, cos, sin):
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return (x.float() * cos + turned.float() * sin).to(x.dtype)


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


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CHAINS)
def test_chains(name, dtype, device):
    torch.manual_seed(0)
    function, shapes, (forward, backward) = CHAINS[name]
    inputs = [torch.randn(s, device=device).to(dtype).requires_grad_() for s in shapes]
    # Of 1/6 torch has a float32 for every dtype, on a CPU for some operations.
    program, other = check(function, *inputs, tolerance=max(1e-6, TOLERANCE[dtype]) if name == "hard gates" else None)
    assert launches(other.forward) <= forward < launches(program.forward)
    assert launches(other.backward) <= backward < launches(program.backward)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("name", CHAINS)
def test_as_near_to_float64_as_torch(name):
    torch.manual_seed(0)
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


@pytest.mark.parametrize("device", PLACES)
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


@pytest.mark.parametrize("device", PLACES)
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


@pytest.mark.parametrize("device", PLACES)
def test_a_condition_that_all_rows_share(device):
    x, mask = torch.randn(6, 64, device=device, requires_grad=True), torch.arange(64, device=device) % 3 > 0
    _, other = check(lambda x, m: torch.softmax(torch.where(m, x * 2, -1e4), -1) * m, x, mask)
    assert launches(other.forward) == 1


@pytest.mark.parametrize("device", PLACES)
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
    torch.manual_seed(0)
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


@pytest.mark.parametrize("device", PLACES)
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


def alike(a, b):
    """``b`` in the shape of ``a``, or zeros if it has another number of elements."""
    return b.reshape(a.shape) if a.numel() == b.numel() else torch.zeros_like(a) + b.sum() * 0.01


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


@pytest.mark.parametrize("device", PLACES)
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


@pytest.mark.parametrize("device", PLACES)
def test_conditions(device):
    x, mask = torch.randn(4, 6, device=device), torch.rand(4, 6, device=device) > 0.5

    def function(x, mask):
        chosen = torch.where(mask & (x != 0), x * 2, -torch.inf).masked_fill(x > 3, 0.0)
        return chosen + (x <= x.abs()).float(), ~(mask | (x.double() < 1))

    _, other = check(function, x, mask)
    assert launches(other.forward) < 8


@pytest.mark.parametrize("device", PLACES)
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


@pytest.mark.parametrize("device", PLACES)
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


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_deviation_of_equal_elements_is_0(dtype, device):
    """So is its gradient. The sum of 7 times 3.3 divided by 7 is not 3.3."""
    x = torch.tensor([3.3, 0.1, -1.7, 1e4], dtype=dtype, device=device)[:, None].repeat(1, 7).requires_grad_()
    check(lambda x, y: (x + y).std(1, correction=0) * 2, x, x.new_zeros(4, 1))


@pytest.mark.parametrize("device", PLACES)
def test_a_view_of_a_value_is_a_result(device):
    """Its backward takes the value as a view of that result: each is a view of the other one."""

    def attended(q, k, v):
        q = q.sigmoid() * 2
        return F.scaled_dot_product_attention(q, k, v) * 2, q.flatten(2)

    check(attended, *(torch.randn(2, 3, 8, 8, device=device, requires_grad=True) for _ in range(3)))


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_number_is_compared_in_the_dtype_of_the_tensor(dtype, device):
    """0.1 is another number in each dtype, and equal to itself."""
    x = torch.tensor([0.1, 0.3, -0.1, 0.7] * 16, dtype=dtype, device=device)

    def function(x):
        y = x * 1
        return torch.stack([torch.where(c, y * 2, y * 3) for c in (y > 0.1, y >= 0.3, y == 0.7, y <= -0.1, y < 0.7)])

    program, other = check(function, x)
    assert launches(other.forward) == 1 < launches(program.forward)


@pytest.mark.parametrize("device", PLACES)
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


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(2, 3, 5, 130), (2, 4, 33, 64), (3, 2, 4, 1500), (2, 1, 7, 2), (1, 1, 1, 4096), (2, 2, 3, 4097)]
)
def test_rows(shape, dtype, device):
    """A softmax of scores and what surrounds it, forward and backward."""
    torch.manual_seed(0)
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


@pytest.mark.parametrize("device", PLACES)
def test_rows_of_infinities(device):
    x = torch.randn(6, 33, device=device)
    x[0], x[1, 3], x[2, 4], x[3], x[4] = -torch.inf, torch.inf, torch.nan, torch.nan, -torch.inf
    x[4, 7] = torch.nan
    check(lambda x: torch._safe_softmax(x * 1, -1), x)
    check(lambda x: torch.softmax(x * 1, -1), x)


@pytest.mark.parametrize("device", PLACES)
def test_views_behind_an_offset(device):
    """What is concatenated behind something else, padded or sliced is computed where it is read, also through a view
    of another shape."""
    x, c, s = (torch.randn(shape, device=device) for shape in ((2, 4, 9, 16), (8, 16), (8, 16)))
    _, other = check(CHAINS["rotary after a token"][0], x, c, s)
    assert launches(other.forward) == 1
    _, other = check(lambda x: F.pad((x[:, 1:] * 2).reshape(2, 3, 36, 4), (1, 0, 2, 0)) + 1, x)
    assert launches(other.forward) == 1


@pytest.mark.parametrize("device", PLACES)
def test_numbers_on_the_cpu(device):
    """They are the same in every call: a kernel has them in its source."""

    def function(x):
        scale = torch.sqrt(torch.tensor(64, dtype=torch.float) * 3)
        return (x / scale).exp() * torch.tensor(3) + torch.tensor(0.5)

    _, other = check(function, torch.randn(4, 6, device=device, requires_grad=True))
    assert names(other.forward) == ["generated"]
    assert launches(other.backward) == 1


@pytest.mark.parametrize("device", PLACES)
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


@pytest.mark.parametrize("device", PLACES)
def test_casts_of_gradients(device):
    """Those of parameters, under autocast, have one launch when all are there."""
    torch.manual_seed(0)
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


@pytest.mark.parametrize("device", PLACES)
def test_gather(device):
    """Of what is stored and of what is computed, with an index that is expanded; softmax is computed with it."""
    torch.manual_seed(0)
    x, y = (torch.randn(6, 5, 9, device=device, requires_grad=True) for _ in range(2))
    index = torch.randint(9, (1, 5, 7), device=device).expand(6, 5, 7)

    def function(x, y, index):
        scores = torch.gather(x, -1, index) + torch.gather(y * 2, -1, index).exp()
        return F.softmax(scores, -1) * 2, torch.gather(x, 1, index[:, :1, :].remainder(5)) - 1

    _, other = check(function, x, y, index)
    assert "gather" not in names(other.forward)
    assert launches(other.forward) == 4  # y * 2, the remainder, and two kernels.


def summed(dy, index, columns):
    return dy.new_zeros((*dy.shape[:-1], columns)).scatter_add(-1, index, dy)


def product(a, b, dtype):
    return a.to(dtype) @ b.to(dtype)


#: What stands on a CPU for what specialised programs call on a GPU.
EMULATED = {torch.ops.aten.bmm.dtype: product, torch.ops.aten.mm.dtype: product}


def attended(q, k, v, mask):
    """As scaled_dot_product_attention computes it where it has no kernel, of parts of one product."""
    s = q.shape[-1] ** -0.25
    q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2).float() for t in (q * 2, k * 2, v * 2))
    scores = torch.bmm((q * s).flatten(0, 1), (k.transpose(-1, -2) * s).flatten(0, 1)) + mask
    return torch.bmm(scores.softmax(-1), v.flatten(0, 1)).to(torch.bfloat16)


def relative(x, index):
    return torch.gather(x * 2, -1, index) * torch.gather(x.sin(), -1, (index + 1) % x.shape[-1]).transpose(0, 1)


def gathers(device):
    x = torch.randn(5, 5, 9, device=device, requires_grad=True)
    return x, torch.randint(9, (1, 5, 7), device=device).expand(5, 5, 7)


def parts(device):
    qkv = (torch.randn(3, 6, 16, device=device).bfloat16().requires_grad_() for _ in range(3))
    return *qkv, torch.randn(6, 6, device=device, requires_grad=True)


@pytest.mark.skipif(not hasattr(torch.ops.fastlayers, "gather_backward"), reason="csrc is not built")
@pytest.mark.parametrize(("function", "make"), [(relative, gathers), (attended, parts)])
def test_specialised(function, make, monkeypatch):
    """What such programs compute is the same; q kᵀ and dy vᵀ are products of what is exact in 16 bits."""
    monkeypatch.setattr(specialised, "is_served", lambda t: True)
    torch.manual_seed(0)
    inputs = make("cpu")
    program, tape, results, dys, gradients = recorded(function, inputs)
    other = specialised.specialised(replace(program, fake=FakeTensorMode()))
    emulated = EMULATED | {torch.ops.fastlayers.gather_backward.default: summed}
    forward, backward = (
        [replace(o, function=emulated.get(o.function, o.function)) for o in part]
        for part in (other.forward, other.backward)
    )
    run = PythonExecutor(replace(other, forward=forward, backward=backward), Facts())
    with torch.no_grad(), excluding(KEYS):
        actual, kept = run.forward(*inputs, *tape.constants)
        found = run.backward(tuple(dys), list(kept))
    for a, b in zip((*actual, *found), (*results, *gradients), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.stride() == b.stride()
            assert torch.allclose(a.double(), b.double(), rtol=1e-5, atol=1e-6)
    if function is relative:
        assert names(other.backward).count("gather_backward") == 2
        assert not {"scatter_add", "new_zeros", "zeros"} & set(names(other.backward))
    else:
        exact = [sum(o.function is product for o in part) for part in (forward, backward)]
        assert exact == [1, 1]
        assert names(other.forward).count("bmm") + names(other.backward).count("bmm") == 6


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("function", "make"), [(relative, gathers), (attended, parts)])
def test_specialised_on_a_gpu(function, make):
    torch.manual_seed(0)
    _, other = check(function, *make("cuda"), noise=4)
    called = [o.function for o in (*other.forward, *other.backward)]
    wanted = torch.ops.fastlayers.gather_backward.default if function is relative else torch.ops.aten.bmm.dtype
    assert called.count(wanted) == 2


@pytest.mark.parametrize("device", PLACES)
def test_in_place(device):
    x, mask = torch.randn(4, 6, device=device, requires_grad=True), torch.rand(4, 6, device=device) > 0.5
    _, other = check(lambda x, mask: (x * 2).masked_fill_(mask, 0).add_(1).relu_(), x, mask)
    assert (launches(other.forward), launches(other.backward)) == (1, 1)


@pytest.mark.parametrize("device", PLACES)
def test_what_is_written_while_another_view_is_in_use(device):
    def function(x):
        y = x * 2
        row = y[1]
        y.add_(1)
        return row * 3 + y.exp(), y

    check(function, torch.randn(4, 6, device=device))


@pytest.mark.parametrize("device", PLACES)
def test_what_is_drawn_between_two_operations(device):
    """A DropPath: what is computed before the numbers are drawn is used after."""

    def function(x, y):
        shifted = x.transpose(0, 1) + 1
        keep = torch.full_like(x, 0.0)
        keep.index_fill_(0, torch.tensor([1], device=x.device), 2.0)
        keep.div_(0.5)
        return y + shifted.transpose(0, 1) * keep

    check(function, *(torch.randn(4, 6, device=device, requires_grad=True) for _ in range(2)))


@pytest.mark.parametrize("device", PLACES)
def test_views_as_another_dtype(device):
    """They read memory, which therefore has to be written."""
    _, other = check(lambda x: ((x * 2 + 1).view(torch.int32) + 0, x * 3 - 1), torch.randn(4, 6, device=device))
    assert any(type(operation.function) is Kernel for operation in other.forward)


def wide(dtype):
    return torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_kernels_in_simple_operations(dtype):
    """Against the references, with the statistics that the kernels keep."""
    torch.manual_seed(0)
    limit = {"rtol": 0, "atol": TOLERANCE[dtype]}
    x, residual, y = (torch.randn(3, 4, 8).to(dtype) for _ in range(3))
    weight, bias = (torch.randn(4, 8).to(dtype) for _ in range(2))

    def same(actual, expected):
        assert (actual.dtype, actual.shape, actual.stride()) == (expected.dtype, expected.shape, expected.stride())
        torch.testing.assert_close(actual, expected, **limit)

    norm = LOWERINGS["layer_norm_forward"]
    found, stats = norm(x, 2, weight, bias, 1e-5, LAYER, dtype, True)
    same(found, F.layer_norm(x, (4, 8), weight, bias))
    rows = x.to(wide(dtype)).flatten(1)
    mean, rstd = rows.mean(1), (rows.var(1, correction=0) + 1e-5).rsqrt()
    same(stats, torch.stack((mean, rstd)))
    same(norm(x.transpose(0, 1), 1, None, None, 1e-5, LAYER, dtype, False)[0],
         F.layer_norm(x.transpose(0, 1).contiguous(), (8,)))  # fmt: skip
    for casting, kind in RMS.items():
        found, stats = norm(x, 2, weight, None, 1e-5, kind, dtype, True)
        same(found, reference.rms_norm(x, (4, 8), weight, 1e-5, casting))
        same(stats, (rows.square().mean(1) + 1e-5).rsqrt()[None])
    found, total, _ = LOWERINGS["add_layer_norm_forward"](x, residual, 2, weight, bias, 1e-5, LAYER, dtype, False)
    same(total, x + residual)
    same(found, F.layer_norm(x + residual, (4, 8), weight, bias))
    same(LOWERINGS["native_layer_norm"](x, (4, 8), weight, bias, 1e-5)[0], F.layer_norm(x, (4, 8), weight, bias))
    of_norm = LOWERINGS["layer_norm_backward"]
    rows = x.to(wide(dtype)).requires_grad_()
    for kind, stats in (
        (LAYER, torch.stack((mean, rstd))),
        (RMS["torch"], (x.to(wide(dtype)).flatten(1).square().mean(1) + 1e-5).rsqrt()[None]),
    ):
        normed = F.layer_norm(rows, (4, 8)) if kind == LAYER else reference.rms_norm(rows, (4, 8), None, 1e-5, "torch")
        (expected,) = torch.autograd.grad(normed, rows, y.to(wide(dtype)))
        same(of_norm(y, None, x, 2, None, stats, kind, False, False)[0], expected.to(dtype))
        twice = of_norm(y, residual, x, 2, None, stats, kind, False, False, torch.bfloat16)
        same(twice[0], (expected + residual).to(dtype))
        same(twice[3], twice[0].bfloat16())
    image, moments = torch.randn(3, 4, 8, 2).to(dtype), (torch.randn(4), torch.rand(4) + 0.5)
    affine = torch.randn(4), torch.randn(4)
    for act in BY_CODE.values():
        found, *_ = LOWERINGS["batch_norm_eval"](image, *moments, *affine, 1e-3, image * 2, act.code, False, False)
        normed = F.batch_norm(image.to(wide(dtype)), *(t.to(wide(dtype)) for t in (*moments, *affine)), eps=1e-3)
        same(found, act.function(normed + 2 * image).to(dtype))
    found, *_ = LOWERINGS["batch_norm_eval"](image, *moments, None, None, 1e-3, None, 0, False, False)
    same(found, F.batch_norm(image.to(wide(dtype)), *(t.to(wide(dtype)) for t in moments), eps=1e-3).to(dtype))
    found = LOWERINGS["channel_bias_act_"](image, affine[0], image * 2, BY_CODE[1].code)
    same(found, F.relu(3 * image.to(wide(dtype)) + affine[0].to(wide(dtype)).view(-1, 1, 1)).to(dtype))
    softmax, backward = LOWERINGS["softmax_forward"], LOWERINGS["softmax_backward"]
    mask = torch.randn(4, 1).to(dtype)
    same(softmax(x, 2, 0.5, mask, dtype, False), F.softmax((x * 0.5 + mask), 2))
    scores = x.detach().requires_grad_()
    share = F.softmax(scores * 0.5, 2)
    same(backward(y, share.detach(), 2, 0.5, None, dtype, False), torch.autograd.grad(share, scores, y)[0])
    keep = torch.tensor([1.0, 0.0, 1.0], dtype=wide(dtype))
    scaled = x.to(wide(dtype)) * weight * keep.view(-1, 1, 1) * 1.25
    same(LOWERINGS["scale_add"](x, weight, residual, keep, 1.25, dtype), (residual + scaled).to(dtype))
    same(LOWERINGS["scale_add"](x, None, None, None, 2.0, dtype), x * 2)
    for act in BY_CODE.values():
        parameters = tuple(act.parameters.values())
        biased = act.function(x.to(wide(dtype)) + bias.to(wide(dtype)), *parameters).to(dtype)
        same(LOWERINGS["bias_act_forward"](x, bias, act.code, *(*parameters, 0.0, 0.0)[:2]), biased)
        same(LOWERINGS["bias_act_forward"](x, None, 1, 0.0, 0.0), F.relu(x))
        if act.code in DERIVATIVES:
            z = F.relu(x) if act.code == 1 else x.to(wide(dtype)) + bias.to(wide(dtype))
            expected = act.backward(y.to(wide(dtype)), z.to(wide(dtype)))
            call = (y, z.to(dtype), None) if act.code == 1 else (y, x, bias)
            found, summed = LOWERINGS["bias_act_backward"](*call, act.code, 0.0, 0.0, True, wide(dtype))
            same(found, expected.to(dtype))
            same(summed, found.to(wide(dtype)).sum((0, 1)))
        gated = (act.function(x.to(wide(dtype))) * y).to(dtype)
        same(LOWERINGS["gated_forward"](x, y, act.code), gated)
    for name, function in (("var", torch.var), ("std", torch.std)):
        for options in ({}, {"correction": 0, "keepdim": True}, {"correction": 1.5}):
            same(LOWERINGS[f"{name}.correction"](x, (0, 2), **options), function(x, (0, 2), **options))
    for actual, expected in zip(LOWERINGS["var_mean.correction"](x, (1,)), torch.var_mean(x, (1,)), strict=True):
        same(actual, expected)
    for refused in (
        lambda: softmax(x, 2, 1.0, None, dtype, True),
        lambda: softmax(x, 2, 1.0, mask > 0, dtype, False),
        lambda: backward(y, x, 2, 1.0, mask, dtype, False),
        lambda: of_norm(y, None, x, 2, weight, stats, LAYER, True, False),
        lambda: LOWERINGS["bias_act_backward"](y, x, None, BY_CODE[10].code, 0.0, 0.0, False),
        lambda: LOWERINGS["var.correction"](x, (2,), correction=8),
    ):
        with pytest.raises(NotImplementedError):
            refused()


def scaled_add_norm(x, residual, gamma, weight):
    y, s = FL.add_layer_norm(x * gamma, residual, (64,), weight, weight)
    return y * 2, s


#: Kernels with neighbours, the shapes of the arguments, and how many launches are left of the forward. Of a modulation
#: 1 + scale is kept.
NEIGHBOURS = {
    "scale, sum, norm": (scaled_add_norm, [(4, 6, 64), (4, 6, 64), (64,), (64,)], 1),
    "sum, norm": (lambda x, y, w: (lambda s: (FL.rms_norm(s, (64,), w), s))(x * y), [(4, 6, 64), (4, 6, 64), (64,)], 1),
    "norm, turned": (
        lambda x, w: FL.layer_norm(x, (64,), w).view(2, 2, 3, 2, 64).transpose(1, 2).reshape(4, 6, 64),
        [(4, 6, 64), (64,)], 1,
    ),
    "norm, modulation": (
        lambda x, s, t: FL.layer_norm(x, (64,)) * (1 + s[:, None]) + t[:, None], [(4, 6, 64), (4, 64), (4, 64)], 2,
    ),
    "norm alone": (lambda x, w: FL.layer_norm(x, (64,), w), [(4, 6, 64), (64,)], 1),
    "softmax": (lambda x, m: FL.softmax(x * 3, -1, scale=0.5, mask=m) * 2, [(4, 300, 64), (300, 64)], 1),
    "gate, norm": (lambda x, y, w: FL.rms_norm(FL.swiglu(x, y), (64,), w), [(4, 6, 64), (4, 6, 64), (64,)], 1),
    "cat, batch norm": (
        lambda x, y, w: FL.batch_norm(
            torch.cat((x.detach(), y.detach()), 1), torch.zeros_like(w), torch.ones_like(w), w.detach(), w.detach(),
            act="relu",
        ) * 2,
        [(4, 6, 9, 9), (4, 10, 9, 9), (16,)], 1,
    ),
    "activation, norm of columns": (
        lambda x, b: (lambda h: h * torch.linalg.vector_norm(h, 2, (1, 2), keepdim=True))(FL.bias_act(x, b, "gelu")),
        [(2, 8, 8, 64), (64,)], 2,
    ),
    "scale_add": (lambda x, y, g: FL.scale_add(x * 2, g, y) + 1, [(4, 6, 64), (4, 6, 64), (64,)], 1),
}  # fmt: skip


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", NEIGHBOURS)
def test_kernels_and_their_neighbours(name, dtype):
    torch.manual_seed(0)
    function, shapes, launched = NEIGHBOURS[name]
    inputs = [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes]
    _, other = check(function, *inputs, tolerance=4 * TOLERANCE[dtype])
    assert launches(other.forward) == launched, names(other.forward)
    assert any(type(o.function) is Kernel for o in other.forward) == (name != "norm alone")


def names(operations):
    return [plain_name(operation.function) for operation in operations if not operation.view]


def biased_convolution(x, kernel, bias, weight):
    y = F.conv2d(x.contiguous(memory_format=torch.channels_last), kernel, bias, padding=1)
    return FL.layer_norm(y.permute(0, 2, 3, 1), (16,), weight)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_bias_of_a_convolution_is_added_in_the_norm_after_it(dtype, autocast):
    torch.manual_seed(0)
    inputs = [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)
              for shape in ((2, 8, 12, 12), (16, 8, 3, 3), (16,), (16,))]  # fmt: skip

    def function(*args):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            return biased_convolution(*args)

    program, other = check(function, *inputs, tolerance=3e-2, noise=4)
    convolution = next(o for o in other.forward if plain_name(o.function) == "convolution")
    assert convolution.args[2] is None
    assert any(type(o.function) is Kernel and convolution.makes[0] in o.uses for o in other.forward)
    assert launches(other.forward) <= launches(program.forward)


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("transposed", [False, True])
def test_the_bias_of_a_convolution_and_what_is_written_over_their_sum(device, transposed, monkeypatch):
    monkeypatch.setattr(specialised, "is_served", lambda t: True)
    x, kernel, bias = (torch.randn(s, device=device) for s in ((2, 4, 6, 6), (4, 4, 3, 3), (4,)))
    convolve = F.conv_transpose2d if transposed else F.conv2d
    _, other = check(
        lambda *t: torch.relu_(convolve(*t)), x.contiguous(memory_format=torch.channels_last), kernel, bias
    )
    assert names(other.forward) == ["convolution", "generated"]
    # Nothing joins the sum, which is small: torch adds the bias.
    _, other = check(lambda x, k, b: F.max_pool2d(convolve(x, k, b), 2), x, kernel, bias)
    assert [o.args[2] is None for o in other.forward if plain_name(o.function) == "convolution"] == [False]


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("name", "options"), [("gelu", {}), ("gelu", {"approximate": "tanh"}), ("silu", {})])
def test_an_activation_and_the_gradient_of_the_bias_before_it(name, options):
    """torch's, as a rule did not see it: alone in the forward, its gradient is summed where it is computed."""
    torch.manual_seed(0)
    x = torch.randn(4096, 64, device="cuda", requires_grad=True)
    weight, bias = torch.randn(1024, 64, device="cuda"), torch.randn(1024, device="cuda")
    inputs = [x, weight.requires_grad_(), bias.requires_grad_(), torch.randn(64, 1024, device="cuda")]

    def function(x, weight, bias, other):
        with torch.autocast("cuda", torch.bfloat16):
            return FL.linear(getattr(F, name)(FL.linear(x, weight, bias), **options), other)

    _, other = check(function, *inputs, tolerance=3e-2, noise=64)
    assert "bias_act_forward" in names(other.forward)
    (gradient,) = (o for o in other.backward if plain_name(o.function) == "bias_act_backward")
    assert gradient.makes[1] in other.wanted
    assert name not in names(other.forward)


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("place", ["query", "key", "both"])
def test_a_factor_of_queries_is_that_of_attention(device, place):
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x = torch.randn(2, 16, 3, 64, device=device, dtype=dtype, requires_grad=True)

    def function(x):
        q, k, v = ((x * n).transpose(1, 2) for n in (2, 3, 4))
        q, k = q + 1 if place == "key" else (q + 1) * 0.25, k + 1 if place == "query" else (k + 1) / 2
        return F.scaled_dot_product_attention(q, k, v, scale=None if place == "both" else 0.5)

    _, other = check(function, x, tolerance=1e-5 if device == "cpu" else 5e-2, noise=16)
    (attention,) = (o for o in other.forward if "attention" in plain_name(o.function))
    (backward,) = (o for o in other.backward if "attention" in plain_name(o.function))
    factor = {"query": 0.25 * 0.5, "key": 0.5 * 0.5, "both": 0.25 / 2 / 8}[place]
    assert attention.kwargs["scale"] == backward.kwargs["scale"] == factor


@pytest.mark.parametrize("device", PLACES)
def test_a_factor_that_others_see_stays(device):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 16, 64, device=device, dtype=torch.float32 if device == "cpu" else torch.bfloat16)

    def function(x):
        q = (x + 1) * 0.25
        return F.scaled_dot_product_attention(q, x, x), q.transpose(1, 2) + 1

    _, other = check(function, x.requires_grad_(), tolerance=5e-2, noise=16)
    (attention,) = (o for o in other.forward if "attention" in plain_name(o.function))
    assert attention.kwargs.get("scale") is None


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("norm", ["layer", "rms", "added"])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_norms_absorb(dtype, turned, norm):
    """The cast of a result, also of a view of it, that of a gradient, and the sum with a residual's gradient."""
    torch.manual_seed(0)
    x, residual, proj = (torch.randn(s, device="cuda", requires_grad=True) for s in ((4, 6, 64), (4, 6, 64), (64, 64)))
    weight, bias = (torch.randn(64, device="cuda", requires_grad=True) for _ in range(2))

    def function(x, residual, weight, bias, proj):
        if norm == "added":
            y, x = FL.add_layer_norm(x, residual, (64,), weight, bias)
        else:
            y = FL.layer_norm(x, (64,), weight, bias) if norm == "layer" else FL.rms_norm(x, (64,), weight)
        y = y.transpose(0, 1) if turned else y
        return x + (y.to(dtype).reshape(-1, 64) @ proj.to(dtype)).float().view(y.shape).view(x.shape)

    _, other = check(function, x, residual, weight, bias, proj, tolerance=TOLERANCE[dtype])
    casts = [name for name in names(other.forward) if name in ("to", "_to_copy")]
    assert len(casts) == 1  # That of the other factor.
    (backward,) = (o for o in other.backward if plain_name(o.function) == "layer_norm_backward")
    assert not any(plain_name(o.function) in ("to", "_to_copy") and o.makes[0] == backward.args[0].name
                   for o in other.backward)  # fmt: skip
    assert backward.args[1] is not None
    assert "add" not in names(other.backward)


@pytest.mark.skipif(not hasattr(torch.ops.fastlayers, "layer_norm_forward"), reason="csrc is not built")
def test_absorption_by_names():
    """What is needed otherwise keeps its dtype; what is added must be there before."""
    values, ops = {}, torch.ops.fastlayers

    def made(name, *shape, dtype=torch.float32):
        values[name] = torch.randn(shape).to(dtype)
        return (name,)

    for name in ("x0", "g0"):
        made(name, 4, 8)
    made("x1", 8)
    x, weight, dy = (Value(name) for name in ("x0", "x1", "g0"))
    values["stats"] = torch.randn(1, 4)
    forward = [
        Operation(ops.layer_norm_forward.default, (x, 1, weight, None, 1e-5, 1, torch.float32, True), {},
                  (*made("y", 4, 8), "stats"), False, False),
        Operation(torch.ops.aten.to.dtype, (Value("y"), torch.bfloat16), {}, made("low", 4, 8, dtype=torch.bfloat16),
                  True, False),
        Operation(torch.ops.aten.relu.default, (Value("low"),), {}, made("out", 4, 8, dtype=torch.bfloat16), True,
                  False),
    ]  # fmt: skip
    backward = [
        Operation(torch.ops.aten.to.dtype, (dy, torch.bfloat16), {}, made("dlow", 4, 8, dtype=torch.bfloat16), True,
                  False),
        Operation(torch.ops.aten._to_copy.default, (Value("dlow"),), {"dtype": torch.float32}, made("dy", 4, 8), True,
                  False),
        Operation(ops.layer_norm_backward.default, (Value("dy"), None, x, 1, weight, Value("stats"), 1, True, False),
                  {}, (*made("dx", 4, 8), *made("dw", 8), ""), False, False),
        Operation(torch.ops.aten.add.Tensor, (Value("dx"), dy), {}, made("total", 4, 8), True, False),
    ]  # fmt: skip
    values["dlow"] = values["g0"].bfloat16()
    program = Program(
        ("x0", "x1"), forward, ("out",), ("x0", "x1", "stats", "low"), ("g0",), backward, ("total", "dw"),
        values=values, fake=FakeTensorMode(),
    )  # fmt: skip
    found = absorbed(program)
    assert names(found.forward) == ["layer_norm_forward", "relu"]
    assert found.forward[0].args[6] is torch.bfloat16
    low = found.forward[1].args[0].name
    assert found.kept == ("stats", "x0", "x1")  # The backward does not read it.
    assert values[low].dtype is torch.bfloat16
    assert names(found.backward) == ["to", "layer_norm_backward"]
    assert found.backward[1].args[:2] == (Value("dlow"), dy)
    assert found.backward[1].makes[0] == found.wanted[0]
    # Also through what only moves its elements, but not if a moved value is needed as it is.
    moving = [
        forward[0],
        Operation(torch.ops.aten.roll.default, (Value("y"), [1], [0]), {}, made("rolled", 4, 8), True, False),
        Operation(torch.ops.aten.view.default, (Value("rolled"), [8, 4]), {}, ("viewed",), True, False, True),
        Operation(torch.ops.aten.clone.default, (Value("viewed"),), {}, made("copy", 8, 4), True, False),
        replace(forward[1], args=(Value("copy"), torch.bfloat16), makes=made("low2", 8, 4, dtype=torch.bfloat16)),
        replace(forward[2], args=(Value("low2"),)),
    ]
    values["viewed"] = values["rolled"].view(8, 4)
    moved = replace(program, forward=moving, kept=("x0", "x1", "stats", "low2"))
    last = absorbed(moved).forward
    assert names(last) == ["layer_norm_forward", "roll", "clone", "relu"]
    assert last[0].args[6] is torch.bfloat16
    assert {values[o.makes[0]].dtype for o in last} == {torch.bfloat16}
    assert values[last[2].makes[0]].shape == (8, 4)
    kept = replace(moved, results=("out", "rolled"))
    assert names(absorbed(kept).forward) == ["layer_norm_forward", "roll", "clone", "to", "relu"]
    # As float32 something else reads it, or it is kept so; or the sum is one of what comes later.
    assert names(absorbed(replace(program, kept=(*program.kept, "y"))).forward) == names(forward)
    assert names(absorbed(replace(program, results=("out", "y"))).forward) == names(forward)
    late = replace(backward[3], args=(Value("dx"), Value("later")))
    later = Operation(torch.ops.aten.neg.default, (dy,), {}, made("later", 4, 8), True, False)
    assert "add" in names(absorbed(replace(program, backward=[*backward[:3], later, late])).backward)
    # What a cast of the gradient makes, for something that no kernel is generated for, is written beside it.
    for source, shape in (("total", (4, 8)), ("flat", (32,))):
        view = Operation(torch.ops.aten.view.default, (Value("total"), shape), {}, made("flat", 32), True, False, True)
        cast = Operation(torch.ops.aten.to.dtype, (Value(source), torch.bfloat16), {},
                         made("dlow2", *shape, dtype=torch.bfloat16), True, False)  # fmt: skip
        product = Operation(torch.ops.aten.cumsum.default, (Value("dlow2"), 0), {},
                            made("sum", *shape, dtype=torch.bfloat16), True, False)  # fmt: skip
        values["flat"] = values["total"].view(32)
        more = replace(program, backward=[*backward, view, cast, product], wanted=("total", "sum"))
        last = absorbed(more).backward[1:]
        assert last[0].args[9] is torch.bfloat16
        assert names(last) == ["layer_norm_backward", "cumsum"]
        assert (last[0].makes[3] == "dlow2") is (source == "total")
        if INTERPRETED:  # Else no kernel is generated for tensors on a CPU.
            negated = replace(product, function=torch.ops.aten.neg.default, args=(Value("dlow2"),))
            later = absorbed(replace(more, backward=[*more.backward[:-1], negated]))
            assert "to" in names(later.backward[2:])
    twice = Operation(torch.ops.aten.neg.default, (Value("dx"),), {}, made("other", 4, 8), True, False)
    twice = replace(program, backward=[*backward, twice], wanted=("total", "other"))
    assert "add" in names(absorbed(twice).backward)


@pytest.mark.parametrize("device", PLACES)
def test_a_value_is_computed_once(device):
    """Autocast casts what three projections read three times."""
    x = torch.randn(8, 16, device=device, requires_grad=True)
    weights = [torch.randn(16, 16, device=device, dtype=torch.float64) for _ in range(3)]
    program, other = check(lambda x, *w: sum((x * 2).double() @ m for m in w), x, *weights)
    assert launches(program.forward) - launches(other.forward) >= 4


@pytest.mark.parametrize("device", PLACES)
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


@pytest.mark.parametrize("device", PLACES)
def test_less_is_kept(device):
    x = torch.randn(64, 64, device=device, requires_grad=True)
    program, *_ = recorded(lambda x: F.gelu(x) * torch.sigmoid(x) + torch.tanh(x), [x])
    other = fused(program)
    assert len(program.kept) > 1
    assert other.kept == ("x0",)


@pytest.mark.parametrize("device", PLACES)
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


@pytest.mark.parametrize("device", PLACES)
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


@pytest.mark.parametrize("device", PLACES)
def test_a_backward_that_computes_again_keeps_no_more(device):
    _, other = check(Exponential.apply, torch.randn(8, 16, device=device, requires_grad=True))
    assert other.kept == ("x0",)


@pytest.mark.parametrize("device", PLACES)
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
    code = generated.Code({"x": kept, "r": reduced})
    local = code.load("in0", Index.of("r", reduced) * kept + Index.of("x", kept), "", torch.float32)
    result = generated.Result((kept,), (1,), torch.float32)
    cpu = torch.device("cpu")
    *first, last = generated.reduction(code, [local], ["{total}"], [result], [torch.float32], 1, False, cpu)
    assert last.results == (result,)
    assert [len(kernel.results[0].sizes) for kernel in first] == ([2] if kept < 10**6 else [])
    assert all("atomic" not in kernel.source for kernel in (*first, last))


# -- indices ----------------------------------------------------------------------------------------------------------


def value_of(index, **variables):
    return index.constant + sum(c * (variables[a.variable] // a.divisor % a.size) for c, a in index.terms)


@pytest.mark.parametrize("sizes", [(4, 6), (2, 3, 4), (5,), (3, 1, 2), (2, 2, 2, 3)])
def test_indices_are_those_of_the_memory(sizes):
    for order in itertools.permutations(range(len(sizes))):
        t = torch.empty([sizes[d] for d in order]).permute([order.index(d) for d in range(len(sizes))])
        indices = indices_of("x", t.shape, t.stride())
        for x in range(t.numel()):
            place = [value_of(index, x=x) for index in indices]
            assert sum(i * s for i, s in zip(place, t.stride(), strict=True)) == x
            assert all(0 <= i < n for i, n in zip(place, sizes, strict=True))


def test_division_is_exact_or_refused():
    x = Index.of("x", 24)
    for index, stride in itertools.product(
        [x, x + 3, x * 2 + -5, Index.of("x", 24, 2) * 4 + Index.of("x", 2)], range(1, 9)
    ):
        found = divide(index, stride)
        for i in range(24 if found else 0):
            quotient, rest = (value_of(part, x=i) for part in found)
            assert (quotient, rest) == divmod(value_of(index, x=i), stride)
    assert divide(x, 5) is None
    assert unflatten(x, (4, 6), (6, 1)) is not None
    assert unflatten(x, (3, 5), (5, 1)) is None


def test_neighbouring_atoms_join():
    rows, columns = Index.of("x", 4, 6), Index.of("x", 6)
    assert rows * 6 + columns == Index.of("x", 24)
    assert (rows * 6 + columns).source({"x": 24}) == "x"
    assert (rows * 8 + columns).source({"x": 24}) == "(x % 6) + (x // 6) * 8"


# -- regions ----------------------------------------------------------------------------------------------------------


class Modulated(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.linear, self.gate = nn.Linear(width, width), nn.Parameter(torch.rand(width))

    def forward(self, x, t):
        y = self.linear(x)
        return x + (y * torch.sigmoid(t) + y.tanh()) * self.gate * (1 + t).exp().clamp(max=3)


def entries_of(module):
    return [entry for found in type(module).__fastlayers_region__.entries.values() for entry in found]


def outcome(module, *inputs):
    given = [t.detach().requires_grad_() for t in inputs]
    out = module(*given)
    return [out, *torch.autograd.grad(out.square().sum(), [*given, *module.parameters()])]


@pytest.mark.parametrize("device", PLACES)
def test_regions(device):
    torch.manual_seed(0)
    module = Modulated().to(device)
    cls = region_class(Modulated, {})
    for rows in (8, 8, 8, 3, 3, 3):  # recorded at the second call of a shape
        inputs = [torch.randn(rows, 32, device=device) for _ in range(2)]
        expected = outcome(module, *inputs)
        module.__class__ = cls
        for a, b in zip(outcome(module, *inputs), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        module.__class__ = Modulated
    module.__class__ = cls
    assert [entry.refusal for entry in entries_of(module)] == [None, None]


@needs_gpu
@pytest.mark.gpu
def test_tensors_that_are_not_aligned():
    torch.manual_seed(0)
    module = Modulated().cuda()
    region = Modulated().cuda()
    region.load_state_dict(module.state_dict())
    region.__class__ = region_class(Modulated, {})
    storage = torch.randn(2, 8 * 32 + 4, device="cuda")
    for offset in (0, 0, 0, 1, 1, 0):
        inputs = [row[offset : offset + 256].view(8, 32) for row in storage]
        for a, b in zip(outcome(region, *inputs), outcome(module, *inputs), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.skipif(executors.problem is not None, reason=f"{executors.problem}")
def test_cpp_launches_them(monkeypatch):
    region = Modulated().cuda()
    region.__class__ = region_class(Modulated, {})
    inputs = [torch.randn(8, 32, device="cuda", requires_grad=True) for _ in range(2)]
    for _ in range(3):
        region(*inputs).sum().backward()

    def call(*args):
        raise AssertionError("Python was called")

    monkeypatch.setattr(Kernel, "__call__", call)
    monkeypatch.setattr(executors, "run_generated", call)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        region(*inputs).sum().backward()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = region(*inputs)
    graph.replay()
    torch.testing.assert_close(out, Modulated.forward(region, *inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(INTERPRETED, reason="needs no interpreter")
def test_only_triton_generates(monkeypatch):
    monkeypatch.setattr(backends, "problem", lambda name, device=None: None)
    for forced, expected in ((None, True), ("cuda", True), ("triton", True), ("eager", False), ("compile", False)):
        monkeypatch.setattr(backends, "_forced", forced)
        assert backends.generates_kernels(torch.device("cuda")) == expected
        assert backends.generates_kernels(torch.device("cpu")) == (forced == "triton")


class Shifted(nn.Module):
    """With the gradients of a recording, those of the bias cancel: what is left is rounding."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.rand(32))

    def forward(self, x):
        return (x + self.bias) * 0.1 - x.abs() * 0.3 + x.sin()


@pytest.mark.parametrize("device", PLACES)
def test_gradients_of_nothing_but_rounding(device):
    """Two orders of a sum find other roundings."""
    module = Shifted().to(device)
    module.__class__ = region_class(Shifted, {})
    for _ in range(3):
        module(torch.randn(280, 32, device=device, requires_grad=True)).sum().backward()
    (entry,) = entries_of(module)
    assert entry.refusal is None


class Largest(nn.Module):
    def forward(self, x):
        return (torch.sin(x) * torch.cos(x) + x.tanh()).amax(-1)


@pytest.mark.parametrize("device", PLACES)
def test_results_and_what_is_kept_are_of_one_run(device):
    """The largest element of a run with generated kernels may not be one of the run without them."""
    torch.manual_seed(0)
    module, stock = Largest(), Largest()
    module.__class__ = region_class(Largest, {})
    for _ in range(4):
        x = torch.randn(64, 16, device=device)
        for a, b in zip(outcome(module, x), outcome(stock, x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    (entry,) = entries_of(module)
    assert entry.refusal is None


def heads(x, w, scale=1.0):
    y = x @ w if scale == 1 else x @ w * scale
    return y.view(*x.shape[:2], 2, -1).transpose(1, 2).contiguous()


def attends(x, y, wq, wk, wv, wo):
    """As BART, Whisper and others write it."""
    q, k, v = heads(x, wq, 0.25), heads(y, wk), heads(y, wv)
    out = F.scaled_dot_product_attention(q, k, v, scale=1.0)
    return out.transpose(1, 2).reshape(x.shape) @ wo


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", PLACES)
def test_attention_takes_and_gives_tokens_in_order(device, dtype):
    if INTERPRETED and dtype is torch.bfloat16:
        pytest.skip("the interpreter has no bfloat16")
    tensors = [torch.randn(2, n, 32, device=device, dtype=dtype, requires_grad=True) for n in (24, 40)]
    tensors += [(torch.randn(32, 32, device=device, dtype=dtype) / 6).requires_grad_() for _ in range(4)]
    program, other = check(attends, *tensors)
    copies = [[o for o in part if plain_name(o.function) == "clone"] for part in (program.forward, program.backward)]
    assert len(copies[0]) >= 3
    left = [plain_name(o.function) for part in (other.forward, other.backward) for o in part if not o.view]
    assert "clone" not in left
    assert launches(other.forward) == 5  # Four projections and the attention, with the factor of q.


@pytest.mark.parametrize("device", PLACES)
def test_a_copy_that_may_be_told_from_its_source(device):
    """Of an input, of a result, as a result, and of what is written later: all are copies."""
    x = torch.randn(8, 4, device=device, requires_grad=True)

    def moved(t):
        return t.t().clone(memory_format=torch.contiguous_format).t().clone(memory_format=torch.contiguous_format)

    _, of_input = check(lambda x: moved(x) @ x.t(), x)
    _, of_result = check(lambda x: (y := x @ x.t(), moved(y) @ x), x)
    _, as_result = check(lambda x: moved(x @ x.t()), x)
    _, of_written = check(lambda x: (y := x.detach() @ x.detach().t(), moved(y) @ x, y.add_(1))[1], x)
    _, of_neither = check(lambda x: moved(x @ x.t()) @ x, x)
    assert [launches(program.forward) for program in (of_input, of_result, as_result, of_neither)] == [2, 3, 2, 2]
    assert launches(of_written.forward) > 2


class Patches(nn.Module):
    """The tokens of an image, which lie in memory channel by channel, with their positions."""

    def __init__(self, sums=True):
        super().__init__()
        self.conv, self.positions, self.sums = nn.Conv2d(3, 16, 4, 4), nn.Parameter(torch.randn(1, 16, 16)), sums

    def forward(self, x):
        tokens = (self.conv(x) * 2 + 1).sigmoid().flatten(2).mT
        return tokens + self.positions if self.sums else tokens * 3


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x):
        return x + (self.linear(self.norm(x)) * 2).tanh()


@pytest.mark.parametrize("device", PLACES)
def test_tokens_of_an_image_come_in_rows(device, monkeypatch):
    monkeypatch.setattr("fastlayers.patching.regions.region.CALLS", 1)
    stock = nn.Sequential(Patches(), Residual()).to(device)
    model, images = copy.deepcopy(stock), torch.randn(2, 3, 16, 16, device=device)
    for layer in model:
        layer.__class__ = region_class(type(layer), {})
    for _ in range(3):
        tokens, expected = model[0](images), stock[0](images)
        assert tokens.is_contiguous()
        assert not expected.is_contiguous()
        torch.testing.assert_close(tokens, expected)
        # Also what another module has made.
        torch.testing.assert_close(model[1](expected), stock[1](expected))
        assert model[1](expected).is_contiguous()
        grads = [torch.autograd.grad(m(images).square().sum(), [*m.parameters()]) for m in (model, stock)]
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    entries = [entry for m in model for entry in entries_of(m)]
    assert all(entry.refusal is None for entry in entries)
    # Where torch has nothing to choose, all stays as it is.
    alone = Patches(sums=False).to(device)
    expected = alone(images)
    alone.__class__ = region_class(Patches, {})
    assert alone(images).stride() == alone(images).stride() == expected.stride()


@pytest.mark.parametrize("device", PLACES)
def test_the_name_of_a_kernel_says_what_it_does(device):
    x = torch.randn(64, 32, device=device)
    _, pointwise = check(lambda x: (x * 2).sigmoid() + 1, x)
    _, summed = check(lambda x: (x * 2).sum(0), x)
    names = [o.function.launch.function.__name__ for program in (pointwise, summed) for o in program.forward]
    assert names[0] == "fastlayers_pointwise_mul_sigmoid_add"
    assert set(names[1:]) == {"fastlayers_reduction_mul_sum"}


@pytest.mark.parametrize("device", PLACES)
def test_a_kernel_that_cannot_be_compiled(device, monkeypatch):
    def fails(*args):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(Kernel, "compile", fails)
    monkeypatch.setattr("fastlayers.patching.fusion.kernels.compile_together", lambda kernels: kernels[0].compile())
    module = Modulated().to(device)
    module.__class__ = region_class(Modulated, {})

    def step():
        module(*(torch.randn(8, 32, device=device, requires_grad=True) for _ in range(2))).sum().backward()

    step()
    with pytest.raises(regions.RecordingError, match="no compiler"):
        step()
    monkeypatch.setattr(regions, "RAISE_ERRORS", False)  # as users have it
    with pytest.warns(PatchWarning, match="calls of Modulated .* the pass kernels: RuntimeError: no compiler"):
        step()
    step()
    (entry,) = entries_of(module)
    assert entry.refusal is None
    assert fastlayers.patch_report(module).rows[0].left[-1] == (
        Reason.RECORDING_FAILED, "the pass kernels: RuntimeError: no compiler"
    )  # fmt: skip


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Modulated()

    def forward(self, x, t):
        return self.inner(x, t) * 2 + x.sigmoid()


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("device", PLACES)
def test_what_was_recorded_runs_without_kernels_that_do_not_work(device, outer, wrong, monkeypatch):
    launches = []

    def call(kernel, *inputs):
        launches.append(kernel)
        if not wrong:
            raise RuntimeError("out of resources")
        return [result.empty(kernel.device).fill_(7) for result in kernel.results]

    monkeypatch.setattr(Kernel, "__call__", call)
    monkeypatch.setattr(executors, "run_generated", lambda kernel, launch, *inputs: call(kernel))
    monkeypatch.setattr("fastlayers.patching.regions.region.executor_class", lambda: PythonExecutor)
    monkeypatch.setattr(regions, "RAISE_ERRORS", False)  # as users have it
    torch.manual_seed(0)
    module, stock = ((Outer if outer else Modulated)().to(device) for _ in range(2))
    module.load_state_dict(stock.state_dict())
    module.__class__ = region_class(type(stock), {})
    with contextlib.nullcontext() if wrong else pytest.warns(PatchWarning, match="out of resources"):
        for _ in range(3):
            inputs = [torch.randn(8, 32, device=device) for _ in range(2)]
            for a, b in zip(outcome(module, *inputs), outcome(stock, *inputs), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    (entry,) = entries_of(module)
    assert launches
    assert (entry.refusal is not None) == outer  # A region of an inner module may have kernels.


# -- thin products ----------------------------------------------------------------------------------------------------

LOW = torch.float16 if INTERPRETED else torch.bfloat16


def adapted(x, weight, a, b, scale, bias=None):
    """What a layer of peft computes."""
    y = F.linear(x, weight, bias)
    return (y + F.linear(F.linear(x.to(a.dtype), a), b) * scale).to(y.dtype)


def adapter(device, dtype, inside, outside, rank):
    a, b = torch.randn(rank, inside, device=device) * 0.1, torch.randn(outside, rank, device=device) * 0.1
    return [t.to(dtype).requires_grad_() for t in (a, b)]


def names_of(operations):
    return Counter(plain_name(operation.function) for operation in operations if not operation.view)


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, LOW])
@pytest.mark.parametrize(
    ("rows", "inside", "outside", "rank"), [(35, 136, 200, 16), (17, 130, 131, 3), (150, 200, 136, 40)]
)
def test_an_adapter_beside_a_frozen_weight(device, dtype, rows, inside, outside, rank):
    """Forward and backward have one sum of products each, and read their large factors as they are."""
    torch.manual_seed(0)
    x = torch.randn(2, rows, inside, device=device, dtype=LOW, requires_grad=True)
    weight = (torch.randn(outside, inside, device=device) * 0.1).to(LOW)
    bias = torch.randn(outside, device=device).to(LOW)
    a, b = adapter(device, dtype, inside, outside, rank)
    _, other = check(lambda *given: adapted(*given, 0.75), x, weight, a, b, tolerance=TOLERANCE[LOW])
    thin = dtype is torch.float32
    forward, found = names_of(other.forward), names_of(other.backward)
    for each in (forward, found):
        each.pop("sum_rows", 0)  # A long row is multiplied in parts.
    assert forward == Counter(wide_product=1, addmm_=1, **{"thin_product" if thin else "mm": 1})
    assert found["wide_product"] == 1
    if thin:
        assert found == Counter(wide_product=1, addmm_=1, thin_product=3)
        assert "x0" in other.kept
    else:  # The gradient is multiplied by the scale in the products with it, not before them.
        assert found == Counter(wide_product=1, addmm_=1, addmm=2, mm=1, empty=1)
    check(lambda *given: adapted(*given[:4], -2.0, given[4]), x, weight, a, b, bias, tolerance=TOLERANCE[LOW])


def dropped(x, weight, a, b, scale, p, rounds=False):
    """What a layer of peft computes with a dropout, on a GPU; ``rounds``: and under autocast."""
    y = F.linear(x, weight)
    kept = torch.native_dropout(x.float(), p, True)[0]
    return (y + F.linear(F.linear(kept.to(x.dtype) if rounds else kept, a), b) * scale).to(y.dtype)


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, LOW])
@pytest.mark.parametrize("alike", [True, False])
def test_a_dropout_before_an_adapter(device, dtype, alike, monkeypatch):
    """Its mask is kept, and x as it is: in float32 nothing is drawn where torch draws the same in 16 bits."""
    monkeypatch.setattr(specialised, "draws_the_same", lambda device: alike)
    torch.manual_seed(0)
    x = torch.randn(2, 17, 130, device=device, dtype=LOW, requires_grad=True)
    weight = (torch.randn(136, 130, device=device) * 0.1).to(LOW)
    a, b = adapter(device, dtype, 130, 136, 5)
    rounds = dtype is LOW
    _, other = check(
        lambda *given: dropped(*given, 0.75, 0.3, rounds), x, weight, a, b, tolerance=TOLERANCE[LOW], seed=1
    )
    (mask,) = (o.makes[1] for o in other.forward if plain_name(o.function) == "native_dropout")
    assert {"x0", mask} < {*other.kept}
    assert len(other.kept) == 6  # A, B, the frozen weight and the thin product
    forward, backward = names_of(other.forward), names_of(other.backward)
    assert forward["thin_product"] == forward["wide_product"] == forward["native_dropout"] == 1
    assert ("empty" in forward) == alike
    assert backward["thin_product"] == 1 + (0 if rounds else 2)
    assert backward["wide_product"] == 1
    assert "native_dropout_backward" not in backward


@pytest.mark.parametrize("device", PLACES)
def test_dropouts_before_adapters_on_one_input(device):
    """Each has a mask of its own, and the gradient of what they read is one sum."""
    torch.manual_seed(0)
    x = torch.randn(2, 17, 136, device=device, dtype=LOW, requires_grad=True)
    weights = [(torch.randn(n, 136, device=device) * 0.1).to(LOW) for n in (72, 40, 40, 24, 16, 16)]
    ranks, chances = (8, 8, 8, 8, 3, 8), (0.1, 0.1, 0.1, 0.4, 0.5, 0)
    parameters = [
        t for w, r in zip(weights, ranks, strict=True) for t in adapter(device, torch.float32, 136, len(w), r)
    ]

    def function(x, *given):
        factors, weights = given[:12], given[12:]
        results = []
        for i, (w, p) in enumerate(zip(weights, chances, strict=True)):
            a, b = factors[2 * i : 2 * i + 2]
            results.append(dropped(x, w, a, b, 0.5, p) if p else adapted(x, w, a, b, 0.5))
        return tuple(results)

    _, other = check(function, x, *parameters, *weights, tolerance=TOLERANCE[LOW], seed=1)
    found = names_of(other.backward)
    assert (found["wide_product"], found["addmm_"], found["add"]) == (4, 1, 0)  # without a mask; of rank 3; 3 and 1
    masks = [o.makes[1] for o in other.forward if plain_name(o.function) == "native_dropout"]
    assert len({*masks}) == 5
    assert {*masks} < {*other.kept}


@pytest.mark.parametrize("device", PLACES)
def test_an_adapter_with_a_magnitude(device):
    """DoRA: no identity matrix is made, and what B gives is multiplied again, not kept."""
    torch.manual_seed(0)
    x = torch.randn(2, 17, 130, device=device, dtype=LOW, requires_grad=True)
    weight = (torch.randn(136, 130, device=device) * 0.1).to(LOW)
    a, b = adapter(device, torch.float32, 130, 136, 5)
    magnitude = torch.rand(136, device=device).add_(0.5).requires_grad_()

    def function(x, weight, a, b, magnitude):
        y = F.linear(x, weight)
        product = F.linear(F.linear(torch.eye(130, device=device), a), b).T.detach()
        norm = torch.linalg.norm(weight.to(product.dtype) + 0.75 * product, dim=1).detach()
        share = (magnitude / norm).view(1, -1)
        thin = F.linear(F.linear(x.to(a.dtype), a), b)
        return (y + (share - 1) * y + share * thin * 0.75).to(y.dtype)

    program, other = check(function, x, weight, a, b, magnitude, tolerance=TOLERANCE[LOW])
    assert "eye" in names_of(program.forward)
    assert "eye" not in names_of(other.forward)
    # One is thin, two are terms of a sum, and one is computed again.
    assert names_of(other.backward)["mm"] == names_of(program.backward)["mm"] - 3 + 1
    large = {o.makes[0] for o in other.forward if plain_name(o.function) == "mm"}
    assert large
    assert large.isdisjoint(other.kept)


@pytest.mark.parametrize("device", PLACES)
def test_a_gate_before_an_adapter(device, monkeypatch):
    """Its product is what A's gradient reads, and computed again of the gate and what it lets pass."""
    monkeypatch.setattr(glu, "CPU_LEAST", 0)
    torch.manual_seed(0)
    gate, up = (torch.randn(2, 17, 136, device=device, dtype=LOW, requires_grad=True) for _ in range(2))
    weight = (torch.randn(72, 136, device=device) * 0.1).to(LOW)
    factors = adapter(device, torch.float32, 136, 72, 8)
    _, other = check(
        lambda gate, up, *given: adapted(FL.swiglu(gate, up), *given, 0.75),
        gate, up, weight, *factors, tolerance=TOLERANCE[LOW],
    )  # fmt: skip
    (product,) = (o.makes[0] for o in other.forward if plain_name(o.function) == "gated_forward")
    assert product not in other.kept
    assert len(other.kept) == 6  # gate, up, A, B, the frozen weight and the thin product
    assert names_of(other.backward)["gated_forward"] == 1


@pytest.mark.parametrize("device", PLACES)
def test_dropouts_that_stay(device):
    """What is dropped is a result, or read by something else; nothing is trained; the mask is read too."""
    torch.manual_seed(0)
    x = torch.randn(35, 136, device=device, dtype=LOW)
    a, _ = (t.detach() for t in adapter(device, torch.float32, 136, 200, 8))

    def function(x, a):
        kept, mask = torch.native_dropout(x.float(), 0.3, True)
        others, _ = torch.native_dropout(x.float(), 0.3, True)
        twice, _ = torch.native_dropout(torch.native_dropout(x.float(), 0.3, True)[0], 0.3, True)
        idle, _ = torch.native_dropout(x.float(), 0.3, False)
        products = [F.linear(t, a) for t in (kept, others, twice, idle)]
        return (kept, mask.float(), others.sin().sum(1), *products)

    _, other = check(function, x, a, seed=1)
    assert "empty" not in names_of(other.forward)


@pytest.mark.parametrize("device", PLACES)
def test_masked_thin_products(device):
    """They have the error of float32, and of infinity and 0 they make what torch makes."""
    torch.manual_seed(0)
    x = torch.randn(90, 140, device=device).to(LOW)
    t, u = torch.randn(140, 12, device=device), torch.randn(90, 12, device=device)
    mask = torch.rand(x.shape, device=device) < 0.7
    for a, b, of_a, of_b in (
        (x, t, mask, None), (t.t(), x.t(), None, mask.t()), (x.t(), u, mask.t(), None), (u.t(), x, None, mask),
    ):  # fmt: skip
        own = low_rank.thin_product(a, b, 1.5, of_a, of_b)
        first, second = (v.double() if m is None else v.double() * m for v, m in ((a, of_a), (b, of_b)))
        bound = 1.5 * (first.abs() @ second.abs())
        assert (own.dtype, own.is_contiguous()) == (torch.float32, True)
        assert ((own - 1.5 * first @ second).abs() / bound).max() < 8 * torch.finfo(torch.float32).eps
        own = low_rank.thin_product(*(v.to(LOW) for v in (a, b)), 1.5, of_a, of_b)
        first, second = (v.to(LOW).double() if m is None else v.double() * m for v, m in ((a, of_a), (b, of_b)))
        assert own.dtype is LOW
        assert ((own - 1.5 * first @ second).abs() / bound).max() < TOLERANCE[LOW]
    x[3, 5], x[4, 6], mask[3, 5], mask[4, 6] = torch.inf, torch.nan, False, False
    own = low_rank.thin_product(x, t, 1.0, mask)
    assert own.isnan().nonzero()[:, 0].unique().tolist() == [3, 4]


@pytest.mark.parametrize("device", PLACES)
def test_a_mask_is_drawn_as_for_float32(device):
    """Whatever the number of elements, the generator is left as it is by a dropout of float32."""
    for shape in ((3, 40), (3, 33), (2, 7), (2**20 + 1, 1)):
        x = torch.randn(shape, device=device, dtype=LOW)
        masks = []
        for mask_of in (lambda x: torch.native_dropout(x.float(), 0.2, True)[1], lambda x: ops.drawn_mask(x, 0.2)):
            torch.manual_seed(3)
            masks.append(torch.cat([mask_of(x).flatten(), torch.rand(9, device=device) < 0.5]))
        assert torch.equal(*masks)
    torch.manual_seed(3)
    expected = torch.rand(9, device=device)
    torch.manual_seed(3)
    ops.draws_the_same.cache_clear()
    assert ops.draws_the_same(x.device)
    assert torch.equal(torch.rand(9, device=device), expected)


@pytest.mark.parametrize("device", PLACES)
def test_an_adapter_of_float64_stays(device):
    torch.manual_seed(0)
    x = torch.randn(2, 35, 136, device=device, dtype=LOW, requires_grad=True)
    weight = (torch.randn(200, 136, device=device) * 0.1).to(LOW)
    _, other = check(lambda *given: adapted(*given, 0.75), x, weight, *adapter(device, torch.float64, 136, 200, 8))
    assert not {"wide_product", "thin_product"} & names_of([*other.forward, *other.backward]).keys()


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("rank", [12, 64, 128])
@pytest.mark.parametrize("factors", range(6))
def test_thin_products_have_the_error_of_float32(device, factors, rank):
    torch.manual_seed(0)
    x, dy = (torch.randn(130, 180, device=device).to(LOW) for _ in range(2))
    t, u = torch.randn(180, rank, device=device), torch.randn(130, rank, device=device)
    a, b = ((x, t), (t.t(), x.t()), (dy.t(), u), (u.t(), dy), (x[:, 8:150], t[8:150]), (x[::3], t))[factors]
    own = low_rank.thin_product(a, b, 1.5)
    exact = 1.5 * a.double() @ b.double()
    bound = 1.5 * (a.double().abs() @ b.double().abs())
    assert (own.dtype, own.is_contiguous()) == (torch.float32, True)
    assert ((own - exact).abs() / bound).max() < 8 * torch.finfo(torch.float32).eps


MULTIPLES = {
    "multiple": (lambda x, t: (x.sin() * 0.3) @ t, True),
    "quotient": (lambda x, t: (x.sin() / 7) @ t, True),
    "view": (lambda x, t: (x.sin() * -2).view(2, 17, 136).view(34, 136) @ t, True),
    "transposed": (lambda x, t: t.t() @ (x.sin() * 0.3).t(), True),
    "itself": (lambda x, t: (x.sin() * 1.0) @ t, True),
    "nothing": (lambda x, t: (x.sin() * 0.0) @ t, False),
    "of an input": (lambda x, t: (x * 0.3) @ t, False),
    "many columns": (lambda x, t: (x.sin() * 0.3) @ t.repeat(1, 30), False),
    "another layout": (lambda x, t: (x.sin().view(136, 34).t() * 0.3).contiguous() @ t, False),
    "written to": (lambda x, t: (x.sin() * 0.3).add_(1) @ t, False),
}


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", MULTIPLES)
def test_a_thin_product_of_a_multiple(device, dtype, case):
    """The product multiplies by the number, which no pass over the matrix does then."""
    if INTERPRETED and dtype is not LOW:
        pytest.skip("the interpreter has no bfloat16")
    function, joins = MULTIPLES[case]
    torch.manual_seed(0)
    x = torch.randn(34, 136, device=device, dtype=dtype, requires_grad=True)
    thin = torch.randn(136, 5, device=device, dtype=dtype)
    _, other = check(function, x, thin, tolerance=TOLERANCE[dtype])
    found = names_of(other.forward)
    assert (found["addmm"], found["mm"]) == ((1, 0) if joins and case != "itself" else (0, 1))
    assert not joins or found["mul"] == 0


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, LOW])
def test_adapters_on_one_input(device, dtype, monkeypatch):
    """The gradient of what several layers read is one sum; the layers feed others."""
    monkeypatch.setattr(thin_products, "LARGE", 0)
    torch.manual_seed(0)
    x = torch.randn(3, 50, 144, device=device, dtype=LOW, requires_grad=True)
    weights = [(torch.randn(n, 144, device=device) * 0.1).to(LOW) for n in (160, 160)]
    down = (torch.randn(144, 160, device=device) * 0.1).to(LOW)
    parameters = [t for n in (160, 160) for t in adapter(device, dtype, 144, n, 8)]
    last = adapter(device, dtype, 160, 144, 8)

    def function(x, a1, b1, a2, b2, a3, b3, gate, up, down):
        h = F.silu(adapted(x, gate, a1, b1, 2.0)) * adapted(x, up, a2, b2, 0.5)
        return adapted(h, down, a3, b3, 1.0)

    _, other = check(function, x, *parameters, *last, *weights, down, tolerance=TOLERANCE[LOW])
    forward, backward = names_of(other.forward), names_of(other.backward)
    assert forward["wide_product"] == 3
    assert backward["wide_product"] == 2
    # What two layers read is read once, and once for the gradients of their factors.
    assert forward["thin_products"] == backward["thin_products"] == 1
    thin = dtype is torch.float32  # In 16 bits a product alone is cuBLAS's.
    assert (forward["thin_product"], forward["mm"]) == ((1, 0) if thin else (0, 1))
    assert (backward["thin_product"], backward["mm"], backward["addmm"]) == ((7, 0, 0) if thin else (0, 3, 4))


@pytest.mark.parametrize("device", PLACES)
def test_a_norm_after_an_adapter(device):
    """Its weight is frozen like that of the layer, whose sum is one of products all the same."""
    torch.manual_seed(0)
    x = torch.randn(110, 136, device=device, dtype=LOW, requires_grad=True)
    weight, scale = (torch.randn(shape, device=device).to(LOW) for shape in ((136, 136), (136,)))
    a, b = adapter(device, torch.float32, 136, 136, 8)

    def function(x, a, b, weight, scale):
        with backends.backend("cpu" if device == "cpu" else "cuda"):
            return FL.add_rms_norm(adapted(x, weight, a, b, 0.75), x, (136,), scale)

    _, other = check(function, x, a, b, weight, scale, tolerance=TOLERANCE[LOW])
    assert names_of(other.forward)["wide_product"] == 1
    assert names_of(other.backward)["thin_product"] == 3


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("rank", "parts"), [(5, 3), (16, 2), (40, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, LOW])
def test_thin_products_of_one_matrix(device, dtype, rank, parts, masked):
    torch.manual_seed(0)
    x = torch.randn(110, 141, device=device).to(LOW)
    masks = [torch.rand(110, 141, device=device) < 0.5 if masked else None for _ in range(parts)]
    assert parts <= low_rank.most_parts(rank)
    for rows, large_first in itertools.product((True, False), repeat=2):
        large, of_large = (x, masks) if rows else (x.t(), [None if mask is None else mask.t() for mask in masks])
        length = large.shape[1 if large_first else 0]
        thin = [torch.randn(length, rank, device=device).to(dtype) for _ in range(parts)]
        thin = thin if large_first else [t.t() for t in thin]
        own = low_rank.thin_products(large, thin, 1.5, of_large, large_first)
        for y, t, mask in zip(own, thin, of_large, strict=True):
            kept = large.double() if mask is None else large.double() * mask
            a, b = (kept, t.double()) if large_first else (t.double(), kept)
            assert (y.dtype, y.is_contiguous()) == (dtype, True)
            exact, largest = 1.5 * a @ b, 1.5 * a.abs() @ b.abs()
            limit = 8 * torch.finfo(torch.float32).eps * largest
            if dtype is LOW:  # It is rounded once.
                limit += torch.finfo(LOW).eps / 2 * exact.abs() + torch.finfo(LOW).smallest_normal
            assert ((y - exact).abs() <= limit).all()


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, LOW])
def test_thin_products_that_are_results(device, dtype, monkeypatch):
    """Each has memory of its own, as torch's have; views of them, too."""
    monkeypatch.setattr(thin_products, "LARGE", 0)
    torch.manual_seed(0)
    x = torch.randn(2, 20, 136, device=device).to(LOW)
    factors = [torch.randn(8, 136, device=device).to(dtype) for _ in range(4)]

    def function(x, *factors):
        a, b, c, d = (F.linear(x.to(dtype), factor) for factor in factors)
        return a, b, c * d

    _, other = check(function, x, *factors, tolerance=TOLERANCE[LOW])
    assert names_of(other.forward)["thin_products"] == 1  # Of those that are multiplied.
    with torch.no_grad(), excluding(KEYS):
        found, _ = PythonExecutor(other, Facts()).forward(x, *factors)
    assert len({t.untyped_storage().data_ptr() for t in found}) == 3


@pytest.mark.parametrize("device", PLACES)
def test_a_thin_product_divided_by_zero(device):
    """Infinite, as torch's: it is no multiple that a sum of products could have."""
    torch.manual_seed(0)
    x, weight = torch.randn(17, 136, device=device).to(LOW), torch.randn(136, 72, device=device).to(LOW)
    a, b = torch.randn(136, 8, device=device).to(LOW), torch.randn(8, 72, device=device).to(LOW)
    program, tape, (expected,), _, _ = recorded(lambda x, w, a, b: x @ w + (x @ a) @ b / 0, (x, weight, a, b))
    run = PythonExecutor(fused(program), Facts())
    with torch.no_grad(), excluding(KEYS):
        (found,), _ = run.forward(x, weight, a, b, *tape.constants)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("device", PLACES)
def test_thin_products_that_stay_apart(device):
    """One is computed of another, or of one that waits for it; of another rank; written over before the next."""
    torch.manual_seed(0)
    x, z = (torch.randn(40, 136, device=device, dtype=LOW) for _ in range(2))
    factors = [torch.randn(136, n, device=device) * 0.1 for n in (8, 8, 8, 8, 4, 8)]

    def function(x, z, a, b, c, d, e, f):
        of_x = x.float() @ a
        of_z = z.float() @ (b * of_x.sum())
        again = z.float() @ c
        last = x.float() @ (d * again.sum())
        changed = (z * 2).float() @ f
        changed.mul_(3)
        products = of_x, of_z, last, x.float() @ e, changed, (z * 2).float() @ a
        return tuple(product.abs() for product in products)  # What is returned stays apart anyway.

    _, other = check(function, x, z, *factors)
    assert names_of(other.forward)["thin_products"] == 1


#: A residual sum ``h + x·w`` after ``x = f(h·wᵀ)``, and whether the product writes it.
RESIDUAL_SUMS = {
    "h first": (lambda h, x, w: h + x @ w, True),
    "h last": (lambda h, x, w: (x @ w) + h, True),
    "three dimensions": (lambda h, x, w: h.view(5, 7, -1) + (x @ w).view(5, 7, -1), True),
    "of a sum": (lambda h, x, w: (y := h + x @ w) + (y @ w.t()).sin() @ w, True),
    "h is returned": (lambda h, x, w: (h, h + x @ w), False),
    "h is read later": (lambda h, x, w: (h + x @ w, h @ w.t()), False),
    "a view of h is read later": (lambda h, x, w: (row := h[3:5], h + x @ w, row @ w.t())[1:], False),
    "the product is read": (lambda h, x, w: (p := x @ w, h + p, p @ w.t())[1:], False),
    "the product is returned": (lambda h, x, w: (p := x @ w, h + p), False),
    "a multiple": (lambda h, x, w: torch.add(h, x @ w, alpha=2), False),
    "another shape": (lambda h, x, w: h[:1] + x @ w, False),
    "h is a factor": (lambda h, x, w: h + h @ (w.t() @ w), False),
    "a factor is written": (lambda h, x, w: (p := x @ w, x.cumsum_(0), h + p, x.cos())[2:], False),
}


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("case", RESIDUAL_SUMS)
def test_a_residual_sum_that_a_product_writes(device, case):
    """In the memory of h, where nobody needs that any more."""
    function, written = RESIDUAL_SUMS[case]
    torch.manual_seed(0)
    t, w = ((torch.randn(n, 64, device=device) * 0.3).to(LOW) for n in (35, 24))
    call = lambda t, w: function(h := t.tanh(), (h @ w.t()).sin(), w)  # noqa: E731
    _, other = check(call, t, w, tolerance=TOLERANCE[LOW])
    assert (names_of(other.forward)["addmm_"] > 0) is written
    _, other = check(lambda t, w: t + t.sin() @ w.t() @ w, t, w, tolerance=TOLERANCE[LOW])
    assert "addmm_" not in names_of(other.forward)  # An input is not written.


@pytest.mark.parametrize("device", PLACES)
def test_a_residual_sum_of_what_a_copy_that_became_a_view_has(device):
    """The copy was recorded in memory of its own."""
    t, w = (torch.randn(n, 64, device=device).to(LOW) for n in (35, 24))
    program, *_ = recorded(
        lambda t, w: (h := t.tanh(), c := h.clone(), h + (h @ w.t()).sin() @ w, c @ w.t())[2:], [t, w]
    )
    assert names_of(with_residual_products(program).forward)["addmm_"] == 1
    operations = [replace(o, view=plain_name(o.function) == "clone" or o.view) for o in program.forward]
    other = with_residual_products(replace(program, forward=operations))
    assert "addmm_" not in names_of(other.forward)


@pytest.mark.parametrize("device", PLACES)
def test_a_residual_sum_of_what_a_backward_needs(device):
    torch.manual_seed(0)
    t, w = ((torch.randn(n, 64, device=device) * 0.3).to(LOW).requires_grad_() for n in (35, 24))
    _, other = check(lambda t, w: (h := t.tanh()) + (h @ w.t()).sin() @ w, t, w, tolerance=TOLERANCE[LOW])
    assert "addmm_" not in names_of(other.forward)


@pytest.mark.parametrize("device", PLACES)
def test_the_gradient_of_what_layers_read(device):
    """It is added up where it lies: of query, key and value, of gate and up, whose gradients overwrite others."""
    torch.manual_seed(0)
    x = torch.randn(2, 35, 136, device=device, dtype=LOW, requires_grad=True)
    weights = [(torch.randn(n, 136, device=device) * 0.1).to(LOW).requires_grad_() for n in (136, 72, 72)]
    bias = torch.randn(72, device=device).to(LOW).requires_grad_()

    def three(x, q, k, v, bias):
        return F.linear(x, q), F.linear(x, k, bias), F.linear(x, v)

    _, other = check(three, x, *weights, bias, tolerance=TOLERANCE[LOW])
    found = names_of(other.backward)
    assert (found["mm"], found["addmm_"], found["add"]) == (4, 2, 0)

    shapes = ((72, 136), (72, 136), (136, 72))
    gate, up, down = ((torch.randn(*shape, device=device) * 0.1).to(LOW).requires_grad_() for shape in shapes)
    _, other = check(
        lambda x, gate, up, down: FL.gated_linear(F.linear(x, gate), F.linear(x, up), down, act="silu"),
        x, gate, up, down, tolerance=TOLERANCE[LOW],
    )  # fmt: skip
    found = names_of(other.backward)
    assert (found["addmm_"], found["add"]) == (1, 0)


@pytest.mark.parametrize("device", PLACES)
def test_products_of_what_is_written_over_stay(device):
    torch.manual_seed(0)
    x, weight = (torch.randn(136, 136, device=device, dtype=LOW) for _ in range(2))

    def function(x, weight):
        changed = x.clone()
        first = changed @ weight
        changed.mul_(2)
        return first + changed @ weight

    _, other = check(function, x, weight, tolerance=TOLERANCE[LOW])
    found = names_of(other.forward)
    assert (found["mm"], found["addmm_"]) == (1, 1)  # The second one adds to the first, which was computed before.


@pytest.mark.parametrize("device", PLACES)
def test_sums_that_others_read_stay(device):
    """A term that is a result too, one of another shape, and one that is written over."""
    torch.manual_seed(0)
    x = torch.randn(40, 136, device=device, dtype=LOW)
    weight = torch.randn(136, 136, device=device).to(LOW)
    a, b = (t.detach() for t in adapter(device, LOW, 136, 136, 8))

    def function(x, weight, a, b):
        seen = F.linear(x, weight)
        rows = F.linear(x[:1], weight) + F.linear(F.linear(x, a), b)
        changed = F.linear(x, weight)
        changed.mul_(2)
        return seen, seen + F.linear(F.linear(x, a), b), rows, changed + F.linear(F.linear(x, a), b)

    _, other = check(function, x, weight, a, b)
    assert names_of(other.forward)["wide_product"] == 0


@pytest.mark.parametrize("device", PLACES)
def test_what_an_adapter_read_is_not_to_be_overwritten(device):
    """It is kept in place of its cast to float32: torch's error, as for an adapter of its dtype, and no wrong one."""
    layer = Adapted(device)
    layer.__class__ = region_class(Adapted, {})
    for _ in range(3):
        x = torch.randn(8, 136, device=device, dtype=LOW, requires_grad=True)
        between = x * 1
        out = layer(between)
        out.sum().backward()
    between = x * 1
    out = layer(between)
    between.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


class Adapted(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(144, 136, device=device).to(LOW), requires_grad=False)
        self.a, self.b = map(nn.Parameter, adapter(device, torch.float32, 136, 144, 8))

    def forward(self, x):
        return adapted(x, self.weight, self.a, self.b, 2.0)


class Together(nn.Module):
    """Adapters that read one input, two after a dropout."""

    def __init__(self, device):
        super().__init__()
        self.layers = nn.ModuleList(Adapted(device) for _ in range(5))

    def forward(self, x):
        plain = [layer(x) for layer in self.layers[:3]]
        return sum(plain) + sum(dropped(x, layer.weight, layer.a, layer.b, 0.5, 0.3).sin() for layer in self.layers[3:])


@needs_gpu
@pytest.mark.gpu
@pytest.mark.skipif(executors.problem is not None, reason=f"{executors.problem}")
def test_cpp_launches_thin_products(monkeypatch):
    torch.manual_seed(0)
    region = Together("cuda")
    stock = copy.deepcopy(region)
    region.__class__ = region_class(Together, {})
    x = torch.randn(4, 512, 136, device="cuda", dtype=LOW, requires_grad=True)

    def answer(module):
        torch.manual_seed(1)
        out = module(x)
        factors = [p for p in module.parameters() if p.requires_grad]
        return out, *torch.autograd.grad(out.float().square().mean(), [x, *factors])

    for _ in range(3):
        answer(region)

    def call(*args):
        raise AssertionError("Python was called")

    monkeypatch.setattr(Producer, "__call__", call)
    monkeypatch.setattr(executors, "run_kernel", call)
    monkeypatch.setattr(executors, "run_generated", call)
    for a, b in zip(answer(region), answer(stock), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=TOLERANCE[LOW] * largest_of(b))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_machine_code_of_a_launch_is_of_one_device():
    """Both devices share the launch that adds up partial sums."""
    codes = []
    for device in ("cuda:0", "cuda:1", "cuda:0"):
        x, t = torch.randn(512, 4096, device=device, dtype=LOW), torch.randn(4096, 8, device=device)
        low_rank.thin_product(x, t, 1.0)
        _, last = low_rank.thin_kernels(x, t, 1, 1.0, False, True)
        codes.append(last.machine_code()[0])
    assert codes[0] == codes[2] != codes[1]


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, LOW])
def test_what_an_adapter_adds(device, dtype):
    """Values and gradients are those of the composition, of the second order too, and x is kept as it is."""
    torch.manual_seed(0)
    x = torch.randn(2, 33, 136, device=device, dtype=LOW, requires_grad=True)
    y = torch.randn(2, 33, 200, device=device, dtype=LOW, requires_grad=True)
    a, b = adapter(device, dtype, 136, 200, 12)
    dy = torch.randn(y.shape, device=device, dtype=LOW)
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.data_ptr()) or t, lambda t: t):
        out = ops.add_low_rank(y, x, a, b, 0.75)
    assert type(out.grad_fn).__name__ == "AddLowRankBackward"
    assert x.data_ptr() in seen
    expected = ops.compose(y, x, a, b, 0.75)
    answers = [(t, *torch.autograd.grad(t, (y, x, a, b), dy, retain_graph=True)) for t in (out, expected)]
    for own, other in zip(*answers, strict=True):
        assert (own.dtype, own.shape) == (other.dtype, other.shape)
        torch.testing.assert_close(own, other, rtol=0, atol=TOLERANCE[LOW] * largest_of(other))
    second = []
    for t in (out, expected):
        (dx,) = torch.autograd.grad(t, x, dy, create_graph=True)
        second.append(torch.autograd.grad(dx.float().sin().sum(), b)[0])
    torch.testing.assert_close(*second, rtol=0, atol=TOLERANCE[LOW] * largest_of(second[1]))


@pytest.mark.parametrize(
    ("shapes", "dtypes"),
    [
        (((5, 136), (5, 200), (0, 136), (200, 0)), (LOW, LOW, torch.float32)),
        (((0, 136), (0, 200), (8, 136), (200, 8)), (LOW, LOW, torch.float32)),
        (((5, 136), (5, 200), (130, 136), (200, 130)), (LOW, LOW, torch.float32)),
        (((136,), (200,), (8, 136), (200, 8)), (LOW, LOW, torch.float32)),
        (((5, 136), (5, 200), (8, 136), (200, 8)), (torch.float32, torch.float32, torch.float32)),
        (((5, 136), (5, 200), (8, 136), (200, 8)), (LOW, torch.float32, torch.float32)),
    ],
)
@pytest.mark.parametrize("device", PLACES)
def test_what_no_kernel_adds_is_composed(device, shapes, dtypes):
    torch.manual_seed(0)
    x, y, a, b = (
        torch.randn(shape, device=device).to(dtype)
        for shape, dtype in zip(shapes, (dtypes[0], dtypes[1], dtypes[2], dtypes[2]), strict=True)
    )
    out = ops.add_low_rank(y, x, a, b.requires_grad_(), 2.0)
    assert "LowRank" not in type(out.grad_fn).__name__
    torch.testing.assert_close(out, ops.compose(y, x, a, b, 2.0))


def lora_layers(device, **options):
    """A linear layer with peft's adapter, and a patched copy."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(136, 200)).to(device, LOW)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"], r=8, **options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    patched = fastlayers.patch_model(copy.deepcopy(model))
    return model, patched


class Attending(nn.Module):
    """Three layers on one input, and one after them."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(72, 136) for _ in range(3))
        self.o = nn.Linear(136, 72)

    def forward(self, x):
        h = x.sin()
        return x + self.o(torch.sigmoid(self.q(h) * self.k(h)) * self.v(h))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("amp", [False, True])
def test_a_model_with_dropout_before_adapters(device, amp, monkeypatch):
    """A region draws what peft draws, and what it computes of that is what peft computes."""
    peft = pytest.importorskip("peft")
    if INTERPRETED:  # What a dropout calls on a GPU.
        monkeypatch.setattr(
            F, "dropout", lambda input, p, training, inplace: torch.native_dropout(input, p, training)[0]
        )
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules="all-linear", r=4, lora_dropout=0.2, init_lora_weights=False)
    model = peft.get_peft_model(nn.Sequential(Attending(), Attending()).to(device, LOW), config)
    patched = fastlayers.patch_model(copy.deepcopy(model))
    programs = []
    monkeypatch.setattr(fusion, "fused", lambda *given, of=fusion.fused: programs.append(of(*given)) or programs[-1])
    for step in range(3):
        x = torch.randn(2, 9, 72, device=device).to(LOW).requires_grad_()
        answers = []
        for each in (model, patched):
            torch.manual_seed(step)
            with torch.autocast(device, LOW, enabled=amp):
                out = each(x)
            loss = out.float().square().mean()
            wanted = [x, *(p for p in each.parameters() if p.requires_grad)]
            answers.append((out, loss, *torch.autograd.grad(loss, wanted), torch.rand(4, device=device)))
        assert torch.equal(answers[0][-1], answers[1][-1])
        for own, other in zip(answers[1], answers[0], strict=True):
            torch.testing.assert_close(own, other, rtol=0, atol=TOLERANCE[LOW] * largest_of(other))
    if INTERPRETED or device != "cpu":
        masks = [o.makes[1] for p in programs for o in p.forward if plain_name(o.function) == "native_dropout"]
        assert len(masks) == 4  # The blocks share a program.
        assert {*masks} <= {name for p in programs for name in p.kept}
        for program in programs:
            found = names_of(program.backward)
            assert (found["thin_product"], found["thin_products"]) == ((1, 1) if amp else (9, 1))
            assert found["wide_product"] == 2


def answer_of(model, x):
    """The result outside of a region, the gradients, and whether a kernel added to it."""
    with no_regions():
        out = model(x)
    names = set()
    pending = [out.grad_fn]
    while pending:
        node = pending.pop()
        if node is not None and type(node).__name__ not in names:
            names.add(type(node).__name__)
            pending += [n for n, _ in node.next_functions]
    leaves = [x, *(p for p in model.parameters() if p.requires_grad)]
    found = torch.autograd.grad(out.float().sin().sum(), leaves, allow_unused=True)
    return (out, *found), "AddLowRankBackward" in names


def changed(model, how):
    layer = model.base_model.model[0]
    if how == "hook":
        layer.lora_A["default"].register_forward_hook(lambda *args: None)
    elif how == "hook on a dropout":
        layer.lora_dropout["default"].register_forward_hook(lambda *args: None)
    elif how == "merged":
        model.merge_adapter()
    elif how == "own forward":
        layer.lora_B["default"].forward = lambda x: x.new_zeros(*x.shape[:-1], 200)


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize(
    ("how", "options", "by_kernel"),
    [
        ("plain", {}, True),
        ("rank-stabilised", {"use_rslora": True}, True),
        ("dora", {"use_dora": True}, False),
        ("dropout", {"lora_dropout": 0.5}, True),
        ("hook on a dropout", {"lora_dropout": 0.5}, False),
        ("dropout of all", {"lora_dropout": 1.0}, False),
        ("bias", {"lora_bias": True}, False),
        ("hook", {}, False),
        ("merged", {}, False),
        ("own forward", {}, False),
        ("disabled", {}, False),
        ("two adapters", {}, True),
    ],
)
def test_layers_of_peft(device, how, options, by_kernel):
    peft = pytest.importorskip("peft")
    models = lora_layers(device, **options)
    x = torch.randn(3, 40, 136, device=device, dtype=LOW, requires_grad=True)
    answers = []
    for model in models:
        changed(model, how)
        if how == "two adapters":
            torch.manual_seed(4)
            model.add_adapter("other", peft.LoraConfig(target_modules=["0"], r=4, init_lora_weights=False))
            model.base_model.set_adapter(["default", "other"])
        torch.manual_seed(1)
        with model.disable_adapter() if how == "disabled" else contextlib.nullcontext():
            answers.append(answer_of(model, x))
    (expected, _), (found, fused) = answers
    assert fused == by_kernel
    for own, other in zip(found, expected, strict=True):
        assert (own is None) == (other is None)
        if own is not None:
            torch.testing.assert_close(own, other, rtol=0, atol=TOLERANCE[LOW] * largest_of(other))
    assert type(fastlayers.unpatch_model(models[1]).base_model.model[0]) is type(models[0].base_model.model[0])

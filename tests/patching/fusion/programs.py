"""Programs with generated kernels, and the comparison with the operations that they stand for."""

from __future__ import annotations

from collections import Counter

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from fastlayers import backends
from fastlayers.patching.fusion.passes import fused
from fastlayers.patching.program.executors import KEYS, Facts, PythonExecutor, excluding
from fastlayers.patching.program.program import plain_name
from fastlayers.patching.program.tape import Tape
from tests.harness import DEVICES

INTERPRETED = backends.triton_interprets()
#: torch's own error of one operation, times the operations of a chain.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 3e-2, torch.float16: 4e-3}


#: A CPU where Triton interprets, which test_in_the_interpreter sees to.
PLACES = DEVICES if INTERPRETED else DEVICES[1:]


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


def alike(a, b):
    """``b`` in the shape of ``a``, or zeros if it has another number of elements."""
    return b.reshape(a.shape) if a.numel() == b.numel() else torch.zeros_like(a) + b.sum() * 0.01


def parts(device):
    qkv = (torch.randn(3, 6, 16, device=device).bfloat16().requires_grad_() for _ in range(3))
    return *qkv, torch.randn(6, 6, device=device, requires_grad=True)


def names(operations):
    return [plain_name(operation.function) for operation in operations if not operation.view]


def entries_of(module):
    return [entry for found in type(module).__fastlayers_region__.entries.values() for entry in found]


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


def dropped(x, weight, a, b, scale, p, rounds=False):
    """What a layer of peft computes with a dropout, on a GPU; ``rounds``: and under autocast."""
    y = F.linear(x, weight)
    kept = torch.native_dropout(x.float(), p, True)[0]
    return (y + F.linear(F.linear(kept.to(x.dtype) if rounds else kept, a), b) * scale).to(y.dtype)


class Adapted(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(144, 136, device=device).to(LOW), requires_grad=False)
        self.a, self.b = map(nn.Parameter, adapter(device, torch.float32, 136, 144, 8))

    def forward(self, x):
        return adapted(x, self.weight, self.a, self.b, 2.0)

"""Modules whose forwards take something for granted: made of sources that name what is here."""

from __future__ import annotations

import copy
import functools
import logging
import types
from typing import ClassVar

import numpy as np  # noqa: F401  (sources name it)
import torch
import torch.nn.functional as F  # noqa: F401
from torch import nn
from torch.amp import custom_bwd, custom_fwd
from torch.autograd.function import once_differentiable

import fastlayers
from tests.patching.harness import written

logger = logging.getLogger(__name__)


class Settings:
    scale = 2.0
    nested = types.SimpleNamespace(value=2.0)

    @classmethod
    def twice(cls):
        return cls.scale * 2

    @staticmethod
    def half(x):
        return x * 0.5


class Thing:
    """An object that Python asks for its truth, its equality and its product."""

    def __init__(self, value):
        self.value = value

    def __bool__(self):
        return self.value > 1

    def __eq__(self, other):
        return self.value == other

    __hash__ = None

    def __rmul__(self, other):
        return other * self.value


class Counting:
    """A context manager that counts."""

    entered = 0

    def __enter__(self):
        self.entered += 1

    def __exit__(self, *error):
        return None


def helper(x, scale=2.0, *, shift=1.0):
    return x * scale + shift


helper.factor = 2.0


def doubled(x, scale=2.0, *, shift=1.0):
    return 2 * (x * scale + shift)


FACTORS = [2.0]
SCALE = 2.0


def with_list(x, factors=FACTORS):
    return x * factors[0]


def checked(x):
    with torch.autograd.profiler.record_function("checked"):  # which no trace follows
        return x * 2


class Body(nn.Module):
    """Enough operations for a region."""

    kind = 2.0
    kinds: ClassVar = {"a": 2.0}

    def __init__(self, **attributes):
        super().__init__()
        self.norm, self.up, self.down, self.act = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16), nn.GELU()
        vars(self).update(attributes)

    def body(self, x):
        return self.down(self.act(self.up(self.norm(x)))) + x

    def middle(self, x):
        return self.body(x) * 2

    @property
    def factor(self):
        return self.number


class Middle(Body):
    pass


def made(result, base=Body, module=__name__, **attributes):
    """A module with such a result, in a file and a namespace of its own; ``x`` is what its body gives."""
    scope = {**globals(), "__name__": module}
    return written(base, f"x = self.body(x)\nreturn {result}", scope, "x, *rest", "Made")(**attributes)


def run(m, x):
    x = x.clone().requires_grad_(torch.is_grad_enabled())
    m.zero_grad()
    out = m(x)
    if not torch.is_grad_enabled():
        return [out]
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in m.parameters())]


def agree(stock, patched, calls=1):
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(3))
    for _ in range(calls):
        torch.testing.assert_close(run(patched, x), run(stock, x))


def patched_as(stock):
    """A patched copy that gave the same in four calls. Regions are recorded in the second one."""
    patched = fastlayers.patch_model(copy.deepcopy(stock))
    agree(stock, patched, calls=4)
    return patched


def decorated(function):
    @functools.wraps(function)
    def wrapper(*args, inner=None, **kwargs):
        return function(*args, **kwargs) * (Settings.scale if inner else 1) if "scale" in kwargs else args[0] * 5

    return wrapper


@decorated
def wrapped(x, scale=2.0):
    return x * scale


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(x)
        return dy * (gate * (1 + x * (1 - gate)))


swish = Swish.apply


class Scaled(torch.autograd.Function):
    """With a context of its own, and arguments that are no tensors."""

    @staticmethod
    def forward(x, scale, bias=None):
        return x * Settings.scale * scale, (x > 0)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.scale, ctx.needed = Settings.scale * inputs[1], ctx.needs_input_grad
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    @once_differentiable
    def vjp(ctx, dy, _):
        return (dy * ctx.scale if ctx.needed[0] else None), None, None


class UnderAutocast(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        return dy @ weight.mT, x.mT @ dy


class ReadsLate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        return dy * Settings.scale


class Prints(ReadsLate):
    @staticmethod
    def backward(ctx, dy):
        print("backward")
        return dy * 2


class OwnApply(ReadsLate):
    @classmethod
    def apply(cls, x):
        return super().apply(x) + 1


class Output:
    def __init__(self, value):
        self.value = value

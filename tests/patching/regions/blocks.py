"""Blocks that run as regions, and the comparison of a region with its module."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections import OrderedDict
from typing import NamedTuple

import numpy
import torch
import torch.nn.functional as F
from torch import nn

from fastlayers.patching.regions.region import region_class


class Attention(nn.Module):
    def __init__(self, width=16, heads=4):
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, mask=None):
        images, tokens, width = x.shape
        q, k, v = self.qkv(x).reshape(images, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q * (width // self.heads) ** -0.5 @ k.transpose(-2, -1)
        if mask is not None:
            scores = scores + mask
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class DropPath(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        if self.p == 0.0 or not self.training:
            return x
        keep = 1 - self.p
        return x * x.new_empty((x.shape[0], *(1,) * (x.ndim - 1))).bernoulli_(keep).div_(keep)


class Block(nn.Module):
    """A transformer block with LayerScale, stochastic depth and dropout, and a number of its own."""

    def __init__(self, width=16, p=0.0, index=0):
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(width), Attention(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Dropout(p), nn.Linear(32, width))
        self.gamma, self.drop, self.index = nn.Parameter(torch.rand(width)), DropPath(p), index

    def forward(self, x, mask=None):
        x = x + self.drop(self.gamma * self.attn(self.norm1(x), mask))
        shared = 0.5 if self.norm1 is self.norm2 else 1.0
        return x + self.drop(self.mlp(self.norm2(x))) * (shared + self.index)


class Flash(Attention):
    def forward(self, x, mask=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(q, k, v, mask)
        return self.proj(out.transpose(1, 2).flatten(2))


class FlashBlock(Block):
    """With heads of a size that flash attention takes."""

    def __init__(self):
        super().__init__()
        self.attn = Flash(heads=2)


class Bottleneck(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(8, 4, 1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8, momentum=0.3)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x
        return self.relu(y)


def in_regions(module, known=None):
    """A copy of a module that runs as a region."""
    module = copy.deepcopy(module)
    module.__class__ = region_class(type(module), {} if known is None else known)
    return module


def leaves(value):
    return [t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def outcome(module, *args, seed=0, **kwargs):
    """The results of a call, the gradients of its arguments and parameters, and the buffers."""
    torch.manual_seed(seed)
    torch.clear_autocast_cache()  # A cast of an earlier call would come first in the order of autograd.
    given = [t for t in leaves((args, kwargs)) if t.requires_grad]
    out = module(*args, **kwargs)
    active = [t for t in leaves(out) if t.requires_grad]
    wanted = [*given, *(p for p in module.parameters() if p.requires_grad)]
    torch.manual_seed(seed + 1)
    dys = [torch.randn_like(t) for t in active]
    grads = torch.autograd.grad(active, wanted, dys, allow_unused=True) if active else ()
    return [*leaves(out), *grads, *(b.clone() for b in module.buffers()), torch.rand(1)]


def same(module, region, *args, **kwargs):
    expected, actual = outcome(module, *args, **kwargs), outcome(region, *args, **kwargs)
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a.dtype, a.stride(), a.requires_grad) == (b.dtype, b.stride(), b.requires_grad)
            assert torch.equal(a, b)


def tokens(*shape, **options):
    torch.manual_seed(5)
    return torch.randn(*(shape or (2, 5, 16)), requires_grad=True, **options)


def images():
    return tokens(2, 8, 6, 6)


DEVICES_BY_DTYPE = {torch.float64: frozenset({"mps"})}


@torch.jit.script
def scaled(x: torch.Tensor, factor: int):
    return x / torch.sqrt(torch.tensor(x.size(-1), dtype=torch.float) * factor)


class Attend:
    """A processor as diffusers has it: an object that is no module and computes with one."""

    power = 1

    @property
    def half(self):
        return 0.5

    def gain(self, x):
        return x * 2

    def __call__(self, module, x, shift=0.0):
        return self.gain(module.fc(x)) * self.half**self.power + shift


class Spellings(nn.Module):
    """What forwards of libraries do besides arithmetic."""

    def __init__(self):
        super().__init__()
        self.fc, self.norm, self.attend, self.steps = nn.Linear(8, 8), nn.LayerNorm(8), Attend(), 0
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, bias=None):
        if bias is None:
            bias = torch.zeros(8)
            if self.training and self.steps > 3:
                bias.requires_grad = True
                self.steps += 1
                scale = lambda t: t * 2  # noqa: E731
                bias = scale(bias)
        accepted = set(inspect.signature(self.attend.__call__).parameters.keys())
        y = self.attend(self, self.norm(x), **({"shift": 1.5} if "shift" in accepted else {}))
        weights = torch.tensor([[0.5], [1.0], [2.0]]).to(x)
        weights[1] = 3
        for layer, weight in zip(self.layers[1:], weights, strict=False):
            y = layer(y).tanh() * weight
        if DEVICES_BY_DTYPE.get(x.dtype) and x.device.type in DEVICES_BY_DTYPE[x.dtype]:
            y = y.float()
        y = scaled(y, 3) + bias.to(x)
        return y, {"states": (y, y.sigmoid()), "bias": bias, "input": x}


def in_float32(function):
    """A decorator as libraries write it."""

    @functools.wraps(function)
    def inner(*args, **kwargs):
        device = next(arg.device for arg in args if torch.is_tensor(arg))
        with torch.autocast(device.type, enabled=False):
            return function(*(arg.float() if torch.is_tensor(arg) else arg for arg in args), **kwargs)

    return inner


@in_float32
def rms(x, power=2):
    return x * (x**power).mean(-1, keepdim=True).rsqrt()


@dataclasses.dataclass
class Intermediates:
    scores: torch.Tensor
    history: list = dataclasses.field(default_factory=list)
    last: torch.Tensor | None = None


@functools.lru_cache
def is_at_least(version: str):
    return tuple(map(int, torch.__version__.partition("+")[0].split(".")[:2])) >= tuple(map(int, version.split(".")))


def steps(x):
    try:
        import math

        power = math.sqrt(4.0) if is_at_least("2.0") else None
    except ImportError:
        return None
    else:
        return x**power


class Idioms(nn.Module):
    """What forwards of other libraries are written with: functions that are made on the way, lists of lists, objects
    that hold results, errors that are caught and do not occur, functions that are cached."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]) for _ in range(2))
        self.act = nn.Sigmoid()
        self.factor, self.offset, self.heads = numpy.float64(0.5), numpy.float32(0.25), numpy.int64(2)

    @torch.autocast("cpu", enabled=False)
    def positions(self, x):
        return torch.arange(x.shape[1]).to(x)[:, None] * self.offset

    def forward(self, x, *rest, **options):
        def squash(t: torch.Tensor, power: int = 2) -> torch.Tensor:
            return t.tanh() ** power if callable(t.tanh) else t

        def shift(t):
            with torch.no_grad():
                return t.mean() * self.factor

        double = functools.partial(torch.mul, other=2)
        x = x * 0.5
        for first, second in self.layers:
            a, b = map(lambda t: squash(t) + shift(x), (first(x), second(x)))  # noqa: C417
            c, d = map(self.act, (a, b))
            held = Intermediates(a * c)
            held.last = held.scores + max((b, d), key=lambda t: t.dim())
            held.history.append(double(held.last))
            x = held.history[0] / self.factor * self.heads + self.positions(x)
        out = rms(x, power=4).to(x)
        out[:, 1:] += x[:, :-1]
        out[..., 0] *= self.heads
        order = out[0, :, 0].argsort()
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        return steps(out)[:, inverse]


class Halves(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class Plain(nn.Module):
    """More of that: numbers of numpy, lambdas, named tuples, the first of its parameters, attributes of its class."""

    scale = None

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.join = lambda x, y: x + y.tanh()
        self.hooks, self.sizes = OrderedDict(), OrderedDict(first=2, second=4)

    def forward(self, x):
        dtype = next(self.parameters()).dtype
        count = int(numpy.ceil(x.shape[0] / 2)) * numpy.prod([1, 2])
        halves = Halves(*self.a(x.to(dtype)).chunk(2, -1))
        y = torch.cat([self.join(halves.second, halves.first), halves.first], -1)
        for hook in self.hooks.values():
            y = hook(y)
        if torch.is_tensor(self.b):
            return y
        return self.b(y * count + len([*self.buffers()])) * sum(self.sizes.values()) if self.scale is None else y


class Cross(nn.Module):
    """Attention with a query and a memory, which may be one tensor."""

    def __init__(self):
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, query, memory, pair=()):
        k, v = self.kv(memory * 2).chunk(2, -1)  # Autocast caches casts of leaves, not of this.
        y = self.out((self.q(query) @ k.mT).softmax(-1) @ v) + memory.tanh()
        for t in pair:
            y = y * t.sigmoid()
        return y if query is memory else y + query


def recorded(module, *args):
    """A region of a module after a first call; the module was called too."""
    region = in_regions(module)
    outcome(module, *args), outcome(region, *args)
    return region


def repeated(module, *args, calls=2):
    """A region of a module that gave in each of so many calls what the module gives."""
    region = in_regions(module)
    for _ in range(calls):
        same(module, region, *args)
    return region


class Code(nn.Module):
    """A forward of one expression of x, two layers, a parameter, and the length n."""

    def __init__(self, code):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)
        self.table, self.conv = nn.Parameter(torch.randn(400, 8)), nn.Conv1d(8, 8, 3, padding=1, groups=2)
        self.window, self.cls = 40, nn.Parameter(torch.randn(1, 1, 8))
        self.register_buffer("mean", torch.zeros(8))
        self.code = code

    def forward(self, x):
        return FORWARDS[self.code](self, x)


def window(m, x):
    h = m.down(F.gelu(m.up(m.norm(x))))
    return h[:, -m.window :] if x.shape[1] > m.window else h * 2


def number(m, x):
    n = x.shape[1]
    return m.down(torch.tanh(m.up(x))) / n + (x.sum(1, keepdim=True) * (1.0 / n) if isinstance(n, int) else x * n)


def limit(m, x):
    if x.shape[1] % 8 == 0:
        x = x.reshape(x.shape[0], -1, 8, 8).flip(2).flatten(1, 2)
    return m.down(F.silu(m.up(m.norm(x)))) + x


def heads(m, x):
    b, n, _ = x.shape
    q, k, v = (m.norm(x).view(b, n, 2, 4).transpose(1, 2) * s for s in (1, 2, 3))
    return m.down(m.up(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, n, 8)))


def statistics(m, x):
    if m.training:
        m.mean.lerp_(x.detach().mean((0, 1)), 0.5)
    return m.down(torch.tanh(m.up(x - m.mean)))


def padded(m, x):
    n = x.shape[1]
    return F.pad(m.norm(x), (0, 0, 0, 16 - n % 16))[:, :n] * torch.tanh(m.up(x))[..., :8]


def positions(m, x):
    n = x.shape[1]
    return m.down(torch.sin(m.up(x + torch.arange(n, device=x.device)[:, None] / n)))


FORWARDS = {
    "window": window,
    "number": number,
    "limit": limit,
    "heads": heads,
    "statistics": statistics,
    "table": lambda m, x: m.down(F.relu(m.up(x + m.table[: x.shape[1]]))),
    "mean": lambda m, x: m.down(F.gelu(m.up(x - x.mean(1, keepdim=True)))) * x.var(1, keepdim=True),
    "convolution": lambda m, x: m.down(F.gelu(m.up(m.conv(x.transpose(1, 2)).transpose(1, 2)))) + x,
    "token": lambda m, x: m.down(F.gelu(m.up(torch.cat([m.cls.expand(len(x), -1, -1), x], 1))))[:, 1:],
    "positions": positions,
    "mask": lambda m, x: m.down(F.silu(m.up(x))).tril() + x.masked_fill(x > x.shape[1] / 50, 0.0),
    "padded": padded,
    "resized": lambda m, x: m.down(m.up(F.interpolate(x.transpose(1, 2), scale_factor=2).mT)).unflatten(1, (-1, 2)),
}

"""Regions: forwards that run as one node of autograd, against the same forwards op by op."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import inspect
import pickle
import random
import subprocess
import sys
import threading
from collections import OrderedDict
from contextlib import nullcontext
from typing import NamedTuple
from weakref import ref

import numpy
import pytest
import torch
import torch.nn.functional as F
from harness import DEVICES, assert_no_worse, needs_gpu
from test_squeeze_excite import SqueezeExcite, StandIns
from torch import nn
from torch._dynamo import compiled_autograd
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fastlayers
from fastlayers import backends, functional
from fastlayers.graphs.state import Counter as Operations
from fastlayers.graphs.words import InWords
from fastlayers.ops import dispatch, elementwise, rotary, squeeze_excite
from fastlayers.patching import plan
from fastlayers.patching.program import executors
from fastlayers.patching.program.executors import Facts, executor_class
from fastlayers.patching.program.tape import Tape
from fastlayers.patching.reasons import PatchWarning, Refusal
from fastlayers.patching.regions import region as regions
from fastlayers.patching.regions.entries import no_regions
from fastlayers.patching.regions.region import FREE, Region, region_class, size_of


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


class Gated(nn.Module):
    """A convolution of x·gate, where the gate comes from the mean of x."""

    def __init__(self):
        super().__init__()
        self.first, self.se, self.last = nn.Conv2d(8, 3, 1), SqueezeExcite(), nn.Conv2d(3, 8, 1, bias=False)

    def forward(self, x):
        return self.last(self.se(self.first(x)))


class Many(nn.Module):
    """Several results, one without a gradient and one that is no tensor; and keyword arguments."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x, *, scale=1.0, more=None, **options):
        y = self.norm(self.a(x).relu() * scale)
        z = self.b(y) + (0 if more is None else more["other"]) + options.get("shift", 0)
        return z.tanh(), {"best": z.argmax(-1), "rank": z.dim()}, z.sigmoid() * y


@pytest.fixture(autouse=True)
def from_the_first_call(request, monkeypatch):
    if "checkpointing" not in request.node.name:
        monkeypatch.setattr(regions, "CALLS", 1)


@pytest.fixture(autouse=True)
def any_size(request, monkeypatch):
    if "small" not in request.node.name:
        monkeypatch.setattr(regions, "LEAST", dict.fromkeys(regions.LEAST, (1, 1)))


@pytest.fixture(autouse=True, params=["python", "native"])
def executor(request, monkeypatch):
    """What runs the regions."""
    if request.param == "python":
        monkeypatch.setattr(executors, "_native", None)
    elif executors.problem is not None:
        pytest.skip(executors.problem)
    return request.param


@pytest.fixture(autouse=True)
def operations_of_torch(monkeypatch):
    """What is recorded runs as it is, so that regions are bit-equal. test_fusion.py has what becomes of it on a GPU."""
    monkeypatch.setattr(backends, "generates_kernels", lambda device: False)


@pytest.fixture
def runs(monkeypatch):
    """The calls that were recorded (True) and those that ran as a region (False)."""
    seen = []
    run, prepared = Region.run, Region.prepared

    def watched(self, *args):
        seen.append(False)
        return run(self, *args)

    def recording(self, *args):
        found = prepared(self, *args)
        if found is not None:
            seen.append(True)
        return found

    monkeypatch.setattr(Region, "run", watched)
    monkeypatch.setattr(Region, "prepared", recording)
    return seen


def traces(monkeypatch):
    """The modules whose calls were traced, from now on."""
    seen = []
    original = regions.read_by

    def read_by(module, *rest):
        seen.append(module)
        return original(module, *rest)

    monkeypatch.setattr(regions, "read_by", read_by)
    return seen


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


def itself():
    x = tokens(2, 3, 8)
    return x, x, (x, tokens(8))


class ChannelsLast(nn.Module):
    """A view of a view, with strides of its own in a dimension of one element."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return (self.norm(x.permute(0, 2, 3, 1)).tanh() * 2).permute(0, 3, 1, 2).flatten(2)


CASES = [
    (ChannelsLast, lambda: (tokens(2, 8, 1, 1),)),
    (Block, lambda: (tokens(),)),
    (lambda: Block(p=0.3), lambda: (tokens(),)),
    (Block, lambda: (tokens(), torch.randn(5, 5))),
    (Bottleneck, lambda: (images(),)),
    (Bottleneck, lambda: (images().detach().to(memory_format=torch.channels_last).requires_grad_(),)),
    (FlashBlock, lambda: (tokens(),)),
    (FlashBlock, lambda: (tokens(), torch.randn(5, 5))),
    (Spellings, lambda: (tokens(2, 3, 8),)),
    (Idioms, lambda: (tokens(2, 3, 8),)),
    (Spellings, lambda: (tokens(2, 3, 8), tokens(8))),
    (Plain, lambda: (tokens(2, 3, 8),)),
    (Cross, itself),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["train", "eval", "no_grad", "inference_mode", "autocast"])
@pytest.mark.parametrize(("make", "inputs"), CASES)
def test_bit_equal(make, inputs, mode, device, runs, deterministic):
    torch.manual_seed(0)
    module = make().train(mode in ("train", "autocast")).to(device)
    region, moved = in_regions(module), {}
    args = torch.utils._pytree.tree_map(
        lambda t: moved.setdefault(id(t), t.detach().to(device).requires_grad_(t.requires_grad)), inputs()
    )
    context = {
        "no_grad": torch.no_grad, "inference_mode": torch.inference_mode,
        "autocast": lambda: torch.autocast(device, torch.bfloat16),
    }.get(mode, torch.enable_grad)  # fmt: skip
    for _ in range(3):
        with context():
            same(module, region, *args)
    assert runs == [True, False, False]


class Precise(nn.Module):
    """A product in float32 whatever the precision around it, as routers of experts and rotary code have it."""

    def __init__(self, width=16):
        super().__init__()
        self.first, self.weight = nn.Linear(width, width), nn.Parameter(torch.randn(width, width))

    def forward(self, x):
        x = self.first(x)
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            return (x.float() @ self.weight).sigmoid() * x


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", [Precise, Block])
def test_a_backward_outside_of_autocast(make, device, runs, deterministic):
    """It computes in the dtypes of the forward: a product in float32 has gradients in float32."""
    torch.manual_seed(0)
    module = make().to(device)
    region, x = in_regions(module), tokens().to(device)
    found = []
    for kind in (module, region, region):
        kind.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            out = kind(x)
        found.append([out, *torch.autograd.grad(out.float().square().sum(), [x, *kind.parameters()])])
    assert runs == [True, False]
    for actual in found[1:]:
        for a, b in zip(actual, found[0], strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("device", DEVICES)
def test_second_derivatives_outside_of_autocast(device):
    torch.manual_seed(0)
    module = Block().to(device)
    x = tokens().to(device)
    with torch.autocast(device, torch.bfloat16):
        region = recorded(module, x)

    def second(module, x):
        with torch.autocast(device, torch.bfloat16):
            out = module(x)
        (dx,) = torch.autograd.grad(out.float().square().sum(), x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), [x, module.gamma])

    assert_no_worse(second(region, x), second, module, x)


def test_results_are_the_objects_that_they_were():
    module, x, bias = in_regions(Spellings()), tokens(2, 3, 8), tokens(8)
    for _ in range(2):
        y, more = module(x, bias)
        assert more["states"][0] is y
        assert more["bias"] is bias
        assert more["input"] is x


def replace_object(module):
    class Other(Attend):
        def gain(self, x):
            return x * 5

    module.attend = Other()


def replace_call(module):
    module.attend.gain = lambda x: x - 1


OF_AN_OBJECT = {
    "object": replace_object,
    "method of the object": replace_call,
    "its attribute": lambda module: setattr(module.attend, "power", 3),
    "class attribute": (Attend, "power", 2),
    "method": (Attend, "gain", lambda self, x: x * 7),
    "property": (Attend, "half", property(lambda self: 0.25)),
    "call": (Attend, "__call__", lambda self, module, x, shift=0.0: module.fc(x) - shift),
    "its signature": (Attend, "__call__", lambda self, module, x: module.fc(x)),
    "script function": (sys.modules[__name__], "scaled", lambda x, factor: x * factor),
}


@pytest.mark.parametrize("change", OF_AN_OBJECT)
def test_a_replaced_part_of_an_object_is_seen(change, runs, monkeypatch):
    torch.manual_seed(0)
    module = Spellings()
    region, x = in_regions(module), tokens(2, 3, 8)
    for _ in range(2):
        same(module, region, x)
    before = module(x)[0]
    change = OF_AN_OBJECT[change]
    if isinstance(change, tuple):
        monkeypatch.setattr(*change)
    else:
        change(module), change(region)
    for _ in range(3):
        same(module, region, x)
    assert not torch.equal(module(x)[0], before)
    assert runs[:2] == [True, False]


def test_a_branch_that_was_not_taken(runs):
    module = Spellings()
    region, x = in_regions(module), tokens(2, 3, 8)
    same(module, region, x)
    for each in (module, region):
        each.steps = 4
    for _ in range(3):
        same(module, region, x)
    assert module.steps == region.steps == 7
    assert runs == [True]


@pytest.mark.parametrize("device", DEVICES)
def test_several_results_and_keywords(device, runs):
    module = Many().to(device)
    region, x = in_regions(module), tokens(3, 8, device=device)
    for options in ({}, {"scale": 2.0}, {"more": {"other": torch.ones(8, device=device)}}, {"shift": 1}):
        for _ in range(2):
            same(module, region, x, **options)
            _, more, _ = region(x, **options)
        assert more["rank"] == 2
        assert not more["best"].requires_grad
    assert runs.count(True) == 4


def test_blocks_that_differ_in_a_number_share_their_class(runs):
    known = {}
    stock = nn.Sequential(*(Block(index=i) for i in range(3)))
    blocks = nn.Sequential(*(in_regions(block, known) for block in stock))
    assert len({type(block) for block in blocks}) == 1
    for _ in range(2):
        same(stock, blocks, tokens())
    assert runs == [True] * 3 + [False] * 3
    assert len(type(blocks[0]).__fastlayers_region__.readers) == 1


def test_shapes_that_keep_changing_are_recorded_ever_later(runs, monkeypatch):
    """The fourth one at its second call, the fifth at its fourth, and so on."""
    module = Block()
    region = in_regions(module)
    for number, calls in enumerate((1, 1, 1, 2, 4, 8), start=1):
        for call in range(1, calls + 1):
            runs.clear()
            same(module, region, tokens(2, number, 16))
            assert runs == [True] * (call == calls)
    monkeypatch.setattr(regions, "PAYING", 5)
    for _ in range(20):  # which pay for four of the six
        same(module, region, tokens(2, 3, 16))
    runs.clear()
    same(module, region, tokens(2, 9, 16))
    assert runs == [True]


def test_alike_layers_share_what_changing_shapes_may_cost(runs):
    known = {}
    stock = [Block() for _ in range(4)]
    layers = [in_regions(block, known) for block in stock]
    for length in range(1, 9):
        for module, region in zip(stock, layers, strict=True):
            same(module, region, tokens(2, length, 16))
    assert runs == [*[True, False, False, False] * 3]  # not once more by each layer


def test_many_layers_of_one_class(runs):
    """Each has its own widths."""
    known = {}
    stock = [Block(4 * i) for i in range(1, 10 * FREE + 3)]
    layers = [in_regions(block, known) for block in stock]
    for _ in range(2):
        for i, (module, region) in enumerate(zip(stock, layers, strict=True), start=1):
            same(module, region, tokens(2, 3, 4 * i))
    assert runs == [True] * len(layers) + [False] * len(layers)


def test_a_hook_from_the_start(runs, monkeypatch):
    """It costs no trace in every call; once it is gone, a region is made."""
    known = {}
    module, other = (
        in_regions(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), known),
        in_regions(nn.Sequential(nn.Linear(8, 8)), known),
    )
    x, traced = tokens(2, 8), traces(monkeypatch)
    for _ in range(2):
        other(x)
    handle = module[0].register_forward_hook(lambda *_: None)
    for _ in range(10 * FREE + 5):
        module(x)
    assert len(traced) < 5
    assert len(runs) == 2
    handle.remove()
    for _ in range(2):
        module(x)
    assert len(runs) == 4


def test_what_is_seen_once_is_not_recorded(runs, monkeypatch):
    monkeypatch.setattr(regions, "CALLS", 2)
    known = {}
    stock = [Block(), Block()]
    layers = [in_regions(block, known) for block in stock]
    for i in range(3):
        for module, region in zip(stock, layers, strict=True):
            same(module, region, tokens())
            same(module, region, tokens(2, 2 + i, 16))
    assert runs == [True, False, False, False]


# -- what changes after the recording ----------------------------------------------------------------------------------


def halve(block):
    block.norm1.eps = 0.5


def freeze(block):
    block.attn.requires_grad_(False)


def widen(block):
    block.double()


def swap_child(block):
    torch.manual_seed(9)
    block.mlp[1] = nn.Tanh()


def swap_parameter(block):
    block.gamma = nn.Parameter(torch.ones(16))


def hook(block):
    block.norm2.register_forward_hook(lambda module, args, out: out * 2)


def backward_hook(block):
    block.attn.register_full_backward_hook(lambda module, grads, dys: (grads[0] * 2, *grads[1:]))


def renumber(block):
    block.index = 7


def share(block):
    block.norm2 = block.norm1


def grow_dropout(block):
    block.mlp[2].p = 0.5


def own_forward(block):
    block.attn.forward = lambda x, mask=None: x * 2


@pytest.mark.parametrize(
    "change",
    [halve, freeze, widen, swap_child, swap_parameter, hook, backward_hook, renumber, grow_dropout, own_forward, share],
)
def test_a_change_is_seen(change, runs):
    torch.manual_seed(0)
    module = Block()
    region, x = in_regions(module), tokens()
    for _ in range(2):
        same(module, region, x)
    change(module), change(region)
    x = x.detach().to(module.gamma.dtype).requires_grad_()
    for _ in range(2):
        same(module, region, x)
    assert runs[:2] == [True, False]


class Optional(nn.Module):
    """A list in which layers may be missing, as blocks of diffusers have it."""

    def __init__(self, *there):
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(8, 8) for _ in there)
        self.norms = nn.ModuleList(nn.LayerNorm(8) if each else None for each in there)

    def forward(self, x):
        for layer, norm in zip(self.first, self.norms, strict=True):
            x = layer(x).tanh()
            if norm is not None:
                x = norm(x) * 2
        return x.sigmoid() * x


@pytest.mark.parametrize("order", [1, -1])
def test_layers_that_are_missing_from_a_list(order, runs):
    """A region that had been recorded for a module without a layer ran for one that has it."""
    torch.manual_seed(0)
    known, x = {}, tokens(2, 3, 8)
    for there in [(False, False), (True, False), (True, True)][::order]:
        module = Optional(*there)
        region = in_regions(module, known)
        for _ in range(2):
            same(module, region, x)
    assert runs == [True, False] * 3


@pytest.mark.parametrize(
    ("name", "value"),
    [("factor", numpy.float64(0.75)), ("offset", numpy.float32(2.0)), ("heads", numpy.int64(3)), ("heads", 2)],
)
def test_a_number_of_numpy_that_changes(name, value, runs):
    """Those of integers and of float32 are no Python numbers: a region kept what it had seen."""
    module = Idioms()
    region, x = in_regions(module), tokens(2, 3, 8)
    for _ in range(2):
        same(module, region, x)
    for each in (module, region):
        setattr(each, name, value)
    for _ in range(2):
        same(module, region, x)
    assert runs[:2] == [True, False]


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (F, "gelu", lambda x, approximate="none": x * 3),
        (nn.LayerNorm, "forward", lambda self, x: x * 2),
        (Attention, "forward", lambda self, x, mask=None: x - 1),
        (DropPath, "forward", lambda self, x: x + 1),
    ],
)
def test_a_replaced_function_is_called(owner, name, value, monkeypatch):
    module = Block()
    region, x = in_regions(module), tokens()
    for _ in range(2):
        same(module, region, x)
    monkeypatch.setattr(owner, name, value)
    for _ in range(2):
        same(module, region, x)
    monkeypatch.undo()
    same(module, region, x)


# -- autograd ----------------------------------------------------------------------------------------------------------


def recorded(module, *args):
    """A region of a module after a first call; the module was called too."""
    region = in_regions(module)
    outcome(module, *args), outcome(region, *args)
    return region


@pytest.mark.parametrize("shape", ["expanded", "transposed", "none"])
@pytest.mark.parametrize("device", DEVICES)
def test_other_gradients(shape, device):
    module, x = Block().to(device), tokens(device=device)
    region = recorded(module, x)
    dy = {
        "expanded": lambda: torch.ones((), device=device).expand(2, 5, 16),
        "transposed": lambda: torch.randn(16, 5, 2, device=device).transpose(0, 2),
        "none": lambda: None,
    }[shape]()
    for kind in (module, region):
        x.grad = None
        out = kind(x)
        out.sum().backward() if dy is None else out.backward(dy)
        kind.dx = x.grad
    torch.testing.assert_close(region.dx, module.dx)


#: The threads that ran the backward of ``noted``.
THREADS = []


@torch.library.custom_op("fastlayers_tests::noted", mutates_args=())
def noted(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.library.custom_op("fastlayers_tests::noted_backward", mutates_args=())
def noted_backward(dy: torch.Tensor) -> torch.Tensor:
    THREADS.append(threading.get_ident())
    return dy * 2


noted.register_autograd(lambda ctx, dy: noted_backward(dy))
for op in (noted, noted_backward):
    op.register_fake(torch.empty_like)


class Noted(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16))

    def forward(self, x):
        return torch.ops.fastlayers_tests.noted(x * self.weight) + x


@pytest.mark.parametrize("device", DEVICES)
def test_a_recording_runs_backwards_where_autograd_does(device, runs):
    """cuDNN makes its plans again in another thread: 5 s in EfficientNet-B0."""
    THREADS.clear()
    region, x = in_regions(Noted().to(device)), tokens(device=device)
    for _ in range(3):
        region(x).sum().backward()
    assert runs == [True, False, False]
    assert len(THREADS) >= 3
    assert len(set(THREADS)) == 1
    if device == "cuda":
        assert threading.get_ident() not in THREADS


def test_a_thread_does_not_wait_for_a_recording(runs):
    module, x, found = Block(), tokens(), []
    region = in_regions(module)
    with regions._lock:
        other = threading.Thread(target=lambda: found.append(region(x)))
        other.start()
        other.join(timeout=60)
    assert torch.equal(found[0], module(x))
    assert runs == []
    region(x)
    assert runs == [True]


def test_a_thread_does_not_run_what_is_being_recorded(monkeypatch, runs):
    """It found the entry of the recording, which had no code yet."""
    module, x, found = Block(), tokens(), []
    region = in_regions(module)
    record = regions.Region.record

    def meanwhile(self, *arguments):
        outcome = record(self, *arguments)
        other = threading.Thread(target=lambda: found.append(region(x)))
        other.start()
        other.join(timeout=60)
        return outcome

    monkeypatch.setattr(regions.Region, "record", meanwhile)
    out = region(x)
    assert torch.equal(found[0], module(x))
    assert torch.equal(out, found[0])
    assert runs == [True]


def test_twice_backward():
    region, x = recorded(Block(), tokens()), tokens()
    out = region(x).square().sum()
    first = torch.autograd.grad(out, x, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(out, x)[0], first)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, x)


def test_a_backward_lets_go_of_the_inputs():
    region, x = in_regions(Block()), tokens()
    for _ in range(2):
        given = x * 2
        gone, out = ref(given), region(given)
        del given
        out.sum().backward(retain_graph=True)
        out.sum().backward()
        assert gone() is None
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            torch.autograd.grad(out.sum(), region.gamma, create_graph=True)


def test_two_forwards_before_a_backward():
    module = Block(p=0.2)
    region, a, b = recorded(module, tokens()), tokens(), tokens().detach() * 2
    for kind in (module, region):
        torch.manual_seed(0)
        (kind(a) * kind(b)).sum().backward()
    for p, q in zip(module.parameters(), region.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", [lambda: Block(8, p=0.3), Bottleneck, Spellings])
def test_second_derivatives(make, device):
    torch.manual_seed(0)
    module = make().double().to(device)
    x = torch.randn(*((2, 8, 4, 4) if make is Bottleneck else (2, 3, 8)), dtype=torch.float64, device=device)
    x.requires_grad_()
    region = recorded(module, x)
    found = []
    for kind in (module, region):
        torch.manual_seed(1)
        wanted = [x, *kind.parameters()]
        out = sum(t.square().sum() for t in leaves(kind(x)))
        grads = torch.autograd.grad(out, wanted, create_graph=True, materialize_grads=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in grads), wanted, materialize_grads=True))
        found[-1] += tuple(kind.buffers())
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_one_tensor_given_twice(runs, monkeypatch):
    monkeypatch.setattr(regions, "FREE", 4)
    torch.manual_seed(0)
    module = Cross()
    region = in_regions(module)
    x, y = tokens(2, 3, 8), tokens(2, 3, 8)
    for given in ((x, x), (x, y), (x, x), (x, y), (x, x, (y, y)), (x, y, (x, y)), (x, x, (y, y)), (x, y, (x, y))):
        same(module, region, *given)
    assert runs == [True, True, False, False, True, True, False, False]


def test_a_second_derivative_for_one_tensor_given_twice():
    torch.manual_seed(0)
    module = Cross().double()
    region = in_regions(module)
    x = tokens(2, 3, 8, dtype=torch.float64)
    for _ in range(2):
        assert torch.autograd.gradgradcheck(lambda x: region(x, x, (x,)), (x,))


def add_parameter(module):
    module.register_parameter("first", nn.Parameter(torch.ones(1)))
    module._parameters = {"first": module._parameters.pop("first"), **module._parameters}


def add_hook(module):
    module.hooks["double"] = lambda y: 2 * y


@pytest.mark.parametrize(
    "change",
    [
        add_parameter,
        add_hook,
        lambda module: setattr(module, "scale", 1.0),
        lambda module: module.sizes.update(second=5),
        lambda module: setattr(module, "join", lambda x, y: x - y),
        lambda module: module.register_buffer("extra", torch.ones(1)),
    ],
)
def test_a_change_of_what_is_read_by_the_way(change, runs):
    torch.manual_seed(0)
    module = Plain()
    region = in_regions(module)
    same(module, region, tokens(2, 3, 8))
    change(module)
    change(region)
    same(module, region, tokens(2, 3, 8))
    assert runs[0]


class Moves(nn.Module):
    """Assigns what is there already, unless the tensors are somewhere else or the batch has another size."""

    def __init__(self):
        super().__init__()
        self.norm, self.size = nn.LayerNorm(8), 0
        self.register_buffer("table", torch.randn(8))
        self.rows = torch.randn(8)

    def forward(self, x):
        self.table, self.rows = self.table.to(x.device), self.rows.to(x.dtype)
        self.size = x.shape[0]
        return self.norm(x * self.table + self.rows).tanh() * self.size


def test_an_assignment_of_what_is_there(runs, monkeypatch):
    monkeypatch.setattr(regions, "CALLS", 2)  # as users have it: the first call assigns
    torch.manual_seed(0)
    module = Moves()
    region = in_regions(module)
    for x in (tokens(2, 8), tokens(2, 8), tokens(2, 8), tokens(3, 8), tokens(3, 8)):
        same(module, region, x)
        assert region.size == len(x)
    assert runs == [True, False, True]
    region.double()
    assert region(tokens(3, 8).double()).dtype is torch.float64
    assert region.rows.dtype is torch.float64


class Remembers(nn.Module):
    """Keeps something for a method of its own, and forgets it, as attention layers of torch_geometric do."""

    def __init__(self):
        super().__init__()
        self.norm, self.kept, self.calls = nn.LayerNorm(8), None, 0

    def forward(self, x, keeps=False, counts=False):
        self.kept = x.exp()
        x = self.added(self.norm(x))
        self.kept = self.kept if keeps else None
        self.calls += counts
        return x.tanh()

    def added(self, x):
        return x * 2 + self.kept


def test_an_assignment_that_is_taken_back(runs):
    torch.manual_seed(0)
    module = Remembers()
    region = in_regions(module)
    for _ in range(2):
        same(module, region, tokens(2, 8))
    assert runs == [True, False]
    assert region.kept is None
    region(tokens(2, 8), keeps=True)
    assert region.kept is not None
    same(module, region, tokens(2, 8))  # what was kept is forgotten again, op by op
    assert region.kept is None
    region(tokens(2, 8), counts=True)
    region(tokens(2, 8), counts=True)
    assert region.calls == 2
    assert not any(runs[2:])


class Collects(nn.Module):
    """Returns a list that it was given, beside what it made of it, as the heads of ultralytics do."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, levels, more):
        total = self.norm(levels[0] + levels[1]).tanh() * more["scale"]
        return total, {"features": levels, "more": [more, total]}


def test_a_result_that_holds_an_argument(runs):
    torch.manual_seed(0)
    module = Collects()
    region = in_regions(module)
    for _ in range(2):
        levels, more = [tokens(2, 8), tokens(2, 8)], {"scale": tokens(2, 8)}
        total, rest = region(levels, more)
        assert torch.equal(total, module(levels, more)[0])
        assert rest["features"] is levels
        assert rest["more"][0] is more
        assert rest["more"][1] is total
    assert runs == [True, False]


class Makes(nn.Module):
    """Makes layers without parameters while it runs, and calls a function that calls another one."""

    def __init__(self, layer=nn.ReLU):
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(8), layer

    def forward(self, x):
        act = getattr(self, "act", nn.Identity())
        x = functools.reduce(lambda y, n: y * n + self.norm.weight, (2, 3), nn.ZeroPad2d((1, 0, 0, 0))(x)[..., 1:])
        return act(self.layer()(self.norm(x)).tanh())


def test_layers_that_are_made_in_a_forward(runs, monkeypatch):
    torch.manual_seed(0)
    module = Makes()
    region = in_regions(module)
    for x in (tokens(2, 8), tokens(2, 8)):
        same(module, region, x)
    assert runs == [True, False]
    for each in (module, region):
        each.act = nn.Tanh()
    same(module, region, tokens(2, 8))
    assert runs == [True, False, True]
    monkeypatch.setattr(nn.ReLU, "forward", lambda self, x: x * 2)
    same(module, region, tokens(2, 8))
    calls = len(runs)
    draws, x = in_regions(Makes(functools.partial(nn.Linear, 8, 8))), tokens(2, 8)  # each time other weights
    assert not torch.equal(draws(x), draws(x))
    assert len(runs) == calls


def test_two_lambdas_in_a_line(runs):
    torch.manual_seed(0)
    module = Plain()
    module.join, _ = lambda x, y: x - y, lambda x, y: x * y
    region = in_regions(module)
    for _ in range(2):
        same(module, region, tokens(2, 3, 8))
    assert not runs


class Tied(nn.Module):
    """Two parameters in one memory, of which a view is needed in the backward."""

    def __init__(self):
        super().__init__()
        memory = torch.randn(4, 4)
        self.a, self.b, self.norm = nn.Parameter(memory), nn.Parameter(memory.view(2, 8)), nn.LayerNorm(4)

    def forward(self, x):
        return self.norm((x @ self.a.t()).tanh() @ self.b.view(4, 4)[:2].t().sigmoid()[:, :1].expand(4, 4)).tanh()


def test_parameters_that_share_memory(runs):
    torch.manual_seed(0)
    module = Tied()
    region = in_regions(module)
    for _ in range(2):
        same(module, region, tokens(3, 4))
    assert runs == [True, False]


@pytest.mark.parametrize("target", ["result", "input", "parameter"])
def test_what_backward_needs_must_not_be_written(target):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)

        def forward(self, x):
            return self.c(torch.tanh(self.b(torch.tanh(self.a(x))) * 2) * 3).sigmoid().view(-1, 2)

    module = Layer()
    region = in_regions(module)
    for kind in (module, region, region):
        x = tokens(2, 3, 4) * 1
        out = kind(x)
        with torch.no_grad():
            {"result": out, "input": x, "parameter": kind.b.weight}[target].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_a_result_may_be_written_in_place():
    module = Block()
    region, x = recorded(module, tokens()), tokens()
    for kind in (module, region):
        out = kind(x)
        out += 1
        F.relu_(out)
        kind.dx = torch.autograd.grad(out.sum(), x)[0]
    assert torch.equal(region.dx, module.dx)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant, device):
    module = Block(p=0.3).to(device)
    region, x = in_regions(module), tokens(device=device)
    found = []
    for kind in (module, region, region):
        torch.manual_seed(0)
        found.append(
            torch.autograd.grad(checkpoint(kind, x, use_reentrant=reentrant).sum(), x)[0] if not reentrant else None
        )
        if reentrant:
            x.grad = None
            checkpoint(kind, x, use_reentrant=True).sum().backward()
            found[-1] = x.grad.clone()
    assert torch.equal(found[1], found[0])
    assert torch.equal(found[2], found[0])


class Turns(nn.Module):
    def __init__(self):
        super().__init__()
        self.qk = nn.Linear(16, 16)

    def forward(self, x):
        angles = torch.arange(5 * 4, device=x.device, dtype=torch.float32).view(5, 4).repeat(1, 2)
        q, k = functional.rotary(*self.qk(x).unflatten(-1, (2, 8)).unbind(-2), angles.cos(), angles.sin())
        return q * k


@pytest.mark.parametrize("device", DEVICES)
def test_the_first_call_of_an_op_is_recorded_as_later_ones(device, runs):
    """As a checkpoint has it recorded. The op plans its calls by running torch's on tensors without memory."""
    module, x = Turns().to(device), tokens(device=device)
    rotary.plan.cache_clear()
    same(in_regions(module), module, x)
    assert runs == [True]


@pytest.mark.parametrize("frozen", [False, True])
def test_a_checkpoint_frees_what_a_region_is_given(frozen):
    """Also what only the derivative of the backward reads, which then computes it again."""
    module = Block().requires_grad_(not frozen)
    region, x = in_regions(module), tokens()
    found = []
    for kind in (module, region, region):
        memory = []

        def block(x, kind=kind, memory=memory):
            between = x * 2
            memory.append(StorageWeakRef(between.untyped_storage()))
            return kind(between)

        out = checkpoint(block, x, use_reentrant=False)
        assert memory[0].expired()
        (dx,) = torch.autograd.grad(out.sin().sum(), x, create_graph=True)
        found.append((dx, torch.autograd.grad(dx.sin().sum(), x)[0]))
    for own in found[1:]:
        assert torch.equal(own[0], found[0][0])
        torch.testing.assert_close(own[1], found[0][1])


def kept_by(call):
    """The bytes that a call leaves allocated, its result among them."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        out = call()
    events = run.profiler.kineto_results.events()
    assert out.requires_grad
    return sum(event.nbytes() for event in events if event.name() == "[memory]")


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("kind", "inputs"), [(Block, tokens), (Bottleneck, images), (Gated, images)])
def test_a_region_keeps_no_more_than_op_by_op(kind, inputs, autocast, runs, monkeypatch):
    kernels = StandIns()
    for family in (squeeze_excite.FAMILY, elementwise.FAMILY):
        monkeypatch.setattr(family, "kernels_for", lambda x: kernels)
    monkeypatch.setattr(elementwise, "GPU_LEAST", 0)
    module, x, kept = fastlayers.patch_model(nn.Sequential(kind())), inputs(), []
    for context in (nullcontext, nullcontext, no_regions):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), context():
            kept.append(kept_by(lambda: module(x)))
    assert runs == [True, False]
    assert kept[1] <= kept[2]


def test_hooks_on_saved_tensors_see_what_is_kept():
    region, x = in_regions(Block()), tokens()
    counts = []
    for _ in range(2):
        packed = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, packed=packed: packed.append(t) or t, lambda t: t):
            out = region(x)
        out.sum().backward()
        counts.append(len(packed))
    assert counts[0] == counts[1] > 0  # a recomputation that finds a region counts what the first forward saved


def test_transforms_run_op_by_op(runs):
    module = Block()
    region, x = recorded(module, tokens()), tokens()
    del runs[:]
    stacked = torch.stack([x, x * 2])
    torch.testing.assert_close(torch.func.vmap(region)(stacked), torch.func.vmap(module)(stacked))
    _, dx = torch.func.jvp(region, (x,), (x,))
    torch.testing.assert_close(dx, torch.func.jvp(module, (x,), (x,))[1])
    assert not runs


def test_copies_and_pickles():
    region = recorded(Block(), tokens())
    copied = copy.deepcopy(region)
    same(region, copied, tokens())
    state = pickle.loads(pickle.dumps(region))
    assert type(state) is Block
    same(state, region, tokens())


def test_gradients_that_are_not_asked_for(runs):
    module, x = Block(), tokens()
    region = recorded(module, x)
    for wanted in (lambda kind: [x], lambda kind: [kind.gamma], lambda kind: [kind.mlp[0].weight, x]):
        found = [torch.autograd.grad(kind(x).square().sum(), wanted(kind)) for kind in (module, region)]
        for a, b in zip(*found, strict=True):
            assert torch.equal(a, b)
    assert runs == [True, False, False, False]


def test_batched_gradients():
    module, x = Block(), tokens()
    region, dys = recorded(module, x), torch.randn(3, 2, 5, 16)
    found = [torch.autograd.grad(kind(x), [x, kind.gamma], dys, is_grads_batched=True) for kind in (module, region)]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_forward_derivatives_of_a_backward():
    module, x = Block(), tokens()
    region = recorded(module, x)
    dy, tangent = torch.randn(2, 5, 16), torch.randn(2, 5, 16)
    found = []
    for kind in (module, region):
        out = kind(x)
        with forward_ad.dual_level():
            dx = torch.autograd.grad(out, x, forward_ad.make_dual(dy, tangent))[0]
            found.append(forward_ad.unpack_dual(dx))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


class Counting(TorchDispatchMode):
    """Counts the operations below autograd."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        assert "fastlayers_regions" not in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("differentiable", [False, True])
def test_modes_see_torchs_operations(differentiable):
    module, x = Block(), tokens()
    region, counts = recorded(module, x), []
    out = region(x)
    for kind in (module, region):
        with Counting() as counting:
            kind(x).sum().backward()
        counts.append(counting.count)
    assert counts[0] == counts[1]
    with Counting() as counting:  # of the backward alone, whose forward was a region
        torch.autograd.grad(out.sum(), x, create_graph=differentiable)
    assert counting.count > 20


def test_modes_that_need_no_single_operations(monkeypatch):
    """The one in which a parallel model is captured: regions run in it."""
    region, x, seen = recorded(Block(), tokens()), tokens(), []
    run = Region.run
    monkeypatch.setattr(Region, "run", lambda *call: seen.append(call) or run(*call))
    outs = [region(x)]
    with InWords():
        outs.append(region(x))
    assert len(seen) == 2
    with InWords(), Operations():
        outs.append(region(x))
    assert len(seen) == 2
    torch.testing.assert_close(outs[1:], [outs[0]] * 2)


def test_threads():
    module, x = Block(), tokens()
    region = recorded(module, x)
    expected = torch.autograd.grad(module(x).square().sum(), [x, *module.parameters()])
    wrong = []

    def work():
        for _ in range(20):
            found = torch.autograd.grad(region(x).square().sum(), [x, *region.parameters()])
            wrong.extend(1 for a, b in zip(found, expected, strict=True) if not torch.equal(a, b))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_anomaly_mode_and_profiler(executor):
    region, x = recorded(Block(), tokens()), tokens()
    with torch.autograd.detect_anomaly(check_nan=True), profile(activities=[ProfilerActivity.CPU]) as run:
        region(x).sum().backward()
    names = {event.name for event in run.events()}
    assert {"aten::addmm", "aten::native_layer_norm_backward"} <= names
    assert ("FastlayersRegionBackward" in names) is (executor == "native")


def test_training_of_several_blocks():
    torch.manual_seed(0)
    stock = nn.Sequential(*(Block() for _ in range(3)))
    blocks = nn.Sequential(*(in_regions(block) for block in stock))
    for model in (stock, blocks):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(tokens()).square().mean().backward()
            optimizer.step()
    for p, q in zip(stock.parameters(), blocks.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_module_that_keeps_its_result_is_collected():
    region, x = in_regions(Block()), tokens()
    for _ in range(3):
        region.__dict__["last"] = region(x)
    gone = ref(region)
    del region
    gc.collect()
    assert gone() is None


def test_a_second_derivative_without_the_module(runs):
    module, x = Block(), tokens()
    region = in_regions(module)
    for _ in range(2):
        out = region(x)
    del region
    gc.collect()
    assert runs == [True, False]
    found = [torch.autograd.grad(y.sum(), x, create_graph=True)[0] for y in (out, module(x))]
    torch.testing.assert_close(*found)
    torch.testing.assert_close(*(torch.autograd.grad(dx.square().sum(), x)[0] for dx in found))


def test_a_second_derivative_of_inputs_that_were_written():
    region, x = recorded(Block(), tokens()), tokens()
    out = region(x)
    with torch.no_grad():
        region.attn.proj.bias.add_(1)  # a backward does not need its values
    torch.autograd.grad(out.sum(), x, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified in place since"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


@pytest.mark.parametrize("compiler", [lambda graph: graph, torch.compile(backend="eager")], ids=["graph", "dynamo"])
def test_compiled_autograd(compiler):
    """Two calls of one region in a graph, which is compiled once and run with the values of other calls."""
    module = Block()
    region = recorded(module, tokens())
    for step in range(3):
        found = []
        for call in (module, region):
            x, wanted = tokens(), [*call.parameters()]
            out = call(call(x * step))
            found.append(torch.autograd.grad(out.sum(), [x, *wanted], retain_graph=True))
            with compiled_autograd._enable(compiler):
                found.append(torch.autograd.grad(out.sum(), [x, *wanted]))
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                out.sum().backward()
        for other in found[1:]:
            torch.testing.assert_close(other, found[0])


# -- what is refused ---------------------------------------------------------------------------------------------------


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.calls, self.log = 0, []

    def work(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Averages(Base):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4, momentum=None)  # its factor is the value of a tensor

    def forward(self, x):
        return self.norm(self.work(x))


class Branches(Base):
    def forward(self, x):
        return self.work(x) if x.sum() > 0 else x


class Counts(Base):
    def forward(self, x):
        self.calls += 1
        return self.work(x) * self.calls


class Measures(Base):
    size = 0

    def forward(self, x):
        self.size = float(len(x)) + self.calls
        self.calls += 1
        return self.work(x)


class Observed(Base):
    @property
    def seen(self):
        return None

    @seen.setter
    def seen(self, value):
        self.log.append(value)

    def forward(self, x):
        self.seen = None
        return self.work(x)


class Logs(Base):
    def forward(self, x):
        self.log.append(x.shape)
        return self.work(x)


class Random(Base):
    def forward(self, x):
        return self.work(x) * random.random()


class Writes(Base):
    def forward(self, x):
        x.mul_(2)
        return self.work(x)


class Passes(Base):
    def forward(self, x):
        return x if x.shape[0] > 0 else self.work(x)


class Views(Base):
    def forward(self, x):
        y = self.work(x)
        return y[0], y  # two tensors in one memory, of which the first is not the larger one


class Numpy(Base):
    def forward(self, x):
        y = self.work(x)
        return y * float(y.detach().numpy().max())


class Array(Base):
    def __init__(self):
        super().__init__()
        self.values = numpy.ones(4, numpy.float32)

    def forward(self, x):
        self.values[0] += 1  # an item of something that is not of this call
        return self.work(x) * torch.as_tensor(self.values)


class Holder:
    value = None


class Keeps(Base):
    def __init__(self):
        super().__init__()
        self.holder = Holder()

    def forward(self, x):
        self.holder.value = self.calls
        return self.work(x)


class Changed(Base):
    def forward(self, x):
        def count():
            self.calls += 1
            return self.calls

        return self.work(x) * count()


class Catches(Base):
    def forward(self, x):
        try:
            return self.work(x) * self.factor
        except AttributeError:
            return self.work(x) * 2


class Mends(Base):
    def forward(self, x):
        try:
            x = x * 2
        finally:
            x = x * 3
        return self.work(x)


@functools.cache
def table(size):
    return torch.arange(size, dtype=torch.float32)


class Caches(Base):
    def forward(self, x):
        return self.work(x) * table(4)


class Returns(Base):
    def forward(self, x):
        return self.work(x), self.holder

    def __init__(self):
        super().__init__()
        self.holder = Intermediates(torch.ones(4))


@pytest.mark.parametrize(
    "kind",
    [
        *(
            Averages,
            Branches,
            Counts,
            Measures,
            Observed,
            Logs,
            Random,
            Writes,
            Passes,
            Views,
            Numpy,
            Array,
            Keeps,
            Changed,
            Returns,
        ),
        *(Catches, Mends, Caches),
    ],
)
def test_what_a_region_cannot_repeat_runs_op_by_op(kind, runs):
    torch.manual_seed(0)
    module = kind()
    region = in_regions(module)
    for i in range(5):
        found = []
        for each in (module, region):
            random.seed(i)
            x = tokens(2, 4).detach() * (-1) ** i
            found.append([*leaves(each(x)), x])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert (module.calls, module.log) == (region.calls, region.log)
    assert not runs


class Holding(Base):
    """Returns an object that it makes, which holds views of other results and of an argument."""

    def forward(self, x):
        y = self.work(x)
        held = Intermediates(y, [y[..., 1:].mT, y[0]], x.view(-1))
        return self.work(y), {"held": held, "none": None, "again": (held, x)}


@pytest.mark.parametrize("grads", [True, False])
def test_objects_and_views_among_results(grads, runs):
    torch.manual_seed(0)
    module = Holding()
    region = in_regions(module)
    x = torch.randn(2, 4, requires_grad=True)
    for _ in range(4):
        found = []
        for each in (module, region):
            with torch.set_grad_enabled(grads):
                out, rest = each(x)
            held = rest["held"]
            assert type(held) is Intermediates
            assert rest["again"][0] is held
            assert rest["again"][1] is x
            assert held.last.data_ptr() == x.data_ptr()
            assert held.scores.untyped_storage().data_ptr() == held.history[0].untyped_storage().data_ptr()
            tensors = [out, held.scores, *held.history, held.last]
            total = sum(t.square().sum() for t in tensors)
            more = torch.autograd.grad(total, [x, *each.parameters()]) if grads else ()
            found.append((tensors, more))
        for a, b in zip(found[0][0], found[1][0], strict=True):
            assert a.stride() == b.stride()
            assert torch.equal(a, b)
        torch.testing.assert_close(found[0][1], found[1][1])  # Those of views are added up in another order.
    assert runs[0]
    (entry,) = (e for found in type(region).__fastlayers_region__.entries.values() for e in found)
    assert "tensor(" not in repr(entry.parts)  # What was recorded holds no result.


def test_a_forward_that_fails_on_shapes_alone_says_nothing(runs, caplog, capfd):
    """torch logs the errors of its own fake tensors with a traceback."""

    class Quiet(Base):
        def forward(self, x):
            try:
                x = x @ x
            except RuntimeError:
                x = x * 2
            return self.work(x)

    module, x = Quiet(), torch.randn(2, 4)
    region = in_regions(module)
    for _ in range(3):
        assert torch.equal(region(x), module(x))
    assert not runs
    assert not caplog.records
    assert not capfd.readouterr().err


def test_a_cache_keeps_no_fake_tensor(monkeypatch):
    monkeypatch.setattr(regions, "CALLS", 1)
    table.cache_clear()
    module, x = Caches(), torch.randn(2, 4)
    assert torch.equal(in_regions(module)(x), module(x))
    assert type(table(4)) is torch.Tensor


def test_a_failed_recording_leaves_no_trace(runs):
    class Late(Bottleneck):
        def forward(self, x):
            y = F.dropout(super().forward(x), 0.5)
            return y[0], y

    module = Late()
    region = in_regions(module)
    for _ in range(2):
        same(module, region, images())  # statistics and random numbers as if there had been none
    assert not runs


def test_a_kernel_that_the_dispatcher_does_not_see_is_refused():
    x = torch.ones(4)
    with Tape([x], []):
        y = torch.empty(4)  # a foreign kernel would write here
        with pytest.raises(Refusal, match="no operation of torch"):
            torch.add(y, x)


class Twice(torch.autograd.Function):
    """Calls what torch's dispatcher does not see, forward and backward, with results of several kinds."""

    @staticmethod
    def forward(ctx, x, scale):
        doubled, *_ = dispatch.observable(twice)(x, [scale, None], 2)
        ctx.save_for_backward(doubled)
        return doubled

    @staticmethod
    def backward(ctx, dy):
        doubled, rest, none = dispatch.observable(twice)(dy, [ctx.saved_tensors[0], dy], 2)
        assert none is None
        return doubled + 0 * rest, None


kernel_calls = []


def twice(x, others, factor):
    kernel_calls.append(factor)
    assert len(others) == 2
    return x.detach() * factor, others[0] + 1, None


class Doubled(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x):
        y = self.a(x)
        return self.norm(self.b(y * 2).tanh())


class DoubledByKernels(Doubled):
    __fastlayers_original__ = Doubled  # as patch_model would mark it

    def forward(self, x):
        y = self.a(x)
        return self.norm(self.b(Twice.apply(y, y.detach().sigmoid())).tanh())


def test_kernels_of_ours_run_in_a_region(runs):
    torch.manual_seed(0)
    module = DoubledByKernels()
    region = in_regions(module)
    for _ in range(3):
        same(module, region, tokens(2, 4))
    assert runs == [True, False, False]
    del kernel_calls[:]
    region(tokens(2, 4)).sum().backward()
    assert kernel_calls == [2, 2]


def test_a_kernel_of_ours_is_seen():
    calls = []

    def double(x):
        calls.append(x)
        return (x.detach() * 2).add_(0)

    x = torch.ones(4)
    tape = Tape([x], [])
    with dispatch.observed(tape.kernel), tape:
        y = dispatch.observable(double)(x) + 1
    assert dispatch.observable(double) is double
    program = tape.program(len(tape.operations), [tape.name(y)], [], [])
    (result,), kept = executor_class()(program, Facts()).forward(x * 3)
    assert torch.equal(result, torch.full((4,), 7.0))
    assert len(calls) == 2
    assert not kept


def test_a_kernel_of_ours_does_not_keep_who_saw_it():
    tape = Tape([torch.ones(4)], [])
    with dispatch.observed(tape.kernel):
        seen = dispatch.observable(torch.neg)
    known = ref(tape)
    del tape
    gc.collect()
    assert known() is None
    assert seen(torch.ones(())) == -1


def test_statistics_that_are_inference_tensors(runs):
    with torch.inference_mode():
        module = Bottleneck()
        region, x = in_regions(module), images().detach()
        for _ in range(2):
            same(module, region, x)
    assert runs == [True, False]


def test_a_buffer_of_inference_mode(runs):
    class Shifted(Base):
        def __init__(self):
            super().__init__()
            with torch.inference_mode():
                self.shift = torch.ones(4)

        def forward(self, x):
            return self.work(x + self.shift)

    module = Shifted()
    region, x = in_regions(module), tokens(2, 4)
    region.shift = module.shift  # a copy would be a tensor like others
    for _ in range(2):
        same(module, region, x)
    found = [torch.autograd.grad(kind(x).sum(), x, create_graph=True)[0] for kind in (module, region)]
    assert torch.equal(*found)
    assert runs == [True, False, False]


def test_a_foreign_kernel_in_a_rewritten_forward(runs):
    """The function of a user's rule may launch what it likes, also into memory that has values."""

    class Inside(Base):
        def forward(self, x):
            return self.work(x)

    class Rewritten(Inside):
        def forward(self, x):
            y = self.work(x).clone()
            y.detach().numpy().fill(3.0)
            return y

    Rewritten.__fastlayers_original__ = Inside  # as patch_model would mark it
    module = Rewritten()
    module.__class__ = region_class(Rewritten, {})
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(module(tokens(2, 4)), torch.full((2, 4), 3.0))
    assert not runs


def test_small_forwards_stay_as_they_are(runs):
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    region = in_regions(module)
    for _ in range(5):
        same(module, region, tokens(2, 4))
    assert not runs
    assert type(region).__fastlayers_region__.off == [False, True]


@pytest.mark.parametrize("kind", [Branches, Views])
def test_a_refusal_keeps_no_tensor(kind):
    region, x = in_regions(kind()), tokens(2, 4)
    region(x)
    gone = ref(x)
    del x
    assert gone() is None


def test_op_by_op_on_request(runs):
    region, x = recorded(Block(), tokens()), tokens()
    del runs[:]
    with no_regions():
        region(x)
    assert not runs
    region(x)
    assert runs == [False]


# -- on a GPU ----------------------------------------------------------------------------------------------------------


class Bottlenecks(nn.Module):
    """Convolutions over channels of 64 values, as in a hybrid network."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Bottleneck(), Bottleneck()

    def forward(self, x):
        return self.second(self.first(x.unflatten(2, (8, 8)))).flatten(2)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("training", [True, False])
def test_recorded_kernels(training, autocast, dtype, runs, deterministic):
    """Kernels of CUDA C++ and of Triton do in a region what they do op by op."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(64), Block(64, p=0.2), Bottlenecks()).to("cuda", dtype).train(training)
    region = fastlayers.patch_model(model)
    alone = copy.deepcopy(region)
    x = torch.randn(4, 8, 64, device="cuda", dtype=dtype, requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        for _ in range(3):
            with no_regions():
                expected = outcome(alone, x)
            for a, b in zip(outcome(region, x), expected, strict=True):
                assert torch.equal(a, b)
    assert runs.count(False) == 2 * runs.count(True) > 0


@needs_gpu
def test_captured_in_a_cuda_graph(runs):
    torch.manual_seed(0)
    model = fastlayers.patch_model(nn.Sequential(Block(64), Block(64)).cuda())
    x = torch.randn(2, 8, 64, device="cuda", requires_grad=True)
    wanted = [x, *model.parameters()]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            expected = torch.autograd.grad(model(x).square().sum(), wanted)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.autograd.grad(model(x).square().sum(), wanted)
    graph.replay()
    for a, b in zip(captured, expected, strict=True):
        assert torch.equal(a, b)
    assert runs.count(False) > 2


@needs_gpu
def test_captured_before_it_is_recorded(runs):
    """A capture is no place to record: the forward runs op by op then."""
    model = fastlayers.patch_model(nn.Sequential(Block(64)).cuda()).eval()
    x = torch.randn(2, 8, 64, device="cuda")
    with torch.no_grad(), no_regions():
        expected = model(x)  # what has to be loaded or compiled
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = model(x)
    graph.replay()
    assert torch.equal(captured, expected)
    assert not runs


FIRST_RECORDING = """
import gc
import torch
import fastlayers
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 64), nn.Linear(64, 4)

    def forward(self, x):
        return self.second(self.first(x).sin().cos())

model = fastlayers.patch_model(Net())
gc.collect()
gc.disable()
for _ in range(2):
    model(torch.randn(8, 4)).sum().backward()
print(sum(isinstance(t, torch.Tensor) and t.shape == (8, 64) for t in gc.get_objects()))
"""


@pytest.mark.slow  # and not one for each executor
def test_the_first_recording_of_a_process_leaves_no_garbage(tmp_path):
    """What torch imports for it left the frames of its callers in a cycle, and with them tensors."""
    script = tmp_path / "script.py"
    script.write_text(FIRST_RECORDING)
    found = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert found.stdout == "0\n"


class Waves(nn.Module):
    """No rule has anything for it."""

    def __init__(self):
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.randn(8, 8)), nn.Identity()

    def forward(self, x):
        return self.last(torch.sin(x @ self.weight).cos() @ self.weight)


def test_which_modules_become_regions(monkeypatch):
    def is_region(module):
        return hasattr(type(module), "__fastlayers_region__")

    with pytest.warns(PatchWarning, match="no rule fuses anything in Sequential"):
        alone = fastlayers.patch_model(nn.Sequential(Waves(), nn.Identity()))
    assert is_region(alone)
    waves = nn.Sequential(*(Waves() for _ in range(8)))
    size = len([*waves.modules()])
    for most in ("MAX_MODULES", "MAX_WHOLE"):
        monkeypatch.setattr(plan, most, size)
    large = nn.Sequential(waves, Block(8))
    fastlayers.patch_model(model := nn.Sequential(large))
    assert [*map(is_region, (model, large, waves, waves[0], large[1]))] == [False, False, True, True, True]
    for limit in (size, size - 1):
        monkeypatch.setattr(plan, "MAX_WHOLE", limit)
        whole = nn.Sequential(nn.LayerNorm(8), *(Waves() for _ in range(7)), nn.Identity())
        assert len([*whole.modules()]) == size
        assert is_region(fastlayers.patch_model(whole)) is (limit == size)
        inner = fastlayers.patch_model(nn.Sequential(nn.LayerNorm(8), nn.Sequential(whole, Listed(whole))))[1]
        assert [*map(is_region, inner)] == [limit == size, True]  # A list of modules does not count.
    inner = fastlayers.patch_model(nn.Sequential(nn.LayerNorm(8), nn.Sequential(whole, Listed([*whole, Waves()]))))[1]
    assert [*map(is_region, inner)] == [False, False]
    monkeypatch.setattr(plan, "MAX_MODULES", size_of(inner[1]))
    inner = fastlayers.patch_model(nn.Sequential(nn.LayerNorm(8), nn.Sequential(whole, Listed([*whole, Waves()]))))[1]
    assert [*map(is_region, inner)] == [False, True]


class Listed(nn.Module):
    """Calls layers one after the other, as a Sequential does, and does something itself."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_a_whole_model_that_is_a_region_in_inference_alone(runs, monkeypatch):
    """Its gradients would all come at the end of its backward."""
    torch.manual_seed(0)
    stock = Listed([Waves() for _ in range(4)])
    monkeypatch.setattr(plan, "MAX_WHOLE", size_of(stock) - 1)
    model = fastlayers.patch_model(copy.deepcopy(stock))
    root, x = type(model).__fastlayers_region__, tokens(2, 3, 8)
    for _ in range(3):
        with torch.no_grad():
            torch.testing.assert_close(model(x), stock(x))
        same(stock, model, x)
    assert [entry.facts.wanted for entries in root.entries.values() for entry in entries] == [0]
    assert runs.count(False) > 2  # Its layers are regions in training.


def test_a_region_of_too_many_operations_is_left_to_smaller_ones(monkeypatch):
    torch.manual_seed(0)
    stock = nn.Sequential(Block(8), Block(8))
    model = fastlayers.patch_model(copy.deepcopy(stock))
    regions_made = [type(each).__fastlayers_region__ for each in (model, model[0])]
    x = tokens(2, 3, 8)
    monkeypatch.setattr(regions, "MOST", 150)
    monkeypatch.setattr(regions, "FEW_MODULES", 12)
    for _ in range(3):
        torch.testing.assert_close(model(x), stock(x))
    found = [[entry.refusal for several in region.entries.values() for entry in several] for region in regions_made]
    assert [bool(refusal) for (refusal,) in found] == [True, False]


def test_a_sequential_is_tried_where_another_one_was_too_small():
    """Both are of one class, and have nothing else in common."""
    torch.manual_seed(0)
    small, large = nn.Sequential(nn.Identity(), nn.Identity()), nn.Sequential(*(Waves() for _ in range(3)))
    model = fastlayers.patch_model(nn.Sequential(nn.LayerNorm(8), Apart(small), Apart(small), Apart(large)))
    for _ in range(8):
        model(tokens(2, 3, 8)).sum().backward()
    region = type(large).__fastlayers_region__
    assert region is not type(small).__fastlayers_region__
    assert any(entry.refusal is None for several in region.entries.values() for entry in several)


class Apart(nn.Module):
    """No region, since it depends on values."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) if bool(x.isfinite().all()) else x


# -- modes that look at operations, and hooks on what is saved ---------------------------------------------------------


@pytest.mark.parametrize("make", [Block, FlashBlock])
def test_a_flop_counter_counts_as_without_a_region(make, runs):
    """A forward runs op by op under the mode, the backward of a region is seen as it runs."""
    block = make()
    region, x = in_regions(block), tokens()
    counts = []
    for module in (block, region, region):
        with FlopCounterMode(display=False) as counter:
            module(x).sum().backward()
        out = module(x)
        with FlopCounterMode(display=False) as backward:
            out.sum().backward()
        counts.append((counter.get_total_flops(), backward.get_total_flops()))
    assert runs == [True, False]
    assert counts[0][0] > counts[0][1] > 0
    assert counts[1:] == [counts[0]] * 2


def test_activations_may_be_offloaded(runs):
    block = Block()
    region, x = in_regions(block), tokens()
    found = []
    for module in (block, region, region):
        kept: list[torch.Tensor] = []

        def pack(t, kept=kept):
            kept.append(t)
            return t.detach().clone()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = module(x)
        first = torch.autograd.grad(out.sin().sum(), [x, *module.parameters()])
        with torch.autograd.graph.save_on_cpu():
            out = module(x)
        second = torch.autograd.grad(out.sin().sum(), [x, *module.parameters()])
        assert kept
        found.append((*first, *second))
    assert runs == [True, *[False] * 4]  # Under hooks a call that is recorded is a region, too.
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, found[0], strict=True))

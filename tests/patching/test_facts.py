"""The table of facts: each guard is needed. With it a patched model is right after a change, and without it wrong."""

from __future__ import annotations

import copy
import pkgutil
import sys
import types
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fastlayers
from fastlayers.graphs import module as graphs
from fastlayers.graphs.state import State
from fastlayers.patching.facts import FACTS
from fastlayers.patching.libraries import heads
from fastlayers.patching.regions import region as regions
from fastlayers.patching.regions.entries import no_regions
from fastlayers.patching.rewrite.classes import Generated, swapped_forward
from fastlayers.patching.runtime.checks import rewritten_everywhere
from tests.patching.regions.guarded import Body, Middle, helper, made
from tests.patching.test_replaced import RMSNorm

pytestmark = pytest.mark.cpu_kernels

HERE = sys.modules[__name__]
SCALE = 2.0


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 3 if func is torch.rsqrt else out


class DispatchMode(TorchDispatchMode):
    seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        DispatchMode.seen += 1
        return func(*args, **(kwargs or {}))


class WithNorm(Body):
    def __init__(self):
        super().__init__()
        self.rms = RMSNorm(16)


class Tied(Body):
    def __init__(self):
        super().__init__()
        self.tied = nn.Linear(16, 16)
        self.tied.weight = self.up.weight


@contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def dual_level():
    return nullcontext() if forward_ad._current_level >= 0 else forward_ad.dual_level()


class Other(nn.Parameter):
    pass


class Tripled(nn.Linear):
    def forward(self, x):
        return 3 * super().forward(x)


def tripled(x, *args, **options):
    return x * 3


def own_class(m):
    return next(cls for cls in type(m).__mro__ if cls.__name__ == "Made")


def call(self, *args):
    return self.forward(*args) * 3


GELU = "F.gelu(x)"
#: By the words of a fact: the result of a forward, attributes, a change (it may be a context manager), and the second
#: argument of the calls before it and after it.
SCENARIOS = {
    "shapes": (GELU + " * rest[0].shape[0]", {}, lambda m: m.up.weight.requires_grad_(False), (2, 3)),
    "which of": (
        "self.tied(F.gelu(x))", {"base": Tied}, lambda m: setattr(m.tied, "weight", nn.Parameter(torch.ones(16, 16))),
    ),
    "attributes": (GELU + " * self.n", {"n": 2.5}, lambda m: vars(m).update(n=9.0)),
    "1, 1.0": (GELU + " * (9 if self.n is True else 2)", {"n": True}, lambda m: vars(m).update(n=1)),
    "0.0": (GELU + " / self.n", {"n": 0.0}, lambda m: vars(m).update(n=-0.0)),
    "hooks on": (GELU, {}, lambda m: m.up.register_forward_hook(lambda m, args, out: out * 3)),
    "on all": (
        GELU, {}, lambda m: nn.modules.module.register_module_forward_hook(
            lambda m, args, out: out * 3 if isinstance(m, nn.LayerNorm | nn.Linear) else None
        ),
    ),
    "a `forward`": (GELU, {}, lambda m: vars(m.up).update(forward=tripled)),
    "the class": (GELU, {}, lambda m: setattr(m.up, "__class__", Tripled)),
    "a replaced method": (
        "self.middle(F.gelu(x))", {"base": Middle}, lambda m: vars(m).update(middle=tripled),
    ),
    "a global": (GELU + " * SCALE", {}, lambda m: patch.dict(own_class(m).forward.__globals__, SCALE=9.0)),
    "the code": ("helper(F.gelu(x))", {}, lambda m: patch.object(helper, "__defaults__", (9.0,))),
    "a function": (GELU, {}, lambda m: patch.object(torch, "layer_norm", tripled)),
    "a method": (GELU + ".mul(2)", {}, lambda m: patch.object(torch.Tensor, "mul", lambda x, y: x + 9, create=True)),
    "`nn.Module": (GELU, {}, lambda m: patch.object(nn.Module, "__call__", call)),
    "a replaced `forward`": (GELU, {}, lambda m: patch.object(nn.Linear, "forward", lambda self, x: x * 3)),
    "an attribute": (GELU, {}, lambda m: vars(m).update(act=tripled)),
    "autocast": (
        GELU + " * (9 if torch.are_deterministic_algorithms_enabled() else 2)", {}, lambda m: deterministic(),
    ),
    "the attentions": (
        "F.scaled_dot_product_attention(*3 * [F.gelu(x)[None, None]])", {}, lambda m: sdpa_kernel(SDPBackend.MATH),
    ),
    "switches": (GELU, {}, lambda m: torch.backends.cudnn.flags(enabled=False)),
    "modes of": (GELU, {}, lambda m: DispatchMode()),
    "of `__torch": ("self.rms(F.gelu(x))", {"base": WithNorm}, lambda m: FunctionMode()),
    "transforms": (GELU, {}, lambda m: dual_level()),
}  # fmt: skip
#: Of a part whose change is another one.
OTHERS = {
    ("1, 1.0", "graph"): (GELU, {"n": 1.0}, lambda m: vars(m).update(n=1)),
    ("1, 1.0", "rule"): (
        GELU + " * (9 if isinstance(self.n, float) else 2)", {"n": 1}, lambda m: vars(m).update(n=1.0),
    ),
    ("which of", "graph"): (GELU, {}, lambda m: setattr(m.up.weight, "data", torch.ones(16, 16))),
    ("shapes", "head"): (GELU, {}, lambda m: setattr(m, "weight", Other(torch.ones(16, 16)))),
    ("`nn.Module", "head"): (GELU, {}, lambda m: patch.object(nn.Linear, "_call_impl", call, create=True)),
    ("a function", "rule"): (
        "self.rms(F.gelu(x))", {"base": WithNorm}, lambda m: patch.object(torch, "rsqrt", tripled),
    ),
    ("a method", "rule"): (
        GELU + ".mul(x)", {}, lambda m: patch.object(torch.Tensor, "mul", lambda x, y: x + 9, create=True),
    ),
    ("a function", "head"): (GELU, {}, lambda m: patch.object(F, "linear", tripled)),
    ("the class", "head"): (GELU, {}, lambda m: setattr(m, "__class__", Tripled)),
    ("hooks on", "head"): (GELU, {}, lambda m: m.register_forward_hook(tripled)),
    ("a `forward`", "head"): (GELU, {}, lambda m: vars(m).update(forward=tripled)),
    ("an attribute", "region"): (
        "self.up(F.gelu(x))", {}, lambda m: vars(m.up).update(weight=torch.ones(16, 16)),
    ),
}  # fmt: skip


def scenario(fact, part):
    words = max((words for words in SCENARIOS if fact.what.startswith(words)), key=len)
    return OTHERS.get((words, part), SCENARIOS[words])


def remove(guards, monkeypatch):
    """Replace guards by ones that always hold, wherever they were imported."""
    for place, holds in guards.items():
        module, _, names = place.partition(":")
        *path, name = names.split(".")
        owner = pkgutil.resolve_name(f"fastlayers.{module}:{'.'.join(path)}" if path else f"fastlayers.{module}")
        guard = getattr(owner, name)
        if isinstance(guard, type):
            instead = lambda *args, holds=holds, **options: types.SimpleNamespace(check=lambda *args: holds)  # noqa: E731
        elif callable(guard):
            instead = lambda *args, holds=holds, **options: holds  # noqa: E731
            instead.__name__ = name
        else:
            instead = holds
        monkeypatch.setattr(owner, name, instead)
        for other in [m for key, m in sys.modules.items() if key.startswith("fastlayers.")]:
            if vars(other).get(name) is guard:
                monkeypatch.setattr(other, name, instead)


@pytest.fixture(autouse=True)
def _everything_is_made_again(monkeypatch):
    for kind in regions.LEAST:
        monkeypatch.setitem(regions.LEAST, kind, (1, 1))
    monkeypatch.setattr(Generated, "in_use", {})
    monkeypatch.setattr(Generated, "functions", {})
    swapped_forward.cache_clear()
    yield
    swapped_forward.cache_clear()


def results(m, size):
    """The output and the gradients of a call; with forward-mode derivatives, the tangent."""
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(3)).requires_grad_()
    m.zero_grad()
    DispatchMode.seen = 0
    if forward_ad._current_level >= 0:
        return [
            forward_ad.unpack_dual(m(forward_ad.make_dual(x.detach(), torch.ones(4, 16)), torch.ones(size))).tangent
        ]
    out = m(x, torch.ones(size))
    out.float().square().sum().backward()
    return [out.detach(), torch.tensor(DispatchMode.seen), x.grad, *(p.grad for p in m.parameters())]


def is_right(stock, patched, size):
    expected = results(stock, size)
    try:
        found = [results(patched, size) for _ in range(3)][-1]
        torch.testing.assert_close(found, expected, equal_nan=True)
    except Exception:  # An error that stock torch does not raise is wrong, too.
        return False
    return "attention" not in type(stock).__doc__ or torch.equal(found[0], expected[0])


def changed(change, *modules):
    """A context with a change of each module."""
    stack = ExitStack()
    for m in modules:
        made = change(m)
        if hasattr(made, "remove"):
            stack.callback(made.remove)
        elif hasattr(made, "__enter__"):
            stack.enter_context(made)
    return stack


def sees_change(fact, part):
    """Whether what relies on a fact is right before and after a change of it."""
    result, attributes, change, *sizes = scenario(fact, part)
    torch.manual_seed(0)
    if part == "head":
        layer, hidden = nn.Linear(16, 16), torch.ones(4, 16)
        assert heads.find(layer, hidden)
        with changed(change, layer):
            return heads.find(layer, hidden) is None
    stock = made(result, **attributes)
    if part == "graph":
        state = State(stock, torch.device("cpu"))
        assert state.holds()
        with changed(change, stock):
            return not state.holds() or bool(graphs.other_modes())
    before, after = sizes[0] if sizes else (2, 2)
    patched = fastlayers.patch_model(copy.deepcopy(stock))
    type(stock).__doc__ = result
    with rewritten_everywhere(part == "rule"), no_regions() if part == "rule" else nullcontext():
        assert is_right(stock, patched, before)
        with changed(change, stock, patched):
            return is_right(stock, patched, after)


@pytest.mark.parametrize("part", ["region", "graph", "rule", "head"])
@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.what)
def test_a_guard_is_needed_and_enough(fact, part, monkeypatch):
    guards = getattr(fact, part)
    if guards is None:
        assert fact.reason or part == "head"
        return
    assert sees_change(fact, part)
    remove(guards, monkeypatch)
    swapped_forward.cache_clear()
    assert not sees_change(fact, part)


def test_the_page_has_every_fact():
    page = " ".join(Path(fastlayers.__file__).parents[1].joinpath("docs/guarantees.md").read_text().split())
    assert not [fact.what for fact in FACTS if fact.what not in page]

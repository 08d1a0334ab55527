"""What is put around modules of a patched model: wrappers of a forward, replaced classes and calls."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastlayers


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Classes of every maker: a swapped norm, a rewritten MLP, regions."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp, self.act = nn.LayerNorm(8), MLP(), nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def forward(self, x):
        return self.act(x + self.mlp(self.norm(x)))


def closure(forward):
    return lambda *args, **kwargs: forward(*args, **kwargs)


def wrapping(forward):
    @functools.wraps(forward)
    def inner(*args, **kwargs):
        return forward(*args, **kwargs)

    return inner


@pytest.mark.parametrize("name", ["norm", "mlp", "act", ""])
@pytest.mark.parametrize("wrap", [closure, functools.partial, wrapping])
def test_a_wrapper_outlives_unpatch_model(wrap, name):
    """It calls the forward that the module has then, as a wrapper of a method of a stock module does."""
    stock, x = Block(), torch.randn(4, 8)
    model = fastlayers.patch_model(copy.deepcopy(stock))
    module = model.get_submodule(name)
    calls = []

    def counted(forward):
        return wrap(lambda *args: calls.append(name) or forward(*args))

    module.forward = counted(module.forward)
    for _ in range(3):
        torch.testing.assert_close(model(x), stock(x))
    fastlayers.unpatch_model(model)
    assert not any("__fastlayers_original__" in vars(type(each)) for each in model.modules())
    torch.testing.assert_close(model(x), stock(x))
    assert calls == [name] * 4
    del module.forward
    torch.testing.assert_close(model(x), stock(x))
    fastlayers.patch_model(model)
    torch.testing.assert_close(model(x), stock(x))
    assert calls == [name] * 4


@pytest.mark.parametrize("when", ["before patching", "before the first call", "later"])
@pytest.mark.parametrize("name", ["__call__", "_call_impl"])
def test_whoever_replaces_the_call_of_modules_sees_all_calls(name, when, monkeypatch):
    stock, x, seen, factor = Block(), torch.randn(4, 8), [], [1.0]
    call = getattr(nn.Module, name)

    def traced(self, *args, **kwargs):
        seen.append(type(self).__name__)
        return call(self, *args, **kwargs) * factor[0]

    def replace():
        monkeypatch.setattr(nn.Module, name, traced)

    if when == "before patching":
        replace()
    model = fastlayers.patch_model(copy.deepcopy(stock))
    if when == "before the first call":
        replace()
    for _ in range(4):
        model(x).sum().backward()
    if when == "later":
        replace()
    for value in (1.0, 2.0, 3.0):
        factor[0] = value
        found = []
        for each in (stock, model):
            seen.clear()
            found.append((each(x), len(seen)))
        assert found[0][1] == found[1][1] > 1
        torch.testing.assert_close(found[1][0], found[0][0])

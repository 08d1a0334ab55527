"""Regions of layers that are given a cache of keys and values."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastlayers
from fastlayers.patching.capture.caches import Slot
from fastlayers.patching.libraries.adapters import Adapter, register_adapter
from fastlayers.patching.program.program import plain_name
from fastlayers.patching.regions import sizes
from tests.patching.regions.blocks import leaves

pytestmark = [pytest.mark.cpu_kernels, pytest.mark.usefixtures("from_the_first_call", "any_size", "executor")]


class Held:
    """What a cache holds for a layer: it is made by the first call."""

    def __init__(self):
        self.keys, self.calls = None, 0

    def update(self, k):
        self.keys = torch.cat([torch.tensor([], dtype=k.dtype) if self.keys is None else self.keys, k], 1)
        self.calls += k.shape[1]
        return self.keys


class Written(Held):
    """Keys that are written in place."""

    def __init__(self, keys):
        super().__init__()
        self.keys, self.place = keys, torch.zeros((), dtype=torch.long)

    def update(self, k):
        self.keys.index_copy_(1, self.place + torch.arange(k.shape[1]), k)
        self.place.add_(k.shape[1])
        return self.keys


class Window(Held):
    """The last keys of many."""

    def update(self, k):
        every = k if self.keys is None else torch.cat([self.keys, k], 1)
        self.keys, self.calls = every[:, -7:], self.calls + k.shape[1]
        return every


class Cache:
    def __init__(self, *layers):
        self.layers, self.offloads = list(layers), False

    def update(self, k, number):
        return self.layers[number].update(k)


class Layer(nn.Module):
    def __init__(self, number=0):
        super().__init__()
        self.layer_idx, self.norm = number, nn.LayerNorm(8)
        self.q, self.k, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, cache=None):
        h = self.norm(x)
        q, k = self.q(h), self.k(h)
        if cache is not None:
            k = cache.update(k, self.layer_idx)
        return x + self.out(F.softmax(q @ k.transpose(1, 2), -1) @ k)


class Caches(Adapter):
    def slot(self, cache, number):
        if type(cache) is not Cache:
            return None
        layer = cache.layers[number]
        counts = ["calls"] if type(layer.calls) is int else []
        return Slot(cache, layer, grows=layer.keys is not None and type(layer) is not Written, counts=counts)


@pytest.fixture(autouse=True)
def adapter():
    with register_adapter("torch", Caches):
        yield


def both(make=lambda: nn.ModuleList([Layer(0), Layer(1)])):
    stock = make().double()
    return stock, fastlayers.patch_model(copy.deepcopy(stock))


def run(model, x, cache):
    for layer in model:
        x = layer(x, cache)
    return x


def grads(out, model):
    return torch.autograd.grad(out, [*model.parameters()], allow_unused=True)


def assert_same(found):
    assert len(leaves(found[0])) > 0
    torch.testing.assert_close(leaves(found[1]), leaves(found[0]))


def test_what_a_cache_keeps_is_there_and_layers_share_a_recording(runs):
    models, x = both(), torch.randn(2, 3, 8, dtype=torch.double, requires_grad=True)
    for _ in range(2):
        caches = [Cache(Held(), Held()) for _ in models]
        found = [run(model, x, cache) for model, cache in zip(models, caches, strict=True)]
        assert_same([[out, *(held.keys for held in cache.layers)] for out, cache in zip(found, caches, strict=True)])
        assert [held.calls for held in caches[1].layers] == [3, 3]
        assert_same([grads(out.sum(), model) for out, model in zip(found, models, strict=True)])
    assert runs == [True, False, False, False]
    (entry,) = type(models[1][0]).__fastlayers_region__.made()
    (cat,) = (o for o in entry.program.forward if o.function is torch.ops.aten.cat.default)
    assert len(cat.operands) == 1  # Kernels take no operand of another number of dimensions.


@pytest.mark.parametrize("result", [True, False])
@pytest.mark.parametrize("create_graph", [True, False])
def test_a_gradient_through_what_a_cache_keeps(result, create_graph):
    models, found = both(), []
    for model in models:
        for seed in range(2):
            x = torch.randn(2, 3, 8, dtype=torch.double, generator=torch.Generator().manual_seed(seed)).requires_grad_()
            cache = Cache(Held(), Held())
            out = run(model, x, cache)
            loss = sum(held.keys.square().sum() for held in cache.layers) + (out.square().sum() if result else 0)
            wanted = [x, *model.parameters()]
            dx = torch.autograd.grad(loss, wanted, allow_unused=True, create_graph=create_graph)
        found.append(dx)
        if create_graph:
            found[-1] += grads(dx[0].square().sum(), model)
    assert [t is None for t in found[0]] == [t is None for t in found[1]]
    assert_same([[t for t in each if t is not None] for each in found])


def test_a_cache_that_is_written_in_place(runs):
    models, found = both(lambda: nn.ModuleList([Layer(0)])), []
    for model in models:
        cache = Cache(Written(torch.zeros(2, 8, 8, dtype=torch.double)))
        with torch.no_grad():
            found.append([run(model, torch.full((2, 2, 8), i, dtype=torch.double), cache) for i in range(1, 4)])
            before = cache.layers[0].keys._version
            run(model, torch.ones(2, 2, 8, dtype=torch.double), cache)
        found[-1] += cache.layers[0].keys, cache.layers[0].place
        assert cache.layers[0].keys._version == before + 1
    assert_same(found)
    assert runs == [True, False, False, False]


def entries(model):
    region = type(model[0]).__fastlayers_region__
    return [sum(map(len, several.values())) for several in (region.entries, region.many_sizes.entries)]


@pytest.mark.parametrize(("kind", "programs"), [(Held, 1), (Window, 2)])
@pytest.mark.parametrize("count", [1, 3])
def test_tokens_have_one_program(kind, programs, count):
    """A window has another one from when it is full."""
    models = both()
    for _ in range(2):
        caches, x = [Cache(kind(), kind()) for _ in models], torch.randn(count, 3, 8, dtype=torch.double)
        with torch.no_grad():
            for length in (3, *[1] * 12):
                found = [
                    run(model, x[:, :length].contiguous(), cache) for model, cache in zip(models, caches, strict=True)
                ]
                kept = [[held.keys for held in cache.layers] for cache in caches]
                assert_same([[out, *held] for out, held in zip(found, kept, strict=True)])
                assert [t.stride() for t in kept[0]] == [t.stride() for t in kept[1]]
        assert [held.calls for held in caches[1].layers] == [15, 15]
    assert entries(models[1]) == [1, programs]


def test_a_cache_that_grows_runs_op_by_op_where_there_is_no_such_program(runs, monkeypatch):
    """A recording for each size would never pay."""
    monkeypatch.setattr(sizes, "TRIES", 0)
    _, model = both()
    with torch.no_grad():
        for _ in range(2):
            cache, x = Cache(Held(), Held()), torch.randn(2, 3, 8, dtype=torch.double)
            run(model, x, cache)
            for _ in range(3):
                run(model, x[:, :1], cache)
    assert runs == [True, False, False, False]


class Own(Layer):
    """Layers whose forwards do more with a cache, or with the number."""

    def forward(self, x, cache=None, what=""):
        if what == "number":
            x = x * (self.layer_idx + 1)
        elif what == "other layer":
            cache.layers[1].calls += 1
        elif what == "cache":
            cache.offloads = not cache.offloads
        elif what == "count":
            x = x * len(cache.layers)
        return super().forward(x, cache)


@pytest.mark.parametrize("what", ["number", "other layer", "cache", "count"])
def test_more_than_a_region_can_repeat(what, runs):
    models, x = both(lambda: nn.ModuleList([Own(0)])), torch.randn(2, 3, 8, dtype=torch.double)
    for _ in range(3):
        caches = [Cache(Held(), Held()) for _ in models]
        assert_same([model[0](x, cache, what) for model, cache in zip(models, caches, strict=True)])
        assert_same([[torch.tensor([held.calls for held in cache.layers] + [cache.offloads])] for cache in caches])
    assert runs == []


def test_a_number_that_is_computed_with_where_there_is_no_cache(runs):
    models, x = both(lambda: nn.ModuleList([Own(0)])), torch.randn(2, 3, 8, dtype=torch.double)
    models[1][0](x, Cache(Held()))
    for _ in range(2):
        assert_same([[model[0](x, None, "number")] for model in models])
    assert runs[-2:] == [True, False]


def test_a_number_that_is_none(runs):
    models, x = both(lambda: nn.ModuleList([Layer(0)])), torch.randn(2, 3, 8, dtype=torch.double)
    for model in models:
        model[0].norm.layer_idx = [0]
    assert_same([[model[0](x, Cache(Held()))] for model in models])
    assert runs == []


def change_update(monkeypatch, model, cache):
    monkeypatch.setattr(Held, "update", lambda self, k: 2 * k)


def change_number(monkeypatch, model, cache):
    model[1].layer_idx = 0


def change_attribute(monkeypatch, model, cache):
    cache.layers[1].calls = 0.0


@pytest.mark.parametrize("change", [change_update, change_number, change_attribute])
def test_a_change_of_the_cache(change, monkeypatch):
    models, x = both(), torch.randn(2, 3, 8, dtype=torch.double)
    for _ in range(2):
        for model in models:
            run(model, x, Cache(Held(), Held()))
    caches, found = [Cache(Held(), Held()) for _ in models], []
    for model, cache in zip(models, caches, strict=True):
        with monkeypatch.context() as patch:
            change(patch, model, cache)
            found.append(run(model, x, cache))
    assert_same(found)
    for a, b in zip(caches[0].layers, caches[1].layers, strict=True):
        assert (a.keys is None) == (b.keys is None)
        assert (a.calls, type(a.calls)) == (b.calls, type(b.calls))


def test_an_attention_is_chosen_once():
    """In inference mode torch gives it to a recording as a whole, which would choose in each call."""

    class Attends(Layer):
        def forward(self, x, cache=None):
            q = self.q(self.norm(x))[:, None]
            return x + self.out(F.scaled_dot_product_attention(q, q, q)[:, 0])

    models, x = both(lambda: nn.ModuleList([Attends()])), torch.randn(2, 3, 8, dtype=torch.double)
    with torch.inference_mode():
        for _ in range(2):
            assert_same([[model[0](x)] for model in models])
    (entry,) = type(models[1][0]).__fastlayers_region__.made()
    names = [plain_name(operation.function) for operation in entry.program.forward]
    assert "scaled_dot_product_attention" not in names
    assert any("attention" in name for name in names)

"""Folded layers are never stale: what changes after folding is seen, also by regions."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastlayers import graph_model, graph_report
from fastlayers.graphs import module as graphs
from fastlayers.patching import (
    Reason,
    fold_batch_norm,
    patch_model,
    patch_report,
    patched,
    plan_fold,
    plan_patch,
    unfold_batch_norm,
    unpatch_model,
)
from fastlayers.patching.regions import region as regions
from fastlayers.patching.regions.demand import CALLS
from fastlayers.patching.regions.entries import no_regions
from fastlayers.patching.runtime import folded_layers
from tests.harness import assert_no_worse, needs_gpu
from tests.patching.runtime.folding import Block, features, image, infer, state, warmed

CHANGES = {
    "weight": lambda net: net.block.conv1.weight.mul_(2),
    "bias": lambda net: net.block.conv2.bias.add_(1),
    "gain": lambda net: net.block.bn1.weight.mul_(-1),
    "shift": lambda net: net.block.bn1.bias.add_(1),
    "mean": lambda net: net.block.bn2.running_mean.add_(1),
    "variance": lambda net: net.block.bn2.running_var.mul_(3),
    "eps": lambda net: setattr(net.block.bn1, "eps", 0.5),
    "new weight": lambda net: setattr(net.block.conv1, "weight", nn.Parameter(torch.randn(6, 4, 3, 3))),
    "data": lambda net: setattr(net.block.conv1.weight, "data", torch.randn(6, 4, 3, 3)),
    "no bias": lambda net: setattr(net.block.conv2, "bias", None),
    "state dict": lambda net: net.load_state_dict({k: v * 2 for k, v in net.state_dict().items()}),
    "dtype": lambda net: net.half().float(),
    "there and back": lambda net: net.double() and net.float(),
    "statistics": lambda net: net.block.bn1.reset_running_stats(),
    "another norm": lambda net: setattr(net.block, "bn1", nn.BatchNorm2d(6).eval()),
    "another layer": lambda net: setattr(net.block, "conv1", nn.Conv2d(4, 6, 3, padding=1)),
    "another kind": lambda net: setattr(net.block, "bn1", nn.GroupNorm(2, 6)),
    "no norm": lambda net: setattr(net.block, "bn1", nn.Identity()),
    "a hook": lambda net: net.block.conv1.register_forward_hook(lambda module, args, out: out * 2),
    "no statistics": lambda net: net.block.bn1.__dict__["_buffers"].update(running_mean=None, running_var=None),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("patch", [False, True])
def test_weights_are_never_stale(net, change, patch):
    if patch:
        patch_model(net)
    fold_batch_norm(net)
    for _ in range(CALLS + 1):
        infer(net, image())
    assert bool(regions_of(net)) is patch
    with torch.no_grad():
        CHANGES[change](net)
        torch.manual_seed(0)
    plain = unpatch_model(copy.deepcopy(net))
    for _ in range(CALLS + 1):
        assert_no_worse(infer(net, image()), infer, plain, image())


def regions_of(net):
    """The code of the regions with folded weights."""
    region = getattr(type(net), "__fastlayers_region__", None)
    found = region.entries.items() if region else ()
    return [e.code for key, several in found for e in several if e.code and key[0].folds]


@pytest.mark.parametrize("autocast", [False, True])
def test_a_region_uses_folded_weights(net, autocast):
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        fold_batch_norm(patch_model(net))
        with no_regions():
            expected = infer(net, image())
        for _ in range(CALLS + 1):
            actual = infer(net, image())
    assert regions_of(net)
    assert torch.equal(actual, expected)


@needs_gpu
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_graph_follows_the_parameters(net, mode, monkeypatch):
    monkeypatch.setattr(graphs, "LEAST", 1)
    x = image().cuda()
    folded = graph_model(fold_batch_norm(patch_model(copy.deepcopy(net).cuda())))
    for _ in range(2):
        with mode():
            for _ in range(6):
                actual = folded(x)
        torch.testing.assert_close(actual, infer(net.cuda(), x), rtol=1e-3, atol=1e-3)
        for model in (net, folded):
            with torch.no_grad():
                model.block.conv1.weight.mul_(2)
    (row,) = graph_report(folded).captured
    assert row.replays == 9


ORDERS = [(patch_model, fold_batch_norm), (fold_batch_norm, patch_model)]


@pytest.fixture
def block(net, any_size):
    """A block with norms of its own to fold, on which no region of a larger module lies."""
    return net.block


@pytest.mark.parametrize("steps", ORDERS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_folded_block_runs_as_a_region(block, steps, mode):
    stock, x = copy.deepcopy(block), features()
    for step in steps:
        step(block)
    assert repr(block).startswith("FoldedBlock(")
    with mode():
        with no_regions():
            expected = block(x)
        for _ in range(CALLS + 1):
            assert torch.equal(block(x), expected)
        (code,) = regions_of(block)
        torch.testing.assert_close(expected, stock(x))
        with torch.profiler.profile() as run:
            block(x)
    assert "aten::batch_norm" not in {event.name for event in run.events()}
    assert regions_of(block) == [code]


@pytest.mark.parametrize("steps", ORDERS)
@pytest.mark.parametrize("undo", [unfold_batch_norm, unpatch_model])
def test_a_folded_block_with_a_region_is_undone(block, steps, undo):
    stock, plain = infer(block, features()), {name: kind for name, (_, kind) in state(block).items()}
    if steps[0] is patch_model:
        patch_model(block)
    kind, unfolded = type(block), infer(block, features())
    for step in steps:
        step(block)
    for _ in range(CALLS + 1):
        expected = infer(block, features())
    copied, loaded = copy.deepcopy(block), pickle.loads(pickle.dumps(block))
    assert regions_of(block)
    assert torch.equal(infer(copied, features()), expected)
    assert {name: kind for name, (_, kind) in state(loaded).items()} == plain
    for model in (block, copied):
        undo(model)
        if undo is unfold_batch_norm:
            assert type(model) is kind
            assert torch.equal(infer(model, features()), unfolded)
        unpatch_model(unfold_batch_norm(model))
        assert {name: kind for name, (_, kind) in state(model).items()} == plain
        assert torch.equal(infer(model, features()), stock)


def test_a_folded_block_that_is_patched_for_a_while_stays_folded(block):
    before = state(fold_batch_norm(block))
    with patched(block):
        assert type(block).__fastlayers_region__
    assert state(block) == before
    plan_patch(block, example_inputs=features())
    assert state(block) == before


def test_a_report_on_a_folded_region(block):
    patch_model(fold_batch_norm(block))
    assert type(block).__fastlayers_region__
    for report in (plan_fold(block), patch_report(block)):
        assert (report[""].became, report[""].fused) == ("FoldedBlock", (("fold_batch_norm", 2),))
        assert report[""].left == ((Reason.FOLDED, ""),)


BLOCK_CHANGES = {
    "weight": lambda block: block.conv1.weight.mul_(2),
    "mean": lambda block: block.bn2.running_mean.add_(1),
    "new weight": lambda block: setattr(block.conv1, "weight", nn.Parameter(block.conv1.weight * 2)),
    "data": lambda block: setattr(block.conv1.weight, "data", block.conv1.weight.data * 2),
    "no bias": lambda block: setattr(block.conv2, "bias", None),
    "eps": lambda block: setattr(block.bn1, "eps", 0.5),
    "another activation": lambda block: setattr(block, "relu", nn.Tanh()),
    "a hook": lambda block: block.conv1.register_forward_hook(lambda module, args, out: out * 2),
    "a hook of its own": lambda block: block.register_forward_hook(lambda module, args, out: out * 2),
    "a forward": lambda block: setattr(block.bn1, "forward", lambda x: x * 3),
    "training": lambda block: block.train(),
    "one in training": lambda block: block.bn2.train(),
    "dtype": lambda block: block.double(),
}


@pytest.mark.parametrize("change", BLOCK_CHANGES)
@pytest.mark.parametrize("steps", ORDERS)
def test_a_folded_region_sees_what_changes(block, steps, change):
    stock = copy.deepcopy(block)
    for step in steps:
        step(block)
    x = features()
    for _ in range(CALLS + 1):
        infer(block, x)
    assert regions_of(block)
    with torch.no_grad():
        for model in (block, stock):
            BLOCK_CHANGES[change](model)
    x = x.to(block.conv1.weight.dtype)

    def answer(block, x):
        return infer(block, x), block.bn2.running_mean

    for _ in range(CALLS + 2):
        assert_no_worse(answer(block, x), answer, stock, x)
    assert_no_worse(infer(block.eval(), x), infer, stock.eval(), x)


@pytest.mark.parametrize("steps", ORDERS)
def test_a_folded_region_trains_as_the_block(block, steps):
    stock = copy.deepcopy(block)
    for step in steps:
        step(block)
    for _ in range(CALLS + 1):
        infer(block, features())
        for model in (block, stock):
            model.train()(features()).square().mean().backward()
            model.eval()(features()).square().mean().backward()
        assert_no_worse(infer(block, features()), infer, stock, features())
    torch.testing.assert_close([p.grad for p in block.parameters()], [p.grad for p in stock.parameters()])


@pytest.mark.usefixtures("any_size")
def test_a_layer_that_a_folded_region_also_calls_alone():
    """Its weight has to be an input of the region, else no region is made."""

    class Twice(Block):
        def forward(self, x):
            x = self.relu(self.bn1(self.conv1(x)))
            return self.conv2(self.relu(self.bn2(self.conv2(x))).repeat(1, 2, 1, 1)[:, :6])

    model = warmed(Twice(), features())
    folded = fold_batch_norm(patch_model(copy.deepcopy(model)))
    for scale in (1, 2, 3):
        for _ in range(CALLS + 1):
            assert_no_worse(infer(folded, features()), infer, model, features())
        for other in (model, folded):
            other.conv2.weight = nn.Parameter(other.conv2.weight * scale)


def test_a_guard_asks_once_for_a_pair(block, monkeypatch):
    """Folding looks the parameters of a pair up; a region takes no others of them."""
    fold_batch_norm(patch_model(block))
    for _ in range(CALLS + 1):
        infer(block, features())
    (reader,) = [reader for reader, *_ in type(block).__fastlayers_region__.entries if reader.folds]
    asked, sources = [], folded_layers.sources
    monkeypatch.setattr(folded_layers, "sources", lambda *pair: (asked.append(pair), sources(*pair))[1])
    with torch.no_grad():
        _, tensors = reader.read(block)
    assert len(asked) == 2
    assert len(tensors) == 4


class OneOrder(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.bn1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.b, self.bn2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)

    def forward(self, x):
        return F.relu(self.bn2(self.b(F.relu(self.bn1(self.a(x)))))) + x


class OtherOrder(OneOrder):
    def forward(self, x):
        return F.relu(self.bn2(self.a(F.relu(self.bn1(self.b(x)))))) + x


@pytest.mark.usefixtures("any_size")
def test_norms_that_follow_other_layers_elsewhere(monkeypatch):
    """The guard of the first Sequential is asked about the second one. It must not fold its norms into other layers."""
    net = warmed(nn.Sequential(nn.Sequential(OneOrder()), nn.Sequential(OtherOrder())), torch.randn(2, 8, 6, 6))
    expected = infer(net, torch.ones(2, 8, 6, 6))
    for most in ("MAX_MODULES", "MAX_WHOLE"):
        monkeypatch.setattr(f"fastlayers.patching.plan.{most}", 6)
    fold_batch_norm(patch_model(net))
    for _ in range(CALLS + 1):
        torch.testing.assert_close(infer(net, torch.ones(2, 8, 6, 6)), expected)
    monkeypatch.setattr(folded_layers, "fold", None)  # Each pair was folded once.
    infer(net, torch.ones(2, 8, 6, 6))


def test_a_region_of_a_folded_model_in_training(net):
    """It runs on the weights of the layers, not on those that were folded for inference."""
    fold_batch_norm(patch_model(net))
    infer(net, image())
    for _ in range(CALLS + 1):
        net(image()).sum().backward()
    entries = type(net).__fastlayers_region__.entries.values()
    assert any(entry.facts.wanted for several in entries for entry in several)
    assert not regions_of(net)
    for _ in range(CALLS):
        infer(net, image())
    assert regions_of(net)


def test_folded_norms_count_as_operations():
    """A region pays for the calls that it saves, and a norm was one of them."""
    layers = [layer for _ in range(2) for layer in (nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU())]
    net = warmed(nn.Sequential(nn.Sequential(*layers)), image())
    fold_batch_norm(patch_model(net))
    for _ in range(CALLS + 1):
        infer(net, image())
    execute = regions.executor_class()
    assert bool(regions_of(net)) is (regions.LEAST[execute][1] <= 6)


def test_a_region_with_frozen_folded_weights_is_differentiated_twice(net):
    other = fold_batch_norm(patch_model(copy.deepcopy(net).requires_grad_(False)))

    def derivatives(model, x):
        (dx,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return dx, *torch.autograd.grad(dx.square().sum(), x)

    for _ in range(CALLS + 2):
        x = image().requires_grad_()
        assert_no_worse(derivatives(other, x), derivatives, net, x)
    assert regions_of(other)


def test_a_region_with_folded_weights_is_differentiated_twice_after_a_change(block):
    """The forward runs again for it, on the parameters that the first one saw."""
    patch_model(fold_batch_norm(block.requires_grad_(False)))
    found = []
    for change in (*[False] * (CALLS + 1), True):
        x = features().requires_grad_()
        y = block(x)
        if change:
            block.conv1.weight = nn.Parameter(block.conv1.weight * 2, requires_grad=False)
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(dx.square().sum(), x)[0])
    assert regions_of(block)
    torch.testing.assert_close(found[-1], found[-2])

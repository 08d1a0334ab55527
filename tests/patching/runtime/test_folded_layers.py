"""fold_batch_norm: equal in eval, never stale, never in the way of training, and undone exactly."""

from __future__ import annotations

import copy
import gc
import pickle
import types
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations, weight_norm

from fastlayers import graph_model, graph_report
from fastlayers.graphs import module as graphs
from fastlayers.ops.activations import BY_CODE
from fastlayers.patching import (
    PatchError,
    PatchWarning,
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
from fastlayers.patching.regions.entries import no_regions
from fastlayers.patching.regions.region import CALLS
from fastlayers.patching.runtime import convolution, folded_layers
from tests.harness import assert_no_worse, needs_gpu


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = nn.Conv2d(6, 4, 1), nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        return self.relu(out)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.block = Block()
        self.head = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))

    def forward(self, x):
        return self.head(self.block(self.stem(x)).mean((2, 3)))


def image():
    torch.manual_seed(3)
    return torch.randn(4, 3, 6, 5)


def warmed(model, *inputs):
    """In eval, with statistics, weights and offsets that a fold has to get right."""
    torch.manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine:
            nn.init.uniform_(module.weight, 0.5, 2)
            nn.init.normal_(module.bias)
    with torch.no_grad():
        for _ in range(3):
            model.train()(*inputs)
    return model.eval()


@pytest.fixture
def net():
    torch.manual_seed(0)
    return warmed(Net(), image() * 3 + 1)


def infer(model, *inputs):
    with torch.no_grad():
        return model(*inputs)


def state(model):
    return {name: (dict(vars(module)), type(module)) for name, module in model.named_modules()}


def norms_of(model, *inputs):
    """How many BatchNorms an inference computes."""
    with no_regions(), torch.profiler.profile() as profile:
        infer(model, *inputs)
    return sum(event.key == "aten::batch_norm" for event in profile.events())


@pytest.mark.parametrize("patch", [False, True])
def test_equal_and_undone_exactly(net, patch):
    expected, keys = infer(net, image()), list(net.state_dict())
    assert norms_of(net, image()) == 4
    if patch:
        patch_model(net)
    before, unfolded = state(net), infer(net, image())
    assert plan_fold(net).counts()["fold_batch_norm"] == 4
    assert state(net) == before
    assert fold_batch_norm(net) is net
    assert [row.fqn for row in plan_fold(net).patched] == ["stem", "block", "head"]
    assert list(net.state_dict()) == keys
    assert repr(net.block).startswith("FoldedBlock(")
    assert isinstance(net.block, Block)
    torch.testing.assert_close(infer(net, image()), expected)
    assert norms_of(net, image()) == 0
    fold_batch_norm(net)  # twice changes nothing
    assert unfold_batch_norm(net) is net
    assert state(net) == before
    assert torch.equal(infer(net, image()), unfolded)
    unfold_batch_norm(net)


def test_with_patches_both_ways(net):
    expected = infer(net, image())
    fold_batch_norm(patch_model(net))
    assert dict(plan_fold(net)["block"].fused) == {"fold_batch_norm": 2}  # what follows is part of it
    torch.testing.assert_close(infer(net, image()), expected)
    unpatch_model(net)
    assert type(net.block) is Block
    fold_batch_norm(net)
    assert plan_patch(net)["block"].left == ((Reason.FOLDED, ""),)
    patch_model(net)
    assert repr(net.block).startswith("FoldedBlock(")
    unfold_batch_norm(net)
    assert type(net.block) is Block


LAYERS = [
    (lambda: nn.Conv1d(4, 6, 3, groups=2), nn.BatchNorm1d(6), (2, 4, 9)),
    (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(6, affine=False), (2, 4, 9, 8)),
    (lambda: nn.Conv2d(4, 8, 3, padding=1, groups=4), nn.BatchNorm2d(8, eps=0.1), (2, 4, 9, 8)),
    (lambda: nn.Conv2d(4, 8, 3, padding="same", padding_mode="reflect"), nn.BatchNorm2d(8), (2, 4, 9, 8)),
    (lambda: nn.Conv3d(4, 6, 2), nn.BatchNorm3d(6), (2, 4, 4, 5, 3)),
    (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2), nn.BatchNorm1d(6), (2, 4, 5)),
    (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, groups=2), nn.BatchNorm2d(6), (2, 4, 5, 4)),
    (lambda: nn.ConvTranspose3d(4, 6, 2, groups=2, bias=False), nn.BatchNorm3d(6), (2, 4, 3, 4, 5)),
    (lambda: nn.Linear(4, 6), nn.BatchNorm1d(6), (5, 4)),
    (lambda: nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), (5, 4)),
]


@pytest.mark.parametrize(("make", "norm", "shape"), LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_layer(make, norm, shape, dtype):
    torch.manual_seed(0)
    x = torch.randn(shape)
    model = warmed(nn.Sequential(make(), copy.deepcopy(norm)), x).to(dtype)
    x = x.to(dtype)
    folded = fold_batch_norm(copy.deepcopy(model), strict=True)
    actual = infer(folded, x)
    expected = assert_no_worse(actual, infer, model, x)
    assert actual.stride() == expected.stride()


def test_a_sequence_to_a_linear_layer():
    """BatchNorm1d takes the middle dimension for the channels, whatever Linear made the last one of."""
    x = torch.randn(3, 6, 4)
    model = warmed(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)), x)
    expected = infer(model, x)
    assert torch.equal(infer(fold_batch_norm(model), x), expected)


def test_without_a_batch_it_raises_as_before():
    model = fold_batch_norm(warmed(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), image()))
    with pytest.raises(ValueError, match="expected 4D"):
        infer(model, image()[0])


# -- what changes afterwards -------------------------------------------------------------------------------------------

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
def block(net, monkeypatch):
    """A block with norms of its own to fold, on which no region of a larger module lies."""
    monkeypatch.setattr(regions, "LEAST", dict.fromkeys(regions.LEAST, (1, 1)))
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
    for (name, a), b in zip(block.named_parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=name)


def test_a_layer_that_a_folded_region_also_calls_alone(monkeypatch):
    """Its weight has to be an input of the region, else no region is made."""
    monkeypatch.setattr(regions, "LEAST", dict.fromkeys(regions.LEAST, (1, 1)))

    class Twice(Block):
        def forward(self, x):
            x = self.relu(self.bn1(self.conv1(x)))
            return self.conv2(self.relu(self.bn2(self.conv2(x))).repeat(1, 2, 1, 1)[:, :6])

    torch.manual_seed(0)
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


def test_norms_that_follow_other_layers_elsewhere(monkeypatch):
    """The guard of the first Sequential is asked about the second one. It must not fold its norms into other layers."""
    monkeypatch.setattr(regions, "LEAST", dict.fromkeys(regions.LEAST, (1, 1)))
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
    torch.manual_seed(0)
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


@pytest.mark.parametrize("patch", [False, True])
def test_training_a_folded_model_is_training_the_model(net, patch):
    if patch:
        patch_model(net)
    folded = fold_batch_norm(copy.deepcopy(net))
    infer(folded, image())
    for model in (net, folded):
        optimizer = torch.optim.SGD(model.train().parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            model(image()).square().mean().backward()
            optimizer.step()
    for (name, a), (_, b) in zip(net.state_dict().items(), folded.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    assert_no_worse(infer(folded.eval(), image()), infer, net.eval(), image())


def test_statistics_that_a_forward_in_training_writes(net):
    """F.batch_norm does not tell the buffers it writes; nor is there a count to go by where momentum was 0."""
    fold_batch_norm(net)
    infer(net, image())
    infer(net.train(), image() * 5)
    torch.testing.assert_close(infer(net.eval(), image()), infer(unfold_batch_norm(copy.deepcopy(net)), image()))


def test_gradients_in_eval_are_those_of_the_parameters(net):
    folded = fold_batch_norm(copy.deepcopy(net))
    for model in (net, folded):
        model(image()).square().sum().backward()
    for (name, a), b in zip(net.named_parameters(), folded.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name
    frozen = folded.requires_grad_(False)
    x, y = image().requires_grad_(), image().requires_grad_()
    frozen(x).sum().backward()  # of the input, through the folded weights
    net(y).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_one_norm_in_training(net):
    """Others of the block may be frozen: what is folded is decided where all of it is in eval."""
    fold_batch_norm(net)
    net.block.bn1.train()
    other = unfold_batch_norm(copy.deepcopy(net))
    assert torch.equal(infer(net.block, torch.ones(2, 4, 3, 3)), infer(other.block, torch.ones(2, 4, 3, 3)))
    assert torch.equal(net.block.bn1.running_mean, other.block.bn1.running_mean)


def test_inference_mode_and_autocast(net):
    plain = copy.deepcopy(net)
    fold_batch_norm(net)
    with torch.inference_mode():
        first = net(image())
    torch.testing.assert_close(infer(net, image()), first)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert_no_worse(net(image()), infer, plain, image())
    with torch.inference_mode():
        born = fold_batch_norm(warmed(Net(), image()))
        torch.testing.assert_close(born(image()), unfold_batch_norm(copy.deepcopy(born))(image()))


@pytest.mark.parametrize("patch", [False, True])
def test_compile_and_export(net, patch):
    expected = infer(net, image())
    if patch:
        patch_model(net)
    fold_batch_norm(net.requires_grad_(False))
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    torch.testing.assert_close(infer(compiled, image()), expected)
    with torch.no_grad():
        exported = torch.export.export(net, (image(),)).module()
        torch.testing.assert_close(exported(image()), expected)


def test_compile_in_training(net):
    fold_batch_norm(net)
    infer(net, image())
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    infer(net.train() and compiled, image() * 5)
    torch.testing.assert_close(infer(net.eval(), image()), infer(unfold_batch_norm(copy.deepcopy(net)), image()))


def test_functional_call_and_vmap(net):
    fold_batch_norm(net)
    expected = infer(net, image())
    doubled = {name: p.detach() * 2 for name, p in net.named_parameters()}
    unfolded = unfold_batch_norm(copy.deepcopy(net))
    with torch.no_grad():
        actual = torch.func.functional_call(net, doubled, (image(),))
        assert_no_worse(actual, torch.func.functional_call, unfolded, doubled, image())
        stacked = torch.vmap(net)(image().unsqueeze(1))
    torch.testing.assert_close(stacked[:, 0], expected)
    torch.testing.assert_close(infer(net, image()), expected)


def test_copies_and_pickles(net):
    fold_batch_norm(patch_model(net))
    expected = infer(net, image())
    copied = copy.deepcopy(net)
    assert type(copied.block) is type(net.block)
    with torch.no_grad():
        copied.block.conv1.weight.zero_()
    assert torch.equal(infer(net, image()), expected)
    assert not torch.allclose(infer(copied, image()), expected)
    for protocol in (2, pickle.HIGHEST_PROTOCOL):
        loaded = pickle.loads(pickle.dumps(net, protocol))
        assert type(loaded.block) is Block
        torch.testing.assert_close(infer(loaded, image()), expected)
    assert repr(unfold_batch_norm(copied).block).startswith("FusedBlock(")


def test_memory_is_given_back():
    net = fold_batch_norm(Net().eval())
    infer(net, image())
    assert len([norm for norm in net.modules() if norm in folded_layers._folded]) == 4
    unfold_batch_norm(net)
    assert not [norm for norm in net.modules() if norm in folded_layers._folded]
    fold_batch_norm(net)
    infer(net, image())
    kept = weakref.ref(net.block.bn1)
    del net
    gc.collect()
    assert kept() is None


def test_shared_layers_are_right_too():
    """Nothing is overwritten, so one convolution may fold into several norms."""

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.a, self.b = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.BatchNorm2d(3)

        def forward(self, x):
            return self.b(self.conv(self.a(self.conv(x))))

    model = warmed(Shared(), image())
    expected = infer(model, image())
    assert plan_fold(model).counts() == {"fold_batch_norm": 2}
    torch.testing.assert_close(infer(fold_batch_norm(model), image()), expected)


# -- a norm with an activation of its own ------------------------------------------------------------------------------


class NormAct(nn.BatchNorm2d):
    """As timm's BatchNormAct2d."""

    def __init__(self, channels, act=None, **options):
        super().__init__(channels, **options)
        self.drop, self.act = nn.Identity(), act or nn.ReLU(inplace=True)

    def forward(self, x):
        torch._assert(x.ndim == 4, f"expected 4D input (got {x.ndim}D input)")
        average = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                average = 1.0 / float(self.num_batches_tracked)
        x = F.batch_norm(
            x,
            self.running_mean if not self.training or self.track_running_stats else None,
            self.running_var if not self.training or self.track_running_stats else None,
            self.weight,
            self.bias,
            self.training or (self.running_mean is None and self.running_var is None),
            average,
            self.eps,
        )
        return self.act(self.drop(x))


class ActNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, padding=1, bias=False), NormAct(4, nn.SiLU(inplace=True))
        self.block = nn.Sequential(nn.Conv2d(4, 4, 1), NormAct(4, nn.Identity(), eps=0.1, affine=False))

    def forward(self, x):
        x = self.bn1(self.conv1(x))
        out = self.block[1](self.block[0](x))
        out += x
        return F.relu(out)


@pytest.fixture
def act_net():
    torch.manual_seed(0)
    return warmed(ActNet(), image() * 3 + 1)


@pytest.mark.parametrize("steps", [[fold_batch_norm], [patch_model, fold_batch_norm], [fold_batch_norm, patch_model]])
def test_a_norm_with_an_activation(act_net, steps):
    plain, expected = copy.deepcopy(act_net), infer(act_net, image())
    assert plan_fold(act_net).counts()["fold_batch_norm"] == 3  # of the block in the Sequential, and in its parent
    for step in steps:
        step(act_net)
    torch.testing.assert_close(infer(act_net, image()), expected)
    assert (norms_of(act_net, image()), norms_of(plain, image())) == (0, 2)
    seen = []
    act_net.bn1.act.register_forward_hook(lambda module, args, out: seen.append(out.mean()))
    torch.testing.assert_close(infer(act_net, image()), expected)
    assert len(seen) == 1
    act_net.bn1.act = plain.bn1.act = nn.Tanh()
    torch.testing.assert_close(infer(act_net, image()), infer(plain, image()))
    act_net.bn1.eps = plain.bn1.eps = 0.5
    torch.testing.assert_close(infer(act_net, image()), infer(plain, image()))
    for model in (act_net, plain):
        model.train()(image()).square().mean().backward()
    torch.testing.assert_close(act_net.state_dict(), plain.state_dict())
    torch.testing.assert_close(act_net.conv1.weight.grad, plain.conv1.weight.grad)
    torch.testing.assert_close(infer(act_net.eval(), image()), infer(plain.eval(), image()))
    for model in (act_net, plain):
        with pytest.raises(AssertionError, match="expected 4D"):
            infer(model, image()[0])
    unpatch_model(act_net)
    assert [type(module) for module in act_net.modules()] == [type(module) for module in plain.modules()]


class Scaled(NormAct):
    def forward(self, x):
        return super().forward(x * 2)


class OtherEps(NormAct):
    def forward(self, x):
        return self.act(F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.1, 1e-2))


class OtherWeight(NormAct):
    def forward(self, x):
        return self.act(
            F.batch_norm(x, self.running_mean, self.running_var, self.bias, self.weight, False, 0.1, self.eps)
        )


class OfItsBatch(NormAct):
    def forward(self, x):
        return self.act(
            F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, True, 0.0, self.eps)
        )


class UsedAgain(NormAct):
    def forward(self, x):
        y = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.1, self.eps)
        return self.act(y) * y


class AboutSizes(NormAct):
    def forward(self, x):
        torch._assert(x.shape[-1] == 3, "three columns")
        return self.act(
            F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.1, self.eps)
        )


@pytest.mark.parametrize("norm", [Scaled, OtherEps, OtherWeight, OfItsBatch, UsedAgain, AboutSizes])
def test_norms_that_do_something_else(norm):
    assert not plan_fold(pair(norm=norm(4))).patched


# -- what is left alone ------------------------------------------------------------------------------------------------


class UsedTwice(Block):
    def forward(self, x):
        out = self.conv1(x)
        return self.bn1(out) + out


def pair(conv=None, norm=None):
    return nn.Sequential(conv or nn.Conv2d(3, 4, 3), norm or nn.BatchNorm2d(4)).eval()


def hooked():
    model = pair()
    model[0].register_forward_hook(lambda *args: None)
    return model


class Own(nn.Conv2d):
    def forward(self, x):
        return super().forward(x) * 2


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: pair().train(), Reason.TRAINING),
        (lambda: pair(norm=nn.BatchNorm2d(4, track_running_stats=False)), Reason.NO_STATISTICS),
        (hooked, Reason.HOOKED_CHILD),
        (lambda: UsedTwice().eval(), Reason.USED_ELSEWHERE),
        (lambda: pair(conv=parametrizations.weight_norm(nn.Conv2d(3, 4, 3))), Reason.PARAMETRIZED),
        (lambda: pair(conv=weight_norm(nn.Conv2d(3, 4, 3))), Reason.HOOKED_CHILD),
        (lambda: pair(conv=Own(3, 4, 3)), Reason.SUBCLASS),
        (lambda: pair(norm=nn.BatchNorm3d(4)), Reason.SUBCLASS),
        (lambda: pair(norm=NormAct(4)).train(), Reason.TRAINING),
        (lambda: pair(conv=Own(3, 4, 3), norm=NormAct(4)), Reason.SUBCLASS),
        (lambda: pair(norm=nn.SyncBatchNorm(4)), Reason.NOTHING_TO_FUSE),
        (lambda: pair(norm=nn.GroupNorm(2, 4)), Reason.NOTHING_TO_FUSE),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.BatchNorm2d(4)).eval(), Reason.NOTHING_TO_FUSE),
        (lambda: nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3)).eval(), Reason.NOTHING_TO_FUSE),
    ],
)
def test_what_is_left_alone_and_why(make, reason):
    model = make()
    row = plan_fold(model)[""]
    assert row.became is None
    assert reason in (row.reason, *(why for why, _ in row.left))
    before = state(model)
    with pytest.warns(PatchWarning, match="nothing in .* was folded"):
        fold_batch_norm(model)
    assert state(model) == before
    with pytest.raises(PatchError, match="nothing was changed"):
        fold_batch_norm(model, strict=True)


def test_selection(net):
    fold_batch_norm(net, include="block")
    assert [row.fqn for row in plan_fold(net).patched if "Folded" in repr(net.get_submodule(row.fqn))] == ["block"]
    unfold_batch_norm(net)
    assert plan_fold(net, exclude="block.bn1").counts() == {"fold_batch_norm": 3}
    with pytest.raises(TypeError, match="Module"):
        fold_batch_norm("net")
    with pytest.raises(TypeError, match="Module"):
        unfold_batch_norm("net")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fold_batch_norm(net, strict=True)


# -- what follows a folded convolution ---------------------------------------------------------------------------------


class QuickGELU(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


class Bottleneck(nn.Module):
    """As timm's, with a shortcut of its own where ``strided``."""

    def __init__(self, strided):
        super().__init__()
        self.conv1, self.bn1, self.act1 = nn.Conv2d(4, 6, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU(inplace=True)
        self.drop_block = nn.Identity()
        self.conv2, self.bn2 = nn.Conv2d(6, 4, 3, padding=1, stride=1 + strided), nn.BatchNorm2d(4)
        self.act2 = nn.ReLU(inplace=True)
        layers = (nn.AvgPool2d(2, ceil_mode=True), nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4))
        self.downsample = nn.Sequential(*layers) if strided else None

    def forward(self, x):
        shortcut = x
        x = self.act1(self.drop_block(self.bn1(self.conv1(x))))
        x = self.bn2(self.conv2(x))
        if self.downsample is not None:
            shortcut = self.downsample(shortcut)
        x += shortcut
        return self.act2(x)


class TwoBranches(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.bn1 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.pointwise, self.bn2 = nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4)

    def forward(self, x):
        return F.silu(self.bn1(self.dense(x)) + self.bn2(self.pointwise(x)))


class Shortcut(nn.Module):
    """The sum is written to what is not normalised, or is of another shape."""

    def __init__(self, side):
        super().__init__()
        self.conv, self.bn, self.side = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, side, padding=side // 2)

    def forward(self, x):
        shortcut = self.side(x)
        shortcut += self.bn(self.conv(x))
        return F.gelu(shortcut)


class Between(nn.Module):
    """Something that fastlayers does not know runs between the convolution and the sum."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.side = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), QuickGELU()

    def forward(self, x):
        y = self.bn(self.conv(x * 2))
        return F.relu(y + self.side(x))


class Broadcast(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x):
        return F.hardswish(self.bn(self.conv(x)) + x.mean((2, 3), keepdim=True))


#: With how often a kernel adds a bias; of one convolution none follows that could.
FOLLOWED = [
    (lambda: Bottleneck(False), 2),
    (lambda: Bottleneck(True), 2),
    (TwoBranches, 1),
    (lambda: Shortcut(3), 1),
    (Between, 1),
    (Broadcast, 1),
    (lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.LeakyReLU(0.01)), 1),
    (lambda: nn.Sequential(nn.Conv2d(4, 6, 3), NormAct(6, nn.SiLU(inplace=True))), 1),
    (lambda: nn.Sequential(nn.Conv2d(4, 6, 3), NormAct(6, nn.Softplus())), 1),
    (lambda: nn.Sequential(nn.ConvTranspose2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU6()), 1),
    (lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.Identity(), QuickGELU()), 1),
]


def features(dtype=torch.float32, channels_last=True):
    torch.manual_seed(5)
    x = torch.randn(3, 4, 8, 7).to(dtype)
    return x.to(memory_format=torch.channels_last) if channels_last else x


@pytest.fixture
def kernel(monkeypatch, op_by_op):
    """The path of a GPU, its kernel in torch's operators; what it was called with."""
    calls = []

    def channel_bias_act_(x, bias, residual, act):
        calls.append((x, residual, act))
        assert residual is None or (residual.dtype, residual.stride()) == (x.dtype, x.stride())
        z = x.float() + bias.view(-1, *[1] * (x.dim() - 2)) + (0 if residual is None else residual)
        x.copy_(BY_CODE[act].function(z))

    def adds_bias(layer, x, weight, bias):
        return bias is not None and not isinstance(layer, nn.Linear) and not torch.is_grad_enabled()

    kernels = types.SimpleNamespace(channel_bias_act_=channel_bias_act_)
    monkeypatch.setattr(convolution, "FAMILY", types.SimpleNamespace(kernels_for=lambda x: kernels))
    for module in (convolution, folded_layers):
        monkeypatch.setattr(module, "adds_bias", adds_bias)
    return calls


@pytest.mark.parametrize(("make", "count"), FOLLOWED)
@pytest.mark.parametrize("patch", [False, True])
def test_what_follows_is_part_of_it(make, count, patch):
    torch.manual_seed(0)
    model = warmed(make(), features())
    expected, before = infer(model, features()), features()
    if patch:
        patch_model(model)
    fold_batch_norm(model, strict=False)
    x = features()
    actual = infer(model, x)
    torch.testing.assert_close(actual, expected)
    assert actual.stride() == expected.stride()
    assert torch.equal(x, before)


@pytest.mark.parametrize(("make", "count"), FOLLOWED)
@pytest.mark.parametrize("channels_last", [False, True])
def test_the_kernel_adds_bias_residual_and_activation(make, count, channels_last, kernel):
    torch.manual_seed(0)
    x = features(channels_last=channels_last)
    model = warmed(make(), x)
    expected = infer(model, x)
    fold_batch_norm(model)
    torch.testing.assert_close(infer(model, x), expected)
    assert len(kernel) == count
    with torch.enable_grad():  # of the input
        y = model.requires_grad_(False)(x.requires_grad_())
    assert len(kernel) == count
    torch.testing.assert_close(y, expected)
    y.sum().backward()


def test_a_shortcut_of_its_own(kernel):
    """Its convolution comes without its bias, which is added with the other's."""
    model = warmed(Bottleneck(True), features())
    plain = copy.deepcopy(model)
    expected = infer(plain, features())
    fold_batch_norm(model)
    assert "folded_sum" in type(model).__fastlayers_source__
    infer(model, features())
    assert [(residual is not None, act) for _, residual, act in kernel] == [(False, 1), (True, 1)]
    seen = []
    handle = model.downsample[1].register_forward_hook(lambda module, args, out: seen.append(out))
    torch.testing.assert_close(infer(model, features()), expected)
    assert len(seen) == 1
    handle.remove()
    for other in (model, plain):
        torch.manual_seed(2)
        other.downsample[1] = nn.Conv2d(4, 4, 3, padding=1)
    torch.testing.assert_close(infer(model, features()), infer(plain, features()))
    for other in (model, plain):
        other.downsample.append(nn.Tanh())
    torch.testing.assert_close(infer(model, features()), infer(plain, features()))


def test_a_stranger_between_convolution_and_sum(kernel):
    infer(fold_batch_norm(warmed(Between(), features())), features())
    assert [(residual is not None, act) for _, residual, act in kernel] == [(True, 1)]


def test_an_activation_with_a_hook_or_another_one(kernel):
    model = warmed(nn.Sequential(nn.Conv2d(4, 6, 3), NormAct(6, nn.SiLU(inplace=True))), features())
    plain = copy.deepcopy(model)
    fold_batch_norm(model)
    seen = []
    handle = model[1].act.register_forward_hook(lambda module, args, out: seen.append(out))
    assert_no_worse(infer(model, features()), infer, plain, features())
    assert len(seen) == 1
    handle.remove()
    model[1].act = plain[1].act = nn.Tanh()
    assert_no_worse(infer(model, features()), infer, plain, features())
    model[1].act.forward = plain[1].act.forward = torch.exp
    assert_no_worse(infer(model, features()), infer, plain, features())


@pytest.mark.parametrize(("make", "norm", "shape"), LAYERS)
def test_weights_are_cast_once_under_autocast(make, norm, shape):
    """Autocast would cast a folded weight in every call: it keeps the casts of leaves that want a gradient alone."""
    torch.manual_seed(0)
    x = torch.randn(shape)
    model = warmed(nn.Sequential(make(), copy.deepcopy(norm)), x)
    fold_batch_norm(model)
    unfolded = unfold_batch_norm(copy.deepcopy(model))
    with torch.autocast("cpu", torch.bfloat16):
        first, again = infer(model, x), infer(model, x)
        assert_no_worse(first, lambda model, x: infer(model, x).bfloat16(), unfolded, x)
    assert torch.equal(first, again)
    (kept,) = [folded_layers._folded[module] for module in model.modules() if module in folded_layers._folded]
    assert {dtype: weight.dtype for dtype, (weight, _) in kept.weights.items()} == {torch.bfloat16: torch.bfloat16}
    assert infer(model, x).dtype == torch.float32
    assert set(kept.weights) == {torch.float32, torch.bfloat16}


@pytest.mark.gpu
@pytest.mark.parametrize(("make", "count"), FOLLOWED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("autocast", [False, True])
def test_on_a_gpu(make, count, dtype, autocast):
    torch.manual_seed(0)
    for channels_last in (False, True):
        x = features(torch.float64, channels_last).cuda()
        model = warmed(make().double().cuda(), x)
        exact = infer(model, x)
        model, x = model.to(torch.float32 if autocast else dtype), x.to(torch.float32 if autocast else dtype)
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast), torch.backends.cudnn.flags(allow_tf32=False):
            stock = infer(model, x)
            ours = infer(fold_batch_norm(model), x)
        assert (ours.dtype, ours.stride()) == (stock.dtype, stock.stride())
        allowed = 1.5 * (stock - exact).abs().max() + 4 * torch.finfo(stock.dtype).eps * exact.abs().max()
        assert (ours - exact).abs().max() <= allowed


# -- convolutions with a bias of their own, in a patched model ---------------------------------------------------------


class ConvNeXt(nn.Module):
    """As timm's block, with a stem of patches before it."""

    def __init__(self):
        super().__init__()
        self.stem, self.conv_dw = nn.Conv2d(4, 6, 2, stride=2), nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.reduce, self.expand = nn.Conv2d(6, 2, 1), nn.Conv2d(2, 6, 1)
        self.act = nn.SiLU(inplace=True)

    def forward(self, x):
        x = self.conv_dw(self.stem(x))
        return x * self.expand(self.act(self.reduce(x))).sigmoid()


BIASED = [
    (ConvNeXt, 3, [0, 0, 2]),
    (lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU(inplace=True)), 1, [1]),
    (lambda: nn.Sequential(nn.Conv2d(4, 6, 3, padding="same", padding_mode="circular"), nn.GELU()), 1, [3]),
    (lambda: nn.Sequential(nn.Conv2d(4, 6, 3), QuickGELU()), 0, []),
    (lambda: nn.Sequential(nn.Conv2d(4, 6, 3, bias=False), nn.ReLU()), 0, []),
    (lambda: nn.Sequential(nn.Conv2d(4, 6, 1), nn.Conv2d(6, 4, 3)), 0, []),
    (lambda: nn.Sequential(parametrizations.weight_norm(nn.Conv2d(4, 6, 3)), nn.ReLU()), 0, []),
]


@pytest.mark.parametrize(("make", "count", "acts"), BIASED)
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_bias_of_its_own(make, count, acts, channels_last, kernel):
    torch.manual_seed(0)
    x, model = features(channels_last=channels_last), make()
    plain = copy.deepcopy(model)
    assert plan_patch(model).counts().get("conv_bias", 0) == count
    if count:
        patch_model(model)
    expected = infer(plain, x)
    actual = infer(model, x)
    torch.testing.assert_close(actual, expected)
    assert actual.stride() == expected.stride()
    assert [act for _, _, act in kernel] == acts
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for other, leaf in zip((plain, model), inputs, strict=True):
        other(leaf).square().sum().backward()
    assert len(kernel) == len(acts)  # it has no backward
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_a_bias_that_is_taken_away_or_of_another_dtype(kernel):
    model = patch_model(nn.Sequential(nn.Conv2d(4, 6, 3), nn.SiLU()))
    plain = unpatch_model(copy.deepcopy(model))
    for other in (model, plain):
        other[0].bias = None
    with torch.backends.mkldnn.flags(enabled=False):  # its SiLU rounds otherwise
        assert torch.equal(infer(model, features()), infer(plain, features()))
    torch.testing.assert_close(infer(model, features()[0]), infer(plain, features()[0]))  # without a batch
    assert not kernel


@pytest.mark.gpu
@pytest.mark.parametrize(("make", "count", "acts"), BIASED[:3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_bias_of_its_own_on_a_gpu(make, count, acts, dtype, autocast):
    torch.manual_seed(0)
    for channels_last in (False, True):
        x, model = features(torch.float64, channels_last).cuda(), make().double().cuda()
        exact = infer(model, x)
        model, x = model.to(torch.float32 if autocast else dtype), x.to(torch.float32 if autocast else dtype)
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast), torch.backends.cudnn.flags(allow_tf32=False):
            stock = infer(model, x)
            ours = infer(patch_model(model), x)
            misfit = infer(model, x[0])
        assert (ours.dtype, ours.stride()) == (stock.dtype, stock.stride())
        assert misfit.shape == stock.shape[1:]
        allowed = 1.5 * (stock - exact).abs().max() + 4 * torch.finfo(stock.dtype).eps * exact.abs().max()
        assert (ours - exact).abs().max() <= allowed


def test_weights_that_fsdp_gathers_are_not_kept(tmp_path, monkeypatch):
    """They change without a version counter that shows it, and, as here, at the same address."""
    monkeypatch.setattr(folded_layers, "states", lambda given: [])
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        torch.manual_seed(0)
        stock = nn.Sequential(Block(), Block()).eval()
        model, x = fold_batch_norm(copy.deepcopy(stock)), torch.randn(2, 4, 6, 6)
        infer(model, x)
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for _ in range(3):
            with torch.no_grad():
                assert_no_worse(model(x), infer, stock, x)
                for p in (*model.parameters(), *stock.parameters()):
                    p.mul_(1.5)
        assert all(folded_layers.folded_layer(block.bn1) is None for block in model)
    finally:
        dist.destroy_process_group()

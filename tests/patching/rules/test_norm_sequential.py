"""Convolutions, norms and activations in nn.Sequential."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict

import pytest
import torch
from torch import nn

from fastlayers.patching import Reason, fold_batch_norm, patch_model, plan_patch, unpatch_model
from tests.patching.harness import fused, same
from tests.patching.rules.test_norm import image


class ConvNormAct(nn.Sequential):
    """As torchvision's: without a forward of its own."""

    def __init__(self, act):
        super().__init__(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), act)


@pytest.mark.parametrize("act", [nn.ReLU(inplace=True), nn.Hardswish(), nn.SiLU(), nn.GELU()])
@pytest.mark.parametrize(
    "make",
    [
        lambda act: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), act),
        lambda act: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Identity(), act, nn.Conv2d(4, 4, 1)),
        ConvNormAct,
    ],
)
def test_sequential(make, act):
    model = make(act)
    keys, children = list(model.state_dict()), list(model._modules)
    assert len(fused(model)) == 1
    same(model, image())
    patch_model(model)
    assert list(model.state_dict()) == keys
    assert list(model._modules) == children
    assert model[1] is model._modules["1"]
    assert isinstance(model, nn.Sequential)
    assert len(model) == len(children)
    loaded = pickle.loads(pickle.dumps(model))
    assert type(loaded).__name__ == ("ConvNormAct" if make is ConvNormAct else "Sequential")
    torch.testing.assert_close(loaded.eval()(image()), model.eval()(image()))
    model.append(nn.Conv2d(4, 2, 1))  # afterwards
    assert model(image()).shape[1] == 2


NESTED = """self.conv = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3))
self.deep = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.Conv2d(3, 3, 1), nn.Dropout(0.5), nn.BatchNorm2d(3)))
self.flat = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU(True), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
self.group = nn.Sequential(nn.Conv2d(3, 3, 1), nn.GroupNorm(3, 3))
self.bn, self.alone = nn.BatchNorm2d(3), nn.Sequential(nn.BatchNorm2d(3))
self.relu, self.inner, self.skip, self.drop = nn.ReLU(), nn.ReLU(inplace=True), nn.Identity(), nn.Dropout(0.5)"""
ENDS = [
    ("return self.relu(self.conv(x) + x)", {"batch_norm_add_act": 1}),
    ("return self.inner(x + self.skip(self.conv(x)))", {"batch_norm_add_act": 1}),
    ("out = self.conv(x)\nout += x\nreturn self.inner(out)", {"batch_norm_add_act": 1}),
    ("return x + self.conv(x)", {"batch_norm_add": 1}),
    ("return F.silu(self.conv(x))", {"batch_norm_act": 1}),
    ("return F.silu(self.group(x))", {"group_norm_act": 1}),
    ("return self.relu(self.deep(x) + x)", {"batch_norm_add_act": 1}),
    ("return self.relu(self.deep(x) + self.drop(x))", {"batch_norm_add_act": 1}),  # in the order of random numbers
    ("return self.relu(self.flat(x) + x)", {"batch_norm_add_act": 1, "batch_norm_act": 1}),
    ("return self.relu(self.flat(x))", {"batch_norm_act": 2}),
    ("out = self.deep(x)\nz = self.conv(x)\nz += out\nreturn self.inner(z)", {"batch_norm_add_act": 1}),
    ("return self.relu(self.bn(x) + self.conv(x))", {"batch_norm_add_act": 1}),
    ("return self.relu(self.conv(x) + self.conv(x * 2))", {"batch_norm_add_act": 1}),
    ("return self.relu(self.conv(self.relu(self.conv(x) + x)) + x)", {"batch_norm_add_act": 2}),
    ("out = self.conv(x)\nreturn self.relu(out + x), out", {"add_relu": 1}),
    ("return self.relu(self.alone(x) + x)", {"add_relu": 1}),
]


@pytest.mark.parametrize(("body", "rules"), ENDS)
def test_a_sequential_that_ends_with_a_norm(build, body, rules):
    block = build(NESTED, "x", body)
    assert fused(block) == rules
    same(block, image())
    compiled = torch.compile(patch_model(block), backend="eager", fullgraph=True)
    with torch.random.fork_rng():
        expected = block.eval()(image())
    torch.testing.assert_close(compiled(image()), expected)


class KeepsItsInput(nn.Conv2d):
    def forward(self, x):
        self.seen = x
        return x.view_as(x)


def test_what_a_sequential_hands_to_its_norm_may_be_the_input(build):
    """The norm would read it later than before: nothing may write it in between."""
    for body, rules in (
        ("y = x * 1\nout = self.conv(y)\ny.mul_(3)\nreturn self.relu(out)", {}),
        ("y = x * 1\nout = self.conv(y)\nreturn self.relu(out + y)", {"batch_norm_add_act": 1}),
    ):
        block = build(NESTED, "x", body)
        block.conv[0] = KeepsItsInput(3, 3, 1)
        assert fused(block) == rules
        same(block, image())
        block = build(NESTED, "x", body)  # a convolution's result is nobody else's
        assert fused(block)
        same(block, image())


CHANGES = {
    "append": lambda block: block.conv.append(nn.Tanh()),
    "another last layer": lambda block: block.conv.__setitem__(1, nn.InstanceNorm2d(3)),
    "another first layer": lambda block: block.conv.__setitem__(0, nn.Conv2d(3, 3, 1)),
    "another order": lambda block: block.conv._modules.update({"0": block.conv[1], "1": block.conv[0]}),
    "other names": lambda block: setattr(block, "conv", nn.Sequential(OrderedDict(a=block.conv[0], b=block.conv[1]))),
    "no Sequential": lambda block: setattr(block, "conv", nn.Conv2d(3, 3, 1)),
    "a forward": lambda block: setattr(block.conv, "forward", lambda x: x * 2),
    "synchronised": lambda block: nn.SyncBatchNorm.convert_sync_batchnorm(block),
    "hook": lambda block: block.conv.register_forward_hook(lambda module, args, out: out * 2),
    "hook on a layer": lambda block: block.conv[0].register_forward_hook(lambda module, args, out: out * 2),
    "hook on the norm": lambda block: block.conv[1].register_forward_hook(lambda module, args, out: out * 2),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_sequential_that_changes(build, change, when):
    block = build(NESTED, "x", "return self.relu(self.conv(x) + x)").eval()
    if when == "after":
        patch_model(block)
    torch.manual_seed(0)
    CHANGES[change](block)
    if when == "before":
        patch_model(block)
    actual = block(image())
    torch.testing.assert_close(actual, unpatch_model(block)(image()))


def test_a_sequential_that_is_excluded_or_folded(build):
    block = build(NESTED, "x", "return self.relu(self.conv(x) + x)").eval()
    nn.init.normal_(block.conv[1].weight), nn.init.normal_(block.conv[1].running_mean)
    expected = block(image())
    for excluded in ("conv", "conv.1", nn.Sequential):
        row = plan_patch(block, exclude=excluded)[""]
        assert dict(row.fused) == {"add_relu": 1}
        assert Reason.EXCLUDED_CHILD in (reason for reason, _ in row.left)
    for steps in ((patch_model, fold_batch_norm), (fold_batch_norm, patch_model)):
        model = copy.deepcopy(block)
        for step in steps:
            step(model)
        with torch.no_grad():
            torch.testing.assert_close(model(image()), expected)

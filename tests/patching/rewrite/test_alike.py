"""Modules that are alike are recorded once, and what differs between modules is never lost by that."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn

from fastlayers.patching import Reason, patch_model, plan, plan_patch, verify_patch


class Block(nn.Module):
    """A residual block with a number that its forward reads, one that it does not, and an optional layer."""

    def __init__(self, index=0, power=1, act=None, bias=True, between=None):
        super().__init__()
        self.index, self.power = index, power
        self.conv = nn.Conv2d(4, 4, 1, bias=bias)
        self.bn = nn.BatchNorm2d(4)
        self.between = between
        self.act = nn.ReLU() if act is None else act

    def forward(self, x):
        out = self.bn(self.conv(x))
        if self.between is not None:
            out = self.between(out)
        for _ in range(self.power):
            out = out + x
        return self.act(out)


@pytest.fixture
def recorded(monkeypatch):
    """The classes of the modules whose forward was recorded, in their order."""
    found = []
    fuse_forward = plan.fuse_forward

    def watched(module, *args):
        found.append(type(module))
        return fuse_forward(module, *args)

    monkeypatch.setattr(plan, "fuse_forward", watched)
    return found


def check(model, x):
    """The patched model computes what the model computes, and its report is that of modules that are planned alone."""
    report = plan_patch(model)
    assert bool(verify_patch(copy.deepcopy(model), x))
    for name, child in model.named_children():
        alone = plan_patch(nn.Sequential(child))
        for row in alone:
            if row.fqn:
                there = report[name + row.fqn[1:]]
                assert (there.became, there.fused, there.reason, there.left) == (
                    row.became, row.fused, row.reason, row.left
                )  # fmt: skip
    return report


@pytest.fixture
def x():
    return torch.randn(2, 4, 5, 5)


def test_blocks_that_are_alike_are_recorded_once(recorded, x):
    model = nn.Sequential(*(Block(i) for i in range(5)))
    patch_model(model)
    assert recorded == [nn.Sequential, Block]
    assert len({type(block) for block in model}) == 1


@pytest.mark.parametrize(
    "others",
    [
        [{"power": 2}, {"power": 0}],
        [{"act": nn.GELU()}, {"act": nn.ReLU(inplace=True)}, {"act": nn.LeakyReLU(0.3)}],
        [{"bias": False}],
        [{"between": nn.Dropout(0.2)}, {"between": nn.Dropout(0.0)}, {"between": nn.Identity()}],
    ],
    ids=["numbers", "layers", "None", "optional"],
)
def test_what_differs_is_planned_again(others, x):
    model = nn.Sequential(Block(), *(Block(1, **options) for options in others), Block(2))
    check(model, x)
    patch_model(model)
    assert type(model[0]) is type(model[-1])
    assert all(type(block) is not type(model[0]) for block in model[1:-1])


class Scale:
    def __init__(self, factor):
        self.factor = factor


class Holding(nn.Module):
    """A block that holds a partial function, and an object with a number."""

    def __init__(self, factor=2.0, dim=1):
        super().__init__()
        self.bn, self.scale = nn.BatchNorm2d(4), Scale(factor)
        self.weigh = functools.partial(torch.softmax, dim=dim)

    def forward(self, x):
        return torch.relu(self.bn(x) + x) + self.weigh(x) * self.scale.factor


@pytest.mark.parametrize(("other", "alike"), [({}, True), ({"factor": 3.0}, False), ({"dim": 2}, False)])
def test_objects_that_hold_the_same(other, alike, recorded, x):
    """x-transformers gives each layer its own: a decoder of 24 layers was recorded 62 times, in 7 s."""
    model = nn.Sequential(Holding(), Holding(**other))
    check(model, x)
    recorded.clear()
    patch_model(model)
    assert recorded == [nn.Sequential, *[Holding] * (1 if alike else 2)]
    assert (type(model[0]) is type(model[1])) or not alike
    assert type(model[0]) is not Holding


class Named(nn.Module):
    """A block with strings in a dict, as layers of peft have their names there."""

    def __init__(self, reads, name):
        super().__init__()
        self.bn, self.reads, self.options = nn.BatchNorm2d(4), reads, {"name": name, "scale": 2.0}

    def forward(self, x):
        if self.reads and self.options["name"] == "first":
            x = x * 3
        return torch.relu(self.bn(x) + x)


@pytest.mark.parametrize("reads", [False, True])
def test_strings_that_no_forward_reads(reads, recorded, x):
    model = nn.Sequential(Named(reads, "first"), Named(reads, "second"), Named(reads, "second"))
    check(model, x)
    recorded.clear()
    patch_model(model)
    assert recorded == [nn.Sequential, *[Named] * (2 if reads else 1)]
    assert (type(model[0]) is type(model[1])) is not reads
    assert type(model[1]) is type(model[2]) is not Named


def test_an_object_that_holds_itself(recorded, x):
    model = nn.Sequential(Holding(), Holding())
    for block in model:
        block.scale.owner = block.scale
    patch_model(model)
    assert recorded == [nn.Sequential, Holding]


def test_a_shared_child_is_not_two_children(x):
    """The second use of a norm in training would see statistics that the first one changed."""

    class Twice(nn.Module):
        def __init__(self, shared):
            super().__init__()
            self.a = nn.BatchNorm2d(4)
            self.b = self.a if shared else nn.BatchNorm2d(4)
            self.act = nn.ReLU()

        def forward(self, x):
            return self.act(self.b(self.a(x) + x) + x)

    check(nn.Sequential(Twice(False), Twice(True), Twice(False)), x)


def test_hooks_and_replaced_forwards(x):
    model = nn.Sequential(Block(), Block(), Block())
    model[1].bn.register_forward_hook(lambda module, args, result: result * 2)
    report = check(model, x)
    assert report["0"].became == report["2"].became == "FusedBlock"
    assert (Reason.HOOKED_CHILD, "bn") in report["1"].left or report["1"].reason is Reason.HOOKED_CHILD


def test_excluded_children(x):
    model = nn.Sequential(Block(), Block())
    report = plan_patch(model, exclude="1.bn")
    assert report["0"].fused == (("batch_norm_add_act", 1),)
    assert report["1"].fused == (("add_relu", 1),)


def test_refusals_are_alike_too(recorded, x):
    class Loops(nn.Module):
        def forward(self, x):
            while x.sum() > 1e9:
                x = x / 2
            return x * 2

    report = plan_patch(nn.Sequential(Loops(), Block(), Loops()))
    assert report["0"].reason is report["2"].reason is not None
    assert report["0"].detail == report["2"].detail
    assert recorded.count(Loops) == 1

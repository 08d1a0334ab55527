"""The rule for pointwise convolutions of a tensor that is used again."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastlayers import patch_model, patch_report, unpatch_model, verify_patch


class Block(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, **{"kernel_size": 1, "bias": False, **options})
        self.last = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(4)


class Identity(Block):
    def forward(self, x):
        return F.relu(self.bn(self.last(self.conv(x))) + x)


class Plain(Block):
    def forward(self, x):
        return self.last(self.conv(x)) + x


class Downsampled(Block):
    def __init__(self):
        super().__init__()
        self.downsample = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))

    def forward(self, x):
        out = self.bn(self.last(self.conv(x)))
        out += self.downsample(x)
        return F.relu(out)


class Written(Block):
    def forward(self, x):
        y = self.last(self.conv(x))
        x += y
        return x


class Returned(Block):
    def forward(self, x):
        return self.last(self.conv(x)), x


class Before(Block):
    def forward(self, x):
        skip = x * 2
        return self.last(self.conv(x)) + skip


class Kept(Block):
    def __init__(self):
        super().__init__()
        self.keep = nn.Identity()

    def forward(self, x):
        return self.last(self.conv(x)) + self.keep(x)


@pytest.mark.parametrize("cls", [Identity, Plain, Downsampled, Kept])
def test_found(cls):
    model = nn.Sequential(nn.Conv2d(4, 4, 1), cls())
    patch_model(model)
    assert patch_report(model).counts()["forked_convolution"] == 1
    assert verify_patch(model, torch.randn(2, 4, 5, 5))


@pytest.mark.parametrize("cls", [Written, Returned, Before])
def test_not_found(cls):
    model = nn.Sequential(nn.Conv2d(4, 4, 1), cls())
    patch_model(model)
    assert "forked_convolution" not in patch_report(model).counts()
    with torch.no_grad() if cls is Written else nullcontext():  # torch itself refuses its backward
        x = torch.randn(2, 4, 5, 5)
        torch.testing.assert_close(model.eval()(x), unpatch_model(deepcopy(model))(x))


def test_with_a_bias():
    """Of one that memory bounds it is the cast of x whose gradient is added."""
    model = patch_model(Identity(bias=True, kernel_size=3, padding=1, groups=4))
    assert patch_report(model).counts()["forked_convolution"] == 1
    assert verify_patch(model, torch.randn(2, 4, 5, 5))


@pytest.mark.parametrize("options", [{"bias": True}, {"stride": 2}, {"kernel_size": 3, "padding": 1}, {"groups": 2}])
def test_other_convolutions(options):
    model = Identity(**options)
    patch_model(model)
    assert "forked_convolution" not in patch_report(model).counts()


def test_a_convolution_that_changes_later():
    model = patch_model(Plain())
    assert patch_report(model).counts() == {"forked_convolution": 1, "BatchNorm2d": 1}
    model.conv = nn.Conv2d(4, 4, 1)
    assert verify_patch(model, torch.randn(2, 4, 5, 5))
    seen = []
    model.conv.register_forward_hook(lambda module, args, result: seen.append(result))
    model(torch.randn(2, 4, 5, 5))
    assert len(seen) == 1

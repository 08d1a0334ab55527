"""The rule for pointwise convolutions of a tensor that is used again."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F  # noqa: F401  (sources name it)
from torch import nn

from fastlayers import patch_model, patch_report, unpatch_model, verify_patch
from tests.patching.harness import written


class Block(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, **{"kernel_size": 1, "bias": False, **options})
        self.last = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.bn, self.keep = nn.BatchNorm2d(4), nn.Identity()
        self.downsample = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))


IDENTITY = "return F.relu(self.bn(self.last(self.conv(x))) + x)"
PLAIN = "return self.last(self.conv(x)) + x"
WRITES = "y = self.last(self.conv(x))\nx += y\nreturn x"


def block(body, **options):
    return written(Block, body, globals())(**options)


@pytest.mark.parametrize(
    "body",
    [
        IDENTITY,
        PLAIN,
        "out = self.bn(self.last(self.conv(x)))\nout += self.downsample(x)\nreturn F.relu(out)",
        "return self.last(self.conv(x)) + self.keep(x)",
    ],
)
def test_found(body):
    model = nn.Sequential(nn.Conv2d(4, 4, 1), block(body))
    patch_model(model)
    assert patch_report(model).counts()["forked_convolution"] == 1
    assert verify_patch(model, torch.randn(2, 4, 5, 5))


@pytest.mark.parametrize(
    "body", [WRITES, "return self.last(self.conv(x)), x", "skip = x * 2\nreturn self.last(self.conv(x)) + skip"]
)
def test_not_found(body):
    model = nn.Sequential(nn.Conv2d(4, 4, 1), block(body))
    patch_model(model)
    assert "forked_convolution" not in patch_report(model).counts()
    with torch.no_grad() if body is WRITES else nullcontext():  # torch itself refuses its backward
        x = torch.randn(2, 4, 5, 5)
        torch.testing.assert_close(model.eval()(x), unpatch_model(deepcopy(model))(x))


def test_with_a_bias():
    """Of one that memory bounds it is the cast of x whose gradient is added."""
    model = patch_model(block(IDENTITY, bias=True, kernel_size=3, padding=1, groups=4))
    assert patch_report(model).counts()["forked_convolution"] == 1
    assert verify_patch(model, torch.randn(2, 4, 5, 5))


@pytest.mark.parametrize("options", [{"bias": True}, {"stride": 2}, {"kernel_size": 3, "padding": 1}, {"groups": 2}])
def test_other_convolutions(options):
    model = block(IDENTITY, **options)
    patch_model(model)
    assert "forked_convolution" not in patch_report(model).counts()


def test_a_convolution_that_changes_later():
    model = patch_model(block(PLAIN))
    assert patch_report(model).counts()["forked_convolution"] == 1
    model.conv = nn.Conv2d(4, 4, 1)
    assert verify_patch(model, torch.randn(2, 4, 5, 5))
    seen = []
    model.conv.register_forward_hook(lambda module, args, result: seen.append(result))
    model(torch.randn(2, 4, 5, 5))
    assert len(seen) == 1

"""The gate of a squeeze-and-excite block: what is found, what is left, the answers."""

from __future__ import annotations

import pytest
import torch

from tests.patching.harness import fused, same, tensors, undone

EXCITE_INIT = """self.fc, self.gate, self.hard = nn.Conv2d(4, 4, 1), nn.Sigmoid(), nn.Hardsigmoid()
self.pool, self.flat, self.two = nn.AdaptiveAvgPool2d(1), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(2)"""
SQUEEZED = {"squeeze_excite": 1, "squeeze": 1}


SQUEEZES = [
    "return x * self.gate(self.fc(x.mean((2, 3), keepdim=True)))",
    "return self.hard(self.fc(torch.mean(x, [-1, -2], True))) * x",
    "return x * torch.sigmoid(self.fc(x.mean(dim=(2, 3), keepdim=True)))",
    "return torch.mul(x, self.fc(self.pool(x)).sigmoid())",
    "s = self.flat(x.mean((2, 3), keepdim=True))\nreturn x * self.gate(self.fc(s))",
    "s = F.adaptive_avg_pool2d(x, (1, 1))\nreturn (self.gate(self.fc(0.5 * s + x.amax((2, 3), True))) * x) + s",
    "x = x + 1\nreturn x * self.gate(self.fc(x.mean((2, 3), keepdim=True))) + x",
]
EXCITES = [
    "return x * F.hardsigmoid(self.fc(x))",
    "return x * self.gate(self.fc(self.two(x).mean((2, 3), keepdim=True)))",
    "return x * self.gate(self.fc(x.mean((2, 3))[:, :, None, None]))",
    "return x * self.gate(self.fc(x.mean((1, 2, 3), keepdim=True).expand(-1, 4, -1, -1)))",
    "y = x + 1\nreturn y * self.gate(self.fc(x.mean((2, 3), keepdim=True)))",
    "y = x * self.gate(self.fc(x))\nreturn y + x.mean((2, 3), keepdim=True)",
]


@pytest.mark.parametrize("body", [*SQUEEZES, *EXCITES])
def test_squeeze_excite(build, body):
    block = build(EXCITE_INIT, "x", body)
    assert fused(block) == (SQUEEZED if body in SQUEEZES else {"mul": 1})
    same(block, *tensors((2, 4, 5, 5)))
    undone(block, torch.randn(2, 4, 5, 5))


@pytest.mark.parametrize(
    ("path", "rest"), [("timm.layers.SEModule", {"conv_bias": 1}), ("timm.layers.EffectiveSEModule", {})]
)
def test_squeeze_excite_of_timm(path, rest):
    module, name = path.rsplit(".", 1)
    block = getattr(pytest.importorskip(module), name)(16)
    assert fused(block) == {**SQUEEZED, **rest}
    same(block, *tensors((2, 16, 5, 5)))


def test_squeeze_excite_of_torchvision():
    block = pytest.importorskip("torchvision.ops.misc").SqueezeExcitation(16, 4)
    assert fused(block) == {**SQUEEZED, "conv_bias": 1}
    same(block, *tensors((2, 16, 5, 5)))
    undone(block, torch.randn(2, 16, 5, 5))


@pytest.mark.parametrize(
    "body", ["return x * self.fc(x)", "return x * 2", "x = x + 1\nx *= torch.sigmoid(x)\nreturn x"]
)
def test_no_excite(build, body):
    block = build("self.fc = nn.Conv2d(4, 4, 1)", "x", body)
    assert not fused(block)
    same(block, *tensors((2, 4, 5, 5)))

"""Regions: what changes after the recording is seen."""

from __future__ import annotations

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.harness import DEVICES
from tests.patching.regions.blocks import (
    Attention,
    Block,
    Bottleneck,
    DropPath,
    Idioms,
    images,
    in_regions,
    recorded,
    repeated,
    same,
    tokens,
)

pytestmark = [
    pytest.mark.cpu_kernels,
    pytest.mark.usefixtures("from_the_first_call", "any_size", "executor", "operations_of_torch"),
]


CHANGES = {
    "eps": lambda block: setattr(block.norm1, "eps", 0.5),
    "frozen": lambda block: block.attn.requires_grad_(False),
    "dtype": lambda block: block.double(),
    "a child": lambda block: block.mlp.__setitem__(1, nn.Tanh()),
    "a parameter": lambda block: setattr(block, "gamma", nn.Parameter(torch.ones(16))),
    "a hook": lambda block: block.norm2.register_forward_hook(lambda module, args, out: out * 2),
    "a backward hook": lambda block: block.attn.register_full_backward_hook(
        lambda module, grads, dys: (grads[0] * 2, *grads[1:])
    ),
    "a number": lambda block: setattr(block, "index", 7),
    "a dropout": lambda block: setattr(block.mlp[2], "p", 0.5),
    "a forward": lambda block: setattr(block.attn, "forward", lambda x, mask=None: x * 2),
    "a shared norm": lambda block: setattr(block, "norm2", block.norm1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change, runs):
    module, x = Block(), tokens()
    region = repeated(module, x)
    CHANGES[change](module), CHANGES[change](region)
    x = x.detach().to(module.gamma.dtype).requires_grad_()
    for _ in range(2):
        same(module, region, x)
    assert runs[:2] == [True, False]


class Optional(nn.Module):
    """A list in which layers may be missing, as blocks of diffusers have it."""

    def __init__(self, *there):
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(8, 8) for _ in there)
        self.norms = nn.ModuleList(nn.LayerNorm(8) if each else None for each in there)

    def forward(self, x):
        for layer, norm in zip(self.first, self.norms, strict=True):
            x = layer(x).tanh()
            if norm is not None:
                x = norm(x) * 2
        return x.sigmoid() * x


@pytest.mark.parametrize("order", [1, -1])
def test_layers_that_are_missing_from_a_list(order, runs):
    """A region that had been recorded for a module without a layer ran for one that has it."""
    known, x = {}, tokens(2, 3, 8)
    for there in [(False, False), (True, False), (True, True)][::order]:
        module = Optional(*there)
        region = in_regions(module, known)
        for _ in range(2):
            same(module, region, x)
    assert runs == [True, False] * 3


@pytest.mark.parametrize(
    ("name", "value"),
    [("factor", numpy.float64(0.75)), ("offset", numpy.float32(2.0)), ("heads", numpy.int64(3)), ("heads", 2)],
)
def test_a_number_of_numpy_that_changes(name, value, runs):
    """Those of integers and of float32 are no Python numbers: a region kept what it had seen."""
    module, x = Idioms(), tokens(2, 3, 8)
    region = repeated(module, x)
    for each in (module, region):
        setattr(each, name, value)
    for _ in range(2):
        same(module, region, x)
    assert runs[:2] == [True, False]


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (F, "gelu", lambda x, approximate="none": x * 3),
        (nn.LayerNorm, "forward", lambda self, x: x * 2),
        (Attention, "forward", lambda self, x, mask=None: x - 1),
        (DropPath, "forward", lambda self, x: x + 1),
    ],
)
def test_a_replaced_function_is_called(owner, name, value, monkeypatch):
    module, x = Block(), tokens()
    region = repeated(module, x)
    monkeypatch.setattr(owner, name, value)
    for _ in range(2):
        same(module, region, x)
    monkeypatch.undo()
    same(module, region, x)


@pytest.mark.parametrize("device", DEVICES)
def test_statistics_that_another_backward_refers_to(device):
    """A batch norm is called by itself, and its backward comes after a call of the region that updates its statistics:
    torch does not count that as a write."""
    x, given = images().to(device), torch.randn(2, 4, 3, 3, device=device, requires_grad=True)
    region = recorded(Bottleneck().to(device), x)
    norm = region.bn1
    y = F.batch_norm(given, norm.running_mean, norm.running_var, training=True)
    before = norm.running_mean.clone()
    region(x)
    assert not torch.equal(norm.running_mean, before)
    y.square().sum().backward()

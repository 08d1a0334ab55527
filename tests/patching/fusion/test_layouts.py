"""The layout of a result: a copy that may be left out, and rows of tokens of an image."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from fastlayers.patching.regions.region import region_class
from tests.patching.fusion.programs import check, entries_of, launches
from tests.patching.networks import Parts

pytestmark = pytest.mark.cpu_kernels


def test_a_copy_that_may_be_told_from_its_source(device):
    """Of an input, of a result, as a result, and of what is written later: all are copies."""
    x = torch.randn(8, 4, device=device, requires_grad=True)

    def moved(t):
        return t.t().clone(memory_format=torch.contiguous_format).t().clone(memory_format=torch.contiguous_format)

    _, of_input = check(lambda x: moved(x) @ x.t(), x)
    _, of_result = check(lambda x: (y := x @ x.t(), moved(y) @ x), x)
    _, as_result = check(lambda x: moved(x @ x.t()), x)
    _, of_written = check(lambda x: (y := x.detach() @ x.detach().t(), moved(y) @ x, y.add_(1))[1], x)
    _, of_neither = check(lambda x: moved(x @ x.t()) @ x, x)
    assert [launches(program.forward) for program in (of_input, of_result, as_result, of_neither)] == [2, 3, 2, 2]
    assert launches(of_written.forward) > 2


class Patches(nn.Module):
    """The tokens of an image, which lie in memory channel by channel, with their positions."""

    def __init__(self, sums=True):
        super().__init__()
        self.conv, self.positions, self.sums = nn.Conv2d(3, 16, 4, 4), nn.Parameter(torch.randn(1, 16, 16)), sums

    def forward(self, x):
        tokens = (self.conv(x) * 2 + 1).sigmoid().flatten(2).mT
        return tokens + self.positions if self.sums else tokens * 3


class Residual(Parts):
    def forward(self, x):
        return x + (self.linear(self.norm(x)) * 2).tanh()


def test_tokens_of_an_image_come_in_rows(device, monkeypatch):
    monkeypatch.setattr("fastlayers.patching.regions.demand.CALLS", 1)
    stock = nn.Sequential(Patches(), Residual(norm=nn.LayerNorm(16), linear=nn.Linear(16, 16))).to(device)
    model, images = copy.deepcopy(stock), torch.randn(2, 3, 16, 16, device=device)
    for layer in model:
        layer.__class__ = region_class(type(layer), {})
    for _ in range(3):
        tokens, expected = model[0](images), stock[0](images)
        assert tokens.is_contiguous()
        assert not expected.is_contiguous()
        torch.testing.assert_close(tokens, expected)
        # Also what another module has made.
        torch.testing.assert_close(model[1](expected), stock[1](expected))
        assert model[1](expected).is_contiguous()
        grads = [torch.autograd.grad(m(images).square().sum(), [*m.parameters()]) for m in (model, stock)]
        torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-3)
    entries = [entry for m in model for entry in entries_of(m)]
    assert all(entry.refusal is None for entry in entries)
    # Where torch has nothing to choose, all stays as it is.
    alone = Patches(sums=False).to(device)
    expected = alone(images)
    alone.__class__ = region_class(Patches, {})
    assert alone(images).stride() == alone(images).stride() == expected.stride()

"""One program for all sizes: against stock, over shuffled sizes, for blocks of every kind."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastlayers
from fastlayers.patching.regions import demand
from fastlayers.patching.regions import region as regions
from fastlayers.patching.regions.recording import attentions, without_plans
from tests.patching.regions.blocks import FORWARDS, Block, Bottleneck, Code, in_regions

pytestmark = [pytest.mark.cpu_kernels, pytest.mark.usefixtures("any_size", "executor", "operations_of_torch")]


def results(module, x):
    x = x.clone().requires_grad_()
    try:
        out = module(x)
    except Exception as error:
        return [type(error)]
    return [out, *torch.autograd.grad(out.square().sum(), [x, *module.parameters()], allow_unused=True)]


def assert_same(stock, patched, x):
    found, expected = results(patched, x), results(stock, x)
    assert [t is None for t in found] == [t is None for t in expected]
    for a, b in zip(found, expected, strict=True):
        if isinstance(b, torch.Tensor):
            torch.testing.assert_close(a, b, equal_nan=True)
            assert a.stride() == b.stride()
        else:
            assert a is b


def recordings(patched):
    region = type(patched).__fastlayers_region__
    return sum(map(len, region.entries.values())), sum(map(len, region.many_sizes.entries.values()))


SIZES = [*range(13), 15, 16, 17, 31, 32, 33, 39, 40, 41, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300]


@pytest.mark.parametrize("code", FORWARDS)
def test_sizes_in_any_order(code):
    torch.manual_seed(0)
    stock = Code(code).double()
    patched = in_regions(copy.deepcopy(stock))
    sizes = SIZES[:]
    random.Random(code).shuffle(sizes)
    for n in (24, 24, *sizes):
        assert_same(stock, patched, torch.randn(2, n, 8, dtype=torch.double))
        for module in (stock, patched):
            module.mean.nan_to_num_(0)  # that of no element
    torch.testing.assert_close(patched.mean, stock.mean)


#: One asks for the type of a number, and torch lays the results of the other out in another way than it says.
@pytest.mark.parametrize("code", sorted({*FORWARDS} - {"number", "resized"}))
def test_a_program_serves_other_sizes(code):
    """For what differs in no decision: two recordings, and calls of sizes that were never seen before."""
    stock = Code(code).double()
    patched = in_regions(copy.deepcopy(stock))
    for n in (23, 23, 21, 19, 13, 22, 34):
        assert_same(stock, patched, torch.randn(2, n, 8, dtype=torch.double))
    assert recordings(patched) == (1, 1)


@pytest.mark.parametrize(("make", "shapes"), [(Block, [(2, n, 16) for n in (9, 9, 11, 7, 30)]),
                                              (Bottleneck, [(2, 8, n, n) for n in (9, 9, 11, 8, 14)])])  # fmt: skip
def test_blocks(make, shapes):
    stock = make()
    patched = in_regions(copy.deepcopy(stock))
    for shape in shapes:
        assert_same(stock, patched, torch.randn(shape))
    assert recordings(patched)[0] <= 3


def test_layers_share_the_tries():
    known, stock = {}, [Code("mean").double() for _ in range(5)]
    layers = [in_regions(copy.deepcopy(module), known) for module in stock]
    for n in (23, 21, 19, 13):
        for module, patched in zip(stock, layers, strict=True):
            assert_same(module, patched, torch.randn(2, n, 8, dtype=torch.double))
    assert recordings(layers[0]) == (0, 1)


def test_a_batch_that_equals_a_length_is_none():
    stock = Code("heads").double()
    patched = in_regions(copy.deepcopy(stock))
    for batch, n in ((6, 6), (6, 6), (7, 7), (6, 9), (5, 7), (9, 9)):
        assert_same(stock, patched, torch.randn(batch, n, 8, dtype=torch.double))
    assert recordings(patched) == (1, 1)


@pytest.mark.parametrize("code", ["mean", "heads", "statistics"])
def test_autocast(code):
    stock = Code(code)
    patched = in_regions(copy.deepcopy(stock))
    with torch.autocast("cpu", torch.bfloat16):
        for n in (9, 9, 11, 13, 24):
            x = torch.randn(2, n, 8)
            for a, b in zip(results(patched, x), results(stock, x), strict=True):
                assert (a is None and b is None) or torch.equal(a, b)
    assert recordings(patched) == (1, 1)


class Counted(Code):
    """Returns numbers and views that follow from sizes."""

    def forward(self, x):
        out = super().forward(x)
        return out, x.shape[1] // 100, {"length": x.shape[1] + 1, "half": out[:, : x.shape[1] // 2]}


def test_numbers_and_views_of_a_size_in_a_result():
    stock = Counted("mean").double()
    patched = in_regions(copy.deepcopy(stock))
    for n in (9, 9, 11, 150, 250, 7):
        x = torch.randn(2, n, 8, dtype=torch.double)
        (a, count, held), (b, expected, own) = patched(x), stock(x)
        torch.testing.assert_close(a, b)
        assert (count, held["length"]) == (expected, n + 1)
        torch.testing.assert_close(held["half"], own["half"])
        assert held["half"]._base is a
    assert recordings(patched) == (1, 1)


class Resized(nn.Module):
    """Convolutions around an image that changes its size."""

    def __init__(self, how):
        super().__init__()
        self.a, self.b, self.norm = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 4, 1), nn.BatchNorm2d(8)
        self.how = how

    def forward(self, x):
        return self.b(RESIZED[self.how](F.relu(self.norm(self.a(x)))))


RESIZED = {
    "nearest": lambda h: F.interpolate(h, scale_factor=2, mode="nearest"),
    "bilinear": lambda h: F.interpolate(h, scale_factor=1.5, mode="bilinear"),
    "bicubic": lambda h: F.interpolate(h, size=h.shape[-2:], mode="bicubic") + h,
    "pooled": lambda h: F.max_pool2d(h, 2) * F.adaptive_avg_pool2d(h, 1),
    "mean": lambda h: h.mean((2, 3), keepdim=True) * 2,
}


@pytest.mark.parametrize("how", RESIZED)
def test_images_of_any_size(how):
    stock = Resized(how).double()
    patched = in_regions(copy.deepcopy(stock))
    for n in (9, 9, 11, 14, 8, 21):
        assert_same(stock, patched, torch.randn(2, 4, n, n + 3, dtype=torch.double))
    assert recordings(patched) == (1, 1)


def test_flags_of_attention_are_as_they_were():
    before = attentions()
    with pytest.raises(ValueError, match="inside"), without_plans():
        raise ValueError("inside")
    assert attentions() == before


def test_second_derivatives_of_another_size():
    stock = Code("mean").double()
    patched, found = in_regions(copy.deepcopy(stock)), []
    for module in (stock, patched):
        for n in (9, 9, 11, 13):
            x = torch.randn(2, n, 8, dtype=torch.double, generator=torch.Generator().manual_seed(n)).requires_grad_()
            (dx,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=n == 13)
        found.append([dx, *torch.autograd.grad(dx.square().sum(), [x, module.up.weight])])
    torch.testing.assert_close(found[1], found[0])


def test_a_gradient_in_another_layout_and_one_that_is_not_asked_for():
    stock = Code("table").double()
    patched = in_regions(copy.deepcopy(stock))
    for n in (9, 9, 11, 13):
        x, found = torch.randn(2, n, 8, dtype=torch.double, requires_grad=True), []
        dy = torch.randn(8, n, 2, dtype=torch.double).transpose(0, 2)
        for module in (stock, patched):
            found.append(torch.autograd.grad(module(x), [x, module.table], dy, retain_graph=True))
            found[-1] += torch.autograd.grad(module(x), [module.up.bias], dy)
        torch.testing.assert_close(found[1], found[0])
    assert recordings(patched) == (1, 1)


def test_a_result_of_another_layout_than_expected(monkeypatch):
    """Views of it would read elsewhere. The call runs op by op, as later ones of any size do."""
    stock = Code("heads").double()
    patched = in_regions(copy.deepcopy(stock))
    for n in (9, 9, 11):
        assert_same(stock, patched, torch.randn(2, n, 8, dtype=torch.double))
    (entry,) = next(iter(type(patched).__fastlayers_region__.many_sizes.entries.values()))
    monkeypatch.setattr(entry, "code", Other())
    assert_same(stock, patched, torch.randn(2, 13, 8, dtype=torch.double))
    assert recordings(patched) == (1, 0)


def test_a_size_that_comes_often_is_recorded_where_kernels_are_generated(runs, monkeypatch):
    patched = in_regions(Code("mean").double())
    for n in (9, 9, 11):
        patched(torch.randn(2, n, 8, dtype=torch.double))
    monkeypatch.setattr(regions.Region, "prefers_one_size", lambda self, device: True)
    monkeypatch.setattr(demand, "SERVED", 2)
    for n in (13, 14, 15, 13, 13):
        patched(torch.randn(2, n, 8, dtype=torch.double))
    # 13 is served by what serves all, until it comes again.
    assert runs == [True, True, False, False, False, True, False]


class Other:
    def record(self, again, inputs):
        raise RuntimeError(f"{regions.OTHER_LAYOUT}: (1, 2)")


def test_the_report_says_what_is_one_program():
    patched = fastlayers.patch_model(nn.Sequential(Block(), Block()))
    for n in (9, 9, 11, 13):
        patched(torch.randn(2, n, 16)).sum().backward()
    rows = fastlayers.patch_report(patched).rows
    assert any("2x*x16 float32" in signature.what for row in rows if row.region for signature in row.region.signatures)

"""Generated kernels that serve many sizes: blocks of every kind, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("triton")

from fastlayers import backends
from fastlayers.kernels.generated import Kernel
from fastlayers.patching.program import executors
from tests.patching.fusion.programs import PLACES, TOLERANCE
from tests.patching.regions.blocks import FORWARDS, Code, in_regions

pytestmark = [pytest.mark.cpu_kernels, pytest.mark.usefixtures("any_size")]

#: Powers of two and their neighbours, multiples of 16 and others, in an order in which none follows from another.
SIZES = (24, 23, 21, 16, 300, 19, 13, 32, 33, 2, 64, 63, 128, 34, 255)


#: Forwards with nothing between products that a kernel would gain by.
WITHOUT = ("window", "limit", "statistics", "table", "token")


@pytest.fixture(autouse=True)
def generated(monkeypatch):
    monkeypatch.setattr(backends, "generates_kernels", lambda device: True)


def results(module, x):
    x = x.clone().requires_grad_()
    out = module(x)
    return [out, *torch.autograd.grad(out.square().sum(), [x, *module.parameters()], allow_unused=True)]


@pytest.mark.parametrize("executor", ["python", "native"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("code", sorted({*FORWARDS} - {"number", "resized"}))
def test_one_kernel_for_many_sizes(code, place, executor, monkeypatch):
    if executor == "python":
        monkeypatch.setattr(executors, "_native", None)
    torch.manual_seed(0)
    stock = Code(code).to(place)
    patched = in_regions(copy.deepcopy(stock))
    for n in SIZES:
        x = torch.randn(2, n, 8, device=place)
        exact = results(copy.deepcopy(stock).double(), x.double())
        for a, b, right in zip(results(patched, x), results(stock, x), exact, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert a.stride() == b.stride()
                largest = right.abs().max()
                assert (a - right).abs().max() <= 1.5 * (b - right).abs().max() + TOLERANCE[x.dtype] * largest
        for module in (stock, patched):
            module.mean.zero_()
    made = [e for several in type(patched).__fastlayers_region__.many_sizes.entries.values() for e in several]
    assert sum(entry.calls for entry in made) >= len(SIZES) // 2
    kernels = [o.function for e in made for o in e.fused.operations if isinstance(o.function, Kernel)]
    assert any(kernel.sizes for kernel in kernels) or code in WITHOUT

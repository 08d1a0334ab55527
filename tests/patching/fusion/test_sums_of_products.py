"""The gradient of what several layers read, as one product."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from fastlayers import functional as FL
from fastlayers.patching.regions.region import region_class
from tests.patching.fusion.programs import LOW, TOLERANCE, Adapted, adapter, check, names_of

pytestmark = pytest.mark.cpu_kernels


def test_the_gradient_of_what_layers_read(device):
    """It is added up where it lies: of query, key and value, of gate and up, whose gradients overwrite others."""
    x = torch.randn(2, 35, 136, device=device, dtype=LOW, requires_grad=True)
    weights = [(torch.randn(n, 136, device=device) * 0.1).to(LOW).requires_grad_() for n in (136, 72, 72)]
    bias = torch.randn(72, device=device).to(LOW).requires_grad_()

    def three(x, q, k, v, bias):
        return F.linear(x, q), F.linear(x, k, bias), F.linear(x, v)

    _, other = check(three, x, *weights, bias, tolerance=TOLERANCE[LOW])
    found = names_of(other.backward)
    assert (found["mm"], found["addmm_"], found["add"]) == (4, 2, 0)

    shapes = ((72, 136), (72, 136), (136, 72))
    gate, up, down = ((torch.randn(*shape, device=device) * 0.1).to(LOW).requires_grad_() for shape in shapes)
    _, other = check(
        lambda x, gate, up, down: FL.gated_linear(F.linear(x, gate), F.linear(x, up), down, act="silu"),
        x, gate, up, down, tolerance=TOLERANCE[LOW],
    )  # fmt: skip
    found = names_of(other.backward)
    assert (found["addmm_"], found["add"]) == (1, 0)


def test_products_of_what_is_written_over_stay(device):
    x, weight = (torch.randn(136, 136, device=device, dtype=LOW) for _ in range(2))

    def function(x, weight):
        changed = x.clone()
        first = changed @ weight
        changed.mul_(2)
        return first + changed @ weight

    _, other = check(function, x, weight, tolerance=TOLERANCE[LOW])
    found = names_of(other.forward)
    assert (found["mm"], found["addmm_"]) == (1, 1)  # The second one adds to the first, which was computed before.


def test_sums_that_others_read_stay(device):
    """A term that is a result too, one of another shape, and one that is written over."""
    x = torch.randn(40, 136, device=device, dtype=LOW)
    weight = torch.randn(136, 136, device=device).to(LOW)
    a, b = (t.detach() for t in adapter(device, LOW, 136, 136, 8))

    def function(x, weight, a, b):
        seen = F.linear(x, weight)
        rows = F.linear(x[:1], weight) + F.linear(F.linear(x, a), b)
        changed = F.linear(x, weight)
        changed.mul_(2)
        return seen, seen + F.linear(F.linear(x, a), b), rows, changed + F.linear(F.linear(x, a), b)

    _, other = check(function, x, weight, a, b)
    assert names_of(other.forward)["wide_product"] == 0


def test_what_an_adapter_read_is_not_to_be_overwritten(device):
    """It is kept in place of its cast to float32: torch's error, as for an adapter of its dtype, and no wrong one."""
    layer = Adapted(device)
    layer.__class__ = region_class(Adapted, {})
    for _ in range(3):
        x = torch.randn(8, 136, device=device, dtype=LOW, requires_grad=True)
        between = x * 1
        out = layer(between)
        out.sum().backward()
    between = x * 1
    out = layer(between)
    between.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()

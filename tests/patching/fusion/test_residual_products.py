"""A residual sum that a product writes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from fastlayers.patching.fusion.residual_products import with_residual_products
from fastlayers.patching.program.program import plain_name
from tests.patching.fusion.programs import LOW, TOLERANCE, check, names_of, recorded

pytestmark = pytest.mark.cpu_kernels


#: A residual sum ``h + x·w`` after ``x = f(h·wᵀ)``, and whether the product writes it.
RESIDUAL_SUMS = {
    "h first": (lambda h, x, w: h + x @ w, True),
    "h last": (lambda h, x, w: (x @ w) + h, True),
    "three dimensions": (lambda h, x, w: h.view(5, 7, -1) + (x @ w).view(5, 7, -1), True),
    "of a sum": (lambda h, x, w: (y := h + x @ w) + (y @ w.t()).sin() @ w, True),
    "h is returned": (lambda h, x, w: (h, h + x @ w), False),
    "h is read later": (lambda h, x, w: (h + x @ w, h @ w.t()), False),
    "a view of h is read later": (lambda h, x, w: (row := h[3:5], h + x @ w, row @ w.t())[1:], False),
    "the product is read": (lambda h, x, w: (p := x @ w, h + p, p @ w.t())[1:], False),
    "the product is returned": (lambda h, x, w: (p := x @ w, h + p), False),
    "a multiple": (lambda h, x, w: torch.add(h, x @ w, alpha=2), False),
    "another shape": (lambda h, x, w: h[:1] + x @ w, False),
    "h is a factor": (lambda h, x, w: h + h @ (w.t() @ w), False),
    "a factor is written": (lambda h, x, w: (p := x @ w, x.cumsum_(0), h + p, x.cos())[2:], False),
}


@pytest.mark.parametrize("case", RESIDUAL_SUMS)
def test_a_residual_sum_that_a_product_writes(device, case):
    """In the memory of h, where nobody needs that any more."""
    function, written = RESIDUAL_SUMS[case]
    t, w = ((torch.randn(n, 64, device=device) * 0.3).to(LOW) for n in (35, 24))
    call = lambda t, w: function(h := t.tanh(), (h @ w.t()).sin(), w)  # noqa: E731
    _, other = check(call, t, w, tolerance=TOLERANCE[LOW])
    assert (names_of(other.forward)["addmm_"] > 0) is written
    _, other = check(lambda t, w: t + t.sin() @ w.t() @ w, t, w, tolerance=TOLERANCE[LOW])
    assert "addmm_" not in names_of(other.forward)  # An input is not written.


def test_a_residual_sum_of_what_a_copy_that_became_a_view_has(device):
    """The copy was recorded in memory of its own."""
    t, w = (torch.randn(n, 64, device=device).to(LOW) for n in (35, 24))
    program, *_ = recorded(
        lambda t, w: (h := t.tanh(), c := h.clone(), h + (h @ w.t()).sin() @ w, c @ w.t())[2:], [t, w]
    )
    assert names_of(with_residual_products(program).forward)["addmm_"] == 1
    operations = [replace(o, view=plain_name(o.function) == "clone" or o.view) for o in program.forward]
    other = with_residual_products(replace(program, forward=operations))
    assert "addmm_" not in names_of(other.forward)


def test_a_residual_sum_of_what_a_backward_needs(device):
    t, w = ((torch.randn(n, 64, device=device) * 0.3).to(LOW).requires_grad_() for n in (35, 24))
    _, other = check(lambda t, w: (h := t.tanh()) + (h @ w.t()).sin() @ w, t, w, tolerance=TOLERANCE[LOW])
    assert "addmm_" not in names_of(other.forward)

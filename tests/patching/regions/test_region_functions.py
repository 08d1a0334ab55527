"""Wrappers and autograd functions in a region: what they are given, what they compute, and what changes them."""

from __future__ import annotations

import functools
import re
from unittest.mock import patch

import pytest
import torch

from tests.patching.regions.guarded import Scaled, Settings, Swish, UnderAutocast, agree, made, patched_as

pytestmark = pytest.mark.cpu_kernels


@pytest.mark.parametrize("given", ["", ", scale=3.0", ", inner=True, scale=3.0"])
def test_a_wrapper_gets_what_it_is_given(given, ran):
    """Not the defaults of what it wraps, nor only the arguments of that."""
    stock = made(f"wrapped(F.gelu(x){given})")
    patched = patched_as(stock)
    assert ran
    with patch.object(Settings, "scale", 9.0):
        agree(stock, patched, calls=4)


FUNCTIONS_OF_AUTOGRAD = {
    "Swish.apply(F.gelu(x))": [(Swish, "forward"), (Swish, "backward"), (Swish, "apply")],
    "swish(F.gelu(x))": [(Swish, "forward"), (Swish, "backward")],
    "Scaled.apply(F.gelu(x), 2.0)[0]": [(Scaled, "forward"), (Scaled, "setup_context"), (Scaled, "vjp")],
    "UnderAutocast.apply(F.gelu(x), x.detach().mT)": [(UnderAutocast, "forward"), (UnderAutocast, "backward")],
}


@pytest.mark.parametrize("result", FUNCTIONS_OF_AUTOGRAD)
def test_an_autograd_function_is_followed_forward_and_backward(result, ran):
    stock = made(result)
    patched = patched_as(stock)
    assert ran
    agree(stock, patched)
    for cls, name in FUNCTIONS_OF_AUTOGRAD[result]:
        with patch.object(cls, name, staticmethod(tripled(getattr(cls, name)))):
            agree(stock, patched, calls=4)
    with patch.object(Settings, "scale", 9.0):
        agree(stock, patched, calls=4)
    agree(stock, patched)


def tripled(method):
    @functools.wraps(method)
    def replaced(*args):
        result = method(*args)
        if isinstance(result, tuple):
            return result[0] * 3, *result[1:]
        return result if result is None else result * 3

    return replaced


def test_an_autograd_function_knows_what_needs_a_gradient(ran):
    stock = made("Scaled.apply(F.gelu(x), 2.0)[0] if x.requires_grad else x")
    patched = patched_as(stock)
    for p in (*stock.parameters(), *patched.parameters()):
        p.requires_grad_(False)
    for _ in range(4):
        with torch.no_grad():
            agree(stock, patched)
        agree(stock, patched)


@pytest.mark.parametrize("autocast", [False, True])
def test_an_autograd_function_under_autocast(autocast, ran):
    stock = made("UnderAutocast.apply(F.gelu(x), x.detach().mT).float()")
    patched = patched_as(stock)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        agree(stock, patched, calls=4)
    assert ran


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        ("ReadsLate.apply(F.gelu(x))", "a backward reads .*Settings.scale, which may have changed by then"),
        ("OwnApply.apply(F.gelu(x))", "a backward reads .*Settings.scale, which may have changed by then"),
        ("Prints.apply(F.gelu(x))", "print"),
    ],
)
def test_what_a_backward_does_that_a_region_cannot(result, reason, ran):
    patched = patched_as(made(result))
    (refusal,) = {str(r) for r in type(patched).__fastlayers_region__.refused.values()}
    assert re.search(reason, refusal)
    assert not ran

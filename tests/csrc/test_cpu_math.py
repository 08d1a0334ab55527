"""exp, tanh, log and the normal distribution on vectors (csrc/common/vector_math.h), through the activations."""

from __future__ import annotations

import pytest
import torch

from fastlayers import backends, functional
from fastlayers.ops.activations import ACTIVATIONS

pytestmark = pytest.mark.skipif(
    backends.problem("cpu", torch.device("cpu")) is not None, reason="csrc is not built here"
)

#: Every exponent of float32 that an activation does not turn into 0 or itself, and 0 from both sides.
RANGE = torch.cat(
    (torch.linspace(-110, 110, 2**18), torch.linspace(-1, 1, 2**18), torch.logspace(-40, 2, 2**16) * 0.99)
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("act", [name for name in ACTIVATIONS if name is not None])
def test_error_over_the_range(act: str, dtype: torch.dtype) -> None:
    """Within three roundings, or 1e-7 of float32 where values cancel. A gradient has torch's 1 - sigmoid: 16 of them.

    The polynomials for 16 bits are within 4e-5, which is less than a rounding but where gelu's gradient is 0.
    """
    x = RANGE.to(dtype).requires_grad_()
    exact_x = x.detach().double().requires_grad_()
    exact = ACTIVATIONS[act].function(exact_x)
    (exact_gradient,) = torch.autograd.grad(exact.sum(), exact_x)
    with backends.backend("cpu"):
        y = functional.bias_act(x, None, act)
        (gradient,) = torch.autograd.grad(y.sum(), x)
    eps = torch.finfo(dtype).eps
    least = {torch.float64: 1e-14, torch.float32: 1e-7}.get(dtype, 4e-5)
    for ours, wanted, roundings in ((y, exact, 3), (gradient, exact_gradient, 16)):
        error = (ours.detach().double() - wanted.detach()).abs()
        allowed = roundings * eps * wanted.detach().abs() + least
        worst = (error - allowed).argmax()
        assert (error <= allowed).all(), (x[worst].item(), ours[worst].item(), wanted[worst].item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("act", [name for name in ACTIVATIONS if name is not None])
def test_ends_of_the_range(act: str, dtype: torch.dtype) -> None:
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e30, -1e30] * 5, dtype=dtype)
    with backends.backend("cpu"):
        ours = functional.bias_act(x, None, act)
    exact = ACTIVATIONS[act].function(x.double())  # torch's own gelu makes NaN of infinity in float32
    torch.testing.assert_close(ours, exact.to(dtype), equal_nan=True)

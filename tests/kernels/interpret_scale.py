"""The Triton kernel that linear_cross_entropy scales its gradients with, in the interpreter, against float64."""

import pytest
import torch

from fastlayers.kernels.elementwise import scale_
from tests.kernels.interpreted import DTYPES, assert_near, tolerances


@pytest.mark.parametrize("factor", [1.0, -0.3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 5000])
def test_scale(size, dtype, factor):
    x = torch.randn(size).to(dtype)
    expected, by = x.clone(), torch.tensor(factor, dtype=torch.promote_types(dtype, torch.float32))
    scale_(x, by)
    assert_near(tolerances(1e-6, 1e-3, 1.6e-2, 1e-14), x, expected.double() * by.double(), dtype, magnitude=1.0)

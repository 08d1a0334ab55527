"""The kernel of the pointwise convolution's backward in Triton's interpreter. Run by test_kernels.py.

In float16: the interpreter multiplies matrices of bfloat16 as the integers that hold their bits.
"""

import pytest
import torch
import torch.nn.functional as F

from fastlayers.kernels.convolution import pointwise_backward


@pytest.mark.parametrize("shape", [(1, 64, 9, 15, 64), (2, 130, 5, 7, 72), (1, 13, 3, 3, 40), (1, 300, 2, 2, 8)])
def test_product_and_sum(shape):
    dtype = torch.float16
    n, channels, height, width, wanted = shape
    torch.manual_seed(0)
    dy, other = (
        torch.randn(n, c, height, width).to(dtype).contiguous(memory_format=torch.channels_last)
        for c in (wanted, channels)
    )
    weight = torch.randn(wanted, channels, 1, 1).to(dtype)
    expected = F.conv_transpose2d(dy.double(), weight.double()) + other.double()
    found = pointwise_backward(dy, weight, other)
    assert found.dtype == dtype
    assert found.is_contiguous(memory_format=torch.channels_last)
    scale = expected.abs().max()
    assert (found - expected).abs().max() <= torch.finfo(dtype).eps * scale

"""The linear layer."""

from __future__ import annotations

from torch import Tensor

from fastlayers.ops import linear as _linear


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    r"""A linear layer whose backward sums the gradient of the bias at the memory bandwidth.

    .. math:: y = x W^T + b

    Stands for :func:`torch.nn.functional.linear`. Torch computes the result and the gradients of ``input`` and
    ``weight``, which are the same to the bit. The kernel replaces the sum over the rows of the incoming gradient, which
    torch reads at a fifth to a quarter of the memory bandwidth.

    Under autocast with float32 parameters the result is torch's to the bit, too, and the layer is one node of autograd.
    The gradients of the parameters leave the product and the sum in float32, where torch rounds them to 16 bits.

    The rows of a 16-bit result with a vocabulary like 50257 do not all begin at a multiple of 16 bytes, for which
    cuBLAS has only slow kernels. From 4096 features and some hundred rows on, the result is then a product for each
    kind of row, of the columns that are aligned there, and one of the few columns at the ends. The backward makes a
    copy of the gradient in aligned rows, which is as large as the result.

    Args:
        input: (..., in_features). The kernel takes contiguous gradients of two dimensions or more, but not of float32,
            where torch's sum has the smaller error.
        weight: (out_features, in_features).
        bias: (out_features,), or None.

    Returns:
        (..., out_features). Without autocast and below 2**19 elements torch's sum is as fast, and an unforced call is
        torch's throughout.

    Keeps: input and weight, as torch does; under autocast their casts.

    Raises:
        RuntimeError: under autocast, the backward is to be differentiated, and a parameter changed after the forward.
    """
    return _linear.linear(input, weight, bias)

"""Fused operations as functions, with signatures after :mod:`torch.nn.functional`.

Each computes what the torch composition in its docstring computes, in the same shape, dtype, memory format and
autocast behaviour, and falls back to that composition wherever no kernel applies. What an op keeps for its backward is
said under *Keeps*; double backward, ``torch.func`` transforms and ``torch.compile`` work on all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastlayers.ops import elementwise as _elementwise
from fastlayers.ops import softmax as _softmax

__all__ = ["add_relu", "log_softmax", "mul", "relu_add", "softmax"]


def softmax(
    x: Tensor,
    dim: int = -1,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    r"""softmax(x·scale + mask) along one dimension, reading and writing the scores once.

    .. math:: y_i = \frac{\exp(s_i)}{\sum_j \exp(s_j)}, \qquad s = x \cdot \text{scale} + \text{mask}

    Stands for ``F.softmax(x * scale + mask, dim, dtype=dtype)``.

    Args:
        x: scores of any shape; kernels take float16, bfloat16, float32 and float64.
        dim: the dimension that sums to one.
        scale: a number that multiplies x, as attention's 1/sqrt(d).
        mask: broadcasts against x. Boolean: True takes part, False is minus infinity, as in
            :func:`torch.nn.functional.scaled_dot_product_attention`. Otherwise it is added. A row with nothing left is
            NaN.
        dtype: of the result, and of the computation where wider; as :func:`torch.nn.functional.softmax` has it.

    Returns:
        A contiguous tensor. Under autocast float32, as torch gives it.

    Keeps: the result; of a boolean mask, or one that needs a gradient, a reference.

    Raises:
        TypeError: scale is not a number.
    """
    return _softmax.softmax(x, dim, scale, mask, dtype, False)


def log_softmax(
    x: Tensor,
    dim: int = -1,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    r"""log(softmax(x·scale + mask)) along one dimension, without the softmax in between.

    .. math:: y_i = s_i - \log \sum_j \exp(s_j), \qquad s = x \cdot \text{scale} + \text{mask}

    Stands for ``F.log_softmax(x * scale + mask, dim, dtype=dtype)``. Arguments, result, what is kept and errors are
    those of :func:`softmax`.
    """
    return _softmax.softmax(x, dim, scale, mask, dtype, True)


def relu_add(x: Tensor, y: Tensor, bias: float | Tensor = 0.0) -> Tensor:
    """relu(x) + y + bias in one pass.

    Stands for ``torch.relu(x) + y + bias``, rounded once instead of twice.

    Args:
        x, y: tensors that broadcast against each other; the kernels take one shape and one floating dtype.
        bias: a number, or a tensor that broadcasts against the sum; it gets its gradient.

    Keeps: one bit an element, where x needs a gradient.
    """
    return _elementwise.relu_add(x, y, bias)


def add_relu(x: Tensor, y: Tensor) -> Tensor:
    """relu(x + y) in one pass: how a residual block ends.

    Stands for ``torch.relu(x + y)``.

    Args:
        x, y: tensors that broadcast against each other; the kernels take one shape and one floating dtype.

    Keeps: one bit an element. x and y get the same gradient tensor.
    """
    return _elementwise.add_relu(x, y)


def mul(x: Tensor, y: Tensor) -> Tensor:
    """x·y, with both gradients from one kernel.

    Stands for ``x * y``. Where y broadcasts along x (a per-channel or per-row factor, squeeze-and-excite), the sum for
    its gradient is made in the same pass, in float32.

    Args:
        x, y: tensors that broadcast against each other; the kernels take one floating dtype.

    Keeps: x and y, as torch does.
    """
    return _elementwise.mul(x, y)

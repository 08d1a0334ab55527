"""Products and sums where the branches of a network meet."""

from __future__ import annotations

import torch
from torch import Tensor

from fastlayers.ops import elementwise as _elementwise


def relu_add(x: Tensor, y: Tensor, bias: float | Tensor = 0.0) -> Tensor:
    r"""relu(x) + y + bias in one pass.

    .. math:: z = \max(x, 0) + y + \text{bias}

    Stands for ``torch.relu(x) + y + bias``, rounded once instead of twice.

    Args:
        x, y: tensors that broadcast against each other; the kernels take one shape and one dtype.
        bias: a number, or a tensor that broadcasts against the sum and may need a gradient.

    Keeps: one bit an element, where x needs a gradient.
    """
    return _elementwise.relu_add(x, y, bias)


def add_relu(x: Tensor, y: Tensor) -> Tensor:
    r"""relu(x + y) in one pass: the end of a residual block.

    .. math:: z = \max(x + y, 0)

    Stands for ``torch.relu(x + y)``. Takes the tensors that :func:`relu_add` takes.

    Keeps: one bit an element. x and y get the same gradient tensor.
    """
    return _elementwise.add_relu(x, y)


def mul(input: Tensor, other: Tensor | float, *, out: Tensor | None = None) -> Tensor:
    r"""input·other, with both gradients from one kernel.

    .. math:: z = \text{input} \cdot \text{other}, \qquad
        \frac{\partial L}{\partial\, \text{input}} = \text{other}\, \frac{\partial L}{\partial z}, \qquad
        \frac{\partial L}{\partial\, \text{other}} = \text{input}\, \frac{\partial L}{\partial z}

    Stands for :func:`torch.mul`. Where an operand broadcasts (a factor of each channel or row, as in
    squeeze-and-excite), the same pass sums its gradient, in float32.

    Args:
        input, other: tensors that broadcast against each other, other also a number; the kernels take one dtype.
        out: a tensor for the result, which torch then computes.

    Keeps: input and other, as torch does.
    """
    if out is not None:
        return torch.mul(input, other, out=out)
    return _elementwise.mul(input, other)  # type: ignore[arg-type]

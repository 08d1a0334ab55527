"""Squeeze-and-excite."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fastlayers.ops import squeeze_excite as _squeeze_excite


def squeeze_excite(x: Tensor, gate: Callable[[Tensor], Tensor]) -> Tensor:
    r"""x·gate(mean of x over space), with one gradient of x from both of its uses.

    .. math:: y_{n,c} = x_{n,c} \cdot \text{gate}(m)_{n,c}, \qquad m_{n,c} = \frac{1}{HW} \sum_{h,w} x_{n,c,h,w}

    Stands for ``x * gate(x.mean((2, 3), keepdim=True))``, the squeeze-and-excite of EfficientNet. The backward reads dy
    and x for the gradient of the gate, then reads dy again and writes dx. Autograd writes the gradients of the product
    and of the mean, and then their sum.

    Args:
        x: (N, C, H, W); the kernels take contiguous and channels_last images.
        gate: maps the mean, (N, C, 1, 1), to a factor of that shape; the kernels take a factor of x's dtype.

    Keeps: x, the factor, and what ``gate`` keeps.
    """
    return _squeeze_excite.squeeze_excite(x, gate)

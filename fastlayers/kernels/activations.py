"""The activations that follow a norm: value and derivative, by the codes that csrc/activations.cuh has too.

0 none, 1 relu, 2 silu, 3 gelu (erf), 4 gelu_tanh, 5 hardswish, 6 relu6, 7 leaky_relu(0.01). NaN stays NaN, and where
the derivative has a step it takes the side that torch takes.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _sigmoid(z):
    return 1.0 / (1.0 + tl.exp(-z))


@triton.jit
def _sigmoid_pair(z):
    """sigmoid(z) and 1 - sigmoid(z), the latter without its cancellation."""
    e = tl.exp(-z)
    s = 1.0 / (1.0 + e)
    return s, tl.where(z > 0, e * s, 1.0 - s)


@triton.jit
def _normal_cdf(z):
    return 0.5 * (1.0 + tl.erf(z * 0.7071067811865475244))


@triton.jit
def _twice_inner(z):
    """Twice what gelu_tanh takes the tanh of: (1 + tanh(u)) / 2 = sigmoid(2u)."""
    return 1.5957691216057307 * (z + 0.044715 * z * z * z)


@triton.jit
def activate(z, ACT: tl.constexpr):
    """act(z)."""
    if ACT == 1:
        z = tl.where(z <= 0, 0.0, z)
    elif ACT == 2:
        z = z * _sigmoid(z)
    elif ACT == 3:
        z = z * _normal_cdf(z)
    elif ACT == 4:
        z = z * _sigmoid(_twice_inner(z))
    elif ACT == 5:
        gate = tl.where(z <= -3, 0.0, tl.where(z >= 3, 6.0, z + 3.0))
        z = z * gate * 0.16666666666666666
    elif ACT == 6:
        z = tl.where(z <= 0, 0.0, tl.where(z >= 6, 6.0, z))
    elif ACT == 7:
        z = tl.where(z > 0, z, z * 0.01)
    return z


@triton.jit
def activate_backward(dy, z, ACT: tl.constexpr):
    """dy * act'(z)."""
    if ACT == 1:
        dy = tl.where(z <= 0, 0.0, dy)
    elif ACT == 2:
        s, rest = _sigmoid_pair(z)
        dy = dy * s * (1.0 + z * rest)
    elif ACT == 3:
        dy = dy * (_normal_cdf(z) + z * 0.3989422804014327 * tl.exp(-0.5 * z * z))
    elif ACT == 4:
        s, rest = _sigmoid_pair(_twice_inner(z))
        dy = dy * (s + z * s * rest * (1.5957691216057307 + 0.2140644488178007 * z * z))
    elif ACT == 5:
        dy = tl.where(z <= -3, 0.0, tl.where(z < 3, dy * (z * 0.3333333333333333 + 0.5), dy))
    elif ACT == 6:
        dy = tl.where((z <= 0) | (z >= 6), 0.0, dy)
    elif ACT == 7:
        dy = tl.where(z > 0, dy, dy * 0.01)
    return dy

"""The activations: value and derivative, by the codes that csrc/common/activations.cuh has too.

0 none, 1 relu, 2 silu, 3 gelu (erf), 4 gelu_tanh, 5 hardswish, 6 relu6, 7 leaky_relu, 8 quick_gelu, 9 relu2, 10 mish,
11 sigmoid, 12 tanh, 13 elu, 14 softplus. NaN stays NaN, and where the derivative has a step it takes the side that
torch takes. ``first`` and ``second`` are an activation's parameters in torch's order; without them, torch's defaults.
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


# For what is rounded to 16 bits: relative errors below 2^-16. In assembly, since Triton's exp and division also see to
# numbers below 2^-126, in more instructions than all of this has. The interpreter has no assembly.

if triton.knobs.runtime.interpret:

    @triton.jit
    def fast_exp(z):
        return tl.exp(z)

    @triton.jit
    def fast_reciprocal(z):
        return 1.0 / z

else:

    @triton.jit
    def fast_exp(z):
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [z * 1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def fast_reciprocal(z):
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def fast_sigmoid(z):
    return fast_reciprocal(1.0 + fast_exp(-z))


@triton.jit
def fast_normal_cdf(z):
    """``gaussian_cdf`` of csrc/common/activations.cuh tells of the fit."""
    t = fast_reciprocal(tl.fma(tl.abs(z), 0.3075, 1.0))
    p = tl.fma(tl.fma(tl.fma(t, -0.07553515, 0.19118185), t, 0.0059100483), t, 0.13693324)
    p = tl.fma(tl.fma(p, t, 0.1185789), t, 0.12293059)
    tail = fast_exp(-0.5 * z * z) * (t * p)
    return tl.where(z > 0, 1.0 - tail, tail)


@triton.jit
def twice_inner(z):
    """Twice what gelu_tanh takes the tanh of: (1 + tanh(u)) / 2 = sigmoid(2u)."""
    return 1.5957691216057307 * (z + 0.044715 * z * z * z)


@triton.jit
def _expm1(x):
    """exp(x) - 1 for x <= 0 without its cancellation (Kahan): the logarithm of the rounded exponential corrects it."""
    u = tl.exp(x)
    less = u - 1.0
    return tl.where(less == 0, x, tl.where(x < -0.5, less, less * x / tl.log(u)))


@triton.jit
def _log1p(x):
    """log(1 + x) for x >= 0, by the same device."""
    u = 1.0 + x
    less = u - 1.0
    return tl.where(less == 0, x, tl.where(less == x, tl.log(u), tl.log(u) * x / less))


@triton.jit
def tanh(z):
    a = tl.abs(z)
    e = _expm1(-2.0 * tl.minimum(a, 1.0))
    t = tl.where(a < 0.5, -e / (e + 2.0), 1.0 - 2.0 / (tl.exp(2.0 * a) + 1.0))  # exact near 0, and near 1
    return tl.where(z < 0, -t, t)


@triton.jit
def _mish_parts(z):
    """e = exp(z) and e * (e + 2), of which mish's tanh(softplus(z)) is n / (n + 2): from 20 on it is 1."""
    e = tl.exp(tl.where(z < 20, z, 20.0))
    return e, e * (e + 2.0)


@triton.jit
def activate(z, ACT: tl.constexpr, first=None, second=None):
    """act(z)."""
    if ACT == 1:
        z = tl.where(z <= 0, 0.0, z)
    elif ACT == 2:
        z = z * _sigmoid(z)
    elif ACT == 3:
        z = z * _normal_cdf(z)
    elif ACT == 4:
        z = z * _sigmoid(twice_inner(z))
    elif ACT == 5:
        gate = tl.where(z <= -3, 0.0, tl.where(z >= 3, 6.0, z + 3.0))
        z = z * gate * 0.16666666666666666
    elif ACT == 6:
        z = tl.where(z <= 0, 0.0, tl.where(z >= 6, 6.0, z))
    elif ACT == 7:
        z = tl.where(z > 0, z, z * (0.01 if first is None else first))
    elif ACT == 8:
        z = z * _sigmoid(1.702 * z)
    elif ACT == 9:
        z = tl.where(z <= 0, 0.0, z * z)
    elif ACT == 10:
        _, n = _mish_parts(z)
        z = z * (n / (n + 2.0))
    elif ACT == 11:
        z = _sigmoid(z)
    elif ACT == 12:
        z = tanh(z)
    elif ACT == 13:
        z = tl.where(z > 0, z, _expm1(z) * (1.0 if first is None else first))
    elif ACT == 14:
        beta = 1.0 if first is None else first
        z = tl.where(z * beta > (20.0 if second is None else second), z, _log1p(tl.exp(z * beta)) / beta)
    return z


@triton.jit
def activate_backward(dy, z, ACT: tl.constexpr, first=None, second=None):
    """dy * act'(z)."""
    if ACT == 1:
        dy = tl.where(z <= 0, 0.0, dy)
    elif ACT == 2:
        s, rest = _sigmoid_pair(z)
        dy = dy * s * (1.0 + z * rest)
    elif ACT == 3:
        dy = dy * (_normal_cdf(z) + z * 0.3989422804014327 * tl.exp(-0.5 * z * z))
    elif ACT == 4:
        s, rest = _sigmoid_pair(twice_inner(z))
        dy = dy * (s + z * s * rest * (1.5957691216057307 + 0.2140644488178007 * z * z))
    elif ACT == 5:
        dy = tl.where(z <= -3, 0.0, tl.where(z < 3, dy * (z * 0.3333333333333333 + 0.5), dy))
    elif ACT == 6:
        dy = tl.where((z <= 0) | (z >= 6), 0.0, dy)
    elif ACT == 7:
        dy = tl.where(z > 0, dy, dy * (0.01 if first is None else first))
    elif ACT == 8:
        s, rest = _sigmoid_pair(1.702 * z)
        dy = dy * s * (1.0 + 1.702 * z * rest)
    elif ACT == 9:
        dy = tl.where(z <= 0, 0.0, 2.0 * dy * z)
    elif ACT == 10:
        e, n = _mish_parts(z)
        slope = tl.where(z < 20, 4.0 * e * (e + 1.0) / (n + 2.0) / (n + 2.0), 0.0)
        dy = dy * (n / (n + 2.0) + z * slope)
    elif ACT == 11:
        s = _sigmoid(z)
        dy = dy * (1.0 - s) * s
    elif ACT == 12:
        t = tanh(z)
        dy = dy * (1.0 - t * t)
    elif ACT == 13:
        dy = tl.where(z <= 0, dy * (1.0 if first is None else first) * tl.exp(z), dy)
    elif ACT == 14:
        scaled = z * (1.0 if first is None else first)
        e = tl.exp(scaled)
        dy = tl.where(scaled > (20.0 if second is None else second), dy, dy * e / (e + 1.0))
    return dy

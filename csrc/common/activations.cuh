// The activations, and their gradients, in the compute type A. NaN and infinities as torch's own have them.
//
// A kernel takes one as a template argument where that pays, the others as Act::run_time and an argument: one kernel for all of
// them, which chooses once for a word, not for every element. Only the activation itself belongs into that choice: all that it
// surrounds is compiled once for each activation. The norms' kernels take the first kNormActs, those of bias_act.cu and glu.cu all.
//
// FAST is for 16-bit results: the hardware's exp2 and reciprocal, and a short polynomial for the normal distribution, whose errors
// stay far below theirs.
#pragma once

#include "act.h"
#include "device.cuh"

namespace fastlayers {

// Those that torch has where none are given.
template <Act ACT, typename A>
__device__ __forceinline__ ActParameters<A> default_parameters() {
  if constexpr (ACT == Act::leaky_relu) return {A(0.01), A(0)};
  else if constexpr (ACT == Act::softplus) return {A(1), A(20)};
  else return {A(1), A(0)};
}

__device__ __noinline__ inline double called_expm1(double v) { return expm1(v); }
__device__ __noinline__ inline double called_log1p(double v) { return log1p(v); }
__device__ __noinline__ inline double called_erf(double v) { return erf(v); }

// exp(v)
template <bool FAST, typename A>
__device__ __forceinline__ A act_exp(A v) {
  if constexpr (std::is_same_v<A, double>) {
    return called_exp(v);
  } else if constexpr (FAST) {
    float e;  // .ftz: without the scaling that results below 2^-126 would need
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(v * 1.44269504088896340736f));
    return e;
  } else {
    return expf(v);
  }
}

template <bool FAST, typename A>
__device__ __forceinline__ A reciprocal(A v) {
  if constexpr (FAST && std::is_same_v<A, float>) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
  } else {
    return A(1) / v;
  }
}

// 1 / (1 + exp(-v))
template <bool FAST, typename A>
__device__ __forceinline__ A sigmoid(A v) { return reciprocal<FAST>(A(1) + act_exp<FAST>(-v)); }

// The probability that a normal variable is below z; bell is exp(-z²/2), which the density has too.
//
// FAST: bell·t·P(t) with t = 1/(1 + 0.3075·|z|) is the tail beyond |z|, with a relative error below 5e-6 down to z = -5 and 1.3e-5
// down to where float32 ends (a minimax fit of P; erff keeps absolute errors, and loses the tail to cancellation).
template <bool FAST, typename A>
__device__ __forceinline__ A gaussian_cdf(A z, [[maybe_unused]] A bell) {
  if constexpr (std::is_same_v<A, double>) {
    return 0.5 * (1.0 + called_erf(z * 0.70710678118654752440));
  } else if constexpr (FAST) {
    const float t = reciprocal<true>(fmaf(fabsf(z), 0.3075f, 1.f));
    float p = fmaf(t, -0.07553515f, 0.19118185f);
    p = fmaf(p, t, 0.0059100483f);
    p = fmaf(p, t, 0.13693324f);
    p = fmaf(p, t, 0.1185789f);
    p = fmaf(p, t, 0.12293059f);
    const float tail = bell * (t * p);
    return z > 0.f ? 1.f - tail : tail;
  } else {
    return 0.5f * (1.f + erff(z * 0.70710678118654752440f));
  }
}

// exp(v) - 1 for v up to 0, and log(1 + e) for e from 0. FAST: near 0, where the difference or the sum would cancel, the first terms
// of the series; relative errors below 2^-17.
template <bool FAST, typename A>
__device__ __forceinline__ A act_expm1(A v) {
  if constexpr (FAST && std::is_same_v<A, float>) {
    const float series = v * fmaf(v, fmaf(v, fmaf(v, 1.f / 24.f, 1.f / 6.f), 0.5f), 1.f);
    return v > -0.0625f ? series : act_exp<true>(v) - 1.f;
  } else {
    if constexpr (std::is_same_v<A, double>) return called_expm1(v);
    else return expm1f(v);
  }
}
template <bool FAST, typename A>
__device__ __forceinline__ A act_log1p(A e) {
  if constexpr (FAST && std::is_same_v<A, float>) {
    const float series = e * fmaf(e, fmaf(e, 1.f / 3.f, -0.5f), 1.f);
    return e < 0.0078125f ? series : __log2f(1.f + e) * 0.69314718055994530942f;
  } else {
    if constexpr (std::is_same_v<A, double>) return called_log1p(e);
    else return log1pf(e);
  }
}

// exp(-z²/2)
template <bool FAST, typename A>
__device__ __forceinline__ A gaussian_bell(A z) { return act_exp<FAST>(A(-0.5) * z * z); }

// mish is z·tanh(softplus(z)), and the tanh is n / (n + 2) for n = e·(e + 2), e = exp(z). From 20 on it is 1.
template <bool FAST, typename A>
__device__ __forceinline__ A mish_exp(A z) { return act_exp<FAST>(z < A(20) ? z : A(20)); }

// tanh's form of gelu is z·sigmoid(2u), u = sqrt(2/pi)·(z + 0.044715·z³).
template <typename A>
__device__ __forceinline__ A gelu_tanh_2u(A z) {
  return A(1.59576912160573071176) * (z + A(0.044715) * z * z * z);
}
template <typename A>
__device__ __forceinline__ A gelu_tanh_2u_derivative(A z) {
  return A(1.59576912160573071176) * (A(1) + A(3 * 0.044715) * z * z);
}

// act(z)
template <Act ACT, bool FAST, typename A>
__device__ __forceinline__ A act_value(A z, [[maybe_unused]] ActParameters<A> p = default_parameters<ACT, A>()) {
  if constexpr (ACT == Act::relu) {
    return z <= A(0) ? A(0) : z;
  } else if constexpr (ACT == Act::silu) {
    if constexpr (FAST) return z * sigmoid<true>(z);
    else return z / (A(1) + act_exp<false>(-z));
  } else if constexpr (ACT == Act::gelu) {
    return z * gaussian_cdf<FAST>(z, gaussian_bell<FAST>(z));
  } else if constexpr (ACT == Act::gelu_tanh) {
    return z * sigmoid<FAST>(gelu_tanh_2u(z));
  } else if constexpr (ACT == Act::hardswish) {
    const A raised = z + A(3);
    return z * (raised <= A(0) ? A(0) : raised >= A(6) ? A(6) : raised) * A(1.0 / 6.0);
  } else if constexpr (ACT == Act::relu6) {
    return z <= A(0) ? A(0) : z >= A(6) ? A(6) : z;
  } else if constexpr (ACT == Act::leaky_relu) {
    return z > A(0) ? z : z * p.first;
  } else if constexpr (ACT == Act::quick_gelu) {
    return z * sigmoid<FAST>(A(1.702) * z);
  } else if constexpr (ACT == Act::relu2) {
    return z <= A(0) ? A(0) : z * z;
  } else if constexpr (ACT == Act::mish) {
    const A e = mish_exp<FAST>(z), n = e * (e + A(2));
    return z * (n * reciprocal<FAST>(n + A(2)));
  } else if constexpr (ACT == Act::sigmoid) {
    return sigmoid<FAST>(z);
  } else if constexpr (ACT == Act::tanh) {
    return hyperbolic_tangent(z);
  } else if constexpr (ACT == Act::elu) {
    return z > A(0) ? z : act_expm1<FAST>(z) * p.first;
  } else if constexpr (ACT == Act::softplus) {
    const A scaled = z * p.first;
    return scaled > p.second ? z : act_log1p<FAST>(act_exp<FAST>(scaled)) * reciprocal<FAST>(p.first);
  } else {
    static_assert(ACT == Act::none);
    return z;
  }
}

// g·act'(z). Where the derivative is 0 or 1 by cases, g is chosen and not multiplied: 0 for an infinite g, as by torch.
template <Act ACT, bool FAST, typename A>
__device__ __forceinline__ A act_gradient(A g, A z, [[maybe_unused]] ActParameters<A> p = default_parameters<ACT, A>()) {
  if constexpr (ACT == Act::relu) {
    return z <= A(0) ? A(0) : g;
  } else if constexpr (ACT == Act::silu) {
    const A s = sigmoid<FAST>(z);
    return g * s * (A(1) + z * (A(1) - s));
  } else if constexpr (ACT == Act::gelu) {
    const A bell = gaussian_bell<FAST>(z);
    return g * (gaussian_cdf<FAST>(z, bell) + z * (bell * A(0.39894228040143267794)));
  } else if constexpr (ACT == Act::gelu_tanh) {
    const A e = act_exp<FAST>(-gelu_tanh_2u(z)), s = reciprocal<FAST>(A(1) + e);
    const A rest = z > A(0) ? e * s : A(1) - s;  // 1 - s without its cancellation
    return g * (s + z * s * rest * gelu_tanh_2u_derivative(z));
  } else if constexpr (ACT == Act::hardswish) {
    return z <= A(-3) ? A(0) : z < A(3) ? g * (z / A(3) + A(0.5)) : g;
  } else if constexpr (ACT == Act::relu6) {
    return z <= A(0) || z >= A(6) ? A(0) : g;
  } else if constexpr (ACT == Act::leaky_relu) {
    return z > A(0) ? g : g * p.first;
  } else if constexpr (ACT == Act::quick_gelu) {
    const A scaled = A(1.702) * z, s = sigmoid<FAST>(scaled);
    return g * s * (A(1) + scaled * (A(1) - s));
  } else if constexpr (ACT == Act::relu2) {
    return z <= A(0) ? A(0) : A(2) * g * z;
  } else if constexpr (ACT == Act::mish) {
    const A e = mish_exp<FAST>(z), n = e * (e + A(2)), r = reciprocal<FAST>(n + A(2));
    const A slope = z < A(20) ? A(4) * e * (e + A(1)) * r * r : A(0);
    return g * (n * r + z * slope);
  } else if constexpr (ACT == Act::sigmoid) {
    const A s = sigmoid<FAST>(z);
    return g * (A(1) - s) * s;
  } else if constexpr (ACT == Act::tanh) {
    const A t = hyperbolic_tangent(z);
    return g * (A(1) - t * t);
  } else if constexpr (ACT == Act::elu) {
    return z <= A(0) ? g * p.first * act_exp<FAST>(z) : g;
  } else if constexpr (ACT == Act::softplus) {
    const A scaled = z * p.first, e = act_exp<FAST>(scaled);
    return scaled > p.second ? g : g * e * reciprocal<FAST>(e + A(1));
  } else {
    static_assert(ACT == Act::none);
    return g;
  }
}

// Calls f(std::integral_constant<Act, ...>{}) with the activation: ACT, or `act` where ACT is Act::run_time, of which all
// threads have the same. ALL: of all of them, not of the norms' only.
template <Act ACT, bool ALL = false, typename F>
__device__ __forceinline__ void with_act([[maybe_unused]] Act act, F&& f) {
  if constexpr (ACT != Act::run_time) {
    f(std::integral_constant<Act, ACT>{});
  } else {
    if constexpr (ALL) {
      switch (act) {
        case Act::quick_gelu: return f(std::integral_constant<Act, Act::quick_gelu>{});
        case Act::relu2: return f(std::integral_constant<Act, Act::relu2>{});
        case Act::mish: return f(std::integral_constant<Act, Act::mish>{});
        case Act::sigmoid: return f(std::integral_constant<Act, Act::sigmoid>{});
        case Act::tanh: return f(std::integral_constant<Act, Act::tanh>{});
        case Act::elu: return f(std::integral_constant<Act, Act::elu>{});
        case Act::softplus: return f(std::integral_constant<Act, Act::softplus>{});
        default: break;
      }
    }
    switch (act) {
      case Act::relu: return f(std::integral_constant<Act, Act::relu>{});
      case Act::silu: return f(std::integral_constant<Act, Act::silu>{});
      case Act::gelu: return f(std::integral_constant<Act, Act::gelu>{});
      case Act::gelu_tanh: return f(std::integral_constant<Act, Act::gelu_tanh>{});
      case Act::hardswish: return f(std::integral_constant<Act, Act::hardswish>{});
      case Act::relu6: return f(std::integral_constant<Act, Act::relu6>{});
      case Act::leaky_relu: return f(std::integral_constant<Act, Act::leaky_relu>{});
      default: return f(std::integral_constant<Act, Act::none>{});
    }
  }
}

// Calls f with the activations that have a loop of their own in a kernel of any, the usual ones of its norm, and with Act::run_time for
// the others. LOOPS: whether there are such loops.
template <bool LOOPS, typename F>
__device__ __forceinline__ void with_loop([[maybe_unused]] Act act, F&& f) {
  if constexpr (LOOPS) {
    if (act == Act::none) return f(std::integral_constant<Act, Act::none>{});
    if (act == Act::silu) return f(std::integral_constant<Act, Act::silu>{});
  }
  f(std::integral_constant<Act, Act::run_time>{});
}

// On the host: calls f with what an elementwise kernel is compiled for, the activations of language models' MLPs in 16 bits, where
// every instruction counts, and Act::run_time for all others. WORDS: whether the kernel moves whole words, or single elements.
template <typename T, bool WORDS = true, typename F>
void with_compiled(Act act, F&& f) {
  if constexpr (sizeof(T) == 2 && WORDS) {
    switch (act) {
      case Act::relu: return f(std::integral_constant<Act, Act::relu>{});
      case Act::silu: return f(std::integral_constant<Act, Act::silu>{});
      case Act::gelu: return f(std::integral_constant<Act, Act::gelu>{});
      case Act::gelu_tanh: return f(std::integral_constant<Act, Act::gelu_tanh>{});
      default: break;
    }
  }
  f(std::integral_constant<Act, Act::run_time>{});
}

}  // namespace fastlayers

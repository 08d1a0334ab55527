// The activations, and their gradients, in the compute type A.
//
// A kernel takes one as a template argument where that pays, the others as Act::run_time and an argument: one kernel for all of
// them, which chooses once for a word, not for every element. Only the activation itself belongs into that choice: all that it
// surrounds is compiled once for each activation. The norms' kernels take the first kNormActs, those of bias_act.cu and glu.cu all.
//
// FAST is for 16-bit results: the hardware's exp2 and reciprocal, and a short polynomial for the normal distribution, whose errors
// stay far below theirs.
#pragma once

#include "act_formulas.h"
#include "device.cuh"

namespace fastlayers {

__device__ __noinline__ inline double called_expm1(double v) { return expm1(v); }
__device__ __noinline__ inline double called_log1p(double v) { return log1p(v); }
__device__ __noinline__ inline double called_erf(double v) { return erf(v); }

namespace {

template <bool FAST, typename A>
struct ActMath {
  __device__ __forceinline__ static A exp(A v) {
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
  __device__ __forceinline__ static A exp_beside_1(A v) { return exp(v); }
  __device__ __forceinline__ static A third(A v) { return v / A(3); }
  __device__ __forceinline__ static A tanh(A v) { return hyperbolic_tangent(v); }

  __device__ __forceinline__ static A reciprocal(A v) {
    if constexpr (FAST && std::is_same_v<A, float>) {
      float r;
      asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
      return r;
    } else {
      return A(1) / v;
    }
  }
  __device__ __forceinline__ static A quotient(A u, A v) {
    if constexpr (FAST) return u * reciprocal(v);
    else return u / v;
  }

  // 1 / (1 + exp(-v))
  __device__ __forceinline__ static A sigmoid(A v) { return reciprocal(A(1) + exp(-v)); }

  // exp(-z²/2)
  __device__ __forceinline__ static A gaussian_bell(A z) { return exp(A(-0.5) * z * z); }

  // The probability that a normal variable is below z; bell is exp(-z²/2), which the density has too.
  //
  // FAST: bell·t·P(t) with t = 1/(1 + 0.3075·|z|) is the tail beyond |z|, with a relative error below 5e-6 down to z = -5 and 1.3e-5
  // down to where float32 ends (a minimax fit of P; erff keeps absolute errors, and loses the tail to cancellation).
  __device__ __forceinline__ static A gaussian_cdf(A z, [[maybe_unused]] A bell) {
    if constexpr (std::is_same_v<A, double>) {
      return 0.5 * (1.0 + called_erf(z * 0.70710678118654752440));
    } else if constexpr (FAST) {
      const float t = reciprocal(fmaf(fabsf(z), 0.3075f, 1.f));
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
  __device__ __forceinline__ static A expm1(A v) {
    if constexpr (FAST && std::is_same_v<A, float>) {
      const float series = v * fmaf(v, fmaf(v, fmaf(v, 1.f / 24.f, 1.f / 6.f), 0.5f), 1.f);
      return v > -0.0625f ? series : exp(v) - 1.f;
    } else {
      if constexpr (std::is_same_v<A, double>) return called_expm1(v);
      else return expm1f(v);
    }
  }
  __device__ __forceinline__ static A log1p(A e) {
    if constexpr (FAST && std::is_same_v<A, float>) {
      const float series = e * fmaf(e, fmaf(e, 1.f / 3.f, -0.5f), 1.f);
      return e < 0.0078125f ? series : __log2f(1.f + e) * 0.69314718055994530942f;
    } else {
      if constexpr (std::is_same_v<A, double>) return called_log1p(e);
      else return log1pf(e);
    }
  }
};

template <Act ACT, bool FAST, typename A>
__device__ __forceinline__ A act_value(A z, ActParameters<A> p = default_parameters<A>(ACT)) { return value_of<ACT, FAST, A>(z, p); }
template <Act ACT, bool FAST, typename A>
__device__ __forceinline__ A act_gradient(A g, A z, ActParameters<A> p = default_parameters<A>(ACT)) {
  return gradient_of<ACT, FAST, A>(g, z, p);
}

// Calls f(std::integral_constant<Act, ...>{}) with the activation: ACT, or `act` where ACT is Act::run_time, of which all
// threads have the same. ALL: of all of them, not of the norms' only.
template <Act ACT, bool ALL = false, typename F>
__device__ __forceinline__ void with_act([[maybe_unused]] Act act, F&& f) {
  if constexpr (ACT != Act::run_time) f(std::integral_constant<Act, ACT>{});
  else with_constant_act<ALL>(act, f);
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

}  // namespace
}  // namespace fastlayers

// The activations that follow a norm, and their gradients, in the compute type A. NaN and infinities as torch's own have them.
//
// A kernel takes one as a template argument where that pays (none, relu), the others as Act::run_time and an argument: one kernel
// for all of them, which chooses once for the words that a thread holds, not for every element.
//
// FAST is for 16-bit results: the hardware's exp2 and reciprocal, whose errors stay far below theirs.
#pragma once

#include "device.cuh"

namespace fastlayers {

// run_time: of a kernel that takes any of them as an argument.
enum class Act : int { run_time = -1, none = 0, relu, silu, gelu, gelu_tanh, hardswish, relu6, leaky_relu };

constexpr int kActs = 8;
constexpr double kLeakySlope = 0.01;

inline Act act_of(int64_t act, const char* op) {
  STD_TORCH_CHECK(act >= 0 && act < kActs, "fastlayers::", op, ": expected act from 0 to ", kActs - 1, ", but got ", act);
  return static_cast<Act>(act);
}

// exp(v)
template <bool FAST, typename A>
__device__ __forceinline__ A act_exp(A v) {
  if constexpr (std::is_same_v<A, double>) {
    return exp(v);
  } else if constexpr (FAST) {
    return __expf(v);
  } else {
    return expf(v);
  }
}

template <bool FAST, typename A>
__device__ __forceinline__ A reciprocal(A v) {
  if constexpr (FAST && std::is_same_v<A, float>) return __fdividef(1.f, v);
  else return A(1) / v;
}

// 1 / (1 + exp(-v))
template <bool FAST, typename A>
__device__ __forceinline__ A sigmoid(A v) { return reciprocal<FAST>(A(1) + act_exp<FAST>(-v)); }

template <typename A>
__device__ __forceinline__ A gaussian_cdf(A z) {
  if constexpr (std::is_same_v<A, double>) return 0.5 * (1.0 + erf(z * 0.70710678118654752440));
  else return 0.5f * (1.f + erff(z * 0.70710678118654752440f));
}

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
__device__ __forceinline__ A act_value(A z) {
  if constexpr (ACT == Act::relu) {
    return z <= A(0) ? A(0) : z;
  } else if constexpr (ACT == Act::silu) {
    if constexpr (FAST) return z * sigmoid<true>(z);
    else return z / (A(1) + act_exp<false>(-z));
  } else if constexpr (ACT == Act::gelu) {
    return z * gaussian_cdf(z);
  } else if constexpr (ACT == Act::gelu_tanh) {
    return z * sigmoid<FAST>(gelu_tanh_2u(z));
  } else if constexpr (ACT == Act::hardswish) {
    const A raised = z + A(3);
    return z * (raised <= A(0) ? A(0) : raised >= A(6) ? A(6) : raised) * A(1.0 / 6.0);
  } else if constexpr (ACT == Act::relu6) {
    return z <= A(0) ? A(0) : z >= A(6) ? A(6) : z;
  } else if constexpr (ACT == Act::leaky_relu) {
    return z > A(0) ? z : z * A(kLeakySlope);
  } else {
    static_assert(ACT == Act::none);
    return z;
  }
}

// g·act'(z). Where the derivative is 0 or 1 by cases, g is chosen and not multiplied: 0 for an infinite g, as by torch.
template <Act ACT, bool FAST, typename A>
__device__ __forceinline__ A act_gradient(A g, A z) {
  if constexpr (ACT == Act::relu) {
    return z <= A(0) ? A(0) : g;
  } else if constexpr (ACT == Act::silu) {
    const A s = sigmoid<FAST>(z);
    return g * s * (A(1) + z * (A(1) - s));
  } else if constexpr (ACT == Act::gelu) {
    const A density = act_exp<FAST>(A(-0.5) * z * z) * A(0.39894228040143267794);
    return g * (gaussian_cdf(z) + z * density);
  } else if constexpr (ACT == Act::gelu_tanh) {
    const A e = act_exp<FAST>(-gelu_tanh_2u(z)), s = reciprocal<FAST>(A(1) + e);
    const A rest = z > A(0) ? e * s : A(1) - s;  // 1 - s without its cancellation
    return g * (s + z * s * rest * gelu_tanh_2u_derivative(z));
  } else if constexpr (ACT == Act::hardswish) {
    return z <= A(-3) ? A(0) : z < A(3) ? g * (z / A(3) + A(0.5)) : g;
  } else if constexpr (ACT == Act::relu6) {
    return z <= A(0) || z >= A(6) ? A(0) : g;
  } else if constexpr (ACT == Act::leaky_relu) {
    return z > A(0) ? g : g * A(kLeakySlope);
  } else {
    static_assert(ACT == Act::none);
    return g;
  }
}

// Calls f(std::integral_constant<Act, ...>{}) with the activation: ACT, or `act` where ACT is Act::run_time, of which all
// threads have the same.
template <Act ACT, typename F>
__device__ __forceinline__ void with_act([[maybe_unused]] Act act, F&& f) {
  if constexpr (ACT != Act::run_time) {
    f(std::integral_constant<Act, ACT>{});
  } else {
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

}  // namespace fastlayers

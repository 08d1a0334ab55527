// The formulas of the activations and of their gradients, the same on a CPU and on a GPU. NaN and infinities come out as from torch.
//
// A is the compute type, and V what is computed: A in a kernel for GPUs, a vector of A on a CPU. ActMath<FAST, A> has the functions that
// the formulas are written with. FAST: as precise as results of 16 bits need.
#pragma once

#include "act.h"

#ifdef __CUDACC__
#define FASTLAYERS_FORMULA __device__ __forceinline__
#else
#define FASTLAYERS_FORMULA FASTLAYERS_INLINE
#endif

namespace fastlayers {
namespace {

template <bool FAST, typename A>
struct ActMath;

// Those that torch has where none are given.
template <typename A>
FASTLAYERS_FORMULA ActParameters<A> default_parameters(Act act) {
  if (act == Act::leaky_relu) return {A(0.01), A(0)};
  if (act == Act::softplus) return {A(1), A(20)};
  return {A(1), A(0)};
}

// mish is z·tanh(softplus(z)), and the tanh is n / (n + 2) for n = e·(e + 2), e = exp(z). From 20 on it is 1.
template <bool FAST, typename A, typename V>
FASTLAYERS_FORMULA V mish_exp(V z) { return ActMath<FAST, A>::exp(z < A(20) ? z : A(20)); }

// tanh's form of gelu is z·sigmoid(2u), u = sqrt(2/pi)·(z + 0.044715·z³).
template <typename A, typename V>
FASTLAYERS_FORMULA V gelu_tanh_2u(V z) {
  return A(1.59576912160573071176) * (z + A(0.044715) * z * z * z);
}
template <typename A, typename V>
FASTLAYERS_FORMULA V gelu_tanh_2u_derivative(V z) {
  return A(1.59576912160573071176) * (A(1) + A(3 * 0.044715) * z * z);
}

// act(z)
template <Act ACT, bool FAST, typename A, typename V>
FASTLAYERS_FORMULA V value_of(V z, [[maybe_unused]] ActParameters<A> p) {
  using M = ActMath<FAST, A>;
  if constexpr (ACT == Act::relu) {
    return z <= A(0) ? A(0) : z;
  } else if constexpr (ACT == Act::silu) {
    return M::quotient(z, A(1) + M::exp_beside_1(-z));
  } else if constexpr (ACT == Act::gelu) {
    return z * M::gaussian_cdf(z, M::gaussian_bell(z));
  } else if constexpr (ACT == Act::gelu_tanh) {
    return z * M::sigmoid(gelu_tanh_2u<A>(z));
  } else if constexpr (ACT == Act::hardswish) {
    const V raised = z + A(3);
    return z * (raised <= A(0) ? A(0) : raised >= A(6) ? A(6) : raised) * A(1.0 / 6.0);
  } else if constexpr (ACT == Act::relu6) {
    return z <= A(0) ? A(0) : z >= A(6) ? A(6) : z;
  } else if constexpr (ACT == Act::leaky_relu) {
    return z > A(0) ? z : z * p.first;
  } else if constexpr (ACT == Act::quick_gelu) {
    return z * M::sigmoid(A(1.702) * z);
  } else if constexpr (ACT == Act::relu2) {
    return z <= A(0) ? A(0) : z * z;
  } else if constexpr (ACT == Act::mish) {
    const V e = mish_exp<FAST, A>(z), n = e * (e + A(2));
    return z * (n * M::reciprocal(n + A(2)));
  } else if constexpr (ACT == Act::sigmoid) {
    return M::sigmoid(z);
  } else if constexpr (ACT == Act::tanh) {
    return M::tanh(z);
  } else if constexpr (ACT == Act::elu) {
    return z > A(0) ? z : M::expm1(z) * p.first;
  } else if constexpr (ACT == Act::softplus) {
    const V scaled = z * p.first;
    return scaled > p.second ? z : M::log1p(M::exp(scaled)) * M::reciprocal(p.first);
  } else {
    static_assert(ACT == Act::none);
    return z;
  }
}

// g·act'(z). Where the derivative is 0 or 1 by cases, g is chosen and not multiplied: 0 for an infinite g, as by torch.
template <Act ACT, bool FAST, typename A, typename V>
FASTLAYERS_FORMULA V gradient_of(V g, V z, [[maybe_unused]] ActParameters<A> p) {
  using M = ActMath<FAST, A>;
  if constexpr (ACT == Act::relu) {
    return z <= A(0) ? A(0) : g;
  } else if constexpr (ACT == Act::silu) {
    const V s = M::sigmoid(z);
    return g * s * (A(1) + z * (A(1) - s));
  } else if constexpr (ACT == Act::gelu) {
    const V bell = M::gaussian_bell(z);
    return g * (M::gaussian_cdf(z, bell) + z * (bell * A(0.39894228040143267794)));
  } else if constexpr (ACT == Act::gelu_tanh) {
    const V e = M::exp_beside_1(-gelu_tanh_2u<A>(z)), s = M::reciprocal(A(1) + e);
    const V rest = z > A(0) ? e * s : A(1) - s;  // 1 - s without its cancellation
    return g * (s + z * s * rest * gelu_tanh_2u_derivative<A>(z));
  } else if constexpr (ACT == Act::hardswish) {
    return z <= A(-3) ? A(0) : z < A(3) ? g * (M::third(z) + A(0.5)) : g;
  } else if constexpr (ACT == Act::relu6) {
    if constexpr (std::is_same_v<V, A>) {
      return z <= A(0) || z >= A(6) ? A(0) : g;
    } else {
      const V below = z >= A(6) ? A(0) : z;  // two conditions of one result GCC takes lane by lane
      return below <= A(0) ? A(0) : g;
    }
  } else if constexpr (ACT == Act::leaky_relu) {
    return z > A(0) ? g : g * p.first;
  } else if constexpr (ACT == Act::quick_gelu) {
    const V scaled = A(1.702) * z, s = M::sigmoid(scaled);
    return g * s * (A(1) + scaled * (A(1) - s));
  } else if constexpr (ACT == Act::relu2) {
    return z <= A(0) ? A(0) : A(2) * g * z;
  } else if constexpr (ACT == Act::mish) {
    const V e = mish_exp<FAST, A>(z), n = e * (e + A(2)), r = M::reciprocal(n + A(2));
    const V slope = z < A(20) ? A(4) * e * (e + A(1)) * r * r : A(0);
    return g * (n * r + z * slope);
  } else if constexpr (ACT == Act::sigmoid) {
    const V s = M::sigmoid(z);
    return g * (A(1) - s) * s;
  } else if constexpr (ACT == Act::tanh) {
    const V t = M::tanh(z);
    return g * (A(1) - t * t);
  } else if constexpr (ACT == Act::elu) {
    return z <= A(0) ? g * p.first * M::exp(z) : g;
  } else if constexpr (ACT == Act::softplus) {
    const V scaled = z * p.first, e = M::exp(scaled);
    return scaled > p.second ? g : g * e * M::reciprocal(e + A(1));
  } else {
    static_assert(ACT == Act::none);
    return g;
  }
}

// Calls f(std::integral_constant<Act, ...>{}) with the activation. ALL: of all of them, not of the norms' only.
template <bool ALL, typename F>
FASTLAYERS_FORMULA void with_constant_act(Act act, F&& f) {
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

}  // namespace
}  // namespace fastlayers

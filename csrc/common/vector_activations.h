// The activations, and their gradients, on vectors in the compute type A. NaN and infinities as torch's own have them. The formulas are
// those of activations.cuh.
#pragma once

#include "act.h"
#include "vector_math.h"

namespace fastlayers {
namespace {

// mish is z·tanh(softplus(z)), and the tanh is n / (n + 2) for n = e·(e + 2), e = exp(z). From 20 on it is 1.
template <typename A>
FASTLAYERS_INLINE Vector<A> mish_exp(const Vector<A>& z) { return exp<A>(z < A(20) ? z : broadcast<A>(20)); }

// tanh's form of gelu is z·sigmoid(2u), u = sqrt(2/pi)·(z + 0.044715·z³).
template <typename A>
FASTLAYERS_INLINE Vector<A> gelu_tanh_2u(const Vector<A>& z) { return (z + z * z * z * A(0.044715)) * A(1.59576912160573071176); }

// The same as act_value and act_gradient, of an activation that is a number at run time.
template <typename A, bool FAST>
Vector<A> any_act_value(Act act, const Vector<A>& z, const ActParameters<A>& p);
template <typename A, bool FAST>
Vector<A> any_act_gradient(Act act, const Vector<A>& g, const Vector<A>& z, const ActParameters<A>& p);

// act(z), where ACT is what with_act hands over. FAST: as precise as a result of 16 bits needs.
template <typename A, bool FAST = false, typename ACT>
FASTLAYERS_INLINE Vector<A> act_value(ACT act, const Vector<A>& z, [[maybe_unused]] const ActParameters<A>& p) {
  using V = Vector<A>;
  const V zero{};
  if constexpr (std::is_same_v<ACT, Act>) {
    return any_act_value<A, FAST>(act, z, p);
  } else if constexpr (act == Act::relu) {
    return z <= A(0) ? zero : z;
  } else if constexpr (act == Act::silu) {
    return z / (exp_beside_1<A>(-z) + A(1));
  } else if constexpr (act == Act::gelu) {
    return z * gaussian_cdf<A, FAST>(z, gaussian_bell<A, FAST>(z));
  } else if constexpr (act == Act::gelu_tanh) {
    return z * sigmoid<A>(gelu_tanh_2u<A>(z));
  } else if constexpr (act == Act::hardswish) {
    const V raised = z + A(3);
    return z * (raised <= A(0) ? zero : raised >= A(6) ? broadcast<A>(6) : raised) * A(1.0 / 6.0);
  } else if constexpr (act == Act::relu6) {
    return z <= A(0) ? zero : z >= A(6) ? broadcast<A>(6) : z;
  } else if constexpr (act == Act::leaky_relu) {
    return z > A(0) ? z : z * p.first;
  } else if constexpr (act == Act::quick_gelu) {
    return z * sigmoid<A>(z * A(1.702));
  } else if constexpr (act == Act::relu2) {
    return z <= A(0) ? zero : z * z;
  } else if constexpr (act == Act::mish) {
    const V e = mish_exp<A>(z), n = e * (e + A(2));
    return z * (n / (n + A(2)));
  } else if constexpr (act == Act::sigmoid) {
    return sigmoid<A>(z);
  } else if constexpr (act == Act::tanh) {
    return tanh<A>(z);
  } else if constexpr (act == Act::elu) {
    return z > A(0) ? z : expm1<A>(z) * p.first;
  } else if constexpr (act == Act::softplus) {
    const V scaled = z * p.first;
    return scaled > p.second ? z : log1p<A>(exp<A>(scaled)) / p.first;
  } else {
    static_assert(act == Act::none);
    return z;
  }
}

// g·act'(z). Where the derivative is 0 or 1 by cases, g is chosen and not multiplied: 0 for an infinite g, as by torch.
template <typename A, bool FAST = false, typename ACT>
FASTLAYERS_INLINE Vector<A> act_gradient(ACT act, const Vector<A>& g, const Vector<A>& z, [[maybe_unused]] const ActParameters<A>& p) {
  using V = Vector<A>;
  const V zero{};
  if constexpr (std::is_same_v<ACT, Act>) {
    return any_act_gradient<A, FAST>(act, g, z, p);
  } else if constexpr (act == Act::relu) {
    return z <= A(0) ? zero : g;
  } else if constexpr (act == Act::silu) {
    const V s = sigmoid<A>(z);
    return g * s * (A(1) + z * (A(1) - s));
  } else if constexpr (act == Act::gelu) {
    const V bell = gaussian_bell<A, FAST>(z);
    return g * (gaussian_cdf<A, FAST>(z, bell) + z * (bell * A(0.39894228040143267794)));
  } else if constexpr (act == Act::gelu_tanh) {
    const V e = exp_beside_1<A>(-gelu_tanh_2u<A>(z)), s = A(1) / (e + A(1));
    const V rest = z > A(0) ? e * s : A(1) - s;  // 1 - s without its cancellation
    return g * (s + z * s * rest * ((z * z * A(3 * 0.044715) + A(1)) * A(1.59576912160573071176)));
  } else if constexpr (act == Act::hardswish) {
    return z <= A(-3) ? zero : z < A(3) ? g * (z * A(1.0 / 3.0) + A(0.5)) : g;
  } else if constexpr (act == Act::relu6) {
    const V below = z >= A(6) ? zero : z;  // two conditions of one result GCC takes lane by lane
    return below <= A(0) ? zero : g;
  } else if constexpr (act == Act::leaky_relu) {
    return z > A(0) ? g : g * p.first;
  } else if constexpr (act == Act::quick_gelu) {
    const V scaled = z * A(1.702), s = sigmoid<A>(scaled);
    return g * s * (A(1) + scaled * (A(1) - s));
  } else if constexpr (act == Act::relu2) {
    return z <= A(0) ? zero : g * z * A(2);
  } else if constexpr (act == Act::mish) {
    const V e = mish_exp<A>(z), n = e * (e + A(2)), r = A(1) / (n + A(2));
    const V slope = z < A(20) ? e * (e + A(1)) * r * r * A(4) : zero;
    return g * (n * r + z * slope);
  } else if constexpr (act == Act::sigmoid) {
    const V s = sigmoid<A>(z);
    return g * (A(1) - s) * s;
  } else if constexpr (act == Act::tanh) {
    const V t = tanh<A>(z);
    return g * (A(1) - t * t);
  } else if constexpr (act == Act::elu) {
    return z <= A(0) ? g * p.first * exp<A>(z) : g;
  } else if constexpr (act == Act::softplus) {
    const V scaled = z * p.first, e = exp<A>(scaled);
    return scaled > p.second ? g : g * e / (e + A(1));
  } else {
    static_assert(act == Act::none);
    return g;
  }
}

// The parameters that torch has where none are given.
template <typename A>
ActParameters<A> default_parameters(Act act) {
  if (act == Act::leaky_relu) return {A(0.01), A(0)};
  if (act == Act::softplus) return {A(1), A(20)};
  return {A(1), A(0)};
}

// Calls f(std::integral_constant<Act, ...>{}) with the activation. ALL: of all of them, not of the norms' only.
template <bool ALL, typename F>
FASTLAYERS_INLINE void with_constant_act(Act act, F&& f) {
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

template <typename A, bool FAST>
FASTLAYERS_CALLED Vector<A> any_act_value(Act act, const Vector<A>& z, const ActParameters<A>& p) {
  Vector<A> result;
  with_constant_act<true>(act, [&](auto chosen) FASTLAYERS_LANES { result = act_value<A, FAST>(chosen, z, p); });
  return result;
}
template <typename A, bool FAST>
FASTLAYERS_CALLED Vector<A> any_act_gradient(Act act, const Vector<A>& g, const Vector<A>& z, const ActParameters<A>& p) {
  Vector<A> result;
  with_constant_act<true>(act, [&](auto chosen) FASTLAYERS_LANES { result = act_gradient<A, FAST>(chosen, g, z, p); });
  return result;
}

constexpr std::integral_constant<Act, Act::none> kNoAct{};

// Calls f with the activation: with a type of its own, or with the number where kernels of T are compact.
template <typename T, bool ALL, typename F>
void with_act(Act act, F&& f) {
  if constexpr (kCompact<T>) f(act);
  else with_constant_act<ALL>(act, f);
}

}  // namespace
}  // namespace fastlayers

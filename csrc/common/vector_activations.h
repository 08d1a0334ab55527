// The activations, and their gradients, on vectors in the compute type A.
#pragma once

#include "vector_math.h"

#include "act_formulas.h"

namespace fastlayers {
namespace {

template <bool FAST, typename A>
struct ActMath {
  using V = Vector<A>;
  FASTLAYERS_INLINE static V exp(const V& v) { return fastlayers::exp<A>(v); }
  FASTLAYERS_INLINE static V exp_beside_1(const V& v) { return fastlayers::exp_beside_1<A>(v); }
  FASTLAYERS_INLINE static V expm1(const V& v) { return fastlayers::expm1<A>(v); }
  FASTLAYERS_INLINE static V log1p(const V& v) { return fastlayers::log1p<A>(v); }
  FASTLAYERS_INLINE static V tanh(const V& v) { return fastlayers::tanh<A>(v); }
  FASTLAYERS_INLINE static V sigmoid(const V& v) { return fastlayers::sigmoid<A>(v); }
  FASTLAYERS_INLINE static V gaussian_bell(const V& z) { return fastlayers::gaussian_bell<A, FAST>(z); }
  FASTLAYERS_INLINE static V gaussian_cdf(const V& z, const V& bell) { return fastlayers::gaussian_cdf<A, FAST>(z, bell); }
  FASTLAYERS_INLINE static V third(const V& v) { return v * A(1.0 / 3.0); }  // as part of one multiplication and addition
  FASTLAYERS_INLINE static V quotient(const V& u, const V& v) { return u / v; }
  template <typename N>
  FASTLAYERS_INLINE static N reciprocal(const N& v) { return A(1) / v; }
};

// The same as act_value and act_gradient, of an activation that is a number at run time.
template <typename A, bool FAST>
FASTLAYERS_CALLED Vector<A> any_act_value(Act act, const Vector<A>& z, const ActParameters<A>& p) {
  Vector<A> result;
  with_constant_act<true>(act, [&](auto chosen) FASTLAYERS_LANES { result = value_of<chosen, FAST, A>(z, p); });
  return result;
}
template <typename A, bool FAST>
FASTLAYERS_CALLED Vector<A> any_act_gradient(Act act, const Vector<A>& g, const Vector<A>& z, const ActParameters<A>& p) {
  Vector<A> result;
  with_constant_act<true>(act, [&](auto chosen) FASTLAYERS_LANES { result = gradient_of<chosen, FAST, A>(g, z, p); });
  return result;
}

// act(z) and g·act'(z), where ACT is what with_act hands over.
template <typename A, bool FAST = false, typename ACT>
FASTLAYERS_INLINE Vector<A> act_value(ACT act, const Vector<A>& z, const ActParameters<A>& p) {
  if constexpr (std::is_same_v<ACT, Act>) return any_act_value<A, FAST>(act, z, p);
  else return value_of<ACT::value, FAST, A>(z, p);
}
template <typename A, bool FAST = false, typename ACT>
FASTLAYERS_INLINE Vector<A> act_gradient(ACT act, const Vector<A>& g, const Vector<A>& z, const ActParameters<A>& p) {
  if constexpr (std::is_same_v<ACT, Act>) return any_act_gradient<A, FAST>(act, g, z, p);
  else return gradient_of<ACT::value, FAST, A>(g, z, p);
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

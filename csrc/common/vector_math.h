// exp, log and what follows from them, on vectors. In float32 by polynomials; in float64 by the C library, lane by lane. NaN stays NaN.
// The relative errors are those measured over the whole range (tests/csrc/test_cpu_math.py).
#pragma once

#include <cmath>
#include <limits>

#include "vector.h"

namespace fastlayers {
namespace {

namespace vectors {
typedef int32_t Ints __attribute__((vector_size(kVectorWidth)));

template <typename F>
FASTLAYERS_CALLED Doubles lane_by_lane(const Doubles& v, F&& f) {
  Doubles result;
  for (int i = 0; i < kLanes<double>; ++i) result[i] = f(v[i]);
  return result;
}

// 2^n for whole n from -126 to 127
FASTLAYERS_INLINE Floats power_of_two(const Floats& n) { return bits_as<Floats>((__builtin_convertvector(n, Ints) + 127) << 23); }

// (exp(r) - 1 - r) / r² for |r| up to log(2)/2 (Cephes, expf)
FASTLAYERS_INLINE Floats exp_rest(const Floats& r) {
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  return p * r + 5.0000001201e-1f;
}
}  // namespace vectors

template <typename A>
FASTLAYERS_INLINE Vector<A> absolute(const Vector<A>& v) { return v < A(0) ? -v : v; }

// exp(v), within 1.1e-7
template <typename A>
FASTLAYERS_MATH Vector<A> exp(const Vector<A>& of) {
  using namespace vectors;
  if constexpr (std::is_same_v<A, double>) {
    return lane_by_lane(of, [](double d) { return std::exp(d); });
  } else {
    const Floats below = of > 89.f ? broadcast<float>(89.f) : of;  // inf from 88.73 on
    const Floats v = below < -104.f ? broadcast<float>(-104.f) : below;
    constexpr float kRound = 12582912.f;  // 1.5·2^23: a sum with it is a whole number
    const Floats n = (v * 1.44269504f + kRound) - kRound;
    const Floats r = (v - n * 0.693359375f) + n * 2.12194440e-4f;
    const Floats e = exp_rest(r) * (r * r) + r + 1.f;
    const Floats half = (n * 0.5f + kRound) - kRound;  // two factors, since 2^n may be denormal or beyond the largest
    return e * power_of_two(half) * power_of_two(n - half);
  }
}

namespace vectors {
// The same, for exp within 6e-6
FASTLAYERS_INLINE Floats exp_rest_of_16_bits(const Floats& r) { return (r * 0.04127734f + 0.16753513f) * r + 0.50005119f; }

// exp(v) with one factor of two: v is from -87 to 88.5, and from 88.38 on the result is inf
template <bool FAST = false>
FASTLAYERS_INLINE Floats exp_of_normal(const Floats& v) {
  constexpr float kRound = 12582912.f;
  const Floats shifted = v * 1.44269504f + kRound, n = shifted - kRound;
  const Floats r = (v - n * 0.693359375f) + n * 2.12194440e-4f;
  const Floats power = bits_as<Floats>((bits_as<Ints>(shifted) << 23) + 0x3f800000);  // of two: the last bits of `shifted` are n
  return ((FAST ? exp_rest_of_16_bits(r) : exp_rest(r)) * (r * r) + r + 1.f) * power;
}
}  // namespace vectors

// exp(v) where results below 2^-126 may be 0 and those above 2^127.5 inf: what is added to 1
template <typename A>
FASTLAYERS_MATH Vector<A> exp_beside_1(const Vector<A>& v) {
  using namespace vectors;
  if constexpr (std::is_same_v<A, double>) {
    return exp<A>(v);
  } else {
    const Floats below = v > 88.5f ? broadcast<float>(88.5f) : v;
    const Floats e = exp_of_normal(v < -87.f ? broadcast<float>(-87.f) : below);
    return v < -87.f ? Floats{} : e;
  }
}

// The same for v up to 0. FAST: within 6e-6, for results of 16 bits
template <typename A, bool FAST = false>
FASTLAYERS_MATH Vector<A> exp_below_0(const Vector<A>& v) {
  using namespace vectors;
  if constexpr (std::is_same_v<A, double>) {
    return exp<A>(v);
  } else {
    const Floats e = exp_of_normal<FAST>(v < -87.f ? broadcast<float>(-87.f) : v);
    return v < -87.f ? Floats{} : e;
  }
}

// exp(v) - 1, within 2e-7
template <typename A>
FASTLAYERS_MATH Vector<A> expm1(const Vector<A>& v) {
  using namespace vectors;
  if constexpr (std::is_same_v<A, double>) {
    return lane_by_lane(v, [](double d) { return std::expm1(d); });
  } else {
    const Floats near = exp_rest(v) * (v * v) + v, far = exp<float>(v) - 1.f;
    return absolute<float>(v) < 0.34f ? near : far;
  }
}

// log(v) for positive normal v, infinity included (Cephes, logf)
template <typename A>
FASTLAYERS_MATH Vector<A> log(const Vector<A>& v) {
  using namespace vectors;
  if constexpr (std::is_same_v<A, double>) {
    return lane_by_lane(v, [](double d) { return std::log(d); });
  } else {
    // m from sqrt(1/2) to sqrt(2). Without a sign: a lane that nobody reads may hold anything.
    const Ints bits = bits_as<Ints>(bits_as<Words>(v) - 0x3f3504f3u);
    const Floats n = __builtin_convertvector(bits >> 23, Floats);
    const Floats m = bits_as<Floats>((bits & 0x007fffff) + 0x3f3504f3) - 1.f;
    Floats p = m * 7.0376836292e-2f - 1.1514610310e-1f;
    p = p * m + 1.1676998740e-1f;
    p = p * m - 1.2420140846e-1f;
    p = p * m + 1.4249322787e-1f;
    p = p * m - 1.6668057665e-1f;
    p = p * m + 2.0000714765e-1f;
    p = p * m - 2.4999993993e-1f;
    p = p * m + 3.3333331174e-1f;
    const Floats square = m * m;
    const Floats rest = p * m * square - n * 2.12194440e-4f - square * 0.5f;
    const Floats result = (m + rest) + n * 0.693359375f;
    return v < std::numeric_limits<float>::infinity() ? result : v;
  }
}

// log(1 + v) for v from 0
template <typename A>
FASTLAYERS_MATH Vector<A> log1p(const Vector<A>& v) {
  using namespace vectors;
  if constexpr (std::is_same_v<A, double>) {
    return lane_by_lane(v, [](double d) { return std::log1p(d); });
  } else {
    const Floats u = v + 1.f;
    const Floats lost = v - (u - 1.f);  // what the sum rounded off
    return u < std::numeric_limits<float>::infinity() ? log<float>(u) + lost / u : u;
  }
}

// (exp(2v) - 1) / (exp(2v) + 1), and near 0 a polynomial (Cephes, tanhf)
template <typename A>
FASTLAYERS_MATH Vector<A> tanh(const Vector<A>& v) {
  using namespace vectors;
  if constexpr (std::is_same_v<A, double>) {
    return lane_by_lane(v, [](double d) { return std::tanh(d); });
  } else {
    const Floats x = absolute<float>(v), z = v * v;
    const Floats far = 1.f - 2.f / (exp_beside_1<float>(x + x) + 1.f);
    Floats p = z * -5.70498872745e-3f + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    return x < 0.625f ? p * z * v + v : v < 0.f ? -far : far;
  }
}

// 1 / (1 + exp(-v))
template <typename A>
FASTLAYERS_INLINE Vector<A> sigmoid(const Vector<A>& v) { return A(1) / (exp_beside_1<A>(-v) + A(1)); }

// exp(-z²/2)
template <typename A, bool FAST = false>
FASTLAYERS_INLINE Vector<A> gaussian_bell(const Vector<A>& z) { return exp_below_0<A, FAST>(z * z * A(-0.5)); }

// The probability that a normal variable is below z; bell is gaussian_bell(z). In float32 bell·t·P(t), with t = 1/(1 + 0.36·|z|), is the
// tail beyond |z|: P is a fit within 6.4e-8. It keeps the tail, where 1 + erf(z/√2) would cancel. Up to 1, where erf keeps more, the odd
// polynomial of a fit. FAST: by the tail alone, within 4e-5, for results of 16 bits.
template <typename A, bool FAST = false>
FASTLAYERS_MATH Vector<A> gaussian_cdf(const Vector<A>& z, [[maybe_unused]] const Vector<A>& bell) {
  using namespace vectors;
  if constexpr (std::is_same_v<A, double>) {
    return lane_by_lane(z, [](double d) { return 0.5 * std::erfc(d * -0.70710678118654752440); });
  } else if constexpr (FAST) {
    const Floats t = 1.f / (absolute<float>(z) * 0.375f + 1.f);
    Floats p = t * -0.0906443596f + 0.200285092f;
    p = p * t + 0.0835613981f;
    p = p * t + 0.157734811f;
    p = p * t + 0.149060935f;
    const Floats tail = bell * (t * p);
    return z > 0.f ? 1.f - tail : tail;
  } else {
    const Floats t = 1.f / (absolute<float>(z) * 0.36f + 1.f);
    Floats p = t * -0.0294848476f + 0.135623783f;
    p = p * t - 0.215188265f;
    p = p * t + 0.0974123776f;
    p = p * t + 0.0066329292f;
    p = p * t + 0.0930334851f;
    p = p * t + 0.124767959f;
    p = p * t + 0.1435792f;
    p = p * t + 0.143623352f;
    const Floats tail = bell * (t * p);
    const Floats s = z * z;
    Floats q = s * -7.66260837e-6f + 1.13507478e-4f;
    q = q * s - 1.1863485e-3f;
    q = q * s + 9.97333042e-3f;
    q = q * s - 6.64903596e-2f;
    q = q * s + 3.98942292e-1f;
    return s < 1.f ? q * z + 0.5f : z > 0.f ? 1.f - tail : tail;
  }
}

}  // namespace
}  // namespace fastlayers

// Vectors for CPU kernels: the vector extensions of GCC and Clang, as wide as a register of the instruction set that the file is compiled
// for. build.py compiles each source that includes this once per instruction set, and cpu_library.h picks one. Values of 16 bits are
// float32 in a vector. All of it is in anonymous namespaces: what one instruction set compiles must not stand for another's.
#pragma once

#include <cstring>
#include <type_traits>

#ifdef __F16C__
#include <immintrin.h>
#endif

#include "cpu_library.h"
#include "tensor.h"

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

// Vectors stay in registers from one function to the next.
#define FASTLAYERS_INLINE inline __attribute__((always_inline))
// The same for a lambda.
#define FASTLAYERS_LANES __attribute__((always_inline))

namespace fastlayers {
namespace {

constexpr int64_t kGrain = 1 << 15;  // elements a task: torch's own grain for elementwise loops

template <typename T>
using compute_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Calls f with a value of the type that dtype names.
template <typename F>
void dispatch_floating(ScalarType dtype, const char* op, F&& f) {
  switch (dtype) {
    case ScalarType::Half: return f(c10::Half{});
    case ScalarType::BFloat16: return f(c10::BFloat16{});
    case ScalarType::Float: return f(float{});
    case ScalarType::Double: return f(double{});
    default:
      FASTLAYERS_CHECK(false, op, "expected float16, bfloat16, float32 or float64, but got ", toString(dtype));
  }
}

// The same with two values, where the second dtype is the first, or float32 beside 16-bit values.
template <typename F>
void dispatch_pair(ScalarType dtype, ScalarType second, const char* op, F&& f) {
  dispatch_floating(dtype, op, [&](auto x) {
    if (dtype == second) return f(x, x);
    if constexpr (sizeof(x) == 2) {
      if (second == ScalarType::Float) return f(x, float{});
    }
    FASTLAYERS_CHECK(false, op, "expected ", toString(dtype), ", or float32 beside 16-bit values, but got ", toString(second));
  });
}

#if defined(__AVX512F__)
constexpr int kVectorWidth = 64;  // bytes
#elif defined(__AVX__)
constexpr int kVectorWidth = 32;
#else
constexpr int kVectorWidth = 16;  // SSE2, NEON
#endif
template <typename A>
constexpr int kLanes = kVectorWidth / sizeof(A);

namespace vectors {
typedef float Floats __attribute__((vector_size(kVectorWidth)));
typedef double Doubles __attribute__((vector_size(kVectorWidth)));
typedef uint32_t Words __attribute__((vector_size(kVectorWidth)));
typedef uint16_t Halves __attribute__((vector_size(kVectorWidth / 2)));
}  // namespace vectors

template <typename A>
using Vector = std::conditional_t<std::is_same_v<A, double>, vectors::Doubles, vectors::Floats>;

template <typename To, typename From>
FASTLAYERS_INLINE To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// 0, 1, 2 and so on
template <typename V>
FASTLAYERS_INLINE V lane_numbers() {
  V v{};
  for (size_t i = 0; i < sizeof(v) / sizeof(v[0]); ++i) v[i] = i;
  return v;
}

template <typename A>
FASTLAYERS_INLINE Vector<A> broadcast(A value) { return Vector<A>{} + value; }

#ifdef __F16C__
namespace vectors {
FASTLAYERS_INLINE Floats of_halves(const void* from) {
#ifdef __AVX512F__
  return bits_as<Floats>(_mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(from))));
#else
  return bits_as<Floats>(_mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(from))));
#endif
}
FASTLAYERS_INLINE void to_halves(void* to, const Floats& v) {
#ifdef __AVX512F__
  _mm256_storeu_si256(static_cast<__m256i*>(to), _mm512_cvtps_ph(bits_as<__m512>(v), _MM_FROUND_TO_NEAREST_INT));
#else
  _mm_storeu_si128(static_cast<__m128i*>(to), _mm256_cvtps_ph(bits_as<__m256>(v), _MM_FROUND_TO_NEAREST_INT));
#endif
}
}  // namespace vectors
#endif

template <typename T, typename A = compute_t<T>>
FASTLAYERS_INLINE Vector<A> load(const T* from) {
  if constexpr (std::is_same_v<T, A>) {
    Vector<A> v;
    std::memcpy(&v, from, sizeof(v));
    return v;
  } else {
    using namespace vectors;
#ifdef __F16C__
    if constexpr (std::is_same_v<T, c10::Half>) return of_halves(from);
#endif
    Halves halves;
    std::memcpy(&halves, from, sizeof(halves));
    const Words high = __builtin_convertvector(halves, Words) << 16;
    if constexpr (std::is_same_v<T, c10::BFloat16>) {
      return bits_as<Floats>(high);
    } else {  // as c10 does, which explains it
      const Words doubled = high + high;
      const Floats normal = bits_as<Floats>((doubled >> 4) + (0xe0u << 23)) * 0x1.0p-112f;
      const Floats denormal = bits_as<Floats>((doubled >> 17) | (126u << 23)) - 0.5f;
      const Words small = bits_as<Words>(doubled < (1u << 27));
      return bits_as<Floats>((high & 0x80000000u) | (bits_as<Words>(denormal) & small) | (bits_as<Words>(normal) & ~small));
    }
  }
}

// The bits of v rounded to bfloat16, to the nearest and ties to even: the upper half of each word.
FASTLAYERS_INLINE vectors::Words bfloat16_bits(const vectors::Floats& v) {
  using namespace vectors;
  const Words bits = bits_as<Words>(v), rounded = bits + ((bits >> 16 & 1u) + 0x7fffu);
  return v != v ? Words{} + 0x7fc00000u : rounded;
}

template <typename T, typename A = compute_t<T>>
FASTLAYERS_INLINE void store(T* to, const Vector<A>& v) {
  if constexpr (std::is_same_v<T, A>) {
    std::memcpy(to, &v, sizeof(v));
  } else {
    using namespace vectors;
#ifdef __F16C__
    if constexpr (std::is_same_v<T, c10::Half>) return to_halves(to, v);
#endif
    Words rounded;
    if constexpr (std::is_same_v<T, c10::BFloat16>) {
      rounded = bfloat16_bits(v) >> 16;
    } else {  // as c10 does
      const Words bits = bits_as<Words>(v), doubled = bits + bits;
      Words bias = doubled & 0xff000000u;
      const Words low = bits_as<Words>(bias < 0x71000000u);
      bias = (bias & ~low) | (low & 0x71000000u);
      Floats base = bits_as<Floats>(bits & 0x7fffffffu) * 0x1.0p+112f * 0x1.0p-110f;
      base += bits_as<Floats>((bias >> 1) + 0x07800000u);
      const Words of_base = bits_as<Words>(base), nan = bits_as<Words>(doubled > 0xff000000u);
      const Words number = ((of_base >> 13) & 0x7c00u) + (of_base & 0x0fffu);
      rounded = ((bits & 0x80000000u) >> 16) | (number & ~nan) | (nan & 0x7e00u);
    }
    const Halves halves = __builtin_convertvector(rounded, Halves);
    std::memcpy(to, &halves, sizeof(halves));
  }
}

// The first `count` elements; the others are `rest`.
template <typename T, typename A = compute_t<T>>
FASTLAYERS_INLINE Vector<A> load_some(const T* from, int64_t count, A rest = A(0)) {
  T some[kLanes<A>];
  for (int i = 0; i < kLanes<A>; ++i) some[i] = static_cast<T>(rest);
  std::memcpy(some, from, count * sizeof(T));
  return load<T, A>(some);
}

template <typename T, typename A = compute_t<T>>
FASTLAYERS_INLINE void store_some(T* to, const Vector<A>& v, int64_t count) {
  T some[kLanes<A>];
  store<T, A>(some, v);
  std::memcpy(to, some, count * sizeof(T));
}

// What a loop over vectors is handed: all lanes, or the first `count` of them. Others are read as `rest` and not written.
template <typename A>
struct All {
  static constexpr int64_t count = kLanes<A>;
  template <typename T>
  FASTLAYERS_INLINE Vector<A> load(const T* from, A = A(0)) const { return fastlayers::load<T, A>(from); }
  template <typename T>
  FASTLAYERS_INLINE void store(T* to, const Vector<A>& v) const { fastlayers::store<T, A>(to, v); }
};
template <typename A>
struct Some {
  int64_t count;
  template <typename T>
  FASTLAYERS_INLINE Vector<A> load(const T* from, A rest = A(0)) const { return load_some<T, A>(from, count, rest); }
  template <typename T>
  FASTLAYERS_INLINE void store(T* to, const Vector<A>& v) const { store_some<T, A>(to, v, count); }
};

// f(i, lanes) for the vectors of n elements.
template <typename A, typename F>
FASTLAYERS_INLINE void for_vectors(int64_t n, F&& f) {
  int64_t i = 0;
  for (; i + kLanes<A> <= n; i += kLanes<A>) f(i, All<A>{});
  if (i < n) f(i, Some<A>{n - i});
}

// f(at, v, results) for the vectors v of n elements of each of `in`, whose results are written to `out`. The elements of a vector need not
// be neighbours: those of bfloat16 at even and at odd places are vectors of their own, which a word of two is by a shift or a mask. The
// vectors follow each other in the order of `at`, where map_place finds an element. Lanes beyond the last element are of zeros.
template <typename T, size_t IN, size_t OUT, typename F>
FASTLAYERS_INLINE void map(int64_t n, const std::array<const T*, IN>& in, const std::array<T*, OUT>& out, F&& f) {
  using A = compute_t<T>;
  int64_t first = 0;
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    using namespace vectors;
    for (; first + 2 * kLanes<A> <= n; first += 2 * kLanes<A>) {
      Floats even[IN], odd[IN], of_even[OUT], of_odd[OUT];
      for (size_t k = 0; k < IN; ++k) {
        Words both;
        std::memcpy(&both, in[k] + first, sizeof(both));
        even[k] = bits_as<Floats>(both << 16);
        odd[k] = bits_as<Floats>(both & 0xffff0000u);
      }
      f(first, even, of_even);
      f(first + kLanes<A>, odd, of_odd);
      for (size_t k = 0; k < OUT; ++k) {
        const Words both = bfloat16_bits(of_even[k]) >> 16 | (bfloat16_bits(of_odd[k]) & 0xffff0000u);
        std::memcpy(out[k] + first, &both, sizeof(both));
      }
    }
  }
  for_vectors<A>(n - first, [&](int64_t i, auto lanes) FASTLAYERS_LANES {
    Vector<A> v[IN], results[OUT];
    for (size_t k = 0; k < IN; ++k) v[k] = lanes.load(in[k] + first + i);
    f(first + i, v, results);
    for (size_t k = 0; k < OUT; ++k) lanes.store(out[k] + first + i, results[k]);
  });
}

template <typename T>
inline int64_t map_place(int64_t i, int64_t n) {
  constexpr int64_t both = 2 * kLanes<compute_t<T>>;
  if (!std::is_same_v<T, c10::BFloat16> || i >= n / both * both) return i;
  return i / both * both + i % 2 * (both / 2) + i % both / 2;
}

// One value of all lanes by a function of two that may be called in any order.
template <typename A, typename F>
FASTLAYERS_INLINE A fold(const Vector<A>& v, F&& f) {
  A parts[kLanes<A>];
  std::memcpy(parts, &v, sizeof(v));
  for (int half = kLanes<A> / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) parts[i] = f(parts[i], parts[i + half]);
  return parts[0];
}
template <typename A>
FASTLAYERS_INLINE A sum_of(const Vector<A>& v) {
  return fold<A>(v, [](A a, A b) FASTLAYERS_LANES { return a + b; });
}

// The sum of many vectors. Those of some are added up before they are added to the others: narrow vectors, of which there are more, then
// err about as little as wide ones.
template <typename A>
class Total {
 public:
  FASTLAYERS_INLINE void add(const Vector<A>& v) {
    some_ += v;
    if (++count_ % kSome == 0) all_ += some_, some_ = Vector<A>{};
  }
  FASTLAYERS_INLINE Vector<A> lanes() const { return all_ + some_; }
  FASTLAYERS_INLINE A sum() const { return sum_of<A>(lanes()); }

 private:
  static constexpr int kSome = 32;
  Vector<A> all_{}, some_{};
  int count_ = 0;
};

// The sum of sum(first, last) over stretches of a fixed size, so that it does not depend on the threads.
template <typename F>
double sum_in_stretches(int64_t n, F&& sum) {
  const int64_t stretches = (n + kGrain - 1) / kGrain;
  std::vector<double> sums(stretches);
  torch::stable::parallel_for(0, stretches, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) sums[i] = sum(i * kGrain, std::min(n, (i + 1) * kGrain));
  });
  double total = 0;
  for (const double part : sums) total += part;
  return total;
}

// The larger one, NaN where either is NaN.
template <typename A>
FASTLAYERS_INLINE Vector<A> larger(const Vector<A>& a, const Vector<A>& b) {
  const Vector<A> of_numbers = a > b ? a : b;
  return a == a ? of_numbers : a + b;  // two conditions of one result GCC takes lane by lane
}
template <typename A>
FASTLAYERS_INLINE A largest_of(const Vector<A>& v) {
  return fold<A>(v, [](A a, A b) FASTLAYERS_LANES { return a > b || a != a ? a : b; });
}

}  // namespace
}  // namespace fastlayers

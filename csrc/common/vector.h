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
#include "dispatch.h"

// Vectors stay in registers from one function to the next.
#define FASTLAYERS_INLINE inline __attribute__((always_inline))
// The same for a lambda.
#define FASTLAYERS_LANES __attribute__((always_inline))
// What is called seldom, or costs far more than its call, is there once.
#define FASTLAYERS_CALLED __attribute__((noinline))
#define FASTLAYERS_SELDOM __attribute__((noinline, cold))

namespace fastlayers {
namespace {

constexpr int64_t kGrain = 1 << 15;  // elements a task: torch's own grain for elementwise loops

template <typename T>
using compute_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Whether one kernel for values of T chooses at run time what others have a kernel for each of. So it is for float64, whose exponentials
// are the C library's, for float16, which CPUs rarely get, and for all values on machines without AVX2, where the library has kernels for
// those that have it: the kernels for older machines are for what the others are, not for speed, and share the code of exponentials too.
#ifdef FASTLAYERS_CPU_VARIANTS
#define FASTLAYERS_MATH FASTLAYERS_CALLED
template <typename T>
constexpr bool kCompact = true;
#else
#define FASTLAYERS_MATH FASTLAYERS_INLINE
template <typename T>
constexpr bool kCompact = std::is_same_v<T, double> || std::is_same_v<T, c10::Half>;
#endif

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

namespace vectors {
#ifdef __F16C__
FASTLAYERS_INLINE Floats of_halves(const Halves& v) {
#ifdef __AVX512F__
  return bits_as<Floats>(_mm512_cvtph_ps(bits_as<__m256i>(v)));
#else
  return bits_as<Floats>(_mm256_cvtph_ps(bits_as<__m128i>(v)));
#endif
}
FASTLAYERS_INLINE Halves to_halves(const Floats& v) {
#ifdef __AVX512F__
  return bits_as<Halves>(_mm512_cvtps_ph(bits_as<__m512>(v), _MM_FROUND_TO_NEAREST_INT));
#else
  return bits_as<Halves>(_mm256_cvtps_ph(bits_as<__m256>(v), _MM_FROUND_TO_NEAREST_INT));
#endif
}
#else
// As c10 does, which explains it.
FASTLAYERS_MATH Floats of_halves(const Halves& halves) {
  const Words high = __builtin_convertvector(halves, Words) << 16, doubled = high + high;
  const Floats normal = bits_as<Floats>((doubled >> 4) + (0xe0u << 23)) * 0x1.0p-112f;
  const Floats denormal = bits_as<Floats>((doubled >> 17) | (126u << 23)) - 0.5f;
  const Words small = bits_as<Words>(doubled < (1u << 27));
  return bits_as<Floats>((high & 0x80000000u) | (bits_as<Words>(denormal) & small) | (bits_as<Words>(normal) & ~small));
}
FASTLAYERS_MATH Halves to_halves(const Floats& v) {
  const Words bits = bits_as<Words>(v), doubled = bits + bits;
  Words bias = doubled & 0xff000000u;
  const Words low = bits_as<Words>(bias < 0x71000000u);
  bias = (bias & ~low) | (low & 0x71000000u);
  Floats base = bits_as<Floats>(bits & 0x7fffffffu) * 0x1.0p+112f * 0x1.0p-110f;
  base += bits_as<Floats>((bias >> 1) + 0x07800000u);
  const Words of_base = bits_as<Words>(base), nan = bits_as<Words>(doubled > 0xff000000u);
  const Words number = ((of_base >> 13) & 0x7c00u) + (of_base & 0x0fffu);
  return __builtin_convertvector(((bits & 0x80000000u) >> 16) | (number & ~nan) | (nan & 0x7e00u), Halves);
}
#endif
}  // namespace vectors

// The bits of v rounded to bfloat16, to the nearest and ties to even: the upper half of each word.
FASTLAYERS_INLINE vectors::Words bfloat16_bits(const vectors::Floats& v) {
  using namespace vectors;
  const Words bits = bits_as<Words>(v), rounded = bits + ((bits >> 16 & 1u) + 0x7fffu);
  return v != v ? Words{} + 0x7fc00000u : rounded;
}

// As many values of T as a vector has lanes, as memory holds them.
template <typename T, typename A = compute_t<T>>
using Stored = std::conditional_t<std::is_same_v<T, A>, Vector<A>, vectors::Halves>;

template <typename T, typename A = compute_t<T>>
FASTLAYERS_INLINE Vector<A> unpack(const Stored<T, A>& v) {
  using namespace vectors;
  if constexpr (std::is_same_v<T, A>) return v;
  else if constexpr (std::is_same_v<T, c10::Half>) return of_halves(v);
  else return bits_as<Floats>(__builtin_convertvector(v, Words) << 16);
}
template <typename T, typename A = compute_t<T>>
FASTLAYERS_INLINE Stored<T, A> pack(const Vector<A>& v) {
  using namespace vectors;
  if constexpr (std::is_same_v<T, A>) return v;
  else if constexpr (std::is_same_v<T, c10::Half>) return to_halves(v);
  else return __builtin_convertvector(bfloat16_bits(v) >> 16, Halves);
}

template <typename V>
FASTLAYERS_INLINE V load_bits(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof(v));
  return v;
}
// The first `count` elements; the others are `rest`.
template <typename V, typename T>
FASTLAYERS_SELDOM V load_some_bits(const T* from, int64_t count, T rest) {
  T some[sizeof(V) / sizeof(T)];
  for (T& one : some) one = rest;
  std::memcpy(some, from, count * sizeof(T));
  return load_bits<V>(some);
}
template <typename V>
FASTLAYERS_SELDOM void store_some_bits(void* to, V v, int64_t bytes) { std::memcpy(to, &v, bytes); }

template <typename T, typename A = compute_t<T>>
FASTLAYERS_INLINE Vector<A> load(const T* from) { return unpack<T, A>(load_bits<Stored<T, A>>(from)); }

template <typename T, typename A = compute_t<T>>
FASTLAYERS_INLINE void store(T* to, const Vector<A>& v) {
  const Stored<T, A> packed = pack<T, A>(v);
  std::memcpy(to, &packed, sizeof(packed));
}

template <typename T, typename A = compute_t<T>>
FASTLAYERS_INLINE Vector<A> load_some(const T* from, int64_t count, A rest = A(0)) {
  return unpack<T, A>(load_some_bits<Stored<T, A>, T>(from, count, static_cast<T>(rest)));
}

template <typename T, typename A = compute_t<T>>
FASTLAYERS_INLINE void store_some(T* to, const Vector<A>& v, int64_t count) {
  store_some_bits(to, pack<T, A>(v), count * sizeof(T));
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

// All lanes of a vector, or the first `count`. Which is decided at run time, so that the code of an activation is there once.
template <typename A>
struct Part {
  int64_t count;
  FASTLAYERS_INLINE bool whole() const { return __builtin_expect(count == kLanes<A>, true); }
  template <typename T>
  FASTLAYERS_INLINE Vector<A> load(const T* from, A rest = A(0)) const {
    using P = Stored<T, A>;
    return unpack<T, A>(whole() ? load_bits<P>(from) : load_some_bits<P, T>(from, count, static_cast<T>(rest)));
  }
  template <typename T>
  FASTLAYERS_INLINE void store(T* to, const Vector<A>& v) const {
    const Stored<T, A> packed = pack<T, A>(v);
    if (whole()) std::memcpy(to, &packed, sizeof(packed));
    else store_some_bits(to, packed, count * sizeof(T));
  }
  // 0 in the lanes that it does not have
  FASTLAYERS_INLINE Vector<A> only(const Vector<A>& v) const {
    if (whole()) return v;
    return lane_numbers<Vector<A>>() < static_cast<A>(count) ? v : Vector<A>{};
  }
};

// f(i, lanes) for the vectors of n elements: with one copy of f's code, or with one for whole vectors and one for the last.
template <typename A, typename F>
FASTLAYERS_INLINE void for_parts(int64_t n, F&& f) {
  for (int64_t i = 0; i < n; i += kLanes<A>) f(i, Part<A>{std::min<int64_t>(n - i, kLanes<A>)});
}
template <typename A, typename F>
FASTLAYERS_INLINE void for_vectors(int64_t n, F&& f) {
  if constexpr (kCompact<A>) return for_parts<A>(n, f);
  int64_t i = 0;
  for (; i + kLanes<A> <= n; i += kLanes<A>) f(i, All<A>{});
  if (i < n) f(i, Some<A>{n - i});
}

// f(at, v, results) for the vectors v of n elements of each of `in`, whose results are written to `out`. The elements of a vector need not
// be neighbours: those of bfloat16 at even and at odd places are vectors of their own, which a word of two is by a shift or a mask. The
// vectors follow each other in the order of `at`, where map_place finds an element. Lanes beyond the last element are of zeros: the last
// elements, fewer than a step, pass through memory of their own, so that the code of f is there once.
template <typename T>
constexpr int64_t kMapStep = (std::is_same_v<T, c10::BFloat16> ? 2 : 1) * kLanes<compute_t<T>>;

// The steps from the element `first` to `end`, which in[0] and so on begin with.
template <typename T, size_t IN, size_t OUT, typename F>
FASTLAYERS_INLINE void map_steps(int64_t first, int64_t end, const std::array<const T*, IN>& in, const std::array<T*, OUT>& out, F f) {
  using A = compute_t<T>;
  for (int64_t i = 0; i < end - first; i += kMapStep<T>) {
    if constexpr (std::is_same_v<T, c10::BFloat16>) {
      using namespace vectors;
      Floats even[IN], odd[IN], of_even[OUT], of_odd[OUT];
      for (size_t k = 0; k < IN; ++k) {
        const Words both = load_bits<Words>(in[k] + i);
        even[k] = bits_as<Floats>(both << 16);
        odd[k] = bits_as<Floats>(both & 0xffff0000u);
      }
      f(first + i, even, of_even);
      f(first + i + kLanes<A>, odd, of_odd);
      for (size_t k = 0; k < OUT; ++k) {
        const Words both = bfloat16_bits(of_even[k]) >> 16 | (bfloat16_bits(of_odd[k]) & 0xffff0000u);
        std::memcpy(out[k] + i, &both, sizeof(both));
      }
    } else {
      Vector<A> v[IN], results[OUT];
      for (size_t k = 0; k < IN; ++k) v[k] = load<T>(in[k] + i);
      f(first + i, v, results);
      for (size_t k = 0; k < OUT; ++k) store<T>(out[k] + i, results[k]);
    }
  }
}
// f by value: what it captured stays in registers.
template <typename T, size_t IN, size_t OUT, typename F>
FASTLAYERS_CALLED void call_map_steps(int64_t first, int64_t end, std::array<const T*, IN> in, std::array<T*, OUT> out, F f) {
  map_steps<T, IN, OUT>(first, end, in, out, f);
}

// SHORT: a call would count, so that the code of f is there twice.
template <typename T, size_t IN, size_t OUT, bool SHORT = false, typename F>
FASTLAYERS_INLINE void map(int64_t n, const std::array<const T*, IN>& in, const std::array<T*, OUT>& out, F f) {
  constexpr int64_t kStep = kMapStep<T>;
  const int64_t whole = n / kStep * kStep;
  if constexpr (SHORT) map_steps<T, IN, OUT>(0, whole, in, out, f);
  else if (whole > 0) call_map_steps<T, IN, OUT>(0, whole, in, out, f);
  if (whole == n) return;
  T last_in[IN][kStep], last_out[OUT][kStep];
  std::array<const T*, IN> from;
  std::array<T*, OUT> to;
  for (size_t k = 0; k < IN; ++k) {
    std::memset(static_cast<void*>(last_in[k]), 0, sizeof(last_in[k]));
    std::memcpy(last_in[k], in[k] + whole, (n - whole) * sizeof(T));
    from[k] = last_in[k];
  }
  for (size_t k = 0; k < OUT; ++k) to[k] = last_out[k];
  call_map_steps<T, IN, OUT>(whole, whole + kStep, from, to, f);
  for (size_t k = 0; k < OUT; ++k) std::memcpy(out[k] + whole, last_out[k], (n - whole) * sizeof(T));
}

template <typename T>
inline int64_t map_place(int64_t i) {
  constexpr int64_t kStep = kMapStep<T>;
  return std::is_same_v<T, c10::BFloat16> ? i / kStep * kStep + i % 2 * (kStep / 2) + i % kStep / 2 : i;
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

}  // namespace
}  // namespace fastlayers

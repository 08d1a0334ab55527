// The vocabulary of device code: vectors of 16 bytes, conversions, division by a constant.
#pragma once

#include "dispatch.h"
#include "launch.cuh"

namespace fastlayers {

// Type in which a value of type T is computed and accumulated.
template <typename T>
struct Compute { using type = float; };
template <>
struct Compute<double> { using type = double; };
template <typename T>
using compute_t = typename Compute<T>::type;

template <typename To, typename From>
__device__ __forceinline__ To convert(From v) {
  if constexpr (std::is_same_v<To, From>) return v;
  else if constexpr (std::is_same_v<To, __half>) return __float2half_rn(v);
  else if constexpr (std::is_same_v<To, __nv_bfloat16>) return __float2bfloat16_rn(v);
  else if constexpr (std::is_same_v<From, __half>) return __half2float(v);
  else if constexpr (std::is_same_v<From, __nv_bfloat16>) return __bfloat162float(v);
  else return static_cast<To>(v);
}

// Calls f(0), ..., f(N - 1), unrolled: what f indexes by its argument stays in registers.
template <int N, typename F>
__device__ __forceinline__ void unroll(F&& f) {
#pragma unroll
  for (int i = 0; i < N; ++i) f(i);
}

// Elements of T in 16 bytes.
template <typename T>
constexpr int kVector = kVectorBytes / sizeof(T);

// N consecutive elements, moved as 16-byte words.
template <typename T, int N>
struct alignas(sizeof(T) * N < kVectorBytes ? sizeof(T) * N : kVectorBytes) Vec {
  T v[N];
};

template <typename T, int N>
__device__ __forceinline__ Vec<T, N> load_vec(const T* p) { return *reinterpret_cast<const Vec<T, N>*>(p); }

template <typename T, int N>
__device__ __forceinline__ void store_vec(T* p, const Vec<T, N>& v) {
  if constexpr (sizeof(v) % sizeof(uint4) == 0) {
    // In assembly, because the compiler takes a vector store apart to share parts of it with the scalar stores of a tail.
    unroll<sizeof(v) / sizeof(uint4)>([&](int i) {
      const uint4 w = reinterpret_cast<const uint4*>(&v)[i];
      asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(reinterpret_cast<uint4*>(p) + i), "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w));
    });
  } else {
    *reinterpret_cast<Vec<T, N>*>(p) = v;
  }
}

// The 32-bit words of a vector of 16-bit elements. Working on pairs saves the byte shuffles of single elements.
template <typename T, int N>
__device__ __forceinline__ unsigned* words_of(Vec<T, N>& v) { return reinterpret_cast<unsigned*>(v.v); }
template <typename T, int N>
__device__ __forceinline__ const unsigned* words_of(const Vec<T, N>& v) { return reinterpret_cast<const unsigned*>(v.v); }

template <typename A, typename T, int N>
__device__ __forceinline__ Vec<A, N> unpack(const Vec<T, N>& v) {
  Vec<A, N> r;
  if constexpr (std::is_same_v<T, __nv_bfloat16> && N % 2 == 0) {  // the upper half of a float32
    unroll<N / 2>([&](int i) {
      r.v[2 * i] = __uint_as_float(words_of(v)[i] << 16);
      r.v[2 * i + 1] = __uint_as_float(words_of(v)[i] & 0xffff0000u);
    });
  } else if constexpr (std::is_same_v<T, __half> && N % 2 == 0) {
    unroll<N / 2>([&](int i) {
      const float2 f = __half22float2(reinterpret_cast<const __half2*>(v.v)[i]);
      r.v[2 * i] = f.x;
      r.v[2 * i + 1] = f.y;
    });
  } else {
    unroll<N>([&](int j) { r.v[j] = convert<A>(v.v[j]); });
  }
  return r;
}

template <typename T, typename A, int N>
__device__ __forceinline__ Vec<T, N> pack(const Vec<A, N>& v) {
  Vec<T, N> r;
  if constexpr (std::is_same_v<T, __nv_bfloat16> && N % 2 == 0) {
    unroll<N / 2>([&](int i) { reinterpret_cast<__nv_bfloat162*>(r.v)[i] = __floats2bfloat162_rn(v.v[2 * i], v.v[2 * i + 1]); });
  } else if constexpr (std::is_same_v<T, __half> && N % 2 == 0) {
    unroll<N / 2>([&](int i) { reinterpret_cast<__half2*>(r.v)[i] = __floats2half2_rn(v.v[2 * i], v.v[2 * i + 1]); });
  } else {
    unroll<N>([&](int j) { r.v[j] = convert<T>(v.v[j]); });
  }
  return r;
}

template <typename T, int N>
__device__ __forceinline__ Vec<T, N> negated(Vec<T, N> v) {
  if constexpr (sizeof(T) == 2) {
    unroll<N / 2>([&](int i) { words_of(v)[i] ^= 0x80008000u; });
  } else {
    unroll<N>([&](int j) { v.v[j] = -v.v[j]; });
  }
  return v;
}

template <typename T, int N>
__device__ __forceinline__ Vec<T, N> filled(T value) {
  Vec<T, N> v;
  unroll<N>([&](int j) { v.v[j] = value; });
  return v;
}

// Makes the compiler forget what it computed from these registers, so that it converts the packed values again where they
// are needed next instead of keeping float32 copies of them: twice the registers, half the rows in flight.
template <typename T, int N>
__device__ __forceinline__ void forget(Vec<T, N>& v) {
  if constexpr (sizeof(T) == 2) {
    unroll<N / 2>([&](int i) { asm volatile("" : "+r"(words_of(v)[i])); });
  }
}

// The functions of float64 are long, and float64 is rare: its kernels call them, where those of float32 contain them.
__device__ __noinline__ inline double called_exp(double v) { return exp(v); }
__device__ __noinline__ inline double called_log(double v) { return log(v); }
__device__ __noinline__ inline double called_tanh(double v) { return tanh(v); }

template <typename A>
__device__ __forceinline__ A hyperbolic_tangent(A v) {
  if constexpr (std::is_same_v<A, double>) return called_tanh(v);
  else return tanhf(v);
}

// Division by a number that the host knows, of what is less than 2^31: a multiplication and a shift (Granlund and Montgomery).
struct Divider {
  uint32_t divisor = 1, magic = 1, shift = 0;

  Divider() = default;
  explicit Divider(uint32_t d) : divisor(d) {
    while ((uint64_t{1} << shift) < d) ++shift;
    magic = static_cast<uint32_t>((((uint64_t{1} << shift) - d) << 32) / d + 1);
  }
  __device__ __forceinline__ uint32_t quotient(uint32_t n) const { return (__umulhi(n, magic) + n) >> shift; }
};

}  // namespace fastlayers

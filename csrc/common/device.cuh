// Device-side vocabulary of all kernels: vectors of 16 bytes, float conversions, the launch on torch's current stream.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <torch/csrc/stable/accelerator.h>

#include "tensor.h"

// These live in libtorch_cuda. Weak, so that the library also loads under a CPU-only torch.
extern "C" {
__attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void**);
__attribute__((weak)) AOTITorchError torch_c10_cuda_check_msg(int32_t, const char*, const char*, uint32_t, bool, char**);
__attribute__((weak)) void torch_c10_cuda_free_error_msg(char*);
}

namespace fastlayers {

// Makes the tensor's device current and finds torch's stream on it.
class Launch {
 public:
  explicit Launch(const Tensor& t) : device_(t.get_device_index()) {
    int current = -1;
    if (cudaGetDevice(&current) != cudaSuccess || current != device_) guard_.emplace(device_);
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_, &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }
  cudaStream_t stream() const { return stream_; }
  int device() const { return device_; }

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;  // where another device is current
  int device_;
  cudaStream_t stream_ = nullptr;
};

struct DeviceTraits {
  int capability = 0;  // 90 for sm_90
  int processors = 0;
};

constexpr int kMaxDevices = 64;

inline const DeviceTraits& device_traits(int device) {
  static DeviceTraits traits[kMaxDevices];
  STD_TORCH_CHECK(device >= 0 && device < kMaxDevices, "fastlayers: device index ", device, " is out of range");
  DeviceTraits& t = traits[device];
  if (t.processors == 0) {
    int major = 0, minor = 0, processors = 0;
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
    t.capability = major * 10 + minor;
    t.processors = processors;
  }
  return t;
}

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
    // In assembly, because the compiler takes a vector store apart to share halves of it with the scalar stores of a tail.
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(v) / sizeof(uint4)); ++i) {
      const uint4 w = reinterpret_cast<const uint4*>(&v)[i];
      asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(reinterpret_cast<uint4*>(p) + i), "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w));
    }
  } else {
    *reinterpret_cast<Vec<T, N>*>(p) = v;
  }
}

// The 32-bit words of a vector of 16-bit elements. Working on pairs saves the byte shuffles that single halves cost.
template <typename T, int N>
__device__ __forceinline__ unsigned* words_of(Vec<T, N>& v) { return reinterpret_cast<unsigned*>(v.v); }
template <typename T, int N>
__device__ __forceinline__ const unsigned* words_of(const Vec<T, N>& v) { return reinterpret_cast<const unsigned*>(v.v); }

template <typename A, typename T, int N>
__device__ __forceinline__ Vec<A, N> unpack(const Vec<T, N>& v) {
  Vec<A, N> r;
  if constexpr (std::is_same_v<T, __nv_bfloat16> && N % 2 == 0) {  // the upper half of a float32
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      r.v[2 * i] = __uint_as_float(words_of(v)[i] << 16);
      r.v[2 * i + 1] = __uint_as_float(words_of(v)[i] & 0xffff0000u);
    }
  } else if constexpr (std::is_same_v<T, __half> && N % 2 == 0) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const float2 f = __half22float2(reinterpret_cast<const __half2*>(v.v)[i]);
      r.v[2 * i] = f.x;
      r.v[2 * i + 1] = f.y;
    }
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j) r.v[j] = convert<A>(v.v[j]);
  }
  return r;
}

template <typename T, typename A, int N>
__device__ __forceinline__ Vec<T, N> pack(const Vec<A, N>& v) {
  Vec<T, N> r;
  if constexpr (std::is_same_v<T, __nv_bfloat16> && N % 2 == 0) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i)
      reinterpret_cast<__nv_bfloat162*>(r.v)[i] = __floats2bfloat162_rn(v.v[2 * i], v.v[2 * i + 1]);
  } else if constexpr (std::is_same_v<T, __half> && N % 2 == 0) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) reinterpret_cast<__half2*>(r.v)[i] = __floats2half2_rn(v.v[2 * i], v.v[2 * i + 1]);
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j) r.v[j] = convert<T>(v.v[j]);
  }
  return r;
}

template <typename T, int N>
__device__ __forceinline__ Vec<T, N> negated(Vec<T, N> v) {
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) words_of(v)[i] ^= 0x80008000u;
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j) v.v[j] = -v.v[j];
  }
  return v;
}

template <typename T, int N>
__device__ __forceinline__ Vec<T, N> filled(T value) {
  Vec<T, N> v;
#pragma unroll
  for (int j = 0; j < N; ++j) v.v[j] = value;
  return v;
}

// Makes the compiler forget what it computed from these registers, so that it converts the packed values again where they
// are needed next instead of keeping float32 copies of them: twice the registers, half the rows in flight.
template <typename T, int N>
__device__ __forceinline__ void forget(Vec<T, N>& v) {
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) asm volatile("" : "+r"(words_of(v)[i]));
  }
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

// Calls f(T{}) with the C++ type of a floating dtype that the kernels take.
template <typename F>
inline void dispatch_floating(ScalarType dtype, const char* op, F&& f) {
  switch (dtype) {
    case ScalarType::Half: return f(__half{});
    case ScalarType::BFloat16: return f(__nv_bfloat16{});
    case ScalarType::Float: return f(float{});
    case ScalarType::Double: return f(double{});
    default:
      STD_TORCH_CHECK(false, "fastlayers::", op, ": expected float16, bfloat16, float32 or float64, but got ",
                      torch::headeronly::toString(dtype));
  }
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int log2_of(int power) {
  int bits = 0;
  while (1 << bits < power) ++bits;
  return bits;
}

inline int64_t next_power_of_2(int64_t n) {
  int64_t p = 1;
  while (p < n) p <<= 1;
  return p;
}

}  // namespace fastlayers

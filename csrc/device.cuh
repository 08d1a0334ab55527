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
  explicit Launch(const Tensor& t) : guard_(t.get_device_index()), device_(t.get_device_index()) {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_, &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }
  cudaStream_t stream() const { return stream_; }
  int device() const { return device_; }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  int device_;
  cudaStream_t stream_ = nullptr;
};

struct DeviceTraits {
  int capability = 0;  // 90 for sm_90
  int processors = 0;
};

inline const DeviceTraits& device_traits(int device) {
  static DeviceTraits traits[64];
  STD_TORCH_CHECK(device >= 0 && device < 64, "fastlayers: device index ", device, " is out of range");
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
__device__ __forceinline__ void store_vec(T* p, const Vec<T, N>& v) { *reinterpret_cast<Vec<T, N>*>(p) = v; }

// Makes the compiler forget what it computed from these registers, so that it converts the packed values again where they
// are needed next instead of keeping float32 copies of them: twice the registers, half the rows in flight.
template <typename T, int N>
__device__ __forceinline__ void forget(Vec<T, N>& v) {
  if constexpr (sizeof(T) == 2) {
    auto* words = reinterpret_cast<unsigned*>(v.v);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(T)) * N / 4; ++i) asm volatile("" : "+r"(words[i]));
  }
}

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

inline int next_power_of_2(int64_t n) {
  int p = 1;
  while (p < n) p <<= 1;
  return p;
}

}  // namespace fastlayers

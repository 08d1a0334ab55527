// The choice of a kernel by dtype, on a CPU and on a GPU.
#pragma once

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#else
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>
#endif

#include "tensor.h"

namespace fastlayers {
namespace {

#ifdef __CUDACC__
using Half = __half;
using BFloat16 = __nv_bfloat16;
#else
using c10::BFloat16;
using c10::Half;
#endif

// Calls f(T{}) with the C++ type of a floating dtype that the kernels take.
template <typename F>
void dispatch_floating(ScalarType dtype, const char* op, F&& f) {
  switch (dtype) {
    case ScalarType::Half: return f(Half{});
    case ScalarType::BFloat16: return f(BFloat16{});
    case ScalarType::Float: return f(float{});
    case ScalarType::Double: return f(double{});
    default: FASTLAYERS_CHECK(false, op, "expected float16, bfloat16, float32 or float64, but got ", toString(dtype));
  }
}

// Calls f(In{}, Out{}) for the pairs of dtypes that kernels are built for: one dtype twice, or 16 bits in and float32 out; where the
// pair may also NARROW, float32 in and 16 bits out.
template <bool NARROW = false, typename F>
void dispatch_pair(ScalarType in, ScalarType out, const char* op, F&& f) {
  dispatch_floating(in, op, [&]<typename In>(In) {
    if (in == out) return f(In{}, In{});
    if constexpr (sizeof(In) == 2) {
      if (out == ScalarType::Float) return f(In{}, float{});
    }
    if constexpr (NARROW && sizeof(In) == 4) {
      if (out == ScalarType::Half) return f(In{}, Half{});
      if (out == ScalarType::BFloat16) return f(In{}, BFloat16{});
    }
    FASTLAYERS_CHECK(false, op, "no kernel from ", toString(in), " to ", toString(out));
  });
}

}  // namespace
}  // namespace fastlayers

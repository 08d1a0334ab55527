// What the host needs to launch a kernel: torch's current stream, the limits of the GPU, the shape of a launch.
#pragma once

#include <cuda_runtime.h>

#include "tensor.h"

#include <torch/csrc/stable/accelerator.h>

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
  int capability = 0;        // 90 for sm_90
  int processors = 0;
  int processor_shared = 0;  // bytes of shared memory of a multiprocessor, and most bytes of one block
  int block_shared = 0;
};

constexpr int kMaxDevices = 64;

inline const DeviceTraits& device_traits(int device) {
  static DeviceTraits traits[kMaxDevices];
  STD_TORCH_CHECK(device >= 0 && device < kMaxDevices, "fastlayers: device index ", device, " is out of range");
  DeviceTraits& t = traits[device];
  if (t.processors == 0) {
    const auto attribute = [&](cudaDeviceAttr name) {
      int value = 0;
      STD_CUDA_CHECK(cudaDeviceGetAttribute(&value, name, device));
      return value;
    };
    t.capability = attribute(cudaDevAttrComputeCapabilityMajor) * 10 + attribute(cudaDevAttrComputeCapabilityMinor);
    t.processor_shared = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    t.block_shared = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    t.processors = attribute(cudaDevAttrMultiProcessorCount);
  }
  return t;
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
// Words of V elements that a row may cover: a ragged one need not begin with one.
inline int64_t words_covered(int64_t n, bool ragged, int V) { return ceil_div(n + (ragged ? V - 1 : 0), V); }

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

// ---- shapes -------------------------------------------------------------------------------------------------------------

struct LaunchShape {
  int64_t blocks = 0;
  int threads = 0;
  size_t shared = 0;         // bytes of dynamic shared memory
  int cluster = 1;           // blocks of a cluster, which need sm_90 where they are several
  bool cooperative = false;  // all blocks are resident and may wait for each other
};

// The number of blocks as a launch takes it.
inline unsigned grid_of(int64_t blocks) {
  STD_TORCH_CHECK(blocks <= INT32_MAX, "fastlayers: the tensor needs ", blocks, " blocks, more than one launch takes");
  return static_cast<unsigned>(blocks);
}

template <typename... Parameters, typename... Args>
void launch_kernel(void (*kernel)(Parameters...), const LaunchShape& shape, const Launch& launch, const Args&... args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid_of(shape.blocks));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = shape.shared;
  config.stream = launch.stream();
  cudaLaunchAttribute attributes[2];
  config.attrs = attributes;
  if (shape.cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
    // More than 8 blocks are not portable, but a GPC of every sm_90 part takes 16.
    if (shape.cluster > 8) STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  }
  if (shape.cooperative) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
  }
  STD_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, args...));
}

// Blocks of a kernel that the GPU holds at once; 0 where not even one fits.
template <auto kernel>
int64_t resident_blocks(const Launch& launch, int threads, size_t shared = 0) {
  static int resident[kMaxDevices];  // of a multiprocessor; -1 for none, 0 before the runtime was asked
  int& each = resident[launch.device()];
  if (each == 0) {
    STD_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, threads, shared));
    if (each == 0) each = -1;
  }
  return std::max<int64_t>(each, 0) * device_traits(launch.device()).processors;
}

// Lets a kernel have up to so many bytes of dynamic shared memory. The bytes of the first call on a device count.
template <auto kernel>
void allow_shared_memory(int64_t bytes, const Launch& launch) {
  static bool allowed[kMaxDevices];
  if (allowed[launch.device()]) return;
  STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  allowed[launch.device()] = true;
}

}  // namespace fastlayers

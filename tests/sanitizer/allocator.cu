// An allocator for torch under compute-sanitizer: every tensor has an allocation of its own.
//
// torch's caching allocator gives several tensors one allocation, so that an access past a tensor is no error, and reuses memory, so
// that nothing in it is uninitialised. Kernels of fastlayers read whole 16-byte words, of which the last may reach past its tensor. So
// an allocation ends with a whole word here, and its rest, which no kernel may write, is initialised. Whether it was written is checked
// when the tensor is freed: memcheck cannot tell.
#include <cuda_runtime.h>

#include <atomic>
#include <cstdio>
#include <cstring>

namespace {

constexpr size_t kWord = 16;
constexpr unsigned char kRest = 0xa5;

std::atomic<int> overwritten{0};

// At least a word, since every tensor needs an address of its own.
size_t padded(size_t size) { return size == 0 ? kWord : (size + kWord - 1) / kWord * kWord; }

}  // namespace

extern "C" {

void* sanitizer_allocate(size_t size, int device, cudaStream_t) {
  int current = 0;
  void* memory = nullptr;
  cudaGetDevice(&current);
  if (current != device) cudaSetDevice(device);
  const size_t whole = padded(size);
  if (cudaMalloc(&memory, whole) != cudaSuccess) memory = nullptr;
  if (memory != nullptr && whole > size) cudaMemset(static_cast<char*>(memory) + size, kRest, whole - size);
  if (current != device) cudaSetDevice(current);
  return memory;
}

void sanitizer_free(void* memory, size_t size, int, cudaStream_t) {
  unsigned char expected[kWord], rest[kWord];
  const size_t length = padded(size) - size;
  std::memset(expected, kRest, kWord);
  // The driver may be gone when the process ends: then the copy fails, and nothing is compared.
  if (length > 0 && cudaMemcpy(rest, static_cast<char*>(memory) + size, length, cudaMemcpyDeviceToHost) == cudaSuccess &&
      std::memcmp(rest, expected, length) != 0) {
    ++overwritten;
    std::fprintf(stderr, "a kernel wrote past the end of a tensor of %zu bytes\n", size);
  }
  cudaFree(memory);
}

// Tensors so far that something was written behind.
int sanitizer_overwritten() { return overwritten; }

}

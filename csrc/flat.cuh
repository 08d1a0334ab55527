// What the kernels that walk dense tensors flat share: where a thread finds its 16-byte words, whole or at a ragged end, and
// the second stage of sums that blocks leave in pieces.
#pragma once

#include "device.cuh"

namespace fastlayers {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;  // words of each operand in flight a thread

template <typename T>
constexpr int kVector = kVectorBytes / sizeof(T);

// The V elements at element i of n: WHOLE, or one element at a time where the tensor does not start on a 16-byte boundary, and
// at its end.
template <typename T, bool WHOLE, int V = kVector<T>>
__device__ __forceinline__ Vec<T, V> load_flat(const T* p, int64_t i, int64_t n) {
  Vec<T, V> w;
  if constexpr (WHOLE) {
    w = load_vec<T, V>(p + i);
  } else {
#pragma unroll
    for (int j = 0; j < V; ++j) w.v[j] = i + j < n ? p[i + j] : convert<T>(0.f);
  }
  return w;
}

template <typename T, bool WHOLE, int V = kVector<T>>
__device__ __forceinline__ void store_flat(T* p, int64_t i, int64_t n, const Vec<T, V>& w) {
  if constexpr (WHOLE) {
    store_vec<T, V>(p + i, w);
  } else {
#pragma unroll
    for (int j = 0; j < V; ++j)
      if (i + j < n) p[i + j] = w.v[j];
  }
}

// First element of word u of this thread. A warp's words are neighbours, a block's unrolled words are kThreads apart.
template <typename T>
__device__ __forceinline__ int64_t flat_index(int u) {
  return ((static_cast<int64_t>(blockIdx.x) * kUnroll + u) * kThreads + threadIdx.x) * kVector<T>;
}

// Calls f for the words of this thread: once for all of them where every word of the block is whole, so that their loads
// are in flight together; else (a tail, a misaligned tensor) one by one.
template <typename T, typename F>
__device__ __forceinline__ void for_block(bool is_aligned, int64_t n, F&& f) {
  constexpr int64_t kBlock = static_cast<int64_t>(kUnroll) * kThreads * kVector<T>;
  if (is_aligned && (blockIdx.x + 1) * kBlock <= n) {
    f(std::integral_constant<int, kUnroll>{}, 0);
  } else {
#pragma unroll 1
    for (int first = 0; first < kUnroll; ++first) f(std::integral_constant<int, 1>{}, first);
  }
}

// Adds the pieces up: partial [outer, pieces, columns] to ds [outer, columns], in a fixed order. A block has RESULTS results,
// and kThreads / RESULTS threads for each.
template <typename T, int RESULTS = 32>
__global__ void __launch_bounds__(kThreads) add_pieces(const compute_t<T>* partial, T* ds, int64_t outer, int64_t pieces,
                                                      int64_t columns) {
  using A = compute_t<T>;
  constexpr int kShares = kThreads / RESULTS;
  __shared__ A shared[kShares][RESULTS];
  const int result = threadIdx.x % RESULTS, share = threadIdx.x / RESULTS;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * RESULTS + result;
  A sum = 0;
  if (i < outer * columns) {
    const A* p = partial + i / columns * pieces * columns + i % columns;
#pragma unroll 8
    for (int64_t k = share; k < pieces; k += kShares) sum += p[k * columns];
  }
  shared[share][result] = sum;
  __syncthreads();
  if (share != 0 || i >= outer * columns) return;
  for (int k = 1; k < kShares; ++k) sum += shared[k][result];
  ds[i] = convert<T>(sum);
}

// ---- host ---------------------------------------------------------------------------------------------------------------

inline unsigned blocks_for(int64_t n, int64_t each) {
  const int64_t blocks = ceil_div(n, each);
  STD_TORCH_CHECK(blocks <= INT32_MAX, "fastlayers: ", n, " elements are more than one launch takes");
  return static_cast<unsigned>(blocks);
}

template <typename T>
unsigned flat_blocks(int64_t n) { return blocks_for(n, static_cast<int64_t>(kThreads) * kUnroll * kVector<T>); }

}  // namespace
}  // namespace fastlayers

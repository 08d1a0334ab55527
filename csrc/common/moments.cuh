// Count, mean and sum of squared deviations of parts of a tensor, and how threads merge what each of them found.
//
// Moments are merged as deviations from a mean, never as sums of squares about 0: a mean far from 0 costs no accuracy. Every merge
// has a fixed order, so results are equal to the bit from run to run.
#pragma once

#include <cstring>

#include "device.cuh"

namespace fastlayers {

// Chan's formula for the moments of two parts together. `share` is the second part's count over that of both, and `weight` the share times
// the first part's count.
template <typename A>
__device__ __forceinline__ void merge_moments(A& mean, A& m2, A other_mean, A other_m2, A share, A weight) {
  const A delta = other_mean - mean;
  mean += delta * share;
  m2 += other_m2 + delta * (delta * weight);
}

template <typename A>
struct Moments {
  A count = 0, mean = 0, m2 = 0;  // m2: the sum of the squared deviations from the mean
};

template <typename A>
__device__ __forceinline__ Moments<A> merge(const Moments<A>& p, const Moments<A>& q) {
  const A count = p.count + q.count;
  A share;
  if constexpr (std::is_same_v<A, float>) share = __fdividef(q.count, count);
  else share = q.count / count;
  if (count == A(0)) share = A(0);
  Moments<A> both = p;
  merge_moments(both.mean, both.m2, q.mean, q.m2, share, p.count * share);
  both.count = count;
  return both;
}

// ---- over threads -------------------------------------------------------------------------------------------------------

template <typename T>
__device__ __forceinline__ T shuffled(const T& value, int lane_mask) {
  static_assert(sizeof(T) % 4 == 0);
  T r;
  unsigned words[sizeof(T) / 4];
  memcpy(words, &value, sizeof(T));
  unroll<sizeof(T) / 4>([&](int i) { words[i] = __shfl_xor_sync(0xffffffffu, words[i], lane_mask); });
  memcpy(&r, words, sizeof(T));
  return r;
}

// Merges the values of `lanes` neighbouring lanes, by merge(T, T). Both lanes of a pair merge in the same order, so that all lanes end
// up with the same bits.
template <typename T>
__device__ __forceinline__ T lanes_merge(T value, int lanes) {
  const int lane = threadIdx.x & 31;
  for (int o = 1; o < lanes; o <<= 1) {
    const T other = shuffled(value, o);
    value = lane & o ? merge(other, value) : merge(value, other);
  }
  return value;
}

// Merges the values of `lanes` threads: a part of a warp, or the whole block. `slots`, shared, has one for each warp.
template <typename T>
__device__ __forceinline__ T group_merge(T value, T* slots, int lanes) {
  value = lanes_merge(value, lanes < 32 ? lanes : 32);
  if (lanes <= 32) return value;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  if (lane == 0) slots[warp] = value;
  __syncthreads();
  value = lane < static_cast<int>(blockDim.x >> 5) ? slots[lane] : T{};
  return lanes_merge(value, 32);
}

}  // namespace fastlayers

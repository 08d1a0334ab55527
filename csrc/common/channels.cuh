// What batch_norm and group_norm share: values per channel, how threads walk down the pixels of a channels-last tensor and merge what
// they found.
#pragma once

#include "channel_layout.h"
#include "moments.cuh"

namespace fastlayers {

// ---- values per channel -------------------------------------------------------------------------------------------------

// A vector of a value per channel, of x's dtype T, or of the compute type.
struct ChannelValues {
  void* data = nullptr;
  bool wide = false;

  template <typename T>
  __device__ __forceinline__ compute_t<T> load(int64_t c, float otherwise) const {
    using A = compute_t<T>;
    if (data == nullptr) return otherwise;
    return sizeof(T) == 2 && wide ? static_cast<const A*>(data)[c] : convert<A>(static_cast<const T*>(data)[c]);
  }
  template <typename T>
  __device__ __forceinline__ void store(int64_t c, compute_t<T> value) const {
    if (data == nullptr) return;
    if (sizeof(T) == 2 && wide) static_cast<compute_t<T>*>(data)[c] = value;
    else static_cast<T*>(data)[c] = convert<T>(value);
  }
};

// ---- threads over channels and pixels -----------------------------------------------------------------------------------

// The place of a thread in a block that is `across` words of columns wide. Its V neighbouring columns begin with `column`; it walks down
// the rows from row y of the block on.
template <int V>
struct ColumnPlace {
  int x, y;
  int64_t column;

  __device__ __forceinline__ ColumnPlace(int across, int64_t tile) {
    y = threadIdx.x / across;
    x = static_cast<int>(threadIdx.x) - y * across;
    column = (tile * across + x) * V;
  }
};

// The moments of some elements of each of K channels, of which there are equally many.
template <typename A, int K>
struct ChannelMoments {
  static constexpr int kSize = 2 * K + 1;
  A v[kSize] = {};  // the count, K means, K sums of squared deviations

  __device__ __forceinline__ void merge(const ChannelMoments& o) {
    if (o.v[0] == A(0)) return;
    const A n = v[0] + o.v[0], share = n > A(0) ? o.v[0] / n : A(0), weight = v[0] * share;
    unroll<K>([&](int k) { merge_moments(v[1 + k], v[1 + K + k], o.v[1 + k], o.v[1 + K + k], share, weight); });
    v[0] = n;
  }
};

// The backward's sums over some elements of each of K channels: of dz, the gradient of z, and of dz times x's deviation from the mean.
template <typename A, int K>
struct ChannelSums {
  static constexpr int kSize = 2 * K;
  A v[kSize] = {};  // K sums of either kind

  __device__ __forceinline__ void merge(const ChannelSums& o) {
    unroll<kSize>([&](int k) { v[k] += o.v[k]; });
  }
};

template <typename State>
__device__ __forceinline__ void merge_warp(State& state) {
#pragma unroll 1
  for (int o = 16; o > 0; o >>= 1) {
    State other;
    unroll<State::kSize>([&](int k) { other.v[k] = __shfl_down_sync(0xffffffffu, state.v[k], o); });
    state.merge(other);
  }
}

// Merges the states of the threads of one word of columns, in a tree of fixed order, into that of the first (y == 0). `shared` has kSize
// values for every two threads of the block. Ends with a barrier. WARPS: where a block is one word of columns wide, shuffles take the place
// of most of the tree, which costs registers.
template <bool WARPS, typename State, typename A>
__device__ __forceinline__ void merge_down(State& state, A* shared, int x, int y, int across, int down) {
  const int slots = blockDim.x / 2;
  const auto put = [&](int slot) { unroll<State::kSize>([&](int k) { shared[k * slots + slot] = state.v[k]; }); };
  const auto get = [&](State& to, int slot) { unroll<State::kSize>([&](int k) { to.v[k] = shared[k * slots + slot]; }); };
  if (WARPS && across == 1) {  // whole warps have the column, and threads without a part of it an empty state
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    merge_warp(state);
    if (lane == 0) put(warp);
    __syncthreads();
    if (warp == 0) {
      state = State();
      if (lane < warps) get(state, lane);
      merge_warp(state);
    }
    __syncthreads();
    return;
  }
  int half = 1;
  while (half < down) half <<= 1;
#pragma unroll 1
  for (half >>= 1; half > 0; half >>= 1) {
    if (y >= half && y < 2 * half && y < down) put((y - half) * across + x);
    __syncthreads();
    if (y < half && y + half < down) {
      State other;
      get(other, y * across + x);
      state.merge(other);
    }
    __syncthreads();
  }
}

// ---- host ---------------------------------------------------------------------------------------------------------------

// The values of x's channels as kernels take them.
inline ChannelValues values_of(const ChannelLayout& x, const MaybeTensor& t, const char* op, const char* name) {
  if (!t) return {};
  x.check_values(*t, op, name);
  FASTLAYERS_CHECK(t->is_contiguous(), op, "expected ", name, " of contiguous values");
  return {const_cast<void*>(t->const_data_ptr()), t->scalar_type() == compute_dtype(x.x)};
}

}  // namespace fastlayers

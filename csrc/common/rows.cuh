// What the kernels that reduce along rows share: where a thread stands in its row, maxima and sums over the threads of a row,
// their exchange over blocks and clusters, words at the ends of a row, copies to shared memory.
#pragma once

#include "device.cuh"

namespace fastlayers {

// ---- clusters -----------------------------------------------------------------------------------------------------------

// They begin with sm_90. For older GPUs the kernels that use them must compile too, and are never launched. cooperative_groups has the same,
// with headers that take as long to read as torch's.
struct Cluster {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  __device__ unsigned num_blocks() const { return __clusterSizeInBlocks(); }
  __device__ unsigned block_rank() const { return __clusterRelativeBlockRank(); }
  __device__ void barrier_arrive() const { __cluster_barrier_arrive(); }
  __device__ void barrier_wait() const { __cluster_barrier_wait(); }
  template <typename T>
  __device__ T* map_shared_rank(T* slot, int rank) const { return static_cast<T*>(__cluster_map_shared_rank(slot, rank)); }
#else
  __device__ unsigned num_blocks() const { return 1; }
  __device__ unsigned block_rank() const { return 0; }
  __device__ void barrier_arrive() const {}
  __device__ void barrier_wait() const {}
  template <typename T>
  __device__ T* map_shared_rank(T* slot, int) const { return slot; }
#endif
  __device__ void sync() const { barrier_arrive(), barrier_wait(); }
};
__device__ inline Cluster this_cluster() { return {}; }

constexpr int kMaxCluster = 16;  // 8 is portable; 16 fits a GPC of every sm_90 part

// ---- values -------------------------------------------------------------------------------------------------------------

template <typename A>
__device__ __forceinline__ A minus_infinity() { return -static_cast<A>(INFINITY); }

template <typename A>
__device__ __forceinline__ A maximum(A a, A b) {
  if constexpr (std::is_same_v<A, double>) return fmax(a, b);
  else return fmaxf(a, b);
}

// A maximum that can be subtracted: an empty or fully masked part has -inf, and -inf - (-inf) is NaN.
template <typename A>
__device__ __forceinline__ A finite_or_zero(A m) { return m == minus_infinity<A>() ? A(0) : m; }

constexpr float kLog2E = 1.4426950408889634f;

// The hardware's exp2, whose error stays far below those of 16-bit results.
__device__ __forceinline__ float exp2_fast(float v) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}

// e^v and its inverse. FAST, for 16-bit results: the hardware's functions, whose errors stay far below theirs. For wider results the
// library's follow torch. The argument stays in natural units: the lowest bfloat16 times log2(e) would overflow.
template <bool FAST, typename A>
__device__ __forceinline__ A exponential(A v) {
  if constexpr (FAST) return exp2_fast(v * kLog2E);
  else if constexpr (std::is_same_v<A, double>) return called_exp(v);
  else return expf(v);
}
template <bool FAST, typename A>
__device__ __forceinline__ A logarithm(A v) {
  if constexpr (FAST) return __logf(v);
  else if constexpr (std::is_same_v<A, double>) return called_log(v);
  else return logf(v);
}

// The largest of the elements that a thread holds. Packed 16-bit values are compared two at a time, unconverted.
template <typename T, int K, int V>
__device__ __forceinline__ T largest(const Vec<T, V> (&held)[K]) {
  if constexpr (sizeof(T) == 2) {
    using T2 = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    T2 m = reinterpret_cast<const T2*>(held[0].v)[0];
#pragma unroll
    for (int i = 0; i < K; ++i)
      unroll<V / 2>([&](int j) { m = __hmax2(m, reinterpret_cast<const T2*>(held[i].v)[j]); });
    return __hmax(m.x, m.y);
  } else {
    T m = held[0].v[0];
#pragma unroll
    for (int i = 0; i < K; ++i)
      unroll<V>([&](int j) { m = maximum(m, held[i].v[j]); });
    return m;
  }
}

// ---- sums ---------------------------------------------------------------------------------------------------------------

template <typename A>
__device__ __forceinline__ A lanes_max(A v, int lanes) {
  for (int o = lanes >> 1; o > 0; o >>= 1) v = maximum(v, __shfl_xor_sync(0xffffffffu, v, o));
  return v;
}

template <typename A>
__device__ __forceinline__ A lanes_sum(A v, int lanes) {
  for (int o = lanes >> 1; o > 0; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
  return v;
}

// Two sums at once over `lanes` neighbouring lanes: their shuffles overlap. The usual whole warp has no loop.
template <typename A>
__device__ __forceinline__ void lanes_sum(A& u, A& v, int lanes) {
  if (lanes == 32) {
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) {
      const A w = __shfl_xor_sync(0xffffffffu, u, o);
      v += __shfl_xor_sync(0xffffffffu, v, o);
      u += w;
    }
  } else {
#pragma unroll 1
    for (int o = lanes >> 1; o > 0; o >>= 1) {
      const A w = __shfl_xor_sync(0xffffffffu, u, o);
      v += __shfl_xor_sync(0xffffffffu, v, o);
      u += w;
    }
  }
}

// Adds the words' own sums: a tree of few roundings where a running sum over the row would have one an element.
template <typename A, int V>
__device__ __forceinline__ A tree_sum(const Vec<A, V>& v) {
  if constexpr (V == 1) {
    return v.v[0];
  } else {
    Vec<A, V / 2> half;
    unroll<V / 2>([&](int j) { half.v[j] = v.v[2 * j] + v.v[2 * j + 1]; });
    return tree_sum(half);
  }
}

// ---- exchange over the warps of a row -----------------------------------------------------------------------------------

// Brings one value of every warp of a row, over all blocks of its cluster, to every thread of the row: load(i) then gives
// the value of warp i, for i < count(). One barrier.
template <typename T, bool CLUSTER>
struct Exchange {
  T* slots;  // shared, one for each warp of the row, which has the whole block where it has more than one warp

  __device__ int warps() const { return blockDim.x >> 5; }
  __device__ int count() const {
    if constexpr (CLUSTER) return warps() * static_cast<int>(this_cluster().num_blocks());
    else return warps();
  }
  __device__ void arrive() const {  // every block of the cluster has started: its memory may be written
    if constexpr (CLUSTER) this_cluster().barrier_arrive();
  }
  __device__ void publish(T value) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    if constexpr (CLUSTER) {
      auto cluster = this_cluster();
      cluster.barrier_wait();
      if (lane < cluster.num_blocks()) cluster.map_shared_rank(slots, lane)[cluster.block_rank() * warps() + warp] = value;
      cluster.sync();
    } else {
      if (lane == 0) slots[warp] = value;
      __syncthreads();
    }
  }
  __device__ T load(int i) const { return slots[i]; }
};

// ---- where a thread stands ----------------------------------------------------------------------------------------------

// Its row, and the words of it that it owns, `stride` apart. Of a ragged row (one whose length is no multiple of the vector)
// the whole words begin after up to V - 1 single elements and end before as many; a thread may own one of these.
struct Place {
  int64_t row;
  int64_t start;  // of the first whole word, in elements from that of the tensor
  int words;      // whole ones; 32 bits do, for a row that fits in registers is short
  int first, stride;
  int single;     // its element in the row, or -1

  __device__ __forceinline__ int word(int i) const { return first + i * stride; }

  // RAGGED: rows may be so, as `a` says. SHARE: the words of a thread where the blocks of a cluster share a row, or 0.
  template <int V, bool RAGGED = true, int SHARE = 0, typename Args>
  __device__ static Place find(const Args& a) {
    Place p;
    p.stride = a.lanes;
    p.row = blockIdx.x;
    p.first = threadIdx.x;
    if constexpr (SHARE > 0) {
      auto cluster = this_cluster();
      p.row /= cluster.num_blocks();
      p.first += static_cast<int>(cluster.block_rank()) * SHARE * a.lanes;
    } else if (a.lanes <= 32) {
      p.row = p.row * (blockDim.x >> a.lane_bits) + (threadIdx.x >> a.lane_bits);
      p.first &= a.lanes - 1;
    }
    p.start = p.row * a.n;
    p.single = -1;
    int n = static_cast<int>(a.n);
    if (RAGGED && a.ragged) {
      const int before = min(n, static_cast<int>(-p.start & (V - 1)));
      const int after = (n - before) & (V - 1);
      if (p.first < before) p.single = p.first;
      else if (p.first < before + after) p.single = n - before - after + p.first;
      p.start += before;
      n -= before + after;
    }
    p.words = static_cast<unsigned>(n) / V;
    if (p.row >= a.rows) p.words = 0, p.single = -1;
    return p;
  }
};

// ---- words at the ends of a row -----------------------------------------------------------------------------------------

// A word begins with element e of a row of n elements, and may have elements of the neighbouring rows: e < 0, or e + V > n.
template <typename I, typename N>
__device__ __forceinline__ bool inside(I e, int j, N n) { return e + j >= 0 && e + j < n; }
template <int V, typename I, typename N>
__device__ __forceinline__ bool all_inside(I e, N n) { return e >= 0 && e + V <= n; }

// Writes the part of a word that belongs to the row.
template <typename T, int V, typename I, typename N>
__device__ __forceinline__ void store_word(T* p, I e, N n, const Vec<T, V>& w) {
  if (all_inside<V>(e, n)) {
    store_vec<T, V>(p, w);
  } else {
    unroll<V>([&](int j) {
      if (inside(e, j, n)) p[j] = w.v[j];
    });
  }
}

// Overwrites what a word holds of the neighbouring rows.
template <typename T, int V, typename I, typename N>
__device__ __forceinline__ void blank_neighbours(Vec<T, V>& v, I e, N n, T value) {
  if (all_inside<V>(e, n)) return;
  unroll<V>([&](int j) {
    if (!inside(e, j, n)) v.v[j] = value;
  });
}

// ---- shared memory ------------------------------------------------------------------------------------------------------

template <int BYTES>
__device__ __forceinline__ void copy_async(void* shared, const void* global) {
  const auto to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  if constexpr (BYTES == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
  else asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(global), "n"(BYTES) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all but the last PENDING groups of copies that were committed.
template <int PENDING>
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

// ---- host ---------------------------------------------------------------------------------------------------------------

// The words of a thread that kernels are built for.
template <int... K>
using Built = std::integer_sequence<int, K...>;

// Calls f(Number<K>) for the words of a launch, one of those.
template <int K, int... MORE, typename F>
void with_words(Built<K, MORE...>, int words, F&& f) {
  if constexpr (sizeof...(MORE) > 0) {
    if (words != K) return with_words(Built<MORE...>{}, words, f);
  }
  f(Number<K>{});
}

template <int... K>
std::initializer_list<int> list_of(Built<K...>) {
  static constexpr std::initializer_list<int> list = {K...};
  return list;
}

template <int... K>
constexpr int most_of(Built<K...>) { return std::max({K...}); }

// Contiguous and aligned to the vector, by a copy where it is not.
inline Tensor dense(const Tensor& t) {
  if (!t.is_contiguous()) return torch::stable::contiguous(t);
  return aligned(t.const_data_ptr()) ? t : torch::stable::clone(t);
}

}  // namespace fastlayers

// What softmax and the losses on logits share: sums of exponentials along a row, rows in the shared memory of a cluster, and the layout
// of threads over strided columns.
//
// The namespace has no name, because each file that includes this has its own kernels.
#pragma once

#include "common/rows.cuh"
#include "logits.h"

namespace fastlayers {
namespace {

// ---- reductions over the threads of a row -------------------------------------------------------------------------------

template <typename A>
struct Pair {
  A m, s;  // maximum; sum of exponentials relative to it
};

template <bool FAST, typename A>
__device__ __forceinline__ Pair<A> merge(Pair<A> p, Pair<A> q) {
  const A m = maximum(p.m, q.m), base = finite_or_zero(m);
  return {m, p.s * exponential<FAST>(p.m - base) + q.s * exponential<FAST>(q.m - base)};
}

template <bool FAST, typename A>
__device__ __forceinline__ Pair<A> lanes_merge(Pair<A> p, int lanes) {
  const A m = lanes_max(p.m, lanes);
  return {m, lanes_sum(p.s * exponential<FAST>(p.m - finite_or_zero(m)), lanes)};
}

template <bool FAST, bool CLUSTER, typename A>
__device__ __forceinline__ Pair<A> row_merge(Pair<A> p, Exchange<Pair<A>, CLUSTER>& exchange, int lanes) {
  if (!CLUSTER && lanes <= 32) return p;
  exchange.publish(p);
  const int lane = threadIdx.x & 31, count = exchange.count();
  Pair<A> all{minus_infinity<A>(), A(0)};
  if (lane < count) all = exchange.load(lane);
#pragma unroll 1
  for (int i = lane + 32; i < count; i += 32) all = merge<FAST>(all, exchange.load(i));
  return lanes_merge<FAST>(all, 32);
}

template <bool CLUSTER, typename A>
__device__ __forceinline__ A row_sum(A s, Exchange<A, CLUSTER>& exchange, int lanes) {
  if (!CLUSTER && lanes <= 32) return s;
  exchange.publish(s);
  const int lane = threadIdx.x & 31, count = exchange.count();
  A all = lane < count ? exchange.load(lane) : A(0);
#pragma unroll 1
  for (int i = lane + 32; i < count; i += 32) all += exchange.load(i);
  return lanes_sum(all, 32);
}

// Element by element. Packed 16-bit values are compared two at a time, unconverted.
template <typename T, int V>
__device__ __forceinline__ Vec<T, V> maxima(Vec<T, V> a, const Vec<T, V>& b) {
  if constexpr (sizeof(T) == 2) {
    using T2 = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    unroll<V / 2>([&](int j) {
      reinterpret_cast<T2*>(a.v)[j] = __hmax2(reinterpret_cast<T2*>(a.v)[j], reinterpret_cast<const T2*>(b.v)[j]);
    });
  } else {
    unroll<V>([&](int j) { a.v[j] = maximum(a.v[j], b.v[j]); });
  }
  return a;
}

// ---- a row in the shared memory of a cluster ----------------------------------------------------------------------------
//
// A row in shared memory takes no registers, so an SM holds three blocks of up to 72 KiB each: while one waits for its loads or for its
// cluster, the others compute and write. A thread reads back only words that it requested itself, so the exchange over the cluster is
// the only barrier.

constexpr int kHeldThreads = 256;
constexpr int kHeldBytes = 72 * 1024;  // of one row that a block holds, of all operands together

// The words of a row that a block of a cluster holds: `each` words, fewer in the last block. Rows have n elements and start `stride`
// elements apart.
template <int V>
struct Share {
  int64_t row, start;  // of its first word in the row, in elements; in a ragged row 0 to -(V - 1) for the first block
  int words;

  __device__ static Share find(int64_t n, int64_t stride, int each, bool ragged) {
    auto cluster = this_cluster();
    Share s;
    s.row = blockIdx.x / cluster.num_blocks();
    const int head = ragged ? static_cast<int>((s.row * stride) & (V - 1)) : 0;
    const int words = (static_cast<int>(n) + head + V - 1) / V, first = static_cast<int>(cluster.block_rank()) * each;
    s.start = static_cast<int64_t>(first) * V - head;
    s.words = max(0, min(each, words - first));
    return s;
  }

  // Calls f(w) for every word of this thread.
  template <typename F>
  __device__ __forceinline__ void for_words(F&& f) const {
#pragma unroll 4
    for (int w = threadIdx.x; w < words; w += kHeldThreads) f(w);
  }
};

__device__ __forceinline__ void await_copies() {
  commit_copies();
  wait_copies<0>();
}

// Launches a kernel that holds rows of `words` words, each `bytes` in all operands, in the shared memory of clusters, if they fit.
template <auto kernel, typename Args>
bool launch_held(const Args& args, int64_t words, int bytes, const Launch& launch) {
  int64_t cluster = ceil_div(words * bytes, kHeldBytes);
  if (cluster > 8 && cluster < kMaxCluster) cluster = kMaxCluster;  // others leave gaps: .94 for 1.00 with 15 and 16 blocks
  if (device_traits(launch.device()).capability < 90 || cluster > kMaxCluster || args.rows * cluster > INT32_MAX) return false;
  const int each = static_cast<int>(ceil_div(words, cluster));
  allow_shared_memory<kernel>(kHeldBytes, launch);
  const LaunchShape shape{args.rows * cluster, kHeldThreads, static_cast<size_t>(each) * bytes, static_cast<int>(cluster)};
  launch_kernel(kernel, shape, launch, args, each);
  return true;
}

// ---- columns ------------------------------------------------------------------------------------------------------------

constexpr int kColumnThreads = 256;

// Merges the values of the threads of one column group with `combine`. Every thread of the group gets the result.
template <typename T, int V, typename Args, typename Combine>
__device__ __forceinline__ void combine_down(T (&value)[V], T* shared, const Args& a, Combine&& combine) {
  if (a.down == 1) return;
  const int x = threadIdx.x % a.across, y = threadIdx.x / a.across;
  unroll<V>([&](int j) { shared[(y * V + j) * a.across + x] = value[j]; });
  __syncthreads();
  unroll<V>([&](int j) {
    T all = shared[j * a.across + x];
    for (int k = 1; k < a.down; ++k) all = combine(all, shared[(k * V + j) * a.across + x]);
    value[j] = all;
  });
}

// The vector of a columns kernel, if the columns allow one, and the layout of the threads of a block over the columns.
struct ColumnLaunch {
  int vector, across, down;
  int64_t blocks;
};

inline ColumnLaunch column_launch(const Shape& s, int vector) {
  ColumnLaunch launch;
  launch.vector = s.inner % vector == 0 ? vector : 1;
  const int64_t columns = ceil_div(s.inner, launch.vector);
  // A thread takes about 16 elements of a column. The rest of the block takes neighbouring columns.
  launch.down = static_cast<int>(std::min<int64_t>(16, next_power_of_2(ceil_div(s.n, 16))));
  launch.across = static_cast<int>(std::min<int64_t>(kColumnThreads / launch.down, next_power_of_2(columns)));
  launch.down = static_cast<int>(std::min<int64_t>(kColumnThreads / launch.across, next_power_of_2(s.n)));
  launch.blocks = s.outer * ceil_div(columns, launch.across);
  STD_TORCH_CHECK(launch.blocks <= INT32_MAX, "fastlayers: a shape of ", s.outer, " x ", s.n, " x ", s.inner,
                  " needs more blocks than one launch takes");
  return launch;
}

}  // namespace
}  // namespace fastlayers

// layer_norm and rms_norm over the last dimensions, with or without the sum of a residual before them; forward and backward.
//
// The stock backward reads its operands once for the gradient of x and once more for those of weight and bias, and the stock
// sum is written by one kernel and read by the next. Here every tensor is read once and written once:
//
//   forward   a part of a warp, a block, or up to 16 blocks of a cluster (sm_90) hold one row in registers between the
//             statistics and the result. Mean and squared deviations of the warps cross warps and blocks in one exchange.
//   backward  the grid is resident and each group of threads walks down the rows. It keeps the sums of dweight and dbias of
//             its columns in registers; the next rows are on their way to shared memory while one is worked on. A block
//             writes its sums once, and a second kernel adds up those of all blocks, in fixed order.
//   split     rows too long for that: every row cut into pieces, and a pass for each of what the kernels above do at once.
//
// A row whose length is not a multiple of the vector starts anywhere in a 16-byte word ("ragged"). The kernels read the
// words that cover the row and ignore what belongs to its neighbours. In the backward a group takes only rows that start
// at the same place of a word, so a thread stays with its columns.
#include <cooperative_groups.h>

#include <cstdlib>
#include <numeric>

#include "device.cuh"

namespace fastlayers {
namespace {

// Clusters begin with sm_90. For older GPUs the kernels that use them must compile too, and are never launched.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
__device__ inline cooperative_groups::cluster_group this_cluster() { return cooperative_groups::this_cluster(); }
#else
struct OneBlock {
  __device__ unsigned num_blocks() const { return 1; }
  __device__ unsigned block_rank() const { return 0; }
  __device__ void barrier_arrive() const {}
  __device__ void barrier_wait() const {}
  __device__ void sync() const {}
  template <typename T>
  __device__ T* map_shared_rank(T* slot, unsigned) const { return slot; }
};
__device__ inline OneBlock this_cluster() { return {}; }
#endif

enum Kind : int { kLayer = 0, kRms = 1, kLlama = 2, kGemma = 3 };

constexpr int kMaxCluster = 16;  // 8 is portable; 16 fits a GPC of every sm_90 part
constexpr int kMaxThreads = 1024;

// ---- sums over the threads of a row -------------------------------------------------------------------------------------

template <typename A>
__device__ __forceinline__ A lanes_sum(A v, int lanes) {
  for (int o = lanes >> 1; o > 0; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
  return v;
}

// Adds the words' own sums: a tree of few roundings where a running sum over the row would have one an element.
template <typename A, int V>
__device__ __forceinline__ A tree_sum(const Vec<A, V>& v) {
  if constexpr (V == 1) {
    return v.v[0];
  } else {
    Vec<A, V / 2> half;
#pragma unroll
    for (int j = 0; j < V / 2; ++j) half.v[j] = v.v[2 * j] + v.v[2 * j + 1];
    return tree_sum(half);
  }
}

template <typename A, int V>
__device__ __forceinline__ A tree_dot(const Vec<A, V>& a, const Vec<A, V>& b) {
  Vec<A, V / 2> half;
#pragma unroll
  for (int j = 0; j < V / 2; ++j) half.v[j] = a.v[2 * j] * b.v[2 * j] + a.v[2 * j + 1] * b.v[2 * j + 1];
  return tree_sum(half);
}

// Brings one value of every warp of a row, over all blocks of its cluster, to every thread of the row: to `slots`, shared,
// one for each of those warps, whose number it returns. One barrier, over the group of `lanes` threads that is the
// block's `group`-th. Exchanges that follow one another use different slots in turn.
template <bool CLUSTER, typename T>
__device__ __forceinline__ int exchange(T* slots, const T& value, int lanes, int group) {
  const int warps = lanes >> 5, lane = threadIdx.x & 31;
  const int warp = (static_cast<int>(threadIdx.x) - group * lanes) >> 5;
  if constexpr (CLUSTER) {
    auto cluster = this_cluster();
    const int blocks = static_cast<int>(cluster.num_blocks());
    if (lane < blocks) cluster.map_shared_rank(slots, lane)[cluster.block_rank() * warps + warp] = value;
    cluster.sync();
    return warps * blocks;
  } else {
    if (lane == 0) slots[warp] = value;
    asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "r"(lanes) : "memory");
    return warps;
  }
}

// ---- words of a row -----------------------------------------------------------------------------------------------------

// The word of V elements at element e of a row of n, which may reach out of the row. Where it is wider than 16 bytes, the
// parts without any element of the row are not read: they may lie past the tensor.
template <typename T, int V>
__device__ __forceinline__ Vec<T, V> load_word(const T* row, int e, int n) {
  if constexpr (sizeof(T) * V <= kVectorBytes) {
    return load_vec<T, V>(row + e);
  } else {
    constexpr int U = kVectorBytes / sizeof(T);
    Vec<T, V> v = filled<T, V>(convert<T>(0.f));
#pragma unroll
    for (int u = 0; u < V; u += U) {
      if (e + u + U <= 0 || e + u >= n) continue;
      const Vec<T, U> part = load_vec<T, U>(row + e + u);
#pragma unroll
      for (int j = 0; j < U; ++j) v.v[u + j] = part.v[j];
    }
    return v;
  }
}

// Writes the part of a word that belongs to the row.
template <bool RAGGED, typename T, int V>
__device__ __forceinline__ void store_word(T* row, int e, int n, const Vec<T, V>& w) {
  if (!RAGGED || (e >= 0 && e + V <= n)) {
    store_vec<T, V>(row + e, w);
  } else {
#pragma unroll
    for (int j = 0; j < V; ++j)
      if (e + j >= 0 && e + j < n) row[e + j] = w.v[j];
  }
}

// Zeroes what a word holds of the neighbouring rows.
template <bool RAGGED, typename A, int V>
__device__ __forceinline__ void blank_neighbours(Vec<A, V>& v, int e, int n) {
  if constexpr (RAGGED) {
    // A vote, for a branch: few warps have such a word, and the compiler would have all of them go through this.
    if (!__any_sync(__activemask(), e < 0 || e + V > n)) return;
#pragma unroll
    for (int j = 0; j < V; ++j)
      if (e + j < 0 || e + j >= n) v.v[j] = A(0);
  }
}

// 16 bytes, from byte `shift` on, of two words that follow one another.
__device__ __forceinline__ uint4 shifted(const uint4& low, const uint4& high, int shift) {
  unsigned w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  if (shift & 8) {
#pragma unroll
    for (int i = 0; i < 6; ++i) w[i] = w[i + 2];
  }
  if (shift & 4) {
#pragma unroll
    for (int i = 0; i < 5; ++i) w[i] = w[i + 1];
  }
  const unsigned select = shift & 2 ? 0x5432 : 0x3210;
  return {__byte_perm(w[0], w[1], select), __byte_perm(w[1], w[2], select), __byte_perm(w[2], w[3], select),
          __byte_perm(w[3], w[4], select)};
}

// V elements of weight or bias from element e on, which in a ragged row is no multiple of V: two aligned words then, shifted
// together. What lies out of the row is arbitrary.
template <bool RAGGED, typename W, int V>
__device__ __forceinline__ Vec<W, V> load_weight(const W* w, int e, int n) {
  Vec<W, V> v;
  constexpr int U = sizeof(W) * V <= kVectorBytes ? V : kVectorBytes / sizeof(W);
  if (!RAGGED || ((e & (V - 1)) == 0 && e + V <= n)) {
#pragma unroll
    for (int u = 0; u < V; u += U) {
      if constexpr (sizeof(W) * U == kVectorBytes)
        *reinterpret_cast<uint4*>(v.v + u) = __ldg(reinterpret_cast<const uint4*>(w + e + u));
      else
        *reinterpret_cast<Vec<W, U>*>(v.v + u) = load_vec<W, U>(w + e + u);
    }
  } else if constexpr (sizeof(W) * V == kVectorBytes) {
    const int place = e & (V - 1), word = (e - place) / V, last = (n - 1) / V;
    const auto* words = reinterpret_cast<const uint4*>(w);
    const uint4 low = __ldg(words + min(max(word, 0), last)), high = __ldg(words + min(max(word + 1, 0), last));
    *reinterpret_cast<uint4*>(v.v) = shifted(low, high, place * static_cast<int>(sizeof(W)));
  } else {
#pragma unroll
    for (int j = 0; j < V; ++j) v.v[j] = w[min(max(e + j, 0), n - 1)];
  }
  return v;
}

// ---- forward ------------------------------------------------------------------------------------------------------------

template <typename A>
struct ForwardArgs {
  const void *x, *residual, *weight, *bias;  // but for x all may be null
  void *sum, *y;
  A* stats;  // or null
  int64_t rows;
  int n, kind;
  int lanes;      // threads of one block that share a row: a power of two up to a warp, or the whole block
  int lane_bits;  // log2 of them, up to a warp
  bool wide_weight, wide_out;  // float32, where x has 16 bits
  A eps;
};

// What a warp knows of its part of a row. `m2`: squared deviations from the mean of the part; from 0 for rms_norm.
template <typename A>
struct Moments {
  A mean, m2, count;
};

template <bool RAGGED, typename T, typename A, int V>
__device__ __forceinline__ Vec<A, V> deviations(const Vec<T, V>& v, A center, int e, int n) {
  Vec<A, V> r = unpack<A>(v);
#pragma unroll
  for (int j = 0; j < V; ++j) r.v[j] -= center;
  blank_neighbours<RAGGED>(r, e, n);
  return r;
}

// Moves the mean of a part by the mean of the deviations from it, `rest` being their sum: what the rounding of a sum of large
// values has left out.
template <typename A>
__device__ __forceinline__ void correct_mean(Moments<A>& part, A& mean, A rest) {
  const A delta = part.count > A(0) ? rest / part.count : A(0);
  part.m2 -= rest * delta;
  mean += delta;
  part.mean = mean;
}

// The moments of a whole row from those of its warps. Their means are added up as differences from the first, so that a mean
// far from zero costs no digits.
template <bool CLUSTER, typename A>
__device__ __forceinline__ Moments<A> row_moments(const Moments<A>& part, Moments<A>* slots, int lanes, int group, int n, bool layer) {
  const int lane = threadIdx.x & 31, count = exchange<CLUSTER>(slots, part, lanes, group);
  Moments<A> row{A(0), A(0), static_cast<A>(n)};
  if (layer) {
    const A origin = slots[0].mean;
#pragma unroll 1
    for (int i = lane; i < count; i += 32) row.mean += slots[i].count * (slots[i].mean - origin);
    row.mean = origin + lanes_sum(row.mean, 32) / row.count;
  }
#pragma unroll 1
  for (int i = lane; i < count; i += 32) {
    const Moments<A> p = slots[i];
    row.m2 += p.m2;
    if (layer && p.count > A(0)) {
      const A d = p.mean - row.mean;
      row.m2 += p.count * d * d;
    }
  }
  row.m2 = lanes_sum(row.m2, 32);
  return row;
}

template <typename X, typename R>
using sum_t = std::conditional_t<std::is_same_v<R, float> && sizeof(X) == 2, float, X>;

// Rows held in float32 though x has 16 bits, and float64 ones, take more registers.
template <typename X, typename R>
constexpr int kForwardThreads = sizeof(sum_t<X, R>) != sizeof(X) || sizeof(X) == 8 ? 512 : kMaxThreads;

// R: the residual's type, or void. MIXED: weight, bias and result may be float32 where x has 16 bits. RAGGED: rows may be so.
// THREADS: of a block at most.
template <typename X, typename R, bool MIXED, bool RAGGED, int K, bool CLUSTER, int THREADS>
__global__ void __launch_bounds__(THREADS, 1) layer_norm_forward_rows(const ForwardArgs<compute_t<X>> a) {
  using A = compute_t<X>;
  using S = sum_t<X, R>;
  constexpr int V = kVectorBytes / sizeof(X);
  constexpr bool ADD = !std::is_void_v<R>;
  __shared__ Moments<A> slots[kMaxThreads / 32 * (CLUSTER ? kMaxCluster / 2 : 1)];
  if constexpr (CLUSTER) this_cluster().barrier_arrive();

  int64_t row = blockIdx.x;
  int first = threadIdx.x;
  if constexpr (CLUSTER) {
    auto cluster = this_cluster();
    row /= cluster.num_blocks();
    first += static_cast<int>(cluster.block_rank()) * K * a.lanes;
  } else if (a.lanes <= 32) {
    row = row * (blockDim.x >> a.lane_bits) + (threadIdx.x >> a.lane_bits);
    first &= a.lanes - 1;
  }
  const int n = row < a.rows ? a.n : -V;  // a word may begin before its row
  const int64_t start = row * a.n;
  const int head = RAGGED ? static_cast<int>(start & (V - 1)) : 0;
  const auto element = [&](int i) { return (first + i * a.lanes) * V - head; };

  // All loads before anything that waits for one of them.
  Vec<X, V> loaded[K];
#pragma unroll
  for (int i = 0; i < K; ++i) {
    loaded[i] = filled<X, V>(convert<X>(0.f));
    if (element(i) < n) loaded[i] = load_vec<X, V>(static_cast<const X*>(a.x) + start + element(i));
  }
  Vec<S, V> held[K];
  if constexpr (ADD) {
    Vec<R, V> added[K];
#pragma unroll
    for (int i = 0; i < K; ++i) {
      added[i] = filled<R, V>(convert<R>(0.f));
      if (element(i) < n) added[i] = load_word<R, V>(static_cast<const R*>(a.residual) + start, element(i), n);
    }
#pragma unroll
    for (int i = 0; i < K; ++i) {
      Vec<A, V> s = unpack<A>(loaded[i]);
      const Vec<A, V> r = unpack<A>(added[i]);
#pragma unroll
      for (int j = 0; j < V; ++j) s.v[j] += r.v[j];
      held[i] = pack<S>(s);
      if (element(i) < n) store_word<RAGGED>(static_cast<S*>(a.sum) + start, element(i), n, held[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < K; ++i) held[i] = loaded[i];
  }

  // Weight and bias are requested before the threads wait for one another, as far as registers allow.
  constexpr bool EARLY = !MIXED && (K <= 2 || THREADS <= 512);
  [[maybe_unused]] Vec<X, V> early_weight[K], early_bias[K];
  if constexpr (EARLY) {
    if (a.weight != nullptr) {
#pragma unroll
      for (int i = 0; i < K; ++i)
        if (element(i) < n) early_weight[i] = load_weight<RAGGED, X, V>(static_cast<const X*>(a.weight), element(i), n);
    }
  }

  const bool layer = a.kind == kLayer;
  const int lanes = a.lanes < 32 ? a.lanes : 32;
  Moments<A> part{A(0), A(0), static_cast<A>(n)};
  A mean = 0;  // of the warp's part, then of the row
  if (layer) {
    A sum = 0;
#pragma unroll
    for (int i = 0; i < K; ++i) sum += tree_sum(deviations<RAGGED>(held[i], A(0), element(i), n));
    sum = lanes_sum(sum, lanes);
    if (CLUSTER || a.lanes > 32) {
      int count = 0;
#pragma unroll
      for (int i = 0; i < K; ++i)
        if (element(i) < n) count += RAGGED ? min(element(i) + V, n) - max(element(i), 0) : V;
      part.count = static_cast<A>(__reduce_add_sync(0xffffffffu, count));
    }
    mean = part.count > A(0) ? sum / part.count : A(0);
#pragma unroll
    for (int i = 0; i < K; ++i) forget(held[i]);
  }
  A rest = 0;  // what rounding has left out of the mean
#pragma unroll
  for (int i = 0; i < K; ++i) {
    const Vec<A, V> d = deviations<RAGGED>(held[i], mean, element(i), n);
    if (element(i) >= n) continue;
    part.m2 += tree_dot(d, d);
    if (layer) rest += tree_sum(d);
  }
  part.m2 = lanes_sum(part.m2, lanes);
  if (layer) correct_mean(part, mean, lanes_sum(rest, lanes));
  if constexpr (CLUSTER) this_cluster().barrier_wait();  // every block has started: its memory may be written
  if (CLUSTER || a.lanes > 32) {
    part = row_moments<CLUSTER>(part, slots, a.lanes, 0, n, layer);
    mean = part.mean;
  }
  const A rstd = rsqrt(part.m2 / static_cast<A>(n) + a.eps);
#pragma unroll
  for (int i = 0; i < K; ++i) forget(held[i]);
  if (a.stats != nullptr && first == 0 && n > 0) {
    a.stats[row] = layer ? mean : rstd;
    if (layer) a.stats[a.rows + row] = rstd;
  }

  const auto finish = [&](auto weight_type, auto out_type) {
    using W = decltype(weight_type);
    using Out = decltype(out_type);
    const W* weight = static_cast<const W*>(a.weight);
    const W* bias = static_cast<const W*>(a.bias);
    if constexpr (EARLY) {
      if (bias != nullptr) {
#pragma unroll
        for (int i = 0; i < K; ++i)
          if (element(i) < n) early_bias[i] = load_weight<RAGGED, W, V>(bias, element(i), n);
      }
    }
#pragma unroll
    for (int i = 0; i < K; ++i) {
      const int e = element(i);
      if (e >= n) continue;
      Vec<A, V> r = unpack<A>(held[i]);
#pragma unroll
      for (int j = 0; j < V; ++j) r.v[j] = (r.v[j] - mean) * rstd;
      if (weight != nullptr) {
        Vec<A, V> w;
        if constexpr (EARLY) w = unpack<A>(early_weight[i]);
        else w = unpack<A>(load_weight<RAGGED, W, V>(weight, e, n));
        if (a.kind == kGemma) {
#pragma unroll
          for (int j = 0; j < V; ++j) w.v[j] += A(1);
        }
        if (a.kind == kLlama) r = unpack<A>(pack<S>(r));
#pragma unroll
        for (int j = 0; j < V; ++j) r.v[j] *= w.v[j];
        // Llama's product has the dtype that its factors promote to.
        if (!std::is_same_v<Out, S> && std::is_same_v<W, S> && a.kind == kLlama) r = unpack<A>(pack<S>(r));
      }
      if (bias != nullptr) {
        Vec<A, V> b;
        if constexpr (EARLY) b = unpack<A>(early_bias[i]);
        else b = unpack<A>(load_weight<RAGGED, W, V>(bias, e, n));
#pragma unroll
        for (int j = 0; j < V; ++j) r.v[j] += b.v[j];
      }
      store_word<RAGGED>(static_cast<Out*>(a.y) + start, e, n, pack<Out>(r));
    }
  };
  if constexpr (MIXED) {
    if (a.wide_weight && a.wide_out) finish(A{}, A{});
    else if (a.wide_weight) finish(A{}, X{});
    else if (a.wide_out) finish(X{}, A{});
    else finish(X{}, X{});
  } else {
    finish(X{}, X{});
  }
}

// ---- rows that follow one another through a resident grid ---------------------------------------------------------------
//
// A group of threads walks down the rows, and the next ones are on their way to shared memory while it works on one. What
// belongs to the columns (weight, bias, their gradients' sums) stays with the threads.

constexpr int kResidentThreads = 512;  // of a block at most; registers for as many on an SM
// The ragged kernel of layer_norm for 16 bits does not get by with the 128 registers that this leaves a thread.
template <typename X, bool LAYER, bool RAGGED>
constexpr int kBackwardThreadsOf = sizeof(X) == 2 && LAYER && RAGGED ? 384 : kResidentThreads;
constexpr int kMaxStages = 4;
constexpr int kResidentWords = 4;  // of a thread: in the backward 64 sums of layer_norm in 16 bits, half of its registers

template <int BYTES>
__device__ __forceinline__ void copy_async(unsigned shared, const void* global) {
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared), "l"(global), "n"(BYTES) : "memory");
}

__device__ __forceinline__ void await_copies(int ahead) {  // all but those of the last `ahead` rows
  if (ahead == 1) asm volatile("cp.async.wait_group 1;" ::: "memory");
  else if (ahead == 2) asm volatile("cp.async.wait_group 2;" ::: "memory");
  else asm volatile("cp.async.wait_group 3;" ::: "memory");
}

// The words of one operand that a thread has in shared memory, K of them. Words of more than 16 bytes lie in parts, so that
// the threads of a warp always touch neighbouring 16 bytes.
template <typename T, int V, int K>
struct Staged {
  static constexpr int kBytes = sizeof(T) * V;
  static constexpr int kPart = kBytes < kVectorBytes ? kBytes : kVectorBytes;
  static constexpr int kParts = kBytes / kPart;
  static constexpr int kThread = K * kBytes;  // bytes a thread

  char* base;  // of the block's
  __device__ __forceinline__ char* at(int i, int part) const {
    return base + ((i * kParts + part) * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * kPart;
  }
  __device__ __forceinline__ void request(int i, const T* row, int e, int n) const {
    constexpr int U = V / kParts;
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      if (kParts == 1 || (e + (part + 1) * U > 0 && e + part * U < n))
        copy_async<kPart>(static_cast<unsigned>(__cvta_generic_to_shared(at(i, part))), row + e + part * U);
  }
  __device__ __forceinline__ Vec<T, V> load(int i) const {
    Vec<T, V> v;
    constexpr int U = V / kParts;
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      *reinterpret_cast<Vec<T, U>*>(v.v + part * U) = *reinterpret_cast<const Vec<T, U>*>(at(i, part));
    return v;
  }
  __device__ __forceinline__ void store(int i, const Vec<T, V>& v) const {
    constexpr int U = V / kParts;
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      *reinterpret_cast<Vec<T, U>*>(at(i, part)) = *reinterpret_cast<const Vec<T, U>*>(v.v + part * U);
  }
};

template <typename A>
struct StreamArgs {
  const void *x, *weight, *bias;  // weight and bias may be null
  void* y;
  A* stats;  // or null
  int64_t rows;
  int n, kind;
  int lanes;   // threads of a block that share a row: a group. A power of two up to a warp, then whole warps
  int groups;  // of all blocks; each takes every groups-th row
  int stages;  // rows of a group in shared memory
  bool wide_weight, wide_out;  // float32, where x has 16 bits
  A eps;
};

template <typename X, bool LAYER, bool RAGGED, bool CLUSTER>
__global__ void __launch_bounds__(kResidentThreads, 1) layer_norm_forward_stream(const StreamArgs<compute_t<X>> a) {
  using A = compute_t<X>;
  constexpr int V = kVectorBytes / sizeof(X), K = kResidentWords;
  __shared__ Moments<A> slots[2][kResidentThreads / 32 * (CLUSTER ? kMaxCluster : 1)];
  extern __shared__ __align__(16) char memory[];
  if constexpr (CLUSTER) this_cluster().barrier_arrive();

  int group = blockIdx.x, first = threadIdx.x, group_of_block = 0;
  if constexpr (CLUSTER) {
    auto cluster = this_cluster();
    group /= cluster.num_blocks();
    first += static_cast<int>(cluster.block_rank()) * K * a.lanes;
  } else {
    group_of_block = first / a.lanes;
    first -= group_of_block * a.lanes;
    group = group * (blockDim.x / a.lanes) + group_of_block;
  }
  const int n = a.n;
  const int head = RAGGED ? static_cast<int>(group * static_cast<int64_t>(n) & (V - 1)) : 0;
  const auto element = [&](int i) { return (first + i * a.lanes) * V - head; };

  using StagedX = Staged<X, V, K>;
  using StagedWide = Staged<A, V, K>;
  const int threads = blockDim.x, stage_bytes = threads * StagedX::kThread;
  const auto request = [&](int64_t row, char* stage) {
    if (row < a.rows) {
#pragma unroll
      for (int i = 0; i < K; ++i)
        if (element(i) < n) StagedX{stage}.request(i, static_cast<const X*>(a.x) + row * n, element(i), n);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  char* const end = memory + a.stages * stage_bytes;
  for (int i = 0; i + 1 < a.stages; ++i) request(group + static_cast<int64_t>(i) * a.groups, memory + i * stage_bytes);

  // Weight and bias of the thread's columns, behind the stages.
  char* const bias_at = end + (a.weight == nullptr ? 0 : threads * (a.wide_weight ? StagedWide::kThread : StagedX::kThread));
  int elements = 0;
#pragma unroll 1
  for (int i = 0; i < K; ++i) {
    const int e = element(i);
    if (e >= n) continue;
    elements += RAGGED ? min(e + V, n) - max(e, 0) : V;
    if (a.wide_weight) {
      if (a.weight != nullptr) StagedWide{end}.store(i, load_weight<RAGGED, A, V>(static_cast<const A*>(a.weight), e, n));
      if (a.bias != nullptr) StagedWide{bias_at}.store(i, load_weight<RAGGED, A, V>(static_cast<const A*>(a.bias), e, n));
    } else {
      if (a.weight != nullptr) StagedX{end}.store(i, load_weight<RAGGED, X, V>(static_cast<const X*>(a.weight), e, n));
      if (a.bias != nullptr) StagedX{bias_at}.store(i, load_weight<RAGGED, X, V>(static_cast<const X*>(a.bias), e, n));
    }
  }
  const auto parameter = [&](char* base, int i) {
    return sizeof(X) < sizeof(A) && a.wide_weight ? StagedWide{base}.load(i) : unpack<A>(StagedX{base}.load(i));
  };
  const int lanes = a.lanes < 32 ? a.lanes : 32;
  const A count = lanes_sum(static_cast<A>(elements), lanes);
  if constexpr (CLUSTER) this_cluster().barrier_wait();  // every block has started: its memory may be written

  char* stage = memory;
  int turn = 0;
  // The threads of a warp go on together until the last of their rows, with nothing to do past it.
  const int64_t warp_rows = a.rows - (CLUSTER || a.lanes >= 32 ? group : 0);
  int64_t row = group;
  for (int steps = warp_rows > 0 ? static_cast<int>((warp_rows + a.groups - 1) / a.groups) : 0; steps > 0; --steps, row += a.groups) {
    // Into the stage that the row before this one has left.
    request(row + static_cast<int64_t>(a.stages - 1) * a.groups, (stage == memory ? end : stage) - stage_bytes);
    await_copies(a.stages - 1);
    const int length = row < a.rows ? n : -V;  // a word may begin before its row
    Vec<X, V> held[K];
#pragma unroll
    for (int i = 0; i < K; ++i) {
      held[i] = filled<X, V>(convert<X>(0.f));
      if (element(i) < length) held[i] = StagedX{stage}.load(i);
    }
    Moments<A> part{A(0), A(0), count};
    A mean = 0;  // of the warp's part, then of the row
    if constexpr (LAYER) {
      A sum = 0;
#pragma unroll
      for (int i = 0; i < K; ++i) sum += tree_sum(deviations<RAGGED>(held[i], A(0), element(i), n));
      sum = lanes_sum(sum, lanes);
      mean = count > A(0) ? sum / count : A(0);
#pragma unroll
      for (int i = 0; i < K; ++i) forget(held[i]);
    }
    A rest = 0;  // what rounding has left out of the mean
#pragma unroll
    for (int i = 0; i < K; ++i) {
      const Vec<A, V> d = deviations<RAGGED>(held[i], mean, element(i), n);
      if (element(i) >= length) continue;
      part.m2 += tree_dot(d, d);
      if constexpr (LAYER) rest += tree_sum(d);
    }
    part.m2 = lanes_sum(part.m2, lanes);
    if constexpr (LAYER) correct_mean(part, mean, lanes_sum(rest, lanes));
    if (CLUSTER || a.lanes > 32) {
      part = row_moments<CLUSTER>(part, slots[turn] + group_of_block * (a.lanes >> 5), a.lanes, group_of_block, n, LAYER);
      turn ^= 1;
      if constexpr (LAYER) mean = part.mean;
    }
    const A rstd = rsqrt(part.m2 / static_cast<A>(n) + a.eps);
#pragma unroll
    for (int i = 0; i < K; ++i) forget(held[i]);
    if (a.stats != nullptr && first == 0 && length > 0) {
      a.stats[row] = LAYER ? mean : rstd;
      if constexpr (LAYER) a.stats[a.rows + row] = rstd;
    }
#pragma unroll
    for (int i = 0; i < K; ++i) {
      const int e = element(i);
      if (e >= length) continue;
      Vec<A, V> r = unpack<A>(held[i]);
#pragma unroll
      for (int j = 0; j < V; ++j) r.v[j] = (r.v[j] - mean) * rstd;
      if (a.weight != nullptr) {
        Vec<A, V> w = parameter(end, i);
        if constexpr (!LAYER) {
          if (a.kind == kGemma) {
#pragma unroll
            for (int j = 0; j < V; ++j) w.v[j] += A(1);
          }
          if (a.kind == kLlama) r = unpack<A>(pack<X>(r));
        }
#pragma unroll
        for (int j = 0; j < V; ++j) r.v[j] *= w.v[j];
        // Llama's product has the dtype that its factors promote to.
        if (!LAYER && a.wide_out && !a.wide_weight && a.kind == kLlama) r = unpack<A>(pack<X>(r));
      }
      if (LAYER && a.bias != nullptr) {
        const Vec<A, V> b = parameter(bias_at, i);
#pragma unroll
        for (int j = 0; j < V; ++j) r.v[j] += b.v[j];
      }
      if (sizeof(X) < sizeof(A) && a.wide_out) store_word<RAGGED>(static_cast<A*>(a.y) + row * n, e, n, r);
      else store_word<RAGGED>(static_cast<X*>(a.y) + row * n, e, n, pack<X>(r));
    }
    stage += stage_bytes;
    if (stage == end) stage = memory;
  }
}

// ---- backward -----------------------------------------------------------------------------------------------------------

template <typename A>
struct BackwardArgs {
  const void *dy, *dsum, *x, *weight;  // dsum and weight may be null
  const A* stats;
  void* dx;
  A* partial;       // [2, blocks or clusters, n]: what they summed for dweight and for dbias
  int64_t rows;
  int n;
  A inverse_n;
  int lanes;        // threads of a block that share a row: a group. A power of two up to a warp, then whole warps
  int groups;       // of all blocks; each takes every groups-th row
  int stages;       // rows of a group in shared memory
  bool wide_weight, small_weight;  // float32 for x of 16 bits; of 16 bits for x of float32
  bool bfloat;      // what a small weight is
  bool stage_wide;  // keep the weight, or 1 + weight, in float32: x has 16 bits that may not hold it
  bool gemma, want_weight, want_bias;
};

template <typename A>
struct RowSums {
  A gx, g;  // of g·x̂ and of g, where g = dy·weight; the latter for layer_norm only
};

template <bool LAYER, typename A>
__device__ __forceinline__ void lanes_sum(RowSums<A>& sums, int lanes) {
  for (int o = lanes >> 1; o > 0; o >>= 1) {
    sums.gx += __shfl_xor_sync(0xffffffffu, sums.gx, o);
    if constexpr (LAYER) sums.g += __shfl_xor_sync(0xffffffffu, sums.g, o);
  }
}

// Adds up what the groups of a block hold for each column, through shared memory, and writes it.
template <typename A, int V, int K, typename Element>
__device__ __forceinline__ void sum_groups(const Vec<A, V> (&sums)[K], A* shared, A* out, int n, int groups, int group,
                                           const Element& element) {
  __syncthreads();
#pragma unroll
  for (int i = 0; i < K; ++i)
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const int column = element(i) + j;
      if (column >= 0 && column < n) shared[group * n + column] = sums[i].v[j];
    }
  __syncthreads();
  // Where there are more threads than columns, several share the groups of a column, and one adds up theirs.
  const int threads = blockDim.x;
  const int parts = max(1, min(min(16, groups), threads / n));
  for (int at = threadIdx.x; at < parts * n; at += threads) {
    const int column = at % n;
    A s = 0;
#pragma unroll 4
    for (int g = at / n; g < groups; g += parts) s += shared[g * n + column];
    if (parts == 1) out[column] = s;
    else shared[(at / n) * n + column] = s;  // that of a group which this thread alone has read
  }
  if (parts == 1) return;
  __syncthreads();
  for (int column = threadIdx.x; column < n; column += threads) {
    A s = 0;
    for (int part = 0; part < parts; ++part) s += shared[part * n + column];
    out[column] = s;
  }
}

// D: dy's type.
template <typename X, typename D, bool LAYER, bool RAGGED, int K, bool CLUSTER>
__global__ void __launch_bounds__(kBackwardThreadsOf<X, LAYER, RAGGED>, 1) layer_norm_backward_rows(const BackwardArgs<compute_t<X>> a) {
  using A = compute_t<X>;
  constexpr int V = kVectorBytes / sizeof(X);
  constexpr int kSlots = kResidentThreads / 32 * (CLUSTER ? kMaxCluster : 1);
  __shared__ RowSums<A> slots[2][kSlots];
  extern __shared__ __align__(16) char memory[];
  if constexpr (CLUSTER) this_cluster().barrier_arrive();

  // Where the thread stands: the group, and with it the rows; the words, `lanes` apart, and with them the columns.
  int group = blockIdx.x, first = threadIdx.x, group_of_block = 0;
  if constexpr (CLUSTER) {
    auto cluster = this_cluster();
    group /= cluster.num_blocks();
    first += static_cast<int>(cluster.block_rank()) * K * a.lanes;
  } else {
    group_of_block = first / a.lanes;
    first -= group_of_block * a.lanes;
    group = group * (blockDim.x / a.lanes) + group_of_block;
  }
  const int n = a.n;
  const int head = RAGGED ? static_cast<int>(group * static_cast<int64_t>(n) & (V - 1)) : 0;
  const auto element = [&](int i) { return (first + i * a.lanes) * V - head; };

  using StagedX = Staged<X, V, K>;
  using StagedDy = Staged<D, V, K>;
  const int threads = blockDim.x;
  const int stage_bytes = threads * (StagedX::kThread * (a.dsum != nullptr ? 2 : 1) + StagedDy::kThread);
  const auto request = [&](int64_t row, char* stage) {
    if (row < a.rows) {
      const StagedX x{stage};
      const StagedDy dy{stage + threads * StagedX::kThread};
      const int64_t start = row * n;
#pragma unroll
      for (int i = 0; i < K; ++i) {
        const int e = element(i);
        if (e >= n) continue;
        x.request(i, static_cast<const X*>(a.x) + start, e, n);
        dy.request(i, static_cast<const D*>(a.dy) + start, e, n);
        if (a.dsum != nullptr)
          StagedX{stage + threads * (StagedX::kThread + StagedDy::kThread)}.request(i, static_cast<const X*>(a.dsum) + start, e, n);
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  char* const end = memory + a.stages * stage_bytes;
  for (int i = 0; i + 1 < a.stages; ++i) request(group + static_cast<int64_t>(i) * a.groups, memory + i * stage_bytes);

  // The weight of the thread's columns, in x's type where that holds it, else in float32.
  const Staged<X, V, K> weight{end};
  const Staged<A, V, K> wide_weight{end};
#pragma unroll 1
  for (int i = 0; i < K; ++i) {
    const int e = element(i);
    if (e >= n) continue;
    Vec<A, V> w = filled<A, V>(A(1));
    if (a.weight != nullptr) {
      if (a.small_weight) {
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const int column = min(max(e + j, 0), n - 1);
          w.v[j] = a.bfloat ? convert<A>(static_cast<const __nv_bfloat16*>(a.weight)[column])
                            : convert<A>(static_cast<const __half*>(a.weight)[column]);
        }
      } else if (a.wide_weight) {
        w = load_weight<RAGGED, A, V>(static_cast<const A*>(a.weight), e, n);
      } else {
        w = unpack<A>(load_weight<RAGGED, X, V>(static_cast<const X*>(a.weight), e, n));
      }
      if (a.gemma) {
#pragma unroll
        for (int j = 0; j < V; ++j) w.v[j] += A(1);
      }
    }
    if (a.stage_wide) wide_weight.store(i, w);
    else weight.store(i, pack<X>(w));
  }
  const auto load_g = [&](int i, const Vec<A, V>& dy) {
    Vec<A, V> w = sizeof(X) < sizeof(A) && a.stage_wide ? wide_weight.load(i) : unpack<A>(weight.load(i));
#pragma unroll
    for (int j = 0; j < V; ++j) w.v[j] *= dy.v[j];
    return w;
  };

  Vec<A, V> dweight[K], dbias[LAYER ? K : 1];
#pragma unroll
  for (int i = 0; i < K; ++i) dweight[i] = filled<A, V>(A(0));
  if constexpr (LAYER) {
#pragma unroll
    for (int i = 0; i < K; ++i) dbias[i] = filled<A, V>(A(0));
  }

  A next_mean = 0, next_rstd = 0;
  const auto load_stats = [&](int64_t row) {
    if (row >= a.rows) return;
    if constexpr (LAYER) next_mean = a.stats[row];
    next_rstd = a.stats[LAYER ? a.rows + row : row];
  };
  load_stats(group);
  if constexpr (CLUSTER) this_cluster().barrier_wait();  // every block has started: its memory may be written

  char* stage = memory;
  int turn = 0;
  // The threads of a warp go on together until the last of their rows, with nothing to do past it.
  const int64_t warp_rows = a.rows - (CLUSTER || a.lanes >= 32 ? group : 0);
  int64_t row = group;
  for (int steps = warp_rows > 0 ? static_cast<int>((warp_rows + a.groups - 1) / a.groups) : 0; steps > 0; --steps, row += a.groups) {
    // Into the stage that the row before this one has left.
    request(row + static_cast<int64_t>(a.stages - 1) * a.groups, (stage == memory ? end : stage) - stage_bytes);
    const A mean = next_mean, rstd = LAYER && n == 1 ? A(0) : next_rstd;  // one element is its mean: exactly no gradient
    load_stats(row + a.groups);
    await_copies(a.stages - 1);
    const bool live = row < a.rows;
    const int length = live ? n : -V;  // a word may begin before its row
    const StagedX staged_x{stage};
    const StagedDy staged_dy{stage + threads * StagedX::kThread};
    const StagedX staged_dsum{stage + threads * (StagedX::kThread + StagedDy::kThread)};

    RowSums<A> sums{A(0), A(0)};
#pragma unroll
    for (int i = 0; i < K; ++i) {
      const int e = element(i);
      if (e >= length) continue;
      Vec<A, V> x = unpack<A>(staged_x.load(i));
      const Vec<A, V> dy = unpack<A>(staged_dy.load(i));
#pragma unroll
      for (int j = 0; j < V; ++j) x.v[j] = (x.v[j] - mean) * rstd;
      blank_neighbours<RAGGED>(x, e, n);
      Vec<A, V> g = load_g(i, dy);
      blank_neighbours<RAGGED>(g, e, n);
#pragma unroll
      for (int j = 0; j < V; ++j) dweight[i].v[j] += dy.v[j] * x.v[j];  // of a neighbour's column it is never written
      sums.gx += tree_dot(g, x);
      if constexpr (LAYER) {
#pragma unroll
        for (int j = 0; j < V; ++j) dbias[i].v[j] += dy.v[j];
        sums.g += tree_sum(g);
      }
    }
    lanes_sum<LAYER>(sums, a.lanes < 32 ? a.lanes : 32);
    if (CLUSTER || a.lanes > 32) {
      RowSums<A>* here_slots = slots[turn] + group_of_block * (a.lanes >> 5);
      turn ^= 1;
      const int lane = threadIdx.x & 31, count = exchange<CLUSTER>(here_slots, sums, a.lanes, group_of_block);
      sums = lane < count ? here_slots[lane] : RowSums<A>{A(0), A(0)};
      if constexpr (CLUSTER) {
#pragma unroll 1
        for (int i = lane + 32; i < count; i += 32) sums.gx += here_slots[i].gx, sums.g += here_slots[i].g;
      }
      lanes_sum<LAYER>(sums, 32);
    }

    const A gx = sums.gx * a.inverse_n * rstd * rstd, g_mean = LAYER ? sums.g * a.inverse_n * rstd : A(0);
    X* dx = static_cast<X*>(a.dx) + row * n;
#pragma unroll
    for (int i = 0; i < K; ++i) {
      const int e = element(i);
      if (e >= length) continue;
      const Vec<A, V> x = unpack<A>(staged_x.load(i)), dy = unpack<A>(staged_dy.load(i));
      Vec<A, V> r = load_g(i, dy);
#pragma unroll
      for (int j = 0; j < V; ++j) r.v[j] = r.v[j] * rstd - ((x.v[j] - mean) * gx + g_mean);
      if (a.dsum != nullptr) {
        const Vec<A, V> d = unpack<A>(staged_dsum.load(i));
#pragma unroll
        for (int j = 0; j < V; ++j) r.v[j] += d.v[j];
      }
      store_word<RAGGED>(dx, e, n, pack<X>(r));
    }
    stage += stage_bytes;
    if (stage == end) stage = memory;
  }

  const int64_t blocks = CLUSTER ? a.groups : gridDim.x;
  A* out = a.partial + (CLUSTER ? group : static_cast<int64_t>(blockIdx.x)) * n;
  const int groups_of_block = CLUSTER ? 1 : blockDim.x / a.lanes;
  const auto write = [&](const auto& column_sums, A* to) {
    if (groups_of_block > 1) {
      sum_groups(column_sums, reinterpret_cast<A*>(memory), to, n, groups_of_block, group_of_block, element);
      return;
    }
#pragma unroll
    for (int i = 0; i < K; ++i) {
      const int e = element(i);
      if (e >= n) continue;
      constexpr int U = kVectorBytes / sizeof(A);
#pragma unroll
      for (int u = 0; u < V; u += U) {
        Vec<A, U> part;
#pragma unroll
        for (int j = 0; j < U; ++j) part.v[j] = column_sums[i].v[u + j];
        if constexpr (RAGGED) {
#pragma unroll
          for (int j = 0; j < U; ++j)
            if (e + u + j >= 0 && e + u + j < n) to[e + u + j] = part.v[j];
        } else {
          store_vec<A, U>(to + e + u, part);
        }
      }
    }
  };
  asm volatile("cp.async.wait_all;" ::: "memory");
  if (a.want_weight) write(dweight, out);
  if constexpr (LAYER) {
    if (a.want_bias) write(dbias, out + blocks * n);
  }
}

constexpr int kSumWarps = 16;

// Adds up the partial sums of all blocks: 32 columns a block, whose warps share the blocks' sums.
template <typename W, typename A>
__global__ void __launch_bounds__(kSumWarps * 32) layer_norm_sum_partials(const A* partial, W* dweight, W* dbias, int blocks, int64_t n) {
  __shared__ A shared[kSumWarps][33];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * 32 + lane;
  // The second half of the grid's second dimension, if any, has the bias.
  const bool bias = blockIdx.y == 1 || dweight == nullptr;
  const A* from = partial + (bias ? blocks * n : 0) + column;
  A s = 0;
  if (column < n) {
#pragma unroll 8
    for (int b = warp; b < blocks; b += kSumWarps) s += from[b * n];
  }
  shared[warp][lane] = s;
  __syncthreads();
  if (warp != 0 || column >= n) return;
  for (int w = 1; w < kSumWarps; ++w) s += shared[w][lane];
  (bias ? dbias : dweight)[column] = convert<W>(s);
}

// ---- rows too long for a cluster ----------------------------------------------------------------------------------------
//
// Rare, so one kernel serves all types: the loads and stores look their type up.

constexpr int kSplitThreads = 256;
constexpr int kBatch = 8;  // elements of a thread that are requested together, kSplitThreads apart

enum class Type : int { none, half, bfloat16, float32, float64 };

struct Operand {
  void* data = nullptr;
  Type type = Type::none;
};

template <typename F>
__device__ __forceinline__ void with_type(const Operand& o, F&& f) {
  switch (o.type) {
    case Type::half: return f(static_cast<__half*>(o.data));
    case Type::bfloat16: return f(static_cast<__nv_bfloat16*>(o.data));
    case Type::float32: return f(static_cast<float*>(o.data));
    case Type::float64: return f(static_cast<double*>(o.data));
    default: return;
  }
}

// Elements base + e, base + e + kSplitThreads, ... as far as e stays under `end`; the others are `missing`.
template <typename A>
__device__ __forceinline__ Vec<A, kBatch> load_batch(const Operand& o, int64_t base, int64_t e, int64_t end, A missing) {
  Vec<A, kBatch> v = filled<A, kBatch>(missing);
  with_type(o, [&](const auto* p) {
#pragma unroll
    for (int j = 0; j < kBatch; ++j)
      if (e + j * kSplitThreads < end) v.v[j] = convert<A>(p[base + e + j * kSplitThreads]);
  });
  return v;
}

// Writes a batch and gives back what was written.
template <typename A>
__device__ __forceinline__ void store_batch(const Operand& o, int64_t base, int64_t e, int64_t end, Vec<A, kBatch>& v) {
  with_type(o, [&](auto* p) {
    using T = std::decay_t<decltype(*p)>;
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const T t = convert<T>(v.v[j]);
      v.v[j] = convert<A>(t);
      if (e + j * kSplitThreads < end) p[base + e + j * kSplitThreads] = t;
    }
  });
}

template <typename A>
__device__ __forceinline__ void round_batch(Type type, Vec<A, kBatch>& v) {
  with_type(Operand{nullptr, type}, [&](auto* p) {
    using T = std::decay_t<decltype(*p)>;
#pragma unroll
    for (int j = 0; j < kBatch; ++j) v.v[j] = convert<A>(convert<T>(v.v[j]));
  });
}

template <typename A>
struct SplitArgs {
  Operand x, residual, sum, weight, bias, y;  // forward
  Operand dy, dsum, dx;                       // backward; x is the sum where there is one
  A *stats, *partial;
  int64_t rows, n, piece;  // elements of a piece
  int pieces, kind;
  A eps;
};

// What a piece of a row knows of itself.
template <typename A>
struct SplitMoments {
  A sum, m2, count;
};

// Mean and squared deviations of two parts together.
template <typename A>
__device__ __forceinline__ SplitMoments<A> merge(const SplitMoments<A>& p, const SplitMoments<A>& q, bool layer) {  // `sum` holds a mean here
  const A count = p.count + q.count;
  if (!layer || count == A(0)) return {A(0), p.m2 + q.m2, count};
  const A d = q.sum - p.sum, share = q.count / count;
  return {p.sum + d * share, p.m2 + q.m2 + d * d * p.count * share, count};
}

template <typename A>
__device__ __forceinline__ SplitMoments<A> merge_lanes(SplitMoments<A> p, bool layer) {
  for (int o = 16; o > 0; o >>= 1) {
    const SplitMoments<A> q{__shfl_xor_sync(0xffffffffu, p.sum, o), __shfl_xor_sync(0xffffffffu, p.m2, o),
                       __shfl_xor_sync(0xffffffffu, p.count, o)};
    p = (threadIdx.x & o) == 0 ? merge(p, q, layer) : merge(q, p, layer);  // both lanes in one order: one result
  }
  return p;
}

template <typename A>
__global__ void __launch_bounds__(kSplitThreads) layer_norm_split_moments(const SplitArgs<A> a) {
  __shared__ SplitMoments<A> slots[32];
  const int64_t row = blockIdx.x / a.pieces, base = row * a.n;
  const int64_t begin = blockIdx.x % a.pieces * a.piece, end = begin + a.piece < a.n ? begin + a.piece : a.n;
  const bool layer = a.kind == kLayer;
  SplitMoments<A> all{A(0), A(0), A(0)};
  for (int64_t e = begin + threadIdx.x; e < end; e += kBatch * kSplitThreads) {
    Vec<A, kBatch> v = load_batch(a.x, base, e, end, A(0));
    if (a.residual.data != nullptr) {
      const Vec<A, kBatch> r = load_batch(a.residual, base, e, end, A(0));
#pragma unroll
      for (int j = 0; j < kBatch; ++j) v.v[j] += r.v[j];
      store_batch(a.sum, base, e, end, v);
    }
    SplitMoments<A> batch{A(0), A(0), A(0)};
#pragma unroll
    for (int j = 0; j < kBatch; ++j) batch.count += e + j * kSplitThreads < end ? A(1) : A(0);
    if (layer) batch.sum = tree_sum(v) / batch.count;
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      v.v[j] = e + j * kSplitThreads < end ? v.v[j] - batch.sum : A(0);
      v.v[j] *= v.v[j];
    }
    batch.m2 = tree_sum(v);
    all = merge(all, batch, layer);
  }
  all = merge_lanes(all, layer);
  const int lane = threadIdx.x & 31;
  if (lane == 0) slots[threadIdx.x >> 5] = all;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  all = merge_lanes(lane < kSplitThreads / 32 ? slots[lane] : SplitMoments<A>{A(0), A(0), A(0)}, layer);
  if (lane == 0) reinterpret_cast<SplitMoments<A>*>(a.partial)[blockIdx.x] = all;
}

template <typename A>
__global__ void __launch_bounds__(kSplitThreads) layer_norm_split_apply(const SplitArgs<A> a) {
  const int64_t row = blockIdx.x / a.pieces, base = row * a.n;
  const int64_t begin = blockIdx.x % a.pieces * a.piece, end = begin + a.piece < a.n ? begin + a.piece : a.n;
  const bool layer = a.kind == kLayer;
  SplitMoments<A> all{A(0), A(0), A(0)};
  for (int i = threadIdx.x & 31; i < a.pieces; i += 32)
    all = merge(all, reinterpret_cast<const SplitMoments<A>*>(a.partial)[row * a.pieces + i], layer);
  all = merge_lanes(all, layer);
  const A mean = all.sum, rstd = rsqrt(all.m2 / static_cast<A>(a.n) + a.eps);
  if (a.stats != nullptr && begin == 0 && threadIdx.x == 0) {
    a.stats[row] = layer ? mean : rstd;
    if (layer) a.stats[a.rows + row] = rstd;
  }
  const Operand& from = a.residual.data != nullptr ? a.sum : a.x;
  for (int64_t e = begin + threadIdx.x; e < end; e += kBatch * kSplitThreads) {
    Vec<A, kBatch> v = load_batch(from, base, e, end, A(0));
    const Vec<A, kBatch> w = load_batch(a.weight, 0, e, end, a.kind == kGemma && a.weight.data != nullptr ? A(0) : A(1));
    const Vec<A, kBatch> b = load_batch(a.bias, 0, e, end, A(0));
#pragma unroll
    for (int j = 0; j < kBatch; ++j) v.v[j] = (v.v[j] - mean) * rstd;
    if (a.kind == kLlama && a.weight.data != nullptr) round_batch(from.type, v);
    const A offset = a.kind == kGemma && a.weight.data != nullptr ? A(1) : A(0);
#pragma unroll
    for (int j = 0; j < kBatch; ++j) v.v[j] *= w.v[j] + offset;
    if (a.kind == kLlama && a.weight.type == from.type) round_batch(from.type, v);
#pragma unroll
    for (int j = 0; j < kBatch; ++j) v.v[j] += b.v[j];
    store_batch(a.y, base, e, end, v);
  }
}

// x̂ and g of a batch.
template <typename A>
__device__ __forceinline__ void load_backward(const SplitArgs<A>& a, int64_t base, int64_t e, int64_t end, A mean, A rstd,
                                              Vec<A, kBatch>& x, Vec<A, kBatch>& g) {
  x = load_batch(a.x, base, e, end, mean);
  g = load_batch(a.dy, base, e, end, A(0));
  const Vec<A, kBatch> w = load_batch(a.weight, 0, e, end, A(1));
  const A offset = a.kind == kGemma && a.weight.data != nullptr ? A(1) : A(0);
#pragma unroll
  for (int j = 0; j < kBatch; ++j) {
    x.v[j] = (x.v[j] - mean) * rstd;
    g.v[j] *= w.v[j] + offset;
  }
}

template <typename A>
__global__ void __launch_bounds__(kSplitThreads) layer_norm_split_sums(const SplitArgs<A> a) {
  __shared__ RowSums<A> slots[32];
  const int64_t row = blockIdx.x / a.pieces, base = row * a.n;
  const int64_t begin = blockIdx.x % a.pieces * a.piece, end = begin + a.piece < a.n ? begin + a.piece : a.n;
  const bool layer = a.kind == kLayer;
  const A mean = layer ? a.stats[row] : A(0), rstd = a.stats[layer ? a.rows + row : row];
  RowSums<A> all{A(0), A(0)};
  for (int64_t e = begin + threadIdx.x; e < end; e += kBatch * kSplitThreads) {
    Vec<A, kBatch> x, g;
    load_backward(a, base, e, end, mean, rstd, x, g);
    all.g += tree_sum(g);
#pragma unroll
    for (int j = 0; j < kBatch; ++j) g.v[j] *= x.v[j];
    all.gx += tree_sum(g);
  }
  const int lane = threadIdx.x & 31;
  all = {lanes_sum(all.gx, 32), lanes_sum(all.g, 32)};
  if (lane == 0) slots[threadIdx.x >> 5] = all;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  all = lane < kSplitThreads / 32 ? slots[lane] : RowSums<A>{A(0), A(0)};
  all = {lanes_sum(all.gx, 32), lanes_sum(all.g, 32)};
  if (lane == 0) reinterpret_cast<RowSums<A>*>(a.partial)[blockIdx.x] = all;
}

template <typename A>
__global__ void __launch_bounds__(kSplitThreads) layer_norm_split_dx(const SplitArgs<A> a) {
  const int64_t row = blockIdx.x / a.pieces, base = row * a.n;
  const int64_t begin = blockIdx.x % a.pieces * a.piece, end = begin + a.piece < a.n ? begin + a.piece : a.n;
  const bool layer = a.kind == kLayer;
  const A mean = layer ? a.stats[row] : A(0), rstd = a.stats[layer ? a.rows + row : row];
  RowSums<A> all{A(0), A(0)};
  for (int i = threadIdx.x & 31; i < a.pieces; i += 32) {
    const RowSums<A> p = reinterpret_cast<const RowSums<A>*>(a.partial)[row * a.pieces + i];
    all.gx += p.gx, all.g += p.g;
  }
  const A gx = lanes_sum(all.gx, 32) / static_cast<A>(a.n), g_mean = layer ? lanes_sum(all.g, 32) / static_cast<A>(a.n) : A(0);
  for (int64_t e = begin + threadIdx.x; e < end; e += kBatch * kSplitThreads) {
    Vec<A, kBatch> x, g;
    load_backward(a, base, e, end, mean, rstd, x, g);
    const Vec<A, kBatch> d = load_batch(a.dsum, base, e, end, A(0));
#pragma unroll
    for (int j = 0; j < kBatch; ++j) g.v[j] = rstd * (g.v[j] - g_mean - x.v[j] * gx) + d.v[j];
    store_batch(a.dx, base, e, end, g);
  }
}

// Sums down the rows of one slab for kSplitThreads·kBatch columns. `partial`: [2, slabs, n].
template <typename A>
__global__ void __launch_bounds__(kSplitThreads) layer_norm_split_columns(const SplitArgs<A> a, int slabs) {
  const int64_t rows_each = (a.rows + slabs - 1) / slabs, first = blockIdx.y * rows_each;
  const int64_t last = first + rows_each < a.rows ? first + rows_each : a.rows;
  const int64_t e = static_cast<int64_t>(blockIdx.x) * kSplitThreads * kBatch + threadIdx.x;
  const bool layer = a.kind == kLayer;
  Vec<A, kBatch> dweight = filled<A, kBatch>(A(0)), dbias = dweight;
  for (int64_t row = first; row < last; ++row) {
    const A mean = layer ? a.stats[row] : A(0), rstd = a.stats[layer ? a.rows + row : row];
    const Vec<A, kBatch> x = load_batch(a.x, row * a.n, e, a.n, mean), dy = load_batch(a.dy, row * a.n, e, a.n, A(0));
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      dweight.v[j] += dy.v[j] * (x.v[j] - mean) * rstd;
      dbias.v[j] += dy.v[j];
    }
  }
  const Operand out{a.partial, sizeof(A) == 8 ? Type::float64 : Type::float32};
  store_batch(out, blockIdx.y * a.n, e, a.n, dweight);
  store_batch(out, (slabs + static_cast<int64_t>(blockIdx.y)) * a.n, e, a.n, dbias);
}

// ---- launch rules -------------------------------------------------------------------------------------------------------

// A launch rule's number, or in a build to try others out the one that the environment says.
int rule(const char* name, int value) {
#ifdef FASTLAYERS_TUNE
  if (const char* asked = std::getenv(name)) return std::atoi(asked);
#endif
  (void)name;
  return value;
}

// Rows of up to `words` 16-byte words have `each` of them in a thread, and where a warp or less holds a row, blocks of `block`.
struct ForwardRule {
  int64_t words;
  int each, block;
};
constexpr ForwardRule kForwardRules[] = {
    {1, 1, 128},
    {4, 2, 128},
    {INT64_MAX, 4, 128},  // a row of a block takes the warps that it fills, to 1024 threads
};
constexpr int64_t kForwardClusterPast = 4096;  // words; a row of up to 4 in each of 1024 threads needs no cluster
constexpr int kForwardClusterThreads = 512;

struct RowLaunch {
  int threads = 0;  // of a block that share a row; 0: the row is too long
  int block = 0;    // threads of a block
  int words = 0;    // of a thread
  int cluster = 1;  // blocks that share a row
};

// The threads of a row of `words` with `each` in a thread: a power of two up to a warp, then whole warps.
int row_threads(int64_t words, int each) {
  const int64_t threads = ceil_div(words, each);
  return static_cast<int>(threads <= 32 ? next_power_of_2(std::max<int64_t>(threads, 1)) : ceil_div(threads, 32) * 32);
}

RowLaunch forward_launch(int64_t words, int64_t rows, int most_threads, const DeviceTraits& device) {
  RowLaunch launch;
  const ForwardRule* found = kForwardRules;
  while (found->words < words) ++found;
  launch.words = rule("FL_FORWARD_WORDS", found->each);
  // Few rows: more threads each, as long as that occupies processors that would idle.
  while (launch.words > 1 && ceil_div(words, launch.words / 2) <= most_threads &&
         rows * ceil_div(words, launch.words) < device.processors * 256)
    launch.words /= 2;
  const int64_t past = std::min<int64_t>(rule("FL_FORWARD_CLUSTER_PAST", kForwardClusterPast), 4 * most_threads);
  if (words > past) {
    launch.words = 4;
    launch.cluster = static_cast<int>(next_power_of_2(ceil_div(words, 4 * kForwardClusterThreads)));
    if (device.capability < 90 || launch.cluster > kMaxCluster) return RowLaunch{};
    launch.threads = launch.block = static_cast<int>(ceil_div(ceil_div(words, 4 * launch.cluster), 32) * 32);
    return launch;
  }
  while (launch.words < 4 && ceil_div(words, launch.words) > most_threads) launch.words *= 2;
  launch.threads = row_threads(words, launch.words);
  launch.block = launch.threads <= 32 ? rule("FL_FORWARD_BLOCK", found->block) : launch.threads;
  return launch;
}

template <typename Kernel, typename Args>
void launch_kernel(Kernel kernel, int64_t blocks, int threads, int cluster, size_t shared, cudaStream_t stream, const Args& args) {
  STD_TORCH_CHECK(blocks <= INT32_MAX, "fastlayers::layer_norm: ", args.rows, " rows are more than one launch takes");
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute attribute;
  if (cluster > 1) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    config.attrs = &attribute;
    config.numAttrs = 1;
    if (cluster > 8) STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  }
  STD_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, args));
}

// How a resident grid is made for rows of up to `words` 16-byte words: `threads` of an SM at most, in blocks of up
// to `block`, which hold as many groups as fit, with up to `stages` rows of each in shared memory. Fewer and larger blocks
// leave fewer partial sums.
struct ResidentRule {
  int64_t words;
  int threads, block, stages;
};
// On an H100, bfloat16, backward, in fractions of the copy bandwidth for layer_norm and rms_norm: 768 columns .79 .83 with 384
// threads, .76 .80 with 512; 1024 columns .81 .85 with 256, .79 .83 with 512; 4096 .85 .91 with 256, .84 .88 with 512; 8192
// .88 .91 with 384, .81 .86 with 512; 16384 .84 .87 with 512, .56 .76 with fewer.
constexpr ResidentRule kResidentRules[] = {
    {96, 384, 384, 3},
    {512, 256, 256, 3},
    {1024, 384, 384, 3},
    {INT64_MAX, 512, 512, 3},
};
constexpr ResidentRule kRaggedRule{INT64_MAX, 384, 384, 3};  // 4095 columns .73 .81 with 384 threads, .73 .72 with 512
constexpr ResidentRule kForwardStreamRule{INT64_MAX, kResidentThreads, kResidentThreads, 3};
constexpr int kSharedReserve = 1024;  // of each block, for the driver

struct ResidentLaunch {
  RowLaunch row;
  int groups = 0, stages = 0;
  int64_t blocks = 0;
  size_t shared = 0;
};

int shared_of_processor(int device) {
  static int bytes[kMaxDevices];
  if (bytes[device] == 0)
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&bytes[device], cudaDevAttrMaxSharedMemoryPerMultiprocessor, device));
  return bytes[device];
}

// What a block of the backward may take of shared memory, where `resident` of them share a multiprocessor. `slots`: bytes of
// one block's exchange, or of that of a whole cluster.
int64_t shared_of_block(int resident, int cluster, int slots, int device) {
  return shared_of_processor(device) / resident - kSharedReserve - (cluster > 1 ? kMaxCluster : 1) * slots;
}

// `period`: rows after which a row starts at the same place of a word. `word_bytes`: what a stage holds for each word, and
// `weight_bytes` what lies beside the stages.
ResidentLaunch resident_launch(const ResidentRule& found, int64_t words, int64_t rows, int period, int word_bytes, int weight_bytes,
                               int slots, int most_threads, const Launch& on) {
  const DeviceTraits& device = device_traits(on.device());
  ResidentLaunch launch;
  RowLaunch& row = launch.row;
  row.words = rule("FL_BACKWARD_WORDS", kResidentWords);
  const int most = rule("FL_BACKWARD_THREADS", found.threads);
  // Two stages of the widest types may leave room for fewer threads than that.
  const auto widest_of = [&](int cluster) {
    const int64_t fit = shared_of_block(1, cluster, slots, on.device()) / (row.words * (2 * word_bytes + weight_bytes));
    return std::min({most_threads, most, static_cast<int>(fit / 32 * 32)});
  };
  const int widest = widest_of(1);
  if (words > static_cast<int64_t>(widest) * row.words) {
    row.cluster = static_cast<int>(next_power_of_2(ceil_div(words, static_cast<int64_t>(widest_of(kMaxCluster)) * row.words)));
    if (device.capability < 90 || row.cluster > kMaxCluster) return ResidentLaunch{};
    row.threads = row.block = static_cast<int>(ceil_div(ceil_div(words, row.words * row.cluster), 32) * 32);
  } else {
    row.threads = row_threads(words, row.words);
    const int block = std::min(widest, rule("FL_BACKWARD_BLOCK", found.block));
    row.block = std::max(1, row.threads < 32 ? block / 32 * 32 / row.threads : block / row.threads) * row.threads;
  }
  const int together = row.cluster > 1 ? 1 : row.block / row.threads;  // groups of a block
  const int64_t bytes = static_cast<int64_t>(row.block) * row.words;
  int resident = std::max(1, most / row.block);
  while (resident > 1 && bytes * (2 * word_bytes + weight_bytes) > shared_of_block(resident, row.cluster, slots, on.device())) --resident;
  const int64_t share = shared_of_block(resident, row.cluster, slots, on.device());
  launch.stages = static_cast<int>(std::clamp<int64_t>((share - bytes * weight_bytes) / (bytes * word_bytes), 2,
                                                       std::min(kMaxStages, rule("FL_BACKWARD_STAGES", found.stages))));
  launch.shared = static_cast<size_t>(bytes * (launch.stages * word_bytes + weight_bytes));

  // As many groups as are resident, or a few less where each then has as many rows as the next.
  const int64_t units = std::max<int64_t>(1, static_cast<int64_t>(device.processors) * resident / row.cluster);
  const int64_t each = std::max<int64_t>(1, ceil_div(rows, units * together));
  int64_t blocks = ceil_div(rows, each * together);
  const int64_t step = period / std::gcd(period, together);
  if (each > 1) blocks = ceil_div(blocks, step) <= units / step ? ceil_div(blocks, step) * step : std::max<int64_t>(units / step, 1) * step;
  launch.groups = static_cast<int>(blocks * together);
  launch.blocks = blocks * row.cluster;
  return launch;
}

// ---- host ---------------------------------------------------------------------------------------------------------------

struct Shape {
  int64_t rows = 1, n = 1;
};

Shape shape_of(const Tensor& x, int64_t dims, const char* op) {
  const auto sizes = x.sizes();
  const int64_t all = x.dim();
  STD_TORCH_CHECK(dims >= 1 && dims <= all, "fastlayers::", op, ": cannot normalise ", dims, " trailing dimensions of ", all);
  Shape s;
  for (int64_t d = 0; d < all; ++d) (d < all - dims ? s.rows : s.n) *= sizes[d];
  return s;
}

Tensor empty_result(const Tensor& t, ScalarType dtype) {
  const auto sizes = t.sizes();
  if (t.is_contiguous()) return empty_strided(t.dim(), sizes.data(), t.strides().data(), dtype, t);
  return empty_contiguous(dims_of(sizes), dtype, t);
}

Tensor empty_of(std::initializer_list<int64_t> sizes, ScalarType dtype, const Tensor& like) {
  int64_t strides[2] = {1, 1};
  if (sizes.size() == 2) strides[0] = std::max<int64_t>(sizes.begin()[1], 1);
  return empty_strided(static_cast<int64_t>(sizes.size()), sizes.begin(), strides, dtype, like);
}

// Contiguous and aligned to the vector, by a copy where it is not.
Tensor dense(const Tensor& t) {
  if (!t.is_contiguous()) return torch::stable::contiguous(t);
  return aligned(t.const_data_ptr()) ? t : torch::stable::clone(t);
}

bool is_half(ScalarType dtype) { return dtype == ScalarType::Half || dtype == ScalarType::BFloat16; }
ScalarType compute_dtype(ScalarType dtype) { return dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float; }

Type type_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Half: return Type::half;
    case ScalarType::BFloat16: return Type::bfloat16;
    case ScalarType::Float: return Type::float32;
    default: return Type::float64;
  }
}

Operand operand(const Tensor& t) { return {const_cast<void*>(t.const_data_ptr()), type_of(t.scalar_type())}; }
Operand operand(const std::optional<Tensor>& t) { return t ? operand(*t) : Operand{}; }
const void* pointer(const std::optional<Tensor>& t) { return t ? t->const_data_ptr() : nullptr; }

void check_device(const Tensor& x, const Tensor& t, const char* op, const char* name) {
  STD_TORCH_CHECK(t.is_cuda() && t.get_device_index() == x.get_device_index(), "fastlayers::", op, ": expected ", name,
                  " on x's device");
}

std::optional<Tensor> checked_weight(const std::optional<Tensor>& weight, const Tensor& x, int64_t n, const char* op, const char* name) {
  if (!weight) return std::nullopt;
  check_device(x, *weight, op, name);
  STD_TORCH_CHECK(weight->numel() == n, "fastlayers::", op, ": expected ", name, " of ", n, " elements, but got ", weight->numel());
  return dense(*weight);
}

void check_kind(int64_t kind, bool bias, const char* op) {
  STD_TORCH_CHECK(kind >= kLayer && kind <= kGemma, "fastlayers::", op, ": expected a kind of 0 to 3, but got ", kind);
  STD_TORCH_CHECK(kind == kLayer || !bias, "fastlayers::", op, ": rms_norm has no bias");
}

void no_kernel(const char* op, const char* name, ScalarType x, ScalarType other) {
  STD_TORCH_CHECK(false, "fastlayers::", op, ": no kernel for x of ", torch::headeronly::toString(x), " and ", name, " of ",
                  torch::headeronly::toString(other));
}

// Pieces of a row for the split kernels: at least 4 blocks an SM, but no piece under two batches a thread.
template <typename A>
void set_pieces(SplitArgs<A>& args, int processors) {
  const int64_t wanted = ceil_div(4 * static_cast<int64_t>(processors), args.rows);
  const int64_t longest = std::max<int64_t>(1, args.n / (2 * kBatch * kSplitThreads));
  args.piece = ceil_div(args.n, std::clamp<int64_t>(wanted, 1, longest));
  args.pieces = static_cast<int>(ceil_div(args.n, args.piece));
  STD_TORCH_CHECK(args.rows * args.pieces <= INT32_MAX, "fastlayers::layer_norm: ", args.rows, " rows are more than one launch takes");
}

// Calls f(std::integral_constant<int, K>) for the words of a launch that are built: for common types 1, 2 and 4, else 1 and 4.
template <bool COMMON, typename F>
void with_words(int words, F&& f) {
  if (words == 1) return f(std::integral_constant<int, 1>{});
  if constexpr (COMMON) {
    if (words == 2) return f(std::integral_constant<int, 2>{});
  }
  f(std::integral_constant<int, 4>{});
}

// The period after which a row of n starts at the same place of a word.
int period_of(int64_t n, int vector) {
  int period = 1;
  while (period * n % vector != 0) period *= 2;
  return period;
}

// Which rows stream through a resident grid: of half to all of the words that a block holds, and shorter ragged ones. On an
// H100 in bfloat16 .87 and .90 (layer_norm, rms_norm) of the copy bandwidth at 16384 columns for .64 and .72 in registers, and
// .86 for .70 with rms_norm at 4095; but .88 for .91 and .96 at 4096, and .70 and .78 for .89 and .94 at 32768 over clusters.
constexpr int64_t kStreamWords = kResidentThreads * kResidentWords;
constexpr int64_t kStreamPast = 4 << 20;  // bytes; fewer are over before the weights have been fetched for it

template <typename X>
bool stream_forward(const ForwardArgs<compute_t<X>>& args, int64_t n, const Launch& on) {
  using A = compute_t<X>;
  constexpr int V = kVectorBytes / sizeof(X);
  const bool ragged = n % V != 0, layer = args.kind == kLayer;
  const int64_t words = ceil_div(n + (ragged ? V - 1 : 0), V);
  if (words > kStreamWords || (words <= kStreamWords / 2 && !ragged) || args.rows * words * kVectorBytes < kStreamPast) return false;
  const int parameters = (args.weight != nullptr ? 1 : 0) + (args.bias != nullptr ? 1 : 0);
  const int parameter_bytes = parameters * V * static_cast<int>(args.wide_weight ? sizeof(A) : sizeof(X));
  constexpr int kSlots = 2 * sizeof(Moments<A>) * kResidentThreads / 32;
  const ResidentLaunch launch = resident_launch(kForwardStreamRule, words, args.rows, period_of(n, V), kVectorBytes, parameter_bytes,
                                                kSlots, kResidentThreads, on);
  if (launch.groups == 0) return false;
  StreamArgs<A> stream{args.x, args.weight, args.bias, args.y, args.stats, args.rows, static_cast<int>(n), args.kind, launch.row.threads,
                       launch.groups, launch.stages, args.wide_weight, args.wide_out, args.eps};
  static bool all_prepared[8][kMaxDevices];
  const auto run = [&](auto is_layer, auto is_ragged, auto is_cluster) {
    constexpr bool LAYER = decltype(is_layer)::value, RAGGED = decltype(is_ragged)::value, CLUSTER = decltype(is_cluster)::value;
    const auto kernel = layer_norm_forward_stream<X, LAYER, RAGGED, CLUSTER>;
    bool& prepared = all_prepared[LAYER + 2 * RAGGED + 4 * CLUSTER][on.device()];
    if (!prepared)
      STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          static_cast<int>(shared_of_block(1, CLUSTER ? kMaxCluster : 1, kSlots, on.device()))));
    prepared = true;
    launch_kernel(kernel, launch.blocks, launch.row.block, launch.row.cluster, launch.shared, on.stream(), stream);
  };
  const auto choose = [&](auto is_layer, auto is_ragged) {
    if (launch.row.cluster > 1) run(is_layer, is_ragged, std::true_type{});
    else run(is_layer, is_ragged, std::false_type{});
  };
  const auto choose_ragged = [&](auto is_layer) {
    if (ragged) choose(is_layer, std::true_type{});
    else choose(is_layer, std::false_type{});
  };
  if (layer) choose_ragged(std::true_type{});
  else choose_ragged(std::false_type{});
  return true;
}

template <typename X, typename R>
void forward(ForwardArgs<compute_t<X>>& args, const SplitArgs<compute_t<X>>& split_args, int64_t n, const Launch& on, const Tensor& like) {
  using A = compute_t<X>;
  constexpr int V = kVectorBytes / sizeof(X);
  constexpr bool ALWAYS_MIXED = sizeof(sum_t<X, R>) != sizeof(X);
  if constexpr (std::is_void_v<R> && sizeof(X) != 8) {
    if (stream_forward<X>(args, n, on)) return;
  }
  const DeviceTraits& device = device_traits(on.device());
  const bool mixed = args.wide_weight || args.wide_out;
  const bool ragged = n % V != 0;
  const RowLaunch shape = forward_launch(ceil_div(n + (ragged ? V - 1 : 0), V), args.rows, kForwardThreads<X, R>, device);
  if (shape.threads == 0) {
    SplitArgs<A> split = split_args;
    set_pieces(split, device.processors);
    const int64_t blocks = split.rows * split.pieces;
    const Tensor partial = empty_of({blocks * 3}, compute_dtype(like.scalar_type()), like);
    split.partial = static_cast<A*>(partial.mutable_data_ptr());
    launch_kernel(layer_norm_split_moments<A>, blocks, kSplitThreads, 1, 0, on.stream(), split);
    launch_kernel(layer_norm_split_apply<A>, blocks, kSplitThreads, 1, 0, on.stream(), split);
    return;
  }
  args.n = static_cast<int>(n);
  args.lanes = shape.threads;
  args.lane_bits = log2_of(shape.threads);
  const int64_t blocks = shape.cluster > 1 ? args.rows * shape.cluster : ceil_div(args.rows, shape.block / shape.threads);
  const auto run = [&](auto is_mixed, auto is_ragged) {
    constexpr bool MIXED = decltype(is_mixed)::value, RAGGED = decltype(is_ragged)::value;
    if (shape.cluster > 1)
      return launch_kernel(layer_norm_forward_rows<X, R, MIXED, RAGGED, 4, true, kForwardClusterThreads>, blocks, shape.block,
                           shape.cluster, 0, on.stream(), args);
    constexpr int kMost = kForwardThreads<X, R>;
    with_words<!MIXED && sizeof(X) != 8>(shape.words, [&](auto k) {
      if constexpr (k.value == 4 && kMost > 512 && !MIXED) {
        if (shape.block <= 512)
          return launch_kernel(layer_norm_forward_rows<X, R, MIXED, RAGGED, 4, false, 512>, blocks, shape.block, 1, 0, on.stream(), args);
      }
      launch_kernel(layer_norm_forward_rows<X, R, MIXED, RAGGED, k.value, false, kMost>, blocks, shape.block, 1, 0, on.stream(), args);
    });
  };
  // Rare types have the ragged kernels only, which serve all rows.
  if constexpr (sizeof(X) == 2) {
    if (ALWAYS_MIXED || mixed) return run(std::true_type{}, std::true_type{});
  }
  if constexpr (!ALWAYS_MIXED) {
    if constexpr (sizeof(X) != 8) {
      if (!ragged) return run(std::false_type{}, std::false_type{});
    }
    run(std::false_type{}, std::true_type{});
  }
}

std::tuple<Tensor, Tensor, Tensor> forward_op(const char* op, const Tensor& x_in, const std::optional<Tensor>& residual_in,
                                              const std::optional<Tensor>& weight_in, const std::optional<Tensor>& bias_in,
                                              int64_t dims, double eps, int64_t kind, ScalarType dtype, bool keep) {
  const Shape s = shape_of(x_in, dims, op);
  check_kind(kind, bias_in.has_value(), op);
  const ScalarType x_dtype = x_in.scalar_type();
  const bool half = is_half(x_dtype);
  if (dtype != x_dtype && !(half && dtype == ScalarType::Float)) no_kernel(op, "a result", x_dtype, dtype);
  const std::optional<Tensor> weight = checked_weight(weight_in, x_in, s.n, op, "weight");
  const std::optional<Tensor> bias = checked_weight(bias_in, x_in, s.n, op, "bias");
  const ScalarType weight_dtype = weight ? weight->scalar_type() : bias ? bias->scalar_type() : x_dtype;
  if (weight_dtype != x_dtype && !(half && weight_dtype == ScalarType::Float)) no_kernel(op, "weight", x_dtype, weight_dtype);
  if (bias && bias->scalar_type() != weight_dtype) no_kernel(op, "bias", x_dtype, bias->scalar_type());

  const Launch on(x_in);
  Tensor y = empty_result(x_in, dtype);
  const ScalarType statistics = compute_dtype(x_dtype);
  Tensor stats = keep ? empty_of({kind == kLayer ? 2 : 1, s.rows}, statistics, x_in) : empty_of({0}, statistics, x_in);
  Tensor sum;
  std::optional<Tensor> residual;
  if (residual_in) {
    check_device(x_in, *residual_in, op, "residual");
    STD_TORCH_CHECK(dims_of(x_in.sizes()) == dims_of(residual_in->sizes()), "fastlayers::", op, ": expected residual of x's shape");
    const ScalarType residual_dtype = residual_in->scalar_type();
    if (residual_dtype != x_dtype && !(half && residual_dtype == ScalarType::Float)) no_kernel(op, "residual", x_dtype, residual_dtype);
    sum = empty_result(x_in, residual_dtype);
    residual = dense(*residual_in);
  }
  if (s.rows == 0 || s.n == 0) return {y, sum, stats};
  const Tensor x = dense(x_in);
  dispatch_floating(x_dtype, op, [&](auto tag) {
    using X = decltype(tag);
    using A = compute_t<X>;
    A* kept = keep ? static_cast<A*>(stats.mutable_data_ptr()) : nullptr;
    ForwardArgs<A> args{};
    args.x = x.const_data_ptr();
    args.residual = pointer(residual);
    args.weight = pointer(weight);
    args.bias = pointer(bias);
    args.sum = residual ? sum.mutable_data_ptr() : nullptr;
    args.y = y.mutable_data_ptr();
    args.stats = kept;
    args.rows = s.rows;
    args.kind = static_cast<int>(kind);
    args.wide_weight = weight_dtype != x_dtype;
    args.wide_out = dtype != x_dtype;
    args.eps = static_cast<A>(eps);
    SplitArgs<A> split{};
    split.x = operand(x);
    split.residual = operand(residual);
    if (residual) split.sum = operand(sum);
    split.weight = operand(weight);
    split.bias = operand(bias);
    split.y = operand(y);
    split.stats = kept;
    split.rows = s.rows;
    split.n = s.n;
    split.kind = args.kind;
    split.eps = args.eps;
    if (!residual) return forward<X, void>(args, split, s.n, on, x);
    if constexpr (sizeof(X) == 2) {
      if (residual->scalar_type() == ScalarType::Float) return forward<X, float>(args, split, s.n, on, x);
    }
    forward<X, X>(args, split, s.n, on, x);
  });
  return {y, sum, stats};
}

std::tuple<Tensor, Tensor> layer_norm_forward(const Tensor& x, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                                              int64_t dims, double eps, int64_t kind, ScalarType dtype, bool keep) {
  auto [y, sum, stats] = forward_op("layer_norm_forward", x, std::nullopt, weight, bias, dims, eps, kind, dtype, keep);
  return {y, stats};
}

std::tuple<Tensor, Tensor, Tensor> add_layer_norm_forward(const Tensor& x, const Tensor& residual, const std::optional<Tensor>& weight,
                                                          const std::optional<Tensor>& bias, int64_t dims, double eps, int64_t kind,
                                                          ScalarType dtype, bool keep) {
  return forward_op("add_layer_norm_forward", x, residual, weight, bias, dims, eps, kind, dtype, keep);
}

// Adds the blocks' partial sums up into those of dweight and dbias that are wanted.
template <typename A>
void sum_partials(const A* partial, const Tensor& dweight, const Tensor& dbias, bool want_weight, bool want_bias, int blocks, int64_t n,
                  cudaStream_t stream) {
  if (!want_weight && !want_bias) return;
  dispatch_floating((want_weight ? dweight : dbias).scalar_type(), "layer_norm_backward", [&](auto tag) {
    using W = decltype(tag);
    if constexpr (sizeof(W) <= sizeof(A) && (sizeof(A) == 4 || sizeof(W) == 8)) {
      const dim3 grid(static_cast<unsigned>(ceil_div(n, 32)), want_weight && want_bias ? 2 : 1);
      layer_norm_sum_partials<W, A><<<grid, kSumWarps * 32, 0, stream>>>(
          partial, want_weight ? static_cast<W*>(dweight.mutable_data_ptr()) : nullptr,
          want_bias ? static_cast<W*>(dbias.mutable_data_ptr()) : nullptr, blocks, n);
      STD_CUDA_KERNEL_LAUNCH_CHECK();
    }
  });
}

template <typename X, typename D, bool LAYER, int K>
bool backward(BackwardArgs<compute_t<X>>& args, int64_t n, const Tensor& dweight, const Tensor& dbias, const Launch& on, const Tensor& like) {
  using A = compute_t<X>;
  constexpr int V = kVectorBytes / sizeof(X);
  constexpr bool kRare = sizeof(D) < sizeof(X) || sizeof(X) == 8;  // the ragged kernels serve all rows
  if (n > INT32_MAX / 2) return false;
  const bool ragged = n % V != 0;
  const int word_bytes = static_cast<int>(V * ((args.dsum != nullptr ? 2 : 1) * sizeof(X) + sizeof(D)));
  const int weight_bytes = static_cast<int>(V * (args.stage_wide ? sizeof(A) : sizeof(X)));
  const int64_t words = ceil_div(n + (ragged ? V - 1 : 0), V);
  constexpr int kSlots = 2 * sizeof(RowSums<A>) * kResidentThreads / 32;
  const ResidentRule* of_row = kResidentRules;
  while (of_row->words < words) ++of_row;
  const ResidentLaunch launch = resident_launch(ragged ? kRaggedRule : *of_row, words, args.rows, period_of(n, V), word_bytes, weight_bytes, kSlots,
                                                ragged ? kBackwardThreadsOf<X, LAYER, true> : kBackwardThreadsOf<X, LAYER, kRare>, on);
  if (launch.groups == 0) return false;
  args.n = static_cast<int>(n);
  args.lanes = launch.row.threads;
  args.inverse_n = A(1) / static_cast<A>(n);
  args.groups = launch.groups;
  args.stages = launch.stages;
  const int64_t partials = launch.blocks / launch.row.cluster;
  const Tensor partial = empty_of({args.want_weight || args.want_bias ? 2 * partials * n : 0}, sizeof(A) == 8 ? ScalarType::Double : ScalarType::Float, like);
  args.partial = static_cast<A*>(partial.mutable_data_ptr());
  static bool all_prepared[4][kMaxDevices];
  const auto run = [&](auto kernel) {
    bool* prepared = all_prepared[(launch.row.cluster > 1 ? 2 : 0) + (ragged ? 1 : 0)];
    if (!prepared[on.device()]) {
      STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          static_cast<int>(shared_of_block(1, launch.row.cluster, kSlots, on.device()))));
      prepared[on.device()] = true;
    }
    launch_kernel(kernel, launch.blocks, launch.row.block, launch.row.cluster, launch.shared, on.stream(), args);
  };
  const auto choose = [&](auto is_ragged) {
    constexpr bool RAGGED = decltype(is_ragged)::value;
    if (launch.row.cluster > 1) run(layer_norm_backward_rows<X, D, LAYER, RAGGED, K, true>);
    else run(layer_norm_backward_rows<X, D, LAYER, RAGGED, K, false>);
  };
  if constexpr (kRare) choose(std::true_type{});
  else if (ragged) choose(std::true_type{});
  else choose(std::false_type{});
  sum_partials(args.partial, dweight, dbias, args.want_weight, args.want_bias, static_cast<int>(partials), n, on.stream());
  return true;
}

template <typename A>
void split_backward(SplitArgs<A>& args, const Tensor& dweight, const Tensor& dbias, bool want_weight, bool want_bias, const Launch& on,
                    const Tensor& like) {
  const DeviceTraits& device = device_traits(on.device());
  const ScalarType dtype = compute_dtype(like.scalar_type());
  set_pieces(args, device.processors);
  const int64_t blocks = args.rows * args.pieces;
  const Tensor sums = empty_of({blocks * 2}, dtype, like);
  args.partial = static_cast<A*>(sums.mutable_data_ptr());
  launch_kernel(layer_norm_split_sums<A>, blocks, kSplitThreads, 1, 0, on.stream(), args);
  launch_kernel(layer_norm_split_dx<A>, blocks, kSplitThreads, 1, 0, on.stream(), args);
  if (!want_weight && !want_bias) return;
  const int64_t across = ceil_div(args.n, kSplitThreads * kBatch);
  const int64_t slabs = std::clamp<int64_t>(4 * device.processors / across, 1, std::min<int64_t>(args.rows, 64));
  const Tensor partial = empty_of({2 * slabs * args.n}, dtype, like);
  args.partial = static_cast<A*>(partial.mutable_data_ptr());
  const dim3 grid(static_cast<unsigned>(across), static_cast<unsigned>(slabs));
  layer_norm_split_columns<A><<<grid, kSplitThreads, 0, on.stream()>>>(args, static_cast<int>(slabs));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  sum_partials<A>(args.partial, dweight, dbias, want_weight, want_bias, static_cast<int>(slabs), args.n, on.stream());
}

// Calls f(X{}, D{}) for the types of x and dy that are built: the same twice, or one of 16 bits and one float32.
template <typename F>
void dispatch_backward(ScalarType x, ScalarType dy, const char* op, F&& f) {
  dispatch_floating(x, op, [&](auto tag) {
    using X = decltype(tag);
    if (dy == x) return f(X{}, X{});
    if constexpr (sizeof(X) == 2) {
      if (dy == ScalarType::Float) return f(X{}, float{});
    }
    if constexpr (sizeof(X) == 4) {
      if (dy == ScalarType::Half) return f(X{}, __half{});
      if (dy == ScalarType::BFloat16) return f(X{}, __nv_bfloat16{});
    }
    no_kernel(op, "dy", x, dy);
  });
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& dy_in, const std::optional<Tensor>& dsum_in, const Tensor& x_in,
                                                       const Tensor& stats_in, const std::optional<Tensor>& weight_in, int64_t dims,
                                                       int64_t kind, bool want_weight, bool want_bias) {
  const char* op = "layer_norm_backward";
  const Shape s = shape_of(x_in, dims, op);
  check_kind(kind, want_bias, op);
  check_device(x_in, dy_in, op, "dy");
  STD_TORCH_CHECK(dims_of(x_in.sizes()) == dims_of(dy_in.sizes()), "fastlayers::", op, ": expected dy of x's shape");
  if (dsum_in) check_same_shape(x_in, *dsum_in, op, "dsum");
  const ScalarType x_dtype = x_in.scalar_type(), statistics = compute_dtype(x_dtype);
  check_device(x_in, stats_in, op, "stats");
  STD_TORCH_CHECK(stats_in.scalar_type() == statistics && stats_in.numel() == (kind == kLayer ? 2 : 1) * s.rows, "fastlayers::", op,
                  ": expected the stats that the forward keeps");
  const std::optional<Tensor> weight = checked_weight(weight_in, x_in, s.n, op, "weight");
  const ScalarType weight_dtype = weight ? weight->scalar_type() : x_dtype;
  const bool wide_weight = is_half(x_dtype) && weight_dtype == ScalarType::Float;
  const bool small_weight = x_dtype == ScalarType::Float && is_half(weight_dtype);
  if (weight_dtype != x_dtype && !wide_weight && !small_weight) no_kernel(op, "weight", x_dtype, weight_dtype);
  want_weight = want_weight && weight.has_value();

  const Launch on(x_in);
  Tensor dx = empty_result(x_in, x_dtype);
  const auto gradient = [&](bool wanted) {
    if (!wanted) return empty_of({0}, weight_dtype, x_in);
    return weight ? empty_result(*weight, weight_dtype) : empty_of({s.n}, weight_dtype, x_in);
  };
  Tensor dweight = gradient(want_weight), dbias = gradient(want_bias);
  if (s.n == 0) return {dx, dweight, dbias};
  if (s.rows == 0) {
    if (want_weight) torch::stable::zero_(dweight);
    if (want_bias) torch::stable::zero_(dbias);
    return {dx, dweight, dbias};
  }
  const Tensor x = dense(x_in), dy = dense(dy_in), stats = dense(stats_in);
  const std::optional<Tensor> dsum = dsum_in ? std::optional<Tensor>(dense(*dsum_in)) : std::nullopt;
  dispatch_backward(x_dtype, dy.scalar_type(), op, [&](auto x_tag, auto dy_tag) {
    using X = decltype(x_tag);
    using D = decltype(dy_tag);
    using A = compute_t<X>;
    BackwardArgs<A> args{};
    args.dy = dy.const_data_ptr();
    args.dsum = pointer(dsum);
    args.x = x.const_data_ptr();
    args.weight = pointer(weight);
    args.stats = static_cast<const A*>(stats.const_data_ptr());
    args.dx = dx.mutable_data_ptr();
    args.rows = s.rows;
    args.wide_weight = wide_weight;
    args.small_weight = small_weight;
    args.bfloat = weight_dtype == ScalarType::BFloat16;
    args.gemma = kind == kGemma && weight.has_value();
    args.stage_wide = sizeof(X) == 2 && (wide_weight || args.gemma);
    args.want_weight = want_weight;
    args.want_bias = want_bias;
    const auto served = [&](auto layer) {
      constexpr bool LAYER = decltype(layer)::value;
#ifdef FASTLAYERS_TUNE
      if (rule("FL_BACKWARD_WORDS", kResidentWords) == 2) return backward<X, D, LAYER, 2>(args, s.n, dweight, dbias, on, x);
#endif
      return backward<X, D, LAYER, kResidentWords>(args, s.n, dweight, dbias, on, x);
    };
    if (kind == kLayer ? served(std::true_type{}) : served(std::false_type{})) return;
    SplitArgs<A> split{};
    split.x = operand(x);
    split.weight = operand(weight);
    split.dy = operand(dy);
    split.dsum = operand(dsum);
    split.dx = operand(dx);
    split.stats = const_cast<A*>(args.stats);
    split.rows = s.rows;
    split.n = s.n;
    split.kind = static_cast<int>(kind);
    split_backward(split, dweight, dbias, want_weight, want_bias, on, x);
  });
  return {dx, dweight, dbias};
}

}  // namespace
}  // namespace fastlayers

STABLE_TORCH_LIBRARY_IMPL(fastlayers, CUDA, m) {
  m.impl("layer_norm_forward", TORCH_BOX(&fastlayers::layer_norm_forward));
  m.impl("add_layer_norm_forward", TORCH_BOX(&fastlayers::add_layer_norm_forward));
  m.impl("layer_norm_backward", TORCH_BOX(&fastlayers::layer_norm_backward));
}

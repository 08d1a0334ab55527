// softmax and log_softmax of x·scale + mask over any dimension, forward and backward.
//
// The stock composition reads and writes the scores once for the scale, once for the mask and two to three times for the
// softmax. Here a row is read once and written once: it stays in registers between the reduction and the result.
//
//   rows    the dimension is contiguous. A part of a warp, a block, or up to 16 blocks of a cluster (sm_90) hold one row. Each
//           warp reduces its part to (maximum, sum of exponentials below it), and those pairs cross warps and blocks in one
//           exchange.
//   team    a row too long for that: many blocks, all resident, hold a slice each in shared memory and tell each other their
//           pairs through global memory, while the next rows are already on their way.
//   split   what neither can hold: two passes, with every row cut into pieces so that few rows still fill the GPU.
//   columns the dimension is strided: a thread owns neighbouring columns and walks down them.
//
// A row whose length is not a multiple of the vector starts anywhere in a 16-byte word ("ragged"). All tensors being contiguous
// and aligned, element i of each lies at the same place in its word, so a row is whole words still, but for a few elements
// at both ends: the row kernels give those to single threads, the others read the words that cover the row and ignore what
// belongs to its neighbours.
#include <cooperative_groups.h>

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

constexpr int kRowThreads = 256;   // most threads of a block that holds 8 words a thread: several fit an SM and their phases overlap
constexpr int kWideThreads = 1024;  // and of one that holds up to 4
// Blocks that an SM should hold: the registers that this leaves a thread are those that K words of its row need.
constexpr int blocks_resident(int words) { return words > 4 ? 2 : words > 2 ? 1 : 6; }
constexpr int most_threads(int words) { return words > 2 && words <= 4 ? kWideThreads : kRowThreads; }
constexpr int kMaxCluster = 16;    // 8 is portable; 16 fits a GPC of every sm_90 part
constexpr int kMaxWarps = kWideThreads / 32;
constexpr int kMaskDims = 4;

enum class MaskKind : int { none, boolean, same_dtype, float32 };

// A mask that broadcasts to the rows: an offset for each row from its outer indices, and a step along the row.
struct Mask {
  const void* data = nullptr;
  MaskKind kind = MaskKind::none;
  int dims = 0;
  int64_t size[kMaskDims] = {}, stride[kMaskDims] = {};
  int64_t step = 0;

  __device__ int64_t row_offset(int64_t row) const {
    int64_t offset = 0;
#pragma unroll
    for (int d = kMaskDims - 1; d >= 0; --d) {
      if (d >= dims) continue;
      int64_t next;
      if ((row | size[d]) >> 32 == 0) next = static_cast<uint32_t>(row) / static_cast<uint32_t>(size[d]);  // several times cheaper
      else next = row / size[d];
      offset += (row - next * size[d]) * stride[d];
      row = next;
    }
    return offset;
  }
};

// A: the type of the computation.
template <typename A>
struct ForwardArgs {
  const void* x;
  void* y;
  int64_t rows, n, row_stride;
  A scale;
  int lanes;         // threads of one block that share a row: a power of two up to a warp, or the whole block
  int lane_bits;     // log2 of them, up to a warp
  bool ragged;       // n is no multiple of the vector
  Mask mask;
};

template <typename A>
struct BackwardArgs {
  const void* dy;
  const void* y;
  void* dx;
  int64_t rows, n;
  A scale;
  int lanes, lane_bits;
  bool ragged;
  Mask mask;  // boolean only: an additive one does not change the formula
};

// ---- exponentials -------------------------------------------------------------------------------------------------------

// FAST, for 16-bit results: the hardware's exp2, whose error stays far below theirs. For wider results the library's exp
// follows torch. The scores themselves stay in natural units: the lowest bfloat16 times log2(e) would overflow.
template <bool FAST, typename A>
__device__ __forceinline__ A exponential(A v) {
  if constexpr (FAST) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v * 1.4426950408889634f));
    return r;
  } else if constexpr (std::is_same_v<A, double>) {
    return exp(v);
  } else {
    return expf(v);
  }
}

// What the backward sums over a row: g·p of the result's gradient g and the result p, or g for log_softmax.
template <bool LOG, typename A, typename T, int V>
__device__ __forceinline__ Vec<A, V> sum_terms(const Vec<T, V>& g, const Vec<T, V>& p) {
  Vec<A, V> r = unpack<A>(g);
  if constexpr (!LOG) {
    const Vec<A, V> pa = unpack<A>(p);
#pragma unroll
    for (int j = 0; j < V; ++j) r.v[j] *= pa.v[j];
  }
  return r;
}

// The gradient of x from the row's sum.
template <bool LOG, bool FAST, typename A, typename T, int V>
__device__ __forceinline__ Vec<A, V> score_gradient(const Vec<T, V>& g, const Vec<T, V>& p, A sum, A scale) {
  const Vec<A, V> ga = unpack<A>(g), pa = unpack<A>(p);
  Vec<A, V> r;
#pragma unroll
  for (int j = 0; j < V; ++j) {
    if constexpr (LOG) r.v[j] = ga.v[j] - exponential<FAST>(pa.v[j]) * sum;
    else r.v[j] = pa.v[j] * (ga.v[j] - sum);
    r.v[j] *= scale;
  }
  return r;
}

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

// ---- reductions over the threads of a row -------------------------------------------------------------------------------

template <typename A>
struct Pair {
  A m, s;  // maximum; sum of exponentials relative to it
};

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

// Turns t = score - maximum into the result: t - log(sum), or exp(t) / sum.
template <typename A, bool LOG, bool FAST>
struct Finish {
  A sum, last, correction;

  // `rescale`: exponentials given to divide() are relative to a maximum lower than the row's by log(rescale).
  __device__ explicit Finish(const Pair<A>& row, A rescale = A(1))
      : sum(row.s), last(LOG ? logarithm(row.s) : quotient(rescale, row.s)), correction(!FAST && rescale == A(1) ? last : A(0)) {}

  __device__ static A logarithm(A v) {
    if constexpr (std::is_same_v<A, double>) return log(v);
    else return FAST ? __logf(v) : logf(v);
  }
  __device__ static A quotient(A u, A v) {
    if constexpr (FAST) return __fdividef(u, v);
    else return u / v;
  }

  __device__ Finish(A sum_, A last_) : sum(sum_), last(last_), correction(FAST ? A(0) : last_) {}

  // A quotient by the reciprocal, with one Newton step where the result is wide enough to show the difference.
  __device__ __forceinline__ A divide(A e) const {
    const A q = e * last;
    if constexpr (FAST) return q;
    else return q + (e - q * sum) * correction;
  }
  __device__ __forceinline__ A operator()(A t) const {
    if constexpr (LOG) return t - last;
    else return divide(exponential<FAST>(t));
  }
};

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

// ---- one row in registers -----------------------------------------------------------------------------------------------

// Where a thread stands: its row, and the words of it that it owns, `stride` apart. Of a ragged row also one of the single
// elements before and after the whole words, if any are left for it.
struct Place {
  int64_t row;
  int64_t start;  // of the first whole word, in elements from that of the tensor
  int words;      // whole ones; 32 bits do, for a row that fits in registers is short
  int first, stride;
  int single;     // its element in the row, or -1

  __device__ int word(int i) const { return first + i * stride; }

  template <int K, int V, bool CLUSTER, typename Args>
  __device__ static Place find(const Args& a) {
    Place p;
    int lane = a.lanes <= 32 ? threadIdx.x & (a.lanes - 1) : threadIdx.x;
    p.stride = a.lanes;
    if constexpr (CLUSTER) {
      auto cluster = this_cluster();
      p.row = blockIdx.x / cluster.num_blocks();
      p.first = static_cast<int>(cluster.block_rank()) * K * a.lanes + lane;
      if (cluster.block_rank() != 0) lane = INT32_MAX;  // the first block takes the singles
    } else {
      p.row = blockIdx.x;
      if (a.lanes <= 32) p.row = p.row * (blockDim.x >> a.lane_bits) + (threadIdx.x >> a.lane_bits);
      p.first = lane;
    }
    p.start = p.row * a.n;
    p.single = -1;
    int n = static_cast<int>(a.n);
    if (a.ragged) {
      const int before = min(n, static_cast<int>(-p.start & (V - 1)));
      const int after = (n - before) & (V - 1);
      if (lane < before) p.single = lane;
      else if (lane < before + after) p.single = n - before - after + lane;
      p.start += before;
      n -= before + after;
    }
    p.words = static_cast<unsigned>(n) / V;
    if (p.row >= a.rows) p.words = 0, p.single = -1;
    return p;
  }
};

// Writes the part of a word that belongs to the row.
template <typename T, int V>
__device__ __forceinline__ void store_word(T* p, int64_t e, int64_t n, const Vec<T, V>& w) {
  if (e >= 0 && e + V <= n) {
    store_vec<T, V>(p, w);
  } else {
#pragma unroll
    for (int j = 0; j < V; ++j)
      if (e + j >= 0 && e + j < n) p[j] = w.v[j];
  }
}

// The V elements of a mask from `offset` on, in one load where they are neighbours and aligned.
template <typename M, int V>
__device__ __forceinline__ Vec<M, V> load_mask(const Mask& mask, int64_t offset) {
  const M* p = static_cast<const M*>(mask.data) + offset;
  Vec<M, V> m;
  if (V > 1 && mask.step == 1 && reinterpret_cast<uintptr_t>(p) % sizeof(m) == 0) return load_vec<M, V>(p);
#pragma unroll
  for (int j = 0; j < V; ++j) m.v[j] = p[j * mask.step];
  return m;
}

// Masks V scores, of which the first has its mask at `offset`.
template <typename In, typename A, int V>
__device__ __forceinline__ void apply_mask(Vec<A, V>& v, const Mask& mask, int64_t offset) {
  if (mask.kind == MaskKind::boolean) {
    const Vec<bool, V> m = load_mask<bool, V>(mask, offset);
#pragma unroll
    for (int j = 0; j < V; ++j)
      if (!m.v[j]) v.v[j] = minus_infinity<A>();
  } else if (mask.kind == MaskKind::float32) {
    const Vec<float, V> m = load_mask<float, V>(mask, offset);
#pragma unroll
    for (int j = 0; j < V; ++j) v.v[j] += static_cast<A>(m.v[j]);
  } else {
    const Vec<A, V> m = unpack<A>(load_mask<In, V>(mask, offset));
#pragma unroll
    for (int j = 0; j < V; ++j) v.v[j] += m.v[j];
  }
}

// Zeroes the gradient where a boolean mask is False.
template <typename A, int V>
__device__ __forceinline__ void drop_masked(Vec<A, V>& r, const Mask& mask, int64_t offset) {
  const Vec<bool, V> m = load_mask<bool, V>(mask, offset);
#pragma unroll
  for (int j = 0; j < V; ++j)
    if (!m.v[j]) r.v[j] = A(0);
}

// The largest of the elements that a thread holds. Packed 16-bit values are compared two at a time, unconverted.
template <typename T, int K, int V>
__device__ __forceinline__ T largest(const Vec<T, V> (&held)[K]) {
  if constexpr (sizeof(T) == 2) {
    using T2 = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    T2 m = reinterpret_cast<const T2*>(held[0].v)[0];
#pragma unroll
    for (int i = 0; i < K; ++i)
#pragma unroll
      for (int j = 0; j < V / 2; ++j) m = __hmax2(m, reinterpret_cast<const T2*>(held[i].v)[j]);
    return __hmax(m.x, m.y);
  } else {
    T m = held[0].v[0];
#pragma unroll
    for (int i = 0; i < K; ++i)
#pragma unroll
      for (int j = 0; j < V; ++j) m = maximum(m, held[i].v[j]);
    return m;
  }
}

template <typename In, typename Out, int K, bool LOG, bool MASKED, bool CLUSTER>
__global__ void __launch_bounds__(most_threads(K), blocks_resident(K)) softmax_forward_rows(const ForwardArgs<compute_t<In>> a) {
  using A = compute_t<In>;
  constexpr int V = kVectorBytes / sizeof(In);
  constexpr bool FAST = sizeof(Out) == 2;
  __shared__ Pair<A> slots[CLUSTER ? kMaxWarps * kMaxCluster : kMaxWarps];
  Exchange<Pair<A>, CLUSTER> exchange{slots};
  exchange.arrive();

  const Place at = Place::find<K, V, CLUSTER>(a);
  const In* row = static_cast<const In*>(a.x) + at.row * a.row_stride;
  const In* x = row + (at.start - at.row * a.n);
  // All loads before anything that waits for one of them.
  Vec<In, V> loaded[K];
#pragma unroll
  for (int i = 0; i < K; ++i) {
    loaded[i] = filled<In, V>(convert<In>(minus_infinity<A>()));
    if (at.word(i) < at.words) loaded[i] = load_vec<In, V>(x + at.word(i) * V);
  }
  In loaded_single = convert<In>(minus_infinity<A>());
  if (at.single >= 0) loaded_single = row[at.single];

  // A masked row is held as scores; another as it came, negated where the scale is negative so that the largest value has
  // the largest score.
  using Held = std::conditional_t<MASKED, A, In>;
  Vec<Held, V> held[K];
  Vec<A, 1> single{{minus_infinity<A>()}};  // a score
  A to_score = A(1);
  if constexpr (MASKED) {
    const int64_t offset = at.row < a.rows ? a.mask.row_offset(at.row) : 0;
#pragma unroll
    for (int i = 0; i < K; ++i) {
      held[i] = filled<A, V>(minus_infinity<A>());
      if (at.word(i) >= at.words) continue;
      held[i] = unpack<A>(loaded[i]);
#pragma unroll
      for (int j = 0; j < V; ++j) held[i].v[j] *= a.scale;
      apply_mask<In>(held[i], a.mask, offset + (x - row + at.word(i) * V) * a.mask.step);
    }
    if (at.single >= 0) {
      single.v[0] = convert<A>(loaded_single) * a.scale;
      apply_mask<In>(single, a.mask, offset + at.single * a.mask.step);
    }
  } else {
#pragma unroll
    for (int i = 0; i < K; ++i) held[i] = loaded[i];
    to_score = a.scale;
    if (a.scale < A(0)) {
      to_score = -a.scale;
#pragma unroll
      for (int i = 0; i < K; ++i)
        if (at.word(i) < at.words) held[i] = negated(held[i]);
    }
    if (at.single >= 0) single.v[0] = convert<A>(loaded_single) * a.scale;
  }

  const int lanes = a.lanes < 32 ? a.lanes : 32;
  const A m = lanes_max(maximum(convert<A>(largest(held)) * to_score, single.v[0]), lanes);
  const A base = finite_or_zero(m);
  A s = 0;
  Vec<A, V> e[K];  // exponentials relative to the warp's maximum; for log_softmax they only add up
#pragma unroll
  for (int i = 0; i < K; ++i) {
    e[i] = unpack<A>(held[i]);
#pragma unroll
    for (int j = 0; j < V; ++j) e[i].v[j] = exponential<FAST>(e[i].v[j] * to_score - base);
    s += tree_sum(e[i]);
  }
  if (a.ragged) s += exponential<FAST>(single.v[0] - base);
  const Pair<A> all = row_merge<FAST, CLUSTER>(Pair<A>{m, lanes_sum(s, lanes)}, exchange, a.lanes);
  if constexpr (LOG) {
#pragma unroll
    for (int i = 0; i < K; ++i) forget(held[i]);
  }

  Out* y = static_cast<Out*>(a.y) + at.start;
  const Finish<A, LOG, FAST> finish(all, LOG ? A(1) : exponential<FAST>(m - all.m));
#pragma unroll
  for (int i = 0; i < K; ++i) {
    const int word = at.word(i);
    if (word >= at.words) continue;
    if constexpr (LOG) e[i] = unpack<A>(held[i]);
#pragma unroll
    for (int j = 0; j < V; ++j) e[i].v[j] = LOG ? finish(e[i].v[j] * to_score - all.m) : finish.divide(e[i].v[j]);
    store_vec<Out, V>(y + word * V, pack<Out>(e[i]));
  }
  if (at.single >= 0)
    static_cast<Out*>(a.y)[at.row * a.n + at.single] =
        convert<Out>(LOG ? finish(single.v[0] - all.m) : finish.divide(exponential<FAST>(single.v[0] - base)));
}

// dx = scale·y·(dy - sum(y·dy)); for log_softmax scale·(dy - exp(y)·sum(dy)). Where a boolean mask is False, 0.
template <typename In, typename Out, int K, bool LOG, bool MASKED, bool CLUSTER>
__global__ void __launch_bounds__(kRowThreads, 2) softmax_backward_rows(const BackwardArgs<compute_t<In>> a) {
  using A = compute_t<In>;
  constexpr int V = kVectorBytes / sizeof(In);
  constexpr bool FAST = sizeof(In) == 2;
  __shared__ A slots[CLUSTER ? kMaxWarps * kMaxCluster : kMaxWarps];
  Exchange<A, CLUSTER> exchange{slots};
  exchange.arrive();

  const Place at = Place::find<K, V, CLUSTER>(a);
  const Out* dy = static_cast<const Out*>(a.dy);
  const Out* y = static_cast<const Out*>(a.y);

  Vec<Out, V> g[K], p[K];
#pragma unroll
  for (int i = 0; i < K; ++i) {
    g[i] = p[i] = filled<Out, V>(convert<Out>(0.f));
    if (at.word(i) < at.words) {
      g[i] = load_vec<Out, V>(dy + at.start + at.word(i) * V);
      p[i] = load_vec<Out, V>(y + at.start + at.word(i) * V);
    }
  }
  Vec<Out, 1> single_g = filled<Out, 1>(convert<Out>(0.f)), single_p = single_g;
  if (at.single >= 0) {
    single_g.v[0] = dy[at.row * a.n + at.single];
    single_p.v[0] = y[at.row * a.n + at.single];
  }

  A s = sum_terms<LOG, A>(single_g, single_p).v[0];
#pragma unroll
  for (int i = 0; i < K; ++i) s += tree_sum(sum_terms<LOG, A>(g[i], p[i]));
  s = row_sum<CLUSTER>(lanes_sum(s, a.lanes < 32 ? a.lanes : 32), exchange, a.lanes);
#pragma unroll
  for (int i = 0; i < K; ++i) forget(g[i]), forget(p[i]);

  In* dx = static_cast<In*>(a.dx);
  const A scale = a.scale;
  const int64_t mask_offset = MASKED && at.row < a.rows ? a.mask.row_offset(at.row) : 0;
#pragma unroll
  for (int i = 0; i < K; ++i) {
    const int word = at.word(i);
    if (word >= at.words) continue;
    Vec<A, V> r = score_gradient<LOG, FAST, A>(g[i], p[i], s, scale);
    if constexpr (MASKED) drop_masked(r, a.mask, mask_offset + (at.start - at.row * a.n + word * V) * a.mask.step);
    store_vec<In, V>(dx + at.start + word * V, pack<In>(r));
  }
  if (at.single >= 0) {
    Vec<A, 1> r = score_gradient<LOG, FAST, A>(single_g, single_p, s, scale);
    if constexpr (MASKED) drop_masked(r, a.mask, mask_offset + at.single * a.mask.step);
    dx[at.row * a.n + at.single] = convert<In>(r.v[0]);
  }
}

// ---- rows too long to hold ----------------------------------------------------------------------------------------------

constexpr int kSplitThreads = 512;

// The piece of a row that a block of the split kernels owns, in words.
struct Piece {
  int64_t row, first, last;
  int head;

  template <int V>
  __device__ static Piece find(int64_t n, int pieces, bool ragged) {
    Piece p;
    p.row = blockIdx.x / pieces;
    p.head = ragged ? static_cast<int>((p.row * n) & (V - 1)) : 0;
    const int64_t words = (n + p.head + V - 1) / V, each = (words + pieces - 1) / pieces;
    p.first = (blockIdx.x % pieces) * each;
    p.last = p.first + each < words ? p.first + each : words;
    return p;
  }
};

template <typename In, bool MASKED, bool FAST>
struct RowReader {
  using A = compute_t<In>;
  static constexpr int V = kVectorBytes / sizeof(In);
  const ForwardArgs<compute_t<In>>& a;
  const In* x;
  int head;
  int64_t mask_offset;
  A scale;

  __device__ RowReader(const ForwardArgs<compute_t<In>>& args, int64_t row, int head_)
      : a(args), x(static_cast<const In*>(args.x) + row * args.row_stride - head_), head(head_),
        mask_offset(MASKED ? args.mask.row_offset(row) : 0), scale(args.scale) {}

  __device__ Vec<A, V> load(int64_t word) const {
    Vec<A, V> v = unpack<A>(load_vec<In, V>(x + word * V));
#pragma unroll
    for (int j = 0; j < V; ++j) v.v[j] *= scale;
    const int64_t e = word * V - head;
    if (e >= 0 && e + V <= a.n) {
      if constexpr (MASKED) apply_mask<In>(v, a.mask, mask_offset + e * a.mask.step);
      return v;
    }
#pragma unroll
    for (int j = 0; j < V; ++j) {
      Vec<A, 1> one{{minus_infinity<A>()}};
      if (e + j >= 0 && e + j < a.n) {
        one.v[0] = v.v[j];
        if constexpr (MASKED) apply_mask<In>(one, a.mask, mask_offset + (e + j) * a.mask.step);
      }
      v.v[j] = one.v[0];
    }
    return v;
  }
};

template <bool FAST, typename A, int V>
__device__ __forceinline__ Pair<A> extend(Pair<A> p, const Vec<A, V>& v) {
  A m = p.m;
#pragma unroll
  for (int j = 0; j < V; ++j) m = maximum(m, v.v[j]);
  const A base = finite_or_zero(m);
  Vec<A, V> e;
#pragma unroll
  for (int j = 0; j < V; ++j) e.v[j] = exponential<FAST>(v.v[j] - base);
  return {m, p.s * exponential<FAST>(p.m - base) + tree_sum(e)};
}

template <typename In, typename Out, bool MASKED>
__global__ void __launch_bounds__(kSplitThreads) softmax_forward_split_reduce(const ForwardArgs<compute_t<In>> a, int pieces,
                                                                             Pair<compute_t<In>>* partial) {
  using A = compute_t<In>;
  constexpr bool FAST = sizeof(Out) == 2;
  constexpr int V = kVectorBytes / sizeof(In);
  __shared__ Pair<A> slots[kMaxWarps];
  Exchange<Pair<A>, false> exchange{slots};
  const Piece piece = Piece::find<V>(a.n, pieces, a.ragged);
  const RowReader<In, MASKED, FAST> row(a, piece.row, piece.head);
  Pair<A> p{minus_infinity<A>(), A(0)};
#pragma unroll 4
  for (int64_t word = piece.first + threadIdx.x; word < piece.last; word += kSplitThreads) p = extend<FAST>(p, row.load(word));
  p = row_merge<FAST, false>(lanes_merge<FAST>(p, 32), exchange, kSplitThreads);
  if (threadIdx.x == 0) partial[blockIdx.x] = p;
}

template <typename In, typename Out, bool LOG, bool MASKED>
__global__ void __launch_bounds__(kSplitThreads) softmax_forward_split_apply(const ForwardArgs<compute_t<In>> a, int pieces,
                                                                            const Pair<compute_t<In>>* partial) {
  using A = compute_t<In>;
  constexpr bool FAST = sizeof(Out) == 2;
  constexpr int V = kVectorBytes / sizeof(In);
  const Piece piece = Piece::find<V>(a.n, pieces, a.ragged);
  Pair<A> all{minus_infinity<A>(), A(0)};
  for (int i = threadIdx.x & 31; i < pieces; i += 32) all = merge<FAST>(all, partial[piece.row * pieces + i]);
  all = lanes_merge<FAST>(all, 32);
  const RowReader<In, MASKED, FAST> row(a, piece.row, piece.head);
  Out* y = static_cast<Out*>(a.y) + piece.row * a.n - piece.head;
  const Finish<A, LOG, FAST> finish(all);
  for (int64_t word = piece.first + threadIdx.x; word < piece.last; word += kSplitThreads) {
    Vec<A, V> v = row.load(word);
#pragma unroll
    for (int j = 0; j < V; ++j) v.v[j] = finish(v.v[j] - all.m);
    store_word(y + word * V, word * V - piece.head, a.n, pack<Out>(v));
  }
}

template <typename In, typename Out, bool LOG>
__global__ void __launch_bounds__(kSplitThreads) softmax_backward_split_reduce(const BackwardArgs<compute_t<In>> a, int pieces,
                                                                              compute_t<In>* partial) {
  using A = compute_t<In>;
  constexpr int V = kVectorBytes / sizeof(In);
  __shared__ A slots[kMaxWarps];
  Exchange<A, false> exchange{slots};
  const Piece piece = Piece::find<V>(a.n, pieces, a.ragged);
  const int64_t start = piece.row * a.n - piece.head;
  const Out* dy = static_cast<const Out*>(a.dy) + start;
  const Out* y = static_cast<const Out*>(a.y) + start;
  A s = 0;
#pragma unroll 4
  for (int64_t word = piece.first + threadIdx.x; word < piece.last; word += kSplitThreads) {
    const Vec<Out, V> g = load_vec<Out, V>(dy + word * V), p = load_vec<Out, V>(y + word * V);
    const int64_t e = word * V - piece.head;
    Vec<A, V> terms = sum_terms<LOG, A>(g, p);
    if (e < 0 || e + V > a.n) {
#pragma unroll
      for (int j = 0; j < V; ++j)
        if (e + j < 0 || e + j >= a.n) terms.v[j] = A(0);
    }
    s += tree_sum(terms);
  }
  s = row_sum<false>(lanes_sum(s, 32), exchange, kSplitThreads);
  if (threadIdx.x == 0) partial[blockIdx.x] = s;
}

template <typename In, typename Out, bool LOG>
__global__ void __launch_bounds__(kSplitThreads) softmax_backward_split_apply(const BackwardArgs<compute_t<In>> a, int pieces,
                                                                             const compute_t<In>* partial) {
  using A = compute_t<In>;
  constexpr int V = kVectorBytes / sizeof(In);
  const Piece piece = Piece::find<V>(a.n, pieces, a.ragged);
  A s = 0;
  for (int i = threadIdx.x & 31; i < pieces; i += 32) s += partial[piece.row * pieces + i];
  s = lanes_sum(s, 32);
  const int64_t start = piece.row * a.n - piece.head;
  const Out* dy = static_cast<const Out*>(a.dy) + start;
  const Out* y = static_cast<const Out*>(a.y) + start;
  In* dx = static_cast<In*>(a.dx) + start;
  const A scale = a.scale;
  const int64_t mask_offset = a.mask.kind == MaskKind::none ? 0 : a.mask.row_offset(piece.row);
  for (int64_t word = piece.first + threadIdx.x; word < piece.last; word += kSplitThreads) {
    const Vec<Out, V> g = load_vec<Out, V>(dy + word * V), p = load_vec<Out, V>(y + word * V);
    const int64_t e = word * V - piece.head;
    Vec<A, V> r = score_gradient<LOG, sizeof(In) == 2, A>(g, p, s, scale);
    if (a.mask.kind != MaskKind::none) {
#pragma unroll
      for (int j = 0; j < V; ++j)
        if (e + j >= 0 && e + j < a.n && !static_cast<const bool*>(a.mask.data)[mask_offset + (e + j) * a.mask.step]) r.v[j] = A(0);
    }
    store_word(dx + word * V, e, a.n, pack<In>(r));
  }
}

// ---- one row over a team of blocks --------------------------------------------------------------------------------------
//
// The grid is resident as a whole (a cooperative launch) and divided into teams; a team takes every teams-th row. Row r goes
// through a block in stages, of which each step of its loop does one for different rows: the slice of row r + kAhead is
// requested from memory, that of row r is reduced and its partial published, and row r - kBehind, whose sum has arrived
// by then, is written out. So memory is never idle while a row waits for its reduction. A thread reads back from shared
// memory only what it requested itself: there is one barrier a step. The last warp does nothing but talk to the other blocks:
// under full load a look-up takes microseconds, which are spent while the others compute.
//
// Requests in flight past what memory needs only lengthen the queue that those look-ups stand in: kAhead is small.

constexpr int kTeamThreads = 256;  // that hold words; the talking warp comes on top
constexpr int kTeamBlocks = 2;     // resident on an SM
constexpr int kTeamBytes = 16384;  // of one row that a block holds, of all operands together
constexpr int kAhead = 2;
constexpr int kBehind = 4;
constexpr int kStages = kAhead + kBehind + 1;
constexpr int kTeamShared = kStages * kTeamBytes;
constexpr int kLookUps = 9;  // partials a lane of the talking warp reads, together
constexpr int kTeamMembers = 32 * kLookUps;
constexpr unsigned long long kUnpublished = ~0ull;  // no partial: maxima and sums that are NaN are the canonical one

__device__ __forceinline__ void copy_async(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(shared))), "l"(global)
               : "memory");
}

__device__ __forceinline__ unsigned long long await(const volatile unsigned long long* slot) {
  unsigned long long word;
  do word = *slot;
  while (word == kUnpublished);
  return word;
}

template <typename Partial>
__device__ __forceinline__ void publish(unsigned long long* slot, const Partial& p) {
  unsigned long long word;
  memcpy(&word, &p, sizeof(p));
  *const_cast<volatile unsigned long long*>(slot) = word;
}

// All partials of one row, by a whole warp.
template <typename Row>
__device__ __forceinline__ typename Row::Partial gather_partials(const volatile unsigned long long* slots, int members) {
  using Partial = typename Row::Partial;
  const int lane = threadIdx.x & 31;
  unsigned long long word[kLookUps];
#pragma unroll
  for (int k = 0; k < kLookUps; ++k) word[k] = lane + 32 * k < members ? slots[lane + 32 * k] : 0;
  Partial all = Row::nothing();
#pragma unroll
  for (int k = 0; k < kLookUps; ++k) {
    if (lane + 32 * k >= members) continue;
    if (word[k] == kUnpublished) word[k] = await(slots + lane + 32 * k);
    Partial one;
    memcpy(&one, &word[k], sizeof(one));
    all = Row::combine(all, one);
  }
  return Row::combine_lanes(all);
}

// The loop above, for any reduction whose partial is 8 bytes. `Row` gives what differs between forward and backward:
// request(row, stage), reduce(row, stage) -> the partial of this warp, how partials combine, and finish(row, stage, total).
template <typename Row>
__device__ __forceinline__ void team_loop(Row& self, int64_t rows, int teams, int members, unsigned long long* board) {
  using Partial = typename Row::Partial;
  static_assert(sizeof(Partial) == sizeof(unsigned long long));
  constexpr int kWarps = kTeamThreads / 32;
  __shared__ Partial partials[2][kWarps];
  __shared__ Partial totals[2];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int team = blockIdx.x / members, member = blockIdx.x % members;
  const int count = static_cast<int>((rows - team + teams - 1) / teams);  // there are no more teams than rows

  if (warp == kWarps) {
    // The members of a row take turns in adding its partials up for all of them: if each did, the look-ups would be
    // members² a row. It is done two steps after the row was reduced, and asked for another two steps later.
    const auto slots = [&](int i) { return board + (team + static_cast<int64_t>(i) * teams) * (members + 1); };
    constexpr int kGather = 2;
    for (int i = 0, turn = 0; i < count + kBehind; ++i) {
      const int gathered = i - kGather, done = i - kBehind;
      if (gathered >= 0 && gathered < count) {
        if (turn == member) {
          const Partial total = gather_partials<Row>(slots(gathered), members);
          if (lane == 0) publish(slots(gathered) + members, total);
        }
        turn = turn + 1 == members ? 0 : turn + 1;
      }
      if (done >= 0 && lane == 0) {
        const unsigned long long word = await(slots(done) + members);
        memcpy(&totals[i & 1], &word, sizeof(word));
      }
      __syncthreads();
      if (i < count) {
        const Partial p = Row::combine_lanes(lane < kWarps ? partials[i & 1][lane] : Row::nothing());
        if (lane == 0) publish(slots(i) + member, p);
      }
    }
    return;
  }

  // The row and the stage of each of the three things that a step does.
  struct Cursor {
    int64_t row;
    int stage = 0;
    __device__ void advance(int by) {
      row += by;
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
  };
  Cursor ahead{team}, here{team}, behind{team};
  for (int i = 0; i < kAhead; ++i) {
    if (i < count) self.request(ahead.row, ahead.stage);
    ahead.advance(teams);
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  for (int i = 0; i < count + kBehind; ++i) {
    if (i + kAhead < count) self.request(ahead.row, ahead.stage);
    ahead.advance(teams);
    asm volatile("cp.async.commit_group;" ::: "memory");
    if (i < count) {
      asm volatile("cp.async.wait_group %0;" ::"n"(kAhead) : "memory");
      const Partial p = self.reduce(here.row, here.stage);
      if (lane == 0) partials[i & 1][warp] = p;
      here.advance(teams);
    }
    __syncthreads();
    if (i >= kBehind) {
      self.finish(behind.row, behind.stage, totals[i & 1]);
      behind.advance(teams);
    }
  }
}

// The words of every row that this thread owns in its block of the team, at most W, kTeamThreads apart.
template <int V, int W, bool RAGGED>
struct Slice {
  int n;  // 32 bits do: what a team holds is at most some megabytes
  int first, count;

  __device__ Slice(int64_t n_, int64_t words, int members) : n(static_cast<int>(n_)) {
    const int each = static_cast<int>((words + members - 1) / members);
    const int begin = static_cast<int>(blockIdx.x % members) * each;
    const int end = min(begin + each, static_cast<int>(words));
    first = begin + static_cast<int>(threadIdx.x);
    count = first < end ? (end - first + kTeamThreads - 1) / kTeamThreads : 0;
  }

  // Calls f(i, e) for each word of this thread: the i-th of its own, which begins with element e of the row. In a ragged row
  // that may be before the row, and the word may reach past it.
  template <typename F>
  __device__ __forceinline__ void for_words(int64_t row, F&& f) const {
    const int head = RAGGED ? static_cast<int>((row * n) & (V - 1)) : 0;
#pragma unroll
    for (int i = 0; i < W; ++i) {
      const int e = (first + i * kTeamThreads) * V - head;
      if (i < count && (!RAGGED || e < n)) f(i, e);
    }
  }
  template <typename T>
  __device__ __forceinline__ void store(T* row, int e, const Vec<T, V>& w) const {
    if constexpr (RAGGED) store_word(row + e, e, n, w);
    else store_vec<T, V>(row + e, w);
  }
  // Overwrites what a word at e holds of the neighbouring rows.
  template <typename T>
  __device__ __forceinline__ void blank_neighbours(Vec<T, V>& v, int e, T value) const {
    if (RAGGED && (e < 0 || e + V > n)) {
#pragma unroll
      for (int j = 0; j < V; ++j)
        if (e + j < 0 || e + j >= n) v.v[j] = value;
    }
  }
};

template <typename In, typename Out, bool LOG, bool RAGGED>
struct TeamForward {
  using Partial = Pair<float>;
  static constexpr int V = kVectorBytes / sizeof(In);
  static constexpr bool FAST = sizeof(Out) == 2;
  static constexpr int W = kTeamBytes / kVectorBytes / kTeamThreads;
  const ForwardArgs<float>& a;
  Slice<V, W, RAGGED> slice;
  Vec<In, V>* shared;  // of this thread

  __device__ static Partial nothing() { return {minus_infinity<float>(), 0.f}; }
  __device__ static Partial combine(Partial p, Partial q) { return merge<FAST>(p, q); }
  __device__ static Partial combine_lanes(Partial p) { return lanes_merge<FAST>(p, 32); }
  __device__ Vec<In, V>& at(int stage, int i) const { return shared[(stage * W + i) * kTeamThreads]; }

  __device__ void request(int64_t row, int stage) const {
    const In* x = static_cast<const In*>(a.x) + row * a.row_stride;
    slice.for_words(row, [&](int i, int e) { copy_async(&at(stage, i), x + e); });
  }
  // As in the row kernel: negated where the scale is negative, so that the largest value has the largest score.
  __device__ Vec<In, V> values(int stage, int i, int e) const {
    Vec<In, V> v = at(stage, i);
    if (a.scale < 0.f) v = negated(v);
    slice.blank_neighbours(v, e, convert<In>(minus_infinity<float>()));
    return v;
  }
  __device__ Partial reduce(int64_t row, int stage) const {
    Vec<In, V> held[W];
#pragma unroll
    for (int i = 0; i < W; ++i) held[i] = filled<In, V>(convert<In>(minus_infinity<float>()));
    slice.for_words(row, [&](int i, int e) { held[i] = values(stage, i, e); });
    const float scale = fabsf(a.scale);
    const float m = lanes_max(convert<float>(largest(held)) * scale, 32), base = finite_or_zero(m);
    float s = 0;
#pragma unroll
    for (int i = 0; i < W; ++i) {
      Vec<float, V> v = unpack<float>(held[i]);
#pragma unroll
      for (int j = 0; j < V; ++j) v.v[j] = exponential<FAST>(v.v[j] * scale - base);
      s += tree_sum(v);
    }
    return {m, lanes_sum(s, 32)};
  }
  __device__ void finish(int64_t row, int stage, Partial total) const {
    Out* y = static_cast<Out*>(a.y) + row * a.n;
    const float scale = fabsf(a.scale);
    const Finish<float, LOG, FAST> last(total);
    slice.for_words(row, [&](int i, int e) {
      Vec<float, V> v = unpack<float>(values(stage, i, e));
#pragma unroll
      for (int j = 0; j < V; ++j) v.v[j] = last(v.v[j] * scale - total.m);
      slice.store(y, e, pack<Out>(v));
    });
  }
};

template <typename In, typename Out, bool LOG, bool RAGGED>
__global__ void __launch_bounds__(kTeamThreads + 32, kTeamBlocks)
    softmax_forward_team(const ForwardArgs<float> a, int64_t words, int teams, int members, unsigned long long* board) {
  extern __shared__ __align__(16) char memory[];
  using Row = TeamForward<In, Out, LOG, RAGGED>;
  Row row{a, {a.n, words, members}, reinterpret_cast<Vec<In, Row::V>*>(memory) + threadIdx.x};
  team_loop<Row>(row, a.rows, teams, members, board);
}

template <typename In, typename Out, bool LOG, bool RAGGED>
struct TeamBackward {
  struct Partial {
    float sum, unused;  // 8 bytes, as the forward's, and never those of kUnpublished
  };
  static constexpr int V = kVectorBytes / sizeof(Out);
  static constexpr int W = kTeamBytes / (2 * kVectorBytes) / kTeamThreads;
  const BackwardArgs<float>& a;
  Slice<V, W, RAGGED> slice;
  Vec<Out, V>* shared;  // of this thread

  __device__ static Partial nothing() { return {0.f, 0.f}; }
  __device__ static Partial combine(Partial p, Partial q) { return {p.sum + q.sum, 0.f}; }
  __device__ static Partial combine_lanes(Partial p) { return {lanes_sum(p.sum, 32), 0.f}; }
  __device__ Vec<Out, V>& at(int stage, int operand, int i) const { return shared[((stage * 2 + operand) * W + i) * kTeamThreads]; }

  __device__ void request(int64_t row, int stage) const {
    const Out* dy = static_cast<const Out*>(a.dy) + row * a.n;
    const Out* y = static_cast<const Out*>(a.y) + row * a.n;
    slice.for_words(row, [&](int i, int e) {
      copy_async(&at(stage, 0, i), dy + e);
      copy_async(&at(stage, 1, i), y + e);
    });
  }
  __device__ Partial reduce(int64_t row, int stage) const {
    float s = 0;
    slice.for_words(row, [&](int i, int e) {
      Vec<float, V> terms = sum_terms<LOG, float>(at(stage, 0, i), at(stage, 1, i));
      slice.blank_neighbours(terms, e, 0.f);
      s += tree_sum(terms);
    });
    return {lanes_sum(s, 32), 0.f};
  }
  __device__ void finish(int64_t row, int stage, Partial total) const {
    In* dx = static_cast<In*>(a.dx) + row * a.n;
    slice.for_words(row, [&](int i, int e) {
      const Vec<float, V> r =
          score_gradient<LOG, sizeof(In) == 2, float>(at(stage, 0, i), at(stage, 1, i), total.sum, a.scale);
      slice.store(dx, e, pack<In>(r));
    });
  }
};

template <typename In, typename Out, bool LOG, bool RAGGED>
__global__ void __launch_bounds__(kTeamThreads + 32, kTeamBlocks)
    softmax_backward_team(const BackwardArgs<float> a, int64_t words, int teams, int members, unsigned long long* board) {
  extern __shared__ __align__(16) char memory[];
  using Row = TeamBackward<In, Out, LOG, RAGGED>;
  Row row{a, {a.n, words, members}, reinterpret_cast<Vec<Out, Row::V>*>(memory) + threadIdx.x};
  team_loop<Row>(row, a.rows, teams, members, board);
}

// ---- columns ------------------------------------------------------------------------------------------------------------

constexpr int kColumnThreads = 256;

struct ColumnArgs {
  const void* x;   // forward: x. backward: dy
  const void* y;   // backward: y
  void* out;
  int64_t n, inner;
  int across, down;  // threads over the columns, and down them; their product is at most kColumnThreads
  double scale;
};

// Merges the values of the threads of one column group with `combine`, into those of every thread of it.
template <typename T, int V, typename Combine>
__device__ __forceinline__ void merge_down(T (&value)[V], T* shared, const ColumnArgs& a, Combine&& combine) {
  if (a.down == 1) return;
  const int x = threadIdx.x % a.across, y = threadIdx.x / a.across;
#pragma unroll
  for (int j = 0; j < V; ++j) shared[(y * V + j) * a.across + x] = value[j];
  __syncthreads();
#pragma unroll
  for (int j = 0; j < V; ++j) {
    T all = shared[j * a.across + x];
    for (int k = 1; k < a.down; ++k) all = combine(all, shared[(k * V + j) * a.across + x]);
    value[j] = all;
  }
}

template <typename In, typename Out, int V, bool LOG>
__global__ void __launch_bounds__(kColumnThreads) softmax_forward_columns(const ColumnArgs a) {
  using A = compute_t<In>;
  constexpr bool FAST = sizeof(Out) == 2;
  extern __shared__ char memory[];
  const int64_t tiles = (a.inner + static_cast<int64_t>(a.across) * V - 1) / (static_cast<int64_t>(a.across) * V);
  const int64_t outer = blockIdx.x / tiles;
  const int64_t column = ((blockIdx.x % tiles) * a.across + threadIdx.x % a.across) * V;
  const int first = threadIdx.x / a.across;
  const bool active = column < a.inner;
  const int64_t base = outer * a.n * a.inner + column;
  const In* __restrict__ x = static_cast<const In*>(a.x) + base;
  const A scale = static_cast<A>(a.scale);

  Pair<A> p[V];
#pragma unroll
  for (int j = 0; j < V; ++j) p[j] = {minus_infinity<A>(), A(0)};
  if (active) {
#pragma unroll 4
    for (int64_t i = first; i < a.n; i += a.down) {
      const Vec<In, V> w = load_vec<In, V>(x + i * a.inner);
#pragma unroll
      for (int j = 0; j < V; ++j) p[j] = extend<FAST>(p[j], Vec<A, 1>{{convert<A>(w.v[j]) * scale}});
    }
  }
  merge_down(p, reinterpret_cast<Pair<A>*>(memory), a, [](Pair<A> u, Pair<A> v) { return merge<FAST>(u, v); });
  if (!active) return;
  Out* __restrict__ y = static_cast<Out*>(a.out) + base;
  A last[V];
#pragma unroll
  for (int j = 0; j < V; ++j) last[j] = Finish<A, LOG, FAST>(p[j]).last;
#pragma unroll 4
  for (int64_t i = first; i < a.n; i += a.down) {
    const Vec<In, V> w = load_vec<In, V>(x + i * a.inner);
    Vec<Out, V> r;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      r.v[j] = convert<Out>(Finish<A, LOG, FAST>(p[j].s, last[j])(convert<A>(w.v[j]) * scale - p[j].m));
    }
    store_vec<Out, V>(y + i * a.inner, r);
  }
}

template <typename In, typename Out, int V, bool LOG>
__global__ void __launch_bounds__(kColumnThreads) softmax_backward_columns(const ColumnArgs a) {
  using A = compute_t<In>;
  extern __shared__ char memory[];
  const int64_t tiles = (a.inner + static_cast<int64_t>(a.across) * V - 1) / (static_cast<int64_t>(a.across) * V);
  const int64_t outer = blockIdx.x / tiles;
  const int64_t column = ((blockIdx.x % tiles) * a.across + threadIdx.x % a.across) * V;
  const int first = threadIdx.x / a.across;
  const bool active = column < a.inner;
  const int64_t base = outer * a.n * a.inner + column;
  const Out* __restrict__ dy = static_cast<const Out*>(a.x) + base;
  const Out* __restrict__ y = static_cast<const Out*>(a.y) + base;

  A s[V] = {};
  if (active) {
#pragma unroll 4
    for (int64_t i = first; i < a.n; i += a.down) {
      const Vec<Out, V> g = load_vec<Out, V>(dy + i * a.inner);
      const Vec<Out, V> p = LOG ? g : load_vec<Out, V>(y + i * a.inner);  // log_softmax does not look at y here
      const Vec<A, V> terms = sum_terms<LOG, A>(g, p);
#pragma unroll
      for (int j = 0; j < V; ++j) s[j] += terms.v[j];
    }
  }
  merge_down(s, reinterpret_cast<A*>(memory), a, [](A u, A v) { return u + v; });
  if (!active) return;
  In* __restrict__ dx = static_cast<In*>(a.out) + base;
  const A scale = static_cast<A>(a.scale);
#pragma unroll 4
  for (int64_t i = first; i < a.n; i += a.down) {
    const Vec<Out, V> g = load_vec<Out, V>(dy + i * a.inner), p = load_vec<Out, V>(y + i * a.inner);
    const Vec<A, V> ga = unpack<A>(g), pa = unpack<A>(p);
    Vec<A, V> r;
#pragma unroll
    for (int j = 0; j < V; ++j)
      r.v[j] = score_gradient<LOG, sizeof(In) == 2, A>(Vec<A, 1>{{ga.v[j]}}, Vec<A, 1>{{pa.v[j]}}, s[j], scale).v[0];
    store_vec<In, V>(dx + i * a.inner, pack<In>(r));
  }
}

// ---- launch rules -------------------------------------------------------------------------------------------------------

// How a row of `words` 16-byte words is shared out.
struct RowLaunch {
  int threads;  // of a block that share the row
  int block;    // threads of a block
  int words;    // held by each thread
  int cluster;  // blocks that share the row
  bool split;   // the row is too long for all that
};

// `most`: words that a thread can hold (its registers). More words in flight hide more latency, more threads a row cost
// more exchange: a short row wants few words a thread so that enough blocks are resident, a long one as many as fit. From a
// warp on, a row gets just the warps that it fills. `wide`: rows up to 4 words in each of 1024 threads go to one block.
RowLaunch row_launch(int64_t words, int most, bool ragged, bool wide, int capability) {
  const int target = std::min(most, words <= 32 ? 1 : words <= 128 ? 2 : words <= 1024 ? 4 : most);
  RowLaunch launch{};
  launch.cluster = 1;
  int64_t threads = ceil_div(words, target);
  if (wide && threads > kRowThreads && words <= 4 * kWideThreads) threads = ceil_div(words, 4);
  else if (threads > kRowThreads && capability >= 90) {
    launch.cluster = static_cast<int>(std::min<int64_t>(kMaxCluster, next_power_of_2(ceil_div(threads, kRowThreads))));
    threads = ceil_div(threads, launch.cluster);
  }
  if (ragged) threads = std::max<int64_t>(threads, 16);  // up to 14 single elements, one a thread
  threads = threads <= 32 && launch.cluster == 1 ? next_power_of_2(threads) : ceil_div(threads, 32) * 32;
  launch.split = threads > (wide && launch.cluster == 1 && words <= 4 * kWideThreads ? kWideThreads : kRowThreads);
  launch.threads = static_cast<int>(std::min<int64_t>(threads, kWideThreads));
  launch.block = launch.threads <= 32 ? 128 : launch.threads;
  launch.words = static_cast<int>(next_power_of_2(std::max<int64_t>(1, ceil_div(words, static_cast<int64_t>(launch.threads) * launch.cluster))));
  if (launch.cluster > 1) launch.words = most;  // the only cluster kernel that is built
  return launch;
}

// Pieces of a row for the split kernels: at least 4 blocks an SM, but no piece under 4 words a thread.
int split_pieces(int64_t rows, int64_t words, int processors) {
  const int64_t wanted = ceil_div(4 * static_cast<int64_t>(processors), rows);
  const int64_t longest = std::max<int64_t>(1, words / (4 * kSplitThreads));
  return static_cast<int>(std::clamp<int64_t>(wanted, 1, longest));
}

template <typename Kernel, typename... Args>
void launch_rows(Kernel kernel, const RowLaunch& shape, int64_t rows, cudaStream_t stream, const Args&... args) {
  const int64_t blocks = shape.cluster > 1 ? rows * shape.cluster : ceil_div(rows, shape.block / shape.threads);
  STD_TORCH_CHECK(blocks <= INT32_MAX, "fastlayers::softmax: ", rows, " rows are more than one launch takes");
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(shape.block);
  config.stream = stream;
  cudaLaunchAttribute attribute;
  if (shape.cluster > 1) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
    config.attrs = &attribute;
    config.numAttrs = 1;
    if (shape.cluster > 8) STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  }
  STD_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, args...));
}

// Words of a row past which a team takes it. Forward, against clusters on an H100: .86 of the copy bandwidth at 128 KiB a row of
// bfloat16 for .79, .89 and .91 at 256 and 512 KiB of bfloat16 and float32 for .75 and .69. Backward a cluster is ahead as
// long as it can hold a row of float32 (.97 for .94 at 512 KiB), and in 16 bits to 256 KiB (.95 for .93).
constexpr int64_t kTeamForwardPast = 4 * kWideThreads;
template <typename T>
constexpr int64_t kTeamBackwardPast = sizeof(T) == 2 ? 16384 : 32768;

// Launches a team kernel if the blocks that fit the GPU at once can hold a row, `per_block` words each.
template <auto kernel, typename Args>
bool launch_team(const Args& args, int64_t words, int per_block, const Launch& launch, const Tensor& like) {
  static int resident[kMaxDevices];
  const DeviceTraits& device = device_traits(launch.device());
  int& blocks = resident[launch.device()];  // 0: not asked yet; -1: none
  if (blocks == 0) {
    STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kTeamShared));
    int each = 0;
    STD_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, kTeamThreads + 32, kTeamShared));
    blocks = each > 0 ? each * device.processors : -1;
  }
  const int64_t needed = ceil_div(words, per_block);
  if (needed > std::min(blocks, kTeamMembers)) return false;
  const int teams = static_cast<int>(std::min<int64_t>(blocks / needed, args.rows));
  const int members = std::min(blocks / teams, kTeamMembers);
  const int64_t slots_of_board = args.rows * (members + 1);  // the partials of a row, and their sum
  const Tensor board = empty_contiguous({slots_of_board}, ScalarType::Long, like);
  auto* slots = static_cast<unsigned long long*>(board.mutable_data_ptr());
  STD_CUDA_CHECK(cudaMemsetAsync(slots, 0xff, sizeof(*slots) * slots_of_board, launch.stream()));
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(teams * members));
  config.blockDim = dim3(kTeamThreads + 32);
  config.dynamicSmemBytes = kTeamShared;
  config.stream = launch.stream();
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  STD_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, args, words, teams, members, slots));
  return true;
}

// Calls f(std::integral_constant<int, K>) for the K = 1, 2, 4, 8 words of a launch.
template <typename F>
void with_words(int words, F&& f) {
  switch (words) {
    case 1: return f(std::integral_constant<int, 1>{});
    case 2: return f(std::integral_constant<int, 2>{});
    case 4: return f(std::integral_constant<int, 4>{});
    default: return f(std::integral_constant<int, 8>{});
  }
}

// ---- host ---------------------------------------------------------------------------------------------------------------

struct Shape {
  int64_t outer = 1, n = 1, inner = 1;
};

Shape shape_of(const Tensor& x, int64_t dim, const char* op) {
  const auto sizes = x.sizes();
  STD_TORCH_CHECK(dim >= 0 && dim < static_cast<int64_t>(sizes.size()), "fastlayers::", op, ": dim ", dim,
                  " is out of range for a tensor of ", static_cast<int64_t>(sizes.size()), " dimensions");
  Shape s;
  for (int64_t d = 0; d < static_cast<int64_t>(sizes.size()); ++d) (d < dim ? s.outer : d == dim ? s.n : s.inner) *= sizes[d];
  return s;
}

// Contiguous, of t's shape: torch gives softmax no other layout.
Tensor empty_result(const Tensor& t, ScalarType dtype) {
  const auto sizes = t.sizes();
  if (t.is_contiguous()) return empty_strided(t.dim(), sizes.data(), t.strides().data(), dtype, t);
  return empty_contiguous(dims_of(sizes), dtype, t);
}

// Contiguous and aligned to the vector, by a copy where it is not.
Tensor dense(const Tensor& t) {
  if (!t.is_contiguous()) return torch::stable::contiguous(t);
  return aligned(t.const_data_ptr()) ? t : torch::stable::clone(t);
}

// The one stride between the rows of x (its last dimension being the reduced one), if the kernel can read them in place.
std::optional<int64_t> row_stride(const Tensor& x, int64_t vector) {
  if (x.is_contiguous()) return aligned(x.const_data_ptr()) ? std::optional<int64_t>(x.size(x.dim() - 1)) : std::nullopt;
  const Dims sizes = dims_of(x.sizes()), strides = dims_of(x.strides());
  const int64_t last = static_cast<int64_t>(sizes.size()) - 1;
  if (strides[last] != 1 || !aligned(x.const_data_ptr()) || sizes[last] % vector != 0) return std::nullopt;
  std::optional<int64_t> next;  // the stride that the next dimension must have
  int64_t stride = 0;
  for (int64_t d = last - 1; d >= 0; --d) {
    if (sizes[d] == 1) continue;
    if (next && strides[d] != *next) return std::nullopt;
    if (!next) stride = strides[d];
    next = strides[d] * sizes[d];
  }
  return stride % vector == 0 ? std::optional<int64_t>(stride) : std::nullopt;
}

// `keep` holds the copy that a mask of too intricate a broadcast is written out to.
Mask make_mask(const Tensor& mask, const Dims& sizes, ScalarType x_dtype, const char* op, Tensor& keep) {
  Mask m;
  const ScalarType dtype = mask.scalar_type();
  m.data = mask.const_data_ptr();
  m.kind = dtype == ScalarType::Bool ? MaskKind::boolean
           : dtype == x_dtype        ? MaskKind::same_dtype
           : dtype == ScalarType::Float && x_dtype != ScalarType::Double ? MaskKind::float32
                                     : MaskKind::none;
  STD_TORCH_CHECK(m.kind != MaskKind::none, "fastlayers::", op, ": expected a mask of bool, float32 or x's dtype ",
                  torch::headeronly::toString(x_dtype), ", but got ", torch::headeronly::toString(dtype));
  const Dims strides = broadcast_strides(mask, sizes, op, "mask");
  const int64_t last = static_cast<int64_t>(sizes.size()) - 1;
  m.step = strides[last];
  for (int64_t d = 0; d < last; ++d) {
    if (sizes[d] == 1) continue;
    if (m.dims > 0 && m.stride[m.dims - 1] == strides[d] * sizes[d]) {
      m.size[m.dims - 1] *= sizes[d];
    } else if (m.dims < kMaskDims) {
      m.size[m.dims++] = sizes[d];
    } else {
      keep = empty_contiguous(sizes, dtype, mask);
      torch::stable::copy_(keep, mask);
      return make_mask(keep, sizes, x_dtype, op, keep);
    }
    m.stride[m.dims - 1] = strides[d];
  }
  return m;
}

// Calls f(In{}, Out{}) for the pairs of dtypes that are built: the same twice, or 16 bits in and float32 out.
template <typename F>
void dispatch_pair(ScalarType in, ScalarType out, const char* op, F&& f) {
  dispatch_floating(in, op, [&](auto x) {
    using In = decltype(x);
    if (in == out) return f(In{}, In{});
    if constexpr (sizeof(In) == 2) {
      if (out == ScalarType::Float) return f(In{}, float{});
    }
    STD_TORCH_CHECK(false, "fastlayers::", op, ": no kernel from ", torch::headeronly::toString(in), " to ",
                    torch::headeronly::toString(out));
  });
}

template <typename In, typename Out, bool LOG, bool MASKED>
void forward_rows(ForwardArgs<compute_t<In>>& args, const Launch& launch, const Tensor& like) {
  using A = compute_t<In>;
  constexpr int V = kVectorBytes / sizeof(In);
  constexpr int kMost = MASKED && sizeof(In) == 2 ? 4 : 8;  // a masked row is held in float32
  const DeviceTraits& device = device_traits(launch.device());
  args.ragged = args.n % V != 0;
  const int64_t words = ceil_div(args.n + (args.ragged ? V - 1 : 0), V);
  const RowLaunch shape = row_launch(args.n / V, kMost, args.ragged, !MASKED && kMost == 8, device.capability);
  args.lanes = shape.threads;
  args.lane_bits = log2_of(shape.threads);
  if constexpr (!MASKED && std::is_same_v<A, float>) {
    if (args.n / V > kTeamForwardPast) {
      constexpr int kHeld = TeamForward<In, Out, LOG, false>::W * kTeamThreads;
      if (args.ragged ? launch_team<softmax_forward_team<In, Out, LOG, true>>(args, words, kHeld, launch, like)
                      : launch_team<softmax_forward_team<In, Out, LOG, false>>(args, words, kHeld, launch, like))
        return;
    }
  }
  if (shape.split) {
    const int pieces = split_pieces(args.rows, words, device.processors);
    const Tensor partial = empty_contiguous({args.rows * pieces * 2}, sizeof(A) == 8 ? ScalarType::Double : ScalarType::Float, like);
    auto* pairs = static_cast<Pair<A>*>(partial.mutable_data_ptr());
    const dim3 grid(static_cast<unsigned>(args.rows * pieces));
    softmax_forward_split_reduce<In, Out, MASKED><<<grid, kSplitThreads, 0, launch.stream()>>>(args, pieces, pairs);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
    softmax_forward_split_apply<In, Out, LOG, MASKED><<<grid, kSplitThreads, 0, launch.stream()>>>(args, pieces, pairs);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  } else if (shape.cluster > 1) {
    launch_rows(softmax_forward_rows<In, Out, kMost, LOG, MASKED, true>, shape, args.rows, launch.stream(), args);
  } else {
    with_words(shape.words, [&](auto k) {
      if constexpr (k.value <= kMost)
        launch_rows(softmax_forward_rows<In, Out, k.value, LOG, MASKED, false>, shape, args.rows, launch.stream(), args);
    });
  }
}

template <typename In, typename Out, bool LOG, bool MASKED>
void backward_rows(BackwardArgs<compute_t<In>>& args, const Launch& launch, const Tensor& like) {
  using A = compute_t<In>;
  constexpr int V = kVectorBytes / sizeof(In);
  constexpr int kMost = sizeof(In) == sizeof(Out) ? 8 : 4;
  const DeviceTraits& device = device_traits(launch.device());
  args.ragged = args.n % V != 0;
  const int64_t words = ceil_div(args.n + (args.ragged ? V - 1 : 0), V);
  const RowLaunch shape = row_launch(args.n / V, kMost, args.ragged, false, device.capability);
  args.lanes = shape.threads;
  args.lane_bits = log2_of(shape.threads);
  if constexpr (!MASKED && std::is_same_v<A, float>) {
    if (args.n / V > kTeamBackwardPast<Out>) {
      using Row = TeamBackward<In, Out, LOG, false>;
      constexpr int kHeld = Row::W * kTeamThreads;
      const bool team_ragged = args.n % Row::V != 0;
      const int64_t team_words = ceil_div(args.n + (team_ragged ? Row::V - 1 : 0), Row::V);
      if (team_ragged ? launch_team<softmax_backward_team<In, Out, LOG, true>>(args, team_words, kHeld, launch, like)
                      : launch_team<softmax_backward_team<In, Out, LOG, false>>(args, team_words, kHeld, launch, like))
        return;
    }
  }
  if (shape.split) {
    const int pieces = split_pieces(args.rows, words, device.processors);
    const Tensor partial = empty_contiguous({args.rows * pieces}, sizeof(A) == 8 ? ScalarType::Double : ScalarType::Float, like);
    auto* sums = static_cast<A*>(partial.mutable_data_ptr());
    const dim3 grid(static_cast<unsigned>(args.rows * pieces));
    softmax_backward_split_reduce<In, Out, LOG><<<grid, kSplitThreads, 0, launch.stream()>>>(args, pieces, sums);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
    softmax_backward_split_apply<In, Out, LOG><<<grid, kSplitThreads, 0, launch.stream()>>>(args, pieces, sums);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  } else if (shape.cluster > 1) {
    launch_rows(softmax_backward_rows<In, Out, kMost, LOG, MASKED, true>, shape, args.rows, launch.stream(), args);
  } else {
    with_words(shape.words, [&](auto k) {
      if constexpr (k.value <= kMost)
        launch_rows(softmax_backward_rows<In, Out, k.value, LOG, MASKED, false>, shape, args.rows, launch.stream(), args);
    });
  }
}

// Vector of the columns kernels where the columns allow it, with the threads of a block laid out over them.
struct ColumnLaunch {
  int vector, across, down;
  int64_t blocks;
};

ColumnLaunch column_launch(const Shape& s, int vector) {
  ColumnLaunch launch;
  launch.vector = s.inner % vector == 0 ? vector : 1;
  const int64_t columns = ceil_div(s.inner, launch.vector);
  // About 16 elements of a column to a thread; the rest of the block goes over neighbouring columns.
  launch.down = static_cast<int>(std::min<int64_t>(16, next_power_of_2(ceil_div(s.n, 16))));
  launch.across = static_cast<int>(std::min<int64_t>(kColumnThreads / launch.down, next_power_of_2(columns)));
  launch.down = static_cast<int>(std::min<int64_t>(kColumnThreads / launch.across, next_power_of_2(s.n)));
  launch.blocks = s.outer * ceil_div(columns, launch.across);
  STD_TORCH_CHECK(launch.blocks <= INT32_MAX, "fastlayers::softmax: a shape of ", s.outer, " x ", s.n, " x ", s.inner,
                  " needs more blocks than one launch takes");
  return launch;
}

template <bool LOG>
Tensor forward_op(const Tensor& x_in, const std::optional<Tensor>& mask, int64_t dim, double scale, ScalarType dtype) {
  const char* op = LOG ? "log_softmax" : "softmax";
  const Shape s = shape_of(x_in, dim, op);
  const Launch launch(x_in);
  Tensor y = empty_result(x_in, dtype);
  if (s.outer * s.n * s.inner == 0) return y;
  if (s.inner == 1 && dim + 1 == x_in.dim()) {
    dispatch_pair(x_in.scalar_type(), dtype, op, [&](auto in, auto out) {
      using In = decltype(in);
      using Out = decltype(out);
      const std::optional<int64_t> stride = row_stride(x_in, kVectorBytes / sizeof(In));
      const Tensor x = stride ? x_in : dense(x_in);
      using A = compute_t<In>;
      ForwardArgs<A> args{x.const_data_ptr(), y.mutable_data_ptr(), s.outer, s.n, stride.value_or(s.n), static_cast<A>(scale), 0, 0, false, {}};
      if (mask) {
        Tensor keep;
        args.mask = make_mask(*mask, dims_of(x.sizes()), x.scalar_type(), op, keep);
        forward_rows<In, Out, LOG, true>(args, launch, x);
      } else {
        forward_rows<In, Out, LOG, false>(args, launch, x);
      }
    });
    return y;
  }
  STD_TORCH_CHECK(!mask, "fastlayers::", op, ": a mask is served over the last dimension only, and dim is ", dim, " of ",
                  x_in.dim());
  const Tensor x = dense(x_in);
  dispatch_pair(x.scalar_type(), dtype, op, [&](auto in, auto out) {
    using In = decltype(in);
    using Out = decltype(out);
    using A = compute_t<In>;
    const ColumnLaunch shape = column_launch(s, kVectorBytes / sizeof(In));
    const ColumnArgs args{x.const_data_ptr(), nullptr, y.mutable_data_ptr(), s.n, s.inner, shape.across, shape.down, scale};
    const int threads = shape.across * shape.down;
    const size_t shared = shape.down == 1 ? 0 : sizeof(Pair<A>) * threads * shape.vector;
    const dim3 grid(static_cast<unsigned>(shape.blocks));
    if (shape.vector > 1)
      softmax_forward_columns<In, Out, kVectorBytes / sizeof(In), LOG><<<grid, threads, shared, launch.stream()>>>(args);
    else
      softmax_forward_columns<In, Out, 1, LOG><<<grid, threads, shared, launch.stream()>>>(args);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return y;
}

template <bool LOG>
Tensor backward_op(const Tensor& dy_in, const Tensor& y_in, const std::optional<Tensor>& mask, int64_t dim, double scale,
                   ScalarType dtype) {
  const char* op = LOG ? "log_softmax_backward" : "softmax_backward";
  check_same_shape(y_in, dy_in, op, "dy");
  const Shape s = shape_of(y_in, dim, op);
  const Launch launch(y_in);
  Tensor dx = empty_result(y_in, dtype);
  if (s.outer * s.n * s.inner == 0) return dx;
  const Tensor dy = dense(dy_in), y = dense(y_in);
  if (s.inner == 1 && dim + 1 == y.dim()) {
    dispatch_pair(dtype, y.scalar_type(), op, [&](auto in, auto out) {
      using A = compute_t<decltype(in)>;
      BackwardArgs<A> args{dy.const_data_ptr(), y.const_data_ptr(), dx.mutable_data_ptr(), s.outer, s.n, static_cast<A>(scale), 0, 0, false, {}};
      if (mask) {
        Tensor keep;
        args.mask = make_mask(*mask, dims_of(y.sizes()), y.scalar_type(), op, keep);
        STD_TORCH_CHECK(args.mask.kind == MaskKind::boolean, "fastlayers::", op, ": expected a boolean mask");
        backward_rows<decltype(in), decltype(out), LOG, true>(args, launch, y);
      } else {
        backward_rows<decltype(in), decltype(out), LOG, false>(args, launch, y);
      }
    });
    return dx;
  }
  STD_TORCH_CHECK(!mask, "fastlayers::", op, ": a mask is served over the last dimension only, and dim is ", dim, " of ", y.dim());
  dispatch_pair(dtype, y.scalar_type(), op, [&](auto in, auto out) {
    using In = decltype(in);
    using Out = decltype(out);
    const ColumnLaunch shape = column_launch(s, kVectorBytes / sizeof(In));
    const ColumnArgs args{dy.const_data_ptr(), y.const_data_ptr(), dx.mutable_data_ptr(), s.n, s.inner,
                          shape.across, shape.down, scale};
    const int threads = shape.across * shape.down;
    const size_t shared = shape.down == 1 ? 0 : sizeof(compute_t<In>) * threads * shape.vector;
    const dim3 grid(static_cast<unsigned>(shape.blocks));
    if (shape.vector > 1)
      softmax_backward_columns<In, Out, kVectorBytes / sizeof(In), LOG><<<grid, threads, shared, launch.stream()>>>(args);
    else
      softmax_backward_columns<In, Out, 1, LOG><<<grid, threads, shared, launch.stream()>>>(args);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return dx;
}

Tensor softmax_forward(const Tensor& x, const std::optional<Tensor>& mask, int64_t dim, double scale, bool log, ScalarType dtype) {
  return log ? forward_op<true>(x, mask, dim, scale, dtype) : forward_op<false>(x, mask, dim, scale, dtype);
}

Tensor softmax_backward(const Tensor& dy, const Tensor& y, const std::optional<Tensor>& mask, int64_t dim, double scale, bool log,
                        ScalarType dtype) {
  return log ? backward_op<true>(dy, y, mask, dim, scale, dtype) : backward_op<false>(dy, y, mask, dim, scale, dtype);
}

}  // namespace
}  // namespace fastlayers

STABLE_TORCH_LIBRARY_IMPL(fastlayers, CUDA, m) {
  m.impl("softmax_forward", TORCH_BOX(&fastlayers::softmax_forward));
  m.impl("softmax_backward", TORCH_BOX(&fastlayers::softmax_backward));
}

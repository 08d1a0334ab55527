// softmax and log_softmax of x·scale + mask over any dimension, forward and backward.
//
// The stock composition reads and writes the scores once for the scale, once for the mask and two to three times for the
// softmax. Here a row is read once and written once: it stays in registers between the reduction and the result.
//
//   rows    the dimension is contiguous. A power of two of threads holds one row, up to 16 blocks of a cluster (sm_90) for a
//           long one; a short row leaves room for several in a block. Each warp reduces its part to (maximum, sum of
//           exponentials below it), and those pairs cross warps and blocks in one exchange.
//   split   rows too long to hold: two passes, with every row cut into pieces so that few rows still fill the GPU.
//   columns the dimension is strided: a thread owns neighbouring columns and walks down them.
//
// A row whose length is not a multiple of the vector starts anywhere in a 16-byte word. All tensors being contiguous and
// aligned, element i of each lies at the same place in its word, so a row is processed in the words that cover it, and what
// belongs to its neighbours is ignored.
#include <cooperative_groups.h>

#include "device.cuh"

namespace fastlayers {
namespace {

namespace cg = cooperative_groups;

constexpr int kRowThreads = 256;   // most threads of a block: several fit an SM, so that their phases overlap
constexpr int kMaxCluster = 16;    // 8 is portable; 16 fits a GPC of every sm_90 part
constexpr int kMaxWarps = 16;
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
      offset += row % size[d] * stride[d];
      row /= size[d];
    }
    return offset;
  }
};

struct ForwardArgs {
  const void* x;
  void* y;
  int64_t rows, n, row_stride;
  int threads;  // of one block that share a row
  bool ragged;  // n is no multiple of the vector
  bool log;
  double scale;
  Mask mask;
};

struct BackwardArgs {
  const void* dy;
  const void* y;
  void* dx;
  int64_t rows, n;
  int threads;
  bool ragged;
  bool log;
  double scale;
  Mask mask;  // boolean only: an additive one does not change the formula
};

// ---- exponentials -------------------------------------------------------------------------------------------------------

// For 16-bit results exponents are kept in units of log2(e), for the hardware's exp2; its error stays far below theirs. For
// wider results the library's exp follows torch.
template <bool FAST, typename A>
__device__ __forceinline__ A exponential(A v) {
  if constexpr (FAST) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
  } else if constexpr (std::is_same_v<A, double>) {
    return exp(v);
  } else {
    return expf(v);
  }
}

template <bool FAST>
__host__ __device__ constexpr double exponent_unit() { return FAST ? 1.4426950408889634 : 1.0; }

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
__device__ __forceinline__ Pair<A> lanes_merge(Pair<A> p, int lanes) {
  const A m = lanes_max(p.m, lanes);
  return {m, lanes_sum(p.s * exponential<FAST>(p.m - finite_or_zero(m)), lanes)};
}

// Brings one value of every warp of a row, over all blocks of its cluster, to every thread of the row: load(i) then gives
// the value of warp i, for i < count(). One barrier.
template <typename T, bool CLUSTER>
struct Exchange {
  T* slots;  // shared, one for each warp of the row (or of the block, where several rows share it)
  int threads;

  __device__ int warps() const { return threads >> 5; }
  __device__ int count() const {
    if constexpr (CLUSTER) return warps() * static_cast<int>(cg::this_cluster().num_blocks());
    else return warps();
  }
  __device__ void arrive() const {  // every block of the cluster has started: its memory may be written
    if constexpr (CLUSTER) cg::this_cluster().barrier_arrive();
  }
  __device__ void publish(T value) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    if constexpr (CLUSTER) {
      auto cluster = cg::this_cluster();
      cluster.barrier_wait();
      if (lane < cluster.num_blocks()) cluster.map_shared_rank(slots, lane)[cluster.block_rank() * warps() + warp] = value;
      cluster.sync();
    } else {
      if (lane == 0) slots[warp] = value;
      __syncthreads();
    }
  }
  __device__ T load(int i) const {
    if constexpr (CLUSTER) return slots[i];
    else return slots[(threadIdx.x / threads) * warps() + i];
  }
};

template <bool FAST, bool CLUSTER, typename A>
__device__ __forceinline__ Pair<A> row_merge(Pair<A> p, Exchange<Pair<A>, CLUSTER>& exchange) {
  if (!CLUSTER && exchange.threads <= 32) return p;
  exchange.publish(p);
  Pair<A> all{minus_infinity<A>(), A(0)};
  for (int i = threadIdx.x & 31; i < exchange.count(); i += 32) {
    const Pair<A> q = exchange.load(i);
    const A m = maximum(all.m, q.m), base = finite_or_zero(m);
    all = {m, all.s * exponential<FAST>(all.m - base) + q.s * exponential<FAST>(q.m - base)};
  }
  return lanes_merge<FAST>(all, 32);
}

template <bool CLUSTER, typename A>
__device__ __forceinline__ A row_sum(A s, Exchange<A, CLUSTER>& exchange) {
  if (!CLUSTER && exchange.threads <= 32) return s;
  exchange.publish(s);
  A all(0);
  for (int i = threadIdx.x & 31; i < exchange.count(); i += 32) all += exchange.load(i);
  return lanes_sum(all, 32);
}

// ---- one row in registers -----------------------------------------------------------------------------------------------

// Where a thread stands: its row, and the first of the words of the row that it owns (the others follow at `stride`).
struct Place {
  int64_t row;
  int n;        // 32 bits do: a row that fits in registers is short
  int head;     // elements of the first word that belong to the row before
  int first, stride;
  bool active;

  __device__ int word(int i) const { return first + i * stride; }

  template <int K, int V, bool CLUSTER, typename Args>
  __device__ static Place find(const Args& a) {
    Place p;
    const int lane = threadIdx.x & (a.threads - 1);
    if constexpr (CLUSTER) {
      auto cluster = cg::this_cluster();
      p.row = blockIdx.x / cluster.num_blocks();
      p.first = static_cast<int>(cluster.block_rank()) * K * a.threads + lane;
    } else {
      p.row = static_cast<int64_t>(blockIdx.x) * (blockDim.x / a.threads) + threadIdx.x / a.threads;
      p.first = lane;
    }
    p.n = static_cast<int>(a.n);
    p.stride = a.threads;
    p.active = p.row < a.rows;
    p.head = a.ragged ? static_cast<int>((p.row * a.n) & (V - 1)) : 0;
    return p;
  }
};

template <typename In, typename A, int V>
__device__ __forceinline__ void apply_mask(Vec<A, V>& v, const Mask& mask, int64_t offset, int64_t e, int64_t n, A unit) {
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const int64_t at = e + j;
    if (at < 0 || at >= n) continue;
    const int64_t i = offset + at * mask.step;
    if (mask.kind == MaskKind::boolean) {
      if (!static_cast<const bool*>(mask.data)[i]) v.v[j] = minus_infinity<A>();
    } else if (mask.kind == MaskKind::float32) {
      v.v[j] += static_cast<A>(static_cast<const float*>(mask.data)[i]) * unit;
    } else {
      v.v[j] += convert<A>(static_cast<const In*>(mask.data)[i]) * unit;
    }
  }
}

template <typename In, typename Out, int K, bool MASKED, bool CLUSTER>
__global__ void __launch_bounds__(kRowThreads, 3) softmax_forward_rows(const ForwardArgs a) {
  using A = compute_t<In>;
  constexpr int V = kVectorBytes / sizeof(In);
  constexpr bool FAST = sizeof(Out) == 2;
  using Held = std::conditional_t<MASKED, A, In>;
  __shared__ Pair<A> slots[CLUSTER ? kMaxWarps * kMaxCluster : kMaxWarps];
  Exchange<Pair<A>, CLUSTER> exchange{slots, a.threads};
  exchange.arrive();

  const Place at = Place::find<K, V, CLUSTER>(a);
  const In* x = static_cast<const In*>(a.x) + at.row * a.row_stride - at.head;
  const A unit = static_cast<A>(exponent_unit<FAST>());
  const A factor = static_cast<A>(a.scale) * unit;
  const A none = factor < A(0) && !MASKED ? -minus_infinity<A>() : minus_infinity<A>();  // vanishes once scaled
  const int64_t mask_offset = MASKED && at.active ? a.mask.row_offset(at.row) : 0;

  Vec<Held, V> held[K];
#pragma unroll
  for (int i = 0; i < K; ++i) {
    const int word = at.word(i), e = word * V - at.head;
    if (at.active && e < at.n) {
      const Vec<In, V> w = load_vec<In, V>(x + word * V);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        if constexpr (MASKED) held[i].v[j] = convert<A>(w.v[j]) * factor;
        else held[i].v[j] = w.v[j];
      }
      if constexpr (MASKED) apply_mask<In, A, V>(held[i], a.mask, mask_offset, e, at.n, unit);
      if (a.ragged && (e < 0 || e + V > at.n)) {
#pragma unroll
        for (int j = 0; j < V; ++j)
          if (e + j < 0 || e + j >= at.n) held[i].v[j] = convert<Held>(none);
      }
    } else {
#pragma unroll
      for (int j = 0; j < V; ++j) held[i].v[j] = convert<Held>(none);
    }
  }

  const auto value = [&](int i, int j) -> A {
    if constexpr (MASKED) return held[i].v[j];
    else return convert<A>(held[i].v[j]) * factor;
  };

  A m = minus_infinity<A>();
#pragma unroll
  for (int i = 0; i < K; ++i)
#pragma unroll
    for (int j = 0; j < V; ++j) m = maximum(m, value(i, j));
  const int lanes = a.threads < 32 ? a.threads : 32;
  m = lanes_max(m, lanes);
#pragma unroll
  for (int i = 0; i < K; ++i) forget(held[i]);
  A s = 0;
  const A base = finite_or_zero(m);
#pragma unroll
  for (int i = 0; i < K; ++i)
#pragma unroll
    for (int j = 0; j < V; ++j) s += exponential<FAST>(value(i, j) - base);
  const Pair<A> row = row_merge<FAST, CLUSTER>(Pair<A>{m, lanes_sum(s, lanes)}, exchange);
#pragma unroll
  for (int i = 0; i < K; ++i) forget(held[i]);

  if (!at.active) return;
  Out* y = static_cast<Out*>(a.y) + at.row * a.n - at.head;
  const A log_s = a.log ? static_cast<A>(log(row.s)) : A(0);
  const A inverse = A(1) / row.s;
#pragma unroll
  for (int i = 0; i < K; ++i) {
    const int word = at.word(i), e = word * V - at.head;
    if (e >= at.n) continue;
    Vec<Out, V> w;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const A t = value(i, j) - row.m;
      if (a.log) w.v[j] = convert<Out>(t / unit - log_s);
      else if constexpr (FAST) w.v[j] = convert<Out>(exponential<FAST>(t) * inverse);
      else w.v[j] = convert<Out>(exponential<FAST>(t) / row.s);
    }
    if (!a.ragged || (e >= 0 && e + V <= at.n)) {
      store_vec<Out, V>(y + word * V, w);
    } else {
#pragma unroll
      for (int j = 0; j < V; ++j)
        if (e + j >= 0 && e + j < at.n) y[word * V + j] = w.v[j];
    }
  }
}

// dx = scale·y·(dy - sum(y·dy)); for log_softmax scale·(dy - exp(y)·sum(dy)). Where a boolean mask is False, 0.
template <typename In, typename Out, int K, bool CLUSTER>
__global__ void __launch_bounds__(kRowThreads, 2) softmax_backward_rows(const BackwardArgs a) {
  using A = compute_t<In>;
  constexpr int V = kVectorBytes / sizeof(In);
  __shared__ A slots[CLUSTER ? kMaxWarps * kMaxCluster : kMaxWarps];
  Exchange<A, CLUSTER> exchange{slots, a.threads};
  exchange.arrive();

  const Place at = Place::find<K, V, CLUSTER>(a);
  const int64_t start = at.row * a.n - at.head;
  const Out* dy = static_cast<const Out*>(a.dy) + start;
  const Out* y = static_cast<const Out*>(a.y) + start;

  Vec<Out, V> g[K], p[K];
#pragma unroll
  for (int i = 0; i < K; ++i) {
    const int word = at.word(i), e = word * V - at.head;
    const bool some = at.active && e < at.n;
    if (some) {
      g[i] = load_vec<Out, V>(dy + word * V);
      p[i] = load_vec<Out, V>(y + word * V);
    }
    if (!some || (a.ragged && (e < 0 || e + V > at.n))) {
#pragma unroll
      for (int j = 0; j < V; ++j)
        if (!some || e + j < 0 || e + j >= at.n) g[i].v[j] = p[i].v[j] = convert<Out>(0.f);
    }
  }

  A s = 0;
#pragma unroll
  for (int i = 0; i < K; ++i)
#pragma unroll
    for (int j = 0; j < V; ++j) s += a.log ? convert<A>(g[i].v[j]) : convert<A>(g[i].v[j]) * convert<A>(p[i].v[j]);
  s = row_sum<CLUSTER>(lanes_sum(s, a.threads < 32 ? a.threads : 32), exchange);

#pragma unroll
  for (int i = 0; i < K; ++i) forget(g[i]), forget(p[i]);

  if (!at.active) return;
  In* dx = static_cast<In*>(a.dx) + start;
  const A scale = static_cast<A>(a.scale);
  const int64_t mask_offset = a.mask.kind == MaskKind::none ? 0 : a.mask.row_offset(at.row);
#pragma unroll
  for (int i = 0; i < K; ++i) {
    const int word = at.word(i), e = word * V - at.head;
    if (e >= at.n) continue;
    Vec<In, V> w;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const A gj = convert<A>(g[i].v[j]), pj = convert<A>(p[i].v[j]);
      w.v[j] = convert<In>(scale * (a.log ? gj - exponential<false>(pj) * s : pj * (gj - s)));
    }
    if (a.mask.kind != MaskKind::none) {
#pragma unroll
      for (int j = 0; j < V; ++j)
        if (e + j >= 0 && e + j < at.n && !static_cast<const bool*>(a.mask.data)[mask_offset + (e + j) * a.mask.step])
          w.v[j] = convert<In>(0.f);
    }
    if (!a.ragged || (e >= 0 && e + V <= at.n)) {
      store_vec<In, V>(dx + word * V, w);
    } else {
#pragma unroll
      for (int j = 0; j < V; ++j)
        if (e + j >= 0 && e + j < at.n) dx[word * V + j] = w.v[j];
    }
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
  const ForwardArgs& a;
  const In* x;
  int head;
  int64_t mask_offset;
  A unit, factor;

  __device__ RowReader(const ForwardArgs& args, int64_t row, int head_)
      : a(args), x(static_cast<const In*>(args.x) + row * args.row_stride - head_), head(head_),
        mask_offset(MASKED ? args.mask.row_offset(row) : 0), unit(static_cast<A>(exponent_unit<FAST>())),
        factor(static_cast<A>(args.scale) * unit) {}

  __device__ Vec<A, V> load(int64_t word) const {
    const Vec<In, V> w = load_vec<In, V>(x + word * V);
    Vec<A, V> v;
#pragma unroll
    for (int j = 0; j < V; ++j) v.v[j] = convert<A>(w.v[j]) * factor;
    const int64_t e = word * V - head;
    if constexpr (MASKED) apply_mask<In, A, V>(v, a.mask, mask_offset, e, a.n, unit);
    if (a.ragged && (e < 0 || e + V > a.n)) {
#pragma unroll
      for (int j = 0; j < V; ++j)
        if (e + j < 0 || e + j >= a.n) v.v[j] = minus_infinity<A>();
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
  A s = p.s * exponential<FAST>(p.m - base);
#pragma unroll
  for (int j = 0; j < V; ++j) s += exponential<FAST>(v.v[j] - base);
  return {m, s};
}

template <typename In, typename Out, bool MASKED>
__global__ void __launch_bounds__(kSplitThreads) softmax_forward_split_reduce(const ForwardArgs a, int pieces,
                                                                             Pair<compute_t<In>>* partial) {
  using A = compute_t<In>;
  constexpr bool FAST = sizeof(Out) == 2;
  constexpr int V = kVectorBytes / sizeof(In);
  __shared__ Pair<A> slots[kMaxWarps];
  Exchange<Pair<A>, false> exchange{slots, kSplitThreads};
  const Piece piece = Piece::find<V>(a.n, pieces, a.ragged);
  const RowReader<In, MASKED, FAST> row(a, piece.row, piece.head);
  Pair<A> p{minus_infinity<A>(), A(0)};
#pragma unroll 4
  for (int64_t word = piece.first + threadIdx.x; word < piece.last; word += kSplitThreads) p = extend<FAST>(p, row.load(word));
  p = row_merge<FAST, false>(lanes_merge<FAST>(p, 32), exchange);
  if (threadIdx.x == 0) partial[blockIdx.x] = p;
}

template <typename In, typename Out, bool MASKED>
__global__ void __launch_bounds__(kSplitThreads) softmax_forward_split_apply(const ForwardArgs a, int pieces,
                                                                            const Pair<compute_t<In>>* partial) {
  using A = compute_t<In>;
  constexpr bool FAST = sizeof(Out) == 2;
  constexpr int V = kVectorBytes / sizeof(In);
  const Piece piece = Piece::find<V>(a.n, pieces, a.ragged);
  Pair<A> all{minus_infinity<A>(), A(0)};
  for (int i = threadIdx.x & 31; i < pieces; i += 32) {
    const Pair<A> q = partial[piece.row * pieces + i];
    const A m = maximum(all.m, q.m), base = finite_or_zero(m);
    all = {m, all.s * exponential<FAST>(all.m - base) + q.s * exponential<FAST>(q.m - base)};
  }
  all = lanes_merge<FAST>(all, 32);
  const RowReader<In, MASKED, FAST> row(a, piece.row, piece.head);
  Out* y = static_cast<Out*>(a.y) + piece.row * a.n - piece.head;
  const A log_s = a.log ? static_cast<A>(log(all.s)) : A(0);
  for (int64_t word = piece.first + threadIdx.x; word < piece.last; word += kSplitThreads) {
    const Vec<A, V> v = row.load(word);
    Vec<Out, V> w;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const A t = v.v[j] - all.m;
      w.v[j] = convert<Out>(a.log ? t / row.unit - log_s : exponential<FAST>(t) / all.s);
    }
    const int64_t e = word * V - piece.head;
    if (e >= 0 && e + V <= a.n) {
      store_vec<Out, V>(y + word * V, w);
    } else {
#pragma unroll
      for (int j = 0; j < V; ++j)
        if (e + j >= 0 && e + j < a.n) y[word * V + j] = w.v[j];
    }
  }
}

template <typename In, typename Out>
__global__ void __launch_bounds__(kSplitThreads) softmax_backward_split_reduce(const BackwardArgs a, int pieces,
                                                                              compute_t<In>* partial) {
  using A = compute_t<In>;
  constexpr int V = kVectorBytes / sizeof(In);
  __shared__ A slots[kMaxWarps];
  Exchange<A, false> exchange{slots, kSplitThreads};
  const Piece piece = Piece::find<V>(a.n, pieces, a.ragged);
  const int64_t start = piece.row * a.n - piece.head;
  const Out* dy = static_cast<const Out*>(a.dy) + start;
  const Out* y = static_cast<const Out*>(a.y) + start;
  A s = 0;
#pragma unroll 4
  for (int64_t word = piece.first + threadIdx.x; word < piece.last; word += kSplitThreads) {
    const Vec<Out, V> g = load_vec<Out, V>(dy + word * V), p = load_vec<Out, V>(y + word * V);
    const int64_t e = word * V - piece.head;
#pragma unroll
    for (int j = 0; j < V; ++j)
      if (e + j >= 0 && e + j < a.n) s += a.log ? convert<A>(g.v[j]) : convert<A>(g.v[j]) * convert<A>(p.v[j]);
  }
  s = row_sum<false>(lanes_sum(s, 32), exchange);
  if (threadIdx.x == 0) partial[blockIdx.x] = s;
}

template <typename In, typename Out>
__global__ void __launch_bounds__(kSplitThreads) softmax_backward_split_apply(const BackwardArgs a, int pieces,
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
  const A scale = static_cast<A>(a.scale);
  const int64_t mask_offset = a.mask.kind == MaskKind::none ? 0 : a.mask.row_offset(piece.row);
  for (int64_t word = piece.first + threadIdx.x; word < piece.last; word += kSplitThreads) {
    const Vec<Out, V> g = load_vec<Out, V>(dy + word * V), p = load_vec<Out, V>(y + word * V);
    const int64_t e = word * V - piece.head;
    Vec<In, V> w;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const A gj = convert<A>(g.v[j]), pj = convert<A>(p.v[j]);
      const bool kept = a.mask.kind == MaskKind::none || e + j < 0 || e + j >= a.n ||
                        static_cast<const bool*>(a.mask.data)[mask_offset + (e + j) * a.mask.step];
      w.v[j] = convert<In>(kept ? scale * (a.log ? gj - exponential<false>(pj) * s : pj * (gj - s)) : A(0));
    }
    if (e >= 0 && e + V <= a.n) {
      store_vec<In, V>(dx + word * V, w);
    } else {
#pragma unroll
      for (int j = 0; j < V; ++j)
        if (e + j >= 0 && e + j < a.n) dx[word * V + j] = w.v[j];
    }
  }
}

// ---- columns ------------------------------------------------------------------------------------------------------------

constexpr int kColumnThreads = 256;

struct ColumnArgs {
  const void* x;   // forward: x. backward: dy
  const void* y;   // backward: y
  void* out;
  int64_t n, inner;
  int across, down;  // threads over the columns, and down them; their product is at most kColumnThreads
  bool log;
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

template <typename In, typename Out, int V>
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
  const In* x = static_cast<const In*>(a.x) + base;
  const A unit = static_cast<A>(exponent_unit<FAST>()), factor = static_cast<A>(a.scale) * unit;

  Pair<A> p[V];
#pragma unroll
  for (int j = 0; j < V; ++j) p[j] = {minus_infinity<A>(), A(0)};
  if (active) {
#pragma unroll 4
    for (int64_t i = first; i < a.n; i += a.down) {
      const Vec<In, V> w = load_vec<In, V>(x + i * a.inner);
#pragma unroll
      for (int j = 0; j < V; ++j) p[j] = extend<FAST>(p[j], Vec<A, 1>{{convert<A>(w.v[j]) * factor}});
    }
  }
  merge_down(p, reinterpret_cast<Pair<A>*>(memory), a, [](Pair<A> u, Pair<A> v) {
    const A m = maximum(u.m, v.m), b = finite_or_zero(m);
    return Pair<A>{m, u.s * exponential<FAST>(u.m - b) + v.s * exponential<FAST>(v.m - b)};
  });
  if (!active) return;
  Out* y = static_cast<Out*>(a.out) + base;
  A log_s[V];
#pragma unroll
  for (int j = 0; j < V; ++j) log_s[j] = a.log ? static_cast<A>(log(p[j].s)) : A(0);
#pragma unroll 4
  for (int64_t i = first; i < a.n; i += a.down) {
    const Vec<In, V> w = load_vec<In, V>(x + i * a.inner);
    Vec<Out, V> r;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const A t = convert<A>(w.v[j]) * factor - p[j].m;
      r.v[j] = convert<Out>(a.log ? t / unit - log_s[j] : exponential<FAST>(t) / p[j].s);
    }
    store_vec<Out, V>(y + i * a.inner, r);
  }
}

template <typename In, typename Out, int V>
__global__ void __launch_bounds__(kColumnThreads) softmax_backward_columns(const ColumnArgs a) {
  using A = compute_t<In>;
  extern __shared__ char memory[];
  const int64_t tiles = (a.inner + static_cast<int64_t>(a.across) * V - 1) / (static_cast<int64_t>(a.across) * V);
  const int64_t outer = blockIdx.x / tiles;
  const int64_t column = ((blockIdx.x % tiles) * a.across + threadIdx.x % a.across) * V;
  const int first = threadIdx.x / a.across;
  const bool active = column < a.inner;
  const int64_t base = outer * a.n * a.inner + column;
  const Out* dy = static_cast<const Out*>(a.x) + base;
  const Out* y = static_cast<const Out*>(a.y) + base;

  A s[V] = {};
  if (active) {
#pragma unroll 4
    for (int64_t i = first; i < a.n; i += a.down) {
      const Vec<Out, V> g = load_vec<Out, V>(dy + i * a.inner);
      if (a.log) {
#pragma unroll
        for (int j = 0; j < V; ++j) s[j] += convert<A>(g.v[j]);
      } else {
        const Vec<Out, V> p = load_vec<Out, V>(y + i * a.inner);
#pragma unroll
        for (int j = 0; j < V; ++j) s[j] += convert<A>(g.v[j]) * convert<A>(p.v[j]);
      }
    }
  }
  merge_down(s, reinterpret_cast<A*>(memory), a, [](A u, A v) { return u + v; });
  if (!active) return;
  In* dx = static_cast<In*>(a.out) + base;
  const A scale = static_cast<A>(a.scale);
#pragma unroll 4
  for (int64_t i = first; i < a.n; i += a.down) {
    const Vec<Out, V> g = load_vec<Out, V>(dy + i * a.inner), p = load_vec<Out, V>(y + i * a.inner);
    Vec<In, V> w;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const A gj = convert<A>(g.v[j]), pj = convert<A>(p.v[j]);
      w.v[j] = convert<In>(scale * (a.log ? gj - exponential<false>(pj) * s[j] : pj * (gj - s[j])));
    }
    store_vec<In, V>(dx + i * a.inner, w);
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
// more exchange: a short row wants few words a thread so that enough blocks are resident, a long one as many as fit.
RowLaunch row_launch(int64_t words, int most, int capability) {
  const int target = words <= 32 ? 2 : words <= 128 ? 4 : most;
  int64_t threads = next_power_of_2(ceil_div(words, std::min(target, most)));
  RowLaunch launch{};
  launch.cluster = 1;
  if (threads > kRowThreads && capability >= 90) {
    launch.cluster = std::min(kMaxCluster, next_power_of_2(ceil_div(threads, kRowThreads)));
    threads = next_power_of_2(ceil_div(threads, launch.cluster));
  }
  launch.split = threads > kRowThreads;
  launch.threads = static_cast<int>(std::min<int64_t>(threads, kRowThreads));
  launch.block = std::max(launch.threads, 128);
  launch.words = next_power_of_2(ceil_div(words, static_cast<int64_t>(launch.threads) * launch.cluster));
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
  int64_t stride = 0, span = 0;
  for (int64_t d = last - 1; d >= 0; --d) {
    if (sizes[d] == 1) continue;
    if (span != 0 && strides[d] != span) return std::nullopt;
    if (span == 0) stride = strides[d];
    span = strides[d] * sizes[d];
  }
  return stride % vector == 0 ? std::optional<int64_t>(stride) : std::nullopt;
}

Mask make_mask(const Tensor& mask, const Dims& sizes, ScalarType x_dtype, const char* op) {
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
    } else {
      STD_TORCH_CHECK(m.dims < kMaskDims, "fastlayers::", op, ": the mask steps through more than ", kMaskDims, " dimensions");
      m.size[m.dims++] = sizes[d];
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

template <typename In, typename Out, bool MASKED>
void forward_rows(ForwardArgs& args, const Launch& launch, const Tensor& like) {
  using A = compute_t<In>;
  constexpr int V = kVectorBytes / sizeof(In);
  constexpr int kMost = MASKED && sizeof(In) == 2 ? 4 : 8;  // a masked row is held in float32
  const DeviceTraits& device = device_traits(launch.device());
  args.ragged = args.n % V != 0;
  const int64_t words = ceil_div(args.n + (args.ragged ? V - 1 : 0), V);
  const RowLaunch shape = row_launch(words, kMost, device.capability);
  args.threads = shape.threads;
  if (shape.split) {
    const int pieces = split_pieces(args.rows, words, device.processors);
    const Tensor partial = empty_contiguous({args.rows * pieces * 2}, sizeof(A) == 8 ? ScalarType::Double : ScalarType::Float, like);
    auto* pairs = static_cast<Pair<A>*>(partial.mutable_data_ptr());
    const dim3 grid(static_cast<unsigned>(args.rows * pieces));
    softmax_forward_split_reduce<In, Out, MASKED><<<grid, kSplitThreads, 0, launch.stream()>>>(args, pieces, pairs);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
    softmax_forward_split_apply<In, Out, MASKED><<<grid, kSplitThreads, 0, launch.stream()>>>(args, pieces, pairs);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  } else if (shape.cluster > 1) {
    launch_rows(softmax_forward_rows<In, Out, kMost, MASKED, true>, shape, args.rows, launch.stream(), args);
  } else {
    with_words(shape.words, [&](auto k) {
      if constexpr (k.value <= kMost)
        launch_rows(softmax_forward_rows<In, Out, k.value, MASKED, false>, shape, args.rows, launch.stream(), args);
    });
  }
}

template <typename In, typename Out>
void backward_rows(BackwardArgs& args, const Launch& launch, const Tensor& like) {
  using A = compute_t<In>;
  constexpr int V = kVectorBytes / sizeof(In);
  constexpr int kMost = sizeof(In) == sizeof(Out) ? 8 : 4;
  const DeviceTraits& device = device_traits(launch.device());
  args.ragged = args.n % V != 0;
  const int64_t words = ceil_div(args.n + (args.ragged ? V - 1 : 0), V);
  const RowLaunch shape = row_launch(words, kMost, device.capability);
  args.threads = shape.threads;
  if (shape.split) {
    const int pieces = split_pieces(args.rows, words, device.processors);
    const Tensor partial = empty_contiguous({args.rows * pieces}, sizeof(A) == 8 ? ScalarType::Double : ScalarType::Float, like);
    auto* sums = static_cast<A*>(partial.mutable_data_ptr());
    const dim3 grid(static_cast<unsigned>(args.rows * pieces));
    softmax_backward_split_reduce<In, Out><<<grid, kSplitThreads, 0, launch.stream()>>>(args, pieces, sums);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
    softmax_backward_split_apply<In, Out><<<grid, kSplitThreads, 0, launch.stream()>>>(args, pieces, sums);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  } else if (shape.cluster > 1) {
    launch_rows(softmax_backward_rows<In, Out, kMost, true>, shape, args.rows, launch.stream(), args);
  } else {
    with_words(shape.words, [&](auto k) {
      if constexpr (k.value <= kMost)
        launch_rows(softmax_backward_rows<In, Out, k.value, false>, shape, args.rows, launch.stream(), args);
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
  launch.down = std::min(kColumnThreads / launch.across, next_power_of_2(s.n));
  launch.blocks = s.outer * ceil_div(columns, launch.across);
  STD_TORCH_CHECK(launch.blocks <= INT32_MAX, "fastlayers::softmax: a shape of ", s.outer, " x ", s.n, " x ", s.inner,
                  " needs more blocks than one launch takes");
  return launch;
}

Tensor softmax_forward(const Tensor& x_in, const std::optional<Tensor>& mask, int64_t dim, double scale, bool log,
                       ScalarType dtype) {
  const char* op = log ? "log_softmax" : "softmax";
  const Shape s = shape_of(x_in, dim, op);
  const Launch launch(x_in);
  const Dims sizes = dims_of(x_in.sizes());
  Tensor y = empty_contiguous(sizes, dtype, x_in);
  if (s.outer * s.n * s.inner == 0) return y;
  if (s.inner == 1 && dim + 1 == x_in.dim()) {
    dispatch_pair(x_in.scalar_type(), dtype, op, [&](auto in, auto out) {
      using In = decltype(in);
      using Out = decltype(out);
      const std::optional<int64_t> stride = row_stride(x_in, kVectorBytes / sizeof(In));
      const Tensor x = stride ? x_in : dense(x_in);
      ForwardArgs args{x.const_data_ptr(), y.mutable_data_ptr(), s.outer, s.n, stride.value_or(s.n), 0, false, log, scale, {}};
      if (mask) {
        args.mask = make_mask(*mask, sizes, x.scalar_type(), op);
        forward_rows<In, Out, true>(args, launch, x);
      } else {
        forward_rows<In, Out, false>(args, launch, x);
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
    const ColumnArgs args{x.const_data_ptr(), nullptr, y.mutable_data_ptr(), s.n, s.inner, shape.across, shape.down, log, scale};
    const int threads = shape.across * shape.down;
    const size_t shared = shape.down == 1 ? 0 : sizeof(Pair<A>) * threads * shape.vector;
    const dim3 grid(static_cast<unsigned>(shape.blocks));
    if (shape.vector > 1)
      softmax_forward_columns<In, Out, kVectorBytes / sizeof(In)><<<grid, threads, shared, launch.stream()>>>(args);
    else
      softmax_forward_columns<In, Out, 1><<<grid, threads, shared, launch.stream()>>>(args);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return y;
}

Tensor softmax_backward(const Tensor& dy_in, const Tensor& y_in, const std::optional<Tensor>& mask, int64_t dim, double scale,
                        bool log, ScalarType dtype) {
  const char* op = log ? "log_softmax_backward" : "softmax_backward";
  check_same_shape(y_in, dy_in, op, "dy");
  const Shape s = shape_of(y_in, dim, op);
  const Launch launch(y_in);
  const Dims sizes = dims_of(y_in.sizes());
  Tensor dx = empty_contiguous(sizes, dtype, y_in);
  if (s.outer * s.n * s.inner == 0) return dx;
  const Tensor dy = dense(dy_in), y = dense(y_in);
  if (s.inner == 1 && dim + 1 == y.dim()) {
    dispatch_pair(dtype, y.scalar_type(), op, [&](auto in, auto out) {
      BackwardArgs args{dy.const_data_ptr(), y.const_data_ptr(), dx.mutable_data_ptr(), s.outer, s.n, 0, false, log, scale, {}};
      if (mask) {
        args.mask = make_mask(*mask, sizes, y.scalar_type(), op);
        STD_TORCH_CHECK(args.mask.kind == MaskKind::boolean, "fastlayers::", op, ": expected a boolean mask");
      }
      backward_rows<decltype(in), decltype(out)>(args, launch, y);
    });
    return dx;
  }
  STD_TORCH_CHECK(!mask, "fastlayers::", op, ": a mask is served over the last dimension only, and dim is ", dim, " of ", y.dim());
  dispatch_pair(dtype, y.scalar_type(), op, [&](auto in, auto out) {
    using In = decltype(in);
    using Out = decltype(out);
    const ColumnLaunch shape = column_launch(s, kVectorBytes / sizeof(In));
    const ColumnArgs args{dy.const_data_ptr(), y.const_data_ptr(), dx.mutable_data_ptr(), s.n, s.inner,
                          shape.across, shape.down, log, scale};
    const int threads = shape.across * shape.down;
    const size_t shared = shape.down == 1 ? 0 : sizeof(compute_t<In>) * threads * shape.vector;
    const dim3 grid(static_cast<unsigned>(shape.blocks));
    if (shape.vector > 1)
      softmax_backward_columns<In, Out, kVectorBytes / sizeof(In)><<<grid, threads, shared, launch.stream()>>>(args);
    else
      softmax_backward_columns<In, Out, 1><<<grid, threads, shared, launch.stream()>>>(args);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return dx;
}

}  // namespace
}  // namespace fastlayers

STABLE_TORCH_LIBRARY_IMPL(fastlayers, CUDA, m) {
  m.impl("softmax_forward", TORCH_BOX(&fastlayers::softmax_forward));
  m.impl("softmax_backward", TORCH_BOX(&fastlayers::softmax_backward));
}

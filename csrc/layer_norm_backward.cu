// layer_norm and rms_norm over the last dimensions, with or without the sum of a residual before them: backward.
//
// The stock backward reads its operands once for the gradient of x and once more for those of weight and bias. Here every tensor
// is read once and written once:
//
//   rows   the grid is resident and each group of threads walks down the rows. It keeps the sums of dweight and dbias of its
//          columns in registers, and has the next rows on their way to shared memory while it works on one. A block writes its
//          sums once, and a second kernel adds up those of all blocks in a fixed order.
//   split  for longer rows: every row is cut into pieces, and each step of the kernel above is a pass of its own.
//
// A group takes only rows that start at the same place of a 16-byte word, so a thread stays with its columns.
#include <numeric>

#include "layer_norm.cuh"

namespace fastlayers {
namespace {

template <typename A>
struct BackwardArgs {
  const void *dy, *dsum, *x, *weight;  // dsum and weight may be null
  const A* stats;
  void *dx, *narrow;  // narrow may be null: dx once more, of 16 bits where x has 32
  A* partial;       // [2, blocks or clusters, n]: their sums for dweight and for dbias
  int64_t rows;
  int n;
  A inverse_n;
  int lanes;        // threads of a block that share a row: a group. A power of two up to a warp, then whole warps
  int groups;       // of all blocks; each takes every groups-th row
  int stages;       // rows of a group in shared memory
  bool wide_weight, small_weight;  // float32 for x of 16 bits; 16 bits for x of float32
  bool bfloat, narrow_bfloat;  // whether a small weight, and narrow, are bfloat16
  bool stage_wide;  // keep the weight, or 1 + weight, in float32: the 16 bits of x may not hold it
  bool gemma, want_weight, want_bias;

  template <typename X>
  __device__ __forceinline__ A weight_at(int column) const {
    A w = A(1);
    if (weight != nullptr) {
      if (sizeof(X) == 4 && small_weight)
        w = bfloat ? convert<A>(static_cast<const __nv_bfloat16*>(weight)[column]) : convert<A>(static_cast<const __half*>(weight)[column]);
      else if (sizeof(X) == 2 && wide_weight) w = static_cast<const A*>(weight)[column];
      else w = convert<A>(static_cast<const X*>(weight)[column]);
    }
    return gemma ? w + A(1) : w;
  }

  template <typename X, int V>
  __device__ __forceinline__ void store_narrow(int64_t at, const Vec<A, V>& r) const {
    if constexpr (sizeof(X) == 4) {
      if (narrow == nullptr) return;
      if (narrow_bfloat) store_vec<__nv_bfloat16, V>(static_cast<__nv_bfloat16*>(narrow) + at, pack<__nv_bfloat16>(r));
      else store_vec<__half, V>(static_cast<__half*>(narrow) + at, pack<__half>(r));
    }
  }
};

// ---- shared memory ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void await_copies(int ahead) {  // all but those of the last `ahead` rows
  if (ahead == 1) wait_copies<1>();
  else if (ahead == 2) wait_copies<2>();
  else wait_copies<3>();
}

// The K words of one operand that a thread has in shared memory. Words of more than 16 bytes lie in parts, so that the threads of a
// warp always touch neighbouring 16 bytes.
template <typename T, int V, int K>
struct Staged {
  static constexpr int kBytes = sizeof(T) * V;
  static constexpr int kPart = kBytes < kVectorBytes ? kBytes : kVectorBytes;
  static constexpr int kParts = kBytes / kPart, kPartElements = V / kParts;
  static constexpr int kThread = K * kBytes;  // bytes a thread
  using Part = Vec<T, kPartElements>;

  char* base;  // of the block's
  __device__ __forceinline__ char* at(int i, int part) const {
    return base + ((i * kParts + part) * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * kPart;
  }
  __device__ __forceinline__ void request(int i, const T* word) const {
    unroll<kParts>([&](int part) { copy_async<kPart>(at(i, part), word + part * kPartElements); });
  }
  __device__ __forceinline__ Vec<T, V> load(int i) const {
    Vec<T, V> v;
    unroll<kParts>([&](int part) {
      *reinterpret_cast<Part*>(v.v + part * kPartElements) = *reinterpret_cast<const Part*>(at(i, part));
    });
    return v;
  }
  __device__ __forceinline__ void store(int i, const Vec<T, V>& v) const {
    unroll<kParts>([&](int part) {
      *reinterpret_cast<Part*>(at(i, part)) = *reinterpret_cast<const Part*>(v.v + part * kPartElements);
    });
  }
};

// ---- rows ---------------------------------------------------------------------------------------------------------------

// Threads of a block at most: the registers of an SM are theirs.
constexpr int kResidentThreads = 512;
// The ragged kernel of layer_norm for 16 bits needs more than the 128 registers that this leaves a thread.
template <typename X, bool LAYER, bool RAGGED>
constexpr int kThreadsOf = sizeof(X) == 2 && LAYER && RAGGED ? 384 : kResidentThreads;
constexpr int kMaxStages = 4;
constexpr int kMostWords = 4;  // of a thread: 64 sums of layer_norm in 16 bits

// Adds up the sums that the groups of a block have left in shared memory, [arrays, groups, n], C columns at a time. Array `a` of the
// results goes to out + a·step.
template <int C, typename A>
__device__ __forceinline__ void add_groups(A* shared, A* out, int64_t step, int arrays, int groups, int n) {
  __syncthreads();
  const int threads = blockDim.x, columns = n / C, tasks = arrays * columns;
  // Of group `first` and every `by`-th after it, for C columns of one array.
  const auto sum_of = [&](int array, int column, int first, int by, int count) {
    const A* at = shared + static_cast<int64_t>(array) * groups * n + column * C;
    Vec<A, C> sum = *reinterpret_cast<const Vec<A, C>*>(at + first * n);
#pragma unroll 4
    for (int g = first + by; g < count; g += by) {
      const Vec<A, C> v = *reinterpret_cast<const Vec<A, C>*>(at + g * n);
#pragma unroll
      for (int c = 0; c < C; ++c) sum.v[c] += v.v[c];
    }
    return sum;
  };
  // Where there are more threads than columns, several share the groups of a column, and one adds up their sums.
  const int parts = min(min(16, groups), threads / tasks);
  if (parts > 1) {
    const int part = threadIdx.x / tasks, task = threadIdx.x - part * tasks, array = task >= columns;
    if (part < parts) {
      const Vec<A, C> sum = sum_of(array, task - array * columns, part, parts, groups);
      // In the place of a group that this thread alone has read.
      A* const at = shared + (static_cast<int64_t>(array) * groups + part) * n + (task - array * columns) * C;
      *reinterpret_cast<Vec<A, C>*>(at) = sum;
    }
    __syncthreads();
  }
#pragma unroll 2
  for (int task = threadIdx.x; task < tasks; task += threads) {
    const int array = task >= columns, column = task - array * columns;
    const Vec<A, C> sum = sum_of(array, column, 0, 1, parts > 1 ? parts : groups);
    *reinterpret_cast<Vec<A, C>*>(out + array * step + column * C) = sum;
  }
}

// Where a thread stands: its group of threads, and with it the rows; its words, `lanes` apart, and with them the columns.
template <int V, bool RAGGED, int K, bool CLUSTER>
struct Columns {
  int group, first, group_of_block = 0, lanes;
  int before = 0, single = -1, words;  // single elements before the whole words; the thread's single element

  template <typename A>
  __device__ __forceinline__ explicit Columns(const BackwardArgs<A>& a) : group(blockIdx.x), first(threadIdx.x), lanes(a.lanes) {
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
    words = n / V;
    if constexpr (RAGGED) {
      before = min(n, static_cast<int>(-(group * static_cast<int64_t>(n)) & (V - 1)));
      words = static_cast<unsigned>(n - before) / V;
      const int singles = n - words * V;
      if (first < singles) single = first < before ? first : first + words * V;
    }
  }
  __device__ __forceinline__ bool has(int i) const { return first + i * lanes < words; }
  __device__ __forceinline__ int element(int i) const { return before + (first + i * lanes) * V; }
};

// The rows of x, dy and dsum in one stage of shared memory.
template <typename X, typename D, int V, int K>
struct Stage {
  using OfX = Staged<X, V, K>;
  using OfDy = Staged<D, V, K>;
  OfX x, dsum;
  OfDy dy;

  __device__ __forceinline__ explicit Stage(char* base)
      : x{base}, dsum{base + blockDim.x * (OfX::kThread + OfDy::kThread)}, dy{base + blockDim.x * OfX::kThread} {}
  template <typename A>
  static __device__ __forceinline__ int bytes(const BackwardArgs<A>& a) {
    return static_cast<int>(blockDim.x) * (OfX::kThread * (a.dsum != nullptr ? 2 : 1) + OfDy::kThread);
  }
  // Requests a row, if there is one.
  template <typename A, typename C>
  __device__ __forceinline__ void request(const BackwardArgs<A>& a, const C& columns, int64_t row) const {
    if (row < a.rows) {
      const int64_t start = row * a.n;
      unroll<K>([&](int i) {
        if (!columns.has(i)) return;
        x.request(i, static_cast<const X*>(a.x) + start + columns.element(i));
        dy.request(i, static_cast<const D*>(a.dy) + start + columns.element(i));
        if (a.dsum != nullptr) dsum.request(i, static_cast<const X*>(a.dsum) + start + columns.element(i));
      });
    }
    commit_copies();
  }
};

// The weight of a thread's columns in shared memory: in x's type where that holds it, else in float32.
template <typename X, bool RAGGED, int V, int K>
struct StagedWeight {
  using A = compute_t<X>;
  Staged<X, V, K> narrow;
  Staged<A, V, K> wide;
  A single = 0;

  template <typename C>
  __device__ __forceinline__ StagedWeight(const BackwardArgs<A>& a, const C& columns, char* base) : narrow{base}, wide{base} {
    const bool as_is = a.weight != nullptr && !a.small_weight && !a.gemma;
    const auto copy = [&]<typename W>(const auto& staged, W) {
      unroll<K>([&](int i) {
        if (!columns.has(i)) return;
        const auto w = load_weights<!RAGGED, W, V>(static_cast<const W*>(a.weight), columns.element(i));
        staged.store(i, *reinterpret_cast<const Vec<W, V>*>(w.words));
      });
    };
    if (as_is && !a.wide_weight) {
      copy(narrow, X{});
    } else if (sizeof(X) == 2 && as_is) {
      copy(wide, A{});
    } else {
#pragma unroll 1
      for (int i = 0; i < K && columns.has(i); ++i) {
        Vec<A, V> w;
        unroll<V>([&](int j) { w.v[j] = a.template weight_at<X>(columns.element(i) + j); });
        if (a.stage_wide) wide.store(i, w);
        else narrow.store(i, pack<X>(w));
      }
    }
    if (columns.single >= 0) single = a.template weight_at<X>(columns.single);
  }
  // g = dy·weight
  __device__ __forceinline__ Vec<A, V> times(const BackwardArgs<A>& a, int i, const Vec<A, V>& dy) const {
    Vec<A, V> w = sizeof(X) < sizeof(A) && a.stage_wide ? wide.load(i) : unpack<A>(narrow.load(i));
    unroll<V>([&](int j) { w.v[j] *= dy.v[j]; });
    return w;
  }
};

// The sums of dy·x̂ and of dy of a thread's columns over the rows of its group.
template <typename A, bool LAYER, int V, int K>
struct ColumnSums {
  Vec<A, V> dweight[K], dbias[LAYER ? K : 1];
  A single_dweight = 0, single_dbias = 0;

  __device__ __forceinline__ ColumnSums() {
    unroll<K>([&](int i) { dweight[i] = filled<A, V>(A(0)); });
    if constexpr (LAYER) {
      unroll<K>([&](int i) { dbias[i] = filled<A, V>(A(0)); });
    }
  }
};

// What a thread reads of a row besides its words: the statistics, and its single element.
template <typename A>
struct RowScalars {
  A mean = 0, rstd = 0, x = 0, dy = 0;

  template <typename X, typename D, bool LAYER, bool RAGGED, typename C>
  __device__ __forceinline__ void load(const BackwardArgs<A>& a, const C& columns, int64_t row) {
    if (row >= a.rows) return;
    if constexpr (LAYER) mean = a.stats[row];
    rstd = a.stats[LAYER ? a.rows + row : row];
    if (RAGGED && columns.single >= 0) {
      x = convert<A>(static_cast<const X*>(a.x)[row * a.n + columns.single]);
      dy = convert<A>(static_cast<const D*>(a.dy)[row * a.n + columns.single]);
    }
  }
};

// Adds a row to the sums of columns, and gives the thread's part of the sums of g·x̂ and of g over the row.
template <bool LAYER, int V, int K, typename A, typename S, typename W, typename C>
__device__ __forceinline__ RowSums<A> add_row(
    const BackwardArgs<A>& a, const C& columns, const S& stage, const W& weight, const RowScalars<A>& row, A rstd, bool live,
    bool has_single, ColumnSums<A, LAYER, V, K>& to) {
  const auto normal = [&](A x) { return LAYER ? (x - row.mean) * rstd : x * rstd; };
  A gx[2] = {}, g_sum[2] = {};
  unroll<K>([&](int i) {
    if (!live || !columns.has(i)) return;
    const Vec<A, V> x = unpack<A>(stage.x.load(i)), dy = unpack<A>(stage.dy.load(i)), g = weight.times(a, i, dy);
    unroll<V>([&](int j) {
      const A hat = normal(x.v[j]);
      to.dweight[i].v[j] += dy.v[j] * hat;
      gx[j & 1] += g.v[j] * hat;
      if constexpr (LAYER) {
        to.dbias[i].v[j] += dy.v[j];
        g_sum[j & 1] += g.v[j];
      }
    });
  });
  RowSums<A> sums{gx[0] + gx[1], g_sum[0] + g_sum[1]};
  if (has_single) {
    const A hat = normal(row.x), g = row.dy * weight.single;
    to.single_dweight += row.dy * hat;
    to.single_dbias += row.dy;
    sums.first += g * hat;
    sums.second += g;
  }
  return sums;
}

// dx = rstd·(g - mean(g) - x̂·mean(g·x̂)), plus dsum.
template <typename X, bool LAYER, int V, int K, typename A, typename S, typename W, typename C>
__device__ __forceinline__ void write_row(
    const BackwardArgs<A>& a, const C& columns, const S& stage, const W& weight, const RowScalars<A>& scalars, A rstd,
    const RowSums<A>& sums, int64_t row, bool live, bool has_single) {
  // 16 bits do not show the rounding of the product of mean and the second term.
  const A mean = scalars.mean;
  const A along = -sums.first * a.inverse_n * rstd * rstd, level = LAYER ? -sums.second * a.inverse_n * rstd : A(0), constant = level - along * mean;
  const auto gradient = [&](A x, A g) {
    if constexpr (LAYER && sizeof(X) != 2) return fma(g, rstd, fma(x - mean, along, level));
    else return fma(g, rstd, LAYER ? fma(x, along, constant) : x * along);
  };
  X* dx = static_cast<X*>(a.dx) + row * a.n;
  unroll<K>([&](int i) {
    if (!live || !columns.has(i)) return;
    const Vec<A, V> x = unpack<A>(stage.x.load(i)), dy = unpack<A>(stage.dy.load(i));
    Vec<A, V> r = weight.times(a, i, dy);
    unroll<V>([&](int j) { r.v[j] = gradient(x.v[j], r.v[j]); });
    if (a.dsum != nullptr) {
      const Vec<A, V> d = unpack<A>(stage.dsum.load(i));
      unroll<V>([&](int j) { r.v[j] += d.v[j]; });
    }
    store_vec<X, V>(dx + columns.element(i), pack<X>(r));
    a.template store_narrow<X>(row * a.n + columns.element(i), r);
  });
  if (has_single) {
    A r = gradient(scalars.x, scalars.dy * weight.single);
    if (a.dsum != nullptr) r += convert<A>(static_cast<const X*>(a.dsum)[row * a.n + columns.single]);
    dx[columns.single] = convert<X>(r);
    a.template store_narrow<X>(row * a.n + columns.single, Vec<A, 1>{{r}});
  }
}

// Writes the sums of a block, added up over its groups.
template <bool LAYER, bool RAGGED, int V, int K, bool CLUSTER, typename A, typename C>
__device__ __forceinline__ void write_sums(
    const BackwardArgs<A>& a, const C& columns, const ColumnSums<A, LAYER, V, K>& sums, char* memory) {
  const int n = a.n;
  const int64_t blocks = CLUSTER ? a.groups : gridDim.x;
  A* out = a.partial + (CLUSTER ? columns.group : static_cast<int64_t>(blockIdx.x)) * n;
  const int groups_of_block = CLUSTER ? 1 : blockDim.x / a.lanes;
  const auto write_columns = [&](const auto& of_words, A of_single, A* to) {
    unroll<K>([&](int i) {
      if (!columns.has(i)) return;
      if constexpr (!RAGGED) {
        *reinterpret_cast<Vec<A, V>*>(to + columns.element(i)) = of_words[i];
      } else {
        unroll<V>([&](int j) { to[columns.element(i) + j] = of_words[i].v[j]; });
      }
    });
    if (RAGGED && columns.single >= 0) to[columns.single] = of_single;
  };
  const bool want_bias = LAYER && a.want_bias;
  A* const first_out = a.want_weight ? out : out + blocks * n;
  if (groups_of_block == 1) {
    if (a.want_weight) write_columns(sums.dweight, sums.single_dweight, out);
    if constexpr (LAYER) {
      if (want_bias) write_columns(sums.dbias, sums.single_dbias, out + blocks * n);
    }
  } else if (a.want_weight || want_bias) {
    A* const shared = reinterpret_cast<A*>(memory);
    A* to = shared + columns.group_of_block * n;
    __syncthreads();  // the stages are done with
    if (a.want_weight) write_columns(sums.dweight, sums.single_dweight, to), to += groups_of_block * n;
    if constexpr (LAYER) {
      if (want_bias) write_columns(sums.dbias, sums.single_dbias, to);
    }
    const int arrays = (a.want_weight ? 1 : 0) + (want_bias ? 1 : 0);
    add_groups<RAGGED ? 1 : kVectorBytes / sizeof(A)>(shared, first_out, blocks * n, arrays, groups_of_block, n);
  }
}

// D: dy's type. RAGGED: rows may be so. K: words of a thread.
template <typename X, typename D, bool LAYER, bool RAGGED, int K, bool CLUSTER>
__global__ void __launch_bounds__(kThreadsOf<X, LAYER, RAGGED>, 1) layer_norm_backward_rows(const BackwardArgs<compute_t<X>> a) {
  using A = compute_t<X>;
  constexpr int V = kVectorBytes / sizeof(X);
  constexpr int kSlots = kResidentThreads / 32 * (CLUSTER ? kMaxCluster : 1);
  using OneStage = Stage<X, D, V, K>;
  __shared__ RowSums<A> slots[2][kSlots];
  extern __shared__ __align__(16) char memory[];
  if constexpr (CLUSTER) this_cluster().barrier_arrive();

  const Columns<V, RAGGED, K, CLUSTER> columns(a);
  const int group = columns.group, stage_bytes = OneStage::bytes(a);
  char* const end = memory + a.stages * stage_bytes;
  for (int i = 0; i + 1 < a.stages; ++i) {
    OneStage(memory + i * stage_bytes).request(a, columns, group + static_cast<int64_t>(i) * a.groups);
  }
  const StagedWeight<X, RAGGED, V, K> weight(a, columns, end);
  ColumnSums<A, LAYER, V, K> of_columns;
  RowScalars<A> next;
  next.template load<X, D, LAYER, RAGGED>(a, columns, group);
  if constexpr (CLUSTER) this_cluster().barrier_wait();  // every block has started: its memory may be written

  char* stage = memory;
  int turn = 0;
  // The threads of a warp go on together until the last of their rows, with nothing to do past it.
  const int64_t warp_rows = a.rows - (CLUSTER || a.lanes >= 32 ? group : 0);
  int64_t row = group;
  for (int steps = warp_rows > 0 ? static_cast<int>((warp_rows + a.groups - 1) / a.groups) : 0; steps > 0; --steps, row += a.groups) {
    // Into the stage that the row before this one has left.
    OneStage((stage == memory ? end : stage) - stage_bytes).request(a, columns, row + static_cast<int64_t>(a.stages - 1) * a.groups);
    const RowScalars<A> scalars = next;
    const A rstd = LAYER && a.n == 1 ? A(0) : scalars.rstd;  // one element is its mean: exactly no gradient
    next.template load<X, D, LAYER, RAGGED>(a, columns, row + a.groups);
    await_copies(a.stages - 1);
    const bool live = row < a.rows, has_single = RAGGED && columns.single >= 0 && live;
    const OneStage staged(stage);
    RowSums<A> sums = add_row(a, columns, staged, weight, scalars, rstd, live, has_single, of_columns);
    add_lanes<LAYER>(sums, a.lanes < 32 ? a.lanes : 32);
    if (CLUSTER || a.lanes > 32) {
      add_warps<LAYER, CLUSTER>(sums, slots[turn] + columns.group_of_block * (a.lanes >> 5), a.lanes, columns.group_of_block);
      turn ^= 1;
    }
    write_row<X, LAYER, V, K>(a, columns, staged, weight, scalars, rstd, sums, row, live, has_single);
    stage += stage_bytes;
    if (stage == end) stage = memory;
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
  write_sums<LAYER, RAGGED, V, K, CLUSTER>(a, columns, of_columns, memory);
}

constexpr int kSumWarps = 16;

// Adds up the partial sums of all blocks: C columns a lane, and the warps of a block share the blocks' sums.
template <typename W, typename A, int C>
__global__ void __launch_bounds__(kSumWarps * 32) layer_norm_sum_partials(const A* partial, W* dweight, W* dbias, int blocks, int64_t n) {
  __shared__ A shared[kSumWarps][32 * C + 1];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * 32 + lane) * C;
  // The second half of the grid's second dimension, if any, has the bias.
  const bool bias = blockIdx.y == 1 || dweight == nullptr;
  const A* from = partial + (bias ? blocks * n : 0) + column;
  Vec<A, C> s = filled<A, C>(A(0));
  if (column < n) {
#pragma unroll 8
    for (int b = warp; b < blocks; b += kSumWarps) {
      const Vec<A, C> v = load_vec<A, C>(from + b * n);
      unroll<C>([&](int c) { s.v[c] += v.v[c]; });
    }
  }
  unroll<C>([&](int c) { shared[warp][lane + c * 32] = s.v[c]; });
  __syncthreads();
  for (int i = threadIdx.x; i < 32 * C; i += kSumWarps * 32) {
    const int64_t at = static_cast<int64_t>(blockIdx.x) * 32 * C + (i & 31) * C + (i >> 5);
    if (at >= n) continue;
    A all = shared[0][i];
    for (int w = 1; w < kSumWarps; ++w) all += shared[w][i];
    (bias ? dbias : dweight)[at] = convert<W>(all);
  }
}

// ---- rows too long for a cluster ----------------------------------------------------------------------------------------

// x̂ and g of a batch.
template <typename A>
__device__ __forceinline__ void load_backward(const SplitArgs<A>& a, const SplitPiece& piece, int64_t e, A mean, A rstd,
                                              Vec<A, kBatch>& x, Vec<A, kBatch>& g) {
  x = load_batch(a.x, piece.base, e, piece.end, mean);
  g = load_batch(a.dy, piece.base, e, piece.end, A(0));
  const Vec<A, kBatch> w = load_batch(a.weight, 0, e, piece.end, A(1));
  unroll<kBatch>([&](int j) {
    x.v[j] = (x.v[j] - mean) * rstd;
    g.v[j] *= w.v[j] + a.weight_offset();
  });
}

template <typename A>
__global__ void __launch_bounds__(kSplitThreads) layer_norm_split_sums(const SplitArgs<A> a) {
  __shared__ RowSums<A> slots[32];
  const SplitPiece piece(a);
  const A mean = a.mean(piece.row), rstd = a.rstd(piece.row);
  RowSums<A> all{A(0), A(0)};
  piece.for_batches([&](int64_t e) {
    Vec<A, kBatch> x, g;
    load_backward(a, piece, e, mean, rstd, x, g);
    all.second += tree_sum(g);
    unroll<kBatch>([&](int j) { g.v[j] *= x.v[j]; });
    all.first += tree_sum(g);
  });
  add_lanes<true>(all, 32);
  add_warps<true, false>(all, slots, kSplitThreads, 0);
  if (threadIdx.x == 0) reinterpret_cast<RowSums<A>*>(a.partial)[blockIdx.x] = all;
}

template <typename A>
__global__ void __launch_bounds__(kSplitThreads) layer_norm_split_dx(const SplitArgs<A> a) {
  const SplitPiece piece(a);
  const A mean = a.mean(piece.row), rstd = a.rstd(piece.row), n = static_cast<A>(a.n);
  RowSums<A> all{A(0), A(0)};
  for (int i = threadIdx.x & 31; i < a.pieces; i += 32) {
    const RowSums<A> p = reinterpret_cast<const RowSums<A>*>(a.partial)[piece.row * a.pieces + i];
    all.first += p.first, all.second += p.second;
  }
  const A gx = lanes_sum(all.first, 32) / n, g_mean = a.layer() ? lanes_sum(all.second, 32) / n : A(0);
  piece.for_batches([&](int64_t e) {
    Vec<A, kBatch> x, g;
    load_backward(a, piece, e, mean, rstd, x, g);
    const Vec<A, kBatch> d = load_batch(a.dsum, piece.base, e, piece.end, A(0));
    unroll<kBatch>([&](int j) { g.v[j] = rstd * (g.v[j] - g_mean - x.v[j] * gx) + d.v[j]; });
    store_batch(a.dx, piece.base, e, piece.end, g);
    store_batch(a.narrow, piece.base, e, piece.end, g);
  });
}

// Sums down the rows of one slab for kSplitThreads·kBatch columns. `partial`: [2, slabs, n].
template <typename A>
__global__ void __launch_bounds__(kSplitThreads) layer_norm_split_columns(const SplitArgs<A> a, int slabs) {
  const int64_t rows_each = (a.rows + slabs - 1) / slabs, first = blockIdx.y * rows_each;
  const int64_t last = first + rows_each < a.rows ? first + rows_each : a.rows;
  const int64_t e = static_cast<int64_t>(blockIdx.x) * kSplitThreads * kBatch + threadIdx.x;
  Vec<A, kBatch> dweight = filled<A, kBatch>(A(0)), dbias = dweight;
  for (int64_t row = first; row < last; ++row) {
    const A mean = a.mean(row), rstd = a.rstd(row);
    const Vec<A, kBatch> x = load_batch(a.x, row * a.n, e, a.n, mean), dy = load_batch(a.dy, row * a.n, e, a.n, A(0));
    unroll<kBatch>([&](int j) {
      dweight.v[j] += dy.v[j] * (x.v[j] - mean) * rstd;
      dbias.v[j] += dy.v[j];
    });
  }
  const Operand out{a.partial, sizeof(A) == 8 ? Type::float64 : Type::float32};
  store_batch(out, blockIdx.y * a.n, e, a.n, dweight);
  store_batch(out, (slabs + static_cast<int64_t>(blockIdx.y)) * a.n, e, a.n, dbias);
}

// ---- launch rules -------------------------------------------------------------------------------------------------------

// The resident grid for rows of up to `words` 16-byte words: at most `threads` threads of an SM, in blocks of up to `block`, which hold as
// many groups as fit, with up to `stages` rows of each in shared memory. Fewer and larger blocks leave fewer partial sums.
struct ResidentRule {
  int64_t words;
  int threads, block, stages;
};
// On an H100, bfloat16, in fractions of the copy bandwidth for layer_norm and rms_norm: 768 columns .81 .83 with 384 threads, .76 .79
// with 256; 1024 columns .83 .86 with 256, .82 .84 with 384; 4096 .88 .90 with 256, .86 .89 with 384; 8192 .89 .90 with 384, .84 .88
// with 512; 16384 .85 .89 with 512, .72 .75 over clusters; 2 to 4 stages within .01 of each other.
constexpr ResidentRule kResidentRules[] = {
    {96, 384, 384, 2},
    {512, 256, 256, 3},
    {1024, 384, 384, 3},
    {INT64_MAX, 512, 512, 2},
};
constexpr ResidentRule kRaggedRule{INT64_MAX, 512, 512, 3};  // 4095 columns: rms_norm .84 with 512 threads, .78 with 384
constexpr int kSharedReserve = 1024;  // of each block, for the driver

struct ResidentLaunch {
  int threads = 0;  // of a block that share a row
  int block = 0;    // threads of a block
  int words = 0;    // of a thread
  int cluster = 1;  // blocks that share a row
  int groups = 0;   // of all blocks; 0: the row is too long
  int stages = 0;
  int64_t blocks = 0;
  size_t shared = 0;
};

// The shared memory that a block of the backward may take where `resident` blocks share a multiprocessor. `slots`: bytes of the exchange
// of one block.
int64_t shared_of_block(int resident, int cluster, int slots, int device) {
  return device_traits(device).processor_shared / resident - kSharedReserve - (cluster > 1 ? kMaxCluster : 1) * slots;
}

// What the launch depends on besides the rule.
struct ResidentNeeds {
  int64_t words, rows;
  int period;                    // rows after which a row starts at the same place of a word
  int word_bytes, weight_bytes;  // of a word: in each stage, and beside the stages
  int slots, most_threads;
  bool ragged, rare;
};

// Chooses threads, block, words and cluster; false where even the largest cluster cannot hold a row.
bool set_threads(ResidentLaunch& launch, const ResidentRule& rule, const ResidentNeeds& needs, int device) {
  const bool ragged = needs.ragged;
  const auto threads_of = [&](int each) { return ragged ? std::max(row_threads(needs.words, each), 16) : row_threads(needs.words, each); };
  launch.words = !ragged && !needs.rare && threads_of(3) * 3 < threads_of(kMostWords) * kMostWords ? 3 : kMostWords;
  // Two stages of the widest types may leave room for fewer threads than the rule has.
  const auto widest_of = [&](int cluster) {
    const int64_t fit = shared_of_block(1, cluster, needs.slots, device) / (launch.words * (2 * needs.word_bytes + needs.weight_bytes));
    return std::min({needs.most_threads, rule.threads, static_cast<int>(fit / 32 * 32)});
  };
  const int widest = widest_of(1);
  if (needs.words <= static_cast<int64_t>(widest) * launch.words) {
    launch.threads = threads_of(launch.words);
    const int block = std::min(widest, rule.block);
    launch.block = std::max(1, launch.threads < 32 ? block / 32 * 32 / launch.threads : block / launch.threads) * launch.threads;
    return true;
  }
  launch.words = kMostWords;
  launch.cluster = static_cast<int>(next_power_of_2(ceil_div(needs.words, static_cast<int64_t>(widest_of(kMaxCluster)) * launch.words)));
  if (device_traits(device).capability < 90 || launch.cluster > kMaxCluster) return false;
  launch.threads = launch.block = static_cast<int>(ceil_div(ceil_div(needs.words, launch.words * launch.cluster), 32) * 32);
  return true;
}

ResidentLaunch resident_launch(const ResidentRule& rule, const ResidentNeeds& needs, int device) {
  ResidentLaunch launch;
  if (!set_threads(launch, rule, needs, device)) return launch;
  const int together = launch.cluster > 1 ? 1 : launch.block / launch.threads;  // groups of a block
  const int64_t bytes = static_cast<int64_t>(launch.block) * launch.words;
  const auto share = [&](int resident) { return shared_of_block(resident, launch.cluster, needs.slots, device); };
  int resident = std::max(1, rule.threads / launch.block);
  while (resident > 1 && bytes * (2 * needs.word_bytes + needs.weight_bytes) > share(resident)) --resident;
  launch.stages = static_cast<int>(std::clamp<int64_t>((share(resident) - bytes * needs.weight_bytes) / (bytes * needs.word_bytes), 2,
                                                       std::min(kMaxStages, rule.stages)));
  launch.shared = static_cast<size_t>(bytes * (launch.stages * needs.word_bytes + needs.weight_bytes));

  // As many groups as are resident, or a few less where each then has as many rows as the next.
  const int64_t units = std::max<int64_t>(1, static_cast<int64_t>(device_traits(device).processors) * resident / launch.cluster);
  const int64_t each = std::max<int64_t>(1, ceil_div(needs.rows, units * together));
  int64_t blocks = ceil_div(needs.rows, each * together);
  const int64_t step = needs.period / std::gcd(needs.period, together);
  if (each > 1) blocks = ceil_div(blocks, step) <= units / step ? ceil_div(blocks, step) * step : std::max<int64_t>(units / step, 1) * step;
  launch.groups = static_cast<int>(blocks * together);
  launch.blocks = blocks * launch.cluster;
  return launch;
}

// ---- host ---------------------------------------------------------------------------------------------------------------

// The period after which a row of n starts at the same place of a word.
int period_of(int64_t n, int vector) {
  int period = 1;
  while (period * n % vector != 0) period *= 2;
  return period;
}

constexpr int64_t kSumWide = 8192;

// Adds up the partial sums of the blocks, [2, blocks, n], to the gradients of weight and bias.
template <typename A>
void sum_partials(const WeightGradients& to, const Tensor& partials, int blocks, int64_t n, const Launch& on) {
  if (!to.want_weight && !to.want_bias) return;
  dispatch_floating(to.dweight.scalar_type(), "layer_norm_backward", [&]<typename W>(W) {
    if constexpr (sizeof(W) <= sizeof(A) && (sizeof(A) == 4 || sizeof(W) == 8)) {
      // Words of columns where there are enough of them to occupy the GPU.
      constexpr int C = kVectorBytes / sizeof(A);
      const bool wide = n % C == 0 && n >= kSumWide;
      const dim3 grid(static_cast<unsigned>(ceil_div(n, wide ? 32 * C : 32)), to.want_weight && to.want_bias ? 2 : 1);
      const auto kernel = wide ? layer_norm_sum_partials<W, A, C> : layer_norm_sum_partials<W, A, 1>;
      kernel<<<grid, kSumWarps * 32, 0, on.stream()>>>(pointer<const A>(partials), to.want_weight ? pointer<W>(to.dweight) : nullptr,
                                                       to.want_bias ? pointer<W>(to.dbias) : nullptr, blocks, n);
      STD_CUDA_KERNEL_LAUNCH_CHECK();
    }
  });
}

// Launches the resident kernel; false where no cluster can hold a row.
template <typename X, typename D, bool LAYER>
bool backward(BackwardArgs<compute_t<X>>& args, int64_t n, const WeightGradients& gradients, const Launch& on, const Tensor& like) {
  using A = compute_t<X>;
  constexpr int V = kVector<X>;
  constexpr bool kRare = sizeof(X) == 8;  // the ragged kernels serve all rows
  constexpr int kSlots = 2 * sizeof(RowSums<A>) * kResidentThreads / 32;
  if (n > INT32_MAX / 2) return false;
  const bool ragged = n % V != 0;
  ResidentNeeds needs{n / V, args.rows, period_of(n, V)};
  needs.word_bytes = static_cast<int>(V * ((args.dsum != nullptr ? 2 : 1) * sizeof(X) + sizeof(D)));
  needs.weight_bytes = static_cast<int>(V * (args.stage_wide ? sizeof(A) : sizeof(X)));
  needs.slots = kSlots;
  needs.most_threads = ragged ? kThreadsOf<X, LAYER, true> : kThreadsOf<X, LAYER, kRare>;
  needs.ragged = ragged, needs.rare = kRare;
  const ResidentRule* rule = kResidentRules;
  while (rule->words < needs.words) ++rule;
  const ResidentLaunch launch = resident_launch(ragged ? kRaggedRule : *rule, needs, on.device());
  if (launch.groups == 0) return false;
  args.n = static_cast<int>(n);
  args.lanes = launch.threads;
  args.inverse_n = A(1) / static_cast<A>(n);
  args.groups = launch.groups;
  args.stages = launch.stages;
  const int64_t partials = launch.blocks / launch.cluster;
  const Tensor partial = empty_contiguous({args.want_weight || args.want_bias ? 2 * partials * n : 0}, compute_dtype(like), like);
  args.partial = pointer<A>(partial);
  const auto run = [&]<bool CLUSTER>(auto is_ragged, auto words_each, std::bool_constant<CLUSTER>) {
    constexpr auto kernel = layer_norm_backward_rows<X, D, LAYER, decltype(is_ragged)::value, decltype(words_each)::value, CLUSTER>;
    allow_shared_memory<kernel>(shared_of_block(1, CLUSTER ? kMaxCluster : 1, kSlots, on.device()), on);
    launch_kernel(kernel, {launch.blocks, launch.block, launch.shared, launch.cluster}, on, args);
  };
  using Most = Number<kMostWords>;
  const auto choose = [&](auto is_ragged) {
    constexpr bool kRareCluster = kRare || (sizeof(X) == 4 && sizeof(D) == 2);
    if (launch.cluster > 1) return run(std::bool_constant<(kRareCluster || decltype(is_ragged)::value)>{}, Most{}, std::true_type{});
    if constexpr (!decltype(is_ragged)::value) {
      if (launch.words == 3) return run(is_ragged, Number<3>{}, std::false_type{});
    }
    run(is_ragged, Most{}, std::false_type{});
  };
  if constexpr (kRare) choose(std::true_type{});
  else if (ragged) choose(std::true_type{});
  else choose(std::false_type{});
  sum_partials<A>(gradients, partial, static_cast<int>(partials), n, on);
  return true;
}

template <typename A>
void split_backward(SplitArgs<A>& args, const WeightGradients& gradients, const Launch& on, const Tensor& like) {
  const ScalarType dtype = compute_dtype(like);
  set_pieces(args, on);
  const LaunchShape shape{args.rows * args.pieces, kSplitThreads};
  const Tensor sums = empty_contiguous({shape.blocks * 2}, dtype, like);
  args.partial = pointer<A>(sums);
  launch_kernel(layer_norm_split_sums<A>, shape, on, args);
  launch_kernel(layer_norm_split_dx<A>, shape, on, args);
  if (!gradients.want_weight && !gradients.want_bias) return;
  const int64_t across = ceil_div(args.n, kSplitThreads * kBatch);
  const int64_t slabs = std::clamp<int64_t>(4 * device_traits(on.device()).processors / across, 1, std::min<int64_t>(args.rows, 64));
  const Tensor partial = empty_contiguous({2 * slabs * args.n}, dtype, like);
  args.partial = pointer<A>(partial);
  const dim3 grid(static_cast<unsigned>(across), static_cast<unsigned>(slabs));
  layer_norm_split_columns<A><<<grid, kSplitThreads, 0, on.stream()>>>(args, static_cast<int>(slabs));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  sum_partials<A>(gradients, partial, static_cast<int>(slabs), args.n, on);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& dy_in, const MaybeTensor& dsum_in, const Tensor& x_in,
                                                               int64_t dims, const MaybeTensor& weight_in, const Tensor& stats_in,
                                                               int64_t kind, bool want_weight, bool want_bias,
                                                               std::optional<ScalarType> narrow_dtype) {
  const char* op = "layer_norm_backward";
  const Shape s(x_in, dims, op);
  check_kind(kind, want_bias, op);
  check_backward(dy_in, x_in, stats_in, kind, s, op);
  if (dsum_in) check_same_shape(x_in, *dsum_in, op, "dsum");
  const ScalarType x_dtype = x_in.scalar_type();
  const MaybeTensor weight = checked_weight(weight_in, x_in, s.n, op, "weight");
  const ScalarType weight_dtype = weight ? weight->scalar_type() : x_dtype;
  const bool small_weight = x_dtype == ScalarType::Float && is_low_precision(weight_dtype);
  if (!small_weight) check_dtype(x_dtype, weight_dtype, op, "weight");

  FASTLAYERS_CHECK(!narrow_dtype || (x_dtype == ScalarType::Float && is_low_precision(*narrow_dtype)), op,
                   "expected x of float32 and a narrow gradient of 16 bits");

  const Launch on(x_in);
  Tensor dx = empty_result(x_in, x_dtype);
  Tensor narrow = narrow_dtype ? empty_result(x_in, *narrow_dtype) : empty_contiguous({0}, x_dtype, x_in);
  WeightGradients gradients(x_in, weight, s.n, want_weight, want_bias);
  if (s.empty()) {
    gradients.zero();
    return {dx, gradients.dweight, gradients.dbias, narrow};
  }
  const Tensor x = dense(x_in), dy = dense(dy_in), stats = dense(stats_in);
  const MaybeTensor dsum = dsum_in ? MaybeTensor(dense(*dsum_in)) : std::nullopt;
  dispatch_pair<true>(x_dtype, dy.scalar_type(), op, [&]<typename X, typename D>(X, D) {
    using A = compute_t<X>;
    BackwardArgs<A> args{};
    args.dy = pointer<const void>(dy);
    args.dsum = pointer<const void>(dsum);
    args.x = pointer<const void>(x);
    args.weight = pointer<const void>(weight);
    args.stats = pointer<const A>(stats);
    args.dx = pointer<void>(dx);
    args.narrow = narrow_dtype ? pointer<void>(narrow) : nullptr;
    args.narrow_bfloat = narrow_dtype == ScalarType::BFloat16;
    args.rows = s.rows;
    args.wide_weight = sizeof(X) == 2 && weight_dtype == ScalarType::Float;
    args.small_weight = small_weight;
    args.bfloat = weight_dtype == ScalarType::BFloat16;
    args.gemma = kind == kGemma && weight.has_value();
    args.stage_wide = sizeof(X) == 2 && (args.wide_weight || args.gemma);
    args.want_weight = gradients.want_weight;
    args.want_bias = want_bias;
    if (kind == kLayer ? backward<X, D, true>(args, s.n, gradients, on, x) : backward<X, D, false>(args, s.n, gradients, on, x)) return;
    SplitArgs<A> split{};
    split.x = operand(x);
    split.weight = operand(weight);
    split.dy = operand(dy);
    split.dsum = operand(dsum);
    split.dx = operand(dx);
    if (narrow_dtype) split.narrow = operand(narrow);
    split.stats = const_cast<A*>(args.stats);
    split.rows = s.rows;
    split.n = s.n;
    split.kind = static_cast<int>(kind);
    split_backward(split, gradients, on, x);
  });
  return {dx, gradients.dweight, gradients.dbias, narrow};
}

}  // namespace
}  // namespace fastlayers

STABLE_TORCH_LIBRARY_IMPL(fastlayers, CUDA, m) {
  m.impl("layer_norm_backward", TORCH_BOX(&fastlayers::layer_norm_backward));
}

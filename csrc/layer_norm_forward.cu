// layer_norm and rms_norm over the last dimensions, with or without the sum of a residual before them: forward.
//
// The stock sum is written by one kernel and read by the next. Here every tensor is read once and written once:
//
//   rows   a part of a warp, a block, or up to 16 blocks of a cluster (sm_90) hold one row in registers between the statistics
//          and the result.
//   split  for longer rows: every row is cut into pieces, and each step of the kernel above is a pass of its own.
#include "layer_norm.cuh"

namespace fastlayers {
namespace {

template <typename A>
struct ForwardArgs {
  const void *x, *residual, *weight, *bias;  // all but x may be null
  void *sum, *y;
  A* stats;  // or null
  int64_t rows;
  int n, kind;
  int lanes;      // threads of one block that share a row: a power of two up to a warp, or the whole block
  int lane_bits;  // log2 of them, up to a warp
  bool ragged;    // n is no multiple of the vector
  bool wide_weight, wide_out;  // float32, where x has 16 bits
  Type small_out;  // the type of a 16-bit result of a float32 x; none otherwise
  A eps, inverse_n;
};

// ---- statistics ---------------------------------------------------------------------------------------------------------
//
// The statistics take one pass. They are sums of deviations from an origin close to the mean: a thread takes its first element as the
// origin, the lanes of a warp the mean of the first lane, and the warps of a row the mean of the first warp. A mean far from zero then
// costs no digits, and an outlier few: the squared distance of such an origin from the mean is at most the sum of the squared
// deviations of its part. A row of p parts loses at most log2(p) bits, and none if the parts resemble each other.
//
// rms_norm uses Moments::m2 alone, for the squares.

// The reciprocal of a number of elements; 0 for none.
template <typename A>
__device__ __forceinline__ A reciprocal(A count) {
  if constexpr (std::is_same_v<A, float>) return count > A(0) ? __fdividef(1.f, count) : A(0);
  else return count > A(0) ? A(1) / count : A(0);
}

// From the sums of d and d² of deviations d from an origin.
template <typename A>
__device__ __forceinline__ Moments<A> from_deviations(A origin, A sum, A squares, A count, A inverse_count) {
  const A mean = sum * inverse_count, m2 = squares - sum * mean;
  return {count, origin + mean, m2 < A(0) ? A(0) : m2};  // NaN stays
}

// The moments of `lanes` neighbouring lanes together, which have `count` elements.
template <bool LAYER, typename A>
__device__ __forceinline__ Moments<A> merge_lanes(const Moments<A>& part, int lanes, A count, A inverse_count) {
  if constexpr (!LAYER) {
    return {count, A(0), lanes_sum(part.m2, lanes)};
  } else {
    const A origin = __shfl_sync(0xffffffffu, part.mean, 0, lanes);
    const A d = part.mean - origin;
    A sum = part.count > A(0) ? part.count * d : A(0), squares = part.m2 + sum * d;
    lanes_sum(sum, squares, lanes);
    return from_deviations(origin, sum, squares, count, inverse_count);
  }
}

// The moments of a row from those of its warps, over all blocks of its cluster. One barrier.
template <bool LAYER, bool CLUSTER, typename A>
__device__ __forceinline__ Moments<A> merge_warps(const Moments<A>& part, Moments<A>* slots, A n, A inverse_n) {
  Exchange<Moments<A>, CLUSTER> exchange{slots};
  exchange.publish(part);
  const A origin = LAYER ? slots[0].mean : A(0);
  const int count = exchange.count();
  A sum = 0, squares = 0;
#pragma unroll 1
  for (int i = threadIdx.x & 31; i < count; i += 32) {
    const Moments<A> p = slots[i];
    squares += p.m2;
    if (LAYER && p.count > A(0)) {
      const A d = p.mean - origin;
      sum += p.count * d;
      squares += p.count * d * d;
    }
  }
  if constexpr (!LAYER) return {n, A(0), lanes_sum(squares, 32)};
  lanes_sum(sum, squares, 32);
  return from_deviations(origin, sum, squares, n, inverse_n);
}

// ---- rows ---------------------------------------------------------------------------------------------------------------

constexpr int kRowThreads = 256;    // of a block: several fit an SM, and their phases overlap
constexpr int kWideThreads = 1024;  // of a block whose threads hold kWideWords each
constexpr int kWideWords = 4;

template <typename X, typename R>
using sum_t = std::conditional_t<std::is_same_v<R, float> && sizeof(X) == 2, float, X>;

template <typename R, bool WHOLE>
constexpr int most_threads(int words) {
  return words == kWideWords && WHOLE && std::is_void_v<R> ? kWideThreads : kRowThreads;
}

// Blocks that an SM should hold: the registers that this leaves a thread are those that K words of its row need.
template <typename X, typename R, bool MIXED, bool WHOLE>
constexpr int blocks_resident(int words) {
  if (MIXED || sizeof(X) == 8) return words > 4 ? 1 : 2;
  if (words > 4) return std::is_void_v<R> ? 2 : 1;
  if (most_threads<R, WHOLE>(words) == kWideThreads) return 1;
  if (!std::is_void_v<R> || !WHOLE) return words > 2 ? 3 : 4;
  return words > 2 ? 4 : 6;
}

// The words of a row that a thread has, and its single element. WHOLE: every thread has K words, and there are no single elements.
template <int V, bool WHOLE, int K, bool CLUSTER>
struct Words {
  Place at;
  bool has_single;
  int64_t first, single;  // elements of the tensor
  int step, column;       // elements from a word to the next; the first element within the row

  template <typename A>
  __device__ __forceinline__ explicit Words(const ForwardArgs<A>& a) : at(Place::find<V, !WHOLE, CLUSTER ? K : 0>(a)) {
    if constexpr (WHOLE) {  // threads past the last row repeat that
      if (at.row >= a.rows) at.row = a.rows - 1, at.start = at.row * a.n;
    }
    has_single = !WHOLE && at.single >= 0;
    first = at.start + static_cast<int64_t>(at.first) * V, single = at.row * a.n + at.single;
    step = at.stride * V, column = static_cast<int>(first - at.row * a.n);
  }
  __device__ __forceinline__ bool has(int i) const { return WHOLE || at.word(i) < at.words; }
  __device__ __forceinline__ int count() const {
    int count = WHOLE ? K * V : 0;
    if constexpr (!WHOLE) {
      unroll<K>([&](int i) { count += has(i) ? V : 0; });
      count += has_single ? 1 : 0;
    }
    return count;
  }
};

// What a thread holds of a row.
template <typename S, int V, int K>
struct Held {
  Vec<S, V> words[K];
  S single;
};

// Loads x, or writes x + residual. All loads before anything that waits for one of them.
template <typename X, typename R, int V, int K, typename A, typename W, typename S>
__device__ __forceinline__ void load_row(const ForwardArgs<A>& a, const W& words, Held<S, V, K>& held) {
  const X* x = static_cast<const X*>(a.x) + words.first;
  held.single = convert<S>(0.f);
  if constexpr (!std::is_void_v<R>) {
    Vec<X, V> loaded[K];
    Vec<R, V> added[K];
    const R* residual = static_cast<const R*>(a.residual) + words.first;
    unroll<K>([&](int i) {
      if (words.has(i)) loaded[i] = load_vec<X, V>(x + i * words.step), added[i] = load_vec<R, V>(residual + i * words.step);
    });
    if (words.has_single)
      held.single = convert<S>(convert<A>(static_cast<const X*>(a.x)[words.single]) + convert<A>(static_cast<const R*>(a.residual)[words.single]));
    S* sum = static_cast<S*>(a.sum) + words.first;
    unroll<K>([&](int i) {
      if (!words.has(i)) return;
      Vec<A, V> s = unpack<A>(loaded[i]);
      const Vec<A, V> r = unpack<A>(added[i]);
      unroll<V>([&](int j) { s.v[j] += r.v[j]; });
      held.words[i] = pack<S>(s);
      store_vec<S, V>(sum + i * words.step, held.words[i]);
    });
    if (words.has_single) static_cast<S*>(a.sum)[words.single] = held.single;
  } else {
    unroll<K>([&](int i) { if (words.has(i)) held.words[i] = load_vec<X, V>(x + i * words.step); });
    if (words.has_single) held.single = static_cast<const X*>(a.x)[words.single];
  }
}

// The sums of what a thread holds, as deviations from an origin (second), and of their squares (first).
template <bool LAYER, int V, int K, typename A, typename W, typename S>
__device__ __forceinline__ RowSums<A> add_up(const W& words, Held<S, V, K>& held, A origin) {
  A sum[2] = {}, squares[2] = {};
  unroll<K>([&](int i) {
    if (!words.has(i)) return;
    const Vec<A, V> v = unpack<A>(held.words[i]);
    unroll<V>([&](int j) {
      const A d = LAYER ? v.v[j] - origin : v.v[j];
      if constexpr (LAYER) sum[j & 1] += d;
      squares[j & 1] += d * d;
    });
  });
  if (words.has_single) {
    const A d = convert<A>(held.single) - origin;
    sum[0] += d;
    squares[0] += d * d;
  }
  unroll<K>([&](int i) { forget(held.words[i]); });
  return {squares[0] + squares[1], sum[0] + sum[1]};
}

// The moments of a row. EXACT: a result of more than 16 bits would show the digits that the origins of warps cost, so once more, from
// the mean.
template <bool LAYER, bool WHOLE, bool EXACT, int V, int K, bool CLUSTER, int SLOTS, typename A, typename W, typename S>
__device__ __forceinline__ Moments<A> row_moments(const ForwardArgs<A>& a, const W& words, Held<S, V, K>& held) {
  __shared__ Moments<A> slots[SLOTS];
  const int count = words.count(), lanes = a.lanes < 32 ? a.lanes : 32;
  const A n = static_cast<A>(a.n);
  const auto inverse = [](int elements) { return WHOLE ? A(1) / static_cast<A>(elements) : reciprocal(static_cast<A>(elements)); };
  const A origin = !LAYER ? A(0) : words.has(0) ? convert<A>(held.words[0].v[0]) : convert<A>(held.single);
  const RowSums<A> own = add_up<LAYER>(words, held, origin);
  Moments<A> part = LAYER ? from_deviations(origin, own.second, own.first, static_cast<A>(count), inverse(count))
                          : Moments<A>{A(0), A(0), own.first};
  if (!CLUSTER && a.lanes <= 32) {
    part = merge_lanes<LAYER>(part, lanes, n, a.inverse_n);
  } else {
    const int of_warp = WHOLE ? 32 * K * V : static_cast<int>(__reduce_add_sync(0xffffffffu, count));
    part = merge_lanes<LAYER>(part, 32, static_cast<A>(of_warp), inverse(of_warp));
    part = merge_warps<LAYER, CLUSTER>(part, slots, n, a.inverse_n);
  }
  if constexpr (LAYER && EXACT) {
    __shared__ RowSums<A> more_slots[SLOTS];
    RowSums<A> sums = add_up<LAYER>(words, held, part.mean);
    add_lanes<true>(sums, lanes);
    if (CLUSTER || a.lanes > 32) add_warps<true, CLUSTER>(sums, more_slots, a.lanes, 0);
    part = from_deviations(part.mean, sums.second, sums.first, n, a.inverse_n);
  }
  return part;
}

// Writes the normalised row, scaled and shifted. P: the type of weight and bias. store(i, v): writes v from element i of the tensor on.
template <typename P, bool LAYER, bool MIXED, bool WHOLE, int V, int K, typename A, typename W, typename S, typename Store>
__device__ __forceinline__ void write_row(const ForwardArgs<A>& a, const W& words, const Held<S, V, K>& held, A mean, A rstd, Store&& store) {
  const P* weight = static_cast<const P*>(a.weight);
  const P* bias = static_cast<const P*>(a.bias);
  const int kind = weight == nullptr ? kRms : a.kind;
  const auto normal = [&](A v) {
    if constexpr (!LAYER) return v * rstd;
    else return (v - mean) * rstd;
  };
  const auto scale = [&](auto r, auto w, const auto& b) {
    constexpr int N = sizeof(r) / sizeof(A);
    if constexpr (!LAYER) {
      if (kind == kGemma) {
        unroll<N>([&](int j) { w.v[j] += A(1); });
      }
      if (kind == kLlama) r = unpack<A>(pack<S>(r));
    }
    unroll<N>([&](int j) { r.v[j] = LAYER ? fma(r.v[j], w.v[j], b.v[j]) : r.v[j] * w.v[j]; });
    // Llama's product has the dtype that its factors promote to.
    if (!LAYER && MIXED && std::is_same_v<P, S> && kind == kLlama && a.wide_out) r = unpack<A>(pack<S>(r));
    return r;
  };
  constexpr int kTogether = K > 4 ? 4 : K;  // words whose weights are requested before the first is used
#pragma unroll
  for (int from = 0; from < K; from += kTogether) {
    Weights<P, V> w[kTogether], b[kTogether];
    unroll<kTogether>([&](int i) {
      w[i] = same_weights<P, V>(1.f);
      if (weight != nullptr && words.has(from + i)) w[i] = load_weights<WHOLE, P, V>(weight, words.column + (from + i) * words.step);
    });
    if constexpr (LAYER) {
      unroll<kTogether>([&](int i) {
        b[i] = same_weights<P, V>(0.f);
        if (bias != nullptr && words.has(from + i)) b[i] = load_weights<WHOLE, P, V>(bias, words.column + (from + i) * words.step);
      });
    }
    unroll<kTogether>([&](int i) {
      if (!words.has(from + i)) return;
      Vec<A, V> r = unpack<A>(held.words[from + i]);
      unroll<V>([&](int j) { r.v[j] = normal(r.v[j]); });
      r = scale(r, w[i].template values<A>(), b[i].template values<A>());
      store(words.first + (from + i) * words.step, r);
    });
  }
  if (words.has_single) {
    const int column = words.at.single;
    const Vec<A, 1> w{{weight == nullptr ? A(1) : convert<A>(weight[column])}}, b{{bias == nullptr ? A(0) : convert<A>(bias[column])}};
    store(words.single, scale(Vec<A, 1>{{normal(convert<A>(held.single))}}, w, b));
  }
}

// R: the residual's type, or void. MIXED: weight, bias and result may be float32 where x has 16 bits. WHOLE: every thread has K
// words of its row, and there are no single elements. Otherwise up to K.
template <typename X, typename R, bool LAYER, bool MIXED, bool WHOLE, int K, bool CLUSTER>
__global__ void __launch_bounds__(CLUSTER ? kRowThreads : most_threads<R, WHOLE>(K), blocks_resident<X, R, MIXED, WHOLE>(K))
    layer_norm_forward_rows(const ForwardArgs<compute_t<X>> a) {
  using A = compute_t<X>;
  constexpr int V = kVectorBytes / sizeof(X);
  constexpr int kSlots = CLUSTER ? kRowThreads / 32 * kMaxCluster : most_threads<R, WHOLE>(K) / 32;
  if constexpr (CLUSTER) this_cluster().barrier_arrive();

  const Words<V, WHOLE, K, CLUSTER> words(a);
  Held<sum_t<X, R>, V, K> held;
  load_row<X, R>(a, words, held);
  const auto moments = row_moments<LAYER, WHOLE, MIXED || (sizeof(X) > 2), V, K, CLUSTER, kSlots>(a, words, held);
  const A mean = moments.mean, rstd = rsqrt(moments.m2 * a.inverse_n + a.eps);
  if (a.stats != nullptr && words.at.first == 0 && words.at.row < a.rows) {
    a.stats[words.at.row] = LAYER ? mean : rstd;
    if (LAYER) a.stats[a.rows + words.at.row] = rstd;
  }
  const auto put = [&]<typename Out>(Out, int64_t i, const auto& v) {
    constexpr int N = sizeof(v) / sizeof(A);
    store_vec<Out, N>(static_cast<Out*>(a.y) + i, pack<Out>(v));
  };
  const auto write = [&](auto type) {
    write_row<X, LAYER, MIXED, WHOLE>(a, words, held, mean, rstd, [&](int64_t i, const auto& v) { put(type, i, v); });
  };
  // The type of a result is looked up for each word where the code for the end of a row is long. 16 bits of a float32 x are those that
  // rounding a float32 result afterwards would give.
  if constexpr (MIXED) {
    const auto put_either = [&](int64_t i, const auto& v) {
      if (a.wide_out) put(A{}, i, v);
      else put(X{}, i, v);
    };
    if (a.wide_weight) write_row<A, LAYER, MIXED, WHOLE>(a, words, held, mean, rstd, put_either);
    else write_row<X, LAYER, MIXED, WHOLE>(a, words, held, mean, rstd, put_either);
  } else if constexpr (sizeof(X) == 4 && WHOLE) {
    if (a.small_out == Type::bfloat16) write(__nv_bfloat16{});
    else if (a.small_out == Type::half) write(__half{});
    else write(X{});
  } else if (sizeof(X) == 4 && a.small_out != Type::none) {
    write_row<X, LAYER, MIXED, WHOLE>(a, words, held, mean, rstd, [&](int64_t i, const auto& v) {
      if (a.small_out == Type::bfloat16) put(__nv_bfloat16{}, i, v);
      else put(__half{}, i, v);
    });
  } else {
    write(X{});
  }
}

// ---- rows too long for a cluster ----------------------------------------------------------------------------------------

// Of rms_norm all means are 0, so that m2 adds up the squares.
template <typename A>
__global__ void __launch_bounds__(kSplitThreads) layer_norm_split_moments(const SplitArgs<A> a) {
  __shared__ Moments<A> slots[kSplitThreads / 32];
  const SplitPiece piece(a);
  Moments<A> all;
  piece.for_batches([&](int64_t e) {
    Vec<A, kBatch> v = load_batch(a.x, piece.base, e, piece.end, A(0));
    if (a.residual.data != nullptr) {
      const Vec<A, kBatch> r = load_batch(a.residual, piece.base, e, piece.end, A(0));
      unroll<kBatch>([&](int j) { v.v[j] += r.v[j]; });
      store_batch(a.sum, piece.base, e, piece.end, v);
    }
    Moments<A> batch;
    unroll<kBatch>([&](int j) { batch.count += e + j * kSplitThreads < piece.end ? A(1) : A(0); });
    if (a.layer()) batch.mean = tree_sum(v) / batch.count;
    unroll<kBatch>([&](int j) {
      v.v[j] = e + j * kSplitThreads < piece.end ? v.v[j] - batch.mean : A(0);
      v.v[j] *= v.v[j];
    });
    batch.m2 = tree_sum(v);
    all = merge(all, batch);
  });
  all = group_merge(all, slots, kSplitThreads);
  if (threadIdx.x == 0) reinterpret_cast<Moments<A>*>(a.partial)[blockIdx.x] = all;
}

template <typename A>
__global__ void __launch_bounds__(kSplitThreads) layer_norm_split_apply(const SplitArgs<A> a) {
  const SplitPiece piece(a);
  Moments<A> all;
  for (int i = threadIdx.x & 31; i < a.pieces; i += 32)
    all = merge(all, reinterpret_cast<const Moments<A>*>(a.partial)[piece.row * a.pieces + i]);
  all = lanes_merge(all, 32);
  const A mean = all.mean, rstd = rsqrt(all.m2 / static_cast<A>(a.n) + a.eps);
  if (a.stats != nullptr && piece.begin == 0 && threadIdx.x == 0) {
    a.stats[piece.row] = a.layer() ? mean : rstd;
    if (a.layer()) a.stats[a.rows + piece.row] = rstd;
  }
  const Operand& from = a.residual.data != nullptr ? a.sum : a.x;
  piece.for_batches([&](int64_t e) {
    Vec<A, kBatch> v = load_batch(from, piece.base, e, piece.end, A(0));
    const Vec<A, kBatch> w = load_batch(a.weight, 0, e, piece.end, A(1) - a.weight_offset());
    const Vec<A, kBatch> b = load_batch(a.bias, 0, e, piece.end, A(0));
    unroll<kBatch>([&](int j) { v.v[j] = (v.v[j] - mean) * rstd; });
    if (a.kind == kLlama && a.weight.data != nullptr) round_batch(from.type, v);
    unroll<kBatch>([&](int j) { v.v[j] *= w.v[j] + a.weight_offset(); });
    if (a.kind == kLlama && a.weight.type == from.type) round_batch(from.type, v);
    unroll<kBatch>([&](int j) { v.v[j] += b.v[j]; });
    store_batch(a.y, piece.base, e, piece.end, v);
  });
}

// ---- launch rules -------------------------------------------------------------------------------------------------------

struct RowLaunch {
  int threads = 0;  // of a block that share a row; 0: the row is too long
  int block = 0;    // threads of a block
  int words = 0;    // of a thread
  int cluster = 1;  // blocks that share a row
};

constexpr int kMostWords = 8;          // of a thread
// Words of a row past which kMostWords a thread pay. On an H100, bfloat16: rms_norm .94 and .98 of the copy bandwidth with 8 words
// at 1024 and 4096 columns, .92 and .97 with 4; layer_norm .90 and .95 for .92 and .966.
constexpr int64_t kManyWordsPast[] = {/* rms_norm */ 64, /* layer_norm */ 1024};
// Longer rows fill a block of kWideThreads: layer_norm and rms_norm .97 and .99 at 32768 columns for .84 and .88 over a cluster.
constexpr int64_t kWidePast = 3328;
constexpr int kSharingBlock = 128;     // threads of a block whose warps hold a row or several each

// Whether every thread of a row holds K words and nothing else.
bool is_whole(const RowLaunch& launch, int64_t words) { return words == int64_t{launch.threads} * launch.words * launch.cluster; }

// A row costs its threads an instruction for each element of a word, past the end of the row too, and as much as one more word for the
// statistics. The rule takes the words a thread with the smallest sum, the larger of equals. Few rows get more threads each, as long as
// that occupies processors that would idle.
RowLaunch row_launch(int64_t words, int64_t rows, bool ragged, bool whole, bool wide, bool layer,
                     std::initializer_list<int> built, const DeviceTraits& device) {
  RowLaunch launch;
  // A long row that fills a block of kWideThreads has one of its own.
  if (wide && words > kWidePast && words <= kWideThreads * kWideWords) {
    launch.words = kWideWords;
    launch.threads = launch.block = static_cast<int>(ceil_div(ceil_div(words, kWideWords), 32) * 32);
    return whole && !is_whole(launch, words) ? RowLaunch{} : launch;
  }
  if (const int most = std::max(built); words > kRowThreads * most) {
    launch.cluster = static_cast<int>(next_power_of_2(ceil_div(words, kRowThreads * most)));
    if (device.capability < 90 || launch.cluster > kMaxCluster) return RowLaunch{};
    launch.words = most;
    launch.threads = launch.block = static_cast<int>(ceil_div(ceil_div(words, most * launch.cluster), 32) * 32);
    return whole && !is_whole(launch, words) ? RowLaunch{} : launch;
  }
  int64_t least = INT64_MAX;
  for (const int each : built) {
    RowLaunch next;
    next.words = each;
    next.threads = row_threads(words, each);
    if (ragged) next.threads = std::max(next.threads, 16);  // up to 14 single elements, one a thread
    if (next.threads > kRowThreads || (whole && !is_whole(next, words))) continue;
    if (each == kMostWords && words <= kManyWordsPast[layer]) continue;
    const bool fills = rows * next.threads >= device.processors * int64_t{256};
    const int64_t cost = fills ? next.threads * (each + 1) : each;
    if (launch.threads != 0 && cost >= least) continue;
    least = cost;
    launch = next;
  }
  launch.block = launch.threads <= 32 ? kSharingBlock : launch.threads;
  return launch;
}

// ---- host ---------------------------------------------------------------------------------------------------------------

struct ForwardTensors {
  Tensor x, y, sum, stats;  // sum: x itself where the residual is one row
  MaybeTensor residual, weight, bias;
};

template <typename A>
void launch_split(const ForwardArgs<A>& args, const ForwardTensors& t, int64_t n, const Launch& on) {
  SplitArgs<A> split{};
  split.x = operand(t.x), split.y = operand(t.y);
  split.residual = operand(t.residual);
  if (t.residual) split.sum = operand(t.sum);
  split.weight = operand(t.weight), split.bias = operand(t.bias);
  split.stats = args.stats;
  split.rows = args.rows, split.n = n;
  split.kind = args.kind;
  split.eps = args.eps;
  set_pieces(split, on);
  const LaunchShape shape{split.rows * split.pieces, kSplitThreads};
  const Tensor partial = empty_contiguous({shape.blocks * 3}, compute_dtype(t.x), t.x);
  split.partial = pointer<A>(partial);
  launch_kernel(layer_norm_split_moments<A>, shape, on, split);
  launch_kernel(layer_norm_split_apply<A>, shape, on, split);
}

template <typename X, typename R>
void forward(ForwardArgs<compute_t<X>>& args, const ForwardTensors& tensors, int64_t n, const Launch& on) {
  using A = compute_t<X>;
  constexpr bool kAlwaysMixed = sizeof(sum_t<X, R>) != sizeof(X);
  // The words of a thread that kernels are built for, the preferred first: for whole words, for mixed types, and for all other rows.
  using Whole = Built<4, 8, 3, 2, 1>;
  using Mixed = Built<4>;
  using All = std::conditional_t<sizeof(X) == 8, Built<4>, Built<4, 8>>;
  constexpr bool kClusters = sizeof(X) != 8;  // rows of float64 that a block cannot hold are split
  const DeviceTraits& device = device_traits(on.device());
  const bool mixed = args.wide_weight || args.wide_out || kAlwaysMixed;
  const bool ragged = n % kVector<X> != 0, layer = args.kind == kLayer;
  const int64_t words = n / kVector<X>;
  RowLaunch row;
  if (sizeof(X) != 8 && !mixed && !ragged)
    row = row_launch(words, args.rows, false, true, std::is_void_v<R>, layer, list_of(Whole{}), device);
  const bool whole = row.threads != 0;
  if (!whole) row = row_launch(words, args.rows, ragged, false, false, layer, mixed ? list_of(Mixed{}) : list_of(All{}), device);
  if (row.threads == 0 || (row.cluster > 1 && !kClusters)) return launch_split(args, tensors, n, on);
  args.n = static_cast<int>(n);
  args.inverse_n = A(1) / static_cast<A>(n);
  args.ragged = ragged;
  args.lanes = row.threads;
  args.lane_bits = log2_of(row.threads);
  LaunchShape shape{ceil_div(args.rows, row.block / row.threads), row.block};
  if (row.cluster > 1) shape.blocks = args.rows * row.cluster, shape.cluster = row.cluster;
  const auto run = [&]<bool LAYER, bool MIXED, bool WHOLE>(std::bool_constant<LAYER>, std::bool_constant<MIXED>, std::bool_constant<WHOLE>,
                                                         auto built) {
    if constexpr (kClusters) {
      if (row.cluster > 1) return launch_kernel(layer_norm_forward_rows<X, R, LAYER, MIXED, WHOLE, most_of(decltype(built){}), true>, shape, on, args);
    }
    with_words(built, row.words, [&](auto k) {
      launch_kernel(layer_norm_forward_rows<X, R, LAYER, MIXED, WHOLE, k.value, false>, shape, on, args);
    });
  };
  const auto choose = [&](auto is_layer) {
    if constexpr (sizeof(X) == 2) {
      if (mixed) return run(is_layer, std::true_type{}, std::false_type{}, Mixed{});
    }
    if constexpr (!kAlwaysMixed) {
      if constexpr (sizeof(X) != 8) {
        if (whole) return run(is_layer, std::false_type{}, std::true_type{}, Whole{});
      }
      run(is_layer, std::false_type{}, std::false_type{}, All{});
    }
  };
  if (layer) choose(std::true_type{});
  else choose(std::false_type{});
}

// Checks the residual and allocates the sum.
void set_residual(ForwardTensors& t, const MaybeTensor& residual, const char* op) {
  if (!residual) return;
  const ScalarType x_dtype = t.x.scalar_type();
  check_device(t.x, *residual, op, "residual");
  check_same_sizes(t.x, *residual, op, "residual");
  check_dtype(x_dtype, residual->scalar_type(), op, "residual");
  t.sum = empty_result(t.x, residual->scalar_type());
  t.residual = dense(*residual);
}

std::tuple<Tensor, Tensor, Tensor> forward_op(const char* op, const Tensor& x, const MaybeTensor& residual, const MaybeTensor& weight,
                                              const MaybeTensor& bias, int64_t dims, double eps, int64_t kind, ScalarType dtype, bool keep) {
  const Shape s(x, dims, op);
  check_kind(kind, bias.has_value(), op);
  const ScalarType x_dtype = x.scalar_type();
  const bool small_out = x_dtype == ScalarType::Float && is_low_precision(dtype);
  if (!small_out) check_dtype(x_dtype, dtype, op, "a result");
  ForwardTensors t;
  t.x = x;
  t.weight = checked_weight(weight, x, s.n, op, "weight");
  t.bias = checked_weight(bias, x, s.n, op, "bias");
  const ScalarType weight_dtype = weight ? weight->scalar_type() : bias ? bias->scalar_type() : x_dtype;
  check_dtype(x_dtype, weight_dtype, op, "weight");
  FASTLAYERS_CHECK(!bias || bias->scalar_type() == weight_dtype, op, "expected weight and bias of one dtype");

  const Launch on(x);
  t.y = empty_result(x, dtype);
  t.stats = empty_stats(keep, kind, s, x);
  set_residual(t, residual, op);
  if (s.empty()) return {t.y, t.sum, t.stats};
  t.x = dense(x);
  dispatch_floating(x_dtype, op, [&]<typename X>(X) {
    using A = compute_t<X>;
    ForwardArgs<A> args{};
    args.x = pointer<const void>(t.x);
    args.residual = pointer<const void>(t.residual);
    args.weight = pointer<const void>(t.weight);
    args.bias = pointer<const void>(t.bias);
    args.sum = t.residual ? pointer<void>(t.sum) : nullptr;
    args.y = pointer<void>(t.y);
    args.stats = keep ? pointer<A>(t.stats) : nullptr;
    args.rows = s.rows;
    args.kind = static_cast<int>(kind);
    args.wide_weight = weight_dtype != x_dtype;
    args.wide_out = is_low_precision(x_dtype) && dtype != x_dtype;
    args.small_out = small_out ? type_of(dtype) : Type::none;
    args.eps = static_cast<A>(eps);
    if (!t.residual) return forward<X, void>(args, t, s.n, on);
    if constexpr (sizeof(X) == 2) {
      if (t.residual->scalar_type() == ScalarType::Float) return forward<X, float>(args, t, s.n, on);
    }
    forward<X, X>(args, t, s.n, on);
  });
  return {t.y, t.sum, t.stats};
}

}  // namespace
}  // namespace fastlayers

STABLE_TORCH_LIBRARY_IMPL(fastlayers, CUDA, m) {
  m.impl("layer_norm_forward", TORCH_BOX(&fastlayers::layer_norm_forward_op<fastlayers::forward_op>));
  m.impl("add_layer_norm_forward", TORCH_BOX(&fastlayers::add_layer_norm_forward_op<fastlayers::forward_op>));
}

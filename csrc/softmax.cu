// softmax and log_softmax of x·scale + mask over any dimension, forward and backward.
//
// The stock composition reads and writes the scores once for the scale, once for the mask and two to three times for the
// softmax. Here a row is read once and written once: it stays on the chip between the reduction and the result.
//
//   rows    the dimension is contiguous, and a row fits in the registers of a part of a warp or of a block. Each warp reduces its
//           part to (maximum, sum of exponentials below it), and those pairs cross warps in one exchange.
//   held    a longer row without a mask is held in the shared memory of up to 16 blocks of a cluster (sm_90), which exchange their pairs.
//   pieces  any other row is read twice, the second time from the L2 cache.
//   columns the dimension is strided: a thread owns neighbouring columns and walks down them.
//
// A row whose length is not a multiple of the vector starts anywhere in a 16-byte word ("ragged"). All tensors are contiguous and
// aligned, so element i of each lies at the same place in its word, and a row still consists of whole words except for a few elements
// at both ends. The row kernels give those elements to single threads. The other kernels read the words that cover the row and ignore
// the elements of its neighbours.
#include "common/board.cuh"
#include "softmax.cuh"

namespace fastlayers {
namespace {

constexpr int kRowThreads = 256;    // limit for a block that holds 8 words a thread: several fit an SM, and their phases overlap
constexpr int kWideThreads = 1024;  // limit for a block that holds up to 4 words a thread
// Blocks that an SM should hold, which leaves a thread the registers for K words of its row. A masked row is held in float32, with its
// mask beside it.
template <bool MASKED>
constexpr int blocks_resident(int words) { return MASKED ? (words > 2 ? 2 : 4) : words > 4 ? 2 : words > 2 ? 1 : 6; }
template <bool MASKED>
constexpr int most_threads(int words) { return !MASKED && words > 2 && words <= 4 ? kWideThreads : kRowThreads; }
constexpr int kMaxWarps = kWideThreads / 32;
constexpr int kMaskDims = 4;

// Calls whose rows in registers have one kernel: float64, and masks of log_softmax or with a result wider than x.
template <typename In, typename Out, bool LOG, bool MASKED>
constexpr bool kRare = sizeof(In) == 8 || (MASKED && (LOG || !std::is_same_v<In, Out>));
// Calls whose longer rows have a kernel in shared memory. Of the others every long row is read in pieces: each of three passes over what is
// held would contain all kinds of masks, and be the largest kernel of all.
template <typename In, bool MASKED>
constexpr bool kHolds = sizeof(In) < 8 && !MASKED;
// Columns with loops of full length.
template <typename In, typename Out, bool LOG>
constexpr int kColumnUnroll = kRare<In, Out, LOG, true> ? 1 : 4;

enum class MaskKind : int { none, boolean, same_dtype, float32 };

// A mask that broadcasts to the rows: an offset for each row from its outer indices, and a step along the row.
struct Mask {
  const void* data = nullptr;
  MaskKind kind = MaskKind::none;
  int dims = 0;
  int64_t size[kMaskDims] = {}, stride[kMaskDims] = {};
  Divider divider[kMaskDims];  // by those sizes, if there are few enough rows
  bool divides = false;
  int64_t step = 0;

  __device__ int64_t row_offset(int64_t row) const {
    int64_t offset = 0;
#pragma unroll
    for (int d = kMaskDims - 1; d >= 0; --d) {
      if (d >= dims) continue;
      const int64_t next = d == 0 ? 0 : divides ? divider[d].quotient(static_cast<uint32_t>(row)) : row / size[d];
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
  bool ragged;       // n is not a multiple of the vector
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

// ---- what a row adds up, and what comes of it ----------------------------------------------------------------------------

// The terms that the backward sums over a row: g·p for softmax, with the gradient g of the result p, and g for log_softmax.
template <bool LOG, typename A, typename T, int V>
__device__ __forceinline__ Vec<A, V> sum_terms(const Vec<T, V>& g, const Vec<T, V>& p) {
  Vec<A, V> r = unpack<A>(g);
  if constexpr (!LOG) {
    const Vec<A, V> pa = unpack<A>(p);
    unroll<V>([&](int j) { r.v[j] *= pa.v[j]; });
  }
  return r;
}

// The gradient of x from the row's sum.
template <bool LOG, bool FAST, typename A, typename T, int V>
__device__ __forceinline__ Vec<A, V> score_gradient(const Vec<T, V>& g, const Vec<T, V>& p, A sum, A scale) {
  const Vec<A, V> ga = unpack<A>(g), pa = unpack<A>(p);
  Vec<A, V> r;
  unroll<V>([&](int j) {
    if constexpr (LOG) r.v[j] = ga.v[j] - exponential<FAST>(pa.v[j]) * sum;
    else r.v[j] = pa.v[j] * (ga.v[j] - sum);
    r.v[j] *= scale;
  });
  return r;
}

// Turns t = score - maximum into the result: t - log(sum), or exp(t) / sum.
template <typename A, bool LOG, bool FAST>
struct Finish {
  A sum, last, correction;

  // `rescale`: exponentials given to divide() are relative to a maximum lower than the row's by log(rescale).
  __device__ explicit Finish(const Pair<A>& row, A rescale = A(1))
      : sum(row.s), last(LOG ? logarithm<FAST>(row.s) : quotient(rescale, row.s)), correction(!FAST && rescale == A(1) ? last : A(0)) {}

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

// Calls f with the function v -> exp(v·scale - base). If FAST, it is one multiply-add and one exp2 for a base that leaves 16-bit
// results their precision: the error is that of float32 at v and base.
constexpr float kFoldable = 256.f;

template <bool FAST, typename A, typename F>
__device__ __forceinline__ void with_exponential(A scale, A base, F&& f) {
  if constexpr (FAST) {
    if (fabsf(base) < kFoldable) {
      const float factor = scale * kLog2E, offset = base * kLog2E;
      return f([=](float v) { return exp2_fast(fmaf(v, factor, -offset)); });
    }
  }
  f([=](A v) { return exponential<FAST>(v * scale - base); });
}

// Calls f with the function from a value to its result, in a row with maximum and sum `all`. If FAST, the exponent includes the quotient
// by the sum.
template <bool LOG, bool FAST, typename A, typename F>
__device__ __forceinline__ void with_result(A scale, const Pair<A>& all, F&& f) {
  if constexpr (FAST && !LOG) {
    if (fabsf(all.m) < kFoldable) {
      const float factor = scale * kLog2E, offset = all.m * kLog2E + __log2f(all.s);
      return f([=](float v) { return exp2_fast(fmaf(v, factor, -offset)); });
    }
  }
  const Finish<A, LOG, FAST> finish(all);
  f([=](A v) { return finish(v * scale - all.m); });
}

// ---- one row in registers -----------------------------------------------------------------------------------------------

// One element's score with its mask.
template <typename In, typename A>
__device__ __forceinline__ A masked(A score, const Mask& mask, int64_t offset) {
  if (mask.kind == MaskKind::boolean) return static_cast<const bool*>(mask.data)[offset] ? score : minus_infinity<A>();
  if (mask.kind == MaskKind::float32) return score + static_cast<A>(static_cast<const float*>(mask.data)[offset]);
  return score + convert<A>(static_cast<const In*>(mask.data)[offset]);
}

template <typename A, typename M, int V>
__device__ __forceinline__ auto unpack_mask(const Vec<M, V>& m) {
  if constexpr (std::is_same_v<M, bool>) return m;
  else return unpack<A>(m);
}

// Calls apply(i, m) for K words of a mask, after loading all of them. element(i) is the place of word i in the row, or kNoWord. Unless
// `whole`, a word may begin before the row and end after it. One test decides whether the mask is read in words: the words of a thread
// are whole multiples of the vector apart, and with a test for each word its load would have to arrive before the next one starts.
constexpr int64_t kNoWord = INT64_MIN;

template <typename M, int K, int V, typename Element, typename Apply>
__device__ __forceinline__ void with_mask(const Mask& mask, int64_t offset, int64_t n, bool whole, Element&& element, Apply&& apply) {
  const M* p = static_cast<const M*>(mask.data) + offset;
  Vec<M, V> m[K];
  if (whole && mask.step == 1 && reinterpret_cast<uintptr_t>(p + element(0)) % sizeof(m[0]) == 0) {
    unroll<K>([&](int i) {
      if (element(i) != kNoWord) m[i] = load_vec<M, V>(p + element(i));
    });
    unroll<K>([&](int i) {
      if (element(i) != kNoWord) apply(i, unpack_mask<compute_t<M>>(m[i]));
    });
    return;
  }
  unroll<K>([&](int i) {
    const int64_t e = element(i);
    m[i] = filled<M, V>(M{});
    if (e == kNoWord) return;
    unroll<V>([&](int j) {
      if (whole || (e + j >= 0 && e + j < n)) m[i].v[j] = p[(e + j) * mask.step];
    });
  });
  unroll<K>([&](int i) {
    if (element(i) != kNoWord) apply(i, unpack_mask<compute_t<M>>(m[i]));
  });
}

// scores = loaded·scale + mask, and minus infinity where there is no word and outside of the row.
template <typename In, typename A, int K, int V, typename Element>
__device__ __forceinline__ void to_scores(Vec<A, V> (&scores)[K], const Vec<In, V> (&loaded)[K], A scale, const Mask& mask,
                                          int64_t offset, int64_t n, bool whole, Element&& element) {
  unroll<K>([&](int i) { scores[i] = filled<A, V>(minus_infinity<A>()); });
  const auto add = [&](int i, const auto& m) {
    const Vec<A, V> x = unpack<A>(loaded[i]);
    const int64_t e = element(i);
    unroll<V>([&](int j) {
      if (!whole && (e + j < 0 || e + j >= n)) return;
      if constexpr (std::is_same_v<std::decay_t<decltype(m)>, Vec<bool, V>>) {
        if (m.v[j]) scores[i].v[j] = x.v[j] * scale;
      } else {
        scores[i].v[j] = x.v[j] * scale + static_cast<A>(m.v[j]);
      }
    });
  };
  if (mask.kind == MaskKind::boolean) with_mask<bool, K, V>(mask, offset, n, whole, element, add);
  else if (sizeof(In) == 2 && mask.kind == MaskKind::float32) with_mask<float, K, V>(mask, offset, n, whole, element, add);
  else with_mask<In, K, V>(mask, offset, n, whole, element, add);
}

// Zeroes the gradient where a boolean mask is False.
template <typename A, int V>
__device__ __forceinline__ void drop_masked(Vec<A, V>& r, const Mask& mask, int64_t offset, int64_t e, int64_t n, bool whole) {
  with_mask<bool, 1, V>(mask, offset, n, whole, [&](int) { return e; }, [&](int, const Vec<bool, V>& m) {
    unroll<V>([&](int j) {
      if (!m.v[j]) r.v[j] = A(0);
    });
  });
}

template <typename In, typename Out, int K, bool LOG, bool MASKED>
__global__ void __launch_bounds__(most_threads<MASKED>(K), blocks_resident<MASKED>(K)) softmax_forward_rows(const ForwardArgs<compute_t<In>> a) {
  using A = compute_t<In>;
  constexpr int V = kVector<In>;
  constexpr bool FAST = sizeof(Out) == 2;
  __shared__ Pair<A> slots[kMaxWarps];
  Exchange<Pair<A>, false> exchange{slots};

  const Place at = Place::find<V>(a);
  const In* row = static_cast<const In*>(a.x) + at.row * a.row_stride;
  const In* x = row + (at.start - at.row * a.n);
  // All loads come before the first instruction that waits for one of them.
  Vec<In, V> loaded[K];
  unroll<K>([&](int i) {
    loaded[i] = filled<In, V>(convert<In>(minus_infinity<A>()));
    if (at.word(i) < at.words) loaded[i] = load_vec<In, V>(x + at.word(i) * V);
  });
  In loaded_single = convert<In>(minus_infinity<A>());
  if (at.single >= 0) loaded_single = row[at.single];

  // A masked row is held as scores. Another row is held as loaded, but negated if the scale is negative, so that the largest value has
  // the largest score.
  using Held = std::conditional_t<MASKED, A, In>;
  Vec<Held, V> held[K];
  Vec<A, 1> single{{minus_infinity<A>()}};  // a score
  A to_score = A(1);
  if constexpr (MASKED) {
    const int64_t offset = at.row < a.rows ? a.mask.row_offset(at.row) : 0;
    to_scores(held, loaded, a.scale, a.mask, offset, a.n, true,
              [&](int i) { return at.word(i) < at.words ? (x - row) + at.word(i) * V : kNoWord; });
    if (at.single >= 0) single.v[0] = masked<In>(convert<A>(loaded_single) * a.scale, a.mask, offset + at.single * a.mask.step);
  } else {
    unroll<K>([&](int i) { held[i] = loaded[i]; });
    to_score = a.scale;
    if (a.scale < A(0)) {
      to_score = -a.scale;
      unroll<K>([&](int i) {
        if (at.word(i) < at.words) held[i] = negated(held[i]);
      });
    }
    if (at.single >= 0) single.v[0] = convert<A>(loaded_single) * a.scale;
  }

  const int lanes = a.lanes < 32 ? a.lanes : 32;
  const A m = lanes_max(maximum(convert<A>(largest(held)) * to_score, single.v[0]), lanes);
  const A base = finite_or_zero(m);
  A s = 0;
  Vec<A, V> e[K];  // exponentials relative to the warp's maximum; for log_softmax they only add up
  with_exponential<FAST>(to_score, base, [&](auto exp_of) {
    unroll<K>([&](int i) {
      e[i] = unpack<A>(held[i]);
      unroll<V>([&](int j) { e[i].v[j] = exp_of(e[i].v[j]); });
      s += tree_sum(e[i]);
    });
  });
  if (a.ragged) s += exponential<FAST>(single.v[0] - base);
  const Pair<A> all = row_merge<FAST, false>(Pair<A>{m, lanes_sum(s, lanes)}, exchange, a.lanes);
  if constexpr (LOG) {
    unroll<K>([&](int i) { forget(held[i]); });
  }

  Out* y = static_cast<Out*>(a.y) + at.start;
  const Finish<A, LOG, FAST> finish(all, LOG ? A(1) : exponential<FAST>(m - all.m));
  unroll<K>([&](int i) {
    const int word = at.word(i);
    if (word >= at.words) return;
    if constexpr (LOG) e[i] = unpack<A>(held[i]);
    unroll<V>([&](int j) { e[i].v[j] = LOG ? finish(e[i].v[j] * to_score - all.m) : finish.divide(e[i].v[j]); });
    store_vec<Out, V>(y + word * V, pack<Out>(e[i]));
  });
  if (at.single >= 0)
    static_cast<Out*>(a.y)[at.row * a.n + at.single] =
        convert<Out>(LOG ? finish(single.v[0] - all.m) : finish.divide(exponential<FAST>(single.v[0] - base)));
}

// dx = scale·y·(dy - sum(y·dy)), for log_softmax scale·(dy - exp(y)·sum(dy)), and 0 where a boolean mask is False.
template <typename In, typename Out, int K, bool LOG, bool MASKED>
__global__ void __launch_bounds__(kRowThreads, 2) softmax_backward_rows(const BackwardArgs<compute_t<In>> a) {
  using A = compute_t<In>;
  constexpr int V = kVector<In>;
  constexpr bool FAST = sizeof(In) == 2;
  __shared__ A slots[kMaxWarps];
  Exchange<A, false> exchange{slots};

  const Place at = Place::find<V>(a);
  const Out* dy = static_cast<const Out*>(a.dy);
  const Out* y = static_cast<const Out*>(a.y);

  Vec<Out, V> g[K], p[K];
  unroll<K>([&](int i) {
    g[i] = p[i] = filled<Out, V>(convert<Out>(0.f));
    if (at.word(i) < at.words) {
      g[i] = load_vec<Out, V>(dy + at.start + at.word(i) * V);
      p[i] = load_vec<Out, V>(y + at.start + at.word(i) * V);
    }
  });
  Vec<Out, 1> single_g = filled<Out, 1>(convert<Out>(0.f)), single_p = single_g;
  if (at.single >= 0) {
    single_g.v[0] = dy[at.row * a.n + at.single];
    single_p.v[0] = y[at.row * a.n + at.single];
  }
  [[maybe_unused]] unsigned kept[K];  // a bit an element
  [[maybe_unused]] bool kept_single = true;
  if constexpr (MASKED) {
    const int64_t offset = at.row < a.rows ? a.mask.row_offset(at.row) : 0;
    with_mask<bool, K, V>(
        a.mask, offset, a.n, true, [&](int i) { return at.word(i) < at.words ? at.start - at.row * a.n + at.word(i) * V : kNoWord; },
        [&](int i, const Vec<bool, V>& m) {
          kept[i] = 0;
          unroll<V>([&](int j) { kept[i] |= static_cast<unsigned>(m.v[j]) << j; });
        });
    if (at.single >= 0) kept_single = static_cast<const bool*>(a.mask.data)[offset + at.single * a.mask.step];
  }

  A s = sum_terms<LOG, A>(single_g, single_p).v[0];
  unroll<K>([&](int i) { s += tree_sum(sum_terms<LOG, A>(g[i], p[i])); });
  s = row_sum<false>(lanes_sum(s, a.lanes < 32 ? a.lanes : 32), exchange, a.lanes);
  unroll<K>([&](int i) { forget(g[i]), forget(p[i]); });

  In* dx = static_cast<In*>(a.dx);
  const A scale = a.scale;
  unroll<K>([&](int i) {
    const int word = at.word(i);
    if (word >= at.words) return;
    Vec<A, V> r = score_gradient<LOG, FAST, A>(g[i], p[i], s, scale);
    if constexpr (MASKED) {
      unroll<V>([&](int j) {
        if (!(kept[i] >> j & 1)) r.v[j] = A(0);
      });
    }
    store_vec<In, V>(dx + at.start + word * V, pack<In>(r));
  });
  if (at.single >= 0) {
    const Vec<A, 1> r = score_gradient<LOG, FAST, A>(single_g, single_p, s, scale);
    dx[at.row * a.n + at.single] = convert<In>(kept_single ? r.v[0] : A(0));
  }
}

// ---- a row in the shared memory of a cluster, see softmax.cuh -------------------------------------------------------------

template <typename In, typename Out, bool LOG>
__global__ void __launch_bounds__(kHeldThreads, 3) softmax_forward_held(const ForwardArgs<compute_t<In>> a, int each) {
  using A = compute_t<In>;
  constexpr int V = kVector<In>;
  constexpr bool FAST = sizeof(Out) == 2;
  extern __shared__ __align__(16) char memory[];
  __shared__ Pair<A> slots[kHeldThreads / 32 * kMaxCluster];
  Exchange<Pair<A>, true> exchange{slots};
  exchange.arrive();
  const Share<V> at = Share<V>::find(a.n, a.n, each, a.ragged);
  const In* x = static_cast<const In*>(a.x) + at.row * a.row_stride + at.start;
  Vec<In, V>* held = reinterpret_cast<Vec<In, V>*>(memory);
  at.for_words([&](int w) { copy_async<kVectorBytes>(held + w, x + w * V); });
  await_copies();

  // The row is used as loaded, but negated if the scale is negative, so that the largest value has the largest score.
  const In lowest = convert<In>(minus_infinity<A>());
  const A to_score = a.scale < A(0) ? -a.scale : a.scale;
  const auto values = [&](int w) {
    Vec<In, V> v = held[w];
    if (a.scale < A(0)) v = negated(v);
    if (a.ragged) blank_neighbours(v, at.start + w * V, a.n, lowest);
    return v;
  };
  Vec<In, V> best[1] = {filled<In, V>(lowest)};
  at.for_words([&](int w) { best[0] = maxima(best[0], values(w)); });
  const A m = lanes_max(convert<A>(largest(best)) * to_score, 32), base = finite_or_zero(m);
  A s = 0;
  with_exponential<FAST>(to_score, base, [&](auto exp_of) {
    at.for_words([&](int w) {
      Vec<A, V> e = unpack<A>(values(w));
      unroll<V>([&](int j) { e.v[j] = exp_of(e.v[j]); });
      s += tree_sum(e);
    });
  });
  const Pair<A> all = row_merge<FAST, true>(Pair<A>{m, lanes_sum(s, 32)}, exchange, kHeldThreads);
  Out* y = static_cast<Out*>(a.y) + at.row * a.n;
  with_result<LOG, FAST>(to_score, all, [&](auto result) {
    at.for_words([&](int w) {
      Vec<A, V> v = unpack<A>(values(w));
      unroll<V>([&](int j) { v.v[j] = result(v.v[j]); });
      const int64_t e = at.start + w * V;
      if (a.ragged) store_word(y + e, e, a.n, pack<Out>(v));
      else store_vec<Out, V>(y + e, pack<Out>(v));
    });
  });
}

template <typename In, typename Out, bool LOG>
__global__ void __launch_bounds__(kHeldThreads, 3) softmax_backward_held(const BackwardArgs<compute_t<In>> a, int each) {
  using A = compute_t<In>;
  constexpr int V = kVector<Out>;
  extern __shared__ __align__(16) char memory[];
  __shared__ A slots[kHeldThreads / 32 * kMaxCluster];
  Exchange<A, true> exchange{slots};
  exchange.arrive();
  const Share<V> at = Share<V>::find(a.n, a.n, each, a.ragged);
  const int64_t start = at.row * a.n + at.start;
  const Out* dy = static_cast<const Out*>(a.dy) + start;
  const Out* y = static_cast<const Out*>(a.y) + start;
  Vec<Out, V>* g = reinterpret_cast<Vec<Out, V>*>(memory);
  Vec<Out, V>* p = g + each;
  at.for_words([&](int w) {
    copy_async<kVectorBytes>(g + w, dy + w * V);
    copy_async<kVectorBytes>(p + w, y + w * V);
  });
  await_copies();
  A s = 0;
  at.for_words([&](int w) {
    Vec<A, V> terms = sum_terms<LOG, A>(g[w], p[w]);
    if (a.ragged) blank_neighbours(terms, at.start + w * V, a.n, A(0));
    s += tree_sum(terms);
  });
  s = row_sum<true>(lanes_sum(s, 32), exchange, kHeldThreads);
  In* dx = static_cast<In*>(a.dx) + at.row * a.n;
  at.for_words([&](int w) {
    const int64_t e = at.start + w * V;
    const Vec<A, V> r = score_gradient<LOG, sizeof(In) == 2, A>(g[w], p[w], s, a.scale);
    if (a.ragged) store_word(dx + e, e, a.n, pack<In>(r));
    else store_vec<In, V>(dx + e, pack<In>(r));
  });
}

// ---- a row in pieces ----------------------------------------------------------------------------------------------------
//
// A long row that no cluster holds is read twice: by blocks that each reduce a piece of it, and by blocks that each write a piece. The grid
// has both kinds in the order in which they can run: the blocks that reduce a row come `lag` rows before those that write it. Blocks
// start in the order of their indices, so a block only waits for blocks that started before it. With this lag they have nearly always
// ended while the row is still in the L2 cache, so memory is read once.

constexpr int kPieceThreads = 256;
// Words of each operand, a thread, at a time: a masked row is held in float32, its mask beside it. What clusters leave of log_softmax and of
// results wider than x is not worth the code for more.
template <typename In, typename Out, bool LOG, bool MASKED>
constexpr int kPieceWords = MASKED ? 2 : LOG || sizeof(In) == 8 || !std::is_same_v<In, Out> ? 4 : 8;
constexpr int kMostPieces = 1024;  // of a row: every block that writes adds up the partials of all

// Hints to the L2 cache: to keep a word for the second read, or to evict it before others.
__device__ __forceinline__ uint64_t keep_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint64_t drop_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

template <typename T, int N>
__device__ __forceinline__ Vec<T, N> load_hinted(const T* p, uint64_t policy) {
  static_assert(sizeof(Vec<T, N>) == sizeof(uint4));
  uint4 w;
  asm volatile("ld.global.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
               : "l"(p), "l"(policy));
  Vec<T, N> v;
  memcpy(&v, &w, sizeof(v));
  return v;
}

template <typename T, int N>
__device__ __forceinline__ void store_hinted(T* p, const Vec<T, N>& v, uint64_t policy) {
  if constexpr (sizeof(v) % sizeof(uint4) == 0) {
    unroll<static_cast<int>(sizeof(v) / sizeof(uint4))>([&](int i) {
      const uint4 w = reinterpret_cast<const uint4*>(&v)[i];
      asm volatile("st.global.L2::cache_hint.v4.b32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(reinterpret_cast<uint4*>(p) + i), "r"(w.x),
                   "r"(w.y), "r"(w.z), "r"(w.w), "l"(policy));
    });
  } else {
    *reinterpret_cast<Vec<T, N>*>(p) = v;
  }
}

// One piece of one row, for a block that reduces it or writes it.
struct Piece {
  int64_t row, start;  // of its first word in the row, in elements; in a ragged row 0 to -(V - 1) for the first
  int words;
  int index;           // among those of the row
  bool writes;

  template <int V>
  __device__ static Piece find(int64_t rows, int64_t n, int pieces, int64_t lag, bool ragged) {
    Piece p;
    const int64_t lead = lag * pieces, both = (rows - lag) * pieces * 2;
    int64_t i = blockIdx.x;  // of the piece among those of all rows
    p.writes = i >= lead + both || (i >= lead && (i - lead) % 2 == 1);
    if (i >= lead + both) i -= lead + both / 2;
    else if (i >= lead) i = (i - lead) / 2 + (p.writes ? 0 : lead);
    p.row = i / pieces;
    p.index = static_cast<int>(i - p.row * pieces);
    const int head = ragged ? static_cast<int>((p.row * n) & (V - 1)) : 0;
    const int64_t words = (n + head + V - 1) / V, each = (words + pieces - 1) / pieces, first = p.index * each;
    p.start = first * V - head;
    p.words = static_cast<int>(max(int64_t{0}, min(each, words - first)));
    return p;
  }

  // Calls f(first) for K words of each thread at a time, of which the i-th is first + i·kPieceThreads; at least once.
  template <int K, typename F>
  __device__ __forceinline__ void for_words(F&& f) const {
    int begin = 0;
    do f(begin + static_cast<int>(threadIdx.x));
    while ((begin += kPieceThreads * K) < words);
  }
};

template <typename A, bool FAST>
struct ForwardPartial {
  using Type = Pair<A>;
  __device__ static Type nothing() { return {minus_infinity<A>(), A(0)}; }
  __device__ static Type combine(Type p, Type q) { return merge<FAST>(p, q); }
  __device__ static Type combine_lanes(Type p) { return lanes_merge<FAST>(p, 32); }
};

template <typename A>
struct BackwardPartial {
  struct Type {
    A sum, unused;  // of whole 8-byte words
  };
  __device__ static Type nothing() { return {A(0), A(0)}; }
  __device__ static Type combine(Type p, Type q) { return {p.sum + q.sum, A(0)}; }
  __device__ static Type combine_lanes(Type p) { return {lanes_sum(p.sum, 32), A(0)}; }
};

// The sum of the partials of a row. The first warp adds them up in their order, for the whole block.
template <typename Row>
__device__ __forceinline__ typename Row::Type gather_partials(const BoardWord* board, const Piece& at, int pieces) {
  using Type = typename Row::Type;
  constexpr int kWords = Message<Type>::kWords;
  __shared__ Type total;
  if (threadIdx.x < 32) {
    Type all = Row::nothing();
#pragma unroll 4
    for (int i = threadIdx.x; i < pieces; i += 32) all = Row::combine(all, Message<Type>::await(board + (at.row * pieces + i) * kWords));
    all = Row::combine_lanes(all);
    if (threadIdx.x == 0) total = all;
  }
  __syncthreads();
  return total;
}

template <typename In, typename Out, bool LOG, bool MASKED>
__global__ void __launch_bounds__(kPieceThreads, MASKED ? 2 : 3)
    softmax_forward_pieces(const ForwardArgs<compute_t<In>> a, int pieces, int64_t lag, BoardWord* board) {
  using A = compute_t<In>;
  constexpr int V = kVector<In>, K = kPieceWords<In, Out, LOG, MASKED>;
  constexpr bool FAST = sizeof(Out) == 2;
  using Row = ForwardPartial<A, FAST>;
  const Piece at = Piece::find<V>(a.rows, a.n, pieces, lag, a.ragged);
  const In* x = static_cast<const In*>(a.x) + at.row * a.row_stride + at.start;
  const int64_t mask_offset = MASKED ? a.mask.row_offset(at.row) : 0;
  const A to_score = MASKED ? A(1) : a.scale < A(0) ? -a.scale : a.scale;
  using Held = std::conditional_t<MASKED, A, In>;
  const Held lowest = convert<Held>(minus_infinity<A>());
  const uint64_t drop = drop_policy(), policy = at.writes ? drop : keep_policy();
  Pair<A> mine = Row::nothing(), all;
  bool gathered = false;
  at.for_words<K>([&](int first) {
    const auto has = [&](int i) { return first + i * kPieceThreads < at.words; };
    const auto element = [&](int i) { return (first + i * kPieceThreads) * V; };
    Vec<In, V> loaded[K];
    unroll<K>([&](int i) {
      loaded[i] = filled<In, V>(convert<In>(minus_infinity<A>()));
      if (has(i)) loaded[i] = load_hinted<In, V>(x + element(i), policy);
    });
    Vec<Held, V> held[K];
    if constexpr (MASKED) {
      to_scores(held, loaded, a.scale, a.mask, mask_offset, a.n, !a.ragged,
                [&](int i) { return has(i) ? at.start + element(i) : kNoWord; });
    } else {
      unroll<K>([&](int i) {
        held[i] = loaded[i];
        if (!has(i)) return;
        if (a.scale < A(0)) held[i] = negated(held[i]);
        if (a.ragged) blank_neighbours(held[i], at.start + element(i), a.n, lowest);
      });
    }
    if (!at.writes) {
      const A m = lanes_max(convert<A>(largest(held)) * to_score, 32);
      A s = 0;
      with_exponential<FAST>(to_score, finite_or_zero(m), [&](auto exp_of) {
        unroll<K>([&](int i) {
          forget(held[i]);
          Vec<A, V> e = unpack<A>(held[i]);
          unroll<V>([&](int j) { e.v[j] = exp_of(e.v[j]); });
          s += tree_sum(e);
        });
      });
      mine = merge<FAST>(mine, Pair<A>{m, s});
      return;
    }
    if (!gathered) all = gather_partials<Row>(board, at, pieces);
    gathered = true;
    Out* y = static_cast<Out*>(a.y) + at.row * a.n;
    with_result<LOG, FAST>(to_score, all, [&](auto result) {
      unroll<K>([&](int i) {
        if (!has(i)) return;
        forget(held[i]);
        Vec<A, V> v = unpack<A>(held[i]);
        unroll<V>([&](int j) { v.v[j] = result(v.v[j]); });
        const int64_t e = at.start + element(i);
        if (e >= 0 && e + V <= a.n) store_hinted<Out, V>(y + e, pack<Out>(v), drop);
        else store_word(y + e, e, a.n, pack<Out>(v));
      });
    });
  });
  if (at.writes) return;
  __shared__ Pair<A> slots[kPieceThreads / 32];
  Exchange<Pair<A>, false> exchange{slots};
  mine = row_merge<FAST, false>(Pair<A>{mine.m, lanes_sum(mine.s, 32)}, exchange, kPieceThreads);
  using Sent = Message<Pair<A>>;
  if (threadIdx.x == 0) Sent::publish({canonical(mine.m), canonical(mine.s)}, board + (at.row * pieces + at.index) * Sent::kWords);
}

template <typename In, typename Out, bool LOG, bool MASKED>
__global__ void __launch_bounds__(kPieceThreads, 2)
    softmax_backward_pieces(const BackwardArgs<compute_t<In>> a, int pieces, int64_t lag, BoardWord* board) {
  using A = compute_t<In>;
  constexpr int V = kVector<Out>, K = kPieceWords<In, Out, LOG, MASKED>;
  using Row = BackwardPartial<A>;
  const Piece at = Piece::find<V>(a.rows, a.n, pieces, lag, a.ragged);
  const int64_t start = at.row * a.n + at.start;
  const Out* dy = static_cast<const Out*>(a.dy) + start;
  const Out* y = static_cast<const Out*>(a.y) + start;
  const int64_t mask_offset = MASKED ? a.mask.row_offset(at.row) : 0;
  const uint64_t drop = drop_policy(), policy = at.writes ? drop : keep_policy();
  A mine = 0, sum = 0;
  bool gathered = false;
  at.for_words<K>([&](int first) {
    const auto has = [&](int i) { return first + i * kPieceThreads < at.words; };
    const auto element = [&](int i) { return (first + i * kPieceThreads) * V; };
    Vec<Out, V> g[K], p[K];
    unroll<K>([&](int i) {
      g[i] = p[i] = filled<Out, V>(convert<Out>(0.f));
      if (has(i)) {
        g[i] = load_hinted<Out, V>(dy + element(i), policy);
        p[i] = load_hinted<Out, V>(y + element(i), policy);
      }
    });
    if (!at.writes) {
      unroll<K>([&](int i) {
        Vec<A, V> terms = sum_terms<LOG, A>(g[i], p[i]);
        if (a.ragged && has(i)) blank_neighbours(terms, at.start + element(i), a.n, A(0));
        mine += tree_sum(terms);
      });
      return;
    }
    if (!gathered) sum = gather_partials<Row>(board, at, pieces).sum;
    gathered = true;
    In* dx = static_cast<In*>(a.dx) + at.row * a.n;
    unroll<K>([&](int i) {
      if (!has(i)) return;
      const int64_t e = at.start + element(i);
      Vec<A, V> r = score_gradient<LOG, sizeof(In) == 2, A>(g[i], p[i], sum, a.scale);
      if constexpr (MASKED) drop_masked(r, a.mask, mask_offset, e, a.n, !a.ragged);
      if (e >= 0 && e + V <= a.n) store_hinted<In, V>(dx + e, pack<In>(r), drop);
      else store_word(dx + e, e, a.n, pack<In>(r));
    });
  });
  if (at.writes) return;
  __shared__ A slots[kPieceThreads / 32];
  Exchange<A, false> exchange{slots};
  mine = row_sum<false>(lanes_sum(mine, 32), exchange, kPieceThreads);
  using Sent = Message<typename Row::Type>;
  if (threadIdx.x == 0) Sent::publish({canonical(mine), A(0)}, board + (at.row * pieces + at.index) * Sent::kWords);
}

// ---- columns ------------------------------------------------------------------------------------------------------------

struct ColumnArgs {
  const void* x;   // forward: x. backward: dy
  const void* y;   // backward: y
  void* out;
  int64_t n, inner;
  int across, down;  // threads over the columns, and down them; their product is at most kColumnThreads
  double scale;
};

// The V columns of a thread: their first element in the tensor, and the first row.
struct Columns {
  int64_t base;
  int first;
  bool active;

  template <int V>
  __device__ __forceinline__ static Columns find(const ColumnArgs& a) {
    const int64_t tiles = (a.inner + static_cast<int64_t>(a.across) * V - 1) / (static_cast<int64_t>(a.across) * V);
    const int64_t column = ((blockIdx.x % tiles) * a.across + threadIdx.x % a.across) * V;
    return {blockIdx.x / tiles * a.n * a.inner + column, static_cast<int>(threadIdx.x / a.across), column < a.inner};
  }
};

template <bool FAST, typename A, int V>
__device__ __forceinline__ Pair<A> extend(Pair<A> p, const Vec<A, V>& v) {
  A m = p.m;
  unroll<V>([&](int j) { m = maximum(m, v.v[j]); });
  const A base = finite_or_zero(m);
  Vec<A, V> e;
  unroll<V>([&](int j) { e.v[j] = exponential<FAST>(v.v[j] - base); });
  return {m, p.s * exponential<FAST>(p.m - base) + tree_sum(e)};
}

template <typename In, typename Out, int V, bool LOG>
__global__ void __launch_bounds__(kColumnThreads) softmax_forward_columns(const ColumnArgs a) {
  using A = compute_t<In>;
  constexpr bool FAST = sizeof(Out) == 2;
  extern __shared__ char memory[];
  const Columns at = Columns::find<V>(a);
  const In* __restrict__ x = static_cast<const In*>(a.x) + at.base;
  const A scale = static_cast<A>(a.scale);

  Pair<A> p[V];
  unroll<V>([&](int j) { p[j] = {minus_infinity<A>(), A(0)}; });
  if (at.active) {
#pragma unroll (kColumnUnroll<In, Out, LOG>)
    for (int64_t i = at.first; i < a.n; i += a.down) {
      const Vec<In, V> w = load_vec<In, V>(x + i * a.inner);
      unroll<V>([&](int j) { p[j] = extend<FAST>(p[j], Vec<A, 1>{{convert<A>(w.v[j]) * scale}}); });
    }
  }
  combine_down(p, reinterpret_cast<Pair<A>*>(memory), a, [](Pair<A> u, Pair<A> v) { return merge<FAST>(u, v); });
  if (!at.active) return;
  Out* __restrict__ y = static_cast<Out*>(a.out) + at.base;
  A last[V];
  unroll<V>([&](int j) { last[j] = Finish<A, LOG, FAST>(p[j]).last; });
#pragma unroll (kColumnUnroll<In, Out, LOG>)
  for (int64_t i = at.first; i < a.n; i += a.down) {
    const Vec<In, V> w = load_vec<In, V>(x + i * a.inner);
    Vec<Out, V> r;
    unroll<V>([&](int j) {
      r.v[j] = convert<Out>(Finish<A, LOG, FAST>(p[j].s, last[j])(convert<A>(w.v[j]) * scale - p[j].m));
    });
    store_vec<Out, V>(y + i * a.inner, r);
  }
}

template <typename In, typename Out, int V, bool LOG>
__global__ void __launch_bounds__(kColumnThreads) softmax_backward_columns(const ColumnArgs a) {
  using A = compute_t<In>;
  extern __shared__ char memory[];
  const Columns at = Columns::find<V>(a);
  const Out* __restrict__ dy = static_cast<const Out*>(a.x) + at.base;
  const Out* __restrict__ y = static_cast<const Out*>(a.y) + at.base;

  A s[V] = {};
  if (at.active) {
#pragma unroll (kColumnUnroll<In, Out, LOG>)
    for (int64_t i = at.first; i < a.n; i += a.down) {
      const Vec<Out, V> g = load_vec<Out, V>(dy + i * a.inner);
      const Vec<Out, V> p = LOG ? g : load_vec<Out, V>(y + i * a.inner);  // the sum of log_softmax does not need y
      const Vec<A, V> terms = sum_terms<LOG, A>(g, p);
      unroll<V>([&](int j) { s[j] += terms.v[j]; });
    }
  }
  combine_down(s, reinterpret_cast<A*>(memory), a, [](A u, A v) { return u + v; });
  if (!at.active) return;
  In* __restrict__ dx = static_cast<In*>(a.out) + at.base;
  const A scale = static_cast<A>(a.scale);
#pragma unroll (kColumnUnroll<In, Out, LOG>)
  for (int64_t i = at.first; i < a.n; i += a.down) {
    const Vec<Out, V> g = load_vec<Out, V>(dy + i * a.inner), p = load_vec<Out, V>(y + i * a.inner);
    const Vec<A, V> ga = unpack<A>(g), pa = unpack<A>(p);
    Vec<A, V> r;
    unroll<V>([&](int j) {
      r.v[j] = score_gradient<LOG, sizeof(In) == 2, A>(Vec<A, 1>{{ga.v[j]}}, Vec<A, 1>{{pa.v[j]}}, s[j], scale).v[0];
    });
    store_vec<In, V>(dx + i * a.inner, pack<In>(r));
  }
}

// ---- launch rules -------------------------------------------------------------------------------------------------------

// How the threads that hold a row in registers share its 16-byte words.
struct RowLaunch {
  int threads;  // of a block that share the row
  int block;    // threads of a block
  int words;    // held by each thread
};

// More words in flight hide more latency, and more threads for a row cost more exchange. A short row gets few words a thread, so that
// enough blocks are resident, and a long row as many as fit, `most`. A masked row gets more, because each thread spends time to find its
// mask. Of the words that kernels are built for, in ascending order, it takes the next. From a warp on, a row gets only the warps that it fills.
RowLaunch row_launch(int64_t words, std::initializer_list<int> built, bool ragged, bool masked) {
  const int most = std::max(built);
  const auto next_built = [&](int64_t wanted) { return *std::find_if(built.begin(), built.end() - 1, [&](int k) { return k >= wanted; }); };
  const int target = words <= 32 ? 1 : words <= 128 && !masked ? 2 : words <= 1024 || words > kRowThreads * most ? 4 : most;
  int64_t threads = ceil_div(words, next_built(target));
  if (ragged) threads = std::max<int64_t>(threads, 16);  // up to 14 single elements, one a thread
  RowLaunch launch{};
  launch.threads = static_cast<int>(threads <= 32 ? next_power_of_2(threads) : ceil_div(threads, 32) * 32);
  launch.block = launch.threads > 32 ? launch.threads : masked ? 64 : 128;  // masked: .88 for .86 of the bandwidth with 128
  launch.words = next_built(ceil_div(words, launch.threads));
  return launch;
}

// Whether a row of that many words is held in registers: by a small block with up to `most` words a thread or, in the unmasked forward
// (`wide`), by a block of 832 to 1024 threads. On an H100 the bfloat16 forward reaches .95 and 1.00 of the copy bandwidth at 28672 and
// 32768 columns, and .93 and .98 from shared memory; at 20480 and 24576 columns it reaches .86 and .94, and .92 and .94.
bool in_registers(int64_t words, int most, bool wide) {
  return words <= kRowThreads * most || (wide && words > 3328 && words <= 4 * kWideThreads);
}

// Launches a kernel of pieces whose partials have type Partial. `ahead`: the blocks of an SM that reduce rows before they are written.
template <int WORDS, typename Partial, typename Args>
void launch_pieces(void (*kernel)(Args, int, int64_t, BoardWord*), const Args& args, int64_t words, double ahead, const Launch& launch,
                   const Tensor& like) {
  const int64_t pieces = std::min<int64_t>(kMostPieces, ceil_div(words, WORDS * kPieceThreads));
  const auto lead = static_cast<int64_t>(ahead * device_traits(launch.device()).processors);
  const int64_t lag = std::min(args.rows, ceil_div(lead, pieces));
  const Tensor board = empty_board(args.rows * pieces * Message<Partial>::kWords, like, launch);
  launch_kernel(kernel, {args.rows * pieces * 2, kPieceThreads}, launch, args, static_cast<int>(pieces), lag, pointer<BoardWord>(board));
}

// Launches the kernel that holds a row in registers, kernel_of(words a thread), if the row fits with one of the kernels built.
template <typename Words, typename Args, typename KernelOf>
bool launch_in_registers(Words built, Args& args, int vector, bool wide, bool masked, const Launch& launch, KernelOf&& kernel_of) {
  const int64_t words = args.n / vector;
  args.ragged = args.n % vector != 0;
  if (!in_registers(words, std::max(list_of(built)), wide)) return false;
  const RowLaunch shape = row_launch(words, list_of(built), args.ragged, masked);
  args.lanes = shape.threads;
  args.lane_bits = log2_of(shape.threads);
  with_words(built, shape.words, [&](auto k) {
    kernel_of(k)<<<grid_of(ceil_div(args.rows, shape.block / shape.threads)), shape.block, 0, launch.stream()>>>(args);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return true;
}

// ---- host ---------------------------------------------------------------------------------------------------------------

Shape shape_of(const Tensor& x, int64_t dim, const char* op) {
  const auto sizes = x.sizes();
  FASTLAYERS_CHECK(dim >= 0 && dim < static_cast<int64_t>(sizes.size()), op, "dim ", dim, " is out of range for a tensor of ",
                   static_cast<int64_t>(sizes.size()), " dimensions");
  Shape s;
  for (int64_t d = 0; d < static_cast<int64_t>(sizes.size()); ++d) (d < dim ? s.outer : d == dim ? s.n : s.inner) *= sizes[d];
  return s;
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

// If the mask broadcasts over too many dimensions, it is copied to `keep`.
Mask make_mask(const Tensor& mask, const Dims& sizes, ScalarType x_dtype, const char* op, Tensor& keep) {
  Mask m;
  const ScalarType dtype = mask.scalar_type();
  m.data = mask.const_data_ptr();
  m.kind = dtype == ScalarType::Bool ? MaskKind::boolean
           : dtype == x_dtype        ? MaskKind::same_dtype
           : dtype == ScalarType::Float && x_dtype != ScalarType::Double ? MaskKind::float32
                                     : MaskKind::none;
  FASTLAYERS_CHECK(m.kind != MaskKind::none, op, "expected a mask of bool, float32 or x's dtype ", toString(x_dtype), ", but got ",
                   toString(dtype));
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
  int64_t rows = 1;
  for (int d = 0; d < m.dims; ++d) rows *= m.size[d];
  m.divides = rows <= INT32_MAX;
  for (int d = 0; m.divides && d < m.dims; ++d) m.divider[d] = Divider(static_cast<uint32_t>(m.size[d]));
  return m;
}

template <typename In, typename Out, bool LOG, bool MASKED>
void forward_rows(ForwardArgs<compute_t<In>>& args, const Launch& launch, const Tensor& like) {
  constexpr int V = kVector<In>;
  constexpr bool kSame = std::is_same_v<In, Out>;
  using Masked = std::conditional_t<sizeof(In) == 2, Built<1, 4>, Built<1, 4, 8>>;  // a masked row is held in float32
  using Unmasked = std::conditional_t<!kSame, Built<2, 8>, std::conditional_t<LOG, Built<2, 4, 8>, Built<1, 2, 4, 8>>>;
  using Words = std::conditional_t<kRare<In, Out, LOG, MASKED>, Built<4>, std::conditional_t<MASKED, Masked, Unmasked>>;
  const auto kernel_of = [](auto k) { return &softmax_forward_rows<In, Out, k.value, LOG, MASKED>; };
  if (launch_in_registers(Words{}, args, V, !MASKED && kSame, MASKED, launch, kernel_of)) return;
  const int64_t words = words_covered(args.n, args.ragged, V);
  if constexpr (kHolds<In, MASKED>) {
    if (launch_held<softmax_forward_held<In, Out, LOG>>(args, words, kVectorBytes, launch)) return;
  }
  launch_pieces<kPieceWords<In, Out, LOG, MASKED>, Pair<compute_t<In>>>(softmax_forward_pieces<In, Out, LOG, MASKED>, args, words, 2.0, launch,
                                                                       like);
}

template <typename In, typename Out, bool LOG, bool MASKED>
void backward_rows(BackwardArgs<compute_t<In>>& args, const Launch& launch, const Tensor& like) {
  constexpr int V = kVector<Out>;
  using Unmasked = std::conditional_t<!std::is_same_v<In, Out>, Built<1, 4>, std::conditional_t<LOG, Built<2, 4, 8>, Built<1, 2, 4, 8>>>;
  using Words = std::conditional_t<kRare<In, Out, LOG, MASKED>, Built<(sizeof(In) == sizeof(Out) ? 4 : 2)>,
                                   std::conditional_t<MASKED, Built<1, 2, 4>, Unmasked>>;
  const auto kernel_of = [](auto k) { return &softmax_backward_rows<In, Out, k.value, LOG, MASKED>; };
  if (launch_in_registers(Words{}, args, kVector<In>, false, false, launch, kernel_of)) return;
  const int64_t words = words_covered(args.n, args.ragged, V);
  if constexpr (kHolds<In, MASKED>) {
    if (launch_held<softmax_backward_held<In, Out, LOG>>(args, words, 2 * kVectorBytes, launch)) return;
  }
  using Partial = typename BackwardPartial<compute_t<In>>::Type;
  launch_pieces<kPieceWords<In, Out, LOG, MASKED>, Partial>(softmax_backward_pieces<In, Out, LOG, MASKED>, args, words, 1.0, launch, like);
}

// Launches the kernel for a strided dimension, with or without vectors. Slot: what the threads of a column exchange.
template <typename In, typename Slot>
void launch_columns(void (*vectors)(ColumnArgs), void (*elements)(ColumnArgs), ColumnArgs args, const Shape& s, const Launch& launch) {
  const ColumnLaunch shape = column_launch(s, kVector<In>);
  args.n = s.n;
  args.inner = s.inner;
  args.across = shape.across;
  args.down = shape.down;
  const int threads = shape.across * shape.down;
  const size_t shared = shape.down == 1 ? 0 : sizeof(Slot) * threads * shape.vector;
  launch_kernel(shape.vector > 1 ? vectors : elements, {shape.blocks, threads, shared}, launch, args);
}

void check_last_dim(const MaybeTensor& mask, int64_t dim, const Tensor& x, const char* op) {
  FASTLAYERS_CHECK(!mask, op, "a mask is supported over the last dimension only, but dim is ", dim, " of ", x.dim());
}

template <bool LOG>
Tensor forward_op(const Tensor& x_in, const MaybeTensor& mask, int64_t dim, double scale, ScalarType dtype) {
  const char* op = LOG ? "log_softmax" : "softmax";
  const Shape s = shape_of(x_in, dim, op);
  const Launch launch(x_in);
  Tensor y = empty_result(x_in, dtype);
  if (s.outer * s.n * s.inner == 0) return y;
  const bool rows = s.inner == 1 && dim + 1 == x_in.dim();
  if (!rows) check_last_dim(mask, dim, x_in, op);
  dispatch_pair(x_in.scalar_type(), dtype, op, [&](auto in, auto out) {
    using In = decltype(in);
    using Out = decltype(out);
    using A = compute_t<In>;
    const std::optional<int64_t> stride = rows ? row_stride(x_in, kVector<In>) : std::nullopt;
    const Tensor x = stride ? x_in : dense(x_in);
    if (!rows) {
      const ColumnArgs args{x.const_data_ptr(), nullptr, y.mutable_data_ptr(), 0, 0, 0, 0, scale};
      return launch_columns<In, Pair<A>>(softmax_forward_columns<In, Out, kVector<In>, LOG>, softmax_forward_columns<In, Out, 1, LOG>,
                                         args, s, launch);
    }
    ForwardArgs<A> args{x.const_data_ptr(), y.mutable_data_ptr(), s.outer, s.n, stride.value_or(s.n), static_cast<A>(scale), 0, 0, false, {}};
    if (!mask) return forward_rows<In, Out, LOG, false>(args, launch, x);
    Tensor keep;
    args.mask = make_mask(*mask, dims_of(x.sizes()), x.scalar_type(), op, keep);
    forward_rows<In, Out, LOG, true>(args, launch, x);
  });
  return y;
}

template <bool LOG>
Tensor backward_op(const Tensor& dy_in, const Tensor& y_in, const MaybeTensor& mask, int64_t dim, double scale, ScalarType dtype) {
  const char* op = LOG ? "log_softmax_backward" : "softmax_backward";
  check_same_shape(y_in, dy_in, op, "dy");
  const Shape s = shape_of(y_in, dim, op);
  const Launch launch(y_in);
  Tensor dx = empty_result(y_in, dtype);
  if (s.outer * s.n * s.inner == 0) return dx;
  const Tensor dy = dense(dy_in), y = dense(y_in);
  const bool rows = s.inner == 1 && dim + 1 == y.dim();
  if (!rows) check_last_dim(mask, dim, y, op);
  dispatch_pair(dtype, y.scalar_type(), op, [&](auto in, auto out) {
    using In = decltype(in);
    using Out = decltype(out);
    using A = compute_t<In>;
    if (!rows) {
      const ColumnArgs args{dy.const_data_ptr(), y.const_data_ptr(), dx.mutable_data_ptr(), 0, 0, 0, 0, scale};
      return launch_columns<In, A>(softmax_backward_columns<In, Out, kVector<In>, LOG>, softmax_backward_columns<In, Out, 1, LOG>, args, s,
                                   launch);
    }
    BackwardArgs<A> args{dy.const_data_ptr(), y.const_data_ptr(), dx.mutable_data_ptr(), s.outer, s.n, static_cast<A>(scale), 0, 0, false, {}};
    if (!mask) return backward_rows<In, Out, LOG, false>(args, launch, y);
    Tensor keep;
    args.mask = make_mask(*mask, dims_of(y.sizes()), y.scalar_type(), op, keep);
    FASTLAYERS_CHECK(args.mask.kind == MaskKind::boolean, op, "expected a boolean mask");
    backward_rows<In, Out, LOG, true>(args, launch, y);
  });
  return dx;
}

Tensor softmax_forward(const Tensor& x, int64_t dim, double scale, const MaybeTensor& mask, ScalarType dtype, bool log) {
  return log ? forward_op<true>(x, mask, dim, scale, dtype) : forward_op<false>(x, mask, dim, scale, dtype);
}

Tensor softmax_backward(const Tensor& dy, const Tensor& y, int64_t dim, double scale, const MaybeTensor& mask, ScalarType dtype, bool log) {
  return log ? backward_op<true>(dy, y, mask, dim, scale, dtype) : backward_op<false>(dy, y, mask, dim, scale, dtype);
}

}  // namespace
}  // namespace fastlayers

STABLE_TORCH_LIBRARY_IMPL(fastlayers, CUDA, m) {
  m.impl("softmax_forward", TORCH_BOX(&fastlayers::softmax_forward));
  m.impl("softmax_backward", TORCH_BOX(&fastlayers::softmax_backward));
}

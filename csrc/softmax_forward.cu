// softmax and log_softmax of x·scale + mask over any dimension: forward. softmax.cuh has the ways to go through a row.
#include "softmax.cuh"

namespace fastlayers {
namespace {

// Blocks that an SM should hold, which leaves a thread the registers for K words of its row. A masked row is held in float32, with its
// mask beside it.
template <bool MASKED>
constexpr int blocks_resident(int words) { return MASKED ? (words > 2 ? 2 : 4) : words > 4 ? 2 : words > 2 ? 1 : 6; }
template <bool MASKED>
constexpr int most_threads(int words) { return !MASKED && words > 2 && words <= 4 ? kWideThreads : kRowThreads; }

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

// ---- what a row adds up, and what comes of it ----------------------------------------------------------------------------

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

// ---- a row in the shared memory of a cluster, see logits.cuh --------------------------------------------------------------

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

// ---- a row in pieces, see softmax.cuh -------------------------------------------------------------------------------------

template <typename A, bool FAST>
struct ForwardPartial {
  using Type = Pair<A>;
  __device__ static Type nothing() { return {minus_infinity<A>(), A(0)}; }
  __device__ static Type combine(Type p, Type q) { return merge<FAST>(p, q); }
  __device__ static Type combine_lanes(Type p) { return lanes_merge<FAST>(p, 32); }
};

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

// ---- columns ------------------------------------------------------------------------------------------------------------

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

// ---- host ---------------------------------------------------------------------------------------------------------------

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

template <bool LOG>
Tensor forward_op(const Tensor& x_in, const MaybeTensor& mask, int64_t dim, double scale, ScalarType dtype) {
  const char* op = LOG ? "log_softmax" : "softmax";
  const Shape s(x_in, dim, op);
  const Launch launch(x_in);
  Tensor y = empty_result(x_in, dtype);
  if (s.numel() == 0) return y;
  const bool rows = s.inner == 1 && dim + 1 == x_in.dim();
  if (!rows) check_last_dim(mask, dim, x_in, op);
  dispatch_pair(x_in.scalar_type(), dtype, op, [&]<typename In, typename Out>(In, Out) {
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

Tensor softmax_forward(const Tensor& x, int64_t dim, double scale, const MaybeTensor& mask, ScalarType dtype, bool log) {
  return log ? forward_op<true>(x, mask, dim, scale, dtype) : forward_op<false>(x, mask, dim, scale, dtype);
}

}  // namespace
}  // namespace fastlayers

STABLE_TORCH_LIBRARY_IMPL(fastlayers, CUDA, m) { m.impl("softmax_forward", TORCH_BOX(&fastlayers::softmax_forward)); }

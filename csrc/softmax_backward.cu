// softmax and log_softmax of x·scale + mask over any dimension: backward, from the result and its gradient. softmax.cuh has the ways to go
// through a row.
#include "softmax.cuh"

namespace fastlayers {
namespace {

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

// Zeroes the gradient where a boolean mask is False.
template <typename A, int V>
__device__ __forceinline__ void drop_masked(Vec<A, V>& r, const Mask& mask, int64_t offset, int64_t e, int64_t n, bool whole) {
  with_mask<bool, 1, V>(mask, offset, n, whole, [&](int) { return e; }, [&](int, const Vec<bool, V>& m) {
    unroll<V>([&](int j) {
      if (!m.v[j]) r.v[j] = A(0);
    });
  });
}

// ---- one row in registers -----------------------------------------------------------------------------------------------

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

// ---- a row in the shared memory of a cluster, see logits.cuh --------------------------------------------------------------

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

// ---- a row in pieces, see softmax.cuh -------------------------------------------------------------------------------------

template <typename A>
struct BackwardPartial {
  struct Type {
    A sum, unused;  // of whole 8-byte words
  };
  __device__ static Type nothing() { return {A(0), A(0)}; }
  __device__ static Type combine(Type p, Type q) { return {p.sum + q.sum, A(0)}; }
  __device__ static Type combine_lanes(Type p) { return {lanes_sum(p.sum, 32), A(0)}; }
};

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

// ---- host ---------------------------------------------------------------------------------------------------------------

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

template <bool LOG>
Tensor backward_op(const Tensor& dy_in, const Tensor& y_in, const MaybeTensor& mask, int64_t dim, double scale, ScalarType dtype) {
  const char* op = LOG ? "log_softmax_backward" : "softmax_backward";
  check_same_shape(y_in, dy_in, op, "dy");
  const Shape s(y_in, dim, op);
  const Launch launch(y_in);
  Tensor dx = empty_result(y_in, dtype);
  if (s.numel() == 0) return dx;
  const Tensor dy = dense(dy_in), y = dense(y_in);
  const bool rows = s.inner == 1 && dim + 1 == y.dim();
  if (!rows) check_last_dim(mask, dim, y, op);
  dispatch_pair(dtype, y.scalar_type(), op, [&]<typename In, typename Out>(In, Out) {
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

Tensor softmax_backward(const Tensor& dy, const Tensor& y, int64_t dim, double scale, const MaybeTensor& mask, ScalarType dtype, bool log) {
  return log ? backward_op<true>(dy, y, mask, dim, scale, dtype) : backward_op<false>(dy, y, mask, dim, scale, dtype);
}

}  // namespace
}  // namespace fastlayers

STABLE_TORCH_LIBRARY_IMPL(fastlayers, CUDA, m) { m.impl("softmax_backward", TORCH_BOX(&fastlayers::softmax_backward)); }

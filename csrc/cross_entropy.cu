// cross_entropy of logits and classes, forward and backward.
//
// The stock composition writes log_softmax(logits), reads one element of each row, and keeps all of it for a backward that reads it and
// writes as much. Here the forward reads the logits once and keeps two numbers for each row, whose sum is lse = log(sum(exp(scores))):
// the maximum, and the logarithm of the sum relative to it. With lse alone, the difference to a large score would lose digits. The
// backward needs no reduction: it reads the logits once and writes their gradient. fastlayers/ops/cross_entropy.py has the formulas.
//
//   rows     classes are contiguous: a part of a warp or a block goes along a row, and each thread keeps a running (maximum, sum of
//            exponentials relative to it). If there are few rows, they are cut into pieces, whose partials a second kernel merges.
//            Rows may begin anywhere in a 16-byte word and have any stride: a thread reads the words that cover a row and ignores the
//            elements of its neighbours.
//   columns  classes are strided: a thread owns neighbouring columns and walks down them.
//   held     a chunk of linear_cross_entropy: losses and gradients in one kernel that holds each row in the shared memory of a
//            cluster and writes the gradient over the logits.
//
// PLAIN kernels have neither softcap nor label smoothing, which cost registers. The others do all that float64 asks for. Ignored rows are not read.
#include <cassert>

#include "softmax.cuh"

namespace fastlayers {
namespace {

constexpr int kThreads = 256;
constexpr int kWarpWords = 512;          // a row of up to so many words gets a warp or less
constexpr int kLaneWords = 2;            // words of a lane in a row that gets less than a warp
constexpr int kFewRows = 4;              // longer rows of an SM: if there are fewer, they are cut into pieces,
constexpr int kPieceBlocks = 8;          // for so many blocks of an SM
constexpr int64_t kMostClasses = 1 << 30;  // places in a row are 32 bits

// Words of a row that a thread loads before it uses the first one, and blocks of an SM, which leave a thread the registers for them.
template <typename T, bool PLAIN>
constexpr int kForwardWords = PLAIN && sizeof(T) < 8 ? 8 : 4;
constexpr int kBackwardWords = 4;
template <typename T, bool PLAIN>
constexpr int kForwardBlocks = sizeof(T) == 8 ? 2 : PLAIN ? 3 : 4;
template <typename T, bool PLAIN>
constexpr int kBackwardBlocks = sizeof(T) == 8 ? 2 : PLAIN ? 5 : 3;
template <typename T>
constexpr int kHeldBlocks = sizeof(T) == 8 ? 2 : 3;
template <typename T, bool PLAIN>
constexpr int kColumnBlocks = sizeof(T) == 8 ? 2 : 3;
template <typename T, bool PLAIN>
constexpr int kColumnBackwardBlocks = sizeof(T) == 8 || !PLAIN ? 2 : 3;

enum class Reduction : int { none, mean, sum };

// ---- scalars of a dtype that only the host knows ------------------------------------------------------------------------

enum class Kind : int { half, bfloat16, float32, float64 };

template <typename A>
__device__ __forceinline__ A load_scalar(const void* p, int64_t i, Kind kind) {
  switch (kind) {
    case Kind::half: return convert<A>(static_cast<const __half*>(p)[i]);
    case Kind::bfloat16: return convert<A>(static_cast<const __nv_bfloat16*>(p)[i]);
    case Kind::float32: return convert<A>(static_cast<const float*>(p)[i]);
    default: return convert<A>(static_cast<const double*>(p)[i]);
  }
}

template <typename A>
__device__ __forceinline__ void store_scalar(void* p, int64_t i, Kind kind, A v) {
  switch (kind) {
    case Kind::half: static_cast<__half*>(p)[i] = convert<__half>(v); break;
    case Kind::bfloat16: static_cast<__nv_bfloat16*>(p)[i] = convert<__nv_bfloat16>(v); break;
    case Kind::float32: static_cast<float*>(p)[i] = convert<float>(v); break;
    default: static_cast<double*>(p)[i] = convert<double>(v);
  }
}

// ---- scores, losses, gradients ------------------------------------------------------------------------------------------

template <typename A>
struct Terms {
  const int64_t* target;
  const A* weight;      // of each class, or null
  const A* weight_sum;  // null without label smoothing or without a weight
  int64_t ignore_index;
  int classes;
  A smoothing, softcap, z_loss;  // softcap 0: none

  // The class of a row, or -1 if the row is ignored. Any other target stops the program, as in torch's kernels.
  __device__ __forceinline__ int target_of(int64_t row) const {
    const int64_t t = target[row];
    if (t == ignore_index) return -1;
    assert(t >= 0 && t < classes);
    return static_cast<int>(t);
  }
  __device__ __forceinline__ A weight_of(int c) const { return weight == nullptr ? A(1) : weight[c]; }
  // What smoothing adds to the gradient of a class with weight 1.
  __device__ __forceinline__ A uniform() const { return smoothing / static_cast<A>(classes); }
  __device__ __forceinline__ A all_weights() const { return weight_sum == nullptr ? static_cast<A>(classes) : *weight_sum; }
};

// softcap·tanh(v / softcap). FAST uses the hardware's exponential and reciprocal, with an error of about 1e-7 times the softcap.
template <bool FAST, typename A>
__device__ __forceinline__ A capped(A v, A softcap, A reciprocal) {
  if constexpr (FAST) return softcap * (1.f - __fdividef(2.f, 1.f + exponential<true>(2.f * v * reciprocal)));
  else return softcap * hyperbolic_tangent(v / softcap);
}

template <bool PLAIN, bool FAST, typename A>
__device__ __forceinline__ A score_of(A v, const Terms<A>& terms) {
  if constexpr (PLAIN) return v;
  else return terms.softcap == A(0) ? v : capped<FAST>(v, terms.softcap, A(1) / terms.softcap);
}

// What a row adds up: maximum and sum of exponentials, and for label smoothing the weighted sum of the scores.
template <typename A>
struct Sums {
  Pair<A> pair{minus_infinity<A>(), A(0)};
  A linear = 0;
};

// Adds up to K words of a row to its sums. element(i) is the place of word i in the row, and has(i) tells whether there is one. Unless
// `whole`, a word may begin before the row and end after its n elements.
template <bool PLAIN, bool FAST, typename T, typename A, int K, int V, typename Has, typename Element>
__device__ __forceinline__ void add_words(Sums<A>& sums, Vec<T, V> (&held)[K], int n, bool whole, const Terms<A>& terms,
                                          Has&& has, Element&& element) {
  if (!whole) {
    unroll<K>([&](int i) { blank_neighbours(held[i], element(i), n, convert<T>(minus_infinity<A>())); });
  }
  const A m = maximum(sums.pair.m, score_of<PLAIN, FAST>(convert<A>(largest(held)), terms)), base = finite_or_zero(m);
  A s = sums.pair.s * exponential<FAST>(sums.pair.m - base);
  // A test of the smoothing for each element would cost a sixth of the kernel's time.
  const auto add = [&](auto smooths, auto weighted) {
    unroll<K>([&](int i) {
      forget(held[i]);
      Vec<A, V> e = unpack<A>(held[i]);
      if constexpr (PLAIN) {
        unroll<V>([&](int j) { e.v[j] = exponential<FAST>(e.v[j] - base); });
        s += tree_sum(e);
      } else if (has(i)) {
        const int at = element(i);
        unroll<V>([&](int j) {
          const bool inside = whole || (at + j >= 0 && at + j < n);
          const A score = score_of<PLAIN, FAST>(e.v[j], terms);
          if constexpr (weighted) {
            if (inside) sums.linear += terms.weight[at + j] * score;
          } else if constexpr (smooths) {
            sums.linear += inside ? score : A(0);
          }
          e.v[j] = inside ? exponential<FAST>(score - base) : A(0);
        });
        s += tree_sum(e);
      }
    });
  };
  if (PLAIN || terms.smoothing == A(0)) {
    add(std::false_type{}, std::false_type{});
  } else if (terms.weight == nullptr) {
    add(std::true_type{}, std::false_type{});
  } else {
    add(std::true_type{}, std::true_type{});
  }
  sums.pair = {m, s};
}

// lse of a row: base + rest.
template <typename A>
struct Level {
  A base, rest;

  __device__ static Level of(const Sums<A>& all) { return {all.pair.m, logarithm<false>(all.pair.s)}; }
};

// The loss of a row whose class has this score and this weight.
template <bool PLAIN, typename A>
__device__ __forceinline__ A loss_of(const Sums<A>& all, A score, A weight, const Terms<A>& terms) {
  const Level<A> level = Level<A>::of(all);
  const A lse = level.base + level.rest;
  A loss = weight * ((level.base - score) + level.rest);
  if constexpr (!PLAIN) {
    loss *= A(1) - terms.smoothing;
    if (terms.smoothing != A(0)) loss += terms.uniform() * (terms.all_weights() * lse - all.linear);
  }
  return terms.z_loss == A(0) ? loss : loss + terms.z_loss * lse * lse;
}

// The gradient of a row: exp(score - lse)·factor, less `uniform` times the weight of each class, less `hit` at the class t.
template <bool PLAIN, bool FAST, typename A>
struct Slope {
  Level<A> level;  // FAST: base is lse, which is near enough
  A factor, uniform, hit;
  int t;

  __device__ static Slope find(Level<A> level, A scale, int t, const Terms<A>& terms) {
    const A lse = level.base + level.rest;
    if constexpr (FAST) level = {lse, A(0)};
    Slope s{level, A(0), A(0), terms.weight_of(t), t};
    if constexpr (!PLAIN) {
      s.hit *= A(1) - terms.smoothing;
      if (terms.smoothing != A(0)) {
        s.factor = terms.uniform() * terms.all_weights();
        s.uniform = terms.uniform() * scale;
      }
    }
    s.factor += s.hit;
    if (terms.z_loss != A(0)) s.factor += A(2) * terms.z_loss * lse;
    s.factor *= scale;
    s.hit *= scale;
    return s;
  }

  // The gradient of one class c with the logit v. `target`: c is t. `inside`: c has a weight.
  __device__ __forceinline__ A operator()(A v, int c, bool target, bool inside, const Terms<A>& terms) const {
    const A score = score_of<PLAIN, FAST>(v, terms);
    A d = exponential<FAST>(FAST ? score - level.base : (score - level.base) - level.rest) * factor;
    if (target) d -= hit;
    if constexpr (!PLAIN) {
      if (uniform != A(0) && inside) d -= uniform * terms.weight_of(c);
      if (terms.softcap != A(0)) {
        const A slope = score * (A(1) / terms.softcap);
        d *= A(1) - slope * slope;
      }
    }
    return d;
  }

  // The gradients of the word at element e of a row with n classes, and 0 after the classes.
  template <typename T, int V>
  __device__ __forceinline__ Vec<T, V> word(const Vec<T, V>& x, int e, int n, const Terms<A>& terms) const {
    Vec<A, V> d = unpack<A>(x);
    const int here = t >= e && t < e + V ? t - e : V;
    const bool whole = e >= 0 && e + V <= n;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const bool inside = PLAIN || whole || (e + j >= 0 && e + j < n);
      d.v[j] = (*this)(d.v[j], e + j, j == here, inside, terms);
      if (!whole && e + j >= n) d.v[j] = A(0);
    }
    return pack<T>(d);
  }
};

// ---- rows ---------------------------------------------------------------------------------------------------------------

template <typename A>
struct RowArgs {
  const void* x;
  int64_t rows, row_stride;
  int n;                   // elements of a row: classes, and in the backward of a chunk the padding after them
  int lanes, lane_bits;    // threads of a row: a power of two up to a warp, or the block
  int pieces, each;        // blocks of a row that has blocks, and the words that each of them takes
  bool whole;              // rows are whole words
  Terms<A> terms;
};

// The words of a thread: first, first + stride, ... up to words. If rows are not whole words, the first one begins up to V - 1 elements
// before the row.
struct Stand {
  int64_t row;
  int start;  // of word 0 in the row, in elements
  int first, stride, words, piece;

  template <typename T, int V, typename A>
  __device__ __forceinline__ static Stand find(const RowArgs<A>& a) {
    Stand p;
    p.stride = a.lanes;
    p.piece = 0;
    if (a.lanes <= 32) {
      p.row = static_cast<int64_t>(blockIdx.x) * (kThreads >> a.lane_bits) + (threadIdx.x >> a.lane_bits);
      p.first = threadIdx.x & (a.lanes - 1);
    } else {
      p.row = blockIdx.x / a.pieces;
      p.piece = static_cast<int>(blockIdx.x) - static_cast<int>(p.row) * a.pieces;
      p.first = threadIdx.x;
    }
    int head = 0;
    if (!a.whole) head = static_cast<int>(reinterpret_cast<uintptr_t>(static_cast<const T*>(a.x) + p.row * a.row_stride) / sizeof(T) & (V - 1));
    const int words = (a.n + head + V - 1) / V, before = p.piece * a.each;
    p.start = before * V - head;
    p.words = max(0, min(words - before, a.each));
    if (p.row >= a.rows) p.words = 0;
    return p;
  }
};

template <typename A>
struct ForwardArgs : RowArgs<A> {
  void* losses;
  Kind kind;      // of them
  A* stats;       // the bases of the levels of all rows, then the rests
  A* partials;    // (m, s, linear) of each piece, if there are several
};

// The loss and lse of one row, by one thread.
template <bool PLAIN, typename A>
__device__ __forceinline__ void finish_row(const ForwardArgs<A>& a, int64_t row, bool ignored, const Sums<A>& all, A score, A weight) {
  store_scalar(a.losses, row, a.kind, ignored ? A(0) : loss_of<PLAIN>(all, score, weight, a.terms));
  const Level<A> level = ignored ? Level<A>{A(0), A(0)} : Level<A>::of(all);
  a.stats[row] = level.base;
  a.stats[a.rows + row] = level.rest;
}

template <typename T, bool PLAIN>
__global__ void __launch_bounds__(kThreads, kForwardBlocks<T, PLAIN>) cross_entropy_rows(const ForwardArgs<compute_t<T>> a) {
  using A = compute_t<T>;
  constexpr int V = kVector<T>, K = kForwardWords<T, PLAIN>;
  constexpr bool FAST = sizeof(T) == 2;
  __shared__ Pair<A> pair_slots[kThreads / 32];
  __shared__ A slots[kThreads / 32];
  const Stand at = Stand::find<T, V>(a);
  const T* x = static_cast<const T*>(a.x) + at.row * a.row_stride;
  const int t = at.row < a.rows ? a.terms.target_of(at.row) : -1;
  const bool ignored = t < 0;
  A score = 0, weight = 0;  // of the class, which arrive while the row is read
  if (!ignored && at.first == 0) score = convert<A>(x[t]), weight = a.terms.weight_of(t);
  x += at.start;

  Sums<A> sums;
  const int words = ignored ? 0 : at.words;
  const auto take = [&](int begin, auto all) {  // all: the thread has K more words
    const auto has = [&](int i) { return decltype(all)::value || begin + i * at.stride < words; };
    Vec<T, V> held[K];
    unroll<K>([&](int i) {
      if constexpr (!decltype(all)::value) held[i] = filled<T, V>(convert<T>(minus_infinity<A>()));
      if (has(i)) held[i] = load_vec<T, V>(x + (begin + i * at.stride) * V);
    });
    add_words<PLAIN, FAST>(sums, held, a.n, a.whole, a.terms, has,
                           [&](int i) { return at.start + (begin + i * at.stride) * V; });
  };
  int begin = at.first;
#pragma unroll 1
  for (; begin + (K - 1) * at.stride < words; begin += K * at.stride) take(begin, std::true_type{});
  if (begin < words) take(begin, std::false_type{});
  Exchange<Pair<A>, false> exchange{pair_slots};
  sums.pair = row_merge<FAST, false>(lanes_merge<FAST>(sums.pair, min(a.lanes, 32)), exchange, a.lanes);
  if constexpr (!PLAIN) {
    Exchange<A, false> adding{slots};
    sums.linear = row_sum<false>(lanes_sum(sums.linear, min(a.lanes, 32)), adding, a.lanes);
  }
  if (at.first != 0 || at.row >= a.rows) return;
  if (a.pieces == 1) return finish_row<PLAIN>(a, at.row, ignored, sums, score_of<PLAIN, FAST>(score, a.terms), weight);
  A* partial = a.partials + (at.row * a.pieces + at.piece) * 3;
  partial[0] = sums.pair.m;
  partial[1] = sums.pair.s;
  partial[2] = sums.linear;
}

// The pieces of a row, added up by a warp.
template <typename T, bool PLAIN>
__global__ void __launch_bounds__(kThreads) merge_pieces(const ForwardArgs<compute_t<T>> a) {
  using A = compute_t<T>;
  constexpr bool FAST = sizeof(T) == 2;
  const int lane = threadIdx.x & 31;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + (threadIdx.x >> 5);
  if (row >= a.rows) return;
  const int t = a.terms.target_of(row);
  Sums<A> sums;
  if (t >= 0) {
    for (int i = lane; i < a.pieces; i += 32) {
      const A* partial = a.partials + (row * a.pieces + i) * 3;
      sums.pair = merge<FAST>(sums.pair, Pair<A>{partial[0], partial[1]});
      sums.linear += partial[2];
    }
  }
  sums.pair = lanes_merge<FAST>(sums.pair, 32);
  sums.linear = lanes_sum(sums.linear, 32);
  if (lane != 0) return;
  if (t < 0) return finish_row<PLAIN>(a, row, true, sums, A(0), A(0));
  const A score = score_of<PLAIN, FAST>(convert<A>(static_cast<const T*>(a.x)[row * a.row_stride + t]), a.terms);
  finish_row<PLAIN>(a, row, false, sums, score, a.terms.weight_of(t));
}

// The factor from the losses to the result: one number, or one for each row.
template <typename A>
struct Scale {
  const void* data;  // null: 1
  Kind kind;
  bool each_row;
  const A* divisor;  // of a mean, or null

  __device__ __forceinline__ A of(int64_t row) const {
    const A scale = data == nullptr ? A(1) : load_scalar<A>(data, each_row ? row : 0, kind);
    return divisor == nullptr ? scale : scale / *divisor;
  }
};

template <typename A>
struct BackwardArgs : RowArgs<A> {
  void* dx;
  int64_t dx_stride;
  bool aligned;  // every element of dx lies at the same place in its word as that of x
  const A* stats;
  Scale<A> scale;
};

template <typename T, bool PLAIN>
__global__ void __launch_bounds__(kThreads, kBackwardBlocks<T, PLAIN>) cross_entropy_backward_rows(const BackwardArgs<compute_t<T>> a) {
  using A = compute_t<T>;
  constexpr int V = kVector<T>, K = kBackwardWords;
  constexpr bool FAST = sizeof(T) == 2;
  const Stand at = Stand::find<T, V>(a);
  if (at.row >= a.rows) return;
  const T* x = static_cast<const T*>(a.x) + at.row * a.row_stride + at.start;
  T* dx = static_cast<T*>(a.dx) + at.row * a.dx_stride + at.start;
  const int t = a.terms.target_of(at.row);
  using Slopes = Slope<PLAIN, FAST, A>;
  Slopes slope{};
  if (t >= 0) slope = Slopes::find({a.stats[at.row], a.stats[a.rows + at.row]}, a.scale.of(at.row), t, a.terms);
#pragma unroll 1
  for (int begin = at.first; begin < at.words; begin += K * at.stride) {
    const auto word = [&](int i) { return begin + i * at.stride; };
    Vec<T, V> held[K];
    if (t >= 0) {
      unroll<K>([&](int i) {
        if (word(i) < at.words) held[i] = load_vec<T, V>(x + word(i) * V);
      });
    }
    unroll<K>([&](int i) {
      if (word(i) >= at.words) return;
      const int e = at.start + word(i) * V;
      Vec<T, V> d = filled<T, V>(convert<T>(A(0)));
      if (t >= 0) d = slope.word(held[i], e, a.terms.classes, a.terms);
      T* to = dx + word(i) * V;
      if (a.whole) {
        store_vec<T, V>(to, d);
      } else if (a.aligned) {
        store_word(to, e, a.n, d);
      } else {
        unroll<V>([&](int j) {
          if (e + j >= 0 && e + j < a.n) to[j] = d.v[j];
        });
      }
    });
  }
}

// ---- a chunk in the shared memory of clusters -----------------------------------------------------------------------------

template <typename A>
struct HeldArgs {
  void* x;
  int64_t rows;
  int n;            // elements of a row, classes and padding
  bool ragged;      // n is not a multiple of the vector
  A* losses;
  Scale<A> scale;
  Terms<A> terms;
};

template <typename T, bool PLAIN>
__global__ void __launch_bounds__(kHeldThreads, kHeldBlocks<T>) cross_entropy_held(const HeldArgs<compute_t<T>> a, int each) {
  using A = compute_t<T>;
  constexpr int V = kVector<T>;
  constexpr bool FAST = sizeof(T) == 2;
  extern __shared__ __align__(16) char memory[];
  __shared__ Pair<A> slots[kHeldThreads / 32 * kMaxCluster];
  __shared__ A adding_slots[kHeldThreads / 32 * kMaxCluster];
  Exchange<Pair<A>, true> exchange{slots};
  exchange.arrive();
  const Share<V> at = Share<V>::find(a.n, a.n, each, a.ragged);
  T* row = static_cast<T*>(a.x) + at.row * a.n;
  T* x = row + at.start;
  Vec<T, V>* held = reinterpret_cast<Vec<T, V>*>(memory);
  const int t = a.terms.target_of(at.row), classes = a.terms.classes, start = static_cast<int>(at.start);
  Sums<A> sums;
  A score = 0;
  if (t >= 0) {
    at.for_words([&](int w) { copy_async<kVectorBytes>(held + w, x + w * V); });
    score = score_of<PLAIN, FAST>(convert<A>(row[t]), a.terms);
    await_copies();
    const bool whole = !a.ragged && classes == a.n;
    const auto words = [&](int w) {
      Vec<T, V> v = held[w];
      if (!whole) blank_neighbours(v, start + w * V, classes, convert<T>(minus_infinity<A>()));
      return v;
    };
    Vec<T, V> best[1] = {filled<T, V>(convert<T>(minus_infinity<A>()))};
    at.for_words([&](int w) { best[0] = maxima(best[0], words(w)); });
    const A m = score_of<PLAIN, FAST>(convert<A>(largest(best)), a.terms), base = finite_or_zero(m);
    sums.pair.m = m;
    at.for_words([&](int w) {
      Vec<A, V> e = unpack<A>(words(w));
      const int first = start + w * V;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const A s = score_of<PLAIN, FAST>(e.v[j], a.terms);
        bool inside = true;
        if constexpr (!PLAIN) {
          inside = whole || (first + j >= 0 && first + j < classes);
          if (a.terms.smoothing != A(0) && inside) sums.linear += a.terms.weight_of(first + j) * s;
        }
        e.v[j] = inside ? exponential<FAST>(s - base) : A(0);
      }
      sums.pair.s += tree_sum(e);
    });
  }
  // The blocks of an ignored row exchange too: a cluster waits for all of its blocks.
  sums.pair = row_merge<FAST, true>(lanes_merge<FAST>(sums.pair, 32), exchange, kHeldThreads);
  if constexpr (!PLAIN) {
    Exchange<A, true> adding{adding_slots};
    adding.arrive();
    sums.linear = row_sum<true>(lanes_sum(sums.linear, 32), adding, kHeldThreads);
  }
  if (threadIdx.x == 0 && this_cluster().block_rank() == 0) a.losses[at.row] = t < 0 ? A(0) : loss_of<PLAIN>(sums, score, a.terms.weight_of(t), a.terms);
  using Slopes = Slope<PLAIN, FAST, A>;
  Slopes slope{};
  if (t >= 0) slope = Slopes::find(Level<A>::of(sums), a.scale.of(at.row), t, a.terms);
  at.for_words([&](int w) {
    const int e = start + w * V;
    Vec<T, V> d = filled<T, V>(convert<T>(A(0)));
    if (t >= 0) d = slope.word(held[w], e, classes, a.terms);
    if (a.ragged) store_word(row + e, e, a.n, d);
    else store_vec<T, V>(row + e, d);
  });
}

// ---- columns ------------------------------------------------------------------------------------------------------------

template <bool PLAIN>
constexpr int kStepsOf = PLAIN ? 4 : 2;  // words down the columns, loaded by a thread before the first is used
constexpr int kColumnClasses = 64;  // that a thread of the backward takes

template <typename A>
struct ColumnArgs {
  const void* x;
  void* losses;      // forward
  void* dx;          // backward
  A* stats;
  Kind kind;         // of the losses
  int64_t rows, inner;
  int n, across, down;  // threads over the columns, and down them; their product is at most kColumnThreads
  unsigned tiles;       // over the columns
  unsigned shares;      // backward: blocks over the classes
  Scale<A> scale;    // backward
  Terms<A> terms;
};

template <typename T, int V, bool PLAIN>
__global__ void __launch_bounds__(kColumnThreads, kColumnBlocks<T, PLAIN>) cross_entropy_columns(const ColumnArgs<compute_t<T>> a) {
  using A = compute_t<T>;
  constexpr int kSteps = kStepsOf<PLAIN>;
  constexpr bool FAST = sizeof(T) == 2;
  extern __shared__ __align__(16) char memory[];
  const int64_t outer = blockIdx.x / a.tiles, column = (static_cast<int64_t>(blockIdx.x % a.tiles) * a.across + threadIdx.x % a.across) * V;
  const int first = static_cast<int>(threadIdx.x) / a.across;
  const bool active = column < a.inner;
  const T* __restrict__ x = static_cast<const T*>(a.x) + outer * a.n * a.inner + column;

  Pair<A> p[V];
  A linear[V] = {};
  unroll<V>([&](int j) { p[j] = {minus_infinity<A>(), A(0)}; });
  if (active) {
#pragma unroll 1
    for (int begin = first; begin < a.n; begin += kSteps * a.down) {
      Vec<T, V> held[kSteps];
      unroll<kSteps>([&](int i) {
        held[i] = filled<T, V>(convert<T>(minus_infinity<A>()));
        if (begin + i * a.down < a.n) held[i] = load_vec<T, V>(x + static_cast<int64_t>(begin + i * a.down) * a.inner);
      });
      unroll<V>([&](int j) {
        A v[kSteps], m = p[j].m;
        unroll<kSteps>([&](int i) {
          const bool has = begin + i * a.down < a.n;
          v[i] = convert<A>(held[i].v[j]);
          if constexpr (!PLAIN) {
            if (has) v[i] = score_of<PLAIN, FAST>(v[i], a.terms);
            if (has && a.terms.smoothing != A(0)) linear[j] += a.terms.weight_of(begin + i * a.down) * v[i];
          }
          m = maximum(m, v[i]);
        });
        const A base = finite_or_zero(m);
        A s = p[j].s * exponential<FAST>(p[j].m - base);
        unroll<kSteps>([&](int i) { s += exponential<FAST>(v[i] - base); });
        p[j] = {m, s};
      });
    }
  }
  combine_down(p, reinterpret_cast<Pair<A>*>(memory), a, [](Pair<A> u, Pair<A> v) { return merge<FAST>(u, v); });
  if constexpr (!PLAIN) {
    __syncthreads();
    combine_down(linear, reinterpret_cast<A*>(memory), a, [](A u, A v) { return u + v; });
  }
  if (!active || first != 0) return;
  unroll<V>([&](int j) {
    const int64_t row = outer * a.inner + column + j;
    const int t = a.terms.target_of(row);
    const Sums<A> all{p[j], linear[j]};
    A loss = 0;
    if (t >= 0) {
      const A score = score_of<PLAIN, FAST>(convert<A>(x[t * a.inner + j]), a.terms);
      loss = loss_of<PLAIN>(all, score, a.terms.weight_of(t), a.terms);
    }
    store_scalar(a.losses, row, a.kind, loss);
    const Level<A> level = Level<A>::of(all);
    a.stats[row] = level.base;
    a.stats[a.rows + row] = level.rest;
  });
}

template <typename T, int V, bool PLAIN>
__global__ void __launch_bounds__(kColumnThreads, kColumnBackwardBlocks<T, PLAIN>) cross_entropy_backward_columns(const ColumnArgs<compute_t<T>> a) {
  using A = compute_t<T>;
  constexpr int kSteps = kStepsOf<PLAIN>;
  constexpr bool FAST = sizeof(T) == 2;
  const unsigned tile = blockIdx.x / a.shares;
  const int share = static_cast<int>(blockIdx.x - tile * a.shares);
  const int64_t outer = tile / a.tiles, column = (static_cast<int64_t>(tile % a.tiles) * a.across + threadIdx.x % a.across) * V;
  if (column >= a.inner) return;
  const int64_t base = outer * a.n * a.inner + column;
  const int last = min(a.n, (share + 1) * kColumnClasses);
  const T* x = static_cast<const T*>(a.x) + base;
  T* dx = static_cast<T*>(a.dx) + base;
  using Slopes = Slope<PLAIN, FAST, A>;
  Slopes slope[V] = {};
  unroll<V>([&](int j) {
    const int64_t row = outer * a.inner + column + j;
    const int t = a.terms.target_of(row);
    slope[j].t = -1;
    if (t >= 0) slope[j] = Slopes::find({a.stats[row], a.stats[a.rows + row]}, a.scale.of(row), t, a.terms);
  });
  const auto give = [&](int begin, auto all) {  // all: there are kSteps more classes
    const auto has = [&](int i) { return decltype(all)::value || begin + i * a.down < last; };
    Vec<T, V> held[kSteps];
    unroll<kSteps>([&](int i) {
      if (has(i)) held[i] = load_vec<T, V>(x + static_cast<int64_t>(begin + i * a.down) * a.inner);
    });
    unroll<kSteps>([&](int i) {
      if (!has(i)) return;
      const int c = begin + i * a.down;
      Vec<A, V> d = unpack<A>(held[i]);
      unroll<V>([&](int j) {
        d.v[j] = slope[j](d.v[j], c, c == slope[j].t, true, a.terms);
        if (slope[j].t < 0) d.v[j] = A(0);
      });
      store_vec<T, V>(dx + static_cast<int64_t>(c) * a.inner, pack<T>(d));
    });
  };
  int begin = share * kColumnClasses + static_cast<int>(threadIdx.x) / a.across;
#pragma unroll 1
  for (; begin + (kSteps - 1) * a.down < last; begin += kSteps * a.down) give(begin, std::true_type{});
  if (begin < last) give(begin, std::false_type{});
}

// ---- the sum of all losses ----------------------------------------------------------------------------------------------

constexpr int kSumThreads = 1024;
constexpr int kSumEach = 16;  // losses that a thread adds before another block does

// Sums over the block, to its first thread.
template <typename A>
__device__ __forceinline__ void block_sums(A& u, A& v) {
  __shared__ A slots[2][kSumThreads / 32];
  lanes_sum(u, v, 32);
  if ((threadIdx.x & 31) == 0) slots[0][threadIdx.x >> 5] = u, slots[1][threadIdx.x >> 5] = v;
  __syncthreads();
  u = slots[0][threadIdx.x & 31];
  v = slots[1][threadIdx.x & 31];
  lanes_sum(u, v, 32);
}

// Where the sum goes: the result and, for the backward, the divisor of a mean.
template <typename A>
struct Total {
  void* loss;
  Kind kind;
  bool mean;
  A* divisor;

  __device__ __forceinline__ void write(A sum, A all) const {
    store_scalar(loss, 0, kind, mean ? sum / all : sum);
    *divisor = all;
  }
};

// Sums the losses and, for a mean, the weights of their classes: (sum, divisor) for each block, or the total if there is one block.
template <typename A>
__global__ void __launch_bounds__(kSumThreads) sum_losses(const A* losses, int64_t rows, const Terms<A> terms, A* partials, const Total<A> total) {
  A sum = 0, divisor = 0;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kSumThreads;
#pragma unroll 8
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kSumThreads + threadIdx.x; i < rows; i += stride) {
    sum += losses[i];
    if (total.mean) {
      const int64_t t = terms.target[i];
      if (t != terms.ignore_index) divisor += terms.weight_of(t);
    }
  }
  block_sums(sum, divisor);
  if (threadIdx.x != 0) return;
  if (gridDim.x == 1) return total.write(sum, divisor);
  partials[2 * blockIdx.x] = sum;
  partials[2 * blockIdx.x + 1] = divisor;
}

template <typename A>
__global__ void __launch_bounds__(kSumThreads) sum_partials(const A* partials, int64_t blocks, const Total<A> total) {
  A sum = 0, divisor = 0;
  for (int64_t i = threadIdx.x; i < blocks; i += kSumThreads) sum += partials[2 * i], divisor += partials[2 * i + 1];
  block_sums(sum, divisor);
  if (threadIdx.x == 0) total.write(sum, divisor);
}

template <typename A>
__global__ void __launch_bounds__(kSumThreads) sum_weights(const A* weight, int64_t classes, A* sum) {
  A all = 0, unused = 0;
  for (int64_t i = threadIdx.x; i < classes; i += kSumThreads) all += weight[i];
  block_sums(all, unused);
  if (threadIdx.x == 0) *sum = all;
}

// ---- launch rules -------------------------------------------------------------------------------------------------------

// Gives each row a part of a warp or a block, or cuts it into pieces(words) pieces, a block each. Returns the number of blocks.
template <typename T, typename Args, typename Pieces>
int64_t share_rows(Args& args, Pieces&& pieces) {
  constexpr int V = kVector<T>;
  const int64_t words = ceil_div(args.n, V) + (args.whole ? 0 : 1);
  args.pieces = 1;
  args.each = INT32_MAX;
  args.lane_bits = 0;
  if (words <= kWarpWords) {
    args.lanes = static_cast<int>(std::min<int64_t>(32, next_power_of_2(ceil_div(words, kLaneWords))));
    args.lane_bits = log2_of(args.lanes);
    return ceil_div(args.rows, kThreads / args.lanes);
  }
  args.lanes = kThreads;
  args.each = static_cast<int>(ceil_div(words, pieces(words)));
  args.pieces = static_cast<int>(ceil_div(words, args.each));
  return args.rows * args.pieces;
}

template <typename T>
bool whole_words(const void* x, int64_t stride, int64_t n) {
  constexpr int64_t V = kVectorBytes / sizeof(T);
  return aligned(x) && stride % V == 0 && n % V == 0;
}

// Calls f(std::true_type) where there is neither softcap nor label smoothing. float64 is not worth kernels without them.
template <typename A, typename F>
void dispatch_plain(const Terms<A>& terms, F&& f) {
  if constexpr (sizeof(A) < 8) {
    if (terms.softcap == A(0) && terms.smoothing == A(0)) return f(std::true_type{});
  }
  f(std::false_type{});
}

template <typename T>
void launch_forward_rows(ForwardArgs<compute_t<T>>& args, const Launch& launch, const Tensor& like) {
  using A = compute_t<T>;
  args.whole = whole_words<T>(args.x, args.row_stride, args.n);
  const int64_t processors = device_traits(launch.device()).processors;
  const int64_t blocks = share_rows<T>(args, [&](int64_t words) {
    const int64_t wanted = args.rows < kFewRows * processors ? ceil_div(kPieceBlocks * processors, args.rows) : 1;
    return std::min(wanted, ceil_div(words, kThreads * kForwardWords<T, true>));
  });
  Tensor partials;
  if (args.pieces > 1) {
    partials = empty_contiguous({args.rows, args.pieces, 3}, compute_dtype(like), like);
    args.partials = pointer<A>(partials);
  }
  dispatch_plain(args.terms, [&](auto plain) {
    cross_entropy_rows<T, plain.value><<<grid_of(blocks), kThreads, 0, launch.stream()>>>(args);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
    if (args.pieces == 1) return;
    const unsigned warps = grid_of(ceil_div(args.rows, kThreads / 32));
    merge_pieces<T, plain.value><<<warps, kThreads, 0, launch.stream()>>>(args);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

template <typename T>
void launch_backward_rows(BackwardArgs<compute_t<T>>& args, const Launch& launch) {
  constexpr int64_t V = kVectorBytes / sizeof(T);
  args.whole = whole_words<T>(args.x, args.row_stride, args.n) && whole_words<T>(args.dx, args.dx_stride, args.n);
  const auto distance = reinterpret_cast<uintptr_t>(args.x) - reinterpret_cast<uintptr_t>(args.dx);
  args.aligned = distance % kVectorBytes == 0 && (args.row_stride - args.dx_stride) % V == 0;
  const int64_t blocks = share_rows<T>(args, [&](int64_t words) { return ceil_div(words, kThreads * kBackwardWords); });
  dispatch_plain(args.terms, [&](auto plain) {
    cross_entropy_backward_rows<T, plain.value><<<grid_of(blocks), kThreads, 0, launch.stream()>>>(args);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

// Calls f(ColumnLaunch, std::integral_constant<int, V>, plain) for the columns kernels.
template <typename T, typename F>
void with_columns(ColumnArgs<compute_t<T>>& args, const Shape& s, bool is_aligned, F&& f) {
  constexpr int kVector = kVectorBytes / sizeof(T);
  const ColumnLaunch shape = column_launch(s, is_aligned ? kVector : 1);
  args.across = shape.across;
  args.down = shape.down;
  args.tiles = static_cast<unsigned>(ceil_div(s.inner, static_cast<int64_t>(shape.across) * shape.vector));
  dispatch_plain(args.terms, [&](auto plain) {
    if (shape.vector > 1) f(shape, std::integral_constant<int, kVector>{}, plain);
    else f(shape, std::integral_constant<int, 1>{}, plain);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

// ---- host ---------------------------------------------------------------------------------------------------------------

Kind kind_of(ScalarType dtype, const char* op) {
  switch (dtype) {
    case ScalarType::Half: return Kind::half;
    case ScalarType::BFloat16: return Kind::bfloat16;
    case ScalarType::Float: return Kind::float32;
    case ScalarType::Double: return Kind::float64;
    default: FASTLAYERS_CHECK(false, op, "expected a floating dtype, but got ", toString(dtype));
  }
}

struct Options {
  int64_t ignore_index;
  double label_smoothing, softcap, z_loss;
};

// (N, C, ...) or (C,) as the kernels see it.
struct Logits {
  Tensor x;
  Shape shape;
  bool rows;        // classes are contiguous
  bool class_last;  // classes are contiguous in the gradient too, which has the strides of x
  int64_t stride;   // of the rows

  static Logits of(const Tensor& given, const char* op) {
    const Dims sizes = dims_of(given.sizes()), strides = dims_of(given.strides());
    const auto dims = static_cast<int64_t>(sizes.size());
    FASTLAYERS_CHECK(dims > 0, op, "expected logits of one dimension or more");
    Logits l{given, {}, true, false, 0};
    const int64_t c = dims == 1 ? 0 : 1;
    if (c == 1) l.shape.outer = sizes[0];
    l.shape.n = sizes[c];
    for (int64_t d = 2; d < dims; ++d) l.shape.inner *= sizes[d];
    if (l.shape.inner == 1) {
      const bool in_place = strides[c] == 1 || l.shape.n == 1;
      if (!in_place) l.x = torch::stable::contiguous(given);
      l.stride = in_place && c == 1 ? strides[0] : l.shape.n;
      return l;
    }
    l.stride = l.shape.n;
    if (!given.is_contiguous()) {
      int64_t next = l.shape.n;
      l.class_last = strides[1] == 1;
      for (int64_t d = dims - 1; d >= 0; --d) {
        if (d == 1 || sizes[d] == 1) continue;
        l.class_last &= strides[d] == next;
        next *= sizes[d];
      }
      if (l.class_last) return l;
      l.x = torch::stable::contiguous(given);
    }
    l.rows = false;
    return l;
  }

  int64_t count() const { return shape.outer * shape.inner; }

  Tensor empty_gradient() const {
    const auto sizes = x.sizes();
    if (class_last) return empty_strided(x.dim(), sizes.data(), x.strides().data(), x.scalar_type(), x);
    return empty_contiguous(dims_of(sizes), x.scalar_type(), x);
  }
};

// The terms of a loss for the kernels, with the contiguous targets that they point to.
template <typename A>
struct Context {
  Tensor target;
  Terms<A> terms;

  Context(const Tensor& given, const MaybeTensor& weight, const Options& o, int64_t rows, int64_t classes, const Tensor& x,
          const char* op) {
    FASTLAYERS_CHECK(given.scalar_type() == ScalarType::Long && given.is_cuda() && given.get_device_index() == x.get_device_index(),
                     op, "expected classes as int64 on the logits' device");
    FASTLAYERS_CHECK(classes <= kMostClasses, op, classes, " classes are more than the kernels take");
    FASTLAYERS_CHECK(given.numel() == rows, op, given.numel(), " classes for ", rows, " rows");
    target = given.is_contiguous() ? given : torch::stable::contiguous(given);
    terms = {pointer<const int64_t>(target), nullptr, nullptr, o.ignore_index, static_cast<int>(classes),
             static_cast<A>(o.label_smoothing), static_cast<A>(o.softcap), static_cast<A>(o.z_loss)};
    if (weight) {
      FASTLAYERS_CHECK(weight->scalar_type() == compute_dtype(x.scalar_type()) && weight->is_contiguous() &&
                           weight->numel() == classes && weight->is_cuda() && weight->get_device_index() == x.get_device_index(),
                       op, "expected a contiguous weight of ", classes, " classes in the dtype of the computation");
      terms.weight = pointer<const A>(*weight);
    }
  }

  bool wants_weight_sum() const { return terms.weight != nullptr && terms.smoothing != A(0); }

  // Writes the sum of the weight there, for the kernels that follow.
  void sum_weight(A* sum, const Launch& launch) {
    if (!wants_weight_sum()) return;
    sum_weights<A><<<1, kSumThreads, 0, launch.stream()>>>(terms.weight, terms.classes, sum);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
    terms.weight_sum = sum;
  }
};

template <typename A>
RowArgs<A> row_args(const void* x, int64_t rows, int64_t row_stride, int64_t n, const Terms<A>& terms) {
  return {x, rows, row_stride, static_cast<int>(n), 0, 0, 0, 0, false, terms};
}

template <typename A>
ColumnArgs<A> column_args(const Logits& logits, const Terms<A>& terms) {
  ColumnArgs<A> args{};
  args.x = logits.x.const_data_ptr();
  args.rows = logits.count();
  args.n = static_cast<int>(logits.shape.n);
  args.inner = logits.shape.inner;
  args.terms = terms;
  return args;
}

// Adds the losses of all rows up into the result.
template <typename A>
void sum_up(const Tensor& losses, const Terms<A>& terms, const Total<A>& total, const Launch& launch) {
  const int64_t rows = losses.numel(), processors = device_traits(launch.device()).processors;
  const int64_t blocks = std::min(processors, ceil_div(rows, kSumThreads * kSumEach));
  const Tensor partials = blocks == 1 ? losses : empty_contiguous({blocks, 2}, losses.scalar_type(), losses);
  A* sums = pointer<A>(partials);
  sum_losses<A><<<static_cast<unsigned>(blocks), kSumThreads, 0, launch.stream()>>>(pointer<const A>(losses), rows, terms, sums, total);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  if (blocks == 1) return;
  sum_partials<A><<<1, kSumThreads, 0, launch.stream()>>>(sums, blocks, total);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// stats: the base of the level of each row, then the rests, then the divisor of a mean, and the sum of the weight.
std::tuple<Tensor, Tensor> cross_entropy_forward(const Tensor& x_in, const Tensor& target, const MaybeTensor& weight, int64_t ignore_index,
                                                 int64_t reduction_code, double label_smoothing, double softcap, double z_loss,
                                                 ScalarType dtype) {
  const char* op = "cross_entropy_forward";
  const Launch launch(x_in);
  const Logits logits = Logits::of(x_in, op);
  const auto reduction = static_cast<Reduction>(reduction_code);
  const bool each_row = reduction == Reduction::none;
  const int64_t rows = logits.count();
  FASTLAYERS_CHECK(rows > 0 && logits.shape.n > 0, op, "nothing to compute");
  const ScalarType wide = compute_dtype(x_in);
  Tensor loss = each_row ? empty_contiguous(dims_of(target.sizes()), dtype, x_in) : empty_contiguous({}, dtype, x_in);
  Tensor stats = empty_contiguous({2 * rows + 2}, wide, x_in);
  Tensor losses = each_row ? loss : empty_contiguous({rows}, wide, x_in);
  dispatch_floating(x_in.scalar_type(), op, [&](auto x) {
    using T = decltype(x);
    using A = compute_t<T>;
    Context<A> context(target, weight, {ignore_index, label_smoothing, softcap, z_loss}, rows, logits.shape.n, x_in, op);
    A* numbers = pointer<A>(stats);
    A* divisor = numbers + 2 * rows;
    context.sum_weight(divisor + 1, launch);
    const Kind kind = kind_of(each_row ? dtype : wide, op);
    if (logits.rows) {
      const RowArgs<A> row = row_args<A>(logits.x.const_data_ptr(), rows, logits.stride, logits.shape.n, context.terms);
      ForwardArgs<A> args{row, losses.mutable_data_ptr(), kind, numbers, nullptr};
      launch_forward_rows<T>(args, launch, logits.x);
    } else {
      ColumnArgs<A> args = column_args<A>(logits, context.terms);
      args.losses = losses.mutable_data_ptr();
      args.stats = numbers;
      args.kind = kind;
      with_columns<T>(args, logits.shape, aligned(args.x), [&](const ColumnLaunch& shape, auto vector, auto plain) {
        const int threads = shape.across * shape.down;
        const size_t shared = shape.down == 1 ? 0 : sizeof(Pair<A>) * threads * vector.value;
        cross_entropy_columns<T, vector.value, plain.value><<<grid_of(shape.blocks), threads, shared, launch.stream()>>>(args);
      });
    }
    if (!each_row)
      sum_up<A>(losses, context.terms, {loss.mutable_data_ptr(), kind_of(dtype, op), reduction == Reduction::mean, divisor}, launch);
  });
  return {loss, stats};
}

void backward_into(Tensor& dx, const Tensor& dy_in, const Logits& logits, const Tensor& target, const MaybeTensor& weight,
                   const Tensor& stats, int64_t reduction_code, const Options& options, const char* op) {
  const Launch launch(logits.x);
  const auto reduction = static_cast<Reduction>(reduction_code);
  const int64_t rows = logits.count();
  const bool each_row = reduction == Reduction::none;
  FASTLAYERS_CHECK(dy_in.numel() == (each_row ? rows : 1) && stats.numel() == 2 * rows + 2, op,
                   "dy or stats of another size than the forward's");
  FASTLAYERS_CHECK(stats.scalar_type() == compute_dtype(logits.x) && stats.is_contiguous(), op, "expected the stats of the forward");
  const Tensor dy = dy_in.is_contiguous() ? dy_in : torch::stable::contiguous(dy_in);
  dispatch_floating(logits.x.scalar_type(), op, [&](auto x) {
    using T = decltype(x);
    using A = compute_t<T>;
    Context<A> context(target, weight, options, rows, logits.shape.n, logits.x, op);
    const A* numbers = pointer<const A>(stats);
    const A* divisor = numbers + 2 * rows;
    if (context.wants_weight_sum()) context.terms.weight_sum = divisor + 1;
    const Scale<A> scale{dy.const_data_ptr(), kind_of(dy.scalar_type(), op), each_row, reduction == Reduction::mean ? divisor : nullptr};
    if (logits.rows) {
      const RowArgs<A> row = row_args<A>(logits.x.const_data_ptr(), rows, logits.stride, logits.shape.n, context.terms);
      const int64_t dx_stride = dx.data_ptr() == row.x ? logits.stride : logits.shape.n;
      BackwardArgs<A> args{row, dx.mutable_data_ptr(), dx_stride, false, numbers, scale};
      return launch_backward_rows<T>(args, launch);
    }
    ColumnArgs<A> args = column_args<A>(logits, context.terms);
    args.dx = dx.mutable_data_ptr();
    args.stats = const_cast<A*>(numbers);
    args.shares = static_cast<unsigned>(ceil_div(args.n, kColumnClasses));
    args.scale = scale;
    with_columns<T>(args, logits.shape, aligned(args.x) && aligned(args.dx), [&](const ColumnLaunch& shape, auto vector, auto plain) {
      const unsigned blocks = grid_of(shape.blocks * args.shares);
      cross_entropy_backward_columns<T, vector.value, plain.value><<<blocks, shape.across * shape.down, 0, launch.stream()>>>(args);
    });
  });
}

Tensor cross_entropy_backward(const Tensor& dy, const Tensor& x, const Tensor& target, const MaybeTensor& weight, const Tensor& stats,
                              int64_t ignore_index, int64_t reduction, double label_smoothing, double softcap, double z_loss) {
  const char* op = "cross_entropy_backward";
  const Logits logits = Logits::of(x, op);
  Tensor dx = logits.empty_gradient();
  backward_into(dx, dy, logits, target, weight, stats, reduction, {ignore_index, label_smoothing, softcap, z_loss}, op);
  return dx;
}

void cross_entropy_backward_(const Tensor& dy, Tensor x, const Tensor& target, const MaybeTensor& weight, const Tensor& stats,
                             int64_t ignore_index, int64_t reduction, double label_smoothing, double softcap, double z_loss) {
  const char* op = "cross_entropy_backward_";
  FASTLAYERS_CHECK(x.is_contiguous(), op, "expected contiguous logits");
  backward_into(x, dy, Logits::of(x, op), target, weight, stats, reduction, {ignore_index, label_smoothing, softcap, z_loss}, op);
}

// Losses, and the gradients written over the logits, by a kernel that holds the rows in shared memory. False if they do not fit.
template <typename T>
bool run_held(const Tensor& logits, compute_t<T>* losses, const Scale<compute_t<T>>& scale, const Terms<compute_t<T>>& terms,
              const Launch& launch) {
  constexpr int V = kVector<T>;
  const int64_t n = logits.size(1);
  if (!aligned(logits.const_data_ptr())) return false;
  const HeldArgs<compute_t<T>> args{logits.mutable_data_ptr(), logits.size(0), static_cast<int>(n), n % V != 0, losses, scale, terms};
  const int64_t words = words_covered(n, args.ragged, V);
  bool held = false;
  dispatch_plain(terms, [&](auto plain) { held = launch_held<cross_entropy_held<T, plain.value>>(args, words, kVectorBytes, launch); });
  return held;
}

Tensor cross_entropy_chunk_(Tensor logits, const Tensor& target, const MaybeTensor& weight, int64_t ignore_index,
                            double label_smoothing, double softcap, double z_loss, const MaybeTensor& grad_scale,
                            bool want_grad, int64_t columns) {
  const char* op = "cross_entropy_chunk_";
  FASTLAYERS_CHECK(logits.dim() == 2 && logits.is_contiguous() && columns > 0 && columns <= logits.size(1), op,
                   "expected a contiguous matrix of ", columns, " columns or more");
  const Launch launch(logits);
  const int64_t rows = logits.size(0), padded = logits.size(1);
  const ScalarType wide = compute_dtype(logits);
  Tensor losses = empty_contiguous({rows}, wide, logits);
  if (rows == 0) return losses;
  dispatch_floating(logits.scalar_type(), op, [&](auto x) {
    using T = decltype(x);
    using A = compute_t<T>;
    Context<A> context(target, weight, {ignore_index, label_smoothing, softcap, z_loss}, rows, columns, logits, op);
    Tensor sum = context.wants_weight_sum() ? empty_contiguous({1}, wide, logits) : losses;
    context.sum_weight(pointer<A>(sum), launch);
    Scale<A> scale{};
    if (grad_scale) {
      FASTLAYERS_CHECK(grad_scale->scalar_type() == wide && grad_scale->is_contiguous() &&
                           (grad_scale->numel() == 1 || grad_scale->numel() == rows),
                       op, "expected a contiguous grad_scale of one element or one for each row, in ", toString(wide));
      scale = {grad_scale->const_data_ptr(), kind_of(wide, op), grad_scale->numel() > 1, nullptr};
    }
    A* out = pointer<A>(losses);
    if (want_grad && run_held<T>(logits, out, scale, context.terms, launch)) return;
    Tensor stats = empty_contiguous({2 * rows}, wide, logits);
    A* numbers = pointer<A>(stats);
    const void* in = logits.const_data_ptr();
    ForwardArgs<A> forward{row_args<A>(in, rows, padded, columns, context.terms), out, kind_of(wide, op), numbers, nullptr};
    launch_forward_rows<T>(forward, launch, logits);
    if (!want_grad) return;
    const RowArgs<A> row = row_args<A>(in, rows, padded, padded, context.terms);
    BackwardArgs<A> backward{row, logits.mutable_data_ptr(), padded, false, numbers, scale};
    launch_backward_rows<T>(backward, launch);
  });
  return losses;
}

}  // namespace
}  // namespace fastlayers

STABLE_TORCH_LIBRARY_IMPL(fastlayers, CUDA, m) {
  m.impl("cross_entropy_forward", TORCH_BOX(&fastlayers::cross_entropy_forward));
  m.impl("cross_entropy_backward", TORCH_BOX(&fastlayers::cross_entropy_backward));
  m.impl("cross_entropy_backward_", TORCH_BOX(&fastlayers::cross_entropy_backward_));
  m.impl("cross_entropy_chunk_", TORCH_BOX(&fastlayers::cross_entropy_chunk_));
}

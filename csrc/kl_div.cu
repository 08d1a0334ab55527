// Divergences between distributions, forward and backward: torch's kl_div of log-probabilities, and the Kullback-Leibler and
// Jensen-Shannon divergences between the softmaxes of two matrices of logits, for each row.
//
// The stock composition on logits writes both log-softmaxes, the exponential of one, their difference and its products: about ten passes
// over the vocabulary. Here the forward reads both rows and writes a loss and six numbers for each row. The backward reads both rows and
// writes the gradients.
//
//   Kullback-Leibler   sum p·(log p - log q) in one pass. With the running maxima x and y of the rows s and t, sums X = sum e^(s - x),
//                      Y = sum e^(t - y) and W = sum e^(t - y)·((t - y) - (s - x)), it is W/Y + log X - log Y. Where the maxima
//                      rise by dx and dy, X and Y are rescaled as by an online softmax, and W becomes e^-dy·(W + (dx - dy)·Y).
//   Jensen-Shannon     needs the normalised p and q before it can add them. The blocks of a cluster share a row so that each
//                      thread holds its words in registers from the sums to the loss. Only longer rows are read twice.
//
// By its definition p·(log p - log q) is 0 where p is 0, so rows may have minus infinities. It is infinite where only q is 0.
//
// Rows whose length is not a multiple of the vector start anywhere in a 16-byte word ("ragged"). All operands are contiguous and aligned,
// so element i of each lies at the same place in its word: threads read the words that cover a row and ignore the elements of its
// neighbours.
#include "common/columns.cuh"
#include "kl_div.h"
#include "common/rows.cuh"

namespace fastlayers {
namespace {

constexpr int kSumWords = 4;      // words of each operand that a thread of kl_div_sum has in flight
constexpr int kSumBlocks = 8;     // blocks of an SM that kl_div_sum has at most
constexpr int kElementWords = 2;  // words of each operand that a thread of kl_div_elements and kl_div_backward has in flight

// Words of each operand that a thread of the row kernels has in flight, and blocks that an SM should hold, which leaves enough registers.
// A word of 16-bit elements takes twice the registers of another word. double takes more for its exponential.
template <typename In>
constexpr int kForwardWords = sizeof(In) > 2 ? 4 : 2;
template <typename In>
constexpr int kForwardBlocks = sizeof(In) == 8 ? 2 : sizeof(In) == 4 ? 3 : 4;
constexpr int kBackwardWords = 2;
template <typename In>
constexpr int kBackwardBlocks = sizeof(In) == 8 ? 2 : 4;

// ---- exponentials and logarithms ----------------------------------------------------------------------------------------

// Exponents are in units of log 2 for 16-bit logits, where the hardware's exp2 and log2 are precise enough, and in natural units for others.
template <typename In>
struct Units {
  using A = compute_t<In>;
  static constexpr bool kFast = sizeof(In) == 2;
  static constexpr A kNatural = kFast ? A(0.69314718055994530942) : A(1);  // one unit
  static constexpr A kPerNatural = kFast ? A(1.44269504088896340736) : A(1);

  // A difference of logits in units. A wide one is divided by the temperature and rounded once, as in torch.
  __device__ __forceinline__ static A of(A difference, A scale) {
    if constexpr (kFast) return difference * scale;
    else return difference / scale;
  }
  static A scale(double temperature) { return static_cast<A>(kFast ? 1.44269504088896340736 / temperature : temperature); }

  __device__ __forceinline__ static A exponential(A v) {
    if constexpr (kFast) return exp2_fast(v);
    else return fastlayers::exponential<false>(v);
  }
  __device__ __forceinline__ static A logarithm(A v) {
    if constexpr (kFast) {
      float r;
      asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
      return r;
    } else {
      return fastlayers::logarithm<false>(v);
    }
  }
};

// The larger value, or NaN if one of them is NaN.
template <typename A>
__device__ __forceinline__ A maximum_or_nan(A u, A v) {
  if constexpr (std::is_same_v<A, float>) {
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(u), "f"(v));
    return r;
  } else {
    return u != u || u > v ? u : v;
  }
}

// ---- rows of logits -----------------------------------------------------------------------------------------------------

// x: the logits of q, the student's. y: those of p, the teacher's.
template <typename A>
struct RowArgs {
  const void* x;
  const void* y;
  const int64_t* labels;  // or null
  int64_t ignore_index;
  int64_t rows, n;
  A scale;    // from differences of logits to units: it has the temperature
  A beta;     // share of p in the mixture
  int lanes;  // threads of one block that share a row: a warp, or the whole block
  int each;   // words of the row for one block
  bool ragged;
};

// The numbers that are kept for each row: the maxima, a form of the sums of exponentials relative to them, and the sums that the gradients
// need. Jensen-Shannon keeps the natural logarithms of the sums, and sum q·(log q - log m) and sum p·(log p - log m) for the mixture m.
// Kullback-Leibler keeps the reciprocals of the sums, because a large probability would lose a digit in exp(z - log sum), and cross_y =
// sum p·((t - y) - (s - x)).
template <typename A>
struct Numbers {
  A max_x, sum_x, max_y, sum_y, cross_x, cross_y;

  __device__ __forceinline__ void store(A* stats, int64_t row) const {
    A* p = stats + row * kNumbers;
    p[0] = max_x, p[1] = sum_x, p[2] = max_y, p[3] = sum_y, p[4] = cross_x, p[5] = cross_y;
  }
  __device__ __forceinline__ static Numbers load(const A* stats, int64_t row) {
    const A* p = stats + row * kNumbers;
    return {p[0], p[1], p[2], p[3], p[4], p[5]};
  }
};

// The words of a row, or of a block's share of it, that a thread goes through.
template <int V>
struct Span {
  int64_t row;
  int64_t start;  // of the first word, in elements from the beginning of the row; in a ragged row 0 to -(V - 1) for the first share
  int words, first, stride;

  template <typename Args>
  __device__ __forceinline__ static Span find(const Args& a, int64_t row, int64_t part) {
    Span s;
    s.row = row;
    s.stride = a.lanes;
    s.first = static_cast<int>(threadIdx.x);
    if (a.lanes == 32) {  // a warp a row
      s.row = row * (blockDim.x >> 5) + (threadIdx.x >> 5);
      s.first &= 31;
    }
    const int head = a.ragged ? static_cast<int>((s.row * a.n) & (V - 1)) : 0;
    const int64_t words = (a.n + head + V - 1) / V, begin = part * a.each;
    s.start = begin * V - head;
    s.words = s.row < a.rows ? static_cast<int>(max(int64_t{0}, min(static_cast<int64_t>(a.each), words - begin))) : 0;
    return s;
  }
  __device__ __forceinline__ int word(int begin, int i) const { return begin + first + i * stride; }
};

// Loads words of x and y, all before the first one is used. Where there is no word and outside of the row, it puts minus infinity, as for
// an element without probability.
template <typename In, int K, int V>
__device__ __forceinline__ void load_words(Vec<In, V> (&x)[K], Vec<In, V> (&y)[K], const In* px, const In* py,
                                           const Span<V>& at, int begin, int64_t n, bool ragged) {
  const In nothing = convert<In>(minus_infinity<compute_t<In>>());
#pragma unroll
  for (int i = 0; i < K; ++i) {
    x[i] = y[i] = filled<In, V>(nothing);
    if (at.word(begin, i) < at.words) {
      x[i] = load_vec<In, V>(px + static_cast<int64_t>(at.word(begin, i)) * V);
      y[i] = load_vec<In, V>(py + static_cast<int64_t>(at.word(begin, i)) * V);
    }
  }
  if (!ragged) return;
#pragma unroll
  for (int i = 0; i < K; ++i) {
    if (at.word(begin, i) >= at.words) continue;
    const int64_t e = at.start + static_cast<int64_t>(at.word(begin, i)) * V;
    blank_neighbours(x[i], e, n, nothing);
    blank_neighbours(y[i], e, n, nothing);
  }
}

// Maxima of part of the rows, and sums relative to them: see the top of this file.
template <typename A>
struct Sums {
  A max_x, x, max_y, y, w;

  __device__ static Sums nothing() { return {minus_infinity<A>(), A(0), minus_infinity<A>(), A(0), A(0)}; }

  // The same relative to maxima that are as large or larger.
  template <typename In>
  __device__ __forceinline__ void raise(A to_x, A to_y, A scale) {
    using U = Units<In>;
    const A base_x = finite_or_zero(to_x), base_y = finite_or_zero(to_y);
    const A by_y = U::exponential(U::of(max_y - base_y, scale));
    x *= U::exponential(U::of(max_x - base_x, scale));
    // A part without probability has no shift: its maximum is not a number.
    if (y > A(0)) w += y * U::of((finite_or_zero(max_y) - base_y) - (finite_or_zero(max_x) - base_x), scale);
    w *= by_y;
    y *= by_y;
    max_x = to_x;
    max_y = to_y;
  }
};

template <typename In, typename A>
__device__ __forceinline__ Sums<A> merge(Sums<A> p, Sums<A> q, A scale) {
  const A max_x = maximum(p.max_x, q.max_x), max_y = maximum(p.max_y, q.max_y);
  p.template raise<In>(max_x, max_y, scale);
  q.template raise<In>(max_x, max_y, scale);
  return {max_x, p.x + q.x, max_y, p.y + q.y, p.w + q.w};
}

template <typename In, typename A>
__device__ __forceinline__ Sums<A> lanes_merge(Sums<A> s, A scale) {
  s.template raise<In>(lanes_max(s.max_x, 32), lanes_max(s.max_y, 32), scale);
  lanes_sum(s.x, s.y, 32);
  s.w = lanes_sum(s.w, 32);
  return s;
}

// The sums of a whole row, for each of its threads.
template <typename In, bool CLUSTER, typename A>
__device__ __forceinline__ Sums<A> row_merge(Sums<A> s, Exchange<Sums<A>, CLUSTER>& exchange, int lanes, A scale) {
  s = lanes_merge<In>(s, scale);
  if (!CLUSTER && lanes == 32) return s;
  exchange.publish(s);
  const int lane = threadIdx.x & 31, count = exchange.count();
  Sums<A> all = Sums<A>::nothing();
  if (lane < count) all = exchange.load(lane);
#pragma unroll 1
  for (int i = lane + 32; i < count; i += 32) all = merge<In>(all, exchange.load(i), scale);
  return lanes_merge<In>(all, scale);
}

template <typename A>
struct Both {
  A x, y;
};

template <bool CLUSTER, typename A>
__device__ __forceinline__ Both<A> row_sum(Both<A> s, Exchange<Both<A>, CLUSTER>& exchange, int lanes) {
  lanes_sum(s.x, s.y, 32);
  if (!CLUSTER && lanes == 32) return s;
  exchange.publish(s);
  const int lane = threadIdx.x & 31, count = exchange.count();
  Both<A> all{A(0), A(0)};
#pragma unroll 1
  for (int i = lane; i < count; i += 32) all.x += exchange.load(i).x, all.y += exchange.load(i).y;
  lanes_sum(all.x, all.y, 32);
  return all;
}

// One element of the mixture m = beta·p + (1 - beta)·q: both probabilities, and log q - log m and log p - log m in units. For the larger
// probability h that is -log(m / h), which is near 0 and keeps its digits; for the smaller one l = h·e it is less by log h - log l, which
// is limited, so that its product with l vanishes if l does. m / h is written with beta alone: beta and 1 - beta, each rounded, do not add
// up to 1, which would show in every row.
template <typename In>
struct Mixture {
  using A = compute_t<In>;
  using U = Units<In>;
  A q, p, over_q, over_p;

  __device__ __forceinline__ Mixture(A log_q, A log_p, A beta) {
    constexpr A kMost = std::is_same_v<A, double> ? A(1000) : A(200);  // e is 0 there
    const A difference = log_q - log_p;
    const bool q_larger = difference >= A(0);
    const A apart = fmin(difference < A(0) ? -difference : difference, kMost);
    const A e = U::exponential(-apart), high = U::exponential(maximum_or_nan(log_q, log_p)), low = high * e;
    const A m_over_high = fma(q_larger ? -beta : beta, A(1) - e, q_larger ? A(1) : e);
    const A over_high = -U::logarithm(m_over_high), over_low = over_high - apart;
    q = q_larger ? high : low;
    p = q_larger ? low : high;
    over_q = q_larger ? over_high : over_low;
    over_p = q_larger ? over_low : over_high;
  }
};

// The first pass over a row: the sums over this thread's words. It leaves the last words in x and y, which begin at `begin`.
template <bool CROSS, typename In, typename A, int K, int V>
__device__ __forceinline__ Sums<A> add_row(Vec<In, V> (&x)[K], Vec<In, V> (&y)[K], int& begin, const In* px, const In* py,
                                           const Span<V>& at, const RowArgs<A>& a) {
  using U = Units<In>;
  Sums<A> mine = Sums<A>::nothing();
  for (;;) {
    load_words(x, y, px, py, at, begin, a.n, a.ragged);
    mine.template raise<In>(maximum(mine.max_x, convert<A>(largest(x))), maximum(mine.max_y, convert<A>(largest(y))), a.scale);
    const A base_x = finite_or_zero(mine.max_x), base_y = finite_or_zero(mine.max_y);
    unroll<K>([&](int i) {
      forget(x[i]), forget(y[i]);
      Vec<A, V> ex = unpack<A>(x[i]), ey = unpack<A>(y[i]), w;
      unroll<V>([&](int j) {
        const A zx = U::of(ex.v[j] - base_x, a.scale), zy = U::of(ey.v[j] - base_y, a.scale);
        ex.v[j] = U::exponential(zx);
        ey.v[j] = U::exponential(zy);
        if constexpr (CROSS) w.v[j] = ey.v[j] * (ey.v[j] > A(0) ? zy - zx : A(0));
      });
      mine.x += tree_sum(ex);
      mine.y += tree_sum(ey);
      if constexpr (CROSS) mine.w += tree_sum(w);
    });
    if (begin + at.stride * K >= at.words) return mine;
    begin += at.stride * K;
  }
}

// The second pass, for Jensen-Shannon: sum q·(log q - log m) and sum p·(log p - log m) in units. It goes backwards, because the last words
// are still held, and the words before them are the most likely to be in the L2 cache.
template <typename In, typename A, int K, int V>
__device__ __forceinline__ Both<A> mix_row(Vec<In, V> (&x)[K], Vec<In, V> (&y)[K], int begin, const In* px, const In* py,
                                           const Span<V>& at, const RowArgs<A>& a, const Numbers<A>& kept) {
  using U = Units<In>;
  const A minus_x = kept.sum_x * U::kPerNatural, minus_y = kept.sum_y * U::kPerNatural;
  Both<A> cross{A(0), A(0)};
  for (;;) {
    unroll<K>([&](int i) {
      forget(x[i]), forget(y[i]);
      Vec<A, V> of_x = unpack<A>(x[i]), of_y = unpack<A>(y[i]);
      unroll<V>([&](int j) {
        const Mixture<In> m(U::of(of_x.v[j] - kept.max_x, a.scale) - minus_x, U::of(of_y.v[j] - kept.max_y, a.scale) - minus_y, a.beta);
        of_x.v[j] = m.q * m.over_q;
        of_y.v[j] = m.p * m.over_p;
      });
      cross.x += tree_sum(of_x);
      cross.y += tree_sum(of_y);
    });
    if (begin == 0) return cross;
    begin -= at.stride * K;
    load_words(x, y, px, py, at, begin, a.n, a.ragged);
  }
}

template <typename In, Divergence KIND, bool CLUSTER>
__global__ void __launch_bounds__(kThreads, kForwardBlocks<In>)
    divergence_forward(const RowArgs<compute_t<In>> a, compute_t<In>* losses, compute_t<In>* stats) {
  using A = compute_t<In>;
  using U = Units<In>;
  constexpr int V = kVector<In>, K = kForwardWords<In>, kSlots = kThreads / 32 * (CLUSTER ? kMaxCluster : 1);
  constexpr bool kMixed = KIND == Divergence::jensen_shannon;
  __shared__ Sums<A> slots[kSlots];
  Exchange<Sums<A>, CLUSTER> exchange{slots};
  int64_t row = blockIdx.x, part = 0;
  if constexpr (CLUSTER) {
    auto cluster = this_cluster();
    row /= cluster.num_blocks();
    part = cluster.block_rank();
  }
  const Span<V> at = Span<V>::find(a, row, part);
  const bool speaks = at.first == 0 && part == 0 && at.row < a.rows;
  if (a.labels != nullptr && at.row < a.rows && a.labels[at.row] == a.ignore_index) {  // all threads of a row alike
    if (speaks) {
      losses[at.row] = A(0);
      Numbers<A>{}.store(stats, at.row);
    }
    return;
  }
  exchange.arrive();

  const In* px = static_cast<const In*>(a.x) + at.row * a.n + at.start;
  const In* py = static_cast<const In*>(a.y) + at.row * a.n + at.start;
  Vec<In, V> x[K], y[K];
  int begin = 0;
  const Sums<A> mine = add_row<!kMixed>(x, y, begin, px, py, at, a);
  const Sums<A> all = row_merge<In>(mine, exchange, a.lanes, a.scale);
  const A log_x = logarithm<false>(all.x), log_y = logarithm<false>(all.y);
  Numbers<A> kept{finite_or_zero(all.max_x), log_x, finite_or_zero(all.max_y), log_y, A(0), A(0)};
  A loss;
  if constexpr (!kMixed) {
    kept.sum_x = A(1) / all.x;
    kept.sum_y = A(1) / all.y;
    kept.cross_y = all.w / all.y * U::kNatural;
    loss = kept.cross_y + (log_x - log_y);
  } else {
    __shared__ Both<A> more_slots[kSlots];
    Exchange<Both<A>, CLUSTER> more{more_slots};
    more.arrive();
    const Both<A> cross = row_sum(mix_row(x, y, begin, px, py, at, a, kept), more, a.lanes);
    kept.cross_x = cross.x * U::kNatural;
    kept.cross_y = cross.y * U::kNatural;
    loss = a.beta * kept.cross_y + (A(1) - a.beta) * kept.cross_x;
  }
  if (speaks) {
    losses[at.row] = loss;
    kept.store(stats, at.row);
  }
}

// With q = softmax(s/temperature), p = softmax(t/temperature) and g = (gradient of the loss)/temperature:
//   Kullback-Leibler  ds = g·(q - p)                                dt = g·p·((t - y) - (s - x) - cross_y)
//   Jensen-Shannon    ds = g·(1 - beta)·q·(log q - log m - cross_x)   dt = g·beta·p·(log p - log m - cross_y)
// A row has `parts` shares of `each` words, a block each. dx or dy may be null.
template <typename In, Divergence KIND>
__global__ void __launch_bounds__(kThreads, kBackwardBlocks<In>)
    divergence_backward(const RowArgs<compute_t<In>> a, const compute_t<In>* stats, const compute_t<In>* dlosses, int64_t dlosses_stride,
                        compute_t<In> temperature, In* dx, In* dy, Divider parts) {
  using A = compute_t<In>;
  using U = Units<In>;
  constexpr int V = kVector<In>;
  const uint32_t row = parts.quotient(blockIdx.x);
  const Span<V> at = Span<V>::find(a, row, blockIdx.x - row * parts.divisor);
  if (at.row >= a.rows) return;
  const bool ignored = a.labels != nullptr && a.labels[at.row] == a.ignore_index;
  const int64_t first = at.row * a.n + at.start;  // element of the tensors
  const Numbers<A> kept = Numbers<A>::load(stats, at.row);
  const A minus_x = kept.sum_x * U::kPerNatural, minus_y = kept.sum_y * U::kPerNatural;  // of Jensen-Shannon
  const A g = dlosses[at.row * dlosses_stride] / temperature;
  const A gx = KIND == Divergence::jensen_shannon ? g * (A(1) - a.beta) : g;
  const A gy = KIND == Divergence::jensen_shannon ? g * a.beta : g;
#pragma unroll 1
  for (int begin = 0; begin < at.words; begin += at.stride * kBackwardWords) {
    Vec<In, V> x[kBackwardWords], y[kBackwardWords];
    if (!ignored) load_words(x, y, static_cast<const In*>(a.x) + first, static_cast<const In*>(a.y) + first, at, begin, a.n, false);
#pragma unroll
    for (int i = 0; i < kBackwardWords; ++i) {
      const int word = at.word(begin, i);
      if (word >= at.words) continue;
      Vec<A, V> rx = filled<A, V>(A(0)), ry = rx;
      if (!ignored) {
        rx = unpack<A>(x[i]);
        ry = unpack<A>(y[i]);
        unroll<V>([&](int j) {
          const A zx = U::of(rx.v[j] - kept.max_x, a.scale), zy = U::of(ry.v[j] - kept.max_y, a.scale);
          if constexpr (KIND == Divergence::kullback_leibler) {
            const A q = U::exponential(zx) * kept.sum_x, p = U::exponential(zy) * kept.sum_y;
            ry.v[j] = gy * (p * (p > A(0) ? (zy - zx) * U::kNatural - kept.cross_y : A(0)));
            rx.v[j] = gx * (q - p);
          } else {
            const Mixture<In> m(zx - minus_x, zy - minus_y, a.beta);
            rx.v[j] = gx * (m.q * (m.over_q * U::kNatural - kept.cross_x));
            ry.v[j] = gy * (m.p * (m.over_p * U::kNatural - kept.cross_y));
          }
        });
      }
      const int64_t e = at.start + static_cast<int64_t>(word) * V, to = at.row * a.n + e;
      const bool inside = !a.ragged || (e >= 0 && e + V <= a.n);
      if (dx != nullptr) {
        if (inside) store_vec<In, V>(dx + to, pack<In>(rx));
        else store_word(dx + to, e, a.n, pack<In>(rx));
      }
      if (dy != nullptr) {
        if (inside) store_vec<In, V>(dy + to, pack<In>(ry));
        else store_word(dy + to, e, a.n, pack<In>(ry));
      }
    }
  }
}

// ---- kl_div of log-probabilities ----------------------------------------------------------------------------------------

// target·(log target - input), where 0·log 0 is 0; or, of a target in log space, exp(target)·(target - input).
template <bool LOG, typename A>
__device__ __forceinline__ A pointwise(A input, A target) {
  if constexpr (LOG) return exponential<false>(target) * (target - input);
  else return (target == A(0) ? A(0) : target * logarithm<false>(target)) - target * input;
}

template <typename T, bool LOG>
__global__ void __launch_bounds__(kThreads) kl_div_sum(const T* __restrict__ input, const T* __restrict__ target,
                                                       compute_t<T>* __restrict__ partial, int64_t n, bool whole) {
  using A = compute_t<T>;
  constexpr int V = kVector<T>;
  constexpr int64_t kTile = static_cast<int64_t>(kThreads) * kSumWords * V;
  A sum = 0;
#pragma unroll 1
  for (int64_t tile = blockIdx.x * kTile; tile < n; tile += gridDim.x * kTile) {
    const auto index = [&](int u) { return tile + (static_cast<int64_t>(u) * kThreads + threadIdx.x) * V; };
    Vec<T, V> wx[kSumWords], wt[kSumWords];
    if (whole && tile + kTile <= n) {
      unroll<kSumWords>([&](int u) {
        wx[u] = load_flat<T, true>(input, index(u), n);
        wt[u] = load_flat<T, true>(target, index(u), n);
      });
    } else {
#pragma unroll
      for (int u = 0; u < kSumWords; ++u) {  // what lies past the end counts as 0 and gives 0
        wx[u] = load_flat<T, false>(input, index(u), n);
        wt[u] = load_flat<T, false>(target, index(u), n);
      }
    }
    unroll<kSumWords>([&](int u) {
      Vec<A, V> x = unpack<A>(wx[u]);
      const Vec<A, V> t = unpack<A>(wt[u]);
      unroll<V>([&](int j) { x.v[j] = pointwise<LOG>(x.v[j], t.v[j]); });
      sum += tree_sum(x);
    });
  }
  __shared__ A warps[kThreads / 32];
  Exchange<A, false> exchange{warps};
  exchange.publish(lanes_sum(sum, 32));
  if (threadIdx.x >= 32) return;
  sum = lanes_sum(threadIdx.x < exchange.count() ? exchange.load(threadIdx.x) : A(0), 32);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

template <typename T, typename Out, bool LOG>
__global__ void __launch_bounds__(kThreads) kl_div_elements(const T* __restrict__ input, const T* __restrict__ target,
                                                            Out* __restrict__ out, int64_t n, bool whole) {
  using A = compute_t<T>;
  constexpr int V = kVector<T>;
  for_words<T, kElementWords>(whole, n, {input, target}, [&](auto fits, int64_t i, auto& w) {
    Vec<A, V> r = unpack<A>(w[0]);
    const Vec<A, V> t = unpack<A>(w[1]);
    unroll<V>([&](int j) { r.v[j] = pointwise<LOG>(r.v[j], t.v[j]); });
    store_flat<Out, fits.value, V>(out, i, n, pack<Out>(r));
  });
}

// ONE: dy is one number, the gradient of a sum. dinput or dtarget may be null, and input is null if dtarget is.
//   dinput = -dy·p   dtarget = dy·(log p + 1 - input), and NaN where p is 0; or of a target in log space dy·p·(target - input + 1)
template <typename T, typename G, bool LOG, bool ONE>
__global__ void __launch_bounds__(kThreads) kl_div_backward(const G* __restrict__ dy, const T* __restrict__ input,
                                                            const T* __restrict__ target, T* __restrict__ dinput,
                                                            T* __restrict__ dtarget, int64_t n, bool whole) {
  using A = compute_t<T>;
  constexpr int V = kVector<T>, W = kElementWords;
  A one = 0;
  if constexpr (ONE) one = convert<A>(*dy);
  for_block<T, W>(whole, n, [&]<int U>(Number<U>, int first) {
    constexpr bool WHOLE = U > 1;
    Vec<T, V> wx[U], wt[U];
    [[maybe_unused]] Vec<G, V> wg[U];
    unroll<U>([&](int u) {
      const int64_t i = flat_index<T, W>(first + u);
      wt[u] = load_flat<T, WHOLE>(target, i, n);
      if constexpr (!ONE) wg[u] = load_flat<G, WHOLE, V>(dy, i, n);
      if (dtarget != nullptr) wx[u] = load_flat<T, WHOLE>(input, i, n);
    });
    unroll<U>([&](int u) {
      const int64_t i = flat_index<T, W>(first + u);
      const Vec<A, V> t = unpack<A>(wt[u]);
      Vec<A, V> g = filled<A, V>(one), r;
      if constexpr (!ONE) g = unpack<A>(wg[u]);
      if (dinput != nullptr) {
        unroll<V>([&](int j) { r.v[j] = -(g.v[j] * (LOG ? exponential<false>(t.v[j]) : t.v[j])); });
        store_flat<T, WHOLE>(dinput, i, n, pack<T>(r));
      }
      if (dtarget != nullptr) {
        const Vec<A, V> x = unpack<A>(wx[u]);
        unroll<V>([&](int j) {
          const A p = t.v[j], gj = g.v[j];
          if constexpr (LOG) {
            r.v[j] = gj * exponential<false>(p) * (p - x.v[j] + A(1));
          } else {
            // As torch differentiates xlogy(p, p), whose second term is g·p/p.
            const A term = gj == A(0) && p == p ? A(0) : gj * logarithm<false>(p);
            r.v[j] = p == A(0) || p - p != A(0) ? static_cast<A>(NAN) : term + gj - gj * x.v[j];
          }
        });
        store_flat<T, WHOLE>(dtarget, i, n, pack<T>(r));
      }
    });
  });
}

// ---- launch rules -------------------------------------------------------------------------------------------------------

// The threads of a row: a warp for a short one; a block, or the blocks of a cluster, for a longer one.
struct RowLaunch {
  int lanes, block;
  int64_t parts;  // shares of a row, a block each
  int64_t each;   // words of one
  int64_t blocks(int64_t rows) const { return ceil_div(rows, lanes == 32 ? block / 32 : 1) * parts; }
};

RowLaunch row_launch(int64_t words, int64_t parts, int in_flight) {
  RowLaunch launch;
  launch.parts = parts;
  launch.each = ceil_div(words, launch.parts);
  const int64_t warps = ceil_div(launch.each, 32 * in_flight);
  launch.lanes = static_cast<int>(std::min<int64_t>(warps, kThreads / 32)) * 32;
  launch.block = launch.lanes == 32 && launch.parts == 1 ? kThreads / 2 : launch.lanes;
  return launch;
}

// Blocks of a cluster for one row of the forward: enough to occupy the GPU if there are few rows and, for a mixture, to hold the row in
// registers. More than 8 leave gaps unless there are 16 (see logits.cuh).
template <typename In, Divergence KIND>
int64_t cluster_size(int64_t rows, int64_t words, const Launch& launch) {
  constexpr int kHeld = kThreads * kForwardWords<In>;
  const DeviceTraits& gpu = device_traits(launch.device());
  if (gpu.capability < 90 || sizeof(In) == 8) return 1;  // float64 has no kernels for clusters
  const int64_t idle = kForwardBlocks<In> * gpu.processors / rows;  // blocks that would find room beside one for each row
  const int64_t wanted = KIND == Divergence::jensen_shannon ? std::max(idle, ceil_div(words, kHeld)) : idle;
  const int64_t blocks = std::min(wanted, ceil_div(words, kHeld / 4));
  return blocks > 8 ? kMaxCluster : std::max<int64_t>(blocks, 1);
}

struct Rowed : Matrices {
  Rowed(const Tensor& student, const Tensor& teacher, const MaybeTensor& labels, const char* op)
      : Matrices(student, teacher, labels, op, [](const Tensor& t) { return dense(t); }) {}

  template <typename In>
  RowArgs<compute_t<In>> args(const MaybeTensor& labels, int64_t ignore_index, double beta, double temperature) const {
    using A = compute_t<In>;
    const auto* at = labels ? pointer<const int64_t>(*labels) : nullptr;
    return {x.const_data_ptr(), y.const_data_ptr(), at, ignore_index, rows, n, Units<In>::scale(temperature), static_cast<A>(beta), 0, 0,
            n % kVector<In> != 0};
  }
};

template <typename In>
unsigned share_out(RowArgs<compute_t<In>>& a, const RowLaunch& shape, const char* op) {
  const int64_t blocks = shape.blocks(a.rows);
  FASTLAYERS_CHECK(blocks <= INT32_MAX && shape.each <= INT32_MAX, op, a.rows, " rows of ", a.n, " are more than one launch takes");
  a.lanes = shape.lanes;
  a.each = static_cast<int>(shape.each);
  return static_cast<unsigned>(blocks);
}

// ---- host ---------------------------------------------------------------------------------------------------------------

template <typename In, Divergence KIND>
void run_forward(RowArgs<compute_t<In>> a, compute_t<In>* losses, compute_t<In>* stats, const Launch& launch) {
  const char* op = "divergence_forward";
  const int64_t words = words_covered(a.n, a.ragged, kVector<In>);
  const RowLaunch shape = row_launch(words, cluster_size<In, KIND>(a.rows, words, launch), kForwardWords<In>);
  const unsigned blocks = share_out<In>(a, shape, op);
  auto kernel = &divergence_forward<In, KIND, false>;
  if constexpr (sizeof(In) < 8) {
    if (shape.parts > 1) kernel = &divergence_forward<In, KIND, true>;
  }
  launch_kernel(kernel, {blocks, shape.block, 0, static_cast<int>(shape.parts)}, launch, a, losses, stats);
}

// The divergence of each row, with the numbers that the backward needs. beta 0: the Kullback-Leibler divergence of the student's
// distribution from the teacher's. Between 0 and 1: the generalised Jensen-Shannon divergence.
std::tuple<Tensor, Tensor> divergence_forward_op(const Tensor& student, const Tensor& teacher, const MaybeTensor& labels,
                                                 int64_t ignore_index, double beta, double temperature) {
  const Rowed pair(student, teacher, labels, "divergence_forward");
  const Launch launch(student);
  Tensor losses, stats;
  std::tie(losses, stats) = pair.results("divergence_forward");
  if (pair.rows == 0) return {losses, stats};
  dispatch_floating(student.scalar_type(), "divergence_forward", [&]<typename In>(In) {
    using A = compute_t<In>;
    const RowArgs<A> a = pair.args<In>(labels, ignore_index, beta, temperature);
    auto* to = pointer<A>(losses);
    auto* kept = pointer<A>(stats);
    if (beta == 0.0) run_forward<In, Divergence::kullback_leibler>(a, to, kept, launch);
    else run_forward<In, Divergence::jensen_shannon>(a, to, kept, launch);
  });
  return {losses, stats};
}

std::tuple<Tensor, Tensor> divergence_backward_op(const Tensor& dlosses, const Tensor& student, const Tensor& teacher,
                                                  const MaybeTensor& labels, int64_t ignore_index, double beta,
                                                  double temperature, const Tensor& stats, bool dstudent, bool dteacher) {
  const char* op = "divergence_backward";
  const Rowed pair(student, teacher, labels, op);
  const Launch launch(student);
  Tensor dx, dy;
  std::tie(dx, dy) = pair.gradients(dlosses, stats, dstudent, dteacher, op);
  if (pair.rows * pair.n == 0) return {dx, dy};
  dispatch_floating(student.scalar_type(), op, [&]<typename In>(In) {
    using A = compute_t<In>;
    RowArgs<A> a = pair.args<In>(labels, ignore_index, beta, temperature);
    const int64_t words = words_covered(a.n, a.ragged, kVector<In>);
    const RowLaunch shape = row_launch(words, ceil_div(words, kThreads * kBackwardWords), kBackwardWords);
    const unsigned blocks = share_out<In>(a, shape, op);
    auto kernel = &divergence_backward<In, Divergence::jensen_shannon>;
    if (beta == 0.0) kernel = &divergence_backward<In, Divergence::kullback_leibler>;
    kernel<<<blocks, shape.block, 0, launch.stream()>>>(
        a, pointer<const A>(stats), pointer<const A>(dlosses), dlosses.stride(0), static_cast<A>(temperature),
        dstudent ? pointer<In>(dx) : nullptr, dteacher ? pointer<In>(dy) : nullptr, Divider(static_cast<uint32_t>(shape.parts)));
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return {dx, dy};
}

// The sum over all elements, in the type of the computation.
Tensor kl_div_sum_op(const Tensor& input, const Tensor& target, bool log_target) {
  const FlatPair pair(input, target, "kl_div_sum", kl_div_strides);
  const Launch launch(input);
  const ScalarType compute = compute_dtype(input);
  const int64_t n = pair.x.numel();
  Tensor sum = empty_contiguous({}, compute, input);
  dispatch_floating(input.scalar_type(), "kl_div_sum", [&]<typename T>(T) {
    using A = compute_t<T>;
    const int64_t tile = static_cast<int64_t>(kThreads) * kSumWords * kVector<T>;
    const int64_t most = static_cast<int64_t>(kSumBlocks) * device_traits(launch.device()).processors;
    const int64_t blocks = std::max<int64_t>(1, std::min(most, ceil_div(n, tile)));
    Tensor partial = empty_contiguous({blocks}, compute, input);
    const auto* px = pointer<const T>(pair.x);
    const auto* pt = pointer<const T>(pair.y);
    const auto kernel = log_target ? &kl_div_sum<T, true> : &kl_div_sum<T, false>;
    kernel<<<grid_of(blocks), kThreads, 0, launch.stream()>>>(px, pt, pointer<A>(partial), n, aligned(px) && aligned(pt));
    STD_CUDA_KERNEL_LAUNCH_CHECK();
    launch_add_pieces<A>(partial, sum.mutable_data_ptr(), 1, blocks, 1, launch);
  });
  return sum;
}

Tensor kl_div_elements_op(const Tensor& input, const Tensor& target, bool log_target, ScalarType dtype) {
  const FlatPair pair(input, target, "kl_div_elements", kl_div_strides);
  const Launch launch(input);
  Tensor out = empty_strided(pair.sizes, pair.strides, dtype, input);
  const int64_t n = out.numel();
  if (n == 0) return out;
  dispatch_pair(input.scalar_type(), dtype, "kl_div_elements", [&]<typename T, typename Out>(T, Out) {
    const auto* px = pointer<const T>(pair.x);
    const auto* pt = pointer<const T>(pair.y);
    const auto kernel = log_target ? &kl_div_elements<T, Out, true> : &kl_div_elements<T, Out, false>;
    launch_flat<T, kElementWords>(kernel, n, launch, px, pt, pointer<Out>(out), n, aligned(px) && aligned(pt));
  });
  return out;
}

std::tuple<Tensor, Tensor> kl_div_backward_op(const Tensor& dy_in, const MaybeTensor& input, const Tensor& target, bool log_target,
                                              bool dinput, bool dtarget) {
  const char* op = "kl_div_backward";
  KlDivGradients of(dy_in, input, target, dinput, dtarget, op);
  const Launch launch(target);
  const int64_t n = target.numel();
  if (n == 0) return {of.dinput, of.dtarget};
  dispatch_pair(target.scalar_type(), of.dy.scalar_type(), op, [&]<typename T, typename G>(T, G) {
    const auto* pg = pointer<const G>(of.dy);
    const auto* px = dtarget ? pointer<const T>(of.pair.x) : nullptr;
    const auto* pt = pointer<const T>(of.pair.y);
    T* to_x = dinput ? pointer<T>(of.dinput) : nullptr;
    T* to_t = dtarget ? pointer<T>(of.dtarget) : nullptr;
    const bool whole = (of.one || aligned(pg)) && aligned(px) && aligned(pt);
    auto kernel = log_target ? &kl_div_backward<T, G, true, false> : &kl_div_backward<T, G, false, false>;
    if (of.one) kernel = log_target ? &kl_div_backward<T, G, true, true> : &kl_div_backward<T, G, false, true>;
    launch_flat<T, kElementWords>(kernel, n, launch, pg, px, pt, to_x, to_t, n, whole);
  });
  return {of.dinput, of.dtarget};
}

}  // namespace
}  // namespace fastlayers

STABLE_TORCH_LIBRARY_IMPL(fastlayers, CUDA, m) {
  m.impl("divergence_forward", TORCH_BOX(&fastlayers::divergence_forward_op));
  m.impl("divergence_backward", TORCH_BOX(&fastlayers::divergence_backward_op));
  m.impl("kl_div_sum", TORCH_BOX(&fastlayers::kl_div_sum_op));
  m.impl("kl_div_elements", TORCH_BOX(&fastlayers::kl_div_elements_op));
  m.impl("kl_div_backward", TORCH_BOX(&fastlayers::kl_div_backward_op));
}

// residual + dropout(x) and residual + droppath(gamma·x), forward and backward.
//
// Pure memory traffic, as elementwise.cu has it. The mask of a dropout is stored nowhere: element i keeps what word i % 4 of
// Philox4x32-10(key seed, counter i / 4) says, i counted in memory order, and the backward draws the same words again. They
// depend on no load but that of the seed, so a thread computes them while its words are on their way.
#include "common/columns.cuh"
#include "residual.h"

namespace fastlayers {
namespace {

constexpr int kRounds = 10;  // of Philox, as torch and Triton have them; kernels/residual.py and ops/residual.py too
constexpr int kDropoutWords = 2;  // of each operand in flight a thread: the mask takes its time, and more threads hide it

// The type of which a 16-byte word holds more elements: the threads divide a tensor into its words.
template <typename I, typename O>
using Narrow = std::conditional_t<sizeof(I) <= sizeof(O), I, O>;

// x·f, plus the residual where there is one.
template <typename O, int V, typename A, typename I>
__device__ __forceinline__ Vec<O, V> scaled(const Vec<I, V>& x, const Vec<A, V>& f, const Vec<O, V>* residual) {
  Vec<A, V> r = unpack<A>(x);
  if (residual) {
    const Vec<A, V> to = unpack<A>(*residual);
    unroll<V>([&](int j) { r.v[j] = fma(r.v[j], f.v[j], to.v[j]); });
  } else {
    unroll<V>([&](int j) { r.v[j] *= f.v[j]; });
  }
  return pack<O>(r);
}

// ---- dropout ------------------------------------------------------------------------------------------------------------

// The four words of Philox4x32 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3) at a 64-bit counter.
__device__ __forceinline__ uint4 philox(uint64_t key, uint64_t counter) {
  uint4 c = make_uint4(static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), 0, 0);
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t a = static_cast<uint64_t>(0xD2511F53u) * c.x, b = static_cast<uint64_t>(0xCD9E8D57u) * c.z;
    c = make_uint4(static_cast<uint32_t>(b >> 32) ^ c.y ^ k0, static_cast<uint32_t>(b),
                   static_cast<uint32_t>(a >> 32) ^ c.w ^ k1, static_cast<uint32_t>(a));
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c;
}

// Bit j: whether element i + j is kept. i is a multiple of V.
template <int V>
__device__ __forceinline__ unsigned kept_bits(uint64_t seed, int64_t i, uint32_t threshold) {
  static_assert(V == 2 || V % 4 == 0);
  unsigned kept = 0;
#pragma unroll
  for (int first = 0; first < V; first += 4) {
    const uint4 r = philox(seed, static_cast<uint64_t>(i + first) >> 2);
    const unsigned four = (r.x >= threshold) | (r.y >= threshold) << 1 | (r.z >= threshold) << 2 | (r.w >= threshold) << 3;
    kept |= V == 2 ? four >> (i & 2) : four << first;
  }
  return kept;
}

// out = x·(kept ? scale : 0), plus the residual. A product with 0 as by torch: what is not finite becomes NaN.
template <typename I, typename O, bool RESIDUAL>
__global__ void __launch_bounds__(kThreads) dropout_flat(const I* x, const O* residual, O* out, int64_t n, bool is_aligned,
                                                        const int64_t* seed, uint32_t threshold, compute_t<O> scale) {
  using A = compute_t<O>;
  using N = Narrow<I, O>;
  constexpr int V = kVector<N>;
  const auto key = static_cast<uint64_t>(*seed);
  for_block<N, kDropoutWords>(is_aligned, n, [&]<int U>(Number<U>, int first) {
    constexpr bool WHOLE = U > 1;
    Vec<I, V> wx[U];
    Vec<O, V> wr[U];
    unroll<U>([&](int u) {
      wx[u] = load_flat<I, WHOLE, V>(x, flat_index<N, kDropoutWords>(first + u), n);
      if constexpr (RESIDUAL) wr[u] = load_flat<O, WHOLE, V>(residual, flat_index<N, kDropoutWords>(first + u), n);
    });
    unroll<U>([&](int u) {
      const int64_t i = flat_index<N, kDropoutWords>(first + u);
      const unsigned kept = kept_bits<V>(key, i, threshold);
      Vec<A, V> factor;
      unroll<V>([&](int j) { factor.v[j] = kept >> j & 1 ? scale : A(0); });
      store_flat<O, WHOLE, V>(out, i, n, scaled<O, V>(wx[u], factor, RESIDUAL ? &wr[u] : nullptr));
    });
  });
}

// ---- scale and drop path ------------------------------------------------------------------------------------------------

// A vector along one dimension of a dense tensor: element i of the tensor has its element (i / inner) % size.
struct Along {
  enum Mode : int { kNone, kWords, kRuns, kEach };

  const void* data = nullptr;
  int64_t inner = 1, size = 1;
  Divider by_inner, by_size;  // unless it is wide
  Mode mode = kNone;
  bool wide = false;     // offsets beyond what a Divider takes
  bool float32 = false;  // to float16 or bfloat16 tensors

  // What takes looking up element by element, or 64 bits.
  bool general() const { return mode == kEach || (mode != kNone && wide); }

  template <bool WIDE>
  __device__ __forceinline__ int64_t run(int64_t i) const {
    if constexpr (WIDE)
      if (wide) return i / inner;
    return by_inner.quotient(static_cast<uint32_t>(i));
  }
  template <bool WIDE>
  __device__ __forceinline__ int64_t wrapped(int64_t run) const {
    if constexpr (WIDE)
      if (wide) return run % size;
    const auto r = static_cast<uint32_t>(run);
    return r - by_size.quotient(r) * static_cast<uint32_t>(size);
  }

  // Those of elements i to i + V - 1. G: what data holds.
  template <typename G, typename A, int V, bool GENERAL>
  __device__ __forceinline__ Vec<A, V> of(int64_t i) const {
    const G* p = static_cast<const G*>(data);
    if (mode == kWords) return unpack<A>(load_vec<G, V>(p + wrapped<GENERAL>(i)));
    Vec<A, V> r;
    const int64_t q = run<GENERAL>(i);
    int64_t at = wrapped<GENERAL>(q), left = (q + 1) * inner - i;
    if constexpr (GENERAL) {
      if (mode == kEach) {
        unroll<V>([&](int j) {
          r.v[j] = convert<A>(p[at]);
          if (--left > 0) return;
          left = inner;
          at = at + 1 == size ? 0 : at + 1;
        });
        return r;
      }
    }
    r = filled<A, V>(convert<A>(p[at]));
    if (left < V) {  // two runs to a word, never more
      const A next = convert<A>(p[at + 1 == size ? 0 : at + 1]);
#pragma unroll
      for (int j = 1; j < V; ++j)
        if (j >= left) r.v[j] = next;
    }
    return r;
  }
};

// scale·gamma·keep, of which gamma and keep may be absent. T is gamma's type, unless it is float32.
template <typename A>
struct Factor {
  Along gamma, keep;
  A scale;

  bool general() const { return gamma.general() || keep.general(); }

  template <typename T, int V, bool GENERAL>
  __device__ __forceinline__ Vec<A, V> of(int64_t i) const {
    Vec<A, V> f = filled<A, V>(scale);
    if (gamma.mode != Along::kNone) {
      const Vec<A, V> g = sizeof(T) == 2 && gamma.float32 ? gamma.of<float, A, V, GENERAL>(i) : gamma.of<T, A, V, GENERAL>(i);
      unroll<V>([&](int j) { f.v[j] *= g.v[j]; });
    }
    if (keep.mode != Along::kNone) {
      const Vec<A, V> k = keep.of<A, A, V, GENERAL>(i);
      unroll<V>([&](int j) { f.v[j] *= k.v[j]; });
    }
    return f;
  }
};

// out = x·factor, plus the residual. GENERAL: whatever the factor, a word at a time.
template <typename I, typename O, bool RESIDUAL, bool GENERAL>
__global__ void __launch_bounds__(kThreads) scale_flat(const I* x, const O* residual, O* out, int64_t n, bool is_aligned,
                                                      const __grid_constant__ Factor<compute_t<O>> factor) {
  using N = Narrow<I, O>;
  constexpr int V = kVector<N>;
  const auto take = [&]<int U, bool WHOLE>(Number<U>, std::bool_constant<WHOLE>, int first) {
    Vec<I, V> wx[U];
    Vec<O, V> wr[U];
    unroll<U>([&](int u) {
      wx[u] = load_flat<I, WHOLE, V>(x, flat_index<N>(first + u), n);
      if constexpr (RESIDUAL) wr[u] = load_flat<O, WHOLE, V>(residual, flat_index<N>(first + u), n);
    });
    unroll<U>([&](int u) {
      const int64_t i = flat_index<N>(first + u);
      const auto f = factor.template of<N, V, GENERAL>(i);
      store_flat<O, WHOLE, V>(out, i, n, scaled<O, V>(wx[u], f, RESIDUAL ? &wr[u] : nullptr));
    });
  };
  if constexpr (GENERAL) {
#pragma unroll 1
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t i = flat_index<N>(u);
      if (is_aligned && i + V <= n) take(Number<1>{}, std::true_type{}, u);
      else if (i < n) take(Number<1>{}, std::false_type{}, u);
    }
  } else {
    for_block<N>(is_aligned, n, [&](auto words, int first) { take(words, std::bool_constant<(words.value > 1)>{}, first); });
  }
}

// The gradients of x and gamma in one pass: dx = dy·gamma·keep·scale, and dgamma the sum of dy·x·keep·scale over all but
// gamma's dimension. The tensors are [repeat, columns, inner] in memory, gamma along the columns, each of whose rows of `columns` or of
// `inner` elements is of one sample.
struct GammaArgs {
  const void *gamma, *keep;         // keep: a factor for each sample, or null
  bool float32;                     // gamma, to float16 or bfloat16 tensors
  Divider rows_of_sample, samples;  // a row belongs to sample (row / rows_of_sample) % samples
};

// inner > 1.
struct RowArgs {
  int64_t repeat, columns, inner;
  int64_t pieces;    // of a row, a block each
  int across, down;  // threads of a block over a row, and over the rows
};

template <typename A>
__device__ __forceinline__ A sample_factor(const GammaArgs& a, int64_t row, A scale) {
  const uint32_t sample = a.rows_of_sample.quotient(static_cast<uint32_t>(row));
  return scale * static_cast<const A*>(a.keep)[sample - a.samples.quotient(sample) * a.samples.divisor];
}

template <typename A, typename T>
__device__ __forceinline__ A gamma_at(const GammaArgs& a, int64_t column) {
  if (sizeof(T) == 2 && a.float32) return static_cast<A>(static_cast<const float*>(a.gamma)[column]);
  return convert<A>(static_cast<const T*>(a.gamma)[column]);
}

// inner == 1.
template <typename G, typename T, int V, bool KEEP>
__global__ void __launch_bounds__(kThreads, kColumnBlocks<T>)
    scale_backward_columns(const G* __restrict__ dy, const T* __restrict__ x, T* __restrict__ dx, compute_t<T>* partial, T* dgamma,
                           compute_t<T> scale, const Columns c, const __grid_constant__ GammaArgs a) {
  using A = compute_t<T>;
  ColumnThread<V> me(c, blockIdx.x);
  Vec<A, V> sum = filled<A, V>(A(0)), gamma = sum;
  if (me.active) {
    unroll<V>([&](int j) { gamma.v[j] = gamma_at<A, T>(a, me.column + j) * (KEEP ? A(1) : scale); });
  }
  const auto nothing = static_cast<unsigned>(c.repeat >> 62);
  me.for_rows(c, [&]<int U>(Number<U>, int64_t row) {
    Vec<G, V> wg[U];
    Vec<T, V> wx[U];
    [[maybe_unused]] A factor[U];
    unroll<U>([&](int u) {
      const int64_t r = row + u * me.step, i = r * c.columns + me.column;
      wg[u] = load_vec<G, V>(dy + i);
      wx[u] = load_vec<T, V>(x + i);
      if constexpr (KEEP) factor[u] = sample_factor<A>(a, r, scale);
    });
    if constexpr (std::is_same_v<G, T>) wait_for_all(wx, wg, nothing);
    unroll<U>([&](int u) {
      Vec<A, V> g = unpack<A>(wg[u]);
      const Vec<A, V> w = unpack<A>(wx[u]);
      unroll<V>([&](int j) {
        if constexpr (KEEP) g.v[j] *= factor[u];
        sum.v[j] = fma(g.v[j], w.v[j], sum.v[j]);
        g.v[j] *= gamma.v[j];
      });
      store_vec<T, V>(dx + (row + u * me.step) * c.columns + me.column, pack<T>(g));
    });
  });
  if constexpr (!KEEP) {
    unroll<V>([&](int j) { sum.v[j] *= scale; });
  }
  me.store(c, sum, partial, dgamma);
}

// inner > 1: a row of `inner`, or a piece of it, to `across` threads.
template <typename G, typename T, int V>
__global__ void __launch_bounds__(kThreads) scale_backward_rows(const G* __restrict__ dy, const T* __restrict__ x,
                                                               T* __restrict__ dx, compute_t<T>* partial, compute_t<T> scale,
                                                               const RowArgs r, const __grid_constant__ GammaArgs a) {
  using A = compute_t<T>;
  __shared__ A shared[kThreads / 32];
  const int lane = threadIdx.x % r.across;
  const int64_t row = blockIdx.x / r.pieces * r.down + threadIdx.x / r.across, piece = blockIdx.x % r.pieces;
  const int64_t words = r.inner / V, each = (words + r.pieces - 1) / r.pieces;
  const int64_t last = (piece + 1) * each < words ? (piece + 1) * each : words;
  const int64_t column = row % r.columns;
  const bool active = row < r.repeat * r.columns;
  A sum = 0;
  if (active) {
    const A factor = a.keep ? sample_factor<A>(a, row, scale) : scale;
    const A to_x = factor * gamma_at<A, T>(a, column);
    const int64_t base = row * r.inner;
#pragma unroll 4
    for (int64_t word = piece * each + lane; word < last; word += r.across) {
      Vec<A, V> g = unpack<A>(load_vec<G, V>(dy + base + word * V));
      const Vec<A, V> w = unpack<A>(load_vec<T, V>(x + base + word * V));
      A part = 0;
      unroll<V>([&](int j) {
        part = fma(g.v[j], w.v[j], part);
        g.v[j] *= to_x;
      });
      store_vec<T, V>(dx + base + word * V, pack<T>(g));
      sum += part;
    }
    sum *= factor;
  }
  sum = across_sum(sum, shared, r.across);
  if (lane == 0 && active) partial[(row / r.columns * r.pieces + piece) * r.columns + column] = sum;
}

// ---- host ---------------------------------------------------------------------------------------------------------------

// Calls f(std::bool_constant<whether a residual is added>{}) for the cases that kernels are built for: a sum may be wider than x, a
// gradient narrower than what comes in.
template <typename I, typename O, typename F>
void with_residual(bool adds, const char* op, F&& f) {
  FASTLAYERS_CHECK(sizeof(I) == sizeof(O) || (sizeof(I) < sizeof(O)) == adds, op, "no kernel ",
                   adds ? "adds a residual narrower than x" : "widens x alone");
  if constexpr (sizeof(I) < sizeof(O)) f(std::true_type{});
  else if constexpr (sizeof(I) > sizeof(O)) f(std::false_type{});
  else adds ? f(std::true_type{}) : f(std::false_type{});
}

Tensor dropout_add(const Tensor& x, const MaybeTensor& residual, double p, const Tensor& seed, ScalarType dtype) {
  const char* op = "dropout_add";
  const uint32_t threshold = dropout_threshold(p, seed, x, op);
  const Dims own = dims_of(x.strides());
  const Operands operands(x, residual, result_strides(dims_of(x.sizes()), {&own}), dtype, op);
  const Launch launch(x);
  const Tensor& out = operands.out;
  const int64_t n = out.numel();
  if (n == 0) return out;
  dispatch_pair<true>(x.scalar_type(), dtype, op, [&]<typename I, typename O>(I, O) {
    using N = Narrow<I, O>;
    with_residual<I, O>(residual.has_value(), op, [&](auto adds) {
      launch_kernel(dropout_flat<I, O, decltype(adds)::value>, {flat_blocks<N, kDropoutWords>(n), kThreads}, launch,
                    pointer<const I>(operands.x), pointer<const O>(operands.residual), pointer<O>(out), n, operands.whole_words(),
                    pointer<const int64_t>(seed), threshold, static_cast<compute_t<O>>(1.0 / (1.0 - p)));
    });
  });
  return out;
}

// A vector along dimension `dim` of a dense tensor of n elements; -1: one value.
template <typename N>
Along make_along(const Tensor& t, int64_t dim, const Dims& sizes, const Dims& strides, int64_t n) {
  constexpr int64_t V = kVector<N>;
  constexpr int64_t kBeyond = 1 << 16;  // past the end, of which a block's last words ask too
  Along along;
  along.data = t.const_data_ptr();
  const bool varies = dim >= 0 && sizes[dim] > 1;
  along.inner = varies ? strides[dim] : std::max(n, V);
  along.size = varies ? sizes[dim] : 1;
  along.wide = n > INT32_MAX - kBeyond;
  if (!along.wide) {
    along.by_inner = Divider(static_cast<uint32_t>(along.inner));
    along.by_size = Divider(static_cast<uint32_t>(along.size));
  }
  if (along.inner == 1 && along.size % V == 0 && aligned(along.data)) along.mode = Along::kWords;
  else along.mode = along.inner >= V ? Along::kRuns : Along::kEach;
  along.float32 = t.scalar_type() == ScalarType::Float;
  return along;
}

// x·gamma·keep·scale, plus the residual: gamma a vector along one dimension of x, keep a factor for each index of dimension 0.
Tensor scale_add(const Tensor& x, const MaybeTensor& gamma, const MaybeTensor& residual, const MaybeTensor& keep, double scale,
                 ScalarType dtype) {
  const char* op = "scale_add";
  const int64_t dim = gamma ? gamma_dim(*gamma, x, op) : -1;
  if (keep) check_keep(*keep, x, op);
  const Operands operands(x, residual, product_strides(x, gamma, residual, keep, op), dtype, op);
  const Launch launch(x);
  const Dims& sizes = operands.sizes;
  const Tensor& out = operands.out;
  const int64_t n = out.numel();
  if (n == 0) return out;
  dispatch_pair<true>(x.scalar_type(), dtype, op, [&]<typename I, typename O>(I, O) {
    using N = Narrow<I, O>;
    if (gamma) check_gamma(*gamma, sizeof(I) <= sizeof(O) ? x.scalar_type() : dtype, op);
    Factor<compute_t<O>> factor;
    factor.scale = static_cast<compute_t<O>>(scale);
    if (gamma) factor.gamma = make_along<N>(*gamma, dim, sizes, operands.strides, n);
    if (keep) factor.keep = make_along<N>(*keep, 0, sizes, operands.strides, n);
    with_residual<I, O>(residual.has_value(), op, [&](auto adds) {
      const auto run = [&](auto general) {
        launch_kernel(scale_flat<I, O, decltype(adds)::value, decltype(general)::value>, {flat_blocks<N>(n), kThreads}, launch,
                      pointer<const I>(operands.x), pointer<const O>(operands.residual), pointer<O>(out), n, operands.whole_words(),
                      factor);
      };
      factor.general() ? run(std::true_type{}) : run(std::false_type{});
    });
  });
  return out;
}

// Launches the backward's kernels.
template <typename G, typename T>
struct ScaleBackward {
  using A = compute_t<T>;
  const GammaGradients& of;
  const G* dy;
  const T* x;
  T* dx;
  A scale;
  const GammaArgs& gamma;
  const Launch& launch;

  // Adds the pieces up in gamma's dtype.
  void finish(const Tensor& partial, int64_t pieces) const {
    void* const to = of.dgamma.mutable_data_ptr();
    if (sizeof(T) == 2 && gamma.float32) launch_add_pieces<A>(partial, to, 1, pieces, of.columns, launch);
    else launch_add_pieces<T>(partial, to, 1, pieces, of.columns, launch);
  }

  template <int V>
  void run_rows() const {
    RowArgs r{of.repeat, of.columns, of.inner, 1, 1, 1};
    const int64_t blocks = share_rows(r, of.repeat * of.columns, of.inner / V, launch);
    const Tensor partial = empty_partial<A>(of.repeat * r.pieces, of.columns, of.x);
    launch_kernel(scale_backward_rows<G, T, V>, {blocks, kThreads}, launch, dy, x, dx, pointer<A>(partial), scale, r, gamma);
    finish(partial, of.repeat * r.pieces);
  }

  template <int V>
  void run_columns() const {
    const Columns c = Columns::plan<A>(of.repeat, of.columns, V, launch.device());
    T* sums = c.pieces == 1 && of.dgamma.scalar_type() == of.x.scalar_type() ? pointer<T>(of.dgamma) : nullptr;
    const Tensor partial = empty_partial<A>(sums ? 0 : c.pieces, of.columns, of.x);
    const auto kernel = gamma.keep ? scale_backward_columns<G, T, V, true> : scale_backward_columns<G, T, V, false>;
    launch_kernel(kernel, {c.blocks(), c.threads(), c.shared<A>(V)}, launch, dy, x, dx, pointer<A>(partial), sums, scale, c, gamma);
    if (!sums) finish(partial, c.pieces);
  }
};

// The gradients of x and gamma.
std::tuple<Tensor, Tensor> scale_add_backward(const Tensor& dy_in, const Tensor& x_in, const Tensor& gamma, const MaybeTensor& keep,
                                              double scale) {
  constexpr const char* op = "scale_add_backward";
  GammaGradients of(dy_in, x_in, gamma, keep, op);
  GammaArgs a{};
  // Where samples change within a row, or rows are too many to count in 32 bits, the samples are dropped first.
  if (of.samples_change_within_a_row() || (of.dropping && of.rows() > INT32_MAX)) {
    const Tensor kept = scale_add(of.dy, std::nullopt, std::nullopt, keep, scale, of.dy.scalar_type());
    return scale_add_backward(kept, of.x, gamma, std::nullopt, 1.0);
  }
  if (of.dropping) {
    a.rows_of_sample = Divider(static_cast<uint32_t>(of.strides[0] / of.row));
    a.samples = Divider(static_cast<uint32_t>(of.sizes[0]));
  }
  const Launch launch(of.x);
  of.allocate(gamma);
  a.gamma = pointer<const void>(gamma);
  a.keep = pointer<const void>(keep);
  a.float32 = gamma.scalar_type() == ScalarType::Float;
  dispatch_pair<true>(of.dy.scalar_type(), of.x.scalar_type(), op, [&]<typename G, typename T>(G, T) {
    if constexpr (sizeof(G) < sizeof(T)) {
      FASTLAYERS_CHECK(false, op, "no kernel for a dy narrower than x");
    } else {
      const ScaleBackward<G, T> backward{of, pointer<const G>(of.dy), pointer<const T>(of.x), pointer<T>(of.dx),
                                         static_cast<compute_t<T>>(scale), a, launch};
      const auto run = [&]<int V>(Number<V>) {
        if (of.inner > 1) backward.template run_rows<V>();
        else backward.template run_columns<V>();
      };
      if (aligned(backward.dy) && aligned(backward.x) && of.row % kVector<T> == 0) run(Number<kVector<T>>{});
      else run(Number<1>{});
    }
  });
  return {of.dx, of.dgamma};
}

}  // namespace
}  // namespace fastlayers

STABLE_TORCH_LIBRARY_IMPL(fastlayers, CUDA, m) {
  m.impl("dropout_add", TORCH_BOX(&fastlayers::dropout_add));
  m.impl("scale_add", TORCH_BOX(&fastlayers::scale_add));
  m.impl("scale_add_backward", TORCH_BOX(&fastlayers::scale_add_backward));
}

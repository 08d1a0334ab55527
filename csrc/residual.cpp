// residual + dropout(x) and residual + droppath(gamma·x) for CPU tensors, forward and backward, on torch's threads: one pass over memory
// each. The masks are those of the CUDA kernels (residual.cu), which explains them.
#include "residual.h"

#include "common/vector.h"

namespace fastlayers::residual {
namespace {

// ---- dropout ------------------------------------------------------------------------------------------------------------

constexpr int kRounds = 10;
constexpr int64_t kStretch = 512;  // elements whose words are drawn before they are used, in the first-level cache

// The words of Philox4x32 at kCounters neighbouring counters. Each has a lane of 64 bits, which its products fill.
typedef uint64_t Longs __attribute__((vector_size(kVectorWidth)));
constexpr int kGroups = 4;  // vectors whose products do not wait for each other
constexpr int kCounters = kGroups * kVectorWidth / sizeof(uint64_t);

FASTLAYERS_INLINE void philox(uint32_t* words, uint64_t key, uint64_t counter) {
  constexpr uint64_t kLow = 0xffffffff;
  Longs a[kGroups], b[kGroups], c[kGroups] = {}, d[kGroups] = {};
  for (int g = 0; g < kGroups; ++g) {
    const Longs own = lane_numbers<Longs>() + (counter + g * (kCounters / kGroups));
    a[g] = own & kLow;
    b[g] = own >> 32;
  }
  uint32_t first = static_cast<uint32_t>(key), second = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < kRounds; ++round) {
    for (int g = 0; g < kGroups; ++g) {
      const Longs of_a = a[g] * uint64_t{0xD2511F53}, of_c = c[g] * uint64_t{0xCD9E8D57};
      a[g] = (of_c >> 32) ^ b[g] ^ uint64_t{first};
      c[g] = (of_a >> 32) ^ d[g] ^ uint64_t{second};
      b[g] = of_c & kLow;
      d[g] = of_a & kLow;
    }
    first += 0x9E3779B9u;
    second += 0xBB67AE85u;
  }
  for (int g = 0; g < kGroups; ++g) {
    const Longs one = a[g] | b[g] << 32, two = c[g] | d[g] << 32;
    // one[0], two[0], one[1], two[1] and so on
    constexpr int n = kLanes<double>;
    const Longs place = lane_numbers<Longs>(), mixed = (place >> 1) + (place & 1) * uint64_t{n};
    const Longs low = __builtin_shuffle(one, two, mixed), high = __builtin_shuffle(one, two, mixed + uint64_t{n / 2});
    std::memcpy(words + g * 2 * kLanes<float>, &low, sizeof(low));
    std::memcpy(words + (g * 2 + 1) * kLanes<float>, &high, sizeof(high));
  }
}

typedef uint32_t HalfWords __attribute__((vector_size(kVectorWidth / 2)));

// scale in the lanes whose words are not below the threshold, 0 in the others.
template <typename A>
FASTLAYERS_INLINE Vector<A> kept(const uint32_t* words, uint32_t threshold, A scale) {
  std::conditional_t<std::is_same_v<A, double>, HalfWords, vectors::Words> some;
  std::memcpy(&some, words, sizeof(some));
  if constexpr (std::is_same_v<A, double>) {
    return __builtin_convertvector(some, Longs) >= uint64_t{threshold} ? broadcast<A>(scale) : Vector<A>{};
  } else {
    return some >= threshold ? broadcast<A>(scale) : Vector<A>{};
  }
}

template <typename I, typename O>
struct Dropout {
  const I* x;
  const O* residual;  // may be null
  O* out;
  uint64_t seed;
  uint32_t threshold;
  compute_t<O> scale;
};

// out = x·(kept ? scale : 0), plus the residual, from the element `first`, a multiple of kStretch, to `last`.
template <typename I, typename O>
void dropout_flat(const Dropout<I, O>& of, int64_t first, int64_t last) {
  using A = compute_t<O>;
  uint32_t words[kStretch] = {};
  for (int64_t start = first; start < last; start += kStretch) {
    const int64_t n = std::min(last - start, kStretch);
    for (int64_t i = 0; i < n; i += 4 * kCounters) philox(words + i, of.seed, static_cast<uint64_t>(start + i) / 4);
    const I* x = of.x + start;
    O* out = of.out + start;
    const O* residual = of.residual == nullptr ? nullptr : of.residual + start;
    for_vectors<A>(n, [&](int64_t i, auto lanes) FASTLAYERS_LANES {
      Vector<A> v = lanes.load(x + i) * kept<A>(words + i, of.threshold, of.scale);
      if (residual != nullptr) v += lanes.load(residual + i);
      lanes.store(out + i, v);
    });
  }
}

Tensor dropout_add(const Tensor& x, const MaybeTensor& residual, double p, const Tensor& seed, ScalarType dtype) {
  const char* op = "dropout_add";
  const uint32_t threshold = dropout_threshold(p, seed, x, op);
  const Dims own = dims_of(x.strides());
  const Operands operands(x, residual, result_strides(dims_of(x.sizes()), {&own}), dtype, op);
  const Tensor& out = operands.out;
  const int64_t n = out.numel();
  if (n == 0) return out;
  const auto key = static_cast<uint64_t>(*pointer<const int64_t>(seed));
  dispatch_pair<true>(x.scalar_type(), dtype, op, [&]<typename I, typename O>(I, O) {
    const Dropout<I, O> of{pointer<const I>(operands.x), pointer<const O>(operands.residual), pointer<O>(out), key, threshold,
                           static_cast<compute_t<O>>(1.0 / (1.0 - p))};
    torch::stable::parallel_for(0, (n + kStretch - 1) / kStretch, kGrain / kStretch, [&](int64_t first, int64_t last) {
      dropout_flat<I, O>(of, first * kStretch, std::min(n, last * kStretch));
    });
  });
  return out;
}

// ---- scale and drop path ------------------------------------------------------------------------------------------------

// A vector along a dimension of a dense tensor: element i has its element (i / inner) % size. Null where there is none.
template <typename A>
struct Along {
  const A* data = nullptr;
  int64_t inner = 1, size = 1;

  Along() = default;
  Along(const A* of, int64_t dim, const Dims& sizes, const Dims& strides, int64_t n) : data(of), inner(n) {
    if (of != nullptr && dim >= 0 && sizes[dim] > 1) inner = strides[dim], size = sizes[dim];
  }
  // The first element after i that does not go on with the same value, or where a vector of the rows begins again.
  FASTLAYERS_INLINE int64_t end(int64_t i) const {
    const int64_t run = inner == 1 ? size : inner;
    return (i / run + 1) * run;
  }
  FASTLAYERS_INLINE int64_t index(int64_t i) const { return i / inner % size; }
};

template <typename A>
struct Factor {
  Along<A> gamma, keep;
  A scale;
};

// out = x·gamma·keep·scale, plus the residual unless it is null, from the element `first` to `last`.
template <typename I, typename O>
void scale_flat(const I* x_in, const O* residual, O* out_in, const Factor<compute_t<O>>& f, int64_t first,
                int64_t last) {
  using A = compute_t<O>;
  for (int64_t start = first; start < last;) {
    int64_t end = last;
    A factor = f.scale;
    const A* row = nullptr;
    if (f.gamma.data != nullptr) {
      end = std::min(end, f.gamma.end(start));
      const A* at = f.gamma.data + f.gamma.index(start);
      if (f.gamma.inner == 1) row = at;
      else factor *= *at;
    }
    if (f.keep.data != nullptr) {
      end = std::min(end, f.keep.inner == 1 ? start + 1 : f.keep.end(start));
      factor *= f.keep.data[f.keep.index(start)];
    }
    const I* x = x_in + start;
    const O* to = residual == nullptr ? nullptr : residual + start;
    O* out = out_in + start;
    for_vectors<A>(end - start, [&](int64_t i, auto lanes) FASTLAYERS_LANES {
      Vector<A> v = broadcast<A>(factor);
      if (row != nullptr) v *= lanes.load(row + i);
      v *= lanes.load(x + i);
      if (to != nullptr) v += lanes.load(to + i);
      lanes.store(out + i, v);
    });
    start = end;
  }
}

// gamma in the arithmetic.
template <typename A>
std::vector<A> widened(const Tensor& gamma) {
  std::vector<A> wide(gamma.numel());
  dispatch_floating(gamma.scalar_type(), "scale_add", [&](auto zero) {
    const auto* from = pointer<const decltype(zero)>(gamma);
    for (size_t i = 0; i < wide.size(); ++i) wide[i] = static_cast<A>(from[i]);
  });
  return wide;
}

// x·gamma·keep·scale, plus the residual: gamma a vector along one dimension of x, keep a factor for each index of dimension 0.
Tensor scale_add(const Tensor& x, const MaybeTensor& gamma, const MaybeTensor& residual, const MaybeTensor& keep, double scale,
                 ScalarType dtype) {
  const char* op = "scale_add";
  const int64_t dim = gamma ? gamma_dim(*gamma, x, op) : -1;
  if (keep) check_keep(*keep, x, op);
  const Operands operands(x, residual, product_strides(x, gamma, residual, keep, op), dtype, op);
  const Dims& sizes = operands.sizes;
  const Tensor& out = operands.out;
  const int64_t n = out.numel();
  if (n == 0) return out;
  if (gamma) check_gamma(*gamma, x.element_size() <= out.element_size() ? x.scalar_type() : dtype, op);
  dispatch_pair<true>(x.scalar_type(), dtype, op, [&]<typename I, typename O>(I, O) {
    using A = compute_t<O>;
    const std::vector<A> wide = gamma ? widened<A>(*gamma) : std::vector<A>();
    Factor<A> f;
    f.scale = static_cast<A>(scale);
    if (gamma) f.gamma = Along<A>(wide.data(), dim, sizes, operands.strides, n);
    if (keep) f.keep = Along<A>(pointer<const A>(keep), 0, sizes, operands.strides, n);
    torch::stable::parallel_for(0, n, kGrain, [&](int64_t first, int64_t last) {
      scale_flat<I, O>(pointer<const I>(operands.x), pointer<const O>(operands.residual), pointer<O>(out), f, first, last);
    });
  });
  return out;
}

// ---- the gradients of x and gamma ---------------------------------------------------------------------------------------

// Tensors of [repeat, columns, inner] in memory, gamma along the columns, each of whose rows of `columns` or of `inner` elements is of
// one sample.
template <typename G, typename T>
struct Backward {
  using A = compute_t<T>;
  const G* dy;
  const T* x;
  T* dx;
  const A *gamma, *keep;  // keep may be null
  A scale;
  int64_t columns, inner, rows_of_sample, samples;

  FASTLAYERS_INLINE A factor(int64_t row) const { return keep == nullptr ? scale : scale * keep[row / rows_of_sample % samples]; }
};

// Rows where inner is 1. The sums of kAtOnce rows are added up before they are added to the others, which costs fewer digits.
template <typename G, typename T>
void backward_columns(const Backward<G, T>& b, int64_t first, int64_t last, compute_t<T>* sums, compute_t<T>* some) {
  using A = compute_t<T>;
  constexpr int64_t kAtOnce = 64;
  for (int64_t start = first; start < last; start += kAtOnce) {
    for (int64_t row = start; row < std::min(last, start + kAtOnce); ++row) {
      const G* dy = b.dy + row * b.columns;
      const T* x = b.x + row * b.columns;
      T* dx = b.dx + row * b.columns;
      const A factor = b.factor(row);
      for_vectors<A>(b.columns, [&](int64_t i, auto lanes) FASTLAYERS_LANES {
        const Vector<A> g = lanes.load(dy + i) * factor;
        lanes.store(some + i, lanes.load(some + i) + g * lanes.load(x + i));
        lanes.store(dx + i, g * lanes.load(b.gamma + i));
      });
    }
    for_vectors<A>(b.columns, [&](int64_t i, auto lanes) FASTLAYERS_LANES {
      lanes.store(sums + i, lanes.load(sums + i) + lanes.load(some + i));
      lanes.store(some + i, Vector<A>{});
    });
  }
}

// Pieces of rows where inner is longer.
template <typename G, typename T>
void backward_rows(const Backward<G, T>& b, int64_t first, int64_t last, int64_t pieces, compute_t<T>* sums) {
  using A = compute_t<T>;
  for (int64_t at = first; at < last; ++at) {
    const int64_t row = at / pieces, from = at % pieces * kGrain, n = std::min(b.inner - from, kGrain), start = row * b.inner + from;
    const A factor = b.factor(row), to_x = factor * b.gamma[row % b.columns];
    Total<A> total;
    for_vectors<A>(n, [&](int64_t i, auto lanes) FASTLAYERS_LANES {
      const Vector<A> g = lanes.load(b.dy + start + i);
      total.add(g * lanes.load(b.x + start + i));
      lanes.store(b.dx + start + i, g * to_x);
    });
    sums[row % b.columns] += total.sum() * factor;
  }
}

template <typename G, typename T>
void run_backward(const Backward<G, T>& b, int64_t rows, const Tensor& dgamma) {
  using A = compute_t<T>;
  // Each task has rows and sums of its own, which are added up in the order of the tasks: the same for as many threads.
  const int64_t pieces = b.inner == 1 ? 1 : (b.inner + kGrain - 1) / kGrain, units = rows * pieces;
  const int64_t most = std::max<int64_t>(1, rows * (b.inner == 1 ? b.columns : b.inner) / kGrain);
  const int64_t tasks = std::min({static_cast<int64_t>(torch::stable::get_num_threads()), most, units});
  const int64_t each = (units + tasks - 1) / tasks;
  std::vector<A> sums(2 * tasks * b.columns);
  torch::stable::parallel_for(0, tasks, 1, [&](int64_t first_task, int64_t last_task) {
    for (int64_t task = first_task; task < last_task; ++task) {
      const int64_t first = std::min(units, task * each), last = std::min(units, first + each);
      A* const own = sums.data() + 2 * task * b.columns;
      if (b.inner == 1) backward_columns<G, T>(b, first, last, own, own + b.columns);
      else backward_rows<G, T>(b, first, last, pieces, own);
    }
  });
  dispatch_floating(dgamma.scalar_type(), "scale_add_backward", [&](auto zero) {
    auto* to = pointer<decltype(zero)>(dgamma);
    for (int64_t i = 0; i < b.columns; ++i) {
      A sum = 0;
      for (int64_t task = 0; task < tasks; ++task) sum += sums[2 * task * b.columns + i];
      to[i] = static_cast<decltype(zero)>(sum);
    }
  });
}

std::tuple<Tensor, Tensor> scale_add_backward(const Tensor& dy_in, const Tensor& x_in, const Tensor& gamma, const MaybeTensor& keep,
                                              double scale) {
  constexpr const char* op = "scale_add_backward";
  GammaGradients of(dy_in, x_in, gamma, keep, op);
  if (of.samples_change_within_a_row()) {  // they are dropped first
    const Tensor kept = scale_add(of.dy, std::nullopt, std::nullopt, keep, scale, of.dy.scalar_type());
    return scale_add_backward(kept, of.x, gamma, std::nullopt, 1.0);
  }
  of.allocate(gamma);
  dispatch_pair<true>(of.dy.scalar_type(), of.x.scalar_type(), op, [&]<typename G, typename T>(G, T) {
    if constexpr (sizeof(G) < sizeof(T)) {
      FASTLAYERS_CHECK(false, op, "no kernel for a dy narrower than x");
    } else {
      using A = compute_t<T>;
      const std::vector<A> wide = widened<A>(gamma);
      const Backward<G, T> b{pointer<const G>(of.dy), pointer<const T>(of.x), pointer<T>(of.dx), wide.data(), pointer<const A>(keep),
                             static_cast<A>(scale), of.columns, of.inner, of.dropping ? of.strides[0] / of.row : of.x.numel(),
                             keep ? keep->numel() : 1};
      run_backward(b, of.rows(), of.dgamma);
    }
  });
  return {of.dx, of.dgamma};
}

}  // namespace
}  // namespace fastlayers::residual

FASTLAYERS_CPU_KERNELS(residual, m) {
  m.impl("dropout_add", TORCH_BOX(&fastlayers::residual::dropout_add));
  m.impl("scale_add", TORCH_BOX(&fastlayers::residual::scale_add));
  m.impl("scale_add_backward", TORCH_BOX(&fastlayers::residual::scale_add_backward));
}

// softmax and log_softmax of x·scale + mask for CPU tensors, forward and backward. The stock composition writes the scores once for the
// scale and once for the mask, and softmax reads them; here a row of scores stays in a thread's memory, in the cache.
//
//   rows     the dimension is contiguous.
//   columns  it is strided: vectors go across the rows, some hundred of them at a time. Without a mask.
#include "vector_logits.h"

namespace fastlayers::softmax {
namespace {

// ---- rows ---------------------------------------------------------------------------------------------------------------

struct NoMask {};

typedef uint8_t Bytes __attribute__((vector_size(kLanes<float>)));
typedef uint8_t FewBytes __attribute__((vector_size(kLanes<double>)));

// Which elements of a vector a boolean mask keeps: 0 for the others.
template <typename A>
FASTLAYERS_INLINE WholeVector<A> load_flags(const bool* mask, int64_t count) {
  using namespace vectors;
  std::conditional_t<std::is_same_v<A, double>, FewBytes, Bytes> bytes{};
  if (count == kLanes<A>) std::memcpy(&bytes, mask, sizeof(bytes));
  else std::memcpy(&bytes, mask, count);
  if constexpr (std::is_same_v<A, double>) return __builtin_convertvector(bytes, Longs);
  else return __builtin_convertvector(__builtin_convertvector(bytes, Halves), Ints);  // in one step GCC 12 takes element by element
}

// Writes a row of scores and returns the largest. M: bool, an additive mask's type, or NoMask. `step`: 0 for a mask that has one element
// for the row, else 1.
template <typename T, typename M, typename A = compute_t<T>>
FASTLAYERS_CALLED A write_scores(A* to, const T* x, int64_t n, A scale, [[maybe_unused]] const M* mask,
               [[maybe_unused]] int64_t step) {
  const A nothing = -std::numeric_limits<A>::infinity();
  Vector<A> most = broadcast<A>(std::numeric_limits<A>::lowest());
  for_vectors<A>(n, [&](int64_t i, auto lanes) FASTLAYERS_LANES {
    Vector<A> v = lanes.load(x + i) * scale;
    if constexpr (std::is_same_v<M, bool>) {
      if (step != 0) v = load_flags<A>(mask + i, lanes.count) != 0 ? v : broadcast<A>(nothing);
      else if (!*mask) v = broadcast<A>(nothing);
    } else if constexpr (!std::is_same_v<M, NoMask>) {
      v += step != 0 ? lanes.load(mask + i) : broadcast<A>(static_cast<A>(*mask));
    }
    if (lanes.count < kLanes<A>) v = only_lanes<A>(v, lanes.count, nothing);
    lanes.store(to + i, v);
    most = v > most ? v : most;
  });
  return fold<A>(most, [](A a, A b) FASTLAYERS_LANES { return a > b ? a : b; });
}

// The sum of the exponentials of a row of scores, relative to the largest; WRITE: in the scores' place.
template <typename A, bool WRITE>
FASTLAYERS_CALLED A sum_exponentials(A* scores, int64_t n, A most) {
  Total<A> total;
  for_vectors<A>(n, [&](int64_t i, auto lanes) FASTLAYERS_LANES {
    const Vector<A> e = exp_below_0<A>(lanes.load(scores + i, -std::numeric_limits<A>::infinity()) - most);
    if constexpr (WRITE) lanes.store(scores + i, e);
    total.add(e);
  });
  return total.sum();
}

// y = values / sum of the exponentials, or (values - most) - log(sum) of the scores.
template <typename T, bool LOG, typename A = compute_t<T>>
FASTLAYERS_CALLED void write_results(T* y, const A* values, int64_t n, A most, A sum) {
  const A level = LOG ? std::log(sum) : A(0);
  for_vectors<A>(n, [&](int64_t i, auto lanes) FASTLAYERS_LANES {
    const Vector<A> v = lanes.load(values + i);
    lanes.store(y + i, LOG ? (v - most) - level : v / sum);
  });
}

// dx = scale·y·(dy - sum(y·dy)), for log_softmax scale·(dy - exp(y)·sum(dy)), and 0 where a boolean mask is False.
template <typename In, typename Out, bool LOG, typename A = compute_t<In>>
void backward_row(In* dx, const Out* dy, const Out* y, int64_t n, A scale, const bool* mask, int64_t step) {
  Total<A> total;
  for_vectors<A>(n, [&](int64_t i, auto lanes) FASTLAYERS_LANES {
    const Vector<A> g = lanes.load(dy + i);
    total.add(LOG ? g : g * lanes.load(y + i));
  });
  const A sum = total.sum();
  const bool all = mask == nullptr || (step == 0 && *mask), none = mask != nullptr && step == 0 && !*mask;
  for_vectors<A>(n, [&](int64_t i, auto lanes) FASTLAYERS_LANES {
    const Vector<A> g = lanes.load(dy + i), p = lanes.load(y + i), zero{};
    Vector<A> d = (LOG ? g - exp<A>(p) * sum : p * (g - sum)) * scale;
    if (none) d = zero;
    else if (!all) d = load_flags<A>(mask + i, lanes.count) != 0 ? d : zero;
    lanes.store(dx + i, d);
  });
}

// ---- columns ------------------------------------------------------------------------------------------------------------

template <typename In, typename Out, typename A = compute_t<In>>
void forward_columns(Out* y, const In* x, int64_t n, int64_t inner, int64_t width, A scale, bool log) {
  A most[kTile], sum[kTile];
  add_down(most, sum, n, width, [&](int64_t c, int64_t j, const Part<A>& lanes) FASTLAYERS_LANES {
    return lanes.load(x + c * inner + j) * scale;
  });
  if (log)
    for (int64_t j = 0; j < width; ++j) sum[j] = std::log(sum[j]);
  for (int64_t c = 0; c < n; ++c) {
    for_parts<A>(width, [&](int64_t j, const Part<A>& lanes) FASTLAYERS_LANES {
      const Vector<A> v = lanes.load(x + c * inner + j) * scale - load<A>(most + j), s = load<A>(sum + j);
      lanes.store(y + c * inner + j, log ? v - s : exp_below_0<A>(v) / s);
    });
  }
}

template <typename In, typename Out, bool LOG, typename A = compute_t<In>>
void backward_columns(In* dx, const Out* dy, const Out* y, int64_t n, int64_t inner, int64_t width, A scale) {
  A sum[kTile] = {};
  for (int64_t c = 0; c < n; ++c) {
    for_parts<A>(width, [&](int64_t j, const Part<A>& lanes) FASTLAYERS_LANES {
      const Vector<A> g = lanes.load(dy + c * inner + j);
      store<A>(sum + j, load<A>(sum + j) + (LOG ? g : g * lanes.load(y + c * inner + j)));
    });
  }
  for (int64_t c = 0; c < n; ++c) {
    for_parts<A>(width, [&](int64_t j, const Part<A>& lanes) FASTLAYERS_LANES {
      const Vector<A> g = lanes.load(dy + c * inner + j), p = lanes.load(y + c * inner + j), s = load<A>(sum + j);
      lanes.store(dx + c * inner + j, (LOG ? g - exp<A>(p) * s : p * (g - s)) * scale);
    });
  }
}

// ---- host ---------------------------------------------------------------------------------------------------------------

// A mask that broadcasts to the rows of x.
struct Mask {
  Tensor data;
  Dims sizes, strides;  // without the last dimension
  int64_t step;         // along a row: 0 or 1

  Mask(const Tensor& mask, const Dims& of_x, const char* op) : data(mask), sizes(of_x), strides(broadcast_strides(mask, of_x, op, "mask")) {
    step = strides.back();
    if (step > 1) {
      data = torch::stable::contiguous(mask);
      strides = broadcast_strides(data, of_x, op, "mask");
      step = strides.back();
    }
    sizes.pop_back();
    strides.pop_back();
  }

  int64_t offset(int64_t row) const {
    int64_t at = 0;
    for (size_t d = sizes.size(); d-- > 0 && row > 0;) {
      at += row % sizes[d] * strides[d];
      row /= sizes[d];
    }
    return at;
  }
};

template <typename In, typename Out, typename M>
void forward_rows(Tensor& y, const Tensor& x, const Shape& s, double scale, const Mask* mask, bool log) {
  using A = compute_t<In>;
  const In* from = pointer<const In>(x);
  Out* to = pointer<Out>(y);
  const M* m = mask == nullptr ? nullptr : static_cast<const M*>(mask->data.const_data_ptr());
  torch::stable::parallel_for(0, s.outer, std::max<int64_t>(1, kGrain / s.n), [&](int64_t first, int64_t last) {
    std::vector<A> scores(s.n);
    for (int64_t row = first; row < last; ++row) {
      const M* own = mask == nullptr ? nullptr : m + mask->offset(row);
      const A most = write_scores<In, M>(scores.data(), from + row * s.n, s.n, static_cast<A>(scale), own, mask == nullptr ? 0 : mask->step);
      const A sum = (log ? sum_exponentials<A, false> : sum_exponentials<A, true>)(scores.data(), s.n, most);
      (log ? write_results<Out, true> : write_results<Out, false>)(to + row * s.n, scores.data(), s.n, most, sum);
    }
  });
}

Tensor softmax_forward(const Tensor& x_in, int64_t dim, double scale, const MaybeTensor& mask_in, ScalarType dtype, bool log) {
  const char* op = log ? "log_softmax" : "softmax";
  const Shape s(x_in, dim, op);
  const Dims sizes = dims_of(x_in.sizes());
  Tensor y = empty_contiguous(sizes, dtype, x_in);
  if (s.numel() == 0) return y;
  const bool rows = dim + 1 == x_in.dim();
  FASTLAYERS_CHECK(rows || !mask_in, op, "a mask is supported over the last dimension only, but dim is ", dim, " of ", x_in.dim());
  const Tensor x = made_contiguous(x_in);
  dispatch_pair(x.scalar_type(), dtype, op, [&]<typename In, typename Out>(In, Out) {
    if (!rows) {
      const In* from = pointer<const In>(x);
      Out* to = pointer<Out>(y);
      return for_tiles(s, [&](int64_t, int64_t at, int64_t width) {
        forward_columns<In, Out>(to + at, from + at, s.n, s.inner, width, static_cast<compute_t<In>>(scale), log);
      });
    }
    if (!mask_in) return forward_rows<In, Out, NoMask>(y, x, s, scale, nullptr, log);
    const Mask mask(*mask_in, sizes, op);
    const ScalarType kind = mask.data.scalar_type();
    if (kind == ScalarType::Bool) return forward_rows<In, Out, bool>(y, x, s, scale, &mask, log);
    if (kind == x.scalar_type()) return forward_rows<In, Out, In>(y, x, s, scale, &mask, log);
    FASTLAYERS_CHECK(kind == ScalarType::Float && sizeof(In) == 2, op, "expected a mask of bool, float32 or x's dtype, but got ",
                     toString(kind));
    if constexpr (sizeof(In) == 2) forward_rows<In, Out, float>(y, x, s, scale, &mask, log);
  });
  return y;
}

Tensor softmax_backward(const Tensor& dy_in, const Tensor& y_in, int64_t dim, double scale, const MaybeTensor& mask_in, ScalarType dtype,
                        bool log) {
  const char* op = log ? "log_softmax_backward" : "softmax_backward";
  check_same_shape(y_in, dy_in, op, "dy");
  const Shape s(y_in, dim, op);
  const Dims sizes = dims_of(y_in.sizes());
  Tensor dx = empty_contiguous(sizes, dtype, y_in);
  if (s.numel() == 0) return dx;
  const bool rows = dim + 1 == y_in.dim();
  FASTLAYERS_CHECK(!mask_in || (rows && mask_in->scalar_type() == ScalarType::Bool), op, "expected a boolean mask over the last dimension");
  const Tensor dy = made_contiguous(dy_in), y = made_contiguous(y_in);
  dispatch_pair(dtype, y.scalar_type(), op, [&]<typename In, typename Out>(In, Out) {
    const auto factor = static_cast<compute_t<In>>(scale);
    const Out *const g = pointer<const Out>(dy), *const p = pointer<const Out>(y);
    In* to = pointer<In>(dx);
    if (!rows)
      return for_tiles(s, [&](int64_t, int64_t at, int64_t width) {
        (log ? backward_columns<In, Out, true> : backward_columns<In, Out, false>)(to + at, g + at, p + at, s.n, s.inner, width, factor);
      });
    std::optional<Mask> mask;
    if (mask_in) mask.emplace(*mask_in, sizes, op);
    const bool* m = mask ? pointer<const bool>(mask->data) : nullptr;
    torch::stable::parallel_for(0, s.outer, std::max<int64_t>(1, kGrain / s.n), [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        const int64_t at = row * s.n, step = mask ? mask->step : 0;
        const bool* own = mask ? m + mask->offset(row) : nullptr;
        (log ? backward_row<In, Out, true> : backward_row<In, Out, false>)(to + at, g + at, p + at, s.n, factor, own, step);
      }
    });
  });
  return dx;
}

}  // namespace
}  // namespace fastlayers::softmax

FASTLAYERS_CPU_KERNELS(softmax, m) {
  m.impl("softmax_forward", TORCH_BOX(&fastlayers::softmax::softmax_forward));
  m.impl("softmax_backward", TORCH_BOX(&fastlayers::softmax::softmax_backward));
}

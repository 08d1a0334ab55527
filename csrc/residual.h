// What the CPU and the CUDA implementation of residual + dropout(x) and residual + droppath(gamma·x) share: what is checked, and the layout
// of operands and results.
#pragma once

#include "common/tensor.h"

namespace fastlayers {
namespace {

inline void check_residual(const Tensor& x, const Tensor& residual, ScalarType out, const char* op) {
  FASTLAYERS_CHECK(residual.scalar_type() == out, op, "expected a residual of the result's dtype ", toString(out), ", but got ",
                   toString(residual.scalar_type()));
  check_device(x, residual, op, "residual");
  check_same_sizes(x, residual, op, "residual");
}

// x and the residual, where there is one, in the memory order of torch's result, and the result.
struct Operands {
  Tensor x;
  MaybeTensor residual;
  Dims sizes, strides;
  Tensor out;

  // `product`: the layout of what is added to the residual.
  Operands(const Tensor& x_in, const MaybeTensor& residual_in, const Dims& product, ScalarType dtype, const char* op)
      : x(x_in), residual(residual_in), sizes(dims_of(x_in.sizes())), strides(product) {
    if (residual) {
      check_residual(x, *residual, dtype, op);
      const Dims own = dims_of(residual->strides());
      strides = result_strides(sizes, {&own, &product});
      residual = with_strides(*residual, sizes, strides);
    }
    x = with_strides(x, sizes, strides);
    out = empty_strided(sizes, strides, dtype, x);
  }
  bool whole_words() const { return aligned(x.const_data_ptr()) && aligned(pointer<const void>(residual)); }
};

// What the words of Philox are compared with: below it, an element is dropped.
inline uint32_t dropout_threshold(double p, const Tensor& seed, const Tensor& x, const char* op) {
  FASTLAYERS_CHECK(p >= 0 && p < 1, op, "expected a probability of at least 0 and less than 1, but got ", p);
  FASTLAYERS_CHECK(seed.scalar_type() == ScalarType::Long && seed.numel() == 1, op, "expected a seed of one int64");
  check_device(x, seed, op, "seed");
  return static_cast<uint32_t>(std::min(p * 4294967296.0 + 0.5, 4294967295.0));
}

// The dimension of x along which gamma varies, -1 where it is one value.
inline int64_t gamma_dim(const Tensor& gamma, const Tensor& x, const char* op) {
  broadcast_strides(gamma, dims_of(x.sizes()), op, "gamma");  // or says why not
  FASTLAYERS_CHECK(gamma.is_contiguous(), op, "expected a contiguous gamma");
  check_device(x, gamma, op, "gamma");
  int64_t dim = -1;
  for (int64_t d = 0; d < gamma.dim(); ++d) {
    if (gamma.size(d) == 1) continue;
    FASTLAYERS_CHECK(dim < 0, op, "gamma varies along more than one dimension");
    dim = d + x.dim() - gamma.dim();
  }
  return dim;
}

inline void check_keep(const Tensor& keep, const Tensor& x, const char* op) {
  check_device(x, keep, op, "keep");
  FASTLAYERS_CHECK(keep.scalar_type() == compute_dtype(x) && keep.is_contiguous() && x.dim() > 0 && keep.numel() == x.size(0), op,
                   "expected keep to have one ", toString(compute_dtype(x)), " for each index of dimension 0");
}

// The layout of x·gamma·keep, which is added to the residual.
inline Dims product_strides(const Tensor& x, const MaybeTensor& gamma, const MaybeTensor& residual, const MaybeTensor& keep,
                            const char* op) {
  const Dims sizes = dims_of(x.sizes()), own = dims_of(x.strides());
  if (!gamma && !keep) return residual ? own : result_strides(sizes, {&own});
  const Dims of_gamma = gamma ? broadcast_strides(*gamma, sizes, op, "gamma") : Dims(sizes.size(), 0);
  return dense_strides(sizes, memory_order(sizes, {&own, &of_gamma}));
}

inline void check_gamma(const Tensor& gamma, ScalarType narrow, const char* op) {
  FASTLAYERS_CHECK(gamma.scalar_type() == narrow || (is_low_precision(narrow) && gamma.scalar_type() == ScalarType::Float), op,
                   "expected a gamma of x's dtype, or of float32 for 16-bit x");
}

// The operands of the backward of x·gamma·keep as [repeat, columns, inner] in memory, gamma along the columns, and its results. A row is of
// `columns` elements, or of `inner`.
struct GammaGradients {
  Dims sizes, strides;
  int64_t dim;    // gamma's
  bool dropping;  // samples differ
  Tensor x, dy, dx, dgamma;
  int64_t repeat, columns, inner, row;

  GammaGradients(const Tensor& dy_in, const Tensor& x_in, const Tensor& gamma, const MaybeTensor& keep, const char* op)
      : sizes(dims_of(x_in.sizes())), dim(gamma_dim(gamma, x_in, op)), dropping(keep && sizes[0] > 1) {
    check_same_sizes(x_in, dy_in, op, "dy");
    if (keep) check_keep(*keep, x_in, op);
    check_gamma(gamma, x_in.scalar_type(), op);
    const Dims dy_strides = dims_of(dy_in.strides()), x_strides = dims_of(x_in.strides());
    strides = dense_strides(sizes, memory_order(sizes, {&dy_strides, &x_strides}));
    dy = with_strides(dy_in, sizes, strides), x = with_strides(x_in, sizes, strides);
    const int64_t n = x.numel();
    FASTLAYERS_CHECK(n > 0, op, "expected x with at least one element");
    columns = dim < 0 ? 1 : sizes[dim], inner = dim >= 0 ? strides[dim] : dropping ? strides[0] : n;
    repeat = n / columns / inner, row = inner == 1 ? columns : inner;
  }
  void allocate(const Tensor& gamma) {
    dx = empty_strided(sizes, strides, x.scalar_type(), x);
    dgamma = empty_contiguous(dims_of(gamma.sizes()), gamma.scalar_type(), gamma);
  }
  int64_t rows() const { return x.numel() / row; }
  bool samples_change_within_a_row() const { return dropping && (strides[0] < row || dim == 0); }
};

}  // namespace
}  // namespace fastlayers

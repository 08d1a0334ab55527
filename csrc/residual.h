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

// x and the residual, where there is one, in the memory order of torch's result.
struct Operands {
  Tensor x;
  MaybeTensor residual;
  Dims sizes, strides;

  // `product`: the layout of what is added to the residual.
  Operands(const Tensor& x_in, const MaybeTensor& residual_in, const Dims& product)
      : x(x_in), residual(residual_in), sizes(dims_of(x_in.sizes())), strides(product) {
    if (residual) {
      const Dims own = dims_of(residual->strides());
      strides = result_strides(sizes, {&own, &product});
      residual = with_strides(*residual, sizes, strides);
    }
    x = with_strides(x, sizes, strides);
  }
  bool whole_words() const { return aligned(x.const_data_ptr()) && aligned(pointer<const void>(residual)); }
};

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

}  // namespace
}  // namespace fastlayers

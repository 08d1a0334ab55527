// What the CPU and the CUDA implementation of layer_norm and rms_norm share: the kinds of norm, and what is checked and allocated.
#pragma once

#include "common/tensor.h"

namespace fastlayers {
namespace {

enum Kind : int { kLayer = 0, kRms = 1, kLlama = 2, kGemma = 3 };

// x as rows of n elements, those of its last `dims` dimensions.
struct Shape {
  int64_t rows = 1, n = 1;

  Shape(const Tensor& x, int64_t dims, const char* op) {
    const int64_t all = x.dim();
    FASTLAYERS_CHECK(dims >= 1 && dims <= all, op, "cannot normalise ", dims, " trailing dimensions of ", all);
    for (int64_t d = 0; d < all; ++d) (d < all - dims ? rows : n) *= x.size(d);
  }
  bool empty() const { return rows == 0 || n == 0; }
};

inline void check_kind(int64_t kind, bool bias, const char* op) {
  FASTLAYERS_CHECK(kind >= kLayer && kind <= kGemma, op, "expected a kind of 0 to 3, but got ", kind);
  FASTLAYERS_CHECK(kind == kLayer || !bias, op, "rms_norm has no bias");
}

inline void check_parameter(const MaybeTensor& t, const Tensor& x, int64_t n, const char* op, const char* name) {
  if (!t) return;
  check_device(x, *t, op, name);
  FASTLAYERS_CHECK(t->numel() == n, op, "expected ", name, " of ", n, " elements, but got ", t->numel());
}

// The numbers of a row that are kept: its mean and its rstd, or the rstd alone.
inline int64_t kept_numbers(int64_t kind) { return kind == kLayer ? 2 : 1; }
inline Tensor empty_stats(bool keep, int64_t kind, const Shape& s, const Tensor& x) {
  return keep ? empty_contiguous({kept_numbers(kind), s.rows}, compute_dtype(x), x) : empty_contiguous({0}, compute_dtype(x), x);
}

inline void check_backward(const Tensor& dy, const Tensor& x, const Tensor& stats, int64_t kind, const Shape& s, const char* op) {
  check_device(x, dy, op, "dy");
  check_same_sizes(x, dy, op, "dy");
  check_device(x, stats, op, "stats");
  FASTLAYERS_CHECK(stats.scalar_type() == compute_dtype(x) && stats.numel() == kept_numbers(kind) * s.rows, op,
                   "expected the stats that the forward keeps");
}

// The gradients of weight and bias, those that are wanted.
struct WeightGradients {
  bool want_weight, want_bias;
  Tensor dweight, dbias;

  WeightGradients(const Tensor& x, const MaybeTensor& weight, int64_t n, bool for_weight, bool for_bias)
      : want_weight(for_weight && weight.has_value()), want_bias(for_bias) {
    const ScalarType dtype = weight ? weight->scalar_type() : x.scalar_type();
    const auto gradient = [&](bool wanted) {
      if (!wanted) return empty_contiguous({0}, dtype, x);
      return weight ? empty_result(*weight, dtype) : empty_contiguous({n}, dtype, x);
    };
    dweight = gradient(want_weight), dbias = gradient(want_bias);
  }
  void zero() {
    torch::stable::zero_(dweight);
    torch::stable::zero_(dbias);
  }
};

// FORWARD(op, x, residual, weight, bias, dims, eps, kind, dtype, keep) gives the result, the sum with the residual, and what is kept.
template <auto FORWARD>
std::tuple<Tensor, Tensor> layer_norm_forward_op(const Tensor& x, int64_t dims, const MaybeTensor& weight, const MaybeTensor& bias,
                                                 double eps, int64_t kind, ScalarType dtype, bool keep) {
  const auto [y, sum, stats] = FORWARD("layer_norm_forward", x, std::nullopt, weight, bias, dims, eps, kind, dtype, keep);
  return {y, stats};
}
template <auto FORWARD>
std::tuple<Tensor, Tensor, Tensor> add_layer_norm_forward_op(const Tensor& x, const Tensor& residual, int64_t dims,
                                                             const MaybeTensor& weight, const MaybeTensor& bias, double eps, int64_t kind,
                                                             ScalarType dtype, bool keep) {
  return FORWARD("add_layer_norm_forward", x, residual, weight, bias, dims, eps, kind, dtype, keep);
}

}  // namespace
}  // namespace fastlayers

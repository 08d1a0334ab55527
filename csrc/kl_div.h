// What the CPU and the CUDA implementation of the divergences share: what is checked, what is allocated, and how operands lie.
#pragma once

#include "elementwise.h"

namespace fastlayers {
namespace {

constexpr int kNumbers = 6;  // numbers that are kept for each row of logits

enum class Divergence { kullback_leibler, jensen_shannon };

// Two matrices of logits, as their kernels take them, and their row numbers.
struct Matrices {
  Tensor x, y;
  int64_t rows = 0, n = 0;

  // dense(t): t, or a copy of it, in the layout that the kernels take.
  template <typename Dense>
  Matrices(const Tensor& student, const Tensor& teacher, const MaybeTensor& labels, const char* op, Dense&& dense)
      : x(dense(student)), y(dense(teacher)) {
    check_same_shape(student, teacher, op, "teacher");
    FASTLAYERS_CHECK(student.dim() == 2, op, "expected matrices of logits, but got ", student.dim(), " dimensions");
    rows = student.size(0), n = student.size(1);
    if (!labels) return;
    check_device(student, *labels, op, "labels");
    FASTLAYERS_CHECK(labels->scalar_type() == ScalarType::Long && labels->is_contiguous() && labels->numel() == rows, op,
                     "expected labels as a contiguous int64 tensor with one for each row");
  }

  // The divergence of each row, and the numbers that are kept of it.
  std::tuple<Tensor, Tensor> results(const char* op) const {
    FASTLAYERS_CHECK(n > 0, op, "rows of no logits");
    return {empty_contiguous({rows}, compute_dtype(x), x), empty_contiguous({rows, kNumbers}, compute_dtype(x), x)};
  }
  // The gradients of both, empty where they are not wanted.
  std::tuple<Tensor, Tensor> gradients(const Tensor& dlosses, const Tensor& stats, bool dstudent, bool dteacher, const char* op) const {
    FASTLAYERS_CHECK(dlosses.dim() == 1 && dlosses.numel() == rows && dlosses.scalar_type() == stats.scalar_type() &&
                         stats.scalar_type() == compute_dtype(x) && stats.is_contiguous() && stats.numel() == rows * kNumbers,
                     op, "expected a gradient for each row, and the numbers that the forward kept of it");
    const auto one = [&](bool wanted) { return empty_contiguous(wanted ? Dims{rows, n} : Dims{0}, x.scalar_type(), x); };
    return {one(dstudent), one(dteacher)};
  }
};

// The layout of xlogy(target, target) - target·input, and of exp(target)·(target - input).
inline Dims kl_div_strides(const Dims& sizes, const Dims& input, const Dims& target) {
  const Dims own = result_strides(sizes, {&target}), both = result_strides(sizes, {&target, &input});
  return result_strides(sizes, {&own, &both});
}

// The operands and results of the backward of kl_div. dy is one number if the result was the sum, and has the shape of the elements
// otherwise. Only dtarget needs input.
struct KlDivGradients {
  FlatPair pair;
  Tensor dy, dinput, dtarget;
  bool one;

  KlDivGradients(const Tensor& dy_in, const MaybeTensor& input, const Tensor& target, bool for_input, bool for_target, const char* op)
      : pair(input ? *input : target, target, op, kl_div_strides), one(dy_in.dim() == 0) {
    FASTLAYERS_CHECK(input || !for_target, op, "the target's gradient needs the input");
    FASTLAYERS_CHECK(one || dims_of(dy_in.sizes()) == pair.sizes, op, "expected dy to be one number or of the target's shape");
    const auto gradient = [&](bool wanted) { return wanted ? pair.empty() : empty_contiguous({0}, target.scalar_type(), target); };
    dy = one ? dy_in : with_strides(dy_in, pair.sizes, pair.strides);
    dinput = gradient(for_input), dtarget = gradient(for_target);
  }
};

}  // namespace
}  // namespace fastlayers

// What the CPU and the CUDA implementation of cross_entropy share: how logits lie, what is checked and allocated, and the ops around the
// backward.
#pragma once

#include "logits.h"

namespace fastlayers {
namespace {

enum class Reduction : int { none, mean, sum };

struct Options {
  int64_t ignore_index;
  double label_smoothing, softcap, z_loss;
};

// (N, C, ...) or (C,) as outer × classes × inner.
struct Logits : Shape {
  Tensor x;
  bool rows = true;         // classes are contiguous
  bool class_last = false;  // in the gradient too, which has the strides of x
  int64_t stride = 0;       // of the rows

  Logits(const Tensor& given, const char* op) : x(given) {
    const Dims sizes = dims_of(given.sizes()), strides = dims_of(given.strides());
    const size_t dims = sizes.size(), c = dims == 1 ? 0 : 1;
    FASTLAYERS_CHECK(dims > 0, op, "expected logits of one dimension or more");
    if (c == 1) outer = sizes[0];
    stride = n = sizes[c];
    for (size_t d = 2; d < dims; ++d) inner *= sizes[d];
    if (inner == 1) {
      if (strides[c] != 1 && n != 1) x = torch::stable::contiguous(given);
      else if (c == 1) stride = strides[0];
      return;
    }
    if (!given.is_contiguous()) {
      int64_t next = n;
      class_last = strides[1] == 1;
      for (size_t i = 0; i < dims - 1; ++i) {
        const size_t d = i == dims - 2 ? 0 : dims - 1 - i;
        class_last &= sizes[d] == 1 || strides[d] == next;
        next *= sizes[d];
      }
      if (class_last) return;
      x = torch::stable::contiguous(given);
    }
    rows = false;
  }

  int64_t count() const { return outer * inner; }

  Tensor empty_gradient() const {
    const Dims sizes = dims_of(x.sizes());
    return empty_strided(sizes, class_last ? dims_of(x.strides()) : contiguous_strides(sizes), x.scalar_type(), x);
  }
};

// The classes of so many rows, contiguous.
inline Tensor checked_target(const Tensor& target, int64_t rows, const Tensor& x, const char* op) {
  FASTLAYERS_CHECK(target.scalar_type() == ScalarType::Long, op, "expected classes as int64");
  check_device(x, target, op, "classes");
  FASTLAYERS_CHECK(target.numel() == rows, op, target.numel(), " classes for ", rows, " rows");
  return made_contiguous(target);
}

// The weight of each class, or null.
template <typename A>
const A* checked_weight(const MaybeTensor& weight, int64_t classes, const Tensor& x, const char* op) {
  if (!weight) return nullptr;
  check_device(x, *weight, op, "weight");
  FASTLAYERS_CHECK(weight->scalar_type() == compute_dtype(x) && weight->is_contiguous() && weight->numel() == classes, op,
                   "expected a contiguous weight of ", classes, " classes in the dtype of the computation");
  return pointer<const A>(*weight);
}

// What forward and backward are called with.
struct Call {
  Logits logits;
  const Tensor& target;
  const MaybeTensor& weight;
  Reduction reduction;
  Options options;
  const char* op;

  int64_t rows() const { return logits.count(); }
  bool each_row() const { return reduction == Reduction::none; }
};

// LOSSES(call, losses, stats, loss) writes the losses of all rows, the numbers that are kept, and the result unless it is the losses.
// stats: the base of the level of each row, then the rests, then the divisor of a mean, and the sum of the weight.
template <auto LOSSES>
std::tuple<Tensor, Tensor> cross_entropy_forward_op(const Tensor& x, const Tensor& target, const MaybeTensor& weight, int64_t ignore_index,
                                                    int64_t reduction, double label_smoothing, double softcap, double z_loss,
                                                    ScalarType dtype) {
  const char* op = "cross_entropy_forward";
  const Options options{ignore_index, label_smoothing, softcap, z_loss};
  const Call call{Logits(x, op), target, weight, static_cast<Reduction>(reduction), options, op};
  FASTLAYERS_CHECK(call.rows() > 0 && call.logits.n > 0, op, "nothing to compute");
  const ScalarType wide = compute_dtype(x);
  const Tensor loss = call.each_row() ? empty_contiguous(dims_of(target.sizes()), dtype, x) : empty_contiguous({}, dtype, x);
  const Tensor stats = empty_contiguous({2 * call.rows() + 2}, wide, x);
  LOSSES(call, call.each_row() ? loss : empty_contiguous({call.rows()}, wide, x), stats, loss);
  return {loss, stats};
}

// GRADIENT(call, dy, stats, dx) writes the gradient of the logits, for a dy of one number or of one for each row.
template <auto GRADIENT>
void checked_gradient(const Call& call, const Tensor& dy, const Tensor& stats, const Tensor& dx) {
  FASTLAYERS_CHECK(dy.numel() == (call.each_row() ? call.rows() : 1) && stats.numel() == 2 * call.rows() + 2, call.op,
                   "dy or stats of another size than the forward's");
  FASTLAYERS_CHECK(stats.scalar_type() == compute_dtype(dx) && stats.is_contiguous(), call.op, "expected the stats of the forward");
  GRADIENT(call, made_contiguous(dy), stats, dx);
}

template <auto GRADIENT>
Tensor cross_entropy_backward_op(const Tensor& dy, const Tensor& x, const Tensor& target, const MaybeTensor& weight, const Tensor& stats,
                                 int64_t ignore_index, int64_t reduction, double label_smoothing, double softcap, double z_loss) {
  const char* op = "cross_entropy_backward";
  const Options options{ignore_index, label_smoothing, softcap, z_loss};
  const Call call{Logits(x, op), target, weight, static_cast<Reduction>(reduction), options, op};
  const Tensor dx = call.logits.empty_gradient();
  checked_gradient<GRADIENT>(call, dy, stats, dx);
  return dx;
}

// Over the logits.
template <auto GRADIENT>
void cross_entropy_backward_in_place_op(const Tensor& dy, Tensor x, const Tensor& target, const MaybeTensor& weight, const Tensor& stats,
                                        int64_t ignore_index, int64_t reduction, double label_smoothing, double softcap, double z_loss) {
  const char* op = "cross_entropy_backward_";
  FASTLAYERS_CHECK(x.is_contiguous(), op, "expected contiguous logits");
  const Options options{ignore_index, label_smoothing, softcap, z_loss};
  checked_gradient<GRADIENT>({Logits(x, op), target, weight, static_cast<Reduction>(reduction), options, op}, dy, stats, x);
}

// grad_scale: the factors from the losses to the result.
inline void check_chunk(const Tensor& logits, int64_t columns, const MaybeTensor& grad_scale, const char* op) {
  FASTLAYERS_CHECK(logits.dim() == 2 && logits.is_contiguous() && columns > 0 && columns <= logits.size(1), op,
                   "expected a contiguous matrix of ", columns, " columns or more");
  FASTLAYERS_CHECK(!grad_scale || (grad_scale->scalar_type() == compute_dtype(logits) && grad_scale->is_contiguous() &&
                                   (grad_scale->numel() == 1 || grad_scale->numel() == logits.size(0))),
                   op, "expected a contiguous grad_scale of one element or one for each row, in ", toString(compute_dtype(logits)));
}

}  // namespace
}  // namespace fastlayers

// What softmax and the losses on logits share, on a CPU and on a GPU: tensors seen along one of their dimensions.
#pragma once

#include "common/tensor.h"

namespace fastlayers {
namespace {

// The sizes before a dimension, its own, and those after it.
struct Shape {
  int64_t outer = 1, n = 1, inner = 1;

  Shape() = default;
  Shape(const Tensor& x, int64_t dim, const char* op) {
    FASTLAYERS_CHECK(dim >= 0 && dim < x.dim(), op, "dim ", dim, " is out of range for a tensor of ", x.dim(), " dimensions");
    for (int64_t d = 0; d < x.dim(); ++d) (d < dim ? outer : d == dim ? n : inner) *= x.size(d);
  }
  int64_t numel() const { return outer * n * inner; }
};

}  // namespace
}  // namespace fastlayers

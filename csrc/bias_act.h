// What the CPU and the CUDA implementation of act(x + bias) share: how x lies.
#pragma once

#include "common/tensor.h"

namespace fastlayers {
namespace {

// x in a dense memory order in which the bias, if there is one, lies along the rows of the last dimension.
struct Operand {
  Tensor x;
  Dims sizes, strides;        // of x, and of what the kernel writes
  Dims torch_strides;         // of torch's result, which differ where they would scatter the rows
  int64_t rows = 1, columns = 1;

  Operand(const Tensor& x_in, const MaybeTensor& bias, const char* op) : x(x_in), sizes(dims_of(x_in.sizes())) {
    if (bias) {
      check_same(x_in, *bias, op, "bias");
      FASTLAYERS_CHECK(!sizes.empty() && bias->dim() == 1 && bias->size(0) == sizes.back(), op,
                       "expected a bias for each of x's last dimension");
      columns = sizes.back();
      rows = columns == 0 ? 0 : x.numel() / columns;
    }
    if (x_in.is_contiguous()) {
      strides = torch_strides = contiguous_strides(sizes);
      return;
    }
    const Dims own = dims_of(x_in.strides());
    if (bias) {
      Dims of_bias(sizes.size(), 0);
      of_bias.back() = bias->stride(0);
      strides = torch_strides = dense_strides(sizes, memory_order(sizes, {&own, &of_bias}));
      if (columns > 1 && strides.back() != 1) strides = contiguous_strides(sizes);
    } else {
      strides = torch_strides = result_strides(sizes, {&own});
    }
    x = with_strides(x_in, sizes, strides);
  }
  Tensor empty() const { return empty_strided(sizes, strides, x.scalar_type(), x); }
};

}  // namespace
}  // namespace fastlayers

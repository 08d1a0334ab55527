// How the elementwise ops see their operands, shared by the CPU and the CUDA implementation.
#pragma once

#include "tensor.h"

namespace fastlayers {

constexpr int kBits = 8;  // elements to a byte of a mask

// x and y in one dense memory order, that of torch's elementwise result, so that a kernel runs over flat memory.
struct FlatPair {
  Tensor x, y;
  Dims sizes, strides;

  FlatPair(const Tensor& x_in, const Tensor& y_in, const char* op) : x(x_in), y(y_in), sizes(dims_of(x_in.sizes())) {
    check_same_shape(x_in, y_in, op, "y");
    const Dims sx = dims_of(x_in.strides()), sy = dims_of(y_in.strides());
    strides = dense_strides(sizes, memory_order(sizes, sx, sy));
    x = with_strides(x_in, sizes, strides);
    y = with_strides(y_in, sizes, strides);
  }
  Tensor empty() const { return empty_strided(sizes, strides, x.scalar_type(), x); }
  Tensor empty_bits() const { return empty_contiguous({(x.numel() + kBits - 1) / kBits}, ScalarType::Byte, x); }
};

}  // namespace fastlayers

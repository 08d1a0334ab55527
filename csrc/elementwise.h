// What the CPU and the CUDA implementation of the elementwise ops share: the layout of operands and results.
#pragma once

#include "common/tensor.h"

namespace fastlayers {

// The layouts of relu(x) + y, relu(x + y) and x·y, for x and y of one shape.
inline Dims relu_add_strides(const Dims& sizes, const Dims& x, const Dims& y) {
  const Dims relu = result_strides(sizes, {&x});
  return result_strides(sizes, {&relu, &y});
}
inline Dims add_relu_strides(const Dims& sizes, const Dims& x, const Dims& y) {
  const Dims sum = result_strides(sizes, {&x, &y});
  return result_strides(sizes, {&sum});
}
inline Dims mul_strides(const Dims& sizes, const Dims& x, const Dims& y) { return result_strides(sizes, {&x, &y}); }

// x and y in one dense memory order, that of torch's result, so that a kernel runs over flat memory.
struct FlatPair {
  Tensor x, y;
  Dims sizes, strides;

  FlatPair(const Tensor& x_in, const Tensor& y_in, const char* op, Dims (*layout)(const Dims&, const Dims&, const Dims&))
      : x(x_in), y(y_in), sizes(dims_of(x_in.sizes())) {
    check_same_shape(x_in, y_in, op, "y");
    if (x_in.is_contiguous() && y_in.is_contiguous()) {  // the common case
      strides = contiguous_strides(sizes);
      return;
    }
    strides = layout(sizes, dims_of(x_in.strides()), dims_of(y_in.strides()));
    x = with_strides(x_in, sizes, strides);
    y = with_strides(y_in, sizes, strides);
  }
  Tensor empty() const { return empty_strided(sizes, strides, x.scalar_type(), x); }
  Tensor empty_bits() const { return empty_contiguous({bytes_of_bits(x.numel())}, ScalarType::Byte, x); }
};

inline void check_bits(const Tensor& dy, const Tensor& bits, const char* op) {
  FASTLAYERS_CHECK(bits.numel() == bytes_of_bits(dy.numel()), op, "expected a bit for each of ", dy.numel(), " elements, but got ",
                   bits.numel(), " bytes");
}

}  // namespace fastlayers

// The elementwise ops for CPU tensors, on torch's threads: one pass over memory where the stock composition makes two or three. The
// strides of the results and the bits for backward are those of the CUDA kernels (elementwise.cu).
#include "elementwise.h"

#include "common/bits.h"

namespace fastlayers::elementwise {
namespace {

constexpr int64_t kStretch = 512;    // elements at a time where a loop has two parts

// out = relu(x) + (y + alpha), or relu(x + y) without alpha.
template <bool SUM_FIRST, typename T>
void add_rectified(T* out, const T* x, const T* y, compute_t<T> alpha, int64_t n) {
  using A = compute_t<T>;
  map<T, 2, 1>(n, {x, y}, {out}, [=](int64_t, const auto& v, auto& result) FASTLAYERS_LANES {
    const Vector<A> z = SUM_FIRST ? v[0] + v[1] : v[0], r = z <= A(0) ? Vector<A>{} : z;  // keeps NaN, as torch does
    result[0] = SUM_FIRST ? r : r + (v[1] + alpha);
  });
}

// out = x·y
template <typename T>
void multiply(T* out, const T* x, const T* y, int64_t n) {
  map<T, 2, 1>(n, {x, y}, {out}, [=](int64_t, const auto& v, auto& result) FASTLAYERS_LANES { result[0] = v[0] * v[1]; });
}

// The gradients of x and y: dy·y and dy·x
template <typename T>
void multiply_both(T* to_x, T* to_y, const T* dy, const T* x, const T* y, int64_t n) {
  map<T, 3, 2>(n, {dy, x, y}, {to_x, to_y}, [=](int64_t, const auto& v, auto& results) FASTLAYERS_LANES {
    results[0] = v[0] * v[2];
    results[1] = v[0] * v[1];
  });
}

template <bool SUM_FIRST, bool TRAIN>
std::tuple<Tensor, Tensor> relu_forward_op(const Tensor& x, const Tensor& y, const MaybeTensor& bias, double alpha,
                                           const char* op) {
  FASTLAYERS_CHECK(!bias, op, "on CPU the bias is a number; the eager backend takes a tensor");
  const FlatPair pair(x, y, op, SUM_FIRST ? add_relu_strides : relu_add_strides);
  Tensor out = pair.empty();
  Tensor bits = TRAIN ? pair.empty_bits() : out;
  dispatch_floating(x.scalar_type(), op, [&]<typename T>(T) {
    const T* px = pointer<const T>(pair.x);
    const T* py = pointer<const T>(pair.y);
    T* po = pointer<T>(out);
    uint8_t* pb = TRAIN ? pointer<uint8_t>(bits) : nullptr;
    const auto a = static_cast<compute_t<T>>(alpha);
    for_bytes(out.numel(), [&](int64_t first, int64_t count) {
      // The stretches stay in the first-level cache, because the bits are read from x or from the result in a second loop. (No sum of
      // 16-bit floats is so small that it rounds to zero.)
      for (int64_t start = first; start < first + count; start += kStretch) {
        const int64_t length = std::min(kStretch, first + count - start);
        add_rectified<SUM_FIRST>(po + start, px + start, py + start, a, length);
        if constexpr (TRAIN) store_bits(pb + start / kMaskBits, (SUM_FIRST ? po : px) + start, length);
      }
    });
  });
  return {out, bits};
}

Tensor relu_add(const Tensor& x, const Tensor& y, const MaybeTensor& bias, double alpha) {
  return std::get<0>(relu_forward_op<false, false>(x, y, bias, alpha, "relu_add"));
}

std::tuple<Tensor, Tensor> relu_add_train(const Tensor& x, const Tensor& y, const MaybeTensor& bias, double alpha) {
  return relu_forward_op<false, true>(x, y, bias, alpha, "relu_add");
}

Tensor add_relu(const Tensor& x, const Tensor& y) {
  return std::get<0>(relu_forward_op<true, false>(x, y, std::nullopt, 0.0, "add_relu"));
}

std::tuple<Tensor, Tensor> add_relu_train(const Tensor& x, const Tensor& y) {
  return relu_forward_op<true, true>(x, y, std::nullopt, 0.0, "add_relu");
}

Tensor relu_backward(const Tensor& dy, const Tensor& bits) {
  check_bits(dy, bits, "relu_backward");
  Tensor dx = empty_strided(dims_of(dy.sizes()), dims_of(dy.strides()), dy.scalar_type(), dy);
  dispatch_floating(dy.scalar_type(), "relu_backward", [&]<typename T>(T) {
    using Word = word_t<T>;
    const Word* g = pointer<const Word>(dy);
    const uint8_t* b = pointer<const uint8_t>(bits);
    Word* d = pointer<Word>(dx);
    for_bytes(dy.numel(), [&](int64_t at, int64_t count) { gate(d + at, g + at, b + at / kMaskBits, count); });
  });
  return dx;
}

std::tuple<Tensor, Tensor> mul_backward(const Tensor& dy_in, const Tensor& x_in, const Tensor& y_in) {
  const FlatPair pair(x_in, y_in, "mul_backward", mul_strides);
  check_same_shape(x_in, dy_in, "mul_backward", "dy");
  const Tensor dy = with_strides(dy_in, pair.sizes, pair.strides);
  Tensor dx = pair.empty(), dy_ = pair.empty();
  dispatch_floating(x_in.scalar_type(), "mul_backward", [&]<typename T>(T) {
    const T* g = pointer<const T>(dy);
    const T* px = pointer<const T>(pair.x);
    const T* py = pointer<const T>(pair.y);
    T* d = pointer<T>(dx);
    T* e = pointer<T>(dy_);
    torch::stable::parallel_for(0, dy.numel(), kGrain, [&](int64_t first, int64_t last) {
      multiply_both(d + first, e + first, g + first, px + first, py + first, last - first);
    });
  });
  return {dx, dy_};
}

Tensor mul(const Tensor& x_in, const Tensor& y_in) {
  const FlatPair pair(x_in, y_in, "mul", mul_strides);
  Tensor out = pair.empty();
  dispatch_floating(x_in.scalar_type(), "mul", [&]<typename T>(T) {
    const T* px = pointer<const T>(pair.x);
    const T* py = pointer<const T>(pair.y);
    T* po = pointer<T>(out);
    torch::stable::parallel_for(0, out.numel(), kGrain, [&](int64_t first, int64_t last) {
      multiply(po + first, px + first, py + first, last - first);
    });
  });
  return out;
}

}  // namespace
}  // namespace fastlayers::elementwise

FASTLAYERS_CPU_KERNELS(elementwise, m) {
  m.impl("relu_add", TORCH_BOX(&fastlayers::elementwise::relu_add));
  m.impl("relu_add_train", TORCH_BOX(&fastlayers::elementwise::relu_add_train));
  m.impl("add_relu", TORCH_BOX(&fastlayers::elementwise::add_relu));
  m.impl("add_relu_train", TORCH_BOX(&fastlayers::elementwise::add_relu_train));
  m.impl("relu_backward", TORCH_BOX(&fastlayers::elementwise::relu_backward));
  m.impl("mul", TORCH_BOX(&fastlayers::elementwise::mul));
  m.impl("mul_backward", TORCH_BOX(&fastlayers::elementwise::mul_backward));
}

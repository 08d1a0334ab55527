// The elementwise ops for CPU tensors: one pass over memory where the stock composition makes two or three, spread over
// torch's threads. The layouts and the bits kept for backward are those of the CUDA kernels (elementwise.cu).
#include "elementwise.h"

#include <cstring>

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

namespace fastlayers {
namespace {

constexpr int64_t kGrain = 1 << 15;  // elements a task: torch's own grain for elementwise loops

template <typename T>
using compute_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename F>
void dispatch_floating(ScalarType dtype, const char* op, F&& f) {
  switch (dtype) {
    case ScalarType::Half: return f(c10::Half{});
    case ScalarType::BFloat16: return f(c10::BFloat16{});
    case ScalarType::Float: return f(float{});
    case ScalarType::Double: return f(double{});
    default:
      STD_TORCH_CHECK(false, "fastlayers::", op, ": expected float16, bfloat16, float32 or float64, but got ",
                      torch::headeronly::toString(dtype));
  }
}

// Tasks start at multiples of 8 elements, so that no two write to one byte of bits.
template <typename F>
void for_bytes(int64_t n, F&& f) {
  torch::stable::parallel_for(0, (n + kBits - 1) / kBits, kGrain / kBits,
                              [&](int64_t first, int64_t last) { f(first * kBits, std::min(last * kBits, n)); });
}

template <bool SUM_FIRST, typename T>
inline compute_t<T> joined(T x, T y, compute_t<T> alpha, uint8_t& keep) {
  using A = compute_t<T>;
  const A v = SUM_FIRST ? static_cast<A>(x) + static_cast<A>(y) : static_cast<A>(x);
  keep = !(v <= A(0));  // NaN is kept, as by torch
  const A r = keep ? v : A(0);
  return SUM_FIRST ? r : r + (static_cast<A>(y) + alpha);
}

// Eight bytes of 0 or 1 as the bits of one: the product moves byte i to bit 56 + i.
inline uint8_t pack(const uint8_t* bytes) {
  uint64_t word;
  std::memcpy(&word, bytes, sizeof(word));
  return static_cast<uint8_t>(word * 0x0102040810204080ull >> 56);
}

// All ones or all zeros for each of the four elements of which a nibble has the bits. Bits of a ReLU are random: a branch
// on each is mispredicted half the time, and costs twenty times this look-up.
template <typename Word>
struct NibbleMasks {
  Word of[16][4] = {};
  constexpr NibbleMasks() {
    for (int nibble = 0; nibble < 16; ++nibble)
      for (int j = 0; j < 4; ++j) of[nibble][j] = nibble >> j & 1 ? static_cast<Word>(~Word{0}) : Word{0};
  }
};

// d = g where the bit is set, else 0, for the eight elements of a byte.
template <typename T>
inline void keep_bits(T* d, const T* g, uint8_t byte) {
  using Word = std::conditional_t<sizeof(T) == 2, uint16_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;
  static constexpr NibbleMasks<Word> masks;
  Word words[kBits];
  std::memcpy(words, g, sizeof(words));
  for (int j = 0; j < 4; ++j) words[j] &= masks.of[byte & 15][j];
  for (int j = 0; j < 4; ++j) words[j + 4] &= masks.of[byte >> 4][j];
  std::memcpy(d, words, sizeof(words));
}

template <bool SUM_FIRST, bool TRAIN>
std::tuple<Tensor, Tensor> relu_forward_op(const Tensor& x, const Tensor& y, const std::optional<Tensor>& bias, double alpha,
                                           const char* op) {
  STD_TORCH_CHECK(!bias, "fastlayers::", op, ": on CPU the bias is a number; a tensor bias is served by eager");
  const FlatPair pair(x, y, op, SUM_FIRST ? add_relu_strides : relu_add_strides);
  Tensor out = pair.empty();
  Tensor bits = TRAIN ? pair.empty_bits() : out;
  dispatch_floating(x.scalar_type(), op, [&](auto zero) {
    using T = decltype(zero);
    const T* px = static_cast<const T*>(pair.x.const_data_ptr());
    const T* py = static_cast<const T*>(pair.y.const_data_ptr());
    T* po = static_cast<T*>(out.mutable_data_ptr());
    uint8_t* pb = TRAIN ? static_cast<uint8_t*>(bits.mutable_data_ptr()) : nullptr;
    const auto a = static_cast<compute_t<T>>(alpha);
    for_bytes(out.numel(), [&](int64_t first, int64_t last) {
      // In stretches that stay in the first-level cache, so that both loops are plain vector loops.
      constexpr int64_t kStretch = 512;
      uint8_t keep[kStretch];
      for (int64_t start = first; start < last; start += kStretch) {
        const int64_t length = std::min(kStretch, last - start);
        for (int64_t i = 0; i < length; ++i)
          po[start + i] = static_cast<T>(joined<SUM_FIRST, T>(px[start + i], py[start + i], a, keep[i]));
        if constexpr (TRAIN) {
          for (int64_t i = length; i % kBits != 0; ++i) keep[i] = 0;
          for (int64_t i = 0; i < length; i += kBits) pb[(start + i) / kBits] = pack(keep + i);
        }
      }
    });
  });
  return {out, bits};
}

Tensor relu_add(const Tensor& x, const Tensor& y, const std::optional<Tensor>& bias, double alpha) {
  return std::get<0>(relu_forward_op<false, false>(x, y, bias, alpha, "relu_add"));
}

std::tuple<Tensor, Tensor> relu_add_train(const Tensor& x, const Tensor& y, const std::optional<Tensor>& bias, double alpha) {
  return relu_forward_op<false, true>(x, y, bias, alpha, "relu_add");
}

Tensor add_relu(const Tensor& x, const Tensor& y) {
  return std::get<0>(relu_forward_op<true, false>(x, y, std::nullopt, 0.0, "add_relu"));
}

std::tuple<Tensor, Tensor> add_relu_train(const Tensor& x, const Tensor& y) {
  return relu_forward_op<true, true>(x, y, std::nullopt, 0.0, "add_relu");
}

Tensor relu_backward(const Tensor& dy, const Tensor& bits) {
  const int64_t n = dy.numel();
  STD_TORCH_CHECK(bits.numel() == (n + kBits - 1) / kBits, "fastlayers::relu_backward: expected a bit for each of ", n,
                  " elements, but got ", bits.numel(), " bytes");
  Tensor dx = empty_strided(dims_of(dy.sizes()), dims_of(dy.strides()), dy.scalar_type(), dy);
  dispatch_floating(dy.scalar_type(), "relu_backward", [&](auto zero) {
    using T = decltype(zero);
    const T* g = static_cast<const T*>(dy.const_data_ptr());
    const uint8_t* b = static_cast<const uint8_t*>(bits.const_data_ptr());
    T* d = static_cast<T*>(dx.mutable_data_ptr());
    for_bytes(n, [&](int64_t first, int64_t last) {
      const int64_t whole = last - last % kBits;
      for (int64_t i = first; i < whole; i += kBits) keep_bits(d + i, g + i, b[i / kBits]);
      for (int64_t i = whole; i < last; ++i) d[i] = b[i / kBits] >> (i % kBits) & 1 ? g[i] : T(0);
    });
  });
  return dx;
}

std::tuple<Tensor, Tensor> mul_backward(const Tensor& dy_in, const Tensor& x_in, const Tensor& y_in) {
  const FlatPair pair(x_in, y_in, "mul_backward", mul_strides);
  check_same_shape(x_in, dy_in, "mul_backward", "dy");
  const Tensor dy = with_strides(dy_in, pair.sizes, pair.strides);
  Tensor dx = pair.empty(), dy_ = pair.empty();
  dispatch_floating(x_in.scalar_type(), "mul_backward", [&](auto zero) {
    using T = decltype(zero);
    using A = compute_t<T>;
    const T* g = static_cast<const T*>(dy.const_data_ptr());
    const T* px = static_cast<const T*>(pair.x.const_data_ptr());
    const T* py = static_cast<const T*>(pair.y.const_data_ptr());
    T* d = static_cast<T*>(dx.mutable_data_ptr());
    T* e = static_cast<T*>(dy_.mutable_data_ptr());
    for_bytes(dy.numel(), [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const A gi = static_cast<A>(g[i]);
        d[i] = static_cast<T>(gi * static_cast<A>(py[i]));
        e[i] = static_cast<T>(gi * static_cast<A>(px[i]));
      }
    });
  });
  return {dx, dy_};
}

Tensor mul(const Tensor& x_in, const Tensor& y_in) {
  const FlatPair pair(x_in, y_in, "mul", mul_strides);
  Tensor out = pair.empty();
  dispatch_floating(x_in.scalar_type(), "mul", [&](auto zero) {
    using T = decltype(zero);
    using A = compute_t<T>;
    const T* px = static_cast<const T*>(pair.x.const_data_ptr());
    const T* py = static_cast<const T*>(pair.y.const_data_ptr());
    T* po = static_cast<T*>(out.mutable_data_ptr());
    for_bytes(out.numel(), [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) po[i] = static_cast<T>(static_cast<A>(px[i]) * static_cast<A>(py[i]));
    });
  });
  return out;
}

}  // namespace
}  // namespace fastlayers

STABLE_TORCH_LIBRARY_IMPL(fastlayers, CPU, m) {
  m.impl("relu_add", TORCH_BOX(&fastlayers::relu_add));
  m.impl("relu_add_train", TORCH_BOX(&fastlayers::relu_add_train));
  m.impl("add_relu", TORCH_BOX(&fastlayers::add_relu));
  m.impl("add_relu_train", TORCH_BOX(&fastlayers::add_relu_train));
  m.impl("relu_backward", TORCH_BOX(&fastlayers::relu_backward));
  m.impl("mul", TORCH_BOX(&fastlayers::mul));
  m.impl("mul_backward", TORCH_BOX(&fastlayers::mul_backward));
}

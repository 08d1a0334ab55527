// The elementwise ops for CPU tensors, on torch's threads: one pass over memory where the stock composition makes two or three. The
// strides of the results and the bits for backward are those of the CUDA kernels (elementwise.cu).
#include "elementwise.h"

#include "common/vector.h"

#ifdef __SSE2__  // every x86-64
#include <emmintrin.h>
#endif

namespace fastlayers {
namespace {

constexpr int64_t kStretch = 512;    // elements at a time where a loop has two parts

// Tasks start at multiples of 8 elements, so that no two write to one byte of bits.
template <typename F>
void for_bytes(int64_t n, F&& f) {
  torch::stable::parallel_for(0, (n + kBits - 1) / kBits, kGrain / kBits,
                              [&](int64_t first, int64_t last) { f(first * kBits, std::min(last * kBits, n)); });
}

// out = relu(x) + (y + alpha), or relu(x + y) without alpha.
template <bool SUM_FIRST, typename T>
FASTLAYERS_VECTOR_CLONES void add_rectified(T* out, const T* x, const T* y, compute_t<T> alpha, int64_t n) {
  using A = compute_t<T>;
  for (int64_t i = 0; i < n; ++i) {
    const A xi = static_cast<A>(x[i]), yi = static_cast<A>(y[i]);
    const A v = SUM_FIRST ? xi + yi : xi;
    const A r = v <= A(0) ? A(0) : v;  // keeps NaN, as torch does
    out[i] = static_cast<T>(SUM_FIRST ? r : r + (yi + alpha));
  }
}

#ifdef __SSE2__
constexpr int kBytes = 16;  // to a register of byte masks

inline __m128i load_bytes(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }

// All ones in the lanes of the elements that a ReLU keeps.
inline __m128i kept_lanes(const float* t) { return _mm_castps_si128(_mm_cmpnle_ps(_mm_loadu_ps(t), _mm_setzero_ps())); }
inline __m128i kept_lanes(const double* t) { return _mm_castpd_si128(_mm_cmpnle_pd(_mm_loadu_pd(t), _mm_setzero_pd())); }
// As integers, 16-bit floats above 0 are positive, and negative NaNs are the negative ones past minus infinity.
inline __m128i kept_lanes(const void* t, short minus_infinity) {
  const __m128i v = load_bytes(t), zero = _mm_setzero_si128();
  const __m128i negative_nan = _mm_and_si128(_mm_cmplt_epi16(v, zero), _mm_cmpgt_epi16(v, _mm_set1_epi16(minus_infinity)));
  return _mm_or_si128(_mm_cmpgt_epi16(v, zero), negative_nan);
}
inline __m128i kept_lanes(const c10::BFloat16* t) { return kept_lanes(t, static_cast<short>(0xff80)); }
inline __m128i kept_lanes(const c10::Half* t) { return kept_lanes(t, static_cast<short>(0xfc00)); }
#endif

// Writes a bit for each element: whether a ReLU keeps it. It keeps NaN, as torch does.
template <typename T>
void store_bits(uint8_t* bits, const T* t, int64_t n) {
  int64_t i = 0;
#ifdef __SSE2__
  for (; i + kBytes <= n; i += kBytes) {
    __m128i masks[sizeof(T)];
    for (size_t k = 0; k < sizeof(T); ++k) masks[k] = kept_lanes(t + i + k * (kBytes / sizeof(T)));
    for (size_t half = sizeof(T) / 2; half > 0; half /= 2)  // saturation halves the width of all ones and of zero
      for (size_t k = 0; k < half; ++k) masks[k] = _mm_packs_epi16(masks[2 * k], masks[2 * k + 1]);
    const auto two = static_cast<uint16_t>(_mm_movemask_epi8(masks[0]));
    std::memcpy(bits + i / kBits, &two, sizeof(two));
  }
#endif
  for (; i < n; i += kBits) {
    const int64_t end = std::min<int64_t>(n - i, kBits);
    uint8_t byte = 0;
    for (int64_t j = 0; j < end; ++j) byte |= !(static_cast<compute_t<T>>(t[i + j]) <= 0) << j;
    bits[i / kBits] = byte;
  }
}

template <typename T>
using word_t = std::conditional_t<sizeof(T) == 2, uint16_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;

// out = grad where the bit is set, else 0. The bits become masks, because the bits of a ReLU are random and half of the branches on them
// would be mispredicted.
template <typename Word>
void gate(Word* out, const Word* grad, const uint8_t* bits, int64_t n) {
  int64_t i = 0;
#ifdef __SSE2__
  const __m128i own_bit = _mm_set1_epi64x(static_cast<int64_t>(0x8040201008040201ull));
  for (; i + kBytes <= n; i += kBytes) {
    uint16_t two;
    std::memcpy(&two, bits + i / kBits, sizeof(two));
    __m128i masks[sizeof(Word)];
    __m128i bytes = _mm_cvtsi32_si128(two);  // each of the two, eight times
    bytes = _mm_unpacklo_epi8(bytes, bytes);
    bytes = _mm_unpacklo_epi16(bytes, bytes);
    bytes = _mm_unpacklo_epi32(bytes, bytes);
    masks[0] = _mm_cmpeq_epi8(_mm_and_si128(bytes, own_bit), own_bit);
    for (int count = 1; count < static_cast<int>(sizeof(Word)); count *= 2)  // doubled bytes double the width of a mask
      for (int k = count - 1; k >= 0; --k) {
        const __m128i mask = masks[k];
        masks[2 * k] = _mm_unpacklo_epi8(mask, mask);
        masks[2 * k + 1] = _mm_unpackhi_epi8(mask, mask);
      }
    for (size_t k = 0; k < sizeof(Word); ++k) {
      const int64_t at = i + k * (kBytes / sizeof(Word));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + at), _mm_and_si128(load_bytes(grad + at), masks[k]));
    }
  }
#endif
  for (; i < n; ++i) out[i] = grad[i] & static_cast<Word>(-static_cast<Word>(bits[i / kBits] >> (i % kBits) & 1));
}

template <bool SUM_FIRST, bool TRAIN>
std::tuple<Tensor, Tensor> relu_forward_op(const Tensor& x, const Tensor& y, const MaybeTensor& bias, double alpha,
                                           const char* op) {
  FASTLAYERS_CHECK(!bias, op, "on CPU the bias is a number; the eager backend takes a tensor");
  const FlatPair pair(x, y, op, SUM_FIRST ? add_relu_strides : relu_add_strides);
  Tensor out = pair.empty();
  Tensor bits = TRAIN ? pair.empty_bits() : out;
  dispatch_floating(x.scalar_type(), op, [&](auto zero) {
    using T = decltype(zero);
    const T* px = pointer<const T>(pair.x);
    const T* py = pointer<const T>(pair.y);
    T* po = pointer<T>(out);
    uint8_t* pb = TRAIN ? pointer<uint8_t>(bits) : nullptr;
    const auto a = static_cast<compute_t<T>>(alpha);
    for_bytes(out.numel(), [&](int64_t first, int64_t last) {
      // The stretches stay in the first-level cache, because the bits are read from x or from the result in a second loop. (No sum of
      // 16-bit floats is so small that it rounds to zero.)
      for (int64_t start = first; start < last; start += kStretch) {
        const int64_t length = std::min(kStretch, last - start);
        add_rectified<SUM_FIRST>(po + start, px + start, py + start, a, length);
        if constexpr (TRAIN) store_bits(pb + start / kBits, (SUM_FIRST ? po : px) + start, length);
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
  const int64_t n = dy.numel();
  FASTLAYERS_CHECK(bits.numel() == (n + kBits - 1) / kBits, "relu_backward", "expected a bit for each of ", n,
                   " elements, but got ", bits.numel(), " bytes");
  Tensor dx = empty_strided(dims_of(dy.sizes()), dims_of(dy.strides()), dy.scalar_type(), dy);
  dispatch_floating(dy.scalar_type(), "relu_backward", [&](auto zero) {
    using T = decltype(zero);
    using Word = word_t<T>;
    const Word* g = pointer<const Word>(dy);
    const uint8_t* b = pointer<const uint8_t>(bits);
    Word* d = pointer<Word>(dx);
    for_bytes(n, [&](int64_t first, int64_t last) { gate(d + first, g + first, b + first / kBits, last - first); });
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
    const T* g = pointer<const T>(dy);
    const T* px = pointer<const T>(pair.x);
    const T* py = pointer<const T>(pair.y);
    T* d = pointer<T>(dx);
    T* e = pointer<T>(dy_);
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
    const T* px = pointer<const T>(pair.x);
    const T* py = pointer<const T>(pair.y);
    T* po = pointer<T>(out);
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

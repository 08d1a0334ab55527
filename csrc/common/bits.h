// The bits that a ReLU keeps for its backward: bit j of byte i says whether it kept element 8i + j.
#pragma once

#include "vector.h"

#ifdef __SSE2__  // every x86-64
#include <emmintrin.h>
#endif

namespace fastlayers {
namespace {

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
    std::memcpy(bits + i / kMaskBits, &two, sizeof(two));
  }
#endif
  for (; i < n; i += kMaskBits) {
    const int64_t end = std::min<int64_t>(n - i, kMaskBits);
    uint8_t byte = 0;
    for (int64_t j = 0; j < end; ++j) byte |= !(static_cast<compute_t<T>>(t[i + j]) <= 0) << j;
    bits[i / kMaskBits] = byte;
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
    std::memcpy(&two, bits + i / kMaskBits, sizeof(two));
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
  for (; i < n; ++i) out[i] = grad[i] & static_cast<Word>(-static_cast<Word>(bits[i / kMaskBits] >> (i % kMaskBits) & 1));
}

// f(at, count) for tasks that start at whole bytes of bits, so that no two write to one byte.
template <typename F>
void for_bytes(int64_t n, F&& f) {
  torch::stable::parallel_for(0, bytes_of_bits(n), kGrain / kMaskBits, [&](int64_t first, int64_t last) {
    f(first * kMaskBits, std::min(last * kMaskBits, n) - first * kMaskBits);
  });
}

}  // namespace
}  // namespace fastlayers

// (N, C, *) tensors as the kernels of norms over channels take them, on a CPU and on a GPU.
#pragma once

#include "tensor.h"

namespace fastlayers {
namespace {

// An (N, C, *) tensor, contiguous or channels last, and on a GPU aligned to 16 bytes; a copy where it is not.
struct ChannelLayout {
  Tensor x;
  int64_t images, channels, plane = 1;
  bool channels_last;

  ChannelLayout(const Tensor& x_in, const char* op) : x(x_in) {
    const int64_t dims = x_in.dim();
    FASTLAYERS_CHECK(dims >= 2 && dims <= 5, op, "expected x of 2 to 5 dimensions, but got ", dims);
    images = x_in.size(0), channels = x_in.size(1);
    for (int64_t d = 2; d < dims; ++d) plane *= x_in.size(d);
    const bool contiguous = x_in.is_contiguous();
    channels_last = !contiguous && is_channels_last(x_in);
    if (!contiguous && !channels_last) x = torch::stable::contiguous(x_in);
    else if (!starts_words(x_in)) x = copy(x_in, x_in.scalar_type());
  }
  // Whether the channels of a pixel are neighbours in memory, as those of a single pixel are in any layout.
  bool channels_together() const { return channels_last || plane == 1; }
  Tensor empty(ScalarType dtype) const { return empty_strided(x.dim(), x.sizes().data(), x.strides().data(), dtype, x); }
  Tensor copy(const Tensor& t, ScalarType dtype) const {
    Tensor c = empty(dtype);
    torch::stable::copy_(c, t);
    return c;
  }

  // t, of x's shape, in x's layout.
  Tensor bring(const Tensor& t, const char* op, const char* name) const {
    check_device(x, t, op, name);
    bool same = t.dim() == x.dim(), fits = same;
    for (int64_t d = 0; d < x.dim() && same; ++d) {
      same = t.size(d) == x.size(d);
      fits = fits && same && (t.size(d) == 1 || t.stride(d) == x.stride(d));
    }
    FASTLAYERS_CHECK(same, op, "expected ", name, " of x's shape");
    return fits && starts_words(t) ? t : copy(t, t.scalar_type());
  }

  void check_values(const Tensor& t, const char* op, const char* name) const {
    const ScalarType own = x.scalar_type(), dtype = t.scalar_type(), wide = compute_dtype(own);
    FASTLAYERS_CHECK(dtype == own || dtype == wide, op, "expected ", name, " of x's dtype ", toString(own), " or ", toString(wide),
                     ", but got ", toString(dtype));
    check_device(x, t, op, name);
    FASTLAYERS_CHECK(t.numel() == channels, op, "expected ", name, " of ", channels, " values");
  }

 private:
  static bool starts_words(const Tensor& t) { return !t.is_cuda() || aligned(t.const_data_ptr()); }
};

// A mean and a reciprocal standard deviation for each of n channels or groups, [2, n]; none where they are not wanted.
inline Tensor empty_stats(bool wanted, int64_t n, const Tensor& x) {
  return wanted ? empty_contiguous({2, n}, compute_dtype(x), x) : empty_contiguous({0}, compute_dtype(x), x);
}

}  // namespace
}  // namespace fastlayers

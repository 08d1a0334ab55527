// What the CPU and the CUDA implementation of max_pool2d share: what is checked, and how images lie in memory.
#pragma once

#include "common/tensor.h"

namespace fastlayers {
namespace {

using Numbers = std::vector<int64_t>;

struct Window {
  Numbers kernel, stride, padding, dilation;  // of height and width each
};

// Along height or width.
struct Extent {
  int size, out, kernel, stride, padding, dilation;

  Extent(int d, const Numbers& sizes, const Numbers& outs, const Window& window, const char* op) {
    const auto number = [&](const Numbers& of, int64_t least) {
      FASTLAYERS_CHECK(of.size() == 2 && of[d] >= least && of[d] <= INT32_MAX / 2, op, "expected two numbers of at least ", least,
                       " for height and width");
      return static_cast<int>(of[d]);
    };
    size = number(sizes, 1), out = number(outs, 1), kernel = number(window.kernel, 1), stride = number(window.stride, 1);
    padding = number(window.padding, 0), dilation = number(window.dilation, 1);
  }
};

// Images as [outer, height, width, inner] in memory. The channels are the inner dimension of channels_last images, and outer in others.
template <typename Axis>
struct Images {
  Axis height, width;
  int64_t outer;
  int inner;

  int64_t in() const { return static_cast<int64_t>(height.size) * width.size * inner; }
  int64_t out() const { return static_cast<int64_t>(height.out) * width.out * inner; }
};

// t has the sizes [..., height, width] and is contiguous or channels_last.
template <typename Axis>
Images<Axis> images_of(const Tensor& t, bool channels_last, const Numbers& size, const Numbers& out, const Window& window, const char* op) {
  const int64_t dims = t.dim();
  FASTLAYERS_CHECK(dims == 4 || (dims == 3 && !channels_last), op, "expected images with 3 or 4 dimensions");
  const Dims sizes = dims_of(t.sizes());
  FASTLAYERS_CHECK(same_layout(sizes, dims_of(t.strides()), channels_last ? dense_strides(sizes, {0, 2, 3, 1}) : contiguous_strides(sizes)),
                   op, "expected ", channels_last ? "channels_last" : "contiguous", " images");
  Images<Axis> images{Extent(0, size, out, window, op), Extent(1, size, out, window, op), 0, 1};
  FASTLAYERS_CHECK(images.height.kernel * static_cast<int64_t>(images.width.kernel) < UINT8_MAX, op,
                   "expected a window of fewer than 255 elements");
  const int64_t channels = sizes[dims - 3];
  FASTLAYERS_CHECK(channels <= INT32_MAX / 2, op, channels, " channels are too many");
  images.outer = dims == 4 ? sizes[0] : 1;
  if (channels_last) images.inner = static_cast<int>(channels);
  else images.outer *= channels;
  return images;
}

// Images of this size, in the layout and dtype of t.
inline Tensor empty_images(const Tensor& t, bool channels_last, int height, int width, ScalarType dtype) {
  Dims sizes = dims_of(t.sizes());
  sizes[sizes.size() - 2] = height;
  sizes[sizes.size() - 1] = width;
  return empty_strided(sizes, channels_last ? dense_strides(sizes, {0, 2, 3, 1}) : contiguous_strides(sizes), dtype, t);
}

// The size of images [..., height, width].
inline Numbers image_size(const Tensor& t, const char* op) {
  FASTLAYERS_CHECK(t.dim() >= 2, op, "expected images with 3 or 4 dimensions");
  return {t.size(t.dim() - 2), t.size(t.dim() - 1)};
}

inline void check_offsets(const Tensor& dy, const Tensor& offsets, const char* op) {
  FASTLAYERS_CHECK(offsets.scalar_type() == ScalarType::Byte && offsets.numel() == dy.numel(), op,
                   "expected a byte for each element of dy");
}

}  // namespace
}  // namespace fastlayers

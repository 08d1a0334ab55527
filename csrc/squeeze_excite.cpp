// What squeeze-and-excite needs of an image on a CPU besides the product with its gates: the sums over space of each channel, of x or of a
// product, and the gradient that the product and the mean send back to one x, in one pass.
#include "common/channels.h"

namespace fastlayers::squeeze_excite {
namespace {

// Adds x, or x·y, to the sums of each column, which have room for whole vectors.
template <typename T>
void add_pixels(const T* x, const T* y, const Block b, compute_t<T>* sums) {
  using A = compute_t<T>;
  for_block<A, 8>(b, [&](int64_t at, int64_t i, const Part<A>& part, int64_t count) FASTLAYERS_LANES {
    Vector<A> sum{};
    for (int u = 0; u < count; ++u) {
      const int64_t e = at + u * b.columns;
      sum += y == nullptr ? part.load(x + e) : part.load(x + e) * part.load(y + e);
    }
    store<A>(sums + i, load<A>(sums + i) + sum);
  });
}

// out = x·scale + shift, of values by column as in Affine.
template <typename T>
void scale_and_shift(T* out, const T* x, const Block b, const Affine<compute_t<T>> p) {
  using A = compute_t<T>;
  for_block<A, 1>(b, [&](int64_t at, int64_t i, const Part<A>& part, int64_t) FASTLAYERS_LANES {
    part.store(out + at, part.load(x + at) * load<A>(p.scale + p.of(i)) + load<A>(p.bias + p.of(i)));
  });
}

void check_image(const Tensor& x, const char* op) {
  FASTLAYERS_CHECK(x.dim() == 4 && (x.is_contiguous() || is_channels_last(x)), op, "expected a contiguous or channels_last image");
}

// The sums over space of x·factor, or of x·y, of shape (N, C, 1, 1).
Tensor spatial_sum(const Tensor& x, const MaybeTensor& y, double factor) {
  const char* op = "spatial_sum";
  check_image(x, op);
  const Images image(x, op);
  if (y) {
    check_same_shape(x, *y, op, "y");
    FASTLAYERS_CHECK(factor == 1 && same_layout(dims_of(x.sizes()), dims_of(x.strides()), dims_of(y->strides())), op,
                     "expected y with the strides of x, and no factor besides it");
  }
  Tensor out = empty_contiguous({image.images, image.channels, 1, 1}, x.scalar_type(), x);
  if (out.numel() == 0 || x.numel() == 0) return torch::stable::zero_(out);
  dispatch_floating(x.scalar_type(), op, [&]<typename T>(T) {
    using A = compute_t<T>;
    using W = wide_t<A>;
    const T *px = pointer<const T>(x), *py = pointer<const T>(y);
    T* po = pointer<T>(out);
    // A unit is an image whose pixels are channels last, or a contiguous plane.
    const int64_t channels = image.last ? image.channels : 1, units = image.images * image.channels / channels;
    const Pieces p = image.last ? Pieces::of_pixels<A>(image.plane, channels) : Pieces::of_plane(image.plane);
    const int64_t n = channels * image.plane;
    const Memory<A> sums(units * p.count * p.width);
    for_units(
        units, p.count, 0, n,
        [&](int64_t u, int64_t k) {
          A* to = sums + (u * p.count + k) * p.width;
          std::fill_n(to, p.width, A(0));
          const int64_t at = u * n + p.start(k);
          add_pixels(px + at, py == nullptr ? nullptr : py + at, p.block(k), to);
        },
        [&](int64_t u) {
          A* all = sums + u * p.count * p.width;
          for (int64_t k = 1; k < p.count; ++k) add_columns(all, all + k * p.width, p.width);
          for (int64_t c = 0; c < channels; ++c) {
            W sum = 0;
            for (int64_t i = c; i < p.columns; i += channels) sum += all[i];
            po[u * channels + c] = static_cast<T>(static_cast<A>(sum * factor));
          }
        },
        [](int64_t, int64_t) {});
  });
  return out;
}

// x·scale + factor·shift for scale and shift of shape (N, C, 1, 1).
Tensor scale_shift(const Tensor& x, const Tensor& scale_in, const Tensor& shift_in, double factor) {
  const char* op = "scale_shift";
  check_image(x, op);
  const Images image(x, op);
  const Dims sizes{image.images, image.channels, 1, 1};
  for (const Tensor* t : {&scale_in, &shift_in}) {
    check_same(x, *t, op, "scale and shift");
    FASTLAYERS_CHECK(dims_of(t->sizes()) == sizes, op, "expected scale and shift of shape (N, C, 1, 1)");
  }
  const Tensor out = image.empty(x.scalar_type());
  if (out.numel() == 0) return out;
  const Dims strides = contiguous_strides(sizes);
  const Tensor scale = with_strides(scale_in, sizes, strides), shift = with_strides(shift_in, sizes, strides);
  dispatch_floating(x.scalar_type(), op, [&]<typename T>(T) {
    using A = compute_t<T>;
    const T *px = pointer<const T>(x), *ps = pointer<const T>(scale), *pm = pointer<const T>(shift);
    T* po = pointer<T>(out);
    const auto by = static_cast<A>(factor);
    const int64_t channels = image.last ? image.channels : 1, units = image.images * image.channels / channels;
    const Pieces p = image.last ? Pieces::of_pixels<A>(image.plane, channels) : Pieces::of_plane(image.plane);
    const int64_t n = channels * image.plane;
    if (!image.last) {
      for_units(
          units, 0, p.count, n, [](int64_t, int64_t) {}, [](int64_t) {},
          [&](int64_t u, int64_t k) {
            const Repeated<A> scales(static_cast<A>(ps[u])), shifts(static_cast<A>(pm[u]) * by);
            scale_and_shift<T>(po + u * n + p.start(k), px + u * n + p.start(k), p.block(k), {nullptr, scales, shifts, false});
          });
      return;
    }
    const Memory<A> values(units * 2 * p.width);
    for_units(
        units, 1, p.count, n,
        [&](int64_t u, int64_t) {
          A *scales = values + u * 2 * p.width, *shifts = scales + p.width;
          for (int64_t c = 0; c < channels; ++c) {
            scales[c] = static_cast<A>(ps[u * channels + c]);
            shifts[c] = static_cast<A>(pm[u * channels + c]) * by;
          }
          repeat_channels(scales, channels, p);
          repeat_channels(shifts, channels, p);
        },
        [](int64_t) {},
        [&](int64_t u, int64_t k) {
          const A* scales = values + u * 2 * p.width;
          scale_and_shift<T>(po + u * n + p.start(k), px + u * n + p.start(k), p.block(k), {nullptr, scales, scales + p.width, true});
        });
  });
  return out;
}

}  // namespace
}  // namespace fastlayers::squeeze_excite

FASTLAYERS_CPU_KERNELS(squeeze_excite, m) {
  m.impl("spatial_sum", TORCH_BOX(&fastlayers::squeeze_excite::spatial_sum));
  m.impl("scale_shift", TORCH_BOX(&fastlayers::squeeze_excite::scale_shift));
}

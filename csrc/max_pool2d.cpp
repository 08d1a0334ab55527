// max_pool2d and its gradient for CPU tensors, on torch's threads. A byte an output is kept, as by the CUDA kernels (max_pool2d.cu): torch
// keeps eight. Channels last, vectors go across the channels; the backward gathers. In contiguous planes they go along the width, over rows
// whose elements are sorted by their place within a stride, so that neighbours of a window are neighbours in memory; the backward scatters.
#include "max_pool2d.h"

#include <limits>

#include "common/vector_math.h"

namespace fastlayers::max_pool2d {
namespace {

typedef uint8_t Bytes __attribute__((vector_size(kLanes<float>)));

// Whole numbers below 256 as bytes, and back. Float32 in steps: in one GCC 12 takes it element by element.
template <typename A, typename Lanes>
FASTLAYERS_INLINE void store_bytes(uint8_t* to, const Vector<A>& v, const Lanes& lanes) {
  if constexpr (std::is_same_v<A, double>) {
    for (int64_t i = 0; i < lanes.count; ++i) to[i] = static_cast<uint8_t>(v[i]);
  } else {
    using namespace vectors;
    const Bytes bytes = __builtin_convertvector(__builtin_convertvector(__builtin_convertvector(v, Ints), Halves), Bytes);
    std::memcpy(to, &bytes, lanes.count);
  }
}
template <typename A, typename Lanes>
FASTLAYERS_INLINE Vector<A> load_bytes(const uint8_t* from, const Lanes& lanes) {
  if constexpr (std::is_same_v<A, double>) {
    Vector<A> v{};
    for (int64_t i = 0; i < lanes.count; ++i) v[i] = from[i];
    return v;
  } else {
    using namespace vectors;
    Bytes bytes{};
    std::memcpy(&bytes, from, lanes.count);
    return __builtin_convertvector(__builtin_convertvector(__builtin_convertvector(bytes, Halves), Ints), Floats);
  }
}

// The offsets [first, end) of the window of an output that lie inside, and where the first of all is.
struct Inside {
  int start, first, end;
  Inside(const Extent& e, int of) : start(of * e.stride - e.padding) {
    first = start >= 0 ? 0 : (-start + e.dilation - 1) / e.dilation;
    end = std::min(e.kernel, (e.size - start + e.dilation - 1) / e.dilation);
  }
};

// The maximum of a window so far, and its offset. NaN stays, and so does the first of equal elements, as in torch.
template <typename A>
struct Maximum {
  Vector<A> value = broadcast<A>(-std::numeric_limits<A>::infinity()), offset;

  FASTLAYERS_INLINE explicit Maximum(const Vector<A>& first) : offset(first) {}
  FASTLAYERS_INLINE void see(const Vector<A>& v, int at) {
    const Vector<A> here = broadcast<A>(static_cast<A>(at));  // two conditions of one result GCC takes lane by lane
    offset = v > value ? here : offset;
    offset = v == v ? offset : here;
    value = v > value ? v : value;
    value = v == v ? value : v;
  }
};

// ---- channels last ------------------------------------------------------------------------------------------------------

// A row of outputs. offsets may be null.
template <typename T>
void pool_pixels(const T* x, T* y, uint8_t* offsets, const Images<Extent>& images, int row) {
  using A = compute_t<T>;
  const Extent &height = images.height, &width = images.width;
  const int64_t channels = images.inner;
  const Inside rows(height, row);
  for (int column = 0; column < width.out; ++column) {
    const Inside columns(width, column);
    const int first = rows.first * width.kernel + columns.first;
    for_vectors<A>(channels, [&](int64_t c, auto lanes) FASTLAYERS_LANES {
      Maximum<A> maximum(broadcast<A>(static_cast<A>(first)));
      for (int kh = rows.first; kh < rows.end; ++kh) {
        const T* line = x + static_cast<int64_t>(rows.start + kh * height.dilation) * width.size * channels + c;
        for (int kw = columns.first; kw < columns.end; ++kw)
          maximum.see(lanes.load(line + (columns.start + kw * width.dilation) * channels), kh * width.kernel + kw);
      }
      const int64_t at = column * channels + c;
      lanes.store(y + at, maximum.value);
      if (offsets != nullptr) store_bytes<A>(offsets + at, maximum.offset, lanes);
    });
  }
}

// The windows along an axis that have an input, in the order of their outputs: which output, and the offset of the input.
struct Windows {
  struct One {
    int output, offset;
  };
  std::vector<One> all;
  std::vector<int> first;  // of each input, and of one more

  explicit Windows(const Extent& e) {
    for (int i = 0; i < e.size; ++i) {
      first.push_back(static_cast<int>(all.size()));
      for (int k = e.kernel - 1; k >= 0; --k)
        if (const int start = i + e.padding - k * e.dilation; start >= 0 && start % e.stride == 0 && start / e.stride < e.out)
          all.push_back({start / e.stride, k});
    }
    first.push_back(static_cast<int>(all.size()));
  }
};

// A row of dx: each element adds up the gradients of the windows whose maximum it is.
template <typename T>
void gather_pixels(const T* dy, const uint8_t* offsets, T* dx, const Images<Extent>& images, const Windows& rows, const Windows& columns,
                   int row) {
  using A = compute_t<T>;
  const Extent& width = images.width;
  const int64_t channels = images.inner;
  for (int column = 0; column < width.size; ++column) {
    for_vectors<A>(channels, [&](int64_t c, auto lanes) FASTLAYERS_LANES {
      Vector<A> sum{};
      for (int h = rows.first[row]; h < rows.first[row + 1]; ++h)
        for (int w = columns.first[column]; w < columns.first[column + 1]; ++w) {
          const auto &above = rows.all[h], &left = columns.all[w];
          const int64_t at = (static_cast<int64_t>(above.output) * width.out + left.output) * channels + c;
          const Vector<A> kept = load_bytes<A>(offsets + at, lanes);
          sum += kept == static_cast<A>(above.offset * width.kernel + left.offset) ? lanes.load(dy + at) : Vector<A>{};
        }
      lanes.store(dx + column * channels + c, sum);
    });
  }
}

// ---- contiguous planes --------------------------------------------------------------------------------------------------

constexpr int64_t kSorted = 1 << 14;  // elements of sorted rows at a time, in the second-level cache

// Rows of a plane in the arithmetic, those of `stride` elements apart beside each other: element i of the padded row is at
// [i % stride][i / stride]. The padding is minus infinity.
template <typename T>
struct SortedRows {
  using A = compute_t<T>;
  const Extent& width;
  int64_t each, row;  // elements of a sorted part with room for whole vectors, and of all parts of a row
  std::vector<A> values;
  std::vector<A> first_offsets;  // of the columns of the result: of the first element of the window that is inside

  explicit SortedRows(const Extent& w) : width(w) {
    const int64_t padded = static_cast<int64_t>(w.out - 1) * w.stride + static_cast<int64_t>(w.kernel - 1) * w.dilation + 1;
    each = (padded + w.stride - 1) / w.stride + kLanes<A>, row = each * w.stride;
    first_offsets.resize(w.out + kLanes<A>);
    for (int column = 0; column < w.out; ++column) first_offsets[column] = static_cast<A>(Inside(w, column).first);
  }
  void sort(const T* x, int64_t rows) {
    values.assign(rows * row, -std::numeric_limits<A>::infinity());
    for (int64_t r = 0; r < rows; ++r, x += width.size)
      for (int part = 0; part < width.stride; ++part) {
        // The first element of the part that is inside, and how many there are.
        const int64_t skip = part >= width.padding ? 0 : (width.padding - part + width.stride - 1) / width.stride;
        const int64_t from = part + skip * width.stride - width.padding;
        const int64_t inside = std::max<int64_t>(0, (width.size - from + width.stride - 1) / width.stride);
        const int64_t n = std::min(inside, each - skip);
        A* to = values.data() + r * row + part * each + skip;
        for (int64_t i = 0; i < n; ++i) to[i] = static_cast<A>(x[from + i * width.stride]);
      }
  }
};

// A row of outputs, whose first row of the window that is inside is `sorted`'s row `top`.
template <typename T>
void pool_row(const SortedRows<T>& sorted, int64_t top, T* y, uint8_t* offsets, const Images<Extent>& images, const Inside& rows) {
  using A = compute_t<T>;
  const Extent &height = images.height, &width = images.width;
  for_vectors<A>(width.out, [&](int64_t i, auto lanes) FASTLAYERS_LANES {
    Maximum<A> maximum(load<A>(sorted.first_offsets.data() + i) + static_cast<A>(rows.first * width.kernel));
    const A* line = sorted.values.data() + top * sorted.row + i;
    for (int kh = rows.first; kh < rows.end; ++kh, line += height.dilation * sorted.row)
      for (int kw = 0; kw < width.kernel; ++kw) {
        const int64_t place = static_cast<int64_t>(kw) * width.dilation;
        maximum.see(load<A>(line + place % width.stride * sorted.each + place / width.stride), kh * width.kernel + kw);
      }
    lanes.store(y + i, maximum.value);
    if (offsets != nullptr) store_bytes<A>(offsets + i, maximum.offset, lanes);
  });
}

// The gradient of a plane in the arithmetic, added to dx.
template <typename T>
void scatter_plane(const T* dy, const uint8_t* offsets, compute_t<T>* dx, const Images<Extent>& images) {
  const Extent &height = images.height, &width = images.width;
  int64_t place[UINT8_MAX];
  for (int k = 0; k < height.kernel * width.kernel; ++k)
    place[k] = static_cast<int64_t>(k / width.kernel * height.dilation) * width.size + k % width.kernel * width.dilation;
  for (int64_t row = 0; row < height.out; ++row)
    for (int64_t column = 0; column < width.out; ++column, ++dy, ++offsets)
      dx[(row * height.stride - height.padding) * width.size + column * width.stride - width.padding + place[*offsets]] +=
          static_cast<compute_t<T>>(*dy);
}

// ---- host ---------------------------------------------------------------------------------------------------------------

int64_t tasks_of(int64_t elements) { return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, elements)); }

std::tuple<Tensor, Tensor> max_pool2d_forward(const Tensor& x_in, Numbers kernel, Numbers stride, Numbers padding, Numbers dilation, Numbers out,
                                              bool channels_last, bool keep) {
  const char* op = "max_pool2d_forward";
  const Images<Extent> images = images_of<Extent>(x_in, channels_last, image_size(x_in, op), out, {kernel, stride, padding, dilation}, op);
  const Extent &height = images.height, &width = images.width;
  Tensor y = empty_images(x_in, channels_last, height.out, width.out, x_in.scalar_type());
  Tensor offsets = keep ? empty_images(x_in, channels_last, height.out, width.out, ScalarType::Byte)
                        : empty_contiguous({0}, ScalarType::Byte, x_in);
  if (y.numel() == 0) return {y, offsets};
  const int64_t line = static_cast<int64_t>(width.out) * images.inner;  // of the result
  dispatch_floating(x_in.scalar_type(), op, [&]<typename T>(T) {
    const T* x = pointer<const T>(x_in);
    T* to = pointer<T>(y);
    uint8_t* kept = keep ? pointer<uint8_t>(offsets) : nullptr;
    const auto kept_at = [&](int64_t i) { return kept == nullptr ? nullptr : kept + i; };
    if (channels_last) {
      const int64_t work = line * height.kernel * width.kernel;
      torch::stable::parallel_for(0, images.outer * height.out, tasks_of(work), [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r)
          pool_pixels<T>(x + r / height.out * images.in(), to + r * line, kept_at(r * line), images, static_cast<int>(r % height.out));
      });
      return;
    }
    // Tasks are rows of a plane whose windows overlap, since each sorts what it reads.
    const int64_t each = std::max<int64_t>(1, kSorted / (static_cast<int64_t>(width.size) * height.stride));
    const int64_t blocks = (height.out + each - 1) / each, work = std::min<int64_t>(each, height.out) * line * height.kernel * width.kernel;
    torch::stable::parallel_for(0, images.outer * blocks, tasks_of(work), [&](int64_t first, int64_t last) {
      SortedRows<T> sorted(width);
      for (int64_t task = first; task < last; ++task) {
        const int64_t plane = task / blocks, begin = task % blocks * each, end = std::min<int64_t>(height.out, begin + each);
        const int64_t top = std::max<int64_t>(0, begin * height.stride - height.padding);
        const int64_t after = (end - 1) * height.stride - height.padding + static_cast<int64_t>(height.kernel - 1) * height.dilation + 1;
        sorted.sort(x + plane * images.in() + top * width.size, std::min<int64_t>(height.size, after) - top);
        for (int64_t row = begin; row < end; ++row) {
          const Inside rows(height, static_cast<int>(row));
          const int64_t at = plane * images.out() + row * line;
          pool_row<T>(sorted, rows.start + rows.first * height.dilation - top, to + at, kept_at(at), images, rows);
        }
      }
    });
  });
  return {y, offsets};
}

// The caller passes dy and offsets with the strides of the forward's result. dx gets those of its x.
Tensor max_pool2d_backward(const Tensor& dy_in, const Tensor& offsets_in, Numbers kernel, Numbers stride, Numbers padding,
                           Numbers dilation, Numbers size, bool channels_last) {
  const char* op = "max_pool2d_backward";
  const Images<Extent> images = images_of<Extent>(dy_in, channels_last, size, image_size(dy_in, op), {kernel, stride, padding, dilation}, op);
  check_offsets(dy_in, offsets_in, op);
  const Extent &height = images.height, &width = images.width;
  Tensor dx_out = empty_images(dy_in, channels_last, height.size, width.size, dy_in.scalar_type());
  if (dx_out.numel() == 0) return dx_out;
  dispatch_floating(dy_in.scalar_type(), op, [&]<typename T>(T) {
    using A = compute_t<T>;
    const T* dy = pointer<const T>(dy_in);
    const uint8_t* offsets = pointer<const uint8_t>(offsets_in);
    T* dx = pointer<T>(dx_out);
    if (channels_last) {
      const int64_t line = static_cast<int64_t>(width.size) * images.inner;
      const Windows rows(height), columns(width);
      torch::stable::parallel_for(0, images.outer * height.size, tasks_of(line), [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r) {
          const int64_t from = r / height.size * images.out();
          gather_pixels<T>(dy + from, offsets + from, dx + r * line, images, rows, columns, static_cast<int>(r % height.size));
        }
      });
      return;
    }
    const int64_t n = images.in();
    torch::stable::parallel_for(0, images.outer, tasks_of(n), [&](int64_t first, int64_t last) {
      std::vector<A> wide(std::is_same_v<T, A> ? 0 : n);
      for (int64_t plane = first; plane < last; ++plane) {
        const int64_t from = plane * images.out();
        T* to = dx + plane * n;
        A* sums = wide.data();
        if constexpr (std::is_same_v<T, A>) sums = to;
        std::fill_n(sums, n, A(0));
        scatter_plane<T>(dy + from, offsets + from, sums, images);
        if constexpr (!std::is_same_v<T, A>) for_vectors<A>(n, [&](int64_t i, auto lanes) { lanes.store(to + i, lanes.load(sums + i)); });
      }
    });
  });
  return dx_out;
}

}  // namespace
}  // namespace fastlayers::max_pool2d

FASTLAYERS_CPU_KERNELS(max_pool2d, m) {
  m.impl("max_pool2d_forward", TORCH_BOX(&fastlayers::max_pool2d::max_pool2d_forward));
  m.impl("max_pool2d_backward", TORCH_BOX(&fastlayers::max_pool2d::max_pool2d_backward));
}

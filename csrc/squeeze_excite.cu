// What squeeze-and-excite reads of an image beside the product with its gates: the sum of each channel over space, of x or of a
// product, and the gradient that the product and the mean send back to one x, in one pass.
#include "columns.cuh"

namespace fastlayers {
namespace {

// x, or x·y: words of it are summed.
template <typename T, int V, bool PRODUCT>
__device__ __forceinline__ void add_words(Vec<compute_t<T>, V>& sum, const Vec<T, V>& x, const Vec<T, V>& y, compute_t<T> factor) {
  using A = compute_t<T>;
  const Vec<A, V> v = unpack<A>(x);
  if constexpr (PRODUCT) {
    const Vec<A, V> w = unpack<A>(y);
#pragma unroll
    for (int j = 0; j < V; ++j) sum.v[j] += v.v[j] * w.v[j];
  } else {
#pragma unroll
    for (int j = 0; j < V; ++j) sum.v[j] += v.v[j] * factor;
  }
}

// Words of each tensor that a thread has in flight.
template <bool PRODUCT>
constexpr int kInFlight = PRODUCT ? 4 : 8;

// Images [outer, repeat, columns], channels_last: the sums over `repeat`, of x·factor or of x·y.
template <typename T, int V, bool PRODUCT>
__global__ void __launch_bounds__(kThreads, kColumnBlocks<compute_t<T>>)
    sum_columns(const T* __restrict__ x, const T* __restrict__ y, compute_t<T>* partial, T* sums, compute_t<T> factor, const Columns c) {
  using A = compute_t<T>;
  const int64_t blocks = c.tiles * c.pieces, outer = blockIdx.x / blocks;
  ColumnThread<V> me(c, blockIdx.x - outer * blocks);
  Vec<A, V> sum = filled<A, V>(A(0));
  const int64_t base = outer * c.repeat * c.columns + me.column;
  me.template for_rows<kInFlight<PRODUCT>>(c, [&](auto count, int64_t row) {
    constexpr int U = count.value;
    Vec<T, V> wx[U];
    [[maybe_unused]] Vec<T, V> wy[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t i = base + (row + u * me.step) * c.columns;
      wx[u] = load_vec<T, V>(x + i);
      if constexpr (PRODUCT) wy[u] = load_vec<T, V>(y + i);
    }
#pragma unroll
    for (int u = 0; u < U; ++u) add_words<T, V, PRODUCT>(sum, wx[u], PRODUCT ? wy[u] : wx[u], factor);
  });
  me.store(c, sum, partial + outer * c.pieces * c.columns, sums == nullptr ? sums : sums + outer * c.columns);
}

// Images [outer, repeat], contiguous: a block for each sum of long rows, a warp for each of short ones.
template <typename T, bool WHOLE, bool PRODUCT>
__global__ void __launch_bounds__(kThreads) sum_rows(const T* __restrict__ x, const T* __restrict__ y, T* sums, compute_t<T> factor,
                                                   int64_t outer, int64_t repeat, int across) {
  using A = compute_t<T>;
  constexpr int V = kVector<T>;
  __shared__ A shared[kThreads / 32];
  const int lane = threadIdx.x % across;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / across) + threadIdx.x / across;
  Vec<A, V> sums_of = filled<A, V>(A(0));
  if (row < outer) {
    x += row * repeat;
    if constexpr (PRODUCT) y += row * repeat;
#pragma unroll kInFlight<PRODUCT>
    for (int64_t i = static_cast<int64_t>(lane) * V; i < repeat; i += across * V) {
      const Vec<T, V> wx = load_flat<T, WHOLE>(x, i, repeat);
      add_words<T, V, PRODUCT>(sums_of, wx, PRODUCT ? load_flat<T, WHOLE>(y, i, repeat) : wx, factor);
    }
  }
  A sum = 0;
#pragma unroll
  for (int j = 0; j < V; ++j) sum += sums_of.v[j];
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, o);
  if (across > 32) {
    if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = sum;
    __syncthreads();
    sum = 0;
    for (int k = 0; k < kThreads / 32; ++k) sum += shared[k];
  }
  if (lane == 0 && row < outer) sums[row] = convert<T>(sum);
}

// Where element i of [outer, repeat, columns] finds its channel.
struct Channels {
  bool whole;  // words lie within a row of columns, or within one repeat where columns is 1
  bool small;  // fewer than 2^31 elements
  int64_t columns_, block_;
  Divider columns, block;  // block: repeat·columns

  Channels(int64_t outer, int64_t repeat, int64_t columns_in, bool whole_)
      : whole(whole_), small(outer * repeat * columns_in <= INT32_MAX), columns_(columns_in), block_(repeat * columns_in) {
    if (small) {
      columns = Divider(static_cast<uint32_t>(columns_));
      block = Divider(static_cast<uint32_t>(block_));
    }
  }
  __device__ __forceinline__ int64_t of(int64_t i) const {
    if (small) {
      const uint32_t at = static_cast<uint32_t>(i);
      return static_cast<int64_t>(block.quotient(at)) * columns.divisor + at - columns.quotient(at) * columns.divisor;
    }
    return i / block_ * columns_ + i % columns_;
  }
  template <typename T>
  __device__ __forceinline__ Vec<T, kVector<T>> load(const T* p, int64_t i, int64_t n) const {
    if (whole) return columns_ == 1 ? filled<T, kVector<T>>(p[of(i)]) : load_vec<T, kVector<T>>(p + of(i));
    Vec<T, kVector<T>> w;
#pragma unroll
    for (int j = 0; j < kVector<T>; ++j) w.v[j] = i + j < n ? p[of(i + j)] : convert<T>(0.f);
    return w;
  }
};

// x·scale + factor·shift, both of a channel of an image.
template <typename T>
__global__ void __launch_bounds__(kThreads) scale_shift_flat(const T* __restrict__ x, const T* __restrict__ scale,
                                                           const T* __restrict__ shift, T* __restrict__ out, int64_t n, bool is_aligned,
                                                           compute_t<T> factor, const Channels channels) {
  using A = compute_t<T>;
  constexpr int V = kVector<T>;
  for_block<T>(is_aligned, n, [&](auto words, int first) {
    constexpr int U = words.value;
    constexpr bool WHOLE = U > 1;
    Vec<T, V> wx[U], ws[U], wm[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t i = flat_index<T>(first + u);
      wx[u] = load_flat<T, WHOLE>(x, i, n);
      if (WHOLE || i < n) ws[u] = channels.load(scale, i, n), wm[u] = channels.load(shift, i, n);
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      Vec<A, V> r = unpack<A>(wx[u]);
      const Vec<A, V> s = unpack<A>(ws[u]), m = unpack<A>(wm[u]);
#pragma unroll
      for (int j = 0; j < V; ++j) r.v[j] = r.v[j] * s.v[j] + factor * m.v[j];
      store_flat<T, WHOLE>(out, flat_index<T>(first + u), n, pack<T>(r));
    }
  });
}

// ---- host ---------------------------------------------------------------------------------------------------------------

// An image (N, C, H, W) in memory.
struct Image {
  Dims sizes, strides;
  int64_t outer, repeat, columns;

  Image(const Tensor& x, const char* op) : sizes(dims_of(x.sizes())), strides(dims_of(x.strides())) {
    STD_TORCH_CHECK(sizes.size() == 4, "fastlayers::", op, ": expected images, of 4 dimensions");
    const bool last = !x.is_contiguous();
    STD_TORCH_CHECK(!last || same_layout(sizes, strides, dense_strides(sizes, {0, 2, 3, 1})), "fastlayers::", op,
                    ": expected contiguous or channels_last images");
    repeat = sizes[2] * sizes[3];
    outer = last ? sizes[0] : sizes[0] * sizes[1];
    columns = last ? sizes[1] : 1;
  }
};

// The sums over space, (N, C, 1, 1), of x·factor or of x·y, for a y that lies as x does.
Tensor spatial_sum(const Tensor& x, const std::optional<Tensor>& y, double factor) {
  const char* op = "spatial_sum";
  const Image image(x, op);
  if (y) {
    check_same_shape(x, *y, op, "y");
    STD_TORCH_CHECK(factor == 1 && same_layout(image.sizes, image.strides, dims_of(y->strides())), "fastlayers::", op,
                    ": expected a y that lies as x does, and no factor besides");
  }
  const Launch launch(x);
  Tensor out = empty_contiguous({image.sizes[0], image.sizes[1], 1, 1}, x.scalar_type(), x);
  if (out.numel() == 0 || x.numel() == 0) return torch::stable::zero_(out);
  const int64_t outer = image.outer, repeat = image.repeat, columns = image.columns;
  dispatch_floating(x.scalar_type(), op, [&](auto zero) {
    using T = decltype(zero);
    using A = compute_t<T>;
    constexpr int V = kVector<T>;
    const T* px = static_cast<const T*>(x.const_data_ptr());
    const T* py = y ? static_cast<const T*>(y->const_data_ptr()) : nullptr;
    T* sums = static_cast<T*>(out.mutable_data_ptr());
    const bool whole = aligned(px) && aligned(py);
    const auto run = [&](auto product) {
      constexpr bool P = decltype(product)::value;
      if (columns == 1) {
        const int across = repeat > 8 * 32 * V ? kThreads : 32;
        const unsigned grid = blocks_for(outer, kThreads / across);
        if (whole && repeat % V == 0) {
          sum_rows<T, true, P><<<grid, kThreads, 0, launch.stream()>>>(px, py, sums, static_cast<A>(factor), outer, repeat, across);
        } else {
          sum_rows<T, false, P><<<grid, kThreads, 0, launch.stream()>>>(px, py, sums, static_cast<A>(factor), outer, repeat, across);
        }
        STD_CUDA_KERNEL_LAUNCH_CHECK();
        return;
      }
      const auto down = [&](auto vector) {
        constexpr int W = decltype(vector)::value;
        const Columns c = Columns::plan<A>(repeat, columns, W, launch.device(), outer);
        Tensor partial = empty_partial<A>(c.pieces == 1 ? 0 : outer * c.pieces, columns, x);
        sum_columns<T, W, P><<<blocks_for(c.blocks() * outer, 1), c.threads(), c.shared<A>(W), launch.stream()>>>(
            px, py, static_cast<A*>(partial.mutable_data_ptr()), c.pieces == 1 ? sums : nullptr, static_cast<A>(factor), c);
        STD_CUDA_KERNEL_LAUNCH_CHECK();
        if (c.pieces > 1) launch_add_pieces<T>(partial, sums, outer, c.pieces, columns, launch);
      };
      if (whole && columns % V == 0) down(std::integral_constant<int, V>{});
      else down(std::integral_constant<int, 1>{});
    };
    if (y) run(std::true_type{});
    else run(std::false_type{});
  });
  return out;
}

// x·scale + factor·shift for scale and shift of shape (N, C, 1, 1).
Tensor scale_shift(const Tensor& x, const Tensor& scale_in, const Tensor& shift_in, double factor) {
  const char* op = "scale_shift";
  const Image image(x, op);
  const Dims sizes{image.sizes[0], image.sizes[1], 1, 1};
  for (const Tensor* t : {&scale_in, &shift_in}) {
    check_same(x, *t, op, "scale and shift");
    STD_TORCH_CHECK(dims_of(t->sizes()) == sizes, "fastlayers::", op, ": expected scale and shift of shape (N, C, 1, 1)");
  }
  const Launch launch(x);
  Tensor out = empty_strided(image.sizes, image.strides, x.scalar_type(), x);
  const int64_t n = out.numel();
  if (n == 0) return out;
  const Dims strides = contiguous_strides(sizes);
  const Tensor scale = with_strides(scale_in, sizes, strides), shift = with_strides(shift_in, sizes, strides);
  dispatch_floating(x.scalar_type(), op, [&](auto zero) {
    using T = decltype(zero);
    constexpr int V = kVector<T>;
    const T* px = static_cast<const T*>(x.const_data_ptr());
    const T* ps = static_cast<const T*>(scale.const_data_ptr());
    const T* pm = static_cast<const T*>(shift.const_data_ptr());
    const bool fits = image.columns == 1 ? image.repeat % V == 0 : image.columns % V == 0 && aligned(ps) && aligned(pm);
    scale_shift_flat<T><<<flat_blocks<T>(n), kThreads, 0, launch.stream()>>>(
        px, ps, pm, static_cast<T*>(out.mutable_data_ptr()), n, aligned(px), static_cast<compute_t<T>>(factor),
        Channels(image.outer, image.repeat, image.columns, fits));
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return out;
}

}  // namespace
}  // namespace fastlayers

STABLE_TORCH_LIBRARY_IMPL(fastlayers, CUDA, m) {
  m.impl("spatial_sum", TORCH_BOX(&fastlayers::spatial_sum));
  m.impl("scale_shift", TORCH_BOX(&fastlayers::scale_shift));
}

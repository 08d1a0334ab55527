// What squeeze-and-excite needs of an image besides the product with its gates: the sums over space of each channel, of x or of a product,
// and the gradient that the product and the mean send back to one x, in one pass.
#include "common/columns.cuh"

namespace fastlayers {
namespace {

// x, or x·y: words of it are summed.
template <typename T, int V, bool PRODUCT>
__device__ __forceinline__ void add_words(Vec<compute_t<T>, V>& sum, const Vec<T, V>& x, const Vec<T, V>& y, compute_t<T> factor) {
  using A = compute_t<T>;
  const Vec<A, V> v = unpack<A>(x);
  if constexpr (PRODUCT) {
    const Vec<A, V> w = unpack<A>(y);
    unroll<V>([&](int j) { sum.v[j] += v.v[j] * w.v[j]; });
  } else {
    unroll<V>([&](int j) { sum.v[j] += v.v[j] * factor; });
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
  me.template for_rows<kInFlight<PRODUCT>>(c, [&]<int U>(Number<U>, int64_t row) {
    Vec<T, V> wx[U];
    [[maybe_unused]] Vec<T, V> wy[U];
    unroll<U>([&](int u) {
      const int64_t i = base + (row + u * me.step) * c.columns;
      wx[u] = load_vec<T, V>(x + i);
      if constexpr (PRODUCT) wy[u] = load_vec<T, V>(y + i);
    });
    unroll<U>([&](int u) { add_words<T, V, PRODUCT>(sum, wx[u], PRODUCT ? wy[u] : wx[u], factor); });
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
  unroll<V>([&](int j) { sum += sums_of.v[j]; });
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

// x·scale + factor·shift for a scale and a shift of each channel, in words that Repeats serves.
template <typename T>
__global__ void __launch_bounds__(kThreads) scale_shift_words(const T* __restrict__ x, const T* __restrict__ scale,
                                                            const T* __restrict__ shift, T* __restrict__ out, int64_t n,
                                                            compute_t<T> factor, const Repeats repeats) {
  using A = compute_t<T>;
  constexpr int V = kVector<T>;
  Vec<T, V> wx[kUnroll], ws[kUnroll], wm[kUnroll];
  unroll<kUnroll>([&](int u) {
    const int64_t i = flat_index<T>(u);
    if (i < n) wx[u] = load_vec<T, V>(x + i), ws[u] = repeats.load(scale, i), wm[u] = repeats.load(shift, i);
  });
  unroll<kUnroll>([&](int u) {
    Vec<A, V> r = unpack<A>(wx[u]);
    const Vec<A, V> s = unpack<A>(ws[u]), m = unpack<A>(wm[u]);
    unroll<V>([&](int j) { r.v[j] = r.v[j] * s.v[j] + factor * m.v[j]; });
    if (flat_index<T>(u) < n) store_vec<T, V>(out + flat_index<T>(u), pack<T>(r));
  });
}

// The same of any [outer, repeat, columns], element by element.
template <typename T>
__global__ void __launch_bounds__(kThreads) scale_shift_elements(const T* __restrict__ x, const T* __restrict__ scale,
                                                               const T* __restrict__ shift, T* __restrict__ out, int64_t n,
                                                               compute_t<T> factor, int64_t block, int64_t columns) {
  using A = compute_t<T>;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= n) return;
  const int64_t channel = i / block * columns + i % columns;
  out[i] = convert<T>(convert<A>(x[i]) * convert<A>(scale[channel]) + factor * convert<A>(shift[channel]));
}

// ---- host ---------------------------------------------------------------------------------------------------------------

// An image (N, C, H, W) in memory.
struct Image {
  Dims sizes, strides;
  int64_t outer, repeat, columns;

  Image(const Tensor& x, const char* op) : sizes(dims_of(x.sizes())), strides(dims_of(x.strides())) {
    FASTLAYERS_CHECK(sizes.size() == 4, op, "expected images with 4 dimensions");
    const bool last = !x.is_contiguous();
    FASTLAYERS_CHECK(!last || same_layout(sizes, strides, dense_strides(sizes, {0, 2, 3, 1})), op,
                     "expected contiguous or channels_last images");
    repeat = sizes[2] * sizes[3];
    outer = last ? sizes[0] : sizes[0] * sizes[1];
    columns = last ? sizes[1] : 1;
  }
};

// The sums over space, (N, C, 1, 1), of x·factor or of x·y. y has the strides of x.
Tensor spatial_sum(const Tensor& x, const MaybeTensor& y, double factor) {
  const char* op = "spatial_sum";
  const Image image(x, op);
  if (y) {
    check_same_shape(x, *y, op, "y");
    FASTLAYERS_CHECK(factor == 1 && same_layout(image.sizes, image.strides, dims_of(y->strides())), op,
                     "expected y with the strides of x, and no factor besides it");
  }
  const Launch launch(x);
  Tensor out = empty_contiguous({image.sizes[0], image.sizes[1], 1, 1}, x.scalar_type(), x);
  if (out.numel() == 0 || x.numel() == 0) return torch::stable::zero_(out);
  const int64_t outer = image.outer, repeat = image.repeat, columns = image.columns;
  dispatch_floating(x.scalar_type(), op, [&]<typename T>(T) {
    using A = compute_t<T>;
    constexpr int V = kVector<T>;
    const T* px = pointer<const T>(x);
    const T* py = pointer<const T>(y);
    const auto by = static_cast<A>(factor);
    T* sums = pointer<T>(out);
    const bool whole = aligned(px) && aligned(py);
    const auto run = [&]<bool P>(std::bool_constant<P>) {
      if (columns == 1) {
        const int across = repeat > 8 * 32 * V ? kThreads : 32;
        const auto kernel = whole && repeat % V == 0 ? &sum_rows<T, true, P> : &sum_rows<T, false, P>;
        kernel<<<blocks_for(outer, kThreads / across), kThreads, 0, launch.stream()>>>(px, py, sums, by, outer, repeat, across);
        STD_CUDA_KERNEL_LAUNCH_CHECK();
        return;
      }
      const auto down = [&]<int W>(Number<W>) {
        const Columns c = Columns::plan<A>(repeat, columns, W, launch.device(), outer);
        Tensor partial = empty_partial<A>(c.pieces == 1 ? 0 : outer * c.pieces, columns, x);
        sum_columns<T, W, P><<<blocks_for(c.blocks() * outer, 1), c.threads(), c.shared<A>(W), launch.stream()>>>(
            px, py, pointer<A>(partial), c.pieces == 1 ? sums : nullptr, by, c);
        STD_CUDA_KERNEL_LAUNCH_CHECK();
        if (c.pieces > 1) launch_add_pieces<T>(partial, sums, outer, c.pieces, columns, launch);
      };
      if (whole && columns % V == 0) down(Number<V>{});
      else down(Number<1>{});
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
    FASTLAYERS_CHECK(dims_of(t->sizes()) == sizes, op, "expected scale and shift of shape (N, C, 1, 1)");
  }
  const Launch launch(x);
  Tensor out = empty_strided(image.sizes, image.strides, x.scalar_type(), x);
  const int64_t n = out.numel();
  if (n == 0) return out;
  const Dims strides = contiguous_strides(sizes);
  const Tensor scale = with_strides(scale_in, sizes, strides), shift = with_strides(shift_in, sizes, strides);
  dispatch_floating(x.scalar_type(), op, [&]<typename T>(T) {
    constexpr int V = kVector<T>;
    const T* px = pointer<const T>(x);
    const T* ps = pointer<const T>(scale);
    const T* pm = pointer<const T>(shift);
    T* po = pointer<T>(out);
    const auto by = static_cast<compute_t<T>>(factor);
    const int64_t block = image.repeat * image.columns;
    const bool whole = image.columns == 1 ? block % V == 0 : image.columns % V == 0 && aligned(ps) && aligned(pm);
    if (whole && aligned(px) && n <= INT32_MAX) {
      const Repeats repeats{true, Divider(static_cast<uint32_t>(image.columns)), Divider(static_cast<uint32_t>(block))};
      return launch_flat<T>(scale_shift_words<T>, n, launch, px, ps, pm, po, n, by, repeats);
    }
    scale_shift_elements<T><<<blocks_for(n, kThreads), kThreads, 0, launch.stream()>>>(px, ps, pm, po, n, by, block, image.columns);
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

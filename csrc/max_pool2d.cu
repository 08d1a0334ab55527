// max_pool2d and its gradient.
//
// The forward keeps a byte for each output: the row-major offset of its maximum in the window. The backward gathers: an input looks at the
// windows that contain it, and adds the gradients of those whose maximum it is. It needs no atomics and writes dx once.
#include "common/flat.cuh"
#include "max_pool2d.h"

namespace fastlayers {
namespace {

// Blocks on a multiprocessor, which leaves a thread 64 registers.
template <typename T>
constexpr int kBlocks = sizeof(T) == 8 ? 2 : 4;

struct Axis {
  int size, out, kernel, padding, dilation;
  Divider stride;

  Axis(const Extent& e)
      : size(e.size), out(e.out), kernel(e.kernel), padding(e.padding), dilation(e.dilation), stride(static_cast<uint32_t>(e.stride)) {}

  // Where the window of an output begins.
  __device__ __forceinline__ int start(int of) const { return of * static_cast<int>(stride.divisor) - padding; }
  // The first offset of a window whose input is there.
  __device__ __forceinline__ int first(int start) const {
    if (start >= 0) return 0;
    return dilation == 1 ? -start : (-start + dilation - 1) / dilation;
  }
  // The output whose window has input i at offset k; a negative number where there is none.
  __device__ __forceinline__ int window(int i, int k) const {
    const int from = i + padding - k * dilation;
    if (from < 0) return -1;
    const int of = static_cast<int>(stride.quotient(static_cast<uint32_t>(from)));
    return of * static_cast<int>(stride.divisor) == from && of < out ? of : -1;
  }
};

// Words of one launch, fewer than 2^31, by [image, row, column, word of the inner elements].
struct Words {
  uint32_t n;
  Divider rows, columns, inner;

  Words(int64_t images, int64_t rows_, int64_t columns_, int64_t inner_)
      : n(static_cast<uint32_t>(images * rows_ * columns_ * inner_)), rows(static_cast<uint32_t>(rows_)),
        columns(static_cast<uint32_t>(columns_)), inner(static_cast<uint32_t>(inner_)) {}
};

struct Place {
  int64_t image;
  int row, column, word;

  __device__ __forceinline__ Place(const Words& words, uint32_t i) {
    const uint32_t pixel = words.inner.quotient(i), line = words.columns.quotient(pixel), image_ = words.rows.quotient(line);
    word = static_cast<int>(i - pixel * words.inner.divisor);
    column = static_cast<int>(pixel - line * words.columns.divisor);
    row = static_cast<int>(line - image_ * words.rows.divisor);
    image = image_;
  }
};

__device__ __forceinline__ bool within(int i, int size) { return static_cast<unsigned>(i) < static_cast<unsigned>(size); }

// The maximum of a window so far. NaN stays, and so does the first of equal elements, as in torch.
template <typename T, int V>
struct Maximum {
  using Word = Vec<T, V>;
  Word value;
  int offset[V];

  __device__ __forceinline__ explicit Maximum(int first) : value(lowest()) {
    unroll<V>([&](int j) { offset[j] = first; });
  }
  static __device__ __forceinline__ Word lowest() { return filled<T, V>(convert<T>(compute_t<T>(-INFINITY))); }
  __device__ __forceinline__ void see(const Word& seen, int at) {
    unroll<V>([&](int j) {
      const auto v = convert<compute_t<T>>(seen.v[j]);
      const bool taken = v > convert<compute_t<T>>(value.v[j]) || v != v;
      value.v[j] = taken ? seen.v[j] : value.v[j];
      offset[j] = taken ? at : offset[j];
    });
  }
  __device__ __forceinline__ Vec<uint8_t, V> offsets() const {
    Vec<uint8_t, V> bytes;
    unroll<V>([&](int j) { bytes.v[j] = static_cast<uint8_t>(offset[j]); });
    return bytes;
  }
};

// Marks with 16 one bits which of the two elements of a word replace those of another word. This is assembly on unsigned words, because
// the compiler takes words of two elements apart, with three times the instructions.
__device__ __forceinline__ unsigned taken_of(unsigned seen, unsigned value, __half) {
  unsigned greater, nan;
  asm("set.gt.u32.f16x2 %0, %1, %2;" : "=r"(greater) : "r"(seen), "r"(value));
  asm("set.neu.u32.f16x2 %0, %1, %1;" : "=r"(nan) : "r"(seen));
  return greater | nan;
}
__device__ __forceinline__ unsigned taken_of(unsigned seen, unsigned value, __nv_bfloat16) {
#if __CUDA_ARCH__ >= 900
  unsigned greater, nan;
  asm("set.gt.u32.bf16x2 %0, %1, %2;" : "=r"(greater) : "r"(seen), "r"(value));
  asm("set.neu.u32.bf16x2 %0, %1, %1;" : "=r"(nan) : "r"(seen));
  return greater | nan;
#else
  const auto taken = [](unsigned v, unsigned w) {  // in the upper half
    return __uint_as_float(v) > __uint_as_float(w) || __uint_as_float(v) != __uint_as_float(v);
  };
  return (taken(seen << 16, value << 16) ? 0xffffu : 0u) | (taken(seen & 0xffff0000u, value & 0xffff0000u) ? 0xffff0000u : 0u);
#endif
}

// The same of words of 16-bit elements, two at a time.
template <typename T>
struct Pairs {
  static constexpr int V = kVector<T>;
  using Word = Vec<unsigned, V / 2>;
  Word value;
  unsigned offset[V / 2];

  __device__ __forceinline__ explicit Pairs(int first) : value(lowest()) {
    unroll<V / 2>([&](int j) { offset[j] = static_cast<unsigned>(first) * 0x10001u; });
  }
  static __device__ __forceinline__ Word lowest() {  // minus infinity
    return filled<unsigned, V / 2>(std::is_same_v<T, __half> ? 0xfc00fc00u : 0xff80ff80u);
  }
  __device__ __forceinline__ void see(const Word& seen, int at) {
    unroll<V / 2>([&](int j) {
      const unsigned taken = taken_of(seen.v[j], value.v[j], T{});
      value.v[j] = (seen.v[j] & taken) | (value.v[j] & ~taken);
      offset[j] = (static_cast<unsigned>(at) * 0x10001u & taken) | (offset[j] & ~taken);
    });
  }
  __device__ __forceinline__ Vec<uint8_t, V> offsets() const {
    Vec<uint8_t, V> bytes;
    auto* words = reinterpret_cast<unsigned*>(bytes.v);
    unroll<V / 4>([&](int j) { words[j] = __byte_perm(offset[2 * j], offset[2 * j + 1], 0x6420); });
    return bytes;
  }
};
template <>
struct Maximum<__nv_bfloat16, kVector<__nv_bfloat16>> : Pairs<__nv_bfloat16> { using Pairs::Pairs; };
template <>
struct Maximum<__half, kVector<__half>> : Pairs<__half> { using Pairs::Pairs; };

// A thread has a word of the output. K is the size of a square window without dilation, whose words are all in flight at once; 0 stands
// for any window.
template <typename T, int V, int K, bool KEEP>
__global__ void __launch_bounds__(kThreads, kBlocks<T>)
    pool_forward(const T* __restrict__ x, T* __restrict__ y, uint8_t* __restrict__ offsets, const Words words, const Images<Axis> images) {
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= words.n) return;
  const Place at(words, i);
  const Axis &height = images.height, &width = images.width;
  const int top = height.start(at.row), left = width.start(at.column);
  x += at.image * height.size * width.size * images.inner + at.word * V;
  using Word = typename Maximum<T, V>::Word;
  const auto load = [&](int row, int column) {
    return *reinterpret_cast<const Word*>(x + (static_cast<int64_t>(row) * width.size + column) * images.inner);
  };
  Maximum<T, V> maximum(height.first(top) * width.kernel + width.first(left));
  if constexpr (K > 0) {
    Word seen[K * K];
    unroll<K * K>([&](int k) {
      const int row = top + k / K, column = left + k % K;
      const bool inside = within(row, height.size) && within(column, width.size);
      seen[k] = inside ? load(row, column) : Maximum<T, V>::lowest();
    });
    unroll<K * K>([&](int k) { maximum.see(seen[k], k); });
  } else {
    for (int kh = 0; kh < height.kernel; ++kh) {
      const int row = top + kh * height.dilation;
      if (!within(row, height.size)) continue;
      for (int kw = 0; kw < width.kernel; ++kw) {
        const int column = left + kw * width.dilation;
        if (!within(column, width.size)) continue;
        maximum.see(load(row, column), kh * width.kernel + kw);
      }
    }
  }
  *reinterpret_cast<Word*>(y + static_cast<int64_t>(i) * V) = maximum.value;
  if constexpr (KEEP) store_vec<uint8_t, V>(offsets + static_cast<int64_t>(i) * V, maximum.offsets());
}

template <typename A, typename T, int V>
__device__ __forceinline__ void gather(Vec<A, V>& sum, const Vec<T, V>& dy, const Vec<uint8_t, V>& offsets, int at) {
  const Vec<A, V> g = unpack<A>(dy);
  unroll<V>([&](int j) {
    if (offsets.v[j] == at) sum.v[j] += g.v[j];
  });
}

// A thread has a word of S x S neighbouring inputs, which lie in the same windows: those that end within S of each other.
template <typename T, int V, int K, int S>
__global__ void __launch_bounds__(kThreads, S == 1 ? 2 : kBlocks<T>)
    pool_backward(const T* __restrict__ dy, const uint8_t* __restrict__ offsets, T* __restrict__ dx, const Words words, const Images<Axis> images) {
  using A = compute_t<T>;
  constexpr int kWindows = (K - 1) / S + 1;  // along an axis
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= words.n) return;
  const Place at(words, i);
  const Axis &height = images.height, &width = images.width;
  // The last windows that begin at or before these inputs.
  const int last_row = at.row + height.padding / S, last_column = at.column + width.padding / S;
  const int64_t shift = at.image * height.out * width.out * images.inner + at.word * V;
  Vec<T, V> g[kWindows][kWindows];
  Vec<uint8_t, V> kept[kWindows][kWindows];
  unroll<kWindows>([&](int h) {
    unroll<kWindows>([&](int w) {
      const int row = last_row - h, column = last_column - w;
      memset(&g[h][w], 0, sizeof(g[h][w]));
      memset(&kept[h][w], UINT8_MAX, sizeof(kept[h][w]));  // no offset
      if (within(row, height.out) && within(column, width.out)) {
        const int64_t from = shift + (static_cast<int64_t>(row) * width.out + column) * images.inner;
        g[h][w] = load_vec<T, V>(dy + from);
        kept[h][w] = load_vec<uint8_t, V>(offsets + from);
      }
    });
  });
  dx += at.image * height.size * width.size * images.inner + at.word * V;
  unroll<S>([&](int r) {
    unroll<S>([&](int c) {
      Vec<A, V> sum = filled<A, V>(A(0));
#pragma unroll
      for (int h = kWindows - 1; h >= 0; --h) {
#pragma unroll
        for (int w = kWindows - 1; w >= 0; --w) {
          const int kh = r + S * h, kw = c + S * w;
          if (kh < K && kw < K) gather(sum, g[h][w], kept[h][w], kh * K + kw);
        }
      }
      const int row = last_row * S + r - height.padding, column = last_column * S + c - width.padding;
      if (within(row, height.size) && within(column, width.size))
        store_vec<T, V>(dx + (static_cast<int64_t>(row) * width.size + column) * images.inner, pack<T>(sum));
    });
  });
}

// Any window: a thread has a word of one input.
template <typename T, int V>
__global__ void __launch_bounds__(kThreads) pool_backward_any(const T* __restrict__ dy, const uint8_t* __restrict__ offsets,
                                                            T* __restrict__ dx, const Words words, const Images<Axis> images) {
  using A = compute_t<T>;
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= words.n) return;
  const Place at(words, i);
  const Axis &height = images.height, &width = images.width;
  const int64_t shift = at.image * height.out * width.out * images.inner + at.word * V;
  Vec<A, V> sum = filled<A, V>(A(0));
  for (int kh = height.kernel - 1; kh >= 0; --kh) {
    const int row = height.window(at.row, kh);
    if (row < 0) continue;
    for (int kw = width.kernel - 1; kw >= 0; --kw) {
      const int column = width.window(at.column, kw);
      if (column < 0) continue;
      const int64_t from = shift + (static_cast<int64_t>(row) * width.out + column) * images.inner;
      gather(sum, load_vec<T, V>(dy + from), load_vec<uint8_t, V>(offsets + from), kh * width.kernel + kw);
    }
  }
  store_vec<T, V>(dx + static_cast<int64_t>(i) * V, pack<T>(sum));
}

// ---- host ---------------------------------------------------------------------------------------------------------------

// Calls f(first image, Words) for all images of [rows, columns, words], in shares of fewer than 2^31 words.
template <typename F>
void for_images(int64_t outer, int64_t rows, int64_t columns, int64_t words, F&& f) {
  const int64_t each = rows * columns * words, most = INT32_MAX / each;
  STD_TORCH_CHECK(most > 0, "fastlayers: an image of ", each, " words is more than one launch takes");
  for (int64_t first = 0; first < outer; first += most) f(first, Words(std::min(most, outer - first), rows, columns, words));
}

bool is_square(const Images<Axis>& images, int kernel, int stride) {
  const auto fits = [&](const Axis& a) {
    return a.kernel == kernel && a.dilation == 1 && (stride == 0 || static_cast<int>(a.stride.divisor) == stride);
  };
  return fits(images.height) && fits(images.width);
}

std::tuple<Tensor, Tensor> max_pool2d_forward(const Tensor& x, Numbers kernel, Numbers stride, Numbers padding, Numbers dilation, Numbers out,
                                              bool channels_last, bool keep) {
  const char* op = "max_pool2d_forward";
  const Numbers size = image_size(x, op);
  const Images<Axis> images = images_of<Axis>(x, channels_last, size, out, {kernel, stride, padding, dilation}, op);
  const Launch launch(x);
  Tensor y = empty_images(x, channels_last, images.height.out, images.width.out, x.scalar_type());
  Tensor offsets = keep ? empty_images(x, channels_last, images.height.out, images.width.out, ScalarType::Byte)
                        : empty_contiguous({0}, ScalarType::Byte, x);
  if (y.numel() == 0) return {y, offsets};
  dispatch_floating(x.scalar_type(), op, [&]<typename T>(T) {
    const T* px = pointer<const T>(x);
    T* py = pointer<T>(y);
    uint8_t* po = pointer<uint8_t>(offsets);
    const auto run = [&]<int V, int K>(Number<V>, Number<K>) {
      const auto kernel = keep ? &pool_forward<T, V, K, true> : &pool_forward<T, V, K, false>;
      for_images(images.outer, images.height.out, images.width.out, images.inner / V, [&](int64_t first, const Words& words) {
        const int64_t to = first * images.out();
        kernel<<<blocks_for(words.n, kThreads), kThreads, 0, launch.stream()>>>(px + first * images.in(), py + to, po + (keep ? to : 0),
                                                                                words, images);
        STD_CUDA_KERNEL_LAUNCH_CHECK();
      });
    };
    const auto pick = [&](auto vector) {
      if (is_square(images, 3, 0)) run(vector, Number<3>{});
      else if (is_square(images, 2, 0)) run(vector, Number<2>{});
      else run(vector, Number<0>{});
    };
    if (images.inner % kVector<T> == 0 && aligned(px)) pick(Number<kVector<T>>{});
    else pick(Number<1>{});
  });
  return {y, offsets};
}

// The caller passes dy and offsets with the strides of the forward's result. dx gets those of its x.
Tensor max_pool2d_backward(const Tensor& dy, const Tensor& offsets, Numbers kernel, Numbers stride, Numbers padding, Numbers dilation, Numbers size,
                           bool channels_last) {
  const char* op = "max_pool2d_backward";
  const Numbers out = image_size(dy, op);
  const Images<Axis> images = images_of<Axis>(dy, channels_last, size, out, {kernel, stride, padding, dilation}, op);
  check_offsets(dy, offsets, op);
  const Launch launch(dy);
  Tensor dx = empty_images(dy, channels_last, images.height.size, images.width.size, dy.scalar_type());
  if (dx.numel() == 0) return dx;
  dispatch_floating(dy.scalar_type(), op, [&]<typename T>(T) {
    const T* g = pointer<const T>(dy);
    const uint8_t* po = pointer<const uint8_t>(offsets);
    T* d = pointer<T>(dx);
    const auto run = [&]<int V>(Number<V>) {
      const auto blocked = [&]<int K, int S>(Number<K>, Number<S>) {
        const auto blocks = [](const Axis& a) { return (a.padding + a.size - 1) / S - a.padding / S + 1; };
        for_images(images.outer, blocks(images.height), blocks(images.width), images.inner / V, [&](int64_t first, const Words& words) {
          pool_backward<T, V, K, S><<<blocks_for(words.n, kThreads), kThreads, 0, launch.stream()>>>(
              g + first * images.out(), po + first * images.out(), d + first * images.in(), words, images);
          STD_CUDA_KERNEL_LAUNCH_CHECK();
        });
      };
      if (is_square(images, 3, 2)) return blocked(Number<3>{}, Number<2>{});
      if (is_square(images, 3, 1)) return blocked(Number<3>{}, Number<1>{});
      if (is_square(images, 2, 2)) return blocked(Number<2>{}, Number<2>{});
      for_images(images.outer, images.height.size, images.width.size, images.inner / V, [&](int64_t first, const Words& words) {
        pool_backward_any<T, V><<<blocks_for(words.n, kThreads), kThreads, 0, launch.stream()>>>(
            g + first * images.out(), po + first * images.out(), d + first * images.in(), words, images);
        STD_CUDA_KERNEL_LAUNCH_CHECK();
      });
    };
    if (images.inner % kVector<T> == 0 && aligned(g)) run(Number<kVector<T>>{});
    else run(Number<1>{});
  });
  return dx;
}

}  // namespace
}  // namespace fastlayers

STABLE_TORCH_LIBRARY_IMPL(fastlayers, CUDA, m) {
  m.impl("max_pool2d_forward", TORCH_BOX(&fastlayers::max_pool2d_forward));
  m.impl("max_pool2d_backward", TORCH_BOX(&fastlayers::max_pool2d_backward));
}

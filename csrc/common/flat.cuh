// What the elementwise kernels share: walks over a flat tensor in words of 16 bytes, and over the rows within it.
//
// The namespace has no name: each file that includes this has kernels of its own.
#pragma once

#include "device.cuh"

namespace fastlayers {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;  // words of each operand in flight a thread, unless a kernel says otherwise

// The V elements at element i of n: WHOLE, or one element at a time where the tensor does not start on a 16-byte boundary, and
// at its end.
template <typename T, bool WHOLE, int V = kVector<T>>
__device__ __forceinline__ Vec<T, V> load_flat(const T* p, int64_t i, int64_t n) {
  Vec<T, V> w;
  if constexpr (WHOLE) {
    w = load_vec<T, V>(p + i);
  } else {
    unroll<V>([&](int j) { w.v[j] = i + j < n ? p[i + j] : convert<T>(0.f); });
  }
  return w;
}

template <typename T, bool WHOLE, int V = kVector<T>>
__device__ __forceinline__ void store_flat(T* p, int64_t i, int64_t n, const Vec<T, V>& w) {
  if constexpr (WHOLE) {
    store_vec<T, V>(p + i, w);
  } else {
    unroll<V>([&](int j) { if (i + j < n) p[i + j] = w.v[j]; });
  }
}

// Where element i of those that a walk counts is in each operand.
template <int OPERANDS>
__device__ __forceinline__ void locate(const Walk<OPERANDS>& walk, int64_t i, int64_t (&at)[OPERANDS]) {
  unroll<OPERANDS>([&](int k) { at[k] = 0; });
#pragma unroll
  for (int d = kMaxDims - 1; d >= 0; --d) {
    if (d >= walk.dims) continue;
    const int64_t size = walk.size[d];
    int64_t rest;
    if ((i | size) >> 32 == 0) rest = static_cast<uint32_t>(i) / static_cast<uint32_t>(size);  // several times cheaper
    else rest = i / size;
    unroll<OPERANDS>([&](int k) { at[k] += (i - rest * size) * walk.stride[k][d]; });
    i = rest;
  }
}

// First element of word u of this thread. A warp's words are neighbours, a block's unrolled words are kThreads apart.
template <typename T, int UNROLL = kUnroll>
__device__ __forceinline__ int64_t flat_index(int u) {
  return ((static_cast<int64_t>(blockIdx.x) * UNROLL + u) * kThreads + threadIdx.x) * kVector<T>;
}

// Calls f for the words of this thread: once for all of them where every word of the block is whole, so that their loads
// are in flight together; else (a tail, a misaligned tensor) one by one.
template <typename T, int UNROLL = kUnroll, typename F>
__device__ __forceinline__ void for_block(bool is_aligned, int64_t n, F&& f) {
  constexpr int64_t kBlock = static_cast<int64_t>(UNROLL) * kThreads * kVector<T>;
  if (is_aligned && (blockIdx.x + 1) * kBlock <= n) {
    f(Number<UNROLL>{}, 0);
  } else {
#pragma unroll 1
    for (int first = 0; first < UNROLL; ++first) f(Number<1>{}, first);
  }
}

// Calls f(whole, i, w) with the words of these tensors at element i, for each word of this thread. All of them are loaded before the
// first call, as for_block says.
template <typename T, int UNROLL = kUnroll, int N, typename F>
__device__ __forceinline__ void for_words(bool is_aligned, int64_t n, const T* const (&tensors)[N], F&& f) {
  for_block<T, UNROLL>(is_aligned, n, [&]<int U>(Number<U>, int first) {
    constexpr bool WHOLE = U > 1;
    Vec<T, kVector<T>> w[U][N];
    unroll<U>([&](int u) {
      unroll<N>([&](int k) { w[u][k] = load_flat<T, WHOLE>(tensors[k], flat_index<T, UNROLL>(first + u), n); });
    });
    unroll<U>([&](int u) { f(std::bool_constant<WHOLE>{}, flat_index<T, UNROLL>(first + u), w[u]); });
  });
}

// Keeps all words of a and b in flight before one of a is used. To save registers, ptxas would move a load down to its first use.
// `nothing` is 0, which the compiler does not know.
template <typename T, int V, int U>
__device__ __forceinline__ void wait_for_all(Vec<T, V> (&a)[U], const Vec<T, V> (&b)[U], unsigned nothing) {
  if constexpr (sizeof(T) == 2 && V % 2 == 0) {
    unroll<V / 2>([&](int i) {
      unsigned all = 0;
      unroll<U>([&](int u) { all |= words_of(b[u])[i] | (u > 0 ? words_of(a[u])[i] : 0); });
      unroll<U>([&](int u) { words_of(a[u])[i] |= all & nothing; });
    });
  }
}

// A dense tensor of n elements seen as rows of `columns`. Operands that are not dense, but have such rows, are found in it: element i
// at i + row(i)·skip, where skip is their distance between rows less `columns`. Several rows have fewer than 2^31 elements: see
// for_rows.
struct Rows {
  int64_t columns = 1;
  bool single = true;  // one row
  Divider divider;

  Rows() = default;
  Rows(int64_t n, int64_t columns_) : columns(columns_), single(n == columns_) {
    if (!single) divider = Divider(static_cast<uint32_t>(columns));
  }
  __device__ __forceinline__ int64_t row(int64_t i) const { return single ? 0 : divider.quotient(static_cast<uint32_t>(i)); }
};

// The words of such an operand. WHOLE words lie within a row, which `row` is. Of others a thread has elements that lie kThreads
// apart, so that its neighbours' loads and stores are neighbours too: row_index says where its first is.
template <typename T, bool WHOLE, int UNROLL>
__device__ __forceinline__ int64_t row_index(int u) {
  if constexpr (WHOLE) return flat_index<T, UNROLL>(u);
  else return (static_cast<int64_t>(blockIdx.x) * UNROLL + u) * kThreads * kVector<T> + threadIdx.x;
}

template <typename T, bool WHOLE>
__device__ __forceinline__ Vec<T, kVector<T>> load_rows(const T* p, int64_t i, int64_t n, const Rows& rows, int64_t row, int64_t skip) {
  constexpr int V = kVector<T>;
  if constexpr (WHOLE) {
    return load_vec<T, V>(p + i + row * skip);
  } else {
    Vec<T, V> w;
    unroll<V>([&](int j) {
      const int64_t at = i + j * kThreads;
      w.v[j] = at < n ? p[at + rows.row(at) * skip] : convert<T>(0.f);
    });
    return w;
  }
}

template <typename T, bool WHOLE>
__device__ __forceinline__ void store_rows(T* p, int64_t i, int64_t n, const Rows& rows, int64_t row, int64_t skip,
                                           const Vec<T, kVector<T>>& w) {
  constexpr int V = kVector<T>;
  if constexpr (WHOLE) {
    store_vec<T, V>(p + i + row * skip, w);
  } else {
    unroll<V>([&](int j) {
      const int64_t at = i + j * kThreads;
      if (at < n) p[at + rows.row(at) * skip] = w.v[j];
    });
  }
}

// Where words of a flat tensor find a small dense operand that is repeated along one run of its memory, [outer, repeat,
// columns]: two divisions a word, each a multiplication. A word lies within one row of columns, or within one repeat where columns is 1.
struct Repeats {
  bool served = false;
  Divider columns, block;  // block: repeat·columns

  template <typename T>
  __device__ __forceinline__ Vec<T, kVector<T>> load(const T* p, int64_t i) const {
    const uint32_t at = static_cast<uint32_t>(i), outer = block.quotient(at);
    if (columns.divisor == 1) return filled<T, kVector<T>>(p[outer]);
    return load_vec<T, kVector<T>>(p + outer * columns.divisor + at - columns.quotient(at) * columns.divisor);
  }
};

// ---- host ---------------------------------------------------------------------------------------------------------------

inline unsigned blocks_for(int64_t n, int64_t each) { return grid_of(ceil_div(n, each)); }

template <typename T, int UNROLL = kUnroll>
unsigned flat_blocks(int64_t n) { return blocks_for(n, static_cast<int64_t>(kThreads) * UNROLL * kVector<T>); }

// Launches a kernel that walks n elements flat.
template <typename T, int UNROLL = kUnroll, typename... Parameters, typename... Args>
void launch_flat(void (*kernel)(Parameters...), int64_t n, const Launch& launch, const Args&... args) {
  kernel<<<flat_blocks<T, UNROLL>(n), kThreads, 0, launch.stream()>>>(args...);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// Calls f(first row, elements, Rows) for the whole of [rows, columns], or for shares of so many rows as Rows takes.
template <typename F>
void for_rows(int64_t rows, int64_t columns, F&& f) {
  const int64_t most = rows == 1 ? 1 : std::max<int64_t>(1, INT32_MAX / columns);
  for (int64_t first = 0; first < rows; first += most) {
    const int64_t n = std::min(most, rows - first) * columns;
    f(first, n, Rows(n, columns));
  }
}

}  // namespace
}  // namespace fastlayers

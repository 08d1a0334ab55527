// relu(x) + y + bias, relu(x + y) and x·y, forward and backward.
//
// These are pure memory traffic: a thread moves several 16-byte words at once and touches each element once. For backward, the relu ops
// keep one bit for each element instead of a tensor: bit j of byte i belongs to element 8i + j in memory order.
#include "common/columns.cuh"
#include "elementwise.h"

namespace fastlayers {
namespace {

// Packs the V bits of each thread's word into bytes. If a word has fewer than 8 elements, lanes share a byte.
template <int V>
__device__ __forceinline__ void store_bits(uint8_t* bits, int64_t i, int64_t n, unsigned mine) {
  constexpr int kSharing = kMaskBits / V;
  const int lane = threadIdx.x & 31, part = lane % kSharing;
  mine <<= part * V;
#pragma unroll
  for (int o = 1; o < kSharing; o <<= 1) mine |= __shfl_xor_sync(0xffffffffu, mine, o);
  if (part == 0 && i < n) bits[i / kMaskBits] = static_cast<uint8_t>(mine);
}

template <int V>
__device__ __forceinline__ unsigned load_bits(const uint8_t* bits, int64_t i, int64_t n) {
  return i < n ? bits[i / kMaskBits] >> (i % kMaskBits) : 0;
}

// The same for a word that begins anywhere in a byte.
template <bool WHOLE, int V>
__device__ __forceinline__ unsigned gather_bits(const uint8_t* bits, int64_t i, int64_t n) {
  if constexpr (WHOLE) return load_bits<V>(bits, i, n);
  unsigned kept = 0;
  unroll<V>([&](int j) {
    if (i + j < n) kept |= (bits[(i + j) / kMaskBits] >> ((i + j) % kMaskBits) & 1u) << j;
  });
  return kept;
}

template <typename T, int V>
__device__ __forceinline__ Vec<T, V> gated(Vec<T, V> w, unsigned kept) {
  unroll<V>([&](int j) {
    if (!(kept >> j & 1)) w.v[j] = convert<T>(0.f);
  });
  return w;
}

// A tensor that broadcasts to the flat operands.
struct Bias {
  const void* data = nullptr;
  Repeats repeats;
  Walk<2> walk;  // where repeats do not apply: operand 0 is the result, operand 1 the bias
  bool vector = false;  // the fastest dimension consists of whole words, so a word takes one look-up

  __device__ int64_t offset(int64_t i) const {
    int64_t at[2];
    locate(walk, i, at);
    return at[1];
  }
  // The word at element i of n. It is called, because an offset takes six divisions of 64 bits.
  template <typename T>
  __device__ __noinline__ Vec<T, kVector<T>> gather(int64_t i, int64_t n) const {
    Vec<T, kVector<T>> w = filled<T, kVector<T>>(convert<T>(0.f));
    const T* p = static_cast<const T*>(data);
    if (vector) {
      const int64_t start = i < n ? offset(i) : 0, step = walk.stride[1][walk.dims - 1];
      unroll<kVector<T>>([&](int j) { if (i + j < n) w.v[j] = p[start + j * step]; });
    } else {
#pragma unroll 1
      for (int j = 0; j < kVector<T>; ++j)
        if (i + j < n) w.v[j] = p[offset(i + j)];
    }
    return w;
  }
};

template <typename T, bool SUM_FIRST, bool TRAIN, bool BIAS>
__global__ void __launch_bounds__(kThreads) relu_forward(const T* x, const T* y, T* out, uint8_t* bits, int64_t n, bool is_aligned,
                                                        compute_t<T> alpha, const __grid_constant__ Bias bias) {
  using A = compute_t<T>;
  constexpr int V = kVector<T>;
  for_block<T>(is_aligned, n, [&]<int U>(Number<U>, int first) {
    constexpr bool WHOLE = U > 1;
    Vec<T, V> wx[U], wy[U];
    [[maybe_unused]] Vec<T, V> wb[U];
    if constexpr (BIAS) {  // first: a call would have to save the words of x and y
      if (WHOLE && bias.repeats.served) {
        unroll<U>([&](int u) { wb[u] = bias.repeats.load(static_cast<const T*>(bias.data), flat_index<T>(first + u)); });
      } else {
        unroll<U>([&](int u) { wb[u] = bias.gather<T>(flat_index<T>(first + u), n); });
      }
    }
    unroll<U>([&](int u) {
      const int64_t i = flat_index<T>(first + u);
      wx[u] = load_flat<T, WHOLE>(x, i, n);
      wy[u] = load_flat<T, WHOLE>(y, i, n);
    });
    unroll<U>([&](int u) {
      const int64_t i = flat_index<T>(first + u);
      [[maybe_unused]] unsigned kept = 0;
      unroll<V>([&](int j) {
        const A vx = convert<A>(wx[u].v[j]), vy = convert<A>(wy[u].v[j]);
        const A v = SUM_FIRST ? vx + vy : vx;
        const bool keep = !(v <= A(0));  // keeps NaN, as torch does
        A r = keep ? v : A(0);
        if constexpr (!SUM_FIRST) r += vy + alpha;
        if constexpr (BIAS) r += convert<A>(wb[u].v[j]);
        wx[u].v[j] = convert<T>(r);
        if constexpr (TRAIN) kept |= static_cast<unsigned>(keep && (WHOLE || i + j < n)) << j;
      });
      if constexpr (TRAIN) store_bits<V>(bits, i, n, kept);
      store_flat<T, WHOLE>(out, i, n, wx[u]);
    });
  });
}

template <typename T>
__global__ void __launch_bounds__(kThreads) relu_backward_flat(const T* dy, const uint8_t* bits, T* dx, int64_t n, bool is_aligned) {
  constexpr int V = kVector<T>;
  for_block<T>(is_aligned, n, [&]<int U>(Number<U>, int first) {
    constexpr bool WHOLE = U > 1;
    Vec<T, V> w[U];
    unsigned kept[U];
    unroll<U>([&](int u) {
      const int64_t i = flat_index<T>(first + u);
      w[u] = load_flat<T, WHOLE>(dy, i, n);
      kept[u] = load_bits<V>(bits, i, n);
    });
    unroll<U>([&](int u) { store_flat<T, WHOLE>(dx, flat_index<T>(first + u), n, gated(w[u], kept[u])); });
  });
}

template <typename T>
__global__ void __launch_bounds__(kThreads) mul_flat(const T* x, const T* y, T* out, int64_t n, bool is_aligned) {
  using A = compute_t<T>;
  for_words<T>(is_aligned, n, {x, y}, [&](auto whole, int64_t i, auto& w) {
    unroll<kVector<T>>([&](int j) { w[0].v[j] = convert<T>(convert<A>(w[0].v[j]) * convert<A>(w[1].v[j])); });
    store_flat<T, whole.value>(out, i, n, w[0]);
  });
}

template <typename T>
__global__ void __launch_bounds__(kThreads) mul_backward_flat(const T* dy, const T* x, const T* y, T* dx, T* dy_, int64_t n,
                                                             bool is_aligned) {
  using A = compute_t<T>;
  for_words<T>(is_aligned, n, {dy, x, y}, [&](auto whole, int64_t i, auto& w) {
    unroll<kVector<T>>([&](int j) {
      const A g = convert<A>(w[0].v[j]);
      const A to_x = g * convert<A>(w[2].v[j]);
      w[2].v[j] = convert<T>(g * convert<A>(w[1].v[j]));
      w[1].v[j] = convert<T>(to_x);
    });
    store_flat<T, whole.value>(dx, i, n, w[1]);
    store_flat<T, whole.value>(dy_, i, n, w[2]);
  });
}

// x *= factor, a number on the device. Where it is 1, as in most backward passes, the kernel touches nothing.
template <typename T>
__global__ void __launch_bounds__(kThreads) scale_in_place(T* x, const compute_t<T>* factor, int64_t n, bool is_aligned) {
  using A = compute_t<T>;
  const A by = *factor;
  if (by == A(1)) return;
  for_words<T>(is_aligned, n, {x}, [&](auto whole, int64_t i, auto& w) {
    Vec<A, kVector<T>> r = unpack<A>(w[0]);
    unroll<kVector<T>>([&](int j) { r.v[j] *= by; });
    store_flat<T, whole.value>(x, i, n, pack<T>(r));
  });
}

// ---- broadcasting -------------------------------------------------------------------------------------------------------

// V neighbours of an operand that broadcasts to the flat result, from element i of it.
template <typename T, int V, int OPERANDS>
__device__ __forceinline__ Vec<T, V> gather(const T* p, const Walk<OPERANDS>& walk, int operand, int64_t i, int64_t n) {
  const int64_t size = walk.size[walk.dims - 1], step = walk.stride[operand][walk.dims - 1];
  Vec<T, V> w;
  int64_t at[OPERANDS];
  if (size < V) {  // may wrap more than once
#pragma unroll 1
    for (int j = 0; j < V; ++j) {
      locate(walk, i + j < n ? i + j : i, at);
      w.v[j] = p[at[operand]];
    }
    return w;
  }
  locate(walk, i, at);
  const T* here = p + at[operand];
  const uint32_t within = (i | size) >> 32 == 0 ? static_cast<uint32_t>(i) % static_cast<uint32_t>(size) : static_cast<uint32_t>(i % size);
  const int64_t left = size - within;  // neighbours before the fastest dimension wraps
  const T* there = here;
  if (left < V) {
    locate(walk, i + left < n ? i + left : i, at);
    there = p + at[operand] - left * step;
  } else if (step == 1 && reinterpret_cast<uintptr_t>(here) % sizeof(w) == 0) {
    return load_vec<T, V>(here);
  }
  unroll<V>([&](int j) { w.v[j] = i + j < n ? (j < left ? here : there)[j * step] : convert<T>(0.f); });
  return w;
}

// x·s for an s that Repeats serves.
template <typename T>
__global__ void __launch_bounds__(kThreads) mul_repeated(const T* x, const T* s, T* out, int64_t n, const Repeats repeats) {
  using A = compute_t<T>;
  constexpr int V = kVector<T>;
  Vec<T, V> wx[kUnroll], ws[kUnroll];
  unroll<kUnroll>([&](int u) {
    const int64_t i = flat_index<T>(u);
    if (i < n) wx[u] = load_vec<T, V>(x + i), ws[u] = repeats.load(s, i);
  });
  unroll<kUnroll>([&](int u) {
    Vec<A, V> r = unpack<A>(wx[u]);
    const Vec<A, V> by = unpack<A>(ws[u]);
    unroll<V>([&](int j) { r.v[j] *= by.v[j]; });
    if (flat_index<T>(u) < n) store_vec<T, V>(out + flat_index<T>(u), pack<T>(r));
  });
}

// Any broadcast of x and y.
template <typename T>
__global__ void __launch_bounds__(kThreads) mul_broadcast(const T* __restrict__ x, const T* __restrict__ y, T* __restrict__ out,
                                                         int64_t n, const Walk<3> walk) {
  using A = compute_t<T>;
  constexpr int V = kVector<T>;
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * V;
  if (i >= n) return;
  Vec<A, V> r = unpack<A>(gather<T, V>(x, walk, 1, i, n));
  const Vec<A, V> by = unpack<A>(gather<T, V>(y, walk, 2, i, n));
  unroll<V>([&](int j) { r.v[j] *= by.v[j]; });
  if (i + V <= n) store_flat<T, true>(out, i, n, pack<T>(r));
  else store_flat<T, false>(out, i, n, pack<T>(r));
}

// The gradients of x and of an s that repeats along the middle of [outer, repeat, columns], in one pass. For x·s, dx is dy·s and ds is the
// sum of dy·x over the repeats. For relu(x) + s, dx is dy where the bit of x is set, and ds is the sum of dy.
template <typename T, bool RELU>
using Factor = std::conditional_t<RELU, uint8_t, T>;  // x, or bits

// columns > 1. s has a row of columns for each outer index.
template <typename T, int V, bool RELU>
__global__ void __launch_bounds__(kThreads, kColumnBlocks<T>)
    repeated_backward_columns(const T* __restrict__ dy, const Factor<T, RELU>* __restrict__ x, const T* __restrict__ s,
                              T* __restrict__ dx, compute_t<T>* partial, T* ds, const Columns c) {
  using A = compute_t<T>;
  const int64_t blocks = c.tiles * c.pieces, outer = blockIdx.x / blocks;
  ColumnThread<V> me(c, blockIdx.x - outer * blocks);
  Vec<A, V> sum = filled<A, V>(A(0)), scale = sum;
  if constexpr (!RELU) {
    if (me.active) {
      unroll<V>([&](int j) { scale.v[j] = convert<A>(s[outer * c.columns + me.column + j]); });
    }
  }
  const int64_t base = outer * c.repeat * c.columns + me.column;
  const auto nothing = static_cast<unsigned>(c.repeat >> 62);
  me.for_rows(c, [&]<int U>(Number<U>, int64_t row) {
    Vec<T, V> wg[U];
    [[maybe_unused]] Vec<T, V> wx[U];
    [[maybe_unused]] unsigned kept[U];
    unroll<U>([&](int u) {
      const int64_t i = base + (row + u * me.step) * c.columns;
      wg[u] = load_vec<T, V>(dy + i);
      if constexpr (RELU) kept[u] = load_bits<V>(x, i, i + 1);
      else wx[u] = load_vec<T, V>(x + i);
    });
    if constexpr (!RELU) wait_for_all(wx, wg, nothing);
    unroll<U>([&](int u) {
      T* to = dx + base + (row + u * me.step) * c.columns;
      Vec<A, V> g = unpack<A>(wg[u]);
      if constexpr (RELU) {
        unroll<V>([&](int j) { sum.v[j] += g.v[j]; });
        store_vec<T, V>(to, gated(wg[u], kept[u]));
      } else {
        const Vec<A, V> w = unpack<A>(wx[u]);
        unroll<V>([&](int j) {
          sum.v[j] += g.v[j] * w.v[j];
          g.v[j] *= scale.v[j];
        });
        store_vec<T, V>(to, pack<T>(g));
      }
    });
  });
  me.store(c, sum, partial + outer * c.pieces * c.columns, ds == nullptr ? ds : ds + outer * c.columns);
}

// The other kernel's, of [outer, repeat].
struct RowArgs {
  int64_t outer, repeat;
  int64_t pieces;    // of a row, a block each
  int across, down;  // threads of a block over a row, and over the rows
};

// columns == 1, s constant along the fastest dimension: a row of `repeat`, or a piece of it, to `across` threads.
template <typename T, bool WHOLE, bool RELU>
__global__ void __launch_bounds__(kThreads) repeated_backward_rows(const T* __restrict__ dy, const Factor<T, RELU>* __restrict__ x,
                                                           const T* __restrict__ s, T* __restrict__ dx, compute_t<T>* partial,
                                                           T* ds, const RowArgs a) {
  using A = compute_t<T>;
  constexpr int V = kVector<T>;
  __shared__ A shared[kThreads / 32];
  const int lane = threadIdx.x % a.across;
  const int64_t row = blockIdx.x / a.pieces * a.down + threadIdx.x / a.across, piece = blockIdx.x % a.pieces;
  const int64_t words = (a.repeat + V - 1) / V, each = (words + a.pieces - 1) / a.pieces;
  const int64_t last = (piece + 1) * each < words ? (piece + 1) * each : words;
  const bool active = row < a.outer;
  A sum = 0;
  if (active) {
    const A scale = RELU ? A(1) : convert<A>(s[row]);
    const int64_t base = row * a.repeat;
#pragma unroll 4
    for (int64_t word = piece * each + lane; word < last; word += a.across) {
      const Vec<T, V> packed = load_flat<T, WHOLE>(dy + base, word * V, a.repeat);
      Vec<A, V> g = unpack<A>(packed);
      A part = 0;
      if constexpr (RELU) {
        unroll<V>([&](int j) { part += g.v[j]; });
        store_flat<T, WHOLE>(dx + base, word * V, a.repeat, gated(packed, gather_bits<WHOLE, V>(x, base + word * V, base + a.repeat)));
      } else {
        const Vec<A, V> w = unpack<A>(load_flat<T, WHOLE>(x + base, word * V, a.repeat));
        unroll<V>([&](int j) { part += g.v[j] * w.v[j]; });
        unroll<V>([&](int j) { g.v[j] *= scale; });
        store_flat<T, WHOLE>(dx + base, word * V, a.repeat, pack<T>(g));
      }
      sum += part;
    }
  }
  sum = across_sum(sum, shared, a.across);
  if (lane != 0 || !active) return;
  if (ds != nullptr) ds[row] = convert<T>(sum);
  else partial[row * a.pieces + piece] = sum;
}

// ---- host ---------------------------------------------------------------------------------------------------------------

// How a small tensor s repeats along the memory of a dense tensor that it scales.
struct Scale {
  int64_t outer = 1, repeat = 1, columns = 1;
  Dims sizes, strides;  // its own, dense in that order, so that its index is one product

  // Returns nothing if the repeats are not one dimension of the memory.
  static std::optional<Scale> along(const Tensor& s, const Dims& sizes, const Dims& order) {
    Scale view;
    const int64_t shift = static_cast<int64_t>(sizes.size()) - s.dim();
    Dims outer_dims, column_dims;
    for (const int64_t d : order) {
      if (sizes[d] == 1) continue;
      if (d < shift || s.size(d - shift) == 1) {  // by its shape: a stride of 0 may also be that of an expanded s
        if (!column_dims.empty()) return std::nullopt;
        view.repeat *= sizes[d];
      } else if (view.repeat == 1) {
        view.outer *= sizes[d];
        outer_dims.push_back(d);
      } else {
        view.columns *= sizes[d];
        column_dims.push_back(d);
      }
    }
    view.sizes = dims_of(s.sizes());
    view.strides = Dims(view.sizes.size(), 1);
    int64_t step = 1;
    for (auto dims : {&column_dims, &outer_dims})
      for (auto d = dims->rbegin(); d != dims->rend(); ++d) {
        view.strides[*d - shift] = step;
        step *= sizes[*d];
      }
    return view;
  }

  // For whole words of a dense tensor of n elements; p is the operand, dense in this order.
  Repeats repeats(int64_t n, int64_t element_size, const void* p) const {
    const int64_t vector = kVectorBytes / element_size;
    const bool whole = columns == 1 ? repeat % vector == 0 : columns % vector == 0 && aligned(p);
    if (!whole || n > INT32_MAX) return {};
    return {true, Divider(static_cast<uint32_t>(columns)), Divider(static_cast<uint32_t>(repeat * columns))};
  }
};

// If the bias broadcasts over too many dimensions, it is copied to `keep`.
Bias make_bias(const Tensor& bias, const FlatPair& pair, Tensor& keep) {
  check_same(pair.x, bias, "relu_add", "bias");
  Bias b;
  b.data = bias.const_data_ptr();
  const Dims order = memory_order(pair.sizes, {&pair.strides});
  const Tensor* source = &bias;  // of both ways to find an element: the last block of a tensor always walks
  if (const std::optional<Scale> view = Scale::along(bias, pair.sizes, order)) {
    keep = with_strides(bias, view->sizes, view->strides);
    b.repeats = view->repeats(pair.x.numel(), static_cast<int64_t>(bias.element_size()), keep.const_data_ptr());
    b.data = keep.const_data_ptr();
    source = &keep;
  }
  if (!merge_dims<2>(pair.sizes, order, {pair.strides, broadcast_strides(*source, pair.sizes, "relu_add", "bias")}, b.walk)) {
    keep = pair.empty();
    torch::stable::copy_(keep, bias);
    return make_bias(keep, pair, keep);
  }
  const int64_t vector = kVectorBytes / static_cast<int64_t>(bias.element_size());
  b.vector = b.walk.size[b.walk.dims - 1] % vector == 0;
  return b;
}

template <bool SUM_FIRST, bool TRAIN>
std::tuple<Tensor, Tensor> relu_forward_op(const Tensor& x, const Tensor& y, const MaybeTensor& bias, double alpha,
                                           const char* op) {
  const FlatPair pair(x, y, op, SUM_FIRST ? add_relu_strides : relu_add_strides);
  const Launch launch(x);
  Tensor out = pair.empty();
  Tensor bits = TRAIN ? pair.empty_bits() : out;
  const int64_t n = out.numel();
  if (n == 0) return {out, bits};
  Tensor keep;
  const Bias b = bias ? make_bias(*bias, pair, keep) : Bias{};
  dispatch_floating(x.scalar_type(), op, [&]<typename T>(T) {
    const T* px = pointer<const T>(pair.x);
    const T* py = pointer<const T>(pair.y);
    uint8_t* pb = TRAIN ? pointer<uint8_t>(bits) : nullptr;
    auto kernel = &relu_forward<T, SUM_FIRST, TRAIN, false>;
    if constexpr (!SUM_FIRST) {
      if (bias) kernel = &relu_forward<T, SUM_FIRST, TRAIN, true>;
    }
    const bool whole = aligned(px) && aligned(py);
    launch_flat<T>(kernel, n, launch, px, py, pointer<T>(out), pb, n, whole, static_cast<compute_t<T>>(alpha), b);
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

// The caller passes dy with the strides of the forward's result, so that the bits match its memory order.
Tensor relu_backward(const Tensor& dy, const Tensor& bits) {
  const int64_t n = dy.numel();
  check_bits(dy, bits, "relu_backward");
  const Launch launch(dy);
  Tensor dx = empty_strided(dims_of(dy.sizes()), dims_of(dy.strides()), dy.scalar_type(), dy);
  if (n == 0) return dx;
  dispatch_floating(dy.scalar_type(), "relu_backward", [&]<typename T>(T) {
    const T* g = pointer<const T>(dy);
    launch_flat<T>(relu_backward_flat<T>, n, launch, g, pointer<const uint8_t>(bits), pointer<T>(dx), n, aligned(g));
  });
  return dx;
}

// A dense x, in any layout, times one number in the dtype of the computation.
void scale_(Tensor x, const Tensor& factor) {
  const int64_t n = x.numel();
  const ScalarType wide = compute_dtype(x);
  FASTLAYERS_CHECK(factor.numel() == 1 && factor.scalar_type() == wide, "scale_", "expected a factor of one ", toString(wide));
  check_device(x, factor, "scale_", "factor");
  FASTLAYERS_CHECK(n == 0 || is_dense(x), "scale_", "expected a dense x");
  if (n == 0) return;
  const Launch launch(x);
  dispatch_floating(x.scalar_type(), "scale_", [&]<typename T>(T) {
    T* px = pointer<T>(x);
    launch_flat<T>(scale_in_place<T>, n, launch, px, pointer<const compute_t<T>>(factor), n, aligned(px));
  });
}

Dims broadcast_shape(const Tensor& x, const Tensor& y, const char* op) {
  const Dims a = dims_of(x.sizes()), b = dims_of(y.sizes());
  Dims out(std::max(a.size(), b.size()));
  for (size_t k = 1; k <= out.size(); ++k) {
    const int64_t u = k <= a.size() ? a[a.size() - k] : 1, v = k <= b.size() ? b[b.size() - k] : 1;
    FASTLAYERS_CHECK(u == v || u == 1 || v == 1, op, "sizes ", u, " and ", v, " do not broadcast (dimension ",
                     -static_cast<int64_t>(k), ")");
    out[out.size() - k] = u == 1 ? v : u;
  }
  return out;
}

// Whether t lies in memory exactly as a dense result of these sizes and strides.
bool fills(const Tensor& t, const Dims& sizes, const Dims& strides) {
  return dims_of(t.sizes()) == sizes && same_layout(sizes, dims_of(t.strides()), strides);
}

// The gradients of x·s for dense dy and x with the same strides. RELU: those of relu(x) + s, where x stands for the bits in the memory
// order of dy, and s is not read.
template <bool RELU>
void repeated_backward(const Tensor& dy, const Tensor& x, const Tensor& s_in, const Scale& view, Tensor& dx, Tensor& ds,
                       const Launch& launch) {
  const Tensor s = RELU ? s_in : with_strides(s_in, view.sizes, view.strides);
  const int64_t outer = view.outer, repeat = view.repeat, columns = view.columns;
  dispatch_floating(dy.scalar_type(), "mul_backward", [&]<typename T>(T) {
    using A = compute_t<T>;
    constexpr int V = kVector<T>;
    const T* g = pointer<const T>(dy);
    const auto* px = static_cast<const Factor<T, RELU>*>(x.const_data_ptr());
    const T* ps = pointer<const T>(s);
    T* d = pointer<T>(dx);
    const bool flat = aligned(g) && (RELU || aligned(px));
    T* sums = pointer<T>(ds);
    const auto finish = [&](const Tensor& partial, int64_t pieces) {
      STD_CUDA_KERNEL_LAUNCH_CHECK();
      if (pieces > 1) launch_add_pieces<T>(partial, sums, outer, pieces, columns, launch);
    };
    if (columns == 1) {
      RowArgs a{outer, repeat, 1, 1, 1};
      const int64_t blocks = share_rows(a, outer, ceil_div(repeat, V), launch);
      Tensor partial = empty_partial<A>(a.pieces == 1 ? 0 : outer * a.pieces, 1, dy);
      A* pp = pointer<A>(partial);
      T* all = a.pieces == 1 ? sums : nullptr;
      const auto kernel = flat && repeat % V == 0 ? &repeated_backward_rows<T, true, RELU> : &repeated_backward_rows<T, false, RELU>;
      kernel<<<grid_of(blocks), kThreads, 0, launch.stream()>>>(g, px, ps, d, pp, all, a);
      finish(partial, a.pieces);
    } else {
      const auto run = [&]<int W>(Number<W>) {
        const Columns c = Columns::plan<A>(repeat, columns, W, launch.device(), outer);
        Tensor partial = empty_partial<A>(c.pieces == 1 ? 0 : outer * c.pieces, columns, dy);
        repeated_backward_columns<T, W, RELU><<<blocks_for(c.blocks() * outer, 1), c.threads(), c.shared<A>(W), launch.stream()>>>(
            g, px, ps, d, pointer<A>(partial), c.pieces == 1 ? sums : nullptr, c);
        finish(partial, c.pieces);
      };
      if (flat && columns % V == 0) run(Number<V>{});
      else run(Number<1>{});
    }
  });
}

Tensor mul(const Tensor& x, const Tensor& y) {
  check_same(x, y, "mul", "y");
  const Dims sizes = broadcast_shape(x, y, "mul");
  const Dims sx = broadcast_strides(x, sizes, "mul", "x"), sy = broadcast_strides(y, sizes, "mul", "y");
  const bool same_shape = dims_of(x.sizes()) == dims_of(y.sizes());
  const Dims strides = same_shape ? mul_strides(sizes, sx, sy) : dense_strides(sizes, memory_order(sizes, {&sx, &sy}));
  const Launch launch(x);
  Tensor out = empty_strided(sizes, strides, x.scalar_type(), x);
  const int64_t n = out.numel();
  if (n == 0) return out;
  const bool x_fills = fills(x, sizes, strides), y_fills = fills(y, sizes, strides);
  if (x_fills && y_fills) {
    dispatch_floating(x.scalar_type(), "mul", [&]<typename T>(T) {
      const T* px = pointer<const T>(x);
      const T* py = pointer<const T>(y);
      launch_flat<T>(mul_flat<T>, n, launch, px, py, pointer<T>(out), n, aligned(px) && aligned(py));
    });
    return out;
  }
  const Dims order = memory_order(sizes, {&strides});
  if (!same_shape && (x_fills || y_fills)) {
    const Tensor &big = x_fills ? x : y, &small = x_fills ? y : x;
    if (const std::optional<Scale> view = Scale::along(small, sizes, order)) {
      const Tensor s = with_strides(small, view->sizes, view->strides);
      const Repeats repeats = view->repeats(n, static_cast<int64_t>(s.element_size()), s.const_data_ptr());
      if (repeats.served && aligned(big.const_data_ptr())) {
        dispatch_floating(x.scalar_type(), "mul", [&]<typename T>(T) {
          launch_flat<T>(mul_repeated<T>, n, launch, pointer<const T>(big), pointer<const T>(s), pointer<T>(out), n, repeats);
        });
        return out;
      }
    }
  }
  Walk<3> walk;
  if (!merge_dims<3>(sizes, order, {strides, sx, sy}, walk)) {  // too many dimensions: expand the operands in memory
    Tensor full_x = empty_strided(sizes, strides, x.scalar_type(), x), full_y = empty_strided(sizes, strides, x.scalar_type(), x);
    torch::stable::copy_(full_x, x);
    torch::stable::copy_(full_y, y);
    return mul(full_x, full_y);
  }
  dispatch_floating(x.scalar_type(), "mul", [&]<typename T>(T) {
    launch_flat<T, 1>(mul_broadcast<T>, n, launch, pointer<const T>(x), pointer<const T>(y), pointer<T>(out), n, walk);
  });
  return out;
}

// t summed over the dimensions along which a tensor of these sizes was repeated.
Tensor sum_to(const Tensor& t, const Dims& sizes) {
  const Dims from = dims_of(t.sizes());
  const int64_t shift = static_cast<int64_t>(from.size() - sizes.size());
  Dims repeated;
  for (int64_t d = 0; d < static_cast<int64_t>(from.size()); ++d)
    if (d < shift || (sizes[d - shift] == 1 && from[d] != 1)) repeated.push_back(d);
  const Tensor sum = repeated.empty() ? t : torch::stable::sum(t, repeated, true);
  return torch::stable::reshape(sum, sizes);
}

// The gradients of relu(x) + y + bias for x and for a bias of this shape, in one pass. dy as for relu_backward.
std::tuple<Tensor, Tensor> relu_add_backward(const Tensor& dy, const Tensor& bits, std::vector<int64_t> bias_shape) {
  const Dims sizes = dims_of(dy.sizes()), strides = dims_of(dy.strides());
  Tensor dbias = empty_contiguous(bias_shape, dy.scalar_type(), dy);
  const std::optional<Scale> view = Scale::along(dbias, sizes, memory_order(sizes, {&strides}));
  if (!view || dy.numel() == 0) return {relu_backward(dy, bits), sum_to(dy, bias_shape)};
  check_bits(dy, bits, "relu_add_backward");
  const Launch launch(dy);
  Tensor dx = empty_strided(sizes, strides, dy.scalar_type(), dy);
  dbias = empty_strided(view->sizes, view->strides, dy.scalar_type(), dy);
  repeated_backward<true>(dy, bits, dy, *view, dx, dbias, launch);
  return {dx, dbias};
}

std::tuple<Tensor, Tensor> mul_backward(const Tensor& dy_in, const Tensor& x, const Tensor& y) {
  check_same(x, y, "mul_backward", "y");
  check_same(x, dy_in, "mul_backward", "dy");
  const Dims sizes = dims_of(dy_in.sizes()), own_x = dims_of(x.sizes()), own_y = dims_of(y.sizes());
  const Launch launch(x);
  const bool full_x = own_x == sizes, full_y = own_y == sizes;
  const auto composed = [&] { return std::make_tuple(sum_to(mul(dy_in, y), own_x), sum_to(mul(dy_in, x), own_y)); };
  if (!full_x && !full_y) return composed();
  const Tensor& big = full_x ? x : y;
  const Dims dy_strides = dims_of(dy_in.strides()), big_strides = dims_of(big.strides());
  const Dims order = memory_order(sizes, {&dy_strides, &big_strides}), strides = dense_strides(sizes, order);
  const Tensor dy = with_strides(dy_in, sizes, strides), dense_big = with_strides(big, sizes, strides);
  const int64_t n = dy.numel();
  if (full_x && full_y) {
    const Tensor dense_y = with_strides(y, sizes, strides);
    Tensor dx = empty_strided(sizes, strides, x.scalar_type(), x), dy_ = empty_strided(sizes, strides, x.scalar_type(), x);
    if (n == 0) return {dx, dy_};
    dispatch_floating(x.scalar_type(), "mul_backward", [&]<typename T>(T) {
      const T* g = pointer<const T>(dy);
      const T* px = pointer<const T>(dense_big);
      const T* py = pointer<const T>(dense_y);
      const bool whole = aligned(g) && aligned(px) && aligned(py);
      launch_flat<T>(mul_backward_flat<T>, n, launch, g, px, py, pointer<T>(dx), pointer<T>(dy_), n, whole);
    });
    return {dx, dy_};
  }
  const Tensor& small = full_x ? y : x;
  const std::optional<Scale> view = Scale::along(small, sizes, order);
  if (!view) return composed();
  Tensor d_big = empty_strided(sizes, strides, x.scalar_type(), x);
  Tensor d_small = empty_strided(view->sizes, view->strides, x.scalar_type(), x);
  repeated_backward<false>(dy, dense_big, small, *view, d_big, d_small, launch);
  return full_x ? std::make_tuple(d_big, d_small) : std::make_tuple(d_small, d_big);
}

}  // namespace
}  // namespace fastlayers

STABLE_TORCH_LIBRARY_IMPL(fastlayers, CUDA, m) {
  m.impl("relu_add", TORCH_BOX(&fastlayers::relu_add));
  m.impl("relu_add_train", TORCH_BOX(&fastlayers::relu_add_train));
  m.impl("add_relu", TORCH_BOX(&fastlayers::add_relu));
  m.impl("add_relu_train", TORCH_BOX(&fastlayers::add_relu_train));
  m.impl("relu_backward", TORCH_BOX(&fastlayers::relu_backward));
  m.impl("relu_add_backward", TORCH_BOX(&fastlayers::relu_add_backward));
  m.impl("mul", TORCH_BOX(&fastlayers::mul));
  m.impl("mul_backward", TORCH_BOX(&fastlayers::mul_backward));
  m.impl("scale_", TORCH_BOX(&fastlayers::scale_));
}

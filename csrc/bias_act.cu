// act(x + bias), the bias over the last dimension or none, forward and backward.
//
// The stock composition writes x + bias out and reads it again; its backward needs a second pass over the gradient for the bias'
// sum. Here the forward is one pass, and the backward one pass over dy and x that computes x + bias anew, writes dx and adds the
// sums up in registers, a piece of the rows a block. Of relu the result is kept in place of x: where it is not 0 the gradient
// passes, which the same kernel tells by taking it for x.
#include "activations.cuh"
#include "flat.cuh"

namespace fastlayers {
namespace {

constexpr int kForwardWords = 2;   // of x in flight a thread
constexpr int kBackwardWords = 2;  // of dy and of x
// Where a thread goes down columns: rows at once, and blocks that are resident on a multiprocessor, which leaves a thread 64
// registers. The run-time choice and float64 need more for the activations themselves.
template <Act ACT>
constexpr int kBackwardRows = ACT == Act::run_time ? 1 : 2;
template <typename T>
constexpr int kColumnBlocks = sizeof(T) == 8 ? 2 : 4;
constexpr int kMostAcross = 128;   // threads of a block along a row; the others of kThreads have further rows

// bias_words: a word of x has its biases in one word.
template <typename T, Act ACT, bool BIAS>
__global__ void __launch_bounds__(kThreads) bias_act_forward(const T* __restrict__ x, const T* __restrict__ bias, T* __restrict__ out,
                                                             int64_t n, bool is_aligned, bool bias_words, const Rows rows, Act act,
                                                             ActParameters<compute_t<T>> p) {
  using A = compute_t<T>;
  constexpr int V = kVector<T>;
  for_block<T, kForwardWords>(is_aligned, n, [&](auto words, int first) {
    constexpr int U = words.value;
    constexpr bool WHOLE = U > 1;
    Vec<T, V> w[U];
    [[maybe_unused]] Vec<T, V> b[U];
#pragma unroll
    for (int u = 0; u < U; ++u) w[u] = load_flat<T, WHOLE>(x, flat_index<T, kForwardWords>(first + u), n);
    if constexpr (BIAS) {
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const int64_t i = flat_index<T, kForwardWords>(first + u);
        int64_t column = i < n ? i - rows.row(i) * rows.columns : 0;
        if (WHOLE && bias_words) {
          b[u] = load_vec<T, V>(bias + column);
        } else {
#pragma unroll
          for (int j = 0; j < V; ++j) {
            b[u].v[j] = bias[column];
            if (++column == rows.columns) column = 0;
          }
        }
      }
    }
    with_act<ACT, true>(act, [&](auto chosen) {
#pragma unroll
      for (int u = 0; u < U; ++u) {
        Vec<A, V> z = unpack<A>(w[u]);
        if constexpr (BIAS) {
          const Vec<A, V> shift = unpack<A>(b[u]);
#pragma unroll
          for (int j = 0; j < V; ++j) z.v[j] += shift.v[j];
        }
#pragma unroll
        for (int j = 0; j < V; ++j) {
          if constexpr (ACT == Act::run_time) z.v[j] = act_value<decltype(chosen)::value, sizeof(T) == 2>(z.v[j], p);
          else z.v[j] = act_value<ACT, sizeof(T) == 2>(z.v[j]);
        }
        store_flat<T, WHOLE>(out, flat_index<T, kForwardWords>(first + u), n, pack<T>(z));
      }
    });
  });
}

template <typename T, Act ACT>
__global__ void __launch_bounds__(kThreads) act_backward(const T* __restrict__ dy, const T* __restrict__ x, T* __restrict__ dx, int64_t n,
                                                         bool is_aligned, Act act, ActParameters<compute_t<T>> p) {
  using A = compute_t<T>;
  constexpr int V = kVector<T>;
  for_block<T, kBackwardWords>(is_aligned, n, [&](auto words, int first) {
    constexpr int U = words.value;
    constexpr bool WHOLE = U > 1;
    Vec<T, V> wg[U], wx[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t i = flat_index<T, kBackwardWords>(first + u);
      wg[u] = load_flat<T, WHOLE>(dy, i, n);
      wx[u] = load_flat<T, WHOLE>(x, i, n);
    }
    const auto nothing = static_cast<unsigned>(n >> 62);
    wait_for_all(wx, wg, nothing);
    with_act<ACT, true>(act, [&](auto chosen) {
#pragma unroll
      for (int u = 0; u < U; ++u) {
        Vec<A, V> g = unpack<A>(wg[u]);
        const Vec<A, V> z = unpack<A>(wx[u]);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          if constexpr (ACT == Act::run_time) g.v[j] = act_gradient<decltype(chosen)::value, sizeof(T) == 2>(g.v[j], z.v[j], p);
          else g.v[j] = act_gradient<ACT, sizeof(T) == 2>(g.v[j], z.v[j]);
        }
        store_flat<T, WHOLE>(dx, flat_index<T, kBackwardWords>(first + u), n, pack<T>(g));
      }
    });
  });
}

struct ColumnArgs {
  int64_t rows, columns;
  int64_t pieces;    // of the rows, a block each
  int across, down;  // threads of a block over the columns, and over the rows
};

// dx, and of each piece of the rows the sums of dx over them. A block takes a tile of columns, V to a thread. bias may be null: of
// relu, whose result x is then.
template <typename T, int V, Act ACT>
__global__ void __launch_bounds__(kThreads, kColumnBlocks<T>)
    bias_act_backward_columns(const T* __restrict__ dy, const T* __restrict__ x, const T* __restrict__ bias, T* __restrict__ dx,
                              compute_t<T>* partial, const ColumnArgs a, Act act, ActParameters<compute_t<T>> p) {
  using A = compute_t<T>;
  extern __shared__ char memory[];
  const int64_t each_tile = static_cast<int64_t>(a.across) * V, tiles = (a.columns + each_tile - 1) / each_tile;
  const int64_t tile = blockIdx.x % tiles, piece = blockIdx.x / tiles;
  const int tx = threadIdx.x % a.across, ty = threadIdx.x / a.across;
  const int64_t column = (tile * a.across + tx) * V;
  const int64_t each = (a.rows + a.pieces - 1) / a.pieces;
  const int64_t last = (piece + 1) * each < a.rows ? (piece + 1) * each : a.rows;
  const bool active = column < a.columns;
  const auto nothing = static_cast<unsigned>(a.rows >> 62);
  A sum[V] = {};
  if (active) {
    Vec<T, V> b = filled<T, V>(convert<T>(0.f));
    if (bias != nullptr) b = load_vec<T, V>(bias + column);
    const auto take = [&](auto count, int64_t row) {
      constexpr int U = count.value;
      Vec<T, V> wg[U], wx[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const int64_t i = (row + u * a.down) * a.columns + column;
        wg[u] = load_vec<T, V>(dy + i);
        wx[u] = load_vec<T, V>(x + i);
      }
      wait_for_all(wx, wg, nothing);
      with_act<ACT, true>(act, [&](auto chosen) {
#pragma unroll
        for (int u = 0; u < U; ++u) {
          Vec<A, V> g = unpack<A>(wg[u]);
          const Vec<A, V> z = unpack<A>(wx[u]);
          const Vec<A, V> shift = unpack<A>(b);
#pragma unroll
          for (int j = 0; j < V; ++j) {
            if constexpr (ACT == Act::run_time)
              g.v[j] = act_gradient<decltype(chosen)::value, sizeof(T) == 2>(g.v[j], z.v[j] + shift.v[j], p);
            else
              g.v[j] = act_gradient<ACT, sizeof(T) == 2>(g.v[j], z.v[j] + shift.v[j]);
            sum[j] += g.v[j];
          }
          store_vec<T, V>(dx + (row + u * a.down) * a.columns + column, pack<T>(g));
        }
      });
    };
    int64_t row = piece * each + ty;
#pragma unroll 1
    for (; row + (kBackwardRows<ACT> - 1) * a.down < last; row += kBackwardRows<ACT> * a.down)
      take(std::integral_constant<int, kBackwardRows<ACT>>{}, row);
    for (; row < last; row += a.down) take(std::integral_constant<int, 1>{}, row);
  }
  store_partial<V>(sum, reinterpret_cast<A*>(memory), a.across, a.down, active ? partial + piece * a.columns + column : nullptr);
}

// ---- host ---------------------------------------------------------------------------------------------------------------

// x in a dense memory order in which the bias, if there is one, lies along the rows of the last dimension.
struct Operand {
  Tensor x;
  Dims sizes, strides;        // of x, and of what the kernel writes
  Dims torch_strides;         // of torch's result; others where these would scatter the rows
  int64_t rows = 1, columns = 1;

  Operand(const Tensor& x_in, const std::optional<Tensor>& bias, const char* op) : x(x_in), sizes(dims_of(x_in.sizes())) {
    if (bias) {
      check_same(x_in, *bias, op, "bias");
      STD_TORCH_CHECK(!sizes.empty() && bias->dim() == 1 && bias->size(0) == sizes.back(), "fastlayers::", op,
                      ": expected a bias for each of x's last dimension");
      columns = sizes.back();
      rows = columns == 0 ? 0 : x.numel() / columns;
    }
    if (x_in.is_contiguous()) {
      strides = torch_strides = contiguous_strides(sizes);
      return;
    }
    const Dims own = dims_of(x_in.strides());
    if (bias) {
      Dims of_bias(sizes.size(), 0);
      of_bias.back() = bias->stride(0);
      strides = torch_strides = dense_strides(sizes, memory_order(sizes, {&own, &of_bias}));
      if (columns > 1 && strides.back() != 1) strides = contiguous_strides(sizes);
    } else {
      strides = torch_strides = result_strides(sizes, {&own});
    }
    x = with_strides(x_in, sizes, strides);
  }
  Tensor empty() const { return empty_strided(sizes, strides, x.scalar_type(), x); }
};

Tensor bias_act_forward_op(const Tensor& x_in, const std::optional<Tensor>& bias_in, int64_t act_in, double first, double second) {
  const char* op = "bias_act_forward";
  const Act act = act_of(act_in, op, kActs);
  const Operand operand(x_in, bias_in, op);
  const Launch launch(x_in);
  Tensor out = operand.empty();
  const int64_t n = out.numel();
  if (n == 0) return with_strides(out, operand.sizes, operand.torch_strides);
  std::optional<Tensor> bias;
  if (bias_in) bias = bias_in->is_contiguous() ? *bias_in : torch::stable::contiguous(*bias_in);
  dispatch_floating(x_in.scalar_type(), op, [&](auto zero) {
    using T = decltype(zero);
    using A = compute_t<T>;
    const T* px = static_cast<const T*>(operand.x.const_data_ptr());
    const T* pb = bias ? static_cast<const T*>(bias->const_data_ptr()) : nullptr;
    T* po = static_cast<T*>(out.mutable_data_ptr());
    const ActParameters<A> p{static_cast<A>(first), static_cast<A>(second)};
    with_compiled<T>(act, [&](auto compiled) {
      constexpr Act kAct = decltype(compiled)::value;
      if (!bias) {
        bias_act_forward<T, kAct, false>
            <<<flat_blocks<T, kForwardWords>(n), kThreads, 0, launch.stream()>>>(px, pb, po, n, aligned(px), false, Rows(), act, p);
        return;
      }
      const bool words = operand.columns % kVector<T> == 0 && aligned(pb);
      for_rows(operand.rows, operand.columns, [&](int64_t row, int64_t share, const Rows& rows) {
        const int64_t start = row * operand.columns;
        bias_act_forward<T, kAct, true><<<flat_blocks<T, kForwardWords>(share), kThreads, 0, launch.stream()>>>(
            px + start, pb, po + start, share, aligned(px + start) && aligned(po + start), words, rows, act, p);
      });
    });
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return with_strides(out, operand.sizes, operand.torch_strides);
}

// The gradients of x and, if wanted, of the bias. relu has its result for x, and no bias; its sums are asked for all the same.
std::tuple<Tensor, Tensor> bias_act_backward_op(const Tensor& dy_in, const Tensor& x_in, const std::optional<Tensor>& bias_in,
                                                int64_t act_in, double first, double second, bool dbias) {
  const char* op = "bias_act_backward";
  const Act act = act_of(act_in, op, kActs);
  check_same_shape(x_in, dy_in, op, "dy");
  const bool sums = dbias || bias_in;
  std::optional<Tensor> bias;
  if (bias_in) bias = torch::stable::contiguous(*bias_in);
  const Launch launch(x_in);
  STD_TORCH_CHECK(!dbias || x_in.dim() > 0, "fastlayers::", op, ": a tensor without dimensions has no bias");
  Tensor db = empty_contiguous({dbias ? x_in.size(x_in.dim() - 1) : 0}, x_in.scalar_type(), x_in);
  Operand operand(x_in, bias_in ? bias : dbias ? std::optional<Tensor>(db) : std::nullopt, op);
  const Tensor dy = with_strides(dy_in, operand.sizes, operand.strides);
  Tensor dx = operand.empty();
  const int64_t n = dx.numel();
  if (n == 0) {
    if (dbias) torch::stable::zero_(db);
    return {dx, db};
  }
  dispatch_floating(x_in.scalar_type(), op, [&](auto zero) {
    using T = decltype(zero);
    using A = compute_t<T>;
    constexpr int V = kVector<T>;
    const T* pg = static_cast<const T*>(dy.const_data_ptr());
    const T* px = static_cast<const T*>(operand.x.const_data_ptr());
    const T* pb = bias ? static_cast<const T*>(bias->const_data_ptr()) : nullptr;
    T* pd = static_cast<T*>(dx.mutable_data_ptr());
    const ActParameters<A> p{static_cast<A>(first), static_cast<A>(second)};
    const bool flat = aligned(pg) && aligned(px);
    if (!sums) {
      with_compiled<T>(act, [&](auto compiled) {
        act_backward<T, decltype(compiled)::value>
            <<<flat_blocks<T, kBackwardWords>(n), kThreads, 0, launch.stream()>>>(pg, px, pd, n, flat, act, p);
      });
      STD_CUDA_KERNEL_LAUNCH_CHECK();
      return;
    }
    const bool words = flat && operand.columns % V == 0 && aligned(pb);
    const int64_t lanes = words ? operand.columns / V : operand.columns, tiles = ceil_div(lanes, kMostAcross);
    ColumnArgs a{operand.rows, operand.columns, 1, 0, 0};
    a.across = static_cast<int>(ceil_div(lanes, tiles));
    a.down = kThreads / a.across;
    const int64_t resident = static_cast<int64_t>(kColumnBlocks<T>) * device_traits(launch.device()).processors;
    a.pieces = std::clamp<int64_t>(resident / tiles, 1, std::max<int64_t>(1, a.rows / (4 * a.down)));
    Tensor partial = empty_contiguous({a.pieces, a.columns}, sizeof(A) == 8 ? ScalarType::Double : ScalarType::Float, dy);
    A* pp = static_cast<A*>(partial.mutable_data_ptr());
    const unsigned grid = blocks_for(tiles * a.pieces, 1);
    const int threads = a.across * a.down;
    const size_t shared = sizeof(A) * threads * (words ? V : 1);
    with_compiled<T>(act, [&](auto compiled) {
      constexpr Act kAct = decltype(compiled)::value;
      if (words) bias_act_backward_columns<T, V, kAct><<<grid, threads, shared, launch.stream()>>>(pg, px, pb, pd, pp, a, act, p);
      else bias_act_backward_columns<T, 1, kAct><<<grid, threads, shared, launch.stream()>>>(pg, px, pb, pd, pp, a, act, p);
    });
    STD_CUDA_KERNEL_LAUNCH_CHECK();
    if (!dbias) return;
    add_pieces<T><<<blocks_for(a.columns, 32), kThreads, 0, launch.stream()>>>(pp, static_cast<T*>(db.mutable_data_ptr()), 1, a.pieces,
                                                                              a.columns);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return {dx, db};
}

}  // namespace
}  // namespace fastlayers

STABLE_TORCH_LIBRARY_IMPL(fastlayers, CUDA, m) {
  m.impl("bias_act_forward", TORCH_BOX(&fastlayers::bias_act_forward_op));
  m.impl("bias_act_backward", TORCH_BOX(&fastlayers::bias_act_backward_op));
}

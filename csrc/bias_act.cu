// act(x + bias), the bias over the last dimension or none, forward and backward.
//
// The stock composition writes x + bias out and reads it again; its backward needs a second pass over the gradient for the bias'
// sum. Here the forward is one pass, and the backward one pass over dy and x that computes x + bias anew, writes dx and adds the
// sums up in registers. Of relu the result is kept in place of x: where it is not 0 the gradient
// passes, which the same kernel tells by taking it for x.
#include "common/activations.cuh"
#include "common/columns.cuh"
#include "common/ops.h"

#include <numeric>

namespace fastlayers {
namespace {

constexpr int kForwardWords = 2;   // of x in flight a thread
constexpr int kBackwardWords = 2;  // of dy and of x
// Rows that a thread has in flight on its way down columns: the run-time choice needs the registers for the activations themselves,
// and what is kept besides for its words: with two, 44 to 72 bytes are spilled.
template <Act ACT, bool KEEP>
constexpr int kBackwardRows = ACT == Act::run_time || KEEP ? 1 : kRowsInFlight;

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

// dx, and the sums of dx over the rows; and, where KEEP says so, what was activated. `width` is the bias' length; rows whose words would straddle are taken several at once
// for one row of columns, whose words do not. bias may be null: of relu, whose result x is then.
template <typename T, int V, Act ACT, bool KEEP>
__global__ void __launch_bounds__(kThreads, kColumnBlocks<T>)
    bias_act_backward_columns(const T* __restrict__ dy, const T* __restrict__ x, const T* __restrict__ bias, T* __restrict__ dx,
                              T* __restrict__ activated, compute_t<T>* partial, T* sums, int64_t n, int64_t width, const Columns c, Act act,
                              ActParameters<compute_t<T>> p) {
  using A = compute_t<T>;
  ColumnThread<V> me(c, blockIdx.x);
  Vec<A, V> sum = filled<A, V>(A(0));
  Vec<T, V> b = filled<T, V>(convert<T>(0.f));
  if (bias != nullptr && me.active) {
    int64_t at = me.column < width ? me.column : me.column % width;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      b.v[j] = bias[at];
      if (++at == width) at = 0;
    }
  }
  const auto nothing = static_cast<unsigned>(n >> 62);
  me.template for_rows<kBackwardRows<ACT, KEEP>>(c, [&](auto count, int64_t row) {
    constexpr int U = count.value;
    const int64_t first = row * c.columns + me.column;
    const bool whole = U > 1 || first + V <= n;
    Vec<T, V> wg[U], wx[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t i = first + u * me.step * c.columns;
      if (whole) {
        wg[u] = load_vec<T, V>(dy + i);
        wx[u] = load_vec<T, V>(x + i);
      } else {
        wg[u] = load_flat<T, false, V>(dy, i, n);
        wx[u] = load_flat<T, false, V>(x, i, n);
      }
    }
    wait_for_all(wx, wg, nothing);
    with_act<ACT, true>(act, [&](auto chosen) {
#pragma unroll
      for (int u = 0; u < U; ++u) {
        Vec<A, V> g = unpack<A>(wg[u]);
        const Vec<A, V> z = unpack<A>(wx[u]);
        const Vec<A, V> shift = unpack<A>(b);
        [[maybe_unused]] Vec<A, V> y;
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const A biased = z.v[j] + shift.v[j];
          if constexpr (ACT == Act::run_time) g.v[j] = act_gradient<decltype(chosen)::value, sizeof(T) == 2>(g.v[j], biased, p);
          else g.v[j] = act_gradient<ACT, sizeof(T) == 2>(g.v[j], biased);
          sum.v[j] += g.v[j];
          if constexpr (KEEP && ACT == Act::run_time) y.v[j] = act_value<decltype(chosen)::value, sizeof(T) == 2>(biased, p);
          else if constexpr (KEEP) y.v[j] = act_value<ACT, sizeof(T) == 2>(biased);
        }
        const int64_t i = first + u * me.step * c.columns;
        const auto store = [&](T* to, const Vec<A, V>& values) {
          if (whole) store_vec<T, V>(to + i, pack<T>(values));
          else store_flat<T, false, V>(to, i, n, pack<T>(values));
        };
        store(dx, g);
        if constexpr (KEEP) store(activated, y);
      }
    });
  });
  me.store(c, sum, partial, sums);
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

}  // namespace

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

// The gradients of x and, if wanted, of the bias, in x's dtype or that one; and, if that is wanted, act(x + bias), of a bias. relu has
// its result for x, and no bias; its sums are asked for all the same.
std::tuple<Tensor, Tensor, std::optional<Tensor>> bias_act_gradients(const Tensor& dy_in, const Tensor& x_in,
                                                                     const std::optional<Tensor>& bias_in, int64_t act_in, double first,
                                                                     double second, bool dbias, std::optional<ScalarType> dtype,
                                                                     bool keep) {
  const char* op = "bias_act_backward";
  const Act act = act_of(act_in, op, kActs);
  check_same_shape(x_in, dy_in, op, "dy");
  const bool sums = dbias || bias_in;
  std::optional<Tensor> bias;
  if (bias_in) bias = torch::stable::contiguous(*bias_in);
  const Launch launch(x_in);
  STD_TORCH_CHECK(!dbias || x_in.dim() > 0, "fastlayers::", op, ": a tensor without dimensions has no bias");
  const bool wide = dtype && *dtype != x_in.scalar_type();
  STD_TORCH_CHECK(!wide || (x_in.element_size() == 2 && *dtype == ScalarType::Float), "fastlayers::", op,
                  ": expected the bias' gradient in x's dtype, or in float32 of halves, but got ", torch::headeronly::toString(*dtype));
  Tensor db = empty_contiguous({dbias ? x_in.size(x_in.dim() - 1) : 0}, wide ? *dtype : x_in.scalar_type(), x_in);
  Operand operand(x_in, bias_in ? bias : dbias ? std::optional<Tensor>(db) : std::nullopt, op);
  const Tensor dy = with_strides(dy_in, operand.sizes, operand.strides);
  Tensor dx = operand.empty();
  std::optional<Tensor> activated;
  if (keep) activated = operand.empty();
  const int64_t n = dx.numel();
  if (n == 0) {
    if (dbias) torch::stable::zero_(db);
    return {dx, db, activated};
  }
  dispatch_floating(x_in.scalar_type(), op, [&](auto zero) {
    using T = decltype(zero);
    using A = compute_t<T>;
    constexpr int V = kVector<T>;
    const T* pg = static_cast<const T*>(dy.const_data_ptr());
    const T* px = static_cast<const T*>(operand.x.const_data_ptr());
    const T* pb = bias ? static_cast<const T*>(bias->const_data_ptr()) : nullptr;
    T* pd = static_cast<T*>(dx.mutable_data_ptr());
    T* py = activated ? static_cast<T*>(activated->mutable_data_ptr()) : nullptr;
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
    const int64_t width = operand.columns;
    const auto run = [&](auto vector, int64_t rows_at_once) {
      constexpr int W = decltype(vector)::value;
      Columns c = Columns::plan<A>(operand.rows / rows_at_once, width * rows_at_once, W, launch.device());
      c.ends_within = operand.rows % rows_at_once != 0;
      const int64_t pieces = c.pieces * rows_at_once;
      T* sums = pieces == 1 && dbias && !wide ? static_cast<T*>(db.mutable_data_ptr()) : nullptr;
      Tensor partial = empty_partial<A>(sums ? 0 : pieces, width, dy);
      A* pp = static_cast<A*>(partial.mutable_data_ptr());
      with_compiled<T>(act, [&](auto compiled) {
        constexpr Act kAct = decltype(compiled)::value;
        auto kernel = &bias_act_backward_columns<T, W, kAct, false>;
        if (py) kernel = &bias_act_backward_columns<T, W, kAct, true>;
        kernel<<<blocks_for(c.blocks(), 1), c.threads(), c.shared<A>(W), launch.stream()>>>(pg, px, pb, pd, py, pp, sums, n, width, c,
                                                                                          act, p);
      });
      STD_CUDA_KERNEL_LAUNCH_CHECK();
      if (!dbias || sums) return;
      if (wide) launch_add_pieces<A>(partial, db.mutable_data_ptr(), 1, pieces, width, launch);
      else launch_add_pieces<T>(partial, db.mutable_data_ptr(), 1, pieces, width, launch);
    };
    if (flat) run(std::integral_constant<int, V>{}, V / std::gcd<int64_t>(V, width));
    else run(std::integral_constant<int, 1>{}, 1);
  });
  return {dx, db, activated};
}

std::tuple<Tensor, Tensor> bias_act_backward_op(const Tensor& dy, const Tensor& x, const std::optional<Tensor>& bias, int64_t act,
                                                double first, double second, bool dbias, std::optional<ScalarType> dtype) {
  const auto [dx, db, activated] = bias_act_gradients(dy, x, bias, act, first, second, dbias, dtype, false);
  return {dx, db};
}

}  // namespace fastlayers

STABLE_TORCH_LIBRARY_IMPL(fastlayers, CUDA, m) {
  m.impl("bias_act_forward", TORCH_BOX(&fastlayers::bias_act_forward_op));
  m.impl("bias_act_backward", TORCH_BOX(&fastlayers::bias_act_backward_op));
}

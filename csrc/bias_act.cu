// act(x + bias) and act(x), forward and backward. The bias runs along the last dimension.
//
// The stock composition writes x + bias and reads it again, and its backward reads the gradient a second time to sum it for the bias.
// Here the forward is one pass. The backward is one pass over dy and x: it recomputes x + bias, writes dx and adds the sums up in
// registers. relu keeps its result instead of x. The gradient passes where the result is not 0, so the same kernel can take it for x.
#include "bias_act.h"
#include "common/activations.cuh"
#include "common/columns.cuh"
#include "common/ops.h"

#include <numeric>

namespace fastlayers {
namespace {

constexpr int kForwardWords = 2;   // of x in flight a thread
constexpr int kBackwardWords = 2;  // of dy and of x
// Rows that a thread has in flight on its way down columns. The run-time choice needs the registers for the activations, and KEEP needs
// them for its words: with two rows in flight, 44 to 72 bytes are spilled.
template <Act ACT, bool KEEP>
constexpr int kBackwardRows = ACT == Act::run_time || KEEP ? 1 : kRowsInFlight;

// bias_words: the biases of a word of x are one word.
template <typename T, Act ACT, bool BIAS>
__global__ void __launch_bounds__(kThreads) bias_act_forward(const T* __restrict__ x, const T* __restrict__ bias, T* __restrict__ out,
                                                             int64_t n, bool is_aligned, bool bias_words, const Rows rows, Act act,
                                                             ActParameters<compute_t<T>> p) {
  using A = compute_t<T>;
  constexpr int V = kVector<T>;
  for_block<T, kForwardWords>(is_aligned, n, [&]<int U>(Number<U>, int first) {
    constexpr bool WHOLE = U > 1;
    Vec<T, V> w[U];
    [[maybe_unused]] Vec<T, V> b[U];
    unroll<U>([&](int u) { w[u] = load_flat<T, WHOLE>(x, flat_index<T, kForwardWords>(first + u), n); });
    if constexpr (BIAS) {
      unroll<U>([&](int u) {
        const int64_t i = flat_index<T, kForwardWords>(first + u);
        int64_t column = i < n ? i - rows.row(i) * rows.columns : 0;
        if (WHOLE && bias_words) {
          b[u] = load_vec<T, V>(bias + column);
        } else {
          unroll<V>([&](int j) {
            b[u].v[j] = bias[column];
            if (++column == rows.columns) column = 0;
          });
        }
      });
    }
    unroll<U>([&](int u) {
      Vec<A, V> z = unpack<A>(w[u]);
      if constexpr (BIAS) {
        const Vec<A, V> shift = unpack<A>(b[u]);
        unroll<V>([&](int j) { z.v[j] += shift.v[j]; });
      }
      with_act<ACT, true>(act, [&](auto chosen) {
        unroll<V>([&](int j) { z.v[j] = act_value<decltype(chosen)::value, sizeof(T) == 2>(z.v[j], p); });
      });
      store_flat<T, WHOLE>(out, flat_index<T, kForwardWords>(first + u), n, pack<T>(z));
    });
  });
}

template <typename T, Act ACT>
__global__ void __launch_bounds__(kThreads) act_backward(const T* __restrict__ dy, const T* __restrict__ x, T* __restrict__ dx, int64_t n,
                                                         bool is_aligned, Act act, ActParameters<compute_t<T>> p) {
  using A = compute_t<T>;
  constexpr int V = kVector<T>;
  for_block<T, kBackwardWords>(is_aligned, n, [&]<int U>(Number<U>, int first) {
    constexpr bool WHOLE = U > 1;
    Vec<T, V> wg[U], wx[U];
    unroll<U>([&](int u) {
      const int64_t i = flat_index<T, kBackwardWords>(first + u);
      wg[u] = load_flat<T, WHOLE>(dy, i, n);
      wx[u] = load_flat<T, WHOLE>(x, i, n);
    });
    const auto nothing = static_cast<unsigned>(n >> 62);
    wait_for_all(wx, wg, nothing);
    unroll<U>([&](int u) {
      Vec<A, V> g = unpack<A>(wg[u]);
      const Vec<A, V> z = unpack<A>(wx[u]);
      with_act<ACT, true>(act, [&](auto chosen) {
        unroll<V>([&](int j) { g.v[j] = act_gradient<decltype(chosen)::value, sizeof(T) == 2>(g.v[j], z.v[j], p); });
      });
      store_flat<T, WHOLE>(dx, flat_index<T, kBackwardWords>(first + u), n, pack<T>(g));
    });
  });
}

// dx, the sums of dx over the rows and, with KEEP, act(x + bias). `width` is the length of the bias. If words straddle the rows, several
// rows count as one row of columns, whose words do not. bias may be null: for relu, where x is the result.
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
    unroll<V>([&](int j) {
      b.v[j] = bias[at];
      if (++at == width) at = 0;
    });
  }
  const auto nothing = static_cast<unsigned>(n >> 62);
  me.template for_rows<kBackwardRows<ACT, KEEP>>(c, [&]<int U>(Number<U>, int64_t row) {
    const int64_t first = row * c.columns + me.column;
    const bool whole = U > 1 || first + V <= n;
    Vec<T, V> wg[U], wx[U];
    unroll<U>([&](int u) {
      const int64_t i = first + u * me.step * c.columns;
      if (whole) {
        wg[u] = load_vec<T, V>(dy + i);
        wx[u] = load_vec<T, V>(x + i);
      } else {
        wg[u] = load_flat<T, false, V>(dy, i, n);
        wx[u] = load_flat<T, false, V>(x, i, n);
      }
    });
    wait_for_all(wx, wg, nothing);
    unroll<U>([&](int u) {
      Vec<A, V> g = unpack<A>(wg[u]), z = unpack<A>(wx[u]);
      const Vec<A, V> shift = unpack<A>(b);
      with_act<ACT, true>(act, [&](auto chosen) {
        unroll<V>([&](int j) {
          const A biased = z.v[j] + shift.v[j];
          g.v[j] = act_gradient<decltype(chosen)::value, sizeof(T) == 2>(g.v[j], biased, p);
          sum.v[j] += g.v[j];
          if constexpr (KEEP) z.v[j] = act_value<decltype(chosen)::value, sizeof(T) == 2>(biased, p);
        });
      });
      const int64_t i = first + u * me.step * c.columns;
      const auto store = [&](T* to, const Vec<A, V>& values) {
        if (whole) store_vec<T, V>(to + i, pack<T>(values));
        else store_flat<T, false, V>(to, i, n, pack<T>(values));
      };
      store(dx, g);
      if constexpr (KEEP) store(activated, z);
    });
  });
  me.store(c, sum, partial, sums);
}

}  // namespace

// ---- host ---------------------------------------------------------------------------------------------------------------

Tensor bias_act_forward_op(const Tensor& x_in, const MaybeTensor& bias_in, int64_t act_in, double first, double second) {
  const char* op = "bias_act_forward";
  const Act act = act_of(act_in, op, kActs);
  const Operand operand(x_in, bias_in, op);
  const Launch launch(x_in);
  Tensor out = operand.empty();
  const int64_t n = out.numel();
  if (n == 0) return with_strides(out, operand.sizes, operand.torch_strides);
  const MaybeTensor bias = made_contiguous(bias_in);
  dispatch_floating(x_in.scalar_type(), op, [&]<typename T>(T) {
    using A = compute_t<T>;
    const T* px = pointer<const T>(operand.x);
    const T* pb = pointer<const T>(bias);
    T* po = pointer<T>(out);
    const ActParameters<A> p{static_cast<A>(first), static_cast<A>(second)};
    with_compiled<T>(act, [&]<Act CHOSEN>(std::integral_constant<Act, CHOSEN>) {
      const auto plain = &bias_act_forward<T, CHOSEN, false>, biased = &bias_act_forward<T, CHOSEN, true>;
      if (!bias) return launch_flat<T, kForwardWords>(plain, n, launch, px, pb, po, n, aligned(px), false, Rows(), act, p);
      const bool words = operand.columns % kVector<T> == 0 && aligned(pb);
      for_rows(operand.rows, operand.columns, [&](int64_t row, int64_t share, const Rows& rows) {
        const T* from = px + row * operand.columns;
        T* to = po + row * operand.columns;
        launch_flat<T, kForwardWords>(biased, share, launch, from, pb, to, share, aligned(from) && aligned(to), words, rows, act, p);
      });
    });
  });
  return with_strides(out, operand.sizes, operand.torch_strides);
}

// The gradient of x; with dbias, the gradient of the bias in x's dtype or `dtype`; with keep, act(x + bias). relu passes its result as x
// and no bias, and may ask for the gradient of the bias all the same.
std::tuple<Tensor, Tensor, MaybeTensor> bias_act_gradients(const Tensor& dy_in, const Tensor& x_in, const MaybeTensor& bias_in,
                                                           int64_t act_in, double first, double second, bool dbias,
                                                           std::optional<ScalarType> dtype, bool keep) {
  const char* op = "bias_act_backward";
  const Act act = act_of(act_in, op, kActs);
  check_same_shape(x_in, dy_in, op, "dy");
  const bool sums = dbias || bias_in;
  const MaybeTensor bias = made_contiguous(bias_in);
  const Launch launch(x_in);
  FASTLAYERS_CHECK(!dbias || x_in.dim() > 0, op, "a tensor with no dimensions has no bias");
  const bool wide = dtype && *dtype != x_in.scalar_type();
  FASTLAYERS_CHECK(!wide || (x_in.element_size() == 2 && *dtype == ScalarType::Float), op,
                   "expected the gradient of the bias in x's dtype, or in float32 if x has 16 bits, but got ", toString(*dtype));
  const int64_t columns = dbias ? x_in.size(x_in.dim() - 1) : 0;
  Tensor db = empty_contiguous({columns}, wide ? *dtype : x_in.scalar_type(), x_in);
  MaybeTensor like = bias;  // what says that the last dimension has columns of their own
  if (!bias_in && dbias) like = wide ? empty_contiguous({columns}, x_in.scalar_type(), x_in) : db;
  Operand operand(x_in, like, op);
  const Tensor dy = with_strides(dy_in, operand.sizes, operand.strides);
  Tensor dx = operand.empty();
  MaybeTensor activated;
  if (keep) activated = operand.empty();
  const int64_t n = dx.numel();
  if (n == 0) {
    if (dbias) torch::stable::zero_(db);
    return {dx, db, activated};
  }
  dispatch_floating(x_in.scalar_type(), op, [&]<typename T>(T) {
    using A = compute_t<T>;
    constexpr int V = kVector<T>;
    const T* pg = pointer<const T>(dy);
    const T* px = pointer<const T>(operand.x);
    const T* pb = pointer<const T>(bias);
    T* pd = pointer<T>(dx);
    T* py = pointer<T>(activated);
    const ActParameters<A> p{static_cast<A>(first), static_cast<A>(second)};
    const bool flat = aligned(pg) && aligned(px);
    if (!sums) {
      with_compiled<T>(act, [&](auto compiled) {
        launch_flat<T, kBackwardWords>(&act_backward<T, decltype(compiled)::value>, n, launch, pg, px, pd, n, flat, act, p);
      });
      return;
    }
    const int64_t width = operand.columns;
    const auto run = [&]<int W>(Number<W>, int64_t rows_at_once) {
      Columns c = Columns::plan<A>(operand.rows / rows_at_once, width * rows_at_once, W, launch.device());
      c.ends_within = operand.rows % rows_at_once != 0;
      const int64_t pieces = c.pieces * rows_at_once;
      T* sums = pieces == 1 && dbias && !wide ? pointer<T>(db) : nullptr;
      Tensor partial = empty_partial<A>(sums ? 0 : pieces, width, dy);
      A* pp = pointer<A>(partial);
      constexpr bool WORDS = W > 1;
      with_compiled<T, WORDS>(act, [&]<Act CHOSEN>(std::integral_constant<Act, CHOSEN>) {
        const auto kernel = py ? &bias_act_backward_columns<T, W, CHOSEN, true> : &bias_act_backward_columns<T, W, CHOSEN, false>;
        const LaunchShape shape{c.blocks(), c.threads(), c.shared<A>(W)};
        launch_kernel(kernel, shape, launch, pg, px, pb, pd, py, pp, sums, n, width, c, act, p);
      });
      if (!dbias || sums) return;
      if (wide) launch_add_pieces<A>(partial, db.mutable_data_ptr(), 1, pieces, width, launch);
      else launch_add_pieces<T>(partial, db.mutable_data_ptr(), 1, pieces, width, launch);
    };
    if (flat) run(Number<V>{}, V / std::gcd<int64_t>(V, width));
    else run(Number<1>{}, 1);
  });
  return {dx, db, activated};
}

std::tuple<Tensor, Tensor> bias_act_backward_op(const Tensor& dy, const Tensor& x, const MaybeTensor& bias, int64_t act,
                                                double first, double second, bool dbias, std::optional<ScalarType> dtype) {
  const auto [dx, db, activated] = bias_act_gradients(dy, x, bias, act, first, second, dbias, dtype, false);
  return {dx, db};
}

}  // namespace fastlayers

STABLE_TORCH_LIBRARY_IMPL(fastlayers, CUDA, m) {
  m.impl("bias_act_forward", TORCH_BOX(&fastlayers::bias_act_forward_op));
  m.impl("bias_act_backward", TORCH_BOX(&fastlayers::bias_act_backward_op));
}

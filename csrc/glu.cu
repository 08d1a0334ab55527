// act(gate)·up, forward and backward, for two tensors or for the halves of one tensor along a dimension.
//
// The stock composition writes act(gate) and keeps it for backward besides gate and up. Here only the inputs are kept, and the backward
// recomputes act(gate) while it writes both gradients. The halves of a packed tensor are not copied: they are rows of it, and so are
// their gradients, which go to one packed tensor.
#include "common/activations.cuh"
#include "common/flat.cuh"
#include "glu.h"

namespace fastlayers {
namespace {

constexpr int kForwardWords = 2;   // of gate and up in flight a thread
constexpr int kBackwardWords = 2;  // of dy, gate and up

// The strides of the rows of the operands, less their length; see Rows.
struct Skips {
  int64_t gate = 0, up = 0, dgate = 0, dup = 0;
};

// whole: words lie within rows and on 16-byte boundaries.
template <typename T, Act ACT>
__global__ void __launch_bounds__(kThreads) gated_forward(const T* __restrict__ gate, const T* __restrict__ up, T* __restrict__ out,
                                                          int64_t n, bool whole, const Rows rows, const Skips skips, Act act) {
  using A = compute_t<T>;
  constexpr int V = kVector<T>;
  for_block<T, kForwardWords>(whole, n, [&]<int U>(Number<U>, int first) {
    constexpr bool WHOLE = U > 1;
    Vec<T, V> wg[U], wu[U];
    unroll<U>([&](int u) {
      const int64_t i = row_index<T, WHOLE, kForwardWords>(first + u), row = rows.row(i);
      wg[u] = load_rows<T, WHOLE>(gate, i, n, rows, row, skips.gate);
      wu[u] = load_rows<T, WHOLE>(up, i, n, rows, row, skips.up);
    });
    unroll<U>([&](int u) {
      Vec<A, V> r = unpack<A>(wg[u]);
      const Vec<A, V> by = unpack<A>(wu[u]);
      with_act<ACT, true>(act, [&](auto chosen) {
        unroll<V>([&](int j) { r.v[j] = act_value<decltype(chosen)::value, sizeof(T) == 2>(r.v[j]) * by.v[j]; });
      });
      store_rows<T, WHOLE>(out, row_index<T, WHOLE, kForwardWords>(first + u), n, rows, 0, 0, pack<T>(r));
    });
  });
}

// dgate may be dy: a thread has loaded its elements of dy before it stores these.
template <typename T, Act ACT>
__global__ void __launch_bounds__(kThreads) gated_backward(const T* dy, const T* __restrict__ gate, const T* __restrict__ up, T* dgate,
                                                           T* __restrict__ dup, int64_t n, bool whole, const Rows rows,
                                                           const Skips skips, Act act) {
  using A = compute_t<T>;
  constexpr int V = kVector<T>;
  for_block<T, kBackwardWords>(whole, n, [&]<int U>(Number<U>, int first) {
    constexpr bool WHOLE = U > 1;
    Vec<T, V> wd[U], wg[U], wu[U];
    unroll<U>([&](int u) {
      const int64_t i = row_index<T, WHOLE, kBackwardWords>(first + u), row = rows.row(i);
      wd[u] = load_rows<T, WHOLE>(dy, i, n, rows, row, 0);
      wg[u] = load_rows<T, WHOLE>(gate, i, n, rows, row, skips.gate);
      wu[u] = load_rows<T, WHOLE>(up, i, n, rows, row, skips.up);
    });
    unroll<U>([&](int u) {
      const Vec<A, V> d = unpack<A>(wd[u]);
      Vec<A, V> g = unpack<A>(wg[u]), by = unpack<A>(wu[u]);
      with_act<ACT, true>(act, [&]<Act CHOSEN>(std::integral_constant<Act, CHOSEN>) {
        unroll<V>([&](int j) {
          const A z = g.v[j];
          g.v[j] = act_gradient<CHOSEN, sizeof(T) == 2>(d.v[j] * by.v[j], z);
          by.v[j] = d.v[j] * act_value<CHOSEN, sizeof(T) == 2>(z);
        });
      });
      const int64_t i = row_index<T, WHOLE, kBackwardWords>(first + u), row = rows.row(i);
      store_rows<T, WHOLE>(dgate, i, n, rows, row, skips.dgate, pack<T>(g));
      store_rows<T, WHOLE>(dup, i, n, rows, row, skips.dup, pack<T>(by));
    });
  });
}

// ---- host ---------------------------------------------------------------------------------------------------------------

void run_forward(const std::array<View, 2>& operands, Tensor& out, const Layout& l, Act act, const Launch& launch) {
  dispatch_floating(out.scalar_type(), "gated_forward", [&]<typename T>(T) {
    for_rows(l.rows, l.columns, [&](int64_t row, int64_t n, const Rows& rows) {
      const T* pg = reinterpret_cast<const T*>(operands[0].data) + row * (l.columns + l.skips[0]);
      const T* pu = reinterpret_cast<const T*>(operands[1].data) + row * (l.columns + l.skips[1]);
      T* po = pointer<T>(out) + row * l.columns;
      const bool whole = l.words && aligned(pg) && aligned(pu) && aligned(po);
      with_compiled<T>(act, [&](auto compiled) {
        const auto kernel = &gated_forward<T, decltype(compiled)::value>;
        launch_flat<T, kForwardWords>(kernel, n, launch, pg, pu, po, n, whole, rows, Skips{l.skips[0], l.skips[1], 0, 0}, act);
      });
    });
  });
}

void run_backward(const Tensor& dy, const std::array<View, 4>& operands, const Layout& l, Act act, const Launch& launch) {
  dispatch_floating(dy.scalar_type(), "gated_backward", [&]<typename T>(T) {
    for_rows(l.rows, l.columns, [&](int64_t row, int64_t n, const Rows& rows) {
      const T* pd = pointer<const T>(dy) + row * l.columns;
      std::array<T*, 4> at;
      bool whole = l.words && aligned(pd);
      for (int k = 0; k < 4; ++k) {
        at[k] = reinterpret_cast<T*>(operands[k].data) + row * (l.columns + l.skips[k]);
        whole = whole && aligned(at[k]);
      }
      with_compiled<T>(act, [&](auto compiled) {
        const auto kernel = &gated_backward<T, decltype(compiled)::value>;
        const Skips skips{l.skips[0], l.skips[1], l.skips[2], l.skips[3]};
        launch_flat<T, kBackwardWords>(kernel, n, launch, pd, at[0], at[1], at[2], at[3], n, whole, rows, skips, act);
      });
    });
  });
}

}  // namespace
}  // namespace fastlayers

STABLE_TORCH_LIBRARY_IMPL(fastlayers, CUDA, m) {
  m.impl("gated_forward", TORCH_BOX(&fastlayers::gated_forward_op<fastlayers::Launch>));
  m.impl("gated_backward", TORCH_BOX(&fastlayers::gated_backward_op<fastlayers::Launch>));
  m.impl("gated_backward_", TORCH_BOX(&fastlayers::gated_backward_in_place_op<fastlayers::Launch>));
  m.impl("glu_forward", TORCH_BOX(&fastlayers::glu_forward_op<fastlayers::Launch>));
  m.impl("glu_backward", TORCH_BOX(&fastlayers::glu_backward_op<fastlayers::Launch>));
}

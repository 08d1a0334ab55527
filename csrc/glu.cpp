// act(gate)·up for CPU tensors, forward and backward, on torch's threads: one pass over memory each. What is kept and recomputed is that
// of the CUDA kernels (glu.cu).
#include "glu.h"

#include "common/vector_activations.h"

namespace fastlayers::glu {
namespace {

// Calls f(i, row, n) for the parts of rows between two elements: n elements from i on.
template <typename F>
FASTLAYERS_INLINE void for_parts(int64_t first, int64_t last, int64_t columns, F&& f) {
  for (int64_t i = first; i < last;) {
    const int64_t row = i / columns, n = std::min(last, (row + 1) * columns) - i;
    f(i, row, n);
    i += n;
  }
}

// out = act(gate)·up, from the element `first` of out to `last`.
template <typename T, typename ACT>
FASTLAYERS_CALLED void gate_parts(ACT act, const T* gate, const T* up, T* out, const Layout& l, int64_t first, int64_t last) {
  using A = compute_t<T>;
  const ActParameters<A> p = default_parameters<A>(act);
  for_parts(first, last, l.columns, [&](int64_t i, int64_t row, int64_t n) FASTLAYERS_LANES {
    const T *g = gate + i + row * l.skips[0], *u = up + i + row * l.skips[1];
    map<T, 2, 1>(n, {g, u}, {out + i}, [=](int64_t, const auto& v, auto& result) FASTLAYERS_LANES {
      result[0] = act_value<A, sizeof(T) == 2>(act, v[0], p) * v[1];
    });
  });
}

template <typename T>
struct Gradients {
  const T *dy, *gate, *up;
  T *dgate, *dup;  // dgate may be dy
};

template <typename T, typename ACT>
FASTLAYERS_CALLED void gradient_parts(ACT act, const Gradients<T>& of, const Layout& l, int64_t first, int64_t last) {
  using A = compute_t<T>;
  const ActParameters<A> p = default_parameters<A>(act);
  for_parts(first, last, l.columns, [&](int64_t i, int64_t row, int64_t n) FASTLAYERS_LANES {
    const T *d = of.dy + i, *g = of.gate + i + row * l.skips[0], *u = of.up + i + row * l.skips[1];
    T *dg = of.dgate + i + row * l.skips[2], *du = of.dup + i + row * l.skips[3];
    map<T, 3, 2>(n, {d, g, u}, {dg, du}, [=](int64_t, const auto& v, auto& results) FASTLAYERS_LANES {
      const Vector<A>&dy = v[0], &z = v[1], &by = v[2];
      results[0] = act_gradient<A, sizeof(T) == 2>(act, dy * by, z, p);
      results[1] = dy * act_value<A, sizeof(T) == 2>(act, z, p);
    });
  });
}

// What the loops need besides: nothing.
struct Threads {
  explicit Threads(const Tensor&) {}
};

void run_forward(const std::array<View, 2>& operands, Tensor& out, const Layout& l, Act act, const Threads&) {
  dispatch_floating(out.scalar_type(), "gated_forward", [&]<typename T>(T) {
    const T *gate = reinterpret_cast<const T*>(operands[0].data), *up = reinterpret_cast<const T*>(operands[1].data);
    T* to = pointer<T>(out);
    torch::stable::parallel_for(0, l.rows * l.columns, kGrain, [&](int64_t first, int64_t last) {
      with_act<T, true>(act, [&](auto chosen) { gate_parts<T>(chosen, gate, up, to, l, first, last); });
    });
  });
}

void run_backward(const Tensor& dy, const std::array<View, 4>& operands, const Layout& l, Act act, const Threads&) {
  dispatch_floating(dy.scalar_type(), "gated_backward", [&]<typename T>(T) {
    const auto at = [&](int k) { return reinterpret_cast<T*>(operands[k].data); };
    const Gradients<T> of{pointer<const T>(dy), at(0), at(1), at(2), at(3)};
    torch::stable::parallel_for(0, l.rows * l.columns, kGrain, [&](int64_t first, int64_t last) {
      with_act<T, true>(act, [&](auto chosen) { gradient_parts<T>(chosen, of, l, first, last); });
    });
  });
}

}  // namespace
}  // namespace fastlayers::glu

FASTLAYERS_CPU_KERNELS(glu, m) {
  m.impl("gated_forward", TORCH_BOX(&fastlayers::gated_forward_op<fastlayers::glu::Threads>));
  m.impl("gated_backward", TORCH_BOX(&fastlayers::gated_backward_op<fastlayers::glu::Threads>));
  m.impl("gated_backward_", TORCH_BOX(&fastlayers::gated_backward_in_place_op<fastlayers::glu::Threads>));
  m.impl("glu_forward", TORCH_BOX(&fastlayers::glu_forward_op<fastlayers::glu::Threads>));
  m.impl("glu_backward", TORCH_BOX(&fastlayers::glu_backward_op<fastlayers::glu::Threads>));
}

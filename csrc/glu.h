// What the CPU and the CUDA implementation of act(gate)·up share: all but the loops over rows. Where is what these need besides, made of
// an operand; they are run_forward and run_backward.
//
// The namespace has no name: each file that includes this has loops of its own.
#pragma once

#include "common/act.h"
#include "elementwise.h"

namespace fastlayers {
namespace {

// A tensor, or a half of one.
struct View {
  char* data;
  Dims strides;
};

// Halves of a tensor along a dimension.
struct Packed {
  Dims sizes;  // of a half
  View gate, up;

  Packed(void* data, const Tensor& t, int64_t dim, bool gate_first) : sizes(dims_of(t.sizes())) {
    sizes[dim] /= 2;
    const Dims strides = dims_of(t.strides());
    char* begin = static_cast<char*>(data);
    char* middle = begin + sizes[dim] * strides[dim] * static_cast<int64_t>(t.element_size());
    gate = {gate_first ? begin : middle, strides};
    up = {gate_first ? middle : begin, strides};
  }
};

inline int64_t checked_dim(const Tensor& t, int64_t dim, const char* op) {
  FASTLAYERS_CHECK(dim >= -t.dim() && dim < t.dim(), op, "dimension ", dim, " of a tensor of ", t.dim());
  if (dim < 0) dim += t.dim();
  FASTLAYERS_CHECK(t.size(dim) % 2 == 0, op, "expected an even size of dimension ", dim, ", but got ", t.size(dim));
  return dim;
}

// The operands as rows of a dense tensor of these sizes and strides.
struct Layout {
  int64_t rows = 1, columns = 1;
  std::array<int64_t, 4> skips{};
  bool words = true;  // no word spans two rows

  // Returns nothing if an operand has no such rows.
  template <int OPERANDS>
  static std::optional<Layout> of(const Dims& sizes, const Dims& strides, const std::array<View, OPERANDS>& operands, int64_t element) {
    std::array<Dims, OPERANDS + 1> all;
    all[0] = strides;
    for (int k = 0; k < OPERANDS; ++k) all[k + 1] = operands[k].strides;
    Walk<OPERANDS + 1> walk;
    if (!merge_dims<OPERANDS + 1>(sizes, memory_order(sizes, {&strides}), all, walk) || walk.dims > 2) return std::nullopt;
    if (walk.dims == 1 && std::any_of(walk.stride + 1, walk.stride + OPERANDS + 1, [](const int64_t* s) { return s[0] != 1; })) {
      walk.size[walk.dims] = 1;  // rows of one element
      ++walk.dims;
    }
    const int last = walk.dims - 1;
    Layout layout;
    layout.columns = walk.size[last];
    if (walk.dims == 2) layout.rows = walk.size[0];
    const int64_t vector = kVectorBytes / element;
    for (int k = 0; k < OPERANDS; ++k) {
      if (layout.columns > 1 && walk.stride[k + 1][last] != 1) return std::nullopt;
      if (walk.dims == 2) layout.skips[k] = walk.stride[k + 1][0] - layout.columns;
      layout.words = layout.words && layout.skips[k] % vector == 0;
    }
    layout.words = layout.words && (layout.rows == 1 || layout.columns % vector == 0);
    return layout;
  }
};

// The layout of the operands; where they are not rows, of what `copy` puts in their place.
template <int OPERANDS, typename Copy>
Layout layout_of(const Dims& sizes, const Dims& strides, std::array<View, OPERANDS>& operands, const Tensor& like, Copy&& copy) {
  const auto element = static_cast<int64_t>(like.element_size());
  if (const auto layout = Layout::of<OPERANDS>(sizes, strides, operands, element)) return *layout;
  copy();
  const auto layout = Layout::of<OPERANDS>(sizes, strides, operands, element);
  STD_TORCH_CHECK(layout.has_value(), "fastlayers: the operands of a gate are not rows");
  return *layout;
}

inline View view_of(const Tensor& t) { return {const_cast<char*>(pointer<const char>(t)), dims_of(t.strides())}; }
inline View result_view(const Tensor& t) { return {pointer<char>(t), dims_of(t.strides())}; }

// The layout of torch's result.
inline Dims gated_strides(const Tensor& gate, const Tensor& up) {
  const Dims sizes = dims_of(gate.sizes());
  if (gate.is_contiguous() && up.is_contiguous()) return contiguous_strides(sizes);
  return relu_add_strides(sizes, dims_of(gate.strides()), dims_of(up.strides()));
}

// act(gate)·up of two tensors of one shape.
template <typename Where>
Tensor gated_forward_op(const Tensor& gate_in, const Tensor& up_in, int64_t act_in) {
  const char* op = "gated_forward";
  const Act act = act_of(act_in, op, kActs);
  check_same_shape(gate_in, up_in, op, "up");
  const Where where(gate_in);
  const Dims sizes = dims_of(gate_in.sizes()), strides = gated_strides(gate_in, up_in);
  Tensor out = empty_strided(sizes, strides, gate_in.scalar_type(), gate_in);
  if (out.numel() == 0) return out;
  MaybeTensor gate, up;  // copies, until the launch
  std::array<View, 2> operands{view_of(gate_in), view_of(up_in)};
  const Layout layout = layout_of<2>(sizes, strides, operands, gate_in, [&] {
    gate = with_strides(gate_in, sizes, strides);
    up = with_strides(up_in, sizes, strides);
    operands = {view_of(*gate), view_of(*up)};
  });
  run_forward(operands, out, layout, act, where);
  return out;
}

// The gradient of up, in a new tensor of these strides, and the gradient of gate, written to dgate, which has these strides too. dgate
// may be dy.
template <typename Where>
Tensor run_gated_backward(const Tensor& dy_in, const Tensor& gate_in, const Tensor& up_in, const Tensor& dgate, const Dims& strides,
                          Act act, const Where& where) {
  const Dims sizes = dims_of(gate_in.sizes());
  Tensor dup = empty_strided(sizes, strides, gate_in.scalar_type(), gate_in);
  if (dup.numel() == 0) return dup;
  const Tensor dy = with_strides(dy_in, sizes, strides);
  MaybeTensor gate, up;
  std::array<View, 4> operands{view_of(gate_in), view_of(up_in), result_view(dgate), result_view(dup)};
  const Layout layout = layout_of<4>(sizes, strides, operands, gate_in, [&] {
    gate = with_strides(gate_in, sizes, strides);
    up = with_strides(up_in, sizes, strides);
    operands[0] = view_of(*gate);
    operands[1] = view_of(*up);
  });
  run_backward(dy, operands, layout, act, where);
  return dup;
}

// The gradients of gate and up.
template <typename Where>
std::tuple<Tensor, Tensor> gated_backward_op(const Tensor& dy, const Tensor& gate, const Tensor& up, int64_t act_in) {
  const char* op = "gated_backward";
  const Act act = act_of(act_in, op, kActs);
  check_same_shape(gate, up, op, "up");
  check_same_shape(gate, dy, op, "dy");
  const Where where(gate);
  const Dims strides = gated_strides(gate, up);
  Tensor dgate = empty_strided(dims_of(gate.sizes()), strides, gate.scalar_type(), gate);
  return {dgate, run_gated_backward(dy, gate, up, dgate, strides, act, where)};
}

// The gradient of up. The gradient of gate is written to dy.
template <typename Where>
Tensor gated_backward_in_place_op(const Tensor& dy, const Tensor& gate, const Tensor& up, int64_t act_in) {
  const char* op = "gated_backward_";
  const Act act = act_of(act_in, op, kActs);
  check_same_shape(gate, up, op, "up");
  check_same_shape(gate, dy, op, "dy");
  FASTLAYERS_CHECK(dy.is_contiguous(), op, "expected a contiguous dy to write to");
  return run_gated_backward(dy, gate, up, dy, contiguous_strides(dims_of(gate.sizes())), act, Where(gate));
}

// act(gate)·up of the halves of x along dim. The first half is the gate if gate_first.
template <typename Where>
Tensor glu_forward_op(const Tensor& x_in, int64_t dim, int64_t act_in, bool gate_first) {
  const char* op = "glu_forward";
  const Act act = act_of(act_in, op, kActs);
  dim = checked_dim(x_in, dim, op);
  const Where where(x_in);
  const auto halves = [&](const Tensor& x) { return Packed(const_cast<void*>(x.const_data_ptr()), x, dim, gate_first); };
  const Packed packed = halves(x_in);
  const Dims strides = relu_add_strides(packed.sizes, packed.gate.strides, packed.up.strides), full = dims_of(x_in.sizes());
  Tensor out = empty_strided(packed.sizes, strides, x_in.scalar_type(), x_in);
  if (out.numel() == 0) return out;
  MaybeTensor x;  // a copy, until the launch
  std::array<View, 2> operands{packed.gate, packed.up};
  const Layout layout = layout_of<2>(packed.sizes, strides, operands, x_in, [&] {
    // As one dense tensor in the order of the result, whose halves are rows.
    x = with_strides(x_in, full, dense_strides(full, memory_order(packed.sizes, {&strides})));
    const Packed copied = halves(*x);
    operands = {copied.gate, copied.up};
  });
  run_forward(operands, out, layout, act, where);
  return out;
}

// The gradient of x.
template <typename Where>
Tensor glu_backward_op(const Tensor& dy_in, const Tensor& x_in, int64_t dim, int64_t act_in, bool gate_first) {
  const char* op = "glu_backward";
  const Act act = act_of(act_in, op, kActs);
  dim = checked_dim(x_in, dim, op);
  check_same(x_in, dy_in, op, "dy");
  const Where where(x_in);
  const auto halves = [&](const Tensor& x) { return Packed(const_cast<void*>(x.const_data_ptr()), x, dim, gate_first); };
  const Packed packed = halves(x_in);
  FASTLAYERS_CHECK(dims_of(dy_in.sizes()) == packed.sizes, op, "expected dy with the shape of a half of x");
  const Dims strides = relu_add_strides(packed.sizes, packed.gate.strides, packed.up.strides), full = dims_of(x_in.sizes());
  const Dims packed_strides = dense_strides(full, memory_order(packed.sizes, {&strides}));
  Tensor dx = empty_strided(full, packed_strides, x_in.scalar_type(), x_in);
  if (dx.numel() == 0) return dx;
  const Tensor dy = with_strides(dy_in, packed.sizes, strides);
  const Packed gradients(dx.mutable_data_ptr(), dx, dim, gate_first);
  MaybeTensor x;
  std::array<View, 4> operands{packed.gate, packed.up, gradients.gate, gradients.up};
  const Layout layout = layout_of<4>(packed.sizes, strides, operands, x_in, [&] {
    x = with_strides(x_in, full, packed_strides);
    const Packed copied = halves(*x);
    operands[0] = copied.gate;
    operands[1] = copied.up;
  });
  run_backward(dy, operands, layout, act, where);
  return dx;
}

}  // namespace
}  // namespace fastlayers

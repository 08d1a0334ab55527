// What the CPU and the CUDA implementation of the rotary embedding share: what is checked and allocated, how tables step along an operand, and
// the types of kernels.
#pragma once

#include "common/dispatch.h"

namespace fastlayers {
namespace {

inline void check_operands(const Tensor& q, const MaybeTensor& k, const Tensor& cos, const Tensor& sin, int64_t rotary_dim, int64_t head) {
  const int64_t dims = q.dim(), dim = dims > 0 ? q.size(-1) : 0, width = cos.dim() > 0 ? cos.size(-1) : 0;
  FASTLAYERS_CHECK(rotary_dim > 0 && rotary_dim % 2 == 0 && rotary_dim <= dim && dim <= INT32_MAX, "rotary",
                   "expected an even rotary_dim of at most ", dim, ", but got ", rotary_dim);
  FASTLAYERS_CHECK((width == rotary_dim || 2 * width == rotary_dim) && sin.dim() > 0 && sin.size(-1) == width, "rotary",
                   "expected tables with ", rotary_dim, " or ", rotary_dim / 2, " columns, but got ", width);
  FASTLAYERS_CHECK(head < dims - 1, "rotary", "expected the dimension of the heads before the last one");
  FASTLAYERS_CHECK(cos.scalar_type() == sin.scalar_type(), "rotary", "expected cos and sin of one dtype");
  check_device(q, cos, "rotary", "cos");
  check_device(q, sin, "rotary", "sin");
  if (!k) return;
  check_same(q, *k, "rotary", "k");
  FASTLAYERS_CHECK(k->dim() == dims, "rotary", "expected q and k with the same number of dimensions");
  for (int64_t d = 0; d < dims; ++d)
    FASTLAYERS_CHECK(d == head || q.size(d) == k->size(d), "rotary", "q and k differ in dimension ", d);
}

// Memory for the results of q and k, with these strides. Without k the second is empty.
inline std::tuple<Tensor, Tensor> empty_results(const Tensor& q, const MaybeTensor& k, const Dims& q_strides, const Dims& k_strides,
                                                ScalarType dtype) {
  const Dims q_sizes = dims_of(q.sizes()), k_sizes = k ? dims_of(k->sizes()) : Dims{0};
  FASTLAYERS_CHECK(q_strides.size() == q_sizes.size() && k_strides.size() == k_sizes.size(), "rotary",
                   "expected a stride for each dimension of the results");
  return {empty_strided(q_sizes, q_strides, dtype, q), empty_strided(k_sizes, k_strides, dtype, q)};
}

// The strides of a table for the dimensions of an operand before the last: 0 where it repeats.
inline Dims table_strides(const Tensor& table, const Dims& sizes, const char* name) {
  Dims strides(sizes.size() - 1, 0);
  const int64_t shift = static_cast<int64_t>(sizes.size()) - table.dim();
  FASTLAYERS_CHECK(shift >= 0, "rotary", name, " has more dimensions than q");
  for (int64_t d = 0; d + 1 < table.dim(); ++d) {
    if (table.size(d) == 1) continue;
    FASTLAYERS_CHECK(table.size(d) == sizes[d + shift], "rotary", name, " has size ", table.size(d), " where q has ",
                     sizes[d + shift]);
    strides[d + shift] = table.stride(d);
  }
  return strides;
}

// A step of an operand and of the tables along one of its dimensions.
struct Axis {
  int64_t size = 1, in = 0, out = 0, cos = 0, sin = 0;
};

inline Tensor with_rows(const Tensor& t) { return t.stride(-1) == 1 || t.size(-1) == 1 ? t : torch::stable::contiguous(t); }

// Calls f(In{}, Table{}, Out{}): one type for all, or float32 tables with 16-bit operands or results.
template <typename F>
void dispatch_types(ScalarType in, ScalarType table, ScalarType out, F&& f) {
  if (in == table && out == table) return dispatch_floating(in, "rotary", [&](auto zero) { f(zero, zero, zero); });
  const bool low = is_low_precision(in), widens = low && out == ScalarType::Float;
  const bool narrows = in == ScalarType::Float && is_low_precision(out);
  FASTLAYERS_CHECK(table == ScalarType::Float && (narrows || widens || (low && out == in)), "rotary", "tables of ", toString(table),
                   " do not go with operands of ", toString(in), " and results of ", toString(out));
  const auto of = [&](auto zero) {
    if (narrows) f(0.f, 0.f, zero);
    else if (widens) f(zero, 0.f, 0.f);
    else f(zero, 0.f, zero);
  };
  if ((narrows ? out : in) == ScalarType::Half) of(Half{});
  else of(BFloat16{});
}

}  // namespace
}  // namespace fastlayers

// Rotary embedding of queries and keys on CPU tensors, and its gradient, on torch's threads: each tensor is read once and written once,
// where stock PyTorch makes five passes. The gradient is that of the CUDA kernel (rotary.cu).
#include "rotary.h"

#include "common/vector.h"

namespace fastlayers::rotary {
namespace {

constexpr int kOuter = 3;  // dimensions but the last

// q or k with its result. The axes are slowest first in the memory of the result.
struct Operand {
  const void* in;
  void* out;
  Axis axes[kOuter];
  int64_t rows = 1;
};

struct Args {
  const void *cos, *sin;
  int64_t dim, pairs;  // elements of a row, and pairs of them that rotate
  bool half_tables;    // one entry a pair
  bool backward;
};

// Lanes with those of each two neighbours exchanged.
FASTLAYERS_INLINE vectors::Floats exchanged(const vectors::Floats& v) {
  typedef uint64_t Pairs __attribute__((vector_size(kVectorWidth)));
  const Pairs pairs = bits_as<Pairs>(v);
  return bits_as<vectors::Floats>(pairs << 32 | pairs >> 32);
}
FASTLAYERS_INLINE vectors::Doubles exchanged(const vectors::Doubles& v) {
  vectors::Doubles result;
  for (int i = 0; i < kLanes<double>; ++i) result[i] = v[i ^ 1];
  return result;
}

// The first count / 2 entries of a table, each of them twice.
template <typename T, typename A>
FASTLAYERS_INLINE Vector<A> load_twice(const T* from, int64_t count) {
  T twice[kLanes<A>] = {};
  for (int64_t i = 0; i < count; ++i) twice[i] = from[i / 2];
  return load<T, A>(twice);
}

// What one lane in two is multiplied by: 1 for the even ones and -1 for the odd ones, or the other way round.
template <typename A>
FASTLAYERS_INLINE Vector<A> alternating(A even) {
  Vector<A> signs;
  for (int i = 0; i < kLanes<A>; ++i) signs[i] = i % 2 == 0 ? even : -even;
  return signs;
}

// Sides of pairs are neighbours: r = x·cos ± exchanged(x)·sin, where sin is exchanged for the gradient.
template <typename In, typename Table, typename Out>
FASTLAYERS_INLINE void rotate_neighbours(const In* in, const Table* cos, const Table* sin, Out* out, const Args& a) {
  using A = compute_t<Out>;
  const Vector<A> signs = alternating<A>(a.backward ? A(1) : A(-1));
  for_vectors<A>(2 * a.pairs, [&](int64_t i, auto lanes) FASTLAYERS_LANES {
    const int64_t left = std::min<int64_t>(2 * a.pairs - i, kLanes<A>);
    const Vector<A> x = lanes.load(in + i);
    const Vector<A> c = a.half_tables ? load_twice<Table, A>(cos + i / 2, left) : lanes.load(cos + i);
    const Vector<A> s = a.half_tables ? load_twice<Table, A>(sin + i / 2, left) : lanes.load(sin + i);
    lanes.store(out + i, x * c + exchanged(x) * ((a.backward ? exchanged(s) : s) * signs));
  });
}

// Sides of pairs are half of the rotating part apart.
template <typename In, typename Table, typename Out>
FASTLAYERS_INLINE void rotate_halves(const In* in, const Table* cos, const Table* sin, Out* out, const Args& a) {
  using A = compute_t<Out>;
  const int64_t n = a.pairs, other = a.half_tables ? 0 : n;
  const Table *sin1 = sin + (a.backward ? other : 0), *sin2 = sin + (a.backward ? 0 : other), *cos2 = cos + other;
  const A sign = a.backward ? A(-1) : A(1);
  const auto rotate = [&](int64_t, const auto& v, auto& r) FASTLAYERS_LANES {
    r[0] = v[0] * v[2] - v[1] * (v[4] * sign);
    r[1] = v[1] * v[3] + v[0] * (v[5] * sign);
  };
  if constexpr (std::is_same_v<In, Table> && std::is_same_v<Table, Out>) {
    map<In, 6, 2, true>(n, {in, in + n, cos, cos2, sin1, sin2}, {out, out + n}, rotate);
  } else {
    for_vectors<A>(n, [&](int64_t i, auto lanes) FASTLAYERS_LANES {
      const Vector<A> v[] = {lanes.load(in + i),   lanes.load(in + n + i), lanes.load(cos + i),
                             lanes.load(cos2 + i), lanes.load(sin1 + i),   lanes.load(sin2 + i)};
      Vector<A> r[2];
      rotate(i, v, r);
      lanes.store(out + i, r[0]);
      lanes.store(out + n + i, r[1]);
    });
  }
}

template <typename In, typename Table, typename Out, bool INTERLEAVED>
void rotate_rows(const Operand& x, const Args& a, int64_t first, int64_t last) {
  using A = compute_t<Out>;
  int64_t at[kOuter];
  for (int64_t d = kOuter - 1, rest = first; d >= 0; --d) {
    at[d] = rest % x.axes[d].size;
    rest /= x.axes[d].size;
  }
  for (int64_t row = first; row < last; ++row) {
    const In* in = static_cast<const In*>(x.in);
    Out* out = static_cast<Out*>(x.out);
    const Table *cos = static_cast<const Table*>(a.cos), *sin = static_cast<const Table*>(a.sin);
    for (int d = 0; d < kOuter; ++d) {
      in += at[d] * x.axes[d].in, out += at[d] * x.axes[d].out;
      cos += at[d] * x.axes[d].cos, sin += at[d] * x.axes[d].sin;
    }
    if constexpr (INTERLEAVED) rotate_neighbours<In, Table, Out>(in, cos, sin, out, a);
    else rotate_halves<In, Table, Out>(in, cos, sin, out, a);
    for_vectors<A>(a.dim - 2 * a.pairs, [&](int64_t i, auto lanes) FASTLAYERS_LANES {
      lanes.store(out + 2 * a.pairs + i, lanes.load(in + 2 * a.pairs + i));
    });
    for (int d = kOuter - 1; d >= 0 && ++at[d] == x.axes[d].size; --d) at[d] = 0;
  }
}

Operand arrange(const Tensor& in, const Tensor& out, const Tensor& cos, const Tensor& sin) {
  const Dims sizes = dims_of(in.sizes()), cos_strides = table_strides(cos, sizes, "cos"), sin_strides = table_strides(sin, sizes, "sin");
  Operand x{in.const_data_ptr(), out.mutable_data_ptr(), {}};
  int found = 0;
  for (int64_t d = 0; d + 1 < in.dim(); ++d) {
    if (sizes[d] == 1) continue;
    FASTLAYERS_CHECK(found < kOuter, "rotary", "expected at most ", kOuter, " dimensions besides the last one");
    x.axes[found++] = {sizes[d], in.stride(d), out.stride(d), cos_strides[d], sin_strides[d]};
    x.rows *= sizes[d];
  }
  std::sort(x.axes, x.axes + found, [](const Axis& one, const Axis& two) { return one.out > two.out; });
  return x;
}

std::tuple<Tensor, Tensor> rotary(const Tensor& q_in, const MaybeTensor& k_in, const Tensor& cos_in, const Tensor& sin_in, bool interleaved,
                                  int64_t rotary_dim, bool backward, ScalarType dtype, int64_t head, std::vector<int64_t> q_strides,
                                  std::vector<int64_t> k_strides) {
  check_operands(q_in, k_in, cos_in, sin_in, rotary_dim, head);
  const auto [q_out, k_out] = empty_results(q_in, k_in, q_strides, k_strides, dtype);
  if (q_in.numel() == 0) return {q_out, k_out};
  const Tensor cos = with_rows(cos_in), sin = with_rows(sin_in);
  const Args a{cos.const_data_ptr(), sin.const_data_ptr(), q_in.size(-1), rotary_dim / 2, cos.size(-1) != rotary_dim, backward};
  const auto rotate = [&](const Tensor& x_in, const Tensor& out) {
    const Tensor x = with_rows(x_in);
    const Operand operand = arrange(x, out, cos, sin);
    dispatch_types(x.scalar_type(), cos.scalar_type(), dtype, [&](auto in, auto table, auto result) {
      const auto rows = interleaved ? &rotate_rows<decltype(in), decltype(table), decltype(result), true>
                                    : &rotate_rows<decltype(in), decltype(table), decltype(result), false>;
      torch::stable::parallel_for(0, operand.rows, std::max<int64_t>(1, kGrain / a.dim),
                                  [&](int64_t first, int64_t last) { rows(operand, a, first, last); });
    });
  };
  rotate(q_in, q_out);
  if (k_in) rotate(*k_in, k_out);
  return {q_out, k_out};
}

}  // namespace
}  // namespace fastlayers::rotary

FASTLAYERS_CPU_KERNELS(rotary, m) { m.impl("rotary", TORCH_BOX(&fastlayers::rotary::rotary)); }

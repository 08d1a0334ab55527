// Rotary embedding of queries and keys, x·cos + rotate(x)·sin, and its gradient: both tensors in one launch.
//
// Stock PyTorch makes five passes over each tensor. Here each is read once and written once. The tables of cosines and sines have a row
// for each position, the same for all heads. A thread takes the same words of several heads and reads the tables once for all of them:
// the tables come from the cache, but read for each head they would be twice its own traffic.
//
// Elements rotate in pairs. The sides of a pair are half of the rotated part apart, or neighbours (INTERLEAVED). The gradient rotates
// back: it is the same computation with the sines of a pair exchanged and negated, which is right for any tables.
#include "common/device.cuh"
#include "rotary.h"

namespace fastlayers {
namespace {

constexpr int kThreads = 256;
template <bool INTERLEAVED>
constexpr int kHeads = INTERLEAVED ? 4 : 2;  // of a thread, whose loads are in flight together: one word of each, or two
constexpr int kOuter = 3;  // dimensions but the last, as the kernel walks them

// q or k with its result. A thread has the heads g, g + groups, ..., so that neighbouring groups read neighbouring memory if the heads of
// a position lie together. The outer dimensions are, slowest first, a position, then the other position and the group in their memory
// order. Strides count elements.
struct Operand {
  const void* in = nullptr;
  void* out = nullptr;
  int64_t threads = 0;
  int64_t in_stride[kOuter] = {}, out_stride[kOuter] = {}, cos_stride[kOuter] = {}, sin_stride[kOuter] = {};
  int64_t in_step = 0, out_step = 0;  // from one head of a thread to its next
  int64_t middle = 1, fastest = 1;    // sizes of the last two outer dimensions
  Divider by_middle, by_fastest;
  int heads = 1, groups = 1;
  bool group_fastest = false;
};

struct Args {
  Operand x[2];
  unsigned blocks = 0;  // of the first operand
  const void *cos = nullptr, *sin = nullptr;
  int dim = 0;                  // elements of a row
  int pairs = 0;                // that rotate
  int rotating = 0, units = 0;  // units of a row that rotate, and all of it
  Divider by_units;
  bool half_tables = false;  // one entry a pair
  bool backward = false;
  bool wide = false;  // more threads than 31 bits count
};

// Where the first or second side of pair j of N is among 2N elements.
template <bool INTERLEAVED, int N>
__host__ __device__ constexpr int side(int which, int j) { return INTERLEAVED ? 2 * j + which : which * N + j; }

// A unit is N elements from `first` and N from `second`. Loads have no condition: a branch would wait for its load, and the loads of a
// thread would follow one another.
template <typename T, int N, bool INTERLEAVED>
__device__ __forceinline__ Vec<T, 2 * N> load_unit(const T* p, int first, int second) {
  if constexpr (INTERLEAVED && N > 1) {
    return load_vec<T, 2 * N>(p + first);
  } else {
    const Vec<T, N> one = load_vec<T, N>(p + first), two = load_vec<T, N>(p + second);
    Vec<T, 2 * N> unit;
    unroll<N>([&](int j) { unit.v[j] = one.v[j], unit.v[N + j] = two.v[j]; });
    return unit;
  }
}

template <typename T, int N, bool INTERLEAVED>
__device__ __forceinline__ void store_unit(T* p, int first, int second, bool both, const Vec<T, 2 * N>& unit) {
  if constexpr (INTERLEAVED && N > 1) {
    store_vec<T, 2 * N>(p + first, unit);
  } else {
    Vec<T, N> one, two;
    unroll<N>([&](int j) { one.v[j] = unit.v[j], two.v[j] = unit.v[N + j]; });
    store_vec<T, N>(p + first, one);
    if (both) store_vec<T, N>(p + second, two);
  }
}

// The entries of a table row for the elements of a unit: N elements at a time, and the same ones twice from half tables.
template <typename T, int N, bool INTERLEAVED>
__device__ __forceinline__ Vec<T, 2 * N> load_table(const T* row, int unit, const Args& a) {
  const bool half = a.half_tables;
  const int first = INTERLEAVED && !half ? 2 * N * unit : N * unit;
  const Vec<T, 2 * N> flat = load_unit<T, N, false>(row, first, half ? first : first + (INTERLEAVED ? N : a.pairs));
  if constexpr (INTERLEAVED) {
    Vec<T, 2 * N> of_both;
    unroll<2 * N>([&](int j) { of_both.v[j] = half ? flat.v[j / 2] : flat.v[j]; });
    return of_both;
  } else {
    return flat;
  }
}

// In is the type of x, and Out is the type of the result. Units have N pairs. The units after the rotating ones pass through.
template <typename In, typename Table, typename Out, int N, bool INTERLEAVED>
__global__ void __launch_bounds__(kThreads) rotate(const __grid_constant__ Args a) {
  using A = compute_t<Out>;
  const bool is_first = blockIdx.x < a.blocks;
  const Operand& x = a.x[is_first ? 0 : 1];
  const unsigned block = is_first ? blockIdx.x : blockIdx.x - a.blocks;

  int unit;
  int64_t outer[kOuter];
  if (a.wide) {
    const int64_t thread = static_cast<int64_t>(block) * kThreads + threadIdx.x;
    if (thread >= x.threads) return;
    const int64_t row = thread / a.units, above = row / x.fastest;
    unit = static_cast<int>(thread - row * a.units);
    outer[2] = row - above * x.fastest;
    outer[0] = above / x.middle;
    outer[1] = above - outer[0] * x.middle;
  } else {
    const uint32_t thread = block * kThreads + threadIdx.x;
    if (thread >= static_cast<uint32_t>(x.threads)) return;
    const uint32_t row = a.by_units.quotient(thread), above = x.by_fastest.quotient(row), slowest = x.by_middle.quotient(above);
    unit = static_cast<int>(thread - row * a.by_units.divisor);
    outer[2] = row - above * x.by_fastest.divisor;
    outer[1] = above - slowest * x.by_middle.divisor;
    outer[0] = slowest;
  }
  const auto offset = [&](const int64_t(&stride)[kOuter]) {
    return outer[0] * stride[0] + outer[1] * stride[1] + outer[2] * stride[2];
  };
  const int group = static_cast<int>(x.group_fastest ? outer[2] : outer[1]);
  const auto has = [&](int i) { return group + i * x.groups < x.heads; };
  const bool rotates = unit < a.rotating;
  const bool apart = !INTERLEAVED && rotates;
  // Before a unit whose elements are neighbours lie 2N elements for each unit before it, rotating ones or not.
  const int first = (apart ? N : 2 * N) * unit, second = first + (apart ? a.pairs : N);
  const bool both = rotates || second < a.dim;  // half a unit may be the last of a row
  const In* in = static_cast<const In*>(x.in) + offset(x.in_stride);
  Out* out = static_cast<Out*>(x.out) + offset(x.out_stride);

  Vec<In, 2 * N> v[kHeads<INTERLEAVED>];
  unroll<kHeads<INTERLEAVED>>([&](int i) {
    v[i] = load_unit<In, N, INTERLEAVED>(in + (has(i) ? i * x.in_step : 0), first, both ? second : first);
  });

  const int column = rotates ? unit : 0;
  Vec<Table, 2 * N> cos = load_table<Table, N, INTERLEAVED>(static_cast<const Table*>(a.cos) + offset(x.cos_stride), column, a);
  Vec<Table, 2 * N> sin = load_table<Table, N, INTERLEAVED>(static_cast<const Table*>(a.sin) + offset(x.sin_stride), column, a);

  if (!rotates) {
    unroll<kHeads<INTERLEAVED>>([&](int i) {
      if (has(i)) store_unit<Out, N, INTERLEAVED>(out + i * x.out_step, first, second, both, pack<Out>(unpack<A>(v[i])));
    });
    return;
  }
  if (a.backward) {
    const Vec<Table, 2 * N> turned = negated(sin);
    unroll<2 * N>([&](int j) { sin.v[side<INTERLEAVED, N>(j / N, j % N)] = turned.v[side<INTERLEAVED, N>(1 - j / N, j % N)]; });
  }
  unroll<kHeads<INTERLEAVED>>([&](int i) {
    if (!has(i)) return;
    forget(cos);
    forget(sin);
    const Vec<A, 2 * N> c = unpack<A>(cos), s = unpack<A>(sin);
    const Vec<A, 2 * N> w = unpack<A>(v[i]);
    Vec<A, 2 * N> r;
    unroll<N>([&](int j) {
      const int one = side<INTERLEAVED, N>(0, j), two = side<INTERLEAVED, N>(1, j);
      r.v[one] = w.v[one] * c.v[one] - w.v[two] * s.v[one];
      r.v[two] = w.v[two] * c.v[two] + w.v[one] * s.v[two];
    });
    store_unit<Out, N, INTERLEAVED>(out + i * x.out_step, first, second, both, pack<Out>(r));
  });
}

// ---- host ---------------------------------------------------------------------------------------------------------------

Operand arrange(const Tensor& in, const Tensor& out, const Dims& cos, const Dims& sin, int64_t head, int units, int each) {
  Axis heads, positions[2];
  int found = 0;
  for (int64_t d = 0; d + 1 < in.dim(); ++d) {
    const Axis axis{in.size(d), in.stride(d), out.stride(d), cos[d], sin[d]};
    if (d == head) heads = axis;
    else if (axis.size > 1) {
      FASTLAYERS_CHECK(found < 2, "rotary", "expected at most two dimensions besides the last one and the heads");
      positions[found++] = axis;
    }
  }
  FASTLAYERS_CHECK(heads.cos == 0 && heads.sin == 0, "rotary", "the tables differ from head to head");
  if (found < 2) std::swap(positions[0], positions[1]);  // a single one is the second
  else if (positions[0].out < positions[1].out) std::swap(positions[0], positions[1]);

  Operand x;
  x.heads = static_cast<int>(heads.size);
  x.groups = static_cast<int>(ceil_div(heads.size, each));
  x.in_step = heads.in * x.groups;
  x.out_step = heads.out * x.groups;
  x.group_fastest = positions[1].size == 1 || heads.out < positions[1].out;
  const Axis groups{x.groups, heads.in, heads.out, 0, 0};
  const Axis walked[kOuter] = {positions[0], x.group_fastest ? positions[1] : groups, x.group_fastest ? groups : positions[1]};
  for (int d = 0; d < kOuter; ++d) {
    x.in_stride[d] = walked[d].in;
    x.out_stride[d] = walked[d].out;
    x.cos_stride[d] = walked[d].cos;
    x.sin_stride[d] = walked[d].sin;
  }
  x.middle = walked[1].size;
  x.fastest = walked[2].size;
  x.threads = walked[0].size * x.middle * x.fastest * units;
  x.in = in.const_data_ptr();
  x.out = out.mutable_data_ptr();
  return x;
}

// Whether all rows of t start where words of so many elements may.
bool starts_words(const Tensor& t, int64_t elements) {
  const int64_t bytes = std::min<int64_t>(kVectorBytes, elements * static_cast<int64_t>(t.element_size()));
  if (reinterpret_cast<uintptr_t>(t.const_data_ptr()) % bytes != 0) return false;
  for (int64_t d = 0; d + 1 < t.dim(); ++d)
    if (t.size(d) > 1 && t.stride(d) % elements != 0) return false;
  return true;
}

// q, k and the tables of a call, with the results. Where there is no k, it is the empty k_out.
struct Call {
  Tensor q, k, q_out, k_out, cos, sin;
  int64_t head;  // the dimension of the heads, -1 for none
  bool interleaved;

  // Whether units of n pairs are whole words of every tensor.
  bool has_words(const Args& a, int64_t n) const {
    const int64_t elements = interleaved ? 2 * n : n, of_tables = interleaved && !a.half_tables ? 2 * n : n;
    const bool k_has = k.numel() == 0 || (starts_words(k, elements) && starts_words(k_out, elements));
    return a.pairs % n == 0 && a.dim % elements == 0 && starts_words(q, elements) && starts_words(q_out, elements) && k_has &&
           starts_words(cos, of_tables) && starts_words(sin, of_tables);
  }

  template <typename In, typename Table, typename Out, int N, bool INTERLEAVED>
  void run(Args& a, const Launch& launch) const {
    const Dims sizes = dims_of(q.sizes()), cos_strides = table_strides(cos, sizes, "cos"), sin_strides = table_strides(sin, sizes, "sin");
    a.rotating = a.pairs / N;
    a.units = static_cast<int>(ceil_div(a.dim, 2 * N));
    a.x[0] = arrange(q, q_out, cos_strides, sin_strides, head, a.units, kHeads<INTERLEAVED>);
    if (k.numel() > 0) a.x[1] = arrange(k, k_out, cos_strides, sin_strides, head, a.units, kHeads<INTERLEAVED>);
    a.wide = std::max(a.x[0].threads, a.x[1].threads) > INT32_MAX;
    if (!a.wide) {
      a.by_units = Divider(static_cast<uint32_t>(a.units));
      for (Operand& x : a.x) {
        x.by_middle = Divider(static_cast<uint32_t>(x.middle));
        x.by_fastest = Divider(static_cast<uint32_t>(x.fastest));
      }
    }
    const int64_t first = ceil_div(a.x[0].threads, kThreads), blocks = first + ceil_div(a.x[1].threads, kThreads);
    a.blocks = static_cast<unsigned>(first);
    rotate<In, Table, Out, N, INTERLEAVED><<<grid_of(blocks), kThreads, 0, launch.stream()>>>(a);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
};

// q and k may differ along the dimension `head`, and the tables repeat along it; -1: there is none. The strides are those of the
// results. Without k the second result is empty.
std::tuple<Tensor, Tensor> rotary(const Tensor& q_in, const MaybeTensor& k_in, const Tensor& cos_in, const Tensor& sin_in, bool interleaved,
                                  int64_t rotary_dim, bool backward, ScalarType dtype, int64_t head, std::vector<int64_t> q_strides,
                                  std::vector<int64_t> k_strides) {
  check_operands(q_in, k_in, cos_in, sin_in, rotary_dim, head);
  const auto [q_out, k_out] = empty_results(q_in, k_in, q_strides, k_strides, dtype);
  const Launch launch(q_in);
  if (q_in.numel() == 0) return {q_out, k_out};
  const Call call{with_rows(q_in), k_in ? with_rows(*k_in) : k_out, q_out, k_out, with_rows(cos_in), with_rows(sin_in), head, interleaved};
  Args a;
  a.cos = call.cos.const_data_ptr();
  a.sin = call.sin.const_data_ptr();
  a.dim = static_cast<int>(q_in.size(-1));
  a.pairs = static_cast<int>(rotary_dim / 2);
  a.half_tables = call.cos.size(-1) != rotary_dim;
  a.backward = backward;
  dispatch_types(call.q.scalar_type(), call.cos.scalar_type(), dtype, [&]<typename In, typename Table, typename Out>(In, Table, Out) {
    constexpr int kWord = kVectorBytes / std::max(sizeof(In), sizeof(Out));
    constexpr int kShort = kWord == 8 ? 2 : 1;  // 4 bytes, for half as many lanes of 2
    if (interleaved) {
      if (call.has_words(a, kWord / 2)) return call.run<In, Table, Out, kWord / 2, true>(a, launch);
      return call.run<In, Table, Out, 1, true>(a, launch);
    }
    if (call.has_words(a, kWord)) return call.run<In, Table, Out, kWord, false>(a, launch);
    if (call.has_words(a, kShort)) return call.run<In, Table, Out, kShort, false>(a, launch);
    call.run<In, Table, Out, 1, false>(a, launch);
  });
  return {q_out, k_out};
}

}  // namespace
}  // namespace fastlayers

STABLE_TORCH_LIBRARY_IMPL(fastlayers, CUDA, m) { m.impl("rotary", TORCH_BOX(&fastlayers::rotary)); }

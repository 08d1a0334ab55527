// What the forward and the backward of layer_norm and rms_norm share: the loads of their weights, the sums over a row, the vocabulary of the
// kernels for very long rows, and the checks of the ops.
#pragma once

#include "common/moments.cuh"
#include "common/rows.cuh"
#include "layer_norm.h"

namespace fastlayers {
namespace {

// ---- weights ------------------------------------------------------------------------------------------------------------

// The 16 bytes that begin with byte `shift` of two consecutive words.
__device__ __forceinline__ uint4 shifted(const uint4& low, const uint4& high, int shift) {
  unsigned w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  if (shift & 8) unroll<6>([&](int i) { w[i] = w[i + 2]; });
  if (shift & 4) unroll<5>([&](int i) { w[i] = w[i + 1]; });
  const unsigned select = shift & 2 ? 0x5432 : 0x3210;
  return {__byte_perm(w[0], w[1], select), __byte_perm(w[1], w[2], select), __byte_perm(w[2], w[3], select),
          __byte_perm(w[3], w[4], select)};
}

// V elements of weight or bias as 16-byte words. Moved as elements, 16-bit ones would cost byte shuffles.
template <typename W, int V>
struct Weights {
  static constexpr int kWords = sizeof(W) * V / kVectorBytes;
  uint4 words[kWords];

  template <typename A>
  __device__ __forceinline__ Vec<A, V> values() const {
    return unpack<A>(*reinterpret_cast<const Vec<W, V>*>(words));
  }
};

template <typename W, int V>
__device__ __forceinline__ Weights<W, V> same_weights(float value) {
  const Vec<W, V> v = filled<W, V>(convert<W>(value));
  return *reinterpret_cast<const Weights<W, V>*>(&v);
}

// The weights from element e on. Unless WHOLE, e may be no multiple of V; then two aligned words are shifted together.
template <bool WHOLE, typename W, int V>
__device__ __forceinline__ Weights<W, V> load_weights(const W* w, int e) {
  Weights<W, V> v;
  if (WHOLE || (e & (V - 1)) == 0) {
    unroll<v.kWords>([&](int i) { v.words[i] = __ldg(reinterpret_cast<const uint4*>(w + e) + i); });
  } else if constexpr (v.kWords == 1) {
    const auto* words = reinterpret_cast<const uint4*>(w) + e / V;
    v.words[0] = shifted(__ldg(words), __ldg(words + 1), (e & (V - 1)) * static_cast<int>(sizeof(W)));
  } else {
    unroll<V>([&](int j) { reinterpret_cast<W*>(v.words)[j] = w[e + j]; });
  }
  return v;
}

// ---- sums over a row ----------------------------------------------------------------------------------------------------

template <typename A>
struct RowSums {
  A first, second;
};

// Adds up the sums of `lanes` neighbouring lanes; unless TWO, only the first ones.
template <bool TWO, typename A>
__device__ __forceinline__ void add_lanes(RowSums<A>& sums, int lanes) {
  if constexpr (TWO) lanes_sum(sums.first, sums.second, lanes);
  else sums.first = lanes_sum(sums.first, lanes);
}

// Adds up the sums of the warps of a row, over all blocks of its cluster. `slots`, shared, has one for each of these warps. The barrier
// is that of the block's `group`-th group of `lanes` threads. The next call must use other slots.
template <bool TWO, bool CLUSTER, typename A>
__device__ __forceinline__ void add_warps(RowSums<A>& sums, RowSums<A>* slots, int lanes, int group) {
  const int warps = lanes >> 5, lane = threadIdx.x & 31;
  const int warp = (static_cast<int>(threadIdx.x) - group * lanes) >> 5;
  int count = warps;
  if constexpr (CLUSTER) {
    auto cluster = this_cluster();
    const int blocks = static_cast<int>(cluster.num_blocks());
    if (lane < blocks) cluster.map_shared_rank(slots, lane)[cluster.block_rank() * warps + warp] = sums;
    cluster.sync();
    count *= blocks;
  } else {
    if (lane == 0) slots[warp] = sums;
    asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "r"(lanes) : "memory");
  }
  sums = lane < count ? slots[lane] : RowSums<A>{A(0), A(0)};
  if constexpr (CLUSTER) {
#pragma unroll 1
    for (int i = lane + 32; i < count; i += 32) sums.first += slots[i].first, sums.second += slots[i].second;
  }
  add_lanes<TWO>(sums, 32);
}

// ---- rows too long for a cluster ----------------------------------------------------------------------------------------
//
// These are rare, so one kernel serves all types: the loads and stores look their type up.

constexpr int kSplitThreads = 256;
constexpr int kBatch = 8;  // elements that a thread requests together, kSplitThreads apart

enum class Type : int { none, half, bfloat16, float32, float64 };

struct Operand {
  void* data = nullptr;
  Type type = Type::none;
};

template <typename F>
__device__ __forceinline__ void with_type(const Operand& o, F&& f) {
  switch (o.type) {
    case Type::half: return f(static_cast<__half*>(o.data));
    case Type::bfloat16: return f(static_cast<__nv_bfloat16*>(o.data));
    case Type::float32: return f(static_cast<float*>(o.data));
    case Type::float64: return f(static_cast<double*>(o.data));
    default: return;
  }
}

// Elements base + e, base + e + kSplitThreads, ... up to `end`; what lies beyond is `missing`.
template <typename A>
__device__ __forceinline__ Vec<A, kBatch> load_batch(const Operand& o, int64_t base, int64_t e, int64_t end, A missing) {
  Vec<A, kBatch> v = filled<A, kBatch>(missing);
  with_type(o, [&](const auto* p) {
    unroll<kBatch>([&](int j) {
      if (e + j * kSplitThreads < end) v.v[j] = convert<A>(p[base + e + j * kSplitThreads]);
    });
  });
  return v;
}

// Writes a batch, and rounds it to what was written.
template <typename A>
__device__ __forceinline__ void store_batch(const Operand& o, int64_t base, int64_t e, int64_t end, Vec<A, kBatch>& v) {
  with_type(o, [&](auto* p) {
    using T = std::decay_t<decltype(*p)>;
    unroll<kBatch>([&](int j) {
      const T t = convert<T>(v.v[j]);
      v.v[j] = convert<A>(t);
      if (e + j * kSplitThreads < end) p[base + e + j * kSplitThreads] = t;
    });
  });
}

template <typename A>
__device__ __forceinline__ void round_batch(Type type, Vec<A, kBatch>& v) {
  with_type(Operand{nullptr, type}, [&](auto* p) {
    using T = std::decay_t<decltype(*p)>;
    unroll<kBatch>([&](int j) { v.v[j] = convert<A>(convert<T>(v.v[j])); });
  });
}

template <typename A>
struct SplitArgs {
  Operand x, residual, sum, weight, bias, y;  // forward
  Operand dy, dsum, dx, narrow;               // backward; x is the sum where there is one
  A *stats, *partial;
  int64_t rows, n, piece;  // elements of a piece
  int pieces, kind;
  A eps;

  __device__ __forceinline__ bool layer() const { return kind == kLayer; }
  // What gemma's rms_norm adds to its weight.
  __device__ __forceinline__ A weight_offset() const { return kind == kGemma && weight.data != nullptr ? A(1) : A(0); }
  __device__ __forceinline__ A mean(int64_t row) const { return layer() ? stats[row] : A(0); }
  __device__ __forceinline__ A rstd(int64_t row) const { return stats[layer() ? rows + row : row]; }
};

// The piece of a row that a block has.
struct SplitPiece {
  int64_t row, base, begin, end;  // base: of the row, in elements of the tensor

  template <typename A>
  __device__ __forceinline__ explicit SplitPiece(const SplitArgs<A>& a) {
    row = blockIdx.x / a.pieces, base = row * a.n;
    begin = blockIdx.x % a.pieces * a.piece;
    end = begin + a.piece < a.n ? begin + a.piece : a.n;
  }
  // Calls f(e) with the first element of each batch of this thread.
  template <typename F>
  __device__ __forceinline__ void for_batches(F&& f) const {
    for (int64_t e = begin + threadIdx.x; e < end; e += kBatch * kSplitThreads) f(e);
  }
};

// ---- host ---------------------------------------------------------------------------------------------------------------

// The threads of a row of `words` words with `each` in a thread: a power of two up to a warp, then whole warps.
inline int row_threads(int64_t words, int each) {
  const int64_t threads = ceil_div(words, each);
  return static_cast<int>(threads <= 32 ? next_power_of_2(std::max<int64_t>(threads, 1)) : ceil_div(threads, 32) * 32);
}

inline Type type_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Half: return Type::half;
    case ScalarType::BFloat16: return Type::bfloat16;
    case ScalarType::Float: return Type::float32;
    default: return Type::float64;
  }
}

inline Operand operand(const Tensor& t) { return {const_cast<void*>(t.const_data_ptr()), type_of(t.scalar_type())}; }
inline Operand operand(const MaybeTensor& t) { return t ? operand(*t) : Operand{}; }

inline MaybeTensor checked_weight(const MaybeTensor& weight, const Tensor& x, int64_t n, const char* op, const char* name) {
  check_parameter(weight, x, n, op, name);
  return weight ? MaybeTensor(dense(*weight)) : std::nullopt;
}

// A tensor beside x may have x's dtype, or float32 where x has 16 bits.
inline void check_dtype(ScalarType x, ScalarType other, const char* op, const char* name) {
  FASTLAYERS_CHECK(other == x || (is_low_precision(x) && other == ScalarType::Float), op, "no kernel for x of ", toString(x), " and ",
                   name, " of ", toString(other));
}

// Pieces of a row for the split kernels: at least 4 blocks an SM, but no piece under two batches a thread.
template <typename A>
void set_pieces(SplitArgs<A>& args, const Launch& launch) {
  const int64_t wanted = ceil_div(4 * static_cast<int64_t>(device_traits(launch.device()).processors), args.rows);
  const int64_t longest = std::max<int64_t>(1, args.n / (2 * kBatch * kSplitThreads));
  args.piece = ceil_div(args.n, std::clamp<int64_t>(wanted, 1, longest));
  args.pieces = static_cast<int>(ceil_div(args.n, args.piece));
}

}  // namespace
}  // namespace fastlayers

// cross_entropy of logits and classes, forward and backward.
//
// The stock composition writes log_softmax(logits), reads one element of each row, and keeps all of it for a backward that reads it and
// writes as much. Here the forward reads the logits once and keeps two numbers for each row, whose sum is lse = log(sum(exp(scores))):
// the maximum, and the logarithm of the sum relative to it. With lse alone, the difference to a large score would lose digits. The
// backward needs no reduction: it reads the logits once and writes their gradient. fastlayers/ops/cross_entropy.py has the formulas.
//
//   rows     classes are contiguous: a part of a warp or a block goes along a row, and each thread keeps a running (maximum, sum of
//            exponentials relative to it). If there are few rows, they are cut into pieces, whose partials a second kernel merges.
//            Rows may begin anywhere in a 16-byte word and have any stride: a thread reads the words that cover a row and ignores the
//            elements of its neighbours.
//   columns  classes are strided: a thread owns neighbouring columns and walks down them.
//   held     a chunk of linear_cross_entropy: losses and gradients in one kernel that holds each row in the shared memory of a
//            cluster and writes the gradient over the logits.
//
// PLAIN kernels have neither softcap nor label smoothing, which cost registers. The others do all that float64 asks for. Ignored rows are not read.
#include <cassert>

//
// This header has what the directions share: the terms of a loss, what a row adds up and its gradient, how threads share rows and columns, and
// what the host finds out about its operands.
#pragma once

#include <cassert>

#include "cross_entropy.h"
#include "logits.cuh"

namespace fastlayers {
namespace {

constexpr int kThreads = 256;
constexpr int kWarpWords = 512;          // a row of up to so many words gets a warp or less
constexpr int kLaneWords = 2;            // words of a lane in a row that gets less than a warp
constexpr int64_t kMostClasses = 1 << 30;  // places in a row are 32 bits

// ---- scalars of a dtype that only the host knows ------------------------------------------------------------------------

enum class Kind : int { half, bfloat16, float32, float64 };

inline Kind kind_of(ScalarType dtype, const char* op) {
  switch (dtype) {
    case ScalarType::Half: return Kind::half;
    case ScalarType::BFloat16: return Kind::bfloat16;
    case ScalarType::Float: return Kind::float32;
    case ScalarType::Double: return Kind::float64;
    default: FASTLAYERS_CHECK(false, op, "expected a floating dtype, but got ", toString(dtype));
  }
}

template <typename A>
__device__ __forceinline__ A load_scalar(const void* p, int64_t i, Kind kind) {
  switch (kind) {
    case Kind::half: return convert<A>(static_cast<const __half*>(p)[i]);
    case Kind::bfloat16: return convert<A>(static_cast<const __nv_bfloat16*>(p)[i]);
    case Kind::float32: return convert<A>(static_cast<const float*>(p)[i]);
    default: return convert<A>(static_cast<const double*>(p)[i]);
  }
}

template <typename A>
__device__ __forceinline__ void store_scalar(void* p, int64_t i, Kind kind, A v) {
  switch (kind) {
    case Kind::half: static_cast<__half*>(p)[i] = convert<__half>(v); break;
    case Kind::bfloat16: static_cast<__nv_bfloat16*>(p)[i] = convert<__nv_bfloat16>(v); break;
    case Kind::float32: static_cast<float*>(p)[i] = convert<float>(v); break;
    default: static_cast<double*>(p)[i] = convert<double>(v);
  }
}

// ---- scores, losses, gradients ------------------------------------------------------------------------------------------

template <typename A>
struct Terms {
  const int64_t* target;
  const A* weight;      // of each class, or null
  const A* weight_sum;  // null without label smoothing or without a weight
  int64_t ignore_index;
  int classes;
  A smoothing, softcap, z_loss;  // softcap 0: none

  // The class of a row, or -1 if the row is ignored. Any other target stops the program, as in torch's kernels.
  __device__ __forceinline__ int target_of(int64_t row) const {
    const int64_t t = target[row];
    if (t == ignore_index) return -1;
    assert(t >= 0 && t < classes);
    return static_cast<int>(t);
  }
  __device__ __forceinline__ A weight_of(int c) const { return weight == nullptr ? A(1) : weight[c]; }
  // What smoothing adds to the gradient of a class with weight 1.
  __device__ __forceinline__ A uniform() const { return smoothing / static_cast<A>(classes); }
  __device__ __forceinline__ A all_weights() const { return weight_sum == nullptr ? static_cast<A>(classes) : *weight_sum; }
};

// softcap·tanh(v / softcap). FAST uses the hardware's exponential and reciprocal, with an error of about 1e-7 times the softcap.
template <bool FAST, typename A>
__device__ __forceinline__ A capped(A v, A softcap, A reciprocal) {
  if constexpr (FAST) return softcap * (1.f - __fdividef(2.f, 1.f + exponential<true>(2.f * v * reciprocal)));
  else return softcap * hyperbolic_tangent(v / softcap);
}

template <bool PLAIN, bool FAST, typename A>
__device__ __forceinline__ A score_of(A v, const Terms<A>& terms) {
  if constexpr (PLAIN) return v;
  else return terms.softcap == A(0) ? v : capped<FAST>(v, terms.softcap, A(1) / terms.softcap);
}

// What a row adds up: maximum and sum of exponentials, and for label smoothing the weighted sum of the scores.
template <typename A>
struct Sums {
  Pair<A> pair{minus_infinity<A>(), A(0)};
  A linear = 0;
};

// lse of a row: base + rest.
template <typename A>
struct Level {
  A base, rest;

  __device__ static Level of(const Sums<A>& all) { return {all.pair.m, logarithm<false>(all.pair.s)}; }
};

// The gradient of a row: exp(score - lse)·factor, less `uniform` times the weight of each class, less `hit` at the class t.
template <bool PLAIN, bool FAST, typename A>
struct Slope {
  Level<A> level;  // FAST: base is lse, which is near enough
  A factor, uniform, hit;
  int t;

  __device__ static Slope find(Level<A> level, A scale, int t, const Terms<A>& terms) {
    const A lse = level.base + level.rest;
    if constexpr (FAST) level = {lse, A(0)};
    Slope s{level, A(0), A(0), terms.weight_of(t), t};
    if constexpr (!PLAIN) {
      s.hit *= A(1) - terms.smoothing;
      if (terms.smoothing != A(0)) {
        s.factor = terms.uniform() * terms.all_weights();
        s.uniform = terms.uniform() * scale;
      }
    }
    s.factor += s.hit;
    if (terms.z_loss != A(0)) s.factor += A(2) * terms.z_loss * lse;
    s.factor *= scale;
    s.hit *= scale;
    return s;
  }

  // The gradient of one class c with the logit v. `target`: c is t. `inside`: c has a weight.
  __device__ __forceinline__ A operator()(A v, int c, bool target, bool inside, const Terms<A>& terms) const {
    const A score = score_of<PLAIN, FAST>(v, terms);
    A d = exponential<FAST>(FAST ? score - level.base : (score - level.base) - level.rest) * factor;
    if (target) d -= hit;
    if constexpr (!PLAIN) {
      if (uniform != A(0) && inside) d -= uniform * terms.weight_of(c);
      if (terms.softcap != A(0)) {
        const A slope = score * (A(1) / terms.softcap);
        d *= A(1) - slope * slope;
      }
    }
    return d;
  }

  // The gradients of the word at element e of a row with n classes, and 0 after the classes.
  template <typename T, int V>
  __device__ __forceinline__ Vec<T, V> word(const Vec<T, V>& x, int e, int n, const Terms<A>& terms) const {
    Vec<A, V> d = unpack<A>(x);
    const int here = t >= e && t < e + V ? t - e : V;
    const bool whole = e >= 0 && e + V <= n;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const bool inside = PLAIN || whole || (e + j >= 0 && e + j < n);
      d.v[j] = (*this)(d.v[j], e + j, j == here, inside, terms);
      if (!whole && e + j >= n) d.v[j] = A(0);
    }
    return pack<T>(d);
  }
};

// ---- rows ---------------------------------------------------------------------------------------------------------------

template <typename A>
struct RowArgs {
  const void* x;
  int64_t rows, row_stride;
  int n;                   // elements of a row: classes, and in the backward of a chunk the padding after them
  int lanes, lane_bits;    // threads of a row: a power of two up to a warp, or the block
  int pieces, each;        // blocks of a row that has blocks, and the words that each of them takes
  bool whole;              // rows are whole words
  Terms<A> terms;
};

// The words of a thread: first, first + stride, ... up to words. If rows are not whole words, the first one begins up to V - 1 elements
// before the row.
struct Stand {
  int64_t row;
  int start;  // of word 0 in the row, in elements
  int first, stride, words, piece;

  template <typename T, int V, typename A>
  __device__ __forceinline__ static Stand find(const RowArgs<A>& a) {
    Stand p;
    p.stride = a.lanes;
    p.piece = 0;
    if (a.lanes <= 32) {
      p.row = static_cast<int64_t>(blockIdx.x) * (kThreads >> a.lane_bits) + (threadIdx.x >> a.lane_bits);
      p.first = threadIdx.x & (a.lanes - 1);
    } else {
      p.row = blockIdx.x / a.pieces;
      p.piece = static_cast<int>(blockIdx.x) - static_cast<int>(p.row) * a.pieces;
      p.first = threadIdx.x;
    }
    int head = 0;
    if (!a.whole) head = static_cast<int>(reinterpret_cast<uintptr_t>(static_cast<const T*>(a.x) + p.row * a.row_stride) / sizeof(T) & (V - 1));
    const int words = (a.n + head + V - 1) / V, before = p.piece * a.each;
    p.start = before * V - head;
    p.words = max(0, min(words - before, a.each));
    if (p.row >= a.rows) p.words = 0;
    return p;
  }
};

// The factor from the losses to the result: one number, or one for each row.
template <typename A>
struct Scale {
  const void* data;  // null: 1
  Kind kind;
  bool each_row;
  const A* divisor;  // of a mean, or null

  static Scale from(const MaybeTensor& dy, const A* divisor, const char* op) {
    if (!dy) return {nullptr, Kind::float32, false, divisor};
    return {dy->const_data_ptr(), kind_of(dy->scalar_type(), op), dy->numel() > 1, divisor};
  }
  __device__ __forceinline__ A of(int64_t row) const {
    const A scale = data == nullptr ? A(1) : load_scalar<A>(data, each_row ? row : 0, kind);
    return divisor == nullptr ? scale : scale / *divisor;
  }
};

// ---- columns ------------------------------------------------------------------------------------------------------------

template <bool PLAIN>
constexpr int kStepsOf = PLAIN ? 4 : 2;  // words down the columns, loaded by a thread before the first is used

template <typename A>
struct ColumnArgs {
  const void* x;
  void* losses;      // forward
  void* dx;          // backward
  A* stats;
  Kind kind;         // of the losses
  int64_t rows, inner;
  int n, across, down;  // threads over the columns, and down them; their product is at most kColumnThreads
  unsigned tiles;       // over the columns
  unsigned shares;      // backward: blocks over the classes
  Scale<A> scale;    // backward
  Terms<A> terms;
};

// ---- launch rules -------------------------------------------------------------------------------------------------------

// Gives each row a part of a warp or a block, or cuts it into pieces(words) pieces, a block each. Returns the number of blocks.
template <typename T, typename Args, typename Pieces>
int64_t share_rows(Args& args, Pieces&& pieces) {
  constexpr int V = kVector<T>;
  const int64_t words = ceil_div(args.n, V) + (args.whole ? 0 : 1);
  args.pieces = 1;
  args.each = INT32_MAX;
  args.lane_bits = 0;
  if (words <= kWarpWords) {
    args.lanes = static_cast<int>(std::min<int64_t>(32, next_power_of_2(ceil_div(words, kLaneWords))));
    args.lane_bits = log2_of(args.lanes);
    return ceil_div(args.rows, kThreads / args.lanes);
  }
  args.lanes = kThreads;
  args.each = static_cast<int>(ceil_div(words, pieces(words)));
  args.pieces = static_cast<int>(ceil_div(words, args.each));
  return args.rows * args.pieces;
}

template <typename T>
bool whole_words(const void* x, int64_t stride, int64_t n) {
  constexpr int64_t V = kVectorBytes / sizeof(T);
  return aligned(x) && stride % V == 0 && n % V == 0;
}

// Calls f(std::true_type) where there is neither softcap nor label smoothing. float64 is not worth kernels without them.
template <typename A, typename F>
void dispatch_plain(const Terms<A>& terms, F&& f) {
  if constexpr (sizeof(A) < 8) {
    if (terms.softcap == A(0) && terms.smoothing == A(0)) return f(std::true_type{});
  }
  f(std::false_type{});
}

// Calls f(ColumnLaunch, Number<V>, plain) for the columns kernels.
template <typename T, typename F>
void with_columns(ColumnArgs<compute_t<T>>& args, const Shape& s, bool is_aligned, F&& f) {
  constexpr int kVector = kVectorBytes / sizeof(T);
  const ColumnLaunch shape = column_launch(s, is_aligned ? kVector : 1);
  args.across = shape.across;
  args.down = shape.down;
  args.tiles = static_cast<unsigned>(ceil_div(s.inner, static_cast<int64_t>(shape.across) * shape.vector));
  dispatch_plain(args.terms, [&](auto plain) {
    if (shape.vector > 1) f(shape, Number<kVector>{}, plain);
    else f(shape, Number<1>{}, plain);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

// ---- host ---------------------------------------------------------------------------------------------------------------

// The terms of a loss for the kernels, with the contiguous targets that they point to.
template <typename A>
struct Context {
  Tensor target;
  Terms<A> terms;

  Context(const Tensor& given, const MaybeTensor& weight, const Options& o, int64_t rows, int64_t classes, const Tensor& x, const char* op)
      : target(checked_target(given, rows, x, op)) {
    FASTLAYERS_CHECK(classes <= kMostClasses, op, classes, " classes are more than the kernels take");
    terms = {pointer<const int64_t>(target), checked_weight<A>(weight, classes, x, op), nullptr, o.ignore_index, static_cast<int>(classes),
             static_cast<A>(o.label_smoothing), static_cast<A>(o.softcap), static_cast<A>(o.z_loss)};
  }
  Context(const Call& call, int64_t classes) : Context(call.target, call.weight, call.options, call.rows(), classes, call.logits.x, call.op) {}

  bool wants_weight_sum() const { return terms.weight != nullptr && terms.smoothing != A(0); }
};

// The logits as rows of which the kernels take n elements.
template <typename A>
RowArgs<A> row_args(const Logits& logits, int64_t n, const Terms<A>& terms) {
  return {logits.x.const_data_ptr(), logits.count(), logits.stride, static_cast<int>(n), 0, 0, 0, 0, false, terms};
}

template <typename A>
ColumnArgs<A> column_args(const Logits& logits, const Terms<A>& terms) {
  ColumnArgs<A> args{};
  args.x = logits.x.const_data_ptr();
  args.rows = logits.count();
  args.n = static_cast<int>(logits.n);
  args.inner = logits.inner;
  args.terms = terms;
  return args;
}

}  // namespace
}  // namespace fastlayers

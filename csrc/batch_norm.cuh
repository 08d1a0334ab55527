// act(batch_norm(x) + residual), training and eval, forward and backward.
//
// Training takes two passes over x, one for the statistics and one for the result. The backward also takes two: one for the two sums
// over a channel, one for dx. A block has a piece of some channels and leaves its mean and its sum of squared deviations; these are merged
// over all pieces in a fixed order. The second pass walks from the end to the beginning, so that it finds in L2 what the first one read
// last.
//
// The forward of a small tensor, and every backward, is one kernel: all blocks are resident (a cooperative launch), and each merges what
// the others found for its channels. Where one block has a whole channel, the blocks do not wait. The forward of a large tensor takes
// three kernels: the statistics of the pieces, their merging, and the result. The last is an elementwise kernel of few registers that
// reaches the copy bandwidth; a second pass in a kernel of many registers does not. Eval needs that kernel alone. Without statistics the
// same kernel adds the bias of a convolution in place.
//
// The backward needs x and the statistics. With a residual they do not give the activation's argument: relu then keeps one bit an element
// (bit j of byte i for element 8i + j in memory order), and other activations keep the residual. The backward writes the residual's
// gradient in the first pass, and reads it instead of dy in the second.
//
//   LAST    channels last: a matrix of pixels by channels. A thread owns the V neighbouring channels of a 16-byte word and walks down the
//           pixels. Where the channels of a pixel are no whole words, a row is as many pixels (`copies`) as are; the rest of the last
//           row (the tail) is one masked row.
//   planes  contiguous: a channel is one plane of each image. Threads walk over the words of these planes. The first and the last word
//           may belong to neighbouring channels in part, and are masked.
//
// This header has what both directions share: how the elements of channels are shared out over blocks and threads, words that belong to a
// channel in part, what blocks find out and tell each other, and what the host decides.
#pragma once

#define _CG_LIMIT_INCLUDED_DEPENDENCIES  // all of libcu++, which the barrier of a grid does not need
#include <cooperative_groups.h>

#include "batch_norm.h"
#include "common/activations.cuh"
#include "common/channels.cuh"

namespace fastlayers {
namespace {

// Threads of a block. Channels last wants few, wide blocks: every block merges the pieces of all others that share its channels.
template <bool LAST>
constexpr int kThreads = LAST ? 512 : 256;
// Blocks an SM that the registers must allow.
template <bool LAST, typename T>
constexpr int kResident = LAST ? 1 : sizeof(T) == 8 ? 2 : 3;

// Words of each operand in flight a thread. The activations of a run-time choice need registers of their own.
template <typename T, Act ACT>
constexpr int kUnroll = ACT == Act::run_time || sizeof(T) == 8 ? 2 : 4;

constexpr int kMaxAcross = 64;  // words of a row to a block

// ---- how the elements are shared out ------------------------------------------------------------------------------------

// A group is the channels of a block. Items are what its threads count: rows (LAST), or the words of a channel.
struct Grid {
  int64_t channels;
  int64_t columns;       // LAST: channels·copies, whole words. planes: the channels
  int64_t plane;         // planes: elements
  int64_t items;         // of a group, the tail included
  int64_t rows;          // LAST: whole rows, the items without the tail
  int64_t each;          // items of a piece
  Divider words;         // planes: 16-byte words that a plane may touch
  int pieces, groups;
  int across, down;      // LAST: threads of a block over a row's words, and over rows
  int copies, copy_bits; // LAST: pixels of a row, a power of two
  int tail;              // LAST: elements of the last row if that is not whole

  int64_t blocks() const { return static_cast<int64_t>(groups) * pieces; }
};

// The part [lo, hi) of the word at element `at` that belongs to the block's channels; nothing of it if hi <= lo.
struct Spot {
  int64_t at;
  int lo, hi;

  template <int V>
  __device__ __forceinline__ bool whole() const { return lo == 0 && hi == V; }
  __device__ __forceinline__ bool any() const { return hi > lo; }
  __device__ __forceinline__ bool has(int j) const { return j >= lo && j < hi; }
};

// The place of a thread. Its block has a piece of neighbouring items; or, SPREAD, every pieces-th step, so that all blocks together walk
// through memory from its beginning to its end.
template <typename T, bool LAST, bool SPREAD = false>
struct Place {
  static constexpr int V = kVector<T>;
  int group, piece, tx, ty;
  bool active;
  int64_t column;   // LAST: the first of the thread's word. planes: the channel
  int64_t begin, end;

  __device__ explicit Place(const Grid& g) {
    group = blockIdx.x % g.groups;
    piece = blockIdx.x / g.groups;
    if constexpr (LAST) {
      const ColumnPlace<V> place(g.across, group);
      tx = place.x, ty = place.y, column = place.column;
      active = ty < g.down && column < g.columns;
    } else {
      ty = threadIdx.x;
      tx = 0;
      column = group;
      active = true;
    }
    if constexpr (SPREAD) {
      begin = static_cast<int64_t>(piece) * down(g);
      end = g.items;
    } else {
      begin = piece * g.each;
      end = begin + g.each < g.items ? begin + g.each : g.items;
    }
  }

  __device__ __forceinline__ int across(const Grid& g) const { return LAST ? g.across : 1; }
  __device__ __forceinline__ int down(const Grid& g) const { return LAST ? g.down : kThreads<false>; }
  __device__ __forceinline__ int stride(const Grid& g) const { return SPREAD ? down(g) * g.pieces : down(g); }

  // Steps of the walk, the same for all threads of the block.
  __device__ __forceinline__ int steps(const Grid& g, int64_t last) const {
    return last > begin ? static_cast<int>((last - begin + stride(g) - 1) / stride(g)) : 0;
  }

  // The first of the block's columns, and how many there are.
  __device__ __forceinline__ int64_t first_column(const Grid& g) const {
    return LAST ? static_cast<int64_t>(group) * g.across * V : group;
  }
  __device__ __forceinline__ int columns(const Grid& g) const {
    return LAST ? static_cast<int>(min(static_cast<int64_t>(g.across) * V, g.columns - first_column(g))) : 1;
  }

  // The word of one step; below `last`.
  __device__ __forceinline__ Spot spot(const Grid& g, int step, int64_t last) const {
    const int64_t i = begin + ty + static_cast<int64_t>(step) * stride(g);
    Spot s;
    if constexpr (LAST) {
      s.at = i * g.columns + column;
      s.lo = 0;
      s.hi = i < g.rows ? V : static_cast<int>(min(static_cast<int64_t>(V), g.tail - column));
      if (!active || i >= last) s.hi = 0;
    } else {
      const uint32_t item = static_cast<uint32_t>(i), image = g.words.quotient(item), word = item - image * g.words.divisor;
      const int64_t start = (image * g.channels + column) * g.plane;
      s.at = (start & ~static_cast<int64_t>(V - 1)) + static_cast<int64_t>(word) * V;
      s.lo = static_cast<int>(max(start - s.at, static_cast<int64_t>(0)));
      s.hi = i < last ? static_cast<int>(min(start + g.plane - s.at, static_cast<int64_t>(V))) : 0;
    }
    return s;
  }
};

// ---- memory -------------------------------------------------------------------------------------------------------------

// The word at p, or zeros. The predicate is in the assembly so that no branch separates several loads.
template <typename T>
__device__ __forceinline__ Vec<T, kVector<T>> load_if(bool wanted, const T* p) {
  Vec<T, kVector<T>> v;
  uint4& w = reinterpret_cast<uint4&>(v);
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.s32 p, %5, 0;\n\t"
      "mov.b32 %0, 0;\n\tmov.b32 %1, 0;\n\tmov.b32 %2, 0;\n\tmov.b32 %3, 0;\n\t"
      "@p ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n\t}"
      : "=&r"(w.x), "=&r"(w.y), "=&r"(w.z), "=&r"(w.w)
      : "l"(p), "r"(static_cast<int>(wanted)));
  return v;
}

// Writes the part of the word that is ours.
template <typename T>
__device__ __forceinline__ void store_spot(T* p, const Spot& s, const Vec<T, kVector<T>>& v) {
  constexpr int V = kVector<T>;
  if (s.whole<V>()) {
    store_vec<T, V>(p + s.at, v);
  } else {
    unroll<V>([&](int j) { if (s.has(j)) p[s.at + j] = v.v[j]; });
  }
}

// Puts `fill` where the word is not ours.
template <typename T>
__device__ __forceinline__ void fill_outside(Vec<T, kVector<T>>& w, const Spot& s, const Vec<T, kVector<T>>& fill) {
  constexpr int V = kVector<T>;
  if (s.whole<V>()) return;
  unroll<V>([&](int j) { if (!s.has(j)) w.v[j] = fill.v[j]; });
}

// Shared memory of a block: what merge_down needs, then the values of its columns.
template <typename T, bool LAST>
struct Shared {
  using A = compute_t<T>;
  static constexpr int V = kVector<T>, K = LAST ? V : 1, kColumns = LAST ? kMaxAcross * V : 1;
  A merging[ChannelMoments<A, K>::kSize * (kThreads<LAST> / 2)];
  A weight[kColumns], bias[kColumns];
  A first[kColumns], second[kColumns];  // mean and rstd; the sums of the backward
};

// The channel of a column, and of the one after it.
__device__ __forceinline__ uint32_t channel_of(const Grid& g, int64_t column) {
  const auto c = static_cast<uint32_t>(column);
  return g.copies == 1 ? c : c % static_cast<uint32_t>(g.channels);
}
__device__ __forceinline__ uint32_t next_channel(const Grid& g, uint32_t c) {
  return g.copies > 1 && c + 1 == static_cast<uint32_t>(g.channels) ? 0 : c + 1;
}

// Loads weight and bias of the block's columns, while the first pass runs. Visible after the next barrier.
template <typename T, bool LAST>
__device__ __forceinline__ void load_affine(Shared<T, LAST>& shared, const Grid& g, const Place<T, LAST>& place,
                                            const ChannelValues& weight, const ChannelValues& bias) {
  for (int k = threadIdx.x; k < place.columns(g); k += blockDim.x) {
    const int64_t c = channel_of(g, place.first_column(g) + k);
    shared.weight[k] = weight.template load<T>(c, 1.f);
    shared.bias[k] = bias.template load<T>(c, 0.f);
  }
}

// K consecutive values, by whole words where they fill them: the values of a thread begin at a word.
template <int K, typename A>
__device__ __forceinline__ Vec<A, K> load_values(const A* p) {  // another block wrote them: not through L1
  Vec<A, K> v;
  if constexpr (K * sizeof(A) % sizeof(uint4) == 0) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(K * sizeof(A) / sizeof(uint4)); ++i)
      reinterpret_cast<uint4*>(&v)[i] = __ldcg(reinterpret_cast<const uint4*>(p) + i);
  } else {
    unroll<K>([&](int k) { v.v[k] = __ldcg(p + k); });
  }
  return v;
}

// Writes a piece's state to global memory: two arrays [pieces, columns], and the count as a third. LAST stores the count of column 0 only,
// the piece's rows.
template <bool LAST, int K, typename A, int N>
__device__ __forceinline__ void write_piece(A* partial, const Grid& g, int piece, int64_t column, const A (&v)[N]) {
  constexpr int kCount = N - 2 * K;  // Moments have one, Sums do not
  const int64_t step = g.pieces * g.columns;
  A* to = partial + piece * g.columns + column;
  Vec<A, K> first, second;
  unroll<K>([&](int k) { first.v[k] = v[kCount + k], second.v[k] = v[kCount + K + k]; });
  store_vec<A, K>(to, first);
  store_vec<A, K>(to + step, second);
  if (kCount == 1 && (!LAST || column == 0)) to[2 * step] = v[0];
}

// Reads the state of a piece, in one copy of the channels; `i` counts both.
template <bool LAST, int K, typename A, int N>
__device__ __forceinline__ void read_piece(A (&v)[N], const A* partial, const Grid& g, int i, int64_t column) {
  constexpr int kCount = N - 2 * K;
  const int piece = LAST ? i >> g.copy_bits : i;
  const int64_t step = g.pieces * g.columns;
  const A* from = partial + piece * g.columns;
  Vec<A, K> first, second;
  if (LAST && g.copies > 1) {
    const A* copy = from + (i & (g.copies - 1)) * g.channels;
    uint32_t c = channel_of(g, column);
    unroll<K>([&](int k) {
      first.v[k] = __ldcg(copy + c);
      second.v[k] = __ldcg(copy + step + c);
      c = next_channel(g, c);
    });
  } else {
    first = load_values<K>(from + column);
    second = load_values<K>(from + step + column);
  }
  unroll<K>([&](int k) { v[kCount + k] = first.v[k], v[kCount + K + k] = second.v[k]; });
  if constexpr (kCount == 1) v[0] = __ldcg(from + 2 * step + (LAST ? 0 : column));
}

// Pieces of a channel, of all copies of it.
template <bool LAST>
__device__ __forceinline__ int states_of(const Grid& g) { return LAST ? g.pieces << g.copy_bits : g.pieces; }

// ---- launch rules -------------------------------------------------------------------------------------------------------

// x as the kernels see it.
struct Operand : ChannelLayout {
  bool last;  // the kernels for channels last take it

  Operand(const Tensor& x_in, const char* op) : ChannelLayout(x_in, op), last(channels_together() && channels > 1) {
    if (!last && channels == 1) {  // one plane
      plane *= images;
      images = 1;
    }
  }
  int64_t count() const { return images * plane; }
};

// Elements below which more and narrower blocks occupy more of the GPU. Above, a block is 16 words across: at (64, 256, 56, 56)
// channels last, bfloat16, .84 of the copy bandwidth forward and .92 backward on an H100, for .82 and .90 with 8. Below the
// line, in eval, 8 steps of a thread took 13 us at (128, 512, 7, 7) for 21 with 4.
constexpr int64_t kSmall = int64_t{1} << 23;
constexpr int kLeastSteps = 4;  // of a thread, below which a piece is not cut

// The part of the blocks' rounds on the GPU, `unit` blocks each, that has work.
inline double busy(int64_t blocks, int64_t unit) { return static_cast<double>(blocks) / static_cast<double>(ceil_div(blocks, unit) * unit); }

// How to share out the channels of a launch. `resident`: blocks that the GPU holds at once.
inline Grid share_out_rows(const Operand& x, int vector, int64_t resident) {
  Grid g{};
  g.channels = x.channels;
  g.copies = 1;
  while (x.channels * g.copies % vector != 0) g.copies *= 2;
  g.copy_bits = log2_of(g.copies);
  g.columns = x.channels * g.copies;
  g.rows = x.count() / g.copies;
  g.tail = static_cast<int>(x.count() % g.copies * x.channels);
  g.items = g.rows + (g.tail > 0);
  const int64_t words = g.columns / vector;
  const int sharing = std::max(1, 8 / vector);
  double best = -1;
  for (int wanted = x.count() * x.channels < kSmall ? 8 : 16; wanted <= kMaxAcross; wanted *= 2) {
    const int64_t tiles = ceil_div(words, wanted);
    int64_t across = ceil_div(words, tiles);
    if (tiles > 1) across = std::min<int64_t>(kMaxAcross, ceil_div(across, sharing) * sharing);  // whole bytes of bits
    const int64_t groups = ceil_div(words, across), down = kThreads<true> / across;
    const int64_t useful = g.items <= 2 * kLeastSteps * down ? 1 : ceil_div(g.items, kLeastSteps * down);
    const int64_t room = std::max<int64_t>(1, resident / groups), pieces = std::min(useful, room);
    const double use = pieces < room ? 1.0 : busy(groups * pieces, resident);
    if (use > best + 0.03) {
      best = use;
      g.across = static_cast<int>(across), g.down = static_cast<int>(down);
      g.groups = static_cast<int>(groups), g.pieces = static_cast<int>(pieces);
    }
    if (wanted >= words) break;
  }
  g.each = ceil_div(g.items, g.pieces);
  return g;
}

// `fills`: blocks need not be resident, and should be as many as fill the GPU.
inline Grid share_out_planes(const Operand& x, int vector, int64_t resident, int processors, bool fills) {
  Grid g{};
  g.channels = g.columns = x.channels;
  g.copies = 1;
  g.plane = x.plane;
  const int64_t words = words_covered(x.plane, x.plane % vector != 0, vector);
  g.words = Divider(static_cast<uint32_t>(words));
  g.items = x.images * words;
  FASTLAYERS_CHECK(g.items < INT32_MAX - (1 << 16), "batch_norm", x.count(), " elements a channel are more than the kernels take");
  g.groups = static_cast<int>(x.channels);
  const int64_t useful = std::max<int64_t>(1, g.items / (kLeastSteps * kThreads<false>));
  const int64_t room = std::max<int64_t>(1, (fills ? 4 : 1) * resident / x.channels);
  // As few pieces as keep the SMs evenly loaded.
  double best = -1;
  for (int64_t pieces = 1; pieces <= std::min(useful, room) && best <= 0.95; ++pieces) {
    const double use = busy(x.channels * pieces, fills ? resident : processors);
    if (use <= best + 0.03) continue;
    best = use;
    g.pieces = static_cast<int>(pieces);
  }
  g.each = ceil_div(ceil_div(g.items, g.pieces), kThreads<false>) * kThreads<false>;  // pieces begin at whole bytes of bits
  return g;
}

// ---- host ---------------------------------------------------------------------------------------------------------------

// Fills in how a kernel shares out its channels, and says how many of its blocks the GPU holds at once.
template <auto kernel, typename T, bool LAST, typename Args>
int64_t share_out(Args& args, const Operand& x, const Launch& launch, bool fills = false) {
  const int64_t resident = resident_blocks<kernel>(launch, kThreads<LAST>);
  args.grid = LAST ? share_out_rows(x, kVector<T>, resident)
                   : share_out_planes(x, kVector<T>, resident, device_traits(launch.device()).processors, fills);
  args.direct = args.grid.pieces == 1 && args.grid.copies == 1;
  return resident;
}

// Memory for `arrays` values of each column of each piece, where blocks have no whole channels.
template <typename Args>
MaybeTensor make_partial(Args& args, int arrays, const Operand& x) {
  if (args.direct) return std::nullopt;
  const Tensor partial = empty_contiguous({arrays * args.grid.pieces * args.grid.columns}, compute_dtype(x.x), x.x);
  args.partial = pointer<std::remove_pointer_t<decltype(args.partial)>>(partial);
  return partial;
}

}  // namespace
}  // namespace fastlayers

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
#define _CG_LIMIT_INCLUDED_DEPENDENCIES  // all of libcu++, which the barrier of a grid does not need
#include <cooperative_groups.h>

#include "common/activations.cuh"
#include "common/channels.cuh"
#include "common/ops.h"

namespace fastlayers {
namespace {

// Threads of a block. Channels last wants few, wide blocks: every block merges the pieces of all others that share its channels.
template <bool LAST>
constexpr int kThreads = LAST ? 512 : 256;
// Blocks an SM that the registers must allow.
template <bool LAST, typename T>
constexpr int kResident = LAST ? 1 : sizeof(T) == 8 ? 2 : 3;

// The same for the kernel of the statistics alone.
template <bool LAST, typename T>
constexpr int kStatisticsResident = LAST ? 2 : sizeof(T) == 8 ? 2 : 4;

// Words of each operand in flight a thread. The activations of a run-time choice need registers of their own.
template <typename T, Act ACT>
constexpr int kUnroll = ACT == Act::run_time || sizeof(T) == 8 ? 2 : 4;
template <typename T>
constexpr int kStatisticsUnroll = sizeof(T) == 8 ? 2 : 4;

// Words of each operand of a thread of the result alone, and blocks an SM that its registers must allow.
template <typename T>
constexpr int kApplyUnroll = sizeof(T) == 8 ? 2 : 4;
template <typename T, int U, bool RESIDUAL>
constexpr int kApplyResident = U > 4 ? 2 : sizeof(T) == 8 || RESIDUAL ? 3 : 4;

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

// A word of results. Kernels for Act::relu serve Act::none too. To pack what relu gives is one instruction for two elements, so the choice
// is a branch.
template <typename T, Act ACT, typename A, int V>
__device__ __forceinline__ Vec<T, V> activated(Act act, Vec<A, V> z) {
  if (ACT == Act::relu && act == Act::none) return pack<T>(z);
  with_act<ACT>(act, [&](auto chosen) {
    unroll<V>([&](int j) { z.v[j] = act_value<decltype(chosen)::value, sizeof(T) == 2>(z.v[j]); });
  });
  return pack<T>(z);
}
// g becomes the gradient of z.
template <typename T, Act ACT, typename A, int V>
__device__ __forceinline__ void activate_backward(Act act, Vec<A, V>& g, const Vec<A, V>& z) {
  if constexpr (ACT == Act::relu) {
    const A gate = act == Act::relu ? A(0) : static_cast<A>(NAN);  // nothing is at most NaN
    unroll<V>([&](int j) { g.v[j] = z.v[j] <= gate ? A(0) : g.v[j]; });
  } else {
    with_act<ACT>(act, [&](auto chosen) {
      unroll<V>([&](int j) { g.v[j] = act_gradient<decltype(chosen)::value, sizeof(T) == 2>(g.v[j], z.v[j]); });
    });
  }
}

// Whether a kernel may be asked for the bits of relu: of the others, those of float64 alone.
template <typename T, Act ACT, bool RESIDUAL>
constexpr bool kHasBits = RESIDUAL && (ACT == Act::relu || sizeof(T) == 8);

template <typename A, int V>
__device__ __forceinline__ unsigned positive_bits(const Vec<A, V>& z) {
  unsigned kept = 0;
  unroll<V>([&](int j) { kept |= static_cast<unsigned>(!(z.v[j] <= A(0))) << j; });  // NaN is kept, as by torch
  return kept;
}

// Writes the V bits of a word. Where a byte has several words of neighbouring lanes (`shared`), the lanes combine their bits; all lanes
// of a warp call this. Where the words of a byte belong to other warps or blocks, an atomic or adds the bits to zeros.
template <int V>
__device__ __forceinline__ void store_bits(uint8_t* bits, const Spot& s, unsigned mine, bool shared) {
  if (!s.whole<V>()) {
    unroll<V>([&](int j) { if (!s.has(j)) mine &= ~(1u << j); });
  }
  mine <<= s.at & 7;
  if (shared) {
    constexpr int kSharing = 8 / V;
#pragma unroll
    for (int o = 1; o < kSharing; o <<= 1) mine |= __shfl_xor_sync(0xffffffffu, mine, o);
    if ((s.at & 7) == 0 && s.any()) bits[s.at >> 3] = static_cast<uint8_t>(mine);
  } else if (V == 8 && s.whole<V>()) {
    bits[s.at >> 3] = static_cast<uint8_t>(mine);
  } else if (mine != 0) {
    const uintptr_t byte = reinterpret_cast<uintptr_t>(bits + (s.at >> 3));
    atomicOr(reinterpret_cast<unsigned*>(byte & ~uintptr_t{3}), mine << (byte & 3) * 8);
  }
}

// Passes of a launch. Both in one needs all blocks to be resident, or none to wait (Args::direct).
enum Passes : int { kFirst = 1, kSecond = 2, kBoth = 3 };

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

// ---- statistics ---------------------------------------------------------------------------------------------------------

template <typename A>
struct ForwardArgs {
  const void* x;
  const void* residual;
  void* y;
  uint8_t* bits;
  ChannelValues weight, bias, running_mean, running_var;
  A* stats;    // [2, channels]: mean, rstd
  A* partial;
  A momentum, eps;
  int64_t count;  // elements of a channel
  Grid grid;
  Act act;
  bool direct;  // a block has all of its channels' elements
  bool bits_shared;
  int64_t* batches;  // how many were seen
  bool fresh;        // the running statistics are written, not updated: nothing is in their memory yet

  __device__ __forceinline__ void count_batch() const {
    if (batches != nullptr && blockIdx.x == 0 && threadIdx.x == 0) ++*batches;
  }
};

template <typename T, bool LAST>
struct ForwardShared : Shared<T, LAST> {
  compute_t<T> origin[Shared<T, LAST>::kColumns];
};

// The origin is the mean of the first few elements of each of the thread's channels (the last one repeated where there are fewer). All
// means are merged as differences from it, so that a mean far from zero costs no digits. Visible after the next barrier.
template <typename T, bool LAST, typename P>
__device__ __forceinline__ void load_origin(ForwardShared<T, LAST>& shared, const T* x, const Grid& g, const P& place) {
  using A = compute_t<T>;
  constexpr int V = kVector<T>, K = LAST ? V : 1, kElements = 8;
  if (place.ty != 0 || !place.active) return;
  A origin[K] = {};
  const int64_t count = LAST ? g.rows * g.copies + g.tail / g.channels : g.plane;
  const int last = static_cast<int>(min(count, static_cast<int64_t>(kElements))) - 1;
  if (LAST && g.copies > 1) {
#pragma unroll 1
    for (int i = 0; i < kElements; ++i) {
      uint32_t c = channel_of(g, place.column);
      unroll<K>([&](int k) {
        origin[k] += convert<A>(x[min(i, last) * g.channels + c]);
        c = next_channel(g, c);
      });
    }
  } else {
    unroll<kElements>([&](int i) {
      if constexpr (LAST) {
        const Vec<A, V> v = unpack<A>(load_vec<T, V>(x + min(i, last) * g.columns + place.column));
        unroll<K>([&](int k) { origin[k] += v.v[k]; });
      } else {
        origin[0] += convert<A>(x[place.column * g.plane + min(i, last)]);
      }
    });
  }
  unroll<K>([&](int k) { shared.origin[place.tx * V + k] = origin[k] * (A(1) / kElements); });
}

// The moments of this thread's part of the piece, from sums of deviations from the thread's first element. That has about the size of the
// others; one element for all threads might be an outlier. U: words in flight.
template <int U, typename T, bool LAST, typename P>
__device__ __forceinline__ auto gather_moments(const ForwardShared<T, LAST>& shared, const T* x, const Grid& g, const P& place) {
  using A = compute_t<T>;
  constexpr int V = kVector<T>, K = LAST ? V : 1;
  const int64_t last = LAST ? min(place.end, g.rows) : place.end;  // the tail's few elements are merged one by one
  const int steps = place.steps(g, last);
  // LAST: the thread's first row, elements from one to the next, how many; its last step may be the block's last but one.
  const int64_t row = place.begin + place.ty, hop = place.stride(g) * g.columns;
  const T* next = x + row * g.columns + place.column;
  const bool whole = row + static_cast<int64_t>(steps - 1) * place.stride(g) < last;
  const int mine = !LAST || !place.active ? 0 : whole ? steps : steps - 1;
  Vec<T, V> shift = filled<T, V>(convert<T>(0.f));
  A s[K] = {}, q[K] = {};
  int64_t count = max(0, mine);
#pragma unroll 1
  for (int step = 0; step < steps; step += U) {
    Vec<T, V> w[U];
    [[maybe_unused]] Spot spots[U];
    if constexpr (LAST) {
      unroll<U>([&](int u) { w[u] = load_if(step + u < mine, next + u * hop); });
      next += U * hop;
      if (step == 0) shift = w[0];
      unroll<U>([&](int u) { if (step + u >= mine) w[u] = shift; });
    } else {
      unroll<U>([&](int u) {
        spots[u] = place.spot(g, step + u, last);
        w[u] = load_if(spots[u].any(), x + spots[u].at);
      });
      if (count == 0) {
#pragma unroll
        for (int u = U - 1; u >= 0; --u)
          unroll<V>([&](int j) { if (spots[u].has(j)) shift.v[0] = w[u].v[j]; });
        shift = filled<T, V>(shift.v[0]);
      }
      unroll<U>([&](int u) {
        fill_outside(w[u], spots[u], shift);
        count += max(0, spots[u].hi - spots[u].lo);
      });
    }
    const Vec<A, V> from = unpack<A>(shift);
    unroll<U>([&](int u) {
      Vec<A, V> d = unpack<A>(w[u]);
      unroll<V>([&](int j) { d.v[j] -= from.v[j]; });
      if constexpr (LAST) {
        unroll<V>([&](int j) { s[j] += d.v[j], q[j] += d.v[j] * d.v[j]; });
      } else {
        A sum = 0, squares = 0;
        unroll<V>([&](int j) { sum += d.v[j], squares += d.v[j] * d.v[j]; });
        s[0] += sum, q[0] += squares;
      }
    });
  }
  ChannelMoments<A, K> m;
  m.v[0] = static_cast<A>(count);
  __syncthreads();  // the origin
  if (count > 0) {
    unroll<K>([&](int k) {
      const A mean = s[k] / m.v[0], squares = q[k] - s[k] * mean;
      m.v[1 + k] = convert<A>(shift.v[k]) - shared.origin[place.tx * V + k] + mean;
      m.v[1 + K + k] = squares < A(0) ? A(0) : squares;  // NaN stays
    });
  }
  return m;
}

// Pieces of a channel, of all copies of it.
template <bool LAST>
__device__ __forceinline__ int states_of(const Grid& g) { return LAST ? g.pieces << g.copy_bits : g.pieces; }

// The moments of the block's columns over all pieces and the tail, for threads with ty == 0. `m`: the thread's first piece.
template <typename T, bool LAST, typename P>
__device__ __forceinline__ auto merge_pieces(ForwardShared<T, LAST>& shared, const ForwardArgs<compute_t<T>>& a, const P& place,
                                             ChannelMoments<compute_t<T>, LAST ? kVector<T> : 1> m, int down) {
  using A = compute_t<T>;
  constexpr int V = kVector<T>, K = LAST ? V : 1;
  const Grid& g = a.grid;
  if (place.active) {
    const int states = states_of<LAST>(g);
#pragma unroll 2
    for (int i = place.ty + down; i < states; i += down) {
      ChannelMoments<A, K> other;
      read_piece<LAST, K>(other.v, a.partial, g, i, place.column);
      m.merge(other);
    }
    if constexpr (LAST) {
      const T* x = static_cast<const T*>(a.x);
#pragma unroll 1
      for (int64_t i = g.rows * g.columns + place.ty * g.channels; i < g.rows * g.columns + g.tail; i += down * g.channels) {
        ChannelMoments<A, K> pixel;
        pixel.v[0] = 1;
        uint32_t c = channel_of(g, place.column);
        unroll<K>([&](int k) {
          pixel.v[1 + k] = convert<A>(x[i + c]) - shared.origin[place.tx * V + k];
          c = next_channel(g, c);
        });
        m.merge(pixel);
      }
    }
  }
  merge_down<true>(m, shared.merging, place.tx, place.ty, place.across(g), down);
  return m;
}

// The running statistics of the thread's column, requested before anything that has to wait.
template <typename A>
struct Running {
  A mean, var;

  template <typename T, typename P>
  __device__ static Running load(const ForwardArgs<A>& a, const P& place) {
    const int64_t c = place.first_column(a.grid) + threadIdx.x;
    if (a.fresh || static_cast<int>(threadIdx.x) >= place.columns(a.grid) || c >= a.grid.channels) return {A(0), A(0)};
    return {a.running_mean.template load<T>(c, 0.f), a.running_var.template load<T>(c, 0.f)};
  }
};

// Writes mean and rstd from the moments of the block's columns: to shared.first and shared.second, visible after the next barrier, and once
// a channel to global memory, with the running statistics. A thread has one column: several would wait for each other's loads and stores of
// the running statistics.
template <typename T, bool LAST, typename P, int K>
__device__ __forceinline__ void finish_statistics(ForwardShared<T, LAST>& shared, const ForwardArgs<compute_t<T>>& a,
                                                  const P& place, const ChannelMoments<compute_t<T>, K>& m,
                                                  const Running<compute_t<T>>& old) {
  using A = compute_t<T>;
  const Grid& g = a.grid;
  if (place.ty == 0 && place.active) {
    unroll<K>([&](int k) {
      shared.first[place.tx * kVector<T> + k] = m.v[1 + k];
      shared.second[place.tx * kVector<T> + k] = m.v[1 + K + k];
    });
  }
  __syncthreads();
  static_assert(ForwardShared<T, LAST>::kColumns <= kThreads<LAST>);
  if (const int k = threadIdx.x; k < place.columns(g)) {
    const int64_t c = place.first_column(g) + k;  // a channel where it is one of the first copy
    const A mean = shared.origin[k] + shared.first[k], squares = shared.second[k], var = squares / static_cast<A>(a.count);
    const A rstd = var == A(0) && a.eps == A(0) ? A(0) : A(1) / sqrt(var + a.eps);  // as torch
    shared.first[k] = mean;
    shared.second[k] = rstd;
    if (place.piece > 0 || c >= g.channels) return;
    if (a.running_mean.data != nullptr) a.running_mean.template store<T>(c, (A(1) - a.momentum) * old.mean + a.momentum * mean);
    if (a.running_var.data != nullptr)
      a.running_var.template store<T>(c, (A(1) - a.momentum) * old.var + a.momentum * (squares / static_cast<A>(a.count - 1)));
    a.stats[c] = mean;
    a.stats[g.channels + c] = rstd;
  }
}

template <typename T, bool LAST>
__global__ void __launch_bounds__(kThreads<LAST>, kStatisticsResident<LAST, T>)
    batch_norm_statistics(const ForwardArgs<compute_t<T>> a) {
  constexpr int K = LAST ? kVector<T> : 1;
  __shared__ ForwardShared<T, LAST> shared;
  const Grid& g = a.grid;
  const Place<T, LAST, true> place(g);
  const T* x = static_cast<const T*>(a.x);
  a.count_batch();
  load_origin(shared, x, g, place);
  auto m = gather_moments<kStatisticsUnroll<T>>(shared, x, g, place);
  merge_down<true>(m, shared.merging, place.tx, place.ty, place.across(g), place.down(g));
  if (a.direct) finish_statistics(shared, a, place, m, Running<compute_t<T>>::template load<T>(a, place));
  else if (place.ty == 0 && place.active) write_piece<LAST, K>(a.partial, g, place.piece, place.column, m.v);
}

// Merges the pieces of batch_norm_statistics. A block has one word of columns, or one channel.
template <typename T, bool LAST>
__global__ void __launch_bounds__(kThreads<LAST>) batch_norm_merge(const ForwardArgs<compute_t<T>> a) {
  __shared__ ForwardShared<T, LAST> shared;
  constexpr int K = LAST ? kVector<T> : 1;
  const Place<T, LAST> place(a.grid);
  const auto old = Running<compute_t<T>>::template load<T>(a, place);
  // The first piece is asked for before the origin has arrived.
  ChannelMoments<compute_t<T>, K> first;
  const int down = LAST ? a.grid.down : static_cast<int>(blockDim.x);
  if (place.active && place.ty < states_of<LAST>(a.grid)) read_piece<LAST, K>(first.v, a.partial, a.grid, place.ty, place.column);
  load_origin(shared, static_cast<const T*>(a.x), a.grid, place);
  __syncthreads();
  finish_statistics(shared, a, place, merge_pieces(shared, a, place, first, down), old);
}

// ---- forward in one kernel ----------------------------------------------------------------------------------------------

// RESIDUAL: a residual is added; with an activation of run time only if there is one.
template <typename T, bool LAST, Act ACT, bool RESIDUAL>
__global__ void __launch_bounds__(kThreads<LAST>, kResident<LAST, T>) batch_norm_forward(const ForwardArgs<compute_t<T>> a) {
  using A = compute_t<T>;
  constexpr int V = kVector<T>, K = LAST ? V : 1, U = kUnroll<T, ACT>;
  __shared__ ForwardShared<T, LAST> shared;
  const Grid& g = a.grid;
  const Place<T, LAST> place(g);
  a.count_batch();
  const T* x = static_cast<const T*>(a.x);
  const int local = place.tx * V;  // of the thread's first column among the block's
  load_affine(shared, g, place, a.weight, a.bias);
  const auto old = Running<A>::template load<T>(a, place);
  load_origin(shared, x, g, place);

  auto m = gather_moments<sizeof(T) == 8 ? 4 : 8>(shared, x, g, place);
  merge_down<true>(m, shared.merging, place.tx, place.ty, place.across(g), place.down(g));
  if (!a.direct) {
    if (place.ty == 0 && place.active) write_piece<LAST, K>(a.partial, g, place.piece, place.column, m.v);
    cooperative_groups::this_grid().sync();
    ChannelMoments<A, K> first;
    if (place.active && place.ty < states_of<LAST>(g)) read_piece<LAST, K>(first.v, a.partial, g, place.ty, place.column);
    m = merge_pieces(shared, a, place, first, place.down(g));
  }
  finish_statistics(shared, a, place, m, old);
  __syncthreads();

  A mean[K], scale[K], bias[K];
  unroll<K>([&](int k) {
    mean[k] = shared.first[local + k];
    scale[k] = shared.weight[local + k] * shared.second[local + k];
    bias[k] = shared.bias[local + k];
  });
  const T* residual = static_cast<const T*>(a.residual);
  T* y = static_cast<T*>(a.y);
  const int steps = place.steps(g, place.end);
#pragma unroll 1
  for (int step = (steps - 1) / U * U; step >= 0; step -= U) {
    Vec<T, V> w[U], r[U];
    Spot spots[U];
#pragma unroll
    for (int u = U - 1; u >= 0; --u) {
      spots[u] = place.spot(g, step + u, place.end);
      w[u] = load_if(spots[u].any(), x + spots[u].at);
      if constexpr (RESIDUAL) r[u] = load_if(spots[u].any() && (ACT == Act::relu || residual != nullptr), residual + spots[u].at);
    }
#pragma unroll
    for (int u = U - 1; u >= 0; --u) {
      Vec<A, V> z = unpack<A>(w[u]);
      constexpr int kStep = LAST ? 1 : 0;
      unroll<V>([&](int j) { z.v[j] = fma(z.v[j] - mean[j * kStep], scale[j * kStep], bias[j * kStep]); });
      if constexpr (RESIDUAL) {
        const Vec<A, V> more = unpack<A>(r[u]);
        if (ACT == Act::relu || residual != nullptr) unroll<V>([&](int j) { z.v[j] += more.v[j]; });
      }
      if constexpr (kHasBits<T, ACT, RESIDUAL>) {
        if (a.bits != nullptr) store_bits<V>(a.bits, spots[u], positive_bits(z), a.bits_shared);
      }
      store_spot(y, spots[u], activated<T, ACT>(RESIDUAL && ACT == Act::relu ? Act::relu : a.act, z));
    }
  }
}

// ---- the result alone ---------------------------------------------------------------------------------------------------

// The tensor as a flat row of words. LAST: a block has `across` words of `down` rows for each word of a thread. planes: a block has
// neighbouring words.
struct Tiles {
  int64_t elements, channels;
  int64_t columns;              // LAST: elements of a row, whole bytes of bits
  int64_t plane;                // planes: elements
  Divider by_across;            // LAST
  Divider by_plane, by_channels;
  int across, down, tiles;      // LAST: tiles of a row
  int threads;
  bool small;                   // element numbers are small enough for Dividers
};

template <typename A>
struct ApplyArgs {
  const void* x;
  const void* residual;
  void* y;
  uint8_t* bits;
  ChannelValues weight, bias, running_mean, running_var;
  A* stats;  // [2, channels]: in training read; in eval written where it is not null
  A eps;
  Tiles tiles;
  Act act;
  bool training;
};

constexpr int kApplyThreads = 256;
// Words of a row to a block. On an H100, eval at (128, 512, 28, 28), bfloat16: .94 of the copy bandwidth with 32, .92 with 64 and with 8.
constexpr int kApplyAcross = 32;

// Channels of a block. A block of one warp has so many planes of two elements.
template <typename T, int U>
constexpr int kTable = std::max(kApplyAcross, 32 * U / 2) * kVector<T> + 8;

template <typename T>
__device__ __forceinline__ void load_statistics(const ApplyArgs<compute_t<T>>& a, int64_t c, compute_t<T>& mean,
                                                compute_t<T>& rstd) {
  using A = compute_t<T>;
  if (a.training) {
    mean = a.stats[c];
    rstd = a.stats[a.tiles.channels + c];
  } else {
    mean = a.running_mean.template load<T>(c, 0.f);
    rstd = A(1) / sqrt(a.running_var.template load<T>(c, 1.f) + a.eps);
  }
}

// A thread of the kernel: U words of the tensor, `step` elements apart, and the block's channels.
template <typename T, bool LAST, bool RESIDUAL, int U>
struct ApplyThread {
  using A = compute_t<T>;
  static constexpr int V = kVector<T>;

  const Tiles& t;
  int64_t at, step;   // the thread's first element, elements from one of its words to the next
  int64_t first;      // of the block: LAST its first column, planes its first element
  int64_t left = 0;   // elements from `at` to the end of the tensor
  int64_t within = 0; // planes: where the block begins in its first plane
  uint32_t channel = 0;  // of the first column or plane
  int tx = 0, count;  // count: channels of the block
  Vec<T, V> w[U], r[U];

  // `block`: from the last to the first, so that what the statistics read last comes first.
  __device__ __forceinline__ ApplyThread(const Tiles& tiles, uint32_t block) : t(tiles) {
    bool active = true;
    if constexpr (LAST) {
      const uint32_t rows = t.tiles == 1 ? block : block / t.tiles, tile = t.tiles == 1 ? 0 : block - rows * t.tiles;
      const int ty = t.by_across.quotient(threadIdx.x);
      tx = threadIdx.x - ty * t.across;
      first = static_cast<int64_t>(tile) * t.across * V;
      const int64_t column = first + tx * V;
      active = ty < t.down && column < t.columns;
      at = (static_cast<int64_t>(rows) * (U * t.down) + ty) * t.columns + column;
      step = t.down * t.columns;
      count = static_cast<int>(min(static_cast<int64_t>(t.across) * V, t.columns - first));
    } else {
      step = blockDim.x * V;
      first = static_cast<int64_t>(block) * U * step;
      at = first + threadIdx.x * V;
    }
    if (active) left = t.elements - at;
  }

  __device__ __forceinline__ void load(const void* x, const void* residual) {
    unroll<U>([&](int u) {
      w[u] = load_if(u * step < left, static_cast<const T*>(x) + at + u * step);
      if constexpr (RESIDUAL) r[u] = load_if(u * step < left, static_cast<const T*>(residual) + at + u * step);
    });
  }

  // Planes: how many planes after the block's first one an element lies, `e` counted from that plane's beginning.
  __device__ __forceinline__ int plane_of(int64_t e) const {
    return t.plane < 1 << 30 ? static_cast<int>(t.by_plane.quotient(static_cast<uint32_t>(e))) : static_cast<int>(e >= t.plane);
  }

  __device__ __forceinline__ void find_channels() {
    if constexpr (LAST) {
      channel = static_cast<uint32_t>(first);
    } else {
      const int64_t plane = t.small ? t.by_plane.quotient(static_cast<uint32_t>(first)) : first / t.plane;
      within = first - plane * t.plane;
      const int64_t image = t.small ? t.by_channels.quotient(static_cast<uint32_t>(plane)) : plane / t.channels;
      channel = static_cast<uint32_t>(plane - image * t.channels);
      count = plane_of(within + U * step - 1) + 1;
    }
  }

  // Word u, normalised, where the planes' channels differ from word to word.
  __device__ __forceinline__ void normalise_planes(Vec<A, V>& z, int u, const A* means, const A* scales, const A* biases) const {
    const int64_t e = within + threadIdx.x * V + u * step;
    const int k = plane_of(e);
    if (e + V <= (k + 1) * t.plane) {
      const A m = means[k], s = scales[k], b = biases[k];
      unroll<V>([&](int j) { z.v[j] = fma(z.v[j] - m, s, b); });
    } else {
      unroll<V>([&](int j) {
        const int kj = plane_of(e + j);
        z.v[j] = fma(z.v[j] - means[kj], scales[kj], biases[kj]);
      });
    }
  }

  // Adds the residual to word u of normalised values, applies the activation and writes it. The word is in the first place.
  template <Act ACT>
  __device__ __forceinline__ void finish(Act act, Vec<A, V>& z, int u, T* y, uint8_t* bits) const {
    if constexpr (RESIDUAL) {
      const Vec<A, V> more = unpack<A>(r[0]);
      unroll<V>([&](int j) { z.v[j] += more.v[j]; });
    }
    const int64_t rest = left - u * step;
    if constexpr (kHasBits<T, ACT, RESIDUAL>) {
      // The other words of its byte belong to neighbouring lanes.
      const Spot spot{at + u * step, 0, static_cast<int>(max(static_cast<int64_t>(0), min(rest, static_cast<int64_t>(V))))};
      if (bits != nullptr) store_bits<V>(bits, spot, positive_bits(z), true);
    }
    const Vec<T, V> out = activated<T, ACT>(RESIDUAL && ACT == Act::relu ? Act::relu : act, z);
    if (rest >= V) {
      store_vec<T, V>(y + at + u * step, out);
    } else {
      unroll<V>([&](int j) {
        if (j < rest) y[at + u * step + j] = out.v[j];
      });
    }
  }
};

template <typename T, bool LAST, Act ACT, bool RESIDUAL, int U>
__global__ void __launch_bounds__(kApplyThreads, kApplyResident<T, U, RESIDUAL>)
    batch_norm_apply(const ApplyArgs<compute_t<T>> a) {
  using A = compute_t<T>;
  constexpr int V = kVector<T>;
  __shared__ alignas(kVectorBytes) A means[kTable<T, U>], scales[kTable<T, U>], biases[kTable<T, U>];
  const Tiles& t = a.tiles;
  ApplyThread<T, LAST, RESIDUAL, U> me(t, gridDim.x - 1 - blockIdx.x);
  me.load(a.x, a.residual);
  me.find_channels();
  for (int k = threadIdx.x; k < me.count; k += blockDim.x) {
    const uint32_t i = me.channel + k, c = i - t.by_channels.quotient(i) * t.by_channels.divisor;
    A mean, rstd;
    load_statistics<T>(a, c, mean, rstd);
    const A weight = a.weight.template load<T>(c, 1.f), bias = a.bias.template load<T>(c, 0.f);
    // All loads come before the first store, which would wait for its load: 4 us of 86 for 128x512x28x28.
    means[k] = mean;
    scales[k] = weight * rstd;
    biases[k] = bias;
  }
  if (!a.training && a.stats != nullptr) {
    const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t c = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; c < t.channels; c += threads)
      load_statistics<T>(a, c, a.stats[c], a.stats[t.channels + c]);
  }
  __syncthreads();

  Vec<A, V> mean, scale, bias;
  if constexpr (LAST) {
    mean = load_vec<A, V>(means + me.tx * V);
    scale = load_vec<A, V>(scales + me.tx * V);
    bias = load_vec<A, V>(biases + me.tx * V);
  }
  // The words move up to the first place, so that the code of all activations is there once. Nothing moves where it is unrolled.
#pragma unroll (ACT == Act::run_time ? 1 : U)
  for (int u = 0; u < U; ++u) {
    Vec<A, V> z = unpack<A>(me.w[0]);
    if constexpr (LAST) unroll<V>([&](int j) { z.v[j] = fma(z.v[j] - mean.v[j], scale.v[j], bias.v[j]); });
    else me.normalise_planes(z, u, means, scales, biases);
    me.template finish<ACT>(a.act, z, u, static_cast<T*>(a.y), a.bits);
    unroll<U - 1>([&](int i) {
      me.w[i] = me.w[i + 1];
      if constexpr (RESIDUAL) me.r[i] = me.r[i + 1];
    });
  }
}

// ---- backward -----------------------------------------------------------------------------------------------------------

// What the activation's argument is computed from: x, a bit (relu), or x and the residual if there is one.
enum class Gate : int { x, bits, residual };

template <typename A>
struct BackwardArgs {
  const void* dy;
  const void* x;
  const void* residual;
  const uint8_t* bits;
  void* dx;
  void* dresidual;
  ChannelValues weight, bias;
  const A* stats;
  ChannelValues dweight, dbias;
  A* partial;
  int64_t count;
  Grid grid;
  Act act;
  Passes passes;
  bool training, direct;
};

// Loads the words of a step together and calls f(spot, dz, x - mean) for each.
template <typename T, bool LAST, Act ACT, Gate GATE, int K>
struct BackwardWalk {
  using A = compute_t<T>;
  static constexpr int V = kVector<T>, U = kUnroll<T, ACT>, kStep = LAST ? 1 : 0;
  A mean[K], scale[K], bias[K];

  // The constants of the thread's columns.
  __device__ __forceinline__ void load(const BackwardArgs<A>& a, const Place<T, LAST>& place, const Shared<T, LAST>& shared, A (&rstd)[K]) {
    uint32_t c = place.active ? channel_of(a.grid, place.column) : 0;
    unroll<K>([&](int k) {
      mean[k] = a.stats[c];
      rstd[k] = a.stats[a.grid.channels + c];
      scale[k] = place.active ? shared.weight[place.tx * V + k] * rstd[k] : A(0);
      bias[k] = place.active ? shared.bias[place.tx * V + k] : A(0);
      if (place.active) c = next_channel(a.grid, c);
    });
  }

  __device__ __forceinline__ static void add(ChannelSums<A, K>& sums, const Vec<A, V>& dz, const Vec<A, V>& d) {
    if constexpr (LAST) {
      unroll<V>([&](int j) { sums.v[j] += dz.v[j], sums.v[K + j] += dz.v[j] * d.v[j]; });
    } else {
      A first = 0, second = 0;
      unroll<V>([&](int j) { first += dz.v[j], second += dz.v[j] * d.v[j]; });
      sums.v[0] += first, sums.v[K] += second;
    }
  }

  // GATED: dz is computed from dy; else `dy` is dz.
  template <bool GATED, bool REVERSED, typename F>
  __device__ __forceinline__ void group(const BackwardArgs<A>& a, const Place<T, LAST>& place, int step, const T* dy, F&& f) const {
    constexpr bool kBits = GATED && GATE == Gate::bits, kResidual = GATED && GATE == Gate::residual;
    const T* x = static_cast<const T*>(a.x);
    Vec<T, V> wg[U], wx[U], wr[U];
    unsigned kept[U];
    Spot spots[U];
    unroll<U>([&](int i) {
      const int u = REVERSED ? U - 1 - i : i;
      spots[u] = place.spot(a.grid, step + u, place.end);
      wg[u] = load_if(spots[u].any(), dy + spots[u].at);
      wx[u] = load_if(spots[u].any(), x + spots[u].at);
      if constexpr (kResidual) wr[u] = load_if(spots[u].any() && a.residual != nullptr, static_cast<const T*>(a.residual) + spots[u].at);
      if constexpr (kBits) kept[u] = spots[u].any() ? a.bits[spots[u].at >> 3] >> (spots[u].at & 7) : 0;
    });
    const Vec<T, V> zero = filled<T, V>(convert<T>(0.f));
    unroll<U>([&](int i) {
      const int u = REVERSED ? U - 1 - i : i;
      fill_outside(wg[u], spots[u], zero);
      fill_outside(wx[u], spots[u], zero);
      Vec<A, V> g = unpack<A>(wg[u]), d = unpack<A>(wx[u]);
      unroll<V>([&](int j) { d.v[j] -= mean[j * kStep]; });
      if constexpr (kBits) {
        unroll<V>([&](int j) { g.v[j] = kept[u] >> j & 1 ? g.v[j] : A(0); });
      } else if constexpr (GATED) {
        Vec<A, V> z;
        unroll<V>([&](int j) { z.v[j] = fma(d.v[j], scale[j * kStep], bias[j * kStep]); });
        if constexpr (kResidual) {
          if (a.residual != nullptr) {
            fill_outside(wr[u], spots[u], zero);
            const Vec<A, V> more = unpack<A>(wr[u]);
            unroll<V>([&](int j) { z.v[j] += more.v[j]; });
          }
        }
        activate_backward<T, ACT>(a.act, g, z);
      }
      f(spots[u], g, d);
    });
  }
};

// The sums of the block's columns go to shared memory, and once a channel, as the gradients of weight and bias, to global memory.
template <typename T, bool LAST, int K>
__device__ __forceinline__ void write_sums(const BackwardArgs<compute_t<T>>& a, Shared<T, LAST>& shared, const Place<T, LAST>& place,
                                           const ChannelSums<compute_t<T>, K>& sums, const compute_t<T> (&rstd)[K]) {
  const int local = place.tx * kVector<T>;
  unroll<K>([&](int k) {
    shared.first[local + k] = sums.v[k];
    shared.second[local + k] = sums.v[K + k];
    if (place.piece == 0 && place.column + k < a.grid.channels) {
      a.dweight.template store<T>(place.column + k, sums.v[K + k] * rstd[k]);
      a.dbias.template store<T>(place.column + k, sums.v[k]);
    }
  });
}

template <typename T, bool LAST, Act ACT, Gate GATE>
__global__ void __launch_bounds__(kThreads<LAST>, kResident<LAST, T>) batch_norm_backward_kernel(const BackwardArgs<compute_t<T>> a) {
  using A = compute_t<T>;
  constexpr int V = kVector<T>, K = LAST ? V : 1, kStep = LAST ? 1 : 0;
  using Walk = BackwardWalk<T, LAST, ACT, GATE, K>;
  constexpr int U = Walk::U;
  __shared__ Shared<T, LAST> shared;
  const Grid& g = a.grid;
  const Place<T, LAST> place(g);
  const int local = place.tx * V, down = place.down(g), steps = place.steps(g, place.end);
  const T* dy = static_cast<const T*>(a.dy);
  T* dx = static_cast<T*>(a.dx);
  T* dresidual = static_cast<T*>(a.dresidual);
  load_affine(shared, g, place, a.weight, a.bias);
  __syncthreads();
  Walk walk;
  A rstd[K];
  walk.load(a, place, shared, rstd);

  ChannelSums<A, K> sums;
  if (a.passes & kFirst) {
#pragma unroll 1
    for (int step = 0; step < steps; step += U)
      walk.template group<true, false>(a, place, step, dy, [&](const Spot& spot, Vec<A, V>& dz, const Vec<A, V>& d) {
        if (dresidual != nullptr) store_spot(dresidual, spot, pack<T>(dz));
        walk.add(sums, dz, d);
        if (!a.training) {  // mean and rstd are constants: nothing to wait for
          unroll<V>([&](int j) { dz.v[j] *= walk.scale[j * kStep]; });
          store_spot(dx, spot, pack<T>(dz));
        }
      });
    merge_down<true>(sums, shared.merging, place.tx, place.ty, place.across(g), down);
    if (!a.direct && place.ty == 0 && place.active) write_piece<LAST, K>(a.partial, g, place.piece, place.column, sums.v);
    if (!(a.passes & kSecond)) return;
    if (!a.direct) cooperative_groups::this_grid().sync();
  }
  if (!a.direct) {
    sums = ChannelSums<A, K>();
    if (place.active) {
      const int states = states_of<LAST>(g);
#pragma unroll 2
      for (int i = place.ty; i < states; i += down) {
        ChannelSums<A, K> other;
        read_piece<LAST, K>(other.v, a.partial, g, i, place.column);
        sums.merge(other);
      }
    }
    merge_down<true>(sums, shared.merging, place.tx, place.ty, place.across(g), down);
  }
  if (place.ty == 0 && place.active) write_sums(a, shared, place, sums, rstd);
  if (!a.training) return;
  __syncthreads();

  A from_x[K], constant[K];
  unroll<K>([&](int k) {
    const A n = static_cast<A>(a.count);
    from_x[k] = -walk.scale[k] * (shared.second[local + k] / n) * rstd[k] * rstd[k];
    constant[k] = -walk.scale[k] * (shared.first[local + k] / n);
  });
  const auto result = [&](const Spot& spot, Vec<A, V>& dz, const Vec<A, V>& d) {
    unroll<V>([&](int j) { dz.v[j] = fma(dz.v[j], walk.scale[j * kStep], fma(d.v[j], from_x[j * kStep], constant[j * kStep])); });
    store_spot(dx, spot, pack<T>(dz));
  };
#pragma unroll 1
  for (int step = (steps - 1) / U * U; step >= 0; step -= U) {
    // From x alone dz is as well computed once more.
    if (GATE != Gate::x && dresidual != nullptr) walk.template group<false, true>(a, place, step, dresidual, result);
    else walk.template group<true, true>(a, place, step, dy, result);
  }
}

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
double busy(int64_t blocks, int64_t unit) { return static_cast<double>(blocks) / static_cast<double>(ceil_div(blocks, unit) * unit); }

// How to share out the channels of a launch. `resident`: blocks that the GPU holds at once.
Grid share_out_rows(const Operand& x, int vector, int64_t resident) {
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
Grid share_out_planes(const Operand& x, int vector, int64_t resident, int processors, bool fills) {
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

// Whether the words of each byte of bits are of neighbouring lanes.
bool bytes_are_whole(const Operand& x, const Grid& g, int vector) {
  if (vector >= 8) return false;
  return x.last ? g.columns % 8 == 0 && (g.groups == 1 || g.across % (8 / vector) == 0) : x.plane % 8 == 0;
}

// Bytes of x that may wait in L2 for the second pass of one kernel. Above, statistics and result are kernels of their own.
constexpr int64_t kHeldBytes = int64_t{28} << 20;

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

// Launches the whole forward if x, or what the resident blocks have of it, stays in L2 between the passes.
template <typename T, bool LAST, Act ACT, bool RESIDUAL>
bool run_in_one(ForwardArgs<compute_t<T>>& args, const Operand& x, int64_t n, const Launch& launch) {
  constexpr auto kernel = batch_norm_forward<T, LAST, ACT, RESIDUAL>;
  constexpr int V = kVector<T>;
  const int64_t resident = share_out<kernel, T, LAST>(args, x, launch), blocks = args.grid.blocks();
  if (blocks > resident && !args.direct) return false;
  const int64_t bytes = n * static_cast<int64_t>(sizeof(T));
  if (std::min(bytes, bytes / blocks * resident) > kHeldBytes) return false;
  args.bits_shared = bytes_are_whole(x, args.grid, V);
  const MaybeTensor partial = make_partial(args, 3, x);
  // Bytes that several blocks may write are or-ed into zeros.
  const bool whole = V < 8 ? args.bits_shared : LAST ? args.grid.tail == 0 : x.plane % 8 == 0;
  if (args.bits != nullptr && !whole) STD_CUDA_CHECK(cudaMemsetAsync(args.bits, 0, (n + 7) / 8, launch.stream()));
  launch_kernel(kernel, {blocks, kThreads<LAST>, 0, 1, !args.direct}, launch, args);
  return true;
}

template <typename T, bool LAST>
void run_statistics(ForwardArgs<compute_t<T>>& args, const Operand& x, const Launch& launch) {
  constexpr auto kernel = batch_norm_statistics<T, LAST>;
  share_out<kernel, T, LAST>(args, x, launch, true);
  Grid& g = args.grid;
  const MaybeTensor partial = make_partial(args, 3, x);
  launch_kernel(kernel, {g.blocks(), kThreads<LAST>}, launch, args);
  if (args.direct) return;
  const int states = std::min(kThreads<LAST>, LAST ? g.pieces << g.copy_bits : g.pieces);
  if constexpr (LAST) {
    g.across = 1;
    g.down = states;
    g.groups = static_cast<int>(ceil_div(g.channels, kVector<T>));
  }
  launch_kernel(batch_norm_merge<T, LAST>, {g.groups, static_cast<int>(ceil_div(states, 32) * 32)}, launch, args);
}

template <typename T, bool LAST, Act ACT, bool RESIDUAL, int U>
void run_apply(const ForwardArgs<compute_t<T>>& args, const Operand& x, int64_t n, bool training, const Launch& launch) {
  constexpr int V = kVector<T>;
  ApplyArgs<compute_t<T>> apply{args.x, args.residual, args.y, args.bits, args.weight, args.bias, args.running_mean, args.running_var,
                                args.stats, args.eps, {}, args.act, training};
  Tiles& t = apply.tiles;
  t.elements = n;
  t.channels = x.channels;
  t.by_channels = Divider(static_cast<uint32_t>(t.channels));
  int64_t blocks;
  if constexpr (LAST) {
    constexpr int kWhole = std::max(V, 8);  // elements of whole words and whole bytes of bits
    int64_t copies = 1;
    while (t.channels * copies % kWhole != 0) copies *= 2;
    t.columns = t.channels * copies;
    const int64_t words = t.columns / V;
    t.tiles = static_cast<int>(ceil_div(words, kApplyAcross));
    t.across = static_cast<int>(ceil_div(ceil_div(words, t.tiles), kWhole / V) * (kWhole / V));
    t.tiles = static_cast<int>(ceil_div(words, t.across));
    t.by_across = Divider(static_cast<uint32_t>(t.across));
    t.down = kApplyThreads / t.across;
    t.threads = static_cast<int>(ceil_div(t.across * t.down, 32) * 32);
    blocks = ceil_div(ceil_div(n, t.columns), U * t.down) * t.tiles;
  } else {
    t.plane = x.plane;
    t.small = n < INT32_MAX;
    if (t.plane < 1 << 30) t.by_plane = Divider(static_cast<uint32_t>(t.plane));
    t.threads = kApplyThreads;
    while (t.threads > 32 && U * V * t.threads / t.plane + 2 > kTable<T, U>) t.threads /= 2;
    blocks = ceil_div(ceil_div(n, V), U * t.threads);
  }
  launch_kernel(batch_norm_apply<T, LAST, ACT, RESIDUAL, U>, {blocks, t.threads}, launch, apply);
}

template <typename T, bool LAST, Act ACT, bool RESIDUAL>
void run_passes(ForwardArgs<compute_t<T>>& args, const Operand& x, bool training, const Launch& launch) {
  const int64_t n = x.x.numel();
  if (training) {
    if (run_in_one<T, LAST, ACT, RESIDUAL || ACT == Act::run_time>(args, x, n, launch)) return;
    run_statistics<T, LAST>(args, x, launch);
  }
  run_apply<T, LAST, ACT, RESIDUAL, kApplyUnroll<T>>(args, x, n, training, launch);
}

template <typename T>
void run_forward(ForwardArgs<compute_t<T>>& args, const Operand& x, bool training, const Launch& launch) {
  const bool residual = args.residual != nullptr;
  const auto run = [&](auto last) {
    constexpr bool LAST = decltype(last)::value;
    if constexpr (!std::is_same_v<T, double>) {
      if (!residual && args.act <= Act::relu) return run_passes<T, LAST, Act::relu, false>(args, x, training, launch);
      if (residual && args.act == Act::relu) return run_passes<T, LAST, Act::relu, true>(args, x, training, launch);
    }
    if (residual) return run_passes<T, LAST, Act::run_time, true>(args, x, training, launch);
    return run_passes<T, LAST, Act::run_time, false>(args, x, training, launch);
  };
  if (x.last) run(std::true_type{});
  else run(std::false_type{});
}

struct NormTensors {
  const MaybeTensor &weight, &bias, &running_mean, &running_var, &batches;
};

MaybeTensor bring(const Operand& x, const MaybeTensor& t, const char* op, const char* name) {
  if (!t) return std::nullopt;
  check_same(x.x, *t, op, name);
  return x.bring(*t, op, name);
}

// The number of batches that a layer has seen.
int64_t* counter(const MaybeTensor& t, const Tensor& x, const char* op) {
  if (!t) return nullptr;
  FASTLAYERS_CHECK(t->scalar_type() == ScalarType::Long && t->numel() == 1, op, "expected batches to be one int64");
  check_device(x, *t, op, "batches");
  return pointer<int64_t>(t);
}

struct ForwardOptions {
  double momentum, eps;
  int64_t act;
  bool training, bits, stats;
};

std::tuple<Tensor, Tensor, Tensor> forward(const char* op, const Tensor& x_in, const MaybeTensor& residual_in, const NormTensors& norm,
                                           const ForwardOptions& options, Tensor* moments = nullptr) {
  const Operand x(x_in, op);
  const Launch launch(x.x);
  const int64_t n = x.x.numel();
  const Act act = act_of(options.act, op);
  const bool has_bits = options.bits && residual_in && act == Act::relu;
  Tensor y = x.empty(x.x.scalar_type()), stats = empty_stats(options.stats, x.channels, x.x);
  Tensor bits = empty_contiguous({has_bits ? (n + 7) / 8 : 0}, ScalarType::Byte, x.x);
  const MaybeTensor residual = bring(x, residual_in, op, "residual");
  if (moments != nullptr) *moments = empty_stats(true, x.channels, x.x);
  if (n == 0) {
    if (moments != nullptr) torch::stable::zero_(*moments);
    return {y, stats, bits};
  }
  dispatch_floating(x.x.scalar_type(), op, [&](auto zero) {
    using T = decltype(zero);
    using A = compute_t<T>;
    ForwardArgs<A> args{};
    args.x = pointer<const void>(x.x);
    args.residual = pointer<const void>(residual);
    args.y = pointer<void>(y);
    args.bits = has_bits ? pointer<uint8_t>(bits) : nullptr;
    args.weight = x.values(norm.weight, op, "weight");
    args.bias = x.values(norm.bias, op, "bias");
    args.running_mean = x.values(norm.running_mean, op, "running_mean");
    args.running_var = x.values(norm.running_var, op, "running_var");
    if (moments != nullptr) {
      args.running_mean = {pointer<A>(*moments), true};
      args.running_var = {pointer<A>(*moments) + x.channels, true};
      args.fresh = true;
    }
    args.stats = options.stats ? pointer<A>(stats) : nullptr;
    args.batches = counter(norm.batches, x.x, op);
    args.momentum = static_cast<A>(options.momentum);
    args.eps = static_cast<A>(options.eps);
    args.count = x.count();
    args.act = act;
    run_forward<T>(args, x, options.training, launch);
  });
  return {y, stats, bits};
}

constexpr int kUpdateThreads = 128;

template <typename T>
__global__ void __launch_bounds__(kUpdateThreads) update_running(T* mean, T* var, int64_t* batches, const compute_t<T>* moments,
                                                                 int64_t channels, compute_t<T> momentum) {
  using A = compute_t<T>;
  const int64_t c = int64_t{blockIdx.x} * kUpdateThreads + threadIdx.x;
  if (c == 0 && batches != nullptr) ++*batches;
  if (c >= channels) return;
  mean[c] = convert<T>((A(1) - momentum) * convert<A>(mean[c]) + momentum * moments[c]);
  var[c] = convert<T>((A(1) - momentum) * convert<A>(var[c]) + momentum * moments[channels + c]);
}

// Updates the running statistics and the count of batches as batch_norm_train does, from the moments of batch_norm_moments.
void batch_norm_update_(const Tensor& running_mean, const Tensor& running_var, const MaybeTensor& batches, const Tensor& moments,
                        double momentum) {
  const char* op = "batch_norm_update_";
  const int64_t channels = running_mean.numel();
  const ScalarType dtype = running_mean.scalar_type();
  FASTLAYERS_CHECK(running_mean.is_contiguous() && running_var.is_contiguous() && running_var.numel() == channels &&
                       running_var.scalar_type() == dtype && moments.is_contiguous() && moments.numel() == 2 * channels &&
                       moments.scalar_type() == compute_dtype(dtype),
                   op, "expected contiguous running statistics of one dtype, and their moments");
  check_device(running_mean, running_var, op, "running_var");
  check_device(running_mean, moments, op, "moments");
  int64_t* const count = counter(batches, running_mean, op);
  if (channels == 0) return;
  const Launch launch(running_mean);
  dispatch_floating(dtype, op, [&](auto zero) {
    using T = decltype(zero);
    using A = compute_t<T>;
    launch_kernel(update_running<T>, {ceil_div(channels, kUpdateThreads), kUpdateThreads}, launch, pointer<T>(running_mean),
                  pointer<T>(running_var), count, pointer<const A>(moments), channels, static_cast<A>(momentum));
  });
}

template <typename T, bool LAST, Act ACT, Gate GATE>
void run_backward(BackwardArgs<compute_t<T>>& args, const Operand& x, const Launch& launch) {
  constexpr auto kernel = batch_norm_backward_kernel<T, LAST, ACT, GATE>;
  const int64_t resident = share_out<kernel, T, LAST>(args, x, launch), blocks = args.grid.blocks();
  const MaybeTensor partial = make_partial(args, 2, x);
  if (args.direct || blocks <= resident) {
    args.passes = kBoth;
    launch_kernel(kernel, {blocks, kThreads<LAST>, 0, 1, !args.direct}, launch, args);
  } else {  // blocks cannot wait for each other
    for (const Passes pass : {kFirst, kSecond}) {
      args.passes = pass;
      launch_kernel(kernel, {blocks, kThreads<LAST>}, launch, args);
    }
  }
}

std::tuple<Tensor, Tensor, Tensor> batch_norm_eval(const Tensor& x, const Tensor& running_mean, const Tensor& running_var,
                                                   const MaybeTensor& weight, const MaybeTensor& bias, double eps,
                                                   const MaybeTensor& residual, int64_t act, bool bits, bool keep) {
  const MaybeTensor none;
  return forward("batch_norm_eval", x, residual, {weight, bias, running_mean, running_var, none}, {0, eps, act, false, bits, keep});
}

// Also gives the mean and the unbiased variance of each channel, and writes no running statistics: for a graph, in which nothing is
// written.
std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm_moments(const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
                                                              double eps, const MaybeTensor& residual, int64_t act) {
  const MaybeTensor none;
  Tensor moments;
  const auto [y, stats, bits] =
      forward("batch_norm_moments", x, residual, {weight, bias, none, none, none}, {1, eps, act, true, true, true}, &moments);
  return {y, stats, bits, moments};
}

// Launches the last of the forward's kernels, without statistics.
void channel_bias_act_(const Tensor& x_in, const Tensor& bias, const MaybeTensor& residual_in, int64_t act) {
  const char* op = "channel_bias_act_";
  const Operand x(x_in, op);
  FASTLAYERS_CHECK(x.x.const_data_ptr() == x_in.const_data_ptr(), op,
                   "expected x contiguous or channels_last, and aligned to 16 bytes");
  const Launch launch(x.x);
  const Act activation = act_of(act, op);
  const MaybeTensor residual = bring(x, residual_in, op, "residual");
  if (x.x.numel() == 0) return;
  dispatch_floating(x.x.scalar_type(), op, [&](auto zero) {
    using T = decltype(zero);
    ForwardArgs<compute_t<T>> args{};
    args.x = args.y = pointer<void>(x.x);
    args.residual = pointer<const void>(residual);
    args.bias = x.values(bias, op, "bias");
    args.act = activation;
    run_forward<T>(args, x, false, launch);
  });
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> batch_norm_train(const Tensor& x, const MaybeTensor& running_mean, const MaybeTensor& running_var,
                                                    const MaybeTensor& weight, const MaybeTensor& bias, double momentum, double eps,
                                                    const MaybeTensor& residual, int64_t act, bool bits, const MaybeTensor& batches) {
  return forward("batch_norm_train", x, residual, {weight, bias, running_mean, running_var, batches},
                 {momentum, eps, act, true, bits, true});
}

std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm_backward(const Tensor& dy_in, const Tensor& x_in, const MaybeTensor& weight,
                                                               const MaybeTensor& bias, const Tensor& stats, bool training,
                                                               const MaybeTensor& residual_in, const MaybeTensor& bits, int64_t act,
                                                               bool want_dresidual) {
  const char* op = "batch_norm_backward";
  const Operand x(x_in, op);
  const Launch launch(x.x);
  const int64_t n = x.x.numel(), channels = x.channels;
  const ScalarType dtype = x.x.scalar_type();
  const Act activation = act_of(act, op);
  const Tensor dy = *bring(x, dy_in, op, "dy");
  const bool has_bits = bits && bits->numel() > 0;
  FASTLAYERS_CHECK(!has_bits || (activation == Act::relu && bits->numel() == (n + 7) / 8), op,
                   "expected bits with relu only, one for each of ", n, " elements");
  FASTLAYERS_CHECK(stats.numel() == 2 * channels && stats.is_contiguous() && stats.scalar_type() == compute_dtype(dtype), op,
                   "expected stats of [2, ", channels, "], contiguous, of dtype ", toString(compute_dtype(dtype)));
  const bool has_residual = residual_in && !has_bits && activation != Act::none;
  const MaybeTensor residual = has_residual ? bring(x, residual_in, op, "residual") : std::nullopt;
  const ScalarType param_dtype = weight ? weight->scalar_type() : compute_dtype(dtype);
  Tensor dx = x.empty(dtype), dresidual = want_dresidual ? x.empty(dtype) : empty_contiguous({0}, dtype, x.x);
  Tensor dweight = empty_contiguous({channels}, param_dtype, x.x), dbias = empty_contiguous({channels}, param_dtype, x.x);
  if (n == 0) {
    torch::stable::zero_(dweight);
    torch::stable::zero_(dbias);
    return {dx, dresidual, dweight, dbias};
  }
  dispatch_floating(dtype, op, [&](auto zero) {
    using T = decltype(zero);
    using A = compute_t<T>;
    BackwardArgs<A> args{};
    args.dy = pointer<const void>(dy);
    args.x = pointer<const void>(x.x);
    args.residual = pointer<const void>(residual);
    args.bits = has_bits ? pointer<const uint8_t>(bits) : nullptr;
    args.dx = pointer<void>(dx);
    args.dresidual = want_dresidual ? pointer<void>(dresidual) : nullptr;
    args.weight = x.values(weight, op, "weight");
    args.bias = x.values(bias, op, "bias");
    args.stats = pointer<const A>(stats);
    args.dweight = x.values(dweight, op, "weight");
    args.dbias = x.values(dbias, op, "weight");
    args.count = x.count();
    args.act = activation;
    args.training = training;
    const auto run = [&](auto last) {
      constexpr bool LAST = decltype(last)::value;
      if (has_bits) return run_backward<T, LAST, Act::relu, Gate::bits>(args, x, launch);
      if constexpr (!std::is_same_v<T, double>) {
        if (!residual && activation <= Act::relu) return run_backward<T, LAST, Act::relu, Gate::x>(args, x, launch);
      }
      return run_backward<T, LAST, Act::run_time, Gate::residual>(args, x, launch);
    };
    if (x.last) run(std::true_type{});
    else run(std::false_type{});
  });
  return {dx, dresidual, dweight, dbias};
}

}  // namespace fastlayers

STABLE_TORCH_LIBRARY_IMPL(fastlayers, CUDA, m) {
  m.impl("batch_norm_train", TORCH_BOX(&fastlayers::batch_norm_train));
  m.impl("batch_norm_moments", TORCH_BOX(&fastlayers::batch_norm_moments));
  m.impl("batch_norm_update_", TORCH_BOX(&fastlayers::batch_norm_update_));
  m.impl("batch_norm_eval", TORCH_BOX(&fastlayers::batch_norm_eval));
  m.impl("channel_bias_act_", TORCH_BOX(&fastlayers::channel_bias_act_));
  m.impl("batch_norm_backward", TORCH_BOX(&fastlayers::batch_norm_backward));
}

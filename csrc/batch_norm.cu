// act(batch_norm(x) + residual), training and eval, forward and backward.
//
// Training needs two passes over x, one for the statistics and one for the result, and so does the backward: one for the two
// sums over a channel, one for dx. A block has a piece of some channels, and leaves mean and sum of squared deviations of it;
// those of all pieces are merged in a fixed order. The second pass walks from the end to the beginning, so that it finds in L2
// what the first one read last.
//
// Small tensors' forwards, and all backwards, are one kernel: all blocks are resident (a cooperative launch), and each merges
// what the others found for its channels. Where one block has a whole channel, the blocks do not wait. Large forwards are
// three: the statistics of the pieces, their merging, and the result, an elementwise kernel of few registers that reaches the
// copy bandwidth where the second half of a kernel of many does not. In eval there is nothing but the last, which without
// statistics adds the bias of a convolution, in place.
//
// What is kept for backward is x and the statistics. With a residual the activation's argument cannot be computed from them:
// relu then keeps one bit an element (bit j of byte i for element 8i + j in memory order), the others the residual. The
// backward writes the residual's gradient in the first pass, and reads that instead of dy in the second.
//
//   LAST    channels last: a matrix of pixels by channels. A thread owns the V neighbouring channels of a 16-byte word and
//           walks down the pixels. Where the channels are no whole words, a row is `copies` pixels, which are; what is left
//           of the last row (the tail) is one masked row.
//   planes  contiguous: a channel is one plane of each image. Threads walk over the words of these planes, whose first and last
//           may belong to neighbouring channels in part, and then are masked.
#include <cooperative_groups.h>

#include "common/activations.cuh"
#include "common/ops.h"

namespace fastlayers {
namespace {

template <typename T>
constexpr int kVector = kVectorBytes / sizeof(T);

// Threads of a block. Channels last wants few, wide blocks: every block merges the pieces of all others that share its channels.
template <bool LAST>
constexpr int kThreads = LAST ? 512 : 256;
// Blocks an SM that the registers must allow.
template <bool LAST, typename T>
constexpr int kResident = LAST ? 1 : sizeof(T) == 8 ? 2 : 3;

// The same of the kernel that takes the statistics alone.
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

// A group is the channels of a block, an item what its threads count: rows (LAST), or the words of a channel.
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

// Where a thread stands. Its block has a piece of neighbouring items; or, SPREAD, one of every `pieces` steps, so that all
// blocks together walk through memory from its beginning to its end.
template <typename T, bool LAST, bool SPREAD = false>
struct Place {
  static constexpr int V = kVector<T>;
  int group, piece, tx, ty;
  bool active;
  int64_t column;   // LAST: of the thread's word. planes: the channel
  int64_t begin, end;

  __device__ explicit Place(const Grid& g) {
    group = blockIdx.x % g.groups;
    piece = blockIdx.x / g.groups;
    if constexpr (LAST) {
      ty = threadIdx.x / g.across;
      tx = threadIdx.x - ty * g.across;
      column = (static_cast<int64_t>(group) * g.across + tx) * V;
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

  __device__ __forceinline__ int down(const Grid& g) const { return LAST ? g.down : kThreads<false>; }
  __device__ __forceinline__ int stride(const Grid& g) const { return SPREAD ? down(g) * g.pieces : down(g); }

  // Steps of the walk, the same for all threads of the block.
  __device__ __forceinline__ int steps(const Grid& g, int64_t last) const {
    return last > begin ? static_cast<int>((last - begin + stride(g) - 1) / stride(g)) : 0;
  }

  // The block's columns: how many from which on.
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

// The word at p, or zeros. The predicate is in the assembly so that several loads are issued without a branch between them.
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

// The part of the word that is ours.
template <typename T>
__device__ __forceinline__ void store_spot(T* p, const Spot& s, const Vec<T, kVector<T>>& v) {
  constexpr int V = kVector<T>;
  if (s.whole<V>()) {
    store_vec<T, V>(p + s.at, v);
  } else {
#pragma unroll
    for (int j = 0; j < V; ++j)
      if (s.has(j)) p[s.at + j] = v.v[j];
  }
}

// Puts `fill` where the word is not ours.
template <typename T>
__device__ __forceinline__ void fill_outside(Vec<T, kVector<T>>& w, const Spot& s, const Vec<T, kVector<T>>& fill) {
  constexpr int V = kVector<T>;
  if (s.whole<V>()) return;
#pragma unroll
  for (int j = 0; j < V; ++j)
    if (!s.has(j)) w.v[j] = fill.v[j];
}

// The V bits of a word. Where a byte has more than one word (`shared`: and those are of neighbouring lanes), the lanes put
// theirs together; all lanes of a warp call this. Where neighbours are of other warps or blocks, into zeros by an atomic or.
template <int V>
__device__ __forceinline__ void store_bits(uint8_t* bits, const Spot& s, unsigned mine, bool shared) {
  if (!s.whole<V>()) {
#pragma unroll
    for (int j = 0; j < V; ++j)
      if (!s.has(j)) mine &= ~(1u << j);
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

// A value per channel, of x's dtype or of the compute type.
struct Param {
  void* data = nullptr;
  bool wide = false;
};

template <typename T>
__device__ __forceinline__ compute_t<T> load_param(const Param& p, int64_t c, float otherwise) {
  using A = compute_t<T>;
  if (p.data == nullptr) return otherwise;
  return p.wide ? static_cast<const A*>(p.data)[c] : convert<A>(static_cast<const T*>(p.data)[c]);
}

template <typename T>
__device__ __forceinline__ void store_param(const Param& p, int64_t c, compute_t<T> value) {
  if (p.wide) static_cast<compute_t<T>*>(p.data)[c] = value;
  else static_cast<T*>(p.data)[c] = convert<T>(value);
}

// ---- reductions ---------------------------------------------------------------------------------------------------------

// Count, mean and sum of squared deviations of some elements, for K channels at once.
template <typename A, int K>
struct Moments {
  static constexpr int kSize = 2 * K + 1;
  A v[kSize] = {};  // the count, K means, K sums

  // Chan's formula: no difference of large numbers, whatever the means.
  __device__ __forceinline__ void merge(const Moments& o) {
    if (o.v[0] == A(0)) return;
    const A n = v[0] + o.v[0], share = n > A(0) ? o.v[0] / n : A(0), weight = v[0] * share;
#pragma unroll
    for (int k = 1; k <= K; ++k) {
      const A d = o.v[k] - v[k];
      v[k] += d * share;
      v[K + k] += o.v[K + k] + d * (d * weight);
    }
    v[0] = n;
  }
};

template <typename A, int K>
struct Sums {
  static constexpr int kSize = 2 * K;
  A v[kSize] = {};  // K sums of dz, K sums of dz·(x - mean)

  __device__ __forceinline__ void merge(const Sums& o) {
#pragma unroll
    for (int k = 0; k < kSize; ++k) v[k] += o.v[k];
  }
};

template <typename State>
__device__ __forceinline__ void merge_warp(State& state) {
#pragma unroll 1
  for (int o = 16; o > 0; o >>= 1) {
    State other;
#pragma unroll
    for (int k = 0; k < State::kSize; ++k) other.v[k] = __shfl_down_sync(0xffffffffu, state.v[k], o);
    state.merge(other);
  }
}

// Merges the states of the threads of one column, of which the first of them (ty == 0) gets the result: a tree, so the
// same order in every run. `shared` has kSize values for every two threads. Ends with a barrier.
template <typename State, typename A, typename P>
__device__ __forceinline__ void merge_down(State& state, A* shared, const P& place, int across, int down) {
  const int slots = blockDim.x / 2;
  if (across == 1) {  // whole warps have the column, and threads without a part of it an empty state
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    merge_warp(state);
    if (lane == 0) {
#pragma unroll
      for (int k = 0; k < State::kSize; ++k) shared[k * slots + warp] = state.v[k];
    }
    __syncthreads();
    if (warp == 0) {
      state = State();
      if (lane < warps) {
#pragma unroll
        for (int k = 0; k < State::kSize; ++k) state.v[k] = shared[k * slots + lane];
      }
      merge_warp(state);
    }
    __syncthreads();
    return;
  }
  int half = 1;
  while (half < down) half <<= 1;
#pragma unroll 1
  for (half >>= 1; half > 0; half >>= 1) {
    if (place.ty >= half && place.ty < 2 * half && place.ty < down) {
      const int slot = (place.ty - half) * across + place.tx;
#pragma unroll
      for (int k = 0; k < State::kSize; ++k) shared[k * slots + slot] = state.v[k];
    }
    __syncthreads();
    if (place.ty < half && place.ty + half < down) {
      const int slot = place.ty * across + place.tx;
      State other;
#pragma unroll
      for (int k = 0; k < State::kSize; ++k) other.v[k] = shared[k * slots + slot];
      state.merge(other);
    }
    __syncthreads();
  }
}

// Passes of a launch. Both in one needs all blocks to be resident, or none to wait (Args::direct).
enum Passes : int { kFirst = 1, kSecond = 2, kBoth = 3 };

// Shared memory of a block: what merge_down needs, then the values of its columns.
template <typename T, bool LAST>
struct Shared {
  using A = compute_t<T>;
  static constexpr int V = kVector<T>, K = LAST ? V : 1, kColumns = LAST ? kMaxAcross * V : 1;
  A merging[Moments<A, K>::kSize * (kThreads<LAST> / 2)];
  A weight[kColumns], bias[kColumns];
  A first[kColumns], second[kColumns];  // mean and rstd; the sums of the backward
};

// The channel of a column.
__device__ __forceinline__ int64_t channel_of(const Grid& g, int64_t column) {
  return g.copies == 1 ? column : column % g.channels;
}

// Weight and bias of the block's columns, read while the first pass runs. Seen after the next barrier.
template <typename T, bool LAST>
__device__ __forceinline__ void load_affine(Shared<T, LAST>& shared, const Grid& g, const Place<T, LAST>& place, const Param& weight,
                                            const Param& bias) {
  for (int k = threadIdx.x; k < place.columns(g); k += blockDim.x) {
    const int64_t c = channel_of(g, place.first_column(g) + k);
    shared.weight[k] = load_param<T>(weight, c, 1.f);
    shared.bias[k] = load_param<T>(bias, c, 0.f);
  }
}

// K consecutive values, by whole words where they are: those of one thread begin at a word.
template <int K, typename A>
__device__ __forceinline__ Vec<A, K> load_values(const A* p) {  // another block wrote them: not through L1
  Vec<A, K> v;
  if constexpr (K * sizeof(A) % sizeof(uint4) == 0) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(K * sizeof(A) / sizeof(uint4)); ++i)
      reinterpret_cast<uint4*>(&v)[i] = __ldcg(reinterpret_cast<const uint4*>(p) + i);
  } else {
#pragma unroll
    for (int k = 0; k < K; ++k) v.v[k] = __ldcg(p + k);
  }
  return v;
}

// A piece's state goes to global memory as two arrays [pieces, columns], and the count as a third: of LAST that of column 0, the
// piece's rows.
template <bool LAST, int K, typename A, int N>
__device__ __forceinline__ void write_piece(A* partial, const Grid& g, int piece, int64_t column, const A (&v)[N]) {
  constexpr int kCount = N - 2 * K;  // Moments have one, Sums do not
  const int64_t step = g.pieces * g.columns;
  A* to = partial + piece * g.columns + column;
  Vec<A, K> first, second;
#pragma unroll
  for (int k = 0; k < K; ++k) first.v[k] = v[kCount + k], second.v[k] = v[kCount + K + k];
  store_vec<A, K>(to, first);
  store_vec<A, K>(to + step, second);
  if (kCount == 1 && (!LAST || column == 0)) to[2 * step] = v[0];
}

// The state of a piece, in one copy of the channels; `i` counts both.
template <bool LAST, int K, typename A, int N>
__device__ __forceinline__ void read_piece(A (&v)[N], const A* partial, const Grid& g, int i, int64_t column) {
  constexpr int kCount = N - 2 * K;
  const int piece = LAST ? i >> g.copy_bits : i;
  const int64_t step = g.pieces * g.columns;
  const A* from = partial + piece * g.columns;
  Vec<A, K> first, second;
  if (LAST && g.copies > 1) {
    const int64_t copy = (i & (g.copies - 1)) * g.channels;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int64_t at = (column + k) % g.channels + copy;
      first.v[k] = __ldcg(from + at);
      second.v[k] = __ldcg(from + step + at);
    }
  } else {
    first = load_values<K>(from + column);
    second = load_values<K>(from + step + column);
  }
#pragma unroll
  for (int k = 0; k < K; ++k) v[kCount + k] = first.v[k], v[kCount + K + k] = second.v[k];
  if constexpr (kCount == 1) v[0] = __ldcg(from + 2 * step + (LAST ? 0 : column));
}

// ---- statistics ---------------------------------------------------------------------------------------------------------

template <typename A>
struct ForwardArgs {
  const void* x;
  const void* residual;
  void* y;
  uint8_t* bits;
  Param weight, bias, running_mean, running_var;
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

// The mean of the first few elements of each of the thread's channels (the last one repeated where there are fewer). All means
// are merged as differences from it, so that a mean far from zero costs no digits.
// Seen after the next barrier.
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
    for (int i = 0; i < kElements; ++i)
#pragma unroll
      for (int k = 0; k < K; ++k) origin[k] += convert<A>(x[min(i, last) * g.channels + channel_of(g, place.column + k)]);
  } else {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      if constexpr (LAST) {
        const Vec<A, V> v = unpack<A>(load_vec<T, V>(x + min(i, last) * g.columns + place.column));
#pragma unroll
        for (int k = 0; k < K; ++k) origin[k] += v.v[k];
      } else {
        origin[0] += convert<A>(x[place.column * g.plane + min(i, last)]);
      }
    }
  }
#pragma unroll
  for (int k = 0; k < K; ++k) shared.origin[place.tx * V + k] = origin[k] * (A(1) / kElements);
}

// The moments of this thread's part of the piece: sums of deviations from its own first element, which has about the size of
// the others; one for all threads might be an outlier. U: words in flight.
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
#pragma unroll
      for (int u = 0; u < U; ++u) w[u] = load_if(step + u < mine, next + u * hop);
      next += U * hop;
      if (step == 0) shift = w[0];
#pragma unroll
      for (int u = 0; u < U; ++u)
        if (step + u >= mine) w[u] = shift;
    } else {
#pragma unroll
      for (int u = 0; u < U; ++u) {
        spots[u] = place.spot(g, step + u, last);
        w[u] = load_if(spots[u].any(), x + spots[u].at);
      }
      if (count == 0) {
#pragma unroll
        for (int u = U - 1; u >= 0; --u)
#pragma unroll
          for (int j = 0; j < V; ++j)
            if (spots[u].has(j)) shift.v[0] = w[u].v[j];
        shift = filled<T, V>(shift.v[0]);
      }
#pragma unroll
      for (int u = 0; u < U; ++u) {
        fill_outside(w[u], spots[u], shift);
        count += max(0, spots[u].hi - spots[u].lo);
      }
    }
    const Vec<A, V> from = unpack<A>(shift);
#pragma unroll
    for (int u = 0; u < U; ++u) {
      Vec<A, V> d = unpack<A>(w[u]);
#pragma unroll
      for (int j = 0; j < V; ++j) d.v[j] -= from.v[j];
      if constexpr (LAST) {
#pragma unroll
        for (int j = 0; j < V; ++j) s[j] += d.v[j], q[j] += d.v[j] * d.v[j];
      } else {
        A sum = 0, squares = 0;
#pragma unroll
        for (int j = 0; j < V; ++j) sum += d.v[j], squares += d.v[j] * d.v[j];
        s[0] += sum, q[0] += squares;
      }
    }
  }
  Moments<A, K> m;
  m.v[0] = static_cast<A>(count);
  __syncthreads();  // the origin
  if (count > 0) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const A mean = s[k] / m.v[0], squares = q[k] - s[k] * mean;
      m.v[1 + k] = convert<A>(shift.v[k]) - shared.origin[place.tx * V + k] + mean;
      m.v[1 + K + k] = squares < A(0) ? A(0) : squares;  // NaN stays
    }
  }
  return m;
}

// Pieces of a channel, of all copies of it.
template <bool LAST>
__device__ __forceinline__ int states_of(const Grid& g) { return LAST ? g.pieces << g.copy_bits : g.pieces; }

// The moments of the block's columns over all pieces, and the tail. `m`: the thread's first piece. Threads with ty == 0 get them.
template <typename T, bool LAST, typename P>
__device__ __forceinline__ auto merge_pieces(ForwardShared<T, LAST>& shared, const ForwardArgs<compute_t<T>>& a, const P& place,
                                             Moments<compute_t<T>, LAST ? kVector<T> : 1> m, int down) {
  using A = compute_t<T>;
  constexpr int V = kVector<T>, K = LAST ? V : 1;
  const Grid& g = a.grid;
  if (place.active) {
    const int states = states_of<LAST>(g);
#pragma unroll 2
    for (int i = place.ty + down; i < states; i += down) {
      Moments<A, K> other;
      read_piece<LAST, K>(other.v, a.partial, g, i, place.column);
      m.merge(other);
    }
    if constexpr (LAST) {
      const T* x = static_cast<const T*>(a.x);
#pragma unroll 1
      for (int64_t i = g.rows * g.columns + place.ty * g.channels; i < g.rows * g.columns + g.tail; i += down * g.channels) {
        Moments<A, K> pixel;
        pixel.v[0] = 1;
#pragma unroll
        for (int k = 0; k < K; ++k)
          pixel.v[1 + k] = convert<A>(x[i + channel_of(g, place.column + k)]) - shared.origin[place.tx * V + k];
        m.merge(pixel);
      }
    }
  }
  merge_down(m, shared.merging, place, LAST ? g.across : 1, down);
  return m;
}

// The running statistics of the thread's column, asked for before anything that has to wait.
template <typename A>
struct Running {
  A mean, var;

  template <typename T, typename P>
  __device__ static Running load(const ForwardArgs<A>& a, const P& place) {
    const int64_t c = place.first_column(a.grid) + threadIdx.x;
    if (a.fresh || static_cast<int>(threadIdx.x) >= place.columns(a.grid) || c >= a.grid.channels) return {A(0), A(0)};
    return {load_param<T>(a.running_mean, c, 0.f), load_param<T>(a.running_var, c, 0.f)};
  }
};

// From the moments of the block's columns to mean and rstd, which go to shared.first and shared.second (seen after the next
// barrier), and once a channel to memory with the running statistics. A thread has one column: several would wait for each
// other's loads and stores of the running ones.
template <typename T, bool LAST, typename P, int K>
__device__ __forceinline__ void finish_statistics(ForwardShared<T, LAST>& shared, const ForwardArgs<compute_t<T>>& a,
                                                  const P& place, const Moments<compute_t<T>, K>& m,
                                                  const Running<compute_t<T>>& old) {
  using A = compute_t<T>;
  const Grid& g = a.grid;
  if (place.ty == 0 && place.active) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      shared.first[place.tx * kVector<T> + k] = m.v[1 + k];
      shared.second[place.tx * kVector<T> + k] = m.v[1 + K + k];
    }
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
    if (a.running_mean.data != nullptr) store_param<T>(a.running_mean, c, (A(1) - a.momentum) * old.mean + a.momentum * mean);
    if (a.running_var.data != nullptr)
      store_param<T>(a.running_var, c, (A(1) - a.momentum) * old.var + a.momentum * (squares / static_cast<A>(a.count - 1)));
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
  merge_down(m, shared.merging, place, LAST ? g.across : 1, place.down(g));
  if (a.direct) finish_statistics(shared, a, place, m, Running<compute_t<T>>::template load<T>(a, place));
  else if (place.ty == 0 && place.active) write_piece<LAST, K>(a.partial, g, place.piece, place.column, m.v);
}

// Merges the pieces that batch_norm_statistics left. A block has one word of columns, or one channel.
template <typename T, bool LAST>
__global__ void __launch_bounds__(kThreads<LAST>) batch_norm_merge(const ForwardArgs<compute_t<T>> a) {
  __shared__ ForwardShared<T, LAST> shared;
  constexpr int K = LAST ? kVector<T> : 1;
  const Place<T, LAST> place(a.grid);
  const auto old = Running<compute_t<T>>::template load<T>(a, place);
  // The first piece is asked for before the origin has arrived.
  Moments<compute_t<T>, K> first;
  const int down = LAST ? a.grid.down : static_cast<int>(blockDim.x);
  if (place.active && place.ty < states_of<LAST>(a.grid)) read_piece<LAST, K>(first.v, a.partial, a.grid, place.ty, place.column);
  load_origin(shared, static_cast<const T*>(a.x), a.grid, place);
  __syncthreads();
  finish_statistics(shared, a, place, merge_pieces(shared, a, place, first, down), old);
}

// ---- forward in one kernel ----------------------------------------------------------------------------------------------

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
  merge_down(m, shared.merging, place, LAST ? g.across : 1, place.down(g));
  if (!a.direct) {
    if (place.ty == 0 && place.active) write_piece<LAST, K>(a.partial, g, place.piece, place.column, m.v);
    cooperative_groups::this_grid().sync();
    Moments<A, K> first;
    if (place.active && place.ty < states_of<LAST>(g)) read_piece<LAST, K>(first.v, a.partial, g, place.ty, place.column);
    m = merge_pieces(shared, a, place, first, place.down(g));
  }
  finish_statistics(shared, a, place, m, old);
  __syncthreads();

  A mean[K], scale[K], bias[K];
#pragma unroll
  for (int k = 0; k < K; ++k) {
    mean[k] = shared.first[local + k];
    scale[k] = shared.weight[local + k] * shared.second[local + k];
    bias[k] = shared.bias[local + k];
  }
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
      if constexpr (RESIDUAL) r[u] = load_if(spots[u].any(), residual + spots[u].at);
    }
    with_act<ACT>(a.act, [&](auto act) {
      constexpr Act kAct = decltype(act)::value;
#pragma unroll
      for (int u = U - 1; u >= 0; --u) {
        Vec<A, V> z = unpack<A>(w[u]);
        [[maybe_unused]] Vec<A, V> more;
        if constexpr (RESIDUAL) more = unpack<A>(r[u]);
        [[maybe_unused]] unsigned kept = 0;
#pragma unroll
        for (int j = 0; j < V; ++j) {
          constexpr int kStep = LAST ? 1 : 0;
          A v = fma(z.v[j] - mean[j * kStep], scale[j * kStep], bias[j * kStep]);
          if constexpr (RESIDUAL) v += more.v[j];
          if constexpr (RESIDUAL && kAct == Act::relu) kept |= static_cast<unsigned>(!(v <= A(0))) << j;  // NaN is kept, as by torch
          z.v[j] = act_value<kAct, sizeof(T) == 2>(v);
        }
        if constexpr (RESIDUAL && kAct == Act::relu) {
          if (a.bits != nullptr) store_bits<V>(a.bits, spots[u], kept, a.bits_shared);
        }
        store_spot(y, spots[u], pack<T>(z));
      }
    });
  }
}

// ---- the result alone ---------------------------------------------------------------------------------------------------

// The tensor as a flat row of words. LAST: a block has `across` words of `down` rows, as often as a thread has words. planes: a
// block has neighbouring words.
struct Tiles {
  int64_t elements, channels;
  int64_t columns;              // LAST: elements of a row, whole bytes of bits
  int64_t plane;                // planes: elements
  Divider by_across;            // LAST
  Divider by_plane, by_channels;
  int across, down, tiles;      // LAST: tiles of a row
  int threads;
  bool small;                   // Dividers serve for element numbers
};

template <typename A>
struct ApplyArgs {
  const void* x;
  const void* residual;
  void* y;
  uint8_t* bits;
  Param weight, bias, running_mean, running_var;
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
    mean = load_param<T>(a.running_mean, c, 0.f);
    rstd = A(1) / sqrt(load_param<T>(a.running_var, c, 1.f) + a.eps);
  }
}

template <typename T, bool LAST, Act ACT, bool RESIDUAL, int U>
__global__ void __launch_bounds__(kApplyThreads, kApplyResident<T, U, RESIDUAL>)
    batch_norm_apply(const ApplyArgs<compute_t<T>> a) {
  using A = compute_t<T>;
  constexpr int V = kVector<T>;
  __shared__ alignas(kVectorBytes) A means[kTable<T, U>], scales[kTable<T, U>], biases[kTable<T, U>];
  const Tiles& t = a.tiles;
  const uint32_t block = gridDim.x - 1 - blockIdx.x;  // what the statistics read last comes first
  int64_t at, step;   // the thread's first element, elements from one of its words to the next
  int64_t first;      // of the block: LAST its first column, planes its first element
  int tx = 0, count;  // channels of the block
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
  const int64_t left = active ? t.elements - at : 0;

  const T* x = static_cast<const T*>(a.x) + at;
  const T* residual = static_cast<const T*>(a.residual) + at;
  Vec<T, V> w[U], r[U];
#pragma unroll
  for (int u = 0; u < U; ++u) {
    w[u] = load_if(u * step < left, x + u * step);
    if constexpr (RESIDUAL) r[u] = load_if(u * step < left, residual + u * step);
  }

  // Planes: where the block begins in its first plane, and how many planes further an element is, `e` counted from there.
  int64_t within = 0;
  [[maybe_unused]] const bool near = t.plane < 1 << 30;
  [[maybe_unused]] const auto plane_of = [&](int64_t e) {
    return near ? static_cast<int>(t.by_plane.quotient(static_cast<uint32_t>(e))) : static_cast<int>(e >= t.plane);
  };
  uint32_t channel = 0;  // of the first plane
  if constexpr (!LAST) {
    const int64_t plane = t.small ? t.by_plane.quotient(static_cast<uint32_t>(first)) : first / t.plane;
    within = first - plane * t.plane;
    const int64_t image = t.small ? t.by_channels.quotient(static_cast<uint32_t>(plane)) : plane / t.channels;
    channel = static_cast<uint32_t>(plane - image * t.channels);
    count = plane_of(within + U * step - 1) + 1;
  }
  for (int k = threadIdx.x; k < count; k += blockDim.x) {
    const uint32_t i = (LAST ? static_cast<uint32_t>(first) : channel) + k;
    const uint32_t c = i - t.by_channels.quotient(i) * t.by_channels.divisor;
    A mean, rstd;
    load_statistics<T>(a, c, mean, rstd);
    means[k] = mean;
    scales[k] = load_param<T>(a.weight, c, 1.f) * rstd;
    biases[k] = load_param<T>(a.bias, c, 0.f);
  }
  if (!a.training && a.stats != nullptr) {
    const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t c = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; c < t.channels; c += threads) {
      A mean, rstd;
      load_statistics<T>(a, c, mean, rstd);
      a.stats[c] = mean;
      a.stats[t.channels + c] = rstd;
    }
  }
  __syncthreads();

  Vec<A, V> mean, scale, bias;
  if constexpr (LAST) {
    mean = load_vec<A, V>(means + tx * V);
    scale = load_vec<A, V>(scales + tx * V);
    bias = load_vec<A, V>(biases + tx * V);
  }
  T* y = static_cast<T*>(a.y) + at;
  // The words move up to the first place, so that the code of all activations is there once. Nothing moves where it is unrolled.
#pragma unroll (ACT == Act::run_time ? 1 : U)
  for (int u = 0; u < U; ++u) {
    with_act<ACT>(a.act, [&](auto act) {
      constexpr Act kAct = decltype(act)::value;
      Vec<A, V> z = unpack<A>(w[0]);
      if constexpr (LAST) {
#pragma unroll
        for (int j = 0; j < V; ++j) z.v[j] = fma(z.v[j] - mean.v[j], scale.v[j], bias.v[j]);
      } else {
        const int64_t e = within + threadIdx.x * V + u * step;
        const int k = plane_of(e);
        if (e + V <= (k + 1) * t.plane) {
          const A m = means[k], s = scales[k], b = biases[k];
#pragma unroll
          for (int j = 0; j < V; ++j) z.v[j] = fma(z.v[j] - m, s, b);
        } else {
#pragma unroll
          for (int j = 0; j < V; ++j) {
            const int kj = plane_of(e + j);
            z.v[j] = fma(z.v[j] - means[kj], scales[kj], biases[kj]);
          }
        }
      }
      if constexpr (RESIDUAL) {
        const Vec<A, V> more = unpack<A>(r[0]);
#pragma unroll
        for (int j = 0; j < V; ++j) z.v[j] += more.v[j];
      }
      const int64_t rest = left - u * step;
      if constexpr (RESIDUAL && kAct == Act::relu) {
        unsigned kept = 0;
#pragma unroll
        for (int j = 0; j < V; ++j) kept |= static_cast<unsigned>(!(z.v[j] <= A(0))) << j;  // NaN is kept, as by torch
        // A word's neighbours in its byte are of neighbouring lanes.
        const Spot spot{at + u * step, 0, static_cast<int>(max(static_cast<int64_t>(0), min(rest, static_cast<int64_t>(V))))};
        if (a.bits != nullptr) store_bits<V>(a.bits, spot, kept, true);
      }
#pragma unroll
      for (int j = 0; j < V; ++j) z.v[j] = act_value<kAct, sizeof(T) == 2>(z.v[j]);
      const Vec<T, V> out = pack<T>(z);
      if (rest >= V) {
        store_vec<T, V>(y + u * step, out);
      } else {
#pragma unroll
        for (int j = 0; j < V; ++j)
          if (j < rest) y[u * step + j] = out.v[j];
      }
    });
#pragma unroll
    for (int i = 0; i + 1 < U; ++i) {
      w[i] = w[i + 1];
      if constexpr (RESIDUAL) r[i] = r[i + 1];
    }
  }
}

// ---- backward -----------------------------------------------------------------------------------------------------------

// How the activation's argument is known: from x, from a bit (relu), from x and the residual.
enum class Gate : int { x, bits, residual };

template <typename A>
struct BackwardArgs {
  const void* dy;
  const void* x;
  const void* residual;
  const uint8_t* bits;
  void* dx;
  void* dresidual;
  Param weight, bias;
  const A* stats;
  Param dweight, dbias;
  A* partial;
  int64_t count;
  Grid grid;
  Act act;
  Passes passes;
  bool training, direct;
};

// Whole steps of the walk, their words loaded together. f(spot, dz, x - mean) for each.
template <typename T, bool LAST, Act ACT, Gate GATE, int K>
struct BackwardWalk {
  using A = compute_t<T>;
  static constexpr int V = kVector<T>, U = kUnroll<T, ACT>, kStep = LAST ? 1 : 0;
  A mean[K], scale[K], bias[K];

  // GATED: dz is still to be computed from dy; else `dy` has it.
  template <bool GATED, bool REVERSED, typename F>
  __device__ __forceinline__ void group(const BackwardArgs<A>& a, const Place<T, LAST>& place, int step, const T* dy, F&& f) const {
    constexpr bool kBits = GATED && GATE == Gate::bits, kResidual = GATED && GATE == Gate::residual;
    const T* x = static_cast<const T*>(a.x);
    Vec<T, V> wg[U], wx[U], wr[U];
    unsigned kept[U];
    Spot spots[U];
#pragma unroll
    for (int i = 0; i < U; ++i) {
      const int u = REVERSED ? U - 1 - i : i;
      spots[u] = place.spot(a.grid, step + u, place.end);
      wg[u] = load_if(spots[u].any(), dy + spots[u].at);
      wx[u] = load_if(spots[u].any(), x + spots[u].at);
      if constexpr (kResidual) wr[u] = load_if(spots[u].any() && a.residual != nullptr, static_cast<const T*>(a.residual) + spots[u].at);
      if constexpr (kBits) kept[u] = spots[u].any() ? a.bits[spots[u].at >> 3] >> (spots[u].at & 7) : 0;
    }
    with_act<GATED ? ACT : Act::none>(a.act, [&](auto act) {
      [[maybe_unused]] constexpr Act kAct = decltype(act)::value;
      const Vec<T, V> zero = filled<T, V>(convert<T>(0.f));
#pragma unroll
      for (int i = 0; i < U; ++i) {
        const int u = REVERSED ? U - 1 - i : i;
        fill_outside(wg[u], spots[u], zero);
        fill_outside(wx[u], spots[u], zero);
        Vec<A, V> g = unpack<A>(wg[u]), d = unpack<A>(wx[u]);
        [[maybe_unused]] Vec<A, V> more;
        if constexpr (kResidual) {
          fill_outside(wr[u], spots[u], zero);
          more = unpack<A>(wr[u]);
        }
#pragma unroll
        for (int j = 0; j < V; ++j) {
          d.v[j] -= mean[j * kStep];
          if constexpr (kBits) {
            g.v[j] = kept[u] >> j & 1 ? g.v[j] : A(0);
          } else if constexpr (GATED && kAct != Act::none) {
            A z = fma(d.v[j], scale[j * kStep], bias[j * kStep]);
            if constexpr (kResidual) z += more.v[j];
            g.v[j] = act_gradient<kAct, sizeof(T) == 2>(g.v[j], z);
          }
        }
        f(spots[u], g, d);
      }
    });
  }
};

template <typename T, bool LAST, Act ACT, Gate GATE>
__global__ void __launch_bounds__(kThreads<LAST>, kResident<LAST, T>) batch_norm_backward(const BackwardArgs<compute_t<T>> a) {
  using A = compute_t<T>;
  constexpr int V = kVector<T>, K = LAST ? V : 1, kStep = LAST ? 1 : 0;
  using Walk = BackwardWalk<T, LAST, ACT, GATE, K>;
  constexpr int U = Walk::U;
  __shared__ Shared<T, LAST> shared;
  const Grid& g = a.grid;
  const Place<T, LAST> place(g);
  const int local = place.tx * V;
  const int down = place.down(g), across = LAST ? g.across : 1;
  const T* dy = static_cast<const T*>(a.dy);
  T* dx = static_cast<T*>(a.dx);
  T* dresidual = static_cast<T*>(a.dresidual);
  load_affine(shared, g, place, a.weight, a.bias);
  __syncthreads();

  Walk walk;
  A rstd[K];
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const int64_t c = place.active ? channel_of(g, place.column + k) : 0;
    walk.mean[k] = a.stats[c];
    rstd[k] = a.stats[g.channels + c];
    walk.scale[k] = place.active ? shared.weight[local + k] * rstd[k] : A(0);
    walk.bias[k] = place.active ? shared.bias[local + k] : A(0);
  }
  const int steps = place.steps(g, place.end);

  Sums<A, K> sums;
  if (a.passes & kFirst) {
#pragma unroll 1
    for (int step = 0; step < steps; step += U)
      walk.template group<true, false>(a, place, step, dy, [&](const Spot& spot, Vec<A, V>& dz, const Vec<A, V>& d) {
        if (dresidual != nullptr) store_spot(dresidual, spot, pack<T>(dz));
        if constexpr (LAST) {
#pragma unroll
          for (int j = 0; j < V; ++j) sums.v[j] += dz.v[j], sums.v[K + j] += dz.v[j] * d.v[j];
        } else {
          A first = 0, second = 0;
#pragma unroll
          for (int j = 0; j < V; ++j) first += dz.v[j], second += dz.v[j] * d.v[j];
          sums.v[0] += first, sums.v[K] += second;
        }
        if (!a.training) {  // mean and rstd are constants: nothing to wait for
#pragma unroll
          for (int j = 0; j < V; ++j) dz.v[j] *= walk.scale[j * kStep];
          store_spot(dx, spot, pack<T>(dz));
        }
      });
    merge_down(sums, shared.merging, place, across, down);
    if (!a.direct && place.ty == 0 && place.active) write_piece<LAST, K>(a.partial, g, place.piece, place.column, sums.v);
    if (!(a.passes & kSecond)) return;
    if (!a.direct) cooperative_groups::this_grid().sync();
  }
  if (!a.direct) {
    sums = Sums<A, K>();
    if (place.active) {
      const int states = LAST ? g.pieces << g.copy_bits : g.pieces;
#pragma unroll 2
      for (int i = place.ty; i < states; i += down) {
        Sums<A, K> other;
        read_piece<LAST, K>(other.v, a.partial, g, i, place.column);
        sums.merge(other);
      }
    }
    merge_down(sums, shared.merging, place, across, down);
  }
  if (place.ty == 0 && place.active) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      shared.first[local + k] = sums.v[k];
      shared.second[local + k] = sums.v[K + k];
      if (place.piece == 0 && place.column + k < g.channels) {
        store_param<T>(a.dweight, place.column + k, sums.v[K + k] * rstd[k]);
        store_param<T>(a.dbias, place.column + k, sums.v[k]);
      }
    }
  }
  if (!a.training) return;
  __syncthreads();

  A from_x[K], constant[K];
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const A n = static_cast<A>(a.count);
    from_x[k] = -walk.scale[k] * (shared.second[local + k] / n) * rstd[k] * rstd[k];
    constant[k] = -walk.scale[k] * (shared.first[local + k] / n);
  }
  const auto result = [&](const Spot& spot, Vec<A, V>& dz, const Vec<A, V>& d) {
#pragma unroll
    for (int j = 0; j < V; ++j)
      dz.v[j] = fma(dz.v[j], walk.scale[j * kStep], fma(d.v[j], from_x[j * kStep], constant[j * kStep]));
    store_spot(dx, spot, pack<T>(dz));
  };
#pragma unroll 1
  for (int step = (steps - 1) / U * U; step >= 0; step -= U) {
    if (dresidual != nullptr) walk.template group<false, true>(a, place, step, dresidual, result);
    else walk.template group<true, true>(a, place, step, dy, result);
  }
}

// ---- launch rules -------------------------------------------------------------------------------------------------------

// An (N, C, *) tensor as the kernels see it.
struct Image {
  int64_t images, channels, plane;
  bool last;

  int64_t count() const { return images * plane; }
};

// Elements below which more and narrower blocks occupy more of the GPU. Above, a block is 16 words across: at (64, 256, 56, 56)
// channels last, bfloat16, .84 of the copy bandwidth forward and .92 backward on an H100, for .82 and .90 with 8. Below the
// line, in eval, 8 steps of a thread took 13 us at (128, 512, 7, 7) for 21 with 4.
constexpr int64_t kSmall = int64_t{1} << 23;

// How to share out the channels of a launch. `resident`: blocks that the GPU holds at once. `fills`: blocks need not be
// resident, and should be as many as fill the GPU.
Grid share_out(const Image& image, int vector, int64_t resident, int processors, bool fills = false) {
  Grid g{};
  g.channels = image.channels;
  g.copies = 1;
  const int least = 4;  // steps of a thread, below which a piece is not cut
  const bool small = image.count() * image.channels < kSmall;
  if (image.last) {
    const int64_t pixels = image.count();
    while (image.channels * g.copies % vector != 0) g.copies *= 2;
    g.copy_bits = log2_of(g.copies);
    g.columns = image.channels * g.copies;
    g.rows = pixels / g.copies;
    g.tail = static_cast<int>(pixels % g.copies * image.channels);
    g.items = g.rows + (g.tail > 0);
    const int64_t words = g.columns / vector;
    const int sharing = std::max(1, 8 / vector);
    double best = -1;
    for (int wanted = small ? 8 : 16; wanted <= kMaxAcross; wanted *= 2) {
      const int64_t tiles = ceil_div(words, wanted);
      int64_t across = ceil_div(words, tiles);
      if (tiles > 1) across = std::min<int64_t>(kMaxAcross, ceil_div(across, sharing) * sharing);  // whole bytes of bits
      const int64_t groups = ceil_div(words, across), down = kThreads<true> / across;
      const int64_t useful = g.items <= 2 * least * down ? 1 : ceil_div(g.items, least * down);
      const int64_t room = std::max<int64_t>(1, resident / groups), pieces = std::min(useful, room);
      // The part of the resident blocks that work, if it is they that limit.
      const double use = pieces < room ? 1.0 : static_cast<double>(groups * pieces) / static_cast<double>(ceil_div(groups * pieces, resident) * resident);
      if (use > best + 0.03) {
        best = use;
        g.across = static_cast<int>(across);
        g.down = static_cast<int>(down);
        g.groups = static_cast<int>(groups);
        g.pieces = static_cast<int>(pieces);
      }
      if (wanted >= words) break;
    }
    g.each = ceil_div(g.items, g.pieces);
  } else {
    g.columns = image.channels;
    g.plane = image.plane;
    const bool ragged = image.plane % vector != 0;
    const int64_t words = ceil_div(image.plane + (ragged ? vector - 1 : 0), vector);
    g.words = Divider(static_cast<uint32_t>(words));
    g.items = image.images * words;
    STD_TORCH_CHECK(g.items < INT32_MAX - (1 << 16), "fastlayers::batch_norm: ", image.count(), " elements a channel are more than the kernels take");
    g.groups = static_cast<int>(image.channels);
    const int64_t useful = std::max<int64_t>(1, g.items / (least * kThreads<false>));
    const int64_t room = std::max<int64_t>(1, (fills ? 4 : 1) * resident / image.channels), unit = fills ? resident : processors;
    // As few pieces as keep the SMs evenly loaded.
    double best = -1;
    for (int64_t pieces = 1; pieces <= std::min(useful, room); ++pieces) {
      const int64_t blocks = image.channels * pieces;
      const double use = static_cast<double>(blocks) / static_cast<double>(ceil_div(blocks, unit) * unit);
      if (use > best + 0.03) {
        best = use;
        g.pieces = static_cast<int>(pieces);
      }
      if (best > 0.95) break;
    }
    g.each = ceil_div(ceil_div(g.items, g.pieces), kThreads<false>) * kThreads<false>;  // pieces begin at whole bytes of bits
  }
  return g;
}

// Blocks of a kernel that the GPU holds at once.
template <auto kernel>
int64_t resident_blocks(const Launch& launch, int threads) {
  static int resident[kMaxDevices];
  int& each = resident[launch.device()];
  if (each == 0) {
    STD_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, threads, 0));
    each = std::max(each, 1);
  }
  return static_cast<int64_t>(each) * device_traits(launch.device()).processors;
}

template <auto kernel, typename Args>
void launch_blocks(const Args& args, int64_t blocks, int threads, bool cooperative, const Launch& launch) {
  STD_TORCH_CHECK(blocks <= INT32_MAX, "fastlayers::batch_norm: ", blocks, " blocks are more than one launch takes");
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = launch.stream();
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  if (cooperative) config.attrs = &attribute, config.numAttrs = 1;
  STD_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, args));
}

// ---- host ---------------------------------------------------------------------------------------------------------------

// x in one of the two layouts, by a copy where it has neither or does not start on a 16-byte word.
struct Operand {
  Tensor x;
  Image image;

  Operand(const Tensor& x_in, const char* op) : x(x_in), image{} {
    const auto sizes = x_in.sizes();
    const int64_t dims = x_in.dim();
    STD_TORCH_CHECK(dims >= 2 && dims <= 5, "fastlayers::", op, ": expected x of 2 to 5 dimensions, but got ", dims);
    image.images = sizes[0];
    image.channels = sizes[1];
    image.plane = 1;
    for (int64_t d = 2; d < dims; ++d) image.plane *= sizes[d];
    const bool contiguous = x_in.is_contiguous(), channels_last = !contiguous && is_channels_last(x_in);
    image.last = (channels_last || image.plane == 1) && image.channels > 1;
    if (!contiguous && !channels_last) x = torch::stable::contiguous(x_in);
    else if (!aligned(x_in.const_data_ptr())) x = copy(x_in);
    if (!image.last && image.channels == 1) {  // one plane
      image.plane *= image.images;
      image.images = 1;
    }
  }

  Tensor empty() const { return empty_strided(x.dim(), x.sizes().data(), x.strides().data(), x.scalar_type(), x); }

  // t in x's layout.
  Tensor like_x(const Tensor& t, const char* op, const char* name) const {
    check_same(x, t, op, name);
    bool same = t.dim() == x.dim(), fits = same;
    for (int64_t d = 0; d < x.dim() && same; ++d) {
      same = t.size(d) == x.size(d);
      fits = fits && same && (t.size(d) == 1 || t.stride(d) == x.stride(d));
    }
    STD_TORCH_CHECK(same, "fastlayers::", op, ": expected ", name, " of x's shape");
    return fits && aligned(t.const_data_ptr()) ? t : copy(t);
  }

 private:
  Tensor copy(const Tensor& t) const {
    Tensor c = empty();
    torch::stable::copy_(c, t);
    return c;
  }
  static bool is_channels_last(const Tensor& t) {
    int64_t step = 1;
    const int64_t dims = t.dim();
    for (int64_t i = 0; i < dims; ++i) {
      const int64_t d = i == 0 ? 1 : i == dims - 1 ? 0 : dims - i;
      if (t.size(d) > 1 && t.stride(d) != step) return false;
      step *= t.size(d);
    }
    return true;
  }
};

// A vector of a value per channel, of x's dtype or of the compute type.
Param param(const std::optional<Tensor>& t, const Operand& x, const char* op, const char* name) {
  if (!t) return {};
  const ScalarType own = x.x.scalar_type(), dtype = t->scalar_type();
  const ScalarType wide = own == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  STD_TORCH_CHECK(dtype == own || dtype == wide, "fastlayers::", op, ": expected ", name, " of x's dtype ",
                  torch::headeronly::toString(own), " or ", torch::headeronly::toString(wide), ", but got ",
                  torch::headeronly::toString(dtype));
  STD_TORCH_CHECK(t->is_cuda() && t->get_device_index() == x.x.get_device_index(), "fastlayers::", op, ": expected ", name,
                  " on x's device");
  STD_TORCH_CHECK(t->numel() == x.image.channels && t->is_contiguous(), "fastlayers::", op, ": expected ", name, " of ",
                  x.image.channels, " contiguous values");
  return {const_cast<void*>(t->const_data_ptr()), dtype == wide};
}

Tensor empty_values(int64_t n, ScalarType dtype, const Tensor& like) {
  const int64_t size = n, stride = 1;
  return empty_strided(1, &size, &stride, dtype, like);
}

Tensor empty_stats(bool wanted, int64_t channels, const Tensor& x) {
  if (!wanted) return empty_values(0, compute_dtype(x), x);
  const int64_t sizes[] = {2, channels}, strides[] = {channels, 1};
  return empty_strided(2, sizes, strides, compute_dtype(x), x);
}

// Whether the words of each byte of bits are of neighbouring lanes.
bool bytes_are_whole(const Image& image, const Grid& g, int vector) {
  if (vector >= 8) return false;
  return image.last ? g.columns % 8 == 0 && (g.groups == 1 || g.across % (8 / vector) == 0) : image.plane % 8 == 0;
}

Tensor empty_partial(int states, const Grid& g, const Tensor& x) {
  return empty_values(states * g.pieces * g.columns, compute_dtype(x), x);
}

constexpr int kUpdateThreads = 128;

// Bytes of x that may wait in L2 for the second pass of one kernel. Above, statistics and result are kernels of their own.
constexpr int64_t kHeldBytes = int64_t{28} << 20;

// Launches the whole forward if x, or what the resident blocks have of it, stays in L2 between the passes.
template <typename T, bool LAST, Act ACT, bool RESIDUAL>
bool run_in_one(ForwardArgs<compute_t<T>>& args, const Operand& x, int64_t n, const Launch& launch) {
  constexpr auto kernel = batch_norm_forward<T, LAST, ACT, RESIDUAL>;
  constexpr int V = kVector<T>;
  const int64_t resident = resident_blocks<kernel>(launch, kThreads<LAST>);
  args.grid = share_out(x.image, V, resident, device_traits(launch.device()).processors);
  const Grid& g = args.grid;
  const int64_t blocks = static_cast<int64_t>(g.groups) * g.pieces;
  args.direct = g.pieces == 1 && g.copies == 1;
  if (blocks > resident && !args.direct) return false;
  const int64_t bytes = n * static_cast<int64_t>(sizeof(T));
  if (std::min(bytes, bytes / blocks * resident) > kHeldBytes) return false;
  args.bits_shared = bytes_are_whole(x.image, g, V);
  std::optional<Tensor> partial;
  if (!args.direct) {
    partial = empty_partial(3, g, x.x);
    args.partial = static_cast<compute_t<T>*>(partial->mutable_data_ptr());
  }
  // Bytes that several blocks may write are or-ed into zeros.
  const bool whole = V < 8 ? args.bits_shared : LAST ? g.tail == 0 : x.image.plane % 8 == 0;
  if (args.bits != nullptr && !whole) STD_CUDA_CHECK(cudaMemsetAsync(args.bits, 0, (n + 7) / 8, launch.stream()));
  launch_blocks<kernel>(args, blocks, kThreads<LAST>, !args.direct, launch);
  return true;
}

template <typename T, bool LAST>
void run_statistics(ForwardArgs<compute_t<T>>& args, const Operand& x, const Launch& launch) {
  constexpr auto kernel = batch_norm_statistics<T, LAST>;
  constexpr int V = kVector<T>;
  const int64_t resident = resident_blocks<kernel>(launch, kThreads<LAST>);
  args.grid = share_out(x.image, V, resident, device_traits(launch.device()).processors, true);
  Grid& g = args.grid;
  args.direct = g.pieces == 1 && g.copies == 1;
  std::optional<Tensor> partial;
  if (!args.direct) {
    partial = empty_partial(3, g, x.x);
    args.partial = static_cast<compute_t<T>*>(partial->mutable_data_ptr());
  }
  launch_blocks<kernel>(args, static_cast<int64_t>(g.groups) * g.pieces, kThreads<LAST>, false, launch);
  if (args.direct) return;
  const int states = std::min(kThreads<LAST>, LAST ? g.pieces << g.copy_bits : g.pieces);
  if constexpr (LAST) {
    g.across = 1;
    g.down = states;
    g.groups = static_cast<int>(ceil_div(g.channels, V));
  }
  launch_blocks<batch_norm_merge<T, LAST>>(args, g.groups, static_cast<int>(ceil_div(states, 32) * 32), false, launch);
}

template <typename T, bool LAST, Act ACT, bool RESIDUAL, int U>
void run_apply(const ForwardArgs<compute_t<T>>& args, const Operand& x, int64_t n, bool training, const Launch& launch) {
  constexpr int V = kVector<T>;
  ApplyArgs<compute_t<T>> apply{args.x, args.residual, args.y, args.bits, args.weight, args.bias, args.running_mean, args.running_var,
                                args.stats, args.eps, {}, args.act, training};
  Tiles& t = apply.tiles;
  t.elements = n;
  t.channels = x.image.channels;
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
    t.plane = x.image.plane;
    t.small = n < INT32_MAX;
    if (t.plane < 1 << 30) t.by_plane = Divider(static_cast<uint32_t>(t.plane));
    t.threads = kApplyThreads;
    while (t.threads > 32 && U * V * t.threads / t.plane + 2 > kTable<T, U>) t.threads /= 2;
    blocks = ceil_div(ceil_div(n, V), U * t.threads);
  }
  launch_blocks<batch_norm_apply<T, LAST, ACT, RESIDUAL, U>>(apply, blocks, t.threads, false, launch);
}

template <typename T, bool LAST, Act ACT, bool RESIDUAL>
void run_passes(ForwardArgs<compute_t<T>>& args, const Operand& x, bool training, const Launch& launch) {
  const int64_t n = x.x.numel();
  if (training) {
    if (run_in_one<T, LAST, ACT, RESIDUAL>(args, x, n, launch)) return;
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
      if (!residual && args.act == Act::none) return run_passes<T, LAST, Act::none, false>(args, x, training, launch);
      if (!residual && args.act == Act::relu) return run_passes<T, LAST, Act::relu, false>(args, x, training, launch);
      if (residual && args.act == Act::relu) return run_passes<T, LAST, Act::relu, true>(args, x, training, launch);
    }
    if (residual) return run_passes<T, LAST, Act::run_time, true>(args, x, training, launch);
    return run_passes<T, LAST, Act::run_time, false>(args, x, training, launch);
  };
  if (x.image.last) run(std::true_type{});
  else run(std::false_type{});
}

struct Affine {
  const std::optional<Tensor>&weight, &bias, &running_mean, &running_var, &batches;
};

// The number of batches that a layer has seen.
int64_t* counter(const std::optional<Tensor>& t, const Operand& x, const char* op) {
  if (!t) return nullptr;
  STD_TORCH_CHECK(t->scalar_type() == ScalarType::Long && t->numel() == 1 && t->is_cuda() &&
                      t->get_device_index() == x.x.get_device_index(),
                  "fastlayers::", op, ": expected batches to be one int64 on x's device");
  return static_cast<int64_t*>(t->mutable_data_ptr());
}

std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& x_in, const std::optional<Tensor>& residual_in, const Affine& affine,
                                           double momentum, double eps, int64_t act, bool training, bool want_bits, bool want_stats,
                                           const char* op, Tensor* moments = nullptr) {
  const Operand x(x_in, op);
  const Launch launch(x.x);
  const int64_t n = x.x.numel();
  const Act activation = act_of(act, op);
  const bool has_bits = want_bits && residual_in && activation == Act::relu;
  Tensor y = x.empty(), stats = empty_stats(want_stats, x.image.channels, x.x);
  Tensor bits = empty_values(has_bits ? (n + 7) / 8 : 0, ScalarType::Byte, x.x);
  const std::optional<Tensor> residual = residual_in ? std::optional<Tensor>(x.like_x(*residual_in, op, "residual")) : std::nullopt;
  if (moments != nullptr) *moments = empty_stats(true, x.image.channels, x.x);
  if (n == 0) {
    if (moments != nullptr) torch::stable::zero_(*moments);
    return {y, stats, bits};
  }
  dispatch_floating(x.x.scalar_type(), op, [&](auto zero) {
    using T = decltype(zero);
    using A = compute_t<T>;
    ForwardArgs<A> args{};
    args.x = x.x.const_data_ptr();
    args.residual = residual ? residual->const_data_ptr() : nullptr;
    args.y = y.mutable_data_ptr();
    args.bits = has_bits ? static_cast<uint8_t*>(bits.mutable_data_ptr()) : nullptr;
    args.weight = param(affine.weight, x, op, "weight");
    args.bias = param(affine.bias, x, op, "bias");
    args.running_mean = param(affine.running_mean, x, op, "running_mean");
    args.running_var = param(affine.running_var, x, op, "running_var");
    if (moments != nullptr) {
      A* const first = static_cast<A*>(moments->mutable_data_ptr());
      args.running_mean = {first, true};
      args.running_var = {first + x.image.channels, true};
      args.fresh = true;
    }
    args.stats = want_stats ? static_cast<A*>(stats.mutable_data_ptr()) : nullptr;
    args.batches = counter(affine.batches, x, op);
    args.momentum = static_cast<A>(momentum);
    args.eps = static_cast<A>(eps);
    args.count = x.image.count();
    args.act = activation;
    run_forward<T>(args, x, training, launch);
  });
  return {y, stats, bits};
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> batch_norm_train(const Tensor& x, const std::optional<Tensor>& residual,
                                                    const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                                                    const std::optional<Tensor>& running_mean,
                                                    const std::optional<Tensor>& running_var, double momentum, double eps,
                                                    int64_t act, bool bits, const std::optional<Tensor>& batches) {
  return forward(x, residual, {weight, bias, running_mean, running_var, batches}, momentum, eps, act, true, bits, true,
                 "batch_norm_train");
}

// The same with the mean and the unbiased variance of each channel, and no running ones: of a graph, in which nothing is written.
std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm_moments(const Tensor& x, const std::optional<Tensor>& residual,
                                                              const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                                                              double eps, int64_t act) {
  const std::optional<Tensor> none;
  Tensor moments;
  const auto [y, stats, bits] =
      forward(x, residual, {weight, bias, none, none, none}, 1.0, eps, act, true, true, true, "batch_norm_moments", &moments);
  return {y, stats, bits, moments};
}

namespace {

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

// What batch_norm_train does to the running statistics and the count of batches, from what batch_norm_moments gave.
void batch_norm_update_(const Tensor& running_mean, const Tensor& running_var, const std::optional<Tensor>& batches,
                        const Tensor& moments, double momentum) {
  const char* op = "batch_norm_update_";
  const int64_t channels = running_mean.numel();
  const ScalarType dtype = running_mean.scalar_type();
  STD_TORCH_CHECK(running_mean.is_cuda() && running_mean.is_contiguous() && running_var.is_contiguous() &&
                      running_var.numel() == channels && running_var.scalar_type() == dtype && moments.is_contiguous() &&
                      moments.numel() == 2 * channels && moments.scalar_type() == compute_dtype(running_mean) &&
                      moments.get_device_index() == running_mean.get_device_index() &&
                      running_var.get_device_index() == running_mean.get_device_index(),
                  "fastlayers::", op, ": expected contiguous running statistics of one dtype, and their moments");
  STD_TORCH_CHECK(!batches || (batches->scalar_type() == ScalarType::Long && batches->numel() == 1 &&
                               batches->get_device_index() == running_mean.get_device_index()),
                  "fastlayers::", op, ": expected batches to be one int64 on the device of the statistics");
  if (channels == 0) return;
  const Launch launch(running_mean);
  dispatch_floating(dtype, op, [&](auto zero) {
    using T = decltype(zero);
    using A = compute_t<T>;
    const auto blocks = static_cast<unsigned>((channels + kUpdateThreads - 1) / kUpdateThreads);
    update_running<T><<<blocks, kUpdateThreads, 0, launch.stream()>>>(
        static_cast<T*>(running_mean.mutable_data_ptr()), static_cast<T*>(running_var.mutable_data_ptr()),
        batches ? static_cast<int64_t*>(batches->mutable_data_ptr()) : nullptr, static_cast<const A*>(moments.const_data_ptr()),
        channels, static_cast<A>(momentum));
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

std::tuple<Tensor, Tensor, Tensor> batch_norm_eval(const Tensor& x, const std::optional<Tensor>& residual,
                                                   const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                                                   const Tensor& running_mean, const Tensor& running_var, double eps, int64_t act,
                                                   bool bits, bool keep) {
  const std::optional<Tensor> none;
  return forward(x, residual, {weight, bias, running_mean, running_var, none}, 0.0, eps, act, false, bits, keep, "batch_norm_eval");
}

}  // namespace

// The last of the forward's kernels, without statistics.
void channel_bias_act_(const Tensor& x_in, const Tensor& bias, const std::optional<Tensor>& residual_in, int64_t act) {
  const char* op = "channel_bias_act_";
  const Operand x(x_in, op);
  STD_TORCH_CHECK(x.x.const_data_ptr() == x_in.const_data_ptr(), "fastlayers::", op,
                  ": expected x contiguous or channels_last, and aligned to 16 bytes");
  const Launch launch(x.x);
  const Act activation = act_of(act, op);
  const std::optional<Tensor> residual = residual_in ? std::optional<Tensor>(x.like_x(*residual_in, op, "residual")) : std::nullopt;
  if (x.x.numel() == 0) return;
  dispatch_floating(x.x.scalar_type(), op, [&](auto zero) {
    using T = decltype(zero);
    ForwardArgs<compute_t<T>> args{};
    args.x = args.y = x.x.mutable_data_ptr();
    args.residual = residual ? residual->const_data_ptr() : nullptr;
    args.bias = param(bias, x, op, "bias");
    args.act = activation;
    run_forward<T>(args, x, false, launch);
  });
}

namespace {

template <typename T, bool LAST, Act ACT, Gate GATE>
void run_backward(BackwardArgs<compute_t<T>>& args, const Operand& x, const Launch& launch) {
  using A = compute_t<T>;
  constexpr auto kernel = batch_norm_backward<T, LAST, ACT, GATE>;
  const int64_t resident = resident_blocks<kernel>(launch, kThreads<LAST>);
  args.grid = share_out(x.image, kVector<T>, resident, device_traits(launch.device()).processors);
  const Grid& g = args.grid;
  const int64_t blocks = static_cast<int64_t>(g.groups) * g.pieces;
  args.direct = g.pieces == 1 && g.copies == 1;
  std::optional<Tensor> partial;
  if (!args.direct) {
    partial = empty_partial(2, g, x.x);
    args.partial = static_cast<compute_t<T>*>(partial->mutable_data_ptr());
  }
  if (args.direct || blocks <= resident) {
    args.passes = kBoth;
    launch_blocks<kernel>(args, blocks, kThreads<LAST>, !args.direct, launch);
  } else {  // blocks cannot wait for each other
    args.passes = kFirst;
    launch_blocks<kernel>(args, blocks, kThreads<LAST>, false, launch);
    args.passes = kSecond;
    launch_blocks<kernel>(args, blocks, kThreads<LAST>, false, launch);
  }
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm_backward_op(const Tensor& dy_in, const Tensor& x_in,
                                                                  const std::optional<Tensor>& residual_in,
                                                                  const std::optional<Tensor>& bits, const std::optional<Tensor>& weight,
                                                                  const std::optional<Tensor>& bias, const Tensor& stats, bool training,
                                                                  int64_t act, bool want_dresidual) {
  const char* op = "batch_norm_backward";
  const Operand x(x_in, op);
  const Launch launch(x.x);
  const int64_t n = x.x.numel(), channels = x.image.channels;
  const Act activation = act_of(act, op);
  const Tensor dy = x.like_x(dy_in, op, "dy");
  const bool has_bits = bits && bits->numel() > 0;
  STD_TORCH_CHECK(!has_bits || (activation == Act::relu && bits->numel() == (n + 7) / 8), "fastlayers::", op,
                  ": expected bits with relu only, one for each of ", n, " elements");
  STD_TORCH_CHECK(stats.numel() == 2 * channels && stats.is_contiguous() && stats.scalar_type() == compute_dtype(x.x), "fastlayers::",
                  op, ": expected stats of [2, ", channels, "], contiguous, of dtype ", torch::headeronly::toString(compute_dtype(x.x)));
  const bool has_residual = residual_in && !has_bits && activation != Act::none;
  const std::optional<Tensor> residual = has_residual ? std::optional<Tensor>(x.like_x(*residual_in, op, "residual")) : std::nullopt;
  const ScalarType param_dtype = weight ? weight->scalar_type() : compute_dtype(x.x);
  Tensor dx = x.empty(), dresidual = want_dresidual ? x.empty() : empty_values(0, x.x.scalar_type(), x.x);
  Tensor dweight = empty_values(channels, param_dtype, x.x), dbias = empty_values(channels, param_dtype, x.x);
  if (n == 0) {
    torch::stable::zero_(dweight);
    torch::stable::zero_(dbias);
    return {dx, dresidual, dweight, dbias};
  }
  dispatch_floating(x.x.scalar_type(), op, [&](auto zero) {
    using T = decltype(zero);
    using A = compute_t<T>;
    BackwardArgs<A> args{};
    args.dy = dy.const_data_ptr();
    args.x = x.x.const_data_ptr();
    args.residual = residual ? residual->const_data_ptr() : nullptr;
    args.bits = has_bits ? static_cast<const uint8_t*>(bits->const_data_ptr()) : nullptr;
    args.dx = dx.mutable_data_ptr();
    args.dresidual = want_dresidual ? dresidual.mutable_data_ptr() : nullptr;
    args.weight = param(weight, x, op, "weight");
    args.bias = param(bias, x, op, "bias");
    args.stats = static_cast<const A*>(stats.const_data_ptr());
    args.dweight = param(dweight, x, op, "weight");
    args.dbias = param(dbias, x, op, "weight");
    args.count = x.image.count();
    args.act = activation;
    args.training = training;
    const auto run = [&](auto last) {
      constexpr bool LAST = decltype(last)::value;
      if (has_bits) return run_backward<T, LAST, Act::relu, Gate::bits>(args, x, launch);
      if (residual) return run_backward<T, LAST, Act::run_time, Gate::residual>(args, x, launch);
      if constexpr (!std::is_same_v<T, double>) {
        if (activation == Act::none) return run_backward<T, LAST, Act::none, Gate::x>(args, x, launch);
        if (activation == Act::relu) return run_backward<T, LAST, Act::relu, Gate::x>(args, x, launch);
      }
      return run_backward<T, LAST, Act::run_time, Gate::x>(args, x, launch);
    };
    if (x.image.last) run(std::true_type{});
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
  m.impl("batch_norm_backward", TORCH_BOX(&fastlayers::batch_norm_backward_op));
}

// group_norm of x over (N, C, *), with an optional activation, forward and backward. instance_norm is groups = C.
//
// The stock composition reads x for the statistics, reads and writes it for the affine part and again for the activation, and its
// backward passes over x and dy three to four times. Here a group is read once and written once: it stays in shared memory
// between the statistics and the result. z = weight·xhat + bias, which the activation's gradient needs, is computed again.
//
//   block   contiguous (N, C, *): a group is one run of memory. A part of a warp or a block holds it.
//   team    a group too large for a block: many blocks, all resident, hold a slice each and tell each other their part of
//           the sums through global memory, while the next group is on its way.
//   split   what neither can hold, and float64: one pass for the sums, one for the result.
//   pixels  channels last: groups are interleaved. Two passes as well, each thread with some channels of its own.
//
// Statistics are merged as (count, mean, sum of squares about that mean), never as sums of squares about 0: a mean far
// from 0 costs no accuracy.
//
// In a contiguous tensor whose channels are no multiple of the vector, groups and channels start anywhere in a 16-byte word. All
// tensors being aligned, element i of each lies at the same place in its word: kernels read the words that cover a
// group or a channel and ignore what belongs to its neighbours.
#include <cstdlib>
#include <cstring>

#include "activations.cuh"
#include "device.cuh"

namespace fastlayers {
namespace {

constexpr int kBlockThreads = 512;  // most threads of a block that holds a group, where two of them fit an SM
constexpr int kWideThreads = 1024;  // and where the group fills the SM's shared memory
constexpr int kShortThreads = 128;  // of a block that holds several groups, each in a part of a warp
constexpr int kMaxWarps = kWideThreads / 32;

// float64 needs twice the registers and more: fewer threads and blocks on an SM.
template <typename In>
constexpr int wide_threads() { return sizeof(In) == 8 ? kWideThreads / 4 : kWideThreads; }
template <typename In>
constexpr int pass_blocks() { return sizeof(In) == 8 ? 1 : 2; }

// ---- arguments ----------------------------------------------------------------------------------------------------------

// weight and bias of a channel. Both are of x's dtype, or both float32 for 16-bit x.
template <typename In>
struct Affine {
  using A = compute_t<In>;
  const void* weight_data;
  const void* bias_data;
  bool wide;

  __device__ __forceinline__ A load(const void* p, int channel) const {
    if (sizeof(In) == 2 && wide) return static_cast<const float*>(p)[channel];
    return convert<A>(static_cast<const In*>(p)[channel]);
  }
  __device__ __forceinline__ A weight(int channel) const { return weight_data ? load(weight_data, channel) : A(1); }
  __device__ __forceinline__ A bias(int channel) const { return bias_data ? load(bias_data, channel) : A(0); }
};

template <typename In>
struct Args {
  using A = compute_t<In>;
  const void* x;
  const void* dy;  // backward
  void* out;       // y, or dx
  A* stats;        // [2, samples·groups]: means, then reciprocal standard deviations. Null: not wanted
  Affine<In> affine;
  int64_t samples, channels, pixels;  // N, C and the product of what follows
  int groups, depth;                  // of a sample, and channels of a group
  A eps;
  Act act;
};

// Sums over a part of one channel: of dz, the gradient of z, and of dz·xhat.
template <typename A>
struct Sums {
  A dz, dz_xhat;
};

template <typename A>
__device__ __forceinline__ Sums<A> operator+(Sums<A> p, Sums<A> q) { return {p.dz + q.dz, p.dz_xhat + q.dz_xhat}; }

// ---- moments ------------------------------------------------------------------------------------------------------------

template <typename A>
struct Moments {
  A count = 0, mean = 0, m2 = 0;  // m2: sum of the squares about the mean
};

template <typename A>
__device__ __forceinline__ Moments<A> merge(const Moments<A>& p, const Moments<A>& q) {
  const A count = p.count + q.count;
  A share;
  if constexpr (std::is_same_v<A, float>) share = __fdividef(q.count, count);
  else share = q.count / count;
  if (count == A(0)) share = A(0);
  const A delta = q.mean - p.mean;
  return {count, p.mean + delta * share, p.m2 + q.m2 + delta * (delta * (p.count * share))};
}

template <typename A>
__device__ __forceinline__ A reciprocal_root(A v) {
  if constexpr (std::is_same_v<A, double>) return rsqrt(v);
  else return rsqrtf(v);
}

template <typename A, int V>
__device__ __forceinline__ A sum_of(const Vec<A, V>& v) {
  if constexpr (V == 1) {
    return v.v[0];
  } else {
    Vec<A, V / 2> half;
#pragma unroll
    for (int j = 0; j < V / 2; ++j) half.v[j] = v.v[2 * j] + v.v[2 * j + 1];
    return sum_of(half);
  }
}

// Whether element j of a word that begins with element e of a run belongs to the run, of length n.
template <typename I>
__device__ __forceinline__ bool inside(I e, int j, I n) { return e + j >= 0 && e + j < n; }
template <int V, typename I>
__device__ __forceinline__ bool all_inside(I e, I n) { return e >= 0 && e + V <= n; }

// Takes in the elements of a word that belong to the run of n elements in which it begins with element e.
template <typename In, int V, typename I>
__device__ __forceinline__ void extend(Moments<compute_t<In>>& m, const Vec<In, V>& word, I e, I n) {
  using A = compute_t<In>;
  Vec<A, V> v = unpack<A>(word);
  Moments<A> own;
  own.count = A(V);
  const bool whole = all_inside<V>(e, n);
  if (!whole) {
    own.count = A(0);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if (inside(e, j, n)) own.count += A(1);
      else v.v[j] = A(0);
    }
    if (own.count == A(0)) return;
  }
  own.mean = whole ? sum_of(v) * A(1.0 / V) : sum_of(v) / own.count;
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const A d = whole || inside(e, j, n) ? v.v[j] - own.mean : A(0);
    v.v[j] = d * d;
  }
  own.m2 = sum_of(v);
  m = merge(m, own);
}

// ---- reductions over the threads of a group -----------------------------------------------------------------------------

template <typename T>
__device__ __forceinline__ T shuffled(const T& value, int lane_mask) {
  static_assert(sizeof(T) % 4 == 0);
  T r;
  unsigned words[sizeof(T) / 4];
  memcpy(words, &value, sizeof(T));
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T) / 4); ++i) words[i] = __shfl_xor_sync(0xffffffffu, words[i], lane_mask);
  memcpy(&r, words, sizeof(T));
  return r;
}

template <typename A>
__device__ __forceinline__ Sums<A> merge(const Sums<A>& p, const Sums<A>& q) { return p + q; }

// Of `lanes` neighbouring lanes. Both of a pair merge in the same order, so that all end up with the same bits.
template <typename T>
__device__ __forceinline__ T lanes_merge(T value, int lanes) {
  const int lane = threadIdx.x & 31;
  for (int o = 1; o < lanes; o <<= 1) {
    const T other = shuffled(value, o);
    value = lane & o ? merge(other, value) : merge(value, other);
  }
  return value;
}

// Of the threads that share a group: a part of a warp, or the block.
template <typename T>
__device__ __forceinline__ T group_merge(T value, T* slots, int lanes) {
  value = lanes_merge(value, lanes < 32 ? lanes : 32);
  if (lanes <= 32) return value;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  if (lane == 0) slots[warp] = value;
  __syncthreads();
  value = lane < static_cast<int>(blockDim.x >> 5) ? slots[lane] : T{};
  return lanes_merge(value, 32);
}

// ---- words --------------------------------------------------------------------------------------------------------------

// Of elements V of type T, from global to shared memory, without passing through registers.
template <typename T, int V>
__device__ __forceinline__ void copy_async(Vec<T, V>* shared, const T* global) {
  static_assert(sizeof(Vec<T, V>) % kVectorBytes == 0);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(Vec<T, V>)); i += kVectorBytes)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(shared)) + i),
                 "l"(reinterpret_cast<const char*>(global) + i)
                 : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

// Writes the part of a word that belongs to the run.
template <typename T, int V, typename I>
__device__ __forceinline__ void store_inside(T* p, I e, I n, const Vec<T, V>& w) {
  if (all_inside<V>(e, n)) {
    store_vec<T, V>(p, w);
  } else {
#pragma unroll
    for (int j = 0; j < V; ++j)
      if (inside(e, j, n)) p[j] = w.v[j];
  }
}

template <Act ACT, typename Out, typename A, int V>
__device__ __forceinline__ Vec<Out, V> activated(Vec<A, V> z) {
#pragma unroll
  for (int j = 0; j < V; ++j) z.v[j] = act_value<ACT, sizeof(Out) == 2>(z.v[j]);
  return pack<Out>(z);
}

// The constants of one channel.
template <typename A>
struct Channel {
  A mean, rstd, scale, bias;  // z = (x - mean)·scale + bias, xhat = (x - mean)·rstd

  template <typename In>
  __device__ __forceinline__ Channel(A mean_, A rstd_, const Affine<In>& affine, int channel)
      : mean(mean_), rstd(rstd_), scale(rstd_ * affine.weight(channel)), bias(affine.bias(channel)) {}
  __device__ __forceinline__ A z(A x) const { return (x - mean) * scale + bias; }
};

// What the backward sums over the elements of a word that belong to its channel; dz_xhat still lacks the factor rstd.
template <Act ACT, typename In, typename Out, int V, typename I>
__device__ __forceinline__ Sums<compute_t<In>> word_sums(const Vec<In, V>& x, const Vec<Out, V>& dy, const Channel<compute_t<In>>& c,
                                                       I e, I n) {
  using A = compute_t<In>;
  const Vec<A, V> v = unpack<A>(x);
  Vec<A, V> dz = unpack<A>(dy), products;
  const bool whole = all_inside<V>(e, n);
#pragma unroll
  for (int j = 0; j < V; ++j) {
    dz.v[j] = act_gradient<ACT, sizeof(In) == 2>(dz.v[j], c.z(v.v[j]));
    products.v[j] = dz.v[j] * (v.v[j] - c.mean);
    if (!whole && !inside(e, j, n)) dz.v[j] = products.v[j] = A(0);
  }
  return {sum_of(dz), sum_of(products)};
}

// dx = dz·scale - constant - (x - mean)·slope, the latter two from the group's sums.
template <typename A>
struct GroupGradient {
  A constant, slope;

  GroupGradient() = default;
  __device__ __forceinline__ GroupGradient(const Sums<A>& weighted, A rstd, A count)
      : constant(rstd * (weighted.dz / count)), slope(rstd * rstd * (weighted.dz_xhat / count)) {}
};

template <Act ACT, typename In, typename Out, int V>
__device__ __forceinline__ Vec<In, V> input_gradient(const Vec<In, V>& x, const Vec<Out, V>& dy, const Channel<compute_t<In>>& c,
                                                   const GroupGradient<compute_t<In>>& g) {
  using A = compute_t<In>;
  const Vec<A, V> v = unpack<A>(x);
  Vec<A, V> r = unpack<A>(dy);
#pragma unroll
  for (int j = 0; j < V; ++j)
    r.v[j] = act_gradient<ACT, sizeof(In) == 2>(r.v[j], c.z(v.v[j])) * c.scale - g.constant - (v.v[j] - c.mean) * g.slope;
  return pack<In>(r);
}

// ---- contiguous: a group in a block or over a team -----------------------------------------------------------------------

// A group as words: the run of n elements begins with element `head` of the first.
template <int V>
struct Words {
  int64_t start;  // of the first word, in elements of the tensor
  int head, count;

  __device__ Words(int64_t group, int n) {
    start = group * n;
    head = static_cast<int>(start & (V - 1));
    start -= head;
    count = (n + head + V - 1) / V;
  }
  __device__ int element(int word) const { return word * V - head; }
};

template <typename In>
struct HoldArgs : Args<In> {
  int64_t total;  // groups in all
  int n, hw;      // elements of a group and of a channel
  Divider by_hw;
  int lanes, lane_bits;  // block: threads that share a group; a power of two up to a warp, or the whole block. lane_bits: up to a warp
  int held;              // words of shared memory for a group, or for a stage of a team's slice
  int each;              // forward. block: words of a thread. team: words of a member
  // Backward: an item is a part of a channel, and `item_lanes` threads share it. A channel has 1 << part_bits parts.
  int item_lanes, item_bits, part_bits, part_words;
  int items_each;        // team: items of a member
  Sums<compute_t<In>>* partial;  // [samples, parts, channels]. Null: neither dweight nor dbias is wanted
  int teams, members;
  unsigned long long* board;
};

// The result of one word of a group. It lies in one channel but for words at the edge of two, or where channels are shorter
// than a word.
template <Act ACT, typename Out, typename In, int V>
__device__ __forceinline__ Vec<Out, V> forward_word(const HoldArgs<In>& a, const Vec<In, V>& word, int e, int first_channel,
                                                    compute_t<In> mean, compute_t<In> rstd) {
  using A = compute_t<In>;
  Vec<A, V> z = unpack<A>(word);
  int c = static_cast<int>(a.by_hw.quotient(e < 0 ? 0 : e)), edge = (c + 1) * a.hw;
  if (e >= 0 && e + V <= edge) {
    const Channel<A> channel(mean, rstd, a.affine, first_channel + c);
#pragma unroll
    for (int j = 0; j < V; ++j) z.v[j] = channel.z(z.v[j]);
  } else {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if (e + j >= edge && c + 1 < a.depth) ++c, edge += a.hw;
      z.v[j] = Channel<A>(mean, rstd, a.affine, first_channel + c).z(z.v[j]);
    }
  }
  return activated<ACT, Out>(z);
}

template <typename In, typename Out>
__global__ void __launch_bounds__(wide_threads<In>(), 1) group_norm_forward_block(const HoldArgs<In> a) {
  using A = compute_t<In>;
  constexpr int V = kVectorBytes / sizeof(In);
  constexpr int kPhases = 4;  // the statistics of the first words are computed while the last are on their way
  extern __shared__ __align__(16) char memory[];
  __shared__ Moments<A> slots[kMaxWarps];

  const bool whole_block = a.lanes > 32;
  const int lane = whole_block ? threadIdx.x : threadIdx.x & (a.lanes - 1);
  const int local = whole_block ? 0 : threadIdx.x >> a.lane_bits;
  const int64_t group = whole_block ? blockIdx.x : static_cast<int64_t>(blockIdx.x) * (blockDim.x >> a.lane_bits) + local;
  const Words<V> words(group, a.n);
  const int count = group < a.total ? words.count : 0;
  Vec<In, V>* const held = reinterpret_cast<Vec<In, V>*>(memory) + local * a.held;
  const In* x = static_cast<const In*>(a.x) + words.start;

  const int phase = (a.each + kPhases - 1) / kPhases * a.lanes;  // words of all threads
#pragma unroll
  for (int p = 0; p < kPhases; ++p) {
    const int end = min(count, (p + 1) * phase);
    for (int w = p * phase + lane; w < end; w += a.lanes) copy_async<In, V>(held + w, x + w * V);
    commit_copies();
  }
  Moments<A> m;
  const auto take = [&](int p) {
    const int end = min(count, (p + 1) * phase);
    for (int w = p * phase + lane; w < end; w += a.lanes) extend(m, held[w], words.element(w), a.n);
  };
  wait_copies<3>(), take(0);
  wait_copies<2>(), take(1);
  wait_copies<1>(), take(2);
  wait_copies<0>(), take(3);
  m = group_merge(m, slots, a.lanes);
  if (count == 0) return;

  const A rstd = reciprocal_root(m.m2 / a.n + a.eps);
  if (a.stats != nullptr && lane == 0) {
    a.stats[group] = m.mean;
    a.stats[a.total + group] = rstd;
  }
  Out* y = static_cast<Out*>(a.out) + words.start;
  const int first_channel = static_cast<int>(group % a.groups) * a.depth;
  with_act<Act::run_time>(a.act, [&](auto act) {
    for (int w = lane; w < count; w += a.lanes) {
      const int e = words.element(w);
      store_inside(y + w * V, e, a.n, forward_word<decltype(act)::value, Out>(a, held[w], e, first_channel, m.mean, rstd));
    }
  });
}

// The backward goes by channels, whose sums are dweight and dbias. A thread reads back from shared memory only what it
// requested itself.
template <typename In, int V>
struct Items {
  const HoldArgs<In>& a;
  const Words<V>& words;
  int begin, end;            // items of this block
  bool active;               // the group exists
  int slot, slots, sub;      // this thread's place: its row of threads, of so many, and its place in it
  int base;                  // word of the group with which the shared memory begins

  __device__ Items(const HoldArgs<In>& args, const Words<V>& w, int begin_, int end_, int lane, int lanes, bool active_ = true)
      : a(args), words(w), begin(begin_), end(end_), active(active_), slot(lane >> args.item_bits), slots(lanes >> args.item_bits),
        sub(lane & (args.item_lanes - 1)) {
    base = first_word(begin);
  }
  __device__ int first_word(int item) const {
    return ((item >> a.part_bits) * a.hw + words.head) / V + (item & ((1 << a.part_bits) - 1)) * a.part_words;
  }
  // Calls f(live, channel, part, first, last): this thread's words of an item are first, first + item_lanes, ... below last.
  // All lanes of a warp make the same number of calls.
  template <typename F>
  __device__ __forceinline__ void for_each(F&& f) const {
    for (int at = begin; at < end; at += slots) {
      const int item = at + slot;
      const bool live = active && item < end;
      const int channel = item >> a.part_bits, part = item & ((1 << a.part_bits) - 1);
      const int start = first_word(item);
      const int stop = ((channel + 1) * a.hw + words.head + V - 1) / V;
      f(live, channel, part, start + sub, live ? min(start + a.part_words, stop) : 0);
    }
  }
  // Of a word, its first element's place in the channel.
  __device__ int element(int word, int channel) const { return words.element(word) - channel * a.hw; }
};

// Shared memory of a block: the words of x, then those of dy.
template <typename In, typename Out, int V>
struct Held {
  Vec<In, V>* x;
  Vec<Out, V>* dy;

  __device__ Held(char* memory, int words) : x(reinterpret_cast<Vec<In, V>*>(memory)), dy(reinterpret_cast<Vec<Out, V>*>(x + words)) {}
};

template <typename In, typename Out, int V>
__device__ __forceinline__ void request_items(const Items<In, V>& items, const Held<In, Out, V>& held) {
  const HoldArgs<In>& a = items.a;
  const In* x = static_cast<const In*>(a.x) + items.words.start;
  const Out* dy = static_cast<const Out*>(a.dy) + items.words.start;
  items.for_each([&](bool, int, int, int first, int last) {
    for (int w = first; w < last; w += a.item_lanes) {
      copy_async<In, V>(held.x + (w - items.base), x + w * V);
      copy_async<Out, V>(held.dy + (w - items.base), dy + w * V);
    }
  });
}

// This thread's part of the group's sums of weight·dz and weight·dz·xhat; writes those of its channels.
template <typename In, typename Out, int V>
__device__ __forceinline__ Sums<compute_t<In>> sum_items(const Items<In, V>& items, const Held<In, Out, V>& held, int64_t group,
                                                       compute_t<In> mean, compute_t<In> rstd) {
  using A = compute_t<In>;
  const HoldArgs<In>& a = items.a;
  const int64_t sample = group / a.groups;
  const int first_channel = static_cast<int>(group - sample * a.groups) * a.depth;
  Sums<A> total{A(0), A(0)};
  with_act<Act::run_time>(a.act, [&](auto act) {
    items.for_each([&](bool live, int channel, int part, int first, int last) {
      const int c = live ? first_channel + channel : 0;
      const Channel<A> constants(mean, rstd, a.affine, c);
      Sums<A> sums{A(0), A(0)};
#pragma unroll 1  // registers; other warps hide the latency
      for (int w = first; w < last; w += a.item_lanes)
        sums = sums + word_sums<decltype(act)::value>(held.x[w - items.base], held.dy[w - items.base], constants,
                                                      items.element(w, channel), a.hw);
      sums = lanes_merge(sums, a.item_lanes);
      sums.dz_xhat *= rstd;
      if (items.sub != 0 || !live) return;
      if (a.partial != nullptr) a.partial[((sample << a.part_bits) + part) * a.channels + c] = sums;
      const A weight = a.affine.weight(c);
      total = total + Sums<A>{weight * sums.dz, weight * sums.dz_xhat};
    });
  });
  return total;
}

template <typename In, typename Out, int V>
__device__ __forceinline__ void finish_items(const Items<In, V>& items, const Held<In, Out, V>& held, int64_t group,
                                             compute_t<In> mean, compute_t<In> rstd, const Sums<compute_t<In>>& total) {
  using A = compute_t<In>;
  const HoldArgs<In>& a = items.a;
  const int first_channel = static_cast<int>(group % a.groups) * a.depth;
  const GroupGradient<A> gradient(total, rstd, A(a.n));
  In* dx = static_cast<In*>(a.out) + items.words.start;
  with_act<Act::run_time>(a.act, [&](auto act) {
    items.for_each([&](bool live, int channel, int, int first, int last) {
      if (!live) return;
      const Channel<A> constants(mean, rstd, a.affine, first_channel + channel);
#pragma unroll 1
      for (int w = first; w < last; w += a.item_lanes)
        store_inside(dx + w * V, items.element(w, channel), a.hw,
                     input_gradient<decltype(act)::value>(held.x[w - items.base], held.dy[w - items.base], constants, gradient));
    });
  });
}

template <typename In, typename Out>
__global__ void __launch_bounds__(wide_threads<In>(), 1) group_norm_backward_block(const HoldArgs<In> a) {
  using A = compute_t<In>;
  constexpr int V = kVectorBytes / sizeof(In);
  extern __shared__ __align__(16) char memory[];
  __shared__ Sums<A> slots[kMaxWarps];

  const bool whole_block = a.lanes > 32;
  const int lane = whole_block ? threadIdx.x : threadIdx.x & (a.lanes - 1);
  const int local = whole_block ? 0 : threadIdx.x >> a.lane_bits;
  const int64_t index = whole_block ? blockIdx.x : static_cast<int64_t>(blockIdx.x) * (blockDim.x >> a.lane_bits) + local;
  const int64_t group = index < a.total ? index : 0;
  const Words<V> words(group, a.n);
  const Items<In, V> items(a, words, 0, a.depth << a.part_bits, lane, a.lanes, index < a.total);
  const Held<In, Out, V> held(memory + static_cast<int64_t>(local) * a.held * (sizeof(Vec<In, V>) + sizeof(Vec<Out, V>)), a.held);
  request_items(items, held);
  commit_copies();
  const A mean = a.stats[group], rstd = a.stats[a.total + group];
  wait_copies<0>();
  const Sums<A> total = group_merge(sum_items(items, held, group, mean, rstd), slots, a.lanes);
  finish_items(items, held, group, mean, rstd, total);
}

// ---- a group over a team of blocks --------------------------------------------------------------------------------------
//
// The grid is resident as a whole (a cooperative launch) and divided into teams; a team takes every teams-th group, and each
// member holds a slice of it. A step of the loop requests the slice of the next group, reduces that of this one and publishes
// its partial, and writes out the one before, whose partials have arrived by then: memory is never idle while a group waits for
// its sums. Each member adds up all partials of a group itself, in the same order.

constexpr int kTeamThreads = 384;  // leaves each 80 registers with two blocks on an SM
constexpr int kTeamBlocks = 2;  // resident on an SM
constexpr int kTeamStages = 3;
constexpr int kLookUps = 4;     // partials that a lane asks for together
constexpr unsigned long long kUnpublished = ~0ull;  // no partial: sums that are NaN are the canonical one

template <typename Partial>
__device__ __forceinline__ void publish(unsigned long long* slot, const Partial& p) {
  static_assert(sizeof(Partial) == sizeof(unsigned long long));
  unsigned long long word;
  memcpy(&word, &p, sizeof(p));
  *const_cast<volatile unsigned long long*>(slot) = word;
}

// Calls f(member, partial) for every published partial of a group, each lane for its own members; by one warp.
template <typename Partial, typename F>
__device__ __forceinline__ void gather(const unsigned long long* slots_, int members, F&& f) {
  const volatile unsigned long long* slots = slots_;
  for (int first = threadIdx.x & 31; first < members; first += 32 * kLookUps) {
    unsigned long long word[kLookUps];
#pragma unroll
    for (int k = 0; k < kLookUps; ++k) word[k] = first + 32 * k < members ? slots[first + 32 * k] : 0;
#pragma unroll
    for (int k = 0; k < kLookUps; ++k) {
      const int member = first + 32 * k;
      if (member >= members) continue;
      while (word[k] == kUnpublished) word[k] = slots[member];
      Partial p;
      memcpy(&p, &word[k], sizeof(p));
      f(member, p);
    }
  }
}

// The loop above. `Slice` gives what differs between forward and backward: request(group, stage); reduce(group, stage), the
// sums of this thread; publish(group, those of the block); gather(group), the sums of the group, by one warp; finish(group, stage,
// those).
template <typename Slice>
__device__ __forceinline__ void team_loop(Slice& slice, int64_t total, int teams, int team) {
  using T = typename Slice::Total;
  __shared__ T slots[kTeamThreads / 32];
  __shared__ T result;
  const int warp = threadIdx.x >> 5;
  const int count = static_cast<int>((total - team + teams - 1) / teams);  // there are no more teams than groups
  const auto group = [&](int i) { return team + static_cast<int64_t>(i) * teams; };
  slice.request(group(0), 0);
  commit_copies();
  int next = 1, here = 0, behind = kTeamStages - 1;  // stages
  for (int i = 0; i <= count; ++i) {
    if (i + 1 < count) slice.request(group(i + 1), next);
    commit_copies();
    if (i < count) {
      wait_copies<1>();
      const T sum = group_merge(slice.reduce(group(i), here), slots, kTeamThreads);
      if (threadIdx.x == 0) slice.publish(group(i), sum);
    }
    if (i > 0) {
      if (warp == 0) {
        const T all = slice.gather(group(i - 1));
        if (threadIdx.x == 0) result = all;
      }
      __syncthreads();
      slice.finish(group(i - 1), behind, result);
    }
    behind = here, here = next;
    next = next + 1 == kTeamStages ? 0 : next + 1;
    __syncthreads();  // before `slots` and `result` are written again
  }
}

template <typename In, typename Out>
struct ForwardSlice {
  static constexpr int V = kVectorBytes / sizeof(In);
  using Total = Moments<float>;
  struct Partial {
    float mean, m2;
  };
  const HoldArgs<In>& a;
  Vec<In, V>* shared;
  int member;

  // Calls f(w, e): a word of this thread, and the element with which it begins.
  template <typename F>
  __device__ __forceinline__ void for_words(const Words<V>& words, F&& f) const {
    const int end = min(words.count, (member + 1) * a.each);
    for (int w = member * a.each + static_cast<int>(threadIdx.x); w < end; w += kTeamThreads) f(w, words.element(w));
  }
  __device__ Vec<In, V>& at(int stage, int w) const { return shared[stage * a.held + (w - member * a.each)]; }
  __device__ unsigned long long* slots(int64_t group) const { return a.board + group * a.members; }

  __device__ void request(int64_t group, int stage) const {
    const Words<V> words(group, a.n);
    const In* x = static_cast<const In*>(a.x) + words.start;
    for_words(words, [&](int w, int) { copy_async<In, V>(&at(stage, w), x + w * V); });
  }
  __device__ Total reduce(int64_t group, int stage) const {
    Total m;
    for_words(Words<V>(group, a.n), [&](int w, int e) { extend(m, at(stage, w), e, a.n); });
    return m;
  }
  __device__ void publish(int64_t group, const Total& m) const { fastlayers::publish(slots(group) + member, Partial{m.mean, m.m2}); }
  __device__ Total gather(int64_t group) const {
    const Words<V> words(group, a.n);
    Total all;
    fastlayers::gather<Partial>(slots(group), a.members, [&](int m, const Partial& p) {
      const int first = max(0, words.element(m * a.each)), last = min(a.n, words.element(min(words.count, (m + 1) * a.each)));
      if (first < last) all = merge(all, Total{static_cast<float>(last - first), p.mean, p.m2});
    });
    return lanes_merge(all, 32);
  }
  __device__ void finish(int64_t group, int stage, const Total& m) const {
    const Words<V> words(group, a.n);
    const float mean = m.mean, rstd = reciprocal_root(m.m2 / a.n + a.eps);
    if (a.stats != nullptr && member == 0 && threadIdx.x == 0) {
      a.stats[group] = mean;
      a.stats[a.total + group] = rstd;
    }
    Out* y = static_cast<Out*>(a.out) + words.start;
    const int first_channel = static_cast<int>(group % a.groups) * a.depth;
    with_act<Act::run_time>(a.act, [&](auto act) {
      for_words(words, [&](int w, int e) {
        store_inside(y + w * V, e, a.n, forward_word<decltype(act)::value, Out>(a, at(stage, w), e, first_channel, mean, rstd));
      });
    });
  }
};

template <typename In, typename Out>
__global__ void __launch_bounds__(kTeamThreads, kTeamBlocks) group_norm_forward_team(const HoldArgs<In> a) {
  extern __shared__ __align__(16) char memory[];
  using Slice = ForwardSlice<In, Out>;
  Slice slice{a, reinterpret_cast<Vec<In, Slice::V>*>(memory), static_cast<int>(blockIdx.x % a.members)};
  team_loop(slice, a.total, a.teams, static_cast<int>(blockIdx.x / a.members));
}

template <typename In, typename Out>
struct BackwardSlice {
  static constexpr int V = kVectorBytes / sizeof(In);
  using Total = Sums<float>;
  const HoldArgs<In>& a;
  char* shared;
  int member;

  __device__ Items<In, V> items(const Words<V>& words) const {
    const int all = a.depth << a.part_bits, begin = min(all, member * a.items_each);
    return Items<In, V>(a, words, begin, min(all, begin + a.items_each), threadIdx.x, kTeamThreads);
  }
  __device__ Held<In, Out, V> held(int stage) const {
    return Held<In, Out, V>(shared + static_cast<int64_t>(stage) * a.held * (sizeof(Vec<In, V>) + sizeof(Vec<Out, V>)), a.held);
  }
  __device__ unsigned long long* slots(int64_t group) const { return a.board + group * a.members; }

  __device__ void request(int64_t group, int stage) const {
    const Words<V> words(group, a.n);
    request_items(items(words), held(stage));
  }
  __device__ Total reduce(int64_t group, int stage) const {
    const Words<V> words(group, a.n);
    return sum_items(items(words), held(stage), group, a.stats[group], a.stats[a.total + group]);
  }
  __device__ void publish(int64_t group, const Total& s) const { fastlayers::publish(slots(group) + member, s); }
  __device__ Total gather(int64_t group) const {
    Total all{0.f, 0.f};
    fastlayers::gather<Total>(slots(group), a.members, [&](int, const Total& s) { all = all + s; });
    return lanes_merge(all, 32);
  }
  __device__ void finish(int64_t group, int stage, const Total& total) const {
    const Words<V> words(group, a.n);
    finish_items(items(words), held(stage), group, a.stats[group], a.stats[a.total + group], total);
  }
};

template <typename In, typename Out>
__global__ void __launch_bounds__(kTeamThreads, kTeamBlocks) group_norm_backward_team(const HoldArgs<In> a) {
  extern __shared__ __align__(16) char memory[];
  BackwardSlice<In, Out> slice{a, memory, static_cast<int>(blockIdx.x % a.members)};
  team_loop(slice, a.total, a.teams, static_cast<int>(blockIdx.x / a.members));
}

// ---- two passes ---------------------------------------------------------------------------------------------------------
//
// The first leaves the moments, or the backward's sums, of each part of each channel: [samples, parts, channels]. A kernel of a
// warp a group merges them. The last pass goes through the tensor backwards: what the first read last may still be in L2.

constexpr int kSplitThreads = 256;

template <typename In>
struct PassArgs : Args<In> {
  int64_t parts;                                // of a channel
  int64_t part_size;                            // words of a part, or pixels for channels last
  Moments<compute_t<In>>* moments;              // forward: [samples, parts, channels]
  Sums<compute_t<In>>* partial;                 // backward, likewise
  GroupGradient<compute_t<In>>* gradients;      // backward: [samples·groups]
  int across, down, tiles;                      // channels last: threads over words of channels and over pixels; blocks over channels
  Divider by_depth;

  __device__ int64_t total() const { return this->samples * this->groups; }
};

// The part of a channel that a block owns, of a contiguous tensor.
template <int V>
struct Part {
  int64_t row, part, first, last;  // row: sample·channels + channel. Words
  int64_t start;                   // of the channel's first word, in elements of the tensor
  int64_t head;

  template <typename In>
  __device__ Part(const PassArgs<In>& a, int64_t block) {
    row = block / a.parts;
    part = block - row * a.parts;
    start = row * a.pixels;
    head = start & (V - 1);
    start -= head;
    const int64_t words = (a.pixels + head + V - 1) / V;
    first = part * a.part_size;
    last = first + a.part_size < words ? first + a.part_size : words;
  }
  __device__ int64_t element(int64_t word) const { return word * V - head; }
  template <typename In>
  __device__ int64_t slot(const PassArgs<In>& a) const {
    return (row / a.channels * a.parts + part) * a.channels + row % a.channels;
  }
};

// The constants of the channel of a part.
template <typename In>
__device__ __forceinline__ Channel<compute_t<In>> channel_of(const PassArgs<In>& a, int64_t row) {
  const int64_t group = row / a.depth;  // of the tensor: channels are groups · depth
  return Channel<compute_t<In>>(a.stats[group], a.stats[a.total() + group], a.affine, static_cast<int>(row % a.channels));
}

template <typename In>
__global__ void __launch_bounds__(kSplitThreads, pass_blocks<In>()) group_norm_split_moments(const PassArgs<In> a) {
  using A = compute_t<In>;
  constexpr int V = kVectorBytes / sizeof(In);
  __shared__ Moments<A> slots[kMaxWarps];
  const Part<V> part(a, blockIdx.x);
  const In* x = static_cast<const In*>(a.x) + part.start;
  Moments<A> m;
#pragma unroll 4
  for (int64_t w = part.first + threadIdx.x; w < part.last; w += kSplitThreads)
    extend(m, load_vec<In, V>(x + w * V), part.element(w), a.pixels);
  m = group_merge(m, slots, kSplitThreads);
  if (threadIdx.x == 0) a.moments[part.slot(a)] = m;
}

template <typename In, typename Out>
__global__ void __launch_bounds__(kSplitThreads, pass_blocks<In>()) group_norm_split_forward(const PassArgs<In> a) {
  using A = compute_t<In>;
  constexpr int V = kVectorBytes / sizeof(In);
  const Part<V> part(a, gridDim.x - 1 - blockIdx.x);
  const Channel<A> c = channel_of(a, part.row);
  const In* x = static_cast<const In*>(a.x) + part.start;
  Out* y = static_cast<Out*>(a.out) + part.start;
  with_act<Act::run_time>(a.act, [&](auto act) {
    for (int64_t w = part.first + threadIdx.x; w < part.last; w += kSplitThreads) {
      Vec<A, V> z = unpack<A>(load_vec<In, V>(x + w * V));
#pragma unroll
      for (int j = 0; j < V; ++j) z.v[j] = c.z(z.v[j]);
      store_inside(y + w * V, part.element(w), a.pixels, activated<decltype(act)::value, Out>(z));
    }
  });
}

template <typename In, typename Out>
__global__ void __launch_bounds__(kSplitThreads, pass_blocks<In>()) group_norm_split_sums(const PassArgs<In> a) {
  using A = compute_t<In>;
  constexpr int V = kVectorBytes / sizeof(In);
  __shared__ Sums<A> slots[kMaxWarps];
  const Part<V> part(a, blockIdx.x);
  const Channel<A> c = channel_of(a, part.row);
  const In* x = static_cast<const In*>(a.x) + part.start;
  const Out* dy = static_cast<const Out*>(a.dy) + part.start;
  Sums<A> sums{A(0), A(0)};
  with_act<Act::run_time>(a.act, [&](auto act) {
#pragma unroll 2
    for (int64_t w = part.first + threadIdx.x; w < part.last; w += kSplitThreads)
      sums = sums + word_sums<decltype(act)::value>(load_vec<In, V>(x + w * V), load_vec<Out, V>(dy + w * V), c, part.element(w), a.pixels);
  });
  sums = group_merge(sums, slots, kSplitThreads);
  if (threadIdx.x == 0) a.partial[part.slot(a)] = {sums.dz, sums.dz_xhat * c.rstd};
}

template <typename In, typename Out>
__global__ void __launch_bounds__(kSplitThreads, pass_blocks<In>()) group_norm_split_backward(const PassArgs<In> a) {
  using A = compute_t<In>;
  constexpr int V = kVectorBytes / sizeof(In);
  const Part<V> part(a, gridDim.x - 1 - blockIdx.x);
  const Channel<A> c = channel_of(a, part.row);
  const GroupGradient<A> gradient = a.gradients[part.row / a.depth];
  const In* x = static_cast<const In*>(a.x) + part.start;
  const Out* dy = static_cast<const Out*>(a.dy) + part.start;
  In* dx = static_cast<In*>(a.out) + part.start;
  with_act<Act::run_time>(a.act, [&](auto act) {
#pragma unroll 2
    for (int64_t w = part.first + threadIdx.x; w < part.last; w += kSplitThreads)
      store_inside(dx + w * V, part.element(w), a.pixels,
                   input_gradient<decltype(act)::value>(load_vec<In, V>(x + w * V), load_vec<Out, V>(dy + w * V), c, gradient));
  });
}

// ---- what merges the parts ----------------------------------------------------------------------------------------------

constexpr int kMergeThreads = 512;

// stats from moments; a warp a group.
template <typename In>
__global__ void __launch_bounds__(kMergeThreads) group_norm_merge_moments(const PassArgs<In> a) {
  using A = compute_t<In>;
  const int64_t group = (static_cast<int64_t>(blockIdx.x) * kMergeThreads + threadIdx.x) / 32;
  if (group >= a.total()) return;
  const int64_t sample = group / a.groups;
  const Moments<A>* moments = a.moments + sample * a.parts * a.channels + (group - sample * a.groups) * a.depth;
  Moments<A> m;
  const int count = static_cast<int>(a.parts * a.depth);
#pragma unroll 4
  for (int i = threadIdx.x & 31; i < count; i += 32) {
    const int part = static_cast<int>(a.by_depth.quotient(i));
    m = merge(m, moments[part * a.channels + (i - part * a.depth)]);
  }
  m = lanes_merge(m, 32);
  if ((threadIdx.x & 31) != 0) return;
  a.stats[group] = m.mean;
  a.stats[a.total() + group] = reciprocal_root(m.m2 / m.count + a.eps);
}

// What the backward's sums over parts of channels make.
template <typename A>
struct MergeArgs {
  const Sums<A>* partial;        // [rows, channels]; rows = samples·parts
  int64_t rows, channels;
  void* dweight;                 // null: not wanted
  void* dbias;
  bool wide;                     // they are float32 for 16-bit x
  int group_blocks;              // blocks that merge groups, a warp each; the others merge channels
};

constexpr int kMergeAcross = 8;  // channels of a block
constexpr int kMergeDown = kMergeThreads / kMergeAcross;

template <typename In>
__global__ void __launch_bounds__(kMergeThreads) group_norm_merge_sums(const MergeArgs<compute_t<In>> m, const PassArgs<In> a) {
  using A = compute_t<In>;
  if (blockIdx.x < static_cast<unsigned>(m.group_blocks)) {
    const int64_t group = (static_cast<int64_t>(blockIdx.x) * kMergeThreads + threadIdx.x) / 32;
    if (group >= a.total()) return;
    const int64_t sample = group / a.groups;
    const int first = static_cast<int>(group - sample * a.groups) * a.depth;
    const Sums<A>* partial = m.partial + sample * a.parts * a.channels + first;
    Sums<A> total{A(0), A(0)};
    const int count = static_cast<int>(a.parts * a.depth);
#pragma unroll 4
    for (int i = threadIdx.x & 31; i < count; i += 32) {
      const int part = static_cast<int>(a.by_depth.quotient(i)), channel = i - part * a.depth;
      const Sums<A> s = partial[part * a.channels + channel];
      const A weight = a.affine.weight(first + channel);
      total = total + Sums<A>{weight * s.dz, weight * s.dz_xhat};
    }
    total = lanes_merge(total, 32);
    if ((threadIdx.x & 31) == 0)
      a.gradients[group] = GroupGradient<A>(total, a.stats[a.total() + group], static_cast<A>(a.depth) * static_cast<A>(a.pixels));
    return;
  }
  __shared__ Sums<A> slots[kMergeThreads / 32][kMergeAcross];
  const int x = threadIdx.x % kMergeAcross, y = threadIdx.x / kMergeAcross;
  const int64_t channel = static_cast<int64_t>(blockIdx.x - m.group_blocks) * kMergeAcross + x;
  Sums<A> sums{A(0), A(0)};
  if (channel < m.channels) {
#pragma unroll 8
    for (int64_t row = y; row < m.rows; row += kMergeDown) sums = sums + m.partial[row * m.channels + channel];
  }
#pragma unroll
  for (int o = kMergeAcross; o < 32; o <<= 1) sums = sums + shuffled(sums, o);
  if ((threadIdx.x & 31) < kMergeAcross) slots[threadIdx.x >> 5][x] = sums;
  __syncthreads();
  if (y != 0 || channel >= m.channels) return;
#pragma unroll
  for (int i = 1; i < kMergeThreads / 32; ++i) sums = sums + slots[i][x];
  const auto write = [&](void* p, A value) {
    if (p == nullptr) return;
    if (sizeof(In) == 2 && m.wide) static_cast<float*>(p)[channel] = static_cast<float>(value);
    else static_cast<In*>(p)[channel] = convert<In>(value);
  };
  write(m.dweight, sums.dz_xhat);
  write(m.dbias, sums.dz);
}

// ---- channels last ------------------------------------------------------------------------------------------------------

constexpr int kPixelThreads = 256;

// A thread's V channels and the pixels that it walks over.
template <int V>
struct Column {
  int64_t sample, part, first, last;  // pixels of the block
  int64_t offset;                     // of the channels at pixel 0 of the sample
  int channel, y;
  bool active;

  template <typename In>
  __device__ Column(const PassArgs<In>& a, int64_t block) {
    const int64_t chunk = block / a.tiles;
    sample = chunk / a.parts;
    part = chunk - sample * a.parts;
    y = threadIdx.x / a.across;
    channel = (static_cast<int>(block - chunk * a.tiles) * a.across + static_cast<int>(threadIdx.x) - y * a.across) * V;
    active = channel < a.channels;
    first = part * a.part_size;
    last = first + a.part_size < a.pixels ? first + a.part_size : a.pixels;
    offset = sample * a.pixels * a.channels + channel;
  }
  template <typename In>
  __device__ int64_t slot(const PassArgs<In>& a) const { return (sample * a.parts + part) * a.channels + channel; }
};

// Merges what the threads of one column hold, into those at the top.
template <typename T, int V>
__device__ __forceinline__ void merge_down(T (&value)[V], char* memory, int across, int down, int y) {
  T* shared = reinterpret_cast<T*>(memory);
  const int x = threadIdx.x - y * across;
  for (int live = down; live > 1;) {
    const int half = (live + 1) / 2;
    if (y >= half && y < live) {
#pragma unroll
      for (int j = 0; j < V; ++j) shared[((y - half) * V + j) * across + x] = value[j];
    }
    __syncthreads();
    if (y < live - half) {
#pragma unroll
      for (int j = 0; j < V; ++j) value[j] = merge(value[j], shared[(y * V + j) * across + x]);
    }
    __syncthreads();
    live = half;
  }
}

template <typename In, int V>
__global__ void __launch_bounds__(kPixelThreads) group_norm_pixels_moments(const PassArgs<In> a) {
  using A = compute_t<In>;
  extern __shared__ __align__(16) char memory[];
  const Column<V> column(a, blockIdx.x);
  const In* x = static_cast<const In*>(a.x) + column.offset;
  Moments<A> m[V];
  if (column.active) {
    A count = 0;
#pragma unroll 4
    for (int64_t p = column.first + column.y; p < column.last; p += a.down) {
      const Vec<A, V> v = unpack<A>(load_vec<In, V>(x + p * a.channels));
      count += A(1);
      const A share = A(1) / count;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const A delta = v.v[j] - m[j].mean;
        m[j].mean += delta * share;
        m[j].m2 += delta * (v.v[j] - m[j].mean);
      }
    }
#pragma unroll
    for (int j = 0; j < V; ++j) m[j].count = count;
  }
  merge_down(m, memory, a.across, a.down, column.y);
  if (!column.active || column.y != 0) return;
  Moments<A>* out = a.moments + column.slot(a);
#pragma unroll
  for (int j = 0; j < V; ++j) out[j] = m[j];
}

template <typename In, typename Out, int V>
__global__ void __launch_bounds__(kPixelThreads, pass_blocks<In>()) group_norm_pixels_forward(const PassArgs<In> a) {
  using A = compute_t<In>;
  const Column<V> column(a, gridDim.x - 1 - blockIdx.x);
  if (!column.active) return;
  const In* x = static_cast<const In*>(a.x) + column.offset;
  Out* y = static_cast<Out*>(a.out) + column.offset;
  A mean[V], scale[V], bias[V];
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const int64_t group = column.sample * a.groups + a.by_depth.quotient(column.channel + j);
    const Channel<A> c(a.stats[group], a.stats[a.total() + group], a.affine, column.channel + j);
    mean[j] = c.mean, scale[j] = c.scale, bias[j] = c.bias;
  }
  with_act<Act::run_time>(a.act, [&](auto act) {
#pragma unroll 2
    for (int64_t p = column.first + column.y; p < column.last; p += a.down) {
      Vec<A, V> z = unpack<A>(load_vec<In, V>(x + p * a.channels));
#pragma unroll
      for (int j = 0; j < V; ++j) z.v[j] = (z.v[j] - mean[j]) * scale[j] + bias[j];
      store_vec<Out, V>(y + p * a.channels, activated<decltype(act)::value, Out>(z));
    }
  });
}

template <typename In, typename Out, int V>
__global__ void __launch_bounds__(kPixelThreads, pass_blocks<In>()) group_norm_pixels_sums(const PassArgs<In> a) {
  using A = compute_t<In>;
  extern __shared__ __align__(16) char memory[];
  const Column<V> column(a, blockIdx.x);
  const In* x = static_cast<const In*>(a.x) + column.offset;
  const Out* dy = static_cast<const Out*>(a.dy) + column.offset;
  Sums<A> sums[V];
  A mean[V], rstd[V], scale[V], bias[V];
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const int channel = column.active ? column.channel + j : 0;
    const int64_t group = column.sample * a.groups + a.by_depth.quotient(channel);
    const Channel<A> c(a.stats[group], a.stats[a.total() + group], a.affine, channel);
    mean[j] = c.mean, rstd[j] = c.rstd, scale[j] = c.scale, bias[j] = c.bias;
    sums[j] = {A(0), A(0)};
  }
  if (column.active) {
    with_act<Act::run_time>(a.act, [&](auto act) {
#pragma unroll 2
      for (int64_t p = column.first + column.y; p < column.last; p += a.down) {
        const Vec<A, V> v = unpack<A>(load_vec<In, V>(x + p * a.channels));
        const Vec<A, V> g = unpack<A>(load_vec<Out, V>(dy + p * a.channels));
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const A d = v.v[j] - mean[j];
          const A dz = act_gradient<decltype(act)::value, sizeof(In) == 2>(g.v[j], d * scale[j] + bias[j]);
          sums[j].dz += dz;
          sums[j].dz_xhat += dz * d;
        }
      }
    });
#pragma unroll
    for (int j = 0; j < V; ++j) sums[j].dz_xhat *= rstd[j];
  }
  merge_down(sums, memory, a.across, a.down, column.y);
  if (!column.active || column.y != 0) return;
  Sums<A>* out = a.partial + column.slot(a);
#pragma unroll
  for (int j = 0; j < V; ++j) out[j] = sums[j];
}

template <typename In, typename Out, int V>
__global__ void __launch_bounds__(kPixelThreads, pass_blocks<In>()) group_norm_pixels_backward(const PassArgs<In> a) {
  using A = compute_t<In>;
  const Column<V> column(a, gridDim.x - 1 - blockIdx.x);
  if (!column.active) return;
  const In* x = static_cast<const In*>(a.x) + column.offset;
  const Out* dy = static_cast<const Out*>(a.dy) + column.offset;
  In* dx = static_cast<In*>(a.out) + column.offset;
  A mean[V], scale[V], bias[V], constant[V], slope[V];
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const int64_t group = column.sample * a.groups + a.by_depth.quotient(column.channel + j);
    const Channel<A> c(a.stats[group], a.stats[a.total() + group], a.affine, column.channel + j);
    const GroupGradient<A> g = a.gradients[group];
    mean[j] = c.mean, scale[j] = c.scale, bias[j] = c.bias, constant[j] = g.constant, slope[j] = g.slope;
  }
  with_act<Act::run_time>(a.act, [&](auto act) {
    for (int64_t p = column.first + column.y; p < column.last; p += a.down) {
      const Vec<A, V> v = unpack<A>(load_vec<In, V>(x + p * a.channels));
      Vec<A, V> r = unpack<A>(load_vec<Out, V>(dy + p * a.channels));
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const A d = v.v[j] - mean[j];
        r.v[j] = act_gradient<decltype(act)::value, sizeof(In) == 2>(r.v[j], d * scale[j] + bias[j]) * scale[j] - constant[j] - d * slope[j];
      }
      store_vec<In, V>(dx + p * a.channels, pack<In>(r));
    }
  });
}

// ---- launch rules -------------------------------------------------------------------------------------------------------

// Environment overrides for measuring: FASTLAYERS_GROUP_NORM_<name>.
int64_t choice(const char* name, int64_t usual) {
  const char* value = std::getenv(name);
  return value != nullptr ? std::atoll(value) : usual;
}

struct Choices {
  // Bytes of a group (of all operands) up to which one block holds it, if its shared memory allows.
  int64_t block_bytes = choice("FASTLAYERS_GROUP_NORM_BLOCK_BYTES", 1 << 20);
  // Words of a group for each thread of its block where there is work for the whole GPU.
  int64_t thread_words = choice("FASTLAYERS_GROUP_NORM_THREAD_WORDS", 8);
  // Bytes of a stage of a team's member; 0: as many as the shared memory allows with two blocks an SM.
  int64_t stage_bytes = choice("FASTLAYERS_GROUP_NORM_STAGE_BYTES", 0);
  // Blocks an SM of the passes over pixels and channels, forward and backward.
  int64_t forward_blocks = choice("FASTLAYERS_GROUP_NORM_FORWARD_BLOCKS", 4);
  int64_t backward_blocks = choice("FASTLAYERS_GROUP_NORM_BACKWARD_BLOCKS", 4);
};

const Choices& choices() {
  static const Choices c;
  return c;
}

constexpr int kStaticShared = 1024;  // what the kernels have besides, and what a block costs

struct SharedMemory {
  int block = 0, processor = 0;  // most bytes of a block, and of all blocks of an SM
};

const SharedMemory& shared_memory(int device) {
  static SharedMemory memory[kMaxDevices];
  SharedMemory& m = memory[device];
  if (m.block == 0) {
    int block = 0, processor = 0;
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&processor, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device));
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    m.processor = processor;
    m.block = block - kStaticShared;
  }
  return m;
}

unsigned grid_of(int64_t blocks) {
  STD_TORCH_CHECK(blocks <= INT32_MAX, "fastlayers::group_norm: a tensor that needs ", blocks, " blocks is more than one launch takes");
  return static_cast<unsigned>(blocks);
}

// Lets a kernel have as much shared memory as it may.
template <auto kernel>
void allow_shared_memory(int device) {
  static bool allowed[kMaxDevices];
  if (allowed[device]) return;
  STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_memory(device).block));
  allowed[device] = true;
}

// How the words of a channel are cut into items for the threads of the backward.
template <typename In>
void choose_items(HoldArgs<In>& a, int channel_words, int threads, int64_t members) {
  constexpr int kWordCost = 8, kItemCost = 2;  // relative: the arithmetic of a word, and the reduction of an item
  int64_t best = INT64_MAX;
  for (int bits = 0; bits <= 10 && (bits == 0 || channel_words >> bits > 0); ++bits) {
    const int64_t share = ceil_div(channel_words, int64_t{1} << bits);
    const int lanes = static_cast<int>(std::min<int64_t>({32, threads, next_power_of_2(share)}));
    const int64_t rounds = ceil_div(ceil_div(static_cast<int64_t>(a.depth) << bits, members), threads / lanes);
    const int64_t cost = rounds * (ceil_div(share, lanes) * kWordCost + kItemCost);
    if (cost >= best) continue;
    best = cost;
    a.part_bits = bits;
    a.item_lanes = lanes;
    a.item_bits = log2_of(lanes);
    a.part_words = static_cast<int>(ceil_div(share, lanes) * lanes);
  }
}

// Threads of a block that holds a group: `thread_words` each, but fewer words where that leaves the GPU empty.
int group_threads(int64_t words, int64_t groups, int64_t bytes, int wide, bool power_of_2, const Launch& launch) {
  const int64_t room = static_cast<int64_t>(device_traits(launch.device()).processors) * kWideThreads;
  const int64_t each = std::clamp<int64_t>(words * groups / room, 1, choices().thread_words);
  const int64_t most = 2 * (bytes + kStaticShared) > shared_memory(launch.device()).processor ? wide : std::min(wide, kBlockThreads);
  int64_t threads = ceil_div(words, each);
  threads = threads <= 32 || power_of_2 ? next_power_of_2(threads) : ceil_div(threads, 32) * 32;
  return static_cast<int>(std::min(threads, most));
}

// Launches a block kernel; false where a block cannot hold a group. `prepare` is called when the items are chosen.
template <auto kernel, bool BACKWARD, typename In, typename Prepare>
bool launch_block(HoldArgs<In>& a, int64_t words, int word_bytes, const Launch& launch, Prepare&& prepare) {
  const SharedMemory& memory = shared_memory(launch.device());
  const int64_t bytes = words * word_bytes;
  if (bytes > memory.block || bytes > choices().block_bytes) return false;
  a.lanes = group_threads(words, a.total, bytes, wide_threads<In>(), BACKWARD, launch);
  a.lane_bits = log2_of(std::min(a.lanes, 32));
  a.held = static_cast<int>(words);
  a.each = static_cast<int>(ceil_div(words, a.lanes));
  constexpr int V = kVectorBytes / sizeof(In);
  if constexpr (BACKWARD) choose_items(a, static_cast<int>(ceil_div(a.hw, V)) + (a.hw % V != 0), a.lanes, 1);
  // Short groups, of at most 256 words: several to a block.
  const int threads = a.lanes <= 32 ? kShortThreads : a.lanes;
  const int per_block = threads / a.lanes;
  allow_shared_memory<kernel>(launch.device());
  prepare();
  kernel<<<grid_of(ceil_div(a.total, per_block)), threads, static_cast<size_t>(per_block * bytes), launch.stream()>>>(a);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return true;
}

// Launches a team kernel; false where the blocks that fit the GPU at once cannot hold a group.
template <auto kernel, bool BACKWARD, typename In, typename Prepare>
bool launch_team(HoldArgs<In>& a, int64_t words, int word_bytes, const Launch& launch, const Tensor& like, Prepare&& prepare) {
  static int resident[kMaxDevices];
  const SharedMemory& memory = shared_memory(launch.device());
  int64_t stage_bytes = std::min(memory.processor / kTeamBlocks - 2 * kStaticShared, memory.block) / kTeamStages;
  if (choices().stage_bytes > 0) stage_bytes = std::min(stage_bytes, choices().stage_bytes);
  const int64_t stage_words = stage_bytes / word_bytes;
  int& blocks = resident[launch.device()];  // 0: not asked yet; -1: none
  if (blocks == 0) {
    allow_shared_memory<kernel>(launch.device());
    int each = 0;
    STD_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, kTeamThreads, kTeamStages * stage_words * word_bytes));
    blocks = each > 0 ? each * device_traits(launch.device()).processors : -1;
  }
  constexpr int V = kVectorBytes / sizeof(In);
  int64_t teams = std::min<int64_t>(blocks / ceil_div(words, stage_words), a.total);
  // Items are not cut, so that a member may get more than its share of words: then fewer teams, of more members.
  for (; blocks > 0 && teams > 0; --teams) {
    a.members = static_cast<int>(blocks / teams);
    if constexpr (BACKWARD) {
      choose_items(a, static_cast<int>(ceil_div(a.hw, V)) + (a.hw % V != 0), kTeamThreads, a.members);
      const int64_t items = static_cast<int64_t>(a.depth) << a.part_bits;
      a.items_each = static_cast<int>(ceil_div(items, a.members));
      a.members = static_cast<int>(ceil_div(items, a.items_each));
      a.held = static_cast<int>(std::min<int64_t>(words, static_cast<int64_t>(a.items_each) * a.part_words));
    } else {
      a.each = static_cast<int>(ceil_div(words, a.members));
      a.members = static_cast<int>(ceil_div(words, a.each));
      a.held = a.each;
    }
    if (a.held <= stage_words) break;
  }
  if (blocks <= 0 || teams <= 0) return false;
  a.teams = static_cast<int>(teams);
  prepare();
  const int64_t slots = a.total * a.members;
  const Tensor board = empty_contiguous({slots}, ScalarType::Long, like);
  a.board = static_cast<unsigned long long*>(board.mutable_data_ptr());
  STD_CUDA_CHECK(cudaMemsetAsync(a.board, 0xff, sizeof(*a.board) * slots, launch.stream()));
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid_of(teams * a.members));
  config.blockDim = dim3(kTeamThreads);
  config.dynamicSmemBytes = static_cast<size_t>(kTeamStages) * a.held * word_bytes;
  config.stream = launch.stream();
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  STD_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, a));
  return true;
}

// ---- host ---------------------------------------------------------------------------------------------------------------

// Calls f(In{}, Out{}) for the pairs of dtypes that are built: the same twice, or 16 bits in and float32 out.
template <typename F>
void dispatch_pair(ScalarType in, ScalarType out, const char* op, F&& f) {
  dispatch_floating(in, op, [&](auto x) {
    using In = decltype(x);
    if (in == out) return f(In{}, In{});
    if constexpr (sizeof(In) == 2) {
      if (out == ScalarType::Float) return f(In{}, float{});
    }
    STD_TORCH_CHECK(false, "fastlayers::", op, ": no kernel for x of ", torch::headeronly::toString(in), " and y of ",
                    torch::headeronly::toString(out));
  });
}

// x as the kernels take it: aligned, and contiguous or channels last.
struct Layout {
  Dims sizes, strides;
  bool channels_last = false;
  int64_t samples, channels, pixels = 1;

  Layout(const Tensor& x, int64_t groups, const char* op) : sizes(dims_of(x.sizes())) {
    const int64_t dims = static_cast<int64_t>(sizes.size());
    STD_TORCH_CHECK(dims >= 2 && dims <= 5, "fastlayers::", op, ": expected x of 2 to 5 dimensions, but got ", dims);
    samples = sizes[0], channels = sizes[1];
    STD_TORCH_CHECK(groups > 0 && channels % groups == 0 && channels <= INT32_MAX, "fastlayers::", op, ": expected channels (",
                    channels, ") divisible by groups (", groups, ")");
    for (int64_t d = 2; d < dims; ++d) pixels *= sizes[d];
    strides = dims_of(x.strides());
    if (x.is_contiguous()) return;
    Dims order{0};
    for (int64_t d = 2; d < dims; ++d) order.push_back(d);
    order.push_back(1);
    channels_last = same_layout(sizes, strides, dense_strides(sizes, order));
    if (!channels_last) strides = contiguous_strides(sizes);
  }
  // t in this layout and aligned, by a copy where it is not.
  Tensor bring(const Tensor& t) const {
    const Tensor r = with_strides(t, sizes, strides);
    return aligned(r.const_data_ptr()) ? r : torch::stable::clone(r);
  }
  Tensor empty(ScalarType dtype, const Tensor& like) const { return empty_strided(sizes, strides, dtype, like); }
};

// weight or bias, contiguous; `keep` holds the copy where it is not.
const void* channel_values(const std::optional<Tensor>& t, const Tensor& x, int64_t channels, bool& wide, Tensor& keep, const char* op,
                           const char* name) {
  if (!t) return nullptr;
  const ScalarType dtype = t->scalar_type(), x_dtype = x.scalar_type();
  const bool half = x_dtype == ScalarType::Half || x_dtype == ScalarType::BFloat16;
  STD_TORCH_CHECK(dtype == x_dtype || (half && dtype == ScalarType::Float), "fastlayers::", op, ": expected ", name, " of x's dtype ",
                  torch::headeronly::toString(x_dtype), half ? " or float32" : "", ", but got ", torch::headeronly::toString(dtype));
  STD_TORCH_CHECK(t->numel() == channels && t->is_cuda() && t->get_device_index() == x.get_device_index(), "fastlayers::", op,
                  ": expected ", name, " of ", channels, " elements on x's device, but got ", t->numel());
  wide = dtype != x_dtype;
  keep = t->is_contiguous() ? *t : torch::stable::contiguous(*t);
  return keep.const_data_ptr();
}

struct AffineTensors {
  Tensor weight, bias;
};

template <typename In>
Args<In> make_args(const Tensor& x, const Layout& layout, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                   AffineTensors& keep, int64_t groups, int64_t act, const char* op) {
  Args<In> a{};
  a.x = x.const_data_ptr();
  bool weight_wide = false, bias_wide = false;
  a.affine.weight_data = channel_values(weight, x, layout.channels, weight_wide, keep.weight, op, "weight");
  a.affine.bias_data = channel_values(bias, x, layout.channels, bias_wide, keep.bias, op, "bias");
  STD_TORCH_CHECK(!weight || !bias || weight_wide == bias_wide, "fastlayers::", op, ": expected weight and bias of one dtype");
  a.affine.wide = weight_wide || bias_wide;
  a.samples = layout.samples, a.channels = layout.channels, a.pixels = layout.pixels;
  a.groups = static_cast<int>(groups), a.depth = static_cast<int>(layout.channels / groups);
  a.act = act_of(act, op);
  return a;
}

template <typename In>
ScalarType compute_dtype() { return std::is_same_v<In, double> ? ScalarType::Double : ScalarType::Float; }

constexpr int64_t kMostHeld = int64_t{1} << 30;  // elements of a group that the block and team kernels number by 32 bits

template <typename In>
HoldArgs<In> make_hold(const Args<In>& args) {
  HoldArgs<In> a{};
  static_cast<Args<In>&>(a) = args;
  a.total = args.samples * args.groups;
  a.n = static_cast<int>(args.depth * args.pixels);
  a.hw = static_cast<int>(args.pixels);
  a.by_hw = Divider(static_cast<uint32_t>(args.pixels));
  return a;
}

// Words that a group may cover.
template <int V>
int64_t group_words(int64_t n) { return ceil_div(n + (n % V != 0 ? V - 1 : 0), V); }

// The two passes over a contiguous tensor: its channels are cut where there are too few of them to fill the GPU, or into parts
// that blocks of even size can share.
template <typename In>
PassArgs<In> split_pass(const Args<In>& args, int64_t blocks) {
  constexpr int64_t kLeast = 4 * kSplitThreads, kMost = 16 * kSplitThreads;  // words of a part
  constexpr int V = kVectorBytes / sizeof(In);
  PassArgs<In> a{};
  static_cast<Args<In>&>(a) = args;
  const int64_t words = ceil_div(args.pixels, V) + (args.pixels % V != 0);
  a.part_size = std::clamp(words * args.samples * args.channels / blocks, kLeast, kMost);
  a.parts = ceil_div(words, a.part_size);
  a.by_depth = Divider(static_cast<uint32_t>(args.depth));
  return a;
}

// And over one that is channels last.
template <typename In>
PassArgs<In> pixel_pass(const Args<In>& args, int64_t blocks, int vector) {
  constexpr int64_t kWidest = 128, kLeast = 4;  // words of channels to a block, pixels to a thread
  PassArgs<In> a{};
  static_cast<Args<In>&>(a) = args;
  const int64_t words = args.channels / vector;
  a.tiles = static_cast<int>(ceil_div(words, kWidest));
  a.across = static_cast<int>(ceil_div(words, a.tiles));
  a.down = kPixelThreads / a.across;
  const int64_t wanted = std::max<int64_t>(1, blocks / (args.samples * a.tiles));
  a.part_size = std::max(ceil_div(args.pixels, wanted), std::min<int64_t>(args.pixels, kLeast * a.down));
  a.parts = ceil_div(args.pixels, a.part_size);
  a.by_depth = Divider(static_cast<uint32_t>(args.depth));
  return a;
}

template <typename In>
int64_t blocks_of_pass(const PassArgs<In>& a, bool channels_last) {
  return channels_last ? a.samples * a.parts * a.tiles : a.samples * a.channels * a.parts;
}

template <typename In, typename Out, int V>
void forward_pixels(const PassArgs<In>& a, unsigned grid, cudaStream_t stream) {
  const int threads = a.across * a.down;
  const size_t shared = static_cast<size_t>(a.down / 2) * a.across * V * sizeof(Moments<compute_t<In>>);
  group_norm_pixels_moments<In, V><<<grid, threads, shared, stream>>>(a);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  group_norm_merge_moments<In><<<grid_of(ceil_div(a.samples * a.groups * 32, kMergeThreads)), kMergeThreads, 0, stream>>>(a);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  group_norm_pixels_forward<In, Out, V><<<grid, threads, 0, stream>>>(a);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

template <typename In, typename Out>
void forward_passes(const Args<In>& args, bool channels_last, const Launch& launch, const Tensor& like) {
  using A = compute_t<In>;
  constexpr int V = kVectorBytes / sizeof(In);
  const int vector = args.channels % V == 0 ? V : 1;
  const int64_t blocks = choices().forward_blocks * device_traits(launch.device()).processors;
  PassArgs<In> a = channels_last ? pixel_pass(args, blocks, vector) : split_pass(args, blocks);
  const Tensor moments = empty_contiguous({a.samples * a.parts * a.channels * 3}, compute_dtype<In>(), like);
  a.moments = static_cast<Moments<A>*>(moments.mutable_data_ptr());
  const unsigned grid = grid_of(blocks_of_pass(a, channels_last));
  if (channels_last) {
    if (vector > 1) forward_pixels<In, Out, V>(a, grid, launch.stream());
    else forward_pixels<In, Out, 1>(a, grid, launch.stream());
    return;
  }
  group_norm_split_moments<In><<<grid, kSplitThreads, 0, launch.stream()>>>(a);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  group_norm_merge_moments<In><<<grid_of(ceil_div(a.samples * a.groups * 32, kMergeThreads)), kMergeThreads, 0, launch.stream()>>>(a);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  group_norm_split_forward<In, Out><<<grid, kSplitThreads, 0, launch.stream()>>>(a);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

std::tuple<Tensor, Tensor> group_norm_forward(const Tensor& x_in, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                                              int64_t groups, double eps, int64_t act, ScalarType dtype, bool keep) {
  const char* op = "group_norm_forward";
  const Layout layout(x_in, groups, op);
  const Launch launch(x_in);
  const Tensor x = layout.bring(x_in);
  Tensor y = layout.empty(dtype, x), stats;
  dispatch_pair(x.scalar_type(), dtype, op, [&](auto in, auto out) {
    using In = decltype(in);
    using Out = decltype(out);
    AffineTensors tensors;
    Args<In> args = make_args<In>(x, layout, weight, bias, tensors, groups, act, op);
    const int64_t total = args.samples * groups, n = args.depth * args.pixels;
    const bool held = !layout.channels_last && n <= kMostHeld;
    const auto stats_tensor = [&](bool wanted) {
      const int64_t sizes[2] = {2, total}, strides[2] = {total, 1}, none = 0, one = 1;
      stats = wanted ? empty_strided(2, sizes, strides, compute_dtype<In>(), x) : empty_strided(1, &none, &one, compute_dtype<In>(), x);
      args.stats = wanted ? static_cast<compute_t<In>*>(stats.mutable_data_ptr()) : nullptr;
    };
    stats_tensor(keep);
    if (total * n == 0) {
      if (keep && total > 0) STD_CUDA_CHECK(cudaMemsetAsync(args.stats, 0, 2 * total * sizeof(compute_t<In>), launch.stream()));
      return;
    }
    args.out = y.mutable_data_ptr();
    args.eps = static_cast<compute_t<In>>(eps);
    if (held) {
      constexpr int V = kVectorBytes / sizeof(In);
      HoldArgs<In> a = make_hold(args);
      const int64_t words = group_words<V>(n);
      if (launch_block<group_norm_forward_block<In, Out>, false>(a, words, kVectorBytes, launch, [] {})) return;
      if constexpr (!std::is_same_v<In, double>) {
        if (launch_team<group_norm_forward_team<In, Out>, false>(a, words, kVectorBytes, launch, x, [] {})) return;
      }
    }
    const Tensor result = stats;
    if (!keep) stats_tensor(true);  // the passes hand them over in memory
    const Tensor scratch = stats;
    forward_passes<In, Out>(args, layout.channels_last, launch, x);
    stats = result;
  });
  return {y, stats};
}

// What the backward's kernels leave to be added up: the sums of each part of each channel, and what of them is wanted.
template <typename In>
struct Gradients {
  using A = compute_t<In>;
  Tensor dweight, dbias, partial_tensor;
  Sums<A>* partial = nullptr;
  int64_t rows = 0;
  bool wanted;

  Gradients(const Args<In>& a, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias, const Tensor& x)
      : dweight(values(weight ? weight : bias, a.channels, x)), dbias(values(bias ? bias : weight, a.channels, x)), wanted(weight || bias) {}
  static Tensor values(const std::optional<Tensor>& t, int64_t channels, const Tensor& x) {
    const int64_t size = t ? channels : 0, one = 1;
    return empty_strided(1, &size, &one, t ? t->scalar_type() : x.scalar_type(), x);
  }
  void make_partial(int64_t rows_, int64_t channels, const Tensor& x) {
    rows = rows_;
    const int64_t size = rows * channels * 2, one = 1;
    partial_tensor = empty_strided(1, &size, &one, compute_dtype<In>(), x);
    partial = static_cast<Sums<A>*>(partial_tensor.mutable_data_ptr());
  }
  // Adds them up; for the passes, `groups` too.
  void merge(const PassArgs<In>& a, bool groups, cudaStream_t stream) {
    const auto data = [](Tensor& t) { return t.numel() > 0 ? t.mutable_data_ptr() : nullptr; };
    MergeArgs<A> m{partial, rows, a.channels, data(dweight), data(dbias), a.affine.wide, 0};
    if (groups) m.group_blocks = static_cast<int>(grid_of(ceil_div(a.samples * a.groups * 32, kMergeThreads)));
    const int64_t blocks = m.group_blocks + (wanted ? ceil_div(a.channels, kMergeAcross) : 0);
    group_norm_merge_sums<In><<<grid_of(blocks), kMergeThreads, 0, stream>>>(m, a);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
};

template <typename In, typename Out, int V>
void backward_pixels(const PassArgs<In>& a, Gradients<In>& gradients, unsigned grid, cudaStream_t stream) {
  const int threads = a.across * a.down;
  const size_t shared = static_cast<size_t>(a.down / 2) * a.across * V * sizeof(Sums<compute_t<In>>);
  group_norm_pixels_sums<In, Out, V><<<grid, threads, shared, stream>>>(a);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  gradients.merge(a, true, stream);
  group_norm_pixels_backward<In, Out, V><<<grid, threads, 0, stream>>>(a);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

template <typename In, typename Out>
void backward_passes(const Args<In>& args, bool channels_last, Gradients<In>& gradients, const Launch& launch, const Tensor& like) {
  using A = compute_t<In>;
  constexpr int V = kVectorBytes / sizeof(In);
  const int vector = args.channels % V == 0 ? V : 1;
  const int64_t blocks = choices().backward_blocks * device_traits(launch.device()).processors;
  PassArgs<In> a = channels_last ? pixel_pass(args, blocks, vector) : split_pass(args, blocks);
  const Tensor of_groups = empty_contiguous({a.samples * a.groups * 2}, compute_dtype<In>(), like);
  a.gradients = static_cast<GroupGradient<A>*>(of_groups.mutable_data_ptr());
  gradients.make_partial(a.samples * a.parts, a.channels, like);
  a.partial = gradients.partial;
  const unsigned grid = grid_of(blocks_of_pass(a, channels_last));
  if (channels_last) {
    if (vector > 1) backward_pixels<In, Out, V>(a, gradients, grid, launch.stream());
    else backward_pixels<In, Out, 1>(a, gradients, grid, launch.stream());
    return;
  }
  group_norm_split_sums<In, Out><<<grid, kSplitThreads, 0, launch.stream()>>>(a);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  gradients.merge(a, true, launch.stream());
  group_norm_split_backward<In, Out><<<grid, kSplitThreads, 0, launch.stream()>>>(a);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

std::tuple<Tensor, Tensor, Tensor> group_norm_backward(const Tensor& dy_in, const Tensor& x_in, const Tensor& stats,
                                                       const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                                                       int64_t groups, int64_t act) {
  const char* op = "group_norm_backward";
  const Layout layout(x_in, groups, op);
  STD_TORCH_CHECK(dims_of(dy_in.sizes()) == layout.sizes && dy_in.is_cuda() && dy_in.get_device_index() == x_in.get_device_index(),
                  "fastlayers::", op, ": expected dy of x's shape, on x's device");
  const Launch launch(x_in);
  const Tensor x = layout.bring(x_in), dy = layout.bring(dy_in);
  Tensor dx = layout.empty(x.scalar_type(), x);
  std::optional<Tensor> dweight, dbias;
  dispatch_pair(x.scalar_type(), dy.scalar_type(), op, [&](auto in, auto out) {
    using In = decltype(in);
    using Out = decltype(out);
    AffineTensors tensors;
    Args<In> args = make_args<In>(x, layout, weight, bias, tensors, groups, act, op);
    const int64_t total = args.samples * groups, n = args.depth * args.pixels;
    STD_TORCH_CHECK(stats.scalar_type() == compute_dtype<In>() && stats.numel() == 2 * total && stats.is_contiguous(), "fastlayers::",
                    op, ": expected stats of ", 2 * total, " elements, as group_norm_forward keeps them");
    Gradients<In> gradients(args, weight, bias, x);
    dweight.emplace(gradients.dweight), dbias.emplace(gradients.dbias);
    if (total * n == 0) {
      torch::stable::zero_(*dweight), torch::stable::zero_(*dbias);
      return;
    }
    args.dy = dy.const_data_ptr();
    args.out = dx.mutable_data_ptr();
    args.stats = static_cast<compute_t<In>*>(const_cast<void*>(stats.const_data_ptr()));
    if (!layout.channels_last && n <= kMostHeld) {
      constexpr int V = kVectorBytes / sizeof(In);
      constexpr int kWordBytes = V * (sizeof(In) + sizeof(Out));
      HoldArgs<In> a = make_hold(args);
      const int64_t words = group_words<V>(n);
      const auto prepare = [&] {
        if (!gradients.wanted) return;
        gradients.make_partial(a.samples << a.part_bits, a.channels, x);
        a.partial = gradients.partial;
      };
      bool done = launch_block<group_norm_backward_block<In, Out>, true>(a, words, kWordBytes, launch, prepare);
      if constexpr (!std::is_same_v<In, double>) {
        if (!done) done = launch_team<group_norm_backward_team<In, Out>, true>(a, words, kWordBytes, launch, x, prepare);
      }
      if (done) {
        PassArgs<In> merged{};
        static_cast<Args<In>&>(merged) = args;
        if (gradients.wanted) gradients.merge(merged, false, launch.stream());
        return;
      }
    }
    backward_passes<In, Out>(args, layout.channels_last, gradients, launch, x);
  });
  return {dx, *dweight, *dbias};
}

}  // namespace
}  // namespace fastlayers

STABLE_TORCH_LIBRARY_IMPL(fastlayers, CUDA, m) {
  m.impl("group_norm_forward", TORCH_BOX(&fastlayers::group_norm_forward));
  m.impl("group_norm_backward", TORCH_BOX(&fastlayers::group_norm_backward));
}

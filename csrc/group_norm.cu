// group_norm of x over (N, C, *), with an optional activation, forward and backward. instance_norm is groups = C.
//
// The stock composition reads x for the statistics, reads and writes it for the affine part and again for the activation, and its backward
// passes over x and dy three to four times. Here a group is read once and written once: it stays on the chip between the statistics and
// the result. The backward recomputes z = weight·xhat + bias, which the activation's gradient needs.
//
//   block   forward, contiguous (N, C, *): a group is one run of memory. A part of a warp, or a block, holds it in shared memory.
//   team    forward, a group too large for a block: many blocks, all resident, hold a slice each and tell each other their sums
//           through global memory, while the next group is on its way.
//   items   backward, contiguous: a part of a warp, a block or a cluster (sm_90) holds a group in registers.
//   split   contiguous groups that these cannot hold: one pass for the sums, one for the result.
//   pixels  channels last, where groups are interleaved: two passes as well, each thread with some channels of its own.
//
// In a contiguous tensor whose channels are no multiple of the vector, groups and channels start anywhere in a 16-byte word. All tensors
// are aligned, so element i of each lies at the same place in its word: kernels read the words that cover a group or a channel and ignore
// what belongs to its neighbours.
#include "common/activations.cuh"
#include "common/board.cuh"
#include "common/channels.cuh"
#include "common/rows.cuh"

namespace fastlayers {
namespace {

constexpr int kGroupCluster = 8;  // most blocks that share a group: as many as any sm_90 part takes
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

template <typename In>
struct Args {
  using A = compute_t<In>;
  const void* x;
  const void* dy;  // backward
  void* out;       // y, or dx
  A* stats;        // [2, samples·groups]: means, then reciprocal standard deviations. Null: not wanted
  ChannelValues weight, bias;
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

template <typename A>
__device__ __forceinline__ Sums<A> merge(const Sums<A>& p, const Sums<A>& q) { return p + q; }

// ---- moments ------------------------------------------------------------------------------------------------------------

template <typename A>
__device__ __forceinline__ A reciprocal_root(A v) {
  if constexpr (std::is_same_v<A, double>) return rsqrt(v);
  else return rsqrtf(v);
}

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
    unroll<V>([&](int j) {
      if (inside(e, j, n)) own.count += A(1);
      else v.v[j] = A(0);
    });
    if (own.count == A(0)) return;
  }
  own.mean = whole ? tree_sum(v) * A(1.0 / V) : tree_sum(v) / own.count;
  unroll<V>([&](int j) {
    const A d = whole || inside(e, j, n) ? v.v[j] - own.mean : A(0);
    v.v[j] = d * d;
  });
  own.m2 = tree_sum(v);
  m = merge(m, own);
}

// Adds up the sums of the warps of a cluster's blocks. Each thread has arrived at the cluster's barrier where it has more than one
// block. `slots`: shared, one for each of those warps.
template <typename A>
__device__ __forceinline__ Sums<A> cluster_merge(const Sums<A>& value, Sums<A>* slots) {
  auto cluster = this_cluster();
  const int warps = blockDim.x >> 5, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int blocks = static_cast<int>(cluster.num_blocks());
  if (blocks > 1) {
    cluster.barrier_wait();  // every block has started: its memory may be written
    if (lane < blocks) cluster.map_shared_rank(slots, lane)[static_cast<int>(cluster.block_rank()) * warps + warp] = value;
    cluster.sync();
  } else {
    if (lane == 0) slots[warp] = value;
    __syncthreads();
  }
  Sums<A> all{A(0), A(0)};
#pragma unroll 1
  for (int i = lane; i < blocks * warps; i += 32) all = all + slots[i];
  return lanes_merge(all, 32);
}

// ---- words --------------------------------------------------------------------------------------------------------------

// Of elements V of type T, from global to shared memory, without passing through registers.
template <typename T, int V>
__device__ __forceinline__ void copy_word(Vec<T, V>* shared, const T* global) {
  static_assert(sizeof(Vec<T, V>) % kVectorBytes == 0);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(Vec<T, V>)); i += kVectorBytes)
    copy_async<kVectorBytes>(reinterpret_cast<char*>(shared) + i, reinterpret_cast<const char*>(global) + i);
}

// Whether a kernel has loops of its own for the usual activations. The choice for every word costs little, and is all that float64,
// results wider than x and single elements have.
template <typename In, typename Out, int V = kVector<In>>
constexpr bool kLoops = std::is_same_v<In, Out> && sizeof(In) < 8 && V > 1;

template <Act ACT, typename Out, typename A, int V>
__device__ __forceinline__ Vec<Out, V> activated(Act act, Vec<A, V> z) {
  with_act<ACT>(act, [&](auto chosen) {
    unroll<V>([&](int j) { z.v[j] = act_value<decltype(chosen)::value, sizeof(Out) == 2>(z.v[j]); });
  });
  return pack<Out>(z);
}

// The constants of one channel.
template <typename A>
struct Channel {
  A mean, rstd, scale, bias;  // z = (x - mean)·scale + bias, xhat = (x - mean)·rstd

  template <typename In>
  __device__ __forceinline__ Channel(A mean_, A rstd_, const Args<In>& a, int channel)
      : mean(mean_), rstd(rstd_), scale(rstd_ * a.weight.template load<In>(channel, 1.f)), bias(a.bias.template load<In>(channel, 0.f)) {}
  __device__ __forceinline__ A z(A x) const { return (x - mean) * scale + bias; }
};

// Puts `value` in the place of those elements of a word that lie outside its run of n.
template <typename T, int V>
__device__ __forceinline__ void replace_outside(Vec<T, V>& word, int e, int n, T value) {
  if constexpr (sizeof(T) == 2) {  // in pairs, so that the word stays in whole registers
    const unsigned pair = words_of(filled<T, 2>(value))[0];
    unroll<V / 2>([&](int i) {
      const unsigned mask = (inside(e, 2 * i, n) ? 0x0000ffffu : 0u) | (inside(e, 2 * i + 1, n) ? 0xffff0000u : 0u);
      words_of(word)[i] = (words_of(word)[i] & mask) | (pair & ~mask);
    });
  } else {
    unroll<V>([&](int j) { word.v[j] = inside(e, j, n) ? word.v[j] : value; });
  }
}

// What lies outside the run adds nothing to the backward's sums as x at the mean and dy 0.
template <typename In, typename Out, int V>
__device__ __forceinline__ void clear_outside(Vec<In, V>& x, Vec<Out, V>& dy, int e, int n, compute_t<In> mean) {
  if (all_inside<V>(e, n)) return;
  replace_outside(x, e, n, convert<In>(mean));
  replace_outside(dy, e, n, convert<Out>(0.f));
}

// Words of x and dy that a thread asks for together: K of them, `stride` elements apart, of which the first begins with element
// e of a run of n; 0 beyond the run.
template <typename In, typename Out, int V, int K>
struct Step {
  Vec<In, V> x[K];
  Vec<Out, V> dy[K];

  __device__ __forceinline__ Step(const In* x_, const Out* dy_, int e, int stride, int n) {
    unroll<K>([&](int k) {
      x[k] = filled<In, V>(convert<In>(0.f));
      dy[k] = filled<Out, V>(convert<Out>(0.f));
      if (e + k * stride >= n) return;
      x[k] = load_vec<In, V>(x_ + k * stride);
      dy[k] = load_vec<Out, V>(dy_ + k * stride);
    });
  }
};

// dz of a word
template <Act ACT, typename In, typename Out, int V>
__device__ __forceinline__ Vec<compute_t<In>, V> z_gradient(Act act, const Vec<In, V>& x, const Vec<Out, V>& dy,
                                                            const Channel<compute_t<In>>& c) {
  using A = compute_t<In>;
  const Vec<A, V> v = unpack<A>(x);
  Vec<A, V> dz = unpack<A>(dy);
  with_act<ACT>(act, [&](auto chosen) {
    unroll<V>([&](int j) { dz.v[j] = act_gradient<decltype(chosen)::value, sizeof(In) == 2>(dz.v[j], c.z(v.v[j])); });
  });
  return dz;
}

// What a word adds to the sums; dz_xhat still lacks the factor rstd.
template <typename In, int V>
__device__ __forceinline__ Sums<compute_t<In>> word_sums(const Vec<In, V>& x, const Vec<compute_t<In>, V>& dz,
                                                       const Channel<compute_t<In>>& c) {
  Vec<compute_t<In>, V> products = unpack<compute_t<In>>(x);
  unroll<V>([&](int j) { products.v[j] = dz.v[j] * (products.v[j] - c.mean); });
  return {tree_sum(dz), tree_sum(products)};
}

// dx = dz·scale - constant - (x - mean)·slope, the latter two from the group's sums of scale·dz and scale·dz·xhat.
template <typename A>
struct GroupGradient {
  A constant, slope;

  GroupGradient() = default;
  __device__ __forceinline__ GroupGradient(const Sums<A>& scaled, A rstd, A count)
      : constant(scaled.dz / count), slope(rstd * (scaled.dz_xhat / count)) {}
};

template <typename In, int V>
__device__ __forceinline__ Vec<In, V> input_gradient(const Vec<In, V>& x, const Vec<compute_t<In>, V>& dz, const Channel<compute_t<In>>& c,
                                                   const GroupGradient<compute_t<In>>& g) {
  using A = compute_t<In>;
  Vec<A, V> r = unpack<A>(x);
  unroll<V>([&](int j) { r.v[j] = dz.v[j] * c.scale - g.constant - (r.v[j] - c.mean) * g.slope; });
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
  int lanes, lane_bits;  // block: threads of a block that share a group, a power of two up to a warp, or all; lane_bits: up to a warp
  int held;              // words of shared memory for a group or a block's slice of it, or for a stage of a team's slice
  int each;              // block: words of a thread. team: words of a member
  int teams, members;
  BoardWord* board;  // the canonical NaN, the only one of the sums, is not kUnpublished
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
    const Channel<A> channel(mean, rstd, a, first_channel + c);
    unroll<V>([&](int j) { z.v[j] = channel.z(z.v[j]); });
  } else {
    unroll<V>([&](int j) {
      if (e + j >= edge && c + 1 < a.depth) ++c, edge += a.hw;
      z.v[j] = Channel<A>(mean, rstd, a, first_channel + c).z(z.v[j]);
    });
  }
  return activated<ACT, Out>(a.act, z);
}

template <typename In, typename Out>
__global__ void __launch_bounds__(wide_threads<In>(), 1) group_norm_forward_block(const HoldArgs<In> a) {
  using A = compute_t<In>;
  constexpr int V = kVector<In>;
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
  unroll<kPhases>([&](int p) {
    const int end = min(count, (p + 1) * phase);
    for (int w = p * phase + lane; w < end; w += a.lanes) copy_word<In, V>(held + w, x + w * V);
    commit_copies();
  });
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
  with_loop<kLoops<In, Out>>(a.act, [&](auto act) {
    for (int w = lane; w < count; w += a.lanes) {
      const int e = words.element(w);
      store_word(y + w * V, e, a.n, forward_word<decltype(act)::value, Out>(a, held[w], e, first_channel, m.mean, rstd));
    }
  });
}

// ---- backward: a group in the registers of a part of a warp, of a block or of a cluster ---------------------------------------
//
// It goes by channels, whose sums are dweight and dbias: an item is a part of a channel, and some lanes of a warp share it. Each
// thread holds up to K words of x as they came, and their dz in the compute type: the activation's gradient is computed once.

template <typename In>
struct ItemArgs : Args<In> {
  Divider by_groups, by_parts;
  int total;                // groups in all
  int n, hw;                // elements of a group and of a channel
  int lanes, lane_bits;     // threads that share a group: a power of two up to a warp; more: the block, or the cluster
  int item_lanes, item_bits;
  int items, parts;         // items of a group and of a channel
  Sums<compute_t<In>>* partial;  // [samples, parts, channels]. Null: neither dweight nor dbias is wanted
};

// Most words of a thread; float32 dy of 16-bit x, and float64, need twice the registers.
template <typename In, typename Out>
constexpr int item_words() { return sizeof(Out) > sizeof(In) || sizeof(In) == 8 ? 2 : 4; }

// Most threads of a block with K words each.
template <typename In>
constexpr int item_threads(int words) { return sizeof(In) == 8 ? 256 : words > 2 ? 768 : kWideThreads; }

template <typename In, typename Out, int K>
__global__ void __launch_bounds__(item_threads<In>(K), 1) group_norm_backward_items(const ItemArgs<In> a) {
  using A = compute_t<In>;
  constexpr int V = kVector<In>;
  __shared__ Sums<A> slots[kMaxWarps * kGroupCluster];

  const bool whole_block = a.lanes > 32;
  unsigned group;
  int thread;
  if (whole_block) {
    auto cluster = this_cluster();
    if (cluster.num_blocks() > 1) cluster.barrier_arrive();
    group = blockIdx.x / cluster.num_blocks();
    thread = static_cast<int>(cluster.block_rank() * blockDim.x + threadIdx.x);
  } else {
    group = blockIdx.x * (blockDim.x >> a.lane_bits) + (threadIdx.x >> a.lane_bits);
    thread = static_cast<int>(threadIdx.x) & (a.lanes - 1);
  }
  const int item = thread >> a.item_bits, sub = thread & (a.item_lanes - 1);
  const bool live = group < static_cast<unsigned>(a.total) && item < a.items;
  if (!live) group = 0;
  const int channel = live ? static_cast<int>(a.by_parts.quotient(item)) : 0, part = live ? item - channel * a.parts : 0;
  const Words<V> words(group, a.n);
  const int stride = a.item_lanes * V;  // between the words of a thread; a part has K·item_lanes of them
  const int begin = ((channel * a.hw + words.head) / V + sub) * V + part * K * stride;  // of its first word, from words.start
  const int e = live ? begin - words.head - channel * a.hw : a.hw;                       // that word's place in the channel
  const int64_t offset = words.start + begin;
  Step<In, Out, V, K> step(static_cast<const In*>(a.x) + offset, static_cast<const Out*>(a.dy) + offset, e, stride, a.hw);

  const int sample = static_cast<int>(a.by_groups.quotient(group));
  const int c = (static_cast<int>(group) - sample * a.groups) * a.depth + channel;
  const bool first = live && sub == 0;
  Sums<A>* const partial =
      first && a.partial != nullptr ? a.partial + ((static_cast<int64_t>(sample) * a.parts + part) * a.channels + c) : nullptr;
  const Channel<A> constants(a.stats[group], a.stats[a.total + group], a, c);
  unroll<K>([&](int k) { clear_outside(step.x[k], step.dy[k], e + k * stride, a.hw, constants.mean); });

  Vec<A, V> dz[K];
  Sums<A> sums{A(0), A(0)};
  with_act<Act::run_time>(a.act, [&](auto act) {  // no loop: the choice for every word would take as much code
    unroll<K>([&](int k) {
      dz[k] = z_gradient<decltype(act)::value>(a.act, step.x[k], step.dy[k], constants);
      sums = sums + word_sums(step.x[k], dz[k], constants);
    });
  });
  unroll<K>([&](int k) { forget(step.x[k]); });
  sums = lanes_merge(sums, a.item_lanes);
  sums.dz_xhat *= constants.rstd;
  Sums<A> total{A(0), A(0)};
  if (partial != nullptr) *partial = sums;
  if (first) total = {constants.scale * sums.dz, constants.scale * sums.dz_xhat};
  total = lanes_merge(total, whole_block ? 32 : a.lanes);
  if (whole_block) total = cluster_merge(total, slots);

  const GroupGradient<A> gradient(total, constants.rstd, A(a.n));
#pragma unroll
  for (int k = 0; k < K; ++k)
    store_word(static_cast<In*>(a.out) + offset + k * stride, e + k * stride, a.hw,
                 input_gradient(step.x[k], dz[k], constants, gradient));
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
  int next = 1, here = 0, previous = kTeamStages - 1;  // stages
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
      slice.finish(group(i - 1), previous, result);
    }
    previous = here, here = next;
    next = next + 1 == kTeamStages ? 0 : next + 1;
    __syncthreads();  // before `slots` and `result` are written again
  }
}

template <typename In, typename Out>
struct ForwardSlice {
  static constexpr int V = kVector<In>;
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
  __device__ BoardWord* slots(int64_t group) const { return a.board + group * a.members; }

  __device__ void request(int64_t group, int stage) const {
    const Words<V> words(group, a.n);
    const In* x = static_cast<const In*>(a.x) + words.start;
    for_words(words, [&](int w, int) { copy_word<In, V>(&at(stage, w), x + w * V); });
  }
  __device__ Total reduce(int64_t group, int stage) const {
    Total m;
    for_words(Words<V>(group, a.n), [&](int w, int e) { extend(m, at(stage, w), e, a.n); });
    return m;
  }
  __device__ void publish(int64_t group, const Total& m) const { Message<Partial>::publish({m.mean, m.m2}, slots(group) + member); }
  __device__ Total gather(int64_t group) const {
    const Words<V> words(group, a.n);
    Total all;
    for_published<Partial>(slots(group), a.members, [&](int m, const Partial& p) {
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
    with_loop<kLoops<In, Out>>(a.act, [&](auto act) {
      for_words(words, [&](int w, int e) {
        store_word(y + w * V, e, a.n, forward_word<decltype(act)::value, Out>(a, at(stage, w), e, first_channel, mean, rstd));
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

// ---- two passes ---------------------------------------------------------------------------------------------------------
//
// The first leaves the moments, or the backward's sums, of each part of each channel: [samples, parts, channels]. A kernel of a
// warp a group merges them. The last pass goes through the tensor backwards: what the first read last may still be in L2.

constexpr int kSplitThreads = 256;
// Words of a thread that a step of the backward's passes asks for together.
template <typename In, typename Out>
constexpr int step_words() { return sizeof(Out) > sizeof(In) ? 1 : 2; }

// Blocks of the backward's passes on an SM: what keeps enough bytes on their way.
template <typename In>
constexpr int step_blocks() { return sizeof(In) == 8 ? 1 : 3; }

template <typename In>
struct PassArgs : Args<In> {
  int64_t parts;                                // of a channel
  int64_t part_size;                            // words of a part, or pixels for channels last
  Moments<compute_t<In>>* moments;              // forward: [samples, parts, channels]
  Sums<compute_t<In>>* partial;                 // backward, likewise
  GroupGradient<compute_t<In>>* gradients;      // backward: [samples·groups]
  int across, down, tiles;                      // channels last: threads over words of channels and over pixels; blocks over channels
  Divider by_depth, by_parts, by_channels;

  __host__ __device__ int64_t total() const { return this->samples * this->groups; }
};

// The part of a channel that a block owns, of a contiguous tensor.
template <int V>
struct Part {
  int row, part;   // row: sample·channels + channel
  int64_t start;   // of the first word, in elements of the tensor
  int head, n;     // the run of n elements begins with element `head` of the first word
  int words;

  template <typename In>
  __device__ Part(const PassArgs<In>& a, unsigned block) {
    row = static_cast<int>(a.by_parts.quotient(block));
    part = static_cast<int>(block) - row * static_cast<int>(a.parts);
    start = row * a.pixels;
    const int shift = static_cast<int>(start & (V - 1));
    const int64_t first = part * a.part_size * V, left = a.pixels + shift - first;
    start += first - shift;
    head = part == 0 ? shift : 0;
    const int span = static_cast<int>(left < 0 ? 0 : left < a.part_size * V ? left : a.part_size * V);
    n = span - head;
    words = (span + V - 1) / V;
  }
  __device__ int element(int word) const { return word * V - head; }
  template <typename In>
  __device__ int64_t slot(const PassArgs<In>& a) const {
    const int sample = static_cast<int>(a.by_channels.quotient(row));
    return (sample * a.parts + part) * a.channels + (row - sample * a.channels);
  }
};

// The constants of the channel of a part.
template <typename In>
__device__ __forceinline__ Channel<compute_t<In>> channel_of(const PassArgs<In>& a, int row) {
  const int64_t group = a.by_depth.quotient(row);  // of the tensor: channels are groups · depth
  const int channel = row - static_cast<int>(a.by_channels.quotient(row)) * static_cast<int>(a.channels);
  return Channel<compute_t<In>>(a.stats[group], a.stats[a.total() + group], a, channel);
}

template <typename In>
__global__ void __launch_bounds__(kSplitThreads, pass_blocks<In>()) group_norm_split_moments(const PassArgs<In> a) {
  using A = compute_t<In>;
  constexpr int V = kVector<In>;
  __shared__ Moments<A> slots[kMaxWarps];
  const Part<V> part(a, blockIdx.x);
  const In* x = static_cast<const In*>(a.x) + part.start;
  Moments<A> m;
#pragma unroll 4
  for (int w = threadIdx.x; w < part.words; w += kSplitThreads) extend(m, load_vec<In, V>(x + w * V), part.element(w), part.n);
  m = group_merge(m, slots, kSplitThreads);
  if (threadIdx.x == 0) a.moments[part.slot(a)] = m;
}

template <typename In, typename Out>
__global__ void __launch_bounds__(kSplitThreads, pass_blocks<In>()) group_norm_split_forward(const PassArgs<In> a) {
  using A = compute_t<In>;
  constexpr int V = kVector<In>;
  const Part<V> part(a, gridDim.x - 1 - blockIdx.x);
  const Channel<A> c = channel_of(a, part.row);
  const In* x = static_cast<const In*>(a.x) + part.start;
  Out* y = static_cast<Out*>(a.out) + part.start;
  with_loop<kLoops<In, Out>>(a.act, [&](auto act) {
    for (int w = threadIdx.x; w < part.words; w += kSplitThreads) {
      Vec<A, V> z = unpack<A>(load_vec<In, V>(x + w * V));
      unroll<V>([&](int j) { z.v[j] = c.z(z.v[j]); });
      store_word(y + w * V, part.element(w), part.n, activated<decltype(act)::value, Out>(a.act, z));
    }
  });
}

template <typename In, typename Out>
__global__ void __launch_bounds__(kSplitThreads, step_blocks<In>()) group_norm_split_sums(const PassArgs<In> a) {
  using A = compute_t<In>;
  constexpr int V = kVector<In>, K = step_words<In, Out>(), kStride = kSplitThreads * V;
  __shared__ Sums<A> slots[kMaxWarps];
  const Part<V> part(a, blockIdx.x);
  const In* x = static_cast<const In*>(a.x) + part.start;
  const Out* dy = static_cast<const Out*>(a.dy) + part.start;
  int at = static_cast<int>(threadIdx.x) * V;  // elements from part.start
  Step<In, Out, V, K> next(x + at, dy + at, at - part.head, kStride, part.n);
  const Channel<A> c = channel_of(a, part.row);
  Sums<A> sums{A(0), A(0)};
  with_loop<kLoops<In, Out>>(a.act, [&](auto act) {
#pragma unroll 1
    for (; at - part.head < part.n; at += K * kStride) {
      Step<In, Out, V, K> now = next;
      next = Step<In, Out, V, K>(x + at + K * kStride, dy + at + K * kStride, at + K * kStride - part.head, kStride, part.n);
      unroll<K>([&](int k) {
        clear_outside(now.x[k], now.dy[k], at + k * kStride - part.head, part.n, c.mean);
        sums = sums + word_sums(now.x[k], z_gradient<decltype(act)::value>(a.act, now.x[k], now.dy[k], c), c);
      });
    }
  });
  sums = group_merge(sums, slots, kSplitThreads);
  if (threadIdx.x == 0) a.partial[part.slot(a)] = {sums.dz, sums.dz_xhat * c.rstd};
}

template <typename In, typename Out>
__global__ void __launch_bounds__(kSplitThreads, step_blocks<In>()) group_norm_split_backward(const PassArgs<In> a) {
  using A = compute_t<In>;
  constexpr int V = kVector<In>, K = step_words<In, Out>(), kStride = kSplitThreads * V;
  const Part<V> part(a, gridDim.x - 1 - blockIdx.x);
  const In* x = static_cast<const In*>(a.x) + part.start;
  const Out* dy = static_cast<const Out*>(a.dy) + part.start;
  In* dx = static_cast<In*>(a.out) + part.start;
  int at = static_cast<int>(threadIdx.x) * V;  // elements from part.start
  Step<In, Out, V, K> next(x + at, dy + at, at - part.head, kStride, part.n);
  const Channel<A> c = channel_of(a, part.row);
  const GroupGradient<A> gradient = a.gradients[a.by_depth.quotient(part.row)];
  with_loop<kLoops<In, Out>>(a.act, [&](auto act) {
#pragma unroll 1
    for (; at - part.head < part.n; at += K * kStride) {
      const Step<In, Out, V, K> now = next;
      next = Step<In, Out, V, K>(x + at + K * kStride, dy + at + K * kStride, at + K * kStride - part.head, kStride, part.n);
#pragma unroll
      for (int k = 0; k < K; ++k)
        store_word(dx + at + k * kStride, at + k * kStride - part.head, part.n,
                     input_gradient(now.x[k], z_gradient<decltype(act)::value>(a.act, now.x[k], now.dy[k], c), c, gradient));
    }
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
  ChannelValues dweight, dbias;
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
    const A rstd = a.stats[a.total() + group];
    Sums<A> total{A(0), A(0)};
    const int count = static_cast<int>(a.parts * a.depth);
#pragma unroll 4
    for (int i = threadIdx.x & 31; i < count; i += 32) {
      const int part = static_cast<int>(a.by_depth.quotient(i)), channel = i - part * a.depth;
      const Sums<A> s = partial[part * a.channels + channel];
      const A scale = rstd * a.weight.template load<In>(first + channel, 1.f);
      total = total + Sums<A>{scale * s.dz, scale * s.dz_xhat};
    }
    total = lanes_merge(total, 32);
    if ((threadIdx.x & 31) == 0)
      a.gradients[group] = GroupGradient<A>(total, rstd, static_cast<A>(a.depth) * static_cast<A>(a.pixels));
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
  m.dweight.template store<In>(channel, sums.dz_xhat);
  m.dbias.template store<In>(channel, sums.dz);
}

// ---- channels last ------------------------------------------------------------------------------------------------------

constexpr int kPixelThreads = 256;

// A thread's V channels and the pixels that it walks over.
template <int V>
struct Column : ColumnPlace<V> {
  int64_t sample, part, first, last;  // pixels of the block
  int64_t offset;                     // of the channels at pixel 0 of the sample
  int base;                           // the block's first channel
  bool active;

  template <typename In>
  __device__ Column(const PassArgs<In>& a, unsigned block) : ColumnPlace<V>(a.across, block % a.tiles) {
    const int64_t chunk = block / a.tiles;
    sample = chunk / a.parts;
    part = chunk - sample * a.parts;
    base = static_cast<int>(block % a.tiles) * a.across * V;
    active = this->column < a.channels;
    first = part * a.part_size;
    last = first + a.part_size < a.pixels ? first + a.part_size : a.pixels;
    offset = sample * a.pixels * a.channels + this->column;
  }
  __device__ int channel(int j) const { return static_cast<int>(this->column) + j; }
  template <typename In>
  __device__ int64_t slot(const PassArgs<In>& a) const { return (sample * a.parts + part) * a.channels + this->column; }
};

template <typename In, int V>
__global__ void __launch_bounds__(kPixelThreads) group_norm_pixels_moments(const PassArgs<In> a) {
  using A = compute_t<In>;
  extern __shared__ __align__(16) char memory[];
  const Column<V> column(a, blockIdx.x);
  const In* x = static_cast<const In*>(a.x) + column.offset;
  ChannelMoments<A, V> m;
  if (column.active) {
#pragma unroll 4
    for (int64_t p = column.first + column.y; p < column.last; p += a.down) {
      const Vec<A, V> v = unpack<A>(load_vec<In, V>(x + p * a.channels));
      m.v[0] += A(1);
      const A share = A(1) / m.v[0];
      unroll<V>([&](int j) {
        const A delta = v.v[j] - m.v[1 + j];
        m.v[1 + j] += delta * share;
        m.v[1 + V + j] += delta * (v.v[j] - m.v[1 + j]);
      });
    }
  }
  merge_down<false>(m, reinterpret_cast<A*>(memory), column.x, column.y, a.across, a.down);
  if (!column.active || column.y != 0) return;
  Moments<A>* out = a.moments + column.slot(a);
  unroll<V>([&](int j) { out[j] = {m.v[0], m.v[1 + j], m.v[1 + V + j]}; });
}

template <typename In, typename Out, int V>
__global__ void __launch_bounds__(kPixelThreads, pass_blocks<In>()) group_norm_pixels_forward(const PassArgs<In> a) {
  using A = compute_t<In>;
  const Column<V> column(a, gridDim.x - 1 - blockIdx.x);
  if (!column.active) return;
  const In* x = static_cast<const In*>(a.x) + column.offset;
  Out* y = static_cast<Out*>(a.out) + column.offset;
  A mean[V], scale[V], bias[V];
  unroll<V>([&](int j) {
    const int64_t group = column.sample * a.groups + a.by_depth.quotient(column.channel(j));
    const Channel<A> c(a.stats[group], a.stats[a.total() + group], a, column.channel(j));
    mean[j] = c.mean, scale[j] = c.scale, bias[j] = c.bias;
  });
  with_loop<kLoops<In, Out, V>>(a.act, [&](auto act) {
#pragma unroll 2
    for (int64_t p = column.first + column.y; p < column.last; p += a.down) {
      Vec<A, V> z = unpack<A>(load_vec<In, V>(x + p * a.channels));
      unroll<V>([&](int j) { z.v[j] = (z.v[j] - mean[j]) * scale[j] + bias[j]; });
      store_vec<Out, V>(y + p * a.channels, activated<decltype(act)::value, Out>(a.act, z));
    }
  });
}

// A few neighbouring channels of a thread of the backward: it treats those of all its pixels together.
template <int V>
constexpr int kPiece = V > 1 ? 2 : 1;

template <typename T, int V>
__device__ __forceinline__ Vec<T, kPiece<V>> piece(const Vec<T, V>& v, int q) {
  Vec<T, kPiece<V>> r;
  if constexpr (sizeof(r) == 4 && kPiece<V> == 2) {
    words_of(r)[0] = words_of(v)[q];
  } else {
    unroll<kPiece<V>>([&](int i) { r.v[i] = v.v[q * kPiece<V> + i]; });
  }
  return r;
}

template <typename T, int V>
__device__ __forceinline__ void set_piece(Vec<T, V>& v, int q, const Vec<T, kPiece<V>>& r) {
  if constexpr (sizeof(r) == 4 && kPiece<V> == 2) {
    words_of(v)[q] = words_of(r)[0];
  } else {
    unroll<kPiece<V>>([&](int i) { v.v[q * kPiece<V> + i] = r.v[i]; });
  }
}

// The constants of a block's channels, COUNT each, in shared memory. A thread reads those of a piece when it treats the piece: in
// registers, those of all its channels would leave no room for words on their way. Neighbouring threads read neighbouring pieces.
template <typename A, int V, int COUNT>
struct ChannelTable {
  static constexpr int P = kPiece<V>;
  A* data;
  int across;

  // Of the channels from `base` on, f(channel, values).
  template <typename F>
  __device__ __forceinline__ void fill(int base, int64_t channels, F&& f) const {
    for (int i = threadIdx.x; i < across * V && base + i < channels; i += blockDim.x) {
      A values[COUNT];
      f(base + i, values);
      unroll<COUNT>([&](int c) { data[((c * (V / P) + i % V / P) * across + i / V) * P + i % P] = values[c]; });
    }
    __syncthreads();
  }
  __device__ __forceinline__ Vec<A, P> load(int c, int q, int x) const {
    return reinterpret_cast<const Vec<A, P>*>(data)[(c * (V / P) + q) * across + x];
  }
};

// A thread's words of the next pixels; beyond the last a repetition of the first, with dy 0.
template <typename In, typename Out, int V, int K>
struct Pixels {
  Vec<In, V> x[K];
  Vec<Out, V> dy[K];

  __device__ __forceinline__ Pixels(const In* x_, const Out* dy_, int64_t stride, int64_t left, int down) {
    unroll<K>([&](int k) {
      const bool there = k == 0 || k * down < left;
      x[k] = load_vec<In, V>(x_ + (there ? k * stride : 0));
      dy[k] = filled<Out, V>(convert<Out>(0.f));
      if (there) dy[k] = load_vec<Out, V>(dy_ + k * stride);
    });
  }
};

// Of piece q of all words: d = x - mean, and dz.
template <Act ACT, typename In, typename Out, int V, int K, typename A, int P>
__device__ __forceinline__ void piece_gradients(Act act, const Pixels<In, Out, V, K>& pixels, int q, const Vec<A, P>& mean,
                                                const Vec<A, P>& scale, const Vec<A, P>& bias, Vec<A, P> (&d)[K], Vec<A, P> (&dz)[K]) {
  unroll<K>([&](int k) {
    d[k] = unpack<A>(piece(pixels.x[k], q)), dz[k] = unpack<A>(piece(pixels.dy[k], q));
    unroll<P>([&](int i) { d[k].v[i] -= mean.v[i]; });
  });
  with_act<ACT>(act, [&](auto chosen) {
    unroll<K * P>([&](int n) {
      const int k = n / P, i = n % P;
      dz[k].v[i] = act_gradient<decltype(chosen)::value, sizeof(In) == 2>(dz[k].v[i], d[k].v[i] * scale.v[i] + bias.v[i]);
    });
  });
}

template <typename In, typename Out, int V>
__global__ void __launch_bounds__(kPixelThreads, step_blocks<In>()) group_norm_pixels_sums(const PassArgs<In> a) {
  using A = compute_t<In>;
  constexpr int P = kPiece<V>, K = step_words<In, Out>();
  extern __shared__ __align__(16) char memory[];
  const Column<V> column(a, blockIdx.x);
  const ChannelTable<A, V, 4> table{reinterpret_cast<A*>(memory), a.across};
  table.fill(column.base, a.channels, [&](int channel, A* values) {
    const int64_t group = column.sample * a.groups + a.by_depth.quotient(channel);
    const Channel<A> c(a.stats[group], a.stats[a.total() + group], a, channel);
    values[0] = c.mean, values[1] = c.scale, values[2] = c.bias, values[3] = c.rstd;
  });
  ChannelSums<A, V> sums;
  if (column.active) {
    const int64_t stride = a.down * a.channels;
    const In* x = static_cast<const In*>(a.x) + column.offset + (column.first + column.y) * a.channels;
    const Out* dy = static_cast<const Out*>(a.dy) + column.offset + (column.first + column.y) * a.channels;
    with_loop<kLoops<In, Out, V>>(a.act, [&](auto act) {
#pragma unroll 1
      for (int64_t left = column.last - column.first - column.y; left > 0; left -= K * a.down) {
        const Pixels<In, Out, V, K> pixels(x, dy, stride, left, a.down);
        x += K * stride, dy += K * stride;
        unroll<V / P>([&](int q) {
          const Vec<A, P> mean = table.load(0, q, column.x), scale = table.load(1, q, column.x);
          const Vec<A, P> bias = table.load(2, q, column.x);
          Vec<A, P> d[K], dz[K];
          piece_gradients<decltype(act)::value>(a.act, pixels, q, mean, scale, bias, d, dz);
          unroll<K>([&](int k) {
            unroll<P>([&](int i) {
              sums.v[q * P + i] += dz[k].v[i];
              sums.v[V + q * P + i] += dz[k].v[i] * d[k].v[i];
            });
          });
        });
      }
    });
    unroll<V>([&](int j) { sums.v[V + j] *= table.load(3, j / P, column.x).v[j % P]; });
  }
  __syncthreads();  // before the table is written over
  merge_down<false>(sums, reinterpret_cast<A*>(memory), column.x, column.y, a.across, a.down);
  if (!column.active || column.y != 0) return;
  Sums<A>* out = a.partial + column.slot(a);
  unroll<V>([&](int j) { out[j] = {sums.v[j], sums.v[V + j]}; });
}

template <typename In, typename Out, int V>
__global__ void __launch_bounds__(kPixelThreads, step_blocks<In>()) group_norm_pixels_backward(const PassArgs<In> a) {
  using A = compute_t<In>;
  constexpr int P = kPiece<V>, K = step_words<In, Out>();
  extern __shared__ __align__(16) char memory[];
  const Column<V> column(a, gridDim.x - 1 - blockIdx.x);
  const ChannelTable<A, V, 5> table{reinterpret_cast<A*>(memory), a.across};
  table.fill(column.base, a.channels, [&](int channel, A* values) {
    const int64_t group = column.sample * a.groups + a.by_depth.quotient(channel);
    const Channel<A> c(a.stats[group], a.stats[a.total() + group], a, channel);
    const GroupGradient<A> g = a.gradients[group];
    values[0] = c.mean, values[1] = c.scale, values[2] = c.bias, values[3] = g.constant, values[4] = g.slope;
  });
  if (!column.active) return;
  const int64_t stride = a.down * a.channels, offset = column.offset + (column.first + column.y) * a.channels;
  const In* x = static_cast<const In*>(a.x) + offset;
  const Out* dy = static_cast<const Out*>(a.dy) + offset;
  In* dx = static_cast<In*>(a.out) + offset;
  with_loop<kLoops<In, Out, V>>(a.act, [&](auto act) {
#pragma unroll 1
    for (int64_t left = column.last - column.first - column.y; left > 0; left -= K * a.down) {
      Pixels<In, Out, V, K> pixels(x, dy, stride, left, a.down);
      unroll<V / P>([&](int q) {
        const Vec<A, P> mean = table.load(0, q, column.x), scale = table.load(1, q, column.x), bias = table.load(2, q, column.x);
        const Vec<A, P> constant = table.load(3, q, column.x), slope = table.load(4, q, column.x);
        Vec<A, P> d[K], dz[K];
        piece_gradients<decltype(act)::value>(a.act, pixels, q, mean, scale, bias, d, dz);
        unroll<K>([&](int k) {
          unroll<P>([&](int i) { dz[k].v[i] = dz[k].v[i] * scale.v[i] - constant.v[i] - d[k].v[i] * slope.v[i]; });
          set_piece(pixels.x[k], q, pack<In>(dz[k]));
        });
      });
      unroll<K>([&](int k) { if (k == 0 || k * a.down < left) store_vec<In, V>(dx + k * stride, pixels.x[k]); });
      x += K * stride, dy += K * stride, dx += K * stride;
    }
  });
}

// ---- launch rules -------------------------------------------------------------------------------------------------------

// The backward that holds groups in registers: up to kItemWarps warps have a group in a block of their own, more share it in
// blocks of kClusterWarps. On an H100, of 5b: (8,320,64,64), 40 warps, .84 in blocks of 10, .83 of 5, .79 of 20; (8,640,32,32), 20
// warps, .79 in one block, .75 in blocks of 10, .68 of 5.
constexpr int64_t kItemWarps = 20, kClusterWarps = 10;
// Most words of a thread of the backward's passes over channels, (4,128,512,512): .99 with 8, .96 with 4, .98 with 16.
constexpr int64_t kSplitWords = 8;
// Blocks an SM of the backward's passes: those that are resident at once. Channels last (8,320,64,64): .64, with 6 .59.
constexpr int64_t kBackwardBlocks = 3;
constexpr int64_t kForwardBlocks = 4;    // an SM, of the forward's passes over pixels and channels
constexpr int kStaticShared = 4096;      // what the block kernel has besides, and what a block costs
constexpr int kTeamStaticShared = 1024;  // likewise of the team kernel

// Most bytes of dynamic shared memory of a block.
int64_t most_shared(const Launch& launch) { return device_traits(launch.device()).block_shared - kStaticShared; }

constexpr int64_t kThreadWords = 8;  // of a group for each thread of its blocks, where there is work for the whole GPU

// Threads of a block that holds a group or a slice of one: kThreadWords each, but fewer words where that leaves the GPU empty.
int group_threads(int64_t words, int64_t groups, int64_t bytes, int wide, const Launch& launch) {
  const int64_t room = static_cast<int64_t>(device_traits(launch.device()).processors) * kWideThreads;
  const int64_t each = std::clamp<int64_t>(words * groups / room, 1, kThreadWords);
  const int64_t most = 2 * (bytes + kStaticShared) > device_traits(launch.device()).processor_shared ? wide : std::min(wide, kBlockThreads);
  int64_t threads = ceil_div(words, each);
  threads = threads <= 32 ? next_power_of_2(threads) : ceil_div(threads, 32) * 32;
  return static_cast<int>(std::min(threads, most));
}

// Launches the block kernel; false where a block cannot hold a group.
template <typename In, typename Out>
bool launch_block(HoldArgs<In>& a, int64_t words, const Launch& launch) {
  const int64_t bytes = words * kVectorBytes;
  if (bytes > most_shared(launch)) return false;
  a.lanes = group_threads(words, a.total, bytes, wide_threads<In>(), launch);
  a.lane_bits = log2_of(std::min(a.lanes, 32));
  a.held = static_cast<int>(words);
  a.each = static_cast<int>(ceil_div(words, a.lanes));
  // Short groups, of at most 256 words: several to a block.
  const int threads = a.lanes <= 32 ? kShortThreads : a.lanes;
  const int per_block = threads / a.lanes;
  constexpr auto kernel = group_norm_forward_block<In, Out>;
  allow_shared_memory<kernel>(most_shared(launch), launch);
  launch_kernel(kernel, {ceil_div(a.total, per_block), threads, static_cast<size_t>(per_block * bytes)}, launch, a);
  return true;
}

// Launches the team kernel; false where the blocks that fit the GPU at once cannot hold a group.
template <typename In, typename Out>
bool launch_team(HoldArgs<In>& a, int64_t words, const Launch& launch, const Tensor& like) {
  constexpr auto kernel = group_norm_forward_team<In, Out>;
  const int64_t share = device_traits(launch.device()).processor_shared / kTeamBlocks - 2 * kTeamStaticShared;
  const int64_t stage_words = std::min(share, most_shared(launch)) / kTeamStages / kVectorBytes;
  allow_shared_memory<kernel>(most_shared(launch), launch);
  const int64_t blocks = resident_blocks<kernel>(launch, kTeamThreads, kTeamStages * stage_words * kVectorBytes);
  a.teams = static_cast<int>(std::min<int64_t>(blocks / ceil_div(words, stage_words), a.total));
  if (a.teams <= 0) return false;
  a.each = static_cast<int>(ceil_div(words, blocks / a.teams));
  a.members = static_cast<int>(ceil_div(words, a.each));
  a.held = a.each;
  const Tensor board = empty_board(a.total * a.members, like, launch);
  a.board = pointer<BoardWord>(board);
  const size_t shared = static_cast<size_t>(kTeamStages) * a.held * kVectorBytes;
  launch_kernel(kernel, {a.teams * a.members, kTeamThreads, shared, 1, true}, launch, a);
  return true;
}

// ---- host ---------------------------------------------------------------------------------------------------------------

template <typename In>
Args<In> make_args(const ChannelLayout& x, const MaybeTensor& weight, const MaybeTensor& bias, int64_t groups, int64_t act,
                   const char* op) {
  FASTLAYERS_CHECK(groups > 0 && x.channels % groups == 0 && x.channels <= INT32_MAX, op, "expected channels (", x.channels,
                   ") divisible by groups (", groups, ")");
  FASTLAYERS_CHECK(!weight || !bias || weight->scalar_type() == bias->scalar_type(), op, "expected weight and bias of one dtype");
  Args<In> a{};
  a.x = pointer<const void>(x.x);
  a.weight = x.values(weight, op, "weight"), a.bias = x.values(bias, op, "bias");
  a.samples = x.images, a.channels = x.channels, a.pixels = x.plane;
  a.groups = static_cast<int>(groups), a.depth = static_cast<int>(x.channels / groups);
  a.act = act_of(act, op);
  return a;
}

MaybeTensor contiguous(const MaybeTensor& t) { return t && !t->is_contiguous() ? MaybeTensor(torch::stable::contiguous(*t)) : t; }

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

// The two passes over a contiguous tensor: its channels are cut where there are too few of them to fill the GPU, or into parts
// that blocks of even size can share, of `most` words a thread.
template <typename In>
PassArgs<In> split_pass(const Args<In>& args, int64_t blocks, int64_t most) {
  constexpr int64_t kLeast = 4;
  constexpr int V = kVector<In>;
  PassArgs<In> a{};
  static_cast<Args<In>&>(a) = args;
  const int64_t words = ceil_div(args.pixels, V) + (args.pixels % V != 0);
  a.part_size = std::clamp(words * args.samples * args.channels / blocks, kLeast * kSplitThreads, most * kSplitThreads);
  a.parts = ceil_div(words, a.part_size);
  a.by_depth = Divider(static_cast<uint32_t>(args.depth)), a.by_parts = Divider(static_cast<uint32_t>(a.parts));
  a.by_channels = Divider(static_cast<uint32_t>(args.channels));
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

template <typename In>
void merge_parts(const PassArgs<In>& a, const Launch& launch) {
  launch_kernel(group_norm_merge_moments<In>, {ceil_div(a.total() * 32, kMergeThreads), kMergeThreads}, launch, a);
}

template <typename In, typename Out, int V>
void forward_pixels(const PassArgs<In>& a, int64_t blocks, const Launch& launch) {
  using A = compute_t<In>;
  const int threads = a.across * a.down;
  const size_t shared = static_cast<size_t>(threads / 2) * ChannelMoments<A, V>::kSize * sizeof(A);
  launch_kernel(group_norm_pixels_moments<In, V>, {blocks, threads, shared}, launch, a);
  merge_parts(a, launch);
  launch_kernel(group_norm_pixels_forward<In, Out, V>, {blocks, threads}, launch, a);
}

template <typename In, typename Out>
void forward_passes(const Args<In>& args, bool channels_last, const Launch& launch, const Tensor& like) {
  using A = compute_t<In>;
  constexpr int V = kVector<In>;
  const int vector = args.channels % V == 0 ? V : 1;
  const int64_t wanted = kForwardBlocks * device_traits(launch.device()).processors;
  PassArgs<In> a = channels_last ? pixel_pass(args, wanted, vector) : split_pass(args, wanted, 16);
  const Tensor moments = empty_contiguous({a.samples * a.parts * a.channels * 3}, compute_dtype(like), like);
  a.moments = reinterpret_cast<Moments<A>*>(pointer<A>(moments));
  const int64_t blocks = blocks_of_pass(a, channels_last);
  if (channels_last) {
    if (vector > 1) forward_pixels<In, Out, V>(a, blocks, launch);
    else forward_pixels<In, Out, 1>(a, blocks, launch);
    return;
  }
  launch_kernel(group_norm_split_moments<In>, {blocks, kSplitThreads}, launch, a);
  merge_parts(a, launch);
  launch_kernel(group_norm_split_forward<In, Out>, {blocks, kSplitThreads}, launch, a);
}

std::tuple<Tensor, Tensor> group_norm_forward(const Tensor& x_in, int64_t groups, const MaybeTensor& weight_in, const MaybeTensor& bias_in,
                                              double eps, int64_t act, ScalarType dtype, bool keep) {
  const char* op = "group_norm_forward";
  const Launch launch(x_in);
  const ChannelLayout x(x_in, op);
  const MaybeTensor weight = contiguous(weight_in), bias = contiguous(bias_in);
  Tensor y = x.empty(dtype), stats = empty_stats(keep, x.images * groups, x.x);
  dispatch_pair(x.x.scalar_type(), dtype, op, [&](auto in, auto out) {
    using In = decltype(in);
    using Out = decltype(out);
    using A = compute_t<In>;
    Args<In> args = make_args<In>(x, weight, bias, groups, act, op);
    const int64_t total = args.samples * groups, n = args.depth * args.pixels;
    args.stats = keep ? pointer<A>(stats) : nullptr;
    if (total * n == 0) {
      if (keep && total > 0) torch::stable::zero_(stats);
      return;
    }
    args.out = pointer<void>(y);
    args.eps = static_cast<A>(eps);
    if (!x.channels_last && n <= kMostHeld) {
      HoldArgs<In> a = make_hold(args);
      const int64_t words = words_covered(n, n % kVector<In> != 0, kVector<In>);
      if (launch_block<In, Out>(a, words, launch)) return;
      if constexpr (!std::is_same_v<In, double>) {
        if (launch_team<In, Out>(a, words, launch, x.x)) return;
      }
    }
    // The passes hand the statistics over in memory.
    const Tensor handed = keep ? stats : empty_stats(true, total, x.x);
    args.stats = pointer<A>(handed);
    forward_passes<In, Out>(args, x.channels_together(), launch, x.x);
  });
  return {y, stats};
}

// What the backward's kernels leave to be added up: the sums of each part of each channel, and what of them is wanted.
template <typename In>
struct Gradients {
  using A = compute_t<In>;
  const ChannelLayout& x;
  Tensor dweight, dbias, memory;
  Sums<A>* partial = nullptr;
  int64_t rows = 0;
  bool wanted;

  Gradients(const ChannelLayout& x_, const MaybeTensor& weight, const MaybeTensor& bias)
      : x(x_), dweight(empty(weight ? weight : bias)), dbias(empty(bias ? bias : weight)), wanted(weight || bias) {}
  Tensor empty(const MaybeTensor& t) const {
    return empty_contiguous({t ? x.channels : 0}, t ? t->scalar_type() : x.x.scalar_type(), x.x);
  }
  void make_partial(int64_t rows_) {
    rows = rows_;
    memory = empty_contiguous({rows * x.channels * 2}, compute_dtype(x.x), x.x);
    partial = reinterpret_cast<Sums<A>*>(pointer<A>(memory));
  }
  // Adds them up; for the passes, `groups` too.
  void merge(const PassArgs<In>& a, bool groups, const Launch& launch) const {
    const char* op = "group_norm_backward";
    MergeArgs<A> m{partial, rows, a.channels, {}, {}, 0};
    if (wanted) m.dweight = x.values(dweight, op, "weight"), m.dbias = x.values(dbias, op, "bias");
    if (groups) m.group_blocks = static_cast<int>(grid_of(ceil_div(a.total() * 32, kMergeThreads)));
    const int64_t blocks = m.group_blocks + (wanted ? ceil_div(a.channels, kMergeAcross) : 0);
    launch_kernel(group_norm_merge_sums<In>, {blocks, kMergeThreads}, launch, m, a);
  }
};

// The backward of groups in registers; false where they are too large for that.
template <typename In, typename Out>
bool backward_held(const Args<In>& args, Gradients<In>& gradients, const Launch& launch) {
  constexpr int V = kVector<In>;
  const DeviceTraits& device = device_traits(launch.device());
  const int64_t total = args.samples * args.groups, n = args.depth * args.pixels;
  if (total > INT32_MAX || n > kMostHeld) return false;
  const int64_t channel_words = words_covered(args.pixels, args.pixels % V != 0, V);
  const auto parts = [&](int words) { return ceil_div(channel_words, 32 * words); };
  const auto item_lanes = [&](int words) { return std::min<int64_t>(32, next_power_of_2(ceil_div(channel_words, words))); };
  const auto group_threads = [&](int words) { return args.depth * parts(words) * item_lanes(words); };
  // Few words a thread where there is not enough work for the whole GPU.
  constexpr int kMost = item_words<In, Out>();
  const bool few = group_threads(2) * total <= static_cast<int64_t>(device.processors) * kWideThreads;
  const int words = few ? 2 : kMost;
  const int64_t threads = group_threads(words);
  int cluster = 1;
  int64_t block = kShortThreads;
  if (threads > 32) {
    const int64_t warps = ceil_div(threads, 32);
    if (device.capability >= 90)
      cluster = warps <= kItemWarps ? 1 : static_cast<int>(std::min<int64_t>(kGroupCluster, next_power_of_2(ceil_div(warps, kClusterWarps))));
    block = ceil_div(warps, cluster) * 32;
    if (block > item_threads<In>(words)) return false;
  }
  ItemArgs<In> a{};
  static_cast<Args<In>&>(a) = args;
  a.total = static_cast<int>(total), a.n = static_cast<int>(n), a.hw = static_cast<int>(args.pixels);
  a.lanes = static_cast<int>(threads > 32 ? block * cluster : next_power_of_2(threads));
  a.lane_bits = log2_of(std::min(a.lanes, 32));
  a.item_lanes = static_cast<int>(item_lanes(words)), a.item_bits = log2_of(a.item_lanes);
  a.parts = static_cast<int>(parts(words)), a.items = a.depth * a.parts;
  a.by_groups = Divider(static_cast<uint32_t>(args.groups)), a.by_parts = Divider(static_cast<uint32_t>(a.parts));
  if (gradients.wanted) gradients.make_partial(args.samples * a.parts);
  a.partial = gradients.partial;
  const LaunchShape shape{threads > 32 ? total * cluster : ceil_div(total, block / a.lanes), static_cast<int>(block), 0, cluster};
  launch_kernel(few ? group_norm_backward_items<In, Out, 2> : group_norm_backward_items<In, Out, kMost>, shape, launch, a);
  PassArgs<In> merged{};
  static_cast<Args<In>&>(merged) = args;
  if (gradients.wanted) gradients.merge(merged, false, launch);
  return true;
}

template <typename In, typename Out, int V>
void backward_pixels(const PassArgs<In>& a, Gradients<In>& gradients, int64_t blocks, const Launch& launch) {
  using A = compute_t<In>;
  const int threads = a.across * a.down;
  // The table of constants, and the sums that are merged after it has been read.
  const size_t constants = static_cast<size_t>(a.across) * V * sizeof(A);
  const size_t shared = std::max(4 * constants, static_cast<size_t>(threads / 2) * ChannelSums<A, V>::kSize * sizeof(A));
  launch_kernel(group_norm_pixels_sums<In, Out, V>, {blocks, threads, shared}, launch, a);
  gradients.merge(a, true, launch);
  launch_kernel(group_norm_pixels_backward<In, Out, V>, {blocks, threads, 5 * constants}, launch, a);
}

template <typename In, typename Out>
void backward_passes(const Args<In>& args, bool channels_last, Gradients<In>& gradients, const Launch& launch, const Tensor& like) {
  using A = compute_t<In>;
  constexpr int V = kVector<In>;
  const int vector = args.channels % V == 0 ? V : 1;
  const int64_t wanted = kBackwardBlocks * device_traits(launch.device()).processors;
  PassArgs<In> a = channels_last ? pixel_pass(args, wanted, vector) : split_pass(args, wanted, kSplitWords);
  const Tensor of_groups = empty_contiguous({a.total() * 2}, compute_dtype(like), like);
  a.gradients = reinterpret_cast<GroupGradient<A>*>(pointer<A>(of_groups));
  gradients.make_partial(a.samples * a.parts);
  a.partial = gradients.partial;
  const int64_t blocks = blocks_of_pass(a, channels_last);
  if (channels_last) {
    if (vector > 1) backward_pixels<In, Out, V>(a, gradients, blocks, launch);
    else backward_pixels<In, Out, 1>(a, gradients, blocks, launch);
    return;
  }
  launch_kernel(group_norm_split_sums<In, Out>, {blocks, kSplitThreads}, launch, a);
  gradients.merge(a, true, launch);
  launch_kernel(group_norm_split_backward<In, Out>, {blocks, kSplitThreads}, launch, a);
}

std::tuple<Tensor, Tensor, Tensor> group_norm_backward(const Tensor& dy_in, const Tensor& x_in, int64_t groups,
                                                       const MaybeTensor& weight_in, const MaybeTensor& bias_in, const Tensor& stats,
                                                       int64_t act) {
  const char* op = "group_norm_backward";
  const Launch launch(x_in);
  const ChannelLayout x(x_in, op);
  const Tensor dy = x.bring(dy_in, op, "dy");
  const MaybeTensor weight = contiguous(weight_in), bias = contiguous(bias_in);
  Tensor dx = x.empty(x.x.scalar_type());
  MaybeTensor dweight, dbias;
  dispatch_pair(x.x.scalar_type(), dy.scalar_type(), op, [&](auto in, auto out) {
    using In = decltype(in);
    using Out = decltype(out);
    Args<In> args = make_args<In>(x, weight, bias, groups, act, op);
    const int64_t total = args.samples * groups;
    FASTLAYERS_CHECK(stats.scalar_type() == compute_dtype(x.x) && stats.numel() == 2 * total && stats.is_contiguous(), op,
                     "expected stats of ", 2 * total, " elements, as group_norm_forward keeps them");
    Gradients<In> gradients(x, weight, bias);
    dweight = gradients.dweight, dbias = gradients.dbias;
    if (total * args.depth * args.pixels == 0) {
      torch::stable::zero_(*dweight), torch::stable::zero_(*dbias);
      return;
    }
    args.dy = pointer<const void>(dy);
    args.out = pointer<void>(dx);
    args.stats = const_cast<compute_t<In>*>(pointer<const compute_t<In>>(stats));
    if (!x.channels_last && backward_held<In, Out>(args, gradients, launch)) return;
    backward_passes<In, Out>(args, x.channels_together(), gradients, launch, x.x);
  });
  return {dx, *dweight, *dbias};
}

}  // namespace
}  // namespace fastlayers

STABLE_TORCH_LIBRARY_IMPL(fastlayers, CUDA, m) {
  m.impl("group_norm_forward", TORCH_BOX(&fastlayers::group_norm_forward));
  m.impl("group_norm_backward", TORCH_BOX(&fastlayers::group_norm_backward));
}

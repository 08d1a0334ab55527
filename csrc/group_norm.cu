// group_norm of x over (N, C, *), with an optional activation, forward and backward. instance_norm is groups = C.
//
// The stock composition reads x for the statistics, reads and writes it for the affine part and again for the activation, and its
// backward passes over x and dy three to four times. Here a group is read once and written once: it stays on the chip
// between the statistics and the result. z = weight·xhat + bias, which the activation's gradient needs, is computed again.
//
//   block   forward, contiguous (N, C, *): a group is one run of memory. The shared memory of a part of a warp or of a block holds
//           it.
//   team    forward, a group too large for a block: many blocks, all resident, hold a slice each and tell each other their part of
//           the sums through global memory, while the next group is on its way.
//   items   backward, contiguous: a group in the registers of a part of a warp, of a block or of a cluster (sm_90).
//   split   contiguous, what these cannot hold: one pass for the sums, one for the result.
//   pixels  channels last: groups are interleaved. Two passes as well, each thread with some channels of its own.
//
// Statistics are merged as (count, mean, sum of squares about that mean), never as sums of squares about 0: a mean far
// from 0 costs no accuracy.
//
// In a contiguous tensor whose channels are no multiple of the vector, groups and channels start anywhere in a 16-byte word. All
// tensors being aligned, element i of each lies at the same place in its word: kernels read the words that cover a
// group or a channel and ignore what belongs to its neighbours.
#include <cstring>

#include "common/activations.cuh"
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
  own.mean = whole ? tree_sum(v) * A(1.0 / V) : tree_sum(v) / own.count;
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const A d = whole || inside(e, j, n) ? v.v[j] - own.mean : A(0);
    v.v[j] = d * d;
  }
  own.m2 = tree_sum(v);
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

// Puts `value` in the place of those elements of a word that lie outside its run of n.
template <typename T, int V>
__device__ __forceinline__ void replace_outside(Vec<T, V>& word, int e, int n, T value) {
  if constexpr (sizeof(T) == 2) {  // in pairs, so that the word stays in whole registers
    const unsigned pair = words_of(filled<T, 2>(value))[0];
#pragma unroll
    for (int i = 0; i < V / 2; ++i) {
      const unsigned mask = (inside(e, 2 * i, n) ? 0x0000ffffu : 0u) | (inside(e, 2 * i + 1, n) ? 0xffff0000u : 0u);
      words_of(word)[i] = (words_of(word)[i] & mask) | (pair & ~mask);
    }
  } else {
#pragma unroll
    for (int j = 0; j < V; ++j) word.v[j] = inside(e, j, n) ? word.v[j] : value;
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
#pragma unroll
    for (int k = 0; k < K; ++k) {
      x[k] = filled<In, V>(convert<In>(0.f));
      dy[k] = filled<Out, V>(convert<Out>(0.f));
      if (e + k * stride >= n) continue;
      x[k] = load_vec<In, V>(x_ + k * stride);
      dy[k] = load_vec<Out, V>(dy_ + k * stride);
    }
  }
};

// dz of a word
template <Act ACT, typename In, typename Out, int V>
__device__ __forceinline__ Vec<compute_t<In>, V> z_gradient(const Vec<In, V>& x, const Vec<Out, V>& dy, const Channel<compute_t<In>>& c) {
  using A = compute_t<In>;
  const Vec<A, V> v = unpack<A>(x);
  Vec<A, V> dz = unpack<A>(dy);
#pragma unroll
  for (int j = 0; j < V; ++j) dz.v[j] = act_gradient<ACT, sizeof(In) == 2>(dz.v[j], c.z(v.v[j]));
  return dz;
}

// What a word adds to the sums; dz_xhat still lacks the factor rstd.
template <typename In, int V>
__device__ __forceinline__ Sums<compute_t<In>> word_sums(const Vec<In, V>& x, const Vec<compute_t<In>, V>& dz,
                                                       const Channel<compute_t<In>>& c) {
  Vec<compute_t<In>, V> products = unpack<compute_t<In>>(x);
#pragma unroll
  for (int j = 0; j < V; ++j) products.v[j] = dz.v[j] * (products.v[j] - c.mean);
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
#pragma unroll
  for (int j = 0; j < V; ++j) r.v[j] = dz.v[j] * c.scale - g.constant - (r.v[j] - c.mean) * g.slope;
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
    for (int w = p * phase + lane; w < end; w += a.lanes) copy_word<In, V>(held + w, x + w * V);
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
  constexpr int V = kVectorBytes / sizeof(In);
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
  const Channel<A> constants(a.stats[group], a.stats[a.total + group], a.affine, c);
#pragma unroll
  for (int k = 0; k < K; ++k) clear_outside(step.x[k], step.dy[k], e + k * stride, a.hw, constants.mean);

  Vec<A, V> dz[K];
  Sums<A> sums{A(0), A(0)};
  with_act<Act::run_time>(a.act, [&](auto act) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      dz[k] = z_gradient<decltype(act)::value>(step.x[k], step.dy[k], constants);
      sums = sums + word_sums(step.x[k], dz[k], constants);
    }
  });
#pragma unroll
  for (int k = 0; k < K; ++k) forget(step.x[k]);
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
    store_inside(static_cast<In*>(a.out) + offset + k * stride, e + k * stride, a.hw,
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
    for_words(words, [&](int w, int) { copy_word<In, V>(&at(stage, w), x + w * V); });
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

  __device__ int64_t total() const { return this->samples * this->groups; }
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
  return Channel<compute_t<In>>(a.stats[group], a.stats[a.total() + group], a.affine, channel);
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
  for (int w = threadIdx.x; w < part.words; w += kSplitThreads) extend(m, load_vec<In, V>(x + w * V), part.element(w), part.n);
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
    for (int w = threadIdx.x; w < part.words; w += kSplitThreads) {
      Vec<A, V> z = unpack<A>(load_vec<In, V>(x + w * V));
#pragma unroll
      for (int j = 0; j < V; ++j) z.v[j] = c.z(z.v[j]);
      store_inside(y + w * V, part.element(w), part.n, activated<decltype(act)::value, Out>(z));
    }
  });
}

template <typename In, typename Out>
__global__ void __launch_bounds__(kSplitThreads, step_blocks<In>()) group_norm_split_sums(const PassArgs<In> a) {
  using A = compute_t<In>;
  constexpr int V = kVectorBytes / sizeof(In), K = step_words<In, Out>(), kStride = kSplitThreads * V;
  __shared__ Sums<A> slots[kMaxWarps];
  const Part<V> part(a, blockIdx.x);
  const In* x = static_cast<const In*>(a.x) + part.start;
  const Out* dy = static_cast<const Out*>(a.dy) + part.start;
  int at = static_cast<int>(threadIdx.x) * V;  // elements from part.start
  Step<In, Out, V, K> next(x + at, dy + at, at - part.head, kStride, part.n);
  const Channel<A> c = channel_of(a, part.row);
  Sums<A> sums{A(0), A(0)};
  with_act<Act::run_time>(a.act, [&](auto act) {
#pragma unroll 1
    for (; at - part.head < part.n; at += K * kStride) {
      Step<In, Out, V, K> now = next;
      next = Step<In, Out, V, K>(x + at + K * kStride, dy + at + K * kStride, at + K * kStride - part.head, kStride, part.n);
#pragma unroll
      for (int k = 0; k < K; ++k) {
        clear_outside(now.x[k], now.dy[k], at + k * kStride - part.head, part.n, c.mean);
        sums = sums + word_sums(now.x[k], z_gradient<decltype(act)::value>(now.x[k], now.dy[k], c), c);
      }
    }
  });
  sums = group_merge(sums, slots, kSplitThreads);
  if (threadIdx.x == 0) a.partial[part.slot(a)] = {sums.dz, sums.dz_xhat * c.rstd};
}

template <typename In, typename Out>
__global__ void __launch_bounds__(kSplitThreads, step_blocks<In>()) group_norm_split_backward(const PassArgs<In> a) {
  using A = compute_t<In>;
  constexpr int V = kVectorBytes / sizeof(In), K = step_words<In, Out>(), kStride = kSplitThreads * V;
  const Part<V> part(a, gridDim.x - 1 - blockIdx.x);
  const In* x = static_cast<const In*>(a.x) + part.start;
  const Out* dy = static_cast<const Out*>(a.dy) + part.start;
  In* dx = static_cast<In*>(a.out) + part.start;
  int at = static_cast<int>(threadIdx.x) * V;  // elements from part.start
  Step<In, Out, V, K> next(x + at, dy + at, at - part.head, kStride, part.n);
  const Channel<A> c = channel_of(a, part.row);
  const GroupGradient<A> gradient = a.gradients[a.by_depth.quotient(part.row)];
  with_act<Act::run_time>(a.act, [&](auto act) {
#pragma unroll 1
    for (; at - part.head < part.n; at += K * kStride) {
      const Step<In, Out, V, K> now = next;
      next = Step<In, Out, V, K>(x + at + K * kStride, dy + at + K * kStride, at + K * kStride - part.head, kStride, part.n);
#pragma unroll
      for (int k = 0; k < K; ++k)
        store_inside(dx + at + k * kStride, at + k * kStride - part.head, part.n,
                     input_gradient(now.x[k], z_gradient<decltype(act)::value>(now.x[k], now.dy[k], c), c, gradient));
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
    const A rstd = a.stats[a.total() + group];
    Sums<A> total{A(0), A(0)};
    const int count = static_cast<int>(a.parts * a.depth);
#pragma unroll 4
    for (int i = threadIdx.x & 31; i < count; i += 32) {
      const int part = static_cast<int>(a.by_depth.quotient(i)), channel = i - part * a.depth;
      const Sums<A> s = partial[part * a.channels + channel];
      const A scale = rstd * a.affine.weight(first + channel);
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
  int base, channel, x, y;            // base: the block's first channel
  bool active;

  template <typename In>
  __device__ Column(const PassArgs<In>& a, int64_t block) {
    const int64_t chunk = block / a.tiles;
    sample = chunk / a.parts;
    part = chunk - sample * a.parts;
    y = threadIdx.x / a.across;
    x = static_cast<int>(threadIdx.x) - y * a.across;
    base = static_cast<int>(block - chunk * a.tiles) * a.across * V;
    channel = base + x * V;
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

// A few neighbouring channels of a thread of the backward: it treats those of all its pixels together.
template <int V>
constexpr int kPiece = V > 1 ? 2 : 1;

template <typename T, int V>
__device__ __forceinline__ Vec<T, kPiece<V>> piece(const Vec<T, V>& v, int q) {
  Vec<T, kPiece<V>> r;
  if constexpr (sizeof(r) == 4 && kPiece<V> == 2) {
    words_of(r)[0] = words_of(v)[q];
  } else {
#pragma unroll
    for (int i = 0; i < kPiece<V>; ++i) r.v[i] = v.v[q * kPiece<V> + i];
  }
  return r;
}

template <typename T, int V>
__device__ __forceinline__ void set_piece(Vec<T, V>& v, int q, const Vec<T, kPiece<V>>& r) {
  if constexpr (sizeof(r) == 4 && kPiece<V> == 2) {
    words_of(v)[q] = words_of(r)[0];
  } else {
#pragma unroll
    for (int i = 0; i < kPiece<V>; ++i) v.v[q * kPiece<V> + i] = r.v[i];
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
#pragma unroll
      for (int c = 0; c < COUNT; ++c) data[((c * (V / P) + i % V / P) * across + i / V) * P + i % P] = values[c];
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
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const bool there = k == 0 || k * down < left;
      x[k] = load_vec<In, V>(x_ + (there ? k * stride : 0));
      dy[k] = filled<Out, V>(convert<Out>(0.f));
      if (there) dy[k] = load_vec<Out, V>(dy_ + k * stride);
    }
  }
};

template <typename In, typename Out, int V>
__global__ void __launch_bounds__(kPixelThreads, step_blocks<In>()) group_norm_pixels_sums(const PassArgs<In> a) {
  using A = compute_t<In>;
  constexpr int P = kPiece<V>, K = step_words<In, Out>();
  extern __shared__ __align__(16) char memory[];
  const Column<V> column(a, blockIdx.x);
  const ChannelTable<A, V, 4> table{reinterpret_cast<A*>(memory), a.across};
  table.fill(column.base, a.channels, [&](int channel, A* values) {
    const int64_t group = column.sample * a.groups + a.by_depth.quotient(channel);
    const Channel<A> c(a.stats[group], a.stats[a.total() + group], a.affine, channel);
    values[0] = c.mean, values[1] = c.scale, values[2] = c.bias, values[3] = c.rstd;
  });
  Sums<A> sums[V];
#pragma unroll
  for (int j = 0; j < V; ++j) sums[j] = {A(0), A(0)};
  if (column.active) {
    const int64_t stride = a.down * a.channels;
    const In* x = static_cast<const In*>(a.x) + column.offset + (column.first + column.y) * a.channels;
    const Out* dy = static_cast<const Out*>(a.dy) + column.offset + (column.first + column.y) * a.channels;
    with_act<Act::run_time>(a.act, [&](auto act) {
#pragma unroll 1
      for (int64_t left = column.last - column.first - column.y; left > 0; left -= K * a.down) {
        const Pixels<In, Out, V, K> pixels(x, dy, stride, left, a.down);
        x += K * stride, dy += K * stride;
#pragma unroll
        for (int q = 0; q < V / P; ++q) {
          const Vec<A, P> mean = table.load(0, q, column.x), scale = table.load(1, q, column.x);
          const Vec<A, P> bias = table.load(2, q, column.x);
#pragma unroll
          for (int k = 0; k < K; ++k) {
            const Vec<A, P> v = unpack<A>(piece(pixels.x[k], q)), g = unpack<A>(piece(pixels.dy[k], q));
#pragma unroll
            for (int i = 0; i < P; ++i) {
              const A d = v.v[i] - mean.v[i];
              const A dz = act_gradient<decltype(act)::value, sizeof(In) == 2>(g.v[i], d * scale.v[i] + bias.v[i]);
              sums[q * P + i].dz += dz;
              sums[q * P + i].dz_xhat += dz * d;
            }
          }
        }
      }
    });
#pragma unroll
    for (int j = 0; j < V; ++j) sums[j].dz_xhat *= table.load(3, j / P, column.x).v[j % P];
  }
  __syncthreads();  // before the table is written over
  merge_down(sums, memory, a.across, a.down, column.y);
  if (!column.active || column.y != 0) return;
  Sums<A>* out = a.partial + column.slot(a);
#pragma unroll
  for (int j = 0; j < V; ++j) out[j] = sums[j];
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
    const Channel<A> c(a.stats[group], a.stats[a.total() + group], a.affine, channel);
    const GroupGradient<A> g = a.gradients[group];
    values[0] = c.mean, values[1] = c.scale, values[2] = c.bias, values[3] = g.constant, values[4] = g.slope;
  });
  if (!column.active) return;
  const int64_t stride = a.down * a.channels, offset = column.offset + (column.first + column.y) * a.channels;
  const In* x = static_cast<const In*>(a.x) + offset;
  const Out* dy = static_cast<const Out*>(a.dy) + offset;
  In* dx = static_cast<In*>(a.out) + offset;
  with_act<Act::run_time>(a.act, [&](auto act) {
#pragma unroll 1
    for (int64_t left = column.last - column.first - column.y; left > 0; left -= K * a.down) {
      Pixels<In, Out, V, K> pixels(x, dy, stride, left, a.down);
#pragma unroll
      for (int q = 0; q < V / P; ++q) {
        const Vec<A, P> mean = table.load(0, q, column.x), scale = table.load(1, q, column.x), bias = table.load(2, q, column.x);
        const Vec<A, P> constant = table.load(3, q, column.x), slope = table.load(4, q, column.x);
#pragma unroll
        for (int k = 0; k < K; ++k) {
          const Vec<A, P> v = unpack<A>(piece(pixels.x[k], q));
          Vec<A, P> r = unpack<A>(piece(pixels.dy[k], q));
#pragma unroll
          for (int i = 0; i < P; ++i) {
            const A d = v.v[i] - mean.v[i];
            const A dz = act_gradient<decltype(act)::value, sizeof(In) == 2>(r.v[i], d * scale.v[i] + bias.v[i]);
            r.v[i] = dz * scale.v[i] - constant.v[i] - d * slope.v[i];
          }
          set_piece(pixels.x[k], q, pack<In>(r));
        }
      }
#pragma unroll
      for (int k = 0; k < K; ++k)
        if (k == 0 || k * a.down < left) store_vec<In, V>(dx + k * stride, pixels.x[k]);
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

// Launches with one attribute, or none.
template <typename Kernel, typename KernelArgs>
void launch_with(Kernel kernel, int64_t blocks, int threads, size_t shared, cudaLaunchAttribute* attribute, const Launch& launch,
                 const KernelArgs& a) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid_of(blocks));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = launch.stream();
  config.attrs = attribute;
  config.numAttrs = attribute != nullptr ? 1 : 0;
  STD_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, a));
}

// Launches a kernel of `cluster` blocks a group, if that is more than one.
template <typename Kernel, typename KernelArgs>
void launch_clusters(Kernel kernel, int64_t blocks, int threads, size_t shared, int cluster, const Launch& launch,
                     const KernelArgs& a) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  launch_with(kernel, blocks, threads, shared, cluster > 1 ? &attribute : nullptr, launch, a);
}

constexpr int64_t kThreadWords = 8;  // of a group for each thread of its blocks, where there is work for the whole GPU

// Threads of a block that holds a group or a slice of one: kThreadWords each, but fewer words where that leaves the GPU empty.
int group_threads(int64_t words, int64_t groups, int64_t bytes, int wide, const Launch& launch) {
  const int64_t room = static_cast<int64_t>(device_traits(launch.device()).processors) * kWideThreads;
  const int64_t each = std::clamp<int64_t>(words * groups / room, 1, kThreadWords);
  const int64_t most = 2 * (bytes + kStaticShared) > shared_memory(launch.device()).processor ? wide : std::min(wide, kBlockThreads);
  int64_t threads = ceil_div(words, each);
  threads = threads <= 32 ? next_power_of_2(threads) : ceil_div(threads, 32) * 32;
  return static_cast<int>(std::min(threads, most));
}

// Launches the block kernel; false where a block cannot hold a group.
template <typename In, typename Out>
bool launch_block(HoldArgs<In>& a, int64_t words, const Launch& launch) {
  const int64_t bytes = words * kVectorBytes;
  if (bytes > shared_memory(launch.device()).block) return false;
  a.lanes = group_threads(words, a.total, bytes, wide_threads<In>(), launch);
  a.lane_bits = log2_of(std::min(a.lanes, 32));
  a.held = static_cast<int>(words);
  a.each = static_cast<int>(ceil_div(words, a.lanes));
  // Short groups, of at most 256 words: several to a block.
  const int threads = a.lanes <= 32 ? kShortThreads : a.lanes;
  const int per_block = threads / a.lanes;
  constexpr auto kernel = group_norm_forward_block<In, Out>;
  allow_shared_memory<kernel>(launch.device());
  kernel<<<grid_of(ceil_div(a.total, per_block)), threads, static_cast<size_t>(per_block * bytes), launch.stream()>>>(a);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return true;
}

// Launches the team kernel; false where the blocks that fit the GPU at once cannot hold a group.
template <typename In, typename Out>
bool launch_team(HoldArgs<In>& a, int64_t words, const Launch& launch, const Tensor& like) {
  static int resident[kMaxDevices];
  constexpr auto kernel = group_norm_forward_team<In, Out>;
  const SharedMemory& memory = shared_memory(launch.device());
  const int64_t stage_bytes = std::min(memory.processor / kTeamBlocks - 2 * kTeamStaticShared, memory.block) / kTeamStages;
  const int64_t stage_words = stage_bytes / kVectorBytes;
  int& blocks = resident[launch.device()];  // 0: not asked yet; -1: none
  if (blocks == 0) {
    allow_shared_memory<kernel>(launch.device());
    int each = 0;
    STD_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, kTeamThreads, kTeamStages * stage_words * kVectorBytes));
    blocks = each > 0 ? each * device_traits(launch.device()).processors : -1;
  }
  a.teams = static_cast<int>(std::min<int64_t>(blocks / ceil_div(words, stage_words), a.total));
  if (blocks <= 0 || a.teams <= 0) return false;
  a.each = static_cast<int>(ceil_div(words, blocks / a.teams));
  a.members = static_cast<int>(ceil_div(words, a.each));
  a.held = a.each;
  const int64_t slots = a.total * a.members;
  const Tensor board = empty_contiguous({slots}, ScalarType::Long, like);
  a.board = static_cast<unsigned long long*>(board.mutable_data_ptr());
  STD_CUDA_CHECK(cudaMemsetAsync(a.board, 0xff, sizeof(*a.board) * slots, launch.stream()));
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  const size_t shared = static_cast<size_t>(kTeamStages) * a.held * kVectorBytes;
  launch_with(kernel, a.teams * a.members, kTeamThreads, shared, &attribute, launch, a);
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
  // Whether the channels of a pixel are neighbours in memory: of a single pixel they are in any layout.
  bool channels_together() const { return channels_last || pixels == 1; }
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
// that blocks of even size can share, of `most` words a thread.
template <typename In>
PassArgs<In> split_pass(const Args<In>& args, int64_t blocks, int64_t most) {
  constexpr int64_t kLeast = 4;
  constexpr int V = kVectorBytes / sizeof(In);
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
  const int64_t blocks = kForwardBlocks * device_traits(launch.device()).processors;
  PassArgs<In> a = channels_last ? pixel_pass(args, blocks, vector) : split_pass(args, blocks, 16);
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
      if (launch_block<In, Out>(a, words, launch)) return;
      if constexpr (!std::is_same_v<In, double>) {
        if (launch_team<In, Out>(a, words, launch, x)) return;
      }
    }
    const Tensor result = stats;
    if (!keep) stats_tensor(true);  // the passes hand them over in memory
    const Tensor scratch = stats;
    forward_passes<In, Out>(args, layout.channels_together(), launch, x);
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

// The backward of groups in registers; false where they are too large for that.
template <typename In, typename Out>
bool backward_held(const Args<In>& args, Gradients<In>& gradients, const Launch& launch, const Tensor& like) {
  constexpr int V = kVectorBytes / sizeof(In);
  const DeviceTraits& device = device_traits(launch.device());
  const int64_t total = args.samples * args.groups, n = args.depth * args.pixels;
  if (total > INT32_MAX || n > kMostHeld) return false;
  const int64_t channel_words = group_words<V>(args.pixels);
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
  if (gradients.wanted) gradients.make_partial(args.samples * a.parts, args.channels, like);
  a.partial = gradients.partial;
  const int64_t blocks = threads > 32 ? total * cluster : ceil_div(total, block / a.lanes);
  const auto kernel = few ? group_norm_backward_items<In, Out, 2> : group_norm_backward_items<In, Out, kMost>;
  launch_clusters(kernel, blocks, static_cast<int>(block), 0, cluster, launch, a);
  PassArgs<In> merged{};
  static_cast<Args<In>&>(merged) = args;
  if (gradients.wanted) gradients.merge(merged, false, launch.stream());
  return true;
}

template <typename In, typename Out, int V>
void backward_pixels(const PassArgs<In>& a, Gradients<In>& gradients, unsigned grid, cudaStream_t stream) {
  const int threads = a.across * a.down;
  // The table of constants, and the sums that are merged after it has been read.
  const size_t constants = static_cast<size_t>(a.across) * V * sizeof(compute_t<In>);
  const size_t shared = std::max(4 * constants, a.down / 2 * 2 * constants);
  group_norm_pixels_sums<In, Out, V><<<grid, threads, shared, stream>>>(a);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  gradients.merge(a, true, stream);
  group_norm_pixels_backward<In, Out, V><<<grid, threads, 5 * constants, stream>>>(a);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

template <typename In, typename Out>
void backward_passes(const Args<In>& args, bool channels_last, Gradients<In>& gradients, const Launch& launch, const Tensor& like) {
  using A = compute_t<In>;
  constexpr int V = kVectorBytes / sizeof(In);
  const int vector = args.channels % V == 0 ? V : 1;
  const int64_t blocks = kBackwardBlocks * device_traits(launch.device()).processors;
  PassArgs<In> a = channels_last ? pixel_pass(args, blocks, vector) : split_pass(args, blocks, kSplitWords);
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
    if (!layout.channels_last && backward_held<In, Out>(args, gradients, launch, x)) return;
    backward_passes<In, Out>(args, layout.channels_together(), gradients, launch, x);
  });
  return {dx, *dweight, *dbias};
}

}  // namespace
}  // namespace fastlayers

STABLE_TORCH_LIBRARY_IMPL(fastlayers, CUDA, m) {
  m.impl("group_norm_forward", TORCH_BOX(&fastlayers::group_norm_forward));
  m.impl("group_norm_backward", TORCH_BOX(&fastlayers::group_norm_backward));
}

// group_norm of x over (N, C, *), with an optional activation: backward. group_norm.cuh has the ways to go through a tensor.
#include "group_norm.cuh"

namespace fastlayers {
namespace {

constexpr int kGroupCluster = 8;  // most blocks that share a group: as many as any sm_90 part takes

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

template <typename In, int V>
__device__ __forceinline__ Vec<In, V> input_gradient(const Vec<In, V>& x, const Vec<compute_t<In>, V>& dz, const Channel<compute_t<In>>& c,
                                                   const GroupGradient<compute_t<In>>& g) {
  using A = compute_t<In>;
  Vec<A, V> r = unpack<A>(x);
  unroll<V>([&](int j) { r.v[j] = dz.v[j] * c.scale - g.constant - (r.v[j] - c.mean) * g.slope; });
  return pack<In>(r);
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

// ---- two passes ---------------------------------------------------------------------------------------------------------

// Words of a thread that a step of the backward's passes asks for together.
template <typename In, typename Out>
constexpr int step_words() { return sizeof(Out) > sizeof(In) ? 1 : 2; }

// Blocks of the backward's passes on an SM: what keeps enough bytes on their way.
template <typename In>
constexpr int step_blocks() { return sizeof(In) == 8 ? 1 : 3; }

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

// ---- host ---------------------------------------------------------------------------------------------------------------

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
    if (wanted) m.dweight = values_of(x, dweight, op, "weight"), m.dbias = values_of(x, dbias, op, "bias");
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
  const MaybeTensor weight = made_contiguous(weight_in), bias = made_contiguous(bias_in);
  Tensor dx = x.empty(x.x.scalar_type());
  MaybeTensor dweight, dbias;
  dispatch_pair(x.x.scalar_type(), dy.scalar_type(), op, [&]<typename In, typename Out>(In, Out) {
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

STABLE_TORCH_LIBRARY_IMPL(fastlayers, CUDA, m) { m.impl("group_norm_backward", TORCH_BOX(&fastlayers::group_norm_backward)); }

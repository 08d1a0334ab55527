// group_norm of x over (N, C, *), with an optional activation: forward. group_norm.cuh has the ways to go through a tensor.
#include "common/board.cuh"
#include "group_norm.cuh"

namespace fastlayers {
namespace {

constexpr int kBlockThreads = 512;  // most threads of a block that holds a group, where two of them fit an SM

// float64 needs twice the registers and more: fewer threads and blocks on an SM.
template <typename In>
constexpr int wide_threads() { return sizeof(In) == 8 ? kWideThreads / 4 : kWideThreads; }
template <typename In>
constexpr int pass_blocks() { return sizeof(In) == 8 ? 1 : 2; }

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

// Of elements V of type T, from global to shared memory, without passing through registers.
template <typename T, int V>
__device__ __forceinline__ void copy_word(Vec<T, V>* shared, const T* global) {
  static_assert(sizeof(Vec<T, V>) % kVectorBytes == 0);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(Vec<T, V>)); i += kVectorBytes)
    copy_async<kVectorBytes>(reinterpret_cast<char*>(shared) + i, reinterpret_cast<const char*>(global) + i);
}

template <Act ACT, typename Out, typename A, int V>
__device__ __forceinline__ Vec<Out, V> activated(Act act, Vec<A, V> z) {
  with_act<ACT>(act, [&](auto chosen) {
    unroll<V>([&](int j) { z.v[j] = act_value<decltype(chosen)::value, sizeof(Out) == 2>(z.v[j]); });
  });
  return pack<Out>(z);
}

// ---- contiguous: a group in a block or over a team -----------------------------------------------------------------------

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

// ---- launch rules -------------------------------------------------------------------------------------------------------

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
HoldArgs<In> make_hold(const Args<In>& args) {
  HoldArgs<In> a{};
  static_cast<Args<In>&>(a) = args;
  a.total = args.samples * args.groups;
  a.n = static_cast<int>(args.depth * args.pixels);
  a.hw = static_cast<int>(args.pixels);
  a.by_hw = Divider(static_cast<uint32_t>(args.pixels));
  return a;
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
  const MaybeTensor weight = made_contiguous(weight_in), bias = made_contiguous(bias_in);
  Tensor y = x.empty(dtype), stats = empty_stats(keep, x.images * groups, x.x);
  dispatch_pair(x.x.scalar_type(), dtype, op, [&]<typename In, typename Out>(In, Out) {
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

}  // namespace
}  // namespace fastlayers

STABLE_TORCH_LIBRARY_IMPL(fastlayers, CUDA, m) { m.impl("group_norm_forward", TORCH_BOX(&fastlayers::group_norm_forward)); }

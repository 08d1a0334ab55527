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
//
// This header has what both directions share: arguments, the constants of a channel, how threads share groups, parts of channels and pixels, and
// what the host finds out.
#pragma once

#include "common/activations.cuh"
#include "common/channels.cuh"
#include "common/rows.cuh"

namespace fastlayers {
namespace {

constexpr int kWideThreads = 1024;  // most threads of a block that holds a group
constexpr int kShortThreads = 128;  // of a block that holds several groups, each in a part of a warp
constexpr int kMaxWarps = kWideThreads / 32;

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

// ---- words --------------------------------------------------------------------------------------------------------------

// Whether a kernel has loops of its own for the usual activations. The choice for every word costs little, and is all that float64,
// results wider than x and single elements have.
template <typename In, typename Out, int V = kVector<In>>
constexpr bool kLoops = std::is_same_v<In, Out> && sizeof(In) < 8 && V > 1;

// The constants of one channel.
template <typename A>
struct Channel {
  A mean, rstd, scale, bias;  // z = (x - mean)·scale + bias, xhat = (x - mean)·rstd

  template <typename In>
  __device__ __forceinline__ Channel(A mean_, A rstd_, const Args<In>& a, int channel)
      : mean(mean_), rstd(rstd_), scale(rstd_ * a.weight.template load<In>(channel, 1.f)), bias(a.bias.template load<In>(channel, 0.f)) {}
  __device__ __forceinline__ A z(A x) const { return (x - mean) * scale + bias; }
};

// dx = dz·scale - constant - (x - mean)·slope, the latter two from the group's sums of scale·dz and scale·dz·xhat.
template <typename A>
struct GroupGradient {
  A constant, slope;

  GroupGradient() = default;
  __device__ __forceinline__ GroupGradient(const Sums<A>& scaled, A rstd, A count)
      : constant(scaled.dz / count), slope(rstd * (scaled.dz_xhat / count)) {}
};

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

constexpr int kMergeThreads = 512;

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

// ---- host ---------------------------------------------------------------------------------------------------------------

template <typename In>
Args<In> make_args(const ChannelLayout& x, const MaybeTensor& weight, const MaybeTensor& bias, int64_t groups, int64_t act,
                   const char* op) {
  FASTLAYERS_CHECK(groups > 0 && x.channels % groups == 0 && x.channels <= INT32_MAX, op, "expected channels (", x.channels,
                   ") divisible by groups (", groups, ")");
  FASTLAYERS_CHECK(!weight || !bias || weight->scalar_type() == bias->scalar_type(), op, "expected weight and bias of one dtype");
  Args<In> a{};
  a.x = pointer<const void>(x.x);
  a.weight = values_of(x, weight, op, "weight"), a.bias = values_of(x, bias, op, "bias");
  a.samples = x.images, a.channels = x.channels, a.pixels = x.plane;
  a.groups = static_cast<int>(groups), a.depth = static_cast<int>(x.channels / groups);
  a.act = act_of(act, op);
  return a;
}

constexpr int64_t kMostHeld = int64_t{1} << 30;  // elements of a group that the block and team kernels number by 32 bits

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

}  // namespace
}  // namespace fastlayers

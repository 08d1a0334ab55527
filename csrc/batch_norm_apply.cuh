// The last kernel of batch_norm's forward: the result from given statistics, with or without a residual and an activation.
#pragma once

#include "batch_norm.cuh"

namespace fastlayers {
namespace {

// Words of each operand of a thread of the result alone, and blocks an SM that its registers must allow.
template <typename T>
constexpr int kApplyUnroll = sizeof(T) == 8 ? 2 : 4;
template <typename T, int U, bool RESIDUAL>
constexpr int kApplyResident = U > 4 ? 2 : sizeof(T) == 8 || RESIDUAL ? 3 : 4;

// ---- words of results ---------------------------------------------------------------------------------------------------

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

}  // namespace
}  // namespace fastlayers

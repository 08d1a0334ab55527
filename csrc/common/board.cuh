// Partials that blocks tell each other through global memory, without a barrier.
//
// The board has one slot a partial, filled with kUnpublished before the launch (cudaMemsetAsync of 0xff). A block publishes its partial
// once; whoever needs it looks until it is there. Blocks may wait only for blocks that are certain to run: all are resident, or the
// awaited ones have lower indices.
#pragma once

#include <cstring>

#include "device.cuh"

namespace fastlayers {

using BoardWord = unsigned long long;
constexpr BoardWord kUnpublished = ~0ull;

// A partial crosses blocks as words of 8 bytes. Each word says by itself that it has arrived, so no partial may have the bits of
// kUnpublished: see canonical.
template <typename Partial>
struct Message {
  static constexpr int kWords = sizeof(Partial) / sizeof(BoardWord);
  static_assert(sizeof(Partial) % sizeof(BoardWord) == 0);
  BoardWord word[kWords];

  __device__ __forceinline__ static void publish(const Partial& p, BoardWord* slot) {
    Message m;
    memcpy(&m, &p, sizeof(p));
    unroll<kWords>([&](int k) { static_cast<volatile BoardWord*>(slot)[k] = m.word[k]; });
  }
  __device__ __forceinline__ static Partial await(const BoardWord* slot) {
    Message m;
    unroll<kWords>([&](int k) {
      do m.word[k] = static_cast<const volatile BoardWord*>(slot)[k];
      while (m.word[k] == kUnpublished);
    });
    return m.partial();
  }
  __device__ __forceinline__ Partial partial() const {
    Partial p;
    memcpy(&p, this, sizeof(p));
    return p;
  }
};

// Replaces every NaN by the one that is not kUnpublished.
template <typename A>
__device__ __forceinline__ A canonical(A v) { return v == v ? v : static_cast<A>(NAN); }

// Calls f(i, partial) for each of `count` partials of one word, each lane for its own ones; by one warp. A lane asks for several
// together.
template <typename Partial, typename F>
__device__ __forceinline__ void for_published(const BoardWord* board, int count, F&& f) {
  static_assert(Message<Partial>::kWords == 1);
  constexpr int kTogether = 4;
  const volatile BoardWord* slots = board;
  for (int first = threadIdx.x & 31; first < count; first += 32 * kTogether) {
    Message<Partial> m[kTogether];
    unroll<kTogether>([&](int k) { m[k].word[0] = first + 32 * k < count ? slots[first + 32 * k] : 0; });
    unroll<kTogether>([&](int k) {
      const int i = first + 32 * k;
      if (i >= count) return;
      while (m[k].word[0] == kUnpublished) m[k].word[0] = slots[i];
      f(i, m[k].partial());
    });
  }
}

// A board of `slots` words, unpublished. The caller keeps the tensor until its kernels are launched.
inline Tensor empty_board(int64_t slots, const Tensor& like, const Launch& launch) {
  const Tensor board = empty_contiguous({slots}, ScalarType::Long, like);
  STD_CUDA_CHECK(cudaMemsetAsync(board.mutable_data_ptr(), 0xff, sizeof(BoardWord) * slots, launch.stream()));
  return board;
}

}  // namespace fastlayers

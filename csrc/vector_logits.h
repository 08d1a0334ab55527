// What softmax and the losses on logits share on a CPU: sums of exponentials, online.
#pragma once

#include <limits>

#include "common/vector_math.h"
#include "logits.h"

namespace fastlayers {
namespace {

namespace vectors {
typedef int64_t Longs __attribute__((vector_size(kVectorWidth)));
}  // namespace vectors

// Whole numbers of the width of A, and their vector.
template <typename A>
using whole_t = std::conditional_t<std::is_same_v<A, double>, int64_t, int32_t>;
template <typename A>
using WholeVector = std::conditional_t<std::is_same_v<A, double>, vectors::Longs, vectors::Ints>;

// `v` in the first lanes, before `end`, and `rest` in the others.
template <typename A>
FASTLAYERS_INLINE Vector<A> only_lanes(const Vector<A>& v, int64_t end, A rest) {
  return lane_numbers<WholeVector<A>>() < static_cast<whole_t<A>>(end) ? v : broadcast<A>(rest);
}

// The maximum of what was added, and the sum of its exponentials relative to that. A NaN comes out in the sum. Without a finite number
// the maximum is the lowest one: so a difference to it is never that of two infinities of one sign, except for +inf, whose sum is NaN.
template <typename A>
struct Exponentials {
  A m = std::numeric_limits<A>::lowest(), s = 0;
};

// The same in each lane.
template <typename A>
struct LanesOfExponentials {
  Vector<A> m = broadcast<A>(std::numeric_limits<A>::lowest()), s{};

  // K at a time, which cost K + 1 exponentials.
  template <int K>
  FASTLAYERS_INLINE void add(const Vector<A> (&v)[K]) {
    Vector<A> top[K];
    for (int k = 0; k < K; ++k) top[k] = v[k];
    for (int step = 1; step < K; step *= 2)
      for (int k = 0; k + step < K; k += 2 * step) top[k] = top[k] > top[k + step] ? top[k] : top[k + step];
    const Vector<A> base = top[0] > m ? top[0] : m;
    Vector<A> e[K];
    for (int k = 0; k < K; ++k) e[k] = exp_below_0<A>(v[k] - base);
    for (int step = 1; step < K; step *= 2)
      for (int k = 0; k + step < K; k += 2 * step) e[k] += e[k + step];
    s = s * exp_below_0<A>(m - base) + e[0];
    m = base;
  }

  FASTLAYERS_INLINE Exponentials<A> merged() const {
    const A top = fold<A>(m, [](A a, A b) FASTLAYERS_LANES { return a > b ? a : b; });
    return {top, sum_of<A>(s * exp_below_0<A>(m - top))};
  }
};

// Up to K vectors of scores at the end of n, from i on; -inf in the lanes beyond.
template <int K, typename A, typename Scores>
FASTLAYERS_INLINE void last_scores(Vector<A> (&v)[K], int64_t i, int64_t n, Scores&& scores) {
  constexpr int L = kLanes<A>;
  const A nothing = -std::numeric_limits<A>::infinity();
  Vector<A> found[K];
#pragma GCC unroll 1
  for (int k = 0; k < K; ++k) {
    const int64_t at = i + k * L;
    found[k] = at < n ? only_lanes<A>(scores(at, Part<A>{std::min<int64_t>(n - at, L)}), n - at, nothing) : broadcast<A>(nothing);
  }
  for (int k = 0; k < K; ++k) v[k] = found[k];
}

// f(v) for the vectors of n scores, kAtOnce of them or, at the end, kAtTheEnd; scores(i, lanes) are those from i on.
constexpr int kAtOnce = 8, kAtTheEnd = 4;
template <typename A, typename Scores, typename F>
FASTLAYERS_INLINE void for_scores(int64_t n, Scores&& scores, F&& f) {
  constexpr int L = kLanes<A>;
  int64_t i = 0;
  for (Vector<A> v[kAtOnce]; i + kAtOnce * L <= n; i += kAtOnce * L) {
    for (int k = 0; k < kAtOnce; ++k) v[k] = scores(i + k * L, All<A>{});
    f(v);
  }
  for (Vector<A> v[kAtTheEnd]; i < n; i += kAtTheEnd * L) {
    last_scores<kAtTheEnd, A>(v, i, n, scores);
    f(v);
  }
}

// The maxima and sums of exponentials of `width` columns of n scores each; scores(c, j, lanes) are those of row c in the columns from j on.
template <typename A, typename Scores>
FASTLAYERS_INLINE void add_down(A* most, A* sum, int64_t n, int64_t width, Scores&& scores) {
  const auto add = [&]<int K>(int64_t c, Number<K>) FASTLAYERS_LANES {
    for_parts<A>(width, [&](int64_t j, const Part<A>& lanes) FASTLAYERS_LANES {
      Vector<A> v[K];
      for (int k = 0; k < K; ++k) v[k] = scores(c + k, j, lanes);
      LanesOfExponentials<A> sums;
      if (c > 0) sums.m = load<A>(most + j), sums.s = load<A>(sum + j);
      sums.add(v);
      store<A>(most + j, sums.m);
      store<A>(sum + j, sums.s);
    });
  };
  int64_t c = 0;
  for (; c + 4 <= n; c += 4) add(c, Number<4>{});
  for (; c < n; ++c) add(c, Number<1>{});
}

// f(i of the first of its columns among all, their place, width) for the tiles of neighbouring columns of a tensor.
constexpr int64_t kTile = 512;  // columns at a time: their sums stay in the first-level cache
template <typename F>
void for_tiles(const Shape& s, F&& f) {
  const int64_t tiles = (s.inner + kTile - 1) / kTile;
  const int64_t grain = std::max<int64_t>(1, kGrain / (s.n * std::min(s.inner, kTile)));
  torch::stable::parallel_for(0, s.outer * tiles, grain, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t at = i % tiles * kTile, o = i / tiles;
      f(o * s.inner + at, o * s.n * s.inner + at, std::min(kTile, s.inner - at));
    }
  });
}

}  // namespace
}  // namespace fastlayers

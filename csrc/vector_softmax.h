// What softmax and the losses on logits share on a CPU: sums of exponentials, online.
#pragma once

#include <limits>

#include "common/vector_math.h"

namespace fastlayers {
namespace {

namespace vectors {
typedef int64_t Longs __attribute__((vector_size(kVectorWidth)));
typedef uint64_t LongWords __attribute__((vector_size(kVectorWidth)));
}  // namespace vectors

// Whole numbers of the width of A, and their vector.
template <typename A>
using whole_t = std::conditional_t<std::is_same_v<A, double>, int64_t, int32_t>;
template <typename A>
using WholeVector = std::conditional_t<std::is_same_v<A, double>, vectors::Longs, vectors::Ints>;

// `v` in the lanes from `first` on and before `end`, `rest` in the others. By one comparison: GCC 12 joins two of AVX-512 lane by lane.
template <typename A>
FASTLAYERS_INLINE Vector<A> only_lanes(const Vector<A>& v, int64_t first, int64_t end, A rest) {
  if constexpr (std::is_same_v<A, double>) {
    return lane_numbers<vectors::LongWords>() - static_cast<uint64_t>(first) < static_cast<uint64_t>(end - first) ? v : broadcast<A>(rest);
  } else {
    return lane_numbers<vectors::Words>() - static_cast<uint32_t>(first) < static_cast<uint32_t>(end - first) ? v : broadcast<A>(rest);
  }
}

// What a loop over vectors is handed at the end of a row that is longer than a vector: the last one, of which the first lanes were seen.
template <typename A>
struct Last {
  int64_t seen;
  template <typename T>
  FASTLAYERS_INLINE Vector<A> load(const T* from, A rest = A(0)) const {
    return only_lanes<A>(fastlayers::load<T, A>(from), seen, kLanes<A>, rest);
  }
};

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
  for (int k = 0; k < K; ++k) {
    const int64_t at = i + k * L;
    v[k] = broadcast<A>(nothing);
    if (at + L <= n) {
      v[k] = scores(at, All<A>{});
    } else if (n < L) {
      if (k == 0) v[k] = only_lanes<A>(scores(0, Some<A>{n}), 0, n, nothing);
    } else if (at < n) {
      const int64_t seen = at + L - n;
      v[k] = only_lanes<A>(scores(n - L, Last<A>{seen}), seen, L, nothing);
    }
  }
}

// f(v) for the vectors of n scores, kAtOnce of them or, at the end, half as many; scores(i, lanes) are those from i on.
constexpr int kAtOnce = 8;
template <typename A, typename Scores, typename F>
FASTLAYERS_INLINE void for_scores(int64_t n, Scores&& scores, F&& f) {
  constexpr int L = kLanes<A>;
  Vector<A> v[kAtOnce], few[kAtOnce / 2];
  int64_t i = 0;
  for (; i + kAtOnce * L <= n; i += kAtOnce * L) {
    for (int k = 0; k < kAtOnce; ++k) v[k] = scores(i + k * L, All<A>{});
    f(v);
  }
  if (n - i > kAtOnce / 2 * L) {
    last_scores<kAtOnce, A>(v, i, n, scores);
    f(v);
  } else if (i < n) {
    last_scores<kAtOnce / 2, A>(few, i, n, scores);
    f(few);
  }
}

}  // namespace
}  // namespace fastlayers

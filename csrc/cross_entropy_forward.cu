// cross_entropy of logits and classes: forward, and a chunk of linear_cross_entropy with its gradient. cross_entropy.cuh says how.
#include "common/ops.h"
#include "cross_entropy.cuh"

namespace fastlayers {
namespace {

constexpr int kFewRows = 4;              // longer rows of an SM: if there are fewer, they are cut into pieces,
constexpr int kPieceBlocks = 8;          // for so many blocks of an SM

// Words of a row that a thread loads before it uses the first one, and blocks of an SM, which leave a thread the registers for them.
template <typename T, bool PLAIN>
constexpr int kForwardWords = PLAIN && sizeof(T) < 8 ? 8 : 4;
template <typename T, bool PLAIN>
constexpr int kForwardBlocks = sizeof(T) == 8 ? 2 : PLAIN ? 3 : 4;
template <typename T>
constexpr int kHeldBlocks = sizeof(T) == 8 ? 2 : 3;
template <typename T, bool PLAIN>
constexpr int kColumnBlocks = sizeof(T) == 8 ? 2 : 3;

// Adds up to K words of a row to its sums. element(i) is the place of word i in the row, and has(i) tells whether there is one. Unless
// `whole`, a word may begin before the row and end after its n elements.
template <bool PLAIN, bool FAST, typename T, typename A, int K, int V, typename Has, typename Element>
__device__ __forceinline__ void add_words(Sums<A>& sums, Vec<T, V> (&held)[K], int n, bool whole, const Terms<A>& terms,
                                          Has&& has, Element&& element) {
  if (!whole) {
    unroll<K>([&](int i) { blank_neighbours(held[i], element(i), n, convert<T>(minus_infinity<A>())); });
  }
  const A m = maximum(sums.pair.m, score_of<PLAIN, FAST>(convert<A>(largest(held)), terms)), base = finite_or_zero(m);
  A s = sums.pair.s * exponential<FAST>(sums.pair.m - base);
  // A test of the smoothing for each element would cost a sixth of the kernel's time.
  const auto add = [&](auto smooths, auto weighted) {
    unroll<K>([&](int i) {
      forget(held[i]);
      Vec<A, V> e = unpack<A>(held[i]);
      if constexpr (PLAIN) {
        unroll<V>([&](int j) { e.v[j] = exponential<FAST>(e.v[j] - base); });
        s += tree_sum(e);
      } else if (has(i)) {
        const int at = element(i);
        unroll<V>([&](int j) {
          const bool inside = whole || (at + j >= 0 && at + j < n);
          const A score = score_of<PLAIN, FAST>(e.v[j], terms);
          if constexpr (weighted) {
            if (inside) sums.linear += terms.weight[at + j] * score;
          } else if constexpr (smooths) {
            sums.linear += inside ? score : A(0);
          }
          e.v[j] = inside ? exponential<FAST>(score - base) : A(0);
        });
        s += tree_sum(e);
      }
    });
  };
  if (PLAIN || terms.smoothing == A(0)) {
    add(std::false_type{}, std::false_type{});
  } else if (terms.weight == nullptr) {
    add(std::true_type{}, std::false_type{});
  } else {
    add(std::true_type{}, std::true_type{});
  }
  sums.pair = {m, s};
}

// The loss of a row whose class has this score and this weight.
template <bool PLAIN, typename A>
__device__ __forceinline__ A loss_of(const Sums<A>& all, A score, A weight, const Terms<A>& terms) {
  const Level<A> level = Level<A>::of(all);
  const A lse = level.base + level.rest;
  A loss = weight * ((level.base - score) + level.rest);
  if constexpr (!PLAIN) {
    loss *= A(1) - terms.smoothing;
    if (terms.smoothing != A(0)) loss += terms.uniform() * (terms.all_weights() * lse - all.linear);
  }
  return terms.z_loss == A(0) ? loss : loss + terms.z_loss * lse * lse;
}

template <typename A>
struct ForwardArgs : RowArgs<A> {
  void* losses;
  Kind kind;      // of them
  A* stats;       // the bases of the levels of all rows, then the rests
  A* partials;    // (m, s, linear) of each piece, if there are several
};

// The loss and lse of one row, by one thread.
template <bool PLAIN, typename A>
__device__ __forceinline__ void finish_row(const ForwardArgs<A>& a, int64_t row, bool ignored, const Sums<A>& all, A score, A weight) {
  store_scalar(a.losses, row, a.kind, ignored ? A(0) : loss_of<PLAIN>(all, score, weight, a.terms));
  const Level<A> level = ignored ? Level<A>{A(0), A(0)} : Level<A>::of(all);
  a.stats[row] = level.base;
  a.stats[a.rows + row] = level.rest;
}

template <typename T, bool PLAIN>
__global__ void __launch_bounds__(kThreads, kForwardBlocks<T, PLAIN>) cross_entropy_rows(const ForwardArgs<compute_t<T>> a) {
  using A = compute_t<T>;
  constexpr int V = kVector<T>, K = kForwardWords<T, PLAIN>;
  constexpr bool FAST = sizeof(T) == 2;
  __shared__ Pair<A> pair_slots[kThreads / 32];
  __shared__ A slots[kThreads / 32];
  const Stand at = Stand::find<T, V>(a);
  const T* x = static_cast<const T*>(a.x) + at.row * a.row_stride;
  const int t = at.row < a.rows ? a.terms.target_of(at.row) : -1;
  const bool ignored = t < 0;
  A score = 0, weight = 0;  // of the class, which arrive while the row is read
  if (!ignored && at.first == 0) score = convert<A>(x[t]), weight = a.terms.weight_of(t);
  x += at.start;

  Sums<A> sums;
  const int words = ignored ? 0 : at.words;
  const auto take = [&](int begin, auto all) {  // all: the thread has K more words
    const auto has = [&](int i) { return decltype(all)::value || begin + i * at.stride < words; };
    Vec<T, V> held[K];
    unroll<K>([&](int i) {
      if constexpr (!decltype(all)::value) held[i] = filled<T, V>(convert<T>(minus_infinity<A>()));
      if (has(i)) held[i] = load_vec<T, V>(x + (begin + i * at.stride) * V);
    });
    add_words<PLAIN, FAST>(sums, held, a.n, a.whole, a.terms, has,
                           [&](int i) { return at.start + (begin + i * at.stride) * V; });
  };
  int begin = at.first;
#pragma unroll 1
  for (; begin + (K - 1) * at.stride < words; begin += K * at.stride) take(begin, std::true_type{});
  if (begin < words) take(begin, std::false_type{});
  Exchange<Pair<A>, false> exchange{pair_slots};
  sums.pair = row_merge<FAST, false>(lanes_merge<FAST>(sums.pair, min(a.lanes, 32)), exchange, a.lanes);
  if constexpr (!PLAIN) {
    Exchange<A, false> adding{slots};
    sums.linear = row_sum<false>(lanes_sum(sums.linear, min(a.lanes, 32)), adding, a.lanes);
  }
  if (at.first != 0 || at.row >= a.rows) return;
  if (a.pieces == 1) return finish_row<PLAIN>(a, at.row, ignored, sums, score_of<PLAIN, FAST>(score, a.terms), weight);
  A* partial = a.partials + (at.row * a.pieces + at.piece) * 3;
  partial[0] = sums.pair.m;
  partial[1] = sums.pair.s;
  partial[2] = sums.linear;
}

// The pieces of a row, added up by a warp.
template <typename T, bool PLAIN>
__global__ void __launch_bounds__(kThreads) merge_pieces(const ForwardArgs<compute_t<T>> a) {
  using A = compute_t<T>;
  constexpr bool FAST = sizeof(T) == 2;
  const int lane = threadIdx.x & 31;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + (threadIdx.x >> 5);
  if (row >= a.rows) return;
  const int t = a.terms.target_of(row);
  Sums<A> sums;
  if (t >= 0) {
    for (int i = lane; i < a.pieces; i += 32) {
      const A* partial = a.partials + (row * a.pieces + i) * 3;
      sums.pair = merge<FAST>(sums.pair, Pair<A>{partial[0], partial[1]});
      sums.linear += partial[2];
    }
  }
  sums.pair = lanes_merge<FAST>(sums.pair, 32);
  sums.linear = lanes_sum(sums.linear, 32);
  if (lane != 0) return;
  if (t < 0) return finish_row<PLAIN>(a, row, true, sums, A(0), A(0));
  const A score = score_of<PLAIN, FAST>(convert<A>(static_cast<const T*>(a.x)[row * a.row_stride + t]), a.terms);
  finish_row<PLAIN>(a, row, false, sums, score, a.terms.weight_of(t));
}

// ---- a chunk in the shared memory of clusters -----------------------------------------------------------------------------

template <typename A>
struct HeldArgs {
  void* x;
  int64_t rows;
  int n;            // elements of a row, classes and padding
  bool ragged;      // n is not a multiple of the vector
  A* losses;
  Scale<A> scale;
  Terms<A> terms;
};

template <typename T, bool PLAIN>
__global__ void __launch_bounds__(kHeldThreads, kHeldBlocks<T>) cross_entropy_held(const HeldArgs<compute_t<T>> a, int each) {
  using A = compute_t<T>;
  constexpr int V = kVector<T>;
  constexpr bool FAST = sizeof(T) == 2;
  extern __shared__ __align__(16) char memory[];
  __shared__ Pair<A> slots[kHeldThreads / 32 * kMaxCluster];
  __shared__ A adding_slots[kHeldThreads / 32 * kMaxCluster];
  Exchange<Pair<A>, true> exchange{slots};
  exchange.arrive();
  const Share<V> at = Share<V>::find(a.n, a.n, each, a.ragged);
  T* row = static_cast<T*>(a.x) + at.row * a.n;
  T* x = row + at.start;
  Vec<T, V>* held = reinterpret_cast<Vec<T, V>*>(memory);
  const int t = a.terms.target_of(at.row), classes = a.terms.classes, start = static_cast<int>(at.start);
  Sums<A> sums;
  A score = 0;
  if (t >= 0) {
    at.for_words([&](int w) { copy_async<kVectorBytes>(held + w, x + w * V); });
    score = score_of<PLAIN, FAST>(convert<A>(row[t]), a.terms);
    await_copies();
    const bool whole = !a.ragged && classes == a.n;
    const auto words = [&](int w) {
      Vec<T, V> v = held[w];
      if (!whole) blank_neighbours(v, start + w * V, classes, convert<T>(minus_infinity<A>()));
      return v;
    };
    Vec<T, V> best[1] = {filled<T, V>(convert<T>(minus_infinity<A>()))};
    at.for_words([&](int w) { best[0] = maxima(best[0], words(w)); });
    const A m = score_of<PLAIN, FAST>(convert<A>(largest(best)), a.terms), base = finite_or_zero(m);
    sums.pair.m = m;
    at.for_words([&](int w) {
      Vec<A, V> e = unpack<A>(words(w));
      const int first = start + w * V;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const A s = score_of<PLAIN, FAST>(e.v[j], a.terms);
        bool inside = true;
        if constexpr (!PLAIN) {
          inside = whole || (first + j >= 0 && first + j < classes);
          if (a.terms.smoothing != A(0) && inside) sums.linear += a.terms.weight_of(first + j) * s;
        }
        e.v[j] = inside ? exponential<FAST>(s - base) : A(0);
      }
      sums.pair.s += tree_sum(e);
    });
  }
  // The blocks of an ignored row exchange too: a cluster waits for all of its blocks.
  sums.pair = row_merge<FAST, true>(lanes_merge<FAST>(sums.pair, 32), exchange, kHeldThreads);
  if constexpr (!PLAIN) {
    Exchange<A, true> adding{adding_slots};
    adding.arrive();
    sums.linear = row_sum<true>(lanes_sum(sums.linear, 32), adding, kHeldThreads);
  }
  if (threadIdx.x == 0 && this_cluster().block_rank() == 0) a.losses[at.row] = t < 0 ? A(0) : loss_of<PLAIN>(sums, score, a.terms.weight_of(t), a.terms);
  using Slopes = Slope<PLAIN, FAST, A>;
  Slopes slope{};
  if (t >= 0) slope = Slopes::find(Level<A>::of(sums), a.scale.of(at.row), t, a.terms);
  at.for_words([&](int w) {
    const int e = start + w * V;
    Vec<T, V> d = filled<T, V>(convert<T>(A(0)));
    if (t >= 0) d = slope.word(held[w], e, classes, a.terms);
    if (a.ragged) store_word(row + e, e, a.n, d);
    else store_vec<T, V>(row + e, d);
  });
}

template <typename T, int V, bool PLAIN>
__global__ void __launch_bounds__(kColumnThreads, kColumnBlocks<T, PLAIN>) cross_entropy_columns(const ColumnArgs<compute_t<T>> a) {
  using A = compute_t<T>;
  constexpr int kSteps = kStepsOf<PLAIN>;
  constexpr bool FAST = sizeof(T) == 2;
  extern __shared__ __align__(16) char memory[];
  const int64_t outer = blockIdx.x / a.tiles, column = (static_cast<int64_t>(blockIdx.x % a.tiles) * a.across + threadIdx.x % a.across) * V;
  const int first = static_cast<int>(threadIdx.x) / a.across;
  const bool active = column < a.inner;
  const T* __restrict__ x = static_cast<const T*>(a.x) + outer * a.n * a.inner + column;

  Pair<A> p[V];
  A linear[V] = {};
  unroll<V>([&](int j) { p[j] = {minus_infinity<A>(), A(0)}; });
  if (active) {
#pragma unroll 1
    for (int begin = first; begin < a.n; begin += kSteps * a.down) {
      Vec<T, V> held[kSteps];
      unroll<kSteps>([&](int i) {
        held[i] = filled<T, V>(convert<T>(minus_infinity<A>()));
        if (begin + i * a.down < a.n) held[i] = load_vec<T, V>(x + static_cast<int64_t>(begin + i * a.down) * a.inner);
      });
      unroll<V>([&](int j) {
        A v[kSteps], m = p[j].m;
        unroll<kSteps>([&](int i) {
          const bool has = begin + i * a.down < a.n;
          v[i] = convert<A>(held[i].v[j]);
          if constexpr (!PLAIN) {
            if (has) v[i] = score_of<PLAIN, FAST>(v[i], a.terms);
            if (has && a.terms.smoothing != A(0)) linear[j] += a.terms.weight_of(begin + i * a.down) * v[i];
          }
          m = maximum(m, v[i]);
        });
        const A base = finite_or_zero(m);
        A s = p[j].s * exponential<FAST>(p[j].m - base);
        unroll<kSteps>([&](int i) { s += exponential<FAST>(v[i] - base); });
        p[j] = {m, s};
      });
    }
  }
  combine_down(p, reinterpret_cast<Pair<A>*>(memory), a, [](Pair<A> u, Pair<A> v) { return merge<FAST>(u, v); });
  if constexpr (!PLAIN) {
    __syncthreads();
    combine_down(linear, reinterpret_cast<A*>(memory), a, [](A u, A v) { return u + v; });
  }
  if (!active || first != 0) return;
  unroll<V>([&](int j) {
    const int64_t row = outer * a.inner + column + j;
    const int t = a.terms.target_of(row);
    const Sums<A> all{p[j], linear[j]};
    A loss = 0;
    if (t >= 0) {
      const A score = score_of<PLAIN, FAST>(convert<A>(x[t * a.inner + j]), a.terms);
      loss = loss_of<PLAIN>(all, score, a.terms.weight_of(t), a.terms);
    }
    store_scalar(a.losses, row, a.kind, loss);
    const Level<A> level = Level<A>::of(all);
    a.stats[row] = level.base;
    a.stats[a.rows + row] = level.rest;
  });
}

// ---- the sum of all losses ----------------------------------------------------------------------------------------------

constexpr int kSumThreads = 1024;
constexpr int kSumEach = 16;  // losses that a thread adds before another block does

// Sums over the block, to its first thread.
template <typename A>
__device__ __forceinline__ void block_sums(A& u, A& v) {
  __shared__ A slots[2][kSumThreads / 32];
  lanes_sum(u, v, 32);
  if ((threadIdx.x & 31) == 0) slots[0][threadIdx.x >> 5] = u, slots[1][threadIdx.x >> 5] = v;
  __syncthreads();
  u = slots[0][threadIdx.x & 31];
  v = slots[1][threadIdx.x & 31];
  lanes_sum(u, v, 32);
}

// Where the sum goes: the result and, for the backward, the divisor of a mean.
template <typename A>
struct Total {
  void* loss;
  Kind kind;
  bool mean;
  A* divisor;

  __device__ __forceinline__ void write(A sum, A all) const {
    store_scalar(loss, 0, kind, mean ? sum / all : sum);
    *divisor = all;
  }
};

// Sums the losses and, for a mean, the weights of their classes: (sum, divisor) for each block, or the total if there is one block.
template <typename A>
__global__ void __launch_bounds__(kSumThreads) sum_losses(const A* losses, int64_t rows, const Terms<A> terms, A* partials, const Total<A> total) {
  A sum = 0, divisor = 0;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kSumThreads;
#pragma unroll 8
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kSumThreads + threadIdx.x; i < rows; i += stride) {
    sum += losses[i];
    if (total.mean) {
      const int64_t t = terms.target[i];
      if (t != terms.ignore_index) divisor += terms.weight_of(t);
    }
  }
  block_sums(sum, divisor);
  if (threadIdx.x != 0) return;
  if (gridDim.x == 1) return total.write(sum, divisor);
  partials[2 * blockIdx.x] = sum;
  partials[2 * blockIdx.x + 1] = divisor;
}

template <typename A>
__global__ void __launch_bounds__(kSumThreads) sum_partials(const A* partials, int64_t blocks, const Total<A> total) {
  A sum = 0, divisor = 0;
  for (int64_t i = threadIdx.x; i < blocks; i += kSumThreads) sum += partials[2 * i], divisor += partials[2 * i + 1];
  block_sums(sum, divisor);
  if (threadIdx.x == 0) total.write(sum, divisor);
}

template <typename A>
__global__ void __launch_bounds__(kSumThreads) sum_weights(const A* weight, int64_t classes, A* sum) {
  A all = 0, unused = 0;
  for (int64_t i = threadIdx.x; i < classes; i += kSumThreads) all += weight[i];
  block_sums(all, unused);
  if (threadIdx.x == 0) *sum = all;
}

template <typename T>
void launch_forward_rows(ForwardArgs<compute_t<T>>& args, const Launch& launch, const Tensor& like) {
  using A = compute_t<T>;
  args.whole = whole_words<T>(args.x, args.row_stride, args.n);
  const int64_t processors = device_traits(launch.device()).processors;
  const int64_t blocks = share_rows<T>(args, [&](int64_t words) {
    const int64_t wanted = args.rows < kFewRows * processors ? ceil_div(kPieceBlocks * processors, args.rows) : 1;
    return std::min(wanted, ceil_div(words, kThreads * kForwardWords<T, true>));
  });
  Tensor partials;
  if (args.pieces > 1) {
    partials = empty_contiguous({args.rows, args.pieces, 3}, compute_dtype(like), like);
    args.partials = pointer<A>(partials);
  }
  dispatch_plain(args.terms, [&](auto plain) {
    cross_entropy_rows<T, plain.value><<<grid_of(blocks), kThreads, 0, launch.stream()>>>(args);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
    if (args.pieces == 1) return;
    const unsigned warps = grid_of(ceil_div(args.rows, kThreads / 32));
    merge_pieces<T, plain.value><<<warps, kThreads, 0, launch.stream()>>>(args);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

// Adds the losses of all rows up into the result.
template <typename A>
void sum_up(const Tensor& losses, const Terms<A>& terms, const Total<A>& total, const Launch& launch) {
  const int64_t rows = losses.numel(), processors = device_traits(launch.device()).processors;
  const int64_t blocks = std::min(processors, ceil_div(rows, kSumThreads * kSumEach));
  const Tensor partials = blocks == 1 ? losses : empty_contiguous({blocks, 2}, losses.scalar_type(), losses);
  A* sums = pointer<A>(partials);
  sum_losses<A><<<static_cast<unsigned>(blocks), kSumThreads, 0, launch.stream()>>>(pointer<const A>(losses), rows, terms, sums, total);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  if (blocks == 1) return;
  sum_partials<A><<<1, kSumThreads, 0, launch.stream()>>>(sums, blocks, total);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// Writes the sum of the weight there, for the kernels that follow.
template <typename A>
void sum_weight(Context<A>& context, A* sum, const Launch& launch) {
  if (!context.wants_weight_sum()) return;
  sum_weights<A><<<1, kSumThreads, 0, launch.stream()>>>(context.terms.weight, context.terms.classes, sum);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  context.terms.weight_sum = sum;
}

void write_losses(const Call& call, const Tensor& losses, const Tensor& stats, const Tensor& loss) {
  const Logits& logits = call.logits;
  const Launch launch(logits.x);
  dispatch_floating(logits.x.scalar_type(), call.op, [&]<typename T>(T) {
    using A = compute_t<T>;
    Context<A> context(call, logits.n);
    A* numbers = pointer<A>(stats);
    A* divisor = numbers + 2 * call.rows();
    sum_weight(context, divisor + 1, launch);
    const Kind kind = kind_of(losses.scalar_type(), call.op);
    if (logits.rows) {
      ForwardArgs<A> args{row_args<A>(logits, logits.n, context.terms), losses.mutable_data_ptr(), kind, numbers, nullptr};
      launch_forward_rows<T>(args, launch, logits.x);
    } else {
      ColumnArgs<A> args = column_args<A>(logits, context.terms);
      args.losses = losses.mutable_data_ptr();
      args.stats = numbers;
      args.kind = kind;
      with_columns<T>(args, logits, aligned(args.x), [&](const ColumnLaunch& shape, auto vector, auto plain) {
        const int threads = shape.across * shape.down;
        const size_t shared = shape.down == 1 ? 0 : sizeof(Pair<A>) * threads * vector.value;
        cross_entropy_columns<T, vector.value, plain.value><<<grid_of(shape.blocks), threads, shared, launch.stream()>>>(args);
      });
    }
    if (call.each_row()) return;
    const bool mean = call.reduction == Reduction::mean;
    sum_up<A>(losses, context.terms, {loss.mutable_data_ptr(), kind_of(loss.scalar_type(), call.op), mean, divisor}, launch);
  });
}

// Losses, and the gradients written over the logits, by a kernel that holds the rows in shared memory. False if they do not fit.
bool run_held(const Tensor& logits, const Tensor& losses, int64_t columns, const Tensor& target, const MaybeTensor& weight,
              const Options& options, const MaybeTensor& grad_scale, const char* op) {
  const int64_t rows = logits.size(0), n = logits.size(1);
  if (!aligned(logits.const_data_ptr())) return false;
  const Launch launch(logits);
  bool held = false;
  dispatch_floating(logits.scalar_type(), op, [&]<typename T>(T) {
    using A = compute_t<T>;
    constexpr int V = kVector<T>;
    Context<A> context(target, weight, options, rows, columns, logits, op);
    const Tensor sum = context.wants_weight_sum() ? empty_contiguous({1}, losses.scalar_type(), logits) : losses;
    sum_weight(context, pointer<A>(sum), launch);
    const HeldArgs<A> args{logits.mutable_data_ptr(), rows, static_cast<int>(n), n % V != 0, pointer<A>(losses),
                           Scale<A>::from(grad_scale, nullptr, op), context.terms};
    const int64_t words = words_covered(n, args.ragged, V);
    dispatch_plain(context.terms, [&](auto plain) {
      held = launch_held<cross_entropy_held<T, plain.value>>(args, words, kVectorBytes, launch);
    });
  });
  return held;
}

Tensor cross_entropy_chunk_(Tensor logits, const Tensor& target, const MaybeTensor& weight, int64_t ignore_index,
                            double label_smoothing, double softcap, double z_loss, const MaybeTensor& grad_scale,
                            bool want_grad, int64_t columns) {
  const char* op = "cross_entropy_chunk_";
  check_chunk(logits, columns, grad_scale, op);
  const ScalarType wide = compute_dtype(logits);
  const Tensor held = empty_contiguous({logits.size(0)}, wide, logits);
  if (held.numel() == 0) return held;
  const Options options{ignore_index, label_smoothing, softcap, z_loss};
  if (want_grad && run_held(logits, held, columns, target, weight, options, grad_scale, op)) return held;
  const auto [losses, stats] = cross_entropy_forward_op<write_losses>(torch::stable::narrow(logits, 1, 0, columns), target, weight, ignore_index,
                                                                     0, label_smoothing, softcap, z_loss, wide);
  if (want_grad)
    cross_entropy_gradient(logits, columns, target, weight, ignore_index, label_smoothing, softcap, z_loss, grad_scale, stats);
  return losses;
}

}  // namespace
}  // namespace fastlayers

STABLE_TORCH_LIBRARY_IMPL(fastlayers, CUDA, m) {
  m.impl("cross_entropy_forward", TORCH_BOX(&fastlayers::cross_entropy_forward_op<fastlayers::write_losses>));
  m.impl("cross_entropy_chunk_", TORCH_BOX(&fastlayers::cross_entropy_chunk_));
}

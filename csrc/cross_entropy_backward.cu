// cross_entropy of logits and classes: backward. cross_entropy.cuh says how.
#include "common/ops.h"
#include "cross_entropy.cuh"

namespace fastlayers {
namespace {

constexpr int kBackwardWords = 4;
template <typename T, bool PLAIN>
constexpr int kBackwardBlocks = sizeof(T) == 8 ? 2 : PLAIN ? 5 : 3;
template <typename T, bool PLAIN>
constexpr int kColumnBackwardBlocks = sizeof(T) == 8 || !PLAIN ? 2 : 3;
constexpr int kColumnClasses = 64;  // that a thread of the backward takes

template <typename A>
struct BackwardArgs : RowArgs<A> {
  void* dx;
  int64_t dx_stride;
  bool aligned;  // every element of dx lies at the same place in its word as that of x
  const A* stats;
  Scale<A> scale;
};

template <typename T, bool PLAIN>
__global__ void __launch_bounds__(kThreads, kBackwardBlocks<T, PLAIN>) cross_entropy_backward_rows(const BackwardArgs<compute_t<T>> a) {
  using A = compute_t<T>;
  constexpr int V = kVector<T>, K = kBackwardWords;
  constexpr bool FAST = sizeof(T) == 2;
  const Stand at = Stand::find<T, V>(a);
  if (at.row >= a.rows) return;
  const T* x = static_cast<const T*>(a.x) + at.row * a.row_stride + at.start;
  T* dx = static_cast<T*>(a.dx) + at.row * a.dx_stride + at.start;
  const int t = a.terms.target_of(at.row);
  using Slopes = Slope<PLAIN, FAST, A>;
  Slopes slope{};
  if (t >= 0) slope = Slopes::find({a.stats[at.row], a.stats[a.rows + at.row]}, a.scale.of(at.row), t, a.terms);
#pragma unroll 1
  for (int begin = at.first; begin < at.words; begin += K * at.stride) {
    const auto word = [&](int i) { return begin + i * at.stride; };
    Vec<T, V> held[K];
    if (t >= 0) {
      unroll<K>([&](int i) {
        if (word(i) < at.words) held[i] = load_vec<T, V>(x + word(i) * V);
      });
    }
    unroll<K>([&](int i) {
      if (word(i) >= at.words) return;
      const int e = at.start + word(i) * V;
      Vec<T, V> d = filled<T, V>(convert<T>(A(0)));
      if (t >= 0) d = slope.word(held[i], e, a.terms.classes, a.terms);
      T* to = dx + word(i) * V;
      if (a.whole) {
        store_vec<T, V>(to, d);
      } else if (a.aligned) {
        store_word(to, e, a.n, d);
      } else {
        unroll<V>([&](int j) {
          if (e + j >= 0 && e + j < a.n) to[j] = d.v[j];
        });
      }
    });
  }
}

template <typename T, int V, bool PLAIN>
__global__ void __launch_bounds__(kColumnThreads, kColumnBackwardBlocks<T, PLAIN>) cross_entropy_backward_columns(const ColumnArgs<compute_t<T>> a) {
  using A = compute_t<T>;
  constexpr int kSteps = kStepsOf<PLAIN>;
  constexpr bool FAST = sizeof(T) == 2;
  const unsigned tile = blockIdx.x / a.shares;
  const int share = static_cast<int>(blockIdx.x - tile * a.shares);
  const int64_t outer = tile / a.tiles, column = (static_cast<int64_t>(tile % a.tiles) * a.across + threadIdx.x % a.across) * V;
  if (column >= a.inner) return;
  const int64_t base = outer * a.n * a.inner + column;
  const int last = min(a.n, (share + 1) * kColumnClasses);
  const T* x = static_cast<const T*>(a.x) + base;
  T* dx = static_cast<T*>(a.dx) + base;
  using Slopes = Slope<PLAIN, FAST, A>;
  Slopes slope[V] = {};
  unroll<V>([&](int j) {
    const int64_t row = outer * a.inner + column + j;
    const int t = a.terms.target_of(row);
    slope[j].t = -1;
    if (t >= 0) slope[j] = Slopes::find({a.stats[row], a.stats[a.rows + row]}, a.scale.of(row), t, a.terms);
  });
  const auto give = [&](int begin, auto all) {  // all: there are kSteps more classes
    const auto has = [&](int i) { return decltype(all)::value || begin + i * a.down < last; };
    Vec<T, V> held[kSteps];
    unroll<kSteps>([&](int i) {
      if (has(i)) held[i] = load_vec<T, V>(x + static_cast<int64_t>(begin + i * a.down) * a.inner);
    });
    unroll<kSteps>([&](int i) {
      if (!has(i)) return;
      const int c = begin + i * a.down;
      Vec<A, V> d = unpack<A>(held[i]);
      unroll<V>([&](int j) {
        d.v[j] = slope[j](d.v[j], c, c == slope[j].t, true, a.terms);
        if (slope[j].t < 0) d.v[j] = A(0);
      });
      store_vec<T, V>(dx + static_cast<int64_t>(c) * a.inner, pack<T>(d));
    });
  };
  int begin = share * kColumnClasses + static_cast<int>(threadIdx.x) / a.across;
#pragma unroll 1
  for (; begin + (kSteps - 1) * a.down < last; begin += kSteps * a.down) give(begin, std::true_type{});
  if (begin < last) give(begin, std::false_type{});
}

template <typename T>
void launch_backward_rows(BackwardArgs<compute_t<T>>& args, const Launch& launch) {
  constexpr int64_t V = kVectorBytes / sizeof(T);
  args.whole = whole_words<T>(args.x, args.row_stride, args.n) && whole_words<T>(args.dx, args.dx_stride, args.n);
  const auto distance = reinterpret_cast<uintptr_t>(args.x) - reinterpret_cast<uintptr_t>(args.dx);
  args.aligned = distance % kVectorBytes == 0 && (args.row_stride - args.dx_stride) % V == 0;
  const int64_t blocks = share_rows<T>(args, [&](int64_t words) { return ceil_div(words, kThreads * kBackwardWords); });
  dispatch_plain(args.terms, [&](auto plain) {
    cross_entropy_backward_rows<T, plain.value><<<grid_of(blocks), kThreads, 0, launch.stream()>>>(args);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

// The gradient by dy, one number or one for each row, or 1 where there is none. `classes`: those of a row, after which it may be padded.
void write_gradient(const Call& call, const MaybeTensor& dy, int64_t classes, const Tensor& stats, const Tensor& dx) {
  const Logits& logits = call.logits;
  const Launch launch(logits.x);
  dispatch_floating(logits.x.scalar_type(), call.op, [&]<typename T>(T) {
    using A = compute_t<T>;
    Context<A> context(call, classes);
    const A* numbers = pointer<const A>(stats);
    const A* divisor = numbers + 2 * call.rows();
    if (context.wants_weight_sum()) context.terms.weight_sum = divisor + 1;
    const auto scale = Scale<A>::from(dy, call.reduction == Reduction::mean ? divisor : nullptr, call.op);
    if (logits.rows) {
      const RowArgs<A> row = row_args<A>(logits, logits.n, context.terms);
      const int64_t dx_stride = dx.data_ptr() == row.x ? logits.stride : logits.n;
      BackwardArgs<A> args{row, dx.mutable_data_ptr(), dx_stride, false, numbers, scale};
      return launch_backward_rows<T>(args, launch);
    }
    ColumnArgs<A> args = column_args<A>(logits, context.terms);
    args.dx = dx.mutable_data_ptr();
    args.stats = const_cast<A*>(numbers);
    args.shares = static_cast<unsigned>(ceil_div(args.n, kColumnClasses));
    args.scale = scale;
    with_columns<T>(args, logits, aligned(args.x) && aligned(args.dx), [&](const ColumnLaunch& shape, auto vector, auto plain) {
      const unsigned blocks = grid_of(shape.blocks * args.shares);
      cross_entropy_backward_columns<T, vector.value, plain.value><<<blocks, shape.across * shape.down, 0, launch.stream()>>>(args);
    });
  });
}

void write_whole_gradient(const Call& call, const Tensor& dy, const Tensor& stats, const Tensor& dx) {
  write_gradient(call, dy, call.logits.n, stats, dx);
}

}  // namespace

void cross_entropy_gradient(const Tensor& logits, int64_t classes, const Tensor& target, const MaybeTensor& weight, int64_t ignore_index,
                            double label_smoothing, double softcap, double z_loss, const MaybeTensor& dy, const Tensor& stats) {
  const char* op = "cross_entropy_chunk_";
  const Options options{ignore_index, label_smoothing, softcap, z_loss};
  write_gradient({Logits(logits, op), target, weight, Reduction::none, options, op}, dy, classes, stats, logits);
}

}  // namespace fastlayers

STABLE_TORCH_LIBRARY_IMPL(fastlayers, CUDA, m) {
  m.impl("cross_entropy_backward", TORCH_BOX(&fastlayers::cross_entropy_backward_op<fastlayers::write_whole_gradient>));
  m.impl("cross_entropy_backward_", TORCH_BOX(&fastlayers::cross_entropy_backward_in_place_op<fastlayers::write_whole_gradient>));
}

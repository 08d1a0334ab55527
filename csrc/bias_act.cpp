// act(x + bias) and act(x) for CPU tensors, forward and backward, on torch's threads: one pass over memory each, in which the backward
// also adds up the gradient of the bias. What is kept and recomputed is that of the CUDA kernels (bias_act.cu).
#include "bias_act.h"

#include "common/vector_activations.h"

namespace fastlayers::bias_act {
namespace {

// out = act(x)
template <typename T, typename ACT>
FASTLAYERS_CALLED void act_flat(ACT act, const T* x, T* out, int64_t n, const ActParameters<compute_t<T>>& p) {
  map<T, 1, 1>(n, {x}, {out}, [=](int64_t, const auto& v, auto& result) FASTLAYERS_LANES {
    result[0] = act_value<compute_t<T>, sizeof(T) == 2>(act, v[0], p);
  });
}

// out = act(x + bias), from the element `first` of rows of these columns to `last`.
template <typename T, typename ACT>
FASTLAYERS_CALLED void bias_act_rows(ACT act, const T* x, const T* bias, T* out, int64_t columns, int64_t first, int64_t last,
                   const ActParameters<compute_t<T>>& p) {
  for (int64_t i = first; i < last;) {
    const int64_t column = i % columns, n = std::min(last - i, columns - column);
    map<T, 2, 1>(n, {x + i, bias + column}, {out + i}, [=](int64_t, const auto& v, auto& result) FASTLAYERS_LANES {
      result[0] = act_value<compute_t<T>, sizeof(T) == 2>(act, v[0] + v[1], p);
    });
    i += n;
  }
}

// dx = dy·act'(x)
template <typename T, typename ACT>
FASTLAYERS_CALLED void gradient_flat(ACT act, const T* dy, const T* x, T* dx, int64_t n, const ActParameters<compute_t<T>>& p) {
  map<T, 2, 1>(n, {dy, x}, {dx}, [=](int64_t, const auto& v, auto& result) FASTLAYERS_LANES {
    result[0] = act_gradient<compute_t<T>, sizeof(T) == 2>(act, v[0], v[1], p);
  });
}

// Rows of columns that a task has, n of them, `step` apart.
template <typename T>
struct Block {
  const T *dy, *x, *bias;
  T* dx;
  int64_t rows, n, step;
};

// dx = dy·act'(x + bias), and its sums over the rows, as map has their places. Those of kAtOnce rows are added up before they are added to
// the others, which costs fewer digits.
template <typename T, typename ACT>
FASTLAYERS_CALLED void gradient_rows(ACT act, const Block<T>& b, compute_t<T>* sums, compute_t<T>* some, int64_t padded,
                   const ActParameters<compute_t<T>>& p) {
  using A = compute_t<T>;
  constexpr int64_t kAtOnce = 64;
  for (int64_t start = 0; start < b.rows; start += kAtOnce) {
    const int64_t end = std::min(b.rows, start + kAtOnce);
    for (int64_t row = start; row < end; ++row) {
      const int64_t i = row * b.step;
      map<T, 3, 1>(b.n, {b.dy + i, b.x + i, b.bias}, {b.dx + i}, [=](int64_t at, const auto& v, auto& result) FASTLAYERS_LANES {
        result[0] = act_gradient<A, sizeof(T) == 2>(act, v[0], v[1] + v[2], p);
        store<A>(some + at, load<A>(some + at) + result[0]);
      });
    }
    for (int64_t at = 0; at < padded; at += kLanes<A>) {
      store<A>(sums + at, load<A>(sums + at) + load<A>(some + at));
      store<A>(some + at, Vector<A>{});
    }
  }
}

MaybeTensor dense(const MaybeTensor& t) { return t ? MaybeTensor(torch::stable::contiguous(*t)) : std::nullopt; }

Tensor bias_act_forward(const Tensor& x_in, const MaybeTensor& bias_in, int64_t act_in, double first_parameter, double second_parameter) {
  const char* op = "bias_act_forward";
  const Act act = act_of(act_in, op, kActs);
  const Operand operand(x_in, bias_in, op);
  Tensor out = operand.empty();
  const int64_t elements = out.numel();
  if (elements == 0) return with_strides(out, operand.sizes, operand.torch_strides);
  const MaybeTensor bias = dense(bias_in);
  dispatch_floating(x_in.scalar_type(), op, [&]<typename T>(T) {
    using A = compute_t<T>;
    const T *x = pointer<const T>(operand.x), *b = pointer<const T>(bias);
    T* to = pointer<T>(out);
    const ActParameters<A> p{static_cast<A>(first_parameter), static_cast<A>(second_parameter)};
    torch::stable::parallel_for(0, elements, kGrain, [&](int64_t first, int64_t last) {
      with_act<T, true>(act, [&](auto chosen) {
        if (b == nullptr) act_flat<T>(chosen, x + first, to + first, last - first, p);
        else bias_act_rows<T>(chosen, x, b, to, operand.columns, first, last, p);
      });
    });
  });
  return with_strides(out, operand.sizes, operand.torch_strides);
}

// dx, and its sums over the rows unless db is null. bias may be null: for relu, where x is the result.
template <typename T>
void run_gradient_rows(const T* dy, const T* x, const T* bias, T* dx, T* db, int64_t rows, int64_t columns, Act act,
                       const ActParameters<compute_t<T>>& p) {
  using A = compute_t<T>;
  constexpr int64_t kBoth = 2 * kLanes<A>;  // what map takes at once
  const std::vector<T> none(bias == nullptr ? columns : 0, static_cast<T>(0.f));
  if (bias == nullptr) bias = none.data();
  // Each task has rows of its own, and sums, which are added up in the order of the tasks; or columns, where there are few rows.
  const int64_t most = std::max<int64_t>(1, rows * columns / kGrain), threads = torch::stable::get_num_threads();
  const bool by_rows = rows >= std::min(threads, most);
  const int64_t units = by_rows ? rows : (columns + kBoth - 1) / kBoth, tasks = std::min({threads, most, units});
  const int64_t each = (units + tasks - 1) / tasks, padded = (columns + kBoth - 1) / kBoth * kBoth;
  const int64_t arrays = by_rows ? tasks : 1;
  std::vector<A> sums(2 * arrays * padded);
  const auto columns_of = [&](int64_t task) {
    const int64_t first = by_rows ? 0 : std::min(columns, task * each * kBoth);
    return std::pair<int64_t, int64_t>(first, by_rows ? columns : std::min(columns - first, each * kBoth));
  };
  torch::stable::parallel_for(0, tasks, 1, [&](int64_t first_task, int64_t last_task) {
    for (int64_t task = first_task; task < last_task; ++task) {
      const auto [column, n] = columns_of(task);
      const int64_t row = by_rows ? std::min(rows, task * each) : 0, count = by_rows ? std::min(rows - row, each) : rows;
      const int64_t i = row * columns + column, width = (n + kBoth - 1) / kBoth * kBoth;
      const Block<T> block{dy + i, x + i, bias + column, dx + i, count, n, columns};
      A* const own = sums.data() + (by_rows ? 2 * task * padded : column);
      with_act<T, true>(act, [&](auto chosen) { gradient_rows<T>(chosen, block, own, own + padded, width, p); });
    }
  });
  if (db == nullptr) return;
  for (int64_t task = 0; task < (by_rows ? 1 : tasks); ++task) {
    const auto [column, n] = columns_of(task);
    for (int64_t i = 0; i < n; ++i) {
      A sum = 0;
      for (int64_t array = 0; array < arrays; ++array) sum += sums[2 * array * padded + column + map_place<T>(i)];
      db[column + i] = static_cast<T>(sum);
    }
  }
}

std::tuple<Tensor, Tensor> bias_act_backward(const Tensor& dy_in, const Tensor& x_in, const MaybeTensor& bias_in, int64_t act_in,
                                             double first_parameter, double second_parameter, bool dbias,
                                             std::optional<ScalarType> dtype) {
  const char* op = "bias_act_backward";
  const Act act = act_of(act_in, op, kActs);
  check_same_shape(x_in, dy_in, op, "dy");
  FASTLAYERS_CHECK(!dbias || x_in.dim() > 0, op, "a tensor with no dimensions has no bias");
  FASTLAYERS_CHECK(!dtype || *dtype == x_in.scalar_type(), op, "a bias of another dtype than x is for a GPU");
  const MaybeTensor bias = dense(bias_in);
  const int64_t columns = dbias ? x_in.size(x_in.dim() - 1) : 0;
  Tensor db = empty_contiguous({columns}, x_in.scalar_type(), x_in);
  const Operand operand(x_in, bias || !dbias ? bias : MaybeTensor(db), op);
  const Tensor dy = with_strides(dy_in, operand.sizes, operand.strides);
  Tensor dx = operand.empty();
  const int64_t elements = dx.numel();
  if (elements == 0) {
    if (dbias) torch::stable::zero_(db);
    return {dx, db};
  }
  dispatch_floating(x_in.scalar_type(), op, [&]<typename T>(T) {
    using A = compute_t<T>;
    const T *g = pointer<const T>(dy), *x = pointer<const T>(operand.x), *b = pointer<const T>(bias);
    T* to = pointer<T>(dx);
    const ActParameters<A> p{static_cast<A>(first_parameter), static_cast<A>(second_parameter)};
    if (dbias || b != nullptr) {
      run_gradient_rows<T>(g, x, b, to, dbias ? pointer<T>(db) : nullptr, operand.rows, operand.columns, act, p);
      return;
    }
    torch::stable::parallel_for(0, elements, kGrain, [&](int64_t first, int64_t last) {
      with_act<T, true>(act, [&](auto chosen) { gradient_flat<T>(chosen, g + first, x + first, to + first, last - first, p); });
    });
  });
  return {dx, db};
}

}  // namespace
}  // namespace fastlayers::bias_act

FASTLAYERS_CPU_KERNELS(bias_act, m) {
  m.impl("bias_act_forward", TORCH_BOX(&fastlayers::bias_act::bias_act_forward));
  m.impl("bias_act_backward", TORCH_BOX(&fastlayers::bias_act::bias_act_backward));
}

// layer_norm and rms_norm for CPU tensors, with or without the sum of a residual before them: one pass over memory where the stock
// composition makes several. A row is read again while it is in the cache. The kinds, what is rounded and what is kept are those of the
// CUDA kernels (layer_norm.cuh).
#include "layer_norm.h"

#include <cmath>

#include "common/vector.h"

namespace fastlayers::layer_norm {
namespace {

// ---- loops over a row ---------------------------------------------------------------------------------------------------

template <typename T, typename A = compute_t<T>>
void widen(A* to, const T* from, int64_t n) {
  for_vectors<A>(n, [&](int64_t i, auto lanes) FASTLAYERS_LANES { lanes.store(to + i, lanes.load(from + i)); });
}

template <typename T, typename A = compute_t<T>>
void narrow(T* to, const A* from, int64_t n) {
  for_vectors<A>(n, [&](int64_t i, auto lanes) FASTLAYERS_LANES { lanes.store(to + i, lanes.load(from + i)); });
}

// out = x + y, or x·y.
template <typename A, bool PRODUCT>
void combine(A* out, const A* x, const A* y, int64_t n) {
  for_vectors<A>(n, [&](int64_t i, auto lanes) FASTLAYERS_LANES {
    const Vector<A> u = lanes.load(x + i), v = lanes.load(y + i);
    lanes.store(out + i, PRODUCT ? u * v : u + v);
  });
}

template <typename A>
struct Sums {
  A first, squares;
};

constexpr int kApart = 4;  // sums that do not wait for each other
template <typename A>
A total_of(const Total<A> (&t)[kApart]) { return sum_of<A>((t[0].lanes() + t[1].lanes()) + (t[2].lanes() + t[3].lanes())); }

// The sums of the deviations of x from an origin, and of their squares.
template <typename A>
Sums<A> deviations(const A* x, int64_t n, A origin) {
  Total<A> sums[kApart], squares[kApart];
  const auto add = [&](int k, const Vector<A>& v) FASTLAYERS_LANES {
    const Vector<A> d = v - origin;
    sums[k].add(d);
    squares[k].add(d * d);
  };
  int64_t i = 0;
  for (; i + kApart * kLanes<A> <= n; i += kApart * kLanes<A>)
    for (int k = 0; k < kApart; ++k) add(k, load<A>(x + i + k * kLanes<A>));
  for (; i + kLanes<A> <= n; i += kLanes<A>) add(0, load<A>(x + i));
  if (i < n) add(1, load_some<A>(x + i, n - i, origin));
  return {total_of(sums), total_of(squares)};
}

// y = (x - mean)·rstd·weight + bias. weight and bias may be null.
template <typename A>
void normalise(A* y, const A* x, const A* weight, const A* bias, int64_t n, A mean, A rstd) {
  for_vectors<A>(n, [&](int64_t i, auto lanes) FASTLAYERS_LANES {
    Vector<A> v = (lanes.load(x + i) - mean) * rstd;
    if (weight != nullptr) v *= lanes.load(weight + i);
    if (bias != nullptr) v += lanes.load(bias + i);
    lanes.store(y + i, v);
  });
}

// What a row of the backward needs. weight and dsum may be null; dweight and dbias, which are added to, too.
template <typename A>
struct BackwardRow {
  const A *dy, *x, *weight, *dsum;
  A *dx, *dweight, *dbias;
  A mean, rstd;
  A along, level;  // dx = rstd·g + (x - mean)·along + level, for g = dy·weight
};

template <typename A>
void average(BackwardRow<A>& row, int64_t n, bool layer) {
  Total<A> along[kApart], level[kApart];
  const auto add = [&](int k, const Vector<A>& dy, const Vector<A>& x, const Vector<A>& w) FASTLAYERS_LANES {
    const Vector<A> g = dy * w;
    along[k].add(g * ((x - row.mean) * row.rstd));
    level[k].add(g);
  };
  const Vector<A> one = broadcast<A>(1);
  int64_t i = 0;
  for (; i + kApart * kLanes<A> <= n; i += kApart * kLanes<A>) {
    for (int k = 0; k < kApart; ++k) {
      const int64_t at = i + k * kLanes<A>;
      add(k, load<A>(row.dy + at), load<A>(row.x + at), row.weight != nullptr ? load<A>(row.weight + at) : one);
    }
  }
  for (; i < n; i += kLanes<A>) {
    const int64_t left = std::min<int64_t>(n - i, kLanes<A>);
    const Vector<A> w = row.weight != nullptr ? load_some<A>(row.weight + i, left) : one;
    add(0, load_some<A>(row.dy + i, left), load_some<A>(row.x + i, left), w);
  }
  row.along = -total_of(along) / static_cast<A>(n) * row.rstd * row.rstd;
  row.level = layer ? -total_of(level) / static_cast<A>(n) * row.rstd : A(0);
}

// dx = rstd·(g - mean(g) - x̂·mean(g·x̂)) + dsum for R rows. The sums dweight += dy·x̂ and dbias += dy are read and written once for all.
template <typename A, int R>
void gradients(const BackwardRow<A>* rows, int64_t n) {
  const BackwardRow<A>& any = rows[0];
  for_vectors<A>(n, [&](int64_t i, auto lanes) FASTLAYERS_LANES {
    Vector<A> dweight{}, dbias{};
    const Vector<A> w = any.weight != nullptr ? lanes.load(any.weight + i) : broadcast<A>(1);
    for (int r = 0; r < R; ++r) {
      const BackwardRow<A>& row = rows[r];
      const Vector<A> dy = lanes.load(row.dy + i), d = lanes.load(row.x + i) - row.mean;
      Vector<A> dx = dy * w * row.rstd + (d * row.along + row.level);
      if (row.dsum != nullptr) dx += lanes.load(row.dsum + i);
      lanes.store(row.dx + i, dx);
      dweight += dy * (d * row.rstd);
      dbias += dy;
    }
    if (any.dweight != nullptr) lanes.store(any.dweight + i, lanes.load(any.dweight + i) + dweight);
    if (any.dbias != nullptr) lanes.store(any.dbias + i, lanes.load(any.dbias + i) + dbias);
  });
}

// ---- rows of any dtype --------------------------------------------------------------------------------------------------

// A tensor of rows, each read or written in the type of the arithmetic: in place where it has that, else by way of a thread's memory.
template <typename A>
struct Rows {
  void* data = nullptr;
  ScalarType dtype = ScalarType::Undefined;
  int64_t n = 0;

  Rows() = default;
  Rows(const Tensor& t, int64_t columns) : data(const_cast<void*>(t.const_data_ptr())), dtype(t.scalar_type()), n(columns) {}
  Rows(const MaybeTensor& t, int64_t columns) {
    if (t) *this = Rows(*t, columns);
  }
  explicit operator bool() const { return data != nullptr; }
  bool direct() const { return data == nullptr || dtype == (sizeof(A) == 8 ? ScalarType::Double : ScalarType::Float); }

  const A* read(int64_t row, A* memory) const {
    if (data == nullptr) return nullptr;
    if (direct()) return static_cast<A*>(data) + row * n;
    with_narrow([&]<typename T>(T) {
      widen<T>(memory, static_cast<const T*>(data) + row * n, n);
    });
    return memory;
  }
  // Where to write a row, before `written` says that it is there.
  A* place(int64_t row, A* memory) const { return direct() ? static_cast<A*>(data) + row * n : memory; }
  void written(int64_t row, const A* memory) const {
    if (direct()) return;
    with_narrow([&]<typename T>(T) {
      narrow<T>(static_cast<T*>(data) + row * n, memory, n);
    });
  }

 private:
  template <typename F>
  void with_narrow(F&& f) const {
    if constexpr (sizeof(A) == 4) {
      if (dtype == ScalarType::Half) f(c10::Half{});
      else f(c10::BFloat16{});
    }
  }
};

template <typename T>
void round_as(float* values, int64_t n) {
  constexpr int64_t kSome = 256;
  T some[kSome];
  for (int64_t i = 0; i < n; i += kSome) {
    const int64_t count = std::min(kSome, n - i);
    narrow<T>(some, values + i, count);
    widen<T>(values + i, some, count);
  }
}

// Rounds values of the arithmetic to a dtype.
template <typename A>
void round_to(ScalarType dtype, A* values, int64_t n) {
  if constexpr (sizeof(A) == 4) {
    if (dtype == ScalarType::Half) round_as<c10::Half>(values, n);
    if (dtype == ScalarType::BFloat16) round_as<c10::BFloat16>(values, n);
  }
}

// Rows of n elements to a task.
int64_t grain_of(int64_t n) { return std::max<int64_t>(1, kGrain / n); }

// The weight of a row in the arithmetic, with what gemma adds to it; null where there is none.
template <typename A>
const A* weight_row(const MaybeTensor& weight, int64_t n, int64_t kind, std::vector<A>& memory) {
  if (!weight) return nullptr;
  memory.resize(n);
  const A* from = Rows<A>(weight, n).read(0, memory.data());
  if (kind != kGemma) return from;
  for (int64_t i = 0; i < n; ++i) memory[i] = from[i] + A(1);
  return memory.data();
}

// ---- ops ----------------------------------------------------------------------------------------------------------------

std::tuple<Tensor, Tensor, Tensor> forward_op(const char* op, const Tensor& x_in, const MaybeTensor& residual_in,
                                              const MaybeTensor& weight_in, const MaybeTensor& bias_in, int64_t dims, double eps,
                                              int64_t kind, ScalarType dtype, bool keep) {
  const Shape s(x_in, dims, op);
  check_kind(kind, bias_in.has_value(), op);
  check_parameter(weight_in, x_in, s.n, op, "weight");
  check_parameter(bias_in, x_in, s.n, op, "bias");
  if (residual_in) check_same_sizes(x_in, *residual_in, op, "residual");
  const Tensor x = made_contiguous(x_in);
  const MaybeTensor residual = made_contiguous(residual_in), weight = made_contiguous(weight_in), bias = made_contiguous(bias_in);
  const bool layer = kind == kLayer;
  const ScalarType summed = residual ? residual->scalar_type() : x.scalar_type();
  Tensor y = empty_result(x, dtype);
  Tensor stats = empty_stats(keep, kind, s, x);
  const Tensor sum = residual ? empty_result(x, summed) : x;
  if (s.empty()) return {y, sum, stats};
  const auto run = [&]<typename A>(A zero) {
    std::vector<A> of_weight, of_bias;
    const A* w = weight_row(weight, s.n, kind, of_weight);
    const A* b = weight_row(bias, s.n, kLayer, of_bias);
    // Llama rounds before the product with the weight, and the product to the dtype that its factors promote to.
    const bool rounds = kind == kLlama && weight && is_low_precision(summed);
    const bool rounds_product = rounds && dtype != summed && weight->scalar_type() == summed;
    const Rows<A> in(x, s.n), more(residual, s.n), total_rows(sum, s.n), out(y, s.n);
    A* kept = keep ? pointer<A>(stats) : nullptr;
    torch::stable::parallel_for(0, s.rows, grain_of(s.n), [&](int64_t first, int64_t last) {
      const bool converts = !(in.direct() && out.direct() && more.direct() && total_rows.direct());
      std::vector<A> memory(converts ? 3 * s.n : 0);
      A *const one = memory.data(), *const two = one + (converts ? s.n : 0), *const three = two + (converts ? s.n : 0);
      for (int64_t row = first; row < last; ++row) {
        const A* v = in.read(row, one);
        if (more) {
          A* to = total_rows.place(row, two);
          combine<A, false>(to, v, more.read(row, three), s.n);
          total_rows.written(row, to);
          v = total_rows.read(row, to);  // as it was rounded
        }
        const A n = static_cast<A>(s.n);
        // From the first element and then from the mean: a mean far from zero costs no digits, and equal elements are the mean.
        A mean = layer ? v[0] + deviations<A>(v, s.n, v[0]).first / n : A(0);
        const Sums<A> sums = deviations<A>(v, s.n, mean);
        A square = sums.squares;
        if (layer) square -= sums.first * sums.first / n, mean += sums.first / n;
        const A rstd = A(1) / std::sqrt(std::max(square, A(0)) / n + static_cast<A>(eps));
        A* to = out.place(row, one);
        normalise<A>(to, v, rounds ? nullptr : w, b, s.n, mean, rstd);
        if (rounds) {
          round_to(summed, to, s.n);
          combine<A, true>(to, to, w, s.n);
          if (rounds_product) round_to(summed, to, s.n);
        }
        out.written(row, to);
        if (kept == nullptr) continue;
        if (layer) kept[row] = mean;
        kept[(layer ? s.rows : 0) + row] = rstd;
      }
    });
  };
  if (x.scalar_type() == ScalarType::Double) run(double{});
  else run(float{});
  return {y, sum, stats};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& dy_in, const MaybeTensor& dsum_in, const Tensor& x_in,
                                                               int64_t dims, const MaybeTensor& weight_in, const Tensor& stats_in,
                                                               int64_t kind, bool for_weight, bool for_bias,
                                                               std::optional<ScalarType> narrow_dtype) {
  const char* op = "layer_norm_backward";
  const Shape s(x_in, dims, op);
  check_backward(dy_in, x_in, stats_in, kind, s, op);
  if (dsum_in) check_same_sizes(x_in, *dsum_in, op, "dsum");
  check_parameter(weight_in, x_in, s.n, op, "weight");
  FASTLAYERS_CHECK(!narrow_dtype, op, "a narrow gradient is for a GPU");
  const bool layer = kind == kLayer;
  const Tensor x = made_contiguous(x_in), dy = made_contiguous(dy_in), stats = made_contiguous(stats_in);
  const MaybeTensor dsum = made_contiguous(dsum_in), weight = made_contiguous(weight_in);
  WeightGradients wanted(x, weight, s.n, for_weight, for_bias);
  const bool want_weight = wanted.want_weight, want_bias = wanted.want_bias;
  Tensor dx = empty_result(x, x.scalar_type());
  const Tensor none = empty_contiguous({0}, x.scalar_type(), x);
  if (s.empty()) {
    wanted.zero();
    return {dx, wanted.dweight, wanted.dbias, none};
  }
  const auto run = [&]<typename A>(A) {
    std::vector<A> of_weight;
    const A* w = weight_row(weight, s.n, kind, of_weight);
    const A* kept = pointer<const A>(stats);
    const Rows<A> of_dy(dy, s.n), of_x(x, s.n), of_dsum(dsum, s.n), of_dx(dx, s.n);
    // Each task has rows and sums of its own, which are added up in the order of the tasks: the same for as many threads.
    const int64_t most = std::max<int64_t>(1, s.rows / grain_of(s.n));
    const int64_t tasks = std::min<int64_t>(torch::stable::get_num_threads(), most), each = (s.rows + tasks - 1) / tasks;
    const int arrays = int{want_weight} + int{want_bias};
    std::vector<A> sums(tasks * arrays * s.n);
    const auto sums_of = [&](int64_t task, bool bias) { return sums.data() + (task * arrays + int{bias && want_weight}) * s.n; };
    torch::stable::parallel_for(0, tasks, 1, [&](int64_t first, int64_t last) {
      constexpr int R = 4, kAtOnce = 64;  // rows at a time, and rows whose sums are added to those of the task
      const bool converts = !(of_dy.direct() && of_x.direct() && of_dsum.direct() && of_dx.direct());
      const int64_t own_size = converts ? s.n : 0;  // of each row that a thread has in memory of its own
      std::vector<A> memory(R * 4 * own_size + arrays * s.n);
      A* const some = memory.data() + R * 4 * own_size;
      for (int64_t task = first; task < last; ++task) {
        const int64_t end = std::min(s.rows, (task + 1) * each);
        for (int64_t start = task * each; start < end; start += R) {
          BackwardRow<A> rows[R];
          if ((start - task * each) % kAtOnce == 0) std::fill(some, some + arrays * s.n, A(0));
          const int count = static_cast<int>(std::min<int64_t>(R, end - start));
          for (int i = 0; i < count; ++i) {
            BackwardRow<A>& r = rows[i];
            A* const own = memory.data() + i * 4 * own_size;
            const int64_t row = start + i;
            r.dy = of_dy.read(row, own), r.x = of_x.read(row, own + own_size), r.dsum = of_dsum.read(row, own + 2 * own_size);
            r.dx = of_dx.place(row, own + 3 * own_size), r.weight = w;
            r.dweight = want_weight ? some : nullptr, r.dbias = want_bias ? some + (arrays - 1) * s.n : nullptr;
            r.mean = layer ? kept[row] : A(0);
            r.rstd = layer && s.n == 1 ? A(0) : kept[(layer ? s.rows : 0) + row];  // one element is its mean: exactly no gradient
            average(r, s.n, layer);
          }
          if (count == R) gradients<A, R>(rows, s.n);
          else
            for (int i = 0; i < count; ++i) gradients<A, 1>(rows + i, s.n);
          for (int i = 0; i < count; ++i) of_dx.written(start + i, rows[i].dx);
          const bool last_of_some = (start + R - task * each) % kAtOnce == 0 || start + R >= end;
          A* const all = sums_of(task, false);
          if (last_of_some && arrays > 0) combine<A, false>(all, all, some, arrays * s.n);
        }
      }
    });
    const auto add_up = [&](const Tensor& to, bool bias) {
      A* all = sums_of(0, bias);
      for (int64_t task = 1; task < tasks; ++task) combine<A, false>(all, all, sums_of(task, bias), s.n);
      const Rows<A> out(to, s.n);
      if (out.direct()) std::memcpy(pointer<A>(to), all, s.n * sizeof(A));
      else out.written(0, all);
    };
    if (want_weight) add_up(wanted.dweight, false);
    if (want_bias) add_up(wanted.dbias, true);
  };
  if (x.scalar_type() == ScalarType::Double) run(double{});
  else run(float{});
  return {dx, wanted.dweight, wanted.dbias, none};
}

}  // namespace
}  // namespace fastlayers::layer_norm

FASTLAYERS_CPU_KERNELS(layer_norm, m) {
  using fastlayers::layer_norm::forward_op;
  m.impl("layer_norm_forward", TORCH_BOX(&fastlayers::layer_norm_forward_op<forward_op>));
  m.impl("add_layer_norm_forward", TORCH_BOX(&fastlayers::add_layer_norm_forward_op<forward_op>));
  m.impl("layer_norm_backward", TORCH_BOX(&fastlayers::layer_norm::layer_norm_backward));
}

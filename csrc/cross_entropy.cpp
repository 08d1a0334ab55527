// cross_entropy of logits and classes for CPU tensors. As on a GPU (cross_entropy.cuh, which explains what is kept) the forward reads the
// logits once, online, and the backward reads them once and writes their gradient, where torch writes log_softmax, reads it again and
// fills a tensor of zeros of its size. Ignored rows are not read. A chunk of linear_cross_entropy computes the gradient of a row while
// the row is in the cache.
//
//   rows     classes are contiguous: vectors go along a row.
//   columns  classes are strided: vectors go across the rows, some hundred of them at a time. Of few classes a vector would be mostly
//            empty along a row, so that a tile of rows is transposed first.
#include "cross_entropy.h"

#include "vector_logits.h"

namespace fastlayers::cross_entropy {
namespace {

constexpr int64_t kFewClasses = 32;
constexpr int64_t kFewRows = 128;      // of a transposed tile
constexpr int64_t kFewStride = 128 + 16;  // of its classes: as a power of two it would be their distance in the cache
constexpr int64_t kFewColumns = 128;  // in so few neighbouring rows the last vector, which is not whole, takes its time

// ---- scalars of a dtype that only the host knows ------------------------------------------------------------------------

double load_scalar(const void* p, int64_t i, ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Half: return static_cast<const c10::Half*>(p)[i];
    case ScalarType::BFloat16: return static_cast<const c10::BFloat16*>(p)[i];
    case ScalarType::Float: return static_cast<const float*>(p)[i];
    default: return static_cast<const double*>(p)[i];
  }
}

template <typename A>
void store_scalar(void* p, int64_t i, ScalarType dtype, A v) {
  switch (dtype) {
    case ScalarType::Half: static_cast<c10::Half*>(p)[i] = static_cast<c10::Half>(v); break;
    case ScalarType::BFloat16: static_cast<c10::BFloat16*>(p)[i] = static_cast<c10::BFloat16>(v); break;
    case ScalarType::Float: static_cast<float*>(p)[i] = static_cast<float>(v); break;
    default: static_cast<double*>(p)[i] = static_cast<double>(v);
  }
}

// ---- scores, losses, gradients ------------------------------------------------------------------------------------------

template <typename A>
struct Terms {
  const int64_t* target;
  const A* weight;  // of each class, or null
  A all_weights;    // their sum
  int64_t ignore_index, classes;
  A smoothing, softcap, z_loss;  // softcap 0: none

  int64_t target_of(int64_t row) const { return target[row] == ignore_index ? -1 : target[row]; }
  A weight_of(int64_t c) const { return weight == nullptr ? A(1) : weight[c]; }
  // What smoothing adds to the gradient of a class with weight 1.
  A uniform() const { return smoothing / static_cast<A>(classes); }
};

template <typename A>
FASTLAYERS_CALLED Vector<A> capped(const Vector<A>& v, A softcap) { return tanh<A>(v / softcap) * softcap; }

// PLAIN: there is neither softcap nor label smoothing.
template <bool PLAIN, typename A>
FASTLAYERS_INLINE Vector<A> score_of(const Vector<A>& v, const Terms<A>& terms) {
  if constexpr (PLAIN) return v;
  else return terms.softcap == A(0) ? v : capped<A>(v, terms.softcap);
}

// lse of a row: base + rest.
template <typename A>
struct Level {
  A base, rest;
};

// The loss of a row with this level whose class t has this score; linear is the weighted sum of all scores.
template <typename A>
A loss_of(const Level<A>& level, A score, A linear, int64_t t, const Terms<A>& terms) {
  const A lse = level.base + level.rest;
  A loss = (A(1) - terms.smoothing) * terms.weight_of(t) * ((level.base - score) + level.rest);
  if (terms.smoothing != A(0)) loss += terms.uniform() * (terms.all_weights * lse - linear);
  return terms.z_loss == A(0) ? loss : loss + terms.z_loss * lse * lse;
}

// The gradient of a row: exp(score - lse)·factor, less `uniform` times the weight of each class, less `hit` at the class of the row.
template <typename A>
struct Slope {
  Level<A> level;
  A factor, uniform, hit;

  static Slope find(Level<A> level, A scale, int64_t t, const Terms<A>& terms) {
    const A hit = (A(1) - terms.smoothing) * terms.weight_of(t);
    A factor = hit;
    if (terms.smoothing != A(0)) factor += terms.uniform() * terms.all_weights;
    if (terms.z_loss != A(0)) factor += A(2) * terms.z_loss * (level.base + level.rest);
    return {level, factor * scale, terms.uniform() * scale, hit * scale};
  }
};

// The gradient by logits v, with everything else a number or a vector. `weight` is that of the classes.
template <bool PLAIN, typename A, typename B>
FASTLAYERS_INLINE Vector<A> gradient_of(const Vector<A>& v, const B& base, const B& rest, const B& factor, const B& hit,
                                        const Vector<A>& uniform, const Terms<A>& terms) {
  const Vector<A> score = score_of<PLAIN, A>(v, terms);
  Vector<A> d = exp_below_0<A>((score - base) - rest) * factor - hit;
  if constexpr (!PLAIN) {
    d -= uniform;
    if (terms.softcap != A(0)) {
      const Vector<A> slope = score / terms.softcap;
      d *= A(1) - slope * slope;
    }
  }
  return d;
}

// ---- rows ---------------------------------------------------------------------------------------------------------------

// What a row adds up; linear is the weighted sum of its scores, for label smoothing.
template <typename A>
struct Sums {
  Exponentials<A> exponentials;
  A linear;
};

template <bool PLAIN, typename T, typename A = compute_t<T>>
FASTLAYERS_CALLED Sums<A> sums_of(const T* x, const Terms<A>& terms) {
  LanesOfExponentials<A> sums;
  Vector<A> linear{};
  for_scores<A>(
      terms.classes,
      [&](int64_t i, auto lanes) FASTLAYERS_LANES {
        const Vector<A> v = score_of<PLAIN, A>(lanes.load(x + i), terms);
        if constexpr (!PLAIN) {
          if (terms.smoothing != A(0)) linear += terms.weight == nullptr ? v : v * lanes.load(terms.weight + i);
        }
        return v;
      },
      [&](const auto& v) FASTLAYERS_LANES { sums.add(v); });
  return {sums.merged(), PLAIN ? A(0) : sum_of<A>(linear)};
}

// dx may be x.
template <bool PLAIN, typename T, typename A = compute_t<T>>
FASTLAYERS_CALLED void backward_row(T* dx, const T* x, int64_t t, const Slope<A>& s, const Terms<A>& terms) {
  const A base = s.level.base, rest = s.level.rest, factor = s.factor;
  const Vector<A> own = broadcast<A>(static_cast<A>(x[t])), own_uniform = broadcast<A>(s.uniform * terms.weight_of(t));
  const A at_target = gradient_of<PLAIN, A>(own, base, rest, factor, s.hit, own_uniform, terms)[0];
  for_vectors<A>(terms.classes, [&](int64_t i, auto lanes) FASTLAYERS_LANES {
    Vector<A> uniform{};
    if constexpr (!PLAIN) uniform = terms.weight == nullptr ? broadcast<A>(s.uniform) : lanes.load(terms.weight + i) * s.uniform;
    lanes.store(dx + i, gradient_of<PLAIN, A>(lanes.load(x + i), base, rest, factor, A(0), uniform, terms));
  });
  dx[t] = static_cast<T>(at_target);
}

template <typename A>
struct Losses {
  void* data;
  ScalarType dtype;
  A* stats;  // the bases of the levels of all rows, then the rests; may be null
  int64_t rows;

  void write(int64_t row, A loss, const Level<A>& level) const {
    store_scalar(data, row, dtype, loss);
    if (stats == nullptr) return;
    stats[row] = level.base;
    stats[rows + row] = level.rest;
  }
};

// The factor from the losses to the result: one number, or one for each row.
template <typename A>
struct Scale {
  const void* data;  // null: 1
  ScalarType dtype;
  bool each_row;
  A divisor;

  A of(int64_t row) const { return data == nullptr ? A(1) : static_cast<A>(load_scalar(data, each_row ? row : 0, dtype)) / divisor; }
};

// The sums of a tile of rows, and the logits of their classes.
template <typename A>
struct Tile {
  A m[kTile], s[kTile], linear[kTile], own[kTile];
};

template <bool PLAIN, typename A>
FASTLAYERS_CALLED void finish(Tile<A>& tile, int64_t row, int64_t width, const Losses<A>& losses, const Terms<A>& terms) {
  for (int64_t j = 0; j < width; j += kLanes<A>) {
    const Vector<A> sum = load<A>(tile.s + j);
    store<A>(tile.s + j, sum == A(0) ? broadcast<A>(-std::numeric_limits<A>::infinity()) : log<A>(sum));
    store<A>(tile.own + j, score_of<PLAIN, A>(load<A>(tile.own + j), terms));
  }
  for (int64_t j = 0; j < width; ++j) {
    const int64_t t = terms.target_of(row + j);
    const Level<A> level{tile.m[j], tile.s[j]};
    losses.write(row + j, t < 0 ? A(0) : loss_of(level, tile.own[j], PLAIN ? A(0) : tile.linear[j], t, terms), level);
  }
}

template <typename T, bool PLAIN, typename A = compute_t<T>>
void forward_rows(const T* x, int64_t stride, const Losses<A>& losses, const Terms<A>& terms, int64_t first,
                  int64_t last) {
  Tile<A> tile;
  for (; first < last; first += kTile) {
    const int64_t width = std::min(kTile, last - first);
    for (int64_t j = 0; j < width; ++j) {
      const int64_t t = terms.target_of(first + j);
      const T* row = x + (first + j) * stride;
      Sums<A> sums{};
      if (t >= 0) sums = sums_of<PLAIN>(row, terms);
      tile.m[j] = sums.exponentials.m;
      tile.s[j] = sums.exponentials.s;
      tile.linear[j] = sums.linear;
      tile.own[j] = t < 0 ? A(0) : static_cast<A>(row[t]);
    }
    finish<PLAIN>(tile, first, width, losses, terms);
  }
}

template <typename T, bool PLAIN, typename A = compute_t<T>>
void backward_rows(T* dx, int64_t dx_stride, const T* x, int64_t stride, const A* stats, int64_t rows,
                   const Scale<A>& scale, const Terms<A>& terms, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) {
    const int64_t t = terms.target_of(row);
    T* to = dx + row * dx_stride;
    if (t < 0) std::fill_n(to, terms.classes, static_cast<T>(0));
    else backward_row<PLAIN>(to, x + row * stride, t, Slope<A>::find({stats[row], stats[rows + row]}, scale.of(row), t, terms), terms);
  }
}

// Losses and, over the logits, their gradient; over what pads a row, zeros.
template <typename T, bool PLAIN, typename A = compute_t<T>>
void chunk_rows(T* x, int64_t padded, const Losses<A>& losses, const Scale<A>& scale, const Terms<A>& terms,
                int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) {
    const int64_t t = terms.target_of(row);
    T* here = x + row * padded;
    Level<A> level{};
    A loss = 0;
    if (t >= 0) {
      const Sums<A> sums = sums_of<PLAIN, T>(here, terms);
      const A score = score_of<PLAIN, A>(broadcast<A>(static_cast<A>(here[t])), terms)[0];
      level = {sums.exponentials.m, std::log(sums.exponentials.s)};
      loss = loss_of(level, score, sums.linear, t, terms);
      backward_row<PLAIN, T>(here, here, t, Slope<A>::find(level, scale.of(row), t, terms), terms);
    }
    const int64_t kept = t < 0 ? 0 : terms.classes;
    std::fill_n(here + kept, padded - kept, static_cast<T>(0));
    losses.write(row, loss, level);
  }
}

// ---- columns ------------------------------------------------------------------------------------------------------------

// Losses of `width` rows from `row` on, whose first logits are at x and whose classes are `inner` apart.
template <typename T, bool PLAIN, typename A = compute_t<T>>
void forward_columns(const T* x, int64_t inner, int64_t row, int64_t width, const Losses<A>& losses,
                     const Terms<A>& terms) {
  Tile<A> tile;
  add_down(tile.m, tile.s, terms.classes, width, [&](int64_t c, int64_t j, const Part<A>& lanes) FASTLAYERS_LANES {
    const Vector<A> v = score_of<PLAIN, A>(lanes.load(x + c * inner + j), terms), weighted = v * terms.weight_of(c);
    if constexpr (!PLAIN) store<A>(tile.linear + j, c == 0 ? weighted : load<A>(tile.linear + j) + weighted);
    return v;
  });
  for (int64_t j = 0; j < width; ++j) {
    const int64_t t = terms.target_of(row + j);
    tile.own[j] = t < 0 ? A(0) : static_cast<A>(x[t * inner + j]);
  }
  finish<PLAIN>(tile, row, width, losses, terms);
}

template <typename T, bool PLAIN, typename A = compute_t<T>>
void backward_columns(T* dx, const T* x, int64_t inner, int64_t row, int64_t width, const A* stats, int64_t rows,
                      const Scale<A>& scale, const Terms<A>& terms) {
  A base[kTile], rest[kTile], factor[kTile], hit[kTile], uniform[kTile];
  whole_t<A> classes[kTile];
  for (int64_t j = 0; j < width; ++j) {
    const int64_t t = terms.target_of(row + j);
    Slope<A> slope{};
    if (t >= 0) slope = Slope<A>::find({stats[row + j], stats[rows + row + j]}, scale.of(row + j), t, terms);
    classes[j] = static_cast<whole_t<A>>(t);
    base[j] = slope.level.base;
    rest[j] = slope.level.rest;
    factor[j] = slope.factor;
    hit[j] = slope.hit;
    uniform[j] = slope.uniform;
  }
  for (int64_t c = 0; c < terms.classes; ++c) {
    const whole_t<A> own = static_cast<whole_t<A>>(c);
    const A weight = terms.weight_of(c);
    for_parts<A>(width, [&](int64_t j, const Part<A>& lanes) FASTLAYERS_LANES {
      WholeVector<A> of_rows;
      std::memcpy(&of_rows, classes + j, sizeof(of_rows));
      const Vector<A> zero{}, at_target = of_rows == own ? load<A>(hit + j) : zero;
      const Vector<A> d = gradient_of<PLAIN, A>(lanes.load(x + c * inner + j), load<A>(base + j), load<A>(rest + j), load<A>(factor + j),
                                                at_target, PLAIN ? zero : load<A>(uniform + j) * weight, terms);
      lanes.store(dx + c * inner + j, of_rows < 0 ? zero : d);
    });
  }
}

// A tile of rows with few classes, transposed: class by class.
template <typename T>
struct Transposed {
  T values[kFewStride * kFewClasses];

  // From where classes are `step` apart, and place(j) is that of row j.
  template <typename Place>
  void read(const T* x, int64_t classes, int64_t step, int64_t width, Place&& place) {
    for (int64_t j = 0; j < width; ++j) {
      const T* from = x + place(j);
      for (int64_t c = 0; c < classes; ++c) values[c * kFewStride + j] = from[c * step];
    }
  }
  template <typename Place>
  void write(T* x, int64_t classes, int64_t step, int64_t width, Place&& place) const {
    for (int64_t j = 0; j < width; ++j) {
      T* to = x + place(j);
      for (int64_t c = 0; c < classes; ++c) to[c * step] = values[c * kFewStride + j];
    }
  }
};

// ---- the sum of all losses ----------------------------------------------------------------------------------------------

template <typename A>
A sum_stretch(const A* values, int64_t n) {
  Total<A> total;
  for_vectors<A>(n, [&](int64_t i, auto lanes) FASTLAYERS_LANES { total.add(lanes.load(values + i)); });
  return total.sum();
}

int64_t count_kept(const int64_t* target, int64_t n, int64_t ignore_index) {
  int64_t kept = 0;
  for (int64_t i = 0; i < n; ++i) kept += target[i] != ignore_index;
  return kept;
}

int64_t count_wrong(const int64_t* target, int64_t n, int64_t ignore_index, int64_t classes) {
  int64_t wrong = 0;
  for (int64_t i = 0; i < n; ++i) wrong += (target[i] != ignore_index) & (static_cast<uint64_t>(target[i]) >= static_cast<uint64_t>(classes));
  return wrong;
}

// What a mean divides by.
template <typename A>
double divisor_of(const Terms<A>& terms, int64_t rows) {
  return sum_in_stretches(rows, [&](int64_t first, int64_t last) -> double {
    if (terms.weight == nullptr) return static_cast<double>(count_kept(terms.target + first, last - first, terms.ignore_index));
    double sum = 0;
    for (int64_t row = first; row < last; ++row)
      if (const int64_t t = terms.target_of(row); t >= 0) sum += terms.weight[t];
    return sum;
  });
}

// ---- host ---------------------------------------------------------------------------------------------------------------

int64_t class_stride(const Logits& logits) { return logits.rows ? 1 : logits.inner; }
// Whether tiles are transposed.
bool has_few(const Logits& logits) { return logits.n <= kFewClasses && (logits.rows || logits.inner < kFewColumns); }

// f(first, last) for some of the rows.
template <typename F>
void for_rows(const Logits& logits, F&& f) {
  torch::stable::parallel_for(0, logits.count(), std::max<int64_t>(1, kGrain / logits.n), f);
}
// f(row, width) for a tile of rows of few classes.
template <typename F>
void for_few(const Logits& logits, F&& f) {
  const int64_t rows = logits.count(), tiles = (rows + kFewRows - 1) / kFewRows;
  torch::stable::parallel_for(0, tiles, std::max<int64_t>(1, kGrain / (logits.n * kFewRows)), [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) f(i * kFewRows, std::min(kFewRows, rows - i * kFewRows));
  });
}
// The place of the first logit of row + j, for rows that have a stride or lie between each other's classes.
auto places(const Logits& logits, int64_t row, int64_t row_stride) {
  return [=, rows = logits.rows, n = logits.n, inner = logits.inner](int64_t j) {
    return rows ? (row + j) * row_stride : (row + j) / inner * n * inner + (row + j) % inner;
  };
}

// The terms of a loss, with the contiguous targets that they point to.
template <typename A>
struct Context {
  Tensor target;
  Terms<A> terms;

  Context(const Tensor& given, const MaybeTensor& weight, const Options& o, int64_t rows, int64_t classes, const Tensor& x, const char* op)
      : target(checked_target(given, rows, x, op)) {
    FASTLAYERS_CHECK(classes > 0 && classes <= INT32_MAX, op, "cannot take logits of ", classes, " classes");
    terms = {pointer<const int64_t>(target), checked_weight<A>(weight, classes, x, op), static_cast<A>(classes), o.ignore_index, classes,
             static_cast<A>(o.label_smoothing), static_cast<A>(o.softcap), static_cast<A>(o.z_loss)};
    if (count_wrong(terms.target, rows, o.ignore_index, classes) > 0) {
      const int64_t* wrong = terms.target;
      while (*wrong == o.ignore_index || (*wrong >= 0 && *wrong < classes)) ++wrong;
      FASTLAYERS_CHECK(false, op, "Target ", *wrong, " is out of bounds.");
    }
    if (terms.weight == nullptr) return;
    terms.all_weights = static_cast<A>(sum_in_stretches(classes, [&](int64_t first, int64_t last) -> double {
      return sum_stretch<A>(terms.weight + first, last - first);
    }));
  }
  explicit Context(const Call& call) : Context(call.target, call.weight, call.options, call.rows(), call.logits.n, call.logits.x, call.op) {}

  // f(std::true_type) where there is neither softcap nor label smoothing, unless kernels of A are compact.
  template <typename F>
  void with_plain(F&& f) const {
    if constexpr (!kCompact<A>)
      if (terms.softcap == A(0) && terms.smoothing == A(0)) return f(std::true_type{});
    f(std::false_type{});
  }
};

void write_losses(const Call& call, const Tensor& losses, const Tensor& stats, const Tensor& loss) {
  const Logits& logits = call.logits;
  const int64_t rows = call.rows();
  dispatch_floating(logits.x.scalar_type(), call.op, [&]<typename T>(T) {
    using A = compute_t<T>;
    const Context<A> context(call);
    const Terms<A>& terms = context.terms;
    A* numbers = pointer<A>(stats);
    const T* x = pointer<const T>(logits.x);
    const Losses<A> to{losses.mutable_data_ptr(), losses.scalar_type(), numbers, rows};
    context.with_plain([&]<bool PLAIN>(std::bool_constant<PLAIN>) {
      if (has_few(logits))
        for_few(logits, [&](int64_t row, int64_t width) {
          Transposed<T> tile;
          tile.read(x, logits.n, class_stride(logits), width, places(logits, row, logits.stride));
          forward_columns<T, PLAIN>(tile.values, kFewStride, row, width, to, terms);
        });
      else if (logits.rows)
        for_rows(logits, [&](int64_t first, int64_t last) { forward_rows<T, PLAIN>(x, logits.stride, to, terms, first, last); });
      else
        for_tiles(logits, [&](int64_t row, int64_t place, int64_t width) {
          forward_columns<T, PLAIN>(x + place, logits.inner, row, width, to, terms);
        });
    });
    numbers[2 * rows] = A(1);
    numbers[2 * rows + 1] = terms.all_weights;
    if (call.each_row()) return;
    const A* parts = pointer<const A>(losses);
    double sum = sum_in_stretches(rows, [&](int64_t first, int64_t last) -> double { return sum_stretch<A>(parts + first, last - first); });
    if (call.reduction == Reduction::mean) {
      const double divisor = divisor_of(terms, rows);
      numbers[2 * rows] = static_cast<A>(divisor);
      sum /= divisor;
    }
    store_scalar(loss.mutable_data_ptr(), 0, loss.scalar_type(), static_cast<A>(sum));
  });
}

void write_gradient(const Call& call, const Tensor& dy, const Tensor& stats, const Tensor& dx) {
  const Logits& logits = call.logits;
  const int64_t rows = call.rows();
  dispatch_floating(logits.x.scalar_type(), call.op, [&]<typename T>(T) {
    using A = compute_t<T>;
    const Context<A> context(call);
    const Terms<A>& terms = context.terms;
    const A* numbers = pointer<const A>(stats);
    const Scale<A> scale{dy.const_data_ptr(), dy.scalar_type(), call.each_row(), numbers[2 * rows]};
    const T* x = pointer<const T>(logits.x);
    T* to = pointer<T>(dx);
    const int64_t stride = to == x ? logits.stride : logits.n;
    context.with_plain([&]<bool PLAIN>(std::bool_constant<PLAIN>) {
      if (has_few(logits))
        for_few(logits, [&](int64_t row, int64_t width) {
          Transposed<T> tile;
          tile.read(x, logits.n, class_stride(logits), width, places(logits, row, logits.stride));
          backward_columns<T, PLAIN>(tile.values, tile.values, kFewStride, row, width, numbers, rows, scale, terms);
          tile.write(to, logits.n, class_stride(logits), width, places(logits, row, stride));
        });
      else if (logits.rows)
        for_rows(logits, [&](int64_t first, int64_t last) {
          backward_rows<T, PLAIN>(to, stride, x, logits.stride, numbers, rows, scale, terms, first, last);
        });
      else
        for_tiles(logits, [&](int64_t row, int64_t place, int64_t width) {
          backward_columns<T, PLAIN>(to + place, x + place, logits.inner, row, width, numbers, rows, scale, terms);
        });
    });
  });
}

Tensor cross_entropy_chunk_(Tensor logits, const Tensor& target, const MaybeTensor& weight, int64_t ignore_index, double label_smoothing,
                            double softcap, double z_loss, const MaybeTensor& grad_scale, bool want_grad, int64_t columns) {
  const char* op = "cross_entropy_chunk_";
  check_chunk(logits, columns, grad_scale, op);
  const int64_t rows = logits.size(0), padded = logits.size(1);
  const ScalarType wide = compute_dtype(logits);
  Tensor losses = empty_contiguous({rows}, wide, logits);
  if (rows == 0) return losses;
  dispatch_floating(logits.scalar_type(), op, [&]<typename T>(T) {
    using A = compute_t<T>;
    const Context<A> context(target, weight, {ignore_index, label_smoothing, softcap, z_loss}, rows, columns, logits, op);
    const Scale<A> scale{pointer<const void>(grad_scale), wide, grad_scale && grad_scale->numel() > 1, A(1)};
    const Losses<A> to{losses.mutable_data_ptr(), wide, nullptr, rows};
    context.with_plain([&]<bool PLAIN>(std::bool_constant<PLAIN>) {
      torch::stable::parallel_for(0, rows, std::max<int64_t>(1, kGrain / padded), [&](int64_t first, int64_t last) {
        if (want_grad) chunk_rows<T, PLAIN>(pointer<T>(logits), padded, to, scale, context.terms, first, last);
        else forward_rows<T, PLAIN>(pointer<const T>(logits), padded, to, context.terms, first, last);
      });
    });
  });
  return losses;
}

}  // namespace
}  // namespace fastlayers::cross_entropy

FASTLAYERS_CPU_KERNELS(cross_entropy, m) {
  using namespace fastlayers::cross_entropy;
  m.impl("cross_entropy_forward", TORCH_BOX(&fastlayers::cross_entropy_forward_op<write_losses>));
  m.impl("cross_entropy_backward", TORCH_BOX(&fastlayers::cross_entropy_backward_op<write_gradient>));
  m.impl("cross_entropy_backward_", TORCH_BOX(&fastlayers::cross_entropy_backward_in_place_op<write_gradient>));
  m.impl("cross_entropy_chunk_", TORCH_BOX(&cross_entropy_chunk_));
}

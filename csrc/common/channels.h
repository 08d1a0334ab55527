// What the norms over channels of a CPU share: (N, C, *) tensors as pieces of memory, and the loops over a piece.
//
// A piece is a matrix. Channels last its columns are the channels, several pixels side by side where they are few, and each column has
// values of its own. A contiguous plane has one channel; it is cut into rows of kAcross elements, and all columns have its values.
// Pieces do not depend on the number of threads, and what they found is merged in their order: results are equal to the bit.
#pragma once

#include <memory>

#include "channel_layout.h"
#include "vector_activations.h"

namespace fastlayers {
namespace {

constexpr int64_t kAcross = 64;       // columns of a contiguous plane
constexpr int64_t kPiece = 1 << 13;   // elements of a piece, 32 KiB of float32: it is read twice, the second time from the cache
constexpr int64_t kLeastRows = 32;    // of a piece that is channels last
constexpr int64_t kSideBySide = 512;  // most columns for the sake of whole vectors

// `rows` rows of `columns` neighbouring elements, and then the first `rest` elements of one more.
struct Block {
  int64_t rows, columns, rest;
};

// Values by column: one for each, or one for all of them, as many times as a vector has lanes.
template <typename A>
struct Affine {
  const A *mean, *scale, *bias;  // z = (x - mean)·scale + bias
  bool each;
  FASTLAYERS_INLINE int64_t of(int64_t column) const { return column & -static_cast<int64_t>(each); }
};

// f(at, column, part, count) for the vectors of up to R rows at a time: those of row u < count are at + u·columns.
template <typename A, int R, typename F>
FASTLAYERS_INLINE void for_block(const Block& b, F&& f) {
  for (int64_t row = 0, count; row < b.rows + (b.rest > 0); row += count) {
    const bool whole = row < b.rows;
    count = whole ? std::min<int64_t>(R, b.rows - row) : 1;
    for_parts<A>(whole ? b.columns : b.rest, [&](int64_t i, const Part<A>& part) FASTLAYERS_LANES {
      f(row * b.columns + i, i, part, count);
    });
  }
}

// ---- moments ------------------------------------------------------------------------------------------------------------

// In which few values are merged, so that no digits are lost by their number: torch accumulates in float64.
template <typename A>
using wide_t = std::conditional_t<std::is_same_v<A, float>, double, long double>;

template <typename A>
struct Moments {
  wide_t<A> count = 0, mean = 0, m2 = 0;  // m2: the sum of the squared deviations from the mean
};

// The moments of several parts together: sums about the mean of the first, so that a mean far from 0 costs no digits.
template <typename A>
class Merged {
 public:
  using W = wide_t<A>;
  void add(const Moments<A>& part) {
    if (count_ == W(0)) origin_ = part.mean;
    const W d = part.mean - origin_, moment = part.count * d;
    count_ += part.count;
    sum_ += moment;
    squares_ += part.m2 + moment * d;
  }
  Moments<A> moments() const {
    const W rest = sum_ / count_, m2 = squares_ - sum_ * rest;
    return {count_, origin_ + rest, m2 < W(0) ? W(0) : m2};
  }

 private:
  W count_ = 0, origin_ = 0, sum_ = 0, squares_ = 0;
};

// Those of n neighbouring elements.
template <typename T>
void run_moments(const T* x, int64_t n, Moments<compute_t<T>>& result) {
  using A = compute_t<T>;
  using W = wide_t<A>;
  constexpr int K = 4, kStep = K * kLanes<A>;  // sums that do not wait for each other
  const auto total = [](const Vector<A>* parts) FASTLAYERS_LANES {
    const Vector<A> lanes = (parts[0] + parts[1]) + (parts[2] + parts[3]);
    W sum = 0;
    for (int i = 0; i < kLanes<A>; ++i) sum += static_cast<W>(lanes[i]);
    return sum;
  };
  // Of the first elements, which are about as large as the others.
  A origin = static_cast<A>(x[0]);
  if (n >= kLanes<A>) origin += sum_of<A>(load<T>(x) - origin) / static_cast<A>(kLanes<A>);
  for (bool again = false;; again = true) {
    Vector<A> sums[K] = {}, squares[K] = {};
    const auto add = [&](int k, const Vector<A>& d) FASTLAYERS_LANES { sums[k] += d, squares[k] += d * d; };
    int64_t i = 0;
    for (; i + kStep <= n; i += kStep)
      for (int k = 0; k < K; ++k) add(k, load<T>(x + i + k * kLanes<A>) - origin);
    for_parts<A>(n - i, [&](int64_t j, const Part<A>& part) FASTLAYERS_LANES {
      add(0, part.only(part.load(x + i + j) - origin));
    });
    const W sum = total(sums), mean = sum / static_cast<W>(n), m2 = total(squares) - sum * mean;
    if (!again && sum * mean > m2) {  // the origin is far from the mean, and the difference of the sums has lost digits
      origin += static_cast<A>(mean);
      continue;
    }
    result = {static_cast<W>(n), static_cast<W>(origin) + mean, m2 < W(0) ? W(0) : m2};
    return;
  }
}

// Those of each column of a block that has a row; `sums` is scratch. All three have room for whole vectors.
template <typename T>
void column_moments(const T* x, const Block b, compute_t<T>* mean, compute_t<T>* m2, compute_t<T>* sums) {
  using A = compute_t<T>;
  constexpr int R = 8;
  const Vector<A> lane = lane_numbers<Vector<A>>();
  const A rows = static_cast<A>(1) / static_cast<A>(b.rows), more = static_cast<A>(1) / static_cast<A>(b.rows + 1);
  const auto share = [&](int64_t i) FASTLAYERS_LANES {
    return lane + static_cast<A>(i) < static_cast<A>(b.rest) ? broadcast<A>(more) : broadcast<A>(rows);
  };
  // The origin is the mean of the first rows, which are about as large as the others.
  const int64_t few = std::min<int64_t>(b.rows, R);
  for_parts<A>(b.columns, [&](int64_t i, const Part<A>& part) FASTLAYERS_LANES {
    const Vector<A> first = part.load(x + i);
    Vector<A> sum{};
    for (int64_t row = 1; row < few; ++row) sum += part.load(x + row * b.columns + i) - first;
    store<A>(mean + i, first + sum * (A(1) / static_cast<A>(few)));
  });
  for (bool again = false;; again = true) {
    std::fill_n(sums, b.columns, A(0));
    std::fill_n(m2, b.columns, A(0));
    for_block<A, R>(b, [&](int64_t at, int64_t i, const Part<A>& part, int64_t count) FASTLAYERS_LANES {
      const Vector<A> origin = load<A>(mean + i);
      Vector<A> sum{}, squares{};
      for (int u = 0; u < count; ++u) {
        const Vector<A> d = part.only(part.load(x + at + u * b.columns) - origin);
        sum += d, squares += d * d;
      }
      store<A>(sums + i, load<A>(sums + i) + sum);
      store<A>(m2 + i, load<A>(m2 + i) + squares);
    });
    Vector<A> far{};
    for_parts<A>(b.columns, [&](int64_t i, const Part<A>& part) FASTLAYERS_LANES {
      const Vector<A> sum = load<A>(sums + i), rest = sum * share(i), left = load<A>(m2 + i) - sum * rest;
      store<A>(mean + i, load<A>(mean + i) + rest);
      store<A>(m2 + i, left < A(0) ? Vector<A>{} : left);
      far += part.only(sum * rest > left ? broadcast<A>(1) : Vector<A>{});
    });
    if (again || sum_of<A>(far) == A(0)) return;
  }
}

// Merges those of n columns, of `count` elements each, into others of `before` elements.
template <typename A>
void merge_columns(A* mean, A* m2, const A* other_mean, const A* other_m2, int64_t n, A before, A count) {
  const A share = count / (before + count), weight = before * share;
  for_parts<A>(n, [&](int64_t i, const Part<A>& part) FASTLAYERS_LANES {
    const Vector<A> delta = part.load(other_mean + i) - part.load(mean + i);
    part.store(mean + i, part.load(mean + i) + delta * share);
    part.store(m2 + i, part.load(m2 + i) + part.load(other_m2 + i) + delta * delta * weight);
  });
}

// The sums over a part of a channel: of dz, the gradient of z, and of dz·(x - mean).
template <typename A>
struct Sums {
  wide_t<A> dz = 0, dz_x = 0;

  void add(const Sums& o) { dz += o.dz, dz_x += o.dz_x; }
  // Of every step-th of n columns.
  static Sums of_columns(const double* sums, const double* products, int64_t n, int64_t step) {
    Sums all;
    for (int64_t i = 0; i < n; i += step) all.add({sums[i], products[i]});
    return all;
  }
  // Of the columns of a plane, in sums that do not wait for each other.
  static Sums of_plane(const double* sums, const double* products) {
    constexpr int K = 8;
    double both[2][K] = {};
    for (int64_t i = 0; i < kAcross; i += K)
      for (int k = 0; k < K; ++k) both[0][k] += sums[i + k], both[1][k] += products[i + k];
    return of_columns(both[0], both[1], K, 1);
  }
};

// ---- results ------------------------------------------------------------------------------------------------------------

// y = act((x - mean)·scale + bias + residual); the residual may be null.
template <typename T, typename ACT>
FASTLAYERS_CALLED void normalise(ACT act, T* y, const T* x, const T* residual, const Block b, const Affine<compute_t<T>> p) {
  using A = compute_t<T>;
  const ActParameters<A> parameters = {A(0.01), A(0)};  // of leaky_relu
  for_block<A, 1>(b, [&](int64_t at, int64_t i, const Part<A>& part, int64_t) FASTLAYERS_LANES {
    const int64_t c = p.of(i);
    Vector<A> z = (part.load(x + at) - load<A>(p.mean + c)) * load<A>(p.scale + c) + load<A>(p.bias + c);
    if (residual != nullptr) z += part.load(residual + at);
    part.store(y + at, act_value<A>(act, z, parameters));
  });
}

// Adds the lanes of a vector to as many sums in float64.
template <typename A>
FASTLAYERS_INLINE void add_wide(double* sums, const Vector<A>& v) {
  typedef A Part __attribute__((vector_size(kLanes<double> * sizeof(A))));
  for (int i = 0; i < kLanes<A>; i += kLanes<double>) {
    Part some;
    std::memcpy(&some, reinterpret_cast<const A*>(&v) + i, sizeof(some));
    store<double>(sums + i, load<double>(sums + i) + __builtin_convertvector(some, vectors::Doubles));
  }
}

// Adds to the sums of each column, which have room for whole vectors: of dz, the gradient of z, and of dz·(x - mean). Writes dz unless it
// is null. Sums of a few rows are added in float64, as torch adds: the gradients of the parameters are small beside their terms.
template <typename T, typename ACT>
FASTLAYERS_CALLED void add_gradients(ACT act, const T* dy, const T* x, const T* residual, T* dz, const Block b, const Affine<compute_t<T>> p,
                   double* sums, double* products) {
  using A = compute_t<T>;
  const ActParameters<A> parameters = {A(0.01), A(0)};
  for_block<A, 8>(b, [&](int64_t at, int64_t i, const Part<A>& part, int64_t count) FASTLAYERS_LANES {
    const int64_t c = p.of(i);
    const Vector<A> mean = load<A>(p.mean + c), scale = load<A>(p.scale + c), bias = load<A>(p.bias + c);
    Vector<A> sum{}, product{};
    for (int u = 0; u < count; ++u) {
      const int64_t e = at + u * b.columns;
      const Vector<A> d = part.load(x + e) - mean;
      Vector<A> z = d * scale + bias;
      if (residual != nullptr) z += part.load(residual + e);
      const Vector<A> g = act_gradient<A>(act, part.load(dy + e), z, parameters);
      if (dz != nullptr) part.store(dz + e, g);
      sum += part.only(g);
      product += part.only(g) * part.only(d);
    }
    add_wide<A>(sums + i, sum);
    add_wide<A>(products + i, product);
  });
}

// Whether the first pass of a backward had better write dz where dx will be than have the second one compute it again. Memory holds it
// only in the type of the arithmetic.
template <typename T>
bool keeps_gradient(Act act) {
  return std::is_same_v<T, compute_t<T>> && (act == Act::silu || act == Act::gelu || act == Act::gelu_tanh);
}

// dx = dz·scale - level - (x - mean)·slope; without the latter two, of given statistics, where they are null.
template <typename T, typename ACT>
FASTLAYERS_CALLED void input_gradient(ACT act, T* dx, const T* dy, const T* x, const Block b, const Affine<compute_t<T>> p,
                    const compute_t<T>* level, const compute_t<T>* slope) {
  using A = compute_t<T>;
  const ActParameters<A> parameters = {A(0.01), A(0)};
  for_block<A, 1>(b, [&](int64_t at, int64_t i, const Part<A>& part, int64_t) FASTLAYERS_LANES {
    const int64_t c = p.of(i);
    const Vector<A> d = part.load(x + at) - load<A>(p.mean + c), scale = load<A>(p.scale + c);
    const Vector<A> g = act_gradient<A>(act, part.load(dy + at), d * scale + load<A>(p.bias + c), parameters);
    Vector<A> v = g * scale;
    if (level != nullptr) v -= load<A>(level + c) + d * load<A>(slope + c);
    part.store(dx + at, v);
  });
}

// ---- pieces -------------------------------------------------------------------------------------------------------------

// Memory that is not set, as vectors want it.
template <typename A>
class Memory {
 public:
  explicit Memory(int64_t n) : bytes_(new char[n * sizeof(A) + kVectorWidth]) {
    const auto at = reinterpret_cast<uintptr_t>(bytes_.get());
    data_ = reinterpret_cast<A*>((at + kVectorWidth - 1) / kVectorWidth * kVectorWidth);
  }
  A* operator+(int64_t i) const { return data_ + i; }
  A& operator[](int64_t i) const { return data_[i]; }

 private:
  std::unique_ptr<char[]> bytes_;
  A* data_;
};

// A value for each column of a plane.
template <typename A>
struct Repeated {
  alignas(kVectorWidth) A values[kLanes<A>];
  explicit Repeated(A value) { std::fill_n(values, kLanes<A>, value); }
  operator const A*() const { return values; }
};

struct Pieces {
  int64_t columns, rows, rest;  // of all pieces together
  int64_t each, count;          // rows of a piece, and pieces
  int64_t width;                // columns with room for whole vectors
  int64_t copies = 1;           // pixels side by side

  int64_t start(int64_t k) const { return k * each * columns; }
  Block block(int64_t k) const { return {std::min(each, rows - k * each), columns, k == count - 1 ? rest : 0}; }

  // Of a contiguous plane.
  static Pieces of_plane(int64_t n) {
    constexpr int64_t kEach = kPiece / kAcross;
    return {kAcross, n / kAcross, n % kAcross, kEach, std::max<int64_t>(1, (n / kAcross + kEach - 1) / kEach), kAcross};
  }
  // Of pixels that are channels last.
  template <typename A>
  static Pieces of_pixels(int64_t pixels, int64_t channels) {
    int64_t copies = 1;
    const auto suits = [&](int64_t columns) { return columns >= kSideBySide || (columns >= kAcross && columns % kLanes<A> == 0); };
    while (!suits(copies * channels) && 2 * copies <= pixels) copies *= 2;
    const int64_t columns = copies * channels, rows = pixels / copies;
    const int64_t each = std::max(kLeastRows, kPiece / columns / 8 * 8);  // whole bytes of bits
    const int64_t width = (columns + kLanes<A> - 1) / kLanes<A> * kLanes<A>;
    return {columns, rows, pixels % copies * channels, each, (rows + each - 1) / each, width, copies};
  }
};

// Merges the moments of the columns of all pieces into those of the first. A piece has `width` means, and `step` after the piece before.
template <typename A>
void merge_pieces(const Pieces& p, A* moments, int64_t step) {
  for (int64_t k = 1; k < p.count; ++k) {
    const Block b = p.block(k);
    const A before = static_cast<A>(p.each * k), rows = static_cast<A>(b.rows);
    const auto merge = [&](int64_t first, int64_t last, A count) {
      A *mean = moments + first, *other = mean + k * step;
      merge_columns<A>(mean, mean + p.width, other, other + p.width, last - first, before, count);
    };
    merge(0, b.rest, rows + A(1));
    merge(b.rest, b.columns, rows);
  }
}

// Adds the moments of the columns of a channel.
template <typename A>
void add_channel(Merged<A>& all, const Pieces& p, const A* moments, int64_t channels, int64_t channel) {
  using W = wide_t<A>;
  for (int64_t c = channel; c < p.columns; c += channels)
    all.add({static_cast<W>(p.rows + (c < p.rest ? 1 : 0)), static_cast<W>(moments[c]), static_cast<W>(moments[p.width + c])});
}

// Adds n values.
template <typename A>
void add_columns(A* to, const A* from, int64_t n) {
  for_parts<A>(n, [&](int64_t i, const Part<A>& part) FASTLAYERS_LANES { part.store(to + i, part.load(to + i) + part.load(from + i)); });
}

// Repeats the values of the channels over the columns.
template <typename A>
void repeat_channels(A* values, int64_t channels, const Pieces& p) {
  for (int64_t c = channels; c < p.width; ++c) values[c] = values[c - channels];
}

// A reference to a function of these arguments, which is called through a pointer: what takes one is compiled once.
template <typename... Args>
class Function {
 public:
  template <typename F>
  Function(const F& f) : f_(&f), call_([](const void* of, Args... args) { (*static_cast<const F*>(of))(args...); }) {}
  void operator()(Args... args) const { call_(f_, args...); }

 private:
  const void* f_;
  void (*call_)(const void*, Args...);
};
using OfUnit = Function<int64_t>;
using OfPart = Function<int64_t, int64_t>;

// Calls gather(unit, part) for the parts of each of some units of memory, then finish(unit), then apply(unit, part). Where the units are
// enough for the threads, each goes through all of it while it is in the cache.
void for_units(int64_t units, int64_t gathered, int64_t applied, int64_t elements, OfPart gather, OfUnit finish, OfPart apply) {
  const int64_t threads = torch::stable::get_num_threads();
  if (units % threads == 0 || units >= 4 * threads) {
    torch::stable::parallel_for(0, units, std::max<int64_t>(1, kGrain / elements), [&](int64_t first, int64_t last) {
      for (int64_t u = first; u < last; ++u) {
        for (int64_t k = 0; k < gathered; ++k) gather(u, k);
        finish(u);
        for (int64_t k = 0; k < applied; ++k) apply(u, k);
      }
    });
    return;
  }
  const auto for_all = [&](int64_t parts, OfPart f) {
    if (parts == 0) return;
    const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, elements / parts));
    torch::stable::parallel_for(0, units * parts, grain, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) f(i / parts, i % parts);
    });
  };
  for_all(gathered, gather);
  for (int64_t u = 0; u < units; ++u) finish(u);
  for_all(applied, apply);
}

// ---- tensors ------------------------------------------------------------------------------------------------------------

struct Images : ChannelLayout {
  bool last;  // the channels of a pixel are neighbours

  Images(const Tensor& x_in, const char* op) : ChannelLayout(x_in, op), last(channels_together()) {}

  // The values of the channels in the arithmetic; `otherwise` where there are none.
  template <typename T>
  std::vector<compute_t<T>> values(const MaybeTensor& t, compute_t<T> otherwise, const char* op, const char* name) const {
    using A = compute_t<T>;
    std::vector<A> result(channels, otherwise);
    if (!t) return result;
    check_values(*t, op, name);
    const Tensor dense = made_contiguous(*t);
    if (t->scalar_type() == x.scalar_type()) std::copy_n(pointer<const T>(dense), channels, result.data());
    else std::copy_n(pointer<const A>(dense), channels, result.data());
    return result;
  }
  // And back.
  template <typename T>
  void write(const Tensor& t, const std::vector<compute_t<T>>& values) const {
    using A = compute_t<T>;
    if (t.scalar_type() == compute_dtype(x)) std::copy_n(values.data(), channels, pointer<A>(t));
    else std::transform(values.begin(), values.end(), pointer<T>(t), [](A v) { return static_cast<T>(v); });
  }
};

}  // namespace
}  // namespace fastlayers

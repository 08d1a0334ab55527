// Divergences between distributions for CPU tensors. The formulas, what is kept of a row and the cases are those of the CUDA kernels
// (kl_div.cu). A pair of rows is read again while it is in the cache: the second time its sums of exponentials are known.
#include "kl_div.h"

#include "vector_logits.h"

namespace fastlayers::kl_div {
namespace {

// ---- rows of logits -----------------------------------------------------------------------------------------------------

// x: the logits of q, the student's. y: those of p, the teacher's.
template <typename T, typename A = compute_t<T>>
struct Rows {
  const T *x, *y;
  const int64_t* labels;  // or null
  int64_t ignore_index, rows, n;
  A temperature, beta;

  bool ignores(int64_t row) const { return labels != nullptr && labels[row] == ignore_index; }
};

template <typename A>
FASTLAYERS_INLINE Vector<A> cooled(const Vector<A>& v, A temperature) { return temperature == A(1) ? v : v / temperature; }

// What is kept of a row, of logits divided by the temperature: the maxima, a form of the sums of exponentials relative to them, and the
// sums that the gradients need. The sums are their reciprocals, or for Jensen-Shannon their logarithms.
template <typename A>
struct Numbers {
  A max_x, sum_x, max_y, sum_y, cross_x, cross_y;
};

template <typename T, typename A = compute_t<T>>
FASTLAYERS_CALLED Exponentials<A> exponentials_of(const T* x, int64_t n, A temperature) {
  LanesOfExponentials<A> sums;
  for_scores<A>(
      n, [&](int64_t i, auto lanes) FASTLAYERS_LANES { return cooled<A>(lanes.load(x + i), temperature); },
      [&](const auto& v) FASTLAYERS_LANES { sums.add(v); });
  return sums.merged();
}

// Probabilities of the mixture m = beta·p + (1 - beta)·q, and log q - log m and log p - log m. For the larger one h that is -log(m / h),
// near 0, which keeps its digits; for the smaller one l = h·e it is less by log h - log l, which is limited, so that its product with l
// vanishes if l does. NaN may get lost. m / h is written with beta alone: beta and 1 - beta, each rounded, do not add up to 1.
template <typename A>
struct Mixture {
  Vector<A> q, p, over_q, over_p;
};

template <typename A>
FASTLAYERS_INLINE Mixture<A> mixture_of(const Vector<A>& log_q, const Vector<A>& log_p, A beta) {
  const A most = std::is_same_v<A, double> ? A(1000) : A(200);  // e is 0 there
  const Vector<A> difference = log_q - log_p, distance = absolute<A>(difference);
  const auto q_larger = difference >= A(0);
  const Vector<A> apart = distance < most ? distance : broadcast<A>(most), e = exp_below_0<A>(-apart);
  const Vector<A> high = exp_below_0<A>(log_q > log_p ? log_q : log_p), low = high * e;
  const Vector<A> share = (A(1) - e) * beta, m_over_high = q_larger ? A(1) - share : share + e;
  const Vector<A> over_high = -log<A>(m_over_high), over_low = over_high - apart;
  return {q_larger ? high : low, q_larger ? low : high, q_larger ? over_high : over_low, q_larger ? over_low : over_high};
}

template <typename T, Divergence KIND, typename A = compute_t<T>>
void divergence_rows(const Rows<T>& a, A* losses, Numbers<A>* kept, int64_t first, int64_t last) {
  const A nothing = -std::numeric_limits<A>::infinity();
  for (int64_t row = first; row < last; ++row) {
    losses[row] = A(0);
    kept[row] = {};
    if (a.ignores(row)) continue;
    const T *const px = a.x + row * a.n, *const py = a.y + row * a.n;
    const Exponentials<A> x = exponentials_of(px, a.n, a.temperature), y = exponentials_of(py, a.n, a.temperature);
    const A log_x = std::log(x.s), log_y = std::log(y.s);
    Vector<A> cross_x{}, cross_y{};
    for_vectors<A>(a.n, [&](int64_t i, auto lanes) FASTLAYERS_LANES {
      const Vector<A> zx = cooled<A>(lanes.load(px + i, nothing), a.temperature) - x.m;
      const Vector<A> zy = cooled<A>(lanes.load(py + i, nothing), a.temperature) - y.m;
      if constexpr (KIND == Divergence::kullback_leibler) {
        const Vector<A> e = exp_below_0<A>(zy);
        cross_y += e == A(0) ? Vector<A>{} : e * (zy - zx);
      } else {
        const Mixture<A> m = mixture_of<A>(zx - log_x, zy - log_y, a.beta);
        cross_x += m.q * m.over_q;
        cross_y += m.p * m.over_p;
      }
    });
    const A nan = (log_x - log_x) + (log_y - log_y);  // or 0
    const A sum_x = sum_of<A>(cross_x) + nan, sum_y = sum_of<A>(cross_y) + nan;
    if constexpr (KIND == Divergence::kullback_leibler) {
      kept[row] = {x.m, A(1) / x.s, y.m, A(1) / y.s, A(0), sum_y / y.s};
      losses[row] = sum_y / y.s + (log_x - log_y);
    } else {
      kept[row] = {x.m, log_x, y.m, log_y, sum_x, sum_y};
      losses[row] = a.beta * sum_y + (A(1) - a.beta) * sum_x;
    }
  }
}

// dx or dy may be null.
template <typename T, Divergence KIND, typename A = compute_t<T>>
void divergence_backward_rows(const Rows<T>& a, const Numbers<A>* stats, const A* dlosses, int64_t dlosses_stride,
                              T* dx, T* dy, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) {
    const int64_t at = row * a.n;
    if (a.ignores(row)) {
      if (dx != nullptr) std::fill_n(dx + at, a.n, static_cast<T>(0));
      if (dy != nullptr) std::fill_n(dy + at, a.n, static_cast<T>(0));
      continue;
    }
    const Numbers<A> kept = stats[row];
    const A g = dlosses[row * dlosses_stride] / a.temperature;
    const A gx = KIND == Divergence::jensen_shannon ? g * (A(1) - a.beta) : g, gy = KIND == Divergence::jensen_shannon ? g * a.beta : g;
    for_vectors<A>(a.n, [&](int64_t i, auto lanes) FASTLAYERS_LANES {
      const Vector<A> zx = cooled<A>(lanes.load(a.x + at + i), a.temperature) - kept.max_x;
      const Vector<A> zy = cooled<A>(lanes.load(a.y + at + i), a.temperature) - kept.max_y;
      Vector<A> rx, ry;
      if constexpr (KIND == Divergence::kullback_leibler) {
        const Vector<A> q = exp_below_0<A>(zx) * kept.sum_x, p = exp_below_0<A>(zy) * kept.sum_y;
        ry = p == A(0) ? Vector<A>{} : p * ((zy - zx) - kept.cross_y) * gy;
        rx = (q - p) * gx;
      } else {
        const Mixture<A> m = mixture_of<A>(zx - kept.sum_x, zy - kept.sum_y, a.beta);
        rx = m.q * (m.over_q - kept.cross_x) * gx;
        ry = m.p * (m.over_p - kept.cross_y) * gy;
      }
      if (dx != nullptr) lanes.store(dx + at + i, rx);
      if (dy != nullptr) lanes.store(dy + at + i, ry);
    });
  }
}

// ---- kl_div of log-probabilities ----------------------------------------------------------------------------------------

// log(v), of any v
template <typename A>
FASTLAYERS_INLINE Vector<A> log_of_any(const Vector<A>& v) {
  if constexpr (std::is_same_v<A, double>) {
    return log<A>(v);
  } else {
    const auto denormal = v < std::numeric_limits<A>::min();
    const Vector<A> normal = log<A>(denormal ? v * 0x1p24f : v);
    Vector<A> result = denormal ? normal - 16.6355323334f : normal;
    result = v == A(0) ? broadcast<A>(-std::numeric_limits<A>::infinity()) : result;
    return v < A(0) ? broadcast<A>(NAN) : result;
  }
}

// target·(log target - input), where 0·log 0 is 0; or, of a target in log space, exp(target)·(target - input).
template <bool LOG, typename A>
FASTLAYERS_INLINE Vector<A> pointwise(const Vector<A>& input, const Vector<A>& target) {
  if constexpr (LOG) return exp<A>(target) * (target - input);
  else return (target == A(0) ? Vector<A>{} : target * log_of_any<A>(target)) - target * input;
}

template <typename T, bool LOG, typename A = compute_t<T>>
A sum_stretch(const T* input, const T* target, int64_t n) {
  Total<A> total;
  for_vectors<A>(n, [&](int64_t i, auto lanes) FASTLAYERS_LANES {
    // What lies past the end counts as 0 and gives 0.
    total.add(pointwise<LOG, A>(lanes.load(input + i), lanes.load(target + i)));
  });
  return total.sum();
}

template <typename T, typename Out, bool LOG, typename A = compute_t<T>>
void write_stretch(Out* out, const T* input, const T* target, int64_t n) {
  for_vectors<A>(n, [&](int64_t i, auto lanes) FASTLAYERS_LANES {
    lanes.store(out + i, pointwise<LOG, A>(lanes.load(input + i), lanes.load(target + i)));
  });
}

// dinput = -dy·p   dtarget = dy·(log p + 1 - input), and NaN where p is 0; or of a target in log space dy·p·(target - input + 1)
// dinput or dtarget may be null, and input is null if dtarget is. dy is null where it is one number.
template <typename T, typename G, bool LOG, typename A = compute_t<T>>
void backward_stretch(T* dinput, T* dtarget, const G* dy, A one, const T* input, const T* target, int64_t n) {
  for_vectors<A>(n, [&](int64_t i, auto lanes) FASTLAYERS_LANES {
    const Vector<A> t = lanes.load(target + i), g = dy == nullptr ? broadcast<A>(one) : lanes.load(dy + i);
    const Vector<A> p = LOG ? exp<A>(t) : t;
    if (dinput != nullptr) lanes.store(dinput + i, -(g * p));
    if (dtarget == nullptr) return;
    const Vector<A> x = lanes.load(input + i);
    if constexpr (LOG) {
      lanes.store(dtarget + i, g * p * (t - x + A(1)));
    } else {
      // As torch differentiates xlogy(p, p), whose second term is g·p/p.
      const Vector<A> term = g == A(0) ? Vector<A>{} : g * log_of_any<A>(p), r = term + g - g * x + (p - p);
      lanes.store(dtarget + i, p == A(0) ? broadcast<A>(NAN) : r);
    }
  });
}

// ---- host ---------------------------------------------------------------------------------------------------------------

struct Rowed : Matrices {
  Rowed(const Tensor& student, const Tensor& teacher, const MaybeTensor& labels, const char* op)
      : Matrices(student, teacher, labels, op, [](const Tensor& t) { return made_contiguous(t); }) {}

  template <typename T>
  Rows<T> of(const MaybeTensor& labels, int64_t ignore_index, double beta, double temperature) const {
    using A = compute_t<T>;
    return {pointer<const T>(x), pointer<const T>(y), labels ? pointer<const int64_t>(*labels) : nullptr, ignore_index, rows, n,
            static_cast<A>(temperature), static_cast<A>(beta)};
  }

  template <typename F>
  void for_rows(F&& f) const { torch::stable::parallel_for(0, rows, std::max<int64_t>(1, kGrain / (2 * n)), f); }
};

// The divergence of each row, with the numbers that the backward needs. beta 0: the Kullback-Leibler divergence of the student's
// distribution from the teacher's. Between 0 and 1: the generalised Jensen-Shannon divergence.
std::tuple<Tensor, Tensor> divergence_forward(const Tensor& student, const Tensor& teacher, const MaybeTensor& labels,
                                              int64_t ignore_index, double beta, double temperature) {
  const char* op = "divergence_forward";
  const Rowed pair(student, teacher, labels, op);
  Tensor losses, stats;
  std::tie(losses, stats) = pair.results(op);
  dispatch_floating(student.scalar_type(), op, [&]<typename T>(T) {
    using A = compute_t<T>;
    const Rows<T> rows = pair.of<T>(labels, ignore_index, beta, temperature);
    auto* const to = pointer<A>(losses);
    auto* const kept = reinterpret_cast<Numbers<A>*>(pointer<A>(stats));
    pair.for_rows([&](int64_t first, int64_t last) {
      if (beta == 0.0) divergence_rows<T, Divergence::kullback_leibler>(rows, to, kept, first, last);
      else divergence_rows<T, Divergence::jensen_shannon>(rows, to, kept, first, last);
    });
  });
  return {losses, stats};
}

std::tuple<Tensor, Tensor> divergence_backward(const Tensor& dlosses, const Tensor& student, const Tensor& teacher,
                                               const MaybeTensor& labels, int64_t ignore_index, double beta, double temperature,
                                               const Tensor& stats, bool dstudent, bool dteacher) {
  const char* op = "divergence_backward";
  const Rowed pair(student, teacher, labels, op);
  Tensor dx, dy;
  std::tie(dx, dy) = pair.gradients(dlosses, stats, dstudent, dteacher, op);
  if (pair.rows * pair.n == 0) return {dx, dy};
  dispatch_floating(student.scalar_type(), op, [&]<typename T>(T) {
    using A = compute_t<T>;
    const Rows<T> rows = pair.of<T>(labels, ignore_index, beta, temperature);
    const auto* const kept = reinterpret_cast<const Numbers<A>*>(pointer<const A>(stats));
    const A* g = pointer<const A>(dlosses);
    const int64_t stride = dlosses.stride(0);
    T *const to_x = dstudent ? pointer<T>(dx) : nullptr, *const to_y = dteacher ? pointer<T>(dy) : nullptr;
    pair.for_rows([&](int64_t first, int64_t last) {
      if (beta == 0.0) divergence_backward_rows<T, Divergence::kullback_leibler>(rows, kept, g, stride, to_x, to_y, first, last);
      else divergence_backward_rows<T, Divergence::jensen_shannon>(rows, kept, g, stride, to_x, to_y, first, last);
    });
  });
  return {dx, dy};
}

// The sum over all elements, in the type of the computation.
Tensor kl_div_sum(const Tensor& input, const Tensor& target, bool log_target) {
  const FlatPair pair(input, target, "kl_div_sum", kl_div_strides);
  Tensor sum = empty_contiguous({}, compute_dtype(input), input);
  dispatch_floating(input.scalar_type(), "kl_div_sum", [&]<typename T>(T) {
    using A = compute_t<T>;
    const T *const px = pointer<const T>(pair.x), *const pt = pointer<const T>(pair.y);
    const double total = sum_in_stretches(pair.x.numel(), [&](int64_t first, int64_t last) -> double {
      return log_target ? sum_stretch<T, true>(px + first, pt + first, last - first) : sum_stretch<T, false>(px + first, pt + first, last - first);
    });
    *pointer<A>(sum) = static_cast<A>(total);
  });
  return sum;
}

Tensor kl_div_elements(const Tensor& input, const Tensor& target, bool log_target, ScalarType dtype) {
  const FlatPair pair(input, target, "kl_div_elements", kl_div_strides);
  Tensor out = empty_strided(pair.sizes, pair.strides, dtype, input);
  dispatch_pair(input.scalar_type(), dtype, "kl_div_elements", [&]<typename T, typename Out>(T, Out) {
    const T *const px = pointer<const T>(pair.x), *const pt = pointer<const T>(pair.y);
    Out* to = pointer<Out>(out);
    torch::stable::parallel_for(0, out.numel(), kGrain, [&](int64_t first, int64_t last) {
      if (log_target) write_stretch<T, Out, true>(to + first, px + first, pt + first, last - first);
      else write_stretch<T, Out, false>(to + first, px + first, pt + first, last - first);
    });
  });
  return out;
}

std::tuple<Tensor, Tensor> kl_div_backward(const Tensor& dy_in, const MaybeTensor& input, const Tensor& target, bool log_target,
                                           bool dinput, bool dtarget) {
  const char* op = "kl_div_backward";
  KlDivGradients of(dy_in, input, target, dinput, dtarget, op);
  dispatch_pair(target.scalar_type(), of.dy.scalar_type(), op, [&]<typename T, typename G>(T, G) {
    using A = compute_t<T>;
    const G* pg = pointer<const G>(of.dy);
    const A number = of.one ? static_cast<A>(*pg) : A(0);
    const T *const px = dtarget ? pointer<const T>(of.pair.x) : nullptr, *const pt = pointer<const T>(of.pair.y);
    T *const to_x = dinput ? pointer<T>(of.dinput) : nullptr, *const to_t = dtarget ? pointer<T>(of.dtarget) : nullptr;
    torch::stable::parallel_for(0, target.numel(), kGrain, [&](int64_t first, int64_t last) {
      const auto from = [&](auto* p) { return p == nullptr ? nullptr : p + first; };
      const G* g = of.one ? nullptr : pg + first;
      if (log_target) backward_stretch<T, G, true>(from(to_x), from(to_t), g, number, from(px), pt + first, last - first);
      else backward_stretch<T, G, false>(from(to_x), from(to_t), g, number, from(px), pt + first, last - first);
    });
  });
  return {of.dinput, of.dtarget};
}

}  // namespace
}  // namespace fastlayers::kl_div

FASTLAYERS_CPU_KERNELS(kl_div, m) {
  m.impl("divergence_forward", TORCH_BOX(&fastlayers::kl_div::divergence_forward));
  m.impl("divergence_backward", TORCH_BOX(&fastlayers::kl_div::divergence_backward));
  m.impl("kl_div_sum", TORCH_BOX(&fastlayers::kl_div::kl_div_sum));
  m.impl("kl_div_elements", TORCH_BOX(&fastlayers::kl_div::kl_div_elements));
  m.impl("kl_div_backward", TORCH_BOX(&fastlayers::kl_div::kl_div_backward));
}

// group_norm of x over (N, C, *) for CPU tensors, with an optional activation, forward and backward; instance_norm is groups = C. What is
// kept is what the CUDA kernels keep (group_norm.cuh). Contiguous, a group is one run of memory, and goes through the statistics and the
// result while it is in the cache. Channels last the same goes for an image: its statistics are gathered by column, and then by group.
#include <cmath>

#include "common/channels.h"

namespace fastlayers::group_norm {
namespace {

template <typename T>
struct Norm {
  using A = compute_t<T>;
  const T* x;
  const T* dy;  // backward
  T* out;       // y, or dx
  A *mean, *rstd;  // of each group
  std::vector<A> weight, bias;
  int64_t samples, channels, pixels, groups, depth;
  bool last;
  double eps;
  Act act;

  int64_t image() const { return channels * pixels; }
  int64_t run() const { return depth * pixels; }

  void finish(int64_t group, const Moments<A>& m) const {
    mean[group] = static_cast<A>(m.mean);
    rstd[group] = static_cast<A>(1 / std::sqrt(m.m2 / m.count + static_cast<wide_t<A>>(eps)));
  }
};

template <typename T>
Norm<T> norm_of(const Images& x, const MaybeTensor& weight, const MaybeTensor& bias, const Tensor& stats, int64_t groups, int64_t act,
                const char* op) {
  Norm<T> a{};
  a.x = pointer<const T>(x.x);
  a.mean = const_cast<compute_t<T>*>(pointer<const compute_t<T>>(stats)), a.rstd = a.mean + x.images * groups;
  a.weight = x.values<T>(weight, 1, op, "weight"), a.bias = x.values<T>(bias, 0, op, "bias");
  a.samples = x.images, a.channels = x.channels, a.pixels = x.plane;
  a.groups = groups, a.depth = x.channels / groups;
  a.last = x.last;
  a.act = act_of(act, op);
  return a;
}

// The constants of an image's columns.
template <typename T>
void set_columns(const Norm<T>& a, const Pieces& p, int64_t sample, compute_t<T>* mean, compute_t<T>* scale, compute_t<T>* bias) {
  for (int64_t c = 0; c < a.channels; ++c) {
    const int64_t group = sample * a.groups + c / a.depth;
    mean[c] = a.mean[group];
    scale[c] = a.rstd[group] * a.weight[c];
    bias[c] = a.bias[c];
  }
  for (auto* values : {mean, scale, bias}) repeat_channels(values, a.channels, p);
}

// ---- forward ------------------------------------------------------------------------------------------------------------

template <typename T>
void forward_runs(const Norm<T>& a) {
  using A = compute_t<T>;
  const Pieces p = Pieces::of_plane(a.pixels);
  const int64_t n = a.run(), units = a.samples * a.groups, slices = (n + kPiece - 1) / kPiece;
  const Memory<Moments<A>> moments(units * slices);
  for_units(
      units, slices, a.depth * p.count, n,
      [&](int64_t u, int64_t k) { run_moments(a.x + u * n + k * kPiece, std::min(kPiece, n - k * kPiece), moments[u * slices + k]); },
      [&](int64_t u) {
        Merged<A> all;
        for (int64_t k = 0; k < slices; ++k) all.add(moments[u * slices + k]);
        a.finish(u, all.moments());
      },
      [&](int64_t u, int64_t part) {
        const int64_t inner = part / p.count, k = part % p.count, c = u % a.groups * a.depth + inner;
        const Repeated<A> mean(a.mean[u]), scale(a.rstd[u] * a.weight[c]), bias(a.bias[c]);
        const int64_t at = u * n + inner * a.pixels + p.start(k);
        with_act<T, false>(a.act, [&](auto act) {
          normalise<T>(act, a.out + at, a.x + at, nullptr, p.block(k), {mean, scale, bias, false});
        });
      });
}

template <typename T>
void forward_pixels(const Norm<T>& a) {
  using A = compute_t<T>;
  const Pieces p = Pieces::of_pixels<A>(a.pixels, a.channels);
  const int64_t w = p.width, step = 3 * w;
  const Memory<A> moments(a.samples * p.count * step), constants(a.samples * step);
  for_units(
      a.samples, p.count, p.count, a.image(),
      [&](int64_t u, int64_t k) {
        A* m = moments + (u * p.count + k) * step;
        column_moments(a.x + u * a.image() + p.start(k), p.block(k), m, m + w, m + 2 * w);
      },
      [&](int64_t u) {
        A *m = moments + u * p.count * step, *of = constants + u * step;
        merge_pieces(p, m, step);
        for (int64_t g = 0; g < a.groups; ++g) {
          Merged<A> group;
          for (int64_t c = g * a.depth; c < (g + 1) * a.depth; ++c) add_channel(group, p, m, a.channels, c);
          a.finish(u * a.groups + g, group.moments());
        }
        set_columns(a, p, u, of, of + w, of + 2 * w);
      },
      [&](int64_t u, int64_t k) {
        const A* of = constants + u * step;
        const int64_t at = u * a.image() + p.start(k);
        with_act<T, false>(a.act, [&](auto act) {
          normalise<T>(act, a.out + at, a.x + at, nullptr, p.block(k), {of, of + w, of + 2 * w, true});
        });
      });
}

// ---- backward -----------------------------------------------------------------------------------------------------------

// dx = dz·scale - level - (x - mean)·slope, of a group whose channels have these sums.
template <typename A>
struct GroupGradient {
  A level = 0, slope = 0;
};
template <typename T>
GroupGradient<compute_t<T>> group_gradient(const Norm<T>& a, int64_t unit, const Sums<compute_t<T>>* channels) {
  using A = compute_t<T>;
  using W = wide_t<A>;
  const W rstd = a.rstd[unit], count = static_cast<W>(a.run());
  const A* weight = a.weight.data() + unit % a.groups * a.depth;
  Sums<A> all;
  for (int64_t c = 0; c < a.depth; ++c) all.add({weight[c] * channels[c].dz, weight[c] * channels[c].dz_x});
  return {static_cast<A>(rstd * (all.dz / count)), static_cast<A>(rstd * (rstd * (rstd * all.dz_x / count)))};
}

// `sums` gets those of each channel of each sample.
template <typename T>
void backward_runs(const Norm<T>& a, Sums<compute_t<T>>* sums) {
  using A = compute_t<T>;
  const Pieces p = Pieces::of_plane(a.pixels);
  const int64_t n = a.run(), units = a.samples * a.groups, parts = a.depth * p.count;
  const Memory<Sums<A>> found(units * parts);
  const Memory<GroupGradient<A>> gradients(units);
  const bool keeps = keeps_gradient<T>(a.act);
  const T* const from = keeps ? a.out : a.dy;
  const Act second = keeps ? Act::none : a.act;
  const auto with_part = [&](int64_t u, int64_t part, auto&& f) {
    const int64_t inner = part / p.count, k = part % p.count, c = u % a.groups * a.depth + inner;
    const Repeated<A> mean(a.mean[u]), scale(a.rstd[u] * a.weight[c]), bias(a.bias[c]);
    f(u * n + inner * a.pixels + p.start(k), p.block(k), Affine<A>{mean, scale, bias, false});
  };
  for_units(
      units, parts, parts, n,
      [&](int64_t u, int64_t part) {
        with_part(u, part, [&](int64_t at, const Block& b, const Affine<A>& affine) {
          alignas(kVectorWidth) double of_columns[2 * kAcross] = {};
          with_act<T, false>(a.act, [&](auto act) {
            add_gradients<T>(act, a.dy + at, a.x + at, nullptr, keeps ? a.out + at : nullptr, b, affine, of_columns,
                                        of_columns + kAcross);
          });
          found[u * parts + part] = Sums<A>::of_plane(of_columns, of_columns + kAcross);
        });
      },
      [&](int64_t u) {
        for (int64_t c = 0; c < a.depth; ++c) {
          Sums<A> channel;
          for (int64_t k = 0; k < p.count; ++k) channel.add(found[u * parts + c * p.count + k]);
          sums[u * a.depth + c] = channel;
        }
        gradients[u] = group_gradient(a, u, sums + u * a.depth);
      },
      [&](int64_t u, int64_t part) {
        with_part(u, part, [&](int64_t at, const Block& b, const Affine<A>& affine) {
          const Repeated<A> level(gradients[u].level), slope(gradients[u].slope);
          with_act<T, false>(second, [&](auto act) {
            input_gradient<T>(act, a.out + at, from + at, a.x + at, b, affine, level, slope);
          });
        });
      });
}

template <typename T>
void backward_pixels(const Norm<T>& a, Sums<compute_t<T>>* sums) {
  using A = compute_t<T>;
  const Pieces p = Pieces::of_pixels<A>(a.pixels, a.channels);
  const int64_t w = p.width;
  const Memory<double> found(a.samples * p.count * 2 * w);
  const Memory<A> constants(a.samples * 5 * w);
  const bool keeps = keeps_gradient<T>(a.act);
  const T* const from = keeps ? a.out : a.dy;
  const Act second = keeps ? Act::none : a.act;
  const auto affine_of = [&](int64_t u) {
    const A* of = constants + u * 5 * w;
    return Affine<A>{of, of + w, of + 2 * w, true};
  };
  torch::stable::parallel_for(0, a.samples, std::max<int64_t>(1, kGrain / w), [&](int64_t first, int64_t last) {
    for (int64_t u = first; u < last; ++u) {
      A* of = constants + u * 5 * w;
      set_columns(a, p, u, of, of + w, of + 2 * w);
    }
  });
  for_units(
      a.samples, p.count, p.count, a.image(),
      [&](int64_t u, int64_t k) {
        double* to = found + (u * p.count + k) * 2 * w;
        std::fill_n(to, 2 * w, 0.0);
        const int64_t at = u * a.image() + p.start(k);
        with_act<T, false>(a.act, [&](auto act) {
          add_gradients<T>(act, a.dy + at, a.x + at, nullptr, keeps ? a.out + at : nullptr, p.block(k), affine_of(u), to, to + w);
        });
      },
      [&](int64_t u) {
        double* all = found + u * p.count * 2 * w;
        A *level = constants + (u * 5 + 3) * w, *slope = level + w;
        for (int64_t k = 1; k < p.count; ++k) add_columns(all, all + k * 2 * w, 2 * w);
        Sums<A>* channels = sums + u * a.channels;
        for (int64_t c = 0; c < a.channels; ++c) channels[c] = Sums<A>::of_columns(all + c, all + w + c, p.columns - c, a.channels);
        for (int64_t g = 0; g < a.groups; ++g) {
          const GroupGradient<A> gradient = group_gradient(a, u * a.groups + g, channels + g * a.depth);
          std::fill_n(level + g * a.depth, a.depth, gradient.level);
          std::fill_n(slope + g * a.depth, a.depth, gradient.slope);
        }
        repeat_channels(level, a.channels, p);
        repeat_channels(slope, a.channels, p);
      },
      [&](int64_t u, int64_t k) {
        const A* level = constants + (u * 5 + 3) * w;
        const int64_t at = u * a.image() + p.start(k);
        with_act<T, false>(second, [&](auto act) {
          input_gradient<T>(act, a.out + at, from + at, a.x + at, p.block(k), affine_of(u), level, level + w);
        });
      });
}

// ---- ops ----------------------------------------------------------------------------------------------------------------

void check_groups(const Images& x, int64_t groups, const MaybeTensor& weight, const MaybeTensor& bias, const char* op) {
  FASTLAYERS_CHECK(groups > 0 && x.channels % groups == 0, op, "expected channels (", x.channels, ") divisible by groups (", groups, ")");
  FASTLAYERS_CHECK(!weight || !bias || weight->scalar_type() == bias->scalar_type(), op, "expected weight and bias of one dtype");
}

// Results in float32 of 16-bit inputs, as under autocast, are those of the inputs in float32.
bool widens(ScalarType from, ScalarType to, const char* op) {
  if (from == to) return false;
  FASTLAYERS_CHECK(is_low_precision(from) && to == ScalarType::Float, op, "expected results of x's dtype ", toString(from),
                   " or of float32, but got ", toString(to));
  return true;
}

std::tuple<Tensor, Tensor> group_norm_forward(const Tensor& x_in, int64_t groups, const MaybeTensor& weight, const MaybeTensor& bias,
                                              double eps, int64_t act, ScalarType dtype, bool keep) {
  const char* op = "group_norm_forward";
  Images x(x_in, op);
  check_groups(x, groups, weight, bias, op);
  if (widens(x.x.scalar_type(), dtype, op)) {
    const auto wide = [&](const MaybeTensor& t) { return t ? MaybeTensor(torch::stable::to(*t, ScalarType::Float)) : t; };
    return group_norm_forward(x.copy(x.x, ScalarType::Float), groups, wide(weight), wide(bias), eps, act, dtype, keep);
  }
  const ScalarType kept = compute_dtype(x.x);
  const Tensor y = x.empty(dtype), stats = empty_contiguous({2, x.images * groups}, kept, x.x);
  const Tensor result = keep ? stats : empty_contiguous({0}, kept, x.x);
  if (x.x.numel() == 0) {
    torch::stable::zero_(const_cast<Tensor&>(stats));
    return {y, result};
  }
  dispatch_floating(x.x.scalar_type(), op, [&]<typename T>(T) {
    Norm<T> a = norm_of<T>(x, weight, bias, stats, groups, act, op);
    a.out = pointer<T>(y);
    a.eps = eps;
    a.last ? forward_pixels(a) : forward_runs(a);
  });
  return {y, result};
}

std::tuple<Tensor, Tensor, Tensor> group_norm_backward(const Tensor& dy_in, const Tensor& x_in, int64_t groups, const MaybeTensor& weight,
                                                       const MaybeTensor& bias, const Tensor& stats, int64_t act) {
  const char* op = "group_norm_backward";
  const Images x(x_in, op);
  check_groups(x, groups, weight, bias, op);
  const Tensor dy = x.bring(dy_in, op, "dy");
  const ScalarType dtype = x.x.scalar_type();
  const auto empty = [&](const MaybeTensor& t) {
    return empty_contiguous({t ? x.channels : 0}, t ? t->scalar_type() : dtype, x.x);
  };
  const Tensor dweight = empty(weight ? weight : bias), dbias = empty(bias ? bias : weight);
  if (widens(dtype, dy.scalar_type(), op)) {
    const auto wide = [&](const MaybeTensor& t) { return t ? MaybeTensor(torch::stable::to(*t, ScalarType::Float)) : t; };
    auto [dx, wide_dweight, wide_dbias] =
        group_norm_backward(dy, x.copy(x.x, ScalarType::Float), groups, wide(weight), wide(bias), stats, act);
    torch::stable::copy_(const_cast<Tensor&>(dweight), wide_dweight);
    torch::stable::copy_(const_cast<Tensor&>(dbias), wide_dbias);
    return {x.copy(dx, dtype), dweight, dbias};
  }
  const Tensor dx = x.empty(dtype);
  const int64_t total = x.images * groups;
  FASTLAYERS_CHECK(stats.scalar_type() == compute_dtype(x.x) && stats.numel() == 2 * total && stats.is_contiguous(), op,
                   "expected stats of ", 2 * total, " elements, as group_norm_forward keeps them");
  if (x.x.numel() == 0) {
    torch::stable::zero_(const_cast<Tensor&>(dweight)), torch::stable::zero_(const_cast<Tensor&>(dbias));
    return {dx, dweight, dbias};
  }
  dispatch_floating(dtype, op, [&]<typename T>(T) {
    using A = compute_t<T>;
    Norm<T> a = norm_of<T>(x, weight, bias, stats, groups, act, op);
    a.dy = pointer<const T>(dy);
    a.out = pointer<T>(dx);
    const Memory<Sums<A>> sums(a.samples * a.channels);
    a.last ? backward_pixels(a, sums + 0) : backward_runs(a, sums + 0);
    if (!weight && !bias) return;
    std::vector<Sums<A>> of_channels(a.channels);
    for (int64_t n = 0; n < a.samples; ++n) {
      for (int64_t c = 0; c < a.channels; ++c) {
        const Sums<A>& one = sums[n * a.channels + c];
        of_channels[c].add({one.dz, a.rstd[n * a.groups + c / a.depth] * one.dz_x});
      }
    }
    std::vector<A> of_weight(a.channels), of_bias(a.channels);
    for (int64_t c = 0; c < a.channels; ++c) {
      of_weight[c] = static_cast<A>(of_channels[c].dz_x);
      of_bias[c] = static_cast<A>(of_channels[c].dz);
    }
    x.write<T>(dweight, of_weight);
    x.write<T>(dbias, of_bias);
  });
  return {dx, dweight, dbias};
}

}  // namespace
}  // namespace fastlayers::group_norm

FASTLAYERS_CPU_KERNELS(group_norm, m) {
  m.impl("group_norm_forward", TORCH_BOX(&fastlayers::group_norm::group_norm_forward));
  m.impl("group_norm_backward", TORCH_BOX(&fastlayers::group_norm::group_norm_backward));
}

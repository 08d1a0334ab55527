// act(batch_norm(x) + residual) for CPU tensors, training and eval, forward and backward; what is kept is what the CUDA kernels keep
// (batch_norm.cuh). Contiguous, a channel is a plane of each image, and goes through the statistics and the result while it is in the
// cache. Channels last all pixels are rows of one matrix, whose statistics are those of its columns.
#include "batch_norm.h"

#include <cmath>

#include "common/bits.h"
#include "common/channels.h"

namespace fastlayers::batch_norm {
namespace {

template <typename T>
struct Norm {
  using A = compute_t<T>;
  const T* x;
  const T* residual;  // may be null
  int64_t images, channels, pixels;
  bool last;
  Act act;
  std::vector<A> weight, bias;

  int64_t count() const { return images * pixels; }
  int64_t size() const { return count() * channels; }
  bool bytes_are_whole() const { return last || pixels % kMaskBits == 0; }  // of bits, in every piece
};

template <typename T>
Norm<T> norm_of(const Images& x, const MaybeTensor& residual, const MaybeTensor& weight, const MaybeTensor& bias, Act act, const char* op) {
  return {pointer<const T>(x.x), pointer<const T>(residual), x.images, x.channels, x.plane, x.last, act,
          x.values<T>(weight, 1, op, "weight"), x.values<T>(bias, 0, op, "bias")};
}

// Values of all channels, by columns where they are channels last.
template <typename A>
struct Columns {
  Pieces pieces;
  Memory<A> values;  // `kinds` times the width
  Columns(int64_t pixels, int64_t channels, int kinds)
      : pieces(Pieces::of_pixels<A>(pixels, channels)), values(kinds * pieces.width) {}
  A* of(int kind) const { return values + kind * pieces.width; }
  template <typename F>
  void set(int kind, int64_t channels, F&& f) const {
    for (int64_t c = 0; c < channels; ++c) of(kind)[c] = f(c);
    repeat_channels(of(kind), channels, pieces);
  }
};

// ---- forward ------------------------------------------------------------------------------------------------------------

template <typename T>
struct Forward : Norm<T> {
  using A = compute_t<T>;
  using W = wide_t<A>;
  T* y;
  uint8_t* bits;  // may be null
  std::vector<A> mean, rstd;
  bool training = false;  // what follows is for that
  double eps = 0, momentum = 0;
  std::vector<A> running_mean = {}, running_var = {};

  A root(W var) const { return static_cast<A>(1 / std::sqrt(var + static_cast<W>(eps))); }
  void finish(int64_t c, const Moments<A>& m) {
    const auto step = [&](A& value, W to) { value = static_cast<A>((1 - momentum) * value + momentum * to); };
    mean[c] = static_cast<A>(m.mean);
    rstd[c] = root(m.m2 / m.count);
    step(running_mean[c], m.mean);
    step(running_var[c], m.m2 / (m.count - 1));
  }

  void write(int64_t at, const Block& b, const Affine<A>& affine) const {
    with_act<T, false>(this->act, [&](auto act) {
      normalise<T>(act, y + at, this->x + at, this->residual == nullptr ? nullptr : this->residual + at, b, affine);
    });
    if (bits != nullptr && this->bytes_are_whole()) store_bits(bits + at / kMaskBits, y + at, b.rows * b.columns + b.rest);
  }
};

template <typename T>
void forward_planes(Forward<T>& a) {
  using A = compute_t<T>;
  const Pieces p = Pieces::of_plane(a.pixels);
  const auto write = [&](int64_t image, int64_t c, int64_t k) {
    const Repeated<A> mean(a.mean[c]), scale(a.rstd[c] * a.weight[c]), bias(a.bias[c]);
    a.write((image * a.channels + c) * a.pixels + p.start(k), p.block(k), {mean, scale, bias, false});
  };
  if (!a.training) {
    for_units(
        a.images * a.channels, 0, p.count, a.pixels, [](int64_t, int64_t) {}, [](int64_t) {},
        [&](int64_t u, int64_t k) { write(u / a.channels, u % a.channels, k); });
    return;
  }
  const int64_t parts = a.images * p.count;
  const Memory<Moments<A>> moments(a.channels * parts);
  for_units(
      a.channels, parts, parts, a.count(),
      [&](int64_t c, int64_t part) {
        const int64_t at = (part / p.count * a.channels + c) * a.pixels + p.start(part % p.count);
        const Block b = p.block(part % p.count);
        run_moments(a.x + at, b.rows * b.columns + b.rest, moments[c * parts + part]);
      },
      [&](int64_t c) {
        Merged<A> all;
        for (int64_t part = 0; part < parts; ++part) all.add(moments[c * parts + part]);
        a.finish(c, all.moments());
      },
      [&](int64_t c, int64_t part) { write(part / p.count, c, part % p.count); });
}

template <typename T>
void forward_pixels(Forward<T>& a) {
  using A = compute_t<T>;
  const Columns<A> columns(a.count(), a.channels, 3);
  const Pieces& p = columns.pieces;
  const int64_t w = p.width;
  const Memory<A> moments(a.training ? p.count * 3 * w : 0);
  for_units(
      1, a.training ? p.count : 0, p.count, a.size(),
      [&](int64_t, int64_t k) {
        A* m = moments + k * 3 * w;
        column_moments(a.x + p.start(k), p.block(k), m, m + w, m + 2 * w);
      },
      [&](int64_t) {
        if (a.training) {
          merge_pieces(p, moments + 0, 3 * w);
          for (int64_t c = 0; c < a.channels; ++c) {
            Merged<A> all;
            add_channel(all, p, moments + 0, a.channels, c);
            a.finish(c, all.moments());
          }
        }
        columns.set(0, a.channels, [&](int64_t c) { return a.mean[c]; });
        columns.set(1, a.channels, [&](int64_t c) { return a.rstd[c] * a.weight[c]; });
        columns.set(2, a.channels, [&](int64_t c) { return a.bias[c]; });
      },
      [&](int64_t, int64_t k) { a.write(p.start(k), p.block(k), {columns.of(0), columns.of(1), columns.of(2), true}); });
}

std::tuple<Tensor, Tensor, Tensor> forward(const char* op, const Tensor& x_in, const MaybeTensor& residual_in, const NormTensors& norm,
                                           const ForwardOptions& options) {
  const Images x(x_in, op);
  const int64_t n = x.x.numel();
  const ForwardTensors t(x, residual_in, options, op);
  if (n == 0) return {t.y, t.stats, t.bits};
  dispatch_floating(x.x.scalar_type(), op, [&]<typename T>(T) {
    using A = compute_t<T>;
    Forward<T> a{norm_of<T>(x, t.residual, norm.weight, norm.bias, t.act, op), pointer<T>(t.y),
                 t.has_bits ? pointer<uint8_t>(t.bits) : nullptr, x.values<T>(norm.running_mean, 0, op, "running_mean"),
                 x.values<T>(norm.running_var, 1, op, "running_var"), options.training, options.eps, options.momentum};
    a.running_mean = a.mean, a.running_var = a.rstd;
    if (!options.training)
      for (A& value : a.rstd) value = a.root(value);
    a.last ? forward_pixels(a) : forward_planes(a);
    if (t.has_bits && !a.bytes_are_whole())
      for_bytes(n, [&](int64_t at, int64_t count) { store_bits(a.bits + at / kMaskBits, a.y + at, count); });
    if (options.training && norm.running_mean) x.write<T>(*norm.running_mean, a.running_mean);
    if (options.training && norm.running_var) x.write<T>(*norm.running_var, a.running_var);
    if (!options.stats) return;
    std::copy(a.mean.begin(), a.mean.end(), pointer<A>(t.stats));
    std::copy(a.rstd.begin(), a.rstd.end(), pointer<A>(t.stats) + x.channels);
  });
  if (int64_t* const batches = counter(norm.batches, x.x, op)) ++*batches;
  return {t.y, t.stats, t.bits};
}

std::tuple<Tensor, Tensor, Tensor> batch_norm_train(const Tensor& x, const MaybeTensor& running_mean, const MaybeTensor& running_var,
                                                    const MaybeTensor& weight, const MaybeTensor& bias, double momentum, double eps,
                                                    const MaybeTensor& residual, int64_t act, bool bits, const MaybeTensor& batches) {
  return forward("batch_norm_train", x, residual, {weight, bias, running_mean, running_var, batches},
                 {momentum, eps, act, true, bits, true});
}

std::tuple<Tensor, Tensor, Tensor> batch_norm_eval(const Tensor& x, const Tensor& running_mean, const Tensor& running_var,
                                                   const MaybeTensor& weight, const MaybeTensor& bias, double eps,
                                                   const MaybeTensor& residual, int64_t act, bool bits, bool keep) {
  const MaybeTensor mean = running_mean, var = running_var, none;
  return forward("batch_norm_eval", x, residual, {weight, bias, mean, var, none}, {0, eps, act, false, bits, keep});
}

void channel_bias_act_(const Tensor& x_in, const Tensor& bias, const MaybeTensor& residual_in, int64_t act_number) {
  const char* op = "channel_bias_act_";
  const Images x(x_in, op);
  FASTLAYERS_CHECK(x.x.const_data_ptr() == x_in.const_data_ptr(), op, "expected x contiguous or channels_last");
  const Act act = act_of(act_number, op);
  const MaybeTensor residual = bring(x, residual_in, op, "residual");
  if (x.x.numel() == 0) return;
  dispatch_floating(x.x.scalar_type(), op, [&]<typename T>(T) {
    using A = compute_t<T>;
    Forward<T> a{norm_of<T>(x, residual, std::nullopt, bias, act, op), pointer<T>(x.x), nullptr,
                 std::vector<A>(x.channels, A(0)), std::vector<A>(x.channels, A(1))};
    a.last ? forward_pixels(a) : forward_planes(a);
  });
}

// ---- backward -----------------------------------------------------------------------------------------------------------

// Where dz, the gradient of the activation's argument, depends on a residual or costs much, the first pass writes it and the second one
// reads it.
template <typename T>
struct Backward : Norm<T> {
  using A = compute_t<T>;
  const T* dy;
  T* dz;  // null: dz is computed twice, from x
  T* dx;
  const uint8_t* bits;  // may be null
  bool training;
  const A *mean, *rstd;
  std::vector<A> level, slope;
  std::vector<Sums<A>> sums;

  void gather(int64_t at, const Block& b, const Affine<A>& affine, double* sums_of_columns, double* products) const {
    using Word = word_t<T>;
    if (bits != nullptr) {
      if (this->bytes_are_whole())
        gate(reinterpret_cast<Word*>(dz + at), reinterpret_cast<const Word*>(dy + at), bits + at / kMaskBits, b.rows * b.columns + b.rest);
      add_gradients<T>(kNoAct, dz + at, this->x + at, nullptr, nullptr, b, affine, sums_of_columns, products);
      return;
    }
    const T* more = this->residual == nullptr ? nullptr : this->residual + at;
    with_act<T, false>(this->act, [&](auto act) {
      add_gradients<T>(act, dy + at, this->x + at, more, dz == nullptr ? nullptr : dz + at, b, affine, sums_of_columns, products);
    });
  }
  void finish(int64_t c) {
    using W = wide_t<A>;
    const W count = static_cast<W>(this->count()), scale = static_cast<W>(this->weight[c]) * rstd[c];
    level[c] = static_cast<A>(scale * (sums[c].dz / count));
    slope[c] = static_cast<A>(scale * rstd[c] * (rstd[c] * sums[c].dz_x / count));
  }
  void write(int64_t at, const Block& b, const Affine<A>& affine, const A* levels, const A* slopes) const {
    if (!training) levels = slopes = nullptr;
    if (dz != nullptr) return input_gradient<T>(kNoAct, dx + at, dz + at, this->x + at, b, affine, levels, slopes);
    with_act<T, false>(this->act, [&](auto act) {
      input_gradient<T>(act, dx + at, dy + at, this->x + at, b, affine, levels, slopes);
    });
  }
};

template <typename T>
void backward_planes(Backward<T>& a) {
  using A = compute_t<T>;
  const Pieces p = Pieces::of_plane(a.pixels);
  const int64_t parts = a.images * p.count;
  const Memory<Sums<A>> found(a.channels * parts);
  const auto with_part = [&](int64_t c, int64_t part, auto&& f) {
    const Repeated<A> mean(a.mean[c]), scale(a.rstd[c] * a.weight[c]), bias(a.bias[c]);
    const int64_t k = part % p.count;
    f((part / p.count * a.channels + c) * a.pixels + p.start(k), p.block(k), Affine<A>{mean, scale, bias, false});
  };
  for_units(
      a.channels, parts, parts, a.count(),
      [&](int64_t c, int64_t part) {
        with_part(c, part, [&](int64_t at, const Block& b, const Affine<A>& affine) {
          alignas(kVectorWidth) double columns[2 * kAcross] = {};
          a.gather(at, b, affine, columns, columns + kAcross);
          found[c * parts + part] = Sums<A>::of_plane(columns, columns + kAcross);
        });
      },
      [&](int64_t c) {
        for (int64_t part = 0; part < parts; ++part) a.sums[c].add(found[c * parts + part]);
        a.finish(c);
      },
      [&](int64_t c, int64_t part) {
        with_part(c, part, [&](int64_t at, const Block& b, const Affine<A>& affine) {
          const Repeated<A> level(a.level[c]), slope(a.slope[c]);
          a.write(at, b, affine, level, slope);
        });
      });
}

template <typename T>
void backward_pixels(Backward<T>& a) {
  using A = compute_t<T>;
  const Columns<A> columns(a.count(), a.channels, 5);
  const Pieces& p = columns.pieces;
  const int64_t w = p.width;
  const Memory<double> found(p.count * 2 * w);
  columns.set(0, a.channels, [&](int64_t c) { return a.mean[c]; });
  columns.set(1, a.channels, [&](int64_t c) { return a.rstd[c] * a.weight[c]; });
  columns.set(2, a.channels, [&](int64_t c) { return a.bias[c]; });
  const Affine<A> affine{columns.of(0), columns.of(1), columns.of(2), true};
  for_units(
      1, p.count, p.count, a.size(),
      [&](int64_t, int64_t k) {
        double* to = found + k * 2 * w;
        std::fill_n(to, 2 * w, 0.0);
        a.gather(p.start(k), p.block(k), affine, to, to + w);
      },
      [&](int64_t) {
        for (int64_t k = 1; k < p.count; ++k) add_columns(found + 0, found + k * 2 * w, 2 * w);
        for (int64_t c = 0; c < a.channels; ++c) {
          a.sums[c] = Sums<A>::of_columns(found + c, found + (w + c), p.columns - c, a.channels);
          a.finish(c);
        }
        columns.set(3, a.channels, [&](int64_t c) { return a.level[c]; });
        columns.set(4, a.channels, [&](int64_t c) { return a.slope[c]; });
      },
      [&](int64_t, int64_t k) { a.write(p.start(k), p.block(k), affine, columns.of(3), columns.of(4)); });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm_backward(const Tensor& dy_in, const Tensor& x_in, const MaybeTensor& weight,
                                                               const MaybeTensor& bias, const Tensor& stats, bool training,
                                                               const MaybeTensor& residual_in, const MaybeTensor& bits, int64_t act_number,
                                                               bool want_dresidual) {
  const char* op = "batch_norm_backward";
  const Images x(x_in, op);
  const int64_t n = x.x.numel(), channels = x.channels;
  const BackwardTensors t(x, dy_in, weight, stats, residual_in, bits, act_number, want_dresidual, op);
  if (n == 0) return {t.dx, t.dresidual, t.dweight, t.dbias};
  dispatch_floating(x.x.scalar_type(), op, [&]<typename T>(T) {
    using A = compute_t<T>;
    using Word = word_t<T>;
    const bool first_pass_writes = t.has_bits || t.residual || want_dresidual || keeps_gradient<T>(t.act);
    T* const dz = want_dresidual ? pointer<T>(t.dresidual) : pointer<T>(t.dx);  // which the second pass overwrites in place
    const A* mean = pointer<const A>(stats);
    Backward<T> a{norm_of<T>(x, t.residual, weight, bias, t.act, op), pointer<const T>(t.dy), first_pass_writes ? dz : nullptr, pointer<T>(t.dx),
                  t.has_bits ? pointer<const uint8_t>(*bits) : nullptr, training, mean, mean + channels, std::vector<A>(channels),
                  std::vector<A>(channels), std::vector<Sums<A>>(channels)};
    if (t.has_bits && !a.bytes_are_whole()) {
      for_bytes(n, [&](int64_t at, int64_t count) {
        gate(reinterpret_cast<Word*>(dz + at), reinterpret_cast<const Word*>(a.dy + at), a.bits + at / kMaskBits, count);
      });
    }
    a.last ? backward_pixels(a) : backward_planes(a);
    std::vector<A> of_weight(channels), of_bias(channels);
    for (int64_t c = 0; c < channels; ++c) {
      of_weight[c] = static_cast<A>(a.sums[c].dz_x * a.rstd[c]);
      of_bias[c] = static_cast<A>(a.sums[c].dz);
    }
    x.write<T>(t.dweight, of_weight);
    x.write<T>(t.dbias, of_bias);
  });
  return {t.dx, t.dresidual, t.dweight, t.dbias};
}

}  // namespace
}  // namespace fastlayers::batch_norm

FASTLAYERS_CPU_KERNELS(batch_norm, m) {
  m.impl("batch_norm_train", TORCH_BOX(&fastlayers::batch_norm::batch_norm_train));
  m.impl("batch_norm_eval", TORCH_BOX(&fastlayers::batch_norm::batch_norm_eval));
  m.impl("channel_bias_act_", TORCH_BOX(&fastlayers::batch_norm::channel_bias_act_));
  m.impl("batch_norm_backward", TORCH_BOX(&fastlayers::batch_norm::batch_norm_backward));
}

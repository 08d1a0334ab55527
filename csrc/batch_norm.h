// What the CPU and the CUDA implementation of batch_norm share: what is checked and allocated.
#pragma once

#include "common/act.h"
#include "common/channel_layout.h"

namespace fastlayers {
namespace {

struct NormTensors {
  const MaybeTensor &weight, &bias, &running_mean, &running_var, &batches;
};

struct ForwardOptions {
  double momentum, eps;
  int64_t act;
  bool training, bits, stats;
};

// t, of x's shape and dtype, in x's layout.
inline MaybeTensor bring(const ChannelLayout& x, const MaybeTensor& t, const char* op, const char* name) {
  if (!t) return std::nullopt;
  check_same(x.x, *t, op, name);
  return x.bring(*t, op, name);
}

// The number of batches that a layer has seen.
inline int64_t* counter(const MaybeTensor& t, const Tensor& x, const char* op) {
  if (!t) return nullptr;
  FASTLAYERS_CHECK(t->scalar_type() == ScalarType::Long && t->numel() == 1, op, "expected batches to be one int64");
  check_device(x, *t, op, "batches");
  return pointer<int64_t>(t);
}

// The residual and the results of a forward.
struct ForwardTensors {
  Act act;
  bool has_bits;
  MaybeTensor residual;
  Tensor y, stats, bits;

  ForwardTensors(const ChannelLayout& x, const MaybeTensor& residual_in, const ForwardOptions& options, const char* op)
      : act(act_of(options.act, op)), has_bits(options.bits && residual_in && act == Act::relu),
        residual(bring(x, residual_in, op, "residual")), y(x.empty(x.x.scalar_type())),
        stats(empty_stats(options.stats, x.channels, x.x)),
        bits(empty_contiguous({has_bits ? bytes_of_bits(x.x.numel()) : 0}, ScalarType::Byte, x.x)) {}
};

// The operands of a backward in x's layout, and its results.
struct BackwardTensors {
  Act act;
  bool has_bits;
  Tensor dy;
  MaybeTensor residual;  // where the activation's argument depends on it
  Tensor dx, dresidual, dweight, dbias;

  BackwardTensors(const ChannelLayout& x, const Tensor& dy_in, const MaybeTensor& weight, const Tensor& stats,
                  const MaybeTensor& residual_in, const MaybeTensor& bits, int64_t act_number, bool want_dresidual, const char* op)
      : act(act_of(act_number, op)), has_bits(bits && bits->numel() > 0), dy(*bring(x, dy_in, op, "dy")) {
    const int64_t n = x.x.numel(), channels = x.channels;
    const ScalarType dtype = x.x.scalar_type(), wide = compute_dtype(dtype);
    FASTLAYERS_CHECK(!has_bits || (act == Act::relu && bits->numel() == bytes_of_bits(n)), op,
                     "expected bits with relu only, one for each of ", n, " elements");
    FASTLAYERS_CHECK(stats.numel() == 2 * channels && stats.is_contiguous() && stats.scalar_type() == wide, op,
                     "expected stats of [2, ", channels, "], contiguous, of dtype ", toString(wide));
    if (!has_bits && act != Act::none) residual = bring(x, residual_in, op, "residual");
    dx = x.empty(dtype), dresidual = want_dresidual ? x.empty(dtype) : empty_contiguous({0}, dtype, x.x);
    const ScalarType param_dtype = weight ? weight->scalar_type() : wide;
    dweight = empty_contiguous({channels}, param_dtype, x.x), dbias = empty_contiguous({channels}, param_dtype, x.x);
    if (n > 0) return;
    torch::stable::zero_(dweight);
    torch::stable::zero_(dbias);
  }
};

}  // namespace
}  // namespace fastlayers

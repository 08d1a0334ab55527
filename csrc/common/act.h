// The activations by number, the same for every kernel, and their parameters.
#pragma once

#include "tensor.h"

namespace fastlayers {

// run_time: of a kernel that takes any of them as an argument.
enum class Act : int {
  run_time = -1, none = 0, relu, silu, gelu, gelu_tanh, hardswish, relu6, leaky_relu,
  quick_gelu, relu2, mish, sigmoid, tanh, elu, softplus
};

constexpr int kNormActs = 8, kActs = 15;

inline Act act_of(int64_t act, const char* op, int acts = kNormActs) {
  FASTLAYERS_CHECK(act >= 0 && act < acts, op, "expected act from 0 to ", acts - 1, ", but got ", act);
  return static_cast<Act>(act);
}

// The parameters of an activation that has some, in torch's order: leaky_relu's negative_slope, elu's alpha, softplus' beta and
// threshold.
template <typename A>
struct ActParameters {
  A first, second;
};

}  // namespace fastlayers

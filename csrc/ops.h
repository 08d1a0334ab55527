// What one kernel file offers to the others.
#pragma once

#include "tensor.h"

namespace fastlayers {

// act(x + bias); the gradients of x and of the bias, the second one in x's dtype or that one, and act(x + bias) anew: bias_act.cu.
Tensor bias_act_forward_op(const Tensor& x, const std::optional<Tensor>& bias, int64_t act, double first, double second);
std::tuple<Tensor, Tensor, std::optional<Tensor>> bias_act_gradients(const Tensor& dy, const Tensor& x,
                                                                     const std::optional<Tensor>& bias, int64_t act, double first,
                                                                     double second, bool dbias, std::optional<ScalarType> dtype, bool keep);

// The sums of a contiguous matrix over its rows, in its dtype or that one: linear.cu.
Tensor column_sum_op(const Tensor& x, ScalarType dtype);

}  // namespace fastlayers

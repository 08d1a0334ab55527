// What one kernel file offers to the others.
#pragma once

#include "tensor.h"

namespace fastlayers {

// act(x + bias); the gradients of x and of the bias, the second one in x's dtype or that one, and act(x + bias) anew: bias_act.cu.
Tensor bias_act_forward_op(const Tensor& x, const std::optional<Tensor>& bias, int64_t act, double first, double second);
std::tuple<Tensor, Tensor, std::optional<Tensor>> bias_act_gradients(const Tensor& dy, const Tensor& x,
                                                                     const std::optional<Tensor>& bias, int64_t act, double first,
                                                                     double second, bool dbias, std::optional<ScalarType> dtype, bool keep);

// act(batch_norm(x) + residual) in training, the mean and rstd of each channel, and where relu let through; the gradients of x, of the
// residual, of the weight and of the bias: batch_norm.cu.
std::tuple<Tensor, Tensor, Tensor> batch_norm_train(const Tensor& x, const std::optional<Tensor>& residual,
                                                    const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                                                    const std::optional<Tensor>& running_mean,
                                                    const std::optional<Tensor>& running_var, double momentum, double eps,
                                                    int64_t act, bool bits, const std::optional<Tensor>& batches);
std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm_backward_op(const Tensor& dy, const Tensor& x,
                                                                  const std::optional<Tensor>& residual,
                                                                  const std::optional<Tensor>& bits, const std::optional<Tensor>& weight,
                                                                  const std::optional<Tensor>& bias, const Tensor& stats, bool training,
                                                                  int64_t act, bool want_dresidual);

// The sums of a contiguous matrix over its rows, in its dtype or that one: linear.cu.
Tensor column_sum_op(const Tensor& x, ScalarType dtype);

}  // namespace fastlayers

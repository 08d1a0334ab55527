// What each kernel file offers to the others.
#pragma once

#include "tensor.h"

namespace fastlayers {

// bias_act.cu: act(x + bias); the gradients of x and of the bias, the latter in x's dtype or in `dtype`, and act(x + bias) recomputed if
// it is to be kept.
Tensor bias_act_forward_op(const Tensor& x, const MaybeTensor& bias, int64_t act, double first, double second);
std::tuple<Tensor, Tensor, MaybeTensor> bias_act_gradients(const Tensor& dy, const Tensor& x, const MaybeTensor& bias, int64_t act,
                                                           double first, double second, bool dbias, std::optional<ScalarType> dtype,
                                                           bool keep);

// batch_norm_forward.cu: act(batch_norm(x) + residual) in training, the mean and rstd of each channel, and the bits of relu; the gradients of x,
// residual, weight and bias.
std::tuple<Tensor, Tensor, Tensor> batch_norm_train(const Tensor& x, const MaybeTensor& running_mean, const MaybeTensor& running_var,
                                                    const MaybeTensor& weight, const MaybeTensor& bias, double momentum, double eps,
                                                    const MaybeTensor& residual, int64_t act, bool bits, const MaybeTensor& batches);
std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm_backward(const Tensor& dy, const Tensor& x, const MaybeTensor& weight,
                                                               const MaybeTensor& bias, const Tensor& stats, bool training,
                                                               const MaybeTensor& residual, const MaybeTensor& bits, int64_t act,
                                                               bool want_dresidual);

// cross_entropy_backward.cu: the gradient of logits by their losses, written over them; of each row the first elements are classes. dy: one
// factor, or one for each row, or none. stats: what the forward keeps.
void cross_entropy_gradient(const Tensor& logits, int64_t classes, const Tensor& target, const MaybeTensor& weight, int64_t ignore_index,
                            double label_smoothing, double softcap, double z_loss, const MaybeTensor& dy, const Tensor& stats);

// linear.cu: the sums of a contiguous matrix over its rows, in its dtype or in `dtype`.
Tensor column_sum_op(const Tensor& x, ScalarType dtype);

}  // namespace fastlayers

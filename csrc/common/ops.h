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

// batch_norm.cu: act(batch_norm(x) + residual) in training, the mean and rstd of each channel, and the bits of relu; the same with the
// moments that update the running statistics; the gradients of x, residual, weight and bias.
std::tuple<Tensor, Tensor, Tensor> batch_norm_train(const Tensor& x, const MaybeTensor& running_mean, const MaybeTensor& running_var,
                                                    const MaybeTensor& weight, const MaybeTensor& bias, double momentum, double eps,
                                                    const MaybeTensor& residual, int64_t act, bool bits, const MaybeTensor& batches);
std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm_moments(const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
                                                              double eps, const MaybeTensor& residual, int64_t act);
std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm_backward(const Tensor& dy, const Tensor& x, const MaybeTensor& weight,
                                                               const MaybeTensor& bias, const Tensor& stats, bool training,
                                                               const MaybeTensor& residual, const MaybeTensor& bits, int64_t act,
                                                               bool want_dresidual);

// batch_norm.cu: writes act(x + bias + residual) to x.
void channel_bias_act_(const Tensor& x, const Tensor& bias, const MaybeTensor& residual, int64_t act);

// layer_norm_forward.cu, layer_norm_backward.cu: layer_norm, that of a sum with the sum, and that of 16-bit rows plus one row. The last
// one makes x the sum if that is kept, and may overwrite x if it is not.
std::tuple<Tensor, Tensor> layer_norm_forward(const Tensor& x, int64_t dims, const MaybeTensor& weight, const MaybeTensor& bias, double eps,
                                              int64_t kind, ScalarType dtype, bool keep);
std::tuple<Tensor, Tensor, Tensor> add_layer_norm_forward(const Tensor& x, const Tensor& residual, int64_t dims, const MaybeTensor& weight,
                                                          const MaybeTensor& bias, double eps, int64_t kind, ScalarType dtype, bool keep);
std::tuple<Tensor, Tensor> shifted_layer_norm_forward(const Tensor& x, const Tensor& shift, const Tensor& weight, const Tensor& bias,
                                                      double eps, ScalarType dtype, bool keep);
std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& dy, const MaybeTensor& dsum, const Tensor& x, int64_t dims,
                                                       const MaybeTensor& weight, const Tensor& stats, int64_t kind, bool want_weight,
                                                       bool want_bias);

// residual.cu: x·gamma·keep·scale + residual, and the gradients of x and gamma.
Tensor scale_add(const Tensor& x, const MaybeTensor& gamma, const MaybeTensor& residual, const MaybeTensor& keep, double scale,
                 ScalarType dtype);
std::tuple<Tensor, Tensor> scale_add_backward(const Tensor& dy, const Tensor& x, const Tensor& gamma, const MaybeTensor& keep,
                                              double scale);

// elementwise.cu: x·y with broadcasting.
Tensor mul(const Tensor& x, const Tensor& y);

// squeeze_excite.cu: the sums of x·factor or x·y over space, (N, C, 1, 1); x·scale + factor·shift for scale and shift of that shape.
Tensor spatial_sum(const Tensor& x, const MaybeTensor& y, double factor);
Tensor scale_shift(const Tensor& x, const Tensor& scale_in, const Tensor& shift_in, double factor);

// linear.cu: the sums of a contiguous matrix over its rows, in its dtype or in `dtype`; a float32 matrix in 16 bits, and its sums.
Tensor column_sum_op(const Tensor& x, ScalarType dtype);
std::tuple<Tensor, Tensor> narrowed_and_summed(const Tensor& x, ScalarType dtype);

// linear.cu: while one lives, one launch at the end adds up all the float32 sums of pieces that its thread asks for, instead of one launch
// each. It is for gradients of parameters, of which a block of a network has four to six, and which nothing in the block reads.
class LaterSums : public Innermost<LaterSums> {
 public:
  // Adds up partial [pieces, columns], which begins with element `offset`, to sums [columns].
  void add(const Tensor& partial, int64_t offset, float* sums, int64_t pieces, int64_t columns);
  void launch();

 private:
  struct Sum {
    Tensor partial;  // kept until it is read
    const float* from;
    float* to;
    int64_t pieces, columns;
  };
  std::vector<Sum> waiting_;
};

}  // namespace fastlayers

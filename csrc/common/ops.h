// What one kernel file offers to the others.
#pragma once

#include "tensor.h"

namespace fastlayers {

// act(x + bias); the gradients of x and of the bias, the second one in x's dtype or that one, and act(x + bias) anew: bias_act.cu.
Tensor bias_act_forward_op(const Tensor& x, const std::optional<Tensor>& bias, int64_t act, double first, double second);
std::tuple<Tensor, Tensor, std::optional<Tensor>> bias_act_gradients(const Tensor& dy, const Tensor& x,
                                                                     const std::optional<Tensor>& bias, int64_t act, double first,
                                                                     double second, bool dbias, std::optional<ScalarType> dtype, bool keep);

// act(batch_norm(x) + residual) in training, the mean and rstd of each channel, and where relu let through; the same with the moments that
// the running statistics are updated with; the gradients of x, of the residual, of the weight and of the bias: batch_norm.cu.
std::tuple<Tensor, Tensor, Tensor> batch_norm_train(const Tensor& x, const std::optional<Tensor>& residual,
                                                    const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                                                    const std::optional<Tensor>& running_mean,
                                                    const std::optional<Tensor>& running_var, double momentum, double eps,
                                                    int64_t act, bool bits, const std::optional<Tensor>& batches);
std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm_moments(const Tensor& x, const std::optional<Tensor>& residual,
                                                              const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                                                              double eps, int64_t act);
std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm_backward_op(const Tensor& dy, const Tensor& x,
                                                                  const std::optional<Tensor>& residual,
                                                                  const std::optional<Tensor>& bits, const std::optional<Tensor>& weight,
                                                                  const std::optional<Tensor>& bias, const Tensor& stats, bool training,
                                                                  int64_t act, bool want_dresidual);

// act(x + bias + residual), written to x: batch_norm.cu.
void channel_bias_act_(const Tensor& x, const Tensor& bias, const std::optional<Tensor>& residual, int64_t act);

// layer_norm, that of a sum with the sum, that of halves plus one row, which x becomes if it is kept (if not, x may be overwritten), and its
// gradients: layer_norm_forward.cu, layer_norm_backward.cu.
std::tuple<Tensor, Tensor> layer_norm_forward(const Tensor& x, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                                              int64_t dims, double eps, int64_t kind, ScalarType dtype, bool keep);
std::tuple<Tensor, Tensor, Tensor> add_layer_norm_forward(const Tensor& x, const Tensor& residual, const std::optional<Tensor>& weight,
                                                          const std::optional<Tensor>& bias, int64_t dims, double eps, int64_t kind,
                                                          ScalarType dtype, bool keep);
std::tuple<Tensor, Tensor> shifted_layer_norm_forward(const Tensor& x, const Tensor& shift, const Tensor& weight, const Tensor& bias,
                                                      double eps, ScalarType dtype, bool keep);
std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& dy, const std::optional<Tensor>& dsum, const Tensor& x,
                                                       const Tensor& stats, const std::optional<Tensor>& weight, int64_t dims,
                                                       int64_t kind, bool want_weight, bool want_bias);

// x·gamma·keep·scale + residual, and the gradients of x and gamma: residual.cu.
Tensor scale_add(const Tensor& x, const std::optional<Tensor>& gamma, const std::optional<Tensor>& keep, double scale,
                 const std::optional<Tensor>& residual, ScalarType dtype);
std::tuple<Tensor, Tensor> scale_add_backward(const Tensor& dy, const Tensor& x, const Tensor& gamma, const std::optional<Tensor>& keep,
                                              double scale);

// x·y, which broadcast: elementwise.cu.
Tensor mul(const Tensor& x, const Tensor& y);

// The sums over space of x·factor or x·y, (N, C, 1, 1); x·scale + factor·shift for scale and shift of that shape: squeeze_excite.cu.
Tensor spatial_sum(const Tensor& x, const std::optional<Tensor>& y, double factor);
Tensor scale_shift(const Tensor& x, const Tensor& scale_in, const Tensor& shift_in, double factor);

// The sums of a contiguous matrix over its rows, in its dtype or that one; of one in float32 also itself as halves: linear.cu.
Tensor column_sum_op(const Tensor& x, ScalarType dtype);
std::tuple<Tensor, Tensor> narrowed_and_summed(const Tensor& x, ScalarType dtype);

// While one lives, sums of pieces in float32 that its thread asks for are added up by one launch at the end, instead of one each. It is
// for gradients of parameters, of which a block of a network has four to six, and which nothing in it reads: linear.cu.
class LaterSums : public Innermost<LaterSums> {
 public:
  // partial [pieces, columns], from an element on, to sums [columns].
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

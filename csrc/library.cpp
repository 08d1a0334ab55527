// The schemas of every op that csrc implements. The kernels register themselves beside their code:
// <family>*.cu for CUDA, <family>.cpp for CPU. No autograd here: the stable ABI has none, so fastlayers/ops wraps these.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_FRAGMENT(fastlayers, m) {
  m.def("softmax_forward(Tensor x, int dim, float scale, Tensor? mask, ScalarType dtype, bool log) -> Tensor");
  m.def("softmax_backward(Tensor dy, Tensor y, int dim, float scale, Tensor? mask, ScalarType dtype, bool log) -> Tensor");
  m.def("relu_add(Tensor x, Tensor y, Tensor? bias, float alpha) -> Tensor");
  m.def("relu_add_train(Tensor x, Tensor y, Tensor? bias, float alpha) -> (Tensor, Tensor)");
  m.def("add_relu(Tensor x, Tensor y) -> Tensor");
  m.def("add_relu_train(Tensor x, Tensor y) -> (Tensor, Tensor)");
  m.def("relu_backward(Tensor dy, Tensor bits) -> Tensor");
  m.def("relu_add_backward(Tensor dy, Tensor bits, int[] bias_shape) -> (Tensor, Tensor)");
  m.def("mul(Tensor x, Tensor y) -> Tensor");
  m.def("mul_backward(Tensor dy, Tensor x, Tensor y) -> (Tensor, Tensor)");
  m.def("scale_(Tensor(a!) x, Tensor factor) -> ()");
  m.def("max_pool2d_forward(Tensor x, int[] kernel_size, int[] stride, int[] padding, int[] dilation, int[] out_size, bool channels_last, bool keep) -> (Tensor, Tensor)");
  m.def("max_pool2d_backward(Tensor dy, Tensor offsets, int[] kernel_size, int[] stride, int[] padding, int[] dilation, int[] size, bool channels_last) -> Tensor");
  m.def("spatial_sum(Tensor x, Tensor? y, float factor) -> Tensor");
  m.def("scale_shift(Tensor x, Tensor scale, Tensor shift, float factor) -> Tensor");
  m.def("bias_act_forward(Tensor x, Tensor? bias, int act, float first, float second) -> Tensor");
  m.def("bias_act_backward(Tensor dy, Tensor x, Tensor? bias, int act, float first, float second, bool dbias, ScalarType? dtype=None) -> (Tensor, Tensor)");
  m.def("linear_autocast(Tensor x, Tensor weight, Tensor? bias) -> (Tensor, Tensor)");
  m.def("linear_autocast_backward(Tensor dy, Tensor x, Tensor low, bool dx, bool dweight, bool dbias) -> (Tensor, Tensor, Tensor)");
  m.def("mlp_autocast(Tensor x, Tensor weight, Tensor bias, Tensor weight2, Tensor? bias2, int act, float first, float second) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("mlp_autocast_backward(Tensor dy, Tensor x, Tensor product, Tensor low, Tensor low_bias, Tensor low2, int act, float first, float second, bool dx, bool dweight, bool dbias, bool dweight2, bool dbias2) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("convolution_autocast(Tensor x, Tensor weight, Tensor bias, int[] stride, int[] padding, int[] dilation, int groups) -> (Tensor, Tensor)");
  m.def("convolution_autocast_backward(Tensor dy, Tensor x, Tensor low, int[] stride, int[] padding, int[] dilation, int groups, bool dx, bool dweight, bool dbias) -> (Tensor, Tensor, Tensor)");
  m.def("convolution_norm_autocast(Tensor x, Tensor weight, Tensor? residual, Tensor? norm_weight, Tensor? norm_bias, Tensor(a!)? running_mean, Tensor(b!)? running_var, float momentum, float eps, int act, bool bits, Tensor(c!)? num_batches_tracked, int[] stride, int[] padding, int[] dilation, int groups) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("convolution_norm_autocast_backward(Tensor dy, Tensor x, Tensor low, Tensor z, Tensor? residual, Tensor? bits, Tensor? norm_weight, Tensor? norm_bias, Tensor stats, int act, int[] stride, int[] padding, int[] dilation, int groups, bool dx, bool dweight, bool dresidual) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("gather_backward(Tensor dy, Tensor index, int columns) -> Tensor");
  m.def("column_sum(Tensor x, ScalarType dtype) -> Tensor");
  m.def("gated_forward(Tensor gate, Tensor up, int act) -> Tensor");
  m.def("gated_backward(Tensor dy, Tensor gate, Tensor up, int act) -> (Tensor, Tensor)");
  m.def("gated_backward_(Tensor(a!) dy, Tensor gate, Tensor up, int act) -> Tensor");
  m.def("glu_forward(Tensor x, int dim, int act, bool gate_first) -> Tensor");
  m.def("glu_backward(Tensor dy, Tensor x, int dim, int act, bool gate_first) -> Tensor");
  m.def("layer_norm_forward(Tensor x, int dims, Tensor? weight, Tensor? bias, float eps, int kind, ScalarType dtype, bool keep) -> (Tensor, Tensor)");
  m.def("add_layer_norm_forward(Tensor x, Tensor residual, int dims, Tensor? weight, Tensor? bias, float eps, int kind, ScalarType dtype, bool keep) -> (Tensor, Tensor, Tensor)");
  m.def("layer_norm_backward(Tensor dy, Tensor? dsum, Tensor x, int dims, Tensor? weight, Tensor stats, int kind, bool dweight, bool dbias, ScalarType? narrow=None) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("batch_norm_train(Tensor x, Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor? weight, Tensor? bias, float momentum, float eps, Tensor? residual, int act, bool bits, Tensor(c!)? num_batches_tracked=None) -> (Tensor, Tensor, Tensor)");
  m.def("batch_norm_moments(Tensor x, Tensor? weight, Tensor? bias, float eps, Tensor? residual, int act) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("batch_norm_update_(Tensor(a!) running_mean, Tensor(b!) running_var, Tensor(c!)? num_batches_tracked, Tensor moments, float momentum) -> ()");
  m.def("batch_norm_eval(Tensor x, Tensor running_mean, Tensor running_var, Tensor? weight, Tensor? bias, float eps, Tensor? residual, int act, bool bits, bool keep) -> (Tensor, Tensor, Tensor)");
  m.def("channel_bias_act_(Tensor(a!) x, Tensor bias, Tensor? residual, int act) -> ()");
  m.def("batch_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor stats, bool training, Tensor? residual, Tensor? bits, int act, bool dresidual) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("group_norm_forward(Tensor x, int num_groups, Tensor? weight, Tensor? bias, float eps, int act, ScalarType dtype, bool keep) -> (Tensor, Tensor)");
  m.def("group_norm_backward(Tensor dy, Tensor x, int num_groups, Tensor? weight, Tensor? bias, Tensor stats, int act) -> (Tensor, Tensor, Tensor)");
  m.def("rotary(Tensor q, Tensor? k, Tensor cos, Tensor sin, bool interleaved, int rotary_dim, bool backward, ScalarType dtype, int head, int[] q_strides, int[] k_strides) -> (Tensor, Tensor)");
  m.def("kl_div_sum(Tensor input, Tensor target, bool log_target) -> Tensor");
  m.def("kl_div_elements(Tensor input, Tensor target, bool log_target, ScalarType dtype) -> Tensor");
  m.def("kl_div_backward(Tensor dy, Tensor? input, Tensor target, bool log_target, bool dinput, bool dtarget) -> (Tensor, Tensor)");
  m.def("divergence_forward(Tensor student, Tensor teacher, Tensor? labels, int ignore_index, float beta, float temperature) -> (Tensor, Tensor)");
  m.def("divergence_backward(Tensor dlosses, Tensor student, Tensor teacher, Tensor? labels, int ignore_index, float beta, float temperature, Tensor stats, bool dstudent, bool dteacher) -> (Tensor, Tensor)");
  m.def("dropout_add(Tensor x, Tensor? residual, float p, Tensor seed, ScalarType dtype) -> Tensor");
  m.def("scale_add(Tensor x, Tensor? gamma, Tensor? residual, Tensor? keep, float scale, ScalarType dtype) -> Tensor");
  m.def("scale_add_backward(Tensor dy, Tensor x, Tensor gamma, Tensor? keep, float scale) -> (Tensor, Tensor)");
  m.def("cross_entropy_forward(Tensor x, Tensor target, Tensor? weight, int ignore_index, int reduction, float label_smoothing, float softcap, float z_loss, ScalarType dtype) -> (Tensor, Tensor)");
  m.def("cross_entropy_backward(Tensor dy, Tensor x, Tensor target, Tensor? weight, Tensor stats, int ignore_index, int reduction, float label_smoothing, float softcap, float z_loss) -> Tensor");
  m.def("cross_entropy_backward_(Tensor dy, Tensor(a!) x, Tensor target, Tensor? weight, Tensor stats, int ignore_index, int reduction, float label_smoothing, float softcap, float z_loss) -> ()");
  m.def("cross_entropy_chunk_(Tensor(a!) logits, Tensor target, Tensor? weight, int ignore_index, float label_smoothing, float softcap, float z_loss, Tensor? grad_scale, bool want_grad, int columns) -> Tensor");
}

// Linear layers, MLPs and convolutions under autocast: of a tensor in a half and float32 parameters, a forward and a backward in one
// call each.
//
// The products are torch's own. What is gained is the host's time, which bounds the step of many a network: the parameters of a layer
// are cast in one launch instead of one each, their gradients come in float32 from the product and the sum instead of from a cast
// each, and Python and the dispatcher see one call where there were five to nine.
#include "flat.cuh"
#include "ops.h"

// These live in libtorch_cuda. Weak, so that the library also loads under a CPU-only torch. They are what AOTInductor's compiled
// models call, which torch keeps as stable as the rest of the shim.
extern "C" {
__attribute__((weak)) AOTITorchError aoti_torch_cuda_mm_out(AtenTensorHandle out, AtenTensorHandle x, AtenTensorHandle y);
__attribute__((weak)) AOTITorchError aoti_torch_cuda_mm_dtype_out(AtenTensorHandle out, AtenTensorHandle x, AtenTensorHandle y,
                                                                  int32_t dtype);
__attribute__((weak)) AOTITorchError aoti_torch_cuda_addmm_out(AtenTensorHandle out, AtenTensorHandle bias, AtenTensorHandle x,
                                                               AtenTensorHandle y, double beta, double alpha);
__attribute__((weak)) AOTITorchError aoti_torch_cuda_convolution(
    AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle* bias, const int64_t* stride, int64_t strides, const int64_t* padding,
    int64_t paddings, const int64_t* dilation, int64_t dilations, int32_t transposed, const int64_t* output_padding,
    int64_t output_paddings, int64_t groups, AtenTensorHandle* y);
__attribute__((weak)) AOTITorchError aoti_torch_cuda_convolution_backward(
    AtenTensorHandle dy, AtenTensorHandle x, AtenTensorHandle weight, const int64_t** bias_sizes, int64_t bias_dims,
    const int64_t* stride, int64_t strides, const int64_t* padding, int64_t paddings, const int64_t* dilation, int64_t dilations,
    int32_t transposed, const int64_t* output_padding, int64_t output_paddings, int64_t groups, const int32_t* mask, int64_t masks,
    AtenTensorHandle* dx, AtenTensorHandle* dweight, AtenTensorHandle* dbias);
}

namespace fastlayers {
namespace {

constexpr int kMost = 7;  // tensors that are narrowed together

struct Narrowing {
  const float* from[kMost];
  void* to[kMost];
  int64_t n[kMost];
  unsigned first[kMost + 1];  // block of each
  bool is_aligned[kMost];
};

template <typename T>
__global__ void __launch_bounds__(kThreads) narrow(const __grid_constant__ Narrowing a) {
  constexpr int V = kVector<T>;
  int t = 0;
#pragma unroll
  for (int k = 1; k < kMost; ++k) t += blockIdx.x >= a.first[k];
  const float* from = a.from[t];
  T* to = static_cast<T*>(a.to[t]);
  const int64_t i = (static_cast<int64_t>(blockIdx.x - a.first[t]) * kThreads + threadIdx.x) * V;
  if (a.is_aligned[t] && i + V <= a.n[t]) {
    store_vec<T, V>(to + i, pack<T>(load_vec<float, V>(from + i)));
  } else {
#pragma unroll
    for (int j = 0; j < V; ++j)
      if (i + j < a.n[t]) to[i + j] = convert<T>(from[i + j]);
  }
}

// ---- host ---------------------------------------------------------------------------------------------------------------

// The parameters as halves, each in its own layout. Those that are none stay so.
using Parameters = std::array<std::optional<Tensor>, kMost>;

Parameters narrowed(const Parameters& given, ScalarType dtype, const char* op) {
  Parameters found;
  Narrowing a{};
  unsigned blocks = 0;
  for (int k = 0; k < kMost; ++k) {
    a.first[k] = blocks;
    if (!given[k]) continue;
    const Tensor& t = *given[k];
    const Dims sizes = dims_of(t.sizes()), strides = dims_of(t.strides());
    STD_TORCH_CHECK(t.is_cuda() && t.get_device_index() == given[0]->get_device_index() && t.scalar_type() == ScalarType::Float &&
                        (t.is_contiguous() || same_layout(sizes, strides, dense_strides(sizes, memory_order(sizes, {&strides})))),
                    "fastlayers::", op, ": expected dense float32 parameters on one device");
    found[k] = empty_strided(sizes, strides, dtype, t);
    a.from[k] = static_cast<const float*>(t.const_data_ptr());
    a.to[k] = found[k]->mutable_data_ptr();
    a.n[k] = t.numel();
    a.is_aligned[k] = aligned(a.from[k]);
    blocks += flat_blocks<__half, 1>(a.n[k]);
  }
  a.first[kMost] = blocks;
  STD_TORCH_CHECK(dtype == ScalarType::Half || dtype == ScalarType::BFloat16, "fastlayers::", op,
                  ": expected float16 or bfloat16, but got ", torch::headeronly::toString(dtype));
  if (blocks == 0) return found;
  const Launch launch(*given[0]);
  if (dtype == ScalarType::Half) narrow<__half><<<blocks, kThreads, 0, launch.stream()>>>(a);
  else narrow<__nv_bfloat16><<<blocks, kThreads, 0, launch.stream()>>>(a);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return found;
}

// The memory of a tensor as a matrix, or as the transpose of one.
Tensor matrix(const Tensor& t, int64_t rows, int64_t columns, bool transposed = false) {
  const int64_t sizes[2] = {transposed ? columns : rows, transposed ? rows : columns};
  const int64_t strides[2] = {transposed ? 1 : columns, transposed ? columns : 1};
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(t.get(), 2, sizes, strides, 0, &handle));
  return Tensor(handle);
}

// x·y, plus a bias where there is one, as a matrix of x's dtype.
void multiply(const Tensor& out, const Tensor& x, const Tensor& y, const std::optional<Tensor>& bias = std::nullopt) {
  if (bias) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_addmm_out(out.get(), bias->get(), x.get(), y.get(), 1.0, 1.0));
  } else {
    TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_mm_out(out.get(), x.get(), y.get()));
  }
}

// dyᵀ·x in float32.
Tensor weight_gradient(const Tensor& dy, const Tensor& x, int64_t rows, int64_t n, int64_t k) {
  Tensor dweight = empty_contiguous({n, k}, ScalarType::Float, x);
  const Tensor left = matrix(dy, rows, n, true), right = matrix(x, rows, k);
  TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_mm_dtype_out(dweight.get(), left.get(), right.get(), raw(ScalarType::Float)));
  return dweight;
}

// The sizes of a linear layer's result.
Dims result_sizes(const Tensor& x, int64_t n) {
  Dims sizes = dims_of(x.sizes());
  sizes.back() = n;
  return sizes;
}

void check_rows(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, int64_t k, const char* op) {
  STD_TORCH_CHECK(x.is_cuda() && x.is_contiguous() && x.dim() > 0 && x.numel() > 0 && weight.dim() == 2 && weight.is_contiguous() &&
                      weight.size(1) == k && (!bias || (bias->dim() == 1 && bias->size(0) == weight.size(0))),
                  "fastlayers::", op, ": expected contiguous rows, and a weight and a bias for them");
}

Tensor nothing(const Tensor& like) { return empty_contiguous({0}, like.scalar_type(), like); }

Tensor dense(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }

// x·weightᵀ + bias, and the weight's cast.
std::tuple<Tensor, Tensor> linear_autocast(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  const char* op = "linear_autocast";
  const int64_t k = x.size(x.dim() - 1), n = weight.size(0), rows = x.numel() / std::max<int64_t>(k, 1);
  check_rows(x, weight, bias, k, op);
  const Parameters low = narrowed({weight, bias}, x.scalar_type(), op);
  Tensor y = empty_contiguous(result_sizes(x, n), x.scalar_type(), x);
  multiply(matrix(y, rows, n), matrix(x, rows, k), matrix(*low[0], n, k, true), low[1]);
  return {y, *low[0]};
}

// The gradients that are wanted.
std::tuple<Tensor, Tensor, Tensor> linear_autocast_backward(const Tensor& dy_in, const Tensor& x, const Tensor& low, bool for_x,
                                                            bool for_weight, bool for_bias) {
  const int64_t n = low.size(0), k = low.size(1), rows = x.numel() / k;
  const Tensor dy = dense(dy_in);
  Tensor dx = for_x ? empty_contiguous(dims_of(x.sizes()), x.scalar_type(), x) : nothing(x);
  if (for_x) multiply(matrix(dx, rows, k), matrix(dy, rows, n), low);
  return {dx, for_weight ? weight_gradient(dy, x, rows, n, k) : nothing(x),
          for_bias ? column_sum_op(matrix(dy, rows, n), ScalarType::Float) : nothing(x)};
}

// act(x·weightᵀ + bias)·weight2ᵀ + bias2, the first product without its bias, and the casts of weight, bias and weight2.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> mlp_autocast(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                                                const Tensor& weight2, const std::optional<Tensor>& bias2, int64_t act,
                                                                double first, double second) {
  const char* op = "mlp_autocast";
  const int64_t k = x.size(x.dim() - 1), m = weight.size(0), n = weight2.size(0), rows = x.numel() / std::max<int64_t>(k, 1);
  check_rows(x, weight, bias, k, op);
  check_rows(x, weight2, bias2, m, op);
  const Parameters low = narrowed({weight, bias, weight2, bias2}, x.scalar_type(), op);
  Tensor product = empty_contiguous({rows, m}, x.scalar_type(), x), y = empty_contiguous(result_sizes(x, n), x.scalar_type(), x);
  multiply(product, matrix(x, rows, k), matrix(*low[0], m, k, true));
  const Tensor activated = bias_act_forward_op(product, low[1], act, first, second);
  multiply(matrix(y, rows, n), activated, matrix(*low[2], n, m, true), low[3]);
  return {y, product, *low[0], *low[1], *low[2]};
}

// The gradients of x, weight, bias, weight2 and bias2, those that are wanted. What was activated is computed anew.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> mlp_autocast_backward(const Tensor& dy_in, const Tensor& x, const Tensor& product,
                                                                         const Tensor& low, const Tensor& low_bias, const Tensor& low2,
                                                                         int64_t act, double first, double second, bool for_x,
                                                                         bool for_weight, bool for_bias, bool for_weight2,
                                                                         bool for_bias2) {
  const int64_t m = low.size(0), k = low.size(1), n = low2.size(0), rows = x.numel() / k;
  const Tensor dy = dense(dy_in);
  Tensor dactivated = empty_contiguous({rows, m}, x.scalar_type(), x), dweight2 = nothing(x);
  multiply(dactivated, matrix(dy, rows, n), low2);
  auto [dproduct, dbias, activated] =
      bias_act_gradients(dactivated, product, low_bias, act, first, second, for_bias, ScalarType::Float, for_weight2);
  dactivated = nothing(x);  // its memory is free for what follows, and so is that of `activated` soon
  if (activated) dweight2 = weight_gradient(dy, *activated, rows, n, m);
  activated.reset();
  Tensor dx = for_x ? empty_contiguous(dims_of(x.sizes()), x.scalar_type(), x) : nothing(x);
  if (for_x) multiply(matrix(dx, rows, k), dproduct, low);
  return {dx, for_weight ? weight_gradient(dproduct, x, rows, m, k) : nothing(x), dbias, dweight2,
          for_bias2 ? column_sum_op(matrix(dy, rows, n), ScalarType::Float) : nothing(x)};
}

// Of a convolution over images.
struct Geometry {
  std::vector<int64_t> stride, padding, dilation;
  int64_t groups;
};
constexpr std::array<int64_t, 2> kNoPadding{0, 0};  // of the result: convolutions are not transposed here

Tensor convolve(const Tensor& x, const Tensor& low, const std::optional<Tensor>& bias, const Geometry& g) {
  AtenTensorHandle low_bias = bias ? bias->get() : nullptr, y = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_convolution(
      x.get(), low.get(), bias ? &low_bias : nullptr, g.stride.data(), static_cast<int64_t>(g.stride.size()), g.padding.data(),
      static_cast<int64_t>(g.padding.size()), g.dilation.data(), static_cast<int64_t>(g.dilation.size()), 0, kNoPadding.data(), 2,
      g.groups, &y));
  return Tensor(y);
}

// The gradients of x and, in float32, of the weight, those that are wanted.
std::tuple<Tensor, Tensor> convolution_gradients(const Tensor& dy, const Tensor& x, const Tensor& low, const Geometry& g, bool for_x,
                                                 bool for_weight) {
  const std::array<int32_t, 3> mask{for_x, for_weight, 0};
  AtenTensorHandle handles[3] = {nullptr, nullptr, nullptr};
  if (for_x || for_weight) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_convolution_backward(
        dy.get(), x.get(), low.get(), nullptr, 0, g.stride.data(), static_cast<int64_t>(g.stride.size()), g.padding.data(),
        static_cast<int64_t>(g.padding.size()), g.dilation.data(), static_cast<int64_t>(g.dilation.size()), 0, kNoPadding.data(), 2,
        g.groups, mask.data(), 3, &handles[0], &handles[1], &handles[2]));
  }
  std::array<Tensor, 2> found{nothing(x), nothing(x)};
  for (int k = 0; k < 3; ++k) {
    if (handles[k] == nullptr) continue;
    const Tensor t(handles[k]);
    if (k < 2 && mask[k]) found[k] = t;
  }
  if (!for_weight) return {found[0], found[1]};
  Tensor dweight = empty_strided(dims_of(found[1].sizes()), dims_of(found[1].strides()), ScalarType::Float, x);
  torch::stable::copy_(dweight, found[1]);
  return {found[0], dweight};
}

// A convolution over images and the weight's cast.
std::tuple<Tensor, Tensor> convolution_autocast(const Tensor& x, const Tensor& weight, const Tensor& bias, std::vector<int64_t> stride,
                                                std::vector<int64_t> padding, std::vector<int64_t> dilation, int64_t groups) {
  const Parameters low = narrowed({weight, bias}, x.scalar_type(), "convolution_autocast");
  return {convolve(x, *low[0], low[1], {std::move(stride), std::move(padding), std::move(dilation), groups}), *low[0]};
}

// Its gradients, those that are wanted; of the bias only of a dy that is channels_last.
std::tuple<Tensor, Tensor, Tensor> convolution_autocast_backward(const Tensor& dy, const Tensor& x, const Tensor& low,
                                                                 std::vector<int64_t> stride, std::vector<int64_t> padding,
                                                                 std::vector<int64_t> dilation, int64_t groups, bool for_x,
                                                                 bool for_weight, bool for_bias) {
  const auto [dx, dweight] =
      convolution_gradients(dy, x, low, {std::move(stride), std::move(padding), std::move(dilation), groups}, for_x, for_weight);
  const int64_t channels = dy.size(1);
  return {dx, dweight, for_bias ? column_sum_op(matrix(dy, dy.numel() / channels, channels), ScalarType::Float) : nothing(x)};
}

// act(batch_norm(convolution(x)) + residual) in training; the weight's cast, the convolution's result, and what batch_norm keeps.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> convolution_norm_autocast(
    const Tensor& x, const Tensor& weight, const std::optional<Tensor>& residual, const std::optional<Tensor>& norm_weight,
    const std::optional<Tensor>& norm_bias, const std::optional<Tensor>& running_mean, const std::optional<Tensor>& running_var,
    double momentum, double eps, int64_t act, bool bits, const std::optional<Tensor>& batches, std::vector<int64_t> stride,
    std::vector<int64_t> padding, std::vector<int64_t> dilation, int64_t groups) {
  const Parameters low = narrowed({weight}, x.scalar_type(), "convolution_norm_autocast");
  const Tensor z = convolve(x, *low[0], std::nullopt, {std::move(stride), std::move(padding), std::move(dilation), groups});
  const auto [y, stats, packed] =
      batch_norm_train(z, residual, norm_weight, norm_bias, running_mean, running_var, momentum, eps, act, bits, batches);
  return {y, *low[0], z, stats, packed};
}

// The gradients of x, weight, residual, norm_weight and norm_bias; of the first three those that are wanted.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> convolution_norm_autocast_backward(
    const Tensor& dy, const Tensor& x, const Tensor& low, const Tensor& z, const std::optional<Tensor>& residual,
    const std::optional<Tensor>& bits, const std::optional<Tensor>& norm_weight, const std::optional<Tensor>& norm_bias,
    const Tensor& stats, int64_t act, std::vector<int64_t> stride, std::vector<int64_t> padding, std::vector<int64_t> dilation,
    int64_t groups, bool for_x, bool for_weight, bool for_residual) {
  const auto [dz, dresidual, dnorm_weight, dnorm_bias] =
      batch_norm_backward_op(dy, z, residual, bits, norm_weight, norm_bias, stats, true, act, for_residual);
  const auto [dx, dweight] =
      convolution_gradients(dz, x, low, {std::move(stride), std::move(padding), std::move(dilation), groups}, for_x, for_weight);
  return {dx, dweight, dresidual, dnorm_weight, dnorm_bias};
}

// Rows of C channels as the image that they are the pixels of, in channels_last.
Tensor image(const Tensor& rows, const Dims& sizes) {
  const Dims strides = dense_strides(sizes, {0, 2, 3, 1});
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(rows.get(), 4, sizes.data(), strides.data(), 0, &handle));
  return Tensor(handle);
}

bool is_channels_last(const Tensor& t) {
  const Dims sizes = dims_of(t.sizes());
  return sizes.size() == 4 && same_layout(sizes, dims_of(t.strides()), dense_strides(sizes, {0, 2, 3, 1}));
}

// x + gamma·mlp(layer_norm(convolution(x))) of a float32 image in channels_last, the norm over its channels, and what the backward
// needs: x and the parameters as halves, the convolution's result, the statistics, the norm's result, the first product and the last.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> convnext_block_autocast(
    const Tensor& x, const Tensor& conv_weight, const Tensor& conv_bias, const Tensor& norm_weight, const Tensor& norm_bias,
    const Tensor& weight, const Tensor& bias, const Tensor& weight2, const Tensor& bias2, const Tensor& gamma, ScalarType dtype,
    std::vector<int64_t> padding, double eps, int64_t act, double first, double second) {
  const char* op = "convnext_block_autocast";
  STD_TORCH_CHECK(is_channels_last(x) && x.numel() > 0 && x.scalar_type() == ScalarType::Float, "fastlayers::", op,
                  ": expected a float32 image in channels_last");
  const Dims sizes = dims_of(x.sizes());
  const int64_t channels = sizes[1], rows = x.numel() / channels, inner = weight.size(0);
  const Parameters low = narrowed({x, conv_weight, conv_bias, weight, bias, weight2, bias2}, dtype, op);
  Tensor z = convolve(*low[0], *low[1], low[2], {{1, 1}, std::move(padding), {1, 1}, channels});
  STD_TORCH_CHECK(dims_of(z.sizes()) == sizes, "fastlayers::", op, ": expected a convolution that keeps the shape");
  z = with_strides(z, sizes, dense_strides(sizes, {0, 2, 3, 1}));
  const auto [normed, stats] = layer_norm_forward(matrix(z, rows, channels), norm_weight, norm_bias, 1, eps, 0, dtype, true);
  check_rows(normed, weight, bias, channels, op);
  check_rows(normed, weight2, bias2, inner, op);
  Tensor product = empty_contiguous({rows, inner}, dtype, x), last = empty_contiguous({rows, channels}, dtype, x);
  multiply(product, normed, matrix(*low[3], inner, channels, true));
  multiply(last, bias_act_forward_op(product, low[4], act, first, second), matrix(*low[5], channels, inner, true), low[6]);
  const Tensor out = scale_add(last, gamma, std::nullopt, 1.0, matrix(x, rows, channels), ScalarType::Float);
  return {image(out, sizes), *low[0], *low[1], z, stats, normed, product, *low[3], *low[4], *low[5], last};
}

// Its gradients: of x, if that is wanted, and of all parameters in their order.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> convnext_block_autocast_backward(
    const Tensor& dy_in, const Tensor& low_x, const Tensor& low_conv, const Tensor& z, const Tensor& stats, const Tensor& normed,
    const Tensor& product, const Tensor& low, const Tensor& low_bias, const Tensor& low2, const Tensor& last, const Tensor& norm_weight,
    const Tensor& gamma, std::vector<int64_t> padding, int64_t act, double first, double second, bool for_x) {
  const Dims sizes = dims_of(low_x.sizes());
  const int64_t channels = sizes[1], rows = low_x.numel() / channels;
  const Tensor dy = matrix(with_strides(dy_in, sizes, dense_strides(sizes, {0, 2, 3, 1})), rows, channels);
  auto [dlast, dgamma] = scale_add_backward(dy, last, gamma, std::nullopt, 1.0);
  auto [dnormed, dweight, dbias, dweight2, dbias2] =
      mlp_autocast_backward(dlast, normed, product, low, low_bias, low2, act, first, second, true, true, true, true, true);
  dlast = nothing(low_x);  // its memory is free for what follows
  const auto [dz, dnorm_weight, dnorm_bias] =
      layer_norm_backward(dnormed, std::nullopt, matrix(z, rows, channels), stats, norm_weight, 1, 0, true, true);
  dnormed = nothing(low_x);
  const auto [dlow, dconv_weight] = convolution_gradients(image(dz, sizes), low_x, low_conv, {{1, 1}, std::move(padding), {1, 1}, channels},
                                                          for_x, true);
  Tensor dx = nothing(low_x);
  if (for_x) {
    const Tensor both = with_strides(dlow, sizes, dense_strides(sizes, {0, 2, 3, 1}));
    dx = image(scale_add(matrix(both, rows, channels), std::nullopt, std::nullopt, 1.0, dy, ScalarType::Float), sizes);
  }
  return {dx, dconv_weight, column_sum_op(dz, ScalarType::Float), dnorm_weight, dnorm_bias, dweight, dbias, dweight2, dbias2, dgamma};
}

}  // namespace
}  // namespace fastlayers

STABLE_TORCH_LIBRARY_IMPL(fastlayers, CUDA, m) {
  m.impl("linear_autocast", TORCH_BOX(&fastlayers::linear_autocast));
  m.impl("linear_autocast_backward", TORCH_BOX(&fastlayers::linear_autocast_backward));
  m.impl("mlp_autocast", TORCH_BOX(&fastlayers::mlp_autocast));
  m.impl("mlp_autocast_backward", TORCH_BOX(&fastlayers::mlp_autocast_backward));
  m.impl("convolution_autocast", TORCH_BOX(&fastlayers::convolution_autocast));
  m.impl("convolution_autocast_backward", TORCH_BOX(&fastlayers::convolution_autocast_backward));
  m.impl("convnext_block_autocast", TORCH_BOX(&fastlayers::convnext_block_autocast));
  m.impl("convnext_block_autocast_backward", TORCH_BOX(&fastlayers::convnext_block_autocast_backward));
  m.impl("convolution_norm_autocast", TORCH_BOX(&fastlayers::convolution_norm_autocast));
  m.impl("convolution_norm_autocast_backward", TORCH_BOX(&fastlayers::convolution_norm_autocast_backward));
}

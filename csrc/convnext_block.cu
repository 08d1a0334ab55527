// The block of a ConvNeXt under autocast: one call forward and one backward.
#include "autocast.h"

namespace fastlayers {
namespace {

// x + gamma·mlp(layer_norm(convolution(x))) in float32, of a channels_last image, with the norm over its channels. If `keep`, also what the
// backward needs: 16-bit x unless x is that, the 16-bit parameters, the convolution's result, the statistics, the norm's result, and the
// first and the last product.
std::vector<Tensor> convnext_block_autocast(
    const Tensor& x, const Tensor& conv_weight, const Tensor& conv_bias, const Tensor& norm_weight, const Tensor& norm_bias,
    const Tensor& weight, const Tensor& bias, const Tensor& weight2, const Tensor& bias2, const Tensor& gamma, ScalarType dtype,
    std::vector<int64_t> padding, double eps, int64_t act, double first, double second, bool keep, bool apart) {
  const char* op = "convnext_block_autocast";
  const Pool pool(!apart);
  const bool is_wide = x.scalar_type() == ScalarType::Float;
  FASTLAYERS_CHECK(x.dim() == 4 && is_channels_last(x) && x.numel() > 0 && (is_wide || x.scalar_type() == dtype), op,
                   "expected an image in channels_last, in float32 or in the dtype of the products");
  const Dims sizes = dims_of(x.sizes());
  const int64_t channels = sizes[1], rows = x.numel() / channels, inner = weight.size(0);
  const Parameters low = narrowed({conv_weight, conv_bias, weight, bias, weight2, bias2, is_wide ? MaybeTensor(x) : std::nullopt},
                                  dtype, op, apart);
  Tensor z = convolve(is_wide ? *low[6] : x, *low[0], std::nullopt, {{1, 1}, std::move(padding), {1, 1}, channels});
  FASTLAYERS_CHECK(dims_of(z.sizes()) == sizes, op, "expected a convolution that keeps the shape");
  z = as_channels_last(z);
  // The norm adds the convolution's bias, which torch adds in a kernel of its own.
  auto [normed, stats] = shifted_layer_norm_forward(matrix(z, rows, channels), *low[1], norm_weight, norm_bias, eps, dtype, keep);
  check_rows(normed, weight, bias, channels, op);
  check_rows(normed, weight2, bias2, inner, op);
  Tensor product = empty_contiguous({rows, inner}, dtype, x);
  multiply(product, normed, matrix(*low[2], inner, channels, true));
  if (!keep) z = normed = Tensor();  // here as below, their memory is free for what follows
  Tensor activated = bias_act_forward_op(product, low[3], act, first, second);
  if (!keep) product = Tensor();
  const Tensor last = empty_contiguous({rows, channels}, dtype, x);
  multiply(last, activated, matrix(*low[4], channels, inner, true), low[5]);
  activated = Tensor();
  Tensor residual = x;
  if (!is_wide) {
    residual = empty_strided(sizes, dims_of(x.strides()), ScalarType::Float, x);
    torch::stable::copy_(residual, x);
  }
  const Tensor out = scale_add(last, gamma, matrix(residual, rows, channels), std::nullopt, 1.0, ScalarType::Float);
  if (!keep) return {image(out, sizes)};
  return {image(out, sizes), is_wide ? *low[6] : nothing(x), *low[0], z, stats, normed, product, *low[2], *low[3], *low[4], last};
}

// Its gradients: of x, if wanted, in float32 or in the 16-bit dtype that x had; and of all parameters in their order.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> convnext_block_autocast_backward(
    const Tensor& dy_in, const Tensor& low_x, const Tensor& low_conv, const Tensor& z, const Tensor& stats, const Tensor& normed,
    const Tensor& product, const Tensor& low, const Tensor& low_bias, const Tensor& low2, const Tensor& last, const Tensor& norm_weight,
    const Tensor& gamma, std::vector<int64_t> padding, int64_t act, double first, double second, bool for_x, bool is_wide, bool apart) {
  const Pool pool(!apart);
  LaterSums sums;
  const Dims sizes = dims_of(low_x.sizes());
  const int64_t channels = sizes[1], rows = low_x.numel() / channels;
  const Tensor dy = matrix(as_channels_last(dy_in), rows, channels);
  auto [dlast, dgamma] = scale_add_backward(dy, last, gamma, std::nullopt, 1.0);
  auto [dnormed, dweight, dbias, dweight2, dbias2] =
      mlp_gradients(dlast, {normed, product, low, low_bias, low2}, {act, first, second}, {});
  dlast = Tensor();  // its memory is free for what follows
  const auto [dz, dnorm_weight, dnorm_bias] =
      layer_norm_backward(dnormed, std::nullopt, matrix(z, rows, channels), 1, norm_weight, stats, 0, true, true);
  dnormed = Tensor();
  auto [dlow, dconv_weight] =
      convolution_gradients(image(dz, sizes), low_x, low_conv, {{1, 1}, std::move(padding), {1, 1}, channels}, for_x, true);
  widen({&dconv_weight});
  Tensor dx;
  if (for_x) {
    const Tensor both = matrix(as_channels_last(dlow), rows, channels);
    const Tensor sum = scale_add(both, std::nullopt, dy, std::nullopt, 1.0, ScalarType::Float);
    dx = image(is_wide ? sum : *narrowed({sum}, low_x.scalar_type(), "convnext_block_autocast_backward")[0], sizes);
  }
  const Tensor dconv_bias = column_sum_op(dz, ScalarType::Float);
  sums.launch();
  return {for_x ? dx : nothing(low_x), dconv_weight, dconv_bias, dnorm_weight, dnorm_bias, dweight, dbias, dweight2, dbias2, dgamma};
}

}  // namespace
}  // namespace fastlayers

STABLE_TORCH_LIBRARY_IMPL(fastlayers, CUDA, m) {
  m.impl("convnext_block_autocast", TORCH_BOX(&fastlayers::convnext_block_autocast));
  m.impl("convnext_block_autocast_backward", TORCH_BOX(&fastlayers::convnext_block_autocast_backward));
}

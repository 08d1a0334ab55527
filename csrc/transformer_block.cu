// A transformer's block with pre-norms under autocast: x + proj(attention(qkv(norm(x)))), and that plus the MLP of its norm. The residual
// stream is float32, the products are 16-bit. One call computes what comes before the attention and one what comes after; the attention
// itself is torch's.
#include "autocast.h"
#include "common/flat.cuh"

namespace fastlayers {
namespace {

// Packs the gradients of query, key and value, (B, heads, N, size) in any layout whose last dimension is dense, into that of their product,
// (B, N, 3, heads, size).
struct Packing {
  const void* part[3];
  int64_t strides[3][3];  // of images, heads and tokens
  int64_t tokens, heads, words, n;
};

template <typename Word>
__global__ void __launch_bounds__(kThreads) pack_parts(const __grid_constant__ Packing a, Word* __restrict__ out) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= a.n) return;
  const int64_t word = i % a.words, head = i / a.words % a.heads, row = i / (a.words * a.heads);
  const int part = static_cast<int>(row % 3);
  const int64_t token = row / 3 % a.tokens, image = row / (3 * a.tokens);
  const int64_t* strides = a.strides[part];
  out[i] = static_cast<const Word*>(a.part[part])[image * strides[0] + head * strides[1] + token * strides[2] + word];
}

Tensor packed(const std::vector<Tensor>& parts, const char* op) {
  FASTLAYERS_CHECK(parts.size() == 3 && parts[0].dim() == 4, op, "expected the gradients of query, key and value");
  const Dims sizes = dims_of(parts[0].sizes());
  const int64_t width = static_cast<int64_t>(parts[0].element_size());
  Packing a{};
  std::array<Tensor, 3> kept{parts[0], parts[1], parts[2]};
  bool whole = sizes[3] * width % kVectorBytes == 0;
  for (int k = 0; k < 3; ++k) {
    FASTLAYERS_CHECK(dims_of(parts[k].sizes()) == sizes && parts[k].scalar_type() == parts[0].scalar_type(), op,
                     "expected gradients of one shape and dtype");
    if (sizes[3] > 1 && parts[k].stride(3) != 1) kept[k] = torch::stable::contiguous(parts[k]);
    a.part[k] = kept[k].const_data_ptr();
    whole = whole && aligned(a.part[k]);
    for (int d = 0; d < 3; ++d) {
      a.strides[k][d] = kept[k].stride(d);
      whole = whole && a.strides[k][d] * width % kVectorBytes == 0;
    }
  }
  const int64_t each = whole ? kVectorBytes / width : 1;
  for (auto& strides : a.strides)
    for (int64_t& stride : strides) stride /= each;
  a.heads = sizes[1], a.tokens = sizes[2], a.words = sizes[3] / each;
  Tensor out = empty_contiguous({sizes[0] * sizes[2], 3 * sizes[1] * sizes[3]}, parts[0].scalar_type(), parts[0]);
  a.n = out.numel() / each;
  const Launch launch(out);
  if (whole) pack_parts<<<blocks_for(a.n, kThreads), kThreads, 0, launch.stream()>>>(a, pointer<uint4>(out));
  else pack_parts<<<blocks_for(a.n, kThreads), kThreads, 0, launch.stream()>>>(a, pointer<uint16_t>(out));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}

// Query, key and value, (3, B, heads, N, size), of their product, (B·N, 3·heads·size).
Tensor parted(const Tensor& qkv, const Dims& x, int64_t heads) {
  const int64_t width = qkv.size(1) / 3, size = width / heads;
  return reinterpreted(qkv, {3, x[0], heads, x[1], size}, {width, x[1] * 3 * width, size, 3 * width, 1});
}

// (B, heads, N, size) as rows of all heads, and back.
Tensor rows_of(const Tensor& t) {
  const Dims sizes = dims_of(t.sizes());
  const int64_t width = sizes[1] * sizes[3];
  return matrix(with_strides(t, sizes, dense_strides(sizes, {0, 2, 1, 3})), sizes[0] * sizes[2], width);
}
Tensor heads_of(const Tensor& rows, const Dims& sizes) { return reinterpreted(rows, sizes, dense_strides(sizes, {0, 2, 1, 3})); }

enum Parameter { kNormWeight, kNormBias, kQkv, kQkvBias, kProj, kProjBias, kFirst, kFirstBias, kSecond, kSecondBias, kParameters };
enum Low { kLowProj, kLowProjBias, kLowFirst, kLowFirstBias, kLowSecond, kLowSecondBias, kLows };

// qkv(norm(x)) of contiguous rows; and the norm's result, its statistics, and in 16 bits the weight of qkv and all other parameters.
// Here as below, `apart` allocates every tensor on its own.
std::vector<Tensor> transformer_block_autocast_open(const Tensor& x, std::vector<Tensor> parameters, int64_t heads, ScalarType dtype,
                                                    double eps, bool apart) {
  const char* op = "transformer_block_autocast_open";
  const Pool pool(!apart);
  FASTLAYERS_CHECK(parameters.size() == kParameters && x.scalar_type() == ScalarType::Float && x.dim() == 3 && heads > 0 &&
                       parameters[kQkv].size(0) % (3 * heads) == 0,
                   op, "expected float32 rows, ", static_cast<int>(kParameters), " parameters and heads for the first product");
  const int64_t k = x.size(2), rows = x.numel() / std::max<int64_t>(k, 1);
  check_rows(x, parameters[kQkv], parameters[kQkvBias], k, op);
  const Parameters low = narrowed({parameters.begin() + kQkv, parameters.end()}, dtype, op, apart);
  const auto [normed, stats] =
      layer_norm_forward(matrix(x, rows, k), 1, parameters[kNormWeight], parameters[kNormBias], eps, 0, dtype, true);
  const int64_t n = parameters[kQkv].size(0);
  Tensor qkv = empty_contiguous({rows, n}, dtype, x);
  multiply(qkv, normed, matrix(*low[0], n, k, true), low[1]);
  std::vector<Tensor> found{parted(qkv, dims_of(x.sizes()), heads), normed, stats, *low[0]};
  for (size_t i = 2; i < low.size(); ++i) found.push_back(*low[i]);
  return found;
}

// s + mlp(norm(s)) for s = x + proj(attended), of (B, heads, N, size); and s, the norm's result, its statistics and the first product
// without its bias.
std::vector<Tensor> transformer_block_autocast_close(const Tensor& x, const Tensor& of_heads, std::vector<Tensor> low,
                                                     const Tensor& norm_weight, const Tensor& norm_bias, double eps, int64_t act,
                                                     double first, double second, bool apart) {
  const char* op = "transformer_block_autocast_close";
  const Pool pool(!apart);
  FASTLAYERS_CHECK(low.size() == kLows && of_heads.dim() == 4, op, "expected ", static_cast<int>(kLows),
                  " 16-bit parameters, and the result of an attention");
  const ScalarType dtype = low[0].scalar_type();
  const Tensor attended = rows_of(of_heads);
  const int64_t n = low[kLowProj].size(0), k = low[kLowProj].size(1), rows = attended.numel() / k, inner = low[kLowFirst].size(0);
  check_rows(attended, low[kLowProj], low[kLowProjBias], k, op);
  check_rows(x, low[kLowFirst], low[kLowFirstBias], n, op);
  FASTLAYERS_CHECK(low[kLowSecond].size(0) == n && low[kLowSecond].size(1) == inner && x.numel() == rows * n, op,
                   "expected an MLP back to the rows of x");
  Tensor last = empty_contiguous({rows, n}, dtype, x), product = empty_contiguous({rows, inner}, dtype, x);
  multiply(last, matrix(attended, rows, k), matrix(low[kLowProj], n, k, true), low[kLowProjBias]);
  const auto [normed, s, stats] = add_layer_norm_forward(last, matrix(x, rows, n), 1, norm_weight, norm_bias, eps, 0, dtype, true);
  multiply(product, normed, matrix(low[kLowFirst], inner, n, true));
  multiply(last, bias_act_forward_op(product, low[kLowFirstBias], act, first, second), matrix(low[kLowSecond], n, inner, true),
           low[kLowSecondBias]);
  const Tensor out = scale_add(last, std::nullopt, s, std::nullopt, 1.0, ScalarType::Float);
  const Dims sizes = dims_of(x.sizes());
  return {reinterpreted(out, sizes, contiguous_strides(sizes)), s, normed, stats, product};
}

// The gradients of s, in float32, and of the attention's result; and those of weight and bias of proj, of the norm and of both layers of
// the MLP.
std::vector<Tensor> transformer_block_autocast_close_backward(const Tensor& dy_in, const Tensor& of_heads, std::vector<Tensor> low,
                                                              std::vector<Tensor> kept, const Tensor& norm_weight, int64_t act,
                                                              double first, double second, bool apart) {
  const char* op = "transformer_block_autocast_close_backward";
  const Pool pool(!apart);
  LaterSums sums;
  const Tensor attended = rows_of(of_heads);
  FASTLAYERS_CHECK(kept.size() == 4 && low.size() == kLows, op, "expected what the forward kept");
  const Tensor &s = kept[0], &normed = kept[1], &stats = kept[2], &product = kept[3];
  const ScalarType dtype = low[0].scalar_type();
  const int64_t n = low[kLowProj].size(0), k = low[kLowProj].size(1), rows = attended.numel() / k;
  const Tensor dy = matrix(made_contiguous(dy_in), rows, n);
  auto [low_dy, dsecond_bias] = narrowed_and_summed(dy, dtype);
  const KeptMlp mlp{normed, product, low[kLowFirst], low[kLowFirstBias], low[kLowSecond]};
  auto [dnormed, dfirst, dfirst_bias, dsecond, none] = mlp_gradients(low_dy, mlp, {act, first, second}, {true, true, true, true, false});
  low_dy = Tensor();  // its memory is free for what follows
  const auto [ds, dnorm_weight, dnorm_bias] = layer_norm_backward(dnormed, dy, s, 1, norm_weight, stats, 0, true, true);
  dnormed = Tensor();
  const auto [dlast, dproj_bias] = narrowed_and_summed(ds, dtype);
  const Tensor dattended = empty_contiguous({rows, k}, dtype, attended), dproj = weight_gradient(dlast, attended, rows, n, k);
  multiply(dattended, dlast, low[kLowProj]);
  sums.launch();
  return {ds,         heads_of(dattended, dims_of(of_heads.sizes())), dproj, dproj_bias, dnorm_weight, dnorm_bias, dfirst, dfirst_bias,
          dsecond,    dsecond_bias};
}

// The gradients of x, in float32, and of the weight and bias of the norm and of qkv.
std::vector<Tensor> transformer_block_autocast_open_backward(std::vector<Tensor> parts, const Tensor& ds, const Tensor& x,
                                                             const Tensor& normed, const Tensor& stats, const Tensor& low,
                                                             const Tensor& norm_weight, bool apart) {
  const char* op = "transformer_block_autocast_open_backward";
  const Pool pool(!apart);
  LaterSums sums;
  const Tensor dqkv = packed(parts, op);
  const int64_t rows = dqkv.size(0), n = low.size(0), k = low.size(1);
  FASTLAYERS_CHECK(dqkv.size(1) == n && x.numel() == rows * k, op, "expected the gradients of all of the product");
  Tensor dnormed = empty_contiguous({rows, k}, low.scalar_type(), x);
  multiply(dnormed, dqkv, low);
  const auto [dx, dnorm_weight, dnorm_bias] = layer_norm_backward(dnormed, ds, matrix(x, rows, k), 1, norm_weight, stats, 0, true, true);
  const Tensor dbias = column_sum_op(dqkv, ScalarType::Float);
  sums.launch();
  const Dims sizes = dims_of(x.sizes());
  return {reinterpreted(dx, sizes, contiguous_strides(sizes)), dnorm_weight, dnorm_bias, weight_gradient(dqkv, normed, rows, n, k), dbias};
}

}  // namespace
}  // namespace fastlayers

STABLE_TORCH_LIBRARY_IMPL(fastlayers, CUDA, m) {
  m.impl("transformer_block_autocast_open", TORCH_BOX(&fastlayers::transformer_block_autocast_open));
  m.impl("transformer_block_autocast_close", TORCH_BOX(&fastlayers::transformer_block_autocast_close));
  m.impl("transformer_block_autocast_close_backward", TORCH_BOX(&fastlayers::transformer_block_autocast_close_backward));
  m.impl("transformer_block_autocast_open_backward", TORCH_BOX(&fastlayers::transformer_block_autocast_open_backward));
}

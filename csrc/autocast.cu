// Linear layers, MLPs and convolutions under autocast: 16-bit x and float32 parameters, one call forward and one backward.
//
// The products are torch's own. What is gained is the host's time, on which many networks are bound: one launch casts all parameters of a
// layer, their gradients come in float32 from the product and the sum without casts, and Python and the dispatcher see one call instead
// of five to nine.
#include "common/flat.cuh"
#include "common/ops.h"

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

constexpr int kMost = 4;  // tensors of one launch: an MLP has so many parameters

// What one launch casts, each tensor in blocks of its own that follow those of the one before.
struct Casting {
  unsigned first[kMost];  // block of each
  unsigned blocks;
  int count;
  const void* from[kMost];
  void* to[kMost];
  int64_t n[kMost];
  bool is_aligned[kMost];

  __device__ __forceinline__ int of_block() const {
    int t = 0;
#pragma unroll
    for (int k = 1; k < kMost; ++k) t += k < count && blockIdx.x >= first[k];
    return t;
  }
};

template <typename From, typename To>
__global__ void __launch_bounds__(kThreads) cast(const __grid_constant__ Casting a) {
  constexpr int V = kVector<__half>;
  const int t = a.of_block();
  const From* from = static_cast<const From*>(a.from[t]);
  To* to = static_cast<To*>(a.to[t]);
  const int64_t i = (static_cast<int64_t>(blockIdx.x - a.first[t]) * kThreads + threadIdx.x) * V;
  if (a.is_aligned[t] && i + V <= a.n[t]) {
    if constexpr (sizeof(From) > sizeof(To)) store_vec<To, V>(to + i, pack<To>(load_vec<From, V>(from + i)));
    else store_vec<To, V>(to + i, unpack<To>(load_vec<From, V>(from + i)));
  } else {
#pragma unroll
    for (int j = 0; j < V; ++j)
      if (i + j < a.n[t]) to[i + j] = convert<To>(from[i + j]);
  }
}

// ---- host ---------------------------------------------------------------------------------------------------------------

// Casts several tensors in one launch.
struct Casts {
  Casting a{};

  void add(const Tensor& from, const Tensor& to) {
    STD_TORCH_CHECK(a.count < kMost, "fastlayers: more than ", kMost, " tensors are cast in one launch");
    const int k = a.count++;
    a.first[k] = a.blocks;
    a.blocks += flat_blocks<__half, 1>(from.numel());
    a.from[k] = from.const_data_ptr();
    a.to[k] = to.mutable_data_ptr();
    a.n[k] = from.numel();
    a.is_aligned[k] = aligned(a.from[k]) && aligned(a.to[k]);
  }

  template <typename From, typename To>
  void launch(const Tensor& on) {
    if (a.blocks == 0) return;
    const Launch launch(on);
    cast<From, To><<<a.blocks, kThreads, 0, launch.stream()>>>(a);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
};

void check_low_precision(ScalarType dtype, const char* op) {
  FASTLAYERS_CHECK(is_low_precision(dtype), op, "expected float16 or bfloat16, but got ", toString(dtype));
}

// The memory of a tensor, from an element on, in another shape.
Tensor reinterpreted(const Tensor& t, const Dims& sizes, const Dims& strides, int64_t offset = 0) {
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch__reinterpret_tensor(t.get(), static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), offset, &handle));
  return Tensor(handle);
}
// As a matrix or its transpose.
Tensor matrix(const Tensor& t, int64_t rows, int64_t columns, bool transposed = false) {
  return transposed ? reinterpreted(t, {columns, rows}, {1, columns}) : reinterpreted(t, {rows, columns}, {columns, 1});
}

Tensor nothing(const Tensor& like) { return empty_contiguous({0}, like.scalar_type(), like); }

// Casts float32 tensors to a 16-bit dtype, each in its own layout, and leaves missing ones missing. It takes one launch and one
// allocation: each costs the host as much as a product.
using Parameters = std::vector<MaybeTensor>;
Parameters narrowed(const Parameters& given, ScalarType dtype, const char* op) {
  check_low_precision(dtype, op);
  constexpr int64_t kStep = kVectorBytes / 2;
  const auto rounded = [](const Tensor& t) { return (t.numel() + kStep - 1) / kStep * kStep; };
  int64_t total = 0;
  for (const MaybeTensor& t : given) total += t ? rounded(*t) : 0;
  const Tensor memory = empty_contiguous({total}, dtype, *given[0]);
  Parameters found(given.size());
  Casts casts;
  int64_t offset = 0;
  for (size_t k = 0; k < given.size(); ++k) {
    if (!given[k]) continue;
    const Tensor& t = *given[k];
    const Dims sizes = dims_of(t.sizes()), strides = dims_of(t.strides());
    FASTLAYERS_CHECK(t.is_cuda() && t.get_device_index() == given[0]->get_device_index() && t.scalar_type() == ScalarType::Float &&
                         (t.is_contiguous() || is_dense(t)),
                     op, "expected dense float32 parameters on one device");
    found[k] = reinterpreted(memory, sizes, strides, offset);
    offset += rounded(t);
    casts.add(t, *found[k]);
  }
  if (dtype == ScalarType::Half) casts.launch<float, __half>(*given[0]);
  else casts.launch<float, __nv_bfloat16>(*given[0]);
  return found;
}

// A 16-bit gradient in float32.
Tensor widened(const Tensor& t) {
  check_low_precision(t.scalar_type(), "widened");
  Tensor wide = empty_strided(dims_of(t.sizes()), dims_of(t.strides()), ScalarType::Float, t);
  if (!is_dense(t)) {
    torch::stable::copy_(wide, t);
    return wide;
  }
  Casts casts;
  casts.add(t, wide);
  if (t.scalar_type() == ScalarType::Half) casts.launch<__half, float>(t);
  else casts.launch<__nv_bfloat16, float>(t);
  return wide;
}

// out = x·y, plus a bias.
void multiply(const Tensor& out, const Tensor& x, const Tensor& y, const MaybeTensor& bias = std::nullopt) {
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

// Raises an error unless x is contiguous rows of k, and weight and bias are those of a linear layer for them.
void check_rows(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, int64_t k, const char* op) {
  FASTLAYERS_CHECK(x.is_cuda() && x.is_contiguous() && x.dim() > 0 && x.numel() > 0 && weight.dim() == 2 && weight.is_contiguous() &&
                       weight.size(1) == k && (!bias || (bias->dim() == 1 && bias->size(0) == weight.size(0))),
                   op, "expected contiguous rows, and a weight and a bias for them");
}

// Of a convolution over images.
struct Geometry {
  std::vector<int64_t> stride, padding, dilation;
  int64_t groups;
};

constexpr std::array<int64_t, 2> kNoPadding{0, 0};  // of the result: convolutions are not transposed here

Tensor convolve(const Tensor& x, const Tensor& low, const MaybeTensor& bias, const Geometry& g) {
  AtenTensorHandle low_bias = bias ? bias->get() : nullptr, y = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_convolution(
      x.get(), low.get(), bias ? &low_bias : nullptr, g.stride.data(), static_cast<int64_t>(g.stride.size()), g.padding.data(),
      static_cast<int64_t>(g.padding.size()), g.dilation.data(), static_cast<int64_t>(g.dilation.size()), 0, kNoPadding.data(), 2,
      g.groups, &y));
  return Tensor(y);
}

// The gradients of x and, in float32, of the weight; those that are wanted.
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
  std::array<Tensor, 3> found;
  for (int k = 0; k < 3; ++k)
    if (handles[k] != nullptr) found[k] = Tensor(handles[k]);
  return {for_x ? found[0] : nothing(x), for_weight ? widened(found[1]) : nothing(x)};
}

// The sizes of a linear layer's result.
Dims result_sizes(const Tensor& x, int64_t n) {
  Dims sizes = dims_of(x.sizes());
  sizes.back() = n;
  return sizes;
}

// x·weightᵀ + bias, and the weight's cast.
std::tuple<Tensor, Tensor> linear_autocast(const Tensor& x, const Tensor& weight, const MaybeTensor& bias) {
  const char* op = "linear_autocast";
  const int64_t k = x.size(x.dim() - 1), n = weight.size(0), rows = x.numel() / std::max<int64_t>(k, 1);
  check_rows(x, weight, bias, k, op);
  const Parameters low = narrowed({weight, bias}, x.scalar_type(), op);
  Tensor y = empty_contiguous(result_sizes(x, n), x.scalar_type(), x);
  multiply(matrix(y, rows, n), matrix(x, rows, k), matrix(*low[0], n, k, true), low[1]);
  return {y, *low[0]};
}

// The gradients of x, weight and bias, those that are wanted.
std::tuple<Tensor, Tensor, Tensor> linear_autocast_backward(const Tensor& dy_in, const Tensor& x, const Tensor& low, bool for_x,
                                                            bool for_weight, bool for_bias) {
  const int64_t n = low.size(0), k = low.size(1), rows = x.numel() / k;
  const Tensor dy = made_contiguous(dy_in);
  Tensor dx = for_x ? empty_contiguous(dims_of(x.sizes()), x.scalar_type(), x) : nothing(x);
  if (for_x) multiply(matrix(dx, rows, k), matrix(dy, rows, n), low);
  return {dx, for_weight ? weight_gradient(dy, x, rows, n, k) : nothing(x),
          for_bias ? column_sum_op(matrix(dy, rows, n), ScalarType::Float) : nothing(x)};
}

// act(x·weightᵀ + bias)·weight2ᵀ + bias2, the first product without its bias, and the casts of weight, bias and weight2.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> mlp_autocast(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                                                const Tensor& weight2, const MaybeTensor& bias2, int64_t act,
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

// The gradients of x, weight, bias, weight2 and bias2, those that are wanted.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> mlp_autocast_backward(
    const Tensor& dy_in, const Tensor& x, const Tensor& product, const Tensor& low, const Tensor& low_bias, const Tensor& low2, int64_t act,
    double first, double second, bool for_x, bool for_weight, bool for_bias, bool for_weight2, bool for_bias2) {
  const int64_t m = low.size(0), k = low.size(1), n = low2.size(0), rows = x.numel() / k;
  const Tensor dy = made_contiguous(dy_in);
  Tensor dactivated = empty_contiguous({rows, m}, x.scalar_type(), x);
  multiply(dactivated, matrix(dy, rows, n), low2);
  auto [dproduct, dbias, activated] =
      bias_act_gradients(dactivated, product, low_bias, act, first, second, for_bias, ScalarType::Float, for_weight2);
  dactivated = Tensor();  // its memory is free for what follows, and so is that of `activated` soon
  const Tensor dweight2 = activated ? weight_gradient(dy, *activated, rows, n, m) : nothing(x);
  activated.reset();
  Tensor dx = for_x ? empty_contiguous(dims_of(x.sizes()), x.scalar_type(), x) : nothing(x);
  if (for_x) multiply(matrix(dx, rows, k), dproduct, low);
  return {dx, for_weight ? weight_gradient(dproduct, x, rows, m, k) : nothing(x), dbias, dweight2,
          for_bias2 ? column_sum_op(matrix(dy, rows, n), ScalarType::Float) : nothing(x)};
}

// A convolution over images and the weight's cast.
std::tuple<Tensor, Tensor> convolution_autocast(const Tensor& x, const Tensor& weight, const Tensor& bias, std::vector<int64_t> stride,
                                                std::vector<int64_t> padding, std::vector<int64_t> dilation, int64_t groups) {
  const Parameters low = narrowed({weight, bias}, x.scalar_type(), "convolution_autocast");
  return {convolve(x, *low[0], low[1], {std::move(stride), std::move(padding), std::move(dilation), groups}), *low[0]};
}

// Its gradients, those that are wanted. The bias has one only for a dy that is channels_last.
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
    const Tensor& x, const Tensor& weight, const MaybeTensor& residual, const MaybeTensor& norm_weight,
    const MaybeTensor& norm_bias, const MaybeTensor& running_mean, const MaybeTensor& running_var,
    double momentum, double eps, int64_t act, bool bits, const MaybeTensor& batches, std::vector<int64_t> stride,
    std::vector<int64_t> padding, std::vector<int64_t> dilation, int64_t groups) {
  const Parameters low = narrowed({weight}, x.scalar_type(), "convolution_norm_autocast");
  const Tensor z = convolve(x, *low[0], std::nullopt, {std::move(stride), std::move(padding), std::move(dilation), groups});
  const auto [y, stats, packed] =
      batch_norm_train(z, running_mean, running_var, norm_weight, norm_bias, momentum, eps, residual, act, bits, batches);
  return {y, *low[0], z, stats, packed};
}

// The gradients of x, weight, residual, norm_weight and norm_bias; the first three only if wanted.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> convolution_norm_autocast_backward(
    const Tensor& dy, const Tensor& x, const Tensor& low, const Tensor& z, const MaybeTensor& residual,
    const MaybeTensor& bits, const MaybeTensor& norm_weight, const MaybeTensor& norm_bias,
    const Tensor& stats, int64_t act, std::vector<int64_t> stride, std::vector<int64_t> padding, std::vector<int64_t> dilation,
    int64_t groups, bool for_x, bool for_weight, bool for_residual) {
  const auto [dz, dresidual, dnorm_weight, dnorm_bias] =
      batch_norm_backward(dy, z, norm_weight, norm_bias, stats, true, residual, bits, act, for_residual);
  const auto [dx, dweight] =
      convolution_gradients(dz, x, low, {std::move(stride), std::move(padding), std::move(dilation), groups}, for_x, for_weight);
  return {dx, dweight, dresidual, dnorm_weight, dnorm_bias};
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
  m.impl("convolution_norm_autocast", TORCH_BOX(&fastlayers::convolution_norm_autocast));
  m.impl("convolution_norm_autocast_backward", TORCH_BOX(&fastlayers::convolution_norm_autocast_backward));
}

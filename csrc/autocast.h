// What the layers and blocks under autocast are made of: casts of parameters in one launch, products, convolutions.
#pragma once

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

// Tensors of which those that are there become halves, each in its own layout; those that are none stay so. One launch and, unless they
// are wanted apart, one allocation for all: each costs the host as much as a product.
using Parameters = std::vector<std::optional<Tensor>>;
Parameters narrowed(const Parameters& given, ScalarType dtype, const char* op, bool apart = false);

// The same back: gradients that are halves become float32, in place of what was given.
void widen(std::vector<Tensor*> halves);

// The memory of a tensor, from an element on, in another shape: as a matrix, or as the transpose of one; and rows of C channels as the
// image in channels_last that they are the pixels of.
inline Tensor reinterpreted(const Tensor& t, const Dims& sizes, const Dims& strides, int64_t offset = 0) {
  return reinterpreted(t, static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), offset);
}
Tensor matrix(const Tensor& t, int64_t rows, int64_t columns, bool transposed = false);
Tensor image(const Tensor& rows, const Dims& sizes);
bool is_channels_last(const Tensor& t);
Tensor as_channels_last(const Tensor& t);
Tensor made_contiguous(const Tensor& t);
Tensor nothing(const Tensor& like);

// out = x·y, plus a bias where there is one, or plus a matrix, which may be `out`.
void multiply(const Tensor& out, const Tensor& x, const Tensor& y, const std::optional<Tensor>& bias = std::nullopt);

// dyᵀ·x in float32.
Tensor weight_gradient(const Tensor& dy, const Tensor& x, int64_t rows, int64_t n, int64_t k);

// Whether x is contiguous rows of k, and weight and bias are those of a linear layer that takes them.
void check_rows(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, int64_t k, const char* op);

// Of a convolution over images.
struct Geometry {
  std::vector<int64_t> stride, padding, dilation;
  int64_t groups;
};
Tensor convolve(const Tensor& x, const Tensor& low, const std::optional<Tensor>& bias, const Geometry& g);
// The gradients of x and of the weight, both halves, those that are wanted; for another one no tensor.
std::tuple<Tensor, Tensor> convolution_gradients(const Tensor& dy, const Tensor& x, const Tensor& low, const Geometry& g, bool for_x,
                                                 bool for_weight);

// The gradients of an MLP: autocast.cu.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> mlp_autocast_backward(const Tensor& dy_in, const Tensor& x, const Tensor& product,
                                                                         const Tensor& low, const Tensor& low_bias, const Tensor& low2,
                                                                         int64_t act, double first, double second, bool for_x,
                                                                         bool for_weight, bool for_bias, bool for_weight2,
                                                                         bool for_bias2);

}  // namespace fastlayers

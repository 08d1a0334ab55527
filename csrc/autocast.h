// The parts of layers and blocks under autocast: casts of parameters in one launch, products, convolutions.
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

// Casts float32 tensors to a 16-bit dtype, each in its own layout, and leaves missing ones missing. It takes one launch and, unless the
// results are wanted apart, one allocation: each costs the host as much as a product.
using Parameters = std::vector<MaybeTensor>;
Parameters narrowed(const Parameters& given, ScalarType dtype, const char* op, bool apart = false);

// Casts 16-bit gradients to float32, in place of what was given.
void widen(std::vector<Tensor*> gradients);

// The memory of a tensor in another shape: as a matrix or its transpose; and rows of C channels as the channels_last image whose pixels
// they are.
inline Tensor reinterpreted(const Tensor& t, const Dims& sizes, const Dims& strides, int64_t offset = 0) {
  return reinterpreted(t, static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), offset);
}
Tensor matrix(const Tensor& t, int64_t rows, int64_t columns, bool transposed = false);
Tensor image(const Tensor& rows, const Dims& sizes);
Tensor as_channels_last(const Tensor& t);
Tensor made_contiguous(const Tensor& t);
Tensor nothing(const Tensor& like);

// out = x·y, plus a bias, or plus a matrix, which may be `out`.
void multiply(const Tensor& out, const Tensor& x, const Tensor& y, const MaybeTensor& bias = std::nullopt);

// dyᵀ·x in float32.
Tensor weight_gradient(const Tensor& dy, const Tensor& x, int64_t rows, int64_t n, int64_t k);

// Raises an error unless x is contiguous rows of k, and weight and bias are those of a linear layer for them.
void check_rows(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, int64_t k, const char* op);

// Of a convolution over images.
struct Geometry {
  std::vector<int64_t> stride, padding, dilation;
  int64_t groups;
};
Tensor convolve(const Tensor& x, const Tensor& low, const MaybeTensor& bias, const Geometry& g);
// The 16-bit gradients of x and of the weight; an unwanted one is an empty handle.
std::tuple<Tensor, Tensor> convolution_gradients(const Tensor& dy, const Tensor& x, const Tensor& low, const Geometry& g, bool for_x,
                                                 bool for_weight);

// What an MLP's forward keeps: x, the first product without its bias, and the 16-bit weights and first bias.
struct KeptMlp {
  const Tensor &x, &product, &low, &low_bias, &low2;
};
struct Activation {
  int64_t act;
  double first, second;  // its parameters
};
// Which gradients are wanted.
struct WantedMlp {
  bool x = true, weight = true, bias = true, weight2 = true, bias2 = true;
};
// The gradients of x, weight, bias, weight2 and bias2.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> mlp_gradients(const Tensor& dy, const KeptMlp& kept, const Activation& activation,
                                                                 const WantedMlp& wanted);

}  // namespace fastlayers

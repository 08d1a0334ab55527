// Tensors, on PyTorch's stable ABI only, so that one binary serves torch 2.11 and later.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <tuple>
#include <type_traits>
#include <vector>

#ifdef __CUDACC__
// For nvcc torch's complex numbers convert to thrust's, whose headers take longer to read than all others together. No kernel has either.
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>
#pragma push_macro("__CUDACC__")
#undef __CUDACC__
#include <torch/headeronly/util/complex.h>
#pragma pop_macro("__CUDACC__")
#endif
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

namespace fastlayers {

using torch::headeronly::ScalarType;
using torch::headeronly::toString;
using torch::stable::Tensor;

constexpr int kVectorBytes = 16;  // the widest load and store of one thread
constexpr int kMaxDims = 6;       // of a broadcast, after neighbouring dimensions are merged

constexpr int kMaskBits = 8;      // elements to a byte of the bits that a relu keeps for its backward
inline int64_t bytes_of_bits(int64_t n) { return (n + kMaskBits - 1) / kMaskBits; }

using Dims = std::vector<int64_t>;
using MaybeTensor = std::optional<Tensor>;

// A whole number that is known when a kernel is compiled.
template <int N>
using Number = std::integral_constant<int, N>;

// A part of a message: text, a whole number, or another one.
struct Said {
  const char* text = nullptr;
  int64_t whole = 0;
  double number = 0;
  Said(const char* t) : text(t) {}
  Said(double d) : number(d) {}
  template <typename Whole, typename = std::enable_if_t<std::is_integral_v<Whole>>>
  Said(Whole n) : whole(static_cast<int64_t>(n)), number(static_cast<double>(n)) {}
};

// An error that names the op. There is one such function, where STD_TORCH_CHECK has the code of a stream in every place.
[[noreturn]] __attribute__((noinline, cold)) inline void fail(const char* op, std::initializer_list<Said> message) {
  std::ostringstream text;
  text << "fastlayers::" << op << ": ";
  for (const Said& part : message) {
    if (part.text != nullptr) text << part.text;
    else if (part.number == static_cast<double>(part.whole)) text << part.whole;
    else text << part.number;
  }
  throw std::runtime_error(text.str());
}

// Raises an error that names the op unless the condition holds. In templates nvcc 13.0 makes one argument of a list of several.
#ifdef __CUDACC__
#define FASTLAYERS_CHECK(condition, op, ...) STD_TORCH_CHECK(condition, "fastlayers::", op, ": ", __VA_ARGS__)
#else
#define FASTLAYERS_CHECK(condition, op, ...)              \
  do {                                                    \
    if (!(condition)) fastlayers::fail(op, {__VA_ARGS__}); \
  } while (false)
#endif

inline bool is_low_precision(ScalarType dtype) { return dtype == ScalarType::Half || dtype == ScalarType::BFloat16; }

// The dtype in which values of another one are accumulated.
inline ScalarType compute_dtype(ScalarType dtype) { return dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float; }
inline ScalarType compute_dtype(const Tensor& t) { return compute_dtype(t.scalar_type()); }

// The first element of a tensor, to read for a const T and to write for another one. No tensor has a null pointer.
template <typename T>
inline T* pointer(const Tensor& t) {
  if constexpr (std::is_const_v<T>) return static_cast<T*>(t.const_data_ptr());
  else return static_cast<T*>(t.mutable_data_ptr());
}
template <typename T>
inline T* pointer(const MaybeTensor& t) { return t ? pointer<T>(*t) : nullptr; }

inline Dims dims_of(const torch::headeronly::IntHeaderOnlyArrayRef& ref) { return Dims(ref.begin(), ref.end()); }

// A dtype as the C shim takes it.
inline int32_t raw(ScalarType dtype) { return torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)); }

// empty_strided through the C shim, a microsecond cheaper than the dispatcher call in stable::empty_like.
inline Tensor empty_strided(int64_t dims, const int64_t* sizes, const int64_t* strides, ScalarType dtype, const Tensor& like) {
  int32_t device_type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(dims, sizes, strides, raw(dtype), device_type, like.get_device_index(), &handle));
  return Tensor(handle);
}
inline Tensor empty_strided(const Dims& sizes, const Dims& strides, ScalarType dtype, const Tensor& like) {
  return empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), dtype, like);
}

inline Dims contiguous_strides(const Dims& sizes) {
  Dims strides(sizes.size());
  int64_t step = 1;
  for (int64_t d = static_cast<int64_t>(sizes.size()) - 1; d >= 0; --d) {
    strides[d] = step;
    step *= std::max<int64_t>(sizes[d], 1);
  }
  return strides;
}

inline Tensor empty_contiguous(const Dims& sizes, ScalarType dtype, const Tensor& like) {
  return empty_strided(sizes, contiguous_strides(sizes), dtype, like);
}
// Sizes in braces, up to kMaxDims of them, are not allocated.
inline Tensor empty_contiguous(std::initializer_list<int64_t> sizes, ScalarType dtype, const Tensor& like) {
  int64_t strides[kMaxDims], step = 1;
  const int64_t dims = static_cast<int64_t>(sizes.size());
  for (int64_t d = dims - 1; d >= 0; --d) {
    strides[d] = step;
    step *= std::max<int64_t>(sizes.begin()[d], 1);
  }
  return empty_strided(dims, sizes.begin(), strides, dtype, like);
}

// Contiguous, of t's shape: torch gives these operations no other layout.
inline Tensor empty_result(const Tensor& t, ScalarType dtype) {
  const auto sizes = t.sizes();
  if (t.is_contiguous()) return empty_strided(t.dim(), sizes.data(), t.strides().data(), dtype, t);
  return empty_contiguous(dims_of(sizes), dtype, t);
}

// Dimensions from the slowest to the fastest in memory, as torch orders those of an elementwise result. The comparison is
// not transitive, so only TensorIterator's own insertion sort gives its answer.
inline Dims memory_order(const Dims& sizes, std::initializer_list<const Dims*> operands) {
  const int64_t dims = static_cast<int64_t>(sizes.size());
  Dims order(dims);
  for (int64_t d = 0; d < dims; ++d) order[d] = dims - 1 - d;
  const auto compare = [&](int64_t a, int64_t b) {
    for (const Dims* strides : operands) {
      const int64_t sa = (*strides)[a], sb = (*strides)[b];
      if (sa == 0 || sb == 0) continue;
      if (sa != sb) return sa < sb ? -1 : 1;
      if (sizes[a] > sizes[b]) return 1;
    }
    return 0;
  };
  for (int64_t i = 1; i < dims; ++i) {
    int64_t at = i;
    for (int64_t faster = i - 1; faster >= 0; --faster) {
      const int c = compare(order[faster], order[at]);
      if (c < 0) break;
      if (c > 0) {
        std::swap(order[faster], order[at]);
        at = faster;
      }
    }
  }
  std::reverse(order.begin(), order.end());
  return order;
}

inline Dims dense_strides(const Dims& sizes, const Dims& order) {
  Dims strides(sizes.size());
  int64_t step = 1;
  for (int64_t i = static_cast<int64_t>(order.size()) - 1; i >= 0; --i) {
    strides[order[i]] = step;
    step *= std::max<int64_t>(sizes[order[i]], 1);
  }
  return strides;
}

// Whether the strides that matter (of dimensions longer than 1) agree.
inline bool same_layout(const Dims& sizes, const Dims& a, const Dims& b) {
  for (size_t d = 0; d < sizes.size(); ++d)
    if (sizes[d] > 1 && a[d] != b[d]) return false;
  return true;
}

// Whether the channels, dimension 1, are the fastest in memory, then the last dimension and so on to the first, without gaps.
inline bool is_channels_last(const Tensor& t) {
  const int64_t dims = t.dim();
  int64_t step = 1;
  for (int64_t i = 0; i < dims; ++i) {
    const int64_t d = i == 0 ? 1 : i == dims - 1 ? 0 : dims - i;
    if (t.size(d) > 1 && t.stride(d) != step) return false;
    step *= t.size(d);
  }
  return true;
}

// How torch lays out the elementwise result of operands of one shape: contiguous, channels_last or exactly like them where all operands
// are; else dense, in their common order.
inline Dims result_strides(const Dims& sizes, std::initializer_list<const Dims*> operands) {
  const auto all = [&](const Dims& strides) {
    return std::all_of(operands.begin(), operands.end(), [&](const Dims* s) { return same_layout(sizes, *s, strides); });
  };
  const Dims contiguous = contiguous_strides(sizes);
  if (all(contiguous)) return contiguous;
  if (sizes.size() == 4) {
    const Dims channels_last = dense_strides(sizes, {0, 2, 3, 1});
    if (all(channels_last)) return channels_last;
  }
  const Dims dense = dense_strides(sizes, memory_order(sizes, operands)), &first = **operands.begin();
  const bool equal = std::all_of(operands.begin(), operands.end(), [&](const Dims* s) { return *s == first; });
  return equal && same_layout(sizes, first, dense) ? first : dense;
}

// t itself where it has these strides, else a copy with them.
inline Tensor with_strides(const Tensor& t, const Dims& sizes, const Dims& strides) {
  if (same_layout(sizes, dims_of(t.strides()), strides)) return t;
  Tensor copy = empty_strided(sizes, strides, t.scalar_type(), t);
  torch::stable::copy_(copy, t);
  return copy;
}

// Whether a tensor fills its memory, in any order of its dimensions.
inline bool is_dense(const Tensor& t) {
  const Dims sizes = dims_of(t.sizes()), strides = dims_of(t.strides());
  return same_layout(sizes, strides, dense_strides(sizes, memory_order(sizes, {&strides})));
}

// t itself where it is contiguous, else a copy that is.
inline Tensor made_contiguous(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }
inline MaybeTensor made_contiguous(const MaybeTensor& t) { return t ? MaybeTensor(made_contiguous(*t)) : std::nullopt; }

inline bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % kVectorBytes == 0; }

inline void check_device(const Tensor& x, const Tensor& t, const char* op, const char* name) {
  FASTLAYERS_CHECK(x.is_cuda() == t.is_cuda() && x.get_device_index() == t.get_device_index(), op, "expected ", name, " on x's device");
}

inline void check_same(const Tensor& x, const Tensor& y, const char* op, const char* name) {
  FASTLAYERS_CHECK(x.scalar_type() == y.scalar_type(), op, "expected ", name, " of x's dtype ", toString(x.scalar_type()), ", but got ",
                   toString(y.scalar_type()));
  check_device(x, y, op, name);
}

inline void check_same_sizes(const Tensor& x, const Tensor& y, const char* op, const char* name) {
  FASTLAYERS_CHECK(dims_of(x.sizes()) == dims_of(y.sizes()), op, "expected ", name, " of x's shape");
}

inline void check_same_shape(const Tensor& x, const Tensor& y, const char* op, const char* name) {
  check_same(x, y, op, name);
  check_same_sizes(x, y, op, name);
}

// Dimensions, slowest first, over which several operands step with strides of their own. Neighbouring dimensions that all operands step
// over alike are merged, so a contiguous tensor has one dimension whatever its shape.
template <int OPERANDS>
struct Walk {
  int dims = 0;
  int64_t size[kMaxDims] = {};
  int64_t stride[OPERANDS][kMaxDims] = {};
};

// False if more than kMaxDims remain after merging.
template <int OPERANDS>
inline bool merge_dims(const Dims& sizes, const Dims& order, const std::array<Dims, OPERANDS>& strides, Walk<OPERANDS>& walk) {
  walk.dims = 0;
  for (const int64_t d : order) {
    if (sizes[d] == 1) continue;
    bool merges = walk.dims > 0;
    for (int k = 0; k < OPERANDS && merges; ++k)
      merges = walk.stride[k][walk.dims - 1] == strides[k][d] * sizes[d];
    if (merges) {
      walk.size[walk.dims - 1] *= sizes[d];
    } else {
      if (walk.dims == kMaxDims) return false;
      walk.size[walk.dims++] = sizes[d];
    }
    for (int k = 0; k < OPERANDS; ++k) walk.stride[k][walk.dims - 1] = strides[k][d];
  }
  if (walk.dims == 0) {  // a single element
    walk.dims = 1;
    walk.size[0] = 1;
  }
  return true;
}

// Strides of t seen in the shape `sizes` that it broadcasts to: 0 where it is repeated.
inline Dims broadcast_strides(const Tensor& t, const Dims& sizes, const char* op, const char* name) {
  const Dims own = dims_of(t.sizes()), steps = dims_of(t.strides());
  Dims strides(sizes.size(), 0);
  const int64_t shift = static_cast<int64_t>(sizes.size()) - static_cast<int64_t>(own.size());
  FASTLAYERS_CHECK(shift >= 0, op, name, " has ", own.size(), " dimensions, more than the ", sizes.size(), " of the result");
  for (size_t d = 0; d < own.size(); ++d) {
    FASTLAYERS_CHECK(own[d] == sizes[d + shift] || own[d] == 1, op, name, " has size ", own[d], " where the result has ",
                     sizes[d + shift], " (dimension ", static_cast<int64_t>(d) + shift, ")");
    strides[d + shift] = own[d] == sizes[d + shift] ? steps[d] : 0;
  }
  return strides;
}

}  // namespace fastlayers

// The sums of a matrix over its rows: the gradient of a linear layer's bias.
//
// torch's reduction reads such a matrix at a fifth to a quarter of the memory bandwidth.
#include "autocast.h"
#include "common/columns.cuh"

#include <numeric>

namespace fastlayers {
namespace {

constexpr int kSumRows = 4;  // that a thread has in flight: nothing but a word of each

// Rows whose words would straddle are taken several at once, as one row of columns. Where L is a 16-bit type, the kernel also writes x in
// it, and the rows of x are whole words.
template <typename T, typename S, int V, typename L>
__global__ void __launch_bounds__(kThreads, kColumnBlocks<T>)
    column_sum(const T* __restrict__ x, L* __restrict__ low, compute_t<T>* partial, S* sums, int64_t n, const Columns c) {
  using A = compute_t<T>;
  ColumnThread<V> me(c, blockIdx.x);
  Vec<A, V> sum = filled<A, V>(A(0));
  const auto nothing = static_cast<unsigned>(n >> 62);
  me.template for_rows<kSumRows>(c, [&](auto count, int64_t row) {
    constexpr int U = count.value;
    const int64_t first = row * c.columns + me.column;
    Vec<T, V> w[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t i = first + u * me.step * c.columns;
      w[u] = U > 1 || first + V <= n ? load_vec<T, V>(x + i) : load_flat<T, false, V>(x, i, n);
    }
    wait_for_all(w, w, nothing);
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const Vec<A, V> z = unpack<A>(w[u]);
      if constexpr (!std::is_same_v<L, T>) store_vec<L, V>(low + first + u * me.step * c.columns, pack<L>(z));
#pragma unroll
      for (int j = 0; j < V; ++j) sum.v[j] += z.v[j];
    }
  });
  me.store(c, sum, partial, sums);
}

// Adds up the waiting sums, each in blocks of its own.
constexpr int kMostSums = 8;
struct ManySums {
  Tasks<kMostSums> tasks;
  const float* partial[kMostSums];
  float* sums[kMostSums];
  int64_t pieces[kMostSums], columns[kMostSums];
};

__global__ void __launch_bounds__(kThreads) add_many_pieces(const __grid_constant__ ManySums a) {
  const int t = a.tasks.of_block();
  add_pieces_of<float, kSector>(blockIdx.x - a.tasks.first[t], a.partial[t], a.sums[t], 1, a.pieces[t], a.columns[t]);
}

// ---- host ---------------------------------------------------------------------------------------------------------------

// Sums of T as S, which is T or its compute type; also writes `low`, where L is a 16-bit type.
template <typename T, typename S, typename L = T>
Tensor sums_of(const Tensor& x, ScalarType dtype, L* low = nullptr) {
  using A = compute_t<T>;
  constexpr int V = kVector<T>;
  const int64_t rows = x.size(0), width = x.size(1), n = rows * width;
  Tensor result = empty_contiguous({width}, dtype, x);
  if (n == 0) {
    torch::stable::zero_(result);
    return result;
  }
  const Launch launch(x);
  const T* px = pointer<const T>(x);
  const auto run = [&](auto vector, int64_t rows_at_once) {
    constexpr int W = decltype(vector)::value;
    Columns c = Columns::plan<A>(rows / rows_at_once, width * rows_at_once, W, launch.device());
    c.ends_within = rows % rows_at_once != 0;
    const int64_t pieces = c.pieces * rows_at_once;
    S* sums = pieces == 1 ? pointer<S>(result) : nullptr;
    Tensor partial = empty_partial<A>(sums ? 0 : pieces, width, x);
    column_sum<T, S, W, L><<<blocks_for(c.blocks(), 1), c.threads(), c.shared<A>(W), launch.stream()>>>(
        px, low, pointer<A>(partial), sums, n, c);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
    if (!sums) launch_add_pieces<S>(partial, result.mutable_data_ptr(), 1, pieces, width, launch);
  };
  if (aligned(px)) run(std::integral_constant<int, V>{}, V / std::gcd<int64_t>(V, width));
  else run(std::integral_constant<int, 1>{}, 1);
  return result;
}

}  // namespace

// x.sum(0) of a contiguous matrix, added up in float32 or float64, in x's dtype or in `dtype`.
Tensor column_sum_op(const Tensor& x, ScalarType dtype) {
  const char* op = "column_sum";
  FASTLAYERS_CHECK(x.dim() == 2 && x.is_contiguous(), op, "expected a contiguous matrix");
  MaybeTensor result;
  dispatch_floating(x.scalar_type(), op, [&](auto zero) {
    using T = decltype(zero);
    if (dtype == x.scalar_type()) {
      result = sums_of<T, T>(x, dtype);
    } else {
      FASTLAYERS_CHECK(sizeof(T) == 2 && dtype == ScalarType::Float, op, "expected sums in x's dtype, or in float32 for 16-bit x, but got ",
                       toString(dtype));
      result = sums_of<T, compute_t<T>>(x, dtype);
    }
  });
  return *result;
}

// x in 16 bits and x.sum(0), of a contiguous float32 matrix.
std::tuple<Tensor, Tensor> narrowed_and_summed(const Tensor& x, ScalarType dtype) {
  const char* op = "narrowed_and_summed";
  FASTLAYERS_CHECK(x.dim() == 2 && x.is_contiguous() && x.scalar_type() == ScalarType::Float, op,
                   "expected a contiguous matrix in float32");
  if (!aligned(x.const_data_ptr()) || x.size(1) % kVector<float> != 0)
    return {*narrowed({x}, dtype, op)[0], column_sum_op(x, ScalarType::Float)};
  const Tensor low = empty_contiguous(dims_of(x.sizes()), dtype, x);
  const auto sums = [&](auto half) {
    using L = decltype(half);
    return sums_of<float, float, L>(x, ScalarType::Float, pointer<L>(low));
  };
  return {low, dtype == ScalarType::Half ? sums(__half{}) : sums(__nv_bfloat16{})};
}

void LaterSums::add(const Tensor& partial, int64_t offset, float* sums, int64_t pieces, int64_t columns) {
  waiting_.push_back({partial, pointer<const float>(partial) + offset, sums, pieces, columns});
  if (waiting_.size() == kMostSums) launch();
}

void LaterSums::launch() {
  if (waiting_.empty()) return;
  ManySums a{};
  for (const Sum& sum : waiting_) {
    const int k = a.tasks.add(blocks_for(sum.columns, kSector));
    a.partial[k] = sum.from;
    a.sums[k] = sum.to;
    a.pieces[k] = sum.pieces;
    a.columns[k] = sum.columns;
  }
  const Launch on(waiting_.front().partial);
  add_many_pieces<<<a.tasks.blocks, kThreads, 0, on.stream()>>>(a);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  waiting_.clear();
}

}  // namespace fastlayers

STABLE_TORCH_LIBRARY_IMPL(fastlayers, CUDA, m) { m.impl("column_sum", TORCH_BOX(&fastlayers::column_sum_op)); }

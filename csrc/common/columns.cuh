// Kernels that walk down the columns of a dense tensor, [repeat, columns] in memory, and sum something over the rows on the way: the
// gradient of a bias, of a factor, of a scale.
//
// A thread has V neighbouring columns of every step-th row. All blocks are resident, and walk through memory together in one front:
// that reaches .94 of the copy bandwidth, where a piece of neighbouring rows for each block reaches .92. Each block leaves a partial sum,
// and add_pieces adds these up in a fixed order.
#pragma once

#include "flat.cuh"

namespace fastlayers {
namespace {

// Rows that a thread has in flight, and blocks that are resident on a multiprocessor, which leaves a thread 64 registers.
constexpr int kRowsInFlight = 2;
template <typename A>
constexpr int kColumnBlocks = sizeof(A) == 8 ? 2 : 4;
constexpr int kSector = 8;  // of float32: results of a block where there are many pieces

struct Columns {
  int64_t repeat, columns;
  int64_t pieces;            // of the rows, a block each
  int tiles, across, down;   // blocks over the columns; threads of a block over its columns, and over the rows
  bool ends_within = false;  // one more row follows, which ends before its last column

  // `together`: tensors that are walked by one launch.
  template <typename A>
  static Columns plan(int64_t repeat, int64_t columns, int vector, int device, int64_t together = 1) {
    const int most = vector > 1 ? 32 : 128;  // a warp, or what has lines enough of single elements
    const int64_t lanes = ceil_div(columns, vector), tiles = ceil_div(lanes, most);
    STD_TORCH_CHECK(tiles <= INT32_MAX, "fastlayers: ", columns, " columns are more than one launch takes");
    Columns c{repeat, columns, 1, static_cast<int>(tiles), static_cast<int>(ceil_div(lanes, tiles)), 1};
    c.down = kThreads / c.across;
    const int64_t resident = static_cast<int64_t>(kColumnBlocks<A>) * device_traits(device).processors;
    c.pieces = std::clamp<int64_t>(resident / (tiles * together), 1, std::max<int64_t>(1, repeat / (kRowsInFlight * c.down)));
    return c;
  }
  int64_t blocks() const { return tiles * pieces; }
  int threads() const { return across * down; }
  template <typename A>
  size_t shared(int vector) const { return sizeof(A) * threads() * vector; }
};

// What a thread has of them.
template <int V>
struct ColumnThread {
  int64_t tile, piece, column, row, step;
  bool active;

  __device__ __forceinline__ ColumnThread(const Columns& c, int64_t block) {
    tile = block % c.tiles;
    piece = block / c.tiles;
    column = (tile * c.across + threadIdx.x % c.across) * V;
    row = piece * c.down + threadIdx.x / c.across;
    step = c.pieces * c.down;
    active = column < c.columns;
  }

  // Calls f(how many rows, the first of them), `step` apart. Row c.repeat, where there is one, comes alone.
  template <int ROWS = kRowsInFlight, typename F>
  __device__ __forceinline__ void for_rows(const Columns& c, F&& f) {
    if (!active) return;
    if constexpr (ROWS > 1) {
#pragma unroll 1
      for (; row + (ROWS - 1) * step < c.repeat; row += ROWS * step) f(Number<ROWS>{}, row);
    }
    const int64_t rows = c.repeat + c.ends_within;
#pragma unroll 1
    for (; row < rows; row += step) f(Number<1>{}, row);
  }

  // Adds the block's sums up, and stores them to partial [pieces, columns]; or to `sums`, where it is given, being all there is.
  template <typename T, typename A>
  __device__ __forceinline__ void store(const Columns& c, const Vec<A, V>& sum, A* partial, T* sums) const {
    extern __shared__ __align__(16) char memory[];
    A* shared = reinterpret_cast<A*>(memory);
    const int wide = c.across * V;
    *reinterpret_cast<Vec<A, V>*>(shared + threadIdx.x / c.across * wide + threadIdx.x % c.across * V) = sum;
    __syncthreads();
    const int64_t first = tile * wide;
    for (int i = threadIdx.x; i < wide && first + i < c.columns; i += blockDim.x) {
      A all = 0;
      for (int k = 0; k < c.down; ++k) all += shared[k * wide + i];
      if (sums != nullptr) sums[first + i] = convert<T>(all);
      else partial[piece * c.columns + first + i] = all;
    }
  }
};

// Adds the pieces up: partial [outer, pieces, columns] to sums [outer, columns], in a fixed order. A block has RESULTS results,
// and kThreads / RESULTS threads for each.
template <typename T, int RESULTS>
__global__ void __launch_bounds__(kThreads) add_pieces(const compute_t<T>* partial, T* sums, int64_t outer, int64_t pieces,
                                                      int64_t columns) {
  using A = compute_t<T>;
  constexpr int kShares = kThreads / RESULTS;
  __shared__ A shared[kShares][RESULTS];
  const int result = threadIdx.x % RESULTS, share = threadIdx.x / RESULTS;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * RESULTS + result;
  A sum = 0;
  if (i < outer * columns) {
    const A* p = partial + i / columns * pieces * columns + i % columns;
#pragma unroll 8
    for (int64_t k = share; k < pieces; k += kShares) sum += p[k * columns];
  }
  shared[share][result] = sum;
  __syncthreads();
  if (share != 0 || i >= outer * columns) return;
  for (int k = 1; k < kShares; ++k) sum += shared[k][result];
  sums[i] = convert<T>(sum);
}

// ---- rows ---------------------------------------------------------------------------------------------------------------

// The sum over the `across` neighbouring threads that share a row: a part of a warp, or whole warps. `shared` has a slot for each warp of
// the block.
template <typename A>
__device__ __forceinline__ A across_sum(A sum, A* shared, int across) {
  for (int o = (across < 32 ? across : 32) >> 1; o > 0; o >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, o);
  if (across > 32) {
    const int warps = across / 32, first = threadIdx.x / across * warps;
    if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = sum;
    __syncthreads();
    sum = 0;
    for (int k = 0; k < warps; ++k) sum += shared[first + k];
  }
  return sum;
}

// ---- host ---------------------------------------------------------------------------------------------------------------

template <typename A>
Tensor empty_partial(int64_t pieces, int64_t columns, const Tensor& like) {
  return empty_contiguous({pieces, columns}, sizeof(A) == 8 ? ScalarType::Double : ScalarType::Float, like);
}

template <typename T>
void launch_add_pieces(const Tensor& partial, void* sums, int64_t outer, int64_t pieces, int64_t columns, const Launch& launch) {
  const auto run = [&]<int RESULTS>(Number<RESULTS>) {
    add_pieces<T, RESULTS><<<blocks_for(outer * columns, RESULTS), kThreads, 0, launch.stream()>>>(
        static_cast<const compute_t<T>*>(partial.const_data_ptr()), static_cast<T*>(sums), outer, pieces, columns);
  };
  if (pieces < kThreads / 8) run(Number<32>{});
  else run(Number<kSector>{});
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// Shares rows of so many words out to `across` threads of a block each, or cuts them into pieces, a block each. Returns the blocks.
template <typename Args>
int64_t share_rows(Args& a, int64_t rows, int64_t words, const Launch& launch) {
  const int64_t resident = 4 * static_cast<int64_t>(device_traits(launch.device()).processors);
  a.across = static_cast<int>(std::min<int64_t>(kThreads, next_power_of_2(ceil_div(words, 4))));
  a.down = kThreads / a.across;
  const int64_t row_blocks = ceil_div(rows, a.down);
  a.pieces = std::clamp<int64_t>(resident / row_blocks, 1, std::max<int64_t>(1, words / (4 * a.across)));
  return row_blocks * a.pieces;
}

}  // namespace
}  // namespace fastlayers

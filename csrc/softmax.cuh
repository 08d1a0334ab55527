// softmax and log_softmax of x·scale + mask over any dimension, forward and backward.
//
// The stock composition reads and writes the scores once for the scale, once for the mask and two to three times for the
// softmax. Here a row is read once and written once: it stays on the chip between the reduction and the result.
//
//   rows    the dimension is contiguous, and a row fits in the registers of a part of a warp or of a block. Each warp reduces its
//           part to (maximum, sum of exponentials below it), and those pairs cross warps in one exchange.
//   held    a longer row without a mask is held in the shared memory of up to 16 blocks of a cluster (sm_90), which exchange their pairs.
//   pieces  any other row is read twice, the second time from the L2 cache.
//   columns the dimension is strided: a thread owns neighbouring columns and walks down them.
//
// A row whose length is not a multiple of the vector starts anywhere in a 16-byte word ("ragged"). All tensors are contiguous and
// aligned, so element i of each lies at the same place in its word, and a row still consists of whole words except for a few elements
// at both ends. The row kernels give those elements to single threads. The other kernels read the words that cover the row and ignore
// the elements of its neighbours.
//
// This header has what both directions share: the masks, the pieces of a long row, how threads share rows and columns, and what the host finds
// out about a tensor.
#pragma once

#include "common/board.cuh"
#include "logits.cuh"

namespace fastlayers {
namespace {

constexpr int kRowThreads = 256;    // limit for a block that holds 8 words a thread: several fit an SM, and their phases overlap
constexpr int kWideThreads = 1024;  // limit for a block that holds up to 4 words a thread
constexpr int kMaxWarps = kWideThreads / 32;
constexpr int kMaskDims = 4;

// Calls whose rows in registers have one kernel: float64, and masks of log_softmax or with a result wider than x.
template <typename In, typename Out, bool LOG, bool MASKED>
constexpr bool kRare = sizeof(In) == 8 || (MASKED && (LOG || !std::is_same_v<In, Out>));
// Calls whose longer rows have a kernel in shared memory. Of the others every long row is read in pieces: each of three passes over what is
// held would contain all kinds of masks, and be the largest kernel of all.
template <typename In, bool MASKED>
constexpr bool kHolds = sizeof(In) < 8 && !MASKED;
// Columns with loops of full length.
template <typename In, typename Out, bool LOG>
constexpr int kColumnUnroll = kRare<In, Out, LOG, true> ? 1 : 4;

// ---- masks -------------------------------------------------------------------------------------------------------------

enum class MaskKind : int { none, boolean, same_dtype, float32 };

// A mask that broadcasts to the rows: an offset for each row from its outer indices, and a step along the row.
struct Mask {
  const void* data = nullptr;
  MaskKind kind = MaskKind::none;
  int dims = 0;
  int64_t size[kMaskDims] = {}, stride[kMaskDims] = {};
  Divider divider[kMaskDims];  // by those sizes, if there are few enough rows
  bool divides = false;
  int64_t step = 0;

  __device__ int64_t row_offset(int64_t row) const {
    int64_t offset = 0;
#pragma unroll
    for (int d = kMaskDims - 1; d >= 0; --d) {
      if (d >= dims) continue;
      const int64_t next = d == 0 ? 0 : divides ? divider[d].quotient(static_cast<uint32_t>(row)) : row / size[d];
      offset += (row - next * size[d]) * stride[d];
      row = next;
    }
    return offset;
  }
};

template <typename A, typename M, int V>
__device__ __forceinline__ auto unpack_mask(const Vec<M, V>& m) {
  if constexpr (std::is_same_v<M, bool>) return m;
  else return unpack<A>(m);
}

// Calls apply(i, m) for K words of a mask, after loading all of them. element(i) is the place of word i in the row, or kNoWord. Unless
// `whole`, a word may begin before the row and end after it. One test decides whether the mask is read in words: the words of a thread
// are whole multiples of the vector apart, and with a test for each word its load would have to arrive before the next one starts.
constexpr int64_t kNoWord = INT64_MIN;

template <typename M, int K, int V, typename Element, typename Apply>
__device__ __forceinline__ void with_mask(const Mask& mask, int64_t offset, int64_t n, bool whole, Element&& element, Apply&& apply) {
  const M* p = static_cast<const M*>(mask.data) + offset;
  Vec<M, V> m[K];
  if (whole && mask.step == 1 && reinterpret_cast<uintptr_t>(p + element(0)) % sizeof(m[0]) == 0) {
    unroll<K>([&](int i) {
      if (element(i) != kNoWord) m[i] = load_vec<M, V>(p + element(i));
    });
    unroll<K>([&](int i) {
      if (element(i) != kNoWord) apply(i, unpack_mask<compute_t<M>>(m[i]));
    });
    return;
  }
  unroll<K>([&](int i) {
    const int64_t e = element(i);
    m[i] = filled<M, V>(M{});
    if (e == kNoWord) return;
    unroll<V>([&](int j) {
      if (whole || (e + j >= 0 && e + j < n)) m[i].v[j] = p[(e + j) * mask.step];
    });
  });
  unroll<K>([&](int i) {
    if (element(i) != kNoWord) apply(i, unpack_mask<compute_t<M>>(m[i]));
  });
}

// ---- a row in pieces ----------------------------------------------------------------------------------------------------
//
// A long row that no cluster holds is read twice: by blocks that each reduce a piece of it, and by blocks that each write a piece. The grid
// has both kinds in the order in which they can run: the blocks that reduce a row come `lag` rows before those that write it. Blocks
// start in the order of their indices, so a block only waits for blocks that started before it. With this lag they have nearly always
// ended while the row is still in the L2 cache, so memory is read once.

constexpr int kPieceThreads = 256;
// Words of each operand, a thread, at a time: a masked row is held in float32, its mask beside it. What clusters leave of log_softmax and of
// results wider than x is not worth the code for more.
template <typename In, typename Out, bool LOG, bool MASKED>
constexpr int kPieceWords = MASKED ? 2 : LOG || sizeof(In) == 8 || !std::is_same_v<In, Out> ? 4 : 8;
constexpr int kMostPieces = 1024;  // of a row: every block that writes adds up the partials of all

// Hints to the L2 cache: to keep a word for the second read, or to evict it before others.
__device__ __forceinline__ uint64_t keep_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint64_t drop_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

template <typename T, int N>
__device__ __forceinline__ Vec<T, N> load_hinted(const T* p, uint64_t policy) {
  static_assert(sizeof(Vec<T, N>) == sizeof(uint4));
  uint4 w;
  asm volatile("ld.global.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
               : "l"(p), "l"(policy));
  Vec<T, N> v;
  memcpy(&v, &w, sizeof(v));
  return v;
}

template <typename T, int N>
__device__ __forceinline__ void store_hinted(T* p, const Vec<T, N>& v, uint64_t policy) {
  if constexpr (sizeof(v) % sizeof(uint4) == 0) {
    unroll<static_cast<int>(sizeof(v) / sizeof(uint4))>([&](int i) {
      const uint4 w = reinterpret_cast<const uint4*>(&v)[i];
      asm volatile("st.global.L2::cache_hint.v4.b32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(reinterpret_cast<uint4*>(p) + i), "r"(w.x),
                   "r"(w.y), "r"(w.z), "r"(w.w), "l"(policy));
    });
  } else {
    *reinterpret_cast<Vec<T, N>*>(p) = v;
  }
}

// One piece of one row, for a block that reduces it or writes it.
struct Piece {
  int64_t row, start;  // of its first word in the row, in elements; in a ragged row 0 to -(V - 1) for the first
  int words;
  int index;           // among those of the row
  bool writes;

  template <int V>
  __device__ static Piece find(int64_t rows, int64_t n, int pieces, int64_t lag, bool ragged) {
    Piece p;
    const int64_t lead = lag * pieces, both = (rows - lag) * pieces * 2;
    int64_t i = blockIdx.x;  // of the piece among those of all rows
    p.writes = i >= lead + both || (i >= lead && (i - lead) % 2 == 1);
    if (i >= lead + both) i -= lead + both / 2;
    else if (i >= lead) i = (i - lead) / 2 + (p.writes ? 0 : lead);
    p.row = i / pieces;
    p.index = static_cast<int>(i - p.row * pieces);
    const int head = ragged ? static_cast<int>((p.row * n) & (V - 1)) : 0;
    const int64_t words = (n + head + V - 1) / V, each = (words + pieces - 1) / pieces, first = p.index * each;
    p.start = first * V - head;
    p.words = static_cast<int>(max(int64_t{0}, min(each, words - first)));
    return p;
  }

  // Calls f(first) for K words of each thread at a time, of which the i-th is first + i·kPieceThreads; at least once.
  template <int K, typename F>
  __device__ __forceinline__ void for_words(F&& f) const {
    int begin = 0;
    do f(begin + static_cast<int>(threadIdx.x));
    while ((begin += kPieceThreads * K) < words);
  }
};

// The sum of the partials of a row. The first warp adds them up in their order, for the whole block.
template <typename Row>
__device__ __forceinline__ typename Row::Type gather_partials(const BoardWord* board, const Piece& at, int pieces) {
  using Type = typename Row::Type;
  constexpr int kWords = Message<Type>::kWords;
  __shared__ Type total;
  if (threadIdx.x < 32) {
    Type all = Row::nothing();
#pragma unroll 4
    for (int i = threadIdx.x; i < pieces; i += 32) all = Row::combine(all, Message<Type>::await(board + (at.row * pieces + i) * kWords));
    all = Row::combine_lanes(all);
    if (threadIdx.x == 0) total = all;
  }
  __syncthreads();
  return total;
}

// ---- columns ------------------------------------------------------------------------------------------------------------

struct ColumnArgs {
  const void* x;   // forward: x. backward: dy
  const void* y;   // backward: y
  void* out;
  int64_t n, inner;
  int across, down;  // threads over the columns, and down them; their product is at most kColumnThreads
  double scale;
};

// The V columns of a thread: their first element in the tensor, and the first row.
struct Columns {
  int64_t base;
  int first;
  bool active;

  template <int V>
  __device__ __forceinline__ static Columns find(const ColumnArgs& a) {
    const int64_t tiles = (a.inner + static_cast<int64_t>(a.across) * V - 1) / (static_cast<int64_t>(a.across) * V);
    const int64_t column = ((blockIdx.x % tiles) * a.across + threadIdx.x % a.across) * V;
    return {blockIdx.x / tiles * a.n * a.inner + column, static_cast<int>(threadIdx.x / a.across), column < a.inner};
  }
};

// ---- launch rules -------------------------------------------------------------------------------------------------------

// How the threads that hold a row in registers share its 16-byte words.
struct RowLaunch {
  int threads;  // of a block that share the row
  int block;    // threads of a block
  int words;    // held by each thread
};

// More words in flight hide more latency, and more threads for a row cost more exchange. A short row gets few words a thread, so that
// enough blocks are resident, and a long row as many as fit, `most`. A masked row gets more, because each thread spends time to find its
// mask. Of the words that kernels are built for, in ascending order, it takes the next. From a warp on, a row gets only the warps that it fills.
inline RowLaunch row_launch(int64_t words, std::initializer_list<int> built, bool ragged, bool masked) {
  const int most = std::max(built);
  const auto next_built = [&](int64_t wanted) { return *std::find_if(built.begin(), built.end() - 1, [&](int k) { return k >= wanted; }); };
  const int target = words <= 32 ? 1 : words <= 128 && !masked ? 2 : words <= 1024 || words > kRowThreads * most ? 4 : most;
  int64_t threads = ceil_div(words, next_built(target));
  if (ragged) threads = std::max<int64_t>(threads, 16);  // up to 14 single elements, one a thread
  RowLaunch launch{};
  launch.threads = static_cast<int>(threads <= 32 ? next_power_of_2(threads) : ceil_div(threads, 32) * 32);
  launch.block = launch.threads > 32 ? launch.threads : masked ? 64 : 128;  // masked: .88 for .86 of the bandwidth with 128
  launch.words = next_built(ceil_div(words, launch.threads));
  return launch;
}

// Whether a row of that many words is held in registers: by a small block with up to `most` words a thread or, in the unmasked forward
// (`wide`), by a block of 832 to 1024 threads. On an H100 the bfloat16 forward reaches .95 and 1.00 of the copy bandwidth at 28672 and
// 32768 columns, and .93 and .98 from shared memory; at 20480 and 24576 columns it reaches .86 and .94, and .92 and .94.
inline bool in_registers(int64_t words, int most, bool wide) {
  return words <= kRowThreads * most || (wide && words > 3328 && words <= 4 * kWideThreads);
}

// Launches a kernel of pieces whose partials have type Partial. `ahead`: the blocks of an SM that reduce rows before they are written.
template <int WORDS, typename Partial, typename Args>
void launch_pieces(void (*kernel)(Args, int, int64_t, BoardWord*), const Args& args, int64_t words, double ahead, const Launch& launch,
                   const Tensor& like) {
  const int64_t pieces = std::min<int64_t>(kMostPieces, ceil_div(words, WORDS * kPieceThreads));
  const auto lead = static_cast<int64_t>(ahead * device_traits(launch.device()).processors);
  const int64_t lag = std::min(args.rows, ceil_div(lead, pieces));
  const Tensor board = empty_board(args.rows * pieces * Message<Partial>::kWords, like, launch);
  launch_kernel(kernel, {args.rows * pieces * 2, kPieceThreads}, launch, args, static_cast<int>(pieces), lag, pointer<BoardWord>(board));
}

// Launches the kernel that holds a row in registers, kernel_of(words a thread), if the row fits with one of the kernels built.
template <typename Words, typename Args, typename KernelOf>
bool launch_in_registers(Words built, Args& args, int vector, bool wide, bool masked, const Launch& launch, KernelOf&& kernel_of) {
  const int64_t words = args.n / vector;
  args.ragged = args.n % vector != 0;
  if (!in_registers(words, std::max(list_of(built)), wide)) return false;
  const RowLaunch shape = row_launch(words, list_of(built), args.ragged, masked);
  args.lanes = shape.threads;
  args.lane_bits = log2_of(shape.threads);
  with_words(built, shape.words, [&](auto k) {
    kernel_of(k)<<<grid_of(ceil_div(args.rows, shape.block / shape.threads)), shape.block, 0, launch.stream()>>>(args);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return true;
}

// ---- host ---------------------------------------------------------------------------------------------------------------

// The one stride between the rows of x (its last dimension being the reduced one), if the kernel can read them in place.
inline std::optional<int64_t> row_stride(const Tensor& x, int64_t vector) {
  if (x.is_contiguous()) return aligned(x.const_data_ptr()) ? std::optional<int64_t>(x.size(x.dim() - 1)) : std::nullopt;
  const Dims sizes = dims_of(x.sizes()), strides = dims_of(x.strides());
  const int64_t last = static_cast<int64_t>(sizes.size()) - 1;
  if (strides[last] != 1 || !aligned(x.const_data_ptr()) || sizes[last] % vector != 0) return std::nullopt;
  std::optional<int64_t> next;  // the stride that the next dimension must have
  int64_t stride = 0;
  for (int64_t d = last - 1; d >= 0; --d) {
    if (sizes[d] == 1) continue;
    if (next && strides[d] != *next) return std::nullopt;
    if (!next) stride = strides[d];
    next = strides[d] * sizes[d];
  }
  return stride % vector == 0 ? std::optional<int64_t>(stride) : std::nullopt;
}

// If the mask broadcasts over too many dimensions, it is copied to `keep`.
inline Mask make_mask(const Tensor& mask, const Dims& sizes, ScalarType x_dtype, const char* op, Tensor& keep) {
  Mask m;
  const ScalarType dtype = mask.scalar_type();
  m.data = mask.const_data_ptr();
  m.kind = dtype == ScalarType::Bool ? MaskKind::boolean
           : dtype == x_dtype        ? MaskKind::same_dtype
           : dtype == ScalarType::Float && x_dtype != ScalarType::Double ? MaskKind::float32
                                     : MaskKind::none;
  FASTLAYERS_CHECK(m.kind != MaskKind::none, op, "expected a mask of bool, float32 or x's dtype ", toString(x_dtype), ", but got ",
                   toString(dtype));
  const Dims strides = broadcast_strides(mask, sizes, op, "mask");
  const int64_t last = static_cast<int64_t>(sizes.size()) - 1;
  m.step = strides[last];
  for (int64_t d = 0; d < last; ++d) {
    if (sizes[d] == 1) continue;
    if (m.dims > 0 && m.stride[m.dims - 1] == strides[d] * sizes[d]) {
      m.size[m.dims - 1] *= sizes[d];
    } else if (m.dims < kMaskDims) {
      m.size[m.dims++] = sizes[d];
    } else {
      keep = empty_contiguous(sizes, dtype, mask);
      torch::stable::copy_(keep, mask);
      return make_mask(keep, sizes, x_dtype, op, keep);
    }
    m.stride[m.dims - 1] = strides[d];
  }
  int64_t rows = 1;
  for (int d = 0; d < m.dims; ++d) rows *= m.size[d];
  m.divides = rows <= INT32_MAX;
  for (int d = 0; m.divides && d < m.dims; ++d) m.divider[d] = Divider(static_cast<uint32_t>(m.size[d]));
  return m;
}

// Launches the kernel for a strided dimension, with or without vectors. Slot: what the threads of a column exchange.
template <typename In, typename Slot>
void launch_columns(void (*vectors)(ColumnArgs), void (*elements)(ColumnArgs), ColumnArgs args, const Shape& s, const Launch& launch) {
  const ColumnLaunch shape = column_launch(s, kVector<In>);
  args.n = s.n;
  args.inner = s.inner;
  args.across = shape.across;
  args.down = shape.down;
  const int threads = shape.across * shape.down;
  const size_t shared = shape.down == 1 ? 0 : sizeof(Slot) * threads * shape.vector;
  launch_kernel(shape.vector > 1 ? vectors : elements, {shape.blocks, threads, shared}, launch, args);
}

inline void check_last_dim(const MaybeTensor& mask, int64_t dim, const Tensor& x, const char* op) {
  FASTLAYERS_CHECK(!mask, op, "a mask is supported over the last dimension only, but dim is ", dim, " of ", x.dim());
}

}  // namespace
}  // namespace fastlayers

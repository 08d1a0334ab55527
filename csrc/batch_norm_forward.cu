// act(batch_norm(x) + residual), training and eval: forward. batch_norm.cuh says how it goes through memory.
#include "batch_norm_apply.cuh"
#include "common/ops.h"

namespace fastlayers {
namespace {

// The same for the kernel of the statistics alone.
template <bool LAST, typename T>
constexpr int kStatisticsResident = LAST ? 2 : sizeof(T) == 8 ? 2 : 4;

template <typename T>
constexpr int kStatisticsUnroll = sizeof(T) == 8 ? 2 : 4;

// ---- statistics ---------------------------------------------------------------------------------------------------------

template <typename A>
struct ForwardArgs {
  const void* x;
  const void* residual;
  void* y;
  uint8_t* bits;
  ChannelValues weight, bias, running_mean, running_var;
  A* stats;    // [2, channels]: mean, rstd
  A* partial;
  A momentum, eps;
  int64_t count;  // elements of a channel
  Grid grid;
  Act act;
  bool direct;  // a block has all of its channels' elements
  bool bits_shared;
  int64_t* batches;  // how many were seen
  bool fresh;        // the running statistics are written, not updated: nothing is in their memory yet

  __device__ __forceinline__ void count_batch() const {
    if (batches != nullptr && blockIdx.x == 0 && threadIdx.x == 0) ++*batches;
  }
};

template <typename T, bool LAST>
struct ForwardShared : Shared<T, LAST> {
  compute_t<T> origin[Shared<T, LAST>::kColumns];
};

// The origin is the mean of the first few elements of each of the thread's channels (the last one repeated where there are fewer). All
// means are merged as differences from it, so that a mean far from zero costs no digits. Visible after the next barrier.
template <typename T, bool LAST, typename P>
__device__ __forceinline__ void load_origin(ForwardShared<T, LAST>& shared, const T* x, const Grid& g, const P& place) {
  using A = compute_t<T>;
  constexpr int V = kVector<T>, K = LAST ? V : 1, kElements = 8;
  if (place.ty != 0 || !place.active) return;
  A origin[K] = {};
  const int64_t count = LAST ? g.rows * g.copies + g.tail / g.channels : g.plane;
  const int last = static_cast<int>(min(count, static_cast<int64_t>(kElements))) - 1;
  if (LAST && g.copies > 1) {
#pragma unroll 1
    for (int i = 0; i < kElements; ++i) {
      uint32_t c = channel_of(g, place.column);
      unroll<K>([&](int k) {
        origin[k] += convert<A>(x[min(i, last) * g.channels + c]);
        c = next_channel(g, c);
      });
    }
  } else {
    unroll<kElements>([&](int i) {
      if constexpr (LAST) {
        const Vec<A, V> v = unpack<A>(load_vec<T, V>(x + min(i, last) * g.columns + place.column));
        unroll<K>([&](int k) { origin[k] += v.v[k]; });
      } else {
        origin[0] += convert<A>(x[place.column * g.plane + min(i, last)]);
      }
    });
  }
  unroll<K>([&](int k) { shared.origin[place.tx * V + k] = origin[k] * (A(1) / kElements); });
}

// The moments of this thread's part of the piece, from sums of deviations from the thread's first element. That has about the size of the
// others; one element for all threads might be an outlier. U: words in flight.
template <int U, typename T, bool LAST, typename P>
__device__ __forceinline__ auto gather_moments(const ForwardShared<T, LAST>& shared, const T* x, const Grid& g, const P& place) {
  using A = compute_t<T>;
  constexpr int V = kVector<T>, K = LAST ? V : 1;
  const int64_t last = LAST ? min(place.end, g.rows) : place.end;  // the tail's few elements are merged one by one
  const int steps = place.steps(g, last);
  // LAST: the thread's first row, elements from one to the next, how many; its last step may be the block's last but one.
  const int64_t row = place.begin + place.ty, hop = place.stride(g) * g.columns;
  const T* next = x + row * g.columns + place.column;
  const bool whole = row + static_cast<int64_t>(steps - 1) * place.stride(g) < last;
  const int mine = !LAST || !place.active ? 0 : whole ? steps : steps - 1;
  Vec<T, V> shift = filled<T, V>(convert<T>(0.f));
  A s[K] = {}, q[K] = {};
  int64_t count = max(0, mine);
#pragma unroll 1
  for (int step = 0; step < steps; step += U) {
    Vec<T, V> w[U];
    [[maybe_unused]] Spot spots[U];
    if constexpr (LAST) {
      unroll<U>([&](int u) { w[u] = load_if(step + u < mine, next + u * hop); });
      next += U * hop;
      if (step == 0) shift = w[0];
      unroll<U>([&](int u) { if (step + u >= mine) w[u] = shift; });
    } else {
      unroll<U>([&](int u) {
        spots[u] = place.spot(g, step + u, last);
        w[u] = load_if(spots[u].any(), x + spots[u].at);
      });
      if (count == 0) {
#pragma unroll
        for (int u = U - 1; u >= 0; --u)
          unroll<V>([&](int j) { if (spots[u].has(j)) shift.v[0] = w[u].v[j]; });
        shift = filled<T, V>(shift.v[0]);
      }
      unroll<U>([&](int u) {
        fill_outside(w[u], spots[u], shift);
        count += max(0, spots[u].hi - spots[u].lo);
      });
    }
    const Vec<A, V> from = unpack<A>(shift);
    unroll<U>([&](int u) {
      Vec<A, V> d = unpack<A>(w[u]);
      unroll<V>([&](int j) { d.v[j] -= from.v[j]; });
      if constexpr (LAST) {
        unroll<V>([&](int j) { s[j] += d.v[j], q[j] += d.v[j] * d.v[j]; });
      } else {
        A sum = 0, squares = 0;
        unroll<V>([&](int j) { sum += d.v[j], squares += d.v[j] * d.v[j]; });
        s[0] += sum, q[0] += squares;
      }
    });
  }
  ChannelMoments<A, K> m;
  m.v[0] = static_cast<A>(count);
  __syncthreads();  // the origin
  if (count > 0) {
    unroll<K>([&](int k) {
      const A mean = s[k] / m.v[0], squares = q[k] - s[k] * mean;
      m.v[1 + k] = convert<A>(shift.v[k]) - shared.origin[place.tx * V + k] + mean;
      m.v[1 + K + k] = squares < A(0) ? A(0) : squares;  // NaN stays
    });
  }
  return m;
}

// The moments of the block's columns over all pieces and the tail, for threads with ty == 0. `m`: the thread's first piece.
template <typename T, bool LAST, typename P>
__device__ __forceinline__ auto merge_pieces(ForwardShared<T, LAST>& shared, const ForwardArgs<compute_t<T>>& a, const P& place,
                                             ChannelMoments<compute_t<T>, LAST ? kVector<T> : 1> m, int down) {
  using A = compute_t<T>;
  constexpr int V = kVector<T>, K = LAST ? V : 1;
  const Grid& g = a.grid;
  if (place.active) {
    const int states = states_of<LAST>(g);
#pragma unroll 2
    for (int i = place.ty + down; i < states; i += down) {
      ChannelMoments<A, K> other;
      read_piece<LAST, K>(other.v, a.partial, g, i, place.column);
      m.merge(other);
    }
    if constexpr (LAST) {
      const T* x = static_cast<const T*>(a.x);
#pragma unroll 1
      for (int64_t i = g.rows * g.columns + place.ty * g.channels; i < g.rows * g.columns + g.tail; i += down * g.channels) {
        ChannelMoments<A, K> pixel;
        pixel.v[0] = 1;
        uint32_t c = channel_of(g, place.column);
        unroll<K>([&](int k) {
          pixel.v[1 + k] = convert<A>(x[i + c]) - shared.origin[place.tx * V + k];
          c = next_channel(g, c);
        });
        m.merge(pixel);
      }
    }
  }
  merge_down<true>(m, shared.merging, place.tx, place.ty, place.across(g), down);
  return m;
}

// The running statistics of the thread's column, requested before anything that has to wait.
template <typename A>
struct Running {
  A mean, var;

  template <typename T, typename P>
  __device__ static Running load(const ForwardArgs<A>& a, const P& place) {
    const int64_t c = place.first_column(a.grid) + threadIdx.x;
    if (a.fresh || static_cast<int>(threadIdx.x) >= place.columns(a.grid) || c >= a.grid.channels) return {A(0), A(0)};
    return {a.running_mean.template load<T>(c, 0.f), a.running_var.template load<T>(c, 0.f)};
  }
};

// Writes mean and rstd from the moments of the block's columns: to shared.first and shared.second, visible after the next barrier, and once
// a channel to global memory, with the running statistics. A thread has one column: several would wait for each other's loads and stores of
// the running statistics.
template <typename T, bool LAST, typename P, int K>
__device__ __forceinline__ void finish_statistics(ForwardShared<T, LAST>& shared, const ForwardArgs<compute_t<T>>& a,
                                                  const P& place, const ChannelMoments<compute_t<T>, K>& m,
                                                  const Running<compute_t<T>>& old) {
  using A = compute_t<T>;
  const Grid& g = a.grid;
  if (place.ty == 0 && place.active) {
    unroll<K>([&](int k) {
      shared.first[place.tx * kVector<T> + k] = m.v[1 + k];
      shared.second[place.tx * kVector<T> + k] = m.v[1 + K + k];
    });
  }
  __syncthreads();
  static_assert(ForwardShared<T, LAST>::kColumns <= kThreads<LAST>);
  if (const int k = threadIdx.x; k < place.columns(g)) {
    const int64_t c = place.first_column(g) + k;  // a channel where it is one of the first copy
    const A mean = shared.origin[k] + shared.first[k], squares = shared.second[k], var = squares / static_cast<A>(a.count);
    const A rstd = var == A(0) && a.eps == A(0) ? A(0) : A(1) / sqrt(var + a.eps);  // as torch
    shared.first[k] = mean;
    shared.second[k] = rstd;
    if (place.piece > 0 || c >= g.channels) return;
    if (a.running_mean.data != nullptr) a.running_mean.template store<T>(c, (A(1) - a.momentum) * old.mean + a.momentum * mean);
    if (a.running_var.data != nullptr)
      a.running_var.template store<T>(c, (A(1) - a.momentum) * old.var + a.momentum * (squares / static_cast<A>(a.count - 1)));
    a.stats[c] = mean;
    a.stats[g.channels + c] = rstd;
  }
}

template <typename T, bool LAST>
__global__ void __launch_bounds__(kThreads<LAST>, kStatisticsResident<LAST, T>)
    batch_norm_statistics(const ForwardArgs<compute_t<T>> a) {
  constexpr int K = LAST ? kVector<T> : 1;
  __shared__ ForwardShared<T, LAST> shared;
  const Grid& g = a.grid;
  const Place<T, LAST, true> place(g);
  const T* x = static_cast<const T*>(a.x);
  a.count_batch();
  load_origin(shared, x, g, place);
  auto m = gather_moments<kStatisticsUnroll<T>>(shared, x, g, place);
  merge_down<true>(m, shared.merging, place.tx, place.ty, place.across(g), place.down(g));
  if (a.direct) finish_statistics(shared, a, place, m, Running<compute_t<T>>::template load<T>(a, place));
  else if (place.ty == 0 && place.active) write_piece<LAST, K>(a.partial, g, place.piece, place.column, m.v);
}

// Merges the pieces of batch_norm_statistics. A block has one word of columns, or one channel.
template <typename T, bool LAST>
__global__ void __launch_bounds__(kThreads<LAST>) batch_norm_merge(const ForwardArgs<compute_t<T>> a) {
  __shared__ ForwardShared<T, LAST> shared;
  constexpr int K = LAST ? kVector<T> : 1;
  const Place<T, LAST> place(a.grid);
  const auto old = Running<compute_t<T>>::template load<T>(a, place);
  // The first piece is asked for before the origin has arrived.
  ChannelMoments<compute_t<T>, K> first;
  const int down = LAST ? a.grid.down : static_cast<int>(blockDim.x);
  if (place.active && place.ty < states_of<LAST>(a.grid)) read_piece<LAST, K>(first.v, a.partial, a.grid, place.ty, place.column);
  load_origin(shared, static_cast<const T*>(a.x), a.grid, place);
  __syncthreads();
  finish_statistics(shared, a, place, merge_pieces(shared, a, place, first, down), old);
}

// ---- forward in one kernel ----------------------------------------------------------------------------------------------

// RESIDUAL: a residual is added; with an activation of run time only if there is one.
template <typename T, bool LAST, Act ACT, bool RESIDUAL>
__global__ void __launch_bounds__(kThreads<LAST>, kResident<LAST, T>) batch_norm_forward(const ForwardArgs<compute_t<T>> a) {
  using A = compute_t<T>;
  constexpr int V = kVector<T>, K = LAST ? V : 1, U = kUnroll<T, ACT>;
  __shared__ ForwardShared<T, LAST> shared;
  const Grid& g = a.grid;
  const Place<T, LAST> place(g);
  a.count_batch();
  const T* x = static_cast<const T*>(a.x);
  const int local = place.tx * V;  // of the thread's first column among the block's
  load_affine(shared, g, place, a.weight, a.bias);
  const auto old = Running<A>::template load<T>(a, place);
  load_origin(shared, x, g, place);

  auto m = gather_moments<sizeof(T) == 8 ? 4 : 8>(shared, x, g, place);
  merge_down<true>(m, shared.merging, place.tx, place.ty, place.across(g), place.down(g));
  if (!a.direct) {
    if (place.ty == 0 && place.active) write_piece<LAST, K>(a.partial, g, place.piece, place.column, m.v);
    cooperative_groups::this_grid().sync();
    ChannelMoments<A, K> first;
    if (place.active && place.ty < states_of<LAST>(g)) read_piece<LAST, K>(first.v, a.partial, g, place.ty, place.column);
    m = merge_pieces(shared, a, place, first, place.down(g));
  }
  finish_statistics(shared, a, place, m, old);
  __syncthreads();

  A mean[K], scale[K], bias[K];
  unroll<K>([&](int k) {
    mean[k] = shared.first[local + k];
    scale[k] = shared.weight[local + k] * shared.second[local + k];
    bias[k] = shared.bias[local + k];
  });
  const T* residual = static_cast<const T*>(a.residual);
  T* y = static_cast<T*>(a.y);
  const int steps = place.steps(g, place.end);
#pragma unroll 1
  for (int step = (steps - 1) / U * U; step >= 0; step -= U) {
    Vec<T, V> w[U], r[U];
    Spot spots[U];
#pragma unroll
    for (int u = U - 1; u >= 0; --u) {
      spots[u] = place.spot(g, step + u, place.end);
      w[u] = load_if(spots[u].any(), x + spots[u].at);
      if constexpr (RESIDUAL) r[u] = load_if(spots[u].any() && (ACT == Act::relu || residual != nullptr), residual + spots[u].at);
    }
#pragma unroll
    for (int u = U - 1; u >= 0; --u) {
      Vec<A, V> z = unpack<A>(w[u]);
      constexpr int kStep = LAST ? 1 : 0;
      unroll<V>([&](int j) { z.v[j] = fma(z.v[j] - mean[j * kStep], scale[j * kStep], bias[j * kStep]); });
      if constexpr (RESIDUAL) {
        const Vec<A, V> more = unpack<A>(r[u]);
        if (ACT == Act::relu || residual != nullptr) unroll<V>([&](int j) { z.v[j] += more.v[j]; });
      }
      if constexpr (kHasBits<T, ACT, RESIDUAL>) {
        if (a.bits != nullptr) store_bits<V>(a.bits, spots[u], positive_bits(z), a.bits_shared);
      }
      store_spot(y, spots[u], activated<T, ACT>(RESIDUAL && ACT == Act::relu ? Act::relu : a.act, z));
    }
  }
}

// ---- host ---------------------------------------------------------------------------------------------------------------

// Whether the words of each byte of bits are of neighbouring lanes.
bool bytes_are_whole(const Operand& x, const Grid& g, int vector) {
  if (vector >= 8) return false;
  return x.last ? g.columns % 8 == 0 && (g.groups == 1 || g.across % (8 / vector) == 0) : x.plane % 8 == 0;
}

// Bytes of x that may wait in L2 for the second pass of one kernel. Above, statistics and result are kernels of their own.
constexpr int64_t kHeldBytes = int64_t{28} << 20;

// Launches the whole forward if x, or what the resident blocks have of it, stays in L2 between the passes.
template <typename T, bool LAST, Act ACT, bool RESIDUAL>
bool run_in_one(ForwardArgs<compute_t<T>>& args, const Operand& x, int64_t n, const Launch& launch) {
  constexpr auto kernel = batch_norm_forward<T, LAST, ACT, RESIDUAL>;
  constexpr int V = kVector<T>;
  const int64_t resident = share_out<kernel, T, LAST>(args, x, launch), blocks = args.grid.blocks();
  if (blocks > resident && !args.direct) return false;
  const int64_t bytes = n * static_cast<int64_t>(sizeof(T));
  if (std::min(bytes, bytes / blocks * resident) > kHeldBytes) return false;
  args.bits_shared = bytes_are_whole(x, args.grid, V);
  const MaybeTensor partial = make_partial(args, 3, x);
  // Bytes that several blocks may write are or-ed into zeros.
  const bool whole = V < 8 ? args.bits_shared : LAST ? args.grid.tail == 0 : x.plane % 8 == 0;
  if (args.bits != nullptr && !whole) STD_CUDA_CHECK(cudaMemsetAsync(args.bits, 0, bytes_of_bits(n), launch.stream()));
  launch_kernel(kernel, {blocks, kThreads<LAST>, 0, 1, !args.direct}, launch, args);
  return true;
}

template <typename T, bool LAST>
void run_statistics(ForwardArgs<compute_t<T>>& args, const Operand& x, const Launch& launch) {
  constexpr auto kernel = batch_norm_statistics<T, LAST>;
  share_out<kernel, T, LAST>(args, x, launch, true);
  Grid& g = args.grid;
  const MaybeTensor partial = make_partial(args, 3, x);
  launch_kernel(kernel, {g.blocks(), kThreads<LAST>}, launch, args);
  if (args.direct) return;
  const int states = std::min(kThreads<LAST>, LAST ? g.pieces << g.copy_bits : g.pieces);
  if constexpr (LAST) {
    g.across = 1;
    g.down = states;
    g.groups = static_cast<int>(ceil_div(g.channels, kVector<T>));
  }
  launch_kernel(batch_norm_merge<T, LAST>, {g.groups, static_cast<int>(ceil_div(states, 32) * 32)}, launch, args);
}

template <typename T, bool LAST, Act ACT, bool RESIDUAL, int U>
void run_apply(const ForwardArgs<compute_t<T>>& args, const Operand& x, int64_t n, bool training, const Launch& launch) {
  constexpr int V = kVector<T>;
  ApplyArgs<compute_t<T>> apply{args.x, args.residual, args.y, args.bits, args.weight, args.bias, args.running_mean, args.running_var,
                                args.stats, args.eps, {}, args.act, training};
  Tiles& t = apply.tiles;
  t.elements = n;
  t.channels = x.channels;
  t.by_channels = Divider(static_cast<uint32_t>(t.channels));
  int64_t blocks;
  if constexpr (LAST) {
    constexpr int kWhole = std::max(V, 8);  // elements of whole words and whole bytes of bits
    int64_t copies = 1;
    while (t.channels * copies % kWhole != 0) copies *= 2;
    t.columns = t.channels * copies;
    const int64_t words = t.columns / V;
    t.tiles = static_cast<int>(ceil_div(words, kApplyAcross));
    t.across = static_cast<int>(ceil_div(ceil_div(words, t.tiles), kWhole / V) * (kWhole / V));
    t.tiles = static_cast<int>(ceil_div(words, t.across));
    t.by_across = Divider(static_cast<uint32_t>(t.across));
    t.down = kApplyThreads / t.across;
    t.threads = static_cast<int>(ceil_div(t.across * t.down, 32) * 32);
    blocks = ceil_div(ceil_div(n, t.columns), U * t.down) * t.tiles;
  } else {
    t.plane = x.plane;
    t.small = n < INT32_MAX;
    if (t.plane < 1 << 30) t.by_plane = Divider(static_cast<uint32_t>(t.plane));
    t.threads = kApplyThreads;
    while (t.threads > 32 && U * V * t.threads / t.plane + 2 > kTable<T, U>) t.threads /= 2;
    blocks = ceil_div(ceil_div(n, V), U * t.threads);
  }
  launch_kernel(batch_norm_apply<T, LAST, ACT, RESIDUAL, U>, {blocks, t.threads}, launch, apply);
}

template <typename T, bool LAST, Act ACT, bool RESIDUAL>
void run_passes(ForwardArgs<compute_t<T>>& args, const Operand& x, bool training, const Launch& launch) {
  const int64_t n = x.x.numel();
  if (training) {
    if (run_in_one<T, LAST, ACT, RESIDUAL || ACT == Act::run_time>(args, x, n, launch)) return;
    run_statistics<T, LAST>(args, x, launch);
  }
  run_apply<T, LAST, ACT, RESIDUAL, kApplyUnroll<T>>(args, x, n, training, launch);
}

template <typename T>
void run_forward(ForwardArgs<compute_t<T>>& args, const Operand& x, bool training, const Launch& launch) {
  const bool residual = args.residual != nullptr;
  const auto run = [&]<bool LAST>(std::bool_constant<LAST>) {
    if constexpr (!std::is_same_v<T, double>) {
      if (!residual && args.act <= Act::relu) return run_passes<T, LAST, Act::relu, false>(args, x, training, launch);
      if (residual && args.act == Act::relu) return run_passes<T, LAST, Act::relu, true>(args, x, training, launch);
    }
    if (residual) return run_passes<T, LAST, Act::run_time, true>(args, x, training, launch);
    return run_passes<T, LAST, Act::run_time, false>(args, x, training, launch);
  };
  if (x.last) run(std::true_type{});
  else run(std::false_type{});
}

std::tuple<Tensor, Tensor, Tensor> forward(const char* op, const Tensor& x_in, const MaybeTensor& residual_in, const NormTensors& norm,
                                           const ForwardOptions& options, Tensor* moments = nullptr) {
  const Operand x(x_in, op);
  const Launch launch(x.x);
  const int64_t n = x.x.numel();
  const ForwardTensors t(x, residual_in, options, op);
  if (moments != nullptr) *moments = empty_stats(true, x.channels, x.x);
  if (n == 0) {
    if (moments != nullptr) torch::stable::zero_(*moments);
    return {t.y, t.stats, t.bits};
  }
  dispatch_floating(x.x.scalar_type(), op, [&]<typename T>(T) {
    using A = compute_t<T>;
    ForwardArgs<A> args{};
    args.x = pointer<const void>(x.x);
    args.residual = pointer<const void>(t.residual);
    args.y = pointer<void>(t.y);
    args.bits = t.has_bits ? pointer<uint8_t>(t.bits) : nullptr;
    args.weight = values_of(x, norm.weight, op, "weight");
    args.bias = values_of(x, norm.bias, op, "bias");
    args.running_mean = values_of(x, norm.running_mean, op, "running_mean");
    args.running_var = values_of(x, norm.running_var, op, "running_var");
    if (moments != nullptr) {
      args.running_mean = {pointer<A>(*moments), true};
      args.running_var = {pointer<A>(*moments) + x.channels, true};
      args.fresh = true;
    }
    args.stats = options.stats ? pointer<A>(t.stats) : nullptr;
    args.batches = counter(norm.batches, x.x, op);
    args.momentum = static_cast<A>(options.momentum);
    args.eps = static_cast<A>(options.eps);
    args.count = x.count();
    args.act = t.act;
    run_forward<T>(args, x, options.training, launch);
  });
  return {t.y, t.stats, t.bits};
}

constexpr int kUpdateThreads = 128;

template <typename T>
__global__ void __launch_bounds__(kUpdateThreads) update_running(T* mean, T* var, int64_t* batches, const compute_t<T>* moments,
                                                                 int64_t channels, compute_t<T> momentum) {
  using A = compute_t<T>;
  const int64_t c = int64_t{blockIdx.x} * kUpdateThreads + threadIdx.x;
  if (c == 0 && batches != nullptr) ++*batches;
  if (c >= channels) return;
  mean[c] = convert<T>((A(1) - momentum) * convert<A>(mean[c]) + momentum * moments[c]);
  var[c] = convert<T>((A(1) - momentum) * convert<A>(var[c]) + momentum * moments[channels + c]);
}

// Updates the running statistics and the count of batches as batch_norm_train does, from the moments of batch_norm_moments.
void batch_norm_update_(const Tensor& running_mean, const Tensor& running_var, const MaybeTensor& batches, const Tensor& moments,
                        double momentum) {
  const char* op = "batch_norm_update_";
  const int64_t channels = running_mean.numel();
  const ScalarType dtype = running_mean.scalar_type();
  FASTLAYERS_CHECK(running_mean.is_contiguous() && running_var.is_contiguous() && running_var.numel() == channels &&
                       running_var.scalar_type() == dtype && moments.is_contiguous() && moments.numel() == 2 * channels &&
                       moments.scalar_type() == compute_dtype(dtype),
                   op, "expected contiguous running statistics of one dtype, and their moments");
  check_device(running_mean, running_var, op, "running_var");
  check_device(running_mean, moments, op, "moments");
  int64_t* const count = counter(batches, running_mean, op);
  if (channels == 0) return;
  const Launch launch(running_mean);
  dispatch_floating(dtype, op, [&]<typename T>(T) {
    using A = compute_t<T>;
    launch_kernel(update_running<T>, {ceil_div(channels, kUpdateThreads), kUpdateThreads}, launch, pointer<T>(running_mean),
                  pointer<T>(running_var), count, pointer<const A>(moments), channels, static_cast<A>(momentum));
  });
}

std::tuple<Tensor, Tensor, Tensor> batch_norm_eval(const Tensor& x, const Tensor& running_mean, const Tensor& running_var,
                                                   const MaybeTensor& weight, const MaybeTensor& bias, double eps,
                                                   const MaybeTensor& residual, int64_t act, bool bits, bool keep) {
  const MaybeTensor none;
  return forward("batch_norm_eval", x, residual, {weight, bias, running_mean, running_var, none}, {0, eps, act, false, bits, keep});
}

// Also gives the mean and the unbiased variance of each channel, and writes no running statistics: for a graph, in which nothing is
// written.
std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm_moments(const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
                                                              double eps, const MaybeTensor& residual, int64_t act) {
  const MaybeTensor none;
  Tensor moments;
  const auto [y, stats, bits] =
      forward("batch_norm_moments", x, residual, {weight, bias, none, none, none}, {1, eps, act, true, true, true}, &moments);
  return {y, stats, bits, moments};
}

// Launches the last of the forward's kernels, without statistics.
void channel_bias_act_(const Tensor& x_in, const Tensor& bias, const MaybeTensor& residual_in, int64_t act) {
  const char* op = "channel_bias_act_";
  const Operand x(x_in, op);
  FASTLAYERS_CHECK(x.x.const_data_ptr() == x_in.const_data_ptr(), op,
                   "expected x contiguous or channels_last, and aligned to 16 bytes");
  const Launch launch(x.x);
  const Act activation = act_of(act, op);
  const MaybeTensor residual = bring(x, residual_in, op, "residual");
  if (x.x.numel() == 0) return;
  dispatch_floating(x.x.scalar_type(), op, [&]<typename T>(T) {
    ForwardArgs<compute_t<T>> args{};
    args.x = args.y = pointer<void>(x.x);
    args.residual = pointer<const void>(residual);
    args.bias = values_of(x, bias, op, "bias");
    args.act = activation;
    run_forward<T>(args, x, false, launch);
  });
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> batch_norm_train(const Tensor& x, const MaybeTensor& running_mean, const MaybeTensor& running_var,
                                                    const MaybeTensor& weight, const MaybeTensor& bias, double momentum, double eps,
                                                    const MaybeTensor& residual, int64_t act, bool bits, const MaybeTensor& batches) {
  return forward("batch_norm_train", x, residual, {weight, bias, running_mean, running_var, batches},
                 {momentum, eps, act, true, bits, true});
}

}  // namespace fastlayers

STABLE_TORCH_LIBRARY_IMPL(fastlayers, CUDA, m) {
  m.impl("batch_norm_train", TORCH_BOX(&fastlayers::batch_norm_train));
  m.impl("batch_norm_moments", TORCH_BOX(&fastlayers::batch_norm_moments));
  m.impl("batch_norm_update_", TORCH_BOX(&fastlayers::batch_norm_update_));
  m.impl("batch_norm_eval", TORCH_BOX(&fastlayers::batch_norm_eval));
  m.impl("channel_bias_act_", TORCH_BOX(&fastlayers::channel_bias_act_));
}

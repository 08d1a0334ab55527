// act(batch_norm(x) + residual), training and eval: backward. batch_norm.cuh says how it goes through memory.
#include "batch_norm.cuh"
#include "common/ops.h"

namespace fastlayers {
namespace {

// Passes of a launch. Both in one needs all blocks to be resident, or none to wait (Args::direct).
enum Passes : int { kFirst = 1, kSecond = 2, kBoth = 3 };

// g becomes the gradient of z.
template <typename T, Act ACT, typename A, int V>
__device__ __forceinline__ void activate_backward(Act act, Vec<A, V>& g, const Vec<A, V>& z) {
  if constexpr (ACT == Act::relu) {
    const A gate = act == Act::relu ? A(0) : static_cast<A>(NAN);  // nothing is at most NaN
    unroll<V>([&](int j) { g.v[j] = z.v[j] <= gate ? A(0) : g.v[j]; });
  } else {
    with_act<ACT>(act, [&](auto chosen) {
      unroll<V>([&](int j) { g.v[j] = act_gradient<decltype(chosen)::value, sizeof(T) == 2>(g.v[j], z.v[j]); });
    });
  }
}

// ---- backward -----------------------------------------------------------------------------------------------------------

// What the activation's argument is computed from: x, a bit (relu), or x and the residual if there is one.
enum class Gate : int { x, bits, residual };

template <typename A>
struct BackwardArgs {
  const void* dy;
  const void* x;
  const void* residual;
  const uint8_t* bits;
  void* dx;
  void* dresidual;
  ChannelValues weight, bias;
  const A* stats;
  ChannelValues dweight, dbias;
  A* partial;
  int64_t count;
  Grid grid;
  Act act;
  Passes passes;
  bool training, direct;
};

// Loads the words of a step together and calls f(spot, dz, x - mean) for each.
template <typename T, bool LAST, Act ACT, Gate GATE, int K>
struct BackwardWalk {
  using A = compute_t<T>;
  static constexpr int V = kVector<T>, U = kUnroll<T, ACT>, kStep = LAST ? 1 : 0;
  A mean[K], scale[K], bias[K];

  // The constants of the thread's columns.
  __device__ __forceinline__ void load(const BackwardArgs<A>& a, const Place<T, LAST>& place, const Shared<T, LAST>& shared, A (&rstd)[K]) {
    uint32_t c = place.active ? channel_of(a.grid, place.column) : 0;
    unroll<K>([&](int k) {
      mean[k] = a.stats[c];
      rstd[k] = a.stats[a.grid.channels + c];
      scale[k] = place.active ? shared.weight[place.tx * V + k] * rstd[k] : A(0);
      bias[k] = place.active ? shared.bias[place.tx * V + k] : A(0);
      if (place.active) c = next_channel(a.grid, c);
    });
  }

  __device__ __forceinline__ static void add(ChannelSums<A, K>& sums, const Vec<A, V>& dz, const Vec<A, V>& d) {
    if constexpr (LAST) {
      unroll<V>([&](int j) { sums.v[j] += dz.v[j], sums.v[K + j] += dz.v[j] * d.v[j]; });
    } else {
      A first = 0, second = 0;
      unroll<V>([&](int j) { first += dz.v[j], second += dz.v[j] * d.v[j]; });
      sums.v[0] += first, sums.v[K] += second;
    }
  }

  // GATED: dz is computed from dy; else `dy` is dz.
  template <bool GATED, bool REVERSED, typename F>
  __device__ __forceinline__ void group(const BackwardArgs<A>& a, const Place<T, LAST>& place, int step, const T* dy, F&& f) const {
    constexpr bool kBits = GATED && GATE == Gate::bits, kResidual = GATED && GATE == Gate::residual;
    const T* x = static_cast<const T*>(a.x);
    Vec<T, V> wg[U], wx[U], wr[U];
    unsigned kept[U];
    Spot spots[U];
    unroll<U>([&](int i) {
      const int u = REVERSED ? U - 1 - i : i;
      spots[u] = place.spot(a.grid, step + u, place.end);
      wg[u] = load_if(spots[u].any(), dy + spots[u].at);
      wx[u] = load_if(spots[u].any(), x + spots[u].at);
      if constexpr (kResidual) wr[u] = load_if(spots[u].any() && a.residual != nullptr, static_cast<const T*>(a.residual) + spots[u].at);
      if constexpr (kBits) kept[u] = spots[u].any() ? a.bits[spots[u].at >> 3] >> (spots[u].at & 7) : 0;
    });
    const Vec<T, V> zero = filled<T, V>(convert<T>(0.f));
    unroll<U>([&](int i) {
      const int u = REVERSED ? U - 1 - i : i;
      fill_outside(wg[u], spots[u], zero);
      fill_outside(wx[u], spots[u], zero);
      Vec<A, V> g = unpack<A>(wg[u]), d = unpack<A>(wx[u]);
      unroll<V>([&](int j) { d.v[j] -= mean[j * kStep]; });
      if constexpr (kBits) {
        unroll<V>([&](int j) { g.v[j] = kept[u] >> j & 1 ? g.v[j] : A(0); });
      } else if constexpr (GATED) {
        Vec<A, V> z;
        unroll<V>([&](int j) { z.v[j] = fma(d.v[j], scale[j * kStep], bias[j * kStep]); });
        if constexpr (kResidual) {
          if (a.residual != nullptr) {
            fill_outside(wr[u], spots[u], zero);
            const Vec<A, V> more = unpack<A>(wr[u]);
            unroll<V>([&](int j) { z.v[j] += more.v[j]; });
          }
        }
        activate_backward<T, ACT>(a.act, g, z);
      }
      f(spots[u], g, d);
    });
  }
};

// The sums of the block's columns go to shared memory, and once a channel, as the gradients of weight and bias, to global memory.
template <typename T, bool LAST, int K>
__device__ __forceinline__ void write_sums(const BackwardArgs<compute_t<T>>& a, Shared<T, LAST>& shared, const Place<T, LAST>& place,
                                           const ChannelSums<compute_t<T>, K>& sums, const compute_t<T> (&rstd)[K]) {
  const int local = place.tx * kVector<T>;
  unroll<K>([&](int k) {
    shared.first[local + k] = sums.v[k];
    shared.second[local + k] = sums.v[K + k];
    if (place.piece == 0 && place.column + k < a.grid.channels) {
      a.dweight.template store<T>(place.column + k, sums.v[K + k] * rstd[k]);
      a.dbias.template store<T>(place.column + k, sums.v[k]);
    }
  });
}

template <typename T, bool LAST, Act ACT, Gate GATE>
__global__ void __launch_bounds__(kThreads<LAST>, kResident<LAST, T>) batch_norm_backward_kernel(const BackwardArgs<compute_t<T>> a) {
  using A = compute_t<T>;
  constexpr int V = kVector<T>, K = LAST ? V : 1, kStep = LAST ? 1 : 0;
  using Walk = BackwardWalk<T, LAST, ACT, GATE, K>;
  constexpr int U = Walk::U;
  __shared__ Shared<T, LAST> shared;
  const Grid& g = a.grid;
  const Place<T, LAST> place(g);
  const int local = place.tx * V, down = place.down(g), steps = place.steps(g, place.end);
  const T* dy = static_cast<const T*>(a.dy);
  T* dx = static_cast<T*>(a.dx);
  T* dresidual = static_cast<T*>(a.dresidual);
  load_affine(shared, g, place, a.weight, a.bias);
  __syncthreads();
  Walk walk;
  A rstd[K];
  walk.load(a, place, shared, rstd);

  ChannelSums<A, K> sums;
  if (a.passes & kFirst) {
#pragma unroll 1
    for (int step = 0; step < steps; step += U)
      walk.template group<true, false>(a, place, step, dy, [&](const Spot& spot, Vec<A, V>& dz, const Vec<A, V>& d) {
        if (dresidual != nullptr) store_spot(dresidual, spot, pack<T>(dz));
        walk.add(sums, dz, d);
        if (!a.training) {  // mean and rstd are constants: nothing to wait for
          unroll<V>([&](int j) { dz.v[j] *= walk.scale[j * kStep]; });
          store_spot(dx, spot, pack<T>(dz));
        }
      });
    merge_down<true>(sums, shared.merging, place.tx, place.ty, place.across(g), down);
    if (!a.direct && place.ty == 0 && place.active) write_piece<LAST, K>(a.partial, g, place.piece, place.column, sums.v);
    if (!(a.passes & kSecond)) return;
    if (!a.direct) cooperative_groups::this_grid().sync();
  }
  if (!a.direct) {
    sums = ChannelSums<A, K>();
    if (place.active) {
      const int states = states_of<LAST>(g);
#pragma unroll 2
      for (int i = place.ty; i < states; i += down) {
        ChannelSums<A, K> other;
        read_piece<LAST, K>(other.v, a.partial, g, i, place.column);
        sums.merge(other);
      }
    }
    merge_down<true>(sums, shared.merging, place.tx, place.ty, place.across(g), down);
  }
  if (place.ty == 0 && place.active) write_sums(a, shared, place, sums, rstd);
  if (!a.training) return;
  __syncthreads();

  A from_x[K], constant[K];
  unroll<K>([&](int k) {
    const A n = static_cast<A>(a.count);
    from_x[k] = -walk.scale[k] * (shared.second[local + k] / n) * rstd[k] * rstd[k];
    constant[k] = -walk.scale[k] * (shared.first[local + k] / n);
  });
  const auto result = [&](const Spot& spot, Vec<A, V>& dz, const Vec<A, V>& d) {
    unroll<V>([&](int j) { dz.v[j] = fma(dz.v[j], walk.scale[j * kStep], fma(d.v[j], from_x[j * kStep], constant[j * kStep])); });
    store_spot(dx, spot, pack<T>(dz));
  };
#pragma unroll 1
  for (int step = (steps - 1) / U * U; step >= 0; step -= U) {
    // From x alone dz is as well computed once more.
    if (GATE != Gate::x && dresidual != nullptr) walk.template group<false, true>(a, place, step, dresidual, result);
    else walk.template group<true, true>(a, place, step, dy, result);
  }
}

// ---- host ---------------------------------------------------------------------------------------------------------------

template <typename T, bool LAST, Act ACT, Gate GATE>
void run_backward(BackwardArgs<compute_t<T>>& args, const Operand& x, const Launch& launch) {
  constexpr auto kernel = batch_norm_backward_kernel<T, LAST, ACT, GATE>;
  const int64_t resident = share_out<kernel, T, LAST>(args, x, launch), blocks = args.grid.blocks();
  const MaybeTensor partial = make_partial(args, 2, x);
  if (args.direct || blocks <= resident) {
    args.passes = kBoth;
    launch_kernel(kernel, {blocks, kThreads<LAST>, 0, 1, !args.direct}, launch, args);
  } else {  // blocks cannot wait for each other
    for (const Passes pass : {kFirst, kSecond}) {
      args.passes = pass;
      launch_kernel(kernel, {blocks, kThreads<LAST>}, launch, args);
    }
  }
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm_backward(const Tensor& dy_in, const Tensor& x_in, const MaybeTensor& weight,
                                                               const MaybeTensor& bias, const Tensor& stats, bool training,
                                                               const MaybeTensor& residual_in, const MaybeTensor& bits, int64_t act,
                                                               bool want_dresidual) {
  const char* op = "batch_norm_backward";
  const Operand x(x_in, op);
  const Launch launch(x.x);
  const BackwardTensors t(x, dy_in, weight, stats, residual_in, bits, act, want_dresidual, op);
  if (x.x.numel() == 0) return {t.dx, t.dresidual, t.dweight, t.dbias};
  dispatch_floating(x.x.scalar_type(), op, [&]<typename T>(T) {
    using A = compute_t<T>;
    BackwardArgs<A> args{};
    args.dy = pointer<const void>(t.dy);
    args.x = pointer<const void>(x.x);
    args.residual = pointer<const void>(t.residual);
    args.bits = t.has_bits ? pointer<const uint8_t>(bits) : nullptr;
    args.dx = pointer<void>(t.dx);
    args.dresidual = want_dresidual ? pointer<void>(t.dresidual) : nullptr;
    args.weight = values_of(x, weight, op, "weight");
    args.bias = values_of(x, bias, op, "bias");
    args.stats = pointer<const A>(stats);
    args.dweight = values_of(x, t.dweight, op, "weight");
    args.dbias = values_of(x, t.dbias, op, "weight");
    args.count = x.count();
    args.act = t.act;
    args.training = training;
    const auto run = [&]<bool LAST>(std::bool_constant<LAST>) {
      if (t.has_bits) return run_backward<T, LAST, Act::relu, Gate::bits>(args, x, launch);
      if constexpr (!std::is_same_v<T, double>) {
        if (!t.residual && t.act <= Act::relu) return run_backward<T, LAST, Act::relu, Gate::x>(args, x, launch);
      }
      return run_backward<T, LAST, Act::run_time, Gate::residual>(args, x, launch);
    };
    if (x.last) run(std::true_type{});
    else run(std::false_type{});
  });
  return {t.dx, t.dresidual, t.dweight, t.dbias};
}

}  // namespace fastlayers

STABLE_TORCH_LIBRARY_IMPL(fastlayers, CUDA, m) { m.impl("batch_norm_backward", TORCH_BOX(&fastlayers::batch_norm_backward)); }

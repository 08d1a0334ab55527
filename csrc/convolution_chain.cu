// A chain of convolutions, each with its batch_norm, under autocast: the bottleneck of a ResNet, the inverted residual of an EfficientNet.
// Training takes one call forward and one backward, with the kernels of the steps. Another forward is for norms that are folded into their
// convolutions.
#include "autocast.h"

namespace fastlayers {
namespace {

// What the last norm adds before its activation.
enum Sum : int64_t { kNothing, kInput, kShortcut };

constexpr int kInts = 8;     // of a step: stride, padding and dilation, two each, groups, act
constexpr int kFloats = 2;   // momentum, eps
constexpr int kWeights = 3;  // weight; weight and bias of the norm
constexpr int kFolded = 2;   // weight and bias of what a norm is folded into
constexpr int kStats = 3;    // running mean and variance, count of batches
constexpr int kGate = 4;     // weight and bias of either layer
constexpr int kRelu = 1;

struct Step {
  Geometry geometry;
  int64_t act;
};

// The steps, and the step that a gate follows. Where there is a shortcut, the last step is its.
struct Plan {
  std::vector<Step> steps;
  int64_t sum, gated, gate_act, gate_end;  // gated is -1 where there is no gate

  Plan(const std::vector<int64_t>& ints, const std::vector<int64_t>& plan, const char* op) {
    FASTLAYERS_CHECK(plan.size() == 4 && !ints.empty() && ints.size() % kInts == 0, op, "expected ", kInts,
                    " numbers a step, and four about the chain");
    for (size_t i = 0; i < ints.size(); i += kInts) {
      const int64_t* n = &ints[i];
      steps.push_back({{{n[0], n[1]}, {n[2], n[3]}, {n[4], n[5]}, n[6]}, n[7]});
    }
    sum = plan[0], gated = plan[1], gate_act = plan[2], gate_end = plan[3];
    FASTLAYERS_CHECK(length() > 0 && gated < length() - 1, op, "expected a gate between two of the steps");
    FASTLAYERS_CHECK(sum == kNothing || steps[length() - 1].act == 0 || steps[length() - 1].act == kRelu, op,
                     "expected relu or no activation after a sum");
  }

  // The number of steps without the shortcut's.
  int64_t length() const { return static_cast<int64_t>(steps.size()) - (sum == kShortcut); }
  bool packs() const { return sum != kNothing && steps[length() - 1].act == kRelu; }
  // Whether the backward recomputes the activation's argument, for which it needs the norm's bias.
  bool recomputes(int64_t i) const { return steps[i].act != 0 && !(packs() && i == length() - 1); }
};

// What the forward keeps for the backward, in this order: for each step the 16-bit weight, the convolution's result and the norm's
// statistics; the results of all steps but the last one and the shortcut's; the bits of relu; for the gate the 16-bit weights and biases,
// the mean, both products and the gate.
struct Kept {
  const std::vector<Tensor>& all;
  int64_t steps, inner;
  const Tensor& low(int64_t i) const { return all[3 * i]; }
  const Tensor& z(int64_t i) const { return all[3 * i + 1]; }
  const Tensor& stats(int64_t i) const { return all[3 * i + 2]; }
  const Tensor& y(int64_t i) const { return all[3 * steps + i]; }
  const Tensor& bits() const { return all[3 * steps + inner]; }
  const Tensor& gate(int64_t k) const { return all[3 * steps + inner + 1 + k]; }
};

// Whether a convolution of an image is a matrix product of its pixels as they lie in memory. The products for its gradients cost the host
// half as much as cuDNN's calls, and the GPU the same (H100, 32 shapes of ResNet-50 and EfficientNet-B0); the weight's gradient comes in
// float32. An image of one channel has both layouts, and torch returns the other one.
bool is_product(const Tensor& x, const Tensor& low, const Geometry& g) {
  return low.size(2) == 1 && low.size(3) == 1 && g.groups == 1 && g.stride[0] == 1 && g.stride[1] == 1 && g.padding[0] == 0 &&
         g.padding[1] == 0 && low.is_contiguous() && low.size(1) > 1 && is_channels_last(x);
}

Tensor convolved(const Tensor& x, const Tensor& low, const Geometry& g) {
  if (!is_product(x, low, g) || x.size(1) != low.size(1)) return convolve(x, low, std::nullopt, g);
  Dims sizes = dims_of(x.sizes());
  const int64_t k = low.size(1), n = low.size(0), rows = x.numel() / k;
  sizes[1] = n;
  Tensor z = empty_strided(sizes, dense_strides(sizes, {0, 2, 3, 1}), x.scalar_type(), x);
  multiply(matrix(z, rows, n), matrix(x, rows, k), matrix(low, n, k, true));
  return z;
}

// The memory of a tensor in the shape and layout of another one.
Tensor like(const Tensor& t, const Tensor& other) { return reinterpreted(t, dims_of(other.sizes()), dims_of(other.strides())); }

// The mean of h over space, both products of the gate's layers, and the gate, (N, C, 1, 1), from 16-bit weights and biases.
std::array<Tensor, 4> gate_of(const Tensor& h, const Tensor& first, const Tensor& bias, const Tensor& second, const Tensor& bias2,
                              const Plan& plan, const char* op) {
  const int64_t images = h.size(0), channels = h.size(1), inner = first.size(0), pixels = h.size(2) * h.size(3);
  FASTLAYERS_CHECK(first.numel() == inner * channels && second.numel() == inner * channels && bias.numel() == inner &&
                       bias2.numel() == channels,
                   op, "expected a gate of ", channels, " channels");
  const Tensor mean = spatial_sum(h, std::nullopt, 1.0 / static_cast<double>(pixels));
  Tensor product = empty_contiguous({images, inner}, h.scalar_type(), h);
  Tensor product2 = empty_contiguous({images, channels}, h.scalar_type(), h);
  multiply(product, matrix(mean, images, channels), matrix(first, inner, channels, true));
  multiply(product2, bias_act_forward_op(product, bias, plan.gate_act, 0, 0), matrix(second, channels, inner, true));
  const Tensor opened = bias_act_forward_op(product2, bias2, plan.gate_end, 0, 0);
  return {mean, product, product2, reinterpreted(opened, {images, channels, 1, 1}, {channels, 1, 1, 1})};
}

// What the caller gives a forward beside x: for each step its weights, statistics, integers and floats, and what Plan reads.
struct Chain {
  const std::vector<Tensor>&weights, &gate;
  const std::vector<Tensor>* statistics;  // null: the moments are returned instead
  const std::vector<int64_t>& ints;
  const std::vector<double>& floats;
  const std::vector<int64_t>& about;
};

// Returns the result and what is kept. Updates the statistics; where there are none, returns at the end the moments that would update
// them, and allocates every tensor on its own.
std::vector<Tensor> forward(const char* op, const Tensor& x, const Chain& chain) {
  const std::vector<Tensor>* const statistics = chain.statistics;
  const Pool pool(statistics != nullptr);
  const Plan plan(chain.ints, chain.about, op);
  const int64_t steps = static_cast<int64_t>(plan.steps.size()), length = plan.length();
  FASTLAYERS_CHECK(x.is_cuda() && x.dim() == 4 && x.numel() > 0 && static_cast<int64_t>(chain.weights.size()) == kWeights * steps &&
                       (!statistics || static_cast<int64_t>(statistics->size()) == kStats * steps) &&
                       static_cast<int64_t>(chain.floats.size()) == kFloats * steps && chain.gate.size() == (plan.gated < 0 ? 0 : kGate),
                   op, "expected images, and for each step its parameters, statistics and numbers");
  Parameters wide;
  for (int64_t i = 0; i < steps; ++i) wide.push_back(chain.weights[kWeights * i]);
  wide.insert(wide.end(), chain.gate.begin(), chain.gate.end());
  const Parameters low = narrowed(wide, x.scalar_type(), op, !statistics);

  std::vector<Tensor> kept, results, gate, moments(statistics ? 0 : steps);
  Tensor bits = nothing(x);
  const auto norm = [&](const Tensor& z, int64_t i, const MaybeTensor& residual) {
    const bool packs = plan.packs() && i == length - 1;
    const Tensor &weight = chain.weights[kWeights * i + 1], &bias = chain.weights[kWeights * i + 2];
    const double eps = chain.floats[kFloats * i + 1];
    Tensor y, stats, packed;
    if (statistics) {
      const Tensor* own = &(*statistics)[kStats * i];
      std::tie(y, stats, packed) = batch_norm_train(z, own[0], own[1], weight, bias, chain.floats[kFloats * i], eps, residual,
                                                    plan.steps[i].act, packs, own[2]);
    } else {
      std::tie(y, stats, packed, moments[i]) = batch_norm_moments(z, weight, bias, eps, residual, plan.steps[i].act);
    }
    if (packs) bits = packed;
    for (const Tensor& t : {*low[i], z, stats}) kept.push_back(t);
    return y;
  };
  Tensor h = x;
  std::vector<Tensor> of_shortcut;
  for (int64_t i = 0; i < length; ++i) {
    const Tensor z = convolved(h, *low[i], plan.steps[i].geometry);
    MaybeTensor residual;
    if (i == length - 1 && plan.sum == kInput) residual = x;
    if (i == length - 1 && plan.sum == kShortcut) {
      residual = norm(convolved(x, *low[length], plan.steps[length].geometry), length, std::nullopt);
      of_shortcut = {kept.end() - 3, kept.end()};  // they come last
      kept.erase(kept.end() - 3, kept.end());
    }
    h = norm(z, i, residual);
    if (i < length - 1) results.push_back(h);
    if (i != plan.gated) continue;
    const Tensor &first = *low[steps], &bias = *low[steps + 1], &second = *low[steps + 2], &bias2 = *low[steps + 3];
    const auto [mean, product, product2, opened] = gate_of(h, first, bias, second, bias2, plan, op);
    gate = {first, bias, second, bias2, mean, product, product2, opened};
    h = mul(h, opened);
  }
  kept.insert(kept.begin(), h);
  for (const std::vector<Tensor>* more : {&of_shortcut, &results}) kept.insert(kept.end(), more->begin(), more->end());
  kept.push_back(bits);
  for (const std::vector<Tensor>* more : {&gate, &moments}) kept.insert(kept.end(), more->begin(), more->end());
  return kept;
}

std::vector<Tensor> convolution_chain_autocast(const Tensor& x, std::vector<Tensor> weights, std::vector<Tensor> gate,
                                               std::vector<Tensor> statistics, std::vector<int64_t> ints, std::vector<double> floats,
                                               std::vector<int64_t> about) {
  return forward("convolution_chain_autocast", x, {weights, gate, &statistics, ints, floats, about});
}

// For a graph, which updates the statistics itself.
std::vector<Tensor> convolution_chain_moments(const Tensor& x, std::vector<Tensor> weights, std::vector<Tensor> gate,
                                              std::vector<int64_t> ints, std::vector<double> floats, std::vector<int64_t> about) {
  return forward("convolution_chain_moments", x, {weights, gate, nullptr, ints, floats, about});
}

// The result alone, for norms that are folded into 16-bit weights and float32 biases. The last step adds the residual.
Tensor convolution_chain_folded(const Tensor& x, std::vector<Tensor> weights, std::vector<Tensor> of_gate,
                                const MaybeTensor& residual, std::vector<int64_t> ints, std::vector<int64_t> about) {
  const char* op = "convolution_chain_folded";
  const Pool pool(true);
  const Plan plan(ints, about, op);
  const int64_t length = plan.length();
  FASTLAYERS_CHECK(x.is_cuda() && x.dim() == 4 && x.numel() > 0 && plan.sum == (residual ? kInput : kNothing) &&
                       static_cast<int64_t>(weights.size()) == kFolded * length && of_gate.size() == (plan.gated < 0 ? 0 : kGate),
                   op, "expected images, and for each step a weight and a bias");
  Parameters low;
  if (plan.gated >= 0) low = narrowed({of_gate.begin(), of_gate.end()}, x.scalar_type(), op);
  Tensor h = x;
  for (int64_t i = 0; i < length; ++i) {
    h = convolved(h, weights[kFolded * i], plan.steps[i].geometry);
    channel_bias_act_(h, weights[kFolded * i + 1], i == length - 1 ? residual : std::nullopt, plan.steps[i].act);
    if (i == plan.gated) h = mul(h, gate_of(h, *low[0], *low[1], *low[2], *low[3], plan, op)[3]);
  }
  return h;
}

// The backward of a chain, step by step.
struct ChainBackward {
  const Plan& plan;
  const Kept kept;
  const Tensor& x;
  std::vector<const Tensor*> weights, biases;  // of the norms; a bias only where the activation's argument is recomputed
  std::vector<Tensor> found;                   // the gradients of x and of all parameters
  std::vector<Tensor*> low_gradients;          // those of `found` that have 16 bits

  // The gradient of a convolution's result from that of its norm's result, and the residual's if wanted.
  std::pair<Tensor, Tensor> norm(const Tensor& d, int64_t i, bool for_residual) {
    const bool packs = plan.packs() && i == plan.length() - 1;
    const MaybeTensor bits = packs ? MaybeTensor(kept.bits()) : std::nullopt;
    const MaybeTensor bias = biases[i] ? MaybeTensor(*biases[i]) : std::nullopt;
    const auto [dz, dresidual, dweight, dbias] =
        batch_norm_backward(d, kept.z(i), *weights[i], bias, kept.stats(i), true, std::nullopt, bits, plan.steps[i].act, for_residual);
    found[1 + kWeights * i + 1] = dweight;
    found[1 + kWeights * i + 2] = dbias;
    return {dz, dresidual};
  }

  // The gradients of a convolution's weight and, if wanted, of its input, to which `add` may be added; in place, where nothing else
  // holds `add` (`add_is_own`).
  Tensor convolution(const Tensor& d, const Tensor& input, int64_t i, bool for_input, const Tensor* add, bool add_is_own) {
    const Tensor& low = kept.low(i);
    const Geometry& g = plan.steps[i].geometry;
    Tensor& dweight = found[1 + kWeights * i];
    if (!is_product(input, low, g) || !is_channels_last(d)) {
      // One gradient after the other for depthwise convolutions: cuDNN's workspace for these is as large as the result.
      const bool apart = for_input && g.groups > 1 && g.groups == input.size(1);
      Tensor dinput;
      std::tie(dinput, dweight) = convolution_gradients(d, input, low, g, for_input && !apart, true);
      if (apart) dinput = std::get<0>(convolution_gradients(d, input, low, g, true, false));
      low_gradients.push_back(&dweight);
      return add && for_input ? scale_add(dinput, std::nullopt, *add, std::nullopt, 1.0, x.scalar_type()) : dinput;
    }
    const int64_t n = low.size(0), k = low.size(1), rows = d.numel() / n;
    dweight = like(weight_gradient(matrix(d, rows, n), matrix(input, rows, k), rows, n, k), low);
    if (!for_input) return Tensor();
    const MaybeTensor added = add ? MaybeTensor(as_channels_last(*add)) : std::nullopt;
    const bool reuses = add && add_is_own;
    const Tensor dinput = reuses ? *added : empty_strided(dims_of(input.sizes()), dims_of(input.strides()), x.scalar_type(), x);
    const Tensor out = matrix(dinput, rows, k);
    multiply(out, matrix(d, rows, n), matrix(low, n, k), !add ? std::nullopt : MaybeTensor(reuses ? out : matrix(*added, rows, k)));
    return dinput;
  }

  // The gradient of the gated result h, of which dh is that of h·gate.
  Tensor gate(const Tensor& dh_in, const Tensor& h) {
    const Tensor &first = kept.gate(0), &bias = kept.gate(1), &second = kept.gate(2), &bias2 = kept.gate(3), &mean = kept.gate(4);
    const Tensor &product = kept.gate(5), &product2 = kept.gate(6), &gate = kept.gate(7);
    const int64_t images = h.size(0), channels = h.size(1), inner = first.size(0), pixels = h.size(2) * h.size(3);
    const Tensor dh = with_strides(dh_in, dims_of(h.sizes()), dims_of(h.strides()));
    const Tensor opening = spatial_sum(dh, h, 1.0);
    const auto [d2, dbias2, none] = bias_act_gradients(matrix(opening, images, channels), product2, bias2, plan.gate_end, 0, 0, true,
                                                       ScalarType::Float, false);
    Tensor inside = empty_contiguous({images, inner}, x.scalar_type(), x);
    multiply(inside, d2, matrix(second, channels, inner));
    const auto [d1, dbias1, activated] = bias_act_gradients(inside, product, bias, plan.gate_act, 0, 0, true, ScalarType::Float, true);
    Tensor dmean = empty_contiguous({images, channels, 1, 1}, x.scalar_type(), x);
    multiply(matrix(dmean, images, channels), d1, matrix(first, inner, channels));
    Tensor* const to = &found[1 + kWeights * kept.steps];
    to[0] = like(weight_gradient(d1, mean, images, inner, channels), first);
    to[1] = dbias1;
    to[2] = like(weight_gradient(d2, *activated, images, channels, inner), second);
    to[3] = dbias2;
    return scale_shift(dh, gate, dmean, 1.0 / static_cast<double>(pixels));
  }
};

// The gradients of x, if wanted, and of all parameters: for each step those of the weight and of the norm's, then the gate's.
// `norms` has the norms' weights, each followed by the bias where the activation's argument is recomputed.
std::vector<Tensor> convolution_chain_autocast_backward(const Tensor& dy, const Tensor& x, std::vector<Tensor> all,
                                                        std::vector<Tensor> norms, std::vector<int64_t> ints, std::vector<int64_t> about,
                                                        bool for_x, bool apart) {
  const char* op = "convolution_chain_autocast_backward";
  const Pool pool(!apart);
  const Plan plan(ints, about, op);
  const int64_t steps = static_cast<int64_t>(plan.steps.size()), length = plan.length();
  FASTLAYERS_CHECK(static_cast<int64_t>(all.size()) == 3 * steps + length + (plan.gated < 0 ? 0 : 2 * kGate), op,
                   "expected what the forward kept");
  ChainBackward chain{plan, {all, steps, length - 1}, x};
  chain.found.resize(1 + kWeights * steps + (plan.gated < 0 ? 0 : kGate));
  for (size_t at = 0; chain.weights.size() < static_cast<size_t>(steps);) {
    const bool has_bias = plan.recomputes(static_cast<int64_t>(chain.weights.size()));
    FASTLAYERS_CHECK(at + has_bias < norms.size(), op, "expected the norms' weights and biases");
    chain.weights.push_back(&norms[at++]);
    chain.biases.push_back(has_bias ? &norms[at++] : nullptr);
  }

  const bool acts = plan.steps[length - 1].act != 0;
  auto [dz, dresidual] = chain.norm(dy, length - 1, plan.sum != kNothing && acts);
  Tensor again = plan.sum != kNothing && !acts ? dy : dresidual;  // what x gets beside the gradient of the first convolution
  bool is_own = acts;                                             // whether nothing else holds it
  dresidual = Tensor();
  if (plan.sum == kShortcut) {
    again = chain.convolution(chain.norm(again, length, false).first, x, length, for_x, nullptr, false);
    is_own = true;
  }
  for (int64_t i = length - 1; i >= 0; --i) {
    const bool gated = i > 0 && plan.gated == i - 1;
    Tensor input = i == 0 ? x : gated ? mul(chain.kept.y(i - 1), chain.kept.gate(7)) : chain.kept.y(i - 1);
    const bool adds = i == 0 && plan.sum != kNothing;
    Tensor dh = chain.convolution(dz, input, i, i > 0 || for_x, adds ? &again : nullptr, is_own);
    input = Tensor();
    if (i == 0) {
      chain.found[0] = for_x ? dh : nothing(x);
      break;
    }
    if (gated) dh = chain.gate(dh, chain.kept.y(i - 1));
    dz = Tensor();  // its memory is free for what follows
    dz = chain.norm(dh, i - 1, false).first;
  }
  widen(chain.low_gradients);
  return chain.found;
}

}  // namespace
}  // namespace fastlayers

STABLE_TORCH_LIBRARY_IMPL(fastlayers, CUDA, m) {
  m.impl("convolution_chain_autocast", TORCH_BOX(&fastlayers::convolution_chain_autocast));
  m.impl("convolution_chain_folded", TORCH_BOX(&fastlayers::convolution_chain_folded));
  m.impl("convolution_chain_moments", TORCH_BOX(&fastlayers::convolution_chain_moments));
  m.impl("convolution_chain_autocast_backward", TORCH_BOX(&fastlayers::convolution_chain_autocast_backward));
}

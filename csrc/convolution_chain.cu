// Convolutions, each with its batch_norm, one after the other, under autocast: the bottleneck of a ResNet, the inverted residual of an
// EfficientNet. In training a forward and a backward in one call each, with the kernels of the steps; and a forward of norms that are
// folded into their convolutions.
#include "autocast.h"

namespace fastlayers {
namespace {

// What is added to the last norm before its activation.
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

// The steps, of which the last one is the shortcut's where there is one; and after which of them a gate stands.
struct Plan {
  std::vector<Step> steps;
  int64_t sum, gated, gate_act, gate_end;  // gated is -1 where there is no gate

  Plan(const std::vector<int64_t>& ints, const std::vector<int64_t>& plan, const char* op) {
    STD_TORCH_CHECK(plan.size() == 4 && !ints.empty() && ints.size() % kInts == 0, "fastlayers::", op, ": expected ", kInts,
                    " numbers a step, and four about the chain");
    for (size_t i = 0; i < ints.size(); i += kInts) {
      const int64_t* n = &ints[i];
      steps.push_back({{{n[0], n[1]}, {n[2], n[3]}, {n[4], n[5]}, n[6]}, n[7]});
    }
    sum = plan[0], gated = plan[1], gate_act = plan[2], gate_end = plan[3];
    STD_TORCH_CHECK(length() > 0 && gated < length() - 1, "fastlayers::", op, ": expected a gate between two of the steps");
    STD_TORCH_CHECK(sum == kNothing || steps[length() - 1].act == 0 || steps[length() - 1].act == kRelu, "fastlayers::", op,
                    ": expected relu or nothing after a sum");
  }

  // Without the shortcut's.
  int64_t length() const { return static_cast<int64_t>(steps.size()) - (sum == kShortcut); }
  bool packs() const { return sum != kNothing && steps[length() - 1].act == kRelu; }
  // Whether the backward computes the activation's argument anew, with the norm's bias.
  bool anew(int64_t i) const { return steps[i].act != 0 && !(packs() && i == length() - 1); }
};

// What the forward hands to the backward, in this order: of each step the weight as a half, the convolution's result, the norm's
// statistics; the results of all steps but the last one and the shortcut's; where relu let through; of the gate both weights and biases as
// halves, the mean, both products and the gate.
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

// Whether a convolution of an image is a matrix product of its pixels as they lie in memory. The calls for its gradients cost the host half
// of cuDNN's, at the same time of the GPU (H100, 32 shapes of ResNet-50 and EfficientNet-B0), and that of the weight comes in float32. An
// image of one channel has both layouts, and torch answers in the other one.
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

// The memory of a tensor in another one's layout.
Tensor like(const Tensor& t, const Tensor& other) { return reinterpreted(t, dims_of(other.sizes()), dims_of(other.strides())); }

// The mean of h over space, both products, and the gate that they make, (N, C, 1, 1), by weights and biases that are halves.
std::array<Tensor, 4> gate_of(const Tensor& h, const Tensor& first, const Tensor& bias, const Tensor& second, const Tensor& bias2,
                              const Plan& plan, const char* op) {
  const int64_t images = h.size(0), channels = h.size(1), inner = first.size(0), pixels = h.size(2) * h.size(3);
  STD_TORCH_CHECK(first.numel() == inner * channels && second.numel() == inner * channels && bias.numel() == inner &&
                      bias2.numel() == channels,
                  "fastlayers::", op, ": expected a gate of ", channels, " channels");
  const Tensor mean = spatial_sum(h, std::nullopt, 1.0 / static_cast<double>(pixels));
  Tensor product = empty_contiguous({images, inner}, h.scalar_type(), h), product2 = empty_contiguous({images, channels}, h.scalar_type(), h);
  multiply(product, matrix(mean, images, channels), matrix(first, inner, channels, true));
  multiply(product2, bias_act_forward_op(product, bias, plan.gate_act, 0, 0), matrix(second, channels, inner, true));
  const Tensor opened = bias_act_forward_op(product2, bias2, plan.gate_end, 0, 0);
  return {mean, product, product2, reinterpreted(opened, {images, channels, 1, 1}, {channels, 1, 1, 1})};
}

// What the forward gives: the result, and what is kept. It updates `statistics`, or where there are none gives at the end what they would
// be updated with, and each tensor in memory of its own.
std::vector<Tensor> forward(const Tensor& x, const std::vector<Tensor>& weights, const std::vector<Tensor>& of_gate,
                            const std::vector<Tensor>* statistics, const std::vector<int64_t>& ints, const std::vector<double>& floats,
                            const std::vector<int64_t>& about, const char* op) {
  const Pool pool(statistics != nullptr);
  const Plan plan(ints, about, op);
  const int64_t steps = static_cast<int64_t>(plan.steps.size()), length = plan.length();
  STD_TORCH_CHECK(x.is_cuda() && x.dim() == 4 && x.numel() > 0 && static_cast<int64_t>(weights.size()) == kWeights * steps &&
                      (!statistics || static_cast<int64_t>(statistics->size()) == kStats * steps) &&
                      static_cast<int64_t>(floats.size()) == kFloats * steps && of_gate.size() == (plan.gated < 0 ? 0 : kGate),
                  "fastlayers::", op, ": expected images, and for each step its parameters, statistics and numbers");
  Parameters wide;
  for (int64_t i = 0; i < steps; ++i) wide.push_back(weights[kWeights * i]);
  for (const Tensor& t : of_gate) wide.push_back(t);
  const Parameters low = narrowed(wide, x.scalar_type(), op, !statistics);

  std::vector<Tensor> kept, results, gate, moments(statistics ? 0 : steps);
  Tensor bits = nothing(x);
  const auto norm = [&](const Tensor& z, int64_t i, const std::optional<Tensor>& residual) {
    const bool packs = plan.packs() && i == length - 1;
    const Tensor &gain = weights[kWeights * i + 1], &shift = weights[kWeights * i + 2];
    const double eps = floats[kFloats * i + 1];
    Tensor y, stats, packed;
    if (statistics) {
      const Tensor* own = &(*statistics)[kStats * i];
      std::tie(y, stats, packed) =
          batch_norm_train(z, residual, gain, shift, own[0], own[1], floats[kFloats * i], eps, plan.steps[i].act, packs, own[2]);
    } else {
      std::tie(y, stats, packed, moments[i]) = batch_norm_moments(z, residual, gain, shift, eps, plan.steps[i].act);
    }
    if (packs) bits = packed;
    for (const Tensor& t : {*low[i], z, stats}) kept.push_back(t);
    return y;
  };
  Tensor h = x;
  std::vector<Tensor> of_shortcut;
  for (int64_t i = 0; i < length; ++i) {
    const Tensor z = convolved(h, *low[i], plan.steps[i].geometry);
    std::optional<Tensor> residual;
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

std::vector<Tensor> convolution_chain_autocast(const Tensor& x, std::vector<Tensor> weights, std::vector<Tensor> of_gate,
                                               std::vector<Tensor> statistics, std::vector<int64_t> ints, std::vector<double> floats,
                                               std::vector<int64_t> about) {
  return forward(x, weights, of_gate, &statistics, ints, floats, about, "convolution_chain_autocast");
}

// Of a graph, which updates the statistics itself.
std::vector<Tensor> convolution_chain_moments(const Tensor& x, std::vector<Tensor> weights, std::vector<Tensor> of_gate,
                                              std::vector<int64_t> ints, std::vector<double> floats, std::vector<int64_t> about) {
  return forward(x, weights, of_gate, nullptr, ints, floats, about, "convolution_chain_moments");
}

// The result alone, of steps whose norms are folded into their weights, which are halves, and biases, in float32; the residual is added to
// the last one.
Tensor convolution_chain_folded(const Tensor& x, std::vector<Tensor> weights, std::vector<Tensor> of_gate,
                                const std::optional<Tensor>& residual, std::vector<int64_t> ints, std::vector<int64_t> about) {
  const char* op = "convolution_chain_folded";
  const Pool pool(true);
  const Plan plan(ints, about, op);
  const int64_t length = plan.length();
  STD_TORCH_CHECK(x.is_cuda() && x.dim() == 4 && x.numel() > 0 && plan.sum == (residual ? kInput : kNothing) &&
                      static_cast<int64_t>(weights.size()) == kFolded * length && of_gate.size() == (plan.gated < 0 ? 0 : kGate),
                  "fastlayers::", op, ": expected images, and for each step a weight and a bias");
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

// The gradients of x, if that is wanted, and of all parameters: of each step those of the weight and of the norm's, and of the gate.
// `norms` are the norms' weights and, of those whose activation's argument is computed anew, biases, step by step.
std::vector<Tensor> convolution_chain_autocast_backward(const Tensor& dy, const Tensor& x, std::vector<Tensor> all, std::vector<Tensor> norms,
                                                        std::vector<int64_t> ints, std::vector<int64_t> about, bool for_x, bool apart) {
  const char* op = "convolution_chain_autocast_backward";
  const Pool pool(!apart);
  const Plan plan(ints, about, op);
  const int64_t steps = static_cast<int64_t>(plan.steps.size()), length = plan.length();
  const Kept kept{all, steps, length - 1};
  STD_TORCH_CHECK(static_cast<int64_t>(all.size()) == 3 * steps + length + (plan.gated < 0 ? 0 : 2 * kGate), "fastlayers::", op,
                  ": expected what the forward kept");
  std::vector<const Tensor*> gains, shifts;
  for (size_t at = 0; gains.size() < static_cast<size_t>(steps);) {
    const bool anew = plan.anew(static_cast<int64_t>(gains.size()));
    STD_TORCH_CHECK(at + anew < norms.size(), "fastlayers::", op, ": expected the norms' weights and biases");
    gains.push_back(&norms[at++]);
    shifts.push_back(anew ? &norms[at++] : nullptr);
  }

  std::vector<Tensor> found(1 + kWeights * steps + (plan.gated < 0 ? 0 : kGate));
  // The gradient of a convolution's result, of what a norm of it was given the gradient of.
  const auto of_norm = [&](const Tensor& d, int64_t i, bool for_residual) {
    const bool packs = plan.packs() && i == length - 1;
    const std::optional<Tensor> bits = packs ? std::optional<Tensor>(kept.bits()) : std::nullopt;
    const std::optional<Tensor> shift = shifts[i] ? std::optional<Tensor>(*shifts[i]) : std::nullopt;
    const auto [dz, dresidual, dgain, dshift] =
        batch_norm_backward_op(d, kept.z(i), std::nullopt, bits, *gains[i], shift, kept.stats(i), true, plan.steps[i].act, for_residual);
    found[1 + kWeights * i + 1] = dgain;
    found[1 + kWeights * i + 2] = dshift;
    return std::pair<Tensor, Tensor>{dz, dresidual};
  };

  const bool acts = plan.steps[length - 1].act != 0;
  auto [dz, dresidual] = of_norm(dy, length - 1, plan.sum != kNothing && acts);
  Tensor again = plan.sum != kNothing && !acts ? dy : dresidual;  // what x gets beside the gradient of the first convolution
  bool is_own = acts;                                             // whether nobody else has that
  dresidual = Tensor();
  // The gradients of a convolution's input, which may be added to another one, and of its weight.
  std::vector<Tensor*> halves;
  const auto of_convolution = [&](const Tensor& d, const Tensor& input, int64_t i, bool for_input, const Tensor* add, bool add_is_own) {
    const Tensor& low = kept.low(i);
    Tensor& dweight = found[1 + kWeights * i];
    if (!is_product(input, low, plan.steps[i].geometry) || !is_channels_last(d)) {
      // One after the other where memory is what is scarce: of depthwise ones cuDNN's workspace is as large as the result.
      const Geometry& g = plan.steps[i].geometry;
      const bool apart = for_input && g.groups > 1 && g.groups == input.size(1);
      auto [dinput, half] = convolution_gradients(d, input, low, g, for_input && !apart, true);
      if (apart) dinput = std::get<0>(convolution_gradients(d, input, low, g, true, false));
      dweight = half;
      halves.push_back(&dweight);
      return add && for_input ? scale_add(dinput, std::nullopt, std::nullopt, 1.0, *add, x.scalar_type()) : dinput;
    }
    const int64_t n = low.size(0), k = low.size(1), rows = d.numel() / n;
    dweight = like(weight_gradient(matrix(d, rows, n), matrix(input, rows, k), rows, n, k), low);
    if (!for_input) return Tensor();
    std::optional<Tensor> again;
    if (add) again = as_channels_last(*add);
    const bool reuses = add && add_is_own;
    const Tensor dinput = reuses ? *again : empty_strided(dims_of(input.sizes()), dims_of(input.strides()), x.scalar_type(), x);
    const Tensor out = matrix(dinput, rows, k);
    multiply(out, matrix(d, rows, n), matrix(low, n, k), !add ? std::nullopt : std::optional(reuses ? out : matrix(*again, rows, k)));
    return dinput;
  };
  if (plan.sum == kShortcut) {
    again = of_convolution(of_norm(again, length, false).first, x, length, for_x, nullptr, false);
    is_own = true;
  }
  for (int64_t i = length - 1; i >= 0; --i) {
    Tensor input = i == 0 ? x : kept.y(i - 1);
    if (i > 0 && plan.gated == i - 1) input = mul(input, kept.gate(7));
    const bool adds = i == 0 && plan.sum != kNothing;
    Tensor dh = of_convolution(dz, input, i, i > 0 || for_x, adds ? &again : nullptr, is_own);
    input = Tensor();
    if (i == 0) {
      found[0] = for_x ? dh : nothing(x);
      break;
    }
    if (plan.gated == i - 1) {
      const Tensor &first = kept.gate(0), &bias = kept.gate(1), &second = kept.gate(2), &bias2 = kept.gate(3), &mean = kept.gate(4);
      const Tensor &product = kept.gate(5), &product2 = kept.gate(6), &gate = kept.gate(7), &h = kept.y(i - 1);
      const int64_t images = h.size(0), channels = h.size(1), inner = first.size(0), pixels = h.size(2) * h.size(3);
      dh = with_strides(dh, dims_of(h.sizes()), dims_of(h.strides()));
      const Tensor opening = spatial_sum(dh, h, 1.0);
      const auto [d2, dbias2, none] = bias_act_gradients(matrix(opening, images, channels), product2, bias2, plan.gate_end, 0, 0, true,
                                                         ScalarType::Float, false);
      Tensor inside = empty_contiguous({images, inner}, x.scalar_type(), x);
      multiply(inside, d2, matrix(second, channels, inner));
      const auto [d1, dbias1, activated] =
          bias_act_gradients(inside, product, bias, plan.gate_act, 0, 0, true, ScalarType::Float, true);
      Tensor dmean = empty_contiguous({images, channels, 1, 1}, x.scalar_type(), x);
      multiply(matrix(dmean, images, channels), d1, matrix(first, inner, channels));
      found[1 + kWeights * steps] = like(weight_gradient(d1, mean, images, inner, channels), first);
      found[1 + kWeights * steps + 1] = dbias1;
      found[1 + kWeights * steps + 2] = like(weight_gradient(d2, *activated, images, channels, inner), second);
      found[1 + kWeights * steps + 3] = dbias2;
      dh = scale_shift(dh, gate, dmean, 1.0 / static_cast<double>(pixels));
    }
    dz = Tensor();  // its memory is free for what follows
    dz = of_norm(dh, i - 1, false).first;
  }
  widen(halves);
  return found;
}

}  // namespace
}  // namespace fastlayers

STABLE_TORCH_LIBRARY_IMPL(fastlayers, CUDA, m) {
  m.impl("convolution_chain_autocast", TORCH_BOX(&fastlayers::convolution_chain_autocast));
  m.impl("convolution_chain_folded", TORCH_BOX(&fastlayers::convolution_chain_folded));
  m.impl("convolution_chain_moments", TORCH_BOX(&fastlayers::convolution_chain_moments));
  m.impl("convolution_chain_autocast_backward", TORCH_BOX(&fastlayers::convolution_chain_autocast_backward));
}

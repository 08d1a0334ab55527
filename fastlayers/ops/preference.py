"""Losses of preference and reinforcement learning, from the log-probabilities of sequences or tokens.

These are compositions of torch operations: their tensors are small next to the logits that they come from. Each table
below maps the names of TRL to functions, and each loss equals that of TRL 1.16.0. Some formulas are written in another
way, so that they do not cancel or overflow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlayers.ops import guard

T = TypeVar("T")

REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda losses: losses,
    "mean": torch.mean,
    "sum": torch.sum,
}


def _named(table: Mapping[str, T], argument: str, name: str) -> T:
    """The entry of a table that an argument names."""
    if name not in table:
        raise ValueError(f"expected {argument} to be one of {', '.join(table)}, but got {name!r}")
    return table[name]


def _check_shapes(**tensors: Tensor) -> None:
    """All are tensors, in the shape of the first."""
    first, *_ = tensors
    for name, t in tensors.items():
        if not isinstance(t, Tensor):
            raise guard.expected_tensor(t)
        if t.shape != tensors[first].shape:
            raise ValueError(
                f"expected {name} of shape {tuple(tensors[first].shape)}, as {first} has it, but got {tuple(t.shape)}"
            )


def _given(**tensors: Tensor | None) -> dict[str, Tensor]:
    return {name: t for name, t in tensors.items() if t is not None}


# ---- losses of a margin ----------------------------------------------------------------------------------------------


def _log_loss(logits: Tensor, right: float, wrong: float) -> Tensor:
    """The negative log-likelihood of a preference, with a weight for it and one against it."""
    return -right * F.logsigmoid(logits) - wrong * F.logsigmoid(-logits)


def _smoothed(logits: Tensor, smoothing: float) -> Tensor:
    return _log_loss(logits, 1.0 - smoothing, smoothing)


def _robust(logits: Tensor, smoothing: float) -> Tensor:
    """Where labels are flipped with this probability, its expectation is the loss of the true labels."""
    return _log_loss(logits, (1.0 - smoothing) / (1.0 - 2.0 * smoothing), -smoothing / (1.0 - 2.0 * smoothing))


def _hinge(logits: Tensor) -> Tensor:
    return torch.relu(1.0 - logits)


def _squared(margin: Tensor, beta: float) -> Tensor:
    return (margin - 0.5 / beta).square()


def _exo(logits: Tensor, smoothing: float) -> Tensor:
    """KL(policy || smoothed label) over the two completions of a pair."""
    chosen, rejected = (
        torch.sigmoid(x) * (F.logsigmoid(x) - math.log(label))
        for x, label in ((logits, 1.0 - smoothing), (-logits, smoothing))
    )
    return chosen + rejected


def _discopop(logits: Tensor, tau: float) -> Tensor:
    # The exponential loss is multiplied by its share inside of exp: exp(-logits) alone overflows where the share is 0.
    exponential = torch.exp(F.logsigmoid(logits / tau) - logits)
    return exponential - F.logsigmoid(logits) * torch.sigmoid(-logits / tau)


# ---- DPO -------------------------------------------------------------------------------------------------------------


class Pairs(NamedTuple):
    """Pairs of completions, and what their losses depend on.

    Attributes:
        chosen, rejected, ref_chosen, ref_rejected: log-probabilities by the policy and by the reference.
        score: maps a log-ratio of policy and reference to f'(ratio), for the f of the divergence.
        chosen_length, rejected_length: tensors for the loss types in LENGTHS, which may be None for others.
    """

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor
    beta: float
    label_smoothing: float
    tau: float
    score: Callable[[Tensor], Tensor]
    chosen_length: Any
    rejected_length: Any

    def ratios(self) -> tuple[Tensor, Tensor]:
        return self.chosen - self.ref_chosen, self.rejected - self.ref_rejected

    def rewards(self) -> tuple[Tensor, Tensor]:
        chosen, rejected = self.ratios()
        return self.beta * chosen, self.beta * rejected

    def scores(self) -> tuple[Tensor, Tensor]:
        chosen, rejected = self.ratios()
        return self.score(chosen), self.score(rejected)

    def logits(self) -> Tensor:
        chosen, rejected = self.scores()
        return self.beta * (chosen - rejected)

    def margin_per_token(self) -> Tensor:
        chosen, rejected = self.scores()
        return chosen / self.chosen_length.clamp(min=1.0) - rejected / self.rejected_length.clamp(min=1.0)


#: Bounds on the exponent of the alpha-divergence, whose exponential each dtype has. TRL has none for float64.
LARGEST_EXPONENT = {torch.float16: 11.0, torch.bfloat16: 80.0, torch.float32: 80.0, torch.float64: 700.0}


def _alpha_score(ratio: Tensor, alpha: float) -> Tensor:
    if abs(alpha - 1.0) < 1e-6:
        return ratio
    exponent = (alpha - 1.0) * ratio
    wide = torch.promote_types(ratio.dtype, torch.float32)
    power = torch.expm1(exponent.to(wide).clamp(max=LARGEST_EXPONENT[ratio.dtype]))
    return power.to(ratio.dtype) / (alpha - 1.0)


#: f'(ratio) of the f-divergence, from the log-ratio.
DIVERGENCES: dict[str, Callable[..., Tensor]] = {
    "reverse_kl": lambda ratio, alpha: ratio,
    "forward_kl": lambda ratio, alpha: -torch.expm1(-ratio),
    "js_divergence": lambda ratio, alpha: math.log(2) + F.logsigmoid(ratio),
    "alpha_divergence": _alpha_score,
}


def _nca(pairs: Pairs) -> Tensor:
    chosen, rejected = pairs.rewards()
    return _log_loss(chosen, 1.0, 0.5) - 0.5 * F.logsigmoid(-rejected)


def _bco(pairs: Pairs) -> Tensor:
    chosen, rejected = pairs.rewards()
    return -F.logsigmoid(chosen) - F.logsigmoid(-rejected)


def _sppo(pairs: Pairs) -> Tensor:
    chosen, rejected = pairs.ratios()
    return _squared(chosen, pairs.beta) + _squared(rejected, -pairs.beta)


def _apo_zero(pairs: Pairs) -> Tensor:
    chosen, rejected = pairs.rewards()
    return torch.sigmoid(-chosen) + torch.sigmoid(rejected)


def _apo_down(pairs: Pairs) -> Tensor:
    chosen, rejected = pairs.rewards()
    return torch.sigmoid(chosen) + torch.sigmoid(rejected - chosen)


def _aot(pairs: Pairs, better: Tensor, worse: Tensor) -> Tensor:
    """Of the quantiles of two distributions over the batch."""
    return _smoothed(pairs.beta * (better.sort(0).values - worse.sort(0).values), pairs.label_smoothing)


def _sft(pairs: Pairs) -> Tensor:
    """The mean over all tokens of the chosen completions, as the loss of each pair."""
    return (-pairs.chosen.sum() / pairs.chosen_length.sum()).expand(pairs.chosen.shape)


Losses = dict[str, Callable[[Pairs], Tensor]]

#: The loss types that f-divergences apply to: the normaliser of the policy cancels in the difference of the scores.
OF_SCORES: Losses = {
    "sigmoid": lambda pairs: -F.logsigmoid(pairs.logits()),
    "hinge": lambda pairs: _hinge(pairs.logits()),
    "ipo": lambda pairs: _squared(pairs.margin_per_token(), pairs.beta),
    "exo_pair": lambda pairs: _exo(pairs.logits(), pairs.label_smoothing),
    "robust": lambda pairs: _robust(pairs.logits(), pairs.label_smoothing),
    "discopop": lambda pairs: _discopop(pairs.logits(), pairs.tau),
    "sft": _sft,
    "sigmoid_norm": lambda pairs: -F.logsigmoid(pairs.beta * pairs.margin_per_token()),
}
#: Those that sort the batch: their losses are not those of single pairs.
SORTED: Losses = {
    "aot": lambda pairs: _aot(pairs, pairs.chosen - pairs.rejected, pairs.ref_chosen - pairs.ref_rejected),
    "aot_unpaired": lambda pairs: _aot(pairs, *pairs.ratios()),
}
OF_RATIOS: Losses = {
    "nca_pair": _nca,
    "bco_pair": _bco,
    "sppo_hard": _sppo,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
}
DPO = OF_SCORES | OF_RATIOS | SORTED
#: The lengths that a loss type needs.
LENGTHS = {
    "ipo": ("chosen_length", "rejected_length"),
    "sft": ("chosen_length",),
    "sigmoid_norm": ("chosen_length", "rejected_length"),
}


def dpo_loss(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float, loss_type: str,
    label_smoothing: float, divergence: str, alpha: float, tau: float, chosen_length: Tensor | None,
    rejected_length: Tensor | None, weight: Tensor | None, reduction: str,
) -> Tensor:  # fmt: skip
    reduce = _named(REDUCTIONS, "reduction", reduction)
    score = _named(DIVERGENCES, "divergence", divergence)
    loss = _named(DPO, "loss_type", loss_type)
    if divergence != "reverse_kl":
        _named(OF_SCORES, f"loss_type with divergence={divergence!r}", loss_type)
    lengths = _given(chosen_length=chosen_length, rejected_length=rejected_length)
    _check_shapes(
        chosen=chosen, rejected=rejected, ref_chosen=ref_chosen, ref_rejected=ref_rejected,
        **lengths, **_given(weight=weight),
    )  # fmt: skip
    for name in LENGTHS.get(loss_type, ()):
        if name not in lengths:
            raise ValueError(f"loss_type={loss_type!r} needs {name}, the tokens of each completion, but got None")
    if weight is not None and loss_type in SORTED:
        raise ValueError(f"loss_type={loss_type!r} sorts the batch and takes no weight of each pair, but got one")
    if loss_type == "robust" and not 0.0 <= label_smoothing < 0.5:
        raise ValueError(
            f"expected label_smoothing of 'robust' to be at least 0 and below 0.5, but got {label_smoothing}"
        )
    if loss_type == "exo_pair" and not 0.0 < label_smoothing < 1.0:
        raise ValueError(f"expected label_smoothing of 'exo_pair' to be between 0 and 1, but got {label_smoothing}")
    pairs = Pairs(
        chosen, rejected, ref_chosen, ref_rejected, beta, label_smoothing, tau, partial(score, alpha=alpha),
        chosen_length, rejected_length,
    )  # fmt: skip
    losses = loss(pairs)
    return reduce(losses if weight is None else losses * weight)


# ---- KTO, ORPO, CPO --------------------------------------------------------------------------------------------------

#: Whether a loss type subtracts the divergence of policy and reference from the log-ratio.
KTO = {"kto": True, "apo_zero_unpaired": False}


def kto_loss(
    log_prob: Tensor, ref_log_prob: Tensor, label: Tensor, kl: float | Tensor | None, beta: float, loss_type: str,
    desirable_weight: float, undesirable_weight: float, reduction: str,
) -> Tensor:  # fmt: skip
    # As in TRL, losses that are NaN do not count in the mean.
    reduce = _named(REDUCTIONS | {"mean": torch.nanmean}, "reduction", reduction)
    uses_kl = _named(KTO, "loss_type", loss_type)
    _check_shapes(log_prob=log_prob, ref_log_prob=ref_log_prob, label=label)
    if label.dtype != torch.bool:
        raise ValueError(f"expected label of torch.bool, True where the sequence is desirable, but got {label.dtype}")
    rewards = log_prob - ref_log_prob
    if isinstance(kl, Tensor):
        if kl.numel() != 1:
            raise ValueError(f"expected kl to be a number or a tensor of one element, but got shape {tuple(kl.shape)}")
        kl = kl.detach().clamp(min=0).reshape(())
    elif kl is not None:
        kl = max(kl, 0.0)
    if uses_kl and kl is not None:
        rewards = rewards - kl
    losses = torch.sigmoid(beta * torch.where(label, -rewards, rewards))
    return reduce(torch.where(label, desirable_weight * losses, undesirable_weight * losses))


def _log_odds(log_prob: Tensor) -> Tensor:
    """log(p / (1 - p)). For a small p, log(1 - p) is so small that its relative error does not count."""
    return log_prob - torch.log(-torch.expm1(log_prob))


def orpo_loss(chosen: Tensor, rejected: Tensor, beta: float, reduction: str) -> Tensor:
    reduce = _named(REDUCTIONS, "reduction", reduction)
    _check_shapes(chosen=chosen, rejected=rejected)
    chosen, rejected = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (chosen, rejected))
    return reduce(-beta * F.logsigmoid(_log_odds(chosen) - _log_odds(rejected)))


#: Functions of the margin, beta, label_smoothing and gamma.
CPO: dict[str, Callable[[Tensor, float, float, float], Tensor]] = {
    "sigmoid": lambda margin, beta, smoothing, gamma: _smoothed(beta * margin, smoothing),
    "hinge": lambda margin, beta, smoothing, gamma: _hinge(beta * margin),
    "ipo": lambda margin, beta, smoothing, gamma: _squared(margin, beta),
    "simpo": lambda margin, beta, smoothing, gamma: _smoothed(beta * margin - gamma, smoothing),
}


def cpo_loss(
    chosen: Tensor, rejected: Tensor, beta: float, loss_type: str, label_smoothing: float, gamma: float, alpha: float,
    reduction: str,
) -> Tensor:  # fmt: skip
    reduce = _named(REDUCTIONS, "reduction", reduction)
    loss = _named(CPO, "loss_type", loss_type)
    _check_shapes(chosen=chosen, rejected=rejected)
    if alpha != 0.0:  # (1 - p^-alpha) / alpha, whose limit at 0 is log p
        chosen, rejected = (torch.expm1(-alpha * t) / -alpha for t in (chosen, rejected))
    return reduce(loss(chosen - rejected, beta, label_smoothing, gamma))


# ---- GRPO ------------------------------------------------------------------------------------------------------------


class GRPOOptions(NamedTuple):
    """What the functions of GRPO look up. Pairs hold a number for positive advantages and one for others."""

    epsilon: float
    epsilon_high: float
    delta: float | None
    sapo_temperatures: tuple[float, float]
    vespo_k: tuple[float, float]
    vespo_lambda: tuple[float, float]
    max_length: Any  # a number for dr_grpo
    num_items: float | Tensor | None


class Tokens(NamedTuple):
    """What the loss of a token is computed from.

    Attributes:
        log_prob, log_ratio, mask: (B, T).
        ratio: of new and old policy, (B, T), or (B, 1) at the level of sequences.
        advantages, sampling_ratio: (B, T) or (B, 1).
    """

    log_prob: Tensor
    log_ratio: Tensor
    ratio: Tensor
    advantages: Tensor
    mask: Tensor
    sampling_ratio: Tensor | None


def _sequence_means(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1.0)


def _clipped(tokens: Tokens, options: GRPOOptions) -> Tensor:
    ratio = tokens.ratio if options.delta is None else tokens.ratio.clamp(max=options.delta)
    near = tokens.ratio.clamp(1.0 - options.epsilon, 1.0 + options.epsilon_high)
    return -torch.minimum(ratio * tokens.advantages, near * tokens.advantages)


def _truncated(tokens: Tokens, options: GRPOOptions) -> Tensor:
    """The gradient of REINFORCE, times the ratio or epsilon_high, whichever is less."""
    return -tokens.ratio.detach().clamp(max=options.epsilon_high) * tokens.advantages * tokens.log_prob


def _gated(tokens: Tokens, options: GRPOOptions) -> Tensor:
    temperature = torch.where(tokens.advantages > 0, *options.sapo_temperatures)
    return -torch.sigmoid(temperature * (tokens.ratio - 1.0)) * 4.0 / temperature * tokens.advantages


def _gamma_weighted(tokens: Tokens, options: GRPOOptions) -> Tensor:
    """The gradient of REINFORCE, times w^k exp(λ(1 - w)) for the ratio w of the whole sequence."""
    least, most = math.log(1e-8), 20.0
    with torch.no_grad():
        log_w = (tokens.log_ratio.clamp(-most, most) * tokens.mask).sum(-1, keepdim=True)
        if tokens.sampling_ratio is not None:
            log_w = log_w + tokens.sampling_ratio.log().clamp(least, most).sum(-1, keepdim=True)
        log_w = log_w.clamp(least, most)
        k = torch.where(tokens.advantages >= 0, *options.vespo_k)
        decay = torch.where(tokens.advantages >= 0, *options.vespo_lambda).clamp(min=1e-4)
        weight = torch.exp(decay + k * log_w - decay * log_w.exp()).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return -weight * tokens.advantages * tokens.log_prob


def _mean_of_sequences(losses: Tensor, mask: Tensor, options: GRPOOptions) -> Tensor:
    return _sequence_means(losses, mask).mean()


def _mean_of_sums(losses: Tensor, mask: Tensor, options: GRPOOptions) -> Tensor:
    return (losses * mask).sum(-1).mean()


def _mean_of_tokens(losses: Tensor, mask: Tensor, options: GRPOOptions) -> Tensor:
    return (losses * mask).sum() / mask.sum().clamp(min=1.0)


def _per_length(losses: Tensor, mask: Tensor, options: GRPOOptions) -> Tensor:
    return (losses * mask).sum() / (mask.shape[0] * options.max_length)


def _per_item(losses: Tensor, mask: Tensor, options: GRPOOptions) -> Tensor:
    items = mask.sum() if options.num_items is None else options.num_items
    return (losses * mask).sum() / (items.clamp(min=1.0) if isinstance(items, Tensor) else max(items, 1.0))


#: The losses of the tokens, and their sum over the tokens that count.
GRPO: dict[str, tuple[Callable[[Tokens, GRPOOptions], Tensor], Callable[[Tensor, Tensor, GRPOOptions], Tensor]]] = {
    "grpo": (_clipped, _mean_of_sequences),
    "bnpo": (_clipped, _mean_of_tokens),
    "dr_grpo": (_clipped, _per_length),
    "dapo": (_clipped, _per_item),
    "luspo": (_clipped, _mean_of_sums),
    "cispo": (_truncated, _per_item),
    "sapo": (_gated, _mean_of_sequences),
    "vespo": (_gamma_weighted, _per_item),
}
#: The log-ratio that a token gets from those of its sequence.
LEVELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": lambda log_ratio, mask: log_ratio,
    "sequence": _sequence_means,
}


def _by_token(name: str, value: Tensor, shape: torch.Size) -> Tensor:
    """Numbers of sequences, (B,), or of tokens, in a shape that broadcasts against (B, T)."""
    if not isinstance(value, Tensor):
        raise guard.expected_tensor(value)
    out = value.unsqueeze(1) if value.dim() == 1 else value
    if out.dim() != 2 or out.shape[0] != shape[0] or out.shape[1] not in (1, shape[1]):
        raise ValueError(f"expected {name} of shape {tuple(shape[:1])} or {tuple(shape)}, but got {tuple(value.shape)}")
    return out


def grpo_loss(
    log_prob: Tensor, old_log_prob: Tensor | None, advantages: Tensor, mask: Tensor, loss_type: str, level: str,
    beta: float, ref_log_prob: Tensor | None, use_bias_correction_kl: bool, off_policy_mask_threshold: float | None,
    sampling_log_prob: Tensor | None, sampling_ratio: Tensor | None, weight: Tensor | None, options: GRPOOptions,
) -> Tensor:  # fmt: skip
    loss, summed = _named(GRPO, "loss_type", loss_type)
    of_level = _named(LEVELS, "level", level)
    if loss_type == "dr_grpo" and options.max_length is None:
        raise ValueError("loss_type='dr_grpo' needs max_length, the most tokens of a completion, but got None")
    if beta != 0.0 and ref_log_prob is None:
        raise ValueError(f"beta={beta} needs ref_log_prob, the log-probabilities by the reference, but got None")
    others = _given(old_log_prob=old_log_prob, ref_log_prob=ref_log_prob, sampling_log_prob=sampling_log_prob)
    _check_shapes(log_prob=log_prob, mask=mask, **others)
    if log_prob.dim() != 2:
        raise ValueError(f"expected log_prob of shape (B, T), but got {tuple(log_prob.shape)}")
    advantages = _by_token("advantages", advantages, log_prob.shape)
    if sampling_ratio is not None:
        sampling_ratio = _by_token("sampling_ratio", sampling_ratio, log_prob.shape)

    # A factor of 0 does not remove an infinity or NaN in the padding.
    padding = mask == 0
    log_prob = log_prob.masked_fill(padding, 0.0)
    others = {name: t.masked_fill(padding, 0.0) for name, t in others.items()}
    old = others.get("old_log_prob", log_prob.detach())

    log_ratio = log_prob - old
    ratio = torch.exp(of_level(log_ratio, mask))
    losses = loss(Tokens(log_prob, log_ratio, ratio, advantages, mask, sampling_ratio), options)
    if off_policy_mask_threshold is not None:
        # A token that the sampler could not score is NaN, and says nothing about the divergence.
        drift = (others.get("sampling_log_prob", old) - log_prob.detach()).nan_to_num(nan=0.0)
        losses = losses * ((advantages >= 0) | (_sequence_means(drift, mask) <= off_policy_mask_threshold))
    if weight is not None:
        losses = losses * _by_token("weight", weight, log_prob.shape)
    if sampling_ratio is not None and loss_type != "vespo":
        losses = losses * sampling_ratio
    if beta != 0.0:
        difference = others["ref_log_prob"] - log_prob
        kl = torch.expm1(difference) - difference
        losses = losses + beta * (kl * ratio if use_bias_correction_kl else kl)
    return summed(losses, mask, options)

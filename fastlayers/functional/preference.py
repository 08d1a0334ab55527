"""Losses of preference and reinforcement learning."""

from __future__ import annotations

from torch import Tensor

from fastlayers.ops import preference as _preference


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float = 0.1,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
    divergence: str = "reverse_kl",
    alpha: float = 0.5,
    tau: float = 0.05,
    chosen_length: Tensor | None = None,
    rejected_length: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    r"""Direct preference optimisation (DPO) and its variants, from the log-probabilities of pairs of completions.

    .. math:: L = -\log \sigma(\beta (u - v)), \qquad
        u = \log \frac{\pi(\text{chosen})}{\pi_{\text{ref}}(\text{chosen})}, \quad
        v = \log \frac{\pi(\text{rejected})}{\pi_{\text{ref}}(\text{rejected})}

    for each pair, or another loss of u and v. Stands for the loss of TRL's DPOTrainer, with its defaults.

    Args:
        chosen, rejected: (B,), log-probabilities of the completions by the policy, summed over the tokens.
        ref_chosen, ref_rejected: (B,), those by the reference.
        beta: the weight of the divergence from the reference.
        loss_type: in the formulas h = β(u - v), and ε is ``label_smoothing``.

            - ``"sigmoid"``: -log σ(h), DPO <https://arxiv.org/abs/2305.18290>.
            - ``"hinge"``: max(1 - h, 0), SLiC <https://arxiv.org/abs/2305.10425>.
            - ``"ipo"``: (u/chosen_length - v/rejected_length - 1/(2β))² <https://arxiv.org/abs/2310.12036>.
            - ``"exo_pair"``: q log(q/(1 - ε)) + (1 - q) log((1 - q)/ε), with q = σ(h)
              <https://arxiv.org/abs/2402.00856>, which recommends an ε of 0.001.
            - ``"nca_pair"``: -log σ(βu) - ½ log σ(-βu) - ½ log σ(-βv) <https://arxiv.org/abs/2402.05369>.
            - ``"robust"``: (-(1 - ε) log σ(h) + ε log σ(-h)) / (1 - 2ε) <https://arxiv.org/abs/2403.00409>.
            - ``"bco_pair"``: -log σ(βu) - log σ(-βv) <https://arxiv.org/abs/2404.04656>.
            - ``"sppo_hard"``: (u - 1/(2β))² + (v + 1/(2β))² <https://arxiv.org/abs/2405.00675>.
            - ``"aot"``: -(1 - ε) log σ(βd) - ε log σ(-βd), with d the difference of chosen - rejected and of
              ref_chosen - ref_rejected, each sorted over the batch <https://arxiv.org/abs/2406.05882>.
            - ``"aot_unpaired"``: the same, with d the difference of u and v, each sorted.
            - ``"apo_zero"``: σ(-βu) + σ(βv), and ``"apo_down"``: σ(βu) + σ(-h) <https://arxiv.org/abs/2408.06266>.
            - ``"discopop"``: -(1 - m) log σ(h) + m exp(-h), with m = σ(h/τ) <https://arxiv.org/abs/2406.08414>.
            - ``"sft"``: the mean negative log-probability of all chosen tokens, for each pair the same.
            - ``"sigmoid_norm"``: -log σ(β(u/chosen_length - v/rejected_length)), DPO of Tülu 3
              <https://arxiv.org/abs/2411.15124>.

        label_smoothing: for "exo_pair", "robust", "aot" and "aot_unpaired". Others ignore it.
        divergence: what beta weighs <https://arxiv.org/abs/2309.16240>. It replaces u and v in the losses of h, and in
            "ipo" and "sigmoid_norm", by: u itself for ``"reverse_kl"``, 1 - exp(-u) for ``"forward_kl"``,
            log 2 + log σ(u) for ``"js_divergence"``, and (exp((α - 1)u) - 1)/(α - 1) for ``"alpha_divergence"``. The
            other losses take "reverse_kl" only.
        alpha: α of "alpha_divergence". At 1 it is "reverse_kl".
        tau: τ of "discopop".
        chosen_length, rejected_length: (B,), the numbers of tokens of the completions. "ipo" and "sigmoid_norm" need
            both, "sft" needs chosen_length.
        weight: (B,), factors of the losses, such as those of WPO <https://arxiv.org/abs/2406.11827>. TRL computes them
            without a gradient. "aot" and "aot_unpaired" take none.
        reduction: "none", "mean" or "sum".

    Returns:
        A scalar, or for "none" (B,). The losses of "aot" and "aot_unpaired" are not in the order of the pairs.

    Keeps: what the torch operations keep, some numbers for each pair.

    Raises:
        ValueError: loss_type, divergence or reduction is not valid, or the divergence or weight does not go with the
            loss type. Shapes differ, a length is missing, or label_smoothing is outside of [0, 0.5) for "robust" or
            outside of (0, 1) for "exo_pair".
    """
    return _preference.dpo_loss(
        chosen, rejected, ref_chosen, ref_rejected, beta, loss_type, label_smoothing, divergence, alpha, tau,
        chosen_length, rejected_length, weight, reduction,
    )  # fmt: skip


def kto_loss(
    log_prob: Tensor,
    ref_log_prob: Tensor,
    label: Tensor,
    kl: float | Tensor | None,
    *,
    beta: float = 0.1,
    loss_type: str = "kto",
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    reduction: str = "mean",
) -> Tensor:
    r"""Kahneman-Tversky optimisation (KTO), from the log-probabilities of completions that are desirable or not.

    .. math:: L = \begin{cases} w_d\, \sigma(\beta (\text{kl} - u)) & \text{label} \\
        w_u\, \sigma(\beta (u - \text{kl})) & \text{otherwise} \end{cases}, \qquad
        u = \log \frac{\pi(y)}{\pi_{\text{ref}}(y)}

    <https://arxiv.org/abs/2402.01306>. Stands for the loss of TRL's KTOTrainer, with its defaults.

    Args:
        log_prob: (B,), log-probabilities of the completions by the policy, summed over the tokens.
        ref_log_prob: (B,), those by the reference.
        label: (B,) of torch.bool, True where the completion is desirable.
        kl: an estimate of the divergence of the policy from the reference: a number, or a tensor of one element, which
            gets no gradient. A negative one counts as 0, and so does None.
        beta: the weight of the divergence from the reference.
        loss_type: ``"kto"``, or ``"apo_zero_unpaired"``, which ignores kl <https://arxiv.org/abs/2408.06266>.
        desirable_weight, undesirable_weight: the factors of the losses.
        reduction: "none", "mean" or "sum". As in TRL, losses that are NaN do not count in the mean.

    Returns:
        A scalar, or for "none" (B,).

    Keeps: what the torch operations keep, some numbers for each completion.

    Raises:
        ValueError: loss_type or reduction is not valid, shapes differ, label is not of torch.bool, or kl has several
            elements.
    """
    return _preference.kto_loss(
        log_prob, ref_log_prob, label, kl, beta, loss_type, desirable_weight, undesirable_weight, reduction
    )


def orpo_loss(chosen: Tensor, rejected: Tensor, *, beta: float = 0.1, reduction: str = "mean") -> Tensor:
    r"""The odds ratio term of ORPO, from the mean log-probabilities of pairs of completions.

    .. math:: L = -\beta \log \sigma\left(\log \frac{p_c}{1 - p_c} - \log \frac{p_r}{1 - p_r}\right), \qquad
        p_c = \exp(\text{chosen}), \quad p_r = \exp(\text{rejected})

    <https://arxiv.org/abs/2403.07691>. The loss of TRL's ORPOTrainer is ``nll + orpo_loss(chosen, rejected)``, with the
    cross-entropy of the chosen sequences as ``nll``.

    Args:
        chosen, rejected: (B,), log-probabilities of the completions, averaged over the tokens.
        beta: the weight of this term, λ in the paper.
        reduction: "none", "mean" or "sum".

    Returns:
        A scalar, or for "none" (B,); float32 for 16-bit inputs, as in TRL. A log-probability of exactly 0 has infinite
        odds, and a gradient that is not finite.

    Keeps: what the torch operations keep, some numbers for each pair.

    Raises:
        ValueError: reduction is not valid, or the shapes differ.
    """
    return _preference.orpo_loss(chosen, rejected, beta, reduction)


def cpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    *,
    beta: float = 0.1,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
    gamma: float = 0.5,
    alpha: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    r"""Contrastive preference optimisation (CPO) and its variants: DPO without a reference.

    .. math:: L = -(1 - \epsilon) \log \sigma(h) - \epsilon \log \sigma(-h), \qquad
        h = \beta (\text{chosen} - \text{rejected})

    <https://arxiv.org/abs/2401.08417>, with ε for ``label_smoothing``. Stands for ``CPOTrainer.cpo_loss`` of TRL, with
    its defaults. The trainer adds the cross-entropy of the chosen sequences.

    Args:
        chosen, rejected: (B,), log-probabilities of the completions, summed over the tokens. TRL averages them for
            "ipo" and "simpo".
        beta: the factor of the margin.
        loss_type: with d = chosen - rejected

            - ``"sigmoid"``: the formula above.
            - ``"hinge"``: max(1 - h, 0) <https://arxiv.org/abs/2305.10425>.
            - ``"ipo"``: (d - 1/(2β))² <https://arxiv.org/abs/2310.12036>.
            - ``"simpo"``: "sigmoid" with h - γ for h <https://arxiv.org/abs/2405.14734>.

        label_smoothing: for "sigmoid" and "simpo". Others ignore it.
        gamma: γ, the margin that "simpo" aims at.
        alpha: α of AlphaPO <https://arxiv.org/abs/2501.03884>. Other than 0 it replaces each log-probability log p by
            (1 - p^-α)/α.
        reduction: "none", "mean" or "sum".

    Returns:
        A scalar, or for "none" (B,).

    Keeps: what the torch operations keep, some numbers for each pair.

    Raises:
        ValueError: loss_type or reduction is not valid, or the shapes differ.
    """
    return _preference.cpo_loss(chosen, rejected, beta, loss_type, label_smoothing, gamma, alpha, reduction)


def simpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    *,
    beta: float = 2.0,
    gamma: float = 1.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    r"""Simple preference optimisation (SimPO), from the mean log-probabilities of pairs of completions.

    .. math:: L = -\log \sigma(\beta (\text{chosen} - \text{rejected}) - \gamma)

    <https://arxiv.org/abs/2405.14734>. Stands for :func:`cpo_loss` with ``loss_type="simpo"``. The defaults are the
    paper's for Llama 3 8B; those of TRL are a beta of 0.1 and a gamma of 0.5.

    Args:
        chosen, rejected: (B,), log-probabilities of the completions, averaged over the tokens.
        beta, gamma, label_smoothing, reduction: as for :func:`cpo_loss`.

    Returns:
        A scalar, or for "none" (B,).

    Keeps: what the torch operations keep, some numbers for each pair.

    Raises:
        ValueError: reduction is not valid, or the shapes differ.
    """
    return _preference.cpo_loss(chosen, rejected, beta, "simpo", label_smoothing, gamma, 0.0, reduction)


def grpo_loss(
    log_prob: Tensor,
    old_log_prob: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    loss_type: str = "grpo",
    level: str = "token",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    ref_log_prob: Tensor | None = None,
    beta: float = 0.0,
    use_bias_correction_kl: bool = True,
    max_length: int | None = None,
    num_items: float | Tensor | None = None,
    sampling_log_prob: Tensor | None = None,
    off_policy_mask_threshold: float | None = None,
    sampling_ratio: Tensor | None = None,
    weight: Tensor | None = None,
    sapo_temperatures: tuple[float, float] = (1.0, 1.05),
    vespo_k: tuple[float, float] = (2.0, 3.0),
    vespo_lambda: tuple[float, float] = (3.0, 2.0),
) -> Tensor:
    r"""Group relative policy optimisation (GRPO) and its variants, from the log-probabilities of sampled tokens.

    .. math:: L = \frac{1}{B} \sum_i \frac{1}{\sum_t m_{it}} \sum_t m_{it} \left(-\min(r_{it} A_i,\;
        \mathrm{clip}(r_{it}, 1 - \epsilon, 1 + \epsilon_{\text{high}}) A_i) + \beta\, \mathrm{KL}_{it}\right),
        \qquad r_{it} = \frac{\pi(y_{it})}{\pi_{\text{old}}(y_{it})}

    <https://arxiv.org/abs/2402.03300>. Stands for the loss of TRL's GRPOTrainer, with its defaults except for
    ``loss_type``, which is "dapo" there. Gradient accumulation and the entropy bonus are left to the caller.

    Args:
        log_prob: (B, T), log-probabilities of the tokens by the policy.
        old_log_prob: (B, T), those by the policy that the tokens are from, or None for ``log_prob.detach()``.
        advantages: A, (B,) or (B, T).
        mask: m, (B, T) of any dtype. Where it is 0, the log-probabilities may hold anything.
        loss_type: the loss of a token, and what the sum over all tokens is divided by.

            - ``"grpo"``: the formula above.
            - ``"bnpo"``: the same loss of a token, divided by the number of tokens, the sum of the mask.
            - ``"dr_grpo"``: divided by B·max_length <https://arxiv.org/abs/2503.20783>.
            - ``"dapo"``: divided by num_items <https://arxiv.org/abs/2503.14476>.
            - ``"luspo"``: divided by B, meant for level "sequence" <https://arxiv.org/abs/2602.05261>.
            - ``"cispo"``: -min(r, epsilon_high)·A·log_prob, without a gradient by r, divided by num_items
              <https://arxiv.org/abs/2506.13585>. The bound is epsilon_high itself, for which
              <https://arxiv.org/abs/2510.13786> recommends 5.
            - ``"sapo"``: -4/τ·σ(τ(r - 1))·A, divided as for "grpo" <https://arxiv.org/abs/2511.20347>.
            - ``"vespo"``: -φ·A·log_prob with φ = w^k exp(λ(1 - w)), without a gradient, for the ratio w of the whole
              sequence, divided by num_items <https://arxiv.org/abs/2602.10693>.

        level: ``"token"``, or ``"sequence"``, where each token has the geometric mean of the ratios of its sequence:
            GSPO <https://arxiv.org/abs/2507.18071>.
        epsilon, epsilon_high: ε and ε_high. An epsilon_high of None is epsilon.
        delta: an upper bound on r before the minimum, or None <https://arxiv.org/abs/2505.07291>.
        ref_log_prob: (B, T), log-probabilities by the reference, where beta is not 0.
        beta: the factor of KL = exp(d) - d - 1 with d = ref_log_prob - log_prob.
        use_bias_correction_kl: whether r multiplies this KL <https://arxiv.org/abs/2512.02556>.
        max_length: the bound on the length of a completion, for "dr_grpo".
        num_items: the divisor of "cispo", "dapo" and "vespo", a number or a tensor of one: the tokens of all batches
            that are accumulated. Less than 1 counts as 1. Default: the sum of the mask.
        sampling_log_prob: (B, T), log-probabilities by the engine that sampled the tokens, with NaN where it gave none.
            Default: old_log_prob.
        off_policy_mask_threshold: a bound on the mean of sampling_log_prob - log_prob over a sequence. Beyond it a
            negative advantage has no loss but the KL <https://arxiv.org/abs/2512.02556>. Default: no bound.
        sampling_ratio: (B,) or (B, T), the truncated or masked ratio of old policy and sampling engine. It multiplies
            the loss of a token, and for "vespo" w instead: there it is 1 at padding, as TRL has it.
        weight: (B,) or (B, T), a factor of the loss of a token, such as a mask of tokens with a high entropy
            <https://arxiv.org/abs/2506.01939>. It does not multiply the KL.
        sapo_temperatures: τ for positive advantages, and for others.
        vespo_k, vespo_lambda: k and λ for advantages that are not negative, and for negative ones.

    Returns:
        A scalar.

    Keeps: what the torch operations keep, some numbers for each token.

    Raises:
        ValueError: loss_type or level is not valid, shapes do not fit, beta comes without ref_log_prob, or "dr_grpo"
            without max_length.
    """
    options = _preference.GRPOOptions(
        epsilon, epsilon if epsilon_high is None else epsilon_high, delta, sapo_temperatures, vespo_k, vespo_lambda,
        max_length, num_items,
    )  # fmt: skip
    return _preference.grpo_loss(
        log_prob, old_log_prob, advantages, mask, loss_type, level, beta, ref_log_prob, use_bias_correction_kl,
        off_policy_mask_threshold, sampling_log_prob, sampling_ratio, weight, options,
    )  # fmt: skip

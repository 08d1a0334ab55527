"""The losses of preference and reinforcement learning: their formulas, edges, arguments."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from fastlayers import functional
from fastlayers.ops.preference import CPO, DIVERGENCES, DPO, GRPO, KTO, LEVELS, REDUCTIONS
from tests.harness import assert_close
from tests.ops.preference_cases import B, Case, T, completions, each, gradients, grpo, log_probs, normal


def pairs(scale: float = 3.0) -> list[Tensor]:
    """chosen, rejected, ref_chosen, ref_rejected."""
    return [(scale * log_probs(B, seed=seed)).detach().requires_grad_(seed < 2) for seed in range(4)]


def dpo(loss_type: str, scale: float = 3.0, **options: Any) -> Case:
    sizes = {"chosen_length": torch.arange(1, B + 1), "rejected_length": torch.arange(B, 0, -1)}
    chosen, rejected, *reference = pairs(scale)
    options = {"loss_type": loss_type, "label_smoothing": 0.1, **sizes, **options}
    return Case(functional.dpo_loss, (chosen, rejected), tuple(reference), options)


def kto(loss_type: str, **options: Any) -> Case:
    log_prob, ref = pairs()[1:3]
    label = torch.tensor([True, False, False, True, False, True])
    return Case(functional.kto_loss, (log_prob,), (ref, label, 0.3), {"loss_type": loss_type, **options})


CASES = {
    **{f"dpo {name}": dpo(name) for name in DPO},
    **{f"dpo {name}": dpo("sigmoid", divergence=name) for name in DIVERGENCES},
    **{f"kto {name}": kto(name) for name in KTO},
    **{f"cpo {name}": Case(functional.cpo_loss, tuple(pairs()[:2]), (), {"loss_type": name}) for name in CPO},
    "cpo alpha": Case(functional.cpo_loss, tuple(pairs()[:2]), (), {"alpha": 0.2, "label_smoothing": 0.1}),
    "simpo": Case(functional.simpo_loss, tuple(pairs()[:2]), (), {}),
    "orpo": Case(functional.orpo_loss, tuple(pairs()[:2]), (), {}),
    **{f"grpo {name} {level}": grpo(name, level=level, beta=0.1) for name in GRPO for level in LEVELS},
}
OF_SEQUENCES = [name for name in CASES if not name.startswith("grpo")]
#: A factor of these losses depends on log_prob, and has no gradient.
DETACHED = [f"grpo {name} {level}" for name in ("cispo", "vespo") for level in LEVELS]


# ---- formulas --------------------------------------------------------------------------------------------------------


def log_sigmoid(x):
    return torch.log(1 / (1 + torch.exp(-x)))


def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


def smoothed(x, wrong):
    return -(1 - wrong) * log_sigmoid(x) - wrong * log_sigmoid(-x)


#: As the docstring has them: functions of u, v, h, the margin per token m, and e for label_smoothing, with beta 0.3.
BETA = 0.3
FORMULAS = {
    "sigmoid": lambda u, v, h, m, e: -log_sigmoid(h),
    "hinge": lambda u, v, h, m, e: (1 - h).clamp(min=0),
    "ipo": lambda u, v, h, m, e: (m - 1 / (2 * BETA)) ** 2,
    "exo_pair": lambda u, v, h, m, e: (
        sigmoid(h) * torch.log(sigmoid(h) / (1 - e)) + sigmoid(-h) * torch.log(sigmoid(-h) / e)
    ),
    "nca_pair": lambda u, v, h, m, e: -log_sigmoid(BETA * u) - log_sigmoid(-BETA * u) / 2 - log_sigmoid(-BETA * v) / 2,
    "robust": lambda u, v, h, m, e: (-(1 - e) * log_sigmoid(h) + e * log_sigmoid(-h)) / (1 - 2 * e),
    "bco_pair": lambda u, v, h, m, e: -log_sigmoid(BETA * u) - log_sigmoid(-BETA * v),
    "sppo_hard": lambda u, v, h, m, e: (u - 1 / (2 * BETA)) ** 2 + (v + 1 / (2 * BETA)) ** 2,
    "aot_unpaired": lambda u, v, h, m, e: smoothed(BETA * (u.sort().values - v.sort().values), e),
    "apo_zero": lambda u, v, h, m, e: sigmoid(-BETA * u) + sigmoid(BETA * v),
    "apo_down": lambda u, v, h, m, e: sigmoid(BETA * u) + sigmoid(-h),
    "discopop": lambda u, v, h, m, e: -sigmoid(-h / 0.05) * log_sigmoid(h) + sigmoid(h / 0.05) * torch.exp(-h),
    "sigmoid_norm": lambda u, v, h, m, e: -log_sigmoid(BETA * m),
}


@each("loss_type", FORMULAS)
def test_formulas_of_dpo(loss_type):
    case = dpo(loss_type, scale=1.0, beta=BETA, reduction="none")
    u, v = (t - ref for t, ref in zip(case.leaves, case.others, strict=True))
    m = u / case.options["chosen_length"] - v / case.options["rejected_length"]
    assert_close(case.loss(), FORMULAS[loss_type](u, v, BETA * (u - v), m, 0.1))


def test_sft_is_the_mean_over_all_tokens():
    tokens, mask = completions()[::2]
    chosen, length = (tokens * mask).sum(1), mask.sum(1)
    ours = functional.dpo_loss(chosen, chosen, chosen, chosen, loss_type="sft", chosen_length=length, reduction="none")
    assert_close(ours, -tokens[mask].mean().expand(B))


def test_aot_compares_quantiles():
    """It does not matter which pairs of the policy go with which of the reference."""
    case = dpo("aot")
    (chosen, rejected), (ref_chosen, ref_rejected) = case.leaves, case.others
    d = (chosen - rejected).sort().values - (ref_chosen - ref_rejected).sort().values
    assert_close(case.loss(), smoothed(0.1 * d, 0.1).mean())
    assert_close(case.loss(chosen.flip(0), rejected.flip(0)), case.loss())


@pytest.mark.parametrize(
    ("divergence", "alpha", "derivative"),
    [
        ("reverse_kl", 0.5, lambda t: torch.log(t)),
        ("forward_kl", 0.5, lambda t: 1 - 1 / t),
        ("js_divergence", 0.5, lambda t: torch.log(2 * t / (t + 1))),
        ("alpha_divergence", 0.5, lambda t: (t**-0.5 - 1) / -0.5),
        ("alpha_divergence", 2.5, lambda t: (t**1.5 - 1) / 1.5),
        ("alpha_divergence", 1.0, lambda t: torch.log(t)),
    ],
)
def test_divergences_give_the_derivative_of_their_f(divergence, alpha, derivative):
    case = dpo("sigmoid", scale=1.0, divergence=divergence, alpha=alpha, reduction="none")
    u, v = ((t - ref).exp() for t, ref in zip(case.leaves, case.others, strict=True))
    assert_close(case.loss(), -log_sigmoid(0.1 * (derivative(u) - derivative(v))))


def test_weights_multiply_losses():
    case, weight = dpo("hinge", reduction="none"), normal(B, seed=5).exp()
    assert_close(case.loss(weight=weight), weight * case.loss())


@pytest.mark.parametrize(
    "kl", [0.7, -0.7, None, torch.tensor(0.7), torch.tensor([0.7]), torch.tensor([[-0.7]])], ids=str
)
def test_formula_of_kto(kl):
    """In the order of the sequences, with a divergence that is not below 0."""
    (log_prob,), (ref, label, _) = kto("kto")[1:3]
    options = {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.7, "reduction": "none"}
    ours = functional.kto_loss(log_prob, ref, label, kl, **options)
    bound = max(float(kl or 0.0), 0.0)
    for i, loss in enumerate(ours):
        u = log_prob[i] - ref[i]
        assert_close(loss, 1.5 * sigmoid(0.3 * (bound - u)) if label[i] else 0.7 * sigmoid(0.3 * (u - bound)))
    unpaired = functional.kto_loss(log_prob, ref, label, kl, loss_type="apo_zero_unpaired", **options)
    assert_close(unpaired, functional.kto_loss(log_prob, ref, label, None, **options))


def test_divergence_of_kto_gets_no_gradient():
    log_prob, kl = log_probs(B), torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    out = functional.kto_loss(log_prob, log_prob.detach() - 1, torch.arange(B) > 2, kl)
    assert torch.autograd.grad(out, kl, allow_unused=True) == (None,)


def test_formula_of_orpo():
    chosen, rejected = log_probs(B, seed=1), log_probs(B, seed=2)
    odds = [t.exp() / (1 - t.exp()) for t in (chosen, rejected)]
    ours = functional.orpo_loss(chosen, rejected, beta=0.3, reduction="none")
    assert_close(ours, -0.3 * log_sigmoid(torch.log(odds[0] / odds[1])))


@pytest.mark.parametrize("alpha", [0.0, 0.25, -0.5])
def test_formulas_of_cpo(alpha):
    chosen, rejected = log_probs(B, seed=1), log_probs(B, seed=2)
    c, r = ((1 - t.exp() ** -alpha) / alpha if alpha else t for t in (chosen, rejected))
    options = {"beta": 0.3, "label_smoothing": 0.1, "gamma": 0.5, "alpha": alpha, "reduction": "none"}
    for loss_type, expected in {
        "sigmoid": smoothed(0.3 * (c - r), 0.1),
        "hinge": (1 - 0.3 * (c - r)).clamp(min=0),
        "ipo": (c - r - 1 / 0.6) ** 2,
        "simpo": smoothed(0.3 * (c - r) - 0.5, 0.1),
    }.items():
        assert_close(functional.cpo_loss(chosen, rejected, loss_type=loss_type, **options), expected)


def test_simpo_is_that_of_cpo():
    chosen, rejected = pairs()[:2]
    expected = functional.cpo_loss(chosen, rejected, loss_type="simpo", beta=2.0, gamma=1.0)
    assert_close(functional.simpo_loss(chosen, rejected), expected)


def by_hand(case: Case) -> float:
    """The loss of GRPO in loops over numbers, with the default options."""
    (log_prob,), (old, advantages, mask) = (t.detach() for t in case.leaves), case.others
    loss_type, level = case.options["loss_type"], case.options["level"]
    divisor = {"dr_grpo": B * 20, **dict.fromkeys(("grpo", "sapo", "luspo"), B)}.get(loss_type, int(mask.sum()))
    total = 0.0
    for row in range(B):
        logs = {t: float(log_prob[row, t] - old[row, t]) for t in range(T) if mask[row, t]}
        w, a = math.exp(sum(logs.values())), float(advantages[row])
        for t, log in logs.items():
            r = math.exp(log) if level == "token" else w ** (1 / len(logs))
            if loss_type == "cispo":
                loss = -min(r, 0.2) * a * float(log_prob[row, t])
            elif loss_type == "sapo":
                tau = 1.0 if a > 0 else 1.05
                loss = -4 / tau / (1 + math.exp(-tau * (r - 1))) * a
            elif loss_type == "vespo":
                k, decay = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
                loss = -(w**k) * math.exp(decay * (1 - w)) * a * float(log_prob[row, t])
            else:
                loss = -min(r * a, min(max(r, 0.8), 1.2) * a)
            total += loss / len(logs) if loss_type in ("grpo", "sapo") else loss
    return total / divisor


@each("level", LEVELS)
@each("loss_type", GRPO)
def test_formulas_of_grpo(loss_type, level):
    case = grpo(loss_type, level=level)
    assert_close(case.loss(), torch.tensor(by_hand(case), dtype=torch.float64))


def test_ratios_of_cispo_and_vespo_get_no_gradient():
    for loss_type in ("cispo", "vespo"):
        case = grpo(loss_type)
        (log_prob,), (old, advantages, mask) = case.leaves, case.others
        a = advantages[:, None]
        factor = (log_prob - old).exp().clamp(max=0.2)
        if loss_type == "vespo":
            w = ((log_prob - old) * mask).sum(1, keepdim=True).exp()
            k, decay = (torch.where(a >= 0, *of_sign) for of_sign in ((2.0, 3.0), (3.0, 2.0)))
            factor = w**k * torch.exp(decay * (1 - w))
        assert_close(case.gradients(), ((-factor * a * mask / mask.sum()).detach(),))


# ---- what holds for all ----------------------------------------------------------------------------------------------


@each("name", [name for name in CASES if name not in DETACHED])
def test_derivatives(name):
    case = CASES[name].to()
    assert gradcheck(case.loss, case.leaves)
    if name != "dpo sft":  # which is linear
        assert gradgradcheck(case.loss, case.leaves)


@each("name", OF_SEQUENCES)
def test_reductions(name):
    losses, mean, total = (CASES[name].loss(reduction=reduction) for reduction in ("none", "mean", "sum"))
    assert losses.shape == (B,)
    assert_close(mean, losses.mean())
    assert_close(total, losses.sum())
    assert_close(CASES[name].loss(), mean)


@each("name", CASES)
def test_no_value_is_read_and_no_argument_is_written(name):
    """A tensor without data stands for one on a GPU, which the host would wait for."""
    CASES[name].to(device="meta").gradients()
    case = CASES[name].to()
    given = [t for t in (*case.leaves, *case.others, *case.options.values()) if isinstance(t, Tensor)]
    before = [t._version for t in given]
    case.gradients()
    assert [t._version for t in given] == before


@pytest.mark.slow
@each("name", CASES)
def test_one_graph_under_compile(name):
    case = CASES[name].to()
    torch.compiler.reset()
    compiled = torch.compile(case.loss, backend="aot_eager", fullgraph=True)(*case.leaves)
    assert_close(compiled, case.loss())
    assert_close(gradients(compiled, *case.leaves), case.gradients())


@each("name", CASES)
def test_transforms(name):
    case = CASES[name].to()
    batch = [torch.stack([t.detach(), 0.9 * t.detach()]) for t in case.leaves]
    ours = torch.func.vmap(torch.func.grad(case.loss, argnums=tuple(range(len(batch)))))(*batch)
    for i in range(2):
        single = case._replace(leaves=tuple(t[i].clone().requires_grad_() for t in batch))
        assert_close(tuple(t[i] for t in ours), single.gradients())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@each("name", CASES)
def test_half_precision(name, dtype):
    """Within a few roundings of what float64 gives for the same numbers."""
    low = CASES[name].to(dtype)
    exact = low.to()
    tolerance = 20 * torch.finfo(dtype).eps
    torch.testing.assert_close(low.loss().double(), exact.loss(), rtol=tolerance, atol=tolerance)
    for mine, true in zip(low.gradients(), exact.gradients(), strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.double(), true, rtol=tolerance, atol=tolerance * float(true.abs().max()))


# ---- edges -----------------------------------------------------------------------------------------------------------


@each("loss_type", DPO)
def test_extreme_ratios(loss_type):
    """Differences of thousands in float32: no infinity, and no NaN."""
    case = (
        dpo(loss_type)
        .to(torch.float32)
        ._replace(
            leaves=tuple(torch.tensor(x).requires_grad_() for x in ([-5.0, -4e3, -1.0] * 2, [-4e3, -5.0, -6e3] * 2))
        )
    )
    assert case.loss().isfinite()
    assert all(g.isfinite().all() for g in case.gradients())


def test_long_sequences_under_alphapo():
    """exp of the log-probability is 0 in float32, and 0 to the power -alpha infinite."""
    chosen, rejected = (torch.tensor([value]).requires_grad_() for value in (-200.0, -210.0))
    out = functional.cpo_loss(chosen, rejected, alpha=0.1)
    assert out.isfinite()
    assert all(g.isfinite() for g in gradients(out, chosen, rejected))


@pytest.mark.parametrize("value", [-1e-9, -1e-30, -300.0])
def test_probabilities_near_one_and_zero_in_orpo(value):
    for chosen, rejected in ((value, -1.0), (-1.0, value)):
        leaves = [torch.tensor([x]).requires_grad_() for x in (chosen, rejected)]
        exact = [torch.tensor([x], dtype=torch.float64).requires_grad_() for x in (chosen, rejected)]
        ours, theirs = functional.orpo_loss(*leaves), functional.orpo_loss(*exact)
        assert_close(ours.double(), theirs.float().double())
        for mine, true in zip(gradients(ours, *leaves), gradients(theirs, *exact), strict=True):
            torch.testing.assert_close(mine.double(), true, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [True, False])
@each("loss_type", KTO)
def test_one_class_only_in_kto(loss_type, value):
    (log_prob,), (ref, label, kl) = kto(loss_type)[1:3]
    out = functional.kto_loss(log_prob, ref, torch.full_like(label, value), kl, loss_type=loss_type)
    u = 0.1 * (log_prob - ref - (kl if loss_type == "kto" else 0.0))
    assert_close(out, sigmoid(-u if value else u).mean())
    assert all(g.isfinite().all() for g in gradients(out, log_prob))


def test_losses_that_are_nan_do_not_count_in_the_mean_of_kto():
    log_prob = torch.tensor([-1.0, math.nan, -2.0])
    label = torch.tensor([True, True, False])
    ours = functional.kto_loss(log_prob, torch.zeros(3), label, 0.0)
    assert_close(ours, functional.kto_loss(log_prob[::2], torch.zeros(2), label[::2], 0.0))


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32, torch.float64], ids=str)
@each("level", LEVELS)
@each("loss_type", GRPO)
def test_padding_may_hold_anything(loss_type, level, mask_dtype):
    """It has no gradient, whatever the dtype of the mask."""
    case = grpo(loss_type, level=level, beta=0.1, off_policy_mask_threshold=0.1)
    (log_prob,), (old, advantages, mask) = case.leaves, case.others
    padded = case._replace(
        leaves=(log_prob.detach().masked_fill(~mask, math.nan).requires_grad_(),),
        others=(old.masked_fill(~mask, -math.inf), advantages, mask.to(mask_dtype)),
        options={**case.options, "ref_log_prob": case.options["ref_log_prob"].masked_fill(~mask, 1e4)},
    )
    assert_close(padded.loss(), case.loss())
    assert_close(padded.gradients(), case.gradients())
    assert not padded.gradients()[0][~mask].any()


@each("loss_type", GRPO)
def test_no_token_counts(loss_type):
    case = grpo(loss_type)
    case = case._replace(others=(*case.others[:2], torch.zeros_like(case.others[2])))
    assert case.loss() == 0
    assert not case.gradients()[0].any()


@each("loss_type", GRPO)
def test_extreme_ratios_of_tokens(loss_type):
    """The gradient of a clipped ratio is 0, and nothing is NaN."""
    log_prob = torch.tensor([[-1.0, -60.0], [-1.0, -60.0]]).requires_grad_()
    old = torch.tensor([[-60.0, -1.0], [-60.0, -1.0]])
    out = functional.grpo_loss(
        log_prob, old, torch.tensor([1.0, -1.0]), torch.ones(2, 2), loss_type=loss_type, max_length=2, delta=4.0
    )
    assert out.isfinite()
    assert gradients(out, log_prob)[0].isfinite().all()


def test_old_policy_is_the_new_one_by_default():
    case = grpo("grpo")
    default, explicit = (case._replace(others=(old, *case.others[1:])) for old in (None, case.leaves[0].detach()))
    assert_close(default.loss(), explicit.loss())
    assert_close(default.gradients(), explicit.gradients())


def test_numbers_of_sequences_are_those_of_their_tokens():
    of_sequences = {"sampling_ratio": normal(B, seed=5).exp(), "weight": normal(B, seed=6).exp()}
    of_tokens = {name: t[:, None].expand(B, T) for name, t in of_sequences.items()}
    case = grpo("grpo")
    old, advantages, mask = case.others
    expanded = case._replace(others=(old, advantages[:, None].expand(B, T), mask))
    assert_close(case.loss(**of_sequences), expanded.loss(**of_tokens))


@pytest.mark.parametrize("loss_type", ["cispo", "dapo", "vespo"])
def test_number_of_items(loss_type):
    case = grpo(loss_type)
    total = case.loss() * case.others[2].sum()
    for items in (100, 100.0, torch.tensor(100)):
        assert_close(case.loss(num_items=items), total / 100)
    for items in (0, torch.tensor(0)):
        assert_close(case.loss(num_items=items), total)


# ---- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "argument", "table"),
    [
        *((name, "reduction", REDUCTIONS) for name in ("dpo sigmoid", "kto kto", "cpo sigmoid", "simpo", "orpo")),
        ("dpo sigmoid", "loss_type", DPO),
        ("dpo sigmoid", "divergence", DIVERGENCES),
        ("kto kto", "loss_type", KTO),
        ("cpo sigmoid", "loss_type", CPO),
        ("grpo grpo token", "loss_type", GRPO),
        ("grpo grpo token", "level", LEVELS),
    ],
)
def test_names_that_are_not_valid(name, argument, table):
    with pytest.raises(ValueError, match=f"expected {argument} to be one of {', '.join(table)}, but got 'no'"):
        CASES[name].loss(**{argument: "no"})


@pytest.mark.parametrize(
    ("loss_type", "options", "message"),
    [
        ("robust", {"label_smoothing": 0.5}, "label_smoothing of 'robust' to be at least 0 and below 0.5, but got 0.5"),
        ("robust", {"label_smoothing": -0.1}, "but got -0.1"),
        ("exo_pair", {"label_smoothing": 0.0}, "label_smoothing of 'exo_pair' to be between 0 and 1, but got 0.0"),
        ("exo_pair", {"label_smoothing": 1.0}, "but got 1.0"),
        ("ipo", {"chosen_length": None}, "loss_type='ipo' needs chosen_length"),
        ("ipo", {"rejected_length": None}, "loss_type='ipo' needs rejected_length"),
        ("sigmoid_norm", {"rejected_length": None}, "loss_type='sigmoid_norm' needs rejected_length"),
        ("sft", {"chosen_length": None}, "loss_type='sft' needs chosen_length"),
        ("aot", {"weight": torch.ones(B)}, "loss_type='aot' sorts the batch and takes no weight"),
        ("apo_zero", {"divergence": "forward_kl"}, "loss_type with divergence='forward_kl' .* but got 'apo_zero'"),
        (
            "sigmoid",
            {"weight": torch.ones(B, 1)},
            r"expected weight of shape \(6,\), as chosen has it, but got \(6, 1\)",
        ),
        ("ipo", {"chosen_length": torch.ones(2)}, r"expected chosen_length of shape \(6,\).* but got \(2,\)"),
    ],
)
def test_arguments_that_do_not_go_together_in_dpo(loss_type, options, message):
    with pytest.raises(ValueError, match=message):
        dpo(loss_type, **options).loss()


def test_sft_needs_no_length_of_the_rejected():
    assert dpo("sft", rejected_length=None).loss().isfinite()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"label": torch.ones(B)}, "expected label of torch.bool, .* but got torch.float32"),
        ({"label": torch.ones(3, dtype=torch.bool)}, r"expected label of shape \(6,\)"),
        ({"kl": torch.ones(B)}, r"tensor of one element, but got shape \(6,\)"),
    ],
)
def test_arguments_that_do_not_fit_in_kto(arguments, message):
    given = {"label": torch.ones(B, dtype=torch.bool), "kl": 0.0, **arguments}
    with pytest.raises(ValueError, match=message):
        functional.kto_loss(*pairs()[:2], **given)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss_type": "dr_grpo"}, "loss_type='dr_grpo' needs max_length"),
        ({"beta": 0.04}, "beta=0.04 needs ref_log_prob"),
        ({"mask": torch.ones(B)}, r"expected mask of shape \(6, 9\), as log_prob has it, but got \(6,\)"),
        ({"ref_log_prob": torch.ones(B, 1)}, "expected ref_log_prob of shape"),
        ({"advantages": torch.ones(T)}, r"expected advantages of shape \(6,\) or \(6, 9\), but got \(9,\)"),
        ({"weight": torch.ones(B, 2)}, "expected weight of shape"),
        ({"sampling_ratio": torch.ones(1, T)}, "expected sampling_ratio of shape"),
    ],
)
def test_arguments_that_do_not_fit_in_grpo(arguments, message):
    log_prob, old, mask = completions()
    with pytest.raises(ValueError, match=message):
        functional.grpo_loss(log_prob, old, **{"advantages": normal(B), "mask": mask, **arguments})


def test_grpo_takes_matrices():
    with pytest.raises(ValueError, match=r"expected log_prob of shape \(B, T\), but got \(6,\)"):
        functional.grpo_loss(normal(B), None, normal(B), torch.ones(B))


@pytest.mark.parametrize("wrong", [None, [1.0], "no"], ids=["None", "list", "str"])
def test_arguments_that_are_no_tensors(wrong):
    t, label, tokens = torch.randn(B), torch.ones(B, dtype=torch.bool), torch.randn(B, T)
    for function, given in (
        (functional.dpo_loss, (t, t, t, t)),
        (lambda *args: functional.kto_loss(*args, None), (t, t, label)),
        (functional.orpo_loss, (t, t)),
        (functional.cpo_loss, (t, t)),
        (functional.simpo_loss, (t, t)),
        (lambda *args: functional.grpo_loss(args[0], None, *args[1:]), (tokens, t, tokens)),
    ):
        for place in range(len(given)):
            with pytest.raises(TypeError):
                function(*(wrong if i == place else value for i, value in enumerate(given)))

"""The losses of preference and reinforcement learning against TRL's own code."""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fastlayers import functional
from fastlayers.ops.preference import CPO, DPO, GRPO, KTO, LEVELS, OF_SCORES, SORTED
from tests.harness import assert_close
from tests.ops.preference_cases import B, Case, T, completions, each, gradients, grpo, lengths, log_probs, normal

WIDE = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


@pytest.fixture(scope="module")
def trl():
    """The trainers whose code the losses are compared with, each called with a stand-in for self."""
    pytest.importorskip("trl", minversion="1.16.0")
    from trl import DPOTrainer, GRPOTrainer, KTOTrainer
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    return SimpleNamespace(dpo=DPOTrainer, grpo=GRPOTrainer, kto=KTOTrainer, cpo=CPOTrainer, orpo=ORPOTrainer)


def stand_in(**attributes: Any) -> SimpleNamespace:
    """An object with what the losses of all trainers look up: one process, and an evaluation."""

    def same(value: Any, **options: Any) -> Any:
        return value

    return SimpleNamespace(
        accelerator=SimpleNamespace(
            device=torch.device("cpu"), num_processes=1, gather=same, gather_for_metrics=same, reduce=same
        ),
        model=SimpleNamespace(training=False),
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        **attributes,
    )


class Batch(NamedTuple):
    """Chosen completions, then rejected ones.

    Attributes:
        leaf: (2B, T), log-probabilities of tokens and padding.
        mask: (2B, T).
        reference: (2B,), log-probabilities of completions.
        log_sum_sq_probs: (2B, T), what weights align log-probabilities by.
    """

    leaf: Tensor
    mask: Tensor
    reference: Tensor
    log_sum_sq_probs: Tensor

    @property
    def tokens(self) -> Tensor:
        return self.leaf * self.mask

    def model(self, **inputs: Any) -> SimpleNamespace:
        zero = torch.zeros_like(self.tokens)
        logged = {"entropy": zero, "mean_logits": zero, "is_top1": zero.bool()}
        return SimpleNamespace(log_probs=self.tokens, log_sum_sq_probs=self.log_sum_sq_probs, **logged)

    def inputs(self) -> dict[str, Tensor]:
        """With one token of a prompt."""
        whole = torch.cat((torch.zeros_like(self.mask[:, :1]), self.mask), 1).long()
        return {"input_ids": whole, "attention_mask": whole, "completion_mask": whole}

    def sums(self) -> tuple[Tensor, ...]:
        """chosen, rejected, ref_chosen, ref_rejected."""
        return (*self.tokens.sum(1).chunk(2), *self.reference.chunk(2))


def batch(dtype: torch.dtype) -> Batch:
    mask = torch.arange(T) < lengths(2 * B, T)[:, None]
    leaf = log_probs(2 * B, T, dtype=dtype)
    reference = (leaf * mask).sum(1).detach() + normal(2 * B, seed=1, dtype=dtype)
    return Batch(leaf, mask, reference, log_probs(2 * B, T, seed=2, dtype=dtype).detach())


def trl_dpo(trl: Any, data: Batch, loss_type: str, **options: Any) -> Tensor:
    trainer = stand_in(
        loss_types=[loss_type],
        loss_weights=[1.0],
        ld_alpha=None,
        beta=options.get("beta", 0.1),
        label_smoothing=options.get("label_smoothing", 0.0),
        f_divergence_type=options.get("divergence", "reverse_kl"),
        f_alpha_divergence_coef=options.get("alpha", 0.5),
        use_weighting=options.get("weight") is not None,
        args=SimpleNamespace(discopop_tau=options.get("tau", 0.05)),
    )
    ref_chosen, ref_rejected = data.reference.chunk(2)
    inputs = {**data.inputs(), "ref_chosen_logps": ref_chosen, "ref_rejected_logps": ref_rejected}
    return trl.dpo._compute_loss(trainer, data.model, inputs, False)


def compare(ours: Tensor, theirs: Tensor, leaf: Tensor) -> None:
    assert ours.dtype == theirs.dtype
    assert_close(ours, theirs)
    assert_close(gradients(ours, leaf), gradients(theirs, leaf))


def compare_dpo(trl: Any, data: Batch, loss_type: str, **options: Any) -> None:
    chosen_length, rejected_length = data.mask.sum(1).chunk(2)
    ours = functional.dpo_loss(
        *data.sums(), loss_type=loss_type, chosen_length=chosen_length, rejected_length=rejected_length, **options
    )
    compare(ours, trl_dpo(trl, data, loss_type, **options), data.leaf)


@WIDE
@pytest.mark.parametrize("options", [{}, {"beta": 0.7, "tau": 0.5, "label_smoothing": 0.3}], ids=["", "options"])
@each("loss_type", DPO)
def test_dpo_is_that_of_trl(trl, loss_type, options, dtype):
    smoothing = {"label_smoothing": 0.01} if loss_type == "exo_pair" else {}
    compare_dpo(trl, batch(dtype), loss_type, **{**smoothing, **options})


@pytest.mark.parametrize(
    ("divergence", "alpha", "dtype"),
    [
        *((name, 0.5, dtype) for name in ("forward_kl", "js_divergence") for dtype in (torch.float32, torch.float64)),
        # TRL has it for 32 bits or less.
        *(("alpha_divergence", alpha, torch.float32) for alpha in (0.5, 0.0, 1.0, 2.0)),
    ],
    ids=str,
)
@each("loss_type", OF_SCORES)
def test_divergences_are_those_of_trl(trl, loss_type, divergence, alpha, dtype):
    compare_dpo(trl, batch(dtype), loss_type, label_smoothing=0.1, divergence=divergence, alpha=alpha)


def test_bound_of_the_alpha_divergence_is_that_of_trl(trl):
    data = batch(torch.float32)
    data.reference[:B] -= 100.0
    compare_dpo(trl, data, "sigmoid", beta=1e-34, divergence="alpha_divergence", alpha=2.0)


# TRL multiplies in place, which the backward of "hinge" and the expanded loss of "sft" do not survive.
@WIDE
@each("loss_type", [name for name in DPO if name not in ("hinge", "sft", *SORTED)])
def test_weights_are_those_of_trl(trl, loss_type, dtype):
    data = batch(dtype)
    aligned = ((data.tokens - data.log_sum_sq_probs) * data.mask).sum(1) / data.mask.sum(1)
    chosen, rejected = aligned.detach().exp().chunk(2)
    compare_dpo(trl, data, loss_type, label_smoothing=0.1, weight=chosen * rejected)


@WIDE
@pytest.mark.parametrize("labels", ["mixed", "desirable", "undesirable"])
@pytest.mark.parametrize("drift", [0.5, -5.0], ids=["above", "below"])
@each("loss_type", KTO)
def test_kto_is_that_of_trl(trl, loss_type, drift, labels, dtype):
    data = batch(dtype)
    label = torch.arange(2 * B) % 3 != 0 if labels == "mixed" else torch.full((2 * B,), labels == "desirable")
    kl_log_prob, ref_kl_log_prob = normal(2 * B, seed=3, dtype=dtype) + drift, normal(2 * B, seed=4, dtype=dtype)
    weights = {"desirable_weight": 1.3, "undesirable_weight": 0.6}
    trainer = stand_in(
        loss_type=loss_type,
        calculate_KL=loss_type == "kto",
        beta=0.2,
        _compute_kl_logps=lambda model, batch: kl_log_prob,
        **weights,
    )
    inputs = {**data.inputs(), "label": label, "ref_logps": data.reference, "ref_KL_logps": ref_kl_log_prob}
    theirs = trl.kto._compute_loss(trainer, data.model, inputs, False)
    kl = (kl_log_prob - ref_kl_log_prob).mean()
    options = {"beta": 0.2, "loss_type": loss_type, **weights}
    compare(functional.kto_loss(data.tokens.sum(1), data.reference, label, kl, **options), theirs, data.leaf)


def trl_orpo(trl: Any, chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    return -trl.orpo.odds_ratio_loss(stand_in(beta=beta), chosen, rejected)[0].mean()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_orpo_is_that_of_trl(trl, dtype):
    both = (5 * log_probs(2, 50)).detach().to(dtype).requires_grad_()
    compare(functional.orpo_loss(*both, beta=0.3), trl_orpo(trl, *both, 0.3), both)


@pytest.mark.parametrize("value", [(0.0, -1.0), (-1.0, 0.0), (0.0, 0.0), (-200.0, -1.0), (-1.0, -math.inf)], ids=str)
def test_ends_of_orpo_are_those_of_trl(trl, value):
    """The gradient of a log-probability of 0 is not finite."""
    both = torch.tensor(value).requires_grad_()
    ours, theirs = functional.orpo_loss(*both[:, None], beta=0.3), trl_orpo(trl, *both[:, None], 0.3)
    assert_close(ours, theirs)
    (mine,), (true,) = gradients(ours, both), gradients(theirs, both)
    finite = true.isfinite()
    assert torch.equal(mine.isfinite(), finite)
    assert_close(mine[finite], true[finite])


@WIDE
@pytest.mark.parametrize("alpha", [0.0, 0.25, -0.5])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@each("loss_type", CPO)
def test_cpo_is_that_of_trl(trl, loss_type, smoothing, alpha, dtype):
    both = log_probs(2, B, dtype=dtype)
    options = {"beta": 0.3, "loss_type": loss_type, "label_smoothing": smoothing, "alpha": alpha}
    theirs = trl.cpo.cpo_loss(stand_in(simpo_gamma=0.8, **options), *both)[0].mean()
    compare(functional.cpo_loss(*both, gamma=0.8, **options), theirs, both)


def trl_grpo(trl: Any, case: Case) -> Tensor:
    (log_prob,), (old, advantages, mask) = case.leaves, case.others
    signature = inspect.signature(functional.grpo_loss).parameters
    given = SimpleNamespace(**{name: case.options.get(name, p.default) for name, p in signature.items()})
    args = SimpleNamespace(delta=given.delta, use_bias_correction_kl=given.use_bias_correction_kl)
    args.sapo_temperature_pos, args.sapo_temperature_neg = given.sapo_temperatures
    args.vespo_k_pos, args.vespo_k_neg = given.vespo_k
    args.vespo_lambda_pos, args.vespo_lambda_neg = given.vespo_lambda
    trainer = stand_in(
        args=args,
        loss_type=given.loss_type,
        importance_sampling_level=given.level,
        epsilon_low=given.epsilon,
        epsilon_high=given.epsilon if given.epsilon_high is None else given.epsilon_high,
        beta=given.beta,
        max_completion_length=given.max_length,
        off_policy_mask_threshold=given.off_policy_mask_threshold,
        top_entropy_quantile=1.0 if given.weight is None else 0.5,
        use_vllm=given.sampling_ratio is not None,
        vllm_importance_sampling_correction=True,
        _entropy_bonus_enabled=False,
        _get_per_token_logps_and_entropies=lambda *args, **options: (log_prob, torch.zeros_like(log_prob), None),
        get_high_entropy_mask=lambda *args: given.weight,
        get_off_policy_mask=trl.grpo.get_off_policy_mask,
        get_gamma_weights=trl.grpo.get_gamma_weights,
    )
    prompt = torch.zeros(B, 0, dtype=torch.int64)
    inputs = {
        "prompt_ids": prompt,
        "prompt_mask": prompt,
        "completion_ids": mask.long(),
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": old,
        "ref_per_token_logps": given.ref_log_prob,
        "num_items_in_batch": mask.sum() if given.num_items is None else given.num_items,
    }
    if given.sampling_log_prob is not None:
        inputs["sampling_per_token_logps"] = given.sampling_log_prob
    if given.sampling_ratio is not None:
        inputs["importance_sampling_ratio"] = given.sampling_ratio
    return trl.grpo._compute_loss(trainer, None, inputs)


SAMPLED = torch.where(completions()[2], (0.3 * normal(B, T, seed=8)).exp(), 1.0)
SCORED = completions()[1].masked_fill(normal(B, T, seed=9) > 1.5, math.nan)
HIGH_ENTROPY = normal(B, T, seed=10) > 0.0
GRPO_OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "clipped": {"epsilon": 0.1, "epsilon_high": 0.28, "delta": 1.5},
    "kl": {"beta": 0.3},
    "kl without correction": {"beta": 0.3, "use_bias_correction_kl": False},
    "off-policy": {"off_policy_mask_threshold": 0.05},
    "off-policy by the sampler": {"off_policy_mask_threshold": 0.05, "sampling_log_prob": SCORED},
    "sampled": {"sampling_ratio": SAMPLED},
    "sampled by sequences": {"sampling_ratio": SAMPLED[:, :1]},
    "high entropy": {"weight": HIGH_ENTROPY},
    "items": {"num_items": torch.tensor(77)},
    "temperatures": {"sapo_temperatures": (0.5, 2.0), "vespo_k": (1.5, 2.5), "vespo_lambda": (2.0, 0.5)},
}
GRPO_OPTIONS["all"] = {name: value for options in GRPO_OPTIONS.values() for name, value in options.items()}


@WIDE
@each("options", GRPO_OPTIONS)
@each("level", LEVELS)
@each("loss_type", GRPO)
def test_grpo_is_that_of_trl(trl, loss_type, level, options, dtype):
    case = grpo(loss_type, level=level, **GRPO_OPTIONS[options]).to(dtype)
    compare(case.loss(), trl_grpo(trl, case), case.leaves[0])


@pytest.mark.parametrize("mask_dtype", [torch.int64, torch.float32], ids=str)
@each("loss_type", GRPO)
def test_masks_and_advantages_are_those_of_trl(trl, loss_type, mask_dtype):
    """Advantages of tokens, an old policy that is the new one, and ratios beyond all bounds."""
    case = grpo(loss_type, level="token", beta=0.1, off_policy_mask_threshold=0.05)
    (log_prob,), (old, of_sequences, mask) = case.leaves, case.others
    for before in (None, old - 15 * normal(B, T, seed=11)):
        for advantages in (of_sequences, normal(B, T, seed=12)):
            other = case._replace(others=(before, advantages, mask.to(mask_dtype)))
            compare(other.loss(), trl_grpo(trl, other), log_prob)


def test_defaults_are_those_of_trl(trl):
    from trl import DPOConfig, GRPOConfig, KTOConfig
    from trl.experimental.cpo import CPOConfig
    from trl.experimental.orpo import ORPOConfig

    grpo_names = "epsilon epsilon_high delta beta use_bias_correction_kl off_policy_mask_threshold"
    for function, config, same, renamed in (
        (
            functional.dpo_loss,
            DPOConfig,
            "beta label_smoothing",
            {"divergence": "f_divergence_type", "alpha": "f_alpha_divergence_coef", "tau": "discopop_tau"},
        ),
        (functional.kto_loss, KTOConfig, "beta loss_type desirable_weight undesirable_weight", {}),
        (functional.orpo_loss, ORPOConfig, "beta", {}),
        (functional.cpo_loss, CPOConfig, "beta loss_type label_smoothing alpha", {"gamma": "simpo_gamma"}),
        (functional.grpo_loss, GRPOConfig, grpo_names, {"level": "importance_sampling_level"}),
    ):
        ours = inspect.signature(function).parameters
        for name, theirs in {**{name: name for name in same.split()}, **renamed}.items():
            assert ours[name].default == getattr(config, theirs), name
    ours = inspect.signature(functional.grpo_loss).parameters
    for name in ("sapo_temperatures", "vespo_k", "vespo_lambda"):
        theirs = name.removesuffix("s")
        assert ours[name].default == tuple(getattr(GRPOConfig, f"{theirs}_{sign}") for sign in ("pos", "neg")), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_dtypes_of_half_precision_are_those_of_trl(trl, dtype):
    data = batch(dtype)
    for loss_type in DPO:
        sizes = dict(zip(("chosen_length", "rejected_length"), data.mask.sum(1).chunk(2), strict=True))
        ours = functional.dpo_loss(*data.sums(), loss_type=loss_type, label_smoothing=0.1, **sizes)
        assert ours.dtype == trl_dpo(trl, data, loss_type, label_smoothing=0.1).dtype, loss_type
    for loss_type in GRPO:
        for options in GRPO_OPTIONS.values():
            case = grpo(loss_type, level="token", **options).to(dtype)
            assert case.loss().dtype == trl_grpo(trl, case).dtype, loss_type

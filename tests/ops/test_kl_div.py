"""The divergences beyond the table of ops: their definition, rows that do not count, arguments, what torch warns of."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastlayers
from fastlayers import functional
from tests.harness import PLACES, Place, assert_close
from tests.table.elementwise import GPU_KERNELS

BACKENDS = [
    pytest.param(place, marks=place.marks(), id=str(place))
    for place in PLACES
    if place == Place("cpu", "eager") or place.backend in GPU_KERNELS
]
DIVERGENCES = {
    "kl": functional.kl_div_logits,
    "js": functional.js_div_logits,
    "reverse kl": lambda *args, **kwargs: functional.js_div_logits(*args, beta=1.0, **kwargs),
}
everywhere = pytest.mark.parametrize("place", BACKENDS)
each = pytest.mark.parametrize("divergence", DIVERGENCES.values(), ids=DIVERGENCES)


def logits(place: Place, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = (torch.randn(shape, generator=generator).to(place.device, torch.float64) for _ in range(2))
    return tuple(t.requires_grad_() for t in made)  # type: ignore[return-value]


def gradients(out: torch.Tensor, leaves: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(out.sum(), leaves)


def forced(place: Place):
    return fastlayers.backends.backend(place.backend)


@everywhere
def test_definition(place):
    """In the words of the papers, on probabilities."""
    student, teacher = logits(place, 4, 11)
    temperature, beta = 3.0, 0.2
    q, p = ((t / temperature).softmax(-1) for t in (student, teacher))
    m = beta * p + (1 - beta) * q
    with forced(place):
        kl = functional.kl_div_logits(student, teacher, temperature=temperature)
        js = functional.js_div_logits(student, teacher, beta=beta, temperature=temperature)
    assert_close(kl, temperature**2 * (p * (p / q).log()).sum() / 4)
    assert_close(js, (beta * (p * (p / m).log()).sum() + (1 - beta) * (q * (q / m).log()).sum()) / 4)


@everywhere
def test_ends_of_beta(place):
    student, teacher = logits(place, 4, 11)
    with forced(place):
        forward, reverse = (functional.js_div_logits(student, teacher, beta=beta) for beta in (0.0, 1.0))
        assert_close(forward, functional.kl_div_logits(student, teacher))
        assert_close(reverse, functional.kl_div_logits(teacher, student))


@each
@everywhere
def test_rows_that_do_not_count(place, divergence):
    """They give 0 and no gradient, whatever they hold, and the others are averaged as if alone."""
    student, teacher = logits(place, 2, 3, 70)
    labels = torch.tensor([[1, -1, 2], [-1, 0, 5]], device=place.device)
    counts = labels != -1
    with torch.no_grad():
        student[0, 1], teacher[1, 0] = math.nan, math.inf
    for reduction in ("sum", "batchmean", "mean"):
        with forced(place):
            ours = divergence(student, teacher, labels=labels, ignore_index=-1, reduction=reduction)
            alone = divergence(student[counts], teacher[counts], reduction=reduction)
        assert_close(ours, alone)
        dstudent, dteacher = gradients(ours, (student, teacher))
        assert not dstudent[~counts].any()
        assert not dteacher[~counts].any()
        assert_close((dstudent, dteacher), gradients(alone, (student, teacher)))
    with forced(place):
        rows = divergence(student, teacher, labels=labels, ignore_index=-1, reduction="none")
    assert rows.shape == labels.shape
    assert not rows[~counts].any()


@each
@everywhere
def test_no_row_counts(place, divergence):
    student, teacher = logits(place, 3, 7)
    labels = torch.full((3,), -100, device=place.device)
    with forced(place):
        mean, total = (divergence(student, teacher, labels=labels, reduction=r) for r in ("batchmean", "sum"))
    assert mean.isnan()
    assert total == 0
    assert not any(g.any() for g in gradients(mean, (student, teacher)))


@each
@everywhere
def test_classes_without_probability(place, divergence):
    """Minus infinity in both, as a padded vocabulary has it, is as if the class was not there."""
    student, teacher = logits(place, 4, 70)
    kept = torch.arange(70, device=place.device) < 61
    student_all, teacher_all = (torch.where(kept, t, -math.inf) for t in (student, teacher))
    with forced(place):
        ours = divergence(student_all, teacher_all)
        alone = divergence(student[:, kept], teacher[:, kept])
    assert_close(ours, alone)
    assert_close(gradients(ours, (student, teacher)), gradients(alone, (student, teacher)))


@everywhere
def test_probability_that_the_student_has_not(place):
    student, teacher = logits(place, 4, 70)
    few = torch.arange(70, device=place.device) < 9
    with torch.no_grad():
        student[:, ~few] = -math.inf
    with forced(place):
        assert functional.kl_div_logits(student, teacher) == math.inf
        assert functional.js_div_logits(student, teacher) < math.log(2)
        from_few = functional.kl_div_logits(teacher, student)  # and a teacher of the few largest logits
    q, p = teacher.log_softmax(-1)[:, few], student[:, few].softmax(-1)
    assert_close(from_few, F.kl_div(q, p, reduction="batchmean"))
    (gradient,) = torch.autograd.grad(from_few, teacher)
    assert_close(gradient, (teacher.softmax(-1) - student.softmax(-1)) / 4)


@everywhere
def test_mixture_of_distributions_on_one_class_each(place):
    """Within two roundings of log 2, which the terms of loss and gradients cancel from."""
    student, teacher = ((300 * t.detach()).float().requires_grad_() for t in logits(place, 40, 300))
    exact = tuple(t.detach().double().requires_grad_() for t in (student, teacher))
    with forced(place):
        ours = functional.js_div_logits(student, teacher, reduction="sum")
        grads = gradients(ours, (student, teacher))
    expected = functional.js_div_logits(*exact, reduction="sum")
    torch.testing.assert_close(ours.double(), expected, rtol=1e-6, atol=0.0)
    for mine, true in zip(grads, gradients(expected, exact), strict=True):
        torch.testing.assert_close(mine.double(), true, rtol=0.0, atol=2 * torch.finfo(torch.float32).eps * math.log(2))


@each
def test_mistakes(divergence):
    student, teacher = torch.randn(3, 5), torch.randn(3, 5)
    for wrong in (
        {"reduction": "average"},
        {"temperature": 0.0},
        {"temperature": -1.0},
        {"temperature": torch.tensor(1.0)},
        {"labels": torch.zeros(4, dtype=torch.int64)},
    ):
        with pytest.raises(ValueError, match=r"expected (reduction|temperature|labels)"):
            divergence(student, teacher, **wrong)
    with pytest.raises(ValueError, match="one number"):
        divergence(student.sum(), teacher.sum())


@pytest.mark.parametrize("beta", [-0.1, 1.5])
def test_beta_out_of_range(beta):
    with pytest.raises(ValueError, match=f"beta.*{beta}"):
        functional.js_div_logits(torch.randn(3, 5), torch.randn(3, 5), beta=beta)


@everywhere
def test_kl_div_warns_of_its_mean_as_torch(place):
    x, target = (t.detach() for t in logits(place, 3, 5))
    seen = []
    for function in (F.kl_div, functional.kl_div):
        with warnings.catch_warnings(record=True) as caught, forced(place):
            warnings.simplefilter("always")
            function(x, target.exp())
        seen.append([(str(w.message), w.category) for w in caught if "reduction" in str(w.message)])
    assert seen[0] == seen[1]
    assert len(seen[0]) == 1


@everywhere
def test_target_of_zeros(place):
    """As torch has it: a loss of 0, and no gradient for the target that is a number."""
    x, target = logits(place, 3, 5)
    target = target.detach().relu().requires_grad_()
    out = F.kl_div(x, target, reduction="sum")
    with forced(place):
        ours = functional.kl_div(x, target, reduction="sum")
    assert_close(ours, out)
    assert_close(gradients(ours, (x, target)), gradients(out, (x, target)))


def test_deprecated_arguments():
    x, target = torch.randn(3, 5), torch.rand(3, 5)
    for arguments in ({"size_average": False}, {"reduce": False}, {"size_average": True, "reduce": True}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert_close(functional.kl_div(x, target, **arguments), F.kl_div(x, target, **arguments))
            ours, theirs = fastlayers.FusedKLDivLoss(**arguments), nn.KLDivLoss(**arguments)
            assert_close(ours(x, target), theirs(x, target))


def test_reprs():
    assert repr(fastlayers.FusedKLDivLogitsLoss(2.0)) == (
        "FusedKLDivLogitsLoss(temperature=2.0, ignore_index=-100, reduction='batchmean')"
    )
    assert repr(fastlayers.FusedJSDivLogitsLoss()) == (
        "FusedJSDivLogitsLoss(beta=0.5, temperature=1.0, ignore_index=-100, reduction='batchmean')"
    )

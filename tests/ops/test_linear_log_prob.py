"""linear_log_prob beyond the contract: memory, rows without a label, extreme logits, the kernels of a chunk."""

from __future__ import annotations

import pytest
import torch

from fastlayers import functional
from fastlayers.ops import head, linear_log_prob
from tests.harness import DEVICES, excess, greatest_error
from tests.ops.test_linear_cross_entropy import Largest, adapter, inputs
from tests.table.losses import LINEAR_LOG_PROB

reference = LINEAR_LOG_PROB.reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_logits_are_never_whole(dtype):
    hidden, weight, target = inputs(500, 1000, 8, dtype)
    with Largest(weight.shape) as largest:
        found = functional.linear_log_prob(hidden, weight, target, entropy=True, chunk_size=60)
        torch.autograd.grad(found, (hidden, weight), [torch.ones_like(t) for t in found])
    assert 60 * 1000 <= largest.elements <= 60 * 1024


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("columns", [300, 333])
def test_float32_adapter_beside_a_frozen_weight_of_16_bits(columns, device):
    hidden, weight, target = inputs(256, columns, 64, torch.bfloat16, device)
    target[::5] = -100
    low_rank = adapter(256, columns, 8, device=device)
    dys = torch.randn(2, 256, generator=torch.Generator().manual_seed(2)).to(device)

    def answers(function, hidden, weight, low_rank, **options):
        found = function(hidden, weight, target, low_rank=low_rank, entropy=True, **options)
        return *found, *torch.autograd.grad(found, (hidden, *low_rank), [*dys.to(found[0].dtype)])

    ours = answers(functional.linear_log_prob, hidden, weight.detach(), low_rank, chunk_size=40)
    assert [g.dtype for g in ours[2:]] == [torch.bfloat16, torch.float32, torch.float32]
    narrow = [t.detach().bfloat16().requires_grad_() for t in low_rank]
    stock = answers(reference, hidden, weight.detach(), narrow)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight, *low_rank)]
    true = answers(reference, exact[0], exact[1].detach(), exact[2:])
    for mine, theirs, right in zip(ours, stock, true, strict=True):
        limit = greatest_error(theirs.detach(), right.detach())
        assert excess(mine.detach().to(theirs.dtype), right.detach(), limit) is None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("entropy", [False, True])
def test_rows_without_a_label_are_left_out_of_the_products(entropy, device, monkeypatch):
    monkeypatch.setattr(head, "GPU_LEAST_WAITED", 0)
    rows: list[int] = []
    plan = head.plan
    monkeypatch.setattr(head, "plan", lambda *args: rows.append(args[0]) or plan(*args))
    hidden, weight, target = inputs(500, 1000, 8, torch.float64, device)
    target[torch.rand(500, device=device) < 0.6] = -100
    kept = int((target != -100).sum())
    answers = []
    for function, options in ((functional.linear_log_prob, {"chunk_size": 60}), (reference, {})):
        found = function(hidden, weight, target, entropy=entropy, **options)
        found = found if entropy else (found,)
        dys = [torch.linspace(-1, 1, 500, dtype=torch.float64, device=device)] * len(found)
        answers.append((*found, *torch.autograd.grad(found, (hidden, weight), dys)))
    assert rows == [kept, kept]
    torch.testing.assert_close(*answers)
    assert not answers[0][0][target == -100].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_log_probability_is_never_above_0_and_an_entropy_never_below(dtype, device):
    """Nor far from float64's: rows of one class that has it all, of equal ones, of large and of infinite logits."""
    torch.manual_seed(0)
    logits = torch.randn(7, 3000, device=device)
    logits[0, 5] = 200
    logits[1] = 0.5
    logits[2] += 1e4
    logits[3] *= 1e3
    logits[4, 1::2] = -torch.inf
    logits[5, 7:] = -torch.inf
    target = torch.tensor([5, 0, 1, 2, 2, 6, 9], device=device)
    low = logits.to(dtype)
    padded = torch.nn.functional.pad(low, (0, 72), value=5.0)
    log_prob, entropy, levels = linear_log_prob._chunk(padded, target, 0.0, 3000)
    exact = low.double().log_softmax(1)
    assert (log_prob <= 0).all()
    assert (entropy >= 0).all()
    torch.testing.assert_close(log_prob.double(), exact.gather(1, target[:, None])[:, 0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), torch.special.entr(exact.exp()).sum(1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(levels.double().sum(0), low.double().logsumexp(1), rtol=1e-5, atol=1e-5)
    dlog, dentropy, dlse = torch.randn(3, 7, device=device).unbind()
    linear_log_prob._chunk_backward_(padded, target, entropy, levels, dlog, dentropy, dlse, 0.0, 3000)
    p = exact.exp()
    h = torch.special.entr(p).sum(1, keepdim=True)
    expected = (dlse - dlog)[:, None] * p - dentropy[:, None] * (p * h - torch.special.entr(p))
    expected[torch.arange(7), target] += dlog
    assert not padded[:, 3000:].any()
    limit = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-5}
    torch.testing.assert_close(padded[:, :3000].double(), expected, **limit)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunked", [False, True])
def test_of_some_of_the_classes(chunked, device, monkeypatch):
    """What ranks with some classes each need for those of all, with the gradient of their part of the sum."""
    for name in ("CPU_LEAST", "GPU_LEAST"):
        monkeypatch.setattr(head, name, 0 if chunked else 2**62)
    hidden, weight, target = inputs(20, 13, 8, torch.float64, device)
    target[3] = -100
    kept = target != -100
    parts = []
    for start, end in ((0, 5), (5, 13)):
        is_own = (target >= start) & (target < end)
        own = torch.where(is_own, target - start, torch.where(kept, 0, -100))
        found = linear_log_prob.of_some_classes(hidden, weight[start:end], own, None, 2.0, 1.5)
        parts.append((is_own, *found[:2], found[2].sum(0)))
    lse = torch.stack([each[3] for each in parts]).logsumexp(0)
    log_prob, entropy = torch.zeros_like(lse), torch.zeros_like(lse)
    for is_own, of_target, mixed, own_lse in parts:
        log_prob = log_prob + torch.where(is_own, of_target + own_lse - lse, 0.0)
        entropy = entropy + torch.where(kept, (own_lse - lse).exp() * (mixed + lse - own_lse), 0.0)
    expected = reference(hidden, weight, target, softcap=2.0, logit_scale=1.5, entropy=True)
    dys = torch.randn(2, 20, dtype=torch.float64, device=device).unbind()
    for own, right in zip((log_prob, entropy), expected, strict=True):
        torch.testing.assert_close(own, right)
    for own, right in zip(
        torch.autograd.grad((log_prob, entropy), (hidden, weight), dys),
        torch.autograd.grad(expected, (hidden, weight), dys),
        strict=True,
    ):
        torch.testing.assert_close(own, right)


def test_left_alone_large_calls_are_chunked(monkeypatch):
    hidden, weight, target = inputs(2000, 700, 8)
    monkeypatch.setattr(head, "CPU_LEAST", 2000 * 700)
    with Largest(weight.shape) as largest:
        functional.linear_log_prob(hidden, weight, target)
    assert largest.elements < 2000 * 700


def test_a_class_that_is_none():
    hidden, weight, target = inputs(10, 7, 8)
    with pytest.raises(IndexError, match="Target 7 is out of bounds"):
        functional.linear_log_prob(hidden, weight, target.fill_(7), chunk_size=4)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"softcap": 0.0}, ValueError, "expected a softcap above 0 or None, but got 0.0"),
        ({"chunk_size": 0}, ValueError, "expected a chunk_size of at least 1 row or None, but got 0"),
        ({"logit_scale": "2"}, TypeError, "expected logit_scale to be a number, but got str"),
    ],
)
def test_options_that_are_refused(options, error, message):
    with pytest.raises(error, match=rf"linear_log_prob\(\): {message}"):
        functional.linear_log_prob(*inputs(10, 7, 8), **options)

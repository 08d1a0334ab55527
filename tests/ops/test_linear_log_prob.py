"""linear_log_prob beyond test_head.py: extreme logits, and the parts of a sharded vocabulary."""

from __future__ import annotations

import pytest
import torch

from fastlayers.ops import head, linear_log_prob
from tests.harness import DEVICES
from tests.ops.heads import inputs
from tests.table.losses import LINEAR_LOG_PROB

reference = LINEAR_LOG_PROB.reference


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

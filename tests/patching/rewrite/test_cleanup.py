"""What a rewritten forward leaves out, and when it may not: answers, buffers and errors stay those of the original."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastlayers.patching import patch_model, verify_patch
from tests.patching.harness import fused, same, tensors
from tests.patching.runtime.folding import NormAct


def source(module):
    return type(module).__fastlayers_source__


# -- layers that hand on what they are given ---------------------------------------------------------------------------

IDLE = """self.id, self.none, self.some = nn.Identity(), nn.Dropout(0.0), nn.Dropout(0.5)
self.fc = nn.Linear(4, 4)"""


def test_identities_and_dropouts_that_drop_nothing_are_not_called(build):
    block = build(IDLE, "x, y", "return self.none(self.fc(self.id(F.relu(x) + y)))")
    same(copy.deepcopy(block), *tensors((3, 4), (3, 4)))
    patch_model(block)
    assert "['id'](" not in source(block)
    assert "['none'](" not in source(block)
    assert "['fc'](" in source(block)


def test_a_dropout_that_drops_is_called(build):
    block = build(IDLE, "x, y", "return self.some(F.relu(x) + y)")
    patch_model(block)
    assert "['some'](" in source(block)
    out = block(*tensors((300, 4), (300, 4)))
    assert 0.3 < (out == 0).float().mean() < 0.9


def test_a_probability_set_later_drops(build):
    block = build(IDLE, "x, y", "return self.none(F.relu(x) + y)")
    patch_model(block)
    block.none.p = 1.0
    assert not block(*tensors((3, 4), (3, 4))).any()


def test_hooks_on_what_is_left_out_are_called(build):
    block = build(IDLE, "x, y", "return self.id(F.relu(x) + y)")
    patch_model(block)
    seen = []
    block.id.register_forward_hook(lambda module, args, out: seen.append(out))
    out = block(*tensors((3, 4), (3, 4)))
    assert len(seen) == 1
    assert torch.equal(seen[0], out)


def test_a_layer_put_in_place_of_one_that_was_left_out_is_called(build):
    block = build(IDLE, "x, y", "return self.id(F.relu(x) + y)")
    patch_model(block)
    block.id = nn.Sigmoid()
    x, y = tensors((3, 4), (3, 4))
    torch.testing.assert_close(block(x, y), torch.sigmoid(F.relu(x) + y))


# -- batches that a norm counts ----------------------------------------------------------------------------------------


class ReadsTheCount(NormAct):
    def forward(self, x):
        self.num_batches_tracked.add_(1)
        x = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, True, 0.1, self.eps)
        return F.relu(x) * self.num_batches_tracked


class CountsByTwo(NormAct):
    def forward(self, x):
        self.num_batches_tracked.add_(2)
        return F.relu(F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, True, 0.1, self.eps))


def trained(norm, x):
    for _ in range(3):
        out = norm(x)
    norm.eval()
    return out, norm(x), dict(norm.named_buffers())


@pytest.mark.parametrize(
    "make",
    [
        lambda: NormAct(3),
        lambda: NormAct(3, momentum=None),
        lambda: NormAct(3, track_running_stats=False),
        lambda: ReadsTheCount(3),
        lambda: CountsByTwo(3),
    ],
    ids=["counts", "averages", "counts nothing", "reads the count", "counts by two"],
)
def test_batches_are_counted_as_before(make):
    norm, x = make(), torch.randn(4, 3, 5, 5)
    fast = copy.deepcopy(norm)
    patch_model(fast)
    expected, got = trained(norm, x), trained(fast, x)
    torch.testing.assert_close(got, expected)


def test_the_kernel_counts_what_the_layer_counted():
    norm = NormAct(3)
    patch_model(norm)
    assert "add_(1)" not in source(norm)
    assert "num_batches_tracked=num_batches_tracked" in source(norm)
    for other in (NormAct(3, momentum=None), ReadsTheCount(3), CountsByTwo(3)):
        patch_model(other)
        assert "add_(" in source(other)


def test_an_assertion_about_the_rank_still_raises():
    norm = NormAct(3)
    assert fused(norm)
    patch_model(norm)
    assert "_assert(" not in source(norm)
    with pytest.raises(AssertionError, match=r"expected 4D input \(got 3D input\)"):
        norm(torch.randn(4, 3, 5))
    assert norm.num_batches_tracked == 0
    assert verify_patch(NormAct(3), torch.randn(4, 3, 5, 5)).ok

"""Contract, points 3, 6 and 7: nothing is written, the same bits every time, and no more is kept than is said."""

from __future__ import annotations

import pytest
import torch
from harness import answer, cases, gradients_of, outputs, plain, same_bits
from ops import nbytes

FEW = [
    "matrix",
    "rows",
    "several blocks",
    "many rows",
    "length 4097",
    "long dim 0",
    "channels_last",
    "long rows",
    "squeeze and excite",
    "boolean mask",
    "additive mask",
    "bias a row",
    "bias per channel",
    "misaligned",
]


def few(op):
    return [sample for sample in op.samples if sample.name in FEW]


@cases(few, dtypes=[torch.float32, torch.bfloat16])
def test_nothing_is_written(op, sample, place, dtype):
    """Not the inputs, not the incoming gradients, not what was saved: a second backward gives the same bits."""
    call = sample.make(place.device, dtype)
    with place.forced(sample):
        outs = outputs(op.fused(*call.args, **call.kwargs))
        dys = gradients_of(outs)
        watched = [*call.tensors(), *outs, *dys]
        before = [t.detach().clone() for t in watched]
        first = torch.autograd.grad(outs, call.leaves(), dys, retain_graph=True)
        kept = [g.clone() for g in first]
        second = torch.autograd.grad(outs, call.leaves(), dys)
    assert all(map(same_bits, watched, before))
    assert all(map(same_bits, second, kept))
    assert all(map(same_bits, first, kept))


@cases(few, dtypes=[torch.float32, torch.bfloat16])
def test_bit_equal_from_run_to_run(op, sample, place, dtype):
    call = sample.make(place.device, dtype)
    with place.forced(sample):
        runs = [answer(op.fused, call) for _ in range(3)]
    for run in runs[1:]:
        assert all(map(same_bits, (*run.outs, *run.grads), (*runs[0].outs, *runs[0].grads)))


@cases(plain, dtypes=[torch.float32])
def test_gradients_share_no_memory(op, sample, place, dtype):
    """Whoever clips x.grad in place does not change y.grad, nor the caller's gradient."""
    call = sample.make(place.device, dtype)
    with place.forced(sample):
        outs = outputs(op.fused(*call.args, **call.kwargs))
        dys = gradients_of(outs)
        torch.autograd.backward(outs, dys)
    tensors = [*(leaf.grad for leaf in call.leaves()), *dys]
    expected = [t.clone() for t in tensors]
    for i, leaf in enumerate(call.leaves()):
        leaf.grad.add_(1)
        expected[i].add_(1)
        assert all(map(same_bits, tensors, expected))


@cases(few, dtypes=[torch.float32, torch.bfloat16])
def test_kept_for_backward(op, sample, place, dtype):
    """As many bytes as the docstring says."""
    if place.backend == "eager" or place.backend in sample.refused:
        pytest.skip("torch's own operations keep what they keep")
    call = sample.make(place.device, dtype)
    kept = []

    def pack(t):
        kept.append(t)
        return t

    with place.forced(sample), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = op.fused(*call.args, **call.kwargs)
    assert sum(map(nbytes, kept)) == op.saved_bytes(call, out)


@cases(plain, dtypes=[torch.float32])
def test_nothing_is_kept_without_gradient(op, sample, place, dtype):
    call = sample.make(place.device, dtype)
    kept = []
    with (
        torch.no_grad(),
        place.forced(sample),
        torch.autograd.graph.saved_tensors_hooks(kept.append, lambda t: t),
    ):
        op.fused(*call.args, **call.kwargs)
    assert not kept

"""Contract, points 3, 6 and 7: an op writes nothing, gives the same bits every time, and keeps what it documents."""

from __future__ import annotations

import pytest
import torch

from tests.harness import answer, cases, gradients_of, outputs, plain, same_bits
from tests.table.elementwise import ADD_RELU, MUL, RELU_ADD
from tests.table.sample import nbytes

# Flat and reduced, one block and several, with and without tails.
FEW = {
    "softmax": ["rows", "many rows", "length 4097", "long dim 0", "boolean mask", "additive mask"],
    "elementwise": ["matrix", "several blocks", "channels_last", "misaligned", "many rows", "long rows"],
    "broadcasts": ["squeeze and excite", "bias a row", "bias per channel"],
    "cross_entropy": [
        "each pixel",
        "rows of classes",
        "classes 4097",
        "many rows of classes",
        "each, class weight",
        "everything",
        "row slice of logits",
        "some pixels ignored",
    ],
    "rotary": ["heads first", "neighbours", "20 of 80", "heads last in memory"],
}


def few(op):
    return [sample for sample in op.samples if any(sample.name in names for names in FEW.values())]


@cases(few, dtypes=[torch.float32, torch.bfloat16])
def test_nothing_is_written(op, sample, place, dtype):
    """Inputs, incoming gradients and saved tensors are not written, so a second backward gives the same bits."""
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


@pytest.mark.parametrize("op", [RELU_ADD, ADD_RELU, MUL], ids=lambda op: op.name)
def test_threads_do_not_matter(op):
    """The CPU kernels split their work at whole bytes of bits: any number of threads gives the same bits."""
    call = op.sample("several blocks").make("cpu", torch.float32)
    alone = answer(op.fused, call)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        shared = answer(op.fused, call)
    finally:
        torch.set_num_threads(threads)
    assert all(map(same_bits, (*shared.outs, *shared.grads), (*alone.outs, *alone.grads)))


@cases(plain, dtypes=[torch.float32])
def test_gradients_share_no_memory(op, sample, place, dtype):
    """Clipping x.grad in place changes neither y.grad nor the caller's gradient."""
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
    """The tensors kept for backward take the bytes that the docstring states."""
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

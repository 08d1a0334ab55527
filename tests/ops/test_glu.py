"""gated_linear in memory and under autocast; its answers and derivatives are in the table of ops.

Kernels made of torch operations stand in for those of a GPU, so that autograd's part of it runs everywhere.
"""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastlayers
from fastlayers import backends, functional
from fastlayers.ops import glu
from fastlayers.ops.activations import BY_CODE
from tests.harness import DEVICES, PLACES, answer, assert_close, assert_no_worse, needs_gpu, same_bits
from tests.table.activations import GATED_LINEAR, GLU
from tests.table.sample import Call

KERNELS = [pytest.param(place, marks=place.marks(), id=str(place)) for place in PLACES if place.backend in GLU.kernels]


class StandIns(SimpleNamespace):
    """The kernels that gated_linear calls, in torch operations, and how often each was called."""

    def __init__(self) -> None:
        super().__init__(backend="triton", unasked=False, forwards=0, backwards=0)

    def gated_forward(self, gate: Tensor, up: Tensor, act: int) -> Tensor:
        self.forwards += 1
        return BY_CODE[act].function(gate) * up

    def gated_backward_(self, dy: Tensor, gate: Tensor, up: Tensor, act: int) -> Tensor:
        self.backwards += 1
        dup = dy * BY_CODE[act].function(gate)
        dy.copy_(BY_CODE[act].backward(dy * up, gate))
        return dup


@pytest.fixture
def kernels(monkeypatch, op_by_op) -> StandIns:
    found = StandIns()
    monkeypatch.setattr(glu.FAMILY, "kernels_for", lambda x: found)
    return found


def inputs(device: str = "cpu", dtype: torch.dtype = torch.float32, bias: bool = True) -> Call:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 3, 8), (2, 3, 8), (5, 8), *([(5,)] if bias else [])]
    return Call(tuple(torch.randn(s, generator=generator).to(device, dtype).requires_grad_() for s in shapes), {})


class MLP(nn.Module):
    def __init__(self, width: int = 8, inner: int = 24) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def test_patched_block_keeps_two_inner_tensors(kernels):
    model, x = MLP(), torch.randn(5, 8)
    with fastlayers.patched(model):
        kept: set[int] = set()

        def pack(t: Tensor) -> Tensor:
            if t.shape == (5, 24):
                kept.add(t.data_ptr())
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = model(x)
        ours = torch.autograd.grad(out.sin().sum(), list(model.parameters()))
    assert len(kept) == 2
    assert (kernels.forwards, kernels.backwards) == (2, 1)
    assert_close(ours, torch.autograd.grad(model(x).sin().sum(), list(model.parameters())))


@needs_gpu
@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_peak_of_a_patched_block(backend):
    """Backward holds gate, up and two tensors of their size; the weights and their gradients are small here."""
    width, inner, rows = 64, 2048, 16384
    model = MLP(width, inner).to("cuda", torch.bfloat16)
    x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    size = rows * inner * 2
    with fastlayers.patched(model), backends.backend(backend):
        for measured in (False, False, True):  # the second call is recorded
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            out = model(x)
            after = torch.cuda.memory_allocated() - before
            dy = torch.randn_like(out)
            out.backward(dy)
            peak = torch.cuda.max_memory_allocated() - before
            del out, dy
            if measured:
                assert after < 2.2 * size
                assert peak < 4.3 * size


@pytest.mark.parametrize("device", DEVICES)
def test_result_may_be_written(device):
    """With a bias torch's own result is a view, which autograd would not let anyone write to."""
    call = inputs(device)

    def written(function):
        return lambda *args: function(*args).add_(1).relu_()

    ours, theirs = answer(written(functional.gated_linear), call), answer(written(GATED_LINEAR.reference), call)
    assert_close((ours.outs, ours.grads), (theirs.outs, theirs.grads))


@pytest.mark.parametrize("bias", [False, True])
def test_result_of_a_function_may_be_written(kernels, bias):
    test_result_may_be_written("cpu")
    out = functional.gated_linear(*inputs(bias=bias).args)
    assert not out._is_view()
    assert type(out.grad_fn).__name__ == "GatedLinearBackward"


def test_only_what_is_wanted_is_computed(kernels):
    gate, up, weight, bias = inputs().args
    frozen = weight.detach()
    functional.gated_linear(gate, up, frozen, bias).sum().backward()
    assert (kernels.forwards, kernels.backwards) == (1, 1)
    assert frozen.grad is None
    functional.gated_linear(gate.detach(), up.detach(), weight, None).sum().backward()
    assert (kernels.forwards, kernels.backwards) == (3, 1)
    functional.gated_linear(gate.detach(), up.detach(), frozen, bias).sum().backward()
    assert (kernels.forwards, kernels.backwards) == (4, 1)


@pytest.mark.parametrize("place", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_of_master_weights(place, dtype):
    """Weights in float32, gate and up in either dtype: their gradients have their dtypes, also if backward is in it."""
    call = inputs(place.device)
    gate, up, weight, bias = call.args
    call = Call((*(t.detach().to(dtype).requires_grad_() for t in (gate, up)), weight, bias), {})

    def outcome(args, function=GATED_LINEAR.reference):
        with torch.autocast(place.device, torch.bfloat16), backends.backend(place.backend):
            out = function(*args)
        with torch.autocast(place.device, torch.bfloat16):
            inside = torch.autograd.grad(out, args, torch.ones_like(out), retain_graph=True)
        outside = torch.autograd.grad(out, args, torch.ones_like(out))
        assert all(map(same_bits, inside, outside))
        assert [g.dtype for g in outside] == [t.dtype for t in args]
        return out, *outside

    ours = outcome(call.args, functional.gated_linear)
    assert ours[0].dtype == torch.bfloat16
    assert_no_worse(ours, outcome, call.args)


def test_backward_in_autocast_that_forward_was_not_in(kernels):
    call = inputs()
    out = functional.gated_linear(*call.args)
    expected = torch.autograd.grad(out, call.leaves(), torch.ones_like(out), retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        ours = torch.autograd.grad(out, call.leaves(), torch.ones_like(out))
    assert all(map(same_bits, ours, expected))


class Tagged(Tensor):
    """A subclass with nothing of its own, as a quantised or sharded weight is one with everything."""


def test_other_weights_get_the_composition(kernels):
    gate, up, weight, bias = inputs().args
    refusals = {
        "plain tensors": (weight.detach().as_subclass(Tagged), bias),
        "weight": (weight.detach().to_sparse_csr(), None),
        "bias of": (weight, bias[:1]),
    }
    for expected, (w, b) in refusals.items():
        assert expected in glu._unsupported_linear(gate, w, b)
        out = functional.gated_linear(gate.detach()[0], up.detach()[0], w, b)
        torch.testing.assert_close(out.as_subclass(Tensor), F.linear(F.silu(gate[0]) * up[0], weight, b))
    assert glu._unsupported_linear(gate, weight, bias) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert glu._unsupported_linear(gate, weight.double(), None) is not None


@pytest.mark.parametrize("place", KERNELS)
def test_a_forced_backend_says_why(place):
    gate, up, weight, _ = inputs(place.device).args
    with backends.backend(place.backend), pytest.raises(backends.BackendError, match="a weight of"):
        functional.gated_linear(gate, up, weight.double())


@pytest.mark.parametrize("place", KERNELS)
def test_written_gradient_must_be_contiguous(place):
    x = torch.randn(8, 8, device=place.device)
    with backends.backend(place.backend):
        kernels = glu.FAMILY.kernels_for(x)
    dy = torch.randn(8, 8, device=place.device)
    dgate, dup = kernels.gated_backward(dy, x, x + 1, 2)
    assert same_bits(kernels.gated_backward_(dy, x, x + 1, 2), dup)
    assert same_bits(dy, dgate)
    with pytest.raises(RuntimeError, match="contiguous"):
        kernels.gated_backward_(dy.mT, x, x, 2)

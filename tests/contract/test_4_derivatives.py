"""Contract, point 4: first and second derivatives exist and are right; only the required ones are computed."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from tests.harness import DEVICES, INTERPRETER, answer, assert_close, cases, joined, plain, smooth
from tests.table import OPS

FLOAT64 = [torch.float64]


# Element by element a Jacobian is thousands of calls; where those are slow, random projections of it are compared.


@cases(smooth, dtypes=FLOAT64)
def test_gradcheck(op, sample, place, dtype):
    call = sample.make(place.device, dtype)
    with place.forced(sample):
        assert gradcheck(
            call.function_of_leaves(op.fused), call.leaves(), check_batched_grad=True, fast_mode=place.is_slow()
        )


@cases(smooth, dtypes=FLOAT64)
def test_gradgradcheck(op, sample, place, dtype):
    """Every Jacobian as a whole only once: a second derivative is plain PyTorch on every backend."""
    call = sample.make(place.device, dtype)
    with place.forced(sample):
        assert gradgradcheck(
            call.function_of_leaves(op.fused),
            call.leaves(),
            gen_non_contig_grad_outputs=True,
            fast_mode=place.is_slow() or place.backend != "eager",
        )


REDUCTIONS = {
    "summed": lambda out: out.sum(),  # sends an expanded gradient
    "transposed": lambda out: out.mT.flatten().cumsum(0).sin(),
    "halved": lambda out: out[..., ::2],
}


@pytest.mark.parametrize("reduction", REDUCTIONS)
@cases(plain, dtypes=FLOAT64)
def test_gradcheck_of_laid_out_gradients(op, sample, place, dtype, reduction):
    call = sample.make(place.device, dtype)
    function = joined(call.function_of_leaves(op.fused))

    def reduced(*leaves):
        return REDUCTIONS[reduction](function(*leaves))

    with place.forced(sample):
        assert gradcheck(reduced, call.leaves(), fast_mode=True)
        if place != INTERPRETER:  # minutes, and test_gradgradcheck sends it strided gradients too
            assert gradgradcheck(reduced, call.leaves(), fast_mode=True)


@cases(smooth, dtypes=[torch.float32])
def test_only_what_is_wanted(op, sample, place, dtype):
    """Any subset of the inputs may require grad, and each gets the gradient that it gets among all."""
    everything = answer(op.fused, sample.make(place.device, dtype))
    wanting = len(everything.grads)
    for wanted in itertools.product([False, True], repeat=wanting):
        call = sample.make(place.device, dtype)
        for leaf, wants in zip(call.leaves(), wanted, strict=True):
            leaf.requires_grad_(wants)
        with place.forced(sample):
            some = answer(op.fused, call)
        assert_close(some.outs, everything.outs)
        assert_close(some.grads, tuple(g for g, wants in zip(everything.grads, wanted, strict=True) if wants))


def comparable(op, sample, device):
    """The fused call and the torch composition as functions of the same leaves, and those leaves."""
    call = sample.make(device, torch.float64)
    leaves = tuple(leaf.detach() for leaf in call.leaves())
    return joined(call.function_of_leaves(op.fused)), joined(call.function_of_leaves(op.reference)), leaves


TRANSFORMS = {
    "grad": lambda f, leaves: torch.func.grad(lambda *t: f(*t).sin().sum(), tuple(range(len(leaves))))(*leaves),
    "grad of grad": lambda f, leaves: torch.func.grad(
        lambda *t: torch.func.grad(lambda *u: f(*u).sin().sum())(*t).sin().sum()
    )(*leaves),
    "vjp": lambda f, leaves: torch.func.vjp(f, *leaves)[1](torch.ones_like(f(*leaves))),
    "jvp": lambda f, leaves: torch.func.jvp(f, leaves, tuple(leaf.cos() for leaf in leaves)),
    "vmap": lambda f, leaves: torch.func.vmap(f)(*(torch.stack([leaf, 2 * leaf]) for leaf in leaves)),
    "vmap of grad": lambda f, leaves: torch.func.vmap(torch.func.grad(lambda *t: f(*t).sin().sum()))(
        *(torch.stack([leaf, 2 * leaf]) for leaf in leaves)
    ),
    "jacrev": lambda f, leaves: torch.func.jacrev(f)(*leaves),
    "jacfwd": lambda f, leaves: torch.func.jacfwd(f)(*leaves),
    "hessian": lambda f, leaves: torch.func.hessian(lambda t: f(t, *leaves[1:]).sin().sum())(leaves[0]),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(
    ("op", "sample"), [pytest.param(op, s, id=f"{op.name}-{s.name}") for op in OPS for s in smooth(op)]
)
def test_functional_transforms(op, sample, transform, device):
    """torch.func on a fused op gives what it gives on the torch composition."""
    fused, reference, leaves = comparable(op, sample, device)
    assert_close(TRANSFORMS[transform](fused, leaves), TRANSFORMS[transform](reference, leaves))


@cases(smooth, dtypes=FLOAT64)
def test_batched_gradients(op, sample, place, dtype):
    """is_grads_batched: one vmapped backward of a graph whose forward ran a kernel."""
    call = sample.make(place.device, dtype)

    def batched(function):
        out = joined(function)(*call.args, **call.kwargs)
        dys = torch.stack([torch.ones_like(out), out.detach().sin()])
        return torch.autograd.grad(out, call.leaves(), dys, is_grads_batched=True)

    with place.forced(sample):
        ours = batched(op.fused)
    assert_close(ours, batched(op.reference))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_forward_mode(op, device):
    """Forward mode gives the tangents that the torch composition gives."""

    def dual_result(function):
        call = op.samples[0].make(device, torch.float64)
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(leaf, leaf.detach().cos()) for leaf in call.leaves()]
            return tuple(forward_ad.unpack_dual(joined(call.function_of_leaves(function))(*duals)))

    assert_close(dual_result(op.fused), dual_result(op.reference))

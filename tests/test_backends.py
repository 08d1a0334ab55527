"""Contract, point 9: who answers a call. Left alone, the best there is; forced, that one or an error that says why."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from fastlayers import backends, functional
from fastlayers.backends import BackendError
from fastlayers.build import BuildInfo
from fastlayers.ops import softmax
from tests import ROOT
from tests.harness import DEVICES, PLACES, answer, assert_close
from tests.table import OPS
from tests.table.elementwise import ADD_RELU
from tests.table.softmax import SOFTMAX

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
has_cpu_kernels = pytest.mark.skipif(backends.problem("cpu") is not None, reason="csrc was not built")

REFUSALS = [
    pytest.param(op, sample, place, marks=place.marks(), id=f"{op.name}-{place}-{sample.name}")
    for op in OPS
    for place in PLACES
    if place.backend in op.kernels
    for sample in op.samples
    if place.backend in sample.refused
]


@pytest.mark.parametrize(("op", "sample", "place"), REFUSALS)
def test_forced_backend_that_cannot_serve(op, sample, place):
    """It raises with a reason. Left alone, the reference answers: the contract tests run these calls so."""
    call = sample.make(place.device, sample.dtypes[0])
    with backends.backend(place.backend), pytest.raises(BackendError) as refusal:
        op.fused(*call.args, **call.kwargs)
    head, reason = str(refusal.value).split("cannot serve: ")
    assert repr(place.backend) in head
    assert len(reason) > 10


@has_cpu_kernels
def test_forced_cpu_lacks_a_family(monkeypatch):
    monkeypatch.setattr(softmax.FAMILY, "_cpu", False)
    with backends.backend("cpu"), pytest.raises(BackendError, match="csrc has no softmax for CPU tensors"):
        functional.softmax(torch.randn(3))


@no_gpu
@pytest.mark.parametrize("name", ["cuda", "triton"])
def test_backend_that_is_absent(name):
    before = backends.get_backend()
    with pytest.raises(BackendError, match=f"backend '{name}' is not available here: .{{10,}}"):
        backends.set_backend(name)
    assert backends.get_backend() == before


def test_cuda_kernels_for_another_gpu(monkeypatch, tmp_path):
    """The backend is absent, with the reason, where the library has no code for the device: calls fall back."""
    monkeypatch.setattr(backends, "LIBRARY", tmp_path / "_C.so")
    monkeypatch.setattr(backends, "_library_problem", None)
    monkeypatch.setattr(backends, "has_library_kernel", lambda op, key: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    BuildInfo(cuda_archs=("90",)).write(backends.LIBRARY)
    reason = backends.problem("cuda", torch.device("cuda"))
    assert reason is not None
    assert "CUDA kernels for sm_90" in reason
    assert "not for sm_120" in reason
    BuildInfo(cuda_archs=("90+PTX",)).write(backends.LIBRARY)
    assert backends.problem("cuda", torch.device("cuda")) is None


@has_cpu_kernels
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_forced_backend_of_another_device():
    x = torch.randn(3, device="cuda")
    with backends.backend("cpu"), pytest.raises(BackendError, match="it serves CPU tensors, and got one on cuda:0"):
        functional.add_relu(x, x)


@pytest.mark.parametrize("name", ["Cuda", "gpu", "", 1])
def test_unknown_backend(name):
    with pytest.raises(
        ValueError, match=rf"unknown backend {name!r}; expected one of eager, compile, triton, cuda, cpu"
    ):
        backends.set_backend(name)


def test_set_and_get():
    assert backends.get_backend() is None
    backends.set_backend("eager")
    assert backends.get_backend() == "eager"
    backends.set_backend(None)
    assert backends.get_backend() is None


def test_context_manager_nests_and_survives_errors():
    with backends.backend("eager"):
        with backends.backend(None):
            assert backends.get_backend() is None
        assert backends.get_backend() == "eager"
        with pytest.raises(ZeroDivisionError), backends.backend("compile"):
            raise ZeroDivisionError
        assert backends.get_backend() == "eager"
    assert backends.get_backend() is None


def test_available_has_every_backend():
    found = backends.available()
    assert tuple(found) == backends.BACKENDS
    assert found["eager"] is None
    assert all(reason is None or len(reason) > 10 for reason in found.values())


@has_cpu_kernels
def test_forcing_is_seen_at_once():
    """The choice is cached per device; forcing another backend empties the cache."""
    x = torch.randn(2**20, requires_grad=True)  # smaller ones are left to torch
    names = []
    for forced in (None, "eager", "cpu", None):
        with backends.backend(forced):
            names.append(functional.add_relu(x, x).grad_fn.name())
    kernel, stock = names[0], names[1]
    assert "ReLU" in kernel
    assert names == [kernel, stock, kernel, kernel]
    assert kernel != stock


@pytest.mark.parametrize("device", DEVICES)
def test_graph_keeps_the_backend_of_its_forward(device):
    call = ADD_RELU.samples[0].make(device, torch.float32)
    out = functional.add_relu(*call.args)
    with backends.backend("eager"):
        grads = torch.autograd.grad(out.sum(), call.leaves())
    reference = ADD_RELU.reference(*call.args)
    assert_close(grads, torch.autograd.grad(reference.sum(), call.leaves()))


@has_cpu_kernels
def test_forced_backend_under_transforms():
    """vmap needs torch ops: a forced kernel says so, instead of being left out in silence."""
    with backends.backend("cpu"), pytest.raises(BackendError, match="functorch transform"):
        torch.func.vmap(functional.add_relu)(torch.randn(2, 3), torch.randn(2, 3))


class Wrapped(torch.Tensor):
    """A subclass, as DTensor and quantised tensors are."""


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_tensor_subclass_is_left_to_torch(op):
    call = op.samples[0].make("cpu", torch.float32).map(lambda t: t.as_subclass(Wrapped))
    ours = answer(op.fused, call)
    assert isinstance(ours.outs[0], Wrapped)
    assert_close(ours.outs, answer(op.reference, call).outs)


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_environment_variable():
    ran = python("from fastlayers import backends; print(backends.get_backend())", FASTLAYERS_BACKEND="eager")
    assert ran.stdout.strip() == "eager", ran.stderr


FIRST_USE = "import fastlayers, torch; print('imported'); fastlayers.functional.mul(torch.ones(2), torch.ones(2))"


def test_environment_variable_with_a_wrong_name():
    """Importing succeeds, so that `python -m fastlayers info` can say what is wrong; the first call does not."""
    ran = python(FIRST_USE, FASTLAYERS_BACKEND="metal")
    assert ran.stdout.strip() == "imported", ran.stderr
    assert "FASTLAYERS_BACKEND='metal': unknown backend 'metal'; expected one of eager" in ran.stderr.splitlines()[-1]
    assert ran.returncode != 0


@no_gpu
def test_environment_variable_with_an_absent_backend():
    ran = python(FIRST_USE, FASTLAYERS_BACKEND="cuda")
    assert ran.stdout.strip() == "imported", ran.stderr
    assert "backend 'cuda' was forced, but cannot serve: " in ran.stderr.splitlines()[-1]
    assert ran.returncode != 0


def test_import_is_light():
    """Neither Triton, nor Dynamo, which reads our name from an entry point, nor what only the command line, checkpoints
    and integrations use."""
    heavy = (
        "triton",
        "torch._dynamo",
        "torch._inductor",
        "rich",
        "click",
        "safetensors",
        "transformers",
        "numpy.testing",
        "fastlayers.integrations",
    )
    ran = python(
        "import sys, torch; before = set(sys.modules); import fastlayers;"
        f"print(set({heavy}) & (set(sys.modules) - before))"
    )
    assert ran.stdout.strip() == "set()", ran.stderr


def test_softmax_asks_for_a_number():
    with pytest.raises(TypeError, match="expected scale to be a number or None, but got Tensor"):
        functional.softmax(torch.randn(3), scale=torch.tensor(2.0))


def test_every_op_is_in_the_table():
    """A new function joins the contract tests by its row. One needs a process group, those of preferences have no
    kernels, and those that find the largest logits no gradient: these have tests of their own."""
    elsewhere = {"vocab_parallel_cross_entropy", "linear_topk", "linear_argmax", "linear_accuracy"}
    elsewhere |= {name for name in functional.__all__ if name.endswith("_loss")}
    assert {op.fused.__name__ for op in OPS} == set(functional.__all__) - elsewhere
    assert SOFTMAX.fused is functional.softmax

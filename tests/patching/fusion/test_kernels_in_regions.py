"""Regions with generated kernels: aligned or not, launched by C++, named, and without those that do not work."""

from __future__ import annotations

import contextlib
import importlib.util
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.harness import needs_gpu

pytest.importorskip("triton")

import fastlayers
from fastlayers import backends
from fastlayers import functional as FL
from fastlayers.kernels.generated import Kernel
from fastlayers.patching.fusion.passes import fused
from fastlayers.patching.program import executors
from fastlayers.patching.program.dump import source_of
from fastlayers.patching.program.executors import Facts, PythonExecutor
from fastlayers.patching.reasons import PatchWarning, Reason
from fastlayers.patching.regions import region as regions
from fastlayers.patching.regions.region import region_class
from tests.patching.fusion.programs import INTERPRETED, check, entries_of, recorded

pytestmark = pytest.mark.cpu_kernels


class Modulated(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.linear, self.gate = nn.Linear(width, width), nn.Parameter(torch.rand(width))

    def forward(self, x, t):
        y = self.linear(x)
        return x + (y * torch.sigmoid(t) + y.tanh()) * self.gate * (1 + t).exp().clamp(max=3)


def outcome(module, *inputs):
    given = [t.detach().requires_grad_() for t in inputs]
    out = module(*given)
    return [out, *torch.autograd.grad(out.square().sum(), [*given, *module.parameters()])]


def test_regions(device):
    module = Modulated().to(device)
    cls = region_class(Modulated, {})
    for rows in (8, 8, 8, 3, 3, 3):  # recorded at the second call of a shape
        inputs = [torch.randn(rows, 32, device=device) for _ in range(2)]
        expected = outcome(module, *inputs)
        module.__class__ = cls
        torch.testing.assert_close(outcome(module, *inputs), expected, rtol=1e-5, atol=1e-5)
        module.__class__ = Modulated
    module.__class__ = cls
    assert len(type(module).__fastlayers_region__.made()) == 2


@needs_gpu
def test_tensors_that_are_not_aligned():
    module = Modulated().cuda()
    region = Modulated().cuda()
    region.load_state_dict(module.state_dict())
    region.__class__ = region_class(Modulated, {})
    storage = torch.randn(2, 8 * 32 + 4, device="cuda")
    for offset in (0, 0, 0, 1, 1, 0):
        inputs = [row[offset : offset + 256].view(8, 32) for row in storage]
        torch.testing.assert_close(outcome(region, *inputs), outcome(module, *inputs), rtol=1e-5, atol=1e-5)


@needs_gpu
@pytest.mark.skipif(executors.problem is not None, reason=f"{executors.problem}")
def test_cpp_launches_them(monkeypatch):
    region = Modulated().cuda()
    region.__class__ = region_class(Modulated, {})
    inputs = [torch.randn(8, 32, device="cuda", requires_grad=True) for _ in range(2)]
    for _ in range(3):
        region(*inputs).sum().backward()

    def call(*args):
        raise AssertionError("Python was called")

    monkeypatch.setattr(Kernel, "__call__", call)
    monkeypatch.setattr(executors, "run_generated", call)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        region(*inputs).sum().backward()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = region(*inputs)
    graph.replay()
    torch.testing.assert_close(out, Modulated.forward(region, *inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(INTERPRETED, reason="needs no interpreter")
def test_only_triton_generates(monkeypatch):
    monkeypatch.setattr(backends, "problem", lambda name, device=None: None)
    for forced, expected in ((None, True), ("cuda", True), ("triton", True), ("eager", False), ("compile", False)):
        monkeypatch.setattr(backends, "_forced", forced)
        assert backends.generates_kernels(torch.device("cuda")) == expected
        assert backends.generates_kernels(torch.device("cpu")) == (forced == "triton")


class Shifted(nn.Module):
    """With the gradients of a recording, those of the bias cancel: what is left is rounding."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.rand(32))

    def forward(self, x):
        return (x + self.bias) * 0.1 - x.abs() * 0.3 + x.sin()


def test_gradients_of_nothing_but_rounding(device):
    """Two orders of a sum find other roundings."""
    module = Shifted().to(device)
    module.__class__ = region_class(Shifted, {})
    for _ in range(3):
        module(torch.randn(280, 32, device=device, requires_grad=True)).sum().backward()
    (entry,) = entries_of(module)
    assert entry.refusal is None


class Largest(nn.Module):
    def forward(self, x):
        return (torch.sin(x) * torch.cos(x) + x.tanh()).amax(-1)


def test_results_and_what_is_kept_are_of_one_run(device):
    """The largest element of a run with generated kernels may not be one of the run without them."""
    module, stock = Largest(), Largest()
    module.__class__ = region_class(Largest, {})
    for _ in range(4):
        x = torch.randn(64, 16, device=device)
        torch.testing.assert_close(outcome(module, x), outcome(stock, x), rtol=1e-5, atol=1e-5)
    (entry,) = entries_of(module)
    assert entry.refusal is None


def test_the_name_of_a_kernel_says_what_it_does(device):
    x = torch.randn(64, 32, device=device)
    _, pointwise = check(lambda x: (x * 2).sigmoid() + 1, x)
    _, summed = check(lambda x: (x * 2).sum(0), x)
    names = [o.function.launch.function.__name__ for program in (pointwise, summed) for o in program.forward]
    assert names[0] == "fused_mul_sigmoid_add"
    assert set(names[1:]) == {"fused_mul_sum"}
    program, *_ = recorded(lambda x: (x * 2).sigmoid() + 1, (x,))
    (placed,) = (o.function.__name__ for o in fused(replace(program, place="block_py_88")).forward)
    assert placed == "fused_mul_sigmoid_add__block_py_88"


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_a_norm_in_a_kernel_is_named_as_a_whole(norm, device):
    x, weight = torch.randn(64, 32, device=device), torch.rand(32, device=device)
    _, program = check(lambda x, weight: getattr(FL, norm)((x * 2).sigmoid(), (32,), weight).relu(), x, weight)
    (name,) = (o.function.__name__ for o in program.forward if isinstance(o.function, Kernel))
    assert name == f"fused_mul_sigmoid_{norm}_relu"


def test_a_program_prints_as_python_that_runs(device, tmp_path):
    """With its kernels, also two of one name, and one that adds up what another one leaves."""

    def function(x, weight):
        y = FL.rms_norm((x * 2).sigmoid(), (32,), weight).relu()
        return y, y.mT.contiguous() * 3, (x * 5).sum(0)

    inputs = torch.randn(4096, 32, device=device), torch.rand(32, device=device)
    _, program = check(function, *inputs)
    source = source_of(replace(program, values={}), [""] * len(inputs))
    assert source.count("@triton.jit") == source.count(" = Producer(")
    path = tmp_path / "explained.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("explained", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    expected, _ = PythonExecutor(program, Facts()).forward(*inputs)
    torch.testing.assert_close(list(module.forward(*inputs)[0]), list(expected), rtol=0, atol=0)


def test_a_kernel_that_cannot_be_compiled(device, monkeypatch):
    def fails(*args):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(Kernel, "compile", fails)
    monkeypatch.setattr("fastlayers.patching.fusion.kernels.compile_together", lambda kernels: kernels[0].compile())
    module = Modulated().to(device)
    module.__class__ = region_class(Modulated, {})

    def step():
        module(*(torch.randn(8, 32, device=device, requires_grad=True) for _ in range(2))).sum().backward()

    step()
    with pytest.raises(regions.RecordingError, match="no compiler"):
        step()
    monkeypatch.setattr(regions, "RAISE_ERRORS", False)  # as users have it
    with pytest.warns(PatchWarning, match="calls of Modulated .* the pass kernels: RuntimeError: no compiler"):
        step()
    step()
    (entry,) = entries_of(module)
    assert entry.refusal is None
    assert fastlayers.patch_report(module).rows[0].left[-1] == (
        Reason.RECORDING_FAILED, "the pass kernels: RuntimeError: no compiler"
    )  # fmt: skip


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Modulated()

    def forward(self, x, t):
        return self.inner(x, t) * 2 + x.sigmoid()


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("outer", [False, True])
def test_what_was_recorded_runs_without_kernels_that_do_not_work(device, outer, wrong, monkeypatch):
    launches = []

    def call(kernel, *inputs):
        launches.append(kernel)
        if not wrong:
            raise RuntimeError("out of resources")
        return [result.empty(kernel.device).fill_(7) for result in kernel.results]

    monkeypatch.setattr(Kernel, "__call__", call)
    monkeypatch.setattr(executors, "run_generated", lambda kernel, launch, *inputs: call(kernel))
    monkeypatch.setattr("fastlayers.patching.regions.region.executor_class", lambda: PythonExecutor)
    monkeypatch.setattr(regions, "RAISE_ERRORS", False)  # as users have it
    torch.manual_seed(0)
    module, stock = ((Outer if outer else Modulated)().to(device) for _ in range(2))
    module.load_state_dict(stock.state_dict())
    module.__class__ = region_class(type(stock), {})
    with contextlib.nullcontext() if wrong else pytest.warns(PatchWarning, match="out of resources"):
        for _ in range(3):
            inputs = [torch.randn(8, 32, device=device) for _ in range(2)]
            torch.testing.assert_close(outcome(module, *inputs), outcome(stock, *inputs), rtol=1e-5, atol=1e-5)
    (entry,) = entries_of(module)
    assert launches
    assert (entry.refusal is not None) == outer  # A region of an inner module may have kernels.

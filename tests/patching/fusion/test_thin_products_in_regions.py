"""Models with adapters as regions: launched by C++, and those of peft."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.harness import DEVICES, needs_gpu

pytest.importorskip("triton")

import fastlayers
from fastlayers.kernels import low_rank
from fastlayers.kernels.launch import Producer
from fastlayers.ops import low_rank as ops
from fastlayers.patching.fusion import passes
from fastlayers.patching.program import executors
from fastlayers.patching.program.program import plain_name
from fastlayers.patching.regions.entries import no_regions
from fastlayers.patching.regions.region import region_class
from tests.patching.fusion.programs import (
    INTERPRETED,
    LOW,
    TOLERANCE,
    Adapted,
    adapter,
    dropped,
    largest_of,
    names_of,
)

pytestmark = pytest.mark.cpu_kernels


class Together(nn.Module):
    """Adapters that read one input, two after a dropout."""

    def __init__(self, device):
        super().__init__()
        self.layers = nn.ModuleList(Adapted(device) for _ in range(5))

    def forward(self, x):
        plain = [layer(x) for layer in self.layers[:3]]
        return sum(plain) + sum(dropped(x, layer.weight, layer.a, layer.b, 0.5, 0.3).sin() for layer in self.layers[3:])


@needs_gpu
@pytest.mark.skipif(executors.problem is not None, reason=f"{executors.problem}")
def test_cpp_launches_thin_products(monkeypatch):
    region = Together("cuda")
    stock = copy.deepcopy(region)
    region.__class__ = region_class(Together, {})
    x = torch.randn(4, 512, 136, device="cuda", dtype=LOW, requires_grad=True)

    def answer(module):
        torch.manual_seed(1)
        out = module(x)
        factors = [p for p in module.parameters() if p.requires_grad]
        return out, *torch.autograd.grad(out.float().square().mean(), [x, *factors])

    for _ in range(3):
        answer(region)

    def call(*args):
        raise AssertionError("Python was called")

    monkeypatch.setattr(Producer, "__call__", call)
    monkeypatch.setattr(executors, "run_kernel", call)
    monkeypatch.setattr(executors, "run_generated", call)
    for a, b in zip(answer(region), answer(stock), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=TOLERANCE[LOW] * largest_of(b))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_machine_code_of_a_launch_is_of_one_device():
    """Both devices share the launch that adds up partial sums."""
    codes = []
    for device in ("cuda:0", "cuda:1", "cuda:0"):
        x, t = torch.randn(512, 4096, device=device, dtype=LOW), torch.randn(4096, 8, device=device)
        low_rank.thin_product(x, t, 1.0)
        _, last = low_rank.thin_kernels(x, t, 1, 1.0, False, True)
        codes.append(last.machine_code()[0])
    assert codes[0] == codes[2] != codes[1]


@pytest.mark.parametrize("dtype", [torch.float32, LOW])
def test_what_an_adapter_adds(device, dtype):
    """Values and gradients are those of the composition, of the second order too, and x is kept as it is."""
    x = torch.randn(2, 33, 136, device=device, dtype=LOW, requires_grad=True)
    y = torch.randn(2, 33, 200, device=device, dtype=LOW, requires_grad=True)
    a, b = adapter(device, dtype, 136, 200, 12)
    dy = torch.randn(y.shape, device=device, dtype=LOW)
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.data_ptr()) or t, lambda t: t):
        out = ops.add_low_rank(y, x, a, b, 0.75)
    assert type(out.grad_fn).__name__ == "AddLowRankBackward"
    assert x.data_ptr() in seen
    expected = ops.compose(y, x, a, b, 0.75)
    answers = [(t, *torch.autograd.grad(t, (y, x, a, b), dy, retain_graph=True)) for t in (out, expected)]
    for own, other in zip(*answers, strict=True):
        assert (own.dtype, own.shape) == (other.dtype, other.shape)
        torch.testing.assert_close(own, other, rtol=0, atol=TOLERANCE[LOW] * largest_of(other))
    second = []
    for t in (out, expected):
        (dx,) = torch.autograd.grad(t, x, dy, create_graph=True)
        second.append(torch.autograd.grad(dx.float().sin().sum(), b)[0])
    torch.testing.assert_close(*second, rtol=0, atol=TOLERANCE[LOW] * largest_of(second[1]))


@pytest.mark.parametrize(
    ("shapes", "dtypes"),
    [
        (((5, 136), (5, 200), (0, 136), (200, 0)), (LOW, LOW, torch.float32)),
        (((0, 136), (0, 200), (8, 136), (200, 8)), (LOW, LOW, torch.float32)),
        (((5, 136), (5, 200), (130, 136), (200, 130)), (LOW, LOW, torch.float32)),
        (((136,), (200,), (8, 136), (200, 8)), (LOW, LOW, torch.float32)),
        (((5, 136), (5, 200), (8, 136), (200, 8)), (torch.float32, torch.float32, torch.float32)),
        (((5, 136), (5, 200), (8, 136), (200, 8)), (LOW, torch.float32, torch.float32)),
    ],
)
def test_what_no_kernel_adds_is_composed(device, shapes, dtypes):
    x, y, a, b = (
        torch.randn(shape, device=device).to(dtype)
        for shape, dtype in zip(shapes, (dtypes[0], dtypes[1], dtypes[2], dtypes[2]), strict=True)
    )
    out = ops.add_low_rank(y, x, a, b.requires_grad_(), 2.0)
    assert "LowRank" not in type(out.grad_fn).__name__
    torch.testing.assert_close(out, ops.compose(y, x, a, b, 2.0))


def lora_layers(device, **options):
    """A linear layer with peft's adapter, and a patched copy."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(136, 200)).to(device, LOW)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"], r=8, **options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    patched = fastlayers.patch_model(copy.deepcopy(model))
    return model, patched


class Attending(nn.Module):
    """Three layers on one input, and one after them."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(72, 136) for _ in range(3))
        self.o = nn.Linear(136, 72)

    def forward(self, x):
        h = x.sin()
        return x + self.o(torch.sigmoid(self.q(h) * self.k(h)) * self.v(h))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("amp", [False, True])
def test_a_model_with_dropout_before_adapters(device, amp, monkeypatch):
    """A region draws what peft draws, and what it computes of that is what peft computes."""
    peft = pytest.importorskip("peft")
    if INTERPRETED:  # What a dropout calls on a GPU.
        monkeypatch.setattr(
            F, "dropout", lambda input, p, training, inplace: torch.native_dropout(input, p, training)[0]
        )
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules="all-linear", r=4, lora_dropout=0.2, init_lora_weights=False)
    model = peft.get_peft_model(nn.Sequential(Attending(), Attending()).to(device, LOW), config)
    patched = fastlayers.patch_model(copy.deepcopy(model))
    programs = []
    monkeypatch.setattr(passes, "fused", lambda *given, of=passes.fused: programs.append(of(*given)) or programs[-1])
    for step in range(3):
        x = torch.randn(2, 9, 72, device=device).to(LOW).requires_grad_()
        answers = []
        for each in (model, patched):
            torch.manual_seed(step)
            with torch.autocast(device, LOW, enabled=amp):
                out = each(x)
            loss = out.float().square().mean()
            wanted = [x, *(p for p in each.parameters() if p.requires_grad)]
            answers.append((out, loss, *torch.autograd.grad(loss, wanted), torch.rand(4, device=device)))
        assert torch.equal(answers[0][-1], answers[1][-1])
        for own, other in zip(answers[1], answers[0], strict=True):
            torch.testing.assert_close(own, other, rtol=0, atol=TOLERANCE[LOW] * largest_of(other))
    if INTERPRETED or device != "cpu":
        masks = [o.makes[1] for p in programs for o in p.forward if plain_name(o.function) == "native_dropout"]
        assert len(masks) == 4  # The blocks share a program.
        assert {*masks} <= {name for p in programs for name in p.kept}
        for program in programs:
            found = names_of(program.backward)
            assert (found["thin_product"], found["thin_products"]) == ((1, 1) if amp else (9, 1))
            assert found["wide_product"] == 2


def answer_of(model, x):
    """The result outside of a region, the gradients, and whether a kernel added to it."""
    with no_regions():
        out = model(x)
    names = set()
    pending = [out.grad_fn]
    while pending:
        node = pending.pop()
        if node is not None and type(node).__name__ not in names:
            names.add(type(node).__name__)
            pending += [n for n, _ in node.next_functions]
    leaves = [x, *(p for p in model.parameters() if p.requires_grad)]
    found = torch.autograd.grad(out.float().sin().sum(), leaves, allow_unused=True)
    return (out, *found), "AddLowRankBackward" in names


def changed(model, how):
    layer = model.base_model.model[0]
    if how == "hook":
        layer.lora_A["default"].register_forward_hook(lambda *args: None)
    elif how == "hook on a dropout":
        layer.lora_dropout["default"].register_forward_hook(lambda *args: None)
    elif how == "merged":
        model.merge_adapter()
    elif how == "own forward":
        layer.lora_B["default"].forward = lambda x: x.new_zeros(*x.shape[:-1], 200)


@pytest.mark.parametrize(
    ("how", "options", "by_kernel"),
    [
        ("plain", {}, True),
        ("rank-stabilised", {"use_rslora": True}, True),
        ("dora", {"use_dora": True}, False),
        ("dropout", {"lora_dropout": 0.5}, True),
        ("hook on a dropout", {"lora_dropout": 0.5}, False),
        ("dropout of all", {"lora_dropout": 1.0}, False),
        ("bias", {"lora_bias": True}, False),
        ("hook", {}, False),
        ("merged", {}, False),
        ("own forward", {}, False),
        ("disabled", {}, False),
        ("two adapters", {}, True),
    ],
)
def test_layers_of_peft(device, how, options, by_kernel):
    peft = pytest.importorskip("peft")
    models = lora_layers(device, **options)
    x = torch.randn(3, 40, 136, device=device, dtype=LOW, requires_grad=True)
    answers = []
    for model in models:
        changed(model, how)
        if how == "two adapters":
            torch.manual_seed(4)
            model.add_adapter("other", peft.LoraConfig(target_modules=["0"], r=4, init_lora_weights=False))
            model.base_model.set_adapter(["default", "other"])
        torch.manual_seed(1)
        with model.disable_adapter() if how == "disabled" else contextlib.nullcontext():
            answers.append(answer_of(model, x))
    (expected, _), (found, fused) = answers
    assert fused == by_kernel
    for own, other in zip(found, expected, strict=True):
        assert (own is None) == (other is None)
        if own is not None:
            torch.testing.assert_close(own, other, rtol=0, atol=TOLERANCE[LOW] * largest_of(other))
    assert type(fastlayers.unpatch_model(models[1]).base_model.model[0]) is type(models[0].base_model.model[0])

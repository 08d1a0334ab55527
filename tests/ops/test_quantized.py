"""linear_cross_entropy and linear_log_prob of a weight in few bits: bitsandbytes', torchao's, and types like those."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from fastlayers import backends, functional
from fastlayers.ops import quantized
from tests.harness import assert_close, excess, greatest_error, same_bits
from tests.ops.heads import Largest, adapter, inputs
from tests.table.losses import LINEAR_CROSS_ENTROPY, LINEAR_LOG_PROB

aten = torch.ops.aten
FUNCTIONS = {
    "loss": (functional.linear_cross_entropy, LINEAR_CROSS_ENTROPY.reference),
    "losses": (
        lambda *args, **options: functional.linear_cross_entropy(*args, **options, reduction="none"),
        lambda *args, **options: LINEAR_CROSS_ENTROPY.reference(*args, **options, reduction="none"),
    ),
    "log_prob": (functional.linear_log_prob, LINEAR_LOG_PROB.reference),
}
ROWS = 48


class Scaled(Tensor):
    """8 bits and a scale for each row, with the interface of torchao's types."""

    @staticmethod
    def __new__(cls, values: Tensor, scales: Tensor) -> Scaled:
        made = Tensor._make_wrapper_subclass(cls, values.shape, dtype=scales.dtype, device=values.device)
        made.values, made.scales = values, scales
        return made

    @classmethod
    def of(cls, weight: Tensor) -> Scaled:
        scales = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scales).round().to(torch.int8), scales)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        source = args[0]
        if func in (aten.detach.default, aten.alias.default):
            return return_and_correct_aliasing(func, args, kwargs or {}, cls(source.values, source.scales))
        if func is aten.slice.Tensor and cls.has_slices(*args[1:]):
            parts = (func(source.values, *args[1:]), func(source.scales, *args[1:]))
            return return_and_correct_aliasing(func, args, kwargs or {}, cls(*parts))
        raise NotImplementedError(f"{func} of a {cls.__name__}")

    @classmethod
    def has_slices(cls, dim=0, *place) -> bool:
        return dim == 0

    def dequantize(self) -> Tensor:
        return self.values * self.scales


class Unsliced(Scaled):
    @classmethod
    def has_slices(cls, *place) -> bool:
        return False


def bitsandbytes():
    pytest.importorskip("bitsandbytes", reason="it is not installed")
    return sys.modules["bitsandbytes"]


def of_4_bits(weight: Tensor, **options):
    nn4 = bitsandbytes().nn
    return nn4.Params4bit(weight.float(), requires_grad=False, **options).to("cpu")


def of_8_bits(weight: Tensor):
    return bitsandbytes().nn.Int8Params(weight.half(), requires_grad=False).to("cpu")


def of_torchao(config: str):
    def quantize(weight: Tensor) -> Tensor:
        torchao = pytest.importorskip("torchao.quantization", reason="it is not installed")
        layer = nn.Sequential(nn.Linear(*weight.shape[::-1], bias=False))
        layer[0].weight = nn.Parameter(weight)
        torchao.quantize_(layer, getattr(torchao, config)())
        return layer[0].weight

    return quantize


QUANTIZERS = {
    "scaled": Scaled.of,
    "unsliced": Unsliced.of,
    "nf4": lambda w: of_4_bits(w, quant_type="nf4"),
    "fp4, scales as they are": lambda w: of_4_bits(w, quant_type="fp4", compress_statistics=False),
    "nf4, blocks of 256": lambda w: of_4_bits(w, quant_type="nf4", blocksize=256),
    "nf4, blocks of 4096": lambda w: of_4_bits(w, quant_type="nf4", blocksize=4096),
    "nf4 in bfloat16": lambda w: of_4_bits(w, quant_type="nf4", quant_storage=torch.bfloat16),
    "int8": of_8_bits,
    "torchao int8": of_torchao("Int8WeightOnlyConfig"),
    "torchao float8": of_torchao("Float8WeightOnlyConfig"),
}


def dequantized(weight) -> Tensor:
    """By their formulas. bitsandbytes' own dequantize_4bit errs on a CPU where a row is no multiple of a block."""
    if type(weight).__name__ == "Params4bit":
        functional4, state = bitsandbytes().functional, weight.quant_state
        packed = weight.data.reshape(-1).view(torch.uint8).long()
        codes = functional4.get_4bit_type(state.quant_type, "cpu")[
            torch.stack((packed >> 4, packed & 15), 1).reshape(-1)
        ]
        scales = state.absmax
        if state.nested:
            scales = functional4.dequantize_blockwise(scales, state.state2) + state.offset
        return (codes * scales.repeat_interleave(state.blocksize)[: codes.numel()]).view(state.shape)
    if type(weight).__name__ == "Int8Params":
        return weight.data.double() * (weight.SCB[:, None] * (1 / 127))
    return weight.dequantize()


class LargestFloating(Largest):
    """Packed values are smaller than their number says."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and t.is_floating_point() and not isinstance(t, Scaled):
                self.elements = max(self.elements, t.numel())
        return result


def call(columns: int, features: int, dtype: torch.dtype = torch.float64):
    hidden, weight, target = inputs(ROWS, columns, features, dtype)
    target[::5] = -100
    bias = torch.randn(columns, dtype=dtype, generator=torch.Generator().manual_seed(3), requires_grad=True)
    return hidden, weight.detach(), target, bias


def answers(function, hidden, weight, target, bias, low_rank, **options):
    found = function(hidden, weight, target, linear_bias=bias, low_rank=low_rank, **options)
    dy = torch.linspace(1, 2, max(found.numel(), 1)).to(found.dtype).view(found.shape)
    return found, *torch.autograd.grad(found, (hidden, bias, *low_rank), dy)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(quantized, "BLOCK_TILE", 16)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("which", FUNCTIONS)
@pytest.mark.parametrize("features", [64, 96])
@pytest.mark.parametrize("columns", [320, 333])
@pytest.mark.parametrize("kind", QUANTIZERS)
def test_values_and_gradients(kind, columns, features, which):
    """Those of the weight that the library makes of it, which is never whole."""
    hidden, weight, target, bias = call(columns, features)
    weight = QUANTIZERS[kind](weight.float())
    low_rank = adapter(ROWS, columns, 4, torch.float64)
    ours, stock = FUNCTIONS[which]
    options = {"softcap": 3.0, "logit_scale": 0.5}
    expected = answers(stock, hidden, dequantized(weight).double(), target, bias, low_rank, **options)
    with LargestFloating() as largest:
        found = answers(ours, hidden, weight, target, bias, low_rank, chunk_size=8, **options)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)  # the scales are float32
    if "float8" not in kind and kind != "unsliced":  # torchao's float8 makes float32 of the values first
        assert largest.elements <= max(64 * features, 8 * 384, columns * 4, columns * features // 2)
    assert weight.grad is None


@pytest.mark.parametrize("kind", ["scaled", "unsliced", "nf4", "int8"])
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits_err_no_more_than_torch(kind, low, monkeypatch):
    monkeypatch.setattr(quantized, "BLOCK_TILE", 16)
    hidden, weight, target, bias = call(333, 64, low)
    weight = QUANTIZERS[kind](weight.float())
    low_rank = adapter(ROWS, 333, 4, low)
    plain = dequantized(weight).to(low)
    ours = answers(functional.linear_cross_entropy, hidden, weight, target, bias, low_rank, chunk_size=8)
    theirs = answers(LINEAR_CROSS_ENTROPY.reference, hidden, plain, target, bias, low_rank)
    exact = [t.detach().double().requires_grad_() for t in (hidden, bias, *low_rank)]
    true = answers(LINEAR_CROSS_ENTROPY.reference, exact[0], plain.double(), target, exact[1], exact[2:])
    for mine, stock, right in zip(ours, theirs, true, strict=True):
        assert mine.dtype is stock.dtype
        assert excess(mine.detach(), right.detach(), greatest_error(stock.detach(), right.detach())) is None


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("which", FUNCTIONS)
@pytest.mark.parametrize("kind", ["scaled", "nf4", "int8"])
def test_autograd(kind, which):
    """A second backward, second derivatives, a checkpoint, tensors kept elsewhere: none of them sees the weight."""
    hidden, weight, target, _ = call(320, 64)
    weight = QUANTIZERS[kind](weight.float())
    plain = dequantized(weight).double()
    ours, stock = FUNCTIONS[which]

    def loss(x: Tensor, chunk_size: int | None = 8) -> Tensor:
        return ours(x.sin(), weight, target, chunk_size=chunk_size).square().sum()

    expected = stock(hidden.sin(), plain, target).square().sum()
    (right,) = torch.autograd.grad(expected, hidden, create_graph=True)
    value = loss(hidden)
    first, second = (torch.autograd.grad(value, hidden, retain_graph=True)[0] for _ in range(2))
    assert same_bits(first, second)
    torch.testing.assert_close(first, right.detach(), rtol=1e-6, atol=1e-7)
    (differentiable,) = torch.autograd.grad(loss(hidden), hidden, create_graph=True)
    twice = torch.autograd.grad(differentiable.square().sum(), hidden)
    torch.testing.assert_close(twice, torch.autograd.grad(right.square().sum(), hidden), rtol=1e-6, atol=1e-7)
    assert same_bits(first, torch.autograd.grad(checkpoint(loss, hidden, use_reentrant=False), hidden)[0])
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
        value = loss(hidden)
    assert same_bits(first, torch.autograd.grad(value, hidden)[0])
    (composed,) = torch.func.vjp(loss, hidden)[1](torch.ones((), dtype=torch.float64))
    torch.testing.assert_close(composed, right.detach(), rtol=1e-6, atol=1e-7)
    with backends.backend("eager"):
        torch.testing.assert_close(loss(hidden), expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(loss(hidden, None), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["scaled", "nf4"])
def test_a_call_that_is_left_alone_has_no_whole_weight(kind, monkeypatch):
    """Nor logits, however few they are."""
    monkeypatch.setattr(quantized, "BLOCK_TILE", 16)
    hidden, weight, target, _ = call(640, 64, torch.float32)
    weight = QUANTIZERS[kind](weight)
    with LargestFloating() as largest:
        functional.linear_cross_entropy(hidden[:4], weight, target[:4]).backward()
    assert largest.elements < 640 * 64 // 2 + 1


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(low):
    hidden, weight, target, bias = call(320, 64, torch.float32)
    weight, low_rank = Scaled.of(weight), adapter(ROWS, 320, 4)
    found = []
    for function, w in (
        (functional.linear_cross_entropy, weight),
        (LINEAR_CROSS_ENTROPY.reference, weight.dequantize()),
    ):
        with torch.autocast("cpu", low):
            loss = function(hidden, w, target, linear_bias=bias, low_rank=low_rank)
        found.append((loss, *torch.autograd.grad(loss, (hidden, bias, *low_rank))))
    for ours, stock in zip(*found, strict=True):
        assert ours.dtype == stock.dtype == torch.float32
        assert float((ours - stock).detach().norm() / stock.detach().norm()) < 4 * torch.finfo(low).eps


@pytest.mark.parametrize("which", ["loss", "log_prob"])
@pytest.mark.parametrize("kind", ["nf4", "int8", "torchao int8"])
def test_compiled(kind, which):
    """The graph has the chunks, and the weight dequantised once."""
    torch._dynamo.reset()
    hidden, weight, target, bias = call(320, 64, torch.float32)
    weight, low_rank = QUANTIZERS[kind](weight), adapter(ROWS, 320, 4)
    function, _ = FUNCTIONS[which]
    graphs = []

    def look(graph, example):
        graphs.append(graph.code)
        return importlib.import_module("torch._dynamo.backends.debugging").aot_eager(graph, example)

    compiled = torch.compile(function, fullgraph=True, backend=look)
    both = [answers(f, hidden, weight, target, bias, low_rank, chunk_size=8) for f in (compiled, function)]
    assert_close(*both)
    assert "fastlayers.linear_" in graphs[0]


def test_what_it_says_of_weights_without_scales():
    hidden, weight, target, _ = call(320, 64, torch.float32)
    eight = of_8_bits(weight)
    eight.SCB = None
    with pytest.raises(ValueError, match="expected a linear_weight with its scales SCB"):
        functional.linear_cross_entropy(hidden, eight, target)
    four = of_4_bits(weight)
    four.quant_state = None
    with pytest.raises(ValueError, match="expected a linear_weight with a quant_state"):
        functional.linear_log_prob(hidden, four, target)


def test_a_weight_that_trains_is_torchs():
    """A subclass that wants a gradient does what it does in a linear layer."""

    class Trained(nn.Parameter):
        def dequantize(self) -> Tensor:
            raise AssertionError

    hidden, weight, target, _ = call(320, 64, torch.float32)
    trained = weight.detach().as_subclass(Trained).requires_grad_()
    functional.linear_cross_entropy(hidden, trained, target).backward()
    weight.requires_grad_()
    F.cross_entropy(F.linear(hidden, weight), target).backward()
    assert_close(trained.grad.as_subclass(Tensor), weight.grad)

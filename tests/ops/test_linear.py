"""linear and addmm, whose bias' gradient a kernel sums, and the parts of a product. Answers are in the table of ops.

Kernels made of torch operations stand in for those of a GPU, so that autograd's part of it runs everywhere.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fastlayers
from fastlayers import backends, functional, patch_model, plan_patch
from fastlayers.ops import linear, split
from fastlayers.ops.linear import addmm
from fastlayers.patching.regions.entries import no_regions
from fastlayers.patching.runtime import calls
from tests.harness import DRAWS, PLACES, assert_close, assert_no_worse, excess, greatest_error, needs_gpu, same_bits

KERNELS = [
    pytest.param(place, marks=place.marks(), id=str(place)) for place in PLACES if place.backend in ("triton", "cuda")
]


class StandIns(SimpleNamespace):
    """The kernel in torch operations, and what it was given."""

    def __init__(self) -> None:
        super().__init__(backend="triton", given=[])

    def column_sum(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        assert x.dim() == 2
        assert x.is_contiguous()
        self.given.append((x.dtype, dtype))
        return x.sum(0, dtype=dtype)


@pytest.fixture
def kernels(monkeypatch, op_by_op) -> Iterator[StandIns]:
    """Stand-ins that serve calls of any size, in float64: float32 is torch's own."""
    found = StandIns()
    monkeypatch.setattr(linear.FAMILY, "kernels_for", lambda x: found)
    monkeypatch.setattr(linear, "LEAST", 0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield found
    torch.set_default_dtype(before)


class Calls(TorchDispatchMode):
    """The names of the operations that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name.partition("::")[2])
        return func(*args, **(kwargs or {}))


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype | None = None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, generator=generator).to(dtype or torch.get_default_dtype()).requires_grad_()
        for shape in shapes
    ]


def transposed_addmm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return addmm(bias, x, weight.t())


SPELLINGS = [
    pytest.param(functional.linear, F.linear, (6, 8), id="matrix"),
    pytest.param(functional.linear, F.linear, (2, 3, 8), id="batch"),
    pytest.param(functional.linear, F.linear, (2, 3, 4, 8), id="batch of batches"),
    pytest.param(transposed_addmm, F.linear, (6, 8), id="addmm"),
]


@pytest.mark.parametrize(("ours", "theirs", "shape"), SPELLINGS)
def test_only_the_bias_gradient_is_not_torchs(kernels, ours, theirs, shape):
    given = leaves(shape, (5, 8), (5,))
    out, expected = ours(*given), theirs(*given)
    assert same_bits(out, expected)
    assert out.stride() == expected.stride()
    dy = torch.randn_like(out)
    grads, stock = torch.autograd.grad(out, given, dy), torch.autograd.grad(expected, given, dy)
    assert all(map(same_bits, grads[:2], stock[:2]))
    assert_close(grads[2], stock[2])
    assert len(kernels.given) == 1


@pytest.mark.parametrize(("ours", "theirs", "shape"), SPELLINGS)
def test_result_may_be_written(kernels, ours, theirs, shape):
    """As one of torch's may be: ``out = linear(x); out += residual``. Autograd copies no more gradients for it."""
    given = leaves(shape, (5, 8), (5,))
    results, clones = [], []
    for function in (ours, theirs):
        out = function(*given)
        out += 1
        out.relu_()
        with Calls() as seen:
            grads = torch.autograd.grad(out.square().sum(), given)
        results.append((out, *grads))
        clones.append(seen.names.count("clone"))
    assert_close(*results)
    assert clones[0] == clones[1]


@pytest.mark.parametrize("wanted", ["x", "weight", "bias", "x weight", "weight bias", "x bias"])
def test_needs_input_grad(kernels, wanted):
    given = leaves((6, 8), (5, 8), (5,))
    for name, t in zip(("x", "weight", "bias"), given, strict=True):
        t.requires_grad_(name in wanted.split())
    out = functional.linear(*given)
    wants = [t for t in given if t.requires_grad]
    assert_close(torch.autograd.grad(out.sin().sum(), wants), torch.autograd.grad(F.linear(*given).sin().sum(), wants))
    assert len(kernels.given) == ("bias" in wanted)


@pytest.mark.parametrize(("ours", "theirs", "shape"), SPELLINGS)
def test_second_derivatives(kernels, ours, theirs, shape):
    given = leaves(shape, (5, 8), (5,), dtype=torch.float64)
    assert torch.autograd.gradgradcheck(lambda *args: ours(*args).sin(), given)


def test_gradients_that_are_not_dense(kernels):
    """An expanded or transposed gradient is left to torch's sum."""
    given = leaves((6, 8), (5, 8), (5,))
    for dy in (torch.ones(1, 1).expand(6, 5), torch.randn(5, 6).t()):
        grads = torch.autograd.grad(functional.linear(*given), given, dy)
        assert_close(grads, torch.autograd.grad(F.linear(*given), given, dy))
    assert not kernels.given


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (leaves((8,), (5, 8), (5,)), "no rows"),
        ((leaves((8, 6))[0].mT, *leaves((5, 8), (5,))), "not contiguous"),
        ((*leaves((6, 8), (5, 8)), None), "no bias"),
        (leaves((6, 8), (5, 8), (1,)), "a bias that broadcasts"),
        ((*leaves((6, 8), (5, 8)), torch.randn(5)), "frozen"),
        (leaves((6, 8), (5, 8), (5,), dtype=torch.float32), "float32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_torchs_own_call(kernels, given, why):
    def ops_of(function):
        with Calls() as ops:
            wants = [t for t in given if t is not None and t.is_leaf and t.requires_grad]
            results = (out := function(*given), *torch.autograd.grad(out.sin().sum(), wants))
        return ops.names, results

    (ours, answers), (theirs, expected) = ops_of(functional.linear), ops_of(F.linear)
    assert ours == theirs
    assert all(map(same_bits, answers, expected))
    assert not kernels.given


def test_small_results_and_no_gradient_are_torchs(kernels, monkeypatch):
    given = leaves((6, 8), (5, 8), (5,))
    with torch.no_grad():
        assert functional.linear(*given).grad_fn is None
    monkeypatch.setattr(linear, "LEAST", 31)
    functional.linear(*given).sum().backward()
    assert not kernels.given
    assert type(functional.linear(*given).grad_fn).__name__ == "AddmmBackward0"


def test_tied_and_checkpointed(kernels):
    torch.manual_seed(0)
    layer = fastlayers.FusedLinear(8, 8)
    stock = copy.deepcopy(layer)
    stock.__class__ = nn.Linear
    x = torch.randn(2, 3, 8)
    for module in (layer, stock):
        out = checkpoint(lambda x, module=module: module(module(x).relu()), x, use_reentrant=False)
        out.square().sum().backward()
    assert_close([p.grad for p in layer.parameters()], [p.grad for p in stock.parameters()])
    assert len(kernels.given) == 2


@pytest.mark.parametrize("place", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1), (3, 5), (5, 8), (257, 7), (1000, 24), (77, 1031), (4100, 96), (2, 20000), (0, 5), (5, 0)], ids=str
)
def test_column_sum(place, dtype, shape):
    """The kernel itself, of matrices that start anywhere, and the same bits each time."""
    for offset in (0, 1):
        for to in {dtype, torch.float32} - ({torch.float32} if dtype == torch.float64 else set()):
            allowed = 0.0
            for draw in range(DRAWS):
                values = torch.randn(shape[0] * shape[1] + offset, generator=torch.Generator().manual_seed(draw))
                x = values.to(place.device, dtype)[offset:].view(shape)
                exact = x.double().sum(0)
                allowed = max(allowed, greatest_error(x.sum(0, dtype=to), exact))
            with backends.backend(place.backend):
                kernel = linear.FAMILY.kernels_for(x).column_sum
            sums = kernel(x, to)
            assert sums.dtype == to
            assert same_bits(sums, kernel(x, to))
            assert excess(sums, exact, allowed) is None


# -- the parts of a product --------------------------------------------------------------------------------------------


@pytest.fixture
def gaining(monkeypatch) -> None:
    monkeypatch.setattr(split, "_gains", lambda x, count: True)


def timm(product: Tensor, unbind=torch.unbind) -> tuple[Tensor, ...]:
    """As timm's Attention takes query, key and value apart."""
    return unbind(product.reshape(2, 5, 3, 4, 8).permute(2, 0, 3, 1, 4), 0)


PARTS = [
    pytest.param(lambda x: calls.unbind(x, 1), lambda x: x.unbind(1), (4, 3, 8), id="unbind"),
    pytest.param(lambda x: timm(x, calls.unbind), timm, (2, 5, 96), id="timm"),
    pytest.param(lambda x: calls.chunk(x, 3, -1), lambda x: x.chunk(3, -1), (2, 5, 24), id="chunk"),
    pytest.param(lambda x: calls.chunk(x, 3, 1), lambda x: x.chunk(3, 1), (2, 7, 4), id="uneven chunk"),
    pytest.param(lambda x: calls.split(x, 8, 2), lambda x: x.split(8, 2), (2, 5, 24), id="split"),
    pytest.param(lambda x: calls.split(x, [16, 8, 1], 2), lambda x: x.split([16, 8, 1], 2), (2, 5, 25), id="sizes"),
    pytest.param(lambda x: calls.split(x.mT, 8, 1), lambda x: x.mT.split(8, 1), (2, 5, 24), id="transposed"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("ours", "theirs", "shape"), PARTS)
def test_parts(gaining, ours, theirs, shape, dtype):
    """The views of torch, and its gradient to the bit, in the layout of the product."""
    (product,) = leaves(shape, dtype=dtype)
    for layout in (lambda t: t, lambda t: t.mT.contiguous().mT, lambda t: t[:1].expand_as(t)):
        got = {}
        for function in (ours, theirs):
            parts = function(product * 1)
            dys = [layout(torch.sin(part.detach().float()).to(dtype)) for part in parts]
            got[function] = parts, torch.autograd.grad(parts, product, dys)[0]
        assert [part.stride() for part in got[ours][0]] == [part.stride() for part in got[theirs][0]]
        assert all(map(same_bits, got[ours][0], got[theirs][0]))
        assert same_bits(got[ours][1], got[theirs][1])
        assert {type(part.grad_fn).__name__ for part in got[ours][0]} == {"_PartsBackward"}


def test_parts_are_views(gaining):
    (product,) = leaves((2, 5, 96))
    made = product * 1
    parts = timm(made, calls.unbind)
    assert [part.data_ptr() for part in parts] == [part.data_ptr() for part in timm(made)]


def test_gradients_of_parts_are_written_once(gaining):
    """Three copies into one buffer, which the permute and the reshape hand on as it is."""
    (product,) = leaves((2, 5, 96))
    parts = timm(product, calls.unbind)
    dys = [torch.randn(2, 5, 4, 8).transpose(1, 2) for _ in parts]
    with Calls() as ops:
        (dx,) = torch.autograd.grad(parts, product, dys)
    assert ops.names.count("copy_") == 3
    assert not {"stack", "cat", "clone", "add", "select_backward"} & set(ops.names)
    assert dx.is_contiguous()


@pytest.mark.parametrize(("ours", "theirs", "shape"), PARTS)
def test_parts_without_gradient(gaining, ours, theirs, shape):
    (product,) = leaves(shape)
    for used in range(2):
        grads = [torch.autograd.grad(f(product)[used].sin().sum(), product)[0] for f in (ours, theirs)]
        assert same_bits(*grads)


@pytest.mark.parametrize(("ours", "theirs", "shape"), PARTS)
def test_second_derivatives_of_parts(gaining, ours, theirs, shape):
    (product,) = leaves(shape, dtype=torch.float64)
    assert torch.autograd.gradgradcheck(lambda x: [part.sin() for part in ours(x)], product, fast_mode=True)


@pytest.mark.parametrize(("ours", "theirs", "shape"), PARTS)
def test_parts_may_not_be_written(gaining, ours, theirs, shape):
    """Nor may torch's, where a gradient is wanted; with none they may."""
    (product,) = leaves(shape)
    for function in (ours, theirs):
        with pytest.raises(RuntimeError, match="modified inplace"):
            function(product * 1)[0].add_(1)
        with pytest.raises(RuntimeError, match="modified inplace"):
            function(product * 1)[0].view_as(function(product)[0]).add_(1)
        with torch.no_grad():
            made = product * 1
            function(made)[0].zero_()
        assert (made == 0).any()


def test_parts_of_what_is_not_dense(gaining):
    (product,) = leaves((2, 5, 24))
    for x in (product[..., ::2], product[:1].expand(2, 5, 24)):
        assert type(calls.chunk(x, 3, -1)[0].grad_fn).__name__ == "SplitBackward0"


def test_small_parts_are_torchs():
    (product,) = leaves((2, 5, 24))
    assert type(calls.split(product, 8, 2)[0].grad_fn).__name__ == "SplitBackward0"
    with pytest.raises(IndexError):
        calls.unbind(product, 5)


def test_words():
    x = torch.empty(4, 64, dtype=torch.bfloat16)
    assert split._in_words(x)
    assert split._in_words(x[:, 8:24])
    assert split._in_words(x[1].expand(4, 64))
    assert not split._in_words(x[:, 4:20])
    assert not split._in_words(x[:, :4])
    assert not split._in_words(x.mT)
    assert not split._in_words(torch.empty(4, 12, dtype=torch.bfloat16)[:, :8])


# -- in patched models -------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Attention as timm writes it."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, C))


def both(model: nn.Module, *inputs: Tensor) -> None:
    """A patched copy gives the results and gradients of the model."""
    patched, answers = patch_model(copy.deepcopy(model)), []
    for module in (patched, model):
        out = module(*inputs)
        answers.append((out, torch.autograd.grad(out.sin().sum(), list(module.parameters()))))
    assert_close(*answers)


def test_patched_attention(kernels, gaining):
    model = Attention()
    report = plan_patch(model)
    assert report.counts() == {"Linear": 2, "split": 1}
    both(model, torch.randn(2, 5, 32))
    assert len(kernels.given) == 2


def test_conv1d_of_gpt2(kernels):
    conv = pytest.importorskip("transformers.pytorch_utils").Conv1D(24, 8)
    nn.init.normal_(conv.bias)
    assert dict(plan_patch(conv)[""].fused) == {"linear": 1}
    both(conv, torch.randn(2, 5, 8))
    assert len(kernels.given) == 1


def test_linear_functions(kernels):
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(5, 8)), nn.Parameter(torch.randn(5))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight, self.bias) + F.linear(x, self.weight)

    block = Block()
    assert dict(plan_patch(block)[""].fused) == {"linear": 1}
    both(block, torch.randn(2, 3, 8))
    assert len(kernels.given) == 1


def test_which_layers_are_swapped():
    """Those of exactly the class, with a bias: others gain nothing, or are somebody's own."""

    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False), Own(4, 4))
    nn.utils.parametrizations.weight_norm(added := nn.Linear(4, 4))
    model.append(added)
    report = patch_model(model)
    assert [repr(layer).partition("(")[0] for layer in report] == ["FusedLinear", "Linear", "Own", "ParametrizedLinear"]
    rows = plan_patch(model)
    assert [rows[name].reason.name for name in ("1", "2", "3")] == ["SAVES_NOTHING", "SUBCLASS", "PARAMETRIZED"]


# -- a vocabulary of which a row is no whole number of words -----------------------------------------------------------


@pytest.mark.parametrize("features", [4100, 4098, 4097, 4103])
@pytest.mark.parametrize("shape", [(1, 16), (3, 16), (2, 5, 16), (5, 4, 16)])
@pytest.mark.parametrize("bias", [True, False])
def test_odd_product(features, shape, bias):
    """As many as words have columns of different rows begin a word, whatever the number of rows."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(shape), torch.randn(features, 16), torch.randn(features) if bias else None
    assert_no_worse(linear.odd_product(x, weight, bias), F.linear, x, weight, bias)
    x, _ = x.transpose(0, 1).contiguous().transpose(0, 1), x
    assert_no_worse(linear.odd_product(x, weight, bias), F.linear, x, weight, bias)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize(("features", "bias"), [(50257, False), (30522, True), (4100, True)])
def test_an_odd_vocabulary(features, bias, autocast, dtype, monkeypatch):
    """A head is as near to float64 as torch's, in a patched model too, and so are its gradients."""
    torch.manual_seed(0)
    head = nn.Linear(256, features, bias=bias, device="cuda", dtype=torch.float32 if autocast else dtype)
    monkeypatch.setattr(linear, "ODD_LEAST", 512 * 256 * features)
    x = torch.randn(3, 200, 256, device="cuda", dtype=torch.float32 if autocast else dtype)
    exact = copy.deepcopy(head).double()(x.double())
    patched = patch_model(nn.Sequential(copy.deepcopy(head)))
    assert isinstance(patched[0], fastlayers.FusedLinear)
    taken, product = [], linear.odd_product
    monkeypatch.setattr(linear, "odd_product", lambda *args: taken.append(len(args)) or product(*args))
    with torch.autocast("cuda", dtype, enabled=autocast):
        with torch.no_grad():
            ours, theirs = patched(x), head(x)
        assert taken == [3]
        assert (ours.dtype, ours.stride()) == (theirs.dtype, theirs.stride())
        assert excess(ours, exact, greatest_error(theirs, exact)) is None
        with torch.inference_mode(), no_regions():  # A call that is recorded runs twice.
            assert same_bits(patched(x), ours)
            assert same_bits(patched(x[:1, :8]), head(x[:1, :8]))
    assert taken == [3, 3]

    def answer(module: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        x = x.detach().requires_grad_()
        out = module(x)
        return out, *torch.autograd.grad(out.float().sin().sum(), [x, *module.parameters()])

    with torch.autocast("cuda", dtype, enabled=autocast), no_regions():
        ours, theirs = answer(patched, x), answer(head, x)
    assert taken == [3, 3, 3]
    for mine, stock, true in zip(ours, theirs, answer(copy.deepcopy(head).double(), x.double()), strict=True):
        assert (mine.dtype, mine.stride()) == (stock.dtype, stock.stride())
        assert excess(mine.detach(), true.detach(), greatest_error(stock.detach(), true.detach())) is None


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_of_an_odd_product(bias):
    torch.manual_seed(0)
    x, weight = torch.randn(6, 8).double().requires_grad_(), torch.randn(11, 8).double().requires_grad_()
    bias = torch.randn(11).double().requires_grad_() if bias else None
    assert torch.autograd.gradcheck(linear._OddProduct.apply, (x, weight, bias, None))
    assert torch.autograd.gradgradcheck(linear._OddProduct.apply, (x, weight, bias, None))


@pytest.mark.parametrize("shape", [(6, 8), (2, 3, 8)])
@pytest.mark.parametrize("served", [True, False])
def test_an_odd_result_can_be_overwritten(shape, served, monkeypatch):
    """As that of torch can, and the kernel sums the gradient of what was written."""
    monkeypatch.setattr(linear, "_is_odd", lambda *args: True)
    kernels = SimpleNamespace(column_sum=lambda dy, dtype: dy.sum(0).to(dtype))
    monkeypatch.setattr(linear, "_kernels_for", lambda *args: kernels if served else None)
    torch.manual_seed(0)
    x, weight, bias = (t.requires_grad_() for t in (torch.randn(shape), torch.randn(11, 8), torch.randn(11)))
    answers = []
    for function in (functional.linear, F.linear):
        out = function(x, weight, bias).mul_(2)
        answers.append([out, *torch.autograd.grad(out.sin().sum(), [x, weight, bias])])
    for ours, theirs in zip(*answers, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_which_heads_are_swapped():
    """Those for which the product is faster, also without a bias."""
    layers = [nn.Linear(8, 4099, bias=False), nn.Linear(8, 4096, bias=False), nn.Linear(12, 4099, bias=False)]
    report = plan_patch(nn.Sequential(*layers))
    assert [row.fused for row in report if row.fqn] == [(("odd_linear", 1),), (), ()]
    head = patch_model(nn.Sequential(layers[0]))[0]
    x = torch.randn(600, 8)
    assert same_bits(head(x), layers[0](x))  # On a CPU it is torch's own.
    with torch.no_grad():
        assert same_bits(functional.linear(x, head.weight), F.linear(x, head.weight))
        assert same_bits(functional.linear(x, head.weight[0]), F.linear(x, head.weight[0]))


@needs_gpu
@pytest.mark.parametrize("autocast", [False, True])
def test_attention_on_a_gpu(autocast):
    """At a size that engages all of it, against float64."""
    torch.manual_seed(0)
    model, x = Attention(256, 4).cuda(), torch.randn(16, 256, 256, device="cuda")
    exact, patched = copy.deepcopy(model).double(), patch_model(copy.deepcopy(model))

    def answer(module: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        out = module(x)
        return out, *torch.autograd.grad(out.float().sin().sum(), list(module.parameters()))

    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        ours, theirs = answer(patched, x), answer(model, x)
    assert "_PartsBackward" in {type(t[0].grad_fn).__name__ for t in [calls.chunk(patched.qkv(x), 3, -1)]}
    for mine, stock, true in zip(ours, theirs, answer(exact, x.double()), strict=True):
        assert excess(mine.detach(), true.detach(), greatest_error(stock.detach(), true.detach())) is None

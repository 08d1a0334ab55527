"""linear_topk, linear_argmax, linear_accuracy: values, order, gradients, memory, graphs, transforms, and the kernel."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastlayers import backends, functional
from fastlayers.ops import head, linear_topk
from tests import draw
from tests.harness import DEVICES, assert_no_worse, same_bits
from tests.ops.heads import Largest, inputs, planned

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
#: With Triton's interpreter the kernel serves CPU tensors where it is asked for.
BACKENDS = [None, pytest.param("triton", marks=pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1"))]


def stock(input, linear_weight, k, *, linear_bias=None, softcap=None, logit_scale=1.0, log_prob=False):
    logits = F.linear(input, linear_weight, linear_bias) * logit_scale
    if log_prob:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return (logits.log_softmax(-1) if log_prob else logits).topk(k)


def stock_accuracy(input, linear_weight, target, *, linear_bias=None, ignore_index=-100):
    hits = F.linear(input, linear_weight, linear_bias).argmax(-1) == target
    return hits[target != ignore_index].float().mean()


def distinct(rows: int, columns: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Rows and a weight whose logits are integers below 256, exact in every dtype, and all different within a row."""
    order = torch.stack([torch.randperm(columns, generator=torch.Generator().manual_seed(i)) for i in range(8)])
    hidden = F.one_hot(torch.arange(rows) % 8, 8) * torch.tensor([1, -1])[torch.arange(rows) % 2, None]
    return hidden.to(device, dtype), order.t().contiguous().to(device, dtype)


@pytest.fixture(params=BACKENDS)
def backend(request):
    with backends.backend(request.param):
        yield request.param


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"log_prob": True},
        {"logit_scale": -0.5},
        {"logit_scale": 0.25, "softcap": 30.0, "log_prob": True},
        {"softcap": 20.0},
    ],
    ids=str,
)
def test_topk(options, dtype, device, backend):
    hidden, weight = distinct(20, 211, dtype, device)
    bias = torch.full((211,), 2.0, dtype=dtype, device=device)
    for k in (1, 5, 16) if backend else (1, 2, 5, 16, 64, 100, 211):  # the interpreter takes its time
        found = functional.linear_topk(hidden, weight, k, linear_bias=bias, chunk_size=7, **options)
        expected = stock(hidden.double(), weight.double(), k, linear_bias=bias.double(), **options)
        assert isinstance(found, torch.return_types.topk)
        assert found.values.dtype is (torch.float32 if options.get("log_prob") and dtype.itemsize < 4 else dtype)
        if "softcap" not in options:  # which has equal values where it is reached
            assert torch.equal(found.indices, expected.indices)
        eps = torch.finfo(found.values.dtype).eps
        torch.testing.assert_close(found.values.double(), expected.values, rtol=2 * eps, atol=64 * eps)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 13, 50, 64, 5003])
def test_values_are_the_logits_of_their_indices(columns, dtype, device, backend):
    """Whatever the vocabulary, whose padding never wins, and however a product rounds."""
    hidden, weight, _ = (t.detach() for t in inputs(70, columns, 24, dtype, device))
    weight = -weight.abs()  # below what the padding may hold
    k = min(columns, 6)
    values, indices = functional.linear_topk(hidden.abs(), weight, k, chunk_size=32)
    assert (indices < columns).all()
    assert (indices.sort(1).values.diff(dim=1) > 0).all()
    assert (values.diff(dim=1) <= 0).all()

    def expected(hidden, weight):
        logits = F.linear(hidden, weight)
        return logits.gather(1, indices), logits.topk(k).values

    assert_no_worse((values, values), expected, hidden.abs(), weight)


def special(columns: int) -> Tensor:
    x = torch.randn(10, columns, generator=torch.Generator().manual_seed(0))
    x[1] = torch.arange(columns) % 2048
    x[2] = -torch.arange(columns)
    x[3] = 0.0
    x[3, ::2] = -0.0
    x[4, columns // 2 :: 3] = torch.nan
    x[5] = -torch.inf
    x[6, columns // 3] = torch.inf
    x[7] = -x[7].abs() - 1
    x[8, columns // 2 :] = -torch.inf
    x[9] = 1.5
    return x


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [5, 2048, 2049, 4500])
def test_special_values_of_a_chunk(columns, dtype, device, backend):
    """Ascending and descending rows, equal, infinite, missing ones and signed zeros, beside padding larger than all."""
    low = special(columns).to(device, dtype)
    padded = F.pad(low, (0, -columns % head.COLUMN_TILE), value=1e4).contiguous()
    for k in (1, 3, 16):
        if k > columns:
            continue
        values, indices = linear_topk._chunk(padded, k, 0.0, False, columns)
        expected = low.topk(k)
        assert torch.equal(values.nan_to_num(nan=9e4), expected.values.nan_to_num(nan=9e4))
        picked = low.gather(1, indices)
        assert torch.equal(values.nan_to_num(nan=9e4), picked.nan_to_num(nan=9e4))
        assert (indices.sort(1).values.diff(dim=1) > 0).all()
        if k == 1:
            assert torch.equal(indices[:, 0].cpu(), low.cpu().argmax(1))
        log_p, _ = linear_topk._chunk(padded, k, 0.0, True, columns)
        exact = low.double().log_softmax(1).topk(k).values
        limit = {torch.float64: 1e-12}.get(dtype, 1e-5)
        torch.testing.assert_close(log_p.double(), exact, rtol=limit, atol=limit, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
def test_of_equal_logits_the_first_is_the_largest(device, backend):
    hidden, weight = torch.ones(3, 8, device=device), torch.zeros(9001, 8, device=device)
    weight[[70, 4097, 9000]] = 1
    assert functional.linear_argmax(hidden, weight, chunk_size=2).tolist() == [70] * 3
    assert functional.linear_topk(hidden, weight, 1, chunk_size=2).indices.tolist() == [[70]] * 3


# ---- argmax and accuracy ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(8,), (1, 8), (20, 8), (3, 7, 8)], ids=str)
def test_argmax(shape, dtype, device, backend):
    _, weight = distinct(20, 211, dtype, device)
    hidden = F.one_hot(torch.randint(8, shape[:-1]), 8).to(device, dtype)
    found = functional.linear_argmax(hidden, weight, chunk_size=7)
    assert same_bits(found, F.linear(hidden, weight).argmax(-1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_accuracy(share, dtype, device, backend, monkeypatch):
    monkeypatch.setattr(head, "GPU_LEAST_WAITED", 0)
    hidden, weight = distinct(21, 211, dtype, device)
    hidden = hidden.view(3, 7, 8).requires_grad_()
    generator = torch.Generator().manual_seed(0)
    target = F.linear(hidden, weight).argmax(-1)
    target[torch.rand(3, 7, generator=generator).to(device) < 0.4] = 3
    target[torch.rand(3, 7, generator=generator).to(device) < share] = -1
    found = functional.linear_accuracy(hidden, weight, target, ignore_index=-1, chunk_size=5)
    assert found.dtype is torch.float32
    assert not found.requires_grad
    expected = stock_accuracy(hidden, weight, target, ignore_index=-1)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0, equal_nan=True)
    assert found.isnan() == (share == 1.0)
    alone = functional.linear_accuracy(hidden, weight, target, ignore_index=-1)
    torch.testing.assert_close(found, alone, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_without_a_label_are_left_out_of_the_product(device, monkeypatch):
    rows = planned(monkeypatch)
    hidden, weight, target = inputs(500, 1000, 8, device=device)
    target[torch.rand(500, device=device) < 0.6] = -100
    functional.linear_accuracy(hidden, weight, target, chunk_size=60)
    assert rows == [int((target != -100).sum())]


def test_a_target_that_is_no_class_is_wrong():
    hidden, weight, target = inputs(10, 7, 8)
    for chunk_size in (None, 3):
        assert functional.linear_accuracy(hidden, weight, target.fill_(7), chunk_size=chunk_size) == 0


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_logits_are_never_whole(dtype, monkeypatch):
    hidden, weight, target = inputs(2000, 1000, 8, dtype)
    calls = (
        lambda **options: functional.linear_topk(hidden.detach(), weight.detach(), 5, log_prob=True, **options),
        lambda **options: functional.linear_argmax(hidden, weight, **options),
        lambda **options: functional.linear_accuracy(hidden, weight, target, **options),
    )
    for call in calls:
        with Largest(weight.shape) as largest:
            call(chunk_size=60)
        assert 60 * 1000 <= largest.elements <= 60 * 1024
    monkeypatch.setattr(head, "CPU_LEAST", 2000 * 1000)
    for call in calls:
        with Largest(weight.shape) as largest:
            call()
        assert largest.elements < 2000 * 1000


# ---- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("log_prob", [False, True])
def test_values_have_the_gradient_of_torch(log_prob, device):
    hidden, weight, _ = inputs(20, 50, 8, torch.float64, device)
    answers = []
    for function, options in ((functional.linear_topk, {"chunk_size": 7}), (stock, {})):
        found = function(hidden, weight, 3, log_prob=log_prob, softcap=2.0, **options)
        dy = torch.linspace(-1, 1, 60, dtype=torch.float64, device=device).view(20, 3)
        answers.append((*found, *torch.autograd.grad(found.values, (hidden, weight), dy)))
    torch.testing.assert_close(*answers)


@pytest.mark.parametrize("place", range(3))
def test_whichever_tensor_needs_it(place):
    tensors = [torch.randn(*shape) for shape in ((6, 8), (13, 8), (13,))]
    tensors[place].requires_grad_()
    hidden, weight, bias = tensors
    call = {"k": 3, "linear_bias": bias, "chunk_size": 4}
    assert functional.linear_topk(hidden, weight, **call).values.requires_grad
    with torch.no_grad():
        assert not functional.linear_topk(hidden, weight, **call).values.requires_grad
    assert not functional.linear_argmax(hidden, weight, linear_bias=bias, chunk_size=4).requires_grad


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_a_forced_kernel_says_that_it_has_no_gradient():
    hidden, weight, _ = inputs(6, 13, 8)
    with backends.backend("triton"), pytest.raises(backends.BackendError, match="autograd is to record it"):
        functional.linear_topk(hidden, weight, 3)


# ---- what surrounds a call -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("compiled", ["aot_eager", "inductor"])
def test_compiles_to_one_graph(compiled, device):
    def call(hidden, weight, target):
        with torch.no_grad():
            found = functional.linear_topk(hidden, weight, 3, log_prob=True, chunk_size=7)
        return (
            *found,
            functional.linear_argmax(hidden, weight, chunk_size=7),
            functional.linear_accuracy(hidden, weight, target, chunk_size=7),
            functional.linear_topk(hidden, weight, 2, chunk_size=7).values,
        )

    hidden, weight, target = inputs(20, 50, 8, device=device)
    found, expected = torch.compile(call, fullgraph=True, backend=compiled)(hidden, weight, target), call(
        hidden, weight, target
    )  # fmt: skip
    torch.testing.assert_close(found, expected)
    assert [t.requires_grad for t in found] == [False, False, False, False, True]


@pytest.mark.parametrize("device", DEVICES)
def test_of_an_adapter(device):
    """Also where a graph keeps the chunks, and of rows with a label alone."""
    hidden, weight, target = (t.detach() for t in inputs(20, 50, 8, torch.float64, device))
    low_rank = (hidden[:, :3] * 2, weight[:, 3:6].contiguous())
    logits = hidden @ weight.t() + low_rank[0] @ low_rank[1].t()
    options = {"low_rank": low_rank, "chunk_size": 7}

    def call(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        found = functional.linear_topk(hidden, weight, 3, log_prob=True, **options)
        classes = functional.linear_argmax(hidden, weight, **options)
        return *found, classes, functional.linear_accuracy(hidden, weight, target, **options)

    target = torch.where(target % 3 == 0, -100, logits.argmax(1))
    target[1] = 0
    kept = target != -100
    values, indices = logits.log_softmax(1).topk(3)
    share = (logits.argmax(1) == target)[kept].float().mean()
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        torch.testing.assert_close(function(hidden, weight, target), (values, indices, logits.argmax(1), share))


def test_exports():
    class Head(torch.nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                values = functional.linear_topk(x, self.weight, 3, chunk_size=2).values
            return values, functional.linear_argmax(x, self.weight, chunk_size=2)

    program = torch.export.export(Head(8, 13), (torch.randn(6, 8),))
    assert not any("fastlayers" in str(node.target) for node in program.graph.nodes)


def test_transforms():
    hidden, weight, _ = (t.detach() for t in inputs(20, 50, 8, torch.float64))
    batched = hidden.view(4, 5, 8)
    expected = stock(batched, weight, 3)
    found = torch.vmap(lambda h: tuple(functional.linear_topk(h, weight, 3, chunk_size=2)))(batched)
    torch.testing.assert_close(found, tuple(expected))
    classes = torch.vmap(lambda h: functional.linear_argmax(h, weight, chunk_size=2))(batched)
    assert torch.equal(classes, expected.indices[..., 0])
    slope = torch.func.grad(lambda h: functional.linear_topk(h, weight, 2, chunk_size=2).values.sum())(hidden)
    torch.testing.assert_close(slope, torch.func.grad(lambda h: stock(h, weight, 2).values.sum())(hidden))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunk_size", [None, 7])
def test_under_autocast(chunk_size, device):
    hidden, weight, target = inputs(20, 50, 8, device=device)
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        values, _ = functional.linear_topk(hidden, weight, 3, chunk_size=chunk_size)
        log_p, _ = functional.linear_topk(hidden, weight, 3, log_prob=True, chunk_size=chunk_size)
        expected, accuracy = stock(hidden, weight, 3), stock_accuracy(hidden, weight, target)
        found = functional.linear_accuracy(hidden, weight, target, chunk_size=chunk_size)
    assert values.dtype is torch.bfloat16
    assert log_p.dtype is torch.float32
    torch.testing.assert_close(values, expected.values)
    torch.testing.assert_close(found, accuracy, rtol=0, atol=0.1)


def test_strided_and_unaligned_operands(backend):
    hidden, weight = distinct(20, 211, torch.float32, "cpu")
    expected = stock(hidden, weight, 4)
    spread = torch.empty(20, 16)[:, ::2].copy_(hidden)
    shifted = torch.empty(211 * 8 + 1)[1:].view(211, 8).copy_(weight)
    turned = weight.t().contiguous().t()
    for h, w in ((spread, weight), (hidden, shifted), (hidden, turned), (hidden[:1].expand(20, 8), weight)):
        found = functional.linear_topk(h, w, 4, chunk_size=7)
        assert torch.equal(found.indices, stock(h, w, 4).indices)
    assert torch.equal(expected.values, functional.linear_topk(spread, turned, 4, chunk_size=7).values)


def test_nothing_is_written_and_runs_agree():
    hidden, weight, _ = (t.detach() for t in inputs(200, 500, 8))
    before = hidden.clone(), weight.clone()
    first, second = (functional.linear_topk(hidden, weight, 5, log_prob=True, chunk_size=64) for _ in range(2))
    assert all(same_bits(a, b) for a, b in zip(first, second, strict=True))
    assert all(same_bits(a, b) for a, b in zip((hidden, weight), before, strict=True))


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_empty_calls(chunk_size):
    weight = torch.randn(13, 8)
    for shape in ((0, 8), (2, 0, 8)):
        values, indices = functional.linear_topk(torch.randn(shape), weight, 3, chunk_size=chunk_size)
        assert values.shape == indices.shape == (*shape[:-1], 3)
        assert functional.linear_argmax(torch.randn(shape), weight, chunk_size=chunk_size).shape == shape[:-1]
        target = torch.zeros(shape[:-1], dtype=torch.int64)
        assert functional.linear_accuracy(torch.randn(shape), weight, target, chunk_size=chunk_size).isnan()
    assert functional.linear_topk(torch.randn(4, 8), weight, 0, chunk_size=chunk_size).values.shape == (4, 0)


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"k": 14}, RuntimeError, "out of range"),
        ({"k": -1}, RuntimeError, "out of range"),
        ({"k": 1.0}, TypeError, None),
        ({"linear_weight": torch.ones(13, 9)}, RuntimeError, None),
        ({"linear_weight": torch.ones(8)}, RuntimeError, r"linear_topk\(\): expected input \(\.\.\., H\)"),
        ({"linear_bias": torch.ones(12)}, RuntimeError, None),
        ({"linear_bias": [1.0]}, TypeError, None),
        ({"input": None}, TypeError, "must be Tensor, not NoneType"),
        ({"linear_weight": "no"}, TypeError, "must be Tensor, not str"),
        ({"softcap": 0.0}, ValueError, "expected a softcap above 0 or None, but got 0.0"),
        ({"chunk_size": 0}, ValueError, "expected a chunk_size of at least 1 row or None, but got 0"),
        ({"logit_scale": "2"}, TypeError, "expected logit_scale to be a number, but got str"),
    ],
)
def test_mistakes(change, error, message, chunk_size):
    given = {"input": torch.ones(6, 8), "linear_weight": torch.ones(13, 8), "k": 3, "chunk_size": chunk_size}
    with pytest.raises(error, match=message):
        functional.linear_topk(**given | change)


def test_mistakes_of_targets():
    hidden, weight, target = inputs(6, 13, 8)
    with pytest.raises(RuntimeError, match=r"linear_accuracy\(\): expected input \(\.\.\., H\) and target"):
        functional.linear_accuracy(hidden, weight, target[:5], chunk_size=2)
    with pytest.raises(TypeError):
        functional.linear_accuracy(hidden, weight, None, chunk_size=2)  # type: ignore[arg-type]
    found = functional.linear_accuracy(hidden, weight, target.int(), chunk_size=2)
    assert found == stock_accuracy(hidden, weight, target)


def test_forced_eager():
    hidden, weight, _ = (t.detach() for t in inputs(20, 50, 8))
    with backends.backend("eager"), Largest(weight.shape) as largest:
        found = functional.linear_topk(hidden, weight, 3, chunk_size=7)
    assert largest.elements == 20 * 50
    assert all(map(same_bits, found, stock(hidden, weight, 3)))


# ---- the interpreter -------------------------------------------------------------------------------------------------


#: The interpreter computes in float32 what it reads in 16 bits.
CHOSEN = "(triton or forced_kernel) and not float16"


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="Triton interprets here already")
def test_in_the_interpreter(run_tests):
    pytest.importorskip("triton")
    run_tests([__file__], "-m", "not gpu", "-k", CHOSEN, many=draw.FEW, TRITON_INTERPRET="1")

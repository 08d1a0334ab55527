"""What holds for every loss of a head beyond the contract: memory, chunks, precision, autograd, adapters, graphs.

What a function has besides is in its own file.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fastlayers import backends, functional
from fastlayers.ops import head
from tests.harness import DEVICES, assert_close, excess, greatest_error, same_bits
from tests.ops.heads import (
    AT_ONCE,
    LOSSES,
    OF_WEIGHTS,
    PLAINEST,
    SMOOTH,
    Largest,
    Products,
    adapter,
    gradients_of,
    heads,
    inputs,
    planned,
    traced,
)
from tests.table.sample import nbytes

HALVES = [torch.bfloat16, torch.float16]
on_devices = pytest.mark.parametrize("device", DEVICES)


def each(names=LOSSES):
    return pytest.mark.parametrize("loss", [pytest.param(LOSSES[name], id=name) for name in names])


def in_float64(given):
    return [t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t for t in given]


def assert_errs_no_more(ours, stock, exact):
    for mine, theirs, true in zip(ours, stock, exact, strict=True):
        limit = greatest_error(theirs.detach(), true.detach())
        assert excess(mine.detach().to(theirs.dtype), true.detach(), limit) is None


def assert_within(ours, stock, limit):
    """In the mean."""
    for mine, theirs in zip(ours, stock, strict=True):
        assert float((mine - theirs).detach().norm() / theirs.detach().norm()) < limit


# ---- chunks ----------------------------------------------------------------------------------------------------------


@each(OF_WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_logits_are_never_whole(loss, dtype):
    """Nor more of them than a chunk has: forward, backward, the second backward of a retained graph."""
    given = loss.inputs(500, 1000, 8, dtype)
    with Largest(*(weight.shape for weight in given[1::2])) as largest:
        outs = loss.results(*given, chunk_size=60)
        for _ in range(2):
            gradients_of(outs, given[:2], retain_graph=True)
    assert 60 * 1000 <= largest.elements <= 60 * 1024


@on_devices
@each()
def test_rows_without_a_label_are_left_out_of_the_products(loss, device, monkeypatch):
    rows = planned(monkeypatch)
    given, options, kept = loss.unlabelled(loss.inputs(500, 100, 8, torch.float64, device))
    hidden = [t for t in given[::2] if t.is_floating_point()]
    with torch.no_grad():
        for t in hidden:
            t[~kept] = torch.nan
    clean = [t.detach().nan_to_num().requires_grad_(i < 2) for i, t in enumerate(given)]
    expected = loss.stock.gradients(clean, **options)
    found = loss.gradients(given, **options, chunk_size=60)
    assert rows == [int(kept.sum())] * len(rows) != []
    assert_close(found, expected)
    assert not found[-2][~kept].any()
    assert found[0].dim() == 0 or not found[0][~kept].any()


@each(AT_ONCE)
def test_without_gradient_nothing_but_the_loss_is_computed(loss):
    given = loss.inputs(500, 1000, 8, torch.float32)

    def count(*wanted: bool, grad: bool = True) -> int:
        leaves = (t.detach().requires_grad_(wants) for t, wants in zip(given[:2], wanted, strict=True))
        with torch.set_grad_enabled(grad), Products() as products:
            loss.results(*leaves, *given[2:], chunk_size=100)
        return len(products.shapes)

    logits = 5 * (len(given) // 2)  # of the student, and of a teacher
    assert count(True, True, grad=False) == logits
    assert count(False, False) == logits
    assert count(True, False) == count(False, True) == logits + 5
    assert count(True, True) == logits + 10


@each(PLAINEST)
def test_left_alone_large_calls_are_chunked(loss, monkeypatch):
    given = loss.inputs(2000, 700, 8, torch.float32)

    def largest_of(given, **options):
        with Largest(*(weight.shape for weight in given[1::2])) as largest:
            loss.results(*given, **options)
        return largest.elements

    monkeypatch.setattr(head, "CPU_LEAST", 2000 * 700)
    assert largest_of(given) < 2000 * 700
    fewer = [t if i % 2 else t[:-1] for i, t in enumerate(given)]
    assert largest_of(fewer) == 1999 * 700
    with backends.backend("eager"):  # the composition, whatever its size
        assert largest_of(given, chunk_size=10) == 2000 * 700


# ---- precision -------------------------------------------------------------------------------------------------------


@each(["cross_entropy mean", "cross_entropy sum", *(name for name in SMOOTH if "batchmean" in name)])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("chunk_size", [40, 64, 512])
def test_half_gradients_err_no_more_than_torchs(dtype, chunk_size, loss):
    """Summed in their own dtype over up to nine chunks, in float32 over more."""
    given = loss.inputs(512, 300, 64, dtype)
    ours, stock = loss.gradients(given, chunk_size=chunk_size), loss.stock.gradients(given)
    assert_errs_no_more(ours[1:], stock[1:], loss.stock.gradients(in_float64(given))[1:])


@each(["cross_entropy mean", *(name for name in SMOOTH if "batchmean" in name)])
@pytest.mark.parametrize("weighted", [False, True])
def test_float16_gradients_do_not_vanish(loss, weighted):
    """A softmax of 1e-6, divided by the number of rows, is 0 in float16; a GradScaler comes after that."""
    if weighted and loss.function is not functional.linear_cross_entropy:
        pytest.skip("it has no weights of classes")
    given, wide = (cast(loss.inputs(256, 4000, 16, torch.float16)) for cast in (tuple, in_float64))
    weight = torch.rand(4000).half() * 1000
    scaled = torch.tensor(1024.0, dtype=torch.float16)
    (out,) = loss.results(*given, chunk_size=64, **({"weight": weight} if weighted else {}))
    (exact,) = loss.stock.results(*wide, **({"weight": weight.double()} if weighted else {}))
    ours, true = torch.autograd.grad(out, given[:2], scaled), torch.autograd.grad(exact, wide[:2], scaled.double())
    assert_within([t.double() for t in ours], true, 2e-3)


@on_devices
@each(["cross_entropy mean", "cross_entropy sum", "cross_entropy none", "js batchmean", "js of logits none"])
@pytest.mark.parametrize("low", HALVES, ids=str)
def test_autocast(loss, low, device):
    """float32 parameters get float32 gradients, hidden in either dtype, inside of a region that has ended."""
    hidden, *given = loss.inputs(100, 65, 16, torch.float32, device)
    bias = torch.randn(65, device=device, requires_grad=True)
    for cast in (torch.float32, low):
        found = []
        for each_of, options in ((loss, {"chunk_size": 30}), (loss.stock, {})):
            with torch.autocast(device, low):
                outs = each_of.results(hidden.to(cast), *given, linear_bias=bias, **options)
            found.append(gradients_of(outs, (hidden, given[0], bias)))
        assert {t.dtype for each_of in found for t in each_of} == {torch.float32}
        assert_within(*found, 4 * torch.finfo(low).eps)


# ---- autograd --------------------------------------------------------------------------------------------------------


@each()
def test_backward_may_be_repeated(loss):
    """The first one hands its memory out; the next ones give the same bits all the same."""
    given = loss.inputs(50, 33, 8, torch.float32)
    outs = loss.results(*given, chunk_size=16)
    dys = [torch.full_like(out, 3.0) for out in outs]
    first = torch.autograd.grad(outs, given[:2], dys, retain_graph=True)
    kept = [g.clone() for g in first]
    for g in first:
        g.zero_()  # it is the caller's
    second = torch.autograd.grad(outs, given[:2], dys, retain_graph=True)
    third = torch.autograd.grad(outs, given[:2], [2 * dy for dy in dys])
    assert all(map(same_bits, second, kept))
    assert_close(third, tuple(2 * g for g in kept))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(outs, given[:2], dys)


@each(AT_ONCE)
def test_what_is_kept(loss):
    """References to the inputs and the gradients, which are the very tensors that the backward gives."""
    given = loss.inputs(50, 33, 8, torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        (out,) = loss.results(*given, chunk_size=16)
    assert sum(map(nbytes, kept)) == 2 * sum(map(nbytes, given[:2])) + sum(map(nbytes, given[2:]))
    out.backward()
    assert {t.grad.data_ptr() for t in given[:2]} <= {t.data_ptr() for t in kept}


@pytest.mark.parametrize(
    ("name", "changed"), [("cross_entropy mean", 1), ("log_prob", 1), ("kl batchmean", 1), ("kl batchmean", 3)]
)
def test_weights_changed_before_the_backward_are_noticed(name, changed):
    given = LOSSES[name].inputs(50, 33, 8, torch.float32)
    (out,) = LOSSES[name].results(*given, chunk_size=16)
    with torch.no_grad():
        given[changed].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@each(SMOOTH)
def test_second_derivatives_of_a_hidden_that_comes_from_the_weight(loss):
    """The gradient by the weight is that of the product alone; what came through hidden is added by autograd."""
    _, weight, *others = loss.inputs(20, 13, 6, torch.float64)

    def penalised(loss, **options):
        hidden = F.embedding(torch.arange(20) % 13, weight).tanh()
        total = sum(out.square().sum() for out in loss.results(hidden, weight, *others, **options))
        (g,) = torch.autograd.grad(total, weight, create_graph=True)
        return torch.autograd.grad(total + g.square().sum(), weight)

    assert_close(penalised(loss, chunk_size=7), penalised(loss.stock))


@pytest.mark.parametrize(
    ("name", "given"),
    [
        (
            "linear_cross_entropy",
            lambda: (*inputs(20, 13, 8), None, -100, 1, 0.0, 0.0, 0.0, 1.0, None, 7, None),
        ),
        (
            "linear_divergence",
            lambda: (*heads(20, 13), None, None, -100, "kl", "sum", [0.0, 1.0, 0.0, 1.0, 1.0, 0.5], None, 7, None),
        ),
    ],
)
def test_second_derivative_of_a_registered_op_raises(name, given):
    hidden, weight, *others = given()
    no_bias_and_no_adapter = (None, None, None)
    loss = getattr(torch.ops.fastlayers, name)(hidden, weight, *no_bias_and_no_adapter, *others)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, hidden, create_graph=True)


# ---- adapters --------------------------------------------------------------------------------------------------------


@on_devices
@each()
def test_adapter_beside_a_frozen_weight(loss, device):
    """As LoRA has it: values, gradients, and again through a retained graph."""
    given, options, _ = loss.unlabelled(loss.inputs(60, 77, 8, torch.float64, device))
    given[1].requires_grad_(False)
    low_rank = adapter(60, 77, 3, torch.float64, device)
    leaves, found = (given[0], *low_rank), []
    for each_of, rest in ((loss, {"chunk_size": 16}), (loss.stock, {})):
        outs = each_of.results(*given, low_rank=low_rank, **options, **rest)
        runs = [gradients_of(outs, leaves, retain_graph=True) for _ in range(2)]
        assert all(map(same_bits, *runs))
        found.append(runs[0])
    assert_close(*found)


@each(SMOOTH)
def test_second_derivatives_through_lora(loss):
    """hidden and the adapter's input come from the same leaf, and the weight is frozen."""
    given, labels, _ = loss.unlabelled(loss.inputs(20, 13, 6, torch.float64))
    x, weight, *others = given
    down = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    up = adapter(20, 13, 3, torch.float64)[1]

    def penalised(loss, **options):
        hidden = x.tanh()
        low_rank = (F.linear(hidden, down) * 2, up)
        outs = loss.results(hidden, weight.detach(), *others, low_rank=low_rank, **labels, **options)
        total = sum(out.square().sum() for out in outs)
        grads = torch.autograd.grad(total, (x, down, up), create_graph=True)
        return torch.autograd.grad(total + sum(g.square().sum() for g in grads), (x, down, up))

    assert_close(penalised(loss, chunk_size=7), penalised(loss.stock))


@on_devices
@each(name for name in LOSSES if name.startswith(("cross_entropy", "log_prob")))
@pytest.mark.parametrize("low", HALVES, ids=str)
@pytest.mark.parametrize("columns", [300, 333])
def test_float32_adapter_beside_a_16_bit_weight(columns, low, loss, device):
    """As peft has it. It errs no more than torch does on an adapter of 16 bits, and its gradients are float32."""
    hidden, weight, target = loss.inputs(256, columns, 64, low, device)
    target[::5] = -100
    given, low_rank = (hidden, weight.detach(), target), adapter(256, columns, 8, device=device)
    leaves = (hidden, *low_rank)

    def answers(loss, given, low_rank, **options):
        return loss.gradients(given, (given[0], *low_rank), low_rank=low_rank, **options)

    ours = answers(loss, given, low_rank, chunk_size=40)
    assert [g.dtype for g in ours[-3:]] == [t.dtype for t in leaves]
    stock = answers(loss.stock, given, [t.detach().to(low).requires_grad_() for t in low_rank])
    true = answers(loss.stock, in_float64(given), in_float64(low_rank))
    assert_errs_no_more(ours, stock, true)
    composed = answers(loss, given, low_rank)  # few logits, in torch ops
    assert [t.dtype for t in composed] == [t.dtype for t in ours]
    assert_within(composed, true, 4 * torch.finfo(low).eps)


@each(PLAINEST)
def test_adapters_that_do_not_fit(loss):
    given = loss.inputs(20, 13, 8, torch.float32)
    for chunk_size in (None, 4):
        for wrong in (adapter(20, 1, 4), adapter(1, 13, 4), (*adapter(20, 13, 4)[:1], torch.randn(13, 5))):
            with pytest.raises(RuntimeError):  # a sum of products would broadcast
                loss.results(*given, low_rank=wrong, chunk_size=chunk_size)
        mixed = (adapter(20, 13, 4)[0], torch.randn(13, 4, dtype=torch.float64))
        with pytest.raises(RuntimeError, match="dtype"):
            loss.results(*given, low_rank=mixed, chunk_size=chunk_size)
    with pytest.raises(TypeError, match="expected low_rank to be a pair of tensors or None, but got Tensor"):
        loss.results(*given, low_rank=torch.randn(2, 4))
    with backends.backend("cpu"), pytest.raises(backends.BackendError, match="float32 beside"):
        loss.results(*given, low_rank=adapter(20, 13, 4, torch.float64))


# ---- torch.compile ---------------------------------------------------------------------------------------------------


@on_devices
@each(["cross_entropy mean", "cross_entropy sum", "cross_entropy none", "log_prob"])
def test_compiled_graph_keeps_the_chunks_of_an_adapter(loss, device):
    hidden, weight, target = loss.inputs(50, 33, 8, torch.float32, device)
    low_rank, bias = adapter(50, 33, 4, device=device), torch.randn(33, device=device)
    compiled, graphs = traced(loss.function)
    found = [
        each_of.gradients(
            (hidden, weight.detach(), target), (hidden, *low_rank), low_rank=low_rank, linear_bias=bias, chunk_size=16
        )
        for each_of in (loss._replace(function=compiled), loss)
    ]
    assert_close(*found)
    assert f"fastlayers.{loss.function.__name__}" in graphs[0]


OPTIONS = {
    functional.linear_cross_entropy: {"label_smoothing": 0.1, "z_loss": 0.1},
    functional.linear_log_prob: {"softcap": 4.0},
    functional.linear_divergence: {"beta": 0.3, "temperature": 1.5, "softcap": 4.0},
}


@on_devices
@each(name for name in LOSSES if name.startswith(("cross", "log", "js")))
def test_compiled_graph_keeps_the_chunks(loss, device):
    given, options, _ = loss.unlabelled(loss.inputs(50, 33, 8, torch.float32, device))
    options |= {"linear_bias": torch.randn(33, device=device), **OPTIONS[loss.function]}
    compiled, graphs = traced(loss.function)
    expected = loss.stock.gradients(given, **options)
    assert_close(loss._replace(function=compiled).gradients(given, **options, chunk_size=16), expected)
    assert f"fastlayers.{loss.function.__name__}" in graphs[0]
    with torch.no_grad():
        found = loss._replace(function=compiled).results(*given, **options, chunk_size=16)
    assert_close(found, expected[: len(found)])


# ---- mistakes --------------------------------------------------------------------------------------------------------


@each(PLAINEST)
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"softcap": 0.0}, ValueError, "expected a softcap above 0 or None, but got 0.0"),
        ({"chunk_size": 0}, ValueError, "expected a chunk_size of at least 1 row or None, but got 0"),
        ({"logit_scale": "2"}, TypeError, "expected logit_scale to be a number, but got str"),
        ({"logit_scale": torch.tensor(2.0)}, TypeError, "expected logit_scale to be a number, but got Tensor"),
    ],
)
def test_options_that_are_refused(loss, options, error, message):
    with pytest.raises(error, match=rf"{loss.function.__name__}\(\): {message}"):
        loss.results(*loss.inputs(10, 7, 8, torch.float32), **options)


@each(PLAINEST[:2])
def test_a_class_that_is_none(loss):
    hidden, weight, target = loss.inputs(10, 7, 8, torch.float32)
    with pytest.raises(IndexError, match="Target 7 is out of bounds"):
        loss.results(hidden, weight, target.fill_(7), chunk_size=4)

"""linear_divergence beyond the contract: its definitions, memory, rows without a label, autograd, graphs."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastlayers import backends, functional
from fastlayers.ops import head, quantized
from fastlayers.ops.linear_divergence import DIVERGENCES, teacher_rows
from tests.harness import DEVICES, assert_close, excess, greatest_error, same_bits
from tests.ops.test_linear_cross_entropy import Largest, adapter
from tests.ops.test_quantized import Scaled, Unsliced
from tests.table.divergences import LINEAR_DIVERGENCE
from tests.table.sample import nbytes

REDUCTIONS = ("none", "sum", "batchmean", "mean")
reference = LINEAR_DIVERGENCE.reference
each = pytest.mark.parametrize("divergence", DIVERGENCES)
on_devices = pytest.mark.parametrize("device", DEVICES)


def heads(
    rows: int, columns: int, features: int = 8, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> tuple[Tensor, ...]:
    """Hidden states and weights of a student, and of a teacher that is half as wide again."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    wide = features * 3 // 2
    student = normal(rows, features), normal(columns, features) * 0.5
    return *(t.requires_grad_() for t in student), normal(rows, wide), normal(columns, wide) * 0.5


def labels_of(rows: int, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.where(torch.rand(rows, generator=generator) < 0.6, -100, 3).to(device)


def gradients(function, given, dy=None, **options):
    return torch.autograd.grad(function(*given, **options), given[:2], dy)


# ---- definitions -----------------------------------------------------------------------------------------------------


@each
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_it_is_the_divergence_of_the_whole_logits(divergence, reduction):
    """With the conventions of kl_div_logits and js_div_logits; each divergence by its own words."""
    given = heads(40, 77)
    temperature, beta, labels = 1.7, 0.3, labels_of(40)
    options = {"reduction": reduction, "temperature": temperature}
    s, t = F.linear(*given[:2]), F.linear(*given[2:])
    q, p = ((logits / temperature).softmax(-1) for logits in (s, t))
    if divergence == "kl":
        expected = functional.kl_div_logits(s, t, labels=labels, **options)
    elif divergence == "reverse_kl":
        expected = functional.kl_div_logits(t, s, labels=labels, **options)
    elif divergence == "js":
        expected = functional.js_div_logits(s, t, labels=labels, beta=beta, **options)
    else:
        rows = 0.5 * (p - q).abs().sum(-1) if divergence == "tv" else 1 - F.cosine_similarity(s, t)
        rows = rows.where(labels != -100, 0)
        count = (labels != -100).sum()
        expected = {
            "none": rows, "sum": rows.sum(), "batchmean": rows.sum() / count, "mean": rows.sum() / count / 77,
        }[reduction]  # fmt: skip
    options |= {"divergence": divergence, "beta": beta, "target": labels}
    found = functional.linear_divergence(*given, **options, chunk_size=16)
    assert_close(found, expected)
    dy = torch.randn_like(found)
    assert_close(torch.autograd.grad(found, given[:2], dy), torch.autograd.grad(expected, given[:2], dy))


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_liger_jsd(beta):
    """The formulas of Liger's LigerFusedLinearJSDFunction, chunked_loss/jsd_loss.py."""
    given = heads(40, 77)
    labels = labels_of(40)
    log_q, log_p = (F.log_softmax(F.linear(*pair) / 2.0, -1) for pair in (given[:2], given[2:]))
    if beta == 0.0:
        losses = F.kl_div(log_q, log_p, reduction="none", log_target=True)
    elif beta == 1.0:
        losses = F.kl_div(log_p, log_q, reduction="none", log_target=True)
    else:
        log_m = torch.logsumexp(torch.stack([log_q + math.log(1 - beta), log_p + math.log(beta)]), 0)
        of_q, of_p = (F.kl_div(log_m, t, reduction="none", log_target=True) for t in (log_q, log_p))
        losses = beta * of_p + (1 - beta) * of_q
    counts = labels != -100
    expected = losses.sum(-1).masked_fill(~counts, 0.0).sum() / counts.sum().clamp_min(1)
    options = {"divergence": "js", "beta": beta, "temperature": 2.0, "target": labels, "chunk_size": 16}
    found = functional.linear_divergence(*given, **options)
    assert_close(found, expected)
    assert_close(*(torch.autograd.grad(loss, given[:2]) for loss in (found, expected)))


def test_liger_cosine():
    """The formula of Liger's LigerFusedLinearCosineSimilarityFunction without its beta, which is a factor."""
    given = heads(40, 77)
    s, t = (F.normalize(F.linear(*pair) / 2.0, p=2, dim=-1) for pair in (given[:2], given[2:]))
    expected = (1 - F.cosine_similarity(s, t, dim=-1)).sum() / 40
    found = functional.linear_divergence(*given, divergence="cosine", temperature=2.0, chunk_size=16)
    assert_close(found, expected)
    assert_close(*(torch.autograd.grad(loss, given[:2]) for loss in (found, expected)))


def test_liger_tvd():
    """The formula and the gradient of Liger's ops/tvd.py, whose arguments are probabilities."""
    given = heads(40, 77)
    q, p = (F.linear(*pair).softmax(-1) for pair in (given[:2], given[2:]))
    dq = torch.where(q > p, 0.5, -0.5) / 40
    found = functional.linear_divergence(*given, divergence="tv", chunk_size=16)
    assert_close(found, 0.5 * (q - p).abs().sum() / 40)
    assert_close(torch.autograd.grad(found, given[:2]), torch.autograd.grad(q, given[:2], dq))


@each
def test_log_probabilities_are_logits(divergence):
    """But for the cosine similarity, which a constant changes."""
    given = heads(40, 77)
    logits = F.linear(*given[2:])
    teacher = logits if divergence == "cosine" else logits.log_softmax(-1)
    both = [
        functional.linear_divergence(*given[:2], *of, divergence=divergence, chunk_size=16)
        for of in (given[2:], (teacher,))
    ]
    assert_close(*both)
    assert_close(*(torch.autograd.grad(loss, given[:2]) for loss in both))


# ---- chunks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given_logits", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", ["batchmean", "none"])
def test_the_logits_are_never_whole(reduction, dtype, given_logits):
    """Nor more of them than a chunk has: forward, backward, the second backward of a retained graph."""
    given = heads(500, 1000, 8, dtype)
    shapes = [given[1].shape, given[3].shape]
    if given_logits:  # without the last token of each of 20 sequences: no view of them has two dimensions
        given = (given[0].view(20, 25, 8), given[1], F.linear(*given[2:]).view(20, 25, 1000).repeat(1, 2, 1)[:, :25])
    with Largest(*shapes) as largest:
        loss = functional.linear_divergence(*given, reduction=reduction, chunk_size=60)
        for _ in range(2):
            torch.autograd.grad(loss, given[:2], torch.ones_like(loss), retain_graph=True)
    besides = given[2].numel() if given_logits else 0  # views of what was given
    assert largest.elements <= max(60 * 1024, besides)
    if not given_logits:
        assert largest.elements >= 60 * 1000


def test_given_logits_are_not_copied_as_a_whole():
    given = heads(600, 1000)[:2]
    logits = torch.randn(20, 31, 1000, dtype=torch.float64)[:, :-1]
    made = []

    class New(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.untyped_storage().data_ptr() != logits.untyped_storage().data_ptr():
                made.append(out.numel())
            return out

    hidden = given[0].view(20, 30, 8)
    with New():
        found = functional.linear_divergence(hidden, given[1], logits, chunk_size=100)
    assert max(made) <= 100 * 1024
    assert_close(found, reference(hidden, given[1], logits))


@pytest.mark.parametrize("rows", [8192, 16384, 65536])
@pytest.mark.parametrize("columns", [128256, 50257])
def test_a_chunk_is_an_eighth_of_the_logits(rows, columns):
    """The student's with the float32 sum of its weight's gradient; the teacher's has 256 rows, or an eighth of that."""
    chunks = head.plan(rows, columns, 4096, 2, None, None)
    row, teacher = 2 * head.row_length(columns), teacher_rows(chunks.most)
    assert chunks.most * row + chunks.wide * 4 * columns * 4096 <= rows * columns * 2 / 8
    assert teacher == max(256, chunks.most // 8 // 64 * 64)


@on_devices
@each
@pytest.mark.parametrize("reduction", ["batchmean", "none"])
def test_rows_without_a_label_are_left_out_of_the_products(reduction, divergence, device, monkeypatch):
    monkeypatch.setattr(head, "GPU_LEAST_WAITED", 0)
    rows: list[int] = []
    plan = head.plan
    monkeypatch.setattr(head, "plan", lambda *args: rows.append(args[0]) or plan(*args))
    given = heads(500, 100, device=device)
    labels = labels_of(500, device)
    kept = int((labels != -100).sum())
    with torch.no_grad():
        for t in (given[0], given[2]):
            t[labels == -100] = math.nan
    clean = [t.detach().nan_to_num().requires_grad_(i < 2) for i, t in enumerate(given)]
    options = {"divergence": divergence, "reduction": reduction, "target": labels}
    dy = torch.randn(500 if reduction == "none" else (), dtype=torch.float64, device=device)
    for teacher in (given[2:], (F.linear(*given[2:]),)):
        found = gradients(functional.linear_divergence, (*given[:2], *teacher), dy, **options, chunk_size=60)
        assert rows == [kept] * len(rows) != []
        assert_close(found, gradients(reference, clean, dy, **options))
        assert not found[0][labels == -100].any()


@on_devices
@each
def test_no_row_counts(divergence, device):
    given, labels = heads(20, 13, device=device), torch.full((20,), -100, device=device)
    options = {"divergence": divergence, "target": labels, "chunk_size": 7}
    mean, total = (functional.linear_divergence(*given, reduction=how, **options) for how in ("batchmean", "sum"))
    assert mean.isnan()
    assert total == 0
    assert not any(g.any() for loss in (mean, total) for g in torch.autograd.grad(loss, given[:2]))


def test_without_gradient_nothing_but_the_loss_is_computed():
    given = heads(500, 1000)
    products = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "mm" in str(function):
                products.append(function)
            return function(*args, **(kwargs or {}))

    def count(*wanted: bool, grad: bool = True) -> int:
        products.clear()
        with torch.set_grad_enabled(grad), Products():
            leaves = (t.detach().requires_grad_(wants) for t, wants in zip(given[:2], wanted, strict=True))
            functional.linear_divergence(*leaves, *given[2:], chunk_size=100)
        return len(products)

    assert count(True, True, grad=False) == 10
    assert count(False, False) == 10
    assert count(True, False) == count(False, True) == 15
    assert count(True, True) == 20


def test_left_alone_large_calls_are_chunked(monkeypatch):
    given = heads(2000, 700, dtype=torch.float32)
    shapes = [given[1].shape, given[3].shape]
    monkeypatch.setattr(head, "CPU_LEAST", 2000 * 700)
    with Largest(*shapes) as largest:
        functional.linear_divergence(*given)
    assert largest.elements < 2000 * 700
    with backends.backend("eager"), Largest(*shapes) as largest:  # the composition, whatever its size
        functional.linear_divergence(*given, chunk_size=10)
    assert largest.elements == 2000 * 700


# ---- adapters and quantised weights ----------------------------------------------------------------------------------


@on_devices
@each
@pytest.mark.parametrize("reduction", ["batchmean", "none"])
def test_a_student_with_an_adapter(reduction, divergence, device):
    """Whose head is frozen, as LoRA has it: values, gradients, and again through a retained graph."""
    given = heads(60, 77, device=device)
    given[1].requires_grad_(False)
    low_rank = adapter(60, 77, 3, torch.float64, device)
    leaves, found = (given[0], *low_rank), []
    for function, rest in ((functional.linear_divergence, {"chunk_size": 16}), (reference, {})):
        options = {"divergence": divergence, "reduction": reduction, "target": labels_of(60, device)}
        loss = function(*given, low_rank=low_rank, **options, **rest)
        dy = torch.ones_like(loss)
        grads = [torch.autograd.grad(loss, leaves, dy, retain_graph=True) for _ in range(2)]
        assert all(map(same_bits, *grads))
        found.append((loss, *grads[0]))
    assert_close(*found)


@each
@pytest.mark.parametrize("kind", [Scaled, Unsliced])
@pytest.mark.parametrize("reduction", ["batchmean", "none"])
@pytest.mark.parametrize("of_teacher", [False, True])
def test_quantised_weights(of_teacher, reduction, kind, divergence, monkeypatch):
    """Of the student, and of the teacher: values, gradients, second and repeated ones."""
    monkeypatch.setattr(quantized, "BLOCK_TILE", 16)
    hidden, weight, *teacher = (t.detach() for t in heads(40, 77))
    hidden.requires_grad_()
    weights = [kind.of(weight), kind.of(teacher[1]) if of_teacher else teacher[1]]
    plain = [t.dequantize() if isinstance(t, kind) else t for t in weights]
    low_rank = adapter(40, 77, 3, torch.float64)
    leaves, found = (hidden, *low_rank), []
    for (student, other), rest in ((weights, {"chunk_size": 16}), (plain, {"chunk_size": 16}), (weights, {})):
        options = {"divergence": divergence, "reduction": reduction, "target": labels_of(40), **rest}
        loss = functional.linear_divergence(hidden.sin(), student, teacher[0], other, low_rank=low_rank, **options)
        dy = torch.ones_like(loss)
        grads = [torch.autograd.grad(loss, leaves, dy, retain_graph=True) for _ in range(2)]
        assert all(map(same_bits, *grads))
        again = torch.autograd.grad(loss, leaves, dy, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in again), leaves)
        found.append((loss, *grads[0], *again, *second))
    assert_close(found[0], found[1])
    assert_close(found[2], found[1])


@pytest.mark.parametrize("reduction", ["batchmean", "none"])
def test_a_quantised_student_is_never_whole(reduction, monkeypatch):
    """And the weight of a quantised teacher is so once in each pass."""
    monkeypatch.setattr(quantized, "BLOCK_TILE", 16)
    hidden, weight, *teacher = (t.detach() for t in heads(300, 640, 64, torch.float32))
    student, of_teacher = Scaled.of(weight), Scaled.of(teacher[1])
    wholes = {"student": 0, "teacher": 0}
    dequantize = Scaled.dequantize

    def count(self: Scaled) -> Tensor:
        if self.shape[0] == 640:
            wholes["student" if self.shape[1] == 64 else "teacher"] += 1
        return dequantize(self)

    monkeypatch.setattr(Scaled, "dequantize", count)
    hidden.requires_grad_()
    loss = functional.linear_divergence(hidden, student, teacher[0], of_teacher, reduction=reduction, chunk_size=60)
    assert wholes == {"student": 0, "teacher": 1}
    loss.sum().backward()
    assert wholes == {"student": 0, "teacher": 1 + (reduction == "none")}


@pytest.mark.parametrize("reduction", ["batchmean", "none"])
def test_quantised_weights_in_a_graph(reduction):
    """Which has the chunks, and the weights dequantised once."""
    torch._dynamo.reset()
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="it is not installed")
    hidden, weight, *teacher = (t.detach() for t in heads(48, 320, 64, torch.float32))
    hidden.requires_grad_()
    weights = [bitsandbytes.nn.Params4bit(t, requires_grad=False).to("cpu") for t in (weight, teacher[1])]
    low_rank, found = adapter(48, 320, 4), []
    compiled = torch.compile(functional.linear_divergence, fullgraph=True, backend="aot_eager")
    for function in (compiled, functional.linear_divergence):
        given, options = (hidden, weights[0], teacher[0], weights[1]), {"low_rank": low_rank, "reduction": reduction}
        loss = function(*given, **options, chunk_size=8)
        found.append((loss, *torch.autograd.grad(loss, (hidden, *low_rank), torch.ones_like(loss))))
    assert_close(*found)


# ---- precision -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("divergence", ["kl", "reverse_kl", "js", "cosine"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("chunk_size", [40, 64, 512])
def test_half_gradients_err_no_more_than_torchs(dtype, chunk_size, divergence):
    """Summed in their own dtype over up to nine chunks, in float32 over more."""
    given = heads(512, 300, 64, dtype)
    exact = [t.detach().double().requires_grad_(i < 2) for i, t in enumerate(given)]
    options = {"divergence": divergence, "reduction": "sum"}
    ours = gradients(functional.linear_divergence, given, **options, chunk_size=chunk_size)
    stock = gradients(reference, given, **options)
    true = gradients(reference, exact, **options)
    for mine, theirs, right in zip(ours, stock, true, strict=True):
        assert excess(mine, right, greatest_error(theirs, right)) is None


@pytest.mark.parametrize("divergence", ["kl", "reverse_kl", "js", "cosine"])
def test_float16_gradients_do_not_vanish(divergence):
    """A softmax of 1e-6, divided by the number of rows, is 0 in float16; a GradScaler comes after that."""
    given = heads(256, 4000, 16, torch.float16)
    exact = [t.detach().double().requires_grad_(i < 2) for i, t in enumerate(given)]
    scaled = torch.tensor(1024.0, dtype=torch.float16)
    ours = gradients(functional.linear_divergence, given, scaled, divergence=divergence, chunk_size=64)
    true = gradients(reference, exact, scaled.double(), divergence=divergence)
    for mine, right in zip(ours, true, strict=True):
        assert float((mine.double() - right).norm() / right.norm()) < 2e-3


@on_devices
@each
@pytest.mark.parametrize("given_logits", [False, True])
def test_teacher_of_another_dtype(given_logits, divergence, device):
    """Its products are made in that; given logits are read in it. The result has the wider of the two."""
    given = heads(40, 77, dtype=torch.float32, device=device)
    teacher = tuple(t.bfloat16() for t in given[2:])
    teacher = (F.linear(*teacher),) if given_logits else teacher
    for student in (given[:2], tuple(t.detach().half().requires_grad_() for t in given[:2])):
        found = []
        for function, rest in ((functional.linear_divergence, {"chunk_size": 16}), (reference, {})):
            loss = function(*student, *teacher, divergence=divergence, temperature=0.7, reduction="none", **rest)
            found.append((loss, *torch.autograd.grad(loss, student, torch.ones_like(loss))))
        assert found[0][0].dtype == torch.float32
        for ours, stock in zip(*found, strict=True):
            assert ours.dtype == stock.dtype
            assert float((ours - stock).detach().norm() / stock.detach().norm()) < 4 * torch.finfo(torch.bfloat16).eps


# ---- autograd --------------------------------------------------------------------------------------------------------


@each
@pytest.mark.parametrize("reduction", ["batchmean", "none"])
def test_backward_may_be_repeated(reduction, divergence):
    """The first one hands its memory out; the next ones give the same bits all the same."""
    given = heads(50, 33, dtype=torch.float32)
    loss = functional.linear_divergence(*given, divergence=divergence, reduction=reduction, chunk_size=16)
    dy = torch.full_like(loss, 3.0)
    first = torch.autograd.grad(loss, given[:2], dy, retain_graph=True)
    kept = [g.clone() for g in first]
    for g in first:
        g.zero_()  # it is the caller's
    second = torch.autograd.grad(loss, given[:2], dy, retain_graph=True)
    assert all(map(same_bits, second, kept))
    third = torch.autograd.grad(loss, given[:2], 2 * dy)
    assert_close(third, tuple(2 * g for g in kept))


def test_what_is_kept():
    given = heads(50, 33)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        loss = functional.linear_divergence(*given, chunk_size=16)
    assert sum(map(nbytes, kept)) == 2 * sum(map(nbytes, given[:2])) + sum(map(nbytes, given[2:]))
    loss.backward()
    assert {given[0].grad.data_ptr(), given[1].grad.data_ptr()} <= {t.data_ptr() for t in kept}


@pytest.mark.parametrize("changed", [1, 3])
def test_weights_changed_before_the_backward_are_noticed(changed):
    given = heads(50, 33)
    loss = functional.linear_divergence(*given, chunk_size=16)
    with torch.no_grad():
        given[changed].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("divergence", ["kl", "reverse_kl", "js", "cosine"])
@pytest.mark.parametrize("reduction", ["batchmean", "none"])
def test_second_derivatives_of_a_hidden_that_comes_from_the_weight(reduction, divergence):
    _, weight, *teacher = heads(20, 13, 6)

    def penalised(function, **options):
        hidden = F.embedding(torch.arange(20) % 13, weight).tanh()
        given = (hidden, weight, *teacher)
        loss = function(*given, divergence=divergence, reduction=reduction, temperature=1.5, **options).square().sum()
        (g,) = torch.autograd.grad(loss, weight, create_graph=True)
        return torch.autograd.grad(loss + g.square().sum(), weight)

    assert_close(penalised(functional.linear_divergence, chunk_size=7), penalised(reference))


@each
@pytest.mark.parametrize("position", [2, 3])
def test_a_teacher_that_requires_a_gradient_gets_it(position, divergence):
    """From the composition; in a graph too."""
    given = heads(20, 13)
    given[position].requires_grad_()
    leaves = [t for t in given if t.requires_grad]
    for function in (functional.linear_divergence, torch.compile(functional.linear_divergence, backend="aot_eager")):
        both = [
            f(*given, divergence=divergence, **rest) for f, rest in ((function, {"chunk_size": 7}), (reference, {}))
        ]
        assert_close(*(torch.autograd.grad(loss, leaves) for loss in both))
    with torch.no_grad():
        assert_close(functional.linear_divergence(*given, chunk_size=7), reference(*given))


@on_devices
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("reduction", ["batchmean", "none"])
@pytest.mark.parametrize("given_logits", [False, True])
def test_autocast(given_logits, reduction, low, device):
    """float32 parameters get float32 gradients, hidden in either dtype, inside of a region that has ended."""
    *student, hidden, weight = heads(100, 65, 16, torch.float32, device)
    bias = torch.randn(65, device=device, requires_grad=True)
    teacher = (F.linear(hidden, weight).to(low),) if given_logits else (hidden, weight)
    leaves = (*student, bias)
    for cast in (torch.float32, low):
        found = []
        for function, options in ((functional.linear_divergence, {"chunk_size": 30}), (reference, {})):
            with torch.autocast(device, low):
                given = (student[0].to(cast), student[1], teacher[0].to(cast), *teacher[1:])
                loss = function(*given, linear_bias=bias, reduction=reduction, divergence="js", **options)
            found.append((loss, *torch.autograd.grad(loss, leaves, torch.ones_like(loss))))
        for ours, stock in zip(*found, strict=True):
            assert ours.dtype == stock.dtype == torch.float32
            assert float((ours - stock).detach().norm() / stock.detach().norm()) < 4 * torch.finfo(low).eps


# ---- torch.compile and the registered ops ----------------------------------------------------------------------------


@on_devices
@pytest.mark.parametrize("reduction", ["batchmean", "none"])
@pytest.mark.parametrize("given_logits", [False, True])
def test_compiled_graph_keeps_the_chunks(given_logits, reduction, device):
    torch._dynamo.reset()
    given = heads(50, 33, dtype=torch.float32, device=device)
    given = (*given[:2], F.linear(*given[2:])) if given_logits else given
    options = {
        "divergence": "js", "beta": 0.3, "reduction": reduction, "temperature": 1.5, "softcap": 4.0,
        "linear_bias": torch.randn(33, device=device), "target": labels_of(50, device),
    }  # fmt: skip
    graphs = []

    def look(graph, example):
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(graph.code)
        return aot_eager(graph, example)

    compiled = torch.compile(functional.linear_divergence, fullgraph=True, backend=look)
    loss, expected = compiled(*given, **options, chunk_size=16), reference(*given, **options)
    dy = torch.randn_like(loss)
    assert_close(loss, expected)
    assert_close(*(torch.autograd.grad(out, given[:2], dy) for out in (loss, expected)))
    assert "fastlayers.linear_divergence" in graphs[0]
    with torch.no_grad():
        assert_close(compiled(*given, **options, chunk_size=16), expected)


@on_devices
@pytest.mark.parametrize("reduction", ["none", "batchmean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_opcheck(reduction, dtype, device):
    hidden, weight, *teacher = (t.detach() for t in heads(20, 13, dtype=dtype, device=device))
    numbers = [0.0, 1.0, 2.0, 0.5, 1.5, 0.3]
    rest = (numbers, None, 7, None, [True, True, False, False, True])
    names = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic", "test_autograd_registration")
    low_rank = (t.detach() for t in adapter(20, 13, 4, dtype, device))
    tensors = (hidden, weight, None, *low_rank, *teacher, None, labels_of(20, device))
    op = torch.ops.fastlayers.linear_divergence_forward.default
    torch.library.opcheck(op, (*tensors, -100, "js", reduction, *rest), test_utils=names)
    if reduction == "none":
        op = torch.ops.fastlayers.linear_divergence_backward.default
        dy = torch.ones(20, device=device, dtype=dtype)
        torch.library.opcheck(op, (dy, *tensors, -100, "js", *rest))


def test_second_derivative_of_the_registered_op_raises():
    hidden, weight, *teacher = heads(20, 13)
    numbers = [0.0, 1.0, 0.0, 1.0, 1.0, 0.5]
    given = (hidden, weight, None, None, None, *teacher, None, None, -100, "kl", "sum", numbers, None, 7, None)
    loss = torch.ops.fastlayers.linear_divergence(*given)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, hidden, create_graph=True)


# ---- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"divergence": "hellinger"}, ValueError, "expected divergence to be one of kl, .*, but got 'hellinger'"),
        ({"reduction": "average"}, ValueError, "expected reduction to be one of none, .*, but got 'average'"),
        ({"softcap": 0.0}, ValueError, "expected a softcap above 0 or None, but got 0.0"),
        ({"target_softcap": -1.0}, ValueError, "expected a target_softcap above 0 or None, but got -1.0"),
        ({"chunk_size": 0}, ValueError, "expected a chunk_size of at least 1 row or None, but got 0"),
        ({"logit_scale": "2"}, TypeError, "expected logit_scale to be a number, but got str"),
        ({"target_logit_scale": None}, TypeError, "expected target_logit_scale to be a number, but got NoneType"),
        ({"temperature": 0.0}, ValueError, "expected temperature to be a positive number, but got 0.0"),
        ({"beta": 1.5}, ValueError, "expected beta to be between 0 and 1, but got 1.5"),
        (
            {"target": torch.zeros(9, dtype=torch.int64)},
            ValueError,
            r"expected a target of shape \(10,\), .* got \(9,\)",
        ),
    ],
)
def test_options_that_are_refused(options, error, message):
    with pytest.raises(error, match=rf"linear_divergence\(\): {message}"):
        functional.linear_divergence(*heads(10, 7), **options)


@pytest.mark.parametrize("chunk_size", [None, 4])
def test_teachers_that_are_refused(chunk_size):
    given = heads(10, 7)
    with pytest.raises(RuntimeError, match=r"logits in the shape of the student's, \(10, 7\), but got \(10, 6\)"):
        functional.linear_divergence(*given[:3], given[3][:6], chunk_size=chunk_size)
    with pytest.raises(RuntimeError, match=r"but got \(10, 12\)"):
        functional.linear_divergence(*given[:3], chunk_size=chunk_size)
    with pytest.raises(ValueError, match="without one target_input is logits"):
        functional.linear_divergence(
            *given[:2], F.linear(*given[2:]), target_bias=torch.zeros(7), chunk_size=chunk_size
        )
    with pytest.raises(TypeError, match="must be Tensor, not list"):
        functional.linear_divergence(*given[:2], [1.0], chunk_size=chunk_size)

"""linear_divergence beyond test_head.py: its definitions, teachers, quantised weights."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastlayers import functional
from fastlayers.ops import head, quantized
from fastlayers.ops.linear_divergence import DIVERGENCES, teacher_rows
from tests.harness import DEVICES, assert_close, same_bits
from tests.ops.heads import Watching, adapter, heads, labels_of
from tests.ops.test_quantized import Scaled, Unsliced
from tests.table.divergences import LINEAR_DIVERGENCE

REDUCTIONS = ("none", "sum", "batchmean", "mean")
reference = LINEAR_DIVERGENCE.reference
each = pytest.mark.parametrize("divergence", DIVERGENCES)
on_devices = pytest.mark.parametrize("device", DEVICES)


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", ["batchmean", "none"])
def test_given_logits_are_not_copied_as_a_whole(reduction, dtype):
    """Without the last token of each of 20 sequences: no view of them has two dimensions."""
    hidden, weight, *_ = heads(600, 1000, dtype=dtype)
    logits = torch.randn(20, 31, 1000, dtype=dtype)[:, :-1]
    made = []

    class New(Watching):
        def see(self, function, result):
            if (
                isinstance(result, Tensor)
                and result.untyped_storage().data_ptr() != logits.untyped_storage().data_ptr()
            ):
                made.append(result.numel())

    with New():
        found = functional.linear_divergence(
            hidden.view(20, 30, 8), weight, logits, reduction=reduction, chunk_size=100
        )
        for _ in range(2):
            torch.autograd.grad(found, (hidden, weight), torch.ones_like(found), retain_graph=True)
    assert max(made) <= 100 * 1024
    if dtype is torch.float64:
        assert_close(found, reference(hidden.view(20, 30, 8), weight, logits, reduction=reduction))


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
def test_no_row_counts(divergence, device):
    given, labels = heads(20, 13, device=device), torch.full((20,), -100, device=device)
    options = {"divergence": divergence, "target": labels, "chunk_size": 7}
    mean, total = (functional.linear_divergence(*given, reduction=how, **options) for how in ("batchmean", "sum"))
    assert mean.isnan()
    assert total == 0
    assert not any(g.any() for loss in (mean, total) for g in torch.autograd.grad(loss, given[:2]))


# ---- quantised weights -----------------------------------------------------------------------------------------------


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


# ---- torch.compile and the registered ops ----------------------------------------------------------------------------


# ---- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"divergence": "hellinger"}, ValueError, "expected divergence to be one of kl, .*, but got 'hellinger'"),
        ({"reduction": "average"}, ValueError, "expected reduction to be one of none, .*, but got 'average'"),
        ({"target_softcap": -1.0}, ValueError, "expected a target_softcap above 0 or None, but got -1.0"),
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

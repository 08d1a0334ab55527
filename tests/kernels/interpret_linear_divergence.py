"""The Triton kernel of a chunk of linear_divergence in the interpreter, against float64."""

import pytest
import torch

from fastlayers.kernels import linear_divergence
from fastlayers.ops.linear_divergence import _compose_chunk_
from tests.kernels.interpreted import DTYPES, INF, NAN, largest, tolerances

TOLERANCE = tolerances(3e-6, 1e-3, 1.6e-2, 1e-12)
KINDS = list(linear_divergence.CODES)
PLAIN, ALL = (0.0, 1.0, 0.0, 1.0, 0.3), (3.0, 0.5, 2.0, 1.7, 0.3)
each = pytest.mark.parametrize("kind", KINDS)


def close(ours, exact, dtype, magnitude=0.0):
    """Within the tolerance of the largest number or, where terms cancel, of their ``magnitude``."""
    about = torch.finfo(dtype)
    atol = max(TOLERANCE[dtype] * max(magnitude, largest(exact)), about.tiny * about.eps)
    torch.testing.assert_close(ours.double(), exact, rtol=0, atol=atol, equal_nan=True)


def check(student, teacher, kind, numbers=PLAIN, labels=None, pad=3, gradients=("of each row",)):
    dtype, columns = student.dtype, student.shape[1]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    incoming = {
        "of each row": torch.randn(student.shape[0], dtype=wide),
        "of all": torch.tensor(0.3, dtype=wide).expand(len(student)),
        "none": None,
    }
    for dlosses in map(incoming.get, gradients):
        chunk = torch.nn.functional.pad(student, (0, pad), value=5.0)
        given, exact = chunk.clone(), chunk.clone().double()
        grads = None if dlosses is None else dlosses.double()
        losses = linear_divergence.divergence_chunk_(chunk, teacher, labels, dlosses, columns, -100, kind, *numbers)
        true = _compose_chunk_(exact, teacher.double(), labels, grads, columns, -100, kind, *numbers)
        assert losses.dtype == wide
        close(losses, true, wide)
        if dlosses is None:
            torch.testing.assert_close(chunk, given, rtol=0, atol=0, equal_nan=True)
        else:
            close(chunk[:, :columns], exact[:, :columns], dtype, largest(true) * largest(dlosses))
            assert not chunk[:, columns:].any()


@each
@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_options_and_a_teacher_of_another_dtype(dtype, kind):
    """Whose rows are further apart than they are long, and of an odd address."""
    teacher = torch.randn(5, 2600)[:, 3:2504]
    check(torch.randn(5, 2501).to(dtype), teacher, kind, ALL, pad=59)
    check(torch.randn(5, 2501).to(dtype), teacher.bfloat16(), kind, ALL, pad=0)


@each
@pytest.mark.parametrize("n", [9, 5001])
def test_labels(n, kind):
    student, teacher = torch.randn(5, n), torch.randn(5, n)
    labels = torch.tensor([1, -100, 0, -100, 2])
    clean = student.clone(), teacher.clone()
    student[1] = NAN  # it does not count
    teacher[3] = -INF
    check(student, teacher, kind, ALL, labels, 3, ("of each row", "of all", "none"))
    wide = torch.randn(5)
    found = [linear_divergence.divergence_chunk_(t[0].clone(), t[1], labels, wide, n, -100, kind, *PLAIN)
             for t in (clean, (student, teacher))]  # fmt: skip
    assert torch.equal(*found)
    assert not found[0][[1, 3]].any()


@each
def test_large_values(kind):
    if kind == "tv":  # signs of differences of numbers near 0 are chance
        pytest.skip("no slope to compare with")
    check(torch.randn(4, 3000) * 20 + 300, torch.randn(4, 3000) * 20 - 300, kind)


@pytest.mark.parametrize("kind", KINDS[:4])
def test_classes_without_probability(kind):
    """In both, in the student, in the teacher."""
    student, teacher = torch.randn(3, 3000), torch.randn(3, 3000)
    student[0, 1::3] = teacher[0, 1::3] = -INF
    teacher[1, 7:] = -INF
    if kind != "kl":
        student[2, 5::2] = -INF
    if kind == "reverse_kl":
        teacher[1] = 1.0
    check(student, teacher, kind)


@each
@pytest.mark.parametrize("value", [NAN, INF])
def test_rows_that_are_nan(kind, value):
    """Of the student's or the teacher's, and no others."""
    student, teacher = torch.randn(3, 300), torch.randn(3, 300)
    student[0, 5] = teacher[1, 7] = value
    chunk = student.clone()
    losses = linear_divergence.divergence_chunk_(chunk, teacher, None, torch.ones(3), 300, -100, kind, *PLAIN)
    assert losses.isnan().tolist() == [True, True, False]
    assert chunk.isnan().any(1).tolist() == [True, True, False]

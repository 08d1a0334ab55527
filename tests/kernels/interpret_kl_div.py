"""The Triton kernels of the divergences in the interpreter, against float64."""

import itertools
from functools import partial

import pytest
import torch

from fastlayers.kernels import kl_div
from fastlayers.ops import reference
from tests.kernels.interpreted import INF, NAN, assert_near, largest, leaf, tolerances

close = partial(assert_near, tolerances(2e-6, 1e-3, 1.6e-2, 1e-13))


def rows_and_gradients(student, teacher, labels, beta, temperature, dlosses):
    leaves = [leaf(t) for t in (student, teacher)]
    rows = reference.divergence(*leaves, labels, -100, beta, temperature, False, "none")
    return rows.detach(), torch.autograd.grad(rows, leaves, dlosses.double())


def check(student, teacher, beta=0.0, temperature=1.0, labels=None, dlosses=None):
    dtype = student.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    dlosses = torch.randn(student.shape[0], dtype=wide) if dlosses is None else dlosses
    exact, gradients = rows_and_gradients(student, teacher, labels, beta, temperature, dlosses)
    losses, stats = kl_div.divergence_forward(student, teacher, labels, -100, beta, temperature)
    assert stats.shape == (student.shape[0], 6)
    close(losses, exact, wide)
    args = (dlosses, student, teacher, labels, -100, beta, temperature, stats)
    ours = kl_div.divergence_backward(*args, True, True)
    for mine, true in zip(ours, gradients, strict=True):
        close(mine, true, dtype, largest(exact) * largest(dlosses))  # from differences to the loss
    alone = kl_div.divergence_backward(*args, True, False), kl_div.divergence_backward(*args, False, True)
    assert torch.equal(alone[0][0], ours[0])
    assert torch.equal(alone[1][1], ours[1])
    assert alone[0][1].numel() == alone[1][0].numel() == 0


@pytest.mark.parametrize("beta", [0.0, 0.5])
@pytest.mark.parametrize("n", [9, 5001])
def test_labels_and_one_gradient_for_all(n, beta):
    student, teacher = torch.randn(5, n), torch.randn(5, n)
    labels = torch.tensor([1, -100, 0, -100, 2])
    student[1] = NAN  # it does not count
    teacher[3] = -INF
    check(student, teacher, beta, 1.0, labels)
    check(student, teacher, beta, 1.0, labels, torch.tensor(0.3).expand(5))


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_large_values(beta):
    check(torch.randn(4, 3000) * 100 + 300, torch.randn(4, 3000) * 100 - 300, beta)


ROWS = [
    ([NAN, 1.0], [0.0, 1.0]),
    ([0.0, 1.0], [NAN, 1.0]),
    ([INF, 1.0], [0.0, 1.0]),
    ([0.0, 1.0], [INF, 1.0]),
    ([-INF, 1.0], [0.0, 1.0]),
    ([0.0, 1.0], [-INF, 1.0]),
    ([-INF, 1.0], [-INF, 2.0]),
    ([-INF, -INF], [0.0, 1.0]),
    ([0.0, 1.0], [-INF, -INF]),
    ([-1e38, 1.0], [-1e38, 2.0]),
]


@pytest.mark.parametrize("beta", [0.0, 0.5])
@pytest.mark.parametrize("n", [2, 70, 2100])
def test_nan_and_infinities(n, beta):
    """Where the reference has them. A row is half the one value and half the other, in both orders."""
    which = (torch.arange(n) >= n // 2).long()
    made = [
        [torch.tensor(values[::order])[which] for values in row]
        for row, order in itertools.product(ROWS, (1, -1))
    ]  # fmt: skip
    student, teacher = (torch.stack(rows) for rows in zip(*made, strict=True))
    exact, _ = rows_and_gradients(student, teacher, None, beta, 1.0, torch.ones(len(made)))
    losses, _ = kl_div.divergence_forward(student, teacher, None, -100, beta, 1.0)
    torch.testing.assert_close(losses.double(), exact, equal_nan=True, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("log_target", [False, True])
def test_kl_div_where_torch_has_nan_and_infinities(log_target):
    values = torch.tensor([0.0, -0.0, 0.5, 1.0, -0.5, INF, -INF, NAN])
    input, target = (t.flatten() for t in torch.meshgrid(values, values, indexing="ij"))
    leaves = [t.clone().requires_grad_() for t in (input, target)]
    out = torch.kl_div(*leaves, reduction=0, log_target=log_target)
    ours = kl_div.kl_div_elements(input, target, log_target, torch.float32)
    torch.testing.assert_close(ours, out.detach(), equal_nan=True)
    for dy in (torch.ones_like(input), torch.zeros_like(input)):
        expected = torch.autograd.grad(out, leaves, dy, retain_graph=True)
        ours = kl_div.kl_div_backward(dy, input, target, log_target, True, True)
        torch.testing.assert_close(ours, expected, equal_nan=True)

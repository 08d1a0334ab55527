"""The Triton kernels of a shard of the vocabulary in the interpreter, against float64."""

import pytest
import torch

from fastlayers.kernels import vocab_parallel as kernels
from fastlayers.ops import vocab_parallel as ops
from tests.kernels.interpreted import DTYPES, assert_near, tolerances

TOLERANCE = tolerances(2e-6, 1e-3, 1.6e-2, 1e-14)


def made(rows, columns, dtype):
    torch.manual_seed(0)
    target = torch.randint(3 * columns, (rows,))  # of three shards
    target[::4] = -100
    return torch.randn(rows, columns).mul(3).to(dtype), target


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 37), (3, 4096), (2, 9001)])
@pytest.mark.parametrize(("softcap", "smoothing", "z_loss"), [(0.0, 0.0, 0.0), (4.0, 0.1, 1e-2)])
def test_a_shard(monkeypatch, rows, columns, dtype, softcap, smoothing, z_loss):
    x, target = made(rows, columns, dtype)
    strided = torch.full((rows, columns + 3), torch.nan, dtype=dtype)
    strided[:, :columns] = x
    x = strided[:, :columns]
    first, options = columns, ops.Options(None, columns, -100, smoothing, softcap, z_loss)
    # Of all classes: those of this shard are a part of the sum.
    lse = torch.logsumexp(x.double(), 1) + 0.5
    share = torch.full((rows,), smoothing / (3 * columns), dtype=torch.float64) if smoothing else None
    dy = torch.linspace(-1, 1, 2 * rows, dtype=torch.float64)[::2]
    wide = torch.promote_types(dtype, torch.float32)
    found = kernels.shard(x, target, softcap, first, smoothing > 0)
    low = [None if t is None else t.to(wide) for t in (dy, lse, share)]
    gradient = ops._shard_backward(low[0], x, target, *low[1:], first, options)
    monkeypatch.setattr(ops, "_kernels", lambda rows: None)
    expected = ops._shard(x.double(), target, first, softcap, smoothing > 0)
    for mine, true in zip(found, expected, strict=True):
        assert (mine is None) == (true is None)
        if mine is not None:
            assert_near(TOLERANCE, mine, true, mine.dtype, 1.0)
    assert gradient.is_contiguous()
    true = ops._shard_backward(dy, x.double(), target, lse, share, first, options)
    assert_near(TOLERANCE, gradient, true, dtype, 1.0)


def test_infinities_and_nan():
    x = torch.randn(4, 37)
    x[0] = -torch.inf
    x[1, 3] = torch.inf
    x[2, 5] = torch.nan
    found, _, _ = kernels.shard(x, torch.zeros(4, dtype=torch.int64), 0.0, 0, False)
    torch.testing.assert_close(found, torch.logsumexp(x, 1), equal_nan=True)

"""gather_backward: the gradient of torch.gather along the last dimension, against sums in float64."""

from __future__ import annotations

import pytest
import torch

from fastlayers import backends
from fastlayers.ops import gather
from tests.harness import needs_gpu


def kernel(x):
    with backends.backend("cuda"):
        return gather.FAMILY.kernels_for(x).gather_backward


def expected(dy, index, columns):
    """The sums, and those of magnitudes, by which rounding is measured."""
    inside = (index >= 0) & (index < columns)
    place = index.where(inside, columns)
    sums, sizes = (
        torch.zeros((*dy.shape[:-1], columns + 1), dtype=torch.float64, device=dy.device).scatter_add(-1, place, t)
        for t in (dy.double(), dy.double().abs())
    )
    return sums[..., :columns], sizes[..., :columns]


def assert_sums(dy, index, columns):
    dx = kernel(dy)(dy, index, columns)
    assert (dx.dtype, dx.shape, dx.is_contiguous()) == (dy.dtype, (*dy.shape[:-1], columns), True)
    sums, sizes = expected(dy, index, columns)
    count = max(1, dy.shape[-1])
    allowed = (
        torch.finfo(dy.dtype).eps * sums.abs()
        + count * torch.finfo(torch.promote_types(dy.dtype, torch.float32)).eps * sizes
    )
    assert ((dx.double() - sums).abs() <= allowed).all()
    assert torch.equal(dx, kernel(dy)(dy, index, columns))


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("shape", "columns"),
    [((7,), 3), ((3, 1), 1), ((2, 5, 33), 9), ((5, 3, 17, 129), 512), ((2, 40, 700), 2048), ((4, 0), 5), ((0, 4), 5)],
    ids=str,
)
def test_shapes(shape, columns, dtype):
    torch.manual_seed(0)
    dy = torch.randn(shape, device="cuda").to(dtype)
    assert_sums(dy, torch.randint(columns, shape, device="cuda"), columns)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_layouts(dtype):
    """A transposed gradient, one that starts anywhere, an expanded one, and an index that is the same for all heads."""
    torch.manual_seed(0)
    index = torch.randint(50, (1, 65, 70), device="cuda").expand(6, 65, 70)
    whole = torch.randn(6, 70, 70, device="cuda").to(dtype)
    for dy in (whole.mT[:, 3:68], whole[:, 1:66], whole[:, :1].expand(6, 65, 70), whole[::2, 2:67].repeat(2, 1, 1)):
        assert_sums(dy, index, 50)
    assert_sums(whole[:, :65], index.mT.contiguous().mT, 50)


@needs_gpu
@pytest.mark.parametrize("places", ["one", "runs", "pairs", "outside"])
def test_places_that_are_named_more_than_once(places):
    torch.manual_seed(0)
    number = torch.arange(300, device="cuda")
    row = {"one": number * 0, "runs": number // 5, "pairs": number % 16, "outside": number - 100}[places]
    dy = torch.randn(33, 300, device="cuda")
    assert_sums(dy, row.expand(33, 300), 100)


@needs_gpu
def test_what_it_does_not_take():
    dy, index = torch.randn(4, 6, device="cuda"), torch.zeros(4, 6, device="cuda", dtype=torch.int64)
    for given, message in [
        ((dy, index[:, :3], 5), "one shape"),
        ((dy, index.int(), 5), "int64, but got Int"),
        ((dy, index, 9999), "9999"),
        ((dy, index.cpu(), 5), "on x's device"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            kernel(dy)(*given)

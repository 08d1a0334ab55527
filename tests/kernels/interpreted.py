"""What the tests of the kernels in Triton's interpreter share: dtypes, layouts, and how results are judged."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton
from torch import Tensor

if not triton.knobs.runtime.interpret:
    pytest.skip("set TRITON_INTERPRET=1", allow_module_level=True)

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
INF, NAN = float("inf"), float("nan")
#: By code.
ACTIVATIONS = [
    lambda z: z,
    F.relu,
    F.silu,
    F.gelu,
    partial(F.gelu, approximate="tanh"),
    F.hardswish,
    F.relu6,
    partial(F.leaky_relu, negative_slope=0.01),
]


def tolerances(float32: float, float16: float, bfloat16: float, float64: float) -> dict[torch.dtype, float]:
    """By dtype, as shares of the largest result.

    The interpreter truncates float32 to bfloat16 where a GPU rounds: twice its epsilon.
    """
    return dict(zip(DTYPES, (float32, float16, bfloat16, float64), strict=True))


def largest(t: Tensor) -> float:
    """The largest finite magnitude in t; 0 where there is none."""
    finite = t[t.isfinite()].abs()
    return finite.max().item() if finite.numel() else 0.0


def assert_near(
    tolerance: dict[torch.dtype, float], actual: Tensor, expected: Tensor, dtype: torch.dtype, magnitude: float = 0.0,
    of: torch.dtype | None = None,
) -> None:  # fmt: skip
    """Within the tolerance (``of`` a dtype) of the largest result or, where terms cancel, of their ``magnitude``."""
    assert actual.dtype == dtype
    assert actual.shape == expected.shape
    atol = tolerance[of or dtype] * max(magnitude, largest(expected))
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=atol, equal_nan=True)


def leaf(t: Tensor | None) -> Any:
    """In float64, for the formula that judges."""
    return None if t is None else t.detach().double().requires_grad_()


def gradients(out: Tensor, leaves: list[Any], dy: Tensor) -> list[Any]:
    """Those of the leaves, None for None."""
    found = iter(torch.autograd.grad(out, [t for t in leaves if t is not None], dy.double()))
    return [None if t is None else next(found) for t in leaves]


def layout_of(t: Tensor) -> list[int]:
    """Strides of the dimensions that have more than one element; those of others mean nothing."""
    return [stride for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1]


def last(x: Tensor) -> Tensor:
    """x with its channels fastest in memory."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)

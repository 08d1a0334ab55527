"""The C++ kernels for CPU tensors: the bits that a ReLU keeps, and when an unforced call gets these kernels."""

from __future__ import annotations

import pytest
import torch
from harness import assert_close

from fastlayers import backends, functional
from fastlayers.ops import elementwise

pytestmark = pytest.mark.skipif(backends.problem("cpu") is not None, reason="csrc was not built")

ops = torch.ops.fastlayers
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LENGTHS = (1, 7, 8, 9, 15, 16, 17, 31, 33, 511, 512, 513, 527, 1040, 70_001)  # about vectors, stretches and tasks


def peculiar(n: int, dtype: torch.dtype) -> torch.Tensor:
    """Random numbers among zeros, infinities, NaNs and subnormals of both signs."""
    tiny = torch.finfo(dtype).smallest_normal / 4
    special = torch.tensor([0.0, float("inf"), float("nan"), tiny]).to(dtype)
    if dtype != torch.float64:
        special[3] = torch.tensor(tiny, dtype=torch.float64).to(dtype)
    special = torch.cat([special, special.neg()])
    x = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)
    at = torch.randperm(n, generator=torch.Generator().manual_seed(1))[: n // 2]
    x[at] = special[torch.arange(len(at)) % 8]
    return x


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", LENGTHS)
def test_bits(n, dtype):
    """Bit j of byte i is of element 8i + j, set where a ReLU keeps the element; what is past the end is clear."""
    x, y = peculiar(n, dtype), peculiar(n, dtype).flip(0)
    for kept, (out, bits) in ((x, ops.relu_add_train(x, y, None, 0.0)), (x + y, ops.add_relu_train(x, y))):
        padded = torch.zeros(8 * bits.numel(), dtype=torch.uint8)
        padded[:n] = ~(kept <= 0)
        assert torch.equal(bits, (padded.view(-1, 8) << torch.arange(8)).sum(1).to(torch.uint8))
        assert_close(out, torch.relu(x) + y if kept is x else torch.relu(x + y))
        grad = peculiar(n, dtype)
        expected = torch.where(~(kept <= 0), grad, 0.0)
        torch.testing.assert_close(ops.relu_backward(grad, bits), expected, rtol=0, atol=0, equal_nan=True)


def pair(n: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(n, dtype=dtype, requires_grad=grad), torch.ones(n, dtype=dtype, requires_grad=grad)


def rows_of(t: torch.Tensor) -> torch.Tensor:
    return t.view(-1, 256)[:, :128]


def nhwc(t: torch.Tensor) -> torch.Tensor:
    return t.view(2, 4, 128, -1).contiguous(memory_format=torch.channels_last)


INFERENCE, TRAINING = elementwise.CPU_LEAST, elementwise.CPU_LEAST_TRAINING
x, y = pair(2 * INFERENCE)
FAST = {
    "float32": pair(INFERENCE),
    "bfloat16": pair(INFERENCE, torch.bfloat16),
    "float64": pair(INFERENCE, torch.float64),
    "channels_last": (nhwc(x), nhwc(y)),
    "training": pair(TRAINING, grad=True),
}
SLOW = {
    "small": pair(INFERENCE - 1),
    "small training": pair(TRAINING - 1, grad=True),
    "float16": pair(INFERENCE, torch.float16),
    "slices": (rows_of(x), rows_of(y)),
    "mixed layouts": (nhwc(x).contiguous(), nhwc(y)),
}


def kernels_called(function, *args) -> set[str]:
    """Names of the raw ops behind a call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
        function(*args)
    return {event.name.removeprefix("fastlayers::") for event in prof.events() if event.name.startswith("fastlayers::")}


@pytest.mark.parametrize("op", ["relu_add", "add_relu"])
@pytest.mark.parametrize("name", [*FAST, *SLOW])
def test_unforced_choice(op, name):
    """The kernel where it was measured faster; the kernel everywhere once it is forced."""
    args = (FAST | SLOW)[name]
    kernel = {op + "_train" if args[0].requires_grad else op}
    with backends.backend(None):
        assert kernels_called(getattr(functional, op), *args) == (kernel if name in FAST else set())
    with backends.backend("cpu"):
        assert kernels_called(getattr(functional, op), *args) == kernel


def test_mul_is_left_to_torch():
    args = pair(TRAINING, grad=True)
    with backends.backend(None):
        assert kernels_called(functional.mul, *args) == set()
    with backends.backend("cpu"):
        assert kernels_called(functional.mul, *args) == {"mul"}

"""The C++ kernels for CPU tensors: the bits that a ReLU keeps, and when an unforced call gets these kernels."""

from __future__ import annotations

import pytest
import torch

from fastlayers import backends, functional
from fastlayers.ops import bias_act, elementwise, glu, residual
from fastlayers.ops.activations import cpu_gelu_gains
from tests.harness import assert_close

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
    "float16": pair(INFERENCE, torch.float16),
    "float64": pair(INFERENCE, torch.float64),
    "channels_last": (nhwc(x), nhwc(y)),
    "training": pair(TRAINING, grad=True),
}
SLOW = {
    "small": pair(INFERENCE - 1),
    "small training": pair(TRAINING - 1, grad=True),
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


def normals(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def swiglu(n: int, dtype: torch.dtype = torch.float32) -> tuple:
    return (functional.swiglu, *normals((n,), (n,), dtype=dtype))


def biased(n: int, act: str, dtype: torch.dtype = torch.float32) -> tuple:
    return (functional.bias_act, *normals((n // 64, 64), (64,), dtype=dtype), act)


def bare(act: str) -> tuple:
    return functional.bias_act, *normals((bias_act.CPU_LEAST,)), None, act


def rotary(dtype: torch.dtype) -> tuple:
    return (functional.rotary, *normals((2, 4, 8), (2, 4, 8), (4, 8), (4, 8), dtype=dtype))


def dropout_add(n: int) -> tuple:
    return (functional.dropout_add, *normals((n,), (n,)), 0.5)


def scale_add(n: int) -> tuple:
    return (functional.scale_add, *normals((n // 64, 64), (64,), (n // 64, 64)))


#: Calls, and the kernels behind them where nobody has asked for any.
CHOICES = {
    "swiglu": (swiglu(glu.CPU_LEAST), {"gated_forward"}),
    "small swiglu": (swiglu(glu.CPU_LEAST - 1), set()),
    "swiglu of float16": (swiglu(glu.CPU_LEAST, torch.float16), {"gated_forward"}),
    "glu": ((functional.glu, *normals((2 * glu.CPU_LEAST,))), {"glu_forward"}),
    "small glu": ((functional.glu, *normals((2 * glu.CPU_LEAST - 2,))), set()),
    "gated_linear": ((functional.gated_linear, *normals((9, 64), (9, 64), (3, 64))), set()),
    "silu": (biased(bias_act.CPU_LEAST, "silu"), {"bias_act_forward"}),
    "small silu": (biased(bias_act.CPU_LEAST - 64, "silu"), set()),
    "silu of float64": (biased(bias_act.CPU_LEAST, "silu", torch.float64), set()),
    "gelu": (biased(bias_act.CPU_LEAST, "gelu"), set()),
    "gelu of bfloat16": (biased(bias_act.CPU_LEAST, "gelu", torch.bfloat16), {"bias_act_forward"}),
    "large gelu": (biased(bias_act.CPU_LEAST_GELU, "gelu"), {"bias_act_forward"}),
    "bare mish": (bare("mish"), {"bias_act_forward"}),
    "bare silu": (bare("silu"), set()),
    "rotary": (rotary(torch.float32), {"rotary"}),
    "dropout_add": (dropout_add(residual.CPU_LEAST_DROPOUT), {"dropout_add"}),
    "small dropout_add": (dropout_add(residual.CPU_LEAST_DROPOUT - 1), set()),
    "scale_add": (scale_add(residual.CPU_LEAST), {"scale_add"}),
    "small scale_add": (scale_add(residual.CPU_LEAST - 64), set()),
}


@pytest.mark.parametrize("name", CHOICES)
def test_unforced_choice_of_one_pass(name):
    (function, *args), kernels = CHOICES[name]
    if "gelu" in name and not cpu_gelu_gains():
        kernels = set()
    with backends.backend(None):
        assert kernels_called(function, *args) == kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_gradient_of_a_bias_by_columns_and_by_rows(rows, dtype):
    """Few long rows are divided into columns, others into rows; each time with sums of their own for each thread."""
    dy, x, bias = normals((rows, 100003), (rows, 100003), (100003,), dtype=dtype)
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        dx, dbias = torch.ops.fastlayers.bias_act_backward(dy, x, bias, 2, 0.0, 0.0, True)
    finally:
        torch.set_num_threads(threads)
    z = (x.double() + bias.double()).requires_grad_()
    (expected,) = torch.autograd.grad(torch.nn.functional.silu(z), z, dy.double())
    assert_close(dx, expected.to(dtype))
    assert_close(dbias, expected.sum(0).to(dtype))

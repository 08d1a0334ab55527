"""Batch norms that add a residual: programs with the sum in the norm compute what they did with two kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import _disable_current_modes

from fastlayers.ops import batch_norm, elementwise
from fastlayers.patching.fusion.sums_after_norms import with_residuals
from fastlayers.patching.program.executors import KEYS, Facts, PythonExecutor, excluding
from fastlayers.patching.program.program import Operation, Program, Value, plain_name
from fastlayers.patching.program.tape import Tape
from fastlayers.patching.regions.agreement import agree
from tests.harness import DEVICES

ops = torch.ops.fastlayers
pytestmark = pytest.mark.skipif(not hasattr(ops, "batch_norm_train"), reason="csrc is not built")


def pack(mask):
    """The elements of a dense mask in the order of memory, eight in a byte."""
    flat = mask.as_strided((mask.numel(),), (1,))
    bits = F.pad(flat, (0, -flat.numel() % 8)).view(-1, 8).to(torch.uint8)
    return (bits << torch.arange(8, dtype=torch.uint8)).sum(1).to(torch.uint8)


def finished(z, residual, act, bits):
    y = z if residual is None else z + residual
    y = y.relu() if act else y
    return y, pack(y > 0) if bits else y.new_empty(0, dtype=torch.uint8)


def train(x, running_mean, running_var, weight, bias, momentum, eps, residual, act, bits, num_batches_tracked=None):
    y, packed = finished(
        F.batch_norm(x, running_mean, running_var, weight, bias, True, momentum, eps), residual, act, bits
    )
    variance, mean = torch.var_mean(x, (0, 2, 3), correction=0)
    return y, torch.stack((mean, (variance + eps).rsqrt())), packed


def evaluate(x, running_mean, running_var, weight, bias, eps, residual, act, bits, keep):
    y, packed = finished(F.batch_norm(x, running_mean, running_var, weight, bias, eps=eps), residual, act, bits)
    return y, torch.stack((running_mean, (running_var + eps).rsqrt())) if keep else x.new_empty(0), packed


def backward(dy, x, weight, bias, stats, training, residual, bits, act, dresidual):
    dz = dy if bits is None else torch.where(elementwise.unpack_bits(bits, x.shape, x.stride()), dy, 0.0)
    mean, rstd, scale = (t.view(-1, 1, 1) for t in (*stats, weight))
    normed = (x - mean) * rstd
    dweight, dbias = (dz * normed).sum((0, 2, 3)), dz.sum((0, 2, 3))
    n = x.numel() // x.shape[1]
    of_statistics = (dbias.view(-1, 1, 1) + normed * dweight.view(-1, 1, 1)) / n if training else 0
    dx = scale * rstd * (dz - of_statistics)
    return dx, dz.clone() if dresidual else x.new_empty(0), dweight, dbias


def bias_act_(x, bias, residual, act):
    x.copy_(finished(x + bias.view(-1, 1, 1), residual, act, False)[0])


@pytest.fixture(autouse=True, scope="module")
def _references():
    """What the kernels compute, for tensors on the CPU."""
    library = torch.library.Library("fastlayers", "IMPL")
    for name, function in (
        ("batch_norm_train", train), ("batch_norm_eval", evaluate), ("batch_norm_backward", backward),
        ("channel_bias_act_", bias_act_),
    ):  # fmt: skip
        library.impl(name, function, "CPU")
    yield
    library._destroy()


def image(device, seed, **options):
    torch.manual_seed(seed)
    return torch.randn(4, 6, 5, 7).to(device, memory_format=torch.channels_last).requires_grad_(**options)


def norm(x, weight, bias, training, statistics=(None, None)):
    return batch_norm.BatchNorm.run(ops, x, None, weight, bias, *statistics, training, 0.1, 1e-5, 0, None)


def add_relu(x, y):
    return elementwise.ReLUAdd.run(ops, x, y, None, None)


def check(function, *inputs, state=()):
    """Run a call with the sum in the norm; returns the names of the operations before and after, in each direction."""
    given = [t.clone() for t in state]
    tape = Tape(inputs, state)
    wanted = [t for t in inputs if t.requires_grad]
    dys, gradients = [], []
    with tape:
        out = function(*inputs)
        results = out if isinstance(out, tuple) else (out,)
        split = len(tape.operations)
        if wanted:
            with _disable_current_modes():
                dys = [torch.randn_like(t) for t in results]
            names = [tape.protect(dy, f"g{i}") for i, dy in enumerate(dys)]
            gradients = torch.autograd.grad(results, wanted, dys)
    asked = [tape.name(g) for g in gradients]
    program = tape.program(split, [tape.name(t) for t in results], names if wanted else [], asked)
    other = with_residuals(program)
    after = [t.clone() for t in state]
    for t, value in zip(state, given, strict=True):
        t.data.copy_(value)
    run = PythonExecutor(other, Facts())
    with torch.no_grad(), excluding(KEYS):
        actual, kept = run.forward(*inputs, *tape.constants)
        found = run.backward(tuple(dys), list(kept)) if wanted else ()
    for a, b in zip((*actual, *found, *state), (*results, *gradients, *after), strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * max(1.0, b.abs().max().item()))
    return [
        [plain_name(o.function) for o in operations if not o.view]
        for p in (program, other)
        for operations in (p.forward, p.backward)
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("residual", ["x", "norm", "read again"])
def test_in_training(device, residual, relu):
    """Also where the residual is the result of another norm, of which the later one adds, and where something else
    needs the gradient of the sum."""
    x, y = image(device, 0), image(device, 1)
    weight, bias = (torch.randn(6, device=device, requires_grad=True) for _ in range(2))
    state = [torch.zeros(6, device=device), torch.ones(6, device=device)]

    def function(x, y, weight, bias, mean, variance):
        normed = norm(x, weight, bias, True, (mean, variance))
        other = norm(y, bias, weight, True) if residual == "norm" else y.sin() if residual == "read again" else y
        return add_relu(normed, other) if relu else normed + other

    forward, backward, less_forward, less_backward = check(function, x, y, weight, bias, *state, state=state)
    assert len(forward) == len(less_forward) + 1
    assert not {"add", "add_relu_train"}.intersection(less_forward)
    assert ("relu_backward" in backward) == relu
    assert "relu_backward" not in less_backward


@pytest.mark.parametrize("device", DEVICES)
def test_where_only_the_norm_needs_a_gradient(device):
    x, y = image(device, 0, requires_grad=False), image(device, 1, requires_grad=False)
    weight, bias = (torch.randn(6, device=device, requires_grad=True) for _ in range(2))
    _, _, forward, backward = check(lambda x, y, w, b: add_relu(norm(x, w, b, True), y), x, y, weight, bias)
    assert (forward, backward) == (["batch_norm_train"], ["batch_norm_backward"])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("frozen", [True, False])
def test_in_eval(device, frozen):
    """With fixed statistics, with a gradient for x and the residual or for neither."""
    x, y = image(device, 0, requires_grad=not frozen), image(device, 1, requires_grad=not frozen)
    weight, bias, mean = (torch.randn(6, device=device) for _ in range(3))
    inputs = (x, y, weight, bias, mean, torch.rand(6, device=device) + 0.5)
    _, _, forward, backward = check(lambda x, y, w, b, *s: add_relu(y, norm(x, w, b, False, s)), *inputs)
    assert forward == ["batch_norm_eval"]
    assert backward == ([] if frozen else ["batch_norm_backward"])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sum_", [add_relu, torch.add, torch.Tensor.add_])
def test_the_bias_of_a_convolution(device, sum_):
    """It is added in the memory of the convolution's result, and with it the residual."""
    x, y = image(device, 0, requires_grad=False), image(device, 1, requires_grad=False)
    weight, biases = torch.randn(6, 6, 1, 1, device=device), [torch.randn(6, device=device) for _ in range(2)]

    def function(x, y, weight, bias, other):
        z = F.conv2d(x, weight)
        ops.channel_bias_act_(z, bias, None, 0)
        shortcut = F.conv2d(y, weight)
        ops.channel_bias_act_(shortcut, other, None, 0)
        return sum_(z, shortcut).sin()

    _, _, forward, _ = check(function, x, y, weight, *biases)
    assert forward == ["convolution", "convolution", "channel_bias_act_", "channel_bias_act_", "sin"]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y, w, b: (add_relu(z := norm(x, w, b, True), y), z),
        lambda x, y, w, b: (add_relu(z := norm(x, w, b, True), y), z.sin()),
        lambda x, y, w, b: add_relu(z := norm(x, w, b, True), z.sin()) * y,
        lambda x, y, w, b: norm(x, w, b, True) + y[:, :, :1],
        lambda x, y, w, b: norm(x, w, b, True) + y.contiguous(),
        lambda x, y, w, b: norm(x, w, b, True) + y.double(),
        lambda x, y, w, b: norm(x, w, b, True).add(y, alpha=2),
        lambda x, y, w, b: norm(x, w, b, True) + 2 - y,
        lambda x, y, w, b: add_relu(norm(x, w, b, True).relu(), y),
    ],
    ids=["result", "read", "own residual", "broadcast", "layout", "dtype", "alpha", "number", "in between"],
)  # fmt: skip
def test_what_stays(function):
    """The norm's result is needed, or the kernel cannot add the other term."""
    x, y = image("cpu", 0), image("cpu", 1)
    weight, bias = (torch.randn(6, requires_grad=True) for _ in range(2))
    forward, backward, same_forward, same_backward = check(function, x, y, weight, bias)
    assert (forward, backward) == (same_forward, same_backward)


def test_what_is_written_in_between():
    """A norm may not come later where its input has changed by then."""
    x, y, weight = Value("x0"), Value("x1"), Value("x2")
    z, written, total = Value("z"), Value("y"), Value("total")
    values = {name: image("cpu", 0, requires_grad=False) for name in ("x0", "x1", "z", "y", "total")}
    values |= {"x2": torch.ones(6), "stats": torch.ones(2, 6), "bits": torch.ones(0)}
    arguments = (z, None, None, weight, None, 0.1, 1e-5, None, 0, False)
    forward = [
        Operation(torch.ops.aten.sin.default, (x,), {}, ("z",), single=True, effect=False),
        Operation(ops.batch_norm_train.default, arguments, {}, ("y", "stats", "bits"), single=False, effect=False),
        Operation(torch.ops.aten.mul_.Scalar, (z, 2), {}, ("",), single=True, effect=True),
        Operation(torch.ops.aten.add.Tensor, (written, y), {}, (total.name,), single=True, effect=False),
    ]
    program = Program(("x0", "x1", "x2"), forward, ("total",), (), (), [], (), values=values)
    assert with_residuals(program) == program
    del forward[2]
    assert len(with_residuals(replace(program, forward=forward)).forward) == 2


def test_a_few_gradients_that_are_all_or_nothing():
    """A norm rounds its result before the sum, and one that adds does not: near 0 the ReLU may let another gradient
    through. That is no reason to refuse a region; more than a few are."""
    normed, residual, dy = (torch.randn(1 << 18) for _ in range(3))
    known = dy * ((normed.bfloat16() + residual.bfloat16()) > 0)
    found = dy * ((normed + residual.bfloat16()) > 0)
    assert 0 < (known != found).sum() < 1000
    of_16_bits, of_32_bits = torch.finfo(torch.bfloat16).eps, torch.finfo(torch.float32).eps
    assert not agree([found], [known], of_16_bits)
    assert agree([found], [known], of_16_bits, kinks=True)
    assert not agree([found], [known], of_32_bits, kinks=True)
    assert not agree([dy], [known], of_16_bits, kinks=True)
    assert not agree([found.masked_fill(known == known.max(), float("nan"))], [known], of_16_bits, kinks=True)


def test_gradients_that_cancel():
    """Nothing but roundings of what they are the sums of, of which the only known ones are the gradients given."""
    rounding = torch.finfo(torch.float32).eps
    known, found = torch.tensor([1e-7, -3e-8]), torch.tensor([-1e-7, 0.0])
    assert not agree([found], [known], rounding)
    assert agree([found], [known], rounding, [torch.ones(2)])
    assert not agree([found * 100], [known], rounding, [torch.ones(2)])

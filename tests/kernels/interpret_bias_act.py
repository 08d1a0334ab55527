"""The Triton kernels of bias_act and of the gates in the interpreter, against float64."""

from functools import partial

import pytest
import torch

from fastlayers.kernels.bias_act import bias_act_backward, bias_act_forward
from fastlayers.kernels.glu import gated_backward, gated_backward_, gated_forward, glu_backward, glu_forward
from fastlayers.ops.activations import ACTIVATIONS
from tests.kernels.interpreted import DTYPES, assert_near, leaf, tolerances

assert_close = partial(assert_near, tolerances(1e-6, 1e-3, 1.6e-2, 1e-14), magnitude=1.0)
NAMES = [name for name in ACTIVATIONS if name is not None]


def check_bias_act(x, bias, name, parameters=()):
    entry, dtype = ACTIVATIONS[name], x.dtype
    first, second = (*(parameters or entry.parameters.values()), 0.0, 0.0)[:2]
    exact_x, exact_bias = leaf(x), leaf(bias)
    z = exact_x if bias is None else exact_x + exact_bias
    expected = entry.function(z, *parameters)
    out = bias_act_forward(x, bias, entry.code, first, second)
    assert_close(out, expected.detach(), dtype)
    dy = torch.randn(out.shape).to(dtype)
    dx, dbias = torch.autograd.grad(expected, (exact_x, exact_x if bias is None else exact_bias), dy.double())
    got_x, got_bias = bias_act_backward(dy, x, bias, entry.code, first, second, bias is not None)
    assert_close(got_x, dx, dtype)
    if bias is not None:
        terms = dy.double().abs().sum(tuple(range(dy.dim() - 1))).max().item()
        assert_close(got_bias, dbias, dtype, magnitude=terms)
        assert bias_act_backward(dy, x, bias, entry.code, first, second, False)[1].numel() == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_activations(name, dtype):
    x = (torch.randn(9, 33) * 3).to(dtype)
    check_bias_act(x, None, name)
    check_bias_act(x, torch.randn(33).to(dtype), name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parameters(dtype):
    x, bias = torch.randn(9, 33).to(dtype) * 3, torch.randn(33).to(dtype)
    for name, parameters in [
        ("leaky_relu", (0.3,)),
        ("elu", (0.7,)),
        ("softplus", (2.5, 3.0)),
        ("softplus", (-1.0, 9.0)),
    ]:
        check_bias_act(x, bias, name, parameters)


@pytest.mark.parametrize("shape", [(1, 1), (300, 5), (5, 300), (2050, 16), (2, 3, 130), (40,)])
def test_shapes(shape):
    check_bias_act(torch.randn(shape), torch.randn(shape[-1:]), "gelu")
    check_bias_act(torch.randn(shape).to(torch.bfloat16), None, "silu")


def test_views():
    x = torch.randn(2, 8, 6, 4)
    for view in (x.mT, x[:, 1:, :, 1:], x.to(memory_format=torch.channels_last), x[:1].expand(3, 8, 6, 4), x[..., ::2]):
        check_bias_act(view, torch.randn(view.shape[-1]), "gelu")
        check_bias_act(view, None, "mish")
        assert bias_act_forward(view, None, 3, 0.0, 0.0).stride() == torch.relu(view).stride()


def test_relu_takes_its_result():
    x, bias, dy = torch.randn(33, 20), torch.randn(20), torch.randn(33, 20)
    out = bias_act_forward(x, bias, 1, 0.0, 0.0)
    dx, dbias = bias_act_backward(dy, out, None, 1, 0.0, 0.0, True)
    assert torch.equal(dx, torch.where(x + bias > 0, dy, 0.0))
    torch.testing.assert_close(dbias, dx.sum(0))


def check_gates(gate, up, name):
    entry, dtype = ACTIVATIONS[name], gate.dtype
    exact = leaf(gate), leaf(up)
    expected = entry.function(exact[0]) * exact[1]
    out = gated_forward(gate, up, entry.code)
    assert_close(out, expected.detach(), dtype)
    assert out.stride() == (torch.relu(gate) * up).stride()
    dy = torch.randn(out.shape).to(dtype)
    gradients = gated_backward(dy, gate, up, entry.code)
    for got, true in zip(gradients, torch.autograd.grad(expected, exact, dy.double()), strict=True):
        assert_close(got, true, dtype)
    written = dy.contiguous()
    assert torch.equal(gated_backward_(written, gate, up, entry.code), gradients[1])
    assert torch.equal(written, gradients[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_gates(name, dtype):
    check_gates(torch.randn(9, 33).to(dtype), torch.randn(9, 33).to(dtype), name)


def test_gates_of_views():
    x, y = torch.randn(4, 6, 20), torch.randn(4, 6, 20)
    for gate, up in [(x.mT, y.mT), (x.mT, y.mT.contiguous()), (x[..., 1:], y[..., :-1]), (x[..., ::2], y[..., ::2])]:
        check_gates(gate, up, "silu")
    check_gates(*x.chunk(2, -1), "gelu")
    check_gates(x[:1].expand(4, 6, 20), y, "silu")
    check_gates(torch.randn(5000), torch.randn(5000), "silu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate_first", [False, True])
def test_glu(gate_first, dtype):
    x = torch.randn(4, 6, 10, 8).to(dtype)
    for view in (x, x.to(memory_format=torch.channels_last), x.mT, x[:, :, 1:, 1:7], x[:1].expand(4, 6, 10, 8)):
        for dim in (-1, 0, 1):
            exact = leaf(view)
            first, second = exact.chunk(2, dim)
            gate, up = (first, second) if gate_first else (second, first)
            expected = torch.nn.functional.silu(gate) * up
            out = glu_forward(view, dim, 2, gate_first)
            assert_close(out, expected.detach(), dtype)
            dy = torch.randn(out.shape).to(dtype)
            dx = glu_backward(dy, view, dim, 2, gate_first)
            assert_close(dx, torch.autograd.grad(expected, exact, dy.double())[0], dtype)

"""Derivatives of a recorded call, of first to third order, against autograd's own: whatever a forward does to them."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastlayers
from fastlayers.patching.program.derivative import Derivative
from fastlayers.patching.reasons import Refusal

pytestmark = [pytest.mark.cpu_kernels, pytest.mark.usefixtures("any_size")]


class Reversed(torch.autograd.Function):
    """Keeps nothing."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return -ctx.factor * dy, None


class Scaled(torch.autograd.Function):
    """Keeps tensors as attributes, also in a dict, beside those that it saves."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.exp, ctx.more = x.exp(), {"sin": [x.sin(), 2]}
        ctx.save_for_backward(x, weight)
        return ctx.exp * weight

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        return dy * ctx.exp * weight + ctx.more["sin"][0] * ctx.more["sin"][1] * x, (dy * x.exp()).sum(0)


def quantised(x, weight, table):
    """The nearest row of a table, straight through."""
    y = x @ weight
    nearest = table[(y[:, None] - table).square().sum(-1).argmin(1)]
    return y + (nearest - y).detach()


def without_grad(x, weight, table):
    y = torch.tanh(x @ weight)
    with torch.no_grad():
        scale = y.square().mean()
    return y * scale + table[0] * y.detach().exp()


def in_place(x, weight, table):
    y = (x @ weight).add_(1)
    y[:, 1:3].add_(table[0, :2])
    return torch.stack(y.sin().unbind(1), 1).sigmoid_() * table[1]


FORWARDS = {
    "straight through": quantised,
    "no_grad": without_grad,
    "in place": in_place,
    "reversed": lambda x, weight, table: Reversed.apply(torch.tanh(x @ weight), 0.5) + table.sum(0),
    "attributes of a Function": lambda x, weight, table: Scaled.apply(x @ weight, table[0]) * torch.sigmoid(table[1]),
    "dropout": lambda x, weight, table: F.dropout(torch.sin(x @ weight), 0.5) * table[2],
    "norm": lambda x, weight, table: F.layer_norm(x @ weight, (5,), table[0], table[1]).cos(),
    "constants": lambda x, weight, table: (
        (x @ weight).sin() * torch.tensor([1.0, 2, 3, 4, 5], dtype=x.dtype) + table[0]
    ),
}


class Net(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.weight, self.table = nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(3, 5))
        self.compute, self.act = FORWARDS[name], nn.GELU()

    def forward(self, x):
        return self.act(self.compute(x, self.weight, self.table))


def derivatives(model, x, change):
    """Of all orders up to the third, each of what depends on the gradient of the result, too."""
    torch.manual_seed(3)
    leaves = [x, *model.parameters()]
    y = model(x)
    change(model)
    dy = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y).requires_grad_()
    found, grads, wanted = [y], [y], [dy]
    for order in range(3):
        wanted = [torch.cos((order + 1) * t.detach()).requires_grad_() for t in grads] if order else wanted
        grads = torch.autograd.grad(grads, leaves, wanted, create_graph=True, allow_unused=True)
        found += grads
        grads = [t for t in grads if t is not None and t.requires_grad]
        leaves = [*leaves, *wanted]
        if not grads:
            break
    return found


CHANGES = {
    "nothing": lambda m: None,
    "eval": lambda m: m.eval(),
    "its function": lambda m: setattr(m, "compute", lambda x, weight, table: x @ weight),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", FORWARDS)
def test_three_orders(name, change, ran):
    stock = Net(name).double()
    patched = fastlayers.patch_model(copy.deepcopy(stock))
    x = torch.randn(6, 4, dtype=torch.double, requires_grad=True)
    for _ in range(3):
        patched(torch.randn_like(x)).sum().backward()
    assert ran
    results = [derivatives(model, x, CHANGES[change]) for model in (stock, patched)]
    torch.testing.assert_close(results[1], results[0])


def test_the_graph_goes_with_its_owner():
    x = torch.randn(3, 4, requires_grad=True)
    derivative = Derivative(lambda given: [Scaled.apply(given[0], given[0][0]).sin()], [x], [0])
    gone = weakref.ref(derivative), weakref.ref(derivative.results[0])
    values = derivative.values([x])
    (dx,) = derivative.gradients(values, [x], [True], [torch.ones(3, 4)])
    gc.disable()
    try:
        del values, dx, derivative
        assert [each() for each in gone] == [None, None]
    finally:
        gc.enable()


def test_no_result_has_a_gradient():
    x = torch.randn(3, 4, requires_grad=True)
    derivative = Derivative(lambda given: [given[0].sin(), given[0].cos()], [x], [0])
    assert derivative.gradients(derivative.values([x]), [x], [True], [None, None]) == [None]


def test_a_checkpoint_inside_is_refused():
    x = torch.randn(3, 4, requires_grad=True)
    with pytest.raises(Refusal, match="hooks on saved tensors"):
        Derivative(lambda given: [checkpoint(torch.sin, given[0], use_reentrant=False).cos()], [x], [0])


def test_an_input_that_no_derivative_needs_is_written(ran):
    """Nothing is computed from the last bias."""
    stock = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    found = []
    for model in (stock, fastlayers.patch_model(copy.deepcopy(stock))):
        x = torch.ones(2, 4, dtype=torch.double, requires_grad=True)
        for _ in range(3):
            y = model(x)
            y.sum().backward()
        y = model(x)
        with torch.no_grad():
            model[2].bias.add_(1)
        (dx,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(dx.square().sum(), [x, *model.parameters()], allow_unused=True))
    assert ran
    torch.testing.assert_close(found[1], found[0])

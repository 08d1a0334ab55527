"""Models for what people do to models, and steps of them."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from torch import nn

from fastlayers.patching import unpatch_model


class MLP(nn.Module):
    """Two linear layers around an activation, a gate and a norm: four fusions that absorb children or swap them."""

    def __init__(self, size=8):
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.up = nn.Linear(size, size)
        self.act = nn.GELU()
        self.down = nn.Linear(size, size)
        self.gate = nn.Linear(size, size)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(self.act(self.up(h))) + F.silu(self.gate(x)) * h


class Cell(nn.Module):
    """BatchNorm, a sum and an activation, in a residual block."""

    def __init__(self, size=4):
        super().__init__()
        self.conv = nn.Conv2d(size, size, 3, padding=1)
        self.bn = nn.BatchNorm2d(size)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.bn(self.conv(x))
        out += x
        return self.relu(out)


def mlp(training=False):
    torch.manual_seed(0)
    return nn.Sequential(MLP(), MLP()).train(training)


def cells(training=False):
    torch.manual_seed(0)
    return nn.Sequential(Cell(), nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU()), Cell()).train(
        training
    )


def rows():
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(1))


def images():
    return torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(1))


def step(model, x):
    """Output and gradients of a forward and a backward."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    out = model(x)
    out.square().sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return out.detach(), x.grad, grads


def same(model, stock, x):
    torch.testing.assert_close(step(model, x), step(stock, x))


def undone(model):
    """A copy that is unpatched: what a patched model must be equal to after something was done to it."""
    return unpatch_model(copy.deepcopy(model))

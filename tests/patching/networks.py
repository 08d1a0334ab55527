"""A network of blocks."""

from __future__ import annotations

import torch
from torch import nn


class Parts(nn.Module):
    """A module of the parts that it is given, and other attributes. A subclass says what its forward does with them."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


class Block(nn.Module):
    def __init__(self, inplace=True):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=inplace)

    def forward(self, x):
        """The forward of a block."""
        out = self.bn(self.conv(x))
        out += x
        return self.relu(out)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 5)
        self.soft = nn.Softmax(dim=-1)

    def forward(self, x, temperature: float = 2.0):
        return self.soft(self.fc(x.mean((2, 3))) / temperature)


class Plain(nn.Module):
    def forward(self, x):
        return x * 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = nn.Sequential(Block(), Block(inplace=False))
        self.layer2 = nn.Sequential(Block())
        self.plain = Plain()
        self.head = Head()
        self.log = nn.LogSoftmax(dim=1)

    def forward(self, x):
        return self.log(self.head(self.plain(self.layer2(self.layer1(x)))))


BLOCKS = {"layer1.0", "layer1.1", "layer2.0"}
NORMS = {f"{name}.bn" for name in BLOCKS}
ALL = BLOCKS | NORMS | {"head", "head.fc", "head.soft", "log"}


def names(report):
    return {row.fqn for row in report if row.became is not None}


def types_of(model):
    return {name: type(module) for name, module in model.named_modules()}


class Snapshot:
    """What a measurement leaves as it was: tensors, gradients, modes and classes of a model, and random numbers."""

    def __init__(self, model):
        self.tensors = model.state_dict(keep_vars=True)
        self.values = {name: t.detach().clone() for name, t in self.tensors.items()}
        self.grads = [(p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
        self.modes, self.types = [module.training for module in model.modules()], types_of(model)
        self.random = torch.get_rng_state()

    def check(self, model):
        tensors = model.state_dict(keep_vars=True)
        assert tensors.keys() == self.tensors.keys()
        assert all(t is self.tensors[name] and torch.equal(t, self.values[name]) for name, t in tensors.items())
        for p, (grad, before) in zip(model.parameters(), self.grads, strict=True):
            assert p.grad is grad
            assert grad is None or torch.equal(grad, before)
        assert self.modes == [module.training for module in model.modules()]
        assert self.types == types_of(model)
        assert torch.equal(self.random, torch.get_rng_state())

"""What the forwards of the tracing traps consist of, and how they are compared."""

from __future__ import annotations

import functools
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastlayers.patching import unpatch_model
from tests.patching.harness import written

FLAG = False
TABLE = {"on": True}
WEIGHT = torch.ones(4)


def identity_decorator(function):
    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapped


def stateful_helper(x):
    global FLAG
    FLAG = not FLAG
    return x * 2 if FLAG else x * 3


SHAPE = (3, 4)


class Config:
    def __init__(self):
        self.scale = 2.0
        self.nested = [1, 2]

    @property
    def live(self):
        return random.random()


class Base(nn.Module):
    """All that the forwards below use; each subclass has a fusable relu(x) + y somewhere."""

    constant = 3

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.relu = nn.ReLU()
        self.maybe = None
        self.norm = nn.LayerNorm(4)
        self.scale = 2.0
        self.sizes = [1, 2]
        self.options = {"a": 1}
        self.count = 0
        self.cache = []
        self.objects = [object()]
        self.config = Config()
        self.act = F.relu
        self.mode = "fast"
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.table = nn.ModuleDict({"one": nn.Linear(4, 4)})
        self.seq = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.gain = nn.Parameter(torch.ones(4))
        self.register_parameter("bias", None)
        self.register_buffer("mask", torch.ones(4))
        self.register_buffer("nothing", None)
        self.loose = torch.ones(4)
        self.child = Child()

    def method(self, x, y):
        return F.relu(x) + y * self.scale

    @property
    def prop(self):
        return self.scale * 2

    @staticmethod
    def static(x):
        return x * 3

    @classmethod
    def classy(cls, x):
        return x * cls.constant

    def forward(self, x, y):
        return F.relu(x) + y


class Child(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = 2.0

    def compute(self, x):
        return x * self.gain

    def forward(self, x):
        return None if self.gain == 0 else x * self.gain


def check(module, *args, **kwargs):
    """The patched module agrees with the unpatched one for this call, in both modes."""
    global FLAG
    cls = type(module)
    for mode in (True, False):
        results = []
        for patched in (True, False):
            if not patched:
                unpatch_model(module)
            FLAG, module.count = False, 0
            module.train(mode)
            torch.manual_seed(0)
            random.seed(0)
            results.append(attempt(module, args, kwargs))
            module.__class__ = cls
        actual, expected = results
        if isinstance(expected, type) or isinstance(actual, type):
            assert actual is expected
        else:
            torch.testing.assert_close(actual, expected, equal_nan=True)


def attempt(module, args, kwargs):
    try:
        return module(*args, **kwargs)
    except Exception as error:  # the kind of error is what is compared
        return type(error)


def forwards(expected):
    """Register a forward with the reason for which it is refused, or None where it is fused."""

    def register(cls):
        CASES.append(pytest.param(cls, expected, id=cls.__name__))
        return cls

    return register


def forwards_of(expected, scope, **bodies):
    """Registers forwards of ``x, y`` that have these bodies, by the names of their classes, in a module's ``scope``.

    A pair is that of other inputs and a body.
    """
    for name, given in bodies.items():
        inputs, body = given if isinstance(given, tuple) else ("x, y", given)
        forwards(expected)(written(Base, body, scope, inputs, name))


def named(name):
    """A module of the class that was registered by this name."""
    return next(case.values[0] for case in CASES if case.id == name)()


CASES: list = []

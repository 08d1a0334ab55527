"""How a model of a package is built: its options, and what gives its arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

from tests.corpus.models import Sample

#: The options to build a model with, and what gives the arguments, positional or by name, to call it with.
Recipe = tuple[dict[str, Any], Callable[[], Any]]


def filled(model: nn.Module) -> nn.Module:
    """The model with random weights where initialisation leaves only zeros: these hide all that comes before them."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.numel() and not parameter.any():
                parameter.normal_(0, (parameter.numel() / len(parameter)) ** -0.5)
    return model


def sample(model: nn.Module, inputs: Any) -> Sample:
    if isinstance(inputs, dict):
        return Sample(filled(model), kwargs=inputs)
    return Sample(filled(model), inputs if isinstance(inputs, tuple) else (inputs,))


def load(module: str) -> Any:
    """A module, the random numbers as they were: to import some packages draws a few."""
    with torch.random.fork_rng(devices=[]):
        return import_module(module)


def build(module: str, kind: str, options: dict[str, Any], inputs: Callable[[], Any]) -> Sample:
    """A model by the class or function ``kind`` of a module."""
    return sample(getattr(load(module), kind)(**options), inputs())


def models(package: str, module: str, recipes: dict[str, Recipe]) -> dict[str, Callable[[], Sample]]:
    """The builders of a package's models by name, where ``Kind/variant`` is of the class ``Kind``."""
    made = dict[str, Callable[[], Sample]]()
    for name, (options, inputs) in recipes.items():
        path, slash, variant = name.partition("/")
        path, _, kind = f"{module}.{path}".rpartition(".")
        made[f"{package}:{kind}{slash}{variant}"] = partial(build, path, kind, options, inputs)
    return made


def steps() -> torch.Tensor:
    return torch.tensor([3, 500])


def tokens(*size: int, high: int = 10) -> torch.Tensor:
    return torch.randint(high, size)


def volumes(size: int) -> torch.Tensor:
    return torch.randn(2, 1, size, size, size)

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


def drawn(found: Sample, name: str) -> Sample:
    """With random values in a parameter that the package leaves uninitialised."""
    nn.init.normal_(found.model.get_parameter(name))
    return found


def sample(model: nn.Module, inputs: Any, fill: bool = True) -> Sample:
    model = filled(model) if fill else model
    if isinstance(inputs, dict):
        return Sample(model, kwargs=inputs)
    return Sample(model, inputs if isinstance(inputs, tuple) else (inputs,))


def load(path: str) -> Any:
    """A module, or what ``module:name`` refers to, the random numbers as they were: to import some draws a few."""
    module, _, name = path.partition(":")
    with torch.random.fork_rng(devices=[]):
        found = import_module(module)
    return getattr(found, name) if name else found


def build(path: str, options: dict[str, Any], inputs: Callable[[], Any], fill: bool = True) -> Sample:
    """What the class or function ``module:name`` makes of the options, and the arguments of a call."""
    return sample(load(path)(**options), inputs(), fill)


def models(package: str, module: str, recipes: dict[str, Recipe], fill: bool = True) -> dict[str, Callable[[], Sample]]:
    """The builders of a package's models by name.

    ``Kind/variant`` is of the class ``Kind`` of the module, and ``function as Kind/variant`` what a function makes.
    """
    made = dict[str, Callable[[], Sample]]()
    for key, (options, inputs) in recipes.items():
        path, _, name = key.partition(" as ")
        path, _, kind = f"{module}.{path.partition('/')[0]}".rpartition(".")
        name = name or kind + "".join(key.partition("/")[1:])
        made[f"{package}:{name}"] = partial(build, f"{path}:{kind}", options, inputs, fill)
    return made


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def words(*shape: int) -> torch.Tensor:
    """Numbers of words out of 30. The first three, for padding and the like, do not occur."""
    return torch.randint(3, 30, shape)


def numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def steps() -> torch.Tensor:
    return torch.tensor([3, 500])


def tokens(*size: int, high: int = 10) -> torch.Tensor:
    return torch.randint(high, size)


def volumes(size: int) -> torch.Tensor:
    return torch.randn(2, 1, size, size, size)

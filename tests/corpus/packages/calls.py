"""Models of packages by their paths, and what they are called with."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import nn

from tests.corpus.models import Sample


def load(path: str) -> Any:
    """What ``module:name`` refers to, whose package is imported no earlier than here."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def sample(path: str, *args: Any, **options: Any) -> Sample:
    """What ``path`` refers to, made with the options, and called with the arguments."""
    return Sample(load(path)(**options), args)


def drawn(found: Sample, name: str) -> Sample:
    """With random values in a parameter that the package leaves uninitialised."""
    nn.init.normal_(found.model.get_parameter(name))
    return found


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def tokens(*shape: int) -> torch.Tensor:
    """Numbers of words out of 30. The first three, for padding and the like, do not occur."""
    return torch.randint(3, 30, shape)


def lengths(*values: int) -> torch.Tensor:
    return torch.tensor(values)

"""Models by name, for the command line: ``timm:resnet50``, ``torchvision:resnet18``, ``package.module:callable``."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from torch import nn

__all__ = ["TargetError", "default_input", "load_target"]

EXPECTED = "expected timm:NAME, torchvision:NAME or package.module:CALLABLE"


class TargetError(ValueError):
    """A target that names no model; the message says what was given and what was expected."""


def load_target(target: str) -> nn.Module:
    """The model that a target names, with random weights.

    Args:
        target: ``timm:NAME``, ``torchvision:NAME``, or ``package.module:CALLABLE`` for anything that returns a module
            (a class, a function) or is one. The current directory is searched too.

    Raises:
        TargetError: there is no such model.
    """
    package, colon, name = target.partition(":")
    if not (package and colon and name):
        raise TargetError(f"{target!r} names no model; {EXPECTED}")
    if package == "timm":
        return from_library("timm", lambda timm: timm.create_model(name, pretrained=False))
    if package == "torchvision":
        return from_library("torchvision.models", lambda models: models.get_model(name, weights=None))
    return from_callable(package, name)


def from_library(module: str, build: Any) -> nn.Module:
    package = module.partition(".")[0]
    try:
        library = importlib.import_module(module)
    except ImportError as error:
        raise TargetError(f"{package} cannot be imported ({error}); pip install {package}") from None
    try:
        model: nn.Module = build(library)
    except (RuntimeError, ValueError) as error:
        raise TargetError(f"{package} has no such model: {error}") from None
    return model


def from_callable(package: str, name: str) -> nn.Module:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(package)
    except ImportError as error:
        raise TargetError(f"cannot import {package}: {error}; {EXPECTED}") from None
    for attribute in name.split("."):
        if not hasattr(found, attribute):
            raise TargetError(f"{package} has no {name}; {EXPECTED}")
        found = getattr(found, attribute)
    if not isinstance(found, nn.Module) and callable(found):
        found = found()
    if not isinstance(found, nn.Module):
        raise TargetError(f"{package}:{name} gives a {type(found).__name__}; expected a torch.nn.Module")
    return found


def default_input(model: nn.Module) -> tuple[int, ...]:
    """Two images of the size that the model was made for, if it says one as timm's models do, else of 224 x 224."""
    configuration = getattr(model, "pretrained_cfg", None) or {}
    return (2, *configuration.get("input_size", (3, 224, 224)))

"""Helpers to run a model without a lasting change to it."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from fastlayers.patching.plan import patched
from fastlayers.patching.rewrite.classes import is_patched


def unwrap(model: nn.Module) -> tuple[nn.Module, AbstractContextManager[Any]]:
    """The model inside of DDP, DataParallel and torch.compile wrappers, and a context in which it is patched."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    while True:
        inner = model._modules.get("_orig_mod") or (
            model._modules.get("module") if type(model).__module__.startswith("torch.nn.parallel") else None
        )
        if inner is None:
            return model, nullcontext() if any(map(is_patched, model.modules())) else patched(model)
        model = inner


@contextmanager
def rng_state() -> Iterator[None]:
    """Restores the random state after a block: torch's, Python's, and NumPy's if that is loaded."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    numpy: Any = sys.modules.get("numpy")
    python, array = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        random.setstate(python)
        if numpy:
            numpy.random.set_state(array)


def seed_everything() -> None:
    """Seed all generators from which a forward may draw. VITS draws from NumPy's."""
    torch.manual_seed(0)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


@contextmanager
def standing_in(model: nn.Module, tensors: dict[str, Tensor]) -> Iterator[None]:
    """Replaces the named parameters and buffers, under all of their names, for the time of a block.

    torch.func.functional_call replaces those of a shared module twice, and then does not restore them.
    """
    named = (*model.named_parameters(), *model.named_buffers())
    stand_ins = {id(own): tensors[name] for name, own in named if name in tensors}
    registries = [registry for module in model.modules() for registry in (module._parameters, module._buffers)]
    before = [(registry, dict(registry)) for registry in registries]
    try:
        for registry, tensors_before in before:
            registry.update({name: stand_ins.get(id(own), own) for name, own in tensors_before.items()})  # type: ignore[misc]
        yield
    finally:
        for registry, tensors_before in before:
            registry.update(tensors_before)  # type: ignore[arg-type]


def buffers_aside(model: nn.Module) -> AbstractContextManager[None]:
    """Replaces buffers by copies for the time of a block, so that running statistics do not change."""
    return standing_in(model, {name: buffer.detach().clone() for name, buffer in model.named_buffers()})


def arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a model: a tensor, a sequence of positional or a mapping of keyword arguments."""
    if isinstance(example_inputs, Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, Sequence) and not isinstance(example_inputs, str):
        return tuple(example_inputs), {}
    raise TypeError(
        "example_inputs must be a tensor, a sequence of positional or a mapping of keyword arguments, got "
        f"{type(example_inputs).__name__}"
    )


def trains(model: nn.Module) -> bool:
    """Whether a step of this model has a backward."""
    return model.training and torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters())


def loss_or_outputs(result: Any) -> list[Tensor]:
    """The outputs to differentiate: ``loss`` if the model returns one, otherwise all of them."""
    loss = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    leaves = [loss] if isinstance(loss, Tensor) and loss.requires_grad else tree_flatten(result)[0]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
